"""The processes that ``crash`` kills: a server that imports the user's module once, and forks one process per life.

A *life* is one process that starts a run or resumes it, until the run ends, waits for a person, or the process dies.
A *moment* is a place where a process can die: before and after each write of the store, at the start and the end of
node functions and of the functions of effects and calls, where an effect returns to its node, and at each line of a
node's function. A moment has a label, and is named by its label and how often that label came before. Each life logs
its moments, and all that the judge must know, in a file outside the store: one write to the end of it per line.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import signal
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backstay.codec import decode, encode
from backstay.engine.build import BuiltGraph, all_graphs
from backstay.engine.graph import Graph
from backstay.engine.nodes import Node, NodeFunction, required_count
from backstay.errors import EffectUnknown, EncodeError, InvalidInput
from backstay.model.decision import Decision
from backstay.model.runs import Outcome
from backstay.operations.cursor import Handle
from backstay.operations.drivers import Steps
from backstay.store.base import Backend
from backstay.store.leases import LeaseRequest
from backstay.store.open import open_backend
from backstay.store.records import Record
from backstay.thread import calls, effects
from backstay.thread.effects import EffectCall, RunOperation, idempotency_key_of
from backstay.thread.store import AsyncStore, Store, make_services
from backstay.thread.thread import AsyncThread, Thread

THREAD = "crash"
BY = "crash"
"""The person who answers the questions of a run, by name."""

FAILED = 70
"""Exit code of a life that could not report its result."""

WRITES = {
    "acquire": "taking the lease",
    "release": "releasing the lease",
    "claim": "claiming runs",
    "reserve": "reserving streams",
    "commit": "checkpoint",
    "commit_all": "checkpoints",
    "write": "pending write",
    "tag": "tags",
    "delete": "deletion",
    "delete_thread": "deletion of a thread",
    "compact": "compaction",
    "rebuild": "rebuild",
    "restore": "restore",
    "quarantine": "quarantine",
    "put_record": "record",
    "drop_records": "deletion of records",
    "renew": "",  # a heartbeat of another thread, at any time: no moment of the run
}
"""The verbs of a store that change it, and what a moment calls them. A record is called what the write does to it."""

RECORDS = {
    ("effect", "new"): "intent",
    ("effect", "change"): "new intent",
    ("effect", "close"): "receipt",
    ("effect", "result"): "result of a call",
    ("interrupt", "new"): "question",
    ("interrupt", "change"): "decision",
    ("interrupt", "close"): "use of a decision",
}

Target = Graph | Callable[..., Any]
Point = tuple[str, int]  # the label of a moment, and which one of this label


def pack(value: object) -> str:
    """Return any value that a store can hold as text."""
    return base64.b64encode(encode(value)).decode()


def unpack(text: str) -> Any:
    """Return the value that ``pack`` made a text from."""
    return decode(base64.b64decode(text))


# Moments ----------------------------------------------------------------------------------------------------------


_calls_around: contextvars.ContextVar[int] = contextvars.ContextVar("calls_around", default=0)
"""How many durable calls the code that runs here is inside of."""


class Moments:
    """Logs the moments of a life, and ends the process at the chosen one.

    If the function of another effect or call runs at that moment, in a parallel branch, the process dies when it is
    done. Otherwise no one could say whether the effect was done.
    """

    def __init__(self, path: str, point: Point | None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._point = None if point is None else (point[0], point[1])  # JSON makes it a list
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._running = 0  # functions of effects and calls
        self._is_due = False

    def log(self, *words: object) -> None:
        """Add a line, in one write."""
        os.write(self._file, (json.dumps(words) + "\n").encode())

    def at(self, label: str, starts: bool = False) -> None:
        """Be at a moment: die if this is the chosen one. After it, a function may start."""
        with self._lock:
            self._counts[label] += 1
            self._is_due |= (label, self._counts[label]) == self._point
            self.log("moment", label)
            if self._is_due and self._running <= _calls_around.get():
                self.log("dies", label)
                os.kill(os.getpid(), signal.SIGKILL)
            self._running += starts

    def ended(self) -> None:
        """Note that a function has ended."""
        with self._lock:
            self._running -= 1


class WatchedStore:
    """A store whose writes are moments."""

    def __init__(self, backend: Backend, moments: Moments) -> None:
        self._backend = backend
        self._moments = moments

    def __getattr__(self, verb: str) -> Any:
        done = getattr(self._backend, verb)
        if not WRITES.get(verb):
            return done

        def call(*arguments: Any, **options: Any) -> Any:
            name = record_name(arguments[0]) if verb == "put_record" else WRITES[verb]
            if verb in ("acquire", "claim"):
                request = next(each for each in arguments if isinstance(each, LeaseRequest))
                self._moments.log("token", request.token)
            self._moments.at(f"before {name}")
            answer = done(*arguments, **options)
            if verb == "write":
                self._moments.log("written", [[row.channel, row.task_id, row.index] for row in arguments[2]])
            self._moments.at(f"after {name}")
            return answer

        return call


def record_name(record: Record) -> str:
    """Return what a write to a record does."""
    is_new = not record.version
    step = ("new" if is_new else "change") if record.open else ("result" if is_new else "close")
    return RECORDS.get((record.kind, step), f"{record.kind} record")


# User functions ---------------------------------------------------------------------------------------------------


def watch_graphs(moments: Moments, lines: bool) -> None:
    """Make the start and the end of the node functions of every graph moments, and their lines if wanted."""
    codes: dict[types.CodeType, str] = {}
    watched: dict[int, Node] = {}
    build = Graph.build

    def watch(self: Graph) -> BuiltGraph:
        built = build(self)
        for node in [node for each in all_graphs(built) for node in each.nodes.values() if id(node) not in watched]:
            watched[id(node)] = node
            for role in ("body", "fallback"):
                function: NodeFunction | None = getattr(node, role)
                if function is not None:
                    object.__setattr__(node, role, watched_node(node, function, moments))
                    code = getattr(inspect.unwrap(function.function), "__code__", None)
                    codes.update({} if code is None else {code: node.name})
        return built

    Graph.build = watch  # type: ignore[method-assign, assignment]
    if not lines:
        return

    def at_line(frame: types.FrameType, event: str, _: object) -> Any:
        if event == "line":
            moments.at(f"line {frame.f_lineno} of node {codes[frame.f_code]}")
        return at_line

    def at_call(frame: types.FrameType, event: str, _: object) -> Any:
        return at_line if frame.f_code in codes else None

    threading.settrace(at_call)
    sys.settrace(at_call)


def watched_node(node: Node, body: NodeFunction, moments: Moments) -> NodeFunction:
    """Return a node's function whose start and end are moments."""
    function, takes = body.function, 2 if body.wants_context else 1

    def enter(ctx: Any) -> None:
        moments.log("start", ctx.position, ctx.attempt)
        moments.at(f"start of node {node.name}")

    def leave(ctx: Any) -> None:
        moments.log("end", ctx.position)
        moments.at(f"end of node {node.name}")

    def run(*given: Any) -> Any:
        enter(given[1])
        returned = function(*given[:takes])
        leave(given[1])
        return returned

    async def arun(*given: Any) -> Any:
        enter(given[1])
        returned = await function(*given[:takes])
        leave(given[1])
        return returned

    return NodeFunction(arun if body.is_async else run, body.is_async, True)


def watch_calls(moments: Moments) -> None:
    """Make the steps of effects and durable calls moments, in nodes, turns and threads: all are executed in one way."""
    execution = effects.execution

    def watch(handle: Handle, run: RunOperation, call: EffectCall, awaits: bool = False) -> Steps[Any]:
        act = WatchedCall(moments, call, idempotency_key_of(handle.cursor, call.key))
        result = yield from execution(handle, run, replace(call, fn=act.watched()), awaits)
        moments.log("got", act.what, act.name)
        moments.at(f"after {act.label}")
        return result

    for module in (effects, calls):
        setattr(module, execution.__name__, watch)


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """An effect or a durable call whose function is watched."""

    moments: Moments
    call: EffectCall
    key: str  # the idempotency key, by which a question about the effect names it

    @property
    def what(self) -> str:
        """Return "call" or "effect"."""
        return "call" if self.call.is_call else "effect"

    @property
    def name(self) -> str:
        """Return its name in the run."""
        return name_of_call(self.call.key)

    @property
    def label(self) -> str:
        """Return what its moments are called: the name that the user gave it, without its place and number."""
        return f"{self.what} {re.split('[:/]', self.name)[-1].partition('#')[0]}"

    def watched(self) -> Callable[..., Any]:
        """Return its function, which logs when it starts and when it is done."""
        fn = self.call.fn

        def run(*args: Any, **options: Any) -> Any:
            with self.begun():
                result = fn(*args, **options)
            return finish(result) if inspect.isawaitable(result) else self.end(result)

        async def arun(*args: Any, **options: Any) -> Any:
            with self.begun():
                result = await fn(*args, **options)
            return self.end(result)

        async def finish(answer: Awaitable[Any]) -> Any:
            with self.running():
                result = await answer
            return self.end(result)

        return functools.update_wrapper(arun if inspect.iscoroutinefunction(fn) else run, fn)

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Log that the function is about to run, and run it."""
        self.moments.log("began", self.what, self.name)
        self.moments.at(f"start of {self.label}", starts=True)
        with self.running():
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the process die in here only if this is a call, which is simply made again."""
        outside = _calls_around.set(_calls_around.get() + self.call.is_call)
        try:
            yield
        except BaseException:
            self.moments.ended()
            raise
        finally:
            _calls_around.reset(outside)

    def end(self, result: Any) -> Any:
        """Log that the function is done, which no store knows yet; return its result."""
        try:
            packed = pack(result)
        except EncodeError:
            packed = ""
        self.moments.log("done", self.what, self.name, self.call.idempotent, self.key, packed)
        self.moments.ended()
        self.moments.at(f"end of {self.label}")
        return result


def name_of_call(key: str) -> str:
    """Return the key of an effect or call without the id of its run, so that it is the same in every run."""
    return re.sub(r"^[^:/]+:(?=[^:]*/[^:]*#\d)", "", key)


# One life ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeRequest:
    """The work of one process."""

    life: int
    url: str
    namespace: str
    folder: str  # of the run: its log, what it prints, its results
    input: str  # packed
    answers: Mapping[str, str]  # decisions by interrupt id, packed
    settled: Mapping[str, str]  # results of effects by idempotency key, packed; "" if the effect was not done
    point: Point | None  # where to die
    lines: bool  # whether lines of node functions are moments
    timeout_s: int


def live(target: Target, request: LifeRequest) -> None:
    """Start or resume the run, and leave a file that says how it ended."""
    signal.alarm(request.timeout_s)
    os.chdir(Path(request.folder, "work"))
    moments = Moments(f"{request.folder}/log", request.point)
    moments.log("life", request.life)
    backend: Any = WatchedStore(open_backend(request.url), moments)
    services = make_services(request.namespace, None)
    stores = Store(backend, services), AsyncStore(backend, services)
    answers = {name: Decision.from_plain(unpack(text)) for name, text in request.answers.items()}
    try:
        thread, twin = stores[0].thread(THREAD), stores[1].thread(THREAD)
        settle(thread, request.settled)
        graph = target if isinstance(target, Graph) else None if is_program(target) else target()
        watch_calls(moments)
        watch_graphs(moments, request.lines)
        given = unpack(request.input)
        if graph is not None:
            told = run_graph(graph, thread, twin, given, answers)
        else:
            for record in [each for each in thread.interrupts() if each.decision is None and each.id in answers]:
                thread.decide(record, answers[record.id], by=BY)
            if inspect.iscoroutinefunction(target):
                asyncio.run(target(twin, given))
            else:
                target(thread, given)  # type: ignore[operator]  # it is no graph here
            told = {"status": "returned"}
    except Exception as error:
        unknown = error.record.idempotency_key if isinstance(error, EffectUnknown) else ""
        told = {"status": "raised", "error": text_of(error), "unknown": unknown}
    finally:
        sys.settrace(None)
    Path(request.folder, f"result-{request.life}").write_text(json.dumps(told), encoding="utf-8")


def is_program(target: Target) -> bool:
    """Return whether a target is a program of a thread and an input, not a function that returns a graph."""
    return not isinstance(target, Graph) and required_count(target) == 2


def wants_loop(graph: Graph) -> bool:
    """Return whether any function of a graph is a coroutine function, so that it is run with ``aopen``."""
    nodes = [node for built in all_graphs(graph.build()) for node in built.nodes.values()]
    functions = [each for node in nodes for each in (node.body, node.fallback) if each is not None]
    return any(each.is_async for each in functions)


def run_graph(
    graph: Graph, thread: Thread, twin: AsyncThread, given: Any, answers: Mapping[str, Decision]
) -> dict[str, object]:
    """Start the run of a graph, or resume it; return how it ended."""
    is_new = thread.latest() is None
    if wants_loop(graph):
        result = asyncio.run(graph.run(twin, given) if is_new else graph.resume(twin, answers or None, by=BY))
    else:
        result = graph.run_sync(thread, given) if is_new else graph.resume_sync(thread, answers or None, by=BY)
    if result.error is not None:
        return {"status": "raised", "error": text_of(result.error)}
    return {"status": result.status.value}


def settle(thread: Thread, settled: Mapping[str, str]) -> None:
    """Record the outcomes of effects that are in doubt."""
    for record in list(thread.effects()) if settled else ():
        if record.outcome_unknown and record.idempotency_key in settled:
            result = settled[record.idempotency_key]
            thread.settle(record, Outcome.done(unpack(result)) if result else Outcome.not_done(), by=BY)


def text_of(error: BaseException) -> str:
    """Return an error with the errors that it came from, on one line each."""
    lines: list[str] = []
    while error is not None and len(lines) < 4:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__  # type: ignore[assignment]  # None ends the loop
    return "\n".join(lines)


# The server -------------------------------------------------------------------------------------------------------

_serves = False


def is_victim() -> bool:
    """Return whether this process is one of those that are killed."""
    return _serves


def load(module: str, file: str, name: str) -> Target:
    """Import the module of a target, by name or from its file, and return the target."""
    try:
        if not module:
            raise ModuleNotFoundError(name=module)
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not file or (error.name or "") not in ("", module, module.partition(".")[0]):
            raise
        module = module or Path(file).stem
        found = types.ModuleType(module)
        found.__file__, found.__package__ = file, module.rpartition(".")[0]
        sys.modules[module] = found
        importlib.machinery.SourceFileLoader(module, file).exec_module(found)
    target: Any = functools.reduce(getattr, name.split("."), found)
    if isinstance(target, Graph) or callable(target):
        return target  # type: ignore[no-any-return]  # it is what was checked
    raise InvalidInput(f"{name!r} is not a graph, nor a function: it is {type(target).__name__}")


def serve() -> None:
    """Import the target, then fork one process per request, until standard input ends."""
    global _serves
    _serves = True
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's module prints does not mix with the answers
    config = json.loads(sys.stdin.readline() or "{}")
    sys.path[:] = config["path"]
    try:
        target, problem = load(config["module"], config["file"], config["name"]), ""
    except BaseException as error:
        target, problem = Graph("none"), text_of(error)
    _answer(told, {"problem": problem})
    for line in sys.stdin:
        request = LifeRequest(**json.loads(line))
        pid = os.fork()
        if not pid:
            become_victim(target, request)
        _answer(told, {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def _answer(told: Any, answer: Mapping[str, object]) -> None:
    told.write(json.dumps(answer) + "\n")
    told.flush()


def become_victim(target: Target, request: LifeRequest) -> None:
    """Live one life in a process that was forked for it, and end it."""
    code = FAILED
    try:
        printed = os.open(f"{request.folder}/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        live(target, request)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
