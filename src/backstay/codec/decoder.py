"""Decode msgpack: any bytes give a value or DecodeError, in bounded time and memory.

Decoding imports and calls nothing but the built-in types and the registered classes. The payload of an ext is one
level of msgpack of its own; its depth is checked before the C decoder reads it, because the decoder's native stack is
not bounded.
"""

from __future__ import annotations

from typing import Any, Final

import ormsgpack

from backstay.codec import arrays
from backstay.codec.msgpack import (
    DECODER_DEPTH,
    DEPTH_MAX,
    END,
    END_BYTES,
    EXT_DEPTH_MAX,
    EXT_INNER_DEPTH_MAX,
    PAIR,
    VALUE_BYTES_MAX,
    deeper_than,
    may_be_deeper_than,
    unpack_whole,
)
from backstay.codec.registry import BY_NAME, Opaque, split_object
from backstay.codec.values import BY_CODE, NUMPY_NAMES, OBJECT
from backstay.errors import DecodeError

# Arrays of one around the value, so many that the C decoder's own limit is reached where ours is.
_WRAPPERS: Final = DECODER_DEPTH - DEPTH_MAX - 1
_WRAPPED: Final = b"\x91" * _WRAPPERS + PAIR
# Below this, looking at every byte is cheaper than decoding the wrappers.
_SMALL_BYTES: Final = 48 * 1024


def decode(*parts: bytes, again: bool = False) -> Any:
    """Return the value whose msgpack is the concatenation of the parts.

    ``again`` says that these bytes were decoded before, so that their depth need not be checked.
    """
    size = sum(map(len, parts))
    if size > VALUE_BYTES_MAX:
        raise DecodeError(f"the value has {size} bytes, more than the {VALUE_BYTES_MAX} allowed")
    run = _Decoding()
    try:
        return run.top(parts, size, again)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:
        # The C decoder drops a failure inside an ext.
        failure = run.failure
        if failure is None:
            raise DecodeError(f"these bytes are not a valid value: {error}") from error
        if isinstance(failure, (DecodeError, MemoryError)) or not isinstance(failure, Exception):
            raise failure from error
        raise DecodeError(f"a stored value cannot be rebuilt: {type(failure).__name__}") from error


def decode_stored(data: bytes) -> Any:
    """Decode short bytes that a store has verified: like ``decode``, but without guarding against forged bytes.

    Lists of checkpoints decode a record for each row, nearly always of plain types.
    """
    try:
        return ormsgpack.unpackb(data)
    except ValueError:  # an ext, or not a value; the full decoder finds out which
        return decode(data)


class _Decoding:
    """The decoding of one value."""

    depth = 0
    failure: BaseException | None = None

    def top(self, parts: tuple[bytes, ...], size: int, again: bool) -> Any:
        """Decode the outermost level."""
        is_flat = again or (size <= _SMALL_BYTES and not may_be_deeper_than(b"".join(parts), DEPTH_MAX))
        # As in unpack_whole.
        pair = ormsgpack.unpackb(b"".join((PAIR if is_flat else _WRAPPED, *parts, END_BYTES)), ext_hook=self.extend)
        for _ in range(0 if is_flat else _WRAPPERS):
            (pair,) = pair
        if type(pair[1]) is not int or pair[1] != END:
            raise DecodeError("there are extra bytes after the value")
        return pair[0]

    def extend(self, code: int, data: bytes) -> Any:
        """Build the value of an ext."""
        self.depth += 1
        try:
            if self.depth > EXT_DEPTH_MAX:
                raise DecodeError(f"a value is nested deeper than {EXT_DEPTH_MAX} levels")
            if code == OBJECT:
                name, version, content = split_object(data)
                entry = BY_NAME.get(name)
                if entry is None or version > entry.version:
                    return Opaque(name, version, content, OBJECT, decode)
                return entry.build(version, self.inner(content))
            known = BY_CODE.get(code)
            if known is None:
                raise DecodeError(
                    f"part of the value has an unknown type (ext {code})",
                    hint="A newer version of Backstay wrote it: upgrade Backstay",
                )
            if code in NUMPY_NAMES and arrays.numpy() is None:
                return Opaque(NUMPY_NAMES[code], 1, data, code, decode)
            return known.unpack(data, self.inner)
        except BaseException as failure:
            if self.failure is None:
                self.failure = failure
            raise
        finally:
            self.depth -= 1

    def inner(self, data: bytes) -> Any:
        """Decode one level inside an ext."""
        if deeper_than(data, EXT_INNER_DEPTH_MAX):
            raise DecodeError(f"a value is nested deeper than {EXT_INNER_DEPTH_MAX} levels inside another type")
        return unpack_whole(data, self.extend)
