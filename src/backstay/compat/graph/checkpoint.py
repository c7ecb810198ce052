"""Checkpoints of a graph as bytes: ids, the checkpoint, its codec, and the store that keeps the bytes unread.

A trace is a thread; a blob is a checkpoint with the blob's id, whose state is the bytes. Id, hash of the graph and
creation time are also stored as fields, to find blobs and to refuse wrong ones. ``transfer.py`` stores the content of
blobs as ordinary checkpoints instead, which all of Backstay can read.
"""

from __future__ import annotations

import copy
import json
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, Self

from backstay.compat.adapter import copied, parse_json
from backstay.compat.upsert import ATTEMPTS_MAX, ORIGINAL
from backstay.errors import Conflict, Corrupted, DecodeError, EncodeError, GraphMismatch, IdTaken, InvalidInput
from backstay.model.checkpoint import EPOCH, Checkpoint
from backstay.model.fields import check_fields
from backstay.model.ids import check_id
from backstay.operations.retention import Keep
from backstay.thread.store import Store

NESTING_MAX = 127
"""The deepest nesting of arrays and objects that the usual JSON readers of this format accept."""

_INTEGERS = range(-(2**63), 2**64)
"""The integers that they read exactly."""

_DATA = "data"
FIELDS = ("checkpoint_id", "current_node", "state", "graph_hash", "created_at")


# Ids --------------------------------------------------------------------------------------------------------------


class _Uuid(str):
    """A UUID as text, in its usual form. Without an argument it is a new random one."""

    __slots__ = ()

    def __new__(cls, value: uuid.UUID | str | None = None) -> Self:
        try:
            return super().__new__(cls, uuid.uuid4() if value is None else uuid.UUID(str(value)))
        except ValueError:
            raise InvalidInput(f"a {cls.__name__} must be a UUID", hint=f"{cls.__name__}() makes a new one") from None


class CheckpointId(_Uuid):
    """Identifies a checkpoint: a UUID as text. ``CheckpointId()`` makes a new one."""

    __slots__ = ()


class TraceId(_Uuid):
    """Identifies one run of a graph: a UUID as text. ``TraceId()`` makes a new one. It is the id of a thread."""

    __slots__ = ()


class NodeId(str):
    """Identifies a node: its name."""

    __slots__ = ()


# The checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointBlob:
    """A checkpoint as bytes, in a format that only its codec knows."""

    id: str  # plain text becomes a CheckpointId
    data: bytes
    graph_hash: int
    created_at: datetime
    nanos: int = 0  # 0 to 999: the nanoseconds that ``created_at`` cannot hold

    def __post_init__(self) -> None:
        if type(self.data) is not bytes:
            raise InvalidInput(f"a blob's data must be bytes, not {type(self.data).__name__}")
        object.__setattr__(self, "id", CheckpointId(self.id))
        _check(self.graph_hash, self.created_at, self.nanos)


@dataclass(frozen=True, slots=True)
class GraphCheckpoint:
    """The position of a graph: the node to run next, and the part of the state that is stored.

    A state with ``snapshot()`` is replaced by a copy of its result; any other is copied. The id is random, the time is
    now.
    """

    current_node: str
    state: Any
    graph_hash: int
    checkpoint_id: str = field(default_factory=CheckpointId)  # plain text becomes a CheckpointId
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    nanos: int = 0  # 0 to 999: the nanoseconds that ``created_at`` cannot hold
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know
    state_class: type[Any] | None = field(default=None, compare=False, repr=False)  # its restore() makes a state

    def __post_init__(self) -> None:
        assign = object.__setattr__
        snapshot = getattr(self.state, "snapshot", None)
        if callable(snapshot):
            if not callable(getattr(self.state, "restore", None)):
                raise InvalidInput(
                    f"{type(self.state).__name__} has snapshot() but no restore()",
                    hint="Add a classmethod restore(stored) that makes a state again",
                )
            assign(self, "state_class", type(self.state))
            assign(self, "state", snapshot())
        try:
            assign(self, "state", copy.deepcopy(self.state))
        except TypeError as error:  # such as a lock
            raise InvalidInput(
                f"the state of node {self.current_node!r:.80} cannot be copied",
                hint="Give its class snapshot() and restore(), which leave out what exists only at run time",
            ) from error
        assign(self, "checkpoint_id", CheckpointId(self.checkpoint_id))
        assign(self, "current_node", NodeId(self.current_node))
        _check(self.graph_hash, self.created_at, self.nanos)

    def restore_state(self) -> Any:
        """Return a run-time state: ``restore()`` of the state's class makes it; without a class it is a copy."""
        stored = copy.deepcopy(self.state)
        return stored if self.state_class is None else self.state_class.restore(stored)


def _check(graph_hash: object, created_at: object, nanos: object) -> None:
    check_fields({"graph_hash": graph_hash, "created_at": created_at})
    if graph_hash is None or type(nanos) is not int or not 0 <= nanos < 1000:
        raise InvalidInput("a checkpoint needs a graph_hash, and nanos from 0 to 999")


# The codec --------------------------------------------------------------------------------------------------------


class CheckpointCodec(Protocol):
    """Turns a checkpoint into a blob and back. It compares the graph's hash when it reads a blob."""

    def serialize(self, checkpoint: GraphCheckpoint, graph_hash: int) -> CheckpointBlob:
        """Return the blob of a checkpoint of the graph with this hash."""

    def deserialize(self, blob: CheckpointBlob, expected_hash: int) -> GraphCheckpoint:
        """Return the checkpoint; raise GraphMismatch if another graph wrote it, Corrupted if the bytes are not one."""


class JsonCheckpointCodec:
    """The usual codec: a JSON object of the checkpoint's five fields, the time as seconds and nanoseconds.

    ``state_class`` is the class that ``restore_state`` of a checkpoint makes; None for plain values.
    """

    def __init__(self, state_class: type[Any] | None = None) -> None:
        if state_class is not None and not callable(getattr(state_class, "restore", None)):
            raise InvalidInput(f"{state_class!r:.80} is not a class with restore()")
        self.state_class = state_class

    def serialize(self, checkpoint: GraphCheckpoint, graph_hash: int) -> CheckpointBlob:
        """Return the blob of a checkpoint. EncodeError names a value that other readers would not read exactly."""
        if checkpoint.graph_hash != graph_hash:
            raise GraphMismatch(graph_hash, checkpoint.graph_hash, checkpoint=checkpoint.checkpoint_id)
        since = checkpoint.created_at.astimezone(UTC) - EPOCH
        if since < timedelta(0):
            raise EncodeError("created_at is before 1970", checkpoint=checkpoint.checkpoint_id)
        plain = {
            "checkpoint_id": str(checkpoint.checkpoint_id),
            "current_node": str(checkpoint.current_node),
            "state": checkpoint.state,
            "graph_hash": graph_hash,
            "created_at": {
                "secs_since_epoch": since // timedelta(seconds=1),
                "nanos_since_epoch": since.microseconds * 1000 + checkpoint.nanos,
            },
            **{key: value for key, value in checkpoint.extra.items() if key not in FIELDS},
        }
        plain = copied(plain, "checkpoint")
        _check_portable(plain, "checkpoint")
        data = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
        return CheckpointBlob(checkpoint.checkpoint_id, data, graph_hash, checkpoint.created_at, checkpoint.nanos)

    def deserialize(self, blob: CheckpointBlob, expected_hash: int) -> GraphCheckpoint:
        """Return the checkpoint; see ``CheckpointCodec``."""
        if blob.graph_hash != expected_hash:
            raise GraphMismatch(expected_hash, blob.graph_hash, checkpoint=blob.id)
        try:
            checkpoint = read_checkpoint(parse(blob.data))
        except DecodeError as error:
            raise Corrupted(f"blob {blob.id}: {error.what}", checkpoint=blob.id) from error
        if checkpoint.graph_hash != expected_hash:
            raise GraphMismatch(expected_hash, checkpoint.graph_hash, checkpoint=blob.id)
        if checkpoint.checkpoint_id != blob.id:
            raise Corrupted(f"blob {blob.id} holds checkpoint {checkpoint.checkpoint_id}", checkpoint=blob.id)
        return replace(checkpoint, state_class=self.state_class)


def _check_portable(value: Any, path: str, level: int = 1) -> None:
    if type(value) is int and value not in _INTEGERS:
        raise EncodeError(f"{path} is an integer of more than 64 bits", path=path, hint="Store it as text")
    if isinstance(value, dict | list):
        if level > NESTING_MAX:
            raise EncodeError(f"{path} is nested more than {NESTING_MAX} levels deep", path=path)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_portable(item, f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]", level + 1)


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise DecodeError for anything else."""
    try:
        plain = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the bytes are not JSON ({type(error).__name__})") from error
    if type(plain) is not dict:
        raise DecodeError(f"the bytes are a JSON {type(plain).__name__}, not an object")
    return plain


def read_checkpoint(plain: dict[str, Any]) -> GraphCheckpoint:
    """Return the checkpoint that a JSON object holds; raise DecodeError, which names the wrong field."""
    missing = [name for name in FIELDS if name not in plain]
    if missing:
        raise DecodeError(f"the field {missing[0]} is missing")
    moment = plain["created_at"]
    names = ("secs_since_epoch", "nanos_since_epoch")
    parts: list[Any] = [moment.get(name) for name in names] if type(moment) is dict else []
    if type(plain["current_node"]) is not str or type(plain["checkpoint_id"]) is not str:
        raise DecodeError("checkpoint_id or current_node is not text")
    if len(parts) != 2 or any(type(part) is not int or part < 0 for part in parts):
        raise DecodeError("created_at is not seconds and nanoseconds")
    nanoseconds = parts[0] * 10**9 + parts[1]
    try:
        return GraphCheckpoint(
            current_node=plain["current_node"],
            state=copied(plain["state"], "state"),
            graph_hash=plain["graph_hash"],
            checkpoint_id=plain["checkpoint_id"],
            created_at=EPOCH + timedelta(microseconds=nanoseconds // 1000),
            nanos=nanoseconds % 1000,
            extra={key: copied(value, key) for key, value in plain.items() if key not in FIELDS},
        )
    except OverflowError:
        raise DecodeError("created_at is after the year 9999") from None
    except InvalidInput as error:
        raise DecodeError(error.what) from error


# The store --------------------------------------------------------------------------------------------------------


class CheckpointBlobStore:
    """Stores blobs by trace in any store, without knowing the type of the state or the format of the bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def save_with_trace(self, trace: str, blob: CheckpointBlob) -> None:
        """Store a blob as the trace's newest. Again it changes nothing; other bytes under its id raise IdTaken."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                self._store.thread(str(trace)).save(
                    {_DATA: blob.data},
                    id=str(blob.id),
                    graph_hash=blob.graph_hash,
                    created_at=blob.created_at,
                    metadata={ORIGINAL: {"nanos": blob.nanos}} if blob.nanos else {},
                )
                return
            except IdTaken:
                raise
            except Conflict:  # another thread or process saved a blob at the same time
                if attempt == ATTEMPTS_MAX - 1:
                    raise

    def load(self, id: str) -> CheckpointBlob | None:
        """Return a blob with every byte verified; None if it does not exist."""
        return _blob(self._store.get(str(id)))

    def load_latest(self, trace: str) -> CheckpointBlob | None:
        """Return the blob that was saved last in a trace, regardless of its creation time."""
        return _blob(self._store.thread(str(trace)).latest())

    def list(self, trace: str) -> list[CheckpointId]:
        """Return the ids of the blobs of a trace, the one saved last first."""
        return [CheckpointId(meta.id) for meta in self._store.thread(str(trace)).history()]

    def delete(self, id: str) -> bool:
        """Delete a blob; return whether there was one."""
        found = self._store.get(check_id(str(id), "checkpoint id"))
        return (
            found is not None and self._store.thread(found.thread_id, branch=found.branch).delete_checkpoint(found) > 0
        )

    def prune(self, trace: str, keep: int) -> int:
        """Delete all blobs of a trace except the newest ``keep``, and return how many were deleted."""
        thread = self._store.thread(str(trace))
        return thread.prune(Keep(last=keep)).deleted if keep else thread.delete().checkpoints


def _blob(checkpoint: Checkpoint | None) -> CheckpointBlob | None:
    if checkpoint is None:
        return None
    data = checkpoint.state.get(_DATA)
    if type(data) is not bytes or len(checkpoint.state) != 1:
        raise InvalidInput(
            f"checkpoint {checkpoint.id} is not a blob", checkpoint=checkpoint.id, hint="Read it with store.get()"
        )
    nanos = checkpoint.metadata.get(ORIGINAL, {}).get("nanos", 0)
    return CheckpointBlob(checkpoint.id, data, checkpoint.graph_hash or 0, checkpoint.created_at, nanos)


class TypedCheckpointStore:
    """A blob store with a codec: it takes and returns checkpoints, and refuses those of another graph."""

    def __init__(self, blobs: CheckpointBlobStore, codec: CheckpointCodec) -> None:
        self.blobs = blobs
        self.codec = codec

    def save_with_trace(self, trace: str, checkpoint: GraphCheckpoint, graph_hash: int | None = None) -> None:
        """Store a checkpoint as the trace's newest. ``graph_hash`` is the program's; another one is refused."""
        graph_hash = checkpoint.graph_hash if graph_hash is None else graph_hash
        self.blobs.save_with_trace(trace, self.codec.serialize(checkpoint, graph_hash))

    def load(self, id: str, expected_hash: int) -> GraphCheckpoint | None:
        """Return a checkpoint, or None if it does not exist; raise GraphMismatch if another graph wrote it."""
        blob = self.blobs.load(id)
        return None if blob is None else self.codec.deserialize(blob, expected_hash)

    def load_latest(self, trace: str, expected_hash: int) -> GraphCheckpoint | None:
        """Return the newest checkpoint of a trace, or None; otherwise like ``load``."""
        blob = self.blobs.load_latest(trace)
        return None if blob is None else self.codec.deserialize(blob, expected_hash)
