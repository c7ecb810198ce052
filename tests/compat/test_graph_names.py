"""The names of the graph runtime: ids, a checkpoint that projects and restores, policies, sinks, errors."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import threading
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.compat import graph as face
from backstay.compat.graph import (
    CheckpointBlobStore,
    CheckpointId,
    CheckpointPolicy,
    Frame,
    FrameStack,
    GraphCheckpoint,
    JsonCheckpointCodec,
    MemorySink,
    NodeId,
    NoopCheckpointSink,
    RetentionPolicy,
    TraceId,
    TriggerPolicy,
    TypedCheckpointStore,
)
from backstay.engine.sinks import check_sink
from backstay.engine.triggers import Trigger
from backstay.errors import Corrupted, EncodeError, GraphMismatch, InvalidInput, NodeFailed, NotFound, StoreError
from backstay.model.frame import End, NextNode

HASH = 0xDEADBEEF12345678


@dataclass
class Agent:
    """A state with parts that exist only at run time."""

    messages: list[str]
    lock: Any = field(default_factory=threading.Lock)
    cache: dict[str, str] = field(default_factory=dict)

    def snapshot(self) -> dict[str, Any]:
        return {"messages": list(self.messages)}

    @classmethod
    def restore(cls, stored: Mapping[str, Any]) -> Agent:
        return cls(list(stored["messages"]), cache={"restored": "yes"})


def two_nodes(**options: Any) -> Graph:
    """Return a -> b; only a changes the state."""
    graph = Graph("test", **options)
    graph.node("a", lambda state: {"n": state.get("n", 0) + 1})
    graph.node("b", lambda state: None)
    graph.edge("a", "b")
    graph.start("a")
    graph.end("b")
    return graph


def test_the_names_are_sorted_and_the_engine_has_the_same_objects() -> None:
    assert face.__all__ == sorted(face.__all__)
    assert face.Frame is type(two_nodes().run_sync(None, {}, sink=(sink := MemorySink())) and sink.frames[0])
    assert check_sink(NoopCheckpointSink())


# Ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CheckpointId, TraceId])
def test_an_id_is_a_uuid_that_prints_compares_and_is_stored_as_its_bare_text(kind: type[Any]) -> None:
    bare = "0b5e55ed-0000-4000-8000-00000000000a"
    made = kind(uuid.UUID(bare))

    assert kind(bare.upper()) == kind(f"{{{bare}}}") == kind(bare.replace("-", "")) == made
    assert (str(made), f"{made}", json.dumps(made)) == (bare, bare, f'"{bare}"')
    assert type(str(made)) is str
    assert {made: 1}[kind(bare)] == 1
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert (uuid.UUID(kind()).version, kind() == kind()) == (4, False)
    for wrong in ("", "cp-1", bare + "0", 7):
        with pytest.raises(InvalidInput, match=f"a {kind.__name__} must be a UUID"):
            kind(wrong)


def test_a_node_id_is_text_that_compares_prints_and_is_stored_as_itself() -> None:
    made = NodeId("Prüfen/审查")

    assert made == "Prüfen/审查"
    assert made != NodeId("prüfen/审查")
    assert (str(made), json.loads(json.dumps(made)), pickle.loads(pickle.dumps(made))) == (made, made, made)
    assert type(GraphCheckpoint("Prüfen/审查", {}, 0).current_node) is NodeId


def test_a_trace_id_is_the_id_of_a_thread(store: backstay.Store) -> None:
    """A trace is the thread that its checkpoints are stored in; no checkpoint contains it."""
    trace = TraceId()
    typed = TypedCheckpointStore(CheckpointBlobStore(store), JsonCheckpointCodec())
    checkpoint = GraphCheckpoint("a", {}, HASH)
    typed.save_with_trace(trace, checkpoint)

    assert [meta.thread_id for meta in store.threads()] == [str(trace)]
    assert typed.load_latest(trace, HASH) == checkpoint
    assert trace not in JsonCheckpointCodec().serialize(checkpoint, HASH).data.decode()


# The checkpoint ---------------------------------------------------------------------------------------------------


def test_a_new_checkpoint_projects_the_state_and_has_a_random_id_and_the_current_time() -> None:
    state = Agent(["hello"])
    before = datetime.now(UTC)
    one, two = (GraphCheckpoint("write", state, HASH) for _ in range(2))
    state.messages.append("later")

    assert (one.current_node, one.state, one.graph_hash) == ("write", {"messages": ["hello"]}, HASH)
    assert before <= one.created_at <= two.created_at <= datetime.now(UTC)
    assert uuid.UUID(one.checkpoint_id).version == 4
    assert one.checkpoint_id != two.checkpoint_id


def test_a_checkpoint_gives_back_a_run_time_state_through_restore() -> None:
    checkpoint = GraphCheckpoint("write", Agent(["hello"], cache={"not": "stored"}), HASH)
    blob = JsonCheckpointCodec().serialize(checkpoint, HASH)
    state = checkpoint.restore_state()
    later = JsonCheckpointCodec(Agent).deserialize(blob, HASH).restore_state()

    for each in (state, later):
        assert type(each) is Agent
        assert (each.messages, each.cache) == (["hello"], {"restored": "yes"})
    state.messages.append("later")
    assert checkpoint.restore_state().messages == ["hello"]
    assert replace(checkpoint, current_node="other").restore_state().messages == ["hello"]


def test_a_plain_state_is_copied_both_ways() -> None:
    given = {"list": [1]}
    checkpoint = GraphCheckpoint("a", given, 0)
    given["list"].append(2)
    checkpoint.restore_state()["list"].append(3)

    assert checkpoint.restore_state() == {"list": [1]}


def test_a_state_without_the_way_back_is_refused() -> None:
    class OneWay:
        def snapshot(self) -> dict[str, Any]:
            return {}

    with pytest.raises(InvalidInput, match=r"OneWay has snapshot\(\) but no restore\(\)"):
        GraphCheckpoint("a", OneWay(), 0)
    with pytest.raises(InvalidInput, match="cannot be copied"):
        GraphCheckpoint("a", {"lock": threading.Lock()}, 0)
    with pytest.raises(InvalidInput, match=r"not a class with restore\(\)"):
        JsonCheckpointCodec(dict)


def test_a_checkpoint_is_a_position_and_a_projection_never_the_state_alone(store: backstay.Store) -> None:
    """What is stored is enough to resume in another process: the place to run next, and the projected state."""
    ran: list[str] = []
    graph = Graph("chat", state=Agent)
    for name in ("ask", "answer"):

        def node(state: Agent, name: str = name) -> dict[str, Any]:
            ran.append(name)
            return {"messages": [*state.messages, name]}

        graph.node(name, node)
    graph.edge("ask", "answer")
    graph.start("ask")
    graph.end("answer")
    graph.run_sync(store.thread("t"), {"messages": ["hello"], "cache": {"not": "stored"}}, before=["answer"])
    stored = store.thread("t").latest()

    assert stored is not None
    assert (stored.next_node, stored.last_node, stored.step) == ("answer", "ask", 1)
    frame = stored.frames.current
    assert frame is not None
    assert (frame.node_id, frame.cursor, frame.continuation) == ("answer", 1, NextNode("answer"))
    assert stored.state == {"messages": ["hello", "ask"]}
    result = graph.resume_sync(store.thread("t"), backstay.Approve()).raise_for_status()
    assert (ran, result.state.messages) == (["ask", "answer"], ["hello", "ask", "answer"])
    assert result.state.cache == {"restored": "yes"}


def test_a_frame_projects_the_state_and_a_stack_is_made_of_frames() -> None:
    outer, inner = Frame.of("outer", "inside", Agent(["hello"]), 3), Frame.of("inner", "b", {}, 1)
    stack = FrameStack().push(outer).push(inner)

    assert outer.state == {"messages": ["hello"]}
    assert (stack.current, stack.depth, stack.frames) == (inner, 2, (outer, inner))
    assert stack.pop() == (inner, FrameStack((outer,)))


# Sinks ------------------------------------------------------------------------------------------------------------


class Stranger:
    """A sink from the protocol alone: one method. Every attribute that is asked for is written down."""

    def __init__(self) -> None:
        self.__dict__["seen"] = []
        self.__dict__["asked"] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            object.__getattribute__(self, "__dict__")["asked"].add(name)
        return object.__getattribute__(self, name)

    def on_checkpoint(self, state: Mapping[str, Any], frame: Any) -> None:
        self.__dict__["seen"].append((frame.node_id, frame.step, dict(state)))


def test_the_engine_borrows_a_strangers_sink_and_needs_nothing_but_its_one_method() -> None:
    sink = Stranger()
    two_nodes().run_sync(None, {}, sink=sink).raise_for_status()

    assert sink.__dict__["seen"] == [("a", 0, {}), ("a", 1, {"n": 1}), ("b", 2, {"n": 1})]
    assert sink.__dict__["asked"] == {"on_checkpoint"}
    gone = weakref.ref(sink)
    del sink
    gc.collect()
    assert gone() is None  # nothing of ours keeps it after the run


# Policies ---------------------------------------------------------------------------------------------------------


def chain(*nodes: str, **functions: Any) -> Graph:
    """Return a graph of these nodes in order; one without a function changes nothing, and ``wait`` is a barrier."""
    graph = Graph("chain")
    for node in nodes:
        if node == "wait":
            graph.barrier(node)
        else:
            graph.node(node, functions.get(node, lambda state: None))
    for edge in itertools.pairwise(nodes):
        graph.edge(*edge)
    graph.start(nodes[0])
    graph.end(nodes[-1])
    return graph


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        (TriggerPolicy.EVERY_NODE, ["input", "node", "interrupt", "barrier", "node", "end"]),
        (TriggerPolicy.BARRIER_ONLY, ["input", "interrupt", "barrier", "end"]),
        (TriggerPolicy.MANUAL, ["input", "interrupt", "end"]),
        (TriggerPolicy.ON_MUTATION, ["input", "node", "interrupt", "end"]),
    ],
)
def test_a_trigger_policy_is_a_trigger(policy: TriggerPolicy, stored: list[str]) -> None:
    """The start, the pause and the end are stored under each of them."""
    graph = chain("changes", "ready", "wait", "b", "c", changes=lambda state: {"n": 1})
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        graph.run_sync(thread, {}, trigger=policy)
        graph.resume_sync(thread, backstay.Approve(), trigger=policy).raise_for_status()

        assert [meta.trigger for meta in thread.history()][::-1] == stored
    assert isinstance(policy, Trigger)


def test_retention_is_a_second_policy_and_the_old_name_of_the_first_still_works(store: backstay.Store) -> None:
    graph = Graph("g")
    graph.node("a", lambda state: {"n": state["n"] + 1})
    graph.edge("a", "a", when=lambda state: state["n"] < 6, name="more")
    graph.start("a")
    graph.end("a")
    kept = {}
    for name, policy in {
        "all": RetentionPolicy(),
        "latest": RetentionPolicy(latest=2),
        "young": RetentionPolicy(age=timedelta(0)),
        "old": RetentionPolicy(age=timedelta(hours=1)),
    }.items():
        graph.run_sync(store.thread(name), {"n": 0}, trigger=CheckpointPolicy.EVERY_NODE, sink=policy.sink)
        kept[name] = len(list(store.thread(name).history()))

    assert kept == {"all": 7, "latest": 2, "young": 1, "old": 7}
    assert CheckpointPolicy is TriggerPolicy
    assert [policy.prune_keep() for policy in (RetentionPolicy(), RetentionPolicy(latest=2))] == [None, 2]
    assert RetentionPolicy().keep is None
    for wrong in ({"latest": 0}, {"latest": True}, {"age": 5}, {"age": timedelta(seconds=-1)}):
        with pytest.raises(InvalidInput):
            RetentionPolicy(**wrong)


# Errors, as they are really raised --------------------------------------------------------------------------------


def test_storage_errors_start_with_storage_error() -> None:
    store = backstay.open("memory:")
    blobs = CheckpointBlobStore(store)
    store.close()
    with pytest.raises(StoreError) as caught:
        blobs.load(CheckpointId())

    assert str(caught.value).startswith("storage error: the store is closed")


def test_not_found_names_the_checkpoint(store: backstay.Store) -> None:
    id = CheckpointId()
    with pytest.raises(NotFound) as caught:
        store.thread("t").tag(str(id), "x")

    assert str(caught.value).startswith(f"checkpoint not found: checkpoint {id} does not exist")


def test_bytes_that_are_no_checkpoint_are_corrupted() -> None:
    codec = JsonCheckpointCodec()
    blob = codec.serialize(GraphCheckpoint("a", {}, HASH), HASH)
    with pytest.raises(Corrupted) as caught:
        codec.deserialize(replace(blob, data=blob.data[:-1]), HASH)

    assert str(caught.value) == f"corrupted checkpoint: blob {blob.id}: the bytes are not JSON (JSONDecodeError)"


def test_a_state_that_cannot_be_written_is_a_serialization_error() -> None:
    with pytest.raises(EncodeError) as caught:
        JsonCheckpointCodec().serialize(GraphCheckpoint("a", {"n": 2**64}, HASH), HASH)

    assert str(caught.value) == (
        "serialization error: checkpoint.state.n is an integer of more than 64 bits. Store it as text"
    )


def test_a_mismatch_expects_the_programs_hash_in_the_codec_and_in_the_engine(store: backstay.Store) -> None:
    codec, thread = JsonCheckpointCodec(), store.thread("t")
    checkpoint = GraphCheckpoint("a", {}, 0xAB)
    with pytest.raises(GraphMismatch) as of_codec:
        codec.deserialize(codec.serialize(checkpoint, 0xAB), 2**64 - 1)
    old, new = two_nodes(before=["b"]), two_nodes(before=["b"], reducers={"n": max})
    old.run_sync(thread, {})
    with pytest.raises(GraphMismatch) as of_engine:
        new.resume_sync(thread, backstay.Approve())

    assert str(of_codec.value) == (
        "graph mismatch: expected hash 0xffffffffffffffff, got 0x00000000000000ab"
        f" (checkpoint '{checkpoint.checkpoint_id}')"
    )
    assert (of_codec.value.expected, of_codec.value.actual) == (2**64 - 1, 0xAB)
    assert (of_engine.value.expected, of_engine.value.actual) == (new.fingerprint, old.fingerprint)
    start = f"graph mismatch: expected hash 0x{new.fingerprint:016x}, got 0x{old.fingerprint:016x}\n"
    assert str(of_engine.value).startswith(start)


# Nodes ------------------------------------------------------------------------------------------------------------


def test_a_task_node_wraps_a_callable_that_may_fail(store: backstay.Store) -> None:
    works = False

    class Task:
        def __call__(self, state: Mapping[str, Any]) -> dict[str, Any]:
            if not works:
                raise ValueError("not yet")
            return {"done": True}

    graph = chain("a", "b", "task", a=lambda state: {"n": 1}, task=Task())
    failed = graph.run_sync(store.thread("t"), {})
    stored = store.thread("t").latest()

    assert failed.status == "failed"
    assert isinstance(failed.error, NodeFailed)
    assert (failed.error.node, type(failed.error.error), failed.path) == ("task", ValueError, ("a", "b"))
    assert stored is not None
    assert (stored.next_node, stored.state) == ("task", {"n": 1})
    works = True
    done = graph.resume_sync(store.thread("t")).raise_for_status()
    assert (done.values, done.path) == ({"n": 1, "done": True}, ("a", "b", "task"))
    final = store.thread("t").latest()
    assert final is not None
    assert final.continuation == End()


class Sharing:
    """A state whose snapshot is part of itself."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def snapshot(self) -> dict[str, list[int]]:
        return {"items": self.items}

    @classmethod
    def restore(cls, stored: dict[str, list[int]]) -> Sharing:
        return cls(stored["items"])


def test_a_checkpoint_does_not_change_with_the_state_it_was_made_from() -> None:
    state = Sharing([1])
    made = GraphCheckpoint("n", state, 1)
    state.items.append(2)

    assert made.state == {"items": [1]}
    assert made.restore_state().items == [1]
