"""The demo's child process: ``python -m backstay.cli.worker run|race STORE ...``. It tells what it does, line by line.

``run STORE LEDGER PAUSE`` works as the agent; before doing step PAUSE it blocks on its stdin (0: never).
``race STORE NAME`` loads the newest checkpoint, blocks on its stdin, then tries to book on top of what it loaded.

Each line on stdout is one JSON object. If stdin ends while it is blocked, the demo is gone, and so is the worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import backstay
from backstay.cli.agent import THREAD, work


def tell(**fact: object) -> None:
    """Write one line to the demo."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def await_word() -> None:
    """Block until the demo says to go on."""
    if not sys.stdin.readline():
        sys.exit(1)


def run(store: backstay.Store, ledger: str, pause: str) -> None:
    """Work until the answer is there."""
    for event in work(store.thread(THREAD), Path(ledger)):
        tell(**asdict(event))
        if (event.kind, event.step) == ("doing", int(pause)):
            await_word()


def race(store: backstay.Store, name: str) -> None:
    """Book, unless somebody else has."""
    thread = store.thread(THREAD)
    thread.latest()
    tell(kind="ready")
    await_word()
    note = {"role": "system", "content": f"booked by {name}"}
    try:
        saved = thread.append({"messages": [note]}, set={"booked_by": name}, label=name)
    except backstay.Conflict as conflict:
        tell(kind="conflict", winner=conflict.winner.label, step=conflict.winner.step)
    else:
        tell(kind="won", step=saved.step)


ROLES: dict[str, Callable[..., None]] = {"run": run, "race": race}


def main(role: str, path: str, *rest: str) -> None:
    """Open the store and play the role."""
    with backstay.open(path) as store:
        ROLES[role](store, *rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
