"""Checkpoints of other systems: what comes in, in which order, what is said of the rest, and what goes back out."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.bundle.report import ImportReport
from backstay.compat.sessions import CheckpointData, SyncCheckpointWriter, export_sessions, import_sessions
from backstay.compat.workflow import StoreCheckpointStore, export_workflow, import_workflow
from backstay.errors import StoreError

MOMENT = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path / "target.db") as opened:
        yield opened
        assert opened.check()


def ids(store: backstay.Store, thread: str) -> list[str]:
    """Return the ids of a thread, oldest first."""
    return [meta.id for meta in store.thread(thread).history(branch="*")][::-1]


def assert_again_changes_nothing(report: ImportReport, again: ImportReport) -> None:
    assert (again.stored, again.present) == (0, report.stored)


# Session directories ----------------------------------------------------------------------------------------------


def session_data(number: int, **fields: Any) -> CheckpointData:
    values: dict[str, Any] = {
        "checkpoint_id": f"cp{number}",
        "session_id": "s1",
        "created_at": MOMENT - timedelta(hours=number),  # the clock goes backwards: the order is not its own
        "iteration": number,
        "messages": [{"role": "user", "content": f"{n}"} for n in range(number)],
        "tool_calls_pending": [{"tool": "rm"}],
        "tool_results": {"ls": number},
        "tokens_used": 10 * number,
        "cost_estimate": 0.5,
        "resume_hint": "go on",
        **fields,
    }
    return CheckpointData(**values)


def test_a_session_directory_becomes_a_thread(target: backstay.Store, tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path / "root")
    for number in range(1, 5):
        writer.save(session_data(number))
    report = import_sessions(tmp_path / "root", target)

    assert report
    assert ids(target, "s1") == ["cp1", "cp2", "cp3", "cp4"]
    newest = target.thread("s1").latest()
    assert newest is not None
    assert newest.state == {
        "messages": [{"role": "user", "content": f"{n}"} for n in range(4)],
        "pending_tool_calls": [{"tool": "rm"}],
        "tool_results": {"ls": 4},
    }
    assert (newest.iteration, newest.tokens_used, newest.cost_estimate, newest.resume_hint) == (4, 40, 0.5, "go on")
    assert (newest.trigger, newest.created_at) == ("manual", MOMENT - timedelta(hours=4))
    assert_again_changes_nothing(report, import_sessions(tmp_path / "root", target))


def old_file(folder: Path, number: int, minutes: int) -> Path:
    """Write a checkpoint as the older writer did: no number inside, and the checksum over sorted, compact JSON."""
    data = session_data(number, created_at=MOMENT + timedelta(minutes=minutes), resume_hint=None).to_dict()
    data["future"] = {"key": 1}
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data["_checksum"], data["_version"] = hashlib.sha256(canonical.encode()).hexdigest(), "1.0"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cp_20260101_120000_cp{number}.json"
    path.write_text(json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


def test_files_of_the_older_writer_are_read_by_its_rule(target: backstay.Store, tmp_path: Path) -> None:
    folder = tmp_path / "root" / "s1" / "checkpoints"
    for number, minutes in ((1, 30), (2, 10), (3, 20)):
        old_file(folder, number, minutes)
    report = import_sessions(tmp_path / "root", target)

    assert report
    assert ids(target, "s1") == ["cp2", "cp3", "cp1"]
    stored = target.get("cp2")
    assert stored is not None
    assert (stored.metadata, stored.resume_hint, stored.messages[1]["content"]) == ({"future": {"key": 1}}, None, "1")
    damaged = old_file(folder, 4, 40)
    damaged.write_text(damaged.read_text(encoding="utf-8").replace('"key": 1', '"key": 2'), encoding="utf-8")
    assert [note.checkpoint for note in import_sessions(tmp_path / "root", target).missing] == ["cp4"]


def test_a_damaged_file_is_taken_from_its_backup_or_named(target: backstay.Store, tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path / "root", max_backups=1)
    for number in range(1, 4):
        writer.save(session_data(number))
    files = {path.name.split("_")[-1]: path for path in (tmp_path / "root/s1/checkpoints").glob("cp_*.json")}
    for name in ("cp1.json", "cp2.json"):
        text = files[name].read_text(encoding="utf-8")
        files[name].write_text(text.replace("go on", "go off"), encoding="utf-8")
    report = import_sessions(tmp_path / "root", target)

    assert not report
    assert ids(target, "s1") == ["cp2", "cp3"]
    assert [note.checkpoint for note in report.missing] == ["cp1"]
    assert "checksum" in report.missing[0].what
    assert [note.checkpoint for note in report.notes] == ["cp2"]


def test_what_our_record_cannot_have_is_kept_in_the_metadata(target: backstay.Store, tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path / "root")
    writer.save(session_data(1, trigger=""))
    report = import_sessions(tmp_path / "root", target)
    stored = target.get("cp1")

    assert stored is not None
    assert stored.metadata == {"trigger": ""}
    assert ["trigger" in note.what for note in report.notes] == [True]


def test_a_thread_goes_back_out_as_a_session_directory(target: backstay.Store, tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path / "root")
    for number in range(1, 4):
        writer.save(session_data(number))
    import_sessions(tmp_path / "root", target)
    target.thread("s1").fork("cp2", branch="other")
    target.thread("mine").save({"messages": [], "plan": "x"}, id="own", tags=["kept"])
    report = export_sessions(target, tmp_path / "out")
    copies = SyncCheckpointWriter(tmp_path / "out")

    assert [copies.load("s1", f"cp{n}") for n in (1, 2, 3)] == [writer.load("s1", f"cp{n}") for n in (1, 2, 3)]
    assert [meta.checkpoint_id for meta in copies.list("s1")] == ["cp3", "cp2", "cp1"]
    assert report.checkpoints == 4
    assert [(note.checkpoint, note.what) for note in report.notes] == [
        (None, "branches left out: other"),
        ("own", "the file cannot hold: state.plan, tags"),
    ]
    assert export_sessions(target, tmp_path / "out").checkpoints == 4


def test_a_root_that_is_not_there_is_an_error_and_a_missing_session_is_named(
    target: backstay.Store, tmp_path: Path
) -> None:
    with pytest.raises(StoreError):
        import_sessions(tmp_path / "nowhere", target)
    report = import_sessions(tmp_path, target, sessions=["ghost", "../up"])

    assert [note.thread for note in report.missing] == ["ghost", "../up"]


# Workflow files ---------------------------------------------------------------------------------------------------


def pause(name: str, minutes: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "graph_name": "review",
        "current_node": "approve",
        "state_snapshot": {"draft": name},
        "path": ["start", "write"],
        "step_count": minutes,
        "created_at": (MOMENT + timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z"),
        "pending_action": {"tool": "send"},
        "interrupt_type": "beforenode",
        **fields,
    }


def write_files(base: Path, *plains: dict[str, Any]) -> None:
    base.mkdir(exist_ok=True)
    for plain in plains:
        (base / f"{plain['id']}.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")


def test_workflow_files_become_threads_in_the_order_of_their_making(target: backstay.Store, tmp_path: Path) -> None:
    write_files(tmp_path / "base", pause("a", 3), pause("b", 1), pause("c", 2, run_id="run-7", mood="fine"))
    (tmp_path / "base" / "torn.json").write_text('{"id": "torn", ', encoding="utf-8")
    report = import_workflow(tmp_path / "base", target)

    assert not report
    assert [Path(note.where).name for note in report.missing] == ["torn.json"]
    assert [ids(target, name) for name in ("a", "b", "run-7")] == [["a"], ["b"], ["c"]]
    stored = target.get("a")
    assert stored is not None
    assert (stored.state, stored.pending_action) == (
        {"draft": "a", "pending_action": {"tool": "send"}},
        {"tool": "send"},
    )
    assert (stored.graph, stored.next_node, stored.last_node, stored.path, stored.step) == (
        "review",
        "approve",
        "write",
        ("start", "write"),
        3,
    )
    assert stored.interrupt is not None
    assert stored.interrupt.kind == "beforenode"
    kept = target.get("c")
    assert kept is not None
    assert kept.metadata["mood"] == "fine"
    assert_again_changes_nothing(report, import_workflow(tmp_path / "base", target))
    assert import_workflow(tmp_path / "base", target).order.startswith("created_at")


def test_workflow_checkpoints_go_back_out_as_they_came(target: backstay.Store, tmp_path: Path) -> None:
    files = [pause("a", 3), pause("b", 1), pause("c", 2, run_id="run-7", mood="fine")]
    write_files(tmp_path / "base", *files)
    import_workflow(tmp_path / "base", target, thread="mine")
    target.thread("own").save({"n": (1, 2)}, id="tuple")
    target.thread("own").save({"n": 1}, id="plain", graph="g", next_node="x")
    report = export_workflow(target, tmp_path / "out")

    assert ids(target, "mine") == ["b", "a"]
    for plain in files:
        written = json.loads((tmp_path / "out" / f"{plain['id']}.json").read_text(encoding="utf-8"))
        assert {key: value for key, value in written.items() if not key.startswith("_")} == plain
    assert report.checkpoints == 4
    assert [note.checkpoint for note in report.left_out] == ["tuple"]
    found = asyncio.run(StoreCheckpointStore(target.url).load("a"))
    assert found is not None
    assert found.to_dict() == files[0]
