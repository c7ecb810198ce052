"""The part of the store contract about records: small mutable rows, each with a version that every write names.

A record is a session, an interrupt or an effect. The store knows its name, where it belongs and whether it is open,
and nothing of what it means: the body is sealed bytes, and the rules (who may begin, decide, consume or end what) are
pure functions in ``thread/``. A writer reads a record, works out the next one, and stores it if nobody was faster.

With what it goes   A record with a checkpoint goes with it. Effects go with their branch, when a delete takes the
                    branch's last checkpoint, and sessions, like everything else, with their thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from backstay.errors import NotFound
from backstay.store.lane import LaneKey

Kind = Literal["session", "interrupt", "effect"]

KINDS: tuple[Kind, ...] = ("session", "interrupt", "effect")
"""All kinds; the places in this list are stored, so a new kind comes last."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record. Later writes change ``body``, ``open``, the version and the time to live; the rest stays."""

    kind: Kind
    lane: LaneKey
    key: str  # the id of a session or an interrupt, the key of an effect
    body: bytes  # sealed; the store does not look into it
    open: bool  # a session that has not ended, an interrupt that is not consumed, an effect without a receipt
    checkpoint: str | None = None  # the one it belongs to and goes with
    version: int = 0  # 0 = not stored; each write adds one
    number: int = 0  # given by the store: rises in the order in which records were first stored, and is never reused
    left_us: int = 0  # with a time to live: what is left of it by the store's clock, 0 or less = it has run out


class Fence(NamedTuple):
    """Under what right a record is written: ``epoch`` must be the lane's (None = whichever it is).

    ``token`` is that of the lease it is written under; without one, no lease may run on the lane.
    """

    epoch: int | None = None
    token: str | None = None


def digest_of(*parts: bytes) -> bytes:
    """Return the digest of parts, each with its length before it, so that no two lists of parts are alike."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def record_id(kind: Kind, lane: LaneKey, key: str) -> bytes:
    """Return what names a record, as one short value: an effect's lane and key, else the kind, namespace and key."""
    parts = (*lane, key) if kind == "effect" else (kind, lane.namespace, key)
    return digest_of(*(part.encode() for part in parts))


def is_repeated(record: Record, stored: Record | None) -> bool:
    """Tell whether a write was stored before, so that its result comes back."""
    return stored is not None and (stored.version, stored.body) == (record.version + 1, record.body)


def winner(record: Record, stored: Record | None) -> Record | None:
    """Return what is stored if it is not what the writer saw, so that it stays; NotFound if that is gone."""
    if stored is None and record.version:
        raise record_is_gone(record)
    is_seen = stored is None or (stored.version, stored.number) == (record.version, record.number)
    return None if is_seen else stored


def written(record: Record, stored: Record | None, number: int, ttl_us: int | None) -> Record:
    """Return the row after a write that was stored; ``number`` is that of a new one."""
    first = stored or record
    return Record(
        first.kind,
        first.lane,
        first.key,
        record.body,
        record.open,
        first.checkpoint,
        record.version + 1,
        number if stored is None else stored.number,
        ttl_us or 0,
    )


def record_is_gone(record: Record) -> NotFound:
    """Return the error for a write to a record that is no longer there."""
    went_with = "thread or branch" if record.checkpoint is None else "checkpoint"
    return NotFound(
        f"{record.kind} {record.key!r}",
        thread=record.lane.thread,
        checkpoint=record.checkpoint,
        hint=f"It was deleted with its {went_with}",
    )


def checkpoint_is_gone(record: Record) -> NotFound:
    """Return the error for a new record of a checkpoint that is not there."""
    return NotFound(
        str(record.checkpoint),
        thread=record.lane.thread,
        checkpoint=record.checkpoint,
        hint=f"The {record.kind} needs a checkpoint of its own thread and scope: save first",
    )


class Records(Protocol):
    """The verbs on records."""

    def record(self, kind: Kind, lane: LaneKey, key: str) -> Record | None:
        """Return one record, or None. Of a session or an interrupt only the lane's namespace is looked at."""

    def put_record(self, record: Record, ttl_us: int | None = None, fence: Fence | None = None) -> Record:
        """Store a record if the version and the number are those that are stored; return the row as it is now.

        Version 0 means that there must be none. The row that comes back shows whether this writer won. The steps:

        1. If the stored version is one higher and the body the same, this is the repetition of a write that was
           stored: its row comes back, whatever the fence says.
        2. A fence is checked like a commit's, also if nothing would be stored: Fenced.
        3. NotFound if a version is named and there is no such record, or if a new record names a checkpoint that is
           not in the lane's thread and scope.
        4. It is stored with the next version, or not. With ``ttl_us`` its time to live begins now, without it has
           none. The thread is made if it is not there.
        """

    def records(
        self, kind: Kind, namespace: str, thread: str | None, open_only: bool, after: int, limit: int
    ) -> list[Record]:
        """Return records with a higher number than ``after``, in that order.

        At most ``limit``, and never more than ``PAGE_ROWS_MAX``.
        """
