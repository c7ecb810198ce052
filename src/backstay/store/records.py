"""Records: small mutable rows, each with a version that every write must name.

A record is a session, an interrupt or an effect. The store knows its name, its branch and whether it is open, and
nothing of its meaning: the body is sealed bytes, and the rules (who may start, decide, consume or end it) are pure
functions in ``operations/``. A writer reads a record, computes the next one, and stores it if no other writer was
faster.

A record with a checkpoint is deleted with it. Effects are deleted with their branch, when a delete removes the branch's
last checkpoint. Sessions, like everything else, are deleted with their thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

from backstay.errors import NotFound
from backstay.store.leases import BranchKey

Kind = Literal["session", "interrupt", "effect"]

KINDS: tuple[Kind, ...] = ("session", "interrupt", "effect")
"""All kinds. Their positions in this list are stored, so a new kind comes last."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record. Later writes change only ``body``, ``open``, the version and the time to live."""

    kind: Kind
    branch: BranchKey
    key: str  # the id of a session or an interrupt, the key of an effect
    body: bytes  # sealed: opaque to the store
    open: bool  # a session that has not ended, an interrupt that is not consumed, an effect without a receipt
    checkpoint: str | None = None  # the checkpoint it belongs to and is deleted with
    version: int = 0  # 0 = not stored; each write adds one
    number: int = 0  # given by the store in the order of first writes, never reused
    left_us: int = 0  # remaining time to live by the store's clock; 0 or less = expired, or none


class Fence(NamedTuple):
    """The right to write a record: ``epoch`` must be the branch's (None = any).

    ``token`` is the writer's lease token; without one, no lease may run on the branch.
    """

    epoch: int | None = None
    token: str | None = None


def digest_of(*parts: bytes) -> bytes:
    """Return the digest of parts, each with its length before it, so that different lists have different digests."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def record_id(kind: Kind, branch: BranchKey, key: str) -> bytes:
    """Return a record's name as a digest: of an effect's branch and key, or of the kind, namespace and key."""
    parts = (*branch, key) if kind == "effect" else (kind, branch.namespace, key)
    return digest_of(*(part.encode(errors="surrogatepass") for part in parts))


def is_repeated(record: Record, stored: Record | None) -> bool:
    """Return whether this write was stored before, so that its result is returned again."""
    return stored is not None and (stored.version, stored.body) == (record.version + 1, record.body)


def winner(record: Record, stored: Record | None) -> Record | None:
    """Return the stored record if another writer changed it, None if this writer wins; NotFound if it was deleted."""
    if stored is None and record.version:
        raise record_is_gone(record)
    is_seen = stored is None or (stored.version, stored.number) == (record.version, record.number)
    return None if is_seen else stored


def written(record: Record, stored: Record | None, number: int, ttl_us: int | None) -> Record:
    """Return the record as a write stores it; ``number`` is for a new one."""
    first = stored or record
    return Record(
        first.kind,
        first.branch,
        first.key,
        record.body,
        record.open,
        first.checkpoint,
        record.version + 1,
        number if stored is None else stored.number,
        ttl_us or 0,
    )


def record_is_gone(record: Record) -> NotFound:
    """Return the error for a write to a deleted record."""
    deleted_with = "thread or branch" if record.checkpoint is None else "checkpoint"
    return NotFound(
        f"{record.kind} {record.key!r}",
        thread=record.branch.thread,
        checkpoint=record.checkpoint,
        hint=f"It was deleted with its {deleted_with}",
    )


def checkpoint_is_gone(record: Record) -> NotFound:
    """Return the error for a new record whose checkpoint does not exist."""
    return NotFound(
        str(record.checkpoint),
        thread=record.branch.thread,
        checkpoint=record.checkpoint,
        hint=f"The {record.kind} needs a checkpoint in its own thread and scope: save one first",
    )
