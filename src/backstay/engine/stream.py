"""A run as a stream of events, read while it happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from backstay.engine.event import Event
from backstay.engine.result import Result

Watched = Callable[[Callable[[Event], None]], Awaitable[Result]]


async def stream(run: Watched) -> AsyncIterator[Event]:
    """Yield a run's events; who stops reading ends the run, which can be resumed."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(what: Event) -> None:
        # Plain nodes run in threads of their own, and tell from there.
        loop.call_soon_threadsafe(events.put_nowait, what)

    running = asyncio.ensure_future(run(put))
    running.add_done_callback(lambda _: loop.call_soon(events.put_nowait, None))
    try:
        while (found := await events.get()) is not None:
            yield found
        await running
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
