"""Reading the JSON that LangGraph wrote before it had msgpack: envelopes that name a class and its arguments.

An envelope of kind ``lc: 2`` may name a class of LangGraph's closed list, or one that the program allowed; nothing
else, whatever is loaded. One of kind ``lc: 1`` (LangChain's own) may name a message or a document.
"""

from __future__ import annotations

import json
from typing import Any, Final

from langchain_core import documents, messages
from langchain_core.load.load import Reviver
from langchain_core.load.serializable import Serializable

from backstay.errors import DecodeError
from backstay.integrations.langgraph.serde.trusted import SINGLE, Trust

_LANGCHAIN: Final = Reviver(
    allowed_objects=[
        cls
        for name in (*messages.__all__, "Document")
        if isinstance(cls := getattr(documents if name == "Document" else messages, name), type)
        and issubclass(cls, Serializable)
    ]
)


def open_json(data: bytes, trust: Trust) -> Any:
    """Return the value of a JSON text with envelopes in it."""
    only_lists = trust if trust.strict or trust.everything else trust.only_lists()

    def open_one(value: dict[str, Any]) -> Any:
        if value.get("lc") == 2 and value.get("type") == "constructor" and value.get("id") is not None:
            return _construct(value, only_lists)
        return _LANGCHAIN(value)

    try:
        return json.loads(data, object_hook=open_one)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"JSON cannot be read: {type(error).__name__}") from error


def _construct(envelope: dict[str, Any], trust: Trust) -> Any:
    # The envelope's "method" was a way to call anything on a harmless class; it is not looked at.
    place, args, kwargs = envelope["id"], envelope.get("args") or [], envelope.get("kwargs") or {}
    if type(place) is not list or not all(type(part) is str for part in place) or len(place) < 2:
        raise DecodeError("a stored object does not say which class it is of")
    module, name = ".".join(place[:-1]), place[-1]
    target = trust.find(module, name, SINGLE)
    try:
        return target(*args, **kwargs)
    except Exception as error:
        raise DecodeError(f"stored {module}.{name} cannot be rebuilt: {type(error).__name__}") from error
