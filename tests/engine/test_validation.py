"""A state that is a pydantic model is validated, wherever a value comes from; nothing invalid is ever stored."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.reducers import DELETE, add, append, merge
from backstay.errors import BadUpdate, InvalidInput
from backstay.model.decision import Approve, Modify
from support.engine.walk import head

SECRET = "s3cret"


class Item(BaseModel):
    name: str
    price: int = 0


def join(old: list[int] | None, new: Any) -> list[int]:
    return [*(old or []), new]


validated: list[Any] = []


def note(value: Any) -> Any:
    validated.append(value)
    return value


class Order(BaseModel):
    model_config = ConfigDict(frozen=True)

    n: int = 0
    items: Annotated[list[Item], append] = []
    noted: Annotated[list[Annotated[int, AfterValidator(note)]], append] = []
    few: Annotated[list[int], Field(max_length=2), append] = []
    prices: Annotated[dict[str, int], merge] = {}
    total: Annotated[int, Field(ge=0), add] = 0
    own: Annotated[list[int], join] = []
    even: int = 0
    limit: int = Field(default=9, alias="lim")
    fixed: int = Field(default=1, frozen=True)
    parent: Order | None = None

    @field_validator("even")
    @classmethod
    def must_be_even(cls, value: int, info: ValidationInfo) -> int:
        if value % 2 or value > info.data["limit" if "limit" in info.data else "n"] + 100:
            raise ValueError(f"{value} is odd")
        return value

    @model_validator(mode="after")
    def never(self) -> Order:
        raise AssertionError("validators of the whole model do not run")


def graph_of(node: Any, **options: Any) -> Graph:
    graph = Graph("g", state=Order)
    graph.node("a", node, **options)
    graph.node("b", lambda state: None)
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    return graph


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": SECRET}, "n"),
    ({"items": [{"name": "pen"}, {"name": "pen", "price": SECRET}]}, "items[1].price"),
    ({"items": [{"price": 3}]}, "items[0].name"),
    ({"few": [1, 2, 3]}, "few"),
    ({"prices": {"pen": SECRET}}, "prices.pen"),
    ({"total": -1}, "total"),
    ({"own": SECRET}, "own[0]"),
    ({"even": 3}, "even"),
    ({"limit": None}, "limit"),
    ({"parent": {"n": SECRET}}, "parent.n"),
]


@pytest.mark.parametrize(("update", "path"), WRONG)
def test_a_wrong_update_fails_its_node_with_the_path_and_without_the_value(update: Any, path: str) -> None:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = graph_of(lambda state: update).run_sync(thread, {})
        assert result.status is Status.FAILED
        assert isinstance(result.error, BadUpdate)
        assert (result.error.node, result.error.key, result.error.path) == ("a", next(iter(update)), path)
        assert path in str(result.error)
        assert SECRET not in str(result.error)
        assert head(thread).state == result.values == Order.model_construct().__dict__


@pytest.mark.parametrize(("given", "path"), WRONG)
def test_a_wrong_input_is_refused_by_its_path(given: Any, path: str) -> None:
    if "own" in given:
        given = {"own": [SECRET]}
    graph = graph_of(lambda state: None)
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        with pytest.raises(InvalidInput, match="not valid") as caught:
            graph.run_sync(thread, given)
        assert SECRET not in str(caught.value)
        assert caught.value.path == path
        assert thread.latest() is None
        graph.run_sync(thread, {})
        with pytest.raises(InvalidInput, match="not valid"):  # the second run continues on the first one's state
            graph.run_sync(thread, {"own": SECRET} if "own" in given else given)


def test_values_are_coerced_as_pydantic_does_it() -> None:
    update = {
        "n": "3",
        "items": [{"name": "pen"}],
        "prices": {"pen": "4", "gone": DELETE},
        "total": 2,
        "own": "5",
        "few": ("6",),
    }
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        result = graph_of(lambda state: update).run_sync(thread, {"prices": {"gone": "1"}, "total": "1", "limit": "7"})
        assert result.status is Status.COMPLETED
        state = head(thread).state
    expected = {"n": 3, "items": [Item(name="pen")], "prices": {"pen": 4}, "total": 3, "own": [5], "few": [6]}
    assert {key: state[key] for key in expected} == expected
    assert state["limit"] == 7
    assert result.state.items[0].name == "pen"


def test_only_new_items_are_validated_unless_the_field_has_limits_of_its_own() -> None:
    validated.clear()
    graph = Graph("g", state=Order)
    graph.node("a", lambda state: {"noted": [len(state.noted)], "n": state.n + 1})
    graph.edge("a", "a", when=lambda state: state.n < 20, name="more")
    graph.start("a")
    graph.end("a")
    result = graph.run_sync(None, {})
    assert result.values["noted"] == list(range(20))
    assert len(validated) == 2 * 20  # once when the node returns it, once when it is committed


def test_the_fallback_of_a_node_takes_over_from_a_wrong_value() -> None:
    def fallback(state: Any, ctx: Any) -> Any:
        assert isinstance(ctx.error, BadUpdate)
        return {"n": 7}

    result = graph_of(lambda state: {"n": SECRET}, fallback=fallback).run_sync(None, {})
    assert result.values["n"] == 7


def test_a_node_that_pauses_on_failure_asks_about_a_wrong_value_and_takes_only_a_right_one() -> None:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph = graph_of(lambda state: {"n": SECRET}, on_failure="pause")
        result = graph.run_sync(thread, {})
        assert result.status is Status.INTERRUPTED
        assert SECRET not in repr(result.interrupts[0])

        result = graph.resume_sync(thread, Modify({"n": "also wrong"}))
        assert result.status is Status.INTERRUPTED
        assert "n: int_parsing" in result.interrupts[0].interrupt.prompt
        assert "also wrong" not in result.interrupts[0].interrupt.prompt

        result = graph.resume_sync(thread, {result.interrupts[0].id: Modify({"n": "8"})})
        assert result.values["n"] == 8


def test_collect_all_collects_wrong_values_too() -> None:
    graph = Graph("g", state=Order)
    graph.node("s", lambda state: None)
    graph.node("a", lambda state: {"n": SECRET})
    graph.node("b", lambda state: {"total": -1})
    graph.node("c", lambda state: {"limit": 5})
    graph.parallel("s", ["a", "b", "c"], on_error="collect_all")
    graph.start("s")
    error = graph.run_sync(None, {}).error
    assert isinstance(error, ExceptionGroup)
    assert {each.node for each in error.exceptions if isinstance(each, BadUpdate)} == {"a", "b"}


def test_a_modification_by_a_person_an_update_and_a_replay_are_validated() -> None:
    graph = graph_of(lambda state: {"total": 1})
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, {}, before=["b"])
        with pytest.raises(InvalidInput, match="n: int_parsing"):
            graph.resume_sync(thread, update={"n": SECRET})
        again = graph.resume_sync(thread, Modify({"n": SECRET}))
        assert again.status is Status.INTERRUPTED
        assert SECRET not in again.interrupts[0].interrupt.prompt
        assert (
            graph.resume_sync(thread, {again.interrupts[0].id: Modify({"n": "4"})}, update={"limit": "8"}).values["n"]
            == 4
        )
        assert head(thread).state["limit"] == 8

        first = thread.at(step=0)
        assert first is not None
        with pytest.raises(InvalidInput, match="n: int_parsing"):
            graph.replay_sync(thread, first, branch="x", set={"n": SECRET})
        replayed = graph.replay_sync(thread, first, branch="y", set={"n": "6"})
        while replayed.status is Status.INTERRUPTED:
            other = store.thread("t", branch="y")
            replayed = graph.resume_sync(other, {each.id: Approve() for each in replayed.interrupts})
        assert replayed.values["n"] == 6


def test_what_a_subgraph_gets_and_gives_back_is_validated() -> None:
    inner = Graph("inner", state=Order)
    inner.node("x", lambda state: {"n": "2"})
    inner.start("x")
    inner.end("x")
    loose = Graph("loose")
    loose.node("x", lambda state: {"n": SECRET})
    loose.start("x")
    loose.end("x")
    for nested, into, path in ((loose, {}, "n"), (inner, {"text": "n"}, "n")):
        graph = Graph("g", state=Order if nested is loose else None)
        graph.subgraph("sub", nested, into=into, out={"n": "n"})
        graph.start("sub")
        graph.end("sub")
        error = graph.run_sync(None, {} if nested is loose else {"text": SECRET}).error
        assert isinstance(error, BadUpdate)
        assert error.node == "sub"
        assert f"{path}: int_parsing" in str(error)
        assert SECRET not in str(error)


def test_a_limit_that_only_all_branches_together_pass_is_found() -> None:
    graph = Graph("g", state=Order)
    graph.node("s", lambda state: None)
    graph.node("a", lambda state: {"few": [1]})
    graph.node("b", lambda state: {"few": [2]})
    graph.parallel("s", ["a", "b"])
    graph.start("s")
    assert graph.run_sync(None, {}).values["few"] == [1, 2]
    error = graph.run_sync(None, {"few": [0]}).error
    assert isinstance(error, BadUpdate)
    assert (error.node, error.path) == ("b", "few")


def test_a_frozen_field_is_given_once_and_never_changed() -> None:
    assert graph_of(lambda state: None).run_sync(None, {"fixed": "5"}).values["fixed"] == 5
    error = graph_of(lambda state: {"fixed": 2}).run_sync(None, {}).error
    assert isinstance(error, BadUpdate)
    assert error.path == "fixed"


def test_validation_can_be_switched_off() -> None:
    graph = Graph("g", state=Order, validate=False)
    graph.node("a", lambda state: {"total": "x"})
    graph.start("a")
    graph.end("a")
    assert graph.run_sync(None, {"n": "abc", "total": "a"}).values["n"] == "abc"
