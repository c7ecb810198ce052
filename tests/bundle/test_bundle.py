"""Bundles: what they hold, what importing them again does, and what is refused."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.bundle import check_bundle, export_bundle, import_bundle, read_bundle
from backstay.bundle.state import Window
from backstay.engine import Context
from backstay.errors import Conflict, Corrupted, Fenced, InvalidInput, NotFound, StoreError
from backstay.model.checkpoint import Write
from backstay.store.base import Query
from backstay.store.sqlite.rows import pack_id
from backstay.thread.access import access_of
from support.running import Show
from support.thread.stored_runs import put_run


@pytest.fixture
def source(tmp_path: Path) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path / "source.db") as opened:
        yield opened


def fill(store: backstay.Store, name: str = "chat", turns: int = 6) -> backstay.Thread:
    """Save a thread with all that a thread can have."""
    thread = store.thread(name)
    thread.save({"messages": ["hello " * 60], "n": 0}, tags=["first"], label="begin", metadata={"who": "me"})
    for turn in range(1, turns):
        thread.append({"messages": [f"{name} turn {turn} " * 20]}, set={"n": turn}, next_node="model", tokens_used=turn)
    head = thread.latest()
    assert head is not None
    branch = thread.fork(head, branch="try")
    branch.append({"messages": ["another way"]})
    thread.append({"messages": ["the main way"]})
    branch.append({"messages": ["on"]})
    thread.write(head, [Write("task", 0, "channel", {"value": 1})])
    thread.decide(thread.interrupt(head, payload={"tool": "rm"}, prompt="Really?"), "approve", by="me")
    thread.interrupt(head, prompt="And this?", id=f"{name}-open")
    thread.effect("mail", lambda: "sent")
    return thread


def everything(store: backstay.Store) -> list[object]:
    """Return what a user can see of a store, but not its numbers."""
    found: list[object] = []
    for meta in store.threads():
        thread = store.thread(meta.thread_id)
        for each in thread.history(branch="*"):
            whole = store.get(each.id)
            assert whole is not None
            found.append((whole.id, whole.digest, whole.state, whole.tags, whole.metadata, whole.writes, whole.branch))
        found.append([(branch.key, branch.head, branch.origin) for branch in thread.branches()])
        found.append([(str(record), record.consumer) for record in thread.interrupts(pending=False)])
        found.append([(record.key, record.status, record.result, record.owner) for record in thread.effects()])
    return found


def test_everything_of_a_store_arrives_in_another(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    fill(source, "a")
    fill(source, "b")
    exported = export_bundle(source, tmp_path / "all.bundle")
    report = import_bundle(tmp_path / "all.bundle", store)

    assert exported
    assert report
    assert (report.threads, report.stored, report.present) == (2, 20, 0)
    assert (report.interrupts, report.effects, report.notes) == (4, 2, ())
    assert everything(store) == everything(source)
    assert export_bundle(store, tmp_path / "again.bundle").digest == exported.digest
    assert (tmp_path / "again.bundle").read_bytes() == (tmp_path / "all.bundle").read_bytes()


def test_importing_twice_changes_nothing(source: backstay.Store, store: backstay.Store, tmp_path: Path) -> None:
    fill(source)
    export_bundle(source, tmp_path / "all.bundle")
    import_bundle(tmp_path / "all.bundle", store)
    before = everything(store)
    report = import_bundle(tmp_path / "all.bundle", store)

    assert report
    assert (report.stored, report.present, report.notes) == (0, 10, ())
    assert everything(store) == before


def test_an_imported_thread_can_be_gone_on_with_and_imported_again(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    fill(source)
    export_bundle(source, tmp_path / "all.bundle")
    import_bundle(tmp_path / "all.bundle", store)
    thread = store.thread("chat")
    thread.latest()
    done: list[str] = []

    assert thread.effect("mail", lambda: done.append("again")) == "sent"
    assert done == []
    thread.append({"messages": ["later"]})
    assert import_bundle(tmp_path / "all.bundle", store).present == 10


def test_what_a_newer_bundle_adds_is_added(source: backstay.Store, store: backstay.Store, tmp_path: Path) -> None:
    thread = fill(source)
    export_bundle(source, tmp_path / "old.bundle")
    import_bundle(tmp_path / "old.bundle", store)
    thread.append({"messages": ["newer"]})
    export_bundle(source, tmp_path / "new.bundle")
    report = import_bundle(tmp_path / "new.bundle", store)

    assert (report.stored, report.present) == (1, 10)
    assert everything(store) == everything(source)


def test_a_thread_with_other_content_is_refused_and_the_others_are_imported(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    for name in "abc":
        fill(source, name)
    export_bundle(source, tmp_path / "all.bundle")
    store.thread("b").save({"mine": 1})
    before = [meta.id for meta in store.thread("b").history()]
    report = import_bundle(tmp_path / "all.bundle", store)

    assert not report
    (refused,) = report.refused
    assert (refused.thread, type(refused.error), refused.stored) == ("b", Conflict, 0)
    assert report.stored == 20
    assert [meta.id for meta in store.thread("b").history()] == before
    assert list(store.thread("b").interrupts(pending=False)) == []
    assert "refused" in str(report)


def test_a_thread_that_somebody_holds_is_refused(source: backstay.Store, store: backstay.Store, tmp_path: Path) -> None:
    fill(source, "a")
    fill(source, "b")
    export_bundle(source, tmp_path / "all.bundle")
    with store.thread("a").lease():
        report = import_bundle(tmp_path / "all.bundle", store)

    assert [(refused.thread, type(refused.error)) for refused in report.refused] == [("a", Fenced)]
    assert report.stored == 10
    assert import_bundle(tmp_path / "all.bundle", store)


def test_a_thread_that_somebody_writes_to_meanwhile_is_refused(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    fill(source)
    export_bundle(source, tmp_path / "all.bundle")
    calls: list[int] = []

    def meanwhile(done: int, total: int, unit: str) -> None:
        calls.append(done)
        if len(calls) == 3:
            store.thread("chat", branch="try").save({"mine": 1}, id="mine")

    report = import_bundle(tmp_path / "all.bundle", store, progress=meanwhile)

    assert [(refused.thread, type(refused.error)) for refused in report.refused] == [("chat", Conflict)]
    assert [meta.id for meta in store.thread("chat", branch="try").history()] == ["mine"]


def test_only_the_threads_named_are_exported_and_imported(source: backstay.Store, tmp_path: Path) -> None:
    for name in "abc":
        fill(source, name)
    export_bundle(source, tmp_path / "two.bundle", threads=["c", "a"])
    with backstay.open("memory:") as store:
        report = import_bundle(tmp_path / "two.bundle", store, threads=["a", "b"])

        assert [meta.thread_id for meta in store.threads()] == ["a"]
        assert [note.thread for note in report.missing] == ["b"]
    assert {each.thread_id for each in read_bundle(tmp_path / "two.bundle")} == {"a", "c"}
    with pytest.raises(NotFound):
        export_bundle(source, tmp_path / "x.bundle", threads=["nobody"])
    with pytest.raises(InvalidInput):
        export_bundle(source, tmp_path / "x.bundle", threads="a")
    assert not (tmp_path / "x.bundle").exists()


def test_parents_and_origins_that_are_gone_keep_their_names_and_digests(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    thread = fill(source)
    elsewhere = thread.fork(thread.latest() or "", to="elsewhere")
    elsewhere.append({"messages": ["more"]})
    source.thread("chat").prune(backstay.Keep(last=2))
    export_bundle(source, tmp_path / "some.bundle", threads=["elsewhere"])
    import_bundle(tmp_path / "some.bundle", store)
    rows = access_of(store).store.find(Query("", "elsewhere"))

    assert [row.parent_digest is not None for row in rows] == [False, True]
    assert store.check()
    export_bundle(store, tmp_path / "again.bundle")
    assert (tmp_path / "again.bundle").read_bytes() == (tmp_path / "some.bundle").read_bytes()
    export_bundle(source, tmp_path / "all.bundle")
    assert import_bundle(tmp_path / "all.bundle", store).present == 2
    assert store.check()


def test_a_fork_takes_its_parents_bytes_over(source: backstay.Store, store: backstay.Store, tmp_path: Path) -> None:
    thread = source.thread("chat")
    thread.save({"document": os.urandom(200_000)})
    for number in range(20):
        head = thread.latest()
        assert head is not None
        thread.fork(head, branch=f"b{number}", set={"n": number})
    size = export_bundle(source, tmp_path / "all.bundle").size
    import_bundle(tmp_path / "all.bundle", store)

    assert size < 215_000
    assert sum(access_of(store).store.sizes().sources.values()) < 215_000


def test_a_bundle_costs_what_is_new(source: backstay.Store, tmp_path: Path, show: Show) -> None:
    thread = source.thread("chat")
    thread.save({"messages": [], "document": os.urandom(50_000).hex()})
    added = 0
    for turn in range(300):
        text = os.urandom(100).hex()
        thread.append({"messages": [text]}, set={"turn": turn})
        added += len(text)
    report = export_bundle(source, tmp_path / "all.bundle")
    states = sum(meta.size for meta in thread.history())
    show("bundle of 301 checkpoints", f"{report.size} bytes for {added + 100_000} new ones, {states} in full")

    assert report.size < added + 100_000


def test_a_bundle_can_be_read_without_a_store(source: backstay.Store, tmp_path: Path) -> None:
    thread = fill(source)
    export_bundle(source, tmp_path / "all.bundle")
    read = list(read_bundle(tmp_path / "all.bundle"))

    assert [each.id for each in reversed(read)] == [meta.id for meta in thread.history(branch="*")]
    for each in read:
        stored = source.get(each.id)
        assert stored is not None
        assert (each.state, each.digest, each.tags, each.writes) == (
            stored.state,
            stored.digest,
            stored.tags,
            stored.writes,
        )
    totals = check_bundle(tmp_path / "all.bundle")
    assert (totals.threads, totals.checkpoints, totals.interrupts, totals.effects, totals.damaged) == (1, 10, 2, 1, 0)


def test_namespaces_are_kept_apart(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "a.db", namespace="mine") as source:
        fill(source)
        export_bundle(source, tmp_path / "all.bundle")
    with backstay.open(tmp_path / "b.db") as other, pytest.raises(InvalidInput, match="namespace 'mine'"):
        import_bundle(tmp_path / "all.bundle", other)
    with backstay.open(tmp_path / "b.db", namespace="mine") as target:
        assert import_bundle(tmp_path / "all.bundle", target)
        assert target.check()


def test_a_damaged_checkpoint_is_named_and_the_rest_is_moved(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    thread = fill(source)
    victim = list(thread.history())[3].id
    spoil(tmp_path / "source.db", victim)
    report = export_bundle(source, tmp_path / "rest.bundle")
    taken = import_bundle(tmp_path / "rest.bundle", store)

    assert not report
    assert [note.checkpoint for note in report.left_out] == [victim]
    assert [note.checkpoint for note in taken.missing] == [victim]
    assert (report.checkpoints, taken.stored, check_bundle(tmp_path / "rest.bundle").damaged) == (9, 9, 1)
    assert store.check(), "what is there is whole, though its parent is not there"
    with pytest.raises(Corrupted):
        export_bundle(source, tmp_path / "refused.bundle", on_damage="refuse")
    assert not (tmp_path / "refused.bundle").exists()


def spoil(path: Path, checkpoint: str) -> None:
    """Change the step of a stored checkpoint behind the store's back."""
    connection = sqlite3.connect(path, isolation_level=None)
    done = connection.execute("UPDATE checkpoint SET step = step + 100 WHERE id = ?", (pack_id("", checkpoint),))
    assert done.rowcount == 1
    connection.close()


def test_progress_is_told_and_ends_at_the_total(
    source: backstay.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(source)
    told: list[tuple[int, int, str]] = []
    export_bundle(source, tmp_path / "all.bundle", progress=lambda *step: told.append(step))
    assert told[-1] == (10, 10, "checkpoints")
    told.clear()
    with backstay.open("memory:") as store:
        import_bundle(tmp_path / "all.bundle", store, progress=lambda *step: told.append(step))
        size = (tmp_path / "all.bundle").stat().st_size
        assert told[-1] == (size, size, "bytes")
        import_bundle(tmp_path / "all.bundle", store, progress=True)
    assert capsys.readouterr().err == f"importing: {size:,} of {size:,} bytes (100 %)\n"


def test_a_file_that_cannot_be_read_or_written_is_a_store_error(source: backstay.Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        check_bundle(tmp_path / "not there")
    with pytest.raises(StoreError):
        export_bundle(source, tmp_path / "no folder" / "all.bundle")


def test_an_empty_store_gives_an_empty_bundle(source: backstay.Store, tmp_path: Path) -> None:
    assert export_bundle(source, tmp_path / "all.bundle")
    assert check_bundle(tmp_path / "all.bundle").checkpoints == 0


def test_a_thread_with_nothing_but_effects_is_moved(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    source.thread("early").effect("mail", lambda: "sent")
    export_bundle(source, tmp_path / "all.bundle")
    assert import_bundle(tmp_path / "all.bundle", store).effects == 1

    assert store.thread("early").effect("mail", lambda: "sent again") == "sent"


def test_large_states_leave_the_window_and_are_written_whole(
    source: backstay.Store, store: backstay.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window of a few kilobytes, branches that take turns push each other out; all arrives all the same."""
    monkeypatch.setattr(Window.__init__, "__defaults__", (3000,))
    branches = [source.thread("t", branch=name) for name in "abc"]
    for turn in range(9):
        for branch in branches:
            branch.append({"log": [os.urandom(200).hex()]}) if turn else branch.save({"log": [branch.branch]})
    export_bundle(source, tmp_path / "all.bundle")
    import_bundle(tmp_path / "all.bundle", store)

    assert everything(store) == everything(source)
    export_bundle(store, tmp_path / "again.bundle")
    assert (tmp_path / "again.bundle").read_bytes() == (tmp_path / "all.bundle").read_bytes()


def test_what_is_added_meanwhile_is_not_seen_and_what_is_deleted_is_not_missed(
    source: backstay.Store, tmp_path: Path
) -> None:
    """Another program works on the thread while it is exported: here in the breaks that the progress callback gives."""
    thread = source.thread("chat")
    thread.save({"log": ["begin " * 100]})
    for turn in range(250):
        thread.append({"log": [f"turn {turn} " * 10]})
    deleted: list[int] = []

    def meanwhile(done: int, total: int, unit: str) -> None:
        if done == 50:
            thread.append({"log": ["meanwhile"]})
            deleted.append(thread.delete_before(200))

    report = export_bundle(source, tmp_path / "all.bundle", progress=meanwhile)
    with backstay.open("memory:") as store:
        taken = import_bundle(tmp_path / "all.bundle", store)
        steps = [meta.step for meta in store.thread("chat").history()][::-1]

    assert deleted == [199]
    assert report, "what was deleted is no damage"
    assert taken.stored == report.checkpoints == len(steps)
    assert steps[-52:] == list(range(200, 252))
    assert steps == sorted(set(steps))


def test_a_page_with_an_unreadable_row_costs_that_row_only(source: backstay.Store, tmp_path: Path) -> None:
    thread = source.thread("chat")
    state = {f"key {number}": "value " * 20 for number in range(20)}
    for turn in range(30):
        thread.save({**state, "turn": turn})
    connection = sqlite3.connect(tmp_path / "source.db", isolation_level=None)
    ((based,),) = connection.execute("SELECT count(*) FROM checkpoint WHERE base IS NOT NULL")
    connection.execute("UPDATE blob SET body = x'00' WHERE id IN (SELECT base FROM checkpoint)")
    connection.close()
    report = export_bundle(source, tmp_path / "rest.bundle")

    assert 0 < based < 30
    assert len(report.left_out) == based
    assert all(note.checkpoint for note in report.left_out)
    with backstay.open("memory:") as store:
        assert import_bundle(tmp_path / "rest.bundle", store).stored == 30 - based


def test_scopes_are_kept_apart_and_in_order(source: backstay.Store, store: backstay.Store, tmp_path: Path) -> None:
    outer, inner = source.thread("t"), source.thread("t", scope="inner")
    for turn in range(4):
        outer.save({"outer": turn})
        inner.save({"inner": turn, "log": "x" * 500 * turn})
    export_bundle(source, tmp_path / "all.bundle")
    import_bundle(tmp_path / "all.bundle", store)
    export_bundle(store, tmp_path / "again.bundle")

    assert [meta.digest for meta in store.thread("t", scope="inner").history()] == [
        meta.digest for meta in inner.history()
    ]
    assert (tmp_path / "again.bundle").read_bytes() == (tmp_path / "all.bundle").read_bytes()


def mailer(done: list[str]) -> backstay.Graph:
    graph = backstay.Graph("mailer")

    def did(what: str, result: str) -> str:
        done.append(what)
        return result

    @graph.node
    def propose(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return {"draft": ctx.effect("model", lambda: did("model", "hi"))}

    @graph.node
    def send(state: dict[str, Any], ctx: Context) -> dict[str, Any]:
        args = ctx.approve("send_mail", {"text": state["draft"]})
        return {"outcome": ctx.effect("send", lambda: did("send", f"sent {args['text']}"))}

    graph.edge("propose", "send")
    graph.start("propose")
    graph.end("send")
    return graph


def test_a_run_that_waits_for_a_person_is_moved_and_goes_on_elsewhere(
    source: backstay.Store, store: backstay.Store, tmp_path: Path
) -> None:
    done: list[str] = []
    assert mailer(done).run_sync(source.thread("m"), {}).status == "interrupted"
    export_bundle(source, tmp_path / "all.bundle")
    assert import_bundle(tmp_path / "all.bundle", store)
    (shown,) = store.interrupts()
    store.thread("m").decide(shown, "approve", by="ann")
    result = mailer(done).resume_sync(store.thread("m"))

    assert (result.status, result.state["outcome"]) == ("completed", "sent hi")
    assert done == ["model", "send"], "what was done before the move is not done again"


def test_a_queued_run_is_not_moved_and_the_report_says_so(store: backstay.Store, tmp_path: Path) -> None:
    for name in ("a", "b"):
        store.thread(name).save({"n": 1})
        put_run(store, name)
    put_run(store, "c")
    reports = [export_bundle(store, tmp_path / "x.bundle", threads=threads) for threads in (None, ["b"])]

    assert [sorted(str(note.thread) for note in report.notes) for report in reports] == [["a", "b", "c"], ["b"]]
    assert all(reports)
    assert "thread 'c': its queued run is not part of a bundle" in str(reports[0])
