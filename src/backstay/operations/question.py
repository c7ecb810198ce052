"""Questions of a run, which are asked again after every crash and answered once; and requests to pause a run.

A run that is started again reaches the same place and asks the same question. The id of a question is made from its
place and all its bytes, so the run finds the same interrupt with its decision. Another place, visit, branch or payload
gives another id, so an old decision is never used for a new question. A deferred question is closed; asking it again
makes a new interrupt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from backstay.codec import encode
from backstay.errors import Conflict, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import COPIES, Checkpoint
from backstay.model.decision import REASON_LENGTH_MAX, Decision, DecisionKind, Interrupt, InterruptKind
from backstay.model.ids import check_id, check_label
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations import interrupts
from backstay.operations.answers import describe
from backstay.operations.cursor import Cursor, Services
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.records import all_records, find_by_id
from backstay.operations.rows import meta_of
from backstay.operations.runs import run_of
from backstay.store.base import Backend, BranchKey, Query
from backstay.store.records import Record

TIMEOUT_S_MAX = 10 * 365 * 86_400.0
_ON_TIMEOUT = (DecisionKind.REJECT, DecisionKind.DEFER, DecisionKind.REROUTE)
_LATE = "no one decided in time"


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its place. A timeout never executes the guarded action: it cannot approve or modify."""

    position: str  # the same after a restart, different for every other place, visit and call of the branch
    kind: InterruptKind
    node: str | None
    payload: Any
    prompt: str = ""
    timeout_s: float | None = None  # after this long without a decision ...
    on_timeout: DecisionKind = DecisionKind.REJECT  # ... this is decided
    timeout_target: str | None = None  # the node to go to, if that is a reroute
    answer: type | None = None  # a question wants a value of this type, object for any; None for an approval
    is_sleep: bool = False  # no one is asked: the timeout lets the run continue

    def __post_init__(self) -> None:
        if self.on_timeout not in _ON_TIMEOUT:
            raise InvalidInput(
                f"a timeout cannot decide {str(self.on_timeout)[:40]!r}", hint=f"Use one of {', '.join(_ON_TIMEOUT)}"
            )
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)
        if self.answer is not None:
            _check_kind(self.answer)
        self.late_decision()

    def late_decision(self) -> Decision:
        """Return the decision that is made on timeout."""
        if self.is_sleep:
            return Decision(kind=DecisionKind.APPROVE)
        return Decision(kind=DecisionKind(self.on_timeout), reason=_LATE, target=self.timeout_target)

    def interrupt(self, branch: BranchKey, number: int) -> Interrupt:
        """Return the interrupt for this question in a branch; ``number`` is how often it was closed before."""
        wanted = describe(self.answer)
        asked = Interrupt(
            id="-", kind=self.kind, node=self.node, payload=self.payload, prompt=self.prompt, answer=wanted
        )
        place = (*branch, self.position, str(number))
        what = interrupts.SLEEP if self.is_sleep else interrupts.QUESTION
        return replace(asked, id=interrupts.reserved_id(what, place, interrupts.body_of(asked)))


def settle(
    store: Backend, services: Services, cursor: Cursor, checkpoint_id: str, question: Question
) -> Decision | InterruptRecord:
    """Return the decision, consumed by this worker, or the record if it is not decided. See ``settled``."""
    found = settled(store, services, cursor, checkpoint_id, question)
    return found if found.decision is None else found.decision


def settled(
    store: Backend, services: Services, cursor: Cursor, checkpoint_id: str, question: Question
) -> InterruptRecord:
    """Return the record of a question; if it is decided, this worker consumes the decision.

    A question that was not asked before is recorded on the checkpoint. A decision to defer is returned once and closes
    the question. An answer of the wrong type closes it too, and raises InvalidInput once. A closed question is asked
    again under a new id.
    """
    number = 0
    while True:
        found = _asked(store, services, cursor, checkpoint_id, question, number)
        found = interrupts.decide_if_late(store, services, cursor, found)
        if found.closed:  # the run had stopped asking it
            number += 1
            continue
        if found.decision is None:
            return found
        if found.pending or not _closes(question, found.decision):
            interrupts.consume(store, services, cursor, found, None)
            _check_fit(question, found.decision, found.id)
            return found
        number += 1


def waiting(
    store: Backend, services: Services, cursor: Cursor, checkpoint_id: str, question: Question
) -> InterruptRecord | None:
    """Return the current record of a question, None if it was not asked. Changes nothing."""
    number = 0
    while True:
        found = interrupts.find(store, cursor, question.interrupt(cursor.branch, number))
        if found is None or found.pending:
            return found
        if not found.closed and found.decision is not None and not _closes(question, found.decision):
            return found
        number += 1


def sleep_question(
    position: str, node: str | None, seconds: float | None, until: datetime | None, now: datetime
) -> Question:
    """Return a question that no person is asked, and whose timeout is the end of a sleep."""
    if (seconds is None) == (until is None):
        raise InvalidInput(
            "sleep needs either seconds or until", hint="For example ctx.sleep(60), or sleep(until=when)"
        )
    if until is not None:
        if not isinstance(until, datetime) or until.tzinfo is None:
            raise InvalidInput("until must be a datetime with a time zone", hint="Use datetime.now(timezone.utc)")
        seconds = max(0.0, (until - now).total_seconds())
    payload = {"sleep": seconds if until is None else until.astimezone(UTC).isoformat()}
    return Question(
        position, InterruptKind.USER_REQUEST, node, payload, timeout_s=check_timeout(seconds), is_sleep=True
    )


def check_timeout(seconds: object) -> float:
    """Return the timeout of a question in seconds, checked."""
    wrong = isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds)
    if wrong or not 0 <= seconds <= TIMEOUT_S_MAX:  # type: ignore[operator]  # it is a number here
        raise InvalidInput(f"timeout must be a number of seconds from 0 to {TIMEOUT_S_MAX:g}, not {seconds!r:.40}")
    return float(seconds)  # type: ignore[arg-type]  # see above


# Answers ----------------------------------------------------------------------------------------------------------


def check_answer(decision: Decision, kind: type | None, interrupt: str = "") -> Any:
    """Return the value of an answer, which must be of this type; a mapping becomes a pydantic model.

    Other decisions have no value: None.
    """
    if kind is None or decision.kind is not DecisionKind.ANSWER:
        return decision.value
    _check_kind(kind)
    value = decision.value
    validate = getattr(kind, "model_validate", None)
    if validate is not None and isinstance(value, Mapping):
        try:
            return validate(dict(value))
        except ValueError as error:  # without its text, which shows the value
            raise _misfit(interrupt, kind, f"a mapping that does not fit it at {_places(error)}") from None
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
        return value
    raise _misfit(interrupt, kind, type(value).__name__)


def _check_kind(kind: object) -> None:
    if not isinstance(kind, type) or hasattr(kind, "__origin__"):
        raise InvalidInput(
            f"the type of an answer must be a class, not {kind!r:.60}", hint="For example answer=str, or answer=list"
        )


class WrongAnswer(InvalidInput):
    """A decision has a value of the wrong type; the question is closed, and has to be asked again."""


def _misfit(interrupt: str, kind: type, found: str) -> WrongAnswer:
    return WrongAnswer(
        f"the answer to interrupt {interrupt or '-'} must be {kind.__name__}, not {found}",
        hint="This answer was not used. Resume the run, and answer the new question with a value of that type",
    )


def _places(error: ValueError) -> str:
    found = getattr(error, "errors", None)
    if found is None:
        return "some field"
    details = found(include_url=False, include_context=False, include_input=False)
    return ", ".join(".".join(map(str, each["loc"])) or "the top" for each in details[:5])


def _check_fit(question: Question, decision: Decision, interrupt: str) -> None:
    """Raise WrongAnswer if the answer has the wrong type."""
    check_answer(decision, question.answer, interrupt)


def _closes(question: Question, decision: Decision) -> bool:
    """Return whether a decision closes the question without answering it."""
    try:
        _check_fit(question, decision, "")
    except WrongAnswer:
        return True
    return decision.kind is DecisionKind.DEFER


# Values sent by other programs ------------------------------------------------------------------------------------
#
# A run that waits for a value asks a question whose position is made of the name and a number: the first value of that
# name in this run, the second, and so on. A sender makes or finds the first of these questions that has no answer, and
# answers it. So a value may come before the run waits for it, and each is received once, in order.


def line_name_of(checkpoint: Checkpoint) -> str:
    """Return the name of the run of a graph in its line of history: the prefix of its questions, calls and effects."""
    line = checkpoint.id if checkpoint.trigger in COPIES else checkpoint.run.get("line", "")
    run_id = checkpoint.run_id or checkpoint.id
    return f"{run_id}@{line}" if line else run_id


def wait_question(line: str, name: str, number: int, timeout_s: float | None = None) -> Question:
    """Return the question whose answer is the value with this number under a name."""
    check_id(name, "name")
    position, prompt = f"{line}:message:{name}:{number}", f"Waiting for {name!r}"
    return Question(position, InterruptKind.USER_REQUEST, None, {"wait_for": name}, prompt, timeout_s, answer=object)


def deliver(
    store: Backend,
    services: Services,
    cursor: Cursor,
    checkpoint_id: str,
    line: str,
    received: int,
    name: str,
    value: Any,
    by: str,
) -> InterruptRecord:
    """Answer the first open question for a name after the first ``received``, or one that the run will ask later."""
    decision = Decision(kind=DecisionKind.ANSWER, value=value)
    encode(value, "value")  # a value that cannot be stored is refused before anything is written
    for number in itertools.count(received + 1):
        question = wait_question(line, name, number)
        deferred = 0
        while True:
            found = _asked(store, services, cursor, checkpoint_id, question, deferred)
            if not found.closed and (found.decision is None or not _closes(question, found.decision)):
                break
            deferred += 1
        if found.decision is None:
            try:
                return interrupts.decide(store, services, cursor, found, decision, by)
            except Conflict as conflict:
                if conflict.winner.closed or conflict.winner.decided_by == interrupts.BY_TIMEOUT:
                    raise  # the run has stopped waiting
    raise AssertionError("unreachable: the numbers have no end")


def raise_if_late(decision: Decision | None, name: str) -> None:
    """Raise TimeoutError if a decision means that no value was sent in time."""
    if decision is not None and decision.kind is DecisionKind.REJECT and decision.reason == _LATE:
        raise TimeoutError(f"no value {name!r} was sent in time")


# Effects with an unknown outcome ----------------------------------------------------------------------------------


def outcome_question(position: str, node: str | None, record: EffectRecord) -> Question:
    """Return the question whether an effect was done."""
    payload = {
        "effect": record.key,
        "attempt": record.attempt,
        "idempotency_key": record.idempotency_key,
        "started_at": record.created_at,
    }
    prompt = (
        f"It is unknown whether effect {record.key.rpartition(':')[2]!r} was done. Approve: it was not, do it. "
        "Modify: it was, with this result. Reject: end the run."
    )
    return Question(position, InterruptKind.USER_REQUEST, node, payload, prompt)


def outcome_of(decision: Decision) -> Outcome:
    """Return what a person found out about an effect."""
    return Outcome.done(decision.value) if decision.kind is DecisionKind.MODIFY else Outcome.not_done()


# Inside -----------------------------------------------------------------------------------------------------------


def _asked(
    store: Backend, services: Services, cursor: Cursor, checkpoint_id: str, question: Question, number: int
) -> InterruptRecord:
    """Return the record of a question, made now if it does not exist."""
    asked = question.interrupt(cursor.branch, number)
    found = interrupts.find(store, cursor, asked)
    if found is not None:
        return found
    timeout = None if question.timeout_s is None else (question.timeout_s, question.late_decision())
    try:
        return interrupts.keep(store, services, cursor, checkpoint_id, asked, timeout)
    except IdTaken:  # the same question was asked meanwhile on another checkpoint
        found = interrupts.find(store, cursor, asked)
        if found is None:
            raise
        return found


# Questions that no run can use any more ---------------------------------------------------------------------------


def close_questions(store: Backend, services: Services, cursor: Cursor, names: Iterable[str]) -> None:
    """Close the undecided ones of interrupts that the run of this branch did not ask again.

    A decision may still be used: it may be a value that was sent to the run, for a node that comes later.
    """
    for name in names:
        stored = find_by_id(store, "interrupt", cursor.branch.namespace, name)
        if stored is not None and stored.open and stored.branch == cursor.branch:
            interrupts.close(store, services, stored, keep_decided=True)


def close_ended(store: Backend, services: Services, cursor: Cursor) -> set[str]:
    """Close the interrupts of runs of this branch that are over; return the ids of questions that still wait."""
    waiting = set()
    branch = cursor.branch
    for stored in list(all_records(store, "interrupt", branch.namespace, branch.thread, open_only=True)):
        if stored.branch != branch or not interrupts.is_of_run(stored.key):
            continue
        if interrupts.is_over(store, stored):
            interrupts.close(store, services, stored)
        elif not interrupts.is_pause(stored.key):
            waiting.add(stored.key)
    return waiting


# Requests to pause a run ------------------------------------------------------------------------------------------
#
# Any process may ask, without the lease; the run stops at its next boundary. A request is an interrupt on the branch's
# newest checkpoint, and counts for the run of that checkpoint only: if the run ends first, the request is closed. It
# blocks the run until it is decided: if approved, the run continues; if deferred, it stays paused and asks again; if
# rejected, it stops for good. Only one request is open at a time: its id is made from the previous one, so only one of
# two simultaneous requests is recorded.


def request_pause(store: Backend, services: Services, cursor: Cursor, reason: str, by: str) -> InterruptRecord:
    """Record a request to pause the run, or return the open one."""
    check_id(by, "by")
    check_label(reason, "reason", length_max=REASON_LENGTH_MAX)
    while True:
        rows = _requests(store, cursor, pending=False)
        newest = interrupts.record_of(rows[-1]) if rows else None
        if newest is not None and newest.decision is None and newest.pending:
            if not interrupts.is_over(store, rows[-1]):
                return newest
            interrupts.close(store, services, rows[-1])
        payload = {"pause": True, "by": by, "reason": reason}
        recorded = _record_pause(store, services, cursor, newest.id if newest else "", payload, reason, True)
        if recorded is not None:
            return recorded


def pause_requested(store: Backend, services: Services, cursor: Cursor) -> InterruptRecord | None:
    """Return the oldest request to pause this branch that its run has not consumed; close those to earlier runs."""
    for stored in _requests(store, cursor, pending=True):
        if not interrupts.is_over(store, stored):
            return interrupts.record_of(stored)
        interrupts.close(store, services, stored)
    return None


def check_pause(store: Backend, services: Services, cursor: Cursor) -> InterruptRecord | None:
    """Return the request that a run must stop for, None if it may continue.

    Approvals are consumed. A deferred request is consumed too, but only after it was made again.
    """
    while True:
        found = pause_requested(store, services, cursor)
        if found is None or found.decision is None or found.decision.kind is DecisionKind.REJECT:
            return found
        if found.decision.kind is DecisionKind.DEFER:
            _record_pause(store, services, cursor, found.id, found.interrupt.payload, found.interrupt.prompt)
        interrupts.consume(store, services, cursor, found, None)
        if found.decision.kind is not DecisionKind.APPROVE:
            return found


def _requests(store: Backend, cursor: Cursor, pending: bool) -> list[Record]:
    """Return the requests to pause this branch, oldest first."""
    found = all_records(store, "interrupt", cursor.branch.namespace, cursor.branch.thread, pending)
    return [record for record in found if record.branch == cursor.branch and interrupts.is_pause(record.key)]


def _record_pause(
    store: Backend,
    services: Services,
    cursor: Cursor,
    before: str,
    payload: object,
    prompt: str,
    must_run: bool = False,
) -> InterruptRecord | None:
    """Record the request that follows another one; None if another process did. ``must_run``: only while a run runs."""
    name = interrupts.reserved_id(interrupts.PAUSE, (*cursor.branch, before))
    asked = Interrupt(id=name, kind=InterruptKind.USER_REQUEST, payload=payload, prompt=prompt)
    while True:
        newest = _newest(store, cursor, must_run)
        try:
            return interrupts.keep(store, services, cursor, newest, asked)
        except IdTaken:
            return None
        except NotFound:
            if (_newest(store, cursor)) == newest:
                raise  # otherwise it was deleted meanwhile, and another checkpoint is the newest


def _newest(store: Backend, cursor: Cursor, must_run: bool = False) -> str:
    """Return the newest checkpoint of this branch. ``must_run``: raise InvalidInput if its run is over."""
    branch = cursor.branch
    rows = store.find(Query(*branch, limit=1))
    if not rows:
        raise NotFound(
            f"branch {branch.name!r} of thread {branch.thread!r} has no checkpoint, so there is nothing to pause",
            thread=branch.thread,
            hint="Check the thread id; a run can be paused after its first save",
        )
    if must_run:
        run = run_of(store, branch, meta_of(rows[0]))
        # The first turn of a loop on a state that was saved otherwise: only its lease shows that it runs.
        runs = run.is_known or any(
            each.branch == branch and each.left_us > 0 for each in store.leases(branch.namespace, branch.thread, False)
        )
        if run.is_over or not runs:
            raise InvalidInput(
                f"no run is under way on branch {branch.name!r} of thread {branch.thread!r}: there is nothing to pause",
                thread=branch.thread,
                checkpoint=rows[0].id,
                hint="To stop the next run at a node, start it with before=[node]; see docs/people.md",
            )
    return rows[0].id
