"""Importing from LangGraph's own savers: every thread, namespace, checkpoint and pending write, in the same bytes.

    import_langgraph(store, "checkpoints.sqlite")
    import_langgraph(store, "postgresql://app@db/agents")

The source is only read. Values that name a type are never opened, so a value that would run code when it is loaded is
copied like any other. Ids, parents and the numbers of writes stay the same, so an import may be repeated: a checkpoint
with the same content is skipped, and the next import completes one that was killed, because a checkpoint is stored
after its writes. A thread that has continued in the store since the last import is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langgraph.checkpoint.serde.base import CipherProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.bundle.report import ImportReport, Note, Progress, ProgressReporter, Refused
from backstay.errors import Conflict, Corrupted, DecodeError, Fenced, InvalidInput, StoreRefused, counted
from backstay.langgraph.encoding import PARENT, to_body
from backstay.langgraph.importer.sqlite import SqliteSource
from backstay.langgraph.importer.tables import (
    VALUES,
    Source,
    SourceCheckpoint,
    SourceRef,
    SourceThread,
    encrypted_value,
)
from backstay.langgraph.names import GraphLocation, ReadId
from backstay.langgraph.retention import rows_of_thread
from backstay.langgraph.saver import BackstaySaver
from backstay.model.checkpoint import MAIN
from backstay.model.ids import check_id
from backstay.operations.retention import REBUILT_FROM
from backstay.store.base import BranchKey, WriteRow
from backstay.store.sqlite.database import resolve_path
from backstay.thread.access import access_of
from backstay.thread.store import Store
from backstay.version import install_hint

ORDER = "the checkpoints' ids, which contain their time, but a parent before its children"


def import_langgraph(
    store: Store,
    source: str | Path,
    *,
    threads: Collection[str] | None = None,
    progress: Progress | bool | None = None,
    serde: EncryptedSerializer | None = None,
) -> ImportReport:
    """Import a file of SqliteSaver, or PostgresSaver's tables: all threads, or those in ``threads``.

    ``serde`` is the serializer of an encrypted source. Without its key, SQLite's checkpoints cannot be split into
    channels. PostgreSQL stores small values as plain text; with a key the import encrypts them too.
    """
    if serde is not None and not isinstance(serde, EncryptedSerializer):
        raise InvalidInput("serde must be an EncryptedSerializer", hint="Leave it out if the source is not encrypted")
    if isinstance(threads, str):
        raise InvalidInput("threads must be a list of thread ids, not one text", hint=f"Pass threads=[{threads!r}]")
    wanted = None if threads is None else list(dict.fromkeys(map(str, threads)))
    cipher = None if serde is None else serde.cipher
    with open_source(source, cipher) as opened:
        return _ImportRun(store, opened, cipher, progress).run(wanted)


def open_source(source: str | Path, cipher: CipherProtocol | None = None) -> Source:
    """Open the tables that a path or URL names, for reading only."""
    text = os.fspath(source)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInput("the source must be the path of a file or a URL", hint="For example checkpoints.sqlite")
    if text.startswith(("postgresql://", "postgres://")):
        try:
            from backstay.langgraph.importer.postgres import PostgresSource
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("psycopg"):
                raise
            hint = install_hint("postgres")
            raise StoreRefused("the PostgreSQL driver psycopg is not installed", hint=hint) from error
        return PostgresSource(text)
    if "://" in text and not text.startswith("sqlite://"):
        raise InvalidInput(
            f"{text.partition('://')[0]}:// is not a known source", hint="Pass a sqlite or postgresql URL, or a path"
        )
    path = resolve_path(text)
    return SqliteSource(path, cipher)


class _ImportRun:
    """One import, and what it has done so far."""

    def __init__(
        self, store: Store, source: Source, cipher: CipherProtocol | None, progress: Progress | bool | None
    ) -> None:
        self.store = store
        self.source = source
        self.cipher = cipher
        self.reporter = ProgressReporter(progress, "importing", 0, "checkpoints")
        self.saver = BackstaySaver(store)
        self.root_saver = BackstaySaver(store, on_conflict="branch")  # LangGraph lets a thread start twice
        self.threads = self.stored = self.present = self.done = 0
        self.refused: list[Refused] = []
        self.missing: list[Note] = []
        self.notes: list[Note] = []

    def run(self, wanted: list[str] | None) -> ImportReport:
        """Import the threads in ``wanted``, or all."""
        for name in self._names() if wanted is None else wanted:
            self.threads += 1
            stored = self.stored
            try:
                thread = self.source.thread(name)
                if wanted is not None and not thread.refs:
                    self.threads -= 1
                    self.missing.append(Note("has no checkpoints of this thread", self.source.shown, name))
                else:
                    _ThreadImport(self, name, thread).run()
            except (Conflict, Fenced, Corrupted, InvalidInput) as error:
                self.refused.append(Refused(name, error, self.stored - stored))
        self.reporter.finish()
        return ImportReport(
            self.threads,
            self.stored,
            self.present,
            refused=tuple(self.refused),
            missing=tuple(self.missing),
            notes=tuple(self.notes),
            order=ORDER,
        )

    def _names(self) -> Iterator[str]:
        try:
            yield from self.source.threads()
        except Corrupted as error:
            what = f"the rest of the list of threads cannot be read: {error.what}"
            self.missing.append(Note(what, self.source.shown))


@dataclass(slots=True)
class _ThreadImport:
    """The import of one thread."""

    _run: _ImportRun
    _thread: str
    _source: SourceThread
    _is_mixed: bool = False  # plain values among encrypted ones were found and noted
    _stored: set[tuple[str, str]] = field(default_factory=set)  # namespaces and ids, stored by this import or before
    _next: dict[tuple[str, str], str] = field(default_factory=dict)  # by parent: the child on its branch; others fork
    _last: SourceCheckpoint | None = None

    def run(self) -> None:
        """Import the checkpoints of the thread in the source's order."""
        run, refs = self._run, self._source.refs
        if self._source.orphan_writes:
            self._note(f"{counted(self._source.orphan_writes, 'write')} skipped: the checkpoint is missing")
        late = sum(ref.parent is not None and ref.parent > ref.id for ref in refs)
        if late:
            self._note(f"{counted(late, 'checkpoint')} with a lower id than the parent; the newest is the last child")
        check_id(self._thread, "thread_id")
        access = access_of(run.store)
        existing = {row.id for row in rows_of_thread(access.store, access.services, self._thread)}
        names = [self._location(ref).name(ref.id) for ref in refs]
        others = existing.difference(names)
        if others and not existing.issuperset(names):
            raise Conflict(
                f"the store has other checkpoints in this thread, for example {min(others)}",
                thread=self._thread,
                hint="Import into another store or namespace",
            )
        if others:
            run.present += len(refs)  # the thread has continued here since it was imported
            return
        # The first child continues the branch of its parent, but one that exists comes first.
        for _, ref in sorted(zip(names, refs, strict=True), key=lambda pair: pair[0] not in existing):
            self._next.setdefault((ref.ns, ref.parent or ""), ref.id)
        for name, ref in zip(names, refs, strict=True):
            run.done += 1
            run.reporter.update(run.done)
            where = f"{run.source.shown}, checkpoint {ref.id}" + (f" of namespace {ref.ns!r}" if ref.ns else "")
            try:
                self._import(ref, name, where, name in existing)
            except (InvalidInput, DecodeError) as error:
                run.missing.append(Note(f"cannot be stored: {error.what}", where, self._thread, name))
                continue
            run.stored += name not in existing
            run.present += name in existing

    def _import(self, ref: SourceRef, name: str, where: str, exists: bool) -> None:
        found, run = self._source.read(ref), self._run
        for what in found.lost:
            run.missing.append(Note(f"{what}: skipped", where, self._thread, name))
        # Writes are stored under their own numbers and before their checkpoint: if that exists, so do they.
        rows = []
        for write in found.writes:
            body = to_body(encrypted_value(write.value, run.cipher))
            rows.append(WriteRow(write.task, write.idx, write.channel, body.kind, body.count, body.data, write.path))
        if rows:
            branch = BranchKey(run.store.namespace, self._thread, self._location(ref).scope, MAIN)
            access_of(run.store).store.write(branch, name, rows, False)
        tags = {"+" in value.tag for value in found.checkpoint[VALUES].values()}
        if run.cipher is None and len(tags) == 2 and not self._is_mixed:
            self._is_mixed = True
            self._note("PostgresSaver stores small values in plain text; pass serde= to encrypt them too")
        if run.cipher is None or not exists:  # encrypting a value again gives different bytes
            self._put(found, name, where)
        self._stored.add((ref.ns, ref.id))
        self._last = found

    def _put(self, found: SourceCheckpoint, name: str, where: str) -> None:
        ref, metadata, parent, cipher = found.ref, dict(found.metadata), found.ref.parent, self._run.cipher
        config: dict[str, Any] = {"thread_id": self._thread, "checkpoint_ns": ref.ns}
        saver = self._run.root_saver
        if parent and (ref.ns, parent) in self._stored:
            saver = self._run.saver
            config["checkpoint_id"] = (
                parent if self._next.get((ref.ns, parent)) == ref.id else ReadId(parent, forks=True)
            )
        elif parent:
            metadata[PARENT] = parent
            what = f"its parent {parent} is missing"
            if REBUILT_FROM in metadata:
                what += ", so values that are rebuilt from earlier writes may be incomplete"
            self._run.notes.append(Note(what, where, self._thread, name))
        checkpoint: Any = {key: encrypted_value(value, cipher) for key, value in found.checkpoint.items()}
        checkpoint[VALUES] = {key: encrypted_value(value, cipher) for key, value in checkpoint[VALUES].items()}
        # A channel has changed if its bytes differ from the parent's: an equal version proves nothing.
        versions, values, last = found.checkpoint["channel_versions"], found.checkpoint[VALUES], self._last
        before: Any = {}
        if last is not None and (last.ref.ns, last.ref.id) == (ref.ns, parent):
            before = last.checkpoint[VALUES]
        changed = {
            channel: version
            for channel, version in versions.items()
            if channel not in before or before[channel] != values.get(channel)
        }
        saver.put({"configurable": config}, checkpoint, metadata, changed)  # type: ignore[arg-type]

    def _location(self, ref: SourceRef) -> GraphLocation:
        return GraphLocation(self._thread, ref.ns)

    def _note(self, what: str) -> None:
        self._run.notes.append(Note(what, self._run.source.shown, self._thread))
