"""Values to bytes and back, exact or refused: msgpack by one C pass, with every other type out of band as an ext.

This layer does no I/O and knows nothing of stores. ``encode`` refuses what could not come back equal, by its path;
``decode`` gives a value or ``DecodeError`` for any bytes whatever and runs no code that bytes could choose.
"""

from __future__ import annotations

from backstay.codec import limits
from backstay.codec.compression import compress, decompress
from backstay.codec.decoder import decode, decode_stored
from backstay.codec.encoder import encode
from backstay.codec.opaque import Opaque
from backstay.codec.registry import register

__all__ = ["Opaque", "compress", "decode", "decode_stored", "decompress", "encode", "limits", "register"]
