"""One question at one place of a run, asked again after every crash, and answered once.

A run that is started anew comes to the same place and asks the same thing. So a question's id is made of its place and
of every byte of it: asked again it is the same interrupt, with the decision that was made on it. Another place, another
visit, another branch or a changed payload gives another id, so an old decision is never taken for a new question. A
question that was deferred is closed; asking again begins its next round, which is a new interrupt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from backstay.errors import Conflict, IdTaken, InvalidInput
from backstay.model.decision import Decision, DecisionKind
from backstay.model.interrupt import Interrupt, InterruptKind
from backstay.store.base import Backend, LaneKey
from backstay.thread import interrupts
from backstay.thread.cursor import Context, Cursor
from backstay.thread.interrupts import InterruptRecord

BY_TIMEOUT = "timeout"
"""Who decided, if nobody did in time."""

TIMEOUT_S_MAX = 10 * 365 * 86_400.0
_ON_TIMEOUT = (DecisionKind.REJECT, DecisionKind.DEFER, DecisionKind.REROUTE)
_NO_ANSWER = (DecisionKind.REJECT, DecisionKind.DEFER, DecisionKind.REROUTE)
_LATE = "nobody decided in time"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and where. A timeout never executes what is guarded: it cannot approve or modify."""

    position: str  # the same after a restart, different for every other place, visit and call of the branch
    kind: InterruptKind
    node: str | None
    payload: Any
    prompt: str = ""
    timeout_s: float | None = None  # after so long without a decision ...
    on_timeout: DecisionKind = DecisionKind.REJECT  # ... this is decided
    timeout_target: str | None = None  # the node it goes to, if that is a reroute
    answer: type | None = None  # the answer must be a modification with such a value; any other closes the question

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
        """Return what is decided when the time is over."""
        return Decision(kind=DecisionKind(self.on_timeout), reason=_LATE, target=self.timeout_target)

    def interrupt(self, lane: LaneKey, number: int) -> Interrupt:
        """Return the interrupt that asks this in a branch; ``number`` counts how often it was closed before."""
        asked = Interrupt(id="-", kind=self.kind, node=self.node, payload=self.payload, prompt=self.prompt)
        place = (*lane, self.position, str(number))
        return replace(asked, id=interrupts.reserved_id("question", place, interrupts.body_of(asked)))


def settle(
    store: Backend, context: Context, cursor: Cursor, checkpoint_id: str, question: Question
) -> Decision | InterruptRecord:
    """Return the decision, consumed by this worker, or the record that waits for one. See ``settled``."""
    found = settled(store, context, cursor, checkpoint_id, question)
    return found if found.decision is None else found.decision


def settled(
    store: Backend, context: Context, cursor: Cursor, checkpoint_id: str, question: Question
) -> InterruptRecord:
    """Return the record of a question: with a decision, which is consumed by this worker then, or without one.

    What was not asked yet is recorded on the checkpoint. A decision to defer is returned once, and closes the question.
    An answer of another type than the question wants closes it too, and raises InvalidInput, once.
    """
    number = 0
    while True:
        found = _asked(store, context, cursor, checkpoint_id, question.interrupt(cursor.lane, number))
        if found.decision is None:
            found = _decided_by_now(store, context, cursor, found, question)
        if found.decision is None:
            return found
        if found.pending or not _closes(question, found.decision):
            interrupts.consume(store, context, cursor, found, None)
            _check_fit(question, found.decision, found.id)
            return found
        number += 1


def waiting(
    store: Backend, context: Context, cursor: Cursor, checkpoint_id: str, question: Question
) -> InterruptRecord | None:
    """Return the record of a question as it is now, None if it is not asked; records, decides and consumes nothing."""
    number = 0
    while True:
        found = interrupts.find(store, cursor, question.interrupt(cursor.lane, number))
        if found is None or found.decision is None or found.pending or not _closes(question, found.decision):
            return found
        number += 1


def check_timeout(seconds: object) -> float:
    """Return the seconds if they can be the time that a decision may take."""
    wrong = isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds)
    if wrong or not 0 <= seconds <= TIMEOUT_S_MAX:  # type: ignore[operator]  # it is a number here
        raise InvalidInput(f"timeout must be a number of seconds from 0 to {TIMEOUT_S_MAX:g}, not {seconds!r:.40}")
    return float(seconds)  # type: ignore[arg-type]  # see above


# Answers ----------------------------------------------------------------------------------------------------------


def check_answer(decision: Decision, kind: type | None, interrupt: str = "") -> Any:
    """Return the value of a modification if it is of the wanted type; a pydantic model is made of a mapping.

    Other decisions carry no value; theirs is None.
    """
    if kind is None or decision.kind is not DecisionKind.MODIFY:
        return decision.value
    _check_kind(kind)
    value = decision.value
    validate = getattr(kind, "model_validate", None)
    if validate is not None and isinstance(value, Mapping):
        try:
            return validate(dict(value))
        except ValueError as error:  # without its text, which shows the value
            raise _misfit(interrupt, kind, f"a mapping that is none, at {_places(error)}") from None
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
        return value
    raise _misfit(interrupt, kind, type(value).__name__)


def _check_kind(kind: object) -> None:
    if not isinstance(kind, type) or hasattr(kind, "__origin__"):
        raise InvalidInput(
            f"the type of an answer must be a class, not {kind!r:.60}", hint="For example answer=str, or answer=list"
        )


def _misfit(interrupt: str, kind: type, found: str) -> InvalidInput:
    return InvalidInput(
        f"the answer to interrupt {interrupt or '-'} must be {kind.__name__}, not {found}",
        hint="This answer is not used; when the run asks again, decide that with a value of the type",
    )


def _places(error: ValueError) -> str:
    found = getattr(error, "errors", None)
    if found is None:
        return "some field"
    details = found(include_url=False, include_context=False, include_input=False)
    return ", ".join(".".join(map(str, each["loc"])) or "the top" for each in details[:5])


def _check_fit(question: Question, decision: Decision, interrupt: str) -> None:
    """Raise InvalidInput if a question for a value of some type was answered by another type, or by no value."""
    if question.answer is None or decision.kind in _NO_ANSWER:
        return
    if decision.kind is not DecisionKind.MODIFY:
        raise _misfit(interrupt, question.answer, f"a plain {decision.kind.value!r}")
    check_answer(decision, question.answer, interrupt)


def _closes(question: Question, decision: Decision) -> bool:
    """Tell whether a decision ends this round of the question without answering it."""
    try:
        _check_fit(question, decision, "")
    except InvalidInput:
        return True
    return decision.kind is DecisionKind.DEFER


# Inside -----------------------------------------------------------------------------------------------------------


def _asked(store: Backend, context: Context, cursor: Cursor, checkpoint_id: str, asked: Interrupt) -> InterruptRecord:
    """Return the record of a question, made now if it is not there."""
    found = interrupts.find(store, cursor, asked)
    if found is not None:
        return found
    try:
        return interrupts.keep(store, context, cursor, checkpoint_id, asked)
    except IdTaken:  # by the same question, meanwhile, on another checkpoint
        found = interrupts.find(store, cursor, asked)
        if found is None:
            raise
        return found


def _decided_by_now(
    store: Backend, context: Context, cursor: Cursor, found: InterruptRecord, question: Question
) -> InterruptRecord:
    """Decide a question whose time is over; of a person and the clock, the first counts."""
    seconds = question.timeout_s
    if seconds is None or context.now() - found.created_at < timedelta(seconds=seconds):
        return found
    try:
        return interrupts.decide(store, context, cursor, found, question.late_decision(), BY_TIMEOUT)
    except Conflict as lost:
        winner: InterruptRecord = lost.winner
        return winner
