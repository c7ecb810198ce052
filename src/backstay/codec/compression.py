"""zstd at level 3 for stored blocks, bounded by the size that the caller knows.

Two threads must not use one zstd object at once (it crashes the interpreter), so each thread has its own compressor.
A decompressor serves one frame by design, so each frame gets a new one: about 10 us of the 37 us that a block of 64 KB
takes, and the one-shot function, which has no bound, takes as long.
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

_LEVEL: Final[dict[int, int]] = {zstd.CompressionParameter.compression_level: 3}
_CHECKSUM: Final[dict[int, int]] = {zstd.CompressionParameter.checksum_flag: 1}


class _PerThread(threading.local):
    """A compressor for each thread: reused, it is twice as fast as a new one for blocks of 64 KB."""

    def __init__(self, words: zstd.ZstdDict | None = None) -> None:
        self.compressor = zstd.ZstdCompressor(options=_LEVEL if words else _LEVEL | _CHECKSUM, zstd_dict=words)


_local = _PerThread()


def compress(data: bytes) -> bytes:
    """Return one zstd frame with the data and a checksum, which ``decompress`` compares."""
    return _local.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress(data: bytes, size: int) -> bytes:
    """Return the ``size`` bytes of a frame; never allocate more, even if the frame claims it."""
    return _decompress(zstd.ZstdDecompressor(), data, size)


class Words:
    """Compression of short texts that share words: the words need not be in each of them.

    The words are part of the stored format: a frame can only be read with exactly the words it was written with.
    """

    def __init__(self, words: bytes) -> None:
        self._words = zstd.ZstdDict(words, is_raw=True)
        self._local = _PerThread(self._words)

    def compress(self, data: bytes) -> bytes:
        """Return one zstd frame with the data."""
        return self._local.compressor.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)

    def decompress(self, data: bytes, size: int) -> bytes:
        """Return the ``size`` bytes of a frame."""
        return _decompress(zstd.ZstdDecompressor(zstd_dict=self._words), data, size)


def _decompress(decompressor: zstd.ZstdDecompressor, data: bytes, size: int) -> bytes:
    try:
        # One byte more than expected, to detect longer content.
        plain = decompressor.decompress(data, max_length=size + 1)
    except zstd.ZstdError as error:
        raise DecodeError(f"compressed block of {len(data)} bytes is damaged: {error}") from error
    if len(plain) != size or not decompressor.eof or decompressor.unused_data:
        raise DecodeError(f"compressed block of {len(data)} bytes does not hold the {size} bytes recorded for it")
    return plain
