"""LangGraph's PostgreSQL savers for many at once: one saver, one pool, as its documentation says."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from benchmarks.concurrency import small_states
from benchmarks.postgres.place import Place
from benchmarks.puts import Puts, config_of

ARGUMENTS: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}


def savers(place: Place, stack: ExitStack, size: int) -> list[Callable[[], object]]:
    """Return functions that put a small state, each in a thread of its own."""
    url = place.plain_url(place.new_schema())
    pool: Any = ConnectionPool(url, kwargs=ARGUMENTS, min_size=size, max_size=size, open=True)
    saver = PostgresSaver(stack.enter_context(pool))
    saver.setup()

    def one(number: int) -> Callable[[], object]:
        puts, states = Puts(config_of(f"t{number}"), fixed=()), itertools.cycle(small_states())

        def save() -> None:
            puts.config = saver.put(*puts.arguments(next(states)))

        return save

    return [one(number) for number in range(size)]


async def async_savers(place: Place, stack: AsyncExitStack, size: int) -> list[Callable[[], Awaitable[object]]]:
    """Return functions that put a small state and are awaited, each in a thread of its own."""
    url = place.plain_url(place.new_schema())
    pool: Any = AsyncConnectionPool(url, kwargs=ARGUMENTS, min_size=size, max_size=size, open=False)
    saver = AsyncPostgresSaver(await stack.enter_async_context(pool))
    await saver.setup()

    def one(number: int) -> Callable[[], Awaitable[object]]:
        puts, states = Puts(config_of(f"t{number}"), fixed=()), itertools.cycle(small_states())

        async def save() -> None:
            puts.config = await saver.aput(*puts.arguments(next(states)))

        return save

    return [one(number) for number in range(size)]
