"""The arguments of LangGraph's ``put``, as its core makes them: full values, versions, the new versions only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from benchmarks.bench import THREAD
from benchmarks.workload import State


def config_of(thread: str) -> Any:
    """Return the address of a thread's newest checkpoint."""
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}


CONFIG = config_of(THREAD)


class Puts:
    """The puts of one thread, in order; ``config`` is what the last of them returned."""

    def __init__(self, config: Any, fixed: Collection[str] = ("document",)) -> None:
        self.config = config
        self._fixed = fixed  # the keys that never change after the first put
        self._step = -1
        self._versions: dict[str, str] = {}

    def arguments(self, state: State) -> tuple[Any, Checkpoint, Any, Any]:
        """Return the arguments of the next put."""
        self._step += 1
        changed = list(state) if self._step == 0 else [key for key in state if key not in self._fixed]
        new = dict.fromkeys(changed, f"{self._step + 1:032}.{0.5:016}")
        self._versions = {**self._versions, **new}
        checkpoint = empty_checkpoint()
        checkpoint["id"] = str(uuid6(clock_seq=self._step))
        checkpoint["channel_values"] = dict(state)
        checkpoint["channel_versions"] = dict(self._versions)
        checkpoint["versions_seen"] = {"__input__": {}, "agent": dict(new)}
        checkpoint["updated_channels"] = changed
        return self.config, checkpoint, {"source": "loop", "step": self._step, "parents": {}}, new
