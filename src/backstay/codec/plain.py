"""One level of msgpack, whole or refused: the C decoder alone would ignore bytes left over after the value.

The value is decoded as the first of two; the second is a number no writer of bytes can know, so anything left over is
seen in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import ormsgpack

from backstay.errors import DecodeError

PAIR: Final = b"\x92"
# A uint64 above 2**63, new in every process and never stored.
END_BYTES: Final = b"\xcf" + bytes([0x80 | os.urandom(1)[0]]) + os.urandom(7)
END: Final = int.from_bytes(END_BYTES[1:])


def unpack_whole(data: bytes, ext_hook: Callable[[int, bytes], Any] | None = None) -> Any:
    """Decode one value that must take up all of the data. Raises ValueError as the C decoder does, or DecodeError."""
    pair = ormsgpack.unpackb(PAIR + data + END_BYTES, ext_hook=ext_hook)
    if type(pair[1]) is not int or pair[1] != END:  # not every value can be compared, such as an array
        raise DecodeError("bytes are left over after a value")
    return pair[0]


def unpack_array(data: bytes, length: int) -> list[Any]:
    """Decode an array of exactly this length that holds no ext."""
    parts = unpack_whole(data)
    if type(parts) is not list or len(parts) != length:
        raise DecodeError(f"stored value is no array of {length}")
    return parts
