"""The command: ``python -m benchmarks [--quick] [--only NAME] [--json FILE] [--dir FOLDER] [--no-peers]``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from benchmarks import (
    concurrency,
    directory,
    engine,
    langgraph,
    loads,
    postgres,
    processes,
    runs,
    saves,
    scale,
    shapes,
    sizes,
    transfer,
)
from benchmarks.bench import Bench
from benchmarks.machine import load_facts, machine_facts, print_facts, warn_if_busy
from benchmarks.table import Table

FAMILIES: dict[str, Callable[[Bench], None]] = {
    "sizes": sizes.run,
    "saves": saves.run,
    "loads": loads.run,
    "concurrency": concurrency.run,
    "shapes": shapes.run,
    "processes": processes.run,
    "postgres": postgres.run,
    "engine": engine.run,
    "directory": directory.run,
    "transfer": transfer.run,
    "langgraph": langgraph.run,
    "runs": runs.run,
    "scale": scale.run,
}


def main() -> None:
    """Measure what was asked for and print it."""
    options = _options()
    peers = None if options.quick or options.no_peers else _peers()
    families = dict(FAMILIES)
    if peers is not None:
        families["peers"] = peers.run
    names = options.only or list(families)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the files go then, too
    root = _scratch(options.dir)
    began = time.monotonic()
    table = Table()
    try:
        facts = machine_facts(root)
        print_facts(facts)
        if facts["file system"] == "tmpfs":
            print("WARNING: tmpfs has no disk below it; choose another folder with --dir")
        bench = Bench(root, table, options.quick, peers)
        for name in names:
            families[name](bench)
        table.finish()
        print(f"took {time.monotonic() - began:.0f} s")
        facts["load at the end"] = load_facts()
        print_facts({"load at the end": facts["load at the end"]})
        warn_if_busy(facts["load"], facts["load at the end"])
        if options.json:
            table.write_json(options.json, facts)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _scratch(folder: Path | None) -> Path:
    """Make the folder for the files, gigabytes of them: outside the project if that is the same disk, never in git."""
    if folder is None:
        usual, here = Path(tempfile.gettempdir()), Path.cwd()
        folder = usual if usual.stat().st_dev == here.stat().st_dev else here
    root = Path(tempfile.mkdtemp(prefix=".benchmarks-", dir=folder))
    (root / ".gitignore").write_text("*\n", encoding="utf-8")
    return root


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, few peers: some minutes")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[*FAMILIES, "peers"], help="one family")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--dir", type=Path, help="where the files go; should be a real disk")
    parser.add_argument("--no-peers", action="store_true", help="leave LangGraph out")
    options = parser.parse_args()
    if options.only == ["peers"] and (options.quick or _peers() is None):
        parser.error("the peers need langgraph and langgraph-checkpoint-sqlite, and are not part of --quick")
    return options


def _peers() -> ModuleType | None:
    """Return the module that measures LangGraph, if that is installed: it is an optional dependency."""
    if importlib.util.find_spec("langgraph") is None:
        print("LangGraph is not installed: peers are left out (pip install '.[bench]')")
        return None
    return importlib.import_module("benchmarks.peers")


if __name__ == "__main__":
    main()
