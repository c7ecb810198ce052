"""Checksums of records, which detect accidental changes, and the canonical JSON that they cover.

A record holds its checksum and the version of the layout; the checksum covers everything else. It is SHA-256 over the
canonical form, so the order of keys and the spaces between them do not matter. It has no secret: a program that can
change the file can change the checksum too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from backstay.errors import DecodeError, EncodeError, InvalidInput

# Canonical JSON ---------------------------------------------------------------------------------------------------
#
# A checksum must not depend on how a program prints a float: Rust writes ``1e-7`` and ``1e+16``, older Rust ``1e16``,
# Python ``1e-07``; and a reader that parses a float one unit off would find every file damaged. So numbers keep the
# text that they have in the file, also in the canonical form (keys sorted, no spaces). New numbers are printed as
# ``serde_json`` 1.0.149 prints them, the version of the first reader of this layout.


DEPTH_MAX = 127
"""Levels of nested lists and objects, with that of the record. The first reader of this layout allows as many."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_INT_DIGITS_MAX = 309  # as many as the largest float has; Python programs wrote such numbers
_FIXED_DIGITS_MAX = 16  # it writes up to this many digits before the point ...
_LEADING_ZEROS_MAX = 5  # ... and fewer zeros than this after it; otherwise an exponent


@dataclass(frozen=True, slots=True)
class Number:
    """A number with its text in a file."""

    text: str

    @property
    def value(self) -> int | float:
        """Return the number; raise DecodeError if it is too large."""
        if not any(mark in self.text for mark in ".eE") and len(self.text) <= _INT_DIGITS_MAX:
            return int(self.text)
        value = float(self.text)
        if math.isinf(value):
            raise DecodeError(f"holds a number that is too large: {self.text[:20]}")
        return value


Tree = Any
"""None, bool, Number, str, list or dict of these: JSON with the text of its numbers."""


def parse(content: bytes) -> Tree:
    """Parse JSON and keep the text of its numbers; raise DecodeError for anything else."""
    try:
        tree = json.loads(
            content.decode("utf-8"),
            parse_float=Number,
            parse_int=Number,
            parse_constant=_no_number,
            object_pairs_hook=_object,
        )
    except RecursionError:
        raise DecodeError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise DecodeError(f"is not UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DecodeError(f"is not JSON: {error.msg} at line {error.lineno}") from None
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > DEPTH_MAX + 1:
            raise DecodeError("is nested too deeply")
        children = (
            node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
        )
        level = [item for items in children for item in items]
    return tree


def _object(pairs: list[tuple[str, Tree]]) -> dict[str, Tree]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DecodeError("has an object with a duplicate key")  # two readers could see two different values
    return found


def _no_number(name: str) -> Tree:
    raise DecodeError(f"holds {name}, which is not JSON")


def plain(tree: Tree) -> Any:
    """Return the tree as ordinary Python values."""
    if isinstance(tree, Number):
        return tree.value
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    return tree


def to_tree(value: object, where: str, depth: int = 1) -> Tree:
    """Return a copy of a value as a tree. EncodeError names the path of a value that JSON cannot hold."""
    if depth > DEPTH_MAX and isinstance(value, list | dict):
        raise EncodeError(
            f"{where} is nested more than {DEPTH_MAX} levels deep", hint="Use a flatter structure, or text"
        )
    if value is None or isinstance(value, bool | Number):
        return value
    if type(value) is int or type(value) is float:
        return Number(number_text(value, where))
    if isinstance(value, str):
        return _text(value, where)
    if type(value) is list:
        return [to_tree(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value) is dict:
        return {_key(key, where): to_tree(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise EncodeError(
        f"{where} is {type(value).__name__}, which JSON cannot hold",
        hint="Pass None, bool, int, float, str, list or dict",
    )


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EncodeError(f"{where} holds a lone surrogate", hint="Check how this text was decoded") from None
    return str.__str__(value)  # the text itself, also of an Enum member


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise EncodeError(f"{where} has a key of type {type(key).__name__}", hint="Use text keys: JSON has no others")
    return _text(key, f"a key of {where}")


def number_text(value: int | float, where: str = "number") -> str:
    """Return a number as the first reader of this layout prints it; refuse numbers that JSON cannot hold."""
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            raise EncodeError(f"{where} has more than 64 bits", hint="Pass it as text: other programs would round it")
        return str(value)
    if not math.isfinite(value):
        raise EncodeError(f"{where} is {value}", hint="JSON has no NaN and no infinity: pass None or text")
    if value == 0:
        return repr(value)
    shortest = Decimal(repr(value)).as_tuple()
    digits = "".join(map(str, shortest.digits)).rstrip("0")
    exponent = int(shortest.exponent) + len(shortest.digits) - len(digits)
    before = len(digits) + exponent  # digits before the point
    if exponent >= 0 and before <= _FIXED_DIGITS_MAX:
        text = f"{digits}{'0' * exponent}.0"
    elif 0 < before <= _FIXED_DIGITS_MAX:
        text = f"{digits[:before]}.{digits[before:]}"
    elif -_LEADING_ZEROS_MAX < before <= 0:
        text = f"0.{'0' * -before}{digits}"
    else:
        point = f".{digits[1:]}" if len(digits) > 1 else ""
        text = f"{digits[0]}{point}e{before - 1:+}"
    return f"-{text}" if value < 0 else text


def canonical(tree: Tree) -> str:
    """Return the form that checksums cover: keys sorted, no spaces."""
    return _print(tree, None)


def pretty(tree: Tree) -> str:
    """Return the form for people: keys sorted, two spaces per level, one item per line."""
    return _print(tree, "\n") + "\n"


def _print(tree: Tree, line: str | None) -> str:
    """Return a tree's text. ``line`` is the line break and the indentation of its level; None means no spaces."""
    if isinstance(tree, str):
        return _quoted(tree)
    if isinstance(tree, Number):
        return tree.text
    if not isinstance(tree, list | dict):
        return _CONSTANTS[tree]
    inner, colon = (None, ":") if line is None else (line + "  ", ": ")
    if isinstance(tree, list):
        start, end, items = "[", "]", [_print(item, inner) for item in tree]
    else:
        start, end = "{", "}"
        items = [f"{_quoted(key)}{colon}{_print(tree[key], inner)}" for key in sorted(tree)]
    if line is None or inner is None or not items:
        return start + ",".join(items) + end
    return start + inner + f",{inner}".join(items) + line + end


_quoted = json.JSONEncoder(ensure_ascii=False).encode
_CONSTANTS = {None: "null", True: "true", False: "false"}


CHECKSUM_FIELD = "_checksum"
VERSION_FIELD = "_version"
VERSION = "1.0"
_SHOWN = 16  # digits of a checksum in a reason


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a file is intact. It is false if not, and ``reason`` says what is wrong."""

    intact: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.intact

    def __str__(self) -> str:
        return "intact" if self.intact else str(self.reason)


class ChecksumUtils:
    """Makes and compares checksums of records."""

    @staticmethod
    def compute_checksum(record: object) -> str:
        """Return the checksum of a JSON value: 64 hexadecimal digits."""
        return _digest(to_tree(record, "record"))

    @staticmethod
    def add_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the record with its version and a new checksum."""
        if not isinstance(record, Mapping):
            raise InvalidInput(f"a record must be a mapping, not {type(record).__name__}")
        bare = ChecksumUtils.remove_checksum(record)
        return {**bare, CHECKSUM_FIELD: ChecksumUtils.compute_checksum(bare), VERSION_FIELD: VERSION}

    @staticmethod
    def remove_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the record without checksum and version."""
        return {key: value for key, value in record.items() if key not in (CHECKSUM_FIELD, VERSION_FIELD)}

    @staticmethod
    def verify_checksum(record: object) -> tuple[bool, str | None]:
        """Return whether a record matches its checksum, and if not, why."""
        problem = find_problem(to_tree(record, "record"))
        return problem is None, problem


def _digest(tree: Tree) -> str:
    return hashlib.sha256(canonical(tree).encode()).hexdigest()


def find_problem(record: Tree) -> str | None:
    """Return what is wrong with a parsed record, or None."""
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
        return f"its {CHECKSUM_FIELD} is not text"
    actual = _digest(ChecksumUtils.remove_checksum(record))
    if stated != actual:
        return f"checksum verification failed: it says {stated[:_SHOWN]}…, its content gives {actual[:_SHOWN]}…"
    return None


def is_of_another_version(record: Tree) -> bool:
    """Return whether a record has a version that this program does not know. That is not damage."""
    return isinstance(record, dict) and VERSION_FIELD in record and record[VERSION_FIELD] != VERSION
