"""The layout of values in both SQL stores: keys, addresses, compressed bodies. Bytes only, no I/O."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import NamedTuple

from backstay.codec import compress, decompress
from backstay.errors import BackstayError, Corrupted, DecodeError
from backstay.pieces.manifest import OFFSET_BITS

SEQ_BITS = 32
SEQ_MAX = (1 << SEQ_BITS) - 1
UNREADABLE = "\0"
"""No valid id contains it. The placeholder for an unreadable id does, so such a row is listed and hides no other."""

COMPRESS_BYTES_MIN = 256
REMEMBERED_BYTES_MIN = 32768
COMPRESS_AT_ONCE_BYTES = 16384
"""Smaller chunks are stored uncompressed: compressing them later, with their neighbours, is better and cheaper."""


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
    """Return the bytes compressed if that is shorter; only then does their length differ from the original."""
    if len(data) < least:
        return data
    packed = compress(data)
    return packed if len(packed) < len(data) else data


class _Last(threading.local):
    """The large body that this thread decompressed last: reading a history reads one row of a stream many times."""

    kept = (b"", b"")  # packed and plain in one assignment, because a signal handler may read in between


_last = _Last()


def unpack_body(size: int, body: bytes) -> bytes:
    """Return the original bytes of ``pack_body``, which were ``size`` long."""
    if len(body) == size:
        return body
    if size < REMEMBERED_BYTES_MIN:
        return decompress(body, size)
    packed, plain = _last.kept
    if body != packed or size != len(plain):  # comparing costs a fiftieth of decompressing
        plain = decompress(body, size)
        _last.kept = (body, plain)
    return plain


def unpack_stored(size: int, body: bytes, where: str) -> bytes:
    """Return the original bytes of a stored row; Corrupted if they cannot be decompressed."""
    try:
        return unpack_body(size, body)
    except DecodeError as error:
        raise Corrupted(f"{where} cannot be decompressed", hint="store.check() lists what is affected") from error


def unpack_or_nothing(size: int, body: bytes) -> bytes:
    """Return the original bytes, or b"" if they cannot be decompressed: then the digest does not match."""
    try:
        return unpack_body(size, body)
    except DecodeError:
        return b""


Chunk = tuple[int, int, bytes]  # address, size before compression, body


def touching(rows: list[Chunk]) -> list[list[Chunk]]:
    """Return rows, given in order, as runs of adjacent rows."""
    runs: list[list[Chunk]] = []
    for row in rows:
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == row[0]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


ODD_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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
    """Changes to rows, which are named by their index. All bytes are uncompressed."""

    drop: list[int]  # rows that cannot be decompressed any more
    change: list[tuple[int, bytes]]  # rows with other bytes, of the same length
    add: list[tuple[int, bytes]]  # new rows, by address


def patched(rows: Sequence[Chunk], start: int, data: bytes) -> Patch:
    """Return the changes that store ``data`` from address ``start`` on; ``rows`` are all that may overlap it, in order.

    A row that can be decompressed keeps its address and its other bytes. Bytes outside such rows become new rows.
    """
    patch = Patch([], [], [])
    position, end = start, start + len(data)
    for number, (address, size, body) in enumerate(rows):
        if address >= end or address + size <= start:
            continue
        try:
            whole = unpack_body(size, body)
        except BackstayError:
            whole = b""
        if len(whole) != size:
            patch.drop.append(number)
            continue
        if position < address:
            patch.add.append((position, data[position - start : address - start]))
        low, high = max(start, address), min(end, address + size)
        changed = whole[: low - address] + data[low - start : high - start] + whole[high - address :]
        if changed != whole:
            patch.change.append((number, changed))
        position = max(position, high)
    if position < end:
        patch.add.append((position, data[position - start :]))
    return patch
