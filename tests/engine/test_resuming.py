"""Going on: exactly where a run stood, however deep, with nothing that was committed run again; or not at all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.compatibility import Verdict
from backstay.engine.events import Event, NodeFinished, NodeStarted, RunStarted
from backstay.engine.reducers import append
from backstay.engine.triggers import every
from backstay.errors import MigrationFailed, NodeFailed, NotFound
from backstay.model.decision import Approve, Reject
from backstay.model.frame import FanOut, Frame
from backstay.model.runs import Outcome
from backstay.thread.access import access_of
from support.engine.event_log import EventLog
from support.engine.walk import State, Walk, asked, head, replace_node


class Dies(BaseException):
    """Stands for the end of a process: nothing catches it, and nothing after it runs."""


class DiesAt:
    """Ends a run when a node is about to run for the n-th time, over all its graphs."""

    def __init__(self, node: str, time: int = 1) -> None:
        self.node = node
        self.left = time

    def __call__(self, event: Event) -> None:
        if isinstance(event, NodeStarted) and event.node == self.node:
            self.left -= 1
            if not self.left:
                raise Dies


def died(run: Any) -> None:
    with pytest.raises((Dies, BaseExceptionGroup)) as caught:
        run()
    error = caught.value
    assert isinstance(error, Dies) or (isinstance(error, BaseExceptionGroup) and error.subgroup(Dies) is not None)


# How deep ---------------------------------------------------------------------------------------------------------


class Deep(TypedDict, total=False):
    trail: Annotated[list[str], append]
    rounds: int


def third_level(walk: Walk) -> Graph:
    """Return a graph with a loop, in it a fan-out, in its branch 2 a graph with a loop, and in that another graph."""
    innermost = Graph("level3", state=Deep)
    for name in ("x", "y", "z"):
        innermost.node(name, trailing(walk, name))
    innermost.edge("x", "y")
    innermost.edge("y", "z")
    innermost.start("x")
    innermost.end("z")

    middle = Graph("level2", state=Deep)
    middle.subgraph("deeper", innermost, out={"trail": "trail"})
    middle.node("count", lambda state: {"rounds": state.get("rounds", 0) + 1})
    middle.edge("deeper", "count")
    middle.edge("count", "deeper", when=lambda state: state["rounds"] < 2, name="again")
    middle.start("deeper")
    middle.end("count")

    outer = Graph("level1", state=Deep)
    outer.node("begin", trailing(walk, "begin"))
    outer.node("one", trailing(walk, "one"))
    outer.subgraph("two", middle, into=lambda state: {}, out={"trail": "trail"})
    outer.node("three", trailing(walk, "three"))
    outer.node("join", lambda state: {"rounds": state.get("rounds", 0) + 1})
    outer.parallel("begin", ["one", "two", "three"], join="join")
    outer.edge("join", "begin", when=lambda state: state["rounds"] < 2, name="again")
    outer.start("begin")
    outer.end("join")
    return outer


def trailing(walk: Walk, name: str) -> Any:
    def run(state: Any, ctx: Any) -> dict[str, Any]:
        walk.ran.append(ctx.position)
        return {"trail": [name]}

    return run


TRAIL = ["begin", "one", *"xyzxyz", "three"] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_goes_on_in_the_third_level_of_a_subgraph_in_the_second_round_of_a_loop_in_a_branch(
    url: str, is_async: bool
) -> None:
    walk = Walk()
    graph = third_level(walk)
    log = EventLog()
    die = DiesAt("y", 4)  # the second round of the outer loop, the second round inside branch two

    def tell(event: Event) -> None:
        log(event)
        die(event)

    store = backstay.open(url)
    died(lambda: graph.run_sync(store.thread("t"), on_event=tell))
    if url != "memory:":  # another process opens it anew; what is in memory is gone with its process
        store.close()
        store = backstay.open(url)
    committed = [event.position for event in log.of(NodeFinished)]
    inside = "level1/two#2[two]>level2/deeper#2>level3/"
    assert f"{inside}x#1" in committed
    with store:
        thread = store.thread("t")
        stood = head(thread)
        assert isinstance(stood.continuation, FanOut)
        assert stood.graph_hash == graph.fingerprint
        two = next(task for task in stood.frames.frames[0].tasks if task.key == "two")
        assert [(frame.graph_id, frame.node_id) for frame in two.frames] == [("level2", "deeper"), ("level3", "y")]
        assert two.frames[0].state.keys() == {"trail", "rounds"}
        assert two.frames[1].state["trail"] == [*"xyz", "x"]
        before = len(walk.ran)

        result = asyncio.run(graph.resume(thread)) if is_async else graph.resume_sync(thread)

        assert result.values["trail"] == TRAIL
        after = walk.ran[before:]
        assert not set(after) & {position for position in committed if position in walk.ran[:before]}
        assert f"{inside}y#1" in after
        assert len(walk.ran) == len(set(walk.ran)) == len(TRAIL)
        assert result.status is Status.COMPLETED


@pytest.mark.parametrize("dies_at", [1, 4, 6, 8])
def test_a_run_on_an_asynchronous_store_goes_on_wherever_it_died(tmp_path: Path, dies_at: int) -> None:
    walk = Walk()
    graph = third_level(walk)
    done: list[str] = []

    def look(position: str) -> Any:
        """Find out about an effect that was under way when the run died."""
        return lambda record: Outcome.done(None) if position in done else Outcome.not_done()

    async def acting(state: Any, ctx: Any) -> dict[str, Any]:
        await ctx.effect("act", done.append, ctx.position, reconcile=look(ctx.position))
        return {"trail": ["one"]}

    def plain(state: Any, ctx: Any) -> dict[str, Any]:
        ctx.effect("act", done.append, ctx.position, reconcile=look(ctx.position))
        return {"trail": ["three"]}

    replace_node(graph, "one", acting)
    replace_node(graph, "three", plain)

    async def run() -> None:
        async with await backstay.aopen(tmp_path / "store.db") as store:
            await graph.run(store.thread("t"), on_event=DiesAt("xyz"[dies_at % 3], (dies_at + 1) // 2))

    async def resume() -> Any:
        async with await backstay.aopen(tmp_path / "store.db") as store:
            return await graph.resume(store.thread("t"))

    died(lambda: asyncio.run(run()))
    result = asyncio.run(resume())

    assert (result.status, result.values["trail"]) == (Status.COMPLETED, TRAIL)
    assert len(walk.ran) == len(set(walk.ran))
    assert sorted(done) == sorted(f"level1/{name}#{visit}[{name}]" for name in ("one", "three") for visit in (1, 2))


@pytest.mark.parametrize("dies_at", ["a", "b", "c", "d"])
def test_a_run_that_died_goes_on_with_the_node_that_was_next(thread: backstay.Thread, dies_at: str) -> None:
    walk = Walk()
    graph = walk.chain(*"abcd")
    died(lambda: graph.run_sync(thread, on_event=DiesAt(dies_at)))
    assert walk.ran == [*"abcd"["abcd".index(dies_at) :: -1]][1:][::-1]
    assert head(thread).next_node == dies_at

    result = graph.resume_sync(thread)

    assert (result.path, result.values["seen"], walk.ran) == (tuple("abcd"), [*"abcd"], [*"abcd"])


def test_the_depth_of_the_stack_is_nesting_and_not_history(thread: backstay.Thread) -> None:
    walk = Walk()
    innermost = walk.chain(*"xyz", graph="level3")
    middle = Graph("level2", state=State)
    middle.node("m", walk.node("m"))
    middle.subgraph("in", innermost)
    middle.edge("m", "in")
    middle.start("m")
    middle.end("in")
    outer = Graph("level1", state=State)
    outer.subgraph("in", middle)
    outer.node("last", walk.node("last"))
    outer.edge("in", "last")
    outer.start("in")
    outer.end("last")
    outer.run_sync(thread).raise_for_status()

    depths = [found.frames.depth for step in range(head(thread).step + 1) if (found := thread.at(step))]

    # the input, m, x, y, z (its graph's end is stored inside it), then level3 and level2 are left
    assert depths == [1, 2, 3, 3, 3, 2, 1, 1]
    assert thread.at(2) is not None


def test_steps_are_counted_on_over_pauses_crashes_and_runs(thread: backstay.Thread) -> None:
    graph = Walk().chain(*"abcd", before=["b"], after=["c"])
    results = [graph.run_sync(thread)]
    died(lambda: graph.resume_sync(thread, Approve(), on_event=DiesAt("c")))
    results.append(graph.resume_sync(thread))
    results.append(graph.resume_sync(thread, Approve()))

    assert [result.steps for result in results] == [1, 3, 4]
    steps = [meta.step for meta in thread.history()]
    assert steps == sorted(set(steps), reverse=True)
    attempts = [meta.attempt for meta in thread.history()]
    assert attempts == sorted(attempts, reverse=True)
    log = EventLog()
    graph.run_sync(thread, on_event=log)
    assert head(thread).step == max(steps) + 2
    assert log.of(RunStarted)[0].attempt == 1


def test_a_barrier_inside_a_subgraph_waits_like_any_other(thread: backstay.Thread) -> None:
    walk = Walk()
    inner = Graph("inner", state=State)
    inner.node("x", walk.node("x"))
    inner.barrier("gate", "May it?")
    inner.node("y", walk.node("y"))
    inner.edge("x", "gate")
    inner.edge("gate", "y")
    inner.start("x")
    inner.end("y")
    outer = Graph("outer", state=State)
    outer.subgraph("in", inner)
    outer.start("in")
    outer.end("in")

    assert outer.run_sync(thread).status is Status.INTERRUPTED
    assert (walk.ran, head(thread).frames.depth) == (["x"], 2)
    assert outer.resume_sync(thread, Approve()).status is Status.COMPLETED
    assert walk.ran == ["x", "y"]


def test_each_frame_has_the_state_of_its_own_graph(thread: backstay.Thread) -> None:
    inner = Graph("inner", state=Deep, before=["look"])
    inner.node("look", lambda state: {"trail": ["found"]})
    inner.start("look")
    inner.end("look")
    outer = Graph("outer", state=State)
    outer.subgraph("in", inner, into=lambda state: {"rounds": 7}, out={"trail": "seen"})
    outer.start("in")
    outer.end("in")
    outer.run_sync(thread, {"note": "outer's"})

    frames: tuple[Frame, ...] = head(thread).frames.frames
    assert [dict(frame.state) for frame in frames][1:] == [{"rounds": 7}]
    assert head(thread).state == {"note": "outer's"}
    assert outer.resume_sync(thread, Approve()).values == {"note": "outer's", "seen": ["found"]}


def test_with_a_trigger_that_keeps_little_a_run_goes_on_from_the_last_thing_it_kept(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain(*"abcdefg")
    died(lambda: graph.run_sync(thread, on_event=DiesAt("f"), trigger=every(n=2)))
    kept = head(thread)
    assert (kept.last_node, kept.next_node) == ("d", "e")

    result = graph.resume_sync(thread)

    assert result.values["seen"] == [*"abcdefg"]
    assert walk.ran == [*"abcde", *"efg"]


def test_an_update_is_folded_in_before_it_goes_on(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b")
    replace_node(graph, "b", lambda state: 1 / 0)
    assert isinstance(graph.run_sync(thread).error, NodeFailed)
    replace_node(graph, "b", walk.node("b"))

    result = graph.resume_sync(thread, update={"seen": ["mended"], "note": "by hand"})

    assert result.values == {"seen": ["a", "mended", "b"], "note": "by hand"}
    assert "manual" in [meta.trigger for meta in thread.history()]


# Not at all -------------------------------------------------------------------------------------------------------


def test_finished_rejected_and_unknown_runs_are_not_resumed(store: backstay.Store) -> None:
    walk = Walk()
    graph = walk.chain("a", "b")
    graph.run_sync(store.thread("finished"))
    with pytest.raises(backstay.InvalidInput, match=r"over \(end\), at step 2"):
        graph.resume_sync(store.thread("finished"))
    graph.run_sync(store.thread("rejected"), before=["b"])
    graph.resume_sync(store.thread("rejected"), Reject("no"))
    with pytest.raises(backstay.InvalidInput, match=r"over \(rejected\)"):
        graph.resume_sync(store.thread("rejected"))
    with pytest.raises(NotFound, match="'nobody' has no checkpoint"):
        graph.resume_sync(store.thread("nobody"))
    store.thread("plain").save({"seen": []})
    with pytest.raises(backstay.InvalidInput, match="was not saved by a graph"):
        graph.resume_sync(store.thread("plain"))

    assert walk.ran == ["a", "b", "a"]
    assert graph.run_sync(store.thread("plain")).status is Status.COMPLETED  # but begun on what is there


def test_a_run_of_another_graph_is_refused_before_anything_runs(store: backstay.Store) -> None:
    walk = Walk()
    thread = store.thread("t")
    walk.chain("a", "b", before=["b"]).run_sync(thread)
    (record,) = thread.interrupts()
    digest = head(thread).digest
    for foreign in (walk.chain("a", "b", graph="foreign"), walk.chain("a", "c", "b"), walk.chain("a", "x")):
        with pytest.raises(backstay.GraphMismatch) as refused:
            foreign.resume_sync(thread, Approve())
        assert refused.value.judgement is not None
        assert f"0x{foreign.fingerprint:016x}" in str(refused.value)

    assert (walk.ran, head(thread).digest) == (["a"], digest)
    assert [each.decision for each in thread.interrupts()] == [None]
    assert record.pending


def test_a_run_that_is_running_elsewhere_is_refused_before_anything_runs(url: str) -> None:
    walk = Walk()
    inside, go_on = threading.Event(), threading.Event()

    def waits(state: State, ctx: Any) -> None:
        inside.set()
        assert go_on.wait(30)

    graph = walk.chain("a", "b")
    replace_node(graph, "a", walk.node("a", waits))
    with backstay.open(url) as store:
        results: list[Any] = []
        first = threading.Thread(target=lambda: results.append(graph.run_sync(store.thread("t"))))
        first.start()
        assert inside.wait(30)
        for call in (graph.resume_sync, graph.run_sync):
            with pytest.raises(backstay.Fenced):
                call(store.thread("t"), wait=0)
        go_on.set()
        first.join()

        assert results[0].status is Status.COMPLETED
        assert walk.ran == ["a", "b"]


def test_a_worker_that_lost_its_lease_stores_nothing_more(url: str) -> None:
    """It was taken for dead, and another one went on: whatever it still does reaches no checkpoint."""
    walk = Walk()
    graph = walk.chain("a", "b", "c")
    with backstay.open(url) as store:
        slow = store.thread("t")

        def overtaken(state: State, ctx: Any) -> None:
            if walk.ran.count("b") > 1:
                return
            hold = slow._cursor.lease
            assert hold is not None
            access_of(store).store.renew(hold.branch, hold.epoch, hold.request._replace(ttl_us=1))
            other = threading.Thread(target=lambda: graph.resume_sync(store.thread("t"), wait=30.0))
            other.start()
            other.join()

        replace_node(graph, "b", walk.node("b", overtaken))
        with pytest.raises(backstay.Fenced):
            graph.run_sync(slow)

        assert walk.ran == ["a", "b", "b", "c"]
        assert head(store.thread("t")).state["seen"] == ["a", "b", "c"]


# In a changed graph -----------------------------------------------------------------------------------------------


class Around(TypedDict, total=False):
    seen: Annotated[list[str], append]
    note: str


class Renamed(TypedDict, total=False):
    seen: Annotated[list[str], append]
    remark: str
    extra: int


def renamed(walk: Walk) -> Graph:
    """Return what the chain of a, b and c became: b is ``better``, ``note`` is ``remark``, and ``extra`` is new."""
    graph = Graph("g", state=Renamed)
    for name in ("a", "better", "c"):
        graph.node(name, walk.node(name))
    graph.edge("a", "better")
    graph.edge("better", "c")
    graph.start("a")
    graph.end("c")
    return graph


def moved(state: dict[str, Any]) -> dict[str, Any]:
    return {"seen": state["seen"], "remark": state["note"].upper(), "extra": 1}


def test_a_parked_run_goes_on_in_a_changed_graph_once_somebody_said_how(store: backstay.Store) -> None:
    walk = Walk()
    old = walk.chain("a", "b", "c", before=["b"])
    thread = store.thread("t")
    old.run_sync(thread, {"note": "hello"})
    new = renamed(walk)
    (parked,) = new.pending(store)
    assert parked.judgement.overall is Verdict.NEEDS_MIGRATION
    with pytest.raises(backstay.GraphMismatch):
        new.resume_sync(thread, Approve())
    new.migrate(old.fingerprint, state=moved, nodes={"b": "better"})
    (parked,) = new.pending(store)
    assert parked.judgement.passes()

    result = new.resume_sync(thread, Approve())

    assert result.status is Status.COMPLETED
    assert result.values == {"seen": ["a", "better", "c"], "remark": "HELLO", "extra": 1}
    assert walk.ran == ["a", "better", "c"]
    assert head(thread).graph_hash == new.fingerprint
    assert new.pending(store) == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_run_pauses_at_a_node_that_was_renamed_as_it_was_told_to(store: backstay.Store, nested: bool) -> None:
    """What is guarded stays guarded under its new name; and nothing of the old graph is left in what is stored then."""
    walk = Walk()
    old, new, again = walk.chain("a", "b", "c"), renamed(walk), renamed(walk)
    new.migrate(old.fingerprint, state=moved, nodes={"b": "better"})
    if nested:
        outer_old, outer_new, outer_again = inside(old), inside(new), inside(again)
    else:
        outer_old, outer_new, outer_again = old, new, again
    thread = store.thread("t")
    outer_old.run_sync(thread, {"note": "hello"}, before=["b"], after=["b"])

    assert outer_new.resume_sync(thread).status is Status.INTERRUPTED
    waits = outer_again.resume_sync(thread)
    assert (waits.status, asked(waits), walk.ran) == (Status.INTERRUPTED, ["better"], ["a"])
    waits = outer_again.resume_sync(thread, Approve())
    assert (waits.status, asked(waits), walk.ran) == (Status.INTERRUPTED, ["better"], ["a", "better"])
    assert outer_again.resume_sync(thread, Approve()).status is Status.COMPLETED


def inside(graph: Graph) -> Graph:
    outer = Graph("outer", state=Around)
    outer.subgraph("in", graph)
    outer.start("in")
    outer.end("in")
    return outer


def test_a_migration_that_fails_changes_nothing(store: backstay.Store) -> None:
    walk = Walk()
    old = walk.chain("a", "b", "c", before=["b"])
    thread = store.thread("t")
    old.run_sync(thread)
    digest = head(thread).digest
    new = renamed(walk)
    new.migrate(old.fingerprint, state=moved, nodes={"b": "better"})  # there is no note to move

    with pytest.raises(MigrationFailed, match="raised KeyError"):
        new.resume_sync(thread, Approve())

    assert (walk.ran, head(thread).digest) == (["a"], digest)
    assert [record.decision for record in thread.interrupts()] == [None]
    assert old.resume_sync(thread, Approve()).status is Status.COMPLETED


def test_a_compatible_change_needs_the_callers_word(store: backstay.Store) -> None:
    walk = Walk()
    thread = store.thread("t")
    walk.chain("a", "b", before=["b"]).run_sync(thread)
    longer = walk.chain("a", "b", "c")
    longer._edges.clear()
    longer.edge("a", "b")
    longer.edge("a", "c", when=lambda state: False, name="never")
    longer.end("b", "c")
    (parked,) = longer.pending(store)
    assert parked.judgement.overall is Verdict.COMPATIBLE
    with pytest.raises(backstay.GraphMismatch, match="compatible=True"):
        longer.resume_sync(thread, Approve())

    assert longer.resume_sync(thread, Approve(), compatible=True).status is Status.COMPLETED
