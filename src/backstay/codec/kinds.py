"""The kinds of class that can be registered: for each, how an instance becomes plain fields and is built from them.

No kind runs a constructor, a validator or ``__post_init__`` when decoding: an object comes back as it was stored, not
as today's code would make it. pydantic, attrs and msgspec are recognised by the attributes they give to classes and
are never imported from here.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol

from backstay.codec.refusal import Refused
from backstay.errors import DecodeError

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes defined in Python, not for list, dict, int ...
# Fields, extras if the model allows them, private attributes if it has any, and the names set.
_MODEL_PARTS: Final = {(dict, extra, private, list) for extra in (dict, type(None)) for private in (dict, type(None))}
_NO_CONTENT: Final = frozenset({"__weakref__", "__dict__"})


class Kind(Protocol):
    """How the instances of one registered class are stored."""

    def plain(self, value: Any) -> Any:
        """Return the instance's content as an encodable value."""

    def shown(self, value: Any) -> Any:
        """Return the content as errors name its parts: usually the same."""

    def upgraded(self, content: Any, step: Callable[[Any], Any]) -> Any:
        """Apply one upgrade function to stored content."""

    def build(self, content: Any) -> Any:
        """Return an instance with this content; DecodeError if its fields are not the class's."""


class _Simple(ABC):
    """What is the same for every kind whose content is just its fields."""

    cls: Any

    @abstractmethod
    def plain(self, value: Any) -> Any:
        """Return the instance's content as an encodable value."""

    def shown(self, value: Any) -> Any:
        return self.plain(value)

    def upgraded(self, content: Any, step: Callable[[Any], Any]) -> Any:
        return step(content)


class Custom(_Simple):
    """Any class, by the two functions given for it."""

    def __init__(self, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        self.cls = cls
        self._encode = encode
        self._decode = decode

    def plain(self, value: Any) -> Any:
        """Ask the function given."""
        return self._encode(value)

    def build(self, content: Any) -> Any:
        """Ask the function given, and hold it to its word."""
        built = self._decode(content)
        if type(built) is not self.cls:
            raise DecodeError(f"decode function of {self.cls.__qualname__} returned a {type(built).__qualname__}")
        return built


class EnumKind(_Simple):
    """An Enum by its member's name, a Flag by its number."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self._flag = issubclass(cls, enum.Flag)

    def plain(self, value: Any) -> Any:
        """Return name or number."""
        return int(value._value_) if self._flag else value._name_

    def build(self, content: Any) -> Any:
        """Find the member."""
        if type(content) is not (int if self._flag else str):
            raise DecodeError(f"stored content is no member of {self.cls.__qualname__}")
        if self._flag:
            member = self.cls(content)
            known = member._value_ == content
        else:
            member = self.cls._member_map_.get(content)
            known = member is not None
        if not known:
            raise DecodeError(f"{self.cls.__qualname__} no longer has a stored member", hint=_BUMP)
        return member


class Fields(_Simple):
    """A class of declared fields, set one by one on a bare instance: dataclass or attrs."""

    def __init__(self, cls: Any, names: tuple[str, ...]) -> None:
        self.cls = cls
        self._names = names
        self._known = frozenset(names)
        slots = [_slots(base) for base in cls.__mro__]
        self._hidden_slots = tuple(name for names in slots for name in names if name not in self._known)

    def plain(self, value: Any) -> Any:
        """Return the fields; anything else on the instance would be lost, so it is refused."""
        extra = [*(name for name in getattr(value, "__dict__", ()) if name not in self._known)]
        extra += [name for name in self._hidden_slots if hasattr(value, name)]
        if extra:
            raise Refused(
                f"{self.cls.__qualname__} has the attribute {extra[0]!r} beyond its declared fields",
                "Declare it as a field, or register the class with encode= and decode=",
            )
        try:
            return {name: getattr(value, name) for name in self._names}
        except AttributeError as error:
            raise Refused(f"{self.cls.__qualname__} has a declared field without a value") from error

    def build(self, content: Any) -> Any:
        """Fill a bare instance."""
        check_fields(self.cls, content, self._known)
        built = object.__new__(self.cls)
        put = object.__setattr__
        for name in self._names:
            put(built, name, content[name])
        return built


class NamedTupleKind(_Simple):
    """A NamedTuple by its field names."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self._known = frozenset(cls._fields)

    def plain(self, value: Any) -> Any:
        """Return the fields by name."""
        if getattr(value, "__dict__", None):
            raise Refused(f"{self.cls.__qualname__} has attributes beyond its fields")
        return dict(zip(self.cls._fields, value, strict=True))

    def build(self, content: Any) -> Any:
        """Fill in the order the class has now."""
        check_fields(self.cls, content, self._known)
        return tuple.__new__(self.cls, [content[name] for name in self.cls._fields])


class StructKind(_Simple):
    """A msgspec.Struct; its C constructor runs no code of the user's but ``__post_init__``."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self._names: tuple[str, ...] = cls.__struct_fields__
        self._known = frozenset(self._names)
        self._twin: Any = None
        if hasattr(cls, "__post_init__"):
            # A subclass with an empty __post_init__ makes the instance, which is then given its own class.
            self._twin = type(cls)(cls.__name__, (cls,), {"__post_init__": lambda self: None})
        self._put: Any = sys.modules["msgspec"].structs.force_setattr

    def plain(self, value: Any) -> Any:
        """Return the fields by name."""
        if getattr(value, "__dict__", None):
            raise Refused(f"{self.cls.__qualname__} has attributes beyond its fields")
        return {name: getattr(value, name) for name in self._names}

    def build(self, content: Any) -> Any:
        """Fill an instance by keyword."""
        check_fields(self.cls, content, self._known)
        if self._twin is None:
            return self.cls(**content)
        built = self._twin(**content)
        self._put(built, "__class__", self.cls)
        return built


class PydanticKind:
    """A pydantic model: fields, extras, private attributes and which fields were set; no validator runs."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self._known = frozenset(cls.__pydantic_fields__)
        self._private = frozenset(cls.__private_attributes__)

    def plain(self, value: Any) -> Any:
        """``[fields, extras or null, private or null, names set]``."""
        fields = value.__dict__
        if fields.keys() != self._known:
            raise Refused(f"{self.cls.__qualname__} has other attributes than its fields")
        return [fields, value.__pydantic_extra__, value.__pydantic_private__, sorted(value.__pydantic_fields_set__)]

    def shown(self, value: Any) -> Any:
        """All of them as attributes of the model, which is what the user knows."""
        fields, extra, private, _ = self.plain(value)
        return {**fields, **(extra or {}), **(private or {})}

    def upgraded(self, content: Any, step: Callable[[Any], Any]) -> Any:
        """Upgrade the fields alone."""
        fields, extra, private, were_set = self._parts(content)
        fields = step(fields)
        return [fields, extra, private, [name for name in were_set if name in fields or name in (extra or ())]]

    def build(self, content: Any) -> Any:
        """Fill a bare instance."""
        fields, extra, private, were_set = self._parts(content)
        check_fields(self.cls, fields, self._known)
        if private is not None and not private.keys() <= self._private:
            raise DecodeError(f"{self.cls.__qualname__} no longer has a stored private attribute", hint=_BUMP)
        built = self.cls.__new__(self.cls)
        put = object.__setattr__
        put(built, "__dict__", fields)
        put(built, "__pydantic_fields_set__", set(were_set))
        put(built, "__pydantic_extra__", extra)
        put(built, "__pydantic_private__", private)
        return built

    def _parts(self, content: Any) -> Any:
        if type(content) is not list or tuple(map(type, content)) not in _MODEL_PARTS:
            raise DecodeError(f"stored content is no {self.cls.__qualname__}")
        return content


_BUMP: Final = "Register the class with the next version= and an upgrade= function from the stored one"


def check_fields(cls: type, content: Any, known: frozenset[str]) -> None:
    """Refuse content that does not have exactly the class's fields."""
    if type(content) is not dict or content.keys() != known:
        raise DecodeError(f"stored fields of {cls.__qualname__} differ from the class's", hint=_BUMP)


def _slots(base: Any) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    # Private names are mangled on the instance.
    mangled = (f"_{base.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names)
    return tuple(name for name in mangled if name not in _NO_CONTENT)


def _is_python_only(cls: type) -> bool:
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def _is_namedtuple(cls: type) -> bool:
    return tuple in cls.__mro__ and isinstance(getattr(cls, "_fields", None), tuple)


def kind_of(cls: Any) -> Kind | None:
    """Return how a class can be stored without functions given for it; None if it cannot."""
    if issubclass(cls, enum.Enum):
        return EnumKind(cls)
    if hasattr(cls, "__pydantic_fields__") and hasattr(cls, "__private_attributes__"):
        return PydanticKind(cls)
    if hasattr(cls, "__struct_fields__"):
        return StructKind(cls)
    if _is_namedtuple(cls):
        return NamedTupleKind(cls)
    if not _is_python_only(cls):
        return None
    if dataclasses.is_dataclass(cls):
        return Fields(cls, tuple(field.name for field in dataclasses.fields(cls)))
    if isinstance(getattr(cls, "__attrs_attrs__", None), tuple):
        return Fields(cls, tuple(attribute.name for attribute in cls.__attrs_attrs__))
    return None
