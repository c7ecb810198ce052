"""Checking: a store, or one thread of it, as findings. It changes nothing and goes on after everything it meets.

Checkpoints are verified by the flow that ``store.verify()`` uses. On top of that it reads what is kept beside them:
pending writes, the ledger of effects, interrupts with their decisions, sessions. All lists are read page by page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from backstay.errors import BackstayError
from backstay.model.ids import check_id
from backstay.store.base import Backend, Finding, LaneKey, Row
from backstay.store.effects import EffectRow
from backstay.store.finding import DAMAGED, GOOD
from backstay.store.interrupts import InterruptRow
from backstay.thread import interrupts as interrupts_of
from backstay.thread import ledger
from backstay.thread.access import access_of
from backstay.thread.cursor import Context
from backstay.thread.session import session_of
from backstay.thread.store import Store
from backstay.thread.verify import walk_lanes
from backstay.upkeep.report import WORDS, CheckReport

PAGE_ROWS = 200


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
    for part in _PARTS:
        try:
            _read(store, part, context.namespace, thread, tally)
        except BackstayError as error:
            tally.findings.append(Finding(DAMAGED, part.word, error.what, thread, namespace=context.namespace))
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


class _Part(NamedTuple):
    """A list of rows beside the checkpoints, and how each is verified."""

    word: str
    page: Callable[[str, str | None, int], Callable[[Backend], list[Any]]]
    verify: Callable[[Any], object]
    name: Callable[[Any], tuple[str, str | None, str | None]]  # where, checkpoint, key


def _read(store: Backend, part: _Part, namespace: str, thread: str | None, tally: _Tally) -> None:
    after = 0
    while True:
        rows = part.page(namespace, thread, after)(store)
        for row in rows:
            where, checkpoint, key = part.name(row)
            try:
                part.verify(row)
            except BackstayError as error:
                space, name, scope, branch = row.lane
                tally.findings.append(Finding(DAMAGED, where, error.what, name, checkpoint, key, branch, scope, space))
            else:
                tally.add(part.word, row.lane, where, checkpoint, key)
        if len(rows) < PAGE_ROWS or not hasattr(rows[-1], "number"):
            return
        after = rows[-1].number


def _effect_name(row: EffectRow) -> tuple[str, None, str]:
    return f"effect {row.key!r}", None, row.key


def _interrupt_name(row: InterruptRow) -> tuple[str, str, None]:
    return f"interrupt {row.id}", row.checkpoint, None


_PARTS = (
    _Part(
        "effects",
        lambda namespace, thread, after: lambda store: store.effects(namespace, thread, after, PAGE_ROWS),
        ledger.record_of,
        _effect_name,
    ),
    _Part(
        "interrupts",
        lambda namespace, thread, after: lambda store: store.interrupts(namespace, thread, False, after, PAGE_ROWS),
        interrupts_of.record_of,
        _interrupt_name,
    ),
    _Part(
        "sessions",  # the contract lists them all at once, and they have nothing that could be decoded but moments
        lambda namespace, thread, _: lambda store: store.sessions(namespace, thread, False),
        session_of,
        lambda row: (f"session {row.id}", None, None),
    ),
)
