"""Records. A write is one statement: a call of a function of the schema that checks and stores it."""

from __future__ import annotations

from typing import Any

import psycopg

from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.leases import BranchKey, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.connection import CHECKPOINT_IS_GONE, DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id, unpack_id
from backstay.store.records import KINDS, Fence, Kind, Record, checkpoint_is_gone, record_id, record_is_gone

RETURNED, FENCED, GONE = range(3)
"""Answers of ``put_record``."""


class PostgresRecords:
    """The verbs on records."""

    _pool: RetryingPool

    def record(self, kind: Kind, branch: BranchKey, key: str) -> Record | None:
        name = record_id(kind, branch, key)

        def work(connection: DeadlineConnection) -> Record | None:
            found = connection.one(queries.RECORD, (name,))
            return None if found is None else _read(found)

        return self._pool.read(work)

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        branch = record.branch
        epoch, token = fence or (None, None)
        checkpoint = None if record.checkpoint is None else pack_id(branch.namespace, record.checkpoint)
        written = (record.key, checkpoint, record.body, record.open, ttl_us, record.version, record.number)
        name = record_id(record.kind, branch, record.key)
        bound = (*branch, fence is not None, epoch, token, record.kind, name, *written)

        def work(connection: DeadlineConnection) -> Record:
            try:
                answer = connection.one(queries.PUT_RECORD, bound)
            except psycopg.Error as error:
                if error.sqlstate != CHECKPOINT_IS_GONE:
                    raise
                raise checkpoint_is_gone(record) from None
            assert answer is not None
            outcome, current, holder, held_us, *fields = answer
            if outcome == FENCED:
                raise fenced(branch, epoch or 0, current, holder, held_us)
            if outcome == GONE:
                raise record_is_gone(record)
            return _read((record.kind, branch.namespace, *fields))

        return self._pool.write(work)

    def records(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        conditions = (queries.AND_THREAD if thread is not None else "") + (queries.AND_OPEN if open_only else "")
        statement = queries.RECORDS.replace("{conditions}", conditions)
        most = max(0, min(limit, PAGE_ROWS_MAX))
        bound = {"kind": kind, "namespace": namespace, "thread": thread, "after": after, "limit": most}
        return self._pool.read(lambda connection: [_read(fields) for fields in connection.every(statement, bound)])


def _read(fields: tuple[Any, ...]) -> Record:
    kind, *branch, key, checkpoint, body, is_open, version, number, left_us = fields
    checkpoint = None if checkpoint is None else unpack_id(checkpoint)
    kind = KINDS[KINDS.index(kind)]  # Backstay never writes any other value
    return Record(kind, BranchKey(*branch), key, body, is_open, checkpoint, version, number, left_us)
