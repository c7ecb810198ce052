"""``CheckpointBackend``: put and get by id, list by thread, all awaited. ``StoreBackend`` implements it on any store.

For agents that are written against that interface. Where its contract leaves a choice, every store behaves the same:

Order     The newest checkpoint is the one put last, regardless of its step and clock; lists are newest first. Steps
          belong to the caller: they may repeat or go back, and come back unchanged. The list of threads starts with the
          thread that was created last.
Replace   Putting an existing id replaces that checkpoint, in its place in the order. An id never moves to another
          thread (IdTaken).
Lineage   Without a parent, a checkpoint follows the thread's newest. One that names another parent continues the
          branch that ends with it, or starts a branch. Deleting a checkpoint does not affect others: its children still
          name it and can be loaded, verified and built on.
Paging    ``limit`` and ``offset`` count from the newest at the time of the call. If other processes put meanwhile, a
          later offset can show an entry again; ``checkpoints()`` and ``threads()`` show each entry once.
Values    Only JSON values. Anything else is refused before anything is stored, and the error names its path.

Messages, state and tool results are keys of an ordinary Backstay state. So ``backstay.open`` reads every checkpoint
stored here, and this interface reads threads saved there. ``import_agentos`` and ``export_agentos`` read and write the
data of agentos itself.
"""

from __future__ import annotations

from backstay.compat.backend.checkpoint import Checkpoint, CheckpointMetadata
from backstay.compat.backend.store import CheckpointBackend, StoreBackend, create_checkpointer
from backstay.compat.backend.transfer import export_agentos, import_agentos

__all__ = [
    "Checkpoint",
    "CheckpointBackend",
    "CheckpointMetadata",
    "StoreBackend",
    "create_checkpointer",
    "export_agentos",
    "import_agentos",
]
