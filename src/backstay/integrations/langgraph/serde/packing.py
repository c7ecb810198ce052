"""Values to LangGraph's msgpack, byte for byte what its own serializer writes, noting on the way what would be lost.

The C encoder is told to hand over every type that it would change in silence: tuples, and subclasses of str, int, list
and dict. What it gets back for them is what it would have written, and a note is taken. Three things that it does not
hand over are met otherwise: keys that are not str, and lone surrogates, stop the first attempt; bytearrays are looked
for where the output has a byte that could begin bytes. Objects are noted unless their type is known to come back
exactly: by the table below; for pydantic models because their fields are of msgpack's own types and are their dump;
or, where nothing else helps, by building them again.

So a value without loss costs one pass. What notes mean, and where in the value it is, is ``fidelity``'s to find out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PosixPath, WindowsPath
from re import Pattern
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import ormsgpack
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Command, Send

from backstay.codec.depth import deeper_than
from backstay.errors import DecodeError
from backstay.integrations.langgraph.serde import census, shapes, trusted
from backstay.integrations.langgraph.serde.fidelity import name_of, same
from backstay.integrations.langgraph.serde.models import HANDED_OVER
from backstay.integrations.langgraph.serde.revival import EXT_DEPTH_MAX, FREE_LEVELS, INNER_DEPTH_MAX, Revival
from backstay.integrations.langgraph.serde.trusted import Missing, Trust

_ANY_KEYS: Final = HANDED_OVER | ormsgpack.OPT_NON_STR_KEYS
_ANY_TEXT: Final = _ANY_KEYS | ormsgpack.OPT_REPLACE_SURROGATES
_WRITTEN_AS_BYTES: Final = frozenset({bytearray, memoryview})


class Unstorable(Exception):
    """A value that cannot be written, or could not be read again."""


class Packing:
    """The encoding of one value; ``notes`` names the types met that may not come back equal."""

    __slots__ = ("_depth", "_found", "_interrupt", "_reason", "notes", "trust")

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self.notes: list[str] = []
        self._depth = 0
        self._found: set[tuple[int, type]] = set()
        self._reason: str | None = None
        self._interrupt: BaseException | None = None

    def whole(self, value: object) -> bytes:
        """Return the value's msgpack."""
        try:
            return self.level(value)
        except Exception as error:
            if self._interrupt is not None:
                raise self._interrupt from None
            raise Unstorable(self._reason or str(error)) from error

    def level(self, value: object) -> bytes:
        """Encode a value down to the objects in it, each of which is a level of its own."""
        mark = len(self.notes)
        try:
            data = ormsgpack.packb(value, default=self._extend, option=HANDED_OVER)
        except Exception as error:
            data = self._with_more_options(value, mark, error)
        if self.may_hold_bytearray(data, value):
            self.notes.append("bytearray")
        if self._depth > FREE_LEVELS and deeper_than(data, INNER_DEPTH_MAX):
            raise self.refused(f"more than {INNER_DEPTH_MAX} lists and dicts nested in an object")
        return data

    def may_hold_bytearray(self, data: bytes, value: object) -> bool:
        """Tell whether a level holds what the C encoder writes as bytes without asking."""
        return (b"\xc4" in data or b"\xc5" in data or b"\xc6" in data) and census.holds(value, _WRITTEN_AS_BYTES)

    def _with_more_options(self, value: object, mark: int, error: Exception) -> bytes:
        for option in (_ANY_KEYS, _ANY_TEXT):
            if self._reason is not None or self._interrupt is not None:
                raise error
            del self.notes[mark:]
            try:
                data = ormsgpack.packb(value, default=self._extend, option=option)
            except Exception as again:
                error = again
                continue
            if option is _ANY_TEXT or not census.keys_are_exact(value):
                self.notes.append("str")
            return data
        raise self.refused(str(error))

    def note(self, cls: type) -> None:
        """Remember that something of this type may not come back equal."""
        self.notes.append(name_of(cls))

    def unknown(self, cls: type) -> Unstorable:
        """Return the error for a type that cannot be written."""
        return self.refused(f"type {name_of(cls)} cannot be stored")

    def refused(self, reason: str) -> Unstorable:
        """Return an error, and remember why: the C encoder drops what is raised inside it."""
        if self._reason is None:
            self._reason = reason
        return Unstorable(reason)

    def _extend(self, value: Any) -> Any:
        """Return what is to be written for a value that was handed over. The C encoder drops the errors raised here."""
        self._depth += 1
        try:
            if self._depth > EXT_DEPTH_MAX:
                raise self.refused(f"more than {EXT_DEPTH_MAX} objects nested in each other")
            cls = type(value)
            pack = _BY_TYPE.get(cls) or _by_class.get(cls) or shapes.packer_for(value, _by_class)
            return pack(self, value)
        except Unstorable:
            raise
        except Exception as error:
            raise self.refused(f"{type(error).__name__} while reading a {name_of(type(value))}") from error
        except BaseException as interrupt:
            # Ctrl-C must not be taken for a value that cannot be encoded.
            self._interrupt = interrupt
            raise
        finally:
            self._depth -= 1

    def ext(self, code: int, cls: type, payload: object) -> ormsgpack.Ext:
        """Return what is written for an object: its class by name, and what it is to be built from."""
        return ormsgpack.Ext(code, self.named(cls, payload))

    def named(self, cls: type, payload: object) -> bytes:
        """Return the bytes of an ext that names a class."""
        return self.level([cls.__module__, cls.__name__, payload])

    def found(self, code: int, cls: type) -> None:
        """Take a note if bytes that name this class would not lead back to it; refuse what could not be loaded."""
        if (code, cls) in self._found:
            return
        try:
            if self.trust.find(cls.__module__, cls.__name__, code) is not cls:
                self.note(cls)
            else:
                self._found.add((code, cls))
        except Missing:
            self.note(cls)
        except DecodeError as error:
            why = f"a {name_of(cls)} could be stored and not be loaded again"
            raise self.refused(f"{why}. {trusted.how_to_allow(cls.__module__, cls.__name__)}") from error

    def built_again(self, cls: type, code: int, data: bytes) -> Any:
        """Return what will be loaded from what is written for an object."""
        try:
            return Revival(self.trust).extend(code, data)
        except Exception as error:
            raise self.refused(f"a {name_of(cls)} could be stored and not be built again") from error

    def checked(self, value: object, code: int, data: bytes, mark: int) -> ormsgpack.Ext:
        """Build an object again from what is written for it; if it is equal, forget the notes taken since the mark."""
        if same(value, self.built_again(type(value), code, data)):
            del self.notes[mark:]
        elif len(self.notes) == mark:
            self.note(type(value))
        return ormsgpack.Ext(code, data)


def _tuple(run: Packing, value: tuple[Any, ...]) -> Any:
    run.notes.append("tuple")
    return list(value)


def _plain(code: int, *content: object) -> ormsgpack.Ext:
    """Return an ext whose content is ASCII and small ints, and so needs no second look."""
    return ormsgpack.Ext(code, ormsgpack.packb(content))


def _text(run: Packing, value: Any) -> ormsgpack.Ext:
    cls = type(value)
    return _plain(trusted.SINGLE, cls.__module__, cls.__name__, str(value))


def _uuid(run: Packing, value: UUID) -> ormsgpack.Ext:
    return _plain(trusted.SINGLE, "uuid", "UUID", value.hex)


def _set(run: Packing, value: set[Any] | frozenset[Any]) -> ormsgpack.Ext:
    mark = len(run.notes)
    data = run.named(type(value), list(value))
    return (
        ormsgpack.Ext(trusted.SINGLE, data)
        if len(run.notes) == mark
        else run.checked(value, trusted.SINGLE, data, mark)
    )


def _deque(run: Packing, value: deque[Any]) -> ormsgpack.Ext:
    if value.maxlen is not None:
        run.notes.append("deque")
    return run.ext(trusted.SINGLE, deque, list(value))


def _datetime(run: Packing, value: datetime) -> ormsgpack.Ext:
    text = value.isoformat()
    if (value.tzinfo is not None or value.fold) and not same(value, datetime.fromisoformat(text)):
        run.notes.append("datetime")
    return _plain(trusted.METHOD, "datetime", "datetime", text, "fromisoformat")


def _timedelta(run: Packing, value: timedelta) -> ormsgpack.Ext:
    return _plain(trusted.POSITIONAL, "datetime", "timedelta", [value.days, value.seconds, value.microseconds])


def _date(run: Packing, value: date) -> ormsgpack.Ext:
    return _plain(trusted.POSITIONAL, "datetime", "date", [value.year, value.month, value.day])


def _time(run: Packing, value: time) -> ormsgpack.Ext:
    names = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
    return run.ext(trusted.KEYWORDS, time, {name: getattr(value, name) for name in names})


def _timezone(run: Packing, value: Any) -> ormsgpack.Ext:
    return run.ext(trusted.POSITIONAL, timezone, list(value.__getinitargs__()))


def _zone(run: Packing, value: ZoneInfo) -> ormsgpack.Ext:
    if value.key is None:
        raise run.refused("a ZoneInfo without a key could be stored and not be loaded again")
    return run.ext(trusted.SINGLE, ZoneInfo, value.key)


def _path(run: Packing, value: Any) -> ormsgpack.Ext:
    return run.ext(trusted.POSITIONAL, type(value), list(value.parts))


def _pattern(run: Packing, value: Pattern[Any]) -> ormsgpack.Ext:
    return ormsgpack.Ext(trusted.POSITIONAL, run.level(["re", "compile", [value.pattern, value.flags]]))


def _send(run: Packing, value: Send) -> ormsgpack.Ext:
    args = [value.node, value.arg] if value.timeout is None else [value.node, value.arg, value.timeout]
    return run.ext(trusted.POSITIONAL, Send, args)


def _command(run: Packing, value: Command[Any]) -> ormsgpack.Ext:
    # LangGraph takes a tuple and a list of places to go to for the same thing, and its default is a tuple.
    fields = shapes.fields_of(value)
    fields["goto"] = list(value.goto) if type(value.goto) is tuple else value.goto
    return run.ext(trusted.KEYWORDS, Command, fields)


def _snapshot(run: Packing, value: _DeltaSnapshot) -> ormsgpack.Ext:
    return ormsgpack.Ext(trusted.SNAPSHOT, run.level(value.value))


_TEXTS: Final = (Decimal, IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
_BY_TYPE: Final[dict[type, Callable[[Packing, Any], Any]]] = {
    **dict.fromkeys(_TEXTS, _text),
    tuple: _tuple,
    UUID: _uuid,
    set: _set,
    frozenset: _set,
    deque: _deque,
    datetime: _datetime,
    timedelta: _timedelta,
    date: _date,
    time: _time,
    timezone: _timezone,
    ZoneInfo: _zone,
    PosixPath: _path,
    WindowsPath: _path,
    Pattern: _pattern,
    Send: _send,
    Command: _command,
    _DeltaSnapshot: _snapshot,
}
"""Types that come back exactly; each writes what LangGraph writes for it."""

_by_class: dict[type, Callable[[Packing, Any], Any]] = {}
