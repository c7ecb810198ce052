"""A stored run and a changed graph: verdicts with reasons, frame by frame. Positions come from real runs."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pytest

from backstay.engine.compatibility import Verdict, judge, migrate, require
from backstay.engine.fingerprint import hex_of
from backstay.engine.graph import Graph
from backstay.engine.nodes import END
from backstay.engine.reducers import append, merge
from backstay.engine.state import transient
from backstay.errors import GraphMismatch
from backstay.model.checkpoint import Checkpoint
from backstay.model.frame import FanOut, Frame, FrameStack, NextNode, Task
from support.engine.changing import (
    CHAT,
    TEAM,
    chat,
    deep_team,
    inner,
    is_good,
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


@pytest.fixture(scope="module")
def after_plan() -> Checkpoint:
    return parked(chat(), after=["plan"])


@pytest.fixture(scope="module")
def side_by_side() -> Checkpoint:
    return parked(made(TEAM))


# One frame --------------------------------------------------------------------------------------------------------


def test_the_same_graph_may_go_on_wherever_it_stands(
    before_search: Checkpoint, after_plan: Checkpoint, side_by_side: Checkpoint
) -> None:
    for checkpoint, graph in ((before_search, chat()), (after_plan, chat()), (side_by_side, made(TEAM))):
        judgement = judge(graph.build(), checkpoint)

        assert [frame.verdict for frame in judgement.frames] == [SAME]
        assert judgement.frames[0].stored_hash == judgement.frames[0].present_hash == checkpoint.graph_hash
        require(judgement, accept_compatible=False)


@dataclass
class Strict:
    question: str
    owner: str
    notes: Annotated[list[str], append] = field(default_factory=list)
    score: int = 0


ELSEWHERE: dict[str, tuple[Graph, str]] = {
    "a node more": (chat(more=noting("more"), more_to=lambda graph: graph.end("more"),
                         write_to=lambda graph: graph.edge("write", "more")), "nodes added: 'more'"),
    "a node less": (chat(write=None, write_to=None, search_to=lambda graph: graph.edge("search", END, when=is_good)),
                    "nodes removed: 'write'"),
    "another kind of node": (chat(write=lambda graph: graph.barrier("write")), "nodes changed: 'write'"),
    "edges that it has passed": (chat(plan_to=lambda graph: graph.edge("plan", "search", when=is_good),
                                      plan_else=lambda graph: graph.end("plan")), "edges changed after: 'plan'"),
    "the edges after the node to run": (
        chat(search_to=lambda graph: graph.edge("search", "write", when=is_good, name="better")),
        "the edges after 'search', which is to run, changed"),
    "the start": (chat(start=lambda graph: graph.start("search")), "a run now starts at 'search', not at 'plan'"),
    "a state key more": (chat(state=state_with(extra=int)), "state keys added: 'extra'"),
    "a state key less that is not stored": (chat(state=state_with(score=None)), "state keys removed: 'score'"),
}  # fmt: skip


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_change_elsewhere_is_compatible_and_says_what_it_is(what: str, before_search: Checkpoint) -> None:
    graph, reason = ELSEWHERE[what]
    judgement = judge(graph.build(), before_search)

    assert judgement.overall is COMPATIBLE
    assert reason in reasons(judgement)
    require(judgement, accept_compatible=True)
    with pytest.raises(GraphMismatch, match=r"resume\(…, compatible=True\)"):
        require(judgement, accept_compatible=False)


HERE: dict[str, tuple[Graph, str]] = {
    "the node to run is gone": (
        chat(search=None, search_to=None, search_else=None, plan_to=lambda graph: graph.edge("plan", "write")),
        "node 'search' is to run, but it no longer exists"),
    "the node to run is a barrier": (chat(search=lambda graph: graph.barrier("search")),
                                     "node 'search' is to run; it was a task and is now a barrier"),
    "the node to run is a subgraph": (chat(search=lambda graph: graph.subgraph("search", chat("inner"))),
                                      "node 'search' is to run; it was a task and is now a subgraph"),
    "a stored key is gone": (chat(state=state_with(question=None)), "the stored state has the key 'question'"),
    "a key's type": (chat(state=state_with(question=bytes)), "'question' was declared str and is now bytes"),
    "a key's reducer": (chat(state=state_with(notes=Annotated[list[str], merge])),
                        "'notes' was 'append' and is now 'merge'"),
    "a stored key is not to be stored": (chat(state=state_with(question=Annotated[str, transient])),
                                         "'question' is stored, but would no longer be"),
    "a key is needed and not stored": (chat(state=Strict), "the state needs the key 'owner', which is not stored"),
    "a reducer is gone from an open state": (chat(state=dict), "'notes' was 'append' and is now 'replace'"),
}  # fmt: skip


@pytest.mark.parametrize("what", HERE)
def test_a_change_where_the_run_stands_needs_a_migration(what: str, before_search: Checkpoint) -> None:
    graph, reason = HERE[what]
    judgement = judge(graph.build(), before_search)

    assert judgement.overall is NEEDS_MIGRATION
    assert reason in reasons(judgement)
    for accepts in (False, True):
        with pytest.raises(GraphMismatch, match=rf"g\.migrate\(0x{hex_of(chat().fingerprint)}, …\)"):
            require(judgement, accept_compatible=accepts)


def test_a_finished_node_that_is_not_routed_yet_is_needed_too(after_plan: Checkpoint) -> None:
    assert after_plan.frames.frames[0].continuation is None
    rerouted = judge(
        chat(
            plan_to=lambda graph: graph.edge("plan", "search", when=is_good),
            plan_else=lambda graph: graph.edge("plan", "write", fallback=True),
        ).build(),
        after_plan,
    )
    gone = judge(chat(plan=None, plan_to=None, search_else=lambda graph: graph.end("search"),
                      start=lambda graph: graph.start("search")).build(), after_plan)  # fmt: skip

    assert rerouted.overall is COMPATIBLE
    assert "the edges after 'plan', which has finished but is not routed yet, changed" in reasons(rerouted)
    assert gone.overall is NEEDS_MIGRATION
    assert "node 'plan' is to run, but it no longer exists" in reasons(gone)


REFUSED: dict[str, tuple[Checkpoint, str]] = {
    "another graph's": (Checkpoint(id="c", thread_id="t", graph="other", graph_hash=7, next_node="search"),
                        "it belongs to graph 'other', not to 'g'"),
    "no graph's": (Checkpoint(id="c", thread_id="t", state={}, next_node="search"), "was not saved by a graph"),
    "nowhere": (Checkpoint(id="c", thread_id="t", graph="g", graph_hash=chat().fingerprint),
                "the checkpoint has no position"),
    "not to be found": (Checkpoint(id="c", thread_id="t", graph="g", graph_hash=7, next_node="search"),
                        "another graph cannot find the position"),
    "at a node that never was": (
        Checkpoint(id="c", thread_id="t", graph="g", graph_hash=chat().fingerprint, next_node="nowhere"),
        "the record names node 'nowhere'"),
    "at a branch that never was": (
        Checkpoint(id="c", thread_id="t", graph="g", graph_hash=chat().fingerprint,
                   continuation=FanOut(("search", "nowhere"), "write")), "the record names node 'nowhere'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_this_graphs_position_is_refused(what: str) -> None:
    checkpoint, reason = REFUSED[what]
    judgement = judge(chat().build(), checkpoint)

    assert judgement.overall is REFUSE
    assert reason in reasons(judgement)
    with pytest.raises(GraphMismatch, match="Resume it with the graph that stored it"):
        require(judgement, accept_compatible=True)


def test_a_record_whose_two_fingerprints_disagree_is_refused(before_search: Checkpoint) -> None:
    for hash in (chat().fingerprint ^ 1, 0):
        judgement = judge(chat().build(), replace(before_search, graph_hash=hash))

        assert judgement.overall is REFUSE
        assert "the record contradicts itself" in reasons(judgement)


def test_a_checkpoint_of_another_program_needs_consent_and_nodes_that_exist() -> None:
    foreign = Checkpoint(id="c", thread_id="t", graph="g", next_node="search", path=("plan", "search", "plan"))
    judgement = judge(chat().build(), foreign)

    assert judgement.overall is COMPATIBLE
    assert "it has no fingerprint, so another program saved it" in reasons(judgement)
    with pytest.raises(GraphMismatch, match="compatible=True"):
        require(judgement, accept_compatible=False)
    require(judgement, accept_compatible=True)
    (frame,) = migrate(chat().build(), foreign)[1].frames
    assert (frame.visits, frame.visit, frame.steps, frame.cursor) == ({"plan": 2, "search": 1}, 2, 3, 3)
    assert judge(chat().build(), replace(foreign, next_node="nowhere")).overall is NEEDS_MIGRATION


def test_a_checkpoint_saved_by_hand_is_judged_by_what_it_says(before_search: Checkpoint) -> None:
    saved = Checkpoint(id="c", thread_id="t", graph="g", graph_hash=chat().fingerprint, next_node="search")
    framed = FrameStack((Frame(graph_id="g", node_id="search", continuation=NextNode("search")),))
    changed = chat(start=lambda graph: graph.start("search"))

    assert judge(chat().build(), saved).overall is SAME
    assert migrate(chat().build(), saved)[1].frames[0].continuation == NextNode("search")
    assert judge(changed.build(), replace(saved, run=before_search.run)).overall is COMPATIBLE
    unknown = judge(changed.build(), replace(saved, frames=framed))
    assert unknown.overall is NEEDS_MIGRATION  # where it stands is known, but not what has changed since
    assert "the shape of its graph is not stored" in reasons(unknown)
    assert judge(chat().build(), replace(saved, frames=framed, graph_hash=None)).overall is NEEDS_MIGRATION


# Several frames ---------------------------------------------------------------------------------------------------


def two_deep(within: Graph) -> Graph:
    middle = made({**CHAT, "search": lambda graph: graph.subgraph("search", within)}, "middle")
    return chat("outer", plan=lambda graph: graph.subgraph("plan", middle))


@pytest.fixture(scope="module")
def nested() -> Checkpoint:
    return parked(outer(inner()))


def test_each_frame_has_its_own_verdict_from_the_outermost_on(nested: Checkpoint) -> None:
    assert len(nested.frames) == 2
    outside = judge(outer(inner(), write_to=lambda graph: graph.edge("write", END)).build(), nested)
    inside = judge(outer(inner(keep=lambda graph: graph.barrier("keep"))).build(), nested)
    gone = judge(outer(inner("", look=None, look_to=None, start=lambda graph: graph.start("keep"))).build(), nested)

    assert [frame.verdict for frame in outside.frames] == [COMPATIBLE, SAME]
    assert [frame.verdict for frame in inside.frames] == [COMPATIBLE, COMPATIBLE]
    assert "the graph inside it changed" in inside.frames[0].reasons[0]
    assert [frame.verdict for frame in gone.frames] == [COMPATIBLE, NEEDS_MIGRATION]
    assert gone.overall is NEEDS_MIGRATION
    assert [frame.position for frame in gone.frames] == ["outer/search#1", "outer/search#1>inner/look#1"]
    assert gone.frames[1].stored_hash == inner().fingerprint
    with pytest.raises(GraphMismatch, match=rf"inner\.migrate\(0x{hex_of(inner().fingerprint)}, …\)"):
        require(gone, accept_compatible=True)


def test_in_the_same_graph_the_graphs_inside_are_the_same_even_if_no_shape_is_stored(nested: Checkpoint) -> None:
    judgement = judge(outer(inner()).build(), replace(nested, run={}))

    assert [frame.verdict for frame in judgement.frames] == [SAME, SAME]


def test_three_frames_are_found_through_the_nodes_they_stand_in() -> None:
    checkpoint = parked(two_deep(inner()))
    assert len(checkpoint.frames) == 3
    judgement = judge(two_deep(inner(keep=lambda graph: graph.barrier("keep"))).build(), checkpoint)

    assert [frame.verdict for frame in judge(two_deep(inner()).build(), checkpoint).frames] == [SAME] * 3
    assert [frame.verdict for frame in judgement.frames] == [COMPATIBLE] * 3
    assert judgement.frames[2].position == "outer/plan#1>middle/search#1>inner/look#1"


def test_a_frame_whose_subgraph_is_gone_or_another_graph_cannot_go_on(nested: Checkpoint) -> None:
    plain = judge(chat("outer").build(), nested)
    other = judge(outer(chat("someone-elses")).build(), nested)

    assert [frame.verdict for frame in plain.frames] == [NEEDS_MIGRATION, NEEDS_MIGRATION]
    assert "it was a subgraph and is now a task" in plain.frames[0].reasons[0]
    assert plain.frames[1].present_hash is None
    assert [frame.verdict for frame in other.frames] == [COMPATIBLE, REFUSE]
    assert "but 'someone-elses' is in its place" in other.frames[1].reasons[0]


SIDE: dict[str, tuple[Graph, str]] = {
    "a branch more": (made(TEAM, more=noting("more"), more_to=lambda graph: graph.end("more"),
                           plan_to=lambda graph: graph.parallel("plan", ["left", "ask", "more"], join="join")),
                      "the graph no longer has this fan-out"),
    "a branch less": (made(TEAM, left=None, left_to=None,
                           plan_to=lambda graph: graph.parallel("plan", ["ask"], join="join")),
                      "node 'left' is to run, but it no longer exists"),
    "another join": (made(TEAM, after=noting("after"), after_to=lambda graph: graph.edge("after", "join"),
                          plan_to=lambda graph: graph.parallel("plan", ["left", "ask"], join="after")),
                     "the graph no longer has this fan-out"),
    "a join that is gone": (made(TEAM, join=None, join_to=None,
                                 plan_to=lambda graph: graph.parallel("plan", ["left", "ask"])),
                            "node 'join' is to run, but it no longer exists"),
    "a key that a finished branch wrote": (
        made(TEAM, state=state_with(notes=None), plan=lambda graph: graph.node("plan", lambda state: None)),
        "the parallel node 'left' has finished and wrote the key 'notes'"),
}  # fmt: skip


@pytest.mark.parametrize("what", SIDE)
def test_a_fan_out_under_way_must_be_as_it_was(what: str, side_by_side: Checkpoint) -> None:
    graph, reason = SIDE[what]
    assert [write.task_id for write in side_by_side.writes] == ["g/left#1[left]"]  # one branch has finished
    judgement = judge(graph.build(), side_by_side)

    assert judgement.overall is NEEDS_MIGRATION
    assert reason in reasons(judgement)


def test_a_branch_that_was_sent_elsewhere_needs_the_node_it_was_sent_to(side_by_side: Checkpoint) -> None:
    sent = replace(side_by_side.frames.frames[0], tasks=(Task(node="more", key="ask"),))
    checkpoint = replace(side_by_side, frames=FrameStack((sent,)))
    judgement = judge(made(TEAM, start=lambda graph: graph.start("plan"), join=noting("join"),
                           join_to=lambda graph: graph.edge("join", END)).build(), checkpoint)  # fmt: skip

    assert judgement.overall is NEEDS_MIGRATION
    assert "node 'more' is to run, but it no longer exists" in reasons(judgement)


def mapping(over: Any = "notes", **changed: Any) -> Graph:
    steps = {
        **TEAM,
        "left": None,
        "left to": None,
        "plan to": lambda graph: graph.map("plan", "ask", over, join="join"),
    }
    return made(steps, **changed)


def test_what_is_mapped_over_must_be_as_it_was() -> None:
    checkpoint = parked(mapping())
    assert judge(mapping().build(), checkpoint).overall is SAME
    other_list = judge(mapping("question").build(), checkpoint)
    no_map = judge(mapping(plan_to=lambda graph: graph.parallel("plan", ["ask"], join="join")).build(), checkpoint)

    assert (other_list.overall, no_map.overall) == (NEEDS_MIGRATION, NEEDS_MIGRATION)
    assert "the list that 'ask' is mapped over changed" in reasons(other_list)
    assert "was 'for each' and is now 'together'" in reasons(no_map)


def test_frames_inside_the_tasks_of_a_fan_out_are_judged_too() -> None:
    checkpoint = parked(deep_team(inner()))
    assert len(checkpoint.frames) == 1
    judgement = judge(deep_team(inner(look=lambda graph: graph.barrier("look"))).build(), checkpoint)

    assert [frame.verdict for frame in judge(deep_team(inner()).build(), checkpoint).frames] == [SAME, SAME]
    assert [frame.verdict for frame in judgement.frames] == [COMPATIBLE, NEEDS_MIGRATION]
    assert judgement.frames[1].position == "g/ask#1[ask]>inner/look#1"


# The error --------------------------------------------------------------------------------------------------------


def test_the_error_says_everything_and_travels(before_search: Checkpoint) -> None:
    judgement = judge(chat(state=state_with(question=None)).build(), before_search)
    with pytest.raises(GraphMismatch) as caught:
        require(judgement, accept_compatible=True)
    error = pickle.loads(pickle.dumps(caught.value))

    stored, present = before_search.graph_hash, chat(state=state_with(question=None)).fingerprint
    assert (error.expected, error.actual, error.thread) == (present, stored, "t")
    assert error.judgement == judgement
    assert f"expected hash 0x{present:016x}, got 0x{stored:016x}" in str(error)
    for part in ("g/search#1: needs migration", "the stored state has the key 'question'", "deploy the old graph"):
        assert part in str(error)


def test_names_from_a_store_cannot_play_tricks_on_a_terminal(before_search: Checkpoint) -> None:
    hostile = replace(before_search, thread_id="t\x1b[2J", graph="g\x1b]0;\u202e")

    assert judge(chat().build(), hostile).render().replace("\n", "").isprintable()


def test_verdicts_are_ordered_by_severity() -> None:
    assert [verdict.severity for verdict in (SAME, COMPATIBLE, NEEDS_MIGRATION, REFUSE)] == [0, 1, 2, 3]
