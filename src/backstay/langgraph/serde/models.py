"""How pydantic models are written: as their dump, which is exact if the fields are equal to it.

``model_dump`` silently turns what a model holds into plain data: other models, dataclasses and subclasses of dict
become dicts. So the fields themselves are checked. If they are of msgpack's own types and equal to the dump, nothing
was converted or left out, and a model without code of the user's comes back unchanged. Otherwise the model is built
again from the bytes and compared, which costs more than loading it.
"""

from __future__ import annotations

import types
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

import ormsgpack
from langchain_core.documents import Document
from langchain_core.messages import RemoveMessage
from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainValidator, WrapValidator

from backstay.langgraph.serde import trusted
from backstay.langgraph.serde.decode import MESSAGES
from backstay.langgraph.serde.encode import ENCODERS, HANDED_OVER, EncodeFunction, MsgpackEncoder, head_of, holds_only

_TAIL: Final = ormsgpack.packb("model_validate_json")
_DECLARED: Final = ("tool_calls", "invalid_tool_calls", "usage_metadata")
"""Fields of messages whose items have declared keys, so that the dump may leave others out."""

_VALIDATORS: Final = (AfterValidator, BeforeValidator, PlainValidator, WrapValidator)
_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})
_LEAVES: Final = frozenset({datetime, date, time, timedelta, UUID, Decimal})
_NO_MODELS: Final = frozenset[type]()


def model_encoder(cls: Any) -> EncodeFunction:
    """Return how models of a class are written."""
    head = head_of(4, cls)
    is_model = issubclass(cls, BaseModel)
    is_plain = is_model and cls.model_dump is BaseModel.model_dump
    has_code = not (is_plain and _only_sets_fields(cls))
    inner = _NO_MODELS if has_code else _inner_models(cls)
    # The fields that are declared to be of one type, for which a constructor also takes others.
    declared = {name: each.annotation for name, each in cls.__pydantic_fields__.items()} if is_model else {}
    declared = {
        name: kind
        for name, kind in declared.items()
        if kind in _SCALARS | _LEAVES or (isinstance(kind, type) and issubclass(kind, Enum))
    }
    names, kinds = tuple(declared), tuple(declared.values())

    def encode(encoder: MsgpackEncoder, value: Any) -> ormsgpack.Ext:
        mark = len(encoder.lossy)
        dumped = _dumped(value) if is_plain else value.model_dump()
        # Loading converts a field that was later assigned a value of another type.
        fits = is_model and tuple(map(type, map(value.__dict__.get, names))) == kinds
        content = _exact_fields(encoder, value, dumped, inner) if fits else None
        data = b"".join((head, encoder.pack(dumped) if content is None else content, _TAIL))
        if content is not None:
            encoder.check_loadable(trusted.PYDANTIC_V2, cls)
            if not has_code:
                return encoder.ext(trusted.PYDANTIC_V2, data)
            back = encoder.built_again(cls, trusted.PYDANTIC_V2, data)
            if type(back) is cls and _exact_fields(encoder, back, back.__dict__, _NO_MODELS) == content:
                return encoder.ext(trusted.PYDANTIC_V2, data)
        return encoder.found_and_compared(value, trusted.PYDANTIC_V2, data, mark)

    return encode


def message_encoder(cls: Any) -> EncodeFunction:
    """Return how messages are written; the dump changes nothing in their fields if those are plain."""
    head = head_of(4, cls)

    def encode(encoder: MsgpackEncoder, value: Any) -> ormsgpack.Ext:
        mark = len(encoder.lossy)
        fields = value.__dict__
        is_dump = not value.__pydantic_extra__ and not any(map(fields.get, _DECLARED))
        dumped = fields if is_dump else _dumped(value)
        content = _exact_fields(encoder, value, dumped, _NO_MODELS)
        if content is None:
            data = b"".join((head, encoder.pack(_dumped(value)), _TAIL))
            return encoder.compared(value, trusted.PYDANTIC_V2, data, mark)
        return encoder.ext(trusted.PYDANTIC_V2, b"".join((head, content, _TAIL)))

    return encode


# The validators of these classes return valid fields unchanged.
ENCODERS.update((cls, message_encoder(cls)) for cls in (*MESSAGES, RemoveMessage, Document))


def _dumped(value: Any) -> Any:
    # The same as model_dump, without its detour.
    return value.__pydantic_serializer__.to_python(value)


def _exact_fields(encoder: MsgpackEncoder, value: Any, dumped: Any, inner: frozenset[type]) -> bytes | None:
    """Return the msgpack of a model's own fields if they are equal to its dump and come back unchanged, else None."""
    fields = _fields(value, inner)
    if fields is None or (fields is not dumped and fields != dumped):
        return None
    try:
        content = ormsgpack.packb(fields, option=HANDED_OVER)
    except TypeError:
        # Some types are not msgpack's own, but neither the dump nor msgpack changes them.
        if not holds_only(fields, _LEAVES):
            return None
        mark = len(encoder.lossy)
        content = encoder.pack(fields)
        if len(encoder.lossy) == mark:
            return content
        del encoder.lossy[mark:]
        return None
    return None if encoder.may_hold_bytearray(content, fields) else content


def _fields(value: Any, inner: frozenset[type]) -> dict[str, Any] | None:
    """Return a model's fields, with models of the ``inner`` classes as dicts; None if it holds more than fields."""
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
    """Return whether no code of the user's writes or builds a model, and it takes its fields by their names."""
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
    """Return the classes of the models inside a model that come back, because the fields declare exactly them.

    Empty if a field may also hold a model of another class: the bytes do not say which class it is.
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
