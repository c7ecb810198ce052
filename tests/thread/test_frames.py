"""The short form of frames says no less than the long one, and a step's own notes are small."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay.codec import encode
from backstay.errors import DecodeError
from backstay.model.frame import Continuation, End, FanOut, Frame, FrameStack, NextNode, Task
from backstay.operations.rows import read_frames, shorten_frames

NAMES = st.sampled_from(["plan", "search", "answer"])
TODO: st.SearchStrategy[Continuation | None] = st.one_of(
    st.none(), st.builds(NextNode, NAMES), st.just(End()), st.just(FanOut(("plan", "search"), "answer"))
)
FRAMES = st.builds(
    Frame,
    graph_id=st.sampled_from(["outer", "inner"]),
    node_id=NAMES,
    cursor=st.integers(0, 3),
    visit=st.integers(1, 3),
    fanout_key=st.none() | NAMES,
    state=st.dictionaries(NAMES, st.integers(), max_size=2),
    last_node=st.none() | NAMES,
    continuation=TODO,
    visits=st.dictionaries(NAMES, st.integers(0, 3)),
    passed=st.booleans(),
    path=st.lists(NAMES, max_size=3).map(tuple),
    tasks=st.lists(st.builds(Task, node=NAMES, done=st.booleans()), max_size=2).map(tuple),
    waits=st.lists(NAMES, max_size=2).map(tuple),
    steps=st.integers(0, 3),
)


@given(st.lists(FRAMES, max_size=4), st.booleans())
def test_any_frames_come_back_equal(frames: list[Frame], shares_state: bool) -> None:
    stack = FrameStack(tuple(frames))
    plain = stack.to_plain()
    if plain and shares_state:
        del plain[0]["state"]

    assert read_frames(shorten_frames(plain), dict(frames[0].state) if frames else {}) == stack
    assert read_frames(plain, dict(frames[0].state) if frames else {}) == stack


def test_a_node_in_a_loop_takes_a_few_bytes() -> None:
    looping = Frame(
        graph_id="chat",
        node_id="agent",
        cursor=1000,
        visit=1001,
        last_node="agent",
        continuation=NextNode("agent"),
        visits={"agent": 1000},
        steps=1000,
    ).to_plain()
    del looping["state"], looping["fanout_key"]

    assert len(encode(shorten_frames([looping]))) < len("chat" + "agent" * 3) + 16


@pytest.mark.parametrize(
    "stored",
    [
        [[]],
        [["g"]],
        ["g"],
        [None],
        [[1, None, None, 0, {}]],
        [["g", None, None, "0", {}]],
        [["g", "a", None, 0, {}, {}, {}]],
    ],
)
def test_what_is_no_frame_is_refused(stored: list[Any]) -> None:
    with pytest.raises(DecodeError, match="does not have a known form"):
        read_frames(stored, {})


@pytest.mark.parametrize(
    "run_id",
    [
        "01a1e2d8-0fb7-7000-9135-c173d0ce4755",
        "01A1E2D8-0FB7-7000-9135-C173D0CE4755",
        "01a1e2d80fb7-7000-9135-c173d0ce4755-",
        "run 7",
    ],
)
def test_a_run_id_comes_back_as_it_was(run_id: str) -> None:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        thread.save({"a": 1}, run_id=run_id, attempt=2, tokens_used=3, cost_estimate=0.5, trigger="node", graph="g")
        (meta,) = thread.history()
        assert (meta.run_id, meta.attempt, meta.tokens_used, meta.cost_estimate) == (run_id, 2, 3, 0.5)
        assert [found.id for found in thread.history(graph="g", trigger="node")] == [meta.id]
        assert list(thread.history(graph="h")) == []
