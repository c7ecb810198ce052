"""Deleting, copying, pruning LangGraph's threads, the history of its delta channels, and our own tools on them.

Whatever is deleted, what stays is what it was: the same values, the same delta channels, the same pending interrupts,
and a store that verifies clean.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Command, interrupt

import backstay
from backstay.langgraph import BackstaySaver
from support.langgraph.face import Face, Line, at, id_of, new_id, opened, spread
from support.langgraph.graphs import Stage, chat, delta_graph, nest, say, seen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    spread(metafunc)


@pytest.fixture(scope="module")
def saver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackstaySaver]:
    with opened(request.param, request, tmp_path_factory.mktemp("upkeep")) as saver:
        yield saver


@pytest.fixture
def face(saver: BackstaySaver, verbs: str) -> Iterator[Face]:
    with asyncio.Runner() as runner:
        yield Face(saver, runner if verbs == "async" else None)


@pytest.fixture
def thread(saver: BackstaySaver) -> Iterator[str]:
    name = f"thread-{uuid.uuid4().hex}"
    yield name
    for each in (name, copy_of(name)):
        report = saver.store.thread(each).check()
        assert report, str(report)


def copy_of(thread: str) -> str:
    return thread + "-copy"


def written(face: Face, thread: str) -> list[Line]:
    """Write a thread with three namespaces, a fork in the first, and pending writes everywhere."""
    lines = [Line(face, thread, ns) for ns in ("", "child:1", "x" * 300)]
    for line in lines:
        for number in range(4):
            values = {"list": [f"{line.ns[:5]} {n}" for n in range(number + 1)], "static": "s" * 500}
            line.put(values, metadata={"run_id": f"{thread}-{number % 2}"})
            face.put_writes(line.config, [("list", number)], f"task-{number}", "path")
    root = lines[0]
    root.back_to(root.configs[1])
    root.put({"list": ["forked"], "static": "s" * 500}, metadata={"run_id": f"{thread}-fork"})
    return lines


def told(found: list[CheckpointTuple]) -> list[tuple[Any, ...]]:
    """Return all of a thread's checkpoints, without the thread's name."""
    return [
        (
            item.config["configurable"]["checkpoint_ns"],
            id_of(item.config),
            item.checkpoint,
            item.metadata,
            id_of(item.parent_config),
            item.pending_writes,
        )
        for item in found
    ]


# Deleting ---------------------------------------------------------------------------------------------------------


def test_a_deleted_thread_leaves_nothing(face: Face, thread: str) -> None:
    lines = written(face, thread)
    other = Line(face, copy_of(thread))
    other.put({"n": 1})
    face.delete_thread(thread)

    assert face.listed(at(thread)) == []
    for line in lines:
        assert all(face.get_tuple(config) is None for config in line.configs)
        assert face.get_tuple(at(thread, line.ns)) is None
    assert other.values() == {"n": 1}
    face.delete_thread(thread)
    again = Line(face, thread)
    again.put({"list": ["new"]}, id=id_of(lines[0].configs[0]))

    assert again.values() == {"list": ["new"]}
    assert face.read(again.config).pending_writes == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_fresh_store_has_nothing_to_delete(url: str, is_async: bool) -> None:
    """LangGraph's own SQLite saver fails here: its tables are not made yet."""
    with BackstaySaver(url) as fresh, asyncio.Runner() as runner:
        face = Face(fresh, runner if is_async else None)
        face.delete_thread("nobody")
        face.delete_for_runs(["no run"])
        face.prune(["nobody"])
        face.prune(["nobody"], strategy="delete")
        face.copy_thread("nobody", "somebody")

        assert face.listed(None) == []
        assert face.get_tuple(at("somebody")) is None


def test_the_checkpoints_of_runs_go_and_others_stay_what_they_are(face: Face, thread: str) -> None:
    lines = written(face, thread)
    before = told(face.listed(at(thread)))
    face.delete_for_runs([f"{thread}-0", "no such run"])
    after = told(face.listed(at(thread)))

    assert len(after) == len(before) - 6
    assert {item[3]["run_id"] for item in after} == {f"{thread}-1", f"{thread}-fork"}
    left = {(item[0], item[1]): item for item in before if item[3]["run_id"] != f"{thread}-0"}
    assert {(item[0], item[1]): item[2] for item in after} == {key: item[2] for key, item in left.items()}
    assert [item[5] for item in after] == [item[5] for item in left.values()]
    line = lines[1]
    line.put({"list": ["on"], "static": "t"})

    assert line.values() == {"list": ["on"], "static": "t"}


# Copying ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_equal_and_independent(face: Face, thread: str) -> None:
    lines = written(face, thread)
    face.copy_thread(thread, copy_of(thread))
    expected = told(face.listed(at(thread)))

    assert told(face.listed(at(copy_of(thread)))) == expected
    assert told(face.listed(at(thread))) == expected
    there = Line(face, copy_of(thread), "child:1")
    there.back_to(at(copy_of(thread), "child:1"))
    there.put({"list": ["only here"]})
    face.put_writes(at(copy_of(thread), "", id_of(lines[0].configs[0])), [("list", "only here")], "task")

    assert told(face.listed(at(thread))) == expected
    expected_copy = told(face.listed(at(copy_of(thread))))
    face.delete_thread(thread)

    assert told(face.listed(at(copy_of(thread)))) == expected_copy
    assert face.saver.store.thread(copy_of(thread)).check()  # type: ignore[attr-defined]
    there.put({"list": ["only here", "more"]})

    assert there.values() == {"list": ["only here", "more"]}


def test_a_copy_is_pruned_as_its_source_is(face: Face, thread: str) -> None:
    lines = written(face, thread)
    face.copy_thread(thread, copy_of(thread))
    forked = id_of(lines[0].configs[1])
    for name in (thread, copy_of(thread)):
        face.prune([name])

    assert told(face.listed(at(copy_of(thread)))) == told(face.listed(at(thread)))
    assert forked not in {item[1] for item in told(face.listed(at(copy_of(thread))))}


def test_a_copy_made_twice_is_one_copy(face: Face, thread: str) -> None:
    written(face, thread)
    for _ in range(2):
        face.copy_thread(thread, copy_of(thread))

    assert told(face.listed(at(copy_of(thread)))) == told(face.listed(at(thread)))


def test_a_copy_onto_another_thread_is_refused_and_changes_neither(face: Face, thread: str) -> None:
    written(face, thread)
    other = Line(face, copy_of(thread))
    other.put({"mine": 1})
    before = told(face.listed(at(thread)))
    with pytest.raises(backstay.Conflict):
        face.copy_thread(thread, copy_of(thread))

    assert told(face.listed(at(copy_of(thread)))) == [
        ("", id_of(other.config), face.read(other.config).checkpoint, face.read(other.config).metadata, None, [])
    ]
    assert told(face.listed(at(thread))) == before


def test_a_copied_graph_goes_on(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = nest(2, lambda state: {"notes": [interrupt("yes?")]}).compile(checkpointer=saver)
    stage.run(graph, {"notes": ["in"], "count": 0})
    saver.copy_thread(thread, copy_of(thread))
    asked = seen(stage.state(graph, subgraphs=True))
    results = []
    for name in (thread, copy_of(thread)):
        stage.thread = name
        assert seen(stage.state(graph, subgraphs=True)) == asked
        results.append(stage.run(graph, Command(resume=name)))

    assert [result["notes"][-1] for result in results] == [thread, copy_of(thread)]
    assert results[0]["count"] == results[1]["count"] == 2


# Pruning ----------------------------------------------------------------------------------------------------------


def test_keep_latest_keeps_the_newest_of_each_namespace(face: Face, thread: str) -> None:
    lines = written(face, thread)
    newest = {line.ns: face.read(at(thread, line.ns)) for line in lines}
    face.prune([thread])

    left = face.listed(at(thread))
    assert {item.config["configurable"]["checkpoint_ns"] for item in left} == set(newest)
    assert len(left) == len(lines)
    for line in lines:
        found = face.read(at(thread, line.ns))
        assert (found.checkpoint, found.metadata, found.pending_writes) == (
            newest[line.ns].checkpoint,
            newest[line.ns].metadata,
            newest[line.ns].pending_writes,
        )
        assert all(face.get_tuple(config) is None for config in line.configs if id_of(config) != id_of(found.config))
        line.back_to(found.config)
        line.put({"list": ["after", "pruning"]})

        assert line.values() == {"list": ["after", "pruning"]}
    face.prune([thread, "nobody", thread], strategy="keep_latest")

    assert len(face.listed(at(thread))) == len(lines)


def test_prune_can_delete_everything(face: Face, thread: str) -> None:
    written(face, thread)
    other = Line(face, copy_of(thread))
    other.put({"n": 1})
    face.prune([thread], strategy="delete")

    assert face.listed(at(thread)) == []
    assert other.values() == {"n": 1}
    with pytest.raises(ValueError, match="strategy"):
        face.prune([thread], strategy="all of it")


def states(stage: Stage, graph: Any) -> dict[str, Any]:
    """Return what a graph knows of its thread now, subgraphs included, without history."""
    told = seen(stage.state(graph, subgraphs=True))
    del told["parent"]
    return told


@pytest.mark.parametrize("prunes", [1, 3])
def test_pruning_does_not_change_what_delta_channels_hold(saver: BackstaySaver, thread: str, prunes: int) -> None:
    """PostgresSaver refuses to prune such threads, because this goes wrong there."""
    stage = Stage(saver)
    stage.thread = thread
    graph = delta_graph(saver)
    for _ in range(prunes):
        for number in range(4):
            stage.run(graph, {"items": [f"in {number}"], "rare": [number]})
            before = states(stage, graph)
            saver.prune([thread])

            assert states(stage, graph) == before
            assert len(stage.history(graph)) == 1
    assert stage.run(graph, {"items": ["last"]})["rare"] == [*before["values"]["rare"], "three", "two"]


def test_pruning_keeps_a_fork_of_delta_channels_apart(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = delta_graph(saver)
    for number in range(3):
        stage.run(graph, {"items": [f"in {number}"], "rare": [number]})
    forked = stage.update(graph, stage.history(graph)[5].config, {"items": ["forked"], "rare": ["forked"]}, "one")
    stage.run(graph, None, forked)
    before = states(stage, graph)
    saver.prune([thread])

    assert states(stage, graph) == before
    assert "forked" in before["values"]["rare"]


def test_delta_channels_outlive_another_savers_upkeep(saver: BackstaySaver, thread: str) -> None:
    """Somebody else prunes, copies and deletes while this saver still knows what it has stored."""
    other, stage = BackstaySaver(saver.store), Stage(saver)
    stage.thread = thread
    graph = delta_graph(saver)
    for number in range(3):
        config = {"configurable": {"thread_id": thread}, "metadata": {"run_id": f"{thread}-{number}"}}
        stage.run(graph, {"items": [number], "rare": [number]}, config)  # type: ignore[arg-type]  # a config is a dict
    of_run = [item.values for item in stage.history(graph) if (item.metadata or {})["run_id"] == f"{thread}-1"]
    other.delete_for_runs([f"{thread}-2"])

    assert stage.state(graph).values == of_run[0]
    other.delete_for_runs([f"{thread}-0"])

    assert [item.values for item in stage.history(graph)] == of_run
    other.prune([thread])
    other.copy_thread(thread, copy_of(thread))
    results = [stage.run(graph, {"items": ["more"]})]
    other.delete_thread(thread)
    stage.thread = copy_of(thread)

    assert stage.state(graph).values == of_run[0]
    results.append(stage.run(graph, {"items": ["more"]}))
    assert results[0] == results[1]
    assert len(results[0]["rare"]) == len(of_run[0]["rare"]) + 2
    other.close()


def test_pruning_keeps_questions_that_wait(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = nest(2, lambda state: {"notes": [interrupt("one?"), interrupt("two?")]}).compile(checkpointer=saver)
    for number in range(2):
        stage.run(graph, {"notes": [f"in {number}"], "count": 0})
        saver.prune([thread])
        stage.run(graph, Command(resume="first"))
        before = states(stage, graph)
        saver.prune([thread])

        assert states(stage, graph) == before
        assert [item["interrupts"] for item in before["tasks"]] == [[("interrupt", "two?")]]
        assert stage.run(graph, Command(resume="second"))["notes"][-2:] == ["first", "second"]
    assert stage.state(graph).next == ()


def test_pruning_plain_messages_keeps_the_conversation(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = chat(saver)
    for number in range(4):
        stage.run(graph, say(f"word {number}", f"in-{number}"))
    before = states(stage, graph)
    saver.prune([thread])

    assert states(stage, graph) == before
    assert len(stage.run(graph, say("more", "in-9"))["messages"]) == 10


# Delta channels ---------------------------------------------------------------------------------------------------


def delta_line(face: Face, thread: str, holding: dict[int, Any], steps: int, channel: str = "ch") -> Line:
    """Write a chain in which only some steps hold the channel's value; each step has a write of its own."""
    line = Line(face, thread)
    for step in range(steps):
        line.put({"step": step, **({channel: holding[step]} if step in holding else {})}, changed=["step", channel])
        face.put_writes(line.config, [(channel, f"w{step}"), ("other", "noise")], f"task-{step}", "path")
    return line


def history(line: Line, place: int, *channels: str) -> dict[str, Any]:
    found = line.face.delta_history(line.configs[place], channels or ("ch",))
    return {channel: {**entry, "writes": [write[2] for write in entry["writes"]]} for channel, entry in found.items()}


def test_the_writes_since_the_nearest_value_come_oldest_first(face: Face, thread: str) -> None:
    line = delta_line(face, thread, {0: _DeltaSnapshot(["zero"]), 3: _DeltaSnapshot(["three"])}, 6)

    assert history(line, 5) == {"ch": {"seed": _DeltaSnapshot(["three"]), "writes": ["w3", "w4"]}}
    assert history(line, 3) == {"ch": {"seed": _DeltaSnapshot(["zero"]), "writes": ["w0", "w1", "w2"]}}
    assert history(line, 1) == {"ch": {"seed": _DeltaSnapshot(["zero"]), "writes": ["w0"]}}
    assert history(line, 0) == {"ch": {"writes": []}}
    assert face.delta_history(line.configs[4], ["ch"])["ch"]["writes"] == [("task-3", "ch", "w3")]


def test_the_newest_is_meant_if_no_checkpoint_is_named(face: Face, thread: str) -> None:
    line = delta_line(face, thread, {1: _DeltaSnapshot([])}, 4)

    assert face.delta_history(at(thread), ["ch"]) == face.delta_history(line.configs[-1], ["ch"])
    assert face.delta_history(at(copy_of(thread)), ["ch"]) == {"ch": {"writes": []}}
    assert face.delta_history(at(thread, "", new_id()), ["ch"]) == {"ch": {"writes": []}}


def test_a_walk_to_the_beginning_finds_no_seed(face: Face, thread: str) -> None:
    assert history(delta_line(face, thread, {}, 5), 4) == {"ch": {"writes": ["w0", "w1", "w2", "w3"]}}


@pytest.mark.parametrize("plain", [["old", "list"], None, 0, "", []])
def test_a_plain_value_from_before_the_channel_was_one_is_a_seed(face: Face, thread: str, plain: object) -> None:
    assert history(delta_line(face, thread, {1: plain}, 4), 3) == {"ch": {"seed": plain, "writes": ["w1", "w2"]}}


def test_each_channel_ends_its_own_walk(face: Face, thread: str) -> None:
    line = Line(face, thread)
    for step in range(5):
        held = {1: {"a": _DeltaSnapshot(["A"])}, 3: {"b": _DeltaSnapshot(["B"])}}.get(step, {})
        line.put({"step": step, **held}, changed=["step", "a", "b", "c"])
        face.put_writes(line.config, [("a", f"a{step}"), ("b", f"b{step}"), ("b", f"b{step}+")], "task")

    assert history(line, 4, "a", "b", "c") == {
        "a": {"seed": _DeltaSnapshot(["A"]), "writes": ["a1", "a2", "a3"]},
        "b": {"seed": _DeltaSnapshot(["B"]), "writes": ["b3", "b3+"]},
        "c": {"writes": []},
    }
    assert face.delta_history(line.config, []) == {}


def test_writes_of_one_step_come_in_the_order_of_its_tasks(face: Face, thread: str) -> None:
    line = Line(face, thread)
    line.put({})
    for task, path in (("a", "~z"), ("z", "~a"), ("m", ""), ("b", "~z")):
        face.put_writes(line.config, [("ch", f"{task}{n}") for n in range(11)], task, path)
    line.put({})

    assert history(line, 1)["ch"]["writes"] == [f"{task}{n}" for task in "mzab" for n in range(11)]


def test_a_fork_has_the_writes_of_its_own_ancestors(face: Face, thread: str) -> None:
    line = delta_line(face, thread, {0: _DeltaSnapshot([0])}, 4)
    line.back_to(line.configs[1])
    line.put({"step": "fork"}, changed=["step", "ch"])
    face.put_writes(line.config, [("ch", "fork")], "task")
    line.put({"step": "after"}, changed=["step", "ch"])

    assert history(line, -1)["ch"]["writes"] == ["w0", "w1", "fork"]
    assert history(line, 3)["ch"]["writes"] == ["w0", "w1", "w2"]


def test_a_long_walk_and_one_of_another_namespace(face: Face, thread: str) -> None:
    line = delta_line(face, thread, {}, 130)
    inner = Line(face, thread, "inner")
    inner.put({})
    face.put_writes(inner.config, [("ch", "inner")], "task")
    inner.put({})

    assert history(line, -1)["ch"]["writes"] == [f"w{step}" for step in range(129)]
    assert history(inner, -1)["ch"]["writes"] == ["inner"]


@pytest.mark.parametrize("deleted", ["latest", "run"])
def test_deleting_ancestors_does_not_change_the_history(face: Face, thread: str, deleted: str) -> None:
    line = Line(face, thread)
    for step in range(6):
        values = {"ch": _DeltaSnapshot(["one"])} if step == 1 else {}
        counters = {} if step == 1 else {"counters_since_delta_snapshot": {"ch": [step, step]}}
        line.put(values, changed=["ch"], metadata={"run_id": f"{thread}-{step < 4}", **counters})
        face.put_writes(line.config, [("ch", f"w{step}")], f"task-{step}", "path")
    before = [face.delta_history(config, ["ch"]) for config in line.configs]
    if deleted == "latest":
        face.prune([thread])
    else:
        face.delete_for_runs([f"{thread}-True"])
    left = range(5, 6) if deleted == "latest" else range(4, 6)

    assert len(face.listed(at(thread))) == len(left)
    for step in left:
        assert face.delta_history(line.configs[step], ["ch"]) == before[step]
        assert face.read(line.configs[step]).pending_writes == [(f"task-{step}", "ch", f"w{step}")]
    line.put({}, changed=["ch"], metadata={"counters_since_delta_snapshot": {"ch": [6, 6]}})

    assert history(line, -1)["ch"]["writes"] == ["w1", "w2", "w3", "w4", "w5"]


# Our own tools on LangGraph's threads -----------------------------------------------------------------------------


def test_the_stores_own_tools_work_on_a_graphs_thread(saver: BackstaySaver, thread: str) -> None:
    store, stage = saver.store, Stage(saver)
    stage.thread = thread
    graph = chat(saver)
    for number in range(5):
        stage.run(graph, say(f"word {number}", f"in-{number}"))
    handle = store.thread(thread)
    metas = list(handle.history())

    assert thread in {meta.thread_id for meta in store.threads()}
    assert len(metas) == len(stage.history(graph)) == 15
    assert handle.stats().checkpoints == 15
    assert handle.check()
    newest = handle.latest()
    assert newest is not None
    assert "messages" in newest.state
    older = store.get(metas[4].id)
    assert older is not None
    assert len(backstay.diff(older, newest)) > 0
    handle.tag(metas[10], "good")
    assert [meta.id for meta in handle.history(tag="good")] == [metas[10].id]


@pytest.mark.parametrize("verb", ["rewind", "branch", "thread"])
def test_the_graph_goes_on_from_where_our_own_verbs_lead(saver: BackstaySaver, thread: str, verb: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = chat(saver)
    for number in range(3):
        stage.run(graph, say(f"word {number}", f"in-{number}"))
    handle = saver.store.thread(thread)
    handle.latest()
    old = list(handle.history())[3]
    if verb == "rewind":
        handle.rewind(old.id)
    elif verb == "branch":
        handle.fork(old.id, branch="by-hand")
    else:
        handle.fork(old.id, to=copy_of(thread))
        stage.thread = copy_of(thread)
    result = stage.run(graph, say("after", "in-9"))["messages"]

    expected = ["word 0", "word 0, you say?", "word 1", "word 1, you say?", "after", "after, you say?"]
    assert [message.content for message in result] == expected
    assert stage.state(graph).values["messages"] == result


def test_keep_rules_prune_a_graphs_thread(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph, delta = chat(saver), delta_graph(saver)
    for number in range(5):
        stage.run(graph, say(f"word {number}", f"in-{number}"))
    before, history = states(stage, graph), stage.history(graph)
    pruned = saver.store.thread(thread).prune(backstay.Keep(last=3))

    assert len(pruned.checkpoints) == 12
    assert states(stage, graph) == before
    assert [item.values for item in stage.history(graph)] == [item.values for item in history[:3]]
    stage.thread = copy_of(thread)
    for number in range(4):
        stage.run(delta, {"items": [number], "rare": [number]})
    history = stage.history(delta)
    saver.retain(backstay.Keep(last=2), thread_id=stage.thread)

    assert [item.values for item in stage.history(delta)] == [item.values for item in history[:2]]


def test_asynchronous_retention_does_the_same(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = delta_graph(saver)
    for number in range(4):
        stage.run(graph, {"items": [number], "rare": [number]})
    before = states(stage, graph)
    plan = asyncio.run(saver.aretain(backstay.Keep(last=1), thread_id=thread, dry_run=True))

    assert len(stage.history(graph)) == 16
    done = asyncio.run(saver.aretain(backstay.Keep(last=1), thread_id=thread))
    assert sorted(done.checkpoints) == sorted(plan.checkpoints)
    assert len(stage.history(graph)) == 1
    assert states(stage, graph) == before


@pytest.mark.parametrize("way", ["prune", "store.prune", "delete_before"])
def test_rules_of_the_store_spare_what_channels_are_rebuilt_from(saver: BackstaySaver, thread: str, way: str) -> None:
    """Values that are kept as writes are in the ancestors: a rule that knows nothing of graphs must leave those."""
    stage = Stage(saver)
    stage.thread = thread
    graph = delta_graph(saver)
    for number in range(4):
        stage.run(graph, {"items": [number], "rare": [number]})
    before = states(stage, graph)
    ours = saver.store.thread(thread)
    if way == "prune":
        ours.prune(backstay.Keep(last=1))
    elif way == "store.prune":
        saver.store.prune(backstay.Keep(last=1))
    else:
        ours.delete_before(10_000)

    assert states(stage, graph) == before


def test_a_diff_and_the_list_of_questions_are_the_same_awaited(saver: BackstaySaver, thread: str) -> None:
    stage = Stage(saver)
    stage.thread = thread
    graph = chat(saver)
    for word in ("one", "two"):
        stage.run(graph, say(word, f"in-{word}"))
    newest, *_, oldest = [saver.config_of(meta) for meta in saver.store.thread(thread).history()]

    diff = saver.diff(oldest, newest)

    assert "two" in str(diff.patch)
    assert asyncio.run(saver.adiff(oldest, newest)) == diff
    assert not saver.diff(newest, newest)
    assert asyncio.run(saver.ainterrupts(thread)) == saver.interrupts(thread) == []
