"""Recovery: dealing with what fails, instead of hiding it.

category, status, rules   what kind of trouble an error is
policy                    when it is tried again; also that of a graph's nodes
fallback, cache           what is done instead
action, incident          what a person is asked, and what they can choose
course, recovery          the three layers in their order; ``ErrorRecovery`` and its asynchronous twin
result, statistics        what came of it
"""

from holdfast.recovery.action import ActionKind, RecoveryAction
from holdfast.recovery.cache import Cache, Cached, MemoryCache, ThreadCache
from holdfast.recovery.category import ErrorCategory
from holdfast.recovery.course import Attempt
from holdfast.recovery.failure import Failure
from holdfast.recovery.fallback import FallbackKind, FallbackStrategy
from holdfast.recovery.incident import Incident
from holdfast.recovery.policy import RetryPolicy
from holdfast.recovery.recovery import AsyncErrorRecovery, ErrorRecovery
from holdfast.recovery.result import RecoveryLayer, RecoveryResult
from holdfast.recovery.rules import Rules, classify
from holdfast.recovery.statistics import RecoveryStatistics

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
