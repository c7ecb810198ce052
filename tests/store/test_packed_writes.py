"""Pending writes packed into one row a task: merged exactly, damaged loudly, shared safely, in little room."""

import contextlib
import dataclasses
import random
import string
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay.errors import Corrupted, DecodeError, EncodeError
from backstay.store.base import Backend, Query, WriteRow
from backstay.store.layout import pack_body
from backstay.store.memory import MemoryStore
from backstay.store.open import open_backend
from backstay.store.postgres.checkpoints import swap
from backstay.store.postgres.store import PostgresStore
from backstay.store.sqlite.rows import INLINE_BYTES_MAX, PIECE_BYTES
from backstay.store.sqlite.store import SqliteStore
from backstay.store.writes import Packed, UnreadableWrites, by_task, merge, merged, pack, read, unpack
from backstay.testing.drafts import branch_key, pending, put
from support.running import Show

TASK = "0b5c6a52-6a0b-4a9c-9f19-3f2b1d9d3d9a"
PATHS = ("", "~__pregel_pull, work", "é\U0001f9ff")

Call = tuple[list[WriteRow], bool]


def rows(tasks: Sequence[str]) -> st.SearchStrategy[WriteRow]:
    return st.builds(
        WriteRow,
        st.sampled_from(tasks),
        st.integers(-4, 6) | st.sampled_from([-(2**63), 2**63 - 1]),
        st.sampled_from(["messages", "__interrupt__", ""]),
        st.sampled_from(["v", "=msgpack"]),
        st.integers(0, 70_000),
        st.binary(max_size=40) | st.integers(0, 3 * PIECE_BYTES).map(lambda size: bytes(range(256)) * 4 + b"x" * size),
        st.sampled_from(PATHS),
    )


def calls(tasks: Sequence[str]) -> st.SearchStrategy[list[Call]]:
    return st.lists(st.tuples(st.lists(rows(tasks), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=6)


def modelled(story: list[Call]) -> dict[tuple[str, int], WriteRow]:
    model: dict[tuple[str, int], WriteRow] = {}
    for writes, replace in story:
        for row in writes:
            if replace or (row.task_id, row.index) not in model:
                model[row.task_id, row.index] = row
    return model


def in_order(writes: Sequence[WriteRow]) -> tuple[WriteRow, ...]:
    return tuple(sorted(writes, key=lambda row: (row.task_path, row.task_id, row.index)))


# Bytes ------------------------------------------------------------------------------------------------------------


@given(calls([TASK]))
def test_any_sequence_of_calls_for_a_task_gives_what_a_dictionary_would(story: list[Call]) -> None:
    stored = pack(merge((), *story[0]), "c")
    for writes, replace in story[1:]:
        stored = merged(TASK, stored, writes, replace, "t", "c") or stored
    expected = modelled(story)

    assert {(TASK, row.index): row for row in unpack(TASK, stored, "c")} == expected
    assert read([(TASK, stored)], "t", "c") == in_order(list(expected.values()))


def test_merging_what_is_there_changes_nothing() -> None:
    first = [pending("a", 0, b"one"), pending("a", -4, b"two", "path")]
    stored = pack(merge((), first, False), "c")

    assert merged("a", stored, first, False, "t", "c") is None
    assert merged("a", stored, first, True, "t", "c") is None
    assert merged("a", stored, [pending("a", 0, b"other")], False, "t", "c") is None
    assert merged("a", stored, [pending("a", 0, b"other")], True, "t", "c") is not None


def test_a_path_that_all_share_is_stored_once() -> None:
    path = string.ascii_letters  # too short to be compressed
    same = pack([pending("a", index, b"", path) for index in range(3)], "c")
    other = pack([pending("a", index, b"", path + str(index)) for index in range(3)], "c")

    assert same.size < len(path) + 50
    assert other.size > 3 * len(path)


def test_what_cannot_come_back_is_refused() -> None:
    for row in (pending("a", 2**64), pending("a", 0, path="\ud800")):
        with pytest.raises(EncodeError):
            pack([row], "c")


def sealed(data: bytes) -> Packed:
    """Return bytes that are stored as writes, with the right checksum for task a at checkpoint c."""
    return Packed(len(data), data + crc32(b"c\0a", crc32(data)).to_bytes(4))


@given(st.binary(max_size=60))
def test_any_bytes_are_writes_or_a_decode_error(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert unpack("a", sealed(data), "c")
    with contextlib.suppress(DecodeError):
        assert unpack("a", Packed(len(data), data), "c")


@given(calls([TASK]), st.data())
def test_a_flipped_bit_or_a_lost_end_is_a_decode_error(story: list[Call], choice: st.DataObject) -> None:
    size, body = pack(merge((), *story[0]), "c")
    place = choice.draw(st.integers(0, len(body) - 1))
    spoilt = body[:place] + bytes([body[place] ^ 1 << choice.draw(st.integers(0, 7))]) + body[place + 1 :]

    for damaged in (spoilt, body[:place]):
        with pytest.raises(DecodeError):
            unpack(TASK, Packed(size, damaged), "c")


def test_writes_in_the_row_of_another_task_or_checkpoint_are_a_decode_error() -> None:
    stored = pack([pending("a", 0)], "c")
    assert unpack("a", stored, "c") == [pending("a", 0)]

    for task, checkpoint in (("b", "c"), ("a", "d"), ("", "a"), ("c", "a")):
        with pytest.raises(DecodeError):
            unpack(task, stored, checkpoint)


def test_the_words_that_compression_begins_with_are_those_of_the_format() -> None:
    """What was stored with other words could not be read: these bytes must be readable for ever."""
    stored = Packed(
        122,
        bytes.fromhex(
            "28b52ffd207af50100640293b46c6c2c206e6f64659500a8a901c432c710202068656c6c6f9501aea53d6e756c6c00c4"
            "0007005e08608bd80eb86bb5ae9210cd869798ccdc6a036c473cf5"
        ),
    )

    first, second = unpack("t", stored, "c")

    assert (first.channel, first.kind, first.count, first.task_path) == (
        "messages",
        "=[msgpack",
        1,
        "~__pregel_pull, node",
    )
    assert first.body == b"\xc7\x10langchain_core.messages.human HumanMessage hello"
    assert (second.index, second.channel, second.kind, second.body) == (1, "branch:to:node", "=null", b"")
    assert len(stored.body) < stored.size * 2 // 3


def test_what_has_another_shape_is_no_writes() -> None:
    for data in (b"\x90", b"\x91\xa0", b"\x81\xa0\xc0", b"\xa1x", b"\xc0", b"\x92\xa0\x95\x00\xa0\xa0\x00\xa0"):
        with pytest.raises(DecodeError):
            unpack("a", sealed(data), "c")
    twice = pack([pending("a", 0), pending("a", 0)], "c")
    with pytest.raises(DecodeError):
        unpack("a", twice, "c")


# Stores -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "store.db")


@pytest.fixture
def backend(sql_url: str) -> Iterator[Backend]:
    with contextlib.closing(open_backend(sql_url)) as opened:
        yield opened


def change(backend: Backend, statement: str) -> None:
    """Run a statement on the store's own tables, beside its verbs."""
    if isinstance(backend, SqliteStore):
        backend._writer.submit(lambda connection: connection.execute(statement).fetchall())
    else:
        assert isinstance(backend, PostgresStore)
        backend._pool.change(lambda connection: connection.execute(connection.statements[statement].encode()))


def found(backend: Backend, name: str) -> tuple[WriteRow, ...]:
    (row,) = backend.find(Query("", ids=(name,), writes=True))
    return row.writes


@pytest.mark.effort
def test_any_sequence_of_calls_gives_what_the_memory_store_gives(backend: Backend) -> None:
    model = MemoryStore()
    numbers = iter(range(1_000_000))

    @given(calls([TASK, TASK.upper(), "task", "é", "a\0b"]))
    def run(story: list[Call]) -> None:
        name = f"c{next(numbers)}"
        for store in (model, backend):
            put(store, branch_key(), {"n": 1}, name)
            for writes, replace in story:
                store.write(branch_key(), name, writes, replace)

        assert found(backend, name) == found(model, name) == in_order(list(modelled(story).values()))

    run()
    assert backend.check() == []


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES_MAX, PIECE_BYTES, 5 * PIECE_BYTES, 4096, 100_000])
def test_bodies_of_any_length_come_back_and_go(backend: Backend, size: int) -> None:
    body = random.Random(size).randbytes(size)
    for name in ("one", "two"):
        put(backend, branch_key(), {"n": 1}, name)
        for extra in range(-1, 2):
            backend.write(branch_key(), name, [pending(TASK, extra, body + bytes(extra + 1))], False)
    backend.delete("", ["one"], False)

    assert [row.body for row in found(backend, "two")] == [body + bytes(extra) for extra in range(3)]
    assert backend.check() == []
    backend.delete_thread("", "t")
    assert backend.check() == []
    for table in ("write", "write_piece") if isinstance(backend, SqliteStore) else ():
        assert count(backend, table) == 0


def count(backend: Backend, table: str) -> int:
    assert isinstance(backend, SqliteStore)
    return int(
        backend._writer.submit(lambda connection: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    )


def test_writers_of_one_task_lose_nothing(sql_url: str, show: Show) -> None:
    """Each of 8 writers adds to the same row, through two stores: connections, and locks, of their own."""
    rounds, failures = 12, []
    barrier = threading.Barrier(8)
    with contextlib.closing(open_backend(sql_url)) as one, contextlib.closing(open_backend(sql_url)) as two:
        put(one, branch_key(), {"n": 1}, "c")

        def work(number: int) -> None:
            try:
                barrier.wait()
                for turn in range(rounds):
                    body = f"{number} {turn}".encode() * 20
                    mine = [pending(TASK, number * rounds + turn, body, f"path {number}"), pending(TASK, -1, body)]
                    (one, two)[number % 2].write(branch_key(), "c", mine, False)
            except BaseException as error:  # it is raised below, in the test's own thread
                failures.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        kept = {row.index: row.body for row in found(two, "c")}

    assert failures == []
    assert set(kept) == set(range(-1, 8 * rounds))
    assert {kept[index] for index in range(8 * rounds)} == {
        f"{number} {turn}".encode() * 20 for number in range(8) for turn in range(rounds)
    }
    assert kept[-1].startswith(tuple(f"{number} 0".encode() for number in range(8)))  # the first of all was kept
    show("writes of 8 writers to one task", len(kept))


def test_postgres_stores_nothing_over_what_the_writer_has_not_seen(postgres_url: str) -> None:
    with contextlib.closing(PostgresStore(postgres_url)) as backend:
        put(backend, branch_key(), {"n": 1}, "c")
        seen = pack([pending("a", 0, b"seen")], "c")
        later = pack([pending("a", 0, b"later")], "c")

        def swapped(stored: dict[str, Packed | None], changed: dict[str, Packed]) -> dict[str, Packed | None]:
            return backend._pool.write(lambda connection: swap(connection, branch_key(), "c", stored, changed))

        assert swapped({"a": None}, {"a": seen}) == {}
        assert swapped({"a": None, "b": None}, {"a": later, "b": later}) == {"a": seen}
        assert swapped({"a": later}, {"a": later}) == {"a": seen}
        assert swapped({"a": seen, "gone": seen}, {"a": later, "gone": later}) == {"gone": None}
        assert [(row.task_id, row.body) for row in found(backend, "c")] == [("a", b"seen")]
        assert swapped({"a": seen}, {"a": later}) == {}
        assert [row.body for row in found(backend, "c")] == [b"later"]


SPOIL: dict[str, Callable[[Backend], None]] = {
    "packed": lambda backend: change(backend, f"UPDATE {table(backend)} SET body = {nothing(backend)}"),
    "compressed": lambda backend: change(backend, f"UPDATE {table(backend)} SET size = size + 1"),
}


def table(backend: Backend) -> str:
    return "write" if isinstance(backend, SqliteStore) else "{schema}.write"


def nothing(backend: Backend) -> str:
    return "x'c1'" if isinstance(backend, SqliteStore) else "'\\xc1'::bytea"


@pytest.mark.parametrize("damage", SPOIL)
@pytest.mark.parametrize("size", [1, 2000])
def test_damaged_writes_are_told_and_hide_nothing_else(sql_url: str, backend: Backend, damage: str, size: int) -> None:
    put(backend, branch_key(), {"n": 1}, "one")
    backend.write(branch_key(), "one", [pending(TASK, 3, b"x" * size), pending(TASK, 4)], False)
    SPOIL[damage](backend)
    put(backend, branch_key(), {"n": 2}, "two")
    backend.write(branch_key(), "two", [pending("task", 0)], False)
    two, one = backend.find(Query(*branch_key(), writes=True))

    assert two.writes == (pending("task", 0),)
    (lost,) = one.writes
    assert isinstance(lost, UnreadableWrites)
    assert (lost.task_id, lost.index, repr(lost)) == (TASK, 0, f"Unreadable(task_id={TASK!r})")
    with pytest.raises(Corrupted, match="one") as told:
        _ = lost.kind
    assert (told.value.thread, told.value.checkpoint) == ("t", "one")
    assert set(dataclasses.asdict(lost)) == {"task_id", "index", "body", "task_path"}
    with pytest.raises(AttributeError):
        _ = lost.anything_else
    with pytest.raises(Corrupted, match="one"):
        backend.write(branch_key(), "one", [pending(TASK, 5)], True)
    with backstay.open(sql_url) as store:
        with pytest.raises(Corrupted, match="one"):
            store.get("one")
        assert [finding.where for finding in store.check().findings] == [f"checkpoint one, writes[{TASK}][0]"]
        assert store.get("two") is not None
    backend.delete("", ["one"], False)
    with backstay.open(sql_url) as store:
        assert store.check()


def test_pieces_that_belong_to_no_row_are_found_and_dropped(tmp_path: Path) -> None:
    with contextlib.closing(SqliteStore(str(tmp_path / "store.db"))) as backend:
        put(backend, branch_key(), {"n": 1}, "c")
        for task in ("kept", "lost"):
            backend.write(branch_key(), "c", [pending(task, 0, random.Random(1).randbytes(3 * PIECE_BYTES))], False)
        change(backend, "DELETE FROM write WHERE task = 'lost'")
        (finding,) = backend.check()

        assert (finding.kind, finding.where) == ("orphan", "4 pieces of pending writes")
        assert backend.rebuild(dry_run=False, drop=True) == [finding]
        assert backend.check() == []
        assert [row.task_id for row in found(backend, "c")] == ["kept"]
        assert count(backend, "write_piece") == 4


# Room -------------------------------------------------------------------------------------------------------------


def steps(number: int) -> Iterator[tuple[str, list[WriteRow]]]:
    """Return what LangGraph writes in a step: a message, a small value, where to go next."""
    rng = random.Random(7)
    for _ in range(number):
        task, path = str(uuid.UUID(int=rng.getrandbits(128))), "~__pregel_pull, model"
        message = "".join(rng.choices(string.ascii_letters + string.digits, k=1176)).encode()
        yield (
            str(uuid.UUID(int=rng.getrandbits(128))),
            [
                WriteRow(task, 0, "messages", "=[msgpack", 1, message, path),
                WriteRow(task, 1, "count", "=msgpack", 0, b"\x07", path),
                WriteRow(task, 2, "branch:to:model", "=null", 0, b"", path),
            ],
        )


@pytest.mark.parametrize("number", [400, 1000])
def test_a_file_takes_little_more_than_the_writes_in_it(tmp_path: Path, number: int, show: Show) -> None:
    with contextlib.closing(SqliteStore(str(tmp_path / "store.db"))) as backend:
        put(backend, branch_key(), {"n": 1}, "c")
        before, bodies = backend.sizes().total, 0
        jobs = list(steps(number))
        for start in range(0, number, 50):  # 50 threads at once share an fsync
            batch = jobs[start : start + 50]
            workers = [threading.Thread(target=backend.write, args=(branch_key(), *job, False)) for job in batch]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            bodies += sum(len(pack_body(row.body)) for _, rows in batch for row in rows)
        taken = backend.sizes().total - before

        show(f"SQLite, writes of {number} steps", f"{taken / number:.0f} bytes a step, bodies {bodies / number:.0f}")
        assert taken <= 1.15 * bodies + 160 * number  # the ids of each task are in two trees


def test_tiny_writes_of_many_tasks_share_pages(tmp_path: Path, show: Show) -> None:
    with contextlib.closing(SqliteStore(str(tmp_path / "store.db"))) as backend:
        put(backend, branch_key(), {"n": 1}, "c")
        before = backend.sizes().total
        for number in range(100):
            backend.write(branch_key(), "c", [pending(str(uuid.UUID(int=number << 100)), 0, bytes(20))], False)
        taken = backend.sizes().total - before

        show("SQLite, a tiny write of each of 100 tasks", f"{taken / 100:.0f} bytes a write")
        assert taken <= 100 * 130
        assert len(by_task(found(backend, "c"))) == 100
