"""LangGraph's serializer, made safe to load with and honest to save with. Same format, both ways.

Loading imports nothing that bytes name and calls nothing that is not plain data (``trusted`` says what that is, and
what risk remains). What may not be loaded is an error that says how to allow it, where LangGraph imports and calls it
by default, or in its strict mode hands over a bare dict.

Saving reports what would come back changed, with its path in the state; what could not be read again at all is refused.

``hardened`` does this to a serializer that somebody else has made, also around encryption, where it refuses what is
not encrypted: LangGraph's own takes plaintext for encrypted data if its tag says so (issue 8938).
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
from backstay.integrations.langgraph.serde import fidelity
from backstay.integrations.langgraph.serde.envelopes import open_json
from backstay.integrations.langgraph.serde.expected import UNNAMED, is_expected, place_of
from backstay.integrations.langgraph.serde.fidelity import Change
from backstay.integrations.langgraph.serde.packing import Packing, Unstorable
from backstay.integrations.langgraph.serde.revival import revive
from backstay.integrations.langgraph.serde.trusted import Allow, Trust

OnChange = Literal["warn", "raise", "ignore"]

SEARCHES_MAX: Final = 16
"""How often values of one place that lose the same types are searched for changes that were not told yet."""

TOLD_MAX: Final = 10_000
"""How many changes are remembered as told; beyond that nothing more is."""


class SafeSerializer(JsonPlusSerializer):
    """Reads and writes what ``JsonPlusSerializer`` does; loads plain data only, and reports what would be lost.

    ``allow`` names classes that may be loaded too, as such or as (module, name); True allows whatever bytes name, which
    lets whoever can write to the database run code here. ``strict`` leaves only LangGraph's own list and ``allow``.
    ``on_change`` tells what becomes of a value that would come back changed: a ``ValueChanged`` warning, once for
    each place and type; an ``EncodeError``; or nothing.
    """

    def __init__(self, *, allow: Allow = (), strict: bool = False, on_change: OnChange = "warn") -> None:
        if on_change not in ("warn", "raise", "ignore"):
            raise InvalidInput("on_change must be 'warn', 'raise' or 'ignore'")
        trust = Trust(allow, strict=strict)
        super().__init__(allowed_msgpack_modules=True if trust.everything else tuple(trust.keys) or None)
        self._trust = trust
        self._on_change = on_change
        self._told = _Told()

    def with_msgpack_allowlist(self, extra_allowlist: Iterable[tuple[str, ...] | type]) -> SafeSerializer:
        """Return a serializer that may load these too; itself if there is nothing new."""
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
        """Return a value as (tag, bytes); errors and reports name its parts from this path on."""
        if obj is None:
            return "null", b""
        if type(obj) is bytes:
            return "bytes", obj
        if type(obj) is bytearray:
            return "bytearray", bytes(obj)
        run = Packing(self._trust)
        try:
            data = run.whole(obj)
        except Unstorable as error:
            raise fidelity.refusal(obj, path, self._failure_of) from error
        if run.notes and self._on_change != "ignore":
            self._report(obj, data, path, frozenset(run.notes))
        return "msgpack", data

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value; DecodeError if it is none, or one that may not be loaded."""
        tag, content = data
        if tag == "msgpack":
            return revive(content, self._trust)
        if tag == "null":
            return None
        if tag == "bytes":
            return content
        if tag == "bytearray":
            return bytearray(content)
        if tag == "json":
            return open_json(content, self._trust)
        hint = "Loading a pickle runs whatever is in it" if tag == "pickle" else "Was it written by another serializer?"
        raise DecodeError(f"values with the tag {tag!r} are not loaded", hint=hint)

    def _failure_of(self, value: object) -> str | None:
        try:
            Packing(self._trust).whole(value)
        except Unstorable as error:
            return str(error)
        return None

    def _report(self, value: object, data: bytes, path: str, types: frozenset[str]) -> None:
        """Find out what of a value is changed when it comes back, and tell."""
        place = place_of(path)
        if self._on_change == "warn" and not self._told.is_to_search(place, types):
            return
        told = 0
        for change in fidelity.changes(value, revive(data, self._trust), path):
            if is_expected(change, path):
                continue
            if self._on_change == "raise":
                hint = "Store a type that comes back, or convert it"
                raise EncodeError(str(change.warning()), path=change.path, hint=hint)
            told += self._told.tell(change)
            if told == fidelity.DIFFERENCES_MAX:
                break


class _Told:
    """What was told already. Shared by a serializer and the copies of it that may load more."""

    def __init__(self) -> None:
        self._changes: set[tuple[str, str]] = set()
        self._searches: dict[tuple[str, frozenset[str]], int] = {}
        self._lock = threading.RLock()  # a signal handler may come in

    def is_to_search(self, place: str, types: frozenset[str]) -> bool:
        """Tell whether values of this place with these types in them may still hold a change that was not told."""
        with self._lock:
            done = self._searches.get((place, types), 0)
            if done == SEARCHES_MAX or len(self._searches) >= TOLD_MAX:
                return False
            self._searches[place, types] = done + 1
            return True

    def tell(self, change: Change) -> bool:
        """Warn of a change, unless one of its place and type was told; tell whether it was not."""
        key = (place_of(change.path), change.before)
        with self._lock:
            if key in self._changes or len(self._changes) >= TOLD_MAX:
                return False
            self._changes.add(key)
        warnings.warn(change.warning(), stacklevel=5)
        return True


def hardened(
    serde: SerializerProtocol | None, *, allow: Allow = (), strict: bool = False, on_change: OnChange = "warn"
) -> SerializerProtocol:
    """Return a serializer that does what this one does, and loads safely; one of another kind is returned as it is.

    So is a ``JsonPlusSerializer`` that was told to do what ours never does: to pickle, to load whatever JSON names, or
    to read exts in a way of its own. Whoever asked for that has it.

    A ``JsonPlusSerializer`` that has a list of what may be loaded keeps it, and is strict. One without a list, or None,
    is strict if this says so, or LangGraph's own setting does.
    """
    if serde is None:
        return SafeSerializer(allow=allow, strict=strict or STRICT_MSGPACK_ENABLED, on_change=on_change)
    if isinstance(serde, EncryptedSerializer) and not isinstance(serde.cipher, _Marking):
        inner = hardened(serde.serde, allow=allow, strict=strict, on_change=on_change)
        return Sealing(_Marking(serde.cipher), _opened_only(inner))
    if type(serde) is not JsonPlusSerializer or serde.pickle_fallback or serde._custom_unpack_ext_hook:
        return serde
    if serde._allowed_json_modules is True:
        return serde
    listed, listed_for_json = serde._allowed_msgpack_modules, serde._allowed_json_modules or ()
    if allow is not True:
        allow = (*allow, *listed_for_json, *(listed or () if listed is not True else ()))
    return SafeSerializer(allow=allow, strict=strict or listed is not True, on_change=on_change)


def plain_of(serde: SerializerProtocol) -> SerializerProtocol | None:
    """Return the serializer inside one that encrypts; None if it does not encrypt."""
    return serde.serde if isinstance(serde, EncryptedSerializer) else None


_TAGGED: Final = bytes.fromhex("c1686f6c6466617374d1f0a37e5b9204")
"""How the bytes to encrypt begin if the value's tag follows; no msgpack, JSON or text begins so."""


class Opened(bytes):
    """Bytes that came out of the cipher, and so were not put there by somebody who lacks the key."""


class _Marking(CipherProtocol):
    """A cipher that marks what it has decrypted."""

    def __init__(self, cipher: CipherProtocol) -> None:
        self._cipher = cipher

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return self._cipher.encrypt(plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        try:
            return Opened(self._cipher.decrypt(ciphername, ciphertext))
        except Exception as error:
            raise Corrupted(
                f"a stored value cannot be decrypted: {type(error).__name__}",
                hint="Is it the key that it was written with?",
            ) from error


class Sealing(EncryptedSerializer):
    """An encrypting serializer that reads nothing which is not encrypted, and nothing under another tag."""

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        """Return a value as (tag, bytes); errors and reports name its parts from this path on."""
        dumps_at = getattr(self.serde, "dumps_at", None)
        tag, data = self.serde.dumps_typed(obj) if dumps_at is None else dumps_at(obj, path)
        cipher, sealed = self.cipher.encrypt(data)
        return f"{tag}+{cipher}", sealed


class _OpenedOnly:
    """A serializer inside an encrypting one: it loads what was decrypted and refuses the rest.

    It is the inner serializer that checks, and not the one that encrypts, because LangGraph makes a new one of those
    around the inner one when it narrows what may be loaded. For the same reason it is the one that puts a value's tag
    among the bytes to encrypt: the tag that is stored outside could be exchanged by somebody who has no key.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return with_tag(*self._serde.dumps_typed(obj))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self._serde.loads_typed(_opened(data))


class _OpenedSafely(SafeSerializer):
    """The same, of the kind that LangGraph can give a list of what may be loaded."""

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        return with_tag(*super().dumps_at(obj, path))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return super().loads_typed(_opened(data))


def with_tag(tag: str, data: bytes) -> tuple[str, bytes]:
    """Return a value with its tag written in front of the bytes, to be encrypted with them."""
    return tag, b"".join((_TAGGED, tag.encode(), b"\0", data))


def _opened(data: tuple[str, bytes]) -> tuple[str, bytes]:
    """Return a value that was decrypted, if its tag is the one it was encrypted with.

    Values that LangGraph's own serializer encrypted, and that were moved in without the key, have no tag inside.
    """
    tag, content = data
    if type(content) is not Opened:
        raise DecodeError(
            f"a value with the tag {tag!r} is not encrypted, and this serializer encrypts",
            hint="Somebody else wrote it, or it is from before encryption was turned on: save it anew",
        )
    if not content.startswith(_TAGGED):
        return tag, bytes(content)
    inner, _, plain = content[len(_TAGGED) :].partition(b"\0")
    if inner != tag.encode(errors="replace"):
        raise Corrupted(
            f"an encrypted value is stored with the tag {tag!r:.80}, which is not the one it was encrypted with",
            hint="Somebody without the key has changed it, or it is damaged: restore it from a backup",
        )
    return tag, plain


def _opened_only(inner: SerializerProtocol) -> SerializerProtocol:
    if type(inner) is not SafeSerializer:
        return _OpenedOnly(inner)
    guarded = copy.copy(inner)
    guarded.__class__ = _OpenedSafely
    return guarded
