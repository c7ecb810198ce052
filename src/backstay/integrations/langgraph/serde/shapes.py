"""How objects of classes that are not known by name are written: as LangGraph does, by what they look like.

LangGraph asks an object, in a fixed order, whether it has ``model_dump``, ``get_secret_value``, ``dict``, ``_asdict``,
and so on. The answers are the same for all objects of a class, so they are asked for once. With them goes what is known
about coming back: which constructors only set fields, and which have code of the user's, whose result is compared.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import ormsgpack
from langgraph.checkpoint.serde.types import SendProtocol
from langgraph.types import Interrupt, Overwrite, TimeoutPolicy
from pydantic import SecretBytes, SecretStr

from backstay.codec import arrays
from backstay.integrations.langgraph.serde import models, trusted
from backstay.integrations.langgraph.serde.models import Packer, head_of, rebuilt

if TYPE_CHECKING:
    from backstay.integrations.langgraph.serde.packing import Packing

_RECORDS: Final = (Interrupt, Overwrite, TimeoutPolicy)
"""Dataclasses of LangGraph's whose constructors give for their fields these very fields."""

CLASSES_MAX: Final = 1000
"""How many classes are remembered; programs that make classes as they go must not be kept from forgetting them."""


def packer_for(value: object, known: dict[type, Packer]) -> Packer:
    """Return how a value of a type that the C encoder does not write is written, and remember it."""
    if len(known) >= CLASSES_MAX:
        known.clear()
    packer = known[type(value)] = _choose(value, type(value))
    return packer


def _choose(value: object, cls: Any) -> Packer:
    for plain, packer in _SUBCLASSES:
        if issubclass(cls, plain) and not issubclass(cls, Enum):
            return packer
    for name, make in _BY_METHOD:
        if callable(getattr(value, name, None)):
            return make(cls)
    for base, packer in _BY_BASE:
        if issubclass(cls, base):
            return packer
    if isinstance(value, SendProtocol):
        return _sent
    if dataclasses.is_dataclass(cls):
        return _dataclass(cls)
    if arrays.is_array(cls) or any(arrays.is_array(base) for base in cls.__mro__):
        return _array
    return _exception if issubclass(cls, BaseException) else _nothing


def _nothing(run: Packing, value: object) -> Any:
    raise run.unknown(type(value))


def _lowered(lower: Callable[[Any], Any]) -> Packer:
    def pack(run: Packing, value: Any) -> Any:
        run.note(type(value))
        return lower(value)

    return pack


_SUBCLASSES: Final[tuple[tuple[type, Packer], ...]] = (
    (str, _lowered(str.__str__)),
    (int, _lowered(int.__int__)),
    (list, _lowered(list.copy)),
    (dict, _lowered(dict.copy)),
)
"""What the C encoder would have written as its base."""


def _secret(cls: Any) -> Packer:
    is_known = cls in (SecretStr, SecretBytes)

    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        data = run.named(cls, value.get_secret_value())
        if is_known:
            run.found(trusted.SINGLE, cls)
            return ormsgpack.Ext(trusted.SINGLE, data)
        return rebuilt(run, trusted.SINGLE, value, data, mark)

    return pack


def _model_v1(cls: Any) -> Packer:
    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        return rebuilt(run, trusted.PYDANTIC_V1, value, run.named(cls, value.dict()), mark)

    return pack


def _namedtuple(cls: Any) -> Packer:
    # One that is made by a class statement with another namedtuple as its base may have a constructor of its own.
    has_code = tuple not in cls.__bases__

    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        data = run.named(cls, value._asdict())
        if has_code:
            return rebuilt(run, trusted.KEYWORDS, value, data, mark)
        run.found(trusted.KEYWORDS, cls)
        return ormsgpack.Ext(trusted.KEYWORDS, data)

    return pack


_BY_METHOD: Final[tuple[tuple[str, Callable[[Any], Packer]], ...]] = (
    ("model_dump", models.packer_of),
    ("get_secret_value", _secret),
    ("dict", _model_v1),
    ("_asdict", _namedtuple),
)


def _of(code: int, payload_of: Callable[[Any], object]) -> Packer:
    """Return how a subclass of a known type is written: its class by name, what it holds as its base does."""

    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        return rebuilt(run, code, value, run.named(type(value), payload_of(value)), mark)

    return pack


def _datetime(run: Packing, value: datetime) -> ormsgpack.Ext:
    cls = type(value)
    run.found(trusted.METHOD, cls)
    data = run.level([cls.__module__, cls.__name__, value.isoformat(), "fromisoformat"])
    return run.checked(value, trusted.METHOD, data, len(run.notes))


def _enum(run: Packing, value: Enum) -> ormsgpack.Ext:
    mark = len(run.notes)
    return rebuilt(run, trusted.SINGLE, value, run.named(type(value), value.value), mark)


_TIME: Final = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_BY_BASE: Final[tuple[tuple[type | tuple[type, ...], Packer], ...]] = (
    (Path, _of(trusted.POSITIONAL, lambda value: list(value.parts))),
    (UUID, _of(trusted.SINGLE, lambda value: value.hex)),
    (Decimal, _of(trusted.SINGLE, str)),
    ((set, frozenset, deque), _of(trusted.SINGLE, list)),
    ((IPv4Address, IPv4Network, IPv6Address, IPv6Network), _of(trusted.SINGLE, str)),
    (datetime, _datetime),
    (timedelta, _of(trusted.POSITIONAL, lambda value: [value.days, value.seconds, value.microseconds])),
    (date, _of(trusted.POSITIONAL, lambda value: [value.year, value.month, value.day])),
    (time, _of(trusted.KEYWORDS, lambda value: {name: getattr(value, name) for name in _TIME})),
    (timezone, _of(trusted.POSITIONAL, lambda value: list(value.__getinitargs__()))),
    (ZoneInfo, _of(trusted.SINGLE, lambda value: value.key)),
    (Enum, _enum),
)


def _sent(run: Packing, value: Any) -> ormsgpack.Ext:
    mark = len(run.notes)
    timeout = getattr(value, "timeout", None)
    args = [value.node, value.arg] if timeout is None else [value.node, value.arg, timeout]
    return rebuilt(run, trusted.POSITIONAL, value, run.named(type(value), args), mark)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _dataclass(cls: Any) -> Packer:
    names = tuple(field.name for field in dataclasses.fields(cls))
    head = head_of(3, cls)
    is_known = cls in _RECORDS
    has_code = not is_known and not _only_assigns(cls)

    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        data = head + run.level({name: getattr(value, name) for name in names})
        if has_code:
            return rebuilt(run, trusted.KEYWORDS, value, data, mark)
        if len(getattr(value, "__dict__", ())) > len(names):
            run.note(cls)
        if not is_known:
            run.found(trusted.KEYWORDS, cls)
        return ormsgpack.Ext(trusted.KEYWORDS, data)

    return pack


def _only_assigns(cls: Any) -> bool:
    """Tell whether a dataclass has the constructor that was generated for it, and that takes all fields."""
    own = cls.__dict__.get("__dataclass_params__")
    plain = own is not None and own.init and not hasattr(cls, "__post_init__")
    return plain and all(field.init for field in dataclasses.fields(cls)) and cls.__new__ is object.__new__


def _array(run: Packing, value: Any) -> ormsgpack.Ext:
    if value.dtype.hasobject:
        raise run.refused("an array of objects")
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    content = [value.dtype.str, list(value.shape), order, value.tobytes(order="A")]
    ext = ormsgpack.Ext(trusted.NUMPY, ormsgpack.packb(content))
    numpy: Any = arrays.numpy()
    if type(value) is not numpy.ndarray or numpy.dtype(value.dtype.str) != value.dtype:
        run.note(type(value))
    return ext


def _exception(run: Packing, value: BaseException) -> str:
    run.note(type(value))
    return repr(value)
