"""Many savers at once in PostgreSQL, each on a thread of its own, through one store whose pool has room for all."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, NamedTuple

from psycopg_pool import ConnectionPool

import backstay
from backstay.codec import encode
from benchmarks.concurrency import small_states
from benchmarks.postgres.place import Place, insert
from benchmarks.table import Row, Target
from benchmarks.timing import quiet

SAVES_EACH = {1: 100, 8: 25, 64: 6}
"""How many saves each saver does in a round, by how many savers there are."""

ONE, SOME, MANY = SAVES_EACH
SCALES = Target(2.0, at_least=True)
OURS, RAW, PEER = "ours", "bare inserts", "PostgresSaver"
ASYNC_OURS, ASYNC_PEER = "ours, awaited", "AsyncPostgresSaver"


class Team(NamedTuple):
    """Some savers of one kind; each of ``saves`` does one small save when called."""

    kind: str
    saves: Sequence[Callable[[], Any]]

    @property
    def size(self) -> int:
        """How many savers there are."""
        return len(self.saves)


Rates = dict[tuple[str, int], float]


def run(place: Place) -> None:
    """Measure threads, then tasks."""
    place.bench.table.begin(
        f"PostgreSQL concurrency: {ONE}, {SOME} and {MANY} savers, small saves a second",
        "each saver has a thread of its own; they share one store, or one of LangGraph's, with a connection for each",
        "rounds of all teams alternate; medians of the rounds",
    )
    rounds = place.bench.pick(7, 2)
    _report(place, _by_threads(place, rounds), "savers", OURS, PEER)
    _report(place, asyncio.run(_by_tasks(place, rounds)), "tasks", ASYNC_OURS, ASYNC_PEER)


def _report(place: Place, rates: Rates, noun: str, ours: str, peer: str) -> None:
    for size in SAVES_EACH:
        name = f"{size} {noun if size > 1 else noun[:-1]}"
        rate = rates[ours, size]
        if size > ONE:
            target = SCALES if (ours, size) == (OURS, SOME) else None
            place.bench.table.add(Row(name, rate, "/s", None, rates[ours, ONE], f"one {noun[:-1]}", target=target))
        for other in (RAW, peer):
            if (other, size) in rates:
                place.bench.table.add(Row(name, rate, "/s", None, rates[other, size], other))
    if (RAW, SOME) in rates:
        name = f"for context: bare inserts, {SOME} connections"
        place.bench.table.add(Row(name, rates[RAW, SOME], "/s", None, rates[RAW, ONE], "one connection"))


# Threads ----------------------------------------------------------------------------------------------------------


def _by_threads(place: Place, rounds: int) -> Rates:
    with ExitStack() as stack:
        teams = [make(place, stack, size) for size in SAVES_EACH for make in (_ours, _raw)]
        if place.has_peers:
            crowd = importlib.import_module("benchmarks.postgres.crowd")
            teams += [Team(PEER, crowd.savers(place, stack, size)) for size in SAVES_EACH]
        pool = stack.enter_context(ThreadPoolExecutor(MANY))
        stack.enter_context(quiet())
        taken: dict[tuple[str, int], list[float]] = {(team.kind, team.size): [] for team in teams}
        for number in range(rounds + 1):
            for team in teams:
                count = SAVES_EACH[team.size]
                began = time.perf_counter()
                list(pool.map(partial(_repeat, count), team.saves))
                if number:  # the first round opens connections and makes threads
                    taken[team.kind, team.size].append(team.size * count / (time.perf_counter() - began))
    return {key: statistics.median(rates) for key, rates in taken.items()}


def _repeat(count: int, save: Callable[[], object]) -> None:
    for _ in range(count):
        save()


def _ours(place: Place, stack: ExitStack, size: int) -> Team:
    store = stack.enter_context(backstay.open(place.url(place.new_schema(), pool=size)))

    def saver(number: int) -> Callable[[], object]:
        thread, states = store.thread(f"t{number}"), itertools.cycle(small_states())
        return lambda: thread.save(next(states))

    return Team(OURS, [saver(number) for number in range(size)])


def _raw(place: Place, stack: ExitStack, size: int) -> Team:
    url = place.plain_url(place.new_schema())
    pool = stack.enter_context(
        ConnectionPool(url, kwargs={"autocommit": True}, min_size=size, max_size=size, open=True)
    )
    with pool.connection() as connection:
        connection.execute("CREATE TABLE row (data bytea)")

    def save(data: bytes) -> None:
        with pool.connection() as connection:
            insert(connection, data)

    return Team(RAW, [partial(save, encode(small_states()[0]))] * size)


# Tasks ------------------------------------------------------------------------------------------------------------


async def _by_tasks(place: Place, rounds: int) -> Rates:
    async with AsyncExitStack() as stack:
        teams = [await _ours_async(place, stack, size) for size in SAVES_EACH]
        if place.has_peers:
            crowd = importlib.import_module("benchmarks.postgres.crowd")
            teams += [Team(ASYNC_PEER, await crowd.async_savers(place, stack, size)) for size in SAVES_EACH]
        stack.enter_context(quiet())
        taken: dict[tuple[str, int], list[float]] = {(team.kind, team.size): [] for team in teams}
        for number in range(rounds + 1):
            for team in teams:
                count = SAVES_EACH[team.size]
                began = time.perf_counter()
                await asyncio.gather(*(_repeat_async(count, save) for save in team.saves))
                if number:
                    taken[team.kind, team.size].append(team.size * count / (time.perf_counter() - began))
    return {key: statistics.median(rates) for key, rates in taken.items()}


async def _repeat_async(count: int, save: Callable[[], Awaitable[object]]) -> None:
    for _ in range(count):
        await save()


async def _ours_async(place: Place, stack: AsyncExitStack, size: int) -> Team:
    url = place.url(place.new_schema(), pool=size)
    store = await stack.enter_async_context(await backstay.aopen(url))

    def saver(number: int) -> Callable[[], Awaitable[object]]:
        thread, states = store.thread(f"t{number}"), itertools.cycle(small_states())
        return lambda: thread.save(next(states))

    return Team(ASYNC_OURS, [saver(number) for number in range(size)])
