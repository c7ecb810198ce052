"""What a person can choose when nothing else helped, and how the choice travels through the inbox of interrupts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.decision import Decision, DecisionKind
from backstay.model.ids import check_id


class ActionKind(StrEnum):
    """What is to be done; the value is the name on the wire."""

    RETRY = "retry"  # try it again, with all attempts
    SKIP = "skip"  # go on without it
    ABORT = "abort"  # give up
    MODIFY_CONFIG = "modify_config"  # change a setting, then try it again
    SWITCH_TO_BACKUP = "switch_to_backup"  # have another service do it


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """One choice. ``key`` and ``value`` belong to a change of settings, ``service`` to a switch."""

    kind: ActionKind
    key: str | None = None
    value: Any = field(default=None, hash=False, repr=False)  # it may be a secret
    service: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in tuple(ActionKind):
            raise InvalidInput(f"{self.kind!r:.40} is no action", hint=f"Use one of {', '.join(ActionKind)}")
        object.__setattr__(self, "kind", ActionKind(self.kind))
        for name, owner in (("key", ActionKind.MODIFY_CONFIG), ("service", ActionKind.SWITCH_TO_BACKUP)):
            given = getattr(self, name)
            if self.kind is owner:
                check_id(given, f"{name} of the action")
            elif given is not None:
                raise InvalidInput(f"action {self.kind.value!r} takes no {name}", hint=f"Only {owner.value!r} does")

    @classmethod
    def retry(cls) -> RecoveryAction:
        """Try it again, with all attempts."""
        return cls(ActionKind.RETRY)

    @classmethod
    def skip(cls) -> RecoveryAction:
        """Go on without it; the value is None."""
        return cls(ActionKind.SKIP)

    @classmethod
    def abort(cls) -> RecoveryAction:
        """Give up."""
        return cls(ActionKind.ABORT)

    @classmethod
    def modify_config(cls, key: str, value: Any) -> RecoveryAction:
        """Change a setting, then try it again."""
        return cls(ActionKind.MODIFY_CONFIG, key, value)

    @classmethod
    def switch_to_backup(cls, service: str) -> RecoveryAction:
        """Have another service do it."""
        return cls(ActionKind.SWITCH_TO_BACKUP, service=service)

    @property
    def tries_again(self) -> bool:
        """Tell whether the operation is to be called again."""
        return self.kind in (ActionKind.RETRY, ActionKind.MODIFY_CONFIG)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that say something, as plain values."""
        plain: dict[str, Any] = {"action": self.kind.value}
        if self.kind is ActionKind.MODIFY_CONFIG:
            plain |= {"key": self.key, "value": self.value}
        elif self.kind is ActionKind.SWITCH_TO_BACKUP:
            plain["service"] = self.service
        return plain

    @classmethod
    def from_plain(cls, plain: object) -> RecoveryAction:
        """Make an action of what ``to_plain`` gave; its name alone does for those without details."""
        fields = {"action": plain} if isinstance(plain, str) else plain
        if not isinstance(fields, Mapping) or not set(fields) <= {"action", "key", "value", "service"}:
            raise InvalidInput("not an action", hint='For example {"action": "skip"}')
        return cls(fields.get("action"), fields.get("key"), fields.get("value"), fields.get("service"))  # type: ignore[arg-type]  # checked by it

    def decision(self) -> Decision:
        """Return the decision that says this: ``thread.decide(shown, action.decision(), by="ann")``."""
        if self.kind is ActionKind.RETRY:
            return Decision(kind=DecisionKind.APPROVE)
        if self.kind is ActionKind.ABORT:
            return Decision(kind=DecisionKind.REJECT)
        return Decision(kind=DecisionKind.MODIFY, value=self.to_plain())

    @classmethod
    def from_decision(cls, decision: Decision) -> RecoveryAction | None:
        """Return the action that a decision says; None if it is to be decided later."""
        match decision.kind:
            case DecisionKind.APPROVE:
                return cls.retry()
            case DecisionKind.REJECT:
                return cls.abort()
            case DecisionKind.MODIFY:
                return cls.from_plain(decision.value)
            case DecisionKind.DEFER:
                return None
        raise InvalidInput("there is no node to be rerouted to", hint="Approve, modify, reject or defer it")

    def __str__(self) -> str:
        detail = self.key or self.service
        return f"{self.kind.value} {detail}" if detail else self.kind.value
