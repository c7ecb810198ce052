"""Backstay's own codec as a serializer for LangGraph: what is saved comes back equal, types included, or is refused.

LangGraph's format has no tuples, no large ints, and finds classes by name; this one has no such losses, at the price
that a class of the user's must be registered with ``backstay.register`` before it can be stored. Loading runs no
constructor of the user's: objects are filled field by field, of classes registered here or by the program. What
LangGraph itself stores is registered here, a closed list. Values that LangGraph's own serializer wrote can still be
read, so that one may change over at any time.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from langchain_core import messages
from langchain_core.documents import Document
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store.base import Item
from langgraph.types import Command, Interrupt, Overwrite, Send, TimeoutPolicy

from backstay.codec import decode, encode, register
from backstay.codec.registry import BY_CLASS
from backstay.errors import DecodeError
from backstay.integrations.langgraph.serde.expected import UNNAMED, is_errors
from backstay.integrations.langgraph.serde.safe import SafeSerializer

TAG: Final = "backstay"
"""The tag of values in our own codec."""


class ExactSerializer(SerializerProtocol):
    """A serializer that gives back what it was given, or refuses it with the path of what it cannot hold.

    ``older`` reads values with other tags: by default a ``SafeSerializer``.
    """

    def __init__(self, *, older: SerializerProtocol | None = None) -> None:
        self._older = SafeSerializer() if older is None else older

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return a value as (tag, bytes)."""
        return self.dumps_at(obj, UNNAMED)

    def dumps_at(self, obj: Any, path: str) -> tuple[str, bytes]:
        """Return a value as (tag, bytes); EncodeError names the part that cannot be stored, from this path on."""
        if isinstance(obj, BaseException) and is_errors(path):
            # LangGraph notes a task's error, and looks only at whether there is one.
            obj = repr(obj)
        return TAG, encode(obj, path)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value."""
        tag, content = data
        return decode(content) if tag == TAG else self._older.loads_typed(data)


def _send_content(send: Send) -> list[Any]:
    return [send.node, send.arg, send.timeout]


def _send_from(content: Any) -> Send:
    node, arg, timeout = content
    if type(node) is not str or not (timeout is None or type(timeout) is TimeoutPolicy):
        raise DecodeError("stored content is no Send")
    return Send(node, arg, timeout=timeout)


def _item_content(item: Item) -> list[Any]:
    return [getattr(item, name) for name in Item.__slots__]


def _item_from(content: Any) -> Item:
    value, key, namespace, created_at, updated_at = content
    if type(namespace) is not tuple or type(created_at) is not datetime or type(updated_at) is not datetime:
        raise DecodeError("stored content is no Item")
    return Item(value=value, key=key, namespace=namespace, created_at=created_at, updated_at=updated_at)


_MESSAGES: Final[tuple[type, ...]] = (
    messages.AIMessage,
    messages.AIMessageChunk,
    messages.ChatMessage,
    messages.ChatMessageChunk,
    messages.FunctionMessage,
    messages.FunctionMessageChunk,
    messages.HumanMessage,
    messages.HumanMessageChunk,
    messages.RemoveMessage,
    messages.SystemMessage,
    messages.SystemMessageChunk,
    messages.ToolMessage,
    messages.ToolMessageChunk,
    Document,
)


def _register() -> None:
    """Register what LangGraph stores, unless the program has registered it under a name of its own."""
    for cls in _MESSAGES:
        if cls not in BY_CLASS:
            register(cls, name=f"langchain.{cls.__name__}")
    for cls in (Command, Interrupt, Overwrite, TimeoutPolicy, _DeltaSnapshot):
        if cls not in BY_CLASS:
            register(cls, name=f"langgraph.{cls.__name__.lstrip('_')}")
    if Send not in BY_CLASS:
        register(Send, name="langgraph.Send", encode=_send_content, decode=_send_from)
    if Item not in BY_CLASS:
        register(Item, name="langgraph.Item", encode=_item_content, decode=_item_from)


_register()
