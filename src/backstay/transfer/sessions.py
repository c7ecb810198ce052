"""Session directories: ``<root>/<session>/checkpoints/cp_*.json`` into a store and back, a session for a thread.

Files are read with their own checksum rule (``compat.sessions``). A damaged file is read from its backup, or named in
the report. The order is that of the writer's numbers; files of the older writer have none and come before those, by
their own ``created_at``, and what ``latest.json`` names is the newest of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from backstay.compat.sessions.canonical import parse, plain
from backstay.compat.sessions.data import CheckpointData
from backstay.compat.sessions.folder import BACKUP, SessionFolder
from backstay.compat.sessions.latest import linked_name
from backstay.compat.sessions.order import Entry, Index
from backstay.compat.sessions.stored import Stored, read_stored
from backstay.compat.sessions.sync import SyncCheckpointWriter
from backstay.errors import BackstayError, InvalidInput, StoreError
from backstay.model.checkpoint import MAIN, Checkpoint
from backstay.store.atomic import failure
from backstay.thread.store import Store
from backstay.transfer.intake import Arrival, Intake, fitted, saving
from backstay.transfer.progress import Progress
from backstay.transfer.report import ExportReport, ImportReport, Note

_ORDER = "the number in each file; without one: created_at, and latest.json names the newest"
_STATE = ("messages", "pending_tool_calls", "tool_results")
_SHARED = ("created_at", "trigger", "iteration", "tokens_used", "cost_estimate", "resume_hint")


def import_sessions(
    root: str | os.PathLike[str],
    store: Store,
    *,
    sessions: Iterable[str] | None = None,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store the sessions below a directory, or those named, each as a thread of its own name."""
    top = Path(root)
    intake = Intake(store, _ORDER)
    threads = {}
    for session in _sessions(top) if sessions is None else sessions:
        try:
            folder = SessionFolder(top, session)
            found = list(_read(folder, intake)) if folder.exists() else []
        except BackstayError as error:
            intake.lacks(str(top / str(session)), error.what, str(session))
            continue
        if found:
            threads[folder.session] = [_arrival(stored, intake) for stored in found]
        elif sessions is not None:
            intake.lacks(str(folder.checkpoints), "there is no checkpoint", folder.session)
    return intake.take_all(threads, progress)


def _sessions(root: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if (root / name / "checkpoints").is_dir())
    except OSError as error:
        raise failure(error, "list", root) from error


def _read(folder: SessionFolder, intake: Intake) -> Iterator[Stored]:
    """Yield a session's checkpoints, oldest first; those that cannot be read are noted."""
    names = folder.names()
    linked, oddity = linked_name(folder, names)
    if oddity is not None:
        intake.notes.append(Note(oddity, str(folder.checkpoints), folder.session))
    for entry in reversed(Index(folder).entries(names, linked)):
        stored = _read_entry(folder, entry, intake)
        if stored is not None:
            yield stored


def _read_entry(folder: SessionFolder, entry: Entry, intake: Intake) -> Stored | None:
    where = str(folder.checkpoints / entry.name)
    problem = "it is not there"
    for name, is_there in ((entry.name, entry.has_file), (entry.name + BACKUP, entry.has_backup)):
        if not is_there:
            continue
        try:
            stored = read_stored(folder, name)
        except BackstayError as error:
            problem = error.what
            continue
        if stored is not None and name != entry.name:
            intake.notes.append(
                Note(f"taken from its backup: {problem}", where, folder.session, str(entry.checkpoint_id))
            )
        if stored is not None:
            return stored
    intake.lacks(where, problem, folder.session, str(entry.checkpoint_id))
    return None


def _arrival(stored: Stored, intake: Intake) -> Arrival:
    data, where = stored.data, str(stored.path)
    session, name = str(data.session_id), str(data.checkpoint_id)
    record: dict[str, Any] = plain(parse(stored.content.encode()))
    others = {key: value for key, value in record.items() if key not in data.to_dict()}
    state = {
        "messages": data.messages,
        "pending_tool_calls": data.tool_calls_pending,
        "tool_results": data.tool_results,
    }
    notes = fitted(
        {field: getattr(data, field) for field in _SHARED},
        others,
        lambda what: intake.notes.append(Note(what, where, session, name)),
    )
    return Arrival(name, where, saving(session, name, state, notes))


def export_sessions(
    store: Store, root: str | os.PathLike[str], *, threads: Iterable[str] | None = None
) -> ExportReport:
    """Write threads, or all, as session directories; the report says what that layout has no room for.

    Only the main branch fits into a session. Again with the same content it changes nothing.
    """
    writer = SyncCheckpointWriter(root)
    names = [meta.thread_id for meta in store.threads()][::-1] if threads is None else list(threads)
    notes: list[Note] = []
    written = 0
    for name in names:
        thread = store.thread(name)
        others = [lane.key.branch for lane in thread.branches() if lane.key.branch != MAIN]
        if others:
            notes.append(Note(f"branches were left out: {', '.join(others)}", "", name))
        for meta in reversed(list(thread.history())):
            try:
                checkpoint = store.get(meta.id)
                if checkpoint is None:
                    continue
                writer.save(_data(checkpoint))
            except StoreError:
                raise
            except (BackstayError, InvalidInput) as error:
                notes.append(Note(f"left out: {error.what}", "", name, meta.id))
                continue
            written += 1
            lost = _lost(checkpoint)
            if lost:
                notes.append(Note(f"has no place there: {', '.join(lost)}", "", name, meta.id))
    return ExportReport(threads=len(names), checkpoints=written, notes=tuple(notes))


def _data(checkpoint: Checkpoint) -> CheckpointData:
    return CheckpointData(
        checkpoint_id=checkpoint.id,
        session_id=checkpoint.thread_id,
        messages=checkpoint.messages,
        tool_calls_pending=checkpoint.pending_tool_calls,
        tool_results=checkpoint.tool_results,
        **{field: getattr(checkpoint, field) for field in _SHARED},
    )


def _lost(checkpoint: Checkpoint) -> list[str]:
    """Return what of a checkpoint the layout cannot say."""
    lost = [f"state.{key}" for key in checkpoint.state if key not in _STATE]
    described = ("tags", "label", "summary", "metadata", "next_node", "last_node", "graph", "interrupt", "writes")
    return lost + [name for name in described if getattr(checkpoint, name)]
