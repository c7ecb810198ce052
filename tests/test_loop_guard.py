"""The guard sees what blocks an event loop, and nothing else; and what the async API gives never blocks one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.engine import Context
from backstay.langgraph import BackstaySaver
from support.processes import child_environment

PLANTED = """
import asyncio, time
import pytest, backstay
from backstay.bundle import export_bundle
from backstay.operations.drivers import Offload


def run(block):
    async def main():
        block()
    asyncio.run(main())


def test_blocked_by_sqlite(tmp_path):
    with backstay.open(tmp_path / "a.db") as store:
        run(store.thread("t").latest)

def test_blocked_by_directory(tmp_path):
    with backstay.open(f"dir:{tmp_path / 'a'}") as store:
        run(lambda: store.thread("t").save({}))

def test_blocked_by_opening(tmp_path):
    run(lambda: backstay.open(tmp_path / "a.db").close())

def test_blocked_by_a_file(tmp_path):
    with backstay.open("memory:") as store:
        run(lambda: export_bundle(store, tmp_path / "a.bundle"))

def test_blocked_by_a_wait():
    async def main():
        offload = Offload()
        offload._workers().submit(time.sleep, 0.01)
        offload.close()
    asyncio.run(main())

def test_blocked_in_a_coroutine_that_swallows_errors(tmp_path):
    async def main():
        with pytest.raises(backstay.BackstayError):
            backstay.open(tmp_path)
    asyncio.run(main())

@pytest.mark.blocks_loop("it is what this test does")
def test_fine_because_it_says_so(tmp_path):
    run(lambda: backstay.open(tmp_path / "a.db").close())

def test_fine_in_memory():
    with backstay.open("memory:") as store:
        run(lambda: store.thread("t").save({}))

def test_fine_outside_of_a_loop(tmp_path):
    with backstay.open(tmp_path / "a.db") as store:
        store.thread("t").save({})

def test_fine_in_a_thread(tmp_path):
    async def main():
        store = await asyncio.to_thread(backstay.open, tmp_path / "a.db")
        await asyncio.to_thread(store.thread("t").save, {})
        await asyncio.to_thread(store.close)
    asyncio.run(main())

def test_fine_in_a_loop_of_our_own(tmp_path):
    graph = backstay.Graph("g")
    graph.node("a", lambda state: {})
    graph.start("a")
    graph.end("a")
    with backstay.open(tmp_path / "a.db") as store:
        graph.run_sync(store.thread("t"))

def test_fine_for_files_of_the_caller(tmp_path):
    run(lambda: (tmp_path / "a").write_text("a"))
"""


def test_the_guard_fails_a_test_that_blocks_the_loop_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "conftest.py").write_text(
        "from support import loop_guard\nfrom support.loop_guard import pytest_runtest_call\nloop_guard.install()\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'blocks_loop(why)')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=line", str(tmp_path)]
    environment = {**child_environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # loading them takes most of the time
    report = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120).stdout
    outcomes = dict(line.split(" ")[:2][::-1] for line in report.splitlines() if "::test_" in line)
    names = [line[4:].partition("(")[0] for line in PLANTED.splitlines() if line.startswith("def test_")]
    expected = {f"test_planted.py::{name}": "FAILED" if name.startswith("test_blocked") else "PASSED" for name in names}

    assert outcomes == expected, report
    assert report.count("the event loop's thread was blocked") >= 6


# What the async API gives -----------------------------------------------------------------------------------------

Saving = Callable[[backstay.AsyncThread], Awaitable[Any]]


async def _rewind(thread: backstay.AsyncThread) -> Any:
    return await thread.rewind(await thread.save({"n": 1}))


async def _save(thread: backstay.AsyncThread) -> Any:
    return await thread.save({"n": 1})


async def _append(thread: backstay.AsyncThread) -> Any:
    await thread.save({"n": [1]})
    return await thread.append({"n": [2]})


@pytest.mark.parametrize("field", ["state", "frames"])
@pytest.mark.parametrize("save", [_save, _append, _rewind])
def test_a_saved_checkpoint_is_read_without_blocking(tmp_path: Path, save: Saving, field: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(tmp_path / "a.db") as store:
            saved = await save(store.thread("t"))
            assert getattr(saved, field) is not None

    asyncio.run(main())


@pytest.mark.parametrize("field", ["state", "writes"])
def test_what_is_not_in_memory_is_refused_instead_of_read_in_the_loop(tmp_path: Path, field: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(tmp_path / "a.db") as store:
            thread = store.thread("t")
            first = await thread.save({"n": 1})
            await thread.save({"n": 2})
            with pytest.raises(backstay.InvalidInput, match="would block the event loop"):
                getattr(first, field)

    asyncio.run(main())


def shop() -> Graph:
    graph = Graph("shop")

    def pay(state: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"paid": context.effect("pay", lambda: 5)}

    async def ship(state: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"shipped": await context.effect("ship", lambda: True)}

    graph.node("pay", pay)
    graph.node("ship", ship)
    graph.start("pay")
    graph.edge("pay", "ship")
    graph.end("ship")
    return graph


def test_a_graph_with_an_async_thread_never_blocks(tmp_path: Path) -> None:
    async def main() -> None:
        async with await backstay.aopen(tmp_path / "a.db") as store:
            result = await shop().run(store.thread("t"), {}, before=["ship"])
            assert result.status == "interrupted"
            result = await shop().resume(store.thread("t"), backstay.Approve())
            assert result.state == {"paid": 5, "shipped": True}

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["run", "stream"])
def test_a_graph_with_a_sync_thread_does_not_block_the_loop_either(tmp_path: Path, verb: str) -> None:
    async def main(thread: backstay.Thread) -> None:
        if verb == "run":
            await shop().run(thread, {})
        else:
            assert [event async for event in shop().stream(thread, {})]

    with backstay.open(tmp_path / "a.db") as store:
        asyncio.run(main(store.thread("t")))


def test_resuming_and_replaying_with_a_sync_thread_do_not_block_the_loop_either(tmp_path: Path) -> None:
    async def main(thread: backstay.Thread, first: str) -> None:
        await shop().resume(thread, backstay.Approve())
        await shop().replay(thread, first, branch="again")

    with backstay.open(tmp_path / "a.db") as store:
        thread = store.thread("t")
        shop().run_sync(thread, {}, before=["ship"])
        asyncio.run(main(thread, [meta.id for meta in thread.history()][-1]))


def test_a_langgraph_saver_is_closed_without_blocking(tmp_path: Path) -> None:
    saver = BackstaySaver(tmp_path / "a.db")

    async def main() -> None:
        async with saver:
            assert await saver.aget_tuple({"configurable": {"thread_id": "t"}}) is None

    asyncio.run(main())
