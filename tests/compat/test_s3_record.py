"""The records of the backend face: fields, defaults, and a dictionary form that loses nothing and shares nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.compat.backend import Checkpoint, CheckpointMetadata
from backstay.errors import EncodeError, InvalidInput

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)


def full() -> dict[str, Any]:
    return {
        "metadata": {
            "thread_id": "t",
            "checkpoint_id": "c1",
            "parent_checkpoint_id": "c0",
            "step": 3,
            "created_at": "2026-01-31T12:00:00+00:00",
            "tags": ["b", "a"],
            "summary": "three",
        },
        "messages": [{"role": "user", "content": "hi"}],
        "state": {"plan": ["x"]},
        "tools_result": {"search": {"hits": 2}},
        "next_node": "answer",
    }


def test_metadata_needs_three_fields_and_has_defaults_for_the_rest() -> None:
    first, second = CheckpointMetadata("t", "c", 1), CheckpointMetadata("t", "c", 1)
    first.tags.append("mine")

    assert (first.thread_id, first.checkpoint_id, first.step) == ("t", "c", 1)
    assert (second.parent_checkpoint_id, second.tags, second.summary) == (None, [], "")
    assert {item.name for item in fields(CheckpointMetadata)}.isdisjoint({"messages", "state", "tools_result"})
    with pytest.raises(TypeError):
        CheckpointMetadata("t", "c")  # type: ignore[call-arg]


def test_a_checkpoint_is_made_now_in_utc_unless_said_otherwise() -> None:
    made = datetime.fromisoformat(CheckpointMetadata("t", "c", 1).created_at)

    assert made.utcoffset() == timedelta(0)
    assert abs(datetime.now(made.tzinfo) - made) < timedelta(minutes=1)


def test_a_checkpoint_holds_the_whole_agent() -> None:
    metadata = CheckpointMetadata("t", "c", 1)
    checkpoint = Checkpoint(metadata, [{"role": "user"}], {"n": 1}, {"tool": "ok"})

    assert checkpoint.metadata is metadata
    assert (checkpoint.messages, checkpoint.state) == ([{"role": "user"}], {"n": 1})
    assert (checkpoint.tools_result, checkpoint.next_node) == ({"tool": "ok"}, "")


def test_the_dictionary_has_exactly_the_promised_shape() -> None:
    plain = full()

    made = Checkpoint.from_dict(plain)

    assert made.to_dict() == plain
    assert (made.metadata.step, made.metadata.tags, made.state) == (3, ["b", "a"], {"plan": ["x"]})


@pytest.mark.parametrize("key", ["thread_id", "checkpoint_id", "step", "created_at"])
def test_what_is_required_and_missing_is_named(key: str) -> None:
    plain = full()
    del plain["metadata"][key]

    with pytest.raises(InvalidInput, match=f"metadata.{key} is missing"):
        Checkpoint.from_dict(plain)
    with pytest.raises(InvalidInput, match="metadata is missing"):
        Checkpoint.from_dict({})


def test_all_else_has_a_default() -> None:
    required = {"thread_id": "t", "checkpoint_id": "c", "step": 1, "created_at": "2026-01-31T12:00:00+00:00"}

    made = Checkpoint.from_dict({"metadata": required})

    assert (made.metadata.parent_checkpoint_id, made.metadata.tags, made.metadata.summary) == (None, [], "")
    assert (made.messages, made.state, made.tools_result, made.next_node) == ([], {}, {}, "")


@given(messages=st.lists(OBJECTS, max_size=3), state=OBJECTS, tools=OBJECTS, node=st.text(max_size=5))
def test_there_and_back_gives_an_equal_checkpoint(
    messages: list[dict[str, Any]], state: dict[str, Any], tools: dict[str, Any], node: str
) -> None:
    made = Checkpoint(CheckpointMetadata("t", "c", 1, tags=["x"]), messages, state, tools, node)

    assert Checkpoint.from_dict(made.to_dict()) == made
    assert Checkpoint.from_dict(json.loads(json.dumps(made.to_dict(), allow_nan=False))) == made


def test_keys_of_another_version_are_kept_and_written_again() -> None:
    plain = full()
    plain["metadata"]["model"] = {"name": "m", "temperature": 0.5}
    plain["plugins"] = ["later"]

    made = Checkpoint.from_dict(plain)

    assert made.to_dict() == plain
    assert (made.metadata.extra["model"]["name"], made.extra) == ("m", {"plugins": ["later"]})


def test_a_dictionary_shares_nothing_with_its_checkpoint() -> None:
    plain = full()
    made = Checkpoint.from_dict(plain)
    given = made.to_dict()

    plain["state"]["plan"].append("later")
    given["messages"][0]["content"] = "changed"
    given["metadata"]["tags"].append("changed")

    assert made.to_dict() == full()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), "state.a[1].b"),
        (float("inf"), "state.a[1].b"),
        ((1, 2), "state.a[1].b"),
        ({1: "x"}, "state.a[1].b"),
        ("\ud800", "state.a[1].b"),
        (datetime(2026, 1, 1), "state.a[1].b"),
    ],
    ids=["nan", "inf", "tuple", "number as key", "surrogate", "datetime"],
)
def test_what_json_cannot_say_is_refused_by_its_path(value: object, path: str) -> None:
    made = Checkpoint(CheckpointMetadata("t", "c", 1), [], {"a": [0, {"b": value}]}, {})

    with pytest.raises(EncodeError) as caught:
        made.to_dict()

    assert caught.value.path == path
