"""Real LangGraph graphs, and short stories of what people do with them, told by the saver's answers.

A story takes a ``Stage`` (a saver, and whether its graphs run sync or async) and returns what was seen: values, what
comes next, interrupts, errors, the whole history. Ids differ from run to run and are replaced by places in the
history, so the same story told over two savers must give the same account.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import CachePolicy, Command, Interrupt, RetryPolicy, Send, StateSnapshot, StateUpdate, interrupt

from backstay.testing.drafts import wait_until

Account = list[Any]
Graph = Any  # Pregel's type parameters say nothing here
Node = Any  # what LangGraph declares for nodes leaves out plain callables

HEX_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}")


class Stage:
    """Where a story is told: one saver, and one way to run graphs."""

    def __init__(self, saver: BaseCheckpointSaver[Any], runner: asyncio.Runner | None = None, **options: Any) -> None:
        self.saver = saver
        self.thread = "story"
        self._runner = runner
        self._options = options

    @property
    def config(self) -> RunnableConfig:
        """Return the config of the story's thread."""
        return {"configurable": {"thread_id": self.thread}}

    def run(self, graph: Graph, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:
        return self._call(graph, "invoke", input, config or self.config, **{**self._options, **options})

    def fails(self, graph: Graph, input: Any, **options: Any) -> str:
        """Return the text of the error that a run must end with."""
        try:
            self.run(graph, input, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("the run did not fail")

    def state(self, graph: Graph, config: RunnableConfig | None = None, **options: Any) -> StateSnapshot:
        snapshot: StateSnapshot = self._call(graph, "get_state", config or self.config, **options)
        return snapshot

    def update(self, graph: Graph, config: RunnableConfig, values: Any, as_node: str | None = None) -> RunnableConfig:
        updated: RunnableConfig = self._call(graph, "update_state", config, values, as_node)
        return updated

    def history(self, graph: Graph, config: RunnableConfig | None = None, **options: Any) -> list[StateSnapshot]:
        if self._runner is None:
            return list(graph.get_state_history(config or self.config, **options))

        async def collect() -> list[StateSnapshot]:
            return [item async for item in graph.aget_state_history(config or self.config, **options)]

        return self._runner.run(collect())

    def _call(self, graph: Graph, verb: str, *arguments: Any, **options: Any) -> Any:
        if self._runner is None:
            return getattr(graph, verb)(*arguments, **options)
        return self._runner.run(getattr(graph, "a" + verb)(*arguments, **options))


def seen(snapshot: StateSnapshot, known: Sequence[str] = ()) -> dict[str, Any]:
    """Tell a snapshot without its ids; ``known`` are the ids of the history, newest first."""

    def place(config: RunnableConfig | None) -> Any:
        id = None if config is None else config["configurable"]["checkpoint_id"]
        return known.index(id) if id in known else id is not None

    metadata = {key: value for key, value in (snapshot.metadata or {}).items() if key in ("source", "step")}
    return {
        "values": snapshot.values,
        "next": snapshot.next,
        "interrupts": [told(item) for item in snapshot.interrupts],
        "tasks": [
            {
                "name": job.name,
                "path": job.path,
                "error": repr(job.error),
                "interrupts": [told(item) for item in job.interrupts],
                "result": job.result,
                "inside": seen(job.state) if isinstance(job.state, StateSnapshot) else job.state is not None,
            }
            for job in snapshot.tasks
        ],
        "metadata": metadata,
        "parent": place(snapshot.parent_config),
    }


def told(value: Any) -> Any:
    """Tell a result without ids."""
    if isinstance(value, Interrupt):
        return ("interrupt", value.value)
    if isinstance(value, dict):
        return {HEX_ID.sub("ID", key) if isinstance(key, str) else key: told(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [told(item) for item in value]
        in_any_order = any(isinstance(item, Interrupt) for item in value)  # a run tells them as they come
        return sorted(items, key=repr) if in_any_order else items
    return value


def whole(stage: Stage, graph: Graph, config: RunnableConfig | None = None) -> Account:
    """Tell everything a thread has: where it stands, with what is inside, and its history."""
    history = stage.history(graph, config)
    known = [item.config["configurable"]["checkpoint_id"] for item in history]
    return [seen(stage.state(graph, config, subgraphs=True), known), [seen(item, known) for item in history]]


def past(stage: Stage, graph: Graph, steps: int, as_text: bool = False) -> RunnableConfig:
    """Return the checkpoint so many steps ago, or the oldest there is; as text it went through somebody's database."""
    history = stage.history(graph)
    config = history[min(steps, len(history) - 1)].config
    return json.loads(json.dumps(config)) if as_text else config


# Conversations ----------------------------------------------------------------------------------------------------


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def reply(state: Chat) -> dict[str, Any]:
    number = len(state["messages"])
    text = str(state["messages"][-1].content) if state["messages"] else "nothing"
    return {"messages": [AIMessage(f"{text}, you say?", id=f"reply-{number}")]}


def chat(saver: BaseCheckpointSaver[Any], **options: Any) -> Graph:
    """Return a graph that answers every message."""
    return StateGraph(Chat).add_node("reply", reply).add_edge(START, "reply").compile(checkpointer=saver, **options)


def say(text: str, id: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=id)]}


def a_conversation_is_edited(stage: Stage) -> Account:
    graph = chat(stage.saver)
    account = [stage.run(graph, say(f"word {number}", f"in-{number}")) for number in range(4)]
    account.append(stage.run(graph, {"messages": [HumanMessage("other word", id="in-1"), RemoveMessage(id="in-0")]}))
    stage.update(graph, stage.config, {"messages": [RemoveMessage(id="reply-1")]})
    account.append(stage.run(graph, say("again", "in-9")))
    stage.update(
        graph, stage.config, {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("new", id="n")]}
    )
    return [*account, *whole(stage, graph)]


def a_node_changes_messages_in_place(stage: Stage) -> Account:
    def edit(state: Chat) -> dict[str, Any]:
        for message in state["messages"]:
            message.additional_kwargs.setdefault("seen", []).append(len(state["messages"]))
        state["messages"][0].content = f"edited {len(state['messages'])}"
        return {"messages": [AIMessage("ok", id=f"edit-{len(state['messages'])}")]}

    builder = StateGraph(Chat).add_node("edit", edit).add_node("reply", reply)
    graph = builder.add_edge(START, "edit").add_edge("edit", "reply").compile(checkpointer=stage.saver)
    account = [stage.run(graph, say(f"word {number}", f"in-{number}")) for number in range(3)]
    return [*account, stage.state(graph).values]


# Interrupts -------------------------------------------------------------------------------------------------------


class Notes(TypedDict, total=False):
    notes: Annotated[list[Any], operator.add]
    count: int


def one_node_asks_twice(stage: Stage) -> Account:
    def ask(state: Notes) -> Notes:
        return {"notes": [interrupt("name?"), interrupt({"question": "age?"})]}

    graph = StateGraph(Notes).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=stage.saver)
    account = [told(stage.run(graph, {"notes": ["begun"]})), *whole(stage, graph)]
    for answer in ("Ann", 42):
        account += [told(stage.run(graph, Command(resume=answer))), *whole(stage, graph)]
    return account


def several_nodes_ask_at_once(stage: Stage) -> Account:
    def asker(name: str) -> Node:
        return lambda state: {"notes": [(name + ": " + interrupt(f"{name}?"))]}

    builder = StateGraph(Notes)
    for name in ("a", "b", "c"):
        builder.add_node(name, asker(name)).add_edge(START, name)
    builder.add_node("quick", lambda state: {"notes": ["quick"]}).add_edge(START, "quick")
    graph = builder.compile(checkpointer=stage.saver)
    account = [told(stage.run(graph, {"notes": []})), *whole(stage, graph)]
    questions = {str(item.value): item.id for item in stage.state(graph).interrupts}
    some = {questions["a?"]: "first", questions["c?"]: "third"}
    account += [told(stage.run(graph, Command(resume=some))), *whole(stage, graph)]
    return [*account, told(stage.run(graph, Command(resume="second"))), *whole(stage, graph)]


def runs_stop_before_and_after_nodes(stage: Stage) -> Account:
    builder = StateGraph(Notes)
    for number in range(3):
        builder.add_node(f"n{number}", lambda state, number=number: {"notes": [number]})
    builder.add_edge(START, "n0").add_edge("n0", "n1").add_edge("n1", "n2")
    graph = builder.compile(checkpointer=stage.saver, interrupt_before=["n1"], interrupt_after=["n1"])
    account = [told(stage.run(graph, {"notes": ["in"]})), *whole(stage, graph)]
    stage.update(graph, stage.config, {"notes": ["by hand"]})
    account += [told(stage.run(graph, None)), *whole(stage, graph)]
    return [*account, told(stage.run(graph, None)), *whole(stage, graph)]


# Subgraphs --------------------------------------------------------------------------------------------------------


def nest(depth: int, innermost: Node, kind: Any = None) -> StateGraph[Any]:
    """Return graphs inside graphs, ``depth`` of them; only the innermost does anything."""
    builder: StateGraph[Any] = StateGraph(Notes).add_node("work", innermost).add_edge(START, "work")
    for level in range(depth):
        inner = builder.compile(checkpointer=kind)
        builder = StateGraph(Notes).add_node(f"level{level}", inner).add_edge(START, f"level{level}")
        builder.add_node("after", lambda state: {"count": state.get("count", 0) + 1})
        builder.add_edge(f"level{level}", "after")
    return builder


def a_graph_three_deep_asks(stage: Stage) -> Account:
    def work(state: Notes) -> Notes:
        return {"notes": [interrupt("deep?")]}

    graph = nest(3, work).compile(checkpointer=stage.saver)
    account = []
    for number in range(2):
        account += [told(stage.run(graph, {"notes": [f"in {number}"], "count": 0})), *whole(stage, graph)]
        inside = stage.state(graph, subgraphs=True).tasks[0].state
        assert isinstance(inside, StateSnapshot)
        account += whole(stage, graph, inside.config)
        account += [told(stage.run(graph, Command(resume=f"answer {number}"))), *whole(stage, graph)]
    return account


def a_subgraph_remembers(stage: Stage) -> Account:
    def work(state: Notes) -> Notes:
        return {"notes": ["inside"], "count": state.get("count", 0) + 1}

    inner = StateGraph(Notes).add_node("work", work).add_edge(START, "work").compile(checkpointer=True)

    def outer(state: Notes) -> Notes:
        return {"notes": [inner.invoke({"notes": ["call"]})["count"]]}

    async def outer_async(state: Notes) -> Notes:
        return {"notes": [(await inner.ainvoke({"notes": ["call"]}))["count"]]}

    from_sync_or_async = outer_async if stage._runner else outer
    graph = (
        StateGraph(Notes)
        .add_node("outer", from_sync_or_async)
        .add_edge(START, "outer")
        .compile(checkpointer=stage.saver)
    )
    account = [stage.run(graph, {"notes": [number]}) for number in range(3)]
    return [*account, *whole(stage, graph)]


def a_graph_eight_deep_has_a_long_name(stage: Stage) -> Account:
    graph = nest(8, lambda state: {"notes": [interrupt("very deep?")]}).compile(checkpointer=stage.saver)
    account = [told(stage.run(graph, {"notes": ["in"], "count": 0})), *whole(stage, graph)]
    names = [item.config["configurable"]["checkpoint_ns"] for item in stage.saver.list(stage.config)]
    assert max(map(len, names)) > 255
    return [*account, told(stage.run(graph, Command(resume="yes"))), *whole(stage, graph)]


# Width ------------------------------------------------------------------------------------------------------------


def work_is_sent_out_and_comes_back_in_order(stage: Stage) -> Account:
    def spread(state: Notes) -> list[Send]:
        return [Send("worker", {"count": number}) for number in range(25)]

    def worker(state: Notes) -> Notes:
        return {"notes": [state["count"] * 10]}

    builder = (
        StateGraph(Notes).add_node("worker", worker).add_node("join", lambda state: {"count": len(state["notes"])})
    )
    graph = builder.add_conditional_edges(START, spread).add_edge("worker", "join").compile(checkpointer=stage.saver)
    return [stage.run(graph, {"notes": []}), stage.run(graph, {"notes": ["more"]}), *whole(stage, graph)]


def one_of_many_fails_and_only_it_runs_again(stage: Stage) -> Account:
    ran: list[int] = []
    broken = [3]

    def others_are_stored() -> bool:
        found = stage.saver.get_tuple(stage.config)
        return found is not None and sum(write[1] == "notes" for write in found.pending_writes or []) == 5

    def worker(state: Notes) -> Notes:
        ran.append(state["count"])
        if state["count"] in broken:
            wait_until(others_are_stored)  # else it would be a race which of them are
            raise ValueError(f"worker {state['count']} broke")
        return {"notes": [state["count"]]}

    builder = StateGraph(Notes).add_node("worker", worker)
    builder.add_conditional_edges(START, lambda state: [Send("worker", {"count": number}) for number in range(6)])
    graph = builder.compile(checkpointer=stage.saver)
    account = [stage.fails(graph, {"notes": ["in"]}, durability="sync"), *whole(stage, graph), sorted(ran)]
    broken.clear()
    ran.clear()
    return [*account, stage.run(graph, None), *whole(stage, graph), ran]


def a_command_says_where_to_go(stage: Stage) -> Account:
    def decide(state: Notes) -> Command[Any]:
        return Command(
            goto=["left", "right"] if state["count"] % 2 else "right", update={"notes": [f"at {state['count']}"]}
        )

    def up(state: Notes) -> Command[Any]:
        return Command(graph=Command.PARENT, goto="last", update={"notes": ["from inside"]})

    inner = StateGraph(Notes).add_node("up", up).add_edge(START, "up").compile()
    builder = StateGraph(Notes).add_node("decide", decide, destinations=("left", "right")).add_edge(START, "decide")
    builder.add_node("left", lambda state: {"notes": ["left"]}).add_node("right", inner, destinations=("last",))
    builder.add_node("last", lambda state: {"notes": ["last"]})
    graph = builder.compile(checkpointer=stage.saver)
    account = [stage.run(graph, {"notes": [], "count": number}) for number in range(2)]
    return [*account, stage.run(graph, Command(goto="last", update={"notes": ["told"]})), *whole(stage, graph)]


# Deltas -----------------------------------------------------------------------------------------------------------


def extend(state: list[Any], writes: Sequence[list[Any]]) -> list[Any]:
    return [*state, *(item for write in writes for item in write)]


class Deltas(TypedDict, total=False):
    items: Annotated[list[Any], DeltaChannel(extend, snapshot_frequency=3)]
    rare: Annotated[list[Any], DeltaChannel(extend, snapshot_frequency=1000)]
    plain: Annotated[list[Any], operator.add]


def delta_graph(saver: BaseCheckpointSaver[Any]) -> Graph:
    """Return a graph of two steps whose lists are stored as differences."""
    builder = StateGraph(Deltas)
    builder.add_node("one", lambda state: {"items": [len(state["items"])], "plain": ["one"]})
    builder.add_node("two", lambda state: {"items": [len(state["items"])], "rare": ["two"]})
    builder.add_node("three", lambda state: {"items": [len(state["items"])], "rare": ["three"]})
    return builder.add_edge(START, "one").add_edge("one", "two").add_edge("one", "three").compile(checkpointer=saver)


def deltas_add_up(stage: Stage) -> Account:
    graph = delta_graph(stage.saver)
    account = [stage.run(graph, {"items": [f"in {number}"], "rare": [number]}) for number in range(5)]
    forked = stage.update(graph, past(stage, graph, 6), {"items": ["forked"]}, "one")
    account += [stage.state(graph, forked).values, stage.run(graph, None, forked)]
    return [*account, *whole(stage, graph)]


# Time travel ------------------------------------------------------------------------------------------------------


def line_of_three(saver: BaseCheckpointSaver[Any]) -> Graph:
    builder = StateGraph(Notes)
    for name in ("a", "b", "c"):
        builder.add_node(name, lambda state, name=name: {"notes": [name], "count": state.get("count", 0) + 1})
    return builder.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c").compile(checkpointer=saver)


def a_run_goes_on_from_the_past(stage: Stage) -> Account:
    graph = line_of_three(stage.saver)
    account = [stage.run(graph, {"notes": ["in"]})]
    for place in (1, 2, 3):
        old = past(stage, graph, place, as_text=place != 2)
        account += [stage.run(graph, None, old), stage.state(graph, old).values, *whole(stage, graph)]
    return [*account, stage.run(graph, {"notes": ["new"]}), *whole(stage, graph)]


def the_past_is_changed(stage: Stage) -> Account:
    graph = line_of_three(stage.saver)
    account = [stage.run(graph, {"notes": ["in"]})]
    old = past(stage, graph, 2)
    for as_node in (None, "a", "b", "c"):
        forked = stage.update(graph, old, {"notes": [f"as {as_node}"]}, as_node)
        account += [seen(stage.state(graph, forked)), stage.run(graph, None, forked), *whole(stage, graph)]
    copied = stage.update(graph, past(stage, graph, 4), None, "__copy__")
    account += [seen(stage.state(graph, copied)), stage.run(graph, None, copied), *whole(stage, graph)]
    ended = stage.update(graph, stage.config, None, END)
    return [*account, seen(stage.state(graph, ended)), *whole(stage, graph)]


def a_question_is_answered_twice(stage: Stage) -> Account:
    """Answer, go back to the question, and answer otherwise."""

    def work(state: Notes) -> Notes:
        return {"notes": [interrupt("which?")]}

    account = []
    for depth in (0, 2):
        stage.thread = f"answered-{depth}"
        graph = nest(depth, work).compile(checkpointer=stage.saver)
        stage.run(graph, {"notes": ["in"], "count": 0})
        asked = stage.state(graph).config
        account += [stage.run(graph, Command(resume="this")), stage.run(graph, Command(resume="that"), asked)]
        account += whole(stage, graph)
    return account


def many_updates_at_once(stage: Stage) -> Account:
    graph = line_of_three(stage.saver)
    updates = [
        [StateUpdate({"notes": ["one"]}, "a")],
        [StateUpdate({"notes": ["two"]}, "b"), StateUpdate({"notes": ["three"]}, "c")],
    ]
    stage._call(graph, "bulk_update_state", stage.config, updates)
    return [stage.run(graph, {"notes": ["in"]}), *whole(stage, graph)]


# Errors, retries, caches, functions -------------------------------------------------------------------------------


def a_node_fails_and_is_tried_again(stage: Stage) -> Account:
    left = {"retried": 2, "broken": 1}

    def flaky(name: str) -> Node:
        def run(state: Notes) -> Notes:
            if left[name]:
                left[name] -= 1
                raise ConnectionError(f"{name} is not there")
            return {"notes": [name]}

        return run

    patient = RetryPolicy(max_attempts=3, initial_interval=0.0, backoff_factor=1.0, jitter=False)
    builder = StateGraph(Notes).add_node("retried", flaky("retried"), retry_policy=patient)
    builder.add_node("broken", flaky("broken")).add_edge(START, "retried").add_edge("retried", "broken")
    graph = builder.compile(checkpointer=stage.saver)
    account = [stage.fails(graph, {"notes": ["in"]}), *whole(stage, graph)]
    return [*account, stage.run(graph, None), *whole(stage, graph)]


def an_error_is_handled(stage: Stage) -> Account:
    def fails(state: Notes) -> Notes:
        raise ValueError("broke")

    builder = StateGraph(Notes).add_node("fails", fails, error_handler=lambda state: {"notes": ["handled"]})
    builder.add_node("after", lambda state: {"notes": ["after"]})
    graph = builder.add_edge(START, "fails").add_edge("fails", "after").compile(checkpointer=stage.saver)
    return [stage.run(graph, {"notes": ["in"]}), *whole(stage, graph)]


def a_cached_node_runs_once(stage: Stage) -> Account:
    ran: list[int] = []

    def work(state: Notes) -> Notes:
        ran.append(1)
        return {"notes": [state["count"]]}

    builder = StateGraph(Notes).add_node(
        "work", work, cache_policy=CachePolicy(key_func=lambda state: str(state["count"]))
    )
    graph = builder.add_edge(START, "work").compile(checkpointer=stage.saver, cache=InMemoryCache())
    account: Account = []
    for thread in ("one", "two"):
        stage.thread = thread
        account += [stage.run(graph, {"notes": [], "count": 7}), *whole(stage, graph)]
    return [*account, len(ran)]


def functions_are_a_graph_too(stage: Stage) -> Account:
    ran: list[int] = []

    @task
    def double(number: int) -> int:
        ran.append(number)
        return 2 * number

    if stage._runner is None:

        @entrypoint(checkpointer=stage.saver)
        def flow(numbers: list[int], *, previous: Any = None) -> Any:
            doubled = [future.result() for future in [double(number) for number in numbers]]
            answer = interrupt({"doubled": doubled})
            return entrypoint.final(value=[doubled, answer, previous], save={"sum": sum(doubled), "before": previous})

    else:

        @entrypoint(checkpointer=stage.saver)
        async def flow(numbers: list[int], *, previous: Any = None) -> Any:
            doubled = [await future for future in [double(number) for number in numbers]]
            answer = interrupt({"doubled": doubled})
            return entrypoint.final(value=[doubled, answer, previous], save={"sum": sum(doubled), "before": previous})

    account: Account = []
    for number in range(2):
        account += [told(stage.run(flow, [number, number + 1])), *whole(stage, flow)]
        account += [told(stage.run(flow, Command(resume=f"yes {number}"))), *whole(stage, flow)]
    return [*account, sorted(ran)]


STORIES: list[Callable[[Stage], Account]] = [
    a_conversation_is_edited,
    a_node_changes_messages_in_place,
    one_node_asks_twice,
    several_nodes_ask_at_once,
    runs_stop_before_and_after_nodes,
    a_graph_three_deep_asks,
    a_subgraph_remembers,
    a_graph_eight_deep_has_a_long_name,
    work_is_sent_out_and_comes_back_in_order,
    one_of_many_fails_and_only_it_runs_again,
    a_command_says_where_to_go,
    deltas_add_up,
    a_run_goes_on_from_the_past,
    the_past_is_changed,
    a_question_is_answered_twice,
    many_updates_at_once,
    a_node_fails_and_is_tried_again,
    an_error_is_handled,
    a_cached_node_runs_once,
    functions_are_a_graph_too,
]
