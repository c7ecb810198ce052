"""Programs that get a signal at a chosen moment of a graph's run: ``python -m support.engine.signalled <name> <url>``.

Each prints one line of JSON: the exception that the caller of ``run_sync`` saw, or the status of the run; the state
that was stored at that moment; what the program noted; and how the run ended when it was resumed at once, which shows
that its lease was released.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import backstay
from backstay import Graph
from backstay.engine import Cancellation
from backstay.engine.events import CheckpointSaved, Event
from backstay.engine.triggers import manual

Send = Callable[[], None]

STEPS, CHOSEN = 6, 3
notes: list[str] = []
sent: list[int] = []


class OwnInterrupt(BaseException):
    """What a program's own handler may raise."""


def once(number: int) -> None:
    """Send this process a signal, the first time only; its handler runs at once."""
    if number not in sent:
        sent.append(number)
        signal.raise_signal(number)


def raising(error: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    return handler


def chain(at_chosen: Callable[[], Any]) -> Graph:
    """Return a graph of one node in a loop, which does something in one of its visits."""
    graph = Graph("g")

    def step(state: dict[str, int]) -> dict[str, int]:
        if state["n"] == CHOSEN:
            try:
                at_chosen()
            except BaseException as error:
                notes.append(f"{type(error).__name__} in the node")
                raise
        return {"n": state["n"] + 1}

    async def async_step(state: dict[str, int]) -> dict[str, int]:
        if state["n"] == CHOSEN:
            await at_chosen()
        return {"n": state["n"] + 1}

    graph.node("step", async_step if asyncio.iscoroutinefunction(at_chosen) else step)
    graph.edge("step", "step", when=lambda state: state["n"] < STEPS, name="more")
    graph.start("step")
    graph.end("step")
    return graph


def report(graph: Graph, url: str, **options: Any) -> None:
    """Run a graph, resume it at once through another handle, and print how both went."""
    with backstay.open(url) as store:
        thread = store.thread("t")
        try:
            ended = graph.run_sync(thread, {"n": 0}, **options).status.value
        except BaseException as error:
            ended = type(error).__name__
        latest = store.thread("t").latest()
        assert latest is not None
        options.pop("cancel", None)
        resumed = "is over" if latest.is_over else graph.resume_sync(store.thread("t")).status.value
        restored = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        said = {"ended": ended, "n": latest.state["n"], "resumed": resumed, "restored": restored, "notes": notes}
    sys.stdout.write(json.dumps(said))


# Ctrl-C -----------------------------------------------------------------------------------------------------------


def plain(url: str) -> None:
    """In a plain node."""
    report(chain(lambda: once(signal.SIGINT)), url)


def plain_unsaved(url: str) -> None:
    """In a plain node, when the trigger has skipped all commits so far."""
    report(chain(lambda: once(signal.SIGINT)), url, trigger=manual())


def between(url: str) -> None:
    """In code between two plain nodes."""

    def on_event(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.step == CHOSEN:
            once(signal.SIGINT)

    report(chain(lambda: None), url, on_event=on_event)


def at_the_end(url: str) -> None:
    """When the last checkpoint is stored already."""

    def on_event(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.trigger == "end":
            once(signal.SIGINT)

    report(chain(lambda: None), url, on_event=on_event)


def asynchronous(url: str) -> None:
    """In an async node that waits."""

    async def wait() -> None:
        if not sent:
            once(signal.SIGINT)
            notes.append("not raised in the node")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                notes.append("cleaned up")

    report(chain(wait), url)


def twice(url: str) -> None:
    """In an async node that does not end at the first Ctrl-C."""

    async def wait() -> None:
        if not sent:
            once(signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                await asyncio.Event().wait()

    report(chain(wait), url)


def fan_out(url: str) -> None:
    """While plain nodes run in threads, one of which hangs."""
    graph = Graph("g")
    graph.node("split", lambda state: {"items": [0, 1, 2]})

    def work(state: Any, ctx: Any) -> None:
        if ctx.item == 1 and not sent:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()

    graph.node("work", work)
    graph.map("split", "work", over="items")
    graph.start("split")
    report(graph, url)


def nested(url: str) -> None:
    """In a plain node of a graph that a plain node of another graph runs."""
    inner = chain(lambda: once(signal.SIGINT))

    def run_inner() -> None:
        with backstay.open(url) as store:
            thread = store.thread("inner")
            if thread.latest() is None:
                inner.run_sync(thread, {"n": 0})
            notes.append(inner.resume_sync(thread).status.value)

    report(chain(run_inner), url)


def nested_asyncio(url: str) -> None:
    """In a coroutine that a plain node runs with asyncio.run."""

    async def client() -> None:
        if not sent:
            try:
                once(signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                notes.append("cleaned up")

    report(chain(lambda: asyncio.run(client())), url)


def own_handler(url: str) -> None:
    """When the program has a handler for Ctrl-C: it is called, and nothing else happens."""

    def handler(number: int, frame: FrameType | None) -> None:
        notes.append("own handler")

    signal.signal(signal.SIGINT, handler)
    report(chain(lambda: once(signal.SIGINT)), url)


# Other signals ----------------------------------------------------------------------------------------------------


def term_cancels(url: str) -> None:
    """In a plain node; the handler cancels the run."""
    stop = Cancellation()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.cancel("stop"))
    report(chain(lambda: once(signal.SIGTERM)), url, cancel=stop)


def _term(error: type[BaseException], where: str, url: str) -> None:
    signal.signal(signal.SIGTERM, raising(error))

    def on_event(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.step == CHOSEN:
            once(signal.SIGTERM)

    async def in_node() -> None:
        once(signal.SIGTERM)

    async def in_callback() -> None:
        if not sent:
            asyncio.get_running_loop().call_soon(once, signal.SIGTERM)
            await asyncio.Event().wait()

    async def in_task() -> None:
        if not sent:
            await asyncio.gather(in_node(), asyncio.Event().wait())

    async def in_select() -> None:
        if not sent:
            sent.append(signal.SIGTERM)
            threading.Thread(target=_send_in_select).start()
            await asyncio.Event().wait()

    nodes: dict[str, Callable[[], Any]] = {
        "plain": lambda: once(signal.SIGTERM),
        "between": lambda: None,
        "async": in_node,
        "callback": in_callback,
        "task": in_task,
        "select": in_select,
    }
    report(chain(nodes[where]), url, **({"on_event": on_event} if where == "between" else {}))


def _send_in_select() -> None:
    """Send SIGTERM once the main thread waits in its event loop."""
    main = threading.main_thread().ident
    assert main is not None
    while sys._current_frames()[main].f_code.co_name != "select":
        pass
    os.kill(os.getpid(), signal.SIGTERM)


ERRORS = {error.__name__: error for error in (SystemExit, KeyboardInterrupt, OwnInterrupt)}

if __name__ == "__main__":
    if sys.argv[1] == "term":
        _term(ERRORS[sys.argv[2]], sys.argv[3], sys.argv[4])
    else:
        globals()[sys.argv[1]](sys.argv[2])
