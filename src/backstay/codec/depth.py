"""How deep the containers in one level of msgpack nest, decided from the bytes before anything is built.

Three answers, cheapest first: too few bytes to be deep; too few bytes that could begin a container; and the C decoder
itself, started so far down that its own limit trips. A short Python scan stands before the last one, because text
in many languages consists of bytes that could begin a container, and 40 us for every small object would be felt.
Ext payloads are opaque here: each is a level of its own.
"""

from __future__ import annotations

from typing import Final

import ormsgpack

from backstay.codec.limits import DECODER_DEPTH

_CONTAINERS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_SCAN_STEPS_MAX: Final = 128

# First byte -> (bytes of length field, bytes besides it and the content); for scalars the length field is absent.
_FIXED: Final = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {0xCC + i: 1 << i for i in range(4)}
_FIXED.update({0xD0 + i: 1 << i for i in range(4)})
_FIXED.update({0xD4 + i: 1 + (1 << i) for i in range(5)})
_SIZED: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZED.update({0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)})
# First byte -> (bytes of the count field, items per count).
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def deeper_than(data: bytes, limit: int) -> bool:
    """Tell whether a level nests more than ``limit`` non-empty containers; malformed bytes count as flat."""
    if not may_be_deeper_than(data, limit):
        return False
    scanned = _scan(data, limit)
    return _probe(data, limit) if scanned is None else scanned


def may_be_deeper_than(data: bytes, limit: int) -> bool:
    """Tell in one pass at memory speed whether a level could be deeper; False is certain."""
    return len(data) > limit and len(data) - len(data.translate(None, _CONTAINERS)) > limit


def has_more_items_than(data: bytes, limit: int) -> bool:
    """Tell whether msgpack holds more objects than ``limit``, containers included; malformed bytes have no more."""
    at, left = 0, 1
    try:
        for _ in range(limit):
            if not left:
                return False
            at, items = _step(data, at)
            left += items - 1
    except (IndexError, KeyError):
        return False  # cut short or reserved: the decoder will say so
    return left > 0


def _scan(data: bytes, limit: int) -> bool | None:
    """Walk the headers; None if there are too many for this to be the cheap way."""
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
        return False  # cut short or reserved: the decoder will say so
    return None


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Return where the next object begins, and how many items this one opens."""
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


def _skip(code: int, data: bytes) -> None:
    del code, data


def _probe(data: bytes, limit: int) -> bool:
    try:
        ormsgpack.unpackb(b"\x91" * (DECODER_DEPTH - limit) + data, ext_hook=_skip)
    except ValueError as error:
        return "ecursion" in str(error)
    return False
