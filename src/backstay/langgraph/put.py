"""Storing a checkpoint that LangGraph puts: encode it, find its branch, commit it.

``prepare`` runs in the caller's thread. LangGraph hands over live objects and keeps changing them, so everything that
may change is encoded there, before the put waits for anything. A channel with the same version as in the parent is not
even looked at.

``Putter`` then decides where the checkpoint belongs:

- If its parent is the head of a branch, it becomes the new head.
- If its parent already had a successor when it was read (time travel, an update of an old checkpoint), it starts a
  branch.
- If its parent was a head when it was read and no longer is, two runs continued from the same checkpoint. One has won;
  the other gets a ``Conflict``, or a branch of its own.
- If its id exists, an equal checkpoint changes nothing, and a different one replaces the head of its branch.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from backstay.errors import Conflict, Corrupted, Fenced, IdTaken
from backstay.langgraph.encoding import LIST, PARENT, dump, fields_for, names_and_versions, to_body, versions_in
from backstay.langgraph.lists import ENCRYPTED_LIST, EncryptedList, KnownMessages
from backstay.langgraph.names import GraphLocation, may_fork
from backstay.langgraph.runs import SaverRun
from backstay.model.checkpoint import MAIN, CheckpointFields
from backstay.model.ids import check_id
from backstay.operations.cursor import Base, Cursor, Services
from backstay.operations.leases import HeldLease
from backstay.operations.listing import every_branch
from backstay.operations.load import current_head, find_row, load_values, open_head_state
from backstay.operations.rows import meta_of
from backstay.operations.save import SaveRequest, commit_change
from backstay.pieces.body import Body
from backstay.pieces.body import to_body as encode_own
from backstay.pieces.head_state import Change, HeadState, StoredValue
from backstay.pieces.manifest import RUN, VERSIONS, root_digest
from backstay.store.base import Backend, BranchKey, Head, Query, Row

# The heads of branches that a saver remembers between two puts: their state, versions and message lists.
#
# The cache only saves reads. An entry belongs to one head. A put takes the entry out, changes it and stores it under
# the new head, so no two puts share one, and a put that fails forgets its entry by not storing it. A put that finds no
# entry reads the store. A read stores entries too; those hold the bytes of the state, but no base to write on.


Known = KnownMessages | bytes
"""The saver compares a new list with this: its messages, or the digests of an encrypted list."""

HEADS_MAX = 512
HEADS_BYTES_MAX = 64 * 1024 * 1024
"""How many bytes of states the cache holds; it drops the least recently used branch first."""


@dataclass(slots=True, eq=False)
class CachedHead:
    """One branch whose head is known."""

    cursor: Cursor
    versions: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)  # by channel
    serde: object = None  # the serializer that wrote the known lists

    @property
    def size(self) -> int:
        """Return roughly how many bytes the entry takes."""
        base, head_state = self.cursor.base, self.cursor.head_state
        if base is not None and base.head is not None:
            lists = self.known.values()
            return base.head.size + sum(each.size if isinstance(each, KnownMessages) else len(each) for each in lists)
        return 0 if head_state is None else sum(value.entry.size for value in head_state.values.values())


class HeadCache:
    """The cached heads of a saver, by checkpoint id."""

    def __init__(self) -> None:
        self._renew()

    def take(self, head: str) -> CachedHead | None:
        """Remove and return the entry of a head, or None."""
        self._check_process()
        with self._lock:
            cached, _ = self._heads.pop(head, (None, 0))
        return None if cached is None or cached.cursor.head_state is None else cached

    def add(self, cached: CachedHead, read: Row | None = None) -> None:
        """Remember a head that was just stored, or just ``read``. A read never replaces the entry of a put."""
        self._check_process()
        base = cached.cursor.base
        row = base.head if read is None and base is not None else read
        if row is None:
            return
        entry = (cached, cached.size)
        with self._lock:
            if row.id in self._heads and read is not None:
                return
            self._heads.pop(row.id, None)
            self._heads[row.id] = entry
            # Summed up each time: an interrupt between two changes would leave a running sum wrong forever.
            while len(self._heads) > HEADS_MAX or (
                len(self._heads) > 1 and sum(size for _, size in list(self._heads.values())) > HEADS_BYTES_MAX
            ):
                self._heads.popitem(last=False)

    def forget_thread(self, thread: str) -> None:
        """Forget all branches of a thread."""
        with self._lock:
            for head, (cached, _) in list(self._heads.items()):
                if cached.cursor.branch.thread == thread:
                    self._heads.pop(head, None)

    def _check_process(self) -> None:
        if self._process != os.getpid():  # a forked child must not continue the puts of its parent
            self._renew()

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call the saver while this thread holds the lock
        self._heads: OrderedDict[str, tuple[CachedHead, int]] = OrderedDict()  # with the size of each
        self._process = os.getpid()


OnConflict = Literal["raise", "branch"]


# One put ------------------------------------------------------------------------------------------------------


ChannelUpdate = Callable[[Change, StoredValue | None, bool], None]
"""Adds the new value of a channel to a change.

It gets the channel's present value, and whether that belongs to the parent of the checkpoint.
"""


@dataclass(slots=True)
class PreparedPut:
    """One put, encoded and ready to be stored."""

    location: GraphLocation
    checkpoint_id: str
    parent: str | None
    changed: Mapping[str, Any]  # the channels that LangGraph reports as changed
    versions: dict[str, Any]
    fields: CheckpointFields
    names_body: Body
    versions_body: Body
    serde: SerializerProtocol
    is_first: bool  # the run found its namespace empty
    updates: dict[str, ChannelUpdate] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return our id of the checkpoint."""
        return self.location.name(self.checkpoint_id)

    @property
    def parent_name(self) -> str | None:
        """Return our id of its parent."""
        return None if self.parent is None else self.location.name(self.parent)

    def change(self, head_state: HeadState, versions: Mapping[str, Any] | None) -> Change:
        """Return the change from a stored state to this one; ``versions`` are the parent's, None for other states."""
        change = Change(put={RUN: self.names_body, VERSIONS: self.versions_body})
        same = set() if versions is None else _unchanged(self.versions, versions, self.changed)
        for channel, update in self.updates.items():
            stored = head_state.values.get(channel)
            if stored is None or channel not in same:
                update(change, stored, versions is not None)
        change.delete = {key for key in head_state.values if key not in self.updates and key not in change.put}
        return change


def prepare(
    location: GraphLocation,
    checkpoint: Checkpoint,
    parent: str | None,
    metadata: Mapping[str, Any],
    new_versions: Mapping[str, Any],
    serde: SerializerProtocol,
    cached: CachedHead | None,
    is_first: bool = False,
) -> PreparedPut:
    """Encode what a put must store; ``cached`` is what the saver remembers of the parent."""
    check_id(str(checkpoint["id"]), "checkpoint_id")
    names, numbers = names_and_versions(checkpoint, serde)
    prepared = PreparedPut(
        location,
        str(checkpoint["id"]),
        parent,
        new_versions,
        dict(checkpoint["channel_versions"]),
        fields_for(location, checkpoint, parent, metadata),
        encode_own(names, "names"),
        encode_own(numbers, "versions"),
        serde,
        is_first=parent is None and is_first,
    )
    if cached is not None and cached.cursor.base is None:
        cached = None  # it comes from a read, which knows bytes but no versions
    known_lists = cached.known if cached is not None and cached.serde is serde else {}
    same = set() if cached is None else _unchanged(prepared.versions, cached.versions, new_versions)
    for channel, value in checkpoint["channel_values"].items():
        if channel in same or (cached is None and channel in prepared.versions and channel not in new_versions):
            # It is encoded only if the parent turns out not to have it.
            prepared.updates[channel] = partial(_encode_into, serde, channel, value)
            if channel in known_lists:
                prepared.known[channel] = known_lists[channel]
        elif type(value) is list:
            prepared.updates[channel] = _list_update(prepared, channel, value, known_lists.get(channel))
        else:
            prepared.updates[channel] = _encoded(serde, channel, value)
    return prepared


def _list_update(prepared: PreparedPut, channel: str, value: list[Any], known: Known | None) -> ChannelUpdate:
    """Encode a list, or only its new elements, and remember what the next put compares with."""
    serde = prepared.serde
    if isinstance(serde, EncryptedSerializer):
        digests = known if isinstance(known, bytes) else None
        update = EncryptedList(serde, value, _path(channel), digests)
        prepared.known[channel] = update.digests
        return partial(update.into, channel)
    if not isinstance(serde, JsonPlusSerializer):
        return _encoded(serde, channel, value)
    if not (isinstance(known, KnownMessages) and known.count and known.starts(value)):
        messages = KnownMessages.of(value)
        if messages is not None:
            prepared.known[channel] = messages
        return _encoded(serde, channel, value)
    before = known.count
    if known.extend(value[before:]):
        prepared.known[channel] = known
    tail = to_body(dump(serde, value[before:], f"{_path(channel)}[{before}:]"))

    def grow(change: Change, stored: StoredValue | None, is_parents: bool) -> None:
        if stored is None or not is_parents:  # it is not put on its parent, but replaces another with the same id
            _encode_into(serde, channel, value, change, stored, is_parents)
            return
        assert (stored.entry.kind, stored.entry.count) == (LIST, before)
        if tail.count:
            change.append[channel] = tail

    return grow


def _encode_into(
    serde: SerializerProtocol, channel: str, value: Any, change: Change, stored: StoredValue | None, is_parents: bool
) -> None:
    """Encode the whole value of a channel only now, as a part of the change."""
    _encoded(serde, channel, value)(change, stored, is_parents)


def _encoded(serde: SerializerProtocol, channel: str, value: Any) -> ChannelUpdate:
    """Encode the whole value of a channel; comparing bytes finds what it shares with the stored one."""
    if type(value) is list and isinstance(serde, EncryptedSerializer):
        return partial(EncryptedList(serde, value, _path(channel), None).into, channel)
    body = to_body(dump(serde, value, _path(channel)))
    return lambda change, stored, is_parents: change.put.update({channel: body})


def _path(channel: str) -> str:
    return f"channel_values.{channel}"


def _unchanged(versions: Mapping[str, Any], known: Mapping[str, Any], changed: Mapping[str, Any]) -> set[str]:
    """Return the channels with the same version as before that are not reported as changed."""
    return {
        channel
        for channel, version in versions.items()
        if channel not in changed and channel in known and known[channel] == version
    }


# Where it is stored -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Putter:
    """Stores the checkpoints that a saver puts."""

    services: Services
    heads: HeadCache
    on_conflict: OnConflict
    runs: dict[BranchKey, SaverRun] = field(default_factory=dict)  # that this saver executes, by their leased branches

    def put(self, store: Backend, prepared: PreparedPut, cached: CachedHead | None) -> None:
        """Store a checkpoint and remember it as the head; ``cached`` is what the saver remembers of its parent."""
        stored: Cursor | None
        run = self.runs.get(self._branch(prepared, MAIN))
        if run is not None:
            run.raise_if_cancelled(store)
        try:
            if cached is not None and cached.cursor.base is not None:
                try:
                    stored = self._next(store, prepared, cached.cursor, cached.versions)
                except Fenced:
                    if run is not None:
                        raise
                    stored = self._find_place(store, prepared)  # another process had the lease, and may have ended
            else:
                stored = self._find_place(store, prepared, cached)
        except IdTaken:
            stored = self._again(store, prepared)
        if stored is not None:
            self.heads.add(CachedHead(stored, prepared.versions, prepared.known, prepared.serde))

    def _find_place(self, store: Backend, prepared: PreparedPut, read: CachedHead | None = None) -> Cursor | None:
        """Store a checkpoint whose parent is not known, or was only ``read``."""
        if read is not None:
            head = store.head(read.cursor.branch)
            if head is not None and head.row is not None and head.row.id == prepared.parent_name:
                return self._on_head(store, prepared, read.cursor.branch, head, read.cursor.head_state)
        parent_name = prepared.parent_name
        ids = (prepared.name,) if parent_name is None else (prepared.name, parent_name)
        found = {row.id: row for row in store.find(Query(self.services.namespace, ids=ids, payload=True))}
        if prepared.name in found:
            return self._again(store, prepared)
        if parent_name is None:
            return self._start(store, prepared)
        parent = found.get(parent_name)
        if parent is None:
            # A missing parent is fine in an empty namespace, for example after an import of a part of a thread.
            location = prepared.location
            branches = list(every_branch(store, self.services.namespace, location.thread, location.scope))
            if branches:
                return self._lost(store, prepared, branches[-1].key)
            prepared.fields["metadata"] = {**prepared.fields["metadata"], PARENT: str(prepared.parent)}
            return self._start(store, prepared)
        if prepared.parent is not None and may_fork(prepared.parent):
            return self._start_branch(store, prepared, parent, "fork")
        head = store.head(parent.branch)
        if head is None or head.row is None or head.row.id != parent.id:
            return self._lost(store, prepared, parent.branch)
        return self._on_head(store, prepared, parent.branch, head)

    def _start(self, store: Backend, prepared: PreparedPut) -> Cursor | None:
        """Store a checkpoint without a parent."""
        branch = self._branch(prepared, MAIN)
        head = store.head(branch)
        if head is None or head.row is None:
            return self._next(store, prepared, Cursor(branch, Base.of(head), HeadState()), {})
        # A first checkpoint in a namespace that has others: another run started at the same time. The exception is a
        # subgraph that lives for one task only; the graph around it decides to run it again from the start.
        if prepared.is_first and ":" not in prepared.location.ns.rpartition("|")[2]:
            return self._lost(store, prepared, branch)
        return self._start_branch(store, prepared, None, "root")

    def _start_branch(self, store: Backend, prepared: PreparedPut, parent: Row | None, why: str) -> Cursor:
        """Store a checkpoint as the first one of a new branch, on its parent if it has one."""
        head_state, versions = HeadState(), dict[str, Any]()
        if parent is not None:
            head_state = open_head_state(store, parent, {})
            versions = _versions(store, prepared, head_state, parent)
        cursor = Cursor(self._branch(prepared, f"{why}-{prepared.checkpoint_id}"), Base(), head_state)
        return self._commit(store, prepared, cursor, versions, parent, takes_over=parent is not None)

    def _on_head(
        self, store: Backend, prepared: PreparedPut, branch: BranchKey, head: Head, read: HeadState | None = None
    ) -> Cursor:
        """Store a checkpoint on the head of a branch; ``read`` has bytes that a read has verified."""
        assert head.row is not None
        try:
            head_state = open_head_state(store, head.row, head.owned)
            for key, known in read.values.items() if read is not None else ():
                stored = head_state.values.get(key)
                if stored is None or stored.parts is not None or known.hasher is None:
                    continue
                if (stored.entry.kind, stored.entry.digest) == (known.entry.kind, known.entry.digest):
                    stored.parts, stored.hasher = known.parts, known.hasher.copy()
            versions = _versions(store, prepared, head_state, head.row)
        except Corrupted:
            if find_row(store, self.services.namespace, head.row.id) is not None:
                raise
            return self._lost(store, prepared, branch)
        return self._next(store, prepared, Cursor(branch, Base.of(head), head_state), versions)

    def _next(self, store: Backend, prepared: PreparedPut, cursor: Cursor, versions: Mapping[str, Any]) -> Cursor:
        """Store the next checkpoint of a branch, unless another run was faster."""
        assert cursor.base is not None
        try:
            return self._commit(store, prepared, cursor, versions, cursor.base.head)
        except Conflict as lost:
            if isinstance(lost, IdTaken):
                raise
            return self._lost(store, prepared, cursor.branch, lost)

    def _lost(self, store: Backend, prepared: PreparedPut, branch: BranchKey, cause: Conflict | None = None) -> Cursor:
        """Raise a conflict because another run was faster, or store this run's checkpoint in a branch of its own."""
        name, location = prepared.parent_name, prepared.location
        parent = None if name is None else find_row(store, self.services.namespace, name)
        if self.on_conflict == "branch" and (parent is not None or name is None):
            return self._start_branch(store, prepared, parent, "conflict")
        if prepared.parent is None:
            what = "another run started the thread"
        elif parent is not None:
            what = f"another run continued from checkpoint {prepared.parent}"
        else:
            what = f"checkpoint {prepared.parent}, the parent of this one, was deleted"
        where = f"thread {location.thread!r}" + (f", namespace {location.ns!r}" if location.ns else "")
        raise Conflict(
            f"{where}: {what} after this run had read it; checkpoint {prepared.checkpoint_id} was not stored",
            winner=current_head(store, branch),
            thread=location.thread,
            checkpoint=prepared.checkpoint_id,
            hint="Invoke the graph again to continue from the other run's result, allow only one run at a time on a "
            'thread, or keep both results with BackstaySaver(…, on_conflict="branch")',
        ) from cause

    def _commit(
        self,
        store: Backend,
        prepared: PreparedPut,
        cursor: Cursor,
        versions: Mapping[str, Any],
        parent: Row | None,
        takes_over: bool = False,
    ) -> Cursor:
        base, head_state = cursor.take()
        assert base is not None
        assert head_state is not None
        request = SaveRequest(prepared.fields, prepared.name)
        step = 0 if parent is None else parent.step + 1
        change = prepared.change(head_state, versions)
        cursor.lease = self._lease_on(cursor.branch)
        commit_change(store, self.services, cursor, base, head_state, change, request, parent, step, takes_over)
        return cursor

    def _again(self, store: Backend, prepared: PreparedPut) -> Cursor | None:
        """Store a checkpoint whose id exists: skip it if it is equal, otherwise replace the head with it."""
        namespace = self.services.namespace
        row = find_row(store, namespace, prepared.name)
        if row is None:
            return self._find_place(store, prepared)  # it was deleted a moment ago
        head = store.head(row.branch)
        is_head = head is not None and head.row is not None and head.row.id == row.id
        owned = head.owned if head is not None and is_head else {}
        meta, fields = meta_of(row), prepared.fields
        if (meta.metadata, meta.trigger) == (fields["metadata"], fields.get("trigger", "manual")):
            # Planning the change spoils the state, so the replacement below opens it again.
            head_state = open_head_state(store, row, owned)
            load_values(store, head_state, list(head_state.values), row)
            root = root_digest(head_state.entries())
            if head_state.plan(prepared.change(head_state, None), count(1).__next__).root == root:
                return None
        if head is None or not is_head:
            raise IdTaken(
                f"checkpoint {prepared.checkpoint_id} exists with other content and has a successor",
                winner=meta,
                thread=prepared.location.thread,
                checkpoint=prepared.checkpoint_id,
                hint="Only the newest checkpoint of a branch can be replaced; give a new checkpoint its own id",
            )
        head_state = open_head_state(store, row, owned)
        load_values(store, head_state, list(head_state.values), row)
        base = Base.of(head)
        cursor = Cursor(row.branch, base)
        cursor.lease = self._lease_on(row.branch)
        parent = None if row.parent_id is None else find_row(store, namespace, row.parent_id)
        request = SaveRequest(fields, prepared.name, replaces_head=True)
        change = prepared.change(head_state, None)
        commit_change(store, self.services, cursor, base, head_state, change, request, parent, row.step)
        return cursor

    def _lease_on(self, branch: BranchKey) -> HeldLease | None:
        run = self.runs.get(branch)
        return None if run is None else run.held

    def _branch(self, prepared: PreparedPut, name: str) -> BranchKey:
        return BranchKey(self.services.namespace, prepared.location.thread, prepared.location.scope, name[:255])


def _versions(store: Backend, prepared: PreparedPut, head_state: HeadState, row: Row) -> dict[str, Any]:
    """Return the channel versions of a stored checkpoint, and load what comparing with it needs."""
    needed = [
        key
        for key, stored in head_state.values.items()
        if key in (RUN, VERSIONS) or (stored.entry.kind == ENCRYPTED_LIST and key in prepared.updates)
    ]
    load_values(store, head_state, needed, row)
    if RUN not in head_state.values or VERSIONS not in head_state.values:
        return {}  # not saved by LangGraph: no channel is known to be the same
    return versions_in(head_state.values[RUN].value(), head_state.values[VERSIONS].value())
