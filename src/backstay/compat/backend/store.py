"""``CheckpointBackend``, the interface, and ``StoreBackend``, which implements it on any store."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection
from types import TracebackType
from typing import Any, Self

from backstay.compat import upsert
from backstay.compat.adapter import AdapterStore, Listed, Problem, StoreOrUrl, copied_object
from backstay.compat.backend.checkpoint import (
    Checkpoint,
    CheckpointMetadata,
    as_dict,
    checked,
    checkpoint_of,
    draft_of,
    metadata_of,
)
from backstay.compat.upsert import Found
from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN
from backstay.operations.arguments import branch_key
from backstay.operations.cursor import Services
from backstay.operations.listing import EVERY_BRANCH, Listing, listing_of_thread, listing_of_threads
from backstay.store.base import Backend

SUMMARY_CHARACTERS = 100
"""How much of the last message a snapshot's summary shows."""


class CheckpointBackend(ABC):
    """Stores checkpoints. Implement the seven awaited methods, and ``close`` if there is something to close."""

    @abstractmethod
    async def put(self, checkpoint: Checkpoint) -> str:
        """Store a checkpoint and return its id. One with the same id is replaced."""

    @abstractmethod
    async def get(self, checkpoint_id: str) -> Checkpoint | None:
        """Return a checkpoint by its id, from any thread; None if it does not exist."""

    @abstractmethod
    async def get_latest(self, thread_id: str) -> Checkpoint | None:
        """Return the thread's newest checkpoint; None if there is none."""

    @abstractmethod
    async def list_threads(self, limit: int = 50, offset: int = 0) -> list[CheckpointMetadata]:
        """Return, for every thread, the metadata of its newest checkpoint."""

    @abstractmethod
    async def list_checkpoints(self, thread_id: str, limit: int = 100, offset: int = 0) -> list[CheckpointMetadata]:
        """Return the metadata of the thread's checkpoints, newest first."""

    @abstractmethod
    async def delete_thread(self, thread_id: str) -> int:
        """Delete all checkpoints of a thread and return how many there were."""

    @abstractmethod
    async def delete_before(self, thread_id: str, before_step: int) -> int:
        """Delete the thread's checkpoints with a lower step and return how many were deleted."""

    async def close(self) -> None:  # noqa: B027  # most backends have nothing to close
        """Release all resources. Closing twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class StoreBackend(CheckpointBackend):
    """The backend on a Backstay store: an open one, or the path or URL of one that is opened when first used.

    ``triggers`` are those for which ``snapshot`` stores a checkpoint; None means all.
    """

    def __init__(self, store: StoreOrUrl, *, namespace: str = "", triggers: Collection[str] | None = None) -> None:
        if isinstance(triggers, str):
            raise InvalidInput("triggers must be several names, not one text", hint=f"Pass triggers=[{triggers!r}]")
        self._opened = AdapterStore(store, namespace)
        self._triggers = triggers
        self._counting = threading.Lock()  # only taken in worker threads

    async def put(self, checkpoint: Checkpoint) -> str:
        """Store a checkpoint and return its id.

        A checkpoint with the same id is replaced, in its place; putting the same again changes nothing. Raises
        EncodeError or InvalidInput, and stores nothing, if a value would not come back equal, and IdTaken if the id
        belongs to another thread.
        """
        draft = draft_of(checked(checkpoint))
        await self._opened.run(upsert.put, draft, as_dict)
        return draft.id

    async def snapshot(
        self,
        thread_id: str,
        messages: list[dict[str, Any]],
        state: dict[str, Any],
        tools_result: dict[str, Any],
        trigger: str = "manual",
        parent_checkpoint_id: str | None = None,
        next_node: str = "",
    ) -> str | None:
        """Put a checkpoint with a new id, the next step, the trigger as its tag, and a summary; return its id.

        Return None, and store nothing, if ``triggers`` of this backend do not include it. A failure is an error.
        """
        if self._triggers is not None and trigger not in self._triggers:
            return None
        metadata = CheckpointMetadata(thread_id, "", 0, parent_checkpoint_id)
        metadata.tags = [str(getattr(trigger, "value", trigger))]
        metadata.summary = f"State: {len(copied_object(state, 'state'))} keys"
        if messages and isinstance(messages[-1], dict):
            content = str(messages[-1].get("content", ""))
            metadata.summary = f"[{messages[-1].get('role', 'unknown')}] {content[:SUMMARY_CHARACTERS]}"
        made = copy.deepcopy(Checkpoint(metadata, messages, state, tools_result, next_node))

        def add(store: Backend, services: Services) -> str:
            with self._counting:  # else two snapshots at once could get the same step
                last = upsert.newest(store, services, thread_id)
                found = None if last is None else upsert.get(store, services, last.id)
                made.metadata.step = 1 if found is None else found.step + 1
                made.metadata.checkpoint_id = services.new_id()
                draft = draft_of(checked(made))
                upsert.put(store, services, draft, as_dict)
                return draft.id

        return await self._opened.run(add)

    async def get(self, checkpoint_id: str) -> Checkpoint | None:
        """Return a checkpoint by its id, from any thread; None if it does not exist."""
        found = await self._opened.run(upsert.get, checkpoint_id)
        return None if found is None else checkpoint_of(found)

    async def get_latest(self, thread_id: str) -> Checkpoint | None:
        """Return the checkpoint of the thread that was put last; None if there is none."""
        newest = await self._opened.run(upsert.newest, thread_id)
        return None if newest is None else await self.get(newest.id)

    async def list_threads(self, limit: int = 50, offset: int = 0) -> Listed[CheckpointMetadata]:
        """Return, for every thread, the metadata of its newest checkpoint; the newest thread first."""
        return await self._page(await self._listing(None), limit, offset)

    async def list_checkpoints(self, thread_id: str, limit: int = 100, offset: int = 0) -> Listed[CheckpointMetadata]:
        """Return the metadata of the thread's checkpoints, the one put last first. No payload is read."""
        return await self._page(await self._listing(thread_id), limit, offset)

    def threads(self) -> AsyncIterator[CheckpointMetadata]:
        """Iterate over all threads like ``list_threads``. Each comes once, even if others put or delete meanwhile."""
        return self._walk(None)

    def checkpoints(self, thread_id: str) -> AsyncIterator[CheckpointMetadata]:
        """Iterate over a thread like ``list_checkpoints``. Each comes once, even if others put or delete meanwhile."""
        return self._walk(thread_id)

    async def delete_thread(self, thread_id: str) -> int:
        """Delete a thread with all its branches and return how many checkpoints it had."""
        store = await self._opened.store()
        return (await store.thread(thread_id).delete()).checkpoints

    async def delete_before(self, thread_id: str, before_step: int) -> int:
        """Delete the thread's checkpoints with a lower step and return how many went.

        The newest checkpoint of each branch stays, and so do those that wait for a decision: otherwise a caller whose
        steps went back would lose the checkpoint to resume from. ``delete_thread`` deletes all.
        """
        if type(before_step) is not int:
            raise InvalidInput(f"before_step must be a whole number, not {type(before_step).__name__}")
        to_delete = [item.checkpoint_id async for item in self.checkpoints(thread_id) if item.step < before_step]
        removed = await self._opened.run(lambda store, services: store.delete(services.namespace, to_delete, True))
        return removed.checkpoints

    async def close(self) -> None:
        """Close the store if this backend opened it."""
        await self._opened.close()

    def __repr__(self) -> str:
        return f"<StoreBackend {getattr(self._opened.given, 'url', self._opened.given)}>"

    async def _listing(self, thread_id: str | None) -> Listing:
        namespace = (await self._opened.store()).namespace
        if thread_id is None:
            return listing_of_threads(namespace)
        return listing_of_thread(branch_key(namespace, thread_id, MAIN, ""), None, None, EVERY_BRANCH)

    async def _page(self, listing: Listing, limit: int, offset: int) -> Listed[CheckpointMetadata]:
        for name, value in (("limit", limit), ("offset", offset)):
            if type(value) is not int or value < 0:
                raise InvalidInput(f"{name} must be 0 or a positive whole number, not {value!r}")
        listing.left = offset + limit
        items: list[Found] = []
        problems: list[Problem] = []
        while listing.left and not listing.done:
            page = await self._opened.run(upsert.next_page, listing)
            items += page.items
            problems += [Problem("damaged", entry.id or "?", entry.error.what) for entry in page.damaged]
        return Listed(map(metadata_of, items[offset:]), problems)

    async def _walk(self, thread_id: str | None) -> AsyncIterator[CheckpointMetadata]:
        listing = await self._listing(thread_id)
        while not listing.done:
            page = await self._opened.run(upsert.next_page, listing)
            for found in page.items:
                yield metadata_of(found)
            if page.damaged:
                raise page.damaged[0].error


def create_checkpointer(backend: str = "sqlite", **options: Any) -> StoreBackend:
    """Return the backend with a name: "sqlite" (``db_path``), "postgres" (``dsn``), "memory", or "store" (``url``)."""
    names = {"sqlite": "db_path", "postgres": "dsn", "postgresql": "dsn", "memory": None, "store": "url"}
    name = backend.strip().casefold() if isinstance(backend, str) else backend
    if name not in names:
        raise InvalidInput(f"there is no backend {backend!r}", hint=f"Choose one of {', '.join(names)}")
    option = names[name]
    unknown = sorted(set(options) - {option})
    if unknown:
        raise InvalidInput(f"the {name} backend has no option {unknown[0]!r}", hint=f"It takes {option or 'none'}")
    if option is None:
        return StoreBackend("memory:")
    if option not in options and name != "sqlite":
        raise InvalidInput(f"the {name} backend needs {option}", hint=f"create_checkpointer({name!r}, {option}=…)")
    return StoreBackend(options.get(option, "checkpoints.db"))
