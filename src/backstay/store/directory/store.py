"""The directory store: ``dir:./checkpoints``. Plain append-only logs, one for each branch.

It is the memory store, except that each mutation is written to a log before it is applied. Everything but the bytes of
states is in memory: opening reads the heads of all records, and a checkpoint takes a few hundred bytes there. A branch
appends to its own log: one write, one sync. See ``logs`` for the files, ``frame`` for their layout, ``control`` for how
processes share them, ``replay`` for opening, ``rewrite`` for freeing space.

There are two locks. A writer holds ``_writer`` and the directory's lock. ``_lock`` protects the tables and is never
held while a call waits for the disk, so reads continue during a save.

``_is_stale`` is set before the first change to the tables and cleared after the last. An interrupt in between leaves it
set, and the next call reads all logs again. Nothing that a reader looks at changes before it is set.

Another program may remove, move or replace any file under an open store. So a writer checks, under the lock and again
before it acknowledges, that the path still leads to the open files. A missing control file is created again; any other
missing file is an error until it is back.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from backstay.errors import Corrupted, OutcomeUnknown, StoreBusy, StoreError
from backstay.pieces.manifest import Range, Source
from backstay.store.atomic import copy_start, make_directory, sweep, sync_directory, write_whole
from backstay.store.base import BranchKey, Head, Query, Removed, Row, Sizes
from backstay.store.directory.control import ControlState, RingEntry
from backstay.store.directory.descriptors import LogMoved
from backstay.store.directory.encoding import encode
from backstay.store.directory.frame import FILE_HEAD_BYTES, HEAD_BYTES, RecordFrame
from backstay.store.directory.logs import BRANCHES, REPAIR_HINT, STORE_LOG, Log, LogContent, Logs
from backstay.store.directory.replay import mutation_of, replay
from backstay.store.directory.rewrite import garbage_of, log_of, rewrite, save_damaged_parts
from backstay.store.directory.root import NAME_FILE, Root, path_of
from backstay.store.finding import DAMAGED, LEFTOVER, Finding
from backstay.store.leases import Clock, boot_clock
from backstay.store.lock import is_mine, reentered
from backstay.store.memory.mutations import Mutation, NumbersReserved
from backstay.store.memory.repair import plan_rebuild, plan_restore
from backstay.store.memory.store import MemoryStore
from backstay.store.memory.tables import Counters, find_rows
from backstay.store.memory.transactions import reading, writing

STREAMS_AT_ONCE = 256
"""How many stream numbers a process reserves at a time, since each reservation is a write."""

GARBAGE_BYTES_MIN = 1 << 18
"""A log with fewer unneeded bytes than this is not worth rewriting."""

GARBAGE_PER_LOG_BYTES = 1 << 12
"""Nor is the store's own log, with fewer of them for each log: all logs are rewritten with it."""

LOCK_TIMEOUT_S = 30.0
_TRIES_MAX = 10
_REWRITES_BITS = 48

T = TypeVar("T")


class DirectoryStore(MemoryStore):
    """Stores checkpoints in logs under one directory."""

    def __init__(self, url: str, clock: Clock = boot_clock, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        super().__init__(url, clock)
        self._root = Root(path_of(url), timeout_s)
        self._logs = Logs(self._root.path)
        self._writer = threading.RLock()
        self._streams = (os.getpid(), range(0))  # the process that reserved them, and the unused ones
        self._problems: list[Finding] = []
        self._state = ControlState()
        self._is_stale = True  # the tables may not match the logs
        try:
            self._alone(self._sweep)
        except BaseException:
            self._logs.abandon()
            self._root.close()
            raise

    # Running reads and writes -------------------------------------------------------------------------------------

    def _read(self, look: Callable[[], T]) -> T:
        with self._mine():
            self.guard.check()
            try:
                with self._lock:
                    control = self._root.control
                    if control.is_in_place() and self._catch_up(control.read()):
                        return look()
            except LogMoved:
                self._is_stale = True
            return self._alone(partial(self._locked, look))

    def _write(self, change: Callable[[], T]) -> T:
        with self._mine():
            self.guard.check()
            self._root.check_writable()
            return self._alone(change)

    def _alone(self, run: Callable[[], T]) -> T:
        """Run a function while no other thread or process writes, with the tables up to date."""
        for _ in range(_TRIES_MAX):
            try:
                with self._writer, self._root.take():
                    self._locked(self._know_all)
                    return run()
            except LogMoved:  # raised only before anything is written
                self._is_stale = True
        raise Corrupted(
            f"the logs in {self._root.path} change again and again",
            path=str(self._root.path),
            hint="Find out which other program writes to this directory",
        )

    def _locked(self, run: Callable[[], T]) -> T:
        with self._lock:
            return run()

    def _mine(self) -> threading.RLock:
        if is_mine(self._writer):
            raise reentered(self.url)
        return super()._mine()

    # Reading what other processes wrote ---------------------------------------------------------------------------

    def _know_all(self) -> None:
        """Check that all files are in place, and apply records that other processes wrote or were about to write."""
        if self._root.check() and STORE_LOG in self._logs.known:
            self._is_stale = self._is_stale or not self._logs.is_in_place(self._logs.known[STORE_LOG])
        if not self._root.control.is_in_place():
            self._is_stale = True
            self._root.reopen()
        if not self._catch_up(self._recover(self._root.control.read())):
            self._load()

    def _catch_up(self, state: ControlState | None) -> bool:
        """Apply the records of other processes; return False if all logs must be read again for that."""
        if self._is_stale:
            return False
        if state is None:
            return self._root.read_only  # there is no control file, and this process may not create one
        if state.rewrites != self._state.rewrites or state.last < self._state.last:
            return False
        if state.last == self._state.last:
            return True
        entries = self._root.control.entries(self._state.last + 1, state.last)
        self._is_stale = True
        self._is_stale = entries is None or not all(self._take(entry) for entry in entries)
        return not self._is_stale

    def _take(self, entry: RingEntry) -> bool:
        try:
            log = self._logs.look(entry.log)
            if log is None or log.mark != entry.mark:
                return False
            parts = list(self._logs.scan(log, log.end, entry.end))
        except LogMoved:
            return False
        if len(parts) != 1 or not isinstance(parts[0], RecordFrame) or parts[0].number != entry.number:
            return False
        mutation_of(self._logs, log, parts[0]).apply(self._tables)
        log.end = entry.end
        self._state = self._state._replace(last=entry.number)
        self._tables.dropped.clear()  # the process that wrote it frees the space
        return True

    def _load(self) -> None:
        """Read all logs."""
        self._is_stale = True
        control = self._root.control
        said = control.read() or ControlState(rewrites=secrets.randbits(_REWRITES_BITS))
        pending = (said.pending_log, said.pending_at or FILE_HEAD_BYTES) if said.pending_number else None
        if not self._root.read_only:
            self._root.sync()  # a killed writer may have left a name that is not synced yet
        logs = Logs(self._root.path)
        try:
            found = replay(logs, control.acknowledged(), not self._root.read_only, pending)
            if self._logs.as_of == said.rewrites and (lost := logs.first_loss(self._logs)) is not None:
                raise Corrupted(
                    f"{lost.path} was removed, cut or replaced while the store was open, so its records are lost",
                    path=str(lost.path),
                    hint="Put the file back, or open the store again to continue without it: see docs/repair.md",
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
        self._state = ControlState(found.last, said.rewrites)
        if not self._root.read_only:
            control.write(self._state)
        self._is_stale = False

    def _recover(self, state: ControlState | None) -> ControlState | None:
        """Finish the record of a writer that was killed or met an error; ``_load`` undoes it if that is impossible."""
        if state is None or not state.pending_number or self._root.read_only:
            return state
        self._is_stale = True
        logs = Logs(self._root.path)  # the log may have been rewritten since this process opened it
        try:
            entry = logs.recover(state.pending_log, state.pending_at, state.pending_number)
        finally:
            logs.abandon()
        if entry is not None:
            self._root.control.publish(ControlState(max(entry.number, state.last), state.rewrites), entry)
        return self._root.control.read()

    # Writing ------------------------------------------------------------------------------------------------------

    def _apply(self, mutation: Mutation) -> Removed:
        number = self._state.last + 1
        home = log_of(mutation, self._tables)
        log = self._logs.known.get(home)
        if log is not None and log.broken is not None:
            raise Corrupted(log.broken, path=str(log.path), hint=REPAIR_HINT)
        if home in self._logs.unreadable:
            raise self._unreadable()
        garbage = garbage_of(mutation, self._tables)
        head, payload = encode(mutation)
        at = log.end if log else 0
        self._root.control.write(self._state._replace(pending_log=home, pending_at=at, pending_number=number))
        log, end = self._logs.append(home, number, head, payload)
        with self._lock:
            self._is_stale = True
            self._logs.took(log, end)
            self._state = self._state._replace(last=number)
            self._publish(RingEntry(number, home, end, log.mark))
            payload_at = end - len(payload)
            written = RecordFrame(payload_at - len(head) - HEAD_BYTES, number, head, payload_at, len(payload), b"")
            removed = mutation_of(self._logs, log, written).apply(self._tables)
            useless = self._useless(garbage)
            self._is_stale = False
            self._give_back(useless)
        return removed

    def _publish(self, entry: RingEntry) -> None:
        """Announce a durable record to readers, including those that found another control file meanwhile."""
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
            raise OutcomeUnknown(error.what, path=error.path, hint="Repeat the call with the same id") from error
        what = f"{self._root.path / 'control'} is removed again and again, so other processes may not see this save"
        raise OutcomeUnknown(
            what,
            path=str(self._root.path),
            hint="Find out which program removes it, then repeat the call with the same id",
        )

    @writing
    def reserve(self, count: int) -> int:
        owner, streams = self._streams
        if owner != os.getpid() or len(streams) < count:
            first = self._tables.last_stream + 1
            taken = max(count, STREAMS_AT_ONCE)
            self._apply(NumbersReserved(Counters(stream=first + taken - 1)))
            streams = range(first, first + taken)
        self._streams = (os.getpid(), streams[count:])
        return streams[0]

    # Freeing space ------------------------------------------------------------------------------------------------

    def _useless(self, garbage: dict[int, int]) -> list[Log]:
        """Count bytes that are no longer needed; return the logs that are worth rewriting."""
        for body in self._tables.dropped:
            if isinstance(body, LogContent):
                garbage[body.log] = garbage.get(body.log, 0) + body.stored
        self._tables.dropped.clear()
        if not garbage:
            return []
        found = []
        for number, size in garbage.items():
            log = self._logs.known.get(number)
            if log is not None and not log.gaps:
                log.garbage += size
                is_gone = number != STORE_LOG and self._tables.branch_order.get(number) is None
                # The store's log is rewritten together with all others, so that must pay for all of them.
                least = GARBAGE_BYTES_MIN if number != STORE_LOG else GARBAGE_PER_LOG_BYTES * len(self._logs.known)
                if is_gone or log.garbage > max(GARBAGE_BYTES_MIN, least, log.end // 2):
                    found.append(log)
        return self._all_logs() if any(log.number == STORE_LOG for log in found) else found

    def _all_logs(self) -> list[Log]:
        """Return all logs, the store's own last: its records about other logs count until those are rewritten."""
        return [*(log for log in self._logs.known.values() if log.number != STORE_LOG), self._logs.known[STORE_LOG]]

    def _give_back(self, logs: list[Log]) -> int:
        """Rewrite logs; return how many bytes that freed. A failure leaves stored data as it was."""
        if not logs:
            return 0
        given = 0
        self._is_stale = True
        for log in logs:
            if log.gaps or (log.number == STORE_LOG and any(each.gaps for each in self._logs.damaged)):
                continue  # damaged records stay, and so do the store's records about them
            try:
                self._root.check()
                if log.number == STORE_LOG:
                    sync_directory(self._root.path / BRANCHES)
                # Announce the rewrite before it happens: a process that learns of it too early only reads everything
                # again, but a process that learns of it too late would write into a file that no longer has a name.
                self._logs.as_of = None
                self._state = self._state._replace(rewrites=self._state.rewrites + 1)
                self._root.control.write(self._state)
                given += rewrite(self._logs, self._tables, log, self._state.last)
                self._logs.as_of = self._state.rewrites
            except (StoreError, Corrupted, OutcomeUnknown, LogMoved) as error:
                what = f"it could not be rewritten: {error.what}"
                self._problems.append(Finding(LEFTOVER, f"log {log.number}", what))
                return given
        self._is_stale = False
        return given

    def backup(self, path: Path) -> None:
        """Copy each log up to where its last record ends now: that part changes only when a log is rewritten."""
        for _ in range(_TRIES_MAX):
            ends, rewrites = self._read(
                lambda: ({log.path: log.end for log in self._logs.known.values()}, self._state.rewrites)
            )
            try:
                make_directory(path / BRANCHES)
                write_whole(path / NAME_FILE, (self._root.path / NAME_FILE).read_bytes())
                # If a log is gone or shorter, it was rewritten meanwhile.
                is_whole = all(
                    copy_start(log, path / log.relative_to(self._root.path), end) for log, end in ends.items()
                )
                sync_directory(path / BRANCHES)
                sync_directory(path)
            except FileNotFoundError:
                is_whole = False
            if is_whole and self._read(lambda: self._state.rewrites) == rewrites:
                return
            shutil.rmtree(path)
        raise StoreBusy(
            "the store's logs were rewritten again and again while they were copied",
            path=str(self._root.path),
            hint="Try again when less is being deleted",
        )

    @writing
    def compact(self, full: bool = False) -> int:
        with self._lock:
            if STORE_LOG not in self._logs.known:
                return 0
            self._is_stale = True
            self._tables.collect(dict(self._tables.branches))
            self._tables.dropped.clear()
            self._is_stale = False
            return max(0, self._give_back(self._all_logs()))

    def _rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        with self._lock:
            damaged = [problem for problem in self._problems if problem.kind == DAMAGED]
            if damaged and not dry_run:
                self._is_stale = True
                for log in save_damaged_parts(self._logs, self._root.path / "damaged"):
                    self._give_back([log])
                self._load()
                self._problems = [problem for problem in self._problems if problem not in damaged]
            return [*damaged, *super()._rebuild(dry_run, drop)]

    @writing
    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        with self._lock:  # it reads bytes, through the readers' descriptors
            self._apply(plan_restore(self._tables, blobs, chunks, rows))

    # Reading ------------------------------------------------------------------------------------------------------

    @reading
    def head(self, branch: BranchKey) -> Head | None:
        found = self._tables.head(branch)
        for log in self._logs.damaged:
            if log.broken is not None and log.number == (found.number if found else log.number):
                hint = f"{REPAIR_HINT}. Earlier checkpoints can still be read"
                raise Corrupted(log.broken, thread=branch.thread, path=str(log.path), hint=hint)
        if found is None and self._logs.unreadable:
            raise self._unreadable()
        return found

    @reading
    def find(self, query: Query) -> list[Row]:
        found = find_rows(query, self._tables)
        if query.ids is not None and len(found) < min(len(set(query.ids)), query.limit):
            # The missing checkpoint may be in a part of a log that cannot be read.
            if self._logs.unreadable:
                raise self._unreadable()
            for log in self._logs.damaged:
                what = f"a checkpoint was not found, but part of {log.path} cannot be read"
                raise Corrupted(what, path=str(log.path), hint=REPAIR_HINT)
        return found

    @reading
    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        if self._logs.unreadable:
            return [self._unreadable()]
        found = []
        for log in self._logs.damaged:
            branch = None if log.is_foreign else self._tables.branch_order.get(log.number)
            if branch is None or (branch.key.namespace == namespace and thread in (None, branch.key.thread)):
                what = f"part of {log.path} cannot be read, so lists may miss checkpoints that were stored there"
                name = None if branch is None else branch.key.thread
                found.append(Corrupted(what, thread=name, path=str(log.path), hint=REPAIR_HINT))
        return found

    def fetch(self, ranges: Iterable[Range]) -> list[list[bytes]]:
        return super().fetch(list(ranges))  # a list, because a retry reads it again

    def _unreadable(self) -> Corrupted:
        path = str(self._logs.path(min(self._logs.unreadable)))
        what = f"{path} is damaged, and its branch is unknown"
        return Corrupted(what, path=path, hint=REPAIR_HINT)

    @reading
    def sizes(self, sources: Collection[Source] | None = None) -> Sizes:
        stored = self._tables.bytes
        total = sum(log.end for log in self._logs.known.values())
        return Sizes(total, stored.sizes(stored.names() if sources is None else sources))

    @reading
    def check(self) -> list[Finding]:
        left = [Finding(LEFTOVER, f"file {path.name}", "a temporary file") for path in self._root.leftovers()]
        left += [Finding(LEFTOVER, f"file {path.name}", "its name is not a log's") for path in self._logs.strays()]
        plan = plan_rebuild(self._tables, drop=True)
        return [*self._problems, *left, *plan.findings, *plan.unrepairable]

    def _release(self) -> None:
        with self._writer, self._lock:
            if not self._root.is_open:
                return
            # Cut off space that was allocated in advance. If another process is writing, it stays and does no harm.
            with suppress(StoreError, Corrupted), self._root.take_now() or nullcontext() as held:
                if held is not None:
                    self._root.check()
                    state = self._root.control.read()
                    is_known = state is not None and not state.pending_number and self._root.control.is_in_place()
                    if is_known and self._catch_up(state):
                        self._logs.trim()
            self._logs.abandon()
            self._root.close()

    def _sweep(self) -> None:
        if not self._root.read_only:
            for directory in (self._root.path, self._root.path / BRANCHES):
                for path in sweep(directory):
                    self._problems.append(
                        Finding(LEFTOVER, f"file {path.name}", "a crash left this temporary file; it was removed")
                    )
