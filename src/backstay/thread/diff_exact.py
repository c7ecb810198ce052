"""When two values are the same to a diff, and how it copies one.

``==`` is too kind for the first: it takes 1 for True and 0.0 for -0.0, and two times in different zones for one. It is
also too strict: a NaN is never equal to itself. Where sameness cannot be values differ: a change reported that
is none costs a line, a change that is missed costs the state.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, time, timezone
from decimal import Decimal
from math import copysign
from typing import Any, Final

from backstay.codec.registry import BY_CLASS

NAN_ITEMS_MAX: Final = 64
"""Items of a set that hold a NaN and so cannot be looked up; with more of them, two sets count as different."""


def exact(old: Any, new: Any) -> bool:
    """Tell whether two values are the same in type and content; dicts with text keys whatever their order."""
    if old is new:
        return True
    kind = type(old)
    if kind is not type(new):
        return False
    if kind in _BY_EQUALITY:
        return bool(old == new)
    return _COMPARE.get(kind, _exact_object)(old, new)


def copied(value: Any) -> Any:
    """Return the value with every list, dict, tuple, set and bytearray of it made anew; other objects are shared."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple(map(copied, value))
    return kind(value) if kind in _MUTABLE else value


def _exact_items(old: Any, new: Any) -> bool:
    return len(old) == len(new) and all(map(exact, old, new))


def _exact_dict(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    if len(old) != len(new):
        return False
    for key, value in old.items():
        if type(key) is not str:
            # A lookup would take True for the key 1 and not find NaN, so these are compared in their order.
            return all(map(exact, old, new)) and all(map(exact, old.values(), new.values()))
        if key not in new or not exact(value, new[key]):
            return False
    return True


def _exact_set(old: Any, new: Any) -> bool:
    twins = {item: item for item in new}
    lost = [item for item in old if item not in twins]
    if len(old) != len(new) or len(lost) > NAN_ITEMS_MAX:
        return False
    if not all(exact(item, twins[item]) for item in old if item in twins):
        return False
    left = [item for item in new if item not in old]
    for item in lost:
        found = next((at for at, other in enumerate(left) if exact(item, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _exact_float(old: float, new: float) -> bool:
    if old == new:
        return copysign(1.0, old) == copysign(1.0, new)
    return old != old and new != new


def _exact_complex(old: complex, new: complex) -> bool:
    return _exact_float(old.real, new.real) and _exact_float(old.imag, new.imag)


def _exact_time(old: Any, new: Any) -> bool:
    clock = old.replace(tzinfo=None) == new.replace(tzinfo=None) and old.fold == new.fold
    return clock and exact(old.tzinfo, new.tzinfo)


def _exact_timezone(old: timezone, new: timezone) -> bool:
    return old == new and old.tzname(None) == new.tzname(None)


def _exact_object(old: Any, new: Any) -> bool:
    """Compare instances of one class by what would be stored of them, else by their own word."""
    cls = type(old)
    entry = BY_CLASS.get(cls)
    try:
        if entry is not None:
            return exact(entry.kind.plain(old), entry.kind.plain(new))
        if cls.__module__ == "numpy" and hasattr(old, "tobytes"):
            return bool(old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes())
        return bool(old == new)
    except RecursionError:
        raise
    except Exception:
        # The class's own code failed, or answered with an array; nothing is known, so it counts as changed.
        return False


_BY_EQUALITY: Final = frozenset({str, int, bool, bytes, type(None)})
_COMPARE: Final[dict[type, Callable[[Any, Any], bool]]] = {
    float: _exact_float,
    complex: _exact_complex,
    Decimal: lambda old, new: bool(old.as_tuple() == new.as_tuple()),
    list: _exact_items,
    tuple: _exact_items,
    dict: _exact_dict,
    set: _exact_set,
    frozenset: _exact_set,
    datetime: _exact_time,
    time: _exact_time,
    timezone: _exact_timezone,
}
_MUTABLE: Final = frozenset({set, bytearray})
