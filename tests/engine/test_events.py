"""Events, and the log that tells whether their order makes sense."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.engine.events import (
    CheckpointSaved,
    DecisionTaken,
    EffectReplayed,
    Event,
    Interrupted,
    Missed,
    NodeAttemptFailed,
    NodeFinished,
    NodeStarted,
    RunEnded,
    RunStarted,
    SinkFailed,
    Token,
)
from backstay.model.decision import DecisionKind, Interrupt, InterruptKind
from support.engine.event_log import EventLog

ASKED = Interrupt(id="i-1", kind=InterruptKind.BEFORE_NODE, node="b", payload={"secret": 1})

WHOLE: list[Event] = [
    RunStarted("r", "g", 2, True),
    CheckpointSaved("c-0", 0, "input"),
    NodeStarted("g/a#1", "a", 1, None, 1),
    NodeAttemptFailed("g/a#1", "a", 1, "TimeoutError", True, 0.5),
    NodeStarted("g/a#1", "a", 1, None, 2),
    EffectReplayed("g/a#1", "charge"),
    Token("g/a#1", "a", {"secret": 1}),
    NodeFinished("g/a#1", "a", ("x",), 0.1, {"x": "secret"}),
    CheckpointSaved("c-1", 1, "node", "a"),
    DecisionTaken("i-0", DecisionKind.APPROVE),
    Missed(3),
    NodeStarted("g/b#1[l]", "b", 1, "l"),
    NodeStarted("g/b#1[r]", "b", 1, "r"),
    NodeFinished("g/b#1[r]", "b"),
    NodeFinished("g/b#1[l]", "b"),
    SinkFailed("MemorySink", "EncodeError", 3, "node"),
    NodeStarted("g/c#1", "c"),
    Interrupted(ASKED),
    CheckpointSaved(None, 3, "interrupt", "b"),
    RunEnded("interrupted", "r", 3, "c-1"),
]


def refused(events: list[Event], why: str = "Run|running") -> None:
    with pytest.raises(AssertionError, match=why):
        EventLog(events).check()


def test_there_is_an_event_for_all_that_a_watcher_must_see_and_the_example_has_each() -> None:
    assert {type(event) for event in WHOLE} == set(get_args(Event))


@pytest.mark.parametrize("event", WHOLE, ids=lambda event: type(event).__name__)
def test_an_event_is_a_value_that_shows_no_data(event: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(event)[0].name, "changed")
    assert event == replace(event)
    assert hash(event) == hash(replace(event))
    assert not hasattr(event, "__dict__")
    assert "secret" not in repr(event)


def test_a_log_collects_what_it_is_called_with() -> None:
    log = EventLog()
    for event in WHOLE:
        log(event)

    assert (list(log), len(log)) == (WHOLE, len(WHOLE))
    assert log.of(NodeAttemptFailed) == [WHOLE[3]]
    log.check()


def test_a_run_that_was_cancelled_may_leave_nodes_behind_one_that_completed_may_not() -> None:
    begun: list[Event] = [RunStarted("r", "g"), NodeStarted("g/a#1", "a")]

    EventLog([*begun, RunEnded("cancelled", "r")]).check()
    EventLog([*begun, RunEnded("failed", "r")]).check()
    refused([*begun, RunEnded("completed", "r")], "completed while g/a#1 was running")


@pytest.mark.parametrize(
    ("why", "events"),
    [
        ("no RunEnded after 0 events", []),
        ("no RunEnded", WHOLE[:-1]),
        ("after RunEnded", [*WHOLE, WHOLE[-1]]),
        ("after RunEnded", [*WHOLE, NodeStarted("g/d#1", "d")]),
        ("before RunStarted", WHOLE[1:]),
        ("has started already", [WHOLE[0], *WHOLE]),
        ("attempt 0 is less than 1", [RunStarted("r", "g", 0), *WHOLE[1:]]),
        ("run 'r' ends as 's'", [*WHOLE[:-1], RunEnded("failed", "s", 3)]),
        ("g/a#1 is running already", [*WHOLE[:3], *WHOLE[2:]]),
        ("g/a#1 has finished already", [*WHOLE[:9], NodeStarted("g/a#1", "a", attempt=3), *WHOLE[9:]]),
        ("not to be tried again", [*WHOLE[:3], NodeAttemptFailed("g/a#1", "a", 1, "KeyError"), *WHOLE[4:]]),
        ("attempt 1 after 1", [*WHOLE[:4], WHOLE[2], *WHOLE[5:]]),
        ("attempt 0 after none", [*WHOLE[:2], NodeStarted("g/a#1", "a", attempt=0), *WHOLE[3:]]),
        ("g/a#1 is not running", [*WHOLE[:2], *WHOLE[3:]]),
        ("g/a#1 is not running", [*WHOLE[:8], WHOLE[7], *WHOLE[8:]]),
        ("g/a#1 is not running", [*WHOLE[:8], WHOLE[6], *WHOLE[8:]]),
        ("g/a#1 is not running", [*WHOLE[:2], WHOLE[5], *WHOLE[2:]]),
        ("began as 'a' and ends as 'b'", [*WHOLE[:7], NodeFinished("g/a#1", "b"), *WHOLE[8:]]),
        ("attempt 1 ends as attempt 2", [*WHOLE[:3], NodeAttemptFailed("g/a#1", "a", 2, "KeyError"), *WHOLE[4:]]),
        ("step 0 comes after step 1", [*WHOLE[:9], WHOLE[1], *WHOLE[9:]]),
        ("step 2 comes after step 3", [*WHOLE[:-1], RunEnded("failed", "r", 2)]),
    ],
)
def test_what_cannot_be_one_runs_events_is_refused_with_the_reason(why: str, events: list[Event]) -> None:
    refused(events, why)


@given(st.data())
def test_a_log_that_lost_or_repeats_a_start_or_an_end_is_refused(data: st.DataObject) -> None:
    """Side by side or one after the other: the whole passes; with one less, or one twice, it does not."""
    events: list[Event] = [RunStarted("r", "g")]
    running: list[str] = []
    for number in range(data.draw(st.integers(1, 8))):
        one_is_done = data.draw(st.booleans())
        if running and one_is_done:
            done = running.pop(data.draw(st.integers(0, len(running) - 1)))
            events.append(NodeFinished(done, "n"))
        running.append(f"g/n#{number}")
        events.append(NodeStarted(running[-1], "n"))
    events += [NodeFinished(position, "n") for position in running]
    events.append(RunEnded("completed", "r"))
    EventLog(events).check()
    index = data.draw(st.integers(0, len(events) - 1))

    refused(events[:index] + events[index + 1 :])
    refused([*events[: index + 1], events[index], *events[index + 1 :]], "already|not running|after RunEnded")
