"""Writing a log anew without what nothing needs any more. The old one is there until the new one is whole.

What stays keeps its number, so that all logs together still tell the same story in the same order. Bytes of one stream
that follow each other become one compressed run, at the same addresses.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

from backstay.store.atomic import replacing
from backstay.store.directory import frame
from backstay.store.directory.descriptors import Moved
from backstay.store.directory.log import STORE_LOG, Log, Place
from backstay.store.directory.logs import Logs
from backstay.store.directory.record import encode
from backstay.store.directory.replay import fact_of
from backstay.store.memory.chunks import Body, Chunk, Whole
from backstay.store.memory.fact import (
    BytesKept,
    Counters,
    Deleted,
    Fact,
    LaneSet,
    Marked,
    RecordSet,
    Saved,
    Several,
    Wrote,
)
from backstay.store.memory.lane import KeptLane
from backstay.store.memory.tables import Tables

RUN_BYTES = 1 << 16
RECORD_BYTES = 1 << 22

Numbered = tuple[int, Fact]


class Needs:
    """What of the tables lies in which log: looked through once, however many logs are written anew then."""

    def __init__(self, tables: Tables) -> None:
        self.lanes = {lane.number: lane for lane in tables.lanes.values()}
        self.blobs: dict[int, dict[bytes, Body]] = {}
        self.chunks: dict[int, dict[int, list[Chunk]]] = {}
        for name, body in tables.bytes.blobs.items():
            if isinstance(body, Place):
                self.blobs.setdefault(body.log, {})[name] = body
        for stream, kept in tables.bytes.streams.items():
            for chunk in kept:
                if isinstance(chunk[1], Place):
                    self.chunks.setdefault(chunk[1].log, {}).setdefault(stream, []).append(chunk)
        self.orphans = {  # the parents that somebody's digest covers and that are not there any more, as they were then
            (space, row.parent_id, row.parent_digest)
            for (space, _), row in tables.rows.items()
            if row.parent_digest is not None
        }


def rewrite(logs: Logs, tables: Tables, needs: Needs, log: Log, last: int) -> int:
    """Write a log anew, or remove it if nothing of it is needed; return how many bytes that gave back."""
    facts = list(_needed(logs, tables, needs, log, last))
    before = logs.size(log)
    if not facts and log.number != STORE_LOG:
        return logs.remove(log.number)
    if not facts or facts[-1][0] < last:
        facts.append((last, Marked(Counters())))  # the log's end: one that ends before this was cut short
    mark = secrets.token_bytes(frame.MARK_BYTES)
    if not logs.is_in_place(log):
        raise Moved(f"log {log.number} is another file")
    with replacing(log.path) as file:
        _write(file, mark, facts)
    logs.forget(log.number)
    _find_bytes(logs, tables, log.number)
    return before - logs.known[log.number].end


def _write(file: BinaryIO, mark: bytes, facts: list[Numbered]) -> None:
    file.write(frame.file_head(mark))
    for number, fact in facts:
        file.write(frame.pack(mark, number, *encode(fact)))


def _find_bytes(logs: Logs, tables: Tables, number: int) -> None:
    """Learn where the bytes of a log that was written anew are now."""
    log = logs.look(number)
    assert log is not None
    log.end = logs.size(log)
    for part in logs.scan(log, frame.FILE_HEAD_BYTES, log.end):
        if isinstance(part, frame.Frame) and isinstance(fact := fact_of(logs, log, part), BytesKept):
            tables.apply(fact)


def _needed(logs: Logs, tables: Tables, needs: Needs, log: Log, last: int) -> Iterator[Numbered]:
    """Give what stays of a log, in order."""
    found = [
        (part.number, each)
        for part in logs.scan(log, frame.FILE_HEAD_BYTES, log.end)
        if isinstance(part, frame.Frame)
        for each in _flat(fact_of(logs, log, part))
    ]
    first = found[0][0] if found else last
    yield from ((first, kept) for kept in _bytes_in(needs, log.number))
    lane = needs.lanes.get(log.number)
    sources = dict(lane.sources) if lane is not None else {}
    for number, fact in found:
        row = _living(tables, fact, lane) if isinstance(fact, Saved) and lane is not None else None
        if row is not None:
            yield number, replace(row, sources=sources)
            sources = {}
        elif (kept := _told_to_children(fact, needs) or _current(tables, fact)) is not None:
            yield number, kept
    if lane is not None:
        thread = tables.number_of(lane.key)
        yield last, LaneSet(lane.key, lane.number, thread, lane.tenure, lane.last_seq, lane.origin)
    if log.number == STORE_LOG:
        yield last, Marked(tables.counters(), tables.thread_marks())


def _flat(fact: Fact) -> Iterator[Fact]:
    if isinstance(fact, Several):
        for each in fact.facts:
            yield from _flat(each)
    else:
        yield fact


def _living(tables: Tables, fact: Saved, lane: KeptLane) -> Saved | None:
    """Return a checkpoint as it is now, without its bytes; None if it is not there any more."""
    name = (fact.row.lane.namespace, fact.row.id)
    row = tables.rows.get(name)
    if row is None or (row.lane, row.seq) != (lane.key, fact.row.seq):
        return None
    kept = row._replace(tags=tables.tags.get(name, ()))
    return Saved(kept, lane.number, origin=lane.origin, replaces=fact.replaces)


def _told_to_children(fact: Fact, needs: Needs) -> Deleted | None:
    """Return what a checkpoint that went, and had replaced another, says to that one's children in other logs."""
    if isinstance(fact, Saved) and fact.replaces is not None:
        fact = Deleted(fact.row.lane.namespace, {fact.row.id: fact.replaces}, Counters(), (), True)
    elif not isinstance(fact, Deleted) or not fact.keeps_bytes:
        return None
    wanted = {name: digest for name, digest in fact.digests.items() if (fact.namespace, name, digest) in needs.orphans}
    return replace(fact, digests=wanted) if wanted else None


def _current(tables: Tables, fact: Fact) -> Fact | None:
    """Return what is still true of a fact that is no checkpoint and has no bytes; None if nothing is."""
    match fact:
        case Wrote():
            kept = tables.writes.get((*fact.lane[:3], fact.checkpoint), {})
            rows = [row for row in fact.rows if kept.get((row.task_id, row.index)) == row]
            return replace(fact, rows=rows) if rows else None
        case RecordSet(record):
            found = tables.records.find(record.kind, record.lane, record.key)
            return fact if found is not None and found.record == record else None
        case _:
            return None


def _bytes_in(needs: Needs, number: int) -> Iterator[BytesKept]:
    """Give the bytes that are needed and lie in this log, some megabytes at a time."""
    blobs: dict[bytes, Body] = {}
    chunks: list[tuple[int, int, Body]] = []
    size = 0
    for name, body in needs.blobs.get(number, {}).items():
        blobs[name] = body
        size += body.size
        if size >= RECORD_BYTES:
            yield BytesKept(blobs)
            blobs, size = {}, 0
    for stream, here in needs.chunks.get(number, {}).items():
        for at, data in _runs(here):
            chunks.append((stream, at, Whole(data)))
            size += len(data)
            if size >= RECORD_BYTES:
                yield BytesKept(blobs, chunks)
                blobs, chunks, size = {}, [], 0
    if blobs or chunks:
        yield BytesKept(blobs, chunks)


def _runs(chunks: Sequence[Chunk]) -> Iterator[tuple[int, bytes]]:
    """Give chunks that follow each other as runs of about ``RUN_BYTES``."""
    run: list[bytes] = []
    start = length = 0
    for offset, body in chunks:
        if run and (offset != start + length or length >= RUN_BYTES):
            yield start, b"".join(run)
            run, length = [], 0
        if not run:
            start = offset
        run.append(body.read())
        length += body.size
    if run:
        yield start, b"".join(run)
