"""Taking in checkpoints of other systems: their ids stay, so it may be repeated; what does not fit is said.

A thread that holds anything the source does not is refused, unless all of the source is there already: nobody's own
checkpoints are mixed with imported ones. A record that cannot be stored is passed over and named in the report. A field
that our record cannot have goes into its metadata under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.compat import shelf
from backstay.errors import Conflict, Corrupted, DecodeError, Fenced, InvalidInput
from backstay.model.checkpoint import Notes
from backstay.model.fields import check_fields
from backstay.model.ids import check_id
from backstay.thread.access import access_of
from backstay.thread.store import Store
from backstay.transfer.progress import Progress, Teller
from backstay.transfer.report import ImportReport, Note, Refused


@dataclass(slots=True)
class Arrival:
    """A checkpoint that is to be stored. ``where`` names the file or row it came from."""

    id: str
    where: str
    save: Callable[[Store], None]


@dataclass(slots=True)
class Intake:
    """What was taken in so far, and what was not."""

    store: Store
    order: str
    stored: int = 0
    present: int = 0
    threads: int = 0
    refused: list[Refused] = field(default_factory=list)
    missing: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def lacks(self, where: str, what: str, thread: str | None = None, checkpoint: str | None = None) -> None:
        """Note something that could not be read or stored."""
        self.missing.append(Note(what, where, thread, checkpoint))

    def take_all(self, threads: Mapping[str, Sequence[Arrival]], progress: Progress | bool | None) -> ImportReport:
        """Store the checkpoints of each thread in the order given."""
        teller = Teller(progress, "importing", sum(map(len, threads.values())), "checkpoints")
        done = 0
        for thread, arrivals in threads.items():
            self._take(thread, arrivals)
            done += len(arrivals)
            teller.tell(done)
        teller.finish()
        return ImportReport(
            self.threads,
            self.stored,
            self.present,
            refused=tuple(self.refused),
            missing=tuple(self.missing),
            notes=tuple(self.notes),
            order=self.order,
        )

    def _take(self, thread: str, arrivals: Sequence[Arrival]) -> None:
        self.threads += 1
        before = self.stored
        try:
            check_id(thread, "thread_id")
            there = {meta.id for meta in self.store.thread(thread).history(branch="*")}
            self._check_strangers(thread, there, {arrival.id for arrival in arrivals})
            for arrival in arrivals:
                self._store(thread, arrival, arrival.id in there)
        except (Conflict, Fenced, Corrupted, InvalidInput) as error:
            self.refused.append(Refused(thread, error, self.stored - before))

    def _check_strangers(self, thread: str, there: set[str], coming: set[str]) -> None:
        if there - coming and coming - there:
            raise Conflict(
                f"the store has other checkpoints in this thread, {min(there - coming)} for one",
                thread=thread,
                hint="Import into another store or namespace, or give the thread another name",
            )

    def _store(self, thread: str, arrival: Arrival, was_there: bool) -> None:
        try:
            arrival.save(self.store)
        except (InvalidInput, DecodeError) as error:
            self.lacks(arrival.where, f"cannot be stored: {error.what}", thread, arrival.id)
            return
        self.stored += not was_there
        self.present += was_there


def saving(thread: str, name: str, state: Mapping[str, Any], notes: Notes) -> Callable[[Store], None]:
    """Return the save of a checkpoint under its own id; the same again changes nothing."""

    def save(store: Store) -> None:
        store.thread(thread).save(state, id=name, **notes)

    return save


def putting(face: str, draft: shelf.Draft, wire: shelf.Wire) -> Callable[[Store], None]:
    """Return the put of a checkpoint through one of the faces; one with other content is never replaced."""

    def put(store: Store) -> None:
        access = access_of(store)
        there = shelf.get(access.store, access.context, draft.id)
        if there is not None and (there.meta.thread_id != draft.thread or wire(there) != draft.wire):
            raise Conflict(
                f"checkpoint {draft.id} is in the store with other content, or in another thread",
                thread=draft.thread,
                checkpoint=draft.id,
                hint="What is there stays. Delete it first if the source's is the right one",
            )
        if there is None:
            shelf.put(access.store, access.context, face, draft, wire)

    return put


def fitted(values: Mapping[str, Any], others: Mapping[str, Any], say: Callable[[str], None]) -> Notes:
    """Return fields as a save takes them; what our record cannot have, and what it does not know, is metadata."""
    notes: dict[str, Any] = {}
    metadata = dict(others)
    for name, value in values.items():
        try:
            notes.update(check_fields({name: value}))
        except InvalidInput as error:
            metadata[name] = value
            say(f"{error.what}: kept in the metadata")
    notes["metadata"] = metadata
    return notes  # type: ignore[return-value]  # every name is one of a record's fields, and checked


def grouped(arrivals: Iterable[tuple[str, Arrival]]) -> dict[str, list[Arrival]]:
    """Return arrivals by thread, in their order."""
    threads: dict[str, list[Arrival]] = {}
    for thread, arrival in arrivals:
        threads.setdefault(thread, []).append(arrival)
    return threads
