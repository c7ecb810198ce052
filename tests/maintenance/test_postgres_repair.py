"""Check and repair on PostgreSQL: damage made by SQL, and savers that go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import backstay
from backstay.thread.access import access_of
from support.damage import IDS, clock, fill, loaded, text

if TYPE_CHECKING:
    from support.postgres import PostgresServer

Sql = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture
def sql(postgres: PostgresServer, postgres_url: str) -> Sql:
    schema = postgres_url.partition("schema=")[2].partition("&")[0]

    def run(statement: str) -> list[tuple[Any, ...]]:
        with postgres.connect() as connection:
            connection.execute(f'set search_path = "{schema}"'.encode())
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    return run


@pytest.fixture
def store(postgres_url: str) -> Iterator[backstay.Store]:
    with backstay.open(postgres_url, clock=clock) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def backup(tmp_path: Path) -> Iterator[backstay.Store]:
    """Give a store of another kind with the same checkpoints."""
    with backstay.open(tmp_path / "backup.db", clock=clock) as opened:
        opened.thread("first").append({"log": [text("other", 5000)]})
        fill(opened)
        yield opened


REBUILDABLE = {
    "lost references": "DELETE FROM ref",
    "wrong heads": "UPDATE branch SET head = head - 1, last_seq = 1",
    "forgotten numbers": "UPDATE thread SET next_seq = 1, alone = NULL",
    "orphan bytes": """
        INSERT INTO blob (digest, size, body) VALUES (decode(repeat('00', 32), 'hex'), 1, 'x');
        INSERT INTO chunk VALUES (99::bigint << 28, 1, 'x');
        INSERT INTO fresh VALUES (98 << 6, 98::bigint << 28, 'x', '');
        INSERT INTO tag VALUES (5, 'nobody'); INSERT INTO ref SELECT branch + 50, stream, false, digest FROM ref;
        UPDATE record SET checkpoint = 'gone' WHERE checkpoint IS NOT NULL""",
}

NEED_BACKUP = {
    "fresh bytes": "UPDATE fresh SET body = set_byte(body, 7, get_byte(body, 7) # 1)",
    "lost streams": "DELETE FROM fresh; DELETE FROM chunk",
    "manifests": r"UPDATE checkpoint SET manifest = '\xc1' WHERE position('b1'::bytea IN id) > 0",
}


@pytest.mark.parametrize("damage", REBUILDABLE.values(), ids=REBUILDABLE.keys())
def test_what_follows_from_the_rest_is_rebuilt(store: backstay.Store, sql: Sql, damage: str) -> None:
    before = loaded(store)
    sql(damage)
    assert not store.check()
    report = store.repair(dry_run=False)

    assert report, str(report)
    assert {action.name for action in report.actions} == {"rebuild"}
    assert loaded(store) == before
    assert not store.repair(dry_run=False).actions
    store.thread("alpha").append({"log": ["on it goes"]})
    store.thread("alpha").delete()
    assert store.check()
    assert set(loaded(store)) == {name for name in IDS if name[0] in "bc"}


@pytest.mark.parametrize("damage", NEED_BACKUP.values(), ids=NEED_BACKUP.keys())
def test_what_a_backup_of_another_kind_has_becomes_good(
    store: backstay.Store, backup: backstay.Store, sql: Sql, damage: str
) -> None:
    before = loaded(store)
    assert before == loaded(backup)
    sql(damage)
    assert set(loaded(store)) < set(before)
    planned = store.repair(backup=backup)
    assert set(loaded(store)) < set(before)
    done = store.repair(backup=backup, dry_run=False)

    assert done, str(done)
    assert planned.actions == done.actions
    assert loaded(store) == before
    assert not store.repair(backup=backup, dry_run=False).actions


def test_a_writer_who_saw_a_head_that_was_written_anew_is_out_of_date(
    store: backstay.Store, backup: backstay.Store, sql: Sql
) -> None:
    writer = store.thread("gamma")
    writer.latest()
    sql(r"UPDATE checkpoint SET manifest = '\xc1' WHERE position('c6'::bytea IN id) > 0")
    assert store.repair(backup=backup, dry_run=False)
    with pytest.raises(backstay.Conflict):
        writer.append({"items": ["on it goes"]})
    writer.latest()
    writer.append({"items": ["on it goes"]})

    assert store.check()


def test_savers_go_on_while_a_store_is_rebuilt_and_lose_nothing(store: backstay.Store, sql: Sql, show: Any) -> None:
    """Bytes of threads that are saved for the first time at that very moment must not be taken for nobody's."""
    stop = threading.Event()
    saved: list[str] = []
    failed: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                thread = store.thread(f"worker {worker}, thread {number}")
                for count in range(3):
                    cp = thread.append(
                        {"log": [text(f"{worker} {number} {count}", 600)]}, set={"doc": text("doc", 2000)}
                    )
                    saved.append(cp.id)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for worker in workers:
        worker.start()
    rounds = 0
    try:
        while rounds < 12:
            sql("INSERT INTO blob (digest, size, body) VALUES (decode(repeat('00', 32), 'hex'), 1, 'x')")
            found = access_of(store).store.rebuild(False, True)
            assert [finding.kind for finding in found] == ["orphan"]
            rounds += 1
    finally:
        stop.set()
        for worker in workers:
            worker.join()

    show("rebuilds beside savers", f"{rounds} rebuilds, {len(saved)} checkpoints saved meanwhile")
    assert failed == []
    assert len(saved) > 10
    assert store.check(), str(store.check())


def test_a_check_beside_savers_finds_nothing(store: backstay.Store) -> None:
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.thread(f"thread {number}").append({"log": [text(f"{number}", 600)]})

    worker = threading.Thread(target=work)
    worker.start()
    try:
        found = [finding for _ in range(10) for finding in access_of(store).store.check()]
    finally:
        stop.set()
        worker.join()

    assert found == []
