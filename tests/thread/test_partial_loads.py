"""Loads that read only what is asked for: the end of a list, some keys, and nothing that a handle has already read."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.operations import cursor
from backstay.pieces.manifest import Range
from backstay.store.base import PAGE_ROWS_MAX
from backstay.store.open import open_backend
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services
from support.damage import change, flip_column
from support.running import Show, effort

PROGRAMS = 4 * effort()


class Watched:
    """A store that counts the bytes that it is asked for."""

    def __init__(self, url: str) -> None:
        self._backend = open_backend(url)
        self.fetched = 0

    def fetch(self, ranges: Any) -> Any:
        wanted: list[Range] = list(ranges)
        self.fetched += sum(piece.length for piece in wanted)
        return self._backend.fetch(wanted)

    def taken(self) -> int:
        """Return how many bytes were fetched since the last call."""
        fetched, self.fetched = self.fetched, 0
        return fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.fixture
def watched(url: str) -> Watched:
    return Watched(url)


@pytest.fixture
def store(watched: Watched) -> Iterator[Store]:
    with Store(watched, make_services("", None)) as opened:
        yield opened


def items(rng: random.Random, first: int, count: int) -> list[Any]:
    return [{"number": first + at, "text": rng.randbytes(rng.choice([5, 100, 300])).hex()} for at in range(count)]


def filled(store: Store, steps: int = 200) -> list[Any]:
    """Save a list that grows by two items at each step, and a text."""
    log: list[Any] = []
    rng, thread = random.Random(7), store.thread("t")
    for _ in range(steps):
        log += items(rng, len(log), 2)
        thread.append({"log": log[-2:]}, set=None if len(log) > 2 else {"document": "word " * 5000, "plan": "a"})
    return log


# The end of a list ------------------------------------------------------------------------------------------------


@pytest.mark.effort
def test_the_end_of_a_list_is_the_end_of_the_whole_list(store: Store, watched: Watched, show: Show) -> None:
    """Whatever happened to the list before: growth in any steps, rewriting, forks, deletes."""
    partial = 0
    for seed in range(PROGRAMS):
        rng = random.Random(seed)
        thread, log = store.thread(f"t{seed}"), list[Any]()
        for step in range(rng.randint(1, 60)):
            new = items(rng, len(log), rng.choice([0, 1, 1, 1, 2, 7]))
            choice = rng.random()
            if choice < 0.04 and log:
                log = [*log[: rng.randrange(len(log))], *new]
                thread.save({"log": log, "step": step})
            elif choice < 0.06 and step:
                thread = thread.fork(thread.latest() or "", branch=f"b{step}")
            elif choice < 0.08:
                thread.prune(backstay.Keep(last=rng.randint(1, 5)))
            else:
                log = [*log, *new]
                thread.append({"log": new}, set={"step": step})
        newest = thread.latest()
        assert newest is not None
        for n in (0, 1, 3, 20, len(log), len(log) + 5):
            watched.taken()
            assert (
                store.thread(thread.id, branch=thread.branch).tail("log", n)
                == newest.state["log"][max(0, len(log) - n) :]
            )
            partial += 0 < watched.taken() < newest.size / 4
    show("ends read without the rest", partial)
    assert partial


def test_the_rest_of_the_list_is_not_read(store: Store, watched: Watched) -> None:
    log = filled(store)
    watched.taken()
    assert store.thread("t").tail("log", 20) == log[-20:]
    assert 0 < watched.taken() < 20 * 800


def test_a_handle_still_builds_on_what_it_loaded(store: Store) -> None:
    filled(store, 30)
    mine = store.thread("t")
    mine.latest()
    other = store.thread("t")
    other.append({"log": ["theirs"]})
    assert mine.tail("log", 1) == ["theirs"]
    with pytest.raises(backstay.Conflict):
        mine.append({"log": ["mine"]})


def test_what_has_no_end_is_refused(store: Store) -> None:
    thread = store.thread("t")
    assert thread.tail("log", 3) == []
    filled(store, 2)
    with pytest.raises(backstay.NotFound, match=r"no key 'lock'.*'document', 'plan', 'log'") as missing:
        thread.tail("lock", 3)
    assert (missing.value.thread, missing.value.checkpoint) == ("t", thread.latest().id)  # type: ignore[union-attr]
    for key in ("document", "plan"):
        with pytest.raises(backstay.errors.InvalidInput, match=f"state.{key} is not a list"):
            thread.tail(key, 3)
    for n in (-1, 1.0, None, True):
        with pytest.raises(backstay.errors.InvalidInput, match="n must be a whole number"):
            thread.tail("log", n)  # type: ignore[arg-type]


def test_damage_in_the_end_is_found_and_damage_elsewhere_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        log = filled(store)
    flip_column(path, "chunk", "body", "address = (SELECT min(address) FROM chunk)", 90)
    change(path, "UPDATE checkpoint SET manifest = x'c1' WHERE step < 100")
    with backstay.open(path) as store:
        assert store.thread("t").tail("log", 20) == log[-20:]
        with pytest.raises(backstay.Corrupted):
            store.thread("t").latest()
    flip_column(path, "chunk", "body", "address = (SELECT max(address) FROM chunk)", 90)
    with backstay.open(path) as store:
        for n in (1, 20):
            with pytest.raises(backstay.Corrupted, match="checksum") as error:
                store.thread("t").tail("log", n)
            assert error.value.thread == "t"


def test_a_checkpoint_that_cannot_be_trusted_does_not_say_where_items_start(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        log = filled(store)
    change(path, "UPDATE checkpoint SET digest = zeroblob(32) WHERE step BETWEEN 150 AND 198")
    with backstay.open(path) as store:
        assert store.thread("t").tail("log", 20) == log[-20:]


# Some keys --------------------------------------------------------------------------------------------------------


def test_only_the_keys_that_are_asked_for_are_read(store: Store, watched: Watched) -> None:
    log = filled(store, 50)
    thread = store.thread("t")
    newest = thread.latest()
    assert newest is not None
    watched.taken()
    for get in (thread.get, store.get):
        found = get(newest.id, keys=["plan"])
        assert found == newest
        assert (found.state, found.size) == ({"plan": "a"}, newest.size)
        assert watched.taken() == 0  # it is in the manifest
        assert get(newest.id, keys=["log", "plan"]).state == {"log": log, "plan": "a"}  # type: ignore[union-attr]
        assert 0 < watched.taken() < newest.size - 20_000
        assert get(newest.id, keys=()).state == {}  # type: ignore[union-attr]
        assert get("missing", keys=["log"]) is None
        with pytest.raises(backstay.NotFound, match="no key 'plans'"):
            get(newest.id, keys=["plan", "plans"])
        with pytest.raises(backstay.NotFound, match="no key 0"):
            get(newest.id, keys=[0])  # type: ignore[list-item]
        with pytest.raises(backstay.errors.InvalidInput, match="keys must be a list of names"):
            get(newest.id, keys="plan")


def test_scopes_of_a_thread(store: Store) -> None:
    assert store.thread("t").scopes() == []
    for scope in ("", "inner", "other"):
        store.thread("t", scope=scope).save({"n": 1})
        store.thread("t", scope=scope, branch="b").save({"n": 1})
    store.thread("u", scope="elsewhere").save({"n": 1})
    assert store.thread("t", scope="inner").scopes() == ["", "inner", "other"]


def test_scopes_of_a_thread_with_more_branches_than_a_page() -> None:
    names = [f"scope {number}" for number in range(PAGE_ROWS_MAX + 1)]
    with backstay.open("memory:") as store:
        for name in names:
            store.thread("t", scope=name).save({"n": 1})
        assert store.thread("t").scopes() == names


# The next handle of a branch ----------------------------------------------------------------------------------------


def test_the_next_handle_reads_no_bytes_again(store: Store, watched: Watched) -> None:
    log = filled(store, 30)
    watched.taken()
    for number in range(3):
        thread = store.thread("t")
        first = thread.latest()
        assert first is not None
        assert first.state["log"] == log
        first.state["log"].clear()  # it is the caller's own
        log.append(number)
        thread.append({"log": [number]})
        assert store.thread("t").latest().state["log"] == log  # type: ignore[union-attr]
    assert watched.taken() == 0
    assert store.check()


def test_another_head_is_read_again(url: str, store: Store, watched: Watched) -> None:
    filled(store, 30)
    first = store.thread("t").latest()
    assert first is not None
    if url != "memory:":
        with backstay.open(url) as other:
            other.thread("t").append({"log": ["theirs"]})
        assert store.thread("t").tail("log", 1) == ["theirs"]
        assert store.thread("t").latest().state["log"][-1] == "theirs"  # type: ignore[union-attr]
    again = store.thread("t").save({"log": ["replaced"]}, id="r")
    store.thread("t").save({"log": ["replacing"]}, id=again.id, replace=True)
    assert store.thread("t").latest().state == {"log": ["replacing"]}  # type: ignore[union-attr]
    store.thread("t").delete()
    assert store.thread("t").latest() is None
    store.thread("t").save({"log": ["reborn"]})
    assert store.thread("t").latest().state == {"log": ["reborn"]}  # type: ignore[union-attr]


def test_a_changed_digest_of_the_head_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with backstay.open(path) as store:
        filled(store, 30)
        first = store.thread("t").latest()
        with backstay.open(path) as other:
            access_of(other).store.delete("", [first.id], False)  # type: ignore[union-attr]
        second = store.thread("t").latest()
        assert second is not None
        assert (first and first.step, second.step) == (30, 29)


def test_handles_that_share_a_head_do_not_share_changes(store: Store) -> None:
    log = filled(store, 10)
    handles = [store.thread("t") for _ in range(3)]
    for handle in handles:
        handle.latest()
    handles[0].append({"log": ["first"]}, set={"plan": "b"})
    with pytest.raises(backstay.Conflict):
        handles[1].append({"log": ["second"]})
    handles[2].latest()
    handles[2].append({"log": ["third"]})
    assert store.thread("t").latest().state["log"] == [*log, "first", "third"]  # type: ignore[union-attr]
    assert store.check()


def test_handles_of_many_threads_lose_no_item(store: Store) -> None:
    store.thread("t").save({"log": [], "document": "word " * 2000})
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for number in range(10):
                while True:
                    thread = store.thread("t")
                    thread.latest()
                    try:
                        thread.append({"log": [f"{name} {number} " + "x" * 300]})
                        break
                    except backstay.Conflict:
                        continue
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    newest = store.thread("t").latest()
    assert newest is not None
    wanted = sorted(f"{name} {number} " + "x" * 300 for name in range(4) for number in range(10))
    assert sorted(newest.state["log"]) == wanted
    assert store.check()


def test_a_store_remembers_a_bounded_number_of_bytes_and_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "RECENT_MAX", 5)
    monkeypatch.setattr(cursor, "RECENT_BYTES_MAX", 10_000)
    with backstay.open("memory:") as store:
        recent = access_of(store).services.recent
        for number in range(20):
            store.thread(f"t{number}").save({"n": number})
        assert [branch.thread for branch in recent] == [f"t{number}" for number in range(15, 20)]
        store.thread("t16").latest()
        store.thread("large").save({"text": "x" * 9_999})
        assert [branch.thread for branch in recent] == ["t16", "large"]
        store.thread("too large").save({"text": "x" * 10_001})
        assert not recent


def test_a_forked_process_starts_without_the_handles_of_its_parent() -> None:
    with backstay.open("memory:") as store:
        store.thread("t").save({"n": 1})
        assert access_of(store).services.recent
        child = os.fork()
        if not child:
            os._exit(len(access_of(store).services.recent))
        assert os.waitpid(child, 0)[1] == 0
        assert access_of(store).services.recent
