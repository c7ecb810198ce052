"""Recovery: dealing with what fails, instead of hiding it.

category, status, rules   what kind of trouble an error is
policy                    when it is tried again; also that of a graph's nodes
fallback, cache           what is done instead
action, incident          what a person is asked, and what they can choose
course, recovery          the three layers in their order; ``ErrorRecovery`` and its asynchronous twin
result, statistics        what came of it
"""

from backstay.recovery.action import ActionKind, RecoveryAction
from backstay.recovery.cache import Cache, Cached, MemoryCache, ThreadCache
from backstay.recovery.category import ErrorCategory
from backstay.recovery.course import Attempt
from backstay.recovery.failure import Failure
from backstay.recovery.fallback import FallbackKind, FallbackStrategy
from backstay.recovery.incident import Incident
from backstay.recovery.policy import RetryPolicy
from backstay.recovery.recovery import AsyncErrorRecovery, ErrorRecovery
from backstay.recovery.result import RecoveryLayer, RecoveryResult
from backstay.recovery.rules import Rules, classify
from backstay.recovery.statistics import RecoveryStatistics

__all__ = [
    "ActionKind",
    "AsyncErrorRecovery",
    "Attempt",
    "Cache",
    "Cached",
    "ErrorCategory",
    "ErrorRecovery",
    "Failure",
    "FallbackKind",
    "FallbackStrategy",
    "Incident",
    "MemoryCache",
    "RecoveryAction",
    "RecoveryLayer",
    "RecoveryResult",
    "RecoveryStatistics",
    "RetryPolicy",
    "Rules",
    "ThreadCache",
    "classify",
]
