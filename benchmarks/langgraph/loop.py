"""The graph that is run: one node in a loop, which adds one message a step, beside a channel that never changes.

A message is 1 KB of random text with an id, as chat models give it; the other channel is a dictionary of 100 KB. Random
letters hardly get smaller when they are packed (6 bits in each byte), so what a saver stores again is seen as it is.
"""

from __future__ import annotations

import random
import string
import time
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import _messages_delta_reducer, add_messages

MESSAGE_CHARS, STATIC_CHARS, SECTION_CHARS = 1000, 100_000, 1000
LETTERS = string.ascii_letters + string.digits + " ."
CONFIG: Any = {"configurable": {"thread_id": "chat"}}
SETTLED = 10  # steps that LangGraph adds to those of the loop, and some


class Plain(TypedDict):
    """The state as most graphs have it."""

    messages: Annotated[list[AnyMessage], add_messages]
    static: dict[str, str]


class Delta(TypedDict):
    """The same with LangGraph's own remedy for growing lists."""

    messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer)]
    static: dict[str, str]


class Conversation:
    """What goes into one run: the same texts each time, as objects that nobody has seen before."""

    def __init__(self, steps: int) -> None:
        source = random.Random(steps)
        self.steps = steps
        self.static = {
            f"section-{number}": _text(source, SECTION_CHARS) for number in range(STATIC_CHARS // SECTION_CHARS)
        }
        self.messages: list[BaseMessage] = [_message(source, number) for number in range(steps + 1)]

    def unique_bytes(self) -> int:
        """Return what has to be stored at least: each message and the other channel once, as LangGraph encodes them."""
        serde = JsonPlusSerializer()
        return sum(len(serde.dumps_typed(value)[1]) for value in (self.static, *self.messages))


def _text(source: random.Random, length: int) -> str:
    return "".join(source.choices(LETTERS, k=length))


def _message(source: random.Random, number: int) -> BaseMessage:
    kind = AIMessage if number % 2 else HumanMessage
    return kind(content=_text(source, MESSAGE_CHARS), id=f"run--{source.getrandbits(128):032x}")


class Loop:
    """The compiled graph and its clock: ``entered`` is when the node began, each time."""

    def __init__(self, conversation: Conversation, saver: Any, *, delta: bool = False) -> None:
        self.entered: list[float] = []
        self._conversation = conversation
        self._left = iter(conversation.messages)
        builder: Any = StateGraph(Delta if delta else Plain)
        builder.add_node("agent", self._agent)
        builder.add_edge(START, "agent")
        builder.add_conditional_edges("agent", self._way_on, {END: END, "agent": "agent"})
        self.graph: Any = builder.compile(checkpointer=saver)

    def run(self) -> float:
        """Do all steps, each stored before the next begins if there is a saver; return the seconds."""
        first = {"messages": [next(self._left)], "static": self._conversation.static}
        steps = self._conversation.steps
        how = {"durability": "sync"} if self.graph.checkpointer else {}
        began = time.perf_counter()
        done = self.graph.invoke(first, {**CONFIG, "recursion_limit": steps + SETTLED}, **how)
        seconds = time.perf_counter() - began
        assert len(done["messages"]) == steps + 1
        return seconds

    def check(self) -> None:
        """See that the newest state is there as it should be."""
        state = self.graph.get_state(CONFIG)
        assert state.values["messages"] == self._conversation.messages
        assert state.values["static"] == self._conversation.static
        assert state.next == ()

    def state(self) -> int:
        """Read the newest state."""
        return len(self.graph.get_state(CONFIG).values["messages"])

    def states(self, limit: int | None = None) -> int:
        """Read this many of the newest states, or all; return how many there are."""
        return sum(1 for _ in self.graph.get_state_history(CONFIG, limit=limit))

    def _agent(self, _: Any) -> dict[str, Any]:
        self.entered.append(time.perf_counter())
        return {"messages": [next(self._left)]}

    def _way_on(self, state: Any) -> str:
        return END if len(state["messages"]) > self._conversation.steps else "agent"
