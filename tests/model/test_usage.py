import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.fields import Usage
from backstay.model.ids import COUNT_MAX, check_count

costs = st.floats(min_value=0, max_value=1e300)
usages = st.builds(Usage, st.integers(0, 2**61), costs)


def test_nothing_used_is_the_default_and_is_valid() -> None:
    assert Usage() == Usage(tokens_used=0, cost_estimate=0.0)


def test_tokens_go_up_to_the_largest_signed_64_bit_number() -> None:
    assert Usage(COUNT_MAX).tokens_used == 2**63 - 1

    with pytest.raises(InvalidInput, match=r"tokens_used is 2\*\*63 or more"):
        Usage(COUNT_MAX + 1)


@pytest.mark.parametrize("tokens", [-1, -(2**70), True, 1.0, "1", None])
def test_tokens_that_are_no_count_are_refused_by_name(tokens: Any) -> None:
    with pytest.raises(InvalidInput, match="tokens_used is") as caught:
        Usage(tokens_used=tokens)

    assert caught.value.hint


@pytest.mark.parametrize("cost", [math.nan, math.inf, -math.inf, -0.01, -1, 10**400, True, "1", None, 1j])
def test_a_cost_that_some_reader_could_not_take_is_refused_by_name(cost: Any) -> None:
    with pytest.raises(InvalidInput, match="cost_estimate is") as caught:
        Usage(cost_estimate=cost)

    assert caught.value.hint


def test_a_cost_is_always_kept_as_float_and_never_as_minus_zero() -> None:
    assert type(Usage(cost_estimate=3).cost_estimate) is float
    assert math.copysign(1, Usage(cost_estimate=-0.0).cost_estimate) == 1


@given(usages, usages)
def test_adding_adds_both_numbers_and_order_does_not_matter(a: Usage, b: Usage) -> None:
    assert a + b == Usage(a.tokens_used + b.tokens_used, a.cost_estimate + b.cost_estimate)
    assert a + b == b + a
    assert a + Usage() == a


def test_a_sum_that_leaves_the_bounds_is_refused() -> None:
    with pytest.raises(InvalidInput, match="tokens_used"):
        Usage(COUNT_MAX) + Usage(1)
    with pytest.raises(InvalidInput, match="cost_estimate is inf"):
        Usage(0, 1.7e308) + Usage(0, 1.7e308)


def test_usage_adds_only_to_usage() -> None:
    with pytest.raises(TypeError):
        Usage() + 1  # type: ignore[operator]  # the point of the test


def test_usage_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Usage().tokens_used = 1  # type: ignore[misc]  # the point of the test


def test_a_count_may_have_another_lower_bound() -> None:
    assert check_count(1, "visit", least=1) == 1

    with pytest.raises(InvalidInput, match="visit is less than 1"):
        check_count(0, "visit", least=1)
