"""Taking damage out of logs: what is no record is kept in files of its own, and the logs can be written anew."""

from __future__ import annotations

import os
from pathlib import Path

from backstay.store.atomic import failure, make_directory, sync_directory, write_whole
from backstay.store.directory import frame
from backstay.store.directory.log import Log
from backstay.store.directory.logs import Logs


def take_out(logs: Logs, directory: Path) -> list[Log]:
    """Copy what is damaged to a directory; return the logs that can be written anew without it now."""
    make_directory(directory)
    for number in logs.numbers():
        log = logs.look(number)
        if log is None or log.is_misplaced:
            _move(logs, number, directory)
    damaged = [log for log in logs.known.values() if log.gaps]
    for log in damaged:
        first = logs.first_bytes(log.number)
        if first != frame.file_head(log.mark):
            write_whole(directory / f"{log.path.stem}-0-{len(first)}.bin", first)
        for part in logs.scan(log, frame.FILE_HEAD_BYTES, logs.size(log)):
            end = part.end
            if isinstance(part, frame.Gap) or not frame.is_whole(logs.reader(log), part):
                data = logs.read(log.number, log.mark, part.start, end - part.start)
                write_whole(directory / f"{log.path.stem}-{part.start}-{end}.bin", data)
        log.gaps, log.broken = 0, None
    return damaged


def _move(logs: Logs, number: int, directory: Path) -> None:
    """Put a file away that does not begin as a log does, or as another one."""
    path = logs.path(number)
    logs.forget(number)
    try:
        os.replace(path, directory / path.name)
    except OSError as error:
        raise failure(error, "move", path) from error
    for changed in (directory, path.parent):
        sync_directory(changed)
