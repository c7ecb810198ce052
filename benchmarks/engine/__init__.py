"""The engine against LangGraph's: what a step of W1 costs where the node itself does nothing, its bytes, its memory."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.engine import memory, sizes, steps


def run(bench: Bench) -> None:
    """Measure it all."""
    steps.run(bench)
    sizes.run(bench)
    memory.run(bench)
