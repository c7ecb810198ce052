"""LangGraph's msgpack to values. Any bytes whatever give a value or DecodeError; nothing is called that is not trusted.

Reads what LangGraph's own serializer writes and gives what that gives, with these differences, each of which loses
less: a class that may not be loaded, or cannot be rebuilt, is an error and not a bare dict or None; sets of tuples and
Enums whose values are tuples come back (msgpack has no tuples, but what is hashable was no list); dataclasses whose
constructor does not take their fields (``init=False``) are filled field by field; empty arrays come back.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import re
from collections.abc import Callable
from typing import Any, Final

import ormsgpack
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    ChatMessageChunk,
    FunctionMessage,
    FunctionMessageChunk,
    HumanMessage,
    HumanMessageChunk,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
)
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_METHODS
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Send

from backstay.codec import arrays
from backstay.codec.depth import deeper_than
from backstay.codec.plain import END, END_BYTES, PAIR
from backstay.errors import DecodeError
from backstay.integrations.langgraph.serde import trusted
from backstay.integrations.langgraph.serde.trusted import Missing, Trust

EXT_DEPTH_MAX: Final = 64
"""Objects nested in each other."""

FREE_LEVELS: Final = 4
INNER_DEPTH_MAX: Final = 32
"""Lists and dicts nested in each other inside one object that is itself in more than ``FREE_LEVELS`` others.

The C decoder takes up to 1,024 of them a level, each 0.7 KB of native stack: this is what keeps forged bytes from
ending the process.
"""

_OPTION: Final = ormsgpack.OPT_NON_STR_KEYS
_DTYPE: Final = re.compile(r"[<>|=][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?", re.ASCII)

_CONTENT: Final[dict[type, str]] = dict.fromkeys(
    (
        AIMessage,
        AIMessageChunk,
        ChatMessage,
        ChatMessageChunk,
        FunctionMessage,
        FunctionMessageChunk,
        HumanMessage,
        HumanMessageChunk,
        SystemMessage,
        SystemMessageChunk,
        ToolMessage,
        ToolMessageChunk,
    ),
    "content",
)
_FIRST_FIELD: Final[dict[type, str]] = {**_CONTENT, Document: "page_content"}
"""Classes whose constructors hand their keywords to the validator and do nothing else, if this one is among them."""

logger = logging.getLogger(__name__)


def revive(data: bytes, trust: Trust) -> Any:
    """Return the value of LangGraph's msgpack."""
    run = Revival(trust)
    try:
        pair = ormsgpack.unpackb(b"".join((PAIR, data, END_BYTES)), ext_hook=run.extend, option=_OPTION)
    except Exception as error:
        raise run.translated(error) from error
    if type(pair[1]) is not int or pair[1] != END:  # not every value can be compared, such as an array
        raise DecodeError("bytes are left over after a value")
    return pair[0]


class Revival:
    """The decoding of one value."""

    __slots__ = ("_depth", "_failure", "_trust")

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._depth = 0
        self._failure: BaseException | None = None

    def translated(self, error: Exception) -> BaseException:
        """Return what to raise: the failure inside an object if there was one, since the C decoder drops it."""
        failure = self._failure or error
        if isinstance(failure, (DecodeError, MemoryError)) or not isinstance(failure, Exception):
            return failure
        if failure is error:
            return DecodeError(f"bytes are no valid value: {error}")
        return DecodeError(f"stored value cannot be rebuilt: {type(failure).__name__}")

    def extend(self, code: int, data: bytes) -> Any:
        """Return the object that an ext stands for."""
        self._depth += 1
        try:
            if self._depth > FREE_LEVELS:
                self._check_depth(data)
            content = ormsgpack.unpackb(data, ext_hook=self.extend, option=_OPTION)
            return self._object(code, content)
        except BaseException as failure:
            if self._failure is None:
                self._failure = failure
            raise
        finally:
            self._depth -= 1

    def _check_depth(self, data: bytes) -> None:
        if self._depth > EXT_DEPTH_MAX:
            raise DecodeError(f"value has more than {EXT_DEPTH_MAX} objects nested in each other")
        if deeper_than(data, INNER_DEPTH_MAX):
            raise DecodeError(f"value is nested deeper than {INNER_DEPTH_MAX} levels inside an object")

    def _object(self, code: int, content: Any) -> Any:
        if code == trusted.SNAPSHOT:
            return _DeltaSnapshot(content)
        if code == trusted.NUMPY:
            return _array(content)
        if type(content) is not list or len(content) < 3:
            raise DecodeError("a stored object does not say which class it is of")
        build = _BUILDERS.get(code)
        module, name, payload = content[0], content[1], content[2]
        try:
            if build is None:
                return self._called(code, content)
            return build(self._trust.find(module, name, code), payload)
        except DecodeError as error:
            if isinstance(error, Missing):
                return _without_class(module, name, payload)
            raise
        except Exception as error:
            raise DecodeError(
                f"stored {module}.{name} cannot be rebuilt: {type(error).__name__}",
                hint="Has the class changed since? Give its new fields defaults, or keep those it had",
            ) from error

    def _called(self, code: int, content: list[Any]) -> Any:
        """Call one of the few methods that are on LangGraph's closed list."""
        if code != trusted.METHOD or len(content) < 4:
            raise DecodeError(f"value has a part of an unknown type (ext {code})")
        module, name, payload, method = content[:4]
        if any(type(part) is not str for part in (module, name, method)):
            raise DecodeError("a stored object does not say which class it is of")
        if (module, name, method) not in SAFE_MSGPACK_METHODS:
            raise DecodeError(f"stored value asks for a call of {module}.{name}.{method}, which is never made")
        return getattr(self._trust.find(module, name, code), method)(payload)


def _without_class(module: str, name: str, payload: Any) -> Any:
    """Return the bare payload of a class that has no name to be found by.

    The one case in which LangGraph's custom is followed: graphs whose state is a class made inside a function rely on
    it, since the state's own validation makes objects of the payload again. Saving such a value has been reported.
    """
    if (module, name) not in _told and len(_told) < _TOLD_MAX:
        _told.add((module, name))
        logger.warning("No class %s.%s to rebuild a stored value with; it is returned as plain data", module, name)
    return payload


_TOLD_MAX: Final = 1000
_told: set[tuple[str, str]] = set()


def _single(target: Any, payload: Any) -> Any:
    try:
        return target(payload)
    except (TypeError, ValueError):
        if type(payload) is not list or not (target in _HASHED or _is_enum(target)):
            raise
    # What a set holds, or an Enum's value by which it was found, was hashable: a list in it was a tuple.
    return target([hashable(item) for item in payload] if target in _HASHED else hashable(payload))


_HASHED: Final = (set, frozenset)


def _is_enum(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, enum.Enum)


def hashable(value: Any) -> Any:
    """Return a value with its lists as the tuples that they were."""
    return tuple(map(hashable, value)) if type(value) is list else value


def _positional(target: Any, payload: Any) -> Any:
    if target is Send:
        node, arg, *timeout = payload
        return Send(node, arg, timeout=timeout[0]) if timeout else Send(node, arg)
    return target(*payload)


def _keywords(target: Any, payload: Any) -> Any:
    try:
        return target(**payload)
    except TypeError:
        if not (isinstance(target, type) and dataclasses.is_dataclass(target)):
            raise
    return _filled(target, payload)


def _filled(cls: Any, payload: dict[str, Any]) -> Any:
    """Return a dataclass with these fields, without its constructor, which does not take all of them."""
    fields = dataclasses.fields(cls)
    if payload.keys() != {field.name for field in fields}:
        raise DecodeError(f"stored fields of {cls.__qualname__} differ from the class's")
    built = object.__new__(cls)
    for field in fields:
        object.__setattr__(built, field.name, payload[field.name])
    return built


def _model_v1(target: Any, payload: Any) -> Any:
    try:
        return target(**payload)
    except Exception:
        if not trusted.is_model(target):
            raise
    return target.construct(**payload)


def _model_v2(target: Any, payload: Any) -> Any:
    first = _FIRST_FIELD.get(target)
    if first is not None and type(payload) is dict and first in payload and "content_blocks" not in payload:
        built = target.__new__(target)
        try:
            target.__pydantic_validator__.validate_python(payload, self_instance=built)
        except Exception:  # the constructor decides, which fails in the same way
            pass
        else:
            return built
    try:
        return target(**payload)
    except Exception:
        if not trusted.is_model(target):
            raise
    # What was stored was no valid object then: it comes back as it was, not as today's code would have it.
    return target.model_construct(**payload)


_BUILDERS: Final[dict[int, Callable[[Any, Any], Any]]] = {
    trusted.SINGLE: _single,
    trusted.POSITIONAL: _positional,
    trusted.KEYWORDS: _keywords,
    trusted.PYDANTIC_V1: _model_v1,
    trusted.PYDANTIC_V2: _model_v2,
}


def _array(content: Any) -> Any:
    numpy: Any = arrays.import_numpy()  # as LangGraph's own serializer does: it has nothing to give in its place
    if numpy is None:
        raise DecodeError("stored value is a numpy array", hint="Install numpy")
    try:
        dtype, shape, order, data = content
        if not _DTYPE.fullmatch(dtype):
            raise DecodeError("stored array has an unknown dtype")
        flat = numpy.frombuffer(data, dtype=dtype) if data else numpy.empty(0, dtype=dtype)
        return flat.reshape(shape, order=order)
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError("stored array is not one") from error
