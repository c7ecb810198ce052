"""Which elements of a list are the same as last time, found without encoding them again.

Messages may be changed in place, so that it is the same object proves nothing. What proves it is that everything the
serializer would write of it is the same: a message of one of LangChain's own classes is written as its class and its
fields, so the packed fields of a list of them are a fingerprint of its encoding. If that of the old list is how that of
the new one begins, only what follows needs to be encoded. Packing plain fields is done in one call and takes a fraction
of the time of dumping models; where it is not possible (another class, a field that is not plain) there is no
fingerprint, and all is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ormsgpack
from langchain_core import messages

MESSAGE_CLASSES: dict[type, int] = {
    getattr(messages, name): number
    for number, name in enumerate(
        (
            "AIMessage",
            "ChatMessage",
            "FunctionMessage",
            "HumanMessage",
            "SystemMessage",
            "ToolMessage",
        )
    )
}

# With these, a value that is not of exactly one of msgpack's own types is refused, never converted.
_PLAIN_ONLY = (
    ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_UUID
)


def fingerprint(elements: Sequence[Any]) -> bytes | None:
    """Return bytes that differ if the encoding of any element would; None if that cannot be promised.

    The fingerprint of a longer list begins with that of a shorter one with the same elements.
    """
    try:
        plain = [[MESSAGE_CLASSES[type(each)], each.__dict__, each.__pydantic_extra__] for each in elements]
        packed = ormsgpack.packb(plain, option=_PLAIN_ONLY)
    except (KeyError, TypeError, ValueError):
        return None
    return packed[1 if len(plain) < 16 else 3 if len(plain) < 65536 else 5 :]  # without the header that has the count
