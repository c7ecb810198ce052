"""``CheckpointBackend``: put and get by id, lists by thread, all awaited; ``StoreBackend`` is it, over any store.

For agents that are written against that interface. What its contract leaves open is fixed here, for every store alike:

Order     The newest checkpoint is the one put last, whatever its step and clock say; lists are newest first. Steps are
          the caller's: they may repeat or go back, and come back as given. Threads are listed with the one begun last
          first.
Replace   A put with an id that is there replaces that checkpoint, in its place in the order. An id never moves to
          another thread (IdTaken).
Lineage   Without a parent, a checkpoint follows the thread's newest. One that names another parent begins a branch.
          Deleting never touches what remains: a child still names its parent and can be loaded, verified and built on.
Paging    ``limit`` and ``offset`` count from the newest at the moment of the call. While others put, a later offset
          can show an entry again; ``checkpoints()`` and ``threads()`` show each once.
Values    What JSON can say, or it is refused before anything is stored, naming the path.

Messages, state and tool results are the keys of an ordinary Backstay state, so every checkpoint can also be read with
``backstay.open``, and threads saved there can be read here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from backstay.compat import shelf
from backstay.compat.folding import fold, unfold
from backstay.compat.listed import Listed, Problem
from backstay.compat.opened import OpenedStore, Place
from backstay.compat.plain_json import copied_object
from backstay.compat.record import Checkpoint, CheckpointMetadata, check, moment_of
from backstay.compat.shelf import Draft, Found
from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, Notes
from backstay.thread.access import access_of
from backstay.thread.arguments import lane_key
from backstay.thread.history import EVERY_BRANCH, Listing, listing_of_thread, listing_of_threads

__all__ = [
    "Checkpoint",
    "CheckpointBackend",
    "CheckpointMetadata",
    "StoreBackend",
    "create_checkpointer",
]

_FACE = "backend"


class CheckpointBackend(ABC):
    """A place that keeps checkpoints. Seven methods to write, all awaited; ``close`` if there is something to close."""

    @abstractmethod
    async def put(self, checkpoint: Checkpoint) -> str:
        """Store a checkpoint and return its id. One with the same id is replaced."""

    @abstractmethod
    async def get(self, checkpoint_id: str) -> Checkpoint | None:
        """Return a checkpoint by its id, whichever thread it belongs to; None if it is not there."""

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
        """Delete the thread's checkpoints with a lower step and return how many went."""

    async def close(self) -> None:  # noqa: B027  # nothing to close is a good answer
        """Release what is held. Closing twice is fine."""

    async def __aenter__(self) -> CheckpointBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class StoreBackend(CheckpointBackend):
    """The backend over a Backstay store: an open one, or the path or URL of one that is opened when first used."""

    def __init__(self, store: Place, *, namespace: str = "") -> None:
        self._opened = OpenedStore(store, namespace)

    async def put(self, checkpoint: Checkpoint) -> str:
        """Store a checkpoint and return its id.

        One with the same id is replaced, in its place; the very same again changes nothing. Raises EncodeError or
        InvalidInput before anything is stored if it could not come back equal, and IdTaken if the id belongs to another
        thread.
        """
        draft = _draft(check(checkpoint))
        access = access_of(await self._opened.store())
        await access.arun(shelf.put, access.context, _FACE, draft, _wire)
        return draft.id

    async def get(self, checkpoint_id: str) -> Checkpoint | None:
        """Return a checkpoint by its id, whichever thread it belongs to; None if it is not there."""
        access = access_of(await self._opened.store())
        found = await access.arun(shelf.get, access.context, checkpoint_id)
        return None if found is None else _checkpoint(found)

    async def get_latest(self, thread_id: str) -> Checkpoint | None:
        """Return the checkpoint of the thread that was put last; None if there is none."""
        access = access_of(await self._opened.store())
        newest = await access.arun(shelf.newest, access.context, thread_id)
        return None if newest is None else await self.get(newest.id)

    async def list_threads(self, limit: int = 50, offset: int = 0) -> Listed[CheckpointMetadata]:
        """Return, for every thread, the metadata of its newest checkpoint; the thread begun last first."""
        return await self._page(await self._threads(), limit, offset)

    async def list_checkpoints(self, thread_id: str, limit: int = 100, offset: int = 0) -> Listed[CheckpointMetadata]:
        """Return the metadata of the thread's checkpoints, the one put last first; no payload is read."""
        return await self._page(await self._history(thread_id), limit, offset)

    def threads(self) -> AsyncIterator[CheckpointMetadata]:
        """Iterate over all threads like ``list_threads``; each comes once, whatever is put or deleted meanwhile."""
        return self._walk(None)

    def checkpoints(self, thread_id: str) -> AsyncIterator[CheckpointMetadata]:
        """Iterate over a thread like ``list_checkpoints``; each comes once, whatever is put or deleted meanwhile."""
        return self._walk(thread_id)

    async def delete_thread(self, thread_id: str) -> int:
        """Delete a thread with all its branches and return how many checkpoints that were."""
        store = await self._opened.store()
        return (await store.delete_thread(thread_id)).checkpoints

    async def delete_before(self, thread_id: str, before_step: int) -> int:
        """Delete the thread's checkpoints with a lower step and return how many went.

        The newest of the thread and of each branch stay, as do those that wait for a decision: a caller whose steps
        went back would otherwise lose the very place it resumes from. ``delete_thread`` takes all.
        """
        if type(before_step) is not int:
            raise InvalidInput(f"before_step must be a whole number, not {type(before_step).__name__}")
        access = access_of(await self._opened.store())
        doomed = [item.checkpoint_id async for item in self.checkpoints(thread_id) if item.step < before_step]
        return (await access.arun(shelf.delete, access.context, doomed, protect=True)).checkpoints

    async def close(self) -> None:
        """Close the store, if this backend opened it."""
        await self._opened.close()

    async def __aenter__(self) -> StoreBackend:
        return self

    def __repr__(self) -> str:
        return f"<StoreBackend {getattr(self._opened.place, 'url', self._opened.place)}>"

    async def _threads(self) -> Listing:
        return listing_of_threads((await self._opened.store()).namespace)

    async def _history(self, thread_id: str) -> Listing:
        store = await self._opened.store()
        return listing_of_thread(lane_key(store.namespace, thread_id, MAIN, ""), None, None, EVERY_BRANCH)

    async def _page(self, listing: Listing, limit: int, offset: int) -> Listed[CheckpointMetadata]:
        for name, value in (("limit", limit), ("offset", offset)):
            if type(value) is not int or value < 0:
                raise InvalidInput(f"{name} must be a whole number from 0 on, not {value!r}")
        access = access_of(await self._opened.store())
        listing.left = offset + limit
        items: list[Found] = []
        problems: list[Problem] = []
        while listing.left and not listing.done:
            page = await access.arun(shelf.next_page, access.context, listing)
            items += page.items
            problems += [Problem("damaged", entry.id or "?", entry.error.what) for entry in page.damaged]
        return Listed(map(_metadata, items[offset:]), problems)

    async def _walk(self, thread_id: str | None) -> AsyncIterator[CheckpointMetadata]:
        access = access_of(await self._opened.store())
        listing = await (self._threads() if thread_id is None else self._history(thread_id))
        while not listing.done:
            page = await access.arun(shelf.next_page, access.context, listing)
            for found in page.items:
                yield _metadata(found)
            if page.damaged:
                raise page.damaged[0].error


def create_checkpointer(backend: str = "sqlite", **options: Any) -> StoreBackend:
    """Return the backend of a name: "sqlite" (``db_path``), "postgres" (``dsn``), "memory", or "store" (``url``)."""
    names = {"sqlite": "db_path", "postgres": "dsn", "postgresql": "dsn", "memory": None, "store": "url"}
    name = backend.strip().casefold() if isinstance(backend, str) else backend
    if name not in names:
        raise InvalidInput(f"no backend is called {backend!r}", hint=f"Choose one of {', '.join(names)}")
    option = names[name]
    unknown = sorted(set(options) - {option})
    if unknown:
        raise InvalidInput(f"the {name} backend has no option {unknown[0]!r}", hint=f"It takes {option or 'none'}")
    if option is None:
        return StoreBackend("memory:")
    if option not in options and name != "sqlite":
        raise InvalidInput(f"the {name} backend needs {option}", hint=f"create_checkpointer({name!r}, {option}=…)")
    return StoreBackend(options.get(option, "checkpoints.db"))


# Between the records and the shelf --------------------------------------------------------------------------------


def _draft(plain: dict[str, Any]) -> Draft:
    metadata = plain["metadata"]
    created_at, tags = moment_of(metadata["created_at"]), metadata["tags"]
    extra = {key: value for key, value in metadata.items() if key not in _FIELDS}
    shelf.check_names(tags, "tag")
    shelf.check_names(extra, "metadata key")
    state, renamed = fold(plain["state"], {"messages": plain["messages"], "tool_results": plain["tools_result"]})
    told: dict[str, Any] = {}
    if created_at.isoformat() != metadata["created_at"]:
        told["created_at"] = metadata["created_at"]
    if sorted(set(tags)) != tags:
        told["tags"] = tags
    if renamed:
        told["renamed"] = True
    unknown = {key: value for key, value in plain.items() if key not in _KEYS}
    if unknown:
        told["extra"] = unknown
    notes: Notes = {
        "created_at": created_at,
        "tags": tags,
        "summary": metadata["summary"],
        "next_node": plain["next_node"] or None,
        "metadata": extra,
    }
    return Draft(
        thread=metadata["thread_id"],
        id=metadata["checkpoint_id"],
        step=metadata["step"],
        parent=metadata["parent_checkpoint_id"],
        state=state,
        notes=notes,
        told=told,
        wire=_without_parent(plain),
    )


def _checkpoint(found: Found) -> Checkpoint:
    if found.wire is not None:
        return Checkpoint.from_dict(_with_parent(found.wire, found.parent))
    whole = dict(found.checkpoint.state)
    beside: dict[str, Any] = {}
    # What was saved by other means may have something else under these names; then it is simply part of the state.
    for name, kind in (("messages", list), ("tool_results", dict)):
        if isinstance(whole.get(name), kind):
            beside[name] = whole[name]
    return Checkpoint(
        metadata=_metadata(found),
        messages=beside.get("messages", []),
        state=unfold(whole, beside, bool(found.told.get("renamed"))),
        tools_result=beside.get("tool_results", {}),
        next_node=found.meta.next_node or "",
        extra=copied_object(found.told.get("extra", {}), "extra"),
    )


def _metadata(found: Found) -> CheckpointMetadata:
    if found.wire is not None:
        return Checkpoint.from_dict(_with_parent(found.wire, found.parent)).metadata
    meta = found.meta
    return CheckpointMetadata(
        thread_id=meta.thread_id,
        checkpoint_id=meta.id,
        step=found.step,
        parent_checkpoint_id=found.parent,
        created_at=found.told.get("created_at", meta.created_at.isoformat()),
        tags=found.tags,
        summary=meta.summary,
        extra=found.metadata,
    )


def _wire(found: Found) -> dict[str, Any]:
    return found.wire if found.wire is not None else _without_parent(_checkpoint(found).to_dict())


def _without_parent(plain: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in plain["metadata"].items() if key != "parent_checkpoint_id"}
    return {**plain, "metadata": metadata}


def _with_parent(wire: dict[str, Any], parent: str | None) -> dict[str, Any]:
    return {**wire, "metadata": {**wire["metadata"], "parent_checkpoint_id": parent}}


_FIELDS = set(CheckpointMetadata("", "", 0).to_dict())
_KEYS = set(Checkpoint(CheckpointMetadata("", "", 0), [], {}, {}).to_dict())
