"""The demo's agent and its child process: ``python -m backstay.cli.worker run|race STORE ...``.

``run STORE LEDGER PAUSE`` works as the agent; in step PAUSE it blocks on its stdin (0: never).
``race STORE NAME`` loads the newest checkpoint, blocks on its stdin, then books on top of what it loaded.
Each line on stdout is one JSON object. If stdin ends while it blocks, the demo has ended, and the worker ends too.

The agent is a plain loop around a fake model that costs "money" and a tool; saving each step makes it durable. It asks
five suppliers for a price, one per turn, and names the cheapest. It computes everything from the state alone, so the
same state always gives the same answer. Like a provider, it writes each model call to a ledger before the answer.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import backstay

THREAD = "demo"
QUANTITY = 40
BULK_QUANTITY = 100  # from this quantity on, a supplier's second price applies
PAGE_ROWS = 800
PRICES = {"north": (31, 30), "south": (29, 28), "east": (35, 33), "west": (33, 21), "harbour": (38, 26)}  # cents each


def work(thread: backstay.Thread, ledger: Path) -> Iterator[dict[str, Any]]:
    """Continue from the newest checkpoint until there is an answer; yield each action and each saved step."""
    checkpoint = thread.latest()
    if checkpoint is None:
        question = {"role": "user", "content": "Who sells us these bolts cheapest?"}
        checkpoint = thread.save({"quantity": QUANTITY, "messages": [question]}, last_node="user", next_node="model")
        yield {"kind": "saved", "step": checkpoint.step, "node": "user", "text": question["content"], "paid_calls": 0}
    while checkpoint.next_node is not None:
        step, node = checkpoint.step + 1, checkpoint.next_node
        calls, answer, following = 0, {}, "model" if node == "tool" else None
        yield {"kind": "doing", "step": step, "node": node}
        if node == "model":
            calls = pay(ledger, thread.branch, step)
            message = model(checkpoint.state)
            if "lookup" in message:
                following = "tool"
            else:
                answer = {"answer": message["content"]}
        else:
            message = look_up(checkpoint.messages[-1]["lookup"])
        checkpoint = thread.append({"messages": [message]}, set=answer, last_node=node, next_node=following)
        yield {"kind": "saved", "step": step, "node": node, "text": message["content"], "paid_calls": calls}


def model(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fake model's reply: the next lookup, or the answer when it knows all prices."""
    quotes = [message for message in state["messages"] if message["role"] == "tool"]
    for supplier in list(PRICES)[len(quotes) :]:
        return {"role": "assistant", "content": f"look up {supplier}", "lookup": supplier}
    quantity = state["quantity"]
    column = 1 if quantity >= BULK_QUANTITY else 0
    best = min(quotes, key=lambda quote: int(quote["prices"][column]))
    total = quantity * best["prices"][column] / 100
    return {"role": "assistant", "content": f"{best['supplier']}: {quantity} for {total:.2f}"}


def look_up(supplier: str) -> dict[str, Any]:
    """Return a supplier's price page, a long text like the results of real tools."""
    rng = random.Random(supplier)
    rows = [f"bolt {rng.randrange(16**6):06x}  {rng.randrange(10, 999)} cents" for _ in range(PAGE_ROWS)]
    page = "\n".join(rows)
    content = f"price page of {supplier}, {len(page) / 1000:.0f} kB"
    return {"role": "tool", "content": content, "supplier": supplier, "prices": PRICES[supplier], "page": page}


def pay(ledger: Path, branch: str, step: int) -> int:
    """Write one paid call to the ledger; return how many it holds."""
    with ledger.open("a", encoding="utf-8") as file:
        file.write(f"{branch} {step}\n")
    return len(paid(ledger))


def paid(ledger: Path) -> list[str]:
    """Return all paid calls, oldest first, each as branch and step."""
    return ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []


def report(**fact: object) -> None:
    """Write one line to the demo."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def wait_for_demo() -> None:
    """Block until the demo says to continue."""
    if not sys.stdin.readline():
        sys.exit(1)


def main(role: str, path: str, *rest: str) -> None:
    """Open the store and play the role."""
    with backstay.open(path) as store:
        thread = store.thread(THREAD)
        if role == "run":
            ledger, pause = rest
            for fact in work(thread, Path(ledger)):
                report(**fact)
                if (fact["kind"], fact["step"]) == ("doing", int(pause)):
                    wait_for_demo()
            return
        (name,) = rest
        thread.latest()
        report(kind="ready")
        wait_for_demo()
        note = {"role": "system", "content": f"booked by {name}"}
        try:
            saved = thread.append({"messages": [note]}, set={"booked_by": name}, label=name)
        except backstay.Conflict as conflict:
            report(kind="conflict", winner=conflict.winner.label, step=conflict.winner.step)
        else:
            report(kind="won", step=saved.step)


if __name__ == "__main__":
    main(*sys.argv[1:])
