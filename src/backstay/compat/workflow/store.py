"""``CheckpointStore``: save, load, list, delete and clear, in memory or in any Backstay store.

A checkpoint that names its run is stored in that run's thread, after the others, and costs only its new bytes. One
without a run has a thread of its own. ``backstay.open`` can read all of them: the keys of the state are those of the
snapshot, and the position and the pause are in the usual fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from backstay.compat import upsert
from backstay.compat.adapter import AdapterStore, Listed, Problem, StoreOrUrl
from backstay.compat.upsert import ADAPTER, Draft, Found, FoundPage, join_state, split_state
from backstay.compat.workflow.checkpoint import Checkpoint, CheckpointInfo, InterruptType
from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointFields, CheckpointMeta
from backstay.model.decision import Interrupt
from backstay.operations.arguments import branch_key
from backstay.operations.cursor import Services
from backstay.operations.listing import EVERY_BRANCH, Filter, listing_of_thread
from backstay.operations.retention import thread_names
from backstay.store.base import Backend

_ADAPTER = "workflow"
_BARE = "state_snapshot"  # the key of a snapshot that is not a JSON object


class CheckpointStore(ABC):
    """Stores workflow checkpoints by id. Safe to share between tasks."""

    @abstractmethod
    async def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint; one with the same id is replaced."""

    @abstractmethod
    async def load(self, id: str) -> Checkpoint | None:
        """Return a copy of a checkpoint, or None if it does not exist."""

    @abstractmethod
    async def list(
        self, *, graph_name: str | None = None, run_id: str | None = None, limit: int | None = None
    ) -> Listed[CheckpointInfo]:
        """Return summaries of all, or of one graph or run, newest first. Damaged ones are in its ``problems``."""

    @abstractmethod
    async def delete(self, id: str) -> int:
        """Delete a checkpoint and return how many were deleted: 1, or 0 if it did not exist."""

    @abstractmethod
    async def clear(self) -> int:
        """Delete all checkpoints and return how many were deleted."""

    async def latest(self, run_id: str) -> Checkpoint | None:
        """Return the newest checkpoint of a run, or None."""
        newest = await self.list(run_id=run_id, limit=1)
        return await self.load(newest[0].id) if newest else None

    async def delete_run(self, run_id: str) -> int:
        """Delete the checkpoints of a run and return how many were deleted."""
        return sum([await self.delete(info.id) for info in await self.list(run_id=run_id)])

    async def close(self) -> None:  # noqa: B027  # most stores have nothing to close
        """Release all resources. Closing twice is fine."""


class StoreCheckpointStore(CheckpointStore):
    """The interface on a Backstay store: an open one, or the path or URL of one that is opened when first used."""

    def __init__(self, store: StoreOrUrl, *, namespace: str = "") -> None:
        self._opened = AdapterStore(store, namespace)

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint; one with the same id is replaced. A checkpoint cannot move to another run."""
        await self._opened.run(upsert.put, draft_of(checkpoint), as_dict)

    async def load(self, id: str) -> Checkpoint | None:
        """Return a checkpoint with every byte verified, or None if it does not exist."""
        found = await self._opened.run(upsert.get, id)
        return None if found is None or not is_ours(found.meta) else Checkpoint.from_dict(as_dict(found))

    async def list(
        self, *, graph_name: str | None = None, run_id: str | None = None, limit: int | None = None
    ) -> Listed[CheckpointInfo]:
        """Return summaries, newest first. No state is read."""
        page = await self._opened.run(_entries)
        problems = [Problem("damaged", entry.id or "?", entry.error.what) for entry in page.damaged]
        return selected(map(_info, page.items), problems, graph_name, run_id, limit)

    async def delete(self, id: str) -> int:
        """Delete a checkpoint, even a damaged one, and return how many were deleted: 1, or 0 if it did not exist."""
        meta = await self._opened.run(upsert.get_meta, id)
        return await self._delete([id]) if meta is not None and is_ours(meta) else 0

    async def clear(self) -> int:
        """Delete everything saved through this interface, in one transaction, and nothing else; return how many."""
        return await self._delete([found.meta.id for found in (await self._opened.run(_entries)).items])

    async def close(self) -> None:
        """Close the store if it was opened here."""
        await self._opened.close()

    async def _delete(self, names: Collection[str]) -> int:
        removed = await self._opened.run(lambda store, services: store.delete(services.namespace, names, False))
        return removed.checkpoints


class MemoryCheckpointStore(StoreCheckpointStore):
    """A store that lives as long as the program: Backstay's ``memory:``."""

    def __init__(self) -> None:
        super().__init__("memory:")


def selected(
    infos: Iterable[CheckpointInfo],
    problems: Iterable[Problem],
    graph_name: str | None,
    run_id: str | None,
    limit: int | None,
) -> Listed[CheckpointInfo]:
    """Return the summaries of a graph or run, newest first; those of the same time keep their order."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidInput(f"limit must be 0 or a positive whole number, or None for all, not {limit!r}")
    wanted = [info for info in infos if graph_name in (None, info.graph_name) and run_id in (None, info.run_id)]
    wanted.sort(key=lambda info: info.created_at, reverse=True)
    return Listed(wanted[:limit], problems)


# Between records and stored checkpoints ---------------------------------------------------------------------------


def _entries(store: Backend, services: Services) -> FoundPage:
    """Return all checkpoints that were saved through this interface, thread by thread."""
    found, damaged = [], []
    for name in reversed(thread_names(store, services)):
        key = branch_key(services.namespace, name, MAIN, "")
        listing = listing_of_thread(key, None, None, EVERY_BRANCH, Filter(where={ADAPTER: _ADAPTER}))
        while not listing.done:
            page = upsert.next_page(store, services, listing)
            found += page.items
            damaged += page.damaged
    return FoundPage(found, damaged)


def draft_of(checkpoint: Checkpoint, thread: str | None = None) -> Draft:
    """Return a checkpoint as it is stored; ``thread`` is that of its run, unless another is given."""
    plain = checkpoint.to_dict()
    checkpoint = Checkpoint.from_dict(plain)
    snapshot, original = plain["state_snapshot"], {}
    if type(snapshot) is not dict:
        snapshot, original = {_BARE: snapshot}, {"bare": True}
    state = join_state(snapshot, {"pending_action": plain["pending_action"]}, original)
    upsert.check_names(checkpoint.extra, "key")
    node = checkpoint.current_node or None
    fields: CheckpointFields = {
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
        adapter=_ADAPTER,
        thread=thread or checkpoint.run_id or checkpoint.id,
        id=checkpoint.id,
        step=checkpoint.step_count,
        parent=None,
        state=state,
        fields=fields,
        original=original,
        as_dict=plain,
    )


def is_ours(meta: CheckpointMeta) -> bool:
    """Return whether a checkpoint was saved through this interface."""
    return meta.metadata.get(ADAPTER) == _ADAPTER


def as_dict(found: Found) -> dict[str, Any]:
    """Return a stored checkpoint in the form of ``Checkpoint.to_dict``."""
    if found.as_dict is not None:
        return found.as_dict
    checkpoint, state = found.checkpoint, split_state(found, ("pending_action",))
    return Checkpoint(
        **_info(found).__dict__,
        state_snapshot=state[_BARE] if found.original.get("bare") else state,
        path=list(checkpoint.path),
        pending_action=checkpoint.pending_action,
        extra=found.metadata,
    ).to_dict()


def _info(found: Found) -> CheckpointInfo:
    if found.as_dict is not None:
        return CheckpointInfo.of(Checkpoint.from_dict(found.as_dict))
    meta = found.meta
    assert meta.interrupt is not None  # every checkpoint of this interface has one
    return CheckpointInfo(
        id=meta.id,
        graph_name=meta.graph or "",
        current_node=meta.next_node or "",
        step_count=found.step,
        created_at=meta.created_at,
        interrupt_type=InterruptType(meta.interrupt.kind),
        run_id=meta.run_id,
    )
