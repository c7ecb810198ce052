"""When a policy retries, and after how long."""

from __future__ import annotations

import random

import pytest

from backstay.errors import Conflict, Fenced, InvalidInput, OutcomeUnknown
from backstay.model.retry import RETRIES_MAX
from backstay.retry import ErrorCategory, RetryPolicy, Rules


class Still(random.Random):
    """A random source that always returns the middle."""

    def random(self) -> float:
        return 0.5


def test_the_defaults_are_three_retries_from_one_second_doubling_up_to_thirty() -> None:
    policy = RetryPolicy()

    assert (policy.retries, policy.attempts, policy.jitter) == (3, 4, 0.1)
    assert [policy.wait_s(attempt, Still()) for attempt in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


def test_waits_are_spread_by_chance_so_that_two_clients_do_not_come_back_at_once() -> None:
    policy = RetryPolicy()
    waits = [policy.wait_s(2, random.Random(seed)) for seed in range(200)]

    assert len(set(waits)) == 200
    assert 1.8 <= min(waits) < 1.85
    assert 2.15 < max(waits) <= 2.2
    assert policy.wait_s(2, random.Random(7)) == policy.wait_s(2, random.Random(7))


@pytest.mark.parametrize("factor", [2, 2.0, 1e300, 10**300])
def test_no_number_of_attempts_is_too_large_for_the_wait(factor: float) -> None:
    policy = RetryPolicy(retries=RETRIES_MAX, factor=factor, first_s=0.5)

    assert all(policy.wait_s(attempt, Still()) == 30 for attempt in (50, 64, 65, RETRIES_MAX, 10**6))
    assert RetryPolicy(first_s=0, factor=factor).wait_s(10**6, Still()) == 0


def test_a_wait_is_never_negative() -> None:
    policy = RetryPolicy(jitter=5.0)

    assert min(policy.wait_s(1, random.Random(seed)) for seed in range(50)) == 0


def test_by_default_only_what_may_pass_is_tried_again() -> None:
    policy = RetryPolicy(retries=1)

    assert [policy.wants(1, error) for error in (TimeoutError(), MemoryError(), ValueError(), Exception())] == [
        True,
        True,
        False,
        False,
    ]
    assert not policy.wants(2, TimeoutError())


def test_errors_to_retry_are_named_by_class_category_or_rule() -> None:
    assert RetryPolicy(on=(ValueError,)).wants(1, UnicodeError())
    assert not RetryPolicy(on=(ValueError,)).wants(1, TimeoutError())
    assert RetryPolicy(on=("logic", TimeoutError)).wants(1, KeyError())  # type: ignore[arg-type]  # by its name
    assert RetryPolicy(on=(ErrorCategory.SYSTEM,)).wants(1, RuntimeError())
    assert RetryPolicy(rules=Rules().add(RuntimeError, "resource")).wants(1, RuntimeError())


@pytest.mark.parametrize(
    "error", [Conflict("moved"), Fenced("lost", epoch=1, current=2), OutcomeUnknown("nobody knows")]
)
def test_an_unsafe_error_is_retried_only_if_its_own_class_is_named(error: Exception) -> None:
    assert not RetryPolicy(on=(Exception,)).wants(1, error)
    assert not RetryPolicy(on=tuple(ErrorCategory)).wants(1, error)
    assert RetryPolicy(on=(type(error),)).wants(1, error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": -1},
        {"retries": RETRIES_MAX + 1},
        {"retries": 1.0},
        {"retries": True},
        {"first_s": -1},
        {"cap_s": float("inf")},
        {"factor": float("nan")},
        {"jitter": "much"},
        {"on": ()},
        {"on": (BaseException,)},
        {"on": ("sometimes",)},
        {"on": 3},
        {"rules": {}},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        RetryPolicy(**wrong)  # type: ignore[arg-type]  # that is the point
