"""Messages that are known to be stored: whatever the serializer would write differently must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from backstay.langgraph import SafeSerializer
from backstay.langgraph.lists import KnownMessages


def talk() -> list[BaseMessage]:
    return [
        SystemMessage("be brief", id="0"),
        HumanMessage("hello", id="1", name="ann"),
        AIMessage(
            [{"type": "text", "text": "hi"}, {"type": "image", "data": b"\x00\x01"}],
            id="2",
            tool_calls=[{"name": "look", "args": {"deep": [1, {"er": 0.5}]}, "id": "c1"}],
            usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            response_metadata={"finished": True, "nothing": None, "score": 1},
        ),
        ToolMessage("found", tool_call_id="c1", id="3", artifact={"rows": [1, 2]}),
        HumanMessage("thanks", id="4", additional_kwargs={"mood": {"now": "fine"}}, shoe_size="44"),
    ]


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "text": lambda talk: setattr(talk[1], "content", "hallo"),
    "equal text, other object": lambda talk: setattr(talk[1], "name", "bob"),
    "nested text": lambda talk: talk[4].additional_kwargs["mood"].update(now="bad"),
    "new key": lambda talk: talk[0].additional_kwargs.update(new="x"),
    "key gone": lambda talk: talk[4].additional_kwargs.clear(),
    "content part": lambda talk: talk[2].content[0].update(text="ho"),
    "content bytes": lambda talk: talk[2].content[1].update(data=b"\x00\x02"),
    "number": lambda talk: talk[2].usage_metadata.update(input_tokens=2),
    "number to its equal": lambda talk: talk[2].usage_metadata.update(input_tokens=True),
    "number to another equal": lambda talk: talk[2].response_metadata.update(score=1.0),
    "flag to its equal": lambda talk: talk[2].response_metadata.update(finished=1),
    "deep in a tool call": lambda talk: talk[2].tool_calls[0]["args"]["deep"][1].update(er=0.25),
    "artifact": lambda talk: talk[3].artifact["rows"].append(3),
    "extra field": lambda talk: setattr(talk[4], "shoe_size", "45"),
    "another class": lambda talk: talk.__setitem__(1, AIMessage("hello", id="1", name="ann")),
    "shorter": lambda talk: talk.pop(),
    "order": lambda talk: talk.reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_in_place_is_noticed(change: str) -> None:
    messages = talk()
    known = KnownMessages.of(messages)
    assert known is not None
    assert known.starts(messages)
    before = SafeSerializer().dumps_typed(messages)

    CHANGES[change](messages)

    assert SafeSerializer().dumps_typed(messages) != before  # else there would be nothing to notice
    assert not known.starts(messages)


def test_what_is_equal_and_longer_begins_with_it() -> None:
    known = KnownMessages.of(talk())
    assert known is not None
    longer = [*talk(), HumanMessage("more", id="5")]

    assert known.starts(longer)
    assert known.extend(longer[known.count :])
    assert known.count == 6
    assert known.starts([*longer, HumanMessage("and more")])
    assert not known.starts(talk())


@pytest.mark.parametrize(
    "stranger",
    [
        {"role": "user"},
        ToolMessage("t", tool_call_id="c", artifact=object()),
        ToolMessage("t", tool_call_id="c", artifact=(1, 2)),
        HumanMessage("h", additional_kwargs={"set": {1}}),
        type("Own", (HumanMessage,), {})("h"),
    ],
    ids=["dict", "object", "tuple", "set", "subclass"],
)
def test_nothing_is_known_of_what_is_not_plain(stranger: object) -> None:
    assert KnownMessages.of([*talk(), stranger]) is None
