from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.frame import Continuation, End, FanOut, NextNode, continuation_from_plain

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
continuations = st.one_of(
    st.builds(NextNode, names),
    st.builds(FanOut, st.lists(names, min_size=1, max_size=5, unique=True).map(tuple), st.none() | names),
    st.builds(End),
)


@given(continuations)
def test_a_continuation_comes_back_equal_from_its_plain_form(continuation: Continuation) -> None:
    assert continuation_from_plain(continuation.to_plain()) == continuation


@given(continuations, continuations)
def test_different_continuations_have_different_plain_forms(a: Continuation, b: Continuation) -> None:
    assert (a == b) == (a.to_plain() == b.to_plain())


def test_the_plain_forms_are_tagged() -> None:
    assert NextNode("a").to_plain() == {"kind": "node", "node": "a"}
    assert FanOut(("a", "b"), "c").to_plain() == {"kind": "fanout", "targets": ["a", "b"], "join": "c"}
    assert End().to_plain() == {"kind": "end"}


def test_targets_keep_their_order_and_later_changes_of_the_list_do_not_show() -> None:
    targets: Any = ["b", "a"]
    fan_out = FanOut(targets, None)

    targets.append("c")

    assert fan_out.targets == ("b", "a")
    assert hash(fan_out) == hash(FanOut(("b", "a")))


@pytest.mark.parametrize(
    ("targets", "join", "problem"),
    [
        ((), None, "no targets"),
        (("a", "a"), None, "twice"),
        ("ab", None, "targets must be a tuple, not str"),
        ({"a", "b"}, None, "targets must be a tuple, not set"),
        (None, None, "targets must be a tuple, not NoneType"),
        (("a", ""), None, "fan-out target is empty"),
        (("a",), "", "fan-out join is empty"),
    ],
)
def test_a_fan_out_that_cannot_run_is_refused(targets: Any, join: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        FanOut(targets, join)


def test_an_empty_node_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="next node is empty"):
        NextNode("")


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"kind": "loop"},
        {"kind": []},
        {"kind": "node"},
        {"kind": "end", "node": "a"},
        {"kind": "node", "node": "a", "join": "b"},
        [],
        ["kind"],
        "kind",
        None,
    ],
)
def test_what_is_no_continuation_is_refused_not_guessed(plain: Any) -> None:
    with pytest.raises(InvalidInput, match="not a continuation") as caught:
        continuation_from_plain(plain)

    assert caught.value.hint


def test_a_refused_field_of_a_plain_form_keeps_its_own_reason() -> None:
    with pytest.raises(InvalidInput, match="fan-out has no targets"):
        continuation_from_plain({"kind": "fanout", "targets": [], "join": None})
