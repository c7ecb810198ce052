"""The short form in which a position is stored with every step.

A frame says many things twice: the node it stands at is the one to run next, and how often that was entered follows
from the counts. So a frame is a list ``[graph, next, last node, cursor, visits]``, and only what does not follow from
these comes after them, as a map of the frame's own fields. ``next`` is a node's name, or any other continuation as it
is, or None. In the outermost frame as many steps were done as its cursor says, unless they are given.

Frames that a caller gave are stored as maps of all their fields; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backstay.errors import DecodeError
from backstay.model.continuation import NextNode
from backstay.model.frame import FrameStack

NONE = FrameStack()


def shorten(frames: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return plain frames in their short form."""
    return [_short(dict(frame), is_outermost=not index) for index, frame in enumerate(frames)]


def read(stored: Sequence[Any], state: Mapping[str, Any]) -> FrameStack:
    """Return a stack from either form; the outermost graph's state is the checkpoint's own, if it has none there."""
    plain = [
        each if isinstance(each, dict) else _long(each, is_outermost=not index) for index, each in enumerate(stored)
    ]
    if plain and "state" not in plain[0]:
        plain[0] = {**plain[0], "state": state}
    return FrameStack.from_plain(plain)


def _short(frame: dict[str, Any], is_outermost: bool) -> list[Any]:
    todo, last, cursor = frame.pop("continuation", None), frame.pop("last_node", None), frame.pop("cursor", 0)
    visits = frame.pop("visits", {})
    following = todo["node"] if todo is not None and todo["kind"] == NextNode.kind else todo
    short = [frame.pop("graph_id"), following, last, cursor, visits]
    for name, value in _implied(following, last, cursor, visits, is_outermost).items():
        if frame.get(name, 0) == value:
            frame.pop(name, None)
        else:
            frame.setdefault(name, 0)
    if frame:
        short.append(frame)
    return short


def _long(short: Any, is_outermost: bool) -> dict[str, Any]:
    match short:
        case [str() as graph, following, last, int() as cursor, dict() as visits, *more] if len(more) <= 1:
            frame = {"graph_id": graph, "last_node": last, "cursor": cursor, "visits": visits}
            if following is not None:
                is_node = isinstance(following, str)
                frame["continuation"] = NextNode(following).to_plain() if is_node else following
            frame.update(_implied(following, last, cursor, visits, is_outermost))
            frame.update(more[0] if more else {})
            return frame
    raise DecodeError("a stored frame is of no known form", hint="It was written by a newer version of Backstay")


def _implied(
    following: Any, last: str | None, cursor: int, visits: Mapping[str, int], is_outermost: bool
) -> dict[str, Any]:
    """Return what follows from the rest."""
    steps = cursor if is_outermost else 0
    if isinstance(following, str):
        return {"node_id": following, "visit": visits.get(following, 0) + 1, "steps": steps}
    return {"node_id": last, "visit": 1, "steps": steps}
