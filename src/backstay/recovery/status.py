"""The HTTP status that an error carries, whichever library raised it.

Nothing is imported for that: libraries agree well enough on where they put it.
"""

from __future__ import annotations

from backstay.recovery.category import ErrorCategory

_NAMES = ("status_code", "status", "code")

_CATEGORIES = {
    401: ErrorCategory.CONFIGURATION,
    402: ErrorCategory.CONFIGURATION,
    403: ErrorCategory.CONFIGURATION,
    407: ErrorCategory.CONFIGURATION,
    408: ErrorCategory.TRANSIENT,
    425: ErrorCategory.TRANSIENT,
    429: ErrorCategory.TRANSIENT,
    501: ErrorCategory.LOGIC,
    505: ErrorCategory.LOGIC,
    507: ErrorCategory.RESOURCE,
    511: ErrorCategory.CONFIGURATION,
}
"""Statuses that are not what their class (4xx: the call is wrong, 5xx: the server is in trouble) says."""


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None; only those that stand for a failure count."""
    for holder in (error, getattr(error, "response", None)):
        for name in _NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
                return int(value)
    return None


def category_of(status: int) -> ErrorCategory:
    """Return what kind of trouble a status stands for."""
    return _CATEGORIES.get(status, ErrorCategory.LOGIC if status < 500 else ErrorCategory.TRANSIENT)
