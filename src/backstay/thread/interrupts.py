"""Interrupts that are kept: recorded, decided once, consumed once.

What a person decides about is bound to the record they were shown: its digest covers the thread, the checkpoint and
every byte of the question. A decision for anything else is refused. Both steps are compare-and-swap in the store, so
of two approvers, or two workers, one wins and the other sees who did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from backstay.codec import decode, encode
from backstay.errors import Conflict, DecodeError, IdTaken, InvalidInput, NotFound
from backstay.model.damaged import Damaged
from backstay.model.decision import Decision, DecisionKind
from backstay.model.ids import check_id
from backstay.model.interrupt import QUESTION_BYTES_MAX, Interrupt, InterruptKind
from backstay.store.base import Backend, LaneKey, Query
from backstay.store.records import Record, digest_of
from backstay.thread.cursor import Context, Cursor
from backstay.thread.hold import Hold
from backstay.thread.process import this_process
from backstay.thread.record import from_microseconds, to_microseconds, too_large
from backstay.thread.records import RecordPages, confirm, damaged, find_by_id, seal, unseal

RESERVED = "backstay:"
"""How the ids of interrupts begin that Backstay makes itself. Nobody else can record one of these."""

PAUSE = "pause"
_BYTES, _TEXT, _MOMENT = (bytes, type(None)), (str, type(None)), (int, type(None))
_TYPES = (bytes, int, _BYTES, _TEXT, _MOMENT, _TEXT, int, _MOMENT)


@dataclass(frozen=True, slots=True)
class InterruptRow:
    """An interrupt as it is stored, every byte checked. ``question`` and ``decision`` are encoded values."""

    stored: Record
    question: bytes
    created_us: int
    decision: bytes | None = None
    decided_by: str | None = None
    decided_us: int | None = None
    consumer: str | None = None
    consumer_epoch: int = 0
    consumed_us: int | None = None

    @property
    def digest(self) -> bytes:
        """Return what binds the question to its place: a decision is about exactly this."""
        place = (*self.stored.lane, str(self.stored.checkpoint), self.stored.key)
        return digest_of(*(part.encode() for part in place), self.question)

    def sealed(self) -> Record:
        """Return the record to be stored."""
        return seal(
            self.stored,
            self.consumer is None,
            [
                self.question,
                self.created_us,
                self.decision,
                self.decided_by,
                self.decided_us,
                self.consumer,
                self.consumer_epoch,
                self.consumed_us,
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class InterruptRecord:
    """A recorded interrupt: the question, where it was asked, and what became of it."""

    interrupt: Interrupt
    thread_id: str
    branch: str
    scope: str
    checkpoint_id: str
    digest: bytes  # covers all of the above
    created_at: datetime
    decision: Decision | None = None
    decided_by: str | None = None
    decided_at: datetime | None = None
    consumer: str | None = None
    consumed_at: datetime | None = None

    @property
    def id(self) -> str:
        """Return the interrupt's id."""
        return self.interrupt.id

    @property
    def pending(self) -> bool:
        """Tell whether it still holds up a run: no worker has taken a decision on it."""
        return self.consumed_at is None

    def __str__(self) -> str:
        # Never the payload: it may be huge, and it may be secret.
        if self.decision is None or self.decided_at is None:
            state = f"waits for a decision since {_moment(self.created_at)}"
        else:
            state = f"{self.decision.kind.value} by {self.decided_by!r} at {_moment(self.decided_at)}"
        return f"{self.interrupt.kind.value} {self.id} of thread {self.thread_id!r}: {state}"

    def __repr__(self) -> str:
        return f"<InterruptRecord {self}>"


# Recording --------------------------------------------------------------------------------------------------------


def record(
    store: Backend,
    context: Context,
    cursor: Cursor,
    checkpoint: str,
    kind: InterruptKind | str,
    node: str | None,
    payload: Any,
    prompt: str,
    name: str | None,
) -> InterruptRecord:
    """Record an interrupt of a checkpoint of this thread."""
    if isinstance(name, str) and name.startswith(RESERVED):
        raise InvalidInput(
            f"interrupt ids that begin with {RESERVED!r} are made by Backstay itself",
            thread=cursor.lane.thread,
            hint="Choose another id, or none",
        )
    question = Interrupt.from_plain(
        {
            "id": context.new_id() if name is None else name,
            "kind": kind,
            "node": node,
            "payload": payload,
            "prompt": prompt,
        }
    )
    body_of(question)  # refused before anything is read
    lane = _lane_of(store, cursor, checkpoint)
    return _record(store, context, lane, checkpoint, question)


def _record(store: Backend, context: Context, lane: LaneKey, checkpoint: str, question: Interrupt) -> InterruptRecord:
    stored = Record("interrupt", lane, question.id, b"", True, checkpoint)
    return _shown(add(store, InterruptRow(stored, body_of(question), to_microseconds(context.now()))))


def add(store: Backend, row: InterruptRow) -> InterruptRow:
    """Store an interrupt, or return the one that is stored if it asks the same there; else raise IdTaken."""
    stored = store.put_record(row.sealed())
    found = row_of(stored)
    if found.digest != row.digest:
        raise IdTaken(
            f"interrupt {row.stored.key} exists and is another one",
            thread=row.stored.lane.thread,
            checkpoint=row.stored.checkpoint,
            hint="Give each interrupt its own id",
        )
    return found


def _lane_of(store: Backend, cursor: Cursor, checkpoint: str) -> LaneKey:
    rows = store.find(Query(cursor.lane.namespace, ids=(checkpoint,)))
    if not rows or rows[0].lane[:3] != cursor.lane[:3]:
        raise NotFound(
            checkpoint,
            checkpoint=checkpoint,
            thread=cursor.lane.thread,
            hint="An interrupt belongs to a checkpoint of its own thread: save first",
        )
    return rows[0].lane


# Ids made by Backstay ---------------------------------------------------------------------------------------------


def reserved_id(what: str, place: Iterable[str], body: bytes = b"") -> str:
    """Return the id of an interrupt that is found again by its place, and by its bytes if they are given.

    ``what`` it is stands in the id, so that it can be told from others without being read.
    """
    return f"{RESERVED}{what}:{digest_of(*(part.encode() for part in place), body).hex()}"


def is_pause(name: str) -> bool:
    """Tell by the id whether an interrupt is somebody's request to pause a run."""
    return name.startswith(f"{RESERVED}{PAUSE}:")


def find(store: Backend, cursor: Cursor, asked: Interrupt) -> InterruptRecord | None:
    """Return the record of an interrupt whose id says all of it; None if it was not recorded."""
    stored = find_by_id(store, "interrupt", cursor.lane.namespace, asked.id)
    if stored is None:
        return None
    found = record_of(stored)
    if stored.lane != cursor.lane or body_of(found.interrupt) != body_of(asked):
        raise damaged(stored, "another question has its id")
    return found


def keep(store: Backend, context: Context, cursor: Cursor, checkpoint: str, asked: Interrupt) -> InterruptRecord:
    """Record an interrupt with an id of ours on a checkpoint of this branch; IdTaken if it is there, on another one."""
    lane = _lane_of(store, cursor, checkpoint)
    if lane != cursor.lane:
        raise NotFound(
            checkpoint, checkpoint=checkpoint, thread=lane.thread, hint=f"It is of branch {lane.branch!r}, not of this"
        )
    return _record(store, context, lane, checkpoint, asked)


# Lists ------------------------------------------------------------------------------------------------------------


def inbox_of(namespace: str, thread: str | None, pending: bool) -> RecordPages[InterruptRecord]:
    """Return interrupts in the order in which they were recorded; pending = not consumed yet."""
    if not isinstance(pending, bool):
        raise InvalidInput(f"pending must be True or False, not {type(pending).__name__}")
    return RecordPages("interrupt", namespace, thread, pending, record_of)


def pending_checkpoints(store: Backend, namespace: str, thread: str | None) -> tuple[set[str], list[Damaged]]:
    """Return the ids of the checkpoints that have an interrupt which is not consumed, and which cannot be read."""
    found: set[str] = set()
    damaged: list[Damaged] = []
    inbox = inbox_of(namespace, thread, True)
    while not inbox.done:
        for entry in inbox.next_page(store):
            if isinstance(entry, Damaged):
                damaged.append(entry)
            else:
                found.add(entry.checkpoint_id)
    return found, damaged


# Deciding ---------------------------------------------------------------------------------------------------------


def check_decision(
    decision: Decision | DecisionKind | str, scope: str | None, value: Any, reason: str, target: str | None
) -> Decision:
    """Return a decision given as itself or by its name and details."""
    if isinstance(decision, Decision):
        if scope is not None or value is not None or reason != "" or target is not None:
            raise InvalidInput("the details belong into the Decision", hint="Pass a Decision, or a name and details")
        return decision
    return Decision.from_plain({"kind": decision, "scope": scope, "value": value, "reason": reason, "target": target})


def decide(
    store: Backend, context: Context, cursor: Cursor, shown: InterruptRecord, decision: Decision, by: str
) -> InterruptRecord:
    """Record the decision on what the person was shown, once."""
    check_id(by, "by")
    body = _bounded(decision.to_plain(), "decision")
    row = _stored_as_shown(store, cursor, shown)
    _check_fits(shown, decision)
    row = put(store, row, lambda row: decided(row, body, by, to_microseconds(context.now())))
    _check_place(shown, row)
    answered = _shown(row)
    if (row.decision, row.decided_by) == (body, by):
        return answered
    raise Conflict(
        f"interrupt {shown.id} is decided already: {_decided(answered)}",
        winner=answered,
        thread=shown.thread_id,
        checkpoint=shown.checkpoint_id,
        hint="Nothing was changed; error.winner is the decision that counts",
    )


def _check_fits(shown: InterruptRecord, decision: Decision) -> None:
    """Refuse a decision that could never be carried out: it would count, and hold the run up for ever."""
    if decision.kind is DecisionKind.REROUTE and shown.interrupt.node is None:
        what = "this pause is not about a node, so there is nothing to reroute"
    elif decision.kind is DecisionKind.MODIFY and is_pause(shown.id):
        what = "a request to pause proposes nothing that could be modified"
    else:
        return
    raise InvalidInput(what, thread=shown.thread_id, checkpoint=shown.checkpoint_id, hint="Approve, reject or defer it")


def consume(store: Backend, context: Context, cursor: Cursor, shown: InterruptRecord, by: str | None) -> Decision:
    """Take the decision in order to carry it out, once."""
    row = _stored_as_shown(store, cursor, shown)
    hold = cursor.hold
    if hold is not None and (refusal := hold.refusal()) is not None:
        raise refusal
    # The epochs of different branches have nothing to do with each other.
    epoch = hold.epoch if hold is not None and hold.lane == row.stored.lane else 0
    name = _name(hold) if by is None else check_id(by, "by")
    row = put(store, row, lambda row: consumed(row, name, epoch, to_microseconds(context.now())))
    _check_place(shown, row)
    answered = _shown(row)
    if answered.decision is None:
        raise InvalidInput(
            f"interrupt {shown.id} is not decided yet",
            thread=shown.thread_id,
            checkpoint=shown.checkpoint_id,
            hint="Wait until thread.decide(…) was called",
        )
    if row.consumer != name:
        raise Conflict(
            f"the decision on interrupt {shown.id} was taken by {row.consumer!r}",
            winner=answered,
            thread=shown.thread_id,
            checkpoint=shown.checkpoint_id,
            hint="Another worker carries it out. If that one died, take the lease on the branch, then the decision",
        )
    return answered.decision


def _name(hold: Hold | None) -> str:
    """Return a name that no other worker has, now or later."""
    return str(this_process()) if hold is None else f"{hold.claim.owner} {hold.claim.token}"


def _decided(answered: InterruptRecord) -> str:
    assert answered.decision is not None
    assert answered.decided_at is not None
    return f"{answered.decision.kind.value!r} by {answered.decided_by!r} at {_moment(answered.decided_at)}"


def _stored_as_shown(store: Backend, cursor: Cursor, shown: InterruptRecord) -> InterruptRow:
    """Return the stored interrupt if it is the one that was shown, unchanged, and of this thread."""
    if not isinstance(shown, InterruptRecord) or not isinstance(shown.interrupt, Interrupt):
        raise InvalidInput(
            f"interrupt must be an InterruptRecord, not {type(shown).__name__}",
            hint="Pass what thread.interrupts() gave: it says what was seen, an id alone does not",
        )
    if shown.thread_id != cursor.lane.thread:
        raise _something_else(shown, f"it is of thread {shown.thread_id!r}, not {cursor.lane.thread!r}")
    stored = find_by_id(store, "interrupt", cursor.lane.namespace, check_id(shown.id, "interrupt id"))
    if stored is None:
        raise NotFound(
            f"interrupt {shown.id}",
            thread=shown.thread_id,
            checkpoint=shown.checkpoint_id,
            hint="It went with its checkpoint, or was never recorded",
        )
    row = row_of(stored)
    _check_place(shown, row)
    # Both encoded here and now: a class that was registered anew since is read, and so written, alike on both sides.
    if body_of(shown.interrupt) != body_of(_shown(row).interrupt):
        raise _something_else(shown, "what was shown is not what is stored")
    return row


def _check_place(shown: InterruptRecord, row: InterruptRow) -> None:
    parts = (
        ("thread", shown.thread_id, row.stored.lane.thread),
        ("scope", shown.scope, row.stored.lane.scope),
        ("branch", shown.branch, row.stored.lane.branch),
        ("checkpoint", shown.checkpoint_id, row.stored.checkpoint),
        ("digest", shown.digest, row.digest),
    )
    for name, mine, stored in parts:
        if mine != stored:
            raise _something_else(shown, f"the {name} is not that of the interrupt stored under this id")


def _something_else(shown: InterruptRecord, what: str) -> InvalidInput:
    return InvalidInput(
        f"a decision for something else: {what}",
        thread=shown.thread_id,
        checkpoint=shown.checkpoint_id,
        hint="Read the interrupt again with thread.interrupts(), look at it, and decide on that",
    )


# The rules ---------------------------------------------------------------------------------------------------------


def decided(row: InterruptRow, decision: bytes, by: str, at_us: int) -> InterruptRow:
    """Return the interrupt with a decision; the first one counts."""
    return replace(row, decision=decision, decided_by=by, decided_us=at_us) if row.decision is None else row


def consumed(row: InterruptRow, by: str, epoch: int, at_us: int) -> InterruptRow:
    """Return the interrupt with a consumer if it is decided and has none, or one with a lower epoch.

    A consumer with a lower epoch was fenced out, so another may take its work over.
    """
    if row.decision is None or (row.consumer is not None and row.consumer_epoch >= epoch):
        return row
    return replace(row, consumer=by, consumer_epoch=epoch, consumed_us=at_us)


def put(store: Backend, row: InterruptRow, rule: Callable[[InterruptRow], InterruptRow]) -> InterruptRow:
    """Store what a rule makes of an interrupt, and of what others made of it meanwhile; return what is stored then."""
    if rule(row) is row:
        row = row_of(confirm(store, row.stored))
    while (changed := rule(row)) is not row:
        row = row_of(store.put_record(changed.sealed()))
    return row


# Rows and records -------------------------------------------------------------------------------------------------


def row_of(stored: Record) -> InterruptRow:
    """Return what a stored interrupt says, every byte of it checked."""
    row = InterruptRow(stored, *unseal(stored, _TYPES))
    decided = {part is not None for part in (row.decision, row.decided_by, row.decided_us)}
    consumed = {part is not None for part in (row.consumer, row.consumed_us)}
    is_whole = consumed == {not stored.open} and decided in ({True}, consumed)
    longest = max(len(row.question), len(row.decision or b""))
    if stored.checkpoint is None or not is_whole or longest > QUESTION_BYTES_MAX:
        raise damaged(stored, "it is not of the known form")
    return row


def record_of(stored: Record) -> InterruptRecord:
    """Return a stored interrupt as users see it."""
    return _shown(row_of(stored))


def _shown(row: InterruptRow) -> InterruptRecord:
    try:
        return InterruptRecord(
            interrupt=Interrupt.from_plain(decode(row.question)),
            thread_id=row.stored.lane.thread,
            branch=row.stored.lane.branch,
            scope=row.stored.lane.scope,
            checkpoint_id=str(row.stored.checkpoint),
            digest=row.digest,
            created_at=from_microseconds(row.created_us),
            decision=None if row.decision is None else Decision.from_plain(decode(row.decision)),
            decided_by=row.decided_by,
            decided_at=None if row.decided_us is None else from_microseconds(row.decided_us),
            consumer=row.consumer,
            consumed_at=None if row.consumed_us is None else from_microseconds(row.consumed_us),
        )
    except (DecodeError, InvalidInput) as error:
        raise damaged(row.stored, f"the interrupt cannot be read: {error.what}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(row.stored, "the interrupt is not of the known form") from error


def body_of(question: Interrupt) -> bytes:
    """Return every byte of what is asked."""
    return _bounded(question.to_plain(), "interrupt")


def _bounded(plain: dict[str, Any], path: str) -> bytes:
    data = encode(plain, path)
    if len(data) > QUESTION_BYTES_MAX:
        raise too_large(f"the {path}", len(data), QUESTION_BYTES_MAX, path, plain)
    return data


def _moment(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")
