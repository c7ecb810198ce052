"""Moving in from LangGraph's own savers: every thread, namespace, checkpoint and pending write, in the bytes they have.

    import_langgraph(store, "checkpoints.sqlite")
    import_langgraph(store, "postgresql://app@db/agents")

The source is only read. Nothing in it is opened that names a type, so a value that would run something when it is
opened is carried over like any other. Ids, parents and the numbers of writes stay, so it may be repeated: what is there
with the same content changes nothing, and one that was killed is completed by the next, because a checkpoint is stored
after its writes. A thread that went on here since is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from langgraph.checkpoint.serde.base import CipherProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.errors import Conflict, Corrupted, Fenced, InvalidInput, StoreRefused
from backstay.integrations.langgraph.description import PARENT
from backstay.integrations.langgraph.names import Place, forking
from backstay.integrations.langgraph.saver import BackstaySaver
from backstay.integrations.langgraph.stock.sqlite import SqliteSource
from backstay.integrations.langgraph.stock.tables import (
    VALUES,
    Source,
    Spot,
    StockCheckpoint,
    StockThread,
    StockWrite,
    sealed,
)
from backstay.integrations.langgraph.values import to_body
from backstay.model.checkpoint import MAIN
from backstay.model.ids import check_id
from backstay.store.base import Backend, LaneKey, Query, Row, WriteRow
from backstay.store.sqlite.database import resolve_path
from backstay.thread.access import access_of
from backstay.thread.removal import REBUILT_FROM
from backstay.thread.store import Store
from backstay.transfer.intake import Arrival, Intake
from backstay.transfer.progress import Progress, Teller
from backstay.transfer.report import ImportReport, Note, Refused
from backstay.version import install_hint

ORDER = "the checkpoints' ids, which tell their time, but a parent before its children"


def import_langgraph(
    store: Store,
    source: str | Path,
    *,
    threads: Collection[str] | None = None,
    progress: Progress | bool | None = None,
    serde: EncryptedSerializer | None = None,
) -> ImportReport:
    """Store what is in a file of SqliteSaver, or in PostgresSaver's tables; all threads, unless some are named.

    ``serde`` is the serializer of an encrypted source. SQLite's checkpoints cannot be cut into channels without its
    key, and PostgreSQL has the small values in plain text: what is not encrypted is encrypted on the way.
    """
    if serde is not None and not isinstance(serde, EncryptedSerializer):
        raise InvalidInput("serde must be an EncryptedSerializer", hint="For other sources none is needed")
    if isinstance(threads, str):
        raise InvalidInput("threads must be a collection of names, not one", hint=f"threads=[{threads!r}]")
    wanted = None if threads is None else list(dict.fromkeys(map(str, threads)))
    cipher = None if serde is None else serde.cipher
    with open_source(source, cipher) as stock, _Move(store, stock, cipher, progress) as move:
        return move.all(wanted)


def open_source(source: str | Path, cipher: CipherProtocol | None = None) -> Source:
    """Open the tables that a path or URL names, for reading only."""
    text = os.fspath(source)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInput("a source is named by a file's path or a URL", hint="For example checkpoints.sqlite")
    if text.startswith(("postgresql://", "postgres://")):
        return _postgres(text)
    if "://" in text and not text.startswith("sqlite://"):
        raise InvalidInput(f"nothing is read from {text.partition('://')[0]}://", hint="Known: sqlite, postgresql")
    path = resolve_path(text if text.startswith("sqlite://") else text.removeprefix("sqlite:"))
    return SqliteSource(path, cipher)


def _postgres(url: str) -> Source:
    try:
        from backstay.integrations.langgraph.stock.postgres import PostgresSource
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise StoreRefused("PostgreSQL needs a driver that is not installed", hint=install_hint("postgres")) from error
    return PostgresSource(url)


class _Intake(Intake):
    """An intake for threads with namespaces; one that went on here since is not touched."""

    there: set[str]  # of the thread that is being taken in

    def take(self, thread: str, arrivals: Sequence[Arrival]) -> None:
        """Store what came of a thread, in the order given."""
        self.threads += 1
        before = self.stored
        try:
            check_id(thread, "thread_id")
            self.there = there = _names(access_of(self.store).store, self.store.namespace, thread)
            coming = {arrival.id for arrival in arrivals}
            self._check_strangers(thread, there, coming)
            if there > coming:
                self.present += len(arrivals)
                return
            for arrival in arrivals:
                self._store(thread, arrival, arrival.id in there)
        except (Conflict, Fenced, Corrupted, InvalidInput) as error:
            self.refused.append(Refused(thread, error, self.stored - before))


def _names(store: Backend, namespace: str, thread: str) -> set[str]:
    """Return the ids of a thread's checkpoints, of all its namespaces."""
    found: set[str] = set()
    query: Query | None = Query(namespace, thread)
    while query is not None:
        rows = partial(_find, query)(store)
        found.update(row.id for row in rows)
        query = Query(namespace, thread, before=rows[-1].seq) if len(rows) == query.limit else None
    return found


def _find(query: Query, store: Backend) -> Sequence[Row]:
    return store.find(query)


class _Savers(NamedTuple):
    """Who stores what follows something, and who stores what follows nothing: LangGraph lets a thread begin twice."""

    next: BackstaySaver
    first: BackstaySaver


class _Move:
    """One import."""

    def __init__(
        self, store: Store, source: Source, cipher: CipherProtocol | None, progress: Progress | bool | None
    ) -> None:
        self._source = source
        self._cipher = cipher
        self._teller = Teller(progress, "importing", 0, "checkpoints")
        self._intake = _Intake(store, ORDER)
        self._savers = _Savers(BackstaySaver(store), BackstaySaver(store, on_conflict="branch"))
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for saver in self._savers:
            saver.close()

    def all(self, wanted: list[str] | None) -> ImportReport:
        """Store the threads that are wanted."""
        for name in self._threads() if wanted is None else wanted:
            try:
                thread = self._source.thread(name)
            except Corrupted as error:
                self._intake.threads += 1
                self._intake.refused.append(Refused(name, error))
                continue
            if wanted is not None and not thread.spots:
                self._intake.lacks(self._source.shown, "has no checkpoints of this thread", name)
                continue
            self._note(name, thread)
            line = _Line(self._savers, self._source.shown, self._intake, name, thread, self._cipher)
            self._intake.take(name, [self._counted(arrival) for arrival in line.arrivals()])
        self._teller.finish()
        return self._intake.take_all({}, None)

    def _threads(self) -> Iterator[str]:
        try:
            yield from self._source.threads()
        except Corrupted as error:
            self._intake.lacks(self._source.shown, f"the list of threads cannot be read further: {error.what}")

    def _note(self, name: str, thread: StockThread) -> None:
        def note(what: str) -> None:
            self._intake.notes.append(Note(what, self._source.shown, name))

        if thread.strays:
            note(f"{thread.strays} writes whose checkpoint is not there are left behind")
        late = sum(spot.parent is not None and spot.parent > spot.id for spot in thread.spots)
        if late:
            note(f"{late} checkpoints have lower ids than their parents: newest is what follows, not the highest id")

    def _counted(self, arrival: Arrival) -> Arrival:
        def save(store: Store) -> None:
            self._done += 1
            self._teller.tell(self._done)
            arrival.save(store)

        return Arrival(arrival.id, arrival.where, save)


class _Line:
    """The checkpoints of one thread on their way."""

    def __init__(
        self,
        savers: _Savers,
        shown: str,
        intake: _Intake,
        thread: str,
        stock: StockThread,
        cipher: CipherProtocol | None,
    ) -> None:
        self._cipher = cipher
        self._is_half_open = False  # plain values beside encrypted ones were found, and said so
        self._savers = savers
        self._shown = shown
        self._intake = intake
        self._thread = thread
        self._stock = stock
        self._there: set[tuple[str, str]] = set()  # stored, by this import or before
        self._heirs: dict[tuple[str, str], str] = {}  # by parent: who goes on with its branch; others fork from it
        self._last: StockCheckpoint | None = None

    def arrivals(self) -> list[Arrival]:
        """Return what is to be stored, in order; each is read when its turn comes."""
        return [self._arrival(spot) for spot in self._stock.spots]

    def _arrival(self, spot: Spot) -> Arrival:
        def save(store: Store) -> None:
            found = self._stock.read(spot)
            for what in found.lost:
                self._intake.lacks(where, f"{what}: not carried over", self._thread, name)
            self._write(place, name, found.writes)
            self._look_for_plain(found)
            if self._cipher is None or name not in self._intake.there:  # the same encrypts to other bytes each time
                self._put(place, found, where)
            self._there.add((spot.ns, spot.id))
            self._last = found

        place = Place(self._thread, spot.ns)
        name = place.name(spot.id)
        where = f"{self._shown}, checkpoint {spot.id}" + (f" of namespace {spot.ns!r}" if spot.ns else "")
        return Arrival(name, where, save)

    def _write(self, place: Place, name: str, writes: Sequence[StockWrite]) -> None:
        """Store writes under their own numbers, before their checkpoint: if that is there, so are they."""
        rows = []
        for write in writes:
            body = to_body(sealed(write.value, self._cipher))
            rows.append(WriteRow(write.task, write.idx, write.channel, body.kind, body.count, body.data, write.path))
        if rows:
            store = self._intake.store
            lane = LaneKey(store.namespace, place.thread, place.scope, MAIN)
            access_of(store).store.write(lane, name, rows, False)

    def _put(self, place: Place, found: StockCheckpoint, where: str) -> None:
        spot, metadata, parent = found.spot, dict(found.metadata), found.spot.parent
        key = (spot.ns, parent or "")
        config: dict[str, Any] = {"thread_id": place.thread, "checkpoint_ns": place.ns}
        if parent and key in self._there:
            config["checkpoint_id"] = parent if self._heir(key) == spot.id else forking(parent)
        elif parent:
            metadata[PARENT] = parent
            self._intake.notes.append(Note(self._orphan(parent, metadata), where, place.thread, place.name(spot.id)))
        saver = self._savers.next if "checkpoint_id" in config else self._savers.first
        checkpoint: Any = {name: sealed(value, self._cipher) for name, value in found.checkpoint.items()}
        checkpoint[VALUES] = {name: sealed(value, self._cipher) for name, value in checkpoint[VALUES].items()}
        saver.put({"configurable": config}, checkpoint, metadata, self._changed(found))  # type: ignore[arg-type]

    def _look_for_plain(self, found: StockCheckpoint) -> None:
        tags = {"+" in value.tag for value in found.checkpoint[VALUES].values()}
        if self._cipher is None and len(tags) == 2 and not self._is_half_open:
            self._is_half_open = True
            what = (
                "PostgresSaver has small values in plain text beside encrypted ones: with serde= they are encrypted too"
            )
            self._intake.notes.append(Note(what, self._shown, self._thread))

    def _heir(self, parent: tuple[str, str]) -> str | None:
        """Return the child that goes on with its parent's branch: the first, but of those that are there already."""
        if not self._heirs:
            there = self._intake.there
            for spot in sorted(
                self._stock.spots, key=lambda spot: Place(self._thread, spot.ns).name(spot.id) not in there
            ):
                self._heirs.setdefault((spot.ns, spot.parent or ""), spot.id)
        return self._heirs.get(parent)

    def _orphan(self, parent: str, metadata: Mapping[str, Any]) -> str:
        what = f"its parent {parent} is not there"
        return f"{what}, and values that are made of earlier writes may lack some" if REBUILT_FROM in metadata else what

    def _changed(self, found: StockCheckpoint) -> dict[str, Any]:
        """Return the versions of channels whose bytes may differ from the parent's: a version alone proves nothing."""
        versions: dict[str, Any] = found.checkpoint["channel_versions"]
        last = self._last
        if last is None or (last.spot.ns, last.spot.id) != (found.spot.ns, found.spot.parent):
            return dict(versions)
        before, values = last.checkpoint[VALUES], found.checkpoint[VALUES]
        return {
            channel: version
            for channel, version in versions.items()
            if channel not in before or before[channel] != values.get(channel)
        }
