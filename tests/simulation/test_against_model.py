"""The same random program on every store and on a model that keeps everything in full."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from psycopg import sql

from backstay.errors import Conflict
from backstay.model.checkpoint import CheckpointMeta
from backstay.operations.retention import Keep
from backstay.store.base import Backend, Query, Row
from backstay.store.directory.store import DirectoryStore
from backstay.store.memory import MemoryStore
from backstay.store.postgres.store import PostgresStore
from backstay.store.postgres.target import parse_url
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store, make_services
from backstay.thread.store import open as open_store
from support.running import effort
from support.simulation.machine import StoreMachine


@pytest.mark.effort
def test_every_store_gives_the_answers_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstay.store.directory.store.GARBAGE_BYTES_MIN", 500)  # logs are written anew all the time
    run_state_machine_as_test(StoreMachine, settings=programs())


@pytest.mark.effort
def test_postgresql_gives_the_answers_of_the_model(postgres_url: str) -> None:
    class PostgresMachine(StoreMachine):
        def open_backends(self) -> list[Backend]:
            if hasattr(self, "backends"):
                return [self.backends[0], PostgresStore(postgres_url)]
            empty(postgres_url)
            return [MemoryStore(), PostgresStore(postgres_url)]

    PostgresStore(postgres_url).close()
    run_state_machine_as_test(PostgresMachine, settings=programs())


def programs() -> settings:
    return settings(
        max_examples=15 * effort(),
        stateful_step_count=40,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def empty(url: str) -> None:
    """Take everything out of a PostgreSQL store, numbering included: much faster than making its tables anew."""
    target = parse_url(url)
    with psycopg.connect(target.conninfo) as connection:
        found = connection.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = %s::regnamespace", (target.schema,)
        )
        kept = {"meta", "counter"}
        names = [sql.Identifier(target.schema, name) for (name,) in found if name not in kept]
        connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(names)))
        connection.execute(sql.SQL("UPDATE {} SET value = 1").format(sql.Identifier(target.schema, "counter")))


# Lists that are read while they change ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["memory", "sqlite", "dir", "postgres"])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder: Path = tmp_path_factory.mktemp("paging")
    backend: Backend
    if request.param == "postgres":
        backend = PostgresStore(request.getfixturevalue("postgres").url(schema="t_grown"))
    elif request.param == "dir":
        backend = DirectoryStore(f"dir:{folder}/logs")
    else:
        backend = MemoryStore() if request.param == "memory" else SqliteStore(str(folder / "agent.db"))
    with Store(backend, make_services("", None)) as store:
        thread = store.thread("t")
        for n in range(250):
            thread.append(set={"n": n})
        yield store
        assert store.check()


@given(changes=st.lists(st.tuples(st.integers(1, 120), st.sampled_from(["save", "fork", "delete"])), max_size=6))
@settings(max_examples=3 * effort(), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_list_read_while_the_store_changes_repeats_and_skips_nothing(
    grown: Store, changes: list[tuple[int, str]]
) -> None:
    """Pages are of 100: whatever is saved, forked or deleted between them, the rest of the list is what it was."""
    thread = grown.thread("t")
    newest = thread.latest()
    assert newest is not None
    there = [meta.id for meta in thread.history(branch="*")]
    listing = thread.history(branch="*")
    seen: list[str] = []
    gone: set[str] = set()
    for count, change in changes:
        seen += [meta.id for meta in islice(listing, count)]
        if change == "save":
            thread.append(set={"n": count})
        elif change == "fork":
            branch = f"fork {len(there)} {len(seen)} {len(thread.branches())}"
            thread.fork(newest, branch=branch)
        else:
            doomed = thread.append(set={"n": -1})
            gone.add(doomed.id)
            thread.append(set={"n": count})
            assert thread.delete_checkpoint(doomed) == 1
            thread = grown.thread("t")
    seen += [meta.id for meta in listing]

    assert len(set(seen)) == len(seen)
    assert seen == there
    assert gone.isdisjoint(seen)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), chance=st.randoms(use_true_random=False))
@settings(max_examples=3 * effort(), deadline=None)
def test_pages_asked_for_one_by_one_give_what_existed_at_the_start_and_was_not_deleted(
    sizes: list[int], chance: Random
) -> None:
    with open_store("memory:") as store:
        thread = store.thread("t")
        start = [thread.append(set={"n": n}).id for n in range(60)][::-1]
        before: CheckpointMeta | None = None
        seen: list[str] = []
        gone: set[str] = set()
        while page := list(thread.history(limit=sizes[len(seen) % len(sizes)], before=before)):
            before = page[-1]
            seen += [meta.id for meta in page]
            doomed = set(chance.sample(start[1:], 3))
            gone |= {name for name in doomed if thread.delete_checkpoint(name) and name not in seen}
            thread = store.thread("t")
            thread.append(set={"n": -1})

        assert seen == [name for name in start if name not in gone]


# Programs that once went wrong --------------------------------------------------------------------------------------


@pytest.fixture(params=["memory:", "agent.db", "dir:logs"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.chdir(tmp_path)
    with open_store(request.param) as opened:
        yield opened


FIRST, SECOND, THIRD = ["first"], ["second"], ["third"]


def test_a_frozen_save_after_a_rewind_stores_what_was_given(store: Store) -> None:
    thread = store.thread("t")
    start = thread.save({"list": [FIRST]}, frozen=True)
    thread.save({"list": [SECOND]}, frozen=True)
    thread.rewind(start)

    assert thread.save({"list": [SECOND, THIRD]}, frozen=True).state == {"list": [SECOND, THIRD]}


def test_a_frozen_save_after_a_repeated_one_stores_what_was_given(store: Store) -> None:
    thread = store.thread("t")
    thread.save({"list": [FIRST]}, id="1", frozen=True)
    thread.save({"list": [SECOND]}, id="2", frozen=True)
    thread.save({"list": [FIRST]}, id="1", frozen=True)

    assert thread.save({"list": [FIRST, THIRD]}, frozen=True).state == {"list": [FIRST, THIRD]}


def test_a_frozen_save_on_the_head_of_somebody_else_stores_what_was_given(store: Store) -> None:
    thread = store.thread("t")
    thread.save({"list": [FIRST]}, frozen=True)
    theirs = store.thread("t").save({"list": [SECOND]})

    assert thread.save({"list": [FIRST, THIRD]}, on=theirs, frozen=True).state == {"list": [FIRST, THIRD]}


def test_a_save_on_a_head_that_is_the_newest_again_is_taken(store: Store) -> None:
    thread, other = store.thread("t"), store.thread("t")
    head = thread.save({"n": 1})
    other.latest()
    other.delete_checkpoint(other.save({"n": 2}))

    assert thread.save({"n": 3}, on=head).parent_id == head.id


def test_a_checkpoint_that_was_rewound_to_from_another_branch_can_be_deleted(store: Store) -> None:
    thread = store.thread("t")
    branch = thread.fork(thread.save({"n": 1}), branch="b")
    source = branch.save({"n": 2})
    branch.save({"n": 3})
    thread.rewind(source)
    branch.delete_checkpoint(source)

    assert store.check()


class Impatient(MemoryStore):
    """Gives up on a caller that never stops asking."""

    asked = 0

    def find(self, query: Query) -> list[Row]:
        self.asked += 1
        assert self.asked < 100, "asked too often"
        return super().find(query)


def test_looking_for_an_early_step_ends_also_when_origins_form_a_ring() -> None:
    with Store(Impatient(), make_services("", None)) as store:
        thread = store.thread("a")
        fork = thread.fork(thread.save({"n": 1}, id="one"), to="b", id="two")
        store.thread("a").delete()
        fork.fork("two", to="a", id="one")

        assert store.thread("a").at(0) is None


def test_an_outdated_handle_whose_bytes_are_gone_gets_a_conflict_not_a_false_alarm(store: Store) -> None:
    store.thread("t").save({"text": "x" * 300})
    thread = store.thread("t")
    thread.append(set={"n": 0})
    store.thread("t").delete()

    with pytest.raises(Conflict):
        thread.append({"text": "more"})


def test_a_stream_that_is_written_on_after_its_reference_went_is_referred_to_again(store: Store) -> None:
    thread = store.thread("t")
    for n in range(5):
        thread.append({"text": str(n) * 300})
    thread.save({"text": "z" * 5000})  # all new, so nothing needs the stream any more, but the handle knows it
    store.thread("t").prune(Keep(last=1))
    newest = thread.append({"text": "y" * 600})
    thread.fork(newest, to="fork")
    store.thread("fork").delete()

    assert store.thread("t").get(newest.id).state == {"text": "z" * 5000 + "y" * 600}  # type: ignore[union-attr]
    assert store.check()


def test_what_was_saved_after_the_newest_was_deleted_is_there_after_opening_again(tmp_path: Path) -> None:
    with open_store(f"dir:{tmp_path / 'logs'}") as store:
        thread = store.thread("t")
        thread.save({"text": "s" * 300})
        thread.append({"text": "k" * 300})
        thread.delete_checkpoint(thread.append({"text": "a" * 900}))
        for letter in "bcd":
            store.thread("t").append({"text": letter * 300})
    with open_store(f"dir:{tmp_path / 'logs'}") as store:
        newest = store.thread("t").latest()

        assert newest is not None
        assert newest.state == {"text": "".join(letter * 300 for letter in "skbcd")}
