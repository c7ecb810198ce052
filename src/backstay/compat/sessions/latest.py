"""``latest.json``: names the newest checkpoint, for people and for readers that know no other order.

It is a link that holds a bare name, so the tree can be moved, and is replaced in one step. Where links cannot be had
(Windows) it is a plain copy. It is never trusted: a link that leads out of the directory is not followed, and if it
names another checkpoint than the order does, that is said.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from backstay.compat.sessions.canonical import parse
from backstay.compat.sessions.folder import LATEST, LINK_PREFIX, SessionFolder, id_in, read_file
from backstay.errors import BackstayError
from backstay.store import atomic


def point_latest(folder: SessionFolder, name: str, *, link: bool) -> None:
    """Let ``latest.json`` name a checkpoint, in one step, safe against a power failure."""
    path = folder.checkpoints / LATEST
    if not link:
        atomic.write_whole(path, read_file(folder.checkpoints / name) or b"")
        return
    temporary = folder.checkpoints / f"{LINK_PREFIX}{secrets.token_hex(16)}"
    try:
        os.symlink(name, temporary)
        os.replace(temporary, path)
    except OSError as error:
        atomic.remove(temporary)
        raise atomic.failure(error, "replace", path) from error
    atomic.sync_directory(folder.checkpoints)


def linked_name(folder: SessionFolder, names: list[str]) -> tuple[str | None, str | None]:
    """Return which checkpoint's file ``latest.json`` stands for, and what is odd about it, if anything is.

    A name that is not among those given was saved after they were listed.
    """
    if LATEST not in names:
        return None, None
    path = folder.checkpoints / LATEST
    try:
        name = os.readlink(path) if path.is_symlink() else _copied(path, names)
    except (OSError, BackstayError) as error:
        return None, f"{LATEST} cannot be read: {error}"
    if name is None or id_in(name) is None:
        return None, f"{LATEST} names no checkpoint of this directory, and is not followed"
    if name not in names and not os.path.lexists(folder.checkpoints / name):
        return None, f"{LATEST} names {name}, which is not there"
    return name, None


def _copied(path: Path, names: list[str]) -> str | None:
    """Return the name of the checkpoint that a plain file is a copy of."""
    record = parse(read_file(path) or b"")
    wanted = record.get("checkpoint_id") if isinstance(record, dict) else None
    return next((name for name in reversed(names) if wanted is not None and id_in(name) == wanted), None)
