"""LangGraph's interrupts as rows of the store, so that one list shows what waits in all threads and subgraphs.

LangGraph tells a saver about a question by a write (``__interrupt__``) of the task that asks, and again by the same
write of every task around it, up to the outermost graph. All of them carry the question's id, so its row is named by
that and recorded once, where it was first told of: in the innermost graph. The row waits until its task has written a
result or asks something else, or until the checkpoint has a successor; then it is decided, with the answer if the
writes show it, and consumed. If it was decided in our store before, that decision stays.

A saver calls ``wrote`` after writes were stored, ``stored`` after a checkpoint was, and ``read`` after the newest
checkpoint of a branch was read. What these know is in memory, and is found again in the writes that a read returns: a
run without questions never asks the store anything here. A process that dies between storing a successor and closing
the rows it leaves behind leaves them open; ``waiting`` looks at where each thread really is, and closes such rows.

Not here: ``interrupt_before`` and ``interrupt_after``. LangGraph only stops then, and tells the saver nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.errors import Conflict, Corrupted, IdTaken, NotFound
from backstay.integrations.langgraph.names import Place
from backstay.integrations.langgraph.question import (
    CONTROL,
    INTERRUPT,
    Question,
    Spot,
    Writes,
    answer_in,
    gone_on,
    is_langgraph,
    questions,
)
from backstay.model.decision import Decision
from backstay.model.interrupt import Interrupt
from backstay.store.base import Backend, LaneKey, Query
from backstay.thread import interrupts
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import unread
from backstay.thread.interrupts import InterruptRecord, record_of
from backstay.thread.records import all_records, find_by_id

BY = "langgraph"
"""Who decided, if all that is known is that the answer came through LangGraph; and who consumes."""

SPOTS_MAX = 10_000
"""Checkpoints whose questions are remembered; older ones are found again when they are read."""

PendingWrites = Sequence[tuple[str, str, Any]]


@dataclass(slots=True)
class Inbox:
    """What a saver knows of questions that wait; all of it is in the store too. Calls may come side by side."""

    context: Context
    _open: dict[Spot, dict[str, list[Question]]] = field(default_factory=dict)  # by checkpoint and task
    _late: dict[Place, list[Spot]] = field(default_factory=dict)  # superseded, while a result may be on its way

    # What the saver tells -----------------------------------------------------------------------------------------

    def wrote(
        self,
        store: Backend,
        place: Place,
        checkpoint_id: str,
        task_id: str,
        task_path: str,
        writes: Sequence[tuple[str, Any]],
        *,
        encrypted: bool = False,
        outer: Mapping[str, str] | None = None,
    ) -> None:
        """Take note of writes that were just stored. ``outer`` is the config's ``checkpoint_map``.

        The checkpoint need not be stored yet; ``stored`` makes up for it. That a run is resumed decides nothing by
        itself: LangGraph stores it in the background, possibly after the answered task has asked its next question.
        """
        asks = any(write[0] == INTERRUPT for write in writes)
        if not asks and not self._open:
            return
        spot = Spot(place, checkpoint_id)
        tasks = self._open.get(spot)
        if not asks and tasks is None:
            return
        if asks:
            made = questions(spot, task_id, task_path, writes, encrypted=encrypted, outer=outer)
            self._asked(store, spot, task_id, made, writes, encrypted)
        elif tasks and any(write[0] not in CONTROL for write in writes):
            for each in tasks.pop(task_id, ()):
                self._close(store, each, answer_in(writes, each.number, encrypted))

    def stored(
        self,
        store: Backend,
        place: Place,
        checkpoint_id: str,
        parent_id: str | None,
        source: str,
        *,
        at_exit: bool = False,
    ) -> None:
        """Take note of a checkpoint that was just stored: what was asked on its parent no longer waits.

        ``source`` is that of its metadata. ``at_exit`` if the run's durability is "exit": then the results of the
        parent's tasks are never told, and else they may still be on their way.
        """
        if not self._open:
            return
        if place in self._late:
            self._close_late(store, place)
        if parent_id is not None and parent_id != checkpoint_id:
            self._superseded(store, Spot(place, parent_id), source == "loop", at_exit)
        spot = Spot(place, checkpoint_id)
        for asked in list(self._open.get(spot, {}).values()):
            for each in asked:
                if each.row is None:
                    self._record(store, spot, each, anew=True)

    def read(
        self,
        store: Backend,
        place: Place,
        checkpoint_id: str,
        pending_writes: PendingWrites | None,
        *,
        encrypted: bool = False,
        outer: Mapping[str, str] | None = None,
    ) -> None:
        """Take note of what waits on a branch's newest checkpoint; what has no row yet gets one."""
        if place in self._late:
            self._close_late(store, place)
        if not pending_writes or not any(channel == INTERRUPT for _, channel, _ in pending_writes):
            return
        by_task: dict[str, list[tuple[str, Any]]] = {}
        for task_id, channel, value in pending_writes:
            by_task.setdefault(task_id, []).append((channel, value))
        spot = Spot(place, checkpoint_id)
        for task_id, writes in by_task.items():
            found = questions(spot, task_id, "", writes, encrypted=encrypted, outer=outer)
            if found and not self._knows(spot, task_id, found):
                self._found(store, spot, task_id, found, writes, encrypted)

    def forget(self, thread: str) -> None:
        """Forget a thread that was deleted; its rows went with it."""
        for spot in [spot for spot in list(self._open) if spot.place.thread == thread]:
            self._open.pop(spot, None)
        for place in [place for place in list(self._late) if place.thread == thread]:
            self._late.pop(place, None)

    def waiting(self, store: Backend, thread: str | None = None) -> list[InterruptRecord]:
        """Return what waits, oldest first; rows that a crash left open though their thread went on are closed."""
        found: list[InterruptRecord] = []
        for lost in unread(store, self.context.namespace, thread):
            raise lost.error
        for stored in all_records(store, "interrupt", self.context.namespace, thread, open_only=True):
            if is_langgraph(stored.key):
                record = record_of(stored)
                if self._waits(store, record):
                    found.append(record)
                else:
                    self._closed(store, record, gone_on(False))
        return found

    # Questions and answers ----------------------------------------------------------------------------------------

    def _asked(
        self, store: Backend, spot: Spot, task_id: str, made: list[Question], writes: Writes, encrypted: bool
    ) -> None:
        """Record what a task asks; what it asked before, and does not ask now, was answered."""
        names = {each.name(0) for each in made}
        for each in self._remember(spot, task_id, made):
            if each.name(0) not in names:
                self._close(store, each, answer_in(writes, each.number, encrypted))
        finished = self._has_result(store, spot, task_id)
        for each in made:
            self._record(store, spot, each, anew=True)
            if finished:
                self._close(store, each, gone_on(True))

    def _has_result(self, store: Backend, spot: Spot, task_id: str) -> bool:
        """Tell whether a task has a result from before: LangGraph goes on with that, whatever a replay of it asks."""
        query = Query(self.context.namespace, ids=(spot.place.name(spot.checkpoint_id),), writes=True)
        rows = store.find(query)
        return any(write.task_id == task_id and write.channel not in CONTROL for row in rows for write in row.writes)

    def _superseded(self, store: Backend, spot: Spot, done: bool, at_exit: bool) -> None:
        """Close what was asked on a checkpoint that has a successor, except what a result is on its way for."""
        tasks = self._open.get(spot)
        if tasks is None:
            return
        for task_id, asked in list(tasks.items()):
            if done and not at_exit and not all(each.finished for each in asked):
                continue
            for each in tasks.pop(task_id, ()):
                self._close(store, each, each.answer or gone_on(done))
        if tasks:
            self._late.setdefault(spot.place, []).append(spot)
        else:
            self._open.pop(spot, None)

    def _close_late(self, store: Backend, place: Place) -> None:
        """Close what no result came for: its task was dropped."""
        for spot in self._late.pop(place, []):
            for asked in self._open.pop(spot, {}).values():
                for each in asked:
                    self._close(store, each, gone_on(True))

    def _knows(self, spot: Spot, task_id: str, found: list[Question]) -> bool:
        known = self._open.get(spot, {}).get(task_id, ())
        return [each.name(0) for each in known if each.row is not None] == [each.name(0) for each in found]

    def _found(
        self, store: Backend, spot: Spot, task_id: str, found: list[Question], writes: Writes, encrypted: bool
    ) -> None:
        """Take up questions that another process, or this one in another life, was told of."""
        finished = any(channel not in CONTROL for channel, _ in writes)
        self._remember(spot, task_id, found)
        for each in found:
            if finished:  # closed long ago, unless its process died; looked up only when there is a successor
                each.finished, each.row = True, each.name(0)
                each.answer = answer_in(writes, max(each.number - 1, 0), encrypted)
            else:
                self._record(store, spot, each, anew=False)

    def _remember(self, spot: Spot, task_id: str, asked: list[Question]) -> list[Question]:
        """Note what a task asks and return what it asked before."""
        tasks = self._open.setdefault(spot, {})
        before = tasks.get(task_id, [])
        tasks[task_id] = asked
        if len(self._open) > SPOTS_MAX:
            for oldest in list(self._open)[: SPOTS_MAX // 10]:
                self._open.pop(oldest, None)
        return before

    # Rows ---------------------------------------------------------------------------------------------------------

    def _record(self, store: Backend, spot: Spot, question: Question, *, anew: bool) -> None:
        """Record a question unless it is there; ``anew`` if it is asked just now, though it may have been answered."""
        namespace, turn = self.context.namespace, 0
        while True:
            name = question.name(turn)
            stored = find_by_id(store, "interrupt", namespace, name)
            if stored is None:
                if turn == 0 or anew:
                    self._keep(store, spot, question, name)
                return
            question.row = name
            if stored.open:
                return
            turn += 1

    def _keep(self, store: Backend, spot: Spot, question: Question, name: str) -> None:
        namespace, ours = self.context.namespace, spot.place.name(spot.checkpoint_id)
        rows = store.find(Query(namespace, ids=(ours,)))
        if not rows:
            return  # the checkpoint is not stored yet: ``stored`` comes back to it
        asked = Interrupt.from_plain({**question.asked.to_plain(), "id": name})
        try:
            interrupts.keep(store, self.context, Cursor(rows[0].lane), ours, asked)
        except IdTaken:  # by the same question, told of by another task at the same moment
            question.row = name
        except NotFound:  # deleted meanwhile
            return
        question.row = name

    def _close(self, store: Backend, question: Question, decision: Decision) -> None:
        """Decide and consume a question's row, unless that was done."""
        namespace, name = self.context.namespace, question.row
        if name is None:
            return
        stored = find_by_id(store, "interrupt", namespace, name)
        if stored is not None and stored.open:
            with contextlib.suppress(Corrupted):  # whoever lists interrupts, or verifies the store, sees it
                self._closed(store, record_of(stored), decision)

    def _closed(self, store: Backend, record: InterruptRecord, decision: Decision) -> None:
        with contextlib.suppress(Conflict, NotFound):  # somebody else has closed it, or it is gone
            if record.decision is None:
                try:
                    cursor = Cursor(self._lane(record))
                    record = interrupts.decide(store, self.context, cursor, record, decision, BY)
                except Conflict as lost:
                    record = lost.winner
            interrupts.consume(store, self.context, Cursor(self._lane(record)), record, BY)

    def _waits(self, store: Backend, record: InterruptRecord) -> bool:
        """Tell whether its checkpoint, and every one around it, is the newest of its branch, or not stored yet."""
        namespace = self.context.namespace
        for ns, checkpoint_id in record.interrupt.payload["checkpoints"]:
            place = Place(record.thread_id, ns)
            where, name = (namespace, place.thread, place.scope), place.name(checkpoint_id)
            lanes = store.lanes(*where)
            if name in [lane.head for lane in lanes]:
                continue
            query = Query(namespace, ids=(name,))
            if store.find(query):
                return False
        return True

    def _lane(self, record: InterruptRecord) -> LaneKey:
        return LaneKey(self.context.namespace, record.thread_id, record.scope, record.branch)
