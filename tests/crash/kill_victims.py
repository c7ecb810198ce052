"""What the killed processes of ``test_kill`` do: save without end and tell each save, before and after.

A state describes itself: from a checkpoint's token and its parent's state the whole state can be computed again, so
whoever checks the store needs nothing from the victims but the lines they wrote.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import backstay
from backstay.errors import Conflict

SHARED = "shared"
LOG_LENGTH_MAX = 40
SLOW_BYTES = 8_000_000
UNKNOWN_DIGEST = "?"


def state_after(before: dict[str, Any] | None, token: str) -> dict[str, Any]:
    """Return the state that a save with this token makes of the one before it."""
    log = [] if before is None or len(before["log"]) >= LOG_LENGTH_MAX else before["log"]
    noise = hashlib.sha256(token.encode()).digest()
    return {
        "token": token,
        "log": [*log, f"{token} {noise.hex()}"],
        "payload": hashlib.shake_128(token.encode()).digest(64 + noise[0] * 16),
        "count": len(log),
    }


def save_without_end(path: str, name: str, generation: int) -> None:
    """Save in turn on a thread of one's own and on the one that all writers share."""
    store = backstay.open(path)
    for number in range(1_000_000):
        for thread in (store.thread(f"own-{name}"), store.thread(SHARED)):
            token = f"{name}.{generation}.{number}.{thread.id}"
            before = thread.latest()
            _tell("INVOKE", token)
            try:
                saved = thread.save(state_after(before.state if before else None, token), id=_own_id(thread.id, token))
            except Conflict:
                _tell("CONFLICT", token)
            else:
                _tell("ACK", thread.id, saved.id, saved.digest.hex(), token)


def acknowledge_before_saving(path: str, name: str, generation: int) -> None:
    """Do what no store may: say that a checkpoint is kept, then keep it."""
    thread = backstay.open(path).thread(f"own-{name}")
    token = f"{name}.{generation}.early"
    before = thread.latest()
    state = state_after(before.state if before else None, token) | {"slow": os.urandom(SLOW_BYTES)}
    _tell("INVOKE", token)
    _tell("ACK", thread.id, token, UNKNOWN_DIGEST, token)
    thread.save(state, id=token)


def acknowledge_conflicts(path: str, name: str, generation: int) -> None:
    """Do what no writer may: take a conflict for success. The first line read back tells that the race is lost."""
    store = backstay.open(path)
    mine, other = store.thread(SHARED), store.thread(SHARED)
    mine.latest()
    other.save(state_after(None, f"{name}.{generation}.winner"))
    token = f"{name}.{generation}.loser"
    _tell("INVOKE", token)
    try:
        mine.save(state_after(None, token), id=token)
    except Conflict:
        _tell("ACK", SHARED, token, UNKNOWN_DIGEST, token)


def _own_id(thread: str, token: str) -> str | None:
    return None if thread == SHARED else token


def _tell(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())
