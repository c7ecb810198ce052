"""Storing a checkpoint: where it belongs, and what happens if somebody else was there first.

- Its parent is the head of a branch: it is the branch's next one.
- Its parent had been superseded when it was read (time travel, an update of an old checkpoint): it begins a branch.
- Its parent was a head when it was read and is none any more: two runs went on from one checkpoint. One has won; the
  other is told, or kept as a branch of its own.
- It is there already: an equal one changes nothing, another one replaces the head of a branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from backstay.errors import Conflict, Corrupted, IdTaken
from backstay.integrations.langgraph.description import PARENT, versions_in
from backstay.integrations.langgraph.desk import Desk, Desks
from backstay.integrations.langgraph.names import may_fork
from backstay.integrations.langgraph.prepared import Prepared
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.pieces.manifest import MARKS, RUN, root_digest
from backstay.pieces.tip import Change, Live, Tip
from backstay.store.base import Backend, Head, LaneKey, Query, Row
from backstay.thread.cursor import Context, Cursor, Seen
from backstay.thread.load import decode_live, fill, find_row, open_tip, winner_of
from backstay.thread.record import meta_of
from backstay.thread.save import Request, commit_on

OnConflict = Literal["raise", "branch"]


@dataclass(slots=True)
class Putter:
    """What all puts of a saver share."""

    context: Context
    desks: Desks
    on_conflict: OnConflict

    def put(self, store: Backend, prepared: Prepared, desk: Desk | None) -> None:
        """Store a checkpoint; ``desk`` is what is known of its parent, and is given back under the new head."""
        stored: Cursor | None
        try:
            if desk is not None and desk.cursor.seen is not None:
                stored = self._next(store, prepared, desk.cursor, desk.versions)
            elif desk is not None:
                stored = self._seen(store, prepared, desk.cursor)
            else:
                stored = self._place(store, prepared)
        except IdTaken:
            stored = self._again(store, prepared)
        if stored is not None:
            self.desks.keep(Desk(stored, prepared.versions, prepared.known, prepared.serde))

    # Where it belongs ---------------------------------------------------------------------------------------------

    def _place(self, store: Backend, prepared: Prepared) -> Cursor | None:
        """Store a checkpoint of whose parent nothing is known yet."""
        parent_name = prepared.parent_name
        ids = (prepared.name,) if parent_name is None else (prepared.name, parent_name)
        rows = store.find(Query(self.context.namespace, ids=ids, payload=True))
        found = {row.id: row for row in rows}
        if prepared.name in found:
            return self._again(store, prepared)
        if parent_name is None:
            return self._begin(store, prepared)
        parent = found.get(parent_name)
        if parent is None:
            return self._without_parent(store, prepared)
        if prepared.parent is not None and may_fork(prepared.parent):
            return self._fork(store, prepared, parent, "fork")
        head = store.head(parent.lane)
        if head is None or head.row is None or head.row.id != parent.id:
            return self._lost(store, prepared, parent.lane)
        return self._on_head(store, prepared, parent.lane, head)

    def _begin(self, store: Backend, prepared: Prepared) -> Cursor | None:
        """Store a checkpoint without a parent."""
        lane = self._lane(prepared, MAIN)
        head = store.head(lane)
        if head is None or head.row is None:
            cursor = Cursor(lane, Seen.of(head), Tip())
            return self._next(store, prepared, cursor, {})
        # The first checkpoint where there are others: another run began at the same time. Only a subgraph that lives no
        # longer than one task is run again from its beginning: that is decided by the graph around it.
        if prepared.begins and not prepared.place.is_of_one_task:
            return self._lost(store, prepared, lane)
        return self._root(store, prepared, "root")

    def _root(self, store: Backend, prepared: Prepared, why: str) -> Cursor:
        cursor = Cursor(self._lane(prepared, f"{why}-{prepared.checkpoint_id}"), Seen(), Tip())
        return self._commit(store, prepared, cursor, {}, None)

    def _without_parent(self, store: Backend, prepared: Prepared) -> Cursor | None:
        """Store a checkpoint whose parent is not there: fine where nothing is, such as after an import of a part."""
        place = prepared.place
        lanes = store.lanes(self.context.namespace, place.thread, place.scope)
        if lanes:
            return self._lost(store, prepared, lanes[-1].key)
        prepared.notes["metadata"] = {**prepared.notes["metadata"], PARENT: str(prepared.parent)}
        return self._begin(store, prepared)

    def _seen(self, store: Backend, prepared: Prepared, cursor: Cursor) -> Cursor | None:
        """Store a checkpoint whose parent was read, as the head of its branch: its bytes are at hand."""
        head = store.head(cursor.lane)
        if head is None or head.row is None or head.row.id != prepared.parent_name:
            return self._place(store, prepared)
        return self._on_head(store, prepared, cursor.lane, head, cursor.tip)

    def _on_head(
        self, store: Backend, prepared: Prepared, lane: LaneKey, head: Head, read: Tip | None = None
    ) -> Cursor:
        assert head.row is not None
        try:
            tip = open_tip(store, head.row, head.owned)
            if read is not None:
                _take_bytes(tip, read)
            versions = _versions(store, prepared, tip, head.row)
        except Corrupted:
            if (find_row(store, self.context.namespace, head.row.id)) is not None:
                raise
            return self._lost(store, prepared, lane)
        return self._next(store, prepared, Cursor(lane, Seen.of(head), tip), versions)

    def _next(self, store: Backend, prepared: Prepared, cursor: Cursor, versions: Mapping[str, Any]) -> Cursor:
        """Store the next checkpoint of a branch, unless somebody else has done so."""
        assert cursor.seen is not None
        try:
            return self._commit(store, prepared, cursor, versions, cursor.seen.head)
        except Conflict as lost:
            if isinstance(lost, IdTaken):
                raise
            return self._lost(store, prepared, cursor.lane, lost)

    def _lost(self, store: Backend, prepared: Prepared, lane: LaneKey, cause: Conflict | None = None) -> Cursor:
        """Tell that another run was first, or keep this one's checkpoint as a branch."""
        name = prepared.parent_name
        parent = None if name is None else (find_row(store, self.context.namespace, name))
        if self.on_conflict == "branch" and (parent is not None or name is None):
            if parent is not None:
                return self._fork(store, prepared, parent, "conflict")
            return self._root(store, prepared, "conflict")
        raise self._conflict(prepared, parent is not None, (winner_of(store, lane))) from cause

    def _conflict(self, prepared: Prepared, is_there: bool, winner: CheckpointMeta | None) -> Conflict:
        place = prepared.place
        where = f"thread {place.thread!r}" + (f", namespace {place.ns!r}" if place.ns else "")
        if prepared.parent is None:
            what = "another run has begun the thread"
        elif is_there:
            what = f"another run has gone on from checkpoint {prepared.parent}"
        else:
            what = f"checkpoint {prepared.parent}, which this one builds on, is not there"
        return Conflict(
            f"{where}: {what} since this run read it; checkpoint {prepared.checkpoint_id} was not stored",
            winner=winner,
            thread=place.thread,
            checkpoint=prepared.checkpoint_id,
            hint="Invoke the graph again on what the other run left, let only one run at a time work on a thread, or "
            'keep both with BackstaySaver(…, on_conflict="branch")',
        )

    # Storing it ---------------------------------------------------------------------------------------------------

    def _fork(self, store: Backend, prepared: Prepared, parent: Row, why: str) -> Cursor:
        cursor = Cursor(self._lane(prepared, f"{why}-{prepared.checkpoint_id}"), Seen(), None)
        tip = open_tip(store, parent, {})
        versions = _versions(store, prepared, tip, parent)
        cursor.tip = tip
        return self._commit(store, prepared, cursor, versions, parent, takes_over=True)

    def _commit(
        self,
        store: Backend,
        prepared: Prepared,
        cursor: Cursor,
        versions: Mapping[str, Any],
        parent: Row | None,
        takes_over: bool = False,
    ) -> Cursor:
        seen, tip = cursor.take()
        assert seen is not None
        assert tip is not None
        request = Request(prepared.notes, prepared.name)
        step = 0 if parent is None else parent.step + 1
        change = prepared.change(tip, versions)
        commit_on(store, self.context, cursor, seen, tip, change, request, parent, step, takes_over)
        return cursor

    # What is there already ----------------------------------------------------------------------------------------

    def _again(self, store: Backend, prepared: Prepared) -> Cursor | None:
        """Store a checkpoint whose id exists: nothing to do if it is equal, else the head is replaced by it."""
        row = find_row(store, self.context.namespace, prepared.name)
        if row is None:
            return self._place(store, prepared)  # it was deleted in this very moment
        head = store.head(row.lane)
        is_head = head is not None and head.row is not None and head.row.id == row.id
        tip = open_tip(store, row, head.owned if head is not None and is_head else {})
        fill(store, tip, list(tip.lives), row)
        root = root_digest(tip.entries())
        change = prepared.change(tip, None)
        if _is_same(prepared, row) and _root_after(tip, change) == root:
            return None
        if head is None or not is_head:
            raise IdTaken(
                f"checkpoint {prepared.checkpoint_id} exists with other content and has a successor",
                winner=meta_of(row),
                thread=prepared.place.thread,
                checkpoint=prepared.checkpoint_id,
                hint="Only the newest checkpoint of a branch can be put again; give a new one its own id",
            )
        return self._replace(store, prepared, head, row)

    def _replace(self, store: Backend, prepared: Prepared, head: Head, row: Row) -> Cursor:
        tip = open_tip(store, row, head.owned)
        fill(store, tip, list(tip.lives), row)
        seen = Seen.of(head)
        cursor = Cursor(row.lane, seen)
        parent = None
        if row.parent_id is not None:
            parent = find_row(store, self.context.namespace, row.parent_id)
        request = Request(prepared.notes, prepared.name, replaces_head=True)
        commit_on(store, self.context, cursor, seen, tip, prepared.change(tip, None), request, parent, row.step)
        return cursor

    def _lane(self, prepared: Prepared, branch: str) -> LaneKey:
        return LaneKey(self.context.namespace, prepared.place.thread, prepared.place.scope, branch[:255])


def _take_bytes(tip: Tip, read: Tip) -> None:
    """Give a tip the bytes that were read, and checked, before; only those that are the very same."""
    for key, live in tip.lives.items():
        known = read.lives.get(key)
        if live.parts is None and known is not None and known.hasher is not None and _is_same_value(live, known):
            live.parts, live.hasher = known.parts, known.hasher.copy()


def _is_same_value(one: Live, other: Live) -> bool:
    return (one.entry.kind, one.entry.digest) == (other.entry.kind, other.entry.digest)


def _versions(store: Backend, prepared: Prepared, tip: Tip, row: Row) -> dict[str, Any]:
    """Return the channel versions of a stored checkpoint, with all at hand that is needed to compare."""
    fill(store, tip, prepared.needed(tip), row)
    if RUN not in tip.lives or MARKS not in tip.lives:
        return {}  # somebody else saved it: nothing of it is known to be the same
    return versions_in(decode_live(tip.lives[RUN]), decode_live(tip.lives[MARKS]))


def _is_same(prepared: Prepared, row: Row) -> bool:
    """Tell whether a stored checkpoint has the description that is to be put."""
    meta = meta_of(row)
    trigger = prepared.notes.get("trigger", "manual")
    return (meta.metadata, meta.trigger) == (prepared.notes["metadata"], trigger)


def _root_after(tip: Tip, change: Change) -> bytes:
    """Return the root of a tip after a change; the tip is spoilt by it."""
    return tip.plan(change, count(1).__next__).root
