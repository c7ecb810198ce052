"""Damaged rows and indexes of a SQLite store: found where they are read, named by the check, and repaired.

Damage to the bytes of the file is in tests/crash.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import Corrupted
from backstay.operations.load import checked_branch
from backstay.operations.records import all_records
from backstay.operations.rows import Damaged
from backstay.operations.run_records import row_of
from backstay.store.base import Query, Row
from backstay.store.layout import UNREADABLE
from backstay.store.leases import NO_LEASE, LeaseRequest, LeaseStatus
from backstay.store.records import Kind, Record
from backstay.store.sqlite import find
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import BranchRow, find_branch, put_branch
from backstay.store.sqlite.store import SqliteStore
from backstay.testing.drafts import branch_key, put
from backstay.thread.access import access_of
from support.damage import behind, change, clock, flip, indexes, loaded, lose_from_index
from support.running import effort
from support.store.odd_rows import fill_all


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
    lost, found = store.check()

    assert (lost.kind, lost.where) == ("missing", "branch 'main' of thread 't'")
    assert (found.kind, found.where, found.thread, found.checkpoint) == ("orphan", "interrupt ask", "t", "one")


def test_a_record_that_no_call_would_find_is_found(store: SqliteStore) -> None:
    break_with(store, "UPDATE record SET id = x'00'")
    (found,) = store.check()

    assert (found.kind, found.where, found.thread) == ("damaged", "interrupt ask", "t")


def test_a_branch_without_a_checkpoint_must_have_a_lease(store: SqliteStore) -> None:
    def release_wrongly(connection: Connection) -> None:
        found = find_branch(connection, branch_key("u"))
        assert found is not None
        put_branch(connection, found._replace(lease=NO_LEASE))

    store._writer.submit(release_wrongly)
    (found,) = store.check()

    assert (found.kind, found.thread) == ("missing", "u")


# Small rows -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with a row in every table and two leases, which ended long ago."""
    path = tmp_path_factory.mktemp("original") / "agent.db"
    with backstay.open(path, clock=clock) as opened:
        fill_all(opened)
        access_of(opened).store.acquire(branch_key("beta"), LeaseRequest("ann", "other", 1))
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "agent.db"))


QUESTIONS: dict[str, Callable[[backstay.Store], object]] = {
    "all": loaded,
    "newest of alpha": lambda store: store.thread("alpha").latest(),
    "newest of beta": lambda store: store.thread("beta").latest(),
    "newest of a fork": lambda store: store.thread("alpha", branch="what-if").latest(),
    "threads": lambda store: [meta.id for meta in store.threads()],
    "history": lambda store: [meta.id for meta in store.thread("alpha").history(branch="*")],
    "tagged": lambda store: [(meta.id, meta.tags) for meta in store.thread("alpha").history(tag="good")],
    "branches": lambda store: list(store.thread("alpha").branches()),
    "interrupts": lambda store: list(store.interrupts(pending=False)),
    "open interrupts": lambda store: list(store.interrupts()),
    "effects": lambda store: list(store.thread("alpha").effects()),
    "effect": lambda store: store.thread("alpha").effect("mail", lambda: {"sent": 2}),
    "runs": lambda store: [(each.id, each.status) for each in store.runs()],
    "runs of a thread": lambda store: [each.id for each in store.runs(thread="alpha")],
    "runs of a graph": lambda store: [each.id for each in store.runs(graph="work")],
    "queued runs": lambda store: [each.id for each in store.runs(status="queued")],
    "newest run": lambda store: (found := access_of(store).store.run(branch_key("alpha"))) and row_of(found.record),
    "expired": lambda store: [read_lease(each) for each in access_of(store).store.leases("", None, True)],
    "all branches": lambda store: [checked_branch(each) for each in access_of(store).store.branches("", None, None)],
    "numbers": lambda store: access_of(store).store.reserve(0),
}


def read_lease(lease: LeaseStatus) -> tuple[str, int]:
    """Return what a lease says; raise Corrupted if its row is damaged, which the store shows by its owner."""
    if UNREADABLE in lease.owner:
        raise Corrupted(lease.branch.name)
    return lease.branch.thread, lease.epoch


def answers(store: backstay.Store) -> dict[str, object]:
    """Return every answer that is not an error of ours."""
    found = {}
    for name, question in QUESTIONS.items():
        with contextlib.suppress(Corrupted):
            found[name] = question(store)
    return found


@pytest.fixture(scope="module")
def right(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = shutil.copy(original, tmp_path_factory.mktemp("right") / "agent.db")
    with backstay.open(path) as opened:
        found = answers(opened)
    assert set(found) == set(QUESTIONS)
    assert all(found[name] for name in found if name != "expired")
    return found


def sound_part(got: dict[str, Any], right: dict[str, Any]) -> None:
    """Fail if an answer is wrong. Of a store as a whole, some checkpoints may be missing: those that do not load."""
    assert [name for name, each in got["all"].items() if each != right["all"][name]] == []
    assert {name: answer for name, answer in got.items() if name != "all" and answer != right[name]} == {}


ROWS = {
    "thread": ("thread", "name = 'beta'", "namespace name floor seal"),
    "branch": ("branch", "name = 'what-if'", "thread scope name head last_seq epoch origin seal"),
    "lease": ("branch", "owner = 'ann' AND last_seq <> 0", "epoch owner token expires boot lease_seal seal"),
    "no lease": ("branch", "name = 'what-if'", "owner token expires boot lease_seal"),
    "run": (
        *("record", "key = 'run'"),
        "id thread scope branch key version open namespace status graph fingerprint due seal body",
    ),
    "interrupt": ("record", "key = 'open'", "id thread scope branch key version checkpoint open seal body"),
    "effect": ("record", "key = 'mail'", "id thread scope branch key version open seal body"),
    "counter": ("counter", "name = 'stream'", "value seal"),
    "record counter": ("counter", "name = 'record'", "name value seal"),
    "tags": ("checkpoint", "id = 'a3'", "tags"),
    "short writes": ("write", "task = 'task'", "thread scope checkpoint task size body"),
    "long writes": ("write", "task = 'long'", "thread scope checkpoint task size pieces body"),
    "piece": ("write_piece", "number = 2", "body"),
}
CASES = [(kind, column) for kind, (_, _, columns) in ROWS.items() for column in columns.split()]
REPAIRED = {
    *((kind, column) for kind, column in CASES if ROWS[kind][0] in ("thread", "branch", "counter")),
}
"""What the rest of the store tells. Other damage is reported until the checkpoint or record is restored or deleted."""

CHANGED = ("threads", "all branches", "branches", "expired", "numbers")
"""Answers that a save, or the end of a damaged lease, changes."""


def altered(value: Any) -> Any:
    if isinstance(value, bytes):
        return flip(value, len(value) // 2)
    return f"{value}x" if isinstance(value, str) else value - 1 if value else 1


@pytest.mark.parametrize(("kind", "column"), CASES)
def test_a_wrong_column_of_a_small_row_is_found_where_it_is_read(
    path: Path, right: dict[str, Any], kind: str, column: str
) -> None:
    table, where, _ = ROWS[kind]
    ((old,),) = change(path, f"SELECT {column} FROM {table} WHERE {where}")
    hidden = indexes(path, table)
    assert behind(path, hidden, f"UPDATE {table} SET {column} = ? WHERE {where}", (altered(old),)) == 1

    with backstay.open(path) as opened:
        sound_part(answers(opened), right)
        newest = opened.thread("gamma").latest()
        assert newest is not None
        report = opened.check()
        assert not report, "the check does not see it"
        opened.thread("gamma").append({"items": ["goes on"]})
        for _ in range(3):
            repaired = opened.repair(dry_run=False)
        if table == "write":  # its index is made again from the table, and the row stays where it is now
            return
        assert bool(repaired) == ((kind, column) in REPAIRED), str(repaired)
        if repaired:
            sound_part({name: each for name, each in answers(opened).items() if name not in CHANGED}, right)
            assert opened.check()
            for name in ("alpha", "beta", "new"):
                opened.thread(name).append({"log": ["after the repair"]})
            assert opened.check()


# Rows that an index or a table has lost ---------------------------------------------------------------------------

LOST: dict[str, tuple[str, str, str, list[Callable[[backstay.Store], object]]]] = {
    "thread": (
        "thread",
        "thread_name",
        "name = 'beta'",
        [
            QUESTIONS["newest of beta"],
            lambda store: store.thread("beta").save({}),
            lambda store: store.thread("beta").delete(),
        ],
    ),
    "branch": (
        "branch",
        "branch_name",
        "name = 'what-if'",
        [
            QUESTIONS["newest of a fork"],
            QUESTIONS["branches"],
            QUESTIONS["history"],
            lambda store: store.thread("alpha", branch="what-if").save({}),
            lambda store: list(store.thread("alpha", branch="what-if").history()),
        ],
    ),
    "checkpoint": (
        "checkpoint",
        "checkpoint_id",
        "id = 'a3'",
        [
            lambda store: store.get("a3"),
            lambda store: store.thread("alpha").get("a3"),
            lambda store: store.thread("alpha").tag("a3", "late"),
            lambda store: store.thread("alpha").fork("a3", branch="late"),
            lambda store: store.thread("alpha").interrupt("a3", payload=1),
            lambda store: store.thread("alpha").delete_checkpoint("a3"),
        ],
    ),
    "tag": ("checkpoint", "checkpoint_tagged", "id = 'a3'", [QUESTIONS["tagged"]]),
    "tag, second index": ("checkpoint", "checkpoint_tagged_again", "id = 'a3'", [QUESTIONS["tagged"]]),
    "open interrupt": ("record", "record_open", "key = 'open'", [QUESTIONS["open interrupts"]]),
    "open interrupt, second index": (
        "record",
        "record_open_again",
        "key = 'open'",
        [QUESTIONS["open interrupts"], lambda store: list(store.thread("alpha").interrupts())],
    ),
    "effect": ("record", "record_id", "key = 'mail'", [QUESTIONS["effect"]]),
    "effect, second index": ("record", "record_thread", "key = 'mail'", [QUESTIONS["effects"]]),
    "effect, third index": ("record", "record_again", "key = 'mail'", [QUESTIONS["effects"]]),
    "origin": ("branch", "branch_origin", "name = 'what-if'", []),
    "writes": ("write", "write_again", "task = 'task'", [lambda store: store.get("a7"), QUESTIONS["newest of alpha"]]),
}


@pytest.mark.parametrize("what", LOST)
def test_a_row_that_an_index_has_lost_never_looks_as_if_it_did_not_exist(
    path: Path, right: dict[str, Any], what: str
) -> None:
    table, index, where, calls = LOST[what]
    lose_from_index(path, table, index, where)

    with backstay.open(path) as opened:
        for call in calls:
            with pytest.raises(Corrupted):
                call(opened)
        sound_part(answers(opened), right)
        assert not opened.check()
        assert opened.repair(dry_run=False), "the index is not made again"
        assert answers(opened) == right


@pytest.mark.parametrize("name", ["a0", "a3", "a7"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_checkpoint_that_its_table_has_lost_leaves_a_gap_in_every_list(
    path: Path, right: dict[str, Any], name: str, everywhere: bool
) -> None:
    hidden = [] if everywhere else indexes(path, "checkpoint")
    assert behind(path, hidden, "DELETE FROM checkpoint WHERE id = ?", (name,)) == 1

    with backstay.open(path) as opened:
        thread = opened.thread("alpha")
        for limit in (None, 1, 3):
            shown = list(thread.history(on_damage="mark", limit=limit))
            found = [entry.id for entry in shown if not isinstance(entry, Damaged)]
            whole = [f"a{number}" for number in range(7, -1, -1)]
            assert found == [each for each in whole if each != name][:limit]
            assert len(shown) - len(found) == (limit is None or f"a{7 - limit}" < name or name == "a7")
        with pytest.raises(Corrupted):
            list(thread.history())
        if everywhere:
            assert opened.get(name) is None
        else:
            with pytest.raises(Corrupted):
                opened.get(name)
        assert not opened.check()
        assert list(opened.thread("beta").history()) != []


def test_pending_writes_that_their_table_has_lost_are_missed(path: Path) -> None:
    assert behind(path, ["write_again"], "DELETE FROM write WHERE task = 'task'") == 1

    with backstay.open(path) as opened:
        with pytest.raises(Corrupted, match="a7"):
            opened.get("a7")
        with pytest.raises(Corrupted, match="a7"):
            opened.thread("alpha").latest()
        assert not opened.check()


@pytest.mark.parametrize("table", ["branch", "record", "write", "checkpoint"])
def test_a_row_that_names_a_row_that_is_gone_is_found(path: Path, table: str) -> None:
    column, gone = ("base", 10**6) if table == "checkpoint" else ("thread", 10**6)
    change(path, f"UPDATE {table} SET {column} = ? WHERE {column} = (SELECT max({column}) FROM {table})", (gone,))

    with backstay.open(path) as opened:
        findings = opened.check().findings
        assert [each.where for each in findings if "does not exist" in each.what and f"of {table}" in each.where]


@pytest.mark.parametrize("delete", ["thread", "checkpoint", "replace"])
def test_nothing_is_deleted_while_a_reference_is_missing_in_its_index(tmp_path: Path, delete: str) -> None:
    """The index alone would say that no other thread needs the document."""
    path, document = tmp_path / "agent.db", "text " * 5000
    with backstay.open(path) as store:
        store.thread("a").save({"document": document})
        store.thread("a").save({"n": 1})
        store.thread("b").save({"document": document}, id="needs it")
    (other,) = change(path, "SELECT br.id FROM branch br JOIN thread t ON t.id = br.thread WHERE t.name = 'b'")
    lose_from_index(path, "ref", "ref_source", f"branch = {other[0]} AND typeof(source) = 'blob'")
    with backstay.open(path) as store:
        thread = store.thread("a")
        newest, first = thread.history()
        calls: dict[str, Callable[[], object]] = {
            "thread": thread.delete,
            "checkpoint": lambda: thread.delete_checkpoint(first),
            "replace": lambda: thread.save({"n": 2}, id=newest.id, replace=True),
        }
        with pytest.raises(Corrupted, match="references is damaged"):
            calls[delete]()

        kept = store.get("needs it")
        assert kept is not None
        assert kept.state == {"document": document}
        store.repair(dry_run=False)
        calls[delete]()
        kept = store.get("needs it")
        assert kept is not None
        assert kept.state == {"document": document}


# Lists that cost what they show -----------------------------------------------------------------------------------


def add_records(store: SqliteStore, thread: str, kind: Kind, numbers: Iterable[int], is_open: bool) -> None:
    for number in numbers:
        store.put_record(Record(kind, branch_key(thread), f"{kind}-{thread}-{number}", b"body", is_open))


def steps(store: SqliteStore, call: Callable[[], object]) -> int:
    """Return how many instructions SQLite's machine ran for a call that reads."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1

    connection = store._read(lambda connection: connection)
    connection.set_progress_handler(step, 1)
    call()
    connection.set_progress_handler(None, 1)
    assert store._read(lambda connection: connection) is connection
    return count


def test_a_page_of_records_costs_the_same_beside_any_number_of_others(store: SqliteStore) -> None:
    calls: dict[str, Callable[[], object]] = {
        "open ones of a thread that has none": lambda: store.records("interrupt", "", "u", True, 0, 100),
        "all of a thread that has none": lambda: store.records("interrupt", "", "u", False, 0, 100),
        "open ones of a thread with effects": lambda: store.records("interrupt", "", "effects", True, 0, 100),
        "a page of open ones": lambda: store.records("interrupt", "", None, True, 0, 100),
        "a page of effects of a thread": lambda: store.records("effect", "", "effects", False, 0, 100),
    }
    taken = []
    for first in (0, 400):
        add_records(store, "others", "interrupt", range(first, first + 400), True)
        add_records(store, "effects", "effect", range(first, first + 400), False)
        taken.append({name: steps(store, call) for name, call in calls.items()})

    assert taken[0] == taken[1]


def test_open_records_cost_the_same_beside_any_number_of_closed_ones(store: SqliteStore) -> None:
    taken = []
    for first in (0, 400):
        add_records(store, "t", "interrupt", range(first, first + 400), False)
        taken.append(steps(store, lambda: store.records("interrupt", "", "t", True, 0, 100)))

    assert taken[0] == taken[1]


@pytest.mark.parametrize("thread", ["t", None])
@pytest.mark.parametrize(("kind", "open_only"), [("interrupt", True), ("effect", False)])
def test_a_whole_list_of_records_is_counted_once(
    store: SqliteStore, thread: str | None, kind: Kind, open_only: bool
) -> None:
    taken = []
    for first in (0, 1000):
        add_records(store, "t", kind, range(first, first + 1000), open_only)
        taken.append(steps(store, lambda: list(all_records(store, kind, "", thread, open_only))))

    assert taken[1] < 2.2 * taken[0]


@pytest.mark.parametrize("thread", ["t", None])
@pytest.mark.parametrize("count", [150, 350])
@pytest.mark.parametrize("index", ["record_open", "record_open_again"])
def test_an_open_record_that_an_index_has_lost_is_missed_in_a_list_of_any_length(
    tmp_path: Path, thread: str | None, count: int, index: str
) -> None:
    path = tmp_path / "many.db"
    with contextlib.closing(SqliteStore(str(path))) as store:
        put(store, branch_key(), {"n": 1}, "one")
        add_records(store, "t", "interrupt", range(count), True)
    lose_from_index(path, "record", index, "key = 'interrupt-t-7'")

    with contextlib.closing(SqliteStore(str(path))) as store:
        listed = all_records(store, "interrupt", "", thread, open_only=True)
        if thread is not None and index == "record_open" and count == 350:  # neither of its two trees
            assert len(list(listed)) == count
        else:
            with pytest.raises(Corrupted, match="some open records of kind interrupt cannot be found"):
                list(listed)


def forks(store: backstay.Store, count: int) -> None:
    """Give thread t some more branches, and some of them a second checkpoint."""
    thread = store.thread("t")
    first = thread.save({"n": 0})
    for number in range(count):
        fork = thread.fork(first, branch=f"{first.id} {number}")
        if number % 3 == 0:
            fork.save({"n": number})
        elif number % 7 == 0:
            thread.save({"n": number})


def test_a_page_of_all_branches_reads_only_those_that_it_shows(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "agent.db") as store:
        backend = access_of(store).store
        assert isinstance(backend, SqliteStore)
        taken = []
        for _ in range(3):
            forks(store, 63)
            statements: list[str] = []
            connection = backend._read(lambda connection: connection)
            connection.set_trace_callback(statements.append)
            newest = list(store.thread("t").history(limit=20, branch="*"))
            older = backend.find(Query("", "t", before=backend.find(Query("", "t", limit=20))[-1].seq, limit=20))
            connection.set_trace_callback(None)
            assert (len(newest), len(older)) == (20, 20)
            taken.append(len(statements))

    assert taken[0] < 150
    assert taken[0] == taken[1] == taken[2]


@pytest.mark.effort
def test_pages_of_all_branches_are_exact_whatever_is_damaged(tmp_path: Path) -> None:
    """They are what is left of a merge of all branches."""
    rng = random.Random(20261117)
    with backstay.open(tmp_path / "sound.db") as store:
        forks(store, 12)
        forks(store, 9)
    numbers = [number for (number,) in change(tmp_path / "sound.db", "SELECT key FROM checkpoint")]

    def in_full(connection: Connection, query: Query) -> list[Row]:
        branches = find.branches_of_thread(connection, "", "t", query.scope, None)
        pages = [find._page(connection, query, branch) for branch in branches]
        return list(heapq.merge(*pages, key=lambda row: row.seq, reverse=True))[: query.limit]

    def age(connection: Connection) -> None:
        """Give a branch a head that it had earlier, or never."""
        branch = rng.choice(find.branches_of_thread(connection, "", "t", None, None))
        if isinstance(branch, BranchRow):
            put_branch(connection, branch._replace(head=rng.randrange(40)))

    marks = 0
    for _ in range(2 * effort()):
        path = Path(shutil.copy(tmp_path / "sound.db", tmp_path / "damaged.db"))
        for _ in range(rng.choice((1, 2, 8))):
            key, odd = rng.choice(numbers), rng.choice((0, 1, 3, 77, -3, 1.5, "x", b""))
            statement, bound = rng.choice(
                (
                    ("DELETE FROM checkpoint WHERE key = ?", (key,)),
                    ("UPDATE checkpoint SET back = ? WHERE key = ?", (odd, key)),
                    ("UPDATE branch SET head = ? WHERE id = ?", (odd, key >> 32)),
                )
            )
            change(path, statement, bound)
        with contextlib.closing(SqliteStore(str(path))) as damaged:
            damaged._write(age)
            for _ in range(20):
                before, limit = rng.choice((None, *range(40))), rng.choice((0, 1, 2, 5, 100))
                query = Query("", "t", rng.choice((None, "")), before=before, limit=limit)
                expected = damaged._read(lambda connection, query=query: in_full(connection, query))  # type: ignore[misc]
                assert damaged.find(query) == expected
                marks += sum(not row.notes for row in expected)
    assert marks


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_lost_head_is_shown_once_in_the_pages_of_all_branches(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        thread = store.thread("t")
        first = thread.save({"n": 1})
        thread.fork(first, branch="b").save({"n": 2})
        thread.save({"n": 3}, id="lost")
    change(path, "DELETE FROM checkpoint WHERE id = 'lost'")

    with contextlib.closing(SqliteStore(str(path))) as damaged:
        shown: list[Row] = []
        while page := damaged.find(Query("", "t", before=shown[-1].seq if shown else None, limit=limit)):
            shown += page
            assert len(shown) <= 4
        assert [(row.branch.name, row.seq, bool(row.notes)) for row in shown] == [
            ("main", 4, False),
            ("b", 3, True),
            ("b", 2, True),
            ("main", 1, True),
        ]
