"""The value a stored object decodes to when its class is not registered here, or only in an older version.

It keeps the object's bytes, so that a worker that does not know a type can still load, change and save a state
without losing it. It never looks for the class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Opaque:
    """A stored object of a type not known here. It encodes back to the very same bytes."""

    name: str  # the name the type was registered by when it was stored
    version: int  # the version it was stored in
    raw: bytes = field(repr=False)  # its content as msgpack
    ext: int = field(repr=False)  # the ext code it was stored under
    _open: Callable[[bytes], Any] = field(repr=False, compare=False)

    @property
    def value(self) -> Any:
        """The content as plain data: the fields of a class as a dict. Types unknown in it are Opaque again."""
        return self._open(self.raw)
