"""Msgpack and JSON as slices: where each value starts and ends, so that its bytes can be copied unchanged.

Nothing that the bytes name is imported, built or called: an extension is a length and bytes. A returned slice is valid
msgpack; the content of an extension is not checked. Damage raises ``DecodeError``, and only that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import ormsgpack

from backstay.codec.msgpack import header
from backstay.errors import DecodeError

DEPTH_MAX = 1000
"""How deep containers may be nested; LangGraph's own decoder allows a little more."""

NIL = b"\xc0"

_FIX_MAP, _FIX_ARRAY, _FIX_STR, _NIL, _NEGATIVE = 0x80, 0x90, 0xA0, 0xC0, 0xE0  # where each range of first bytes starts

_EXTENSION_BYTES = 1  # its code, which is not part of the length

# First byte: how many bytes follow that hold the length. The table's name says which things the length counts.
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BINARIES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_LENGTHS = {**_STRINGS, **_BINARIES, **_EXTENSIONS, **_ARRAYS, **_MAPS}

# First byte: how many bytes follow, always.
_FIXED = {
    **{0xC0: 0, 0xC2: 0, 0xC3: 0},  # nil, false, true
    **{0xCA: 4, 0xCB: 8},  # floats
    **{0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},  # integers
    **{0xD4 + power: _EXTENSION_BYTES + (1 << power) for power in range(5)},  # extensions of 1 to 16 bytes
}


def end_of(data: bytes, start: int = 0) -> int:
    """Return where the value that starts at ``start`` ends."""
    waiting = [1]  # how many values each open container still needs
    at = start
    while waiting:
        waiting[-1] -= 1
        at, inside = _step(data, at)
        if inside > len(data) - at:  # each takes a byte at least
            raise DecodeError(f"a container before byte {at} has more values than there are bytes")
        waiting.append(inside)
        if len(waiting) > DEPTH_MAX:
            raise DecodeError(f"values are nested more than {DEPTH_MAX} deep")
        while waiting and waiting[-1] == 0:
            waiting.pop()
    return at


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Return where a value's own bytes end, and how many inner values follow."""
    if at >= len(data):
        raise DecodeError(f"a value is missing at byte {at}, where the bytes end")
    first = data[at]
    at += 1
    if first < _FIX_MAP or first >= _NEGATIVE:  # small integers
        return at, 0
    if first < _FIX_ARRAY:
        return at, 2 * (first - _FIX_MAP)
    if first < _FIX_STR:
        return at, first - _FIX_ARRAY
    if first < _NIL:
        return _after_text(data, at, first - _FIX_STR), 0
    if first in _FIXED:
        return _after(data, at, _FIXED[first]), 0
    if first not in _LENGTHS:
        raise DecodeError(f"byte {at - 1} does not start a value")
    body = _after(data, at, _LENGTHS[first])
    length = int.from_bytes(data[at:body], "big")
    if first in _ARRAYS or first in _MAPS:
        return body, 2 * length if first in _MAPS else length
    if first in _STRINGS:
        return _after_text(data, body, length), 0
    return _after(data, body, length + _EXTENSION_BYTES * (first in _EXTENSIONS)), 0


def _after(data: bytes, at: int, size: int) -> int:
    if size > len(data) - at:
        raise DecodeError(f"a value at byte {at} is cut off")
    return at + size


def _after_text(data: bytes, at: int, size: int) -> int:
    end = _after(data, at, size)
    _text(data[at:end], at)
    return end


def _text(data: bytes, at: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"a text at byte {at} is not UTF-8") from error


def msgpack_items(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each value of a map; no bytes may follow the map."""
    if not data or not (_FIX_MAP <= data[0] < _FIX_ARRAY or data[0] in _MAPS):
        raise DecodeError("is not a map")
    at, inside = _step(data, 0)
    for _ in range(inside // 2):
        start = end_of(data, at)
        name = plain_msgpack(data[at:start])
        if not isinstance(name, str):
            raise DecodeError(f"a name at byte {at} is not a text")
        at = end_of(data, start)
        yield name, data[start:at]
    if at != len(data):
        raise DecodeError(f"{len(data) - at} bytes follow its end")


def plain_msgpack(data: bytes) -> Any:
    """Return numbers, texts, lists and maps; refuse values that name a type."""
    try:
        return ormsgpack.unpackb(data, ext_hook=_refuse_extension, option=ormsgpack.OPT_NON_STR_KEYS)
    except (ValueError, RecursionError, TypeError) as error:
        raise DecodeError("is not plain data") from error


def _refuse_extension(code: int, _: bytes) -> NoReturn:
    raise ValueError(f"extension {code}")


def binary_in(data: bytes) -> bytes | None:
    """Return the content of a slice that holds bytes, otherwise None."""
    if data[0] not in _BINARIES:
        return None
    return data[1 + _BINARIES[data[0]] :]


def array_of(slices: list[bytes]) -> bytes:
    """Return a msgpack array of values that are encoded already."""
    return header(len(slices), 0x90, 0xDC) + b"".join(slices)


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def json_items(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and text of each value of a JSON object; no text may follow the object."""
    text = _text(data)
    at = _mark(text, 0, "{")
    if text.startswith("}", at):
        at += 1
    else:
        more = True
        while more:
            name, at = _parsed(text, at)
            if not isinstance(name, str):
                raise DecodeError(f"a name at character {at} is not a text")
            start = _mark(text, at, ":")
            _, end = _parsed(text, start)
            yield name, text[start:end].encode()
            at = _after_space(text, end)
            more = text.startswith(",", at)
            at = _mark(text, at, "," if more else "}")
    if at != len(text):
        raise DecodeError(f"{len(text) - at} characters follow its end")


def plain_json(data: bytes | str) -> Any:
    """Return the plain data of a JSON text; objects that name a type stay dictionaries."""
    text = data if isinstance(data, str) else _text(data)
    value, end = _parsed(text, _after_space(text, 0))
    if _after_space(text, end) != len(text):
        raise DecodeError("is not JSON: text follows its end")
    return value


def _parsed(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"is not JSON at character {at}") from error


def _mark(text: str, at: int, mark: str) -> int:
    """Return where the next token starts, after a mark that must be here."""
    at = _after_space(text, at)
    if not text.startswith(mark, at):
        raise DecodeError(f"is not a JSON object: {mark} is missing at character {at}")
    return _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
