"""What a node must not do to the state: the run fails with a clear error, and nothing of it is committed or stored."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.events import NodeAttemptFailed, NodeFinished
from backstay.engine.reducers import append, merge
from backstay.engine.triggers import every
from backstay.errors import BadUpdate
from backstay.model.decision import Answer
from backstay.retry import RetryPolicy
from support.engine.event_log import EventLog
from support.engine.walk import Walk, head, replace_node


def refuses(old: Any, new: Any) -> Any:
    if new == "refused":
        raise ValueError("the reducer's own words")
    return new


class Strict(TypedDict, total=False):
    items: Annotated[list[Any], append]
    facts: Annotated[dict[str, Any], merge]
    guarded: Annotated[str, refuses]
    note: str
    last: deque[str]


def before() -> dict[str, Any]:
    return {"items": [{"deep": 1}], "facts": {"a": {"deep": 1}}, "note": "old", "last": deque(["x"])}


def graph_of(node: Any, state: Any = Strict, **options: Any) -> Graph:
    graph = Graph("g", state=state, **options)
    graph.node("first", lambda state: {"items": ["first"]})
    graph.node("bad", node)
    graph.edge("first", "bad")
    graph.start("first")
    graph.end("bad")
    return graph


def bad(result: Any) -> BadUpdate:
    assert result.status is Status.FAILED
    assert isinstance(result.error, BadUpdate)
    return result.error


# Returning --------------------------------------------------------------------------------------------------------

UPDATES: list[tuple[Any, str | None, str]] = [
    ({"note": "new", "unknown": 1}, "unknown", "is not a key of the graph's state"),
    ({"note": "new", 5: 1}, "5", "is not a key of the graph's state"),
    ({"note": "new", "items": "text"}, "items", "must be a list of items to append, not str"),
    ({"note": "new", "facts": [1]}, "facts", "must be a mapping to merge, not list"),
    ({"note": "new", "guarded": "refused"}, "guarded", "custom refuses raised ValueError"),
    (["note"], None, "returned list, not a mapping"),
    ("note", None, "returned str, not a mapping"),
]


@pytest.mark.parametrize(("update", "key", "why"), UPDATES)
@pytest.mark.parametrize("often", [True, False])
def test_an_update_that_the_state_cannot_take_is_committed_in_no_part(
    update: Any, key: str | None, why: str, often: bool
) -> None:
    graph = graph_of(lambda state: update)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = graph.run_sync(thread, before(), trigger=every(n=1 if often else 100))
        error = bad(result)

        assert (error.node, error.key) == ("bad", key)
        assert why in str(error)
        committed = {**before(), "items": [{"deep": 1}, "first"]}
        assert result.values == committed
        assert head(thread).state == committed
        assert (head(thread).last_node, head(thread).next_node) == ("first", "bad")
        replace_node(graph, "bad", lambda state: {"note": "mended"})
        assert graph.resume_sync(thread).values["note"] == "mended"


def test_a_bad_update_of_one_branch_commits_nothing_of_the_others_and_is_mended_alone() -> None:
    walk = Walk()
    graph = walk.fan("good", "bad")
    replace_node(graph, "bad", walk.node("bad", lambda state, ctx: {"unknown": 1}))
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = graph.run_sync(thread)
        assert bad(result).node == "bad"
        assert result.values["seen"] == ["split"]
        replace_node(graph, "bad", walk.node("bad"))

        assert graph.resume_sync(thread).values["seen"] == ["split", "good", "bad", "join"]
        assert sorted(walk.ran) == ["bad", "bad", "good", "join", "split"]


# Changing in place ------------------------------------------------------------------------------------------------


def grow_list(state: Any) -> None:
    state["items"].append("smuggled")


def grow_list_and_return(state: Any) -> dict[str, Any]:
    state["items"].append("smuggled")
    return {"note": "new"}


def shrink_list(state: Any) -> None:
    state["items"].clear()


def change_dict(state: Any) -> None:
    state["facts"]["smuggled"] = 1


def change_deque(state: Any) -> None:
    state["last"].append("smuggled")


def replace_key(state: Any) -> None:
    state["note"] = "smuggled"


def add_key(state: Any) -> None:
    state["smuggled"] = 1


def drop_key(state: Any) -> None:
    del state["note"]


IN_PLACE: list[tuple[Callable[[Any], Any], str]] = [
    (grow_list, "items"),
    (grow_list_and_return, "items"),
    (shrink_list, "items"),
    (change_dict, "facts"),
    (change_deque, "last"),
    (replace_key, "note"),
    (add_key, "smuggled"),
    (drop_key, "note"),
]


@pytest.mark.parametrize(("node", "key"), IN_PLACE, ids=lambda each: getattr(each, "__name__", None))
@pytest.mark.parametrize("often", [True, False])
def test_a_node_that_changes_its_input_is_found_and_nothing_of_it_is_stored(
    node: Callable[[Any], Any], key: str, often: bool
) -> None:
    """Also if the trigger left the commit before it to be stored only now, when the run fails."""
    graph = graph_of(node)
    log = EventLog()
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        error = bad(graph.run_sync(thread, before(), trigger=every(n=1 if often else 100), on_event=log))

        assert (error.node, error.key) == ("bad", key)
        assert "changed in place" in str(error)
        assert [each.node for each in log.of(NodeAttemptFailed)] == ["bad"]
        stored = head(thread).state
        assert stored in (before(), {**before(), "items": [{"deep": 1}, "first"]})
        replace_node(graph, "bad", lambda state: {"note": "mended"})
        result = graph.resume_sync(thread)
        assert result.values == {**before(), "items": [{"deep": 1}, "first"], "note": "mended"}


@dataclasses.dataclass
class Record:
    items: Annotated[list[Any], append]
    note: str = ""


def test_an_attribute_that_is_assigned_is_found_too() -> None:
    def assigns(state: Record) -> None:
        state.note = "smuggled"

    error = bad(graph_of(assigns, Record).run_sync(None, {"items": []}))

    assert error.key == "note"


def test_what_a_failed_attempt_added_in_place_is_gone_in_the_next() -> None:
    seen: list[int] = []

    def flaky(state: Any) -> dict[str, Any]:
        seen.append(len(state["items"]))
        if len(seen) < 3:
            state["items"].append("smuggled")
            raise ConnectionError
        return {"note": "done"}

    graph = graph_of(lambda state: None)
    replace_node(graph, "bad", flaky, retry=RetryPolicy(2, first_s=0))
    result = graph.run_sync(None, before())

    assert (result.status, seen) == (Status.COMPLETED, [2, 2, 2])
    assert result.values["items"] == [{"deep": 1}, "first"]


def test_what_a_failed_attempt_did_and_nobody_can_undo_ends_the_run() -> None:
    calls: list[int] = []

    def flaky(state: Any) -> None:
        calls.append(1)
        state["facts"]["smuggled"] = 1
        raise ConnectionError

    graph = graph_of(lambda state: None)
    replace_node(graph, "bad", flaky, retry=RetryPolicy(2, first_s=0))

    assert bad(graph.run_sync(None, before())).key == "facts"
    assert len(calls) == 1


def test_what_a_node_added_in_place_before_it_asked_is_gone_when_it_runs_again() -> None:
    seen: list[int] = []

    def asks(state: Any, ctx: Any) -> dict[str, Any]:
        seen.append(len(state["items"]))
        if len(seen) == 1:
            state["items"].append("smuggled")
        return {"note": ctx.ask("how?")}

    graph = graph_of(asks)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, before())
        assert head(thread).state["items"] == [{"deep": 1}, "first"]

        assert graph.resume_sync(thread, Answer("so")).values["items"] == [{"deep": 1}, "first"]
        assert set(seen) == {2}  # each time as if it had not run before


def deep_in_list(state: Any) -> None:
    state["items"][0]["deep"] = "smuggled"


def deep_in_dict(state: Any) -> None:
    state["facts"]["a"]["deep"] = "smuggled"


@pytest.mark.parametrize("node", [deep_in_list, deep_in_dict])
@pytest.mark.parametrize("often", [True, False])
def test_strict_also_finds_what_was_changed_deep_inside(node: Callable[[Any], Any], often: bool) -> None:
    graph = graph_of(node, strict=True)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        error = bad(graph.run_sync(thread, before(), trigger=every(n=1 if often else 100)))

        assert (error.node, error.key) == ("bad", "(a nested value)")
        assert head(thread).state in (before(), {**before(), "items": [{"deep": 1}, "first"]})


def test_strict_lets_nodes_that_behave_alone() -> None:
    log = EventLog()
    result = graph_of(lambda state: {"facts": {"b": 1}}, strict=True).run_sync(None, before(), on_event=log)

    assert result.status is Status.COMPLETED
    assert len(log.of(NodeFinished)) == 2


def test_what_the_caller_handed_in_is_not_changed_by_the_run() -> None:
    given = {"items": [1], "facts": {"a": 1}}
    graph_of(lambda state: {"items": [2], "facts": {"b": 2}}).run_sync(None, given).raise_for_status()
    bad(graph_of(change_dict).run_sync(None, given))

    assert given == {"items": [1], "facts": {"a": 1}}
