"""Values to bytes and back, exact or refused: msgpack in one C pass, with every other type as an ext.

This layer does no I/O and knows nothing about stores. ``encode`` refuses values that would not round-trip, by their
path; ``decode`` returns a value or raises ``DecodeError`` for any bytes, and stored bytes cannot choose code to run.
"""

from __future__ import annotations

from backstay.codec.compression import compress, decompress
from backstay.codec.decoder import decode, decode_stored
from backstay.codec.encoder import encode
from backstay.codec.registry import Opaque

__all__ = ["Opaque", "compress", "decode", "decode_stored", "decompress", "encode"]
