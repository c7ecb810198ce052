"""Imports and exports that are repeated, or made into a place with data: the newest stays the newest."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Approve, Graph
from backstay.compat.backend import Checkpoint, CheckpointMetadata, StoreBackend, export_agentos, import_agentos
from backstay.compat.graph import CheckpointBlob, CheckpointBlobStore, CheckpointId, export_blobs, import_blobs
from backstay.compat.sessions import ChecksumUtils, SyncCheckpointWriter, export_sessions, import_sessions
from backstay.compat.workflow import FileCheckpointStore, export_workflow, import_workflow
from backstay.errors import GraphMismatch, InvalidInput, StoreError, StoreRefused
from support.golden import GOLDEN

RUST = GOLDEN / "sessions" / "rust"
MOMENT = "2026-07-02T13:46:44.987654321Z"


@pytest.fixture
def target() -> Iterator[backstay.Store]:
    with backstay.open("memory:") as store:
        yield store
        assert store.check()


def newest(store: backstay.Store, thread: str) -> str:
    found = next(iter(store.thread(thread).history(branch="*")))
    return found.id


# Imports ----------------------------------------------------------------------------------------------------------


def test_an_import_after_a_prune_brings_nothing_back_as_the_newest(target: backstay.Store) -> None:
    source = GOLDEN / "agentos" / "backend.sqlite"
    import_agentos(source, target)
    backend = StoreBackend(target)
    assert asyncio.run(backend.delete_before("chat", 4)) > 0

    report = import_agentos(source, target)

    assert newest(target, "chat") == "c6"
    assert not report
    assert {note.checkpoint for note in report.missing} == {"c1", "c2", "c3"}
    assert {note.what for note in report.missing} == {
        "not stored: the thread has a later checkpoint of the source, c6, already"
    }


@pytest.mark.parametrize("system", ["graph", "workflow"])
def test_a_file_that_is_repaired_later_is_named_and_not_the_newest(
    system: str, target: backstay.Store, tmp_path: Path
) -> None:
    root = shutil.copytree(GOLDEN / ("graph/run" if system == "graph" else "workflow/1a283a5"), tmp_path / "root")
    imported: Any = import_blobs if system == "graph" else import_workflow
    files = sorted(root.rglob("*.json"), key=lambda path: str(json.loads(path.read_bytes())["created_at"]))
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-20])
    assert not imported(root, target)
    (thread,) = {meta.thread_id for meta in target.threads()}
    before = newest(target, thread)

    files[1].write_bytes(whole)
    report = imported(root, target)

    assert newest(target, thread) == before
    name = json.loads(whole)["id" if system == "workflow" else "checkpoint_id"]
    assert [note.checkpoint for note in report.missing] == [name]


def test_a_refused_import_changes_nothing_and_says_what_to_do(target: backstay.Store, tmp_path: Path) -> None:
    """The original used an id of an imported session again."""
    root = tmp_path / "sessions"
    writer = SyncCheckpointWriter(root)
    shutil.copytree((RUST / "chat"), root / "chat", symlinks=True)
    import_sessions(root, target)
    history = [meta.id for meta in target.thread("chat").history()]
    first, *_ = sorted((root / "chat" / "checkpoints").glob("cp_*.json"))
    record = {key: value for key, value in json.loads(first.read_bytes()).items() if not key.startswith("_")}
    again = first.with_name("cp_20270101_000000_" + first.name.split("_", 3)[3])
    changed = {**record, "iteration": 99, "created_at": "2027-01-01T00:00:00Z"}
    again.write_text(json.dumps(ChecksumUtils.add_checksum(changed), indent=2))
    (again.parent / "latest.json").unlink()
    (again.parent / "latest.json").symlink_to(again.name)
    found = writer.load("chat")
    assert found is not None
    assert found.iteration == 99

    report = import_sessions(root, target)

    assert [meta.id for meta in target.thread("chat").history()] == history
    (refused,) = report.refused
    assert refused.error.hint == "Import into another store or namespace, or delete the thread here first"


def test_an_import_continues_after_the_old_program_deleted_old_rows(target: backstay.Store) -> None:
    def record(number: int) -> dict[str, Any]:
        metadata = {
            "thread_id": "t",
            "checkpoint_id": f"a{number}",
            "step": number,
            "created_at": "2026-01-01T00:00:00Z",
        }
        return {"metadata": metadata, "messages": [], "state": {"n": number}, "tools_result": {}}

    import_agentos([record(number) for number in (1, 2, 3)], target)
    report = import_agentos([record(number) for number in (2, 3, 4)], target)

    assert report
    assert [meta.id for meta in target.thread("t").history()] == ["a4", "a3", "a2", "a1"]
    target.thread("t").save({"n": "ours"})
    assert [each.thread for each in import_agentos([record(number) for number in (4, 5)], target).refused] == ["t"]


def test_ids_of_sessions_never_clash_with_the_names_that_others_got(target: backstay.Store, tmp_path: Path) -> None:
    def put(session: str, moment: str, name: str, iteration: int) -> None:
        path = tmp_path / session / "checkpoints" / f"cp_{moment}_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = json.loads(next(((RUST / "chat") / "checkpoints").glob("cp_*.json")).read_bytes())
        record = {key: value for key, value in record.items() if not key.startswith("_")}
        when = f"2026-01-01T00:00:0{iteration}Z"
        record |= {"checkpoint_id": name, "session_id": session, "iteration": iteration, "created_at": when}
        path.write_text(json.dumps(ChecksumUtils.add_checksum(record), indent=2))

    put("x", "20260101_000001", "i", 1)
    put("y", "20260101_000001", "i", 1)
    put("z", "20260101_000001", "y.i", 1)
    put("one", "20260101_000000", "a", 1)
    put("one", "20260101_000002", "a", 2)
    put("one", "20260101_000003", "a.20260101_000000", 3)

    first, again = import_sessions(tmp_path, target), import_sessions(tmp_path, target)

    assert (first.stored, again.stored, again.present) == (6, 0, 6)
    assert first
    assert again
    assert [meta.iteration for meta in target.thread("one").history()] == [3, 2, 1]
    assert newest(target, "z") == "z.y.i"


def test_a_session_instead_of_the_directory_of_sessions_is_refused(target: backstay.Store) -> None:
    with pytest.raises(StoreRefused, match="is a session, not a directory of sessions"):
        import_sessions((RUST / "chat"), target)


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+08:00", "9999-12-31T23:59:59-08:00"])
def test_one_impossible_time_hides_no_other_checkpoint(moment: str, target: backstay.Store, tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "workflow" / "v0.1.1", tmp_path / "files")
    odd, *_ = sorted(root.iterdir())
    odd.write_text(json.dumps({**json.loads(odd.read_bytes()), "created_at": moment}))
    listed = asyncio.run(FileCheckpointStore(root).list())
    report = import_workflow(root, target)
    metadata = {"thread_id": "t", "checkpoint_id": "c", "step": 1, "created_at": moment}
    rows = import_agentos([{"metadata": metadata, "messages": [], "state": {}, "tools_result": {}}], target)

    assert (len(listed), report.stored, [note.where for note in report.missing]) == (4, 4, [str(odd)])
    assert [problem.where for problem in listed.problems if problem.kind != "unchecked"] == [odd.name]
    assert rows.stored == 1
    assert [note.what.partition(":")[0] for note in rows.notes] == ["created_at is not a time"]


@pytest.mark.parametrize("system", [import_agentos, import_blobs, import_sessions, import_workflow])
def test_what_is_not_an_open_store_is_refused(system: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="an open store is needed here, not str"):
        system(tmp_path, "agent.db")


# Exports ----------------------------------------------------------------------------------------------------------


def test_an_export_into_its_own_directory_moves_no_newest_checkpoint(target: backstay.Store, tmp_path: Path) -> None:
    root = shutil.copytree(RUST, tmp_path / "rust", symlinks=True)
    sessions = ["chat", "copied", "values"]
    before = {name: SyncCheckpointWriter(root).load(name) for name in sessions}
    import_sessions(root, target)

    report = export_sessions(target, root, threads=sessions)

    assert {name: SyncCheckpointWriter(root).load(name) for name in sessions} == before
    assert report
    thread = target.thread("chat")
    thread.save({**thread.latest().state, "messages": ["more"]}, iteration=77)  # type: ignore[union-attr]
    assert export_sessions(target, root, threads=["chat"])
    found = SyncCheckpointWriter(root).load("chat")
    assert found is not None
    assert (found.iteration, found.messages) == (77, ["more"])


def test_a_checkpoint_that_would_become_the_newest_is_left_out(target: backstay.Store, tmp_path: Path) -> None:
    thread = target.thread("s")
    for number in (1, 2, 3):
        thread.save({"messages": [number]}, id=f"c{number}", iteration=number)
    export_sessions(target, tmp_path)
    SyncCheckpointWriter(tmp_path).delete("s", "c2")

    report = export_sessions(target, tmp_path)

    assert [note.checkpoint for note in report.left_out] == ["c2"]
    assert "it would be newer than c3" in report.left_out[0].what
    found = SyncCheckpointWriter(tmp_path).load("s")
    assert found is not None
    assert found.iteration == 3


def test_a_long_session_is_exported_in_order(target: backstay.Store, tmp_path: Path) -> None:
    """The directory is looked at now and then, not for every checkpoint."""
    thread = target.thread("s")
    for number in range(230):
        thread.append({"messages": [number]}, iteration=number)

    assert export_sessions(target, tmp_path).checkpoints == 230

    metas = SyncCheckpointWriter(tmp_path).list("s")
    assert [meta.iteration for meta in metas] == list(range(229, -1, -1))
    assert [meta.seq for meta in metas] == list(range(230, 0, -1))


@pytest.mark.parametrize("system", [export_agentos, export_blobs, export_sessions, export_workflow])
def test_a_thread_that_does_not_exist_is_named(system: Any, target: backstay.Store, tmp_path: Path) -> None:
    target.thread("there").save({"messages": []})

    report = system(target, tmp_path / "out", threads=["there", "typo"])

    assert [(note.thread, note.what) for note in report.left_out] == [("typo", "there is no such thread")]
    with pytest.raises(InvalidInput, match="threads must be a list of names"):
        system(target, tmp_path / "other", threads="there")


def test_values_that_a_session_has_no_place_for_are_named(target: backstay.Store, tmp_path: Path) -> None:
    target.thread("s").save({"messages": "text"}, metadata={"iteration": -5})

    (note,) = export_sessions(target, tmp_path).notes

    assert note.what == "the file cannot hold: metadata.iteration, state.messages as it is: a list of it is written"


@pytest.mark.parametrize("system", [export_agentos, export_blobs, export_sessions, export_workflow])
def test_a_place_that_cannot_be_written_is_named(system: Any, target: backstay.Store) -> None:
    target.thread("t").save({"messages": []})

    with pytest.raises(StoreError, match="/proc/nowhere"):
        system(target, "/proc/nowhere/out")


@pytest.mark.parametrize("system", [export_agentos, export_blobs, export_sessions, export_workflow])
def test_questions_that_have_no_place_are_named(system: Any, target: backstay.Store, tmp_path: Path) -> None:
    thread = target.thread("asks")
    saved = thread.save({"messages": []})
    thread.interrupt(saved, prompt="May I?")

    report = system(target, tmp_path / "out")

    assert "the file cannot hold 1 open question" in [note.what for note in report.notes]


# Graphs with the names of others ------------------------------------------------------------------------------------


def paused(root: Path, **changes: Any) -> Path:
    """Write a file as the original does: a workflow that waits for the approval of a tool."""
    root.mkdir()
    plain = {
        "id": "5f0c9a52", "graph_name": "my workflow", "current_node": "human review",
        "state_snapshot": {"values": {"draft": "hello"}, "messages": [], "current_node": "write"},
        "path": ["write"], "step_count": 1, "created_at": MOMENT,
        "pending_action": {"tool": "rm", "args": {"path": "/"}}, "interrupt_type": "toolapproval", **changes,
    }  # fmt: skip
    (root / "5f0c9a52.json").write_text(json.dumps(plain))
    return root


def workflow() -> Graph:
    graph = Graph("My-workflow")
    graph.node("write", lambda state: {"draft": "hello"})
    graph.node("review", lambda state: {"seen": state["draft"]})
    graph.edge("write", "review")
    graph.end("review")
    graph.start("write")
    return graph


def test_a_graph_with_other_names_resumes_an_imported_run(target: backstay.Store, tmp_path: Path) -> None:
    import_workflow(paused(tmp_path / "files"), target)
    thread, graph = target.thread("5f0c9a52"), workflow()
    with pytest.raises(GraphMismatch, match=r"Please register My-workflow\.migrate\(0x0000000000000000, …\)$"):
        graph.resume_sync(thread, compatible=True)
    graph.migrate(0, nodes={"human review": "review"})
    with pytest.raises(GraphMismatch, match="compatible=True"):
        graph.resume_sync(thread)

    waiting = graph.resume_sync(thread, compatible=True)

    (asked,) = target.interrupts()
    assert (waiting.status, asked.interrupt.node, asked.interrupt.kind) == ("interrupted", "review", "toolapproval")
    assert asked.interrupt.payload == {"tool": "rm", "args": {"path": "/"}}
    assert waiting.checkpoint is not None
    assert waiting.checkpoint.pending_action == asked.interrupt.payload
    done = graph.resume_sync(thread, Approve())
    assert (done.status, done.state["seen"], done.path) == ("completed", "hello", ("write", "review"))


def test_a_prompt_of_our_own_export_is_shown_again(target: backstay.Store, tmp_path: Path) -> None:
    question = {"id": "q", "node": "review", "payload": {"tool": "rm", "args": {}}, "prompt": "Really?"}
    files = paused(tmp_path / "files", graph_name="My-workflow", current_node="review", interrupt=question)
    import_workflow(files, target)

    workflow().resume_sync(target.thread("5f0c9a52"), compatible=True)

    (asked,) = target.interrupts()
    assert (asked.interrupt.prompt, asked.interrupt.payload) == ("Really?", {"tool": "rm", "args": {}})


def test_messages_that_the_original_cannot_read_come_back_as_messages(target: backstay.Store, tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}]
    target.thread("ours").save({"messages": messages, "x": 1}, id="c1", graph="g", next_node="n")
    export_workflow(target, tmp_path / "out")

    with backstay.open("memory:") as other:
        import_workflow(tmp_path / "out", other)
        found = other.get("c1")
        assert found is not None
        assert found.state == {"messages": messages, "x": 1}
        export_workflow(other, tmp_path / "again")

    there, here = (json.loads((tmp_path / name / "c1.json").read_bytes()) for name in ("out", "again"))
    assert here["state_snapshot"] == there["state_snapshot"]


# Several at once --------------------------------------------------------------------------------------------------


def test_snapshots_at_once_get_steps_of_their_own(target: backstay.Store) -> None:
    backend = StoreBackend(target)

    async def five() -> list[int]:
        await asyncio.gather(*(backend.snapshot("t", [], {"n": n}, {}) for n in range(5)))
        return [meta.step for meta in await backend.list_checkpoints("t")]

    assert asyncio.run(five()) == [5, 4, 3, 2, 1]


def test_blobs_of_one_trace_are_saved_by_several_threads(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "store.db") as store:
        blobs = CheckpointBlobStore(store)
        made = [CheckpointBlob(CheckpointId(), b"x", 1, datetime(2026, 1, 1, tzinfo=UTC)) for _ in range(40)]

        def save(part: list[CheckpointBlob]) -> None:
            for blob in part:
                blobs.save_with_trace("trace", blob)

        workers = [threading.Thread(target=save, args=(made[start::4],)) for start in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

        assert sorted(blobs.list("trace")) == sorted(blob.id for blob in made)


def test_a_put_of_anything_else_is_refused(target: backstay.Store) -> None:
    with pytest.raises(InvalidInput, match="must be a Checkpoint, not NoneType"):
        asyncio.run(StoreBackend(target).put(None))  # type: ignore[arg-type]
    metadata = CheckpointMetadata("t", "c", 1, created_at="0001-01-01T00:00:00+08:00")
    with pytest.raises(InvalidInput, match="ISO 8601"):
        asyncio.run(StoreBackend(target).put(Checkpoint(metadata, [], {}, {})))
