"""``CheckpointStore``: save, load, list, delete and clear, in memory or in any Backstay store.

A checkpoint that names its run is stored in that run's thread, after the others, and costs only its new bytes. One
without a run has a thread of its own. ``backstay.open`` can read all of them: the keys of the state are the values of
the ``SharedState`` and its ``messages``, and the position and the pause are in the usual fields. So a graph of Backstay
with the same names can resume such a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from backstay.codec import encode
from backstay.compat import upsert
from backstay.compat.adapter import AdapterStore, Listed, Problem, StoreOrUrl, is_same_json
from backstay.compat.upsert import ADAPTER, Draft, Found, FoundPage, join_state, split_state
from backstay.compat.workflow.checkpoint import END, Checkpoint, CheckpointInfo, InterruptType, moment_text
from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointFields, CheckpointMeta
from backstay.model.decision import Interrupt
from backstay.model.fields import check_fields
from backstay.model.frame import Continuation, End, FanOut
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


_SHARED = {"values", "messages", "current_node"}  # the keys of a snapshot of a SharedState
_CALL_BYTES_MAX = 65_536  # a tool call that is larger is stored in the state: lists read interrupts
_ASKED = ("id", "node", "payload", "prompt")  # the keys of ``interrupt``, which ``export_workflow`` adds to a file


def draft_of(checkpoint: Checkpoint, thread: str | None = None) -> Draft:
    """Return a checkpoint as it is stored; ``thread`` is that of its run, unless another is given.

    The state has the values and messages of a SharedState as its own keys, as a graph of Backstay keeps them.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidInput(f"a checkpoint must be a Checkpoint, not {type(checkpoint).__name__}")
    plain = checkpoint.to_dict()
    checkpoint = Checkpoint.from_dict(plain)
    state, others, original = _state_of(plain["state_snapshot"])
    fields: CheckpointFields = {
        "created_at": checkpoint.created_at,
        "graph": checkpoint.graph_name or None,
        "last_node": (checkpoint.path[-1] if checkpoint.path else None) or None,
        "path": checkpoint.path,
        "run_id": checkpoint.run_id,
    }
    if plain["created_at"] != moment_text(checkpoint.created_at):
        original["created_at"] = plain["created_at"]
    extra = dict(checkpoint.extra)
    upsert.check_names(extra, "key")
    asked = _interrupt_of(checkpoint, original)
    if "asked" in original:
        del extra["interrupt"]
    if asked is None:
        original["kind"] = checkpoint.interrupt_type.value
    else:
        fields["interrupt"] = asked
        fields["resume_hint"] = asked.prompt or None
    call = asked.payload if asked is not None and asked.kind is InterruptType.TOOL_APPROVAL else None
    if not is_same_json(call, checkpoint.pending_action) or (call is None and "pending_action" in state):
        others["pending_action"] = plain["pending_action"]
    following, node = _continuation_of(extra, checkpoint.current_node), checkpoint.current_node
    if following is None and node:
        fields["next_node"] = node
    else:
        fields["continuation"], original["node"] = following, node
    with suppress(InvalidInput):  # the next two are fields of later versions of the system
        fields["label"] = check_fields({"label": extra.get("label")})["label"]
    with suppress(InvalidInput):
        tags = check_fields({"tags": extra.get("tags", ())})["tags"]
        upsert.check_names(tags, "tag")
        if tags:
            fields["tags"], original["tags"] = tags, extra["tags"]
    if others:
        original["fields"] = list(others)
    return Draft(
        adapter=_ADAPTER,
        thread=thread or checkpoint.run_id or checkpoint.id,
        id=checkpoint.id,
        step=checkpoint.step_count,
        parent=None,
        state=join_state(state, others, original),
        fields={**fields, "metadata": extra},
        original=original,
        as_dict=plain,
    )


def _state_of(snapshot: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a snapshot as a state, the fields to store next to it, and how to undo both."""
    if type(snapshot) is not dict:
        return {_BARE: snapshot}, {}, {"bare": True}
    is_shared = snapshot.keys() == _SHARED and type(snapshot["values"]) is dict and type(snapshot["messages"]) is list
    if not is_shared:
        return snapshot, {}, {}
    if snapshot["messages"] == [] and type(snapshot["values"].get("messages")) is list:
        # An export of ours: the old system would not have read these messages. See ``transfer.py``.
        return snapshot["values"], {}, {"shared": [snapshot["current_node"]], "inside": True}
    return snapshot["values"], {"messages": snapshot["messages"]}, {"shared": [snapshot["current_node"]]}


def _interrupt_of(checkpoint: Checkpoint, original: dict[str, Any]) -> Interrupt | None:
    """Return the pause of a checkpoint; ``interrupt`` in a file says more about it, or that there was none."""
    kind, payload = checkpoint.interrupt_type, None
    node = checkpoint.path[-1] if kind is InterruptType.AFTER_NODE and checkpoint.path else checkpoint.current_node
    if "interrupt" in checkpoint.extra:
        given = checkpoint.extra["interrupt"]
        with suppress(InvalidInput):
            if given is None:
                original["asked"] = False
                return None
            if type(given) is dict and given.keys() - {"answer"} == set(_ASKED):
                asked = Interrupt(kind=kind, **given)
                original["asked"] = True
                return asked
    call = checkpoint.pending_action
    if kind is InterruptType.TOOL_APPROVAL and len(encode(call, "pending_action")) <= _CALL_BYTES_MAX:
        payload = call
    return Interrupt(id=checkpoint.id, kind=kind, node=None if node in ("", END) else node, payload=payload)


def _continuation_of(extra: Mapping[str, Any], node: str) -> Continuation | None:
    """Return what runs next if that is not one node: files of later versions name the nodes that run in parallel."""
    given = extra.get("continuation")
    if type(given) is dict and given.get("kind") == "fan_out":
        with suppress(InvalidInput):
            join = given.get("then")
            return FanOut(given.get("targets") or (), None if join == END else join)
    return End() if node == END else None


def is_ours(meta: CheckpointMeta) -> bool:
    """Return whether a checkpoint was saved through this interface."""
    return meta.metadata.get(ADAPTER) == _ADAPTER


def as_dict(found: Found) -> dict[str, Any]:
    """Return a stored checkpoint in the form of ``Checkpoint.to_dict``."""
    if found.as_dict is not None:
        return found.as_dict
    checkpoint, original = found.checkpoint, found.original
    snapshot: Any = split_state(found, original.get("fields", ()))
    if original.get("bare"):
        snapshot = snapshot[_BARE]
    elif "shared" in original:
        messages: Any = [] if original.get("inside") else checkpoint.state["messages"]
        (node,) = original["shared"]
        snapshot = {"values": snapshot, "messages": messages, "current_node": node}
    asked, pending = checkpoint.interrupt, None
    if "pending_action" in original.get("fields", ()):
        pending = checkpoint.state["pending_action"]
    elif asked is not None and asked.kind is InterruptType.TOOL_APPROVAL:
        pending = asked.payload
    made = Checkpoint(
        **_info(found).__dict__,
        state_snapshot=snapshot,
        path=list(checkpoint.path),
        pending_action=pending,
        extra=found.metadata,
    )
    made._written_at = original.get("created_at")
    if "asked" in original:
        made.extra["interrupt"] = None if asked is None else {name: getattr(asked, name) for name in _ASKED}
    if "tags" in made.extra and "tags" in original:
        made.extra["tags"] = found.tags
    if "label" in made.extra and checkpoint.label is not None:
        made.extra["label"] = checkpoint.label
    return made.to_dict()


def _info(found: Found) -> CheckpointInfo:
    if found.as_dict is not None:
        return CheckpointInfo.of(Checkpoint.from_dict(found.as_dict))
    meta = found.meta
    return CheckpointInfo(
        id=meta.id,
        graph_name=meta.graph or "",
        current_node=meta.next_node or found.original.get("node", ""),
        step_count=found.step,
        created_at=meta.created_at,
        interrupt_type=InterruptType(found.original["kind"] if meta.interrupt is None else meta.interrupt.kind),
        run_id=meta.run_id,
    )
