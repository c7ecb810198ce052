"""LangGraph's serializer, made safe to load with and honest to save with. The format stays the same in both directions.

Loading imports nothing that bytes name and calls nothing that is not plain data (``trusted`` defines plain data and the
remaining risk). A value that may not be loaded raises an error that says how to allow it. LangGraph would import and
call it, or in its strict mode return a bare dict.

Saving reports values that would come back changed, with their path in the state, and refuses values that could not be
read again.

``hardened`` does this to a serializer that another program has made, also inside encryption, where it refuses values
that are not encrypted: LangGraph's own serializer accepts plaintext in place of encrypted data if its tag says so
(issue 8938).
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterable
from typing import Any, Final, Literal

from langgraph.checkpoint.serde._msgpack import STRICT_MSGPACK_ENABLED
from langgraph.checkpoint.serde.base import CipherProtocol, SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from backstay.errors import Corrupted, DecodeError, EncodeError, InvalidInput
from backstay.langgraph.serde.changes import (
    DIFFERENCES_MAX,
    UNNAMED,
    Difference,
    ValueChanged,
    differences,
    is_ignorable,
    place_of_path,
    refusal,
)
from backstay.langgraph.serde.decode import decode_json, decode_msgpack
from backstay.langgraph.serde.encode import MsgpackEncoder, NotEncodable
from backstay.langgraph.serde.objects import choose
from backstay.langgraph.serde.trusted import Allow, Trust

OnChange = Literal["warn", "raise", "ignore"]

SEARCHES_MAX: Final = 16
"""How often values of one place that lose the same types are searched for changes that are not reported yet."""

REPORTED_MAX: Final = 10_000
"""How many reported changes are remembered; after that no more are reported."""


class SafeSerializer(JsonPlusSerializer):
    """Reads and writes what ``JsonPlusSerializer`` does, but loads only plain data and reports what would be lost.

    ``allow`` lists more classes that may be loaded, each as a class or as (module, name). True allows every class that
    bytes name, so anyone who can write to the database can run code here. ``strict`` allows only LangGraph's own list
    and ``allow``. ``on_change`` decides what happens to a value that would come back changed: a ``ValueChanged``
    warning, once for each place and type; an ``EncodeError``; or nothing.
    """

    def __init__(self, *, allow: Allow = (), strict: bool = False, on_change: OnChange = "warn") -> None:
        if on_change not in ("warn", "raise", "ignore"):
            raise InvalidInput(f"unknown on_change: {on_change!r}", hint="Pass 'warn', 'raise' or 'ignore'")
        trust = Trust(allow, strict=strict)
        super().__init__(allowed_msgpack_modules=True if trust.everything else tuple(trust.keys) or None)
        self._trust = trust
        self._on_change = on_change
        self._reported = _Reported()

    def with_msgpack_allowlist(self, extra_allowlist: Iterable[tuple[str, ...] | type]) -> SafeSerializer:
        """Return a serializer that may load these classes too; itself if it already may."""
        trust = self._trust.with_more(extra_allowlist)
        if trust is self._trust:
            return self
        wider = copy.copy(self)
        wider._trust = trust
        wider._allowed_msgpack_modules = set(trust.keys)
        return wider

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return a value as (tag, bytes)."""
        return self.dumps_at(obj, UNNAMED)

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        """Return a value as (tag, bytes); errors and warnings name its parts, starting with this path."""
        if obj is None:
            return "null", b""
        if type(obj) is bytes:
            return "bytes", obj
        if type(obj) is bytearray:
            return "bytearray", bytes(obj)
        encoder = MsgpackEncoder(self._trust, choose)
        try:
            data = encoder.encode(obj)
        except NotEncodable as error:
            raise refusal(obj, path, self._failure_of) from error
        if encoder.lossy and self._on_change != "ignore":
            self._report(obj, data, path, frozenset(encoder.lossy))
        return "msgpack", data

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value, or raise DecodeError if the bytes are damaged or the value may not be loaded."""
        tag, content = data
        if tag == "msgpack":
            return decode_msgpack(content, self._trust)
        if tag == "null":
            return None
        if tag == "bytes":
            return content
        if tag == "bytearray":
            return bytearray(content)
        if tag == "json":
            return decode_json(content, self._trust)
        hint = "Loading a pickle can run any code" if tag == "pickle" else "Use the serializer that wrote it"
        raise DecodeError(f"values with the tag {tag!r} are not loaded", hint=hint)

    def _failure_of(self, value: object) -> str | None:
        try:
            MsgpackEncoder(self._trust, choose).encode(value)
        except NotEncodable as error:
            return str(error)
        return None

    def _report(self, value: object, data: bytes, path: str, types: frozenset[str]) -> None:
        """Find out which parts of a value will come back changed, and report them."""
        if self._on_change == "warn" and not self._reported.should_search(place_of_path(path), types):
            return
        count = 0
        for each in differences(value, decode_msgpack(data, self._trust), path):
            if is_ignorable(each, path):
                continue
            if self._on_change == "raise":
                hint = "Convert it to a type that comes back unchanged"
                raise EncodeError(str(ValueChanged(*each[:3])), path=each.path, hint=hint)
            count += self._reported.warn(each)
            if count == DIFFERENCES_MAX:
                break


class _Reported:
    """The changes that were reported. A serializer shares them with its copies that may load more."""

    def __init__(self) -> None:
        self._changes: set[tuple[str, str]] = set()
        self._searches: dict[tuple[str, frozenset[str]], int] = {}
        self._lock = threading.RLock()  # a signal handler may save while this thread holds the lock

    def should_search(self, place: str, types: frozenset[str]) -> bool:
        """Return whether values of this place that hold these types may have changes that are not reported yet."""
        with self._lock:
            done = self._searches.get((place, types), 0)
            if done == SEARCHES_MAX or len(self._searches) >= REPORTED_MAX:
                return False
            self._searches[place, types] = done + 1
            return True

    def warn(self, difference: Difference) -> bool:
        """Warn of a change, unless one of the same place and type was reported; return whether it warned."""
        key = (place_of_path(difference.path), difference.before)
        with self._lock:
            if key in self._changes or len(self._changes) >= REPORTED_MAX:
                return False
            self._changes.add(key)
        warnings.warn(ValueChanged(*difference[:3]), stacklevel=5)
        return True


def hardened(
    serde: SerializerProtocol | None, *, allow: Allow = (), strict: bool = False, on_change: OnChange = "warn"
) -> SerializerProtocol:
    """Return a serializer that does the same as this one and loads safely; one of another kind is returned unchanged.

    So is a ``JsonPlusSerializer`` that is configured to do what ours never does: pickle, load every class that JSON
    names, or read exts with a hook of its own.

    A ``JsonPlusSerializer`` with a list of classes that may be loaded keeps it and becomes strict. One without a list,
    or None, is strict if ``strict`` or LangGraph's own setting says so.
    """
    if serde is None:
        return SafeSerializer(allow=allow, strict=strict or STRICT_MSGPACK_ENABLED, on_change=on_change)
    if isinstance(serde, EncryptedSerializer) and not isinstance(serde.cipher, _MarkingCipher):
        inner = hardened(serde.serde, allow=allow, strict=strict, on_change=on_change)
        guarded: SerializerProtocol
        if type(inner) is SafeSerializer:
            guarded = copy.copy(inner)
            guarded.__class__ = _DecryptedOnlySafe
        else:
            guarded = _DecryptedOnly(inner)
        return StrictEncryptedSerializer(_MarkingCipher(serde.cipher), guarded)
    if type(serde) is not JsonPlusSerializer or serde.pickle_fallback or serde._custom_unpack_ext_hook:
        return serde
    if serde._allowed_json_modules is True:
        return serde
    listed, listed_for_json = serde._allowed_msgpack_modules, serde._allowed_json_modules or ()
    if allow is not True:
        allow = (*allow, *listed_for_json, *(listed or () if listed is not True else ()))
    return SafeSerializer(allow=allow, strict=strict or listed is not True, on_change=on_change)


# Encryption -------------------------------------------------------------------------------------------------------

_TAGGED: Final = bytes.fromhex("c1686f6c6466617374d1f0a37e5b9204")
"""The first bytes of a plaintext that starts with the value's tag; no msgpack, JSON or text starts with them."""


class Decrypted(bytes):
    """Bytes that the cipher has decrypted, so their writer had the key."""


class _MarkingCipher(CipherProtocol):
    """A cipher that marks what it has decrypted."""

    def __init__(self, cipher: CipherProtocol) -> None:
        self._cipher = cipher

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return self._cipher.encrypt(plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        try:
            return Decrypted(self._cipher.decrypt(ciphername, ciphertext))
        except Exception as error:
            raise Corrupted(
                f"a stored value cannot be decrypted: {type(error).__name__}",
                hint="Use the key that it was written with; with the right key this means damage",
            ) from error


class StrictEncryptedSerializer(EncryptedSerializer):
    """An encrypting serializer that reads only encrypted values, and only under the tag they were written with."""

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        """Return a value as (tag, bytes); errors and warnings name its parts, starting with this path."""
        dumps_at = getattr(self.serde, "dumps_at", None)
        tag, data = self.serde.dumps_typed(obj) if dumps_at is None else dumps_at(obj, path)
        cipher, encrypted = self.cipher.encrypt(data)
        return f"{tag}+{cipher}", encrypted


class _DecryptedOnly:
    """A serializer inside an encrypting one that loads only decrypted values.

    The inner serializer checks this because LangGraph wraps it in a new encrypting serializer when it narrows the
    classes that may be loaded. For the same reason it writes a value's tag into the bytes to encrypt: without the key,
    an attacker could replace the tag that is stored outside.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return with_tag(*self._serde.dumps_typed(obj))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self._serde.loads_typed(_require_decrypted(data))


class _DecryptedOnlySafe(SafeSerializer):
    """The same, as a serializer that LangGraph can give a list of classes that may be loaded."""

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        return with_tag(*super().dumps_at(obj, path))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return super().loads_typed(_require_decrypted(data))


def with_tag(tag: str, data: bytes) -> tuple[str, bytes]:
    """Return a value with its tag in front of the bytes, to be encrypted together."""
    return tag, b"".join((_TAGGED, tag.encode(), b"\0", data))


def _require_decrypted(data: tuple[str, bytes]) -> tuple[str, bytes]:
    """Return a decrypted value if its tag is the one it was encrypted with.

    Values that LangGraph's own serializer encrypted, and that were imported without the key, have no tag inside.
    """
    tag, content = data
    if type(content) is not Decrypted:
        raise DecodeError(
            f"a value with the tag {tag!r} is not encrypted, but this saver's serializer encrypts",
            hint="Another program wrote it, or it is older than the encryption: save it again",
        )
    if not content.startswith(_TAGGED):
        return tag, bytes(content)
    inner, _, plain = content[len(_TAGGED) :].partition(b"\0")
    if inner != tag.encode(errors="replace"):
        raise Corrupted(
            f"an encrypted value has the tag {tag!r:.80}, but was encrypted with another tag",
            hint="It is damaged, or was changed without the key: restore it from a backup",
        )
    return tag, plain
