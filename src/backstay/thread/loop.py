"""A loop as durable as a graph: saved after every turn, resumed where it stopped, run by one process at a time.

    with thread.loop({"messages": [user]}, strict=True) as loop:  # takes the lease; continues where it stopped
        for turn in loop:                                          # one checkpoint per turn, when its body ends
            reply = turn.call("model", ask_model, turn.state["messages"])
            turn.append(messages=[reply])
            if reply["done"]:
                loop.finish()

A turn is stored as one change when the loop asks for the next turn, or after the last one. If its body is left in any
other way, nothing is stored and the turn runs again: the results of finished effects are replayed, and decided
questions are not asked again. ``LoopBase`` is the common part of both kinds of loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backstay.errors import InvalidInput, Rejected, StepsExceeded, counted
from backstay.model.checkpoint import Checkpoint, CheckpointFields
from backstay.model.decision import DecisionKind
from backstay.model.fields import Usage, check_fields
from backstay.model.frame import End
from backstay.model.ids import check_id
from backstay.model.runs import RunStatus
from backstay.operations import load
from backstay.operations import save as saving
from backstay.operations.arguments import check_metadata, check_state
from backstay.operations.cursor import Handle
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.question import Question, check_pause, close_ended, close_questions, settled
from backstay.operations.rows import to_microseconds
from backstay.operations.run_keeper import RunKeeper, check_same, end_for_good, settle_over, was_joined
from backstay.operations.run_records import (
    ABANDONED,
    LOOP,
    RunOutcome,
    RunRow,
    digest_of_input,
    head_of,
    is_begun,
    new_row,
    outcome_of_head,
)
from backstay.operations.runs import LoopRun, find_loop_run
from backstay.store.base import Backend
from backstay.thread.access import handle_of
from backstay.thread.calls import CallPlace, ListDigests, current_place, set_place
from backstay.thread.lease import AsyncHandleUse, HandleUse, LeaseBase, LeaseOptions
from backstay.thread.turn import AsyncTurn, Turn, TurnBase, TurnLeft

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import AsyncThread, Thread

PAUSE_CHECK_S = 0.2
"""How often a loop checks for requests to pause or to cancel, by default."""

LOOP_NAME = "loop"
"""The name of a loop in lists of runs, by default."""


class LoopStatus(StrEnum):
    """The status of a loop; after its block, how it ended."""

    RUNNING = "running"  # not finished, even if the block was left
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"  # waits for a decision, see ``loop.interrupts``
    DEFERRED = "deferred"  # a person deferred the decision; the next run asks again
    FAILED = "failed"  # an error left the block
    CANCELLED = "cancelled"  # a person stopped the run for good


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The arguments of ``Thread.loop``."""

    initial: Mapping[str, Any]
    input: Mapping[str, Any] | None
    limit: int | None
    metadata: Mapping[str, Any]
    pause_check_s: float
    strict: bool
    lease_options: LeaseOptions
    lease: LeaseBase | None  # the caller's
    name: str


def check_loop_options(
    initial: Mapping[str, Any],
    input: Mapping[str, Any] | None,
    limit: int | None,
    metadata: Mapping[str, Any] | None,
    pause_check_s: float,
    strict: bool,
    lease_options: LeaseOptions,
    lease: LeaseBase | None,
    name: str,
) -> LoopOptions:
    """Return the arguments of a loop, checked."""
    for given in (initial, *([] if input is None else [input])):
        check_state(given)
    metadata = check_fields({"metadata": {} if metadata is None else metadata})["metadata"]
    check_metadata(metadata)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidInput(f"limit must be a whole number of turns, 1 or more, or None, not {limit!r:.40}")
    if isinstance(pause_check_s, bool) or not isinstance(pause_check_s, int | float) or not pause_check_s >= 0:
        raise InvalidInput(f"pause_check_s must be a number of seconds, 0 or more, not {pause_check_s!r:.40}")
    if not isinstance(strict, bool):
        raise InvalidInput(f"strict must be True or False, not {type(strict).__name__}")
    check_id(name, "name")
    return LoopOptions(initial, input, limit, metadata, float(pause_check_s), strict, lease_options, lease, name)


class LoopBase:
    """One run of a loop. An object can be used only once."""

    def __init__(self, handle: Handle, options: LoopOptions) -> None:
        self.status = LoopStatus.RUNNING
        self.interrupts: list[InterruptRecord] = []
        self._handle = handle
        self._services = handle.services
        self._cursor = handle.cursor
        self._options = options
        self._entered = False
        self._looked: float | None = None  # when it last checked for requests to pause
        self._turn: TurnBase | None = None
        self._finishing = False
        self._run = LoopRun(0)
        self._checkpoint = ""  # the id of the newest one
        self._state: dict[str, Any] = {}
        self._marks: Mapping[str, Any] | None = None  # of the state, see Changes
        self._usage = Usage()
        self._digests = ListDigests()
        self._place: CallPlace | None = None  # the place of decorated functions around this loop
        self._waits: set[str] = set()  # ids of open questions of this run
        self._is_joined = False  # another process finished the run while this one waited for it
        self._keeper = RunKeeper(self._cursor.branch, self._now_us, self._plan)

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state as last saved, read-only."""
        return MappingProxyType(self._state)

    @property
    def iteration(self) -> int:
        """Return how many turns have been saved since the last input."""
        return self._run.iteration

    @property
    def usage(self) -> Usage:
        """Return the usage of the thread so far, including the current turn."""
        return self._usage if self._turn is None else self._usage + self._turn._used

    def finish(self, /, **values: Any) -> None:
        """Make the current turn the last one, and set these keys of the state with it."""
        if self._turn is None:
            raise InvalidInput("only a turn can finish a loop", hint="Call loop.finish() in the body of the loop")
        self._turn.set(**values)
        self._finishing = True

    # Operations -----------------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return to_microseconds(self._services.now())

    def _plan(self, store: Backend, newest: RunRow | None, waited_for: RunRow | None) -> RunRow | None:
        """Return the run to execute: the unfinished one, or a new one; None if there is nothing left to do."""
        branch, options = self._cursor.branch, self._options
        head = head_of(store, branch)
        digest = digest_of_input(options.input)
        newest = None if newest is None else settle_over(store, newest, head, self._now_us())
        if newest is not None and not newest.is_over:
            name = newest.name if newest.kind == LOOP else options.name
            check_same(store, newest, LOOP, name, digest or None, head=head)
            return newest
        self._is_joined = was_joined(store, waited_for, digest)
        is_done = options.input is None or self._is_joined
        if head is not None and is_done and find_loop_run(store, branch, head).finished:
            return None
        return new_row(branch, self._services.new_id(), LOOP, options.name, self._now_us(), input_digest=digest)

    def _start(self, store: Backend) -> None:
        """Find the position of the thread; save the initial state or the input before the first turn."""
        options = self._options
        head = load.latest(store, self._cursor)
        if head is None:
            first = dict(options.initial)
            for key, value in (options.input or {}).items():
                first[key] = [*first[key], *value] if _extends(first, key, value) else value
            fields: CheckpointFields = {
                "step": 0,
                "trigger": "input",
                "run_id": self._run_id,
                "metadata": self._metadata(LoopRun(0)),
            }
            saving.save_state(store, self._services, self._cursor, first, False, saving.SaveRequest(fields))
            head = load.latest(store, self._cursor)
            found = LoopRun(0)
        else:
            found = find_loop_run(store, self._cursor.branch, head)
            row = None if self._keeper.is_new else self._keeper.row
            is_taken = row is not None and is_begun(store, row, head)  # by an earlier process
            if options.input is not None and not is_taken and not self._is_joined:
                found = self._take_input(store, head, found, options.input)
                head = load.latest(store, self._cursor)
            self._waits = close_ended(store, self._services, self._cursor)
        assert head is not None  # it was saved under the lease
        self._run, self._checkpoint, self._usage, self._state = found, head.id, head.usage, head.state
        if found.finished:
            self.status = LoopStatus.COMPLETED
            self._keeper.outcome = outcome_of_head(head)
        else:
            self._keeper.outcome = ABANDONED

    @property
    def _run_id(self) -> str | None:
        return None if self._keeper.row is None else self._keeper.id

    def _take_input(self, store: Backend, head: Checkpoint, found: LoopRun, given: Mapping[str, Any]) -> LoopRun:
        """Start a new run on a finished state."""
        if found.was_loop and not found.finished:
            raise InvalidInput(
                f"the loop has not finished its last input: {counted(found.iteration, 'turn')} saved so far",
                thread=head.thread_id,
                checkpoint=head.id,
                hint="Run the loop without input= to finish it, then pass the new input",
            )
        extend = {key: value for key, value in given.items() if _extends(head.state, key, value)}
        put = {key: value for key, value in given.items() if key not in extend}
        run = LoopRun(head.step + 1)
        fields: CheckpointFields = {
            **_used(head.usage),
            "step": run.number,
            "trigger": "input",
            "run_id": self._run_id,
            "metadata": self._metadata(run),
        }
        saving.save_append(store, self._services, self._cursor, extend, put, (), saving.SaveRequest(fields))
        return run

    def _advance(self, store: Backend) -> bool:
        """Store the turn that ended, if there is one; return whether another one runs."""
        if self._turn is not None:
            self._save_turn(store, self._turn)
        if self.status is LoopStatus.RUNNING:
            self._check_pause(store)
        if self.status is not LoopStatus.RUNNING:
            return False
        limit = self._options.limit
        if limit is not None and self._run.iteration >= limit:
            raise StepsExceeded(
                f"the loop took {limit} turns without finishing",
                limit=limit,
                thread=self._cursor.branch.thread,
                checkpoint=self._checkpoint,
                hint="All of them are saved: run the loop with a higher limit to continue",
            )
        return True

    def _save_turn(self, store: Backend, turn: TurnBase) -> None:
        """Store a turn's changes as one checkpoint."""
        self._turn, turn._over = None, True
        if turn._left:  # its body caught TurnLeft and ended normally
            return
        turn._changes.check_untouched()
        received = dict(Counter(turn._run.received) + turn._received)
        done = replace(turn._run, iteration=turn.iteration, finished=self._finishing, received=received)
        usage = self._usage + turn._used
        fields: CheckpointFields = {
            **_used(usage),
            "trigger": "iteration",
            "run_id": self._run_id,
            "iteration": done.iteration,
            "metadata": self._metadata(done),
            "continuation": End() if done.finished else None,
        }
        changes, request = turn._changes, saving.SaveRequest(fields)
        saved = saving.save_append(
            store, self._services, self._cursor, changes.extend, changes.put, changes.delete, request
        )
        self._digests.forget({*changes.put, *changes.delete})
        self._run, self._checkpoint, self._usage, self._state = done, saved.id, usage, changes.view
        self._marks = changes.marks
        if self._waits:  # the turn did not ask them again: its body has changed, or an effect was settled otherwise
            if done.finished:
                close_ended(store, self._services, self._cursor)
            else:
                close_questions(store, self._services, self._cursor, self._waits)
            self._waits = set()
        if done.finished:
            self.status = LoopStatus.COMPLETED

    def _check_pause(self, store: Backend) -> None:
        """Stop if there is a request to pause."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < self._options.pause_check_s:
            return
        self._looked = now
        if self._keeper.stop_request(store) is not None:
            end_for_good(store, self._services, self._cursor, self._run_id)
            self.status = LoopStatus.CANCELLED
            return
        found = check_pause(store, self._services, self._cursor)
        if found is None:
            return
        if found.decision is not None and found.decision.kind is DecisionKind.REJECT:
            raise Rejected(
                f"{found.decided_by!r} stopped this run for good",
                reason=found.decision.reason,
                by=found.decided_by,
                thread=found.thread_id,
                checkpoint=found.checkpoint_id,
                hint="To continue from here anyway, fork the branch",
            )
        self._stop_for(found)

    def _ask(self, store: Backend, question: Question) -> InterruptRecord:
        found = settled(store, self._services, self._cursor, self._checkpoint, question)
        if found.decision is None:
            self._waits.add(found.id)
        else:
            self._waits.discard(found.id)
        return found

    def _leave(self, store: Backend, error: BaseException | None) -> None:
        """End the loop; store the last turn if it finished the loop without an error."""
        try:
            self._end(store, error)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._keeper.outcome = self._outcome(error)

    def _outcome(self, error: BaseException | None) -> RunOutcome:
        """Return how this execution of the run ended."""
        match self.status:
            case LoopStatus.COMPLETED:
                return RunOutcome(RunStatus.COMPLETED)
            case LoopStatus.CANCELLED:
                row = self._keeper.row
                return RunOutcome(RunStatus.CANCELLED, reason="" if row is None else row.reason)
            case LoopStatus.INTERRUPTED | LoopStatus.DEFERRED:
                deadlines = [record.deadline for record in self.interrupts if record.deadline is not None]
                wake_us = min(map(to_microseconds, deadlines), default=None)
                return RunOutcome(RunStatus.INTERRUPTED, None, tuple(each.id for each in self.interrupts), wake_us)
            case _ if isinstance(error, Rejected):
                return RunOutcome(RunStatus.ABANDONED, error="Rejected")
            case _ if isinstance(error, Exception):
                return RunOutcome(RunStatus.FAILED, error=type(error).__name__)
            case _:  # Ctrl-C, the end of the program, a cancelled task, or a block that was left early
                return RunOutcome(RunStatus.ABANDONED, None if error is None else type(error).__name__)

    def _end(self, store: Backend, error: BaseException | None) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn._over = True
        if error is not None:
            if not self._is_left_by(error):
                self.status = LoopStatus.FAILED
            return
        if turn is None or self.status is not LoopStatus.RUNNING:
            return
        try:
            if self._finishing:
                self._save_turn(store, turn)
            elif turn._changes:
                raise InvalidInput(
                    f"turn {turn.iteration} was left early, so its changes are not stored",
                    thread=self._cursor.branch.thread,
                    hint="Call loop.finish() before break; catch errors inside the turn, or outside the with block",
                )
        except BaseException:
            self.status = LoopStatus.FAILED
            raise

    # State -------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._entered:
            raise InvalidInput("a loop can be entered only once", hint="Start another: thread.loop(…)")
        self._entered = True
        self._place = current_place()

    def _check_entered(self) -> None:
        if not self._entered:
            raise InvalidInput("the loop has not started", hint="Write: with thread.loop(…) as loop: …")

    def _metadata(self, now: LoopRun) -> dict[str, Any]:
        return {**self._options.metadata, **now.metadata()}

    def _restart_turn(self) -> None:
        """Start iterating: a turn that an earlier ``for`` left early runs again."""
        if self._turn is not None and not self._finishing:
            self._turn._over, self._turn = True, None

    def _stop_for(self, found: InterruptRecord) -> None:
        self.status = LoopStatus.INTERRUPTED if found.decision is None else LoopStatus.DEFERRED
        self.interrupts.append(found)

    def _is_left_by(self, error: BaseException) -> bool:
        """Return whether the error that left the block only means that a turn waits for a decision."""
        if isinstance(error, BaseExceptionGroup):
            return all(self._is_left_by(each) for each in error.exceptions)
        return isinstance(error, TurnLeft) and error.loop is self

    def __repr__(self) -> str:
        branch = self._cursor.branch
        return (
            f"<{type(self).__name__} of {branch.thread!r} branch {branch.name!r}, {self.status}, turn {self.iteration}>"
        )


def _extends(state: Mapping[str, Any], key: str, value: Any) -> bool:
    return isinstance(value, list) and isinstance(state.get(key), list)


def _used(usage: Usage) -> CheckpointFields:
    return {"tokens_used": usage.tokens_used, "cost_estimate": usage.cost_estimate}


class Loop(LoopBase):
    """A durable loop, while a ``with`` block runs.

    Attributes: ``thread``, ``status``, ``state`` (as last saved), ``iteration``, ``usage``, and ``interrupts``, the
    open questions.
    """

    def __init__(self, thread: Thread, options: LoopOptions) -> None:
        super().__init__(handle_of(thread), options)
        self.thread = thread
        self._use = HandleUse(thread, options.lease, options.lease_options, self._keeper)

    def __enter__(self) -> Loop:
        self._enter()
        self._use.__enter__()
        try:
            self._handle.run(self._start)
        except BaseException as failure:
            self.status = LoopStatus.FAILED
            self._use.__exit__(type(failure), failure, None)
            raise
        return self

    def __iter__(self) -> Loop:
        self._restart_turn()
        return self

    def __next__(self) -> Turn:
        self._check_entered()
        try:
            running = self._handle.run(self._advance)
        except BaseException:  # it is not known whether the last turn is stored
            self.status = LoopStatus.FAILED
            raise
        if not running:
            set_place(self._place)
            raise StopIteration
        self._turn = turn = Turn(self, self._cursor.branch, self._run, self._state)
        set_place(CallPlace(turn))
        return turn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        set_place(self._place)
        try:
            self._handle.run(self._leave, error)
        except BaseException as failure:
            self._use.__exit__(type(failure), failure, None)
            raise
        if error is not None and self._is_left_by(error):
            self._use.__exit__(None, None, None)
            return True
        self._use.__exit__(kind, error, where)
        return False


class AsyncLoop(LoopBase):
    """A durable loop, while an ``async with`` block runs. If its lease is lost, the block is cancelled.

    Attributes: ``thread``, ``status``, ``state`` (as last saved), ``iteration``, ``usage``, and ``interrupts``, the
    open questions.
    """

    def __init__(self, thread: AsyncThread, options: LoopOptions) -> None:
        super().__init__(handle_of(thread), options)
        self.thread = thread
        self._use = AsyncHandleUse(thread, options.lease, options.lease_options, self._keeper)

    async def __aenter__(self) -> AsyncLoop:
        self._enter()
        await self._use.__aenter__()
        try:
            await self._handle.finish(self._start)
        except BaseException as failure:
            self.status = LoopStatus.FAILED
            await self._use.__aexit__(type(failure), failure, None)
            raise
        return self

    def __aiter__(self) -> AsyncLoop:
        self._restart_turn()
        return self

    async def __anext__(self) -> AsyncTurn:
        self._check_entered()
        try:
            running = await self._handle.finish(self._advance)  # nothing may be saved after the lease is released
        except BaseException:
            self.status = LoopStatus.FAILED
            raise
        if not running:
            set_place(self._place)
            raise StopAsyncIteration
        self._turn = turn = AsyncTurn(self, self._cursor.branch, self._run, self._state)
        set_place(CallPlace(turn))
        return turn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        set_place(self._place)
        try:
            await self._handle.finish(self._leave, error)
        except BaseException as failure:
            await self._use.__aexit__(type(failure), failure, None)
            raise
        if error is not None and self._is_left_by(error):
            await self._use.__aexit__(None, None, None)
            return True
        await self._use.__aexit__(kind, error, where)
        return False
