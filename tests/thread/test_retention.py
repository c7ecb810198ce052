"""Deleting: nothing that stays is harmed, space is given back."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay.model.checkpoint import CheckpointMeta
from backstay.store.sqlite import collect
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of

BIG = random.Random(1).randbytes(25_000).hex()


def steps(thread: backstay.Thread) -> list[int]:
    return [meta.step for meta in thread.history()]


def grow(thread: backstay.Thread, count: int) -> None:
    for number in range(count):
        thread.append({"m": [f"{number:05}" * 100]}, set={"n": number})


def test_delete_removes_one_and_tells_how_many(store: backstay.Store) -> None:
    thread = store.thread("t")
    grow(thread, 3)
    middle = thread.at(2)
    assert middle is not None

    assert thread.delete_checkpoint(middle) == 1
    assert thread.delete_checkpoint(middle) == 0
    assert thread.delete_checkpoint("unknown") == 0
    assert steps(thread) == [3, 1]
    assert thread.get(middle.id) is None


def test_after_deleting_the_newest_the_one_before_it_is_newest(store: backstay.Store) -> None:
    thread = store.thread("t")
    grow(thread, 3)
    newest = thread.latest()
    assert newest is not None
    thread.delete_checkpoint(newest)
    latest = store.thread("t").latest()

    assert latest is not None
    assert latest.step == 2
    with pytest.raises(backstay.Conflict):
        thread.append(set={"n": "stale"})
    fresh = store.thread("t").append({"m": ["again"]})
    assert (fresh.step, fresh.seq) == (3, 4)
    assert len(fresh.state["m"]) == 3


def test_deleting_the_only_checkpoint_leaves_an_empty_thread_that_can_begin_anew(store: backstay.Store) -> None:
    thread = store.thread("t")
    thread.delete_checkpoint(thread.save({"n": 1}))

    assert store.thread("t").latest() is None
    assert list(store.threads()) == []
    assert store.thread("t").save({"n": 2}).seq == 2


def test_delete_before_is_strictly_less_and_never_takes_the_newest(store: backstay.Store) -> None:
    thread = store.thread("t")
    grow(thread, 5)

    assert thread.delete_before(3) == 2
    assert steps(thread) == [5, 4, 3]
    assert thread.delete_before(100) == 2
    assert steps(thread) == [5]


def test_delete_thread_takes_all_branches_and_leaves_other_threads(store: backstay.Store) -> None:
    thread, other = store.thread("t"), store.thread("other")
    grow(thread, 3)
    grow(other, 2)
    thread.fork(next(thread.history()), branch="side")

    assert store.thread("t").delete().checkpoints == 4
    assert store.thread("t").delete().checkpoints == 0
    assert steps(other) == [2, 1]
    assert store.thread("t").save({}).seq == 1
    with pytest.raises(backstay.Conflict):
        thread.append(set={"n": "from before the thread was deleted"})


def test_clear_empties_the_store_and_gives_the_space_back(store: backstay.Store) -> None:
    for name in "abc":
        store.thread(name).save({"doc": Random(name).randbytes(200_000)})
    before = store.stats().total_bytes
    removed = store.delete_all()

    def is_smaller() -> bool:
        store.compact()  # in PostgreSQL what is deleted stays in the file until it is vacuumed ...
        return store.stats().total_bytes < before

    assert (removed.checkpoints, removed.branches) == (3, 3)
    assert list(store.threads()) == []
    assert access_of(store).store.sizes().sources == {}
    wait_until(is_smaller)  # ... which it cannot be while anybody in the whole server still looks at an older state


def test_bytes_shared_by_threads_go_with_the_last_one(store: backstay.Store) -> None:
    for name in "abc":
        store.thread(name).save({"doc": BIG})
    assert len(access_of(store).store.sizes().sources) == 1
    store.thread("a").delete()
    store.thread("b").delete()
    left = store.thread("c").latest()

    assert left is not None
    assert left.state == {"doc": BIG}
    store.thread("c").delete()
    assert access_of(store).store.sizes().sources == {}


def test_what_was_summarised_away_is_freed_by_pruning(store: backstay.Store) -> None:
    thread = store.thread("t")
    grow(thread, 100)
    state = thread.latest()
    assert state is not None
    thread.save({"m": ["summary", *state.state["m"][-5:]], "n": 0})
    before = sum(access_of(store).store.sizes().sources.values())
    pruned = thread.prune(backstay.Keep(last=1))
    latest = store.thread("t").latest()

    assert latest is not None
    assert len(latest.state["m"]) == 6
    assert pruned.deleted == 100
    assert sum(access_of(store).store.sizes().sources.values()) < before / 2


def test_each_rule_keeps_what_it_says(store: backstay.Store, clock: Any) -> None:
    def fresh(name: str) -> backstay.Thread:
        thread = store.thread(name)
        for number in range(1, 11):
            thread.save({"n": number})
            clock.step(days=1)
        return thread

    cases: list[tuple[backstay.Keep, list[int]]] = [
        (backstay.Keep(last=3), [10, 9, 8]),
        (backstay.Keep(days=2.5), [10, 9]),
        (backstay.Keep(every=4), [10, 8, 4]),
        (backstay.Keep(milestones=4), [10, 7, 4, 1]),
        (backstay.Keep(last=2, every=5), [10, 9, 5]),
        (backstay.Keep(last=100), list(range(10, 0, -1))),
        (backstay.Keep(days=0), [10]),
    ]
    for number, (keep, expected) in enumerate(cases):
        thread = fresh(f"t{number}")
        thread.prune(keep)

        assert steps(thread) == expected, keep


def test_a_fork_of_a_fork_keeps_bytes_that_no_checkpoint_near_the_deleted_one_needs(store: backstay.Store) -> None:
    thread = store.thread("t")
    thread.save({"m": [BIG]})
    shared = thread.append({"m": [BIG[::-1]]})
    thread.save({})
    side = thread.fork(shared, branch="side")
    far = side.fork(next(side.history()), branch="far")
    newest = side.save({})
    for meta in [each for each in side.history() if each.id != newest.id]:
        side.delete_checkpoint(meta)
    thread.delete_checkpoint(shared)
    latest = store.thread("t", branch=far.branch).latest()

    assert latest is not None
    assert latest.state["m"] == [BIG, BIG[::-1]]


def test_bytes_that_came_to_the_place_of_deleted_ones_are_kept(store: backstay.Store) -> None:
    chance = random.Random(1)
    first, more = chance.randbytes(250).hex(), [chance.randbytes(500).hex() for _ in range(3)]
    thread = store.thread("t")
    thread.save({"log": [first]})
    thread.append({"log": more[:1]})
    longer = thread.append({"log": more[1:]})
    cut = thread.save({"log": [first, *more[:2]]})
    thread.delete_checkpoint(longer.id)
    fork = thread.fork(cut, to="fork")
    thread.delete_checkpoint(cut.id)
    fork.delete()
    thread = store.thread("t")
    found = thread.latest()
    assert found is not None
    new = [chance.randbytes(1000), chance.randbytes(500).hex()]
    longer = thread.append({"log": new})
    thread.save({"log": [*found.state["log"], new[1]]})
    thread.delete_checkpoint(longer.id)

    newest = store.thread("t").latest()
    assert newest is not None
    assert newest.state == {"log": [first, more[0], new[1]]}
    assert store.check()


def test_tagged_newest_and_forked_from_are_always_kept(store: backstay.Store) -> None:
    thread = store.thread("t")
    grow(thread, 6)
    second, fourth = thread.at(2), thread.at(4)
    assert second is not None
    assert fourth is not None
    thread.tag(second, "good")
    thread.fork(fourth, branch="side")
    store.prune(backstay.Keep(last=1))

    assert steps(thread) == [6, 4, 2]
    store.prune(backstay.Keep(last=1, tagged=False))
    assert steps(thread) == [6, 4]


def test_a_dry_run_says_the_same_and_does_nothing(store: backstay.Store) -> None:
    thread = store.thread("t")
    grow(thread, 6)
    would = store.prune(backstay.Keep(last=2), dry_run=True)
    assert steps(thread) == [6, 5, 4, 3, 2, 1]
    did = store.prune(backstay.Keep(last=2))

    assert (
        (would.deleted, would.kept, would.checkpoints)
        == (did.deleted, did.kept, did.checkpoints)
        == (
            4,
            2,
            would.checkpoints,
        )
    )
    assert "would delete 4" in str(would)


@pytest.mark.parametrize(
    "rules",
    [{}, {"last": 0}, {"last": "3"}, {"days": -1}, {"days": math.nan}, {"every": 0}, {"milestones": 1}, {"last": True}],
)
def test_impossible_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(backstay.InvalidInput):
        backstay.Keep(**rules)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 10), st.integers(2, 8), st.floats(0, 30))
def test_rules_keep_the_newest_and_only_name_what_there_is(
    ages: list[int], last: int, milestones: int, days: float
) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    branch = [
        CheckpointMeta(id=f"c{index}", thread_id="t", step=len(ages) - index, created_at=now - timedelta(days=age))
        for index, age in enumerate(ages)
    ]
    for keep in (
        backstay.Keep(last=last),
        backstay.Keep(milestones=milestones),
        backstay.Keep(days=days),
        backstay.Keep(last=last, days=days, milestones=milestones),
    ):
        to_delete = keep.to_delete(branch, now, ())

        assert branch[0].id not in to_delete
        assert set(to_delete) <= {meta.id for meta in branch}
    assert len(branch) - len(backstay.Keep(milestones=milestones).to_delete(branch, now, ())) == min(
        milestones, len(branch)
    )


def test_pruning_a_long_thread_reads_no_manifests_of_the_rows_that_stay(tmp_path: Path) -> None:
    """A list that loses its oldest item at every step shares its compressed rows with both sides of every batch."""
    with backstay.open(tmp_path / "agent.db") as store:
        thread = store.thread("t")
        for number in range(1500):
            thread.append(set={"lately": [f"{number - back} {'text ' * 30}" for back in range(5)]})
        connection = access_of(store).store._writer._connection  # type: ignore[attr-defined]
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
        removed = thread.prune(backstay.Keep(last=1))

        assert removed.deleted == 1499
        assert sum("DELETE FROM checkpoint" in text for text in statements) == 1499
        assert not [text for text in statements if "c.manifest" in text and "c.key > " in text]
        assert len(access_of(store).store.sizes().sources) == 1
        assert sum(access_of(store).store.sizes().sources.values()) < 65_536
        assert store.check()


def test_a_long_delete_lets_other_writers_in_between_its_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backstay.open(tmp_path / "agent.db") as store, backstay.open(tmp_path / "agent.db") as other:
        thread = store.thread("t")
        for number in range(4 * collect.DELETE_ROWS):
            thread.append(set={"n": number})
        saved: list[object] = []
        pause = SimpleNamespace(sleep=lambda _: saved.append(other.thread("u").append(set={"n": 1})))
        monkeypatch.setattr(collect, "time", pause)
        assert thread.delete().checkpoints == 4 * collect.DELETE_ROWS

        assert len(saved) == 4
        assert thread.latest() is None
        assert len(list(other.thread("u").history())) == 4
        assert store.check()
