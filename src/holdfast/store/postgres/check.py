"""Damage below the level of checkpoints: references, heads, bytes that belong to nothing. Each is one statement."""

from __future__ import annotations

from holdfast.store.base import Finding
from holdfast.store.postgres import queries
from holdfast.store.postgres.connection import DeadlineConnection
from holdfast.store.postgres.select import every


def check_tables(connection: DeadlineConnection) -> list[Finding]:
    """Return everything that is wrong."""
    return [
        *(
            Finding("orphan", _name(*source), "bytes that no branch refers to")
            for source in every(connection, queries.ORPHANS)
        ),
        *(
            Finding("missing", _name(*source), "a branch refers to bytes that are not there")
            for source in every(connection, queries.MISSING)
        ),
        *(
            Finding("missing", f"branch {lane}", "the newest checkpoint of the branch is not there", thread=thread)
            for lane, thread in every(connection, queries.LANES_WITHOUT_HEAD)
        ),
        *(
            Finding("missing", f"branch {lane}", "the thread of the branch is not there")
            for (lane,) in every(connection, queries.LANES_WITHOUT_THREAD)
        ),
    ]


def _name(stream: int | None, digest: bytes | None) -> str:
    return f"stream {stream}" if digest is None else f"blob {digest.hex()[:16]}"
