"""The process whose memory is measured: ``python -m benchmarks.memory ours|plain PATH N`` does W1 and prints its peak.

The peer is imported only if it is asked for, since its imports alone take more than the rest.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import backstay
from benchmarks.workload import Conversation, State

Save = Callable[[State], object]


def peak_mb() -> float:
    """Return the most memory this process ever had; unlike ru_maxrss it starts anew with the program."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("no VmHWM in /proc/self/status")


def run(kind: str, path: Path, count: int) -> dict[str, float]:
    """Do W1 as an agent that keeps its whole state would; return the peak and how much of it came after the imports."""
    if kind == "plain":
        peers = importlib.import_module("benchmarks.peers")
        base = peak_mb()
        with peers.plain_saver(path) as save:
            _chat(count, save)
        return {"peak": peak_mb(), "grown": peak_mb() - base}
    with backstay.open(path.with_suffix(".warm.db")) as store:
        store.thread("warm").save({"ready": True})  # what is imported at the first use is no growth either
    base = peak_mb()
    with backstay.open(path) as store:
        thread = store.thread("chat")
        known = False

        def save(state: State) -> None:
            nonlocal known
            if known:
                thread.append({"messages": state["messages"][-2:]}, set={"scratch": state["scratch"]})
            else:
                thread.save(state)
            known = True

        _chat(count, save)
    return {"peak": peak_mb(), "grown": peak_mb() - base}


def _chat(count: int, save: Save) -> None:
    conversation = Conversation()
    state: State = {"document": conversation.document, "messages": [], "scratch": {}}
    for step in conversation.steps(count):
        state["messages"] += step.messages
        state["scratch"] = step.scratch
        save(state)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
