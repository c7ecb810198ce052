"""How the contract tests talk to a saver: by its sync verbs or by their async twins, and as Pregel would.

A ``Face`` is one saver seen through one of the two sets of verbs; a test is written once and runs with both. A
``Line`` writes one namespace of a thread the way LangGraph's loop does: the versions of what changed move on, and
every checkpoint names the one before as its parent.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

from backstay.langgraph import BackstaySaver

Saver = BaseCheckpointSaver[Any]
Values = dict[str, Any]

STORES = ("memory", "sqlite", "dir", "postgres")
WAYS = (("memory", "sync"), ("sqlite", "sync"), ("sqlite", "async"), ("dir", "sync"), ("postgres", "sync"))


def spread(metafunc: pytest.Metafunc) -> None:
    """Run each test on every store, and once with the async verbs: they run the same functions on any store."""
    if "verbs" in metafunc.fixturenames:
        metafunc.parametrize(("saver", "verbs"), WAYS, indirect=["saver"], ids=map("-".join, WAYS), scope="module")
    elif "saver" in metafunc.fixturenames:
        metafunc.parametrize("saver", STORES, indirect=True, scope="module")


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[BackstaySaver]:
    """Open a saver that many tests may share, each with threads of its own; it is verified in the end."""
    url = {"memory": "memory:", "sqlite": str(folder / "store.db"), "dir": f"dir:{folder / 'checkpoints'}"}.get(kind)
    if url is None:
        url = request.getfixturevalue("postgres").url(schema=f"t_{uuid.uuid4().hex}")
    with BackstaySaver(url) as saver:
        yield saver
        report = saver.store.check()
        assert report, str(report)


class Face:
    """A saver's verbs, all of one colour. ``runner`` is where the async ones run; without it the sync ones are used."""

    def __init__(self, saver: Saver, runner: asyncio.Runner | None = None) -> None:
        self.saver = saver
        self._runner = runner

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: Mapping[str, Any], versions: Mapping[str, Any]
    ) -> RunnableConfig:
        result: RunnableConfig = self._call("put", config, checkpoint, dict(metadata), dict(versions))
        return result

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        self._call("put_writes", config, writes, task_id, task_path)

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        result: CheckpointTuple | None = self._call("get_tuple", config)
        return result

    def read(self, config: RunnableConfig) -> CheckpointTuple:
        """Return what must be there."""
        found = self.get_tuple(config)
        assert found is not None, f"not found: {config}"
        return found

    def listed(self, config: RunnableConfig | None, **options: Any) -> list[CheckpointTuple]:
        if self._runner is None:
            return list(self.saver.list(config, **options))
        return self._runner.run(self._alist(config, options))

    async def _alist(self, config: RunnableConfig | None, options: Mapping[str, Any]) -> list[CheckpointTuple]:
        return [found async for found in self.saver.alist(config, **options)]

    def delete_thread(self, thread_id: str) -> None:
        self._call("delete_thread", thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._call("delete_for_runs", run_ids)

    def copy_thread(self, source: str, target: str) -> None:
        self._call("copy_thread", source, target)

    def prune(self, thread_ids: Sequence[str], **options: Any) -> None:
        self._call("prune", thread_ids, **options)

    def delta_history(self, config: RunnableConfig, channels: Sequence[str]) -> dict[str, Any]:
        return dict(self._call("get_delta_channel_history", config=config, channels=channels))

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        if self._runner is None:
            return getattr(self.saver, verb)(*arguments, **options)
        return self._runner.run(getattr(self.saver, "a" + verb)(*arguments, **options))


def at(thread: Any, ns: str | None = None, id: str | None = None) -> RunnableConfig:
    """Return a config that names a thread and, if given, its namespace and checkpoint."""
    named = {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": id}
    return {"configurable": {key: value for key, value in named.items() if value is not None}}


def id_of(config: RunnableConfig | None) -> str | None:
    """Return the checkpoint that a config names."""
    return None if config is None else config["configurable"].get("checkpoint_id")


def new_id() -> str:
    """Return the id of a checkpoint made now, as LangGraph makes them."""
    return str(uuid6(clock_seq=-2))


def make_checkpoint(values: Values, versions: Mapping[str, Any], **fields: Any) -> Checkpoint:
    """Return a checkpoint as Pregel builds it."""
    made: dict[str, Any] = {
        "v": 4,
        "id": new_id(),
        "ts": "2026-11-16T10:00:00+00:00",
        "channel_values": values,
        "channel_versions": dict(versions),
        "versions_seen": {},
        "updated_channels": None,
    }
    made.update(fields)
    return made  # type: ignore[return-value]  # legacy keys are allowed in it


class Line:
    """One namespace of a thread, written checkpoint by checkpoint."""

    def __init__(self, face: Face, thread: Any, ns: str = "") -> None:
        self.face = face
        self.thread = thread
        self.ns = ns
        self.versions: dict[str, Any] = {}
        self.config = at(thread, ns)
        self.configs: list[RunnableConfig] = []
        self._last: Values = {}

    def put(
        self,
        values: Values,
        changed: Iterable[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> RunnableConfig:
        """Store the next checkpoint; what changed is found out unless it is told."""
        if changed is None:
            changed = [key for key in {**self._last, **values} if not _same(self._last, values, key)]
        moved = {key: self.face.saver.get_next_version(self.versions.get(key), None) for key in sorted(changed)}
        self.versions.update(moved)
        described = {"source": "loop", "step": len(self.configs) - 1, "parents": {}, **(metadata or {})}
        checkpoint = make_checkpoint(values, self.versions, **fields)
        self.config = self.face.put(self.config, checkpoint, described, moved)
        self.configs.append(self.config)
        self._last = copy.deepcopy(values)
        return self.config

    def back_to(self, config: RunnableConfig) -> CheckpointTuple:
        """Go on from an older checkpoint, which is read for that, as a time traveller does."""
        found = self.face.read(config)
        self.config = found.config
        self.versions = dict(found.checkpoint["channel_versions"])
        self._last = copy.deepcopy(found.checkpoint["channel_values"])
        return found

    def values(self, config: RunnableConfig | None = None) -> Values:
        """Return what is stored: of one checkpoint, or of the newest."""
        return self.face.read(config or at(self.thread, self.ns)).checkpoint["channel_values"]


def _same(old: Values, new: Values, key: str) -> bool:
    return key in old and key in new and bool(old[key] == new[key])
