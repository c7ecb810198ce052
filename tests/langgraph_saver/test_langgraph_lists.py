"""A list shares what its checkpoints have in common; it must show what reading each of them alone shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.langgraph import BackstaySaver
from backstay.langgraph.serde.exact import ExactSerializer

SERIALIZERS: dict[str, Callable[[], SerializerProtocol | None]] = {
    "default": lambda: None,
    "exact": ExactSerializer,
    "encrypted": lambda: EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef"),
}


@dataclasses.dataclass
class Point:
    x: int


def messages(count: int) -> list[Any]:
    return [(AIMessage if number % 2 else HumanMessage)(f"message {number}", id=str(number)) for number in range(count)]


STORIES: dict[str, list[Any]] = {
    "grows": [messages(count) for count in range(0, 30, 3)],
    "shrinks and grows": [messages(count) for count in (5, 9, 4, 12, 0, 7)],
    "stays": [list(range(20))] * 6,
    "same beginning": [["a" * 300, "b"], ["a" * 300, "b", "c"], ["a" * 300, "x"]],
    "dict grows": [{str(key): "v" * 50 for key in range(count)} for count in range(1, 12)],
    "nested": [[{"deep": [1, {"er": count}]} for count in range(length)] for length in range(0, 24, 4)],
    "text": ["x" * length for length in (10, 400, 900, 400)],
    "bytes": [b"\x00" * length for length in (0, 700, 900)],
    "objects": [[Point(number) for number in range(length)] for length in (0, 3, 30, 31)],
    "none and back": [None, messages(3), None, [], messages(4)],
}


def put_all(saver: BackstaySaver, thread: str, values: list[Any]) -> None:
    config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    for version, value in enumerate(values, 1):
        checkpoint: Checkpoint = {
            **empty_checkpoint(),
            "id": str(uuid6()),
            "channel_values": {"value": value, "constant": ["c"] * 40},
            "channel_versions": {"value": version, "constant": 1},
        }
        changed: dict[str, Any] = {"value": version} if version > 1 else {"value": 1, "constant": 1}
        config = saver.put(config, checkpoint, {"source": "loop", "step": version}, changed)


@pytest.mark.parametrize(
    ("story", "serializer"),
    # The exact codec refuses classes that it does not know.
    [(story, each) for story in STORIES for each in SERIALIZERS if (story, each) != ("objects", "exact")],
)
def test_a_list_shows_what_each_checkpoint_alone_shows(story: str, serializer: str) -> None:
    with BackstaySaver("memory:", serde=SERIALIZERS[serializer]()) as saver:
        put_all(saver, story, STORIES[story])

        listed = list(saver.list({"configurable": {"thread_id": story}}))

        assert [each.checkpoint["channel_values"]["value"] for each in listed] == STORIES[story][::-1]
        for each in listed:
            alone = saver.get_tuple(each.config)
            assert alone is not None
            assert alone == each
        assert saver.store.check()


def test_checkpoints_of_a_list_have_containers_of_their_own() -> None:
    with BackstaySaver("memory:") as saver:
        put_all(saver, "t", STORIES["grows"])

        listed = [each.checkpoint["channel_values"] for each in saver.list({"configurable": {"thread_id": "t"}})]
        listed[0]["value"].append("more")
        listed[0]["constant"].clear()

        assert [len(each["value"]) for each in listed] == [28, 24, 21, 18, 15, 12, 9, 6, 3, 0]
        assert {len(each["constant"]) for each in listed[1:]} == {40}
