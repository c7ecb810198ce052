"""Declaring a graph: every mistake is found when it is built, all at once, each with the name of its node."""

from __future__ import annotations

import copy
import dataclasses
import socket
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path, PurePath
from typing import Annotated, Any, NewType, TypedDict
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, Field

import backstay
from backstay import Approve, Graph
from backstay.compat.graph import TriggerPolicy
from backstay.engine import END, Status, transient, triggers
from backstay.engine.reducers import DELETE, add, append, merge
from backstay.errors import InvalidGraph, InvalidInput, NodeFailed
from backstay.retry import RetryPolicy
from support.engine.walk import State, Walk, head


def nothing(state: Any) -> None:
    return None


async def later(state: Any) -> bool:
    return True


def problems(graph: Graph) -> list[str]:
    with pytest.raises(InvalidGraph) as caught:
        graph.build()
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("node", "gets"),
    [
        (lambda state, ctx: {"note": ctx.node}, "a"),
        (lambda state, ctx=None: {"note": ctx.node}, "a"),
        (lambda state, word="own": {"note": word}, "own"),  # how a loop binds a variable to a function
        (lambda state, *, ctx=None: {"note": str(ctx)}, "None"),
    ],
)
def test_a_second_parameter_gets_the_context_unless_it_has_a_value_of_its_own(node: Any, gets: str) -> None:
    graph = Graph("g", state=State)
    graph.node("a", node)
    graph.start("a")
    graph.end("a")
    assert graph.run_sync(None, {}).values["note"] == gets


# Mistakes ---------------------------------------------------------------------------------------------------------


def test_a_map_over_an_unknown_key_and_two_keys_for_one_are_refused() -> None:
    inner = Graph("inner", state=State)
    inner.node("x", nothing)
    inner.start("x")
    inner.end("x")
    graph = Graph("g", state=State)
    graph.node("a", nothing)
    graph.subgraph("sub", inner, into={"note": "note"}, out={"note": "other", "other": "other"})
    graph.map("a", "sub", over="unheard")
    graph.start("a")
    assert problems(graph) == [
        "node 'a': map over 'unheard', which is not a key of the state",
        "subgraph node 'sub': out writes 'other' twice: map one key to it, or use a function",
    ]


def test_every_mistake_is_named_at_once_with_its_node() -> None:
    graph = Graph("g", state=State, before=["nobody"], after=["nowhere"], reducers={"unheard": append})
    graph.node("a", nothing)
    graph.node("a", nothing)
    graph.node("lost", nothing)
    graph.node("greedy", lambda state, ctx, more: None)
    graph.barrier("gate", on_reject="exile")
    graph.edge("a", "unknown")
    graph.edge("ghost", "a")
    graph.parallel("gate", ["a", "a", "gate", END], join="a")
    graph.parallel("greedy", [])
    graph.choose("lost", nothing, {})

    found = "\n".join(problems(graph))

    for expected in (
        "no entry",
        "node 'a' is declared 2 times",
        "node 'a': edge to 'unknown'",
        "edge from 'ghost'",
        "node 'gate': branch 'a' is named 2 times",
        "node 'gate': a branch cannot be the end",
        "node 'gate': 'a' is both a branch and the join",
        "node 'greedy': a join without branches",
        "node 'greedy' takes more than the state and the context",
        "node 'lost': a choice without targets",
        "barrier 'gate': on_reject names 'exile'",
        "pause at 'nobody'",
        "pause at 'nowhere'",
        "reducer for 'unheard'",
    ):
        assert expected in found


def declared(*declare: Callable[[Graph], object]) -> Graph:
    graph = Graph("g", state=State)
    for name in "abc":
        graph.node(name, nothing)
    for step in declare:
        step(graph)
    return graph


def joined(graph: Graph) -> None:
    graph.start("a")
    graph.edge("a", "b")
    graph.edge("b", "c")
    graph.end("c")


@pytest.mark.parametrize(
    ("declare", "problem"),
    [
        (lambda graph: graph.start("z"), "entry 'z': there is no such node"),
        (lambda graph: (graph.start("a"), graph.start("b")), "several entries: a, b"),
        (lambda graph: graph.edge("a", "c"), "node 'a' has 2 edges without a condition"),
        (lambda graph: graph.edge("a", "c", fallback=True), "node 'a' has a fallback that is never taken"),
        (lambda graph: (graph.end("c"), graph.end("c")), "node 'c' has several fallbacks"),
        (lambda graph: graph.edge("a", "c", when=later), "node 'a': a condition is asynchronous"),
        (
            lambda graph: (graph.edge("a", "c", when=nothing), graph.edge("a", END, when=nothing)),
            "node 'a' has 2 conditions called 'nothing'",
        ),
        (lambda graph: graph.node("dead", nothing), "node 'dead' leads nowhere"),
        (lambda graph: (graph.node("far", nothing), graph.end("far")), "node 'far' cannot be reached from 'a'"),
    ],
)
def test_a_mistake_is_found(declare: Callable[[Graph], object], problem: str) -> None:
    assert problem in "\n".join(problems(declared(joined, declare)))


def test_a_graph_that_never_ends_is_a_mistake() -> None:
    graph = declared(lambda graph: graph.start("a"))
    for source, target in ("ab", "bc", "ca"):
        graph.edge(source, target)

    assert problems(graph) == ["no exit: no reachable node leads to the end"]


def test_mistakes_inside_a_subgraph_are_mistakes_of_the_graph_around_it() -> None:
    inner = Graph("inner", state=State)
    inner.node("x", nothing)
    inner.start("x")
    outer = Graph("outer", state=State)
    outer.subgraph("deep", inner, into={"nothing": "seen"}, out={"seen": "nothing"})
    outer.start("deep")
    outer.end("deep")

    assert problems(outer) == [
        "subgraph node 'deep': into reads 'nothing', which is not a key of that state",
        "subgraph node 'deep': out writes 'nothing', which is not a key of that state",
        "in subgraph node 'deep': node 'x' leads nowhere: add an edge, or name it in end(…)",
    ]


def test_a_graph_that_contains_itself_is_a_mistake() -> None:
    graph = Graph("g", state=State)
    between = Graph("between", state=State)
    graph.subgraph("in", between)
    between.subgraph("out", graph)
    for each, node in ((graph, "in"), (between, "out")):
        each.start(node)
        each.end(node)

    assert problems(graph) == [
        "in subgraph node 'in': subgraph node 'out' leads back into graph 'g': it would never end"
    ]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a#1", "a[0]", "a>b", "a:b", "*", "x" * 201, "a\n", 5, None, "a,b"])
def test_a_name_that_could_be_mistaken_for_part_of_a_position_is_refused_at_once(name: Any) -> None:
    with pytest.raises(backstay.InvalidInput):
        Graph("g").barrier(name)
    with pytest.raises(backstay.InvalidInput):
        Graph(name)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Graph("g", limit=0),
        lambda: Graph("g", limit=True),
        lambda: Graph("g").node("a", nothing, timeout=0),
        lambda: Graph("g").node("a", nothing, timeout=float("nan")),
        lambda: Graph("g").node("a", "no function"),  # type: ignore[call-overload]
        lambda: Graph("g").subgraph("a", nothing),  # type: ignore[arg-type]
        lambda: Graph("g").edge("a", "b", when="no function"),  # type: ignore[arg-type]
        lambda: Graph("g").parallel("a", ["b"], on_error="ignore"),
        lambda: Graph("g").barrier("a", on_timeout="approve"),
        lambda: Graph("g").barrier("a", on_timeout="modify"),
        lambda: RetryPolicy(retries=-1),
        lambda: RetryPolicy(first_s=-1),
        lambda: RetryPolicy(on=(BaseException,)),  # type: ignore[arg-type]
    ],
)
def test_what_can_never_work_is_refused_where_it_is_said(declare: Callable[[], object]) -> None:
    with pytest.raises(backstay.InvalidInput):
        declare()


def test_a_graph_can_be_declared_further_after_it_was_built() -> None:
    walk = Walk()
    graph = walk.chain("a", "b")
    assert graph.run_sync(None).path == ("a", "b")
    graph.node("c", walk.node("c"))
    graph.edge("a", "c", when=lambda state: True, name="always")
    graph.end("c")

    assert graph.run_sync(None).path == ("a", "c")


# States -----------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Research:
    question: str
    notes: Annotated[list[str], append] = dataclasses.field(default_factory=list)
    facts: Annotated[dict[str, int], merge] = dataclasses.field(default_factory=dict)
    cost: Annotated[float, add] = 0.0
    where: Point | None = None


class ResearchDict(TypedDict, total=False):
    question: str
    notes: Annotated[list[str], append]
    facts: Annotated[dict[str, int], merge]
    cost: Annotated[float, add]
    where: Point | None


class ResearchModel(BaseModel):
    question: str = Field(alias="Question")
    notes: Annotated[list[str], append] = []
    facts: Annotated[dict[str, int], merge] = {}
    cost: Annotated[float, add] = 0.0
    where: Point | None = None


REDUCERS: Mapping[str, Any] = {"notes": append, "facts": merge, "cost": add}


def look(view: Any, key: str) -> Any:
    return view[key] if isinstance(view, dict) else getattr(view, key)


@pytest.mark.parametrize(
    ("state", "reducers"), [(Research, {}), (ResearchDict, {}), (ResearchModel, {}), (dict, REDUCERS), (None, REDUCERS)]
)
def test_a_state_may_be_declared_in_any_of_four_ways(state: Any, reducers: Mapping[str, Any], tmp_path: Path) -> None:
    graph = Graph("g", state=state, reducers=reducers, before=["second"])
    given: list[Any] = []

    @graph.node
    def first(view: Any) -> dict[str, Any]:
        given.append(view)
        return {"notes": ["a"], "facts": {"k": 1}, "cost": 0.5, "where": Point(1, 2)}

    @graph.node("second")
    async def another(view: Any, ctx: Any) -> dict[str, Any]:
        given.append(view)
        return {"notes": [look(view, "question")], "facts": {"k": DELETE, "l": 2}, "cost": 0.25}

    graph.edge("first", "second")
    graph.start("first")
    graph.end("second")
    with backstay.open(tmp_path / "store.db") as store:
        thread = store.thread("t")
        assert graph.run_sync(thread, {"question": "why"}).status is Status.INTERRUPTED
        result = graph.resume_sync(store.thread("t"), backstay.Approve())

        wanted = {"question": "why", "notes": ["a", "why"], "facts": {"l": 2}, "cost": 0.75, "where": Point(1, 2)}
        assert result.values == wanted
        assert head(thread).state == wanted
        assert {key: look(result.state, key) for key in wanted} == wanted
        assert {type(view) for view in given} == {
            state if isinstance(state, type) and state is not ResearchDict else dict
        }


def test_a_run_may_begin_with_an_instance_of_the_state() -> None:
    for state, instance in ((Research, Research("why")), (ResearchModel, ResearchModel(Question="why"))):
        graph = Graph("g", state=state)
        graph.node("a", lambda view: {"notes": [view.question]})
        graph.start("a")
        graph.end("a")

        assert graph.run_sync(None, instance).values["notes"] == ["why"]  # type: ignore[arg-type]


def test_a_key_that_a_node_took_away_is_gone_in_every_kind_of_state() -> None:
    for state in (Research, ResearchModel, ResearchDict):
        graph = Graph("g", state=state)
        seen: list[bool] = []

        def gone(view: Any, seen: list[bool] = seen) -> None:
            seen.append("cost" in view if isinstance(view, dict) else "cost" in vars(view))

        graph.node("a", lambda view: {"cost": DELETE})
        graph.node("b", gone)
        graph.edge("a", "b")
        graph.start("a")
        graph.end("b")
        result = graph.run_sync(None, {"question": "why", "cost": 2.0})

        assert (result.status, seen) == (Status.COMPLETED, [False])
        assert "cost" not in result.values


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "needs 'question'"),
        ({"question": "why", "spelled wrong": 1}, "no state key 'spelled wrong'"),
        ({"question": "why", 5: 1}, "no state key '5'"),
        ("why", "a mapping of keys to values, not str"),
        (0, "a mapping of keys to values, not int"),
    ],
)
@pytest.mark.parametrize("state", [Research, ResearchModel])
def test_an_input_that_does_not_fit_is_refused_before_anything_is_stored(state: Any, given: Any, why: str) -> None:
    graph = Graph("g", state=state)
    graph.node("a", nothing)
    graph.start("a")
    graph.end("a")
    with backstay.open("memory:") as store:
        with pytest.raises(backstay.InvalidInput, match=why):
            graph.run_sync(store.thread("t"), given)

        assert list(store.threads()) == []


@pytest.mark.parametrize("given", [{"spelled wrong": 1}, 5, "text", {"seen": "no list"}])
def test_input_for_a_thread_that_has_a_state_is_checked_the_same_way(given: Any) -> None:
    graph = Walk().chain("a")
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, {"seen": ["before"]}).raise_for_status()
        digest = head(thread).digest
        with pytest.raises(backstay.InvalidInput):
            graph.run_sync(thread, given)

        assert head(thread).digest == digest
        assert graph.run_sync(thread, {"seen": ["again"]}).values["seen"] == ["before", "a", "again", "a"]


# What is stored of them -------------------------------------------------------------------------------------------


class Unknown:
    """Nobody said how to store this."""


class OwnBytes(bytearray):
    pass


NewBytes = NewType("NewBytes", socket.socket)


class OwnPath(type(Path())):  # type: ignore[misc] # why: before Python 3.12 Path itself has no subclasses
    pass


@dataclass
class Holder:
    inside: Unknown


@pytest.mark.parametrize(
    "annotation",
    [
        Unknown,
        list[Unknown],
        dict[str, list[Unknown | None]],
        threading.Lock,
        socket.socket,
        Callable[[int], int],
        OwnPath,
        Annotated[Unknown, "a note"],
        Holder,
        memoryview,
        OwnBytes,
        NewBytes,
        np.ma.MaskedArray,
        list[np.random.Generator],
    ],
)
def test_a_field_that_could_never_be_stored_is_refused_when_the_graph_is_built(annotation: Any) -> None:
    state = dataclasses.make_dataclass("S", [("fine", int), ("broken", annotation)])
    graph = Graph("g", state=state)
    graph.node("a", nothing)
    graph.start("a")
    graph.end("a")

    (problem,) = problems(graph)
    assert "'broken'" in problem
    assert "transient" in problem


@pytest.mark.parametrize(
    "annotation",
    [
        Path,
        PurePath | None,
        bytearray,
        deque[int],
        OrderedDict[str, deque[Path]],
        defaultdict[str, int],
        IPv4Address,
        ZoneInfo,
        np.ndarray,
        NDArray[np.float64],
        np.int8,
    ],
)
def test_a_field_of_a_type_that_can_be_stored_needs_no_registration(annotation: Any) -> None:
    graph = Graph("g", state=dataclasses.make_dataclass("S", [("fine", annotation)]))
    graph.node("a", nothing)
    graph.start("a")
    graph.end("a")

    graph.build()


@dataclass
class WithClient:
    question: str
    client: Annotated[Unknown, transient]
    lock: Annotated[Any, transient] = dataclasses.field(default_factory=threading.Lock)
    answers: Annotated[list[str], append] = dataclasses.field(default_factory=list)


def test_a_transient_field_lives_while_the_program_runs_and_is_never_stored(tmp_path: Path) -> None:
    graph = Graph("g", state=WithClient, before=["b"])
    clients: list[Any] = []

    def ask(view: WithClient) -> dict[str, Any]:
        with view.lock:
            clients.append(view.client)
        return {"answers": [view.question]}

    graph.node("a", ask)
    graph.node("b", ask)
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    first, second = Unknown(), Unknown()
    with backstay.open(tmp_path / "store.db") as store:
        graph.run_sync(store.thread("t"), {"question": "why"}, runtime={"client": first})
        assert head(store.thread("t")).state == {"question": "why", "answers": ["why"]}
    with backstay.open(tmp_path / "store.db") as store:
        result = graph.resume_sync(store.thread("t"), backstay.Approve(), runtime={"client": second})

    assert result.status is Status.COMPLETED
    assert clients == [first, second]


def test_runtime_values_must_be_keys_of_the_state() -> None:
    graph = Walk().chain("a", "b", before=["b"])
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        with pytest.raises(backstay.InvalidInput, match="runtime: graph 'g' has no state key 'x'"):
            graph.run_sync(thread, {}, runtime={"x": 1})
        assert thread.latest() is None
        graph.run_sync(thread)
        with pytest.raises(backstay.InvalidInput, match="runtime"):
            graph.resume_sync(thread, backstay.Approve(), runtime={"x": 1})

        assert [record.decision for record in thread.interrupts()] == [None]


@dataclass
class Counter:
    """Keeps a set while it runs, and stores how large it is and its largest element."""

    members: Any = dataclasses.field(default_factory=Unknown)
    total: int = 0

    def snapshot(self) -> dict[str, Any]:
        return {"stored_total": self.total}

    @classmethod
    def restore(cls, stored: Mapping[str, Any]) -> Counter:
        return cls(members=f"rebuilt for {stored['stored_total']}", total=stored["stored_total"])


def test_a_class_with_snapshot_and_restore_decides_what_is_stored(tmp_path: Path) -> None:
    graph = Graph("g", state=Counter, before=["b"])
    seen: list[Any] = []

    def count(view: Counter) -> dict[str, Any]:
        seen.append(view.members)
        return {"total": view.total + 1}

    graph.node("a", count)
    graph.node("b", count)
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    with backstay.open(tmp_path / "store.db") as store:
        graph.run_sync(store.thread("t"), {"total": 5})
        assert head(store.thread("t")).state == {"stored_total": 6}
        result = graph.resume_sync(store.thread("t"), backstay.Approve())

    assert result.state.total == 7
    assert isinstance(seen[0], Unknown)
    assert seen[1] == "rebuilt for 6"


def test_a_class_with_snapshot_and_restore_can_run_again_and_be_replayed_with_another_value() -> None:
    graph = Graph("g", state=Counter)
    graph.node("a", lambda view: {"total": view.total + 1})
    graph.start("a")
    graph.end("a")
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, {"total": 5}).raise_for_status()
        again = graph.run_sync(thread).raise_for_status()
        first = thread.at(0)
        assert first is not None
        other = graph.replay_sync(thread, first, branch="other", set={"total": 100}).raise_for_status()

        assert (again.state.total, other.state.total) == (7, 101)
        assert [head(store.thread("t", branch=name)).state for name in ("main", "other")] == [
            {"stored_total": 7},
            {"stored_total": 101},
        ]


def test_a_value_that_cannot_be_stored_after_all_ends_the_run_and_is_never_stored_as_null() -> None:
    graph = Graph("g")
    graph.node("a", lambda state: {"fine": 1})
    graph.node("b", lambda state: {"broken": Unknown()})
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        failed = graph.run_sync(thread)

        assert isinstance(failed.error, NodeFailed)
        assert failed.error.node == "b"
        assert "state.broken" in str(failed.error)
        assert head(thread).state == {"fine": 1}
        assert (head(thread).next_node, head(thread).trigger) == ("b", "failed")


@dataclass
class Forgetful:
    """A state that leaves something out and cannot be made again."""

    x: int = 0
    secret: str = ""

    def snapshot(self) -> dict[str, Any]:
        return {"x": self.x}


def test_a_class_with_snapshot_and_no_restore_is_refused() -> None:
    graph = Graph("g", state=Forgetful)
    graph.node("a", lambda state: {})
    graph.start("a")
    graph.end("a")

    with pytest.raises(InvalidGraph, match=r"Forgetful has snapshot\(\) but no restore\(\)"):
        graph.build()


@dataclass
class Listing(Forgetful):
    """A state whose snapshot is not a mapping."""

    def snapshot(self) -> Any:
        return [self.x]

    @classmethod
    def restore(cls, stored: Any) -> Listing:
        return cls(*stored)


@pytest.mark.parametrize(
    ("state", "trigger", "message"),
    [
        (Listing, triggers.every_node(), r"snapshot\(\) of Listing returned list, not a mapping"),
        (dict, "every_node", "trigger must be a trigger, not 'every_node'"),
        (dict, triggers.every_node, "trigger must be a trigger, not <function every_node"),
        (dict, TriggerPolicy, "trigger must be a trigger, not <"),
    ],
)
def test_odd_options_of_a_run_are_refused_in_words(state: Any, trigger: Any, message: str) -> None:
    graph = Graph("g", state=state)
    graph.node("a", lambda state: {})
    graph.start("a")
    graph.end("a")

    with backstay.open("memory:") as store, pytest.raises(InvalidInput, match=message):
        graph.run_sync(store.thread("t"), {}, trigger=trigger)


@pytest.mark.parametrize("url", ["memory:", "store.db"])
def test_the_checkpoint_of_a_result_has_its_state(url: str, tmp_path: Path) -> None:
    graph = Graph("g")
    graph.node("a", lambda state: {"x": 1})
    graph.node("b", lambda state: {"y": 2})
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    with backstay.open(url if url == "memory:" else tmp_path / url) as store:
        first = graph.run_sync(store.thread("t"), {"m": 1}, before=["b"])
        again = graph.resume_sync(store.thread("t"))
        done = graph.resume_sync(store.thread("t"), Approve())

        assert first.checkpoint is not None
        assert again.checkpoint is not None
        assert done.checkpoint is not None
        assert (first.checkpoint.state, first.checkpoint.path) == ({"m": 1, "x": 1}, ("a",))
        assert again.checkpoint.state == first.checkpoint.state
        assert (done.checkpoint.state, done.checkpoint.path) == ({"m": 1, "x": 1, "y": 2}, ("a", "b"))
        assert copy.deepcopy(done.checkpoint).state == done.checkpoint.state
