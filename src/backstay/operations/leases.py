"""A lease as its holder sees it, whether another holder is alive, and the thread that renews leases.

The store decides who may write. ``HeldLease`` only lets the holder know early, and once, that the lease is lost: the
store said so, or it could not be renewed within its ttl. A released lease is over, not lost.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from backstay.errors import Fenced
from backstay.store.base import Backend, BranchKey
from backstay.store.leases import UNKNOWN, WALL_CLOCK, Holder, LeaseGrant, LeaseRequest, boot_id

# Identify a process, so that a dead process can be distinguished from a slow one: see ``Holder``. Within the same boot
# and namespaces the kernel knows whether the other process is alive; elsewhere only its renewals show whether it is.


_PROC = Path("/proc")
_MACHINE_ID = Path("/etc/machine-id")
_DEAD = ("Z", "X", "x")  # states of a process that has ended and was not collected yet
_STATE, _STARTED = 0, 19  # fields 3 and 22 of /proc/<pid>/stat, counted after the command's name


def this_process(label: str = "") -> Holder:
    """Return the identity of this process, as the holder of a lease with this label."""
    return _process(os.getpid())._replace(label=label)


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> Holder:
    boot, namespaces, stat = boot_id(), _namespaces(pid), _stat(pid)
    if boot == WALL_CLOCK or namespaces is None or stat is None:
        return Holder(UNKNOWN, UNKNOWN, UNKNOWN, str(pid), UNKNOWN, _host())
    found = b""
    with contextlib.suppress(OSError):
        found = _MACHINE_ID.read_bytes().strip()
    # As a digest, because the id itself is not for others to see.
    machine = hashlib.sha256(b"backstay " + found).hexdigest()[:16] if found else UNKNOWN
    return Holder(machine, boot, namespaces, str(pid), stat[_STARTED], _host())


def short_name() -> str:
    """Return a name for people: host and process id."""
    return this_process().name


@functools.cache
def _host() -> str:
    import socket

    return socket.gethostname().replace(" ", "-") or UNKNOWN


def is_alive(other: Holder) -> bool | None:
    """Return whether a process is alive; None if it cannot be known from here."""
    here = this_process()
    if UNKNOWN in (other.boot, other.pid, here.boot):
        return None
    if other.boot != here.boot:  # the same machine was booted again, or it is another machine
        is_here = other.machine != UNKNOWN and (other.machine, other.host) == (here.machine, here.host)
        return False if is_here else None
    if (other.namespaces, other.host) != (here.namespaces, here.host):
        return None
    stat = _stat(int(other.pid))
    if stat is None:
        try:
            os.kill(int(other.pid), 0)  # it may be hidden from us; a signal that does nothing still finds it
        except ProcessLookupError:
            return False
        except OSError:  # it exists and belongs to another user
            return None
        return None
    return stat[_STARTED] == other.started and stat[_STATE] not in _DEAD


def _namespaces(pid: int) -> str | None:
    try:
        if os.readlink(_PROC / "self") != str(pid):
            return None  # this /proc belongs to namespaces other than this process's
        own = UNKNOWN
        with contextlib.suppress(FileNotFoundError):  # an older kernel, where all processes have the same one
            own = os.readlink(_PROC / "self/ns/time")
        return f"{os.readlink(_PROC / 'self/ns/pid')}+{own}"
    except OSError:
        return None


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may contain anything, even spaces and brackets
    return fields if len(fields) > _STARTED else None


FREE_US = 2_000_000
"""How long the lease lasts that is taken to end a dead process's, if this process is interrupted before its release."""


def free_dead(store: Backend, branch: BranchKey) -> None:
    """End the leases on a branch's thread whose holders are processes of this machine that have died."""
    for lease in store.leases(branch.namespace, branch.thread, False):
        if is_alive(Holder.parse(lease.owner)) is False:
            request = LeaseRequest(str(this_process()), uuid.uuid4().hex, FREE_US, over=lease.epoch)
            with contextlib.suppress(Fenced):  # another process was faster
                store.release(lease.branch, store.acquire(lease.branch, request).epoch, request.token)


def dead_tokens(store: Backend, namespace: str) -> frozenset[str]:
    """Return the tokens of leases whose holder is a process of this machine that has died."""
    known: dict[str, bool] = {}
    found = set()
    for lease in store.leases(namespace, None, False):
        if lease.owner not in known:
            known[lease.owner] = is_alive(Holder.parse(lease.owner)) is False
        if known[lease.owner]:
            found.add(lease.token)
    return frozenset(found)


RENEWALS_PER_TTL = 3
TRIES_PER_TTL = 10
CLOSE_S_MAX = 5.0
"""How long ``close`` waits for a renewal that is under way."""


class Renewal:
    """A lease that the heartbeat renews when a third of its ttl has passed.

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
        """Renew this lease from now on."""
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
        """Stop renewing this lease."""
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
