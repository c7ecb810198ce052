"""The slow search for the part of a value that cannot be stored, run only after encoding failed.

It walks the value as its owner sees it, keeps the path, and tries each leaf alone. It names keys and types but never
shows a value: states hold secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, NoReturn

import ormsgpack

from backstay.codec.limits import DEPTH_MAX, EXT_DEPTH_MAX, EXT_INNER_DEPTH_MAX
from backstay.codec.opaque import Opaque
from backstay.codec.refusal import Refused
from backstay.codec.registry import BY_CLASS
from backstay.codec.values import builtin
from backstay.errors import EncodeError

_KEY_CHARS_MAX: Final = 60
_PATH_CHARS_MAX: Final = 400
_PLAIN: Final = frozenset({type(None), bool, float, bytes, Opaque})


class _Place(NamedTuple):
    """A value still to be looked at."""

    value: Any
    path: str
    depth: int  # containers around it in its ext level
    ext_depth: int  # ext levels around it


def error(path: str, reason: str, hint: str | None) -> EncodeError:
    """Return the error for the value at a path."""
    return EncodeError(f"{path}: {reason}", path=path, hint=hint)


def unknown(cls: type) -> Refused:
    """Return why a value of a class that is neither built in nor registered is refused."""
    name = f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__
    hint = _HINTS.get(cls.__qualname__, "Register the class with @backstay.register")
    return Refused(f"type {name} cannot be stored", hint)


_HINTS: Final = {
    "bytearray": "Convert it to bytes",
    "memoryview": "Convert it to bytes",
    "OrderedDict": "Convert it to dict, which keeps its order",
    "defaultdict": "Convert it to dict",
    "deque": "Convert it to list",
    "Ext": "Store the value itself, not its msgpack",
    "Fragment": "Store the value itself, not its msgpack",
}


def find(value: object, path: str, failure: Exception) -> NoReturn:
    """Raise the EncodeError of the first part that cannot be stored."""
    stack = [_Place(value, path, 0, 0)]
    while stack:
        place = stack.pop()
        _check_depth(place)
        look = _LOOKS.get(type(place.value), _look_other)
        try:
            inside = list(look(place))
        except Refused as refused:
            raise error(place.path, refused.reason, refused.hint) from refused.__cause__
        except EncodeError:
            raise
        except Exception as cause:
            # Code of the user's: an encode function or a property. Its text may hold values, so only its type shows.
            reason = f"{type(cause).__name__} while reading a {type(place.value).__qualname__}"
            raise error(place.path, reason, None) from cause
        stack.extend(reversed(inside))
    raise error(path, f"cannot be stored ({type(failure).__name__})", None) from failure


def _check_depth(place: _Place) -> None:
    limit = EXT_INNER_DEPTH_MAX if place.ext_depth else DEPTH_MAX
    deep = place.depth > limit or (place.depth == limit and type(place.value) in (list, dict))
    if deep or place.ext_depth > EXT_DEPTH_MAX:
        shown = place.path if len(place.path) <= _PATH_CHARS_MAX else place.path[:_PATH_CHARS_MAX] + "..."
        reason = "nested too deep, or it contains itself"
        raise error(shown, reason, f"At most {DEPTH_MAX} lists and dicts, {EXT_INNER_DEPTH_MAX} inside another type")


def _look_plain(place: _Place) -> Iterator[_Place]:
    return iter(())


def _look_str(place: _Place) -> Iterator[_Place]:
    if not place.value.isascii():
        try:
            place.value.encode()
        except UnicodeEncodeError as cause:
            raise Refused("str with a lone surrogate cannot be stored") from cause.__context__
    return iter(())


def _look_int(place: _Place) -> Iterator[_Place]:
    if not -(2**63) <= place.value < 2**64:
        return _look_other(place)
    return iter(())


def _look_list(place: _Place) -> Iterator[_Place]:
    for index, item in enumerate(place.value):
        yield _Place(item, f"{place.path}[{index}]", place.depth + 1, place.ext_depth)


def _look_tuple(place: _Place) -> Iterator[_Place]:
    for index, item in enumerate(place.value):
        yield _Place(item, f"{place.path}[{index}]", 1, place.ext_depth + 1)


def _look_set(place: _Place) -> Iterator[_Place]:
    for item in place.value:
        yield _Place(item, f"{place.path}{{{type(item).__qualname__}}}", 0, place.ext_depth + 1)


def _look_dict(place: _Place) -> Iterator[_Place]:
    keyed = all(type(key) is str for key in place.value)
    depth, ext_depth = (place.depth + 1, place.ext_depth) if keyed else (1, place.ext_depth + 1)
    for key, item in place.value.items():
        inside = place.path + _step(key)
        yield _Place(key, f"{inside} (key)", depth, ext_depth)
        yield _Place(item, inside, depth, ext_depth)


def _look_other(place: _Place) -> Iterator[_Place]:
    cls = type(place.value)
    entry = BY_CLASS.get(cls)
    if entry is not None:
        content = entry.kind.shown(place.value)
        yield _Place(content, place.path, 0, place.ext_depth + 1)
        return
    known = builtin(cls)
    if known is None:
        raise unknown(cls)
    known.pack(place.value, _no_level)


def _no_level(value: object) -> bytes:
    # The parts of a Fraction: two ints, which have to pass on their own.
    for part in value if type(value) is list else [value]:
        list(_look_int(_Place(part, "", 0, 0)))
    return ormsgpack.packb(None)


def _step(key: object) -> str:
    if type(key) is str:
        short = key if len(key) <= _KEY_CHARS_MAX else key[:_KEY_CHARS_MAX] + "..."
        return f".{key}" if key == short and key.isidentifier() else f"[{short!a}]"
    if type(key) in (int, bool, type(None)):
        return f"[{key!r}]" if type(key) is not int or key.bit_length() <= 64 else "[int]"
    return f"[{type(key).__qualname__}]"


_LOOKS: Final[dict[type, Callable[[_Place], Iterator[_Place]]]] = {
    **dict.fromkeys(_PLAIN, _look_plain),
    str: _look_str,
    int: _look_int,
    list: _look_list,
    tuple: _look_tuple,
    set: _look_set,
    frozenset: _look_set,
    dict: _look_dict,
}
