"""LangGraph's PostgreSQL saver under its engine."""

from __future__ import annotations

from collections.abc import Sequence

from langgraph.checkpoint.postgres import PostgresSaver

from benchmarks.engine import peers
from benchmarks.engine.relay import Pause
from benchmarks.workload import State, Step


def run_postgres(first: State, steps: Sequence[Step], pause: Pause, url: str, delta: bool = False) -> None:
    """Do the steps in a new schema."""
    with PostgresSaver.from_conn_string(url) as saver:
        saver.setup()
        peers.run(first, steps, pause, saver, delta)
