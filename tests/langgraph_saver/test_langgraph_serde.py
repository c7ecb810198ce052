"""The safe serializer for LangGraph: what bytes can make it do, and what a value can lose unnoticed. Nothing."""

from __future__ import annotations

import json
import random
import sys
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langchain_core import messages
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Command, Interrupt, Send

from backstay import DecodeError, EncodeError, InvalidInput
from backstay.langgraph.serde.changes import ValueChanged
from backstay.langgraph.serde.decode import EXT_DEPTH_MAX, FREE_LEVELS, INNER_DEPTH_MAX
from backstay.langgraph.serde.safe import SEARCHES_MAX, SafeSerializer
from support.langgraph import serde_values
from support.langgraph.serde_values import (
    COMMANDS,
    EXACT,
    REFUSED,
    REPORTED,
    Color,
    Inner,
    Listed,
    Loose,
    Model,
    Note,
    Outer,
    Pair,
    forged,
    outcome,
    shown,
)

SINGLE, POSITIONAL, KEYWORDS, METHOD, PYDANTIC_V1, PYDANTIC_V2, NUMPY, SNAPSHOT = range(8)
KEY = b"0123456789abcdef"
VALUES = {**EXACT, **COMMANDS}


@pytest.fixture(autouse=True)
def quiet_pydantic() -> Iterator[None]:
    """Let pydantic warn of a model that holds a subclass: it is what some of these values are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Pydantic serializer warnings")
        yield


# What bytes can make it do ------------------------------------------------------------------------------------------

HARM = {
    "a function of the os": forged(SINGLE, "os", "listdir", "/"),
    "eval": forged(SINGLE, "builtins", "eval", "1"),
    "a process": forged(SINGLE, "subprocess", "Popen", ["true"]),
    "a class that calls": forged(POSITIONAL, "functools", "partial", [1]),
    "a function of a loaded module": forged(SINGLE, "support.langgraph.serde_values", "nested", 3),
    "a method": forged(METHOD, "pathlib", "Path", "/etc/hostname", "read_text"),
    "a method of plain data": forged(METHOD, "support.langgraph.serde_values", "Model", "{}", "model_validate_json"),
    "a class that is no data": forged(KEYWORDS, "support.langgraph.serde_values", "Plain", {}),
    "a name that another module gave": forged(KEYWORDS, "test_langgraph_serde", "Note", {"text": "a"}),
    "a dotted name": forged(KEYWORDS, "support.langgraph.serde_values", "Outer.Data", {"n": 1}),
    "an Enum's constructor": forged(
        KEYWORDS, "support.langgraph.serde_values", "Color", {"value": "X", "names": ["A"]}
    ),
    "Enum itself": forged(KEYWORDS, "enum", "Enum", {"value": "X", "names": ["A"]}),
    "a chain": forged(PYDANTIC_V2, "langchain_core.runnables.base", "RunnableSequence", {}, ""),
    "a prompt": forged(PYDANTIC_V2, "langchain_core.prompts.prompt", "PromptTemplate", {"template": ""}, ""),
    "a module": forged(SINGLE, "support.langgraph.serde_values", "dataclasses", 1),
    "no name": forged(SINGLE, 1, ["a"], 1),
    "too little": forged(KEYWORDS, "support.langgraph.serde_values"),
    "an unknown code": forged(99, "a", "b", "c"),
    "a pickle": ("pickle", b"\x80\x04N."),
    "an unknown tag": ("yaml", b"a"),
}


@pytest.mark.parametrize("data", HARM.values(), ids=list(HARM))
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_bytes_cannot_name_what_acts(data: tuple[str, bytes], strict: bool) -> None:
    with pytest.raises(DecodeError):
        SafeSerializer(strict=strict).loads_typed(data)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the name of a module that is not loaded yet, with a class in it that is plain data."""
    name = f"trap_{tmp_path.name.replace('-', '_')}"
    source = "import dataclasses\n@dataclasses.dataclass\nclass Bait:\n    n: int\n"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_loading_imports_nothing(trap: str) -> None:
    data = forged(KEYWORDS, trap, "Bait", {"n": 1})
    for serde in (SafeSerializer(), SafeSerializer(strict=True)):
        with pytest.raises(DecodeError) as caught:
            serde.loads_typed(data)
        assert trap in str(caught.value)
        assert "Bait" in str(caught.value)
        assert "allow=" in str(caught.value)
    assert trap not in sys.modules

    # What proves that the trap works: the same bytes where everything is allowed, or the program named the class.
    assert SafeSerializer(allow=True).loads_typed(data).n == 1
    assert trap in sys.modules
    sys.modules.pop(trap)
    assert SafeSerializer(allow=[(trap, "Bait")], strict=True).loads_typed(data).n == 1


def test_everything_allowed_is_as_dangerous_as_langgraphs_default() -> None:
    assert SafeSerializer(allow=True).loads_typed(forged(SINGLE, "builtins", "eval", "40 + 2")) == 42
    assert JsonPlusSerializer(allowed_msgpack_modules=True).loads_typed(forged(SINGLE, "builtins", "len", "ab")) == 2


def test_a_module_is_not_asked_for_what_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module = types.ModuleType("lazy_module")
    module.__getattr__ = asked.append  # type: ignore[method-assign]  # what PEP 562 is
    monkeypatch.setitem(sys.modules, "lazy_module", module)

    # There is no such class, so there is nothing to build; the payload itself is harmless.
    assert SafeSerializer().loads_typed(forged(KEYWORDS, "lazy_module", "Note", {"a": 1})) == {"a": 1}

    assert asked == []


PLAIN_DATA = {
    "dataclass": Note("a"),
    "pydantic": Model(name="a"),
    "pydantic v1": serde_values.Old(name="a"),
    "enum": Color.RED,
    "namedtuple": serde_values.Point(1, 2),
}


@pytest.mark.parametrize("value", PLAIN_DATA.values(), ids=list(PLAIN_DATA))
def test_plain_data_of_loaded_modules_is_loaded_unless_strict(value: Any) -> None:
    written = JsonPlusSerializer().dumps_typed(value)

    assert shown(SafeSerializer().loads_typed(written)) == shown(value)
    assert shown(SafeSerializer(strict=True, allow=[type(value)]).loads_typed(written)) == shown(value)
    with pytest.raises(DecodeError, match=type(value).__name__):
        SafeSerializer(strict=True).loads_typed(written)


def test_a_class_that_is_nested_is_loaded_if_it_was_given() -> None:
    value = Outer.Model(n=1)
    written = JsonPlusSerializer().dumps_typed(value)

    assert shown(SafeSerializer(allow=[Outer.Model], on_change="raise").loads_typed(written)) == shown(value)
    assert SafeSerializer(allow=[Outer.Model], on_change="raise").dumps_typed(value) == written


def test_a_class_made_in_a_function_comes_back_as_plain_data_as_in_langgraph() -> None:
    """States that are classes made in functions are validated again, and that needs the payload."""
    written = JsonPlusSerializer().dumps_typed(Outer.Data(1))

    assert SafeSerializer().loads_typed(written) == {"n": 1}


def test_a_class_that_has_changed_is_an_error_and_not_a_dict() -> None:
    written = forged(KEYWORDS, "support.langgraph.serde_values", "Note", {"was": 1})

    with pytest.raises(DecodeError, match="Note"):
        SafeSerializer().loads_typed(written)


def test_allow_takes_classes_and_names_only() -> None:
    with pytest.raises(InvalidInput):
        SafeSerializer(allow=["support.langgraph.serde_values.Note"])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(InvalidInput):
        SafeSerializer(on_change="loudly")  # type: ignore[arg-type]  # wrong on purpose


def envelope(*place: str, **more: object) -> tuple[str, bytes]:
    return "json", json.dumps({"lc": 2, "type": "constructor", "id": place, **more}).encode()


def test_old_json_may_name_what_is_on_the_lists_only() -> None:
    human = envelope("langchain_core", "messages", "human", "HumanMessage", kwargs={"content": "a"}, method="parse_raw")
    note = envelope("support.langgraph.serde_values", "Note", args=["a"])

    assert SafeSerializer().loads_typed(human) == HumanMessage("a")
    assert SafeSerializer(allow=[Note]).loads_typed(note) == Note("a")
    for harm in (note, envelope("pprint", "pprint", args=[1]), envelope("a"), ("json", b"{"), ("json", b"\xff")):
        with pytest.raises(DecodeError):
            SafeSerializer().loads_typed(harm)


def test_langchains_own_envelopes_may_name_messages_only() -> None:
    def own(*place: str, **kwargs: object) -> tuple[str, bytes]:
        return "json", json.dumps({"lc": 1, "type": "constructor", "id": place, "kwargs": kwargs}).encode()

    message = own("langchain", "schema", "messages", "AIMessage", content="a")
    assert SafeSerializer().loads_typed(message) == AIMessage("a")
    with pytest.raises(DecodeError):
        SafeSerializer().loads_typed(own("langchain", "prompts", "prompt", "PromptTemplate", template="a"))


# Damaged bytes ------------------------------------------------------------------------------------------------------


def test_damaged_bytes_give_a_value_or_a_decode_error(show: Any) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    whole = [JsonPlusSerializer().dumps_typed(make())[1] for make in VALUES.values()]
    serde, refused = SafeSerializer(), 0
    for number in range(2000):
        data = mutated(bytearray(rng.choice(whole)), rng)
        try:
            serde.loads_typed(("msgpack", data))
        except DecodeError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, mutation {number}: {type(error).__name__} for {data!r}") from error

    show("damaged payloads refused", f"{refused} of 2000, the others are values (seed {seed})")
    assert refused > 500


def test_an_array_left_over_after_a_value_is_refused() -> None:
    array = b"\xc7\x0c\x06\x94\xa3<f8\x92\x00\x03\xa1C\xc4\x00"  # cannot be compared with a number

    with pytest.raises(DecodeError, match="followed by more bytes"):
        SafeSerializer().loads_typed(("msgpack", b"]" + array))


def mutated(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case _:
                data[at:] = b"" if at else data
    return bytes(data)


@pytest.mark.parametrize("arrays", [0, 200, 1000])
def test_no_depth_ends_the_process(arrays: int) -> None:
    data = ormsgpack.packb(None)
    for _ in range(300):
        data = ormsgpack.packb(ormsgpack.Ext(SNAPSHOT, b"\x91" * arrays + data))

    with pytest.raises(DecodeError, match="nested"):
        SafeSerializer().loads_typed(("msgpack", data))


@pytest.mark.parametrize("depth", [EXT_DEPTH_MAX, EXT_DEPTH_MAX + 1])
def test_the_limit_of_depth_is_the_same_both_ways(depth: int) -> None:
    value: Any = None
    for _ in range(depth):
        value = Note(value)
    serde = SafeSerializer()
    if depth > EXT_DEPTH_MAX:
        with pytest.raises(EncodeError, match="nested"):
            serde.dumps_typed(value)
        with pytest.raises(DecodeError, match="nested"):
            serde.loads_typed(JsonPlusSerializer().dumps_typed(value))
    else:
        assert serde.loads_typed(serde.dumps_typed(value)) == value


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "dataclass": Note,
    "model": lambda value: Loose(data=value),
    "model in a declared list": lambda value: Listed(items=[value]),
    "deque": lambda value: deque([value]),
    "namedtuple": lambda value: Pair(value, None),
    "send": lambda value: Send("node", value),
}


@pytest.mark.parametrize("outside", [FREE_LEVELS, FREE_LEVELS + 1])
@pytest.mark.parametrize("holder", HOLDERS)
def test_lists_inside_nested_objects_are_loaded_again_or_refused(holder: str, outside: int) -> None:
    """Encoder and decoder agree for every kind of object and every depth around the limit."""
    serde, refused = SafeSerializer(), 0
    for depth in range(INNER_DEPTH_MAX - 4, INNER_DEPTH_MAX + 3):
        value: Any = 1
        for _ in range(depth):
            value = [value]
        value = HOLDERS[holder](value)
        for _ in range(outside):
            value = Note(value)
        try:
            stored = serde.dumps_typed(value)
        except EncodeError:
            refused += 1
        else:
            assert serde.loads_typed(stored) == value

    assert refused < 7


def test_bytes_that_are_left_over_are_seen() -> None:
    tag, data = SafeSerializer().dumps_typed([1])

    with pytest.raises(DecodeError, match="followed by more bytes"):
        SafeSerializer().loads_typed((tag, data + b"\x01"))


# The same format ----------------------------------------------------------------------------------------------------

BETTER = {"set of tuples", "enum of a tuple", "dataclass with init=False", "empty array"}
"""What LangGraph writes and cannot read again."""


@pytest.mark.parametrize("name", [*VALUES, *REPORTED])
def test_the_bytes_are_langgraphs_own(name: str) -> None:
    value = {**VALUES, **REPORTED}[name]()
    stock, safe = JsonPlusSerializer(), SafeSerializer(on_change="ignore")
    tag, data = stock.dumps_typed(value)

    assert safe.dumps_typed(value) == (tag, bytes(data))
    if name not in BETTER:
        assert shown(safe.loads_typed((tag, data))) == shown(stock.loads_typed((tag, data)))


MESSAGES = [getattr(messages, name) for name in messages.__all__ if name.endswith("Message") and name != "AnyMessage"]


@pytest.mark.parametrize("cls", MESSAGES)
def test_messages_are_built_as_their_constructors_build_them(cls: Any) -> None:
    needed = {"tool_call_id": "t", "role": "r", "name": "n", "id": "i"}
    fields: dict[str, Any] = {name: needed[name] for name in needed if name in cls.model_fields}
    if cls is messages.BaseMessage:
        fields["type"] = "human"
    for content in ("text", [{"type": "text", "text": "a"}], ""):
        kwargs = fields if cls is messages.RemoveMessage else {**fields, "content": content, "more": 1}
        value = cls(**kwargs)
        written = JsonPlusSerializer().dumps_typed(value)
        safe, stock = SafeSerializer().loads_typed(written), JsonPlusSerializer().loads_typed(written)
        assert shown(safe) == shown(stock) == shown(value)
        assert safe.model_fields_set == stock.model_fields_set


ODD_MESSAGES = {
    "content of a wrong type": {"content": 5},
    "no content": {"id": "a"},
    "content blocks": {"content": "a", "content_blocks": [{"type": "text", "text": "b"}]},
    "tool calls of a wrong form": {"content": "a", "tool_calls": [{"name": 1}]},
}


@pytest.mark.parametrize("fields", ODD_MESSAGES.values(), ids=list(ODD_MESSAGES))
def test_odd_messages_are_built_as_langgraph_builds_them(fields: dict[str, Any]) -> None:
    data = forged(PYDANTIC_V2, "langchain_core.messages.ai", "AIMessage", fields, "model_validate_json")

    assert shown(SafeSerializer().loads_typed(data)) == shown(JsonPlusSerializer().loads_typed(data))


# What a value can lose ----------------------------------------------------------------------------------------------


def test_nothing_changes_in_silence(show: Any) -> None:
    serde = SafeSerializer(on_change="raise")
    found = {
        expected: {name: outcome(serde, make()) for name, make in table.items()}
        for expected, table in (("exact", VALUES), ("reported", REPORTED), ("refused", REFUSED))
    }

    counts = {expected: len(outcomes) for expected, outcomes in found.items()}
    show("values that are exact / reported / refused / changed in silence", [*counts.values(), 0])
    for expected, outcomes in found.items():
        assert outcomes == dict.fromkeys(outcomes, expected)


def test_stock_changes_in_silence(show: Any) -> None:
    """What the table above is worth: LangGraph's own serializer says nothing of these."""
    stock, changed = JsonPlusSerializer(), 0
    for make in {**VALUES, **REPORTED}.values():
        value = make()
        changed += shown(stock.loads_typed(stock.dumps_typed(value))) != shown(value)

    show("values that LangGraph's own serializer changes in silence", f"{changed} of {len(VALUES) + len(REPORTED)}")
    assert changed >= len(REPORTED)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": 2**70}]}, "channel_values.x.a[1].b"),
        ([Note("a", [1j])], "channel_values.x[0].tags[0]"),  # type: ignore[list-item]  # wrong on purpose
        ([HumanMessage("a", additional_kwargs={"k": len})], "channel_values.x[0].additional_kwargs.k"),
        ({"a b": {1: object()}}, "channel_values.x['a b'][1]"),
        (Send("n", {"f": print}), "channel_values.x.arg.f"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(EncodeError) as caught:
        SafeSerializer().dumps_at(value, "channel_values.x")

    assert caught.value.path == path
    assert caught.value.hint


def test_the_tail_of_a_list_is_named_by_its_place_in_the_list() -> None:
    with pytest.raises(EncodeError) as caught:
        SafeSerializer(on_change="raise").dumps_at([0, {"a": (1,)}], "channel_values.x[7:]")

    assert caught.value.path == "channel_values.x[8].a"


def test_a_change_is_told_once_for_each_place_and_type() -> None:
    serde = SafeSerializer()
    with pytest.warns(ValueChanged) as told:
        saved_often(serde, [{"a": (1,)}, {"a": (2,), "b": (3,)}])

    changes = [each.message for each in told]
    assert [(each.path, each.before, each.after) for each in changes if isinstance(each, ValueChanged)] == [
        ("channel_values.x[0].a", "tuple", "list"),
        ("channel_values.x[1].b", "tuple", "list"),
    ]


def saved_often(serde: SafeSerializer, value: Any) -> None:
    for _ in range(SEARCHES_MAX):
        serde.dumps_at(value, "channel_values.x")
        serde.dumps_at(value, "writes.x")


def test_a_place_that_keeps_losing_the_same_is_not_searched_for_ever() -> None:
    serde = SafeSerializer()
    with pytest.warns(ValueChanged):
        saved_often(serde, (1,))

    assert not serde._reported.should_search("x", frozenset({"tuple"}))
    assert serde._reported.should_search("x", frozenset({"tuple", "deque"}))


def test_a_class_that_could_not_be_loaded_is_refused_when_it_is_saved() -> None:
    with pytest.raises(EncodeError, match="allow=") as caught:
        SafeSerializer(strict=True).dumps_at({"a": [Inner(n=1)]}, "channel_values.x")

    assert caught.value.path == "channel_values.x.a[0]"
    assert SafeSerializer(strict=True, allow=[Inner]).dumps_typed([Inner(n=1)])


class Broken(Note):
    def model_dump(self) -> Any:
        raise ZeroDivisionError("with a secret in it")


def test_code_of_the_users_that_fails_is_named_without_its_text() -> None:
    with pytest.raises(EncodeError, match="ZeroDivisionError") as caught:
        SafeSerializer().dumps_at([1, Broken("a")], "channel_values.x")

    assert caught.value.path == "channel_values.x[1]"
    assert "secret" not in str(caught.value)


def test_an_interrupt_by_the_user_is_no_encode_error() -> None:
    class Slow(Note):
        @property
        def model_dump(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SafeSerializer().dumps_typed([Slow("a")])


QUIET = {
    "writes.__error__": ValueError("x"),
    "writes.__interrupt__": (Interrupt("q", id="i"),),
    "writes.__resume__": [("a",)],
    "channel_values.__pregel_tasks": [Send("a", (1, 2))],
    "channel_values.__start__": {"messages": [("user", "hi")], "n": (1,)},
    "channel_values.branch:to:a.b": (None, True),
    "channel_values.join:a+b:c": ({"a"}, False),
    "writes.messages": [("user", "hi"), ["ai", "hello"]],
    "channel_values.x": Command(goto=()),
    "channel_values.text": {"answer": HumanMessage("hi").text},
}


@pytest.mark.parametrize("path", QUIET)
def test_what_langgraph_writes_itself_is_not_reported(path: str) -> None:
    SafeSerializer(on_change="raise").dumps_at(QUIET[path], path)


# Figures ------------------------------------------------------------------------------------------------------------


def test_how_long_it_takes(show: Any) -> None:
    asked = [HumanMessage("hello " * 100, id=str(number)) for number in range(500)]
    answered = [AIMessage("word " * 100, id=f"a{number}", response_metadata={"m": "x"}) for number in range(500)]
    values = {
        "1,000 messages": [*asked, *answered],
        "1,000 dataclasses": [Note("a", ["b"]) for _ in range(1000)],
        "1,000 models": [Loose(data={"a": [1, "b"]}) for _ in range(1000)],
    }
    stock, safe = JsonPlusSerializer(), SafeSerializer(on_change="raise")
    for name, value in values.items():
        written = stock.dumps_typed(value)
        assert safe.dumps_typed(value) == written
        dumps = ratio(lambda value=value: safe.dumps_typed(value), lambda value=value: stock.dumps_typed(value))
        loads = ratio(lambda data=written: safe.loads_typed(data), lambda data=written: stock.loads_typed(data))
        show(f"{name}: safe / LangGraph's", f"save {dumps:.2f}, load {loads:.2f}")


def ratio(one: Any, other: Any) -> float:
    def seconds(call: Any) -> float:
        begin = time.thread_time()
        call()
        return time.thread_time() - begin

    pairs = [(seconds(one), seconds(other)) for _ in range(7)]
    return min(pair[0] for pair in pairs) / max(min(pair[1] for pair in pairs), 1e-9)
