"""Forking, rewinding, time travel, tags."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import backstay
from backstay.errors import InvalidInput, NotFound
from backstay.model.lineage import draw, trees_of
from backstay.store.base import BranchKey, Query
from backstay.thread.access import access_of

BIG = ["message " * 60] * 20


def three_steps(store: backstay.Store) -> backstay.Thread:
    thread = store.thread("t")
    for number in range(1, 4):
        thread.save({"m": [*BIG, str(number)], "n": number}, next_node=f"node{number}", metadata={"user": "u"})
    return thread


def test_a_repeated_rewind_to_another_checkpoint_is_not_taken_for_the_same(store: backstay.Store) -> None:
    thread = store.thread("t")
    first, second = thread.save({"n": 1}), thread.save({"n": 1})
    thread.rewind(first, id="r1")
    with pytest.raises(backstay.Conflict, match="other content"):
        thread.rewind(second, id="r1")


def test_a_fork_takes_over_state_position_and_step(store: backstay.Store) -> None:
    thread = three_steps(store)
    second = thread.at(2)
    assert second is not None
    side = thread.fork(second, branch="what-if", set={"n": "other"})
    forked = side.latest()

    assert forked is not None
    assert forked.state == {"m": [*BIG, "2"], "n": "other"}
    assert (forked.step, forked.next_node, forked.parent_id, forked.branch) == (2, "node2", second.id, "what-if")
    assert (forked.trigger, dict(forked.metadata)) == ("fork", {"user": "u"})


def test_a_fork_and_its_origin_go_on_independently(store: backstay.Store) -> None:
    thread = three_steps(store)
    side = thread.fork(next(thread.history()), branch="side")
    side.append({"m": ["side"]})
    thread.append({"m": ["main"]})
    side.append({"m": ["side 2"]})
    latest, side_latest = store.thread("t").latest(), store.thread("t", branch="side").latest()

    assert latest is not None
    assert side_latest is not None
    assert latest.state["m"] == [*BIG, "3", "main"]
    assert side_latest.state["m"] == [*BIG, "3", "side", "side 2"]


def test_a_fork_into_another_thread_is_a_thread_of_its_own(store: backstay.Store) -> None:
    thread = three_steps(store)
    other = thread.fork(next(thread.history()), to="copy", delete=["n"])
    store.thread("t").delete()
    latest = store.thread("copy").latest()

    assert latest is not None
    assert latest.state == {"m": [*BIG, "3"]}
    assert (other.id, other.branch) == ("copy", "main")


def test_a_fork_onto_an_existing_branch_is_refused(store: backstay.Store) -> None:
    thread = three_steps(store)
    newest = next(thread.history())
    thread.fork(newest, branch="side")
    with pytest.raises(backstay.Conflict, match="already exists"):
        thread.fork(newest, branch="side")


def test_a_fork_without_a_name_is_named_after_its_step(store: backstay.Store) -> None:
    thread = three_steps(store)
    names = [thread.fork(2).branch, thread.fork(next(thread.history())).branch]

    assert names == ["fork-2", "fork-3"]
    with pytest.raises(backstay.Conflict, match="'fork-2' of thread 't' already exists"):
        thread.fork(2)


def test_a_fork_of_what_is_not_there_says_so(thread: backstay.Thread) -> None:
    with pytest.raises(backstay.NotFound, match="nothing-here"):
        thread.fork("nothing-here", branch="side")


def test_rewind_goes_back_by_appending_and_destroys_nothing(store: backstay.Store) -> None:
    thread = three_steps(store)
    first = thread.at(1)
    assert first is not None
    back = thread.rewind(first)
    latest = store.thread("t").latest()

    assert latest is not None
    assert latest.state == first.state
    assert (back.step, back.parent_id, back.next_node, back.trigger) == (4, first.id, "node1", "rewind")
    assert [meta.step for meta in thread.history()] == [4, 3, 2, 1]
    assert thread.append({"m": ["on"]}).state["m"] == [*BIG, "1", "on"]


def test_a_stale_handle_cannot_rewind(store: backstay.Store) -> None:
    thread = three_steps(store)
    first = thread.at(1)
    assert first is not None
    other = store.thread("t")
    other.latest()
    other.save({"n": 9})
    with pytest.raises(backstay.Conflict):
        thread.rewind(first)


def test_rewinding_to_another_threads_checkpoint_is_refused(store: backstay.Store) -> None:
    three_steps(store)
    foreign = store.thread("other").save({"n": 1})
    with pytest.raises(backstay.InvalidInput, match="belongs to thread"):
        store.thread("t").rewind(foreign)


def test_at_gives_the_nearest_checkpoint_at_or_before_a_step(store: backstay.Store) -> None:
    thread = store.thread("t")
    for step in (2, 5, 9):
        thread.save({"step": step}, step=step)
    found = [thread.at(step) for step in (1, 2, 4, 5, 8, 9, 100)]

    assert [None if cp is None else cp.step for cp in found] == [None, 2, 2, 5, 5, 9, 9]


def test_any_step_is_found_whatever_was_left_out_or_deleted(store: backstay.Store) -> None:
    rng = random.Random(20261117)
    for number in range(20):
        thread, other = store.thread(f"t{number}"), store.thread(f"t{number}", branch="other")
        last = rng.randrange(5)
        for _ in range(rng.randint(2, 20)):
            last += rng.choice([1, 1, 1, 2, 7])
            thread.save({"n": last}, step=last)
            if rng.random() < 0.2:
                other.save({})
        _, *older = thread.history()
        for meta in rng.sample(older, len(older) // 3):
            thread.delete_checkpoint(meta)
        kept = [meta.step for meta in thread.history()]

        for step in range(last + 2):
            found = thread.at(step)
            assert (found.step if found else None) == max((each for each in kept if each <= step), default=None), kept


def test_before_a_forks_first_step_at_looks_where_it_was_forked_from(store: backstay.Store) -> None:
    thread = three_steps(store)
    side = thread.fork(next(thread.history()), branch="side")
    side.save({"n": "4 on side"})
    thread.save({"n": "4 on main"})
    found = [side.at(step) for step in (4, 3, 2, 1, 0)]

    assert [None if cp is None else (cp.branch, cp.step) for cp in found] == [
        ("side", 4),
        ("side", 3),
        ("main", 2),
        ("main", 1),
        None,
    ]


def test_a_checkpoint_is_found_by_its_id_alone(store: backstay.Store) -> None:
    saved = store.thread("t").save({"n": 1})
    found = store.get(saved.id)

    assert found is not None
    assert found.state == {"n": 1}
    assert store.get("unknown") is None
    assert store.thread("another").get(saved.id) is None


def test_tags_are_added_and_removed_and_filter_lists(store: backstay.Store) -> None:
    thread = three_steps(store)
    second = thread.at(2)
    assert second is not None

    assert thread.tag(second, "good", "a") == ("a", "good")
    assert thread.tag(second.id, "good") == ("a", "good")
    assert [meta.step for meta in thread.history(tag="good")] == [2]
    assert thread.untag(second, "a") == ("good",)
    again = thread.get(second.id)
    assert again is not None
    assert again.tags == ("good",)
    with pytest.raises(backstay.NotFound):
        thread.tag("unknown", "good")


def test_branches_and_lineage_draw_the_tree(store: backstay.Store) -> None:
    thread = three_steps(store)
    side = thread.fork(list(thread.history())[1], branch="side")
    side.save({"n": 1})
    nodes = list(thread.history(branch="*"))
    (tree,) = trees_of(nodes)
    drawn = draw([tree], lambda node: f"{node.branch} {node.step}")

    assert [branch.key.name for branch in thread.branches()] == ["main", "side"]
    assert len(nodes) == 5
    assert drawn == ["● main 1", "● main 2", "├─● side 2", "│ ● side 3", "● main 3"]


def test_a_forked_branch_shares_its_bytes(store: backstay.Store) -> None:
    thread = store.thread("t")
    saved = thread.save({"doc": "x" * 100_000, "m": BIG})
    before = access_of(store).store.sizes()
    for number in range(20):
        thread.fork(saved, branch=f"b{number}")
    after = access_of(store).store.sizes()

    assert sum(after.sources.values()) == sum(before.sources.values())
    rows = access_of(store).store.find(Query("", "t", limit=20, payload=True))
    assert sum(len(row.manifest) + len(row.notes) for row in rows) / 20 < 400


def test_a_fork_or_rewind_whose_answer_was_lost_can_be_repeated_by_its_id(store: backstay.Store) -> None:
    thread = three_steps(store)
    first, second = thread.at(1), thread.at(2)
    assert first is not None
    assert second is not None
    side = thread.fork(second, branch="side", set={"n": "x"}, id="f1")
    side.save({"n": "goes on"})
    again = thread.fork(second, branch="side", set={"n": "x"}, id="f1")
    back = thread.rewind(second, id="r1")
    same = thread.rewind(second, id="r1")

    assert len(list(again.history())) == 2
    assert again.append(set={"n": "and on"}).step == 4
    assert (same.seq, same.digest) == (back.seq, back.digest)
    assert len(list(thread.history())) == 4
    with pytest.raises(backstay.Conflict, match="other content"):
        thread.fork(second, branch="side", set={"n": "y"}, id="f1")
    with pytest.raises(backstay.Conflict, match="other content"):
        thread.rewind(first, id="r1")


@pytest.mark.parametrize("kind", ["memory", "dir"])
def test_the_branches_of_a_thread_are_not_searched_once_for_each(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, list[int]] = {}
    asked: list[object] = []
    covers = Query.covers

    def counted(query: Query, branch: BranchKey) -> bool:
        asked.append(branch)
        return covers(query, branch)

    monkeypatch.setattr(Query, "covers", counted)
    for branches in (30, 60):
        url = "memory:" if kind == "memory" else f"dir:{tmp_path / str(branches)}"
        with backstay.open(url) as store:
            thread = store.thread("t")
            first = thread.save({"n": 0})
            for number in range(branches):
                thread.fork(first, branch=f"b{number}").save({"n": number})
            for name, call in (
                ("check", thread.check),
                ("stats", thread.stats),
                ("prune", lambda thread=thread: thread.prune(backstay.Keep(last=1))),
            ):
                asked.clear()
                assert call()
                counts.setdefault(name, []).append(len(asked))

    assert all(few > 0 and many < 2.2 * few for few, many in counts.values()), counts


def test_a_missing_step_is_an_error_if_it_must_be_exact(store: backstay.Store) -> None:
    thread = store.thread("gaps")
    for number in range(1, 7):
        thread.save({"n": number}, id=f"gaps {number}")
    fork = thread.fork("gaps 4", branch="fork")
    fork.save({"n": "new"})
    for number in (1, 3):
        thread.delete_checkpoint(f"gaps {number}")

    assert thread.at(2, exact=True).id == thread.at(3).id == "gaps 2"  # type: ignore[union-attr]
    assert thread.at(1) is None
    for handle, step, near in (
        (thread, 1, "2"),
        (thread, 3, "2 and 4"),
        (fork, 3, "2 and 4"),
        (thread, 9, "6"),
        (store.thread("nobody"), 1, "no checkpoints"),
    ):
        with pytest.raises(NotFound, match=f"no checkpoint at step {step}.*{near}"):
            handle.at(step, exact=True)


def test_a_number_is_a_step_of_the_branch(store: backstay.Store) -> None:
    thread = store.thread("steps")
    for number in range(1, 5):
        thread.save({"n": number})

    assert thread.fork(2, branch="two").latest().state == {"n": 2}  # type: ignore[union-attr]
    assert thread.rewind(3).state == {"n": 3}
    with pytest.raises(NotFound, match=r"no checkpoint at step 40.*The nearest: step 5"):
        thread.fork(40, branch="forty")
    for wrong in (True, -1):
        with pytest.raises(InvalidInput, match="a step must be a whole number, 0 or more"):
            thread.fork(wrong, branch="wrong")
        with pytest.raises(InvalidInput, match="a step must be a whole number, 0 or more"):
            thread.rewind(wrong)
    assert [branch.key.name for branch in thread.branches()] == ["main", "two"]
