"""Why a value cannot be stored, said without yet knowing where in the state it is.

The tables of types raise this; the search for the path turns it into the ``EncodeError`` the caller sees.
"""

from __future__ import annotations


class Refused(Exception):
    """A value that could not come back equal."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        self.reason = reason
        self.hint = hint
        super().__init__(reason)
