"""LangGraph's bytes to values. Any bytes give a value or DecodeError; loading calls nothing that is not trusted.

This reads what LangGraph's own serializer writes and returns the same values. It differs only where it loses less. A
class that may not be loaded, or cannot be rebuilt, raises an error; LangGraph returns a bare dict or None. Sets of
tuples, and Enums whose values are tuples, come back: msgpack has no tuples, but a hashable value was not a list.
Dataclasses whose constructor does not take their fields (``init=False``) are filled field by field. Empty arrays come
back.

The JSON that LangGraph wrote before it had msgpack holds envelopes that name a class and its arguments. An envelope of
kind ``lc: 2`` may name a class of LangGraph's closed list, or one that the program allowed; nothing else, even if it is
loaded. One of kind ``lc: 1`` (LangChain's own) may name a message or a document.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import re
from collections.abc import Callable
from typing import Any, Final

import ormsgpack
from langchain_core import documents, messages
from langchain_core.load.load import Reviver
from langchain_core.load.serializable import Serializable
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_METHODS
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Send

from backstay.codec import arrays
from backstay.codec.msgpack import END, END_BYTES, PAIR, deeper_than
from backstay.errors import DecodeError
from backstay.langgraph.serde import trusted
from backstay.langgraph.serde.trusted import NO_CLASS, MissingClass, Trust

EXT_DEPTH_MAX: Final = 64
"""How many objects may be nested in each other."""

FREE_LEVELS: Final = 4
INNER_DEPTH_MAX: Final = 32
"""How many lists and dicts may be nested inside an object that is itself inside more than ``FREE_LEVELS`` others.

The C decoder accepts 1,024 of them per object, and each takes 0.7 KB of native stack. Without this limit, forged bytes
could overflow the stack and end the process.
"""

_OPTION: Final = ormsgpack.OPT_NON_STR_KEYS
_DTYPE: Final = re.compile(r"[<>|=][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?", re.ASCII)

MESSAGES: Final = (
    messages.AIMessage,
    messages.ChatMessage,
    messages.FunctionMessage,
    messages.HumanMessage,
    messages.SystemMessage,
    messages.ToolMessage,
)
"""LangChain's messages that have a content."""

CHUNKS: Final = (
    messages.AIMessageChunk,
    messages.ChatMessageChunk,
    messages.FunctionMessageChunk,
    messages.HumanMessageChunk,
    messages.SystemMessageChunk,
    messages.ToolMessageChunk,
)
"""The same messages while they are streamed."""

_FIRST_FIELD: Final[dict[type, str]] = {
    **dict.fromkeys((*MESSAGES, *CHUNKS), "content"),
    documents.Document: "page_content",
}
"""Classes whose constructors only hand their keywords to the validator, if this keyword is among them."""

logger = logging.getLogger(__name__)


def decode_msgpack(data: bytes, trust: Trust) -> Any:
    """Return the value of LangGraph's msgpack."""
    decoder = MsgpackDecoder(trust)
    try:
        pair = ormsgpack.unpackb(b"".join((PAIR, data, END_BYTES)), ext_hook=decoder.ext, option=_OPTION)
    except Exception as error:
        failure = decoder.failure or error  # the C decoder drops an error that was raised inside an object
        if isinstance(failure, (DecodeError, MemoryError)) or not isinstance(failure, Exception):
            raise failure from error
        what = f"stored bytes are not a valid value: {error}"
        if failure is not error:
            what = f"a stored value cannot be rebuilt: {type(failure).__name__}"
        raise DecodeError(what) from error
    if type(pair[1]) is not int or pair[1] != END:  # some values, such as arrays, cannot be compared
        raise DecodeError("a stored value is followed by more bytes")
    return pair[0]


class MsgpackDecoder:
    """Decodes one value."""

    __slots__ = ("_depth", "_trust", "failure")

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._depth = 0
        self.failure: BaseException | None = None  # the first one inside an object

    def ext(self, code: int, data: bytes) -> Any:
        """Return the object that an ext describes."""
        self._depth += 1
        try:
            if self._depth > FREE_LEVELS:
                if self._depth > EXT_DEPTH_MAX:
                    raise DecodeError(f"a stored value has more than {EXT_DEPTH_MAX} objects nested in each other")
                if deeper_than(data, INNER_DEPTH_MAX):
                    raise DecodeError(f"an object in a stored value has more than {INNER_DEPTH_MAX} nested levels")
            return self._object(code, ormsgpack.unpackb(data, ext_hook=self.ext, option=_OPTION))
        except BaseException as failure:
            if self.failure is None:
                self.failure = failure
            raise
        finally:
            self._depth -= 1

    def _object(self, code: int, content: Any) -> Any:
        if code == trusted.SNAPSHOT:
            return _DeltaSnapshot(content)
        if code == trusted.NUMPY:
            return _array(content)
        if type(content) is not list or len(content) < 3:
            raise DecodeError(NO_CLASS)
        module, name, payload = content[:3]
        build = _BUILDERS.get(code)
        try:
            if build is not None:
                return build(self._trust.find(module, name, code), payload)
            return self._call_method(code, content)
        except MissingClass:
            return _without_class(module, name, payload)
        except DecodeError:
            raise
        except Exception as error:
            raise DecodeError(
                f"a stored {module}.{name} cannot be rebuilt: {type(error).__name__}",
                hint="If the class has changed, give its new fields defaults and keep its old fields",
            ) from error

    def _call_method(self, code: int, content: list[Any]) -> Any:
        """Call one of the few methods on LangGraph's closed list."""
        if code != trusted.METHOD or len(content) < 4:
            raise DecodeError(f"a stored value has a part of an unknown type (ext {code})")
        module, name, payload, method = content[:4]
        if any(type(part) is not str for part in (module, name, method)):
            raise DecodeError(NO_CLASS)
        if (module, name, method) not in SAFE_MSGPACK_METHODS:
            raise DecodeError(f"a stored value names the method {module}.{name}.{method}, which is never called")
        return getattr(self._trust.find(module, name, code), method)(payload)


_REPORTED_MAX: Final = 1000
_reported: set[tuple[str, str]] = set()


def _without_class(module: str, name: str, payload: Any) -> Any:
    """Return the bare payload of a class that cannot be found by its name.

    LangGraph does the same. Graphs whose state is a class made inside a function rely on it: the state's own validation
    turns the payload into objects again. Saving such a value has reported the loss.
    """
    if (module, name) not in _reported and len(_reported) < _REPORTED_MAX:
        _reported.add((module, name))
        logger.warning("No class %s.%s to rebuild a stored value with; it is returned as plain data", module, name)
    return payload


# Building objects -------------------------------------------------------------------------------------------------

_HASHED: Final = (set, frozenset)


def _single(target: Any, payload: Any) -> Any:
    try:
        return target(payload)
    except (TypeError, ValueError):
        is_enum = isinstance(target, type) and issubclass(target, enum.Enum)
        if type(payload) is not list or not (target in _HASHED or is_enum):
            raise
    # The items of a set, and the value that identifies an Enum, were hashable: a list among them was a tuple.
    return target([hashable(item) for item in payload] if target in _HASHED else hashable(payload))


def hashable(value: Any) -> Any:
    """Return a value with its lists turned back into tuples."""
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
    # The constructor does not take all fields, so the object is filled without it.
    fields = dataclasses.fields(target)
    if payload.keys() != {field.name for field in fields}:
        raise DecodeError(f"the stored fields of {target.__qualname__} differ from those of the class")
    built = object.__new__(target)
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
        except Exception:  # the constructor below fails in the same way, and decides
            pass
        else:
            return built
    try:
        return target(**payload)
    except Exception:
        if not trusted.is_model(target):
            raise
    # The stored object was not valid either: it comes back as it was, not as today's code would have it.
    return target.model_construct(**payload)


_BUILDERS: Final[dict[int, Callable[[Any, Any], Any]]] = {
    trusted.SINGLE: _single,
    trusted.POSITIONAL: _positional,
    trusted.KEYWORDS: _keywords,
    trusted.PYDANTIC_V1: _model_v1,
    trusted.PYDANTIC_V2: _model_v2,
}
"""How objects are built from a class and a payload, by ext code."""


def _array(content: Any) -> Any:
    numpy: Any = arrays.import_numpy()  # as LangGraph's own serializer does: nothing can be returned in its place
    if numpy is None:
        raise DecodeError("the stored value is a numpy array, and numpy is not installed", hint="Install numpy")
    try:
        dtype, shape, order, data = content
        if not _DTYPE.fullmatch(dtype):
            raise DecodeError("a stored array has an unknown dtype")
        flat = numpy.frombuffer(data, dtype=dtype) if data else numpy.empty(0, dtype=dtype)
        return flat.reshape(shape, order=order)
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError("a stored array is damaged") from error


# JSON -------------------------------------------------------------------------------------------------------------

_LANGCHAIN: Final = Reviver(
    allowed_objects=[
        cls
        for name in (*messages.__all__, "Document")
        if isinstance(cls := getattr(documents if name == "Document" else messages, name), type)
        and issubclass(cls, Serializable)
    ]
)


def decode_json(data: bytes, trust: Trust) -> Any:
    """Return the value of a JSON text with envelopes in it."""
    only_lists = trust if trust.strict or trust.everything else trust.only_lists()

    def open_envelope(value: dict[str, Any]) -> Any:
        if value.get("lc") != 2 or value.get("type") != "constructor" or value.get("id") is None:
            return _LANGCHAIN(value)
        # The envelope's "method" was a way to call anything on a harmless class; it is ignored.
        path, args, kwargs = value["id"], value.get("args") or [], value.get("kwargs") or {}
        if type(path) is not list or not all(type(part) is str for part in path) or len(path) < 2:
            raise DecodeError(NO_CLASS)
        module, name = ".".join(path[:-1]), path[-1]
        target = only_lists.find(module, name, trusted.SINGLE)
        try:
            return target(*args, **kwargs)
        except Exception as error:
            raise DecodeError(f"a stored {module}.{name} cannot be rebuilt: {type(error).__name__}") from error

    try:
        return json.loads(data, object_hook=open_envelope)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"stored JSON cannot be read: {type(error).__name__}") from error
