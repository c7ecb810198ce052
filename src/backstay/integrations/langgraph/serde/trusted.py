"""Which classes stored bytes may name: found in lists of the program's own, or among the plain data it has loaded.

Bytes say ``(module, name)`` of a class. They never choose what is imported: LangGraph's own closed list and what the
program put into ``allow`` are imported if need be, since it was the program that named them. Anything else must be in a
module that is loaded already, as a plain attribute of it (a module's ``__getattr__`` is not asked), must be a class,
never a function or a method, must bear that very module and name, and must be plain data: a dataclass, a pydantic
model, an Enum with members, or a namedtuple.

What can still go wrong with plain data: rebuilding it runs its ``__init__``, ``__post_init__`` or validators, with
values that whoever wrote the bytes has chosen. That is code of a class made for holding data, which the program loaded;
it is as harmful as its author made it. Families of "data" that act when they are made are left out: whatever is a
``Runnable`` (models, tools, prompts and chains of LangChain are pydantic models, and may connect to an address given to
them), and pydantic's settings (which read files named in their arguments). An Enum is only ever asked for the member of
a value, since calling it with more would make a new class. What remains is a dataclass or model of your own, or of a
library that you loaded, whose constructor opens, sends or deletes something: ``strict=True`` leaves all of this out,
and only the lists count.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Iterable
from typing import Any, Final, Literal

from langchain_core.runnables import Runnable
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.event_hooks import emit_serde_event
from pydantic import BaseModel, SecretBytes, SecretStr

from backstay.errors import DecodeError, InvalidInput

Key = tuple[str, str]
Allow = Iterable[type | tuple[str, ...]] | Literal[True]

SINGLE, POSITIONAL, KEYWORDS, METHOD, PYDANTIC_V1, PYDANTIC_V2, NUMPY, SNAPSHOT = range(8)
"""The codes of LangGraph's msgpack: how the payload is to be handed to what it names."""

_BY_VALUE: Final = frozenset({SINGLE})
_BY_FIELDS: Final = frozenset({POSITIONAL, KEYWORDS, PYDANTIC_V1, PYDANTIC_V2})
_NEVER: Final = frozenset[int]()
_SETTINGS: Final = (("pydantic_settings.main", "BaseSettings"), ("pydantic.v1.env_settings", "BaseSettings"))
_SECRETS: Final = (("pydantic.v1.types", "SecretStr"), ("pydantic.v1.types", "SecretBytes"))


class Missing(DecodeError):
    """A class that may be rebuilt, and is not there: the module is loaded and has no such class."""


class Trust:
    """What may be rebuilt from stored bytes."""

    def __init__(self, allow: Allow = (), *, strict: bool = False) -> None:
        self.strict = strict
        self.everything = allow is True
        self.keys: frozenset[Key] = frozenset()
        self._known: dict[Key, Any] = {}
        if allow is not True:
            classes = {_key(each): each for each in allow}
            self.keys = frozenset(classes)
            # A class given as such is found even where its name is not: nested in another, or in a function.
            self._known = {key: each for key, each in classes.items() if isinstance(each, type)}

    def with_more(self, allow: Iterable[type | tuple[str, ...]]) -> Trust:
        """Return what trusts these too; itself if there is nothing new."""
        more = Trust(allow)
        if self.everything or more.keys <= self.keys:
            return self
        wider = Trust(strict=self.strict)
        wider.keys = self.keys | more.keys
        given = {key: known for key, known in self._known.items() if key in self.keys}
        wider._known = {**more._known, **given}
        return wider

    def only_lists(self) -> Trust:
        """Return what trusts the lists alone."""
        narrow = Trust(strict=True)
        narrow.keys, narrow._known = self.keys, self._known
        return narrow

    def find(self, module: Any, name: Any, code: int) -> Any:
        """Return what bytes name, if they may name it in this way."""
        known = self._known.get((module, name)) if type(module) is type(name) is str else None
        return known if known is not None else self._find(module, name, code)

    def _find(self, module: Any, name: Any, code: int) -> Any:
        if type(module) is not str or type(name) is not str:
            raise DecodeError("a stored object does not say which class it is of")
        key = (module, name)
        if key in SAFE_MSGPACK_TYPES or key in self.keys or self.everything:
            found = _imported(module, name)
            if key in SAFE_MSGPACK_TYPES:
                self._known[key] = found
            return found
        if not self.strict:
            cls = _loaded(module, name)
            if cls is not None and code in codes_of(cls):
                return cls
            if cls is None and module in sys.modules and "." not in name and not _is_there(module, name):
                raise Missing(_absent(module, name))
        emit_serde_event({"kind": "msgpack_blocked", "module": module, "name": name})
        raise DecodeError(f"stored value is a {module}.{name}, {self._why(module)}", hint=how_to_allow(module, name))

    def _why(self, module: str) -> str:
        if self.strict:
            return "which is not in the list of what may be loaded"
        if module not in sys.modules:
            return "whose module is not loaded, and loading a checkpoint imports nothing"
        return "which is no plain data (dataclass, pydantic model, Enum, namedtuple)"


def how_to_allow(module: str, name: str) -> str:
    """Return the sentence that tells how to let a class be loaded."""
    return f"If it is yours and safe to construct, add it: allow=[({module!r}, {name!r})], or the class itself"


def codes_of(cls: type) -> frozenset[int]:
    """Return the ways in which a class that is plain data may be rebuilt; none if it is not."""
    codes = _judged.get(cls)
    if codes is None:
        if len(_judged) >= _JUDGED_MAX:
            _judged.clear()
        codes = _judged[cls] = _judge(cls)
    return codes


_JUDGED_MAX: Final = 1000
_judged: dict[type, frozenset[int]] = {}


def _judge(cls: Any) -> frozenset[int]:
    if issubclass(cls, Runnable) or _is_of(cls, _SETTINGS):
        return _NEVER
    if issubclass(cls, enum.Enum):
        return _BY_VALUE if cls._member_map_ else _NEVER
    if cls in (SecretStr, SecretBytes) or (cls.__module__, cls.__name__) in _SECRETS:
        return _BY_VALUE
    if dataclasses.is_dataclass(cls) or is_model(cls) or is_namedtuple(cls):
        return _BY_FIELDS
    return _NEVER


def is_model(cls: Any) -> bool:
    """Tell whether something is a pydantic model, of version 2 or 1."""
    if not isinstance(cls, type):
        return False
    return issubclass(cls, BaseModel) or _is_of(cls, (("pydantic.v1.main", "BaseModel"),))


def is_namedtuple(cls: type) -> bool:
    """Tell whether a class is a namedtuple."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _is_of(cls: type, names: Iterable[Key]) -> bool:
    # A class can only descend from one of these if the module is loaded.
    return any((base.__module__, base.__name__) in names for base in cls.__mro__)


def _loaded(module: str, name: str) -> type | None:
    """Return a class of a module that is loaded, without running anything of the module's."""
    cls = _attributes(module).get(name)
    if isinstance(cls, type) and cls.__module__ == module and cls.__name__ == name:
        return cls
    return None


def _is_there(module: str, name: str) -> bool:
    return name in _attributes(module)


def _attributes(module: str) -> dict[str, Any]:
    loaded = sys.modules.get(module)
    try:
        # Not getattr: a module may be of a class of its own, which imports something when it is asked.
        attributes = object.__getattribute__(loaded, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _imported(module: str, name: str) -> Any:
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise DecodeError(f"{module} of a stored value cannot be imported: {type(error).__name__}") from error
    try:
        return getattr(loaded, name)
    except AttributeError:
        raise Missing(_absent(module, name)) from None


def _absent(module: str, name: str) -> str:
    return f"there is no {module}.{name}: is the class nested in another, or in a function?"


def _key(allowed: Any) -> Key:
    if isinstance(allowed, type):
        return allowed.__module__, allowed.__name__
    if type(allowed) is tuple and len(allowed) >= 2 and all(type(part) is str for part in allowed):
        return ".".join(allowed[:-1]), allowed[-1]
    raise InvalidInput("allow must hold classes, or (module, name) of classes")
