"""Bytes in PostgreSQL for bytes of new information, and what a fork costs."""

from __future__ import annotations

import importlib

import backstay
from benchmarks.bench import THREAD, fill
from benchmarks.postgres.place import Place, RawTable
from benchmarks.table import Row, Target
from benchmarks.timing import Times, clock

N = 1000
BYTES = Target(1.1)
FORKS = 300


def run(place: Place) -> None:
    """Measure tables over N, and forks."""
    version = place.scalar("SHOW server_version")
    place.bench.table.begin(
        f"PostgreSQL {version}, bytes: W1, pg_total_relation_size of all our tables, indexes included",
        "as the saves left them: autovacuum is off, nothing was vacuumed unless the line says so",
    )
    for count in (N,) if place.bench.quick else (100, N, 3000):
        built = place.w1(count)
        _add(place, f"table bytes / new bytes, N={count:,}", built.full_bytes, built.new_bytes, count)
        name = f"... less the {built.empty_bytes / 1e6:.2f} MB of an empty store"
        _add(place, name, built.full_bytes - built.empty_bytes, built.new_bytes)
    built = place.w1(N)
    place.vacuum(built.schema)
    _add(place, f"... N={N:,} after VACUUM, with its maps of each table", place.bytes_of(built.schema), built.new_bytes)
    if place.has_peers:
        _peer(place)
    _forks(place)


def _peer(place: Place) -> None:
    peer = importlib.import_module("benchmarks.postgres.peers").measured(place, N)
    _add(place, f"for context: PostgresSaver's tables, N={N:,}", place.bytes_of(peer.schema), peer.new_bytes)
    place.vacuum(peer.schema)
    _add(place, "... after VACUUM", place.bytes_of(peer.schema), peer.new_bytes)


def _add(place: Place, name: str, size: int, new_bytes: int, count: int = 0) -> None:
    target = BYTES if count >= N else None
    place.bench.table.add(Row(name, size, "B", None, new_bytes, "new", target=target))


def _forks(place: Place) -> None:
    """Fork many times: tables get longer by whole pages."""
    schema = place.new_schema()
    raw = RawTable(place.plain_url(place.new_schema()))
    with backstay.open(place.url(schema)) as store:
        thread = store.thread(THREAD)
        fill(thread, N)
        checkpoint = thread.latest()
        assert checkpoint is not None
        thread.fork(checkpoint, branch="first")
        before = place.bytes_of(schema)
        taken, floor = [], []
        for number in range(place.bench.pick(FORKS, 50)):
            taken.append(clock(lambda branch=f"b{number}": thread.fork(checkpoint, branch=branch)))  # type: ignore[misc]
            floor.append(raw.insert(bytes(500)))
    raw.close()
    added = (place.bytes_of(schema) - before) / len(taken)
    times = Times(taken)
    table = place.bench.table
    table.add(Row("fork, 1.4 MB state", times.p50, "s", times.p99, Times(floor).p50, "bare insert"))
    table.add(Row(f"bytes a fork adds (mean of {len(taken)})", added, "B"))
