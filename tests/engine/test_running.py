"""Running a graph: the one order of things, where a run goes, how it ends, and what is told of it meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.engine import END, Cancellation, Status
from backstay.engine.events import (
    CheckpointSaved,
    Event,
    NodeAttemptFailed,
    NodeFinished,
    NodeStarted,
    RunEnded,
    RunStarted,
    Token,
)
from backstay.engine.sinks import MemorySink, NoSink
from backstay.engine.triggers import CheckpointEvent, every
from backstay.errors import BadUpdate, StepsExceeded
from backstay.errors import NodeFailed as FailedNode
from backstay.model.decision import Approve, Reject
from backstay.model.frame import End, NextNode
from backstay.retry import RetryPolicy
from support.engine.event_log import EventLog
from support.engine.walk import State, Walk, head, replace_node


def looping(walk: Walk, times: int, **options: Any) -> Graph:
    """Return a graph that runs ``a`` so often, and then ``b``."""
    graph = walk.chain("a", "b", **options)
    graph._edges.clear()
    replace_node(graph, "a", walk.node("a", lambda state, ctx: {"count": 1}))
    graph.edge("a", "a", when=lambda state: state["count"] < times, name="more")
    graph.edge("a", "b")
    graph.end("b")
    return graph


def fails(state: Any) -> None:
    raise ValueError("a node's own error")


# Order ------------------------------------------------------------------------------------------------------------


def test_two_nodes_and_a_memory_sink_give_two_frames_in_order_with_cursors_from_one() -> None:
    sink = MemorySink()
    steps: list[Event] = []
    graph = Walk().chain("a", "b")

    result = graph.run_sync(None, {}, sink=sink, limit=10, on_event=steps.append)

    assert result.status is Status.COMPLETED
    assert [(frame.graph_id, frame.node_id, frame.cursor) for frame in sink.frames] == [("g", "a", 1), ("g", "b", 2)]
    assert [frame.state["seen"] for frame in sink.frames] == [["a"], ["a", "b"]]


def test_a_run_needs_neither_thread_nor_sink_nor_callback() -> None:
    for options in ({}, {"sink": NoSink()}):
        result = Walk().chain("a", "b").run_sync(None, **options)  # type: ignore[arg-type]

        assert (result.status, result.path, result.checkpoint) == (Status.COMPLETED, ("a", "b"), None)


def test_the_order_is_execute_commit_route_checkpoint() -> None:
    """The way on is decided once, from what was committed, and stored with it; it is not gone before that is stored."""
    log: list[Any] = []
    graph = Graph("g", state=State)

    def a(state: State) -> dict[str, Any]:
        log.append("execute a")
        return {"seen": ["a"]}

    def onward(state: State) -> bool:
        log.append(f"route with {state['seen']}")
        return True

    class Watching:
        def on_checkpoint(self, state: Mapping[str, Any], event: CheckpointEvent) -> None:
            frame = event.frames().current
            assert frame is not None
            log.append(("checkpoint", list(state.get("seen", [])), frame.cursor, frame.last_node, frame.continuation))
            assert frame.state == state
            assert (event.node_id, event.step) == (frame.last_node or "a", frame.cursor)

    graph.node("a", a)
    graph.node("b", lambda state: log.append("execute b"))
    graph.edge("a", "b", when=onward)
    graph.end("a", "b")
    graph.start("a")
    graph.run_sync(None, {}, sink=Watching()).raise_for_status()

    assert log == [
        ("checkpoint", [], 0, None, NextNode("a")),
        "execute a",
        "route with ['a']",
        ("checkpoint", ["a"], 1, "a", NextNode("b")),
        "execute b",
        ("checkpoint", ["a"], 2, "b", End()),
    ]


def test_nothing_goes_on_before_the_sink_is_done_and_its_error_ends_the_run() -> None:
    log: list[str] = []
    graph = Graph("g", state=State)
    graph.node("a", lambda state: log.append("execute a"))
    graph.node("b", lambda state: log.append("execute b"))
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")

    class Slow:
        async def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            log.append(f"saved {moment.step}")
            if moment.step == broken_at:
                raise OSError("disk gone")

    broken_at = 99
    graph.run_sync(None, sink=Slow()).raise_for_status()
    assert log == ["saved 0", "execute a", "saved 1", "execute b", "saved 2"]
    broken_at = 1
    log.clear()
    with pytest.raises(OSError, match="disk gone"):
        graph.run_sync(None, sink=Slow())

    assert log == ["saved 0", "execute a", "saved 1"]


def test_a_checkpoint_names_the_next_node_the_last_one_the_path_and_the_step(thread: backstay.Thread) -> None:
    Walk().chain("a", "b", "c").run_sync(thread).raise_for_status()

    found = [(meta.step, meta.last_node, meta.next_node, meta.trigger) for meta in reversed([*thread.history()])]

    assert found == [(0, None, "a", "input"), (1, "a", "b", "node"), (2, "b", "c", "node"), (3, "c", None, "end")]
    at = thread.at(2)
    assert at is not None
    assert (at.path, at.state["seen"]) == (("a", "b"), ["a", "b"])
    assert at.frames.depth == 1


def test_a_checkpoint_alone_can_be_placed_in_its_history(store: backstay.Store) -> None:
    graph = Walk().chain("a", "b")
    runs = [graph.run_sync(store.thread(name), metadata={"user": name}).run_id for name in ("t", "t", "u")]
    assert len(set(runs)) == 3  # two runs of one graph are told apart, in one thread and in two

    history = [*store.thread("t").history()][::-1]

    assert [meta.parent_id for meta in history] == [None, *(meta.id for meta in history[:-1])]
    assert len({meta.digest for meta in history}) == len(history)
    assert [meta.step for meta in history] == [*range(len(history))]
    assert [meta.run_id for meta in history] == [runs[0]] * 3 + [runs[1]] * 3
    assert {(meta.graph, meta.graph_hash, meta.metadata["user"]) for meta in history} == {("g", graph.fingerprint, "t")}
    assert all(meta.created_at.tzinfo is not None for meta in history)


def test_every_commit_is_stored_not_only_interrupts(thread: backstay.Thread) -> None:
    graph = looping(Walk(), 5)
    graph.run_sync(thread).raise_for_status()

    assert [cp.state.get("count", 0) for step in range(7) if (cp := thread.at(step))] == [0, 1, 2, 3, 4, 5, 5]


# Where it goes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("note", "path"), [("first both", "x"), ("second both", "y"), ("plain", "z"), ("", "z")])
def test_conditions_are_tried_in_order_then_the_plain_edge(note: str, path: str) -> None:
    walk = Walk()
    graph = Graph("g", state=State)
    for name in "axyz":
        graph.node(name, walk.node(name))
    graph.edge("a", "z")
    graph.edge("a", "x", when=lambda state: "first" in state["note"], name="first")
    graph.edge("a", "y", when=lambda state: "both" in state["note"], name="second")
    graph.start("a")
    graph.end(*"xyz")

    assert graph.run_sync(None, {"note": note}).path == ("a", path)


def test_a_fallback_is_taken_when_nothing_else_holds_and_without_one_the_run_fails() -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c")
    graph._edges.clear()
    graph.edge("a", "b", when=lambda state: state["note"] == "b", name="is_b")
    graph.end("b", "c")
    graph.edge("b", "c", when=lambda state: False, name="never")

    assert graph.run_sync(None, {"note": "b"}).path == ("a", "b")
    failed = graph.run_sync(None, {"note": "x"})
    assert failed.status is Status.FAILED
    assert "leads nowhere: no condition holds (is_b)" in str(failed.error)
    graph.edge("a", "c", fallback=True)
    assert graph.run_sync(None, {"note": "x"}).path == ("a", "c")


def test_a_choice_goes_where_its_function_says() -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c")
    graph._edges.clear()
    graph.choose("a", lambda state: state["note"], {"left": "b", "right": "c", "out": END})
    graph.end("b", "c")

    assert graph.run_sync(None, {"note": "right"}).path == ("a", "c")
    assert graph.run_sync(None, {"note": "out"}).path == ("a",)
    lost = graph.run_sync(None, {"note": "up"})
    assert isinstance(lost.error, BadUpdate)
    assert "the choice is 'up', not one of left, right, out" in str(lost.error)


def test_a_condition_that_raises_leaves_its_node_committed_and_is_asked_again(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b")
    graph._edges.clear()
    broken = [True]

    def ready(state: State) -> bool:
        if broken:
            raise KeyError("not there yet")
        return True

    graph.edge("a", "b", when=ready)
    graph.end("a", "b")
    failed = graph.run_sync(thread)
    assert isinstance(failed.error, FailedNode)
    assert failed.error.node == "a (condition ready)"
    assert (head(thread).last_node, head(thread).next_node) == ("a", None)
    broken.clear()

    assert graph.resume_sync(thread).path == ("a", "b")
    assert walk.ran == ["a", "b"]


def test_a_loop_without_an_end_meets_its_limit_and_goes_on_with_a_higher_one(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = looping(walk, 8, limit=3)

    stopped = graph.run_sync(thread)

    assert isinstance(stopped.error, StepsExceeded)
    assert (stopped.error.limit, stopped.steps, stopped.values["count"]) == (3, 3, 3)
    assert graph.resume_sync(thread, limit=5).values["count"] == 5
    assert graph.resume_sync(thread).values["count"] == 5  # the higher limit is the run's own now
    assert graph.resume_sync(thread, limit=9).status is Status.COMPLETED
    assert walk.ran == ["a"] * 8 + ["b"]
    assert graph.run_sync(None, limit=20).steps == 9


@pytest.mark.parametrize("limit", [0, -1, True, "5"])
def test_a_limit_is_checked_before_anything_runs(limit: Any) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", before=["b"])
    with backstay.open("memory:") as store:
        with pytest.raises(backstay.InvalidInput, match="limit"):
            graph.run_sync(store.thread("t"), limit=limit)
        graph.run_sync(store.thread("t"))
        with pytest.raises(backstay.InvalidInput, match="limit"):
            graph.resume_sync(store.thread("t"), Approve(), limit=limit)

    assert walk.ran == ["a"]


# Nodes ------------------------------------------------------------------------------------------------------------


def test_nodes_may_be_plain_or_asynchronous_with_or_without_a_context() -> None:
    graph = Graph("g", state=State)

    class Called:
        async def __call__(self, state: State, ctx: Any) -> dict[str, Any]:
            return {"seen": [f"object {ctx.node}"]}

    @graph.node
    def plain(state: State) -> dict[str, Any]:
        return {"seen": ["plain"]}

    @graph.node()
    async def awaited(state: State) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"seen": ["awaited"]}

    @graph.node("with_context")
    def _(state: State, ctx: Any) -> dict[str, Any]:
        return {"seen": [f"{ctx.node} {ctx.visit} {ctx.position} {ctx.thread_id} {ctx.attempt}"]}

    graph.node("called", Called())
    for source, target in (("plain", "awaited"), ("awaited", "with_context"), ("with_context", "called")):
        graph.edge(source, target)
    graph.start("plain")
    graph.end("called")
    wanted = ["plain", "awaited", "with_context 1 g/with_context#1 None 1", "object called"]

    assert graph.run_sync(None).values["seen"] == wanted
    assert asyncio.run(graph.run(None)).values["seen"] == wanted


def test_a_plain_node_does_not_hold_up_the_event_loop() -> None:
    graph = Graph("g", state=State)
    gate = threading.Event()
    graph.node("a", lambda state: {"note": str(gate.wait(30))})
    graph.start("a")
    graph.end("a")

    async def story() -> Any:
        run = asyncio.ensure_future(graph.run(None))
        await asyncio.sleep(0)
        gate.set()  # this line is reached only if the loop is free
        return await run

    assert asyncio.run(story()).values["note"] == "True"


def test_a_run_of_asynchronous_nodes_lets_others_in_between() -> None:
    graph = Graph("g", state=State)

    async def a(state: State) -> dict[str, Any]:
        return {"count": 1}

    graph.node("a", a)
    graph.edge("a", "a", when=lambda state: True, name="always")
    graph.start("a")
    graph.end("a")

    async def story() -> None:
        async with asyncio.timeout(0.01):
            await graph.run(None, limit=10_000_000)

    with pytest.raises(TimeoutError):
        asyncio.run(story())


def test_run_sync_inside_an_event_loop_says_what_to_do_instead() -> None:
    async def story() -> None:
        Walk().chain("a").run_sync(None)

    with pytest.raises(backstay.InvalidInput, match="event loop"):
        asyncio.run(story())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_node_fails_the_run_and_keeps_what_was_committed(thread: backstay.Thread, is_async: bool) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c")
    replace_node(graph, "b", fails)

    failed = asyncio.run(graph.run(thread)) if is_async else graph.run_sync(thread)

    assert failed.status is Status.FAILED
    assert isinstance(failed.error, FailedNode)
    assert isinstance(failed.error.error, ValueError)
    assert (failed.error.node, failed.error.attempts) == ("b", 1)
    assert "a node's own error" in str(failed.error)  # whoever called sees it; the store keeps only its type
    assert (head(thread).trigger, head(thread).resume_hint) == (
        "failed",
        "node 'b' raised ValueError. Fix the cause, then call graph.resume(thread)",
    )
    with pytest.raises(FailedNode):
        failed.raise_for_status()
    assert head(thread).next_node == "b"
    replace_node(graph, "b", walk.node("b"))
    assert graph.resume_sync(thread).path == ("a", "b", "c")
    assert walk.ran == ["a", "b", "c"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_node_that_raises_stop_iteration_fails_like_any_other(is_async: bool) -> None:
    """No future can hold a StopIteration: a run that let it through would wait for its node for ever."""
    graph = Graph("g", state=State)
    graph.node("a", lambda state: next(iter(())))
    graph.start("a")
    graph.end("a")
    failed = asyncio.run(asyncio.wait_for(graph.run(None), 30)) if is_async else graph.run_sync(None)

    assert isinstance(failed.error, FailedNode)


# Trying again -----------------------------------------------------------------------------------------------------


class Flaky:
    """A node that fails until it was called so often."""

    def __init__(self, succeeds_at: int, error: type[Exception] = ConnectionError) -> None:
        self.calls: list[int] = []
        self._succeeds_at = succeeds_at
        self._error = error

    def __call__(self, state: State, ctx: Any) -> dict[str, Any]:
        self.calls.append(ctx.attempt)
        if len(self.calls) < self._succeeds_at:
            raise self._error
        return {"note": f"attempt {ctx.attempt}"}


def retrying(node: Flaky, **retry: Any) -> Graph:
    graph = Graph("g", state=State)
    graph.node("a", node, retry=RetryPolicy(**{"first_s": 0.0, **retry}))
    graph.start("a")
    graph.end("a")
    return graph


def test_a_node_is_tried_as_often_as_it_may() -> None:
    log = EventLog()
    result = retrying(Flaky(3), retries=2).run_sync(None, on_event=log)

    assert result.values["note"] == "attempt 3"
    assert [(each.attempt, each.will_retry) for each in log.of(NodeAttemptFailed)] == [(1, True), (2, True)]
    log.check()
    spent = retrying(Flaky(9), retries=2).run_sync(None)
    assert isinstance(spent.error, FailedNode)
    assert spent.error.attempts == 3


def test_only_the_errors_that_are_named_are_tried_again() -> None:
    node = Flaky(2, ValueError)
    assert retrying(node, on=(ConnectionError,)).run_sync(None).status is Status.FAILED
    assert node.calls == [1]


def test_attempts_are_counted_on_after_a_crash(thread: backstay.Thread) -> None:
    """The first worker dies between two attempts; whoever goes on has the attempts that are left."""
    node = Flaky(99)
    graph = retrying(node, retries=2)

    class Dies(BaseException):
        pass

    def die(event: Event) -> None:
        if isinstance(event, NodeStarted) and event.attempt == 3:
            raise Dies

    with pytest.raises(Dies):
        graph.run_sync(thread, on_event=die)
    assert node.calls == [1, 2]

    failed = graph.resume_sync(thread)
    assert isinstance(failed.error, FailedNode)
    assert (failed.error.attempts, node.calls) == (3, [1, 2, 3])
    graph.resume_sync(thread)  # somebody mended something: it has all its attempts again
    assert node.calls == [1, 2, 3, 1, 2, 3]


def test_attempts_are_counted_on_though_a_branch_beside_them_moved_on(thread: backstay.Thread) -> None:
    """The failed attempt is beside one checkpoint when the branch next to it stores another, and then all die."""
    node = Flaky(99)
    inner = Graph("inner", state=State)
    failed_once = asyncio.Event()

    async def waits(state: State) -> dict[str, Any]:
        await failed_once.wait()
        return {"seen": ["waits"]}

    inner.node("waits", waits)
    inner.node("then", lambda state: None)
    inner.edge("waits", "then")
    inner.start("waits")
    inner.end("then")
    graph = Graph("g", state=State)
    graph.node("begin", lambda state: None)
    graph.node("flaky", node, retry=RetryPolicy(retries=2, first_s=3600))  # waits for its next attempt until all die
    graph.subgraph("beside", inner)
    graph.parallel("begin", ["flaky", "beside"])
    graph.start("begin")

    loops: list[asyncio.AbstractEventLoop] = []

    class Dies(BaseException):
        pass

    def watch(event: Event) -> None:
        if isinstance(event, NodeAttemptFailed):
            loops[0].call_soon_threadsafe(failed_once.set)
        if isinstance(event, NodeStarted) and event.node == "then":
            raise Dies

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await graph.run(thread, on_event=watch)

    with pytest.raises(Dies):
        asyncio.run(run())
    stored = thread.latest()
    assert stored is not None
    assert not stored.writes
    assert [task.tries for task in stored.frames.frames[0].tasks if task.node == "flaky"] == [1]

    started: list[int] = []

    def stop(event: Event) -> None:
        if isinstance(event, NodeStarted) and event.node == "flaky":
            started.append(event.attempt)
            raise Dies

    with pytest.raises(Dies):
        graph.resume_sync(thread, on_event=stop)
    assert started == [2]


def test_a_node_that_takes_too_long_is_given_up() -> None:
    ended: list[str] = []
    graph = Graph("g", state=State)

    async def slow(state: State, ctx: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(ctx.node)

    graph.node("a", slow, timeout=0.01, retry=RetryPolicy(1, first_s=0))
    graph.start("a")
    graph.end("a")
    failed = graph.run_sync(None)

    assert isinstance(failed.error, FailedNode)
    assert isinstance(failed.error.error, TimeoutError)
    assert ended == ["a", "a"]


def test_a_plain_function_that_was_given_up_can_do_nothing_any_more() -> None:
    """A thread cannot be ended from outside; but the context it was handed is closed."""
    done, go_on, over = threading.Event(), threading.Event(), threading.Event()
    refused: list[BaseException] = []
    graph = Graph("g", state=State)

    def slow(state: State, ctx: Any) -> dict[str, Any]:
        go_on.wait(30)
        for act, *arguments in ((ctx.effect, "charge", done.set), (ctx.emit, "late"), (ctx.ask, "may I?")):
            try:
                act(*arguments)
            except backstay.Fenced as error:
                refused.append(error)
        over.set()
        return {"note": "too late"}

    graph.node("a", slow, timeout=0.01)
    graph.start("a")
    graph.end("a")
    with backstay.open("memory:") as store:
        thread = store.thread("t")

        async def story() -> Any:
            result = await graph.run(thread)
            go_on.set()
            return result

        assert asyncio.run(story()).status is Status.FAILED
        assert over.wait(30)
        assert len(refused) == 3
        assert not done.is_set()
        assert "note" not in head(thread).state


# Cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancelled_run_ends_its_node_and_can_be_resumed(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b")
    cancel = Cancellation()
    ended: list[str] = []

    async def waits(state: State) -> None:
        cancel.cancel("the user left")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("b")

    replace_node(graph, "b", waits)
    result = graph.run_sync(thread, cancel=cancel)

    assert (result.status, result.reason, ended) == (Status.CANCELLED, "the user left", ["b"])
    assert head(thread).next_node == "b"
    replace_node(graph, "b", walk.node("b"))
    assert graph.resume_sync(thread).path == ("a", "b")
    assert walk.ran == ["a", "b"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_never_awaits_is_cancelled_between_two_nodes(is_async: bool) -> None:
    walk = Walk()
    cancel = Cancellation()
    graph = looping(walk, 50)
    replace_node(graph, "a", lambda state: cancel.cancel("enough") if state.get("count") == 2 else {"count": 1})
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        run = graph.run(thread, cancel=cancel, trigger=every(n=100))
        result = (
            asyncio.run(run) if is_async else graph.run_sync(store.thread("u"), cancel=cancel, trigger=every(n=100))
        )
        if not is_async:
            run.close()

        assert (result.status, result.reason, result.values["count"]) == (Status.CANCELLED, "enough", 2)
        assert result.checkpoint is not None
        assert (result.checkpoint.trigger, result.checkpoint.last_node) == ("cancelled", "a")  # the trigger wanted none


def test_a_run_that_was_cancelled_before_it_began_can_be_resumed() -> None:
    walk = Walk()
    graph = walk.chain("a")
    cancel = Cancellation()
    cancel.cancel("not today")
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        assert graph.run_sync(thread, cancel=cancel).status is Status.CANCELLED
        assert walk.ran == []

        assert graph.resume_sync(thread).status is Status.COMPLETED


def test_a_cancellation_that_comes_too_late_touches_nobody_else() -> None:
    graph = Walk().chain("a")
    cancel = Cancellation()

    async def last(state: State) -> None:
        cancel.cancel("late")  # is heard of at the next await, and there is none any more in this run

    replace_node(graph, "a", last)

    async def story() -> Status:
        result = await graph.run(None, cancel=cancel)
        await asyncio.sleep(0.001)  # an await of the caller's own
        return result.status

    assert asyncio.run(story()) is Status.COMPLETED


def test_cancelling_the_task_itself_raises_and_leaves_a_checkpoint(thread: backstay.Thread) -> None:
    graph = looping(Walk(), 100)
    began = asyncio.Event()

    async def waits(state: State) -> dict[str, Any]:
        if state.get("count") == 3:
            began.set()
            await asyncio.Event().wait()
        return {"count": 1}

    replace_node(graph, "a", waits)
    log = EventLog()

    async def story() -> None:
        run = asyncio.ensure_future(graph.run(thread, trigger=every(n=100), on_event=log))
        await began.wait()
        run.cancel()
        await run

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(story())
    assert (head(thread).state["count"], head(thread).trigger) == (3, "cancelled")
    assert [each.status for each in log.of(RunEnded)] == ["cancelled"]


# Events -----------------------------------------------------------------------------------------------------------


class Leaving(BaseException):
    """Not an error of a node: it ends the run as it is."""


def leaves(state: State) -> None:
    raise Leaving


async def leaves_loop(state: State) -> None:
    raise Leaving


ENDINGS: dict[str, Callable[[Graph], None]] = {
    "completed": lambda graph: None,
    "failed": lambda graph: replace_node(graph, "b", fails),
    "interrupted": lambda graph: replace_node(graph, "b", lambda state, ctx: ctx.ask("how?")),
    "cancelled": lambda graph: replace_node(graph, "b", leaves),
    "error": lambda graph: replace_node(graph, "b", leaves_loop),
}


@pytest.mark.parametrize("status", ENDINGS)
def test_there_is_exactly_one_terminal_event_however_a_run_ends(status: str) -> None:
    graph = Walk().chain("a", "b", "c")
    ENDINGS[status](graph)
    log = EventLog()
    with backstay.open("memory:") as store:
        try:
            graph.run_sync(store.thread("t"), on_event=log)
        except Leaving:
            assert status in ("cancelled", "error")

    log.check()
    assert isinstance(log.events[0], RunStarted)
    assert [each.status for each in log.of(RunEnded)] == [status]
    assert log.events[-1] == log.of(RunEnded)[0]
    if status != "completed":
        assert "c" not in [each.node for each in log.of(NodeStarted)]
        assert "completed" not in [each.status for each in log.of(RunEnded)]


def test_a_stream_yields_events_in_their_order_and_the_checkpoints_that_were_saved() -> None:
    graph = Walk().chain("a", "b")
    replace_node(graph, "a", lambda state, ctx: ctx.emit("a token"))

    async def story(thread: backstay.AsyncThread) -> list[Event]:
        return [event async for event in graph.stream(thread, {})]

    async def whole() -> tuple[list[Event], list[str]]:
        async with await backstay.aopen("memory:") as store:
            thread = store.thread("t")
            events = await story(thread)
            return events, [meta.id async for meta in thread.history()]

    events, stored = asyncio.run(whole())

    EventLog(events).check()
    kinds = [type(event) for event in events]
    assert kinds == [
        *(RunStarted, CheckpointSaved, NodeStarted, Token, NodeFinished, CheckpointSaved),
        *(NodeStarted, NodeFinished, CheckpointSaved, RunEnded),
    ]
    saved = [event.checkpoint_id for event in events if isinstance(event, CheckpointSaved)]
    assert saved == stored[::-1]


def test_who_stops_reading_a_stream_ends_the_run() -> None:
    walk = Walk()
    graph = looping(walk, 1000)
    with backstay.open("memory:") as store:
        thread = store.thread("t")

        async def story() -> None:
            events = graph.stream(thread, {})
            async for event in events:
                if isinstance(event, NodeFinished):
                    break
            await events.aclose()

        asyncio.run(story())
        ran = len(walk.ran)

        assert ran < 1000
        assert graph.resume_sync(thread, limit=2000).status is Status.COMPLETED
        assert len(walk.ran) in (1001, 1002)  # the node that was running when it ended may have run once more


def test_a_stream_goes_on_with_a_run_and_takes_answers(thread: backstay.Thread) -> None:
    graph = Walk().chain("a", "b", before=["b"])
    graph.run_sync(thread)

    async def story() -> list[Event]:
        return [event async for event in graph.stream_resume(thread, Approve())]

    events = asyncio.run(story())
    assert isinstance(events[0], RunStarted)
    assert (events[0].resumed, events[0].attempt) == (True, 2)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "completed"


def test_a_run_without_a_thread_cannot_pause_and_never_takes_that_for_a_yes() -> None:
    for before, after in ((["b"], []), ([], ["a"])):
        walk = Walk()
        graph = walk.chain("a", "b", before=before, after=after)
        with pytest.raises(backstay.InvalidInput, match="no thread to wait in"):
            graph.run_sync(None)
        assert walk.ran == ["a"]


@pytest.mark.parametrize("given", ["t", 5, object()])
def test_what_is_no_thread_is_refused(given: Any) -> None:
    graph = Walk().chain("a")
    for call in (graph.run_sync, graph.resume_sync):
        with pytest.raises(backstay.InvalidInput, match="a run is stored in a thread"):
            call(given)
    with pytest.raises(backstay.InvalidInput, match="nothing to resume without a thread"):
        graph.resume_sync(None)  # type: ignore[arg-type]


def test_one_graph_serves_many_runs_at_once(tmp_path: Path) -> None:
    graph = looping(Walk(), 5)
    both = threading.Barrier(2, timeout=30)

    async def several(names: list[str]) -> list[Any]:
        async with await backstay.aopen(tmp_path / "store.db") as store:
            both.wait()
            return await asyncio.gather(*(graph.run(store.thread(name), {"note": name}) for name in names))

    found: list[Any] = []
    loops = [
        threading.Thread(target=lambda names=names: found.extend(asyncio.run(several(names))))
        for names in ([f"t{n}" for n in range(10)], [f"u{n}" for n in range(10)])
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()

    assert len(found) == 20
    assert {result.values["note"] for result in found} == {f"{kind}{n}" for kind in "tu" for n in range(10)}
    assert {(result.status, result.values["count"], len(result.values["seen"])) for result in found} == {
        (Status.COMPLETED, 5, 6)
    }


def test_what_a_run_used_is_counted_and_stored(thread: backstay.Thread) -> None:
    graph = Walk().chain("a", "b", before=["b"])
    for name in "ab":
        replace_node(graph, name, lambda state, ctx: ctx.usage(tokens=10, cost=0.25))
    graph.run_sync(thread)
    graph.resume_sync(thread, Approve())

    assert (head(thread).tokens_used, head(thread).cost_estimate) == (20, 0.5)


def test_a_thread_takes_one_run_after_the_other_but_not_two_at_once(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", before=["b"])
    first = graph.run_sync(thread, {"seen": ["one"]})
    with pytest.raises(backstay.InvalidInput, match="unfinished run of graph 'g'"):
        graph.run_sync(thread, {"seen": ["two"]})
    graph.resume_sync(thread, Reject("no"))

    second = graph.run_sync(thread, {"seen": ["two"]})

    assert first.run_id != second.run_id
    assert second.values["seen"] == ["one", "a", "two", "a"]
    assert [meta.step for meta in thread.history()] == [*range(head(thread).step, -1, -1)]
    assert (second.path, head(thread).path) == (("a",), ("a",))
