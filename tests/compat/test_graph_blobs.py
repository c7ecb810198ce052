"""Checkpoints as blobs: the codec, the blob store, and both together."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import backstay
from backstay.compat.graph import (
    CheckpointBlob,
    CheckpointBlobStore,
    GraphCheckpoint,
    JsonCheckpointCodec,
    TypedCheckpointStore,
)
from backstay.errors import Corrupted, EncodeError, GraphMismatch, IdTaken, InvalidInput

HASH = 0xDEADBEEF12345678
MOMENT = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)


def blob_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012}"


def graph_checkpoint(number: int, **fields: Any) -> GraphCheckpoint:
    made = GraphCheckpoint("write", {"n": number}, HASH, blob_id(number), MOMENT)
    return replace(made, **fields)


def test_a_blob_carries_four_fields_and_nothing_of_the_format() -> None:
    blob = CheckpointBlob(blob_id(1), b"\x00\xff", HASH, MOMENT)

    assert (blob.id, blob.data, blob.graph_hash, blob.created_at) == (blob_id(1), b"\x00\xff", HASH, MOMENT)
    for wrong in (
        {"id": ""},
        {"id": "not a UUID"},
        {"graph_hash": 2**64},
        {"graph_hash": None},
        {"created_at": datetime(2026, 1, 1)},
        {"nanos": 1000},
        {"data": "text"},
    ):
        with pytest.raises(InvalidInput):
            replace(blob, **wrong)


def test_the_usual_codec_is_json_and_gives_back_what_it_was_given() -> None:
    codec = JsonCheckpointCodec()
    checkpoint = graph_checkpoint(1, extra={"mood": "fine"})
    blob = codec.serialize(checkpoint, HASH)

    assert codec.deserialize(blob, HASH) == checkpoint
    assert json.loads(blob.data) == {
        "checkpoint_id": checkpoint.checkpoint_id,
        "current_node": "write",
        "state": {"n": 1},
        "graph_hash": HASH,
        "created_at": {"secs_since_epoch": 1767270615, "nanos_since_epoch": 123456000},
        "mood": "fine",
    }


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"state": {"n": float("nan")}}, "checkpoint.state.n is nan"),
        ({"state": {"n": [2**64]}}, r"checkpoint.state.n\[0\] is an integer of more than 64 bits"),
        ({"state": {"n": -(2**63) - 1}}, "checkpoint.state.n is an integer of more than 64 bits"),
        ({"state": {"n": deep(126)}}, "is nested more than 127 levels deep"),
        ({"state": {"n": b"bytes"}}, "checkpoint.state.n is bytes"),
        ({"extra": {"n": 2**64}}, "checkpoint.n is an integer"),
        ({"created_at": MOMENT.replace(year=1969)}, "created_at is before 1970"),
    ],
)
def test_what_the_other_program_would_read_differently_is_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(EncodeError, match=problem):
        JsonCheckpointCodec().serialize(graph_checkpoint(1, **changed), HASH)


def test_the_largest_values_that_it_reads_are_written() -> None:
    codec = JsonCheckpointCodec()
    state = {"n": [2**64 - 1, -(2**63), -0.0, 1e300], "deep": deep(125)}
    checkpoint = graph_checkpoint(1, state=state, nanos=999)

    assert codec.deserialize(codec.serialize(checkpoint, HASH), HASH) == checkpoint


def test_another_graph_and_bytes_that_are_none_are_told_apart() -> None:
    codec = JsonCheckpointCodec()
    blob = codec.serialize(graph_checkpoint(1), HASH)
    with pytest.raises(GraphMismatch, match="0x0000000000000001"):
        codec.deserialize(blob, 1)
    with pytest.raises(GraphMismatch):  # the envelope says one thing and the bytes another
        codec.deserialize(replace(blob, graph_hash=1), 1)
    whole = json.loads(blob.data)
    for broken in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 200_000,
        blob.data[:-1],
        blob.data.replace(b'"n":1', b'"n":NaN'),
        json.dumps({**whole, "created_at": {"secs_since_epoch": 2**70, "nanos_since_epoch": 0}}).encode(),
        json.dumps({**whole, "created_at": {"secs_since_epoch": -1, "nanos_since_epoch": 0}}).encode(),
        json.dumps({**whole, "created_at": {"secs_since_epoch": 1.5, "nanos_since_epoch": 0}}).encode(),
        json.dumps({**whole, "created_at": [1, 2]}).encode(),
        json.dumps({**whole, "graph_hash": None}).encode(),
        json.dumps({**whole, "graph_hash": -1}).encode(),
        json.dumps({**whole, "current_node": 7}).encode(),
        json.dumps({**whole, "checkpoint_id": 7}).encode(),
        json.dumps({**whole, "checkpoint_id": "another"}).encode(),
    ):
        with pytest.raises(Corrupted):
            codec.deserialize(replace(blob, data=broken), HASH)


def test_a_blob_store_keeps_any_bytes_by_trace(store: backstay.Store) -> None:
    blobs = CheckpointBlobStore(store)
    made = [CheckpointBlob(blob_id(n), bytes([n, 0, 255]), n, MOMENT - timedelta(days=n), n) for n in range(4)]
    for blob in made:
        blobs.save_with_trace("one", blob)
    blobs.save_with_trace("two", CheckpointBlob(blob_id(9), b"x", 0, MOMENT))

    assert blobs.load(made[2].id) == made[2]
    assert blobs.load("nobody") is None
    assert blobs.load_latest("one") == made[3]
    assert blobs.load_latest("nowhere") is None
    assert blobs.list("one") == [blob.id for blob in made[::-1]]
    assert (blobs.delete(blob_id(3)), blobs.delete(blob_id(3))) == (True, False)
    assert blobs.prune("one", 2) == 1
    assert blobs.list("one") == [blob_id(2), blob_id(1)]
    assert blobs.list("two") == [blob_id(9)]
    with pytest.raises(IdTaken):
        blobs.save_with_trace("one", replace(made[2], data=b"changed"))
    assert (blobs.prune("one", 0), blobs.list("one"), blobs.list("two")) == (2, [], [blob_id(9)])


def test_a_checkpoint_that_is_no_blob_is_not_read_as_one(store: backstay.Store) -> None:
    saved = store.thread("t").save({"data": "text"})
    with pytest.raises(InvalidInput, match=f"checkpoint {saved.id} is not a blob"):
        CheckpointBlobStore(store).load_latest("t")


def test_a_typed_store_gives_checkpoints_of_the_graph_that_is_asked_for(store: backstay.Store) -> None:
    typed = TypedCheckpointStore(CheckpointBlobStore(store), JsonCheckpointCodec())
    made = [graph_checkpoint(n) for n in range(3)]
    for checkpoint in made:
        typed.save_with_trace("trace", checkpoint)

    assert typed.load(made[1].checkpoint_id, HASH) == made[1]
    assert typed.load_latest("trace", HASH) == made[2]
    assert typed.load("nobody", HASH) is None
    assert typed.load_latest("nowhere", HASH) is None
    with pytest.raises(GraphMismatch):
        typed.load(made[1].checkpoint_id, 7)
    with pytest.raises(GraphMismatch):
        typed.load_latest("trace", 7)
    with pytest.raises(GraphMismatch) as caught:
        typed.save_with_trace("trace", made[0], 7)  # the program's graph is another than the checkpoint's
    assert (caught.value.expected, caught.value.actual) == (7, HASH)
