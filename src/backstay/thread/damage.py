"""Lists and damage: an entry that cannot be read is told in its place, and never left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from backstay.errors import Corrupted
from backstay.model.damaged import Damaged, OnDamage
from backstay.thread.perform import Flow, ask

T = TypeVar("T")
R = TypeVar("R")


class Pages(Protocol):
    """A list that is read page by page; between pages nothing is held."""

    done: bool

    def next_page(self) -> Flow[Any]:
        """Return the next page, a list of entries and of ``Damaged``, and remember where it ended."""


def read_each(
    rows: Iterable[R], read: Callable[[R], T], place: Callable[[R], tuple[str, str | None, int]]
) -> list[T | Damaged]:
    """Read rows one by one; ``place`` gives thread, id and number of one that cannot be read."""
    found: list[T | Damaged] = []
    for row in rows:
        try:
            found.append(read(row))
        except Corrupted as error:
            thread, name, number = place(row)
            found.append(Damaged(thread_id=thread, id=name, seq=number, error=error))
    return found


def unread(namespace: str, thread: str | None) -> Flow[list[Damaged]]:
    """Return the parts of the store that cannot be read and may hold entries of a thread, or of any."""
    errors = yield from ask(lambda store: store.unread(namespace, thread))
    return [Damaged(thread_id=error.thread, id=None, seq=0, error=error) for error in errors]


def told(entries: Iterable[T | Damaged], on_damage: OnDamage) -> Iterator[Any]:
    """Give the entries; at a damaged one raise its error, unless marks are wanted."""
    for entry in entries:
        if isinstance(entry, Damaged) and on_damage == "raise":
            raise entry.error
        yield entry
