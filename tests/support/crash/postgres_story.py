"""A story of every verb that writes, told twice: once in peace, once with a fault in each step. Both must end alike.

What "alike" means is the strictest there is: the same answers, and the same rows in every table after every step, but
for times that the database's own clock gives. So nothing can be stored twice, half, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql

import backstay
from backstay.model.checkpoint import Write
from backstay.model.runs import RunStatus
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.run_records import GRAPH, new_row, row_of
from backstay.store.base import Commit, Committed
from backstay.store.leases import BranchKey, LeaseRequest
from backstay.store.memory import MemoryStore
from backstay.store.records import Record
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services

Call = Callable[[backstay.Store], object]

LEASED, EXPIRING, RELEASED, NEVER_SAVED = (BranchKey("", name, "", "main") for name in ("ship", "boat", "raft", "ark"))
CLAIM = LeaseRequest("ann", "token-1", 3_600_000_000)
EXPIRED = LeaseRequest("bob", "token-2", 1)
TAKER = LeaseRequest("eve", "token-3", 3_600_000_000)
RUN = replace(new_row(LEASED, "run-1", GRAPH, "job", 0, "1"), status=RunStatus.RUNNING).sealed()
QUEUED = replace(new_row(EXPIRING, "run-2", GRAPH, "job", 0, "1"), due_us=5).sealed()

COMMIT = b"COMMIT"
RECORD = b".put_record("
IMPORTED = 30
STREAMS_OF_IMPORT = 1_000_000  # nobody else comes so far
UNTOLD_TABLES = ("counter", "meta")  # numbers given out, some of them for nothing
UNTOLD_COLUMNS = ("expires",)


@dataclass(frozen=True)
class Step:
    """One call, and what only its decisive request contains."""

    name: str
    request: bytes
    call: Call


def fixed_clock() -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC)


class _Source(MemoryStore):
    """Where the commits of an import come from."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[Commit] = []
        self._next = STREAMS_OF_IMPORT

    def reserve(self, count: int) -> int:
        self._next += count
        return self._next - count

    def commit(self, commit: Commit) -> Committed:
        self.commits.append(commit)
        return super().commit(commit)


def make_import(item_bytes: int = 500) -> list[Commit]:
    """Return commits that make one branch; always the same ones."""
    source = _Source()
    thread = Store(source, make_services("", fixed_clock)).thread("imported")
    for number in range(IMPORTED):
        item = hashlib.shake_128(f"{number}".encode()).digest(item_bytes)
        thread.append({"log": [item]}, set={"n": number}, id=f"m-{number}", tags=["even"] * (number % 2 == 0))
    return source.commits


def found_interrupt(store: backstay.Store, name: str) -> InterruptRecord:
    return next(record for record in store.thread("t").interrupts(pending=False) if record.id == name)


def set_stage(store: backstay.Store) -> None:
    """Make what the story needs to be there."""
    thread, backend = store.thread("t"), access_of(store).store
    thread.save({"messages": ["first" * 200], "n": 1}, id="c-1")
    thread.append({"messages": ["second"]}, id="c-2")
    thread.interrupt("c-2", prompt="may I?", id="i-1")
    for branch in (LEASED, EXPIRING, RELEASED):
        store.thread(branch.thread).save({"n": 0}, id=f"{branch.thread}-1")
    backend.acquire(EXPIRING, EXPIRED)
    backend.acquire(RELEASED, CLAIM)
    backend.acquire(NEVER_SAVED, CLAIM)
    for step in range(1, 9):
        store.thread("old").append({"log": [f"{step}" * 50]}, id=f"o-{step}")


def _append(store: backstay.Store) -> object:
    saved = store.thread("t").append({"messages": ["third"]}, set={"n": 3}, id="c-3")
    return saved.seq, saved.digest, saved.parent_id


def _save(store: backstay.Store) -> object:
    saved = store.thread("new").save({"text": "x" * 5000, "n": 1}, id="n-1", tags=["begin"])
    return saved.seq, saved.digest


def _fork(store: backstay.Store) -> object:
    head = store.thread("t").fork("c-1", branch="side", set={"n": 7}, id="f-1").latest()
    return head and (head.seq, head.digest)


def _run(store: backstay.Store, version: int, note: str, ended_us: int | None = None) -> Record:
    """Return the run as a writer leaves it that saw this version of it."""
    stored = access_of(store).store.record("run", RUN.branch, RUN.key)
    assert stored is not None
    status = RunStatus.RUNNING if ended_us is None else RunStatus.COMPLETED
    seen = replace(row_of(stored), stored=replace(stored, version=version))
    return replace(seen, note=note, status=status, ended_us=ended_us).sealed()


def _claimed(run: Record) -> Record:
    return replace(row_of(run), status=RunStatus.RUNNING, due_us=None, note="claimed").sealed()


def _change(store: backstay.Store) -> object:
    changed = access_of(store).store.put_record(_run(store, 1, "news"))
    return changed.version, changed.body


def _claim(store: backstay.Store) -> object:
    """Claim a run; its repetition finds nothing left to claim, so the answer is what is stored."""
    backend = access_of(store).store
    backend.claim("", [("job", "1")], 9, TAKER, 9, (), _claimed)
    found = backend.run(EXPIRING)
    return found and (found.record, found.lease and found.lease.token)


WRITES = [
    Step("append", b".commit_checkpoint(", _append),
    Step("first save", b".commit_checkpoint(", _save),
    Step("fork", b".commit_checkpoint(", _fork),
    Step("rewind", b".commit_checkpoint(", lambda store: store.thread("t").rewind("c-1", id="r-1").digest),
    Step("tag", b"WITH found AS", lambda store: store.thread("t").tag("c-1", "good", "seen")),
    Step("untag", b"WITH found AS", lambda store: store.thread("t").untag("c-1", "seen")),
    Step("write", b".put_writes(", lambda store: store.thread("t").write("c-3", [Write("task", 0, "out", [1, 2])])),
    Step("put", b"p_was =>", lambda store: store.thread("t").write("c-3", [Write("task", 0, "out", 3)], replace=True)),
    Step("acquire", b".acquire_lease(", lambda store: access_of(store).store.acquire(LEASED, CLAIM)),
    Step("renew", b".branch br SET expires", lambda store: access_of(store).store.renew(LEASED, 1, CLAIM)),
    Step("run", RECORD, lambda store: access_of(store).store.put_record(RUN).version),
    Step("news", RECORD, _change),
    Step("queue", RECORD, lambda store: access_of(store).store.put_record(QUEUED).version),
    Step("claim", COMMIT, _claim),
    Step("start", COMMIT, lambda store: access_of(store).store.acquire(LEASED, CLAIM, _run(store, 2, "again"))),
    Step(
        "end",
        COMMIT,
        lambda store: access_of(store).store.release(LEASED, 1, CLAIM.token, _run(store, 3, "ended", ended_us=1)),
    ),
    Step("interrupt", RECORD, lambda store: store.thread("t").interrupt("c-1", prompt="?", id="i-2").digest),
    Step(
        "decide",
        RECORD,
        lambda store: store.thread("t").decide(found_interrupt(store, "i-1"), "approve", by="ann").decided_by,
    ),
    Step("consume", RECORD, lambda store: store.thread("t").consume(found_interrupt(store, "i-1"), by="worker")),
    Step("release", COMMIT, lambda store: access_of(store).store.release(RELEASED, 1, CLAIM.token)),
    Step(
        "release of what was never saved",
        COMMIT,
        lambda store: access_of(store).store.release(NEVER_SAVED, 1, CLAIM.token),
    ),
]
"""Each gives its first result again when it is repeated; the last ones are transactions of several statements."""

CHANGES = [
    Step("delete", COMMIT, lambda store: store.thread("old").delete_checkpoint("o-8")),
    Step("delete before", COMMIT, lambda store: store.thread("old").delete_before(3)),
    Step("prune", COMMIT, lambda store: store.thread("old").prune(backstay.Keep(last=2)).deleted),
    Step("delete thread", COMMIT, lambda store: store.thread("t").delete().checkpoints),
]
"""Each would have another answer when repeated, so whether its COMMIT arrived is for the caller to find out."""


def dump(connection: psycopg.Connection[Any], schema: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables, without what the database's clock made."""
    columns: dict[str, list[str]] = {}
    for table, column in connection.execute(
        "select table_name::text, column_name::text from information_schema.columns where table_schema = %s"
        " order by table_name, ordinal_position",
        (schema,),
    ):
        if table not in UNTOLD_TABLES and column not in UNTOLD_COLUMNS:
            columns.setdefault(table, []).append(column)
    return {
        table: sorted(connection.execute(_everything(schema, table, names)).fetchall(), key=repr)
        for table, names in columns.items()
    }


def _everything(schema: str, table: str, columns: list[str]) -> sql.Composed:
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    return sql.SQL("select {} from {}.{}").format(names, sql.Identifier(schema), sql.Identifier(table))
