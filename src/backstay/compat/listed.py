"""A list that also says what it could not show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something a list left out, or shows with a reservation.

    ``kind``: "damaged" (fails its checksum or cannot be parsed), "unreadable" (the system refuses), "foreign" (not one
    of ours, never touched), "unchecked" (has no checksum; shown), "leftover" (a temporary file of a writer that died).
    """

    kind: str
    where: str  # a checkpoint's id, or a file's name
    what: str


class Listed(list[T]):
    """A plain list, with the ``problems`` met while it was made. One damaged entry never hides another."""

    def __init__(self, items: Iterable[T] = (), problems: Iterable[Problem] = ()) -> None:
        super().__init__(items)
        self.problems: tuple[Problem, ...] = tuple(problems)
