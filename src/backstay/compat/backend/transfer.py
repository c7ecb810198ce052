"""Import the data of agentos (PyPI: nexus-agentos), and export to it.

Its SQLite and PostgreSQL backends have the same table, from release 1.8.3 to 1.50.10; the dictionaries of
``Checkpoint.to_dict`` hold the same fields. Its newest checkpoint is the one with the highest step; here it is the one
put last. So an import puts a thread's checkpoints by step, and the report says where the two rules name different ones.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress
from backstay.compat import upsert
from backstay.compat.adapter import parse_json
from backstay.compat.backend.checkpoint import ADAPTER, Checkpoint, as_dict, checked, checkpoint_of, draft_of
from backstay.compat.importer import Importer, export_checkpoints, put_item
from backstay.compat.upsert import Draft
from backstay.errors import BackstayError, DecodeError, InvalidInput, StoreRefused
from backstay.model.checkpoint import MAIN
from backstay.store.atomic import FILE_MODE, PREFIX, failure, make_directory, sync_directory
from backstay.store.sqlite.database import translated
from backstay.store.sqlite.foreign import columns_of, is_database, open_foreign, reading
from backstay.thread.access import access_of
from backstay.thread.store import Store
from backstay.version import install_hint

_ORDER = "a parent before its children, then the step, then the place in the source"
_CONTENT = ("messages", "state", "tools_result")
_BLOBS = {"messages_blob": "messages", "state_blob": "state", "tools_blob": "tools_result"}
_NEEDED = {"thread_id", "checkpoint_id", "step"}

_SCHEMA = """
CREATE TABLE checkpoints (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    thread_id       TEXT NOT NULL,
    checkpoint_id   TEXT NOT NULL UNIQUE,
    parent_id       TEXT,
    step            INTEGER NOT NULL,
    created_at      TEXT NOT NULL,
    tags            TEXT NOT NULL DEFAULT '[]',
    summary         TEXT NOT NULL DEFAULT '',
    messages_blob   TEXT NOT NULL DEFAULT '[]',
    state_blob      TEXT NOT NULL DEFAULT '{}',
    tools_blob      TEXT NOT NULL DEFAULT '{}',
    next_node       TEXT NOT NULL DEFAULT ''
);
CREATE INDEX idx_thread_step ON checkpoints(thread_id, step DESC);
CREATE INDEX idx_checkpoint_id ON checkpoints(checkpoint_id);
CREATE INDEX idx_parent ON checkpoints(parent_id);
"""
_INSERT = "INSERT INTO checkpoints VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_NOT_IN_ROWS = (
    *("run_id", "graph", "last_node", "continuation", "iteration", "interrupt", "resume_hint", "tokens_used"),
    *("cost_estimate", "label", "frames", "path"),
)


# Importing --------------------------------------------------------------------------------------------------------


def import_agentos(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    store: Store,
    *,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store the checkpoints of a SQLite file, a ``postgresql://`` URL, a file of JSON lines, or dictionaries.

    The source is only read. The imported checkpoints can be read with ``StoreBackend`` and with ``backstay.open``. A
    record that cannot be stored as it is, or whose messages, state and tool results are not found, is skipped, and the
    report names it. Unknown keys and columns are kept. The import may be repeated.
    """
    importer = Importer(store, _ORDER)
    found: dict[str, tuple[Draft, str]] = {}
    for where, plain in _records(source, importer):
        try:
            draft = _imported(plain, where, importer)
        except (BackstayError, TypeError) as error:
            given = plain.get("metadata", plain) if isinstance(plain, Mapping) else None
            thread, name = (
                map(given.get, ("thread_id", "checkpoint_id")) if isinstance(given, Mapping) else (None, None)
            )
            importer.missing.append(Note(f"not imported: {getattr(error, 'what', error)}", where, thread, name))
            continue
        if draft.id in found:
            replaced, place = found.pop(draft.id)
            importer.notes.append(Note("replaced by a later record of this id", place, replaced.thread, draft.id))
        found[draft.id] = draft, where
    threads: dict[str, list[Draft]] = {}
    for draft, _ in found.values():
        threads.setdefault(draft.thread, []).append(draft)
    for thread, drafts in threads.items():
        in_source, by_step = list(drafts), {draft.id: draft for draft in sorted(drafts, key=lambda each: each.step)}
        drafts[:] = [by_step[name] for name in _parents_first({name: by_step[name].parent for name in by_step})]
        newest, last = drafts[-1], in_source[-1]
        theirs = max(in_source, key=lambda draft: draft.step)
        if theirs is not newest:
            what = f"is now the newest; agentos takes {theirs.id}, the first with the highest step"
            importer.notes.append(Note(what, "", thread, newest.id))
        elif last is not newest:
            what = f"comes after {newest.id}, which is the newest as in agentos, because its step is lower"
            importer.notes.append(Note(what, "", thread, last.id))
    # A thread that starts with a checkpoint of another thread comes after that thread.
    parents = {thread: found.get(drafts[0].parent or "") for thread, drafts in threads.items()}
    names = _parents_first({thread: parent and parent[0].thread for thread, parent in parents.items()})
    items = [put_item(*found[draft.id], as_dict) for name in names for draft in threads[name]]
    return importer.import_all(items, progress)


def _imported(plain: object, where: str, importer: Importer) -> Draft:
    """Return what to store for a record, or raise an error that says why it cannot be stored."""
    if not isinstance(plain, Mapping):
        raise DecodeError(f"it is {type(plain).__name__}, not an object")
    if "metadata" not in plain and "checkpoint_id" in plain:
        plain = _record_of_row(plain)
    missing = [name for name in _CONTENT if name not in plain]
    if len(missing) == len(_CONTENT) and "metadata" in plain:
        raise DecodeError(f"it has none of {', '.join(_CONTENT)}")
    record = checked(Checkpoint.from_dict(plain))
    thread, name = record["metadata"]["thread_id"], record["metadata"]["checkpoint_id"]
    if missing:
        importer.notes.append(Note(f"has no {' and no '.join(missing)}: taken as empty", where, thread, name))
    try:
        draft = draft_of(record)
    except InvalidInput as error:
        text = record["metadata"]["created_at"]
        if error.path != "metadata.created_at" or type(text) is not str:
            raise
        moment, what = datetime.now(UTC), "is not a time: kept as text, and the time of the import counts"
        with suppress(ValueError):
            parsed = datetime.fromisoformat(text)
            if parsed.tzinfo is None:
                moment, what = parsed.replace(tzinfo=UTC), "has no offset: taken as UTC"
        importer.notes.append(Note(f"created_at {what}", where, thread, name))
        draft = draft_of(record, moment)
    if draft.parent is None:
        draft.original["parent"] = None  # else it would be the checkpoint before
    return draft


def _parents_first(parents: Mapping[str, str | None]) -> list[str]:
    """Return the names in their order, but each after its parent. A cycle is broken at its first name."""
    done: dict[str, None] = {}
    for name in parents:
        line: dict[str, None] = {}
        each: str | None = name
        while each is not None and each in parents and each not in done and each not in line:
            line[each] = None
            each = parents[each]
        done.update(dict.fromkeys([name] if each in line else reversed(line)))
    return list(done)


def _records(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], importer: Importer
) -> Iterator[tuple[str, object]]:
    """Yield the records of a source, each with the place that it came from."""
    if not isinstance(source, str | os.PathLike):
        yield from ((f"record {number}", plain) for number, plain in enumerate(source, 1))
        return
    text = os.fspath(source)
    if text.startswith(("postgresql://", "postgres://")):
        yield from _postgres_rows(text)
        return
    path = Path(text)
    try:
        if is_database(text):
            yield from _sqlite_rows(text)
            return
        if not path.stat().st_size:
            importer.missing.append(Note("the file is empty", text))
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    if line.strip():
                        yield where, _parsed(line, "the line")
                except DecodeError as error:
                    importer.missing.append(Note(error.what, where))
    except OSError as error:
        raise failure(error, "read", path) from error


def _sqlite_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with reading(path), closing(open_foreign(path)) as connection:
        columns = columns_of(connection, "checkpoints")
        if not columns >= _NEEDED:
            raise StoreRefused(
                f"{path} has no table of checkpoints",
                path=path,
                hint="The table checkpoints must have the columns that agentos.checkpoint gives it",
            )
        # Damaged text is read too, and refused with its row. All rows at once: a reader keeps the old program waiting.
        connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        cursor = connection.execute("SELECT * FROM checkpoints ORDER BY rowid")
        names = [name for name, *_ in cursor.description]
        rows = cursor.fetchall()
    for row in rows:
        found = dict(zip(names, row, strict=True))
        yield f"{path}: row {found.get('id', '?')}", found


def _postgres_rows(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from backstay.store.postgres.foreign import ForeignTables
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise StoreRefused("the PostgreSQL driver is not installed", hint=install_hint("postgres")) from error
    hint = "The table checkpoints must have the columns that agentos.checkpoint gives it"
    with ForeignTables(url, {"checkpoints": {"id", *_NEEDED}}, "agentos", hint) as tables:
        names = sorted(tables.columns["checkpoints"])
        for row in tables.select("checkpoints", names, "id"):
            found = dict(zip(names, row, strict=True))
            if isinstance(found.get("created_at"), datetime):
                found["created_at"] = found["created_at"].astimezone(UTC).isoformat()
            yield f"{tables.shown}: row {found['id']}", found


def _record_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table as a record. DecodeError names a column of its content that is missing."""
    unknown = [column for column in _BLOBS if row.get(column) is None]
    if unknown:
        raise DecodeError(f"it has no {', '.join(unknown)}; its columns are {', '.join(map(str, row))}")
    metadata: dict[str, Any] = {}
    record: dict[str, Any] = {"metadata": metadata}
    for column, value in row.items():
        if column in (*_BLOBS, "tags") and isinstance(value, str | bytes):
            value = _parsed(value, column)
        if column in _BLOBS:
            record[_BLOBS[column]] = value
        elif column == "next_node" and value is not None:
            record[column] = value
        elif column != "id" and value is not None and (column, value) != ("parent_id", ""):
            # Columns that this version does not know are kept.
            metadata["parent_checkpoint_id" if column == "parent_id" else column] = value
    return record


def _parsed(text: str | bytes, what: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        number = "NaN" in str(error) or "Infinity" in str(error)
        raise DecodeError(f"{what} is not valid JSON" + (f": it holds {error}" if number else "")) from error


# Exporting --------------------------------------------------------------------------------------------------------


def export_agentos(store: Store, path: str | os.PathLike[str], *, threads: Iterable[str] | None = None) -> ExportReport:
    """Write threads, or all threads, as a new SQLite file for the SQLite backend of agentos.

    Every checkpoint of every branch becomes a row of its thread, oldest first. The report names everything that a row
    cannot hold, and threads that agentos would continue from another checkpoint: its newest has the highest step.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise StoreRefused(f"{target} exists already", path=str(target), hint="Name a file that does not exist")
    make_directory(target.parent)
    access = access_of(store)
    steps: dict[str, list[tuple[int, str]]] = {}
    try:
        with translated(str(target)), tempfile.TemporaryDirectory(prefix=PREFIX, dir=target.parent) as folder:
            file = Path(folder) / target.name
            with closing(sqlite3.connect(file, isolation_level=None)) as connection:
                os.chmod(file, FILE_MODE)
                connection.executescript(f"{_SCHEMA} BEGIN")

                def write(name: str) -> list[str] | None:
                    found = upsert.get(access.store, access.services, name)
                    if found is None:
                        return None
                    checkpoint = checkpoint_of(found)
                    plain = checkpoint.to_dict()
                    metadata, names = plain["metadata"], ("thread_id", "checkpoint_id", "parent_checkpoint_id", "step")
                    content = (json.dumps(plain[each], ensure_ascii=False) for each in _CONTENT)
                    about = (metadata["created_at"], json.dumps(metadata["tags"]), metadata["summary"])
                    row = (*(metadata[each] for each in names), *about, *content, plain["next_node"])
                    connection.execute(_INSERT, row)
                    steps.setdefault(found.meta.thread_id, []).append((found.step, name))
                    stored = found.checkpoint
                    lost = [field for field in _NOT_IN_ROWS if getattr(stored, field)]
                    lost += ["writes"] * any(write.task_id != upsert.REPLACED for write in stored.writes)
                    lost += [f"metadata.{key}" for key in checkpoint.metadata.extra] + list(checkpoint.extra)
                    if stored.metadata.get(upsert.ADAPTER) != ADAPTER:
                        lost += ["branch"] * (stored.branch != MAIN) + ["trigger"] * (stored.trigger != "manual")
                    return lost

                report = export_checkpoints(store, threads, "*", write)
                connection.execute("COMMIT")
            os.rename(file, target)
    except OSError as error:
        raise failure(error, "write", target) from error
    sync_directory(target.parent)
    notes = list(report.notes)
    for thread, rows in steps.items():
        theirs = max(rows, key=lambda row: row[0])[1]
        if theirs != rows[-1][1]:
            notes.append(Note(f"agentos continues from it, not from the newest, {rows[-1][1]}", "", thread, theirs))
        if next(store.thread(thread).effects(), None) is not None:
            notes.append(Note("the file cannot hold: effects", "", thread))
    return replace(report, notes=tuple(notes))
