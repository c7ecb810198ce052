"""Reports of exports and imports: what was done, and what was not, with reasons. And progress while they run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from backstay.errors import BackstayError, counted


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was left out or changed. ``where`` names the file, row or record that it came from."""

    what: str
    where: str = ""
    thread: str | None = None
    checkpoint: str | None = None

    def __str__(self) -> str:
        place = ", ".join(
            text for text in (self.where, self.thread and f"thread {self.thread!r}", self.checkpoint) if text
        )
        return f"{place}: {self.what}" if place else self.what


@dataclass(frozen=True, slots=True)
class Refused:
    """A thread that was not imported completely, and why. ``stored`` counts the checkpoints stored before."""

    thread: str
    error: BackstayError
    stored: int = 0

    def __str__(self) -> str:
        before = f" after {counted(self.stored, 'checkpoint')}" if self.stored else ""
        return f"thread {self.thread!r} refused{before}: {self.error.what}"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Counts of everything written. It is true if no checkpoint was left out."""

    threads: int = 0
    checkpoints: int = 0
    interrupts: int = 0
    effects: int = 0
    size: int = 0  # bytes of the file
    digest: bytes = b""  # of the records: the same for the same content, from every kind of store
    left_out: tuple[Note, ...] = ()  # checkpoints that are damaged, or that the target format cannot express
    notes: tuple[Note, ...] = ()  # fields and branches that the target format cannot express

    def __bool__(self) -> bool:
        return not self.left_out

    def __str__(self) -> str:
        head = f"{counted(self.checkpoints, 'checkpoint')} of {counted(self.threads, 'thread')} exported"
        lines = [f"  left out: {note}" for note in self.left_out] + [f"  note: {note}" for note in self.notes]
        return "\n".join([head, *lines])


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Counts of everything stored, skipped and left out. It is true if the store now has everything from the source."""

    threads: int = 0  # in the source
    stored: int = 0  # checkpoints
    present: int = 0  # checkpoints that the store had before, with the same content
    interrupts: int = 0  # stored now or before
    effects: int = 0
    refused: tuple[Refused, ...] = ()
    missing: tuple[Note, ...] = ()  # unreadable in the source: damaged when it was exported, or damaged files
    notes: tuple[Note, ...] = ()  # stored, but different from the source
    order: str = ""  # how the checkpoints of another system were ordered

    def __bool__(self) -> bool:
        return not self.refused and not self.missing

    def __str__(self) -> str:
        stored = f"{counted(self.stored, 'checkpoint')} of {counted(self.threads, 'thread')}"
        lines = [f"{stored} imported, {self.present} already present"]
        lines += [f"  {refused}" for refused in self.refused]
        lines += [f"  missing: {note}" for note in self.missing]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


# Progress ---------------------------------------------------------------------------------------------------------

Progress = Callable[[int, int, str], None]
"""Called with (done, total, unit) during an export or import; ``total`` is 0 if it is not known."""

LINE_SECONDS = 0.2
"""The shortest time between two updates of a terminal."""


class ProgressReporter:
    """Reports progress to a callback, or with True as one line on standard error; with None it does nothing.

    On a terminal the line is updated in place; elsewhere it is written once, at the end.
    """

    def __init__(self, progress: Progress | bool | None, what: str, total: int, unit: str) -> None:
        self._progress = progress
        self._what = what
        self._total = total
        self._unit = unit
        self._line = ""
        self._shown_at = 0.0

    def update(self, done: int) -> None:
        """Report how much is done."""
        if callable(self._progress):
            self._progress(done, self._total, self._unit)
        elif self._progress:
            of = (
                f" of {self._total:,} {self._unit} ({100 * done // self._total} %)" if self._total else f" {self._unit}"
            )
            self._line = f"{self._what}: {done:,}{of}"
            if sys.stderr.isatty() and time.monotonic() - self._shown_at >= LINE_SECONDS:
                self._shown_at = time.monotonic()
                sys.stderr.write(f"\r{self._line}\x1b[K")
                sys.stderr.flush()

    def finish(self) -> None:
        """Write the last line, which stays."""
        if self._line:
            sys.stderr.write(f"\r{self._line}\x1b[K\n" if sys.stderr.isatty() else f"{self._line}\n")
            sys.stderr.flush()
