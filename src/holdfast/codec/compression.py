"""zstd at level 3 for stored blocks, bounded by the size the caller knows.

zstd objects must not be used by two threads at once (it crashes the interpreter), so each thread has its own
compressor. A decompressor serves one frame by design, so each frame gets a new one: about 10 us of the 37 us that a
block of 64 KB takes, and the one-shot function, which has no bound, takes as long.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

from holdfast.errors import DecodeError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_LEVEL: Final = 3


class _PerThread(threading.local):
    """A compressor for each thread: reused, it is twice as fast as a new one for blocks of 64 KB."""

    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(level=_LEVEL)


_local = _PerThread()


def compress(data: bytes) -> bytes:
    """Return one zstd frame holding the data."""
    return _local.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress(data: bytes, size: int) -> bytes:
    """Return the ``size`` bytes a frame holds; never allocates more, whatever the frame claims."""
    decompressor = zstd.ZstdDecompressor()
    try:
        # One byte more than expected, so that a longer content shows itself.
        plain = decompressor.decompress(data, max_length=size + 1)
    except zstd.ZstdError as error:
        raise DecodeError(f"compressed block of {len(data)} bytes is damaged: {error}") from error
    if len(plain) != size or not decompressor.eof or decompressor.unused_data:
        raise DecodeError(f"compressed block of {len(data)} bytes does not hold the {size} bytes recorded for it")
    return plain
