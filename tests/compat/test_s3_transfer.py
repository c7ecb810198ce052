"""Data of agentos itself: what its files hold comes in completely, can be continued, and goes back out row for row."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import backstay
from backstay.compat.backend import (
    Checkpoint,
    CheckpointMetadata,
    StoreBackend,
    create_checkpointer,
    export_agentos,
    import_agentos,
)
from backstay.errors import Conflict, StoreError, StoreRefused

if TYPE_CHECKING:
    from support.postgres import PostgresServer

T = TypeVar("T")
GOLDEN = Path(__file__).parents[1] / "golden" / "agentos"
OTHER_COLUMNS = "thread_id, checkpoint_id, parent_id, step, created_at, tags, summary, next_node"
COLUMNS = f"{OTHER_COLUMNS}, messages_blob, state_blob, tools_blob"

POSTGRES_TABLE = """
CREATE TABLE {0} (
    id BIGSERIAL PRIMARY KEY, thread_id TEXT NOT NULL, checkpoint_id TEXT NOT NULL UNIQUE, parent_id TEXT,
    step INTEGER NOT NULL, created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(), tags JSONB NOT NULL DEFAULT '[]',
    summary TEXT NOT NULL DEFAULT '', messages_blob JSONB NOT NULL DEFAULT '[]',
    state_blob JSONB NOT NULL DEFAULT '{{}}', tools_blob JSONB NOT NULL DEFAULT '{{}}',
    next_node TEXT NOT NULL DEFAULT '')"""


def record(
    thread: str, name: str, step: int, parent: str | None, created_at: str, state: Any, **given: Any
) -> dict[str, Any]:
    return {
        "metadata": {
            "thread_id": thread,
            "checkpoint_id": name,
            "parent_checkpoint_id": parent,
            "step": step,
            "created_at": created_at,
            "tags": given.get("tags", []),
            "summary": given.get("summary", ""),
        },
        "messages": given.get("messages", []),
        "state": state,
        "tools_result": given.get("tools", {}),
        "next_node": given.get("node", ""),
    }


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


DEEP: Any = "leaf"
for _ in range(10):
    DEEP = [{"d": DEEP}]

FULL = record(
    "chat",
    "c2",
    2,
    "c1",
    "2026-01-01T12:00:01.000001+00:00",
    {
        "ints": [0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**70],
        "floats": [1.0, -0.0, 0.1, 1e300, 5e-324, 123456789.123456789, 1e16, 1e22],
        "none": None,
        "yes": True,
        "no": False,
        "empty": {"list": [], "dict": {}, "text": ""},
        "": "the empty key",
        "ключ": "значение",
        "a.b": 1,
        "state.x": 2,
        "messages": "a key of the state",
        "tool_results": [1],
        "deep": DEEP,
    },
    messages=[
        {"role": "system", "content": ""},
        {"role": "user", "content": 'Grüße, 世界 \U0001f680 "quoted" \\ \n\t\u2028 end'},
        {
            "role": "assistant",
            "content": None,
            "id": "m3",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}, 7, None, True]},
    ],
    tools={"search": {"hits": 2, "took": 0.25}, "0": None, "nested": [[1, [2, [3]]]]},
    node="search",
    tags=["manual", "重要", "b", "a", "b"],
    summary="Ein «Plan» \U0001f4a1",
)
OTHER = "線程/2 ✓"
RECORDS = [
    record("chat", "c1", 1, None, "2026-01-01T12:00:00+00:00", {}),
    FULL,
    record(
        "chat",
        "c3",
        3,
        None,
        "2026-01-01T12:00:04+00:00",
        {"v": 2},
        messages=said("second version"),
        tools={"t": 1},
        node="again",
    ),
    record("chat", "c4", 4, "c3", "2026-01-01T12:00:03+00:00", {"v": 4}, messages=said("four")),
    record("chat", "side", 4, "c2", "2026-01-01T14:00:05+02:00", {"v": "side"}, tags=["branch"]),
    record("chat", "c6", 6, "c4", "2026-01-01T12:00:06+00:00", {"v": 6}, messages=said("six"), node="done"),
    record(OTHER, "id with spaces/✓", 0, "gone", "2026-01-02T00:00:00Z", {"n": 0}),
    record(OTHER, "z", 10**12, None, "2026-01-02T00:00:01+00:00", {"n": 1}),
]
"""The values that agentos was given when it wrote backend.sqlite and records.jsonl."""


def run(awaited: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaited)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[backstay.Store]:
    (tmp_path / "target").mkdir()
    with backstay.open(tmp_path / "target" / "store.db") as opened:
        yield opened
        assert opened.check()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Return a folder with the golden files, the dumps as SQLite files."""
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder)
    for dump in folder.glob("*.sql"):
        connection = sqlite3.connect(dump.with_suffix(".sqlite"), isolation_level=None)
        connection.executescript(dump.read_text(encoding="utf-8"))
        connection.close()
    return folder


def table(path: Path, columns: str = COLUMNS) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    rows = connection.execute(f"SELECT {columns} FROM checkpoints ORDER BY thread_id, checkpoint_id").fetchall()
    connection.close()
    return rows


def schema(path: Path) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY rowid").fetchall()
    connection.close()
    return rows


def listed(store: backstay.Store, thread: str) -> list[tuple[str, int, str | None]]:
    shown = run(StoreBackend(store).list_checkpoints(thread))
    return [(item.checkpoint_id, item.step, item.parent_checkpoint_id) for item in shown]


def latest(store: backstay.Store, thread: str) -> str:
    found = run(StoreBackend(store).get_latest(thread))
    assert found is not None
    return found.metadata.checkpoint_id


def texts(plain: object) -> str:
    """Return JSON text: 1.0 and 1, and 0.0 and -0.0, are equal in Python but not in it."""
    return json.dumps(plain, sort_keys=True)


# The files of agentos ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["backend.sqlite", "records.jsonl"])
def test_every_value_that_agentos_stored_comes_back(store: backstay.Store, golden: Path, name: str) -> None:
    before = (golden / name).read_bytes()

    report = import_agentos(golden / name, store)

    assert (bool(report), report.threads, report.stored, report.notes) == (True, 2, 8, ())
    backend = StoreBackend(store)
    for expected in RECORDS:
        found = run(backend.get(expected["metadata"]["checkpoint_id"]))
        assert found is not None
        assert texts(found.to_dict()) == texts(expected)
    # As agentos lists them, but of two with the same step the one stored last comes first.
    assert [each for each, _, _ in listed(store, "chat")] == ["c6", "side", "c4", "c3", "c2", "c1"]
    assert (latest(store, "chat"), latest(store, OTHER)) == ("c6", "z")
    again = import_agentos(golden / name, store)
    assert (bool(again), again.stored, again.present) == (True, 0, 8)
    assert (golden / name).read_bytes() == before
    assert sorted(os.listdir(golden)) == sorted({*os.listdir(GOLDEN), *(f"{n}.sqlite" for n in DUMPS)})


DUMPS = ["engine", "odd", "version-1.9.0"]


def test_an_imported_thread_can_be_read_and_continued_under_both_names(target: backstay.Store, golden: Path) -> None:
    import_agentos(golden / "backend.sqlite", target)
    newest = target.thread("chat").latest()
    assert newest is not None
    assert (newest.id, newest.step, newest.next_node, newest.parent_id) == ("c6", 6, "done", "c4")
    full = target.get("c2")
    assert full is not None
    assert (full.messages, full.tool_results) == (FULL["messages"], FULL["tools_result"])
    assert (full.state["ints"], full.state["state.messages"]) == (FULL["state"]["ints"], "a key of the state")
    assert (full.tags, full.summary, full.created_at.isoformat()) == (
        ("a", "b", "manual", "重要"),
        "Ein «Plan» \U0001f4a1",
        "2026-01-01T12:00:01.000001+00:00",
    )
    side = target.get("side")
    assert side is not None
    assert (side.parent_id, side.branch) == ("c2", "side")

    backend = StoreBackend(target)
    run(backend.put(Checkpoint(CheckpointMetadata("chat", "c7", 7), said("seven"), {"v": 7}, {})))
    saved = target.thread("chat").save({"messages": said("eight"), "v": 8}, id="c8")

    assert saved.parent_id == "c7"
    assert listed(target, "chat")[:3] == [("c8", 8, "c7"), ("c7", 7, "c6"), ("c6", 6, "c4")]


@pytest.mark.parametrize("name", ["backend", "engine", "version-1.9.0"])
def test_what_came_from_agentos_goes_back_row_for_row(target: backstay.Store, golden: Path, name: str) -> None:
    """Its own reader was run on such a file: it listed, loaded, continued and deleted these checkpoints."""
    source, out = golden / f"{name}.sqlite", golden / "new folder" / "out.sqlite"
    import_agentos(source, target)

    report = export_agentos(target, out)

    assert table(out) == table(source)
    assert schema(out) == schema(source)
    assert report.checkpoints == len(table(source))
    assert report.notes == ()
    assert os.listdir(out.parent) == ["out.sqlite"]
    assert out.stat().st_mode & 0o777 == 0o600


def test_the_engines_threads_keep_its_order_and_its_newest(target: backstay.Store, golden: Path) -> None:
    report = import_agentos(golden / "engine.sqlite", target)
    fork = "job-branch-fix-a404"

    assert report
    # Most snapshots have no parent, and the branch starts from the third one: the others still come before it.
    assert listed(target, "job") == [
        ("ckpt-job-4-a60606", 4, f"ckpt-{fork}-1-a50505"),
        ("ckpt-job-3-a30303", 3, None),
        ("ckpt-job-2-a20202", 2, None),
        ("ckpt-job-1-a10101", 1, None),
    ]
    assert listed(target, fork) == [
        (f"ckpt-{fork}-1-a50505", 1, f"ckpt-{fork}-0"),
        (f"ckpt-{fork}-0", 0, "ckpt-job-3-a30303"),
    ]
    start = target.get(f"ckpt-{fork}-0")
    assert start is not None
    assert (start.parent_id, start.tags) == ("ckpt-job-3-a30303", ("branch", "fix"))
    assert listed(target, "session-1") == [
        ("ckpt-session-1-000010", 10, "ckpt-session-1-000005"),
        ("ckpt-session-1-000005", 5, None),
    ]
    loop = target.get("ckpt-session-1-000010")
    assert loop is not None
    assert (loop.state["task"], loop.state["cost_usd"], loop.next_node) == ("täsk", 0.0125, "loop")
    assert listed(target, "rewound") == [("ckpt-rewound-3-b11111", 3, "ckpt-rewound-2-af0f0f")]
    assert latest(target, "restarted") == "ckpt-restarted-2-ac0c0c"
    assert [(note.thread, note.checkpoint, note.what) for note in report.notes] == [
        (
            "restarted",
            "ckpt-restarted-1-ad0d0d",
            "comes after ckpt-restarted-2-ac0c0c, which is the newest as in agentos, because its step is lower",
        )
    ]


def test_what_agentos_accepts_and_we_do_not_is_named(target: backstay.Store, golden: Path) -> None:
    path = golden / "odd.sqlite"
    report = import_agentos(path, target)

    assert not report
    assert [(note.where, note.checkpoint, note.what) for note in report.missing] == [
        (f"{path}: row 4", "nan", "not imported: state_blob is not valid JSON: it holds NaN"),
        (
            f"{path}: row 5",
            "negative",
            "not imported: step must be a whole number from 0 to 9007199254740991, not -1",
        ),
        (f"{path}: row 6", "", "not imported: id is empty"),
        (f"{path}: row 7", "list", "not imported: state must be a dict, not list"),
    ]
    assert [(note.checkpoint, note.what) for note in report.notes] == [
        ("naive", "created_at has no offset: taken as UTC"),
        ("words", "created_at is not a time: kept as text, and the time of the import counts"),
        ("tie2", "is now the newest; agentos takes tie1, the first with the highest step"),
    ]
    assert [name for name, _, _ in listed(target, "odd")] == ["pair", "words", "naive", "good"]
    naive, words = target.get("naive"), run(StoreBackend(target).get("words"))
    assert naive is not None
    assert words is not None
    assert naive.created_at.isoformat() == "2026-01-01T12:00:00+00:00"
    assert (words.metadata.created_at, words.state) == ("yesterday", {"n": 3})
    moved = run(StoreBackend(target).get_latest("elsewhere"))
    assert moved is not None
    assert (moved.metadata.checkpoint_id, moved.state) == ("moved", {"n": 10})

    out = golden / "out.sqlite"
    notes = export_agentos(target, out).notes
    assert [(note.thread, note.checkpoint, note.what) for note in notes] == [
        ("tie", "tie1", "agentos continues from it, not from the newest, tie2")
    ]
    skipped = {"nan", "negative", "", "list"}
    assert table(out) == [row for row in table(path) if row[1] not in skipped]


def test_the_operations_of_the_engine_have_their_calls(target: backstay.Store, golden: Path) -> None:
    """``rewind``, ``time_travel_to_step``, ``branch``, the points and the tree, on a thread that the engine wrote."""
    import_agentos(golden / "engine.sqlite", target)
    thread = target.thread("job")
    points = [(meta.id, meta.step, meta.tags, meta.summary) for meta in thread.history()]
    assert points == [
        ("ckpt-job-4-a60606", 4, ("manual",), "State: 2 keys"),
        ("ckpt-job-3-a30303", 3, ("llm_call",), "[user] turn 3"),
        ("ckpt-job-2-a20202", 2, ("tool_call",), "[user] turn 2"),
        ("ckpt-job-1-a10101", 1, ("manual",), "[user] turn 1"),
    ]

    back = thread.rewind("ckpt-job-2-a20202", id="back")
    assert (back.state["n"], back.next_node, back.parent_id) == (2, "node2", "ckpt-job-2-a20202")
    assert [meta.id for meta in thread.history()][1:] == [name for name, *_ in points]  # nothing was deleted
    found = thread.at(3)
    assert found is not None
    assert found.id == "ckpt-job-3-a30303"
    with pytest.raises(backstay.NotFound):
        thread.rewind("no such checkpoint")

    fork = thread.fork("ckpt-job-3-a30303", to="job-branch", tags=["branch"], id="start")
    start = fork.latest()
    assert start is not None
    assert (start.messages, start.state["n"], start.next_node) == (
        [*said("turn 1"), *said("turn 2"), *said("turn 3")],
        3,
        "node3",
    )
    with pytest.raises(backstay.NotFound):
        thread.fork("no such checkpoint", branch="x")
    edges = {(meta.parent_id, meta.id) for meta in thread.history(branch="*") if meta.parent_id is not None}
    assert edges == {
        ("ckpt-job-1-a10101", "ckpt-job-2-a20202"),
        ("ckpt-job-2-a20202", "ckpt-job-3-a30303"),
        ("ckpt-job-3-a30303", "ckpt-job-4-a60606"),
        ("ckpt-job-2-a20202", "back"),
    }


# Other tables and records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [["messages_blob"], ["state_blob"], ["messages_blob", "state_blob", "tools_blob"]])
def test_a_row_without_a_column_of_its_content_is_never_an_empty_checkpoint(
    target: backstay.Store, golden: Path, gone: list[str]
) -> None:
    path = golden / "backend.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    for column in gone:
        connection.execute(f"ALTER TABLE checkpoints RENAME COLUMN {column} TO {column.replace('blob', 'json')}")
    connection.close()

    report = import_agentos(path, target)

    assert (bool(report), report.stored, len(report.missing)) == (False, 0, 8)
    assert report.missing[0].what.startswith(
        f"not imported: it has no {', '.join(gone)}; its columns are id, thread_id"
    )
    assert list(target.threads()) == []


def test_a_row_whose_content_is_null_or_damaged_is_named_and_hides_no_other(
    target: backstay.Store, golden: Path
) -> None:
    path = golden / "backend.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(
        """CREATE TABLE lax AS SELECT * FROM checkpoints; DROP TABLE checkpoints; ALTER TABLE lax RENAME TO checkpoints;
        UPDATE checkpoints SET state_blob = NULL WHERE checkpoint_id = 'c1';
        UPDATE checkpoints SET messages_blob = CAST(x'5b22ff225d' AS TEXT) WHERE checkpoint_id = 'c3';
        UPDATE checkpoints SET tools_blob = '{"cut' WHERE checkpoint_id = 'c4';
        ALTER TABLE checkpoints ADD COLUMN model TEXT; UPDATE checkpoints SET model = 'm1' WHERE checkpoint_id = 'c6'"""
    )
    connection.close()

    report = import_agentos(path, target)

    assert [(note.checkpoint, note.what.partition(";")[0]) for note in report.missing] == [
        ("c1", "not imported: it has no state_blob"),
        ("c4", "not imported: tools_blob is not valid JSON"),
        ("c3", "not imported: messages[0] contains a lone surrogate"),
    ]
    assert report.stored == 5
    newest = run(StoreBackend(target).get_latest("chat"))
    assert newest is not None
    assert (newest.metadata.checkpoint_id, newest.metadata.extra) == ("c6", {"model": "m1"})


def test_a_database_of_something_else_is_refused(target: backstay.Store, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path, isolation_level=None)
    # This is the smaller store of agentos.storage, which keeps one snapshot per session.
    connection.execute("CREATE TABLE checkpoints (session_id TEXT PRIMARY KEY, snapshot TEXT, created_at REAL)")
    connection.close()

    with pytest.raises(StoreRefused, match="no table of checkpoints"):
        import_agentos(path, target)
    with pytest.raises(StoreError, match="cannot read"):
        import_agentos(tmp_path / "nowhere.db", target)
    with pytest.raises(StoreRefused, match="cannot be read as a SQLite file"):
        import_agentos(tmp_path, target)


def test_rows_as_json_lines_are_the_same_as_the_table(target: backstay.Store, golden: Path) -> None:
    """PostgreSQL prints such lines for ``SELECT row_to_json(c) FROM checkpoints c``: the content is not text there."""
    connection = sqlite3.connect(golden / "backend.sqlite")
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute("SELECT * FROM checkpoints")]
    connection.close()
    for row in rows:
        row.update({name: json.loads(row[name]) for name in ("tags", "messages_blob", "state_blob", "tools_blob")})
    lines = golden / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    assert import_agentos(lines, target)
    for expected in RECORDS:
        found = run(StoreBackend(target).get(expected["metadata"]["checkpoint_id"]))
        assert found is not None
        assert texts(found.to_dict()) == texts(expected)


def turn(number: int, **metadata: Any) -> dict[str, Any]:
    parent = f"t{number - 1}" if number > 1 else None
    plain = record("talk", f"t{number}", number, parent, "2026-01-01T12:00:00+00:00", {"n": number})
    plain["metadata"].update(metadata)
    return plain


def test_records_that_are_none_are_named_and_unknown_keys_are_kept(target: backstay.Store, tmp_path: Path) -> None:
    empty, partial, undated = turn(2), turn(3), turn(4)
    for key in ("messages", "state", "tools_result"):
        del empty[key]
    del partial["tools_result"], undated["metadata"]["created_at"]
    known = turn(1, mood="fine")
    known["cost"] = {"usd": 1}
    path = tmp_path / "records.jsonl"
    lines = [*(json.dumps(each) for each in (known, empty, partial, undated)), "not json", "[1]", '{"metadata": 5}', ""]
    path.write_text("\n".join(lines), encoding="utf-8")

    report = import_agentos(path, target)

    assert {note.where.removeprefix(f"{path}:"): note.what for note in report.missing} == {
        "2": "not imported: it has none of messages, state, tools_result",
        "4": "not imported: metadata.created_at is missing",
        "5": "the line is not valid JSON",
        "6": "not imported: it is list, not an object",
        "7": "not imported: it has none of messages, state, tools_result",
    }
    assert [(note.checkpoint, note.what) for note in report.notes] == [("t3", "has no tools_result: taken as empty")]
    found = run(StoreBackend(target).get("t1"))
    assert found is not None
    assert found.to_dict() == known


def test_parents_come_before_their_children_even_against_the_steps(target: backstay.Store) -> None:
    records = [turn(3, step=1), turn(1, step=9), turn(2, step=5)]
    report = import_agentos(records, target)

    assert report
    assert listed(target, "talk") == [("t3", 1, "t2"), ("t2", 5, "t1"), ("t1", 9, None)]
    stored = target.get("t2")
    assert stored is not None
    assert (stored.parent_id, stored.state["n"]) == ("t1", 2)
    assert [note.what for note in report.notes] == [
        "is now the newest; agentos takes t1, the first with the highest step"
    ]
    again = import_agentos(records, target)
    assert (again.stored, again.present) == (0, 3)


def test_a_cycle_of_parents_and_a_repeated_id_end_in_the_order_of_steps(target: backstay.Store) -> None:
    """A loop that runs a session twice replaces its first checkpoint with one that names the last as its parent."""
    records = [turn(1), turn(2), turn(3), turn(1, parent_checkpoint_id="t3", summary="second run")]
    report = import_agentos(records, target)

    assert listed(target, "talk") == [("t3", 3, "t2"), ("t2", 2, "t1"), ("t1", 1, "t3")]
    assert [(note.where, note.what) for note in report.notes if note.where] == [
        ("record 1", "replaced by a later record of this id")
    ]
    stored = target.get("t1")
    assert stored is not None
    assert stored.summary == "second run"


def test_what_the_store_has_with_other_content_stays(target: backstay.Store) -> None:
    import_agentos([turn(1), turn(2)], target)
    changed = turn(2)
    changed["state"] = {"n": "changed"}
    target.thread("other").save({"mine": 1}, id="mine")
    moved = turn(1, thread_id="other", checkpoint_id="o1")

    report = import_agentos([turn(1), changed, moved], target)

    assert [(refused.thread, type(refused.error)) for refused in report.refused] == [
        ("talk", Conflict),
        ("other", Conflict),
    ]
    stored = target.get("t2")
    assert stored is not None
    assert stored.state["n"] == 2
    assert [name for name, _, _ in listed(target, "other")] == ["mine"]


# A file that is in use --------------------------------------------------------------------------------------------


ADD = (
    "INSERT INTO checkpoints (thread_id, checkpoint_id, step, created_at, state_blob)"
    " VALUES ('chat', ?, ?, '2026-01-03T00:00:00+00:00', ?)"
)


def test_a_write_ahead_log_is_read_with_its_file(target: backstay.Store, golden: Path, tmp_path: Path) -> None:
    path = golden / "backend.sqlite"
    writer = sqlite3.connect(path, isolation_level=None)
    assert writer.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    writer.execute(ADD, ("in the log", 7, "{}"))
    writer.execute("BEGIN IMMEDIATE")
    writer.execute(ADD, ("not committed", 8, "{}"))
    copy = tmp_path / "after a crash" / "backend.sqlite"
    copy.parent.mkdir()
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{copy}{end}")

    for source in (path, copy):
        before = [Path(f"{source}{end}").read_bytes() for end in ("", "-wal")]
        with backstay.open("memory:") as other:
            assert import_agentos(source, other).stored == 9
            assert latest(other, "chat") == "in the log"
        assert [Path(f"{source}{end}").read_bytes() for end in ("", "-wal")] == before
    writer.execute("COMMIT")
    assert import_agentos(path, target).stored == 10
    writer.close()


def test_a_file_that_needs_its_journal_is_refused_not_read_in_the_middle(
    target: backstay.Store, golden: Path, tmp_path: Path
) -> None:
    path, copy = golden / "backend.sqlite", tmp_path / "crashed.sqlite"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA cache_size = 1")  # so that half of the transaction reaches the file
    writer.execute("BEGIN IMMEDIATE")
    for number in range(50):
        writer.execute(ADD, (f"lost{number}", 100 + number, json.dumps({"x": "y" * 4000})))
    shutil.copy(f"{path}-journal", f"{copy}-journal")
    shutil.copy(path, copy)
    before = copy.read_bytes()

    with pytest.raises(StoreRefused, match="cannot be read") as caught:
        import_agentos(copy, target)

    assert caught.value.hint is not None
    assert "open it once with that program" in caught.value.hint
    assert copy.read_bytes() == before
    writer.execute("ROLLBACK")
    writer.close()
    assert import_agentos(path, target).stored == 8


@pytest.mark.parametrize("through", ["create_checkpointer", "backstay.open"])
def test_opening_a_database_of_agentos_names_the_importer(
    golden: Path, target: backstay.Store, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    path = golden / "checkpoints.db"
    (golden / "backend.sqlite").rename(path)
    before = path.read_bytes()
    monkeypatch.chdir(golden)

    def use() -> None:
        if through == "backstay.open":
            backstay.open("checkpoints.db")
        run(create_checkpointer("sqlite").get_latest("chat"))  # its default path

    with pytest.raises(StoreRefused, match="belongs to another program") as caught:
        use()

    assert caught.value.hint is not None
    call = caught.value.hint.partition("import it: ")[2]
    assert call == f"backstay.compat.backend.import_agentos({str(path)!r}, store)"
    assert path.read_bytes() == before
    assert import_agentos(str(path), target).stored == 8  # the call in the hint


# PostgreSQL -------------------------------------------------------------------------------------------------------


def test_the_table_in_postgresql_is_imported_like_the_file(
    postgres: PostgresServer, postgres_url: str, target: backstay.Store
) -> None:
    name = postgres_url.rpartition("schema=")[2]
    insert = f"INSERT INTO {name}.checkpoints ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
    with postgres.connect() as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        connection.execute(POSTGRES_TABLE.format(f"{name}.checkpoints"))
        for each in RECORDS[:-1]:  # the last has a step that an INTEGER cannot hold
            meta = each["metadata"]
            values = [meta[key] for key in ("thread_id", "checkpoint_id", "parent_checkpoint_id", "step", "created_at")]
            values += [json.dumps(meta["tags"]), meta["summary"], each["next_node"]]
            connection.execute(
                insert, [*values, *(json.dumps(each[key]) for key in ("messages", "state", "tools_result"))]
            )
    report = import_agentos(postgres_url, target)

    assert (bool(report), report.stored) == (True, 7)
    found = run(StoreBackend(target).get("c2"))
    assert found is not None
    # JSONB has no negative zero, and no exponents: a large float without a fraction comes back as an integer.
    expected = {**FULL, "state": {**FULL["state"], "floats": [1.0, 0.0, 0.1, 10**300, 5e-324, 123456789.12345679]}}
    expected["state"]["floats"] += [10**16, 10**22]
    assert texts(found.to_dict()) == texts(expected)
    side = run(StoreBackend(target).get("side"))
    assert side is not None
    assert side.metadata.created_at == "2026-01-01T12:00:05+00:00"
    assert latest(target, "chat") == "c6"
    again = import_agentos(f"{postgres_url}&options=-ctimezone%3DAsia/Tokyo", target)
    assert (bool(again), again.stored, again.present) == (True, 0, 7)


def test_postgresql_without_the_table_is_refused(postgres: PostgresServer, target: backstay.Store) -> None:
    with pytest.raises(StoreRefused, match="has no tables of agentos"):
        import_agentos(postgres.url(schema="nothing_here"), target)


# Exporting --------------------------------------------------------------------------------------------------------


def test_the_report_of_an_export_names_all_that_has_no_room(target: backstay.Store, tmp_path: Path) -> None:
    thread = target.thread("ours")
    thread.save({"messages": said("a ü"), "tool_results": {"t": 1}, "n": 1.0}, id="u1", summary="s", tags=["b", "a"])
    thread.save({"n": 2}, id="u2", label="L", metadata={"k": 1}, trigger="tool_call", tokens_used=5, next_node="go")
    thread.fork("u1", branch="other", id="f1").save({"n": "f"}, id="f2")
    thread.save({"raw": b"x"}, id="raw")
    thread.effect("mail", lambda: 1)
    out = tmp_path / "out.db"

    report = export_agentos(target, out)

    assert [(note.checkpoint, note.what) for note in report.notes] == [
        ("u2", "the file cannot hold: tokens_used, label, metadata.k, trigger"),
        ("f1", "the file cannot hold: branch, trigger"),
        ("f2", "the file cannot hold: branch"),
        ("u2", "agentos continues from it, not from the newest, f2"),  # both have step 2
        (None, "the file cannot hold: effects"),
    ]
    assert [(note.checkpoint, note.what) for note in report.left_out] == [
        ("raw", "state.raw is bytes, which JSON does not have")
    ]
    assert not report
    assert all(str(note) in str(report) for note in (*report.notes, *report.left_out))
    rows = {row[1]: row for row in table(out)}
    moment = target.get("u1")
    assert moment is not None
    assert rows["u1"] == (
        *("ours", "u1", None, 1, moment.created_at.isoformat(), '["a", "b"]', "s", ""),
        *('[{"role": "user", "content": "a ü"}]', '{"n": 1.0}', '{"t": 1}'),
    )
    assert [rows[name][2:4] for name in ("u2", "f1", "f2")] == [("u1", 2), ("u1", 1), ("f1", 2)]


def test_an_export_takes_a_new_file_and_the_threads_asked_for(target: backstay.Store, golden: Path) -> None:
    import_agentos(golden / "backend.sqlite", target)
    out = golden / "out.db"
    assert export_agentos(target, out, threads=[OTHER]).checkpoints == 2
    assert [row[1] for row in table(out)] == ["id with spaces/✓", "z"]
    before = out.read_bytes()

    with pytest.raises(StoreRefused, match="exists already"):
        export_agentos(target, out)
    assert out.read_bytes() == before


def test_a_replaced_checkpoint_is_exported_in_its_new_version(target: backstay.Store, golden: Path) -> None:
    import_agentos(golden / "version-1.9.0.sqlite", target)
    metadata = CheckpointMetadata("old", "o1", 1, created_at="2026-07-01T00:00:00+00:00", tags=["ä"])
    run(StoreBackend(target).put(Checkpoint(metadata, said("new"), {"ü": 1}, {})))
    out = golden / "out.db"

    assert export_agentos(target, out).notes == ()
    assert [row[1:] for row in table(out)] == [
        (
            *("o1", None, 1, "2026-07-01T00:00:00+00:00", '["\\u00e4"]', "", ""),
            *('[{"role": "user", "content": "new"}]', '{"ü": 1}', "{}"),
        ),
        (
            *("o2", "o1", 2, "2026-06-20T08:00:01+00:00", '["x"]', "zwei", "end"),
            *("[]", "{}", '{"tool": "ü"}'),
        ),
    ]
