"""The directory store: ``dir:./checkpoints``. Plain append-only logs, one for each branch.

It is the memory store with facts that are written down before they are taken in. All that is not bytes of states is in
memory: opening reads the heads of all records, and a checkpoint costs some hundred bytes there. What a branch adds goes
to the end of its own log: one write, one sync. See ``logs`` for the files, ``frame`` for their bytes, ``control`` for
how processes agree, ``replay`` for opening, ``rewrite`` for giving space back.

Two locks: ``_writer``, and with it the directory's, is held by who decides and writes; ``_lock`` by who looks at the
tables or changes them, never while the disk is waited for. So reading goes on during a save.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from holdfast.errors import Corrupted, OutcomeUnknown, StoreError
from holdfast.pieces.piece import Range
from holdfast.store.atomic import sweep, sync_directory
from holdfast.store.base import Head, LaneKey, Query, Removed, Row, Sizes
from holdfast.store.boot import Clock, boot_clock
from holdfast.store.directory.control import Entry, State
from holdfast.store.directory.damaged import take_out
from holdfast.store.directory.descriptors import Moved
from holdfast.store.directory.frame import FILE_HEAD_BYTES, HEAD_BYTES, Frame
from holdfast.store.directory.garbage import garbage_of, home_of
from holdfast.store.directory.log import STORE_LOG, Log
from holdfast.store.directory.logs import LANES, Logs
from holdfast.store.directory.record import encode
from holdfast.store.directory.replay import fact_of, replay
from holdfast.store.directory.rewrite import Needs, rewrite
from holdfast.store.directory.root import Root, path_of
from holdfast.store.finding import DAMAGED, LEFTOVER, Finding
from holdfast.store.memory.fact import Counters, Fact, Marked
from holdfast.store.memory.store import MemoryStore

STREAMS_AT_ONCE = 256
"""How many stream numbers a process takes at a time, since each taking is a write of its own."""

GARBAGE_BYTES_MIN = 1 << 18
"""A log with less than this that nothing needs is not worth writing anew."""

LOCK_TIMEOUT_S = 30.0
_TRIES_MAX = 10

T = TypeVar("T")


class DirectoryStore(MemoryStore):
    """Keeps checkpoints in logs under one directory."""

    def __init__(self, url: str, clock: Clock = boot_clock, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        super().__init__(url, clock)
        self._root = Root(path_of(url), timeout_s)
        self._logs = Logs(self._root.path)
        self._control = self._root.control
        self._writer = threading.RLock()
        self._process = os.getpid()
        self._streams = range(0)  # taken and not given out yet
        self._problems: list[Finding] = []
        self._state = State()
        self._is_stale = True  # what is known of the logs cannot be trusted
        try:
            with self._exclusive():
                self._sweep()
        except BaseException:
            self._logs.abandon()
            self._root.close()
            raise
        _opened.add(self)

    # Who may look and who may write -------------------------------------------------------------------------------

    def _reading(self) -> AbstractContextManager[object]:
        self._check_open()
        return self._fresh()

    def _writing(self) -> AbstractContextManager[object]:
        self._check_open()
        self._root.check_writable()
        return self._exclusive()

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        self._lock.acquire()
        try:
            while not self._catch_up(self._control.read()):
                self._lock.release()
                try:
                    with self._exclusive():
                        pass
                finally:
                    self._lock.acquire()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let nobody else write, in whichever process, and know all that was written."""
        with self._writer:
            self._root.lock()
            try:
                with self._lock:
                    if not self._catch_up(self._recover(self._control.read())):
                        self._load()
                yield
            finally:
                self._root.unlock()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", hint="Open it again with holdfast.open")
        if self._process != os.getpid():
            self._begin_anew()

    def let_go(self) -> None:
        """Close what this process got from the one that it was forked from: an open file would keep its lock."""
        self._lock, self._writer = threading.RLock(), threading.RLock()
        self._logs.abandon()
        self._root.close(is_forked=True)

    def _begin_anew(self) -> None:
        """Take nothing over from the process that this one was forked from."""
        self._process = os.getpid()
        self.let_go()
        self._root.reopen()
        self._control = self._root.control
        self._streams = range(0)
        self._is_stale = True

    # Knowing what others wrote ------------------------------------------------------------------------------------

    def _catch_up(self, state: State) -> bool:
        """Take in what other processes wrote; return False if everything must be read anew for that."""
        if self._is_stale or state.rewrites != self._state.rewrites:
            return False
        if state.last == self._state.last:
            return True
        entries = self._control.entries(self._state.last + 1, state.last)
        return entries is not None and all(self._take(entry) for entry in entries)

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
        self._logs.abandon()
        said = self._control.read()
        pending = (said.pending_log, said.pending_at or FILE_HEAD_BYTES) if said.pending_number else None
        if not self._root.read_only:
            self._root.sync()  # a name that a killed writer made, or could not sync, may be lost with the power still
        found = replay(self._logs, self._control.acknowledged(), not self._root.read_only, pending)
        self._tables = found.tables
        self._tables.dropped.clear()
        self._problems += [finding for finding in found.findings if finding not in self._problems]
        self._state = State(found.last, said.rewrites)
        if not self._root.read_only:
            self._control.write(self._state)
        self._is_stale = False

    def _recover(self, state: State) -> State:
        """Finish what a writer was about to do when it was killed, or met an error; ``_load`` undoes what it cannot."""
        if not state.pending_number or self._root.read_only:
            return state
        self._is_stale = True
        entry = self._logs.recover(state.pending_log, state.pending_at, state.pending_number)
        if entry is not None:
            self._control.publish(State(max(entry.number, state.last), state.rewrites), entry)
        return self._control.read()

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
        try:
            self._say(self._state._replace(pending_log=home, pending_at=log.end if log else 0, pending_number=number))
            log, payload_at = self._logs.append(home, number, head, payload)
            with self._lock:
                self._state = self._state._replace(last=number)
                self._say(self._state, Entry(number, home, log.end, log.mark))
                start = payload_at - len(head) - HEAD_BYTES
                written = Frame(start, number, head, payload_at, len(payload), b"")
                removed = self._tables.apply(fact_of(self._logs, log, written))
                self._tidy(garbage)
        except BaseException:
            self._is_stale = True
            raise
        return removed

    def _say(self, state: State, entry: Entry | None = None) -> None:
        try:
            if entry is None:
                self._control.write(state)
            else:
                self._control.publish(state, entry)
        except StoreError as error:
            if entry is None:
                raise
            raise OutcomeUnknown(error.what, path=error.path, hint="Do it again with the same id") from error

    def reserve(self, count: int) -> int:
        with self._writing():
            if len(self._streams) < count:
                first = self._tables.last_stream + 1
                taken = max(count, STREAMS_AT_ONCE)
                self._keep(Marked(Counters(stream=first + taken - 1)))
                self._streams = range(first, first + taken)
            first, self._streams = self._streams[0], self._streams[count:]
            return first

    # Giving space back --------------------------------------------------------------------------------------------

    def _tidy(self, garbage: dict[int, int]) -> None:
        """Note what nothing needs any more, and write logs anew that are mostly that."""
        for body in self._tables.dropped:
            log = getattr(body, "log", None)
            if log is not None:
                garbage[log] = garbage.get(log, 0) + body.stored
        self._tables.dropped.clear()
        if not garbage:
            return
        alive = {lane.number for lane in self._tables.lanes.values()} | {STORE_LOG}
        useless = [log for number, size in garbage.items() if (log := self._useless(number, size, alive)) is not None]
        if any(log.number == STORE_LOG for log in useless):
            useless = self._all_logs()
        if useless:
            self._give_back(useless)

    def _useless(self, number: int, size: int, alive: set[int]) -> Log | None:
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
        given = 0
        needs = Needs(self._tables)
        try:
            for log in logs:
                if log.gaps or (log.number == STORE_LOG and any(each.gaps for each in self._logs.known.values())):
                    continue  # nothing damaged is thrown away, nor what the store's log says of such a log
                if log.number == STORE_LOG:
                    sync_directory(self._root.path / LANES)
                # Said before it is done: who is told too early reads everything again, who is told too late writes
                # into a file that has no name any more.
                self._state = self._state._replace(rewrites=self._state.rewrites + 1)
                self._say(self._state)
                given += rewrite(self._logs, self._tables, needs, log, self._state.last)
        except (StoreError, Corrupted, OutcomeUnknown, Moved) as error:
            self._is_stale = True
            self._problems.append(Finding(LEFTOVER, f"log {log.number}", f"could not be written anew: {error.what}"))
        return given

    def compact(self) -> int:
        with self._writing(), self._lock:
            if STORE_LOG not in self._logs.known:
                return 0
            self._tables.collect(dict(self._tables.lanes))
            self._tables.dropped.clear()
            return max(0, self._give_back(self._all_logs()))

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        damaged = []
        with self._reading() if dry_run else self._writing(), self._lock:
            damaged = [problem for problem in self._problems if problem.kind == DAMAGED]
            if damaged and not dry_run:
                for log in take_out(self._logs, self._root.path / "damaged"):
                    self._give_back([log])
                self._problems = [problem for problem in self._problems if problem.kind != DAMAGED]
                self._load()
        return [*damaged, *super().rebuild(dry_run, drop)]

    # Reading that may come to bytes which were moved --------------------------------------------------------------

    def head(self, lane: LaneKey) -> Head | None:
        found = self._looking(lambda: super(DirectoryStore, self).head(lane))
        with self._lock:
            self._check_sound(lane, found)
        return found

    def find(self, query: Query) -> list[Row]:
        found = self._looking(lambda: super(DirectoryStore, self).find(query))
        if query.ids is not None and len(found) < min(len(set(query.ids)), query.limit):
            with self._lock:
                self._check_complete()
        return found

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        with self._reading():
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
        wanted = list(ranges)
        return self._looking(lambda: super(DirectoryStore, self).fetch(wanted))

    def _looking(self, look: Callable[[], T]) -> T:
        for _ in range(_TRIES_MAX):
            try:
                return look()
            except Moved:
                self._is_stale = True
        raise Corrupted(f"the logs in {self._root.path} change without end", path=str(self._root.path))

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

    def sizes(self) -> Sizes:
        sizes = super().sizes()
        return self._looking(lambda: Sizes(self._logs_bytes(), sizes.sources, sizes.rows))

    def _logs_bytes(self) -> int:
        with self._reading():
            return sum(self._logs.size(log) for log in self._logs.known.values())

    def check(self) -> list[Finding]:
        found = self._looking(super().check)
        with self._lock:
            left = [Finding(LEFTOVER, f"file {path.name}", "a temporary file") for path in self._root.leftovers()]
            return [*self._problems, *left, *found]

    def close(self) -> None:
        with self._writer, self._lock:
            if not self._closed:
                self._trim()
                super().close()
                self._logs.abandon()
                self._root.close()

    def _trim(self) -> None:
        """Leave no room behind that was taken in advance. If somebody writes just now it stays, and does no harm."""
        if self._process != os.getpid() or not self._root.lock_now():
            return
        try:
            with suppress(StoreError):
                state = self._control.read()
                if not state.pending_number and self._catch_up(state):
                    self._logs.trim()
        finally:
            self._root.unlock()

    def _sweep(self) -> None:
        if not self._root.read_only:
            for directory in (self._root.path, self._root.path / LANES):
                for path in sweep(directory):
                    self._problems.append(Finding(LEFTOVER, f"file {path.name}", "a crash left it; it was removed"))


_opened: weakref.WeakSet[DirectoryStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_opened):
        store.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
