"""Rewriting a log without the records that nothing needs any more. The old log stays until the new one is complete.

Records that stay keep their numbers, so all logs together still give the same mutations in the same order. Adjacent
bytes of one stream become one compressed run at the same addresses.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from backstay.store.atomic import failure, make_directory, replacing, sync_directory, write_whole
from backstay.store.directory import frame
from backstay.store.directory.descriptors import LogMoved
from backstay.store.directory.encoding import encode
from backstay.store.directory.logs import STORE_LOG, Log, LogContent, Logs
from backstay.store.directory.replay import mutation_of
from backstay.store.leases import BranchKey
from backstay.store.memory.chunks import Chunk, Content, MemoryContent
from backstay.store.memory.mutations import (
    BranchDropped,
    BranchStored,
    BytesStored,
    CheckpointsDeleted,
    CheckpointStored,
    Mutation,
    MutationGroup,
    NumbersReserved,
    RecordsDropped,
    RecordStored,
    TagsChanged,
    ThreadDeleted,
    WritesStored,
)
from backstay.store.memory.tables import Counters, Tables

RECORD_BYTES_ABOUT = 200
"""A guess at the size of a record without bytes of states."""

RUN_BYTES = 1 << 16
RECORD_BYTES = 1 << 22

Numbered = tuple[int, Mutation]


def log_of(mutation: Mutation, tables: Tables) -> int:
    """Return the number of the log a mutation is written to: the log of its branch, if that branch exists."""
    match mutation:
        case CheckpointStored():
            return mutation.branch_number
        case BranchStored():
            return mutation.number
        case WritesStored() | TagsChanged():
            return _log_of(mutation.branch, tables)
        case RecordStored(record):
            return _log_of(record.branch, tables)
        case MutationGroup():
            new = {each.key: each.number for each in mutation.mutations if isinstance(each, BranchStored)}
            homes = {
                new[each.record.branch]
                if isinstance(each, RecordStored) and each.record.branch in new
                else log_of(each, tables)
                for each in mutation.mutations
            }
            return homes.pop() if len(homes) == 1 else STORE_LOG
        case _:
            return STORE_LOG


def garbage_of(mutation: Mutation, tables: Tables) -> dict[int, int]:
    """Return roughly how many bytes of each log a mutation makes useless, not counting bytes of states."""
    match mutation:
        case BranchStored() if mutation.key in tables.branches:
            return {mutation.number: RECORD_BYTES_ABOUT}
        case RecordStored(record) if (kept := tables.records.find(record.kind, record.branch, record.key)) is not None:
            return {_log_of(record.branch, tables): RECORD_BYTES_ABOUT + len(kept.body)}
        case RecordsDropped():
            return _garbage_of_records(mutation, tables)
        case CheckpointsDeleted() | ThreadDeleted():
            garbage = {STORE_LOG: RECORD_BYTES_ABOUT + 64 * len(mutation.digests)}
            found = (tables.rows.get((mutation.namespace, name)) for name in mutation.digests)
            for row in filter(None, found):
                number = tables.branches[row.branch].number
                size = RECORD_BYTES_ABOUT + len(row.manifest) + len(row.notes)
                garbage[number] = garbage.get(number, 0) + size
            return garbage
        case BranchDropped():
            return {STORE_LOG: RECORD_BYTES_ABOUT, tables.branches[mutation.key].number: RECORD_BYTES_ABOUT}
        case MutationGroup():
            total: dict[int, int] = {}
            for each in mutation.mutations:
                for number, size in garbage_of(each, tables).items():
                    total[number] = total.get(number, 0) + size
            return total
        case _:
            return {}


def _garbage_of_records(mutation: RecordsDropped, tables: Tables) -> dict[int, int]:
    garbage: dict[int, int] = {STORE_LOG: RECORD_BYTES_ABOUT * len(mutation.names)}
    for kind, branch, key, _ in mutation.names:
        gone, home = tables.records.find(kind, branch, key), _log_of(branch, tables)
        garbage[home] = garbage.get(home, 0) + RECORD_BYTES_ABOUT + (0 if gone is None else len(gone.body))
    return garbage


def _log_of(branch: BranchKey, tables: Tables) -> int:
    found = tables.branches.get(branch)
    return found.number if found is not None else STORE_LOG


def rewrite(logs: Logs, tables: Tables, log: Log, last: int) -> int:
    """Rewrite a log, or remove it if none of its records is needed; return how many bytes that freed."""
    mutations = list(_needed(logs, tables, log, last))
    before = logs.size(log)
    if not mutations and log.number != STORE_LOG:
        return logs.remove(log.number)
    if not mutations or mutations[-1][0] < last:
        mutations.append((last, NumbersReserved(Counters())))  # marks the log's end: a log without it was cut short
    mark = secrets.token_bytes(frame.MARK_BYTES)
    if not logs.is_in_place(log):
        raise LogMoved(f"log {log.number} is another file")
    with replacing(log.path) as file:
        file.write(frame.file_head(mark))
        for number, mutation in mutations:
            file.write(frame.pack(mark, number, *encode(mutation)))
    logs.forget(log.number)
    # Learn where the bytes are in the new file.
    new = logs.look(log.number)
    assert new is not None
    new.end = logs.size(new)
    for part in logs.scan(new, frame.FILE_HEAD_BYTES, new.end):
        if isinstance(part, frame.RecordFrame) and isinstance(mutation := mutation_of(logs, new, part), BytesStored):
            mutation.apply(tables)
    return before - new.end


def _needed(logs: Logs, tables: Tables, log: Log, last: int) -> Iterator[Numbered]:
    """Yield the mutations of a log that are still needed, in order."""
    found = [
        (part.number, each)
        for part in logs.scan(log, frame.FILE_HEAD_BYTES, log.end)
        if isinstance(part, frame.RecordFrame)
        for each in _flat(mutation_of(logs, log, part))
    ]
    first = found[0][0] if found else last
    yield from ((first, stored) for stored in _bytes_in(tables, log.number, [mutation for _, mutation in found]))
    branch = tables.branch_order.get(log.number)
    sources = dict(branch.sources) if branch is not None else {}
    again = {source: sources[source] for source in branch.scattered} if branch is not None else {}
    for number, mutation in found:
        if isinstance(mutation, CheckpointStored) and branch is not None:
            name = (mutation.row.branch.namespace, mutation.row.id)
            row = tables.rows.get(name)
            if row is not None and (row.branch, row.seq) == (branch.key, mutation.row.seq):
                # The checkpoint still exists: yield its row as it is now, without its bytes. The first one carries all
                # sources, and the second again those that are scattered.
                row = row._replace(tags=tables.tags.get(name, ()))
                yield (
                    number,
                    CheckpointStored(
                        row, branch.number, sources=sources, origin=branch.origin, replaces=mutation.replaces
                    ),
                )
                again = {} if sources is again else again
                sources = again
                continue
        if (current := _digests_for_children(mutation, tables) or _current(tables, mutation)) is not None:
            yield number, current
    if branch is not None:
        thread = tables.number_of(branch.key)
        yield last, BranchStored(branch.key, branch.number, thread, branch.lease, branch.last_seq, branch.origin)
    if log.number == STORE_LOG:
        yield last, NumbersReserved(tables.counters(), tables.thread_numbers())


def _flat(mutation: Mutation) -> Iterator[Mutation]:
    if isinstance(mutation, MutationGroup):
        for each in mutation.mutations:
            yield from _flat(each)
    else:
        yield mutation


def _digests_for_children(mutation: Mutation, tables: Tables) -> CheckpointsDeleted | None:
    """Return the digests that children in other logs need of a checkpoint that was replaced or quarantined."""
    if isinstance(mutation, CheckpointStored) and mutation.replaces is not None:
        mutation = CheckpointsDeleted(
            mutation.row.branch.namespace, {mutation.row.id: mutation.replaces}, {}, Counters(), (), True
        )
    elif not isinstance(mutation, CheckpointsDeleted) or not mutation.keeps_bytes:
        return None
    space = mutation.namespace
    wanted = {
        name: digest
        for name, digest in mutation.digests.items()
        if any((child.parent_id, child.parent_digest) == (name, digest) for child in tables.first_of_forks(space, name))
    }
    return replace(mutation, digests=wanted) if wanted else None


def _current(tables: Tables, mutation: Mutation) -> Mutation | None:
    """Return the part of a mutation of writes or a record that is still current; None if no part is."""
    match mutation:
        case WritesStored():
            kept = tables.writes_of(mutation.branch, mutation.checkpoint)
            rows = [row for row in mutation.rows if kept.get((row.task_id, row.index)) == row]
            return replace(mutation, rows=rows) if rows else None
        case RecordStored(record):
            found = tables.records.find(record.kind, record.branch, record.key)
            return mutation if found == record else None
        case _:
            return None


def _bytes_in(tables: Tables, number: int, mutations: Iterable[Mutation]) -> Iterator[BytesStored]:
    """Yield the needed bytes of this log, which has these mutations, a few megabytes at a time."""
    blobs: dict[bytes, Content] = {}
    chunks: list[tuple[int, int, Content]] = []
    size = 0
    stored = [each for each in mutations if isinstance(each, CheckpointStored | BytesStored)]

    def is_here(body: Content | None) -> bool:
        return isinstance(body, LogContent) and body.log == number

    for name in dict.fromkeys(name for each in stored for name in each.blobs):
        body = tables.bytes.blobs.get(name)
        if body is None or not is_here(body):
            continue
        blobs[name] = body
        size += body.size
        if size >= RECORD_BYTES:
            yield BytesStored(blobs)
            blobs, size = {}, 0
    for stream in dict.fromkeys(stream for each in stored for stream, _, _ in each.chunks):
        here = [chunk for chunk in tables.bytes.streams.get(stream, ()) if is_here(chunk[1])]
        for at, data in _runs(here):
            chunks.append((stream, at, MemoryContent(data)))
            size += len(data)
            if size >= RECORD_BYTES:
                yield BytesStored(blobs, chunks)
                blobs, chunks, size = {}, [], 0
    if blobs or chunks:
        yield BytesStored(blobs, chunks)


def _runs(chunks: Sequence[Chunk]) -> Iterator[tuple[int, bytes]]:
    """Yield adjacent chunks as runs of about ``RUN_BYTES``."""
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


def save_damaged_parts(logs: Logs, directory: Path) -> list[Log]:
    """Copy the damaged parts of logs into a directory; return the logs that can now be rewritten without them."""
    make_directory(directory)
    for number in logs.numbers():
        log = logs.look(number)
        if log is None or log.is_misplaced:  # the whole file goes: it is not a log, or not this one
            path = logs.path(number)
            logs.forget(number)
            try:
                os.replace(path, directory / path.name)
            except OSError as error:
                raise failure(error, "move", path) from error
            for changed in (directory, path.parent):
                sync_directory(changed)
    damaged = logs.damaged
    for log in damaged:
        first = logs.first_bytes(log.number)
        if first != frame.file_head(log.mark):
            write_whole(directory / f"{log.path.stem}-0-{len(first)}.bin", first)
        for part in logs.scan(log, frame.FILE_HEAD_BYTES, logs.size(log)):
            end = part.end
            if isinstance(part, frame.Gap) or not frame.is_whole(logs.reader(log), part):
                data = logs.read(log.number, log.mark, part.start, end - part.start)
                write_whole(directory / f"{log.path.stem}-{part.start}-{end}.bin", data)
        log.gaps, log.broken = 0, None
    return damaged
