"""A process that imports from LangGraph's saver and is killed at a call of the store, before it or right after it."""

from __future__ import annotations

import os
from typing import Any

from import_victims import Mortal

import backstay
from backstay.integrations.langgraph.stock.moving import import_langgraph
from backstay.thread.access import access_of


def import_until(url: str, source: str, deadline: int, after: bool) -> None:
    """Import, and die at the call; print how many calls there were if it was never reached."""
    store = backstay.open(url)
    mortal: Any = Mortal(access_of(store).store, deadline, after)
    access_of(store).store = mortal
    report = import_langgraph(store, source)
    assert report, str(report)
    os.write(1, f"{mortal.calls}\n".encode())
