"""All measures of the engine, in turn."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.engine import maps, memory, sizes, steps


def run(bench: Bench) -> None:
    """Measure it all."""
    steps.run(bench)
    sizes.run(bench)
    maps.run(bench)
    memory.run(bench)
