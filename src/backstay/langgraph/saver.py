"""``BackstaySaver``: LangGraph's saver contract on any of our stores, sync and async in one class.

The async methods run the sync ones in a worker thread, so an event loop never waits for a disk. Both may be used at the
same time, from any thread and any loop. A value to be stored is encoded first, in the caller's thread, because it may
change while the caller waits.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.errors import DecodeError, InvalidInput, NotFound
from backstay.langgraph import delta, retention
from backstay.langgraph.encoding import dump, names_of, to_body
from backstay.langgraph.interrupts import OpenInterrupts
from backstay.langgraph.names import checkpoint_id_of, config_of, location_of, may_fork, thread_name
from backstay.langgraph.put import HeadCache, OnConflict, Putter, prepare
from backstay.langgraph.read import Reader, compare, pages_of_thread
from backstay.langgraph.runs import SaverRun
from backstay.langgraph.serde.safe import OnChange, hardened
from backstay.langgraph.serde.trusted import Allow
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.operations.diff import Diff
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.retention import Keep, Pruned, thread_names
from backstay.store.base import BranchKey, WriteRow
from backstay.thread.access import access_of
from backstay.thread.lease import check_lease_options
from backstay.thread.store import Store, check_store
from backstay.thread.store import open as open_store

P = ParamSpec("P")
T = TypeVar("T")
_DURABILITY = "__pregel_durability"  # the key of LangGraph's config that says when checkpoints are stored


def _awaited(
    method: Callable[Concatenate[BackstaySaver, P], T],
) -> Callable[Concatenate[BackstaySaver, P], Coroutine[Any, Any, T]]:
    """Return the async twin of a method: the same, run in a worker thread."""

    @functools.wraps(method)
    async def call(self: BackstaySaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._access.offload.run(method, self, *args, **kwargs)

    return call


class BackstaySaver(BaseCheckpointSaver[Any]):
    """A checkpointer for ``graph.compile(checkpointer=…)``.

    ``store`` is an open store, or a URL that the saver opens and closes itself.
    ``on_conflict`` decides what happens to a run if another run has continued from the same checkpoint: ``"raise"``
    raises ``Conflict``, ``"branch"`` stores its checkpoints in a branch of their own.
    ``allow``, ``strict`` and ``on_change`` decide which classes may be loaded, and what happens to a value that would
    come back changed: see ``SafeSerializer``, which replaces LangGraph's ``JsonPlusSerializer``, also inside an
    ``EncryptedSerializer``. Any other ``serde`` is used unchanged.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
        on_conflict: OnConflict = "raise",
        allow: Allow = (),
        strict: bool = False,
        on_change: OnChange = "warn",
    ) -> None:
        super().__init__(serde=hardened(serde, allow=allow, strict=strict, on_change=on_change))
        if on_conflict not in ("raise", "branch"):
            raise InvalidInput(f"unknown on_conflict: {on_conflict!r}", hint='Pass "raise" or "branch"')
        if not isinstance(store, str | os.PathLike):
            check_store(store, Store)
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else open_store(store)
        self._access = access_of(self.store)
        self._services = self._access.services
        self._heads = HeadCache()
        self._putter = Putter(self._services, self._heads, on_conflict)
        self._open_interrupts = OpenInterrupts(self._services)

    # Opening and closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the store if the saver opened it. Closing twice is fine."""
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> BackstaySaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> BackstaySaver:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)  # not in one of the workers: close() waits for them

    # Runs ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        thread_id: object,
        graph: str = "langgraph",
        *,
        ttl: float = 30.0,
        wait: float | None = None,
        owner: str | None = None,
    ) -> SaverRun:
        """Execute a graph on a thread as the only one, in a ``with`` or ``async with`` block around ``graph.invoke``.

        ``store.runs()`` lists the run under the name ``graph``, with its process, its status and how it ended. Until
        the block ends, other writers of the thread are refused, and another ``run`` waits, at most ``wait`` seconds. An
        unfinished run is continued. ``run.cancel()`` ends the run with ``Rejected`` when its graph stores its next
        step.
        """
        options = check_lease_options(owner, ttl, wait=wait)
        return SaverRun(self._access, self._putter.runs, self.interrupts, thread_id, graph, options)

    # Reading ------------------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that a config names, or the newest one of its thread and namespace."""
        location, checkpoint_id = location_of(config), checkpoint_id_of(config)
        found = self._reader().get(self._access.store, location, checkpoint_id)
        if found is not None and checkpoint_id is None:
            self._open_interrupts.read(
                self._access.store,
                location,
                found.checkpoint["id"],
                found.pending_writes,
                encrypted=isinstance(self.serde, EncryptedSerializer),
                outer=config["configurable"].get("checkpoint_map"),
            )
        return found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Iterate over checkpoints, newest first: of a namespace, of a thread, or of all threads."""
        for page in self._pages(config, filter, before, limit):
            yield from page

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Do what ``list`` does."""
        pages = self._pages(config, filter, before, limit)
        while (page := await self._access.offload.run(next, pages, None)) is not None:
            for found in page:
                yield found

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes that rebuild channels which are stored as writes only."""
        if not channels:
            return {}
        reader = self._reader()
        query = reader.query(location_of(config), checkpoint_id_of(config), payload=False)
        rows = self._access.store.find(query)
        if not rows:
            return {channel: {"writes": []} for channel in channels}
        history = delta.walk(self._access.store, rows[0], channels)
        found: Mapping[str, Any] = delta.decoded(history, reader.value_of)
        return found

    def diff(self, before: RunnableConfig, after: RunnableConfig) -> Diff:
        """Return what changed in the channels between two checkpoints, with messages as plain data."""
        reader, found = self._reader(), []
        for config in (before, after):
            location, checkpoint_id = location_of(config), checkpoint_id_of(config)
            each = reader.get(self._access.store, location, checkpoint_id)
            if each is None:
                what = f"checkpoint {checkpoint_id} does not exist" if checkpoint_id else "the thread has no checkpoint"
                raise NotFound(what, thread=location.thread, checkpoint=checkpoint_id)
            found.append(each)
        return compare(*found)

    def config_of(self, checkpoint: CheckpointMeta) -> RunnableConfig:
        """Return LangGraph's config for a checkpoint that the store lists."""
        try:
            location, checkpoint_id, _ = names_of(checkpoint)
        except DecodeError:
            raise InvalidInput(
                f"checkpoint {checkpoint.id} was not saved by LangGraph",
                thread=checkpoint.thread_id,
                checkpoint=checkpoint.id,
                hint="Pass a checkpoint that a graph with this saver has stored",
            ) from None
        return config_of(location, checkpoint_id)  # type: ignore[return-value]

    # Writing ------------------------------------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint and return the config that names it."""
        return self._put(config, checkpoint, metadata, new_versions)()

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Do what ``put`` does."""
        return await self._access.offload.run(self._put(config, checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task before its step ends."""
        self._write(config, writes, task_id, task_path)()

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Do what ``put_writes`` does."""
        await self._access.offload.run(self._write(config, writes, task_id, task_path))

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the next version: a whole number, or a text if an imported thread uses texts."""
        if current is None:
            return 1
        if isinstance(current, str):
            whole, dot, rest = current.partition(".")
            return f"{int(whole) + 1:0{len(whole)}}{dot}{rest}"
        return current + 1

    # Deleting and copying -----------------------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread with all its namespaces, checkpoints and writes."""
        thread = thread_name(thread_id)
        self._heads.forget_thread(thread)
        self._open_interrupts.forget(thread)
        self._access.store.delete_thread(self._services.namespace, thread)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs in all threads; other checkpoints stay unchanged."""
        retention.delete_runs(self._access.store, self._services, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with all its namespaces, checkpoints and writes; the copy shares the bytes."""
        retention.copy_thread(
            self._access.store, self._services, thread_name(source_thread_id), thread_name(target_thread_id)
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all but the newest checkpoint of each namespace of these threads, or all their checkpoints."""
        if strategy not in ("keep_latest", "delete"):
            raise InvalidInput(f"unknown strategy: {strategy!r}", hint='Pass "keep_latest" or "delete"')
        for thread in map(thread_name, thread_ids):
            if strategy == "delete":
                self.delete_thread(thread)
            else:
                retention.keep_latest(self._access.store, self._services, thread)

    def retain(self, rules: Keep, *, thread_id: str | None = None, dry_run: bool = False) -> Pruned:
        """Delete the checkpoints that the rules do not keep, in a thread or in all; the others stay unchanged."""
        thread = None if thread_id is None else thread_name(thread_id)
        return retention.retain(self._access.store, self._services, thread, rules, dry_run)

    # Interrupts ---------------------------------------------------------------------------------------------------

    def interrupts(self, thread_id: str | None = None) -> builtins.list[InterruptRecord]:
        """Return the interrupts that wait for an answer, oldest first: of a thread or of all, subgraphs included."""
        thread = None if thread_id is None else thread_name(thread_id)
        return self._open_interrupts.waiting(self._access.store, thread)

    # The same for an event loop -----------------------------------------------------------------------------------

    aget_tuple = _awaited(get_tuple)
    aget_delta_channel_history = _awaited(get_delta_channel_history)
    adiff = _awaited(diff)
    adelete_thread = _awaited(delete_thread)
    adelete_for_runs = _awaited(delete_for_runs)
    acopy_thread = _awaited(copy_thread)
    aprune = _awaited(prune)
    aretain = _awaited(retain)
    ainterrupts = _awaited(interrupts)

    # Inside -------------------------------------------------------------------------------------------------------

    def _reader(self) -> Reader:
        # Not made once: a graph may give its copy of the saver another serializer.
        return Reader(self._services, self.serde, self._heads)

    def _pages(
        self,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Iterator[builtins.list[CheckpointTuple]]:
        """Yield the pages of a list, thread by thread."""
        store, reader = self._access.store, self._reader()
        before_id = None if before is None else checkpoint_id_of(before)
        if config is None or "thread_id" not in config.get("configurable", {}):
            threads, ns, checkpoint_id = thread_names(store, self._services), None, None
        else:
            location = location_of(config)
            ns = location.ns if "checkpoint_ns" in config["configurable"] else None
            threads, checkpoint_id = [location.thread], checkpoint_id_of(config)
        for thread in threads:
            for page in pages_of_thread(store, reader, thread, ns, checkpoint_id, filter, before_id, limit):
                yield page
                limit = None if limit is None else limit - len(page)

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Callable[[], RunnableConfig]:
        """Encode a checkpoint now and return the function that stores it."""
        location, parent = location_of(config), checkpoint_id_of(config)
        is_next = parent is not None and not may_fork(parent) and parent != checkpoint["id"]
        cached = self._heads.take(location.name(str(parent))) if is_next else None
        described = get_checkpoint_metadata(config, metadata)
        # A checkpoint without a parent is the first one of its namespace, unless it copies a first one, the graph
        # around a subgraph replays from before the call of it, or no run of LangGraph puts it.
        configurable = config["configurable"]
        copies = metadata.get("source") == "fork" or configurable.get("__pregel_replay_state")
        is_first = not copies and (_DURABILITY in configurable or metadata.get("step", 0) < 0)
        prepared = prepare(location, checkpoint, parent, described, new_versions, self.serde, cached, is_first)

        def put() -> RunnableConfig:
            store, checkpoint_id = self._access.store, prepared.checkpoint_id
            self._putter.put(store, prepared, cached)
            source, at_exit = prepared.fields.get("trigger", ""), configurable.get(_DURABILITY) == "exit"
            self._open_interrupts.stored(store, location, checkpoint_id, parent, source, at_exit=at_exit)
            return config_of(location, checkpoint_id)  # type: ignore[return-value]

        return put

    def _write(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Callable[[], None]:
        """Encode the writes now and return the function that stores them."""
        location, checkpoint_id = location_of(config), checkpoint_id_of(config)
        if checkpoint_id is None:
            raise InvalidInput(
                "the config of put_writes has no checkpoint_id",
                thread=location.thread,
                hint="Pass the config that put() returned",
            )
        rows = []
        for position, (channel, value) in enumerate(writes):
            body = to_body(dump(self.serde, value, f"writes.{channel}"))
            index = WRITES_IDX_MAP.get(channel, position)
            rows.append(WriteRow(task_id, index, channel, body.kind, body.count, body.data, task_path))
        replace = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        branch = BranchKey(self._services.namespace, location.thread, location.scope, MAIN)
        name = location.name(checkpoint_id)

        def write() -> None:
            store = self._access.store
            store.write(branch, name, rows, replace)
            self._open_interrupts.wrote(
                store,
                location,
                checkpoint_id,
                task_id,
                task_path,
                writes,
                encrypted=isinstance(self.serde, EncryptedSerializer),
                outer=config["configurable"].get("checkpoint_map"),
            )

        return write
