"""How objects are written: as LangGraph does, by their type if it is known, otherwise by what they look like.

Types that come back exactly have a function each. For other classes LangGraph asks an object, in a fixed order, whether
it has ``model_dump``, ``get_secret_value``, ``dict``, ``_asdict``, and so on. The answers are the same for all objects
of a class, so they are asked once. With them goes what is known about coming back: some constructors only set fields,
others run code of the user's, and their result is compared.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PosixPath, WindowsPath
from re import Pattern
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import ormsgpack
from langgraph.checkpoint.serde.types import SendProtocol, _DeltaSnapshot
from langgraph.types import Command, Interrupt, Overwrite, Send, TimeoutPolicy
from pydantic import SecretBytes, SecretStr

from backstay.codec import arrays
from backstay.langgraph.serde import trusted
from backstay.langgraph.serde.changes import name_of, same
from backstay.langgraph.serde.encode import ENCODERS, EncodeFunction, MsgpackEncoder, head_of
from backstay.langgraph.serde.models import model_encoder

CLASSES_MAX: Final = 1000
"""How many classes are remembered; a program that keeps making classes must not keep all of them alive."""

_RECORDS: Final = (Interrupt, Overwrite, TimeoutPolicy)
"""Dataclasses of LangGraph's whose constructors set exactly the fields they are given."""

_TIME: Final = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")


# Types that come back exactly -------------------------------------------------------------------------------------


def _send_arguments(value: Any) -> list[Any]:
    timeout = getattr(value, "timeout", None)
    return [value.node, value.arg] if timeout is None else [value.node, value.arg, timeout]


_BY_PAYLOAD: Final[tuple[tuple[tuple[type, ...], int, bool, Callable[[Any], object]], ...]] = (
    ((Path, PosixPath, WindowsPath), trusted.POSITIONAL, False, lambda value: list(value.parts)),
    ((UUID,), trusted.SINGLE, True, lambda value: value.hex),
    ((Decimal,), trusted.SINGLE, True, str),
    ((IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network), trusted.SINGLE, True, str),
    ((timedelta,), trusted.POSITIONAL, True, lambda value: [value.days, value.seconds, value.microseconds]),
    ((date,), trusted.POSITIONAL, True, lambda value: [value.year, value.month, value.day]),
    ((time,), trusted.KEYWORDS, False, lambda value: {name: getattr(value, name) for name in _TIME}),
    ((timezone,), trusted.POSITIONAL, False, lambda value: list(value.__getinitargs__())),
)
"""Types, and what their objects are built from; True if that is ASCII and ints, and so needs no second look.

A subclass of one of these types is written in the same way, but built again and compared.
"""


def _exact(cls: type, code: int, is_plain: bool, payload_of: Callable[[Any], object]) -> EncodeFunction:
    head = head_of(3, cls)
    if is_plain:
        return lambda encoder, value: ormsgpack.Ext(code, head + ormsgpack.packb(payload_of(value)))
    return lambda encoder, value: encoder.ext(code, head + encoder.pack(payload_of(value)))


def _tuple(encoder: MsgpackEncoder, value: tuple[Any, ...]) -> Any:
    encoder.lossy.append("tuple")
    return list(value)


def _set(encoder: MsgpackEncoder, value: set[Any] | frozenset[Any]) -> ormsgpack.Ext:
    mark = len(encoder.lossy)
    data = encoder.named(type(value), list(value))
    if len(encoder.lossy) == mark:
        return encoder.ext(trusted.SINGLE, data)
    return encoder.compared(value, trusted.SINGLE, data, mark)


def _deque(encoder: MsgpackEncoder, value: deque[Any]) -> ormsgpack.Ext:
    if value.maxlen is not None:
        encoder.lossy.append("deque")
    return encoder.ext(trusted.SINGLE, encoder.named(deque, list(value)))


def _datetime(encoder: MsgpackEncoder, value: datetime) -> ormsgpack.Ext:
    text = value.isoformat()
    if (value.tzinfo is not None or value.fold) and not same(value, datetime.fromisoformat(text)):
        encoder.lossy.append("datetime")
    return ormsgpack.Ext(trusted.METHOD, ormsgpack.packb(["datetime", "datetime", text, "fromisoformat"]))


def _zone(encoder: MsgpackEncoder, value: ZoneInfo) -> ormsgpack.Ext:
    if value.key is None:
        raise encoder.refused("a ZoneInfo without a key could be stored but not loaded again")
    return encoder.ext(trusted.SINGLE, encoder.named(ZoneInfo, value.key))


def _command(encoder: MsgpackEncoder, value: Command[Any]) -> ormsgpack.Ext:
    # LangGraph treats a tuple and a list of destinations as the same, and its default is a tuple.
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields["goto"] = list(value.goto) if type(value.goto) is tuple else value.goto
    return encoder.ext(trusted.KEYWORDS, encoder.named(Command, fields))


def _pattern(encoder: MsgpackEncoder, value: Pattern[Any]) -> ormsgpack.Ext:
    return ormsgpack.Ext(trusted.POSITIONAL, encoder.pack(["re", "compile", [value.pattern, value.flags]]))


for classes, code, is_plain, payload_of in _BY_PAYLOAD:
    ENCODERS.update((cls, _exact(cls, code, is_plain, payload_of)) for cls in classes)
ENCODERS.update(
    {
        tuple: _tuple,
        set: _set,
        frozenset: _set,
        deque: _deque,
        datetime: _datetime,
        ZoneInfo: _zone,
        Pattern: _pattern,
        Command: _command,
        Send: lambda encoder, value: encoder.ext(trusted.POSITIONAL, encoder.named(Send, _send_arguments(value))),
        _DeltaSnapshot: lambda encoder, value: encoder.ext(trusted.SNAPSHOT, encoder.pack(value.value)),
    }
)


# Other classes ----------------------------------------------------------------------------------------------------

_chosen: dict[type, EncodeFunction] = {}


def choose(value: object) -> EncodeFunction:
    """Return how to write a value whose type has no function of its own, and remember it for its class."""
    cls = type(value)
    encode = _chosen.get(cls)
    if encode is None:
        if len(_chosen) >= CLASSES_MAX:
            _chosen.clear()
        encode = _chosen[cls] = _choose(value, cls)
    return encode


def _choose(value: object, cls: Any) -> EncodeFunction:
    for plain, lower in _SUBCLASSES:
        if issubclass(cls, plain) and not issubclass(cls, Enum):
            return lower
    for name, make in _BY_METHOD:
        if callable(getattr(value, name, None)):
            return make(cls)
    for base, encode in _BY_BASE:
        if issubclass(cls, base):
            return encode
    if isinstance(value, SendProtocol):
        return _by_name(trusted.POSITIONAL, _send_arguments)
    if dataclasses.is_dataclass(cls):
        return _dataclass_encoder(cls)
    if arrays.is_array(cls) or any(arrays.is_array(base) for base in cls.__mro__):
        return _array
    return _other


def _lowered(lower: Callable[[Any], Any]) -> EncodeFunction:
    def encode(encoder: MsgpackEncoder, value: Any) -> Any:
        encoder.note(type(value))
        return lower(value)

    return encode


_SUBCLASSES: Final[tuple[tuple[type, EncodeFunction], ...]] = (
    (str, _lowered(str.__str__)),
    (int, _lowered(int.__int__)),
    (list, _lowered(list.copy)),
    (dict, _lowered(dict.copy)),
)
"""Subclasses that the C encoder would have written as their base."""


def _by_name(code: int, payload_of: Callable[[Any], object], *, is_exact: bool = False) -> EncodeFunction:
    """Return how to write an object by the name of its class and this payload.

    Unless such objects are known to come back exactly, each is built again and compared.
    """

    def encode(encoder: MsgpackEncoder, value: Any) -> ormsgpack.Ext:
        mark = len(encoder.lossy)
        data = encoder.named(type(value), payload_of(value))
        if not is_exact:
            return encoder.found_and_compared(value, code, data, mark)
        encoder.check_loadable(code, type(value))
        return encoder.ext(code, data)

    return encode


def _secret_encoder(cls: Any) -> EncodeFunction:
    is_exact = cls in (SecretStr, SecretBytes)
    return _by_name(trusted.SINGLE, lambda value: value.get_secret_value(), is_exact=is_exact)


def _namedtuple_encoder(cls: Any) -> EncodeFunction:
    # A subclass of another namedtuple, made by a class statement, may have its own constructor.
    return _by_name(trusted.KEYWORDS, lambda value: value._asdict(), is_exact=tuple in cls.__bases__)


_BY_METHOD: Final[tuple[tuple[str, Callable[[Any], EncodeFunction]], ...]] = (
    ("model_dump", model_encoder),
    ("get_secret_value", _secret_encoder),
    ("dict", lambda cls: _by_name(trusted.PYDANTIC_V1, lambda value: value.dict())),
    ("_asdict", _namedtuple_encoder),
)


def _datetime_subclass(encoder: MsgpackEncoder, value: datetime) -> ormsgpack.Ext:
    cls = type(value)
    encoder.check_loadable(trusted.METHOD, cls)
    data = encoder.pack([cls.__module__, cls.__name__, value.isoformat(), "fromisoformat"])
    return encoder.compared(value, trusted.METHOD, data, len(encoder.lossy))


_BY_BASE: Final[tuple[tuple[type | tuple[type, ...], EncodeFunction], ...]] = (
    (datetime, _datetime_subclass),  # before date, its base
    *((classes, _by_name(code, payload_of)) for classes, code, _, payload_of in _BY_PAYLOAD),
    ((set, frozenset, deque), _by_name(trusted.SINGLE, list)),
    (ZoneInfo, _by_name(trusted.SINGLE, lambda value: value.key)),
    (Enum, _by_name(trusted.SINGLE, lambda value: value.value)),
)


def _dataclass_encoder(cls: Any) -> EncodeFunction:
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)
    head = head_of(3, cls)
    is_known = cls in _RECORDS
    # Whether the class has the constructor that was generated for it, and that takes all fields.
    params = cls.__dict__.get("__dataclass_params__")
    is_generated = params is not None and params.init and not hasattr(cls, "__post_init__")
    only_assigns = is_generated and all(field.init for field in fields) and cls.__new__ is object.__new__
    has_code = not is_known and not only_assigns

    def encode(encoder: MsgpackEncoder, value: Any) -> ormsgpack.Ext:
        mark = len(encoder.lossy)
        data = head + encoder.pack({name: getattr(value, name) for name in names})
        if has_code:
            return encoder.found_and_compared(value, trusted.KEYWORDS, data, mark)
        if len(getattr(value, "__dict__", ())) > len(names):
            encoder.note(cls)
        if not is_known:
            encoder.check_loadable(trusted.KEYWORDS, cls)
        return encoder.ext(trusted.KEYWORDS, data)

    return encode


def _array(encoder: MsgpackEncoder, value: Any) -> ormsgpack.Ext:
    if value.dtype.hasobject:
        raise encoder.refused("an array of objects cannot be stored")
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    content = [value.dtype.str, list(value.shape), order, value.tobytes(order="A")]
    numpy: Any = arrays.numpy()
    if type(value) is not numpy.ndarray or numpy.dtype(value.dtype.str) != value.dtype:
        encoder.note(type(value))
    return ormsgpack.Ext(trusted.NUMPY, ormsgpack.packb(content))


def _other(encoder: MsgpackEncoder, value: object) -> str:
    """Write an exception as its text and refuse everything else, as LangGraph does."""
    cls = type(value)
    if not isinstance(value, BaseException):
        raise encoder.refused(f"type {name_of(cls)} cannot be stored")
    encoder.note(cls)
    return repr(value)
