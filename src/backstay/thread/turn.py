"""One turn of a plain loop: what its body sees, what it changes, and what it asks people.

Changes are taken over as they are at that moment, exactly as they will be stored, or refused there. They are seen by
``turn.state`` at once and stored together when the turn is over; a turn that is left early leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backstay.codec import decode, encode
from backstay.errors import InvalidInput, Rejected
from backstay.model.decision import Decision, DecisionKind
from backstay.model.ids import check_id, check_label
from backstay.model.interrupt import InterruptKind
from backstay.model.usage import Usage
from backstay.store.base import LaneKey
from backstay.thread.change import KEY_LENGTH_MAX
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.question import Question, check_answer
from backstay.thread.round import EVERY_TOOL, Round

if TYPE_CHECKING:
    from backstay.thread.loop import AsyncLoop, Loop, LoopBase

_GROWING = (list, str, bytes)
_SIZED = (list, dict, set)


class TurnLeft(BaseException):
    """Ends the body of a turn that waits for somebody. It is no error: ``except Exception`` must not swallow it."""

    def __init__(self, loop: LoopBase) -> None:
        self.loop = loop
        super().__init__("a turn waits for a decision; let this pass through to the loop's with block")


class Changes:
    """What a turn changed so far, and the state with it. Knows no store."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.view = dict(state)
        self.extend: dict[str, Any] = {}
        self.put: dict[str, Any] = {}
        self.delete: set[str] = set()
        self._before = frozenset(state)
        self._sizes = {key: len(value) for key, value in state.items() if isinstance(value, _SIZED)}

    def __bool__(self) -> bool:
        return bool(self.extend or self.put or self.delete)

    def append(self, lists: Mapping[str, Any]) -> None:
        """Extend lists (or text, or bytes), or begin them; all or none."""
        for key, new in {key: self._growth(key, value) for key, value in lists.items()}.items():
            whole = self.view[key] + new if key in self.view else new
            if key in self.put or key not in self._before or key in self.delete:
                self._replace(key, whole)
            else:
                grown = self.extend[key] + new if key in self.extend else new
                self.extend[key], self.view[key] = grown, whole  # what is seen is what is stored, whatever interrupts
                self._measure(key, whole)

    def set(self, values: Mapping[str, Any]) -> None:
        """Replace values, or make keys; all or none."""
        for key, value in {key: _taken(value, f"state.{key}") for key, value in values.items()}.items():
            self._replace(key, value)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys; all or none."""
        doomed = dict.fromkeys(check_label(key, "a key to delete", length_max=KEY_LENGTH_MAX) for key in keys)
        for key in doomed:
            if key not in self.view:
                raise InvalidInput(f"state.{key} cannot be deleted: it is not in the state", path=f"state.{key}")
        for key in doomed:
            self._sizes.pop(key, None)
            if key in self._before:
                self.delete.add(key)
            self.extend.pop(key, None)
            self.put.pop(key, None)
            del self.view[key]

    def check_untouched(self) -> None:
        """Raise InvalidInput if a value of the state was extended in place, which would not be stored."""
        for key, size in self._sizes.items():
            if len(self.view[key]) != size:
                raise InvalidInput(
                    f"state.{key} was changed in place, which is not stored",
                    path=f"state.{key}",
                    hint=f"turn.state is for reading. Write turn.append({key}=[item]) or turn.set({key}=…)",
                )

    def _growth(self, key: str, value: Any) -> Any:
        kind = type(value)
        if kind not in _GROWING or (key in self.view and type(self.view[key]) is not kind):
            raise InvalidInput(
                f"state.{key} cannot be extended by {kind.__name__}",
                path=f"state.{key}",
                hint=f"Write turn.append({key}=[item]) for a list, or replace the value with turn.set({key}=…)",
            )
        return _taken(value, f"append.{key}")

    def _replace(self, key: str, value: Any) -> None:
        # In this order: interrupted between, it is refused when the turn is saved.
        self.put[key], self.view[key] = value, value
        self.delete.discard(key)
        self.extend.pop(key, None)
        self._measure(key, value)

    def _measure(self, key: str, value: Any) -> None:
        self._sizes.pop(key, None)
        if isinstance(value, _SIZED):
            self._sizes[key] = len(value)


def _taken(value: Any, path: str) -> Any:
    """Return a value as it comes back from a store, so that this process goes on with what the next one would see."""
    return decode(encode(value, path))


@dataclass(slots=True)
class Asking:
    """The questions of one turn: a name for each, the same if the turn is run again."""

    lane: LaneKey
    place: str
    asked: Counter[str]

    def approval(self, tool: str, args: Any, prompt: str, timeout: float | None) -> Question:
        """Return the question whether a tool may be called."""
        payload = {"tool": check_id(tool, "tool"), "args": args}
        return self._numbered(Question(self.place, InterruptKind.TOOL_APPROVAL, None, payload, prompt, timeout))

    def request(self, payload: Any, prompt: str, answer: type | None, timeout: float | None) -> Question:
        """Return the question for a value."""
        return self._numbered(
            Question(self.place, InterruptKind.USER_REQUEST, None, payload, prompt, timeout, answer=answer)
        )

    def _numbered(self, question: Question) -> Question:
        # Only equal questions are counted, so that others may come in any order when the turn is run again.
        same = question.interrupt(self.lane, 0).id
        self.asked[same] += 1
        return replace(question, position=f"{self.place}/{self.asked[same]}")


class TurnBase:
    """What both kinds of turn have in common."""

    def __init__(self, loop: LoopBase, lane: LaneKey, round: Round, state: Mapping[str, Any]) -> None:
        self.iteration = round.iteration + 1
        self._loop = loop
        self._place = f"{round.number}/{self.iteration}"
        self._round = round
        self._changes = Changes(state)
        self._asking = Asking(lane, self._place, Counter())
        self._used = Usage()
        self._left = False  # it waits for somebody, so nothing of it is stored
        self._over = False

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state with this turn's changes, for reading."""
        return MappingProxyType(self._changes.view)

    def append(self, /, **lists: Any) -> None:
        """Extend lists of the state: ``turn.append(messages=[reply])``. A key that is not there yet is made."""
        self._check_open()
        self._changes.append(lists)

    def set(self, /, **values: Any) -> None:
        """Replace keys of the state: ``turn.set(plan=plan)``."""
        self._check_open()
        self._changes.set(values)

    def delete(self, *keys: str) -> None:
        """Remove keys of the state."""
        self._check_open()
        self._changes.remove(keys)

    def usage(self, *, tokens: int = 0, cost: float = 0.0) -> None:
        """Add to what the thread has used; the sum is kept in every checkpoint."""
        self._check_open()
        self._used += Usage(tokens, cost)

    # What the answers mean ----------------------------------------------------------------------------------------

    def _approval(self, tool: str, args: Any, prompt: str, timeout: float | None) -> Question | None:
        """Return what to ask; None if somebody granted all calls of the tool."""
        self._check_open()
        question = self._asking.approval(tool, args, prompt, timeout)
        return None if self._round.allows(tool) else question

    def _approved(self, tool: str, args: Any, found: InterruptRecord) -> Any:
        """Return the arguments to call the tool with."""
        decision = self._decision(found)
        if decision.kind is DecisionKind.MODIFY:
            return decision.value
        if decision.scope in (tool, EVERY_TOOL):
            self._round = replace(self._round, grants=self._round.grants | {decision.scope})
        return args

    def _request(self, payload: Any, prompt: str, answer: type | None, timeout: float | None) -> Question:
        self._check_open()
        return self._asking.request(payload, prompt, answer, timeout)

    def _answered(self, answer: type | None, found: InterruptRecord) -> Any:
        return check_answer(self._decision(found), answer, found.id)

    def _decision(self, found: InterruptRecord) -> Decision:
        """Return the decision to go on with; leave the turn if there is none."""
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
                hint="Do not do it; catch this in the turn to go on without",
            )
        if decision.kind is DecisionKind.REROUTE:
            raise InvalidInput(f"interrupt {found.id} was rerouted, but a loop has no nodes", thread=found.thread_id)
        return decision

    # Its end ------------------------------------------------------------------------------------------------------

    def _effect_key(self, key: str) -> str:
        self._check_open()
        return f"{self._place}/{key}"

    def _check_open(self) -> None:
        if self._over:
            raise InvalidInput(f"turn {self.iteration} is over", hint="Use the turn that the loop gave last")
        if self._left:  # a body that swallowed this goes on in vain
            raise TurnLeft(self._loop)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.iteration}>"


class Turn(TurnBase):
    """One turn of a ``Loop``. Attributes: ``state`` (for reading), ``iteration`` (from 1 in each round)."""

    _loop: Loop

    def effect(
        self,
        key: str,
        fn: Callable[..., Any],
        *args: Any,
        reconcile: Callable[..., Any] | None = None,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Do something that must not be done twice; ``key`` names it in this turn. See ``Thread.effect``."""
        name = self._effect_key(key)
        return self._loop.thread.effect(name, fn, *args, reconcile=reconcile, idempotent=idempotent, **kwargs)

    def approve(self, tool: str, args: Any, prompt: str = "", *, timeout: float | None = None) -> Any:
        """Ask whether a tool may be called, and return the arguments to call it with: these, or those put in place.

        Rejected, or not decided for ``timeout`` seconds: raises Rejected, which the body may catch. Not decided yet, or
        deferred: the turn is left, nothing of it is stored, and the loop ends; run again it comes to the same question.
        An approval whose scope is the tool's name, or "*", holds for further calls in this round.
        """
        question = self._approval(tool, args, prompt, timeout)
        if question is None:
            return args
        return self._approved(tool, args, self._loop._handle.run(self._loop._settling, question))

    def ask(self, payload: Any, prompt: str = "", *, answer: type | None = None, timeout: float | None = None) -> Any:
        """Ask somebody for a value: what the decision "modify" puts in place of the payload.

        With a type for ``answer`` nothing else is accepted, and the question is asked anew after a wrong answer.
        Else as ``approve``.
        """
        question = self._request(payload, prompt, answer, timeout)
        return self._answered(answer, self._loop._handle.run(self._loop._settling, question))


class AsyncTurn(TurnBase):
    """One turn of an ``AsyncLoop``. Attributes: ``state`` (for reading), ``iteration`` (from 1 in each round)."""

    _loop: AsyncLoop

    async def effect(
        self,
        key: str,
        fn: Callable[..., Awaitable[Any] | Any],
        *args: Any,
        reconcile: Callable[..., Any] | None = None,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Do something that must not be done twice; ``key`` names it in this turn. See ``AsyncThread.effect``."""
        name = self._effect_key(key)
        return await self._loop.thread.effect(name, fn, *args, reconcile=reconcile, idempotent=idempotent, **kwargs)

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
        return self._approved(tool, args, await self._loop._handle.arun(self._loop._settling, question))

    async def ask(
        self,
        payload: Any,
        prompt: str = "",
        *,
        answer: type | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # see approve
    ) -> Any:
        """Ask somebody for a value. See ``Turn.ask``."""
        question = self._request(payload, prompt, answer, timeout)
        return self._answered(answer, await self._loop._handle.arun(self._loop._settling, question))
