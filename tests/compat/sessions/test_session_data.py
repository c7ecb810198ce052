"""The record of a session's checkpoint: its fields, its forms, and what may be saved."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from backstay.compat import sessions
from backstay.compat.sessions import (
    AgentId,
    AgentState,
    CheckpointData,
    CheckpointId,
    CheckpointMeta,
    CheckpointWriter,
    MessageRole,
    SessionId,
    SyncCheckpointWriter,
    TaskId,
)
from backstay.errors import BackstayError, DecodeError, EncodeError, InvalidInput

NOW = datetime(2026, 1, 31, 9, 30, 15, 123456, tzinfo=UTC)


def test_every_part_of_the_system_is_reachable_from_the_package() -> None:
    parts = {"CheckpointWriter", "AtomicFileWriter", "CrashRecovery", "ChecksumUtils", "ErrorRecovery"}
    wanted = parts | {
        "ErrorCategory",
        "FallbackStrategy",
        "InterruptedSession",
        "RecoveryAction",
        "RecoveryLayer",
        "RecoveryResult",
        "RetryPolicy",
        "SessionRecovery",
    }

    assert wanted <= set(sessions.__all__)
    assert sessions.__all__ == sorted(sessions.__all__)
    assert all(inspect.isclass(getattr(sessions, name)) for name in wanted)
    # One name, one thing: what recover_session returns is not the result of an error recovery.
    fields = {field.name for field in dataclasses.fields(sessions.RecoveryReport)}
    assert {"data", "path", "from_backup", "skipped"} <= fields
    assert sessions.RecoveryReport.__module__ != sessions.RecoveryResult.__module__


# Fields -----------------------------------------------------------------------------------------------------------


def test_the_record_has_all_its_fields_and_can_be_printed_copied_and_serialised() -> None:
    data = CheckpointData(
        checkpoint_id=CheckpointId("c1"),
        session_id=SessionId("s1"),
        created_at=NOW,
        trigger="manual",
        iteration=2**31 - 1,
        messages=[{"role": "user", "content": ["any", {"json": None}]}],
        tool_calls_pending=[1, "two", None, {"three": [3.5]}],
        tool_results={"search": [True]},
        tokens_used=2**63 - 1,
        cost_estimate=0.25,
        resume_hint="go on",
    )

    assert CheckpointData.from_dict(data.to_dict()) == data
    assert copy.deepcopy(data) == data
    assert dataclasses.replace(data, iteration=1).iteration == 1
    assert "session_id='s1'" in repr(data)
    assert [field.name for field in dataclasses.fields(data)] == [
        "checkpoint_id",
        "session_id",
        "created_at",
        "trigger",
        "iteration",
        "messages",
        "tool_calls_pending",
        "tool_results",
        "tokens_used",
        "cost_estimate",
        "resume_hint",
    ]


def test_an_empty_record_is_valid(tmp_path: Path) -> None:
    data = CheckpointData()

    assert (data.trigger, data.iteration, data.messages, data.tool_calls_pending) == ("manual", 0, [], [])
    assert (data.tool_results, data.tokens_used, data.cost_estimate, data.resume_hint) == (None, 0, 0.0, None)
    writer = SyncCheckpointWriter(tmp_path)
    writer.save(data)
    assert writer.load(data.session_id) == data


def test_new_ids_are_made_without_arguments_and_do_not_repeat() -> None:
    made = [CheckpointId.new() for _ in range(10_000)]

    assert len(set(made)) == len(made)
    assert made == sorted(made)
    for kind in (SessionId, CheckpointId, AgentId, TaskId):
        fresh = kind.new()
        assert type(fresh) is kind
        assert len(fresh.replace("-", "")) == 32  # 128 bits, not 32
    assert SessionId("any text") == "any text"
    assert CheckpointData(session_id=SessionId("s")).to_dict()["session_id"] == "s"


def test_the_summary_has_all_its_fields_and_all_are_required() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(CheckpointMeta)}
    required = {name for name, default in fields.items() if default is dataclasses.MISSING}

    assert required == {"checkpoint_id", "session_id", "created_at", "trigger", "iteration", "checksum"}


def test_agent_states_have_their_wire_names_both_ways() -> None:
    wire = ["idle", "running", "tool_calling", "waiting_tool", "stopped", "error", "completed"]

    assert [str(state) for state in AgentState] == wire
    assert [AgentState.parse(name) for name in wire] == list(AgentState)
    with pytest.raises(InvalidInput, match="there is no agent state 'sleeping'"):
        AgentState.parse("sleeping")


def test_moments_are_written_as_rfc_3339_in_utc_and_read_in_any_zone() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))

    assert CheckpointData(created_at=there).to_dict()["created_at"] == "2026-01-31T09:30:15.123456Z"
    stored = CheckpointData(created_at=NOW).to_dict()
    for text in ("2026-01-31T09:30:15.123456Z", "2026-01-31T10:30:15.123456789+01:00", "2026-01-31T09:30:15.123456"):
        assert CheckpointData.from_dict({**stored, "created_at": text}).created_at == NOW


@pytest.mark.parametrize("name", list(CheckpointData().to_dict()))
def test_a_field_that_is_missing_or_of_another_kind_is_named(name: str) -> None:
    stored = CheckpointData().to_dict()
    wrong: Any = {"tool_results": None, "resume_hint": 7}.get(name, {"no": "such"})

    if name != "resume_hint":  # the one that may be absent
        with pytest.raises(DecodeError, match=name):
            CheckpointData.from_dict({key: value for key, value in stored.items() if key != name})
    if name != "tool_results":  # which may be anything
        with pytest.raises(DecodeError, match=name):
            CheckpointData.from_dict({**stored, name: wrong})


# What may be saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"iteration": -1}, "iteration"),
        ({"iteration": 2**31}, "iteration"),
        ({"iteration": True}, "iteration"),
        ({"tokens_used": -1}, "tokens_used"),
        ({"tokens_used": 2**63}, "tokens_used"),
        ({"cost_estimate": -0.01}, "cost_estimate"),
        ({"cost_estimate": math.nan}, "cost_estimate"),
        ({"cost_estimate": math.inf}, "cost_estimate"),
        ({"messages": ()}, "messages"),
        ({"messages": "text"}, "messages"),
        ({"tool_calls_pending": None}, "tool_calls_pending"),
        ({"trigger": 7}, "trigger"),
        ({"resume_hint": 7}, "resume_hint"),
        ({"created_at": datetime(2026, 1, 1)}, "created_at"),
        ({"created_at": "today"}, "created_at"),
    ],
)
def test_what_is_no_valid_record_is_refused_before_anything_is_written(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        SyncCheckpointWriter(tmp_path).save(CheckpointData(**fields))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, math.nan]}, r"tool_results\.a\[1\] is nan"),
        ([-math.inf], r"tool_results\[0\] is -inf"),
        ((1, 2), r"tool_results is tuple"),
        ({1: "x"}, r"tool_results has a key of type int"),
        ({"when": NOW}, r"tool_results\.when is datetime"),
        ("\ud800", r"tool_results holds a lone surrogate"),
        (2**64, r"tool_results has more than 64 bits"),
        (-(2**63) - 1, r"tool_results has more than 64 bits"),
        (b"bytes", r"tool_results is bytes"),
    ],
)
def test_what_json_cannot_give_back_is_refused_with_its_place(tmp_path: Path, value: Any, where: str) -> None:
    with pytest.raises(EncodeError, match=where):
        SyncCheckpointWriter(tmp_path).save(CheckpointData(tool_results=value))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["messages", "tool_calls_pending"])
def test_messages_and_pending_calls_are_any_json_values(tmp_path: Path, name: str) -> None:
    values = ["text", "", None, True, 3, -1.5, [1, [2, []]], {}, {"content": "no role"}, {"role": "robot"}, {"role": 7}]
    fields: dict[str, Any] = {name: values}
    data = CheckpointData(session_id="s", **fields)
    writer = SyncCheckpointWriter(tmp_path)

    writer.save(data)

    assert writer.load("s") == data
    for wrong, where in ((math.nan, r"\[1\]\.a is nan"), ({1}, r"\[1\]\.a is set")):
        fields = {name: [None, {"a": wrong}]}
        with pytest.raises(EncodeError, match=name + where):
            writer.save(CheckpointData(**fields))


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "user"}, {"content": "no role"}], r"messages\[1\].role"),
        ([{"role": "robot"}], r"messages\[0\].role"),
        ([{"role": ["user"]}], r"messages\[0\].role"),
        (["text"], r"messages\[0\]"),
    ],
)
def test_a_writer_that_checks_roles_refuses_other_messages(tmp_path: Path, messages: list[Any], named: str) -> None:
    for writer in (CheckpointWriter(tmp_path, check_roles=True).sync, SyncCheckpointWriter(tmp_path, check_roles=True)):
        with pytest.raises(InvalidInput, match=named):
            writer.save(CheckpointData(messages=messages))
        assert list(tmp_path.iterdir()) == []
    SyncCheckpointWriter(tmp_path).save(CheckpointData(messages=messages))


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    deep: Any = None
    for _ in range(200):
        deep = [deep]

    with pytest.raises(EncodeError, match="nested"):
        SyncCheckpointWriter(tmp_path).save(CheckpointData(tool_results=deep))

    for levels in (125, 126):  # in messages, in the record: as deep as the original program can read, and one more
        deep = 7
        for _ in range(levels):
            deep = [deep]
        data = CheckpointData(session_id="s", messages=[deep])
        if levels == 125:
            SyncCheckpointWriter(tmp_path).save(data)
            assert SyncCheckpointWriter(tmp_path).load("s") == data
        else:
            with pytest.raises(EncodeError, match="nested"):
                SyncCheckpointWriter(tmp_path).save(data)


def test_all_four_roles_are_accepted(tmp_path: Path) -> None:
    messages = [{"role": str(role), "content": "x", "name": "n", "tool_call_id": "t"} for role in MessageRole]
    data = CheckpointData(messages=messages)
    writer = SyncCheckpointWriter(tmp_path, check_roles=True)

    writer.save(data)

    assert [str(role) for role in MessageRole] == ["system", "user", "assistant", "tool"]
    loaded = writer.load(data.session_id)
    assert loaded is not None
    assert loaded.messages == messages


def test_save_takes_a_record_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(BackstayError, match="CheckpointData"):
        SyncCheckpointWriter(tmp_path).save({"session_id": "s"})  # type: ignore[arg-type]
