"""Files that the original program wrote: every value is read, imported, continued from, and exported again.

The expected values are those that were given to the original program; see ``tests/golden/sessions/README.md``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.compat.sessions import (
    CheckpointData,
    CrashRecovery,
    SessionRecovery,
    SyncCheckpointWriter,
    export_sessions,
    import_sessions,
)
from backstay.errors import Corrupted
from support.session_records import GOLDEN, folder, original

ODD = "项目 α@x"
NUMBERS = [
    1e-7, 1e16, 0.1 + 0.2, -0.0, 1.0, 1e15, 123456789012345680.0, 1e21, -2.5e-9, 5e-324, 1.7976931348623157e308,
    2**64 - 1, -(2**63), 9007199254740993, 0, -1,
]  # fmt: skip
VALUES = [
    "text", "", None, True, 3, -1.5, [1, [2, []]], {}, {"content": "no role"}, {"role": "robot"}, {"role": None},
    {"role": ["user"]},
]  # fmt: skip
NOTHING: dict[str, Any] = {
    "trigger": "manual",
    "iteration": 1,
    "messages": [],
    "tool_calls_pending": [],
    "tool_results": None,
    "tokens_used": 0,
    "cost_estimate": 0.0,
    "resume_hint": None,
}


def at(hour: int, minute: int, microsecond: int = 0) -> datetime:
    return datetime(2026, 3, 1, hour, minute, 0, microsecond, tzinfo=UTC)


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels > 1 else []


def given(session: str, name: str, created_at: datetime, **fields: Any) -> CheckpointData:
    return CheckpointData(
        **{"checkpoint_id": name, "session_id": session, "created_at": created_at, **NOTHING, **fields}
    )


CHAT = [
    given(
        "chat", "a1b2c3d4", at(8, 0, 123456), messages=[{"role": "user", "content": "hello"}], tokens_used=100,
        cost_estimate=0.01,
    ),
    given(
        "chat", "b2c3d4e5", at(8, 5, 500000), trigger="before_tool_call", iteration=2,
        messages=[
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": 'né \u2028 \x7f \U0001f600 你好 "quoted" \\ \x01 \n\t'},
        ],
        tool_calls_pending=[{"id": "t1", "name": "search", "arguments": {"q": "x", "": []}}, "text", None],
        tool_results=[1, "two", None, {"three": 3.5}], tokens_used=2**63 - 1, cost_estimate=130.65,
        resume_hint="run the search first",
    ),
    given(
        "chat", "c3d4e5f6", at(8, 10), trigger="periodic", iteration=3,
        messages=[{"role": "tool", "content": "found", "name": "search", "tool_call_id": "t1"}],
        tool_results={"t1": {"ok": True, "rows": []}}, tokens_used=300, resume_hint="",
    ),
    given(
        "chat", "c3d4e5f6", at(8, 15, 1), iteration=4, messages=[{"role": "tool", "content": "found more"}],
        tokens_used=301,
    ),
    given(
        "chat", "d4e5f6a7", at(8, 20, 123000), iteration=5,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "go on"}],
        tool_results="done", tokens_used=400, cost_estimate=1e-7, resume_hint="continue",
    ),
]  # fmt: skip
OTHERS = [
    given(
        "numbers", "f10a75aa", at(9, 0, 987654), messages=[NUMBERS], tool_results={"nested": [[[NUMBERS]]]},
        tokens_used=9007199254740993, cost_estimate=0.1 + 0.2,
    ),
    given("numbers", "f10a75ab", at(9, 1), iteration=-5, tokens_used=-7, cost_estimate=-2.5),
    given("numbers", "f10a75ac", at(9, 2), iteration=2**31 - 1, cost_estimate=130.65331632653061),
    given("numbers", "f10a75ae", at(9, 4), iteration=9, cost_estimate=1e16),
    given("values", "01000001", at(10, 0), messages=VALUES, tool_calls_pending=[None, "x", 0]),
    given(
        "values", "01000002", at(10, 1), tool_results=False,
        messages=[{"messages": [{"role": "user", "content": "Hello"}], "state": {"step": 1}}],
    ),
    given("values", "01000003", at(10, 2), messages=[nested(40)], tool_results=[[], {}]),
    given("deleted", "de1e7e01", at(11, 1), messages=[{"role": "user", "content": "message 1"}]),
    given("deleted", "de1e7e02", at(11, 2), iteration=2, messages=[{"role": "user", "content": "message 2"}]),
]  # fmt: skip
IN_PLACE = [data for data in CHAT if data is not CHAT[2]] + OTHERS


def text(value: object) -> str:
    """Return a value so that 1, 1.0 and true, or 0.0 and -0.0, are not equal."""
    return json.dumps(value, sort_keys=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path / "target.db") as opened:
        yield opened
        assert opened.check()


# Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expected", IN_PLACE, ids=lambda data: f"{data.session_id}-{data.checkpoint_id}")
def test_every_value_of_a_file_is_read_as_it_was_given(tmp_path: Path, expected: CheckpointData) -> None:
    root = original(tmp_path)
    loaded = SyncCheckpointWriter(root).load(expected.session_id, expected.checkpoint_id)

    assert loaded == expected
    assert text(loaded.to_dict()) == text(expected.to_dict())
    paths = list(folder(root, expected.session_id).glob(f"cp_*_{expected.checkpoint_id}.json"))
    assert all(SyncCheckpointWriter(root).verify(path) for path in paths)


@pytest.mark.parametrize(
    ("session", "ids", "seen"),
    [
        ("chat", ["d4e5f6a7", "c3d4e5f6", "c3d4e5f6", "b2c3d4e5", "a1b2c3d4"], "d4e5f6a7"),
        ("values", ["01000003", "01000002", "01000001"], "01000003"),
        ("numbers", ["f10a75ae", "f10a75ac", "f10a75ab", "f10a75aa"], "f10a75ae"),
        ("deleted", ["de1e7e02", "de1e7e01"], "de1e7e02"),
        ("copied", ["c0b1e500", "c0b1e500"], "c0b1e500"),
    ],
)
def test_the_list_and_the_newest_are_those_of_the_original_program(
    tmp_path: Path, session: str, ids: list[str], seen: str
) -> None:
    writer = SyncCheckpointWriter(original(tmp_path))
    metas = writer.list(session)

    assert [meta.checkpoint_id for meta in metas] == ids
    for meta in metas:
        stated = {json.loads(path.read_text())["_checksum"] for path in folder(tmp_path / "rust", session).glob("cp_*")}
        assert meta.checksum in stated
    newest = writer.load(session)
    assert newest is not None
    assert newest.checkpoint_id == seen
    assert CrashRecovery(tmp_path / "rust").recover_session(session).data == newest
    if session == "copied":
        assert newest.messages == ["version 2"]


def test_a_cost_that_is_not_a_number_is_reported_and_the_link_to_a_deleted_file_too(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(original(tmp_path))

    with pytest.raises(Corrupted, match="cost_estimate is not a number"):
        writer.load("numbers", "f10a75ad")
    assert [skip.what for skip in writer.scan("numbers").damaged] == ["cp_20260301_090301_f10a75ad.json"]
    assert writer.load_report("deleted").notes == (
        "latest.json names cp_20260301_110301_de1e7e03.json, which does not exist",
    )


def test_the_python_port_writes_local_times_and_its_own_floats(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(original(tmp_path, "python"))
    fields: dict[str, Any] = {
        "trigger": "periodic",
        "messages": [
            {"role": "user", "content": "né 你好"},
            {"role": "assistant", "content": "x", "score": 1e-7},
        ],
        "tokens_used": 12,
        "cost_estimate": 130.65331632653061,
    }
    results = {"big": 1e16, "tiny": 5e-324, "sum": 0.1 + 0.2}
    moments = [
        datetime(2026, 3, 1, 16, minute, 1, tzinfo=UTC) for minute in (1, 2)
    ]  # of Shanghai, but it does not say so

    assert writer.load("port", "9a9a9a01") == given(
        "port", "9a9a9a01", moments[0], **fields, tool_results={**results, "n": 2**70 + 1}
    )
    assert writer.load("port") == given(
        "port", "9a9a9a02", moments[1], **fields, tool_results=results, iteration=2, resume_hint="continue",
        tool_calls_pending=[{"id": "t"}],
    )  # fmt: skip


def test_the_records_of_sessions_tell_which_were_interrupted(tmp_path: Path) -> None:
    root = original(tmp_path)
    found = SessionRecovery(root).detect_interrupted_sessions()

    assert [(each.session_id, each.last_iteration, each.task_description) for each in found] == [
        ("state-3", 4, None),
        ("state-0", 1, "write the report"),
        ("chat", 5, None),
    ]
    assert found[2].last_activity == datetime(2026, 3, 1, 8, 20, 1, 123456, tzinfo=UTC)
    assert CrashRecovery(root).detect_unclean_shutdown() == found
    assert CrashRecovery(root).mark_session_terminated("chat", "done")
    marked = json.loads((root / "chat" / "session_meta.json").read_text())
    assert {name: marked[name] for name in ("session_id", "is_active", "termination_reason", "last_iteration")} == {
        "session_id": "chat", "is_active": False, "termination_reason": "done", "last_iteration": 5,
    }  # fmt: skip


# Import, resume, export -------------------------------------------------------------------------------------------


def history(store: backstay.Store, thread: str) -> list[str]:
    """Return the ids of a thread, oldest first."""
    return [meta.id for meta in store.thread(thread).history()][::-1]


def test_an_import_stores_every_checkpoint_or_names_it(tmp_path: Path, store: backstay.Store) -> None:
    root = original(tmp_path)
    report = import_sessions(root, store)

    assert (report.threads, report.stored, report.refused) == (6, 18, ())
    assert history(store, "chat") == ["a1b2c3d4", "b2c3d4e5", "c3d4e5f6.20260301_081001", "c3d4e5f6", "d4e5f6a7"]
    assert history(store, "copied") == ["c0b1e500.20260301_140101", "c0b1e500"]
    assert history(store, "numbers") == ["f10a75aa", "f10a75ab", "f10a75ac", "f10a75ae"]
    assert history(store, ODD) == ["步骤 1", f"{ODD}.a1b2c3d4"]
    assert [(note.checkpoint, note.what.rpartition("json ")[2]) for note in report.missing] == [
        ("f10a75ad", "cost_estimate is not a number")
    ]
    said = " / ".join(note.what for note in report.notes)
    for part in ("stored as 'c3d4e5f6.20260301_081001'", f"stored as '{ODD}.a1b2c3d4'", "nanoseconds", "iteration"):
        assert part in said
    again = import_sessions(root, store)
    assert (again.stored, again.present, again.refused) == (0, 18, ())


@pytest.mark.parametrize("expected", [*CHAT, *OTHERS], ids=lambda data: f"{data.session_id}-{data.iteration}")
def test_every_imported_value_is_the_one_that_was_given(
    tmp_path: Path, store: backstay.Store, expected: CheckpointData
) -> None:
    import_sessions(original(tmp_path), store)
    stored = store.get("c3d4e5f6.20260301_081001" if expected is CHAT[2] else str(expected.checkpoint_id))

    assert stored is not None
    assert text(stored.state) == text(
        {
            "messages": expected.messages,
            "pending_tool_calls": expected.tool_calls_pending,
            "tool_results": expected.tool_results,
        }
    )
    assert (stored.thread_id, stored.created_at) == (expected.session_id, expected.created_at)
    assert (stored.trigger, stored.resume_hint) == (expected.trigger, expected.resume_hint)
    counts = {name: getattr(expected, name) for name in ("iteration", "tokens_used", "cost_estimate")}
    if expected.iteration < 0:  # a checkpoint of ours has no negative counts
        assert stored.metadata == counts
    else:
        assert {name: getattr(stored, name) for name in counts} == counts
        assert stored.metadata == ({"checkpoint_id": "c3d4e5f6"} if expected is CHAT[2] else {})


def test_an_imported_session_is_continued_and_exported_in_the_layout_of_the_original(
    tmp_path: Path, store: backstay.Store
) -> None:
    import_sessions(original(tmp_path), store, sessions=["chat", "values"])
    thread = store.thread("chat")
    newest = thread.latest()
    assert newest is not None
    messages = [*newest.messages, {"role": "assistant", "content": "here it is"}]
    thread.save({**newest.state, "messages": messages}, id="e5f6a7b8", iteration=6)
    report = export_sessions(store, tmp_path / "out")
    copies = SyncCheckpointWriter(tmp_path / "out")

    assert report.checkpoints == 9
    assert [meta.checkpoint_id for meta in copies.list("chat")] == history(store, "chat")[::-1]
    continued = copies.load("chat")
    assert continued is not None
    assert (continued.checkpoint_id, continued.messages, continued.tool_results) == ("e5f6a7b8", messages, "done")
    assert os.readlink(folder(tmp_path / "out", "chat") / "latest.json").endswith("_e5f6a7b8.json")


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file except those that differ on purpose."""
    own = ('  "_checksum"', '  "_seq"', '  "created_at"')
    return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(own)]


def test_an_export_has_the_bytes_of_the_original_but_for_number_time_and_checksum(
    tmp_path: Path, store: backstay.Store
) -> None:
    """So its checksum, which covers its own print of each value, comes out the same for it."""
    import_sessions(original(tmp_path), store, sessions=["chat", "numbers", "values"])
    export_sessions(store, tmp_path / "out")

    compared = 0
    for path in sorted((tmp_path / "out").rglob("cp_*.json")):
        name = path.name[len("cp_YYYYMMDD_HHMMSS_") :]
        sources = sorted((GOLDEN / "rust" / path.parts[-3] / "checkpoints").glob(f"cp_*_{name}"))
        if name in ("c3d4e5f6.20260301_081001.json", "f10a75ab.json"):
            continue  # another id; negative counts
        compared += 1
        assert lines_of(path) == lines_of(sources[-1])
    assert compared == 10


def test_an_export_into_the_directory_of_the_original_changes_nothing_that_it_has(
    tmp_path: Path, store: backstay.Store
) -> None:
    root = original(tmp_path)
    import_sessions(root, store, sessions=["values", "deleted"])
    store.thread("values").save({"messages": []}, id="new")
    before = {path: path.read_bytes() for path in root.rglob("cp_*.json")}
    report = export_sessions(store, root)

    assert report.notes == ()
    after = {path: path.read_bytes() for path in root.rglob("cp_*.json")}
    assert {path: after[path] for path in before} == before
    assert [path.name.rpartition("_")[2] for path in after if path not in before] == ["new.json"]
    newest = SyncCheckpointWriter(root).load("values")
    assert newest is not None
    assert newest.checkpoint_id == "new"


def test_a_checkpoint_of_the_original_saved_again_is_nothing_new(tmp_path: Path) -> None:
    """Its time has nanoseconds, which ours cannot hold."""
    root = original(tmp_path)
    writer = SyncCheckpointWriter(root)
    before = sorted(os.listdir(folder(root, "chat")))

    assert writer.save(CHAT[0]) == "a1b2c3d4"

    assert sorted(os.listdir(folder(root, "chat"))) == before


def test_an_import_of_two_programs_that_used_one_id_twice_can_be_repeated_in_any_order(
    tmp_path: Path, store: backstay.Store
) -> None:
    root = original(tmp_path)
    for sessions in ([ODD], ["chat"], None):
        assert import_sessions(root, store, sessions=sessions).refused == ()

    assert history(store, ODD) == ["步骤 1", "a1b2c3d4"]
    assert history(store, "chat")[0] == "chat.a1b2c3d4"
    assert import_sessions(root, store).stored == 0


def test_a_file_that_is_named_almost_like_a_checkpoint_is_reported(tmp_path: Path, store: backstay.Store) -> None:
    root = original(tmp_path)
    (folder(root, "values") / "cp_notes.json").write_text("{}")

    report = import_sessions(root, store, sessions=["values"])

    assert [note.what for note in report.notes] == ["cp_notes.json is not named like a checkpoint and is ignored"]
    assert SyncCheckpointWriter(root).scan("values").notes == (report.notes[0].what,)


def test_an_id_that_only_the_original_accepts_can_be_loaded_and_deleted(tmp_path: Path) -> None:
    root = original(tmp_path)
    (root / ODD).rename(root / "renamed")
    path = next(folder(root, "renamed").glob("*步骤*"))
    text_of = path.read_text(encoding="utf-8")
    assert f'"session_id": "{ODD}"' in text_of
    writer = SyncCheckpointWriter(root)

    with pytest.raises(Corrupted, match="of session"):  # it says that it belongs to another session
        writer.load("renamed", "步骤 1")
    assert writer.delete("renamed", "步骤 1")
    assert not path.exists()
