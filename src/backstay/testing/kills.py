"""``crash``: run a graph in processes that are killed at every kind of moment, and report what did not survive it.

Each input first runs undisturbed, twice, and every moment of it is logged. Then moments are chosen, by a seed and so
that rare kinds are not left out. Each run is killed at one of them, or at several, and resumed in new processes until
it ends; then ``judge`` compares it with the undisturbed runs. ``victim`` is the side of the processes that die.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backstay.engine.graph import Graph
from backstay.errors import Fenced, InvalidInput
from backstay.model.checkpoint import Checkpoint
from backstay.model.decision import Answer, Approve, Decision, Modify
from backstay.model.runs import RunStatus
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.leases import is_alive
from backstay.store.leases import Holder
from backstay.store.open import open_backend
from backstay.testing.judge import (
    CrashFinding,
    CrashReport,
    CrashRun,
    StoredWork,
    judge,
    starts,
    unstable,
)
from backstay.testing.victim import (
    THREAD,
    LifeRequest,
    Point,
    is_program,
    is_victim,
    name_of_call,
    pack,
    unpack,
)
from backstay.thread.runs import LIMIT_MAX, Run
from backstay.thread.store import Store, make_services

LIVES_MAX = 200
"""Processes of one run; one that needs more never ends."""

RAM_FOLDER = Path("/dev/shm")
"""A kill does not lose what was written, so the stores may be in memory."""

HASH_SEEDS = ("1", "2")
"""Two processes in which sets and hashes have another order: each run uses both, as after a real restart."""

SEVERAL_KILLS = (1, 1, 2, 1, 4)
"""How often runs are killed, in turn."""

Answers = Callable[[InterruptRecord], Decision | None] | Mapping[str, Decision | str]


def crash(
    graph: Graph | str | Callable[..., Any],
    inputs: Sequence[Any],
    *,
    kills: int = 200,
    answers: Answers | None = None,
    world: Callable[[], Any] | None = None,
    reset: Callable[[], object] | None = None,
    url: str | None = None,
    seed: int = 0,
    only: Sequence[Point] | None = None,
    timeout_s: int = 60,
) -> CrashReport:
    """Kill the processes that run a graph, at every kind of moment, and report what was lost, repeated or reordered.

    ``graph`` is ``"module:name"``, ``"file.py:name"`` or a graph of a module; also a function without arguments that
    returns a graph, or a program: a function of a thread and an input, which starts its work or resumes it.
    ``answers`` gives the decision on a question: a function of its record, or a mapping by tool or node; all others are
    approved, or answered with None. ``world`` returns what the run did outside, to be compared with the undisturbed
    run, and ``reset`` clears it before each run; files in the working directory, which each run has for itself, are
    compared without it. ``url`` is ``"dir:"`` or ``postgresql://…``; by default the store is a SQLite file. ``only``
    kills one run at these moments: the scripts of the findings use it. A process that takes ``timeout_s``
    seconds never ends.

        def test_my_graph_survives_kills():
            report = crash("my_module:graph", [{"question": "…"}], kills=200)
            assert report, report
    """
    if is_victim():
        raise InvalidInput(
            "crash() was called while its own process imported the module of the graph",
            hint='Call it in a test function, or below if __name__ == "__main__":',
        )
    given = list(inputs)
    if not given or kills < 1:
        raise InvalidInput("crash() needs at least one input and one kill", hint="For example crash(graph, [{}])")
    place = find_place(graph, sys._getframe(1).f_globals)
    report = CrashReport(place.text, seed)
    options = script_options(answers=answers, world=world, reset=reset, url=url)
    with CrashRig(place, given, answers=answers, world=world, reset=reset, url=url, timeout_s=timeout_s) as rig:
        _Campaign(rig, report, options).run(kills, None if only is None else [(label, n) for label, n in only])
    return report


# The graph and its module -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """Where a process finds the graph, or the program."""

    module: str  # "" if only the file is known
    file: str
    name: str
    is_program: bool = False

    @property
    def text(self) -> str:
        """The place as an argument of ``crash``."""
        return f"{self.module or self.file}:{self.name}"


def find_place(graph: Graph | str | Callable[..., Any], near: Mapping[str, Any]) -> GraphPlace:
    """Return where a graph or a function is, by its text or by looking for it in the modules, the caller's first."""
    if isinstance(graph, str):
        return place_of_text(graph)
    if not isinstance(graph, Graph) and not callable(graph):
        raise InvalidInput(f"crash() takes a graph, not {type(graph).__name__}", hint='For example "my_module:graph"')
    name = getattr(graph, "__qualname__", "")
    modules = [near, *(vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__"))]
    if not isinstance(graph, Graph):
        module = sys.modules.get(getattr(graph, "__module__", ""))
        modules = [] if module is None or not name or "<" in name else [vars(module)]
    for values in modules:
        for each, value in list(values.items()):
            if value is graph or (not isinstance(graph, Graph) and each == name.partition(".")[0]):
                return place_in(values, each if isinstance(graph, Graph) else name, graph)
    raise InvalidInput(
        f"{graph!r:.60} is not a name of a module, so the processes that are killed cannot import it",
        hint='Make it a global variable of a module, or pass "my_module:function", a function that returns the graph',
    )


def place_of_text(text: str) -> GraphPlace:
    """Return where a graph is, by ``"module:name"`` or ``"file.py:name"``."""
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise InvalidInput(f"{text!r:.60} does not name a graph", hint='Write "my_module:graph" or "file.py:graph"')
    if module.endswith(".py"):
        return GraphPlace("", os.path.abspath(module), name)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"{text!r} cannot be imported: {error}", hint='Write "my_module:graph"') from error
    return GraphPlace(module, "", name, not isinstance(found, Graph) and is_program(found))


def place_in(values: Mapping[str, Any], name: str, graph: Any) -> GraphPlace:
    """Return the place of a name of a module."""
    module, file = str(values.get("__name__", "")), values.get("__file__")
    if module == "__main__" and file is None:
        raise InvalidInput(
            f"{name!r} is in a program without a file, which the processes that are killed cannot import",
            hint="Put the graph into a module",
        )
    return GraphPlace(
        "" if module == "__main__" else module,
        "" if file is None else os.path.abspath(file),
        name,
        not isinstance(graph, Graph) and is_program(graph),
    )


# Processes --------------------------------------------------------------------------------------------------------


class VictimServer:
    """A process that has imported the graph's module, and forks the processes that are killed."""

    def __init__(self, place: GraphPlace, hash_seed: str) -> None:
        paths = [os.path.abspath(path) for path in sys.path]  # the victims have another working directory
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from backstay.testing.victim import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._text = place.text
        self._send({"path": paths, "module": place.module, "file": place.file, "name": place.name})

    def check(self) -> None:
        """Wait until the module is imported; raise InvalidInput if it cannot be."""
        problem = self._receive().get("problem", "the process ended; see its error output")
        if problem:
            raise InvalidInput(f"{self._text} cannot be imported in a new process: {problem}")

    def live(self, request: LifeRequest) -> int:
        """Run one life; return its exit code, or the number of the signal that ended it, negated."""
        self._send(asdict(request))
        return int(self._receive().get("code", -signal.SIGKILL))

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        return answer

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


class CrashRig:
    """Runs inputs in processes that die where they are to die, and in new ones until the run ends."""

    def __init__(
        self,
        place: GraphPlace,
        inputs: Sequence[Any],
        *,
        answers: Answers | None = None,
        world: Callable[[], Any] | None = None,
        reset: Callable[[], object] | None = None,
        url: str | None = None,
        timeout_s: int = 60,
    ) -> None:
        if url is not None and url != "dir:" and "://" not in url:
            raise InvalidInput(f"crash() cannot use the store {url!r:.40}", hint='Pass "dir:" or "postgresql://…"')
        self.place = place
        self.inputs = inputs
        self._packed = [pack(each) for each in inputs]
        self._answers = answers
        self._world = world
        self._reset = reset
        self._url = url
        self._timeout_s = timeout_s
        self._runs = 0
        self._name = uuid.uuid4().hex[:12]

    def __enter__(self) -> CrashRig:
        is_fast = RAM_FOLDER.is_dir() and os.access(RAM_FOLDER, os.W_OK)
        self._folder = Path(tempfile.mkdtemp(prefix="backstay-crash-", dir=RAM_FOLDER if is_fast else None))
        self._servers = [VictimServer(self.place, hash_seed) for hash_seed in HASH_SEEDS]
        try:
            for server in self._servers:
                server.check()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and delete the files."""
        for server in self._servers:
            server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, number: int, points: Sequence[Point] = (), *, lines: bool = False) -> CrashRun:
        """Run an input once, killed at these moments; each is counted from the death before it."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        (folder / "work").mkdir(parents=True)
        life = _Lives(self, number, folder, CrashRun(number, tuple(points)), list(points), lines)
        with contextlib.chdir(folder / "work"):
            if self._reset is not None:
                self._reset()
            for _ in range(LIVES_MAX):
                if life.live():
                    break
            else:
                life.run.problem = "never ends", f"the run did not end within {LIVES_MAX} processes"
            if self._world is not None:
                life.run.world = self._world()
        life.finish()
        shutil.rmtree(folder)
        return life.run

    def request(self, folder: Path, number: int, **rest: Any) -> LifeRequest:
        """Return the request for a life of an input."""
        url, namespace = self.url_of(folder)
        return LifeRequest(
            url=url,
            namespace=namespace,
            folder=str(folder),
            input=self._packed[number],
            timeout_s=self._timeout_s,
            **rest,
        )

    def url_of(self, folder: Path) -> tuple[str, str]:
        """Return the URL and the namespace of the store of a run."""
        if self._url is None:
            return f"{folder}/agent.db", ""
        if self._url == "dir:":
            return f"dir:{folder}/agent", ""
        return self._url, f"crash-{self._name}-{folder.name}"

    def serve(self, request: LifeRequest) -> int:
        """Run one life, by one server after the other."""
        return self._servers[request.life % len(self._servers)].live(request)

    def answer(self, record: InterruptRecord) -> Decision:
        """Return the decision on a question."""
        payload = record.interrupt.payload
        found: Decision | str | None = None
        if callable(self._answers):
            found = self._answers(record)
        elif self._answers is not None:
            tool = payload.get("tool") if isinstance(payload, Mapping) else None
            found = self._answers.get(str(tool), self._answers.get(str(record.interrupt.node)))
        if isinstance(found, str):
            found = Decision(kind=found)  # type: ignore[arg-type]  # it may also be its stored name
        if found is None:
            return Approve() if record.interrupt.answer is None else Answer(None)
        return found


@dataclass(frozen=True, slots=True)
class _AnyGraph:
    """A graph that can execute these runs, for a claim."""

    runs: list[Run]

    def claims(self) -> list[tuple[str, str]]:
        return [(run.graph, run.fingerprint) for run in self.runs]


@dataclass(slots=True)
class _Lives:
    """One run under way."""

    rig: CrashRig
    number: int
    folder: Path
    run: CrashRun
    todo: list[Point]
    lines: bool
    life: int = 0
    read: int = 0  # bytes of the log
    doubted: set[str] = field(default_factory=set)  # idempotency keys of effects that a process did not dare to repeat
    runs: set[str] = field(default_factory=set)  # ids of the runs that the store knew after a death
    seen: Counter[str] = field(default_factory=Counter)  # moments since the last death, in lives that ended alone

    def live(self) -> bool:
        """Run one life; return whether the run is over."""
        with self.store() as store:
            head = store.thread(THREAD).latest()
            if head is not None and head.is_over and not self.rig.place.is_program:
                return True  # it died after its last checkpoint
            answers = self._answers(store, head) if self.life else {}
        point = (self.todo[0][0], self.todo[0][1] - self.seen[self.todo[0][0]]) if self.todo else None
        request = self.rig.request(
            self.folder,
            self.number,
            life=self.life,
            answers=answers,
            # From the whole log: an effect that was not done when it was first in doubt may be done since.
            settled={key: self._result_of(key) for key in self.doubted},
            point=point,
            lines=self.lines or (point is not None and point[0].startswith("line ")),
        )
        self.life += 1
        code = self.rig.serve(request)
        new = self._new_lines()
        stored = StoredWork(head)
        self.run.repeated += [position for position in starts(new) if position in stored]
        if code == -signal.SIGKILL and any(words[0] == "dies" for words in new):
            self.run.deaths.append(self.todo.pop(0))
            self.seen.clear()
            self._free()
            self._check_runs()
            return False
        self.seen.update(words[1] for words in new if words[0] == "moment")
        return self._judge_end(code, head)

    def _judge_end(self, code: int, before: Checkpoint | None) -> bool:
        """Return whether a run is over whose process ended by itself."""
        if code == -signal.SIGALRM:
            seconds = self.rig._timeout_s
            self.run.problem = "never ends", f"a process that runs it did not end within {seconds} seconds"
            return True
        try:
            told = json.loads((self.folder / f"result-{self.life - 1}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            printed = (self.folder / "printed").read_text(encoding="utf-8", errors="replace")
            self.run.problem = "process ended", f"its process ended with code {code}: {printed[-1500:]}"
            return True
        if told.get("unknown") and told["unknown"] not in self.doubted:
            self.doubted.add(told["unknown"])
            return False
        if told["status"] == "raised":
            kind = "cannot resume" if before is not None else "fails"
            self.run.problem = (
                kind,
                re.sub(r"[0-9a-f]{8}-?[0-9a-f-]{12,}", "…", told["error"])[:1500],
            )  # ids differ by run
            return True
        with self.store() as store:
            head = store.thread(THREAD).latest()
            if self.rig.place.is_program and (head is None or head.graph is None):
                return not self._answers(store, head)
            return head is not None and head.is_over

    def _answers(self, store: Store, head: Checkpoint | None) -> dict[str, str]:
        """Return decisions on all that the run waits for, packed."""
        waits: Any = None
        if head is not None and head.graph is not None:
            waits = head.frames.frames[0].waits if tuple(head.frames) else ()
        asked = [
            record
            for record in store.thread(THREAD).interrupts()
            if record.decision is None and (waits is None or record.id in waits)
        ]
        return {record.id: pack(self._answer(record).to_plain()) for record in asked}

    def _answer(self, record: InterruptRecord) -> Decision:
        """Return the decision on a question; whether an effect was done is in the log."""
        payload = record.interrupt.payload
        if not isinstance(payload, Mapping) or "effect" not in payload:
            return self.rig.answer(record)
        key = str(payload.get("idempotency_key"))
        result = self._result_of(key)
        self.run.lines.append(["doubted", "effect", name_of_call(str(payload["effect"]))])
        value = unpack(result) if result else None
        if value is not None:
            return Modify(value)
        if result:  # an answer cannot say that it was done and returned None
            self.doubted.add(key)
        return Approve()

    def _result_of(self, key: str) -> str:
        """Return the packed result of an effect by its idempotency key; "" if it was not done."""
        done = [words for words in self.run.lines if words[0] == "done" and words[4] == key]
        return str(done[-1][5]) if done else ""

    def _new_lines(self) -> list[list[Any]]:
        with contextlib.suppress(FileNotFoundError), (self.folder / "log").open("rb") as log:
            log.seek(self.read)
            data = log.read()
            self.read += len(data)
            new = [json.loads(line) for line in data.splitlines()]
            self.run.lines += new
            return new
        return []

    def _check_runs(self) -> None:
        """Check that the store knows all runs, and that none counts as running now that its process is dead."""
        with self.store() as store:
            found = [run for run in store.runs(thread=THREAD, limit=LIMIT_MAX) if isinstance(run, Run)]
        lost = self.runs - {run.id for run in found}
        self.runs |= {run.id for run in found}
        self.run.records += ["store.runs() no longer lists the run"] * len(lost)
        for run in found:
            if run.status is RunStatus.RUNNING:
                self.run.records.append("the process is dead, and store.runs() lists the run as running")

    def _check_end(self, store: Store, head: Checkpoint | None) -> None:
        """Check that the record of a run that is over says so, at the latest when a worker asks for runs."""
        found = [run for run in store.runs(thread=THREAD, limit=LIMIT_MAX) if isinstance(run, Run)]
        self.run.records += ["store.runs() no longer lists the run"] * len(self.runs - {run.id for run in found})
        if head is None or not head.is_over or self.run.problem is not None:
            return
        left = [run for run in found if run.ended_at is None]
        for lease in store.claim([_AnyGraph(left)]) if left else []:
            self.run.records.append(f"the run is over, and a worker is asked to continue it at step {lease.run.step}")
            lease.release()
        for run in found:
            if run.id == head.run_id and (status := run.refresh().status) not in (
                RunStatus.COMPLETED,
                RunStatus.CANCELLED,
            ):
                self.run.records.append(f"the run is over, and store.runs() lists it as {status.value}")

    def _free(self) -> None:
        """Release the lease of a dead process, as time would, where the system does not say that it is dead."""
        url, namespace = self.rig.url_of(self.folder)
        tokens = [words[1] for words in self.run.lines if words[0] == "token"]
        backend = open_backend(url)
        try:
            for row in backend.leases(namespace, THREAD, False):
                if is_alive(Holder.parse(row.owner)) is False:
                    continue  # the next process takes it over
                for token in reversed(tokens):
                    with contextlib.suppress(Fenced):
                        backend.release(row.branch, row.epoch, token)
                        break
        finally:
            backend.close()

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """Open the store of the run, to look at it."""
        url, namespace = self.rig.url_of(self.folder)
        with Store(open_backend(url), make_services(namespace, None)) as store:
            yield store

    def finish(self) -> None:
        """Read what the run left."""
        work, run = self.folder / "work", self.run
        run.files = {str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*") if path.is_file()}
        with self.store() as store:
            head = store.thread(THREAD).latest()
            if head is not None:
                run.state, run.path, run.ended = dict(head.state), tuple(head.path), str(head.trigger)
            if not (checked := store.check()):
                run.damage = str(checked)
            self._check_end(store, head)
            if namespace := self.rig.url_of(self.folder)[1]:
                assert store.namespace == namespace
                store.delete_all()


# The campaign -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Campaign:
    """All runs of one call of ``crash``."""

    rig: CrashRig
    report: CrashReport
    options: tuple[list[str], str]
    references: list[CrashRun] = field(default_factory=list)
    shaky: list[Mapping[str, set[str]]] = field(default_factory=list)

    def run(self, kills: int, only: list[Point] | None) -> None:
        """Run everything, and fill in the report."""
        for number in range(len(self.rig.inputs)):
            self._reference(number, only is None)
        if self.report.findings:
            return
        if only is not None:
            self._killed(0, only)
            return
        for number, points in self._plan(kills):
            self._killed(number, points)
            if self.report.kills.total() >= kills:
                break
        if self.report.kills.total() < kills:
            self.report.notes.append(f"only {self.report.kills.total()} kills came before their run had ended")
        known = {kind_of(label) for run in self.references for label in run.labels()}
        if left_out := sorted(known - set(self.report.kills)):
            self.report.notes.append(f"{kills} kills left out these kinds of moments: {', '.join(left_out)}")

    def _reference(self, number: int, lines: bool) -> None:
        """Run an input undisturbed, twice."""
        runs = [self.rig.run(number, lines=lines and not again) for again in range(2)]
        self.report.runs += 2
        for run in runs:
            if run.problem is not None:
                self._found(number, "fails undisturbed", f"before anything was killed: {run.problem[1]}", run)
                return
            for kind, what in [*judge(run, run, unstable(run, run))]:
                self._found(number, kind, f"before anything was killed: {what}", run)
        shaky = unstable(*runs)
        for part, names in shaky.items():
            if not names:
                continue
            if part in ("path", "effects"):
                pair = [", ".join(run.path if part == "path" else run.done())[:200] for run in runs]
                what = f"two undisturbed runs differ in their {part}: {pair[0]}; and {pair[1]}"
                self._found(number, "not deterministic", what, runs[1])
            else:
                left_out = ", ".join(sorted(names))
                note = f"input {number}: not compared, because two undisturbed runs differ: {part} {left_out}"
                self.report.notes.append(note)
        self.references.append(runs[0])
        self.shaky.append(shaky)

    def _plan(self, kills: int) -> Iterator[tuple[int, list[Point]]]:
        """Yield inputs and moments: each kind in turn, each with moments not used before; then some used before."""
        rng = random.Random(f"crash {self.report.seed}")
        decks: dict[tuple[int, str], list[Point]] = {}
        for run in self.references:
            for label, count in sorted(run.labels().items()):
                deck = decks.setdefault((run.input, kind_of(label)), [])
                deck += [(label, number) for number in range(1, count + 1)]
        kinds = list(decks)
        used: dict[tuple[int, str], list[Point]] = {}
        sizes = itertools.cycle(SEVERAL_KILLS)
        for turn in range(4 * kills // max(1, len(kinds)) + 4):
            rng.shuffle(kinds)
            for kind in kinds:
                if not used.get(kind):
                    used[kind] = rng.sample(decks[kind], len(decks[kind]))
                points = [used[kind].pop()]
                for _ in range(next(sizes) - 1 if turn else 0):  # first each kind once
                    label, number = rng.choice(decks[rng.choice([each for each in kinds if each[0] == kind[0]])])
                    points.append((label, rng.randint(1, number)))
                yield kind[0], points

    def _killed(self, number: int, points: list[Point]) -> None:
        run = self.rig.run(number, points)
        self.report.runs += 1
        self.report.kills.update(kind_of(label) for label, _ in run.deaths)
        if not run.deaths:
            return
        for kind, what in judge(self.references[number], run, self.shaky[number]):
            self._found(number, kind, what, run)

    def _found(self, number: int, kind: str, what: str, run: CrashRun) -> None:
        imports, options = self.options
        only = f", only={run.deaths!r}" if run.deaths else ", kills=1"
        call = f"crash({self.rig.place.text!r}, [{self.rig.inputs[number]!r}]{only}{options})"
        script = "\n".join(["from backstay.testing import crash", *imports, "", f"print({call})"])
        self.report.add(CrashFinding(kind, number, what, tuple(run.deaths), script))


def kind_of(label: str) -> str:
    """Return the kind of a moment: all lines of a node are one kind."""
    return re.sub(r"^line \d+ of", "line of", label)


def script_options(**given: Any) -> tuple[list[str], str]:
    """Return the lines and the arguments by which a script passes what ``crash`` was given."""
    imports, options = [], ""
    for name, value in given.items():
        if value is None:
            continue
        module, path = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if isinstance(value, str | Mapping):
            options += f", {name}={value!r}"
        elif path.isidentifier() and module not in ("", "__main__"):
            imports.append(f"from {module} import {path}")
            options += f", {name}={path}"
        else:
            imports.append(f"# Add the {name}= of your test to the call.")
    return imports, options
