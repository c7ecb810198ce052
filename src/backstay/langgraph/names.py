"""How LangGraph's names become ours, and back.

LangGraph names a checkpoint by (thread, namespace, id); ours have one id. LangGraph's ids are UUIDs unless a program
chose its own. Our id is that UUID combined with a hash of thread and namespace: 16 bytes, unique, and reversible. Any
other id becomes a hash, and the metadata keeps the original.

Configs that the saver returns carry ids as ``ReadId``: text that remembers whether the checkpoint already had a
successor when it was read. A run that continues from such a checkpoint wants a fork; a run that continues from a newest
one expects to be the only one. LangGraph passes the id that a run has read to the first ``put`` of that run, and
nothing else could distinguish the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from backstay.errors import InvalidInput
from backstay.model.ids import ID_LENGTH_MAX, check_id
from backstay.store.layout import uuid_bytes, uuid_text

_HASHED = "~"
"""The first character of ids and scopes that are a hash of LangGraph's."""


class ReadId(str):
    """The id of a checkpoint as it was read; ``forks`` if it was not the newest of its branch at that moment."""

    forks: bool

    def __new__(cls, text: str, forks: bool) -> ReadId:
        """Return the id with what is known about it."""
        made = super().__new__(cls, text)
        made.forks = forks
        return made

    def __eq__(self, other: object) -> bool:
        # Another subclass of str, such as one that equals any text, decides for itself, as it would with plain text.
        if isinstance(other, str) and type(other) not in (str, ReadId):
            return NotImplemented
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __getnewargs__(self) -> tuple[str, bool]:  # type: ignore[override]  # a copy remembers it too
        return str(self), self.forks


def may_fork(checkpoint_id: str) -> bool:
    """Return whether a parent already had a successor when it was read."""
    return isinstance(checkpoint_id, ReadId) and checkpoint_id.forks


class GraphLocation(NamedTuple):
    """The thread and the namespace that a call of the saver is about."""

    thread: str
    ns: str

    @property
    def scope(self) -> str:
        """Return the namespace as a scope; a hash of it if it is too long."""
        if len(self.ns) <= ID_LENGTH_MAX:
            return self.ns
        return _HASHED + hashlib.sha256(self.ns.encode()).hexdigest()

    def name(self, checkpoint_id: str) -> str:
        """Return our id of a checkpoint."""
        raw = uuid_bytes(checkpoint_id)
        if raw is None:
            return _HASHED + _digest(self, checkpoint_id).hex()
        return uuid_text((int.from_bytes(raw) ^ _mask(self)).to_bytes(16))

    def original(self, name: str) -> str | None:
        """Return LangGraph's id for one of our ids, or None if it is a hash."""
        raw = uuid_bytes(name)
        return None if raw is None else uuid_text((int.from_bytes(raw) ^ _mask(self)).to_bytes(16))


def location_of(config: Mapping[str, Any]) -> GraphLocation:
    """Return the thread and namespace of a config; the thread id may be any object that has a text."""
    configurable = config.get("configurable") or {}
    if "thread_id" not in configurable:
        raise InvalidInput(
            "the config has no thread_id", hint='Pass config={"configurable": {"thread_id": "…"}} to the graph'
        )
    ns = str(configurable.get("checkpoint_ns") or "")
    if ns and len(ns) <= ID_LENGTH_MAX:
        check_id(ns, "checkpoint_ns")
    return GraphLocation(thread_name(configurable["thread_id"]), ns)


def thread_name(thread_id: object) -> str:
    """Return a thread's id as the text that LangGraph's own savers make of it."""
    return check_id(str(thread_id), "thread_id")


def checkpoint_id_of(config: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that a config names, if any."""
    found = (config.get("configurable") or {}).get("checkpoint_id")
    return found if isinstance(found, str) and found else None


def config_of(location: GraphLocation, checkpoint_id: str) -> dict[str, Any]:
    """Return the config that names a checkpoint."""
    configurable = {"thread_id": location.thread, "checkpoint_ns": location.ns, "checkpoint_id": checkpoint_id}
    return {"configurable": configurable}


@lru_cache(maxsize=4096)
def _mask(location: GraphLocation) -> int:
    return int.from_bytes(_digest(location, ""))


def _digest(location: GraphLocation, checkpoint_id: str) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for part in (location.thread, location.ns, checkpoint_id):
        data = part.encode()
        hasher.update(len(data).to_bytes(4))
        hasher.update(data)
    return hasher.digest()
