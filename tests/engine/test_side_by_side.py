"""Branches that run side by side: their updates are merged against what they all began with, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph
from backstay.engine import Cancellation, Status
from backstay.engine.events import Event, NodeFinished, RunEnded
from backstay.engine.reducers import DELETE, add, append, merge
from backstay.engine.sinks import notify
from backstay.errors import BadUpdate, MergeConflict, NodeFailed
from backstay.model.decision import Answer, Approve, Modify
from backstay.model.frame import FanOut
from backstay.testing.drafts import wait_until
from support.engine.event_log import EventLog
from support.engine.walk import State, Walk, head, replace_node


class Items(TypedDict, total=False):
    items: list[str]
    seen: Annotated[list[str], append]


class Shared(TypedDict, total=False):
    messages: Annotated[list[str], append]
    facts: Annotated[dict[str, int], merge]
    total: Annotated[int, add]
    best: Annotated[int, max]
    left: str
    right: str
    old: str


def fan(left: Any, right: Any, state: Any = Shared, on_error: str = "fail_fast", **options: Any) -> Graph:
    graph = Graph("g", state=state, **options)
    graph.node("split", lambda state: None)
    graph.node("l", left)
    graph.node("r", right)
    graph.node("join", lambda state: None)
    graph.parallel("split", ["l", "r"], join="join", on_error=on_error)
    graph.start("split")
    graph.end("join")
    return graph


# Merging ----------------------------------------------------------------------------------------------------------

BEFORE = {
    "messages": ["hello"],
    "facts": {"a": 1, "gone": 1},
    "total": 10,
    "best": 4,
    "left": "old",
    "right": "old",
    "old": "x",
}


def test_updates_of_branches_are_merged_against_their_common_base_and_none_is_lost(url: str) -> None:
    graph = fan(
        lambda state: {"messages": ["l"], "facts": {"l": 1, "gone": DELETE}, "total": 1, "best": 9, "left": "new"},
        lambda state: {"messages": ["r"], "facts": {"r": 2}, "total": 5, "best": 7, "right": "new", "old": DELETE},
    )
    with backstay.open(url) as store:
        result = graph.run_sync(store.thread("t"), BEFORE)

        assert result.values == {
            "messages": ["hello", "l", "r"],
            "facts": {"a": 1, "l": 1, "r": 2},
            "total": 16,
            "best": 9,
            "left": "new",  # the right branch saw the old value, and did not bring it back
            "right": "new",
        }
        assert head(store.thread("t")).state == result.values


def test_each_branch_sees_the_state_from_before_all_of_them_and_they_really_run_at_once() -> None:
    both = threading.Barrier(2, timeout=30)
    seen: dict[str, Any] = {}

    def branch(state: Any, ctx: Any) -> dict[str, Any]:
        both.wait()  # passes only if the other one is here too
        seen[ctx.key] = dict(state)
        return {"messages": [ctx.key]}

    result = fan(branch, branch).run_sync(None, {"messages": ["hello"]})

    assert seen == {"l": {"messages": ["hello"]}, "r": {"messages": ["hello"]}}
    assert result.values["messages"] == ["hello", "l", "r"]  # in the order of declaration, whoever came first
    assert result.path == ("split", "l", "r", "join")


@pytest.mark.parametrize(
    ("left", "right", "key"),
    [
        ({"left": "a"}, {"left": "b"}, "left"),
        ({"old": DELETE}, {"old": "b"}, "old"),
        ({"facts": {"a": 2}}, {"facts": {"a": 3}}, "facts"),
        ({"messages": DELETE}, {"messages": ["x"]}, "messages"),
        ({"total": DELETE}, {"total": 1}, "total"),
    ],
)
def test_two_branches_that_cannot_both_be_kept_are_a_conflict_that_names_key_and_both_writers(
    left: Any, right: Any, key: str
) -> None:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = fan(lambda state: left, lambda state: right).run_sync(thread, BEFORE)

        assert isinstance(result.error, MergeConflict)
        assert (result.error.keys, result.error.writers) == ((key,), ("l", "r"))
        assert all(f"'{word}'" in str(result.error) for word in (key, "l", "r"))
        assert result.values == BEFORE
        assert head(thread).state == BEFORE


@pytest.mark.parametrize("update", [{"left": "same"}, {"old": DELETE}, {"facts": {"a": 5}}])
def test_branches_that_agree_are_no_conflict(update: Any) -> None:
    assert fan(lambda state: update, lambda state: update).run_sync(None, BEFORE).status is Status.COMPLETED


def test_a_branch_that_writes_what_was_there_does_not_undo_the_other() -> None:
    result = fan(lambda state: {"left": state["left"]}, lambda state: {"left": "new"}).run_sync(None, BEFORE)

    assert result.values["left"] == "new"


@pytest.mark.parametrize("mended", ["l", "r"])
def test_after_a_conflict_the_two_writers_run_again_and_the_others_do_not(mended: str) -> None:
    """What they returned was kept; if it were used again, no mended code could ever help."""
    walk = Walk()
    graph = walk.fan("l", "r", "other")
    for name in "lr":
        replace_node(graph, name, walk.node(name, lambda state, ctx: {"note": ctx.node}))
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        assert isinstance(graph.run_sync(thread).error, MergeConflict)
        again = graph.resume_sync(thread)
        assert isinstance(again.error, MergeConflict)
        replace_node(graph, mended, walk.node(mended, lambda state, ctx: {"other": "mended"}))

        result = graph.resume_sync(thread)

    assert result.status is Status.COMPLETED
    assert result.values["other"] == "mended"
    assert (walk.ran.count("split"), walk.ran.count("other"), walk.ran.count("join")) == (1, 1, 1)


# Failing ----------------------------------------------------------------------------------------------------------


def fails_after(ready: asyncio.Event) -> Any:
    """Return a branch that fails, but only after the others are where the test wants them."""

    async def node(state: Any) -> None:
        await ready.wait()
        raise ValueError("broken")

    return node


@pytest.mark.parametrize("on_error", ["fail_fast", "collect_all"])
def test_what_has_finished_when_another_branch_fails_is_kept_and_not_run_again(url: str, on_error: str) -> None:
    walk = Walk()
    graph = walk.fan("done", "broken", on_error=on_error)
    with backstay.open(url) as store:
        thread = store.thread("t")

        async def breaks(state: Any) -> None:
            await asyncio.to_thread(wait_until, lambda: head(store.thread("t")).writes)  # what the other one returned
            raise ValueError("broken")

        replace_node(graph, "broken", breaks)
        failed = asyncio.run(graph.run(thread))
        assert isinstance(failed.error, NodeFailed)
        assert (failed.error.node, type(failed.error.error)) == ("broken", ValueError)
        assert failed.values["seen"] == ["split"]  # of a fan-out all is committed, or nothing
        assert isinstance(head(thread).continuation, FanOut)
        replace_node(graph, "broken", lambda state: {"seen": ["broken"]})

        result = graph.resume_sync(store.thread("t"))

        assert result.status is Status.COMPLETED
        assert result.values["seen"] == ["split", "done", "broken", "join"]
        assert walk.ran == ["split", "done", "join"]


def test_fail_fast_ends_the_others_at_once() -> None:
    ended: list[str] = []
    running = asyncio.Event()

    async def waits(state: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()  # for ever
        finally:
            ended.append("l")

    log = EventLog()
    result = fan(waits, fails_after(running), state=State).run_sync(None, on_event=log)

    assert isinstance(result.error, NodeFailed)
    assert ended == ["l"]
    assert isinstance(log.events[-1], RunEnded)


def test_collect_all_lets_all_go_on_to_their_end_and_names_every_failure() -> None:
    walk = Walk()
    graph = walk.fan("a", "b", "c", "d", on_error="collect_all")
    failed_first = asyncio.Event()

    async def fails_first(state: Any) -> None:
        failed_first.set()
        raise ValueError("b")

    async def fails_later(state: Any) -> None:
        await failed_first.wait()
        raise KeyError("c")

    async def succeeds_later(state: Any) -> dict[str, Any]:
        await failed_first.wait()
        walk.ran.append("d")
        return {"seen": ["d"]}

    replace_node(graph, "b", fails_first)
    replace_node(graph, "c", fails_later)
    replace_node(graph, "d", succeeds_later)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        failed = graph.run_sync(thread)

        assert isinstance(failed.error, ExceptionGroup)
        errors = [error for error in failed.error.exceptions if isinstance(error, NodeFailed)]
        assert [(error.node, type(error.error)) for error in errors] == [("b", ValueError), ("c", KeyError)]
        for name in "bc":
            replace_node(graph, name, walk.node(name))
        assert graph.resume_sync(thread).values["seen"] == ["split", "a", "b", "c", "d", "join"]
        assert [sorted(walk.ran[1:3]), sorted(walk.ran[3:5])] == [["a", "d"], ["b", "c"]]  # branches have no order
        assert (walk.ran[0], *walk.ran[5:]) == ("split", "join")


def test_nothing_runs_on_after_the_run_has_ended() -> None:
    """A branch inside a branch is ended too; only then does the run end."""
    alive: set[str] = set()
    both = asyncio.Event()

    async def waits(state: Any, ctx: Any) -> None:
        alive.add(ctx.position)
        if len(alive) == 2:
            both.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            alive.discard(ctx.position)

    inner = fan(waits, waits, state=State)
    outer = Graph("outer", state=State)
    outer.node("split", lambda state: None)
    outer.subgraph("deep", inner)
    outer.node("broken", fails_after(both))
    outer.parallel("split", ["deep", "broken"])
    outer.start("split")

    async def story() -> tuple[Status, set[str], int]:
        result = await outer.run(None)
        return result.status, set(alive), len(asyncio.all_tasks())

    assert asyncio.run(story()) == (Status.FAILED, set(), 1)


# Map --------------------------------------------------------------------------------------------------------------


def mapping(walk: Walk, over: Any = "items", **options: Any) -> Graph:
    graph = Graph("g", state=State, **options)
    graph.node("split", walk.node("split"))
    graph.node("each", walk.node("each", lambda state, ctx: {"seen": [f"{ctx.key}:{ctx.item}"], "count": 1}))
    graph.node("join", walk.node("join"))
    graph.map("split", "each", over, join="join")
    graph.start("split")
    graph.end("join")
    return graph


@pytest.mark.parametrize("items", [[], ["x"], ["x", "y", "x"], list("abcdefghijkl")])
def test_a_node_runs_once_for_each_item_and_results_come_in_the_items_order(items: list[str]) -> None:
    result = mapping(Walk()).run_sync(None, {"items": items})

    assert result.status is Status.COMPLETED
    assert result.values["seen"] == ["split", *(f"{index}:{item}" for index, item in enumerate(items)), "join"]
    assert result.values.get("count", 0) == len(items)


def test_a_map_may_be_over_what_a_function_makes_of_the_state() -> None:
    graph = mapping(Walk(), over=lambda state: range(state["count"]))

    assert graph.run_sync(None, {"count": 3}).values["seen"] == ["split", "0:0", "1:1", "2:2", "join"]


@pytest.mark.parametrize("over", ["note", lambda state: state["missing"]])
def test_a_map_over_what_is_no_list_fails_the_run(over: Any) -> None:
    result = mapping(Walk(), over=over).run_sync(None, {"note": 5})

    assert isinstance(result.error, NodeFailed)
    assert result.error.node == "split (map over)"


def test_of_a_map_only_what_is_missing_runs_again(url: str) -> None:
    walk = Walk()
    graph = mapping(walk)
    graph._edges.clear()
    graph.map("split", "each", "items", join="join", on_error="collect_all")
    graph.end("join")

    def each(state: Any, ctx: Any) -> dict[str, Any]:
        if ctx.item == "bad" and walk.ran.count("each[1]") == 1:
            raise ValueError
        return {"seen": [ctx.item]}

    replace_node(graph, "each", walk.node("each", each))
    with backstay.open(url) as store:
        failed = graph.run_sync(store.thread("t"), {"items": ["a", "bad", "c"]})
        assert isinstance(failed.error, NodeFailed)
        assert failed.error.node == "each[1]"

        result = graph.resume_sync(store.thread("t"))

        assert result.values["seen"] == ["split", "a", "bad", "c", "join"]
        assert sorted(walk.ran) == ["each[0]", "each[1]", "each[1]", "each[2]", "join", "split"]


def test_a_function_that_is_mapped_over_must_not_return_fewer_items_later() -> None:
    items = ["a", "b", "c"]
    graph = mapping(Walk(), over=lambda state: items, before=["each"])
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        waits = graph.run_sync(thread, {"items": []})
        graph.resume_sync(thread, {waits.interrupts[2].id: Approve()})
        del items[1:]

        failed = graph.resume_sync(thread)

        assert "must not change" in str(failed.error)
        items += ["b", "c"]
        result = graph.resume_sync(thread, {each.id: Approve() for each in waits.interrupts[:2]})
        assert result.values["seen"] == ["split", "0:a", "1:b", "2:c", "join"]


@pytest.mark.parametrize("items", [["a", "x", "c"], ["a"], ["x", "b", "c", "d"], ["a", "b", "c"]])
def test_an_update_of_what_is_mapped_over_runs_the_changed_items_again_and_no_others(items: list[str]) -> None:
    """Results, effects and approvals of an old item never count for a new one."""
    ran: list[str] = []
    graph = Graph("g", state=Items)
    graph.node("split", lambda state: None)

    @graph.node
    def each(state: Any, ctx: Any) -> Any:
        ctx.effect("look", ran.append, ctx.item)
        ctx.approve("look", {"item": ctx.item})
        return {"seen": [ctx.item]}

    graph.map("split", "each", over="items")
    graph.start("split")
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        waits = graph.run_sync(thread, {"items": ["a", "b", "c"]})
        graph.resume_sync(thread, {waits.interrupts[0].id: Approve(), waits.interrupts[1].id: Approve()})
        assert sorted(ran) == ["a", "b", "c"]

        result = graph.resume_sync(thread, update={"items": items})
        while result.status is Status.INTERRUPTED:
            result = graph.resume_sync(thread, {record.id: Approve() for record in result.interrupts})

        assert result.status is Status.COMPLETED
        assert result.values["seen"] == items
        fresh = [item for index, item in enumerate(items) if item != "abc"[index : index + 1]]
        assert sorted(ran) == sorted(["a", "b", "c", *fresh])


def test_a_replay_with_other_items_does_not_use_the_progress_of_the_old_ones() -> None:
    inner = Graph("inner", state=Items)
    inner.node("one", lambda state: {"seen": [f"one {state['items'][0]}"]})
    inner.node("two", lambda state: {"seen": [f"two {state['items'][0]}"]})
    inner.edge("one", "two")
    inner.start("one")
    inner.end("two")
    graph = Graph("g", state=Items)
    graph.node("split", lambda state: None)
    graph.subgraph("each", inner, into=lambda state, item: {"items": [item]}, out={"seen": "seen"})
    graph.map("split", "each", over="items")
    graph.start("split")
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, {"items": ["a", "b"]}, before=["two"])
        result = graph.replay_sync(thread, head(thread), branch="b", set={"items": ["a", "x"]})
        other = store.thread("t", branch="b")
        while result.status is Status.INTERRUPTED:
            result = graph.resume_sync(other, {record.id: Approve() for record in result.interrupts})
        assert result.values["seen"] == ["one a", "two a", "one x", "two x"]


def test_a_map_over_a_key_that_is_not_in_the_state_fails_and_names_it() -> None:
    graph = mapping(Walk())
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        failed = graph.run_sync(thread, {})
        assert isinstance(failed.error, BadUpdate)
        assert (failed.error.node, failed.error.key) == ("split", "items")
        assert graph.resume_sync(thread, update={"items": ["a"]}).status is Status.COMPLETED


def test_a_cancelled_fan_out_keeps_what_has_finished(url: str) -> None:
    walk = Walk()
    graph = walk.fan("quick", "slow")
    cancel = Cancellation()

    async def slow(state: Any) -> None:
        await asyncio.Event().wait()

    def watch(event: Event) -> None:
        if isinstance(event, NodeFinished) and event.node == "quick":
            asyncio.get_running_loop().call_soon(cancel.cancel, "enough")  # what it returned is stored by then

    replace_node(graph, "slow", slow)
    with backstay.open(url) as store:
        result = graph.run_sync(store.thread("t"), cancel=cancel, on_event=watch)
        assert (result.status, walk.ran) == (Status.CANCELLED, ["split", "quick"])
        replace_node(graph, "slow", walk.node("slow"))

        assert graph.resume_sync(store.thread("t")).values["seen"] == ["split", "quick", "slow", "join"]
        assert walk.ran == ["split", "quick", "slow", "join"]


def test_a_graph_is_run_for_each_item_with_the_item_it_is_for() -> None:
    inner = Graph("inner", state=Inner)
    inner.node("find", lambda state: {"found": [state["query"] * 2]})
    inner.start("find")
    inner.end("find")
    outer = Graph("outer", state=State)
    outer.node("split", lambda state: None)
    outer.subgraph("each", inner, into=lambda state, item: {"query": item}, out={"found": "seen"})
    outer.map("split", "each", "items")
    outer.start("split")

    assert outer.run_sync(None, {"items": ["a", "b"]}).values["seen"] == ["aa", "bb"]


# Subgraphs --------------------------------------------------------------------------------------------------------


class Inner(TypedDict, total=False):
    query: str
    found: Annotated[list[str], append]
    private: int


def nested(**projection: Any) -> Graph:
    inner = Graph("inner", state=Inner)
    inner.node("find", lambda state: {"found": [f"found {state['query']}"], "private": 1})
    inner.start("find")
    inner.end("find")
    outer = Graph("outer", state=State)
    outer.subgraph("research", inner, **projection)
    outer.start("research")
    outer.end("research")
    return outer


@pytest.mark.parametrize(
    "projection",
    [
        {"into": {"note": "query"}, "out": {"found": "seen"}},
        {"into": lambda state: {"query": state["note"]}, "out": lambda state: {"seen": state["found"]}},
    ],
)
def test_a_subgraph_has_a_state_of_its_own_and_gets_and_gives_what_is_said(projection: Any) -> None:
    result = nested(**projection).run_sync(None, {"note": "why", "seen": ["before"]})

    assert result.values == {"note": "why", "seen": ["before", "found why"]}
    assert result.path == ("research/find", "research")


def test_without_a_word_a_subgraph_shares_the_keys_that_both_have() -> None:
    inner = Walk().chain("x", "y", graph="inner")
    outer = Graph("outer", state=State)
    outer.subgraph("deep", inner)
    outer.start("deep")
    outer.end("deep")

    assert outer.run_sync(None, {"seen": ["before"]}).values["seen"] == ["before", "x", "y"]


def test_a_subgraph_beside_another_branch_gives_back_what_it_added_not_a_copy_of_what_it_got() -> None:
    inner = Walk().chain("x", "y", graph="inner")
    outer = Graph("outer", state=State)
    outer.node("split", lambda state: None)
    outer.subgraph("deep", inner)
    outer.node("beside", lambda state: {"seen": ["beside"], "note": "new"})
    outer.parallel("split", ["deep", "beside"])
    outer.start("split")

    result = outer.run_sync(None, {"seen": ["before"], "note": "old"})

    assert result.values == {"seen": ["before", "x", "y", "beside"], "note": "new"}


def test_a_subgraph_has_a_limit_of_its_own() -> None:
    inner = Walk().chain("x", "y", "z", graph="inner", limit=2)
    outer = Graph("outer", state=State)
    outer.subgraph("deep", inner)
    outer.start("deep")
    outer.end("deep")
    stopped = outer.run_sync(None)

    assert stopped.status is Status.FAILED
    assert "graph 'inner' ran 2 nodes" in str(stopped.error)


@pytest.mark.parametrize("where", ["into", "out"])
def test_a_projection_that_raises_fails_its_node(where: str) -> None:
    graph = nested(**{"into": {"note": "query"}, "out": {"found": "seen"}, where: lambda state: state["missing"]})
    failed = graph.run_sync(None, {"note": "why"})

    assert isinstance(failed.error, NodeFailed)
    assert failed.error.node == f"research ({where})"


# Questions beside each other --------------------------------------------------------------------------------------


def test_what_a_person_changes_before_and_after_a_branch_is_folded_in_beside_what_it_returned() -> None:
    graph = fan(
        lambda state: {"messages": ["l"], "left": f"{state['left']}+l"},
        lambda state: {"messages": ["r"]},
        before=["l"],
        after=["l"],
    )
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, BEFORE)
        graph.resume_sync(thread, Modify({"left": "edited", "messages": ["before l"]}))
        result = graph.resume_sync(thread, Modify({"messages": ["after l"], "total": 5}))

    assert result.status is Status.COMPLETED
    assert result.values["messages"] == ["hello", "before l", "l", "after l", "r"]
    assert (result.values["left"], result.values["total"]) == ("edited+l", 15)


class Slow:
    """A sink that is not done with an interrupt before another branch has finished."""

    def __init__(self, store: Any, saving: asyncio.Event, finished: asyncio.Event) -> None:
        self.store = store
        self.saving = saving
        self.finished = finished

    async def on_checkpoint(self, state: Any, moment: Any) -> None:
        await notify(self.store, state, moment)
        if moment.trigger == "interrupt" and not self.saving.is_set():
            self.saving.set()
            await self.finished.wait()


def test_a_finished_branch_is_kept_while_the_position_of_another_is_being_saved() -> None:
    """What is being saved does not have it yet, and it must not fall between two checkpoints."""
    walk = Walk()
    graph = walk.fan("asks", "quick")
    saving, finished = asyncio.Event(), asyncio.Event()

    async def quick(state: Any) -> dict[str, Any]:
        walk.ran.append("quick")
        await saving.wait()
        return {"seen": ["quick"]}

    def watch(event: Event) -> None:
        if isinstance(event, NodeFinished) and event.node == "quick":
            asyncio.get_running_loop().call_soon(finished.set)

    replace_node(graph, "asks", lambda state, ctx: {"note": ctx.ask("how?")})
    replace_node(graph, "quick", quick)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        waits = graph.run_sync(thread, on_event=watch, sink=lambda kept: Slow(kept, saving, finished))
        assert (waits.status, finished.is_set()) == (Status.INTERRUPTED, True)

        result = graph.resume_sync(thread, Answer("so"))

    assert result.values["seen"] == ["split", "quick", "join"]
    assert walk.ran.count("quick") == 1


def test_a_list_that_a_node_has_kept_does_not_grow_under_its_hands(url: str) -> None:
    """Else a run that goes on in memory would differ from one that was taken up from the store."""
    walk = Walk()
    graph = walk.chain("a", "b", "c")
    replace_node(graph, "b", lambda state: {"items": [state["seen"]], "seen": ["b"]})
    with backstay.open(url) as store:
        result = graph.run_sync(store.thread("t"))

        assert result.values["items"] == [["a"]]
        assert head(store.thread("t")).state == {"seen": ["a", "b", "c"], "items": [["a"]]}
