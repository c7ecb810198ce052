"""Bundles of threads that LangGraph wrote; and what of its metadata is too large for a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import backstay
from backstay.bundle import check_bundle, export_bundle, import_bundle
from backstay.errors import EncodeError
from backstay.langgraph import BackstaySaver, import_langgraph
from backstay.model.decision import QUESTION_BYTES_MAX
from backstay.model.fields import DESCRIPTION_BYTES_MAX

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [("ai", f"reply {len(state['messages'])}")]}


def graph_on(store: backstay.Store) -> Any:
    made = StateGraph(MessagesState).add_node("reply", reply).add_edge(START, "reply")
    return made.compile(checkpointer=BackstaySaver(store))


def test_a_graph_goes_on_in_another_store_from_a_bundle(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "a.db") as one, backstay.open(tmp_path / "b.db") as other:
        for text in ("hello", "again"):
            graph_on(one).invoke({"messages": [("user", text)]}, CONFIG)
        export_bundle(one, tmp_path / "bundle")

        assert check_bundle(tmp_path / "bundle").checkpoints == 6
        assert import_bundle(tmp_path / "bundle", other)
        assert graph_on(other).get_state(CONFIG).values == graph_on(one).get_state(CONFIG).values
        assert len(graph_on(other).invoke({"messages": [("user", "more")]}, CONFIG)["messages"]) == 6
        assert other.check()


def test_metadata_too_large_for_a_list_is_refused_by_the_saver_and_named_by_an_import(tmp_path: Path) -> None:
    large: Any = {"source": "loop", "step": 1, "writes": {"node": "x" * DESCRIPTION_BYTES_MAX}}
    with SqliteSaver.from_conn_string(str(tmp_path / "stock.db")) as stock:
        stock.setup()
        small: Any = {"source": "loop", "step": 1}
        for thread, metadata in (("large", large), ("small", small)):
            config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
            stock.put(config, empty_checkpoint(), metadata, {})
    with backstay.open("memory:") as store:
        with pytest.raises(EncodeError, match=r"metadata\.writes\.node is the largest"):
            BackstaySaver(store).put(CONFIG, empty_checkpoint(), large, {})
        report = import_langgraph(store, tmp_path / "stock.db")

        assert not report
        assert [(note.thread, "metadata.writes.node is the largest" in note.what) for note in report.missing] == [
            ("large", True)
        ]
        assert [meta.thread_id for meta in store.threads()] == ["small"]


def test_a_question_and_an_answer_too_large_for_a_list_still_reach_the_graph() -> None:
    large = ["x" * 90_000] * 20

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("ai", str(len(interrupt(large))))]}

    with backstay.open("memory:") as store:
        saver = BackstaySaver(store)
        graph: Any = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=saver)
        asked = graph.invoke({"messages": [("user", "x")]}, CONFIG)
        (shown,) = store.interrupts()
        answered = graph.invoke(Command(resume=large), CONFIG)

        assert asked["__interrupt__"][0].value == large
        assert "value" not in shown.interrupt.payload
        assert shown.interrupt.payload["left_out"] > QUESTION_BYTES_MAX
        assert answered["messages"][-1].content == "20"
        (settled,) = store.interrupts(pending=False)
        assert settled.decision is not None
        assert "too large" in settled.decision.reason
