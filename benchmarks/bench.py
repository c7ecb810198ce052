"""What all measures share: where files go, how much is asked for, the table, and W1 stores that are built only once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import backstay
from backstay.codec import encode
from benchmarks.table import Table
from benchmarks.workload import DOCUMENT_BYTES, Conversation

THREAD = "chat"


@dataclass(frozen=True, slots=True)
class Built:
    """A closed W1 store."""

    path: Path
    new_bytes: int  # encoded bytes of what was new at each step, the document once

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size


@dataclass(slots=True)
class Bench:
    """One run."""

    root: Path
    table: Table
    quick: bool = False
    peers: ModuleType | None = None  # benchmarks.peers, where LangGraph is installed and wanted
    _built: dict[tuple[int, int], Built] = field(default_factory=dict)
    _names: int = 0

    def pick(self, full: int, quick: int) -> int:
        """Return how often or how much, for this kind of run."""
        return quick if self.quick else full

    def new_path(self, suffix: str = ".db") -> Path:
        """Return a path nobody has used."""
        self._names += 1
        return self.root / f"{self._names}{suffix}"

    def w1(self, count: int, document_bytes: int = DOCUMENT_BYTES) -> Built:
        """Return a closed store with ``count`` steps of W1, built at the first call. Not to be written to: see copy."""
        key = (count, document_bytes)
        if key not in self._built:
            self._built[key] = build(self.new_path(), count, document_bytes)
        return self._built[key]

    def copy(self, built: Built) -> Path:
        """Return a copy of a store, to be written to."""
        path = self.new_path()
        shutil.copyfile(built.path, path)
        return path


def build(path: Path, count: int, document_bytes: int = DOCUMENT_BYTES) -> Built:
    """Save W1 in a new file."""
    with backstay.open(path) as store:
        return Built(path, fill(store.thread(THREAD), count, document_bytes))


def fill(thread: backstay.Thread, count: int, document_bytes: int = DOCUMENT_BYTES) -> int:
    """Save W1, a whole state first, then known changes; return the new bytes."""
    conversation = Conversation(document_bytes=document_bytes)
    new_bytes = len(encode(conversation.document))
    first = conversation.step()
    thread.save(conversation.first(first))
    new_bytes += len(first.new)
    for step in conversation.steps(count - 1):
        thread.append({"messages": step.messages}, set={"scratch": step.scratch})
        new_bytes += len(step.new)
    return new_bytes
