"""Reducers: how a node's update of one key changes the state.

Declare a reducer on a field of the state (``messages: Annotated[list, reducers.append]``) or pass it to the graph. The
engine itself applies it, so it knows when items were only added, and saves just those.

A reducer also decides whether two parallel branches may both write a key, and finds the update that leads from one
value to another (for a subgraph, whose result is a state and not an update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Protocol

from backstay.codec.registry import register

__all__ = ["DELETE", "Reducer", "add", "append", "merge", "replace"]


class _Sentinel:
    """A marker that is equal to no other value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


class _Delete(Enum):
    """An enum with one member, so that it is still the same object after an update was stored and loaded."""

    DELETE = "DELETE"

    def __repr__(self) -> str:
        return "DELETE"


register(_Delete, name="backstay.DELETE")

DELETE: Final = _Delete.DELETE
"""As the value of a key in an update: delete the key."""

MISSING: Final = _Sentinel("MISSING")
"""The value of a key that is not in the state."""


class CannotReduce(Exception):
    """A reducer refuses an update. The engine adds the node and the key."""


class Reducer(Protocol):
    """How updates change one key. ``name`` is part of the graph's fingerprint."""

    name: str

    def fold(self, old: Any, new: Any) -> Any:
        """Return the value after an update; ``old`` may be MISSING. Raises CannotReduce."""

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Return whether two parallel updates of the same base exclude each other."""

    def update(self, before: Any, after: Any) -> Any:
        """Return the update that leads from one value to another; MISSING if they are equal."""


class Replace:
    """The new value replaces the old one."""

    name = "replace"

    def fold(self, old: Any, new: Any) -> Any:
        """Return the new value."""
        return new

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Two different values clash, unless one of them is the old value."""
        return not (_same(first, second) or _same(first, base) or _same(second, base))

    def update(self, before: Any, after: Any) -> Any:
        """Return the value if it changed."""
        return MISSING if _same(before, after) else after


class Append:
    """A list grows at its end."""

    name = "append"

    def fold(self, old: Any, new: Any) -> Any:
        """Return a longer list. ``RunState`` extends its list in place instead, at the cost of the new items only."""
        return [*([] if old is MISSING else old), *self.tail(old, new)]

    def tail(self, old: Any, new: Any) -> list[Any]:
        """Return the items to append."""
        if not isinstance(new, list | tuple):
            raise CannotReduce(f"must be a list of items to append, not {type(new).__name__}")
        if old is not MISSING and not isinstance(old, list):
            raise CannotReduce(f"cannot be appended to: its value is {type(old).__name__}")
        return list(new)

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Both are appended, in the order in which the branches were declared."""
        return first is DELETE or second is DELETE

    def update(self, before: Any, after: Any) -> Any:
        """Return the appended items."""
        start = [] if before is MISSING else before
        if after[: len(start)] != start:
            raise CannotReduce("was changed in the middle, so the appended items are unknown")
        return after[len(start) :] or MISSING


class Merge:
    """A mapping gets the keys of another. Nested mappings are replaced, not merged."""

    name = "merge"

    def fold(self, old: Any, new: Any) -> Any:
        """Return a new mapping with the new keys."""
        if not isinstance(new, Mapping):
            raise CannotReduce(f"must be a mapping to merge, not {type(new).__name__}")
        if old is not MISSING and not isinstance(old, Mapping):
            raise CannotReduce(f"cannot be merged into: its value is {type(old).__name__}")
        known: Any = {} if old is MISSING else old
        merged = {**known, **new}
        return {key: value for key, value in merged.items() if value is not DELETE}

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Two branches may write different keys, or the same value."""
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return True
        known = base if isinstance(base, Mapping) else {}
        replace = Replace()
        return any(
            key in second and replace.clash(known.get(key, MISSING), value, second[key]) for key, value in first.items()
        )

    def update(self, before: Any, after: Any) -> Any:
        """Return the changed and the deleted keys."""
        start = {} if before is MISSING else before
        changed = {key: value for key, value in after.items() if key not in start or not _same(start[key], value)}
        changed |= {key: DELETE for key in start if key not in after}
        return changed or MISSING


class Add:
    """Numbers (or other values with ``+``) are added."""

    name = "add"

    def fold(self, old: Any, new: Any) -> Any:
        """Return the sum."""
        return new if old is MISSING else old + new

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Both are added."""
        return first is DELETE or second is DELETE

    def update(self, before: Any, after: Any) -> Any:
        """Return the difference."""
        difference = after if before is MISSING else after - before
        return difference or MISSING


class CustomReducer:
    """A function ``(old, new) -> value``; ``old`` is None while the key is missing."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.name = f"custom {getattr(function, '__qualname__', type(function).__qualname__)}"

    def fold(self, old: Any, new: Any) -> Any:
        """Call the function."""
        return self.function(None if old is MISSING else old, new)

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Both are reduced, in the order in which the branches were declared."""
        return first is DELETE or second is DELETE

    def update(self, before: Any, after: Any) -> Any:
        """Return the value if it changed. It is unknown how the function would merge it."""
        return MISSING if _same(before, after) else after


replace: Final = Replace()
append: Final = Append()
merge: Final = Merge()
add: Final = Add()

BUILT_IN: Final = (Replace, Append, Merge, Add, CustomReducer)


def reducer_of(given: object) -> Reducer | None:
    """Return one of our reducers, or a function of two values as a reducer; None for anything else."""
    if isinstance(given, BUILT_IN):
        return given
    if callable(given) and not isinstance(given, type):
        return CustomReducer(given)
    return None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and bool(one == other)
