"""Incidents: operations that retries and fallbacks could not save, recorded for a person to decide.

An incident is an interrupt on the newest checkpoint of the thread; its id comes from the operation's key. A person may
answer a week later, and another process may act on the answer. The incident names the operation and the error, never
values. The incidents of one key are numbered: their decisions and the ledger of effects say what is left to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from backstay.errors import Corrupted, IdTaken, InvalidInput, NotFound
from backstay.model.category import ErrorCategory, Failure
from backstay.model.decision import Decision, DecisionKind, Interrupt, InterruptKind
from backstay.model.ids import check_id
from backstay.model.runs import EffectRecord, EffectStatus, Outcome
from backstay.operations import interrupts, ledger
from backstay.operations.cursor import Cursor, Services
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.records import find_by_id
from backstay.store.base import Backend, Query


class ActionKind(StrEnum):
    """The kinds of actions after a failure; the value is the stored name."""

    RETRY = "retry"  # retry it, with all attempts
    SKIP = "skip"  # continue without it
    ABORT = "abort"  # give up
    MODIFY_CONFIG = "modify_config"  # change a setting, then retry
    SWITCH_TO_BACKUP = "switch_to_backup"  # use another service


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """A choice. ``key`` and ``value`` belong to ``modify_config``, ``service`` to ``switch_to_backup``."""

    kind: ActionKind
    key: str | None = None
    value: Any = field(default=None, hash=False, repr=False)  # it may be a secret
    service: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in tuple(ActionKind):
            raise InvalidInput(f"{self.kind!r:.40} is not an action", hint=f"Use one of {', '.join(ActionKind)}")
        object.__setattr__(self, "kind", ActionKind(self.kind))
        for name, owner in (("key", ActionKind.MODIFY_CONFIG), ("service", ActionKind.SWITCH_TO_BACKUP)):
            given = getattr(self, name)
            if self.kind is owner:
                check_id(given, f"{name} of the action")
            elif given is not None:
                raise InvalidInput(f"action {self.kind.value!r} takes no {name}", hint=f"Only {owner.value!r} does")

    @classmethod
    def retry(cls) -> RecoveryAction:
        """Retry it, with all attempts."""
        return cls(ActionKind.RETRY)

    @classmethod
    def skip(cls) -> RecoveryAction:
        """Continue without it; the value is None."""
        return cls(ActionKind.SKIP)

    @classmethod
    def abort(cls) -> RecoveryAction:
        """Give up."""
        return cls(ActionKind.ABORT)

    @classmethod
    def modify_config(cls, key: str, value: Any) -> RecoveryAction:
        """Change a setting, then retry."""
        return cls(ActionKind.MODIFY_CONFIG, key, value)

    @classmethod
    def switch_to_backup(cls, service: str) -> RecoveryAction:
        """Use another service."""
        return cls(ActionKind.SWITCH_TO_BACKUP, service=service)

    @property
    def tries_again(self) -> bool:
        """Return whether this calls the operation again."""
        return self.kind in (ActionKind.RETRY, ActionKind.MODIFY_CONFIG)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that this kind of action uses, as plain values."""
        plain: dict[str, Any] = {"action": self.kind.value}
        if self.kind is ActionKind.MODIFY_CONFIG:
            plain |= {"key": self.key, "value": self.value}
        elif self.kind is ActionKind.SWITCH_TO_BACKUP:
            plain["service"] = self.service
        return plain

    @classmethod
    def from_plain(cls, plain: object) -> RecoveryAction:
        """Return the action for the result of ``to_plain``, or for the name of an action that needs no details."""
        fields = {"action": plain} if isinstance(plain, str) else plain
        if not isinstance(fields, Mapping) or not set(fields) <= {"action", "key", "value", "service"}:
            raise InvalidInput("the answer is not an action", hint='For example {"action": "skip"}')
        return cls(fields.get("action"), fields.get("key"), fields.get("value"), fields.get("service"))  # type: ignore[arg-type]  # __post_init__ checks it

    def decision(self) -> Decision:
        """Return the decision for this action: ``thread.decide(record, action.decision(), by="ann")``."""
        if self.kind is ActionKind.RETRY:
            return Decision(kind=DecisionKind.APPROVE)
        if self.kind is ActionKind.ABORT:
            return Decision(kind=DecisionKind.REJECT)
        return Decision(kind=DecisionKind.MODIFY, value=self.to_plain())

    @classmethod
    def from_decision(cls, decision: Decision) -> RecoveryAction | None:
        """Return the action for a decision; None if the person deferred it."""
        match decision.kind:
            case DecisionKind.APPROVE:
                return cls.retry()
            case DecisionKind.REJECT:
                return cls.abort()
            case DecisionKind.MODIFY | DecisionKind.ANSWER:
                return cls.from_plain(decision.value)
            case DecisionKind.DEFER:
                return None
        raise InvalidInput("an incident has no node to reroute to", hint="Approve, modify, reject or defer it")

    def __str__(self) -> str:
        detail = self.key or self.service
        return f"{self.kind.value} {detail}" if detail else self.kind.value


INCIDENT = "incident"
BY_DECISION = "decision"
"""The name under which an effect is settled when a person decides to retry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failed operation, as the person who decides sees it."""

    operation: str
    failure: Failure
    attempts: int  # all calls so far, those of earlier processes included
    began_at: datetime  # when this process started its first attempt
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
        """Return the fields as plain values; settings are offered by name, without their values."""
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
        """Return the incident for the result of ``to_plain``."""
        return cls(
            operation=plain[INCIDENT],
            failure=Failure(ErrorCategory(plain["category"]), plain["error"], plain["message"], plain["hint"]),
            attempts=plain["attempts"],
            began_at=plain["began_at"],
            failed_at=plain["failed_at"],
            actions=tuple(RecoveryAction.from_plain(each) for each in plain["actions"]),
        )


def is_incident(payload: object) -> bool:
    """Return whether the payload of an interrupt is an incident."""
    return isinstance(payload, Mapping) and INCIDENT in payload and "failed_at" in payload


@dataclass(slots=True)
class OperationState:
    """Everything that the store knows about an operation."""

    effect: EffectRecord | None = None  # its entry in the ledger
    instead: tuple[str, Any] | None = None  # the fallback that succeeded, and its result
    numbered: int = 0  # how many incidents were decided
    waiting: InterruptRecord | None = None  # the incident that is not decided yet
    incident: Incident | None = None  # the newest
    action: RecoveryAction | None = None  # the last decision
    was_consumed: bool = False  # this process is the first to act on it
    base: int = 0  # calls made before a person last chose to retry
    config: dict[str, Any] = field(default_factory=dict)  # settings that decisions changed

    @property
    def attempts(self) -> int:
        """How many calls were started."""
        return 0 if self.effect is None else self.effect.attempt


def effect_key(key: str, fallback: str | None = None) -> str:
    """Return the key of an operation, or of its fallback, in the ledger."""
    return f"recovery:{key}" if fallback is None else f"recovery {fallback!r}:{key}"  # quoted: no two are the same


def load_operation_state(
    store: Backend, services: Services, cursor: Cursor, key: str, fallbacks: tuple[str, ...]
) -> OperationState:
    """Read the state of an operation and consume the decision on it; ask again if that decision decides nothing."""
    # An incident needs a checkpoint. If there is none, refuse now, not after the failure.
    _newest_checkpoint(store, cursor)
    stored = OperationState(effect=_effect(store, cursor, effect_key(key)))
    note = _read_decisions(store, services, cursor, key, stored)
    for name in fallbacks:
        done = _effect(store, cursor, effect_key(key, name))
        if done is not None and done.status is EffectStatus.DONE and done.error is None:
            stored.instead = (name, done.result)
            return stored
    if note is not None and stored.incident is not None:
        stored.waiting = record_incident(store, services, cursor, key, stored.numbered, stored.incident, note)
    elif stored.action is not None and stored.action.tries_again:
        settle_unknown(store, services, cursor, key, stored.base)
    return stored


def _read_decisions(store: Backend, services: Services, cursor: Cursor, key: str, stored: OperationState) -> str | None:
    """Read the incidents in order; if the last answer decides nothing, return a note for the next question."""
    note: str | None = None
    while (found := _find_incident(store, cursor, _incident_id(cursor, key, stored.numbered))) is not None:
        note = None
        stored.incident = Incident.from_plain(found.interrupt.payload)
        if found.decision is None:
            stored.waiting = found
            break
        if found.pending:
            interrupts.consume(store, services, cursor, found, None)
        stored.numbered += 1
        try:
            action = RecoveryAction.from_decision(found.decision)
            if action is None:
                note = ""
            else:
                check_offered(action, stored.incident.actions)
        except InvalidInput as error:
            action, note = None, f" (The last answer cannot be used: {error.what})"
        stored.action, stored.was_consumed = action, found.pending and action is not None
        if action is not None and action.tries_again:
            stored.base = stored.incident.attempts
            if action.key is not None:
                stored.config[action.key] = action.value
    return note


def check_offered(action: RecoveryAction, offered: tuple[RecoveryAction, ...]) -> None:
    """Raise InvalidInput unless an action was offered."""
    if not any((each.kind, each.key, each.service) == (action.kind, action.key, action.service) for each in offered):
        raise InvalidInput(
            f"{action} was not offered", hint=f"Choose one of: {', '.join(str(each) for each in offered)}"
        )


def record_incident(
    store: Backend, services: Services, cursor: Cursor, key: str, number: int, incident: Incident, note: str = ""
) -> InterruptRecord:
    """Record an incident. If two workers do so at the same time, both get the same record."""
    asked = Interrupt(
        id=_incident_id(cursor, key, number),
        kind=InterruptKind.USER_REQUEST,
        payload=incident.to_plain(),
        prompt=f"{incident.prompt}{note}",
    )
    while True:
        newest = _newest_checkpoint(store, cursor)
        try:
            return interrupts.keep(store, services, cursor, newest, asked)
        except IdTaken:
            found = _find_incident(store, cursor, asked.id)
            if found is None:
                raise
            return found
        except NotFound:
            if _newest_checkpoint(store, cursor) == newest:
                raise  # otherwise another process deleted that checkpoint, and there is a newer one


def settle_unknown(store: Backend, services: Services, cursor: Cursor, key: str, base: int) -> None:
    """Settle an effect with an unknown outcome as not done, because a person decided to retry it.

    Attempts after the first ``base`` started after the question, so the answer does not cover them.
    """
    effect = _effect(store, cursor, effect_key(key))
    if effect is not None and effect.outcome_unknown and effect.attempt <= base:
        ledger.settle(store, services, cursor, effect, Outcome.not_done(), BY_DECISION)


def _newest_checkpoint(store: Backend, cursor: Cursor) -> str:
    rows = store.find(Query(*cursor.branch, limit=1))
    if not rows:
        raise NotFound(
            f"branch {cursor.branch.name!r} of thread {cursor.branch.thread!r} has no checkpoint",
            thread=cursor.branch.thread,
            hint="Save a checkpoint first: if the operation fails, the question to a person is recorded on it",
        )
    return rows[0].id


def _effect(store: Backend, cursor: Cursor, key: str) -> EffectRecord | None:
    row = ledger.find(store, cursor.branch, key)
    return None if row is None else ledger.shown_of(row)


def _find_incident(store: Backend, cursor: Cursor, name: str) -> InterruptRecord | None:
    stored = find_by_id(store, "interrupt", cursor.branch.namespace, name)
    if stored is None:
        return None
    found = interrupts.record_of(stored)
    if stored.branch != cursor.branch or not is_incident(found.interrupt.payload):
        raise Corrupted(
            f"interrupt {name} should be an incident of branch {cursor.branch.name!r}, but it is not",
            thread=cursor.branch.thread,
            hint="Run store.check() and look at its report",
        )
    return found


def _incident_id(cursor: Cursor, key: str, number: int) -> str:
    return interrupts.reserved_id(INCIDENT, (*cursor.branch, key, str(number)))
