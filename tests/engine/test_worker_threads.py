"""Plain nodes in an event loop: every call has a thread at once, and nothing waits for a function that hangs."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from backstay import Graph
from backstay.engine.reducers import append
from backstay.errors import NodeFailed
from support.processes import child_environment, ended_well, forked

HANG_S = 60
MANY = 40
"""More than asyncio has threads on any machine that runs these tests: CPUs + 4, at most 32."""


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return what hanging functions wait for; they end with the test."""
    event = threading.Event()
    yield event
    event.set()


def graph_of(function: Any, **options: Any) -> Graph:
    graph = Graph("g", reducers={"seen": append})
    graph.node("a", function, **options)
    graph.start("a")
    graph.end("a")
    return graph


@pytest.mark.parametrize("count", [12, MANY])
@pytest.mark.parametrize("is_sync", [True, False])
def test_all_plain_branches_run_at_the_same_time(count: int, is_sync: bool) -> None:
    meeting = threading.Barrier(count, timeout=HANG_S)

    def work(state: Any) -> None:
        meeting.wait()

    graph = Graph("g")
    graph.node("split", lambda state: {"items": list(range(count))})
    graph.node("work", work)
    graph.map("split", "work", over="items")
    graph.start("split")

    result = graph.run_sync(None) if is_sync else asyncio.run(graph.run(None))
    assert result.status == "completed"


def test_functions_that_hang_past_their_timeout_do_not_hold_up_other_runs(released: threading.Event) -> None:
    hanging = graph_of(lambda state: released.wait() and None, timeout=0.01)

    async def main() -> Any:
        ended = await asyncio.gather(*(hanging.run(None) for _ in range(MANY)))
        return [each.status for each in ended], (await graph_of(lambda state: {"v": 1}).run(None)).values

    statuses, values = asyncio.run(main())  # ends although all of them still hang
    assert statuses == ["failed"] * MANY
    assert values == {"v": 1}


@pytest.mark.parametrize("start", ["asyncio.run(g.run(None))", "g.run_sync(None)"])
def test_a_program_ends_while_a_plain_function_hangs(start: str) -> None:
    program = f"""
import asyncio, threading, backstay
g = backstay.Graph("g")
g.node("a", lambda state: threading.Event().wait() and None, timeout=0.01)
g.start("a")
g.end("a")
assert {start}.status == "failed"
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=child_environment(),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_late_result_is_dropped_silently(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong: list[object] = []
    left: list[threading.Thread] = []
    monkeypatch.setattr(threading, "excepthook", wrong.append)

    def late(state: Any, ctx: Any) -> None:
        left.append(threading.current_thread())
        released.wait()
        if ctx.attempt:
            raise ValueError("late")

    async def main(graph: Graph) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        assert (await graph.run(None)).status == "failed"
        released.set()
        await graph_of(lambda state: None).run(None)

    asyncio.run(main(graph_of(late, timeout=0.01)))
    released.clear()
    asyncio.run(graph_of(late, timeout=0.01).run(None))
    released.set()  # the loop is closed by now
    asyncio.run(graph_of(lambda state: None).run(None))
    assert len(left) == 2
    assert wrong == []
    assert capfd.readouterr().err == ""


def test_context_variables_are_copied_into_the_thread() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[str] = []

    def plain(state: Any) -> None:
        seen.append(variable.get())
        variable.set("thread")

    async def main() -> None:
        variable.set("caller")
        await graph_of(plain).run(None)
        seen.append(variable.get())

    asyncio.run(main())
    assert seen == ["caller", "caller"]


def test_a_chain_starts_no_thread_for_each_node() -> None:
    graph = Graph("g", reducers={"seen": append})
    graph.node("step", lambda state: {"seen": [threading.get_ident()]})
    graph.edge("step", "step", when=lambda state: len(state["seen"]) < 50, name="more")
    graph.start("step")
    graph.end("step")

    asyncio.run(graph_of(lambda state: None).run(None))
    before = threading.active_count()
    seen = asyncio.run(graph.run(None, {"seen": []})).values["seen"]
    assert threading.get_ident() not in seen
    assert threading.active_count() <= before


def test_a_function_that_raises_stop_iteration_fails_its_node() -> None:
    def stop(state: Any) -> None:
        raise StopIteration

    for result in (asyncio.run(graph_of(stop).run(None)), graph_of(stop).run_sync(None)):
        assert isinstance(result.error, NodeFailed)
        assert isinstance(result.error.error, RuntimeError)


def test_an_interrupt_that_a_function_raises_reaches_the_caller() -> None:
    def leave(state: Any) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        asyncio.run(graph_of(leave).run(None))


def test_plain_nodes_run_in_a_process_that_was_forked() -> None:
    graph = graph_of(lambda state: {"v": 1})
    assert asyncio.run(graph.run(None)).values == {"v": 1}  # leaves an idle thread here, which the child does not have

    def child() -> None:
        assert asyncio.run(graph.run(None)).values == {"v": 1}

    assert ended_well(forked(child))
