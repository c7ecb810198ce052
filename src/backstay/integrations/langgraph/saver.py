"""``BackstaySaver``: LangGraph's saver contract over any of our stores, sync and async in one class.

The async verbs run the sync ones in a worker thread, so that an event loop never waits for a disk; both may be used at
the same time, from any thread and any loop. What is stored is encoded first, in the caller's thread: it may change
while the caller waits.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
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

from backstay.errors import InvalidInput, NotFound
from backstay.integrations.langgraph import delta, keep
from backstay.integrations.langgraph.description import ID, NS
from backstay.integrations.langgraph.desk import Desk, Desks
from backstay.integrations.langgraph.inbox import Inbox
from backstay.integrations.langgraph.names import (
    Place,
    checkpoint_id_of,
    config_of,
    may_fork,
    place_of,
    thread_name,
)
from backstay.integrations.langgraph.prepared import Prepared, prepare
from backstay.integrations.langgraph.put import OnConflict, Putter
from backstay.integrations.langgraph.read import Listing, Reader, listing
from backstay.integrations.langgraph.sealed import encrypting
from backstay.integrations.langgraph.serde.safe import OnChange, hardened
from backstay.integrations.langgraph.serde.trusted import Allow
from backstay.integrations.langgraph.values import dump, to_body
from backstay.integrations.langgraph.view import compare
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.store.base import LaneKey, Query, WriteRow
from backstay.thread.access import access_of
from backstay.thread.diff import Diff
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.removal import thread_names
from backstay.thread.retention import Keep, Pruned
from backstay.thread.store import Store
from backstay.thread.store import open as open_store

P = ParamSpec("P")
T = TypeVar("T")
_DURABILITY = "__pregel_durability"  # where LangGraph's config says when checkpoints are stored


def _awaited(
    method: Callable[Concatenate[BackstaySaver, P], T],
) -> Callable[Concatenate[BackstaySaver, P], Coroutine[Any, Any, T]]:
    """Return a method of the saver for an event loop: the same, run in a worker thread."""

    @functools.wraps(method)
    async def call(self: BackstaySaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._access.offload.run(method, self, *args, **kwargs)

    return call


class BackstaySaver(BaseCheckpointSaver[Any]):
    """A checkpointer for ``graph.compile(checkpointer=…)``.

    ``store`` is an open store, or the URL of one, which the saver then closes with itself.
    ``on_conflict`` says what becomes of a run that went on from a checkpoint from which another has gone on meanwhile:
    it is told (``"raise"``), or what it saves is kept as a branch of its own (``"branch"``).
    ``allow``, ``strict`` and ``on_change`` say which classes may be loaded, and what becomes of a value that would come
    back changed: see ``SafeSerializer``, which takes the place of LangGraph's ``JsonPlusSerializer``, also inside an
    ``EncryptedSerializer``. Any other ``serde`` is used as it is.
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
            raise InvalidInput(f"on_conflict is {on_conflict!r}", hint='Pass "raise" or "branch"')
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else open_store(store)
        self._access = access_of(self.store)
        self._context = self._access.context
        self._desks = Desks()
        self._putter = Putter(self._context, self._desks, on_conflict)
        self._inbox = Inbox(self._context)

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
        await asyncio.to_thread(self.close)  # not by one of the workers, which it waits for

    # Reading ------------------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that a config names, or the newest one of its thread and namespace."""
        place, checkpoint_id = place_of(config), checkpoint_id_of(config)
        found = self._reader().get(self._access.store, place, checkpoint_id)
        if found is not None and checkpoint_id is None:
            self._inbox.read(
                self._access.store,
                place,
                found.checkpoint["id"],
                found.pending_writes,
                encrypted=encrypting(self.serde) is not None,
                outer=_outer(config),
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
        left = limit
        for begin in self._lists(config, filter, before):
            listed = begin(left)
            while not listed.done:
                yield from listed.next_page(self._access.store)
            left = listed.left

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Do what ``list`` does."""
        left = limit
        for begin in await self._access.offload.run(self._lists, config, filter, before):
            listed = await self._access.offload.run(begin, left)
            while not listed.done:
                for found in await self._access.arun(listed.next_page):
                    yield found
            left = listed.left

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes from which channels that are kept as writes only are rebuilt."""
        if not channels:
            return {}
        reader, place, checkpoint_id = self._reader(), place_of(config), checkpoint_id_of(config)
        namespace = self._context.namespace
        if checkpoint_id is None:
            query = Query(namespace, place.thread, place.scope, limit=1, writes=True)
        else:
            query = Query(namespace, ids=(place.name(checkpoint_id),), writes=True)
        rows = self._access.store.find(query)
        if not rows:
            return {channel: {"writes": []} for channel in channels}
        trails = delta.walk(self._access.store, rows[0], channels)
        found: Mapping[str, Any] = delta.decoded(trails, reader.value_of)
        return found

    def diff(self, before: RunnableConfig, after: RunnableConfig) -> Diff:
        """Return what has changed in the channels between two checkpoints, with messages as plain data."""
        reader, found = self._reader(), []
        for config in (before, after):
            place, checkpoint_id = place_of(config), checkpoint_id_of(config)
            each = reader.get(self._access.store, place, checkpoint_id)
            if each is None:
                raise NotFound(checkpoint_id or "the newest checkpoint", thread=place.thread)
            found.append(each)
        return compare(*found)

    def config_of(self, checkpoint: CheckpointMeta) -> RunnableConfig:
        """Return the config under which LangGraph knows a checkpoint that a list of the store shows."""
        place = Place(checkpoint.thread_id, checkpoint.metadata.get(NS, checkpoint.scope))
        checkpoint_id = checkpoint.metadata.get(ID) or place.original(checkpoint.id)
        if checkpoint_id is None:
            raise InvalidInput(
                f"checkpoint {checkpoint.id} was not saved by LangGraph",
                thread=checkpoint.thread_id,
                checkpoint=checkpoint.id,
            )
        return config_of(place, str(checkpoint_id))  # type: ignore[return-value]

    # Writing ------------------------------------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint and return the config that names it."""
        prepared, desk = self._prepare(config, checkpoint, metadata, new_versions)
        self._put(prepared, desk, config)
        return _config_after(prepared)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Do what ``put`` does."""
        prepared, desk = self._prepare(config, checkpoint, metadata, new_versions)
        await self._access.offload.run(self._put, prepared, desk, config)
        return _config_after(prepared)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store what a task has written, before the step it belongs to is over."""
        self._write(config, writes, task_id, task_path)()

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Do what ``put_writes`` does."""
        await self._access.offload.run(self._write(config, writes, task_id, task_path))

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the version after another one: whole numbers, or the kind that an imported thread has."""
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
        self._desks.forget_thread(thread)
        self._inbox.forget(thread)
        self._access.store.delete_thread(self._context.namespace, thread)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, in whichever thread; other checkpoints remain what they are."""
        keep.delete_runs(self._access.store, self._context, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with all its namespaces, checkpoints and writes; their bytes are shared."""
        keep.copy_thread(
            self._access.store, self._context, thread_name(source_thread_id), thread_name(target_thread_id)
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all but the newest checkpoint of each namespace of some threads, or all of them."""
        if strategy not in ("keep_latest", "delete"):
            raise InvalidInput(f"there is no strategy {strategy!r}", hint='Pass "keep_latest" or "delete"')
        for thread in map(thread_name, thread_ids):
            if strategy == "delete":
                self.delete_thread(thread)
            else:
                keep.keep_latest(self._access.store, self._context, thread)

    def retain(self, rules: Keep, *, thread_id: str | None = None, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not want, in a thread or in all; what stays is as it was."""
        return keep.retain(self._access.store, self._context, _name_or_none(thread_id), rules, dry_run)

    # What waits ---------------------------------------------------------------------------------------------------

    def interrupts(self, thread_id: str | None = None) -> builtins.list[InterruptRecord]:
        """Return what waits for an answer, oldest first: in a thread or in all, subgraphs included."""
        return self._inbox.waiting(self._access.store, _name_or_none(thread_id))

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
        # The serializer of the moment: graphs swap it on their copies of the saver.
        return Reader(self._context, self.serde, self._desks)

    def _put(self, prepared: Prepared, desk: Desk | None, config: RunnableConfig) -> None:
        store = self._access.store
        self._putter.put(store, prepared, desk)
        self._inbox.stored(
            store,
            prepared.place,
            prepared.checkpoint_id,
            prepared.parent,
            prepared.notes.get("trigger", ""),
            at_exit=config["configurable"].get(_DURABILITY) == "exit",
        )

    def _lists(
        self, config: RunnableConfig | None, filter: dict[str, Any] | None, before: RunnableConfig | None
    ) -> builtins.list[Callable[[int | None], Listing]]:
        """Return functions that begin a list each, given how many are wanted: one for each thread."""
        reader = self._reader()
        begin_before = None if before is None else checkpoint_id_of(before)
        threads: Collection[str]
        if config is None or "thread_id" not in config.get("configurable", {}):
            threads, ns, checkpoint_id = thread_names(self._access.store, self._context), None, None
        else:
            place = place_of(config)
            ns = place.ns if "checkpoint_ns" in config["configurable"] else None
            threads, checkpoint_id = [place.thread], checkpoint_id_of(config)

        store = self._access.store

        def begin(thread: str) -> Callable[[int | None], Listing]:
            return lambda left: listing(store, reader, thread, ns, checkpoint_id, filter, begin_before, left)

        return [begin(thread) for thread in threads]

    def _prepare(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> tuple[Prepared, Desk | None]:
        place, parent = place_of(config), checkpoint_id_of(config)
        is_next = parent is not None and not may_fork(parent) and parent != checkpoint["id"]
        desk = self._desks.take(place.name(str(parent))) if is_next else None
        described = get_checkpoint_metadata(config, metadata)
        begins = _found_nothing(config, metadata)
        return prepare(place, checkpoint, parent, described, new_versions, self.serde, desk, begins), desk

    def _write(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Callable[[], None]:
        """Encode here and now, and return the function that stores it."""
        place, checkpoint_id = place_of(config), checkpoint_id_of(config)
        if checkpoint_id is None:
            raise InvalidInput("writes belong to a checkpoint, and the config names none", thread=place.thread)
        rows = []
        for position, (channel, value) in enumerate(writes):
            body = to_body(dump(self.serde, value, f"writes.{channel}"))
            index = WRITES_IDX_MAP.get(channel, position)
            rows.append(WriteRow(task_id, index, channel, body.kind, body.count, body.data, task_path))
        replace = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        lane = LaneKey(self._context.namespace, place.thread, place.scope, MAIN)
        name = place.name(checkpoint_id)

        def write() -> None:
            store = self._access.store
            store.write(lane, name, rows, replace)
            self._inbox.wrote(
                store,
                place,
                checkpoint_id,
                task_id,
                task_path,
                writes,
                encrypted=encrypting(self.serde) is not None,
                outer=_outer(config),
            )

        return write


def _config_after(prepared: Prepared) -> RunnableConfig:
    return config_of(prepared.place, prepared.checkpoint_id)  # type: ignore[return-value]


def _found_nothing(config: RunnableConfig, metadata: CheckpointMetadata) -> bool:
    """Tell whether a checkpoint without a parent has none because its run found its namespace empty.

    It is otherwise if it is a copy of a first one, if the graph around a subgraph is replayed from before it was
    called, or if it is no run of LangGraph's at all that puts it.
    """
    configurable = config["configurable"]
    if metadata.get("source") == "fork" or configurable.get("__pregel_replay_state"):
        return False
    return _DURABILITY in configurable or metadata.get("step", 0) < 0


def _outer(config: RunnableConfig) -> Mapping[str, str] | None:
    """Return which checkpoints of the graphs around it a subgraph runs in."""
    return config["configurable"].get("checkpoint_map")


def _name_or_none(thread_id: str | None) -> str | None:
    return None if thread_id is None else thread_name(thread_id)
