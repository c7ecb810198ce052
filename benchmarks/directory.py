"""The directory store (``dir:``) against the floor that it is made of: appending the new bytes to a file, durably."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import backstay
from benchmarks.bench import THREAD, Bench, fill
from benchmarks.floors import RawFile
from benchmarks.saves import FLAT, FLOOR, KNOWN, add_row, appending, more_steps, saving
from benchmarks.table import Row
from benchmarks.timing import Times, take_turns


def run(bench: Bench) -> None:
    """Measure saves, opening, loading and bytes."""
    bench.table.begin("directory store: W1", "one log a branch; every save is durable when it returns")
    large = bench.pick(10_000, 1000)
    built = {count: _build(bench, count) for count in (100, 1000, large)}
    _saves(bench, built[1000][0])
    _flat(bench, built[100][0], built[large][0], large)
    _sizes(bench, *built[1000])
    _opening(bench, built[1000][0], 1000)
    if large != 1000:
        _opening(bench, built[large][0], large)


def _build(bench: Bench, count: int) -> tuple[Path, int]:
    path = bench.new_path("")
    with backstay.open(f"dir:{path}") as store:
        return path, fill(store.thread(THREAD), count)


def _copy(bench: Bench, path: Path) -> str:
    copy = bench.new_path("")
    shutil.copytree(path, copy)
    return f"dir:{copy}"


def _saves(bench: Bench, path: Path) -> None:
    steps = more_steps(bench.pick(1000, 300) + 3)
    new = [step.new for step in steps]
    raw = RawFile(bench.new_path(".raw"))
    with ExitStack() as stack:
        stack.callback(raw.close)
        known = appending(stack, _copy(bench, path), steps)
        whole = saving(stack, _copy(bench, path), steps)
        floor, saved, compared = take_turns([lambda n: raw.append(new[n]), known, whole], len(steps) - 3)
    add_row(bench, "known change (append), N=1,000", saved, floor, FLOOR, KNOWN)
    add_row(bench, "save(state), compared by content, 1.4 MB", compared, floor, FLOOR)


def _flat(bench: Bench, small: Path, large: Path, count: int) -> None:
    rounds, length = bench.pick(6, 3), 100
    steps = more_steps(rounds * (length + 3))
    early_times: list[float] = []
    late_times: list[float] = []
    with ExitStack() as stack:
        late = appending(stack, _copy(bench, large), steps)
        for number in range(rounds):
            offset = number * (length + 3)
            early = appending(stack, _copy(bench, small), steps[offset:][: length + 3])
            first, second = take_turns([early, lambda n, offset=offset: late(n + offset)], length)  # type: ignore[misc]
            early_times += first.seconds
            late_times += second.seconds
    add_row(
        bench,
        f"known change at N={count:,} against N=100",
        Times(late_times),
        Times(early_times),
        "at N=100",
        FLAT,
    )


def _sizes(bench: Bench, path: Path, new_bytes: int) -> None:
    bench.table.add(Row("bytes / new bytes, as written", _bytes(path), "B", None, new_bytes, "new bytes"))
    with backstay.open(_copy(bench, path)) as store:
        store.compact()
        copy = Path(store.url.removeprefix("dir:"))
    bench.table.add(Row("... after compact()", _bytes(copy), "B", None, new_bytes, "new bytes"))


def _bytes(path: Path) -> float:
    return float(sum(file.stat().st_size for file in path.rglob("*.log")))


def _opening(bench: Bench, path: Path, count: int) -> None:
    opens, loads = [], []
    for _ in range(bench.pick(15, 5)):
        began = time.perf_counter()
        with backstay.open(f"dir:{path}") as store:
            opens.append(time.perf_counter() - began)
            began = time.perf_counter()
            assert store.thread(THREAD).latest() is not None
            loads.append(time.perf_counter() - began)
    bench.table.add(Row(f"open, N={count:,}", Times(opens).p50, "s", None, None, ""))
    bench.table.add(Row(f"load the newest after that, N={count:,}", Times(loads).p50, "s", None, None, ""))
