"""Runs of LangGraph graphs: who executes which thread, what became of it, and that no other writer gets in between."""

from __future__ import annotations

import asyncio
import operator
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import backstay
from backstay.errors import Fenced, InvalidInput, Rejected
from backstay.langgraph import BackstaySaver
from backstay.langgraph import runs as saver_runs
from backstay.thread.runs import Run
from support.processes import child_environment

AT: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict):
    found: Annotated[list[Any], operator.add]


@pytest.fixture
def saver(url: str) -> Iterator[BackstaySaver]:
    with BackstaySaver(url) as opened:
        yield opened
        report = opened.store.check()
        assert report, str(report)


def chain(saver: BackstaySaver, *nodes: Callable[[], Any]) -> Any:
    """Return a graph that runs these one after the other and collects what they return."""
    builder: StateGraph[Any] = StateGraph(State)
    names = [f"n{number}" for number in range(len(nodes))]
    for before, name, node in zip([START, *names], names, nodes, strict=False):
        builder.add_node(name, lambda state, node=node: {"found": [node()]})
        builder.add_edge(before, name)
    return builder.compile(checkpointer=saver)


def newest(saver: BackstaySaver) -> Run:
    return saver.store.runs()[0]


def test_a_run_is_listed_with_its_process_while_it_runs_and_as_completed_afterwards(saver: BackstaySaver) -> None:
    graph = chain(saver, lambda: seen.append(newest(saver)))
    seen: list[Run] = []
    with saver.run("t", "chat", owner="ann") as run:
        graph.invoke({"found": []}, AT)
    during, after = seen[0], newest(saver)

    assert (during.id, during.kind, during.graph, during.status) == (run.id, "langgraph", "chat", "running")
    assert during.holder is not None
    assert (during.holder.label, during.epoch) == ("ann", 1)
    assert 0 < during.lease_left <= 30
    assert (after.id, after.status, after.attempts, after.lease_left) == (run.id, "completed", 1, 0)
    with saver.run("t", "chat"):
        graph.invoke({"found": []}, AT)
    assert [(each.status, each.id == run.id) for each in saver.store.runs()] == [
        ("completed", False),
        ("completed", True),
    ]


def test_no_other_writer_gets_in_between(saver: BackstaySaver) -> None:
    graph, other = chain(saver, lambda: 1), BackstaySaver(saver.store)
    with saver.run("t"):
        graph.invoke({"found": []}, AT)
        with pytest.raises(Fenced, match="holds the lease"):
            chain(other, lambda: 2).invoke({"found": []}, AT)
        with pytest.raises(Fenced, match="holds the lease"), other.run("t", wait=0):
            pass
        chain(other, lambda: 2).invoke({"found": []}, {"configurable": {"thread_id": "another"}})
        graph.invoke({"found": []}, AT)
    chain(other, lambda: 2).invoke({"found": []}, AT)

    assert graph.get_state(AT).values == {"found": [1, 1, 2]}


def test_a_run_that_waits_for_a_person_is_continued_as_the_same_run(saver: BackstaySaver) -> None:
    graph = chain(saver, lambda: interrupt("Send it?"))
    with saver.run("t") as first:
        graph.invoke({"found": []}, AT)
    waiting, asked = newest(saver), tuple(each.id for each in saver.interrupts())
    with saver.run("t") as second:
        graph.invoke(Command(resume="yes"), AT)

    assert (waiting.status, waiting.interrupts) == ("interrupted", asked)
    assert len(asked) == 1
    assert (second.id, newest(saver).status, newest(saver).attempts) == (first.id, "completed", 2)


def test_a_run_that_fails_says_why_and_can_be_tried_again(saver: BackstaySaver) -> None:
    outcomes = iter([ZeroDivisionError, KeyboardInterrupt, None])

    def node() -> int:
        error = next(outcomes)
        if error is not None:
            raise error
        return 1

    graph, seen = chain(saver, node), []
    given: Any
    for given in ({"found": []}, None):
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)), saver.run("t"):
            graph.invoke(given, AT)
        seen.append((newest(saver).status, newest(saver).error))
    with saver.run("t"):
        graph.invoke(None, AT)

    assert seen == [("failed", "ZeroDivisionError"), ("abandoned", "KeyboardInterrupt")]
    assert (newest(saver).status, newest(saver).error, newest(saver).attempts) == ("completed", None, 3)


def test_a_run_is_cancelled_when_it_stores_its_next_step(saver: BackstaySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_runs, "CANCEL_CHECK_S", 0)
    graph = chain(saver, lambda: 1, lambda: newest(saver).cancel("too dear", by="ann").status.value, lambda: 3)
    with pytest.raises(Rejected, match="'ann' cancelled the run of 'chat'") as raised, saver.run("t", "chat"):
        graph.invoke({"found": []}, AT, durability="sync")

    assert (raised.value.by, raised.value.reason) == ("ann", "too dear")
    assert (newest(saver).status, newest(saver).reason) == ("cancelled", "too dear")
    assert (graph.get_state(AT).values, graph.get_state(AT).next) == ({"found": [1, "running"]}, ())
    with saver.run("t", "chat"):
        assert graph.invoke(None, AT) == {"found": [1, "running", 3]}
    assert [each.status for each in saver.store.runs()] == ["completed", "cancelled"]


def test_cancelling_a_run_that_nobody_executes_leaves_its_thread_as_it_is(saver: BackstaySaver) -> None:
    graph = chain(saver, lambda: interrupt("Send it?"))
    with saver.run("t"):
        graph.invoke({"found": []}, AT)
    before = graph.get_state(AT)

    assert newest(saver).cancel().status == "cancelled"
    assert graph.get_state(AT) == before
    assert graph.invoke(Command(resume="yes"), AT) == {"found": ["yes"]}


def test_what_a_run_of_langgraph_does_not_take_is_refused(saver: BackstaySaver) -> None:
    run = saver.run("t")
    with run:
        with pytest.raises(InvalidInput, match="cannot be paused"):
            newest(saver).pause()
        with pytest.raises(InvalidInput, match="only once"):
            run.__enter__()
    with pytest.raises(InvalidInput, match="ttl"):
        saver.run("t", ttl=0)
    with saver.store.thread("loop").loop({}):
        pass
    with pytest.raises(InvalidInput, match="unfinished run of loop 'loop'"), saver.run("loop", wait=0):
        pass


def test_an_event_loop_executes_runs_too(saver: BackstaySaver) -> None:
    graph = chain(saver, lambda: 1)

    async def main() -> None:
        async with saver.run("t"):
            await graph.ainvoke({"found": []}, AT)
            assert (await asyncio.to_thread(newest, saver)).status == "running"
        assert (await asyncio.to_thread(newest, saver)).status == "completed"

        async def wait_for_ever() -> None:
            async with saver.run("t"):
                started.set()
                await asyncio.Event().wait()

        started = asyncio.Event()
        task = asyncio.create_task(wait_for_ever())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (newest(saver).status, newest(saver).error) == ("abandoned", "CancelledError")


PROGRAM = """
import operator, sys
from typing import Annotated, TypedDict
from langgraph.graph import START, StateGraph
from backstay.langgraph import BackstaySaver

class State(TypedDict):
    found: Annotated[list, operator.add]

def slow(state):
    print("inside", flush=True)
    sys.stdin.readline()
    return {"found": ["done"]}

saver = BackstaySaver("agent.db")
graph = StateGraph(State).add_node("slow", slow).add_edge(START, "slow").compile(checkpointer=saver)
at = {"configurable": {"thread_id": "t"}}
with saver.run("t", "chat"):
    given = None if saver.get_tuple(at) else {"found": []}
    print(graph.invoke(given, at, durability="sync"), flush=True)
"""


@pytest.mark.crash
def test_a_killed_run_is_abandoned_and_the_same_program_continues_it_at_once(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert started.stdout is not None
        assert started.stdout.readline() == "inside\n"
        return started

    with start() as first:
        with backstay.open(tmp_path / "agent.db") as store:
            assert [run.status for run in store.runs()] == ["running"]
        first.send_signal(signal.SIGKILL)
    with backstay.open(tmp_path / "agent.db") as store:
        assert [run.status for run in store.runs()] == ["abandoned"]
    with start() as second:
        shown, _ = second.communicate("go\n", timeout=60)

    assert (second.returncode, shown) == (0, "{'found': ['done']}\n")
    with backstay.open(tmp_path / "agent.db") as store:
        (run,) = store.runs()
        assert (run.status, run.graph, run.attempts) == ("completed", "chat", 2)
