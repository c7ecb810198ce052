"""Lists, read page by page: which checkpoints match, and how a damaged entry is shown.

Filters compare decoded values, so no key or value has a special meaning in any store. A row that cannot be read is
reported in its place, never left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypedDict, TypeVar

from backstay.codec import encode
from backstay.errors import Corrupted, InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.model.decision import InterruptKind
from backstay.model.fields import STEP_MAX
from backstay.model.ids import check_id
from backstay.operations.cursor import Access
from backstay.operations.rows import Damaged, OnDamage, entry_of
from backstay.store.base import PAGE_ROWS_MAX, Backend, Branch, BranchKey, Query

T = TypeVar("T")
R = TypeVar("R")


class Pages(Protocol):
    """A list that is read page by page; no lock is held between pages."""

    done: bool

    def next_page(self, store: Backend) -> Any:
        """Return the next page, a list of entries and of ``Damaged``, and remember where it ended."""


def read_each(
    rows: Iterable[R], read: Callable[[R], T], place: Callable[[R], tuple[str, str | None, int]]
) -> list[T | Damaged]:
    """Read rows one by one; ``place`` returns the thread, id and number of a row that cannot be read."""
    found: list[T | Damaged] = []
    for row in rows:
        try:
            found.append(read(row))
        except Corrupted as error:
            thread, name, number = place(row)
            found.append(Damaged(thread_id=thread, id=name, seq=number, error=error))
    return found


def unreadable(store: Backend, namespace: str, thread: str | None) -> list[Damaged]:
    """Return the parts of the store that cannot be read and may hold entries of this thread, or of any thread."""
    errors = store.unread(namespace, thread)
    return [Damaged(thread_id=error.thread, id=None, seq=0, error=error) for error in errors]


def every_branch(store: Backend, namespace: str, thread: str | None, scope: str | None = None) -> Iterator[Branch]:
    """Iterate over the branches of a thread, or of all threads, oldest first, page by page."""
    after = 0
    while page := store.branches(namespace, thread, scope, after):
        yield from page
        after = page[-1].number


def raise_or_mark(entries: Iterable[T | Damaged], on_damage: OnDamage) -> Iterator[Any]:
    """Yield the entries; raise the error of a damaged one, unless ``on_damage`` is "mark"."""
    for entry in entries:
        if isinstance(entry, Damaged) and on_damage == "raise":
            raise entry.error
        yield entry


def read_pages(access: Access, pages: Pages, on_damage: OnDamage) -> Iterator[Any]:
    """Yield the entries of a list, read page by page."""
    while not pages.done:
        yield from raise_or_mark(pages.next_page(access.store), on_damage)


async def aread_pages(access: Access, pages: Pages, on_damage: OnDamage) -> AsyncIterator[Any]:
    """Yield the entries of a list; each page is read in a worker thread."""
    while not pages.done:
        for entry in raise_or_mark(await access.arun(lambda store: pages.next_page(store)), on_damage):
            yield entry


PAGE_ROWS = 100
SHOWN_ROWS = 50
EVERY_BRANCH = "*"

E = TypeVar("E", bound=CheckpointMeta | Damaged)


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions that listed checkpoints must match; None matches anything."""

    tag: str | None = None
    graph: str | None = None
    trigger: str | None = None
    interrupt: bool | InterruptKind | str | None = None
    where: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("tag", "graph", "trigger"):
            value = getattr(self, name)
            if value is not None:
                check_id(value, name)
        if isinstance(self.interrupt, str):
            try:
                object.__setattr__(self, "interrupt", InterruptKind(self.interrupt))
            except ValueError:
                known = ", ".join(kind.value for kind in InterruptKind)
                raise InvalidInput(
                    f"there is no interrupt kind {self.interrupt!r:.40}", hint=f"Use one of {known}"
                ) from None
        if self.where is None:
            object.__setattr__(self, "where", {})
        elif not isinstance(self.where, Mapping) or any(type(key) is not str for key in self.where):
            raise InvalidInput("where must be a mapping of metadata keys to values", hint='where={"user": "u1"}')

    def matches(self, meta: CheckpointMeta) -> bool:
        """Return whether a checkpoint matches."""
        if self.graph is not None and meta.graph != self.graph:
            return False
        if self.trigger is not None and meta.trigger != self.trigger:
            return False
        if isinstance(self.interrupt, bool):
            if (meta.interrupt is not None) is not self.interrupt:
                return False
        elif self.interrupt is not None and (meta.interrupt is None or meta.interrupt.kind != self.interrupt):
            return False
        for key, value in (self.where or {}).items():
            if key not in meta.metadata or encode(meta.metadata[key]) != encode(value):
                return False
        return True


@dataclass(slots=True)
class Listing:
    """A list of checkpoints, read page by page; no lock is held between pages. ``left`` does not count damaged ones."""

    query: Query
    wanted: Filter
    left: int | None  # how many more to return; None = all
    done: bool = False
    size: int = PAGE_ROWS  # of the next page; grows while the caller reads on
    started: bool = False

    def __post_init__(self) -> None:
        self.query = replace(self.query, tag=self.wanted.tag)
        self.done = self.left == 0

    def next_page(self, store: Backend) -> list[CheckpointMeta | Damaged]:
        """Return the next page, which may be empty if there is a filter, and remember where it ended."""
        found: list[CheckpointMeta | Damaged] = []
        if not self.started:
            found += unreadable(store, self.query.namespace, self.query.thread)
            self.started = True
        narrow = self.wanted != Filter(tag=self.wanted.tag)  # the tag is compared by the store
        query = replace(self.query, limit=self.size if narrow or self.left is None else min(self.left, PAGE_ROWS_MAX))
        rows = store.find(query)
        for entry in map(entry_of, rows):
            if isinstance(entry, Damaged):
                found.append(entry)
            elif not narrow or self.wanted.matches(entry):
                found.append(entry)
                self.left = None if self.left is None else self.left - 1
                if self.left == 0:
                    break
        self.done = len(rows) < query.limit or self.left == 0
        if rows:
            last = rows[-1]
            self.query = replace(query, before=last.thread_number if query.heads_of_threads else last.seq)
        self.size = min(self.size * 4, PAGE_ROWS_MAX)
        return found


def listing_of_thread(
    key: BranchKey,
    limit: int | None,
    before: CheckpointMeta | int | None,
    branch: str | None,
    wanted: Filter | None = None,
) -> Listing:
    """Return the list of a thread's checkpoints: of one branch, or of all."""
    chosen = key.name if branch is None else None if branch == EVERY_BRANCH else check_id(branch, "branch")
    query = Query(key.namespace, key.thread, key.scope, chosen, before=check_before(before))
    return Listing(query, wanted or Filter(), check_limit(limit))


def listing_of_threads(namespace: str, limit: int | None = None, wanted: Filter | None = None) -> Listing:
    """Return the list of threads, each shown by its newest checkpoint."""
    return Listing(Query(namespace, scope="", heads_of_threads=True), wanted or Filter(), check_limit(limit))


def check_limit(limit: int | None) -> int | None:
    """Return the limit, checked."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidInput(f"limit must be a whole number, 0 or more, or None for all, not {limit!r:.40}")
    return limit


def check_before(before: CheckpointMeta | int | None) -> int | None:
    """Return the sequence number before which a list starts."""
    if isinstance(before, CheckpointMeta):
        return before.seq
    if before is not None and type(before) is not int:
        raise InvalidInput("before must be a checkpoint or a sequence number")
    return before if before is None else max(0, min(before, STEP_MAX + 1))


class ListOptions(TypedDict, total=False):
    """The options of a list of checkpoints."""

    limit: int | None
    tag: str | None
    graph: str | None
    trigger: str | None
    interrupt: bool | InterruptKind | str | None
    where: Mapping[str, Any] | None


class HistoryOptions(ListOptions, total=False):
    """The options of a thread's history."""

    before: CheckpointMeta | int | None
    branch: str | None


class History(Iterator[E]):
    """An iterator over metadata of checkpoints, read page by page; a notebook shows the first ones as a table."""

    def __init__(self, start: Callable[[], Iterator[E]]) -> None:
        self._start = start
        self._rest: Iterator[E] | None = None

    def __iter__(self) -> History[E]:
        return self

    def __next__(self) -> E:
        if self._rest is None:
            self._rest = self._start()
        return next(self._rest)

    def _repr_html_(self) -> str:
        """Show the start of the list, even if the iteration has moved on."""
        head = "".join(f"<th>{name}</th>" for name in ("thread", "step", "created", "position", "tags", "id"))
        body = "".join(map(_table_row, islice(self._start(), SHOWN_ROWS)))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def history_of(access: Access, listing: Listing, on_damage: OnDamage) -> History[Any]:
    """Return a list of checkpoints that can be read from its start more than once."""
    return History(lambda: read_pages(access, replace(listing), on_damage))


def _table_row(meta: CheckpointMeta | Damaged) -> str:
    from html import escape

    if isinstance(meta, Damaged):
        return f"<tr><td>{escape(meta.thread_id or '')}</td><td colspan=5>{escape(str(meta.error))}</td></tr>"
    cells = (
        meta.thread_id if meta.branch == MAIN else f"{meta.thread_id} ({meta.branch})",
        meta.step,
        meta.created_at.isoformat(timespec="seconds"),
        f"{meta.last_node or '-'} → {meta.next_node or '-'}",
        ", ".join(meta.tags),
        meta.id,
    )
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"
