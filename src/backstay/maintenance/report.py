"""The report of a check or a repair: one type for both, readable by people and by programs. The names are stable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backstay.errors import counted
from backstay.store.base import Finding
from backstay.store.finding import DAMAGED

COUNTED = ("checkpoints", "writes", "effects", "interrupts", "runs")
"""The kinds of records that a check counts when they are good."""


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One action of a repair. ``name`` is rebuild, restore, restore from backup or quarantine."""

    name: str
    where: str
    what: str
    thread: str | None = None
    checkpoint: str | None = None
    branch: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """Return the action as plain values under stable names."""
        return {slot: getattr(self, slot) for slot in self.__slots__}

    def __str__(self) -> str:
        return f"{self.name}: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check or a repair. It is true if nothing is wrong.

    After a repair, ``findings`` lists the problems that remain (with ``dry_run``: that would remain), ``actions`` the
    repairs, and ``before`` is the check that the repair was based on.
    """

    url: str
    namespace: str
    thread: str | None  # None: the whole namespace, and the store below it
    good: Mapping[str, int]  # how many of each of ``COUNTED`` are good
    findings: tuple[Finding, ...]
    entries: tuple[Finding, ...] = ()  # every good record, if the caller asked for them
    before: Report | None = None  # only after a repair
    actions: tuple[RepairAction, ...] = ()
    applied: bool = False  # whether the actions were carried out; a dry run only reports them
    files: tuple[str, ...] = ()  # paths of the quarantined checkpoints

    @property
    def counts(self) -> dict[str, int]:
        """Return how many findings there are of each kind."""
        return dict(sorted(Counter(finding.kind for finding in self.findings).items()))

    @property
    def damaged(self) -> tuple[str, ...]:
        """Return the ids of all checkpoints with a problem, each once."""
        names = (finding.checkpoint for finding in self.findings if is_about_checkpoint(finding))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values under stable names."""
        plain: dict[str, Any] = {
            "url": self.url,
            "namespace": self.namespace,
            "thread": self.thread,
            "ok": bool(self),
            "good": dict(self.good),
            "counts": self.counts,
            "findings": [finding.to_dict() for finding in self.findings],
            "entries": [finding.to_dict() for finding in self.entries],
        }
        if self.before is not None:
            plain["before"] = self.before.to_dict()
            plain["actions"] = [action.to_dict() for action in self.actions]
            plain["applied"] = self.applied
            plain["files"] = list(self.files)
        return plain

    def to_json(self) -> str:
        """Return the report as JSON."""
        import json

        return json.dumps(self.to_dict(), indent=2)

    def __bool__(self) -> bool:
        return all(finding.is_harmless for finding in self.findings)

    def __str__(self) -> str:
        if self.before is not None:
            return self._repair_text(self.before)
        good = ", ".join(counted(count, word[:-1]) for word, count in self.good.items() if count) or "nothing stored"
        if not self.findings:
            return f"{good}: all good"
        lines = [f"good: {good}; {counted(len(self.findings), 'finding')}:"]
        for finding in self.findings:
            lines.append(f"  {finding}" + (f" ({finding.repair} may help)" if finding.repair else ""))
        return "\n".join(lines)

    def _repair_text(self, before: Report) -> str:
        if not before.findings and not self.actions:
            return "nothing to repair"
        done = "done" if self.applied else "planned"
        actions = f"{counted(len(self.actions), 'action')} {done}"
        lines = [f"{counted(len(before.findings), 'finding')}, {actions}, {len(self.findings)} left"]
        lines += [f"  {action}" for action in self.actions]
        lines += [f"  left: {finding}" for finding in self.findings]
        return "\n".join(lines)


def is_about_checkpoint(finding: Finding) -> bool:
    """Return whether a finding is about a checkpoint's own record, which can be restored or quarantined."""
    return finding.checkpoint is not None and finding.where.startswith("checkpoint ")


def may_hide_checkpoints(finding: Finding) -> bool:
    """Return whether a part of the store is unreadable, so that it may hold checkpoints that no list shows."""
    is_other_record = finding.where.startswith(("effect ", "run "))
    return finding.kind == DAMAGED and finding.checkpoint is None and not is_other_record
