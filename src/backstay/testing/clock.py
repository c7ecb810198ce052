"""A clock that stops until a test moves it, so that a test of a timeout does not wait for one."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

from backstay.errors import InvalidInput
from backstay.model.fields import check_moment


class Clock:
    """A clock for ``backstay.open(url, clock=clock)``. It moves only when a test moves it.

    Everything that is stored with a time, and everything that compares with one, uses the store's clock: the timeouts
    of questions, the age of a cached result, retention by age. Leases do not: they are about processes that died, and
    use the clock of the store itself. Several stores, threads and event loops may share one clock.
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._lock = threading.Lock()
        self._now = datetime.now(UTC) if start is None else check_moment(start, "the time of a clock")

    def __call__(self) -> datetime:
        """Return the time of this clock, in UTC."""
        with self._lock:
            return self._now

    def advance(self, by: float | timedelta) -> datetime:
        """Move the clock forward by seconds, or by a ``timedelta``, and return its new time."""
        if not isinstance(by, timedelta):
            if isinstance(by, bool) or not isinstance(by, int | float):
                raise InvalidInput(f"a clock advances by seconds or by a timedelta, not by {type(by).__name__}")
            try:
                by = timedelta(seconds=by)
            except (OverflowError, ValueError):
                raise InvalidInput(f"a clock cannot advance by {by!r} seconds") from None
        if by < timedelta(0):
            raise InvalidInput("a clock advances forward only", hint="clock.set(moment) sets it to any time")
        try:
            with self._lock:
                self._now += by
                return self._now
        except OverflowError:
            raise InvalidInput("a clock cannot advance beyond the year 9999") from None

    def set(self, moment: datetime) -> None:
        """Set the clock to any time, also to an earlier one, as a wall clock may be set."""
        moment = check_moment(moment, "the time of a clock")
        with self._lock:
            self._now = moment

    def __repr__(self) -> str:
        return f"<Clock {self().isoformat()}>"
