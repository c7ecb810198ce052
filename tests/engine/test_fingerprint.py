"""The fingerprint: the same for the same graph however it was declared, another one for every other graph."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.codec import decode, encode
from backstay.engine.fingerprint import fingerprint, fingerprint_of, hex_of, identity, shape, type_text
from backstay.engine.graph import Graph
from backstay.engine.nodes import END
from backstay.engine.reducers import add, append, merge
from backstay.engine.state import transient
from backstay.retry import RetryPolicy
from support.running import Show

Declare = Callable[[Graph], object]


def work(state: Any) -> None:
    """Do nothing."""


def is_ready(state: Any) -> bool:
    return True


def is_stuck(state: Any) -> bool:
    return False


def pick(state: Any) -> str:
    return "left"


def items(state: Any) -> list[int]:
    return [1]


def project(state: Any) -> dict[str, Any]:
    return {}


FIELDS: dict[str, Any] = {
    "question": str,
    "notes": Annotated[list[str], append],
    "score": Annotated[int, add],
    "client": Annotated[object, transient],
}


def state_of(fields: Mapping[str, Any] = FIELDS, **changed: Any) -> type:
    declared = {name: kind for name, kind in {**fields, **changed}.items() if kind is not None}
    return TypedDict("State", declared)  # type: ignore[operator,no-any-return]  # made of a table, not written out


def inner(*more: str, name: str = "inner", state: type = dict) -> Graph:
    graph = Graph(name, state=state)
    for node in ("look", *more):
        graph.node(node, work)
    for source, target in zip(("look", *more), (*more, END), strict=True):
        graph.edge(source, target)
    graph.start("look")
    return graph


def node(name: str) -> Declare:
    return lambda graph: graph.node(name, work)


BASE: dict[str, Declare] = {
    "plan": node("plan"),
    "left": node("left"),
    "right": node("right"),
    "each": node("each"),
    "gather": node("gather"),
    "more": node("more"),
    "ask": lambda graph: graph.barrier("ask", on_reject="more"),
    "deep": lambda graph: graph.subgraph("deep", inner(), into={"question": "q", "score": "s"}, out={"r": "score"}),
    "plan if ready": lambda graph: graph.edge("plan", "ask", when=is_ready),
    "plan if stuck": lambda graph: graph.edge("plan", "deep", when=is_stuck),
    "plan else": lambda graph: graph.edge("plan", "more", fallback=True),
    "more to": lambda graph: graph.choose("more", pick, {"again": "plan", "stop": END}),
    "ask to": lambda graph: graph.parallel("ask", ["left", "right"], join="gather"),
    "left to": lambda graph: graph.end("left"),
    "right to": lambda graph: graph.end("right"),
    "each to": lambda graph: graph.end("each"),
    "deep to": lambda graph: graph.map("deep", "each", "notes", join="gather"),
    "gather to": lambda graph: graph.end("gather"),
    "start": lambda graph: graph.start("plan"),
}

IN_ORDER = ("plan if ready", "plan if stuck")
"""Conditions of one node are tried in the order in which they were declared: that order means something."""


def declared(steps: Iterable[Declare], name: str = "research", **options: Any) -> Graph:
    graph = Graph(name, **{"state": state_of(), **options})
    for step in steps:
        step(graph)
    return graph


def hash_of(graph: Graph) -> int:
    return fingerprint_of(graph.build())


def with_steps(**changed: Declare | None) -> Callable[[], Graph]:
    steps = {**BASE, **{name.replace("_", " "): step for name, step in changed.items()}}
    return lambda: declared(step for step in steps.values() if step is not None)


def with_options(name: str = "research", **options: Any) -> Callable[[], Graph]:
    return lambda: declared(BASE.values(), name, **options)


def with_inner(*more: str, **options: Any) -> Callable[[], Graph]:
    into, out = {"question": "q", "score": "s"}, {"r": "score"}
    return with_steps(deep=lambda graph: graph.subgraph("deep", inner(*more, **options), into=into, out=out))


def swapped() -> Graph:
    steps = [name for name in BASE if name not in IN_ORDER]
    return declared(BASE[name] for name in (*steps, *reversed(IN_ORDER)))


CHANGES: dict[str, Callable[[], Graph]] = {
    "the graph's name": with_options("other"),
    "the start": with_steps(start=lambda graph: graph.start("more")),
    "a node more": with_steps(extra=node("extra"), gather_to=lambda graph: graph.edge("gather", "extra"),
                              extra_to=lambda graph: graph.end("extra")),
    "a node's name": with_steps(each=node("every"), each_to=lambda graph: graph.end("every"),
                                deep_to=lambda graph: graph.map("deep", "every", "notes", join="gather")),
    "a node that is a barrier now": with_steps(left=lambda graph: graph.barrier("left")),
    "a node that is a subgraph now": with_steps(left=lambda graph: graph.subgraph("left", inner())),
    "where a rejection leads": with_steps(ask=lambda graph: graph.barrier("ask", on_reject="gather")),
    "that a rejection ends the run": with_steps(ask=lambda graph: graph.barrier("ask")),
    "what a timeout means": with_steps(ask=lambda graph: graph.barrier("ask", on_reject="more", on_timeout="defer")),
    "an edge's target": with_steps(plan_if_stuck=lambda graph: graph.edge("plan", "gather", when=is_stuck),
                                   more_to=lambda graph: graph.choose("more", pick, {"again": "deep", "stop": END})),
    "a condition's name": with_steps(plan_if_ready=lambda graph: graph.edge("plan", "ask", when=is_ready, name="go")),
    "another condition": with_steps(plan_if_ready=lambda graph: graph.edge("plan", "ask", when=pick)),
    "the order of conditions": swapped,
    "a condition more": with_steps(plan_more=lambda graph: graph.edge("plan", "gather", when=pick)),
    "a condition less": with_steps(plan_if_ready=None, deep_to=lambda graph: graph.edge("deep", "ask"),
                                   gather_to=lambda graph: graph.map("gather", "each", "notes")),
    "a fallback that is a plain edge now": with_steps(plan_else=lambda graph: graph.edge("plan", "more")),
    "a fallback's target": with_steps(plan_else=lambda graph: graph.edge("plan", "ask", fallback=True)),
    "a choice's way": with_steps(more_to=lambda graph: graph.choose("more", pick, {"anew": "plan", "stop": END})),
    "where a way leads": with_steps(more_to=lambda graph: graph.choose("more", pick, {"again": "ask", "stop": END})),
    "a choice's function": with_steps(
        more_to=lambda graph: graph.choose("more", items, {"again": "plan", "stop": END})),
    "a branch more": with_steps(ask_to=lambda graph: graph.parallel("ask", ["left", "right", "more"], join="gather")),
    "the order of branches": with_steps(ask_to=lambda graph: graph.parallel("ask", ["right", "left"], join="gather")),
    "the join": with_steps(ask_to=lambda graph: graph.parallel("ask", ["left", "right"], join="more")),
    "no join": with_steps(ask_to=lambda graph: graph.parallel("ask", ["left", "right"])),
    "what a failed branch means": with_steps(ask_to=lambda graph: graph.parallel(
        "ask", ["left", "right"], join="gather", on_error="collect_all")),
    "a condition on a fan-out": with_steps(
        ask_to=lambda graph: graph.parallel("ask", ["left", "right"], join="gather", when=is_ready),
        ask_else=lambda graph: graph.edge("ask", "gather", fallback=True)),
    "the key that is mapped over": with_steps(deep_to=lambda graph: graph.map("deep", "each", "score", join="gather")),
    "a function that is mapped over": with_steps(
        deep_to=lambda graph: graph.map("deep", "each", items, join="gather")),
    "a fan-out of one instead of a map": with_steps(
        deep_to=lambda graph: graph.parallel("deep", ["each"], join="gather")),
    "a plain edge instead of a map": with_steps(deep_to=lambda graph: graph.edge("deep", "each")),
    "where it may end": with_steps(gather_to=lambda graph: graph.edge("gather", "plan")),
    "a nested graph's name": with_inner(name="within"),
    "a nested graph's nodes": with_inner("look-again"),
    "a nested graph's state": with_inner(state=state_of({"q": str, "s": int, "r": int})),
    "what goes into a nested graph": with_steps(deep=lambda graph: graph.subgraph(
        "deep", inner(), into={"question": "x", "score": "s"}, out={"r": "score"})),
    "what comes out of a nested graph": with_steps(deep=lambda graph: graph.subgraph(
        "deep", inner(), into={"question": "q", "score": "s"}, out={"r": "question"})),
    "a function that makes the inner state": with_steps(deep=lambda graph: graph.subgraph(
        "deep", inner(), into=project, out={"r": "score"})),
    "a state key more": with_options(state=state_of(extra=int)),
    "a state key less": with_options(state=state_of(client=None)),
    "a state key's type": with_options(state=state_of(question=bytes)),
    "the type of a list's items": with_options(state=state_of(notes=Annotated[list[int], append])),
    "a reducer": with_options(state=state_of(notes=Annotated[list[str], merge])),
    "a reducer given to the graph": with_options(reducers={"question": lambda old, new: new}),
    "a key that is not stored any more": with_options(state=state_of(question=Annotated[str, transient])),
    "a key that is stored now": with_options(state=state_of(client=object)),
    "a state that takes any key": with_options(state=dict),
}  # fmt: skip


def test_every_change_of_a_graph_changes_its_fingerprint(show: Show) -> None:
    hashes = {"as it was": hash_of(declared(BASE.values()))}
    hashes |= {what: hash_of(change()) for what, change in CHANGES.items()}
    show("kinds of changes, all with a fingerprint of their own", len(CHANGES))

    assert len(CHANGES) >= 25
    same = [(one, two) for one in hashes for two in hashes if one < two and hashes[one] == hashes[two]]
    assert same == []


@pytest.mark.parametrize(
    "options",
    [{"limit": 7}, {"before": ["plan"]}, {"after": ["*"]}, {"strict": True}],
    ids=lambda options: str(next(iter(options))),
)
def test_what_a_run_may_choose_is_no_part_of_it(options: dict[str, Any]) -> None:
    assert hash_of(with_options(**options)()) == hash_of(declared(BASE.values()))


def test_retries_timeouts_prompts_and_notes_are_no_part_of_it() -> None:
    changed = with_steps(
        plan=lambda graph: graph.node("plan", work, retry=RetryPolicy(3), timeout=5, owner="us"),
        ask=lambda graph: graph.barrier("ask", "Go on?", on_reject="more", timeout=60, payload=items),
    )

    assert hash_of(changed()) == hash_of(declared(BASE.values()))


@given(st.permutations(list(BASE)), st.permutations(list(FIELDS)), st.booleans())
def test_the_order_of_declarations_means_nothing(steps: list[str], fields: list[str], turned: bool) -> None:
    first, second = sorted(steps.index(name) for name in IN_ORDER)
    steps[first], steps[second] = IN_ORDER
    changed = {**BASE}
    if turned:
        changed["deep"] = lambda graph: graph.subgraph(
            "deep", inner(), into={"score": "s", "question": "q"}, out={"r": "score"}
        )
        changed["more to"] = lambda graph: graph.choose("more", pick, {"stop": END, "again": "plan"})
    graph = declared((changed[name] for name in steps), state=state_of({name: FIELDS[name] for name in fields}))

    assert hash_of(graph) == hash_of(declared(BASE.values()))
    assert shape(graph.build()) == shape(declared(BASE.values()).build())


odd = st.text(st.sampled_from("ab\"'\\{}|;=-.+&é\u0301Ω😀"), min_size=1, max_size=4)


def row_of(names: list[str], title: str) -> Graph:
    graph = Graph(title)
    for name, following in zip(names, [*names[1:], END], strict=True):
        graph.node(name, work)
        graph.edge(name, following)
    graph.start(names[0])
    return graph


rows = st.tuples(st.lists(odd, min_size=1, max_size=4, unique=True), odd)


@given(rows, rows)
def test_names_with_odd_characters_cannot_make_two_graphs_look_alike(
    one: tuple[list[str], str], two: tuple[list[str], str]
) -> None:
    assert (hash_of(row_of(*one)) == hash_of(row_of(*two))) is (one == two)


def test_names_that_only_join_to_the_same_text_differ() -> None:
    pairs = (["ab", "c"], ["a", "bc"], ["a", "b", "c"], ["abc"], ['a"b', "c"], ["a", 'b"c'])

    assert len({hash_of(row_of(list(names), "g")) for names in pairs}) == len(pairs)
    assert fingerprint({"a": {"b": "c"}}) != fingerprint({"a": "b", "b": "c"}) != fingerprint({"a": ["b", "c"]})


class Colour(TypedDict):
    name: str


@dataclasses.dataclass
class Message:
    text: str


@pytest.mark.parametrize(
    "spellings",
    [
        [int | None, None | int, Optional[int], Union[None, int]],  # noqa: UP007, UP045  # that is the point
        [list[str], Annotated[list[str], "a note"], Annotated[list[Annotated[str, 1]], append]],
        [Literal["a", "b"], Literal["b", "a"]],
        [dict[str, Message | int], dict[str, int | Message]],
    ],
)
def test_a_type_is_the_same_however_it_is_written(spellings: list[Any]) -> None:
    assert len({type_text(each) for each in spellings}) == 1


def test_different_types_have_different_texts() -> None:
    kinds: list[Any] = [
        Any, None, int, str, list, list[int], list[str], tuple[int, ...], tuple[int, int], dict[str, int], int | str,
        int | None, Literal["a"], Literal["None"], Literal[None], Literal[1], Literal["1"], Literal[True], Message,
        Colour, list[Message], Callable[[int], str], Callable[..., str], object,
    ]  # fmt: skip

    assert len({type_text(kind) for kind in kinds}) == len(kinds)
    assert not any("0x" in type_text(kind) for kind in kinds)


PROGRAM = """
from typing import Annotated, Literal, TypedDict
from backstay.engine.fingerprint import fingerprint_of, hex_of
from backstay.engine.graph import Graph
from backstay.engine.reducers import append

State = TypedDict("State", {"notes": Annotated[list[str], append], "mood": Literal["up", "down"], "n": int | None})
graph = Graph("research", state=State)
for name in {"plan", "search", "write"}:
    graph.node(name, lambda state: None)
graph.choose("plan", lambda state: "s", {"s": "search", "w": "write"})
graph.end(*{"search", "write"})
graph.start("plan")
print(hex_of(fingerprint_of(graph.build())))
"""


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    """Runs are parked for long: a fingerprint that changed with this library would refuse them all."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }

    assert printed == {"18a76b6483219a2c"}


def test_it_is_an_unsigned_number_of_64_bits_and_16_digits_as_text() -> None:
    hashes = [hash_of(change()) for change in CHANGES.values()]

    assert all(0 <= hash < 2**64 for hash in hashes)
    assert any(hash > 2**63 for hash in hashes)  # beyond a signed number, and beyond what a double holds exactly
    assert all(len(hex_of(hash)) == 16 and int(hex_of(hash), 16) == hash for hash in hashes)
    assert hex_of(0xAB) == "00000000000000ab"


def test_a_shape_is_plain_and_comes_back_equal_from_a_store() -> None:
    made = shape(declared(BASE.values()).build())

    def plain(value: Any) -> bool:
        if type(value) is dict:
            return all(type(key) is str and plain(each) for key, each in value.items())
        if type(value) is list:
            return all(map(plain, value))
        return type(value) in (str, int, bool, type(None))

    assert plain(made)
    assert decode(encode(made)) == made
    assert fingerprint(decode(encode(made))) == fingerprint(made)
    assert made["nodes"]["deep"]["graph"] == shape(inner().build())


def test_it_is_made_once_for_each_built_graph(show: Show) -> None:
    names = [f"n{number}" for number in range(200)]
    built = row_of(names, "long").build()
    began = time.perf_counter()
    first = identity(built)
    made_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(1000):
        identity(built)
    looked_up_s = (time.perf_counter() - began) / 1000
    show("fingerprint of 200 nodes", f"{made_s * 1e3:.2f} ms once, then {looked_up_s * 1e6:.2f} us")

    assert identity(built) is first
    assert shape(built) is first.shape
    assert identity(row_of(names, "long").build()) is not first
