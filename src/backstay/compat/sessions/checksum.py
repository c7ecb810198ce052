"""Checksums of records: they find what an accident changed, and say what it looks like.

The checksum stands in the record it covers, with the version of the layout; both are left out when it is made. It is
SHA-256 over the canonical form, so the order of keys and the spaces between them do not matter; see ``canonical``. It
has no key: whoever can change the file can change the checksum too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backstay.compat.sessions.canonical import Tree, canonical, to_tree
from backstay.errors import InvalidInput

CHECKSUM_FIELD = "_checksum"
VERSION_FIELD = "_version"
VERSION = "1.0"
_SHOWN = 16  # digits of a checksum in a reason


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something is intact. It is true if so; if not, ``reason`` says what is wrong."""

    intact: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.intact

    def __str__(self) -> str:
        return "intact" if self.intact else str(self.reason)


class ChecksumUtils:
    """Makes and compares checksums of records."""

    @staticmethod
    def compute(record: object) -> str:
        """Return the checksum of a value: 64 hexadecimal digits. What JSON cannot hold is refused."""
        return _digest(to_tree(record, "record"))

    @staticmethod
    def add_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the record with its checksum and version in it, made anew."""
        if not isinstance(record, Mapping):
            raise InvalidInput(f"a record is an object, not {type(record).__name__}")
        bare = ChecksumUtils.remove_checksum(record)
        return {**bare, CHECKSUM_FIELD: ChecksumUtils.compute(bare), VERSION_FIELD: VERSION}

    @staticmethod
    def remove_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the record without checksum and version."""
        return {key: value for key, value in record.items() if key not in (CHECKSUM_FIELD, VERSION_FIELD)}

    @staticmethod
    def verify_checksum(record: object) -> tuple[bool, str | None]:
        """Tell whether a record is what its checksum says, and if not, why."""
        problem = find_problem(to_tree(record, "record"))
        return problem is None, problem


def _digest(tree: Tree) -> str:
    return hashlib.sha256(canonical(tree).encode()).hexdigest()


def find_problem(record: Tree) -> str | None:
    """Return what is wrong with a record that was parsed, or None."""
    if not isinstance(record, dict):
        return "it is not an object"
    if CHECKSUM_FIELD not in record:
        return f"it has no {CHECKSUM_FIELD}"
    if VERSION_FIELD not in record:
        return f"it has no {VERSION_FIELD}"
    if is_of_another_version(record):
        return f"its {VERSION_FIELD} is {str(record[VERSION_FIELD])[:_SHOWN]!r}, not {VERSION!r}"
    stated = record[CHECKSUM_FIELD]
    if not isinstance(stated, str):
        return f"its {CHECKSUM_FIELD} is no text"
    actual = _digest(ChecksumUtils.remove_checksum(record))
    if stated != actual:
        return f"checksum verification failed: it says {stated[:_SHOWN]}…, its content gives {actual[:_SHOWN]}…"
    return None


def is_of_another_version(record: Tree) -> bool:
    """Tell whether a record was written in a layout this version does not know, which is no damage."""
    return isinstance(record, dict) and VERSION_FIELD in record and record[VERSION_FIELD] != VERSION
