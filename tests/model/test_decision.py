import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.decision import REASON_LENGTH_MAX, Decision, DecisionKind

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=50)
reasons = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50)
decisions = st.one_of(
    st.builds(Decision, kind=st.just(DecisionKind.APPROVE), scope=st.none() | names, reason=reasons),
    st.builds(Decision, kind=st.just(DecisionKind.ANSWER), value=st.none() | st.integers(), reason=reasons),
    st.builds(Decision, kind=st.just(DecisionKind.MODIFY), value=st.dictionaries(names, st.integers()), reason=reasons),
    st.builds(Decision, kind=st.just(DecisionKind.REROUTE), target=names, reason=reasons),
    st.builds(Decision, kind=st.sampled_from([DecisionKind.REJECT, DecisionKind.DEFER]), reason=reasons),
)


def test_there_are_six_kinds() -> None:
    assert [str(kind) for kind in DecisionKind] == ["approve", "modify", "reject", "defer", "reroute", "answer"]


@pytest.mark.parametrize("kind", ["approve", "reject", "defer"])
def test_a_kind_may_be_given_by_its_wire_name(kind: Any) -> None:
    assert Decision(kind=kind).kind is DecisionKind(kind)


@given(decisions)
def test_a_decision_comes_back_equal_from_its_plain_form(decision: Decision) -> None:
    plain = decision.to_plain()

    assert type(plain["kind"]) is str
    assert Decision.from_plain(plain) == decision
    assert hash(Decision.from_plain(plain)) == hash(decision)
    assert pickle.loads(pickle.dumps(decision)) == copy.deepcopy(decision) == decision


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "approved"}, "unknown decision"),
        ({"kind": None}, "unknown decision"),
        ({"kind": []}, "unknown decision"),
        ({"kind": "modify"}, "needs a value"),
        ({"kind": "reroute"}, "needs a target"),
        ({"kind": "approve", "value": 1}, "takes no value"),
        ({"kind": "reject", "value": False}, "takes no value"),
        ({"kind": "reject", "scope": "all"}, "takes no scope"),
        ({"kind": "defer", "target": "node"}, "takes no target"),
        ({"kind": "approve", "scope": ""}, "decision scope"),
        ({"kind": "approve", "scope": 5}, "decision scope"),
        ({"kind": "reroute", "target": ""}, "decision target"),
        ({"kind": "approve", "reason": None}, "decision reason"),
        ({"kind": "approve", "reason": "x" * (REASON_LENGTH_MAX + 1)}, "decision reason"),
    ],
)
def test_what_is_no_decision_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Decision(**fields)


def test_the_longest_reason_is_taken() -> None:
    reason = "x" * REASON_LENGTH_MAX

    assert Decision(kind=DecisionKind.REJECT, reason=reason).reason == reason


@pytest.mark.parametrize("plain", [{}, {"kind": "approve", "more": 1}, [], None, {1: 2}])
def test_what_is_no_plain_decision_is_refused_not_guessed(plain: Any) -> None:
    with pytest.raises(InvalidInput, match="not a decision"):
        Decision.from_plain(plain)
