"""Memory of a long run whose state does not grow: of a process, and of what its Python objects take.

``python -m benchmarks.engine.memory none|sqlite PATH N resident|traced`` runs N steps and prints it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import backstay
from backstay import Graph
from backstay.engine import END
from benchmarks.bench import Bench
from benchmarks.table import Row, Target
from benchmarks.workload import Conversation, Message

STEPS, EARLY = 10_000, 1_000
MESSAGES = 20
FLAT, PATH_ONLY = Target(1.1), Target(32, "ours")


class Window(TypedDict):
    """A state of one size: the document, the newest messages, a counter."""

    document: str
    messages: list[Message]
    turn: int


def run(bench: Bench) -> None:
    """Measure memory early and at the end of a run."""
    count = bench.pick(STEPS, 3 * EARLY)
    bench.table.begin(
        f"engine memory: {count:,} steps over a state of one size ({MESSAGES} messages, the document)",
        f"resident = of the whole process, at the end against step {EARLY:,}; SQLite's page cache fills to 8 MB",
        "objects = what tracemalloc sees: the path, a name a step, is all that may grow",
    )
    for kind, name in (("none", "no store"), ("sqlite", "SQLite")):
        early, end = _measured(bench, kind, count, "resident")
        target = FLAT if kind == "none" else None
        bench.table.add(Row(f"{name}: resident", end / 1e6, "MB", None, early / 1e6, "early", target=target))
        early, end = _measured(bench, kind, count, "traced")
        bench.table.add(Row(f"{name}: objects, growth a step", (end - early) / (count - EARLY), "B", target=PATH_ONLY))


def _measured(bench: Bench, kind: str, count: int, how: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.engine.memory", kind, str(bench.new_path()), str(count), how]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["early"], found["end"]


def traced() -> float:
    """Return what the Python objects made since the program began to look take."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def resident() -> float:
    """Return how much memory this process has now."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def measure(kind: str, path: str, count: int, look: Callable[[], float]) -> dict[str, float]:
    """Run it and return the memory early and at the end."""
    found: dict[str, float] = {}
    conversation = Conversation()
    made = [message for step in conversation.steps(MESSAGES) for message in step.messages]
    graph = Graph("window", state=Window, limit=count + 1)

    @graph.node
    def slide(state: Window) -> dict[str, Any]:
        turn = state["turn"] + 1
        if turn in (EARLY, count):
            found["early" if turn == EARLY else "end"] = look()
        start = turn % MESSAGES
        return {"messages": made[start : start + MESSAGES], "turn": turn}

    graph.start("slide")
    graph.choose("slide", lambda state: "stop" if state["turn"] == count else "again", {"again": "slide", "stop": END})
    first = {"document": conversation.document, "messages": made[:MESSAGES], "turn": 0}
    if kind == "none":
        graph.run_sync(None, first).raise_for_status()
    else:
        with backstay.open(path) as store:
            graph.run_sync(store.thread("window"), first).raise_for_status()
    return found


if __name__ == "__main__":
    if sys.argv[4] == "traced":
        tracemalloc.start()
    print(
        json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), traced if sys.argv[4] == "traced" else resident))
    )
