"""Checking: a store, or one thread of it, as findings. It changes nothing and goes on after everything it meets.

Checkpoints are verified by the function that ``store.verify()`` uses. On top of that it reads what is kept beside them:
pending writes, the ledger of effects, interrupts with their decisions, sessions. All lists are read page by page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backstay.errors import BackstayError
from backstay.model.ids import check_id
from backstay.store.base import Backend, Finding, LaneKey, Row
from backstay.store.finding import DAMAGED, GOOD
from backstay.store.records import Kind, Record
from backstay.thread import interrupts, ledger
from backstay.thread.access import access_of
from backstay.thread.cursor import Context
from backstay.thread.records import all_records
from backstay.thread.session import session_of
from backstay.thread.store import Store
from backstay.thread.verify import walk_lanes
from backstay.upkeep.report import WORDS, CheckReport


def check(store: Store, *, thread: str | None = None, every: bool = False) -> CheckReport:
    """Check everything in the store's namespace, and the store below it; or only what belongs to one thread.

    ``every`` also lists what is good, one by one.
    """
    if thread is not None:
        check_id(thread, "thread id")
    access = access_of(store)
    return check_backend(access.store, access.context, thread, every)


def check_backend(store: Backend, context: Context, thread: str | None, every: bool) -> CheckReport:
    """Check as ``check`` does."""
    tally = _Tally(every)
    if thread is None:
        try:
            tally.findings += store.check()
        except BackstayError as error:
            tally.findings.append(Finding(DAMAGED, "store", error.what))
    tally.findings += walk_lanes(store, context, thread, tally.note_checkpoint)
    for kind in _VERIFIED_BY:
        try:
            _read(store, kind, context.namespace, thread, tally)
        except BackstayError as error:
            tally.findings.append(Finding(DAMAGED, f"{kind}s", error.what, thread, namespace=context.namespace))
    findings = tuple(dict.fromkeys(tally.findings))
    return CheckReport(store.url, context.namespace, thread, tally.good, findings, tuple(tally.entries))


@dataclass(slots=True)
class _Tally:
    """Counts what is good and keeps what is not."""

    every: bool
    good: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORDS, 0))
    findings: list[Finding] = field(default_factory=list)
    entries: list[Finding] = field(default_factory=list)

    def note_checkpoint(self, row: Row, found: list[Finding]) -> None:
        if found:
            self.findings += found
        else:
            self.add("checkpoints", row.lane, f"checkpoint {row.id}", row.id)
            self.good["writes"] += len(row.writes)

    def add(self, word: str, lane: LaneKey, where: str, checkpoint: str | None, key: str | None = None) -> None:
        """Count something that is good."""
        self.good[word] += 1
        if self.every:
            namespace, thread, scope, branch = lane
            self.entries.append(
                Finding(GOOD, where, "every byte verified", thread, checkpoint, key, branch, scope, namespace)
            )


def _read(store: Backend, kind: Kind, namespace: str, thread: str | None, tally: _Tally) -> None:
    """Verify all records of a kind, page by page."""
    for stored in all_records(store, kind, namespace, thread):
        key = stored.key if kind == "effect" else None
        where = f"{kind} {stored.key if key is None else repr(key)}"
        try:
            _VERIFIED_BY[kind](stored)
        except BackstayError as error:
            space, name, scope, branch = stored.lane
            finding = Finding(DAMAGED, where, error.what, name, stored.checkpoint, key, branch, scope, space)
            tally.findings.append(finding)
        else:
            tally.add(f"{kind}s", stored.lane, where, stored.checkpoint, key)


_VERIFIED_BY: dict[Kind, Callable[[Record], object]] = {
    "effect": ledger.record_of,
    "interrupt": interrupts.record_of,
    "session": session_of,
}
