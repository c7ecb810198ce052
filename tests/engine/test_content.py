"""Values are compared by their content: in what a subgraph gives back, and in what parallel branches write."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import numpy as np
import pytest

import backstay
from backstay import Graph
from backstay.codec import decode, encode
from backstay.engine import Status
from backstay.engine.reducers import DELETE, add, append, merge
from backstay.errors import BadUpdate, MergeConflict
from backstay.model.decision import Approve, Modify
from backstay.thread.thread import Thread


@backstay.register
@dataclass(eq=False)
class Point:
    """It has no ``==``: only its content can tell whether it is the same after it was stored."""

    x: float


@backstay.register
@dataclass
class Liar:
    """It says that it is equal to everything."""

    x: int

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def join(old: list[Any] | None, new: list[Any]) -> list[Any]:
    return (old or []) + new


def without_doubles(old: list[Any], new: list[Any]) -> list[Any]:
    old += [item for item in new if item not in old]  # it changes its argument, which many do
    return old


def last_two(old: list[Any] | None, new: list[Any]) -> list[Any]:
    return [*(old or []), *new][-2:]


def state_of(kind: Any) -> Any:
    return TypedDict("State", {"v": kind, "items": list, "w": Any}, total=False)  # type: ignore[operator]


def inner_of(state: Any, *steps: Any, name: str = "inner") -> Graph:
    inner = Graph(name, state=state)
    for number, step in enumerate(steps):
        inner.node(f"{name}{number}", step)
        if number:
            inner.edge(f"{name}{number - 1}", f"{name}{number}")
    inner.start(f"{name}0")
    inner.end(f"{name}{len(steps) - 1}")
    return inner


def nested(kind: Any, *steps: Any, **options: Any) -> Graph:
    state = state_of(kind)
    graph = Graph("g", state=state)
    graph.subgraph("sub", inner_of(state, *steps), **options)
    graph.start("sub")
    graph.end("sub")
    return graph


def parallel(kind: Any, left: Any, right: Any) -> Graph:
    state = state_of(kind)
    graph = Graph("g", state=state)
    graph.node("split", lambda state: None)
    graph.subgraph("l", inner_of(state, left, name="left"))
    graph.subgraph("r", inner_of(state, right, name="right"))
    graph.parallel("split", ["l", "r"])
    graph.start("split")
    return graph


def finish(graph: Graph, thread: Thread, given: Any, pauses_at: list[str]) -> Any:
    """Run to the end. At each pause the state is stored and read back, so nothing is one object any more."""
    result = graph.run_sync(thread, given, before=pauses_at)
    while result.status is Status.INTERRUPTED:
        result = graph.resume_sync(thread, {record.id: Approve() for record in result.interrupts})
    return result


def content(value: Any) -> bytes:
    return encode(value)


VALUES = [
    math.nan,
    Point(1.0),
    [Point(math.nan)],
    np.arange(3),
    {"a": [1, True, 1.0, np.float32(2)]},
    {frozenset({1, 2}): {3, 4}},
    Liar(1),
]


@pytest.mark.parametrize("pauses_at", [[], ["inner0"]])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_that_a_subgraph_leaves_alone_comes_back_as_it_was(value: Any, pauses_at: list[str]) -> None:
    for kind, given in (
        (Any, value),
        (Annotated[list, append], [value, value]),
        (Annotated[dict, merge], {"k": value}),
        (Annotated[list, add], [value]),
        (Annotated[list, join], [value]),
    ):
        with backstay.open("memory:") as store:
            result = finish(nested(kind, lambda state: None), store.thread("t"), {"v": given}, pauses_at)
        assert result.status is Status.COMPLETED
        assert content(result.values) == content({"v": given})


@pytest.mark.parametrize("pauses_at", [[], ["left0", "right0"]])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_parallel_subgraphs_that_do_not_change_a_key_do_not_conflict_over_it(value: Any, pauses_at: list[str]) -> None:
    for kind, given in (
        (Any, value),
        (Annotated[list, append], [value]),
        (Annotated[dict, merge], {"k": value}),
        (Annotated[list, add], [value]),
        (Annotated[list, join], [value]),
    ):
        with backstay.open("memory:") as store:
            graph = parallel(kind, lambda state: {"items": [1]}, lambda state: {"w": 2})
            result = finish(graph, store.thread("t"), {"v": given}, pauses_at)
        assert result.status is Status.COMPLETED
        assert content(result.values) == content({"v": given, "items": [1], "w": 2})


@pytest.mark.parametrize("pauses_at", [[], ["inner0", "inner1"]])
@pytest.mark.parametrize(
    ("kind", "given", "step", "expected"),
    [
        (Any, [1], lambda state: {"v": [True]}, [True]),
        (Any, {"a": 1}, lambda state: {"v": {"a": 1.0}}, {"a": 1.0}),
        (Any, Liar(1), lambda state: {"v": Liar(2)}, Liar(2)),
        (Any, np.arange(2), lambda state: {"v": state["v"] * 2}, np.array([0, 4])),
        (Annotated[str, add], "a", lambda state: {"v": "b"}, "abb"),
        (Annotated[bytes, add], b"a", lambda state: {"v": b"b"}, b"abb"),
        (Annotated[tuple, add], (1,), lambda state: {"v": (math.nan,)}, (1, math.nan, math.nan)),
        (Annotated[list, add], [Point(1)], lambda state: {"v": [2]}, [Point(1), 2, 2]),
        (Annotated[float, add], 0.7, lambda state: {"v": 0.1}, 0.7 + 0.1 + 0.1),
        (Annotated[float, add], 1e300, lambda state: {"v": math.inf}, math.inf),
        (Annotated[Decimal, add], Decimal("1E+40"), lambda state: {"v": Decimal("0.1")}, Decimal("1E+40") + 0),
        (Annotated[Any, add], np.arange(2), lambda state: {"v": np.ones(2, int)}, np.array([2, 3])),
        (Annotated[bool, add], True, lambda state: {"v": True}, 3),
        (Annotated[list, join], ["a"], lambda state: {"v": ["b"]}, ["a", "b", "b"]),
        (Annotated[int, max], 3, lambda state: {"v": 7}, 7),
        (Annotated[list, append], [1, 2], lambda state: {"v": DELETE}, None),
        (Annotated[dict, merge], {"a": 1, "b": 2}, lambda state: {"v": {"a": DELETE, "c": 3}}, {"b": 2, "c": 3}),
    ],
)
def test_a_key_becomes_exactly_what_it_is_in_the_subgraph(
    kind: Any, given: Any, step: Any, expected: Any, pauses_at: list[str]
) -> None:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = finish(nested(kind, step, step), thread, {"v": given}, pauses_at)

        assert result.status is Status.COMPLETED
        assert content(result.values.get("v")) == content(expected)
        found = thread.latest()
        assert found is not None
        assert content(dict(found.state)) == content(result.values)


def rebuild(state: Any) -> Any:
    return {"v": DELETE}


def test_a_list_that_is_changed_in_its_middle_comes_back_as_it_is() -> None:
    state = state_of(Annotated[list, append])
    graph = nested(Annotated[list, append], rebuild, lambda state: {"v": [9, 2]})
    assert graph.run_sync(None, {"v": [1, 2]}).values == {"v": [9, 2]}
    mapped = Graph("g", state=state)
    mapped.subgraph("sub", inner_of(state, rebuild, lambda state: {"v": [9]}), into={"v": "v"}, out={"v": "v"})
    mapped.start("sub")
    mapped.end("sub")
    assert mapped.run_sync(None, {"v": [1, 2]}).values == {"v": [9]}


@pytest.mark.parametrize(
    ("kind", "given", "left", "right", "expected"),
    [
        (Annotated[str, add], "a", "l", "r", "alr"),
        (Annotated[list, add], [0], [1], [2], [0, 1, 2]),
        (Annotated[int, add], 1, 2, 3, 6),
        (Annotated[Any, add], np.zeros(2), np.ones(2), np.ones(2), np.full(2, 2.0)),
        (Annotated[list, append], [math.nan], [1], [2], [math.nan, 1, 2]),
        (Annotated[dict, merge], {"a": math.nan}, {"b": 1}, {"c": 2}, {"a": math.nan, "b": 1, "c": 2}),
        (Any, 1, True, True, True),
        (Annotated[int, max], 3, 7, 5, 7),
        (Annotated[set, operator.or_], {1}, {2}, {3}, {1, 2, 3}),
        (Annotated[list, without_doubles], ["a"], ["b"], ["a", "c"], ["a", "b", "c"]),
    ],
)
def test_the_changes_of_parallel_subgraphs_are_all_kept(
    kind: Any, given: Any, left: Any, right: Any, expected: Any
) -> None:
    for pauses_at in ([], ["left0", "right0"]):
        with backstay.open("memory:") as store:
            graph = parallel(kind, lambda state: {"v": left}, lambda state: {"v": right})
            result = finish(graph, store.thread("t"), {"v": given}, pauses_at)
        assert result.status is Status.COMPLETED
        assert content(result.values["v"]) == content(expected)


def test_one_of_two_parallel_subgraphs_may_use_a_reducer_of_ones_own() -> None:
    graph = parallel(Annotated[list, join], lambda state: {"v": ["l"]}, lambda state: {"w": 1})
    assert graph.run_sync(None, {"v": ["a"]}).values == {"v": ["a", "l"], "w": 1}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Annotated[list, join], ["a"]),
        (Annotated[list, last_two], ["a"]),
        (Annotated[list, append], ["a"]),
        (Annotated[str, add], "a"),
    ],
)
def test_changes_that_cannot_be_told_of_two_parallel_subgraphs_are_a_conflict(kind: Any, given: Any) -> None:
    def shorter(state: Any) -> Any:
        return {"v": DELETE}

    def other(state: Any) -> Any:
        return {"v": given}

    state = state_of(kind)
    graph = Graph("g", state=state)
    graph.node("split", lambda state: None)
    graph.subgraph("l", inner_of(state, shorter, lambda state: {"v": "b" if given == "a" else ["b"]}, name="left"))
    graph.subgraph("r", inner_of(state, other, name="right"))
    graph.parallel("split", ["l", "r"])
    graph.start("split")
    with backstay.open("memory:") as store:
        result = graph.run_sync(store.thread("t"), {"v": given})
        assert isinstance(result.error, MergeConflict)
        assert (result.error.keys, set(result.error.writers)) == (("v",), {"l", "r"})
        assert "'v'" in str(result.error)
        assert "out=" in str(result.error)
        assert isinstance(graph.resume_sync(store.thread("t")).error, MergeConflict)


def test_a_subgraph_that_got_another_value_than_the_outer_one_gives_back_what_it_added() -> None:
    for kind, given, expected in (
        (Annotated[list, append], [1, 2, 3], [1, 2, 3, 9]),
        (Annotated[list, add], [1, 2, 3], [1, 2, 3, 9]),
    ):
        graph = nested(kind, lambda state: {"v": [9]}, into=lambda state: {"v": state["v"][-1:]})
        assert graph.run_sync(None, {"v": given}).values == {"v": expected}


def test_a_reducer_of_ones_own_cannot_take_back_a_value_that_is_not_the_outer_one() -> None:
    graph = nested(Annotated[list, join], lambda state: {"v": [9]}, into=lambda state: {"v": state["v"][-1:]})
    error = graph.run_sync(None, {"v": [1, 2]}).error
    assert isinstance(error, BadUpdate)
    assert (error.node, error.key) == ("sub", "v")
    assert "out=" in str(error)


def test_a_key_that_only_the_subgraph_writes_is_an_ordinary_update() -> None:
    state = state_of(Annotated[list, join])
    inner = inner_of(TypedDict("Inner", {"found": list}, total=False), lambda state: {"found": [2]})  # type: ignore[operator]
    graph = Graph("g", state=state)
    graph.subgraph("sub", inner, into={}, out={"found": "v"})
    graph.start("sub")
    graph.end("sub")
    assert graph.run_sync(None, {"v": [1]}).values == {"v": [1, 2]}


def test_a_key_that_is_given_back_under_another_name_is_written_even_if_it_did_not_change() -> None:
    graph = nested(Any, lambda state: None, into={"w": "v"}, out={"v": "v"})
    assert graph.run_sync(None, {"v": "old", "w": "new"}).values == {"v": "new", "w": "new"}


def test_what_a_person_changed_before_a_subgraph_is_not_lost_in_what_it_gives_back() -> None:
    graph = nested(Annotated[float, add], lambda state: {"v": 0.1})
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, {"v": 0.5}, before=["sub"])
        assert graph.resume_sync(thread, Modify({"v": 0.2})).values == {"v": 0.5 + 0.2 + 0.1}


def test_an_exact_value_outlives_the_process_that_computed_it(url: str) -> None:
    """The left branch is finished and stored while the right one waits; another process commits it."""
    graph = parallel(Annotated[float, add], lambda state: {"v": 0.1}, lambda state: {"w": 1})
    with backstay.open(url) as store:
        result = graph.run_sync(store.thread("t"), {"v": 0.7}, before=["right0"])
        assert result.status is Status.INTERRUPTED
    if url == "memory:":
        return
    with backstay.open(url) as store:
        assert graph.resume_sync(store.thread("t"), Approve()).values == {"v": 0.7 + 0.1, "w": 1}


# Parallel nodes ---------------------------------------------------------------------------------------------------


def fan(*nodes: Callable[[Any], Any], kind: Any = Any) -> Graph:
    graph = Graph("g", state=state_of(kind))
    graph.node("split", lambda state: None)
    for number, node in enumerate(nodes):
        graph.node(f"n{number}", node)
    graph.parallel("split", [f"n{number}" for number in range(len(nodes))])
    graph.start("split")
    return graph


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_parallel_nodes_that_return_the_same_content_agree(value: Any) -> None:
    graph = fan(lambda state: {"v": value}, lambda state: {"v": decode(encode(value))})
    result = graph.run_sync(None, {})
    assert result.status is Status.COMPLETED
    assert content(result.values["v"]) == content(value)


@pytest.mark.parametrize(("one", "other"), [([1], [True]), ([1], [1.0]), ({"a": 0.0}, {"a": -0.0}), (Liar(1), Liar(2))])
def test_parallel_nodes_that_return_values_that_only_look_equal_conflict(one: Any, other: Any) -> None:
    assert isinstance(fan(lambda state: {"v": one}, lambda state: {"v": other}).run_sync(None, {}).error, MergeConflict)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_branch_that_returns_the_old_value_never_undoes_another(order: tuple[int, int]) -> None:
    nodes = [lambda state: {"v": "new"}, lambda state: {"v": state["v"]}]
    assert fan(*(nodes[each] for each in order)).run_sync(None, {"v": "old"}).values == {"v": "new"}
    merged = [lambda state: {"v": {"a": 2}}, lambda state: {"v": {"a": 1, "b": 3}}]
    graph = fan(*(merged[each] for each in order), kind=Annotated[dict, merge])
    assert graph.run_sync(None, {"v": {"a": 1}}).values == {"v": {"a": 2, "b": 3}}


def test_of_many_writers_the_two_that_differ_are_named() -> None:
    graph = fan(lambda state: {"v": 1}, lambda state: {"v": 0}, lambda state: {"v": 1}, lambda state: {"v": 2})
    error = graph.run_sync(None, {"v": 0}).error
    assert isinstance(error, MergeConflict)
    assert error.writers == ("n0", "n3")


@dataclass
class Holder:
    """A state with a field that cannot be stored."""

    v: int = 0
    tool: Annotated[Any, backstay.engine.state.transient] = field(default_factory=object)


def test_fields_that_are_not_stored_are_compared_by_identity() -> None:
    one = object()
    graph = Graph("g", state=Holder)
    graph.node("split", lambda state: None)
    graph.node("a", lambda state: {"tool": one})
    graph.node("b", lambda state: {"tool": one, "v": 1})
    graph.parallel("split", ["a", "b"])
    graph.start("split")
    result = graph.run_sync(None, {})
    assert result.values == {"v": 1, "tool": one}
