"""Reading a directory's logs again: every record in the order in which they were written, whichever log it is in.

What is found at a log's end that is no record is told apart. Torn: a write that did not end; nobody was told that it
did; it is cut off. Damaged: it was acknowledged, as the control file knows, or it does not look like an unfinished
write; then nothing is cut, and the branch refuses to go on until it is repaired. A damaged record in the middle is
passed over and reported, and hides no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.errors import Corrupted
from holdfast.store.atomic import remove
from holdfast.store.directory import frame
from holdfast.store.directory.control import Entry
from holdfast.store.directory.log import STORE_LOG, Log, Place
from holdfast.store.directory.logs import Logs
from holdfast.store.directory.record import decode
from holdfast.store.finding import DAMAGED, LEFTOVER, REBUILD, Finding
from holdfast.store.memory.chunks import Body, KeptBytes
from holdfast.store.memory.fact import Fact
from holdfast.store.memory.tables import Tables


@dataclass(slots=True)
class Replay:
    """What the logs of a directory hold."""

    tables: Tables = field(default_factory=lambda: Tables(KeptBytes(), collects=False))
    last: int = 0
    findings: list[Finding] = field(default_factory=list)


def replay(logs: Logs, acknowledged: list[Entry], cuts: bool) -> Replay:
    """Read everything; with ``cuts`` torn ends are cut off, so nobody may be writing."""
    result = Replay()
    ends = {entry.log: entry for entry in acknowledged}
    found = [
        (each.number, log, each)
        for number in logs.numbers()
        if (log := _log(logs, number, cuts, result)) is not None
        for each in _frames(logs, log, ends.get(number), cuts, result)
    ]
    found.sort(key=lambda each: each[0])  # stable: within a log in the order they lie there
    for number, log, each in found:
        try:
            result.tables.apply(fact_of(logs, log, each))
        except Corrupted as error:
            result.findings.append(_finding(DAMAGED, log, each.start, each.end, error.what))
        result.last = number
    result.last = max(result.last, *(entry.number for entry in acknowledged), 0)
    result.tables.settle()
    return result


def fact_of(logs: Logs, log: Log, found: frame.Frame) -> Fact:
    """Return the fact of a record; its bytes stay in the log."""
    at = found.payload_at

    def placed(stored: int, size: int) -> Body:
        nonlocal at
        at += stored
        return Place(logs, log.number, log.mark, at - stored, stored, size)

    return decode(found.head, placed)


def _log(logs: Logs, number: int, cuts: bool, result: Replay) -> Log | None:
    log = logs.look(number)
    if log is None:
        path = logs.path(number)
        is_empty = path.stat().st_size < frame.FILE_HEAD_BYTES
        what = "a log that was never begun" if is_empty else "its first bytes are damaged, nothing in it can be read"
        result.findings.append(
            Finding(LEFTOVER if is_empty else DAMAGED, f"log {path.name}", what, repair=None if is_empty else REBUILD)
        )
        if is_empty and cuts:
            logs.forget(number)
            remove(path)
    return log


def _frames(logs: Logs, log: Log, newest: Entry | None, cuts: bool, result: Replay) -> Iterator[frame.Frame]:
    size = logs.size(log)
    read = logs.reader(log)
    parts = list(logs.scan(log, frame.FILE_HEAD_BYTES, size))
    if parts and isinstance(parts[-1], frame.Frame) and not frame.is_whole(read, parts[-1]):
        parts[-1] = frame.Gap(parts[-1].start, parts[-1].end)
    tail = parts.pop() if parts and isinstance(parts[-1], frame.Gap) else None
    log.end = size if tail is None else tail.start
    if tail is not None and frame.is_blank(read, tail.start, tail.end):
        tail = None
    for part in parts:
        if isinstance(part, frame.Frame):
            yield part
        else:
            log.gaps += 1
            result.findings.append(_finding(DAMAGED, log, part.start, part.end, "no record can be read there"))
    acknowledged = newest.end if newest is not None and newest.mark == log.mark else 0
    if log.end < acknowledged or (tail is not None and not frame.is_torn(read, tail.start, tail.end, log.mark)):
        log.gaps += 1
        log.broken = f"{log.path} is damaged from byte {log.end} on: what was saved there last cannot be read"
        log.end = size
        result.findings.append(_finding(DAMAGED, log, size if tail is None else tail.start, size, log.broken))
    elif tail is not None:
        result.findings.append(_finding(LEFTOVER, log, tail.start, size, "a write that did not end; it was cut off"))
        if cuts:
            logs.cut(log, tail.start)


def _finding(kind: str, log: Log, start: int, end: int, what: str) -> Finding:
    where = "the store's log" if log.number == STORE_LOG else f"log {log.number}"
    repair = REBUILD if kind == DAMAGED else None
    return Finding(kind, f"{where}, bytes {start} to {end}", what, repair=repair)
