"""Replay a run from an earlier checkpoint, on a new branch; or only say what a replay would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backstay.engine.compatibility import Judgement, migrate, require
from backstay.engine.durable import DurableRun, replay_options
from backstay.engine.events import Result
from backstay.engine.start import ResumeRequest, Setup, check_keys, resume
from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.model.frame import FanOut, NextNode
from backstay.model.runs import EffectRecord, EffectStatus
from backstay.operations.arguments import fork_target, id_of
from backstay.operations.ledger import NodePlace, ledger_of, place_of
from backstay.operations.listing import raise_or_mark
from backstay.operations.load import get_of_thread, latest
from backstay.operations.question import line_name_of
from backstay.operations.save import SaveRequest, fork
from backstay.store.base import Backend, no_checkpoint
from backstay.thread.thread import AsyncThread, Thread

REPLAY, AGAIN = "replay", "again"
"""``effects`` of a replay: use the results of effects that were done after its checkpoint, or do them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The actions that a replay from a checkpoint would take. Making the plan runs and writes nothing."""

    checkpoint: CheckpointMeta
    judgement: Judgement  # whether the graph fits the position
    next_nodes: tuple[str, ...]  # the nodes that would run first
    ran_before: tuple[str, ...]  # the path up to here, which would not run again
    ran_after: tuple[str, ...]  # the nodes that ran after this point, which would run again
    replayed: tuple[EffectRecord, ...]  # effects whose stored results would be used, given the same arguments
    unknown: tuple[EffectRecord, ...]  # effects with an unknown outcome, which would be done again

    def __str__(self) -> str:
        first = ", ".join(self.next_nodes) or "nothing"
        return (
            f"from step {self.checkpoint.step}: {first} first; {len(self.ran_after)} nodes ran after it, "
            f"{len(self.replayed)} effects would be replayed, {len(self.unknown)} are unknown"
        )


async def plan_of(setup: Setup, which: CheckpointMeta | str) -> ReplayPlan:
    """Return the plan of a replay from a checkpoint."""
    durable = setup.durable("replay")
    checkpoint = await _load_checkpoint(durable, which)
    newest = await durable.run(latest, durable.cursor)
    effects = await durable.run(_effects_after, durable, checkpoint)
    after = newest.path[len(checkpoint.path) :] if newest is not None and newest.run_id == checkpoint.run_id else ()
    next_nodes: tuple[str, ...] = () if checkpoint.next_node is None else (checkpoint.next_node,)
    match checkpoint.frames.frames[0].continuation if checkpoint.frames else checkpoint.continuation:
        case NextNode(node=node):
            next_nodes = (node,)
        case FanOut(targets=targets):
            next_nodes = targets
    return ReplayPlan(
        checkpoint=checkpoint.meta,
        judgement=migrate(setup.built, checkpoint)[2],
        next_nodes=next_nodes,
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
    request: ResumeRequest,
) -> Result:
    """Fork the thread at a checkpoint and run from there."""
    if effects not in (REPLAY, AGAIN):
        raise InvalidInput(f"effects is {effects!r:.40}", hint=f"Use {REPLAY!r} or {AGAIN!r}")
    if setup.lease is not None:
        raise InvalidInput(
            "a replay runs on a new branch, which the lease does not cover",
            hint="Leave lease= out: the replay takes the lease of the new branch",
        )
    durable = setup.durable("replay")
    checkpoint = await _load_checkpoint(durable, which)
    check_keys(setup.built, "set", put or {})
    if put:
        valid = setup.built.schema.validated({**checkpoint.state, **put}, setup.built.name, put)
        put = {name: valid[name] for name in put}
    require(migrate(setup.built, checkpoint)[2], request.compatible)  # before the branch is made
    target = fork_target(durable.cursor.branch, branch, None)
    stored, removed, schema = put, [], setup.built.schema
    if put and schema.snapshots:  # the class chooses the stored keys, so they are made from the changed state
        stored = dict(schema.stored({**schema.restore(checkpoint.state, setup.runtime), **put}))
        removed = [key for key in checkpoint.state if key not in stored]
    request_fork = SaveRequest({}, name=durable.services.new_id())
    assert request_fork.name is not None
    request_fork.run = replay_options(checkpoint, request_fork.name, bool(put), effects == REPLAY)
    cursor = await durable.run(fork, durable.services, checkpoint.id, target, stored, removed, request_fork)
    handle = durable.handle
    setup.thread = (Thread if handle.blocking else AsyncThread)(handle.access, cursor)
    return await resume(setup, request)


async def _load_checkpoint(durable: DurableRun, which: CheckpointMeta | str) -> Checkpoint:
    name = id_of(which)
    found = await durable.run(get_of_thread, durable.cursor.branch, name)
    if found is None:
        raise no_checkpoint(name, durable.cursor.branch.thread)
    if found.is_over:
        raise InvalidInput(
            f"the run of graph {found.graph!r} is over at this checkpoint, so nothing can run from it",
            thread=found.thread_id,
            checkpoint=found.id,
            hint="Choose an earlier checkpoint: thread.at(step), thread.history()",
        )
    return found


def _effects_after(store: Backend, durable: DurableRun, checkpoint: Checkpoint) -> list[EffectRecord]:
    """Return the effects that the run did after a checkpoint, on its branch.

    The visits of the outermost graph's nodes show which effects come later.
    """
    if not checkpoint.frames:
        return []
    visits, line = checkpoint.frames.frames[0].visits, line_name_of(checkpoint)
    pages = ledger_of(durable.cursor.branch.namespace, durable.cursor.branch.thread)
    found: list[EffectRecord] = []
    while not pages.done:
        for effect in raise_or_mark(pages.next_page(store), "raise"):
            place = place_of(effect.key)
            if effect.branch != checkpoint.branch or not isinstance(place, NodePlace) or place.line != line:
                continue
            if place.visit > visits.get(place.node, 0):
                found.append(effect)
    return found
