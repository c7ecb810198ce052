"""One turn of a loop.

A turn copies each change at once, exactly as it will be stored, or refuses it. ``turn.state`` shows the changes
immediately; they are stored together when the turn ends. A turn that is left early stores nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backstay.codec import decode, encode
from backstay.codec.values import MUTABLE
from backstay.errors import EncodeError, InvalidInput, NotFound, Rejected
from backstay.model.decision import Decision, DecisionKind, InterruptKind
from backstay.model.fields import Usage
from backstay.model.ids import check_id
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations.arguments import APPEND_NAMES, check_key, check_mapping, names_of, split_append
from backstay.operations.cursor import Cursor, Handle, Services
from backstay.operations.drivers import Steps, async_sleep
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.load import latest
from backstay.operations.question import (
    Question,
    check_answer,
    deliver,
    line_name_of,
    outcome_of,
    outcome_question,
    raise_if_late,
    sleep_question,
    wait_question,
)
from backstay.operations.runs import EVERY_TOOL, LoopRun, find_loop_run
from backstay.store.base import Backend, BranchKey
from backstay.thread.calls import AsyncCalls, CallNames, CallSite, PlainCalls, current_task
from backstay.thread.effects import EffectCall, RunOperation

if TYPE_CHECKING:
    from backstay.thread.loop import AsyncLoop, Loop, LoopBase

SLEEP_CHECK_S = 0.5
"""How often a turn that sleeps looks at the clock and at its lease."""


def send(store: Backend, services: Services, cursor: Cursor, name: str, value: Any, by: str) -> InterruptRecord:
    """Send a value to the unfinished run of a branch; it gets the value when it waits for this name."""
    check_id(name, "name")
    check_id(by, "by")
    head = latest(store, Cursor(cursor.branch))  # of a cursor of its own, because the caller's must not move
    found = None if head is None or head.graph is not None else find_loop_run(store, cursor.branch, head)
    is_over = head is None or (head.is_over if found is None else found.finished or not found.was_loop)
    if head is None or is_over:
        raise NotFound(
            f"thread {cursor.branch.thread!r} has no unfinished run that could receive {name!r}",
            thread=cursor.branch.thread,
            hint="Send after the run's first checkpoint and before its end; check the thread id and the branch",
        )
    if found is None:
        line, received = line_name_of(head), head.run.get("received", {})
    else:
        line, received = found.line_name, found.received
    return deliver(store, services, cursor, head.id, line, received.get(name, 0), name, value, by)


_GROWING = (list, str, bytes)
_SIZED = tuple(MUTABLE)


class TurnLeft(BaseException):
    """Ends the body of a turn that waits for a decision. Not an Exception, so ``except Exception`` lets it pass."""

    def __init__(self, loop: LoopBase) -> None:
        self.loop = loop
        super().__init__("a turn waits for a decision; let this exception reach the loop's with block")


class Changes:
    """The changes of a turn so far, and the state with these changes.

    ``marks`` are the sizes of the state's containers, or with ``strict`` the digests of all its values, as of its last
    change; a value that no longer fits its mark was changed in place.
    """

    def __init__(self, state: Mapping[str, Any], strict: bool = False, marks: Mapping[str, Any] | None = None) -> None:
        self.view = dict(state)
        self.extend: dict[str, Any] = {}
        self.put: dict[str, Any] = {}
        self.delete: set[str] = set()
        self._before = frozenset(state)
        self._strict = strict
        self.marks = {key: self._mark(value) for key, value in state.items()} if marks is None else dict(marks)

    def __bool__(self) -> bool:
        return bool(self.extend or self.put or self.delete)

    def apply(self, append: Mapping[str, Any], put: Mapping[str, Any], delete: Iterable[str]) -> None:
        """Extend lists (or text, or bytes), replace values, and remove keys; all or none. Missing keys are created."""
        grown = self._copied(append)
        replaced = {check_key(key): _as_stored(value, f"state.{key}") for key, value in put.items()}
        removed = dict.fromkeys(map(check_key, delete))
        for key in removed:
            if key not in self.view:
                raise InvalidInput(f"state.{key} cannot be deleted: it is not in the state", path=f"state.{key}")
        for key in (grown.keys() & replaced.keys()) | (removed.keys() & {*grown, *replaced}):
            raise InvalidInput(f"state.{key} is changed in two ways at once", path=f"state.{key}")
        for key, new in grown.items():
            whole = self.view[key] + new if key in self.view else new
            if key in self.put or key not in self._before or key in self.delete:
                self._replace(key, whole)
            else:
                added = self.extend[key] + new if key in self.extend else new
                # One statement, so that an interrupt cannot change only one of them.
                self.extend[key], self.view[key], self.marks[key] = added, whole, self._mark(whole)
        for key, value in replaced.items():
            self._replace(key, value)
        for key in removed:
            self.marks.pop(key, None)
            if key in self._before:
                self.delete.add(key)
            self.extend.pop(key, None)
            self.put.pop(key, None)
            del self.view[key]

    def _copied(self, append: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of what extends the state; refuse what cannot extend it."""
        copied = {}
        for key, value in append.items():
            check_key(key)
            kind = type(value)
            if kind not in _GROWING or (key in self.view and type(self.view[key]) is not kind):
                raise InvalidInput(
                    f"state.{key} cannot be extended by {kind.__name__}",
                    path=f"state.{key}",
                    hint=f"Write turn.append({key}=[item]) for a list, or replace the value with turn.set({key}=…)",
                )
            self._check_untouched(key)
            copied[key] = _as_stored(value, f"append.{key}")
        return copied

    def check_untouched(self) -> None:
        """Raise InvalidInput if a value of the state was changed in place, which would not be stored."""
        for key in self.view:
            self._check_untouched(key)

    def _check_untouched(self, key: str) -> None:
        if key in self.marks and self._mark(self.view[key]) != self.marks[key]:
            raise InvalidInput(
                f"state.{key} was changed in place, and such a change is not stored",
                path=f"state.{key}",
                hint=f"turn.state is read-only. Write turn.append({key}=[item]) or turn.set({key}=…)",
            )

    def _replace(self, key: str, value: Any) -> None:
        # The order matters: if this is interrupted, saving the turn will be refused.
        self.put[key], self.view[key] = value, value
        self.delete.discard(key)
        self.extend.pop(key, None)
        self.marks[key] = self._mark(value)

    def _mark(self, value: Any) -> int | bytes | None:
        if not self._strict:
            return len(value) if isinstance(value, _SIZED) else None
        try:
            return sha256(encode(value, "state")).digest()
        except EncodeError:  # only a value that was changed in place cannot be encoded
            return None


def _as_stored(value: Any, path: str) -> Any:
    """Return a value as a store would return it, so that this process sees the same value as the next one."""
    return decode(encode(value, path))


@dataclass(slots=True)
class Questions:
    """The questions of one turn; each gets a name that stays the same if the turn runs again."""

    branch: BranchKey
    place: str
    asked: Counter[str]

    def approval(self, tool: str, args: Any, prompt: str, timeout: float | None) -> Question:
        """Return the question whether a tool may be called."""
        payload = {"tool": check_id(tool, "tool"), "args": args}
        return self._numbered(Question(self.place, InterruptKind.TOOL_APPROVAL, None, payload, prompt, timeout))

    def request(self, payload: Any, prompt: str, answer: type | None, timeout: float | None) -> Question:
        """Return the question that asks for a value."""
        return self._numbered(
            Question(self.place, InterruptKind.USER_REQUEST, None, payload, prompt, timeout, answer=answer or object)
        )

    def _numbered(self, question: Question) -> Question:
        # Only equal questions are numbered, so that different ones may come in any order when the turn runs again.
        same = question.interrupt(self.branch, 0).id
        self.asked[same] += 1
        return replace(question, position=f"{self.place}/{self.asked[same]}")


class TurnBase(CallSite):
    """The common part of ``Turn`` and ``AsyncTurn``."""

    def __init__(self, loop: LoopBase, branch: BranchKey, run: LoopRun, state: Mapping[str, Any]) -> None:
        self.iteration = run.iteration + 1
        self._loop = loop
        self._place = f"{run.number}/{self.iteration}"
        self._run = run
        self._changes = Changes(state, loop._options.strict, loop._marks)
        self._asking = Questions(branch, self._place, Counter())
        self._names = CallNames(current_task())
        self._received: Counter[str] = Counter()
        self._used = Usage()
        self._left = False  # it waits for a decision, so nothing is stored
        self._over = False

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state with this turn's changes, read-only."""
        return MappingProxyType(self._changes.view)

    def append(
        self,
        /,
        append: Mapping[str, Any] | None = None,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        **lists: Any,
    ) -> None:
        """Change the state: extend lists, replace keys (``set``), remove keys (``delete``); all or none.

        Takes the same arguments as ``thread.append``: ``turn.append(messages=[reply], set={"plan": plan})``. Keywords
        are lists to extend. Names that ``thread.append`` uses itself (``tags``, ``label``, ``id`` …), and text or bytes
        to extend, go into the mapping: ``turn.append({"tags": ["new"]})``. A missing key is created.
        """
        self._check_open()
        extend, others = split_append(append, lists)
        if others:
            name = next(iter(others))
            raise InvalidInput(
                f"turn.append() takes lists as keywords, and {name}= is "
                + ("a field of a checkpoint" if name in APPEND_NAMES else type(others[name]).__name__),
                path=f"state.{name}",
                hint=f'If {name} is a key of the state, write turn.append({{"{name}": …}}) or turn.set({name}=…)',
            )
        self._changes.apply(extend, check_mapping(set, "set"), names_of(delete, "delete"))

    def set(self, /, **values: Any) -> None:
        """Replace keys of the state: ``turn.set(plan=plan)``."""
        self._check_open()
        self._changes.apply({}, values, ())

    def delete(self, *keys: str) -> None:
        """Remove keys of the state."""
        self._check_open()
        self._changes.apply({}, {}, keys)

    def usage(self, *, tokens: int = 0, cost: float = 0.0) -> None:
        """Add to the thread's usage. Every checkpoint stores the sum."""
        self._check_open()
        self._used += Usage(tokens, cost)

    # Carry out the answers ----------------------------------------------------------------------------------------

    def _approval(self, tool: str, args: Any, prompt: str, timeout: float | None) -> Question | None:
        """Return the question; None if a person approved all calls of the tool."""
        self._check_open()
        question = self._asking.approval(tool, args, prompt, timeout)
        return None if self._run.allows(tool) else question

    def _approved(self, tool: str, args: Any, found: InterruptRecord) -> Any:
        """Return the arguments to call the tool with."""
        decision = self._decision(found)
        if decision.kind is DecisionKind.MODIFY:
            return decision.value
        if decision.scope in (tool, EVERY_TOOL):
            self._run = replace(self._run, grants=self._run.grants | {decision.scope})
        return args

    def _request(self, payload: Any, prompt: str, answer: type | None, timeout: float | None) -> Question:
        self._check_open()
        return self._asking.request(payload, prompt, answer, timeout)

    def _wait(self, name: str, timeout: float | None) -> Question:
        """Return the question whose answer is the next value sent under a name."""
        self._check_open()
        number = self._run.received.get(name, 0) + self._received[name] + 1
        return wait_question(self._run.line_name, name, number, timeout)

    def _sent(self, name: str, found: InterruptRecord) -> Any:
        raise_if_late(found.decision, name)
        decision = self._decision(found)
        self._received[name] += 1
        return decision.value

    def _answered(self, answer: type | None, found: InterruptRecord) -> Any:
        return check_answer(self._decision(found), answer, found.id)

    def _decision(self, found: InterruptRecord) -> Decision:
        """Return the decision to continue with; leave the turn if there is none."""
        decision = found.decision
        if decision is None or decision.kind is DecisionKind.DEFER:
            self._left = True
            self._loop._stop_for(found)
            raise TurnLeft(self._loop)
        if decision.kind is DecisionKind.REJECT:
            raise Rejected(
                f"interrupt {found.id} was rejected by {found.decided_by!r}",
                reason=decision.reason,
                by=found.decided_by,
                thread=found.thread_id,
                checkpoint=found.checkpoint_id,
                hint="Skip the action; catch this error in the turn to continue without it",
            )
        if decision.kind is DecisionKind.REROUTE:
            raise InvalidInput(
                f"interrupt {found.id} was answered with a reroute, but a loop has no nodes", thread=found.thread_id
            )
        return decision

    def _wake_at(self, seconds: float | None, until: datetime | None) -> Callable[[], datetime]:
        """Return the function whose stored result is the end of a sleep."""
        self._check_open()
        now = self._loop._services.now
        question = sleep_question(self._place, None, seconds, until, now())  # which checks the arguments
        return lambda: now() + timedelta(seconds=question.timeout_s or 0.0) if until is None else until

    def _sleep_left(self, wake: datetime) -> float:
        """Return how long to wait before looking at the clock again; 0 if the time has come."""
        lease = self._loop._cursor.lease
        if lease is not None and (refusal := lease.refusal()) is not None:
            raise refusal
        left = (wake - self._loop._services.now()).total_seconds()
        return max(0.0, min(left, SLEEP_CHECK_S))

    # Calls and effects --------------------------------------------------------------------------------------------

    def _handle_of_calls(self) -> Handle:
        return self._loop._handle

    def _place_of_calls(self) -> str:
        return f"{self._place}/"

    def _known_list(self, items: list[Any]) -> bytes | None:
        changes = self._changes
        for key, value in changes.view.items():
            if value is items and key not in changes.put:
                return self._loop._digests.digest(key, None, items, len(self._loop._state.get(key, ())))
        return None

    def _ask_outcome(self, run: RunOperation, record: EffectRecord) -> Steps[Outcome]:
        question = outcome_question(f"{self._place}/effect {record.key}/{record.attempt}", None, record)
        found: InterruptRecord = yield lambda: run(lambda store: self._loop._ask(store, question), None)
        return outcome_of(self._decision(found))

    def _report(self, call: EffectCall, is_replayed: bool) -> None:
        pass  # a loop has no observers

    # Closing ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._over:
            raise InvalidInput(f"turn {self.iteration} has ended", hint="Use the turn that the loop returned last")
        if self._left:  # the body caught TurnLeft and continued
            raise TurnLeft(self._loop)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.iteration}>"


class Turn(PlainCalls, TurnBase):
    """One turn of a ``Loop``. Attributes: ``state`` (read-only), ``iteration`` (from 1 after each input)."""

    _loop: Loop

    def approve(self, tool: str, args: Any, prompt: str = "", *, timeout: float | None = None) -> Any:
        """Ask whether a tool may be called, and return the arguments to call it with: these, or modified ones.

        If it is rejected, or not decided within ``timeout`` seconds, this raises Rejected, which the body may catch. If
        it is not decided yet, or deferred, this leaves the turn, stores nothing of it, and ends the loop; when the loop
        runs again, it reaches the same question. An approval whose scope is the tool's name, or "*", also covers later
        calls until the loop finishes.
        """
        question = self._approval(tool, args, prompt, timeout)
        if question is None:
            return args
        return self._approved(tool, args, self._loop._handle.run(self._loop._ask, question))

    def ask(self, payload: Any, prompt: str = "", *, answer: type | None = None, timeout: float | None = None) -> Any:
        """Ask a person for a value, and return it: the value of the decision "answer".

        If ``answer`` is a type, only values of that type are accepted. ``thread.decide`` checks built-in types and the
        keys of pydantic models; this checks all types, and asks again after a wrong answer. Otherwise this works like
        ``approve``.
        """
        question = self._request(payload, prompt, answer, timeout)
        return self._answered(answer, self._loop._handle.run(self._loop._ask, question))

    def wait_for(self, name: str, *, timeout: float | None = None) -> Any:
        """Wait for a value that another program sends with ``thread.send(name, value)``, and return it.

        Nothing waits in memory: the turn is left, as with ``approve``, and reaches this line again when the loop runs
        again. Each value is received once, in the order in which they were sent. Raises TimeoutError if none was sent
        within ``timeout`` seconds.
        """
        question = self._wait(name, timeout)
        return self._sent(name, self._loop._handle.run(self._loop._ask, question))

    def sleep(self, seconds: float | None = None, *, until: datetime | None = None) -> None:
        """Wait for a time. Its end is stored: after a crash, the next process waits only for the rest."""
        wake = self.call("sleep", self._wake_at(seconds, until))
        while left := self._sleep_left(wake):
            time.sleep(left)


class AsyncTurn(AsyncCalls, TurnBase):
    """One turn of an ``AsyncLoop``. Attributes: ``state`` (read-only), ``iteration`` (from 1 after each input)."""

    _loop: AsyncLoop

    async def approve(
        self,
        tool: str,
        args: Any,
        prompt: str = "",
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # nothing waits here: a person may take days
    ) -> Any:
        """Ask whether a tool may be called, and return the arguments to call it with. See ``Turn.approve``."""
        question = self._approval(tool, args, prompt, timeout)
        if question is None:
            return args
        return self._approved(tool, args, await self._loop._handle.arun(self._loop._ask, question))

    async def ask(
        self,
        payload: Any,
        prompt: str = "",
        *,
        answer: type | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # see approve
    ) -> Any:
        """Ask a person for a value. See ``Turn.ask``."""
        question = self._request(payload, prompt, answer, timeout)
        return self._answered(answer, await self._loop._handle.arun(self._loop._ask, question))

    async def wait_for(self, name: str, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109  # see approve
        """Wait for a value that another program sends. See ``Turn.wait_for``."""
        question = self._wait(name, timeout)
        return self._sent(name, await self._loop._handle.arun(self._loop._ask, question))

    async def sleep(self, seconds: float | None = None, *, until: datetime | None = None) -> None:
        """Wait for a time; see ``Turn.sleep``."""
        wake = await self.call("sleep", self._wake_at(seconds, until))
        while left := self._sleep_left(wake):
            await async_sleep(left)
