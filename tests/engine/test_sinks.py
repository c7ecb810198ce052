"""Sinks and the wrappers around them, told of real commits to real live states; no graph is run here."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.codec import encode
from backstay.engine import sinks as sinks
from backstay.engine.reducers import append
from backstay.engine.sinks import (
    CheckpointSink,
    EveryN,
    IfChanged,
    MemorySink,
    NoSink,
    OnFailure,
    OnlyNodes,
    SinkWarning,
    Tee,
    Throttle,
    notify,
)
from backstay.engine.state import RunState, Schema, transient
from backstay.engine.triggers import FORCED, Cause, CheckpointEvent
from backstay.errors import Conflict, EncodeError, Fenced, InvalidInput, StoreFull
from backstay.model.frame import Frame, FrameInfo, FrameStack, Task
from support.running import Show


class Run:
    """A run without nodes: a real live state, and a moment for each commit to it."""

    def __init__(self, run_id: str = "run-1", state: type | None = None, **values: Any) -> None:
        self.run_id = run_id
        self.live = RunState(Schema(state, {"log": append} if state is None else {}), values)
        self.step = 0
        self.inside: tuple[Frame, ...] = ()
        self.tasks: tuple[Task, ...] = ()

    @property
    def state(self) -> Mapping[str, Any]:
        return self.live.schema.stored(self.live.values)

    def commit(self, node: str = "a", cause: Cause = "node", /, **update: Any) -> CheckpointEvent:
        mutated = self.live.apply(self.live.plan([(node, update)]))
        self.step += 1
        return self.moment(node, cause, mutated=mutated)

    def moment(self, node: str = "a", cause: Cause = "node", **facts: Any) -> CheckpointEvent:
        return CheckpointEvent(
            **{"graph_id": "g", "run_id": self.run_id, "node_id": node, "step": self.step, "trigger": cause, **facts},
            frames=self.frames,
            run_state=self.live,
        )

    def frames(self) -> FrameStack:
        outermost = Frame(graph_id="g", node_id="a", cursor=self.step, state=self.state, tasks=self.tasks)
        return FrameStack((outermost, *self.inside))


class Ear:
    """A sink that keeps nothing but which moments it was told."""

    def __init__(self) -> None:
        self.heard: list[CheckpointEvent] = []

    def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
        self.heard.append(moment)

    @property
    def steps(self) -> list[int]:
        return [moment.step for moment in self.heard]


class AsyncEar(Ear):
    """The same, done only when the event loop has gone round once."""

    async def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_soon(done.set_result, None)
        await done
        super().on_checkpoint(state, moment)


class Broken(Ear):
    """Raises what it was given, one after the other, and hears the rest; None in between is no error."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__()
        self.errors = list(errors)
        self.raised = 0

    def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            self.raised += 1
            raise error
        super().on_checkpoint(state, moment)


class AsyncBroken(Broken):
    async def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:  # type: ignore[override]
        super().on_checkpoint(state, moment)


class Hands:
    """A clock that goes where it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(sink: CheckpointSink, run: Run, moment: CheckpointEvent) -> None:
    """Tell a sink that does not need a loop."""
    assert sink.on_checkpoint(run.state, moment) is None


async def awaited(sink: CheckpointSink, run: Run, moment: CheckpointEvent) -> None:
    await notify(sink, run.state, moment)


def walk(sink: CheckpointSink, nodes: str, cause: Cause = "node") -> Run:
    """Commit once for each letter, each time with something new."""
    run = Run()
    for node in nodes:
        moment = run.commit(node, cause, log=[run.step])
        told(sink, run, moment)
    return run


# What is told -----------------------------------------------------------------------------------------------------


def test_a_moment_says_whose_commit_it_was_and_how_many_there_were_and_in_which_run() -> None:
    moment = Run("run-7").moment("search", attempt=3)

    assert moment.info == FrameInfo("search", 0)
    assert (moment.graph_id, moment.run_id, moment.attempt) == ("g", "run-7", 3)
    assert "run_state" not in repr(moment)


def test_how_a_run_begins_waits_and_ends_is_forced_and_nothing_else_is() -> None:
    causes: tuple[Cause, ...] = get_args(Cause)
    passing = {cause for cause in causes if not Run().moment("a", cause).forced}

    assert passing == {"node", "manual", "barrier"}
    assert passing | FORCED == set(causes)
    assert Run().moment("a", "node", forced=True).forced


def test_the_frames_are_made_only_if_somebody_wants_them() -> None:
    asked: list[str] = []
    run = Run()

    def frames() -> FrameStack:
        asked.append("frames")
        return run.frames()

    moment = CheckpointEvent(node_id="a", step=1, graph_id="g", run_id="r", frames=frames, run_state=run.live)
    for sink in (NoSink(), MemorySink(), EveryN(1, Ear()), Throttle(0, Ear()), OnlyNodes("a", Ear()), Tee(Ear())):
        told(sink, run, moment)

    assert asked == []
    told(IfChanged(Ear()), run, moment)
    assert asked == ["frames"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sink: EveryN(1, sink),
        lambda sink: Throttle(0, sink),
        lambda sink: OnlyNodes("a", sink),
        IfChanged,
        Tee,
        OnFailure,
        lambda sink: OnFailure(Broken(OSError()), "degrade", fallback=sink),
    ],
)
@pytest.mark.filterwarnings("ignore::backstay.engine.sinks.SinkWarning")
def test_the_state_is_lent_and_no_wrapper_copies_it(wrap: Callable[[CheckpointSink], CheckpointSink]) -> None:
    seen: list[Mapping[str, Any]] = []

    class Borrower:
        def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            seen.append(state)

    run = Run(log=[])
    moment = run.commit(log=[1])
    told(wrap(Borrower()), run, moment)

    assert seen[0] is run.live.values


def test_the_sink_alone_decides_whether_where_in_which_form_and_how_much_to_keep(tmp_path: Path) -> None:
    """One run, told to three sinks of a user's own: every second step as JSON on disk, all as msgpack over a socket."""
    here, there = socket.socketpair()

    class Disk:
        def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            (tmp_path / f"{moment.step}-{moment.node_id}.json").write_text(json.dumps(state))

    class Wire:
        def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            here.sendall(encode(state["log"][-1:]))  # no more than what is new

    with here, there:
        walk(Tee(EveryN(2, Disk()), Wire(), NoSink()), "abcde")
        received = there.recv(1000)

    assert {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()} == {
        "2-b.json": {"log": [0, 1]},
        "4-d.json": {"log": [0, 1, 2, 3]},
    }
    assert received == b"".join(encode([step]) for step in range(5))


def test_a_sink_may_be_awaited_is_told_in_order_and_its_errors_arrive() -> None:
    async def drive() -> None:
        ear, run = AsyncEar(), Run()
        for node in "abc":
            await awaited(ear, run, run.commit(node, x=node))
        assert [moment.node_id for moment in ear.heard] == ["a", "b", "c"]

        for broken in (Broken(OSError("full")), AsyncBroken(OSError("full"))):
            with pytest.raises(OSError, match="full"):
                await awaited(broken, run, run.commit())

    asyncio.run(drive())


# None, and memory -------------------------------------------------------------------------------------------------


def test_no_sink_keeps_nothing_and_needs_nothing() -> None:
    run = walk(NoSink(), "ab", "end")

    assert run.step == 2


def test_memory_keeps_a_frame_of_each_commit_with_its_graph_node_and_step() -> None:
    memory = MemorySink()
    assert memory.frames == []
    walk(memory, "ab")
    frames = [
        Frame(graph_id="g", node_id="a", cursor=1, state={"log": [0]}),
        Frame(graph_id="g", node_id="b", cursor=2, state={"log": [0, 1]}),
    ]

    assert memory.frames == frames
    assert repr(memory) == "<MemorySink: 2 frames, newest 'b'>"
    assert memory.into_frames() == frames
    assert (memory.frames, len(memory), repr(memory)) == ([], 0, "<MemorySink: 0 frames>")


def test_a_beginning_or_an_end_without_a_commit_of_its_own_makes_no_frame() -> None:
    memory, run = MemorySink(), Run(x=0)
    told(memory, run, run.moment("a", "input"))
    told(memory, run, run.commit("a", x=1))
    told(memory, run, run.commit("b", x=2))
    told(memory, run, run.moment("b", "interrupt"))
    told(memory, run, run.moment("b", "end"))

    assert [(frame.node_id, frame.cursor) for frame in memory.frames] == [("a", 1), ("b", 2)]


def test_a_commit_that_changed_nothing_has_its_frame_too() -> None:
    memory, run = MemorySink(), Run(x=0)
    for _ in range(2):
        told(memory, run, run.commit("again"))

    assert [frame.cursor for frame in memory.frames] == [1, 2]


def test_what_another_run_did_in_between_makes_no_second_frame_of_a_commit() -> None:
    memory, run, other = MemorySink(), Run("run"), Run("other")
    told(memory, run, run.commit("a"))
    told(memory, other, other.commit("b"))
    told(memory, run, run.moment("a", "end"))

    assert [frame.node_id for frame in memory.frames] == ["a", "b"]


def test_a_state_that_a_decision_changed_between_two_commits_is_a_frame_of_its_own() -> None:
    memory, run = MemorySink(), Run(x=0)
    told(memory, run, run.commit("a", x=1))
    run.live.apply(run.live.plan([("a person", {"x": 5})]))
    told(memory, run, run.moment("a", "interrupt"))

    assert [(frame.cursor, frame.state["x"]) for frame in memory.frames] == [(1, 1), (1, 5)]


def test_frames_share_nothing_with_the_run_nor_with_each_other() -> None:
    memory, run = MemorySink(), Run(log=[], plan={"deep": ["x"]})
    told(memory, run, run.commit(log=[1]))
    run.live.values["plan"]["deep"].append("changed by the run")
    memory.frames[0].state["plan"]["deep"].append("changed by a reader")
    told(memory, run, run.commit(log=[2]))

    assert memory.frames[0].state == {"log": [1], "plan": {"deep": ["x"]}}
    assert memory.frames[1].state == {"log": [1, 2], "plan": {"deep": ["x", "changed by the run"]}}


@dataclass
class Declared:
    plan: str
    client: Annotated[object, transient] = field(default_factory=object)


@dataclass
class Own:
    """A state that says itself what is kept of it."""

    plan: str
    client: object = None

    def snapshot(self) -> dict[str, Any]:
        return {"saved": self.plan}

    @classmethod
    def restore(cls, stored: Mapping[str, Any]) -> Own:
        return cls(stored["saved"])


@pytest.mark.parametrize(("declared", "kept"), [(Declared, {"plan": "new"}), (Own, {"saved": "new"})])
def test_what_is_kept_is_the_projection(declared: type, kept: dict[str, Any]) -> None:
    memory, run = MemorySink(), Run(state=declared, plan="old", client=object())
    told(memory, run, run.commit(plan="new"))

    assert memory.frames[0].state == kept


def test_the_frame_of_a_commit_inside_a_subgraph_has_that_graphs_name_and_state() -> None:
    memory, run, inner = MemorySink(), Run(outer=1), Run(inner=2)
    told(memory, run, run.moment("draft", graph_id="writing", node_state=inner.live, step=1))
    told(memory, run, run.moment("write", node_state=run.live, step=2))

    assert [(frame.graph_id, frame.state) for frame in memory.frames] == [
        ("writing", {"inner": 2}),
        ("g", {"outer": 1}),
    ]


def test_what_cannot_be_kept_is_an_error_and_leaves_no_half_frame() -> None:
    memory, run = MemorySink(), Run(x=1)

    with pytest.raises(EncodeError, match="lock"):
        told(memory, run, run.commit(lock=threading.Lock()))
    assert memory.frames == []


def test_what_does_not_change_is_kept_once_and_the_number_of_frames_can_be_bounded(show: Show) -> None:
    document, steps = "x" * 200_000, 500
    memory, last = MemorySink(), MemorySink(max_frames=3)
    run = Run(document=document, note="")
    for step in range(steps):
        told(Tee(memory, last), run, run.commit(note=f"{step:04}"))
    copies = len(encode(document)) * steps
    show("memory sink, 500 frames of 200 KB: kept bytes / full copies", f"{memory.size_bytes / copies:.4f}")

    assert len(memory) == steps
    assert memory.frames[7].state == {"document": document, "note": "0007"}
    assert memory.size_bytes == len(encode(document)) + steps * len(encode("0000"))
    assert [frame.cursor for frame in last.frames] == [498, 499, 500]


# Wrappers, one by one ---------------------------------------------------------------------------------------------


def test_every_n_passes_on_each_nth_counted_from_the_last_that_was_passed_on() -> None:
    ear = Ear()
    sink, run = EveryN(3, ear), Run()
    for cause in ("input", "node", "node", "node", "node", "interrupt", "node", "node", "node", "end"):
        told(sink, run, run.commit("a", cause))

    assert ear.steps == [1, 4, 6, 9, 10]


def test_a_throttle_is_quiet_for_a_while_after_it_was_told() -> None:
    ear, clock = Ear(), Hands()
    sink, run = Throttle(10, ear, clock), Run()
    for now in (100, 101, 109.9, 110, 119, 121):
        clock.now = now
        told(sink, run, run.commit())

    assert ear.steps == [1, 4, 6]


def test_if_changed_passes_on_only_what_differs_from_the_last_that_was_passed_on() -> None:
    ear, run = Ear(), Run(x=0)
    sink = IfChanged(ear)
    for x in (1, 1, 2, 1, 1):
        told(sink, run, run.commit(x=x))
    told(sink, run, run.commit("a", "end"))

    assert ear.steps == [1, 3, 4, 6]


def test_what_changes_inside_a_subgraph_or_a_fan_out_is_a_change_too() -> None:
    ear, run = Ear(), Run(x=0)
    sink = IfChanged(ear)

    def commit(inside: tuple[Frame, ...] = (), tasks: tuple[Task, ...] = ()) -> None:
        run.inside, run.tasks = inside, tasks
        told(sink, run, run.commit())

    def inner(y: int, cursor: int = 0) -> Frame:
        return Frame(graph_id="inner", node_id="n", cursor=cursor, state={"y": y})

    commit()
    commit(inside=(inner(1),))
    commit(inside=(inner(1, cursor=9),))  # it only moved on
    commit(inside=(inner(2),))
    commit()
    commit(tasks=(Task(node="left"), Task(node="right")))  # nothing is done yet
    commit(tasks=(Task(node="left", done=True, update={"x": 1}), Task(node="right")))
    commit(tasks=(Task(node="left", done=True, update={"x": 1}), Task(node="right", frames=(inner(1),))))
    commit(tasks=(Task(node="left", done=True, update={"x": 1}), Task(node="right", frames=(inner(1, cursor=9),))))
    commit(tasks=(Task(node="left", done=True, update={"x": 1}), Task(node="right", frames=(inner(2),))))

    assert ear.steps == [1, 2, 4, 5, 7, 8, 10]


@pytest.mark.parametrize("nodes", ["b", ["b"], {"b", "nowhere"}, lambda name: name > "a"])
def test_only_some_nodes_are_passed_on_and_the_end_always(nodes: Any) -> None:
    ear, run = Ear(), Run()
    sink = OnlyNodes(nodes, ear)
    for node in "abab":
        told(sink, run, run.commit(node))
    told(sink, run, run.commit("a", "end"))

    assert ear.steps == [2, 4, 5]


async def until_it_fails(sink: CheckpointSink, run: Run) -> None:
    for _ in range(10):
        await awaited(sink, run, run.commit())


@pytest.mark.parametrize("wrap", [lambda s: EveryN(3, s), lambda s: Throttle(10, s, Hands()), IfChanged])
@pytest.mark.parametrize("kind", [Broken, AsyncBroken])
def test_after_an_error_the_next_moment_is_due_at_once(
    wrap: Callable[[CheckpointSink], CheckpointSink], kind: type[Broken]
) -> None:
    """What was not kept must not be taken for kept: else an unchanged, or early, state would be lost in silence."""

    async def drive() -> None:
        sink, run = kind(OSError("first"), None, OSError("forced")), Run(x=0)
        wrapped = wrap(sink)
        with pytest.raises(OSError, match="first"):
            await until_it_fails(wrapped, run)
        begin = run.step
        for _ in range(2):
            await awaited(wrapped, run, run.commit())
        assert sink.steps == [begin + 1]  # the second is not due again

        with pytest.raises(OSError, match="forced"):
            await awaited(wrapped, run, run.commit("a", "interrupt"))
        for _ in range(2):
            await awaited(wrapped, run, run.commit())
        assert sink.steps == [begin + 1, begin + 4]

    asyncio.run(drive())


def test_one_sink_serves_many_runs_and_keeps_them_apart() -> None:
    """Two runs taking turns: a counter for both would pass on one run's moments only."""
    ear, clock = Ear(), Hands()
    first, second = Run("first", x=0), Run("second", x=0)
    counted, throttled, changed = EveryN(2, ear), Throttle(9, ear, clock), IfChanged(ear)
    for sink, expected in ((counted, [2, 4]), (throttled, [5]), (changed, [9])):
        ear.heard.clear()
        for _ in range(4):
            for run in (first, second):
                told(sink, run, run.commit())
        for run_id in ("first", "second"):
            assert [moment.step for moment in ear.heard if moment.run_id == run_id] == expected


def test_nothing_is_remembered_of_runs_that_ended_and_of_few_that_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "RUNS_MAX", 3)
    ear = Ear()
    sink = IfChanged(ear)

    def again(run: Run) -> bool:
        before = len(ear.heard)
        told(sink, run, run.commit())
        return len(ear.heard) > before

    runs = [Run(str(number), x=0) for number in range(4)]
    assert [again(run) for run in runs] == [True] * 4
    assert [again(run) for run in runs[1:]] == [False] * 3
    assert again(runs[0])  # was the longest silent when the fourth came

    told(sink, runs[0], runs[0].commit("a", "failed"))
    assert again(runs[0])


def test_the_run_that_is_forgotten_is_the_longest_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "RUNS_MAX", 2)
    ear = Ear()
    sink = EveryN(3, ear)
    runs = {name: Run(name) for name in "abc"}
    for name in "abacab":
        told(sink, runs[name], runs[name].commit())

    assert [(moment.run_id, moment.step) for moment in ear.heard] == [("a", 3)]


# Several, and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Broken, AsyncBroken])
def test_a_sink_that_fails_does_not_keep_the_others_from_being_told(kind: type[Broken]) -> None:
    async def drive() -> None:
        first, last, run = Ear(), AsyncEar(), Run()
        sink = Tee(Broken(KeyError("one")), first, kind(OSError("two")), kind(ValueError("three")), last)
        with pytest.raises(ExceptionGroup, match="3 of the sinks failed") as caught:
            await awaited(sink, run, run.commit())

        assert [type(error) for error in caught.value.exceptions] == [KeyError, OSError, ValueError]
        assert (first.steps, last.steps) == ([1], [1])
        await awaited(sink, run, run.commit())
        assert (first.steps, last.steps) == ([1, 2], [1, 2])

    asyncio.run(drive())


def test_a_tee_tells_each_sink_only_when_the_one_before_is_done() -> None:
    order: list[str] = []

    class Slow(AsyncEar):
        async def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:  # type: ignore[override]
            order.append("slow begins")
            await super().on_checkpoint(state, moment)
            order.append("slow is done")

    class Next:
        def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            order.append("next")

    run = Run()
    asyncio.run(awaited(Tee(Slow(), Next(), Slow()), run, run.commit()))

    assert order == ["slow begins", "slow is done", "next", "slow begins", "slow is done"]


def test_being_cancelled_is_no_failure_of_a_sink() -> None:
    """A tee stops at once, and no policy swallows it."""
    after, run = Ear(), Run()

    class Cancelled:
        async def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            raise asyncio.CancelledError

    sink = OnFailure(Tee(Cancelled(), after), "warn")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(awaited(sink, run, run.commit()))
    assert (after.heard, list(sink.failures)) == ([], [])


@pytest.mark.parametrize("kind", [Broken, AsyncBroken])
def test_with_raise_the_run_gets_the_error(kind: type[Broken]) -> None:
    async def drive() -> None:
        error, run = OSError("full"), Run()
        sink = OnFailure(kind(error))
        with pytest.raises(OSError, match="full"):
            await awaited(sink, run, run.commit("search"))

        (failure,) = sink.failures
        assert (failure.node_id, failure.step, failure.trigger, failure.error) == ("search", 1, "node", error)

    asyncio.run(drive())


@pytest.mark.parametrize("kind", [Broken, AsyncBroken])
def test_with_warn_the_run_goes_on_and_each_failure_is_seen(kind: type[Broken]) -> None:
    async def drive() -> None:
        inner, run = kind(OSError("secret"), None, StoreFull("no space left")), Run()
        sink = OnFailure(inner, "warn")
        with pytest.warns(SinkWarning, match=r"failed at step 1, after node 'a'.*OSError$") as first:
            await awaited(sink, run, run.commit())
        await awaited(sink, run, run.commit())
        with pytest.warns(SinkWarning, match="step 3.*no space left"):
            await awaited(sink, run, run.commit())

        assert "secret" not in str(first[0].message)  # whatever a foreign error says may be a value of the state
        assert inner.steps == [2]
        assert [failure.step for failure in sink.failures] == [1, 3]
        assert (sink.failure_count, sink.degraded) == (2, False)

    asyncio.run(drive())


@pytest.mark.parametrize("kind", [Broken, AsyncBroken])
@pytest.mark.parametrize("fallback", [Ear, AsyncEar, None])
def test_with_degrade_the_fallback_takes_over_with_the_very_moment_that_failed(
    kind: type[Broken], fallback: type[Ear] | None
) -> None:
    async def drive() -> None:
        inner, other, run = kind(None, OSError()), fallback() if fallback else None, Run()
        sink = OnFailure(inner, "degrade", fallback=other)
        await awaited(sink, run, run.commit())
        assert not sink.degraded
        with pytest.warns(SinkWarning, match="gets no further checkpoints"):
            await awaited(sink, run, run.commit())
        for _ in range(2):
            await awaited(sink, run, run.commit())  # a warning would be an error here

        assert inner.steps == [1]
        assert other is None or other.steps == [2, 3, 4]
        assert sink.degraded
        assert [failure.step for failure in sink.failures] == [2]

    asyncio.run(drive())


def test_a_fallback_that_fails_too_is_an_error() -> None:
    sink, run = OnFailure(Broken(OSError()), "degrade", fallback=Broken(KeyError())), Run()
    with pytest.warns(SinkWarning), pytest.raises(KeyError):
        told(sink, run, run.commit())


@pytest.mark.parametrize("policy", ["warn", "degrade"])
@pytest.mark.parametrize("error", [Fenced("taken over", epoch=1, current=2), Conflict("the head moved")], ids=type)
@pytest.mark.parametrize("wrap", [lambda sink: sink, lambda sink: Tee(NoSink(), Tee(sink, Broken(OSError())))])
def test_that_another_writer_took_over_is_never_swallowed(
    policy: sinks.Policy, error: Exception, wrap: Callable[[CheckpointSink], CheckpointSink]
) -> None:
    """A run that went on would do the other's work, and its effects, a second time."""
    other, run = Ear(), Run()
    sink = OnFailure(wrap(Broken(error)), policy, fallback=other if policy == "degrade" else None)

    with pytest.raises((type(error), ExceptionGroup)):
        told(sink, run, run.commit())
    assert not sink.degraded
    assert other.heard == []


def test_other_failures_of_a_tee_are_the_policys_business() -> None:
    heard, run = Ear(), Run()
    sink = OnFailure(Tee(Broken(OSError()), heard), "warn")
    with pytest.warns(SinkWarning, match="ExceptionGroup"):
        told(sink, run, run.commit())

    assert heard.steps == [1]


def test_of_many_failures_the_newest_are_kept_and_all_are_counted() -> None:
    many = sinks.FAILURES_MAX + 1
    sink, run = OnFailure(Broken(*(OSError() for _ in range(many))), "warn"), Run()
    for _ in range(many):
        with pytest.warns(SinkWarning):
            told(sink, run, run.commit())

    assert [sink.failures[0].step, sink.failures[-1].step, sink.failure_count] == [2, many, many]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryN(0, NoSink()),
        lambda: EveryN(True, NoSink()),
        lambda: Throttle(-1, NoSink()),
        lambda: Throttle(float("nan"), NoSink()),
        lambda: MemorySink(max_frames=0),
        lambda: Tee(NoSink(), NoSink),  # type: ignore[arg-type]  # its brackets are missing: the mistake
        lambda: IfChanged("memory:"),  # type: ignore[arg-type]
        lambda: OnFailure(NoSink(), "ignore"),  # type: ignore[arg-type]
        lambda: OnFailure(NoSink(), "warn", fallback=NoSink()),
    ],
)
def test_what_can_never_work_is_refused_when_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_one_sink_may_be_told_from_many_threads() -> None:
    """Eight runs in eight threads through one stack of wrappers: each run's frames are complete and in order."""
    memory, together = MemorySink(), threading.Barrier(8)
    sink = EveryN(2, IfChanged(Throttle(0, OnlyNodes(str.isalpha, memory))))

    def drive(name: str) -> None:
        run = Run(name, x=0)
        together.wait()
        for number in range(200):
            told(sink, run, run.commit(name, x=number))

    threads = [threading.Thread(target=drive, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    steps: dict[str, list[int]] = {}
    for frame in memory.frames:
        steps.setdefault(frame.node_id, []).append(frame.cursor)
    assert steps == {name: list(range(2, 201, 2)) for name in "abcdefgh"}


# Any nesting ------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One commit of a made-up run, as the reference sees it."""

    number: int
    run: str
    node: str
    cause: Cause
    now: float
    x: int

    @property
    def forced(self) -> bool:
        return self.cause in ("input", "interrupt", "end", "rejected", "failed", "cancelled")

    @property
    def ends(self) -> bool:
        return self.cause in ("end", "rejected", "failed", "cancelled")


Spec = tuple[Any, ...]  # (kind, argument, inner specs …)

causes = st.sampled_from(["node"] * 8 + ["input", "interrupt", "end", "failed", "manual", "barrier"])
steps = st.lists(
    st.tuples(st.sampled_from("rs"), st.sampled_from("abc"), causes, st.sampled_from([0, 1, 1, 5]), st.integers(0, 2)),
    max_size=40,
)
specs: st.SearchStrategy[Spec] = st.recursive(
    st.sampled_from([("ear",), ("async ear",)]),
    lambda inner: st.one_of(
        st.tuples(st.just("every"), st.integers(1, 4), inner),
        st.tuples(st.just("throttle"), st.sampled_from([0, 1, 3, 10]), inner),
        st.tuples(st.just("only"), st.sampled_from(["a", "bc", ""]), inner),
        st.tuples(st.just("changed"), st.none(), inner),
        st.tuples(st.just("failure"), st.sampled_from(["raise", "warn", "degrade"]), inner),
        st.tuples(st.just("tee"), st.none(), inner, inner),
    ),
    max_leaves=4,
)


def make(spec: Spec, clock: Hands, ears: list[Ear]) -> CheckpointSink:
    match spec:
        case ("ear",) | ("async ear",):
            ears.append(Ear() if spec == ("ear",) else AsyncEar())
            return ears[-1]
        case ("every", n, inner):
            return EveryN(n, make(inner, clock, ears))
        case ("throttle", seconds, inner):
            return Throttle(seconds, make(inner, clock, ears), clock)
        case ("only", names, inner):
            return OnlyNodes(list(names), make(inner, clock, ears))
        case ("changed", None, inner):
            return IfChanged(make(inner, clock, ears))
        case ("failure", policy, inner):
            return OnFailure(make(inner, clock, ears), policy)
        case _:
            return Tee(*(make(inner, clock, ears) for inner in spec[2:]))


def predict(spec: Spec, told: list[Step]) -> list[list[int]]:
    """Return the numbers of the steps that each ear hears: each layer, on its own, chooses from what reaches it."""
    if len(spec) == 1:
        return [[step.number for step in told]]
    kind, argument, *inner = spec
    if kind in CHOICES:
        lives = [CHOICES[kind](argument, life) for life in lives_of(told)]
        told = sorted(itertools.chain.from_iterable(lives))
    return [heard for each in inner for heard in predict(each, told)]


def lives_of(told: list[Step]) -> list[list[Step]]:
    """Return what belongs together: the steps of one run up to its end."""
    lives: list[list[Step]] = []
    for run in "rs":
        lives.append([])
        for step in told:
            if step.run == run:
                lives[-1].append(step)
                if step.ends:
                    lives.append([])
    return lives


def every_nth(n: int, life: list[Step]) -> list[Step]:
    chosen: list[int] = []
    for index, step in enumerate(life):
        if step.forced or index - max(chosen, default=-1) == n:
            chosen.append(index)
    return [life[index] for index in chosen]


def not_too_often(seconds: float, life: list[Step]) -> list[Step]:
    chosen: list[Step] = []
    for step in life:
        if step.forced or not chosen or step.now >= chosen[-1].now + seconds:
            chosen.append(step)
    return chosen


def different(_: None, life: list[Step]) -> list[Step]:
    chosen: list[Step] = []
    for step in life:
        if step.forced or [step.x] != [each.x for each in chosen[-1:]]:
            chosen.append(step)
    return chosen


CHOICES: dict[str, Callable[[Any, list[Step]], list[Step]]] = {
    "every": every_nth,
    "throttle": not_too_often,
    "only": lambda names, life: [step for step in life if step.forced or step.node in names],
    "changed": different,
}


@given(spec=specs, script=steps)
def test_any_nesting_of_wrappers_tells_exactly_what_a_pure_function_predicts(
    spec: Spec, script: list[tuple[str, str, Cause, float, int]]
) -> None:
    clock, ears = Hands(), list[Ear]()
    sink = make(spec, clock, ears)
    runs = {name: Run(name, x=0) for name in "rs"}
    expected: list[Step] = []

    async def drive() -> None:
        for number, (name, node, cause, later, x) in enumerate(script):
            clock.now += later
            run = runs[name]
            run.step = number  # numbers the moments of both runs, so that an ear's steps tell which it heard
            run.live.apply(run.live.plan([(node, {"x": x})]))
            expected.append(Step(number, name, node, cause, clock.now, x))
            await awaited(sink, run, run.moment(node, cause))

    asyncio.run(drive())

    assert [ear.steps for ear in ears] == predict(spec, expected)
    forced = {step.number for step in expected if step.forced}
    assert all(forced <= set(ear.steps) for ear in ears)
