"""``CheckpointStore``: save, load, list, delete, clear; in memory, or in any store of Backstay's.

A checkpoint that names its run is kept in that run's thread, after the others, and costs what is new in it; one that
names none is a thread of its own. All of them can also be read with ``backstay.open``: the state's keys are the
snapshot's, the position and the pause are where Backstay keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from backstay.compat import shelf
from backstay.compat.folding import fold, unfold
from backstay.compat.listed import Listed, Problem
from backstay.compat.opened import OpenedStore, Place
from backstay.compat.shelf import FACE, Draft, Found, FoundPage
from backstay.compat.workflow.checkpoint import Checkpoint, CheckpointInfo, InterruptType
from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointMeta, Notes
from backstay.model.interrupt import Interrupt
from backstay.store.base import Backend
from backstay.thread.access import access_of
from backstay.thread.arguments import lane_key
from backstay.thread.cursor import Context
from backstay.thread.history import EVERY_BRANCH, Filter, listing_of_thread
from backstay.thread.removal import thread_names

_FACE = "workflow"
_BARE = "state_snapshot"  # the key of a snapshot that is no JSON object


class CheckpointStore(ABC):
    """A place that keeps workflow checkpoints by id. Safe to share between tasks."""

    @abstractmethod
    async def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint; one with the same id is replaced."""

    @abstractmethod
    async def load(self, id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if it is not there. Whoever changes it changes a copy."""

    @abstractmethod
    async def list(
        self, *, graph_name: str | None = None, run_id: str | None = None, limit: int | None = None
    ) -> Listed[CheckpointInfo]:
        """Return summaries of all, or of one graph or run, newest first; damaged ones are among its ``problems``."""

    @abstractmethod
    async def delete(self, id: str) -> int:
        """Delete a checkpoint and return how many went: 1, or 0 if it was not there."""

    @abstractmethod
    async def clear(self) -> int:
        """Delete all checkpoints and return how many went."""

    async def latest(self, run_id: str) -> Checkpoint | None:
        """Return the newest checkpoint of a run, or None."""
        newest = await self.list(run_id=run_id, limit=1)
        return await self.load(newest[0].id) if newest else None

    async def delete_run(self, run_id: str) -> int:
        """Delete the checkpoints of a run and return how many went."""
        return sum([await self.delete(info.id) for info in await self.list(run_id=run_id)])

    async def close(self) -> None:  # noqa: B027  # nothing to close is a good answer
        """Release what is held. Closing twice is fine."""


class StoreCheckpointStore(CheckpointStore):
    """The store over a Backstay store: an open one, or the path or URL of one that is opened when first used."""

    def __init__(self, store: Place, *, namespace: str = "") -> None:
        self._opened = OpenedStore(store, namespace)

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint; one with the same id is replaced. A run's id and a checkpoint's cannot be exchanged."""
        draft = _draft(checkpoint.to_dict())
        access = access_of(await self._opened.store())
        await access.arun(shelf.put, access.context, _FACE, draft, _wire)

    async def load(self, id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if it is not there; every byte is verified."""
        access = access_of(await self._opened.store())
        found = await access.arun(shelf.get, access.context, id)
        return None if found is None or not _is_ours(found.meta) else Checkpoint.from_dict(_wire(found))

    async def list(
        self, *, graph_name: str | None = None, run_id: str | None = None, limit: int | None = None
    ) -> Listed[CheckpointInfo]:
        """Return summaries, newest first; no state is read."""
        access = access_of(await self._opened.store())
        page = await access.arun(_entries, access.context)
        problems = [Problem("damaged", entry.id or "?", entry.error.what) for entry in page.damaged]
        return chosen(map(_info, page.items), problems, graph_name, run_id, limit)

    async def delete(self, id: str) -> int:
        """Delete a checkpoint, also a damaged one, and return how many went: 1, or 0 if it was not there."""
        access = access_of(await self._opened.store())
        meta = await access.arun(shelf.look, access.context, id)
        return await self._delete([id]) if meta is not None and _is_ours(meta) else 0

    async def clear(self) -> int:
        """Delete what was saved through this interface, in one step, and nothing else; return how many went."""
        access = access_of(await self._opened.store())
        return await self._delete([found.meta.id for found in (await access.arun(_entries, access.context)).items])

    async def close(self) -> None:
        """Close the store, if it was opened here."""
        await self._opened.close()

    async def _delete(self, names: Collection[str]) -> int:
        access = access_of(await self._opened.store())
        return (await access.arun(shelf.delete, access.context, names, protect=False)).checkpoints


class MemoryCheckpointStore(StoreCheckpointStore):
    """A store that lives as long as the program: Backstay's ``memory:``."""

    def __init__(self) -> None:
        super().__init__("memory:")


def chosen(
    infos: Iterable[CheckpointInfo],
    problems: Iterable[Problem],
    graph_name: str | None,
    run_id: str | None,
    limit: int | None,
) -> Listed[CheckpointInfo]:
    """Return the summaries that are wanted, newest first; of two from the same moment, in the order given."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidInput(f"limit must be a whole number from 0 on, or None for all, not {limit!r}")
    wanted = [info for info in infos if graph_name in (None, info.graph_name) and run_id in (None, info.run_id)]
    wanted.sort(key=lambda info: info.created_at, reverse=True)
    return Listed(wanted[:limit], problems)


# Between the records and the shelf --------------------------------------------------------------------------------


def _entries(store: Backend, context: Context) -> FoundPage:
    """Return all checkpoints that were saved through this face, thread by thread."""
    found, damaged = [], []
    for name in reversed(thread_names(store, context)):
        lane = lane_key(context.namespace, name, MAIN, "")
        listing = listing_of_thread(lane, None, None, EVERY_BRANCH, Filter(where={FACE: _FACE}))
        while not listing.done:
            page = shelf.next_page(store, context, listing)
            found += page.items
            damaged += page.damaged
    return FoundPage(found, damaged)


def _draft(plain: dict[str, Any]) -> Draft:
    checkpoint = Checkpoint.from_dict(plain)
    snapshot, told = plain["state_snapshot"], {}
    if type(snapshot) is not dict:
        snapshot, told = {_BARE: snapshot}, {"bare": True}
    state, renamed = fold(snapshot, {"pending_action": plain["pending_action"]})
    if renamed:
        told["renamed"] = True
    shelf.check_names(checkpoint.extra, "key")
    node = checkpoint.current_node or None
    notes: Notes = {
        "created_at": checkpoint.created_at,
        "graph": checkpoint.graph_name or None,
        "next_node": node,
        "last_node": checkpoint.path[-1] if checkpoint.path else None,
        "path": checkpoint.path,
        "interrupt": Interrupt(id=checkpoint.id, kind=checkpoint.interrupt_type, node=node),
        "run_id": checkpoint.run_id,
        "metadata": checkpoint.extra,
    }
    return Draft(
        thread=checkpoint.run_id or checkpoint.id,
        id=checkpoint.id,
        step=checkpoint.step_count,
        parent=None,
        state=state,
        notes=notes,
        told=told,
        wire=plain,
    )


def _is_ours(meta: CheckpointMeta) -> bool:
    return meta.metadata.get(FACE) == _FACE


def _wire(found: Found) -> dict[str, Any]:
    if found.wire is not None:
        return found.wire
    checkpoint, told = found.checkpoint, found.told
    state = unfold(checkpoint.state, ("pending_action",), bool(told.get("renamed")))
    info = _info(found)
    return Checkpoint(
        **info.__dict__,
        state_snapshot=state[_BARE] if told.get("bare") else state,
        path=list(checkpoint.path),
        pending_action=checkpoint.pending_action,
        extra=found.metadata,
    ).to_dict()


def _info(found: Found) -> CheckpointInfo:
    if found.wire is not None:
        return CheckpointInfo.of(Checkpoint.from_dict(found.wire))
    meta = found.meta
    assert meta.interrupt is not None  # every one of ours has it
    return CheckpointInfo(
        id=meta.id,
        graph_name=meta.graph or "",
        current_node=meta.next_node or "",
        step_count=found.step,
        created_at=meta.created_at,
        interrupt_type=InterruptType(meta.interrupt.kind),
        run_id=meta.run_id,
    )
