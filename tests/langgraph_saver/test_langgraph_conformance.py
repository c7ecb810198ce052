"""LangGraph's own conformance suite, on every store: all of its capabilities, all of its tests.

The suite counts a capability that a saver lacks as passed, so that is checked here. None of LangGraph's own savers has
all eight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability

from backstay.langgraph import BackstaySaver
from support.running import Show

TESTS = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}
"""What the released suite, 0.0.2, asks; a later one may ask more."""


def test_the_released_suite_passes_whole(url: str, show: Show) -> None:
    @checkpointer_test(name="BackstaySaver")
    async def ours() -> AsyncGenerator[BaseCheckpointSaver[str], None]:
        async with await asyncio.to_thread(BackstaySaver, url) as saver:
            yield saver
            report = await asyncio.to_thread(saver.store.check)
            assert report, str(report)

    report = asyncio.run(validate(ours))
    results = report.results
    lines = [f"{name} {result.tests_passed}/{TESTS[name]}" for name, result in results.items()]
    kind = url.partition(":")[0] if ":" in url else "sqlite"
    show(f"LangGraph conformance, {kind}", f"{report.conformance_level()}  " + "  ".join(lines))

    assert {name: result.failures for name, result in results.items() if result.failures} == {}
    assert {name for name, result in results.items() if not result.detected} == set()
    assert set(results) == {capability.value for capability in Capability}
    assert all(results[name].tests_passed >= count for name, count in TESTS.items())
    assert report.conformance_level() == "FULL"
