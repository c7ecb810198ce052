"""For tests: a clock that you can move, and, for authors of a store, its contract.

``backstay.testing.contract`` is the contract of a store as tests for pytest; it is not loaded from here.
"""

from backstay.testing.clock import Clock

__all__ = ["Clock"]
