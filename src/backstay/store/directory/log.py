"""One log file, and the places of bytes in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backstay.store.layout import unpack_stored

if TYPE_CHECKING:
    from backstay.store.directory.logs import Logs

STORE_LOG = 0
"""The number of the log of what concerns no branch, or several. All others have their lane's number."""


@dataclass(slots=True)
class Log:
    """A log as it is known: where its last whole record ends. ``garbage`` is about how much of it nothing needs."""

    number: int
    path: Path
    mark: bytes
    end: int
    garbage: int = 0
    is_foreign: bool = False  # another one was there, of which more was acknowledged: it may have been any branch's
    gaps: int = 0  # places in it where there is no whole record; such a log is written anew only by a repair
    is_misplaced: bool = False  # its records belong into a log with another number: files were exchanged
    broken: str | None = None  # what is wrong with its end, if what was acknowledged last cannot be read


class Place(NamedTuple):
    """Bytes in a log, compressed if they take less room than they are."""

    logs: Logs
    log: int
    mark: bytes
    at: int
    stored: int
    size: int

    def read(self) -> bytes:
        """Return them."""
        data = self.logs.read(self.log, self.mark, self.at, self.stored)
        return unpack_stored(self.size, data, f"log {self.log} at {self.at}")
