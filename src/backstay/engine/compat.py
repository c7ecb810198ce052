"""May a stored run go on in the graph as it is now? Judged frame by frame, before anything runs.

Users deploy while runs are parked. A run that went on in a changed graph could skip work, or do it twice, without a
word. So the shape of the graph is stored with each run, and each frame of a position is compared with it: a graph of
the same fingerprint goes on, one that differs only where the run does not stand needs the caller's word, one that
differs where it stands needs a migration, and what is not this graph's position at all is refused.

``judge`` only looks. ``migrate`` looks after the registered migrations were applied, and returns the position and the
state to go on with; nothing that was handed in is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from backstay.engine.build import Built
from backstay.engine.desk import finished
from backstay.engine.difference import changed, fan_edge, lost_nodes, others, to_run, unfit
from backstay.engine.fingerprint import FORMAT, Shape, fingerprint, fingerprint_of, hex_of, shape
from backstay.engine.migration import BadStep, Migration, chain, moved
from backstay.engine.verdict import FrameVerdict, Judgement, Verdict
from backstay.errors import MigrationFailed
from backstay.model.checkpoint import Checkpoint
from backstay.model.continuation import FanOut, NextNode
from backstay.model.frame import Frame, FrameStack, Task


def judge(built: Built, checkpoint: Checkpoint) -> Judgement:
    """Return how a stored position fits a graph, as both are."""
    return _judged(checkpoint, _look(built, checkpoint, migrates=False)[1])


def migrate(built: Built, checkpoint: Checkpoint) -> tuple[dict[str, Any], FrameStack, Judgement]:
    """Return the state and position to go on with, after all migrations that apply, and how they fit the graph.

    Keys that are new in the state begin with their defaults. Raises MigrationFailed if a migration does.
    """
    frames, verdicts = _look(built, checkpoint, migrates=True)
    state = dict(frames[0].state) if frames else dict(checkpoint.state)
    return state, FrameStack(frames), _judged(checkpoint, verdicts)


def names_now(built: Built, checkpoint: Checkpoint, names: Iterable[str]) -> frozenset[str]:
    """Return what nodes are called after the migrations, in whichever graphs of the nest they are."""
    found: dict[str, set[str]] = {}
    stored = checkpoint.run.get("shape")
    if isinstance(stored, dict) and stored.get("format") == FORMAT:
        _rename_all(built, stored, found)
    return frozenset(new for name in names for new in found.get(name, {name}))


def _rename_all(built: Built, stored: Shape, found: dict[str, set[str]]) -> None:
    steps = chain(built, fingerprint(stored)) or ()
    for old, node in stored["nodes"].items():
        new = _after(steps, old)
        found.setdefault(old, set()).add(new)
        inner = built.inner.get(new)
        if inner is not None and "graph" in node:
            _rename_all(inner, node["graph"], found)


def _judged(checkpoint: Checkpoint, verdicts: Sequence[FrameVerdict]) -> Judgement:
    return Judgement(thread_id=checkpoint.thread_id, checkpoint_id=checkpoint.id, frames=tuple(verdicts))


# The outermost frame ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a frame stands: in which graph then, and in which now."""

    prefix: str  # the position of the node around it
    graph: str  # the name of the graph then
    stored: Shape | None  # None = unknown
    stored_hash: int | None
    present: Built | None  # None = the graph around it has no such subgraph any more
    refusal: str | None = None

    @property
    def present_hash(self) -> int | None:
        return None if self.present is None else fingerprint_of(self.present)

    @property
    def is_same(self) -> bool:
        return self.present is not None and self.stored_hash == self.present_hash

    def inside(self, old: str, new: str, position: str) -> _Place:
        """Return the place of a frame inside a node, by its names then and now."""
        known = shape(self.present) if self.is_same and self.present is not None else self.stored
        stored: Shape | None = None if known is None else known["nodes"].get(old, {}).get("graph")
        present = None if self.present is None else self.present.inner.get(new)
        name = stored["name"] if stored is not None else ""
        return _Place(f"{position}>", name, stored, None if stored is None else fingerprint(stored), present)


def _look(built: Built, checkpoint: Checkpoint, migrates: bool) -> tuple[tuple[Frame, ...], list[FrameVerdict]]:
    place = _outermost(built, checkpoint)
    frames = _frames(checkpoint)
    look = _Look(checkpoint, migrates, dict(finished(checkpoint.writes)))
    if frames and place.refusal is None:
        after = look.stack(frames, place)
        look.judge_rest()
        return after, look.verdicts
    reason = place.refusal or "the checkpoint does not say where the run stands: it has neither frames nor a node"
    return frames, [_refused(place, frames[0].node_id if frames else "?", reason)]


def _outermost(built: Built, checkpoint: Checkpoint) -> _Place:
    kept = checkpoint.run.get("shape")
    stored = kept if isinstance(kept, dict) and kept.get("format") == FORMAT else None
    computed = None if stored is None else fingerprint(stored)
    hash = checkpoint.graph_hash if checkpoint.graph_hash is not None else computed
    place = _Place("", checkpoint.graph or "?", stored, hash, built)
    return replace(place, refusal=_refusal(built, checkpoint, place, computed))


def _refusal(built: Built, checkpoint: Checkpoint, place: _Place, computed: int | None) -> str | None:
    if checkpoint.graph is None:
        return f"the checkpoint was not saved by a graph, so it cannot be gone on with by {built.name!r}"
    if checkpoint.graph != built.name:
        return f"it belongs to graph {checkpoint.graph!r}, and this is {built.name!r}: resume it with that one"
    if computed is not None and computed != place.stored_hash:
        return (
            f"the record contradicts itself: it says 0x{hex_of(place.stored_hash or 0)}, the shape stored with it is "
            f"0x{hex_of(computed)}"
        )
    if not checkpoint.frames and place.stored is None and not place.is_same:
        if place.stored_hash is not None and chain(built, place.stored_hash) is not None:
            return None
        return "neither frames nor the shape of its graph are stored, so the position cannot be found in another graph"
    return None


def _frames(checkpoint: Checkpoint) -> tuple[Frame, ...]:
    """Return the stack; of a checkpoint that was saved without one, what its record says."""
    if checkpoint.frames:
        outermost, *inner = checkpoint.frames
        return (replace(outermost, state=checkpoint.state), *inner)
    following = checkpoint.continuation
    if following is None and checkpoint.next_node is not None:
        following = NextNode(checkpoint.next_node)
    node = checkpoint.next_node or checkpoint.last_node or checkpoint.graph
    if node is None or (following is None and checkpoint.last_node is None):
        return ()
    return (
        Frame(
            graph_id=checkpoint.graph or node,
            node_id=node,
            state=checkpoint.state,
            last_node=checkpoint.last_node,
            continuation=following,
        ),
    )


# All frames -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Look:
    """One look at a position, outer to inner."""

    checkpoint: Checkpoint
    migrates: bool
    kept: dict[str, Mapping[str, Any]]  # what finished after the checkpoint was saved, by position; less and less
    verdicts: list[FrameVerdict] = field(default_factory=list)

    def stack(self, frames: Sequence[Frame], place: _Place) -> tuple[Frame, ...]:
        """Look at frames that stand inside each other; return what they become."""
        after = []
        for index, frame in enumerate(frames):
            if not place.graph:
                place = replace(place, graph=frame.graph_id)
            new, steps = self.frame(frame, place)
            after.append(new)
            if index + 1 < len(frames):
                node, position = _entered(frame, place)
                place = place.inside(node, _after(steps, node), position)
        return tuple(after)

    def frame(self, frame: Frame, place: _Place) -> tuple[Frame, tuple[Migration, ...]]:
        """Look at one frame and those inside its tasks; return what it becomes, and how."""
        frame = self._with_kept(frame, place)
        steps = self._steps(place)
        new = self._moved(frame, place, steps) if steps else frame
        verdict = self._verdict(frame, new, place, steps)
        self.verdicts.append(verdict)
        if self.migrates and verdict.verdict is Verdict.COMPATIBLE and place.present is not None:
            new = _with_defaults(new, place.stored, place.present)
        inner = [self._inside(old, task, frame, place) for old, task in zip(frame.tasks, new.tasks, strict=True)]
        return replace(new, tasks=tuple(inner)) if inner else new, steps

    def judge_rest(self) -> None:
        """Look at what finished and belongs to no frame: under another name nobody would find it, and run it again."""
        if self.kept and any(verdict.verdict is not Verdict.SAME for verdict in self.verdicts):
            rest = ", ".join(self.kept)
            reason = f"it is not known where {rest} belongs, which has finished: go on with the old graph"
            outermost = self.verdicts[0]
            worse = max(outermost.verdict, Verdict.NEEDS_MIGRATION, key=lambda verdict: verdict.severity)
            self.verdicts[0] = replace(outermost, verdict=worse, reasons=(*outermost.reasons, reason))

    def _with_kept(self, frame: Frame, place: _Place) -> Frame:
        """Return a frame with what finished in it side by side since: kept by position, it must move with the frame."""
        if not isinstance(frame.continuation, FanOut):
            return frame
        tasks = {task.key: task for task in frame.tasks}
        prefix = f"{place.prefix}{place.graph}/"
        for position in list(self.kept):
            found = _JOB.fullmatch(position, len(prefix)) if position.startswith(prefix) else None
            if found is not None:
                kept, key = self.kept.pop(position), found["key"]
                tasks[key] = replace(
                    tasks.get(key) or Task(node=found["node"], key=key),
                    node=found["node"],
                    visit=int(found["visit"]),
                    done=True,
                    update=kept["update"],
                    given=kept["given"],
                    path=tuple(kept["path"]),
                    frames=(),
                )
        return replace(frame, tasks=tuple(tasks.values()))

    def _inside(self, old: Task, task: Task, frame: Frame, place: _Place) -> Task:
        if not task.frames:
            return task
        inside = place.inside(old.node, task.node, _position(frame, place, old.node, old.visit, old.key))
        return replace(task, frames=self.stack(task.frames, inside))

    def _steps(self, place: _Place) -> tuple[Migration, ...]:
        if not self.migrates or place.present is None or place.stored_hash is None or place.graph != place.present.name:
            return ()
        return chain(place.present, place.stored_hash) or ()

    def _moved(self, frame: Frame, place: _Place, steps: tuple[Migration, ...]) -> Frame:
        edge = None if place.stored is None else fan_edge(place.stored, frame)
        try:
            return moved(frame, steps, edge is not None and edge["kind"] == "for each")
        except BadStep as bad:
            raise _failed(bad, frame, place, self.checkpoint) from bad.__cause__

    def _verdict(self, old: Frame, new: Frame, place: _Place, steps: tuple[Migration, ...]) -> FrameVerdict:
        present = place.present
        if present is None:
            return _verdict(old, place, Verdict.NEEDS_MIGRATION, [_NO_SUBGRAPH])
        if place.graph != present.name:
            reason = f"it belongs to graph {place.graph!r}, and in its place is {present.name!r}: put that one back"
            return _verdict(old, place, Verdict.REFUSE, [reason])
        if place.is_same:
            lost = lost_nodes(old, present)
            reasons = [
                f"the record names node {node!r}, which the graph it was stored by does not have" for node in lost
            ]
            return _verdict(old, place, Verdict.REFUSE if lost else Verdict.SAME, reasons)
        problems = [*unfit(new, present)]
        if not steps:
            problems += [_NO_SHAPE] if place.stored is None else changed(old, place.stored, present)
        if problems:
            return _verdict(
                old, place, Verdict.NEEDS_MIGRATION, [*_how(old, steps, ", but that does not do:"), *problems]
            )
        reasons = [*_how(old, steps, "")]
        if place.stored is not None and not steps:
            reasons += others(old, place.stored, shape(present))
        accounted = self.migrates and place.stored is not None and _is_accounted_for(place.stored, present)
        return _verdict(old, place, Verdict.COMPATIBLE, reasons, migrated=bool(steps) or accounted)


_JOB: Final = re.compile(r"(?P<node>[^#>\[\]]+)#(?P<visit>[0-9]+)\[(?P<key>[^\[\]]+)\]")
_NO_SUBGRAPH = "the graph it stands in is not there any more: see the frame around it"
_NO_SHAPE = "the shape of its graph is not stored, so what changed cannot be told: say that this is right"


def _how(frame: Frame, steps: Sequence[Migration], then: str) -> Iterator[str]:
    """Yield what was done to a frame."""
    if not steps:
        return
    yield f"migrated from {', then from '.join(f'0x{hex_of(step.from_hash)}' for step in steps)}{then}"
    for node in to_run(frame):
        if _after(steps, node) != node:
            yield (
                f"node {node!r} is {_after(steps, node)!r} now: what it asked, or did as an effect, before it was "
                "interrupted is recorded under its old name"
            )


def _is_accounted_for(stored: Shape, present: Built) -> bool:
    """Tell whether the only differences are in graphs inside that have a migration of their own."""
    hash = fingerprint(stored)
    if hash == fingerprint_of(present) or chain(present, hash) is not None:
        return True
    if _without_inner(stored) != _without_inner(shape(present)):
        return False
    return all(_is_accounted_for(stored["nodes"][node]["graph"], inner) for node, inner in present.inner.items())


def _without_inner(whole: Shape) -> Shape:
    nodes = {
        name: {key: value for key, value in node.items() if key != "graph"} for name, node in whole["nodes"].items()
    }
    return {**whole, "nodes": nodes}


def _with_defaults(frame: Frame, stored: Shape | None, present: Built) -> Frame:
    """Return the frame with the keys that are new in its state. One that a node took away does not come back."""
    known: Mapping[str, Any] = {} if stored is None else stored["state"]["fields"]
    state = dict(frame.state)
    for name, each in present.schema.fields.items():
        if each.default is not None and not each.transient and name not in state and name not in known:
            state[name] = each.default()
    return frame if present.schema.snapshots else replace(frame, state=state)


def _entered(frame: Frame, place: _Place) -> tuple[str, str]:
    """Return the subgraph node that the next frame of a stack stands in, and its position."""
    if len(frame.tasks) == 1:
        task = frame.tasks[0]
        return task.node, _position(frame, place, task.node, task.visit, task.key)
    node = frame.continuation.node if isinstance(frame.continuation, NextNode) else frame.node_id
    return node, _position(frame, place, node, frame.visit, None)


def _position(frame: Frame, place: _Place, node: str, visit: int, key: str | None) -> str:
    return f"{place.prefix}{place.graph}/{node}#{visit}" + ("" if key is None else f"[{key}]")


def _after(steps: Sequence[Migration], node: str) -> str:
    for step in steps:
        node = step.nodes.get(node, node)
    return node


def _verdict(
    frame: Frame, place: _Place, verdict: Verdict, reasons: Sequence[str], migrated: bool = False
) -> FrameVerdict:
    return FrameVerdict(
        position=_position(frame, place, frame.node_id, frame.visit, None),
        graph=place.graph,
        verdict=verdict,
        reasons=tuple(reasons),
        stored_hash=place.stored_hash,
        present_hash=place.present_hash,
        migrated=migrated,
    )


def _refused(place: _Place, node: str, reason: str) -> FrameVerdict:
    return FrameVerdict(
        position=f"{place.graph}/{node}",
        graph=place.graph,
        verdict=Verdict.REFUSE,
        reasons=(reason,),
        stored_hash=place.stored_hash,
        present_hash=place.present_hash,
    )


def _failed(bad: BadStep, frame: Frame, place: _Place, checkpoint: Checkpoint) -> MigrationFailed:
    reason = f"the migration from 0x{hex_of(bad.step.from_hash)} {bad.problem}: mend it"
    verdict = _verdict(frame, place, Verdict.NEEDS_MIGRATION, [reason])
    return MigrationFailed(
        place.graph,
        bad.step.from_hash,
        bad.problem,
        expected=place.stored_hash or 0,
        actual=place.present_hash or 0,
        judgement=_judged(checkpoint, [verdict]),
        thread=checkpoint.thread_id,
        checkpoint=checkpoint.id,
        hint="Nothing was changed. Mend the migration, or resume with the graph that it was stored with",
    )
