import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.frame import FRAME_DEPTH_MAX, Frame, FrameInfo, FrameStack

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
frames = st.builds(
    Frame,
    graph_id=names,
    node_id=names,
    cursor=st.integers(0, 2**63 - 1),
    visit=st.integers(1, 2**63 - 1),
    fanout_key=st.none() | names,
    state=st.dictionaries(st.text(), st.none() | st.integers() | st.lists(st.text())),
)
stacks = st.builds(FrameStack, st.lists(frames, max_size=5).map(tuple))


class Agent:
    """A run-time state with something in it that cannot be stored."""

    def __init__(self) -> None:
        self.plan = ["search"]
        self.socket = object()

    def snapshot(self) -> dict[str, Any]:
        return {"plan": list(self.plan)}


def frame(node_id: str = "n", **changes: Any) -> Frame:
    return replace(Frame(graph_id="g", node_id=node_id), **changes)


def test_a_frame_holds_its_graph_node_cursor_and_state_and_can_be_printed() -> None:
    made = Frame(graph_id="research", node_id="search", cursor=3, state={"query": "x"})

    assert (made.graph_id, made.node_id, made.cursor, made.state) == ("research", "search", 3, {"query": "x"})
    assert "graph_id='research'" in repr(made)


def test_a_stack_can_be_printed() -> None:
    shown = repr(FrameStack((frame("outer"), frame("inner"))))

    assert shown.index("node_id='outer'") < shown.index("node_id='inner'")


def test_a_position_tells_rounds_of_a_loop_and_parallel_runs_apart() -> None:
    made = frame(visit=2, fanout_key="doc-7")

    assert made.position == ("g", "n", 2, "doc-7")
    assert len({made.position, frame().position, frame(visit=2).position}) == 3


def test_a_frame_of_a_run_time_state_keeps_only_what_its_snapshot_gives() -> None:
    assert Frame.of("g", "n", Agent(), 4) == Frame(graph_id="g", node_id="n", cursor=4, state={"plan": ["search"]})


def test_a_frame_of_a_mapping_keeps_all_of_it_in_a_copy() -> None:
    state = {"a": 1}
    made = Frame.of("g", "n", state, 0)

    state["b"] = 2

    assert made.state == {"a": 1}


def test_a_key_named_snapshot_is_only_a_key() -> None:
    assert Frame.of("g", "n", {"snapshot": 1}, 0).state == {"snapshot": 1}


def test_later_changes_of_the_callers_dict_do_not_show_one_level_deep() -> None:
    inner = [1]
    state = {"inner": inner}
    made = frame(state=state)

    state.clear()
    inner.append(2)

    assert made.state == {"inner": [1, 2]}


def test_changing_the_plain_form_does_not_change_the_frame() -> None:
    made = frame(state={"a": 1})

    made.to_plain()["state"]["a"] = 2

    assert made.state == {"a": 1}


def test_frames_without_a_state_do_not_share_one() -> None:
    assert frame().state == {}
    assert frame().state is not frame().state


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"graph_id": ""}, "graph_id"),
        ({"node_id": None}, "node_id"),
        ({"cursor": -1}, "cursor"),
        ({"cursor": True}, "cursor"),
        ({"visit": 0}, "visit"),
        ({"fanout_key": ""}, "fanout_key"),
        ({"state": None}, "state of frame 'n' is NoneType"),
        ({"state": [("a", 1)]}, "state of frame 'n' is list"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field) as caught:
        frame(**changes)

    assert caught.value.hint


def test_a_run_time_state_that_cannot_be_projected_is_refused() -> None:
    unprojectable: Any = object()

    with pytest.raises(InvalidInput, match=r"not a mapping.*snapshot\(\)"):
        Frame.of("g", "n", unprojectable, 0)


@given(stacks)
def test_a_stack_survives_copies_and_its_plain_form(stack: FrameStack) -> None:
    assert FrameStack.from_plain(stack.to_plain()) == stack
    assert copy.deepcopy(stack) == stack
    assert pickle.loads(pickle.dumps(stack)) == stack
    assert hash(copy.deepcopy(stack)) == hash(stack)


@pytest.mark.parametrize("plain", [{}, {"graph_id": "g"}, {**frame().to_plain(), "more": 1}, [], None])
def test_what_is_no_frame_is_refused_not_guessed(plain: Any) -> None:
    with pytest.raises(InvalidInput, match="not a frame"):
        Frame.from_plain(plain)
    with pytest.raises(InvalidInput, match="not a frame"):
        FrameStack.from_plain([plain])


@pytest.mark.parametrize("plain", [None, {}, "frames"])
def test_what_is_no_list_of_frames_is_refused(plain: Any) -> None:
    with pytest.raises(InvalidInput, match="not a frame stack"):
        FrameStack.from_plain(plain)


def test_a_new_stack_is_empty_and_gives_nothing() -> None:
    stack = FrameStack()

    assert stack.is_empty
    assert not stack
    assert (stack.depth, len(stack), stack.frames, stack.path) == (0, 0, (), ())
    assert stack.current is None
    assert stack.pop() == (None, stack)


@given(stacks, frames)
def test_push_then_pop_gives_the_frame_and_the_stack_as_it_was(stack: FrameStack, top: Frame) -> None:
    pushed = stack.push(top)

    assert pushed.current == top
    assert pushed.depth == len(pushed) == stack.depth + 1
    assert pushed
    assert not pushed.is_empty
    assert pushed.frames == (*stack.frames, top)
    assert pushed.pop() == (top, stack)


@given(st.lists(frames, max_size=8))
def test_a_stack_gives_its_frames_outer_to_inner_and_pops_them_inner_to_outer(pushed: list[Frame]) -> None:
    stack = FrameStack()
    for one in pushed:
        stack = stack.push(one)

    assert list(stack) == list(stack.frames) == pushed
    assert stack.path == tuple(one.position for one in pushed)

    popped = []
    while stack:
        top, stack = stack.pop()
        popped.append(top)
    assert popped == pushed[::-1]


def test_moving_on_inside_a_graph_leaves_the_depth_as_it_is() -> None:
    stack = FrameStack().push(frame("outer")).push(frame("first"))

    _, outer = stack.pop()
    moved = outer.push(frame("second"))

    assert moved.depth == stack.depth == 2
    assert [one.node_id for one in moved] == ["outer", "second"]


def test_a_stack_that_is_used_as_a_history_is_refused_at_its_limit() -> None:
    full = FrameStack((frame(),) * FRAME_DEPTH_MAX)

    assert full.depth == FRAME_DEPTH_MAX
    with pytest.raises(InvalidInput, match=r"nested 101 deep; at most 100 are allowed\. Pop a frame"):
        full.push(frame())


def test_frames_of_different_state_shapes_share_one_stack() -> None:
    stack = FrameStack().push(frame(state={"messages": []})).push(Frame.of("sub", "n", Agent(), 0))

    assert [set(one.state) for one in stack] == [{"messages"}, {"plan"}]


@pytest.mark.parametrize(
    ("given_frames", "problem"), [(None, "NoneType"), ("ab", "str"), (({},), r"frames\[0\] is dict, not a Frame")]
)
def test_a_stack_of_something_else_is_refused(given_frames: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        FrameStack(given_frames)


def test_frames_and_stacks_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        frame().cursor = 1  # type: ignore[misc]  # the point of the test
    with pytest.raises(FrozenInstanceError):
        FrameStack().frames = ()  # type: ignore[misc]  # the point of the test


def test_a_frame_info_keeps_the_name_and_the_step_as_given() -> None:
    info = FrameInfo("search", 3)

    assert (info.node_id, info.step) == ("search", 3)
    assert FrameInfo("search", 0).step == 0


def test_a_frame_info_refuses_what_is_no_name_or_no_step() -> None:
    with pytest.raises(InvalidInput, match="node_id"):
        FrameInfo("", 1)
    with pytest.raises(InvalidInput, match="step"):
        FrameInfo("search", -1)
