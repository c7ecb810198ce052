"""Import checkpoints of other systems, and export to them. Their ids stay the same, so both can be repeated.

A thread whose newest checkpoint the source does not have is refused, unless it has all of the source already: an
import never mixes its checkpoints with others, and never stores one behind a later one. A record that cannot be stored
is skipped, and the report names it. A field that a Backstay record cannot hold goes into its metadata under its own
name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress, ProgressReporter, Refused
from backstay.compat import upsert
from backstay.compat.adapter import is_same_json
from backstay.errors import (
    BackstayError,
    Conflict,
    Corrupted,
    DecodeError,
    Fenced,
    IdTaken,
    InvalidInput,
    StoreError,
    counted,
)
from backstay.model.fields import check_fields
from backstay.model.ids import check_id
from backstay.operations.arguments import names_of
from backstay.thread.access import access_of
from backstay.thread.store import Store, check_store

_ELSEWHERE = "Import into another store or namespace, or delete the thread here first"


@dataclass(slots=True)
class Item:
    """A checkpoint to import. ``where`` names the file or row that it came from."""

    thread: str
    id: str
    where: str
    save: Callable[[Store], object]


@dataclass(slots=True)
class Importer:
    """One import: counts what it stored, and collects what it did not."""

    store: Store
    order: str
    stored: int = 0
    present: int = 0
    refused: list[Refused] = field(default_factory=list)
    missing: list[Note] = field(default_factory=list)  # records that could not be read or stored
    notes: list[Note] = field(default_factory=list)  # checkpoints that are stored differently from the source

    def __post_init__(self) -> None:
        check_store(self.store, Store)

    def saved_item(
        self,
        thread: str,
        name: str,
        where: str,
        state: Mapping[str, Any],
        values: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> Item:
        """Return a checkpoint to save under its own id. Saving the same again changes nothing.

        ``values`` are its fields. ``others``, which have no field, and values that are invalid go into its metadata.
        """
        metadata = dict(others)
        fields: dict[str, Any] = {"metadata": metadata}
        for each, value in values.items():
            try:
                fields.update(check_fields({each: value}))
            except InvalidInput as error:
                metadata[each] = value
                self.notes.append(Note(f"{error.what}: kept in the metadata", where, thread, name))
        return Item(thread, name, where, lambda store: store.thread(thread).save(state, id=name, **fields))

    def import_all(self, items: Iterable[Item], progress: Progress | bool | None) -> ImportReport:
        """Store the checkpoints of each thread in the given order."""
        threads: dict[str, list[Item]] = {}
        for item in items:
            threads.setdefault(item.thread, []).append(item)
        reporter = ProgressReporter(progress, "importing", sum(map(len, threads.values())), "checkpoints")
        done = 0
        for thread, wanted in threads.items():
            before = self.stored
            try:
                self._import_thread(thread, wanted)
            except (Conflict, Fenced, Corrupted, InvalidInput) as error:
                self.refused.append(Refused(thread, error, self.stored - before))
            done += len(wanted)
            reporter.update(done)
        reporter.finish()
        return ImportReport(
            len(threads),
            self.stored,
            self.present,
            refused=tuple(self.refused),
            missing=tuple(self.missing),
            notes=tuple(self.notes),
            order=self.order,
        )

    def _import_thread(self, thread: str, items: Sequence[Item]) -> None:
        """Store the checkpoints of one thread and count them; one that cannot be stored is reported as missing."""
        check_id(thread, "thread_id")
        newest_first = [meta.id for meta in self.store.thread(thread).history(branch="*")]
        stored = set(newest_first)
        wanted = {item.id for item in items}
        if stored and newest_first[0] not in wanted and wanted - stored:
            raise Conflict(
                f"the store has other checkpoints in thread {thread!r}, for example {newest_first[0]}",
                thread=thread,
                hint=_ELSEWHERE,
            )
        last = max((place for place, item in enumerate(items) if item.id in stored), default=-1)
        for place, item in enumerate(items):
            if place < last and item.id not in stored:  # as the newest one it would be wrong
                what = f"not stored: the thread has a later checkpoint of the source, {items[last].id}, already"
                self.missing.append(Note(what, item.where, thread, item.id))
                continue
            try:
                item.save(self.store)
            except (InvalidInput, DecodeError) as error:
                self.missing.append(Note(f"cannot be stored: {error.what}", item.where, thread, item.id))
                continue
            except IdTaken as error:
                raise Conflict(
                    f"the store has a checkpoint {item.id} with other content, or in another thread",
                    thread=thread,
                    checkpoint=item.id,
                    hint=_ELSEWHERE,
                ) from error
            self.stored += item.id not in stored
            self.present += item.id in stored


def put_item(draft: upsert.Draft, where: str, as_dict: upsert.AsDict) -> Item:
    """Return a checkpoint to put through an adapter. It never replaces one with other content."""

    def put(store: Store) -> None:
        access = access_of(store)
        stored = upsert.get(access.store, access.services, draft.id)
        if stored is None:
            upsert.put(access.store, access.services, draft, as_dict)
        elif stored.meta.thread_id != draft.thread or not is_same_json(as_dict(stored), draft.as_dict):
            raise Conflict(
                f"the store has a checkpoint {draft.id} with other content, or in another thread",
                thread=draft.thread,
                checkpoint=draft.id,
                hint="The import keeps the stored one. If the source is right, delete it and import again",
            )

    return Item(draft.thread, draft.id, where, put)


def export_checkpoints(
    store: Store,
    threads: Iterable[str] | None,
    branch: str,
    write: Callable[[str], list[str] | None],
    carried: Collection[str] = (),
) -> ExportReport:
    """Call ``write`` with the id of each checkpoint of these threads, or of all, oldest first.

    ``write`` returns the names of fields that the target cannot hold, or None if the checkpoint was deleted meanwhile.
    ``carried`` gets the ids of the interrupts that are in the target.
    """
    check_store(store, Store)
    if threads is None:
        names: Sequence[str] = [meta.thread_id for meta in store.threads()][::-1]
    else:
        names = names_of(threads, "threads")
    left_out: list[Note] = []
    notes: list[Note] = []
    written = 0
    for name in names:
        branches = [each.key.name for each in store.thread(name).branches()]
        if not branches:
            left_out.append(Note("there is no such thread", "", name))
        others = [each for each in branches if branch not in (each, "*")]
        if others:
            notes.append(Note(f"branches left out: {', '.join(others)}", "", name))
        for meta in reversed(list(store.thread(name).history(branch=branch))):
            try:
                lost = write(meta.id)
            except StoreError:
                raise
            except BackstayError as error:
                left_out.append(Note(error.what, "", name, meta.id))
                continue
            written += lost is not None
            if lost:
                notes.append(Note(f"the file cannot hold: {', '.join(lost)}", "", name, meta.id))
        questions = [each for each in store.thread(name).interrupts(on_damage="mark") if each.id not in carried]
        if questions:
            notes.append(Note(f"the file cannot hold {counted(len(questions), 'open question')}", "", name))
    return ExportReport(threads=len(names), checkpoints=written, left_out=tuple(left_out), notes=tuple(notes))
