"""The checkpoint system of a graph runtime under its own names: positions, sinks, policies, blobs, and their files.

    checkpoint = GraphCheckpoint("review", state, graph_hash)      # calls state.snapshot()
    blob = JsonCheckpointCodec(State).serialize(checkpoint, graph_hash)

Frames, sinks and errors are the engine's own: an object from here works everywhere in Backstay. ``import_blobs`` stores
existing files so that a graph of Backstay resumes them; ``export_blobs`` writes them again.
"""

from backstay.compat.graph.checkpoint import (
    CheckpointBlob,
    CheckpointBlobStore,
    CheckpointCodec,
    CheckpointId,
    GraphCheckpoint,
    JsonCheckpointCodec,
    NodeId,
    TraceId,
    TypedCheckpointStore,
)
from backstay.compat.graph.policies import RetentionPolicy, TriggerPolicy
from backstay.compat.graph.transfer import export_blobs, import_blobs
from backstay.engine.sinks import CheckpointSink, MemorySink
from backstay.engine.sinks import NoSink as NoopCheckpointSink
from backstay.errors import Corrupted, EncodeError, GraphMismatch, NotFound, StoreError
from backstay.model.frame import Frame, FrameInfo, FrameStack

CheckpointPolicy = TriggerPolicy  # the older name; retention is a policy of its own

__all__ = [
    "CheckpointBlob",
    "CheckpointBlobStore",
    "CheckpointCodec",
    "CheckpointId",
    "CheckpointPolicy",
    "CheckpointSink",
    "Corrupted",
    "EncodeError",
    "Frame",
    "FrameInfo",
    "FrameStack",
    "GraphCheckpoint",
    "GraphMismatch",
    "JsonCheckpointCodec",
    "MemorySink",
    "NodeId",
    "NoopCheckpointSink",
    "NotFound",
    "RetentionPolicy",
    "StoreError",
    "TraceId",
    "TriggerPolicy",
    "TypedCheckpointStore",
    "export_blobs",
    "import_blobs",
]
