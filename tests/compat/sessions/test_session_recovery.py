"""After a crash: every session that died is found, none that lives, and what can be gone on from is told honestly."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.compat.sessions import (
    AgentState,
    CrashRecovery,
    InterruptedSession,
    SessionRecovery,
    SyncCheckpointWriter,
    render,
)
from backstay.errors import InvalidInput
from backstay.operations.leases import this_process
from backstay.store.leases import Holder
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.access import access_of
from support.session_records import damage, file_of, fill, folder, process, record

RUN = """
import sys
from backstay.compat.sessions import CheckpointData, CrashRecovery, SyncCheckpointWriter
root, session = sys.argv[1:]
recovery = CrashRecovery(root)
recovery.mark_session_active(session, owner="worker-7", task="import orders")
writer = SyncCheckpointWriter(root)
for number in range(3):
    writer.save(CheckpointData(session_id=session, iteration=number))
print("ready", flush=True)
sys.stdin.read()
"""

RUN_IN_STORE = """
import sys, backstay
from backstay.compat.sessions import CrashRecovery
store = backstay.open(sys.argv[1])
CrashRecovery(store).mark_session_active("nightly", owner="worker-7", task="import orders")
store.thread("nightly").save({"done": 3}, iteration=3)
print("ready", flush=True)
sys.stdin.read()
"""


def meta_of(root: Path, session: str = "s1") -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((root / session / "session_meta.json").read_text())
    return stored


def write_meta(root: Path, session: str, **fields: Any) -> None:
    """Write a record of a session; without ``process`` it is as the older system wrote it."""
    (root / session).mkdir(parents=True, exist_ok=True)
    stored = {
        "session_id": session,
        "is_active": True,
        "termination_reason": None,
        "last_updated": "2026-01-31T09:30:00Z",
        "last_iteration": 4,
        **fields,
    }
    (root / session / "session_meta.json").write_text(json.dumps(stored))


def ids(sessions: list[InterruptedSession]) -> list[str]:
    return [session.session_id for session in sessions]


# Which sessions died ----------------------------------------------------------------------------------------------


@pytest.mark.crash
def test_all_sessions_of_killed_processes_are_found_and_none_of_a_living_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = ["killed-1", "killed-2", "alive"]
        running = {name: stack.enter_context(process(RUN, str(tmp_path), name)) for name in names}
        recovery = CrashRecovery(tmp_path)
        assert recovery.detect_unclean_shutdown() == []  # all of them live
        for name in ("killed-1", "killed-2"):
            running[name].kill()
            assert running[name].wait() == -signal.SIGKILL
        recovery.mark_session_active("ended")
        recovery.mark_session_terminated("ended", "completed")

        found = recovery.detect_unclean_shutdown()

        assert sorted(ids(found)) == ["killed-1", "killed-2"]
        assert {(one.last_iteration, one.task_description, one.owner) for one in found} == {
            (2, "import orders", "worker-7")
        }
        assert [one.last_activity for one in found] == sorted((one.last_activity for one in found), reverse=True)
        assert SessionRecovery(tmp_path).detect_interrupted_sessions() == found
    assert meta_of(tmp_path, "ended")["termination_reason"] == "completed"


def test_a_path_that_is_missing_has_no_sessions(tmp_path: Path) -> None:
    assert CrashRecovery(tmp_path / "missing").detect_unclean_shutdown() == []
    assert SessionRecovery(tmp_path / "missing").describe() == "No session was interrupted"
    assert CrashRecovery(tmp_path).recover_session("unknown").data is None


def test_a_session_that_saved_before_it_was_recorded_is_recorded_as_far_as_it_came(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    CrashRecovery(tmp_path).mark_session_active("s1")

    assert meta_of(tmp_path)["last_iteration"] == 3


def test_marking_makes_the_record_and_keeps_it_current(tmp_path: Path) -> None:
    recovery = CrashRecovery(tmp_path)
    assert not recovery.mark_session_terminated("s1", "never began")

    recovery.mark_session_active("s1", task="import")
    first = meta_of(tmp_path)
    fill(tmp_path, 3)
    after = meta_of(tmp_path)
    assert recovery.mark_session_terminated("s1", "user stop")
    last = meta_of(tmp_path)
    recovery.mark_session_active("s1")
    again = meta_of(tmp_path)

    assert (first["session_id"], first["is_active"], first["termination_reason"]) == ("s1", True, None)
    assert (first["process"], first["task_description"]) == (str(this_process()), "import")
    assert (after["last_iteration"], after["is_active"]) == (3, True)
    assert after["last_updated"] > first["last_updated"]
    assert (last["is_active"], last["termination_reason"], last["last_iteration"]) == (False, "user stop", 3)
    assert last["last_updated"] > after["last_updated"]
    assert (again["is_active"], again["termination_reason"], again["last_iteration"]) == (True, None, 3)
    assert again["task_description"] == "import"
    with pytest.raises(InvalidInput, match="reason"):
        recovery.mark_session_terminated("s1", "")


def test_a_save_makes_no_record_of_a_session_that_nobody_marked(tmp_path: Path) -> None:
    fill(tmp_path, 2)

    assert sorted(os.listdir(tmp_path / "s1")) == [".lock", "checkpoints"]
    assert CrashRecovery(tmp_path).detect_unclean_shutdown() == []


def test_fields_that_others_wrote_are_kept(tmp_path: Path) -> None:
    write_meta(tmp_path, "s1", custom={"a": [1.5, None]}, is_active=False)

    CrashRecovery(tmp_path).mark_session_active("s1")
    SyncCheckpointWriter(tmp_path).save(record(9))

    assert meta_of(tmp_path)["custom"] == {"a": [1.5, None]}
    assert meta_of(tmp_path)["last_iteration"] == 9


def test_a_process_that_cannot_be_looked_for_is_dead_only_after_a_long_silence(tmp_path: Path) -> None:
    """Another host: neither its boot nor its namespaces are ours, and its processes are not to be seen from here."""
    here = this_process()
    elsewhere = str(Holder("machine", "another-boot", "pid:[1]+time:[1]", here.pid, here.started, "another-host"))
    just_now = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    write_meta(tmp_path, "far", process=elsewhere, last_updated=just_now)

    assert CrashRecovery(tmp_path).detect_unclean_shutdown() == []
    assert ids(CrashRecovery(tmp_path, silence=50).detect_unclean_shutdown()) == ["far"]


def test_a_process_of_an_earlier_boot_of_this_host_is_dead(tmp_path: Path) -> None:
    here = this_process()
    before = str(here._replace(boot="the-boot-before"))
    write_meta(tmp_path, "s1", process=before, last_updated=datetime.now(UTC).isoformat())

    assert ids(CrashRecovery(tmp_path).detect_unclean_shutdown()) == ["s1"]


def test_a_process_id_that_was_given_to_another_process_is_not_taken_for_the_first(tmp_path: Path) -> None:
    mine = this_process()
    write_meta(tmp_path, "mine", process=str(mine))
    write_meta(tmp_path, "other", process=str(mine._replace(started="1")))

    assert ids(CrashRecovery(tmp_path).detect_unclean_shutdown()) == ["other"]


def test_the_older_systems_records_are_judged_by_its_rule(tmp_path: Path) -> None:
    write_meta(tmp_path, "crashed")
    write_meta(tmp_path, "crashed-later", last_updated="2026-01-31T09:31:00Z")
    write_meta(tmp_path, "ended", is_active=False)
    write_meta(tmp_path, "said-why", termination_reason="limit")

    found = CrashRecovery(tmp_path).detect_unclean_shutdown()

    assert ids(found) == ["crashed-later", "crashed"]
    assert found[1].last_iteration == 4
    assert found[1].last_activity == datetime(2026, 1, 31, 9, 30, tzinfo=UTC)


def test_the_older_systems_other_record_is_read_only_where_there_is_no_first(tmp_path: Path) -> None:
    def write_state(session: str, status: str, completed: bool = False, minute: int = 0) -> None:
        (tmp_path / session).mkdir(exist_ok=True)
        stored = {
            "session_id": session,
            "status": status,
            "completed": completed,
            "iteration": 6,
            "last_updated": f"2026-01-31T09:{minute:02}:00Z",
            "task_description": "sort mail",
        }
        (tmp_path / session / "state.json").write_text(json.dumps(stored))

    write_state("running", "Running", minute=1)
    write_state("running-later", "Running", minute=2)
    write_state("paused", "Paused")
    write_state("completed", "Completed")
    write_state("failed", "Error")
    write_state("done", "Running", completed=True)
    write_state("both", "Running")
    write_meta(tmp_path, "both", is_active=False, termination_reason="completed")

    found = SessionRecovery(tmp_path).detect_interrupted_sessions()

    assert ids(found) == ["running-later", "running"]
    assert (found[0].last_iteration, found[0].task_description) == (6, "sort mail")
    assert CrashRecovery(tmp_path).detect_unclean_shutdown() == found  # one truth for both
    before = (tmp_path / "running" / "state.json").read_bytes()
    CrashRecovery(tmp_path).mark_session_terminated("running", "given up")
    assert ids(SessionRecovery(tmp_path).detect_interrupted_sessions()) == ["running-later"]
    assert (tmp_path / "running" / "state.json").read_bytes() == before


def test_a_record_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write_meta(tmp_path, "good")
    write_meta(tmp_path, "strange", last_iteration="many")
    write_meta(tmp_path, "torn")
    (tmp_path / "torn" / "session_meta.json").write_text('{"session_id": "to')
    (tmp_path / "not a session").mkdir()
    (tmp_path / "a-file").write_text("")
    recovery = CrashRecovery(tmp_path)

    assert ids(recovery.detect_unclean_shutdown()) == ["good"]
    assert [problem.what for problem in recovery.problems] == ["not a session", "strange", "torn"]
    assert "last_iteration" in recovery.problems[1].why
    recovery.mark_session_active("torn")  # which makes it good again
    recovery.detect_unclean_shutdown()
    assert [problem.what for problem in recovery.problems] == ["not a session", "strange"]


def test_interrupted_sessions_are_shown_with_how_to_resume_them(tmp_path: Path) -> None:
    write_meta(tmp_path, "s1", task_description="import orders", owner="worker-7")
    write_meta(tmp_path, "s2")
    recovery = SessionRecovery(tmp_path)

    text = recovery.describe()

    assert text == render(recovery.detect_interrupted_sessions())
    assert text.splitlines()[0] == "2 interrupted sessions:"
    assert "session 's1' ('import orders'): iteration 4, last active 2026-01-31 09:30:00+00:00" in text
    assert "Resume it from recover_session('s1')" in text
    assert {field.name for field in dataclasses.fields(InterruptedSession)} >= {
        "session_id",
        "last_iteration",
        "last_activity",
        "task_description",
    }


def test_a_session_at_a_glance(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)
    assert writer.summary("s1") is None
    fill(tmp_path, 3)
    unmarked = writer.summary("s1")
    CrashRecovery(tmp_path).mark_session_active("s1")
    active = writer.summary("s1")
    CrashRecovery(tmp_path).mark_session_terminated("s1", "completed")
    completed = writer.summary("s1")
    write_meta(tmp_path, "s1", agent_id="agent-9", agent_state="waiting_tool")
    stated = writer.summary("s1")

    assert unmarked is not None
    assert (unmarked.session_id, unmarked.agent_id, unmarked.agent_state) == ("s1", None, AgentState.IDLE)
    assert (unmarked.message_count, unmarked.checkpoint_count) == (1, 3)
    assert (unmarked.created_at, unmarked.last_updated) == (record(1).created_at, record(3).created_at)
    assert active is not None
    assert active.agent_state is AgentState.RUNNING
    assert active.last_updated > record(3).created_at
    assert completed is not None
    assert completed.agent_state is AgentState.COMPLETED
    assert stated is not None
    assert (stated.agent_id, stated.agent_state) == ("agent-9", AgentState.WAITING_TOOL)


# What can be gone on from -----------------------------------------------------------------------------------------


def test_recovery_gives_the_newest_intact_checkpoint_and_says_what_it_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, 5, max_backups=1)  # of checkpoint 4
    recovery = CrashRecovery(tmp_path)
    whole = recovery.recover_session("s1")
    damage(file_of(tmp_path, 5))
    older = recovery.recover_session("s1")
    damage(file_of(tmp_path, 4))
    backup = recovery.recover_session("s1")
    damage(file_of(tmp_path, 4, ending=".json.backup"))
    rest = recovery.recover_session("s1")
    for number in (1, 2, 3):
        damage(file_of(tmp_path, number))
    nothing = recovery.recover_session("s1")

    assert (whole.data, whole.path, whole.from_backup) == (record(5), file_of(tmp_path, 5), False)
    assert (whole.skipped, whole.notes) == ((), ())
    assert (older.data, older.from_backup, len(older.skipped)) == (record(4), False, 1)
    assert (backup.data, backup.from_backup, len(backup.skipped)) == (record(4), True, 2)
    assert (rest.data, rest.from_backup, len(rest.skipped)) == (record(3), False, 3)
    assert not nothing
    assert (nothing.data, nothing.path, len(nothing.skipped)) == (None, None, 6)
    assert all("checksum verification failed" in skip.why for skip in nothing.skipped)


def test_recovery_never_brings_back_what_was_deleted(tmp_path: Path) -> None:
    writer = fill(tmp_path, 3)
    writer.delete("s1", "id-3")
    writer.delete("s1", "id-2")
    damage(file_of(tmp_path, 1))
    damage(file_of(tmp_path, 1, ending=".json.backup"))

    assert CrashRecovery(tmp_path).recover_session("s1").data is None


def test_recovery_does_not_go_by_the_files_dates(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for path in folder(tmp_path).iterdir():
        os.utime(path, (1, 9e9 if "id-1" in path.name else 1), follow_symlinks=False)

    assert CrashRecovery(tmp_path).recover_session("s1").data == record(3)


# Over a store -----------------------------------------------------------------------------------------------------


@pytest.mark.crash
def test_the_same_over_a_store(tmp_path: Path) -> None:
    url = str(tmp_path / "agent.db")
    with backstay.open(url) as store:
        recovery = CrashRecovery(store)
        with process(RUN_IN_STORE, url) as running:
            assert recovery.detect_unclean_shutdown() == []
            running.kill()
            running.wait()

        (found,) = recovery.detect_unclean_shutdown()

        assert (found.session_id, found.last_iteration, found.owner) == ("nightly", 3, "worker-7")
        assert found.task_description == "import orders"
        assert "store.thread('nightly').latest()" in str(found)
        assert SessionRecovery(store).detect_interrupted_sessions() == [found]
        report = recovery.recover_session("nightly")
        assert report.data is not None
        assert report.data.state == {"done": 3}
        assert recovery.mark_session_terminated("nightly", "given up")
        assert recovery.detect_unclean_shutdown() == []
        assert not recovery.mark_session_terminated("nightly", "again")


def test_a_session_of_a_store_is_ended_by_who_began_it(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "agent.db") as store:
        recovery = CrashRecovery(store)
        recovery.mark_session_active("t", task="one")
        recovery.mark_session_active("t", task="two")
        (run,) = store.runs(status="running")
        assert (run.kind, run.note, run.thread_id) == ("session", "two", "t")

        assert recovery.mark_session_terminated("t", "completed")

        assert store.runs(status="running") == []
        assert [(run.status, run.reason) for run in store.runs()] == [
            ("completed", "completed"),
            ("completed", "started again"),
        ]
        with pytest.raises(InvalidInput, match="reason"):
            recovery.mark_session_terminated("t", "")


def test_a_session_of_a_store_and_the_loops_in_it_do_not_mind_each_other(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "agent.db") as store:
        recovery = CrashRecovery(store)
        recovery.mark_session_active("t", task="one")
        for expected in (1, 2):  # the second one continues the run of the first, across the new session
            with store.thread("t").loop({"n": 0}, input={"question": "?"}) as loop:
                for turn in loop:
                    if turn.iteration > expected:
                        break
                    turn.set(n=turn.iteration)
            recovery.mark_session_active("t", task=f"after {expected}")
        (run,) = store.runs(graph="loop")
        assert (run.status, run.attempts, run.step) == ("abandoned", 2, 2)
        assert [(each.note, each.status) for each in store.runs(graph="session")] == [
            ("after 2", "running"),
            ("after 1", "completed"),
            ("one", "completed"),
        ]
        assert run.cancel().status == "cancelled"
        with store.thread("t").loop({}, input={"question": "!"}) as loop:
            assert loop.state["question"] == "!"

        assert recovery.mark_session_terminated("t", "completed")
        assert store.runs(status="running") == []


def test_recovery_from_a_store_passes_over_what_is_damaged_and_says_why(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "agent.db") as store:
        thread = store.thread("t")
        for number in range(1, 6):
            thread.save({"n": number}, id=f"c{number}")
        backend = access_of(store).store
        assert isinstance(backend, SqliteStore)
        backend._writer.submit(
            lambda connection: connection.execute(
                "UPDATE checkpoint SET digest = zeroblob(32) WHERE step >= 4"
            ).fetchall()
        )
    with backstay.open(tmp_path / "agent.db") as store:
        with pytest.raises(backstay.Corrupted):
            store.thread("t").latest()

        report = CrashRecovery(store).recover_session("t")

        assert report.data is not None
        assert report.data.state == {"n": 3}
        assert [skip.what for skip in report.skipped] == ["checkpoint c5 (seq 5)", "checkpoint c4 (seq 4)"]
        assert all(skip.why for skip in report.skipped)
        assert not CrashRecovery(store).recover_session("unknown")
