"""The report of ``crash``, and the rules by which a killed run is judged.

A run is judged from the outside: by the log of what really ran, by what is stored at its end, and by the files and the
world that it left, all compared with runs of the same input that no one killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.codec import encode
from backstay.errors import EncodeError
from backstay.model.checkpoint import Checkpoint
from backstay.model.frame import Frame
from backstay.testing.victim import Point

SHOWN_LENGTH_MAX = 120


@dataclass(frozen=True, slots=True)
class CrashFinding:
    """One thing that went wrong. ``script`` is a program that shows it."""

    kind: str  # "fails undisturbed", "cannot resume", "never ends", "done twice", "ran again", "lost", "differs", ...
    input: int  # which of the inputs
    what: str  # one sentence
    moments: tuple[Point, ...] = ()  # where the processes of the run died
    script: str = ""
    count: int = 1  # runs in which the same was found

    def __str__(self) -> str:
        times = f", in {self.count} runs" if self.count > 1 else ""
        died = "".join(f"\n    killed at: {label} ({number}.)" for label, number in self.moments)
        shown = "".join(f"\n    | {line}" for line in self.script.splitlines())
        return f"{self.kind} (input {self.input}{times}): {self.what}{died}{shown}"


@dataclass(slots=True)
class CrashReport:
    """The report of ``crash``: true if nothing was found. ``str(report)`` is for people."""

    graph: str
    seed: int
    kills: Counter[str] = field(default_factory=Counter)  # processes that died, by the kind of moment
    findings: list[CrashFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not compared, and why
    runs: int = 0

    def __bool__(self) -> bool:
        return not self.findings

    def add(self, found: CrashFinding) -> None:
        """Add a finding; one that was found before counts once more, and keeps its shortest script."""
        for number, known in enumerate(self.findings):
            if (known.kind, known.input, known.what) == (found.kind, found.input, found.what):
                shorter = min(known, found, key=lambda each: len(each.moments))
                self.findings[number] = CrashFinding(
                    found.kind, found.input, found.what, shorter.moments, shorter.script, known.count + 1
                )
                return
        self.findings.append(found)

    def __str__(self) -> str:
        head = f"{self.graph}: {self.kills.total()} kills in {self.runs} runs, seed {self.seed}: "
        found = f"{len(self.findings)} findings" if self.findings else "nothing was lost, repeated or reordered"
        lines = [head + found]
        lines += [f"\n{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        if self.kills:
            lines += ["", "killed at:", *(f"  {count:4} {kind}" for kind, count in sorted(self.kills.items()))]
        return "\n".join(lines)


@dataclass(slots=True)
class CrashRun:
    """One run of one input: all its lives."""

    input: int
    points: tuple[Point, ...]
    lines: list[list[Any]] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # positions that were stored as done, and started again
    deaths: list[Point] = field(default_factory=list)
    problem: tuple[str, str] | None = None  # the kind and the text of what ended the run badly
    state: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    ended: str = ""  # how: the trigger of the last checkpoint
    files: Mapping[str, bytes] = field(default_factory=dict)
    world: Any = None
    damage: str = ""  # what ``store.check()`` found
    records: list[str] = field(default_factory=list)  # what is wrong with the runs that ``store.runs()`` lists

    def labels(self) -> Counter[str]:
        """Return how often each moment came."""
        return Counter(words[1] for words in self.lines if words[0] == "moment")

    def done(self) -> list[str]:
        """Return the names of effects and calls whose function ran to its end, in order."""
        return [f"{words[1]} {words[2]}" for words in self.lines if words[0] == "done"]


# Compare ----------------------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, as stores see it."""
    try:
        return encode(one) == encode(other)
    except EncodeError:
        return bool(one == other)


def unstable(one: CrashRun, other: CrashRun) -> dict[str, set[str]]:
    """Return what differs between two runs that no one killed, so that it says nothing about kills."""
    return {
        "state": {key for key in {*one.state, *other.state} if not same(one.state.get(key), other.state.get(key))},
        "files": {key for key in {*one.files, *other.files} if one.files.get(key) != other.files.get(key)},
        "world": set() if same(one.world, other.world) else {"world"},
        "path": set() if one.path == other.path else {"path"},
        "effects": set() if Counter(one.done()) == Counter(other.done()) else {"effects"},
    }


def judge(reference: CrashRun, run: CrashRun, shaky: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the sentence of everything that is wrong with a run."""
    yield from ran_again(run)
    yield from repeated_effects(run)
    for what in dict.fromkeys(run.records):
        yield "run record", what
    if run.problem is not None:
        yield run.problem
        return
    if run.damage:
        yield "damaged", f"store.check() found: {run.damage}"
    yield from compare(reference, run, shaky)


def ran_again(run: CrashRun) -> Iterator[tuple[str, str]]:
    """Find work that was stored, and was done again."""
    for position in dict.fromkeys(run.repeated):
        yield "ran again", f"{position} was stored as done, and ran again when the run was resumed"
    known: set[tuple[str, str]] = set()
    for words in run.lines:
        if words[0] == "got":
            known.add((words[1], words[2]))
        elif words[0] in ("began", "doubted") and (words[1], words[2]) in known:
            then = "its function ran again" if words[0] == "began" else "later it was unknown whether it was done"
            yield "ran again", f"{words[1]} {words[2]} had returned its result to its node, and {then}"


def repeated_effects(run: CrashRun) -> Iterator[tuple[str, str]]:
    """Find effects that were done twice. Calls may be, and so may effects that say that repeating is harmless."""
    done = Counter(words[2] for words in run.lines if words[:2] == ["done", "effect"] and not words[3])
    for name, count in done.items():
        if count > 1:
            yield "done twice", f"effect {name} was done {count} times"


def compare(reference: CrashRun, run: CrashRun, shaky: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Find differences between what two runs left."""
    if run.ended != reference.ended:
        yield "differs", f"the run ended as {run.ended!r}; undisturbed, as {reference.ended!r}"
    if run.path != reference.path and not shaky["path"]:
        yield _difference("the path", reference.path, run.path)
    if not shaky["effects"]:
        yield from compare_effects(reference, run)
    for key in sorted({*reference.state, *run.state} - shaky["state"]):
        if not same(reference.state.get(key), run.state.get(key)):
            yield _difference(f"state key {key!r}", reference.state.get(key), run.state.get(key))
    for name in sorted({*reference.files, *run.files} - shaky["files"]):
        if reference.files.get(name) != run.files.get(name):
            contents = [each.files.get(name) for each in (reference, run)]
            lines = [None if each is None else each.decode(errors="replace").splitlines() for each in contents]
            yield _difference(f"file {name!r}", *lines)
    if not shaky["world"] and not same(reference.world, run.world):
        yield _difference("the world", reference.world, run.world)


def compare_effects(reference: CrashRun, run: CrashRun) -> Iterator[tuple[str, str]]:
    """Find effects that were lost, or that were done in another order."""
    there, here = (list(dict.fromkeys(each.done())) for each in (reference, run))
    for name in there:
        if name not in here:
            yield "lost", f"{name} was not done; undisturbed, it is"
    for name in here:
        if name not in there:
            yield "differs", f"{name} was done; undisturbed, it is not"
    alone = [[name for name in names if "[" not in name] for names in (there, here)]  # not in a parallel branch
    if alone[0] != alone[1] and sorted(alone[0]) == sorted(alone[1]):
        yield "reordered", f"effects were done in the order {shown(alone[1])}; undisturbed, {shown(alone[0])}"


def _difference(what: str, there: Any, here: Any) -> tuple[str, str]:
    """Return the kind of a difference, and a sentence that names it: what is lost, repeated or in another order."""
    if isinstance(there, list | tuple) and isinstance(here, list | tuple):
        counts = [Counter(map(repr, each)) for each in (there, here)]
        more, fewer = counts[1] - counts[0], counts[0] - counts[1]
        if not more and not fewer:
            return "reordered", f"{what} has another order: {shown(here)}; undisturbed, {shown(there)}"
        if more and not fewer and set(more) <= set(counts[0]):
            return (
                "done twice",
                f"{what} has {shown(list(more))} {counts[1][next(iter(more))]} times; undisturbed, once",
            )
        if fewer and not more:
            return "lost", f"{what} does not have {shown(list(fewer))}; undisturbed, it does"
    if there is None:
        return "differs", f"{what} is {shown(here)}; undisturbed, it does not exist"
    if here is None:
        return "lost", f"{what} does not exist; undisturbed, it is {shown(there)}"
    return "differs", f"{what} is {shown(here)}; undisturbed, {shown(there)}"


def shown(value: Any) -> str:
    """Return a value as text, not too long; a list of texts without its quotes."""
    text = ", ".join(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else repr(value)
    return text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 1] + "…"


# Stored work ------------------------------------------------------------------------------------------------------


class StoredWork:
    """Says, by a stored position, whether the work of a place is in it, so that it must never be done again."""

    def __init__(self, head: Checkpoint | None) -> None:
        self._frames = () if head is None else tuple(head.frames)
        self._written = {write.task_id for write in head.writes if write.channel == "update"} if head else set()

    def __contains__(self, position: object) -> bool:
        frames, so_far = self._frames, ""
        for part in str(position).split(">"):
            so_far = f"{so_far}>{part}" if so_far else part
            if not frames or so_far in self._written:
                return so_far in self._written
            node, visit, key = parse_position(part)[1:]
            if visit <= frames[0].visits.get(node, 0):
                return True
            frames, is_done = _inside(frames, node, visit, key)
            if is_done:
                return True
        return False


def _inside(frames: Sequence[Frame], node: str, visit: int, key: str | None) -> tuple[tuple[Frame, ...], bool]:
    for task in frames[0].tasks:
        if (task.node, task.visit, task.key) == (node, visit, key):
            return tuple(task.frames or frames[1:]), task.done
    return (), False


def parse_position(part: str) -> tuple[str, str, int, str | None]:
    """Return the graph, node, visit and key of one part of a position."""
    graph, _, rest = part.partition("/")
    node, _, rest = rest.partition("#")
    visit, _, key = rest.partition("[")
    return graph, node, int(visit), key.rstrip("]") or None


def starts(lines: Iterable[Sequence[Any]]) -> list[str]:
    """Return the positions of the nodes that started, in order."""
    return [words[1] for words in lines if words[0] == "start"]
