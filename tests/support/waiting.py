"""Waiting for something that another thread or process does, or for a lease to run out: polled, with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import backstay
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from backstay.thread.lease import Lease

T = TypeVar("T")


def eventually(condition: Callable[[], T]) -> T:
    """Return the condition's value as soon as it is true."""
    last: list[T] = []

    def holds() -> bool:
        last[:] = [condition()]
        return bool(last[0])

    wait_until(holds)
    return last[0]


def entered(thread: backstay.Thread, ttl: float = 60.0, owner: str = "new owner") -> Lease:
    """Take the lease of a branch as soon as it can be had."""

    def attempt() -> Lease | None:
        try:
            return thread.lease(ttl=ttl, owner=owner).__enter__()
        except backstay.Fenced:
            return None

    lease = eventually(attempt)
    assert lease is not None
    return lease


def expire(lease: Lease) -> None:
    """Let the time of a lease run out at once; its holder does not know."""
    hold = lease._taken()
    access_of(lease.thread).store.renew(hold.branch, hold.epoch, hold.request._replace(ttl_us=1))


@contextmanager
def taken_over(thread: backstay.Thread) -> Iterator[Lease]:
    """Hold the lease of a branch, as soon as it can be had, while the block runs."""
    lease = entered(thread)
    try:
        yield lease
    finally:
        lease.release()
