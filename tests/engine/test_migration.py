"""Migrations: renamed nodes and rewritten states, in every frame, by as many steps as there were deployments."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pytest

import backstay
from backstay.engine.compatibility import Verdict, judge, migrate, require
from backstay.engine.events import Status
from backstay.engine.fingerprint import hex_of
from backstay.engine.graph import Graph
from backstay.engine.migration import add_migration
from backstay.engine.reducers import append
from backstay.errors import GraphMismatch, InvalidInput, MigrationFailed
from backstay.model.checkpoint import Checkpoint, Write
from backstay.model.decision import Approve
from backstay.model.frame import FanOut, Frame, FrameStack, NextNode, Task
from support.engine.changing import (
    TEAM,
    Declare,
    chat,
    deep_team,
    inner,
    made,
    noting,
    outer,
    parked,
    reasons,
    state_with,
)

SAME, COMPATIBLE, NEEDS_MIGRATION, REFUSE = Verdict


@pytest.fixture(scope="module")
def before_search() -> Checkpoint:
    return parked(chat(), before=["search"])


def only(frame: Frame) -> FrameStack:
    return FrameStack((frame,))


def find_chat(name: str = "g", **changed: Any) -> Graph:
    """Return the graph in which "search" is called "find"."""
    steps: dict[str, Declare | None] = {
        "search": None, "search_to": None, "search_else": None, "find": noting("find"),
        "plan_to": lambda graph: graph.edge("plan", "find"),
        "find_to": lambda graph: graph.edge("find", "write"),
    }  # fmt: skip
    return chat(name, **{**steps, **changed})


def test_a_renamed_node_is_renamed_wherever_it_stands(before_search: Checkpoint) -> None:
    graph = find_chat()
    graph.migrate(chat().fingerprint, nodes={"search": "find", "plan": "plan"})
    frame = before_search.frames.frames[0]
    walked = replace(frame, visits={"plan": 2, "search": 1}, path=("plan", "search[2]"), tasks=(Task(node="search"),))
    state, frames, judgement = migrate(graph.build(), replace(before_search, frames=only(walked)))

    after = frames.frames[0]
    assert (after.node_id, after.last_node, after.continuation) == ("find", "plan", NextNode("find"))
    assert (after.visits, after.path, after.tasks) == (
        {"plan": 2, "find": 1},
        ("plan", "find[2]"),
        (Task(node="find"),),
    )
    assert state == after.state == before_search.state
    assert (judgement.overall, judgement.frames[0].migrated) == (COMPATIBLE, True)
    assert f"migrated from 0x{hex_of(chat().fingerprint)}" in reasons(judgement)
    assert "recorded under its old name" in reasons(judgement)  # what it did so far is not found under the new one
    require(judgement, accept_compatible=False)


def test_a_state_is_rewritten_on_a_copy(before_search: Checkpoint) -> None:
    def ask(state: dict[str, Any]) -> dict[str, Any]:
        state["notes"].append("changed in place")
        return {"query": state.pop("question"), **state}

    graph = chat(state=state_with(question=None, query=str))
    graph.migrate(hex_of(chat().fingerprint), state=ask)
    stored = copy.deepcopy(before_search.state)
    state, frames, judgement = migrate(graph.build(), before_search)

    assert state == frames.frames[0].state == {"query": "why", "notes": ["plan", "changed in place"]}
    assert before_search.state == before_search.frames.frames[0].state == stored
    assert judgement.passes()


def test_a_migration_without_anything_accepts_a_run_as_it_is(before_search: Checkpoint) -> None:
    graph = chat(state=state_with(question=bytes))
    assert judge(graph.build(), before_search).overall is NEEDS_MIGRATION
    graph.migrate(f"0x{hex_of(chat().fingerprint)}")
    state, _, judgement = migrate(graph.build(), before_search)

    assert judgement.passes()
    assert state == before_search.state
    assert judge(graph.build(), before_search).overall is NEEDS_MIGRATION  # only looking applies nothing


@pytest.mark.parametrize("nodes", [{}, {"search": "nowhere"}])
def test_a_migration_that_does_not_fit_the_present_graph_does_not_pass(
    nodes: dict[str, str], before_search: Checkpoint
) -> None:
    graph = find_chat(state=state_with(question=None))
    graph.migrate(chat().fingerprint, nodes=nodes)
    _, _, judgement = migrate(graph.build(), before_search)

    assert judgement.overall is NEEDS_MIGRATION
    assert "but that is not enough" in reasons(judgement)
    assert "the stored state has the key 'question'" in reasons(judgement)
    assert f"node {nodes.get('search', 'search')!r} is to run, but it no longer exists" in reasons(judgement)
    with pytest.raises(GraphMismatch):
        require(judgement, accept_compatible=True)


def test_steps_are_followed_one_after_the_other(before_search: Checkpoint) -> None:
    first, second = chat().fingerprint, find_chat().fingerprint
    third = chat(search=None, search_to=None, search_else=None, look=noting("look"),
                 plan_to=lambda graph: graph.edge("plan", "look"), look_to=lambda graph: graph.edge("look", "write"),
                 state=state_with(steps=int))  # fmt: skip
    third.migrate(second, nodes={"find": "look"}, state=lambda state: {**state, "steps": state["score"] + 1})
    assert not migrate(third.build(), before_search)[2].passes(accept_compatible=True)  # no way from the first yet
    third.migrate(first, to=hex_of(second), nodes={"search": "find"}, state=lambda state: {**state, "score": 1})
    state, frames, judgement = migrate(third.build(), before_search)

    assert frames.frames[0].continuation == NextNode("look")
    assert (state["score"], state["steps"]) == (1, 2)
    assert judgement.passes()
    assert f"migrated from 0x{hex_of(first)}, then from 0x{hex_of(second)}" in reasons(judgement)


def test_steps_that_lead_elsewhere_or_in_a_circle_do_nothing(before_search: Checkpoint) -> None:
    elsewhere, circle = find_chat(), find_chat()
    elsewhere.migrate(chat().fingerprint, to=1, nodes={"search": "find"})
    circle.migrate(chat().fingerprint, to=1, nodes={"search": "find"})
    circle.migrate(1, to=chat().fingerprint)

    for graph in (elsewhere, circle):
        _, frames, judgement = migrate(graph.build(), before_search)
        assert judgement.overall is NEEDS_MIGRATION
        assert frames.frames[0].continuation == NextNode("search")


def test_what_another_graph_stored_no_migration_can_take(before_search: Checkpoint) -> None:
    graph = chat("other")
    graph.migrate(chat().fingerprint)

    assert migrate(graph.build(), before_search)[2].overall is REFUSE


def failing(state: dict[str, Any]) -> Any:
    raise ZeroDivisionError(state["question"])


@pytest.mark.parametrize(
    ("function", "nodes", "problem"),
    [
        (failing, {}, "raised ZeroDivisionError"),
        (lambda state: None, {}, "returned NoneType, not a mapping"),
        (lambda state: {1: "x"}, {}, "keys that are not text"),
        (None, {"search": "x" * 300}, "gives no valid position"),
    ],
)
def test_a_migration_that_fails_names_itself_and_changes_nothing(
    function: Any, nodes: dict[str, str], problem: str, before_search: Checkpoint
) -> None:
    graph = chat(state=state_with(extra=int))
    graph.migrate(chat().fingerprint, state=function, nodes=nodes)
    stored = copy.deepcopy(before_search.state)
    with pytest.raises(MigrationFailed, match=problem) as caught:
        migrate(graph.build(), before_search)

    error = caught.value
    assert (error.graph, error.from_hash, error.thread) == ("g", chat().fingerprint, "t")
    assert (error.expected, error.actual) == (graph.fingerprint, chat().fingerprint)
    assert f"0x{hex_of(chat().fingerprint)}" in str(error)
    assert "why" not in str(error)  # no value of the state
    assert isinstance(error.__cause__, ZeroDivisionError) is (function is failing)
    assert error.judgement.overall is NEEDS_MIGRATION
    assert before_search.state == stored


@pytest.mark.parametrize("hash", [-1, 2**64, True, "12", "x" * 16, None, 1.0])
def test_what_is_no_fingerprint_is_refused(hash: Any) -> None:
    with pytest.raises(InvalidInput, match="which is not a fingerprint"):
        add_migration(chat(), hash)


def test_a_migration_that_makes_no_sense_is_refused() -> None:
    graph = chat()
    graph.migrate(1)
    wrong: list[Callable[[], None]] = [
        lambda: graph.migrate(1),
        lambda: graph.migrate(2, to=2),
        lambda: graph.migrate(2, nodes={"a": 1}),  # type: ignore[dict-item]  # that is the mistake
        lambda: graph.migrate(2, nodes="ab"),  # type: ignore[arg-type]  # that too
        lambda: graph.migrate(2, state="f"),  # type: ignore[arg-type]  # and that
    ]
    for each in wrong:
        with pytest.raises(InvalidInput):
            each()
    graph.migrate(2)  # nothing of what was refused is left behind


@dataclass
class Notebook:
    question: str
    notes: Annotated[list[str], append] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["new"])


@dataclass
class OldNotebook:
    question: str
    notes: Annotated[list[str], append] = field(default_factory=list)


def test_new_keys_begin_with_their_defaults() -> None:
    checkpoint = parked(chat(state=OldNotebook), before=["search"])
    state, frames, judgement = migrate(chat(state=Notebook).build(), checkpoint)

    assert judgement.overall is COMPATIBLE
    assert state == frames.frames[0].state == {"question": "why", "notes": ["plan"], "tags": ["new"]}
    assert "tags" not in checkpoint.state
    taken_away = replace(checkpoint, state={"question": "why"})  # by a node: it does not come back
    assert migrate(chat(state=Notebook).build(), taken_away)[0] == {"question": "why", "tags": ["new"]}


def test_of_two_nodes_that_become_one_no_visit_is_forgotten(before_search: Checkpoint) -> None:
    graph = find_chat()
    graph.migrate(chat().fingerprint, nodes={"search": "find", "write": "find"})
    walked = replace(before_search.frames.frames[0], visits={"search": 2, "write": 1})
    _, frames, _ = migrate(graph.build(), replace(before_search, frames=only(walked)))

    assert frames.frames[0].visits == {"find": 3}


# Graphs inside, and side by side ----------------------------------------------------------------------------------


def test_each_graph_migrates_its_own_frames() -> None:
    checkpoint = parked(outer(inner()))
    within = inner("", look=None, look_to=None, peek=noting("peek"), peek_to=lambda graph: graph.edge("peek", "keep"),
                   start=lambda graph: graph.start("peek"))  # fmt: skip
    graph = outer(within)
    within.migrate(inner().fingerprint, nodes={"look": "peek"}, state=lambda state: {**state, "score": 7})
    state, frames, judgement = migrate(graph.build(), checkpoint)

    assert frames.frames[1].continuation == NextNode("peek")
    assert (frames.frames[1].state["score"], "score" in state) == (7, False)
    # Around it nothing differs but the graph inside, and that one's migration answers for it.
    assert [(frame.verdict, frame.migrated) for frame in judgement.frames] == [(COMPATIBLE, True)] * 2
    require(judgement, accept_compatible=False)
    more = outer(within, write_to=lambda graph: graph.edge("write", "plan", when=bool),
                 write_else=lambda graph: graph.end("write"))  # fmt: skip
    assert not migrate(more.build(), checkpoint)[2].passes()  # here something else differs too


def test_a_frame_is_found_in_a_subgraph_node_that_was_renamed() -> None:
    checkpoint = parked(outer(inner()))
    graph = find_chat("outer", find=lambda graph: graph.subgraph("find", inner()))
    assert [frame.verdict for frame in migrate(graph.build(), checkpoint)[2].frames] == [NEEDS_MIGRATION] * 2
    graph.migrate(outer(inner()).fingerprint, nodes={"search": "find"})
    _, frames, judgement = migrate(graph.build(), checkpoint)

    assert [frame.verdict for frame in judgement.frames] == [COMPATIBLE, SAME]
    assert frames.frames[0].tasks[0].node == "find"
    assert judgement.passes()


def test_what_has_finished_side_by_side_moves_with_its_branch() -> None:
    """A finished branch is kept by its position: under another name nobody would find it, and it would run again."""
    checkpoint = parked(deep_team(inner()))
    assert [write.task_id for write in checkpoint.writes] == ["g/left#1[left]"]
    graph = deep_team(inner(), left=None, left_to=None, west=noting("west"), west_to=lambda graph: graph.end("west"),
                      plan_to=lambda graph: graph.parallel("plan", ["west", "ask"], join="join"))  # fmt: skip
    graph.migrate(deep_team(inner()).fingerprint, nodes={"left": "west"})
    _, frames, judgement = migrate(graph.build(), checkpoint)

    outermost = frames.frames[0]
    tasks = {task.key: task for task in outermost.tasks}
    assert judgement.passes(), judgement.render()
    assert outermost.continuation == FanOut(("west", "ask"), "join")
    assert (tasks["west"].node, tasks["west"].done, tasks["west"].update) == ("west", True, {"notes": ["left"]})
    assert tasks["ask"].frames[0].fanout_key == "ask"
    assert [frame.position for frame in judgement.frames] == ["g/plan#1", "g/ask#1[ask]>inner/look#1"]


def test_of_a_map_the_node_is_renamed_and_the_items_are_not() -> None:
    def mapping(node: str) -> Graph:
        steps = {**TEAM, "left": None, "left to": None, "ask": lambda graph: graph.barrier(node),
                 "ask to": lambda graph: graph.end(node),
                 "plan to": lambda graph: graph.map("plan", node, "notes", join="join")}  # fmt: skip
        return made(steps)

    checkpoint = parked(mapping("0"))  # a name that looks like the number of an item
    graph = mapping("each")
    graph.migrate(mapping("0").fingerprint, nodes={"0": "each"})
    begun = replace(checkpoint.frames.frames[0], tasks=(Task(node="0", key="0", passed=True),))
    _, frames, judgement = migrate(graph.build(), replace(checkpoint, frames=only(begun)))

    assert judgement.passes(), judgement.render()
    assert frames.frames[0].tasks == (Task(node="each", key="0", passed=True),)


def test_a_fan_out_that_the_graph_no_longer_has_no_migration_can_keep() -> None:
    checkpoint = parked(made(TEAM))
    graph = made(TEAM, plan_to=lambda graph: graph.parallel("plan", ["ask", "left"], join="join"))
    graph.migrate(made(TEAM).fingerprint)
    judgement = migrate(graph.build(), checkpoint)[2]

    assert judgement.overall is NEEDS_MIGRATION
    assert "the graph no longer has this fan-out; let the old graph finish it" in reasons(judgement)


def test_what_finished_nobody_knows_where_is_not_run_again_in_another_graph(before_search: Checkpoint) -> None:
    strange = Write("g/plan#1[\x1b]", 0, "update", {"update": {}, "given": {}, "path": []})
    checkpoint = replace(before_search, writes=(strange,))
    graph = chat(start=lambda graph: graph.start("search"))

    assert migrate(chat().build(), checkpoint)[2].overall is SAME
    judgement = migrate(graph.build(), checkpoint)[2]
    assert judgement.overall is NEEDS_MIGRATION
    assert "g/plan#1[\\x1b] has finished, but its place is unknown" in judgement.render()


# Going on for real ------------------------------------------------------------------------------------------------


async def watched(graph: Graph, thread: backstay.Thread) -> list[object]:
    return [event async for event in graph.stream_resume(thread, Approve())]


RESUMES: dict[str, Callable[[Graph, backstay.Thread, Checkpoint], object]] = {
    "resume": lambda graph, thread, _: asyncio.run(graph.resume(thread, Approve())),
    "resume_sync": lambda graph, thread, _: graph.resume_sync(thread, Approve()),
    "resume, accepting": lambda graph, thread, _: graph.resume_sync(thread, Approve(), compatible=True),
    "stream": lambda graph, thread, _: asyncio.run(watched(graph, thread)),
    "replay": lambda graph, thread, checkpoint: graph.replay_sync(thread, checkpoint, branch="again"),
}


@pytest.mark.parametrize("way", RESUMES)
def test_there_is_no_way_to_go_on_in_a_graph_that_does_not_fit(way: str) -> None:
    graph = find_chat()
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        assert chat().run_sync(thread, {"question": "why"}, before=["search"]).status is Status.INTERRUPTED
        stored = thread.latest()
        assert stored is not None
        with pytest.raises(GraphMismatch, match="node 'search' is to run, but it no longer exists"):
            RESUMES[way](graph, thread, stored)

        assert store.thread("t").latest() == stored  # nothing ran, and the question waits as before
        assert [record.pending for record in store.interrupts()] == [True]
        assert chat().resume_sync(store.thread("t"), Approve()).values["notes"] == ["plan", "search", "write"]


def test_after_a_migration_nothing_runs_twice_and_nothing_is_left_out() -> None:
    west: dict[str, Any] = {
        "left": None, "left_to": None, "west": noting("west"), "west_to": lambda graph: graph.end("west"),
        "plan_to": lambda graph: graph.parallel("plan", ["west", "ask"], join="join"),
    }  # fmt: skip
    within = inner("", look=None, look_to=None, peek=noting("peek"), peek_to=lambda graph: graph.edge("peek", "keep"),
                   start=lambda graph: graph.start("peek"))  # fmt: skip
    within.migrate(inner().fingerprint, nodes={"look": "peek"})
    graph = deep_team(within, **west)
    graph.migrate(deep_team(inner()).fingerprint, nodes={"left": "west"})
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        assert deep_team(inner()).run_sync(thread, {"question": "why"}).status is Status.INTERRUPTED
        result = graph.resume_sync(thread, Approve()).raise_for_status()

    # "left" had finished under its old name; "look" had not begun, and is "peek" now.
    assert result.values["notes"] == ["plan", "left", "peek", "keep", "join"]


def test_a_migrated_state_is_stored_under_its_new_names(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        chat().run_sync(thread, {"question": "why"}, before=["search", "write"])
        graph = chat(state=state_with(question=None, query=str))
        graph.migrate(chat().fingerprint, state=lambda state: {"query": state.pop("question"), **state})

        graph.resume_sync(thread, Approve())

        stored = store.thread("t").latest()
        assert stored is not None
        assert stored.state == {"query": "why", "notes": ["plan", "search"]}
        assert judge(graph.build(), stored).overall is SAME
