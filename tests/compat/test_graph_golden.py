"""Files that the original program wrote (tests/golden/graph): imported, resumed by a graph of ours, and exported again.

The expected values are what the original program was given, see the README next to the files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Graph, GraphMismatch
from backstay.compat.graph import (
    CheckpointBlob,
    CheckpointId,
    Frame,
    FrameInfo,
    FrameStack,
    JsonCheckpointCodec,
    NodeId,
    TraceId,
    export_blobs,
    import_blobs,
)
from backstay.errors import Corrupted, EncodeError, NotFound, StoreError

GOLDEN = Path(__file__).parents[1] / "golden" / "graph"
HASH = 780230826547137373  # of the original's graph "research"
RUN, MADE = (f"7ace0000-0000-4000-8000-00000000000{n}" for n in (1, 2))
ONE, TWO, THREE, FOUR, FIVE, SIX = (f"0b5e55ed-0000-4000-8000-00000000000{n}" for n in range(1, 7))
START = {"question": "Wie viele Fischotter gibt es? 🦦", "draft": None}
PLAN = {**START, "plan": ["Überblick", "深い"]}
SEARCH = {**PLAN, "search": {"hits": 2**64 - 1}}
WRITE = {key: value for key, value in SEARCH.items() if key != "draft"} | {"write": "fertig ✅"}


@pytest.fixture
def target(tmp_path: Path) -> Iterator[backstay.Store]:
    with backstay.open(tmp_path / "target.db") as opened:
        yield opened
        assert opened.check()


def plain(path: Path) -> Any:
    return json.loads(path.read_bytes())


def research(ran: list[str], **options: Any) -> Graph:
    """Return the graph that the original's is continued in: plan -> search -> write."""
    graph = Graph("research", **options)
    for name in ("plan", "search", "write"):

        def node(state: Any, name: str = name) -> dict[str, Any]:
            ran.append(name)
            return {name: "by us"}

        graph.node(name, node)
    graph.start("plan")
    graph.edge("plan", "search")
    graph.edge("search", "write")
    graph.end("write")
    return graph


def levels(value: Any) -> int:
    count = 0
    while isinstance(value, dict):
        (value,) = value["in"]
        count += 1
    assert value == "bottom"
    return count


def test_a_checkpoint_is_imported_with_every_value(target: backstay.Store) -> None:
    report = import_blobs(GOLDEN / "made", target)
    found = target.get(ONE)

    assert report
    assert (report.stored, report.notes) == (3, ())
    assert found is not None
    assert (found.thread_id, found.next_node, found.last_node, found.graph_hash) == (MADE, "search", None, HASH)
    assert found.created_at == datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
    state = dict(found.state)
    assert levels(state.pop("deep")) == 20
    assert state.pop("tricky") == 'quote " backslash \\ slash / tab \t nul \0 bell \a line \u2028 ﷽ 👩\u200d🚀'
    numbers = [0, -1, 2**53 + 1, 2**64 - 1, -(2**63), 0.1, -0.0, 1e300, 5e-324, 1.0]
    assert list(map(repr, state.pop("numbers"))) == list(map(repr, numbers))
    assert state == {**PLAN, "empty": {"list": [], "object": {}, "text": "", "false": False, "": 1}}


def test_hashes_beyond_a_double_and_names_and_times_at_their_limits_are_exact(target: backstay.Store) -> None:
    import_blobs(GOLDEN / "made", target)
    two, three = target.get(TWO), target.get(THREE)

    assert two is not None
    assert (two.graph_hash, two.next_node, two.state) == (2**53 + 1, "Prüfen/审查", {})
    assert three is not None
    assert (three.graph_hash, three.next_node) == (2**64 - 1, None)
    assert three.created_at == datetime(1970, 1, 1, tzinfo=UTC)
    # Two of them are of the same microsecond: the nanosecond decides which is the newer.
    assert [meta.id for meta in target.thread(MADE).history()] == [TWO, ONE, THREE]


@pytest.mark.parametrize("folder", ["run", "run-newer"])
def test_both_versions_of_the_engine_store_the_node_that_finished(folder: str, target: backstay.Store) -> None:
    assert import_blobs(GOLDEN / folder, target, graph="research", finished=True)
    found = [target.get(meta.id) for meta in target.thread(RUN).history()][::-1]

    assert [(each.last_node, each.next_node, each.graph) for each in found if each] == [
        ("plan", None, "research"),
        ("search", None, "research"),
        ("write", None, "research"),
    ]
    assert [each.state for each in found if each] == [PLAN, SEARCH, WRITE]
    assert {each.graph_hash for each in found if each} == {HASH}


def test_a_run_of_the_original_resumes_after_its_finished_node(target: backstay.Store, tmp_path: Path) -> None:
    """The program was killed after its second node: the file of the third is missing."""
    source = shutil.copytree(GOLDEN / "run", tmp_path / "run")
    for path in (source / RUN).iterdir():
        if plain(path)["current_node"] == "write":
            path.unlink()
    import_blobs(source, target, graph="research", finished=True)
    ran: list[str] = []
    graph = research(ran)
    with pytest.raises(GraphMismatch, match=r"register research\.migrate\(0x0ad3efcd8b26cb5d") as caught:
        graph.resume_sync(target.thread(RUN))
    graph.migrate(HASH)
    result = graph.resume_sync(target.thread(RUN)).raise_for_status()

    assert (caught.value.expected, caught.value.actual) == (graph.fingerprint, HASH)
    assert ran == ["write"]
    assert result.values == {**SEARCH, "write": "by us"}


def test_a_checkpoint_resumes_at_the_next_node_that_it_names(target: backstay.Store, tmp_path: Path) -> None:
    source = tmp_path / "made" / "trace"
    source.mkdir(parents=True)
    shutil.copy(GOLDEN / "made" / MADE / f"{ONE}.json", source)
    import_blobs(source.parent, target, graph="research")
    ran: list[str] = []
    graph = research(ran)
    graph.migrate(HASH)
    result = graph.resume_sync(target.thread("trace")).raise_for_status()

    assert ran == ["search", "write"]
    assert result.values["numbers"][3] == 2**64 - 1


def test_a_finished_run_has_nothing_left_to_run(target: backstay.Store) -> None:
    import_blobs(GOLDEN / "run", target, graph="research", finished=True)
    ran: list[str] = []
    graph = research(ran)
    graph.migrate(HASH)

    assert graph.resume_sync(target.thread(RUN)).raise_for_status().values == WRITE
    assert ran == []


@dataclass
class AgentState:
    """The state class of the original's checkpoints in ``typed/agent``: its cache is not stored."""

    messages: list[str]
    iterations: int
    note: str | None
    mood: str | None
    cache: object

    def snapshot(self) -> dict[str, Any]:
        stored = {"messages": self.messages, "iterations": self.iterations, "note": self.note}
        return stored if self.mood is None else {**stored, "mood": self.mood}

    @classmethod
    def restore(cls, stored: Mapping[str, Any]) -> AgentState:
        return cls(**{"mood": None, **stored}, cache="made again")


def test_the_projection_of_a_class_is_restored_by_the_class() -> None:
    codec = JsonCheckpointCodec(AgentState)
    states = []
    for name, id in (("without-mood", FOUR), ("with-mood", FIVE)):
        data = (GOLDEN / "typed" / "agent" / f"{name}.json").read_bytes()
        blob = CheckpointBlob(id, data, 2**63 + 1, datetime.now(UTC))
        states.append(codec.deserialize(blob, 2**63 + 1).restore_state())

    assert states == [
        AgentState(["hello", "grüß dich"], 2**64 - 1, None, None, "made again"),
        AgentState(["hello", "grüß dich"], 2**64 - 1, "n", "fine", "made again"),
    ]


def test_an_imported_projection_is_resumed_by_a_graph_over_the_class(target: backstay.Store) -> None:
    import_blobs(GOLDEN / "typed", target, graph="agent")
    graph = Graph("agent", state=AgentState)
    graph.node("think", lambda state: {"note": "thought"})
    graph.node("answer", lambda state: {"messages": [*state.messages, state.cache]})
    graph.edge("think", "answer")
    graph.start("think")
    graph.end("answer")
    graph.migrate(2**63 + 1)
    result = graph.resume_sync(target.thread("agent")).raise_for_status()
    stored = target.thread("agent").latest()

    assert result.state.messages == ["hello", "grüß dich", "made again"]
    assert stored is not None
    assert stored.state == {
        "messages": ["hello", "grüß dich", "made again"],
        "iterations": 2**64 - 1,
        "note": "n",
        "mood": "fine",
    }


# Sessions and frames ----------------------------------------------------------------------------------------------


def test_a_session_becomes_a_history_and_resumes_after_its_last_frame(target: backstay.Store) -> None:
    report = import_blobs(GOLDEN / "sessions", target)
    found = [target.get(meta.id) for meta in target.thread("stopped").history()][::-1]
    ran: list[str] = []
    graph = research(ran)
    graph.migrate(HASH)

    assert report
    assert (report.stored, report.threads, report.notes) == (6, 3, ())
    assert [(each.last_node, each.state, each.graph, each.graph_hash) for each in found if each] == [
        ("plan", PLAN, "research", HASH),
        ("search", SEARCH, "research", HASH),
    ]
    assert graph.resume_sync(target.thread("stopped")).raise_for_status().values == {**SEARCH, "write": "by us"}
    assert graph.resume_sync(target.thread("finished")).raise_for_status().values == WRITE
    assert ran == ["write"]
    # A session that has not run yet has a state but no position: a run starts with it.
    assert graph.run_sync(target.thread("fresh")).values["question"] == START["question"]


def test_a_session_that_grew_is_imported_again_and_only_its_new_frame_is_stored(
    target: backstay.Store, tmp_path: Path
) -> None:
    for name in ("stopped", "finished"):  # the same session, earlier and later
        (tmp_path / "source").mkdir(exist_ok=True)
        shutil.copy(GOLDEN / "sessions" / f"{name}.json", tmp_path / "source" / "session.json")
        report = import_blobs(tmp_path / "source", target)

    assert (report.stored, report.present) == (1, 2)
    assert import_blobs(tmp_path / "source", target).present == 3


def test_a_session_whose_frames_are_no_history_of_one_graph_is_named(target: backstay.Store, tmp_path: Path) -> None:
    """The stack of the original holds frames of two graphs, and the session's state is that of neither."""
    session = {
        "state": {"n": 1},
        "frames": plain(GOLDEN / "frames" / "stack.json"),
        "graph_hash": 2**64,
        "mood": "fine",
    }
    (tmp_path / "odd.json").write_text(json.dumps(session), encoding="utf-8")
    report = import_blobs(tmp_path, target)
    newest = target.thread("odd").latest()

    assert report.stored == 3
    assert [note.what for note in report.notes][:2] == [
        "has frames of several graphs, so no run can resume here",
        "the session's state differs from its last frame, and is a checkpoint of its own",
    ]
    assert newest is not None
    assert (newest.graph, newest.last_node, newest.state) == (None, "b", {"n": 1})
    assert (newest.metadata["mood"], newest.metadata["graph_hash"]) == ("fine", 2**64)


def test_frames_of_the_original_are_read() -> None:
    whole = plain(GOLDEN / "frames" / "stack.json")
    stack = FrameStack.from_plain(whole["frames"])
    recorded = plain(GOLDEN / "frames" / "memory-sink.json")

    assert (stack.depth, stack.is_empty) == (2, False)
    assert stack.frames == (
        Frame(graph_id="outer", node_id="inside", state=START, cursor=3),
        Frame(graph_id="inner", node_id="b", state={}, cursor=2**53 + 1),
    )
    assert FrameStack.from_plain(plain(GOLDEN / "frames" / "empty-stack.json")["frames"]) == FrameStack()
    assert [(each["node_id"], each["cursor"]) for each in recorded] == [("plan", 1), ("search", 2), ("write", 3)]
    named = [Frame.from_plain({**each, "graph_id": "research"}) for each in recorded]  # the original leaves it empty
    assert [frame.state for frame in named] == [PLAN, SEARCH, WRITE]


# Exporting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "finished"), [("run", True), ("run-newer", True), ("made", False), ("typed", False)]
)
def test_an_export_has_the_fields_of_the_original_files(
    folder: str, finished: bool, target: backstay.Store, tmp_path: Path
) -> None:
    import_blobs(GOLDEN / folder, target, finished=finished)
    report = export_blobs(target, tmp_path / "out", finished=finished)
    there, here = (
        {(path.parent.name, plain(path)["checkpoint_id"]): plain(path) for path in root.rglob("*.json")}
        for root in (GOLDEN / folder, tmp_path / "out")
    )

    assert report.checkpoints == len(here) == 3
    assert report.notes == ()
    assert here == there
    assert all(list(each) == list(there[key]) for key, each in here.items())


def test_a_run_of_ours_is_exported_with_the_next_node_and_what_has_no_room_is_named(
    target: backstay.Store, tmp_path: Path
) -> None:
    thread = target.thread("ours")
    research([]).run_sync(thread, START, metadata={"user": "ada"}).raise_for_status()
    report = export_blobs(target, tmp_path, threads=["ours"], graph_hash=HASH)
    found = [plain(tmp_path / "ours" / f"{meta.id}.json") for meta in thread.history()][::-1]

    assert [each["current_node"] for each in found] == ["plan", "search", "write", ""]
    assert {(each["graph_hash"], each["user"]) for each in found} == {(HASH, "ada")}
    assert found[-1]["state"] == {**START, "plan": "by us", "search": "by us", "write": "by us"}
    assert set(found[0]["created_at"]) == {"secs_since_epoch", "nanos_since_epoch"}
    assert {note.what for note in report.notes} == {
        "the file cannot hold: run_id",
        "the file cannot hold: last_node, path, run_id",
    }
    again = export_blobs(target, tmp_path, threads=["ours"], graph_hash=HASH)
    assert again == report


def test_what_the_original_could_not_read_is_left_out_or_named(target: backstay.Store, tmp_path: Path) -> None:
    saved = [
        target.thread("odd").save(state, id=id)
        for id, state in (("cp-1", {"n": 1}), ("cp-2", {"n": 2**64}), ("cp-3", {"when": datetime.now(UTC)}))
    ]
    target.thread("../up").save({"n": 1})
    report = export_blobs(target, tmp_path / "out")
    (path,) = (tmp_path / "out").rglob("*.json")

    assert CheckpointId(path.stem) == plain(path)["checkpoint_id"]
    assert (plain(path)["state"], plain(path)["graph_hash"]) == ({"n": 1}, 0)
    assert [(note.checkpoint, note.what) for note in report.notes if note.thread == "odd"] == [
        (
            saved[0].id,
            f"the file cannot hold: no graph_hash: 0 is written, an id that is no UUID: {path.stem} is written",
        ),
    ]
    assert {note.what for note in report.left_out} == {
        "checkpoint.state.n is an integer of more than 64 bits",
        "checkpoint.state.when is datetime, which JSON does not have",
        "thread '../up' cannot be part of a file name",
    }


def test_several_next_nodes_and_nested_positions_are_named_as_lost(target: backstay.Store, tmp_path: Path) -> None:
    outer = Graph("outer")
    outer.node("split", lambda state: {"n": 1})
    outer.node("left", lambda state: {"left": 1})
    outer.subgraph("right", research([], before=["search"]))
    outer.node("join", lambda state: None)
    outer.parallel("split", ["left", "right"], join="join")
    outer.start("split")
    outer.end("join")
    outer.run_sync(target.thread("t"), {})
    report = export_blobs(target, tmp_path, finished=True)
    found = [plain(tmp_path / "t" / f"{meta.id}.json") for meta in target.thread("t").history()][::-1]

    assert [each["current_node"] for each in found][:2] == ["", "split"]
    whole = " ".join(note.what for note in report.notes)
    assert "continuation" in whole
    assert "frames" in whole


def test_a_name_that_our_graphs_cannot_have_survives_an_import_and_an_export(
    target: backstay.Store, tmp_path: Path
) -> None:
    whole = {**plain(GOLDEN / "made" / MADE / f"{TWO}.json"), "current_node": "n" * 300}
    (tmp_path / "in" / "trace").mkdir(parents=True)
    (tmp_path / "in" / "trace" / "long.json").write_text(json.dumps(whole), encoding="utf-8")
    report = import_blobs(tmp_path / "in", target, graph="research")
    export_blobs(target, tmp_path / "out")

    assert (report.stored, len(report.notes)) == (1, 1)
    assert "300 characters" in report.notes[0].what
    written = plain(tmp_path / "out" / "trace" / f"{TWO}.json")
    assert {key: written[key] for key in whole} == whole


def test_threads_that_some_file_systems_take_for_one_are_not_mixed(target: backstay.Store, tmp_path: Path) -> None:
    for name in ("trace", "Trace"):
        target.thread(name).save({"n": 1})
    report = export_blobs(target, tmp_path)

    assert report.checkpoints == 1
    assert [note.what for note in report.left_out] == ["thread 'Trace' differs from 'trace' only in case"]


def test_a_file_of_the_old_program_is_not_overwritten(target: backstay.Store, tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "made", tmp_path / "made")
    import_blobs(root, target)
    changed = root / MADE / f"{ONE}.json"
    changed.write_bytes(changed.read_bytes().replace(b"search", b"write"))
    before = {path: path.read_bytes() for path in root.rglob("*.json")}
    report = export_blobs(target, root)

    assert {path: path.read_bytes() for path in root.rglob("*.json")} == before
    assert [note.checkpoint for note in report.left_out] == [ONE]
    assert "exists with other content" in report.left_out[0].what


# Damage, repetition, other data -----------------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_named_and_nothing_is_skipped_silently(target: backstay.Store, tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "made", tmp_path / "made")
    whole = (root / MADE / f"{ONE}.json").read_bytes()
    damaged = {
        "torn.json": whole[:-1],
        "list.json": b"[]",
        "nan.json": whole.replace(b"0.1", b"NaN"),
        "huge.json": whole.replace(b"0.1", b"1e999"),
        "late.json": whole.replace(b"1767270615", str(2**62).encode()),
        "no-uuid.json": whole.replace(ONE.encode(), b"cp-1"),
        "surrogate.json": whole.replace("深".encode(), b"\\ud800"),
        "no-state.json": whole.replace(b'"state"', b'"status"'),
        "bare-session.json": b'{"frames": {"frames": []}}',
        "odd-frame.json": b'{"state": {}, "frames": {"frames": [{"graph_id": "g"}]}}',
    }
    for name, data in damaged.items():
        (root / MADE / name).write_bytes(data)
    (root / MADE / "notes.txt").write_text("mine", encoding="utf-8")
    (root / MADE / "folder.json").mkdir()
    (root / "unreadable.json").symlink_to(root / "nowhere")
    report = import_blobs(root, target)

    assert report.stored == 3
    assert sorted(Path(note.where).name for note in report.missing) == sorted(damaged)
    assert sorted(Path(note.where).name for note in report.notes) == ["folder.json", "notes.txt", "unreadable.json"]


def test_the_same_again_changes_nothing_and_other_data_is_not_mixed_with(
    target: backstay.Store, tmp_path: Path
) -> None:
    first = import_blobs(GOLDEN / "made", target)
    root = shutil.copytree(GOLDEN / "made", tmp_path / "made")
    for path in root.rglob("*.json"):  # written again by the original, with the keys of its map in another order
        whole = plain(path)
        path.write_text(json.dumps({**whole, "state": dict(reversed(whole["state"].items()))}), encoding="utf-8")
    again = import_blobs(root, target)
    target.thread(RUN).save({"other": "data"})
    refused = import_blobs(GOLDEN / "run", target)

    assert (first.stored, again.stored, again.present) == (3, 0, 3)
    assert not refused
    assert [each.thread for each in refused.refused] == [RUN]
    assert len(list(target.thread(RUN).history())) == 1


def test_blobs_of_a_codec_are_imported_by_trace(target: backstay.Store) -> None:
    blobs = [
        (TraceId(MADE), CheckpointBlob(path.stem, path.read_bytes(), plain(path)["graph_hash"], datetime.now(UTC)))
        for path in sorted((GOLDEN / "made" / MADE).iterdir(), reverse=True)
    ]
    broken = (TraceId(MADE), CheckpointBlob(SIX, b"?", HASH, datetime.now(UTC)))
    report = import_blobs([*blobs, broken], target)

    assert (report.stored, [note.checkpoint for note in report.missing]) == (3, [SIX])
    assert [meta.id for meta in target.thread(MADE).history()] == [TWO, ONE, THREE]


# Texts ------------------------------------------------------------------------------------------------------------


def test_errors_and_ids_print_as_the_original_printed_them() -> None:
    texts = plain(GOLDEN / "texts.json")
    nine = "0b5e55ed-0000-4000-8000-000000000009"
    ours = {
        "storage": str(StoreError("disk on fire")),
        "not_found": str(NotFound(nine)),
        "corrupted": str(Corrupted("digest")),
        "serialization": str(EncodeError("x")),
        "graph_mismatch": str(GraphMismatch(expected=0xAB, actual=2**64 - 1)),
        "checkpoint_id": str(CheckpointId(ONE)),
        "checkpoint_id_json": json.loads(json.dumps(CheckpointId(ONE))),
        "node_id": str(NodeId("Prüfen")),
        "node_id_json": json.loads(json.dumps(NodeId("Prüfen"))),
        "trace_id": str(TraceId("00000000000000000000000000000007")),
        "trace_id_json": json.loads(json.dumps(TraceId("00000000000000000000000000000007"))),
    }

    assert ours == {key: texts[key] for key in ours}
    assert FrameInfo("n", 2) == FrameInfo(node_id="n", step=2)
