"""The public names, gathered. ``holdfast`` itself loads this when one of them is first used."""

from holdfast.codec import Opaque, register
from holdfast.errors import (
    Conflict,
    Corrupted,
    DecodeError,
    EncodeError,
    Fenced,
    GraphMismatch,
    HoldfastError,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    StoreError,
)
from holdfast.model.checkpoint import Checkpoint, CheckpointMeta
from holdfast.thread.diff import diff
from holdfast.thread.retention import Keep
from holdfast.thread.store import Store, open
from holdfast.thread.store_async import AsyncStore, aopen
from holdfast.thread.thread import Thread
from holdfast.thread.thread_async import AsyncThread

__all__ = [
    "AsyncStore",
    "AsyncThread",
    "Checkpoint",
    "CheckpointMeta",
    "Conflict",
    "Corrupted",
    "DecodeError",
    "EncodeError",
    "Fenced",
    "GraphMismatch",
    "HoldfastError",
    "InvalidInput",
    "Keep",
    "NotFound",
    "Opaque",
    "OutcomeUnknown",
    "Store",
    "StoreError",
    "Thread",
    "aopen",
    "diff",
    "open",
    "register",
]
