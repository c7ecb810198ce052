"""How both SQL stores lay values out: keys, addresses, compressed bodies. Bytes only, no I/O."""

from __future__ import annotations

import re
import threading

from backstay.codec import compress, decompress
from backstay.errors import Corrupted, DecodeError
from backstay.pieces.piece import OFFSET_BITS

SEQ_BITS = 32
SEQ_MAX = (1 << SEQ_BITS) - 1
UNREADABLE = "\0"
"""No id has it. A row whose id cannot be read has one with it, so that it is told and hides no other row."""

COMPRESS_BYTES_MIN = 256
REMEMBERED_BYTES_MIN = 32768
COMPRESS_AT_ONCE_BYTES = 16384
"""Smaller chunks are stored as they are: compressing them later, with their neighbours, is smaller and cheaper."""


_IS_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


def key_of(lane: int, seq: int) -> int:
    """Return a checkpoint's primary key."""
    return lane << SEQ_BITS | seq


def span_of(lane: int, before: int | None = None) -> tuple[int, int]:
    """Return the exclusive bounds of a lane's keys, optionally only those below the sequence number ``before``."""
    return key_of(lane, 0), key_of(lane, SEQ_MAX if before is None else min(max(before, 0), SEQ_MAX))


def address_of(stream: int, offset: int) -> int:
    """Return the address of a byte of a stream."""
    return stream << OFFSET_BITS | offset


def uuid_bytes(name: str) -> bytes | None:
    """Return the 16 bytes of an id that is a UUID in its usual form, else None."""
    return bytes.fromhex(name.replace("-", "")) if _IS_UUID(name) else None


def uuid_text(raw: bytes) -> str:
    """Return the usual form of a UUID's 16 bytes."""
    digits = raw.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def unreadable_id(stored: object) -> str:
    """Return what stands for an id that cannot be read."""
    return f"?{stored.hex() if isinstance(stored, bytes) else stored}{UNREADABLE}"


def pack_body(data: bytes, least: int = COMPRESS_BYTES_MIN) -> bytes:
    """Return the bytes compressed if that makes them shorter; only then do they differ in length from the original."""
    if len(data) < least:
        return data
    packed = compress(data)
    return packed if len(packed) < len(data) else data


class _Last(threading.local):
    """The large body this thread unpacked last: reading a history walks through one row of a stream many times."""

    kept = (b"", b"")  # packed and plain, in one assignment: a signal handler that reads may come in between two


_last = _Last()


def unpack_body(size: int, body: bytes) -> bytes:
    """Return the original bytes of ``pack_body``, which were ``size`` long."""
    if len(body) == size:
        return body
    if size < REMEMBERED_BYTES_MIN:
        return decompress(body, size)
    packed, plain = _last.kept
    if body != packed or size != len(plain):  # comparing costs a fiftieth of unpacking, and is never wrong
        plain = decompress(body, size)
        _last.kept = (body, plain)
    return plain


def unpack_stored(size: int, body: bytes, where: str) -> bytes:
    """Return the original bytes of a stored row; what cannot be unpacked is damage."""
    try:
        return unpack_body(size, body)
    except DecodeError as error:
        raise Corrupted(f"{where} cannot be decompressed") from error


def unpack_or_nothing(size: int, body: bytes) -> bytes:
    """Return the original bytes, or none if they cannot be unpacked: the digest tells, and no other row is hidden."""
    try:
        return unpack_body(size, body)
    except DecodeError:
        return b""


Chunk = tuple[int, int, bytes]  # address, size before compression, body


def touching(rows: list[Chunk]) -> list[list[Chunk]]:
    """Return rows, given in order, in runs that follow each other without a gap."""
    runs: list[list[Chunk]] = []
    for row in rows:
        if runs and runs[-1][-1][0] + runs[-1][-1][1] == row[0]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


ODD_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def odd_value(error: Exception, path: str) -> Corrupted:
    """Return our error for one that only a value can have caused that Backstay never writes.

    What callers hand in was checked long before, so it came from a row.
    """
    return Corrupted(
        f"a row of the database holds a value that Backstay never writes ({type(error).__name__})",
        path=path,
        hint="store.verify() shows what is affected; restore a copy of the database",
    )
