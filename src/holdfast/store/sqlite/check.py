"""Damage below the level of checkpoints: pages, indexes, references, bytes that belong to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import apsw

from holdfast.store.base import Finding
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.rows import unpack_id
from holdfast.store.sqlite.select import every


def check_database(connection: apsw.Connection) -> list[Finding]:
    """Return everything that is wrong; goes on after each finding as far as SQLite lets it."""
    findings: list[Finding] = []
    for part in (_structure, _references, _heads, _interrupts):
        try:
            findings.extend(part(connection))
        except (apsw.CorruptError, apsw.IOError) as error:
            findings.append(Finding("damaged", "database", f"a page cannot be read: {error}"))
    return findings


def _structure(connection: apsw.Connection) -> Iterator[Finding]:
    for (text,) in every(connection, "PRAGMA integrity_check(100)"):
        if text != "ok":
            yield Finding("damaged", "database", text)


def _references(connection: apsw.Connection) -> Iterator[Finding]:
    referred = {source for (source,) in every(connection, queries.ALL_SOURCES_REFERRED)}
    blobs = {name for name, _ in every(connection, queries.BLOB_SIZES)}
    streams = {stream for stream, _ in every(connection, queries.STREAM_SIZES)}
    for source in (blobs | streams) - referred:
        yield Finding("orphan", _name(source), "bytes that no branch refers to")
    for source in referred - blobs - streams:
        yield Finding("missing", _name(source), "a branch refers to bytes that are not there")


def _heads(connection: apsw.Connection) -> Iterator[Finding]:
    for lane, thread in every(connection, queries.LANES_WITHOUT_HEAD):
        yield Finding("missing", f"branch {lane}", "the newest checkpoint of the branch is not there", thread=thread)


def _interrupts(connection: apsw.Connection) -> Iterator[Finding]:
    for name, thread, checkpoint in every(connection, queries.INTERRUPTS_WITHOUT_CHECKPOINT):
        where, missing = f"interrupt {unpack_id(name)}", unpack_id(checkpoint)
        yield Finding("orphan", where, "its checkpoint is not there", thread=thread, checkpoint=missing)


def _name(source: int | bytes) -> str:
    return f"stream {source}" if isinstance(source, int) else f"blob {source.hex()[:16]}"
