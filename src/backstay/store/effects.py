"""The effect part of the store contract: a ledger of what is done to the world outside, each under a key.

An effect belongs to a lane by name; the lane need not be there yet. Its row is an intent until a receipt ends it. The
row's digest covers the intent, the seal at the front of ``body`` the receipt; the store looks into neither. All verbs
are compare-and-swap: they return the row as it is afterwards, and the caller sees there whether it won.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from backstay.errors import NotFound
from backstay.store.lane import LaneKey

INTENDED, DONE, FAILED = "intended", "done", "failed"


@dataclass(frozen=True, slots=True)
class EffectRow:
    """One effect; ``request`` and ``body`` are bytes the store does not look into."""

    lane: LaneKey
    key: str
    attempt: int  # from 1
    owner: str  # names one attempt of one caller: no other ever has it
    request: bytes  # tells what the effect was asked to do from anything else
    created_us: int
    digest: bytes  # of all of the above
    number: int = 0  # rises in the order in which effects were first begun; given by the store
    status: str = INTENDED
    body: bytes | None = None  # of one that ended
    ended_us: int | None = None
    settled_by: str | None = None


def digest_of(*parts: bytes) -> bytes:
    """Return the digest of parts, each with its length before it, so that no two lists of parts are alike."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def effect_id(lane: LaneKey, key: str) -> bytes:
    """Return what names an effect: a lane and a key as one short value, whatever their lengths."""
    return digest_of(*(part.encode() for part in (*lane, key)))


def intent(row: EffectRow, number: int) -> EffectRow:
    """Return a row as it is when it was just begun, whatever it says of its end."""
    return EffectRow(row.lane, row.key, row.attempt, row.owner, row.request, row.created_us, row.digest, number)


def is_same_call(row: EffectRow, stored: EffectRow | None) -> bool:
    """Tell whether a row that is to be begun is the one that is there, so that its first result comes back."""
    return stored is not None and (row.owner, row.attempt) == (stored.owner, stored.attempt)


def may_begin(row: EffectRow, stored: EffectRow | None, retry_of: int | None) -> bool:
    """Tell whether a row is the attempt that comes next."""
    if stored is None:
        return True
    is_over = stored.status == FAILED or (stored.status == INTENDED and stored.attempt == retry_of)
    return is_over and row.attempt == stored.attempt + 1


def effect_missing(lane: LaneKey, key: str) -> NotFound:
    """Return the error for an effect that is not there."""
    return NotFound(f"effect {key!r}", thread=lane.thread, hint="It went with its thread or branch, or never was")


class Effects(Protocol):
    """The verbs on effects."""

    def begin_effect(
        self, row: EffectRow, epoch: int | None, token: str | None, retry_of: int | None = None
    ) -> EffectRow:
        """Store an intent if it is the attempt that comes next; return the row as it is now.

        Next is any if there is none, else one more than a failed one's. Over one without a receipt it is begun only if
        ``retry_of`` names that attempt: it may still be under way. Begun anew it keeps its number. Who finds its own
        owner and attempt in the answer, and no receipt, may go ahead.

        Fenced like a commit, also if nothing would be stored: ``token`` is that of the lease it is done under, without
        one no lease may run, and ``epoch`` must be the lane's (None = whichever it is). Only the repetition of a call
        that was stored gives its row again whatever happened since. The thread is made if it is not there.
        """

    def end_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int
    ) -> EffectRow:
        """Set the receipt if the effect has none and the attempt and owner are these; return the row as it is now.

        Not fenced: what was done was done, whoever holds the lane now. Raises NotFound if there is no such effect.
        """

    def settle_effect(
        self, lane: LaneKey, key: str, attempt: int, owner: str, status: str, body: bytes, ended_us: int, by: str
    ) -> EffectRow:
        """Set the receipt in the name of somebody who found out; else as ``end_effect``."""

    def find_effect(self, lane: LaneKey, key: str) -> EffectRow | None:
        """Return one effect, or None."""

    def effects(self, namespace: str, thread: str | None, after: int, limit: int) -> list[EffectRow]:
        """Return effects with a higher number than ``after``, in that order.

        At most ``limit``, and never more than ``PAGE_ROWS_MAX``.
        """
