"""Bytes on disk for bytes of new information, and what a fork adds."""

from __future__ import annotations

import backstay
from benchmarks.bench import THREAD, Bench
from benchmarks.floors import RawFile
from benchmarks.table import Row, Target
from benchmarks.timing import Times, clock

BYTES_TARGET = Target(0.70)
FORK_SECONDS, FORK_BYTES = Target(2e-3, "ours"), Target(1024, "ours")
FORKS = 100


def run(bench: Bench) -> None:
    """Measure file sizes over N, and forks."""
    bench.table.begin(
        "bytes: W1 after close, the log folded in",
        "new bytes = encoded messages and scratch of every step, and the document once",
    )
    for count in (100, 300, 1000) if bench.quick else (100, 300, 1000, 10_000):
        built = bench.w1(count)
        target = BYTES_TARGET if count >= 1000 else None
        name = f"file bytes / new bytes, N={count:,}"
        bench.table.add(Row(name, built.file_bytes, "B", None, built.new_bytes, "new", target=target))
    _compacted(bench)
    _forks(bench)


def _compacted(bench: Bench) -> None:
    built = bench.w1(1000)
    path = bench.copy(built)
    with backstay.open(path) as store:
        seconds = clock(store.compact)
    size = path.stat().st_size
    bench.table.add(Row("... N=1,000 after store.compact()", size, "B", None, built.new_bytes, "new"))
    bench.table.add(Row("store.compact(), N=1,000", seconds))


def _forks(bench: Bench) -> None:
    path = bench.copy(bench.w1(1000))
    with backstay.open(path) as store:
        checkpoint = store.thread(THREAD).latest()
        assert checkpoint is not None
        store.thread(THREAD).fork(checkpoint, branch="first")
    before = path.stat().st_size
    taken, floor = [], []
    raw = RawFile(bench.new_path(".raw"))
    with backstay.open(path) as store:
        thread = store.thread(THREAD)
        for number in range(FORKS):
            taken.append(clock(lambda branch=f"b{number}": thread.fork(checkpoint, branch=branch)))  # type: ignore[misc]
            floor.append(raw.append(bytes(500)))
    raw.close()
    added = (path.stat().st_size - before) / FORKS
    times, appended = Times(taken), Times(floor).p50
    row = Row("fork, 1.4 MB state", times.p50, "s", times.p99, appended, "append + fdatasync", target=FORK_SECONDS)
    bench.table.add(row)
    bench.table.add(Row(f"bytes a fork adds (mean of {FORKS})", added, "B", target=FORK_BYTES))
