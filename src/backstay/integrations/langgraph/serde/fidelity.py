"""What of a value would come back changed, by its path; and the part of a value that cannot be stored at all.

Both are searched for only when encoding has met something that may not come back equal. The search for changes does not
guess: it decodes the very bytes that are about to be stored and compares, types included. It names keys and types and
never shows a value: states hold secrets.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, time
from typing import Any, Final, NamedTuple

from langgraph.store.base import Item
from langgraph.types import Send
from pydantic import BaseModel

from backstay.errors import EncodeError

DIFFERENCES_MAX: Final = 20
"""How many changes of one value are told; one is enough to act."""

_KEY_CHARS_MAX: Final = 60
_INDEX: Final = re.compile(r"\[[0-9:]+\]")
_SLICE: Final = re.compile(r"\[([0-9]+):\]\Z")
_SCALARS: Final = frozenset({type(None), bool, int, str, bytes})


class ValueChanged(UserWarning):
    """A value was stored that will come back changed.

    ``path`` is where it is in the state, ``before`` its type, ``after`` the type that it will have when it is loaded.
    """

    def __init__(self, path: str, before: str, after: str) -> None:
        self.path = path
        self.before = before
        self.after = after
        super().__init__(path, before, after)

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.path} is of type {self.before} and will come back with other content"
        return f"{self.path} is of type {self.before} and will come back as {self.after}"


class Change(NamedTuple):
    """One part of a value that differs from what it was."""

    path: str
    before: str
    after: str
    value: Any  # what it was

    def warning(self) -> ValueChanged:
        """Return what tells of it."""
        return ValueChanged(self.path, self.before, self.after)


class _Pair(NamedTuple):
    """Two values still to be compared."""

    before: Any
    after: Any
    path: str | None  # None if nobody wants to know


def same(before: object, after: object) -> bool:
    """Tell whether a value came back equal, types included."""
    return next(changes(before, after, None), None) is None


def changes(before: object, after: object, path: str | None) -> Iterator[Change]:
    """Yield what differs, outermost first, and nothing of what is inside a part that differs."""
    stack = [_Pair(before, after, path)]
    while stack:
        pair = stack.pop()
        if type(pair.before) is not type(pair.after):
            yield _change(pair)
            continue
        inside = _compare(pair)
        if inside is None:
            yield _change(pair)
        else:
            stack.extend(reversed(inside))


def _change(pair: _Pair) -> Change:
    return Change(pair.path or "", name_of(type(pair.before)), name_of(type(pair.after)), pair.before)


def _compare(pair: _Pair) -> list[_Pair] | None:
    """Return the pairs of parts to compare, of two values of one type; None if they differ in themselves."""
    before, after, path = pair
    cls = type(before)
    if cls in _SCALARS:
        return [] if before == after else None
    if cls is float:
        return [] if before == after or (before != before and after != after) else None
    if cls is dict:
        return _compare_dicts(before, after, path)
    if isinstance(before, (datetime, time)):
        equal = before == after and before.fold == after.fold and same(before.tzinfo, after.tzinfo)
        return [] if equal else None
    if isinstance(before, (set, frozenset)):
        return [] if before == after and _kinds(before) == _kinds(after) else None
    if isinstance(before, (enum.Enum, type)):
        return [] if before is after else None
    if _is_array(before):
        return [] if _same_array(before, after) else None
    if isinstance(before, deque) and before.maxlen != after.maxlen:
        return None
    steps = parts_of(before)
    if steps is None:
        return [] if _equal(before, after) else None
    return _compare_parts(steps, parts_of(after) or [], path)


def _compare_parts(before: list[Part], after: list[Part], path: str | None) -> list[_Pair] | None:
    if [step for step, _ in before] != [step for step, _ in after]:
        return None
    if path is None:
        return [_Pair(old, new, None) for (_, old), (_, new) in zip(before, after, strict=True)]
    return [_Pair(old, new, join(path, step)) for (step, old), (_, new) in zip(before, after, strict=True)]


def _compare_dicts(before: dict[Any, Any], after: dict[Any, Any], path: str | None) -> list[_Pair] | None:
    if len(before) != len(after):
        return None
    pairs = []
    for (old_key, old), (new_key, new) in zip(before.items(), after.items(), strict=True):
        inside = None if path is None else join(path, step_to(old_key))
        if not (type(old_key) is type(new_key) is str and old_key == new_key):
            pairs.append(_Pair(old_key, new_key, None if inside is None else f"{inside} (key)"))
        pairs.append(_Pair(old, new, inside))
    return pairs


def _kinds(items: Any) -> dict[type, int]:
    counts: dict[type, int] = {}
    for item in items:
        counts[type(item)] = counts.get(type(item), 0) + 1
    return counts


def _equal(before: object, after: object) -> bool:
    try:
        return bool(before == after)
    except Exception:
        return False


def _is_array(value: object) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _same_array(before: Any, after: Any) -> bool:
    numpy: Any = sys.modules["numpy"]
    if before.dtype != after.dtype or before.shape != after.shape:
        return False
    return bool(numpy.array_equal(before, after, equal_nan=before.dtype.kind in "fcmM"))


Part = tuple[str, Any]


def parts_of(value: Any) -> list[Part] | None:
    """Return the parts of a value, each with the step that leads to it; None if it has none that can be named."""
    if isinstance(value, dict):
        return [(step_to(key), item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(f"{{{name_of(type(item))}}}", item) for item in value]
    return _fields_of(value)


def _fields_of(value: Any) -> list[Part] | None:
    if isinstance(value, type):
        return None
    if isinstance(value, BaseModel):
        private = value.__pydantic_private__ or {}
        fields = {**value.__dict__, **(value.__pydantic_extra__ or {}), **private}
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        fields = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    elif isinstance(value, Send):
        fields = {"node": value.node, "arg": value.arg, "timeout": value.timeout}
    elif isinstance(value, Item):
        fields = {name: getattr(value, name) for name in Item.__slots__}
    elif hasattr(value, "__fields__") and hasattr(value, "dict"):  # pydantic's version 1
        fields = value.__dict__
    else:
        return None
    return [(f".{name}", item) for name, item in fields.items()]


def step_to(key: object) -> str:
    """Return how a path goes on to the value under a key."""
    if isinstance(key, str) and not isinstance(key, enum.Enum):
        text = str.__str__(key)
        short = text if len(text) <= _KEY_CHARS_MAX else text[:_KEY_CHARS_MAX] + "..."
        return f".{text}" if text == short and text.isidentifier() else f"[{short!a}]"
    if type(key) in (int, bool, type(None)):
        return f"[{key!r}]"
    return f"[{name_of(type(key))}]"


def join(path: str, step: str) -> str:
    """Return the path one step further; into a list's tail (``messages[7:]``) by the item's place in the list."""
    tail = _SLICE.search(path)
    if tail is not None and step.startswith("[") and step[1:-1].isdecimal():
        return f"{path[: tail.start()]}[{int(tail[1]) + int(step[1:-1])}]"
    return path + step


def pattern_of(path: str) -> str:
    """Return a path without its indices: the same for every item of a list."""
    return _INDEX.sub("[]", path)


def name_of(cls: type) -> str:
    """Return a class's name as messages show it."""
    return cls.__qualname__ if cls.__module__ in ("builtins", "collections") else f"{cls.__module__}.{cls.__qualname__}"


def refusal(value: object, path: str, failure_of: Callable[[object], str | None]) -> EncodeError:
    """Return the error for a value that cannot be stored: the path of the innermost part that fails by itself.

    ``failure_of`` tells why a value cannot be stored, or None if it can.
    """
    reason = failure_of(value) or "cannot be stored"
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for step, part in _inside(value):
            why = failure_of(part)
            if why is not None:
                value, path, reason = part, join(path, step), why
                break
        else:
            break
    hint = "Use keys of type str" if reason.startswith("Dict key") else _hint(value)
    return EncodeError(f"{path}: {reason}", path=path, hint=hint)


def _inside(value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        yield from ((f"{step_to(key)} (key)", key) for key in value)
    yield from parts_of(value) or ()


def _hint(value: object) -> str:
    cls = type(value)
    for base, hint in _HINTS:
        if issubclass(cls, base):
            return hint
    if callable(value):
        return "Functions are code, not state: keep a name by which the node finds it"
    return "Store plain data, or a dataclass or pydantic model that holds it"


_HINTS: Final[tuple[tuple[type, str], ...]] = (
    (int, "LangGraph's format has no ints beyond 64 bits: store it as a str"),
    (complex, "Store its two parts, or a str"),
    (range, "Store its bounds, or a list"),
    (type, "Store its name"),
    (list, "Is it nested too deep, or does it contain itself?"),
    (dict, "Is it nested too deep, or does it contain itself?"),
)
