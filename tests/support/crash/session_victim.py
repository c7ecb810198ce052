"""The program that kill sweeps interrupt: it saves session files, and tells line by line what it does.

python -m support.crash.session_victim ROOT N [--delete]
    save N checkpoints; with --delete, delete every second one again
python -m support.crash.session_victim --shared ROOT
    save two checkpoints, each followed by a save of the original program in the same session
python -m support.crash.session_victim --check ROOT
    open it again and print the id of every checkpoint that can be loaded

TRY id     before a save          ACK id     after it returned
DEL id     before a delete        GONE id    after it returned
ERR class  the call raised an error that a store may raise; it is tried again, as a caller would
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from backstay.compat.sessions import CheckpointData, CrashRecovery, SyncCheckpointWriter
from backstay.errors import BackstayError, OutcomeUnknown, StoreError
from support.session_records import GOLDEN, original_saves

SESSION = "victim"
SHARED = "values"
THEIRS = sorted((GOLDEN / "rust" / SHARED / "checkpoints").glob("cp_*.json"))
"""What the original program saves: its own files."""

TRIES_MAX = 4
_MOMENT = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)


def data_of(number: int) -> CheckpointData:
    """Return the n-th checkpoint, the same in every run."""
    return CheckpointData(
        checkpoint_id=f"cp-{number:06}",
        session_id=SESSION,
        created_at=_MOMENT,
        iteration=number,
        messages=[{"role": "user", "content": f"{number} " * 200}],
    )


def run(root: str, count: int, deletes: bool = False) -> None:
    """Save so many checkpoints, and delete every second one after the next was saved."""
    writer = SyncCheckpointWriter(root)
    _told(None, None, lambda: CrashRecovery(root).mark_session_active(SESSION))
    for number in range(1, count + 1):
        name = f"cp-{number:06}"
        data = data_of(number)
        _told(f"TRY {name}", f"ACK {name}", lambda data=data: writer.save(data))  # type: ignore[misc]
        if deletes and number % 2 == 0:
            before = f"cp-{number - 1:06}"
            _told(f"DEL {before}", f"GONE {before}", lambda name=before: writer.delete(SESSION, name))  # type: ignore[misc]


def run_shared(root: str) -> None:
    """Save one checkpoint after the other, and between them let the original program save, in the same session."""
    writer = SyncCheckpointWriter(root)
    for number, source in enumerate(THEIRS[:2], 1):
        _told(f"TRY cp-{number:06}", f"ACK cp-{number:06}", lambda number=number: save_shared(writer, number))  # type: ignore[misc]
        name = source.stem.rpartition("_")[2]
        _told(f"TRY {name}", f"ACK {name}", lambda source=source: save_theirs(root, source))  # type: ignore[misc]


def save_shared(writer: SyncCheckpointWriter, number: int) -> None:
    """Save the n-th checkpoint of ours. Its time is before all of theirs."""
    writer.save(CheckpointData(checkpoint_id=f"cp-{number:06}", session_id=SHARED, created_at=_MOMENT))


def save_theirs(root: str, source: Path) -> None:
    """Save a file of the original program as it does."""
    original_saves(Path(root) / SHARED / "checkpoints", source)


def check(root: str) -> tuple[list[str], list[str]]:
    """Open the files anew; return the ids that can be loaded, equal to what was saved, and what is wrong."""
    writer = SyncCheckpointWriter(root)
    scan = writer.scan(SESSION)
    wrong = [str(skip) for skip in scan.damaged]
    have = []
    for meta in scan.good:
        found = writer.load(SESSION, meta.checkpoint_id)
        if found is None or found != data_of(found.iteration):
            wrong.append(f"{meta.checkpoint_id} has another content")
        else:
            have.append(str(found.checkpoint_id))
    newest = writer.load(SESSION)
    if (None if newest is None else newest.checkpoint_id) != (have[0] if have else None):
        wrong.append("the newest is not the first of the list")
    recovery = CrashRecovery(root)
    recovery.detect_unclean_shutdown()
    wrong += [str(problem) for problem in recovery.problems]
    return have, wrong


def _told(before: str | None, after: str | None, call: Callable[[], object]) -> None:
    _tell(before)
    for attempt in range(TRIES_MAX):
        try:
            call()
        except (StoreError, OutcomeUnknown) as error:
            _tell(f"ERR {type(error).__name__}")
            assert attempt < TRIES_MAX - 1, f"{before} does not recover"
        except BackstayError as error:
            _tell(f"WRONG {type(error).__name__}: {error}")
            raise
        else:
            _tell(after)
            return


def _tell(line: str | None) -> None:
    if line is not None:
        os.write(1, f"{line}\n".encode())


def main(arguments: list[str]) -> int:
    """Do what the command line says."""
    if arguments[0] == "--check":
        have, wrong = check(arguments[1])
        for name in have:
            _tell(name)
        for problem in wrong:
            os.write(2, f"{problem}\n".encode())
        return 1 if wrong else 0
    if arguments[0] == "--shared":
        run_shared(arguments[1])
        return 0
    run(arguments[0], int(arguments[1]), "--delete" in arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
