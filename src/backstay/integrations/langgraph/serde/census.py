"""Which types are in the lists and dicts of a value, counted at the speed of C.

The garbage collector can list what containers refer to; asked for one nesting level at a time, it spares a loop in
Python over every item. Only exact lists and dicts are gone into: whatever else there is, the encoder has handed over.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from typing import Any, Final

_CONTAINERS: Final = frozenset({list, dict})
_PLAIN: Final = frozenset({list, dict, str, int, float, bool, bytes, type(None)})
_EXACT_KEYS: Final = frozenset({str, int, float, bool, bytes, type(None)})


def holds(value: object, types: frozenset[type]) -> bool:
    """Tell whether one of these types is in a value, as an item or a key."""
    return any(not types.isdisjoint(kinds) for kinds, _ in _levels(value))


def holds_only(value: object, leaves: frozenset[type]) -> bool:
    """Tell whether there is nothing in a value but what msgpack has types for, these leaves, and Enums."""
    known = _PLAIN | leaves
    return all(kind in known or issubclass(kind, Enum) for kinds, _ in _levels(value) for kind in kinds)


def keys_are_exact(value: object) -> bool:
    """Tell whether every key of the dicts in a value comes back as it is."""
    for kinds, items in _levels(value):
        if dict in kinds:
            dicts: Any = items if kinds == {dict} else [item for item in items if type(item) is dict]
            if not _are_exact(chain.from_iterable(dicts)):
                return False
    return True


def _are_exact(keys: Any) -> bool:
    if _EXACT_KEYS.issuperset(map(type, found := list(keys))):
        return True
    return all(type(key) in _EXACT_KEYS or (type(key) is tuple and _are_exact(key)) for key in found)


def _levels(value: object) -> Iterator[tuple[set[type], list[Any]]]:
    """Yield the types, and the items, of each nesting level."""
    items: list[Any] = [value]
    while items:
        kinds = set(map(type, items))
        yield kinds, items
        if _CONTAINERS.isdisjoint(kinds):
            return
        # What is not plain would be gone into too: an object refers to its class, and that to everything.
        items = gc.get_referents(*items if kinds <= _PLAIN else [item for item in items if type(item) in _CONTAINERS])
