"""The layout of values in both SQL stores: keys, addresses, and bodies that check themselves. Bytes only, no I/O.

A part of a value cannot be checked against the value's digest, so every stored body has a checksum of its own: a
compressed one in its zstd frame, any other in the four bytes after it.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from backstay.codec import compress, decompress
from backstay.errors import BackstayError, Corrupted, DecodeError
from backstay.pieces.manifest import OFFSET_BITS

SEQ_BITS = 32
SEQ_MAX = (1 << SEQ_BITS) - 1
UNREADABLE = "\0"
"""No valid id contains it. The placeholder for an unreadable id does, so such a row is listed and hides no other."""

CHECKSUM_BYTES = 4
COMPRESS_BYTES_MIN = 256
REMEMBERED_BYTES_MIN = 32768
COMPRESS_AT_ONCE_BYTES = 16384
"""Smaller chunks are stored uncompressed: compressing them later, with their neighbours, is better and cheaper."""


_SOUND = 0x2144DF1C
IS_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


def key_of(branch: int, seq: int) -> int:
    """Return a checkpoint's primary key."""
    return branch << SEQ_BITS | seq


def span_of(branch: int, before: int | None = None) -> tuple[int, int]:
    """Return the exclusive bounds of a branch's keys, optionally only below the sequence number ``before``."""
    return key_of(branch, 0), key_of(branch, SEQ_MAX if before is None else min(max(before, 0), SEQ_MAX))


def address_of(stream: int, offset: int) -> int:
    """Return the address of a byte of a stream."""
    return stream << OFFSET_BITS | offset


def uuid_bytes(name: str) -> bytes | None:
    """Return the 16 bytes of an id that is a UUID in its usual form, else None."""
    return bytes.fromhex(name.replace("-", "")) if IS_UUID(name) else None


def uuid_text(raw: bytes) -> str:
    """Return the usual form of a UUID's 16 bytes."""
    digits = raw.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def unreadable_id(stored: object) -> str:
    """Return a placeholder for an id that cannot be read."""
    return f"?{stored.hex() if isinstance(stored, bytes) else stored}{UNREADABLE}"


def pack_body(data: bytes, least: int = COMPRESS_BYTES_MIN) -> bytes:
    """Return the bytes with a checksum, compressed if that is shorter; see ``is_compressed``."""
    if len(data) >= least:
        packed = compress(data)
        if len(packed) < len(data) + CHECKSUM_BYTES:
            return packed
    return data + checksum_of(data)


def checksum_of(data: bytes) -> bytes:
    """Return the checksum of uncompressed bytes. Bytes followed by it always have the same CRC-32: ``_SOUND``."""
    return crc32(data).to_bytes(CHECKSUM_BYTES, "little")


def is_compressed(size: int, body: bytes) -> bool:
    """Return whether ``pack_body`` compressed the bytes, which were ``size`` long."""
    return len(body) != size + CHECKSUM_BYTES


class _Last(threading.local):
    """The large body that this thread decompressed last: reading a history reads one row of a stream many times."""

    kept = (b"", b"")  # packed and plain in one assignment, because a signal handler may read in between


_last = _Last()


def unpack_body(size: int, body: bytes) -> bytes:
    """Return the original bytes of ``pack_body``, which were ``size`` long; DecodeError if they were changed."""
    if len(body) == size + CHECKSUM_BYTES:
        if crc32(body) != _SOUND:
            raise DecodeError(f"{size} stored bytes do not match their checksum")
        return body[:size]
    if size < REMEMBERED_BYTES_MIN:
        return decompress(body, size)
    packed, plain = _last.kept
    if body != packed or size != len(plain):  # comparing costs a fiftieth of decompressing
        plain = decompress(body, size)
        _last.kept = (body, plain)
    return plain


def unpack_stored(size: int, body: bytes, where: str) -> bytes:
    """Return the original bytes of a stored row; Corrupted if they were changed."""
    try:
        return unpack_body(size, body)
    except DecodeError as error:
        raise Corrupted(f"{where} is damaged: {error.what}", hint="store.check() lists what is affected") from error


def unpack_or_nothing(size: int, body: bytes) -> bytes:
    """Return the original bytes, or b"" if they were changed: then the digest does not match."""
    try:
        return unpack_body(size, body)
    except DecodeError:
        return b""


Chunk = tuple[int, int, bytes]  # address, size of the original bytes, body


def touching(rows: list[Chunk]) -> list[list[Chunk]]:
    """Return rows, given in order, as runs of adjacent rows."""
    runs: list[list[Chunk]] = []
    for row in rows:
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == row[0]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def joined(rows: Iterable[Chunk]) -> bytes | None:
    """Return the original bytes of adjacent rows; None if one was changed: it must stay as it is, to be found."""
    try:
        return b"".join([unpack_body(size, body) for _, size, body in rows])
    except DecodeError:
        return None


ODD_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)


def odd_value(error: Exception, path: str) -> Corrupted:
    """Return our error for an exception that an unexpected value in a row caused.

    Arguments of callers were checked before, so the value came from the database.
    """
    return Corrupted(
        f"a row of the database holds a value that Backstay never writes ({type(error).__name__})",
        path=path,
        hint="store.check() lists what is affected; restore a copy of the database",
    )


class Patch(NamedTuple):
    """Changes to rows, which are named by their index."""

    drop: list[int]  # rows that cannot be decompressed any more
    change: list[tuple[int, bytes]]  # other bodies for rows, for as many original bytes, compressed as before
    add: list[tuple[int, bytes]]  # original bytes of new rows, by address


def patched(rows: Sequence[Chunk], start: int, data: bytes) -> Patch:
    """Return the changes that store ``data`` from address ``start`` on; ``rows`` are all that may overlap it, in order.

    A row keeps its address and its other bytes, unless it cannot be decompressed. Bytes outside such rows become new
    rows. If only a part of an uncompressed row is replaced, its checksum stays: then the row is as it was when it was
    written, or it is still known to be damaged.
    """
    patch = Patch([], [], [])
    position, end = start, start + len(data)
    for number, (address, size, body) in enumerate(rows):
        if address >= end or address + size <= start:
            continue
        try:
            whole, checksum = unpack_body(size, body), b""
        except BackstayError:
            if is_compressed(size, body):
                patch.drop.append(number)
                continue
            whole, checksum = body[:size], body[size:]
        if position < address:
            patch.add.append((position, data[position - start : address - start]))
        low, high = max(start, address), min(end, address + size)
        changed = whole[: low - address] + data[low - start : high - start] + whole[high - address :]
        if changed != whole or checksum:
            least = COMPRESS_BYTES_MIN if is_compressed(size, body) else size + 1
            keeps = checksum and (low, high) != (address, address + size)
            patch.change.append((number, changed + checksum if keeps else pack_body(changed, least)))
        position = max(position, high)
    if position < end:
        patch.add.append((position, data[position - start :]))
    return patch
