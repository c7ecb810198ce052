"""A value as (kind, count, bytes), such that a value that grows only appends bytes.

msgpack writes the length of a list before its elements, so a list that grows by one changes its first bytes. A body
leaves that header out and keeps the count separately: the body of a longer list *starts with* the body of the
shorter one, and the same holds for texts, byte strings and dictionaries in insertion order. Everything else is a
body of kind ``VALUE``: its whole encoding.

``Encoded`` carries bytes from another encoder, with their own type tag: they are stored and returned unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backstay.codec import decode, encode
from backstay.codec.msgpack import VALUE_BYTES_MAX, header
from backstay.errors import DecodeError, EncodeError, InvalidInput

VALUE, LIST, MAP, TEXT, BYTES = "v", "l", "m", "t", "b"
FOREIGN = "="
"""The kind of a value from another encoder starts with this character; the encoder's tag follows."""

TAG_LENGTH_MAX = 64
ITEMS_AT_ONCE = 32
ENCODED_AT_ONCE = 48 * 1024
"""A list of more items is encoded in parts of about this many bytes, which takes a third of the time for a megabyte."""


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


class Body:
    """The bytes of one value, in parts; ``count`` is its number of elements where ``kind`` has elements, else 0."""

    __slots__ = ("count", "kind", "parts")

    def __init__(self, kind: str, count: int, *parts: bytes) -> None:
        self.kind = kind
        self.count = count
        self.parts = list(parts)

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return sum(map(len, self.parts))

    @property
    def data(self) -> bytes:
        """Return the bytes."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def digest(self) -> bytes:
        """Return the SHA-256 of the bytes."""
        hasher = hashlib.sha256()
        for part in self.parts:
            hasher.update(part)
        return hasher.digest()

    def after(self, previous: Sequence[bytes]) -> bytes | None:
        """Return the bytes that follow ``previous``; None if the value does not start with it. Nothing is joined."""
        parts = self.parts
        if len(parts) == len(previous) == 1:
            return parts[0][len(previous[0]) :] if parts[0].startswith(previous[0]) else None
        number = start = 0  # the part, and the byte in it, where the comparison is
        for part in previous:
            done = 0
            while done < len(part):
                if number == len(parts):
                    return None
                own = parts[number]
                length = min(len(own) - start, len(part) - done)
                if not own.startswith(memoryview(part)[done : done + length], start):
                    return None
                done, start = done + length, start + length
                if start == len(own):
                    number, start = number + 1, 0
        return b"".join((parts[number][start:], *parts[number + 1 :])) if number < len(parts) else b""


def to_body(value: Any, path: str) -> Body:
    """Encode a value; raise EncodeError with the path of the part that cannot be stored exactly."""
    cls = type(value)
    kind, count = VALUE, 0
    if cls is list or (cls is dict and _TEXT_KEYS.issuperset(map(type, value))):
        kind, count = LIST if cls is list else MAP, len(value)
        if kind == LIST and count > ITEMS_AT_ONCE:
            return _long_list(value, path)
        # The header that msgpack writes before the items of a list or map has 1, 3 or 5 bytes.
        data = encode(value, path)[1 if count < 16 else 3 if count < 65536 else 5 :]
    elif cls is str:
        try:
            kind, data = TEXT, value.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(
                f"{path}: text with a lone surrogate at character {error.start} cannot be stored",
                path=path,
                hint="Clean it with text.encode('utf-8', 'replace').decode()",
            ) from None
    elif cls is bytes:
        kind, data = BYTES, value
    elif cls is Encoded:
        kind, data = FOREIGN + value.tag, value.data
    else:
        data = encode(value, path)
    if len(data) > VALUE_BYTES_MAX:
        raise _too_large(path, len(data))
    return Body(kind, count, data)


_TEXT_KEYS = frozenset({str})


def _long_list(value: list[Any], path: str) -> Body:
    """Encode a list in parts for which the C library has memory at hand; more comes from the system page by page."""
    parts: list[bytes] = []
    at, count = 0, ITEMS_AT_ONCE
    try:
        while at < len(value):
            items = value[at : at + count]
            data = encode(items, path)
            parts.append(data[1 if len(items) < 16 else 3 if len(items) < 65536 else 5 :])
            at += len(items)  # the count must be right even if another thread changes the list meanwhile
            count = max(1, ENCODED_AT_ONCE * len(items) // len(data))  # if they are as long as the last ones
    except EncodeError:
        encode(value, path)  # raises the error with the right index in its path
        raise
    body = Body(LIST, at, *parts)
    if body.size > VALUE_BYTES_MAX:
        raise _too_large(path, body.size)
    return body


def _too_large(path: str, size: int) -> EncodeError:
    return EncodeError(
        f"{path} takes {size} bytes encoded, more than {VALUE_BYTES_MAX}",
        path=path,
        hint="Split it over several keys, or keep the data in a file and store its path",
    )


def from_body(kind: str, count: int, parts: Sequence[bytes], again: bool = False) -> Any:
    """Return the value whose body is the concatenation of ``parts``; raise DecodeError if there is none.

    ``again``: see ``decode``.
    """
    if kind in (LIST, MAP):
        first = header(count, 0x90, 0xDC) if kind == LIST else header(count, 0x80, 0xDE)
        return decode(first, *parts, again=again)
    if kind == VALUE:
        return decode(*parts, again=again)
    data = b"".join(parts)
    if kind == TEXT:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise DecodeError("a stored string is not valid UTF-8") from error
    if kind == BYTES:
        return data
    if kind.startswith(FOREIGN):
        return Encoded(kind[1:], data)
    raise DecodeError(f"unknown kind of value {kind!r}", hint="A newer version of Backstay wrote it: upgrade Backstay")
