"""What a system of session checkpoints can do; ``CheckpointWriter`` is one."""

from __future__ import annotations

import os
from typing import Protocol, runtime_checkable

from backstay.compat.sessions.checksum import Verdict
from backstay.compat.sessions.data import CheckpointData, CheckpointMeta
from backstay.compat.sessions.ids import CheckpointId

Metas = list[CheckpointMeta]
"""Named here because inside the class ``list`` is a method."""


@runtime_checkable
class CheckpointSystem(Protocol):
    """The interface, safe to share between threads and tasks."""

    async def save(self, data: CheckpointData) -> CheckpointId:
        """Save a checkpoint and return its id."""

    async def load(self, session_id: str, checkpoint_id: str | None = None) -> CheckpointData | None:
        """Return a checkpoint, the newest if no id is given, or None if there is none."""

    async def list(self, session_id: str) -> Metas:
        """Return summaries of a session's checkpoints, newest first."""

    async def delete(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete a checkpoint; return whether there was one."""

    def verify(self, path: str | os.PathLike[str]) -> Verdict:
        """Tell whether the file at a path is intact."""
