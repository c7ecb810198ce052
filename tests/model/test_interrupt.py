import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.decision import PROMPT_LENGTH_MAX, Interrupt, InterruptKind
from backstay.model.ids import ID_LENGTH_MAX

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=ID_LENGTH_MAX)
interrupts = st.builds(
    Interrupt,
    id=names,
    kind=st.sampled_from(InterruptKind),
    node=st.none() | names,
    payload=st.none() | st.dictionaries(st.text(), st.integers()),
    prompt=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50),
)


def test_there_are_four_kinds_with_the_wire_names_of_the_source() -> None:
    assert {kind.name: str(kind) for kind in InterruptKind} == {
        "BEFORE_NODE": "beforenode",
        "AFTER_NODE": "afternode",
        "TOOL_APPROVAL": "toolapproval",
        "USER_REQUEST": "userrequest",
    }


def test_a_kind_is_a_small_value_that_compares_with_its_wire_name_and_survives_copies() -> None:
    kind = InterruptKind.TOOL_APPROVAL

    assert kind == InterruptKind("toolapproval") == "toolapproval"
    assert kind != InterruptKind.BEFORE_NODE
    assert copy.deepcopy(kind) is pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize("kind", InterruptKind)
def test_a_kind_may_be_given_by_its_wire_name(kind: InterruptKind) -> None:
    given_as_text: Any = kind.value

    interrupt = Interrupt(id="i1", kind=given_as_text)

    assert interrupt.kind is kind
    assert interrupt == Interrupt(id="i1", kind=kind)


@pytest.mark.parametrize("kind", ["", "BeforeNode", "before_node", "beforenode ", None, 1, [], {}])
def test_an_unknown_kind_is_refused_and_the_known_ones_are_named(kind: Any) -> None:
    with pytest.raises(InvalidInput, match=r"kind .* is not known") as caught:
        Interrupt.from_plain({"id": "i1", "kind": kind})

    assert "beforenode, afternode, toolapproval, userrequest" in str(caught.value)


@given(interrupts)
def test_an_interrupt_comes_back_equal_from_its_plain_form(interrupt: Interrupt) -> None:
    plain = interrupt.to_plain()

    assert type(plain["kind"]) is str
    assert Interrupt.from_plain(plain) == interrupt
    assert hash(Interrupt.from_plain(plain)) == hash(interrupt)
    assert pickle.loads(pickle.dumps(interrupt)) == interrupt


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": ""}, "interrupt id"),
        ({"node": ""}, "interrupt node"),
        ({"node": 1}, "interrupt node"),
        ({"prompt": None}, "interrupt prompt"),
        ({"prompt": "x" * (PROMPT_LENGTH_MAX + 1)}, "interrupt prompt"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        replace(Interrupt(id="i1", kind=InterruptKind.USER_REQUEST), **changes)


def test_the_longest_prompt_is_taken() -> None:
    prompt = "x" * PROMPT_LENGTH_MAX

    assert Interrupt(id="i1", kind=InterruptKind.USER_REQUEST, prompt=prompt).prompt == prompt


@pytest.mark.parametrize("plain", [{}, {"id": "i1"}, {"id": "i1", "kind": "beforenode", "more": 1}, [], None, {1: 2}])
def test_what_is_no_interrupt_is_refused_not_guessed(plain: Any) -> None:
    with pytest.raises(InvalidInput, match="not an interrupt"):
        Interrupt.from_plain(plain)
