"""How far a long export or import has come: a callback, or a line on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Is told (done, total, unit) now and then; ``total`` is 0 if it is not known."""

LINE_SECONDS = 0.2
"""A terminal is told no more often than this."""


class Line:
    """One line on standard error that is written over and over; only if that is a terminal, else a line at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = 0.0
        self._last = ""

    def __call__(self, done: int, total: int, unit: str) -> None:
        """Say how far it has come."""
        share = f" of {total:,} {unit} ({100 * done // total} %)" if total else f" {unit}"
        self._last = f"{self._what}: {done:,}{share}"
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._told >= LINE_SECONDS:
            self._told = now
            sys.stderr.write(f"\r{self._last}\x1b[K")
            sys.stderr.flush()

    def finish(self) -> None:
        """Leave the last state standing."""
        if self._last:
            sys.stderr.write(f"\r{self._last}\x1b[K\n" if sys.stderr.isatty() else f"{self._last}\n")
            sys.stderr.flush()


class Teller:
    """What exports and imports tell; does nothing if nobody wants to know."""

    def __init__(self, progress: Progress | bool | None, what: str, total: int, unit: str) -> None:
        self._line = Line(what) if progress is True else None
        self._tell = self._line if self._line is not None else progress if callable(progress) else None
        self._total = total
        self._unit = unit

    def tell(self, done: int) -> None:
        """Say how far it has come."""
        if self._tell is not None:
            self._tell(done, self._total, self._unit)

    def finish(self) -> None:
        """Say nothing more."""
        if self._line is not None:
            self._line.finish()
