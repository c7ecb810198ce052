"""Bad input: a typed error that says what, where and what next; nothing changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

import backstay
from backstay import errors
from backstay.model.fields import TEXT_LENGTH_MAX
from backstay.operations.arguments import KEY_LENGTH_MAX, KEYS_MAX

BAD_IDS: list[Any] = ["", "x" * 256, 5, None, b"bytes", {"$gt": ""}, ["t"], "nul\0", "\ud800"]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_ids_that_cannot_be_are_refused_everywhere(store: backstay.Store, bad: Any) -> None:
    thread = store.thread("t")
    saved = thread.save({"n": 1})
    calls: list[Callable[[], object]] = [
        lambda: store.thread(bad),
        lambda: store.thread("t", branch=bad),
        lambda: store.get(bad),
        lambda: store.thread(bad).delete(),
        lambda: thread.get(bad),
        lambda: thread.fork(saved, branch="b" if bad is None else bad, to=None if bad is not None else ""),
        lambda: thread.fork(-5 if bad == 5 else bad, branch="b"),  # a number is a step there
        lambda: thread.rewind(True if bad == 5 else bad),
        lambda: thread.tag(saved, bad),
        lambda: thread.tag(bad, "x"),
        lambda: thread.delete_checkpoint(bad),
    ]
    for call in calls:
        with pytest.raises(backstay.InvalidInput):
            call()
    if bad is not None:
        with pytest.raises(backstay.InvalidInput):
            thread.save({"n": 2}, id=bad)

    assert [meta.id for meta in thread.history(branch="*")] == [saved.id]


@pytest.mark.parametrize(
    "hostile", ["../x", "/etc/x", "..", "*", "?", "[a]", "CON", "a/b", "%2e", "x'\"", "\n", "x" * 255]
)
def test_hostile_but_possible_ids_are_just_names(store: backstay.Store, hostile: str) -> None:
    store.thread(hostile).save({"n": 1}, id=hostile)
    store.thread("other").save({"n": 2})

    assert store.get(hostile) is not None
    assert store.thread(hostile).delete().checkpoints == 1
    assert [meta.thread_id for meta in store.threads()] == ["other"]


@pytest.mark.parametrize(
    "notes",
    [
        {"cost_estimate": float("nan")},
        {"cost_estimate": float("inf")},
        {"cost_estimate": -0.1},
        {"tokens_used": -1},
        {"tokens_used": 1.5},
        {"tokens_used": True},
        {"iteration": -1},
        {"step": -1},
        {"step": "3"},
        {"step": True},
        {"attempt": 0},
        {"graph_hash": -1},
        {"graph_hash": 2**64},
        {"tags": "text"},
        {"tags": [""]},
        {"tags": [5]},
        {"tags": [str(number) for number in range(65)]},
        {"next_node": ""},
        {"trigger": None},
        {"summary": None},
        {"label": 5},
        {"metadata": [1]},
        {"metadata": {1: 2}},
        {"created_at": "2026-01-01"},
        {"created_at": datetime(2026, 1, 1)},
        {"interrupt": "beforenode"},
        {"continuation": "node"},
        {"frames": ["x"]},
        {"path": [1]},
        {"colour": "red"},
    ],
    ids=repr,
)
def test_impossible_notes_are_refused_and_nothing_changes(thread: backstay.Thread, notes: dict[str, Any]) -> None:
    with pytest.raises(backstay.InvalidInput):
        thread.save({"n": 1}, **notes)

    assert list(thread.history()) == []
    assert thread.save({"n": 1}).step == 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "state.x"),
        ({"a": [1, {"b": object()}]}, r"state.x.a\[1\].b"),
        (memoryview(b"x"), "state.x"),
        ("\ud800", "state.x"),
        ([{"k": "\udfff"}], r"state.x\[0\].k"),
        (lambda: None, "state.x"),
    ],
    ids=["object", "nested", "memoryview", "surrogate", "nested surrogate", "function"],
)
def test_a_value_that_could_not_come_back_equal_is_refused_by_its_path(
    thread: backstay.Thread, value: Any, path: str
) -> None:
    with pytest.raises(backstay.EncodeError, match=path) as caught:
        thread.save({"fine": 1, "x": value})

    assert caught.value.path is not None
    assert list(thread.history()) == []


@pytest.mark.parametrize("state", [None, [], "text", 5, {1: 2}, {b"x": 1}, {("a",): 1}, {"\ud800": 1}, {"k" * 4097: 1}])
def test_a_state_that_is_no_mapping_of_names_is_refused(thread: backstay.Thread, state: Any) -> None:
    for frozen in (False, True):
        with pytest.raises(backstay.InvalidInput):
            thread.save(state, frozen=frozen)

    assert list(thread.history()) == []


def test_errors_and_reprs_never_show_a_states_values(thread: backstay.Thread) -> None:
    saved = thread.save({"secret": "canary-1234"})
    with pytest.raises(backstay.EncodeError) as caught:
        thread.save({"secret": "canary-1234", "bad": {"canary-5678": object()}})
    latest = thread.latest()

    assert "canary-1234" not in f"{caught.value!s} {caught.value!r} {saved!r} {latest!r} {thread!r}"


@pytest.mark.parametrize("clock", [lambda: 5, lambda: datetime(2026, 1, 1)])
def test_a_clock_without_a_time_zone_is_refused_at_once(clock: Any) -> None:
    with pytest.raises(backstay.InvalidInput, match="time zone"):
        backstay.open("memory:", clock=clock)


@pytest.mark.parametrize("url", ["", "mysql://x", "x\0y", 5, "redis://localhost"])
def test_a_url_that_names_no_store_is_refused(url: Any) -> None:
    with pytest.raises((backstay.InvalidInput, TypeError)):
        backstay.open(url)


def test_each_kind_of_error_says_what_happened_in_its_own_words() -> None:
    assert str(errors.StoreError("disk on fire")) == "storage error: disk on fire"
    assert str(errors.NotFound("cp-1")) == "checkpoint not found: cp-1"
    assert str(errors.Corrupted("digest")) == "corrupted checkpoint: digest"
    assert str(errors.EncodeError("x")) == "serialization error: x"
    mismatch = errors.GraphMismatch(0xAB, 2**64 - 1)
    assert str(mismatch) == "graph mismatch: expected hash 0x00000000000000ab, got 0xffffffffffffffff"


def test_errors_carry_their_place_and_survive_a_process_boundary() -> None:
    error = errors.Conflict("moved", winner=None, thread="t", checkpoint="c", hint="look")
    copy = pickle.loads(pickle.dumps(error))

    assert (copy.what, copy.thread, copy.checkpoint, copy.hint) == ("moved", "t", "c", "look")
    assert str(copy) == str(error) == "conflict: moved (thread 't', checkpoint 'c'). look"


def test_a_thread_is_named_even_if_its_id_is_a_part_of_some_word() -> None:
    assert str(errors.StoreError("the lease is gone", thread="t")) == "storage error: the lease is gone (thread 't')"
    assert str(errors.StoreError("thread 't' is leased", thread="t")) == "storage error: thread 't' is leased"


def test_a_missing_checkpoint_is_named_with_what_to_do(thread: backstay.Thread) -> None:
    thread.save({"n": 1})
    calls = (lambda: thread.tag("cp-7", "x"), lambda: thread.fork("cp-7", branch="b"), lambda: thread.rewind("cp-7"))
    for call in calls:
        with pytest.raises(backstay.NotFound, match=r"checkpoint cp-7 does not exist.*\. It may have been deleted"):
            call()


def test_a_mistyped_field_gets_a_suggestion(thread: backstay.Thread) -> None:
    with pytest.raises(backstay.InvalidInput, match=r"Did you mean 'tags'\?"):
        thread.save({"n": 1}, tag=["x"])  # type: ignore[call-arg]


def test_a_closed_store_says_so(url: str) -> None:
    store = backstay.open(url)
    thread = store.thread("t")
    thread.save({"n": 1})
    store.close()
    store.close()
    for call in (lambda: thread.save({"n": 2}), thread.latest, store.check, lambda: list(store.threads())):
        with pytest.raises(backstay.StoreError, match="closed"):
            call()


def test_limits_hold_at_the_limit_and_refuse_one_beyond(thread: backstay.Thread) -> None:
    keys = {f"k{number}": 1 for number in range(KEYS_MAX)}
    thread.save(keys, summary="x" * TEXT_LENGTH_MAX, tags=[str(number) for number in range(64)])
    with pytest.raises(backstay.EncodeError, match="at most 10000 keys"):
        thread.save({**keys, "one more": 1})
    with pytest.raises(backstay.EncodeError, match="at most 10000 keys"):
        thread.append(set={"one more": 1})
    with pytest.raises(backstay.EncodeError, match="at most 10000 keys"):
        thread.fork(next(thread.history()), branch="other", set={"one more": 1})
    thread.append(set={"one more": 1}, delete=["k0"])
    with pytest.raises(backstay.InvalidInput, match="summary"):
        thread.save({}, summary="x" * (TEXT_LENGTH_MAX + 1))
    thread.save({"k" * KEY_LENGTH_MAX: 1})

    assert len(list(thread.history(limit=10**9))) == 3


@pytest.mark.parametrize("given", [[], "", 0, False])
def test_an_empty_value_of_the_wrong_type_is_refused_too(thread: backstay.Thread, given: Any) -> None:
    for arguments in ({"set": given}, {"append": given}):
        with pytest.raises(backstay.InvalidInput, match="mapping"):
            thread.append(**arguments)
