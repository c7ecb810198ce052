"""Checkpoints of graph workflows that pause for people: ``CheckpointStore``, in memory, as files, or in any store.

For workflows that are written against that interface. Where its contract leaves a choice, this holds: all lists are
newest first by the checkpoints' own ``created_at``; ``delete`` and ``clear`` return how many checkpoints they deleted;
saving an id again replaces it; a checkpoint may name its ``run_id``, and then ``latest(run_id)`` and
``delete_run(run_id)`` find it; a value that JSON cannot hold is refused before anything is stored.
"""

from __future__ import annotations

from backstay.compat.workflow.checkpoint import Checkpoint, CheckpointInfo, InterruptType
from backstay.compat.workflow.files import FileCheckpointStore
from backstay.compat.workflow.state import SharedState
from backstay.compat.workflow.store import CheckpointStore, MemoryCheckpointStore, StoreCheckpointStore
from backstay.compat.workflow.transfer import export_workflow, import_workflow

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "FileCheckpointStore",
    "InterruptType",
    "MemoryCheckpointStore",
    "SharedState",
    "StoreCheckpointStore",
    "export_workflow",
    "import_workflow",
]
