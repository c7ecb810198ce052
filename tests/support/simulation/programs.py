"""The words of random programs: states small and large, and what can be done to them.

Sizes are chosen around the borders of the storage layer (inline, whole, pieces, compressed windows).
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from backstay.operations.retention import Keep
from support.strategies import values

KEYS = ("messages", "text", "raw", "n")


def bulk(seed: int, size: int) -> str:
    """Return text that does not compress well and is the same for the same arguments."""
    return random.Random(seed).randbytes(size // 2).hex()


def item(number: int) -> Any:
    """Return one of a few items: small or large, and some that can be changed in place."""
    size = (30, 300, 700, 5000, 40000)[number // 10 % 5]
    if number % 3 == 0:
        return number
    return bulk(number, size) if number % 3 == 1 else {"n": number, "t": bulk(number, size)}


PICK = st.integers(0, 999)
ITEMS = st.lists(st.integers(0, 49).map(item), max_size=4)
SCALARS = st.integers(0, 49).map(item)
VALUES = st.one_of(SCALARS, ITEMS, ITEMS, SCALARS.map(str).map(str.encode), values())
EDIT = st.tuples(
    st.sampled_from(["grow", "grow", "grow", "swap", "swap", "set", "drop", "middle", "in place", "turn"]),
    st.sampled_from(KEYS),
    VALUES,
    ITEMS,
)
EDITS = st.lists(EDIT, max_size=3)
KEEPS = st.one_of(
    st.builds(Keep, last=st.integers(1, 4), tagged=st.booleans()),
    st.builds(Keep, every=st.integers(2, 4), days=st.one_of(st.none(), st.integers(0, 3)), tagged=st.booleans()),
    st.builds(Keep, milestones=st.integers(2, 5), last=st.one_of(st.none(), st.integers(1, 2))),
)


def edited(state: dict[str, Any], edits: list[tuple[str, str, Any, list[Any]]]) -> dict[str, Any]:
    """Return the state after some edits. Only "in place" changes an object that was there before."""
    state = dict(state)
    for kind, key, value, items in edits:
        old = state.get(key)
        if kind == "drop":
            state.pop(key, None)
        elif kind == "turn" and state:
            first = next(iter(state))
            state[first] = state.pop(first)
        elif kind == "grow" and type(old) in (list, str, bytes):
            state[key] = old + longer_by(old, items)
        elif kind == "swap" and type(old) is list:
            state[key] = [*old[:-1], value]
        elif kind == "middle" and isinstance(old, list | str | bytes):
            state[key] = old[: len(old) // 2] + longer_by(old, items) + old[len(old) // 2 + 1 :]
        elif kind == "in place" and type(old) is list and old and type(old[0]) is dict:
            old[0]["n"] = -1
        elif kind in ("set", "grow"):
            state[key] = value
    return state


def longer_by(old: Any, items: list[Any]) -> Any:
    """Return items in the form in which they can be added to a list, text or bytes."""
    if isinstance(old, list | tuple):
        return type(old)(items)
    text = "".join(map(str, items))
    return text if isinstance(old, str) else text.encode()
