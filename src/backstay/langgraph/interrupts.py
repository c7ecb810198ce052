"""LangGraph's interrupts as interrupts of the store, so that one list shows what waits in all threads and subgraphs.

LangGraph reports an interrupt to a saver by a write (``__interrupt__``) of the task that asks, and by the same write of
every task around it, up to the outermost graph. All of them carry the interrupt's id, so it is recorded once, where it
is reported first: in the innermost graph. The record waits until its task has written a result or asks something else,
or until the checkpoint has a successor. Then it is decided, with the answer if the writes show it, and consumed. A
decision that was made in our store stays.

A saver calls ``wrote`` after it stored writes, ``stored`` after it stored a checkpoint, and ``read`` after it read the
newest checkpoint of a branch. A read can find all that they remember in the writes that it returns, so a run
without interrupts makes no extra queries. A process that dies after it stored a successor, and before it closed the
records of the parent, leaves them open; ``waiting`` compares them with the heads of their threads and closes them.

``interrupt_before`` and ``interrupt_after`` are not listed: LangGraph only stops then, and reports nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from langgraph.types import Command
from langgraph.types import Interrupt as Asked

from backstay.codec import encode
from backstay.errors import Conflict, Corrupted, IdTaken, InvalidInput, NotFound
from backstay.langgraph.names import GraphLocation
from backstay.model.decision import (
    PROMPT_LENGTH_MAX,
    QUESTION_BYTES_MAX,
    Decision,
    DecisionKind,
    Interrupt,
    InterruptKind,
)
from backstay.model.ids import ID_LENGTH_MAX
from backstay.operations import interrupts as operations
from backstay.operations.cursor import Cursor, Services
from backstay.operations.interrupts import RESERVED, InterruptRecord, record_of, reserved_id
from backstay.operations.listing import every_branch, unreadable
from backstay.operations.records import all_records, find_by_id
from backstay.store.base import Backend, BranchKey, Query

INTERRUPT, RESUME = "__interrupt__", "__resume__"
CONTROL = frozenset((INTERRUPT, RESUME, "__error__", "__error_source_node__"))
"""Channels that report the state of a task; a write to any other channel is a result."""

BY = "langgraph"
"""The name recorded for the decision and its use if it is only known that the answer came through LangGraph."""

CHECKPOINTS_MAX = 10_000
"""How many checkpoints with interrupts are remembered; older ones are found again when they are read."""

TEXT_LENGTH_MAX, ITEMS_MAX, DEPTH_MAX = 100_000, 10_000, 32
"""How much of a payload a record shows; LangGraph's own writes hold the whole payload."""

_SHOWN_BYTES_MAX = QUESTION_BYTES_MAX // 2
"""A record leaves out a payload or an answer that is larger than this."""

_REPR_LENGTH_MAX = 200
_WHAT = "langgraph"
_PREFIX = f"{RESERVED}{_WHAT}:"
_PULLED = "~__pregel_pull, "
_SUPERSEDED = "the thread continued without an answer that is known here"
_UNKNOWN = "answered through LangGraph, which did not report the answer"
_LARGE = "answered through LangGraph; the answer is too large for a list"
_ENCRYPTED = "answered through LangGraph; the answer is encrypted"

Writes = Sequence[tuple[str, Any]]
PendingWrites = Sequence[tuple[str, str, Any]]


class CheckpointRef(NamedTuple):
    """A checkpoint by LangGraph's names."""

    location: GraphLocation
    checkpoint_id: str

    @property
    def name(self) -> str:
        """Return our id of it."""
        return self.location.name(self.checkpoint_id)


# Interrupts of a task -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TaskInterrupt:
    """One interrupt of a task."""

    key: tuple[str, ...]  # identifies it in the whole store
    proof: bytes  # its payload, if that is the same before and after it was stored
    shown: Interrupt
    number: int = 0  # how many answers its task had when it asked
    finished: bool = False  # its task already has a result
    answer: Decision | None = None  # if it is known before the interrupt is closed
    recorded: str | None = None  # its id in the store, once it is stored

    def name(self, turn: int) -> str:
        """Return the id of its record; the same interrupt asked again after an answer is the next turn.

        Asked again with another payload, it is another interrupt.
        """
        return reserved_id(_WHAT, (*self.key, str(turn)), self.proof)


def interrupts_in(
    checkpoint: CheckpointRef,
    task_id: str,
    task_path: str,
    writes: Writes,
    *,
    encrypted: bool = False,
    outer: Mapping[str, str] | None = None,
) -> list[TaskInterrupt]:
    """Return the interrupts in the writes of a task. With an encrypting serializer they leave out the payload."""
    # The path of a task that an edge leads to names its node; other paths do not.
    node: str | None = task_path.removeprefix(_PULLED)
    if node == task_path or not node or len(node) > ID_LENGTH_MAX or "\0" in node:
        node = None
    location = checkpoint.location
    # Namespace and id of the checkpoint, after those of the graphs around it.
    outer = outer or {}
    around = [ns for ns in sorted(outer) if ns != location.ns and (not ns or location.ns.startswith(f"{ns}|"))]
    checkpoints = [[ns, str(outer[ns])] for ns in around] + [[location.ns, str(checkpoint.checkpoint_id)]]
    asked = [each for channel, value in writes if channel == INTERRUPT for each in _listed(value)]
    made = []
    for index, each in enumerate(each for each in asked if isinstance(each, Asked)):
        # LangGraph makes the id from the task that asks; an id of another form may be shared by several interrupts.
        own = isinstance(each.id, str) and len(each.id) == 32 and set(each.id) <= set("0123456789abcdef")
        place = (*location, str(checkpoint.checkpoint_id), task_id, str(index))
        payload: dict[str, Any] = {
            "interrupt_id": str(each.id),
            "checkpoint_ns": location.ns,
            "task_id": task_id,
            "checkpoints": checkpoints,
        }
        proof, prompt = b"", ""
        if encrypted:
            payload["encrypted"] = True
        else:
            plain = _Plain()
            value = plain.of(each.value)
            data = encode(value)
            proof = data if plain.exact else b""
            payload |= {"value": value} if len(data) <= _SHOWN_BYTES_MAX else {"left_out": len(data)}
            prompt = _text(each.value, PROMPT_LENGTH_MAX).replace("\0", "") if isinstance(each.value, str) else ""
        shown = Interrupt(id="-", kind=InterruptKind.USER_REQUEST, node=node, payload=payload, prompt=prompt)
        made.append(TaskInterrupt((location.thread, each.id) if own else place, proof, shown, len(_answers(writes))))
    return made


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _answers(writes: Writes) -> Sequence[Any]:
    """Return the answers that a task has got so far: its last write of them holds all."""
    return next((_listed(value) for channel, value in reversed(writes) if channel == RESUME), ())


class _Plain:
    """Turns a payload into plain values; ``exact`` if storing and reading it would give the same."""

    def __init__(self) -> None:
        self.exact = True

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a value as a record shows it."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return _text(value, TEXT_LENGTH_MAX)
        if isinstance(value, int) and int(value).bit_length() <= 64:
            return int(value)
        if isinstance(value, float):
            return float(value)
        if depth < DEPTH_MAX and isinstance(value, Mapping):
            items = list(value.items())[:ITEMS_MAX]
            return {_text(str(name), TEXT_LENGTH_MAX): self.of(each, depth + 1) for name, each in items}
        if depth < DEPTH_MAX and isinstance(value, list | tuple):
            return [self.of(each, depth + 1) for each in value[:ITEMS_MAX]]
        self.exact = False
        try:
            shown = repr(value)
        except Exception:  # a __repr__ of the user's: an interrupt must not fail because it cannot be shown
            shown = f"<{type(value).__name__}>"
        return _text(shown, _REPR_LENGTH_MAX)


def _text(value: str, length_max: int) -> str:
    text = str.__str__(value)
    text = text if len(text) <= length_max else text[: length_max - 1] + "…"
    return text.encode(errors="backslashreplace").decode()


# Answers ----------------------------------------------------------------------------------------------------------


def answer_in(writes: Writes, number: int, encrypted: bool) -> Decision:
    """Return the decision for one of the answers that a task has got through LangGraph, by its number."""
    answers, reason = _answers(writes), _ENCRYPTED if encrypted else _UNKNOWN
    if not encrypted and number < len(answers) and answers[number] is not None:
        shown = _Plain().of(answers[number])
        if len(encode(shown)) <= _SHOWN_BYTES_MAX:
            return Decision(kind=DecisionKind.ANSWER, value=shown)
        reason = _LARGE
    return Decision(kind=DecisionKind.APPROVE, reason=reason)


def superseded_decision(done: bool) -> Decision:
    """Return the decision for an interrupt whose checkpoint has a successor; ``done`` if its tasks have results."""
    if done:
        return Decision(kind=DecisionKind.APPROVE, reason=_UNKNOWN)
    return Decision(kind=DecisionKind.DEFER, reason=_SUPERSEDED)


def resume_of(*records: InterruptRecord, approved: Any = True, rejected: Any = False) -> Command[Any]:
    """Return the ``Command`` that resumes a graph with the decisions on these records.

    An answer or a modification resumes with its value, an approval with ``approved`` and a rejection with ``rejected``.
    """
    plain = {DecisionKind.APPROVE: approved, DecisionKind.REJECT: rejected}
    values: dict[str, Any] = {}
    for record in records:
        name, decision = interrupt_id_of(record), record.decision
        if decision is None or decision.kind not in (DecisionKind.ANSWER, DecisionKind.MODIFY, *plain):
            raise InvalidInput(
                f"{record.headline}: there is no decision to resume with",
                thread=record.thread_id,
                checkpoint=record.checkpoint_id,
                hint="Answer, approve or reject it first, and pass the record that thread.decide(…) returned",
            )
        values[name] = plain.get(decision.kind, decision.value)
    return Command(resume=values)


def interrupt_id_of(record: InterruptRecord) -> str:
    """Return LangGraph's own id of a recorded interrupt."""
    if not isinstance(record, InterruptRecord) or not record.id.startswith(_PREFIX):
        raise InvalidInput(
            "this is not an interrupt of LangGraph", hint="Pass a record that saver.interrupts() returned"
        )
    name: str = record.interrupt.payload["interrupt_id"]
    return name


# The saver's memory -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenInterrupts:
    """The open interrupts that a saver knows; the store has all of them too. Calls may run in parallel."""

    services: Services
    _open: dict[CheckpointRef, dict[str, list[TaskInterrupt]]] = field(default_factory=dict)  # by checkpoint and task
    _late: dict[GraphLocation, list[CheckpointRef]] = field(default_factory=dict)  # superseded; results may still come

    def wrote(
        self,
        store: Backend,
        location: GraphLocation,
        checkpoint_id: str,
        task_id: str,
        task_path: str,
        writes: Writes,
        *,
        encrypted: bool = False,
        outer: Mapping[str, str] | None = None,
    ) -> None:
        """Note writes that were just stored. ``outer`` is the config's ``checkpoint_map``.

        The checkpoint may not be stored yet; then ``stored`` records the interrupts. A resume value decides nothing by
        itself: LangGraph stores it in the background, possibly after the answered task has asked again.
        """
        asks = any(write[0] == INTERRUPT for write in writes)
        if not asks and not self._open:
            return
        checkpoint = CheckpointRef(location, checkpoint_id)
        if not asks:
            if any(write[0] not in CONTROL for write in writes):
                for each in self._open.get(checkpoint, {}).pop(task_id, ()):
                    self._close(store, each, answer_in(writes, each.number, encrypted))
            return
        asked = interrupts_in(checkpoint, task_id, task_path, writes, encrypted=encrypted, outer=outer)
        names = {each.name(0) for each in asked}
        for each in self._remember(checkpoint, task_id, asked):
            if each.name(0) not in names:  # the task asked it before and does not ask it now: it was answered
                self._close(store, each, answer_in(writes, each.number, encrypted))
        # If the task already has a result, LangGraph continues with that, even if a replay of the task asks again.
        query = Query(self.services.namespace, ids=(checkpoint.name,), writes=True)
        stored = [write for row in store.find(query) for write in row.writes]
        finished = any(write.task_id == task_id and write.channel not in CONTROL for write in stored)
        for each in asked:
            self._record(store, checkpoint, each, again=True)
            if finished:
                self._close(store, each, superseded_decision(True))

    def stored(
        self,
        store: Backend,
        location: GraphLocation,
        checkpoint_id: str,
        parent_id: str | None,
        source: str,
        *,
        at_exit: bool = False,
    ) -> None:
        """Note a checkpoint that was just stored: the interrupts of its parent no longer wait.

        ``source`` is that of its metadata. With durability "exit" (``at_exit``) LangGraph never reports the results of
        the parent's tasks; otherwise they may still come.
        """
        if not self._open:
            return
        if location in self._late:
            self._close_late(store, location)
        if parent_id is not None and parent_id != checkpoint_id:
            self._supersede(store, CheckpointRef(location, parent_id), source == "loop", at_exit)
        checkpoint = CheckpointRef(location, checkpoint_id)
        for asked in list(self._open.get(checkpoint, {}).values()):
            for each in asked:
                if each.recorded is None:
                    self._record(store, checkpoint, each, again=True)

    def _supersede(self, store: Backend, checkpoint: CheckpointRef, done: bool, at_exit: bool) -> None:
        """Close the interrupts of a checkpoint that has a successor, except those whose result may still come."""
        tasks = self._open.get(checkpoint, {})
        for task_id, asked in list(tasks.items()):
            if not done or at_exit or all(each.finished for each in asked):
                for each in tasks.pop(task_id, ()):
                    self._close(store, each, each.answer or superseded_decision(done))
        if tasks:
            self._late.setdefault(checkpoint.location, []).append(checkpoint)
        else:
            self._open.pop(checkpoint, None)

    def read(
        self,
        store: Backend,
        location: GraphLocation,
        checkpoint_id: str,
        pending_writes: PendingWrites | None,
        *,
        encrypted: bool = False,
        outer: Mapping[str, str] | None = None,
    ) -> None:
        """Note the interrupts of a branch's newest checkpoint, and record those that have no record yet."""
        if location in self._late:
            self._close_late(store, location)
        if not pending_writes or not any(channel == INTERRUPT for _, channel, _ in pending_writes):
            return
        by_task: dict[str, list[tuple[str, Any]]] = {}
        for task_id, channel, value in pending_writes:
            by_task.setdefault(task_id, []).append((channel, value))
        checkpoint = CheckpointRef(location, checkpoint_id)
        for task_id, writes in by_task.items():
            found = interrupts_in(checkpoint, task_id, "", writes, encrypted=encrypted, outer=outer)
            known = [each for each in self._open.get(checkpoint, {}).get(task_id, ()) if each.recorded is not None]
            if not found or [each.name(0) for each in known] == [each.name(0) for each in found]:
                continue
            self._remember(checkpoint, task_id, found)
            finished = any(channel not in CONTROL for channel, _ in writes)
            for each in found:
                if finished:  # already closed, unless its process died; looked up only when there is a successor
                    each.finished, each.recorded = True, each.name(0)
                    each.answer = answer_in(writes, max(each.number - 1, 0), encrypted)
                else:
                    self._record(store, checkpoint, each, again=False)

    def forget(self, thread: str) -> None:
        """Forget a thread that was deleted together with its records."""
        for checkpoint in [each for each in list(self._open) if each.location.thread == thread]:
            self._open.pop(checkpoint, None)
        for location in [each for each in list(self._late) if each.thread == thread]:
            self._late.pop(location, None)

    def waiting(self, store: Backend, thread: str | None = None) -> list[InterruptRecord]:
        """Return the interrupts that wait, oldest first; close those that a crash left open."""
        found: list[InterruptRecord] = []
        namespace = self.services.namespace
        for lost in unreadable(store, namespace, thread):
            raise lost.error
        for stored in all_records(store, "interrupt", namespace, thread, open_only=True):
            if stored.key.startswith(_PREFIX):
                record = record_of(stored)
                if self._waits(store, record):
                    found.append(record)
                else:
                    self._decide(store, record, superseded_decision(False))
        return found

    def _waits(self, store: Backend, record: InterruptRecord) -> bool:
        """Return whether its checkpoint, and every one around it, is the newest of its branch, or not stored yet."""
        namespace = self.services.namespace
        for ns, checkpoint_id in record.interrupt.payload["checkpoints"]:
            location = GraphLocation(record.thread_id, ns)
            name = location.name(checkpoint_id)
            branches = every_branch(store, namespace, location.thread, location.scope)
            is_head = name in [branch.head for branch in branches]
            if not is_head and store.find(Query(namespace, ids=(name,))):
                return False
        return True

    def _close_late(self, store: Backend, location: GraphLocation) -> None:
        """Close the interrupts that got no result: LangGraph has dropped their task."""
        for checkpoint in self._late.pop(location, []):
            for asked in self._open.pop(checkpoint, {}).values():
                for each in asked:
                    self._close(store, each, superseded_decision(True))

    def _remember(self, checkpoint: CheckpointRef, task_id: str, asked: list[TaskInterrupt]) -> list[TaskInterrupt]:
        """Note the interrupts of a task and return those noted before."""
        tasks = self._open.setdefault(checkpoint, {})
        before = tasks.get(task_id, [])
        tasks[task_id] = asked
        if len(self._open) > CHECKPOINTS_MAX:
            for oldest in list(self._open)[: CHECKPOINTS_MAX // 10]:
                self._open.pop(oldest, None)
        return before

    def _record(self, store: Backend, checkpoint: CheckpointRef, interrupt: TaskInterrupt, *, again: bool) -> None:
        """Record an interrupt unless it is recorded; with ``again`` also one that was answered before."""
        namespace, turn = self.services.namespace, 0
        while (stored := find_by_id(store, "interrupt", namespace, interrupt.name(turn))) is not None:
            interrupt.recorded = interrupt.name(turn)
            if stored.open:
                return
            turn += 1
        if turn and not again:
            return
        name = interrupt.name(turn)
        rows = store.find(Query(namespace, ids=(checkpoint.name,)))
        if not rows:
            return  # the checkpoint is not stored yet: ``stored`` records the interrupt
        shown = Interrupt.from_plain({**interrupt.shown.to_plain(), "id": name})
        try:
            operations.keep(store, self.services, Cursor(rows[0].branch), checkpoint.name, shown)
        except IdTaken:  # another task has just reported the same interrupt
            pass
        except NotFound:  # the checkpoint was deleted meanwhile
            return
        interrupt.recorded = name

    def _close(self, store: Backend, interrupt: TaskInterrupt, decision: Decision) -> None:
        """Decide and consume the record of an interrupt, if it is open."""
        if interrupt.recorded is None:
            return
        stored = find_by_id(store, "interrupt", self.services.namespace, interrupt.recorded)
        if stored is not None and stored.open:
            with contextlib.suppress(Corrupted):  # listing the interrupts or checking the store reports the damage
                self._decide(store, record_of(stored), decision)

    def _decide(self, store: Backend, record: InterruptRecord, decision: Decision) -> None:
        branch = BranchKey(self.services.namespace, record.thread_id, record.scope, record.branch)
        with contextlib.suppress(Conflict, NotFound):  # another process has closed it, or it was deleted
            if record.decision is None:
                try:
                    record = operations.decide(store, self.services, Cursor(branch), record, decision, BY)
                except Conflict as lost:
                    record = lost.winner
            operations.consume(store, self.services, Cursor(branch), record, BY)
