"""Runs: what lists, counts and claims cost with a thousand, thirty thousand and a million runs, and how workers scale.

All but a few hundred of the runs are over, as in a store that was used for a year. The lists show a page of 100 runs.
The workers are threads (claims), and workers in one event loop (runs of a graph with one node), all in one process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import backstay
from backstay.model.runs import RunStatus
from backstay.operations.run_records import GRAPH, RunOutcome, new_row
from backstay.store.base import BranchKey
from backstay.store.records import Record, record_id
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.records import put_run
from backstay.store.sqlite.transactions import writing
from backstay.thread.access import access_of
from benchmarks.bench import Bench
from benchmarks.table import Row, Target
from benchmarks.timing import Times, clock
from support.postgres import PostgresServer

BATCH = 20_000
REPEATS = 25
OPEN = 400
"""How many runs are not over, at any size: they are the newest."""

STATUSES = [RunStatus.QUEUED, RunStatus.INTERRUPTED, RunStatus.SLEEPING, RunStatus.FAILED]
FLAT = Target(2.0)
WORKERS = (1, 8, 64)
HOLDER = "another-host:1"


class Job:
    """The graph of the runs, as claims see it."""

    @staticmethod
    def claims() -> list[tuple[str, str]]:
        """Return the graph's name and fingerprint."""
        return [("job", "1")]


CALLS: dict[str, Callable[[backstay.Store], object]] = {
    "runs()": lambda store: store.runs(),
    "runs(status=queued)": lambda store: store.runs(status="queued"),
    "runs(status=completed)": lambda store: store.runs(status="completed"),
    "runs(status=abandoned)": lambda store: store.runs(status="abandoned"),
    "runs(graph=…)": lambda store: store.runs(graph="job"),
    "runs(graph=…), seldom": lambda store: store.runs(graph="seldom"),
    "runs(thread=…)": lambda store: store.runs(thread="t7"),
    "runs(graph=…, status=failed)": lambda store: store.runs(graph="job", status="failed"),
    "runs(holder=…)": lambda store: store.runs(holder=HOLDER),
    "runs(after=…), second page": lambda store: store.runs(after=store.runs(limit=100)[-1]),
    "count_runs()": lambda store: store.count_runs(),
    "claim of 1": lambda store: store.claim(Job, heartbeat=False),
}


def records(count: int) -> Iterator[Record]:
    """Return so many runs, each on a thread of its own, as they are stored."""
    for number in range(count):
        is_open = number >= count - OPEN
        status = STATUSES[number % len(STATUSES)] if is_open else RunStatus.COMPLETED
        branch = BranchKey("", f"t{number}", "", "main")
        run = new_row(branch, f"run-{number}", GRAPH, "seldom" if number % (count // 4) == 1 else "job", number, "1")
        due = number if status is RunStatus.QUEUED else None
        over = None if is_open and status is not RunStatus.FAILED else number
        yield replace(run, status=status, due_us=due, input=b"" if due else None, ended_us=over).sealed()


@writing
def _put_all(self: Any, connection: Connection, runs: list[Record]) -> None:
    for run in runs:
        put_run(connection, run)


def fill_sqlite(store: backstay.Store, count: int) -> None:
    """Store runs, many in each transaction."""
    every = records(count)
    while batch := list(islice(every, BATCH)):
        _put_all(access_of(store).store, batch)


def fill_postgres(server: PostgresServer, schema: str, count: int) -> None:
    """Store runs by COPY."""
    import psycopg

    with psycopg.connect(server.url()) as connection, connection.cursor() as cursor:
        with cursor.copy(f"COPY {schema}.thread (id, next_seq, namespace, name) FROM STDIN") as copy:
            for number in range(count):
                copy.write_row((number + 1, 1, "", f"t{number}"))
        columns = "number, thread, version, due, open, kind, scope, branch, key, id, body"
        facts_of = "namespace, status, graph, fingerprint"
        with cursor.copy(f"COPY {schema}.record ({columns}, {facts_of}) FROM STDIN") as copy:
            for number, run in enumerate(records(count), 1):
                facts, name = run.run, record_id("run", run.branch, run.key)
                assert facts is not None
                fixed = (number, number, 1, facts.due_us, run.open, "run", "", "main", run.key, name, run.body)
                copy.write_row((*fixed, "", facts.status, facts.graph, facts.fingerprint))
        for table, column in (("thread", "id"), ("record", "number")):
            cursor.execute(f"SELECT setval(pg_get_serial_sequence('{schema}.{table}', '{column}'), {count})")
        cursor.execute(f"ANALYZE {schema}.record, {schema}.thread")


def run(bench: Bench) -> None:
    """Measure both stores."""
    sizes = [1000, 30_000] + ([] if bench.quick else [1_000_000])
    bench.root.chmod(0o711)  # the server runs as another user
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer(bench.root / "runs-server", settings={"max_connections": "300"}))
        for kind in ("sqlite", "postgres"):
            bench.table.begin(f"runs: {kind}", f"ours with n = {sizes[-1]:,} runs, the other with n = {sizes[0]:,}")
            taken: dict[str, dict[int, Times]] = {name: {} for name in CALLS}
            for size in sizes:
                url = str(bench.new_path()) if kind == "sqlite" else server.url(schema=f"runs{size}")
                with backstay.open(url) as store:
                    if kind == "sqlite":
                        fill_sqlite(store, size)
                    else:
                        fill_postgres(server, f"runs{size}", size)
                    for name, call in CALLS.items():
                        times = [clock(lambda call=call: call(store)) for _ in range(REPEATS)]  # type: ignore[misc]  # mypy: a lambda's defaults
                        taken[name][size] = Times(times)
            for name, by_size in taken.items():
                last, first = by_size[sizes[-1]], by_size[sizes[0]]
                bench.table.add(Row(name, last.p50, "s", last.p99, first.p50, f"n={sizes[0]:,}", target=FLAT))
                for size in sizes[1:-1]:
                    bench.table.add(Row(f"{name}, n={size:,}", by_size[size].p50, "s", by_size[size].p99))
            for workers in WORKERS:
                url = str(bench.new_path()) if kind == "sqlite" else server.url(schema=f"work{workers}")
                _workers(bench, url, workers)


def _workers(bench: Bench, url: str, workers: int) -> None:
    """Measure claims of one run by several threads at once, and runs of a graph by several workers of a loop."""
    count = max(bench.pick(512, 128), 2 * workers)
    graph = backstay.Graph("one")
    graph.node("node", lambda state: {"n": state["n"] + 1})
    graph.start("node")
    graph.end("node")
    with backstay.open(url) as store:
        for number in range(count):
            graph.submit(store.thread(f"claimed-{number}"), {"n": number})
        times: list[float] = []

        def claim() -> None:
            while True:
                began = time.perf_counter()
                found = store.claim(graph, heartbeat=False)
                if not found:
                    return
                times.append(time.perf_counter() - began)
                keeper = found[0]._keeper
                assert keeper is not None
                keeper.outcome = RunOutcome(RunStatus.COMPLETED)
                found[0].release()

        threads = [threading.Thread(target=claim) for _ in range(workers)]
        began = time.perf_counter()
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        took = time.perf_counter() - began
        claims = Times(times)
        bench.table.add(Row(f"claim of 1, {workers} threads", claims.p50, "s", claims.p99))
        bench.table.add(Row(f"claims and ends per second, {workers} threads", count / took, "/s"))
        for number in range(count):
            graph.submit(store.thread(f"worked-{number}"), {"n": number})
        took = clock(lambda: asyncio.run(_work(graph, url, workers)))
        bench.table.add(Row(f"graph.work, {workers} workers of one loop", count / took, "/s"))


async def _work(graph: backstay.Graph, url: str, workers: int) -> None:
    async with await backstay.aopen(url) as store:
        await asyncio.gather(*(graph.work(store, until_idle=True) for _ in range(workers)))
