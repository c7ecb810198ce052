"""The demo's agent: a plain loop around a fake model that costs "money" and a tool, made durable by saving each step.

It asks five suppliers for a price, one lookup per turn, and names the cheapest. Everything is computed from the state
alone, so the same state always gives the same answer. Each call of the model is written to a ledger before it is
answered, as a provider would do it: what the ledger holds has been paid for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay.model.checkpoint import Checkpoint
from backstay.thread.thread import Thread

THREAD = "demo"
QUANTITY = 40
BULK_QUANTITY = 100  # from here on, a supplier's second price counts
PAGE_ROWS = 800
PRICES = {"north": (31, 30), "south": (29, 28), "east": (35, 33), "west": (33, 21), "harbour": (38, 26)}  # cents each


@dataclass(frozen=True, slots=True)
class Event:
    """What the agent is about to do, or has saved."""

    kind: str  # "doing" or "saved"
    step: int
    node: str  # "user", "model" or "tool"
    text: str
    paid_calls: int = 0  # on the ledger, after a call of the model


def work(thread: Thread, ledger: Path) -> Iterator[Event]:
    """Go on from the newest checkpoint until there is an answer; start if there is none."""
    checkpoint = thread.latest()
    if checkpoint is None:
        ask = {"role": "user", "content": "Who sells us these bolts cheapest?"}
        checkpoint = thread.save({"quantity": QUANTITY, "messages": [ask]}, last_node="user", next_node="model")
        yield Event("saved", checkpoint.step, "user", ask["content"])
    while checkpoint.next_node is not None:
        step, node = checkpoint.step + 1, checkpoint.next_node
        yield Event("doing", step, node, "")
        calls = 0
        if node == "model":
            calls = pay(ledger, thread.branch, step)
            said = model(checkpoint.state)
        else:
            said = look_up(checkpoint.messages[-1]["lookup"])
        checkpoint = keep(thread, node, said)
        yield Event("saved", step, node, said["content"], calls)


def keep(thread: Thread, node: str, said: dict[str, Any]) -> Checkpoint:
    """Save what a node said as the next step, and what comes after it."""
    if node == "tool":
        return thread.append({"messages": [said]}, last_node="tool", next_node="model")
    if "lookup" in said:
        return thread.append({"messages": [said]}, last_node="model", next_node="tool")
    return thread.append({"messages": [said]}, set={"answer": said["content"]}, last_node="model")


def model(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fake model's reply: the next lookup, or the answer when all prices are known."""
    quotes = [message for message in state["messages"] if message["role"] == "tool"]
    for supplier in list(PRICES)[len(quotes) :]:
        return {"role": "assistant", "content": f"look up {supplier}", "lookup": supplier}
    quantity = state["quantity"]
    column = 1 if quantity >= BULK_QUANTITY else 0
    best = min(quotes, key=lambda quote: int(quote["prices"][column]))
    total = quantity * best["prices"][column] / 100
    return {"role": "assistant", "content": f"{best['supplier']}: {quantity} for {total:.2f}"}


def look_up(supplier: str) -> dict[str, Any]:
    """Return a supplier's price page, a long text as tools return them."""
    rng = random.Random(supplier)
    rows = [f"bolt {rng.randrange(16**6):06x}  {rng.randrange(10, 999)} cents" for _ in range(PAGE_ROWS)]
    page = "\n".join(rows)
    content = f"price page of {supplier}, {len(page) / 1000:.0f} kB"
    return {"role": "tool", "content": content, "supplier": supplier, "prices": PRICES[supplier], "page": page}


def pay(ledger: Path, branch: str, step: int) -> int:
    """Write one paid call into the ledger; return how many it holds."""
    with ledger.open("a", encoding="utf-8") as file:
        file.write(f"{branch} {step}\n")
    return len(paid(ledger))


def paid(ledger: Path) -> list[tuple[str, int]]:
    """Return all paid calls, oldest first, each as branch and step."""
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    return [(branch, int(step)) for branch, step in (line.split() for line in lines)]
