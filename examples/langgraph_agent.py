"""A LangGraph agent on a Backstay store: it asks, it is killed, it resumes. Run it until nothing is left to do.

First run: the agent wants to send a mail and waits for a person. Second run: you approve, the mail is sent, and the
process is killed before the node ends. Third run: the node runs again, and the mail is not sent again.
"""

import os
import signal
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

from backstay.langgraph import BackstaySaver, effect, resume_of

OUTBOX = Path("outbox.txt")  # instead of a mail server
KILLED = Path("killed.txt")  # so that the process is killed only once


class State(TypedDict):
    """A conversation in LangGraph's own types."""

    messages: Annotated[list[AnyMessage], add_messages]


def send_mail(to: str, text: str) -> str:
    with OUTBOX.open("a", encoding="utf-8") as outbox:
        outbox.write(f"{to}: {text}\n")
    return f"mail sent to {to}"


def agent(_: State) -> dict[str, Any]:
    call = interrupt({"tool": "send_mail", "to": "bob@example.org", "text": "The train leaves at nine"})
    sent = effect("mail", send_mail, call["to"], call["text"])
    if not KILLED.exists():
        KILLED.touch()
        print("The mail is sent. Now the process is killed. Run me again.", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"messages": [AIMessage(f"Done: {sent}")]}


builder: Any = StateGraph(State)
builder.add_node("agent", agent)
builder.add_edge(START, "agent")
config: Any = {"configurable": {"thread_id": "bob"}}

with BackstaySaver("mail.db") as saver:
    graph: Any = builder.compile(checkpointer=saver)
    waiting = saver.interrupts("bob")
    if graph.get_state(config).created_at is None:
        graph.invoke({"messages": [("user", "Write to Bob when the train leaves")]}, config)
        print(f"It asks: {saver.interrupts('bob')[0].interrupt.payload['value']}. Run me again to approve.")
    elif waiting:
        record = waiting[0]
        if record.decision is None:  # otherwise it was decided before the process was killed
            call = record.interrupt.payload["value"]
            record = saver.store.thread("bob").decide(record, "answer", by="you", value=call)
        done = graph.invoke(resume_of(record), config)
        mails = len(OUTBOX.read_text(encoding="utf-8").splitlines())
        print(f"{done['messages'][-1].content} ({mails} mail in the outbox)")
    else:
        print("Nothing is left to do.")
