"""Lists: which checkpoints, newest first, page by page, metadata only.

A filter is a value, not text, and is compared here, with decoded values: so no key and no value can mean anything but
itself, on any store, and a row that cannot be read is told instead of not being found.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from backstay.codec import encode
from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.model.damaged import Damaged, OnDamage
from backstay.model.fields import STEP_MAX
from backstay.model.ids import check_id
from backstay.model.interrupt import InterruptKind
from backstay.store.base import PAGE_ROWS_MAX, Backend, LaneKey, Query
from backstay.thread.damage import listed, unread
from backstay.thread.record import entry_of

if TYPE_CHECKING:
    from backstay.thread.access import Access

PAGE_ROWS = 100
SHOWN_ROWS = 50
EVERY_BRANCH = "*"

T = TypeVar("T", bound=CheckpointMeta | Damaged)


@dataclass(frozen=True, slots=True)
class Filter:
    """What a listed checkpoint must have; None means anything."""

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
                    f"no kind of interrupt is called {self.interrupt!r:.40}", hint=f"Known: {known}"
                ) from None
        if self.where is None:
            object.__setattr__(self, "where", {})
        elif not isinstance(self.where, Mapping) or any(type(key) is not str for key in self.where):
            raise InvalidInput("where must be a mapping of metadata keys to values", hint='where={"user": "u1"}')

    def matches(self, meta: CheckpointMeta) -> bool:
        """Tell whether a checkpoint has it all."""
        if self.graph is not None and meta.graph != self.graph:
            return False
        if self.trigger is not None and meta.trigger != self.trigger:
            return False
        if not self._interrupt_matches(meta):
            return False
        for key, value in (self.where or {}).items():
            if key not in meta.metadata or encode(meta.metadata[key]) != encode(value):
                return False
        return True

    def _interrupt_matches(self, meta: CheckpointMeta) -> bool:
        if self.interrupt is None:
            return True
        if isinstance(self.interrupt, bool):
            return (meta.interrupt is not None) is self.interrupt
        return meta.interrupt is not None and meta.interrupt.kind == self.interrupt


@dataclass(slots=True)
class Listing:
    """A list that is read page by page; between pages nothing is held. What is damaged is not counted by ``left``."""

    query: Query
    wanted: Filter
    left: int | None  # how many are still wanted; None = all
    done: bool = False
    size: int = PAGE_ROWS  # of the next page, unless just so many are wanted: who reads on gets larger ones
    begun: bool = False

    def __post_init__(self) -> None:
        self.query = replace(self.query, tag=self.wanted.tag)
        self.done = self.left == 0

    def next_page(self, store: Backend) -> list[CheckpointMeta | Damaged]:
        """Return the next page, which may be empty if there is a filter, and remember where it ended."""
        found: list[CheckpointMeta | Damaged] = []
        if not self.begun:
            found += unread(store, self.query.namespace, self.query.thread)
            self.begun = True
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
    lane: LaneKey,
    limit: int | None,
    before: CheckpointMeta | int | None,
    branch: str | None,
    wanted: Filter | None = None,
) -> Listing:
    """Return the list of a thread's checkpoints: of one branch, or of all."""
    chosen = lane.branch if branch is None else None if branch == EVERY_BRANCH else check_id(branch, "branch")
    query = Query(lane.namespace, lane.thread, lane.scope, chosen, before=check_before(before))
    return Listing(query, wanted or Filter(), check_limit(limit))


def listing_of_threads(namespace: str, limit: int | None = None, wanted: Filter | None = None) -> Listing:
    """Return the list of threads, each shown by its newest checkpoint."""
    return Listing(Query(namespace, scope="", heads_of_threads=True), wanted or Filter(), check_limit(limit))


def check_limit(limit: int | None) -> int | None:
    """Return the limit if it is one."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidInput(f"limit must be a whole number from 0 on, or None for all, not {limit!r:.40}")
    return limit


def check_before(before: CheckpointMeta | int | None) -> int | None:
    """Return the sequence number before which a list begins."""
    if isinstance(before, CheckpointMeta):
        return before.seq
    if before is not None and type(before) is not int:
        raise InvalidInput("before must be a checkpoint or a sequence number")
    return before if before is None else max(0, min(before, STEP_MAX + 1))


class Wanted(TypedDict, total=False):
    """What may be asked of a list of checkpoints."""

    limit: int | None
    tag: str | None
    graph: str | None
    trigger: str | None
    interrupt: bool | InterruptKind | str | None
    where: Mapping[str, Any] | None


class WantedOfThread(Wanted, total=False):
    """What may be asked of the history of a thread."""

    before: CheckpointMeta | int | None
    branch: str | None


class History(Iterator[T]):
    """Checkpoints' metadata, read page by page while iterating; a notebook shows the first ones as a table."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin
        self._rest: Iterator[T] | None = None

    def __iter__(self) -> History[T]:
        return self

    def __next__(self) -> T:
        if self._rest is None:
            self._rest = self._begin()
        return next(self._rest)

    def _repr_html_(self) -> str:
        """Show the beginning of the list, wherever the iteration is."""
        head = "".join(f"<th>{name}</th>" for name in ("thread", "step", "created", "position", "tags", "id"))
        body = "".join(map(_table_row, islice(self._begin(), SHOWN_ROWS)))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def history_of(access: Access, listing: Listing, on_damage: OnDamage) -> History[Any]:
    """Return a list of checkpoints that can be read from its beginning more than once."""
    return History(lambda: listed(access, replace(listing), on_damage))


def _table_row(meta: CheckpointMeta | Damaged) -> str:
    if isinstance(meta, Damaged):
        return f"<tr><td>{html.escape(meta.thread_id or '')}</td><td colspan=5>{html.escape(str(meta.error))}</td></tr>"
    cells = (
        meta.thread_id if meta.branch == MAIN else f"{meta.thread_id} ({meta.branch})",
        meta.step,
        meta.created_at.isoformat(timespec="seconds"),
        f"{meta.last_node or '-'} → {meta.next_node or '-'}",
        ", ".join(meta.tags),
        meta.id,
    )
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"
