"""The directory store: ``dir:./checkpoints``. Plain append-only logs, one for each branch.

It is the memory store with facts that are written down before they are taken in. All that is not bytes of states is in
memory: opening reads the heads of all records, and a checkpoint costs some hundred bytes there. What a branch adds goes
to the end of its own log: one write, one sync. See ``logs`` for the files, ``frame`` for their bytes, ``control`` for
how processes agree, ``replay`` for opening, ``rewrite`` for giving space back.

Two locks: ``_writer``, and with it the directory's, is held by who decides and writes; ``_lock`` by who looks at the
tables or changes them, never while the disk is waited for. So reading goes on during a save.

``_is_stale`` is set before the first change of what is known, and taken back after the last: whoever is interrupted in
between leaves it set, and the next call reads everything anew. Nothing that a reader looks at is changed before that.

Everything may be removed, moved or replaced under an open store. Whoever writes looks, behind the lock and again before
it says that something is stored, whether the path still leads to the files that are open. A control file that is gone
is made anew; whatever else is gone is an error, until it is back.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar

from backstay.errors import Corrupted, OutcomeUnknown, StoreError
from backstay.pieces.piece import Range
from backstay.store.atomic import sweep, sync_directory
from backstay.store.base import Head, LaneKey, Query, Removed, Row, Sizes
from backstay.store.boot import Clock, boot_clock
from backstay.store.directory.control import Entry, State
from backstay.store.directory.damaged import take_out
from backstay.store.directory.descriptors import Moved
from backstay.store.directory.frame import FILE_HEAD_BYTES, HEAD_BYTES, Frame
from backstay.store.directory.garbage import garbage_of, home_of
from backstay.store.directory.log import STORE_LOG, Log
from backstay.store.directory.logs import LANES, Logs
from backstay.store.directory.record import encode
from backstay.store.directory.replay import fact_of, replay
from backstay.store.directory.rewrite import Needs, rewrite
from backstay.store.directory.root import Root, path_of
from backstay.store.finding import DAMAGED, LEFTOVER, Finding
from backstay.store.lock import is_mine, reentered
from backstay.store.memory.fact import Counters, Fact, Marked
from backstay.store.memory.keeper import reading, writing
from backstay.store.memory.mend import restored
from backstay.store.memory.store import MemoryStore

STREAMS_AT_ONCE = 256
"""How many stream numbers a process takes at a time, since each taking is a write of its own."""

GARBAGE_BYTES_MIN = 1 << 18
"""A log with less than this that nothing needs is not worth writing anew."""

LOCK_TIMEOUT_S = 30.0
_TRIES_MAX = 10
_REWRITES_BITS = 48

T = TypeVar("T")


class DirectoryStore(MemoryStore):
    """Keeps checkpoints in logs under one directory."""

    def __init__(self, url: str, clock: Clock = boot_clock, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        super().__init__(url, clock)
        self._root = Root(path_of(url), timeout_s)
        self._logs = Logs(self._root.path)
        self._writer = threading.RLock()
        self._streams = (os.getpid(), range(0))  # who took them, and what was not given out yet
        self._problems: list[Finding] = []
        self._state = State()
        self._is_stale = True  # what is known of the logs cannot be trusted
        try:
            self._alone(self._sweep)
        except BaseException:
            self._logs.abandon()
            self._root.close()
            raise

    # Who may look and who may write -------------------------------------------------------------------------------

    def _read(self, look: Callable[[], T]) -> T:
        with self._mine():
            self.gate.check()
            with self._lock:
                try:
                    control = self._root.control
                    if control.is_in_place() and self._catch_up(control.read()):
                        return look()
                except Moved:
                    self._is_stale = True
            return self._alone(partial(self._locked, look))

    def _write(self, change: Callable[[], T]) -> T:
        with self._mine():
            self.gate.check()
            self._root.check_writable()
            return self._alone(change)

    def _alone(self, run: Callable[[], T]) -> T:
        """Run something while nobody else writes, in whichever process, knowing all that was written."""
        for _ in range(_TRIES_MAX):
            try:
                with self._writer, self._root.take():
                    self._locked(self._know_all)
                    return run()
            except Moved:  # comes only before anything is written
                self._is_stale = True
        raise Corrupted(f"the logs in {self._root.path} change without end", path=str(self._root.path))

    def _locked(self, run: Callable[[], T]) -> T:
        with self._lock:
            return run()

    def _mine(self) -> threading.RLock:
        if is_mine(self._writer):
            raise reentered(self.url)
        return super()._mine()

    # Knowing what others wrote ------------------------------------------------------------------------------------

    def _know_all(self) -> None:
        """See that all files are in their places, and take in what others wrote or were about to write."""
        if self._root.check() and STORE_LOG in self._logs.known:
            self._is_stale = self._is_stale or not self._logs.is_in_place(self._logs.known[STORE_LOG])
        if not self._root.control.is_in_place():
            self._is_stale = True
            self._root.reopen()
        if not self._catch_up(self._recover(self._root.control.read())):
            self._load()

    def _catch_up(self, state: State | None) -> bool:
        """Take in what other processes wrote; return False if everything must be read anew for that."""
        if self._is_stale:
            return False
        if state is None:
            return self._root.read_only  # nobody says anything, and nothing can be done about it
        if state.rewrites != self._state.rewrites or state.last < self._state.last:
            return False
        if state.last == self._state.last:
            return True
        entries = self._root.control.entries(self._state.last + 1, state.last)
        self._is_stale = True
        self._is_stale = entries is None or not all(self._take(entry) for entry in entries)
        return not self._is_stale

    def _take(self, entry: Entry) -> bool:
        try:
            log = self._logs.look(entry.log)
            if log is None or log.mark != entry.mark:
                return False
            parts = list(self._logs.scan(log, log.end, entry.end))
        except Moved:
            return False
        if len(parts) != 1 or not isinstance(parts[0], Frame) or parts[0].number != entry.number:
            return False
        self._tables.apply(fact_of(self._logs, log, parts[0]))
        log.end = entry.end
        self._state = self._state._replace(last=entry.number)
        self._tables.dropped.clear()  # who wrote it looks after its space
        return True

    def _load(self) -> None:
        """Read everything."""
        self._is_stale = True
        control = self._root.control
        said = control.read() or State(rewrites=secrets.randbits(_REWRITES_BITS))
        pending = (said.pending_log, said.pending_at or FILE_HEAD_BYTES) if said.pending_number else None
        if not self._root.read_only:
            self._root.sync()  # a name that a killed writer made, or could not sync, may be lost with the power still
        logs = Logs(self._root.path)
        try:
            found = replay(logs, control.acknowledged(), not self._root.read_only, pending)
            if self._logs.as_of == said.rewrites and (lost := logs.lacks(self._logs)) is not None:
                raise Corrupted(
                    f"{lost.path} was removed, cut short or replaced while the store was open: what it held is gone",
                    path=str(lost.path),
                    hint="Put it back, or open the store again to go on without: see docs/repair.md",
                )
        except BaseException:
            logs.abandon()
            raise
        logs.as_of = said.rewrites
        before, self._logs = self._logs, logs
        before.abandon()
        self._tables = found.tables
        self._tables.dropped.clear()
        self._problems += [finding for finding in found.findings if finding not in self._problems]
        self._state = State(found.last, said.rewrites)
        if not self._root.read_only:
            control.write(self._state)
        self._is_stale = False

    def _recover(self, state: State | None) -> State | None:
        """Finish what a writer was about to do when it was killed, or met an error; ``_load`` undoes what it cannot."""
        if state is None or not state.pending_number or self._root.read_only:
            return state
        self._is_stale = True
        logs = Logs(self._root.path)  # it may have been written anew since it was looked into
        try:
            entry = logs.recover(state.pending_log, state.pending_at, state.pending_number)
        finally:
            logs.abandon()
        if entry is not None:
            self._root.control.publish(State(max(entry.number, state.last), state.rewrites), entry)
        return self._root.control.read()

    # Writing ------------------------------------------------------------------------------------------------------

    def _keep(self, fact: Fact) -> Removed:
        number = self._state.last + 1
        home = home_of(fact, self._tables)
        log = self._logs.known.get(home)
        if log is not None and log.broken is not None:
            raise Corrupted(log.broken, path=str(log.path), hint="Repair the store: see docs/repair.md")
        if home in self._logs.unreadable:
            raise self._unreadable()
        garbage = garbage_of(fact, self._tables)
        head, payload = encode(fact)
        at = log.end if log else 0
        self._root.control.write(self._state._replace(pending_log=home, pending_at=at, pending_number=number))
        log, end = self._logs.append(home, number, head, payload)
        with self._lock:
            self._is_stale = True
            self._logs.took(log, end)
            self._state = self._state._replace(last=number)
            self._publish(Entry(number, home, end, log.mark))
            payload_at = end - len(payload)
            written = Frame(payload_at - len(head) - HEAD_BYTES, number, head, payload_at, len(payload), b"")
            removed = self._tables.apply(fact_of(self._logs, log, written))
            useless = self._useless(garbage)
            self._is_stale = False
            self._give_back(useless)
        return removed

    def _publish(self, entry: Entry) -> None:
        """Tell readers of a record that is durable, also those who found another control file meanwhile."""
        try:
            self._root.control.publish(self._state, entry)
            for _ in range(_TRIES_MAX):
                if self._root.control.is_in_place():
                    return
                self._root.reopen()
                self._logs.as_of = secrets.randbits(_REWRITES_BITS)
                self._state = self._state._replace(rewrites=self._logs.as_of)
                self._root.control.write(self._state)
        except StoreError as error:
            raise OutcomeUnknown(error.what, path=error.path, hint="Do it again with the same id") from error
        what = f"{self._root.path / 'control'} is removed again and again, so others may not see what was saved"
        raise OutcomeUnknown(what, path=str(self._root.path), hint="Look who does that, then do it again")

    @writing
    def reserve(self, count: int) -> int:
        owner, streams = self._streams
        if owner != os.getpid() or len(streams) < count:
            first = self._tables.last_stream + 1
            taken = max(count, STREAMS_AT_ONCE)
            self._keep(Marked(Counters(stream=first + taken - 1)))
            streams = range(first, first + taken)
        self._streams = (os.getpid(), streams[count:])
        return streams[0]

    # Giving space back --------------------------------------------------------------------------------------------

    def _useless(self, garbage: dict[int, int]) -> list[Log]:
        """Note what nothing needs any more; return the logs that are mostly that."""
        for body in self._tables.dropped:
            log = getattr(body, "log", None)
            if log is not None:
                garbage[log] = garbage.get(log, 0) + body.stored
        self._tables.dropped.clear()
        if not garbage:
            return []
        alive = {lane.number for lane in self._tables.lanes.values()} | {STORE_LOG}
        found = [log for number, size in garbage.items() if (log := self._noted(number, size, alive)) is not None]
        return self._all_logs() if any(log.number == STORE_LOG for log in found) else found

    def _noted(self, number: int, size: int, alive: set[int]) -> Log | None:
        """Note that so much of a log is not needed any more; return it if it is worth writing anew."""
        log = self._logs.known.get(number)
        if log is None or log.gaps:
            return None
        log.garbage += size
        return log if number not in alive or log.garbage > max(GARBAGE_BYTES_MIN, log.end // 2) else None

    def _all_logs(self) -> list[Log]:
        """Return all logs, the store's own last: what it says of others holds until they were written anew."""
        return [*(log for log in self._logs.known.values() if log.number != STORE_LOG), self._logs.known[STORE_LOG]]

    def _give_back(self, logs: list[Log]) -> int:
        """Write logs anew; return how many bytes that gave back. What was stored before is not touched by a failure."""
        if not logs:
            return 0
        given, needs = 0, Needs(self._tables)
        self._is_stale = True
        for log in logs:
            if log.gaps or (log.number == STORE_LOG and any(each.gaps for each in self._logs.known.values())):
                continue  # nothing damaged is thrown away, nor what the store's log says of such a log
            try:
                given += self._write_anew(log, needs)
            except (StoreError, Corrupted, OutcomeUnknown, Moved) as error:
                what = f"could not be written anew: {error.what}"
                self._problems.append(Finding(LEFTOVER, f"log {log.number}", what))
                return given
        self._is_stale = False
        return given

    def _write_anew(self, log: Log, needs: Needs) -> int:
        self._root.check()
        if log.number == STORE_LOG:
            sync_directory(self._root.path / LANES)
        # Said before it is done: who is told too early reads everything again, who is told too late writes into a file
        # that has no name any more.
        self._logs.as_of = None
        self._state = self._state._replace(rewrites=self._state.rewrites + 1)
        self._root.control.write(self._state)
        given = rewrite(self._logs, self._tables, needs, log, self._state.last)
        self._logs.as_of = self._state.rewrites
        return given

    @writing
    def compact(self) -> int:
        with self._lock:
            if STORE_LOG not in self._logs.known:
                return 0
            self._is_stale = True
            self._tables.collect(dict(self._tables.lanes))
            self._tables.dropped.clear()
            self._is_stale = False
            return max(0, self._give_back(self._all_logs()))

    def _rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        with self._lock:
            damaged = [problem for problem in self._problems if problem.kind == DAMAGED]
            if damaged and not dry_run:
                self._is_stale = True
                for log in take_out(self._logs, self._root.path / "damaged"):
                    self._give_back([log])
                self._load()
                self._problems = [problem for problem in self._problems if problem not in damaged]
            return [*damaged, *super()._rebuild(dry_run, drop)]

    @writing
    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        with self._lock:  # bytes are read, by the descriptors of readers
            self._keep(restored(self._tables, blobs, chunks, rows))

    # Reading ------------------------------------------------------------------------------------------------------

    def _head(self, lane: LaneKey) -> Head | None:
        found = super()._head(lane)
        self._check_sound(lane, found)
        return found

    def _find(self, query: Query) -> list[Row]:
        found = super()._find(query)
        if query.ids is not None and len(found) < min(len(set(query.ids)), query.limit):
            self._check_complete()
        return found

    @reading
    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        if self._logs.unreadable:
            return [self._unreadable()]
        threads = {lane.number: lane.key for lane in self._tables.lanes.values()}
        found = []
        for log in self._logs.known.values():
            lane = threads.get(log.number)
            if log.gaps and (
                lane is None or log.is_foreign or (lane.namespace == namespace and thread in (None, lane.thread))
            ):
                what = f"a part of {log.path} cannot be read: something that was stored there is missing in lists"
                name = None if lane is None or log.is_foreign else lane.thread
                hint = "Repair the store: see docs/repair.md"
                found.append(Corrupted(what, thread=name, path=str(log.path), hint=hint))
        return found

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        return super().fetch(list(ranges))  # it may be asked for twice

    def _check_sound(self, lane: LaneKey, found: Head | None) -> None:
        """Refuse to go on from a branch whose last records cannot be read, or that may be one of those."""
        for log in self._logs.known.values():
            if log.broken is not None and log.number == (found.number if found else log.number):
                hint = "Repair the store: see docs/repair.md. Everything before can still be read"
                raise Corrupted(log.broken, thread=lane.thread, path=str(log.path), hint=hint)
        if found is None and self._logs.unreadable:
            raise self._unreadable()

    def _check_complete(self) -> None:
        """Refuse to say that something is not there while it may be in a part of a log that cannot be read."""
        if self._logs.unreadable:
            raise self._unreadable()
        for log in self._logs.known.values():
            if log.gaps:
                what = f"it is not in what can be read, and a part of {log.path} cannot be read"
                raise Corrupted(what, path=str(log.path), hint="Repair the store: see docs/repair.md")

    def _unreadable(self) -> Corrupted:
        path = str(self._logs.path(min(self._logs.unreadable)))
        what = f"{path} is damaged, and which branch it is cannot be known"
        return Corrupted(what, path=path, hint="Repair the store: see docs/repair.md")

    def _sizes(self) -> Sizes:
        sizes = super()._sizes()
        return Sizes(sum(self._logs.size(log) for log in self._logs.known.values()), sizes.sources, sizes.rows)

    def _check(self) -> list[Finding]:
        left = [Finding(LEFTOVER, f"file {path.name}", "a temporary file") for path in self._root.leftovers()]
        left += [Finding(LEFTOVER, f"file {path.name}", "no log has such a name") for path in self._logs.strays()]
        return [*self._problems, *left, *super()._check()]

    def _let_go(self) -> None:
        with self._writer, self._lock:
            if self._root.is_open:
                self._trim()
                self._logs.abandon()
                self._root.close()

    def _trim(self) -> None:
        """Leave no room behind that was taken in advance. If somebody writes just now it stays, and does no harm."""
        with suppress(StoreError, Corrupted), self._root.take_now() or nullcontext() as held:
            if held is None:
                return
            self._root.check()
            state = self._root.control.read()
            is_known = state is not None and not state.pending_number and self._root.control.is_in_place()
            if is_known and self._catch_up(state):
                self._logs.trim()

    def _sweep(self) -> None:
        if not self._root.read_only:
            for directory in (self._root.path, self._root.path / LANES):
                for path in sweep(directory):
                    self._problems.append(Finding(LEFTOVER, f"file {path.name}", "a crash left it; it was removed"))
