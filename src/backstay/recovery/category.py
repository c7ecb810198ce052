"""What kind of trouble an error is: who can do something about it, and whether trying again can help."""

from __future__ import annotations

from enum import StrEnum


class ErrorCategory(StrEnum):
    """What kind of trouble an error is."""

    TRANSIENT = "transient"  # a timeout, a lost connection, too many requests: it may be gone in a moment
    RESOURCE = "resource"  # memory, disk, open files: there may be some again in a moment
    CONFIGURATION = "configuration"  # a key, a right, a file that must be there
    LOGIC = "logic"  # the call itself is wrong
    SYSTEM = "system"  # everything else: nobody can tell whether it would help to try again
    USER_INTERRUPT = "user_interrupt"  # somebody wanted it to stop

    @property
    def is_retryable(self) -> bool:
        """Tell whether trying the same again may help."""
        return self in RETRYABLE

    @property
    def hint(self) -> str:
        """Return what a person can do about it."""
        return _HINTS[self]


RETRYABLE = (ErrorCategory.TRANSIENT, ErrorCategory.RESOURCE)
"""The categories in which trying the same again may help."""

_HINTS = {
    ErrorCategory.TRANSIENT: "Wait a while, look whether the service and the network are up, then try again",
    ErrorCategory.RESOURCE: "Make room (memory, disk, open files, quota), then try again",
    ErrorCategory.CONFIGURATION: "Correct the settings (keys, rights, paths), then try again",
    ErrorCategory.LOGIC: "Correct the call or the program: the same call would fail again",
    ErrorCategory.SYSTEM: "Look at the error and its log before anything is tried again",
    ErrorCategory.USER_INTERRUPT: "It was stopped on purpose: begin it again when it is wanted",
}
