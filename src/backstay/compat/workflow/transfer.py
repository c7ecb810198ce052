"""Import workflow checkpoint files, ``<base>/<id>.json``, into a store, and export them again.

Imported checkpoints can be used through ``compat.workflow`` and with ``backstay.open``. A file names its graph and, if
a newer version wrote it, its run. A run becomes a thread; files without a run go into the given thread, or into one
with the name of their graph. The files have no order except their creation time, so that decides, then the step count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress
from backstay.compat import upsert
from backstay.compat.importer import Importer, export_checkpoints, put_item
from backstay.compat.sessions.checkpoint import check_safe
from backstay.compat.workflow.checkpoint import Checkpoint, InterruptType
from backstay.compat.workflow.files import FileCheckpointStore, to_bytes
from backstay.compat.workflow.store import as_dict, draft_of, is_ours
from backstay.thread.access import access_of
from backstay.thread.store import Store

_ORDER = "created_at, then step_count: the files hold nothing else"
_NOT_IN_FILES = ("tags", "label", "summary", "writes", "frames")


def import_workflow(
    base: str | os.PathLike[str], store: Store, *, thread: str | None = None, progress: Progress | bool | None = None
) -> ImportReport:
    """Store the checkpoint files of a directory. ``thread`` is for files without a run; None uses the graph's name."""
    importer = Importer(store, _ORDER)
    found: list[tuple[Path, Checkpoint]] = []
    for entry in FileCheckpointStore(base)._files.scan():
        if entry.checkpoint is None:
            what = "cannot be read" if entry.problem is None else entry.problem.what
            importer.missing.append(Note(what, str(entry.path)))
            continue
        if entry.problem is not None:
            importer.notes.append(Note("has no checksum, so damage cannot be detected", str(entry.path)))
        found.append((entry.path, entry.checkpoint))
    found.sort(key=lambda pair: (pair[1].created_at, pair[1].step_count, pair[1].id))
    items = []
    for path, checkpoint in found:
        owner = checkpoint.run_id or thread or checkpoint.graph_name or checkpoint.id
        items.append(put_item(draft_of(checkpoint, owner), str(path), as_dict))
    return importer.import_all(items, progress)


def export_workflow(
    store: Store, base: str | os.PathLike[str], *, threads: Iterable[str] | None = None
) -> ExportReport:
    """Write the checkpoints of these threads, or of all, as files of a directory. The report names what is left out."""
    files = FileCheckpointStore(base)._files
    access = access_of(store)

    def write(name: str) -> list[str] | None:
        found = upsert.get(access.store, access.services, name)
        if found is None:
            return None
        files.write(check_safe(name, "checkpoint id"), to_bytes(_file_content(found)))
        return [field for field in _NOT_IN_FILES if getattr(found.checkpoint, field)]

    return export_checkpoints(store, threads, "*", write)


def _file_content(found: upsert.Found) -> dict[str, object]:
    """Return a checkpoint in the form of the files. One that was saved through this interface stays as it came."""
    if is_ours(found.meta):
        return as_dict(found)
    checkpoint = found.checkpoint
    return Checkpoint(
        id=checkpoint.id,
        graph_name=checkpoint.graph or checkpoint.thread_id,
        current_node=checkpoint.next_node or "",
        state_snapshot={key: value for key, value in checkpoint.state.items() if key != "pending_action"},
        path=list(checkpoint.path),
        step_count=checkpoint.step,
        created_at=checkpoint.created_at,
        pending_action=checkpoint.pending_action,
        interrupt_type=checkpoint.interrupt.kind if checkpoint.interrupt else InterruptType("userrequest"),
        run_id=checkpoint.run_id,
        extra=dict(checkpoint.metadata),
    ).to_dict()
