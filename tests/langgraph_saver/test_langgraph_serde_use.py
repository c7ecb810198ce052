"""The serializers for LangGraph around others, under encryption, and in graphs; and the exact one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import ormsgpack
import pytest
from langchain_core import messages
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Interrupt, Send

import backstay
from backstay import BackstayError, Corrupted, DecodeError, EncodeError
from backstay.langgraph import BackstaySaver
from backstay.langgraph.encoding import load
from backstay.langgraph.lists import frames_of, load_encrypted
from backstay.langgraph.serde.changes import ValueChanged
from backstay.langgraph.serde.exact import ExactSerializer
from backstay.langgraph.serde.safe import Decrypted, SafeSerializer, hardened
from backstay.operations.load import load_values, open_head_state
from backstay.store.base import Query
from backstay.thread.access import access_of
from support.langgraph.graphs import STORIES, Stage
from support.langgraph.serde_values import (
    COMMANDS,
    EXACT,
    REFUSED,
    REPORTED,
    Color,
    Model,
    Note,
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


# Around other serializers -------------------------------------------------------------------------------------------


def encrypted(inner: SerializerProtocol | None = None) -> EncryptedSerializer:
    return EncryptedSerializer.from_pycryptodome_aes(inner or JsonPlusSerializer(), key=KEY)


def test_langgraphs_default_is_replaced_by_the_safe_one() -> None:
    for serde in (hardened(None), hardened(JsonPlusSerializer(allowed_msgpack_modules=True))):
        assert type(serde) is SafeSerializer
        assert serde.loads_typed(serde.dumps_typed(Note("a"))) == Note("a")


@pytest.mark.parametrize("listed", [None, [Note]], ids=["none", "one"])
def test_a_list_of_what_may_be_loaded_is_kept(listed: list[type] | None) -> None:
    serde = hardened(JsonPlusSerializer(allowed_msgpack_modules=listed), allow=[Color])

    assert serde.loads_typed(serde.dumps_typed(Color.RED)) is Color.RED
    with pytest.raises(DecodeError, match="Model"):
        serde.loads_typed(JsonPlusSerializer().dumps_typed(Model(name="a")))
    with pytest.raises(EncodeError) if listed is None else warnings.catch_warnings():
        assert serde.loads_typed(serde.dumps_typed(Note("a"))) == Note("a")


def test_other_serializers_are_left_as_they_are() -> None:
    class Mine(JsonPlusSerializer):
        pass

    for serde in (Mine(), ExactSerializer(), SafeSerializer()):
        assert hardened(serde) is serde
        assert not isinstance(serde, EncryptedSerializer)


def test_encryption_stays_and_what_is_inside_is_safe() -> None:
    stock, serde = encrypted(), hardened(encrypted(), on_change="raise")
    value = {"m": [HumanMessage("secret text", id="1")], "n": Note("a")}

    tag, data = serde.dumps_typed(value)
    assert tag == "msgpack+aes"
    assert b"secret text" not in data
    assert serde.loads_typed((tag, data)) == value
    assert serde.loads_typed(stock.dumps_typed(value)) == value
    assert isinstance(serde, EncryptedSerializer)
    assert isinstance(serde.serde, SafeSerializer)
    with pytest.raises(DecodeError):
        serde.loads_typed(sealed(forged(SINGLE, "builtins", "eval", "1")))
    with pytest.raises(EncodeError, match=r"channel_values\.x\.a"):
        serde.dumps_at({"a": (1,)}, "channel_values.x")  # type: ignore[attr-defined]  # it encrypts, and has this too


def sealed(data: tuple[str, bytes]) -> tuple[str, bytes]:
    """Return forged bytes as one would write them who has the key."""
    cipher, hidden = encrypted().cipher.encrypt(data[1])
    return f"{data[0]}+{cipher}", hidden


@pytest.mark.parametrize("inner", [JsonPlusSerializer(), ExactSerializer()], ids=["langgraph's", "exact"])
def test_plaintext_is_refused_once_there_is_encryption(inner: SerializerProtocol) -> None:
    plain = JsonPlusSerializer().dumps_typed({"a": 1})
    assert encrypted(inner).loads_typed(plain) == {"a": 1}  # LangGraph's own takes it

    with pytest.raises(DecodeError, match="not encrypted"):
        hardened(encrypted(inner)).loads_typed(plain)


def test_ciphertext_that_was_changed_is_refused() -> None:
    serde = hardened(encrypted())
    tag, data = serde.dumps_typed({"a": 1})

    for damaged in ((tag, data[:-1] + b"\x00"), (tag, b""), ("msgpack+rot13", data)):
        with pytest.raises(Corrupted):
            serde.loads_typed(damaged)


TAGGED = [{"a": 1}, b"raw", bytearray(b"raw"), None]
TAGS = ["msgpack", "json", "bytes", "bytearray", "null", "pickle", "", "msgpack+aes", "\ud800"]


@pytest.mark.parametrize("narrowed", [False, True], ids=["", "narrowed by LangGraph"])
def test_a_value_under_another_tag_is_refused_before_it_is_read(narrowed: bool) -> None:
    """Every value under every other tag: whoever has no key cannot have bytes read as something else."""
    serde = hardened(encrypted(), strict=narrowed)
    if narrowed:
        with BackstaySaver("memory:", serde=serde) as saver:
            serde = saver.with_allowlist({("support.langgraph.serde_values", "Note")}).serde
        assert type(serde) is EncryptedSerializer
    tried = 0
    for value in TAGGED:
        tag, data = serde.dumps_typed(value)
        own = tag.removesuffix("+aes")
        assert serde.loads_typed((tag, data)) == value
        for other in TAGS:
            if other != own:
                tried += 1
                with pytest.raises(Corrupted, match=r"encrypted with another tag|cannot be decrypted"):
                    serde.loads_typed((f"{other}+aes", data))
        with pytest.raises(DecodeError, match="not encrypted"):
            serde.loads_typed((own, data))

    assert tried == len(TAGGED) * (len(TAGS) - 1)


def test_an_exact_serializer_inside_an_encrypting_one_binds_its_tag_too() -> None:
    serde = hardened(encrypted(ExactSerializer()))
    tag, data = serde.dumps_typed((1, 2))

    assert serde.loads_typed((tag, data)) == (1, 2)
    with pytest.raises(Corrupted, match="encrypted with another tag"):
        serde.loads_typed(("msgpack+aes", data))


def test_an_element_of_an_encrypted_list_under_another_tag_is_refused() -> None:
    """The tag of each element is stored beside it; the digests are right, as whoever writes to the store can make."""
    with backstay.open("memory:") as store:
        saver = BackstaySaver(store, serde=encrypted())
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        checkpoint = {**empty_checkpoint(), "channel_values": {"m": ["one", "two"]}, "channel_versions": {"m": 1}}
        saver.put(config, checkpoint, {}, {"m": 1})  # type: ignore[arg-type]  # a plain dict
        (row,) = access_of(store).store.find(Query("", "t", payload=True))
        head_state = open_head_state(access_of(store).store, row, {})
        load_values(access_of(store).store, head_state, {"m"}, row)
        frames = frames_of(head_state.values["m"])

        assert [tag for tag, _ in frames] == ["msgpack+aes"] * 2
        for forged in ("json+aes", "bytes+aes", "msgpack+aes+aes"):
            bad = b"".join(ormsgpack.packb([forged, data]) for _, data in frames)
            with pytest.raises(Corrupted):
                load_encrypted(2, [bad], lambda typed: load(saver.serde, typed, "m"))
        for strange in (b"\x01\x02", b"\x92\xa1x\x01" * 2, b"\x92\xa1x\xc4\x01x" * 2):
            with pytest.raises(DecodeError):
                load_encrypted(2, [strange], lambda typed: load(saver.serde, typed, "m"))


def test_hardening_twice_is_hardening_once() -> None:
    once = hardened(encrypted())

    assert hardened(once) is once
    assert once.loads_typed(once.dumps_typed([1])) == [1]


def test_langgraphs_strict_mode_can_add_to_the_list() -> None:
    written = JsonPlusSerializer().dumps_typed(Note("a"))
    strict = SafeSerializer(strict=True)
    wider = strict.with_msgpack_allowlist([("support.langgraph.serde_values", "Note")])

    assert wider.loads_typed(written) == Note("a")
    assert strict.with_msgpack_allowlist([]) is strict
    assert wider.with_msgpack_allowlist([Note]) is wider
    with pytest.raises(DecodeError):
        strict.loads_typed(written)


def test_langgraphs_strict_mode_keeps_encryption_closed() -> None:
    with BackstaySaver("memory:", serde=encrypted(), strict=True) as saver:
        serde = saver.with_allowlist({("support.langgraph.serde_values", "Note")}).serde

    assert serde.loads_typed(serde.dumps_typed(Note("a"))) == Note("a")
    assert isinstance(serde, EncryptedSerializer)
    assert type(serde.cipher.decrypt(*serde.cipher.encrypt(b"a"))) is Decrypted
    with pytest.raises(DecodeError, match="not encrypted"):
        serde.loads_typed(JsonPlusSerializer().dumps_typed(1))


# The exact one ------------------------------------------------------------------------------------------------------

LANGGRAPHS: dict[str, Callable[[], Any]] = {
    "messages": EXACT["messages"],
    "all kinds of messages": lambda: [
        messages.AIMessageChunk(content="a", tool_call_chunks=[{"name": "f", "args": "{", "id": "1", "index": 0}]),
        messages.ChatMessage(content="a", role="r"),
        messages.RemoveMessage(id="x"),
        HumanMessage("a", additional_kwargs={"t": (1, {2, 3})}, more=2**80),
    ],
    "document": lambda: Document("a", metadata={"at": (1, 2)}),
    "sends": lambda: (Send("a", (1, 2)), Send("b", {"x": {1}}, timeout=3)),
    "interrupts": lambda: (Interrupt({"q": (1,)}, id="i"),),
    "command": lambda: Command(goto=(Send("a", 1),), update={"t": (1,)}),
    "overwrite": EXACT["overwrite"],
    "snapshot": EXACT["snapshot"],
    "item": EXACT["item"],
    "what LangGraph's own format loses": lambda: [(1,), {(1,)}, 2**100, 1j, {"k": {1: (2,)}}],
}


@pytest.mark.parametrize("name", LANGGRAPHS)
def test_the_exact_one_gives_back_what_it_was_given(name: str) -> None:
    value, serde = LANGGRAPHS[name](), ExactSerializer()

    tag, data = serde.dumps_typed(value)
    assert tag == "backstay"
    assert shown(serde.loads_typed((tag, data))) == shown(value)


@pytest.mark.parametrize("name", [*VALUES, *REPORTED, *REFUSED])
def test_the_exact_one_is_exact_or_refuses(name: str) -> None:
    assert outcome(ExactSerializer(), {**VALUES, **REPORTED, **REFUSED}[name]()) in ("exact", "refused")


def test_the_exact_one_reads_what_langgraphs_wrote() -> None:
    value = [HumanMessage("a", id="1")]

    assert ExactSerializer().loads_typed(JsonPlusSerializer().dumps_typed(value)) == value
    with pytest.raises(DecodeError):
        ExactSerializer().loads_typed(forged(SINGLE, "builtins", "eval", "1"))
    with pytest.raises(DecodeError):
        ExactSerializer().loads_typed(("backstay", b"\xc1"))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories_end_alike_with_the_exact_one(story: Any) -> None:
    with BackstaySaver("memory:", serde=ExactSerializer()) as saver:
        assert story(Stage(saver)) == story(Stage(InMemorySaver()))


# In graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_no_story_makes_it_cry_wolf(story: Any) -> None:
    with BackstaySaver("memory:", strict=True, on_change="raise") as saver:
        assert story(Stage(saver))


class State(TypedDict):
    pair: Any


def ended_with(saver: BackstaySaver, pair: Any) -> Any:
    graph = StateGraph(State).add_node("set", lambda state: {"pair": pair}).add_edge(START, "set").compile(saver)
    graph.invoke({"pair": None}, {"configurable": {"thread_id": "t"}})
    return graph.get_state({"configurable": {"thread_id": "t"}}).values["pair"]


def test_a_graph_that_loses_something_is_told_where() -> None:
    with BackstaySaver("memory:") as saver, pytest.warns(ValueChanged, match=r"\.pair\.a is of type tuple"):
        assert ended_with(saver, {"a": (1, 2)}) == {"a": [1, 2]}


def test_a_graph_that_cannot_be_stored_is_told_where() -> None:
    with BackstaySaver("memory:") as saver, pytest.raises(BackstayError, match=r"\.pair\.a\[0\]"):
        ended_with(saver, {"a": [object()]})


def test_a_graph_with_the_exact_one_loses_nothing() -> None:
    with BackstaySaver("memory:", serde=ExactSerializer()) as saver:
        assert ended_with(saver, {"a": (1, {(2, 3)})}) == {"a": (1, {(2, 3)})}
