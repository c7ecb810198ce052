"""LangGraph's PostgreSQL savers on W1, in turn with ours: ``put`` is called as its core does, see ``benchmarks.peers``.

Its put stores a text channel inside the checkpoint's JSON, so the document is stored again by each, and any other
channel that changed as a whole. The sync saver does all of W1. The async one begins with the whole state of a late step
and goes on from there: what its put costs depends on the state, hardly on how many rows there are.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

import backstay
from benchmarks.bench import THREAD
from benchmarks.postgres.place import Place
from benchmarks.puts import CONFIG, Puts
from benchmarks.timing import Op, Times, clock, quiet, timed
from benchmarks.workload import State, growing_states

ASYNC_SAVES = 40


class Measured(NamedTuple):
    """W1 saved by the peer and by us, step by step in turn."""

    url: str
    schema: str
    new_bytes: int
    saves: Times
    ours: Times  # our append of the same step

    def late(self, count: int) -> tuple[Times, Times]:
        """Return our and the peer's last quarter of the first ``count`` saves: what a save costs grows with N."""
        part = slice(count - count // 4, count)
        return Times(self.ours.seconds[part]), Times(self.saves.seconds[part])


_measured: dict[tuple[Path, int], Measured] = {}


def measured(place: Place, count: int) -> Measured:
    """Return the peer's W1 store and what it took, built at the first call."""
    key = (place.bench.root, count)
    if key not in _measured:
        _measured[key] = _run(place, count)
    return _measured[key]


def _run(place: Place, count: int) -> Measured:
    schema = place.new_schema()
    url = place.plain_url(schema)
    puts, new_bytes = Puts(CONFIG), 0
    theirs: list[float] = []
    ours: list[float] = []
    with ExitStack() as stack:
        saver = stack.enter_context(PostgresSaver.from_conn_string(url))
        saver.setup()
        thread = stack.enter_context(backstay.open(place.url(place.new_schema()))).thread(THREAD)
        stack.enter_context(quiet())
        for new, state in growing_states(count):
            arguments = puts.arguments(state)
            began = time.perf_counter()
            puts.config = saver.put(*arguments)
            theirs.append(time.perf_counter() - began)
            ours.append(clock(lambda state=state: _save(thread, state)))  # type: ignore[misc]
            new_bytes += new
    return Measured(url, schema, new_bytes, Times(theirs), Times(ours))


def _save(thread: backstay.Thread, state: State) -> None:
    if len(state["messages"]) == 2:
        thread.save(state)
    else:
        thread.append({"messages": state["messages"][-2:]}, set={"scratch": state["scratch"]})


def late_async_saves(place: Place, count: int) -> tuple[Times, Times]:
    """Return what our awaited append and the peer's ``aput`` take just before step ``count``."""
    states = [dict(state) for _, state in growing_states(count)][-ASYNC_SAVES - 1 :]
    return asyncio.run(_async_saves(place, states))


async def _async_saves(place: Place, states: list[State]) -> tuple[Times, Times]:
    puts = Puts(CONFIG)
    theirs: list[float] = []
    ours: list[float] = []
    async with (
        AsyncPostgresSaver.from_conn_string(place.plain_url(place.new_schema())) as saver,
        await backstay.aopen(place.url(place.new_schema())) as store,
    ):
        await saver.setup()
        thread = store.thread(THREAD)
        await thread.save(states[0])
        puts.config = await saver.aput(*puts.arguments(states[0]))
        for state in states[1:]:
            arguments = puts.arguments(state)
            began = time.perf_counter()
            puts.config = await saver.aput(*arguments)
            theirs.append(time.perf_counter() - began)
            began = time.perf_counter()
            await thread.append({"messages": state["messages"][-2:]}, set={"scratch": state["scratch"]})
            ours.append(time.perf_counter() - began)
    return Times(ours), Times(theirs)


def loading(stack: ExitStack, url: str) -> dict[str, Op]:
    """Return ops that load the newest checkpoint: on an open connection, and with a new one each time."""
    saver = stack.enter_context(PostgresSaver.from_conn_string(url))

    def connecting(_: int) -> None:
        with PostgresSaver.from_conn_string(url) as fresh:
            fresh.get_tuple(CONFIG)

    return {"peer": timed(lambda _: saver.get_tuple(CONFIG)), "peer connecting": timed(connecting)}


def listing(url: str, count: int) -> float:
    """Return the seconds it takes to list all checkpoints, which come with their states."""
    with PostgresSaver.from_conn_string(url) as saver:
        began = time.perf_counter()
        assert sum(1 for _ in saver.list(CONFIG)) == count
        return time.perf_counter() - began
