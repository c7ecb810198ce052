"""Merging one branch into another: three-way on keys, conflicts are listed, and nothing is lost without a word."""

from __future__ import annotations

import random
from typing import Any

import pytest

import backstay
from backstay import Keep, Store, Thread
from backstay.errors import Conflict, Fenced, IdTaken, InvalidInput, MergeConflict, NotFound
from support.running import effort


def parted(store: Store) -> tuple[Thread, Thread]:
    """Return two branches of one thread that have both gone on since they parted."""
    main = store.thread("chat")
    main.save({"plan": "old", "notes": [1], "count": 1, "left": True})
    fork = main.fork(latest(main), branch="what-if")
    main.append({"notes": [2]}, delete=["left"])
    fork.append(set={"plan": "new", "found": {"x": 1.5}}, delete=["count"])
    return main, fork


def latest(thread: Thread) -> backstay.Checkpoint:
    found = thread.latest()
    assert found is not None
    return found


def test_each_side_keeps_what_only_it_has_changed(store: Store) -> None:
    main, fork = parted(store)
    before = latest(main)

    merged = main.merge(latest(fork), summary="took the plan")

    assert merged.state == {"plan": "new", "notes": [1, 2], "found": {"x": 1.5}}
    assert (merged.parent_id, merged.step, merged.branch) == (before.id, before.step + 1, "main")
    assert (merged.trigger, merged.summary) == ("merge", "took the plan")
    assert merged.metadata == {"backstay.merged": latest(fork).id}
    assert latest(store.thread("chat")).state == merged.state
    assert latest(fork).state == {"plan": "new", "notes": [1], "left": True, "found": {"x": 1.5}}
    assert store.check()


def test_a_merged_branch_goes_on(store: Store) -> None:
    main, fork = parted(store)
    main.merge(latest(fork))

    main.append({"notes": [3]})

    assert latest(main).state["notes"] == [1, 2, 3]
    assert latest(store.thread("chat")).state["plan"] == "new"


def test_conflicts_are_all_named_and_nothing_is_stored(store: Store) -> None:
    main, fork = parted(store)
    main.append(set={"plan": "mine", "count": 5})
    before = [meta.id for meta in main.history()]

    with pytest.raises(MergeConflict) as caught:
        main.merge(latest(fork))

    assert caught.value.keys == ("count", "plan")  # one was replaced on both sides, one deleted on the other
    assert caught.value.writers == (before[0], latest(fork).id)
    assert caught.value.thread == "chat"
    assert "'count', 'plan'" in str(caught.value)
    assert [meta.id for meta in main.history()] == before


@pytest.mark.parametrize(
    ("options", "plan", "count"),
    [
        ({"prefer": "ours"}, "mine", 5),
        ({"prefer": "theirs"}, "new", None),
        ({"set": {"plan": "both"}, "delete": ["count"]}, "both", None),
        ({"prefer": "theirs", "set": {"count": 9}}, "new", 9),
    ],
)
def test_a_conflict_is_settled_by_the_caller(
    store: Store, options: dict[str, Any], plan: str, count: int | None
) -> None:
    main, fork = parted(store)
    main.append(set={"plan": "mine", "count": 5})

    merged = main.merge(latest(fork), **options)

    assert (merged.state["plan"], merged.state.get("count"), merged.state["found"]) == (plan, count, {"x": 1.5})


def test_a_key_that_this_side_deleted_stays_deleted_if_asked(store: Store) -> None:
    main, fork = parted(store)
    fork.append(set={"left": "changed"})
    with pytest.raises(MergeConflict) as caught:
        main.merge(latest(fork))
    assert caught.value.keys == ("left",)

    assert "left" not in main.merge(latest(fork), delete=["left"]).state
    with pytest.raises(InvalidInput, match="delete must hold names"):
        main.merge(latest(fork), delete=[1])  # type: ignore[list-item]


def test_the_same_change_on_both_sides_is_no_conflict(store: Store) -> None:
    main, fork = parted(store)
    main.append(set={"plan": "new"}, delete=["count"])

    assert main.merge(latest(fork)).state == {"plan": "new", "notes": [1, 2], "found": {"x": 1.5}}


@pytest.mark.parametrize(("old", "new"), [(1, True), (0.0, -0.0), (1, 1.0), ([], ()), ("a", b"a")])
def test_values_that_only_look_equal_are_changes(store: Store, old: Any, new: Any) -> None:
    main = store.thread("t")
    main.save({"x": old})
    fork = main.fork(latest(main), branch="b")
    fork.append(set={"x": new})

    merged = main.merge(latest(fork)).state["x"]

    assert (type(merged), repr(merged)) == (type(new), repr(new))


def test_a_second_merge_takes_only_what_is_newer(store: Store) -> None:
    main, fork = parted(store)
    main.merge(latest(fork))
    main.append(set={"found": "mine"})
    fork.append(set={"plan": "newer"})

    merged = main.merge(latest(fork))

    assert merged.state == {"plan": "newer", "notes": [1, 2], "found": "mine"}
    fork.append(set={"found": "theirs"})
    with pytest.raises(MergeConflict, match="'found'"):
        main.merge(latest(fork))


def test_branches_that_merge_each_other_agree_in_the_end(store: Store) -> None:
    main, fork = parted(store)
    main.merge(latest(fork))
    fork.merge(latest(main))
    assert latest(fork).state == latest(main).state
    fork.append(set={"plan": "fork's"})
    main.append(set={"count": 7})
    main.merge(latest(fork))
    fork.merge(latest(main))

    expected = {"plan": "fork's", "notes": [1, 2], "found": {"x": 1.5}, "count": 7}
    assert latest(fork).state == latest(main).state == expected


def test_a_merge_into_a_branch_that_has_not_gone_on_takes_everything(store: Store) -> None:
    main, fork = parted(store)
    again = main.fork(latest(main), branch="again")
    again.append(set={"plan": "z"})

    assert main.merge(latest(again)).state == {**latest(again).state}
    assert fork.branch == "what-if"


def test_nothing_to_merge_stores_nothing(store: Store) -> None:
    main, fork = parted(store)
    first = main.merge(latest(fork))

    for source in (latest(fork), latest(fork).parent_id, first, first.parent_id):
        assert source is not None
        again = main.merge(source)
        assert (again.id, again.state) == (first.id, first.state)
    assert len(list(main.history())) == 3


def test_a_merge_with_an_id_can_be_repeated(store: Store) -> None:
    main, fork = parted(store)
    source = latest(fork)

    first = main.merge(source, id="m1", set={"extra": 1})
    main.append({"notes": [3]})
    again = store.thread("chat").merge(source, id="m1", set={"extra": 1})

    assert (again.id, again.seq, again.state) == (first.id, first.seq, first.state)
    with pytest.raises(IdTaken):
        store.thread("chat").merge(source, id="m1", set={"extra": 2})
    parent = first.parent_id
    assert parent is not None
    main.delete_checkpoint(parent)
    assert store.thread("chat").merge(source, id="m1", set={"extra": 1}).seq == first.seq


def test_forks_of_forks_and_other_threads_are_merged(store: Store) -> None:
    main, fork = parted(store)
    deeper = fork.fork(latest(fork), to="other-thread", branch="deep")
    deeper.append({"notes": ["deep"]}, set={"deep": 1})
    main.append(set={"count": 2})
    with pytest.raises(MergeConflict) as caught:
        main.merge(latest(deeper))
    assert caught.value.keys == ("count", "notes")

    merged = main.merge(latest(deeper), set={"notes": [1, 2, "deep"], "count": 2})

    assert merged.state == {"plan": "new", "notes": [1, 2, "deep"], "count": 2, "found": {"x": 1.5}, "deep": 1}


def test_what_a_rewind_undid_stays_undone(store: Store) -> None:
    main = store.thread("t")
    first = main.save({"x": 1})
    second = main.append(set={"x": 2})
    fork = main.fork(second, branch="b")
    fork.append(set={"y": 1})
    main.rewind(first)

    assert main.merge(latest(fork)).state == {"x": 1, "y": 1}


def test_pruned_branches_are_merged_as_long_as_their_fork_is_stored(store: Store) -> None:
    main, fork = parted(store)
    for number in range(5):
        main.append({"notes": [number]})
        fork.append(set={"plan": f"p{number}"})
    assert main.prune(Keep(last=1)).deleted > 5

    assert main.merge(latest(fork)).state["plan"] == "p4"


def test_what_cannot_be_merged_is_refused(store: Store) -> None:
    main, fork = parted(store)
    stranger = store.thread("stranger")
    stranger.save({"plan": 1})
    stale = store.thread("chat")
    latest(stale)
    main.append(set={"count": 3})

    with pytest.raises(NotFound, match="no stored checkpoint in common"):
        main.merge(latest(stranger))
    with pytest.raises(NotFound, match="no checkpoint to merge into"):
        store.thread("empty").merge(latest(fork))
    with pytest.raises(NotFound):
        main.merge("no-such-checkpoint")
    with pytest.raises(InvalidInput, match="prefer must be"):
        main.merge(latest(fork), prefer="mine")  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="changed since"):
        stale.merge(latest(fork))
    with store.thread("chat").lease(), pytest.raises(Fenced):
        main.merge(latest(fork), prefer="ours")
    assert latest(main).state["count"] == 3


def test_a_merge_keeps_the_position_of_the_branch(store: Store) -> None:
    main = store.thread("t")
    main.save({"x": 1}, next_node="ask", graph="g", path=["start"], metadata={"mine": 1})
    fork = main.fork(latest(main), branch="b", metadata={"theirs": 1})
    fork.append(set={"y": 1}, next_node="elsewhere")

    merged = main.merge(latest(fork))

    assert (merged.next_node, merged.graph, merged.path) == ("ask", "g", ("start",))
    assert merged.metadata == {"mine": 1, "backstay.merged": latest(fork).id}


class Model:
    """A branch as a set of writes: of each key the last one, and all writes that the branch has ever seen."""

    def __init__(self, last: dict[str, int], seen: set[int]) -> None:
        self.last = last
        self.seen = seen

    def copy(self) -> Model:
        return Model(dict(self.last), set(self.seen))


@pytest.mark.effort
def test_no_order_of_forks_and_merges_loses_a_write(store: Store) -> None:
    """Compared with a model that knows which writes each branch has seen, and nothing of common checkpoints."""
    clean = extra = 0
    for seed in range(30 * effort()):
        chance, write = random.Random(seed), 0
        thread = store.thread(f"t{seed}")
        thread.save({"a": 0, "b": 0, "c": 0})
        handles = {"main": thread}
        models = {"main": Model({"a": 0, "b": 0, "c": 0}, {0})}
        for step in range(25):
            name = chance.choice(list(handles))
            action = chance.choice(["write", "write", "fork", "merge", "merge"])
            if action == "write":
                write, key = write + 1, chance.choice("abc")
                handles[name].append(set={key: write})
                models[name].last[key] = write
                models[name].seen.add(write)
            elif action == "fork" and len(handles) < 4:
                other = f"b{step}"
                handles[other] = handles[name].fork(latest(handles[name]), branch=other)
                models[other] = models[name].copy()
            elif action == "merge" and len(handles) > 1:
                other = chance.choice([each for each in handles if each != name])
                ours, theirs = models[name], models[other]
                at_once = {
                    key for key in "abc" if ours.last[key] not in theirs.seen and theirs.last[key] not in ours.seen
                }
                try:
                    handles[name].merge(latest(handles[other]))
                    clashes: set[str] = set()
                except MergeConflict as error:
                    clashes = set(error.keys)
                    settled = {key: write + number for number, key in enumerate(error.keys, 1)}
                    write += len(settled)
                    handles[name].merge(latest(handles[other]), set=settled)
                    ours.last |= settled
                    ours.seen |= set(settled.values())
                assert at_once <= clashes, (seed, step)
                extra += len(clashes - at_once)
                clean += not clashes
                for key in set("abc") - clashes:
                    if theirs.last[key] not in ours.seen:
                        ours.last[key] = theirs.last[key]
                ours.seen |= theirs.seen
            assert latest(handles[name]).state == models[name].last, (seed, step)
    assert clean > 50 * effort()
    assert extra < clean / 5, "conflicts that a human would not see as such are rare"
