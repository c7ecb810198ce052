"""What a value may be at most: the same numbers when encoding and when decoding.

A limit that holds on one side only lets a value be written that cannot be read, or read that cannot be saved again.
The two depth limits also bound the native stack: the C decoder needs about 0.7 KB of it for every nested container,
so without ``EXT_INNER_DEPTH_MAX`` a few kilobytes of forged bytes could end the process.
"""

from __future__ import annotations

from typing import Final

DEPTH_MAX: Final = 255
"""Lists and dicts nested in each other, outside any other type; it is the C encoder's own limit."""

EXT_DEPTH_MAX: Final = 64
"""Values of other types (tuple, set, registered class, dict with keys other than str) nested in each other."""

EXT_INNER_DEPTH_MAX: Final = 32
"""Lists and dicts nested in each other inside one such value, until the next one begins."""

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

# The C decoder's own limit, of which the depth check takes up all but what a value may use.
DECODER_DEPTH: Final = 1022

assert max(DEPTH_MAX, EXT_INNER_DEPTH_MAX) < DECODER_DEPTH
