"""The program that a sweep kills while it saves workflow checkpoints as files.

    python -m support.crash.workflow_victim BASE N
        saves N checkpoints; prints ``TRY id`` before each and ``ACK id`` after
    python -m support.crash.workflow_victim --check BASE
        prints every id that can be loaded; fails if one that is listed cannot be

The ids are ``c0``, ``c1`` ...; every third save replaces the one before it. What an id holds names its version, so a
reader can tell the old one from the new one: ``state_snapshot`` is ``{"id": id, "version": n, "filler": "..."}``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backstay.compat.workflow import Checkpoint, FileCheckpointStore, InterruptType

FILLER = "0123456789abcdef" * 400  # more than one page of the file system
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def checkpoint(number: int) -> Checkpoint:
    """Return what the victim saves as its ``number``-th: a new id, or a new version of the one before."""
    replaces = number % 3 == 2
    name = f"c{number - 1 if replaces else number}"
    return Checkpoint(
        id=name,
        graph_name="victim",
        current_node="node",
        state_snapshot={"id": name, "version": 2 if replaces else 1, "filler": FILLER},
        path=[f"n{step}" for step in range(number)],
        step_count=number,
        created_at=BEGIN + timedelta(seconds=number),
        interrupt_type=InterruptType.BEFORE_NODE,
        run_id="victim",
    )


async def save(base: Path, count: int) -> None:
    store = FileCheckpointStore(base)
    for number in range(count):
        made = checkpoint(number)
        _tell(f"TRY {made.id}")
        await store.save(made)
        _tell(f"ACK {made.id}")


async def check(base: Path) -> int:
    """Load everything that the list shows; return the exit code."""
    store = FileCheckpointStore(base)
    listed = await store.list()
    bad: list[object] = [problem for problem in listed.problems if problem.kind != "leftover"]
    for info in listed:
        loaded = await store.load(info.id)
        if loaded is None or loaded.state_snapshot["id"] != info.id or loaded.state_snapshot["filler"] != FILLER:
            bad.append(info)
        else:
            _tell(info.id)
    for each in bad:
        sys.stderr.write(f"{each}\n")
    return 1 if bad else 0


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--check"]:
        return asyncio.run(check(Path(arguments[1])))
    asyncio.run(save(Path(arguments[0]), int(arguments[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
