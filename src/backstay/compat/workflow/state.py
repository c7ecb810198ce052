"""``SharedState``: the data that the nodes of a workflow share: named JSON values, and the conversation.

Values are copied in and out, so a state changes only through its own methods. It is safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar

from backstay.compat.adapter import copied, copied_list, copied_object
from backstay.errors import BackstayError, DecodeError, InvalidInput

T = TypeVar("T")


class SharedState:
    """Typed values by key, messages in order, and the current node."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = copied_object(dict(values or {}), "values")
        self._messages: list[Any] = []
        self._current_node: str | None = None
        self._lock = threading.RLock()

    # Values -------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: object) -> None:
        """Set a value; raise EncodeError, and change nothing, if JSON cannot hold it."""
        if type(key) is not str:
            raise InvalidInput(f"a key must be text, not {type(key).__name__}")
        copy = copied(value, key)
        with self._lock:
            self._values[key] = copy

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return the value if it exists and has this type, else None. A whole number can be read as a float."""
        value = self.raw(key)
        if kind is float and type(value) is int:
            value = float(value)
        return value if type(value) is kind else None

    def raw(self, key: str) -> Any:
        """Return the value as it is, or None."""
        with self._lock:
            return deepcopy(self._values.get(key))

    def contains(self, key: str) -> bool:
        """Return whether there is a value; None counts."""
        with self._lock:
            return key in self._values

    def remove(self, key: str) -> Any:
        """Remove a value and return it, or None."""
        with self._lock:
            return self._values.pop(key, None)

    def keys(self) -> list[str]:
        """Return all keys."""
        with self._lock:
            return list(self._values)

    # Messages -----------------------------------------------------------------------------------------------------

    def push_message(self, message: object) -> None:
        """Add a message; raise EncodeError if JSON cannot hold it."""
        with self._lock:
            self._messages.append(copied(message, f"messages[{len(self._messages)}]"))

    def messages(self) -> list[Any]:
        """Return the messages, oldest first."""
        with self._lock:
            return deepcopy(self._messages)

    def message_count(self) -> int:
        """Return how many messages there are."""
        with self._lock:
            return len(self._messages)

    def clear_messages(self) -> None:
        """Remove all messages."""
        with self._lock:
            self._messages.clear()

    # Position -----------------------------------------------------------------------------------------------------

    @property
    def current_node(self) -> str | None:
        """The current node, if any."""
        with self._lock:
            return self._current_node

    @current_node.setter
    def current_node(self, node: str | None) -> None:
        with self._lock:
            self._current_node = node

    # Copies and merges --------------------------------------------------------------------------------------------

    def fork(self) -> SharedState:
        """Return an independent copy."""
        return SharedState.from_json(self.to_json())

    def merge(self, other: SharedState) -> None:
        """Add the values of the other state under keys that this one does not have."""
        theirs = other.to_json()["values"]
        with self._lock:
            self._values = {**theirs, **self._values}

    def merge_overwrite(self, other: SharedState) -> None:
        """Add all values of the other state; they replace this one's."""
        theirs = other.to_json()["values"]
        with self._lock:
            self._values.update(theirs)

    def deep_merge(self, other: SharedState) -> None:
        """Add all values of the other state; where both have an object, merge them key by key, recursively."""
        theirs = other.to_json()["values"]
        with self._lock:
            merged = deepcopy(self._values)
            _deep_merge(merged, theirs)
            self._values = merged  # in one step, in case of a KeyboardInterrupt

    # JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return everything as one JSON object: values, messages, current_node."""
        with self._lock:
            values, messages = dict(self._values), list(self._messages)  # a signal handler may change them meanwhile
            whole = {"values": values, "messages": messages, "current_node": self._current_node}
            return copied_object(whole, "state")

    @classmethod
    def from_json(cls, snapshot: object) -> SharedState:
        """Make a state from the result of ``to_json``; raise DecodeError if it is something else."""
        try:
            whole = copied_object(snapshot, "state")
            state = cls(copied_object(whole.get("values"), "state.values"))
            state._messages = copied_list(whole.get("messages"), "state.messages")
            state._current_node = whole.get("current_node")
        except BackstayError as error:
            raise DecodeError(error.what, path=error.path) from error
        if not isinstance(state._current_node, str | None):
            raise DecodeError("state.current_node is neither text nor null", path="state.current_node")
        return state

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, SharedState) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"<SharedState {len(self.keys())} values, {self.message_count()} messages>"


def _deep_merge(target: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in source.items():
        mine = target.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            _deep_merge(mine, value)
        else:
            target[key] = value
