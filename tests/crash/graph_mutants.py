"""Engines that are wrong on purpose, each in one thing. A life that is told the name of one is run by it.

What is changed is changed in the process of the life only, and ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from backstay.engine import compat, launch, position
from backstay.engine.context import BaseContext
from backstay.engine.desk import Desk, finished
from backstay.engine.gate import Gate
from backstay.engine.position import Activation, Job
from backstay.engine.recorder import Recorder
from backstay.engine.run import Runner
from backstay.model.checkpoint import Checkpoint, Write
from backstay.model.continuation import NextNode
from backstay.model.frame import Frame, FrameStack, Task
from backstay.thread import effects
from backstay.thread.ledger import EffectRow, ended
from backstay.thread.question import Question
from backstay.thread.steps import Steps


def _drops_finished_branches() -> None:
    """Keep nothing of what a branch returned: it runs again with the others."""

    async def keep(self: Desk, checkpoint_id: str, position: str, value: Mapping[str, Any]) -> None:
        return None

    Desk.keep = keep  # type: ignore[method-assign]


def _saves_before_the_commit() -> None:
    """Store what was before the node, so that the node runs again."""
    tell, commit = Recorder.tell, Runner._commit

    async def late(self: Recorder, activation: Activation, node: str, cause: Any, **rest: Any) -> None:
        if cause not in ("node", "barrier"):
            await tell(self, activation, node, cause, **rest)

    async def early(self: Runner, activation: Activation, contexts: list[BaseContext]) -> None:
        jobs, activation.jobs = activation.jobs, []
        self.recorder.moved()
        await tell(self.recorder, activation, activation.here, "node")
        activation.jobs = jobs
        await commit(self, activation, contexts)

    Recorder.tell = late  # type: ignore[method-assign]
    Runner._commit = early  # type: ignore[method-assign]


def _writes_no_receipts() -> None:
    """Do an effect and never tell the ledger."""

    def end(self: effects._Attempts, row: EffectRow, status: str, payload: bytes) -> Steps[EffectRow]:
        yield lambda: None
        return ended(row, status, payload, 0)

    effects._Attempts.end = end  # type: ignore[method-assign]


def _resumes_at_the_last_node() -> None:
    """Take a position's last node for its next one."""
    revived = launch._revived

    def wrong(setup: launch.Setup, checkpoint: Checkpoint, state: Mapping[str, Any], frames: FrameStack) -> Activation:
        root = revived(setup, checkpoint, state, frames)
        if root.last is not None and isinstance(root.todo, NextNode):
            root.todo, root.jobs = NextNode(root.last), []
            root.visits[root.last] -= 1
        return root

    launch._revived = wrong


def _forgets_visits() -> None:
    """Begin loop counters anew, so that a round of a loop is taken for an earlier one."""
    revive = position._revive

    def wrong(built: Any, frames: Sequence[Frame], runtime: Mapping[str, Any], prefix: str) -> Activation:
        return revive(built, [replace(frames[0], visits={}), *frames[1:]], runtime, prefix)

    position._revive = wrong


def _forgets_inner_graphs() -> None:
    """Begin a subgraph anew."""
    revive_job = position._revive_job

    def wrong(activation: Activation, task: Task, inside: Sequence[Frame], runtime: Mapping[str, Any]) -> Job:
        return revive_job(activation, task, (), runtime)

    position._revive_job = wrong


def _forgets_what_branches_returned() -> None:
    """Do not look at what was kept beside the checkpoint."""
    for module in (launch, compat):
        _swap(module, "finished", lambda writes: {})


def _forgets_what_answers_changed() -> None:
    """Lose what the answer before a finished branch put into the state."""

    def wrong(writes: Sequence[Write]) -> dict[str, Mapping[str, Any]]:
        return {place: {**value, "given": {}} for place, value in finished(writes).items()}

    for module in (launch, compat):
        _swap(module, "finished", wrong)


def _lets_everybody_pass_after_a_restart() -> None:
    """Ask nobody any more who comes back."""
    before = Gate.before

    def wrong(self: Gate, activation: Activation, job: Job) -> Question | None:
        return before(self, activation, job) if self._recorder.options.attempt == 1 else None

    Gate.before = wrong  # type: ignore[method-assign]


def _counts_attempts_anew() -> None:
    """Give a node that failed all its attempts again after a restart."""
    _swap(launch, "attempts", lambda writes: {})


def _does_what_is_in_doubt_again() -> None:
    """Do an effect without a receipt once more."""

    def wrong(attempts: effects._Attempts, row: EffectRow, record: Any) -> Steps[EffectRow]:
        return (yield from attempts.begin(row))

    effects._over_unknown = wrong


def _swap(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    assert callable(getattr(module, name)), "there is no such function any more: the mutant would be no mutant"
    setattr(module, name, function)


MUTANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "drops finished branches": _drops_finished_branches,
    "saves before the commit": _saves_before_the_commit,
    "writes no receipts": _writes_no_receipts,
    "resumes at the last node": _resumes_at_the_last_node,
    "forgets visits": _forgets_visits,
    "forgets inner graphs": _forgets_inner_graphs,
    "forgets what branches returned": _forgets_what_branches_returned,
    "forgets what answers changed": _forgets_what_answers_changed,
    "lets everybody pass after a restart": _lets_everybody_pass_after_a_restart,
    "counts attempts anew": _counts_attempts_anew,
    "does what is in doubt again": _does_what_is_in_doubt_again,
}
