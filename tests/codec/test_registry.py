from __future__ import annotations

import enum
import threading
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, NamedTuple

import attrs
import msgspec
import pydantic
import pytest

from backstay import register
from backstay.codec import Opaque, decode, encode, msgpack
from backstay.codec.registry import BY_NAME
from backstay.errors import DecodeError, EncodeError, InvalidInput

ran: list[str] = []


@register
@dataclass
class Note:
    text: str
    tags: list[str] = field(default_factory=list)
    size: int = field(init=False, default=0)
    extra: InitVar[int] = 0
    shared: ClassVar[int] = 1

    def __post_init__(self, extra: int) -> None:
        ran.append("Note")
        self.size = len(self.text)


@register
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: Any = None


@register
class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"
    BLUE = ("b", 1)


@register
class Level(enum.IntEnum):
    LOW = 1


@register
class Word(enum.StrEnum):
    HI = "hi"


@register
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@register
class Mode(enum.IntFlag):
    A = 1
    B = 2


@register
class Pair(NamedTuple):
    left: int
    right: Any = None


@register
class Struct(msgspec.Struct):
    a: int
    b: list[int] = []


@register
class CheckedStruct(msgspec.Struct, frozen=True, kw_only=True):
    a: int

    def __post_init__(self) -> None:
        ran.append("CheckedStruct")


@register
@attrs.define
class Attr:
    a: int
    _b: list[int] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        ran.append("Attr")


@register
@attrs.frozen(slots=False)
class FrozenAttr:
    a: int


@register
class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int
    b: list[int] = []
    _secret: int = pydantic.PrivateAttr(default=1)

    @pydantic.field_validator("a")
    @classmethod
    def check(cls, value: int) -> int:
        ran.append("Model")
        return value


@register
class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    a: int


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Celsius) and other.degrees == self.degrees

    def __hash__(self) -> int:
        return hash(self.degrees)


register(Celsius, name="Celsius", encode=lambda value: (value.degrees,), decode=lambda value: Celsius(*value))


def model() -> Model:
    made = Model.model_validate({"a": 1, "more": {"x": (1, 2)}})
    made._secret = 7
    return made


def instances() -> list[Any]:
    return [
        Note("hello", ["a"]),
        Point(1, (2, Point(3))),
        Color.RED,
        Color.CRIMSON,
        Color.BLUE,
        Level.LOW,
        Word.HI,
        Access.READ | Access.WRITE,
        Access(0),
        Mode.A | Mode.B,
        Mode(9),
        Pair(1, [Pair(2)]),
        Struct(1, [2]),
        CheckedStruct(a=5),
        Attr(1, [2]),
        FrozenAttr(1),
        model(),
        Strict(a=1),
        Celsius(20.5),
    ]


@pytest.mark.parametrize("value", instances(), ids=lambda value: type(value).__name__)
def test_a_registered_class_comes_back_equal_without_running_its_code(value: Any) -> None:
    data = encode({"a": [value, (value,)]})
    ran.clear()
    back = decode(data)

    assert ran == []
    assert back == {"a": [value, (value,)]}
    assert type(back["a"][0]) is type(value)
    assert encode(back) == data


@pytest.mark.parametrize("value", [Point(1), Color.RED, Level.LOW, Word.HI, Pair(1), FrozenAttr(1), Celsius(1)])
def test_a_registered_hashable_can_be_a_key(value: Any) -> None:
    assert decode(encode({value: {value}})) == {value: {value}}


def test_a_pydantic_model_keeps_extras_private_attributes_and_which_fields_were_set() -> None:
    back = decode(encode(model()))

    assert back.model_fields_set == {"a", "more"}
    assert back._secret == 7
    assert back.more == {"x": (1, 2)}


def test_an_attribute_beyond_the_fields_is_refused() -> None:
    note = Note("a")
    note.__dict__["other"] = 1

    with pytest.raises(EncodeError, match=r"n: Note has the attribute 'other' beyond its declared fields"):
        encode(note, "n")


def test_a_declared_field_without_a_value_is_refused() -> None:
    note = Note("a")
    del note.__dict__["text"]

    with pytest.raises(EncodeError, match="without a value"):
        encode(note)


def test_a_slot_of_a_base_class_that_is_no_field_is_refused() -> None:
    class Base:
        __slots__ = ("hidden",)

    @register
    @dataclass(slots=True)
    class Derived(Base):
        a: int

    made = Derived(1)
    assert decode(encode(made)) == made
    made.hidden = 1  # type: ignore[attr-defined, unused-ignore] # why: slots are not seen by mypy on a bare base

    with pytest.raises(EncodeError, match="hidden"):
        encode(made)


def forget(*names: str) -> None:
    for name in names:
        BY_NAME.pop(name)


def store_v1() -> bytes:
    @register(name="Doc")
    @dataclass
    class Doc:
        title: str

    data = encode([Doc("x")])
    forget("Doc")
    return data


def test_upgrades_run_one_after_the_other_on_plain_fields() -> None:
    data = store_v1()

    @register(
        name="Doc",
        version=3,
        upgrade={1: lambda old: {"name": old["title"]}, 2: lambda old: {**old, "pages": 1}},
    )
    @dataclass
    class Doc3:
        name: str
        pages: int

    assert decode(data) == [Doc3("x", 1)]
    forget("Doc")


def test_a_missing_upgrade_step_is_an_error_only_when_it_is_needed() -> None:
    data = store_v1()

    @register(name="Doc", version=3, upgrade={2: lambda old: old})
    @dataclass
    class Doc3:
        title: str

    assert decode(encode(Doc3("y"))) == Doc3("y")
    with pytest.raises(DecodeError, match="no upgrade from version 1"):
        decode(data)
    forget("Doc")


def test_an_upgrade_that_fails_is_a_decode_error() -> None:
    data = store_v1()

    @register(name="Doc", version=2, upgrade={1: lambda old: {"name": old["nope"]}})
    @dataclass
    class Doc2:
        name: str

    with pytest.raises(DecodeError, match="KeyError"):
        decode(data)
    forget("Doc")


def test_other_fields_without_a_new_version_are_an_error_that_says_what_to_do() -> None:
    data = store_v1()

    @register(name="Doc")
    @dataclass
    class Other:
        title: str
        pages: int

    with pytest.raises(DecodeError, match=r"Doc|Other.*version= and an upgrade="):
        decode(data)
    forget("Doc")


def test_a_pydantic_model_is_upgraded_by_its_fields() -> None:
    @register(name="M")
    class M1(pydantic.BaseModel):
        a: int

    data = encode(M1(a=1))
    forget("M")

    @register(name="M", version=2, upgrade={1: lambda old: {"b": old["a"]}})
    class M2(pydantic.BaseModel):
        b: int

    assert decode(data).b == 1
    forget("M")


def test_an_unregistered_class_comes_back_opaque_and_encodes_to_the_same_bytes() -> None:
    data = store_v1()
    (value,) = decode(data)

    assert isinstance(value, Opaque)
    assert repr(value) == "<Opaque Doc version 1: {'title': 'x'}>"
    assert value.value == {"title": "x"}
    assert {value: 1}[decode(data)[0]] == 1
    assert encode([value]) == data
    assert decode(encode({value: (value,)})) == {value: (value,)}


def test_unknown_classes_inside_an_opaque_value_are_opaque_too() -> None:
    @register(name="Inner")
    @dataclass(frozen=True)
    class Inner:
        a: int

    @register(name="Outer")
    @dataclass
    class Outer:
        inner: Any

    data = encode(Outer((Inner(1), Point(2))))
    forget("Inner", "Outer")
    outer = decode(data)
    inner, point = outer.value["inner"]

    assert (inner.name, inner.value, point) == ("Inner", {"a": 1}, Point(2))
    assert encode(outer) == data


def test_a_newer_version_than_the_registered_one_comes_back_opaque() -> None:
    @register(name="Doc", version=2)
    @dataclass
    class Doc2:
        pages: int

    data = encode(Doc2(3))
    forget("Doc")

    @register(name="Doc", version=1)
    @dataclass
    class Doc1:
        title: str

    value = decode(data)

    assert (value.name, value.version, value.value) == ("Doc", 2, {"pages": 3})
    assert encode(value) == data
    forget("Doc")


@pytest.mark.parametrize("version", [1, 127, 128, 255, 256, 65_535, 65_536, msgpack.VERSION_MAX])
@pytest.mark.parametrize("name", ["a", "n" * 31, "n" * 32, "ü" * 100, "n" * msgpack.NAME_BYTES_MAX])
def test_names_and_versions_of_every_length_come_back(name: str, version: int) -> None:
    @register(name=name, version=version)
    @dataclass
    class Sized:
        a: int

    data = encode(Sized(1))

    assert decode(data) == Sized(1)
    forget(name)
    opaque = decode(data)
    assert (opaque.name, opaque.version, opaque.value) == (name, version, {"a": 1})


class Bare:
    pass


class Listy(list[int]):
    pass


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Bare, {}),
        (Listy, {}),
        (Bare, {"encode": str}),
        (Bare, {"decode": str}),
        (Point, {"name": ""}),
        (Point, {"name": "n" * (msgpack.NAME_BYTES_MAX + 1)}),
        (Point, {"name": "a\nb"}),
        (Point, {"name": "\ud800"}),
        (Point, {"version": 0}),
        (Point, {"version": True}),
        (Point, {"version": msgpack.VERSION_MAX + 1}),
        (Point, {"version": 2, "upgrade": {2: str}}),
        (Point, {"version": 2, "upgrade": {1: 5}}),
        (Point, {"name": "Celsius"}),
        (5, {}),
    ],
)
def test_a_registration_that_cannot_work_is_refused(cls: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        register(cls, **options)


def test_a_dataclass_on_a_built_in_container_is_refused() -> None:
    @dataclass
    class Odd(dict[str, int]):
        a: int

    with pytest.raises(InvalidInput):
        register(Odd)


def test_a_class_defined_again_in_the_same_place_replaces_the_first() -> None:
    def cell() -> Any:
        @register(name="Cell")
        @dataclass
        class Cell:
            a: int

        return Cell

    first, second = cell(), cell()

    assert type(decode(encode(second(1)))) is second
    with pytest.raises(EncodeError):
        encode(first(1))
    forget("Cell")


def test_a_decode_function_that_fails_or_lies_is_a_decode_error() -> None:
    @register(name="Liar", encode=lambda value: 1, decode=lambda value: value)
    class Liar:
        pass

    with pytest.raises(DecodeError, match="returned a int"):
        decode(encode(Liar()))
    register(Liar, name="Liar", encode=lambda value: 1, decode=lambda value: 1 // 0)
    with pytest.raises(DecodeError, match="ZeroDivisionError"):
        decode(encode(Liar()))
    forget("Liar")


def test_registering_from_many_threads_loses_none() -> None:
    def work(number: int) -> None:
        made: Any = dataclass(type(f"Threaded{number}", (), {"__annotations__": {"a": int}}))
        register(made)
        assert decode(encode([made(1)])) == [made(1)]

    before = len(BY_NAME)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(BY_NAME) == before + 16
