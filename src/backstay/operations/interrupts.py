"""Stored interrupts: recorded, decided once, consumed once.

A decision is bound to the record that the person saw: its digest covers the thread, the checkpoint and every byte of
the question. A decision about anything else is refused. Deciding and consuming are compare-and-swap operations in the
store, so one of two approvers, or of two workers, wins, and the other one sees who did.

An interrupt of a run is closed when the run can no longer use it: it is over, or does not ask it any more. A closed
interrupt can be neither decided nor consumed. If a process dies between the end of its run and closing its interrupts,
they are recognized by the newest checkpoint of their branch, and closed when the next run starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from backstay.codec import decode, encode
from backstay.errors import Conflict, Corrupted, DecodeError, IdTaken, InvalidInput, NotFound
from backstay.model.decision import QUESTION_BYTES_MAX, Decision, DecisionKind, Interrupt, InterruptKind
from backstay.model.ids import check_id
from backstay.operations import run_records
from backstay.operations.answers import misfit_of, type_name
from backstay.operations.cursor import Cursor, Services
from backstay.operations.leases import this_process
from backstay.operations.records import RecordPages, confirm, damaged, find_by_id, seal, unseal
from backstay.operations.rows import Damaged, from_microseconds, to_microseconds, too_large
from backstay.operations.runs import has_ended
from backstay.store.base import Backend, BranchKey, Query
from backstay.store.leases import Holder
from backstay.store.records import Record, digest_of

RESERVED = "backstay:"
"""Ids of interrupts that Backstay makes itself start with this. Callers cannot record such ids."""

PAUSE, QUESTION, SLEEP = "pause", "question", "sleep"
CLOSED = f"{RESERVED}closed"
"""The consumer of an interrupt that no run can use any more."""

_BYTES, _TEXT, _MOMENT = (bytes, type(None)), (str, type(None)), (int, type(None))
_TYPES = (bytes, int, _BYTES, _TEXT, _MOMENT, _TEXT, int, _MOMENT, _MOMENT, _BYTES)

SHOWN_LENGTH_MAX = 200
"""Characters of the prompt, and of the payload, in the text of a record."""

BY_TIMEOUT = "timeout"
"""The name under which a question is decided if no one decided in time."""


@dataclass(frozen=True, slots=True)
class InterruptRow:
    """A stored interrupt, every byte checked. ``question`` and ``decision`` are encoded values."""

    stored: Record
    question: bytes
    created_us: int
    decision: bytes | None = None
    decided_by: str | None = None
    decided_us: int | None = None
    consumer: str | None = None
    consumer_epoch: int = 0
    consumed_us: int | None = None
    deadline_us: int | None = None
    late: bytes | None = None  # the decision that is made at the deadline

    @property
    def digest(self) -> bytes:
        """Return the digest of the question and its place: a decision is about exactly this."""
        place = (*self.stored.branch, str(self.stored.checkpoint), self.stored.key)
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
                self.deadline_us,
                self.late,
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class InterruptRecord:
    """A recorded interrupt: the question, where it was asked, and its decision."""

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
    deadline: datetime | None = None  # from then on only the timeout decides

    @property
    def id(self) -> str:
        """Return the interrupt's id."""
        return self.interrupt.id

    @property
    def pending(self) -> bool:
        """Return whether it still blocks a run: no worker has taken its decision."""
        return self.consumed_at is None

    @property
    def closed(self) -> bool:
        """Return whether its run ended, or stopped asking, before a worker took a decision."""
        return self.consumer == CLOSED

    @property
    def choices(self) -> tuple[DecisionKind, ...]:
        """Return the kinds of decisions that fit, for example for the buttons of an inbox.

        A question takes an answer; an approval can be approved or modified. Both can be rejected and deferred, and
        rerouted if they are about a node. Interrupts that your program or LangGraph recorded may be either.
        """
        kinds = DecisionKind
        if is_pause(self.id):
            return kinds.APPROVE, kinds.REJECT, kinds.DEFER
        asked = self.interrupt
        found = [kinds.APPROVE, kinds.MODIFY] if asked.answer is None else [kinds.ANSWER]
        if asked.answer is None and asked.kind is InterruptKind.USER_REQUEST and not is_of_run(self.id):
            found.append(kinds.ANSWER)
        return *found, kinds.REJECT, kinds.DEFER, *([] if asked.node is None else [kinds.REROUTE])

    @property
    def headline(self) -> str:
        """Return one line without prompt and payload, which may be secret: for errors and logs."""
        if self.decision is not None and self.decided_at is not None:
            state = f"{self.decision.kind.value} by {self.decided_by!r} at {_moment(self.decided_at)}"
        elif self.consumed_at is not None:
            state = f"closed without a decision at {_moment(self.consumed_at)}"
        else:
            due = "" if self.deadline is None else f", due by {_moment(self.deadline)}"
            state = f"waiting for a decision since {_moment(self.created_at)}{due}"
        return f"{self.interrupt.kind.value} {self.id} of thread {self.thread_id!r}: {state}"

    def __str__(self) -> str:
        asked = self.interrupt
        prompt = f"; prompt: {_shortened(asked.prompt)}" if asked.prompt else ""
        payload = "" if asked.payload is None else f"; payload: {_shortened(repr(asked.payload))}"
        answer = "" if asked.answer is None else f"; wants: {type_name(asked.answer)}"
        return f"{self.headline}{prompt}{payload}{answer}"

    def __repr__(self) -> str:
        return f"<InterruptRecord {self}>"


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH_MAX else f"{text[:SHOWN_LENGTH_MAX]}…"


# Recording --------------------------------------------------------------------------------------------------------


def record(
    store: Backend,
    services: Services,
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
            f"interrupt ids that start with {RESERVED!r} are reserved for Backstay",
            thread=cursor.branch.thread,
            hint="Choose another id, or leave it out",
        )
    question = Interrupt.from_plain(
        {
            "id": services.new_id() if name is None else name,
            "kind": kind,
            "node": node,
            "payload": payload,
            "prompt": prompt,
        }
    )
    # Encode it now, so that a question that cannot be stored is refused before anything is read.
    body_of(question)
    branch = _branch_of(store, cursor, checkpoint)
    return _record(store, services, branch, checkpoint, question)


def _record(
    store: Backend,
    services: Services,
    branch: BranchKey,
    checkpoint: str,
    question: Interrupt,
    timeout: tuple[float, Decision] | None = None,
) -> InterruptRecord:
    """Record a question; ``timeout`` is how many seconds it may take to decide it, and the decision after that."""
    stored = Record("interrupt", branch, question.id, b"", True, checkpoint)
    row = InterruptRow(stored, body_of(question), to_microseconds(services.now()))
    if timeout is not None:
        seconds, late = timeout
        row = replace(
            row, deadline_us=row.created_us + round(seconds * 1e6), late=_bounded(late.to_plain(), "decision")
        )
    return _shown(add(store, row))


def add(store: Backend, row: InterruptRow) -> InterruptRow:
    """Store an interrupt, or return the stored one if it asks the same at the same place; else raise IdTaken."""
    stored = store.put_record(row.sealed())
    found = row_of(stored)
    if found.digest != row.digest:
        raise IdTaken(
            f"interrupt {row.stored.key} exists with another question",
            thread=row.stored.branch.thread,
            checkpoint=row.stored.checkpoint,
            hint="Give each interrupt its own id",
        )
    return found


def _branch_of(store: Backend, cursor: Cursor, checkpoint: str) -> BranchKey:
    rows = store.find(Query(cursor.branch.namespace, ids=(checkpoint,), surely=True))
    if not rows or rows[0].branch[:3] != cursor.branch[:3]:
        raise NotFound(
            f"checkpoint {checkpoint} does not exist in this thread",
            checkpoint=checkpoint,
            thread=cursor.branch.thread,
            hint="An interrupt belongs to a checkpoint of its own thread: save first",
        )
    return rows[0].branch


# Ids made by Backstay ---------------------------------------------------------------------------------------------


def reserved_id(what: str, place: Iterable[str], body: bytes = b"") -> str:
    """Return the id of an interrupt, made from its place and, if given, its bytes, so that it can be found again.

    The id contains the kind of the interrupt (``what``), so that the kind is known without reading the record.
    """
    return f"{RESERVED}{what}:{digest_of(*(part.encode() for part in place), body).hex()}"


def is_pause(name: str) -> bool:
    """Return whether an interrupt with this id is a request to pause a run."""
    return name.startswith(f"{RESERVED}{PAUSE}:")


def is_of_run(name: str) -> bool:
    """Return whether an interrupt with this id was recorded by a run, or asks one to pause."""
    return name.startswith((f"{RESERVED}{QUESTION}:", f"{RESERVED}{PAUSE}:", f"{RESERVED}{SLEEP}:"))


def is_sleep(name: str) -> bool:
    """Return whether an interrupt with this id waits for a time, and not for a person."""
    return name.startswith(f"{RESERVED}{SLEEP}:")


def is_over(store: Backend, stored: Record) -> bool:
    """Return whether an interrupt belongs to a run that is over. Interrupts of other programs never do."""
    return is_of_run(stored.key) and has_ended(store, stored.branch, str(stored.checkpoint), stored.key)


def find(store: Backend, cursor: Cursor, asked: Interrupt) -> InterruptRecord | None:
    """Return the record of an interrupt with a reserved id; None if it was not recorded."""
    stored = find_by_id(store, "interrupt", cursor.branch.namespace, asked.id)
    if stored is None:
        return None
    found = record_of(stored)
    if stored.branch != cursor.branch or body_of(found.interrupt) != body_of(asked):
        raise damaged(stored, "its id belongs to another question")
    return found


def found(store: Backend, cursor: Cursor, names: Iterable[str]) -> list[InterruptRecord]:
    """Return the interrupts with these ids; those that were deleted are left out."""
    rows = (find_by_id(store, "interrupt", cursor.branch.namespace, name) for name in names)
    return [record_of(stored) for stored in rows if stored is not None]


def keep(
    store: Backend,
    services: Services,
    cursor: Cursor,
    checkpoint: str,
    asked: Interrupt,
    timeout: tuple[float, Decision] | None = None,
) -> InterruptRecord:
    """Record an interrupt with a reserved id on a checkpoint of this branch; IdTaken if it exists on another one."""
    branch = _branch_of(store, cursor, checkpoint)
    if branch != cursor.branch:
        raise NotFound(
            checkpoint,
            checkpoint=checkpoint,
            thread=branch.thread,
            hint=f"It is of branch {branch.name!r}, not of this",
        )
    return _record(store, services, branch, checkpoint, asked, timeout)


# Lists ------------------------------------------------------------------------------------------------------------


def inbox_of(namespace: str, thread: str | None, pending: bool) -> RecordPages[InterruptRecord]:
    """Return interrupts in the order in which they were recorded.

    ``pending`` are those that still wait: not consumed, and not of a run that is over.
    """
    if not isinstance(pending, bool):
        raise InvalidInput(f"pending must be True or False, not {type(pending).__name__}")

    def is_skipped(store: Backend, stored: Record) -> bool:
        return is_sleep(stored.key) or (pending and is_over(store, stored))

    return RecordPages("interrupt", namespace, thread, pending, record_of, is_skipped)


def pending_checkpoints(
    store: Backend, services: Services, thread: str | None, dry_run: bool = False
) -> tuple[set[str], list[Damaged]]:
    """Return the ids of checkpoints with an interrupt that waits, and the interrupts that cannot be read.

    Interrupts of runs that are over are closed, unless it is a dry run: as long as they are open, the store does not
    delete their checkpoints.
    """

    def close_over(store: Backend, stored: Record) -> bool:
        over = is_over(store, stored)
        if over and not dry_run:
            close(store, services, stored)
        return over

    found: set[str] = set()
    damaged: list[Damaged] = []
    inbox = RecordPages("interrupt", services.namespace, thread, True, record_of, close_over)
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
    """Return a decision that was given as an object, or as a name and details."""
    if isinstance(decision, Decision):
        if scope is not None or value is not None or reason != "" or target is not None:
            raise InvalidInput("a Decision already has its details", hint="Pass a Decision, or a name with details")
        return decision
    return Decision.from_plain({"kind": decision, "scope": scope, "value": value, "reason": reason, "target": target})


def check_fit(shown: InterruptRecord, decision: Decision) -> None:
    """Raise InvalidInput for a decision that could never be carried out: it would count, and block the run forever."""
    asked, place = shown.interrupt, {"thread": shown.thread_id, "checkpoint": shown.checkpoint_id}
    if decision.kind not in shown.choices:
        what = (
            "a question" if asked.answer is not None else "a request to pause" if is_pause(shown.id) else "an approval"
        )
        if decision.kind is DecisionKind.REROUTE:
            what = f"{what} that is not about a node"
        raise InvalidInput(
            f"interrupt {shown.id} is {what}, so {decision.kind.value!r} does not fit. Nothing was decided",
            **place,
            hint=f"Use one of: {', '.join(shown.choices)}",
        )
    if asked.answer is not None and decision.kind is DecisionKind.ANSWER:
        wanted, found = type_name(asked.answer), misfit_of(asked.answer, decision.value)
        if found is not None:
            raise InvalidInput(
                f"the answer to interrupt {shown.id} must be {wanted}, not {found}. Nothing was decided",
                **place,
                hint="Answer with a value of that type",
            )


def decide(
    store: Backend, services: Services, cursor: Cursor, shown: InterruptRecord, decision: Decision, by: str
) -> InterruptRecord:
    """Record the decision about the record that the person saw, once."""
    check_id(by, "by")
    body = _bounded(decision.to_plain(), "decision")
    row = _stored_as_shown(store, cursor, shown)
    check_fit(shown, decision)
    if row.decision is None and is_over(store, row.stored):
        close(store, services, row.stored)
    now_us = to_microseconds(services.now())
    row = put(store, row, lambda row: decided(row, body, by, now_us), now_us)
    _check_place(shown, row)
    answered = _shown(row)
    if answered.decision is None:
        raise _is_closed(answered)
    if (row.decision, row.decided_by) == (body, by):
        return answered
    what, hint = (
        f"is already decided: {answered.headline}",
        "Nothing was changed; error.winner has the decision that counts",
    )
    if row.decided_by == BY_TIMEOUT and answered.deadline is not None:
        what = f"had to be decided by {_moment(answered.deadline)}: this answer is too late"
        hint = "It does not count; error.winner has the decision that does"
    raise Conflict(
        f"interrupt {shown.id} {what}",
        winner=answered,
        thread=shown.thread_id,
        checkpoint=shown.checkpoint_id,
        hint=hint,
    )


def consume(store: Backend, services: Services, cursor: Cursor, shown: InterruptRecord, by: str | None) -> Decision:
    """Take the decision to carry it out, once."""
    row = _stored_as_shown(store, cursor, shown)
    lease = cursor.lease
    if lease is not None and (refusal := lease.refusal()) is not None:
        raise refusal
    # Epochs of different branches cannot be compared.
    epoch = lease.epoch if lease is not None and lease.branch == row.stored.branch else 0
    if by is not None:
        name = check_id(by, "by")
        if name == CLOSED:
            raise InvalidInput(f"the name {CLOSED!r} is reserved for Backstay", hint="Choose another name for by=")
    else:  # a name that no other worker will ever have
        name = str(this_process())
        if lease is not None:
            name = f"{Holder.parse(lease.request.owner).name} {lease.request.token}"
    row = put(store, row, lambda row: consumed(row, name, epoch, to_microseconds(services.now())))
    _check_place(shown, row)
    answered = _shown(row)
    if answered.closed:
        raise _is_closed(answered)
    if answered.decision is None:
        raise InvalidInput(
            f"interrupt {shown.id} is not decided yet",
            thread=shown.thread_id,
            checkpoint=shown.checkpoint_id,
            hint="Wait until thread.decide(…) has been called",
        )
    if row.consumer != name:
        raise Conflict(
            f"the decision on interrupt {shown.id} was taken by {row.consumer!r}",
            winner=answered,
            thread=shown.thread_id,
            checkpoint=shown.checkpoint_id,
            hint="Another worker carries it out. If it died, take the lease on the branch, then consume again",
        )
    return answered.decision


def close(store: Backend, services: Services, stored: Record, keep_decided: bool = False) -> None:
    """Close an interrupt that no run can use any more, unless its decision was taken, or made and is to be kept."""
    at_us = to_microseconds(services.now())
    with contextlib.suppress(NotFound, Corrupted):  # deleted meanwhile; or damaged, which lists and checks report
        put(store, row_of(stored), lambda row: row if keep_decided and row.decision is not None else closed(row, at_us))


def _is_closed(answered: InterruptRecord) -> Conflict:
    return Conflict(
        f"interrupt {answered.id} is closed: its run is over, or has moved past it",
        winner=answered,
        thread=answered.thread_id,
        checkpoint=answered.checkpoint_id,
        hint="Nothing was changed; thread.interrupts() lists what waits for a decision",
    )


def _stored_as_shown(store: Backend, cursor: Cursor, shown: InterruptRecord) -> InterruptRow:
    """Return the stored interrupt if it belongs to this thread and has not changed since it was shown."""
    if not isinstance(shown, InterruptRecord) or not isinstance(shown.interrupt, Interrupt):
        raise InvalidInput(
            f"interrupt must be an InterruptRecord, not {type(shown).__name__}",
            hint="Pass a record from thread.interrupts(): it shows what the person saw, an id alone does not",
        )
    if shown.thread_id != cursor.branch.thread:
        raise _something_else(shown, f"it belongs to thread {shown.thread_id!r}, not {cursor.branch.thread!r}")
    stored = find_by_id(store, "interrupt", cursor.branch.namespace, check_id(shown.id, "interrupt id"))
    if stored is None:
        raise NotFound(
            f"interrupt {shown.id} does not exist",
            thread=shown.thread_id,
            checkpoint=shown.checkpoint_id,
            hint="It was deleted with its checkpoint, or never recorded",
        )
    row = row_of(stored)
    _check_place(shown, row)
    # Encode both now, so that a class that was registered again in between is written the same way on both sides.
    if body_of(shown.interrupt) != body_of(_shown(row).interrupt):
        raise _something_else(shown, "the stored question differs from the one shown")
    return row


def _check_place(shown: InterruptRecord, row: InterruptRow) -> None:
    parts = (
        ("thread", shown.thread_id, row.stored.branch.thread),
        ("scope", shown.scope, row.stored.branch.scope),
        ("branch", shown.branch, row.stored.branch.name),
        ("checkpoint", shown.checkpoint_id, row.stored.checkpoint),
        ("digest", shown.digest, row.digest),
    )
    for name, mine, stored in parts:
        if mine != stored:
            raise _something_else(shown, f"the stored interrupt has another {name}")


def _something_else(shown: InterruptRecord, what: str) -> InvalidInput:
    return InvalidInput(
        f"interrupt {shown.id} does not match the record that was shown: {what}",
        thread=shown.thread_id,
        checkpoint=shown.checkpoint_id,
        hint="Read it again with thread.interrupts(), and decide about that record",
    )


# The rules ---------------------------------------------------------------------------------------------------------


def decided(row: InterruptRow, decision: bytes, by: str, at_us: int) -> InterruptRow:
    """Return the interrupt with a decision. The first one counts; after the deadline, that is the timeout's.

    A closed interrupt gets none.
    """
    if row.decision is not None or row.consumer is not None:
        return row
    if row.deadline_us is not None and at_us >= row.deadline_us:
        decision, by = row.late or decision, BY_TIMEOUT
    return replace(row, decision=decision, decided_by=by, decided_us=at_us)


def decide_if_late(store: Backend, services: Services, cursor: Cursor, shown: InterruptRecord) -> InterruptRecord:
    """Return the interrupt; if its deadline has passed without a decision, make the decision of the timeout."""
    is_settled = shown.decision is not None or shown.closed
    if is_settled or shown.deadline is None or services.now() < shown.deadline:
        return shown
    row = _stored_as_shown(store, cursor, shown)
    now_us = to_microseconds(services.now())
    return _shown(put(store, row, lambda row: decided(row, row.late or b"", BY_TIMEOUT, now_us)))


def consumed(row: InterruptRow, by: str, epoch: int, at_us: int) -> InterruptRow:
    """Return the interrupt with a consumer, if it is decided and has none, or one with a lower epoch.

    A consumer with a lower epoch has lost its lease, so another one may take over.
    """
    if row.decision is None or row.consumer == CLOSED or (row.consumer is not None and row.consumer_epoch >= epoch):
        return row
    return replace(row, consumer=by, consumer_epoch=epoch, consumed_us=at_us)


def closed(row: InterruptRow, at_us: int) -> InterruptRow:
    """Return the interrupt closed, if it has no consumer."""
    return replace(row, consumer=CLOSED, consumed_us=at_us) if row.consumer is None else row


def put(
    store: Backend, row: InterruptRow, rule: Callable[[InterruptRow], InterruptRow], wakes_at_us: int | None = None
) -> InterruptRow:
    """Apply a rule to an interrupt, again if others changed it meanwhile; return the interrupt as stored.

    ``wakes_at_us``: the time now, if the change lets its run continue. The run is changed in the same step, so that no
    answer is stored without its run being continued.
    """
    if rule(row) is row:
        row = row_of(confirm(store, row.stored))
    while (changed := rule(row)) is not row:
        wakes = wakes_at_us is not None and is_of_run(row.stored.key)
        run = run_records.to_wake(store, row.stored.branch, wakes_at_us or 0) if wakes else None
        try:
            row = row_of(store.put_record(changed.sealed(), None, run))
        except Conflict as conflict:
            if not isinstance(conflict.winner, Record | None):
                raise
    return row


# Rows and records -------------------------------------------------------------------------------------------------


def row_of(stored: Record) -> InterruptRow:
    """Return a stored interrupt as a row, every byte checked."""
    row = InterruptRow(stored, *unseal(stored, _TYPES))
    decided = {part is not None for part in (row.decision, row.decided_by, row.decided_us)}
    consumed = {part is not None for part in (row.consumer, row.consumed_us)}
    used = {False} if row.consumer == CLOSED else consumed  # only a closed one has a consumer and no decision
    is_whole = consumed == {not stored.open} and decided in ({True}, used)
    longest = max(len(row.question), len(row.decision or b""), len(row.late or b""))
    is_whole = is_whole and (row.deadline_us is None) == (row.late is None)
    if stored.checkpoint is None or not is_whole or longest > QUESTION_BYTES_MAX:
        raise damaged(stored, "it does not have the expected form")
    return row


def record_of(stored: Record) -> InterruptRecord:
    """Return a stored interrupt as users see it."""
    return _shown(row_of(stored))


def _shown(row: InterruptRow) -> InterruptRecord:
    try:
        return InterruptRecord(
            interrupt=Interrupt.from_plain(decode(row.question)),
            thread_id=row.stored.branch.thread,
            branch=row.stored.branch.name,
            scope=row.stored.branch.scope,
            checkpoint_id=str(row.stored.checkpoint),
            digest=row.digest,
            created_at=from_microseconds(row.created_us),
            decision=None if row.decision is None else Decision.from_plain(decode(row.decision)),
            decided_by=row.decided_by,
            decided_at=None if row.decided_us is None else from_microseconds(row.decided_us),
            consumer=row.consumer,
            consumed_at=None if row.consumed_us is None else from_microseconds(row.consumed_us),
            deadline=None if row.deadline_us is None else from_microseconds(row.deadline_us),
        )
    except (DecodeError, InvalidInput) as error:
        raise damaged(row.stored, f"it cannot be read: {error.what}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(row.stored, "it does not have the expected form") from error


def body_of(question: Interrupt) -> bytes:
    """Return the encoded question."""
    return _bounded(question.to_plain(), "interrupt")


def _bounded(plain: dict[str, Any], path: str) -> bytes:
    data = encode(plain, path)
    if len(data) > QUESTION_BYTES_MAX:
        raise too_large(f"the {path}", len(data), QUESTION_BYTES_MAX, path, plain)
    return data


def _moment(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")
