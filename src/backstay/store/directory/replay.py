"""Replay: opening a directory by applying every record of its logs, in the order in which they were written.

The end of a log may not be a record. It is torn if a write did not finish: no caller got an answer for it, and it is
cut off. It is damaged if the control file knows that it was acknowledged, or if it does not look like an unfinished
write; then nothing is cut, and the branch refuses calls until it is repaired. A damaged record in the middle is skipped
and reported, and hides no other record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from backstay.errors import Corrupted
from backstay.store.directory import frame
from backstay.store.directory.control import RingEntry
from backstay.store.directory.encoding import decode
from backstay.store.directory.logs import STORE_LOG, Log, LogContent, Logs
from backstay.store.finding import DAMAGED, LEFTOVER, REBUILD, Finding
from backstay.store.memory.chunks import Content, StoredBytes
from backstay.store.memory.mutations import BranchStored, CheckpointStored, Mutation
from backstay.store.memory.tables import Tables


@dataclass(slots=True)
class Replay:
    """The content of a directory's logs."""

    tables: Tables = field(default_factory=lambda: Tables(StoredBytes(), collects=False))
    last: int = 0
    findings: list[Finding] = field(default_factory=list)


def replay(logs: Logs, acknowledged: list[RingEntry], cuts: bool, pending: tuple[int, int] | None = None) -> Replay:
    """Read everything. ``cuts`` cuts torn ends off, so no other process may be writing.

    ``acknowledged`` has the newest record of each log that a caller got an answer for. ``pending`` is the log and the
    offset of a record that a writer was about to write.
    """
    result = Replay()
    ends = {entry.log: entry for entry in acknowledged}
    opened = [(number, logs.look(number)) for number in logs.numbers()]
    logs.unreadable = {number for number, log in opened if log is None}
    found = [
        (each.number, log, each)
        for _, log in opened
        if log is not None
        for each in _frames(logs, log, ends.get(log.number), cuts, pending, result)
    ]
    found.sort(key=lambda each: each[0])  # stable: records of one log keep their order
    for number, log, each in found:
        try:
            mutation = mutation_of(logs, log, each)
            home = log.number
            if isinstance(mutation, CheckpointStored):
                home = mutation.branch_number
            elif isinstance(mutation, BranchStored):
                home = mutation.number
            if home != log.number and log.number != STORE_LOG:
                log.is_misplaced = True
                raise Corrupted(f"{log.path} is log {home} under another name", path=str(log.path))
            mutation.apply(result.tables)
        except Corrupted as error:
            log.gaps += 1
            log.broken = log.broken or error.what
            result.findings.append(_finding(DAMAGED, log, each.start, each.end, error.what))
        result.last = number
    result.last = max(result.last, *(entry.number for entry in acknowledged), 0)
    result.tables.last_stream = max(result.tables.last_stream, *result.tables.bytes.streams, 0)
    result.tables.collect_deferred()
    logs.damaged = [log for log in logs.known.values() if log.gaps]
    for number in sorted(logs.unreadable):
        _judge_unreadable(logs, number, number in ends, cuts, pending, result)
    return result


def mutation_of(logs: Logs, log: Log, found: frame.RecordFrame) -> Mutation:
    """Return the mutation of a record; its bytes stay in the log."""
    at = found.payload_at

    def placed(stored: int, size: int) -> Content:
        nonlocal at
        at += stored
        return LogContent(logs, log.number, log.mark, at - stored, stored, size)

    return decode(found.head, placed)


def _judge_unreadable(
    logs: Logs, number: int, is_acknowledged: bool, cuts: bool, pending: tuple[int, int] | None, result: Replay
) -> None:
    """Decide whether the first write to a log did not finish, or the log was damaged."""
    path, first = logs.path(number), logs.first_bytes(number)
    is_new = number > result.tables.last_number if number else not result.tables.bytes.streams
    is_blank = len(first) < frame.FILE_HEAD_BYTES or not any(first)
    is_pending = pending == (number, frame.FILE_HEAD_BYTES)
    if is_acknowledged or not is_blank or not (is_new or is_pending):
        what = "its first bytes are damaged, so no record in it can be read"
        result.findings.append(Finding(DAMAGED, f"log {path.name}", what, repair=REBUILD))
        return
    result.findings.append(Finding(LEFTOVER, f"log {path.name}", "the first write to this log did not finish"))
    logs.unreadable.remove(number)
    if cuts:
        logs.remove(number)


def _frames(
    logs: Logs, log: Log, newest: RingEntry | None, cuts: bool, pending: tuple[int, int] | None, result: Replay
) -> Iterator[frame.RecordFrame]:
    """Yield the whole records of a log; report the gaps between them, and judge its end."""
    read, size = logs.reader(log), logs.size(log)
    parts, tail = _parts(logs, log, size)
    log.end = max((part.end for part in parts), default=frame.FILE_HEAD_BYTES)
    if read(0, frame.FILE_HEAD_BYTES) != frame.file_head(log.mark):
        parts.insert(0, frame.Gap(0, frame.FILE_HEAD_BYTES))
    for part in parts:
        if isinstance(part, frame.RecordFrame):
            yield part
        else:
            log.gaps += 1
            result.findings.append(_finding(DAMAGED, log, part.start, part.end, "no record can be read there"))
    is_pending = tail is not None and pending == (log.number, tail.start)
    is_torn = tail is None or is_pending or frame.is_torn(read, tail.start, tail.end, log.mark)
    # A log that was rewritten since has another mark. Then its last record has the acknowledged number or a higher one.
    is_cut_short = newest is not None and log.end < newest.end
    if newest is not None and newest.mark != log.mark:
        numbers = (part.number for part in parts if isinstance(part, frame.RecordFrame))
        is_cut_short = max(numbers, default=0) < newest.number
        log.is_foreign = is_cut_short
    if is_cut_short or not is_torn:
        log.gaps += 1
        log.broken = f"{log.path} is damaged from byte {log.end} on: the newest records there cannot be read"
        result.findings.append(_finding(DAMAGED, log, log.end, size, log.broken))
        log.end = size
    elif tail is not None:
        result.findings.append(_finding(LEFTOVER, log, tail.start, size, "an unfinished write, which was cut off"))
        if cuts and tail.start == frame.FILE_HEAD_BYTES:
            logs.remove(log.number)
        elif cuts:
            logs.cut(log, tail.start)


def _parts(logs: Logs, log: Log, size: int) -> tuple[list[frame.RecordFrame | frame.Gap], frame.Gap | None]:
    """Return the parts of a log; its end apart if that is neither a whole record nor blank."""
    read = logs.reader(log)
    parts = list(logs.scan(log, frame.FILE_HEAD_BYTES, size))
    if parts and isinstance(tail := parts[-1], frame.Gap):
        parts.pop()
        if not frame.is_blank(read, tail.start, tail.end):
            return parts, tail
    if parts and isinstance(parts[-1], frame.RecordFrame) and not frame.is_whole(read, parts[-1]):
        return parts[:-1], frame.Gap(parts[-1].start, size)
    return parts, None


def _finding(kind: str, log: Log, start: int, end: int, what: str) -> Finding:
    where = "the store's log" if log.number == STORE_LOG else f"log {log.number}"
    repair = REBUILD if kind == DAMAGED else None
    return Finding(kind, f"{where}, bytes {start} to {end}", what, repair=repair)
