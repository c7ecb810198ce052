"""One saver in many hands: threads, event loops, processes, copies with other serializers, lists that are half read."""

from __future__ import annotations

import asyncio
import operator
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph

import backstay
from backstay.langgraph import BackstaySaver
from support.langgraph.face import Face, Line, at, id_of
from support.langgraph.graphs import Stage, chat, say

WORKERS = 8
ROUNDS = 6


@pytest.fixture
def saver(url: str) -> Iterator[BackstaySaver]:
    with BackstaySaver(url) as saver:
        yield saver
        report = saver.store.check()
        assert report, str(report)


def test_every_thread_is_listed_if_none_is_named(saver: BackstaySaver) -> None:
    with asyncio.Runner() as runner:
        for face in (Face(saver), Face(saver, runner)):
            lines = [Line(face, f"thread-{number}", ns) for number in range(5) for ns in ("", "inner")]
            for line in lines:
                for number in range(3):
                    line.put({"n": number}, metadata={"number": number, "inside": line.ns == "inner"})
                    face.put_writes(line.config, [("n", number)], "task")
            wanted = {id_of(config) for line in lines for config in line.configs}

            found = face.listed(None)
            assert {id_of(item.config) for item in found} == wanted
            assert len(found) == len(wanted) == 30
            assert all(item.pending_writes for item in found)
            assert len(face.listed(None, limit=7)) == 7
            assert len(face.listed(None, filter={"number": 2, "inside": True})) == 5
            assert len(face.listed(None, filter={"number": 2}, limit=3)) == 3
            assert face.listed(None, limit=0) == []
            for number in range(5):
                face.delete_thread(f"thread-{number}")

            assert face.listed(None) == []


def test_a_list_may_be_read_while_others_are_saved(saver: BackstaySaver) -> None:
    """LangGraph's SQLite saver holds its lock between the items of a list, and this hangs."""
    line = Line(Face(saver), "thread")
    for number in range(60):
        line.put({"n": number})
    before = [id_of(config) for config in reversed(line.configs)]
    found = []
    for item in saver.list(at("thread", "")):
        found.append(id_of(item.config))
        line.put({"n": f"new {len(found)}"})
        saver.put_writes(line.config, [("n", 1)], "task")
        assert saver.get_tuple(at("thread")) is not None

    assert found == before
    assert len(list(saver.list(at("thread")))) == 120


@pytest.mark.blocks_loop("it calls the sync API from a coroutine on purpose")
def test_an_async_list_may_be_read_while_others_are_saved(saver: BackstaySaver) -> None:
    line = Line(Face(saver), "thread")
    for number in range(60):
        line.put({"n": number})
    before = [id_of(config) for config in reversed(line.configs)]

    async def read() -> list[str | None]:
        found = []
        config = (await saver.aget_tuple(at("thread")) or pytest.fail("not there")).config
        async for item in saver.alist(at("thread", "")):
            found.append(id_of(item.config))
            await saver.aput_writes(config, [("n", len(found))], f"task-{len(found)}")
            saver.put_writes(config, [("n", 1)], "from the loop's own thread")
            await saver.aget_tuple(at("thread"))
        return found

    assert asyncio.run(asyncio.wait_for(read(), 60)) == before


def test_a_list_that_is_not_read_to_its_end_holds_nothing(saver: BackstaySaver) -> None:
    line = Line(Face(saver), "thread")
    for number in range(40):
        line.put({"n": number})
    half = saver.list(at("thread"))
    first = next(half)
    saver.delete_thread("thread")

    assert id_of(first.config) == id_of(line.config)
    with suppress(StopIteration):
        next(half)
    Line(Face(saver), "thread").put({"n": "new"})


class Total(TypedDict):
    total: Annotated[list[int], operator.add]


def counting(saver: BackstaySaver) -> Any:
    builder = StateGraph(Total).add_node("count", lambda state: {"total": [len(state["total"])]})
    return builder.add_edge(START, "count").compile(checkpointer=saver)


def test_many_threads_use_one_saver(saver: BackstaySaver) -> None:
    graph = counting(saver)
    together = threading.Barrier(WORKERS)

    def work(worker: int) -> list[int]:
        stage = Stage(saver)
        stage.thread = f"worker-{worker}"
        together.wait(60)
        for number in range(ROUNDS):
            stage.run(graph, {"total": [100 + number]})
            assert len(stage.history(graph, limit=2)) == 2
        result: list[int] = stage.state(graph).values["total"]
        return result

    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(work, range(WORKERS)))

    assert results == [[n for r in range(ROUNDS) for n in (100 + r, 2 * r + 1)]] * WORKERS
    assert len(list(saver.list(None))) == WORKERS * ROUNDS * 3


@pytest.mark.blocks_loop("it calls the sync API from a coroutine on purpose")
def test_several_event_loops_and_plain_threads_use_one_saver(saver: BackstaySaver) -> None:
    graph = counting(saver)
    together = threading.Barrier(4)

    async def several(worker: int) -> None:
        configs = [{"configurable": {"thread_id": f"loop-{worker}-{number}"}} for number in range(3)]
        for _ in range(4):
            await asyncio.gather(*[graph.ainvoke({"total": [1]}, config) for config in configs])
            for config in configs:
                assert graph.get_state(config).values == (await graph.aget_state(config)).values

    def work(worker: int) -> None:
        together.wait(60)
        if worker:
            asyncio.run(several(worker))
            return
        for _ in range(6):
            graph.invoke({"total": [1]}, {"configurable": {"thread_id": "plain"}})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    lengths = {
        str(item.config["configurable"]["thread_id"]): len(item.checkpoint["channel_values"].get("total", []))
        for item in reversed(list(saver.list(None)))
    }
    assert lengths == {"plain": 12, **{f"loop-{worker}-{number}": 8 for worker in (1, 2, 3) for number in range(3)}}


def test_writes_of_many_threads_for_one_checkpoint_are_all_kept(saver: BackstaySaver) -> None:
    """The background pool of a run stores the writes of parallel tasks at the same time."""
    line = Line(Face(saver), "thread")
    line.put({"n": 0})
    together = threading.Barrier(WORKERS)

    def write(worker: int) -> None:
        together.wait(60)
        for number in range(5):
            saver.put_writes(line.config, [("n", number), ("n", -number)], f"task-{worker}-{number}", f"~{worker}")

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(write, range(WORKERS)))
    found = Face(saver).read(line.config).pending_writes

    assert found == [
        (f"task-{worker}-{number}", "n", value)
        for worker in range(WORKERS)
        for number in range(5)
        for value in (number, -number)
    ]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("url", ["sqlite", "dir", "postgres"], indirect=True)
def test_a_forked_process_goes_on_with_the_saver(url: str) -> None:
    with BackstaySaver(url) as saver:
        line = Line(Face(saver), "thread")
        line.put({"list": ["parent"]})
        asyncio.run(saver.aget_tuple(at("thread")))  # its worker threads do not live on in a child
        pid = os.fork()
        if not pid:
            code = 1
            try:
                line.put({"list": ["parent", "child"]})
                asyncio.run(saver.aput_writes(line.config, [("list", ["from the child"])], "task"))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with pytest.raises(backstay.Conflict):  # the child was first
            line.put({"list": ["parent", "late"]})
        found = line.back_to(at("thread"))

        assert found.checkpoint["channel_values"] == {"list": ["parent", "child"]}
        assert found.pending_writes == [("task", "list", ["from the child"])]
        line.put({"list": ["parent", "child", "parent again"]})
        assert line.values() == {"list": ["parent", "child", "parent again"]}
        assert saver.store.check()


def test_a_copy_with_an_allowlist_shares_the_store(saver: BackstaySaver) -> None:
    """A graph that is compiled in strict mode works with such a copy."""
    saver.serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    other = saver.with_allowlist([("some.module", "Thing")])
    assert other is not saver
    Line(Face(saver), "one").put({"n": 1})
    line = Line(Face(other), "two")
    line.put({"n": 2})

    assert Line(Face(other), "one").values() == {"n": 1}
    assert Line(Face(saver), "two").values() == {"n": 2}
    line.face = Face(saver)
    line.put({"n": 3})
    line.face = Face(other)
    line.put({"n": 4})
    assert Line(Face(saver), "two").values() == {"n": 4}


class Marking(JsonPlusSerializer):
    """A serializer whose bytes tell who wrote them."""

    def __init__(self, mark: bytes) -> None:
        super().__init__()
        self.mark = mark

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        tag, data = super().dumps_typed(obj)
        return f"{tag}+{self.mark.decode()}", self.mark + data

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        tag, _, mark = data[0].partition("+")
        if mark:
            assert data[1].startswith(mark.encode())
            return super().loads_typed((tag, data[1][len(mark) :]))
        return super().loads_typed(data)


def test_the_serializer_of_the_moment_is_used(saver: BackstaySaver) -> None:
    line = Line(Face(saver), "thread")
    values: dict[str, Any] = {"list": ["plain"], "static": {"a": 1}}
    line.put(values)
    for number, serde in enumerate((Marking(b"one"), Marking(b"two"), Marking(b"one"))):
        saver.serde = serde
        assert line.values() == values
        for _ in range(3):
            values = {**values, "list": [*values["list"], f"item {number}"]}
            line.put(values)
            saver.put_writes(line.config, [("list", [number])], "task")

            assert line.values() == values
    assert [len(line.values(config)["list"]) for config in line.configs] == list(range(1, 11))
    saver.serde = JsonPlusSerializer()

    assert line.values(line.configs[0])["list"] == ["plain"]
    for config in line.configs[1:]:
        with pytest.raises(backstay.DecodeError, match="list"):  # which only the other two can have written
            line.values(config)


def test_a_closed_saver_leaves_a_store_that_it_did_not_open(url: str) -> None:
    with backstay.open(url) as store:
        with BackstaySaver(store) as saver:
            Line(Face(saver), "thread").put({"n": 1})
        again = BackstaySaver(store)

        assert Line(Face(again), "thread").values() == {"n": 1}
        saver.close()
        assert Line(Face(again), "thread").values() == {"n": 1}
        again.close()


def test_what_was_put_is_there_after_reopening(url: str) -> None:
    if url == "memory:":
        return
    graph_input = say("hello", "1")
    with BackstaySaver(url) as saver:
        expected = Stage(saver).run(chat(saver), graph_input)

    async def read() -> Any:
        async with await asyncio.to_thread(BackstaySaver, url) as reopened:
            return (await chat(reopened).aget_state(Stage(reopened).config)).values

    assert asyncio.run(read()) == expected
