"""Retention while a run goes on: rules of the thread layer, applied after each save."""

from __future__ import annotations

import asyncio
from typing import Annotated, TypedDict

import backstay
from backstay import Graph, Keep
from backstay.engine.reducers import append
from backstay.engine.sinks import Retained, StoreSink
from backstay.model.decision import Approve


class State(TypedDict):
    log: Annotated[list[int], append]


def counting(rounds: int) -> Graph:
    graph = Graph("counting", state=State)

    @graph.node
    def count(state: State) -> dict[str, list[int]]:
        return {"log": [len(state["log"])]}

    graph.edge("count", "count", when=lambda state: len(state["log"]) < rounds, name="more")
    graph.start("count")
    graph.end("count")
    return graph


def test_only_what_the_rules_want_is_left_after_a_run(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        sinks: list[Retained] = []

        def composed(sink: StoreSink) -> Retained:
            sinks.append(Retained(Keep(last=3), sink))
            return sinks[0]

        result = counting(12).run_sync(thread, {"log": []}, sink=composed).raise_for_status()

        assert result.values == {"log": list(range(12))}
        assert [meta.step for meta in thread.history()] == [12, 11, 10]
        assert sinks[0].deleted == 10
        assert thread.check()


def test_what_waits_for_a_decision_and_what_is_tagged_stays(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        graph = counting(6)
        first = graph.run_sync(thread, {"log": []}, before=["count"], sink=lambda sink: Retained(Keep(last=1), sink))
        assert first.checkpoint is not None
        thread.tag(first.checkpoint, "begin")

        result = graph.resume_sync(thread, Approve(scope="count"), sink=lambda sink: Retained(Keep(last=1), sink))

        assert result.raise_for_status().values == {"log": list(range(6))}
        assert [meta.step for meta in thread.history()] == [7, first.checkpoint.step]


def test_an_asynchronous_thread_is_tidied_up_too(url: str) -> None:
    async def run() -> list[int]:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            await counting(10).run(thread, {"log": []}, sink=lambda sink: Retained(Keep(last=2), sink, n=5))
            return [meta.step async for meta in thread.history()]

    assert asyncio.run(run()) == [10, 9, 8]
