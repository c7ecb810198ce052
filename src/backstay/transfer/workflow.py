"""Workflow checkpoint files, ``<base>/<id>.json``: into a store and back.

What is imported can be used through ``compat.workflow`` and with ``backstay.open`` alike. A file names its graph and,
if a newer version wrote it, its run. A run is a thread; without one the given thread is, or the one named like the
graph. The files say nothing of their order but when they were made: so that is the order, and then the count of steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from backstay.compat import shelf
from backstay.compat.sessions.ids import check_safe
from backstay.compat.workflow import Checkpoint, FileCheckpointStore, InterruptType, document
from backstay.compat.workflow import store as face
from backstay.errors import BackstayError, StoreError
from backstay.model.checkpoint import Checkpoint as Stored
from backstay.thread.access import access_of
from backstay.thread.store import Store
from backstay.transfer.intake import Arrival, Intake, grouped, putting
from backstay.transfer.progress import Progress
from backstay.transfer.report import ExportReport, ImportReport, Note

_ORDER = "created_at, then step_count: the files hold nothing else"


def import_workflow(
    base: str | os.PathLike[str], store: Store, *, thread: str | None = None, progress: Progress | bool | None = None
) -> ImportReport:
    """Store the checkpoint files of a directory. ``thread`` is for those that name no run; None = the graph's name."""
    intake = Intake(store, _ORDER)
    found: list[tuple[Path, Checkpoint]] = []
    for entry in FileCheckpointStore(base)._files.scan():
        if entry.document is None:
            problem = entry.problem
            intake.lacks(str(entry.path), "cannot be read" if problem is None else problem.what)
            continue
        if not entry.document.checked:
            intake.notes.append(Note("has no checksum, so nobody can tell whether it is as written", str(entry.path)))
        found.append((entry.path, entry.document.checkpoint))
    found.sort(key=lambda pair: (pair[1].created_at, pair[1].step_count, pair[1].id))
    return intake.take_all(grouped(_arrival(path, each, thread) for path, each in found), progress)


def _arrival(path: Path, checkpoint: Checkpoint, thread: str | None) -> tuple[str, Arrival]:
    owner = checkpoint.run_id or thread or checkpoint.graph_name or checkpoint.id
    draft = replace(face._draft(checkpoint.to_dict()), thread=owner)
    return owner, Arrival(checkpoint.id, str(path), putting(face._FACE, draft, face._wire))


def export_workflow(
    store: Store, base: str | os.PathLike[str], *, threads: Iterable[str] | None = None
) -> ExportReport:
    """Write the checkpoints of threads, or of all, as files of a directory; the report says what was left out."""
    files = FileCheckpointStore(base)._files
    names = [meta.thread_id for meta in store.threads()][::-1] if threads is None else list(threads)
    notes: list[Note] = []
    written = 0
    for name in names:
        for meta in reversed(list(store.thread(name).history(branch="*"))):
            try:
                checkpoint = store.get(meta.id)
                if checkpoint is None:
                    continue
                plain = _plain(checkpoint, store)
                files.write(check_safe(checkpoint.id, "checkpoint id"), document.to_bytes(plain))
            except StoreError:
                raise
            except BackstayError as error:
                notes.append(Note(f"left out: {error.what}", "", name, meta.id))
                continue
            written += 1
            lost = [field for field in ("tags", "label", "summary", "writes", "frames") if getattr(checkpoint, field)]
            if lost:
                notes.append(Note(f"has no place there: {', '.join(lost)}", "", name, meta.id))
    return ExportReport(threads=len(names), checkpoints=written, notes=tuple(notes))


def _plain(checkpoint: Stored, store: Store) -> dict[str, object]:
    """Return a checkpoint in the files' form: as it came in, if it came through that face."""
    access = access_of(store)
    found = shelf.get(access.store, access.context, checkpoint.id)
    if found is not None and found.meta.metadata.get(shelf.FACE) == face._FACE:
        return face._wire(found)
    state = {key: value for key, value in checkpoint.state.items() if key != "pending_action"}
    return Checkpoint(
        id=checkpoint.id,
        graph_name=checkpoint.graph or checkpoint.thread_id,
        current_node=checkpoint.next_node or "",
        state_snapshot=state,
        path=list(checkpoint.path),
        step_count=checkpoint.step,
        created_at=checkpoint.created_at,
        pending_action=checkpoint.pending_action,
        interrupt_type=checkpoint.interrupt.kind if checkpoint.interrupt else InterruptType("userrequest"),
        run_id=checkpoint.run_id,
        extra=dict(checkpoint.metadata),
    ).to_dict()
