"""The store contract as tests: what ``store/base.py`` promises, for any store, run by pytest.

A store's author writes one class and has them all::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_backend(self, tmp_path):
            return lambda: MyStore(str(tmp_path / "place"))

``open_backend`` is called again to reopen the same store; a store that keeps nothing sets ``reopens = False``. After
every test the fixture checks the whole store, so no test can forget it. ``row`` marks name our own requirements:
register the marker (``row(id)``) if your pytest is strict about markers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar

import pytest

from backstay.errors import BackstayError, Conflict, Corrupted, Fenced, IdTaken, NotFound, StoreError
from backstay.pieces.piece import Range
from backstay.store.base import Backend, Query
from backstay.testing._contract_batches import Batches
from backstay.testing._contract_deletes import Deletes
from backstay.testing._contract_fences import FenceRules
from backstay.testing._contract_leases import HOUR_US, LeaseRules, asking, everything, running, save
from backstay.testing._contract_lists import Lists
from backstay.testing._contract_mending import MendingRules
from backstay.testing._contract_records import RecordRules, fresh, pause
from backstay.testing.drafts import (
    contents,
    damage,
    draft,
    lane,
    long_list,
    names,
    pending,
    put,
    seq_of,
    state_of,
)

WORKERS = 8
ROUNDS = 25


class StoreContract(Lists, Deletes, Batches, LeaseRules, FenceRules, RecordRules, MendingRules):
    """Derive from it, say how your store is opened, and let pytest collect it."""

    reopens: ClassVar[bool] = True

    @pytest.fixture
    def open_backend(self) -> Callable[[], Backend]:
        """Return a function that opens the store under test, again and again; to be overridden."""
        pytest.fail("override the fixture open_backend: it returns a function that opens your store")

    @pytest.fixture
    def backend(self, open_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """Give an open store, and check all of it when the test is over: as it is, and as it is when reopened."""
        backend = open_backend()
        with contextlib.closing(backend):
            yield backend
            assert damage(backend) == []
        if self.reopens:
            with contextlib.closing(open_backend()) as again:
                assert damage(again) == []

    # Order --------------------------------------------------------------------------------------------------------

    @pytest.mark.row("C3", "W3-07")
    def test_numbers_rise_over_all_lanes_of_a_thread(self, backend: Backend) -> None:
        keys = [lane(), lane(branch="b"), lane(scope="sub"), lane(), lane(branch="b")]
        added = [seq_of(backend, key, put(backend, key, {"n": n})) for n, key in enumerate(keys)]

        assert added == sorted(set(added))

    @pytest.mark.row("C3")
    def test_numbers_are_never_given_again_after_deletes(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(4)]
        highest = seq_of(backend, lane(), ids[-1])
        backend.delete("", ids[2:], False)
        after_head = seq_of(backend, lane(), put(backend, lane(), {"n": 5}))
        backend.delete("", names(backend.find(Query(*lane()))), False)
        after_all = seq_of(backend, lane(), put(backend, lane(), {"n": 6}))

        assert highest < after_head < after_all

    def test_only_a_deleted_thread_takes_its_numbers_along(self, backend: Backend) -> None:
        first = put(backend, lane(), {"n": 1})
        number = seq_of(backend, lane(), first)
        put(backend, lane(), {"n": 2})
        backend.delete_thread("", "t")

        assert seq_of(backend, lane(), put(backend, lane(), {"n": 3})) == number

    @pytest.mark.row("C3", "W3-07", "W4-17")
    def test_the_newest_is_the_one_committed_last_whatever_its_clock_and_step_say(self, backend: Backend) -> None:
        years, steps = (2030, 2020, 2025), (7, 3, 3)
        ids = [
            put(backend, lane(), {"n": year}, created_at=datetime(year, 1, 1, tzinfo=UTC), step=step)
            for year, step in zip(years, steps, strict=True)
        ]
        head = backend.head(lane())

        assert names(backend.find(Query(*lane()))) == ids[::-1]
        assert head is not None
        assert head.row is not None
        assert head.row.id == ids[-1]

    # One writer ---------------------------------------------------------------------------------------------------

    @pytest.mark.row("C1")
    def test_a_commit_to_a_lane_that_moved_is_a_conflict_and_stores_nothing(self, backend: Backend) -> None:
        put(backend, lane(), {"list": long_list(10)})
        late = draft(backend, lane(), {"list": long_list(30)})
        put(backend, lane(), {"list": long_list(20)})
        before = contents(backend)
        with pytest.raises(Conflict) as raised:
            backend.commit(late)

        assert not isinstance(raised.value, IdTaken)
        assert contents(backend) == before

    @pytest.mark.row("C1")
    def test_a_lane_that_was_to_be_new_but_exists_is_a_conflict(self, backend: Backend) -> None:
        late = draft(backend, lane(), {"n": 1})
        put(backend, lane(), {"n": 2})
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    @pytest.mark.row("C1")
    @pytest.mark.parametrize("exists", [True, False], ids=["lane exists", "no lane yet"])
    def test_a_commit_of_another_epoch_is_fenced_and_stores_nothing(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, lane(), {"n": 1})
        before = contents(backend)
        with pytest.raises(Fenced) as raised:
            backend.commit(replace(draft(backend, lane(), {"text": "x" * 999}), epoch=7))

        assert (raised.value.epoch, raised.value.current) == (7, 0)
        assert not isinstance(raised.value, Conflict)
        assert contents(backend) == before

    @pytest.mark.row("C1")
    def test_a_commit_on_a_head_that_was_deleted_is_a_conflict_and_stores_nothing(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"list": long_list(n * 10)}) for n in (1, 2, 3)]
        late = draft(backend, lane(), {"list": long_list(50)})
        backend.delete("", ids[2:], False)
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    @pytest.mark.row("C1")
    def test_a_lane_made_anew_under_its_old_name_is_another_lane(self, backend: Backend) -> None:
        first = put(backend, lane(), {"n": 1})
        late = draft(backend, lane(), {"n": 2})
        backend.delete("", [first], False)
        with pytest.raises(Conflict):
            backend.commit(late)
        put(backend, lane(), {"n": 3})
        renewed = backend.head(lane())
        assert renewed is not None
        with pytest.raises(Conflict):
            backend.commit(replace(late, last_seq=renewed.last_seq))

        assert renewed.number != late.number
        assert len(backend.find(Query(*lane()))) == 1

    def test_a_fork_of_a_checkpoint_that_is_gone_is_not_found_and_stores_nothing(self, backend: Backend) -> None:
        first = put(backend, lane(), {"list": long_list(9)})
        put(backend, lane(), {"n": 2})
        late = draft(backend, lane(branch="b"), {"list": long_list(9)}, origin=first)
        backend.delete("", [first], False)
        before = contents(backend)
        with pytest.raises(NotFound):
            backend.commit(late)

        assert contents(backend) == before

    # Idempotence --------------------------------------------------------------------------------------------------

    @pytest.mark.row("C2", "S3-22")
    def test_the_same_commit_again_gives_the_first_result_also_after_others(self, backend: Backend) -> None:
        commit = draft(backend, lane(), {"list": long_list(9)})
        first = backend.commit(commit)
        assert first.fresh
        assert backend.commit(commit) == replace(first, fresh=False)
        put(backend, lane(), {"list": long_list(20)})
        put(backend, lane(branch="b"), {"n": 1})
        before = contents(backend)

        assert backend.commit(commit) == replace(first, fresh=False)
        assert contents(backend) == before

    @pytest.mark.row("C2", "W2-20")
    @pytest.mark.parametrize("current", [True, False], ids=["up to date", "out of date"])
    def test_an_id_with_other_content_is_taken_and_nothing_is_stored(self, backend: Backend, current: bool) -> None:
        late = draft(backend, lane(), {"list": long_list(8)}, "one")
        put(backend, lane(), {"list": long_list(9)}, "one")
        before = contents(backend)
        with pytest.raises(IdTaken):
            backend.commit(draft(backend, lane(), {"list": long_list(8)}, "one") if current else late)

        assert contents(backend) == before

    @pytest.mark.row("W3-06")
    def test_an_id_of_another_thread_is_taken_and_stays_where_it_is(self, backend: Backend) -> None:
        put(backend, lane("a"), {"n": 1}, "one")
        with pytest.raises(IdTaken):
            backend.commit(draft(backend, lane("b"), {"n": 1}, "one"))

        assert names(backend.find(Query(*lane("a")))) == ["one"]
        assert backend.find(Query(*lane("b"))) == []

    # Streams ------------------------------------------------------------------------------------------------------

    def test_reserved_numbers_never_repeat(self, backend: Backend, open_backend: Callable[[], Backend]) -> None:
        taken: set[int] = set()
        for count in (1, 5, 2):
            first = backend.reserve(count)
            assert taken.isdisjoint(range(first, first + count))
            taken.update(range(first, first + count))
        if self.reopens:
            with contextlib.closing(open_backend()) as again:
                assert again.reserve(1) not in taken

        assert backend.reserve(1) not in taken

    def test_ranges_come_back_in_the_order_asked_for(self, backend: Backend) -> None:
        commit = draft(backend, lane(), {"a": b"a" * 300, "b": b"b" * 300})
        backend.commit(commit)
        one, two = commit.blobs
        wanted = [(two, 1, 2), (one, 0, 300), (two, 299, 1), (one, 5, 1)]
        found = backend.fetch([Range(*each) for each in wanted])

        assert [b"".join(parts) for parts in found] == [
            commit.blobs[name][start : start + length] for name, start, length in wanted
        ]
        assert backend.fetch([]) == []

    def test_a_range_that_is_not_wholly_there_is_corrupted(self, backend: Backend) -> None:
        commit = draft(backend, lane(), {"text": "x" * 300})
        backend.commit(commit)
        (blob,) = commit.blobs
        for missing in (Range(blob, 0, 301), Range(bytes(32), 0, 1), Range(backend.reserve(1), 0, 1)):
            with pytest.raises(Corrupted):
                backend.fetch([Range(blob, 0, 300), missing])

    # Threads, reopening, closing ----------------------------------------------------------------------------------

    @pytest.mark.row("C4")
    def test_what_was_stored_is_there_also_when_reopened(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        ids = [put(backend, lane(), {"list": long_list(n * 10)}, tags=["x"]) for n in range(1, 4)]
        backend.write(lane(), ids[2], [pending("task", 0)], False)
        backend.delete("", ids[:1], False)
        before = contents(backend)
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert contents(again) == before
            grown = put(again, lane(), {"list": long_list(50)})

        assert state_of(backend, grown) == {"list": long_list(50)}

    @pytest.mark.row("C4", "C5")
    def test_leases_and_records_are_there_also_when_reopened(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        pause(backend)
        held = [backend.acquire(key, asking("a")) for key in (lane(), lane("empty"))]
        session = backend.put_record(running(), HOUR_US)
        before = everything(backend)
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert everything(again) == before
            with pytest.raises(Fenced):
                again.commit(draft(again, lane(), {"n": 2}))
            save(again, lane(), {"n": 2}, asking("a"))
            again.renew(lane("empty"), held[1].epoch, asking("a"))
            assert again.put_record(replace(session, body=b"beat"), HOUR_US).version == 2

        assert {row.lane for row in backend.leases("", None, False)} == {lane(), lane("empty")}

    @pytest.mark.row("C1", "C3")
    def test_many_threads_can_commit_at_once_to_lanes_of_their_own(self, backend: Backend) -> None:
        def work(worker: int) -> None:
            for n in range(1, ROUNDS + 1):
                put(backend, lane(branch=f"b{worker}"), {"list": long_list(n)}, f"{worker}-{n}")

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, range(WORKERS)))
        rows = backend.find(Query("", "t"))

        assert sorted((row.seq for row in rows), reverse=True) == [row.seq for row in rows]
        assert len({row.seq for row in rows}) == WORKERS * ROUNDS
        for worker in range(WORKERS):
            assert state_of(backend, f"{worker}-{ROUNDS}") == {"list": long_list(ROUNDS)}

    @pytest.mark.row("C1")
    def test_of_many_commits_on_one_head_exactly_one_wins(self, backend: Backend) -> None:
        ready = threading.Barrier(WORKERS)

        def race(worker: int, n: int) -> bool:
            commit = draft(backend, lane(), {"list": long_list(n), "by": worker}, f"{n}-{worker}")
            ready.wait()
            try:
                return backend.commit(commit).fresh
            except Conflict:
                return False

        with ThreadPoolExecutor(WORKERS) as pool:
            for n in range(1, ROUNDS + 1):
                assert sum(pool.map(race, range(WORKERS), [n] * WORKERS)) == 1

        rows = backend.find(Query(*lane()))
        assert [row.parent_id for row in rows] == [*names(rows)[1:], None]

    def test_closing_twice_is_fine_and_any_other_verb_is_refused_afterwards(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        commit = draft(backend, lane(), {})
        closed = open_backend()
        closed.close()
        closed.close()
        verbs: list[Callable[[], object]] = [
            lambda: closed.head(lane()),
            lambda: closed.find(Query("", "t")),
            lambda: closed.lanes("", None, None),
            lambda: closed.fetch([]),
            lambda: closed.reserve(1),
            lambda: closed.commit(commit),
            lambda: closed.write(lane(), "x", [], False),
            lambda: closed.tag("", "x", [], []),
            lambda: closed.delete("", ["x"], False),
            lambda: closed.delete_thread("", "t"),
            lambda: closed.acquire(lane(), asking("a")),
            lambda: closed.renew(lane(), 1, asking("a")),
            lambda: closed.release(lane(), 1, "a"),
            lambda: closed.leases("", None, False),
            lambda: closed.claim("", 1, asking("a")),
            lambda: closed.record("effect", lane(), "one"),
            lambda: closed.put_record(fresh("effect")),
            lambda: closed.records("effect", "", None, False, 0, 1),
            closed.sizes,
            closed.check,
            closed.compact,
        ]
        for verb in verbs:
            with pytest.raises(BackstayError) as raised:
                verb()
            assert isinstance(raised.value, StoreError)
