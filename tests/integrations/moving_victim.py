"""A process that imports from LangGraph's saver and is killed at a call of the store, before it or right after it."""

from __future__ import annotations

import os

from import_victims import Mortal

from backstay.integrations.langgraph.stock.moving import import_langgraph
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_context


def import_until(url: str, source: str, deadline: int, after: bool) -> None:
    """Import, and die at the call; print how many calls there were if it was never reached."""
    mortal = Mortal(open_backend(url), deadline, after)
    store = Store(mortal, make_context("", None))
    report = import_langgraph(store, source)
    assert report, str(report)
    os.write(1, f"{mortal.calls}\n".encode())
