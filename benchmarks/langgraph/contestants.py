"""Who is compared, each in a new place: our saver, the one that comes with LangGraph, and that with its DeltaChannel.

All are as durable as their store can be: SQLite in WAL mode with synchronous at FULL, PostgreSQL with fsync on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver

from backstay.langgraph import BackstaySaver
from benchmarks.bench import Bench
from benchmarks.langgraph.loop import CONFIG

OURS, STOCK, DELTA = "ours", "stock", "stock + DeltaChannel"

Opening = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One saver with a place of its own."""

    name: str
    open: Opening
    size: Callable[[], int]  # bytes on disk; nobody has it open
    remove: Callable[[], None]

    @property
    def delta(self) -> bool:
        """Whether the graph has to be another one."""
        return self.name == DELTA

    def descriptions(self, saver: Any) -> int:
        """Go through the whole history without the states, if that can be done; return its length."""
        if self.name == OURS:
            return sum(1 for _ in saver.store.thread(CONFIG["configurable"]["thread_id"]).history())
        return sum(1 for _ in saver.list(CONFIG))


def on_sqlite(bench: Bench, names: tuple[str, ...]) -> list[Contestant]:
    """Return the contestants over SQLite."""
    found = []
    for name in names:
        path = bench.new_path(".sqlite")
        found.append(Contestant(name, sqlite_opening(name, path), lambda p=path: _size(p), lambda p=path: _unlink(p)))  # type: ignore[misc]
    return found


def sqlite_opening(name: str, path: Path) -> Opening:
    """Return what opens a saver on a file."""
    return (lambda: BackstaySaver(str(path))) if name == OURS else (lambda: SqliteSaver.from_conn_string(str(path)))


def _files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}*"))


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _unlink(path: Path) -> None:
    for file in _files(path):
        file.unlink()


def on_postgres(place: Any, names: tuple[str, ...]) -> list[Contestant]:
    """Return the contestants over PostgreSQL, each in a schema that no other family has used."""
    return [_on_postgres(place, name, f"langgraph_{place.new_schema()}") for name in names]


def _on_postgres(place: Any, name: str, schema: str) -> Contestant:
    if name == OURS:
        url = place.url(schema)
        opening: Opening = lambda: BackstaySaver(url)  # noqa: E731
    else:
        saver = importlib.import_module("langgraph.checkpoint.postgres").PostgresSaver
        url = place.plain_url(schema)
        with saver.from_conn_string(url) as fresh:
            fresh.setup()
        opening = lambda: saver.from_conn_string(url)  # noqa: E731
    return Contestant(
        name,
        opening,
        lambda: int(place.bytes_of(schema)),
        lambda: place.execute("DROP SCHEMA IF EXISTS {} CASCADE", schema),
    )
