"""A lease as its holder sees it, and the thread that renews leases and sessions.

The store decides who may write. ``HeldLease`` only lets the holder know early, and once, that the lease is lost: the
store said so, or it could not be renewed within its ttl. A released lease is over, not lost.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from backstay.errors import Fenced
from backstay.store.base import Backend
from backstay.store.leases import WALL_CLOCK, LeaseGrant, LeaseRequest, boot_id

# Identify a process, so that a dead process can be distinguished from a slow one.
#
# Process ids are reused. Together with the start time of the process, the boot of the machine and the namespaces of
# both numbers, an id identifies one process forever. Within the same boot and namespaces the kernel knows whether the
# other process is alive; elsewhere only its renewals show whether it is.


_PROC = Path("/proc")
_DEAD = ("Z", "X", "x")  # states of a process that has ended and was not collected yet
_STATE, _STARTED = 0, 19  # fields 3 and 22 of /proc/<pid>/stat, counted after the command's name
UNKNOWN = "-"


class Process(NamedTuple):
    """The identity of a process. Fields that this system does not provide are ``UNKNOWN``."""

    boot: str
    namespaces: str  # those that give process ids and start times their meaning
    pid: str
    started: str
    host: str  # for people

    def __str__(self) -> str:
        return " ".join(self)

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return the process from its text, or None if the text is not one."""
        parts = text.split(" ", len(cls._fields) - 1)
        if len(parts) != len(cls._fields) or not parts[2].isdecimal() or len(parts[2]) >= 10:  # no pid is that long
            return None
        return cls(*parts)


def short_name() -> str:
    """Return a name for people: host and process id."""
    return f"{_host()}:{os.getpid()}"


def _host() -> str:
    import socket

    return socket.gethostname()


def this_process() -> Process:
    """Return the identity of this process."""
    pid = os.getpid()
    boot, namespaces, stat = boot_id(), _namespaces(pid), _stat(pid)
    if boot == WALL_CLOCK or namespaces is None or stat is None:
        return Process(UNKNOWN, UNKNOWN, str(pid), UNKNOWN, _host())
    return Process(boot, namespaces, str(pid), stat[_STARTED], _host())


def is_alive(name: str) -> bool | None:
    """Return whether a process is alive; None if it cannot be known from here."""
    other, here = Process.parse(name), this_process()
    if other is None or here.boot == UNKNOWN or other[:2] != here[:2]:
        return None
    stat = _stat(int(other.pid))
    if stat is None:
        # The process may be hidden from us; a signal that does nothing still finds it.
        return None if _exists(int(other.pid)) else False
    return stat[_STARTED] == other.started and stat[_STATE] not in _DEAD


def _namespaces(pid: int) -> str | None:
    try:
        if os.readlink(_PROC / "self") != str(pid):
            return None  # this /proc belongs to namespaces other than this process's
        return f"{os.readlink(_PROC / 'self/ns/pid')}+{_time_namespace()}"
    except OSError:
        return None


def _time_namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/time")
    except FileNotFoundError:
        return UNKNOWN  # an older kernel, where all processes have the same one


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may contain anything, even spaces and brackets
    return fields if len(fields) > _STARTED else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it exists and belongs to another user
    return True


RENEWALS_PER_TTL = 3
TRIES_PER_TTL = 10
CLOSE_S_MAX = 5.0
"""How long ``close`` waits for a renewal that is under way."""


class Renewal:
    """A lease or session that the heartbeat renews when a third of its ttl has passed.

    ``renew`` calls the store and returns whether to continue. If the store refuses, ``give_up`` gets the error at once.
    After any other error the renewal is retried until the ttl has passed since the start of the last success: from then
    on the store may have given the lease to another worker. Without ``give_up``, errors never end the renewals.
    """

    def __init__(
        self, ttl: float, started: float, renew: Callable[[], bool], give_up: Callable[[Exception], None] | None = None
    ) -> None:
        self.ttl = ttl
        self.stopped = False  # set by a single assignment, so that no interrupt can leave it half done
        self._since = started
        self._retry_at = 0.0
        self._renew = renew
        self._give_up = give_up

    @property
    def overdue(self) -> bool:
        """Return whether the ttl has passed since the last known success."""
        return time.monotonic() >= self._since + self.ttl

    def extended(self, started: float) -> None:
        """Record a success of a call that started at this moment (of ``time.monotonic``)."""
        self._since = max(self._since, started)

    def due(self) -> float:
        """Return the moment of the next renewal."""
        return max(self._since + self.ttl / RENEWALS_PER_TTL, self._retry_at)

    def run(self) -> bool:
        """Renew once and return whether to continue."""
        if self.stopped:
            return False
        started = time.monotonic()
        try:
            alive = self._renew()
        except Exception as error:
            now, end = time.monotonic(), self._since + self.ttl
            if self._give_up is not None and (isinstance(error, Fenced) or now >= end):
                self._give_up(error)
                return False
            retry_at = now + self.ttl / TRIES_PER_TTL
            self._retry_at = retry_at if now >= end else min(retry_at, end)
            return True
        if alive:
            self.extended(started)
        return alive


class Heartbeat:
    """The thread of an open store that runs all renewals, one after the other.

    It starts with the first renewal and ends with the last. It does not survive a fork: a child renews nothing.
    """

    def __init__(self) -> None:
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Forget everything, in a forked process: its parent renews what it holds."""
        # A signal handler may use both while the code that it interrupted does, and neither stays locked if it raises.
        self._lock = threading.RLock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._renewals: set[Renewal] = set()
        self._thread: threading.Thread | None = None

    def add(self, renewal: Renewal) -> None:
        """Renew this lease or session from now on."""
        with self._lock:
            if self._closed:
                return
            self._renewals.add(renewal)
            if self._thread is None:
                # Thread.start waits. An interrupt there would leave a lock taken that the new thread needs, so a helper
                # calls it.
                _thread.start_new_thread(self._start, ())
        self._wake.put(None)

    def remove(self, renewal: Renewal) -> None:
        """Stop renewing this lease or session."""
        with self._lock:
            self._renewals.discard(renewal)
        self._wake.put(None)

    def close(self) -> None:
        """Stop all renewals and end the thread."""
        self._closed = True
        with self._lock:
            self._renewals.clear()
            thread = self._thread
        self._wake.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)

    def _start(self) -> None:
        """Start the thread unless it runs; called in a helper thread, where no signal handler can interrupt."""
        with self._lock, contextlib.suppress(RuntimeError):  # the program is ending
            if self._thread is None and self._renewals:
                thread = threading.Thread(target=self._run, name="backstay-heartbeat", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._renewals = {renewal for renewal in self._renewals if not renewal.stopped}
                if not self._renewals:
                    self._thread = None
                    return
                renewal = min(self._renewals, key=Renewal.due)
            wait_s = renewal.due() - time.monotonic()
            if wait_s > 0:
                with contextlib.suppress(Empty):
                    self._wake.get(timeout=wait_s)
            elif not renewal.run():
                self.remove(renewal)


@dataclass(frozen=True, slots=True)
class LeaseLoss:
    """Why a lease was lost. ``called``: a call of the holder found out, so the holder already knows."""

    error: Fenced
    called: bool


class HeldLease:
    """The right to write one branch.

    ``owner`` returns the lease object, or None once it is gone. An interrupt in the first line of leaving a ``with``
    block keeps the lease from being released; once its object is gone it is no longer renewed, and expires.
    """

    def __init__(
        self,
        store: Backend,
        grant: LeaseGrant,
        request: LeaseRequest,
        started: float,
        on_loss: Callable[[LeaseLoss], None],
        owner: Callable[[], object] = object,
    ) -> None:
        self.branch = grant.branch
        self.epoch = grant.epoch
        self.request = request
        self.renewal = Renewal(request.ttl_us / 1e6, started, self._renew, self.give_up)
        self.loss: LeaseLoss | None = None
        self.is_over = False  # released, or deleted with its branch
        self._store = store
        self._on_loss = on_loss
        self._owner = owner
        self._ending = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may save while it is held

    @property
    def is_inherited(self) -> bool:
        """Return whether it belongs to the process that forked this one. Takes no lock: the parent may have held it."""
        return os.getpid() != self._process

    @property
    def is_abandoned(self) -> bool:
        """Return whether no object is left that could release it."""
        return self._owner() is None

    def refusal(self) -> Fenced | None:
        """Return the error for a holder that has lost the lease, or may have lost it."""
        if self.loss is not None:
            fresh = copy(self.loss.error)  # an error that is raised twice would collect both tracebacks
            fresh.__cause__ = self.loss.error.__cause__
            return fresh
        if self.is_over:
            return None
        if self.is_inherited:
            return self._fenced("belongs to the process that forked this one", "Take a lease of your own")
        if self.renewal.overdue:
            return self._expired()
        return None

    def fenced(self, error: Fenced, releasing: bool = False) -> None:
        """Record that the store refused a call of the holder."""
        self._lose(LeaseLoss(error, called=True), releasing)

    def give_up(self, error: Exception) -> None:
        """Record that the heartbeat could not renew it."""
        if not isinstance(error, Fenced):
            expired = self._expired()
            expired.__cause__ = error
            error = expired
        self._lose(LeaseLoss(error, called=False))

    def start_release(self) -> None:
        """From now on a refused renewal is not a loss."""
        with self._lock:
            self._ending = True

    def cancel_release(self) -> None:
        """Undo ``start_release``."""
        with self._lock:
            self._ending = False

    def finish_release(self) -> None:
        """Record that the lease is released."""
        with self._lock:
            self.is_over = True

    def _renew(self) -> bool:
        # Without the handle's lock: a long save must not keep its own lease from being renewed.
        if self.is_abandoned:
            return False
        self._store.renew(self.branch, self.epoch, self.request)
        return True

    def _lose(self, loss: LeaseLoss, releasing: bool = False) -> None:
        with self._lock:
            if self.is_over or self.loss is not None or (self._ending and not releasing):
                return
            self.loss = loss
        self._on_loss(loss)

    def _expired(self) -> Fenced:
        what = f"could not be renewed for {self.renewal.ttl:g} s, so another worker may hold it now"
        return self._fenced(what, "Stop writing and take a new lease")

    def _fenced(self, what: str, hint: str) -> Fenced:
        return Fenced(
            f"the lease on branch {self.branch.name!r} {what}",
            epoch=self.epoch,
            current=self.epoch,
            thread=self.branch.thread,
            hint=hint,
        )
