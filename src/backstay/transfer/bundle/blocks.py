"""The outer shape of a bundle: a file of compressed blocks that together are one long run of records.

The records are cut into blocks of one fixed size, wherever a record happens to end, so that the same records always
give the same blocks. Each block has its lengths and a CRC before it; the last record holds a SHA-256 of everything
before it. So a byte that changed is found in its block, and a file that was cut short, glued together or lengthened is
found at its end. Nothing here knows what records say. The exact bytes are in ``docs/formats/bundle-v1.md``.

A reader asks for no more memory than a block and one record take, and for no record larger than its limits allow,
whatever a file claims.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Final

from backstay.codec import compress, decompress
from backstay.codec.limits import VALUE_BYTES_MAX
from backstay.errors import Corrupted, DecodeError, StoreRefused
from backstay.transfer.bundle.limits import RECORD_WORK, Budget

MAGIC: Final = b"\x89BSBUNDLE\r\n\x1a\n"
"""Not text, and broken by anything that takes the file for text: a changed line end, a cut at the seventh bit."""

VERSION: Final = 1
BLOCK_BYTES: Final = 256 * 1024
"""Bytes of a block before compression; only the last one is shorter."""

RECORD_BYTES_MAX: Final = VALUE_BYTES_MAX + 1024 * 1024
"""Bytes of one record: a value of the largest size and what is said about it."""

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
            raise DecodeError(f"a record of {len(data)} bytes is larger than the {RECORD_BYTES_MAX} a bundle can hold")
        head = _RECORD.pack(kind, len(data))
        self._hasher.update(head)
        self._hasher.update(data)
        self._waiting += head
        self._waiting += data
        while len(self._waiting) >= BLOCK_BYTES:
            self._write_block(bytes(self._waiting[:BLOCK_BYTES]))
            del self._waiting[:BLOCK_BYTES]

    def finish(self, summary: bytes) -> bytes:
        """Add the last record, the digest of all before it and a summary; return the digest."""
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
    """Reads the records of a file, each byte checked. ``position`` is how far into the file that has come."""

    def __init__(self, file: BinaryIO, path: Path, budget: Budget) -> None:
        self._file = file
        self._path = path
        self._budget = budget
        self._block = b""
        self._start = 0  # where in the block the next record begins
        self._hasher = hashlib.sha256()
        self.position = 0
        self._check_beginning()

    def read(self, held: int = 0) -> tuple[int, list[bytes]]:
        """Return the type and bytes of the next record; raise Corrupted if anything is not as written.

        ``held``: bytes in memory that belong to the same checkpoint and count for the limit of its state. The bytes
        come in parts as long as a block at the most, so that a large value need not be copied to be put together.
        """
        head = b"".join(self._take(_RECORD.size))
        kind, length = _RECORD.unpack(head)
        if length > RECORD_BYTES_MAX:
            raise self.damaged(f"a record claims to have {length} bytes, more than any can have")
        self._budget.hold(held + length)
        self._budget.spend(RECORD_WORK + length)
        parts = self._take(length)
        if kind == END:
            self._check_end(b"".join(parts))
        else:
            self._hasher.update(head)
            for part in parts:
                self._hasher.update(part)
        return kind, parts

    def damaged(self, what: str) -> Corrupted:
        """Return the error for a file that is not as it was written."""
        return Corrupted(
            f"bundle {self._path}: {what}",
            path=str(self._path),
            hint="Export it again, or copy it again from where it came",
        )

    def _check_beginning(self) -> None:
        found = self._read(len(MAGIC) + _VERSION.size)
        if found[: len(MAGIC)] != MAGIC:
            raise StoreRefused(f"{self._path} is no bundle of Backstay", path=str(self._path))
        if len(found) < len(MAGIC) + _VERSION.size:
            raise self.damaged("it is cut short")
        (version,) = _VERSION.unpack(found[len(MAGIC) :])
        if version != VERSION:
            raise StoreRefused(
                f"{self._path} is a bundle of version {version}; this program reads version {VERSION}",
                path=str(self._path),
                hint="Read it with the version of Backstay that wrote it, or a newer one; or it is damaged",
            )

    def _check_end(self, data: bytes) -> None:
        if data[:DIGEST_BYTES] != self._hasher.digest():
            raise self.damaged("its records are not those that were written")
        if len(self._block) > self._start or self._read(1):
            raise self.damaged("something follows its end")

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
            raise self.damaged("it is cut short")
        size, length, _ = _BLOCK.unpack(head)
        if not 0 < length <= size <= BLOCK_BYTES:
            raise self.damaged("a block has an impossible length")
        stored = self._read(length)
        if len(stored) < length:
            raise self.damaged("it is cut short")
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
