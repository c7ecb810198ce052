"""Effects on the world outside, done once: the intent is stored before, the receipt after.

A done effect is not done again: its result is replayed. An intent without a receipt means that nobody knows, and is
never blindly tried again: a hook that can find out is asked, or a person, unless the caller says that doing it twice
with the same idempotency key does no harm.

The whole course of a call is one generator of steps, ``_course``: operations on the store, and functions of the
caller's. ``perform`` and ``aperform`` hand it to one of the two drivers in ``steps``. Nothing is locked meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from backstay.codec import encode
from backstay.errors import (
    BackstayError,
    Conflict,
    EffectChanged,
    EffectUnknown,
    EncodeError,
    Fenced,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
)
from backstay.model.effect import EffectRecord, EffectStatus, Outcome
from backstay.store.base import Backend
from backstay.store.records import Fence, Record, digest_of
from backstay.thread.access import Handle
from backstay.thread.cursor import Cursor
from backstay.thread.ledger import (
    DONE,
    ERROR,
    FAILED,
    INTENDED,
    NO_RESULT,
    RESULT,
    EffectRow,
    check_key,
    check_outcome,
    ended,
    find,
    idempotency_key,
    intent_of,
    row_of,
    settle_row,
    shown_of,
)
from backstay.thread.process import short_name
from backstay.thread.record import to_microseconds
from backstay.thread.steps import Steps, arun_steps, run_steps

UNKNOWN_ON: tuple[type[BaseException], ...] = (
    TimeoutError,
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    OutcomeUnknown,
)
"""Errors after which nobody knows whether the other side did it. A refused connection is not one of them."""

IDEMPOTENCY_KEY = "idempotency_key"
"""A function with a parameter of this name is given the effect's key."""

RECONCILED = "reconcile"
"""Who settled an effect, if a hook did."""

CANCELLED = b"CancelledError"
"""What an effect failed with whose caller was cancelled before it was done."""

Reconcile = Callable[[EffectRecord], Outcome | Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class EffectCall:
    """One effect to be done; see ``Thread.effect``. ``unknown_on`` are errors after which nobody knows."""

    key: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reconcile: Reconcile | None = None
    idempotent: bool = False
    unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON

    def __post_init__(self) -> None:
        check_key(self.key)
        for name, function in (("fn", self.fn), ("reconcile", self.reconcile)):
            if not callable(function) and (name == "fn" or function is not None):
                raise InvalidInput(f"{name} must be a function, not {type(function).__name__}")
        if not isinstance(self.unknown_on, tuple) or not all(
            isinstance(each, type) and issubclass(each, BaseException) for each in self.unknown_on
        ):
            raise InvalidInput(
                "unknown_on must be a tuple of classes of errors", hint="Write unknown_on=(TimeoutError,)"
            )
        if not isinstance(self.idempotent, bool):
            raise InvalidInput(f"idempotent must be True or False, not {type(self.idempotent).__name__}")


def key_of(cursor: Cursor, key: str) -> str:
    """Return the idempotency key of an effect: the same in every attempt, process and restart, and nowhere else."""
    return idempotency_key(cursor.lane, check_key(key))


# The course of a call ---------------------------------------------------------------------------------------------


class Run(Protocol):
    """Runs an operation on a handle, here and now or, for an event loop, in a worker; ``undo`` if its caller leaves."""

    def __call__(self, operation: Callable[[Backend], Any], undo: Callable[[Backend], object] | None, /) -> Any:
        """Return the answer, or what to await for it."""


def perform(handle: Handle, call: EffectCall) -> Any:
    """Do an effect once and return its result, this time's or the first one's."""
    if inspect.iscoroutinefunction(call.fn) or inspect.iscoroutinefunction(call.reconcile):
        raise _asynchronous(call.key)
    return run_steps(_course(handle, _at_once(handle), call), lambda: _asynchronous(call.key))


async def aperform(handle: Handle, call: EffectCall) -> Any:
    """Do an effect once and return its result; its functions may be plain or coroutine functions."""
    run = _at_once(handle) if handle.blocking else handle.arun_undoable
    return await arun_steps(_course(handle, run, call))


def _at_once(handle: Handle) -> Run:
    return lambda operation, undo: handle.run(operation)


@dataclass(slots=True)
class _Attempts:
    """What all attempts of one call share."""

    handle: Handle
    run: Run
    call: EffectCall
    owner: str
    request: bytes

    def begin(self, over: EffectRow | None = None) -> Steps[EffectRow]:
        """Store the next intent unless somebody was faster, and take it back if nobody waits for it.

        Return what the ledger has then.
        """
        cursor = self.handle.cursor
        row = intent_of(cursor.lane, self.call.key, self.owner, self.request, self._now_us(), over)
        begun: EffectRow = yield lambda: self.run(lambda store: _begin(store, cursor, row), self._take_back)
        return begun

    def end(self, row: EffectRow, status: str, payload: bytes) -> Steps[EffectRow]:
        """Store the receipt, also if nobody waits for it any more; return what the ledger has then."""
        receipt = ended(row, status, payload, self._now_us()).sealed()
        stored: EffectRow = yield lambda: self.run(
            lambda store: row_of(store.put_record(receipt)), lambda store: _without_error(store, receipt)
        )
        return stored

    def _take_back(self, store: Backend) -> None:
        """Record that this call's intent was never run, if it was stored: whoever comes next may begin at once."""
        with contextlib.suppress(BackstayError):
            row = find(store, self.handle.cursor.lane, self.call.key)
            if row is not None and self.may_run(row):
                store.put_record(ended(row, FAILED, ERROR + CANCELLED, self._now_us()).sealed())

    def _now_us(self) -> int:
        return to_microseconds(self.handle.context.now())

    def settle(self, row: EffectRow, outcome: Outcome) -> Steps[EffectRow]:
        """Store what the hook found out; return what the ledger has then."""
        context = self.handle.context
        settled: EffectRow = yield lambda: self.run(
            lambda store: settle_row(store, context, row, outcome, RECONCILED), None
        )
        return settled

    def may_run(self, row: EffectRow) -> bool:
        """Tell whether the intent in the ledger is this call's."""
        return row.owner == self.owner and row.status == INTENDED


def _course(handle: Handle, run: Run, call: EffectCall) -> Steps[Any]:
    """Do what an effect's place in the ledger asks for, until it is known to be done."""
    attempts = _Attempts(handle, run, call, f"{short_name()} {handle.context.new_id()}", request_of(call))
    row = yield from attempts.begin()
    while True:
        record = shown_of(row)
        if record.status is EffectStatus.DONE:
            _check_request(record, row, attempts.request)
            return _result_of(record)
        if attempts.may_run(row):
            return (yield from _attempt(attempts, row))
        if record.status is EffectStatus.FAILED:
            row = yield from attempts.begin(row)
        else:
            row = yield from _over_unknown(attempts, row, record)


def _over_unknown(attempts: _Attempts, row: EffectRow, record: EffectRecord) -> Steps[EffectRow]:
    """Go on from an intent that somebody else left without a receipt."""
    call = attempts.call
    if call.idempotent:
        _check_request(record, row, attempts.request)
        return (yield from attempts.begin(row))
    reconcile = call.reconcile
    if reconcile is None:
        raise _unknown(record)
    outcome = check_outcome((yield lambda: reconcile(record)))
    if outcome.status is EffectStatus.INTENDED:
        raise _unknown(record)
    if outcome.status is EffectStatus.FAILED:
        # Not settled first and begun then: who has lost the lease meanwhile must do neither.
        return (yield from attempts.begin(row))
    return (yield from attempts.settle(row, outcome))


def _attempt(attempts: _Attempts, row: EffectRow) -> Steps[Any]:
    """Do it, and store the receipt."""
    call = attempts.call
    lane, key = row.stored.lane, row.stored.key
    kwargs = _with_key(call, idempotency_key(lane, key))
    try:
        result = yield lambda: call.fn(*call.args, **kwargs)
    except call.unknown_on:
        raise
    except Exception as error:
        yield from attempts.end(row, FAILED, ERROR + _type_name(error))
        raise
    try:
        payload, refused = RESULT + encode(result, "result"), None
    except EncodeError as error:
        payload, refused = NO_RESULT + error.what.encode(), error
    try:
        stored = yield from attempts.end(row, DONE, payload)
    except NotFound as error:
        raise NotFound(f"{error.what}: it was done, but is no longer in the ledger", thread=lane.thread) from error
    if (stored.owner, stored.settled_by, stored.payload) != (row.owner, None, payload):
        return _result_that_counts(shown_of(stored))
    if refused is not None:
        raise _without_result(key, lane.thread, refused.what) from refused
    return result


def _result_that_counts(record: EffectRecord) -> Any:
    """Return what the ledger has of an effect that somebody else ended, or began again, while it was being done."""
    if record.status is EffectStatus.DONE:
        return _result_of(record)  # everyone who asks again will be given that, so this call is too
    raise Conflict(
        f"somebody took the effect for lost while it was being done, and it was done; now: {record}",
        winner=record,
        thread=record.thread_id,
        hint="It may be done twice. Hold the lease while effects run, and settle only what nobody is doing",
    )


def _result_of(record: EffectRecord) -> Any:
    if record.error is not None:
        raise _without_result(record.key, record.thread_id, record.error)
    return record.result


# An intent, and a receipt that nobody waits for -------------------------------------------------------------------


def _begin(store: Backend, cursor: Cursor, row: EffectRow) -> EffectRow:
    """Store an intent as a checkpoint would be: under the handle's lease, or where nobody has one."""
    hold, seen = cursor.hold, cursor.seen
    epoch, token = None if seen is None else seen.epoch, None
    if hold is not None:
        if (refusal := hold.refusal()) is not None:
            raise refusal
        epoch, token = hold.epoch, hold.claim.token
    try:
        return row_of(store.put_record(row.sealed(), fence=Fence(epoch, token)))
    except Fenced as error:
        if hold is not None:
            hold.fenced(error)
        raise


def _without_error(store: Backend, receipt: Record) -> None:
    # If it fails, the outcome stays what it was: unknown. Whoever asks for it next learns that.
    with contextlib.suppress(BackstayError):
        store.put_record(receipt)


# Arguments --------------------------------------------------------------------------------------------------------


def request_of(call: EffectCall) -> bytes:
    """Return what tells the arguments from any others; nothing if they cannot be encoded."""
    try:
        named = {name: call.kwargs[name] for name in sorted(call.kwargs)}
        return digest_of(encode(list(call.args), "args"), encode(named, "kwargs"))
    except EncodeError:
        return b""


def _check_request(record: EffectRecord, row: EffectRow, request: bytes) -> None:
    if request and row.request and request != row.request:
        raise EffectChanged(
            f"effect {record.key!r} was begun before with other arguments",
            record=record,
            thread=record.thread_id,
            hint="Give another effect another key; the same one takes the same arguments after a restart",
        )


def _with_key(call: EffectCall, key: str) -> dict[str, Any]:
    """Return the keyword arguments, with the idempotency key if the function wants it and was not given one."""
    kwargs = dict(call.kwargs)
    try:
        signature = inspect.signature(call.fn)
        given = signature.bind_partial(*call.args, **kwargs).arguments
    except (TypeError, ValueError):  # a function that does not tell, or one that will refuse these arguments
        return kwargs
    wanted = signature.parameters.get(IDEMPOTENCY_KEY)
    if wanted is None or wanted.kind not in (wanted.POSITIONAL_OR_KEYWORD, wanted.KEYWORD_ONLY):
        return kwargs
    bound = call.fn.keywords if isinstance(call.fn, functools.partial) else {}
    if IDEMPOTENCY_KEY not in given and IDEMPOTENCY_KEY not in bound:
        kwargs[IDEMPOTENCY_KEY] = key
    return kwargs


def _type_name(error: Exception) -> bytes:
    return type(error).__name__.encode(errors="backslashreplace")  # and nothing else: its text may hold secrets


# Errors -----------------------------------------------------------------------------------------------------------


def _asynchronous(key: str) -> InvalidInput:
    return InvalidInput(
        f"a function of effect {key!r} has to be awaited", hint="Use a store opened with backstay.aopen, or a plain one"
    )


def _unknown(record: EffectRecord) -> EffectUnknown:
    return EffectUnknown(
        f"effect {record.key!r} was begun by {record.owner!r} and has no receipt",
        record=record,
        thread=record.thread_id,
        hint="It may have been done, or is being done. Find out, then thread.settle(error.record, Outcome.done(result) "
        "or Outcome.not_done(), by=…) and call it again; or pass reconcile=, a function that finds out",
    )


def _without_result(key: str, thread: str, why: str) -> EncodeError:
    return EncodeError(
        f"effect {key!r} was done, but its result cannot be kept: {why}",
        thread=thread,
        hint="It is recorded as done and is not done again. Let its function return plain values",
    )
