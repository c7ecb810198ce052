"""What a load costs, against decoding the same bytes alone and against the peer's one-row read; lists; verification.

Cold means a store object that has read nothing yet; the file is in the operating system's cache in every case.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import backstay
from backstay.codec import decode, encode
from benchmarks.bench import THREAD, Bench
from benchmarks.table import Row, Target
from benchmarks.timing import Op, clock, take_turns, timed
from benchmarks.workload import State

LOAD, MIDDLE, NOT_SLOWER = Target(2.0), Target(0.6), Target(1.0)
LIST, VERIFY = Target(3e-3, "ours"), Target(1.0, "ours")
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
