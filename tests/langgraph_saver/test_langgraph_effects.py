"""Effects inside LangGraph nodes, over real graphs and real kills: paid for once, whatever happens to the node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

import backstay
from backstay.errors import EffectChanged, EffectUnknown, EncodeError, InvalidInput, StoreBusy
from backstay.langgraph import BackstaySaver, effects
from backstay.langgraph.effects import aeffect, effect
from backstay.model.runs import EffectStatus
from backstay.thread.access import access_of
from support.langgraph.effects_children import DYING, SHAPES, uses
from support.processes import Nursery

Graph = Any
AT: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict):
    found: Annotated[list[Any], operator.add]


def one_node(node: Any, saver: Any, **options: Any) -> Graph:
    graph = StateGraph(State)
    graph.add_node("node", node, **options)
    graph.add_edge(START, "node")
    return graph.compile(checkpointer=saver)


@pytest.fixture
def saver() -> Iterator[BackstaySaver]:
    with BackstaySaver("memory:") as made:
        yield made


class Tool:
    """Counts how often it was used, and may fail at first."""

    def __init__(self, *errors: Exception) -> None:
        self.used: list[Any] = []
        self._errors = list(errors)

    def __call__(self, *given: Any) -> Any:
        self.used.append(given)
        if self._errors:
            raise self._errors.pop(0)
        return f"result {len(self.used)}"


# Killed -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as opened:
        yield opened


def twice(nursery: Nursery, function: str, folder: Path, *arguments: Any) -> Any:
    """Run a child that is killed, then one that ends; return what the second says."""
    ends = []
    for dies in (True, False):
        given = [each if each != "dies" else dies for each in arguments]
        ends.append(
            nursery.wait(
                nursery.start(f"support.langgraph.effects_children:{function}", given, str(folder / str(dies)))
            )
        )
    assert ends == [-signal.SIGKILL, 0]
    assert DYING in uses(folder)
    return json.loads((folder / "False").read_text())


@pytest.mark.crash
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tool_that_was_used_before_the_kill_is_not_used_again(shape: str, nursery: Nursery, tmp_path: Path) -> None:
    found = twice(nursery, "run", tmp_path, shape, str(tmp_path), True, "dies", "async")

    used = [line for line in uses(tmp_path) if line != DYING]
    assert sorted(found) == sorted(f"result of {item}" for item in used)
    assert len(used) == {"send": 3, "plain": 2, "subgraph": 2, "parallel": 2}.get(shape, 1)
    assert uses(tmp_path)[-1] == DYING  # nothing was used after the kill


@pytest.mark.crash
@pytest.mark.parametrize("shape", SHAPES)
def test_without_an_effect_the_same_kill_makes_it_used_twice(shape: str, nursery: Nursery, tmp_path: Path) -> None:
    twice(nursery, "run", tmp_path, shape, str(tmp_path), False, "dies", "sync")

    lines = uses(tmp_path)
    after = lines[lines.index(DYING) + 1 :]
    assert after[-1] == lines[lines.index(DYING) - 1]


@pytest.mark.crash
@pytest.mark.parametrize(
    ("way_on", "found", "charges"),
    [("ask", ["asked", "a person said so"], 1), ("again", ["charged"], 2), ("look", ["looked up"], 1)],
)
def test_a_kill_in_the_middle_of_a_tool_is_never_answered_blindly(
    way_on: str, found: list[str], charges: int, nursery: Nursery, tmp_path: Path
) -> None:
    assert twice(nursery, "run_unknown", tmp_path, str(tmp_path), "dies", way_on) == found

    keys = [line for line in uses(tmp_path) if line != DYING]
    assert len(keys) == charges
    assert len(set(keys)) == 1


# Run again in one process -----------------------------------------------------------------------------------------


def test_a_node_that_is_tried_again_keeps_what_it_has_done(saver: BackstaySaver) -> None:
    tool, attempts = Tool(), []

    def node(state: State) -> State:
        receipt = effect("pay", tool, 5)
        attempts.append(receipt)
        if len(attempts) < 3:
            raise ConnectionError
        return {"found": [receipt]}

    policy = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False)
    assert one_node(node, saver, retry_policy=policy).invoke({"found": []}, AT) == {"found": ["result 1"]}
    assert tool.used == [(5,)]
    assert len(attempts) == 3


def test_a_tool_that_failed_is_used_again_by_the_retry(saver: BackstaySaver) -> None:
    tool = Tool(ConnectionRefusedError())
    policy = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False)
    graph = one_node(lambda state: {"found": [effect("pay", tool)]}, saver, retry_policy=policy)

    assert graph.invoke({"found": []}, AT) == {"found": ["result 2"]}
    assert [(each.status, each.attempt) for each in saver.store.thread("t").effects()] == [(EffectStatus.DONE, 2)]


def test_a_tool_that_timed_out_is_not_used_again_by_the_retry(saver: BackstaySaver) -> None:
    tool = Tool(TimeoutError())
    policy = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False, retry_on=TimeoutError)
    graph = one_node(lambda state: {"found": [effect("pay", tool)]}, saver, retry_policy=policy)

    with pytest.raises(EffectUnknown):
        graph.invoke({"found": []}, AT)
    assert len(tool.used) == 1


def test_an_error_of_the_tool_is_the_nodes(saver: BackstaySaver) -> None:
    with pytest.raises(ZeroDivisionError):
        one_node(lambda state: {"found": [effect("pay", Tool(ZeroDivisionError()))]}, saver).invoke({"found": []}, AT)
    assert [each.status for each in saver.store.thread("t").effects()] == [EffectStatus.FAILED]


def test_a_node_that_asks_keeps_what_it_did_before(url: str) -> None:
    tool = Tool()

    def node(state: State) -> State:
        receipt = effect("search", tool, "cats")
        return {"found": [receipt, interrupt("enough?")]}

    with BackstaySaver(url) as saver:
        graph = one_node(node, saver)
        graph.invoke({"found": []}, AT)
        assert graph.invoke(Command(resume="yes"), AT) == {"found": ["result 1", "yes"]}
    assert len(tool.used) == 1


def test_other_arguments_under_the_same_key_are_refused(saver: BackstaySaver) -> None:
    prices = [5, 6]

    def node(state: State) -> State:
        effect("pay", Tool(), prices.pop(0))
        return {"found": [interrupt("enough?")]}

    graph = one_node(node, saver)
    graph.invoke({"found": []}, AT)
    with pytest.raises(EffectChanged):
        graph.invoke(Command(resume="yes"), AT)


def test_a_key_names_one_effect_of_a_task(saver: BackstaySaver) -> None:
    tool = Tool(ConnectionRefusedError())

    def node(state: State) -> State:
        with pytest.raises(ConnectionRefusedError):
            effect("pay", tool)
        first = effect("pay", tool)  # the one that failed may be tried again
        with pytest.raises(InvalidInput, match="its own key"):
            effect("pay", tool)
        return {"found": [first, effect("pay/2", tool)]}

    graph = one_node(node, saver)
    assert graph.invoke({"found": []}, AT)["found"] == ["result 2", "result 3"]


def test_coroutines_side_by_side_cannot_share_a_key(saver: BackstaySaver) -> None:
    tool = Tool()

    async def node(state: State) -> State:
        both = await asyncio.gather(*(aeffect("pay", tool, n) for n in range(2)), return_exceptions=True)
        return {"found": [type(each).__name__ for each in both]}

    result = asyncio.run(one_node(node, saver).ainvoke({"found": []}, AT))
    assert sorted(result["found"]) == ["InvalidInput", "str"]
    assert len(tool.used) == 1


def test_time_travel_is_another_course_of_events_unless_the_effect_is_the_threads(saver: BackstaySaver) -> None:
    each_time, once = Tool(), Tool()

    def node(state: State) -> State:
        return {"found": [effect("mail", each_time), effect("order-7", once, once="thread")]}

    graph = one_node(node, saver)
    graph.invoke({"found": []}, AT)
    past = next(state for state in graph.get_state_history(AT) if state.next == ("node",))
    result = graph.invoke(None, past.config)

    assert result == {"found": ["result 2", "result 1"]}
    assert saver.store.thread("t").effect("order-7", once) == "result 1"


# Results ----------------------------------------------------------------------------------------------------------


def asks_after(tool: Any) -> Any:
    def node(state: State) -> State:
        return {"found": [effect("model", tool), interrupt("enough?")]}

    return node


def test_a_message_comes_back_as_a_message(saver: BackstaySaver) -> None:
    message = AIMessage("hello", id="m1")
    replies = [message]
    graph = one_node(asks_after(replies.pop), saver)
    graph.invoke({"found": []}, AT)

    assert graph.invoke(Command(resume="yes"), AT)["found"] == [message, "yes"]


def test_under_encryption_no_result_is_stored_in_clear() -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    with BackstaySaver("memory:", serde=serde) as saver:
        graph = one_node(asks_after(lambda: {"ssn": "078-05-1120"}), saver)
        graph.invoke({"found": []}, AT)
        rows = access_of(saver.store).store.records("effect", "", "t", False, 0, 10)

        assert len(rows) == 1
        assert b"078-05-1120" not in rows[0].body
        assert graph.invoke(Command(resume="yes"), AT)["found"] == [{"ssn": "078-05-1120"}, "yes"]


def test_a_result_that_nothing_can_keep_is_done_and_said_to_be_lost(saver: BackstaySaver) -> None:
    tool = Tool()
    graph = one_node(lambda state: {"found": [effect("model", lambda: (tool(), threading.Lock()))]}, saver)

    for _ in range(2):
        with pytest.raises(EncodeError, match="was done, but its result cannot be stored"):
            graph.invoke(None if tool.used else {"found": []}, AT)
    assert len(tool.used) == 1


# Where ------------------------------------------------------------------------------------------------------------


def test_a_graph_with_another_saver_can_use_a_ledger_too() -> None:
    tool = Tool()

    def node(state: State) -> State:
        return {"found": [effect("pay", tool, ledger=ledger), interrupt("enough?")]}

    async def anode(state: State) -> State:
        return {"found": [await aeffect("pay", tool, ledger=ledger), interrupt("enough?")]}

    with backstay.open("memory:") as ledger:
        graph = one_node(node, InMemorySaver())
        graph.invoke({"found": []}, AT)
        assert graph.invoke(Command(resume="yes"), AT)["found"] == ["result 1", "yes"]
        agraph = one_node(anode, InMemorySaver())
        asyncio.run(agraph.ainvoke({"found": []}, AT))
        assert asyncio.run(agraph.ainvoke(Command(resume="yes"), AT))["found"] == ["result 2", "yes"]
    assert len(tool.used) == 2


def test_what_cannot_be_promised_is_refused(saver: BackstaySaver) -> None:
    async def coroutine() -> None: ...

    with pytest.raises(InvalidInput, match="outside of a running graph"):
        effect("pay", Tool())
    for graph, options, what in (
        (one_node(lambda state: {"found": [effect("pay", Tool())]}, None), {}, "no ledger"),
        (one_node(lambda state: {"found": [effect("pay", Tool())]}, InMemorySaver()), {}, "no ledger"),
        (one_node(lambda state: {"found": [effect("pay", Tool())]}, saver), {"durability": "exit"}, "durability"),
        (one_node(lambda state: {"found": [effect("pay", coroutine)]}, saver), {}, "coroutine"),
        (one_node(lambda state: {"found": [effect("pay", lambda: coroutine())]}, saver), {}, "awaited"),
        (one_node(lambda state: {"found": [effect("", Tool())]}, saver), {}, "empty"),
        (one_node(lambda state: {"found": [effect("pay", Tool(), once="run")]}, saver), {}, "once"),  # type: ignore[arg-type]
        (one_node(lambda state: {"found": [effect("pay", 5)]}, saver), {}, "function"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match=what):
            graph.invoke({"found": []}, AT, **options)
    done = one_node(lambda state: {"found": [effect("o-7", Tool(), once="thread")]}, saver)
    assert done.invoke({"found": []}, AT, durability="exit")["found"] == ["result 1"]


# Not before the checkpoint is stored ------------------------------------------------------------------------------


class Held(BackstaySaver):
    """A saver that stores a step's checkpoint only when it is let go."""

    def __init__(self) -> None:
        super().__init__("memory:")
        self.go = threading.Event()

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        if metadata.get("source") == "loop":
            assert self.go.wait(30)
        return super().put(config, checkpoint, metadata, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        if metadata.get("source") == "loop":
            assert await asyncio.to_thread(self.go.wait, 30)
        return await super().aput(config, checkpoint, metadata, new_versions)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_effect_begins_when_its_checkpoint_is_stored(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash would leave its task without a name that can be found again."""
    with contextlib.closing(Held()) as saver:
        events: list[str] = []

        def waits(seconds: float) -> None:
            events.append("waits")
            saver.go.set()
            threading.Event().wait(seconds)

        async def awaits(seconds: float) -> None:
            events.append("waits")
            saver.go.set()
            await asyncio.sleep(seconds)

        monkeypatch.setattr("time.sleep", waits)
        monkeypatch.setattr(effects, "async_sleep", awaits)

        def tool() -> str:
            newest = saver.get_tuple(AT)
            events.append("tool" if newest is not None and newest.metadata["source"] == "loop" else "too early")
            return "done"

        async def coroutine(state: State) -> State:
            return {"found": [await aeffect("pay", tool)]}

        graph = StateGraph(State)
        graph.add_node("first", lambda state: {"found": []})
        graph.add_node("second", coroutine if how == "async" else lambda state: {"found": [effect("pay", tool)]})
        graph.add_edge(START, "first")
        graph.add_edge("first", "second")
        compiled: Graph = graph.compile(checkpointer=saver)
        if how == "async":
            result = asyncio.run(compiled.ainvoke({"found": []}, AT, durability="async"))
        else:
            result = compiled.invoke({"found": []}, AT, durability="async")

    assert result == {"found": ["done"]}
    assert events[0] == "waits"
    assert events[-1] == "tool"


def test_an_effect_whose_checkpoint_is_never_stored_does_not_begin(
    saver: BackstaySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "STORED_WITHIN_S", 0.05)
    tool = Tool()
    inner = StateGraph(State)
    inner.add_node("pay", lambda state: {"found": [effect("pay", tool)]})
    inner.add_edge(START, "pay")

    with pytest.raises(StoreBusy, match="did not start"):
        one_node(inner.compile(checkpointer=False), saver).invoke({"found": []}, AT)
    assert tool.used == []
