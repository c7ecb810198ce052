"""How LangGraph's names become ours, and back.

LangGraph names a checkpoint by (thread, namespace, id); ours have one id. If theirs is a UUID, which it is unless
somebody made it by hand, ours is that number combined with a hash of thread and namespace: 16 bytes, no two alike, and
it can be turned back. Any other id becomes a hash, and the original is kept beside it.

Configs that the saver returns carry ids as ``ReadId``: text that remembers whether the checkpoint had been superseded
when it was read. Who goes on from a superseded one wants a fork; who goes on from a newest one wants to be the only
one. LangGraph hands the id of what a run read to the first ``put`` of that run, and nothing else that could tell them
apart.
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
"""How ids and scopes begin that are a hash of LangGraph's."""


class ReadId(str):
    """The id of a checkpoint as it was read: ``forks`` if it was not the newest of its branch at that moment."""

    forks: bool

    def __new__(cls, text: str, forks: bool) -> ReadId:
        """Return the id with what is known about it."""
        made = super().__new__(cls, text)
        made.forks = forks
        return made

    def __eq__(self, other: object) -> bool:
        # Another kind of text, such as one that equals any text, decides for itself, as it would beside plain text.
        if isinstance(other, str) and type(other) not in (str, ReadId):
            return NotImplemented
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __getnewargs__(self) -> tuple[str, bool]:  # type: ignore[override]  # a copy remembers it too
        return str(self), self.forks


def forking(checkpoint_id: str) -> ReadId:
    """Return an id from which a ``put`` may fork, whatever became of the checkpoint since."""
    return ReadId(checkpoint_id, True)


class Place(NamedTuple):
    """Where a call of the saver wants to be: a thread and one of its namespaces."""

    thread: str
    ns: str

    @property
    def scope(self) -> str:
        """Return the namespace as a scope; one that is too long for that by its hash."""
        if len(self.ns) <= ID_LENGTH_MAX:
            return self.ns
        return _HASHED + hashlib.sha256(self.ns.encode()).hexdigest()

    @property
    def is_of_one_task(self) -> bool:
        """Tell whether the namespace is that of a subgraph that lives no longer than the task which calls it."""
        return ":" in self.ns.rpartition("|")[2]

    def name(self, checkpoint_id: str) -> str:
        """Return our id of a checkpoint here."""
        raw = uuid_bytes(checkpoint_id)
        if raw is None:
            return _HASHED + _digest(self, checkpoint_id, 16).hex()
        return uuid_text((int.from_bytes(raw) ^ _mask(self)).to_bytes(16))

    def original(self, name: str) -> str | None:
        """Return LangGraph's id of one of our ids here; None if that cannot be told."""
        raw = uuid_bytes(name)
        return None if raw is None else uuid_text((int.from_bytes(raw) ^ _mask(self)).to_bytes(16))


def place_of(config: Mapping[str, Any]) -> Place:
    """Return the thread and namespace of a config; a thread's id may be anything that has a text."""
    configurable = config["configurable"]
    if "thread_id" not in configurable:
        raise InvalidInput(
            "the config names no thread", hint='Pass config={"configurable": {"thread_id": "…"}} to the graph'
        )
    return Place(thread_name(configurable["thread_id"]), _namespace(configurable.get("checkpoint_ns") or ""))


def thread_name(thread_id: object) -> str:
    """Return a thread's id as the text that LangGraph's own savers make of it."""
    return check_id(str(thread_id), "thread_id")


def checkpoint_id_of(config: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that a config names, if any."""
    found = config["configurable"].get("checkpoint_id")
    return found if isinstance(found, str) and found else None


def may_fork(checkpoint_id: str) -> bool:
    """Tell whether a parent's id was read when it was superseded already."""
    return isinstance(checkpoint_id, ReadId) and checkpoint_id.forks


def config_of(place: Place, checkpoint_id: str) -> dict[str, Any]:
    """Return the config that names a checkpoint."""
    return {"configurable": {"thread_id": place.thread, "checkpoint_ns": place.ns, "checkpoint_id": checkpoint_id}}


def _namespace(ns: object) -> str:
    if type(ns) is not str:
        ns = str(ns)
    return ns if not ns or len(ns) > ID_LENGTH_MAX else check_id(ns, "checkpoint_ns")


@lru_cache(maxsize=4096)
def _mask(place: Place) -> int:
    return int.from_bytes(_digest(place, "", 16))


def _digest(place: Place, checkpoint_id: str, size: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=size)
    for part in (place.thread, place.ns, checkpoint_id):
        data = part.encode()
        hasher.update(len(data).to_bytes(4))
        hasher.update(data)
    return hasher.digest()
