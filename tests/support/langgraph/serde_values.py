"""Values for the serializers: some sixty kinds of things that people put into states, and a way to compare them.

``shown`` tells everything about a value, types included, and knows nothing of the code under test.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address, IPv6Network
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import ormsgpack
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store.base import Item
from langgraph.types import Command, Interrupt, Overwrite, Send
from pydantic import BaseModel, Field, PrivateAttr, SecretStr, field_validator
from pydantic.v1 import BaseModel as BaseModelV1

from backstay import EncodeError


class Color(enum.Enum):
    RED = "red"
    PAIR = ("a", 1)


class Word(enum.StrEnum):
    ONE = "one"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Note:
    text: str
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    text: str


@dataclasses.dataclass
class Computed:
    width: int
    area: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.area = self.width * self.width


@dataclasses.dataclass
class Counting:
    """Its constructor changes what it is given, so building it again gives another."""

    count: int

    def __post_init__(self) -> None:
        self.count += 1


@dataclasses.dataclass
class Holder:
    place: Any


class Inner(BaseModel):
    n: int


class InnerToo(Inner):
    more: str = ""


class Model(BaseModel):
    name: str
    inner: Inner | None = None
    pair: tuple[int, int] = (1, 2)


class Loose(BaseModel):
    data: Any = None
    base: Inner | None = None


class Listed(BaseModel):
    items: list[Any]


class Hidden(BaseModel):
    shown: int
    left_out: int = Field(default=0, exclude=True)
    _private: int = PrivateAttr(default=0)


class Doubling(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def double(cls, n: int) -> int:
        return n * 2


class Dated(BaseModel):
    at: datetime
    color: Color
    score: float = 1.5
    inner: Inner | None = None


class Checked(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def check(cls, n: int) -> int:
        return n


def assigned(**fields: Any) -> Dated:
    model = Dated(at=datetime(2026, 1, 1), color=Color.RED)
    for name, value in fields.items():
        setattr(model, name, value)
    return model


class Old(BaseModelV1):
    name: str


class Outer:
    """A place for classes that cannot be found by their bare names."""

    class Enum(enum.Enum):
        A = 1

    @dataclasses.dataclass
    class Data:
        n: int

    class Model(BaseModel):
        n: int


class MyList(list[int]):
    pass


class MyDict(dict[str, int]):
    pass


class MyStr(str):
    __slots__ = ()


class Plain:
    def __init__(self) -> None:
        self.n = 1


def with_extra() -> Note:
    note = Note("a")
    note.more = 1  # type: ignore[attr-defined]  # what people do
    return note


def hidden() -> Hidden:
    model = Hidden(shown=1)
    model._private = 5
    return model


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


EXACT: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bools, ints, floats": lambda: [True, 0, -1, 2**63, -(2**63), 1.5, float("inf"), float("nan"), -0.0],
    "text": lambda: ["", "a\x00b", "žluťoučký 🐎", "x" * 70_000],
    "bytes": lambda: b"\x00\xff",
    "bytes inside": lambda: {"b": [b"\xc4\xc5"]},
    "bytearray": lambda: bytearray(b"ab"),
    "nested": lambda: {"a": [{"b": [1, {"c": None}]}]},
    "deeply nested": lambda: nested(200),
    "int keys": lambda: {7: "a", None: 2, True: 3, 2.5: 4, b"k": 5},
    "tuple keys": lambda: {(1, ("a", 2)): 3},
    "set": lambda: {1, "a", None},
    "set of tuples": lambda: {("a", 1), ("b", ("c", 2))},
    "frozenset in set": lambda: {frozenset({1, 2})},
    "deque": lambda: deque([1, 2]),
    "uuid": lambda: UUID(int=5),
    "decimal": lambda: Decimal("1.10"),
    "naive datetime": lambda: datetime(2026, 1, 2, 3, 4, 5, 6),
    "utc datetime": lambda: datetime(2026, 1, 2, tzinfo=UTC),
    "offset datetime": lambda: datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2))),
    "date, time, timedelta": lambda: [date(2026, 1, 2), time(1, 2, 3, 4, UTC, fold=1), timedelta(days=-1, seconds=5)],
    "timezone": lambda: timezone(timedelta(hours=1), "here"),
    "zone": lambda: ZoneInfo("Europe/Prague"),
    "path": lambda: Path("/a/b"),
    "pattern": lambda: re.compile("a.b", re.IGNORECASE),
    "ip": lambda: [IPv4Address("10.0.0.1"), IPv6Network("fe80::/64")],
    "enum": lambda: Color.RED,
    "enum of a tuple": lambda: Color.PAIR,
    "str enum": lambda: Word.ONE,
    "int enum": lambda: Level.LOW,
    "flag": lambda: Rights.READ | Rights.WRITE,
    "namedtuple": lambda: [Point(1, 2), Pair("a", None)],
    "dataclass": lambda: Note("a", ["b"]),
    "frozen dataclass": lambda: {"set": {Frozen("a")}},
    "dataclass with init=False": lambda: Computed(3),
    "pydantic": lambda: Model(name="a"),
    "pydantic in pydantic": lambda: Model(name="a", inner=Inner(n=1), pair=(3, 4)),
    "pydantic with other types": lambda: Dated(at=datetime(2026, 1, 1), color=Color.RED, inner=Inner(n=1)),
    "pydantic with a validator": lambda: Checked(n=1),
    "pydantic v1": lambda: Old(name="a"),
    "secret": lambda: SecretStr("s"),
    "array": lambda: np.arange(6, dtype="<i4").reshape(2, 3),
    "fortran array": lambda: np.asfortranarray(np.ones((2, 3))),
    "empty array": lambda: np.zeros((0, 3)),
    "messages": lambda: [
        HumanMessage("hi", id="1", name="n"),
        AIMessage(
            [{"type": "text", "text": "x"}, "y"],
            tool_calls=[{"name": "f", "args": {"a": [1]}, "id": "c", "type": "tool_call"}],
            usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            response_metadata={"model": "m", "nested": {"a": [1, None]}},
        ),
        ToolMessage("out", tool_call_id="c", artifact={"rows": [1, 2]}),
        SystemMessage("s", additional_kwargs={"at": datetime(2026, 1, 1)}),
    ],
    "message with an extra": lambda: HumanMessage("a", more=[1, "b"]),
    "document": lambda: Document("text", metadata={"a": 1}, id="d"),
    "send": lambda: [Send("node", {"a": 1}), Send("node", None, timeout=5)],
    "interrupt": lambda: Interrupt({"q": [1]}, id="i"),
    "overwrite": lambda: Overwrite([1]),
    "snapshot": lambda: _DeltaSnapshot([1, HumanMessage("a", id="1")]),
    "item": lambda: Item(
        value={"a": 1}, key="k", namespace=("a", "b"), created_at=datetime(2026, 1, 1), updated_at=datetime(2026, 1, 2)
    ),
}
"""What comes back as it was."""

REPORTED: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (1, 2),
    "tuple inside": lambda: {"a": [{"b": (1,)}]},
    "tuple in a dataclass": lambda: Holder((1, 2)),
    "tuple in a message": lambda: HumanMessage("a", additional_kwargs={"x": (1, 2)}),
    "str subclass": lambda: [MyStr("a")],
    "list subclass": lambda: MyList([1]),
    "dict subclass": lambda: {"a": MyDict(b=1)},
    "ordered dict": lambda: OrderedDict(a=1),
    "default dict": lambda: defaultdict(list, a=[1]),
    "counter": lambda: Counter("aab"),
    "deque with maxlen": lambda: deque([1], maxlen=5),
    "bytearray inside": lambda: {"a": bytearray(b"x")},
    "exception": lambda: {"error": ValueError("secret")},
    "lone surrogate": lambda: ["a\ud800b"],
    "datetime in a zone": lambda: datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/Prague")),
    "datetime with fold": lambda: datetime(2026, 1, 1, fold=1),
    "enum key": lambda: {Color.RED: 1},
    "datetime key": lambda: {datetime(2026, 1, 1): 1},
    "uuid key": lambda: {UUID(int=1): 1},
    "int subclass key": lambda: {Level.LOW: 1},
    "nested enum": lambda: Outer.Enum.A,
    "nested dataclass": lambda: Outer.Data(1),
    "nested pydantic": lambda: Outer.Model(n=1),
    "dataclass with another attribute": with_extra,
    "dataclass that changes itself": lambda: Counting(1),
    "model in an untyped field": lambda: Loose(data=Inner(n=1)),
    "dataclass in an untyped field": lambda: Loose(data=Note("a")),
    "model of a subclass": lambda: Loose(base=InnerToo(n=1, more="x")),
    "model in a message": lambda: HumanMessage("a", additional_kwargs={"x": Inner(n=1)}),
    "ordered dict in a message": lambda: HumanMessage("a", additional_kwargs={"x": OrderedDict(a=1)}),
    "tuple in an untyped field": lambda: Loose(data=(1,)),
    "bytearray in an untyped field": lambda: Loose(data={"a": bytearray(b"x")}),
    "ordered dict in an untyped field": lambda: Loose(data=OrderedDict(a=1)),
    "enum key in an untyped field": lambda: Loose(data={Color.RED: 1}),
    "assigned number of another type": lambda: assigned(score=2),
    "assigned text for an enum": lambda: assigned(color="red"),
    "private attribute": hidden,
    "left out field": lambda: Hidden(shown=1, left_out=2),
    "validator that changes": lambda: Doubling(n=1),
    "structured array": lambda: np.zeros(2, dtype=[("a", "<i4")]),
    "frozen dataclass with a tuple": lambda: [Holder({"deep": [(1,)]})],
}
"""What would come back changed."""

REFUSED: dict[str, Callable[[], Any]] = {
    "large int": lambda: {"a": 2**64},
    "complex": lambda: [1j],
    "fraction": lambda: Fraction(1, 3),
    "range": lambda: range(3),
    "function": lambda: {"f": len},
    "lambda": lambda: lambda: 1,
    "class": lambda: Note,
    "plain object": Plain,
    "object array": lambda: np.array([object()]),
    "numpy scalar": lambda: np.float64(1.5),
    "generator": lambda: (n for n in [1]),
    "user dict": lambda: UserDict(a=1),
    "decimal key": lambda: {Decimal(1): 1},
    "too deep": lambda: nested(300),
    "memory address": lambda: [Note("a", [object()])],  # type: ignore[list-item]  # wrong on purpose
}
"""What cannot be stored."""

COMMANDS: dict[str, Callable[[], Any]] = {"command": lambda: Command(goto=["a"], update={"b": 1}, resume=None)}


def shown(value: Any) -> Any:
    """Return everything about a value, as something that can be compared."""
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, enum.Enum):
        return name, repr(value)
    if isinstance(value, dict):
        return name, [(shown(key), shown(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return name, sorted(repr(shown(item)) for item in value)
    if isinstance(value, deque):
        return name, value.maxlen, [shown(item) for item in value]
    if isinstance(value, (list, tuple)):
        return name, [shown(item) for item in value]
    if isinstance(value, np.ndarray):
        return name, str(value.dtype.descr), value.shape, repr(value.tolist())
    if isinstance(value, (datetime, time)):
        return name, repr(value)
    return name, _insides(value)


def _insides(value: Any) -> Any:
    if isinstance(value, BaseModel):
        parts = (value.__dict__, value.__pydantic_extra__ or {}, value.__pydantic_private__ or {})
        return [shown(dict(part)) for part in parts]
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    slots = [slot for base in type(value).__mro__ for slot in getattr(base, "__slots__", ()) if hasattr(value, slot)]
    if isinstance(value, (Path, UUID, Decimal, re.Pattern)) or not (slots or hasattr(value, "__dict__")):
        return repr(value)
    if isinstance(value, (IPv4Address, IPv6Network, ZoneInfo)):
        return str(value)
    return shown({name: getattr(value, name) for name in [*slots, *getattr(value, "__dict__", ())]})


def forged(code: int, *content: object) -> tuple[str, bytes]:
    """Return bytes that somebody else wrote."""
    return "msgpack", ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb(content)))


def outcome(serde: Any, value: Any) -> str:
    """Tell what becomes of a value; fail if it comes back changed and nobody said so."""
    try:
        written = serde.dumps_at(value, "channel_values.x")
    except EncodeError as error:
        named = error.path is not None and error.path.startswith("channel_values.x")
        return "unnamed" if not named else "reported" if "come back" in str(error) else "refused"
    assert shown(serde.loads_typed(written)) == shown(value)
    return "exact"
