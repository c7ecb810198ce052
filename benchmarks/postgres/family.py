"""All measures on PostgreSQL, in turn, on one server."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.postgres import concurrency, loads, saves, sizes
from benchmarks.postgres.place import serve
from support.postgres import PostgresFailed, PostgresUnavailable


def run(bench: Bench) -> None:
    """Start the server and measure; if this machine cannot run it, say so."""
    try:
        with serve(bench) as place:
            saves.run(place)
            loads.run(place)
            sizes.run(place)  # it vacuums, so loads come first
            concurrency.run(place)
    except (PostgresUnavailable, PostgresFailed) as error:
        print(f"\nPostgreSQL is left out: {error}")
