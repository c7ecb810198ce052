"""A piece: where some consecutive bytes of a value are kept.

A value's bytes are described by pieces. A piece is either a **range** of a source (an append-only stream, named by
an integer, or an immutable blob, named by the SHA-256 of its bytes) or, for a few bytes that an address would be
larger than, the **bytes themselves**. A list that only grows is one range whose end moves.

Rules: no piece is empty; ranges that touch are one range; a literal is at most ``LITERAL_BYTES_MAX`` long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from backstay.errors import DecodeError

LITERAL_BYTES_MAX = 24
"""Longer bytes go to a stream: a range costs about as much as this in a manifest."""

OFFSET_BITS = 28
STREAM_BYTES_MAX = 1 << OFFSET_BITS
"""A stream rolls over before it reaches this, so one 63-bit integer addresses every byte: stream << 28 | offset."""

STREAM_ID_MAX = (1 << (63 - OFFSET_BITS)) - 1

DIGEST_BYTES = 32


class Range(NamedTuple):
    """``length`` bytes of ``source`` from ``start`` on."""

    source: int | bytes
    start: int
    length: int


Piece = Range | bytes


def piece_length(piece: Piece) -> int:
    """Return how many bytes of the value the piece stands for."""
    return piece.length if isinstance(piece, Range) else len(piece)


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same bytes in as few pieces as touching ranges and short literals allow."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Range):
            if piece.length == 0:
                continue
            if isinstance(last, Range) and last.source == piece.source and last.start + last.length == piece.start:
                joined[-1] = Range(last.source, last.start, last.length + piece.length)
                continue
        elif not piece:
            continue
        elif isinstance(last, bytes) and len(last) + len(piece) <= LITERAL_BYTES_MAX:
            joined[-1] = last + piece
            continue
        joined.append(piece)
    return joined


def cut_pieces(pieces: Sequence[Piece], start: int, length: int) -> Iterator[Piece]:
    """Yield the pieces of the ``length`` bytes from ``start`` on."""
    end = start + length
    position = 0
    for piece in pieces:
        size = piece_length(piece)
        low, high = max(start - position, 0), min(end - position, size)
        if low < high:
            yield Range(piece.source, piece.start + low, high - low) if isinstance(piece, Range) else piece[low:high]
        position += size
        if position >= end:
            return


def grown_by(old: Sequence[Piece], new: Sequence[Piece]) -> list[Piece] | None:
    """Return the pieces that a value grew by; None if its beginning is not kept where it was."""
    if not old or len(new) < len(old) or list(new[: len(old) - 1]) != list(old[:-1]):
        return None
    last, now = old[-1], new[len(old) - 1]
    if isinstance(last, bytes) or isinstance(now, bytes):
        return [*new[len(old) :]] if last == now else None
    if (now.source, now.start) != (last.source, last.start) or now.length < last.length:
        return None
    rest = [Range(now.source, now.start + last.length, now.length - last.length)] if now.length > last.length else []
    return [*rest, *new[len(old) :]]


def pack_pieces(pieces: Iterable[Piece]) -> list[Any]:
    """Return a flat list of plain values: a literal as itself, a range as its three fields."""
    flat: list[Any] = []
    for piece in pieces:
        if isinstance(piece, Range):
            # The length first: it is an integer, so a literal (bytes) is told from a range by its first element.
            flat += (piece.length, piece.source, piece.start)
        else:
            flat.append(piece)
    return flat


def unpack_pieces(flat: Sequence[Any]) -> tuple[Piece, ...]:
    """Return the pieces of ``pack_pieces``; raise DecodeError on anything else."""
    pieces: list[Piece] = []
    position = 0
    try:
        while position < len(flat):
            first = flat[position]
            if isinstance(first, bytes):
                pieces.append(first)
                position += 1
                continue
            source, start = flat[position + 1], flat[position + 2]
            if type(first) is not int or first < 1 or type(start) is not int or start < 0 or not _is_source(source):
                raise DecodeError("a manifest names an impossible range")
            pieces.append(Range(source, start, first))
            position += 3
    except (IndexError, TypeError) as error:
        raise DecodeError("a manifest's list of pieces is cut short") from error
    return tuple(pieces)


def _is_source(source: object) -> bool:
    if type(source) is int:
        return 0 < source <= STREAM_ID_MAX
    return isinstance(source, bytes) and len(source) == DIGEST_BYTES
