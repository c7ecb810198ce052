"""How much work crash, race, damage and random tests do: BACKSTAY_EFFORT=20 does twenty times as much."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def effort() -> int:
    return max(1, int(os.environ.get("BACKSTAY_EFFORT", "1")))


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return all items, or so many of them, evenly spread and with both ends."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / max(1, most - 1))] for index in range(most)]
