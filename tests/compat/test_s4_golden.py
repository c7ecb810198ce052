"""Files that the original workflow system wrote: read, resumed, written again; and files of ours that it read."""

from __future__ import annotations

import asyncio
import json
import math
import operator
import shutil
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import pytest

import backstay
from backstay import Approve, Graph, Reject
from backstay.compat.workflow import (
    FileCheckpointStore,
    InterruptType,
    StoreCheckpointStore,
    export_workflow,
    import_workflow,
)
from backstay.engine import Status
from backstay.engine.reducers import append
from backstay.errors import GraphMismatch, StoreError
from backstay.model.frame import End, FanOut

T = TypeVar("T")
GOLDEN = Path(__file__).parents[1] / "golden" / "workflow"
SEED, LINEAGE, RUNS = "v0.1.1", "c1ae71f", "1a283a5"
FIRST = MOMENT = datetime(2026, 7, 2, 13, 46, 40, tzinfo=UTC)


def run(awaited: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaited)


def name(number: int, version: str = SEED) -> str:
    return f"{ {SEED: '0', LINEAGE: '1', RUNS: '2'}[version] * 8 }-0000-4000-8000-{number:012}"


@pytest.fixture
def target() -> Iterator[backstay.Store]:
    with backstay.open("memory:") as opened:
        yield opened
        assert opened.check()


def exact(value: Any) -> Any:
    """Return a JSON value in a form in which 1 differs from 1.0 and True, and -0.0 from 0.0."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return (type(value).__name__, math.copysign(1, value) if type(value) is float else 0, value)


# The values as they were given to the original program, not as our reader read them.

DEEP: Any = "bottom"
for _level in range(60):
    DEEP = [DEEP] if _level % 2 == 0 else {"d": DEEP}

NUMBERS = {
    "small": 1e-7,
    "smaller": 5e-324,
    "decimal": 0.1,
    "tenth_of_mill": 0.00001234,
    "large": 1e16,
    "largest": 1.7976931348623157e308,
    "whole_float": 1.0,
    "negative_zero": -0.0,
    "f32": 0.10000000149011612,
    "u64_max": 2**64 - 1,
    "i64_min": -(2**63),
    "beyond_2_53": 9007199254740993,
    "zero": 0,
    "nan_is_null": None,
    "yes": True,
    "nothing": None,
    "": "an empty key",
    "messages": ["a value with the name of the messages"],
    "pending_action": "a value with the name of the field",
    "nested": {"b": [1, [2, [3, {"deep": {"deeper": [None, {"": []}, {}]}}]]], "a": {"z": 1, "y": 2}},
    "deep": DEEP,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q":"Zürich","n":2}'}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Write about Zürich."},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "two results", "name": "search", "tool_call_id": "call_1"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "and this"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB", "detail": "low"}},
            {"type": "file", "name": "a.txt", "content": "YQ=="},
        ],
    },
    {"role": "assistant", "content": ""},
    {"role": ""},
]
TALK = [{"role": "user", "content": "Write about Zürich."}, {"role": "assistant", "content": "Zürich is a town."}]
PUBLISH = {"tool": "publish", "args": {"to": ["alle@example.org"], "dry_run": False, "budget": 1e-7}}
TOPIC = 'Grüße, 世界 🌍 "quoted" \\ \x01\x7f\u2028'

GIVEN: dict[int, tuple[Any, ...]] = {
    # graph, current node, values, messages, node of the state, path, second, rest of it, pending action, interrupt
    1: ("review", "draft", {}, [], None, [], 0, "", None, "beforenode"),
    2: ("review", "check", {"topic": TOPIC, "count": 3}, MESSAGES, "draft",
        ["draft"], 1, ".123456789", None, "afternode"),
    3: ("review", "publish", NUMBERS, [], "check", ["draft", "check"], 2, ".123", PUBLISH, "toolapproval"),
    4: ("Prüfung 世界", "__end__", {"done": True}, [{"role": "user", "content": "stop"}], "publish",
        ["draft", "check", "draft", "check", "publish"], 3, ".000001", None, "userrequest"),
    5: ("review", "publish", {"draft": "Zürich is a town.", "rounds": 2}, TALK, "check",
        ["draft", "check", "draft", "check"], 4, ".987654321", None, "beforenode"),
}  # fmt: skip


def given(number: int) -> dict[str, Any]:
    """Return the checkpoint that the original program was given, in the names of its fields."""
    graph, node, values, messages, at, path, second, rest, pending, kind = GIVEN[number]
    return {
        "id": name(number),
        "graph_name": graph,
        "current_node": node,
        "state_snapshot": {"values": values, "messages": messages, "current_node": at},
        "path": path,
        "step_count": len(path),
        "created_at": f"2026-07-02T13:46:{40 + second}{rest}Z",
        "pending_action": pending,
        "interrupt_type": kind,
    }


@pytest.mark.parametrize("number", GIVEN)
def test_every_value_of_a_file_comes_in(number: int, target: backstay.Store, tmp_path: Path) -> None:
    """By the file store, by an import, and after an export again."""
    wanted = exact(given(number))
    store = FileCheckpointStore(GOLDEN / SEED)
    read = run(store.load(name(number)))

    assert read is not None
    assert exact(read.to_dict()) == wanted
    microseconds = int(f"{GIVEN[number][7]}000000"[1:7])
    assert read.created_at == FIRST + timedelta(seconds=GIVEN[number][6], microseconds=microseconds)
    assert read.interrupt_type is InterruptType(GIVEN[number][9])
    state = read.restore_state()
    assert exact({key: state.raw(key) for key in state.keys()}) == exact(GIVEN[number][2])  # noqa: SIM118
    assert (state.messages(), state.current_node) == (GIVEN[number][3], GIVEN[number][4])

    assert import_workflow(GOLDEN / SEED, target)
    imported = run(StoreCheckpointStore(target).load(name(number)))
    assert imported is not None
    assert exact(imported.to_dict()) == wanted
    export_workflow(target, tmp_path / "out")
    assert exact(content(tmp_path / "out" / f"{name(number)}.json")) == wanted
    assert run(FileCheckpointStore(tmp_path / "out").load(name(number))) == read


def content(path: Path) -> dict[str, Any]:
    """Return the content of a file without the two keys that we add, which the original ignores."""
    plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in plain.items() if key not in ("_version", "_checksum")}


def test_the_original_files_are_listed_newest_first_and_reported_as_unchecked() -> None:
    listed = run(FileCheckpointStore(GOLDEN / SEED).list())

    assert [info.id for info in listed] == [name(number) for number in (5, 4, 3, 2, 1)]
    assert [info.interrupt_type.value for info in listed] == [GIVEN[number][9] for number in (5, 4, 3, 2, 1)]
    assert {problem.kind for problem in listed.problems} == {"unchecked"}


def test_an_imported_file_is_an_ordinary_checkpoint(target: backstay.Store) -> None:
    report = import_workflow(GOLDEN / SEED, target)
    talk, call, over = (target.get(name(number)) for number in (2, 3, 4))

    assert (report.stored, report.missing, report.refused) == (5, (), ())
    assert len({meta.thread_id for meta in target.threads()}) == 5  # each is all that there is of its run
    assert talk is not None
    assert (talk.messages, talk.state["topic"], talk.state["count"]) == (MESSAGES, TOPIC, 3)
    assert (talk.graph, talk.last_node, talk.next_node, talk.path) == ("review", "draft", "check", ("draft",))
    assert talk.interrupt is not None
    assert (talk.interrupt.kind, talk.interrupt.node) == ("afternode", "draft")
    assert call is not None
    assert call.pending_action == PUBLISH
    assert call.interrupt is not None
    assert call.interrupt.payload == PUBLISH
    assert over is not None
    assert (over.is_over, over.continuation, over.next_node) == (True, End(), None)
    again = import_workflow(GOLDEN / SEED, target)
    assert (again.stored, again.present) == (0, 5)


def test_a_directory_that_is_not_there_is_an_error(target: backstay.Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a directory"):
        import_workflow(tmp_path / "nowhere", target)


# Resuming ---------------------------------------------------------------------------------------------------------


class Review(TypedDict, total=False):
    draft: str
    rounds: int
    messages: Annotated[list[Any], append]


def noting(name: str, ran: list[str]) -> Callable[[Review], Any]:
    def execute(state: Review) -> Any:
        ran.append(name)
        return {"messages": [{"role": "assistant", "content": f"{name}: {state.get('draft')}"}]}

    return execute


def review(ran: list[str], **options: Any) -> Graph:
    graph = Graph("review", state=Review, **options)
    for each in ("draft", "check", "publish"):
        graph.node(each, noting(each, ran))
    graph.edge("draft", "check")
    graph.edge("check", "publish")
    graph.start("draft")
    graph.end("publish")
    return graph


@pytest.mark.parametrize("options", [{}, {"before": ["publish"]}], ids=["not guarded", "guarded"])
def test_a_graph_resumes_an_imported_run_where_it_waited_once_a_person_approves(
    target: backstay.Store, options: dict[str, Any]
) -> None:
    import_workflow(GOLDEN / SEED, target)
    ran: list[str] = []
    graph, thread = review(ran, **options), target.thread(name(5))
    with pytest.raises(GraphMismatch, match="another program saved it"):
        graph.resume_sync(thread)

    waiting = graph.resume_sync(thread, compatible=True)
    assert (waiting.status, ran) == (Status.INTERRUPTED, [])
    assert waiting.interrupts[0].interrupt.node == "publish"
    done = graph.resume_sync(thread, Approve())

    assert (done.status, ran) == (Status.COMPLETED, ["publish"])
    assert done.path == ("draft", "check", "draft", "check", "publish")
    assert done.steps == 5
    assert done.values["messages"] == [*TALK, {"role": "assistant", "content": "publish: Zürich is a town."}]
    assert done.values["rounds"] == 2


def test_a_rejected_import_runs_nothing(target: backstay.Store) -> None:
    import_workflow(GOLDEN / SEED, target)
    ran: list[str] = []
    graph, thread = review(ran), target.thread(name(5))
    graph.resume_sync(thread, compatible=True)

    assert (graph.resume_sync(thread, Reject("no")).status, ran) == (Status.REJECTED, [])


def test_an_imported_run_before_its_first_node_and_one_that_is_over(target: backstay.Store) -> None:
    import_workflow(GOLDEN / SEED, target)
    ran: list[str] = []
    graph = review(ran)
    graph.resume_sync(target.thread(name(1)), compatible=True)

    assert graph.resume_sync(target.thread(name(1)), Approve()).path == ("draft", "check", "publish")
    with pytest.raises(backstay.InvalidInput, match="is over"):
        graph.resume_sync(target.thread(name(4)), compatible=True)


def test_a_state_key_that_the_graph_does_not_have_is_named_before_anything_runs(target: backstay.Store) -> None:
    import_workflow(GOLDEN / SEED, target)
    ran: list[str] = []

    with pytest.raises(GraphMismatch, match="the stored state has the key 'topic'"):
        review(ran).resume_sync(target.thread(name(2)), compatible=True)
    assert ran == []


# Later versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [LINEAGE, RUNS])
def test_files_of_later_versions_go_in_and_out_unchanged(version: str, target: backstay.Store, tmp_path: Path) -> None:
    """They have local times with nanoseconds, and more fields. The last of them has no pending_action: it is null."""
    report = import_workflow(GOLDEN / version, target)
    export_workflow(target, tmp_path)

    assert (bool(report), report.missing) == (True, ())
    for path in (GOLDEN / version).iterdir():
        assert exact(content(tmp_path / path.name)) == exact({"pending_action": None, **content(path)})
        assert '+08:00"' in (tmp_path / path.name).read_text(encoding="utf-8")


def test_label_tags_and_time_of_a_later_version_are_fields(target: backstay.Store, tmp_path: Path) -> None:
    import_workflow(GOLDEN / LINEAGE, target)
    risky = target.get(name(2, LINEAGE))

    assert risky is not None
    assert (risky.label, risky.tags) == ("before risky operation", ("müde", "risky"))
    assert risky.created_at == FIRST + timedelta(seconds=1, microseconds=123456)
    assert risky.pending_action == {"tool": "publish", "args": {"to": "all"}}
    assert risky.metadata["branch"] == "feature-x"
    assert risky.metadata["parent_checkpoint_id"] == name(1, LINEAGE)
    target.thread(risky.thread_id).tag(risky.id, "seen")
    export_workflow(target, tmp_path)
    written = content(tmp_path / f"{risky.id}.json")
    assert (written["tags"], written["label"]) == (["müde", "risky", "seen"], "before risky operation")


def test_a_run_of_a_later_version_is_one_thread_and_its_fan_out_is_not_skipped(target: backstay.Store) -> None:
    import_workflow(GOLDEN / RUNS, target)
    (thread,) = [meta.thread_id for meta in target.threads()]
    fan_out, before, over = reversed(list(target.thread(thread).history()))

    assert (thread, over.run_id) == ("22222222-0000-4000-8000-00000000000a",) * 2
    assert (fan_out.next_node, fan_out.continuation) == (None, FanOut(("left", "right"), "merge"))
    assert (before.next_node, before.last_node) == ("merge", "right")
    assert (over.is_over, over.label, over.metadata["generation"]) == (True, "finished", 2)
    found = run(StoreCheckpointStore(target).latest(thread))
    assert found is not None
    assert (found.id, found.current_node) == (name(3, RUNS), "__end__")
    assert run(FileCheckpointStore(GOLDEN / RUNS).latest(thread)) == found


def test_an_imported_fan_out_is_resumed_whole_once_each_of_its_nodes_is_approved(
    target: backstay.Store, tmp_path: Path
) -> None:
    shutil.copy(GOLDEN / RUNS / f"{name(1, RUNS)}.json", tmp_path)
    import_workflow(tmp_path, target)
    ran: list[str] = []
    graph = Graph("review", state=Review)
    for each in ("draft", "left", "right", "merge"):
        graph.node(each, noting(each, ran))
    graph.parallel("draft", ["left", "right"], join="merge")
    graph.start("draft")
    graph.end("merge")
    thread = target.thread("22222222-0000-4000-8000-00000000000a")
    waiting = graph.resume_sync(thread, compatible=True)

    assert (sorted(str(each.interrupt.node) for each in waiting.interrupts), ran) == (["left", "right"], [])
    done = graph.resume_sync(thread, {each.id: Approve() for each in waiting.interrupts})
    assert (done.status, sorted(ran[:2]), ran[2:]) == (Status.COMPLETED, ["left", "right"], ["merge"])


def test_a_file_that_a_later_version_claimed_and_lost_is_named(target: backstay.Store, tmp_path: Path) -> None:
    claimed = f"{name(1, RUNS)}.claimed-22222222-0000-4000-8000-00000000000b.claim"
    shutil.copy(GOLDEN / RUNS / f"{name(1, RUNS)}.json", tmp_path / claimed)
    report = import_workflow(tmp_path, target)

    assert [(Path(note.where).name, "rename it" in note.what) for note in report.missing] == [(claimed, True)]


# Our own runs as files --------------------------------------------------------------------------------------------
#
# tests/golden/workflow/exported is an export of the run below that the original program has read with load, list and
# restore_state, and resaved is what it wrote when it saved what it had read. So an export with the same content,
# whatever its ids and times, is one that the original can read.


class Payment(TypedDict, total=False):
    messages: Annotated[list[Any], append]
    log: Annotated[list[Any], append]
    numbers: list[Any]


ASKED = {"tool": "pay", "args": {"amount": 5, "to": "Zoë"}}


def paying(**options: Any) -> Graph:
    graph = Graph("pay", state=Payment, **options)
    graph.node("read", lambda state: {"messages": [{"role": "user", "content": "Pay Zoë."}], "log": ["read"]})
    graph.node("pay", lambda state, ctx: {"log": [ctx.approve("pay", ASKED["args"], prompt="Pay Zoë?")]})
    graph.node("thank", lambda state: {"log": ["thank"]})
    graph.edge("read", "pay")
    graph.edge("pay", "thank")
    graph.start("read")
    graph.end("thank")
    return graph


def run_to_approval(store: backstay.Store) -> backstay.Thread:
    thread = store.thread("customer-42")
    paying(before=["pay"]).run_sync(thread, {"numbers": [1e-7, -0.0, 1e16, 2**64 - 1]})
    paying(before=["pay"]).resume_sync(thread, Approve())
    return thread


def files_of(folder: Path) -> list[dict[str, Any]]:
    """Return the files of a directory, oldest first, with ids and times that differ in each run replaced by numbers."""
    found = sorted((content(path) for path in folder.iterdir()), key=operator.itemgetter("created_at"))
    ids = {each["id"]: f"id-{number}" for number, each in enumerate(found)}
    for each in found:
        each["id"], each["created_at"] = ids[each["id"]], ""
        if "parent_checkpoint_id" in each:
            each["parent_checkpoint_id"] = ids[each["parent_checkpoint_id"]]
        if "run_id" in each:
            each["run_id"] = ""
        if each.get("interrupt"):
            each["interrupt"]["id"] = each["interrupt"]["id"].rpartition(":")[0]
    return found


def test_an_export_is_what_the_original_has_read(target: backstay.Store, tmp_path: Path) -> None:
    run_to_approval(target)
    report = export_workflow(target, tmp_path)
    now = files_of(tmp_path)

    assert report.checkpoints == 3
    assert exact(now) == exact(files_of(GOLDEN / "exported"))
    known = set(given(1))
    resaved = files_of(GOLDEN / "resaved")
    assert [set(each) for each in resaved] == [known] * 3
    assert exact(resaved) == exact([{key: each[key] for key in known} for each in now])


def test_an_export_has_state_messages_node_pending_action_and_question(target: backstay.Store, tmp_path: Path) -> None:
    thread = run_to_approval(target)
    export_workflow(target, tmp_path)
    listed = run(FileCheckpointStore(tmp_path).list())
    files = [run(FileCheckpointStore(tmp_path).load(info.id)) for info in reversed(listed)]

    shown = [(each.interrupt_type.value, each.current_node, each.path, each.step_count) for each in files if each]
    assert shown == [
        ("beforenode", "read", [], 0),  # the input: no pause, but nothing ran yet
        ("beforenode", "pay", ["read"], 1),
        ("toolapproval", "pay", ["read"], 1),
    ]
    newest = files[-1]
    assert newest is not None
    assert (newest.graph_name, newest.pending_action) == ("pay", ASKED)
    state = newest.restore_state()
    assert (state.messages(), state.current_node) == ([{"role": "user", "content": "Pay Zoë."}], "read")
    assert (state.raw("log"), exact(state.raw("numbers"))) == (["read"], exact([1e-7, -0.0, 1e16, 2**64 - 1]))
    (record,) = thread.interrupts()
    assert newest.extra["interrupt"] == {"id": record.id, "node": "pay", "payload": ASKED, "prompt": "Pay Zoë?"}
    first = files[0]
    assert first is not None
    assert first.extra["interrupt"] is None  # so an import knows that it was no pause


def test_an_export_comes_back_with_its_questions_and_goes_out_again_as_it_was(
    target: backstay.Store, tmp_path: Path
) -> None:
    run_to_approval(target)
    export_workflow(target, tmp_path / "out")
    with backstay.open("memory:") as other:
        assert import_workflow(tmp_path / "out", other)
        (thread,) = [other.thread(meta.thread_id) for meta in other.threads()]
        start, before, call = reversed(list(thread.history()))
        again = export_workflow(other, tmp_path / "again")

        assert start.interrupt is None
        assert before.interrupt is not None
        assert (before.interrupt.kind, before.interrupt.prompt) == ("beforenode", "Run pay?")
        assert call.interrupt is not None
        assert (call.interrupt.payload, call.resume_hint) == (ASKED, "Pay Zoë?")
        whole = other.get(call.id)
        assert whole is not None
        assert (whole.pending_action, whole.state["log"], whole.messages[0]["role"]) == (ASKED, ["read"], "user")
        assert again.notes == ()
        graph = paying()
        assert graph.resume_sync(thread, compatible=True).status is Status.INTERRUPTED
        result = graph.resume_sync(thread, Approve())  # to run the node, which then asks for the tool
        assert result.interrupts[0].interrupt.payload == ASKED
        assert graph.resume_sync(thread, Approve()).values["log"] == ["read", ASKED["args"], "thank"]
    for path in (tmp_path / "out").iterdir():
        assert content(tmp_path / "again" / path.name) == content(path)


def exported(store: backstay.Store, base: Path) -> tuple[dict[str, Any], str]:
    """Export a store; return the file of the newest checkpoint, and what the report says about it."""
    report = export_workflow(store, base)
    (meta,) = store.threads()
    notes = [note.what for note in report.notes if note.checkpoint == meta.id]
    return content(base / f"{meta.id}.json"), "; ".join(notes)


def test_a_checkpoint_that_is_no_pause_is_one_after_a_node_with_the_next_node(
    target: backstay.Store, tmp_path: Path
) -> None:
    thread = run_to_approval(target)
    paying(before=["pay"]).resume_sync(thread, Approve())
    plain, _ = exported(target, tmp_path)
    files = sorted((content(path) for path in tmp_path.iterdir()), key=operator.itemgetter("created_at"))

    assert [(each["interrupt_type"], each["current_node"], each["pending_action"]) for each in files[-2:]] == [
        ("afternode", "thank", None),
        ("afternode", "__end__", None),
    ]
    assert "userrequest" not in {each["interrupt_type"] for each in files}
    assert (plain["continuation"], plain["state_snapshot"]["current_node"]) == ({"kind": "end"}, "thank")


def an_edge(graph: Graph) -> None:
    graph.node("pay", lambda state: {})
    graph.edge("read", "pay")
    graph.end("pay")


def the_end(graph: Graph) -> None:
    graph.end("read")


def a_choice(graph: Graph) -> None:
    an_edge(graph)
    graph._edges.clear()
    graph.choose("read", lambda state: "pay", {"pay": "pay", "stop": "__end__"})
    graph.end("pay")


def a_fan_out(graph: Graph) -> None:
    for each in ("left", "right", "last"):
        graph.node(each, lambda state: {})
    graph.parallel("read", ["left", "right"], join="last")
    graph.end("last")


@pytest.mark.parametrize(
    ("leave", "node", "lost", "continuation"),
    [
        (an_edge, "pay", "", None),
        (the_end, "__end__", "", None),
        (a_choice, "", ", the next node", None),
        (
            a_fan_out,
            "",
            ", the nodes that run next in parallel: left, right",
            {"kind": "fan_out", "targets": ["left", "right"], "then": "last"},
        ),
    ],
)
def test_a_pause_after_a_node_names_the_next_one_if_it_is_known(
    leave: Callable[[Graph], None], node: str, lost: str, continuation: object, target: backstay.Store, tmp_path: Path
) -> None:
    """Otherwise the node is empty, so the old system refuses to resume it and does not skip anything."""
    graph = Graph("g", state=Payment, after=["read"])
    graph.node("read", lambda state: {})
    graph.start("read")
    leave(graph)
    graph.run_sync(target.thread("t"))
    plain, notes = exported(target, tmp_path)

    shown = (plain["interrupt_type"], plain["current_node"], plain.get("continuation"))
    assert shown == ("afternode", node, continuation)
    assert notes == f"the file cannot hold: graph_hash, frames, run{lost}"


@pytest.mark.parametrize(
    "message",
    [
        "text",
        {"role": 1, "content": "x"},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": [{"type": "tool_use", "id": "t"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "tool", "content": "x", "name": 5},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": {"id": "c"}},
    ],
    ids=repr,
)
def test_messages_that_the_original_cannot_read_do_not_spoil_the_rest(
    message: object, target: backstay.Store, tmp_path: Path
) -> None:
    """One such message in its place, and restore_state of the original fails, or changes it."""
    talk = [TALK[0], message]
    target.thread("t").save({"messages": talk, "n": 1})
    plain, notes = exported(target, tmp_path)

    assert plain["state_snapshot"] == {"values": {"n": 1, "messages": talk}, "messages": [], "current_node": None}
    assert "messages that the old system cannot read" in notes


def test_messages_that_the_original_wrote_are_messages(target: backstay.Store, tmp_path: Path) -> None:
    target.thread("t").save({"messages": [*MESSAGES, {"role": "assistant", "content": None, "thought": "x"}]})
    plain, _ = exported(target, tmp_path)

    assert plain["state_snapshot"]["messages"][:-1] == MESSAGES
    assert plain["state_snapshot"]["values"] == {}


def test_everything_that_a_file_has_no_place_for_is_named(target: backstay.Store, tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(124):  # with the three levels around it, this is the last that the original can load
        deep = [deep]
    thread = target.thread("t")
    thread.save(
        {"big": 2**64, "deep": deep, "deeper": [deep], "pending_action": {"tool": "x"}},
        id="c1",
        iteration=1,
        tokens_used=2,
        cost_estimate=0.5,
        summary="s",
        metadata={"path": 1},
        label="kept",
        tags=["kept"],
        next_node="n",
    )
    thread.fork("c1", branch="other")
    with thread.lease(ttl=30):
        thread.effect("mail", lambda: None)
    thread.save({"when": MOMENT}, id="c2")
    report = export_workflow(target, tmp_path)
    plain = content(tmp_path / "c1.json")

    assert (plain["pending_action"], plain["label"], plain["tags"]) == ({"tool": "x"}, "kept", ["kept"])
    assert plain["state_snapshot"]["values"] == {"big": 2**64, "deep": deep, "deeper": [deep]}
    notes = [(note.checkpoint, note.what) for note in report.notes]
    (fork,) = [each for each in tmp_path.iterdir() if each.name != "c1.json"]
    assert content(fork)["branch"] == "other"
    shown = dict(notes)
    assert shown["c1"].startswith(
        "the file cannot hold: iteration, tokens_used, cost_estimate, summary, metadata, "
        "state_snapshot.values.big: a whole number of more than 64 bits, which the old system rounds, "
        "state_snapshot.values.deeper[0]"
    )
    assert shown["c1"].endswith("nested more than 127 levels deep, so the old system cannot load it")
    assert [(note.checkpoint, note.what) for note in report.left_out] == [
        ("c2", "state_snapshot.values.when is datetime, which JSON does not have")
    ]
    assert shown[None] == "the files cannot hold effects: 1 of this thread are left out"


def test_a_payload_that_json_does_not_have_leaves_the_rest_of_the_question(
    target: backstay.Store, tmp_path: Path
) -> None:
    graph = Graph("g", state=Payment)
    graph.node("read", lambda state, ctx: {"log": [ctx.ask({"when": MOMENT}, prompt="When?")]})
    graph.start("read")
    graph.end("read")
    graph.run_sync(target.thread("t"))
    plain, notes = exported(target, tmp_path)

    assert (plain["interrupt"]["payload"], plain["interrupt"]["prompt"]) == (None, "When?")
    assert plain["interrupt_type"] == "userrequest"
    assert notes.endswith("the interrupt's payload.when is datetime, which JSON does not have")


@pytest.mark.parametrize("url", ["memory:", "a.db", "dir:files"])
def test_the_checkpoints_of_a_graph_are_loaded_by_id_and_listed_in_any_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with backstay.open(url) as store:
        thread = run_to_approval(store)
        other = Graph("other")
        other.node("only", lambda state: {})
        other.start("only")
        other.end("only")
        other.run_sync(store.thread("o"), {}).raise_for_status()
        listed = list(thread.history())

        assert [meta.id for meta in store.threads(graph="pay")] == [listed[0].id]
        assert [pending.thread_id for pending in paying(before=["pay"]).pending(store)] == [thread.id]
        assert [(meta.next_node, meta.interrupt and meta.interrupt.kind.value) for meta in listed] == [
            ("pay", "toolapproval"),
            ("pay", "beforenode"),
            ("read", None),
        ]
        found = store.get(listed[1].id)
        assert found is not None
        assert (found.path, found.state["log"], found.next_node) == (("read",), ["read"], "pay")
        assert store.get("unknown") is None
