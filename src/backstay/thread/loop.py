"""A plain loop that is as durable as a graph: saved after every turn, continued where it stopped, by one process.

    with thread.loop({"messages": [user]}, limit=50) as loop:  # takes the lease; goes on where the last process stopped
        for turn in loop:                                       # one checkpoint per turn, when its body is done
            reply = turn.effect("model", call_model, turn.state["messages"])
            turn.append(messages=[reply])
            if reply["done"]:
                loop.finish()

A turn is stored as one change when the loop asks for the next one, or when it was the last. If its body is left in any
other way, nothing of it is stored and it is run again: effects that were done are replayed, questions that were decided
are not asked again. What both kinds of loop have in common stands in ``LoopBase``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backstay.errors import InvalidInput, Rejected, StepsExceeded
from backstay.model.checkpoint import Checkpoint, Notes
from backstay.model.continuation import End
from backstay.model.decision import DecisionKind
from backstay.model.fields import check_fields
from backstay.model.usage import Usage
from backstay.store.base import Backend
from backstay.thread import load, pause
from backstay.thread import save as saving
from backstay.thread.access import Handle, handle_of
from backstay.thread.arguments import check_metadata
from backstay.thread.change import check_state
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.lease import AsyncLease, Lease, Terms
from backstay.thread.question import Question, settled
from backstay.thread.round import Round, find_round
from backstay.thread.turn import AsyncTurn, Turn, TurnBase, TurnLeft

if TYPE_CHECKING:
    from types import TracebackType

    from backstay.thread.thread import Thread
    from backstay.thread.thread_async import AsyncThread

PAUSE_CHECK_S = 0.2
"""How often a loop looks whether somebody wants it to pause, unless told otherwise."""


class LoopStatus(StrEnum):
    """How a loop stands, and after its block how it ended."""

    RUNNING = "running"  # the round is not finished; also of a block that was left before it
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"  # waits for a decision, see ``loop.interrupts``
    DEFERRED = "deferred"  # somebody decided that it is not to be done now; the next run asks again
    FAILED = "failed"  # an error left the block


@dataclass(frozen=True, slots=True)
class Plan:
    """What a caller asked for."""

    initial: Mapping[str, Any]
    input: Mapping[str, Any] | None
    limit: int | None
    metadata: Mapping[str, Any]
    pause_check_s: float
    terms: Terms


def check_plan(
    initial: Mapping[str, Any],
    input: Mapping[str, Any] | None,
    limit: int | None,
    metadata: Mapping[str, Any] | None,
    pause_check_s: float,
    terms: Terms,
) -> Plan:
    """Return the arguments of a loop, checked."""
    for given in (initial, *([] if input is None else [input])):
        check_state(given)
    metadata = check_fields({"metadata": {} if metadata is None else metadata})["metadata"]
    check_metadata(metadata)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidInput(f"limit must be a whole number of turns, 1 or more, or None, not {limit!r:.40}")
    if isinstance(pause_check_s, bool) or not isinstance(pause_check_s, int | float) or not pause_check_s >= 0:
        raise InvalidInput(f"pause_check_s must be a number of seconds, 0 or more, not {pause_check_s!r:.40}")
    return Plan(initial, input, limit, metadata, float(pause_check_s), terms)


class LoopBase:
    """One run of a loop. It is used once."""

    def __init__(self, handle: Handle, plan: Plan) -> None:
        self.status = LoopStatus.RUNNING
        self.interrupts: list[InterruptRecord] = []
        self._handle = handle
        self._context = handle.context
        self._cursor = handle.cursor
        self._plan = plan
        self._entered = False
        self._looked: float | None = None  # when it was last asked whether to pause
        self._turn: TurnBase | None = None
        self._finishing = False
        self._round = Round(0)
        self._checkpoint = ""  # the id of the newest one
        self._state: dict[str, Any] = {}
        self._usage = Usage()

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state as it was last saved, for reading."""
        return MappingProxyType(self._state)

    @property
    def iteration(self) -> int:
        """Return how many turns of this round are saved."""
        return self._round.iteration

    @property
    def usage(self) -> Usage:
        """Return what the thread has used so far, with what the current turn has said."""
        return self._usage if self._turn is None else self._usage + self._turn._used

    def finish(self, /, **values: Any) -> None:
        """Make the current turn the last one of this round, and set these keys of the state with it."""
        if self._turn is None:
            raise InvalidInput("a loop is finished by one of its turns", hint="Call loop.finish() in the body")
        self._turn.set(**values)
        self._finishing = True

    # Its operations -----------------------------------------------------------------------------------------------

    def _beginning(self, store: Backend) -> None:
        """Find out where the thread stands; save what is to be there before the first turn."""
        plan = self._plan
        head = load.latest(store, self._cursor)
        if head is None:
            first = dict(plan.initial)
            first.update({key: _grown(first, key, value) for key, value in (plan.input or {}).items()})
            notes: Notes = {"step": 0, "trigger": "input", "metadata": self._metadata(Round(0))}
            saving.save_state(store, self._context, self._cursor, first, False, saving.Request(notes))
            head = load.latest(store, self._cursor)
            found = Round(0)
        else:
            found = find_round(store, self._cursor, head)
            if plan.input is not None:
                found = self._taking_input(store, head, found, plan.input)
                head = load.latest(store, self._cursor)
        assert head is not None  # it was saved under the lease
        self._stand(head, found)

    def _taking_input(self, store: Backend, head: Checkpoint, found: Round, given: Mapping[str, Any]) -> Round:
        """Begin a new round on a finished state."""
        if found.is_loops and not found.finished:
            raise InvalidInput(
                f"the round is not finished: {found.iteration} turns are saved",
                thread=head.thread_id,
                checkpoint=head.id,
                hint="Run the loop without input= to go on with it; give the input afterwards",
            )
        extend = {key: value for key, value in given.items() if _extends(head.state, key, value)}
        put = {key: value for key, value in given.items() if key not in extend}
        begun = Round(head.step + 1)
        notes: Notes = {
            **_used(head.usage),
            "step": begun.number,
            "trigger": "input",
            "metadata": self._metadata(begun),
        }
        saving.save_append(store, self._context, self._cursor, extend, put, (), saving.Request(notes))
        return begun

    def _stand(self, head: Checkpoint, found: Round) -> None:
        self._round, self._checkpoint, self._usage = found, head.id, head.usage
        self._state = head.state
        if found.finished:
            self.status = LoopStatus.COMPLETED

    def _advancing(self, store: Backend) -> bool:
        """Store the turn that is done, if there is one; tell whether another one is to run."""
        if self._turn is not None:
            self._saving(store, self._turn)
        if self.status is LoopStatus.RUNNING:
            self._looking(store)
        if self.status is not LoopStatus.RUNNING:
            return False
        self._check_limit()
        return True

    def _saving(self, store: Backend, turn: TurnBase) -> None:
        """Store a turn's changes as one checkpoint."""
        self._turn, turn._over = None, True
        if turn._left:  # and yet its body came to its end
            return
        turn._changes.check_untouched()
        done = replace(turn._round, iteration=turn.iteration, finished=self._finishing)
        usage = self._usage + turn._used
        notes: Notes = {
            **_used(usage),
            "trigger": "iteration",
            "iteration": done.iteration,
            "metadata": self._metadata(done),
            "continuation": End() if done.finished else None,
        }
        changes, request = turn._changes, saving.Request(notes)
        saved = saving.save_append(
            store, self._context, self._cursor, changes.extend, changes.put, changes.delete, request
        )
        self._round, self._checkpoint, self._usage, self._state = done, saved.id, usage, changes.view
        if done.finished:
            self.status = LoopStatus.COMPLETED

    def _looking(self, store: Backend) -> None:
        """Stop if somebody wants the run to pause."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < self._plan.pause_check_s:
            return
        self._looked = now
        found = pause.obey(store, self._context, self._cursor)
        if found is None:
            return
        if found.decision is not None and found.decision.kind is DecisionKind.REJECT:
            raise Rejected(
                f"the run was stopped for good by {found.decided_by!r}",
                reason=found.decision.reason,
                by=found.decided_by,
                thread=found.thread_id,
                checkpoint=found.checkpoint_id,
                hint="Fork the branch to go on from here after all",
            )
        self._stop_for(found)

    def _settling(self, store: Backend, question: Question) -> InterruptRecord:
        return settled(store, self._context, self._cursor, self._checkpoint, question)

    def _leaving(self, store: Backend, error: BaseException | None) -> None:
        """End the loop: store the last turn if it finished the round and nothing went wrong."""
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
                self._saving(store, turn)
            elif turn._changes:
                raise InvalidInput(
                    f"turn {turn.iteration} was left before its end, so its changes are not stored",
                    thread=self._cursor.lane.thread,
                    hint="Call loop.finish() before break; catch errors inside the turn, or outside the with block",
                )
        except BaseException:
            self.status = LoopStatus.FAILED
            raise

    # Inside -------------------------------------------------------------------------------------------------------

    def _enter(self) -> bool:
        """Tell whether a lease must be taken: not if the handle holds one already."""
        if self._entered:
            raise InvalidInput("a loop is entered once", hint="Begin another: thread.loop(…)")
        self._entered = True
        return self._cursor.hold is None

    def _check_entered(self) -> None:
        if not self._entered:
            raise InvalidInput("the loop has not begun", hint="Write: with thread.loop(…) as loop: …")

    def _metadata(self, now: Round) -> dict[str, Any]:
        return {**self._plan.metadata, **now.metadata()}

    def _again(self) -> None:
        """Begin to iterate: a turn that an earlier ``for`` left in the middle is run again."""
        if self._turn is not None and not self._finishing:
            self._turn._over, self._turn = True, None

    def _stop_for(self, found: InterruptRecord) -> None:
        self.status = LoopStatus.INTERRUPTED if found.decision is None else LoopStatus.DEFERRED
        self.interrupts.append(found)

    def _is_left_by(self, error: BaseException) -> bool:
        """Tell whether what left the block says only that a turn of this loop waits for somebody."""
        if isinstance(error, BaseExceptionGroup):
            return all(self._is_left_by(each) for each in error.exceptions)
        return isinstance(error, TurnLeft) and error.loop is self

    def _check_limit(self) -> None:
        limit = self._plan.limit
        if limit is not None and self._round.iteration >= limit:
            raise StepsExceeded(
                f"the loop took {limit} turns and is not finished",
                limit=limit,
                thread=self._cursor.lane.thread,
                checkpoint=self._checkpoint,
                hint="All of them are saved: run it with a higher limit to go on",
            )

    def __repr__(self) -> str:
        lane = self._cursor.lane
        return (
            f"<{type(self).__name__} of {lane.thread!r} branch {lane.branch!r}, {self.status}, turn {self.iteration}>"
        )


def _extends(state: Mapping[str, Any], key: str, value: Any) -> bool:
    return isinstance(value, list) and isinstance(state.get(key), list)


def _grown(state: Mapping[str, Any], key: str, value: Any) -> Any:
    return [*state[key], *value] if _extends(state, key, value) else value


def _used(usage: Usage) -> Notes:
    return {"tokens_used": usage.tokens_used, "cost_estimate": usage.cost_estimate}


class Loop(LoopBase):
    """A durable loop, for as long as a ``with`` block runs.

    Attributes: ``thread``, ``status``, ``state`` (as last saved), ``iteration``, ``usage``, and ``interrupts``, the
    records of what it waits for.
    """

    def __init__(self, thread: Thread, plan: Plan) -> None:
        super().__init__(handle_of(thread), plan)
        self.thread = thread
        self._lease: Lease | None = None

    def __enter__(self) -> Loop:
        if self._enter():
            self._lease = Lease(self.thread, self._plan.terms)
            self._lease.__enter__()
        try:
            self._handle.run(self._beginning)
        except BaseException as failure:
            self.status = LoopStatus.FAILED
            self._give_back(failure)
            raise
        return self

    def __iter__(self) -> Loop:
        self._again()
        return self

    def __next__(self) -> Turn:
        self._check_entered()
        try:
            going_on = self._handle.run(self._advancing)
        except BaseException:  # wherever it came from: nobody knows any more whether the last turn is stored
            self.status = LoopStatus.FAILED
            raise
        if not going_on:
            raise StopIteration
        self._turn = turn = Turn(self, self._cursor.lane, self._round, self._state)
        return turn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        try:
            self._handle.run(self._leaving, error)
        except BaseException as failure:
            self._give_back(failure)
            raise
        left = error is not None and self._is_left_by(error)
        self._give_back(None if left else error)
        return left

    def _give_back(self, error: BaseException | None) -> None:
        if self._lease is not None:
            self._lease.__exit__(None if error is None else type(error), error, None)


class AsyncLoop(LoopBase):
    """A durable loop, for as long as an ``async with`` block runs. If its lease is lost, the block is cancelled.

    Attributes: ``thread``, ``status``, ``state`` (as last saved), ``iteration``, ``usage``, and ``interrupts``, the
    records of what it waits for.
    """

    def __init__(self, thread: AsyncThread, plan: Plan) -> None:
        super().__init__(handle_of(thread), plan)
        self.thread = thread
        self._lease: AsyncLease | None = None

    async def __aenter__(self) -> AsyncLoop:
        if self._enter():
            self._lease = await AsyncLease(self.thread, self._plan.terms).__aenter__()
        try:
            await self._handle.arun(self._beginning)
        except BaseException as failure:
            self.status = LoopStatus.FAILED
            await self._give_back(failure)
            raise
        return self

    def __aiter__(self) -> AsyncLoop:
        self._again()
        return self

    async def __anext__(self) -> AsyncTurn:
        self._check_entered()
        try:
            going_on = await self._handle.arun(self._advancing)
        except BaseException:
            self.status = LoopStatus.FAILED
            raise
        if not going_on:
            raise StopAsyncIteration
        self._turn = turn = AsyncTurn(self, self._cursor.lane, self._round, self._state)
        return turn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        try:
            await self._handle.arun(self._leaving, error)
        except BaseException as failure:
            await self._give_back(failure)
            raise
        left = error is not None and self._is_left_by(error)
        await self._give_back(None if left else error)
        return left

    async def _give_back(self, error: BaseException | None) -> None:
        if self._lease is not None:
            await self._lease.__aexit__(None if error is None else type(error), error, None)
