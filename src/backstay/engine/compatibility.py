"""Decide whether a stored run can resume on the current graph, frame by frame, before anything runs.

Graphs are deployed while runs wait. A run that resumed on a changed graph could silently skip work or repeat it. So the
shape of the graph is stored with each run, and each frame of the position is compared with it. With the same
fingerprint, the run resumes. A change that the position does not depend on needs the caller's consent, a change that it
depends on needs a migration, and a position of another graph is refused.

``judge`` only compares. ``migrate`` applies the registered migrations first, and returns the new position and state; it
does not change its arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from backstay.engine.build import BuiltGraph
from backstay.engine.durable import finished, with_progress
from backstay.engine.fingerprint import (
    FORMAT,
    Shape,
    blockers,
    changed_meaning,
    fan_edge,
    fingerprint,
    fingerprint_of,
    hex_of,
    missing_nodes,
    nodes_to_run,
    other_changes,
    shape,
)
from backstay.engine.migration import Migration, MigrationStepFailed, migrate_frame, migration_chain
from backstay.errors import GraphMismatch, MigrationFailed
from backstay.model.checkpoint import Checkpoint
from backstay.model.frame import FanOut, Frame, FrameStack, NextNode, Task
from backstay.operations.diff import visible


class Verdict(StrEnum):
    """How a stored frame fits its graph. Later verdicts are worse; compare ``severity``, not the texts."""

    SAME = "same"  # the graph has not changed
    COMPATIBLE = "compatible"  # the graph has changed, but not in what this position depends on
    NEEDS_MIGRATION = "needs migration"  # a migration must define what happens to this position
    REFUSE = "refuse"  # the position belongs to another graph

    @property
    def severity(self) -> int:
        """The rank of the verdict: higher is worse, 0 for ``SAME``."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameVerdict:
    """The verdict on one frame. Its ``reasons`` name the differences and what to do about them."""

    position: str
    graph: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    stored_hash: int | None = None
    present_hash: int | None = None  # None = the graph no longer exists
    migrated: bool = False  # a registered migration covers the difference

    def passes(self, accept_compatible: bool) -> bool:
        """Return whether a run may resume with this frame."""
        if self.verdict is Verdict.COMPATIBLE:
            return self.migrated or accept_compatible
        return self.verdict is Verdict.SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdicts on all frames of a stored position, outer to inner. There is at least one."""

    thread_id: str
    checkpoint_id: str
    frames: tuple[FrameVerdict, ...]

    @property
    def overall(self) -> Verdict:
        """The worst verdict."""
        return max((frame.verdict for frame in self.frames), key=lambda verdict: verdict.severity)

    def passes(self, accept_compatible: bool = False) -> bool:
        """Return whether a run may resume: nothing differs, or a migration or the caller accepts the differences."""
        return all(frame.passes(accept_compatible) for frame in self.frames)

    def render(self) -> str:
        """Return the verdicts as lines for a terminal. Unprintable characters of stored names are escaped."""
        lines = [f"thread {visible(self.thread_id)}, checkpoint {visible(self.checkpoint_id)}: {self.overall}"]
        for frame in self.frames:
            hashes = f"stored {_hash(frame.stored_hash)}, present {_hash(frame.present_hash)}"
            note = "" if not frame.migrated else ", migrated"
            lines.append(f"  {visible(frame.position)}: {frame.verdict}{note} ({hashes})")
            lines += [f"    - {visible(reason)}" for reason in frame.reasons]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def _hash(hash: int | None) -> str:
    return "unknown" if hash is None else f"0x{hex_of(hash)}"


def require(judgement: Judgement, accept_compatible: bool) -> None:
    """Raise GraphMismatch, with everything that a person needs to decide, unless the run may resume."""
    stopped = [frame for frame in judgement.frames if not frame.passes(accept_compatible)]
    if not stopped:
        return
    if any(frame.verdict is Verdict.REFUSE for frame in stopped):
        hint = "Nothing was run. Resume it with the graph that stored it"
    else:
        ways = [] if any(frame.stored_hash is None for frame in stopped) else ["deploy the old graph"]
        calls = [f"{frame.graph}.migrate({_hash(frame.stored_hash or 0)}, …)" for frame in stopped]
        ways += [f"register {visible(call)}" for call in dict.fromkeys(calls)]
        if all(frame.verdict is Verdict.COMPATIBLE for frame in stopped):
            ways.append("accept it with resume(…, compatible=True)")
        hint = f"Nothing was run. {'Either' if len(ways) > 1 else 'Please'} {', or '.join(ways)}"
    outermost = judgement.frames[0]
    raise GraphMismatch(
        expected=outermost.present_hash or 0,
        actual=outermost.stored_hash or 0,
        judgement=judgement,
        thread=judgement.thread_id,
        checkpoint=judgement.checkpoint_id,
        hint=hint,
    )


# Judging ----------------------------------------------------------------------------------------------------------


def judge(built: BuiltGraph, checkpoint: Checkpoint) -> Judgement:
    """Return how a stored position fits a graph, without migrations."""
    return _judged(checkpoint, _compare(built, checkpoint, migrates=False)[1])


def migrate(built: BuiltGraph, checkpoint: Checkpoint) -> tuple[dict[str, Any], FrameStack, Judgement]:
    """Return the state and the position after all migrations, and how they fit the graph.

    New keys of the state get their defaults. Raises MigrationFailed if a migration fails.
    """
    frames, verdicts = _compare(built, checkpoint, migrates=True)
    state = dict(frames[0].state) if frames else dict(checkpoint.state)
    return state, FrameStack(frames), _judged(checkpoint, verdicts)


def current_names(built: BuiltGraph, checkpoint: Checkpoint, names: Iterable[str]) -> frozenset[str]:
    """Return the names that nodes have after the migrations, in all nested graphs."""
    found: dict[str, set[str]] = {}
    stored = checkpoint.run.get("shape")
    if isinstance(stored, dict) and stored.get("format") == FORMAT:
        _collect_names(built, stored, found)
    return frozenset(new for name in names for new in found.get(name, {name}))


def _collect_names(built: BuiltGraph, stored: Shape, found: dict[str, set[str]]) -> None:
    steps = migration_chain(built, fingerprint(stored)) or ()
    for old, node in stored["nodes"].items():
        new = _name_after(steps, old)
        found.setdefault(old, set()).add(new)
        inner = built.inner.get(new)
        if inner is not None and "graph" in node:
            _collect_names(inner, node["graph"], found)


def _judged(checkpoint: Checkpoint, verdicts: Sequence[FrameVerdict]) -> Judgement:
    return Judgement(thread_id=checkpoint.thread_id, checkpoint_id=checkpoint.id, frames=tuple(verdicts))


@dataclass(frozen=True, slots=True)
class _FramePlace:
    """The graph of a frame: as it was stored, and as it is now."""

    prefix: str  # the position of the node around it
    graph: str  # the name of the stored graph
    stored: Shape | None  # None = unknown
    stored_hash: int | None
    present: BuiltGraph | None  # None = the graph around it no longer has this subgraph

    @property
    def present_hash(self) -> int | None:
        return None if self.present is None else fingerprint_of(self.present)

    @property
    def is_same(self) -> bool:
        return self.present is not None and self.stored_hash == self.present_hash

    def position(self, node: str, visit: int, key: str | None) -> str:
        return f"{self.prefix}{self.graph}/{node}#{visit}" + ("" if key is None else f"[{key}]")

    def inside(self, old: str, new: str, position: str) -> _FramePlace:
        """Return the place of a frame inside a node, by its old and its new name."""
        known = shape(self.present) if self.is_same and self.present is not None else self.stored
        stored: Shape | None = None if known is None else known["nodes"].get(old, {}).get("graph")
        present = None if self.present is None else self.present.inner.get(new)
        name = stored["name"] if stored is not None else ""
        return _FramePlace(f"{position}>", name, stored, None if stored is None else fingerprint(stored), present)

    def verdict(self, position: str, verdict: Verdict, reasons: Sequence[str], migrated: bool = False) -> FrameVerdict:
        return FrameVerdict(
            position=position,
            graph=self.graph,
            verdict=verdict,
            reasons=tuple(reasons),
            stored_hash=self.stored_hash,
            present_hash=self.present_hash,
            migrated=migrated,
        )


def _compare(built: BuiltGraph, checkpoint: Checkpoint, migrates: bool) -> tuple[tuple[Frame, ...], list[FrameVerdict]]:
    """Return the frames of a position, migrated if requested, and a verdict on each."""
    checkpoint = with_progress(checkpoint)
    kept = checkpoint.run.get("shape")
    stored = kept if isinstance(kept, dict) and kept.get("format") == FORMAT else None
    computed = None if stored is None else fingerprint(stored)
    hash = checkpoint.graph_hash if checkpoint.graph_hash is not None else computed
    place = _FramePlace("", checkpoint.graph or "?", stored, hash, built)
    frames = _frames(checkpoint)
    if _is_foreign(checkpoint) and checkpoint.graph is not None:  # the caller says which graph it means
        place = replace(place, graph=built.name)
        frames = tuple(replace(frame, graph_id=built.name) for frame in frames)
    reason = _refusal(built, checkpoint, place, computed)
    if frames and reason is None:
        comparison = _Comparison(checkpoint, migrates, dict(finished(checkpoint.writes)))
        after = comparison.stack(frames, place)
        comparison.judge_rest()
        return after, comparison.verdicts
    reason = reason or "the checkpoint has no position: it has neither frames nor a node"
    position = f"{place.graph}/{frames[0].node_id if frames else '?'}"
    return frames, [place.verdict(position, Verdict.REFUSE, [reason])]


def _refusal(built: BuiltGraph, checkpoint: Checkpoint, place: _FramePlace, computed: int | None) -> str | None:
    """Return why a checkpoint is not a position of this graph, or None."""
    if checkpoint.graph is None:
        return f"the checkpoint was not saved by a graph, so graph {built.name!r} cannot resume it"
    if checkpoint.graph != built.name and not _is_foreign(checkpoint):
        return f"it belongs to graph {checkpoint.graph!r}, not to {built.name!r}: resume it with that graph"
    if computed is not None and computed != place.stored_hash:
        return (
            f"the record contradicts itself: its fingerprint is 0x{hex_of(place.stored_hash or 0)}, but its shape has "
            f"the fingerprint 0x{hex_of(computed)}"
        )
    is_known = _is_foreign(checkpoint) or migration_chain(built, place.stored_hash or 0) is not None
    if not checkpoint.frames and place.stored is None and not place.is_same and not is_known:
        return "neither frames nor the shape of its graph are stored, so another graph cannot find the position"
    return None


def _is_foreign(checkpoint: Checkpoint) -> bool:
    """Return whether another program saved a position: it has no fingerprint, and the caller must accept it.

    Its nodes may have other names here: a migration from 0 has them.
    """
    return checkpoint.graph_hash is None and not checkpoint.frames and "shape" not in checkpoint.run


def _frames(checkpoint: Checkpoint) -> tuple[Frame, ...]:
    """Return the frames. Without stored frames, make one from the fields of the checkpoint."""
    if checkpoint.frames:
        outermost, *inner = checkpoint.frames
        return (replace(outermost, state=checkpoint.state), *inner)
    following = checkpoint.continuation
    if following is None and checkpoint.next_node is not None:
        following = NextNode(checkpoint.next_node)
    node = checkpoint.next_node or checkpoint.last_node or checkpoint.graph
    if node is None or (following is None and checkpoint.last_node is None):
        return ()
    visits, done = Counter(checkpoint.path), len(checkpoint.path)
    return (
        Frame(
            graph_id=checkpoint.graph or node,
            node_id=node,
            cursor=done,
            visit=visits[node] + 1,
            state=checkpoint.state,
            last_node=checkpoint.last_node,
            continuation=following,
            visits=dict(visits),
            steps=done,
        ),
    )


_JOB: Final = re.compile(r"(?P<node>[^#>\[\]]+)#(?P<visit>[0-9]+)\[(?P<key>[^\[\]]+)\]")
_NO_SUBGRAPH = "its graph no longer exists: see the frame around it"
_NO_SHAPE = "the shape of its graph is not stored, so the changes are unknown: confirm it with a migration"
_NO_HASH = "it has no fingerprint, so another program saved it: accept it if this graph's nodes mean the same"


@dataclass(slots=True)
class _Comparison:
    """One comparison of a position with the current graph, outer frames first."""

    checkpoint: Checkpoint
    migrates: bool
    finished: dict[str, Mapping[str, Any]]  # jobs finished since the checkpoint, by position; until a frame takes them
    verdicts: list[FrameVerdict] = field(default_factory=list)

    def stack(self, frames: Sequence[Frame], place: _FramePlace) -> tuple[Frame, ...]:
        """Compare nested frames; return them migrated."""
        after = []
        for index, frame in enumerate(frames):
            if not place.graph:
                place = replace(place, graph=frame.graph_id)
            new, steps = self.frame(frame, place)
            after.append(new)
            if index + 1 < len(frames):
                # The next frame is inside the only task, or else inside the node to run.
                node, visit, key = frame.node_id, frame.visit, None
                if len(frame.tasks) == 1:
                    node, visit, key = frame.tasks[0].node, frame.tasks[0].visit, frame.tasks[0].key
                elif isinstance(frame.continuation, NextNode):
                    node = frame.continuation.node
                place = place.inside(node, _name_after(steps, node), place.position(node, visit, key))
        return tuple(after)

    def frame(self, frame: Frame, place: _FramePlace) -> tuple[Frame, tuple[Migration, ...]]:
        """Compare one frame and the frames inside its tasks; return it migrated, and the migrations used."""
        frame = self._with_finished(frame, place)
        steps: tuple[Migration, ...] = ()
        present = place.present
        is_known = place.stored_hash is not None or _is_foreign(self.checkpoint)
        if self.migrates and present is not None and is_known and place.graph == present.name:
            steps = migration_chain(present, place.stored_hash or 0) or ()
        new = self._migrated(frame, place, steps) if steps else frame
        verdict = self._verdict(frame, new, place, steps)
        self.verdicts.append(verdict)
        if self.migrates and verdict.verdict is Verdict.COMPATIBLE and present is not None:
            new = _with_defaults(new, place.stored, present)
        inner = []
        for old, task in zip(frame.tasks, new.tasks, strict=True):
            if task.frames:
                position = place.position(old.node, old.visit, old.key)
                task = replace(task, frames=self.stack(task.frames, place.inside(old.node, task.node, position)))
            inner.append(task)
        return replace(new, tasks=tuple(inner)) if inner else new, steps

    def judge_rest(self) -> None:
        """Judge finished jobs that belong to no frame: under another name they would not be found, and run again."""
        if self.finished and any(verdict.verdict is not Verdict.SAME for verdict in self.verdicts):
            reason = f"{', '.join(self.finished)} has finished, but its place is unknown: resume with the old graph"
            outermost = self.verdicts[0]
            worse = max(outermost.verdict, Verdict.NEEDS_MIGRATION, key=lambda verdict: verdict.severity)
            self.verdicts[0] = replace(outermost, verdict=worse, reasons=(*outermost.reasons, reason))

    def _with_finished(self, frame: Frame, place: _FramePlace) -> Frame:
        """Return a frame with its jobs that finished later: they are stored by position, and must move with it."""
        if not isinstance(frame.continuation, FanOut):
            return frame
        tasks = {task.key: task for task in frame.tasks}
        prefix = f"{place.prefix}{place.graph}/"
        for position in list(self.finished):
            found = _JOB.fullmatch(position, len(prefix)) if position.startswith(prefix) else None
            if found is not None:
                job, key = self.finished.pop(position), found["key"]
                tasks[key] = replace(
                    tasks.get(key) or Task(node=found["node"], key=key),
                    node=found["node"],
                    visit=int(found["visit"]),
                    done=True,
                    update=job["update"],
                    given=job["given"],
                    notes=job["notes"],
                    path=tuple(job["path"]),
                    frames=(),
                )
        return replace(frame, tasks=tuple(tasks.values()))

    def _migrated(self, frame: Frame, place: _FramePlace, steps: tuple[Migration, ...]) -> Frame:
        edge = None if place.stored is None else fan_edge(place.stored, frame)
        try:
            return migrate_frame(frame, steps, edge is not None and edge["kind"] == "for each")
        except MigrationStepFailed as bad:
            from_hash, checkpoint = bad.step.from_hash, self.checkpoint
            reason = f"the migration from 0x{hex_of(from_hash)} {bad.problem}: fix it"
            position = place.position(frame.node_id, frame.visit, None)
            raise MigrationFailed(
                place.graph,
                from_hash,
                bad.problem,
                expected=place.present_hash or 0,
                actual=place.stored_hash or 0,
                judgement=_judged(checkpoint, [place.verdict(position, Verdict.NEEDS_MIGRATION, [reason])]),
                thread=checkpoint.thread_id,
                checkpoint=checkpoint.id,
                hint="Nothing was changed. Fix the migration, or resume with the graph that stored the run",
            ) from bad.__cause__

    def _verdict(self, old: Frame, new: Frame, place: _FramePlace, steps: tuple[Migration, ...]) -> FrameVerdict:
        present, position = place.present, place.position(old.node_id, old.visit, None)
        if present is None:
            return place.verdict(position, Verdict.NEEDS_MIGRATION, [_NO_SUBGRAPH])
        if place.graph != present.name:
            reason = f"it belongs to graph {place.graph!r}, but {present.name!r} is in its place: put that graph back"
            return place.verdict(position, Verdict.REFUSE, [reason])
        if place.is_same:
            missing = missing_nodes(old, present)
            reasons = [
                f"the record names node {node!r}, but the graph that stored it has no such node" for node in missing
            ]
            return place.verdict(position, Verdict.REFUSE if missing else Verdict.SAME, reasons)
        problems = [*blockers(new, present)]
        is_foreign = _is_foreign(self.checkpoint)
        if not steps and not is_foreign:
            problems += [_NO_SHAPE] if place.stored is None else changed_meaning(old, place.stored, present)
        if problems:
            reasons = [*_migration_notes(old, steps, ", but that is not enough:"), *problems]
            return place.verdict(position, Verdict.NEEDS_MIGRATION, reasons)
        reasons = [*([_NO_HASH] if is_foreign else ()), *_migration_notes(old, steps, "")]
        if place.stored is not None and not steps:
            reasons += other_changes(old, place.stored, shape(present))
        covered = self.migrates and place.stored is not None and _is_covered(place.stored, present)
        is_confirmed = (bool(steps) and not is_foreign) or covered
        return place.verdict(position, Verdict.COMPATIBLE, reasons, migrated=is_confirmed)


def _migration_notes(frame: Frame, steps: Sequence[Migration], then: str) -> Iterator[str]:
    """Yield the migrations of a frame, and what they rename."""
    if not steps:
        return
    yield f"migrated from {', then from '.join(f'0x{hex_of(step.from_hash)}' for step in steps)}{then}"
    for node in nodes_to_run(frame):
        if _name_after(steps, node) != node:
            yield (
                f"node {node!r} is now {_name_after(steps, node)!r}: its questions and effects from before the "
                "interruption are recorded under its old name"
            )


def _name_after(steps: Sequence[Migration], node: str) -> str:
    for step in steps:
        node = step.nodes.get(node, node)
    return node


def _is_covered(stored: Shape, present: BuiltGraph) -> bool:
    """Return whether the only differences are in nested graphs that have a migration of their own."""
    hash = fingerprint(stored)
    if hash == fingerprint_of(present) or migration_chain(present, hash) is not None:
        return True
    if _without_inner(stored) != _without_inner(shape(present)):
        return False
    return all(_is_covered(stored["nodes"][node]["graph"], inner) for node, inner in present.inner.items())


def _without_inner(whole: Shape) -> Shape:
    nodes = {
        name: {key: value for key, value in node.items() if key != "graph"} for name, node in whole["nodes"].items()
    }
    return {**whole, "nodes": nodes}


def _with_defaults(frame: Frame, stored: Shape | None, present: BuiltGraph) -> Frame:
    """Return the frame with the new keys of its state. A key that a node deleted does not come back."""
    known: Mapping[str, Any] = {} if stored is None else stored["state"]["fields"]
    state = dict(frame.state)
    for name, each in present.schema.fields.items():
        if each.default is not None and not each.transient and name not in state and name not in known:
            state[name] = each.default()
    return frame if present.schema.snapshots else replace(frame, state=state)
