"""A state and what stands beside it, as one mapping: Backstay keeps messages and tool results as keys of the state.

The keys stay as they are, so that both sides read the same names. A key of the state that would take the place of what
stands beside it is renamed; the record then says so, and the way back undoes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

PREFIX = "state."


def fold(state: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return both as one mapping, and whether keys of the state had to be renamed."""
    clashing = {key for key in state if key in beside}
    if not clashing:
        return {**beside, **state}, False
    # Once one is renamed, those that look renamed must be too, or the way back could not tell them apart.
    renamed = {PREFIX + key if key in clashing or key.startswith(PREFIX) else key: state[key] for key in state}
    return {**beside, **renamed}, True


def unfold(whole: Mapping[str, Any], names: Collection[str], renamed: bool) -> dict[str, Any]:
    """Return the state alone: everything but what stands beside it under these names."""
    state = {key: value for key, value in whole.items() if key not in names}
    return {key.removeprefix(PREFIX): value for key, value in state.items()} if renamed else state
