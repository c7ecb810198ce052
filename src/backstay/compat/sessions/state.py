"""``session_meta.json``: whether a session is active, which process runs it, and why it ended. And session summaries.

``state.json``, which another part of the older system wrote, is only read, and only if there is no
``session_meta.json``. Unknown fields are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any

from backstay.compat.sessions.checkpoint import (
    AgentId,
    AgentState,
    CheckpointData,
    CheckpointMeta,
    FieldReader,
    moment_text,
)
from backstay.compat.sessions.checksum import parse, plain, pretty, to_tree
from backstay.compat.sessions.files import SessionFolder, read_file
from backstay.errors import DecodeError, StoreError
from backstay.operations.leases import is_alive
from backstay.store import atomic
from backstay.store.leases import Holder

META = "session_meta.json"
OLD_STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMeta:
    """The record of a session. ``process`` identifies the process that runs it; the older system did not write it."""

    session_id: str
    is_active: bool
    termination_reason: str | None
    last_updated: datetime
    last_iteration: int
    owner: str | None = None
    process: str | None = None
    started_at: datetime | None = None
    task_description: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def is_gone(self, now: datetime, silence: timedelta) -> bool:
        """Return whether its process is dead: the kernel knows on this host; elsewhere a long silence decides."""
        if self.process is None:  # written by the older system, without a process
            return True
        alive = is_alive(Holder.parse(self.process))
        return now - self.last_updated > silence if alive is None else not alive


_KNOWN = {each.name for each in fields(SessionMeta) if each.name != "others"}


def read_meta(folder: SessionFolder) -> SessionMeta | None:
    """Return a session's record, from the older system's file if there is no other; None if there is neither."""
    return _read(folder, META, _from_meta) or _read(folder, OLD_STATE, _from_old_state)


def write_meta(folder: SessionFolder, meta: SessionMeta) -> None:
    """Replace a session's record in one step."""
    record = {**meta.others, **{name: getattr(meta, name) for name in _KNOWN}}
    for name in ("last_updated", "started_at"):
        record[name] = None if record[name] is None else moment_text(record[name])
    atomic.write_whole(folder.path / META, pretty(to_tree(record, META)).encode())


def touch(folder: SessionFolder, iteration: int, now: datetime) -> None:
    """Update a session's record, if it has one, after a save. Call this with the lock."""
    meta = _read(folder, META, _from_meta)
    if meta is not None:
        write_meta(folder, replace(meta, last_iteration=iteration, last_updated=now))


def _read(folder: SessionFolder, name: str, build: Callable[[str, dict[str, Any]], SessionMeta]) -> SessionMeta | None:
    path = folder.path / name
    content = read_file(path)
    if content is None:
        return None
    try:
        record = plain(parse(content))
        if not isinstance(record, dict):
            raise DecodeError("is not an object")
        return build(folder.session, record)
    except DecodeError as error:
        raise StoreError(f"{path}: {error.what}", path=str(path)) from error


def _from_meta(session: str, record: dict[str, Any]) -> SessionMeta:
    reader = FieldReader(record)
    return SessionMeta(
        session_id=session,
        is_active=reader.of("is_active", bool),
        termination_reason=reader.optional_text("termination_reason"),
        last_updated=reader.moment("last_updated"),
        last_iteration=reader.of("last_iteration", int),
        owner=reader.optional_text("owner"),
        process=reader.optional_text("process"),
        started_at=None if record.get("started_at") is None else reader.moment("started_at"),
        task_description=reader.optional_text("task_description"),
        others={name: value for name, value in record.items() if name not in _KNOWN},
    )


def _from_old_state(session: str, record: dict[str, Any]) -> SessionMeta:
    reader = FieldReader(record)
    status, completed = reader.of("status", str), record.get("completed") is True
    return SessionMeta(
        session_id=session,
        is_active=status.lower() == "running" and not completed,
        termination_reason="completed" if completed else None,
        last_updated=reader.moment("last_updated"),
        last_iteration=reader.of("iteration", int),
        task_description=reader.optional_text("task_description"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session as lists show it. ``message_count`` is that of its newest checkpoint."""

    session_id: str
    agent_id: str | None
    agent_state: AgentState
    created_at: datetime
    last_updated: datetime
    message_count: int
    checkpoint_count: int


def summarize(
    session: str, meta: SessionMeta | None, checkpoints: tuple[CheckpointMeta, ...], newest: CheckpointData | None
) -> SessionSummary | None:
    """Return the summary of a session; None if it has neither a record nor a checkpoint."""
    started = [] if meta is None or meta.started_at is None else [meta.started_at]
    moments = [checkpoint.created_at for checkpoint in checkpoints]
    updated = [] if meta is None else [meta.last_updated]
    if not updated and not moments:
        return None
    agent = None if meta is None else meta.others.get("agent_id")
    stated = None if meta is None else meta.others.get("agent_state")
    if isinstance(stated, str) and stated in set(AgentState):
        agent_state = AgentState(stated)
    elif meta is None:
        agent_state = AgentState.IDLE
    elif meta.is_active:
        agent_state = AgentState.RUNNING
    else:
        completed = meta.termination_reason == AgentState.COMPLETED
        agent_state = AgentState.COMPLETED if completed else AgentState.STOPPED
    return SessionSummary(
        session_id=session,
        agent_id=AgentId(agent) if isinstance(agent, str) else None,
        agent_state=agent_state,
        created_at=min([*started, *moments] or updated),
        last_updated=max([*updated, *moments]),
        message_count=0 if newest is None else len(newest.messages),
        checkpoint_count=len(checkpoints),
    )
