"""Backstay: durable checkpoints for agents and graph workflows.

Layers, each importing only those above it:

    errors    every error, in one tree
    model     what is kept: frozen values
    codec     values <-> bytes, exact or refused
    pieces    bytes of a state <-> what is new of them
    store     bytes <-> durable records: the contract, memory, SQLite, directories, PostgreSQL
    thread    save, load, fork, rewind, diff, history, retention, effects, loops: what a user calls
    recovery  what becomes of errors: retries, fallbacks, incidents
    engine    graphs: nodes, edges, runs, pauses, time travel
    compat    other systems' names and files
    transfer  bundles between stores, imports
    upkeep    check and repair
    api       the public names
    cli, testing

Importing the package loads none of them: that happens when a name is first used, so that a command line that only
wants the version, or a program that only might need a checkpoint, starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstay.version import __version__

if TYPE_CHECKING:
    from backstay.api import (
        AsyncStore,
        AsyncThread,
        BackstayError,
        Checkpoint,
        CheckpointMeta,
        Conflict,
        Corrupted,
        DecodeError,
        EncodeError,
        Fenced,
        GraphMismatch,
        InvalidInput,
        Keep,
        NotFound,
        Opaque,
        OutcomeUnknown,
        Store,
        StoreError,
        Thread,
        aopen,
        diff,
        open,
        register,
    )
    from backstay.engine import Approve, Graph

__all__ = [
    "Approve",
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
    "Graph",
    "GraphMismatch",
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
    "diff",
    "open",
    "register",
]

_OF_THE_ENGINE = ("Approve", "Graph")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'backstay' has no attribute {name!r}")
    from backstay import api

    globals().update({public: getattr(api, public) for public in api.__all__})
    if name in _OF_THE_ENGINE:  # half of all code, and not needed by who saves and loads
        from backstay import engine

        globals().update({public: getattr(engine, public) for public in _OF_THE_ENGINE})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
