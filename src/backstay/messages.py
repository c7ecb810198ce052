"""Message histories: cut one without separating a tool call from its result, and find those that are separated.

Model providers refuse a history with a tool result whose call is missing, and most refuse a call without its result.
The forms of OpenAI (chat and responses), Anthropic and LangChain are known; other messages are never counted as either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from backstay.errors import InvalidInput

__all__ = ["Unpaired", "cut_history", "find_unpaired"]

M = TypeVar("M")


class Unpaired(NamedTuple):
    """The ids of tool calls without a result, and of results without a call; false if there are none."""

    calls: list[str]
    results: list[str]

    def __bool__(self) -> bool:
        return bool(self.calls or self.results)


def cut_history(messages: Sequence[M], *, last: int) -> list[M]:
    """Return the last messages, and as many more as it takes to include the call of every tool result.

    Only those messages are looked at, unless a result has no call: such a result is left as it is.
    """
    if type(last) is not int or last < 0:
        raise InvalidInput(f"last must be a whole number, 0 or more, not {last!r:.40}")
    wanted = max(0, len(messages) - last)
    orphans: set[str] = set()
    while True:
        missing: set[str] = set()
        for start in range(len(messages), -1, -1):
            if start <= wanted and not missing:
                return list(messages[start:])
            if start:
                missing.update(name for name in _results(messages[start - 1]) if name not in orphans)
                missing.difference_update(_calls(messages[start - 1]))
        orphans |= missing


def find_unpaired(messages: Sequence[Any]) -> Unpaired:
    """Return the tool calls without a result and the results without a call, in order.

    A call that is still running has no result yet, so calls of the last message may be fine.
    """
    waiting: dict[str, None] = {}
    answered: set[str] = set()
    results: list[str] = []
    for message in messages:
        calls = list(_calls(message))
        waiting.update(dict.fromkeys(calls))
        answered.difference_update(calls)
        for name in _results(message):
            if name in waiting:
                del waiting[name]
                answered.add(name)
            elif name not in answered:
                results.append(name)
    return Unpaired(list(waiting), results)


def _calls(message: Any) -> Iterator[str]:
    """Yield the ids of the tool calls in a message."""
    if _get(message, "type") == "function_call":
        yield from _names(_get(message, "call_id"))
    for call in _items(_get(message, "tool_calls")):
        yield from _names(_get(call, "id"))
    for part in _items(_get(message, "content")):
        if _get(part, "type") == "tool_use":
            yield from _names(_get(part, "id"))


def _results(message: Any) -> Iterator[str]:
    """Yield the ids of the tool calls whose results are in a message."""
    if _get(message, "type") == "function_call_output":
        yield from _names(_get(message, "call_id"))
    yield from _names(_get(message, "tool_call_id"))
    for part in _items(_get(message, "content")):
        if _get(part, "type") == "tool_result":
            yield from _names(_get(part, "tool_use_id"))


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _names(name: Any) -> Iterator[str]:
    if isinstance(name, str):
        yield name
