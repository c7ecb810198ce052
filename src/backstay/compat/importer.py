"""Import checkpoints of other systems, and export to them. Their ids stay the same, so both can be repeated.

A thread that holds checkpoints which the source does not have is refused, unless it has all of the source already: an
import never mixes its checkpoints with others. A record that cannot be stored is skipped, and the report names it. A
field that a Backstay record cannot hold goes into its metadata under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress, ProgressReporter, Refused
from backstay.compat import upsert
from backstay.errors import BackstayError, Conflict, Corrupted, DecodeError, Fenced, InvalidInput, StoreError
from backstay.model.checkpoint import CheckpointFields
from backstay.model.fields import check_fields
from backstay.model.ids import check_id
from backstay.thread.access import access_of
from backstay.thread.store import Store


@dataclass(slots=True)
class Item:
    """A checkpoint to import. ``where`` names the file or row that it came from."""

    id: str
    where: str
    save: Callable[[Store], None]


@dataclass(slots=True)
class Importer:
    """One import: counts what it stored, and collects what it did not."""

    store: Store
    order: str
    stored: int = 0
    present: int = 0
    threads: int = 0
    refused: list[Refused] = field(default_factory=list)
    missing: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add_missing(self, where: str, what: str, thread: str | None = None, checkpoint: str | None = None) -> None:
        """Report a record that could not be read or stored."""
        self.missing.append(Note(what, where, thread, checkpoint))

    def add_note(self, where: str, thread: str, checkpoint: str | None, what: str) -> None:
        """Report a checkpoint that is stored differently from the source."""
        self.notes.append(Note(what, where, thread, checkpoint))

    def import_all(self, threads: Mapping[str, Sequence[Item]], progress: Progress | bool | None) -> ImportReport:
        """Store the checkpoints of each thread in the given order."""
        reporter = ProgressReporter(progress, "importing", sum(map(len, threads.values())), "checkpoints")
        done = 0
        for thread, items in threads.items():
            self.threads += 1
            before = self.stored
            try:
                check_id(thread, "thread_id")
                stored = {meta.id for meta in self.store.thread(thread).history(branch="*")}
                self._check_strangers(thread, stored, {item.id for item in items})
                for item in items:
                    self._store(thread, item, item.id in stored)
            except (Conflict, Fenced, Corrupted, InvalidInput) as error:
                self.refused.append(Refused(thread, error, self.stored - before))
            done += len(items)
            reporter.update(done)
        reporter.finish()
        return ImportReport(
            self.threads,
            self.stored,
            self.present,
            refused=tuple(self.refused),
            missing=tuple(self.missing),
            notes=tuple(self.notes),
            order=self.order,
        )

    def _check_strangers(self, thread: str, stored: set[str], wanted: set[str]) -> None:
        """Raise Conflict if a thread has other checkpoints than the source, and not yet all of the source."""
        if stored - wanted and wanted - stored:
            raise Conflict(
                f"the store has other checkpoints in thread {thread!r}, for example {min(stored - wanted)}",
                thread=thread,
                hint="Import into another store or namespace, or rename the thread",
            )

    def _store(self, thread: str, item: Item, was_present: bool) -> None:
        """Store one checkpoint and count it; if it cannot be stored, report it as missing."""
        try:
            item.save(self.store)
        except (InvalidInput, DecodeError) as error:
            self.add_missing(item.where, f"cannot be stored: {error.what}", thread, item.id)
            return
        self.stored += not was_present
        self.present += was_present


def save_item(thread: str, name: str, state: Mapping[str, Any], fields: CheckpointFields) -> Callable[[Store], None]:
    """Return a function that saves a checkpoint under its own id. Saving the same again changes nothing."""

    def save(store: Store) -> None:
        store.thread(thread).save(state, id=name, **fields)

    return save


def put_item(draft: upsert.Draft, as_dict: upsert.AsDict) -> Callable[[Store], None]:
    """Return a function that puts a checkpoint through an adapter. It never replaces one with other content."""

    def put(store: Store) -> None:
        access = access_of(store)
        stored = upsert.get(access.store, access.services, draft.id)
        if stored is None:
            upsert.put(access.store, access.services, draft, as_dict)
        elif stored.meta.thread_id != draft.thread or as_dict(stored) != draft.as_dict:
            raise Conflict(
                f"the store has a checkpoint {draft.id} with other content, or in another thread",
                thread=draft.thread,
                checkpoint=draft.id,
                hint="The import keeps the stored one. If the source is right, delete it and import again",
            )

    return put


def fit_fields(values: Mapping[str, Any], others: Mapping[str, Any], report: Callable[[str], None]) -> CheckpointFields:
    """Return fields as a save takes them. Unknown fields and invalid values go into the metadata."""
    fields: dict[str, Any] = {}
    metadata = dict(others)
    for name, value in values.items():
        try:
            fields.update(check_fields({name: value}))
        except InvalidInput as error:
            metadata[name] = value
            report(f"{error.what}: kept in the metadata")
    fields["metadata"] = metadata
    return fields  # type: ignore[return-value]  # every name is a field of a record, and its value is checked


def group_by_thread(items: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Return items by thread, in their order."""
    threads: dict[str, list[Item]] = {}
    for thread, item in items:
        threads.setdefault(thread, []).append(item)
    return threads


def export_checkpoints(
    store: Store, threads: Iterable[str] | None, branch: str, write: Callable[[str], list[str] | None]
) -> ExportReport:
    """Call ``write`` with the id of each checkpoint of these threads, or of all, oldest first.

    ``write`` returns the names of fields that the target cannot hold, or None if the checkpoint was deleted meanwhile.
    """
    names = [meta.thread_id for meta in store.threads()][::-1] if threads is None else list(threads)
    notes: list[Note] = []
    written = 0
    for name in names:
        others = [each.key.name for each in store.thread(name).branches() if branch not in (each.key.name, "*")]
        if others:
            notes.append(Note(f"branches left out: {', '.join(others)}", "", name))
        for meta in reversed(list(store.thread(name).history(branch=branch))):
            try:
                lost = write(meta.id)
            except StoreError:
                raise
            except BackstayError as error:
                notes.append(Note(f"left out: {error.what}", "", name, meta.id))
                continue
            written += lost is not None
            if lost:
                notes.append(Note(f"the file cannot hold: {', '.join(lost)}", "", name, meta.id))
    return ExportReport(threads=len(names), checkpoints=written, notes=tuple(notes))
