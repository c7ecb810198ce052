"""The file format of a bundle: compressed blocks that together hold one long sequence of records.

The records are cut into blocks of a fixed size, regardless of where a record ends, so that the same records always give
the same blocks. A header with the lengths and a CRC precedes each block; the last record holds a SHA-256 of everything
before it. So a changed byte is found in its block, and a file that was truncated, joined or extended is found at its
end. This module does not know what the records mean. ``docs/formats/bundle-v1.md`` describes the exact bytes.

A reader allocates memory for one block and one record, and no record may exceed the limits, even if the file claims so.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from backstay.codec import compress, decompress
from backstay.codec.msgpack import VALUE_BYTES_MAX
from backstay.errors import Corrupted, DecodeError, InvalidInput, LimitExceeded, StoreRefused

# How much memory and work reading a bundle may take.
#
# A few bytes of a bundle can describe a large state, and make the reader rebuild and hash it again and again. So two
# things are limited: the bytes of one state, and the work for the whole file. Work is counted in bytes handled: the
# bytes of each record, the bytes of each value that is rebuilt and hashed, and a fixed price for each record and key.
# Every byte of the file allows ``WORK_PER_BYTE`` more work. So long histories of a large state pass, while a small file
# can never cause much work.


_MIB: Final = 1024 * 1024
STATE_BYTES: Final = 512 * _MIB
WORK_BYTES: Final = 256 * _MIB
WORK_PER_BYTE: Final = 32 * 1024
"""A checkpoint that changes one number in a value of 2 MB takes about 110 bytes of the file and may cost 3.4 MB."""

RECORD_WORK: Final = 4 * 1024
"""The price of a record, in addition to its bytes: reading one takes as long as hashing this many bytes."""

EVENT_WORK: Final = 64 * 1024
"""The additional price of a record that is not bytes of a value: a checkpoint, an interrupt, a new thread."""

KEY_WORK: Final = 256
"""The price of each key of a state: a checkpoint's digest covers all keys."""


@dataclass(frozen=True, slots=True)
class BundleLimits:
    """How much reading a bundle may take. Raise a limit if you trust the file as much as your own store.

    ``state_bytes`` limits one state, pending writes included. ``work_bytes`` limits the work of the whole file;
    None means 256 MiB, and 32 KiB more for each byte of the file.
    """

    state_bytes: int = STATE_BYTES
    work_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("state_bytes", "work_bytes"):
            value = getattr(self, name)
            if (value is not None or name == "state_bytes") and (type(value) is not int or value < 0):
                raise InvalidInput(f"{name} must be a whole number of bytes, not {value!r:.40}")


class Budget:
    """Counts the memory and work of reading one file against the limits."""

    def __init__(self, limits: BundleLimits, path: str) -> None:
        self._limits = limits
        self._path = path
        self._spent = 0
        self.paid = 0  # bytes of the file read so far

    def spend(self, work: int) -> None:
        """Count work before it is done; raise LimitExceeded if the file needs too much."""
        self._spent += work
        most = self._limits.work_bytes
        if most is None:
            most = WORK_BYTES + WORK_PER_BYTE * self.paid
        if self._spent > most:
            raise self._exceeded("work_bytes", f"reading it takes more work than allowed ({most} bytes)")

    def hold(self, size: int) -> None:
        """Raise LimitExceeded if a state of this many bytes is too large to be held in memory."""
        if size > self._limits.state_bytes:
            what = f"a state or one of its records has {size} bytes; {self._limits.state_bytes} are allowed"
            raise self._exceeded("state_bytes", what)

    def _exceeded(self, name: str, what: str) -> LimitExceeded:
        return LimitExceeded(
            f"bundle {self._path}: {what}",
            limit=name,
            path=self._path,
            hint=f"If you trust the file, pass limits=BundleLimits({name}=…) with a larger number",
        )


MAGIC: Final = b"\x89BSBUNDLE\r\n\x1a\n"
"""Not text: any program that treats the file as text (line ends, 7-bit transfer) breaks it visibly."""

VERSION: Final = 1
BLOCK_BYTES: Final = 256 * 1024
"""Bytes of a block before compression; only the last block is shorter."""

RECORD_BYTES_MAX: Final = VALUE_BYTES_MAX + 1024 * 1024
"""Bytes of one record: a value of the largest size, and its description."""

END: Final = ord("Z")
_VERSION: Final = struct.Struct(">H")
_BLOCK: Final = struct.Struct(">III")  # length before compression, stored length, CRC of both and of the stored bytes
_RECORD: Final = struct.Struct(">BI")  # type, length
DIGEST_BYTES: Final = 32


class BlockWriter:
    """Writes records into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting = bytearray()
        self._hasher = hashlib.sha256()
        file.write(MAGIC + _VERSION.pack(VERSION))

    def add(self, kind: int, data: bytes) -> None:
        """Add a record."""
        if len(data) > RECORD_BYTES_MAX:
            raise DecodeError(f"a record has {len(data)} bytes; a bundle can hold at most {RECORD_BYTES_MAX}")
        head = _RECORD.pack(kind, len(data))
        self._hasher.update(head)
        self._hasher.update(data)
        self._waiting += head
        self._waiting += data
        while len(self._waiting) >= BLOCK_BYTES:
            self._write_block(bytes(self._waiting[:BLOCK_BYTES]))
            del self._waiting[:BLOCK_BYTES]

    def finish(self, summary: bytes) -> bytes:
        """Add the last record: the digest of all records before it, and a summary. Return the digest."""
        digest = self._hasher.digest()
        self.add(END, digest + summary)
        if self._waiting:
            self._write_block(bytes(self._waiting))
            self._waiting.clear()
        return digest

    def _write_block(self, plain: bytes) -> None:
        packed = compress(plain)
        stored = packed if len(packed) < len(plain) else plain
        self._file.write(_head(len(plain), stored) + stored)


class BlockReader:
    """Reads the records of a file and checks every byte. ``position`` counts the bytes read."""

    def __init__(self, file: BinaryIO, path: Path, budget: Budget) -> None:
        self._file = file
        self._path = path
        self._budget = budget
        self._block = b""
        self._start = 0  # where in the block the next record starts
        self._hasher = hashlib.sha256()
        self.position = 0
        found = self._read(len(MAGIC) + _VERSION.size)
        if found[: len(MAGIC)] != MAGIC:
            raise StoreRefused(f"{path} is not a Backstay bundle", path=str(path))
        if len(found) < len(MAGIC) + _VERSION.size:
            raise self.damaged("it is truncated")
        (version,) = _VERSION.unpack(found[len(MAGIC) :])
        if version != VERSION:
            raise StoreRefused(
                f"{path} is a bundle of version {version}; this version of Backstay reads version {VERSION}",
                path=str(path),
                hint="Read it with a newer version of Backstay. If there is none, the file is damaged",
            )

    def read(self, held: int = 0) -> tuple[int, list[bytes]]:
        """Return the type and bytes of the next record; raise Corrupted if the file changed since it was written.

        ``held``: bytes in memory that belong to the same checkpoint and count towards the limit of its state. The
        bytes come in parts of at most one block, so that a large value is not copied.
        """
        head = b"".join(self._take(_RECORD.size))
        kind, length = _RECORD.unpack(head)
        if length > RECORD_BYTES_MAX:
            raise self.damaged(f"a record claims to have {length} bytes, more than the format allows")
        self._budget.hold(held + length)
        self._budget.spend(RECORD_WORK + length)
        parts = self._take(length)
        if kind == END:
            if b"".join(parts)[:DIGEST_BYTES] != self._hasher.digest():
                raise self.damaged("its records do not match its digest")
            if len(self._block) > self._start or self._read(1):
                raise self.damaged("it has more bytes after its end")
        else:
            self._hasher.update(head)
            for part in parts:
                self._hasher.update(part)
        return kind, parts

    def damaged(self, what: str) -> Corrupted:
        """Return the error for a damaged file."""
        return Corrupted(
            f"bundle {self._path}: {what}",
            path=str(self._path),
            hint="Copy the file again from its source, or export it again",
        )

    def _take(self, count: int) -> list[bytes]:
        """Return the next bytes of the records, in parts."""
        parts = []
        while count:
            if self._start == len(self._block):
                self._block, self._start = self._next_block(), 0
            part = self._block[self._start : self._start + count]
            self._start += len(part)
            count -= len(part)
            parts.append(part)
        return parts

    def _next_block(self) -> bytes:
        head = self._read(_BLOCK.size)
        if len(head) < _BLOCK.size:
            raise self.damaged("it is truncated")
        size, length, _ = _BLOCK.unpack(head)
        if not 0 < length <= size <= BLOCK_BYTES:
            raise self.damaged("a block has an impossible length")
        stored = self._read(length)
        if len(stored) < length:
            raise self.damaged("it is truncated")
        if _head(size, stored) != head:
            raise self.damaged("a block does not match its checksum")
        try:
            return stored if length == size else decompress(stored, size)
        except DecodeError as error:
            raise self.damaged("a block cannot be decompressed") from error

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        self.position += len(data)
        self._budget.paid = self.position
        return data


def _head(size: int, stored: bytes) -> bytes:
    lengths = _BLOCK.pack(size, len(stored), 0)[:8]
    return _BLOCK.pack(size, len(stored), zlib.crc32(stored, zlib.crc32(lengths)))
