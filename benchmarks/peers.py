"""LangGraph's SQLite savers on W1: bytes, saves, loads and lists.

Plain channels: ``put`` is called directly with the full channel values of every step, as LangGraph's core does; what
the core itself costs, and its ``put_writes``, are left out in their favour. DeltaChannel: a real graph with
``durability="sync"``, since its data is in the writes; its save is the time inside ``put`` and ``put_writes`` a step.

Python's sqlite3 leaves synchronous at FULL, so every put is as durable as our saves.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import aiosqlite
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

import backstay
from backstay.codec import encode
from benchmarks.bench import THREAD, Bench
from benchmarks.loads import cold
from benchmarks.memory import Save
from benchmarks.puts import CONFIG, Puts
from benchmarks.table import Row
from benchmarks.timing import Op, Times, clock, quiet, timed
from benchmarks.workload import Conversation, Message, State, growing_states

DELTA_SECONDS_MAX = 60
REPEATS = 7
SYNC, ASYNC, DELTA = "SqliteSaver", "AsyncSqliteSaver", "SqliteSaver + DeltaChannel"


class Measured(NamedTuple):
    """What one peer needed for W1."""

    path: Path
    new_bytes: int
    saves: Times
    ours: Times  # our append of the same step, in turn with it; empty where there is none
    load: float  # seconds of get_tuple, or get_state for DeltaChannel
    listing: float  # seconds of all metadata, which for LangGraph is all states


_built: dict[tuple[Path, str, int], Measured] = {}


def run(bench: Bench) -> None:
    """Measure the three savers; the last quarter of the saves, since a save's cost grows with N."""
    bench.table.begin(
        "peers: LangGraph on W1. The peer is in the left column, ours in the next one",
        "save = p50 / p99 of the last quarter of the steps; ours took turns with it (not for DeltaChannel)",
        "load = get_tuple (get_state for DeltaChannel) on an open connection, median of 7; list = saver.list, once",
    )
    for count in (100, 300, 1000):
        for kind in (SYNC, ASYNC):
            _report(bench, kind, count, measured(bench, kind, count))
    for count in (100, 300, 1000):
        began = time.monotonic()
        _report(bench, DELTA, count, measured(bench, DELTA, count))
        if (time.monotonic() - began) * 6 > DELTA_SECONDS_MAX:
            bench.table.note(f"{DELTA}: no larger N, it would take more than {DELTA_SECONDS_MAX} s")
            break


def _report(bench: Bench, kind: str, count: int, peer: Measured) -> None:
    built = bench.w1(count)
    label = f"{kind}, N={count:,}"
    table = bench.table
    table.add(Row(f"{label}: bytes / new", peer.path.stat().st_size, "B", None, peer.new_bytes, "new"))
    late = _late(peer.saves)
    ours = _late(peer.ours).p50 if peer.ours.seconds else None
    table.add(Row("... save", late.p50, "s", late.p99, ours, "our append"))
    fresh = cold(built.path)
    load = Times([fresh(number) for number in range(REPEATS)]).p50
    with backstay.open(built.path) as store:
        listing = _median(lambda: list(store.thread(THREAD).history(limit=count)))
    table.add(Row("... load latest", peer.load, "s", None, load, "ours, cold"))
    table.add(Row(f"... list {count:,}", peer.listing, "s", None, listing, "ours"))


def _late(times: Times) -> Times:
    return Times(times.seconds[-max(1, len(times.seconds) // 4) :])


def measured(bench: Bench, kind: str, count: int) -> Measured:
    """Return a peer's W1 store and what it took, built at the first call."""
    key = (bench.root, kind, count)
    if key not in _built:
        path = bench.new_path(".sqlite")
        if kind == SYNC:
            _built[key] = _plain(bench, path, count)
        elif kind == ASYNC:
            _built[key] = asyncio.run(_plain_async(bench, path, count))
        else:
            _built[key] = _delta(path, count)
    return _built[key]


def loading(stack: ExitStack, bench: Bench, count: int) -> dict[str, Op]:
    """Return ops that load the newest checkpoint of the sync saver: with a new connection each time, and with one."""
    path = measured(bench, SYNC, count).path
    saver = stack.enter_context(SqliteSaver.from_conn_string(str(path)))

    def cold(_: int) -> float:
        with SqliteSaver.from_conn_string(str(path)) as fresh:
            return clock(lambda: fresh.get_tuple(CONFIG))

    return {"peer warm": timed(lambda _: saver.get_tuple(CONFIG)), "peer cold": cold}


def loading_state(stack: ExitStack, bench: Bench, state: State) -> Op:
    """Return an op that loads a state that was put once, on one connection."""
    saver = stack.enter_context(SqliteSaver.from_conn_string(str(bench.new_path(".sqlite"))))
    saver.put(*Puts(CONFIG).arguments(state))
    return timed(lambda _: saver.get_tuple(CONFIG))


# Plain channels -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def plain_saver(path: Path) -> Iterator[Save]:
    """Give a function that saves a whole state with the sync saver."""
    puts = Puts(CONFIG)
    with SqliteSaver.from_conn_string(str(path)) as saver:

        def save(state: State) -> None:
            puts.config = saver.put(*puts.arguments(state))

        yield save


class _Turn:
    """Our own append of the same steps, to take turns with a peer."""

    def __init__(self, stack: ExitStack, bench: Bench) -> None:
        self._thread = stack.enter_context(backstay.open(bench.new_path())).thread(THREAD)
        self.seconds: list[float] = []

    def save(self, state: State) -> None:
        if not self.seconds:
            self.seconds.append(clock(lambda: self._thread.save(state)))
            return
        change = {"messages": state["messages"][-2:]}
        self.seconds.append(clock(lambda: self._thread.append(change, set={"scratch": state["scratch"]})))


def _plain(bench: Bench, path: Path, count: int) -> Measured:
    puts, taken, new_bytes = Puts(CONFIG), [], 0
    with ExitStack() as stack:
        turn = _Turn(stack, bench)
        saver = stack.enter_context(SqliteSaver.from_conn_string(str(path)))
        stack.enter_context(quiet())
        for new, state in growing_states(count):
            arguments = puts.arguments(state)
            began = time.perf_counter()
            puts.config = saver.put(*arguments)
            taken.append(time.perf_counter() - began)
            turn.save(state)
            new_bytes += new
    with SqliteSaver.from_conn_string(str(path)) as saver:
        load = _median(lambda: saver.get_tuple(CONFIG))
        listing = clock(lambda: _count(saver.list(CONFIG)))
    return Measured(path, new_bytes, Times(taken), Times(turn.seconds), load, listing)


def _median(thing: Callable[[], object]) -> float:
    return Times([clock(thing) for _ in range(REPEATS)]).p50


def _count(found: Iterator[Any]) -> int:
    return sum(1 for _ in found)


async def _plain_async(bench: Bench, path: Path, count: int) -> Measured:
    puts, taken, new_bytes = Puts(CONFIG), [], 0
    with ExitStack() as stack:
        turn = _Turn(stack, bench)
        async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
            for new, state in growing_states(count):
                arguments = puts.arguments(state)
                began = time.perf_counter()
                puts.config = await saver.aput(*arguments)
                taken.append(time.perf_counter() - began)
                turn.save(state)
                new_bytes += new
    async with aiosqlite.connect(path) as connection:
        saver = AsyncSqliteSaver(connection)
        loads = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            await saver.aget_tuple(CONFIG)
            loads.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert len([found async for found in saver.alist(CONFIG)]) == count
        listing = time.perf_counter() - began
    return Measured(path, new_bytes, Times(taken), Times(turn.seconds), Times(loads).p50, listing)


# DeltaChannel ---------------------------------------------------------------------------------------------------------


def _extend(state: list[Message], writes: Sequence[list[Message]]) -> list[Message]:
    return [*(state or []), *(item for write in writes for item in write)]


class DeltaState(TypedDict):
    """W1 with the messages in a DeltaChannel."""

    document: str
    messages: Annotated[list[Message], DeltaChannel(_extend)]
    scratch: dict[str, Any]


class _TimedSaver(SqliteSaver):
    """Adds up the time spent in it, by step; put_writes come from other threads."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.seconds: list[float] = [0.0]
        self._guard = threading.Lock()

    def put(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = super().put(*arguments, **named)
        with self._guard:
            self.seconds[-1] += time.perf_counter() - began
            self.seconds.append(0.0)
        return result

    def put_writes(self, *arguments: Any, **named: Any) -> None:
        began = time.perf_counter()
        super().put_writes(*arguments, **named)
        with self._guard:
            self.seconds[-1] += time.perf_counter() - began


def _delta(path: Path, count: int) -> Measured:
    conversation = Conversation()
    steps = list(conversation.steps(count))
    left = iter(steps)

    def agent(_: DeltaState) -> dict[str, Any]:
        step = next(left)
        return {"messages": step.messages, "scratch": step.scratch}

    def route(state: DeltaState) -> str:
        return END if state["scratch"]["turn"] == count else "agent"

    builder: Any = StateGraph(DeltaState)
    builder.add_node("agent", agent)
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", route, {END: END, "agent": "agent"})
    with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        saver = _TimedSaver(connection)
        graph = builder.compile(checkpointer=saver)
        first = {"document": conversation.document, "messages": [], "scratch": {"turn": 0}}
        graph.invoke(first, {**CONFIG, "recursion_limit": count + 10}, durability="sync")
    with SqliteSaver.from_conn_string(str(path)) as fresh:
        graph = builder.compile(checkpointer=fresh)
        load = _median(lambda: graph.get_state(CONFIG))
        assert len(graph.get_state(CONFIG).values["messages"]) == 2 * count
        listing = clock(lambda: _count(fresh.list(CONFIG)))
    new_bytes = len(encode(conversation.document)) + sum(len(step.new) for step in steps)
    return Measured(path, new_bytes, Times(saver.seconds[:-1]), Times([]), load, listing)
