"""A value as (kind, count, bytes), made so that growth is a pure append.

msgpack writes the length of a list before its elements, so a list that grows by one changes its first bytes. A body
leaves that outer header out and keeps the count beside it: the body of a longer list *begins with* the body of the
shorter one, and the same holds for texts, byte strings and dictionaries in insertion order. Everything else is a
body of kind ``VALUE``: its whole encoding.

``Encoded`` carries bytes that somebody else encoded, with their own type tag: they are stored and returned as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backstay.codec import decode, encode
from backstay.codec.limits import VALUE_BYTES_MAX
from backstay.errors import DecodeError, EncodeError, InvalidInput

VALUE, LIST, MAP, TEXT, BYTES = "v", "l", "m", "t", "b"
FOREIGN = "="
"""First character of the kind of a value that somebody else encoded; their tag follows."""

TAG_LENGTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Encoded:
    """Bytes that are a value already, in an encoding named by ``tag``; stored and returned unchanged."""

    tag: str
    data: bytes

    def __post_init__(self) -> None:
        if type(self.tag) is not str or not 1 <= len(self.tag) <= TAG_LENGTH_MAX:
            raise InvalidInput(f"the tag of encoded bytes must be text of 1 to {TAG_LENGTH_MAX} characters")
        if type(self.data) is not bytes:
            raise InvalidInput(f"encoded data must be bytes, not {type(self.data).__name__}")


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of one value; ``count`` is its number of elements where ``kind`` has elements, else 0."""

    kind: str
    count: int
    data: bytes

    def digest(self) -> bytes:
        """Return the SHA-256 of the bytes."""
        return hashlib.sha256(self.data).digest()


def to_body(value: Any, path: str) -> Body:
    """Encode a value; raise EncodeError with the path of what cannot be stored exactly."""
    make = _MAKERS.get(type(value))
    body = make(value, path) if make else Body(VALUE, 0, encode(value, path))
    if len(body.data) > VALUE_BYTES_MAX:
        raise EncodeError(
            f"{path} takes {len(body.data)} bytes encoded, more than {VALUE_BYTES_MAX}",
            path=path,
            hint="Split it over several keys, or keep the file elsewhere and store its address",
        )
    return body


def from_body(kind: str, count: int, parts: Sequence[bytes]) -> Any:
    """Rebuild the value whose body is the concatenation of ``parts``; raise DecodeError if it is none."""
    read = _READERS.get(kind)
    if read is not None:
        return read(count, parts)
    if kind.startswith(FOREIGN):
        return Encoded(kind[1:], b"".join(parts))
    raise DecodeError(f"unknown kind of value {kind!r}", hint="It was written by a newer version of Backstay")


# The header that msgpack writes before a list's or map's items, which a body leaves out, has 1, 3 or 5 bytes.


def _list_body(value: list[Any], path: str) -> Body:
    count = len(value)
    return Body(LIST, count, encode(value, path)[1 if count < 16 else 3 if count < 65536 else 5 :])


def _map_body(value: dict[Any, Any], path: str) -> Body:
    for key in value:
        if type(key) is not str:
            return Body(VALUE, 0, encode(value, path))
    count = len(value)
    return Body(MAP, count, encode(value, path)[1 if count < 16 else 3 if count < 65536 else 5 :])


def _text_body(value: str, path: str) -> Body:
    try:
        return Body(TEXT, 0, value.encode())
    except UnicodeEncodeError as error:
        raise EncodeError(
            f"{path}: text with a lone surrogate at character {error.start} cannot be stored",
            path=path,
            hint="Clean it with text.encode('utf-8', 'replace').decode()",
        ) from None


def _header(count: int, fix: int, wide: int) -> bytes:
    if count < 16:
        return bytes((fix | count,))
    if count < 65536:
        return bytes((wide,)) + count.to_bytes(2, "big")
    return bytes((wide + 1,)) + count.to_bytes(4, "big")


def _read_text(parts: Sequence[bytes]) -> str:
    try:
        return b"".join(parts).decode()
    except UnicodeDecodeError as error:
        raise DecodeError("a stored text is not valid UTF-8") from error


_MAKERS: dict[type, Callable[[Any, str], Body]] = {
    list: _list_body,
    dict: _map_body,
    str: _text_body,
    bytes: lambda value, path: Body(BYTES, 0, value),
    Encoded: lambda value, path: Body(FOREIGN + value.tag, 0, value.data),
}

_READERS: dict[str, Callable[[int, Sequence[bytes]], Any]] = {
    VALUE: lambda count, parts: decode(*parts),
    LIST: lambda count, parts: decode(_header(count, 0x90, 0xDC), *parts),
    MAP: lambda count, parts: decode(_header(count, 0x80, 0xDE), *parts),
    TEXT: lambda count, parts: _read_text(parts),
    BYTES: lambda count, parts: b"".join(parts),
}
