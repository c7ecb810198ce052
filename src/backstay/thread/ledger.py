"""The ledger of effects: what a stored effect says, and the rules by which it changes.

An effect is an intent until a receipt ends it. The next attempt follows one that failed, or one without a receipt if
its caller says that this very one is to be tried again. Only its owner ends an attempt, or a person who found out.
Every write names the version that was read, so of two writers one wins, and both see who.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backstay.codec import decode, encode
from backstay.errors import Conflict, DecodeError, InvalidInput, NotFound
from backstay.model.effect import EffectRecord, EffectStatus, Outcome
from backstay.model.ids import check_id, check_label
from backstay.store.base import Backend, LaneKey
from backstay.store.records import Record, record_id
from backstay.thread.cursor import Context, Cursor
from backstay.thread.record import from_microseconds, to_microseconds
from backstay.thread.records import RecordPages, confirm, damaged, seal, unseal

KEY_LENGTH_MAX = 1000  # characters
NOT_DONE = "not done"
"""The error of an effect of which somebody found out that it was not done."""

RESULT, NO_RESULT, ERROR = b"r", b"n", b"e"
"""How a receipt's payload begins: the encoded result follows, or why it could not be kept, or the type of an error."""

INTENDED, DONE, FAILED = (status.value for status in EffectStatus)
_PAYLOADS = {INTENDED: (b"",), DONE: (RESULT, NO_RESULT), FAILED: (ERROR,)}
_TYPES = (int, str, bytes, int, str, bytes, (int, type(None)), (str, type(None)))


@dataclass(frozen=True, slots=True)
class EffectRow:
    """An effect as it is stored, every byte checked."""

    stored: Record
    attempt: int  # from 1
    owner: str  # names one attempt of one caller: no other ever has it
    request: bytes  # tells what the effect was asked to do from anything else
    created_us: int
    status: str = INTENDED
    payload: bytes = b""  # of one that ended
    ended_us: int | None = None
    settled_by: str | None = None

    def sealed(self) -> Record:
        """Return the record to be stored."""
        return seal(
            self.stored,
            self.status == INTENDED,
            [
                self.attempt,
                self.owner,
                self.request,
                self.created_us,
                self.status,
                self.payload,
                self.ended_us,
                self.settled_by,
            ],
        )


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
    name = record_id("effect", lane, key).hex()
    return f"bs-{name[:32]}"


# Writing ----------------------------------------------------------------------------------------------------------


def intent_of(
    lane: LaneKey, key: str, owner: str, request: bytes, created_us: int, over: EffectRow | None = None
) -> EffectRow:
    """Return the intent of the first attempt, or of the one that follows another."""
    stored = Record("effect", lane, key, b"", True) if over is None else over.stored
    return EffectRow(stored, 1 if over is None else over.attempt + 1, owner, request, created_us)


def ended(row: EffectRow, status: str, payload: bytes, ended_us: int, by: str | None = None) -> EffectRow:
    """Return an intent with its receipt; one that has ended stays as it is."""
    if row.status != INTENDED:
        return row
    return replace(row, status=status, payload=payload, ended_us=ended_us, settled_by=by)


def settle_row(store: Backend, context: Context, row: EffectRow, outcome: Outcome, by: str) -> EffectRow:
    """Store what somebody found out about an intent, unless it has ended; return the row as it is then."""
    done = outcome.status is EffectStatus.DONE
    payload = RESULT + encode(outcome.result, "result") if done else ERROR + NOT_DONE.encode()
    settled = ended(row, outcome.status.value, payload, to_microseconds(context.now()), by)
    return row_of(confirm(store, row.stored) if settled is row else store.put_record(settled.sealed()))


def settle(
    store: Backend, context: Context, cursor: Cursor, shown: EffectRecord, outcome: Outcome, by: str
) -> EffectRecord:
    """Record the outcome of an effect whose outcome was unknown, once."""
    check_id(by, "by")
    if check_outcome(outcome).status is EffectStatus.INTENDED:
        raise InvalidInput("not knowing does not settle an effect", hint="Find out, or leave it as it is")
    row = _stored(store, cursor, shown)
    if (row.attempt, row.owner) == (shown.attempt, shown.owner):
        row = settle_row(store, context, row, outcome, by)
    settled = shown_of(row)
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
    row = find(store, lane, shown.key)
    if row is None:
        raise NotFound(f"effect {shown.key!r}", thread=shown.thread_id, hint="It went with its thread or branch")
    return row


def _says(record: EffectRecord, outcome: Outcome) -> bool:
    """Tell whether a record has what somebody said. Both are encoded here and now: 1, 1.0 and True are not the same."""
    if record.status is not outcome.status:
        return False
    return record.status is EffectStatus.FAILED or encode(record.result) == encode(outcome.result)


# Reading ----------------------------------------------------------------------------------------------------------


def ledger_of(namespace: str, thread: str) -> RecordPages[EffectRecord]:
    """Return the effects of a thread, in the order in which they were first begun."""
    return RecordPages("effect", namespace, thread, False, record_of)


def find(store: Backend, lane: LaneKey, key: str) -> EffectRow | None:
    """Return one effect, or None."""
    stored = store.record("effect", lane, check_key(key))
    return None if stored is None else row_of(stored)


def row_of(stored: Record) -> EffectRow:
    """Return what a stored effect says, every byte of it checked."""
    row = EffectRow(stored, *unseal(stored, _TYPES))
    is_open = row.status == INTENDED
    is_whole = stored.open == (row.ended_us is None) == is_open and (row.settled_by is None or not is_open)
    if row.payload[:1] not in _PAYLOADS.get(row.status, ()) or not is_whole or row.attempt < 1:
        raise damaged(stored, "the receipt does not belong to its status")
    return row


def record_of(stored: Record) -> EffectRecord:
    """Return a stored effect as users see it."""
    return shown_of(row_of(stored))


def shown_of(row: EffectRow) -> EffectRecord:
    """Return an effect as users see it."""
    kind, data = row.payload[:1], row.payload[1:]
    try:
        result = decode(data) if kind == RESULT else None
        error = data.decode() if kind in (NO_RESULT, ERROR) else None
        created_at = from_microseconds(row.created_us)
        ended_at = None if row.ended_us is None else from_microseconds(row.ended_us)
    except (DecodeError, UnicodeDecodeError) as broken:
        raise damaged(row.stored, "the receipt cannot be read") from broken
    lane, key = row.stored.lane, row.stored.key
    return EffectRecord(
        key=key,
        status=EffectStatus(row.status),
        attempt=row.attempt,
        owner=row.owner,
        created_at=created_at,
        idempotency_key=idempotency_key(lane, key),
        thread_id=lane.thread,
        branch=lane.branch,
        scope=lane.scope,
        result=result,
        error=error,
        ended_at=ended_at,
        settled_by=row.settled_by,
    )
