"""``graph.check``: what a deployment would do to the runs that are parked in a store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import backstay
from backstay.engine.compatibility import Verdict
from backstay.engine.events import Status
from backstay.engine.fingerprint import hex_of
from backstay.engine.graph import Graph
from backstay.engine.pending import PendingRun
from backstay.store.memory import MemoryStore
from backstay.thread.access import access_of
from support.engine.changing import chat, inner, noting, outer, state_with

SAME, COMPATIBLE, NEEDS_MIGRATION, REFUSE = Verdict

memory_and_sqlite = pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)


def park(store: backstay.Store, name: str, graph: Graph, **pauses: Any) -> None:
    result = graph.run_sync(store.thread(name), {"question": "why"}, **pauses)
    assert result.status is (Status.INTERRUPTED if pauses else Status.COMPLETED)


def without_search() -> Graph:
    return chat(search=None, search_to=None, search_else=None, plan_to=lambda graph: graph.edge("plan", "write"))


def found(runs: list[PendingRun]) -> dict[tuple[str, str], Verdict]:
    return {(run.thread_id, run.branch): run.judgement.overall for run in runs}


@memory_and_sqlite
def test_check_judges_every_unfinished_run_of_the_graph_and_no_other(store: backstay.Store) -> None:
    park(store, "here", chat(), before=["search"])
    park(store, "there", chat(), before=["write"])
    park(store, "done", chat())
    park(store, "other", chat("other"), before=["search"])
    store.thread("plain").save({"question": "no graph"})
    head = store.thread("there").latest()
    assert head is not None
    store.thread("there").fork(head, branch="what-if")
    before = [meta.digest for meta in store.threads()]

    assert found(chat().pending(store)) == {("here", "main"): SAME, ("there", "main"): SAME, ("there", "what-if"): SAME}
    runs = without_search().pending(store)
    assert found(runs) == {
        ("here", "main"): NEEDS_MIGRATION,
        ("there", "main"): COMPATIBLE,
        ("there", "what-if"): COMPATIBLE,
    }
    assert (runs[1].checkpoint_id, runs[1].step) == (head.id, head.step)
    assert [meta.digest for meta in store.threads()] == before  # it writes nothing


@memory_and_sqlite
def test_check_applies_the_migrations_and_goes_on_after_one_that_fails(store: backstay.Store) -> None:
    park(store, "short", chat(), before=["search"])
    park(store, "nested", outer(inner()), after=["plan"])
    long = store.thread("long")
    chat().run_sync(long, {"question": "a longer one"}, before=["search"])

    def shorten(state: dict[str, Any]) -> dict[str, Any]:
        if len(state["question"]) > 5:
            raise ValueError
        return {"query": state.pop("question"), **state}

    graph = chat(state=state_with(question=None, query=str))
    graph.migrate(chat().fingerprint, state=shorten)
    short, failed = graph.pending(store)

    assert (short.thread_id, short.judgement.overall, short.judgement.passes()) == ("short", COMPATIBLE, True)
    assert (failed.thread_id, failed.judgement.overall) == ("long", NEEDS_MIGRATION)
    assert f"the migration from 0x{hex_of(chat().fingerprint)} raised ValueError" in failed.judgement.render()


@memory_and_sqlite
def test_check_says_the_same_with_await(url: str) -> None:
    async def main() -> list[PendingRun]:
        async with await backstay.aopen(url) as store:
            await chat().run(store.thread("here"), {"question": "why"}, before=["search"])
            await chat().run(store.thread("done"), {"question": "why"})
            return await without_search().pending(store)

    assert found(asyncio.run(main())) == {("here", "main"): NEEDS_MIGRATION}


@memory_and_sqlite
def test_check_stays_inside_its_namespace(url: str, store: backstay.Store) -> None:
    park(store, "here", chat(), before=["search"])
    with backstay.open(url, namespace="another") as other:
        assert chat().pending(other) == []


def test_a_damaged_run_is_named_and_hides_no_other() -> None:
    with backstay.open("memory:") as store:
        for name in ("first", "second", "third"):
            park(store, name, chat(), before=["search"])
        damage(store, "second")
        runs = chat().pending(store)

    assert found(runs) == {("first", "main"): SAME, ("second", "main"): REFUSE, ("third", "main"): SAME}
    assert "cannot be read" in runs[1].judgement.render()


def damage(store: backstay.Store, thread: str) -> None:
    """Put something else in the place of a thread's newest manifest."""
    backend = access_of(store).store
    assert isinstance(backend, MemoryStore)
    branch = next(branch for key, branch in backend._tables.branches.items() if key.thread == thread)
    branch.rows[-1] = branch.rows[-1]._replace(manifest=b"no manifest")
    backend._tables.rows["", branch.rows[-1].id] = branch.rows[-1]


def test_more_runs_than_one_page_holds_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstay.store.memory.store.PAGE_ROWS_MAX", 4)
    with backstay.open("memory:") as store:
        for number in range(11):
            park(store, f"t{number}", chat(), before=["search"])

        assert len(chat(more=noting("more"), more_to=lambda graph: graph.end("more"),
                        write_to=lambda graph: graph.edge("write", "more")).pending(store)) == 11  # fmt: skip
