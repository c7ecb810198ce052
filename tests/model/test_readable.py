"""Checkpoints as JSON: readable, and never an error."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import json
import math
from collections import OrderedDict, deque
from datetime import UTC, date, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest

import backstay
from backstay.codec import Opaque, decode, encode
from backstay.codec.registry import BY_CLASS, BY_NAME
from backstay.model.readable import readable, to_json


class Colour(enum.Enum):
    RED = "r"


@dataclasses.dataclass
class Note:
    text: str
    tags: set[str]


@dataclasses.dataclass
class Typed:
    type: str


class Point(NamedTuple):
    x: int


class Person(pydantic.BaseModel):
    name: str


class Broken:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


HERE = __name__
MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (MOMENT, "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (b"\x00\xff", {"type": "bytes", "base64": "AP8="}),
        ({"a": (1, {2}), "b": deque([3])}, {"a": [1, [2]], "b": [3]}),
        (OrderedDict(a=1), {"a": 1}),
        ({1: "x"}, {"type": "dict", "items": [[1, "x"]]}),
        (math.nan, {"type": "float", "text": "nan"}),
        (decimal.Decimal("1.50"), {"type": "decimal.Decimal", "text": "1.50"}),
        (timedelta(seconds=5), {"type": "datetime.timedelta", "text": "0:00:05"}),
        (PurePosixPath("a/b"), {"type": f"{PurePosixPath.__module__}.PurePosixPath", "text": "a/b"}),
        (Colour.RED, {"type": f"{HERE}.Colour", "name": "RED", "value": "r"}),
        (Note("hi", {"x"}), {"type": f"{HERE}.Note", "text": "hi", "tags": ["x"]}),
        (Typed("x"), {"type": f"{HERE}.Typed", "value": {"type": "x"}}),
        (Point(1), {"type": f"{HERE}.Point", "x": 1}),
        (Person(name="Ann"), {"type": f"{HERE}.Person", "name": "Ann"}),
        (np.array([1, 2]), {"type": "numpy.ndarray", "items": [1, 2]}),
        (Broken(), {"type": f"{HERE}.Broken", "text": "it cannot be shown"}),
    ],
)
def test_any_value_is_shown(value: Any, shown: Any) -> None:
    assert readable(value) == shown
    json.loads(to_json({"value": value}))


def test_a_value_that_contains_itself_is_shown_up_to_a_depth() -> None:
    value: list[Any] = []
    value.append(value)
    assert "cannot be shown" in to_json(value, None) or "nested too deep" in to_json(value, None)


def unregistered() -> Opaque:
    """Return an object as a program sees it that does not know its class."""
    backstay.register(Note, name="app.Note", version=3)
    data = encode(Note("x" * 1000, set()))
    del BY_NAME["app.Note"], BY_CLASS[Note]
    found = decode(data)
    assert isinstance(found, Opaque)
    return found


def test_an_opaque_object_shows_its_type_version_and_fields() -> None:
    found = unregistered()

    assert repr(found).startswith("<Opaque app.Note version 3: {'text': 'xxx")
    assert len(repr(found)) < 300
    assert readable(found) == {"type": "app.Note", "version": 3, "value": {"text": "x" * 1000, "tags": []}}


def test_a_checkpoint_as_json_has_its_identity_position_and_state(store: backstay.Store) -> None:
    thread = store.thread("t")
    saved = thread.save({"messages": ["ü"], "when": MOMENT, "note": unregistered()}, next_node="search", tags=["a"])
    loaded = thread.latest()
    assert loaded is not None
    shown = json.loads(loaded.to_json())

    assert json.loads(saved.to_json(indent=None)) == shown
    assert (shown["id"], shown["thread_id"], shown["step"], shown["next_node"]) == (saved.id, "t", 1, "search")
    assert (shown["tags"], shown["digest"], shown["frames"]) == (["a"], saved.digest.hex(), [])
    assert (shown["state"]["messages"], shown["state"]["when"]) == (["ü"], "2026-01-02T03:04:05+00:00")
    meta = json.loads(next(iter(thread.history())).to_json())
    assert meta.items() <= shown.items()
    assert "state" not in meta
