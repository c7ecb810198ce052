"""Durable checkpoints for agents and graph workflows.

    import backstay

    with backstay.open("agent.db") as store:
        thread = store.thread("customer-42")
        thread.save({"messages": ["Hello"], "plan": None}, next_node="search")
        thread.append({"messages": ["Hi, how can I help?"]})
        print(thread.latest().state["messages"])

Start with ``open`` (or ``aopen`` with an event loop), ``Store``, ``Thread`` and ``Graph``. All errors derive from
``BackstayError``. The other public packages:

    backstay.thread       what threads and stores return: leases, loops, turns, interrupts, effects
    backstay.engine       graphs; with backstay.engine.reducers, .triggers and .sinks
    backstay.retry        error categories, retry policies, fallbacks, incidents
    backstay.maintenance  the reports of check() and repair(), and quarantine files
    backstay.bundle       one portable file with threads of a store
    backstay.langgraph    a checkpoint saver for LangGraph
    backstay.compat       other systems' names and files
    backstay.testing      kill your own graph at every kind of moment; a clock that tests move; the contract for stores

``import backstay`` loads none of them. Each name is loaded when it is first used, so a program that may never need a
checkpoint starts without delay.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from backstay.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors; a test compares it with the table below
    from backstay.codec.registry import register as register
    from backstay.engine.graph import Graph as Graph
    from backstay.errors import BackstayError as BackstayError
    from backstay.errors import Conflict as Conflict
    from backstay.errors import Corrupted as Corrupted
    from backstay.errors import DecodeError as DecodeError
    from backstay.errors import EncodeError as EncodeError
    from backstay.errors import Fenced as Fenced
    from backstay.errors import GraphMismatch as GraphMismatch
    from backstay.errors import InvalidInput as InvalidInput
    from backstay.errors import NotFound as NotFound
    from backstay.errors import OutcomeUnknown as OutcomeUnknown
    from backstay.errors import StoreError as StoreError
    from backstay.model.checkpoint import Checkpoint as Checkpoint
    from backstay.model.checkpoint import CheckpointMeta as CheckpointMeta
    from backstay.model.decision import Answer as Answer
    from backstay.model.decision import Approve as Approve
    from backstay.model.decision import Defer as Defer
    from backstay.model.decision import Modify as Modify
    from backstay.model.decision import Reject as Reject
    from backstay.model.decision import Reroute as Reroute
    from backstay.operations.diff import diff as diff
    from backstay.operations.retention import Keep as Keep
    from backstay.thread.calls import durable as durable
    from backstay.thread.store import AsyncStore as AsyncStore
    from backstay.thread.store import Store as Store
    from backstay.thread.store import aopen as aopen
    from backstay.thread.store import open as open
    from backstay.thread.thread import AsyncThread as AsyncThread
    from backstay.thread.thread import Thread as Thread

_NAMES = {
    "backstay.codec.registry": ("register",),
    "backstay.engine.graph": ("Graph",),
    "backstay.errors": (
        "BackstayError",
        "Conflict",
        "Corrupted",
        "DecodeError",
        "EncodeError",
        "Fenced",
        "GraphMismatch",
        "InvalidInput",
        "NotFound",
        "OutcomeUnknown",
        "StoreError",
    ),
    "backstay.model.checkpoint": ("Checkpoint", "CheckpointMeta"),
    "backstay.model.decision": ("Answer", "Approve", "Defer", "Modify", "Reject", "Reroute"),
    "backstay.operations.diff": ("diff",),
    "backstay.operations.retention": ("Keep",),
    "backstay.thread.calls": ("durable",),
    "backstay.thread.store": ("AsyncStore", "Store", "aopen", "open"),
    "backstay.thread.thread": ("AsyncThread", "Thread"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'backstay' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
