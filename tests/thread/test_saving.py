"""Saving and loading through the public names."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings

import backstay
from backstay.errors import IdTaken
from backstay.model.decision import Interrupt, InterruptKind
from backstay.model.frame import FanOut, Frame, FrameStack
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_services
from support.meanwhile import Meanwhile
from support.running import effort
from support.strategies import same, states

MESSAGES = [{"role": "user", "content": "hello " * 60}, {"role": "assistant", "content": "hi " * 100}]


def test_an_unsaved_thread_has_no_latest(thread: backstay.Thread) -> None:
    assert thread.latest() is None
    assert thread.at(1) is None
    assert list(thread.history()) == []


def test_what_was_saved_is_what_latest_returns(thread: backstay.Thread) -> None:
    thread.save({"messages": MESSAGES, "plan": "search"}, next_node="search", tags=["before-search"])
    latest = thread.latest()

    assert latest is not None
    assert latest.state == {"messages": MESSAGES, "plan": "search"}
    assert (latest.step, latest.next_node, latest.tags) == (1, "search", ("before-search",))


def test_what_was_just_saved_is_shown_without_asking_the_store(url: str) -> None:
    watched = Meanwhile(open_backend(url))
    with Store(watched, make_services("", None)) as store:
        thread = store.thread("t")
        first = thread.save({"items": [1], "plan": "a"})
        second = thread.append({"items": [2]}, set={"plan": "b"})
        before = watched.calls
        assert second.state == {"items": [1, 2], "plan": "b"}
        assert second.frames == FrameStack()
        assert watched.calls == before

        second.state["mine"] = True
        assert second.writes == ()  # only the store knows whether there are any
        assert second.state["mine"]
        assert first.state == {"items": [1], "plan": "a"}  # the handle has another one in memory now
        assert watched.calls > before


@settings(max_examples=5 * effort())
@given(states())
def test_any_state_the_codec_accepts_comes_back_the_same(state: dict[str, Any]) -> None:
    with backstay.open("memory:") as store:
        store.thread("t").save(state)
        latest = store.thread("t").latest()

        assert latest is not None
        assert same(latest.state, state)
        assert list(latest.state) == list(state)


def test_every_described_field_comes_back(thread: backstay.Thread) -> None:
    frames = (
        FrameStack()
        .push(Frame(graph_id="outer", node_id="call", cursor=3))
        .push(Frame(graph_id="inner", node_id="ask", cursor=1, visit=2, fanout_key="b", state={"q": "why"}))
    )
    given_notes: dict[str, Any] = {
        "run_id": "run-1",
        "attempt": 2,
        "graph": "outer",
        "graph_hash": 2**64 - 1,
        "last_node": "plan",
        "next_node": "ask",
        "continuation": FanOut(("a", "b"), "join"),
        "iteration": 7,
        "interrupt": Interrupt(id="i-1", kind=InterruptKind.TOOL_APPROVAL, node="ask", payload={"tool": "rm"}),
        "resume_hint": "approve?",
        "tokens_used": 1234,
        "cost_estimate": 0.5,
        "trigger": "tool_call",
        "label": "good",
        "summary": "two\nlines",
        "metadata": {"user": "u1", "n": 1, "nested": {"a": [1, 2]}},
        "frames": frames,
        "path": ["start", "plan"],
    }
    saved = thread.save({"messages": MESSAGES}, tags=["x"], **given_notes)
    loaded = thread.get(saved.id)

    assert loaded is not None
    for name, value in given_notes.items():
        expected = tuple(value) if name == "path" else value
        assert getattr(loaded, name) == expected, name
        assert getattr(saved, name) == expected, name
    assert loaded == saved


def test_typed_accessors_read_the_conventional_keys(thread: backstay.Thread) -> None:
    thread.save({"messages": [], "tool_results": None, "pending_tool_calls": [{"id": 1}], "pending_action": {"t": 1}})
    latest = thread.latest()

    assert latest is not None
    assert (latest.messages, latest.tool_results) == ([], None)
    assert (latest.pending_tool_calls, latest.pending_action) == ([{"id": 1}], {"t": 1})
    assert (latest.iteration, latest.tokens_used, latest.cost_estimate, latest.resume_hint) == (0, 0, 0.0, None)


def test_steps_count_from_one_and_go_on_after_a_restart(store: backstay.Store) -> None:
    for _ in range(3):
        store.thread("t").save({"n": 1})

    assert [meta.step for meta in store.thread("t").history()] == [3, 2, 1]
    assert store.thread("t").save({"n": 2}, step=10).step == 10
    assert store.thread("t").save({"n": 3}).step == 11


def test_a_step_that_is_not_higher_than_the_heads_is_refused_and_nothing_changes(thread: backstay.Thread) -> None:
    thread.save({"n": 1}, step=5)
    with pytest.raises(backstay.InvalidInput, match="step 5 is not higher"):
        thread.save({"n": 2}, step=5)

    assert thread.save({"n": 3}).step == 6
    assert [meta.step for meta in thread.history()] == [6, 5]


def test_each_checkpoint_names_the_one_before_it_as_its_parent(thread: backstay.Thread) -> None:
    first, second = thread.save({"n": 1}), thread.append(set={"n": 2})

    assert (first.parent_id, second.parent_id) == (None, first.id)


def test_append_extends_lists_replaces_and_removes_keys(thread: backstay.Thread) -> None:
    thread.save({"messages": MESSAGES, "plan": "a", "scratch": 1})
    saved = thread.append({"messages": [{"role": "tool"}], "new": [1]}, set={"plan": "b"}, delete=["scratch"])

    assert saved.state == {"messages": [*MESSAGES, {"role": "tool"}], "plan": "b", "new": [1]}


def test_append_also_works_after_a_restart_and_extends_text_and_bytes(store: backstay.Store) -> None:
    store.thread("t").save({"log": "é" * 400, "raw": b"\x00" * 400, "items": list(range(400))})
    store.thread("t").append({"log": "ü", "raw": b"\x01", "items": [400]})
    latest = store.thread("t").latest()

    assert latest is not None
    assert latest.state == {"log": "é" * 400 + "ü", "raw": b"\x00" * 400 + b"\x01", "items": list(range(401))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"append": {"plan": ["x"]}}, "is not a list"),
        ({"append": {"messages": "text"}}, "is not text"),
        ({"append": {"messages": {"role": "x"}}}, "must be a list, text or bytes"),
        ({"append": ["x"]}, "must be a mapping"),
        ({"append": {"messages": []}, "set": {"messages": []}}, "both extended and replaced"),
        ({"delete": ["nothing"]}, "not in the state"),
        ({"delete": "plan"}, "must be a list of names"),
        ({"set": {"plan": 1}, "delete": ["plan"]}, "both changed and deleted"),
    ],
)
def test_a_change_of_the_wrong_shape_is_refused_and_nothing_changes(
    thread: backstay.Thread, change: dict[str, Any], words: str
) -> None:
    before = thread.save({"messages": MESSAGES, "plan": "a"})
    with pytest.raises(backstay.InvalidInput, match=words):
        thread.append(**change)

    assert [meta.id for meta in thread.history()] == [before.id]
    assert thread.append(set={"plan": "b"}).parent_id == before.id


def test_in_place_changes_of_what_was_saved_are_seen_by_the_next_save(thread: backstay.Thread) -> None:
    state = {"messages": [dict(message) for message in MESSAGES]}
    thread.save(state)
    state["messages"][0]["content"] = "changed in place"
    thread.save(state)
    first, latest = thread.at(1), thread.latest()

    assert first is not None
    assert latest is not None
    assert first.state["messages"] == MESSAGES
    assert latest.state == state


def test_later_changes_of_the_callers_objects_do_not_alter_a_checkpoint(thread: backstay.Thread) -> None:
    state: dict[str, Any] = {"messages": [1, 2], "nested": {"a": [1]}}
    metadata = {"user": "u1"}
    saved = thread.save(state, metadata=metadata)
    state["messages"].append(3)
    state["nested"]["a"].append(2)
    metadata["user"] = "u2"
    loaded = thread.get(saved.id)

    assert loaded is not None
    assert (loaded.state, loaded.metadata) == ({"messages": [1, 2], "nested": {"a": [1]}}, {"user": "u1"})
    assert saved.metadata == {"user": "u1"}


def test_a_frozen_save_writes_only_what_was_appended_and_trusts_identity(thread: backstay.Thread) -> None:
    state: dict[str, Any] = {"messages": [{"n": number, "text": "x" * 200} for number in range(50)], "plan": "a"}
    thread.save(state, frozen=True)
    state["messages"].append({"n": 50, "text": "y" * 200})
    state["plan"] = "b"
    saved = thread.save(state, frozen=True)
    state["messages"][3] = {"n": 3, "text": "replaced"}
    again = thread.save(state, frozen=True)

    assert len(saved.state["messages"]) == 51
    assert again.state == state


@pytest.mark.parametrize("frozen", [False, True])
def test_the_path_of_an_item_that_cannot_be_stored_has_its_index(thread: backstay.Thread, frozen: bool) -> None:
    state: dict[str, Any] = {"messages": [{"n": number} for number in range(50)]}
    thread.save(state, frozen=True)
    state["messages"].append({"n": object()})
    with pytest.raises(backstay.EncodeError) as caught:
        thread.save(state, frozen=frozen)

    assert caught.value.path == "state.messages[50].n"


def test_a_checkpoint_that_was_replaced_does_not_show_the_state_of_the_new_one(thread: backstay.Thread) -> None:
    old = thread.save({"n": 1}, id="cp-1")
    new = thread.save({"n": 2}, id="cp-1", replace=True)

    assert new.state == {"n": 2}
    with pytest.raises(backstay.NotFound, match="cp-1 was replaced after it was saved"):
        _ = old.state


def test_the_loaded_state_is_the_callers_to_change(thread: backstay.Thread) -> None:
    thread.save({"messages": [1]})
    first = thread.latest()
    assert first is not None
    first.state["messages"].append(2)
    second = thread.latest()

    assert second is not None
    assert second.state == {"messages": [1]}


def test_saving_the_same_id_with_the_same_content_gives_the_first_result(store: backstay.Store) -> None:
    first = store.thread("t").save({"n": [1, 2]}, id="cp-1", next_node="a")
    again = store.thread("t").save({"n": [1, 2]}, id="cp-1", next_node="a")

    assert (again.seq, again.digest, again.step) == (first.seq, first.digest, first.step)
    assert len(list(store.thread("t").history())) == 1


def test_a_retried_append_gives_the_first_result_also_after_others_went_on(store: backstay.Store) -> None:
    thread = store.thread("t")
    thread.save({"m": ["x" * 300]})
    first = thread.append({"m": ["y" * 300]}, id="retry-me")
    thread.append({"m": ["z"]})
    again = store.thread("t").append({"m": ["y" * 300]}, id="retry-me")

    assert again.seq == first.seq
    assert len(list(thread.history())) == 3


@pytest.mark.parametrize("other", [{"n": 2}, {"n": 1, "m": 1}, {"n": 1.0}, {"n": True}])
def test_saving_the_same_id_with_other_content_is_refused(store: backstay.Store, other: dict[str, Any]) -> None:
    store.thread("t").save({"n": 1}, id="cp-1")
    for thread in (store.thread("t"), store.thread("another")):
        with pytest.raises(IdTaken, match="exists with other content"):
            thread.save(other, id="cp-1")

    assert [meta.thread_id for meta in store.threads()] == ["t"]


def test_a_save_can_be_repeated_although_its_parent_was_deleted(store: backstay.Store) -> None:
    thread = store.thread("t")
    first = thread.save({"log": ["x" * 300], "n": 1})
    saved = thread.append({"log": ["y" * 300]}, set={"n": 2}, id="cp-1")
    thread.delete_checkpoint(first.id)
    again = store.thread("t").append({"log": ["y" * 300]}, set={"n": 2}, id="cp-1")

    assert (again.seq, again.digest) == (saved.seq, saved.digest)
    for other in ({"log": ["z" * 300]}, {"other": ["y" * 300]}):
        with pytest.raises(backstay.Conflict, match="other content"):
            store.thread("t").append(other, set={"n": 2}, id="cp-1")
    with pytest.raises(backstay.Conflict, match="other content"):
        store.thread("t").append({"log": ["y" * 300]}, set={"n": 3}, id="cp-1")


def test_the_newest_checkpoint_can_be_stored_anew_under_its_own_id(store: backstay.Store) -> None:
    thread = store.thread("t")
    thread.save({"n": 0})
    thread.save({"m": ["x" * 300]}, id="cp-1")
    child = thread.fork("cp-1", branch="side")
    replaced = thread.save({"m": ["y" * 300]}, id="cp-1", replace=True, next_node="b")
    latest = store.thread("t").latest()
    side = child.latest()

    assert latest is not None
    assert side is not None
    assert (latest.state, latest.next_node, latest.seq) == ({"m": ["y" * 300]}, "b", replaced.seq)
    assert side.state == {"m": ["x" * 300]}
    assert len(list(thread.history())) == 2
    thread.save({"n": 3})
    with pytest.raises(backstay.Conflict, match="cannot be replaced"):
        thread.save({"n": 4}, id="cp-1", replace=True)


def test_a_replacement_that_was_stored_but_not_acknowledged_can_be_repeated(store: backstay.Store) -> None:
    """The handle did not learn that it was stored; here another handle stored it."""
    mine, other = store.thread("t"), store.thread("t")
    mine.save({"n": 0})
    mine.save({"n": 1}, id="cp-1", tags=["old"])
    other.latest()
    first = other.save({"n": 2, "m": ["x" * 300]}, id="cp-1", replace=True, tags=["new"])
    with pytest.raises(backstay.Conflict):
        mine.save({"n": 3}, id="cp-1", replace=True)
    again = mine.save({"n": 2, "m": ["x" * 300]}, id="cp-1", replace=True, tags=["new"])

    assert (again.seq, again.digest, again.state) == (first.seq, first.digest, first.state)
    assert mine.append({"m": ["more"]}).seq == first.seq + 1
    assert store.check()


def test_a_handle_whose_head_was_overtaken_gets_conflict_with_the_winner(store: backstay.Store) -> None:
    mine, other = store.thread("t"), store.thread("t")
    mine.save({"n": 1})
    other.latest()
    winner = other.save({"n": 2})
    with pytest.raises(backstay.Conflict) as caught:
        mine.save({"n": 3})

    assert caught.value.winner == winner.meta
    assert winner.id in str(caught.value)
    with pytest.raises(backstay.Conflict):
        mine.append(set={"n": 4})
    assert [meta.id for meta in mine.history(limit=1)] == [winner.id]
    mine.latest()
    assert mine.save({"n": 3}).parent_id == winner.id


def test_two_handles_that_saw_an_empty_thread_cannot_both_begin_it(store: backstay.Store) -> None:
    one, two = store.thread("t"), store.thread("t")
    assert one.latest() is None
    assert two.latest() is None
    one.save({"n": 1})
    with pytest.raises(backstay.Conflict):
        two.save({"n": 2})


def test_a_save_can_name_the_checkpoint_it_builds_on(store: backstay.Store) -> None:
    thread = store.thread("t")
    first, second = thread.save({"n": 1}), thread.save({"n": 2})

    assert store.thread("t").save({"n": 3}, on=second).parent_id == second.id
    with pytest.raises(backstay.Conflict, match="is not the newest"):
        store.thread("t").save({"n": 4}, on=first.id)


def test_a_handle_survives_a_refused_value_and_goes_on(thread: backstay.Thread) -> None:
    thread.save({"m": ["x" * 500]})
    with pytest.raises(backstay.EncodeError, match=r"state\.m\[1\]"):
        thread.save({"m": ["x" * 500, object()]})
    with pytest.raises(backstay.EncodeError, match=r"append\.m\[0\]"):
        thread.append({"m": [object()]})
    with pytest.raises(backstay.EncodeError, match=r"metadata\.when"):
        thread.append({"m": ["y"]}, metadata={"when": object()})

    assert thread.append({"m": ["y"]}).state == {"m": ["x" * 500, "y"]}


def test_generated_ids_are_unique_and_sort_by_creation(thread: backstay.Thread) -> None:
    ids = [thread.save({"n": number}).id for number in range(20)]

    assert ids == sorted(set(ids))


def test_newest_is_the_last_saved_whatever_the_clock_says(store: backstay.Store, clock: Any) -> None:
    thread = store.thread("t")
    for number, hours in enumerate([0, -24, 1, -48, 1000, -3000]):
        clock.step(hours=hours)
        thread.save({"n": number})
    latest = store.thread("t").latest()

    assert latest is not None
    assert latest.state == {"n": 5}
    assert [meta.seq for meta in thread.history()] == [6, 5, 4, 3, 2, 1]


def test_pending_writes_come_with_their_checkpoint_in_order(thread: backstay.Thread) -> None:
    from backstay.model.checkpoint import Write

    thread.write("later", [Write("b", 0, "out", {"x": 1}), Write("a", 1, "out", (1, 2)), Write("a", 0, "err", None)])
    thread.save({"n": 1}, id="later")
    thread.write("later", [Write("a", 0, "err", "ignored")])
    latest = thread.latest()

    assert latest is not None
    assert [(write.task_id, write.index, write.value) for write in latest.writes] == [
        ("a", 0, None),
        ("a", 1, (1, 2)),
        ("b", 0, {"x": 1}),
    ]


def test_checkpoints_can_be_copied_and_carried_to_another_process(thread: backstay.Thread) -> None:
    saved = thread.save({"m": [1, (2,)]}, next_node="n", tags=["t"])
    latest = thread.latest()
    assert latest is not None
    for original in (saved, latest, saved.meta):
        for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            assert copied == original
            assert getattr(copied, "state", None) == getattr(original, "state", None)
            assert (copied.next_node, copied.created_at) == (original.next_node, original.created_at)
