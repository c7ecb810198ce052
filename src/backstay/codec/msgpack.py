"""One level of msgpack: how large and how deep it may be, and how it is read whole or refused.

The limits are the same when encoding and when decoding: a limit on one side only would let a value be written that
cannot be read, or read that cannot be saved again. The two depth limits also bound the native stack: the C decoder
needs about 0.7 KB of it for every nested container, so without ``EXT_INNER_DEPTH_MAX`` a few kilobytes of forged bytes
could crash the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import ormsgpack

from backstay.errors import DecodeError

DEPTH_MAX: Final = 255
"""Lists and dicts nested in each other, outside any other type; it is the C encoder's own limit."""

EXT_DEPTH_MAX: Final = 64
"""Values of other types (tuple, set, registered class, dict with keys other than str) nested in each other."""

EXT_INNER_DEPTH_MAX: Final = 32
"""Lists and dicts nested in each other inside one such value, up to the next one."""

VALUE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of one encoded value."""

INT_BITS_MAX: Final = 65_536
"""Bits of one int, also of a Fraction's two."""

DECIMAL_CHARS_MAX: Final = 65_536
"""Characters of one Decimal written out."""

ARRAY_DIMS_MAX: Final = 32
"""Dimensions of one numpy array; the smallest maximum of the numpy versions supported."""

NAME_BYTES_MAX: Final = 255
"""UTF-8 bytes of a registered type's name."""

VERSION_MAX: Final = 2**31 - 1
"""The highest version a type may be registered with."""

# The C decoder's own limit. The depth check uses up all of it but what a value may use.
DECODER_DEPTH: Final = 1022

assert max(DEPTH_MAX, EXT_INNER_DEPTH_MAX) < DECODER_DEPTH


class Unencodable(Exception):
    """A value that would not round-trip. The search for its path turns this into the EncodeError that users see."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        self.reason = reason
        self.hint = hint
        super().__init__(reason)


# The C decoder ignores bytes after a value. So a value is decoded as the first of a pair, whose second is a number that
# no writer of bytes can know (a uint64 above 2**63, new in every process and never stored): extra bytes take its place.
PAIR: Final = b"\x92"
END_BYTES: Final = b"\xcf" + bytes([0x80 | os.urandom(1)[0]]) + os.urandom(7)
END: Final = int.from_bytes(END_BYTES[1:])


def header(count: int, short: int, long: int) -> bytes:
    """Return the bytes before the items of an array (0x90, 0xDC) or a map (0x80, 0xDE)."""
    if count < 16:
        return bytes((short | count,))
    return bytes((long,)) + count.to_bytes(2) if count < 65_536 else bytes((long + 1,)) + count.to_bytes(4)


def unpack_whole(data: bytes, ext_hook: Callable[[int, bytes], Any] | None = None) -> Any:
    """Decode one value that must use all of the data; raise ValueError as the C decoder does, or DecodeError."""
    pair = ormsgpack.unpackb(PAIR + data + END_BYTES, ext_hook=ext_hook)
    if type(pair[1]) is not int or pair[1] != END:  # not every value can be compared, such as an array
        raise DecodeError("there are extra bytes after the value")
    return pair[0]


def unpack_array(data: bytes, length: int) -> list[Any]:
    """Decode an array of exactly this length that holds no ext."""
    parts = unpack_whole(data)
    if type(parts) is not list or len(parts) != length:
        raise DecodeError(f"a stored value is not an array of {length} items")
    return parts


# Depth ------------------------------------------------------------------------------------------------------------
#
# The bytes show how deep containers nest before anything is built. Three checks, cheapest first: too few bytes to be
# deep; too few bytes that could open a container; and the C decoder itself, started so far down that it hits its own
# limit. A short Python scan comes before the last one, because text in many languages consists of bytes that could
# open a container, and 40 us for every small object adds up. Ext payloads are opaque here: each is a level of its own.

_CONTAINERS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_SCAN_STEPS_MAX: Final = 128

# First byte -> (bytes of length field, bytes other than it and the content); for scalars the length field is absent.
_FIXED: Final = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {0xCC + i: 1 << i for i in range(4)}
_FIXED.update({0xD0 + i: 1 << i for i in range(4)})
_FIXED.update({0xD4 + i: 1 + (1 << i) for i in range(5)})
_SIZED: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZED.update({0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)})
# First byte -> (bytes of the count field, items per count).
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def deeper_than(data: bytes, limit: int) -> bool:
    """Return whether a level nests more than ``limit`` non-empty containers; malformed bytes count as flat."""
    if not may_be_deeper_than(data, limit):
        return False
    scanned = _scan(data, limit)
    if scanned is not None:
        return scanned
    try:
        ormsgpack.unpackb(b"\x91" * (DECODER_DEPTH - limit) + data, ext_hook=lambda code, content: None)
    except ValueError as error:
        return "ecursion" in str(error)
    return False


def may_be_deeper_than(data: bytes, limit: int) -> bool:
    """Return, at memory speed, whether a level could be deeper; False is certain."""
    return len(data) > limit and len(data) - len(data.translate(None, _CONTAINERS)) > limit


def has_more_items_than(data: bytes, limit: int) -> bool:
    """Return whether msgpack holds more objects than ``limit``, containers included; malformed bytes have no more."""
    at, left = 0, 1
    try:
        for _ in range(limit):
            if not left:
                return False
            at, items = _step(data, at)
            left += items - 1
    except (IndexError, KeyError):
        return False  # incomplete or reserved: the decoder reports it
    return left > 0


def _scan(data: bytes, limit: int) -> bool | None:
    """Walk the headers; return None if there are too many for this to be cheap."""
    at = 0
    open_counts = [1]
    try:
        for _ in range(_SCAN_STEPS_MAX):
            while open_counts[-1] == 0:
                open_counts.pop()
                if not open_counts:
                    return False
            open_counts[-1] -= 1
            at, items = _step(data, at)
            if items:
                open_counts.append(items)
                if len(open_counts) > limit + 1:
                    return True
    except (IndexError, KeyError):
        return False  # incomplete or reserved: the decoder reports it
    return None


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Return where the next object starts, and how many items this one contains."""
    head = data[at]
    at += 1
    if head < 0x80 or head >= 0xE0:
        return at, 0
    if head < 0x90:
        return at, (head & 15) * 2
    if head < 0xA0:
        return at, head & 15
    if head < 0xC0:
        return at + (head & 31), 0
    if head in _SIZED:
        width, extra = _SIZED[head]
        return at + width + extra + int.from_bytes(data[at : at + width]), 0
    if head in _COUNTED:
        width, per = _COUNTED[head]
        return at + width, per * int.from_bytes(data[at : at + width])
    return at + _FIXED[head], 0
