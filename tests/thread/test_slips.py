"""Common slips get an error that names the fix."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.bundle import export_bundle, import_bundle
from backstay.errors import EncodeError, InvalidInput
from backstay.langgraph import BackstaySaver


class Colour(enum.Enum):
    RED = 1


async def later() -> dict[str, Any]:
    return {}


def graph_of(node: Callable[..., Any]) -> backstay.Graph:
    graph = backstay.Graph("g")
    graph.node("a", node)
    graph.start("a")
    graph.end("a")
    return graph


USES: list[Callable[[Any], object]] = [
    lambda store: graph_of(dict).pending(store),
    lambda store: export_bundle(store, "x.bundle"),
    lambda store: import_bundle("x.bundle", store),
]


@pytest.mark.parametrize("use", [*USES, BackstaySaver])
def test_a_thread_where_a_store_is_wanted(use: Callable[[Any], object]) -> None:
    with (
        backstay.open(":memory:") as store,
        pytest.raises(InvalidInput, match="Pass the store that the thread is from"),
    ):
        use(store.thread("t"))


@pytest.mark.parametrize("use", USES)
def test_a_url_where_a_store_is_wanted(use: Callable[[Any], object]) -> None:
    for url in ("postgresql://ann:hunter2@host", Path("agent.db")):
        with pytest.raises(InvalidInput, match="Open the path or URL first") as caught:
            use(url)
        assert "hunter2" not in str(caught.value)


def test_a_path_where_a_thread_is_wanted() -> None:
    with pytest.raises(InvalidInput, match=r"Open the path or URL first: backstay\.open\(…\)\.thread"):
        graph_of(dict).run_sync("agent.db", {})  # type: ignore[arg-type]


def test_a_store_that_was_not_awaited(tmp_path: Path) -> None:
    uses: list[Callable[[Any], object]] = [lambda store: store.thread("t"), lambda store: store.get("c"), *USES]
    for use in uses:
        opening = backstay.aopen(tmp_path / "agent.db")
        with pytest.raises(InvalidInput, match=r"not awaited.*await backstay\.aopen"):
            use(opening)
        opening.close()
        assert not hasattr(opening, "unknown")

    async def use_it() -> None:
        async with backstay.aopen(":memory:") as store:
            await store.thread("t").save({"n": 1})
        with pytest.raises(backstay.StoreError):
            await store.thread("t").latest()
        async with await backstay.aopen(":memory:") as store:
            await store.thread("t").save({"n": 1})

    asyncio.run(use_it())
    asyncio.run(asyncio.run(backstay.aopen(":memory:")).close())


def test_a_coroutine_where_values_are_wanted() -> None:
    with backstay.open(":memory:") as store:
        thread = store.thread("t")
        uses: list[Callable[[Any], object]] = [
            thread.save,
            thread.append,
            thread.loop,
            lambda given: thread.append(set=given),
            lambda given: thread.save({"a": given}),
            lambda given: graph_of(dict).run_sync(thread, given),
        ]
        for use in uses:
            coroutine = later()
            with pytest.raises(InvalidInput, match="not awaited"):
                use(coroutine)
            coroutine.close()
        assert thread.latest() is None
        coroutine = later()
        result = graph_of(lambda state: coroutine).run_sync(thread, {})
        coroutine.close()
        assert "Declare the node with async def" in str(result.error)


def test_paths_are_stored_and_the_error_about_an_enum_names_both_fixes() -> None:
    with backstay.open(":memory:") as store:
        thread = store.thread("t")
        assert thread.save({"path": Path("x")}).state == {"path": Path("x")}
        with pytest.raises(EncodeError, match=r"Register the class with @backstay\.register, or store its \.value"):
            thread.save({"colour": Colour.RED})
