"""Lists and damage: an entry that cannot be read is told in its place, and never left out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from backstay.errors import Corrupted
from backstay.model.damaged import Damaged, OnDamage
from backstay.store.base import Backend

if TYPE_CHECKING:
    from backstay.thread.access import Access

T = TypeVar("T")
R = TypeVar("R")


class Pages(Protocol):
    """A list that is read page by page; between pages nothing is held."""

    done: bool

    def next_page(self, store: Backend) -> Any:
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


def unread(store: Backend, namespace: str, thread: str | None) -> list[Damaged]:
    """Return the parts of the store that cannot be read and may hold entries of a thread, or of any."""
    errors = store.unread(namespace, thread)
    return [Damaged(thread_id=error.thread, id=None, seq=0, error=error) for error in errors]


def told(entries: Iterable[T | Damaged], on_damage: OnDamage) -> Iterator[Any]:
    """Give the entries; at a damaged one raise its error, unless marks are wanted."""
    for entry in entries:
        if isinstance(entry, Damaged) and on_damage == "raise":
            raise entry.error
        yield entry


def listed(access: Access, pages: Pages, on_damage: OnDamage) -> Iterator[Any]:
    """Give a list's entries, read page by page."""
    while not pages.done:
        yield from told(pages.next_page(access.store), on_damage)


async def alisted(access: Access, pages: Pages, on_damage: OnDamage) -> AsyncIterator[Any]:
    """Give a list's entries, each page read in a worker thread."""
    while not pages.done:
        for entry in told(await access.arun(lambda store: pages.next_page(store)), on_damage):
            yield entry
