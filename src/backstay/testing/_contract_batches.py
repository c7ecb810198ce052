"""The contract of ``commit_all``: many checkpoints at once, all or none. Part of ``StoreContract``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import Conflict, Fenced, IdTaken, InvalidInput
from backstay.model.checkpoint import EPOCH
from backstay.store.base import Backend, Commit, Committed, Query, following
from backstay.store.leases import Claim
from backstay.store.memory import MemoryStore
from backstay.testing.drafts import draft, lane, put, state_of
from backstay.thread.cursor import Context
from backstay.thread.load import get
from backstay.thread.store import Store

COUNT = 120
_numbers = itertools.count(1)


class _Source(MemoryStore):
    """A store whose commits are to be stored in another one too, so its streams are numbered by that one."""

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
    """Return commits of every kind that make one branch, and a store that holds the same."""
    source = _Source(target)
    thread = Store(source, Context("", lambda: EPOCH, lambda: f"batch-{next(_numbers)}")).thread("t")
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
        commits.append(draft(source, lane(), {"n": n}, f"line-{next(_numbers)}"))
        source.commit(commits[-1])
    return [commit.digest for commit in commits], commits


class Batches:
    """What every store's ``commit_all`` does."""

    def test_many_at_once_are_stored_as_if_one_by_one(self, backend: Backend) -> None:
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

    def test_a_branch_goes_on_after_many_at_once(self, backend: Backend) -> None:
        put(backend, lane(), {"before": 1})
        head = backend.head(lane())
        assert head is not None
        _, commits = history(backend)
        first = replace(commits[0], number=head.number, last_seq=head.last_seq, head_seq=head.last_seq)
        done = backend.commit_all([first, *commits[1:]])
        last = put(backend, lane(), {"list": ["after"]})

        assert [place.seq for place in done] == list(range(2, COUNT + 2))
        assert [row.id for row in backend.find(Query("", "t", limit=2))] == [last, commits[-1].id]

    def test_many_at_once_again_give_the_first_results(self, backend: Backend) -> None:
        _, commits = history(backend, 20)
        first = backend.commit_all(commits)
        put(backend, lane(), {"later": 1})

        assert backend.commit_all(commits) == [replace(place, fresh=False) for place in first]
        assert len(backend.find(Query("", "t"))) == 21

    @pytest.mark.parametrize("position", [0, 10, 19])
    def test_if_one_id_is_taken_none_is_stored(self, backend: Backend, position: int) -> None:
        _, commits = history(backend, 20)
        put(backend, lane("other"), {"n": 1}, commits[position].id)
        self._refused(backend, commits, IdTaken)

    def test_if_the_branch_moved_or_is_leased_none_is_stored(self, backend: Backend) -> None:
        _, commits = history(backend, 20)
        put(backend, lane(), {"n": 1})
        self._refused(backend, commits, Conflict)
        _, others = history(backend, 20)
        backend.acquire(lane("u"), Claim("somebody", "token", 3_600_000_000))
        self._refused(backend, [replace(commit, lane=lane("u")) for commit in others], Fenced)

    def test_what_is_no_batch_is_refused(self, backend: Backend) -> None:
        one = draft(backend, lane(), {"n": 1})

        assert backend.commit_all([]) == []
        for wrong in ([one, one], [one, replace(one, id="x", lane=lane("u"))], [replace(one, replaces_head=True)]):
            self._refused(backend, wrong, InvalidInput)

    def test_many_at_once_go_again_without_a_trace(self, backend: Backend) -> None:
        _, commits = history(backend)
        backend.commit_all(commits)
        removed = backend.delete_thread("", "t")

        assert removed.checkpoints == COUNT
        assert backend.sizes().sources == {}

    @pytest.mark.parametrize("gone", [0, 1, 2])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_a_parent_that_is_not_there_leaves_its_name_and_digest(
        self, backend: Backend, gone: int, at_once: bool
    ) -> None:
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
        assert [each.origin for each in backend.lanes("", "t", None)] == [rest[0].parent_id]
        assert [state_of(backend, commit.id) for commit in rest] == [{"n": n} for n in range(gone, 4)]

    def test_a_parent_that_is_there_with_another_digest_is_not_taken_for_it(self, backend: Backend) -> None:
        digests, commits = _line(2)
        put(backend, lane("other"), {"n": "another"}, commits[0].id)
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
