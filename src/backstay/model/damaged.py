"""Damaged: what a list shows in the place of a stored entry that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backstay.errors import Corrupted, InvalidInput

OnDamage = Literal["raise", "mark"]
"""What a list does at an entry that cannot be read: raise its error, or show a ``Damaged`` in its place and go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """Stands in a list for a stored entry that cannot be read; ``error`` says what is wrong and what to do next."""

    thread_id: str | None  # None: a part of the store that may hold entries of any thread
    id: str | None  # of the checkpoint, interrupt or session, or the effect's key; None if that cannot be read either
    seq: int  # its number in the order of the list; 0 if it is not known
    error: Corrupted


def check_on_damage(on_damage: object) -> OnDamage:
    """Return it if it is one of the two words."""
    if on_damage not in ("raise", "mark"):
        raise InvalidInput(f"on_damage is {on_damage!r:.40}", hint='Pass "raise" or "mark"')
    return "mark" if on_damage == "mark" else "raise"
