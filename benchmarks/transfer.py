"""Moving a store: a bundle out and in, per megabyte of state history, against a plain copy of the store's file."""

from __future__ import annotations

import os
import shutil

import backstay
from backstay.bundle import check_bundle, export_bundle, import_bundle
from benchmarks.bench import Bench
from benchmarks.table import Row
from benchmarks.timing import Times, clock

MEGABYTE = 1_000_000
TURNS = 3


def run(bench: Bench) -> None:
    """Measure exports and imports of one W1 store."""
    count = bench.pick(10_000, 1000)
    built = bench.w1(count)
    bench.table.begin(
        f"moving: W1, N={count:,}, per MB of new bytes", "a copy reads and writes the file and syncs; a bundle verifies"
    )
    times: dict[str, list[float]] = {name: [] for name in ("copy", "export", "verify", "import")}
    size = 0
    for _ in range(TURNS):
        times["copy"].append(clock(lambda: _copied(bench, built.path)))
        bundle = bench.new_path(".bundle")
        with backstay.open(bench.copy(built)) as store:
            times["export"].append(clock(lambda store=store, bundle=bundle: export_bundle(store, bundle)))  # type: ignore[misc]
        times["verify"].append(clock(lambda bundle=bundle: check_bundle(bundle)))  # type: ignore[misc]
        with backstay.open(bench.new_path()) as target:
            times["import"].append(clock(lambda target=target, bundle=bundle: import_bundle(bundle, target)))  # type: ignore[misc]
        size = bundle.stat().st_size
    megabytes = built.new_bytes / MEGABYTE
    floor = Times(times["copy"]).p50 / megabytes
    for name in ("export", "verify", "import"):
        bench.table.add(Row(f"{name} a bundle, per MB", Times(times[name]).p50 / megabytes, "s", None, floor, "copy"))
    bench.table.add(Row("bundle bytes / new bytes", size, "B", None, built.new_bytes, "new"))


def _copied(bench: Bench, source: os.PathLike[str]) -> None:
    target = bench.new_path()
    with open(source, "rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        os.fsync(written.fileno())
