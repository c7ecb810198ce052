"""Facts about the machine and the versions, printed above the results: numbers without them mean nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import sys
from pathlib import Path
from typing import Any

from backstay.codec import encode
from backstay.version import __version__
from benchmarks.floors import sync_times
from benchmarks.workload import Conversation

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WAITED = "% of the last minute in which somebody waited for a core"
PEERS = ("langgraph", "langgraph-checkpoint", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres")
DRIVERS = ("aiosqlite", "psycopg", "psycopg-pool")


def machine_facts(folder: Path) -> dict[str, Any]:
    """Return everything worth knowing, by name."""
    longer, in_place = sync_times(folder)
    return {
        "backstay": __version__,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "peers": {name: _version(name) for name in PEERS},
        "drivers": {name: _version(name) for name in DRIVERS},
        "folder": str(folder),
        "file system": file_system(folder),
        "fdatasync p50, file gets longer (s)": longer.p50,
        "fdatasync p50, in place (s)": in_place.p50,
        "load": load_facts(),
        "text": text_facts(),
    }


def load_facts() -> dict[str, float]:
    """Return how busy the machine is: the load, and in what share of the last minute somebody waited for a core."""
    pressure = Path("/proc/pressure/cpu")
    words = pressure.read_text(encoding="utf-8").split() if pressure.exists() else ["", "", "avg60=0"]
    return {"average": os.getloadavg()[0], WAITED: float(words[2].partition("=")[2])}


def warn_if_busy(*facts: dict[str, float]) -> None:
    """Say so if other programs took part in the results: a late wake-up then costs more than what is measured."""
    if max(fact["average"] for fact in facts) > (os.cpu_count() or 1) + 0.5:
        print("WARNING: other programs kept the machine busy. Medians of anything that waits for the disk then measure")
        print("the scheduler, and ratios go to 1: look at the p10 lines, and run it again on a quiet machine.")


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def text_facts() -> dict[str, float]:
    """Return how large W1 is and how well zstd packs it: whole, and in 64 KiB blocks as the library does."""
    conversation = Conversation()
    steps = list(conversation.steps(1000))
    new = b"".join(step.new for step in steps)
    blocks = [new[start : start + 65536] for start in range(0, len(new), 65536)]
    document = encode(conversation.document)
    return {
        "new bytes per step": len(new) / len(steps),
        "bytes per message": sum(len(encode(item)) for step in steps for item in step.messages) / len(steps) / 2,
        "zstd level 1": len(zstd.compress(new, 1)) / len(new),
        "zstd level 3": len(zstd.compress(new, 3)) / len(new),
        "zstd level 1 in 64 KiB blocks": sum(len(zstd.compress(block, 1)) for block in blocks) / len(new),
        "document, zstd level 1": len(zstd.compress(document, 1)) / len(document),
    }


def print_facts(facts: dict[str, Any]) -> None:
    """Print the facts, one a line."""
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_short(item)}" for key, item in value.items())
        elif isinstance(value, float):
            value = f"{value * 1e6:.0f} us"
        print(f"{name}: {value}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
