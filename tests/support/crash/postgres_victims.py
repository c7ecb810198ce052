"""What the writers of ``test_postgres_server_kills`` do: save without end, whatever becomes of the server.

A checkpoint's id tells its whole content, so whoever wants to know what became of a save does it again with that id.
"""

from __future__ import annotations

import hashlib
import os
import time
from itertools import count

import backstay
from backstay.errors import Conflict, OutcomeUnknown, StoreBusy
from backstay.model.checkpoint import Checkpoint
from support.simulation.history import CallRecorder, RecordedThread

THREADS = ("left", "right")
ANEW_EVERY = 16
PAYLOAD_BYTES = 300


def write(thread: RecordedThread, name: str) -> Checkpoint:
    """Save the checkpoint of this id; most are changes, which take the quick way, some are whole states."""
    number = int(name.rpartition(".")[2])
    payload = hashlib.shake_128(name.encode()).digest(PAYLOAD_BYTES)
    if number % ANEW_EVERY == 0:
        return thread.save({"log": [name], "payload": payload}, id=name)
    return thread.append({"log": [name]}, set={"payload": payload}, id=name)


def save_without_end(url: str, history: str, worker: str) -> None:
    """Save in turn on two threads that all writers share, and say how each save ended."""
    recorder = CallRecorder(history)
    store = _opened(url)
    threads = [RecordedThread(store.thread(name), recorder) for name in THREADS]
    for number in count(1):
        _save(threads[number % len(threads)], worker, f"{worker}.{number}")


def _opened(url: str) -> backstay.Store:
    while True:
        try:
            return backstay.open(url)
        except StoreBusy:
            continue


def _save(thread: RecordedThread, worker: str, name: str) -> None:
    """Save until there is an answer. Somebody else's checkpoint is one too: then look at it and go on from there."""
    while True:
        try:
            write(thread, name)
        except Conflict:
            _tell("CONFLICT", worker)
            _look(thread, worker)
            return
        except OutcomeUnknown:
            _tell("UNKNOWN", worker)
        except StoreBusy:
            _tell("BUSY", worker)
        else:
            _tell("ACK", worker)
            return


def _look(thread: RecordedThread, worker: str) -> None:
    while True:
        try:
            thread.latest()
        except StoreBusy:
            _tell("BUSY", worker)
        else:
            return


def _tell(what: str, worker: str) -> None:
    os.write(1, f"{what} {worker} {time.monotonic_ns()}\n".encode())
