"""Which classes stored bytes may name: those on the program's lists, and the plain data that it has loaded.

Bytes name a class by ``(module, name)``. They never choose what is imported. LangGraph's own closed list and the
classes in ``allow`` are imported if necessary, since the program named them. Any other class must be in a module that
is loaded already, as a plain attribute of it (a module's ``__getattr__`` is not called); it must be a class, not a
function or a method, have exactly that module and name, and be plain data: a dataclass, a pydantic model, an Enum with
members, or a namedtuple.

The remaining risk of plain data: building it runs its ``__init__``, ``__post_init__`` or validators with values that
the writer of the bytes has chosen. That is code of a class made for holding data, which the program has loaded; it is
as harmful as its author made it. Two families of "data" that act when they are built are excluded: every ``Runnable``
(LangChain's models, tools, prompts and chains are pydantic models, and may connect to an address that is given to
them), and pydantic's settings (which read files named in their arguments). An Enum is only asked for the member of a
value, since calling it with more arguments would make a new class. The rest are dataclasses and models of your own, or
of a library that you loaded, whose constructor opens, sends or deletes something. ``strict=True`` excludes all of this:
then only the lists count.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
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
"""The codes of LangGraph's msgpack: how the payload is passed to the class it names."""

NO_CLASS: Final = "a stored object does not name its class"

_BY_VALUE: Final = frozenset({SINGLE})
_BY_FIELDS: Final = frozenset({POSITIONAL, KEYWORDS, PYDANTIC_V1, PYDANTIC_V2})
_NEVER: Final = frozenset[int]()
_SETTINGS: Final = (("pydantic_settings.main", "BaseSettings"), ("pydantic.v1.env_settings", "BaseSettings"))
_SECRETS: Final = (("pydantic.v1.types", "SecretStr"), ("pydantic.v1.types", "SecretBytes"))


class MissingClass(DecodeError):
    """A class that may be rebuilt but does not exist: its module is loaded and has no such class."""


class Trust:
    """The classes that may be rebuilt from stored bytes."""

    def __init__(self, allow: Allow = (), *, strict: bool = False) -> None:
        self.strict = strict
        self.everything = allow is True
        self.keys: frozenset[Key] = frozenset()
        self._known: dict[Key, Any] = {}
        if allow is not True:
            classes: dict[Key, type | None] = {}
            for each in allow:
                if isinstance(each, type):
                    classes[each.__module__, each.__name__] = each
                elif type(each) is tuple and len(each) >= 2 and all(type(part) is str for part in each):
                    classes[".".join(each[:-1]), each[-1]] = None
                else:
                    raise InvalidInput(
                        f"allow holds {each!r:.80}, which is not a class",
                        hint="Pass classes, or (module, name) of each",
                    )
            self.keys = frozenset(classes)
            # A class given as such is found even if its name does not lead to it: nested in a class or a function.
            self._known = {key: each for key, each in classes.items() if each is not None}

    def with_more(self, allow: Iterable[type | tuple[str, ...]]) -> Trust:
        """Return a trust that includes these classes too; itself if there is nothing new."""
        more = Trust(allow)
        if self.everything or more.keys <= self.keys:
            return self
        wider = Trust(strict=self.strict)
        wider.keys = self.keys | more.keys
        given = {key: known for key, known in self._known.items() if key in self.keys}
        wider._known = {**more._known, **given}
        return wider

    def only_lists(self) -> Trust:
        """Return a trust in the lists only."""
        narrow = Trust(strict=True)
        narrow.keys, narrow._known = self.keys, self._known
        return narrow

    def find(self, module: Any, name: Any, code: int) -> Any:
        """Return the class that bytes name, if it may be rebuilt in the way that the code says."""
        if type(module) is not str or type(name) is not str:
            raise DecodeError(NO_CLASS)
        known = self._known.get((module, name))
        return known if known is not None else self._find(module, name, code)

    def _find(self, module: str, name: str, code: int) -> Any:
        key = (module, name)
        if key in SAFE_MSGPACK_TYPES or key in self.keys or self.everything:
            found = _imported(module, name)
            if key in SAFE_MSGPACK_TYPES:
                self._known[key] = found
            return found
        if not self.strict:
            # Nothing of the module runs.
            attributes = _attributes(module)
            cls = attributes.get(name)
            if not isinstance(cls, type) or (cls.__module__, cls.__name__) != key:
                cls = None
            if cls is not None and code in codes_of(cls):
                return cls
            if cls is None and module in sys.modules and "." not in name and name not in attributes:
                raise MissingClass(_absent(module, name))
        emit_serde_event({"kind": "msgpack_blocked", "module": module, "name": name})
        if self.strict:
            why = "which is not on the list of classes that may be loaded"
        elif module not in sys.modules:
            why = "whose module is not loaded; loading a checkpoint never imports a module"
        else:
            why = "which is not plain data (dataclass, pydantic model, Enum, namedtuple)"
        raise DecodeError(f"a stored value is a {module}.{name}, {why}", hint=how_to_allow(module, name))


def how_to_allow(module: str, name: str) -> str:
    """Return the hint that says how to let a class be loaded."""
    return f"If you trust the class and its constructor, add it: allow=[({module!r}, {name!r})], or the class itself"


@functools.lru_cache(maxsize=1000)
def codes_of(cls: Any) -> frozenset[int]:
    """Return the codes by which a class may be rebuilt; none if it is not plain data."""
    if issubclass(cls, Runnable) or _is_of(cls, _SETTINGS):
        return _NEVER
    if issubclass(cls, enum.Enum):
        return _BY_VALUE if cls._member_map_ else _NEVER
    if cls in (SecretStr, SecretBytes) or (cls.__module__, cls.__name__) in _SECRETS:
        return _BY_VALUE
    is_namedtuple = issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
    if dataclasses.is_dataclass(cls) or is_model(cls) or is_namedtuple:
        return _BY_FIELDS
    return _NEVER


def is_model(cls: Any) -> bool:
    """Return whether this is a class of pydantic models, of version 2 or 1."""
    if not isinstance(cls, type):
        return False
    return issubclass(cls, BaseModel) or _is_of(cls, (("pydantic.v1.main", "BaseModel"),))


def _is_of(cls: type, names: Iterable[Key]) -> bool:
    # A class can only descend from one of these if the module is loaded.
    return any((base.__module__, base.__name__) in names for base in cls.__mro__)


def _attributes(module: str) -> dict[str, Any]:
    loaded = sys.modules.get(module)
    try:
        # Not getattr: a module may have a class of its own that imports something on access.
        attributes = object.__getattribute__(loaded, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _imported(module: str, name: str) -> Any:
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise DecodeError(f"importing {module} for a stored value raised {type(error).__name__}") from error
    try:
        return getattr(loaded, name)
    except AttributeError:
        raise MissingClass(_absent(module, name)) from None


def _absent(module: str, name: str) -> str:
    return f"{module}.{name} does not exist: the class may be nested in another class or in a function"
