"""Histories are cut between messages that belong together, and separated ones are found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.messages import Unpaired, cut_history, find_unpaired

USER = {"role": "user", "content": "hello"}


def openai(*names: str) -> list[Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in names]
    results = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in names]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def responses(*names: str) -> list[Any]:
    calls = [{"type": "function_call", "id": f"fc_{name}", "call_id": name, "name": "f"} for name in names]
    return [*calls, *({"type": "function_call_output", "call_id": name, "output": "1"} for name in names)]


def anthropic(*names: str) -> list[Any]:
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in names]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "1"} for name in names]
    return [
        {"role": "assistant", "content": [{"type": "text", "text": "…"}, *calls]},
        {"role": "user", "content": results},
    ]


def langchain(*names: str) -> list[Any]:
    messages = pytest.importorskip("langchain_core.messages")
    calls = [{"name": "f", "args": {}, "id": name} for name in names]
    results = [messages.ToolMessage("1", tool_call_id=name) for name in names]
    return [messages.AIMessage("", tool_calls=calls), *results]


FORMS = [openai, responses, anthropic, langchain]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_stays_with_its_results(form: Any) -> None:
    pair = form("a", "b")
    history = [USER, *pair, USER, *form("c"), USER]

    for last in range(len(history) + 3):
        cut = cut_history(history, last=last)
        assert not find_unpaired(cut)
        assert cut == (history[-len(cut) :] if cut else [])
        assert len(cut) >= min(last, len(history))
    assert cut_history(history, last=1) == [USER]
    assert cut_history([*history, *pair], last=1) == pair


@pytest.mark.parametrize("form", FORMS)
def test_separated_calls_and_results_are_found(form: Any) -> None:
    pair = form("a", "b")

    assert not find_unpaired([USER, *pair, USER])
    assert find_unpaired([USER, *pair[:-1]]).calls
    assert find_unpaired([USER, *pair[-1:]]).results == (["a", "b"] if form is anthropic else ["b"])
    assert find_unpaired([*pair[-1:], *pair]).results  # a call that comes later does not count


def test_an_id_that_is_used_again_names_the_last_call() -> None:
    history = [*openai("x"), USER, *openai("x")]

    assert find_unpaired(history) == Unpaired([], [])
    assert cut_history(history, last=1) == history[3:]
    assert cut_history(history, last=4) == history[0:]


def test_messages_without_tools_are_cut_anywhere() -> None:
    history: list[Any] = ["text", None, 5, {"role": "tool"}, {"content": [1, {"type": "tool_use"}]}, USER]

    assert [len(cut_history(history, last=last)) for last in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    assert find_unpaired(history) == Unpaired([], [])


@pytest.mark.parametrize("last", [-1, True, 1.0, "1", None])
def test_a_number_of_messages_that_is_none_is_refused(last: Any) -> None:
    with pytest.raises(InvalidInput, match="last must be a whole number"):
        cut_history([], last=last)


MESSAGES = st.one_of(
    st.just(USER),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=2).map(lambda names: openai(*names)[0]),
    st.sampled_from("abc").map(lambda name: openai(name)[1]),
)


@given(st.lists(MESSAGES, max_size=12), st.integers(0, 13))
def test_a_cut_separates_nothing_that_was_together(history: list[Any], last: int) -> None:
    """A result belongs to the last call before it with its id. Results without any call do not matter."""
    links = []
    for at, message in enumerate(history):
        if (name := message.get("tool_call_id")) is not None:
            calls = [i for i in range(at) if name in [call["id"] for call in history[i].get("tool_calls", ())]]
            links += [(calls[-1], at)] if calls else []
    orphans = set(find_unpaired(history).results)

    start = len(history) - len(cut_history(history, last=last))

    assert start <= max(0, len(history) - last)
    if not orphans:
        allowed = [at for at in range(len(history) + 1) if not any(i < at <= j for i, j in links)]
        assert start == max(at for at in allowed if at <= max(0, len(history) - last))
