"""What the two source systems with a graph runtime promise of it and no other test names: their rows by id."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph, Keep
from backstay.engine.nodes import NodeKind
from backstay.engine.reducers import append
from backstay.engine.sinks import MemorySink, Retained
from backstay.engine.triggers import CheckpointEvent, every
from backstay.model.decision import Approve, InterruptKind

ENGINE = Path(backstay.__file__).parent / "engine"
KNOWS_STORES = {"context.py", "durable.py", "pending.py", "replay.py", "start.py", "work.py"}
"""What starts a run on a thread, and keeps it there. Nothing that runs nodes is among them."""


class State(TypedDict, total=False):
    log: Annotated[list[str], append]
    text: str


def writing(name: str = "writing") -> Graph:
    """Return a -> b -> c, each of which writes its name."""
    graph = Graph(name, state=State)
    for node in "abc":
        graph.node(node, lambda state, node=node: {"log": [node]})
    graph.edge("a", "b")
    graph.edge("b", "c")
    graph.start("a")
    graph.end("c")
    return graph


def test_a_remote_store_keeps_a_run_that_another_process_goes_on_with(postgres_url: str) -> None:
    with backstay.open(postgres_url) as here:
        writing().run_sync(here.thread("t"), {"log": []}, before=["b"])

    with backstay.open(postgres_url) as there:
        result = writing().resume_sync(there.thread("t"), Approve(), by="somebody else").raise_for_status()

    assert result.values == {"log": ["a", "b", "c"]}


def test_a_sink_decides_whether_where_and_how_much() -> None:
    class OnlyTheLastWord:
        """Keeps one word of every second state, in a place of its own."""

        def __init__(self) -> None:
            self.kept: dict[int, str] = {}

        def on_checkpoint(self, state: Mapping[str, Any], moment: CheckpointEvent) -> None:
            if moment.step % 2:
                self.kept[moment.step] = state["log"][-1]

    sink = OnlyTheLastWord()
    writing().run_sync(None, {"log": []}, sink=sink).raise_for_status()

    assert sink.kept == {1: "a", 3: "c"}


def test_what_runs_a_graph_knows_nothing_of_stores() -> None:
    found = {
        path.name
        for path in ENGINE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("backstay.store")
    }

    assert found == KNOWS_STORES


def test_a_position_does_not_say_whose_it_is_the_store_does(url: str) -> None:
    with backstay.open(url) as store:
        for name in ("trace-1", "trace-2"):
            writing().run_sync(store.thread(name), {"log": []}).raise_for_status()
        one, two = (store.thread(name).latest() for name in ("trace-1", "trace-2"))

    assert one is not None
    assert two is not None
    assert one.frames == two.frames
    assert "trace-1" not in str((one.frames.to_plain(), one.state, one.run))
    assert (one.thread_id, two.thread_id) == ("trace-1", "trace-2")


def test_when_to_keep_and_how_long_are_two_policies_that_combine(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        writing().run_sync(
            thread, {"log": []}, trigger=every(n=2), sink=lambda sink: Retained(Keep(last=2), sink)
        ).raise_for_status()

        # Stored were the input, the second commit and the end; of these the rule keeps two.
        assert [(meta.last_node, meta.trigger) for meta in thread.history()] == [("c", "end"), ("b", "node")]


def test_frames_name_the_graph_they_are_of_whatever_kind_their_node_is(url: str) -> None:
    outer = Graph("outer", state=State)
    outer.subgraph("inside", writing("inner"))
    outer.barrier("wait")
    outer.node("task", lambda state: {"text": "done"})
    outer.edge("inside", "wait")
    outer.edge("wait", "task")
    outer.start("inside")
    outer.end("task")
    sink = MemorySink()
    with backstay.open(url) as store:
        outer.run_sync(store.thread("t"), {"log": []}, sink=sink)
        outer.resume_sync(store.thread("t"), Approve(), sink=sink).raise_for_status()

    assert {node.kind for node in outer.build().nodes.values()} == set(NodeKind)
    assert [(frame.graph_id, frame.node_id) for frame in sink.frames] == [
        ("inner", "a"),
        ("inner", "b"),
        ("inner", "c"),
        ("outer", "inside"),
        ("outer", "wait"),
        ("outer", "task"),
    ]


def test_a_pause_leaves_everything_that_is_needed_to_go_on(url: str) -> None:
    with backstay.open(url) as store:
        begun = datetime.now(UTC)
        writing().run_sync(store.thread("t"), {"log": [], "text": "x"}, before=["c"])
        stored = store.thread("t").latest()

        assert stored is not None
        assert stored.id
        assert (stored.graph, stored.next_node, stored.path, stored.step) == ("writing", "c", ("a", "b"), 2)
        assert begun - timedelta(minutes=1) < stored.created_at < begun + timedelta(minutes=10)
        assert stored.created_at.tzinfo is UTC
        assert stored.interrupt is not None
        assert stored.interrupt.kind is InterruptKind.BEFORE_NODE
        assert stored.pending_action is None
        assert stored.state == {"log": ["a", "b"], "text": "x"}

        # The state comes back as what was declared, and what cannot be one is refused by name.
        assert writing().schema.restore(stored.state, {}) == stored.state
        strange = store.thread("strange")
        strange.save({"log": [], "nonsense": 1})
        with pytest.raises(backstay.InvalidInput, match="nonsense"):
            writing().run_sync(strange, {})
