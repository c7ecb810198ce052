"""What the processes of ``test_leases`` and ``test_clocks`` do: hold leases, save under them, claim those of others.

All saves and leases are recorded, with their epochs. A worker can be told to stop itself (SIGSTOP) in the middle of a
save: when everything is prepared, right before the store is asked to commit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backstay.errors import BackstayError
from backstay.model.runs import RunStatus
from backstay.operations.run_keeper import RunKeeper
from backstay.operations.run_records import GRAPH, RunOutcome, RunRow, new_row
from backstay.store import leases as boot
from backstay.store.base import Backend, Commit, Committed
from backstay.store.leases import LeaseRow
from backstay.store.open import open_backend
from backstay.thread.access import access_of
from backstay.thread.lease import Lease, check_lease_options
from backstay.thread.store import Store, make_services
from support.crew import describe, outcome
from support.simulation.history import BranchName, CallRecorder, RecordedThread


class Work:
    """What the workers execute, as claims see it: a graph."""

    name, fingerprint = "work", "1"

    @classmethod
    def claims(cls) -> list[tuple[str, str]]:
        return [(cls.name, cls.fingerprint)]


class Drowsy:
    """A store whose next commit is preceded by a stop of this very process."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.falls_asleep = False

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._backend, verb)

    def commit(self, commit: Commit) -> Committed:
        if self.falls_asleep:
            self.falls_asleep = False
            os.kill(os.getpid(), signal.SIGSTOP)
        committed: Committed = self._backend.commit(commit)
        return committed


class Holder:
    """A worker that runs threads under leases."""

    def __init__(self, url: str, history: str, name: str, mutation: str = "") -> None:
        MUTATIONS[mutation]()
        self.drowsy = Drowsy(open_backend(url))
        self.store = Store(self.drowsy, make_services("", None))
        self.recorder = CallRecorder(history)
        self.name = name
        self.leases: dict[str, Lease] = {}
        self.recorded: dict[str, RecordedThread] = {}
        self.told: list[str] = []  # what on_lost was called with

    # Taking -------------------------------------------------------------------------------------------------------

    def take(self, thread: str, ttl: float, heartbeat: bool = False) -> int:
        """Take the lease of a thread for a run, so that others find it if this one dies; return its epoch."""
        handle, options = self.store.thread(thread), check_lease_options(self.name, ttl, heartbeat, self.tell_lost)
        branch, now_us = handle._handle.cursor.branch, time.time_ns() // 1000

        def plan(store: Backend, newest: RunRow | None, waited_for: RunRow | None) -> RunRow:
            if newest is not None and not newest.is_over:
                return newest
            run = new_row(branch, os.urandom(8).hex(), GRAPH, Work.name, now_us, Work.fingerprint)
            return replace(run, input=b"given")

        with self.recorder.acquire(BranchName(thread)) as call:
            keeper = RunKeeper(branch, lambda: now_us, plan)
            lease = Lease(handle, options, keeper).__enter__()
            keeper.outcome = RunOutcome(RunStatus.ABANDONED)
            call.ok(epoch=lease.epoch)
        return self._hold(lease)

    def claim(self, count: int, ttl: float = 30.0, heartbeat: bool = False) -> dict[str, int]:
        """Take over the runs of those who died or lost their lease; return their threads and epochs."""
        began = self.recorder.clock()
        taken = self.store.claim([Work], count, ttl=ttl, owner=self.name, heartbeat=heartbeat, on_lost=self.tell_lost)
        ended = self.recorder.clock()
        for lease in taken:  # which they are is known only now, so they are written down now
            call, place = os.urandom(8).hex(), [lease.thread.id, lease.thread.branch]
            self.recorder.write({"event": "invoke", "action": "acquire", "branch": place, "call": call, "at": began})
            self.recorder.write({"event": "ok", "call": call, "at": ended, "epoch": lease.epoch})
        return {lease.thread.id: self._hold(lease) for lease in taken}

    def handle(self, thread: str) -> None:
        """Use a thread without a lease, from its newest checkpoint on."""
        self.recorded[thread] = RecordedThread(self.store.thread(thread), self.recorder)
        self.recorded[thread].latest()

    # Working ------------------------------------------------------------------------------------------------------

    def look(self, thread: str) -> str | None:
        """Load the newest checkpoint of a thread that is held; return its id."""
        found = self.recorded[thread].latest()
        return None if found is None else found.id

    def save(self, thread: str, text: str) -> dict[str, Any]:
        """Save under the lease."""
        return describe(self.recorded[thread].save({"by": self.name, "text": text}))

    def save_asleep(self, thread: str, text: str) -> dict[str, Any]:
        """Save under the lease, but fall asleep in the middle."""
        self.drowsy.falls_asleep = True
        return self.save(thread, text)

    def finish(self, thread: str, text: str) -> dict[str, Any]:
        """Go on with a thread exactly where it is, end its run, and give it back; tell where that was."""
        found, saved, keeper = self.look(thread), self.save(thread, text), self.leases[thread]._keeper
        assert keeper is not None
        keeper.outcome = RunOutcome(RunStatus.COMPLETED)
        self.release(thread)
        return {"from": found, **saved}

    def finish_all(self, count: int, text: str) -> list[str]:
        """Claim so many at a time and finish them, until there is nothing left to claim; return what was finished."""
        done: list[str] = []
        while claimed := self.claim(count):
            for thread in claimed:
                self.finish(thread, text)
            done += claimed
        return done

    def renew(self, thread: str) -> str:
        self.leases[thread].renew()
        return "renewed"

    def release(self, thread: str) -> str:
        lease = self.leases.pop(thread)
        with self.recorder.release(BranchName(thread), lease.epoch) as call:
            lease.release()
            call.ok()
        return "released"

    def delete_newest(self, thread: str) -> int:
        """Delete the newest checkpoint through the handle that holds the lease."""
        handle = self.leases[thread].thread
        return handle.delete_checkpoint(next(iter(handle.history(limit=1))))

    def status(self, thread: str) -> dict[str, Any]:
        """Return what this worker knows of its lease."""
        return {"lost": self.leases[thread].lost, "told": self.told.count(thread)}

    def clocks(self) -> dict[str, float]:
        """Return what time it is here."""
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return {"wall": time.time(), "monotonic": time.monotonic(), "boot": boot}

    def expired(self) -> list[str]:
        """Return the threads whose lease has expired."""
        return expired(self.store)

    def refusals(self, thread: str) -> list[str]:
        """Try everything that a holder may do; return how each was refused."""
        tries: list[Callable[[], Any]] = [
            lambda: self.save(thread, "stale"),
            lambda: self.renew(thread),
            lambda: self.delete_newest(thread),
            lambda: self.release(thread),
        ]
        return [answer["error"] if isinstance(answer := outcome(each), dict) else str(answer) for each in tries]

    def tell_lost(self, lease: Lease) -> None:
        self.told.append(lease.thread.id)

    def close(self) -> None:
        for lease in self.leases.values():
            try:
                lease.release()
            except BackstayError:  # lost, as its test has seen
                continue
        self.store.close()
        self.recorder.close()

    def _hold(self, lease: Lease) -> int:
        name = lease.thread.id
        self.leases[name] = lease
        self.recorded[name] = RecordedThread(lease.thread, self.recorder, epoch=lease.epoch)
        return lease.epoch


def expired(store: Store) -> list[str]:
    """Return the threads whose lease has expired, by the store's own word."""
    return [lease.branch.thread for lease in access_of(store).store.leases("", None, True)]


# Deliberately broken stores ----------------------------------------------------------------------------------------


def intact() -> None:
    """Leave everything as it is."""


def without_fence() -> None:
    """Let SQLite take every commit, whoever holds the branch."""
    LeaseRow.check_writer = lambda *_: None  # type: ignore[method-assign]


def by_the_wall_clock() -> None:
    """Let leases on SQLite go by the wall clock, as they do where there is no boot clock."""
    boot.boot_id = lambda: boot.WALL_CLOCK  # type: ignore[assignment]


MUTATIONS: dict[str, Callable[[], None]] = {
    "": intact,
    "no fence": without_fence,
    "wall clock": by_the_wall_clock,
}

FENCE_WORDS = {
    "commit_checkpoint": {
        "IF epoch <> p_epoch OR (p_token": "IF (p_token",
        "OR (p_token IS NOT NULL AND p_token IS DISTINCT FROM v_token) THEN": "THEN",
    },
}
"""What makes up the fence in PostgreSQL's function, and what it is without it. A fenced plain save comes to it too."""
