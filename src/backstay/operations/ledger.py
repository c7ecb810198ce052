"""The ledger of calls and effects: the stored ones, and the rules for changing them.

An effect is an intent until a receipt ends it. The next attempt follows a failed one, or one without a receipt if the
caller asks to retry exactly that one. Only its owner, or a person who found out the outcome, ends an attempt. Every
write names the version that was read, so one of two writers wins, and both see who did.

A durable call may be repeated, so it needs no intent: its record is stored when it is done, and only then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from backstay.codec import decode, encode
from backstay.errors import Conflict, DecodeError, InvalidInput, NotFound
from backstay.model.ids import check_id, check_label
from backstay.model.runs import EffectRecord, EffectStatus, Outcome
from backstay.operations.cursor import Cursor, Services
from backstay.operations.records import RecordPages, confirm, damaged, seal, unseal
from backstay.operations.rows import from_microseconds, to_microseconds
from backstay.store.base import Backend, BranchKey
from backstay.store.records import Record, record_id

KEY_LENGTH_MAX = 1000  # characters
NOT_DONE = "not done"
"""The error of an effect that turned out not to have been done."""

RESULT, NO_RESULT, ERROR = b"r", b"n", b"e"
"""First byte of a receipt: the encoded result follows, or why it could not be stored, or the type of an error."""

INTENDED, DONE, FAILED = (status.value for status in EffectStatus)
_PAYLOADS = {INTENDED: (b"",), DONE: (RESULT, NO_RESULT), FAILED: (ERROR,)}
_TYPES = (int, str, bytes, int, str, bytes, (int, type(None)), (str, type(None)), bool)


@dataclass(frozen=True, slots=True)
class EffectRow:
    """A stored effect, every byte checked."""

    stored: Record
    attempt: int  # from 1
    owner: str  # identifies one attempt of one caller
    request: bytes  # digest of the arguments
    created_us: int
    status: str = INTENDED
    payload: bytes = b""  # of an effect that ended
    ended_us: int | None = None
    settled_by: str | None = None
    is_call: bool = False  # a durable call: it has no intent, so it is stored only when it is done

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
                self.is_call,
            ],
        )


def check_key(key: object) -> str:
    """Return the key of an effect, checked."""
    if key == "":
        raise InvalidInput("the key of the effect is empty", hint=f"Pass text of 1 to {KEY_LENGTH_MAX} characters")
    return check_label(key, "the key of an effect", length_max=KEY_LENGTH_MAX)


def check_outcome(outcome: object) -> Outcome:
    """Return the outcome that a hook or a person reported, checked."""
    if not isinstance(outcome, Outcome):
        raise InvalidInput(
            f"the outcome of an effect must be an Outcome, not {type(outcome).__name__}",
            hint="Use Outcome.done(result), Outcome.not_done() or Outcome.unknown()",
        )
    return outcome


def idempotency_key(branch: BranchKey, key: str) -> str:
    """Return the key to send with an effect: the same in every attempt, process and restart, and used nowhere else."""
    name = record_id("effect", branch, key).hex()
    return f"bs-{name[:32]}"


# Keys of runs -----------------------------------------------------------------------------------------------------
#
# Calls and effects of a run have keys that name their place: ``line:graph/node#visit…:name`` in a graph, where the line
# is the run and its line of history, and ``round/iteration/name`` in a loop. Any other key is the caller's own.

_NAME = r"[^\s/#\[\]>:*,]+"  # what names of graphs and nodes are made of
_IN_GRAPH = re.compile(rf"(?P<line>.+?):{_NAME}/(?P<node>{_NAME})#(?P<visit>[0-9]+)[\[>:]", re.DOTALL)
_IN_LOOP = re.compile(r"(0|[1-9][0-9]*)/([1-9][0-9]*)/")


class NodePlace(NamedTuple):
    """Where a graph made a call: the line of its run, and the visit of a node of the outermost graph."""

    line: str
    node: str
    visit: int


class TurnPlace(NamedTuple):
    """Where a loop made a call: the round, and the turn in it."""

    round: int
    iteration: int


def place_of(key: str) -> NodePlace | TurnPlace | None:
    """Return where a run made the call with this key; None if the key is the caller's own, or was cut."""
    if found := _IN_LOOP.match(key):
        return TurnPlace(int(found[1]), int(found[2]))
    if found := _IN_GRAPH.match(key):
        return NodePlace(found["line"], found["node"], int(found["visit"]))
    return None


# Writing ----------------------------------------------------------------------------------------------------------


def intent_of(
    branch: BranchKey, key: str, owner: str, request: bytes, created_us: int, over: EffectRow | None = None
) -> EffectRow:
    """Return the intent of the first attempt, or of the attempt after ``over``."""
    stored = Record("effect", branch, key, b"", True) if over is None else over.stored
    return EffectRow(stored, 1 if over is None else over.attempt + 1, owner, request, created_us)


def call_of(
    branch: BranchKey, key: str, owner: str, request: bytes, result: bytes, started_us: int, ended_us: int
) -> EffectRow:
    """Return the record of a durable call that is done."""
    stored = Record("effect", branch, key, b"", False)
    return EffectRow(stored, 1, owner, request, started_us, DONE, RESULT + result, ended_us, is_call=True)


def ended(row: EffectRow, status: str, payload: bytes, ended_us: int, by: str | None = None) -> EffectRow:
    """Return an intent with its receipt; an effect that has ended does not change."""
    if row.status != INTENDED:
        return row
    return replace(row, status=status, payload=payload, ended_us=ended_us, settled_by=by)


def settle_row(store: Backend, services: Services, row: EffectRow, outcome: Outcome, by: str) -> EffectRow:
    """Store the outcome of an intent, unless it has ended; return the row as stored."""
    done = outcome.status is EffectStatus.DONE
    payload = RESULT + encode(outcome.result, "result") if done else ERROR + NOT_DONE.encode()
    settled = ended(row, outcome.status.value, payload, to_microseconds(services.now()), by)
    return row_of(confirm(store, row.stored) if settled is row else store.put_record(settled.sealed()))


def settle(
    store: Backend, services: Services, cursor: Cursor, shown: EffectRecord, outcome: Outcome, by: str
) -> EffectRecord:
    """Record the outcome of an effect whose outcome was unknown, once."""
    check_id(by, "by")
    if check_outcome(outcome).status is EffectStatus.INTENDED:
        raise InvalidInput("an unknown outcome does not settle an effect", hint="Settle it when you know the outcome")
    row = _stored(store, cursor, shown)
    if (row.attempt, row.owner) == (shown.attempt, shown.owner):
        row = settle_row(store, services, row, outcome, by)
    settled = shown_of(row)
    if (row.attempt, row.owner, row.settled_by) == (shown.attempt, shown.owner, by) and _says(settled, outcome):
        return settled
    raise Conflict(
        f"{settled}: the effect has changed since the record was read",
        winner=settled,
        thread=settled.thread_id,
        hint="Nothing was changed; error.winner is the effect as stored",
    )


def _stored(store: Backend, cursor: Cursor, shown: EffectRecord) -> EffectRow:
    """Return the stored effect of a record, which must belong to this thread."""
    if not isinstance(shown, EffectRecord):
        raise InvalidInput(
            f"effect must be an EffectRecord, not {type(shown).__name__}",
            hint="Pass error.record of an EffectUnknown, or a record from thread.effects()",
        )
    if shown.thread_id != cursor.branch.thread:
        raise InvalidInput(
            f"{shown} does not belong to thread {cursor.branch.thread!r}", hint="Settle it through its own thread"
        )
    branch = BranchKey(cursor.branch.namespace, shown.thread_id, shown.scope, shown.branch)
    row = find(store, branch, shown.key)
    if row is None:
        raise NotFound(
            f"effect {shown.key!r} does not exist",
            thread=shown.thread_id,
            hint="It was deleted with its thread or branch",
        )
    return row


def _says(record: EffectRecord, outcome: Outcome) -> bool:
    """Return whether a record has this outcome. Results are compared encoded: 1, 1.0 and True differ."""
    if record.status is not outcome.status:
        return False
    return record.status is EffectStatus.FAILED or encode(record.result) == encode(outcome.result)


# Reading ----------------------------------------------------------------------------------------------------------


def ledger_of(namespace: str, thread: str) -> RecordPages[EffectRecord]:
    """Return the effects of a thread, in the order in which they first started."""
    return RecordPages("effect", namespace, thread, False, record_of)


def find(store: Backend, branch: BranchKey, key: str) -> EffectRow | None:
    """Return one effect, or None."""
    stored = store.record("effect", branch, check_key(key))
    return None if stored is None else row_of(stored)


def row_of(stored: Record) -> EffectRow:
    """Return a stored effect as a row, every byte checked."""
    row = EffectRow(stored, *unseal(stored, _TYPES))
    is_open = row.status == INTENDED
    is_whole = stored.open == (row.ended_us is None) == is_open and (row.settled_by is None or not is_open)
    if (
        row.payload[:1] not in _PAYLOADS.get(row.status, ())
        or not is_whole
        or row.attempt < 1
        or (row.is_call and is_open)
    ):
        raise damaged(stored, "its receipt does not match its status")
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
        raise damaged(row.stored, "its receipt cannot be read") from broken
    branch, key = row.stored.branch, row.stored.key
    return EffectRecord(
        key=key,
        status=EffectStatus(row.status),
        attempt=row.attempt,
        owner=row.owner,
        created_at=created_at,
        idempotency_key=idempotency_key(branch, key),
        thread_id=branch.thread,
        branch=branch.name,
        scope=branch.scope,
        result=result,
        error=error,
        ended_at=ended_at,
        settled_by=row.settled_by,
        is_call=row.is_call,
    )
