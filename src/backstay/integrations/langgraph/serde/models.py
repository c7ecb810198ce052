"""How pydantic models are written: as their dump, which is exact if their fields are that dump already.

``model_dump`` turns whatever a model holds into plain data: other models, dataclasses and subclasses of dict become
dicts, and nobody is told. So the fields themselves are looked at: if they are of msgpack's own types and equal to the
dump, nothing was converted or left out, and a model that has no code of the user's comes back as it was. If not, it is
built again from what is written and compared, which costs more than loading it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import ormsgpack
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainValidator, WrapValidator

from backstay.integrations.langgraph.serde import census, trusted

if TYPE_CHECKING:
    from backstay.integrations.langgraph.serde.packing import Packing

Packer = Callable[["Packing", Any], Any]

HANDED_OVER: Final = (
    ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
"""Options with which the C encoder hands over every type that it would change in silence."""

_TAIL: Final = ormsgpack.packb("model_validate_json")
_MESSAGES: Final = frozenset(
    {AIMessage, ChatMessage, Document, FunctionMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage}
)
"""Models whose validators give for valid fields these very fields."""

_DECLARED: Final = ("tool_calls", "invalid_tool_calls", "usage_metadata")
"""Fields of messages whose items have declared keys, so that the dump may leave others out."""

_VALIDATORS: Final = (AfterValidator, BeforeValidator, PlainValidator, WrapValidator)
_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})
_LEAVES: Final = frozenset({datetime, date, time, timedelta, UUID, Decimal})
_NO_MODELS: Final = frozenset[type]()


def packer_of(cls: Any) -> Packer:
    """Return how models of a class are written."""
    if cls in _MESSAGES:
        return _message(cls)
    head = head_of(4, cls)
    is_model = issubclass(cls, BaseModel)
    is_plain = is_model and cls.model_dump is BaseModel.model_dump
    has_code = not (is_plain and _only_sets_fields(cls))
    inner = _NO_MODELS if has_code else _inner_models(cls)

    names, kinds = _declared(cls) if is_model else ((), ())

    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        dumped = _dumped(value) if is_plain else value.model_dump()
        # A field that was assigned a value of another type later is made to have its own when the model is loaded.
        fits = is_model and tuple(map(type, map(value.__dict__.get, names))) == kinds
        content = _faithful(run, value, dumped, inner) if fits else None
        data = b"".join((head, run.level(dumped) if content is None else content, _TAIL))
        if content is None or (has_code and not _comes_back(run, cls, data, content)):
            return rebuilt(run, trusted.PYDANTIC_V2, value, data, mark)
        run.found(trusted.PYDANTIC_V2, cls)
        return ormsgpack.Ext(trusted.PYDANTIC_V2, data)

    return pack


def _comes_back(run: Packing, cls: type, data: bytes, content: bytes) -> bool:
    """Tell whether a model, built again, has the very fields that were written."""
    run.found(trusted.PYDANTIC_V2, cls)
    back = run.built_again(cls, trusted.PYDANTIC_V2, data)
    return type(back) is cls and _faithful(run, back, back.__dict__, _NO_MODELS) == content


def _message(cls: Any) -> Packer:
    """Return how messages are written; their fields are of types of which the dump changes nothing that is plain."""
    head = head_of(4, cls)

    def pack(run: Packing, value: Any) -> ormsgpack.Ext:
        mark = len(run.notes)
        fields = value.__dict__
        is_dump = not value.__pydantic_extra__ and not any(map(fields.get, _DECLARED))
        dumped = fields if is_dump else _dumped(value)
        content = _faithful(run, value, dumped, _NO_MODELS)
        if content is None:
            data = b"".join((head, run.level(_dumped(value)), _TAIL))
            return run.checked(value, trusted.PYDANTIC_V2, data, mark)
        return ormsgpack.Ext(trusted.PYDANTIC_V2, b"".join((head, content, _TAIL)))

    return pack


def _dumped(value: Any) -> Any:
    # What model_dump does, without its detour.
    return value.__pydantic_serializer__.to_python(value)


def _declared(cls: Any) -> tuple[tuple[str, ...], tuple[type, ...]]:
    """Return names and types of the fields that are declared to be of one type for which a constructor takes others."""
    fields = {name: field.annotation for name, field in cls.__pydantic_fields__.items()}
    named = {name: kind for name, kind in fields.items() if kind in _SCALARS | _LEAVES or _is_enum(kind)}
    return tuple(named), tuple(named.values())


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _faithful(run: Packing, value: Any, dumped: Any, inner: frozenset[type]) -> bytes | None:
    """Return a model's fields, as they are, in msgpack, if they are what it is written as; else None."""
    fields = _fields(value, inner)
    if fields is None or (fields is not dumped and fields != dumped):
        return None
    try:
        content = ormsgpack.packb(fields, option=HANDED_OVER)
    except TypeError:
        return _with_leaves(run, fields)
    return None if run.may_hold_bytearray(content, fields) else content


def _with_leaves(run: Packing, fields: dict[str, Any]) -> bytes | None:
    """Return fields in msgpack if they are of its own types, and of others that neither a dump nor msgpack changes."""
    if not census.holds_only(fields, _LEAVES):
        return None
    mark = len(run.notes)
    content = run.level(fields)
    if len(run.notes) == mark:
        return content
    del run.notes[mark:]
    return None


def _fields(value: Any, inner: frozenset[type]) -> dict[str, Any] | None:
    """Return a model's fields, models of these classes in it as theirs; None if it holds more than fields."""
    fields: dict[str, Any] = value.__dict__
    if value.__pydantic_private__:
        return None
    if value.__pydantic_extra__:
        fields = {**fields, **value.__pydantic_extra__}
    return {name: _lowered(item, inner) for name, item in fields.items()} if inner else fields


def _lowered(item: Any, inner: frozenset[type]) -> Any:
    cls = type(item)
    if cls in inner:
        fields = _fields(item, inner)
        return item if fields is None else fields
    if cls is list:
        return [_lowered(each, inner) for each in item]
    if cls is dict:
        return {key: _lowered(each, inner) for key, each in item.items()}
    return item


def _only_sets_fields(cls: Any) -> bool:
    """Tell whether a model is written and built by no code of the user's, and takes its fields by their names."""
    rules = cls.__pydantic_decorators__
    if rules.field_serializers or rules.model_serializers or rules.computed_fields:
        return False
    if rules.validators or rules.field_validators or rules.root_validators or rules.model_validators:
        return False
    if cls.__init__ is not BaseModel.__init__ or cls.__new__ is not object.__new__ or cls.__pydantic_post_init__:
        return False
    fields = cls.__pydantic_fields__.values()
    return not any(
        field.alias or field.validation_alias or any(isinstance(rule, _VALIDATORS) for rule in field.metadata)
        for field in fields
    )


def _inner_models(cls: Any) -> frozenset[type]:
    """Return the classes of the models in a model that come back, because its fields declare exactly them.

    None of them, if a field may hold a model of another class too: what class it is is not written.
    """
    found: set[type] = set()
    if not _declares(cls, found):
        return _NO_MODELS
    found.discard(cls)
    clear = not any(one is not other and issubclass(one, other) for one in found | {cls} for other in found | {cls})
    return frozenset(found | {cls}) if clear and found else _NO_MODELS


def _declares(cls: Any, found: set[type]) -> bool:
    if cls in found:
        return True
    found.add(cls)
    annotations = [field.annotation for field in cls.__pydantic_fields__.values()]
    closed = cls.model_config.get("extra") != "allow" and _only_sets_fields(cls)
    return closed and all(_is_clear(annotation, found) for annotation in annotations)


def _is_clear(annotation: Any, found: set[type]) -> bool:
    if annotation in _SCALARS or typing.get_origin(annotation) is typing.Literal:
        return True
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return sum(arg not in _SCALARS for arg in args) <= 1 and all(_is_clear(arg, found) for arg in args)
    if typing.get_origin(annotation) in (list, dict):
        return all(_is_clear(arg, found) for arg in args)
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and _declares(annotation, found)


def head_of(length: int, cls: type) -> bytes:
    """Return an array's msgpack up to where the payload begins, after module and name."""
    return bytes([0x90 | length]) + ormsgpack.packb(cls.__module__) + ormsgpack.packb(cls.__name__)


def rebuilt(run: Packing, code: int, value: object, data: bytes, mark: int) -> ormsgpack.Ext:
    """Find the class, build the object again and compare."""
    found = len(run.notes)
    run.found(code, type(value))
    return ormsgpack.Ext(code, data) if len(run.notes) != found else run.checked(value, code, data, mark)
