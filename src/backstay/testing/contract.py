"""The store contract as tests: the promises of ``store/base.py``, for any store, run by pytest.

A store's author writes one class and has them all::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_backend(self, tmp_path):
            return lambda: MyStore(str(tmp_path / "place"))

``open_backend`` is called again to reopen the same store; a store that loses everything on closing sets
``reopens = False``. After every test the fixture checks the whole store.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from backstay.errors import BackstayError, Conflict, Corrupted, Fenced, IdTaken, InvalidInput, NotFound, StoreError
from backstay.model.checkpoint import EPOCH
from backstay.operations.cursor import Services
from backstay.operations.load import get
from backstay.pieces.manifest import Range
from backstay.store.base import Backend, Commit, Committed, Query, following
from backstay.store.leases import LeaseRequest
from backstay.store.memory import MemoryStore
from backstay.store.records import RunQuery
from backstay.testing._contract_deletes import DeleteRules
from backstay.testing._contract_leases import FenceRules, LeaseRules, asking, everything, running, save
from backstay.testing._contract_lists import ListRules
from backstay.testing._contract_records import RecordRules, fresh, pause
from backstay.testing._contract_repair import RepairRules
from backstay.testing._contract_runs import RunRules
from backstay.testing.drafts import (
    branch_key,
    contents,
    damage,
    draft,
    long_list,
    names,
    pending,
    put,
    seq_of,
    state_of,
)
from backstay.thread.store import Store

COUNT = 120
_numbers = itertools.count(1)


class _Source(MemoryStore):
    """A store whose commits are also stored in another store, which therefore numbers its streams."""

    def __init__(self, target: Backend) -> None:
        super().__init__()
        self.target = target
        self.commits: list[Commit] = []

    def reserve(self, count: int) -> int:
        return self.target.reserve(count)

    def commit(self, commit: Commit) -> Committed:
        self.commits.append(commit)
        return super().commit(commit)


def history(target: Backend, count: int = COUNT) -> tuple[_Source, list[Commit]]:
    """Return commits of every kind that make up one branch, and a store that holds the same."""
    source = _Source(target)
    thread = Store(source, Services("", lambda: EPOCH, lambda: f"batch-{next(_numbers)}")).thread("t")
    state: dict[str, Any] = {"list": [f"{n}" * 40 for n in range(40)], "text": "x" * 5_000, "n": 0}
    thread.save(state, tags=["first"])
    for n in range(1, count):
        if n % 7 == 0:
            thread.save({**state, "list": state["list"][: n % 40], "n": n, "text": f"{n}" * 2_000})
        else:
            thread.append({"list": [f"item {n} " * 90], "text": f"{n},"}, set={"n": n}, tags=["even"] * (n % 2 == 0))
    return source, source.commits


def _line(count: int) -> tuple[list[bytes], list[Commit]]:
    """Return commits that follow each other, small enough to share no bytes, and their digests."""
    source = MemoryStore()
    commits = []
    for n in range(count):
        commits.append(draft(source, branch_key(), {"n": n}, f"line-{next(_numbers)}"))
        source.commit(commits[-1])
    return [commit.digest for commit in commits], commits


class BatchRules:
    """The contract of ``commit_all``: many checkpoints at once, all or none."""

    def test_a_batch_is_stored_as_if_one_by_one(self, backend: Backend) -> None:
        source, commits = history(backend)
        done = backend.commit_all(commits)
        rows, expected = (each.find(Query("", "t", limit=COUNT)) for each in (backend, source))

        assert [place.seq for place in done] == list(range(1, COUNT + 1))
        assert all(place.fresh for place in done)
        assert [row[2:13] for row in rows] == [row[2:13] for row in expected]
        for commit in commits:
            ours, theirs = get(backend, "", commit.id), get(source, "", commit.id)
            assert ours is not None
            assert theirs is not None
            assert (ours.state, ours.tags, ours.parent_id) == (theirs.state, theirs.tags, theirs.parent_id)

    def test_a_branch_continues_after_a_batch(self, backend: Backend) -> None:
        put(backend, branch_key(), {"before": 1})
        head = backend.head(branch_key())
        assert head is not None
        _, commits = history(backend)
        first = replace(commits[0], number=head.number, last_seq=head.last_seq, head_seq=head.last_seq)
        done = backend.commit_all([first, *commits[1:]])
        last = put(backend, branch_key(), {"list": ["after"]})

        assert [place.seq for place in done] == list(range(2, COUNT + 2))
        assert [row.id for row in backend.find(Query("", "t", limit=2))] == [last, commits[-1].id]

    def test_a_repeated_batch_gives_the_first_results(self, backend: Backend) -> None:
        _, commits = history(backend, 20)
        first = backend.commit_all(commits)
        put(backend, branch_key(), {"later": 1})

        assert backend.commit_all(commits) == [replace(place, fresh=False) for place in first]
        assert len(backend.find(Query("", "t"))) == 21

    @pytest.mark.parametrize("position", [0, 10, 19])
    def test_if_one_id_is_taken_none_is_stored(self, backend: Backend, position: int) -> None:
        _, commits = history(backend, 20)
        put(backend, branch_key("other"), {"n": 1}, commits[position].id)
        self._refused(backend, commits, IdTaken)

    def test_if_the_branch_moved_or_is_leased_none_is_stored(self, backend: Backend) -> None:
        _, commits = history(backend, 20)
        put(backend, branch_key(), {"n": 1})
        self._refused(backend, commits, Conflict)
        _, others = history(backend, 20)
        backend.acquire(branch_key("u"), LeaseRequest("somebody", "token", 3_600_000_000))
        self._refused(backend, [replace(commit, branch=branch_key("u")) for commit in others], Fenced)

    def test_an_invalid_batch_is_refused(self, backend: Backend) -> None:
        one = draft(backend, branch_key(), {"n": 1})

        assert backend.commit_all([]) == []
        for wrong in (
            [one, one],
            [one, replace(one, id="x", branch=branch_key("u"))],
            [replace(one, replaces_head=True)],
        ):
            self._refused(backend, wrong, InvalidInput)

    def test_a_batch_can_be_deleted_without_a_trace(self, backend: Backend) -> None:
        _, commits = history(backend)
        backend.commit_all(commits)
        removed = backend.delete_thread("", "t")

        assert removed.checkpoints == COUNT
        assert backend.sizes().sources == {}

    @pytest.mark.parametrize("gone", [0, 1, 2])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_a_missing_parent_leaves_its_name_and_digest(self, backend: Backend, gone: int, at_once: bool) -> None:
        digests, commits = _line(4)
        commits = [
            replace(commit, parent_digest=above) for commit, above in zip(commits, [None, *digests], strict=False)
        ]
        rest = commits[gone:]
        rest[0] = replace(rest[0], number=0, last_seq=0, head_seq=0, origin=rest[0].parent_id)
        if at_once:
            backend.commit_all(rest)
        else:
            done = [backend.commit(rest[0])]
            for commit in rest[1:]:
                done.append(backend.commit(following(commit, rest[0], done[-1])))
        rows = backend.find(Query("", "t"))[::-1]

        assert [row.parent_digest for row in rows] == [rest[0].parent_digest, *[None] * (len(rest) - 1)]
        assert [row.parent_id for row in rows] == [commit.parent_id for commit in rest]
        assert [each.origin for each in backend.branches("", "t", None)] == [rest[0].parent_id]
        assert [state_of(backend, commit.id) for commit in rest] == [{"n": n} for n in range(gone, 4)]

    def test_a_checkpoint_with_the_parents_id_and_another_digest_is_not_the_parent(self, backend: Backend) -> None:
        digests, commits = _line(2)
        put(backend, branch_key("other"), {"n": "another"}, commits[0].id)
        fresh = replace(commits[1], number=0, last_seq=0, head_seq=0, parent_digest=digests[0])
        backend.commit_all([fresh])
        (row,) = backend.find(Query("", ids=(fresh.id,), payload=True))

        assert row.parent_digest == digests[0]
        assert state_of(backend, fresh.id) == {"n": 1}

    def _refused(self, backend: Backend, commits: Sequence[Commit], error: type[Exception]) -> None:
        before = backend.sizes().sources
        ids = tuple(commit.id for commit in commits)
        found = backend.find(Query("", ids=ids))
        with pytest.raises(error):
            backend.commit_all(commits)
        assert backend.sizes().sources == before
        assert backend.find(Query("", ids=ids)) == found


WORKERS = 8
ROUNDS = 25


class StoreContract(ListRules, DeleteRules, BatchRules, LeaseRules, FenceRules, RecordRules, RunRules, RepairRules):
    """Derive a class from this one, override ``open_backend``, and let pytest collect it."""

    reopens: ClassVar[bool] = True

    @pytest.fixture
    def open_backend(self) -> Callable[[], Backend]:
        """Return a function that opens the store under test, each time it is called; override this."""
        pytest.fail("override the fixture open_backend: it returns a function that opens your store")

    @pytest.fixture
    def backend(self, open_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """Yield an open store and check all of it after the test, also after reopening it."""
        backend = open_backend()
        with contextlib.closing(backend):
            yield backend
            assert damage(backend) == []
        if self.reopens:
            with contextlib.closing(open_backend()) as again:
                assert damage(again) == []

    # Order --------------------------------------------------------------------------------------------------------

    def test_numbers_rise_over_all_branches_of_a_thread(self, backend: Backend) -> None:
        keys = [branch_key(), branch_key(name="b"), branch_key(scope="sub"), branch_key(), branch_key(name="b")]
        added = [seq_of(backend, key, put(backend, key, {"n": n})) for n, key in enumerate(keys)]

        assert added == sorted(set(added))

    def test_numbers_are_never_reused_after_deletes(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(4)]
        highest = seq_of(backend, branch_key(), ids[-1])
        backend.delete("", ids[2:], False)
        after_head = seq_of(backend, branch_key(), put(backend, branch_key(), {"n": 5}))
        backend.delete("", names(backend.find(Query(*branch_key()))), False)
        after_all = seq_of(backend, branch_key(), put(backend, branch_key(), {"n": 6}))

        assert highest < after_head < after_all

    def test_numbers_start_again_only_after_the_thread_was_deleted(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"n": 1})
        number = seq_of(backend, branch_key(), first)
        put(backend, branch_key(), {"n": 2})
        backend.delete_thread("", "t")

        assert seq_of(backend, branch_key(), put(backend, branch_key(), {"n": 3})) == number

    def test_the_newest_checkpoint_was_committed_last_regardless_of_clock_and_step(self, backend: Backend) -> None:
        years, steps = (2030, 2020, 2025), (7, 3, 3)
        ids = [
            put(backend, branch_key(), {"n": year}, created_at=datetime(year, 1, 1, tzinfo=UTC), step=step)
            for year, step in zip(years, steps, strict=True)
        ]
        head = backend.head(branch_key())

        assert names(backend.find(Query(*branch_key()))) == ids[::-1]
        assert head is not None
        assert head.row is not None
        assert head.row.id == ids[-1]

    # One writer ---------------------------------------------------------------------------------------------------

    def test_a_commit_to_a_branch_that_moved_is_a_conflict_and_stores_nothing(self, backend: Backend) -> None:
        put(backend, branch_key(), {"list": long_list(10)})
        late = draft(backend, branch_key(), {"list": long_list(30)})
        put(backend, branch_key(), {"list": long_list(20)})
        before = contents(backend)
        with pytest.raises(Conflict) as raised:
            backend.commit(late)

        assert not isinstance(raised.value, IdTaken)
        assert contents(backend) == before

    def test_a_commit_that_expects_a_new_branch_conflicts_if_it_exists(self, backend: Backend) -> None:
        late = draft(backend, branch_key(), {"n": 1})
        put(backend, branch_key(), {"n": 2})
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    @pytest.mark.parametrize("exists", [True, False], ids=["branch exists", "no branch yet"])
    def test_a_commit_of_another_epoch_is_fenced_and_stores_nothing(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, branch_key(), {"n": 1})
        before = contents(backend)
        with pytest.raises(Fenced) as raised:
            backend.commit(replace(draft(backend, branch_key(), {"text": "x" * 999}), epoch=7))

        assert (raised.value.epoch, raised.value.current) == (7, 0)
        assert not isinstance(raised.value, Conflict)
        assert contents(backend) == before

    def test_a_commit_on_a_head_that_was_deleted_is_a_conflict_and_stores_nothing(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 10)}) for n in (1, 2, 3)]
        late = draft(backend, branch_key(), {"list": long_list(50)})
        backend.delete("", ids[2:], False)
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    def test_a_branch_created_again_under_the_same_name_is_another_branch(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"n": 1})
        late = draft(backend, branch_key(), {"n": 2})
        backend.delete("", [first], False)
        with pytest.raises(Conflict):
            backend.commit(late)
        put(backend, branch_key(), {"n": 3})
        renewed = backend.head(branch_key())
        assert renewed is not None
        with pytest.raises(Conflict):
            backend.commit(replace(late, last_seq=renewed.last_seq))

        assert renewed.number != late.number
        assert len(backend.find(Query(*branch_key()))) == 1

    def test_a_fork_of_a_deleted_checkpoint_is_not_found_and_stores_nothing(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"list": long_list(9)})
        put(backend, branch_key(), {"n": 2})
        late = draft(backend, branch_key(name="b"), {"list": long_list(9)}, origin=first)
        backend.delete("", [first], False)
        before = contents(backend)
        with pytest.raises(NotFound):
            backend.commit(late)

        assert contents(backend) == before

    # Idempotence --------------------------------------------------------------------------------------------------

    def test_the_same_commit_again_gives_the_first_result_also_after_others(self, backend: Backend) -> None:
        commit = draft(backend, branch_key(), {"list": long_list(9)})
        first = backend.commit(commit)
        assert first.fresh
        assert backend.commit(commit) == replace(first, fresh=False)
        put(backend, branch_key(), {"list": long_list(20)})
        put(backend, branch_key(name="b"), {"n": 1})
        before = contents(backend)

        assert backend.commit(commit) == replace(first, fresh=False)
        assert contents(backend) == before

    @pytest.mark.parametrize("current", [True, False], ids=["up to date", "out of date"])
    def test_an_id_with_other_content_is_taken_and_nothing_is_stored(self, backend: Backend, current: bool) -> None:
        late = draft(backend, branch_key(), {"list": long_list(8)}, "one")
        put(backend, branch_key(), {"list": long_list(9)}, "one")
        before = contents(backend)
        with pytest.raises(IdTaken):
            backend.commit(draft(backend, branch_key(), {"list": long_list(8)}, "one") if current else late)

        assert contents(backend) == before

    def test_an_id_of_another_thread_is_taken_and_stays_where_it_is(self, backend: Backend) -> None:
        put(backend, branch_key("a"), {"n": 1}, "one")
        with pytest.raises(IdTaken):
            backend.commit(draft(backend, branch_key("b"), {"n": 1}, "one"))

        assert names(backend.find(Query(*branch_key("a")))) == ["one"]
        assert backend.find(Query(*branch_key("b"))) == []

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
        commit = draft(backend, branch_key(), {"a": b"a" * 300, "b": b"b" * 300})
        backend.commit(commit)
        one, two = commit.blobs
        wanted = [(two, 1, 2), (one, 0, 300), (two, 299, 1), (one, 5, 1)]
        found = backend.fetch([Range(*each) for each in wanted])

        assert [b"".join(parts) for parts in found] == [
            commit.blobs[name][start : start + length] for name, start, length in wanted
        ]
        assert backend.fetch([]) == []

    def test_an_incomplete_range_is_corrupted(self, backend: Backend) -> None:
        commit = draft(backend, branch_key(), {"text": "x" * 300})
        backend.commit(commit)
        (blob,) = commit.blobs
        for missing in (Range(blob, 0, 301), Range(bytes(32), 0, 1), Range(backend.reserve(1), 0, 1)):
            with pytest.raises(Corrupted):
                backend.fetch([Range(blob, 0, 300), missing])

    # Threads, reopening, closing ----------------------------------------------------------------------------------

    def test_checkpoints_survive_reopening(self, backend: Backend, open_backend: Callable[[], Backend]) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 10)}, tags=["x"]) for n in range(1, 4)]
        backend.write(branch_key(), ids[2], [pending("task", 0)], False)
        backend.delete("", ids[:1], False)
        before = contents(backend)
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert contents(again) == before
            grown = put(again, branch_key(), {"list": long_list(50)})

        assert state_of(backend, grown) == {"list": long_list(50)}

    def test_leases_and_records_survive_reopening(self, backend: Backend, open_backend: Callable[[], Backend]) -> None:
        pause(backend)
        held = [backend.acquire(key, asking("a")) for key in (branch_key(), branch_key("empty"))]
        run = backend.put_record(running())
        before = everything(backend)
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert everything(again) == before
            with pytest.raises(Fenced):
                again.commit(draft(again, branch_key(), {"n": 2}))
            save(again, branch_key(), {"n": 2}, asking("a"))
            again.renew(branch_key("empty"), held[1].epoch, asking("a"))
            assert again.put_record(replace(run, body=b"beat")).version == 2

        assert {row.branch for row in backend.leases("", None, False)} == {branch_key(), branch_key("empty")}

    def test_many_threads_can_commit_at_once_to_branches_of_their_own(self, backend: Backend) -> None:
        def work(worker: int) -> None:
            for n in range(1, ROUNDS + 1):
                put(backend, branch_key(name=f"b{worker}"), {"list": long_list(n)}, f"{worker}-{n}")

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, range(WORKERS)))
        rows = backend.find(Query("", "t"))

        assert sorted((row.seq for row in rows), reverse=True) == [row.seq for row in rows]
        assert len({row.seq for row in rows}) == WORKERS * ROUNDS
        for worker in range(WORKERS):
            assert state_of(backend, f"{worker}-{ROUNDS}") == {"list": long_list(ROUNDS)}

    def test_of_many_commits_on_one_head_exactly_one_wins(self, backend: Backend) -> None:
        ready = threading.Barrier(WORKERS)

        def race(worker: int, n: int) -> bool:
            commit = draft(backend, branch_key(), {"list": long_list(n), "by": worker}, f"{n}-{worker}")
            ready.wait()
            try:
                return backend.commit(commit).fresh
            except Conflict:
                return False

        with ThreadPoolExecutor(WORKERS) as pool:
            for n in range(1, ROUNDS + 1):
                assert sum(pool.map(race, range(WORKERS), [n] * WORKERS)) == 1

        rows = backend.find(Query(*branch_key()))
        assert [row.parent_id for row in rows] == [*names(rows)[1:], None]

    def test_closing_twice_is_fine_and_any_other_verb_is_refused_afterwards(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        commit = draft(backend, branch_key(), {})
        closed = open_backend()
        closed.close()
        closed.close()
        verbs: list[Callable[[], object]] = [
            lambda: closed.head(branch_key()),
            lambda: closed.find(Query("", "t")),
            lambda: closed.branches("", None, None),
            lambda: closed.fetch([]),
            lambda: closed.reserve(1),
            lambda: closed.commit(commit),
            lambda: closed.write(branch_key(), "x", [], False),
            lambda: closed.tag("", "x", [], []),
            lambda: closed.delete("", ["x"], False),
            lambda: closed.delete_thread("", "t"),
            lambda: closed.acquire(branch_key(), asking("a")),
            lambda: closed.renew(branch_key(), 1, asking("a")),
            lambda: closed.release(branch_key(), 1, "a"),
            lambda: closed.leases("", None, False),
            lambda: closed.claim("", [("g", "1")], 1, asking("a"), 0, [], lambda run: run),
            lambda: closed.record("effect", branch_key(), "one"),
            lambda: closed.put_record(fresh("effect")),
            lambda: closed.records("effect", "", None, False, 0, 1),
            lambda: closed.drop_records([fresh("effect")]),
            lambda: closed.run(branch_key()),
            lambda: closed.runs(RunQuery("")),
            lambda: closed.count_runs("", ["running"]),
            closed.sizes,
            closed.check,
            closed.compact,
        ]
        for verb in verbs:
            with pytest.raises(BackstayError) as raised:
                verb()
            assert isinstance(raised.value, StoreError)
