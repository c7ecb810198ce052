"""The public names, gathered. ``backstay`` itself loads this when one of them is first used."""

from backstay.codec import Opaque, register
from backstay.errors import (
    BackstayError,
    Conflict,
    Corrupted,
    DecodeError,
    EncodeError,
    Fenced,
    GraphMismatch,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    StoreError,
)
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.thread.diff import diff
from backstay.thread.retention import Keep
from backstay.thread.store import Store, open
from backstay.thread.store_async import AsyncStore, aopen
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

__all__ = [
    "AsyncStore",
    "AsyncThread",
    "BackstayError",
    "Checkpoint",
    "CheckpointMeta",
    "Conflict",
    "Corrupted",
    "DecodeError",
    "EncodeError",
    "Fenced",
    "GraphMismatch",
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
