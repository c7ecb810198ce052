"""The classes that may be stored, by class when encoding and by name when decoding.

Decoding finds a class only here, as an object someone registered; a name in stored bytes is never imported or looked
up anywhere else. Reads take no lock: entries are immutable and dict lookups atomic; registering takes one, which a
signal handler may take again. New entries come before old ones go, so an interrupt between leaves one too many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

import ormsgpack

from backstay.codec.kinds import Custom, Kind, kind_of
from backstay.codec.limits import NAME_BYTES_MAX, VERSION_MAX
from backstay.errors import DecodeError, InvalidInput

C = TypeVar("C", bound=type)
Step = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered class."""

    cls: type
    name: str
    version: int
    steps: Mapping[int, Step]  # version -> function from its content to the next version's
    kind: Kind
    head: bytes  # the msgpack in front of each instance's content

    def build(self, version: int, content: Any) -> Any:
        """Return the instance that content of an equal or older version stands for."""
        for old in range(version, self.version):
            step = self.steps.get(old)
            if step is None:
                raise DecodeError(
                    f"{self.name} was stored in version {version} and there is no step from version {old}",
                    hint=f"Register it with upgrade={{{old}: function}}",
                )
            content = self.kind.upgraded(content, step)
        return self.kind.build(content)


def head(name: str, version: int) -> bytes:
    """Return ``[name, version, ...`` up to where the content begins."""
    return b"\x93" + ormsgpack.packb(name) + ormsgpack.packb(version)


BY_CLASS: Final[dict[type, Entry]] = {}
BY_NAME: Final[dict[str, Entry]] = {}
_lock = threading.RLock()


@overload
def register(cls: C) -> C: ...
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
    _check(cls, name, version, upgrade)
    kind = _kind(cls, encode, decode)
    _add(Entry(cls, name, version, dict(upgrade or {}), kind, head(name, version)))
    return cls


def _check(cls: type, name: str, version: int, upgrade: Mapping[int, Step] | None) -> None:
    if type(name) is not str or not 0 < len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
        raise InvalidInput(f"name to register {cls.__qualname__} by must be 1 to {NAME_BYTES_MAX} bytes of text")
    if not name.isprintable():
        raise InvalidInput(f"name to register {cls.__qualname__} by must be printable")
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise InvalidInput(f"version of {name} must be an int from 1 to {VERSION_MAX}")
    for old, step in (upgrade or {}).items():
        if type(old) is not int or not 1 <= old < version or not callable(step):
            raise InvalidInput(f"upgrade of {name} must map versions below {version} to functions")


def _kind(cls: type, encode: Callable[[Any], Any] | None, decode: Callable[[Any], Any] | None) -> Kind:
    if encode is not None and decode is not None:
        return Custom(cls, encode, decode)
    if encode is not None or decode is not None:
        raise InvalidInput(f"{cls.__qualname__} needs both encode= and decode=, or neither")
    kind = kind_of(cls)
    if kind is None:
        raise InvalidInput(
            f"{cls.__qualname__} is no dataclass, enum, NamedTuple, attrs class, Struct or pydantic model",
            hint="Register it with encode= and decode=",
        )
    return kind


def _add(entry: Entry) -> None:
    with _lock:
        earlier = BY_NAME.get(entry.name)
        if earlier is not None and _place(earlier.cls) != _place(entry.cls):
            raise InvalidInput(
                f"the name {entry.name!r} is registered for another class, {'.'.join(_place(earlier.cls))}",
                hint="Give one of them another name=",
            )
        renamed = BY_CLASS.get(entry.cls)
        BY_NAME[entry.name] = entry
        BY_CLASS[entry.cls] = entry
        # A class of the same place is the same class, defined again by a notebook cell or a reload.
        if earlier is not None and earlier.cls is not entry.cls:
            BY_CLASS.pop(earlier.cls, None)
        if renamed is not None and renamed.name != entry.name:
            BY_NAME.pop(renamed.name, None)


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
