"""The workflow face: its records and shared state, and what every one of its stores promises alike."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import pickle
import threading
import uuid
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import pytest

import backstay
from backstay.compat.workflow import (
    Checkpoint,
    CheckpointInfo,
    CheckpointStore,
    FileCheckpointStore,
    InterruptType,
    MemoryCheckpointStore,
    SharedState,
    StoreCheckpointStore,
)
from backstay.errors import Corrupted, DecodeError, EncodeError, IdTaken, InvalidInput
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.access import access_of

T = TypeVar("T")
SPOIL = "update blob set body = zeroblob(length(body)) returning 1"
WIRE = {
    "id": "5f0c9a52-6a0e-4f7e-9a6c-1d2f3a4b5c6d",
    "graph_name": "review",
    "current_node": "publish",
    "state_snapshot": {"values": {"n": 1}, "messages": [], "current_node": None},
    "path": ["draft", "check"],
    "step_count": 2,
    "created_at": "2026-07-02T09:59:00.123456Z",
    "pending_action": {"tool": "post", "args": {"to": "all"}},
    "interrupt_type": "toolapproval",
}


def run(awaited: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaited)


def state_of(**values: object) -> SharedState:
    state = SharedState()
    for key, value in values.items():
        state.set(key, value)
    return state


def made(**given: Any) -> Checkpoint:
    """Return a checkpoint; each is a second younger than the one before."""
    plain = {**WIRE, "id": str(uuid.uuid4()), "created_at": f"2026-07-02T10:00:{next(_seconds):02d}Z"}
    return Checkpoint.from_dict({**plain, **given})


_seconds = iter(range(60))


@pytest.fixture(autouse=True)
def from_the_first_second() -> None:
    global _seconds
    _seconds = iter(range(60))


@pytest.fixture(params=["memory", "sqlite", "postgres", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "file":
        opened: CheckpointStore = FileCheckpointStore(tmp_path / "checkpoints")
    elif request.param == "memory":
        opened = MemoryCheckpointStore()
    elif request.param == "sqlite":
        opened = StoreCheckpointStore(tmp_path / "store.db")
    else:
        opened = StoreCheckpointStore(str(request.getfixturevalue("postgres_url")))
    yield opened
    if isinstance(opened, StoreCheckpointStore):
        report = run(run(opened._opened.store()).check())
        assert report, str(report)
    run(opened.close())


# Shared state -----------------------------------------------------------------------------------------------------


def test_shared_state_gives_a_value_as_the_wanted_type_or_nothing() -> None:
    state = state_of(count=42, name="echo", tags=["a"], ok=True, none=None)

    assert (state.get("count", int), state.get("name", str), state.get("tags", list)) == (42, "echo", ["a"])
    assert (state.get("count", float), state.get("ok", bool)) == (42.0, True)
    assert (state.get("count", str), state.get("ok", int), state.get("missing", int)) == (None, None, None)
    assert (state.contains("none"), state.contains("missing"), state.raw("tags")) == (True, False, ["a"])
    assert (state.remove("name"), state.remove("name"), state.keys()) == ("echo", None, ["count", "tags", "ok", "none"])


def test_what_json_cannot_say_fails_when_it_is_set() -> None:
    state = state_of(x=1)

    with pytest.raises(EncodeError, match=r"x\[0\] is nan"):
        state.set("x", [float("nan")])
    with pytest.raises(EncodeError, match="x is object"):
        state.set("x", object())

    assert state.raw("x") == 1


def test_messages_keep_all_their_parts_and_are_copies() -> None:
    state = SharedState()
    message = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    state.push_message(message)
    state.push_message({"role": "user"})
    message["role"] = "changed"
    state.messages()[0]["tool_calls"].clear()

    assert state.message_count() == 2
    assert state.messages() == [{"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "user"}]
    state.clear_messages()
    assert state.messages() == []


def test_shared_state_survives_json_and_a_fork_is_isolated() -> None:
    state = state_of(deep={"list": [1]})
    state.push_message({"role": "user"})
    state.current_node = "draft"

    again = SharedState.from_json(json.loads(json.dumps(state.to_json())))
    fork = state.fork()
    fork.set("deep", 2)
    fork.current_node = "other"

    assert again == state
    assert state.to_json() == {
        "values": {"deep": {"list": [1]}},
        "messages": [{"role": "user"}],
        "current_node": "draft",
    }
    odd: list[object] = [
        None,
        [],
        {"values": []},
        {"values": {}, "messages": {}},
        {**state.to_json(), "current_node": 1},
    ]
    for wrong in odd:
        with pytest.raises(DecodeError):
            SharedState.from_json(wrong)


@pytest.mark.parametrize(
    ("how", "result"),
    [
        ("merge", {"a": {"x": 1, "y": {"p": 1}}, "b": 1, "c": 2}),
        ("merge_overwrite", {"a": {"y": {"q": 2}, "z": 2}, "b": 1, "c": 2}),
        ("deep_merge", {"a": {"x": 1, "y": {"p": 1, "q": 2}, "z": 2}, "b": 1, "c": 2}),
    ],
)
def test_states_merge_in_three_ways(how: str, result: dict[str, object]) -> None:
    mine = state_of(a={"x": 1, "y": {"p": 1}}, b=1)
    other = state_of(a={"y": {"q": 2}, "z": 2}, c=2)

    getattr(mine, how)(other)

    assert mine.to_json()["values"] == result
    assert other.to_json()["values"] == {"a": {"y": {"q": 2}, "z": 2}, "c": 2}


# Records ----------------------------------------------------------------------------------------------------------


def test_a_new_checkpoint_has_a_fresh_id_and_keeps_what_it_is_given() -> None:
    state = state_of(test_key="test_value")
    path = ["start", "node1"]
    before = datetime.now(UTC)

    made = Checkpoint.new("test_graph", "node1", state, path, 2, InterruptType.BEFORE_NODE)
    path.append("later")
    state.set("test_key", "later")

    assert uuid.UUID(made.id).version == 4
    assert (made.graph_name, made.current_node, made.path, made.step_count) == (
        "test_graph",
        "node1",
        ["start", "node1"],
        2,
    )
    assert (made.interrupt_type, made.pending_action) == (InterruptType.BEFORE_NODE, None)
    assert made.created_at.utcoffset() == timedelta(0)
    assert before <= made.created_at <= datetime.now(UTC)
    assert made.state_snapshot["values"] == {"test_key": "test_value"}


def test_a_checkpoint_restores_its_state_or_says_that_it_cannot() -> None:
    made = Checkpoint.new("test", "node", state_of(key="value"), [], 0, InterruptType.USER_REQUEST)

    assert made.restore_state().get("key", str) == "value"
    made.state_snapshot = None
    with pytest.raises(DecodeError, match="Failed to restore state: "):
        made.restore_state()


def test_a_checkpoint_has_the_promised_wire_form_and_can_be_copied_and_shown() -> None:
    made = Checkpoint.from_dict(WIRE)

    assert made.to_dict() == WIRE
    assert list(made.to_dict()) == list(WIRE)
    assert made.created_at == datetime(2026, 7, 2, 9, 59, 0, 123456, tzinfo=UTC)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert "graph_name='review'" in repr(made)
    assert Checkpoint.new("g", "n", SharedState(), [], 0, InterruptType.AFTER_NODE).to_dict()["pending_action"] is None


@pytest.mark.parametrize(
    "text", ["2026-07-02T09:59:00.123456789Z", "2026-07-02T17:59:00.123456+08:00", "2026-07-02T09:59:00.123456+00:00"]
)
def test_other_forms_of_the_same_moment_are_read_and_kept(text: str) -> None:
    read = Checkpoint.from_dict({**WIRE, "created_at": text})

    assert read == Checkpoint.from_dict(WIRE)
    assert read.to_dict() == {**WIRE, "created_at": text}
    read.created_at += timedelta(seconds=1)
    assert read.to_dict()["created_at"] == "2026-07-02T09:59:01.123456Z"


def test_the_four_interrupts_have_their_wire_names() -> None:
    assert [kind.value for kind in InterruptType] == ["beforenode", "afternode", "toolapproval", "userrequest"]
    assert InterruptType("beforenode") is InterruptType.BEFORE_NODE
    assert len(set(InterruptType)) == 4


def test_a_summary_is_derived_and_can_be_serialised() -> None:
    info = CheckpointInfo.of(Checkpoint.from_dict(WIRE))

    names = ("id", "graph_name", "current_node", "step_count", "created_at", "interrupt_type")
    assert json.loads(json.dumps(info.to_dict())) == {name: WIRE[name] for name in names}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("step_count", -1),
        ("step_count", True),
        ("path", "draft"),
        ("path", ["draft", 1]),
        ("created_at", "2026-07-02T09:59:00"),
        ("created_at", 5),
        ("interrupt_type", "BeforeNode"),
        ("graph_name", None),
        ("run_id", ""),
    ],
)
def test_a_record_that_is_none_is_refused(field: str, value: object) -> None:
    with pytest.raises(DecodeError, match="not a workflow checkpoint"):
        Checkpoint.from_dict({**WIRE, field: value})
    with pytest.raises(DecodeError, match="step_count is missing"):
        Checkpoint.from_dict({key: WIRE[key] for key in WIRE if key != "step_count"})


# Every store ------------------------------------------------------------------------------------------------------


def test_the_interface_is_abstract_and_awaited() -> None:
    verbs = ("save", "load", "list", "delete", "clear")

    with pytest.raises(TypeError, match="abstract"):
        CheckpointStore()  # type: ignore[abstract]
    for kind in (MemoryCheckpointStore, FileCheckpointStore, StoreCheckpointStore):
        assert issubclass(kind, CheckpointStore)
        assert all(inspect.iscoroutinefunction(getattr(kind, verb)) for verb in verbs)


def test_save_load_list_delete(store: CheckpointStore) -> None:
    first = Checkpoint.new("graph", "node", state_of(x=42), ["start"], 1, InterruptType.BEFORE_NODE)
    first.pending_action = {"tool": "x"}
    assert run(store.load(first.id)) is None
    assert run(store.list()) == []

    run(store.save(first))

    assert run(store.load(first.id)) == first
    assert run(store.list()) == [CheckpointInfo.of(first)]
    assert (run(store.delete(first.id)), run(store.delete(first.id))) == (1, 0)
    assert run(store.load(first.id)) is None
    assert run(store.list()) == []


def test_clear_takes_all_and_counts_them(store: CheckpointStore) -> None:
    assert run(store.clear()) == 0
    for _ in range(3):
        run(store.save(made()))
    run(store.save(made(run_id="run")))

    assert run(store.clear()) == 4
    assert run(store.list()) == []
    assert run(store.clear()) == 0


@pytest.mark.parametrize("run_id", [None, "run"])
def test_saving_an_id_again_replaces_it_also_in_the_middle_of_a_run(store: CheckpointStore, run_id: str | None) -> None:
    run_of = {} if run_id is None else {"run_id": run_id}
    first, second = made(**run_of), made(**run_of)
    for each in (first, second):
        run(store.save(each))

    for number, old in enumerate((first, second)):
        new = made(**run_of, id=old.id, step_count=number, path=[], pending_action=None, state_snapshot=["bare"])
        run(store.save(new))
        run(store.save(new))
        assert run(store.load(old.id)) == new
        assert CheckpointInfo.of(new) in run(store.list())

    assert len(run(store.list())) == 2
    assert (run(store.clear()), run(store.load(first.id))) == (2, None)


def test_what_is_loaded_is_a_copy(store: CheckpointStore) -> None:
    kept = made(state_snapshot={"list": [1]})
    run(store.save(kept))
    kept.state_snapshot["list"].append(2)
    loaded = run(store.load(kept.id))
    assert loaded is not None
    loaded.state_snapshot["list"].append(3)

    again = run(store.load(kept.id))
    assert again is not None
    assert again.state_snapshot == {"list": [1]}


def test_every_store_lists_the_newest_first(store: CheckpointStore) -> None:
    names = []
    for second in (5, 1, 9, 3):
        each = made(created_at=f"2026-07-02T10:00:0{second}Z", run_id="run" if second > 4 else None)
        names.append((second, each.id))
        run(store.save(each))

    assert [info.id for info in run(store.list())] == [name for _, name in sorted(names, reverse=True)]
    assert [info.id for info in run(store.list(limit=1))] == [max(names)[1]]


def test_any_json_value_can_be_a_snapshot(store: CheckpointStore) -> None:
    clashing = {"pending_action": 1, "state.pending_action": 2, "state_snapshot": 3}
    snapshots: list[object] = [None, [], 7, "text", {}, clashing, {"": {"deep": [{"x": 1.5}]}}]
    for snapshot in snapshots:
        kept = made(state_snapshot=snapshot)
        kept.extra = {"label": "mine"}

        run(store.save(kept))

        assert run(store.load(kept.id)) == kept


@pytest.mark.parametrize("value", [True, 1.0])
def test_a_value_of_another_type_replaces_an_equal_one(store: CheckpointStore, value: object) -> None:
    kept = made(state_snapshot={"values": {"n": 1}, "messages": [], "current_node": None})
    run(store.save(kept))
    kept.state_snapshot["values"]["n"] = value

    run(store.save(kept))

    found = run(store.load(kept.id))
    assert found is not None
    assert type(found.state_snapshot["values"]["n"]) is type(value)


CALL = {"tool": "post", "args": {"to": "all"}}
CLASHING = {"values": {"pending_action": 1, "messages": 2, "state.x": 3}, "messages": [], "current_node": ""}
ODD: list[dict[str, Any]] = [
    *({"pending_action": value} for value in (None, False, "", "x" * 300_000)),
    *({"pending_action": value, "interrupt_type": "beforenode"} for value in (None, 0, CALL)),
    *({"pending_action": value, "state_snapshot": CLASHING} for value in (None, CALL)),
    {"pending_action": None, "state_snapshot": CLASHING, "interrupt_type": "afternode"},
    *({"interrupt": value} for value in (None, 5, {"id": "q", "node": None, "payload": CALL, "prompt": "p"})),
    *({"interrupt": {"id": name, "node": None, "payload": None, "prompt": ""}} for name in ("", "q")),
    *({"label": value} for value in (5, None, "", "text", "x" * 100_000)),
    *({"tags": value} for value in ("abc", [], ["a", ""], ["b", "a", "b"], ["backstay.replaced"], [["a"]])),
    *({"continuation": value} for value in (None, 5, {"kind": "node"}, {"kind": "fan_out"})),
    {"continuation": {"kind": "fan_out", "targets": ["a", "a"], "then": "b"}},
    {"continuation": {"kind": "fan_out", "targets": ["a", "b"], "then": "__end__"}},
    {"continuation": {"kind": "end"}, "current_node": "__end__"},
    {"current_node": ""},
    {"current_node": "__end__"},
    {"graph_name": ""},
    {"workflow_run_id": "w"},
    {"workflow_run_id": 5},
    {"workflow_run_id": ""},
    {"workflow_run_id": "w", "run_id": "r"},
    {"state_snapshot": {"values": [], "messages": [], "current_node": None}},
    {"state_snapshot": {"values": {}, "messages": {}, "current_node": None}},
    {"state_snapshot": {"values": {}, "messages": []}},
    {"state_snapshot": {"values": {}, "messages": [], "current_node": 5}},
]


@pytest.mark.parametrize("fields", ODD, ids=lambda fields: repr(fields)[:80])
def test_a_record_with_odd_fields_comes_back_as_it_was(fields: dict[str, Any]) -> None:
    """Whether or not a field of our own can hold its values."""
    store, plain = MemoryCheckpointStore(), {**WIRE, **fields}
    run(store.save(Checkpoint.from_dict(plain)))

    found = run(store.load(plain["id"]))
    assert found is not None
    assert found.to_dict() == plain
    assert run(store.list()) == [CheckpointInfo.of(found)]


def test_a_state_that_cannot_be_stored_is_refused_by_its_path(store: CheckpointStore) -> None:
    kept = made()
    kept.state_snapshot["values"]["n"] = float("nan")

    with pytest.raises(EncodeError) as caught:
        run(store.save(kept))

    assert caught.value.path == "state_snapshot.values.n"
    assert run(store.list()) == []


def test_runs_of_one_graph_are_told_apart(store: CheckpointStore) -> None:
    mine = [made(run_id="mine", step_count=number) for number in range(3)]
    other, alone = made(run_id="other", graph_name="another"), made()
    for each in (*mine, other, alone):
        run(store.save(each))

    assert run(store.latest("mine")) == mine[2]
    assert run(store.latest("nobody")) is None
    assert [info.step_count for info in run(store.list(run_id="mine"))] == [2, 1, 0]
    assert [info.id for info in run(store.list(graph_name="another"))] == [other.id]
    assert run(store.delete_run("mine")) == 3
    assert {info.id for info in run(store.list())} == {other.id, alone.id}


def test_many_tasks_save_at_once_and_nothing_is_lost_or_torn(store: CheckpointStore) -> None:
    same = made()
    versions = [made(id=same.id, step_count=number, path=[f"n{number}"] * number) for number in range(6)]
    others = [made(run_id="run", created_at="2026-07-02T10:00:00Z") for _ in range(6)]

    async def main() -> None:
        await asyncio.gather(*(store.save(each) for each in (*versions, *others)))

    run(main())

    assert run(store.load(same.id)) in versions
    assert {info.id for info in run(store.list())} == {same.id, *(each.id for each in others)}


def test_threads_share_a_store_and_read_it_while_others_write(store: CheckpointStore) -> None:
    """Each thread has an event loop of its own. A reader sees one of the versions, never a mixture."""
    same = made()
    versions = [made(id=same.id, step_count=number, path=[f"n{number}"] * number) for number in range(8)]
    run(store.save(versions[0]))
    done = threading.Event()
    wrong: list[Checkpoint | None] = []

    def read() -> None:
        while not done.is_set():
            found = run(store.load(same.id))
            if found not in versions or [info.id for info in run(store.list())] != [same.id]:
                wrong.append(found)

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        writers = [pool.submit(run, store.save(each)) for each in versions[1:]]
        try:
            for writer in writers:
                writer.result()
        finally:
            done.set()
        for reader in readers:
            reader.result()

    assert wrong == []
    assert run(store.load(same.id)) in versions[1:]


# Together with the rest of Backstay -------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    store = StoreCheckpointStore(tmp_path / "a.db")
    kept = made(run_id="run")
    run(store.save(kept))
    run(store.close())

    with backstay.open(tmp_path / "a.db") as opened:
        (found,) = opened.threads(graph="review", interrupt="toolapproval")
        whole = opened.get(found.id)
        assert whole is not None
        assert (found.thread_id, found.run_id, found.step, found.next_node, found.last_node) == (
            "run",
            "run",
            2,
            "publish",
            "check",
        )
        assert (whole.pending_action, whole.path) == (kept.pending_action, ("draft", "check"))
        saved = opened.thread("run").save({"other": 1})
        face = StoreCheckpointStore(opened)
        assert run(face.load(saved.id)) is None
        with pytest.raises(IdTaken, match="was not saved through this interface"):
            run(face.save(made(id=saved.id, run_id="run")))
        assert run(face.clear()) == 1  # and nothing that others saved
        assert [meta.id for meta in opened.thread("run").history()] == [saved.id]


def test_a_damaged_checkpoint_is_an_error_to_load_and_can_be_deleted(tmp_path: Path) -> None:
    """A byte of its state is lost; the others and the list are as they were."""
    store = StoreCheckpointStore(tmp_path / "a.db")
    kept, other = made(state_snapshot={"text": os.urandom(600).hex()}), made()
    for each in (kept, other):
        run(store.save(each))
    backend = access_of(run(store._opened.store())).store
    assert isinstance(backend, SqliteStore)
    changed = backend._write(lambda connection: [*connection.execute(SPOIL)])
    assert changed

    with pytest.raises(Corrupted):
        run(store.load(kept.id))
    assert len(run(store.list())) == 2
    assert (run(store.delete(kept.id)), run(store.load(kept.id))) == (1, None)
    run(store.close())


def test_a_checkpoint_never_moves_to_another_run() -> None:
    store = MemoryCheckpointStore()
    kept = made(run_id="mine")
    run(store.save(kept))

    with pytest.raises(IdTaken, match="belongs to thread 'mine'"):
        run(store.save(made(id=kept.id, run_id="other")))

    assert run(store.load(kept.id)) == kept


def test_times_with_another_zone_are_kept_as_moments() -> None:
    store = MemoryCheckpointStore()
    kept = made()
    kept.created_at = datetime(2026, 7, 2, 18, 0, tzinfo=timezone(timedelta(hours=8)))

    run(store.save(kept))

    assert run(store.load(kept.id)) == kept
    kept.created_at = datetime(2026, 7, 2)
    with pytest.raises(InvalidInput, match="time zone"):
        run(store.save(kept))


def test_the_event_loop_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renames, fsyncs = [], []
    replace, fsync = os.replace, os.fsync

    def watched_replace(source: Path, target: Path) -> None:
        renames.append(threading.get_ident())
        replace(source, target)

    def watched_fsync(number: int) -> None:
        fsyncs.append(threading.get_ident())
        fsync(number)

    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "fsync", watched_fsync)

    run(FileCheckpointStore(tmp_path).save(made()))

    assert (len(renames), len(fsyncs)) == (1, 2)  # the file, then its directory
    assert threading.get_ident() not in {*renames, *fsyncs}
