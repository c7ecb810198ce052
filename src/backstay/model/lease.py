"""ExpiredLease: a run whose worker went silent, as lists show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredLease:
    """A lease that was neither renewed nor given back in time. Its branch may be taken over."""

    thread_id: str
    branch: str
    scope: str
    owner: str  # who held it
    epoch: int
    overdue: float  # seconds since it ended, by the store's clock
