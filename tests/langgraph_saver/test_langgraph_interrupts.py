"""LangGraph's interrupts as rows of the store: what the list shows is what waits, over real graphs."""

from __future__ import annotations

import asyncio
import copy
import operator
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.base import CheckpointMetadata, empty_checkpoint
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.errors import GraphInterrupt
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Interrupt, Send, interrupt

import backstay
from backstay.errors import InvalidInput
from backstay.langgraph import BackstaySaver
from backstay.langgraph.interrupts import BY, OpenInterrupts, interrupt_id_of, resume_of
from backstay.langgraph.names import GraphLocation
from backstay.model.decision import DecisionKind
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.retention import Keep
from backstay.thread.access import access_of
from support.meanwhile import Meanwhile
from support.running import effort

Graph = Any
NEW: Any = {"found": []}


class State(TypedDict):
    found: Annotated[list[Any], operator.add]


def at(thread: str = "t") -> Any:
    return {"configurable": {"thread_id": thread}}


def asks(*questions: Any) -> Any:
    """Return a node that asks these, one after the other."""

    def node(state: Any) -> State:
        return {"found": [interrupt(question) for question in questions]}

    return node


def builder(**nodes: Any) -> StateGraph[Any]:
    """Return a graph whose nodes run side by side."""
    graph: StateGraph[Any] = StateGraph(State)
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(START, name)
    return graph


def shown(saver: BackstaySaver) -> list[Any]:
    """Return the payloads of what the whole store has waiting."""
    return [record.interrupt.payload["value"] for record in saver.store.interrupts()]


def past(saver: BackstaySaver) -> list[tuple[Any, ...]]:
    """Return how what no longer waits was decided, in the order in which it was asked."""
    records = [record for record in saver.store.interrupts(pending=False) if not record.pending]
    return [(record.interrupt.payload["value"], *decision(record)) for record in records]


def decision(record: InterruptRecord) -> tuple[Any, ...]:
    assert record.decision is not None
    return str(record.decision.kind.value), record.decision.value, record.decided_by


@pytest.fixture
def saver() -> Iterator[BackstaySaver]:
    with BackstaySaver("memory:") as made:
        yield made


# One list ---------------------------------------------------------------------------------------------------------


def test_what_waits_in_all_threads_subgraphs_and_engines_is_one_list(url: str) -> None:
    with BackstaySaver(url) as saver:
        inner = builder(deep=asks({"delete": "file"})).compile()
        outer = builder(sub=builder(mid=inner).compile(), flat=asks("May I?")).compile(checkpointer=saver)
        outer.invoke(NEW, at("a"))
        builder(ask=asks([1, 2.5, None])).compile(checkpointer=saver).invoke(NEW, at("b"))
        own = backstay.Graph("own")
        own.node("ask", lambda state, ctx: {"x": ctx.ask({"mine": True})})
        own.start("ask")
        own.end("ask")
        own.run_sync(saver.store.thread("c"), {})

        rows = [
            (each.thread_id, each.scope.partition(":")[0], each.interrupt.node, each.interrupt.payload)
            for each in saver.store.interrupts()
        ]
        values = [(*row[:3], row[3].get("value", row[3])) for row in rows]
        assert sorted(values, key=str) == [
            ("a", "", "flat", "May I?"),
            ("a", "sub", "deep", {"delete": "file"}),
            ("b", "", "ask", [1, 2.5, None]),
            ("c", "", "ask", {"mine": True}),
        ]
        assert [each.thread_id for each in saver.interrupts()] == ["a", "a", "b"]
        assert [each.interrupt.prompt for each in saver.interrupts("a") if each.interrupt.node == "flat"] == ["May I?"]
        assert len(list(saver.store.thread("a").interrupts())) == 2


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_an_answer_given_through_langgraph_takes_it_off_the_list(
    how: str, durability: Any, saver: BackstaySaver
) -> None:
    graph = builder(sub=builder(ask=asks("how many?")).compile()).compile(checkpointer=saver)

    def run(given: Any) -> Any:
        if how == "ainvoke":
            return asyncio.run(graph.ainvoke(given, at(), durability=durability))
        return graph.invoke(given, at(), durability=durability)

    run(NEW)
    assert shown(saver) == ["how many?"]
    assert run(Command(resume=3)) == {"found": [3]}
    assert shown(saver) == []
    answer = ("approve", None, BY) if durability == "exit" else ("answer", 3, BY)  # it is not told then
    assert past(saver) == [("how many?", *answer)]


def test_of_several_questions_of_one_task_the_last_one_waits(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("first?", "second?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    graph.invoke(Command(resume=1), at())

    assert shown(saver) == ["second?"]
    assert past(saver) == [("first?", "answer", 1, BY)]

    graph.invoke(Command(resume=2), at())
    assert past(saver) == [("first?", "answer", 1, BY), ("second?", "answer", 2, BY)]


def test_questions_side_by_side_are_taken_off_one_by_one(saver: BackstaySaver) -> None:
    inner = builder(one=asks("one?"), two=asks("two?")).compile()
    graph = builder(sub=inner).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    waiting = {record.interrupt.payload["value"]: interrupt_id_of(record) for record in saver.interrupts()}
    assert set(waiting) == {"one?", "two?"}

    graph.invoke(Command(resume={waiting["two?"]: "yes"}), at())
    assert shown(saver) == ["one?"]
    assert past(saver) == [("two?", "answer", "yes", BY)]

    assert sorted(graph.invoke(Command(resume={waiting["one?"]: "no"}), at())["found"]) == ["no", "yes"]
    assert shown(saver) == []


def test_tasks_that_were_sent_ask_each(saver: BackstaySaver) -> None:
    graph: StateGraph[Any] = StateGraph(State)
    graph.add_node("node", lambda item: {"found": [interrupt(item)]})
    graph.add_conditional_edges(START, lambda state: [Send("node", n) for n in range(3)], ["node"])
    compiled = graph.compile(checkpointer=saver)
    compiled.invoke(NEW, at())

    records = saver.interrupts()
    assert sorted(shown(saver)) == [0, 1, 2]
    compiled.invoke(Command(resume={interrupt_id_of(each): "ok" for each in records}), at())
    assert shown(saver) == []


def test_a_question_of_the_functional_interface_is_shown_once(saver: BackstaySaver) -> None:
    @task
    def ask(question: str) -> Any:
        return interrupt(question)

    @entrypoint(checkpointer=saver)
    def workflow(given: Any) -> Any:
        return [ask("a?").result(), interrupt("b?")]

    workflow.invoke(1, at())
    assert shown(saver) == ["a?"]
    workflow.invoke(Command(resume=1), at())
    assert shown(saver) == ["b?"]
    assert workflow.invoke(Command(resume=2), at()) == [1, 2]
    assert shown(saver) == []


# Without an answer ------------------------------------------------------------------------------------------------


def test_new_input_and_an_update_leave_questions_behind(saver: BackstaySaver) -> None:
    graph = builder(sub=builder(ask=asks("how many?")).compile()).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    graph.invoke(NEW, at())
    assert len(shown(saver)) == 1
    graph.update_state(at(), {"found": ["by hand"]}, as_node="sub")

    assert shown(saver) == []
    assert past(saver) == [("how many?", "defer", None, BY), ("how many?", "approve", None, BY)]  # the update answers


def test_a_question_that_is_asked_again_otherwise_replaces_the_first(saver: BackstaySaver) -> None:
    proposals = iter("abc")
    graph = builder(ask=lambda state: {"found": [interrupt(next(proposals))]}).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    graph.invoke(None, at())  # runs the node again, which asks again

    assert shown(saver) == ["b"]
    graph.invoke(Command(resume="yes"), at())
    assert shown(saver) == []


def test_a_question_that_is_asked_again_unchanged_is_the_same(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("how many?")).compile(checkpointer=saver)
    for start in (NEW, None, None):
        graph.invoke(start, at())
    assert [record.interrupt.payload["value"] for record in saver.store.interrupts(pending=False)] == ["how many?"]


def test_time_travel_asks_anew_on_its_own_branch(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("how many?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    graph.invoke(Command(resume=1), at())
    asked = next(state for state in graph.get_state_history(at()) if state.next == ("ask",))
    graph.invoke(None, asked.config)

    assert shown(saver) == ["how many?"]
    assert graph.invoke(Command(resume=2), at())["found"] == [2]
    assert shown(saver) == []
    assert past(saver) == [("how many?", "answer", 1, BY), ("how many?", "answer", 2, BY)]


def test_a_stop_before_a_node_is_nothing_that_langgraph_tells_a_saver(saver: BackstaySaver) -> None:
    graph = builder(ask=lambda state: None).compile(checkpointer=saver, interrupt_before=["ask"])
    graph.invoke(NEW, at())

    assert graph.get_state(at()).next == ("ask",)
    assert saver.interrupts() == []


# Crashes and other processes --------------------------------------------------------------------------------------


def test_another_saver_takes_up_what_waits(url: str) -> None:
    """It has only the store, as another process would."""
    with backstay.open(url) as store:
        graph = builder(sub=builder(ask=asks("a?", "b?")).compile())
        graph.compile(checkpointer=BackstaySaver(store)).invoke(NEW, at())
        saver = BackstaySaver(store)
        graph.compile(checkpointer=saver).invoke(Command(resume=1), at())
        assert shown(saver) == ["b?"]
        saver = BackstaySaver(store)
        graph.compile(checkpointer=saver).invoke(Command(resume=2), at())
        assert shown(saver) == []
        assert past(saver) == [("a?", "answer", 1, BY), ("b?", "answer", 2, BY)]


def test_a_question_without_a_row_gets_one_when_its_thread_is_read(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("how many?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    saver.copy_thread("t", "copy")
    assert [record.thread_id for record in saver.interrupts()] == ["t"]

    for _ in range(2):
        graph.get_state(at("copy"))
        assert [record.thread_id for record in saver.interrupts()] == ["t", "copy"]


def test_writes_may_come_before_their_checkpoint(saver: BackstaySaver) -> None:
    checkpoint = empty_checkpoint()
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": checkpoint["id"]}}
    saver.put_writes(config, [("__interrupt__", (Interrupt("early", "e" * 32),))], "task", "~__pregel_pull, ask")
    assert shown(saver) == []

    metadata: CheckpointMetadata = {"source": "loop", "step": 0, "parents": {}}
    above: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    saver.put(above, checkpoint, metadata, {})
    assert [(each.interrupt.node, each.interrupt.payload["value"]) for each in saver.interrupts()] == [("ask", "early")]


def test_what_a_crash_left_open_is_closed_by_who_looks(saver: BackstaySaver) -> None:
    """The successor was stored, and the process died before it could close what that left behind."""
    graph = builder(sub=builder(ask=asks("how many?")).compile()).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    found = saver.get_tuple(at())
    assert found is not None
    saver._open_interrupts.forget("t")
    saver.put(found.config, {**empty_checkpoint()}, {"source": "input", "step": 5, "parents": {}}, {})
    assert shown(saver) == ["how many?"]

    assert saver.interrupts() == []
    assert shown(saver) == []
    assert past(saver) == [("how many?", "defer", None, BY)]


def test_an_answer_that_is_stored_late_is_not_taken_for_one_to_the_next_question(saver: BackstaySaver) -> None:
    """LangGraph stores what a run is resumed with in the background: possibly after the task has asked again."""
    graph = builder(ask=asks("first?", "second?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    graph.invoke(Command(resume="one"), at())
    late = graph.get_state(at()).config
    saver.put_writes(late, [("__resume__", "one")], "00000000-0000-0000-0000-000000000000")

    (record,) = saver.interrupts()
    assert record.interrupt.payload["value"] == "second?"
    assert record.decision is None
    assert graph.invoke(Command(resume="two"), at()) == {"found": ["one", "two"]}


def test_a_run_without_questions_asks_the_store_nothing() -> None:
    opened = access_of(backstay.open("memory:"))
    inbox, store, place = OpenInterrupts(opened.services), Meanwhile(opened.store), GraphLocation("t", "")
    inbox.wrote(store, place, "1", "task", "", [("found", [1]), ("branch:to:x", None)])
    inbox.wrote(store, place, "1", "00000000-0000-0000-0000-000000000000", "", [("__resume__", 1)])
    inbox.stored(store, place, "2", "1", "loop")
    inbox.read(store, place, "2", [("task", "found", [1]), ("task", "__error__", "x")])

    assert store.calls == 0


def test_a_thread_that_is_deleted_takes_its_questions_along(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("how many?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    saver.delete_thread("t")
    assert saver.interrupts() == []
    graph.invoke(NEW, at())
    assert shown(saver) == ["how many?"]


def test_retention_spares_a_checkpoint_that_somebody_must_decide_on(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("how many?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    record = saver.interrupts()[0]
    start = list(graph.get_state_history(at()))[-1]
    for _ in range(3):
        graph.update_state(start.config, {"found": []}, as_node="ask")  # other branches, which are newer
    saver.retain(Keep(last=1))

    assert saver.store.get(record.checkpoint_id) is not None
    assert shown(saver) == ["how many?"]


# Payloads ---------------------------------------------------------------------------------------------------------


def test_under_encryption_neither_question_nor_answer_is_stored_in_clear() -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    with BackstaySaver("memory:", serde=serde) as saver:
        graph = builder(ask=asks({"ssn": "078-05-1120"}, "078-05-1120 really?")).compile(checkpointer=saver)
        graph.invoke(NEW, at())
        graph.invoke(Command(resume="secret answer"), at())
        rows = access_of(saver.store).store.records("interrupt", "", None, False, 0, 10)

        assert len(rows) == 2
        for row in rows:
            assert b"078-05" not in row.body
            assert b"secret" not in row.body
        record = saver.interrupts()[0]
        assert record.interrupt.node == "ask"
        assert record.interrupt.payload["encrypted"] is True
        assert graph.invoke(resume_of(saver.store.thread("t").decide(record, "approve", by="ann")), at()) == {
            "found": ["secret answer", True]
        }


class Odd:
    """Stands for whatever people put into a question; it looks different each time."""

    def __repr__(self) -> str:
        return f"<Odd at {id(self)} {'x' * 1000}>"


class Rude:
    def __repr__(self) -> str:
        raise ValueError


ODD: list[Any] = [
    "lone \ud800 and \0",
    "long " * 100_000,
    {"in": {("a", 1): [Odd(), Rude()]}},
    {1, 2},
    2**70,
    float("inf"),
    b"bytes",
    None,
]


@pytest.mark.parametrize("payload", ODD, ids=lambda each: type(each).__name__)
def test_any_payload_is_shown_once_and_as_far_as_it_is_plain(payload: Any) -> None:
    place = GraphLocation("t", "")
    asked: Any = [("__interrupt__", (Interrupt(payload, "e" * 32),))]
    with BackstaySaver("memory:") as saver:
        saver.put(at(), checkpoint := empty_checkpoint(), {"source": "loop", "step": 0, "parents": {}}, {})
        inbox, store = saver._open_interrupts, access_of(saver.store).store
        inbox.wrote(store, place, checkpoint["id"], "task", "", asked)
        before = shown(saver)
        inbox.forget("t")
        inbox.read(store, place, checkpoint["id"], [("task", *copy.deepcopy(asked[0]))])
        assert shown(saver) == before
        assert len(before) == 1


def test_questions_with_an_id_of_somebodys_own_making_are_told_apart(saver: BackstaySaver) -> None:
    def node(state: State) -> State:
        raise GraphInterrupt((Interrupt("stop"), Interrupt("stop")))

    graph = builder(one=node).compile(checkpointer=saver)
    for thread in ("a", "b"):
        graph.invoke(NEW, at(thread))
    assert [record.thread_id for record in saver.interrupts()] == ["a", "a", "b", "b"]


# Decided in the store ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [("modify", {"n": 3}, {"n": 3}), ("answer", {"n": 3}, {"n": 3}), ("approve", None, True), ("reject", None, False)],
)
def test_a_decision_made_in_the_store_resumes_the_graph(
    kind: str, value: Any, found: Any, saver: BackstaySaver
) -> None:
    graph = builder(sub=builder(ask=asks("how many?"), other=asks("and?")).compile()).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    record = next(each for each in saver.interrupts() if each.interrupt.node == "ask")
    decided = saver.store.thread("t").decide(record, kind, by="ann", value=value)
    graph.invoke(resume_of(decided), at())

    assert shown(saver) == ["and?"]
    assert past(saver) == [("how many?", kind, value, "ann")]
    last = saver.store.thread("t").decide(saver.interrupts()[0], "approve", by="bob")
    assert graph.invoke(resume_of(last, approved="go"), at())["found"] == [found, "go"]


def test_what_is_no_answer_does_not_resume(saver: BackstaySaver) -> None:
    graph = builder(ask=asks("how many?")).compile(checkpointer=saver)
    graph.invoke(NEW, at())
    record = saver.interrupts()[0]
    with pytest.raises(InvalidInput, match="no decision to resume with"):
        resume_of(record)
    with pytest.raises(InvalidInput, match="no decision to resume with"):
        resume_of(saver.store.thread("t").decide(record, DecisionKind.DEFER, by="ann"))
    thread = saver.store.thread("own")
    thread.save({})
    latest = thread.latest()
    assert latest is not None
    own = thread.interrupt(latest.meta, kind="userrequest", payload=1)
    with pytest.raises(InvalidInput, match="not an interrupt of LangGraph"):
        resume_of(own)


# The list is what LangGraph says ----------------------------------------------------------------------------------


def story_graph(saver: BackstaySaver) -> Graph:
    deep = builder(deep=asks("d1", "d2"), quick=lambda state: {"found": ["q"]}).compile()
    graph = builder(sub=builder(mid=deep, flat=asks({"f": 1})).compile(), two=asks("t1", "t2"))
    graph.add_node("after", asks("end"))
    graph.add_edge(["sub", "two"], "after")
    return graph.compile(checkpointer=saver)


STEPS = st.sampled_from(["new", "again", "one", "one", "all", "all", "update", "travel", "restart"])


@settings(max_examples=max(2, effort() // 2))
@given(steps=st.lists(st.tuples(STEPS, st.sampled_from("ab"), st.sampled_from(["sync", "async", "exit"])), max_size=12))
@example([(step, "a", "sync") for step in ("new", "travel", "all", "one", "travel", "all", "all")])
def test_whatever_is_done_the_list_is_what_the_graphs_states_say(steps: list[tuple[str, str, Any]]) -> None:
    with backstay.open("memory:") as store:
        saver = BackstaySaver(store)
        graph = story_graph(saver)
        for step, thread, durability in steps:
            waiting = [each.id for each in graph.get_state(at(thread)).interrupts]
            if step == "restart":
                saver = BackstaySaver(store)
                graph = story_graph(saver)
            elif step == "update":
                graph.update_state(at(thread), {"found": [0]}, as_node="after")
            elif step == "new" or not graph.get_state(at(thread)).next:
                graph.invoke(NEW, at(thread), durability=durability)
            elif step == "again":
                graph.invoke(None, at(thread), durability=durability)
            elif step == "travel":
                graph.invoke(None, graph.get_state(at(thread)).config, durability=durability)
            elif waiting:
                answered = waiting[:1] if step == "one" else waiting
                graph.invoke(Command(resume=dict.fromkeys(answered, step)), at(thread), durability=durability)
            expected = sorted(each.id for name in "ab" for each in graph.get_state(at(name)).interrupts)
            listed = list(store.interrupts())
            assert sorted(interrupt_id_of(record) for record in listed) == expected
            assert saver.interrupts() == listed
