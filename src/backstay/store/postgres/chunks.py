"""Where the new bytes of a save are stored, and how small rows are merged.

A few new bytes go into a small row of ``fresh``. When a save crosses a 64 KiB boundary of its stream, the rows of the
window that it leaves become compressed rows in ``chunk``, usually a single one, at the same addresses and in the same
transaction. Manifests do not change, every byte is written twice, and no background work is needed. The small rows stay
until the next window overwrites them: the bytes at an address never change, so a reader may use either copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backstay.store.base import Commit
from backstay.store.layout import COMPRESS_AT_ONCE_BYTES, address_of, pack_body

WINDOW_BYTES = 65_536

ReadRows = Callable[[int, int], list[tuple[int, bytes]]]
"""Returns the fresh rows that start between two addresses, in order, without the bytes that ``chunk`` has too.

``chunk`` has some of them if the save that left the window was deleted, because then the window is left a second time.
If a row has grown since, ``chunk`` has only its older part, and the newer part is returned.
"""


@dataclass(slots=True)
class Additions:
    """The rows that a commit adds: small ones to ``fresh``, uncompressed, and others to ``chunk``, compressed."""

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
    """Return whether a stream continues in another window after these bytes.

    The byte that fills a window leaves it; the next one does not leave it again.
    """
    return (offset + len(data)) // WINDOW_BYTES > offset // WINDOW_BYTES


def additions(commit: Commit, read: ReadRows) -> Additions:
    """Return the rows of a commit, including the fresh rows of windows that it leaves."""
    added = Additions()
    for stream, offset, data in commit.chunks:
        address = address_of(stream, offset)
        rest = (address, data)
        if leaves_window(offset, data):
            start = offset // WINDOW_BYTES * WINDOW_BYTES
            runs = _runs(read(address_of(stream, start), address))
            if runs and runs[-1][0] + len(runs[-1][1]) == address:
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
    """Return adjacent rows joined into one."""
    runs: list[tuple[int, list[bytes]]] = []
    end = -1
    for address, body in rows:
        if address == end:
            runs[-1][1].append(body)
        else:
            runs.append((address, [body]))
        end = address + len(body)
    return [(first, b"".join(parts)) for first, parts in runs]
