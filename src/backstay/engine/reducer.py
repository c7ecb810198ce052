"""Reducers: how a node's update of one key becomes part of the state.

A reducer is declared on a field of the state (``messages: Annotated[list, append]``) or given to the graph. Because the
engine applies it, the engine knows what was only added, and saves no more than that.

Besides folding an update in, a reducer says whether two branches that ran side by side may both write a key, and what
update leads from one value to another (for a subgraph, whose result is a state and not an update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Protocol

from backstay.codec import register


class _Mark:
    """A value that stands for something that is no value; equal to nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


class _Delete(Enum):
    """Has one member, which stays itself when an update is stored and read again."""

    DELETE = "DELETE"

    def __repr__(self) -> str:
        return "DELETE"


register(_Delete, name="backstay.DELETE")

DELETE: Final = _Delete.DELETE
"""As the value of a key in an update: the key goes."""

MISSING: Final = _Mark("MISSING")
"""The value of a key that is not in the state."""


class Refusal(Exception):
    """What a reducer says of an update that it cannot take; the engine adds the node and the key."""


class Reducer(Protocol):
    """How updates of one key are folded in. ``name`` is part of the graph's fingerprint."""

    name: str

    def fold(self, old: Any, new: Any) -> Any:
        """Return the value after an update; ``old`` may be MISSING. Raises Refusal."""

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Tell whether two updates made side by side, from the same base, cannot both be kept."""

    def update(self, before: Any, after: Any) -> Any:
        """Return the update that leads from one value to another, MISSING if there is nothing to do."""


class Replace:
    """The new value takes the old one's place."""

    name = "replace"

    def fold(self, old: Any, new: Any) -> Any:
        """Return the new value."""
        return new

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Two different values cannot both be kept, unless one is what was there."""
        return not (_same(first, second) or _same(first, base) or _same(second, base))

    def update(self, before: Any, after: Any) -> Any:
        """Return the value if it changed."""
        return MISSING if _same(before, after) else after


class Append:
    """A list grows at its end."""

    name = "append"

    def fold(self, old: Any, new: Any) -> Any:
        """Return a longer list; ``LiveState`` extends the one it has instead, which costs what is new."""
        return [*([] if old is MISSING else old), *self.tail(old, new)]

    def tail(self, old: Any, new: Any) -> list[Any]:
        """Return what is to be added at the end."""
        if not isinstance(new, list | tuple):
            raise Refusal(f"must be a list of what is to be appended, not {type(new).__name__}")
        if old is not MISSING and not isinstance(old, list):
            raise Refusal(f"cannot be appended to: it is {type(old).__name__}")
        return list(new)

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Both are appended, in the order in which the branches are declared."""
        return first is DELETE or second is DELETE

    def update(self, before: Any, after: Any) -> Any:
        """Return what was added at the end."""
        start = [] if before is MISSING else before
        if after[: len(start)] != start:
            raise Refusal("was changed in its middle, so what is new at its end cannot be told")
        return after[len(start) :] or MISSING


class Merge:
    """A mapping takes over the keys of another; the deepest level that is looked at is the first."""

    name = "merge"

    def fold(self, old: Any, new: Any) -> Any:
        """Return a new mapping with the new keys."""
        if not isinstance(new, Mapping):
            raise Refusal(f"must be a mapping to merge, not {type(new).__name__}")
        if old is not MISSING and not isinstance(old, Mapping):
            raise Refusal(f"cannot be merged into: it is {type(old).__name__}")
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
        """Return the keys that changed or went."""
        start = {} if before is MISSING else before
        changed = {key: value for key, value in after.items() if key not in start or not _same(start[key], value)}
        changed |= {key: DELETE for key in start if key not in after}
        return changed or MISSING


class Add:
    """Numbers (or anything with ``+``) are added up."""

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


class Custom:
    """Any function ``(old, new) -> value``; ``old`` is None while the key is not there."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.name = f"custom {getattr(function, '__qualname__', type(function).__qualname__)}"

    def fold(self, old: Any, new: Any) -> Any:
        """Ask the function."""
        return self.function(None if old is MISSING else old, new)

    def clash(self, base: Any, first: Any, second: Any) -> bool:
        """Ask the function for each, in the order in which the branches are declared."""
        return first is DELETE or second is DELETE

    def update(self, before: Any, after: Any) -> Any:
        """Return the value if it changed: what the function would make of it nobody can tell."""
        return MISSING if _same(before, after) else after


replace: Final = Replace()
append: Final = Append()
merge: Final = Merge()
add: Final = Add()

BUILT_IN: Final = (Replace, Append, Merge, Add, Custom)


def reducer_of(given: object) -> Reducer | None:
    """Return a reducer given as one of ours or as a function of two values; None if it is neither."""
    if isinstance(given, BUILT_IN):
        return given
    if callable(given) and not isinstance(given, type):
        return Custom(given)
    return None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and bool(one == other)
