"""Reducers: how a node's update of one key changes the state.

Declare a reducer on a field of the state (``messages: Annotated[list, reducers.append]``) or pass it to the graph. The
engine itself applies it, so it knows when items were only added, and saves just those.

A reducer also decides whether parallel branches may all write a key, and finds the update that leads from one value to
another (for a subgraph, whose result is a state and not an update). Values are compared by their encoded bytes and not
with ``==``: a class may have no ``__eq__``, NaN is not equal to itself, an array compares item by item, and 1 is True.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Any, Final, Protocol

from backstay.codec import decode, encode
from backstay.codec.registry import register
from backstay.errors import EncodeError

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


class _Unknown(Enum):
    UNKNOWN = "UNKNOWN"


register(_Unknown, name="backstay.UNKNOWN")

UNKNOWN: Final = _Unknown.UNKNOWN
"""The change of a ``Whole`` if only its value is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """An update by the value itself. A subgraph makes one if its change does not lead to exactly its value.

    If no parallel branch writes the key, the key gets ``value``: a float is exactly the inner one, and a reducer of the
    caller's own does not apply twice. Otherwise ``change`` is folded; if it is UNKNOWN, the branches exclude each
    other. It is registered, because the update of a finished branch is stored.
    """

    value: Any
    change: Any = UNKNOWN


register(Whole, name="backstay.Whole")


class CannotReduce(Exception):
    """A reducer refuses an update. The engine adds the node and the key."""


class Clash(Exception):
    """Two parallel writers exclude each other."""

    def __init__(self, first: str, second: str, reason: str = "") -> None:
        super().__init__(reason)
        self.writers = (first, second)
        self.reason = reason


Writes = Sequence[tuple[str, Any]]
"""The writer and its update, in the order in which the branches were declared."""


class Reducer(Protocol):
    """How updates change one key. ``name`` is part of the graph's fingerprint."""

    name: str

    def fold(self, old: Any, new: Any) -> Any:
        """Return the value after an update; ``old`` may be MISSING. Raises CannotReduce."""

    def together(self, base: Any, writes: Writes) -> Writes:
        """Return the updates of parallel writers that are to be folded, in order. Raises Clash."""

    def update(self, before: Any, after: Any) -> Any:
        """Return the update that leads from one value to another, MISSING if they are the same, or UNKNOWN."""


class Replace:
    """The new value replaces the old one."""

    name = "replace"

    def fold(self, old: Any, new: Any) -> Any:
        """Return the new value."""
        return new

    def together(self, base: Any, writes: Writes) -> Writes:
        """Two different values clash. A writer that returned the old value wrote nothing."""
        changed = [(writer, value) for writer, value in writes if not same(value, base)]
        _check_agreement(changed)
        return changed

    def update(self, before: Any, after: Any) -> Any:
        """Return the value if it changed."""
        return MISSING if same(before, after) else after


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

    def together(self, base: Any, writes: Writes) -> Writes:
        """All are appended."""
        return _all_or_deleted(writes)

    def update(self, before: Any, after: Any) -> Any:
        """Return the appended items."""
        start = [] if before is MISSING else before
        if type(after) is not list or not _starts_with(after, start):
            return MISSING if same(before, after) else UNKNOWN
        return after[len(start) :] or (after if before is MISSING else MISSING)


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

    def together(self, base: Any, writes: Writes) -> Writes:
        """Writers may write different keys, or the same value. A key with its old value was not written."""
        _all_or_deleted(writes)
        known = base if isinstance(base, Mapping) else {}
        by_key: dict[Any, list[tuple[str, Any]]] = {}
        changed: list[tuple[str, Any]] = []
        for writer, update in writes:
            if isinstance(update, Mapping):
                update = {key: value for key, value in update.items() if not same(value, known.get(key, MISSING))}
                for key, value in update.items():
                    by_key.setdefault(key, []).append((writer, value))
            changed.append((writer, update))
        for entries in by_key.values():
            _check_agreement(entries)
        return changed

    def update(self, before: Any, after: Any) -> Any:
        """Return the changed and the deleted keys."""
        start = {} if before is MISSING else before
        if not isinstance(start, Mapping) or not isinstance(after, Mapping):
            return MISSING if same(before, after) else UNKNOWN
        changed = {key: value for key, value in after.items() if key not in start or not same(start[key], value)}
        changed |= {key: DELETE for key in start if key not in after}
        return changed or (MISSING if same(before, after) else {})


class Add:
    """Numbers (or other values with ``+``) are added."""

    name = "add"

    def fold(self, old: Any, new: Any) -> Any:
        """Return the sum."""
        return new if old is MISSING else old + new

    def together(self, base: Any, writes: Writes) -> Writes:
        """All are added."""
        return _all_or_deleted(writes)

    def update(self, before: Any, after: Any) -> Any:
        """Return the difference: ``after - before``, or the end of text, bytes, a list or a tuple that grew."""
        if before is MISSING or same(before, after):
            return after if before is MISSING else MISSING
        if isinstance(before, str | bytes | bytearray | list | tuple):
            if type(before) is not type(after) or not _starts_with(after, before):
                return UNKNOWN
            return after[len(before) :]
        try:
            return after - before
        except Exception:  # a type with + and without -
            return UNKNOWN


class CustomReducer:
    """A function ``(old, new) -> value``; ``old`` is None while the key is missing."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.name = f"custom {getattr(function, '__qualname__', type(function).__qualname__)}"

    def fold(self, old: Any, new: Any) -> Any:
        """Call the function."""
        return self.function(None if old is MISSING else old, new)

    def together(self, base: Any, writes: Writes) -> Writes:
        """All are reduced, in the order in which the branches were declared."""
        return _all_or_deleted(writes)

    def update(self, before: Any, after: Any) -> Any:
        """Return UNKNOWN if the value changed: only the function knows which update leads from one value to another."""
        if before is MISSING:
            return after
        return MISSING if same(before, after) else UNKNOWN

    def value_as_update(self, before: Any, after: Any) -> Any:
        """Return the value as an update if the function absorbs it in any order, as ``max`` does, or else UNKNOWN.

        The function gets copies, because it may change its arguments.
        """
        pairs = ((before, after), (after, before), (after, after))
        try:
            absorbs = all(same(self.function(*decode(encode(list(pair)))), after) for pair in pairs)
        except Exception:  # of the function, or a value that cannot be stored
            return UNKNOWN
        return after if absorbs else UNKNOWN


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


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same content: the same type, and the same encoded bytes.

    Values that cannot be stored are the same only if they are one object.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in _COMPARABLE:
        return bool(one == other)
    try:
        return encode(one) == encode(other)
    except EncodeError:
        return False


_COMPARABLE: Final = frozenset({str, bytes, int, bool})
"""Types for which ``==`` compares the content, and faster."""


def _starts_with(whole: Any, start: Any) -> bool:
    """Return whether a sequence starts with another. Items that are one object are not encoded."""
    if isinstance(whole, str | bytes | bytearray):
        return whole.startswith(start)
    if not isinstance(start, list | tuple) or len(whole) < len(start):
        return False
    return all(map(is_, start, whole)) or all(map(same, start, whole))


def _check_agreement(writes: Writes) -> None:
    """Raise Clash if two writers have different values. The cost is in proportion to the number of writes."""
    known: list[tuple[list[str], Any]] = []  # the first two writers of each value
    for writer, value in writes:
        agreeing = None
        for writers, other in known:
            if same(other, value):
                agreeing = writers
            elif different := [each for each in writers if each != writer]:
                raise Clash(different[0], writer)
        if agreeing is None:
            known.append(([writer], value))
        elif writer not in agreeing and len(agreeing) < 2:
            agreeing.append(writer)


def _all_or_deleted(writes: Writes) -> Writes:
    """Return all writes; raise Clash if one writer deletes the key and another one writes it."""
    deleting = [writer for writer, update in writes if update is DELETE]
    for writer, update in writes if deleting else ():
        if update is not DELETE and (other := next((each for each in deleting if each != writer), None)):
            names = [name for name, _ in writes]
            raise Clash(*sorted((writer, other), key=names.index))
    return writes
