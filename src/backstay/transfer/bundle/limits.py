"""How much memory and work a bundle may ask for.

A few bytes of a bundle can ask for a large state, and for rebuilding and hashing it again and again. So two things are
limited: the bytes of one state, and the work of the whole file. Work is counted in bytes handled: the bytes of each
record, the bytes of each value that has to be rebuilt and hashed, and a fixed price for each record and key. Every byte
read from the file pays for ``WORK_PER_BYTE`` of work, so that long histories of a large state pass, and a small file
can never ask for much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from backstay.errors import InvalidInput, LimitExceeded

_MIB: Final = 1024 * 1024
STATE_BYTES: Final = 512 * _MIB
WORK_BYTES: Final = 256 * _MIB
WORK_PER_BYTE: Final = 32 * 1024
"""A step that changes one number in a value of 2 MB takes about 110 bytes of the file, and may cost 3.4 MB."""

RECORD_WORK: Final = 4 * 1024
"""What a record costs besides its bytes: reading one takes as long as hashing so many."""

EVENT_WORK: Final = 64 * 1024
"""What a record costs in addition that is more than bytes of a value: a checkpoint, a question, a new thread."""

KEY_WORK: Final = 256
"""What each key of a state costs: a checkpoint's digest names them all."""


@dataclass(frozen=True, slots=True)
class BundleLimits:
    """What reading a bundle may take. Raise a limit if you trust the file as much as your own store.

    ``state_bytes`` limits one state, pending writes included. ``work_bytes`` limits the work of the whole file;
    None stands for 256 MiB and 32 KiB more for each byte of the file.
    """

    state_bytes: int = STATE_BYTES
    work_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("state_bytes", "work_bytes"):
            value = getattr(self, name)
            if (value is not None or name == "state_bytes") and (type(value) is not int or value < 0):
                raise InvalidInput(f"{name} must be a whole number of bytes, not {value!r:.40}")


class Budget:
    """What is left of the limits while one file is read."""

    def __init__(self, limits: BundleLimits, path: str) -> None:
        self._limits = limits
        self._path = path
        self._spent = 0
        self.paid = 0  # bytes of the file read so far

    def spend(self, work: int) -> None:
        """Count work that is about to be done; raise LimitExceeded if the file asks for too much of it."""
        self._spent += work
        most = self._limits.work_bytes
        if most is None:
            most = WORK_BYTES + WORK_PER_BYTE * self.paid
        if self._spent > most:
            raise self._exceeded("work_bytes", f"reading it takes the work of more than {most} bytes")

    def hold(self, size: int) -> None:
        """Raise LimitExceeded if a state of this many bytes must not be held in memory."""
        if size > self._limits.state_bytes:
            what = f"a state, or a record of it, has {size} bytes, more than the {self._limits.state_bytes} allowed"
            raise self._exceeded("state_bytes", what)

    def _exceeded(self, name: str, what: str) -> LimitExceeded:
        return LimitExceeded(
            f"bundle {self._path}: {what}",
            limit=name,
            path=self._path,
            hint=f"If you trust the file, pass limits=BundleLimits({name}=…) with a larger number",
        )
