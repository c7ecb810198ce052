"""zstd at level 3 for stored blocks, bounded by the size the caller knows.

zstd objects must not be used by two threads at once (it crashes the interpreter), so each thread has its own
compressor. A decompressor serves one frame by design, so each frame gets a new one: about 10 us of the 37 us that a
block of 64 KB takes, and the one-shot function, which has no bound, takes as long.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

from backstay.errors import DecodeError

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
    return _decompress(zstd.ZstdDecompressor(), data, size)


class Words:
    """Compression of short texts that use the same words: these need not be in each of them.

    The words are part of the stored format: a frame can only be read with the very ones it was written with.
    """

    def __init__(self, words: bytes) -> None:
        self._words = zstd.ZstdDict(words, is_raw=True)
        self._local = threading.local()

    def compress(self, data: bytes) -> bytes:
        """Return one zstd frame holding the data."""
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstd.ZstdCompressor(level=_LEVEL, zstd_dict=self._words)
        return compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)

    def decompress(self, data: bytes, size: int) -> bytes:
        """Return the ``size`` bytes a frame holds."""
        return _decompress(zstd.ZstdDecompressor(zstd_dict=self._words), data, size)


def _decompress(decompressor: zstd.ZstdDecompressor, data: bytes, size: int) -> bytes:
    try:
        # One byte more than expected, so that a longer content shows itself.
        plain = decompressor.decompress(data, max_length=size + 1)
    except zstd.ZstdError as error:
        raise DecodeError(f"compressed block of {len(data)} bytes is damaged: {error}") from error
    if len(plain) != size or not decompressor.eof or decompressor.unused_data:
        raise DecodeError(f"compressed block of {len(data)} bytes does not hold the {size} bytes recorded for it")
    return plain
