"""``BackstaySaver``: LangGraph's saver contract over any of our stores, sync and async in one class.

Every verb is a flow. The sync ones run it here and now, the async ones in a worker thread, so that an event loop never
waits for a disk; both may be used at the same time, from any thread and any loop.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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
from backstay.integrations.langgraph.read import Reader, listing
from backstay.integrations.langgraph.sealed import encrypting
from backstay.integrations.langgraph.serde.safe import OnChange, hardened
from backstay.integrations.langgraph.serde.trusted import Allow
from backstay.integrations.langgraph.values import dump, to_body
from backstay.integrations.langgraph.view import compare
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.store.base import LaneKey, Query, WriteRow
from backstay.thread.diff import Diff
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.offload import Offload
from backstay.thread.perform import Flow, ask, drive
from backstay.thread.removal import thread_names
from backstay.thread.retention import Keep, Pruned
from backstay.thread.store import Store
from backstay.thread.store import open as open_store

T = TypeVar("T")
_DURABILITY = "__pregel_durability"  # where LangGraph's config says when checkpoints are stored


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
        self._context = self.store._context
        self._offload = Offload(self.store._backend)
        self._desks = Desks()
        self._putter = Putter(self._context, self._desks, on_conflict)
        self._inbox = Inbox(self._context)

    # Opening and closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers, and close the store if the saver opened it. Closing twice is fine."""
        self._offload.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> BackstaySaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> BackstaySaver:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # Reading ------------------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that a config names, or the newest one of its thread and namespace."""
        return self._run(self._get(config))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Do what ``get_tuple`` does."""
        return await self._arun(self._get(config))

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
        for begin in self._run(self._lists(config, filter, before)):
            listed = self._run(begin(left))
            while not listed.done:
                yield from self._run(listed.next_page())
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
        for begin in await self._arun(self._lists(config, filter, before)):
            listed = await self._arun(begin(left))
            while not listed.done:
                for found in await self._arun(listed.next_page()):
                    yield found
            left = listed.left

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes from which channels that are kept as writes only are rebuilt."""
        return self._run(self._history(config, channels))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Do what ``get_delta_channel_history`` does."""
        return await self._arun(self._history(config, channels))

    def diff(self, before: RunnableConfig, after: RunnableConfig) -> Diff:
        """Return what has changed in the channels between two checkpoints, with messages as plain data."""
        return self._run(self._diff(before, after))

    async def adiff(self, before: RunnableConfig, after: RunnableConfig) -> Diff:
        """Do what ``diff`` does."""
        return await self._arun(self._diff(before, after))

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
        self._run(self._put(prepared, desk, config))
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
        await self._arun(self._put(prepared, desk, config))
        return _config_after(prepared)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store what a task has written, before the step it belongs to is over."""
        self._run(self._write(config, writes, task_id, task_path))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Do what ``put_writes`` does."""
        await self._arun(self._write(config, writes, task_id, task_path))

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
        self._run(self._delete_thread(thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        """Do what ``delete_thread`` does."""
        await self._arun(self._delete_thread(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, in whichever thread; other checkpoints remain what they are."""
        self._run(keep.delete_runs(self._context, run_ids))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Do what ``delete_for_runs`` does."""
        await self._arun(keep.delete_runs(self._context, run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with all its namespaces, checkpoints and writes; their bytes are shared."""
        self._run(keep.copy_thread(self._context, thread_name(source_thread_id), thread_name(target_thread_id)))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Do what ``copy_thread`` does."""
        await self._arun(keep.copy_thread(self._context, thread_name(source_thread_id), thread_name(target_thread_id)))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all but the newest checkpoint of each namespace of some threads, or all of them."""
        self._run(self._prune(thread_ids, strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Do what ``prune`` does."""
        await self._arun(self._prune(thread_ids, strategy))

    def retain(self, rules: Keep, *, thread_id: str | None = None, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not want, in a thread or in all; what stays is as it was."""
        return self._run(keep.retain(self._context, _name_or_none(thread_id), rules, dry_run))

    async def aretain(self, rules: Keep, *, thread_id: str | None = None, dry_run: bool = False) -> Pruned:
        """Do what ``retain`` does."""
        return await self._arun(keep.retain(self._context, _name_or_none(thread_id), rules, dry_run))

    # What waits ---------------------------------------------------------------------------------------------------

    def interrupts(self, thread_id: str | None = None) -> builtins.list[InterruptRecord]:
        """Return what waits for an answer, oldest first: in a thread or in all, subgraphs included."""
        return self._run(self._inbox.waiting(_name_or_none(thread_id)))

    async def ainterrupts(self, thread_id: str | None = None) -> builtins.list[InterruptRecord]:
        """Do what ``interrupts`` does."""
        return await self._arun(self._inbox.waiting(_name_or_none(thread_id)))

    # Flows --------------------------------------------------------------------------------------------------------

    def _run(self, flow: Flow[T]) -> T:
        return drive(flow, self.store._backend)

    async def _arun(self, flow: Flow[T]) -> T:
        return await self._offload.run(flow)

    def _reader(self) -> Reader:
        # The serializer of the moment: graphs swap it on their copies of the saver.
        return Reader(self._context, self.serde, self._desks)

    def _get(self, config: RunnableConfig) -> Flow[CheckpointTuple | None]:
        place, checkpoint_id = place_of(config), checkpoint_id_of(config)
        found = yield from self._reader().get(place, checkpoint_id)
        if found is not None and checkpoint_id is None:
            yield from self._inbox.read(
                place,
                found.checkpoint["id"],
                found.pending_writes,
                encrypted=encrypting(self.serde) is not None,
                outer=_outer(config),
            )
        return found

    def _diff(self, before: RunnableConfig, after: RunnableConfig) -> Flow[Diff]:
        reader, found = self._reader(), []
        for config in (before, after):
            place, checkpoint_id = place_of(config), checkpoint_id_of(config)
            each = yield from reader.get(place, checkpoint_id)
            if each is None:
                raise NotFound(checkpoint_id or "the newest checkpoint", thread=place.thread)
            found.append(each)
        return compare(*found)

    def _put(self, prepared: Prepared, desk: Desk | None, config: RunnableConfig) -> Flow[None]:
        yield from self._putter.put(prepared, desk)
        yield from self._inbox.stored(
            prepared.place,
            prepared.checkpoint_id,
            prepared.parent,
            prepared.notes.get("trigger", ""),
            at_exit=config["configurable"].get(_DURABILITY) == "exit",
        )

    def _lists(
        self, config: RunnableConfig | None, filter: dict[str, Any] | None, before: RunnableConfig | None
    ) -> Flow[Iterable[Any]]:
        """Return functions that begin a list each, given how many are wanted: one for each thread."""
        reader = self._reader()
        begin_before = None if before is None else checkpoint_id_of(before)
        threads: Collection[str]
        if config is None or "thread_id" not in config.get("configurable", {}):
            threads, ns, checkpoint_id = (yield from thread_names(self._context)), None, None
        else:
            place = place_of(config)
            ns = place.ns if "checkpoint_ns" in config["configurable"] else None
            threads, checkpoint_id = [place.thread], checkpoint_id_of(config)

        def begin(thread: str) -> Any:
            return lambda left: listing(reader, thread, ns, checkpoint_id, filter, begin_before, left)

        return [begin(thread) for thread in threads]

    def _history(self, config: RunnableConfig, channels: Sequence[str]) -> Flow[Mapping[str, Any]]:
        if not channels:
            return {}
        reader, place, checkpoint_id = self._reader(), place_of(config), checkpoint_id_of(config)
        namespace = self._context.namespace
        if checkpoint_id is None:
            query = Query(namespace, place.thread, place.scope, limit=1, writes=True)
        else:
            query = Query(namespace, ids=(place.name(checkpoint_id),), writes=True)
        rows = yield from ask(lambda store: store.find(query))
        if not rows:
            return {channel: {"writes": []} for channel in channels}
        trails = yield from delta.walk(rows[0], channels)
        return delta.decoded(trails, reader.value_of)

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
    ) -> Flow[None]:
        """Encode here and now, store when the flow is run."""
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

        def write() -> Flow[None]:
            yield from ask(lambda store: store.write(lane, name, rows, replace))
            yield from self._inbox.wrote(
                place,
                checkpoint_id,
                task_id,
                task_path,
                writes,
                encrypted=encrypting(self.serde) is not None,
                outer=_outer(config),
            )

        return write()

    def _delete_thread(self, thread_id: str) -> Flow[None]:
        thread = thread_name(thread_id)
        self._desks.forget_thread(thread)
        self._inbox.forget(thread)
        yield from ask(lambda store: store.delete_thread(self._context.namespace, thread))

    def _prune(self, thread_ids: Sequence[str], strategy: str) -> Flow[None]:
        if strategy not in ("keep_latest", "delete"):
            raise InvalidInput(f"there is no strategy {strategy!r}", hint='Pass "keep_latest" or "delete"')
        for thread in map(thread_name, thread_ids):
            if strategy == "delete":
                yield from self._delete_thread(thread)
            else:
                yield from keep.keep_latest(self._context, thread)


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
