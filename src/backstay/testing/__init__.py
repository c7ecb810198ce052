"""For tests: a clock that you can move, kills at every kind of moment, and, for authors of a store, its contract.

``backstay.testing.contract`` is the contract of a store as tests for pytest; it is not loaded from here.
"""

from backstay.testing.clock import Clock
from backstay.testing.judge import CrashFinding, CrashReport
from backstay.testing.kills import crash

__all__ = ["Clock", "CrashFinding", "CrashReport", "crash"]
