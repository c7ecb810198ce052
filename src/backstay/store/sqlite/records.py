"""Records: read, compared and written in one transaction. Each kind is one range of the table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from backstay.errors import Corrupted
from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.layout import SEQ_BITS, UNREADABLE
from backstay.store.leases import NO_LEASE, BranchKey, LeaseStatus
from backstay.store.records import (
    Fence,
    Kind,
    Record,
    RunFacts,
    RunQuery,
    StoredRun,
    checkpoint_is_gone,
    is_repeated,
    record_id,
    run_changed,
    winner,
    written,
)
from backstay.store.sqlite import queries
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import (
    CHECK_HINT,
    NUMBER_MAX,
    ColumnTypes,
    StoredId,
    branch_of,
    count_up,
    fetch_all,
    fetch_one,
    fetch_value,
    find_branch,
    find_thread,
    kind_of,
    pack_id,
    readable_names,
    seal,
    span_of_kind,
    thread_of,
    unpack_id,
)
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

_RECORD = ColumnTypes(
    "record", "int text text text text text bytes int id? int text? text? text? text? int? int int int int"
)

Facts = Sequence[str | int | None]
"""The columns of a run: its namespace, then ``RunFacts``."""


class SqliteRecords(SqliteTransactions):
    """The verbs on records."""

    @reading
    def record(self, connection: Connection, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        return _find(connection, kind, branch, key)

    @writing
    def put_record(
        self, connection: Connection, record: Record, fence: Fence | None = None, run: Record | None = None
    ) -> Record:
        branch, stored = record.branch, _find(connection, record.kind, record.branch, record.key)
        if stored is not None and is_repeated(record, stored):
            return stored
        if fence is not None:
            found = find_branch(connection, branch)
            (found.lease if found else NO_LEASE).check_writer(branch, fence.epoch, fence.token, self._clock())
        if (kept := winner(record, stored)) is not None:
            return kept
        done = _put(connection, record, stored)
        put_run(connection, run)
        return done

    @reading
    def records(
        self,
        connection: Connection,
        kind: Kind,
        namespace: str,
        thread: str | None,
        open_only: bool,
        after: int,
        limit: int,
    ) -> list[Record]:
        low, high = span_of_kind(kind, after)
        most, way = max(0, min(limit, PAGE_ROWS_MAX)), (thread is not None, open_only)
        bound = {"namespace": namespace, "thread": thread, "low": low, "high": high, "limit": most}
        found = fetch_all(connection, queries.RECORDS[way], bound)
        if len(found) < most and way in queries.RECORD_COUNTS:
            # The list ends here: once for each list, because counting takes time in proportion to all of it.
            bound["low"] = span_of_kind(kind)[0]
            number, counted, again = fetch_all(connection, queries.RECORD_COUNTS[way], bound)[0]
            if counted != again or (
                thread is not None and number is None and find_thread(connection, namespace, thread)
            ):
                what = f"some {'open ' if open_only else ''}records of kind {kind} cannot be found"
                raise Corrupted(what, thread=thread, hint=CHECK_HINT)
        return [_read(fields, listed=True) for fields in found]

    @writing
    def drop_records(self, connection: Connection, records: Collection[Record]) -> int:
        names = [(record_id(record.kind, record.branch, record.key), record.version) for record in records]
        return sum(fetch_one(connection, queries.DROP_RECORD_AS, name) is not None for name in names)

    @reading
    def run(self, connection: Connection, branch: BranchKey) -> StoredRun | None:
        found = fetch_one(connection, queries.RUN_OF_BRANCH, branch._asdict())
        return None if found is None else self._stored_run(connection, found)

    @reading
    def runs(self, connection: Connection, query: RunQuery) -> list[StoredRun]:
        low, high = span_of_kind("run")
        before = high if query.before is None else low | min(max(query.before, 0), NUMBER_MAX)
        bound = {**asdict(query), "low": low, "before": before, "limit": max(0, min(query.limit, PAGE_ROWS_MAX))}
        if query.thread is not None:
            found = fetch_all(connection, queries.RUNS_OF_THREAD, bound)
        elif query.graph is not None:
            statuses = [query.status]
            if query.status is None:
                statuses = [status for (status,) in fetch_all(connection, queries.STATUSES_OF_GRAPH, bound)]
            found = []
            for status in statuses:
                found += fetch_all(connection, queries.RUNS_OF_GRAPH_WITH_STATUS, {**bound, "status": status})
            found = sorted(found, key=itemgetter(0), reverse=True)[: bound["limit"]]
        else:
            found = fetch_all(connection, queries.RUNS_WITH_STATUS if query.status is not None else queries.RUNS, bound)
        return [self._listed_run(connection, fields) for fields in found]

    @reading
    def count_runs(self, connection: Connection, namespace: str, statuses: Collection[str]) -> dict[str, int]:
        counts = {status: fetch_value(connection, queries.COUNT_RUNS, (namespace, status)) for status in statuses}
        return {status: count for status, count in counts.items() if count}

    def _listed_run(self, connection: Connection, fields: tuple[Any, ...]) -> StoredRun:
        """Return a run for a list. If the row of its branch is damaged, only this run is unreadable."""
        try:
            return self._stored_run(connection, fields)
        except Corrupted:
            return StoredRun(replace(_read(fields[:-2], listed=True), body=b""), None, None)

    def _stored_run(self, connection: Connection, fields: tuple[Any, ...]) -> StoredRun:
        """Return a run with its branch's lease and step, from the columns of ``queries._RUNS``."""
        *columns, number, step = fields
        record = _read(tuple(columns), listed=True)
        lease = None
        if number is not None and record.body:
            branch = branch_of(connection, number << SEQ_BITS)
            if branch.lease.token is not None:
                now = self._clock()
                lease = LeaseStatus(
                    record.branch,
                    number,
                    branch.lease.owner or "",
                    branch.lease.epoch,
                    branch.lease.left_us(now),
                    branch.lease.token,
                )
        return StoredRun(record, lease, step)


def put_run(connection: Connection, run: Record | None) -> Record | None:
    """Store a run together with another change, and return it; Conflict if another writer has changed it."""
    if run is None:
        return None
    stored = _find(connection, "run", run.branch, run.key)
    if stored is not None and is_repeated(run, stored):
        return stored
    if (stored is None and run.version) or winner(run, stored) is not None:
        raise run_changed(run, stored)
    return _put(connection, run, stored)


def _put(connection: Connection, record: Record, stored: Record | None) -> Record:
    """Store a record, which replaces the stored one."""
    name, branch = record_id(record.kind, record.branch, record.key), record.branch
    facts: Facts = (None,) * 5 if record.run is None else (branch.namespace, *record.run)
    changed = (record.version + 1, record.open, record.body, *facts)
    if stored is not None:
        branch = stored.branch  # an interrupt may be written from another branch, and stays where it is
        place, thread = span_of_kind(record.kind)[0] | stored.number, thread_of(connection, branch)[0]
        checkpoint = None if stored.checkpoint is None else pack_id(branch.namespace, stored.checkpoint)
        own = _seal(place, thread, branch, record.key, checkpoint, facts)
        connection.execute(queries.CHANGE_RECORD, (*changed, own, name))
        return written(record, stored, 0)
    thread, checkpoint = _place(connection, record)
    number = count_up(connection, "record", 1)
    place = span_of_kind(record.kind)[0] | number
    names = (place, name, thread, branch.scope, branch.name, record.key, checkpoint)
    own = _seal(place, thread, branch, record.key, checkpoint, facts)
    connection.execute(queries.ADD_RECORD, (*names, *changed, own))
    return written(record, None, number)


def runs_of(
    connection: Connection, statement: str, namespace: str, graph: tuple[str, str], now_us: int
) -> Iterator[Record]:
    """Iterate over the runs of a graph that are running, or due, earliest first. Damaged ones are left out."""
    bound = {"namespace": namespace, "graph": graph[0], "fingerprint": graph[1], "now": now_us}
    for fields in connection.execute(statement, bound):
        record = _read(fields[:-2], listed=True)
        if record.body:
            yield record


def has_open_record(connection: Connection, key: int, name: StoredId) -> bool:
    """Return whether a checkpoint has an open record."""
    return fetch_one(connection, queries.HAS_OPEN_RECORD, (key >> SEQ_BITS, name)) is not None


def _find(connection: Connection, kind: Kind, branch: BranchKey, key: str) -> Record | None:
    """Return a record, or None if there is none. Work that its record says was done must not look undone."""
    fields = fetch_one(connection, queries.RECORD, (record_id(kind, branch, key),))
    if fields is not None:
        return _read(fields)
    named = (branch.namespace, branch.thread, key, *span_of_kind(kind), kind, branch.scope, branch.name)
    if fetch_one(connection, queries.RECORD_AGAIN, named) is not None:
        raise Corrupted(f"{kind} {key!r} cannot be found by its name", thread=branch.thread, hint=CHECK_HINT)
    return None


def _place(connection: Connection, record: Record) -> tuple[int, StoredId | None]:
    """Return the number of a new record's thread, and its checkpoint as stored; NotFound if that does not exist."""
    if record.checkpoint is None:
        return thread_of(connection, record.branch)[0], None
    name = pack_id(record.branch.namespace, record.checkpoint)
    found = fetch_one(connection, queries.IDENTITY, (name,))
    if found is not None:
        branch = branch_of(connection, found[0])
        if branch.key[:3] == record.branch[:3]:
            return branch.thread, name
    raise checkpoint_is_gone(record)


def _seal(
    place: int,
    thread: int,
    branch: BranchKey,
    key: str,
    checkpoint: StoredId | None,
    facts: Facts,
) -> int:
    return seal(place, thread, branch.scope, branch.name, key, checkpoint, *facts)


def _read(fields: tuple[Any, ...], listed: bool = False) -> Record:
    """Return a record; of a damaged one a list shows the name, without a body."""
    place, namespace, name, scope, branch_name, key, body, version, checkpoint, is_open, *rest = fields
    *facts, own, thread, floor, thread_seal = rest
    branch = BranchKey(namespace, name, scope, branch_name)
    is_sound = _RECORD.fits(fields) and own == _seal(place, thread, branch, key, checkpoint, facts)
    if not is_sound or thread_seal != seal(thread, branch.namespace, branch.thread, floor):
        if listed:
            key = key if isinstance(key, str) else UNREADABLE
            return Record(kind_of(place), readable_names(branch), key, b"", bool(is_open), number=place & NUMBER_MAX)
        what = f"the row of {kind_of(place)} {key!r}, or of its thread, is damaged"
        raise Corrupted(what, thread=branch.thread, hint=CHECK_HINT)
    return Record(
        kind_of(place),
        branch,
        key,
        body,
        bool(is_open),
        None if checkpoint is None else unpack_id(checkpoint),
        version,
        place & NUMBER_MAX,
        None if facts[1] is None else RunFacts(*facts[1:]),
    )
