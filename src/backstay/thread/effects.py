"""Run effects once, and durable calls until one succeeds.

An effect stores its intent before the call and its receipt after it. An effect that is done is not done again: its
result is replayed. An intent without a receipt means that the outcome is unknown. Such an effect is never blindly
retried: a hook or a person must find out, unless the caller says that doing it twice with the same idempotency key does
no harm. A durable call stores only its result, so a call that a crash cut short is made again.

Each is one generator of steps, ``execution``: operations on the store and functions of the caller. One of the two
drivers in ``operations.drivers`` runs it. No lock is held between steps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import random
import time
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
from backstay.model.retry import ONCE, RetryPolicy
from backstay.model.runs import EffectRecord, EffectStatus, Outcome
from backstay.operations.cursor import Cursor, Handle
from backstay.operations.drivers import Steps, arun_steps, async_sleep, run_steps
from backstay.operations.leases import short_name
from backstay.operations.ledger import (
    DONE,
    ERROR,
    FAILED,
    INTENDED,
    NO_RESULT,
    RESULT,
    EffectRow,
    call_of,
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
from backstay.operations.workers import call_in_thread, wait_in_thread
from backstay.pieces.body import to_body
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

_chance = random.Random()

Reconcile = Callable[[EffectRecord], Outcome | Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class EffectCall:
    """An effect or a durable call: its key, the function with its arguments, and the caller's options."""

    key: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reconcile: Reconcile | None = None
    idempotent: bool = False
    unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON
    retry: RetryPolicy = ONCE
    timeout: float | None = None  # seconds, for each attempt
    is_call: bool = False
    request: bytes | None = None  # digest of the arguments, if the caller knows it

    def __post_init__(self) -> None:
        check_key(self.key)
        if not isinstance(self.retry, RetryPolicy):
            raise InvalidInput(
                f"retry must be a RetryPolicy, not {type(self.retry).__name__}",
                hint="Write retry=RetryPolicy(retries=3)",
            )
        seconds = self.timeout
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf")
        ):
            raise InvalidInput(f"timeout must be a number of seconds above 0, not {seconds!r:.40}")
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

    def wait_after(self, attempt: int, error: Exception) -> float | None:
        """Return how long to wait before the next attempt; None if there is none: never after an unknown outcome."""
        is_unknown = not (self.is_call or self.idempotent) and isinstance(error, self.unknown_on)
        return None if is_unknown or not self.retry.wants(attempt, error) else self.retry.wait_s(attempt, _chance)


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
    check_plain(call)
    return run_steps(execution(handle, run_directly(handle), call), lambda: asynchronous(call))


async def arun_effect(handle: Handle, call: EffectCall) -> Any:
    """Run an effect once and return its result; its functions may be plain or coroutine functions."""
    return await arun_steps(execution(handle, arun_operation(handle), call, awaits=True))


def run_directly(handle: Handle) -> RunOperation:
    """Return a function that runs operations in the caller's thread."""
    return lambda operation, undo: handle.run(operation)


def arun_operation(handle: Handle) -> RunOperation:
    """Return a function that runs operations for a coroutine."""
    return run_directly(handle) if handle.blocking else handle.arun_undoable


def check_plain(call: EffectCall) -> None:
    """Raise InvalidInput if a plain caller gave a coroutine function."""
    if inspect.iscoroutinefunction(inspect.unwrap(call.fn)) or inspect.iscoroutinefunction(call.reconcile):
        raise asynchronous(call)


@dataclass(slots=True)
class _EffectRun:
    """One call of an effect, with all its attempts."""

    handle: Handle
    run: RunOperation
    call: EffectCall
    awaits: bool
    owner: str
    request: bytes
    tries: int = 0  # of this caller
    has_failed: bool = False  # the function raised in its last attempt, and this is stored

    def start(self, over: EffectRow | None = None) -> Steps[EffectRow]:
        """Store the next intent, unless another process was faster; take it back if the caller was cancelled.

        Return the effect as stored.
        """
        cursor = self.handle.cursor
        row = intent_of(cursor.branch, self.call.key, self.owner, self.request, self._now_us(), over)
        stored: EffectRow = yield lambda: self.run(lambda store: _store_fenced(store, cursor, row), self._take_back)
        return stored

    def start_again(self) -> Steps[EffectRow]:
        """Store the next intent after an attempt of this caller that failed."""
        branch, key = self.handle.cursor.branch, self.call.key
        row: EffectRow | None = yield lambda: self.run(lambda store: find(store, branch, key), None)
        return (yield from self.start(row if row is not None and (row.status == FAILED or self.may_run(row)) else None))

    def wait_after(self, error: Exception) -> float | None:
        """Return how long to wait before the next attempt; None if there is none.

        If the function did not raise, but its receipt could not be stored, only an idempotent effect is tried again.
        """
        self.tries += 1
        return self.call.wait_after(self.tries, error) if self.has_failed or self.call.idempotent else None

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


def execution(handle: Handle, run: RunOperation, call: EffectCall, awaits: bool = False) -> Steps[Any]:
    """Return the stored result of a call or an effect, or run it; ``awaits``: the caller is a coroutine."""
    request = arguments_digest(call.args, call.kwargs) if call.request is None else call.request
    attempts = _EffectRun(handle, run, call, awaits, f"{short_name()} {handle.services.new_id()}", request)
    return (yield from (_call_execution if call.is_call else _effect_execution)(attempts))


def unrecorded(call: EffectCall, awaits: bool = False) -> Steps[Any]:
    """Run a call or an effect without a store, with its timeout and its retries."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return (yield lambda: _invoke(call, call.kwargs, awaits))
        except Exception as error:
            wait_s = call.wait_after(attempt, error)
            if wait_s is None:
                raise
        yield functools.partial(_wait, wait_s, awaits)


def _call_execution(attempts: _EffectRun) -> Steps[Any]:
    """Return the stored result of a durable call; otherwise call the function and store its result."""
    call, handle, cursor = attempts.call, attempts.handle, attempts.handle.cursor
    branch = cursor.branch
    row: EffectRow | None = yield lambda: attempts.run(lambda store: find(store, branch, call.key), None)
    if row is not None and row.is_call:
        _check_arguments(shown_of(row), row, attempts.request)
        return _result_of(shown_of(row))
    if row is not None:
        raise InvalidInput(
            f"{call.key!r} is the key of an effect, so a durable call cannot use it",
            thread=branch.thread,
            hint="Give the call another name, or make it an effect as before",
        )
    started_us = to_microseconds(handle.services.now())
    result = yield from unrecorded(call, attempts.awaits)
    try:
        data = encode(result, "result")
    except EncodeError as error:
        raise EncodeError(
            f"the result of call {call.key!r} cannot be stored: {error.what}",
            thread=branch.thread,
            hint="Return plain values from its function, or register the class with @backstay.register",
        ) from error
    ended_us = to_microseconds(handle.services.now())
    done = call_of(branch, call.key, attempts.owner, attempts.request, data, started_us, ended_us)
    stored: EffectRow = yield lambda: attempts.run(lambda store: _store_fenced(store, cursor, done), None)
    # If another process was faster, its result counts.
    return result if stored.payload == done.payload else _result_of(shown_of(stored))


def _effect_execution(attempts: _EffectRun) -> Steps[Any]:
    """Do what the state of the effect requires, until it is done."""
    row = yield from attempts.start()
    while True:
        record = shown_of(row)
        if row.is_call:
            raise InvalidInput(
                f"{record.key!r} is the key of a durable call, so an effect cannot use it",
                thread=record.thread_id,
                hint="Give the effect another name, or make it a call as before",
            )
        if record.status is EffectStatus.DONE:
            _check_arguments(record, row, attempts.request)
            return _result_of(record)
        if attempts.may_run(row):
            try:
                return (yield from _attempt(attempts, row))
            except Exception as error:
                wait_s = attempts.wait_after(error)
                if wait_s is None:
                    raise
            yield functools.partial(_wait, wait_s, attempts.awaits)
            row = yield from attempts.start_again()
        elif record.status is EffectStatus.FAILED:
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
    attempts.has_failed = False
    try:
        result = yield lambda: _invoke(call, kwargs, attempts.awaits)
    except call.unknown_on:
        raise
    except Exception as error:
        # Only the type of the error is stored: its text may contain secrets.
        yield from attempts.end(row, FAILED, ERROR + type(error).__name__.encode(errors="backslashreplace"))
        attempts.has_failed = True
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


def _invoke(call: EffectCall, kwargs: Mapping[str, Any], awaits: bool) -> Any:
    """Call the function, or return an awaitable for its result. After its timeout, its result is not used."""
    function = functools.partial(call.fn, *call.args, **kwargs)
    if call.timeout is None:
        return function()
    if not awaits:
        return wait_in_thread(function, call.timeout)
    return _within(function, call.timeout, inspect.iscoroutinefunction(inspect.unwrap(call.fn)))


async def _within(function: Callable[[], Any], timeout_s: float, is_async: bool) -> Any:
    import asyncio

    async with asyncio.timeout(timeout_s):
        answer = function() if is_async else await call_in_thread(function, ())
        return await answer if inspect.isawaitable(answer) else answer


def _wait(seconds: float, awaits: bool) -> Any:
    return async_sleep(seconds) if awaits else time.sleep(seconds)


def _result_of(record: EffectRecord) -> Any:
    if record.error is not None:
        raise _without_result(record.key, record.thread_id, record.error)
    return record.result


def _store_fenced(store: Backend, cursor: Cursor, row: EffectRow) -> EffectRow:
    """Store an intent or a call as a checkpoint is stored: with the handle's lease, or if no worker holds one."""
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


def arguments_digest(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Callable[[list[Any]], bytes | None] = lambda items: None
) -> bytes:
    """Return a digest of the arguments; empty if they cannot be encoded.

    A list counts as the digest of its items, one after the other, so that the digest of a list that only grew can be
    extended. ``known`` returns that digest for lists whose first items were digested before.
    """
    try:
        named = [part for name in sorted(kwargs) for part in (encode(name), _part(kwargs[name], name, known))]
        listed = [_part(value, f"args[{index}]", known) for index, value in enumerate(args)]
        return digest_of(digest_of(*listed), *named)
    except EncodeError:
        return b""


def _part(value: Any, path: str, known: Callable[[list[Any]], bytes | None]) -> bytes:
    if type(value) is not list:
        return b"v" + encode(value, path)
    return b"l%d " % len(value) + (known(value) or hashlib.sha256(to_body(value, path).data).digest())


def _check_arguments(record: EffectRecord, row: EffectRow, request: bytes) -> None:
    if request and row.request and request != row.request:
        what = "call" if record.is_call else "effect"
        raise EffectChanged(
            f"{what} {record.key!r} was started before with other arguments",
            record=record,
            thread=record.thread_id,
            hint=f"Use another key for another {what}; the same {what} needs the same arguments after a restart",
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
    innermost = inspect.unwrap(call.fn)
    bound = innermost.keywords if isinstance(innermost, functools.partial) else {}
    if IDEMPOTENCY_KEY not in given and IDEMPOTENCY_KEY not in bound:
        kwargs[IDEMPOTENCY_KEY] = key
    return kwargs


# Errors -----------------------------------------------------------------------------------------------------------


def asynchronous(call: EffectCall) -> InvalidInput:
    """Return the error for plain code that was given a coroutine function."""
    return InvalidInput(
        f"a function of {'call' if call.is_call else 'effect'} {call.key!r} must be awaited",
        hint="Open the store with backstay.aopen, or use a plain function",
    )


def _unknown(record: EffectRecord) -> EffectUnknown:
    return EffectUnknown(
        f"effect {record.key!r} was started by {record.owner!r} and has no receipt: it may have been done, or may "
        "still be running",
        record=record,
        thread=record.thread_id,
        hint='Find out. If it was done, call thread.settle(error.record, Outcome.done(result), by="your name"). If it '
        'was not, call thread.settle(error.record, Outcome.not_done(), by="your name"). To let the program find out, '
        "pass reconcile=look, a function that takes the record and returns one of these. Then run it again",
    )


def _without_result(key: str, thread: str, why: str) -> EncodeError:
    return EncodeError(
        f"effect {key!r} was done, but its result cannot be stored: {why}",
        thread=thread,
        hint="It is recorded as done and will not be done again. Return plain values from its function",
    )
