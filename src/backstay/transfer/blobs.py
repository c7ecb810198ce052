"""Checkpoints as blobs: a codec makes bytes of a graph's checkpoint, a store keeps bytes and knows nothing of them.

For programs that bring their own codec. A trace is a thread; a blob is a checkpoint whose state is the bytes, under the
blob's own id. What is needed to find and refuse it (its id, the graph's hash, when it was made) stands beside them.

``import_blobs`` opens blobs and stores what is in them as ordinary checkpoints, which all of Backstay can read.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from backstay.compat.plain_json import copied
from backstay.errors import BackstayError, Corrupted, DecodeError, GraphMismatch, InvalidInput
from backstay.model.checkpoint import EPOCH, Checkpoint
from backstay.model.fields import check_fields
from backstay.model.ids import check_id
from backstay.store.atomic import failure
from backstay.thread.retention import Keep
from backstay.thread.store import Store
from backstay.transfer.intake import Arrival, Intake, fitted, grouped, saving
from backstay.transfer.progress import Progress
from backstay.transfer.report import ImportReport, Note

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


def _now() -> datetime:
    return datetime.now(UTC)


def _new_id() -> str:
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class GraphCheckpoint(Generic[S]):
    """Where a graph stands: the node to run next, and the projection of the state it needs."""

    current_node: str
    state: S
    graph_hash: int
    checkpoint_id: str = field(default_factory=_new_id)
    created_at: datetime = field(default_factory=_now)
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know


class CheckpointCodec(Protocol[S]):
    """Makes a blob of a checkpoint and back. The graph's hash is compared on the way back."""

    def serialize(self, checkpoint: GraphCheckpoint[S], graph_hash: int) -> CheckpointBlob:
        """Return the blob of a checkpoint of the graph with this hash."""

    def deserialize(self, blob: CheckpointBlob, expected_hash: int) -> GraphCheckpoint[S]:
        """Return the checkpoint; GraphMismatch if it is of another graph, Corrupted if the bytes are none."""


class JsonCheckpointCodec:
    """The usual codec: a JSON object of the checkpoint's five fields, the moment as seconds and nanoseconds."""

    def serialize(self, checkpoint: GraphCheckpoint[Any], graph_hash: int) -> CheckpointBlob:
        """Return the blob of a checkpoint; EncodeError names what JSON cannot say."""
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
            plain = json.loads(blob.data, parse_constant=_refuse_constant)
            checkpoint = _checkpoint(plain)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            what = error.what if isinstance(error, BackstayError) else type(error).__name__
            raise Corrupted(f"blob {blob.id} holds no checkpoint: {what}", checkpoint=blob.id) from error
        if checkpoint.graph_hash != expected_hash:
            raise GraphMismatch(expected_hash, checkpoint.graph_hash, checkpoint=blob.id)
        if checkpoint.checkpoint_id != blob.id:
            raise Corrupted(f"blob {blob.id} holds another checkpoint", checkpoint=blob.id)
        return checkpoint


def _checkpoint(plain: Any) -> GraphCheckpoint[Any]:
    moment = plain["created_at"]
    seconds, nanos = moment["secs_since_epoch"], moment["nanos_since_epoch"]
    if type(plain["current_node"]) is not str or type(seconds) is not int or type(nanos) is not int:
        raise DecodeError("a field is of the wrong kind")
    checked = check_fields({"id": plain["checkpoint_id"], "graph_hash": plain["graph_hash"]})
    return GraphCheckpoint(
        current_node=plain["current_node"],
        state=copied(plain["state"], "state"),
        graph_hash=checked["graph_hash"],
        checkpoint_id=checked["id"],
        created_at=EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000),
        extra={key: copied(value, key) for key, value in plain.items() if key not in _FIELDS},
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and infinities are no JSON


class CheckpointBlobStore:
    """Keeps blobs by trace in any store. It needs neither the type of the state nor the format of the bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def save_with_trace(self, trace: str, blob: CheckpointBlob) -> None:
        """Store a blob as the trace's newest. The same again changes nothing; other bytes under its id: IdTaken."""
        thread = self._store.thread(trace)
        thread.save({_DATA: blob.data}, id=blob.id, graph_hash=blob.graph_hash, created_at=blob.created_at)

    def load(self, id: str) -> CheckpointBlob | None:
        """Return a blob, every byte verified; None if it is not there."""
        return _blob(self._store.get(id))

    def load_latest(self, trace: str) -> CheckpointBlob | None:
        """Return the blob that was saved last in a trace, whatever its clock said."""
        return _blob(self._store.thread(trace).latest())

    def list(self, trace: str) -> list[CheckpointBlob]:
        """Return the blobs of a trace, the one saved last first."""
        found = (self.load(meta.id) for meta in self._store.thread(trace).history())
        return [blob for blob in found if blob is not None]

    def delete(self, id: str) -> bool:
        """Delete a blob; tell whether there was one."""
        found = self._store.get(check_id(id, "checkpoint id"))
        return found is not None and self._store.thread(found.thread_id, branch=found.branch).delete(found) > 0

    def prune(self, trace: str, keep: int) -> int:
        """Delete all of a trace but the newest so many, and return how many went."""
        return self._store.thread(trace).prune(Keep(last=keep)).deleted


def _blob(checkpoint: Checkpoint | None) -> CheckpointBlob | None:
    if checkpoint is None:
        return None
    data = checkpoint.state.get(_DATA)
    if type(data) is not bytes or len(checkpoint.state) != 1:
        raise InvalidInput(f"checkpoint {checkpoint.id} is no blob", checkpoint=checkpoint.id)
    return CheckpointBlob(checkpoint.id, data, checkpoint.graph_hash or 0, checkpoint.created_at)


class TypedCheckpointStore(Generic[S]):
    """A codec and a blob store together: checkpoints in, checkpoints out, each of the graph that is asked for."""

    def __init__(self, blobs: CheckpointBlobStore, codec: CheckpointCodec[S]) -> None:
        self.blobs = blobs
        self.codec = codec

    def save_with_trace(self, trace: str, checkpoint: GraphCheckpoint[S]) -> None:
        """Store a checkpoint as the trace's newest."""
        self.blobs.save_with_trace(trace, self.codec.serialize(checkpoint, checkpoint.graph_hash))

    def load(self, id: str, expected_hash: int) -> GraphCheckpoint[S] | None:
        """Return a checkpoint, or None if it is not there; GraphMismatch if it is of another graph."""
        blob = self.blobs.load(id)
        return None if blob is None else self.codec.deserialize(blob, expected_hash)

    def load_latest(self, trace: str, expected_hash: int) -> GraphCheckpoint[S] | None:
        """Return the newest checkpoint of a trace, or None if there is none; else as ``load``."""
        blob = self.blobs.load_latest(trace)
        return None if blob is None else self.codec.deserialize(blob, expected_hash)


def import_blobs(
    source: str | os.PathLike[str] | Iterable[tuple[str, CheckpointBlob]],
    store: Store,
    *,
    codec: CheckpointCodec[Any] | None = None,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store what blobs hold: pairs of a trace and a blob, or a directory with a directory of JSON files a trace."""
    intake = Intake(store, _ORDER)
    opened = codec or JsonCheckpointCodec()
    pairs = _files(Path(source), intake) if isinstance(source, str | os.PathLike) else _named(source)
    found = []
    for where, trace, blob in pairs:
        try:
            checkpoint = opened.deserialize(blob, blob.graph_hash)
        except BackstayError as error:
            intake.lacks(where, error.what, trace, blob.id)
            continue
        found.append((checkpoint.created_at, trace, _arrival(where, trace, checkpoint, intake)))
    found.sort(key=lambda each: each[0])
    return intake.take_all(grouped((trace, arrival) for _, trace, arrival in found), progress)


def _arrival(where: str, trace: str, checkpoint: GraphCheckpoint[Any], intake: Intake) -> Arrival:
    def say(what: str) -> None:
        intake.notes.append(Note(what, where, trace, checkpoint.checkpoint_id))

    state = checkpoint.state
    if not isinstance(state, dict):
        say("its state is no object, so it is kept under the key 'state'")
        state = {"state": state}
    values = {
        "next_node": checkpoint.current_node or None,
        "graph_hash": checkpoint.graph_hash,
        "created_at": checkpoint.created_at,
    }
    name = checkpoint.checkpoint_id
    return Arrival(name, where, saving(trace, name, state, fitted(values, checkpoint.extra, say)))


def _named(source: Iterable[tuple[str, CheckpointBlob]]) -> Iterator[tuple[str, str, CheckpointBlob]]:
    for number, (trace, blob) in enumerate(source, 1):
        yield f"blob {number}", trace, blob


def _files(root: Path, intake: Intake) -> Iterator[tuple[str, str, CheckpointBlob]]:
    """Yield the files of each trace's directory as blobs; what a blob says beside its bytes is taken from them."""
    try:
        traces = sorted(path for path in root.iterdir() if path.is_dir())
        files = [(trace.name, path) for trace in traces for path in sorted(trace.glob("*.json"))]
    except OSError as error:
        raise failure(error, "list", root) from error
    for trace, path in files:
        try:
            data = path.read_bytes()
            checkpoint = _checkpoint(json.loads(data, parse_constant=_refuse_constant))
            blob = CheckpointBlob(checkpoint.checkpoint_id, data, checkpoint.graph_hash, checkpoint.created_at)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            what = error.what if isinstance(error, BackstayError) else type(error).__name__
            intake.lacks(str(path), f"holds no checkpoint: {what}", trace)
            continue
        yield str(path), trace, blob
