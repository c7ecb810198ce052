"""Import session directories, ``<root>/<session>/checkpoints/cp_*.json``, into a store, and export them again.

Each session becomes a thread. Files are read with their own checksum rule (``compat.sessions``). A damaged file is read
from its backup, or else the report names it. The order is that of ``compat.sessions.order``.

Ids are unique in a store, but the older program used them again, in one session and in several. So if a session has
several files with one id, only the newest gets it, and the others get the time in the name of their file behind it; and
an id that is taken in another thread gets the session's name in front.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress
from backstay.compat.importer import Importer, Item, export_checkpoints
from backstay.compat.sessions import files
from backstay.compat.sessions.checkpoint import CheckpointData
from backstay.compat.sessions.checksum import plain
from backstay.compat.sessions.files import SessionFolder, Stored, read_stored
from backstay.compat.sessions.order import Index
from backstay.compat.sessions.writer import SyncCheckpointWriter
from backstay.errors import BackstayError
from backstay.model.checkpoint import MAIN
from backstay.store.atomic import failure
from backstay.thread.store import Store

_ORDER = "the number in each file; without one: when the file appeared, then created_at, and latest.json is the newest"
_STATE = ("messages", "pending_tool_calls", "tool_results")
_SHARED = ("created_at", "trigger", "iteration", "tokens_used", "cost_estimate", "resume_hint")
_NOT_IN_FILES = ("tags", "label", "summary", "metadata", "next_node", "last_node", "graph", "interrupt", "writes")


def import_sessions(
    root: str | os.PathLike[str],
    store: Store,
    *,
    sessions: Iterable[str] | None = None,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store the sessions below a directory, or those named, each as a thread with the session's name."""
    top = Path(root)
    importer = Importer(store, _ORDER)
    try:
        present = sorted(name for name in os.listdir(top) if (top / name / "checkpoints").is_dir())
    except OSError as error:
        raise failure(error, "list", top) from error
    threads: dict[str, list[Item]] = {}
    taken: dict[str, str] = {}  # by id: the session that has it
    is_cut = False
    for session in present if sessions is None else map(str, sessions):
        folder = SessionFolder(top, session, listed=True)
        if session not in present:
            importer.missing.append(Note("there is no such session", str(top), session))
            continue
        try:
            found = list(_read(folder, importer))
        except BackstayError as error:
            importer.missing.append(Note(error.what, str(folder.path), session))
            continue
        if found:
            names = _names(found, session, store, taken)
            threads[session] = [_item(stored, name, importer) for stored, name in zip(found, names, strict=True)]
            moments = [str(stored.tree["created_at"]).partition(".")[2] for stored in found]
            is_cut = is_cut or any(len(fraction) > len("123456Z") for fraction in moments)
        elif sessions is not None:
            importer.missing.append(Note("the session has no checkpoints", str(folder.checkpoints), session))
    if is_cut:
        importer.notes.append(
            Note("the nanoseconds of created_at are left out: a checkpoint has microseconds", str(top))
        )
    return importer.import_all((item for items in threads.values() for item in items), progress)


def _read(folder: SessionFolder, importer: Importer) -> Iterator[Stored]:
    """Yield a session's checkpoints, oldest first, from their files or else their backups."""
    look = Index(folder).look()
    importer.notes += [Note(warning, str(folder.checkpoints), folder.session) for warning in look.warnings]
    for entry in reversed(look.entries):
        where, checkpoint = str(folder.checkpoints / entry.name), str(entry.checkpoint_id)
        problem = "the file is missing"
        stored: Stored | None = None
        for name in entry.files:
            try:
                stored = stored or read_stored(folder, name)
            except BackstayError as error:
                problem = error.what
        if stored is None:
            importer.missing.append(Note(problem, where, folder.session, checkpoint))
            continue
        if stored.path.name != entry.name:
            importer.notes.append(Note(f"read from its backup: {problem}", where, folder.session, checkpoint))
        yield stored


def _names(found: list[Stored], session: str, store: Store, taken: dict[str, str]) -> Iterator[str]:
    """Yield the ids that the checkpoints of a session get in the store."""
    newest = {str(stored.data.checkpoint_id): stored for stored in found}
    for stored in found:
        name = str(stored.data.checkpoint_id)
        if newest[name] is not stored:
            name += f".{files.moment_in(stored.path.name)}"
        holder = store.get(name, keys=())
        if taken.setdefault(name, session if holder is None else holder.thread_id) != session:
            name = f"{session}.{name}"
        yield name


def _item(stored: Stored, name: str, importer: Importer) -> Item:
    data = stored.data
    record: dict[str, Any] = plain(stored.tree)
    others = {key: value for key, value in record.items() if key not in data.to_dict() and not key.startswith("_")}
    state = {
        "messages": data.messages,
        "pending_tool_calls": data.tool_calls_pending,
        "tool_results": data.tool_results,
    }
    session, where = str(data.session_id), str(stored.path)
    if name != data.checkpoint_id:
        others["checkpoint_id"] = str(data.checkpoint_id)
        why = "another checkpoint has its id, which is kept in the metadata"
        importer.notes.append(Note(f"stored as {name!r}: {why}", where, session, str(data.checkpoint_id)))
    values = {field: getattr(data, field) for field in _SHARED}
    return importer.saved_item(session, name, where, state, values, others)


def export_sessions(
    store: Store, root: str | os.PathLike[str], *, threads: Iterable[str] | None = None
) -> ExportReport:
    """Write threads, or all threads, as session directories. The report names what that layout cannot hold.

    A session holds only the main branch. Exporting the same content again changes nothing.
    """
    writer = SyncCheckpointWriter(root)

    def write(name: str) -> list[str] | None:
        checkpoint = store.get(name)
        if checkpoint is None:
            return None
        writer.save(
            CheckpointData(
                checkpoint_id=checkpoint.id,
                session_id=checkpoint.thread_id,
                messages=checkpoint.messages,
                tool_calls_pending=checkpoint.pending_tool_calls,
                tool_results=checkpoint.tool_results,
                **{field: getattr(checkpoint, field) for field in _SHARED},
            )
        )
        lost = [f"state.{key}" for key in checkpoint.state if key not in _STATE]
        return lost + [field for field in _NOT_IN_FILES if getattr(checkpoint, field)]

    return export_checkpoints(store, threads, MAIN, write)
