"""The ledger of effects as it is stored: every byte is sealed when it is written and checked when it is read.

The digest of a row covers the intent: its place, its attempt, its owner and its arguments. A receipt begins with a
seal, which covers that digest, how it ended, when, who said so, and the result. So none can be taken for another's.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.codec import decode, encode
from backstay.errors import Conflict, Corrupted, DecodeError, InvalidInput, NotFound
from backstay.model.damaged import Damaged
from backstay.model.effect import EffectRecord, EffectStatus, Outcome
from backstay.model.ids import check_id, check_label
from backstay.store.base import Backend, LaneKey
from backstay.store.effects import EffectRow, digest_of, effect_id
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import read_each, unread
from backstay.thread.record import from_microseconds, to_microseconds

KEY_LENGTH_MAX = 1000  # characters
PAGE_ROWS = 100
NOT_DONE = "not done"
"""The error of an effect of which somebody found out that it was not done."""

RESULT, NO_RESULT, ERROR = b"r", b"n", b"e"
"""How a receipt's payload begins: the encoded result follows, or why it could not be kept, or the type of an error."""

_SEAL_BYTES = 32
_KINDS = {EffectStatus.DONE.value: (RESULT, NO_RESULT), EffectStatus.FAILED.value: (ERROR,)}


def check_key(key: object) -> str:
    """Return the key if an effect can have it."""
    if key == "":
        raise InvalidInput("the key of an effect is empty", hint=f"Pass text of 1 to {KEY_LENGTH_MAX} characters")
    return check_label(key, "the key of an effect", length_max=KEY_LENGTH_MAX)


def check_outcome(outcome: object) -> Outcome:
    """Return what a hook or a person said."""
    if not isinstance(outcome, Outcome):
        raise InvalidInput(
            f"the outcome of an effect must be an Outcome, not {type(outcome).__name__}",
            hint="Say Outcome.done(result), Outcome.not_done() or Outcome.unknown()",
        )
    return outcome


def idempotency_key(lane: LaneKey, key: str) -> str:
    """Return what is sent along with an effect: the same in every attempt, process and restart, and nowhere else."""
    return f"bs-{effect_id(lane, key).hex()[:32]}"


# Writing ----------------------------------------------------------------------------------------------------------


def intent_of(lane: LaneKey, key: str, attempt: int, owner: str, request: bytes, created_us: int) -> EffectRow:
    """Return the row that an attempt begins with."""
    return EffectRow(
        lane, key, attempt, owner, request, created_us, _digest(lane, key, attempt, owner, request, created_us)
    )


def sealed(row: EffectRow, status: EffectStatus, ended_us: int, by: str | None, payload: bytes) -> bytes:
    """Return the body of a receipt."""
    return _seal(row, status.value, ended_us, by, payload) + payload


def settle_row(store: Backend, context: Context, row: EffectRow, outcome: Outcome, by: str) -> EffectRow:
    """Store what somebody found out about an intent, unless it has ended; return the row as it is then."""
    done = outcome.status is EffectStatus.DONE
    payload = RESULT + encode(outcome.result, "result") if done else ERROR + NOT_DONE.encode()
    ended_us, status = to_microseconds(context.now()), outcome.status.value
    body = sealed(row, outcome.status, ended_us, by, payload)
    return store.settle_effect(row.lane, row.key, row.attempt, row.owner, status, body, ended_us, by)


def settle(
    store: Backend, context: Context, cursor: Cursor, shown: EffectRecord, outcome: Outcome, by: str
) -> EffectRecord:
    """Record how an effect ended of which nobody knew, once."""
    check_id(by, "by")
    if check_outcome(outcome).status is EffectStatus.INTENDED:
        raise InvalidInput("not knowing does not settle an effect", hint="Find out, or leave it as it is")
    row = _stored(store, cursor, shown)
    if (row.attempt, row.owner) == (shown.attempt, shown.owner):
        row = settle_row(store, context, row, outcome, by)
    settled = record_of(row)
    if (row.attempt, row.owner, row.settled_by) == (shown.attempt, shown.owner, by) and _says(settled, outcome):
        return settled
    raise Conflict(
        f"{settled}: that is not what was shown",
        winner=settled,
        thread=settled.thread_id,
        hint="Nothing was changed; error.winner is what the ledger has",
    )


def _stored(store: Backend, cursor: Cursor, shown: EffectRecord) -> EffectRow:
    """Return what is stored of the effect that a record shows, which must be of this thread."""
    if not isinstance(shown, EffectRecord):
        raise InvalidInput(
            f"effect must be an EffectRecord, not {type(shown).__name__}",
            hint="Pass error.record of an EffectUnknown, or what thread.effects() gave",
        )
    if shown.thread_id != cursor.lane.thread:
        raise InvalidInput(f"{shown} is not of thread {cursor.lane.thread!r}", hint="Settle it through its own thread")
    lane = LaneKey(cursor.lane.namespace, shown.thread_id, shown.scope, shown.branch)
    row = store.find_effect(lane, check_key(shown.key))
    if row is None:
        raise NotFound(f"effect {shown.key!r}", thread=shown.thread_id, hint="It went with its thread or branch")
    record_of(row)
    return row


def _says(record: EffectRecord, outcome: Outcome) -> bool:
    """Tell whether a record has what somebody said. Both are encoded here and now: 1, 1.0 and True are not the same."""
    if record.status is not outcome.status:
        return False
    return record.status is EffectStatus.FAILED or encode(record.result) == encode(outcome.result)


# Reading ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ledger:
    """The effects of a thread, read page by page; between pages nothing is held."""

    namespace: str
    thread: str
    after: int = 0
    done: bool = False
    begun: bool = False

    def next_page(self, store: Backend) -> list[EffectRecord | Damaged]:
        """Return the next page and remember where it ended."""
        lost = [] if self.begun else (unread(store, self.namespace, self.thread))
        self.begun = True
        rows = store.effects(self.namespace, self.thread, self.after, PAGE_ROWS)
        self.done = len(rows) < PAGE_ROWS
        if rows:
            self.after = rows[-1].number
        return [*lost, *read_each(rows, record_of, lambda row: (row.lane.thread, row.key, row.number))]


def record_of(row: EffectRow) -> EffectRecord:
    """Return a stored effect, every byte of it checked."""
    kind, payload = payload_of(row)
    try:
        result = decode(payload) if kind == RESULT else None
        error = payload.decode() if kind in (NO_RESULT, ERROR) else None
        created_at = from_microseconds(row.created_us)
        ended_at = None if row.ended_us is None else from_microseconds(row.ended_us)
    except (DecodeError, UnicodeDecodeError) as broken:
        raise _damaged(row, "the receipt cannot be read") from broken
    return EffectRecord(
        key=row.key,
        status=EffectStatus(row.status),
        attempt=row.attempt,
        owner=row.owner,
        created_at=created_at,
        idempotency_key=idempotency_key(row.lane, row.key),
        thread_id=row.lane.thread,
        branch=row.lane.branch,
        scope=row.lane.scope,
        result=result,
        error=error,
        ended_at=ended_at,
        settled_by=row.settled_by,
    )


def payload_of(row: EffectRow) -> tuple[bytes, bytes]:
    """Return what kind of receipt a row has and what it says, every byte checked; nothing if it has none."""
    if _digest(row.lane, row.key, row.attempt, row.owner, row.request, row.created_us) != row.digest:
        raise _damaged(row, "the intent does not match its digest")
    if row.status == EffectStatus.INTENDED and (row.body, row.ended_us, row.settled_by) == (None, None, None):
        return b"", b""
    body = row.body or b""
    seal, payload = body[:_SEAL_BYTES], body[_SEAL_BYTES:]
    if seal != _seal(row, row.status, row.ended_us or 0, row.settled_by, payload):
        raise _damaged(row, "the receipt does not match its digest")
    if payload[:1] not in _KINDS.get(row.status, ()):
        raise _damaged(row, "the receipt does not belong to its status")
    return payload[:1], payload[1:]


def _digest(lane: LaneKey, key: str, attempt: int, owner: str, request: bytes, created_us: int) -> bytes:
    """Return what binds an intent to its place, its owner and its arguments."""
    return digest_of(*(part.encode() for part in (*lane, key, str(attempt), owner, str(created_us))), request)


def _seal(row: EffectRow, status: str, ended_us: int, by: str | None, payload: bytes) -> bytes:
    """Return what binds a receipt to its intent, to when and by whom."""
    who = b"" if by is None else b"by " + by.encode()
    return digest_of(row.digest, status.encode(), str(ended_us).encode(), who, payload)


def _damaged(row: EffectRow, what: str) -> Corrupted:
    return Corrupted(
        f"effect {row.key!r}: {what}",
        thread=row.lane.thread,
        hint="Do not rely on it. Find out whether it was done; under another key it can be done again",
    )
