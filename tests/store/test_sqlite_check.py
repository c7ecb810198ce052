"""What the check of a SQLite store finds in the rows of branches and interrupts; damage to pages is tests/crash's."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay.store.leases import LeaseRequest
from backstay.store.records import Record
from backstay.store.sqlite.store import SqliteStore
from backstay.testing.drafts import branch_key, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with contextlib.closing(SqliteStore(str(tmp_path / "agent.db"))) as opened:
        for name in ("one", "two"):
            put(opened, branch_key(), {"n": 1}, name)
        opened.put_record(Record("interrupt", branch_key(), "ask", b"body", True, "one"))
        opened.acquire(branch_key("u"), LeaseRequest("a", "a", 1))
        assert opened.check() == []
        yield opened


def break_with(store: SqliteStore, statement: str) -> None:
    assert store._writer.submit(lambda connection: connection.execute(statement).fetchall() == [])


def test_an_interrupt_whose_checkpoint_is_not_there_is_found(store: SqliteStore) -> None:
    break_with(store, "DELETE FROM checkpoint WHERE id = 'one'")
    (found,) = store.check()

    assert (found.kind, found.where, found.thread, found.checkpoint) == ("orphan", "interrupt ask", "t", "one")


def test_a_record_that_no_call_would_find_is_found(store: SqliteStore) -> None:
    break_with(store, "UPDATE record SET id = x'00'")
    (found,) = store.check()

    assert (found.kind, found.where, found.thread) == ("damaged", "interrupt ask", "t")


def test_a_branch_without_a_checkpoint_must_have_a_lease(store: SqliteStore) -> None:
    break_with(store, "UPDATE branch SET token = NULL WHERE last_seq = 0")
    (found,) = store.check()

    assert (found.kind, found.thread) == ("missing", "u")
