"""The classes that may be stored: found by class when encoding, by name when decoding.

Decoding finds a class only here, as an object that the program registered; a name in stored bytes is never imported or
looked up anywhere else. No constructor, validator or ``__post_init__`` runs: an object comes back as it was stored, not
as today's code would make it. pydantic, attrs and msgspec are recognised by the attributes they give to classes and
are never imported here.

Reads take no lock: entries are immutable and dict lookups atomic. Registering takes one, which a signal handler may
take again. New entries are added before old ones are removed, so an interrupt in between leaves one too many.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, overload

import ormsgpack

from backstay.codec.msgpack import NAME_BYTES_MAX, VERSION_MAX, Unencodable
from backstay.errors import DecodeError, InvalidInput

C = TypeVar("C", bound=type)
Step = Callable[[Any], Any]

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes defined in Python, not for list, dict, int ...
# Fields, extras if the model allows them, private attributes if it has any, and the names set.
_MODEL_PARTS: Final = {(dict, extra, private, list) for extra in (dict, type(None)) for private in (dict, type(None))}
_NO_CONTENT: Final = frozenset({"__weakref__", "__dict__"})
_BUMP_VERSION: Final = "Register the class with the next version= and an upgrade= function from the stored one"


# Adapters: how the instances of one class become plain fields and are built from them ------------------------------


class ClassAdapter(ABC):
    """How the instances of one registered class are stored."""

    cls: Any
    known: frozenset[str] = frozenset()  # the names of its fields

    @abstractmethod
    def plain(self, value: Any) -> Any:
        """Return the instance's content as an encodable value."""

    @abstractmethod
    def build(self, content: Any) -> Any:
        """Return an instance with this content; raise DecodeError if the class has other fields."""

    def shown(self, value: Any) -> Any:
        """Return the content as errors name its parts."""
        return self.plain(value)

    def upgraded(self, content: Any, step: Step) -> Any:
        """Apply one upgrade function to stored content."""
        return step(content)

    def check(self, content: Any) -> None:
        """Refuse content that does not have exactly the class's fields."""
        if type(content) is not dict or content.keys() != self.known:
            raise DecodeError(f"stored fields of {self.cls.__qualname__} differ from the class's", hint=_BUMP_VERSION)


class _CustomAdapter(ClassAdapter):
    """Any class, with the two functions that were registered for it."""

    def __init__(self, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        self.cls, self.encode, self.decode = cls, encode, decode

    def plain(self, value: Any) -> Any:
        return self.encode(value)

    def build(self, content: Any) -> Any:
        built = self.decode(content)
        if type(built) is not self.cls:
            raise DecodeError(f"decode function of {self.cls.__qualname__} returned a {type(built).__qualname__}")
        return built


class _EnumAdapter(ClassAdapter):
    """An Enum by its member's name, a Flag by its number."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.is_flag = issubclass(cls, enum.Flag)

    def plain(self, value: Any) -> Any:
        return int(value._value_) if self.is_flag else value._name_

    def build(self, content: Any) -> Any:
        if type(content) is not (int if self.is_flag else str):
            raise DecodeError(f"stored content is not a member of {self.cls.__qualname__}")
        member = self.cls(content) if self.is_flag else self.cls._member_map_.get(content)
        if member is None or (self.is_flag and member._value_ != content):
            raise DecodeError(f"{self.cls.__qualname__} no longer has a stored member", hint=_BUMP_VERSION)
        return member


class _FieldsAdapter(ClassAdapter):
    """A dataclass or attrs class: its declared fields, set one by one on a bare instance."""

    def __init__(self, cls: Any, names: tuple[str, ...]) -> None:
        self.cls, self.names, self.known = cls, names, frozenset(names)
        hidden: list[str] = []
        for base in cls.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                private = name.startswith("__") and not name.endswith("__")
                hidden.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)  # as Python mangles it
        self.hidden_slots = [name for name in hidden if name not in self.known and name not in _NO_CONTENT]

    def plain(self, value: Any) -> Any:
        # Anything else on the instance would be lost, so it is refused.
        extra = [name for name in getattr(value, "__dict__", ()) if name not in self.known]
        extra += [name for name in self.hidden_slots if hasattr(value, name)]
        if extra:
            raise Unencodable(
                f"{self.cls.__qualname__} has the attribute {extra[0]!r} beyond its declared fields",
                "Declare it as a field, or register the class with encode= and decode=",
            )
        try:
            return {name: getattr(value, name) for name in self.names}
        except AttributeError as error:
            raise Unencodable(f"{self.cls.__qualname__} has a declared field without a value") from error

    def build(self, content: Any) -> Any:
        self.check(content)
        built = object.__new__(self.cls)
        put = object.__setattr__
        for name in self.names:
            put(built, name, content[name])
        return built


class _NamedTupleAdapter(ClassAdapter):
    """A NamedTuple by its field names."""

    def __init__(self, cls: Any) -> None:
        self.cls, self.known = cls, frozenset(cls._fields)

    def plain(self, value: Any) -> Any:
        if getattr(value, "__dict__", None):
            raise Unencodable(f"{self.cls.__qualname__} has attributes beyond its fields")
        return dict(zip(self.cls._fields, value, strict=True))

    def build(self, content: Any) -> Any:
        self.check(content)
        return tuple.__new__(self.cls, [content[name] for name in self.cls._fields])  # in the order the class has now


class _StructAdapter(ClassAdapter):
    """A msgspec.Struct; its C constructor runs no user code except ``__post_init__``."""

    def __init__(self, cls: Any) -> None:
        self.cls, self.known = cls, frozenset(cls.__struct_fields__)
        self.twin: Any = None
        if hasattr(cls, "__post_init__"):
            # A subclass with an empty __post_init__ makes the instance, which then gets its own class.
            self.twin = type(cls)(cls.__name__, (cls,), {"__post_init__": lambda self: None})
        self.put: Any = sys.modules["msgspec"].structs.force_setattr

    def plain(self, value: Any) -> Any:
        if getattr(value, "__dict__", None):
            raise Unencodable(f"{self.cls.__qualname__} has attributes beyond its fields")
        return {name: getattr(value, name) for name in self.cls.__struct_fields__}

    def build(self, content: Any) -> Any:
        self.check(content)
        if self.twin is None:
            return self.cls(**content)
        built = self.twin(**content)
        self.put(built, "__class__", self.cls)
        return built


class _PydanticAdapter(ClassAdapter):
    """A pydantic model as ``[fields, extras or null, private attributes or null, names of fields that were set]``."""

    def __init__(self, cls: Any) -> None:
        self.cls, self.known = cls, frozenset(cls.__pydantic_fields__)

    def plain(self, value: Any) -> Any:
        fields = value.__dict__
        if fields.keys() != self.known:
            raise Unencodable(f"{self.cls.__qualname__} has other attributes than its fields")
        return [fields, value.__pydantic_extra__, value.__pydantic_private__, sorted(value.__pydantic_fields_set__)]

    def shown(self, value: Any) -> Any:
        fields, extra, private, _ = self.plain(value)
        return {**fields, **(extra or {}), **(private or {})}

    def upgraded(self, content: Any, step: Step) -> Any:
        fields, extra, private, were_set = self._parts(content)
        fields = step(fields)
        return [fields, extra, private, [name for name in were_set if name in fields or name in (extra or ())]]

    def build(self, content: Any) -> Any:
        fields, extra, private, were_set = self._parts(content)
        self.check(fields)
        if private is not None and not private.keys() <= self.cls.__private_attributes__.keys():
            raise DecodeError(f"{self.cls.__qualname__} no longer has a stored private attribute", hint=_BUMP_VERSION)
        built = self.cls.__new__(self.cls)
        put = object.__setattr__
        put(built, "__dict__", fields)
        put(built, "__pydantic_fields_set__", set(were_set))
        put(built, "__pydantic_extra__", extra)
        put(built, "__pydantic_private__", private)
        return built

    def _parts(self, content: Any) -> Any:
        if type(content) is not list or tuple(map(type, content)) not in _MODEL_PARTS:
            raise DecodeError(f"stored content is not a {self.cls.__qualname__}")
        return content


def adapter_of(cls: Any) -> ClassAdapter | None:
    """Return how a class can be stored without functions given for it; None if it cannot."""
    if issubclass(cls, enum.Enum):
        return _EnumAdapter(cls)
    if hasattr(cls, "__pydantic_fields__") and hasattr(cls, "__private_attributes__"):
        return _PydanticAdapter(cls)
    if hasattr(cls, "__struct_fields__"):
        return _StructAdapter(cls)
    if tuple in cls.__mro__ and isinstance(getattr(cls, "_fields", None), tuple):
        return _NamedTupleAdapter(cls)
    if not all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__):
        return None
    if dataclasses.is_dataclass(cls):
        return _FieldsAdapter(cls, tuple(field.name for field in dataclasses.fields(cls)))
    if isinstance(getattr(cls, "__attrs_attrs__", None), tuple):
        return _FieldsAdapter(cls, tuple(attribute.name for attribute in cls.__attrs_attrs__))
    return None


# The registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisteredClass:
    """One registered class."""

    cls: type
    name: str
    version: int
    steps: Mapping[int, Step]  # version -> function from its content to the next version's
    adapter: ClassAdapter
    head: bytes  # the msgpack in front of each instance's content

    def build(self, version: int, content: Any) -> Any:
        """Return the instance for content of this or an older version."""
        for old in range(version, self.version):
            step = self.steps.get(old)
            if step is None:
                raise DecodeError(
                    f"{self.name} was stored in version {version}, and no upgrade from version {old} is registered",
                    hint=f"Register it with upgrade={{{old}: function}}",
                )
            content = self.adapter.upgraded(content, step)
        return self.adapter.build(content)


BY_CLASS: Final[dict[type, RegisteredClass]] = {}
BY_NAME: Final[dict[str, RegisteredClass]] = {}
_lock = threading.RLock()


@overload
def register(
    cls: None = None,
    *,
    name: str | None = None,
    version: int = 1,
    upgrade: Mapping[int, Step] | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> Callable[[C], C]: ...
@overload
def register(
    cls: C,
    *,
    name: str | None = None,
    version: int = 1,
    upgrade: Mapping[int, Step] | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> C: ...
def register(
    cls: C | None = None,
    *,
    name: str | None = None,
    version: int = 1,
    upgrade: Mapping[int, Step] | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> C | Callable[[C], C]:
    """Let a class be stored: as ``@register``, ``@register(name="Note", version=2, upgrade={1: fn})`` or a call.

    Dataclasses, enums, NamedTuples, attrs classes, msgspec Structs and pydantic models are stored by their fields,
    any other class by ``encode`` (instance -> encodable value) and ``decode`` (that value -> instance). ``upgrade``
    maps a version to the function from its plain fields to those of the next.
    """
    if cls is None:
        return lambda decorated: register(
            decorated, name=name, version=version, upgrade=upgrade, encode=encode, decode=decode
        )
    if not isinstance(cls, type):
        raise InvalidInput("only a class can be registered")
    name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    if type(name) is not str or not 0 < len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
        raise InvalidInput(f"the registered name of {cls.__qualname__} must be 1 to {NAME_BYTES_MAX} bytes of text")
    if not name.isprintable():
        raise InvalidInput(f"the registered name of {cls.__qualname__} must be printable")
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise InvalidInput(f"the version of {name} must be an int from 1 to {VERSION_MAX}")
    steps = dict(upgrade or {})
    if not all(type(old) is int and 1 <= old < version and callable(step) for old, step in steps.items()):
        raise InvalidInput(f"the upgrade of {name} must map versions below {version} to functions")
    if (encode is None) != (decode is None):
        raise InvalidInput(f"{cls.__qualname__} needs both encode= and decode=, or neither")
    adapter = adapter_of(cls) if encode is None or decode is None else _CustomAdapter(cls, encode, decode)
    if adapter is None:
        raise InvalidInput(
            f"{cls.__qualname__} is not a dataclass, enum, NamedTuple, attrs class, Struct or pydantic model",
            hint="Register it with encode= and decode=",
        )
    _add(RegisteredClass(cls, name, version, steps, adapter, object_head(name, version)))
    return cls


def _add(entry: RegisteredClass) -> None:
    place = f"{entry.cls.__module__}.{entry.cls.__qualname__}"
    with _lock:
        earlier = BY_NAME.get(entry.name)
        if earlier is not None and (owner := f"{earlier.cls.__module__}.{earlier.cls.__qualname__}") != place:
            raise InvalidInput(
                f"the name {entry.name!r} is already registered for {owner}",
                hint="Register one of the two classes with another name=",
            )
        renamed = BY_CLASS.get(entry.cls)
        BY_NAME[entry.name] = entry
        BY_CLASS[entry.cls] = entry
        # A class of the same module and name is the same class, defined again by a notebook cell or a reload.
        if earlier is not None and earlier.cls is not entry.cls:
            BY_CLASS.pop(earlier.cls, None)
        if renamed is not None and renamed.name != entry.name:
            BY_NAME.pop(renamed.name, None)


def object_head(name: str, version: int) -> bytes:
    """Return the bytes of a stored object, ``[name, version, content]``, up to where the content starts."""
    return b"\x93" + ormsgpack.packb(name) + ormsgpack.packb(version)


def split_object(data: bytes) -> tuple[str, int, bytes]:
    """Return the name, version and content of a stored object."""
    first, second, third = data[:3].ljust(3, b"\x00")
    if first == 0x93 and 0xA1 <= second <= 0xBF:
        name_at, length = 2, second & 31
    elif first == 0x93 and second == 0xD9 and third <= NAME_BYTES_MAX:
        name_at, length = 3, third
    else:
        raise DecodeError("a stored object has no name")
    name_end = name_at + length
    name = data[name_at:name_end].decode()
    # A version is a msgpack int of up to five bytes; the bytes after it are the content.
    version = ormsgpack.unpackb(data[name_end : name_end + 5] + bytes(4))
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise DecodeError("a stored object has no version")
    expected = object_head(name, version)
    if not data.startswith(expected):
        raise DecodeError("the name and version of a stored object are not in canonical form")
    return name, version, data[len(expected) :]


_SHOWN_LENGTH_MAX: Final = 200


@dataclass(frozen=True, slots=True, repr=False)
class Opaque:
    """A stored object whose class is not registered here, or only in an older version.

    It keeps the object's bytes and encodes back to them, so that a worker that does not know a type can load, change
    and save a state without losing it.
    """

    name: str  # the name under which the type was registered when it was stored
    version: int  # the version it was stored in
    raw: bytes  # its content as msgpack
    ext: int  # the ext code it was stored under
    _open: Callable[[bytes], Any] = field(compare=False)

    @property
    def value(self) -> Any:
        """The content as plain data: the fields of a class as a dict. Unknown types in it are Opaque again."""
        return self._open(self.raw)

    def __repr__(self) -> str:
        try:
            content = repr(self.value)
        except DecodeError:
            content = f"{len(self.raw)} bytes that cannot be decoded"
        short = content if len(content) <= _SHOWN_LENGTH_MAX else f"{content[:_SHOWN_LENGTH_MAX]}…"
        return f"<Opaque {self.name} version {self.version}: {short}>"
