"""The name of a lane: what checkpoints, leases and records all belong to."""

from __future__ import annotations

from typing import NamedTuple


class LaneKey(NamedTuple):
    """Names one lane: a branch of one scope of one thread."""

    namespace: str
    thread: str
    scope: str
    branch: str
