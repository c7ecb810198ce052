"""Holdfast: durable checkpoints for agents and graph workflows.

Layers, each importing only those above it:

    errors    every error, in one tree
    model     what is kept: frozen values
    codec     values <-> bytes, exact or refused
    pieces    bytes of a state <-> what is new of them
    store     bytes <-> durable records: the contract, memory, SQLite
    thread    save, load, fork, rewind, diff, history, retention: what a user calls
    cli, testing
"""

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
from holdfast.thread.retention import Keep
from holdfast.thread.store import Store, open
from holdfast.thread.store_async import AsyncStore, aopen
from holdfast.thread.thread import Thread
from holdfast.thread.thread_async import AsyncThread
from holdfast.version import __version__

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
    "__version__",
    "aopen",
    "open",
    "register",
]
