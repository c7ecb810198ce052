"""Lists that grow: how a put finds the elements that are already stored, without encoding the list again.

Messages may be changed in place, so the same object proves nothing. ``KnownMessages`` keeps copies of the fields of
LangChain's own messages and compares them with those of the next list, which takes a twentieth of the time of encoding
them.

Under an encrypting serializer the same value encrypts to different bytes each time, so stored bytes cannot be compared.
``EncryptedList`` compares the plain bytes of each element by a keyed hash that never leaves this process. Elements that
are still the same from the start of the list keep their ciphertext; the others are encrypted again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.codec.msgpack import header
from backstay.errors import DecodeError
from backstay.langgraph.encoding import HEADS, LIST, Typed, dump
from backstay.langgraph.serde.decode import MESSAGES
from backstay.langgraph.serde.encode import HANDED_OVER
from backstay.pieces.body import FOREIGN, Body
from backstay.pieces.head_state import Change, StoredValue

# Messages ---------------------------------------------------------------------------------------------------------

MESSAGE_CLASSES = frozenset(MESSAGES)

_TEXTS = frozenset({str, type(None)})
_PLAIN = _TEXTS | {int, float, bool, bytes}


@dataclass(slots=True)
class KnownMessages:
    """The fields of a stored list of messages.

    Python takes 1, 1.0 and True for equal, so a message with a number in it is compared by its packed fields as well.
    A list with anything but messages of plain fields is not remembered.
    """

    _classes: list[type] = field(default_factory=list)
    _fields: list[dict[str, Any]] = field(default_factory=list)
    _extras: list[dict[str, Any] | None] = field(default_factory=list)
    _packed: dict[int, bytes] = field(default_factory=dict)  # by index, of messages with numbers

    @classmethod
    def of(cls, elements: Sequence[Any]) -> KnownMessages | None:
        """Remember a list; None if it holds anything but messages with plain fields."""
        known = cls()
        return known if known.extend(elements) else None

    @property
    def count(self) -> int:
        """Return how many messages there are."""
        return len(self._classes)

    @property
    def size(self) -> int:
        """Return roughly how many bytes this takes; texts are shared with the messages."""
        return 600 * len(self._classes)

    def starts(self, elements: Sequence[Any]) -> bool:
        """Return whether a list starts with exactly these messages."""
        head = elements[: len(self._classes)]
        if list(map(type, head)) != self._classes or [each.__dict__ for each in head] != self._fields:
            return False
        if [each.__pydantic_extra__ for each in head] != self._extras:
            return False
        return all(_pack(head[index]) == packed for index, packed in self._packed.items())

    def extend(self, elements: Sequence[Any]) -> bool:
        """Add more messages; False if one cannot be remembered, and then this object must not be used any more."""
        for element in elements:
            if type(element) not in MESSAGE_CLASSES:
                return False
            kinds: set[type] = set()
            fields, extra = _copied(element.__dict__, kinds), _copied(element.__pydantic_extra__, kinds)
            if not kinds <= _TEXTS:
                packed = _pack(element) if kinds <= _PLAIN else None
                if packed is None:
                    return False
                self._packed[len(self._classes)] = packed
            self._classes.append(type(element))
            self._fields.append(fields)
            self._extras.append(extra)
        return True


def _copied(value: Any, kinds: set[type]) -> Any:
    """Return a copy of plain data that shares nothing mutable with it, and add the types of its leaves to ``kinds``."""
    kind = type(value)
    if kind is dict:
        return {_copied(key, kinds): _copied(each, kinds) for key, each in value.items()}
    if kind is list:
        return [_copied(each, kinds) for each in value]
    kinds.add(kind)
    return value


def _pack(message: Any) -> bytes | None:
    # These options refuse a value that is not exactly of one of msgpack's own types.
    try:
        return ormsgpack.packb([message.__dict__, message.__pydantic_extra__], option=HANDED_OVER)
    except (TypeError, ValueError):
        return None


# Encrypted lists --------------------------------------------------------------------------------------------------

ENCRYPTED_LIST = FOREIGN + "[+"
"""The kind of a list whose elements are stored as [tag, ciphertext] each."""

ELEMENT_DIGEST_BYTES = 16
_KEY = os.urandom(32)


class EncryptedList:
    """A list to be stored; the plain bytes of its elements are taken when it is made.

    ``digests`` are the keyed hashes of its elements, one after the other; ``known`` are those of the stored list.
    """

    def __init__(self, serde: EncryptedSerializer, elements: Sequence[Any], path: str, known: bytes | None) -> None:
        self._serde = serde
        self._plain = [dump(serde.serde, each, f"{path}[{number}]") for number, each in enumerate(elements)]
        self._known = known
        self.digests = b"".join(map(_element_digest, self._plain))

    def into(self, key: str, change: Change, stored: StoredValue | None, is_parents: bool) -> None:
        """Add the new elements to a change; ``stored`` is the channel's present value."""
        if stored is None or stored.entry.kind != ENCRYPTED_LIST:
            change.put[key] = Body(ENCRYPTED_LIST, len(self._plain), self._encrypted(0))
            return
        if self._known is not None and is_parents:
            known = self._known
        else:
            decrypt = self._serde.cipher.decrypt
            split = ((*tag.split("+", 1), data) for tag, data in frames_of(stored))
            known = b"".join(_element_digest(Typed(tag, decrypt(cipher, data))) for tag, cipher, data in split)
        new, width, end = self.digests, ELEMENT_DIGEST_BYTES, 0
        if new.startswith(known):
            end = len(known)
        else:
            while known[end : end + width] == new[end : end + width] != b"":
                end += width
        same = end // width
        if same < stored.entry.count:
            unchanged = b"".join(ormsgpack.packb(frame) for frame in frames_of(stored)[:same])
            change.put[key] = Body(ENCRYPTED_LIST, len(self._plain), unchanged + self._encrypted(same))
        elif same < len(self._plain):
            change.append[key] = Body(ENCRYPTED_LIST, len(self._plain) - same, self._encrypted(same))

    def _encrypted(self, first: int) -> bytes:
        frames = []
        for typed in self._plain[first:]:
            cipher, data = self._serde.cipher.encrypt(typed.data)
            frames.append(ormsgpack.packb([f"{typed.tag}+{cipher}", data]))
        return b"".join(frames)


def load_encrypted(count: int, parts: Sequence[bytes], load: Callable[[Typed], Any]) -> list[Any]:
    """Return the elements of a stored list; ``load`` decrypts each."""
    return [load(Typed(tag, data)) for tag, data in _frames(count, parts)]


def frames_of(stored: StoredValue) -> list[list[Any]]:
    """Return [tag, ciphertext] of each element of a stored list whose bytes are loaded."""
    assert stored.parts is not None
    return _frames(stored.entry.count, stored.parts)


def _frames(count: int, parts: Sequence[bytes]) -> list[list[Any]]:
    try:
        frames = ormsgpack.unpackb(b"".join((header(count, *HEADS[LIST]), *parts)))
    except ValueError as error:
        raise DecodeError("an encrypted list cannot be decoded") from error
    for frame in frames:
        if type(frame) is not list or [type(part) for part in frame] != [str, bytes] or "+" not in frame[0]:
            raise DecodeError("an encrypted list holds an element that is not encrypted")
    return frames  # type: ignore[no-any-return]  # a list, by its header


def _element_digest(typed: Typed) -> bytes:
    data = typed.tag.encode() + b"\0" + typed.data
    return hashlib.blake2b(data, digest_size=ELEMENT_DIGEST_BYTES, key=_KEY).digest()
