"""Makes the golden files again: ``PYTHONPATH=tests python -m support.golden``.

Names, ids and the clock are fixed. What the library itself draws at random (tokens, ids of runs) is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import backstay
from backstay import Graph
from backstay.bundle import export_bundle
from backstay.compat.sessions import CrashRecovery
from backstay.langgraph import BackstaySaver
from backstay.model.checkpoint import Write
from backstay.operations import leases
from backstay.store.leases import Holder
from support.postgres import PostgresServer, find_install

GOLDEN = Path(__file__).parents[1] / "golden"
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LONG = hashlib.shake_128(b"long").hexdigest(600)
SECRET = hashlib.shake_128(b"quarantine").digest(3000)  # cannot be compressed, so it is found in the file
LOST = hashlib.shake_128(b"lost").digest(3000)
VALUES = {
    "none": None,
    "whole": -(2**80),
    "float": -0.0,
    "bytes": b"\x00\xff",
    "moment": datetime(2026, 1, 1, 12, 30, 0, 5, tzinfo=UTC),
    "span": timedelta(days=-1, microseconds=1),
    "decimal": Decimal("1.10"),
    "uuid": uuid.UUID(int=7),
    "tuple": (1, ("a", None)),
    "set": {1, 2},
    "text": "ü\N{SNOWMAN}\x00",
}


HOLDER = Holder("0123456789abcdef", "a-boot-that-is-over", "pid:[1]+time:[2]", "7", "5", "golden")


def open_store(url: str, namespace: str = "") -> backstay.Store:
    return backstay.open(url, namespace=namespace, clock=lambda: NOW)


def shop() -> Graph:
    """Return a graph of two nodes; a run of it is kept where it waits before the second one."""
    graph = Graph("shop")
    graph.node("pick", lambda state: {"basket": [*state["basket"], "apple"]})
    graph.node("pay", lambda state: {"paid": len(state["basket"])})
    graph.start("pick")
    graph.edge("pick", "pay")
    graph.end("pay")
    return graph


class Talk(TypedDict):
    """The state of the LangGraph graph."""

    words: Annotated[list[str], add]


def talk(saver: BackstaySaver) -> Any:
    """Return a LangGraph graph that asks a person in its second node."""
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import interrupt

    builder = StateGraph(Talk)
    builder.add_node("greet", lambda state: {"words": ["hello"]})
    builder.add_node("ask", lambda state: {"words": [interrupt("your name?")]})
    builder.add_edge(START, "greet")
    builder.add_edge("greet", "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def fill(url: str) -> None:
    """Store one of everything."""
    with open_store(url) as store:
        chat(store.thread("chat"))
        store.thread("chat", scope="inner").save({"inside": True}, id="s1")
        items = [hashlib.shake_128(b"%d" % number).hexdigest(40) for number in range(30)]
        for number in range(5):
            items[3 * number] = f"changed {number}"
            store.thread("edits").save({"items": items}, id=f"e{number}")
        shop().run_sync(store.thread("shop"), {"basket": []}, before=["pay"])
        left = store.thread("left")
        left.save({"n": 1}, id="l1")
        died = left.loop({}, owner="worker-2", name="left", ttl=0.05)
        died.__enter__()
        with store.thread("count").loop({"n": 0}, owner="worker-1", name="count") as loop:
            for turn in loop:
                turn.set(n=1)
                loop.finish()
        shop().submit(store.thread("queued"), {"basket": ["pear"]}, key="order-7")
        sessions = CrashRecovery(store)
        sessions.mark_session_active("nightly", owner="worker-3", task="import the orders")
        sessions.mark_session_terminated("nightly", "out of budget")
    with open_store(url, "other") as store:
        store.thread("chat").save({"other": True}, id="c1")


def chat(thread: backstay.Thread) -> None:
    thread.save(
        {"messages": ["hello"], "plan": "search", "values": VALUES},
        id="c1",
        label="first",
        tags=["start"],
        metadata={"user": "ann"},
    )
    thread.append({"messages": [LONG]}, set={"plan": "answer"}, id="c2", next_node="model", tokens_used=12)
    thread.append({"messages": ["bye"]}, delete=["plan"], id="c3")
    thread.tag("c2", "good")
    thread.write("c3", [Write("task", 0, "channel", {"answer": 42}), Write("task", 1, "other", [1, 2])])
    thread.fork("c2", branch="what-if", set={"plan": "other"}, id="f1").append({"messages": ["fork"]}, id="f2")
    thread.rewind("c1", id="c4")
    thread.save({"messages": ["deleted"]}, id="c5")
    thread.save({"messages": ["last"]}, id="c6")
    thread.delete_checkpoint("c5")
    thread.interrupt("c3", id="ask-open", prompt="May I?", payload={"amount": 5})
    thread.decide(thread.interrupt("c3", id="ask-answered"), "modify", by="bob", value={"amount": 4})
    thread.consume(thread.decide(thread.interrupt("c3", id="ask-used"), "approve", by="ann"), by="worker-1")
    thread.effect("mail", lambda to: {"sent": to}, "ann")
    for key, error in (("fax", ValueError("no paper")), ("charge", TimeoutError("no answer"))):
        with contextlib.suppress(ValueError, TimeoutError):
            thread.effect(key, failing(error))


def failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def dump_postgres(path: Path) -> None:
    with PostgresServer() as server:
        fill(server.url(schema="golden"))
        program = str(find_install(18) / "bin" / "pg_dump")
        options = ["--schema=golden", "--no-owner", "--no-privileges", "--inserts"]
        dump = subprocess.run([program, *options, server.url()], check=True, capture_output=True, text=True).stdout
    lines = [line for line in dump.splitlines() if not line.startswith("\\")]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def quarantine(folder: Path) -> None:
    """Damage a checkpoint, and take it out of its store."""
    with tempfile.TemporaryDirectory() as place:
        with open_store(f"dir:{place}/store") as store:
            hurt = store.thread("hurt")
            hurt.save({"data": [SECRET], "n": 0}, id="h0")
            hurt.append({"data": [LOST]}, set={"n": 1}, id="h1", label="hurt")
            hurt.save({"n": 2}, id="h2")  # what is damaged at the end of a log counts as never finished
        damaged = [path for path in Path(place).rglob("*") if path.is_file() and LOST in path.read_bytes()]
        for path in damaged:
            path.write_bytes(path.read_bytes().replace(LOST, LOST[:-1] + b"\x00"))
        with open_store(f"dir:{place}/store") as store:
            files = store.repair(quarantine_dir=Path(place) / "out", dry_run=False).files
        assert damaged
        shutil.copy(files[0], folder / "checkpoint.quarantine")


def langgraph(path: Path) -> None:
    with BackstaySaver(path) as saver:
        talk(saver).invoke({"words": ["start"]}, {"configurable": {"thread_id": "talk"}})


def main() -> None:
    socket.gethostname = lambda: "golden"  # else the files would name this machine
    leases._process = lambda pid: HOLDER  # type: ignore[assignment]  # it needs no cache
    shutil.rmtree(GOLDEN / "directory")  # and not the folders of other systems' files, which we cannot make again
    for old in GOLDEN.iterdir():
        if old.is_file() and old.name != "README.md":
            old.unlink()
    fill(str(GOLDEN / "store.db"))
    fill(f"dir:{GOLDEN / 'directory'}")
    dump_postgres(GOLDEN / "postgres.sql")
    with open_store(str(GOLDEN / "store.db")) as store:
        export_bundle(store, GOLDEN / "store.bundle")
    quarantine(GOLDEN)
    langgraph(GOLDEN / "store.db")
    (GOLDEN / "store.db-lock").unlink()


if __name__ == "__main__":
    main()
