"""Peak memory of one run on SQLite, in a process of its own.

``python -m benchmarks.langgraph.memory NAME PATH STEPS`` does the run and prints by how much the peak rose.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.langgraph.contestants import DELTA, OURS, sqlite_opening
from benchmarks.langgraph.loop import Conversation, Loop
from benchmarks.memory import peak_mb
from benchmarks.table import Row

WARM_UP = 3


def run(bench: Bench, names: tuple[str, ...]) -> None:
    """Compare the peaks."""
    steps = bench.pick(1000, 400)
    bench.table.begin(
        f"LangGraph memory: the loop with {steps:,} steps on SQLite, a process each",
        "by how much the peak of the resident memory rose after everything was imported and used once",
    )
    risen = {name: _risen(bench, name, steps) for name in names}
    for name in names:
        if name != OURS:
            bench.table.add(Row(f"N={steps:,}: peak of a run", risen[OURS], "MB", None, risen[name], name))
    if names == (OURS,):
        bench.table.add(Row(f"N={steps:,}: peak of a run", risen[OURS], "MB"))


def _risen(bench: Bench, name: str, steps: int) -> float:
    command = [sys.executable, "-m", "benchmarks.langgraph.memory", name, str(bench.new_path()), str(steps)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(name: str, path: Path, steps: int) -> float:
    """Do a short run and then the one that counts."""
    peak = 0.0
    for count, file in ((WARM_UP, path.with_suffix(".warm")), (steps, path)):
        peak = peak_mb()
        with sqlite_opening(name, file)() as saver:
            Loop(Conversation(count), saver, delta=name == DELTA).run()
    return peak_mb() - peak


if __name__ == "__main__":
    print(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
