"""What an export or import did, and what it could not do: nothing is left out in silence."""

from __future__ import annotations

from dataclasses import dataclass

from backstay.errors import BackstayError


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was not carried over, or not as it was. ``where`` names the file, row or record it came from."""

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
    """A thread that was not imported, or not to its end, and why. What was stored of it before is counted."""

    thread: str
    error: BackstayError
    stored: int = 0

    def __str__(self) -> str:
        before = f" after {self.stored} checkpoints" if self.stored else ""
        return f"thread {self.thread!r} refused{before}: {self.error.what}"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written. It is true if nothing was damaged."""

    threads: int = 0
    checkpoints: int = 0
    interrupts: int = 0
    effects: int = 0
    size: int = 0  # bytes of the file
    digest: bytes = b""  # of the records: the same for the same content, whichever store it came from
    damaged: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()  # what the target format has no room for

    def __bool__(self) -> bool:
        return not self.damaged

    def __str__(self) -> str:
        head = f"{self.checkpoints} checkpoints of {self.threads} threads exported"
        return "\n".join([head, *(f"  damaged: {note}" for note in self.damaged)])


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was stored, what was there already, and what was not taken. It is true if all of the source is there now."""

    threads: int = 0  # that were looked at
    stored: int = 0  # checkpoints
    present: int = 0  # checkpoints that were there already, with the same content
    interrupts: int = 0  # recorded now or before
    effects: int = 0
    refused: tuple[Refused, ...] = ()
    missing: tuple[Note, ...] = ()  # what the source itself lacks: damaged when it was exported, or unreadable files
    notes: tuple[Note, ...] = ()  # what is there, but differs from the source, or could not be said in our terms
    order: str = ""  # by what evidence checkpoints of another system were put in order

    def __bool__(self) -> bool:
        return not self.refused and not self.missing

    def __str__(self) -> str:
        lines = [f"{self.stored} checkpoints of {self.threads} threads imported, {self.present} were there already"]
        lines += [f"  {refused}" for refused in self.refused]
        lines += [f"  missing: {note}" for note in self.missing]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
