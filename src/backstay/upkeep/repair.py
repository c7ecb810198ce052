"""Repairing: an explicit plan of named actions. It is only told unless ``dry_run=False``, and nothing else is done.

A checkpoint that was good stays good: bytes are dropped only when nothing is damaged any more, and put back only where
no good checkpoint is. What cannot be made good is taken out only if there is a folder to put it into; else it stays
where it is and is listed.
"""

from __future__ import annotations

import os
from pathlib import Path

from backstay.errors import Corrupted, InvalidInput
from backstay.store.atomic import make_directory
from backstay.store.base import Finding, LaneKey, Row
from backstay.store.finding import DAMAGED, REBUILD, RESTORE
from backstay.store.leases import fenced
from backstay.thread.access import access_of
from backstay.thread.store import Store
from backstay.upkeep.check import check
from backstay.upkeep.plan import Place, Plan, plan_restore
from backstay.upkeep.quarantine import describe, write_quarantine
from backstay.upkeep.report import Action, CheckReport, RepairReport, is_about_state, may_hide_rows

QUARANTINE = "quarantine"


def repair(
    store: Store,
    report: CheckReport | None = None,
    *,
    backup: Store | None = None,
    quarantine_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = True,
    force: bool = False,
) -> RepairReport:
    """Say what would be done about what a check found; with ``dry_run=False`` do it, and check again.

    ``report`` is that of a check made before, of the store or of one thread; without it the whole store is checked now.
    Right bytes are looked for in the store itself, then in ``backup``. With ``quarantine_dir`` what stays damaged is
    taken out and written to files there. Where the store cannot read its own records, only that is put in order first:
    repair again for what it shows. While leases run on a branch that would be changed it raises Fenced and does
    nothing, unless ``force``.
    """
    before = check(store) if report is None else report
    if before.namespace != store.namespace:
        raise InvalidInput("the report is of another namespace than the store", hint="Check this store again")
    here = Place(access_of(store).store, store.namespace)
    if before.thread is None and (unread := [finding for finding in before.findings if _hides_others(finding)]):
        return _read_anew(store, before, unread, dry_run)
    plan = plan_restore(
        here, before.damaged, None if backup is None else Place(access_of(backup).store, backup.namespace)
    )
    folder = None if quarantine_dir is None else Path(quarantine_dir)
    doomed = [] if folder is None else plan.beyond
    # Only when no checkpoint is damaged any more, and none can be hidden, is it known what nothing needs.
    hidden = bool(plan.unreadable) or any(map(may_hide_rows, before.findings))
    drop = not hidden and len(doomed) == len(plan.beyond)
    rebuild = _rebuildable(here, drop) if before.thread is None else []  # it is about the whole store
    actions = (*plan.actions, *map(_quarantining, doomed), *map(_rebuilding, rebuild))
    if dry_run or not actions:
        return RepairReport(dry_run, before, None, actions, _left(before, plan, doomed, rebuild))
    if not force:
        _refuse_leased(here, [*plan.restored, *doomed], rebuild)
    files = _apply(here, plan, doomed, folder, before, force)
    if before.thread is None and (rebuild or _rebuildable(here, drop)):
        here.backend.rebuild(False, drop)  # also what only those needed that were taken out or written anew
    after = check(store, thread=before.thread)
    return RepairReport(False, before, after, actions, after.findings, files)


def _hides_others(finding: Finding) -> bool:
    """Tell whether the store cannot read a part of itself, but can put that in order; before that little is known."""
    return finding.kind == DAMAGED and finding.repair == REBUILD


def _read_anew(store: Store, before: CheckReport, unread: list[Finding], dry_run: bool) -> RepairReport:
    actions = tuple(map(_rebuilding, unread))
    if dry_run:
        left = tuple(finding for finding in before.findings if finding not in unread)
        return RepairReport(True, before, None, actions, left)
    access_of(store).store.rebuild(False, False)
    after = check(store)
    return RepairReport(False, before, after, actions, after.findings)


# Planning ---------------------------------------------------------------------------------------------------------


def _rebuildable(here: Place, drop: bool) -> list[Finding]:
    try:
        return here.backend.rebuild(True, drop)
    except Corrupted:  # it cannot read itself, nor help that: the check says so
        return []


def _rebuilding(finding: Finding) -> Action:
    return Action(REBUILD, finding.where, finding.what, finding.thread, finding.checkpoint, finding.branch)


def _quarantining(row: Row) -> Action:
    what = "it is taken out and kept in a file"
    return Action(QUARANTINE, f"checkpoint {row.id}", what, row.lane.thread, row.id, row.lane.branch)


def _left(before: CheckReport, plan: Plan, doomed: list[Row], rebuild: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings that the plan does nothing about."""
    solved = {row.id for row in (*plan.restored, *doomed)}
    whole = solved.issuperset(before.damaged)

    def is_left(finding: Finding) -> bool:
        if is_about_state(finding):
            return finding.checkpoint not in solved
        if finding.repair == RESTORE:  # bytes that checkpoints lack, and these are told of one by one
            return not whole
        return finding not in rebuild

    return tuple(finding for finding in before.findings if is_left(finding))


# Doing ------------------------------------------------------------------------------------------------------------


def _refuse_leased(here: Place, rows: list[Row], rebuild: list[Finding]) -> None:
    touched = {row.lane for row in rows}
    touched |= {
        LaneKey(finding.namespace, finding.thread, finding.scope, finding.branch)
        for finding in rebuild
        if finding.thread is not None and finding.branch is not None
    }
    for lease in here.backend.leases(here.namespace, None, False):
        if lease.lane in touched and lease.left_us > 0:
            raise fenced(lease.lane, 0, lease.epoch, lease.owner, lease.left_us)


def _apply(
    here: Place, plan: Plan, doomed: list[Row], folder: Path | None, before: CheckReport, force: bool
) -> tuple[str, ...]:
    overlay = plan.overlay
    if overlay.blobs or overlay.chunks or plan.rows:
        here.backend.restore(overlay.blobs, overlay.chunks, plan.rows)
    if folder is None or not doomed:
        return ()
    make_directory(folder)
    files = []
    for row in doomed:
        why = [finding for finding in before.findings if finding.checkpoint == row.id]
        # The file is there for good before anything is taken out: dying in between leaves both.
        files.append(str(write_quarantine(folder, describe(overlay, row, why))))
        here.backend.quarantine(here.namespace, row.id, force)
    return tuple(files)
