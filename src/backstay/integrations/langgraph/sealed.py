"""Lists under an encrypting serializer: each element is encrypted once, when it is new.

The same value encrypts to other bytes each time, so the stored list cannot be compared with a new one. What can is the
plain bytes of each element, by a keyed hash that never leaves this process. Elements that a list has in common with the
stored one, from the beginning on, keep their ciphertext; the rest is encrypted anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.errors import DecodeError
from backstay.integrations.langgraph.values import Typed, dump, list_header
from backstay.pieces.body import FOREIGN, Body
from backstay.pieces.tip import Change, Live

SEALED_LIST = FOREIGN + "[+"
"""The kind of a list whose elements are [tag, ciphertext] each."""

PRINT_BYTES = 16
_KEY = os.urandom(32)


def encrypting(serde: SerializerProtocol) -> EncryptedSerializer | None:
    """Return the serializer if it is one that encrypts."""
    return serde if isinstance(serde, EncryptedSerializer) else None


@dataclass(frozen=True, slots=True)
class SealedPrints:
    """Keyed hashes of the elements of a stored list, one after the other."""

    prints: bytes

    @property
    def size(self) -> int:
        """Return how many bytes this takes."""
        return len(self.prints)


class SealedList:
    """A list that is to be stored; its elements' plain bytes are taken here and now."""

    def __init__(
        self, serde: EncryptedSerializer, elements: Sequence[Any], path: str, known: SealedPrints | None
    ) -> None:
        self._serde = serde
        self._plain = [dump(serde.serde, each, f"{path}[{number}]") for number, each in enumerate(elements)]
        self._known = known
        self.prints = SealedPrints(b"".join(map(_print, self._plain)))

    def into(self, change: Change, key: str, live: Live | None, is_parents: bool) -> None:
        """Add what is new to the change."""
        if live is None or live.entry.kind != SEALED_LIST:
            change.put[key] = Body(SEALED_LIST, len(self._plain), self._sealed(0))
            return
        known = self._known.prints if self._known is not None and is_parents else self._prints_of(live)
        same = _common(known, self.prints.prints)
        if same == live.entry.count:
            if same < len(self._plain):
                change.append[key] = Body(SEALED_LIST, len(self._plain) - same, self._sealed(same))
            return
        kept = b"".join(ormsgpack.packb(frame) for frame in frames_of(live)[:same])
        change.put[key] = Body(SEALED_LIST, len(self._plain), kept + self._sealed(same))

    def _sealed(self, first: int) -> bytes:
        frames = []
        for tag, data in ((typed.tag, typed.data) for typed in self._plain[first:]):
            cipher, sealed = self._serde.cipher.encrypt(data)
            frames.append(ormsgpack.packb([f"{tag}+{cipher}", sealed]))
        return b"".join(frames)

    def _prints_of(self, live: Live) -> bytes:
        prints = []
        for tag, data in frames_of(live):
            plain_tag, cipher = tag.split("+", 1)
            prints.append(_print(Typed(plain_tag, self._serde.cipher.decrypt(cipher, data))))
        return b"".join(prints)


def load_sealed(count: int, parts: Sequence[bytes], load: Callable[[Typed], Any]) -> list[Any]:
    """Return the elements of a stored list, each decrypted by ``load``."""
    return [load(Typed(tag, data)) for tag, data in _frames(count, parts)]


def frames_of(live: Live) -> list[list[Any]]:
    """Return [tag, ciphertext] of each element of a stored list whose bytes are loaded."""
    assert live.parts is not None
    return _frames(live.entry.count, live.parts)


def _frames(count: int, parts: Sequence[bytes]) -> list[list[Any]]:
    try:
        frames = ormsgpack.unpackb(b"".join((list_header(count), *parts)))
    except ValueError as error:
        raise DecodeError("an encrypted list is not readable") from error
    for frame in frames:
        if type(frame) is not list or [type(part) for part in frame] != [str, bytes] or "+" not in frame[0]:
            raise DecodeError("an encrypted list holds something that is not encrypted")
    return frames  # type: ignore[no-any-return]  # a list, by its header


def _print(typed: Typed) -> bytes:
    return hashlib.blake2b(typed.tag.encode() + b"\0" + typed.data, digest_size=PRINT_BYTES, key=_KEY).digest()


def _common(known: bytes, new: bytes) -> int:
    """Return how many elements both have in common from the beginning on."""
    if new.startswith(known):
        return len(known) // PRINT_BYTES
    same = 0
    while known[same : same + PRINT_BYTES] == new[same : same + PRINT_BYTES] != b"":
        same += PRINT_BYTES
    return same // PRINT_BYTES
