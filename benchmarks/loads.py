"""What a load costs, against decoding the same bytes alone and against the peer's one-row read; lists; verification.

Cold means a store object that has read nothing yet; the file is in the operating system's cache in every case.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import backstay
from backstay.codec import decode, encode
from backstay.thread.access import access_of
from benchmarks.bench import THREAD, Bench
from benchmarks.table import Row, Target
from benchmarks.timing import Op, clock, take_turns, timed
from benchmarks.workload import State

LOAD, MIDDLE, NOT_SLOWER = Target(2.0), Target(0.6), Target(1.0)
LIST, VERIFY = Target(3e-3, "ours"), Target(1.0, "ours")
LARGE_STATE, BY_HAND = Target(1.6), Target(2.0)
TAIL_ITEMS = 20
SMALL_STEPS, SMALL_DOCUMENT_BYTES = 12, 5_000  # a state of 20 KB
DECODING = "decoding alone"
N = 1000
LARGE_DOCUMENT_BYTES = 13_000_000  # makes the state ten times as large


def run(bench: Bench) -> None:
    """Measure loading, listing and verifying."""
    bench.table.begin(
        f"loads: W1, N={N:,}, 1.4 MB state, every byte verified",
        "cold = a new store object each time (open() is not timed, connecting and reading is); files in the OS cache",
        "decoding alone = backstay.codec.decode of the same encoded values, no I/O, no digests",
    )
    _loads(bench)
    _handles(bench)
    _parts(bench)
    _lists(bench)
    _verify(bench)


def _loads(bench: Bench) -> None:
    built = bench.w1(N)
    with ExitStack() as stack:
        thread = stack.enter_context(backstay.open(built.path)).thread(THREAD)
        latest = thread.latest()
        assert latest is not None
        ops = {
            "decode": decoding(latest.state),
            "cold": cold(built.path),
            "open": cold(built.path, opening=True),
            "warm": timed(lambda _: thread.latest()),
            "middle": cold(built.path, step=N // 2),
            "middle decode": decoding({**latest.state, "messages": latest.state["messages"][:N]}),
        }
        if bench.peers is not None:
            ops |= bench.peers.loading(stack, bench, N)
        times = dict(zip(ops, take_turns(list(ops.values()), bench.pick(60, 20)), strict=True))
    for name, one, other, against, target in (
        ("load latest, cold", "cold", "decode", DECODING, LOAD),
        ("load latest, cold, with open()", "open", "decode", DECODING, None),
        ("load latest, warm (same handle)", "warm", "decode", DECODING, LOAD),
        ("load the middle step, cold", "middle", "cold", "latest, cold", MIDDLE),
        ("... against decoding that", "middle", "middle decode", DECODING, None),
        ("load latest, cold", "cold", "peer cold", "LangGraph get_tuple, cold", NOT_SLOWER),
        ("load latest, warm", "warm", "peer warm", "LangGraph get_tuple, warm", NOT_SLOWER),
    ):
        if other in times:
            row = Row(name, times[one].p50, "s", times[one].p99, times[other].p50, against, target=target)
            bench.table.add(row)
            if target is not None:
                bench.table.add(
                    Row("    its undisturbed tenth (p10)", times[one].p10, "s", None, times[other].p10, against)
                )


def _handles(bench: Bench) -> None:
    """Measure what a server does for each request: a new handle on a thread that it may have used before."""
    for name, built, target in (
        ("20 KB", bench.w1(SMALL_STEPS, SMALL_DOCUMENT_BYTES), NOT_SLOWER),
        ("1.4 MB", bench.w1(N), LARGE_STATE),
    ):
        with ExitStack() as stack:
            store = stack.enter_context(backstay.open(built.path))
            other = stack.enter_context(backstay.open(built.path))
            latest = store.thread(THREAD).latest()
            assert latest is not None

            def first(_: int, other: backstay.Store = other) -> float:
                access_of(other).services.recent.clear()
                return clock(other.thread(THREAD).latest)

            ops = {"next": timed(lambda _, store=store: store.thread(THREAD).latest()), "first": first}  # type: ignore[misc]
            if bench.peers is not None:
                ops["peer"] = bench.peers.loading_state(stack, bench, latest.state)
            times = dict(zip(ops, take_turns(list(ops.values()), bench.pick(100, 30)), strict=True))
        p50, p10 = (times["peer"].p50, times["peer"].p10) if "peer" in times else (None, None)
        for which in ("first", "next"):
            mine, label, against = times[which], f"load {name}, {which} handle of the thread", "LangGraph get_tuple"
            bench.table.add(Row(label, mine.p50, "s", mine.p99, p50, against, target=target))
            bench.table.add(Row("    its undisturbed tenth (p10)", mine.p10, "s", None, p10, against))


def _parts(bench: Bench) -> None:
    """Measure loads of a part of a state against reading rows of a table made for it."""
    with ExitStack() as stack:
        store = stack.enter_context(backstay.open(bench.w1(N).path))
        newest = store.thread(THREAD).latest()
        assert newest is not None
        rows = stack.enter_context(contextlib.closing(sqlite3.connect(bench.new_path(".sqlite"))))
        rows.execute("CREATE TABLE message (id INTEGER PRIMARY KEY, body BLOB)")
        rows.executemany("INSERT INTO message (body) VALUES (?)", [(encode(each),) for each in newest.messages])
        rows.commit()
        last = "SELECT body FROM message ORDER BY id DESC LIMIT ?"
        hand, tail, key = take_turns(
            [
                timed(lambda _: [decode(body) for (body,) in rows.execute(last, (TAIL_ITEMS,)).fetchall()]),
                timed(lambda _: store.thread(THREAD).tail("messages", TAIL_ITEMS)),
                timed(lambda _: store.get(newest.id, keys=["scratch"])),
            ],
            bench.pick(200, 50),
        )
    by_hand = f"SELECT of {TAIL_ITEMS} rows, decoded"
    label = f"tail: {TAIL_ITEMS} of {len(newest.messages):,} messages, new handle"
    bench.table.add(Row(label, tail.p50, "s", tail.p99, hand.p50, by_hand, target=BY_HAND))
    bench.table.add(Row("    its undisturbed tenth (p10)", tail.p10, "s", None, hand.p10, by_hand))
    bench.table.add(Row("get(id, keys=[...]): one small key of 1.4 MB", key.p50, "s", key.p99))


def cold(url: str | Path, step: int | None = None, opening: bool = False) -> Op:
    """Return an op that loads with a new store object each time."""

    def op(_: int) -> float:
        began = time.perf_counter()
        store = backstay.open(url)
        try:
            thread = store.thread(THREAD)
            if not opening:
                began = time.perf_counter()
            found = thread.latest() if step is None else thread.at(step)
            seconds = time.perf_counter() - began
            assert found is not None
            return seconds
        finally:
            store.close()

    return op


def decoding(state: State) -> Op:
    """Return an op that decodes the values of a state."""
    encoded: list[bytes] = [encode(value) for value in state.values()]

    def run_decode(_: int) -> Any:
        return [decode(data) for data in encoded]

    return timed(run_decode)


def _lists(bench: Bench) -> None:
    sizes = {"1.4 MB state": bench.w1(N)}
    if not bench.quick:
        sizes["14 MB state"] = bench.w1(N, LARGE_DOCUMENT_BYTES)
    with ExitStack() as stack:
        threads = [stack.enter_context(backstay.open(built.path)).thread(THREAD) for built in sizes.values()]
        ops = [timed(lambda _, thread=thread: list(thread.history(limit=N))) for thread in threads]  # type: ignore[misc]
        times = take_turns(ops, bench.pick(60, 15))
    first, *others = times
    bench.table.add(Row("list 1,000 metadata rows, 1.4 MB state", first.p50, "s", first.p99, target=LIST))
    for large in others:
        row = Row("... 14 MB state", large.p50, "s", large.p99, first.p50, "1.4 MB state", target=LIST)
        bench.table.add(row)


def _verify(bench: Bench) -> None:
    with backstay.open(bench.w1(N).path) as store:
        whole = min(clock(store.check) for _ in range(3))
        thread = min(clock(store.thread(THREAD).check) for _ in range(3))
        report = store.check()
    bench.table.add(Row("store.check(), 1,000 checkpoints (best of 3)", whole, target=VERIFY))
    bench.table.add(Row("thread.check(), the same", thread))
    bench.table.note(f"the check says: {report}")
