"""Checkpoints as blobs: a codec turns a graph's checkpoint into bytes, and a store keeps them without reading them.

For programs with a codec of their own. A trace is a thread; a blob is a checkpoint with the blob's id, whose state is
the bytes. Id, hash of the graph and creation time are also stored as fields, to find blobs and to refuse wrong ones.

``import_blobs`` decodes blobs and stores their content as ordinary checkpoints, which all of Backstay can read.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from backstay.bundle.report import ImportReport, Note, Progress
from backstay.compat.adapter import copied, parse_json
from backstay.compat.importer import Importer
from backstay.errors import BackstayError, Corrupted, DecodeError, GraphMismatch, InvalidInput
from backstay.model.checkpoint import EPOCH, Checkpoint
from backstay.model.fields import check_fields
from backstay.model.ids import check_id
from backstay.operations.retention import Keep
from backstay.store.atomic import failure
from backstay.thread.store import Store

__all__ = [
    "CheckpointBlob",
    "CheckpointBlobStore",
    "CheckpointCodec",
    "GraphCheckpoint",
    "JsonCheckpointCodec",
    "TypedCheckpointStore",
    "import_blobs",
]

S = TypeVar("S")

_DATA = "data"
_ORDER = "created_at, then the order given: a blob holds nothing else"
_FIELDS = ("checkpoint_id", "current_node", "state", "graph_hash", "created_at")


@dataclass(frozen=True, slots=True)
class CheckpointBlob:
    """A checkpoint as bytes, in a format that only its codec knows."""

    id: str
    data: bytes
    graph_hash: int
    created_at: datetime

    def __post_init__(self) -> None:
        if type(self.data) is not bytes:
            raise InvalidInput(f"a blob's data must be bytes, not {type(self.data).__name__}")
        check_fields({"id": self.id, "graph_hash": self.graph_hash, "created_at": self.created_at})


@dataclass(frozen=True, slots=True)
class GraphCheckpoint(Generic[S]):
    """The position of a graph: the node to run next, and the part of the state that it needs."""

    current_node: str
    state: S
    graph_hash: int
    checkpoint_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know


class CheckpointCodec(Protocol[S]):
    """Turns a checkpoint into a blob and back. It compares the graph's hash when it reads a blob."""

    def serialize(self, checkpoint: GraphCheckpoint[S], graph_hash: int) -> CheckpointBlob:
        """Return the blob of a checkpoint of the graph with this hash."""

    def deserialize(self, blob: CheckpointBlob, expected_hash: int) -> GraphCheckpoint[S]:
        """Return the checkpoint; raise GraphMismatch if another graph wrote it, Corrupted if the bytes are not one."""


class JsonCheckpointCodec:
    """The usual codec: a JSON object of the checkpoint's five fields, the time as seconds and nanoseconds."""

    def serialize(self, checkpoint: GraphCheckpoint[Any], graph_hash: int) -> CheckpointBlob:
        """Return the blob of a checkpoint. EncodeError names a value that JSON cannot hold."""
        since = checkpoint.created_at.astimezone(UTC) - EPOCH
        plain = {
            **checkpoint.extra,
            "checkpoint_id": checkpoint.checkpoint_id,
            "current_node": checkpoint.current_node,
            "state": checkpoint.state,
            "graph_hash": graph_hash,
            "created_at": {
                "secs_since_epoch": since // timedelta(seconds=1),
                "nanos_since_epoch": since.microseconds * 1000,
            },
        }
        data = json.dumps(copied(plain, "checkpoint"), ensure_ascii=False).encode()
        return CheckpointBlob(checkpoint.checkpoint_id, data, graph_hash, checkpoint.created_at)

    def deserialize(self, blob: CheckpointBlob, expected_hash: int) -> GraphCheckpoint[Any]:
        """Return the checkpoint; see ``CheckpointCodec``."""
        if blob.graph_hash != expected_hash:
            raise GraphMismatch(expected_hash, blob.graph_hash, checkpoint=blob.id)
        try:
            plain = parse_json(blob.data)
            checkpoint = _checkpoint(plain)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            what = getattr(error, "what", type(error).__name__)
            raise Corrupted(f"blob {blob.id} is not a checkpoint: {what}", checkpoint=blob.id) from error
        if checkpoint.graph_hash != expected_hash:
            raise GraphMismatch(expected_hash, checkpoint.graph_hash, checkpoint=blob.id)
        if checkpoint.checkpoint_id != blob.id:
            raise Corrupted(f"blob {blob.id} holds checkpoint {checkpoint.checkpoint_id}", checkpoint=blob.id)
        return checkpoint


def _checkpoint(plain: Any) -> GraphCheckpoint[Any]:
    moment = plain["created_at"]
    seconds, nanos = moment["secs_since_epoch"], moment["nanos_since_epoch"]
    if type(plain["current_node"]) is not str or type(seconds) is not int or type(nanos) is not int:
        raise DecodeError("a field has the wrong type")
    checked = check_fields({"id": plain["checkpoint_id"], "graph_hash": plain["graph_hash"]})
    return GraphCheckpoint(
        current_node=plain["current_node"],
        state=copied(plain["state"], "state"),
        graph_hash=checked["graph_hash"],
        checkpoint_id=checked["id"],
        created_at=EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000),
        extra={key: copied(value, key) for key, value in plain.items() if key not in _FIELDS},
    )


class CheckpointBlobStore:
    """Stores blobs by trace in any store, without knowing the type of the state or the format of the bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def save_with_trace(self, trace: str, blob: CheckpointBlob) -> None:
        """Store a blob as the trace's newest. Again it changes nothing; other bytes under its id raise IdTaken."""
        thread = self._store.thread(trace)
        thread.save({_DATA: blob.data}, id=blob.id, graph_hash=blob.graph_hash, created_at=blob.created_at)

    def load(self, id: str) -> CheckpointBlob | None:
        """Return a blob with every byte verified; None if it does not exist."""
        return _blob(self._store.get(id))

    def load_latest(self, trace: str) -> CheckpointBlob | None:
        """Return the blob that was saved last in a trace, regardless of its creation time."""
        return _blob(self._store.thread(trace).latest())

    def list(self, trace: str) -> list[CheckpointBlob]:
        """Return the blobs of a trace, the one saved last first."""
        found = (self.load(meta.id) for meta in self._store.thread(trace).history())
        return [blob for blob in found if blob is not None]

    def delete(self, id: str) -> bool:
        """Delete a blob; return whether there was one."""
        found = self._store.get(check_id(id, "checkpoint id"))
        return (
            found is not None and self._store.thread(found.thread_id, branch=found.branch).delete_checkpoint(found) > 0
        )

    def prune(self, trace: str, keep: int) -> int:
        """Delete all blobs of a trace except the newest ``keep``, and return how many were deleted."""
        return self._store.thread(trace).prune(Keep(last=keep)).deleted


def _blob(checkpoint: Checkpoint | None) -> CheckpointBlob | None:
    if checkpoint is None:
        return None
    data = checkpoint.state.get(_DATA)
    if type(data) is not bytes or len(checkpoint.state) != 1:
        raise InvalidInput(
            f"checkpoint {checkpoint.id} is not a blob", checkpoint=checkpoint.id, hint="Read it with store.get()"
        )
    return CheckpointBlob(checkpoint.id, data, checkpoint.graph_hash or 0, checkpoint.created_at)


class TypedCheckpointStore(Generic[S]):
    """A blob store with a codec: it takes and returns checkpoints, and refuses those of another graph."""

    def __init__(self, blobs: CheckpointBlobStore, codec: CheckpointCodec[S]) -> None:
        self.blobs = blobs
        self.codec = codec

    def save_with_trace(self, trace: str, checkpoint: GraphCheckpoint[S]) -> None:
        """Store a checkpoint as the trace's newest."""
        self.blobs.save_with_trace(trace, self.codec.serialize(checkpoint, checkpoint.graph_hash))

    def load(self, id: str, expected_hash: int) -> GraphCheckpoint[S] | None:
        """Return a checkpoint, or None if it does not exist; raise GraphMismatch if another graph wrote it."""
        blob = self.blobs.load(id)
        return None if blob is None else self.codec.deserialize(blob, expected_hash)

    def load_latest(self, trace: str, expected_hash: int) -> GraphCheckpoint[S] | None:
        """Return the newest checkpoint of a trace, or None; otherwise like ``load``."""
        blob = self.blobs.load_latest(trace)
        return None if blob is None else self.codec.deserialize(blob, expected_hash)


def import_blobs(
    source: str | os.PathLike[str] | Iterable[tuple[str, CheckpointBlob]],
    store: Store,
    *,
    codec: CheckpointCodec[Any] | None = None,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store the content of blobs as ordinary checkpoints.

    ``source`` is pairs of a trace and a blob, or a directory that has one directory of JSON files for each trace.
    """
    importer = Importer(store, _ORDER)
    blobs: Iterable[tuple[str, str, CheckpointBlob]]
    if isinstance(source, str | os.PathLike):
        blobs = _files(Path(source), importer)
    else:
        blobs = ((f"blob {number}", trace, blob) for number, (trace, blob) in enumerate(source, 1))
    found = []
    for where, trace, blob in blobs:
        try:
            checkpoint = (codec or JsonCheckpointCodec()).deserialize(blob, blob.graph_hash)
        except BackstayError as error:
            importer.missing.append(Note(error.what, where, trace, blob.id))
            continue
        name = checkpoint.checkpoint_id
        state = checkpoint.state
        if not isinstance(state, dict):
            what = "its state is not an object, so it is kept under the key 'state'"
            importer.notes.append(Note(what, where, trace, name))
            state = {"state": state}
        values = {
            "next_node": checkpoint.current_node or None,
            "graph_hash": checkpoint.graph_hash,
            "created_at": checkpoint.created_at,
        }
        item = importer.saved_item(trace, name, where, state, values, checkpoint.extra)
        found.append((checkpoint.created_at, item))
    found.sort(key=lambda each: each[0])
    return importer.import_all((item for _, item in found), progress)


def _files(root: Path, importer: Importer) -> Iterator[tuple[str, str, CheckpointBlob]]:
    """Yield the files of each trace's directory as blobs. Id, hash and time come from the content."""
    try:
        traces = sorted(path for path in root.iterdir() if path.is_dir())
        files = [(trace.name, path) for trace in traces for path in sorted(trace.glob("*.json"))]
    except OSError as error:
        raise failure(error, "list", root) from error
    for trace, path in files:
        try:
            data = path.read_bytes()
            checkpoint = _checkpoint(parse_json(data))
            blob = CheckpointBlob(checkpoint.checkpoint_id, data, checkpoint.graph_hash, checkpoint.created_at)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            what = getattr(error, "what", type(error).__name__)
            importer.missing.append(Note(f"is not a checkpoint: {what}", str(path), trace))
            continue
        yield str(path), trace, blob
