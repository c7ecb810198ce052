"""Our saver under LangGraph's engine, against the savers that come with it: bytes, run time, reads, memory."""

from __future__ import annotations

import importlib
import importlib.util

from benchmarks.bench import Bench

NEEDED = ("langgraph", "langgraph.checkpoint.sqlite")


def run(bench: Bench) -> None:
    """Measure it all, if LangGraph and its SQLite saver are installed: they are optional dependencies."""
    missing = [name for name in NEEDED if not _is_installed(name)]
    if missing:
        print(f"\nthe LangGraph saver is left out: {', '.join(missing)} not installed (pip install '.[bench]')")
        return
    importlib.import_module("benchmarks.langgraph.family").run(bench)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False
