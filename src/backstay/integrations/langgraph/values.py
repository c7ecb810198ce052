"""A channel's value between LangGraph's serializer and our pieces.

A serializer gives (tag, bytes). msgpack writes the length of a list or dictionary before its elements, so one that
grows changes its first bytes; as in ``pieces.body`` that header is left out and the count is kept beside it, so that
growth is a pure append. The header is put back when the value is read: the serializer gets the very bytes it gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol

from backstay.codec.limits import VALUE_BYTES_MAX
from backstay.errors import BackstayError, DecodeError, EncodeError
from backstay.pieces.body import FOREIGN, Body

MSGPACK = "msgpack"
LIST, MAP = FOREIGN + "[" + MSGPACK, FOREIGN + "{" + MSGPACK
"""The kinds of lists and dictionaries in msgpack without their header."""

_HEADS = {LIST: (0x90, 0xDC), MAP: (0x80, 0xDE)}  # of up to 15 elements (with the count in it), of more


@dataclass(frozen=True, slots=True)
class Typed:
    """Bytes that are a value already, under a tag of LangGraph's serializer: stored as if it had just given them."""

    tag: str
    data: bytes


def dump(serde: SerializerProtocol, value: Any, path: str) -> Typed:
    """Return a value as the serializer writes it; what it cannot write is refused with the path."""
    if type(value) is Typed:
        return value
    try:
        dumps_at = getattr(serde, "dumps_at", None)
        tag, data = serde.dumps_typed(value) if dumps_at is None else dumps_at(value, path)
    except BackstayError:
        raise
    except Exception as error:
        raise EncodeError(
            f"{path} cannot be stored: {error}", path=path, hint="Store plain values, or give the saver another serde="
        ) from error
    if len(data) > VALUE_BYTES_MAX:
        raise EncodeError(
            f"{path} takes {len(data)} bytes encoded, more than {VALUE_BYTES_MAX}",
            path=path,
            hint="Split it over several channels, or keep the file elsewhere and store its address",
        )
    return Typed(tag, bytes(data))


def load(serde: SerializerProtocol, typed: Typed, path: str) -> Any:
    """Return the value that the serializer reads from its bytes."""
    try:
        return serde.loads_typed((typed.tag, typed.data))
    except BackstayError as error:
        if error.path is None:
            error.path = path
        raise
    except Exception as error:
        raise DecodeError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            path=path,
            hint="Is it the serializer (and the key) that it was written with?",
        ) from error


def to_body(typed: Typed) -> Body:
    """Return a value's bytes as they are kept."""
    if typed.tag == MSGPACK and typed.data:
        for kind, (short, long) in _HEADS.items():
            count = _count(typed.data, short, long)
            if count is not None:
                return Body(kind, count, typed.data[len(_header(count, short, long)) :])
    return Body(FOREIGN + typed.tag, 0, typed.data)


def from_body(kind: str, count: int, parts: Sequence[bytes]) -> Typed:
    """Return the bytes that the serializer gave."""
    heads = _HEADS.get(kind)
    if heads is not None:
        return Typed(MSGPACK, b"".join((_header(count, *heads), *parts)))
    return Typed(kind[len(FOREIGN) :], b"".join(parts))


def list_header(count: int) -> bytes:
    """Return the msgpack header of a list of this length."""
    return _header(count, *_HEADS[LIST])


def _count(data: bytes, short: int, long: int) -> int | None:
    """Return how many elements the header names; None if it is none, or not the shortest one there is."""
    first = data[0]
    if first & 0xF0 == short:
        return first & 0x0F
    if first not in (long, long + 1):
        return None
    size = 2 if first == long else 4
    count = int.from_bytes(data[1 : 1 + size])
    return count if len(data) > size and data.startswith(_header(count, short, long)) else None


def _header(count: int, short: int, long: int) -> bytes:
    if count < 16:
        return bytes((short | count,))
    return bytes((long,)) + count.to_bytes(2) if count < 65536 else bytes((long + 1,)) + count.to_bytes(4)
