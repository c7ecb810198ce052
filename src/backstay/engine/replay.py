"""Running from any point of the past: on a new branch, with an edited state, after a look at what would happen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backstay.engine.compat import migrate
from backstay.engine.desk import Desk
from backstay.engine.launch import Setup, Taking, check_keys, resume
from backstay.engine.result import Result
from backstay.engine.verdict import Judgement, require
from backstay.errors import InvalidInput, NotFound
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.model.continuation import FanOut, NextNode
from backstay.model.effect import EffectRecord, EffectStatus
from backstay.model.frame import Frame
from backstay.store.base import Backend
from backstay.thread.arguments import fork_target, name_of
from backstay.thread.damage import told
from backstay.thread.ledger import ledger_of
from backstay.thread.load import get_of_thread, latest
from backstay.thread.save import Request, fork
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

REPLAY, AGAIN = "replay", "again"
"""What becomes of effects that the run did after the point it is run from: their results are used, or they are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What running from a checkpoint would do. Nothing was run or written to find out."""

    checkpoint: CheckpointMeta
    judgement: Judgement  # whether the graph fits the position
    next_nodes: tuple[str, ...]  # what would run first
    ran_before: tuple[str, ...]  # the path up to here, which would not run again
    ran_after: tuple[str, ...]  # what the run did after this point, which would run again
    replayed: tuple[EffectRecord, ...]  # effects whose stored results would be used, given the same arguments
    unknown: tuple[EffectRecord, ...]  # effects of which nobody knows whether they were done; they would be done anew

    def __str__(self) -> str:
        first = ", ".join(self.next_nodes) or "nothing"
        return (
            f"from step {self.checkpoint.step}: {first} first; {len(self.ran_after)} nodes ran after it, "
            f"{len(self.replayed)} effects would be replayed, {len(self.unknown)} are unknown"
        )


async def plan_of(setup: Setup, which: CheckpointMeta | str) -> ReplayPlan:
    """Look at what running from a checkpoint would do."""
    desk = _desk(setup)
    checkpoint = await _load(desk, which)
    newest = await desk.run(latest, desk.cursor)
    effects = await desk.run(_effects, desk, checkpoint)
    after = newest.path[len(checkpoint.path) :] if newest is not None and newest.run_id == checkpoint.run_id else ()
    return ReplayPlan(
        checkpoint=checkpoint.meta,
        judgement=migrate(setup.built, checkpoint)[2],
        next_nodes=_next_nodes(checkpoint),
        ran_before=checkpoint.path,
        ran_after=tuple(after),
        replayed=tuple(each for each in effects if each.status is EffectStatus.DONE),
        unknown=tuple(each for each in effects if each.status is EffectStatus.INTENDED),
    )


async def replay(
    setup: Setup,
    which: CheckpointMeta | str,
    branch: str,
    put: Mapping[str, Any] | None,
    effects: str,
    taking: Taking,
) -> Result:
    """Fork the thread at a checkpoint and run from there."""
    if effects not in (REPLAY, AGAIN):
        raise InvalidInput(f"effects is {effects!r:.40}", hint=f"Use {REPLAY!r} or {AGAIN!r}")
    desk = _desk(setup)
    checkpoint = await _load(desk, which)
    check_keys(setup.built, "set", put or {})
    require(migrate(setup.built, checkpoint)[2], taking.compatible)  # before there is a branch
    target = fork_target(desk.cursor.lane, branch, None)
    cursor = await desk.run(fork, desk.context, checkpoint.id, target, put, (), Request({}))
    handle = desk.handle
    setup.thread = (Thread if handle.blocking else AsyncThread)(handle.access, cursor)
    earlier: Iterable[str] = checkpoint.run.get("effects_from", ())
    taking.effects_from = (checkpoint.branch, *earlier) if effects == REPLAY else ()
    taking.writes_of, taking.is_edited = checkpoint, bool(put)
    return await resume(setup, taking)


def _desk(setup: Setup) -> Desk:
    if setup.thread is None:
        raise InvalidInput("there is nothing to replay without a thread", hint='Pass store.thread("name")')
    return Desk(setup.thread, setup.pause_check_s)


async def _load(desk: Desk, which: CheckpointMeta | str) -> Checkpoint:
    name = name_of(which)
    found = await desk.run(get_of_thread, desk.cursor.lane, name)
    if found is None:
        raise NotFound(name, checkpoint=name, thread=desk.cursor.lane.thread, hint="See thread.history()")
    if found.is_over:
        raise InvalidInput(
            f"the run of graph {found.graph!r} is over at this checkpoint: there is nothing to run from it",
            thread=found.thread_id,
            checkpoint=found.id,
            hint="Choose an earlier one: thread.at(step), thread.history()",
        )
    return found


def _next_nodes(checkpoint: Checkpoint) -> tuple[str, ...]:
    continuation = checkpoint.frames.frames[0].continuation if checkpoint.frames else checkpoint.continuation
    match continuation:
        case NextNode(node=node):
            return (node,)
        case FanOut(targets=targets):
            return targets
        case _:
            return () if checkpoint.next_node is None else (checkpoint.next_node,)


def _effects(store: Backend, desk: Desk, checkpoint: Checkpoint) -> list[EffectRecord]:
    """Return the effects that the run did after a checkpoint, in the branch it is in."""
    pages = ledger_of(desk.cursor.lane.namespace, desk.cursor.lane.thread)
    found: list[EffectRecord] = []
    frame = checkpoint.frames.frames[0] if checkpoint.frames else None
    while not pages.done:
        page = told(pages.next_page(store), "raise")
        found += [each for each in page if each.branch == checkpoint.branch and _is_after(each, checkpoint, frame)]
    return found


def _is_after(effect: EffectRecord, checkpoint: Checkpoint, frame: Frame | None) -> bool:
    """Tell by the visits of the outermost graph's node whether an effect comes after a position."""
    run_id, _, position = effect.key.partition(":")
    if run_id != checkpoint.run_id or frame is None:
        return False
    node, _, rest = position.partition("/")[2].partition("#")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return bool(digits) and int(digits) > frame.visits.get(node, 0)
