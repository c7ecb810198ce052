"""Memory of a long run whose state does not grow: ``python -m benchmarks.engine.memory none|sqlite PATH`` prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TypedDict

import holdfast
from benchmarks.bench import Bench
from benchmarks.table import Row, Target
from benchmarks.workload import Conversation, Message
from holdfast.engine import END, Graph

STEPS, EARLY = 10_000, 1_000
MESSAGES = 20
FLAT = Target(1.1)


class Window(TypedDict):
    """A state of one size: the document, the newest messages, a counter."""

    document: str
    messages: list[Message]
    turn: int


def run(bench: Bench) -> None:
    """Measure the memory of a process early and at the end of a run."""
    count = bench.pick(STEPS, 3 * EARLY)
    bench.table.begin(
        f"engine memory: {count:,} steps over a state of one size ({MESSAGES} messages, the document)",
        f"resident memory of a process at the end of the run against step {EARLY:,}",
    )
    for kind in ("none", "sqlite"):
        command = [sys.executable, "-m", "benchmarks.engine.memory", kind, str(bench.new_path()), str(count)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        name = "no store" if kind == "none" else "SQLite"
        bench.table.add(Row(f"{name}: resident memory", found["end"], "MB", None, found["early"], "early", target=FLAT))
        grown = (found["end"] - found["early"]) * 1e6 / (count - EARLY)
        bench.table.add(Row("... growth a step", grown, "B"))


def resident_mb() -> float:
    """Return how much memory this process has now."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("no VmRSS in /proc/self/status")


def measure(kind: str, path: str, count: int) -> dict[str, float]:
    """Run it and return the memory early and at the end."""
    found: dict[str, float] = {}
    conversation = Conversation()
    made = [message for step in conversation.steps(MESSAGES) for message in step.messages]
    graph = Graph("window", state=Window, limit=count + 1)

    @graph.node
    def slide(state: Window) -> dict[str, Any]:
        turn = state["turn"] + 1
        if turn in (EARLY, count):
            found["early" if turn == EARLY else "end"] = resident_mb()
        start = turn % MESSAGES
        return {"messages": made[start : start + MESSAGES], "turn": turn}

    graph.start("slide")
    graph.choose("slide", lambda state: "stop" if state["turn"] == count else "again", {"again": "slide", "stop": END})
    first = {"document": conversation.document, "messages": made[:MESSAGES], "turn": 0}
    if kind == "none":
        graph.run_sync(None, first).check()
    else:
        with holdfast.open(path) as store:
            graph.run_sync(store.thread("window"), first).check()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
