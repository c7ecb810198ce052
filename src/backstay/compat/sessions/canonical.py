"""JSON whose numbers keep their text, and the one form of it that checksums are made of.

A checksum must not depend on how a program prints a float: Rust writes ``1e-7`` and ``1e16``, Python ``1e-07`` and
``1e+16``, newer Rust ``1e+16``; and a reader that parses a float one unit off would find every file damaged. So a file
is read with its numbers as they stand in it, and they go into the canonical form (keys sorted, no spaces) as they
stand. What we write ourselves is printed as ``serde_json`` with ``ryu`` prints it, so that the first reader of this
layout agrees.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backstay.errors import DecodeError, EncodeError

DEPTH_MAX = 100
"""Lists and objects inside each other. The first reader of this layout gives up at 128."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_INT_DIGITS_MAX = 20  # of 64 bits, with a sign; longer ones are read as the float that other readers see
_FIXED_DIGITS_MAX = 16  # ryu writes up to so many digits before the point ...
_LEADING_ZEROS_MAX = 5  # ... and fewer zeros than this after it, else an exponent


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it stands in a file."""

    text: str

    @property
    def value(self) -> int | float:
        """Return what it means; raise DecodeError if no number of 64 bits can be that."""
        if not any(mark in self.text for mark in ".eE") and len(self.text) <= _INT_DIGITS_MAX:
            return int(self.text)
        value = float(self.text)
        if math.isinf(value):
            raise DecodeError(f"holds a number that is too large: {self.text[:20]}")
        return value


Tree = Any
"""None, bool, Number, str, list or dict of these: JSON with the text of its numbers."""


def parse(content: bytes) -> Tree:
    """Read JSON and keep the text of its numbers; raise DecodeError if it is none."""
    try:
        tree = json.loads(
            content.decode("utf-8"),
            parse_float=Number,
            parse_int=Number,
            parse_constant=_no_number,
            object_pairs_hook=_object,
        )
        _check_depth(tree)
    except RecursionError:
        raise DecodeError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise DecodeError(f"is no UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DecodeError(f"is no JSON: {error.msg} at line {error.lineno}") from None
    return tree


def _object(pairs: list[tuple[str, Tree]]) -> dict[str, Tree]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DecodeError("has an object with a key twice")  # two readers would see two different values
    return found


def _no_number(name: str) -> Tree:
    raise DecodeError(f"holds {name}, which is no JSON")


def _check_depth(tree: Tree) -> None:
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > DEPTH_MAX + 1:
            raise DecodeError("is nested too deeply")
        level = [item for node in level for item in _items(node)]


def _items(node: Tree) -> Iterator[Tree]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list):
        yield from node


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
    """Return a copy of a value as a tree; raise EncodeError that names the place of what JSON cannot give back."""
    if depth > DEPTH_MAX:
        raise EncodeError(f"{where} is nested more than {DEPTH_MAX} deep", hint="Store it flatter, or as text")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Number):
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
        f"{where} is {type(value).__name__}, which JSON cannot give back",
        hint="Pass None, bool, int, float, str, list or dict",
    )


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EncodeError(f"{where} holds a lone surrogate", hint="Decode the text it came from correctly") from None
    return str.__str__(value)  # the text itself, also of an Enum member


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise EncodeError(f"{where} has a key of type {type(key).__name__}", hint="Keys of JSON objects are text")
    return _text(key, f"a key of {where}")


def number_text(value: int | float, where: str = "number") -> str:
    """Return a number as the first reader of this layout would print it; refuse what JSON cannot hold."""
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            raise EncodeError(f"{where} has more than 64 bits", hint="Pass it as text: other readers would round it")
        return str(value)
    if not math.isfinite(value):
        raise EncodeError(f"{where} is {value}", hint="JSON has no NaN and no infinity; pass None or text")
    sign, digits, exponent = _shortest(value)
    before = len(digits) + exponent  # digits before the point
    if exponent >= 0 and before <= _FIXED_DIGITS_MAX:
        text = f"{digits}{'0' * exponent}.0"
    elif 0 < before <= _FIXED_DIGITS_MAX:
        text = f"{digits[:before]}.{digits[before:]}"
    elif -_LEADING_ZEROS_MAX < before <= 0:
        text = f"0.{'0' * -before}{digits}"
    else:
        point = f".{digits[1:]}" if len(digits) > 1 else ""
        text = f"{digits[0]}{point}e{before - 1}"
    return sign + text


def _shortest(value: float) -> tuple[str, str, int]:
    """Return sign, the fewest digits that mean this float, and the power of ten they are multiplied by."""
    mantissa, _, power = repr(value).partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, fraction = mantissa.removeprefix("-").partition(".")
    if fraction == "0":
        fraction = ""
    digits = (whole + fraction).lstrip("0")
    exponent = int(power or "0") - len(fraction)
    stripped = digits.rstrip("0")
    if not stripped:
        return sign, "0", 0
    return sign, stripped, exponent + len(digits) - len(stripped)


def canonical(tree: Tree) -> str:
    """Return the form that checksums are made of: keys sorted, no spaces."""
    return "".join(_print(tree, [], None, 0))


def pretty(tree: Tree) -> str:
    """Return the form that people read: keys sorted, two spaces for each level, a line for each item."""
    return "".join(_print(tree, [], "  ", 0)) + "\n"


def _print(tree: Tree, out: list[str], indent: str | None, level: int) -> list[str]:
    """Append the parts of a tree's text."""
    if isinstance(tree, str):
        out.append(_quoted(tree))
    elif isinstance(tree, Number):
        out.append(tree.text)
    elif isinstance(tree, list | dict):
        _print_items(tree, out, indent, level)
    else:
        out.append(_CONSTANTS[tree])
    return out


def _print_items(tree: list[Tree] | dict[str, Tree], out: list[str], indent: str | None, level: int) -> None:
    start, end = ("[", "]") if isinstance(tree, list) else ("{", "}")
    before, after, colon = "", "", ":"
    if indent is not None:
        colon = ": "
        if tree:
            before, after = f"\n{indent * (level + 1)}", f"\n{indent * level}"
    for item in tree if isinstance(tree, list) else sorted(tree):
        out.append(start + before)
        start = ","
        if isinstance(tree, list):
            _print(item, out, indent, level + 1)
        else:
            out.append(_quoted(item) + colon)
            _print(tree[item], out, indent, level + 1)
    out.append((after if start == "," else start) + end)


_quoted = json.JSONEncoder(ensure_ascii=False).encode
_CONSTANTS = {None: "null", True: "true", False: "false"}
