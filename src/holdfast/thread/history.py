"""Lists: which checkpoints, newest first, page by page, metadata only.

A filter is a value, not text: the store narrows the rows down by looking for encoded bytes in their notes, and the
exact comparison happens here, on decoded values. So no key and no value can mean anything but itself, on any store.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from holdfast.codec import encode
from holdfast.errors import DecodeError, InvalidInput
from holdfast.model.checkpoint import MAIN, CheckpointMeta
from holdfast.model.fields import STEP_MAX
from holdfast.model.ids import check_id
from holdfast.model.interrupt import InterruptKind
from holdfast.store.base import PAGE_ROWS_MAX, Query
from holdfast.thread.perform import Flow, ask
from holdfast.thread.record import field_needle, meta_of, needle

PAGE_ROWS = 100
SHOWN_ROWS = 50
EVERY_BRANCH = "*"


@dataclass(frozen=True, slots=True)
class Filter:
    """What a listed checkpoint must have; None means anything."""

    tag: str | None = None
    graph: str | None = None
    trigger: str | None = None
    interrupt: bool | InterruptKind | str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)

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
        if not isinstance(self.where, Mapping) or any(type(key) is not str for key in self.where):
            raise InvalidInput("where must be a mapping of metadata keys to values", hint='where={"user": "u1"}')

    def needles(self) -> tuple[bytes, ...]:
        """Return byte strings that the notes of every match contain."""
        found = [needle(key, value) for key, value in self.where.items()]
        if self.graph is not None:
            found.append(field_needle("graph", self.graph))
        if self.trigger is not None and self.trigger != "manual":  # the default is not written down
            found.append(field_needle("trigger", self.trigger))
        if self.interrupt:
            found.append(encode("interrupt"))
        return tuple(found)

    def matches(self, meta: CheckpointMeta) -> bool:
        """Tell whether a checkpoint has it all."""
        if self.graph is not None and meta.graph != self.graph:
            return False
        if self.trigger is not None and meta.trigger != self.trigger:
            return False
        if not self._interrupt_matches(meta):
            return False
        for key, value in self.where.items():
            if key not in meta.metadata or encode(meta.metadata[key]) != encode(value):
                return False
        return True

    def _interrupt_matches(self, meta: CheckpointMeta) -> bool:
        if self.interrupt is None:
            return True
        if isinstance(self.interrupt, bool):
            return (meta.interrupt is not None) is self.interrupt
        return meta.interrupt is not None and meta.interrupt.kind == self.interrupt


@dataclass(frozen=True, slots=True)
class Page:
    """Some checkpoints of a list and where to go on (None at the end). Damaged rows are named, not hidden."""

    items: tuple[CheckpointMeta, ...]
    cursor: int | None
    damaged: tuple[str, ...] = ()


def page(query: Query, wanted: Filter, limit: int) -> Flow[Page]:
    """Return the next ``limit`` matches."""
    query = replace(query, tag=wanted.tag, needles=wanted.needles())
    narrow = wanted != Filter(tag=wanted.tag)  # the tag is compared by the store
    items: list[CheckpointMeta] = []
    damaged: list[str] = []
    while len(items) < limit:
        size = min(limit - len(items), PAGE_ROWS_MAX)
        asked = replace(query, limit=size)
        rows = yield from ask(_finding(asked))
        for row in rows:
            try:
                meta = meta_of(row)
            except DecodeError:
                damaged.append(row.id)
                continue
            if not narrow or wanted.matches(meta):
                items.append(meta)
        if len(rows) < size:
            return Page(tuple(items), None, tuple(damaged))
        last = rows[-1]
        query = replace(query, before=last.thread_number if query.heads_of_threads else last.seq)
    return Page(tuple(items), query.before, tuple(damaged))


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


class History(Iterator[CheckpointMeta]):
    """Checkpoints' metadata, read page by page while iterating; a notebook shows the first ones as a table."""

    def __init__(self, begin: Callable[[], Iterator[CheckpointMeta]]) -> None:
        self._begin = begin
        self._rest: Iterator[CheckpointMeta] | None = None

    def __iter__(self) -> History:
        return self

    def __next__(self) -> CheckpointMeta:
        if self._rest is None:
            self._rest = self._begin()
        return next(self._rest)

    def _repr_html_(self) -> str:
        """Show the beginning of the list, wherever the iteration is."""
        head = "".join(f"<th>{name}</th>" for name in ("thread", "step", "created", "position", "tags", "id"))
        body = "".join(map(_table_row, islice(self._begin(), SHOWN_ROWS)))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table_row(meta: CheckpointMeta) -> str:
    cells = (
        meta.thread_id if meta.branch == MAIN else f"{meta.thread_id} ({meta.branch})",
        meta.step,
        meta.created_at.isoformat(timespec="seconds"),
        f"{meta.last_node or '-'} → {meta.next_node or '-'}",
        ", ".join(meta.tags),
        meta.id,
    )
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _finding(query: Query) -> Callable[[Any], Any]:
    return lambda store: store.find(query)
