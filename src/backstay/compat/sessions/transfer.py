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
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress
from backstay.compat.importer import Importer, Item, export_checkpoints
from backstay.compat.sessions import files
from backstay.compat.sessions.checkpoint import CheckpointData
from backstay.compat.sessions.checksum import plain
from backstay.compat.sessions.files import SessionFolder, Stored, read_stored
from backstay.compat.sessions.order import Index
from backstay.compat.sessions.writer import OpenSession, SyncCheckpointWriter
from backstay.errors import BackstayError, Conflict, StoreRefused
from backstay.model.checkpoint import MAIN, Checkpoint
from backstay.store.atomic import failure
from backstay.thread.store import Store

_ORDER = "the number in each file; without one: when the file appeared, then created_at, and latest.json is the newest"
_STATE = ("messages", "pending_tool_calls", "tool_results")
_SHARED = ("created_at", "trigger", "iteration", "tokens_used", "cost_estimate", "resume_hint")
SAVES_BETWEEN_LOOKS = 100
"""How many checkpoints an export saves before it lets other writers in, and looks at the directory again."""

_Taken = dict[str, tuple[str, int]]
_NOT_IN_FILES = ("tags", "label", "summary", "next_node", "last_node", "graph", "interrupt", "writes")


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
    if not present and "checkpoints" in os.listdir(top):
        raise StoreRefused(
            f"{top} is a session, not a directory of sessions", path=str(top), hint=f"Import {top.absolute().parent}"
        )
    threads: dict[str, list[Item]] = {}
    taken: _Taken = {}  # by id: the session and the file that have it
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


def _names(found: list[Stored], session: str, store: Store, taken: _Taken) -> Iterator[str]:
    """Yield the ids that the checkpoints of a session get in the store."""
    newest = {str(stored.data.checkpoint_id): stored for stored in found}
    for stored in found:
        name = str(stored.data.checkpoint_id)
        if newest[name] is not stored:
            name += f".{files.moment_in(stored.path.name)}"
        mine = (session, id(stored))
        for candidate in chain((name, f"{session}.{name}"), (f"{session}.{name}.{number}" for number in count(2))):
            holder = store.get(candidate, keys=())
            is_free = (holder is None or holder.thread_id == session) and newest.get(candidate, stored) is stored
            if is_free and taken.setdefault(candidate, mine) == mine:
                yield candidate
                break


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
    with ExitStack() as locked:
        session: OpenSession | None = None
        later: dict[str, str] = {}  # by id: a checkpoint that comes after it and is in the directory already

        def write(name: str) -> list[str] | None:
            nonlocal session
            checkpoint = store.get(name)
            if checkpoint is None:
                return None
            data, lost = _data_of(checkpoint)
            record = writer._checked(data)
            if session is None or session.index.folder.session != data.session_id:
                locked.close()
                session = None
                session = locked.enter_context(writer._opened(data.session_id))
                present, after = {entry.checkpoint_id for entry in session.look.entries}, ""
                for meta in store.thread(checkpoint.thread_id).history():
                    after = after or (meta.id if meta.id in present else "")
                    if after and meta.id not in present:
                        later[meta.id] = after
            elif session.saved >= SAVES_BETWEEN_LOOKS:
                locked.close()
                session = None
                session = locked.enter_context(writer._opened(data.session_id))
            if name in later:
                # An import may have given a checkpoint of this directory another id, because two had the same.
                given = checkpoint.metadata.get("checkpoint_id")
                twins = [
                    entry.name for entry in session.look.entries if entry.checkpoint_id == given and entry.has_file
                ]
                for twin in twins:
                    with suppress(BackstayError):
                        stored = read_stored(session.index.folder, twin)
                        if stored is not None and stored.data == replace(data, checkpoint_id=str(given)):
                            return lost
                raise Conflict(
                    f"it would be newer than {later[name]}, which comes after it and is in the directory already",
                    hint="Export to an empty directory",
                )
            writer._save_into(session, data, record)
            return lost

        return export_checkpoints(store, threads, MAIN, write)


def _data_of(checkpoint: Checkpoint) -> tuple[CheckpointData, list[str]]:
    """Return a checkpoint as a record of the files, and what that cannot hold."""
    lost = [f"state.{key}" for key in checkpoint.state if key not in _STATE]
    lost += [field for field in _NOT_IN_FILES if getattr(checkpoint, field)]
    lost += [f"metadata.{key}" for key in checkpoint.metadata]
    lists = []
    for key in ("messages", "pending_tool_calls"):
        value = checkpoint.state.get(key, [])
        if not isinstance(value, list):
            lost.append(f"state.{key} as it is: a list of it is written")
        lists.append(value if isinstance(value, list) else [value])
    data = CheckpointData(
        checkpoint_id=checkpoint.id,
        session_id=checkpoint.thread_id,
        messages=lists[0],
        tool_calls_pending=lists[1],
        tool_results=checkpoint.tool_results,
        **{field: getattr(checkpoint, field) for field in _SHARED},
    )
    return data, lost
