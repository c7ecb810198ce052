"""An agent graph whose tool calls need approval, and which is killed in between. Run it until nothing is left to do.

First run: the agent wants to send a mail and waits for a person. Second run: you approve, the mail is sent, and the
process is killed before the node ends. Third run: the mail is not sent again, and the agent finishes.
"""

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

import backstay
from backstay.engine import Context, Result
from backstay.engine.reducers import append
from backstay.thread import Decision, End

OUTBOX = Path("outbox.txt")  # instead of a mail server
KILLED = Path("killed.txt")  # so that the process is killed only once
LEASE_S = 0.5  # how long others must wait after a worker was killed; the default is 30 seconds
Message = dict[str, Any]


class State(TypedDict, total=False):
    """A conversation. The messages that a node returns are appended."""

    messages: Annotated[list[Message], append]


def model(messages: list[Message]) -> Message:  # a fake model: first it calls the tool, then it is done
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": f"Done: {messages[-1]['content']}"}
    return {"role": "assistant", "content": "", "call": {"to": "bob@example.org", "text": "The train leaves at nine"}}


def send_mail(to: str, text: str, idempotency_key: str) -> str:
    with OUTBOX.open("a", encoding="utf-8") as outbox:
        outbox.write(f"{to}: {text}\n")
    return f"mail sent to {to}"


graph = backstay.Graph("assistant", state=State)


@graph.node
def think(state: State, ctx: Context) -> State:
    return {"messages": [ctx.call("model", model, state["messages"])]}


@graph.node
def act(state: State, ctx: Context) -> State:
    call = ctx.approve("send_mail", state["messages"][-1]["call"])
    sent = ctx.effect("send_mail", send_mail, **call)
    if not KILLED.exists():
        KILLED.touch()
        print("The mail is sent. Now the process is killed. Run me again.", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"messages": [{"role": "tool", "content": sent}]}


graph.start("think")
graph.edge("think", "act", when=lambda state: "call" in state["messages"][-1], name="wants_a_tool")
graph.edge("act", "think")
graph.end("think")


def resume(thread: backstay.Thread, answer: Decision | None) -> Result:
    while True:
        try:
            return graph.resume_sync(thread, answer, by="you", lease_s=LEASE_S)
        except backstay.Fenced:  # the killed worker's lease has not expired yet
            time.sleep(0.1)


thread = backstay.open("mail.db").thread("bob")
newest = thread.latest()
if newest is None:
    task = {"role": "user", "content": "Write to Bob when the train leaves"}
    result = graph.run_sync(thread, {"messages": [task]}, lease_s=LEASE_S)
    print(f"It asks: {result.interrupts[0].interrupt.payload}. Run me again to approve.")
elif newest.continuation == End():
    print("Nothing is left to do.")
else:
    waits = any(record.decision is None for record in thread.interrupts())
    result = resume(thread, backstay.Approve() if waits else None)
    mails = len(OUTBOX.read_text(encoding="utf-8").splitlines())
    print(f"{result.state['messages'][-1]['content']} ({mails} mail in the outbox)")
