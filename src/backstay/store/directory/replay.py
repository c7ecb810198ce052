"""Reading a directory's logs again: every record in the order in which they were written, whichever log it is in.

What is found at a log's end that is no record is told apart. Torn: a write that did not end; nobody was told that it
did; it is cut off. Damaged: it was acknowledged, as the control file knows, or it does not look like an unfinished
write; then nothing is cut, and the branch refuses to go on until it is repaired. A damaged record in the middle is
passed over and reported, and hides no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from backstay.errors import Corrupted
from backstay.store.directory import frame
from backstay.store.directory.control import Entry
from backstay.store.directory.log import STORE_LOG, Log, Place
from backstay.store.directory.logs import Logs
from backstay.store.directory.record import decode
from backstay.store.finding import DAMAGED, LEFTOVER, REBUILD, Finding
from backstay.store.memory.chunks import Body, KeptBytes
from backstay.store.memory.fact import Fact, LaneSet, Saved
from backstay.store.memory.tables import Tables


@dataclass(slots=True)
class Replay:
    """What the logs of a directory hold."""

    tables: Tables = field(default_factory=lambda: Tables(KeptBytes(), collects=False))
    last: int = 0
    findings: list[Finding] = field(default_factory=list)


def replay(logs: Logs, acknowledged: list[Entry], cuts: bool, pending: tuple[int, int] | None = None) -> Replay:
    """Read everything; with ``cuts`` torn ends are cut off, so nobody may be writing.

    ``acknowledged`` is the newest record of each log of which somebody was told, ``pending`` the log and the place
    where one was about to be written.
    """
    result = Replay()
    ends = {entry.log: entry for entry in acknowledged}
    found = [
        (each.number, log, each)
        for log in _readable(logs)
        for each in _frames(logs, log, ends.get(log.number), cuts, pending, result)
    ]
    found.sort(key=lambda each: each[0])  # stable: within a log in the order they lie there
    for number, log, each in found:
        try:
            result.tables.apply(_own_fact(logs, log, each))
        except Corrupted as error:
            log.gaps += 1
            log.broken = log.broken or error.what
            result.findings.append(_finding(DAMAGED, log, each.start, each.end, error.what))
        result.last = number
    result.last = max(result.last, *(entry.number for entry in acknowledged), 0)
    result.tables.last_stream = max(result.tables.last_stream, *result.tables.bytes.streams, 0)
    result.tables.settle()
    for number in sorted(logs.unreadable):
        _judge_unreadable(logs, number, number in ends, cuts, pending, result)
    return result


def fact_of(logs: Logs, log: Log, found: frame.Frame) -> Fact:
    """Return the fact of a record; its bytes stay in the log."""
    at = found.payload_at

    def placed(stored: int, size: int) -> Body:
        nonlocal at
        at += stored
        return Place(logs, log.number, log.mark, at - stored, stored, size)

    return decode(found.head, placed)


def _readable(logs: Logs) -> list[Log]:
    """Return the files that are logs, and note those that are none."""
    found = [(number, logs.look(number)) for number in logs.numbers()]
    logs.unreadable = {number for number, log in found if log is None}
    return [log for _, log in found if log is not None]


def _own_fact(logs: Logs, log: Log, found: frame.Frame) -> Fact:
    """Return the fact of a record; raise Corrupted if it is one of another log: then files were exchanged."""
    fact = fact_of(logs, log, found)
    home = fact.lane_number if isinstance(fact, Saved) else fact.number if isinstance(fact, LaneSet) else log.number
    if home != log.number and log.number != STORE_LOG:
        log.is_misplaced = True
        raise Corrupted(f"{log.path} is log {home} under another name", path=str(log.path))
    return fact


def _judge_unreadable(
    logs: Logs, number: int, is_acknowledged: bool, cuts: bool, pending: tuple[int, int] | None, result: Replay
) -> None:
    """Tell a log whose first write did not end from one that was damaged."""
    path, first = logs.path(number), logs.first_bytes(number)
    is_new = number > result.tables.last_number if number else not result.tables.bytes.streams
    is_blank = len(first) < frame.FILE_HEAD_BYTES or not any(first)
    is_pending = pending == (number, frame.FILE_HEAD_BYTES)
    if is_acknowledged or not is_blank or not (is_new or is_pending):
        what = "its first bytes are damaged, nothing in it can be read"
        result.findings.append(Finding(DAMAGED, f"log {path.name}", what, repair=REBUILD))
        return
    result.findings.append(Finding(LEFTOVER, f"log {path.name}", "a log that was never begun"))
    logs.unreadable.remove(number)
    if cuts:
        logs.remove(number)


def _frames(
    logs: Logs, log: Log, newest: Entry | None, cuts: bool, pending: tuple[int, int] | None, result: Replay
) -> Iterator[frame.Frame]:
    read, size = logs.reader(log), logs.size(log)
    parts, tail = _parts(logs, log, size)
    log.end = max((part.end for part in parts), default=frame.FILE_HEAD_BYTES)
    if read(0, frame.FILE_HEAD_BYTES) != frame.file_head(log.mark):
        parts.insert(0, frame.Gap(0, frame.FILE_HEAD_BYTES))
    for part in parts:
        if isinstance(part, frame.Frame):
            yield part
        else:
            log.gaps += 1
            result.findings.append(_finding(DAMAGED, log, part.start, part.end, "no record can be read there"))
    is_pending = tail is not None and pending == (log.number, tail.start)
    is_torn = tail is None or is_pending or frame.is_torn(read, tail.start, tail.end, log.mark)
    lacks = _lacks(log, parts, newest)
    log.is_foreign = lacks and newest is not None and newest.mark != log.mark
    if lacks or not is_torn:
        log.gaps += 1
        log.broken = f"{log.path} is damaged from byte {log.end} on: what was saved there last cannot be read"
        result.findings.append(_finding(DAMAGED, log, log.end, size, log.broken))
        log.end = size
    elif tail is not None:
        result.findings.append(_finding(LEFTOVER, log, tail.start, size, "a write that did not end; it was cut off"))
        if cuts and tail.start == frame.FILE_HEAD_BYTES:
            logs.remove(log.number)
        elif cuts:
            logs.cut(log, tail.start)


def _parts(logs: Logs, log: Log, size: int) -> tuple[list[frame.Frame | frame.Gap], frame.Gap | None]:
    """Return what lies in a log, and apart from it its end if that is neither a whole record nor blank."""
    read = logs.reader(log)
    parts = list(logs.scan(log, frame.FILE_HEAD_BYTES, size))
    if parts and isinstance(tail := parts[-1], frame.Gap):
        parts.pop()
        if not frame.is_blank(read, tail.start, tail.end):
            return parts, tail
    if parts and isinstance(parts[-1], frame.Frame) and not frame.is_whole(read, parts[-1]):
        return parts[:-1], frame.Gap(parts[-1].start, size)
    return parts, None


def _lacks(log: Log, parts: list[frame.Frame | frame.Gap], newest: Entry | None) -> bool:
    """Tell whether a log ends before the newest record in it that was acknowledged.

    If it was written anew since, it has another mark; then its last record has that record's number or a higher one.
    """
    if newest is None:
        return False
    if newest.mark == log.mark:
        return log.end < newest.end
    return max((part.number for part in parts if isinstance(part, frame.Frame)), default=0) < newest.number


def _finding(kind: str, log: Log, start: int, end: int, what: str) -> Finding:
    where = "the store's log" if log.number == STORE_LOG else f"log {log.number}"
    repair = REBUILD if kind == DAMAGED else None
    return Finding(kind, f"{where}, bytes {start} to {end}", what, repair=repair)
