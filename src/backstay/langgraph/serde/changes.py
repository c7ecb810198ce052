"""Finds the parts of a value that would come back changed, and the part that cannot be stored, each with its path.

Both are searched for only when encoding has met something that may not come back equal. The search for changes does not
guess: it decodes the bytes that are about to be stored and compares, types included. Messages name keys and types and
never show a value, because states hold secrets.

Some changes are not reported: LangGraph writes such values itself, and accepts them in either form. Exceptions in its
error channel come back as text. Its own channels hold tuples (of interrupts, of a value and whether it is final), and
lists will do. The input of a graph stays in ``__start__`` only until the graph reads and validates it. A pair such as
``("user", "hello")`` is a message, as a list or as a tuple. And ``message.text`` is a subclass of str that adds only a
deprecated way to call it.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import datetime, time
from typing import Any, Final, NamedTuple

from langgraph.store.base import Item
from langgraph.types import Interrupt, Send
from pydantic import BaseModel

from backstay.errors import EncodeError

DIFFERENCES_MAX: Final = 20
"""How many changes of one value are reported; one is enough to act."""

_KEY_CHARS_MAX: Final = 60
_INDEX: Final = re.compile(r"\[[0-9:]+\]")
_SLICE: Final = re.compile(r"\[([0-9]+):\]\Z")
UNNAMED: Final = "value"
"""The path of a value whose place in the state is not known."""

_MESSAGE_TEXT: Final = "langchain_core.messages.base.TextAccessor"
_ERRORS: Final = "__error__"
_OWN: Final = re.compile(r"__(error|interrupt|resume|scheduled|no_writes|start|input)__|__pregel_.*|branch:.*|join:.*")
_PLACE: Final = re.compile(r"(channel_values|writes)\.")
_ROLES: Final = frozenset(
    {"ai", "assistant", "developer", "function", "human", "placeholder", "system", "tool", "user"}
)
_SCALARS: Final = frozenset({type(None), bool, int, str, bytes})


class ValueChanged(UserWarning):
    """A value was stored that will come back changed.

    ``path`` is its place in the state, ``before`` its type, ``after`` the type that it will have when it is loaded.
    """

    def __init__(self, path: str, before: str, after: str) -> None:
        self.path = path
        self.before = before
        self.after = after
        super().__init__(path, before, after)

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.path} is of type {self.before} and will come back with different content"
        return f"{self.path} is of type {self.before} and will come back as {self.after}"


class Difference(NamedTuple):
    """One part of a value that comes back changed."""

    path: str
    before: str
    after: str
    value: Any  # the original, which no message shows


class _Pair(NamedTuple):
    """Two values still to be compared."""

    before: Any
    after: Any
    path: str | None  # None if it is not needed


def same(before: object, after: object) -> bool:
    """Return whether a value came back equal, types included."""
    return next(differences(before, after, None), None) is None


def differences(before: object, after: object, path: str | None) -> Iterator[Difference]:
    """Yield what differs, outermost first; a part that differs is not searched further."""
    stack = [_Pair(before, after, path)]
    while stack:
        pair = stack.pop()
        inside = _compare(pair) if type(pair.before) is type(pair.after) else None
        if inside is None:
            yield Difference(pair.path or "", name_of(type(pair.before)), name_of(type(pair.after)), pair.before)
        else:
            stack.extend(reversed(inside))


def _compare(pair: _Pair) -> list[_Pair] | None:
    """Return the pairs of parts to compare in two values of one type; None if the values themselves differ."""
    before, after, path = pair
    cls = type(before)
    equal: bool | None = None
    if cls in _SCALARS:
        equal = before == after
    elif cls is float:
        equal = before == after or (before != before and after != after)
    elif isinstance(before, (datetime, time)):
        equal = before == after and before.fold == after.fold and same(before.tzinfo, after.tzinfo)
    elif isinstance(before, (set, frozenset)):
        equal = before == after and Counter(map(type, before)) == Counter(map(type, after))
    elif isinstance(before, (enum.Enum, type)):
        equal = before is after
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(before, numpy.ndarray):
        equal = (before.dtype, before.shape) == (after.dtype, after.shape) and bool(
            numpy.array_equal(before, after, equal_nan=before.dtype.kind in "fcmM")
        )
    elif isinstance(before, deque) and before.maxlen != after.maxlen:
        equal = False
    if equal is not None:
        return [] if equal else None
    return _compare_dicts(before, after, path) if cls is dict else _compare_parts(before, after, path)


def _compare_parts(before: Any, after: Any, path: str | None) -> list[_Pair] | None:
    old_parts, new_parts = parts_of(before), parts_of(after) or []
    if old_parts is None:
        try:
            return [] if bool(before == after) else None
        except Exception:  # an __eq__ of the user's
            return None
    if [step for step, _ in old_parts] != [step for step, _ in new_parts]:
        return None
    return [
        _Pair(old, new, None if path is None else join(path, step))
        for (step, old), (_, new) in zip(old_parts, new_parts, strict=True)
    ]


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


Part = tuple[str, Any]


def parts_of(value: Any) -> list[Part] | None:
    """Return the parts of a value, each with the step that leads to it; None if no part can be named."""
    if isinstance(value, dict):
        return [(step_to(key), item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(f"{{{name_of(type(item))}}}", item) for item in value]
    if isinstance(value, type):
        return None
    fields = _fields(value)
    return None if fields is None else [(f".{name}", item) for name, item in fields.items()]


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, BaseModel):
        return {**value.__dict__, **(value.__pydantic_extra__ or {}), **(value.__pydantic_private__ or {})}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    if isinstance(value, Send):
        return {"node": value.node, "arg": value.arg, "timeout": value.timeout}
    if isinstance(value, Item):
        return {name: getattr(value, name) for name in Item.__slots__}
    if hasattr(value, "__fields__") and hasattr(value, "dict"):  # pydantic's version 1
        return dict(value.__dict__)
    return None


def step_to(key: object) -> str:
    """Return the step of a path to the value under a key."""
    if isinstance(key, str) and not isinstance(key, enum.Enum):
        text = str.__str__(key)
        short = text if len(text) <= _KEY_CHARS_MAX else text[:_KEY_CHARS_MAX] + "..."
        return f".{text}" if text == short and text.isidentifier() else f"[{short!a}]"
    if type(key) in (int, bool, type(None)):
        return f"[{key!r}]"
    return f"[{name_of(type(key))}]"


def join(path: str, step: str) -> str:
    """Return the path one step further; in a list's tail (``messages[7:]``) by the item's index in the list."""
    tail = _SLICE.search(path)
    if tail is not None and step.startswith("[") and step[1:-1].isdecimal():
        return f"{path[: tail.start()]}[{int(tail[1]) + int(step[1:-1])}]"
    return path + step


def name_of(cls: type) -> str:
    """Return the name of a class as messages show it."""
    return cls.__qualname__ if cls.__module__ in ("builtins", "collections") else f"{cls.__module__}.{cls.__qualname__}"


def is_ignorable(difference: Difference, path: str) -> bool:
    """Return whether LangGraph accepts this change in the value at this path."""
    value = difference.value
    if (difference.before, difference.after) == (_MESSAGE_TEXT, "str"):
        return True
    if difference.path == path and isinstance(value, BaseException):
        return is_errors(path)
    if type(value) is not tuple:
        return False
    # Interrupts, or a value and whether the nodes that give it have finished.
    is_own = all(type(item) is Interrupt for item in value) or (len(value) == 2 and type(value[1]) is bool)
    if is_own and difference.path == path == UNNAMED:
        return True
    is_message = len(value) == 2 and type(value[0]) is str and value[0] in _ROLES
    return difference.after == "list" and (is_message or _OWN.fullmatch(_channel(path)) is not None)


def is_errors(path: str) -> bool:
    """Return whether this is, or may be, the path of LangGraph's own errors."""
    return path == UNNAMED or _channel(path) == _ERRORS


def place_of_path(path: str) -> str:
    """Return a path that is the same for all items of a list, and for a channel's value and a pending write to it."""
    return _PLACE.sub("", _INDEX.sub("[]", path), count=1)


def _channel(path: str) -> str:
    return re.sub(r"\[[0-9:]*\]\Z", "", _PLACE.sub("", path, count=1))


# Values that cannot be stored -------------------------------------------------------------------------------------


def refusal(value: object, path: str, failure_of: Callable[[object], str | None]) -> EncodeError:
    """Return the error for a value that cannot be stored, with the path of the innermost part that fails by itself.

    ``failure_of`` says why a value cannot be stored, or None if it can.
    """
    reason = failure_of(value) or "cannot be stored"
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        keys = [(f"{step_to(key)} (key)", key) for key in value] if isinstance(value, dict) else []
        for step, part in (*keys, *(parts_of(value) or ())):
            why = failure_of(part)
            if why is not None:
                value, path, reason = part, join(path, step), why
                break
        else:
            break
    hint = next((hint for base, hint in _HINTS if isinstance(value, base)), None)
    if reason.startswith("Dict key"):
        hint = "Use keys of type str"
    elif hint is None and callable(value):
        hint = "Functions are code, not state: store a name by which the node finds the function"
    return EncodeError(f"{path}: {reason}", path=path, hint=hint or _HINT)


_HINT: Final = "Store plain data, or a dataclass or pydantic model that holds it"
_HINTS: Final[tuple[tuple[type, str], ...]] = (
    (int, "LangGraph's format has no ints beyond 64 bits: store it as a str"),
    (complex, "Store its real and imaginary parts, or a str"),
    (range, "Store its bounds, or a list"),
    (type, "Store its name"),
    (list, "It may be nested too deeply, or contain itself"),
    (dict, "It may be nested too deeply, or contain itself"),
)
