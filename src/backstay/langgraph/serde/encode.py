"""Values to LangGraph's msgpack, byte for byte what its own serializer writes, noting what would be lost.

The C encoder hands over every type that it would otherwise change silently: tuples, and subclasses of str, int, list
and dict. It gets back exactly what it would have written, and the type is noted as lossy. It does not hand over three
things. Keys that are not str, and lone surrogates, stop the first attempt. Bytearrays are searched for where the output
has a byte that could start bytes. An object is noted unless its type is known to come back exactly: because ``objects``
says so; because the fields of a pydantic model are of msgpack's own types and equal to its dump; or, as a last resort,
because the object was built again and compared.

So a value without loss costs one pass. ``changes`` finds out what the notes mean and where in the value the loss is.
How each type is written is in ``objects`` and ``models``; they know this module, and it does not know them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain
from typing import Any, Final

import ormsgpack

from backstay.codec.msgpack import deeper_than
from backstay.errors import DecodeError
from backstay.langgraph.serde import trusted
from backstay.langgraph.serde.changes import name_of, same
from backstay.langgraph.serde.decode import EXT_DEPTH_MAX, FREE_LEVELS, INNER_DEPTH_MAX, MsgpackDecoder
from backstay.langgraph.serde.trusted import MissingClass, Trust

HANDED_OVER: Final = (
    ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
"""Options with which the C encoder hands over every type that it would change silently."""

_ANY_KEYS: Final = HANDED_OVER | ormsgpack.OPT_NON_STR_KEYS
_ANY_TEXT: Final = _ANY_KEYS | ormsgpack.OPT_REPLACE_SURROGATES
_WRITTEN_AS_BYTES: Final = frozenset({bytearray, memoryview})


class NotEncodable(Exception):
    """A value that cannot be written, or could not be read again."""


class MsgpackEncoder:
    """Encodes one value; ``lossy`` names the types in it that may not come back equal.

    ``choose`` returns how to write a value whose type is not in ``ENCODERS``.
    """

    __slots__ = ("_choose", "_depth", "_interrupt", "_loadable", "_reason", "_trust", "lossy")

    def __init__(self, trust: Trust, choose: Callable[[object], EncodeFunction]) -> None:
        self.lossy: list[str] = []
        self._trust = trust
        self._choose = choose
        self._depth = 0
        self._loadable: set[tuple[int, type]] = set()
        self._reason: str | None = None
        self._interrupt: BaseException | None = None

    def encode(self, value: object) -> bytes:
        """Return the msgpack of a whole value, or raise NotEncodable."""
        try:
            return self.pack(value)
        except Exception as error:
            if self._interrupt is not None:
                raise self._interrupt from None
            raise NotEncodable(self._reason or str(error)) from error

    def pack(self, value: object) -> bytes:
        """Encode a value down to the objects in it; each of those is packed by a call of its own."""
        mark = len(self.lossy)
        try:
            data = ormsgpack.packb(value, default=self._object, option=HANDED_OVER)
        except Exception as error:
            data = self._pack_any_text(value, mark, error)
        if self.may_hold_bytearray(data, value):
            self.lossy.append("bytearray")
        return data

    def _pack_any_text(self, value: object, mark: int, error: Exception) -> bytes:
        """Encode a value whose keys or texts stopped the first attempt."""
        for option in (_ANY_KEYS, _ANY_TEXT):
            if self._reason is not None or self._interrupt is not None:
                raise error
            del self.lossy[mark:]
            try:
                data = ormsgpack.packb(value, default=self._object, option=option)
            except Exception as again:
                error = again
                continue
            if option is _ANY_TEXT or not keys_are_exact(value):
                self.lossy.append("str")
            return data
        raise self.refused(str(error))

    def may_hold_bytearray(self, data: bytes, value: object) -> bool:
        """Return whether a value holds anything that the C encoder writes as bytes without handing it over."""
        return (b"\xc4" in data or b"\xc5" in data or b"\xc6" in data) and holds(value, _WRITTEN_AS_BYTES)

    def _object(self, value: Any) -> Any:
        """Return what to write for a value that was handed over. The C encoder drops the errors raised here."""
        self._depth += 1
        try:
            if self._depth > EXT_DEPTH_MAX:
                raise self.refused(f"more than {EXT_DEPTH_MAX} objects are nested in each other")
            encode = ENCODERS.get(type(value)) or self._choose(value)
            return encode(self, value)
        except NotEncodable:
            raise
        except Exception as error:
            raise self.refused(f"reading a {name_of(type(value))} raised {type(error).__name__}") from error
        except BaseException as interrupt:
            # Ctrl-C must not be taken for a value that cannot be encoded.
            self._interrupt = interrupt
            raise
        finally:
            self._depth -= 1

    # For encode functions

    def note(self, cls: type) -> None:
        """Note that something of this type may not come back equal."""
        self.lossy.append(name_of(cls))

    def refused(self, reason: str) -> NotEncodable:
        """Return an error and remember why: the C encoder drops errors that are raised inside it."""
        if self._reason is None:
            self._reason = reason
        return NotEncodable(reason)

    def named(self, cls: type, payload: object) -> bytes:
        """Return the bytes of an ext: the name of a class, and what it is built from."""
        return self.pack([cls.__module__, cls.__name__, payload])

    def ext(self, code: int, data: bytes) -> ormsgpack.Ext:
        """Return an object as these bytes; refuse an object that is nested so deep that a decoder would refuse it."""
        if self._depth > FREE_LEVELS and deeper_than(data, INNER_DEPTH_MAX):
            raise self.refused(f"an object holds more than {INNER_DEPTH_MAX} nested lists and dicts")
        return ormsgpack.Ext(code, data)

    def check_loadable(self, code: int, cls: type) -> None:
        """Note a class that its name does not lead back to; refuse one that could not be loaded."""
        if (code, cls) in self._loadable:
            return
        try:
            if self._trust.find(cls.__module__, cls.__name__, code) is not cls:
                self.note(cls)
            else:
                self._loadable.add((code, cls))
        except MissingClass:
            self.note(cls)
        except DecodeError as error:
            hint = trusted.how_to_allow(cls.__module__, cls.__name__)
            raise self.refused(f"a {name_of(cls)} could be stored but not loaded again. {hint}") from error

    def built_again(self, cls: type, code: int, data: bytes) -> Any:
        """Return the object that will be loaded from these bytes."""
        try:
            return MsgpackDecoder(self._trust).ext(code, data)
        except Exception as error:
            raise self.refused(f"a {name_of(cls)} could be stored but not built again") from error

    def compared(self, value: object, code: int, data: bytes, mark: int) -> ormsgpack.Ext:
        """Build an object again and compare; if it is equal, drop the notes taken since the mark."""
        if same(value, self.built_again(type(value), code, data)):
            del self.lossy[mark:]
        elif len(self.lossy) == mark:
            self.note(type(value))
        return self.ext(code, data)

    def found_and_compared(self, value: object, code: int, data: bytes, mark: int) -> ormsgpack.Ext:
        """Look up the class of an object, then build the object again and compare."""
        before = len(self.lossy)
        self.check_loadable(code, type(value))
        return self.ext(code, data) if len(self.lossy) != before else self.compared(value, code, data, mark)


EncodeFunction = Callable[[MsgpackEncoder, Any], Any]

ENCODERS: Final[dict[type, EncodeFunction]] = {}
"""How values of a type, not of its subclasses, are written; each function writes what LangGraph writes."""


def head_of(length: int, cls: type) -> bytes:
    """Return the msgpack of an array up to where the payload starts, after module and name."""
    return bytes([0x90 | length]) + ormsgpack.packb(cls.__module__) + ormsgpack.packb(cls.__name__)


# Which types a value holds ----------------------------------------------------------------------------------------
#
# The garbage collector lists what containers refer to. Asked for one nesting level at a time, it does so at the speed
# of C. Only exact lists and dicts are searched: the encoder has handed over everything else.

_CONTAINERS: Final = frozenset({list, dict})
_PLAIN: Final = frozenset({list, dict, str, int, float, bool, bytes, type(None)})
_EXACT_KEYS: Final = frozenset({str, int, float, bool, bytes, type(None)})


def holds(value: object, types: frozenset[type]) -> bool:
    """Return whether a value holds one of these types, as an item or a key."""
    return any(not types.isdisjoint(kinds) for kinds, _ in _levels(value))


def holds_only(value: object, leaves: frozenset[type]) -> bool:
    """Return whether a value holds only msgpack's own types, these leaves, and Enums."""
    known = _PLAIN | leaves
    return all(kind in known or issubclass(kind, Enum) for kinds, _ in _levels(value) for kind in kinds)


def keys_are_exact(value: object) -> bool:
    """Return whether every key of the dicts in a value comes back unchanged."""
    for kinds, items in _levels(value):
        if dict in kinds:
            dicts: Any = items if kinds == {dict} else [item for item in items if type(item) is dict]
            if not _are_exact(chain.from_iterable(dicts)):
                return False
    return True


def _are_exact(keys: Any) -> bool:
    if _EXACT_KEYS.issuperset(map(type, found := list(keys))):
        return True
    return all(type(key) in _EXACT_KEYS or (type(key) is tuple and _are_exact(key)) for key in found)


def _levels(value: object) -> Iterator[tuple[set[type], list[Any]]]:
    """Yield the types and the items of each nesting level."""
    items: list[Any] = [value]
    while items:
        kinds = set(map(type, items))
        yield kinds, items
        if _CONTAINERS.isdisjoint(kinds):
            return
        # Other objects must not be followed: an object refers to its class, and that refers to everything.
        items = gc.get_referents(*items if kinds <= _PLAIN else [item for item in items if type(item) in _CONTAINERS])
