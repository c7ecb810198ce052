"""Engines that are wrong on purpose, each in one thing. A life that is told the name of one is run by it.

What is changed is changed in the process of the life only, and ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from backstay.engine import compatibility, position, start
from backstay.engine.approvals import Approvals
from backstay.engine.durable import DurableRun, RunRecorder, finished
from backstay.engine.position import Activation, Job, from_frames
from backstay.engine.run import Runner
from backstay.model.checkpoint import Write
from backstay.model.frame import Frame, NextNode
from backstay.operations.drivers import Steps
from backstay.operations.ledger import EffectRow, ended
from backstay.operations.question import Question
from backstay.thread import effects


def _drops_finished_branches() -> None:
    """Keep nothing of what a branch returned: it runs again with the others."""

    async def record_update(self: DurableRun, checkpoint_id: str, position: str, value: Mapping[str, Any]) -> None:
        return None

    DurableRun.record_update = record_update  # type: ignore[method-assign]


def _saves_before_the_commit() -> None:
    """Store what was before the node, so that the node runs again."""
    notify, commit = RunRecorder.notify, Runner._commit

    async def late(self: RunRecorder, activation: Activation, node: str, cause: Any, **rest: Any) -> None:
        if cause not in ("node", "barrier"):
            await notify(self, activation, node, cause, **rest)

    async def early(self: Runner, activation: Activation) -> None:
        jobs, activation.jobs = activation.jobs, []
        self.recorder.mark_moved()
        await notify(self.recorder, activation, activation.here, "node")
        activation.jobs = jobs
        await commit(self, activation)

    RunRecorder.notify = late  # type: ignore[method-assign]
    Runner._commit = early  # type: ignore[method-assign]


def _writes_no_receipts() -> None:
    """Do an effect and never tell the ledger."""

    def end(self: effects._EffectRun, row: EffectRow, status: str, payload: bytes) -> Steps[EffectRow]:
        yield lambda: None
        return ended(row, status, payload, 0)

    effects._EffectRun.end = end  # type: ignore[method-assign]


def _resumes_at_the_last_node() -> None:
    """Take a position's last node for its next one."""

    def wrong(built: Any, frames: Sequence[Frame], runtime: Mapping[str, Any]) -> Activation:
        root = from_frames(built, frames, runtime)
        if root.last is not None and isinstance(root.todo, NextNode):
            root.todo, root.jobs = NextNode(root.last), []
            root.visits[root.last] -= 1
        return root

    _swap(start, "from_frames", wrong)


def _forgets_visits() -> None:
    """Reset loop counters, so that a round of a loop is taken for an earlier one."""

    def wrong(built: Any, frames: Sequence[Frame], runtime: Mapping[str, Any], prefix: str = "") -> Activation:
        return from_frames(built, [replace(frames[0], visits={}), *frames[1:]], runtime, prefix)

    for module in (start, position):
        _swap(module, "from_frames", wrong)


def _forgets_inner_graphs() -> None:
    """Start a subgraph again from its first node."""

    def wrong(built: Any, frames: Sequence[Frame], runtime: Mapping[str, Any], prefix: str = "") -> Activation:
        tasks = tuple(replace(task, frames=()) for task in frames[0].tasks)
        return from_frames(built, [replace(frames[0], tasks=tasks)], runtime, prefix)

    for module in (start, position):
        _swap(module, "from_frames", wrong)


def _forgets_what_branches_returned() -> None:
    """Do not look at what was kept beside the checkpoint."""
    for module in (start, compatibility):
        _swap(module, "finished", lambda writes: {})


def _forgets_what_answers_changed() -> None:
    """Lose what the answer before a finished branch put into the state."""

    def wrong(writes: Sequence[Write]) -> dict[str, Mapping[str, Any]]:
        return {place: {**value, "given": {}} for place, value in finished(writes).items()}

    for module in (start, compatibility):
        _swap(module, "finished", wrong)


def _lets_everybody_pass_after_a_restart() -> None:
    """Ask nobody any more who comes back."""
    before = Approvals.before

    def wrong(self: Approvals, activation: Activation, job: Job) -> Question | None:
        return before(self, activation, job) if self._recorder.options.attempt == 1 else None

    Approvals.before = wrong  # type: ignore[method-assign]


def _counts_attempts_anew() -> None:
    """Give a node that failed all its attempts again after a restart."""
    _swap(start, "attempts", lambda writes: {})


def _does_what_is_in_doubt_again() -> None:
    """Do an effect without a receipt once more."""

    def wrong(attempts: effects._EffectRun, row: EffectRow, record: Any) -> Steps[EffectRow]:
        return (yield from attempts.start(row))

    effects._resolve_unknown = wrong


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
