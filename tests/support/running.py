"""The conditions of a test run: how much work it does, what this machine can test, and where figures are shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

T = TypeVar("T")

RAM_FOLDER = Path("/dev/shm")
"""A folder in memory. Tests that kill nothing but processes lose nothing by it and are faster."""

Show = Callable[[str, object], None]
"""The fixture ``show``: prints a figure past pytest's capture and keeps it in the report."""


def effort() -> int:
    """Return how many times the usual work crash, race, damage and random tests do: BACKSTAY_EFFORT, 1 by default."""
    return max(1, int(os.environ.get("BACKSTAY_EFFORT", "1")))


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return all items, or so many of them, evenly spread and with both ends."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / max(1, most - 1))] for index in range(most)]


def skip_unless_ci(what: str) -> NoReturn:
    """Skip a test that this machine cannot run. With CI=true, where everything must be tested, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)
