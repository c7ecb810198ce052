"""Stored formats stay what they are: files from the day they were made are read. ``support.golden`` made them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.bundle import check_bundle, export_bundle, import_bundle
from backstay.errors import EffectUnknown
from backstay.maintenance import read_quarantine
from backstay.store.leases import Holder
from backstay.thread.access import access_of
from backstay.thread.runs import Run
from support.golden import GOLDEN, LONG, NOW, SECRET, VALUES, shop, talk
from support.postgres import PostgresServer

FIRST = {"messages": ["hello"], "plan": "search", "values": VALUES}
STATES: dict[str, dict[str, Any]] = {
    "c1": FIRST,
    "c2": {**FIRST, "messages": ["hello", LONG], "plan": "answer"},
    "c3": {"messages": ["hello", LONG, "bye"], "values": VALUES},
    "c4": FIRST,
    "c6": {"messages": ["last"]},
    "f1": {**FIRST, "messages": ["hello", LONG], "plan": "other"},
    "f2": {**FIRST, "messages": ["hello", LONG, "fork"], "plan": "other"},
    "s1": {"inside": True},
    "l1": {"n": 1},
}
HISTORY = [  # branch, id, step, parent, tags, label, next node; newest first
    ("main", "c6", 6, "c5", (), None, None),
    ("main", "c4", 4, "c1", (), "first", None),
    ("main", "c3", 3, "c2", (), None, None),
    ("main", "c2", 2, "c1", ("good",), None, "model"),
    ("main", "c1", 1, None, ("start",), "first", None),
    ("what-if", "f2", 3, "f1", (), None, None),
    ("what-if", "f1", 2, "c2", (), None, "model"),
]
INTERRUPTS = [  # id, prompt, payload, decision, its value, by whom, who used it
    ("ask-open", "May I?", {"amount": 5}, None, None, None, None),
    ("ask-answered", "", None, "modify", {"amount": 4}, "bob", None),
    ("ask-used", "", None, "approve", None, "ann", "worker-1"),
]
EFFECTS = [  # key, status, attempt, error, result
    ("mail", "done", 1, None, {"sent": "ann"}),
    ("fax", "failed", 1, "ValueError", None),
    ("charge", "intended", 1, None, None),  # and nobody knows whether it was done
]
RUNS = [  # thread, kind, name, status, holder, attempts, answers it waits for, key, reason, note; newest first
    ("nightly", "session", "session", "completed", "worker-3", 1, 0, None, "out of budget", "import the orders"),
    ("queued", "graph", "shop", "queued", None, 0, 0, "order-7", "", ""),
    ("count", "loop", "count", "completed", "worker-1", 1, 0, None, "", ""),
    ("left", "loop", "left", "abandoned", "worker-2", 1, 0, None, "", ""),  # its process died
    ("shop", "graph", "shop", "interrupted", "golden:7", 1, 1, None, "", ""),
]
CHECKPOINTS = 18  # in the empty namespace: 5 + 2 of chat, 1 inside it, 5 edits, 2 of shop, 1 left, 2 of count


@pytest.fixture(params=["sqlite", "dir", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a copy of a golden store."""
    if request.param == "sqlite":
        yield str(shutil.copy(GOLDEN / "store.db", tmp_path))
    elif request.param == "dir":
        yield f"dir:{shutil.copytree(GOLDEN / 'directory', tmp_path / 'directory')}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        with server.connect() as connection:
            connection.execute((GOLDEN / "postgres.sql").read_bytes())
            yield server.url(schema="golden")
            connection.execute("drop schema golden cascade")


def look(store: backstay.Store) -> None:
    """Compare what is stored with the tables above."""
    thread = store.thread("chat")
    branches = [thread, store.thread("chat", branch="what-if")]
    found = [(branch.branch, meta) for branch in branches for meta in branch.history()]
    stored = {id: checkpoint for id in STATES if (checkpoint := store.get(id)) is not None}

    assert [(b, m.id, m.step, m.parent_id, m.tags, m.label, m.next_node) for b, m in found] == HISTORY
    assert {meta.created_at for _, meta in found} == {NOW}
    assert {id: checkpoint.state for id, checkpoint in stored.items()} == STATES
    assert repr(stored["c1"].state) == repr(FIRST)  # types included
    assert (found[4][1].metadata, found[3][1].tokens_used) == ({"user": "ann"}, 12)
    assert {branch.key.name: branch.origin for branch in thread.branches()} == {"main": None, "what-if": "c2"}
    assert [(w.task_id, w.index, w.channel, w.value) for w in stored["c3"].writes] == [
        ("task", 0, "channel", {"answer": 42}),
        ("task", 1, "other", [1, 2]),
    ]
    assert [
        (
            each.id,
            each.interrupt.prompt,
            each.interrupt.payload,
            each.decision and each.decision.kind,
            each.decision and each.decision.value,
            each.decided_by,
            each.consumer,
        )
        for each in thread.interrupts(pending=False)
    ] == INTERRUPTS
    assert [(each.key, each.status, each.attempt, each.error, each.result) for each in thread.effects()] == EFFECTS
    edits = store.thread("edits").latest()
    assert edits is not None
    assert [item for item in edits.state["items"] if len(item) != 80] == [f"changed {number}" for number in range(5)]
    assert len(edits.state["items"]) == 30


def test_what_a_store_kept_is_all_there(url: str) -> None:
    with backstay.open(url) as store:
        report = store.check()
        talks = url.endswith(".db") * 3  # what LangGraph has saved is in the SQLite file only

        assert (bool(report), report.good["checkpoints"]) == (True, CHECKPOINTS + talks), str(report)
        look(store)
        assert [
            (
                *(run.thread_id, run.kind, run.graph, run.status, run.holder and run.holder.name, run.attempts),
                *(len(run.interrupts), run.key, run.reason, run.note),
            )
            for run in store.runs()
        ] == RUNS
        assert {run.created_at for run in store.runs() if run.kind != "session"} == {NOW}
        assert store.count_runs() == {"queued": 1, "running": 1, "interrupted": 1}
        (lease,) = access_of(store).store.leases("", None, True)
        assert (lease.branch.thread, Holder.parse(lease.owner).name, lease.epoch) == ("left", "worker-2", 1)
    with backstay.open(url, namespace="other") as other:
        kept = other.thread("chat").latest()

        assert kept is not None
        assert (kept.id, kept.state, other.check().good["checkpoints"]) == ("c1", {"other": True}, 1)


def test_a_store_is_used_as_before(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("chat")
        saved = thread.append({"messages": ["again"]})
        with pytest.raises(EffectUnknown):
            thread.effect("charge", lambda: None)
        (held,) = store.claim([shop()], 5)
        with held:
            queued = shop().resume_sync(held.thread, lease=held)
        with store.thread("left").loop({}) as loop:
            assert (loop.state, only(store, "left").epoch, only(store, "left").attempts) == ({"n": 1}, 2, 2)
            for _ in loop:
                loop.finish()
        result = shop().resume_sync(store.thread("shop"), backstay.Approve())

        assert (saved.step, saved.state) == (7, {"messages": ["last", "again"]})
        assert thread.effect("mail", lambda to: None, "ann") == {"sent": "ann"}
        assert (queued.status, queued.state) == ("completed", {"basket": ["pear", "apple"], "paid": 2})
        assert shop().submit(store.thread("queued"), {"basket": ["pear"]}, key="order-7").status == "completed"
        assert {run.status for run in store.runs()} == {"completed"}
        assert (result.status, result.state) == ("completed", {"basket": ["apple"], "paid": 1})
        assert store.check()


def only(store: backstay.Store, thread: str) -> Run:
    (run,) = store.runs(thread=thread)
    return run


def test_a_bundle_is_read() -> None:
    totals = check_bundle(GOLDEN / "store.bundle")
    with backstay.open("memory:") as store:
        report = import_bundle(GOLDEN / "store.bundle", store)

        assert report
        assert (totals.checkpoints, totals.interrupts, totals.effects) == (CHECKPOINTS, 4, 3)
        assert store.check().good["checkpoints"] == CHECKPOINTS
        look(store)


def test_the_same_content_still_gives_the_same_bundle(tmp_path: Path) -> None:
    """The digest is of the records: it does not depend on the version of zstd, as the bytes of the file do."""
    with backstay.open(shutil.copy(GOLDEN / "store.db", tmp_path)) as store:
        report = export_bundle(store, tmp_path / "again.bundle", threads=["chat", "edits", "shop", "left", "count"])

    assert report.digest == check_bundle(GOLDEN / "store.bundle").digest


def test_a_quarantine_file_is_read() -> None:
    found = read_quarantine(GOLDEN / "checkpoint.quarantine")
    values = {value["key"]: value for value in found.values or []}

    assert (found.checkpoint["id"], found.checkpoint["branch"]) == ("h1", ["", "hurt", "", "main"])
    assert set(values) == {"data", "n"}
    assert SECRET in b"".join(part for _, part in values["data"]["parts"]), "its other rows are readable"
    assert [(each["kind"], each["checkpoint"], each["key"]) for each in found.findings] == [("damaged", "h1", "data")]


def test_what_langgraph_has_saved_is_continued(tmp_path: Path) -> None:
    from langgraph.types import Command

    from backstay.langgraph import BackstaySaver

    config: Any = {"configurable": {"thread_id": "talk"}}
    with BackstaySaver(shutil.copy(GOLDEN / "store.db", tmp_path)) as saver:
        graph = talk(saver)
        waiting = graph.get_state(config)
        steps = [state.values["words"] for state in graph.get_state_history(config) if state.values]
        done = graph.invoke(Command(resume="ann"), config)

        assert (waiting.next, [each.value for each in waiting.interrupts]) == (("ask",), ["your name?"])
        assert steps == [["start", "hello"], ["start"], []]
        assert done["words"] == ["start", "hello", "ann"]
        assert saver.store.check()
