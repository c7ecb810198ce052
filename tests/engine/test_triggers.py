"""Triggers, asked about moments of a real live state; no graph is run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.engine.sinks import MemorySink
from backstay.engine.state import RunState, Schema
from backstay.engine.triggers import (
    FORCED,
    Cause,
    CheckpointEvent,
    Trigger,
    any_of,
    barrier_only,
    every,
    every_node,
    manual,
    on_mutation,
)
from backstay.errors import InvalidInput
from backstay.model.frame import Frame, FrameStack

LIVE = RunState(Schema(None, {}), {"x": 0})


def moment(step: int = 1, **facts: Any) -> CheckpointEvent:
    described = {"node_id": "a", "graph_id": "g", "run_id": "r", "mutated": False, **facts}
    return CheckpointEvent(
        step=step, frames=lambda: FrameStack((Frame(graph_id="g", node_id="a"),)), run_state=LIVE, **described
    )


class Hands:
    """A clock that goes where it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def passed(trigger: Trigger, moments: list[CheckpointEvent]) -> list[int]:
    """Return the steps of the moments that one run would tell its sink."""
    counter = trigger.start()
    return [each.step for each in moments if counter.wants(each)]


ALL: list[Callable[[], Trigger]] = [
    every_node,
    barrier_only,
    on_mutation,
    manual,
    lambda: every(n=1000),
    lambda: every(seconds=1000),
    lambda: any_of(manual(), barrier_only()),
    lambda: any_of(),
]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("cause", sorted(FORCED))
def test_how_a_run_begins_waits_and_ends_passes_every_trigger(make: Callable[[], Trigger], cause: Cause) -> None:
    assert passed(make(), [moment(1, trigger=cause), moment(2, trigger=cause)]) == [1, 2]


@pytest.mark.parametrize("make", ALL)
def test_what_a_node_asked_for_passes_every_trigger(make: Callable[[], Trigger]) -> None:
    assert passed(make(), [moment(1, requested=True), moment(2, trigger="manual", requested=True)]) == [1, 2]


def test_no_two_triggers_let_the_same_through() -> None:
    moments = [
        moment(1, mutated=True),
        moment(2),
        moment(3, at_barrier=True),
        moment(4, mutated=True),
        moment(5, requested=True),
        moment(6),
        moment(7, trigger="end"),
    ]

    assert passed(every_node(), moments) == [1, 2, 3, 4, 5, 6, 7]
    assert passed(on_mutation(), moments) == [1, 4, 5, 7]
    assert passed(barrier_only(), moments) == [3, 5, 7]
    assert passed(manual(), moments) == [5, 7]


def test_every_n_commits_counted_from_the_last_that_was_told() -> None:
    start = [moment(0, trigger="input")]

    assert passed(every(n=3), start + [moment(step) for step in range(1, 11)]) == [0, 3, 6, 9]
    assert passed(every(3), start + [moment(step, requested=step == 4) for step in range(1, 11)]) == [0, 3, 4, 7, 10]
    assert passed(every(n=1), [moment(step) for step in range(1, 4)]) == [1, 2, 3]


def test_every_so_many_seconds_counted_from_the_last_that_was_told() -> None:
    clock = Hands()
    clock.now = 100
    counter = every(seconds=10, clock=clock).start()

    def wants(now: float, **facts: Any) -> bool:
        clock.now = now
        return counter.wants(moment(**facts))

    assert [wants(now) for now in (101, 109.9, 110, 119, 125)] == [False, False, True, False, True]
    assert wants(130, requested=True)
    assert [wants(now) for now in (135, 139, 140)] == [False, False, True]


def test_any_of_lets_through_what_one_of_them_does_and_each_counts_for_itself() -> None:
    moments = [moment(step, at_barrier=step == 4) for step in range(1, 10)]

    assert passed(any_of(every(n=3), barrier_only()), moments) == [3, 4, 6, 9]
    assert passed(any_of(every(n=2), every(n=3)), moments) == [2, 3, 4, 6, 8, 9]


@pytest.mark.parametrize(
    "trigger", [every(n=2), every(seconds=5, clock=Hands()), any_of(every(n=2), manual())], ids=repr
)
def test_a_trigger_serves_many_runs_at_once_and_never_changes(trigger: Trigger) -> None:
    before = repr(trigger)
    one, other = trigger.start(), trigger.start()
    answers = [(one.wants(moment(step)), other.wants(moment(step))) for step in range(1, 5)]

    assert all(first == second for first, second in answers)
    assert one is not other
    assert passed(trigger, [moment(1)]) == []  # a new run begins anew, whatever the others counted
    assert repr(trigger) == before


def test_a_trigger_is_shown_as_it_was_made() -> None:
    made = any_of(every(n=10), every(seconds=2.5), barrier_only(), on_mutation(), every_node(), manual())

    assert repr(made) == (
        "any_of(every(n=10), every(seconds=2.5), barrier_only(), on_mutation(), every_node(), manual())"
    )


@pytest.mark.parametrize("given_", [{}, {"n": 0}, {"n": 1.0}, {"n": True}, {"seconds": -1}, {"seconds": float("inf")}])
def test_what_can_never_work_is_refused_when_it_is_made(given_: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        every(**given_)
    with pytest.raises(InvalidInput):
        every(n=1, seconds=1)
    with pytest.raises(InvalidInput, match="any_of"):
        any_of(every)  # type: ignore[arg-type]  # its brackets are missing: the mistake


def test_trigger_and_retention_combine_freely() -> None:
    """The trigger decides when the sink is told, the sink how much it keeps; neither knows of the other."""
    moments = [moment(step, mutated=step % 2 == 0, at_barrier=step % 5 == 0) for step in range(1, 21)]
    expected = {
        every_node: [18, 19, 20],
        on_mutation: [16, 18, 20],
        barrier_only: [10, 15, 20],
        manual: [],
    }
    for make, steps in expected.items():
        memory, counter = MemorySink(max_frames=3), make().start()
        for each in moments:
            if counter.wants(each):
                memory.on_checkpoint({"x": each.step}, each)
        assert [frame.cursor for frame in memory.frames] == steps


facts = st.fixed_dictionaries(
    {
        "trigger": st.sampled_from(get_args(Cause)) | st.just("node"),
        "mutated": st.booleans(),
        "at_barrier": st.booleans(),
        "requested": st.sampled_from([False, False, True]),
    }
)


@given(script=st.lists(facts, max_size=30), n=st.integers(1, 5))
def test_a_trigger_differs_from_manual_only_in_what_else_it_lets_through(script: list[dict[str, Any]], n: int) -> None:
    moments = [moment(step, **each) for step, each in enumerate(script)]
    always = {each.step for each in moments if each.trigger in FORCED or each.requested}

    assert set(passed(manual(), moments)) == always
    assert set(passed(barrier_only(), moments)) == always | {each.step for each in moments if each.at_barrier}
    assert set(passed(on_mutation(), moments)) == always | {each.step for each in moments if each.mutated}
    assert len(passed(every_node(), moments)) == len(moments)
    told = passed(every(n), moments)
    assert always <= set(told)
    # Between two that are told there are at most n - 1 that are not; and exactly so many before one not forced.
    gaps = [after - before for before, after in zip([-1, *told], [*told, len(moments)], strict=True)]
    assert all(gap <= n for gap in gaps)
    assert all(gap == n for gap, step in zip(gaps, told, strict=False) if step not in always)
