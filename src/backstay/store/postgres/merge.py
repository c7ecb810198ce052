"""Where the new bytes of a save go, and the merging of small rows.

A few new bytes go into a small row of ``fresh``. When a save crosses a 64 KiB boundary of its stream, the rows of the
window it leaves and what crosses the boundary become compressed rows in ``chunk``, usually a single one, at the same
addresses, in the same transaction: manifests do not change, every byte is written twice, and no background work is
needed. The small rows stay until the next window is written over them: the bytes of an address never change, so a
reader may find them in either place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backstay.store.base import Commit
from backstay.store.layout import COMPRESS_AT_ONCE_BYTES, address_of, pack_body

WINDOW_BYTES = 65_536

ReadRows = Callable[[int, int], list[tuple[int, bytes]]]
"""Returns the fresh rows that begin between two addresses, in order, but not the bytes that ``chunk`` holds too.

It does hold some if the save that left the window was deleted: then the window is left once more. A row that was
written on since then is held only up to where it ended; what was added to it is returned.
"""


@dataclass(slots=True)
class Additions:
    """The rows a commit adds: small ones to ``fresh``, as they are, and others to ``chunk``, compressed."""

    small: list[int] = field(default_factory=list)
    small_bodies: list[bytes] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def add_small(self, address: int, data: bytes) -> None:
        """Add a row to ``fresh``."""
        self.small.append(address)
        self.small_bodies.append(data)

    def add(self, address: int, data: bytes) -> None:
        """Add a row to ``chunk``."""
        self.addresses.append(address)
        self.sizes.append(len(data))
        self.bodies.append(pack_body(data))


def leaves_window(offset: int, data: bytes) -> bool:
    """Tell whether a stream that got these bytes goes on in another window than the one they began in.

    A window that is filled to its last byte is left with that byte, not again with the next one.
    """
    return (offset + len(data)) // WINDOW_BYTES > offset // WINDOW_BYTES


def additions(commit: Commit, read: ReadRows) -> Additions:
    """Return the rows of a commit, with what is fresh in the windows that it leaves."""
    added = Additions()
    for stream, offset, data in commit.chunks:
        address = address_of(stream, offset)
        rest = (address, data)
        if leaves_window(offset, data):
            start = offset // WINDOW_BYTES * WINDOW_BYTES
            runs = _runs(read(address_of(stream, start), address))
            if runs and _end(runs[-1]) == address:
                rest = (runs[-1][0], runs.pop()[1] + data)
            for first, whole in runs:
                added.add(first, whole)
            added.add(*rest)
        elif len(data) < COMPRESS_AT_ONCE_BYTES:
            added.add_small(*rest)
        else:
            added.add(*rest)
    return added


def _runs(rows: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return rows that follow each other without a gap as one."""
    runs: list[tuple[int, list[bytes]]] = []
    end = -1
    for address, body in rows:
        if address == end:
            runs[-1][1].append(body)
        else:
            runs.append((address, [body]))
        end = address + len(body)
    return [(first, b"".join(parts)) for first, parts in runs]


def _end(run: tuple[int, bytes]) -> int:
    return run[0] + len(run[1])
