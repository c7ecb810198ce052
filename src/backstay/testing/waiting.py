"""Waiting for something that happens by itself: asked again and again, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 30.0
POLL_S = 0.001


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds; fail if it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:g} s"
        time.sleep(POLL_S)
