"""JSON or refused: what the faces accept is what JSON can say, and nothing that merely looks like it.

A value is copied on the way, all the way down, so that nobody's later change alters what was handed over. What would
come back as something else (a tuple, a NaN, a number as a key) is refused by its path before anything is stored.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from backstay.codec.limits import DEPTH_MAX
from backstay.errors import EncodeError, InvalidInput

_LEAVES = (type(None), bool, int)


def copied(value: object, path: str) -> Any:
    """Return a deep copy of a JSON value; raise EncodeError that names the part that is none."""
    return _copied(value, path, DEPTH_MAX)


def copied_object(value: object, path: str) -> dict[str, Any]:
    """Return a deep copy of a JSON object."""
    if type(value) is not dict:
        raise InvalidInput(f"{path} must be a dict, not {type(value).__name__}", path=path)
    copy: dict[str, Any] = copied(value, path)
    return copy


def copied_list(value: object, path: str) -> list[Any]:
    """Return a deep copy of a JSON array."""
    if type(value) is not list:
        raise InvalidInput(f"{path} must be a list, not {type(value).__name__}", path=path)
    copy: list[Any] = copied(value, path)
    return copy


def _copied(value: object, path: str, depth: int) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is str:
        return _text(value, path)
    if kind is float:
        return _number(value, path)
    if depth == 0:
        _refuse(path, f"is nested more than {DEPTH_MAX} levels deep", "Keep it flatter")
    if type(value) is list:
        return [_copied(item, f"{path}[{index}]", depth - 1) for index, item in enumerate(value)]
    if type(value) is dict:
        return {_key(key, path): _copied(item, f"{path}.{key}", depth - 1) for key, item in value.items()}
    _refuse(path, f"is {kind.__name__}, which JSON does not have", "Convert it to text, a number, a list or a dict")


def _text(value: Any, path: str) -> str:
    text: str = value
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse(path, "contains a lone surrogate", "Decode the text it came from correctly: it has no UTF-8 form")
    return text


def _number(value: Any, path: str) -> float:
    number: float = value
    if not math.isfinite(number):
        _refuse(path, f"is {number}, which JSON does not have", "Use None, or leave it out")
    return number


def _key(key: object, path: str) -> str:
    if type(key) is not str:
        _refuse(path, f"has a key that is {type(key).__name__}, not text", "Use str keys: JSON has no others")
    return _text(key, path)


def _refuse(path: str, why: str, hint: str) -> NoReturn:
    raise EncodeError(f"{path} {why}", path=path, hint=hint)
