"""``session_meta.json``: whether a session is active, who runs it, and why it ended.

It is the one record of that. ``state.json``, which another part of the older system wrote beside it, is only read, and
only where there is no ``session_meta.json``. Fields that we do not know are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from backstay.compat.sessions.canonical import parse, plain, pretty, to_tree
from backstay.compat.sessions.data import FieldReader, moment_text
from backstay.compat.sessions.folder import SessionFolder, read_file
from backstay.errors import DecodeError, StoreError
from backstay.store import atomic
from backstay.thread.process import UNKNOWN, Process, is_alive, this_process

META = "session_meta.json"
OLD_STATE = "state.json"
_KNOWN = {
    "session_id",
    "is_active",
    "termination_reason",
    "last_updated",
    "last_iteration",
    "owner",
    "process",
    "started_at",
    "task_description",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMeta:
    """The record of a session. ``process`` names the process that runs it; the older system did not write it."""

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

    @property
    def is_unclean(self) -> bool:
        """Tell whether it neither ended nor said why; its process may still live."""
        return self.is_active and self.termination_reason is None

    def is_gone(self, now: datetime, silence: timedelta) -> bool:
        """Tell whether the process that ran it is gone: asked of the kernel if it can know, else by its silence."""
        if self.process is None:  # of the older system: there is nothing to go by
            return True
        alive = is_alive(self.process)
        if alive is not None:
            return not alive
        other, here = Process.parse(self.process), this_process()
        if other is not None and other.host == here.host and UNKNOWN not in (other.boot, here.boot):
            return other.boot != here.boot or self._is_silent(now, silence)  # another boot: it ended with the machine
        return self._is_silent(now, silence)

    def _is_silent(self, now: datetime, silence: timedelta) -> bool:
        return now - self.last_updated > silence


def read_meta(folder: SessionFolder) -> SessionMeta | None:
    """Return a session's record, or what the older system's other file says; None if there is neither."""
    record = _read(folder, META)
    if record is not None:
        return _from_meta(folder, record)
    record = _read(folder, OLD_STATE)
    return None if record is None else _from_old_state(folder, record)


def write_meta(folder: SessionFolder, meta: SessionMeta) -> None:
    """Replace a session's record in one step."""
    record: dict[str, Any] = {
        **meta.others,
        "session_id": meta.session_id,
        "is_active": meta.is_active,
        "termination_reason": meta.termination_reason,
        "last_updated": moment_text(meta.last_updated),
        "last_iteration": meta.last_iteration,
        "owner": meta.owner,
        "process": meta.process,
        "started_at": None if meta.started_at is None else moment_text(meta.started_at),
        "task_description": meta.task_description,
    }
    atomic.write_whole(folder.path / META, pretty(to_tree(record, META)).encode())


def touch(folder: SessionFolder, iteration: int, now: datetime) -> None:
    """Note in a session's record, if it has one, that it saved. To be called with the lock."""
    record = _read(folder, META)
    if record is not None:
        write_meta(folder, replace(_from_meta(folder, record), last_iteration=iteration, last_updated=now))


def _read(folder: SessionFolder, name: str) -> dict[str, Any] | None:
    path = folder.path / name
    content = read_file(path)
    if content is None:
        return None
    try:
        record = plain(parse(content))
        if not isinstance(record, dict):
            raise DecodeError("is no object")
    except DecodeError as error:
        raise StoreError(f"{path} {error.what}", path=str(path)) from error
    return record


def _from_meta(folder: SessionFolder, record: dict[str, Any]) -> SessionMeta:
    reader = FieldReader(record)
    try:
        return SessionMeta(
            session_id=folder.session,
            is_active=reader.boolean("is_active"),
            termination_reason=reader.optional_text("termination_reason"),
            last_updated=reader.moment("last_updated"),
            last_iteration=reader.integer("last_iteration"),
            owner=reader.optional_text("owner"),
            process=reader.optional_text("process"),
            started_at=None if record.get("started_at") is None else reader.moment("started_at"),
            task_description=reader.optional_text("task_description"),
            others={name: value for name, value in record.items() if name not in _KNOWN},
        )
    except DecodeError as error:
        raise StoreError(f"{folder.path / META}: {error.what}", path=str(folder.path / META)) from error


def _from_old_state(folder: SessionFolder, record: dict[str, Any]) -> SessionMeta:
    reader = FieldReader(record)
    try:
        status, completed = reader.text("status"), record.get("completed") is True
        return SessionMeta(
            session_id=folder.session,
            is_active=status.lower() == "running" and not completed,
            termination_reason="completed" if completed else None,
            last_updated=reader.moment("last_updated"),
            last_iteration=reader.integer("iteration"),
            task_description=reader.optional_text("task_description"),
        )
    except DecodeError as error:
        raise StoreError(f"{folder.path / OLD_STATE}: {error.what}", path=str(folder.path / OLD_STATE)) from error
