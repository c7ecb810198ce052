"""The engine against LangGraph's: what a step of W1 costs where the node itself does nothing, its bytes, its memory."""

from __future__ import annotations

import importlib

from benchmarks.bench import Bench


def run(bench: Bench) -> None:
    """Measure it all; a process of which only the memory is measured imports no more than it needs."""
    importlib.import_module("benchmarks.engine.family").run(bench)
