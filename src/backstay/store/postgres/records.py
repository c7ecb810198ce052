"""Records. A write is one statement: a call of a function of the schema that checks and stores it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from backstay.errors import InvalidInput, NotFound, StoreError
from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.layout import UNREADABLE
from backstay.store.leases import BranchKey, LeaseStatus, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import CHECKPOINT_IS_GONE, IS_MIGRATED, DeadlineConnection, translate
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id, unpack_id
from backstay.store.records import (
    KINDS,
    Fence,
    Kind,
    Record,
    RunFacts,
    RunQuery,
    StoredRun,
    checkpoint_is_gone,
    record_id,
    record_is_gone,
    run_changed,
)

RETURNED, FENCED, GONE = range(3)
"""Answers of ``put_record``."""


class PostgresRecords:
    """The verbs on records."""

    _pool: RetryingPool

    def record(self, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        name = record_id(kind, branch, key)

        def work(connection: DeadlineConnection) -> Record | None:
            found = connection.one(queries.RECORD, (name,))
            return None if found is None else read_record(found)

        return self._pool.read(work)

    def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
        if run is None:
            return self._pool.write(lambda connection: put(connection, record, fence))

        def work(connection: DeadlineConnection) -> Record:
            stored = put(connection, record, fence)
            if (stored.version, stored.body) == (record.version + 1, record.body):
                put_run(connection, run)
            return stored

        return self._pool.change(work, again=True)

    def put_record_within(self, connection: Any, record: Record) -> Record:
        """Store a new record in the transaction of another connection, which its owner commits or rolls back."""
        if not isinstance(connection, psycopg.Connection):
            raise InvalidInput(
                f"transaction must be a psycopg connection, not {type(connection).__name__}",
                hint="Pass the connection whose transaction the run belongs to",
            )
        statement = self._pool.statements[queries.PUT_RECORD]
        try:
            with connection.cursor(row_factory=tuple_row) as cursor:
                answer = cursor.execute(statement.encode(), _bound(record, None)).fetchone()
        except psycopg.Error as error:
            found = translate(error, self._pool.target)
            if error.sqlstate == IS_MIGRATED:
                raise found from error
            raise StoreError(
                f"the run could not be stored in the given transaction: {found.what}",
                hint="Roll it back and try again. Its connection must reach the database of the store, as a user that "
                "may use the store's schema",
            ) from error
        return _answered(record, None, answer)

    def drop_records(self, records: Collection[Record]) -> int:
        names = [record_id(record.kind, record.branch, record.key) for record in records]
        bound = (names, [record.version for record in records])
        return len(self._pool.write(lambda connection: connection.every(queries.DROP_RECORDS, bound)))

    def run(self, branch: BranchKey) -> StoredRun | None:
        found = self._pool.read(lambda connection: connection.one(queries.RUN_OF_BRANCH, branch._asdict()))
        return None if found is None else _read_run(found)

    def runs(self, query: RunQuery) -> list[StoredRun]:
        before = query.before if query.before is not None else 1 << 62
        limit = max(0, min(query.limit, PAGE_ROWS_MAX))
        bound = {**asdict(query), "before": before, "limit": limit}

        def work(connection: DeadlineConnection) -> list[StoredRun]:
            statement = queries.RUNS_OF_GRAPH
            if query.graph is not None and query.status is None and query.thread is None:
                bound["statuses"] = [status for (status,) in connection.every(queries.STATUSES_OF_GRAPH, bound)]
            else:
                conditions = [
                    text
                    for text, value in (
                        (queries.AND_THREAD, query.thread),
                        (queries.AND_STATUS, query.status),
                        (queries.AND_GRAPH, query.graph),
                    )
                    if value is not None
                ]
                statement = queries.RUNS.replace("{conditions}", "".join(conditions))
            return [_read_run(fields) for fields in connection.every(statement, bound)]

        return self._pool.read(work)

    def count_runs(self, namespace: str, statuses: Collection[str]) -> dict[str, int]:
        found = self._pool.read(lambda connection: connection.every(queries.COUNT_RUNS, (namespace, list(statuses))))
        return {status: count for status, count in found if count}

    def records(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        conditions = (queries.AND_THREAD if thread is not None else "") + (queries.AND_OPEN if open_only else "")
        statement = queries.RECORDS.replace("{conditions}", conditions)
        most = max(0, min(limit, PAGE_ROWS_MAX))
        bound = {"kind": kind, "namespace": namespace, "thread": thread, "after": after, "limit": most}
        return self._pool.read(
            lambda connection: [read_record(fields) for fields in connection.every(statement, bound)]
        )


def put(connection: DeadlineConnection, record: Record, fence: Fence | None = None) -> Record:
    """Store a record, or return the record that another writer stored."""
    try:
        answer = connection.one(queries.PUT_RECORD, _bound(record, fence))
    except psycopg.Error as error:
        if error.sqlstate != CHECKPOINT_IS_GONE:
            raise
        raise checkpoint_is_gone(record) from None
    return _answered(record, fence, answer)


def _bound(record: Record, fence: Fence | None) -> tuple[Any, ...]:
    branch = record.branch
    epoch, token = fence or (None, None)
    checkpoint = None if record.checkpoint is None else pack_id(branch.namespace, record.checkpoint)
    written = (record.key, checkpoint, record.body, record.open, record.version, record.number)
    name = record_id(record.kind, branch, record.key)
    return (*branch, fence is not None, epoch, token, record.kind, name, *written, *(record.run or (None,) * 4))


def _answered(record: Record, fence: Fence | None, answer: tuple[Any, ...] | None) -> Record:
    """Return the record from the answer of ``put_record``, or raise what it says."""
    assert answer is not None
    branch, epoch = record.branch, None if fence is None else fence.epoch
    outcome, current, holder, held_us, *fields = answer
    if outcome == FENCED:
        raise fenced(branch, epoch or 0, current, holder, held_us)
    if outcome == GONE:
        raise record_is_gone(record)
    return read_record((record_id(record.kind, branch, record.key), record.kind, branch.namespace, *fields))


def put_run(connection: DeadlineConnection, run: Record | None) -> Record | None:
    """Store a run together with another change, and return it; Conflict if another writer has changed it."""
    if run is None:
        return None
    try:
        stored = put(connection, run)
    except NotFound as error:
        raise run_changed(run, None) from error
    if (stored.version, stored.body) != (run.version + 1, run.body):
        raise run_changed(run, stored)
    return stored


def read_record(fields: Sequence[Any]) -> Record:
    """Return a record from ``queries.RECORD_COLUMNS``."""
    name, kind, *place, key, checkpoint, body, is_open, version, number, status, graph, fingerprint, due = fields
    checkpoint = None if checkpoint is None else unpack_id(checkpoint)
    kind = KINDS[KINDS.index(kind)]  # Backstay never writes any other value
    branch = BranchKey(*place)
    if name != record_id(kind, branch, key):
        key += UNREADABLE  # a list shows it, and no write would find it
    run = None if status is None else RunFacts(status, graph, fingerprint, due)
    return Record(kind, branch, key, body, is_open, checkpoint, version, number, run)


def _read_run(fields: Sequence[Any]) -> StoredRun:
    *columns, number, owner, epoch, left_us, token, step = fields
    record = read_record(columns)
    lease = None if token is None else LeaseStatus(record.branch, number, owner or "", epoch, left_us, token)
    return StoredRun(record, lease, step)
