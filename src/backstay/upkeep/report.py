"""What a check and a repair say: values that a person can read and a program can store, under names that stay."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay.store.base import Finding
from backstay.store.finding import DAMAGED

WORDS = ("checkpoints", "writes", "effects", "interrupts", "sessions")
"""What is counted when it is good."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check looked at and found. It is true if nothing is wrong."""

    url: str
    namespace: str
    thread: str | None  # None = the whole namespace, and the store below it
    good: Mapping[str, int]  # how many of each of ``WORDS`` are
    findings: tuple[Finding, ...]
    entries: tuple[Finding, ...] = ()  # everything that is good, one by one, if that was asked for

    @property
    def counts(self) -> dict[str, int]:
        """Return how many findings there are of each kind."""
        return dict(sorted(Counter(finding.kind for finding in self.findings).items()))

    @property
    def damaged(self) -> tuple[str, ...]:
        """Return the ids of the checkpoints in which something is wrong, each once."""
        names = (finding.checkpoint for finding in self.findings if is_about_state(finding))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values under fixed names."""
        return {
            "url": self.url,
            "namespace": self.namespace,
            "thread": self.thread,
            "ok": bool(self),
            "good": dict(self.good),
            "counts": self.counts,
            "findings": [finding.to_dict() for finding in self.findings],
            "entries": [finding.to_dict() for finding in self.entries],
        }

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __bool__(self) -> bool:
        return all(finding.is_harmless for finding in self.findings)

    def __str__(self) -> str:
        good = ", ".join(f"{count} {word}" for word, count in self.good.items() if count) or "nothing stored"
        if not self.findings:
            return f"{good}: all good"
        lines = [f"good: {good}; {len(self.findings)} findings:"]
        return "\n".join([*lines, *(f"  {finding}{_helps(finding)}" for finding in self.findings)])


def is_about_state(finding: Finding) -> bool:
    """Tell whether a finding is about a checkpoint's own record, which can be restored or taken out."""
    return finding.checkpoint is not None and finding.where.startswith("checkpoint ")


def may_hide_rows(finding: Finding) -> bool:
    """Tell whether a part of the store cannot be read, so that there may be checkpoints of which nobody knows."""
    beside = finding.where.startswith(("effect ", "session "))
    return finding.kind == DAMAGED and finding.checkpoint is None and not beside


def _helps(finding: Finding) -> str:
    return f" ({finding.repair} may help)" if finding.repair else ""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a repair. ``name``: rebuild, restore, restore from backup, quarantine."""

    name: str
    where: str
    what: str
    thread: str | None = None
    checkpoint: str | None = None
    branch: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """Return it as plain values under fixed names."""
        return {slot: getattr(self, slot) for slot in self.__slots__}

    def __str__(self) -> str:
        return f"{self.name}: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did, or would do. It is true if nothing is wrong afterwards, or would not be."""

    dry_run: bool
    before: CheckReport
    after: CheckReport | None  # None if nothing was changed
    actions: tuple[Action, ...]
    left: tuple[Finding, ...]  # what stays wrong
    files: tuple[str, ...] = field(default=())  # what was quarantined

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values under fixed names."""
        return {
            "dry_run": self.dry_run,
            "ok": bool(self),
            "before": self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
            "actions": [action.to_dict() for action in self.actions],
            "left": [finding.to_dict() for finding in self.left],
            "files": list(self.files),
        }

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __bool__(self) -> bool:
        return all(finding.is_harmless for finding in self.left)

    def __str__(self) -> str:
        if not self.before.findings and not self.actions:
            return "nothing to repair"
        verb = "would be done" if self.dry_run else "done"
        lines = [f"{len(self.before.findings)} findings, {len(self.actions)} actions {verb}, {len(self.left)} left"]
        lines += [f"  {action}" for action in self.actions]
        lines += [f"  left: {finding}" for finding in self.left]
        return "\n".join(lines)
