"""Run effects once: the intent is stored before the call, the receipt after it.

An effect that is done is not done again: its result is replayed. An intent without a receipt means that the outcome is
unknown. Such an effect is never blindly retried: a hook or a person must find out, unless the caller says that doing it
twice with the same idempotency key does no harm.

A call is one generator of steps, ``_execution``: operations on the store and functions of the caller. ``run_effect``
and ``arun_effect`` pass it to one of the two drivers in ``operations.drivers``. No lock is held between steps.
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
from backstay.model.runs import EffectRecord, EffectStatus, Outcome
from backstay.operations.cursor import Cursor, Handle
from backstay.operations.drivers import Steps, arun_steps, run_steps
from backstay.operations.leases import short_name
from backstay.operations.ledger import (
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
from backstay.operations.rows import to_microseconds
from backstay.store.base import Backend
from backstay.store.records import Fence, digest_of

UNKNOWN_ON: tuple[type[BaseException], ...] = (
    TimeoutError,
    ConnectionResetError,
    ConnectionAbortedError,
    BrokenPipeError,
    OutcomeUnknown,
)
"""Errors after which the outcome is unknown. A refused connection is not one of them."""

IDEMPOTENCY_KEY = "idempotency_key"
"""A function with a parameter of this name gets the effect's idempotency key."""

RECONCILED = "reconcile"
"""The name under which a hook settles an effect."""

CANCELLED = b"CancelledError"
"""The error of an effect whose caller was cancelled before it ran."""

Reconcile = Callable[[EffectRecord], Outcome | Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class EffectCall:
    """The arguments of ``Thread.effect``."""

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


def idempotency_key_of(cursor: Cursor, key: str) -> str:
    """Return the idempotency key of an effect: the same in every attempt, process and restart."""
    return idempotency_key(cursor.branch, check_key(key))


# Execution ---------------------------------------------------------------------------------------------


class RunOperation(Protocol):
    """Runs an operation of a handle, directly or (for an event loop) in a worker; ``undo`` runs if its caller left."""

    def __call__(self, operation: Callable[[Backend], Any], undo: Callable[[Backend], object] | None, /) -> Any:
        """Return the result, or an awaitable for it."""


def run_effect(handle: Handle, call: EffectCall) -> Any:
    """Run an effect once and return its result, or the stored result if it is already done."""
    if inspect.iscoroutinefunction(call.fn) or inspect.iscoroutinefunction(call.reconcile):
        raise _asynchronous(call.key)
    return run_steps(_execution(handle, _run_directly(handle), call), lambda: _asynchronous(call.key))


async def arun_effect(handle: Handle, call: EffectCall) -> Any:
    """Run an effect once and return its result; its functions may be plain or coroutine functions."""
    run = _run_directly(handle) if handle.blocking else handle.arun_undoable
    return await arun_steps(_execution(handle, run, call))


def _run_directly(handle: Handle) -> RunOperation:
    return lambda operation, undo: handle.run(operation)


@dataclass(slots=True)
class _EffectRun:
    """One call of an effect, with all its attempts."""

    handle: Handle
    run: RunOperation
    call: EffectCall
    owner: str
    request: bytes

    def start(self, over: EffectRow | None = None) -> Steps[EffectRow]:
        """Store the next intent, unless another process was faster; take it back if the caller was cancelled.

        Return the effect as stored.
        """
        cursor = self.handle.cursor
        row = intent_of(cursor.branch, self.call.key, self.owner, self.request, self._now_us(), over)
        stored: EffectRow = yield lambda: self.run(lambda store: _store_intent(store, cursor, row), self._take_back)
        return stored

    def end(self, row: EffectRow, status: str, payload: bytes) -> Steps[EffectRow]:
        """Store the receipt, even if the caller was cancelled; return the effect as stored."""
        receipt = ended(row, status, payload, self._now_us()).sealed()

        def store_again(store: Backend) -> None:
            with contextlib.suppress(BackstayError):  # if this fails, the outcome stays unknown
                store.put_record(receipt)

        stored: EffectRow = yield lambda: self.run(lambda store: row_of(store.put_record(receipt)), store_again)
        return stored

    def _take_back(self, store: Backend) -> None:
        """Record that the effect never ran, if its intent was stored, so that the next caller can start at once."""
        with contextlib.suppress(BackstayError):
            row = find(store, self.handle.cursor.branch, self.call.key)
            if row is not None and self.may_run(row):
                store.put_record(ended(row, FAILED, ERROR + CANCELLED, self._now_us()).sealed())

    def _now_us(self) -> int:
        return to_microseconds(self.handle.services.now())

    def settle(self, row: EffectRow, outcome: Outcome) -> Steps[EffectRow]:
        """Store the outcome that the hook found; return the effect as stored."""
        services = self.handle.services
        settled: EffectRow = yield lambda: self.run(
            lambda store: settle_row(store, services, row, outcome, RECONCILED), None
        )
        return settled

    def may_run(self, row: EffectRow) -> bool:
        """Return whether the stored intent belongs to this call."""
        return row.owner == self.owner and row.status == INTENDED


def _execution(handle: Handle, run: RunOperation, call: EffectCall) -> Steps[Any]:
    """Do what the state of the effect requires, until it is done."""
    attempts = _EffectRun(handle, run, call, f"{short_name()} {handle.services.new_id()}", arguments_digest(call))
    row = yield from attempts.start()
    while True:
        record = shown_of(row)
        if record.status is EffectStatus.DONE:
            _check_arguments(record, row, attempts.request)
            return _result_of(record)
        if attempts.may_run(row):
            return (yield from _attempt(attempts, row))
        if record.status is EffectStatus.FAILED:
            row = yield from attempts.start(row)
        else:
            row = yield from _resolve_unknown(attempts, row, record)


def _resolve_unknown(attempts: _EffectRun, row: EffectRow, record: EffectRecord) -> Steps[EffectRow]:
    """Handle an intent that another call left without a receipt."""
    call = attempts.call
    if call.idempotent:
        _check_arguments(record, row, attempts.request)
        return (yield from attempts.start(row))
    reconcile = call.reconcile
    if reconcile is None:
        raise _unknown(record)
    outcome = check_outcome((yield lambda: reconcile(record)))
    if outcome.status is EffectStatus.INTENDED:
        raise _unknown(record)
    if outcome.status is EffectStatus.FAILED:
        # Settle it and start it again in one write: a caller that has lost the lease meanwhile must do neither.
        return (yield from attempts.start(row))
    return (yield from attempts.settle(row, outcome))


def _attempt(attempts: _EffectRun, row: EffectRow) -> Steps[Any]:
    """Call the function and store the receipt."""
    call = attempts.call
    branch, key = row.stored.branch, row.stored.key
    kwargs = _with_key(call, idempotency_key(branch, key))
    try:
        result = yield lambda: call.fn(*call.args, **kwargs)
    except call.unknown_on:
        raise
    except Exception as error:
        # Only the type of the error is stored: its text may contain secrets.
        yield from attempts.end(row, FAILED, ERROR + type(error).__name__.encode(errors="backslashreplace"))
        raise
    try:
        payload, refused = RESULT + encode(result, "result"), None
    except EncodeError as error:
        payload, refused = NO_RESULT + error.what.encode(), error
    try:
        stored = yield from attempts.end(row, DONE, payload)
    except NotFound as error:
        raise NotFound(
            f"effect {key!r} was done, but its record was deleted meanwhile: {error.what}", thread=branch.thread
        ) from error
    if (stored.owner, stored.settled_by, stored.payload) != (row.owner, None, payload):
        # Another caller or a person ended the effect, or started it again, while it was running.
        record = shown_of(stored)
        if record.status is EffectStatus.DONE:
            return _result_of(record)  # every later caller gets this result, so this one does too
        raise Conflict(
            f"the effect was done, but meanwhile it was settled as lost; it is now: {record}",
            winner=record,
            thread=record.thread_id,
            hint="It may be done twice. Hold the lease while effects run, and settle only those that have stopped",
        )
    if refused is not None:
        raise _without_result(key, branch.thread, refused.what) from refused
    return result


def _result_of(record: EffectRecord) -> Any:
    if record.error is not None:
        raise _without_result(record.key, record.thread_id, record.error)
    return record.result


def _store_intent(store: Backend, cursor: Cursor, row: EffectRow) -> EffectRow:
    """Store an intent under the same rules as a checkpoint: with the handle's lease, or if no worker holds one."""
    lease, base = cursor.lease, cursor.base
    epoch, token = None if base is None else base.epoch, None
    if lease is not None:
        if (refusal := lease.refusal()) is not None:
            raise refusal
        epoch, token = lease.epoch, lease.request.token
    try:
        return row_of(store.put_record(row.sealed(), fence=Fence(epoch, token)))
    except Fenced as error:
        if lease is not None:
            lease.fenced(error)
        raise


# Arguments --------------------------------------------------------------------------------------------------------


def arguments_digest(call: EffectCall) -> bytes:
    """Return a digest of the arguments; empty if they cannot be encoded."""
    try:
        named = {name: call.kwargs[name] for name in sorted(call.kwargs)}
        return digest_of(encode(list(call.args), "args"), encode(named, "kwargs"))
    except EncodeError:
        return b""


def _check_arguments(record: EffectRecord, row: EffectRow, request: bytes) -> None:
    if request and row.request and request != row.request:
        raise EffectChanged(
            f"effect {record.key!r} was started before with other arguments",
            record=record,
            thread=record.thread_id,
            hint="Use another key for another effect; the same effect needs the same arguments after a restart",
        )


def _with_key(call: EffectCall, key: str) -> dict[str, Any]:
    """Return the keyword arguments, with the idempotency key if the function wants it and was not given one."""
    kwargs = dict(call.kwargs)
    try:
        signature = inspect.signature(call.fn)
        given = signature.bind_partial(*call.args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or the function will refuse these arguments
        return kwargs
    wanted = signature.parameters.get(IDEMPOTENCY_KEY)
    if wanted is None or wanted.kind not in (wanted.POSITIONAL_OR_KEYWORD, wanted.KEYWORD_ONLY):
        return kwargs
    bound = call.fn.keywords if isinstance(call.fn, functools.partial) else {}
    if IDEMPOTENCY_KEY not in given and IDEMPOTENCY_KEY not in bound:
        kwargs[IDEMPOTENCY_KEY] = key
    return kwargs


# Errors -----------------------------------------------------------------------------------------------------------


def _asynchronous(key: str) -> InvalidInput:
    return InvalidInput(
        f"a function of effect {key!r} must be awaited",
        hint="Open the store with backstay.aopen, or use a plain function",
    )


def _unknown(record: EffectRecord) -> EffectUnknown:
    return EffectUnknown(
        f"effect {record.key!r} was started by {record.owner!r} and has no receipt",
        record=record,
        thread=record.thread_id,
        hint="It may have been done, or may still be running. Find out, call thread.settle(error.record, "
        "Outcome.done(result) or Outcome.not_done(), by=…), then call it again; or pass a reconcile= function",
    )


def _without_result(key: str, thread: str, why: str) -> EncodeError:
    return EncodeError(
        f"effect {key!r} was done, but its result cannot be stored: {why}",
        thread=thread,
        hint="It is recorded as done and will not be done again. Return plain values from its function",
    )
