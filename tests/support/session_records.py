"""What the tests of session files share: records to save, and faults that prove that they fired."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backstay.compat.sessions import CheckpointData, SyncCheckpointWriter

START = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
GOLDEN = Path(__file__).parents[1] / "golden" / "sessions"


def record(number: int = 1, session: str = "s1", **fields: Any) -> CheckpointData:
    """Return the n-th record of a session, one minute after the one before."""
    values: dict[str, Any] = {
        "checkpoint_id": f"id-{number}",
        "session_id": session,
        "created_at": START + timedelta(minutes=number),
        "iteration": number,
        "messages": [{"role": "user", "content": f"message {number}"}],
        **fields,
    }
    return CheckpointData(**values)


def fill(root: Path, count: int, session: str = "s1", **options: Any) -> SyncCheckpointWriter:
    """Return a writer that has saved so many records."""
    writer = SyncCheckpointWriter(root, **options)
    for number in range(1, count + 1):
        writer.save(record(number, session))
    return writer


def folder(root: Path, session: str = "s1") -> Path:
    return root / session / "checkpoints"


def names(root: Path, session: str = "s1", ending: str = "") -> list[str]:
    return sorted(name for name in os.listdir(folder(root, session)) if name.endswith(ending))


def file_of(root: Path, number: int, session: str = "s1", ending: str = ".json") -> Path:
    """Return the path of the n-th record's file."""
    (found,) = (path for path in folder(root, session).iterdir() if path.name.endswith(f"_id-{number}{ending}"))
    return found


def damage(path: Path) -> None:
    """Change a letter inside a message."""
    content = path.read_bytes()
    changed = content.replace(b"message", b"massage")
    assert changed != content
    path.write_bytes(changed)


class Fault:
    """A system call that fails whenever it concerns a path of a certain kind; ``fired`` counts."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        concerns: Callable[[str], bool],
        code: int = errno.EIO,
    ) -> None:
        self.fired = 0
        real: Callable[..., Any] = getattr(os, call)

        def failing(*arguments: Any, **named: Any) -> Any:
            if any(concerns(path_of(argument)) for argument in arguments[:2]):
                self.fired += 1
                raise OSError(code, os.strerror(code))
            return real(*arguments, **named)

        monkeypatch.setattr(os, call, failing)


def path_of(argument: object) -> str:
    """Return the path that an argument of a system call names."""
    if isinstance(argument, int):
        try:
            return os.readlink(f"/proc/self/fd/{argument}")
        except OSError:
            return ""
    return str(argument)


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of its own that says "ready" and then waits for its standard input to end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


# The original program ---------------------------------------------------------------------------------------------


def original(root: Path, part: str = "rust") -> Path:
    """Return a copy of the directories that the original program wrote."""
    return Path(shutil.copytree(GOLDEN / part, root / part, symlinks=True))


def original_saves(checkpoints: Path, source: Path, *, link: bool = True, until: str = "end") -> None:
    """Do to a directory what the original program does when it saves this file of its own, step by step."""
    latest = checkpoints / "latest.json"
    if latest.exists():
        shutil.copyfile(latest, checkpoints / "latest.json.backup")
    temporary = checkpoints / f".tmp_checkpoint_{source.stem}-uuid"
    temporary.write_bytes(source.read_bytes())
    if until == "written":
        return
    temporary.rename(checkpoints / source.name)
    if until == "renamed":
        return
    if not link:
        shutil.copyfile(source, latest)
        return
    moved = checkpoints / f".tmp_latest_{source.stem}-uuid"
    moved.symlink_to(source.name)
    if until == "linked":
        return
    moved.rename(latest)
