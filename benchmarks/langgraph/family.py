"""All measures of the saver, in turn: on SQLite, on PostgreSQL where it is installed, and the memory."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from benchmarks import postgres
from benchmarks.bench import Bench
from benchmarks.langgraph import growth, memory
from benchmarks.langgraph.contestants import DELTA, OURS, STOCK, Contestant, on_postgres, on_sqlite

NOTES = (
    "one node in a loop, durability='sync', a message of 1 KB of random text a step, a static channel of 100 KB",
    "unique = each message and the static channel once, as LangGraph encodes them; a step = run / N",
    "peer = LangGraph's saver as it comes ('stock'), then with the messages in its DeltaChannel; metadata: it has none",
)


def run(bench: Bench) -> None:
    """Measure it all; the savers that come with LangGraph are left out with ``--no-peers`` only."""
    names = (OURS, STOCK, DELTA) if bench.quick or bench.peers is not None else (OURS,)
    bench.table.begin("LangGraph on SQLite: synchronous=FULL on all sides", *NOTES)
    _sizes(bench, lambda: on_sqlite(bench, names))
    missing = [name for name in postgres.NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        bench.table.note(f"PostgreSQL is left out: {', '.join(missing)} not installed")
    else:
        _on_server(bench, names)
    memory.run(bench, names)


def _sizes(bench: Bench, make: Callable[[], list[Contestant]]) -> None:
    for steps, repeats in ((100, bench.pick(5, 3)), (400, bench.pick(3, 1)), (growth.MAIN, 2)):
        if not (bench.quick and steps == growth.MAIN):
            growth.measure(bench, make, steps, repeats)


def _on_server(bench: Bench, names: tuple[str, ...]) -> None:
    testing = importlib.import_module("support.postgres")
    serve = importlib.import_module("benchmarks.postgres.place").serve
    if importlib.util.find_spec("langgraph.checkpoint.postgres") is None:
        names = (OURS,)
    try:
        with serve(bench) as place:
            version = place.scalar("SHOW server_version")
            fsync = place.scalar("SHOW fsync")
            bench.table.begin(f"LangGraph on PostgreSQL {version}: fsync={fsync}, autovacuum off on all sides", *NOTES)
            _sizes(bench, lambda: on_postgres(place, names))
    except (testing.PostgresUnavailable, testing.PostgresFailed) as error:
        bench.table.note(f"PostgreSQL is left out: {error}")
