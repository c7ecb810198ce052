"""The contract of ``commit_all``: many checkpoints at once, all or none. Part of ``StoreContract``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import Conflict, Fenced, IdTaken, InvalidInput
from holdfast.model.checkpoint import EPOCH
from holdfast.store.base import Backend, Commit, Committed, Query
from holdfast.store.leases import Claim
from holdfast.store.memory import MemoryStore
from holdfast.testing.drafts import draft, lane, put
from holdfast.thread.cursor import Context
from holdfast.thread.load import get
from holdfast.thread.perform import drive
from holdfast.thread.store import Store

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
            ours, theirs = drive(get("", commit.id), backend), drive(get("", commit.id), source)
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

    def _refused(self, backend: Backend, commits: Sequence[Commit], error: type[Exception]) -> None:
        before = backend.sizes().sources
        ids = tuple(commit.id for commit in commits)
        found = backend.find(Query("", ids=ids))
        with pytest.raises(error):
            backend.commit_all(commits)
        assert backend.sizes().sources == before
        assert backend.find(Query("", ids=ids)) == found
