"""``CheckpointBackend``: put and get by id, list by thread, all awaited. ``StoreBackend`` implements it on any store.

For agents that are written against that interface. Where its contract leaves a choice, every store behaves the same:

Order     The newest checkpoint is the one put last, regardless of its step and clock; lists are newest first. Steps
          belong to the caller: they may repeat or go back, and come back unchanged. The list of threads starts with the
          thread that was created last.
Replace   Putting an existing id replaces that checkpoint, in its place in the order. An id never moves to another
          thread (IdTaken).
Lineage   Without a parent, a checkpoint follows the thread's newest. One that names another parent starts a branch.
          Deleting a checkpoint does not affect others: its children still name it and can be loaded, verified and
          built on.
Paging    ``limit`` and ``offset`` count from the newest at the time of the call. If other processes put meanwhile, a
          later offset can show an entry again; ``checkpoints()`` and ``threads()`` show each entry once.
Values    Only JSON values. Anything else is refused before anything is stored, and the error names its path.

Messages, state and tool results are keys of an ordinary Backstay state. So ``backstay.open`` reads every checkpoint
stored here, and this interface reads threads saved there. ``import_agentos`` imports checkpoints of other backends.
"""

from __future__ import annotations

import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from backstay.bundle.report import ImportReport, Note, Progress
from backstay.compat import upsert
from backstay.compat.adapter import (
    AdapterStore,
    Listed,
    Problem,
    StoreOrUrl,
    copied,
    copied_list,
    copied_object,
    parse_json,
)
from backstay.compat.importer import Importer, put_item
from backstay.compat.upsert import Draft, Found, join_state, split_state
from backstay.errors import BackstayError, DecodeError, InvalidInput, StoreRefused
from backstay.model.checkpoint import MAIN, CheckpointFields
from backstay.model.fields import check_fields
from backstay.operations.arguments import branch_key
from backstay.operations.listing import EVERY_BRANCH, Listing, listing_of_thread, listing_of_threads
from backstay.store.atomic import failure
from backstay.thread.store import Store

__all__ = [
    "Checkpoint",
    "CheckpointBackend",
    "CheckpointMetadata",
    "StoreBackend",
    "create_checkpointer",
    "import_agentos",
]

_ADAPTER = "backend"

# Records ----------------------------------------------------------------------------------------------------------
#
# Records are plain and can be changed; a put stores their values at that time. ``to_dict`` and ``from_dict`` make deep
# copies. Unknown keys are kept in ``extra`` and written again, so that no data of a newer version is lost.

_REQUIRED = ("thread_id", "checkpoint_id", "step", "created_at")


@dataclass
class CheckpointMetadata:
    """A checkpoint without its payload."""

    thread_id: str  # the conversation
    checkpoint_id: str  # unique in the store
    step: int  # the caller's count; the order of a thread is the order in which its checkpoints were put
    parent_checkpoint_id: str | None = None  # None when put: the thread's newest
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())  # ISO 8601 with an offset
    tags: list[str] = field(default_factory=list)
    summary: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata as a new dictionary."""
        known = {name: getattr(self, name) for name in _METADATA}
        return copied_object({**self.extra, **known}, "metadata")


@dataclass
class Checkpoint:
    """A complete snapshot of an agent at run time."""

    metadata: CheckpointMetadata
    messages: list[dict[str, Any]]  # the conversation, serialized
    state: dict[str, Any]
    tools_result: dict[str, Any]
    next_node: str = ""  # to be executed next
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as a new dictionary for JSON. EncodeError names a value that JSON cannot hold."""
        known = {name: copied(getattr(self, name), name) for name in _PAYLOAD}
        return {**copied_object(self.extra, "extra"), "metadata": self.metadata.to_dict(), **known}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint from the result of ``to_dict``. InvalidInput names a required key that is missing."""
        metadata = plain.get("metadata")
        missing = [] if "metadata" in plain else ["metadata"]
        if isinstance(metadata, Mapping):
            missing = [f"metadata.{name}" for name in _REQUIRED if name not in metadata]
        if missing:
            raise InvalidInput(f"{missing[0]} is missing", path=missing[0], hint="Pass the result of to_dict()")
        if not isinstance(metadata, Mapping):
            raise InvalidInput("metadata must be a mapping", path="metadata")
        known = {name: copied(metadata[name], f"metadata.{name}") for name in _METADATA if name in metadata}
        payload: dict[str, Any] = {"messages": [], "state": {}, "tools_result": {}}
        payload.update({name: copied(plain[name], name) for name in _PAYLOAD if name in plain})
        return cls(
            metadata=CheckpointMetadata(**known, extra=_unknown(metadata, _METADATA, "metadata")),
            **payload,
            extra=_unknown(plain, (*_PAYLOAD, "metadata"), "checkpoint"),
        )


_METADATA = tuple(item.name for item in fields(CheckpointMetadata) if item.name != "extra")
_PAYLOAD = tuple(item.name for item in fields(Checkpoint) if item.name not in ("metadata", "extra"))


def _unknown(plain: Mapping[str, Any], known: tuple[str, ...], path: str) -> dict[str, Any]:
    return copied_object({key: value for key, value in plain.items() if key not in known}, path)


def _checked(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's dictionary. InvalidInput names the first field that cannot be stored."""
    plain = checkpoint.to_dict()
    metadata = plain["metadata"]
    for extra, known in ((checkpoint.metadata.extra, _METADATA), (checkpoint.extra, (*_PAYLOAD, "metadata"))):
        for name in extra:
            if name in known:
                raise InvalidInput(f"extra must not hold {name!r}, which is a field", hint=f"Set {name} instead")
    check_fields(
        {
            "id": metadata["checkpoint_id"],
            "thread_id": metadata["thread_id"],
            "step": metadata["step"],
            "parent_id": metadata["parent_checkpoint_id"],
            "tags": metadata["tags"],
            "summary": metadata["summary"],
            "next_node": plain["next_node"] if plain["next_node"] != "" else None,
        }
    )
    copied_list(plain["messages"], "messages")
    for name in ("state", "tools_result"):
        copied_object(plain[name], name)
    return plain


# The interface ----------------------------------------------------------------------------------------------------


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
    """The backend on a Backstay store: an open one, or the path or URL of one that is opened when first used."""

    def __init__(self, store: StoreOrUrl, *, namespace: str = "") -> None:
        self._opened = AdapterStore(store, namespace)

    async def put(self, checkpoint: Checkpoint) -> str:
        """Store a checkpoint and return its id.

        A checkpoint with the same id is replaced, in its place; putting the same again changes nothing. Raises
        EncodeError or InvalidInput, and stores nothing, if a value would not come back equal, and IdTaken if the id
        belongs to another thread.
        """
        draft = _draft(_checked(checkpoint))
        await self._opened.run(upsert.put, draft, _as_dict)
        return draft.id

    async def get(self, checkpoint_id: str) -> Checkpoint | None:
        """Return a checkpoint by its id, from any thread; None if it does not exist."""
        found = await self._opened.run(upsert.get, checkpoint_id)
        return None if found is None else _checkpoint(found)

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
        return Listed(map(_metadata, items[offset:]), problems)

    async def _walk(self, thread_id: str | None) -> AsyncIterator[CheckpointMetadata]:
        listing = await self._listing(thread_id)
        while not listing.done:
            page = await self._opened.run(upsert.next_page, listing)
            for found in page.items:
                yield _metadata(found)
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


# Between records and stored checkpoints ---------------------------------------------------------------------------


def _draft(plain: dict[str, Any]) -> Draft:
    metadata = plain["metadata"]
    created_at, tags = _moment(metadata["created_at"]), metadata["tags"]
    extra = {key: value for key, value in metadata.items() if key not in _METADATA}
    upsert.check_names(tags, "tag")
    upsert.check_names(extra, "metadata key")
    others = {"messages": plain["messages"], "tool_results": plain["tools_result"]}
    original: dict[str, Any] = {}
    state = join_state(plain["state"], others, original)
    if created_at.isoformat() != metadata["created_at"]:
        original["created_at"] = metadata["created_at"]
    if sorted(set(tags)) != tags:
        original["tags"] = tags
    unknown = {key: value for key, value in plain.items() if key not in (*_PAYLOAD, "metadata")}
    if unknown:
        original["extra"] = unknown
    values: CheckpointFields = {
        "created_at": created_at,
        "tags": tags,
        "summary": metadata["summary"],
        "next_node": plain["next_node"] or None,
        "metadata": extra,
    }
    return Draft(
        adapter=_ADAPTER,
        thread=metadata["thread_id"],
        id=metadata["checkpoint_id"],
        step=metadata["step"],
        parent=metadata["parent_checkpoint_id"],
        state=state,
        fields=values,
        original=original,
        as_dict=_without_parent(plain),
    )


def _moment(text: object) -> datetime:
    try:
        moment = datetime.fromisoformat(text) if type(text) is str else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput(
            "created_at must be ISO 8601 text with an offset",
            path="metadata.created_at",
            hint='For example "2026-01-31T12:00:00+00:00". Without an offset the time is ambiguous',
        )
    return moment.astimezone(UTC)


def _checkpoint(found: Found) -> Checkpoint:
    if found.as_dict is not None:
        metadata = {**found.as_dict["metadata"], "parent_checkpoint_id": found.parent}
        return Checkpoint.from_dict({**found.as_dict, "metadata": metadata})
    whole = found.checkpoint.state
    # A checkpoint that was saved by other means may hold other types under these names; then they stay in the state.
    kinds = {"messages": list, "tool_results": dict}
    others: dict[str, Any] = {name: whole[name] for name, kind in kinds.items() if isinstance(whole.get(name), kind)}
    return Checkpoint(
        metadata=_metadata(found),
        messages=others.get("messages", []),
        state=split_state(found, others),
        tools_result=others.get("tool_results", {}),
        next_node=found.meta.next_node or "",
        extra=copied_object(found.original.get("extra", {}), "extra"),
    )


def _metadata(found: Found) -> CheckpointMetadata:
    if found.as_dict is not None:
        return _checkpoint(found).metadata
    meta = found.meta
    return CheckpointMetadata(
        thread_id=meta.thread_id,
        checkpoint_id=meta.id,
        step=found.step,
        parent_checkpoint_id=found.parent,
        created_at=found.original.get("created_at", meta.created_at.isoformat()),
        tags=found.tags,
        summary=meta.summary,
        extra=found.metadata,
    )


def _as_dict(found: Found) -> dict[str, Any]:
    return found.as_dict if found.as_dict is not None else _without_parent(_checkpoint(found).to_dict())


def _without_parent(plain: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in plain["metadata"].items() if key != "parent_checkpoint_id"}
    return {**plain, "metadata": metadata}


# Importing --------------------------------------------------------------------------------------------------------

_ORDER = "a parent before its children, then the step, then the place in the source"
_SQLITE = b"SQLite format 3\0"
_OTHER_COLUMNS = {
    "thread_id": ("thread",),
    "parent_checkpoint_id": ("parent_id", "parent"),
    "messages": ("messages_json",),
    "state": ("state_json",),
    "tools_result": ("tools", "tool_results"),
}
"""Fields whose column may have another name than the field."""

_JSON_COLUMNS = ("tags", "messages", "state", "tools_result")
_ROW_NUMBERS = ("id", "rowid")


def import_agentos(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    store: Store,
    *,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store checkpoints from dictionaries, a file of JSON lines, or a SQLite file with the backend's table.

    The imported checkpoints can be read with ``StoreBackend`` and with ``backstay.open``. A record without its required
    keys, with an empty id or a negative step is skipped, and the report names it. Unknown keys are kept. A parent comes
    before its children; otherwise the step decides, then the place in the source. Row numbers are not used for more,
    because a replaced row gets a new one.
    """
    importer = Importer(store, _ORDER)
    found: list[tuple[Draft, str]] = []
    for where, plain in _records(source, importer):
        try:
            found.append((_draft(_checked(Checkpoint.from_dict(plain))), where))
        except (BackstayError, TypeError) as error:
            importer.missing.append(Note(f"is not a checkpoint: {getattr(error, 'what', error)}", where))
    # Parents before their children, else by step and then as given. In a cycle of parents the first one comes first.
    found.sort(key=lambda each: each[0].step)
    waiting = {draft.id: (draft, where) for draft, where in found}
    items = []
    while waiting:
        ancestry: dict[str, Draft] = {}
        name: str | None = next(iter(waiting))
        while name in waiting and name not in ancestry:
            ancestry[name] = waiting[name][0]
            name = ancestry[name].parent
        items += [put_item(*waiting.pop(each), _as_dict) for each in reversed(ancestry)]
    return importer.import_all(items, progress)


def _records(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], importer: Importer
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the records of a source, each with the place that it came from."""
    if not isinstance(source, str | os.PathLike):
        yield from ((f"record {number}", plain) for number, plain in enumerate(source, 1))
        return
    path = Path(source)
    try:
        with path.open("rb") as file:
            is_table = file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise failure(error, "read", path) from error
    if is_table:
        yield from _rows(path, importer)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                if line.strip():
                    yield where, _parsed(line)
            except DecodeError as error:
                importer.missing.append(Note(error.what, where))


def _rows(path: Path, importer: Importer) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of the backend's table. The file is opened read-only."""
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            table, columns = _checkpoint_table(connection, path)
            quoted = '"' + table.replace('"', '""') + '"'
            for number, values in enumerate(connection.execute(f"SELECT * FROM {quoted} ORDER BY rowid"), 1):
                where = f"{path}: row {number} of {table}"
                row = dict(zip(columns, values, strict=True))
                try:
                    metadata, payload = _taken(row, _METADATA), _taken(row, _PAYLOAD)
                except DecodeError as error:
                    importer.missing.append(Note(error.what, where))
                    continue
                # Columns that this version does not know are kept in the metadata.
                others = {key: value for key, value in row.items() if key not in _ROW_NUMBERS and value is not None}
                yield where, {"metadata": {**others, **metadata}, **payload}
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreRefused(f"{path} cannot be read as a SQLite file: {error}", path=str(path)) from error


def _checkpoint_table(connection: sqlite3.Connection, path: Path) -> tuple[str, list[str]]:
    """Return the table that holds checkpoints, and its columns."""
    names = [str(name) for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for name in sorted(names, key=lambda name: name != "checkpoints"):
        columns = [str(column) for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))]
        if all(_column_of(field, columns) for field in ("thread_id", "checkpoint_id", "step")):
            return name, columns
    raise StoreRefused(
        f"{path} has no table of checkpoints",
        path=str(path),
        hint="The table must have the columns thread_id, checkpoint_id and step",
    )


def _column_of(field: str, columns: Collection[str]) -> str | None:
    return next((name for name in (field, *_OTHER_COLUMNS.get(field, ())) if name in columns), None)


def _taken(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove the columns of these fields from a row and return their values by field."""
    taken: dict[str, Any] = {}
    for name in names:
        column = _column_of(name, row)
        value = None if column is None else row.pop(column)
        if value is not None:
            taken[name] = _parsed(value) if name in _JSON_COLUMNS and isinstance(value, str | bytes) else value
    return taken


def _parsed(text: str | bytes) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"is not valid JSON: {type(error).__name__}") from error
