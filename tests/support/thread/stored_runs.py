"""Runs as other processes would have stored them, and a graph that only claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import backstay
from backstay.model.checkpoint import MAIN
from backstay.model.runs import RunStatus
from backstay.operations.leases import this_process
from backstay.operations.run_records import GRAPH, RunRow, new_row, row_of
from backstay.store.leases import BranchKey, Holder
from backstay.thread.access import access_of
from backstay.thread.store import AsyncStore

HERE = this_process("worker-7")
GONE = HERE._replace(started="0")
"""A process that had this one's id before."""


class Claims:
    """What ``store.claim`` asks of a graph."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = pairs or (("work", "1"),)

    def claims(self) -> tuple[tuple[str, str], ...]:
        return self.pairs


WORK = Claims()


def put_run(
    store: backstay.Store | AsyncStore,
    thread: str,
    status: RunStatus = RunStatus.QUEUED,
    *,
    id: str = "",
    branch: str = MAIN,
    scope: str = "",
    kind: str = GRAPH,
    name: str = "work",
    fingerprint: str = "1",
    holder: Holder | str = "",
    now_us: int = 0,
    **fields: Any,
) -> RunRow:
    """Store a run as another process would. By default it waits for a worker."""
    access = access_of(store)
    key = BranchKey(access.services.namespace, thread, scope, branch)
    row = new_row(key, id or access.services.new_id(), kind, name, now_us, fingerprint)
    if status is RunStatus.QUEUED:
        fields = {"due_us": 0, "input": b"input", **fields}
    return row_of(access.store.put_record(replace(row, status=status, holder=str(holder), **fields).sealed()))
