"""Signals while ``run_sync`` runs: the run ends, its lease is released, the caller gets the exception, and it resumes.

The programs that get the signals are in ``support.engine.signalled``.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.engine.reducers import append
from backstay.engine.triggers import manual
from backstay.errors import InvalidInput
from support.engine.signalled import CHOSEN, STEPS, chain
from support.processes import child_environment
from support.running import Show
from support.thread.line_points import ROOT, Interrupted, Lines, Point, chosen, interrupt, points_of, watching

HANG_S = 60


def told(tmp_path: Path, *program: str) -> dict[str, Any]:
    """Return what a signalled program printed. It must end by itself."""
    command = [sys.executable, "-m", "support.engine.signalled", *program, str(tmp_path / "a.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    return said


# Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "noted"),
    [
        ("plain", ["KeyboardInterrupt in the node"]),
        ("plain_unsaved", ["KeyboardInterrupt in the node"]),
        ("between", []),
        ("asynchronous", ["not raised in the node", "cleaned up"]),
        ("twice", []),
        ("nested_asyncio", ["cleaned up", "KeyboardInterrupt in the node"]),
        ("nested", ["KeyboardInterrupt in the node", "KeyboardInterrupt in the node", "completed"]),
    ],
)
def test_ctrl_c_ends_the_run_at_once_and_it_can_be_resumed_at_once(
    tmp_path: Path, program: str, noted: list[str]
) -> None:
    expected = {"ended": "KeyboardInterrupt", "n": CHOSEN, "resumed": "completed", "restored": True, "notes": noted}

    assert told(tmp_path, program) == expected


def test_ctrl_c_ends_a_fan_out_without_waiting_for_a_plain_function_that_hangs(tmp_path: Path) -> None:
    said = told(tmp_path, "fan_out")

    assert (said["ended"], said["resumed"]) == ("KeyboardInterrupt", "completed")


def test_ctrl_c_after_the_last_checkpoint_is_not_swallowed(tmp_path: Path) -> None:
    said = told(tmp_path, "at_the_end")

    assert (said["ended"], said["n"], said["resumed"]) == ("KeyboardInterrupt", STEPS, "is over")


def test_a_handler_of_the_program_for_ctrl_c_is_left_alone(tmp_path: Path) -> None:
    said = told(tmp_path, "own_handler")

    assert (said["ended"], said["n"], said["notes"]) == ("completed", STEPS, ["own handler"])


# Other signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "OwnInterrupt"])
@pytest.mark.parametrize("where", ["plain", "between", "async", "callback", "task", "select"])
def test_a_handler_that_raises_ends_the_run_wherever_it_comes(tmp_path: Path, error: str, where: str) -> None:
    said = told(tmp_path, "term", error, where)

    assert (said["ended"], said["n"], said["resumed"]) == (error, CHOSEN, "completed")
    assert said["restored"]


def test_a_handler_that_cancels_stops_the_run_between_two_plain_nodes(tmp_path: Path) -> None:
    said = told(tmp_path, "term_cancels")

    assert (said["ended"], said["n"], said["resumed"]) == ("cancelled", CHOSEN + 1, "completed")


# Interrupts at every line of the driver ---------------------------------------------------------------------------


def is_bare(point: Point) -> bool:
    """Tell whether a line has no call and no jump, so that no handler runs there; or whether a timer calls it."""
    line = Path(point.file).read_text(encoding="utf-8").splitlines()[point.line - 1]
    return line.lstrip().startswith(("try:", "finally:")) or "SIGNAL_CHECK_S" in line


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_the_driver_ends_the_run(show: Show) -> None:
    graph = chain(lambda: None)
    with backstay.open("memory:") as store:
        graph.run_sync(store.thread("warm"), {"n": 0})
        points = points_of(lambda: graph.run_sync(store.thread("count"), {"n": 0}))
        tries = [point for point in chosen(points, False) if point.file == f"{ROOT}engine/driver.py"]
        tries = [point for point in tries if not is_bare(point)]
        for number, point in enumerate(tries):
            lines = Lines(point, interrupt)
            with pytest.raises(Interrupted), watching(lines):
                graph.run_sync(store.thread(f"{number}"), {"n": 0})
            assert lines.fired
            assert sys.exc_info() == (None, None, None), point
            thread = store.thread(f"{number}")  # another handle: a lease that stayed behind would refuse it
            latest = thread.latest()
            if latest is None:
                graph.run_sync(thread, {"n": 0})
            elif not latest.is_over:
                graph.resume_sync(thread)
            latest = thread.latest()
            assert latest is not None
            assert latest.state["n"] == STEPS, point
    show("interrupted at lines of the driver", len(tries))
    assert len(tries) > 30


# The world of a plain function ------------------------------------------------------------------------------------


def runs_of(function: Any) -> Graph:
    graph = Graph("g")
    graph.node("a", function)
    graph.start("a")
    graph.end("a")
    return graph


async def seven() -> int:
    return 7


def test_a_plain_function_may_use_asyncio_run_and_other_graphs() -> None:
    inner = runs_of(lambda state: {"v": asyncio.run(seven())})
    middle = runs_of(lambda state: {"v": inner.run_sync(None).values["v"] + asyncio.run(seven())})
    outer = runs_of(lambda state: {"v": middle.run_sync(None).values["v"]})

    assert outer.run_sync(None).raise_for_status().values == {"v": 14}
    assert asyncio.run(outer.run(None)).raise_for_status().values == {"v": 14}


def test_all_of_it_works_in_other_threads_too() -> None:
    graph = runs_of(lambda state: {"v": runs_of(lambda state: {"v": asyncio.run(seven())}).run_sync(None).values["v"]})
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(graph.run_sync(None).values))
    thread.start()
    thread.join()

    assert found == [{"v": 7}]


def test_no_event_loop_runs_in_a_plain_function_and_the_loop_is_there_again_afterwards() -> None:
    seen: list[Any] = []

    def plain(state: Any) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append(sys.get_asyncgen_hooks().firstiter)

    async def other(state: Any) -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        seen.append(asyncio.current_task() is not None)

    graph = Graph("g")
    graph.node("a", plain)
    graph.node("b", other)
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    before = sys.get_asyncgen_hooks()

    assert graph.run_sync(None).status == "completed"
    assert seen == [None, True]
    assert sys.get_asyncgen_hooks() == before


def test_a_plain_function_sees_the_context_variables_of_the_caller_and_of_nodes_before_it() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    graph = Graph("g")
    seen: list[str] = []

    def one(state: Any) -> None:
        seen.append(variable.get())
        variable.set("node")

    graph.node("one", one)
    graph.node("two", lambda state: seen.append(variable.get()))
    graph.edge("one", "two")
    graph.start("one")
    graph.end("two")
    context = contextvars.copy_context()
    context.run(variable.set, "caller")

    context.run(graph.run_sync, None)
    assert seen == ["caller", "node"]
    assert context[variable] == "caller"


def test_the_current_event_loop_of_the_thread_stays_as_it_was() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        runs_of(lambda state: {"v": asyncio.get_event_loop().run_until_complete(seven())}).run_sync(None)
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_an_interrupt_that_a_node_raises_itself_stores_what_is_committed() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with backstay.open("memory:") as store:
        with pytest.raises(SystemExit) as raised:
            chain(leave).run_sync(store.thread("t"), {"n": 0}, trigger=manual())

        latest = store.thread("t").latest()
        assert raised.value.code == 3
        assert latest is not None
        assert latest.state["n"] == CHOSEN


def test_an_interrupted_node_that_changed_its_input_leaves_nothing_in_the_store() -> None:
    def leave(state: Any) -> None:
        state["seen"].append("x")
        raise SystemExit

    graph = Graph("g", reducers={"seen": append})
    graph.node("one", lambda state: {"seen": ["one"]})
    graph.node("two", leave)
    graph.edge("one", "two")
    graph.start("one")
    graph.end("two")
    with backstay.open("memory:") as store:
        with pytest.raises(SystemExit):
            graph.run_sync(store.thread("t"), {"seen": []}, trigger=manual())

        latest = store.thread("t").latest()
        assert latest is not None
        assert latest.state == {"seen": ["one"]}


@pytest.mark.blocks_loop("it calls run_sync in an event loop on purpose")
def test_run_sync_in_an_event_loop_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(InvalidInput, match="an event loop is running here"):
            runs_of(lambda state: None).run_sync(None)

    asyncio.run(main())
