"""Pauses: before, after and inside nodes, by barriers and from outside; what each answer does, and what none can do."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.events import DecisionTaken, Event, Interrupted, NodeStarted
from backstay.errors import Conflict, Rejected
from backstay.model.decision import Answer, Approve, Decision, Defer, InterruptKind, Modify, Reject, Reroute
from backstay.model.frame import End
from support.engine.event_log import EventLog
from support.engine.walk import State, Walk, asked, head, replace_node
from support.processes import child_environment


@pytest.fixture
def memory_thread() -> Any:
    with backstay.open("memory:") as store:
        yield store.thread("t")


# Before and after -------------------------------------------------------------------------------------------------


def test_a_run_stops_before_and_after_the_nodes_that_are_named(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c", before=["b"])

    first = graph.run_sync(thread, after=["b"])  # the graph's own, and the run's
    assert (first.status, asked(first), walk.ran) == (Status.INTERRUPTED, ["b"], ["a"])
    assert first.interrupts[0].interrupt.kind is InterruptKind.BEFORE_NODE
    assert first.interrupts[0].interrupt.prompt == "Run b?"
    assert first.checkpoint is not None
    assert (first.checkpoint.id, first.checkpoint.next_node) == (head(thread).id, "b")
    second = graph.resume_sync(thread, Approve())
    assert (second.status, asked(second), walk.ran) == (Status.INTERRUPTED, ["b"], ["a", "b"])
    assert second.interrupts[0].interrupt.kind is InterruptKind.AFTER_NODE
    third = graph.resume_sync(thread, Approve())

    assert (third.status, third.path, walk.ran) == (Status.COMPLETED, ("a", "b", "c"), ["a", "b", "c"])
    assert third.steps == 3


def test_what_a_pause_stores_says_what_is_next_whichever_kind_it_is(memory_thread: backstay.Thread) -> None:
    graph = Walk().chain("a", "b", before=["b"], after=["b"])
    graph.run_sync(memory_thread)
    stopped = head(memory_thread)
    assert (stopped.last_node, stopped.next_node, stopped.interrupt is not None) == ("a", "b", True)
    graph.resume_sync(memory_thread, Approve())
    stopped = head(memory_thread)

    assert (stopped.last_node, stopped.next_node) == ("b", None)  # decided when it goes on
    assert stopped.state["seen"] == ["a", "b"]


def test_a_star_stops_at_every_node_and_each_approval_opens_one_gate(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", before=["*"], after=["*"])
    result = graph.run_sync(memory_thread)
    gates = []
    while result.status is Status.INTERRUPTED:
        (record,) = result.interrupts
        gates.append((record.interrupt.kind.value, record.interrupt.node, len(walk.ran)))
        result = graph.resume_sync(memory_thread, Approve())

    assert gates == [("beforenode", "a", 0), ("afternode", "a", 1), ("beforenode", "b", 1), ("afternode", "b", 2)]
    assert result.status is Status.COMPLETED
    assert len({record.id for record in memory_thread.interrupts(pending=False)}) == 4


def test_an_approval_skips_exactly_one_interrupt_once_also_in_a_loop(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = Graph("g", state=State, before=["a"])
    graph.node("a", walk.node("a", lambda state, ctx: {"count": 1}))
    graph.edge("a", "a", when=lambda state: state["count"] < 3, name="more")
    graph.start("a")
    graph.end("a")
    result = graph.run_sync(memory_thread)
    for done in range(3):
        assert (result.status, len(walk.ran)) == (Status.INTERRUPTED, done)
        result = graph.resume_sync(memory_thread, Approve())

    assert result.status is Status.COMPLETED


def test_an_after_interrupt_does_not_open_the_before_interrupt_of_the_next_node(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", after=["a"], before=["b"])
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, Approve())

    assert (result.status, asked(result), walk.ran) == (Status.INTERRUPTED, ["b"], ["a"])


def test_a_fan_out_after_an_after_interrupt_runs_whole(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.fan("l", "r", after=["split"])
    graph.run_sync(thread)

    result = graph.resume_sync(thread, Approve())

    assert result.values["seen"] == ["split", "l", "r", "join"]
    assert sorted(walk.ran) == ["join", "l", "r", "split"]


@pytest.mark.parametrize("how", ["modify", "update"])
def test_the_route_is_decided_after_a_person_edited_the_state(memory_thread: backstay.Thread, how: str) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c")
    graph._edges.clear()
    tried: list[str] = []

    def wants_c(state: State) -> bool:
        tried.append(state.get("note", "none"))
        return state.get("note") == "c"

    graph.edge("a", "c", when=wants_c)
    graph.edge("a", "b", fallback=True)
    graph.end("b", "c")
    graph.run_sync(memory_thread, {"note": "b"}, after=["a"])
    assert tried == []  # nobody has looked yet
    if how == "modify":
        result = graph.resume_sync(memory_thread, Modify({"note": "c"}))
    else:
        result = graph.resume_sync(memory_thread, Approve(), update={"note": "c"})

    assert (result.path, tried) == (("a", "c"), ["c"])


def test_finish_nodes_obey_the_same_rules_and_are_not_run_again(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.chain("a", before=["a"], after=["a"])
    assert graph.run_sync(thread).status is Status.INTERRUPTED
    assert walk.ran == []
    assert graph.resume_sync(thread, Approve()).status is Status.INTERRUPTED
    assert walk.ran == ["a"]

    assert graph.resume_sync(thread, Approve()).status is Status.COMPLETED
    assert walk.ran == ["a"]
    assert isinstance(head(thread).continuation, End)
    with pytest.raises(backstay.InvalidInput, match="is over"):
        graph.resume_sync(thread)


def test_a_pause_at_an_unknown_node_is_refused_before_anything_runs() -> None:
    walk = Walk()
    for before, after in ((["z"], []), ([], ["z"])):
        with pytest.raises(backstay.InvalidInput, match="'z', which is not a node"):
            walk.chain("a").run_sync(None, before=before, after=after)
    assert walk.ran == []


# What answers do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "barrier", "tool", "ask"])
def test_reject_ends_the_run_and_executes_nothing_and_is_told_from_success(
    where: str, memory_thread: backstay.Thread
) -> None:
    walk = Walk()
    graph = guarded(walk, where)
    assert graph.run_sync(memory_thread).status is Status.INTERRUPTED

    result = graph.resume_sync(memory_thread, Reject("too expensive"))

    assert (result.status, result.reason, walk.ran) == (Status.REJECTED, "too expensive", ["a"])
    assert (head(memory_thread).trigger, list(memory_thread.interrupts())) == ("rejected", [])
    with pytest.raises(Rejected, match="too expensive"):
        result.raise_for_status()
    with pytest.raises(backstay.InvalidInput, match="is over"):
        graph.resume_sync(memory_thread, Approve())


def guarded(walk: Walk, where: str, **options: Any) -> Graph:
    """Return a graph whose node ``done`` must not run without a yes."""
    graph = Graph("g", state=State, **options)
    graph.node("a", walk.node("a"))
    graph.node("elsewhere", walk.node("elsewhere"))
    graph.start("a")
    graph.end("elsewhere")
    match where:
        case "tool":
            graph.node("done", lambda state, ctx: spent(walk, ctx.approve("pay", {"amount": 5})))
        case "ask":
            graph.node("done", lambda state, ctx: spent(walk, ctx.ask("how much?")))
        case _:
            graph.node("done", walk.node("done"))
    if where == "barrier":
        graph.barrier("gate", "May it?", payload=lambda state: {"seen": state["seen"]})
        graph.edge("a", "gate")
        graph.edge("gate", "done")
    else:
        graph.edge("a", "done")
    graph.edge("done", "elsewhere", when=lambda state: False, name="never")
    graph.end("done")
    graph.before = frozenset({"done"} if where == "before" else ())
    graph.after = frozenset({"a"} if where == "after" else ())
    return graph


def spent(walk: Walk, given: Any) -> dict[str, Any]:
    walk.ran.append("done")
    return {"items": [given]}


@pytest.mark.parametrize("where", ["before", "after", "barrier", "tool", "ask"])
def test_defer_executes_nothing_and_asks_again(where: str, memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = guarded(walk, where)
    first = graph.run_sync(memory_thread)

    deferred = graph.resume_sync(memory_thread, Defer("tomorrow"))

    assert (deferred.status, "done" in walk.ran) == (Status.DEFERRED, False)
    again = graph.resume_sync(memory_thread)
    assert (again.status, "done" in walk.ran) == (Status.INTERRUPTED, False)
    assert [record.id for record in deferred.interrupts] == [record.id for record in again.interrupts]
    assert again.interrupts[0].id != first.interrupts[0].id
    answer = Answer(3) if where == "ask" else Approve()
    assert graph.resume_sync(memory_thread, answer).status is Status.COMPLETED
    assert walk.ran.count("done") == 1


@pytest.mark.parametrize("where", ["before", "after", "barrier", "tool", "ask"])
def test_reroute_goes_elsewhere_and_executes_nothing_that_was_guarded(
    where: str, memory_thread: backstay.Thread
) -> None:
    walk = Walk()
    graph = guarded(walk, where)
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, Reroute("elsewhere"))

    assert (result.status, walk.ran) == (Status.COMPLETED, ["a", "elsewhere"])


@pytest.mark.parametrize("where", ["before", "after", "barrier"])
def test_modify_updates_the_state_through_its_reducers_and_goes_on(where: str, memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = guarded(walk, where)
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, Modify({"seen": ["human"], "note": "edited"}))

    assert result.values["seen"] == ["a", "human", "done"]
    assert result.values["note"] == "edited"


@pytest.mark.parametrize(
    "wrong", [Modify({"unknown": 1}), Modify("text"), Modify({"seen": "no list"}), Reroute("nobody")]
)
@pytest.mark.parametrize("where", ["before", "after", "barrier"])
def test_an_answer_that_makes_no_sense_is_told_so_and_the_question_asked_anew(
    wrong: Decision, where: str, memory_thread: backstay.Thread
) -> None:
    walk = Walk()
    graph = guarded(walk, where)
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, wrong)

    assert (result.status, "done" in walk.ran) == (Status.INTERRUPTED, False)
    assert "The last answer could not be used" in result.interrupts[0].interrupt.prompt
    assert graph.resume_sync(memory_thread, Approve()).status is Status.COMPLETED


# Barriers ---------------------------------------------------------------------------------------------------------


def test_a_barrier_shows_what_its_function_says_and_waits(memory_thread: backstay.Thread) -> None:
    graph = guarded(Walk(), "barrier")
    (record,) = graph.run_sync(memory_thread).interrupts

    assert (record.interrupt.prompt, record.interrupt.payload) == ("May it?", {"seen": ["a"]})
    assert graph.resume_sync(memory_thread).status is Status.INTERRUPTED  # nobody answered: it still waits
    assert [each.id for each in memory_thread.interrupts()] == [record.id]


def test_a_barrier_that_is_turned_down_goes_where_it_says(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = Graph("g", state=State)
    graph.barrier("gate", on_reject="excuse")
    graph.node("act", walk.node("act"))
    graph.node("excuse", walk.node("excuse"))
    graph.edge("gate", "act")
    graph.start("gate")
    graph.end("act", "excuse")
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, Reject("no"))

    assert (result.status, walk.ran) == (Status.COMPLETED, ["excuse"])


@pytest.mark.parametrize(("on_timeout", "status"), [("reject", Status.REJECTED), ("defer", Status.DEFERRED)])
def test_a_timeout_never_executes_what_is_guarded(
    thread: backstay.Thread, clock: Any, on_timeout: str, status: Status
) -> None:
    walk = Walk()
    graph = Graph("g", state=State)
    graph.barrier("gate", timeout=60, on_timeout=on_timeout)
    graph.node("act", walk.node("act"))
    graph.edge("gate", "act")
    graph.start("gate")
    graph.end("act")
    graph.run_sync(thread)
    clock.step(seconds=59)
    assert graph.resume_sync(thread).status is Status.INTERRUPTED
    clock.step(seconds=2)

    result = graph.resume_sync(thread)

    assert (result.status, walk.ran) == (status, [])
    (first, *_) = thread.interrupts(pending=False)
    assert first.decided_by == "timeout"


def test_a_decision_in_time_counts_before_the_timeout(thread: backstay.Thread, clock: Any) -> None:
    graph = Graph("g", state=State)
    graph.barrier("gate", timeout=60)
    graph.start("gate")
    graph.end("gate")
    (record,) = graph.run_sync(thread).interrupts
    thread.decide(record, "approve", by="ann")
    clock.step(hours=5)

    assert graph.resume_sync(thread).status is Status.COMPLETED


# Inside nodes -----------------------------------------------------------------------------------------------------


def test_a_tool_call_waits_for_approval_and_shows_tool_and_arguments(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = guarded(walk, "tool")
    (record,) = graph.run_sync(thread).interrupts

    assert record.interrupt.kind is InterruptKind.TOOL_APPROVAL
    assert record.interrupt.payload == {"tool": "pay", "args": {"amount": 5}}
    assert head(thread).interrupt == record.interrupt
    result = graph.resume_sync(thread, Modify({"amount": 3}))
    assert result.values["items"] == [{"amount": 3}]
    assert walk.ran == ["a", "done"]


def test_the_pending_action_is_the_tool_call_that_waits_and_is_gone_after_the_decision(thread: backstay.Thread) -> None:
    call = {"tool": "pay", "args": {"amount": 5}}
    graph = guarded(Walk(), "tool")
    graph.run_sync(thread)
    waiting = head(thread)
    assert waiting.pending_action == call

    graph.resume_sync(thread)  # no decision yet
    graph.resume_sync(thread, Defer())
    assert head(thread).pending_action == call
    result = graph.resume_sync(thread, Approve())

    assert result.values["items"] == [call["args"]]
    assert head(thread).pending_action is None
    stored = thread.get(waiting.id)
    assert stored is not None
    assert stored.pending_action == call  # history does not change


def test_each_of_two_tool_calls_that_wait_is_the_pending_action_of_its_checkpoint(
    memory_thread: backstay.Thread,
) -> None:
    graph = Walk().fan("l", "r")
    for name in ("l", "r"):
        replace_node(graph, name, lambda state, ctx, name=name: {"items": [ctx.approve(name, {"of": name})]})
    result = graph.run_sync(memory_thread)
    stored = [memory_thread.get(meta.id) for meta in memory_thread.history() if meta.interrupt is not None]

    assert len(result.interrupts) == 2
    assert sorted(str(each.pending_action) for each in stored if each) == [
        "{'tool': 'l', 'args': {'of': 'l'}}",
        "{'tool': 'r', 'args': {'of': 'r'}}",
    ]


PAYING = """
import os, signal, sys
from typing import Annotated, Any, TypedDict
import backstay
from backstay import Approve, Graph
from backstay.engine.reducers import append

class State(TypedDict, total=False):
    items: Annotated[list[Any], append]

def pay(state, ctx):
    args = ctx.approve("pay", {"amount": 5, "to": ["Zoë"]})
    if sys.argv[2] == "dies after the decision":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"items": [args]}

graph = Graph("g", state=State)
graph.node("pay", pay)
graph.start("pay")
graph.end("pay")
with backstay.open(sys.argv[1]) as store:
    thread = store.thread("t")
    if sys.argv[2] == "dies at the pause":
        graph.run_sync(thread, lease_s=0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    answer = Approve() if sys.argv[2] == "dies after the decision" else None
    result = graph.resume_sync(thread, answer, lease_s=0.1, wait=20)
    print(result.status.value, result.values["items"])
"""


@pytest.mark.crash
def test_the_pending_action_survives_killed_processes_and_is_the_call_that_is_made(tmp_path: Path) -> None:
    call = {"tool": "pay", "args": {"amount": 5, "to": ["Zoë"]}}

    def run(how: str) -> tuple[int, str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", PAYING, str(tmp_path / "a.db"), how],
            capture_output=True,
            text=True,
            check=False,
            env=child_environment(),
        )
        with backstay.open(tmp_path / "a.db") as store:
            return done.returncode, done.stdout, head(store.thread("t")).pending_action

    assert run("dies at the pause") == (-signal.SIGKILL, "", call)
    assert run("dies after the decision") == (-signal.SIGKILL, "", call)
    assert run("completes") == (0, f"completed [{call['args']}]\n", None)


def test_a_node_may_live_with_a_no(memory_thread: backstay.Thread) -> None:
    def careful(state: State, ctx: Any) -> dict[str, Any]:
        try:
            ctx.approve("pay", {"amount": 5})
        except Rejected as refusal:
            return {"note": f"was told: {refusal.reason}"}
        return {"note": "paid"}

    graph = Graph("g", state=State)
    graph.node("a", careful)
    graph.start("a")
    graph.end("a")
    graph.run_sync(memory_thread)

    result = graph.resume_sync(memory_thread, Reject("broke"))

    assert (result.status, result.values["note"]) == (Status.COMPLETED, "was told: broke")


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    ("kind", "wrong", "right", "value"),
    [
        (int, Answer("five"), Answer(5), 5),
        (int, Answer(True), Answer(5), 5),
        (Person, Answer({"name": "Ann"}), Answer({"name": "Ann", "age": 5}), Person(name="Ann", age=5)),
    ],
)
def test_an_answer_of_the_wrong_type_is_refused_and_the_run_still_waits(
    memory_thread: backstay.Thread, kind: type, wrong: Decision, right: Decision, value: Any
) -> None:
    got: list[Any] = []
    graph = Graph("g", state=State)
    graph.node("a", lambda state, ctx: got.append(ctx.ask("how old?", prompt="Age?", answer=kind)))
    graph.start("a")
    graph.end("a")
    (record,) = graph.run_sync(memory_thread).interrupts
    assert (record.interrupt.kind, record.interrupt.payload) == (InterruptKind.USER_REQUEST, "how old?")
    stood = head(memory_thread)

    with pytest.raises(backstay.InvalidInput, match=f"must be {kind.__name__}, not"):
        graph.resume_sync(memory_thread, wrong)

    assert (got, head(memory_thread).state, head(memory_thread).next_node) == ([], stood.state, stood.next_node)
    again = graph.resume_sync(memory_thread)
    assert again.status is Status.INTERRUPTED
    assert again.interrupts[0] == record
    assert graph.resume_sync(memory_thread, right).status is Status.COMPLETED
    assert got == [value]


def test_a_node_may_ask_several_times_and_is_never_asked_twice_for_the_same(memory_thread: backstay.Thread) -> None:
    done: list[str] = []

    async def asks(state: State, ctx: Any) -> dict[str, Any]:
        first = ctx.ask("first")
        await ctx.effect("work", done.append, "worked")
        second = ctx.ask("second")
        same = ctx.ask("second")  # the same words at another place: another question
        return {"note": f"{first} {second} {same}"}

    graph = Graph("g", state=State)
    graph.node("a", asks)
    graph.start("a")
    graph.end("a")
    result = graph.run_sync(memory_thread)
    for answer in ("one", "two", "three"):
        assert result.status is Status.INTERRUPTED
        result = graph.resume_sync(memory_thread, Answer(answer))

    assert (result.values["note"], done) == ("one two three", ["worked"])


def test_a_scope_opens_the_gates_it_names_for_the_rest_of_the_run_and_no_longer(thread: backstay.Thread) -> None:
    graph = Graph("g", state=State)
    graph.node("a", lambda state, ctx: {"count": 1, "items": [ctx.approve("pay"), ctx.approve("print")]})
    graph.edge("a", "a", when=lambda state: state["count"] % 2 != 0, name="more")
    graph.start("a")
    graph.end("a")
    result = graph.run_sync(thread)
    assert result.interrupts[0].interrupt.payload["tool"] == "pay"
    result = graph.resume_sync(thread, Approve("pay"))
    tools = []
    while result.status is Status.INTERRUPTED:
        tools.append(result.interrupts[0].interrupt.payload["tool"])
        result = graph.resume_sync(thread, Approve())

    assert tools == ["print", "print"]  # in both rounds, and never "pay" again
    assert result.status is Status.COMPLETED
    assert graph.run_sync(thread).interrupts[0].interrupt.payload["tool"] == "pay"  # in another run it is asked


@pytest.mark.parametrize(("scope", "asked_again"), [("b", ["c"]), ("*", ["b", "c"]), ("nobody", ["b", "c"])])
def test_the_gate_of_a_node_is_opened_by_its_name_only(
    scope: str, asked_again: list[str], memory_thread: backstay.Thread
) -> None:
    walk = Walk()
    graph = walk.chain("a", "b", "c", before=["a", "b", "c"])
    graph.run_sync(memory_thread)
    result = graph.resume_sync(memory_thread, Approve(scope))
    found = []
    while result.status is Status.INTERRUPTED:
        found += asked(result)
        result = graph.resume_sync(memory_thread, Approve())

    assert (found, walk.ran) == (asked_again, ["a", "b", "c"])


def test_an_approval_for_all_tools_opens_all_of_them(memory_thread: backstay.Thread) -> None:
    graph = Graph("g", state=State)
    graph.node("a", lambda state, ctx: {"items": [ctx.approve("pay", 1), ctx.approve("print", 2)]})
    graph.start("a")
    graph.end("a")
    graph.run_sync(memory_thread)

    assert graph.resume_sync(memory_thread, Approve("*")).values["items"] == [1, 2]


# From outside -----------------------------------------------------------------------------------------------------


def pausing(walk: Walk, pause: Callable[[], object]) -> Graph:
    graph = walk.chain("a", "b", "c")
    replace_node(graph, "b", walk.node("b", lambda state, ctx: pause() and None))
    return graph


def test_anybody_may_ask_a_run_to_pause_and_it_stops_at_its_next_boundary(url: str) -> None:
    walk = Walk()
    with backstay.open(url) as store, AnotherStore(store, url) as other:
        handle = other.thread("t")
        graph = pausing(walk, lambda: handle.request_pause("lunch", by="ann"))
        waits = graph.run_sync(store.thread("t"), pause_check_s=0)

        assert (waits.status, walk.ran) == (Status.INTERRUPTED, ["a", "b"])
        (record,) = waits.interrupts
        assert (record.interrupt.kind, record.interrupt.prompt) == (InterruptKind.USER_REQUEST, "lunch")
        assert graph.resume_sync(store.thread("t")).status is Status.INTERRUPTED  # still lunch
        handle.decide(record, "approve", by="ann")
        assert graph.resume_sync(store.thread("t"), pause_check_s=0).status is Status.COMPLETED
        assert walk.ran == ["a", "b", "c"]


class AnotherStore:
    """Another store on the same data; memory is the only one that has no other."""

    def __init__(self, store: backstay.Store, url: str) -> None:
        self.store = store if url == "memory:" else backstay.open(url)
        self.is_other = self.store is not store

    def __enter__(self) -> backstay.Store:
        return self.store

    def __exit__(self, *_: object) -> None:
        if self.is_other:
            self.store.close()


def test_a_pause_that_is_deferred_or_rejected_holds(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = pausing(walk, lambda: memory_thread.request_pause("wait", by="ann"))
    graph.run_sync(memory_thread, pause_check_s=0)
    assert graph.resume_sync(memory_thread, Defer(), pause_check_s=0).status is Status.DEFERRED
    assert graph.resume_sync(memory_thread, pause_check_s=0).status is Status.INTERRUPTED

    result = graph.resume_sync(memory_thread, Reject("never"), pause_check_s=0)

    assert (result.status, result.reason, walk.ran) == (Status.REJECTED, "never", ["a", "b"])


def test_one_pause_for_several_branches_is_told_once(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    outer = Graph("outer", state=State)
    outer.node("split", lambda state: None)
    for name in "lr":
        inner = walk.chain(f"{name}1", f"{name}2", graph=f"inner_{name}")
        replace_node(
            inner,
            f"{name}1",
            walk.node(f"{name}1", lambda state, ctx: memory_thread.request_pause("wait", by="ann") and None),
        )
        outer.subgraph(name, inner)
    outer.parallel("split", "lr")
    outer.start("split")

    waits = outer.run_sync(memory_thread, pause_check_s=0)

    assert waits.status is Status.INTERRUPTED
    assert len(waits.interrupts) == 1
    assert sorted(walk.ran) == ["l1", "r1"]
    assert outer.resume_sync(memory_thread, Approve(), pause_check_s=0).status is Status.COMPLETED
    assert sorted(walk.ran) == ["l1", "l2", "r1", "r2"]


# Several at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*itertools.permutations("xyz")][::2], ids="".join)
def test_branches_that_wait_are_answered_in_any_order(order: tuple[str, ...], memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.fan("x", "y", "z", "free")
    for name in "xyz":
        replace_node(graph, name, lambda state, ctx: spoke(walk, ctx.node, ctx.ask(f"what does {ctx.node} say?")))
    result = graph.run_sync(memory_thread)
    assert sorted(asked(result)) == ["x", "y", "z"]
    assert walk.ran == ["split", "free"]
    for name in order:
        (record,) = [each for each in result.interrupts if each.interrupt.node == name]
        result = graph.resume_sync(memory_thread, {record.id: Answer(f"{name}!")})

    assert result.status is Status.COMPLETED
    assert result.values["seen"] == ["split", "x says x!", "y says y!", "z says z!", "free", "join"]
    assert walk.ran == ["split", "free", *order, "join"]


def test_an_answer_that_was_used_is_refused_while_branches_beside_it_still_wait(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.fan("x", "y", before=["x", "y"])
    waiting = {record.interrupt.node: record.id for record in graph.run_sync(thread).interrupts}
    graph.resume_sync(thread, {waiting["x"]: Approve()})
    assert walk.ran == ["split", "x"]

    with pytest.raises(backstay.InvalidInput, match="does not wait for interrupt"):
        graph.resume_sync(thread, {waiting["x"]: Approve()})  # the very same, by the same person

    assert graph.resume_sync(thread, {waiting["y"]: Approve()}).status is Status.COMPLETED
    assert walk.ran == ["split", "x", "y", "join"]


def spoke(walk: Walk, name: str, answer: Any) -> dict[str, Any]:
    walk.ran.append(name)
    return {"seen": [f"{name} says {answer}"]}


def test_several_answers_at_once_and_one_answer_for_several(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.fan("x", "y", before=["x", "y"])
    result = graph.run_sync(memory_thread)
    with pytest.raises(backstay.InvalidInput, match="one answer for 2 open interrupts"):
        graph.resume_sync(memory_thread, Approve())
    assert walk.ran == ["split"]

    result = graph.resume_sync(memory_thread, {record.id: Approve() for record in result.interrupts})

    assert result.status is Status.COMPLETED


def test_one_branch_turned_down_ends_the_run_and_the_other_is_not_run(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.fan("x", "y", before=["x", "y"])
    result = graph.run_sync(memory_thread)
    first = next(record for record in result.interrupts if record.interrupt.node == "x")

    assert graph.resume_sync(memory_thread, {first.id: Reject("no")}).status is Status.REJECTED
    assert walk.ran == ["split"]


# Waiting again ----------------------------------------------------------------------------------------------------


def test_an_old_approval_opens_nothing_in_another_line_of_history(thread: backstay.Thread) -> None:
    """Not after a rewind, not in a fork, not in a replay, and not in the next run of the thread."""
    walk = Walk()
    graph = guarded(walk, "barrier")
    graph.run_sync(thread)
    waiting = head(thread)
    assert graph.resume_sync(thread, Approve()).status is Status.COMPLETED
    assert walk.ran.count("done") == 1

    fork = thread.fork(waiting, branch="fork")
    assert graph.resume_sync(fork).status is Status.INTERRUPTED
    assert graph.replay_sync(thread, waiting, branch="replay").status is Status.INTERRUPTED
    thread.rewind(waiting)
    again = graph.resume_sync(thread)
    assert again.status is Status.INTERRUPTED
    assert walk.ran.count("done") == 1
    assert graph.resume_sync(thread, Approve()).status is Status.COMPLETED
    assert walk.ran.count("done") == 2
    assert graph.run_sync(thread).status is Status.INTERRUPTED


def test_an_approval_survives_a_crash_of_who_carries_it_out_and_is_carried_out_once(thread: backstay.Thread) -> None:
    """The worker dies after it took the decision and before the node was committed: nothing is lost or asked twice."""
    walk = Walk()
    graph = guarded(walk, "before")

    class Dies(BaseException):
        pass

    def die(event: Event) -> None:
        if isinstance(event, NodeStarted) and event.node == "done":
            raise Dies

    graph.run_sync(thread)
    with pytest.raises(Dies):
        graph.resume_sync(thread, Approve(), on_event=die)
    assert walk.ran == ["a"]

    assert graph.resume_sync(thread).status is Status.COMPLETED
    assert walk.ran == ["a", "done"]


# Forged, stale, twice ---------------------------------------------------------------------------------------------


def test_an_approval_is_used_once(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = guarded(walk, "before")
    (record,) = graph.run_sync(thread).interrupts
    graph.resume_sync(thread, {record.id: Approve()})
    assert walk.ran == ["a", "done"]

    with pytest.raises(backstay.InvalidInput, match="is over"):
        graph.resume_sync(thread, {record.id: Approve()})
    with pytest.raises(Conflict):
        thread.decide(record, "reject", by="mallory")
    graph.run_sync(thread)
    with pytest.raises(backstay.InvalidInput, match="does not wait for interrupt"):
        graph.resume_sync(thread, {record.id: Approve()})
    assert walk.ran == ["a", "done", "a"]
    assert [each.decided_by for each in thread.interrupts(pending=False) if each.id == record.id] == ["resume"]


def test_a_stale_a_forged_and_an_edited_approval_are_refused(thread: backstay.Thread) -> None:
    walk = Walk()
    graph = guarded(walk, "tool")
    (record,) = graph.run_sync(thread).interrupts
    edited = dataclasses.replace(
        record, interrupt=dataclasses.replace(record.interrupt, payload={"tool": "pay", "args": {"amount": 5000}})
    )
    with pytest.raises((Conflict, backstay.InvalidInput)):
        thread.decide(edited, "approve", by="mallory")
    with pytest.raises((Conflict, backstay.InvalidInput)):
        thread.decide(dataclasses.replace(record, checkpoint_id="elsewhere"), "approve", by="mallory")
    with pytest.raises(backstay.InvalidInput, match="does not wait for interrupt"):
        graph.resume_sync(thread, {"backstay:question:made-up": Approve()})
    with pytest.raises(backstay.InvalidInput, match="reserved for Backstay"):
        thread.interrupt(head(thread), id=f"{record.id}x")
    assert [each.decision for each in thread.interrupts()] == [None]

    foreign = thread.interrupt(head(thread), prompt="a client's own")
    thread.decide(foreign, "approve", by="mallory")
    assert graph.resume_sync(thread).status is Status.INTERRUPTED  # it opens nothing of the run's
    assert "done" not in walk.ran


def test_of_two_approvers_at_once_one_decides(url: str) -> None:
    walk = Walk()
    graph = guarded(walk, "before")
    with backstay.open(url) as store:
        (record,) = graph.run_sync(store.thread("t")).interrupts
        start = threading.Barrier(2, timeout=30)
        outcomes: list[str] = []

        def approver(name: str, decision: str) -> None:
            start.wait()
            try:
                store.thread("t").decide(record, decision, by=name)
                outcomes.append(name)
            except Conflict as lost:
                outcomes.append(f"lost to {lost.winner.decided_by}")

        threads = [threading.Thread(target=approver, args=each) for each in (("ann", "approve"), ("bob", "reject"))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

        (winner,) = {"ann", "bob"} & set(outcomes)
        assert sorted(outcomes) == sorted([winner, f"lost to {winner}"])
        result = graph.resume_sync(store.thread("t"))
        assert result.status is (Status.COMPLETED if winner == "ann" else Status.REJECTED)
        assert walk.ran == (["a", "done"] if winner == "ann" else ["a"])


def test_nothing_is_decided_if_anything_else_of_the_call_is_wrong(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = guarded(walk, "before")
    (record,) = graph.run_sync(memory_thread).interrupts
    wrong: list[Callable[[], object]] = [
        lambda: graph.resume_sync(memory_thread, Approve(), update={"unknown": 1}),
        lambda: graph.resume_sync(memory_thread, Approve(), update={"seen": "no list"}),
        lambda: graph.resume_sync(memory_thread, Approve(), update="text"),  # type: ignore[arg-type]
        lambda: graph.resume_sync(memory_thread, {record.id: Approve(), "other": Approve()}),
        lambda: graph.resume_sync(memory_thread, {record.id: "yes, please"}),
        lambda: graph.resume_sync(memory_thread, {record.id: 5}),  # type: ignore[dict-item]
        lambda: graph.resume_sync(memory_thread, 5),  # type: ignore[arg-type]
        lambda: Walk().chain("a", graph="foreign").resume_sync(memory_thread, Approve()),
    ]
    for call in wrong:
        with pytest.raises((backstay.InvalidInput, backstay.GraphMismatch)):
            call()
        assert [each.decision for each in memory_thread.interrupts()] == [None]

    assert graph.resume_sync(memory_thread).status is Status.INTERRUPTED
    assert walk.ran == ["a"]


def test_waiting_and_going_on_are_told(memory_thread: backstay.Thread) -> None:
    graph = guarded(Walk(), "barrier")
    log, after = EventLog(), EventLog()
    (record,) = graph.run_sync(memory_thread, on_event=log).interrupts
    graph.resume_sync(memory_thread, Approve(), on_event=after)

    assert [event.record.id for event in log.of(Interrupted)] == [record.id]
    assert [(event.interrupt_id, event.kind.value) for event in after.of(DecisionTaken)] == [(record.id, "approve")]
    log.check()
    after.check()


def test_a_node_that_asks_has_one_beginning_and_one_end_for_those_who_watch(memory_thread: backstay.Thread) -> None:
    graph = Graph("g", state=State)
    graph.node("a", lambda state, ctx: {"note": f"{ctx.ask('one')} {ctx.ask('two')}"})
    graph.start("a")
    graph.end("a")
    graph.run_sync(memory_thread)
    for answer in ("first", "second"):
        log = EventLog()
        result = graph.resume_sync(memory_thread, Answer(answer), on_event=log)
        log.check()
        assert len(log.of(NodeStarted)) == 1

    assert result.values["note"] == "first second"


def test_a_failure_beside_a_question_fails_the_run_and_the_question_stays(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = walk.fan("asks", "fails", on_error="collect_all")
    replace_node(graph, "asks", lambda state, ctx: {"note": ctx.ask("how?")})
    replace_node(graph, "fails", lambda state: 1 / 0)
    assert graph.run_sync(memory_thread).status is Status.FAILED
    (record,) = memory_thread.interrupts()
    replace_node(graph, "fails", walk.node("fails"))

    result = graph.resume_sync(memory_thread, {record.id: Answer("so")})

    assert (result.status, result.values["note"]) == (Status.COMPLETED, "so")


def test_barriers_side_by_side_are_decided_apart(memory_thread: backstay.Thread) -> None:
    walk = Walk()
    graph = Graph("g", state=State)
    for name in ("split", "excuse", "join"):
        graph.node(name, walk.node(name))
    graph.barrier("first")
    graph.barrier("second", on_reject="excuse")
    graph.parallel("split", ["first", "second"], join="join")
    graph.edge("excuse", "join")
    graph.start("split")
    graph.end("join")
    waits = graph.run_sync(memory_thread)
    ids = {record.interrupt.node: record.id for record in waits.interrupts}
    waits = graph.resume_sync(memory_thread, {ids["second"]: Reject("no")})
    assert (asked(waits), walk.ran) == (["first"], ["split", "excuse[second]"])

    result = graph.resume_sync(memory_thread, {ids["first"]: Approve()})

    assert (result.status, walk.ran) == (Status.COMPLETED, ["split", "excuse[second]", "join"])


def test_an_asynchronous_thread_pauses_and_goes_on_in_the_same_way(url: str) -> None:
    walk = Walk()
    graph = walk.fan("x", "y", before=["x"], after=["y"])

    async def story() -> list[Status]:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            result = await graph.run(thread)
            statuses = [result.status]
            while result.interrupts:
                result = await graph.resume(thread, {result.interrupts[0].id: Approve()})
                statuses.append(result.status)
            return statuses

    assert asyncio.run(story()) == [Status.INTERRUPTED, Status.INTERRUPTED, Status.COMPLETED]
    assert sorted(walk.ran) == ["join", "split", "x", "y"]
