"""Retries, fallbacks and questions to a person for operations that fail.

category    the kinds of errors, and the rules that distinguish them
policy      when to retry, and how long to wait; graph nodes use it too
fallback    what to do instead, and caches of earlier results
incident    what a person is asked, and the actions to choose from
execution   one execution through the three layers, and its result
recovery    ``ErrorRecovery`` and ``AsyncErrorRecovery``
"""

from backstay.model.category import ErrorCategory, Failure, Rules, classify
from backstay.model.retry import RetryPolicy
from backstay.retry.execution import Attempt, RecoveryLayer, RecoveryResult, RecoveryStatistics
from backstay.retry.fallback import Cache, Cached, FallbackKind, FallbackStrategy, MemoryCache, ThreadCache
from backstay.retry.incident import ActionKind, Incident, RecoveryAction
from backstay.retry.recovery import AsyncErrorRecovery, ErrorRecovery

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
