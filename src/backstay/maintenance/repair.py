"""Repair a store from what a check found. By default this only reports the plan; pass ``dry_run=False`` to apply it.

A good checkpoint stays good: bytes are deleted only when no damaged checkpoint remains, and restored only where no good
checkpoint keeps other bytes. Checkpoints that cannot be restored are moved to a quarantine folder if the caller names
one; otherwise they stay in the store, and the report lists them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from backstay.errors import Corrupted, InvalidInput
from backstay.maintenance.check import check
from backstay.maintenance.quarantine import describe, write_quarantine
from backstay.maintenance.report import RepairAction, Report, is_about_checkpoint, may_hide_checkpoints
from backstay.maintenance.restore import RestorePlan, plan_restore
from backstay.operations.cursor import Access
from backstay.store.atomic import make_directory
from backstay.store.base import Backend, BranchKey, Finding, Row
from backstay.store.finding import DAMAGED, REBUILD, RESTORE
from backstay.store.leases import fenced

QUARANTINE = "quarantine"
_MOVED_OUT = "it is moved out of the store into a file"


def repair(
    access: Access,
    report: Report | None = None,
    *,
    backup: Access | None = None,
    quarantine_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = True,
    force: bool = False,
) -> Report:
    """Plan the repair of what a check found; with ``dry_run=False`` apply the plan and check again.

    ``Store.repair`` describes the arguments.
    """
    store, namespace = access.store, access.services.namespace
    before = check(store, access.services) if report is None else report
    if before.namespace != namespace:
        raise InvalidInput(
            f"the report is about namespace {before.namespace!r}, but the store was opened with {namespace!r}",
            hint="Call store.check() and pass its report",
        )
    # If the store cannot read a part of itself but can rebuild it, do only that: what else is needed is not known yet.
    unread = [finding for finding in before.findings if finding.kind == DAMAGED and finding.repair == REBUILD]
    if before.thread is None and unread:
        actions = tuple(map(_rebuild_action, unread))
        if dry_run:
            left = tuple(finding for finding in before.findings if finding not in unread)
            return replace(before, findings=left, before=before, actions=actions)
        store.rebuild(False, False)
        return replace(check(store, access.services), before=before, actions=actions, applied=True)
    plan = plan_restore(access, before.damaged, backup)
    to_quarantine = [] if quarantine_dir is None else plan.unrepairable
    # It is known which bytes are unneeded only when no checkpoint is damaged any more, and none can be hidden.
    hidden = bool(plan.unreadable) or any(map(may_hide_checkpoints, before.findings))
    drop = not hidden and len(to_quarantine) == len(plan.unrepairable)
    rebuild = _rebuildable(store, drop) if before.thread is None else []  # a rebuild changes the whole store
    quarantines = [
        RepairAction(QUARANTINE, f"checkpoint {row.id}", _MOVED_OUT, row.branch.thread, row.id, row.branch.name)
        for row in to_quarantine
    ]
    actions = (*plan.actions, *quarantines, *map(_rebuild_action, rebuild))
    if dry_run or not actions:
        left = _left(before, plan, to_quarantine, rebuild)
        return replace(before, findings=left, before=before, actions=actions)
    if not force:
        _refuse_leased(store, namespace, [*plan.restored, *to_quarantine], rebuild)
    if plan.overlay.blobs or plan.overlay.chunks or plan.rows:
        store.restore(plan.overlay.blobs, plan.overlay.chunks, plan.rows)
    files = []
    for row in to_quarantine:
        assert quarantine_dir is not None
        make_directory(Path(quarantine_dir))
        why = [finding for finding in before.findings if finding.checkpoint == row.id]
        # The file is durable before the checkpoint leaves the store, so a crash in between leaves both.
        files.append(str(write_quarantine(Path(quarantine_dir), describe(plan.overlay, row, why))))
        store.quarantine(namespace, row.id, force)
    # Rewritten and quarantined checkpoints may leave bytes behind that only they needed.
    if before.thread is None and (rebuild or _rebuildable(store, drop)):
        store.rebuild(False, drop)
    after = check(store, access.services, before.thread)
    return replace(after, before=before, actions=actions, applied=True, files=tuple(files))


def _rebuildable(store: Backend, drop: bool) -> list[Finding]:
    try:
        return store.rebuild(True, drop)
    except Corrupted:  # the store can neither read nor rebuild a part of itself, as the check reports
        return []


def _rebuild_action(finding: Finding) -> RepairAction:
    return RepairAction(REBUILD, finding.where, finding.what, finding.thread, finding.checkpoint, finding.branch)


def _left(before: Report, plan: RestorePlan, to_quarantine: list[Row], rebuild: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings that the plan does not resolve."""
    solved = {row.id for row in (*plan.restored, *to_quarantine)}
    all_solved = solved.issuperset(before.damaged)

    def is_left(finding: Finding) -> bool:
        if is_about_checkpoint(finding):
            return finding.checkpoint not in solved
        if finding.repair == RESTORE:  # bytes that checkpoints are missing; each checkpoint has its own finding
            return not all_solved
        return finding not in rebuild

    return tuple(filter(is_left, before.findings))


def _refuse_leased(store: Backend, namespace: str, rows: list[Row], rebuild: list[Finding]) -> None:
    """Raise Fenced if a process holds a lease on a branch that the repair would change."""
    touched = {row.branch for row in rows}
    touched |= {
        BranchKey(finding.namespace, finding.thread, finding.scope, finding.branch)
        for finding in rebuild
        if finding.thread is not None and finding.branch is not None
    }
    for lease in store.leases(namespace, None, False):
        if lease.branch in touched and lease.left_us > 0:
            raise fenced(lease.branch, 0, lease.epoch, lease.owner, lease.left_us)
