"""Copies of a whole store: ``backup`` of one that works, ``salvage`` of a SQLite file that does not open.

A backup is written next to its target under a temporary name, checked byte by byte, and renamed. So a file
or directory with the target's name is a complete, sound store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from backstay.errors import Corrupted, InvalidInput, StoreRefused
from backstay.maintenance.check import check
from backstay.maintenance.repair import repair
from backstay.maintenance.report import Report
from backstay.operations.cursor import Access, Services
from backstay.operations.drivers import Offload
from backstay.store.atomic import PREFIX, failure, make_directory, sync_directory
from backstay.store.base import Backend
from backstay.store.open import STORES, open_backend, path_text
from backstay.store.sqlite.salvage import salvage_file

_COMPANIONS = ("", "-wal", "-shm", "-lock")
_REPAIRS_MAX = 4


def backup(store: Backend, services: Services, path: str | os.PathLike[str]) -> Report:
    """Write a copy of a store, as of one moment, to a new file or directory; return the report of the copy's check."""
    with _new_place(path) as place:
        store.backup(place)
        url = f"dir:{place}" if place.is_dir() else str(place)
        with contextlib.closing(open_backend(url)) as copy:
            report = check(copy, services)
        if not report:
            raise Corrupted(
                f"the copy was not kept, because the store is damaged: {report.findings[0]}",
                path=str(path),
                hint="Repair the store first: see docs/repair.md. To keep a copy as it is, close it and copy its files",
            )
    return report


def salvage(path: str | os.PathLike[str], into: str | os.PathLike[str]) -> Report:
    """Copy everything that can be read of a SQLite store, even one that does not open, into a new one.

    The file is only read; no program may have it open. The new store is repaired; the returned report lists what is
    still damaged in it. Rows on unreadable pages are lost.
    """
    with _new_place(into) as place:
        salvage_file(Path(path), place)
        with contextlib.closing(open_backend(str(place))) as store:
            access = Access(store, Services("", partial(datetime.now, UTC), str), Offload())
            report = repair(access, dry_run=False)
            for _ in range(_REPAIRS_MAX):
                if not report.applied:
                    break
                report = repair(access, dry_run=False)
            return check(store, access.services)


@contextlib.contextmanager
def _new_place(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path next to the target; if the block succeeds, it is renamed to the target."""
    text = path_text(path)
    if text is None or text.startswith(tuple(f"{scheme}:" for scheme in STORES)):
        raise InvalidInput("a copy needs the path of a new file or directory", hint='For example "backup.db"')
    target = Path(os.path.abspath(text))
    for left in ("", "-wal", "-journal"):  # SQLite would play an old log into the new file
        if os.path.lexists(f"{target}{left}"):
            hint = "Choose another path, or remove it first"
            raise StoreRefused(f"{target}{left} exists already", path=str(target), hint=hint)
    make_directory(target.parent)
    place = target.with_name(f"{PREFIX}{secrets.token_hex(16)}")
    try:
        yield place
        try:
            place.rename(target)
        except OSError as error:
            raise failure(error, "write", target) from error
        sync_directory(target.parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for companion in _COMPANIONS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(f"{place}{companion}")
