"""What the killed and failed processes of ``test_file_syscalls`` do: save JSON files, and tell line by line.

TRY id     before a save          ACK id     after it returned
DEL id     before a delete        GONE id    after it returned
ERR class  the call raised an error that a store may raise; it is tried again, as a caller would
FDS n      at the end: how many descriptors more are open than at the beginning
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from backstay.compat.workflow import FileCheckpointStore
from backstay.compat.workflow import files as file
from backstay.errors import OutcomeUnknown, StoreError
from backstay.store import atomic
from support.crash import session_victim, workflow_victim

TRIES_MAX = 4

T = TypeVar("T")


def sessions(root: str, count: int) -> None:
    """Save session files and delete every second one (S1)."""
    before = _descriptors()
    session_victim.run(root, count, deletes=True)
    _tell(f"FDS {_descriptors() - before}")


def shared_sessions(root: str, _: int) -> None:
    """Save session files in turn with the original program (S1)."""
    session_victim.run_shared(root)


def workflows(root: str, count: int) -> None:
    """Save workflow checkpoints; every third replaces the one before it (S4).

    All in one thread, because strace counts the calls of each thread by itself.
    """
    setattr(file, "in_worker", _here)  # noqa: B010 - it is not the module's to give away
    asyncio.run(_workflows(root, count))


def workflows_in_place(root: str, count: int) -> None:
    """Do what no writer may: write where the file is, over the old one."""

    @contextlib.contextmanager
    def in_place(path: Path, **_: object) -> Iterator[BinaryIO]:
        with path.open("wb") as opened:
            yield opened

    atomic.replacing = in_place
    workflows(root, count)


async def _here(function: Callable[[], T]) -> T:
    return function()


async def _workflows(root: str, count: int) -> None:
    store = FileCheckpointStore(Path(root))
    before = _descriptors()
    for number in range(count):
        made = workflow_victim.checkpoint(number)
        name = f"{made.id}.{made.state_snapshot['version']}"
        _tell(f"TRY {name}")
        for _ in range(TRIES_MAX):
            try:
                await store.save(made)
            except (StoreError, OutcomeUnknown) as error:
                _tell(f"ERR {type(error).__name__}")
            else:
                _tell(f"ACK {name}")
                break
        else:
            raise AssertionError(f"{name} does not recover")
    _tell(f"FDS {_descriptors() - before}")


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # the fault hit this call instead of one of the store's
        return len(os.listdir("/proc/self/fd"))


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())
