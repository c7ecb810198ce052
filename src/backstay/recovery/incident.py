"""An operation that nothing helped: recorded for a person, who may answer in a week and to another process.

The record is an interrupt on the newest checkpoint of the thread, found again by the operation's key. It names the
operation and the error, never values. Incidents of one key are numbered; their decisions, together with the ledger of
effects, say how the operation stands, whichever process asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from backstay.errors import Corrupted, IdTaken, InvalidInput, NotFound
from backstay.model.effect import EffectRecord, EffectStatus, Outcome
from backstay.model.interrupt import Interrupt, InterruptKind
from backstay.recovery.action import ActionKind, RecoveryAction
from backstay.recovery.category import ErrorCategory
from backstay.recovery.failure import Failure
from backstay.store.base import Backend, LaneKey, Query
from backstay.thread import interrupts, ledger
from backstay.thread.cursor import Context, Cursor
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.records import find_by_id

INCIDENT = "incident"
BY_DECISION = "decision"
"""Who settled an effect, if somebody who was asked about its failure said to try it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What is told of a failed operation to the person who decides."""

    operation: str
    failure: Failure
    attempts: int  # calls made in all, also by processes that are gone
    began_at: datetime  # of the first of the attempts that this process made
    failed_at: datetime
    actions: tuple[RecoveryAction, ...] = ()

    @property
    def prompt(self) -> str:
        """Return the question."""
        tried = "once" if self.attempts == 1 else f"{self.attempts} times"
        offered = ", ".join(str(action) for action in self.actions)
        choice = f" Choose: {offered}." if offered else ""
        return f"{self.operation} was tried {tried} and failed: {self.failure}. {self.failure.hint}.{choice}"

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as plain values; settings are offered by name, without what they are now."""
        return {
            INCIDENT: self.operation,
            "category": self.failure.category.value,
            "error": self.failure.type,
            "message": self.failure.message,
            "hint": self.failure.hint,
            "attempts": self.attempts,
            "began_at": self.began_at,
            "failed_at": self.failed_at,
            "actions": [replace(action, value=None).to_plain() for action in self.actions],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Incident:
        """Make an incident of what ``to_plain`` gave."""
        return cls(
            operation=plain[INCIDENT],
            failure=Failure(ErrorCategory(plain["category"]), plain["error"], plain["message"], plain["hint"]),
            attempts=plain["attempts"],
            began_at=plain["began_at"],
            failed_at=plain["failed_at"],
            actions=tuple(RecoveryAction.from_plain(each) for each in plain["actions"]),
        )


def is_incident(payload: object) -> bool:
    """Tell whether an interrupt's payload is an incident."""
    return isinstance(payload, Mapping) and INCIDENT in payload and "failed_at" in payload


@dataclass(slots=True)
class Standing:
    """How an operation stands, by what is stored."""

    effect: EffectRecord | None = None  # what the ledger has of it
    instead: tuple[str, Any] | None = None  # the fallback that was done, and its result
    numbered: int = 0  # incidents that were decided
    waiting: InterruptRecord | None = None  # the one that is not
    incident: Incident | None = None  # the newest
    action: RecoveryAction | None = None  # what was decided last
    was_consumed: bool = False  # this process is the first to carry it out
    base: int = 0  # calls made before somebody last said that it is to be tried again
    config: dict[str, Any] = field(default_factory=dict)  # settings that were changed by decisions

    @property
    def attempts(self) -> int:
        """How many calls were made or begun."""
        return 0 if self.effect is None else self.effect.attempt


def effect_key(key: str, fallback: str | None = None) -> str:
    """Return the key that an operation, or what was done instead, has in the ledger."""
    return f"recovery:{key}" if fallback is None else f"recovery {fallback!r}:{key}"  # quoted: no two are the same


def find_standing(store: Backend, context: Context, cursor: Cursor, key: str, fallbacks: tuple[str, ...]) -> Standing:
    """Read how an operation stands. A decision on it is consumed; one that decides nothing is asked for anew."""
    _newest(store, cursor)  # what cannot be paused must not begin
    standing = Standing(effect=(_effect(store, cursor, effect_key(key))))
    note = _decided(store, context, cursor, key, standing)
    for name in fallbacks:
        done = _effect(store, cursor, effect_key(key, name))
        if done is not None and done.status is EffectStatus.DONE and done.error is None:
            standing.instead = (name, done.result)
            return standing
    if note is not None and standing.incident is not None:
        standing.waiting = record(store, context, cursor, key, standing.numbered, standing.incident, note)
    elif standing.action is not None and standing.action.tries_again:
        settle_unknown(store, context, cursor, key, standing.base)
    return standing


def _decided(store: Backend, context: Context, cursor: Cursor, key: str, standing: Standing) -> str | None:
    """Go through the incidents; return why there must be another, if the last answer does not decide anything."""
    note: str | None = None
    while True:
        found = _find(store, cursor, _incident_id(cursor.lane, key, standing.numbered))
        if found is None:
            return note
        note = None
        standing.incident = Incident.from_plain(found.interrupt.payload)
        if found.decision is None:
            standing.waiting = found
            return None
        if found.pending:
            interrupts.consume(store, context, cursor, found, None)
        standing.numbered += 1
        try:
            action = RecoveryAction.from_decision(found.decision)
            check_offered(action, standing.incident.actions)
        except InvalidInput as error:
            action, note = None, f" (The last answer could not be used: {error.what})"
        standing.action, standing.was_consumed = action, found.pending and action is not None
        if action is None:
            note = note or ""
        elif action.tries_again:
            standing.base = standing.incident.attempts
            if action.kind is ActionKind.MODIFY_CONFIG and action.key is not None:
                standing.config[action.key] = action.value


def check_offered(action: RecoveryAction | None, offered: tuple[RecoveryAction, ...]) -> None:
    """Raise InvalidInput unless an action is one of those that can be carried out."""
    if action is None:
        return
    if not any((each.kind, each.key, each.service) == (action.kind, action.key, action.service) for each in offered):
        raise InvalidInput(
            f"{action} was not offered", hint=f"Choose one of: {', '.join(str(each) for each in offered)}"
        )


def record(
    store: Backend, context: Context, cursor: Cursor, key: str, number: int, incident: Incident, note: str = ""
) -> InterruptRecord:
    """Record an incident; of two workers that do it at once, one does, and both wait for the same."""
    asked = Interrupt(
        id=_incident_id(cursor.lane, key, number),
        kind=InterruptKind.USER_REQUEST,
        payload=incident.to_plain(),
        prompt=f"{incident.prompt}{note}",
    )
    while True:
        newest = _newest(store, cursor)
        try:
            return interrupts.keep(store, context, cursor, newest, asked)
        except IdTaken:
            found = _find(store, cursor, asked.id)
            if found is None:
                raise
            return found
        except NotFound:
            if (_newest(store, cursor)) == newest:
                raise  # else it went meanwhile, and there is another


def settle_unknown(store: Backend, context: Context, cursor: Cursor, key: str, base: int) -> None:
    """Take an effect of which nobody knows for not done: a person who saw that says to do it again.

    An attempt after the first ``base`` is not meant: it was begun after they were asked.
    """
    effect = _effect(store, cursor, effect_key(key))
    if effect is not None and effect.outcome_unknown and effect.attempt <= base:
        ledger.settle(store, context, cursor, effect, Outcome.not_done(), BY_DECISION)


def _newest(store: Backend, cursor: Cursor) -> str:
    rows = store.find(Query(*cursor.lane, limit=1))
    if not rows:
        raise NotFound(
            f"branch {cursor.lane.branch!r} of thread {cursor.lane.thread!r} has no checkpoint to wait at",
            thread=cursor.lane.thread,
            hint="Save the state first: an operation that fails for good is recorded on the newest checkpoint",
        )
    return rows[0].id


def _effect(store: Backend, cursor: Cursor, key: str) -> EffectRecord | None:
    row = ledger.find(store, cursor.lane, key)
    return None if row is None else ledger.shown_of(row)


def _find(store: Backend, cursor: Cursor, name: str) -> InterruptRecord | None:
    stored = find_by_id(store, "interrupt", cursor.lane.namespace, name)
    if stored is None:
        return None
    found = interrupts.record_of(stored)
    if stored.lane != cursor.lane or not is_incident(found.interrupt.payload):
        raise Corrupted(f"interrupt {name} is not the incident it should be", thread=cursor.lane.thread)
    return found


def _incident_id(lane: LaneKey, key: str, number: int) -> str:
    return interrupts.reserved_id(INCIDENT, (*lane, key, str(number)))
