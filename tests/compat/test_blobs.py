"""Checkpoints as blobs: codec, blob store, both together, and taking blobs in as ordinary checkpoints."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.compat.blobs import (
    CheckpointBlob,
    CheckpointBlobStore,
    GraphCheckpoint,
    JsonCheckpointCodec,
    TypedCheckpointStore,
    import_blobs,
)
from backstay.errors import Corrupted, EncodeError, GraphMismatch, IdTaken, InvalidInput

HASH = 0xDEADBEEF12345678
MOMENT = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path / "target.db") as opened:
        yield opened
        assert opened.check()


def graph_checkpoint(number: int, **fields: Any) -> GraphCheckpoint[Any]:
    made = GraphCheckpoint("write", {"n": number}, HASH, f"00000000-0000-4000-8000-{number:012}", MOMENT)
    return replace(made, **fields)


def test_a_blob_carries_four_fields_and_nothing_of_the_format() -> None:
    blob = CheckpointBlob("id", b"\x00\xff", HASH, MOMENT)

    assert (blob.id, blob.data, blob.graph_hash, blob.created_at) == ("id", b"\x00\xff", HASH, MOMENT)
    for wrong in ({"id": ""}, {"graph_hash": 2**64}, {"created_at": datetime(2026, 1, 1)}, {"data": "text"}):
        with pytest.raises(InvalidInput):
            replace(blob, **wrong)


def test_a_new_graph_checkpoint_has_an_id_of_its_own_and_the_current_time() -> None:
    before = datetime.now(UTC)
    one, two = (GraphCheckpoint("write", {"n": 1}, HASH) for _ in range(2))

    assert before <= one.created_at <= two.created_at <= datetime.now(UTC)
    assert uuid.UUID(one.checkpoint_id).version == 4
    assert one.checkpoint_id != two.checkpoint_id


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
    with pytest.raises(EncodeError):
        codec.serialize(graph_checkpoint(1, state={"n": float("nan")}), HASH)


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
        blob.data.replace(b'"n": 1', b'"n": NaN'),
        json.dumps({**whole, "created_at": {"secs_since_epoch": 2**70, "nanos_since_epoch": 0}}).encode(),
        json.dumps({**whole, "current_node": 7}).encode(),
        json.dumps({**whole, "checkpoint_id": "another"}).encode(),
    ):
        with pytest.raises(Corrupted):
            codec.deserialize(replace(blob, data=broken), HASH)


def test_a_blob_store_keeps_any_bytes_by_trace(store: backstay.Store) -> None:
    blobs = CheckpointBlobStore(store)
    made = [CheckpointBlob(f"b{n}", bytes([n, 0, 255]), n, MOMENT - timedelta(days=n)) for n in range(4)]
    for blob in made:
        blobs.save_with_trace("one", blob)
    blobs.save_with_trace("two", CheckpointBlob("other", b"x", 0, MOMENT))

    assert blobs.load("b2") == made[2]
    assert blobs.load("nobody") is None
    assert blobs.load_latest("one") == made[3]
    assert blobs.load_latest("nowhere") is None
    assert blobs.list("one") == made[::-1]
    assert (blobs.delete("b3"), blobs.delete("b3")) == (True, False)
    assert blobs.prune("one", 2) == 1
    assert [blob.id for blob in blobs.list("one")] == ["b2", "b1"]
    assert [blob.id for blob in blobs.list("two")] == ["other"]
    with pytest.raises(IdTaken):
        blobs.save_with_trace("one", replace(made[2], data=b"changed"))


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


def test_blobs_become_ordinary_checkpoints(target: backstay.Store) -> None:
    codec = JsonCheckpointCodec()
    made = [graph_checkpoint(n, created_at=MOMENT + timedelta(seconds=n), extra={"mood": n}) for n in range(3)]
    bare = graph_checkpoint(9, state=[1, 2])
    pairs = [("trace", codec.serialize(each, HASH)) for each in (*made[::-1], bare)]
    broken = ("trace", CheckpointBlob("broken", b"?", HASH, MOMENT))
    report = import_blobs([*pairs, broken], target)
    newest = target.thread("trace").latest()

    assert [note.checkpoint for note in report.missing] == ["broken"]
    assert [note.checkpoint for note in report.notes] == [bare.checkpoint_id]
    assert newest is not None
    assert (newest.id, newest.state, newest.next_node) == (made[2].checkpoint_id, {"n": 2}, "write")
    assert (newest.graph_hash, newest.metadata) == (HASH, {"mood": 2})
    again = import_blobs([*pairs, broken], target)
    assert (again.stored, again.present) == (0, 4)


def test_a_directory_of_blobs_is_read_trace_by_trace(target: backstay.Store, tmp_path: Path) -> None:
    codec = JsonCheckpointCodec()
    for number in range(3):
        folder = tmp_path / "root" / f"trace{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.json").write_bytes(codec.serialize(graph_checkpoint(number), HASH).data)
    (tmp_path / "root" / "trace0" / "torn.json").write_text("{", encoding="utf-8")
    report = import_blobs(tmp_path / "root", target)

    assert (report.stored, report.threads, len(report.missing)) == (3, 2, 1)
    assert [len(list(target.thread(f"trace{n}").history())) for n in (0, 1)] == [2, 1]
