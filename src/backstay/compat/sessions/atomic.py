"""``AtomicFileWriter``: a file is replaced whole or not at all. The work is ``backstay.store.atomic``'s."""

from __future__ import annotations

import os
from pathlib import Path

from backstay.errors import InvalidInput
from backstay.store import atomic


class AtomicFileWriter:
    """Writes files atomically.

    ``sync_on_write``: what is written survives a power failure once the call returns. ``verify_write``: it is read back
    and compared before it takes the old file's place.
    """

    def __init__(self, sync_on_write: bool = True, verify_write: bool = True) -> None:
        self.sync_on_write = sync_on_write
        self.verify_write = verify_write

    def write_atomic(self, path: str | os.PathLike[str], content: str | bytes) -> None:
        """Put the content in the place of a file; missing parent directories are made."""
        target = Path(path)
        if not target.name or target.name == "..":
            raise InvalidInput(f"{str(path)!r} names no file in a directory", hint="Pass the path of a file")
        atomic.make_directory(target.parent)
        data = content.encode() if isinstance(content, str) else content
        atomic.write_whole(target, data, sync=self.sync_on_write, verify=self.verify_write)

    def safe_remove(self, path: str | os.PathLike[str]) -> bool:
        """Remove a file; return False if it was gone already."""
        return atomic.remove(Path(path), sync=self.sync_on_write)
