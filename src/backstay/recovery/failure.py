"""What may be told of an error to anybody: its kind, its type, and words that cannot hold a secret.

The text of an error that somebody else raised may quote what it choked on. It stays with the error itself, in memory,
and is never stored.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from backstay.errors import BackstayError
from backstay.recovery.category import ErrorCategory
from backstay.recovery.rules import Rules, category_of_name
from backstay.recovery.status import status_of


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, as it may be shown and stored."""

    category: ErrorCategory
    type: str  # the name of its class
    message: str = ""  # never values: a status, a system error's words, or the text of one of our own errors
    hint: str = ""  # what can be done about it

    @classmethod
    def of(cls, error: Exception, rules: Rules) -> Failure:
        """Describe an error."""
        category = rules.classify(error)
        hint = error.hint if isinstance(error, BackstayError) and error.hint else category.hint
        return cls(category, type(error).__name__, _message(error), hint)

    @classmethod
    def of_name(cls, name: str) -> Failure:
        """Describe an error of an earlier process, of which the ledger has only the name."""
        category = category_of_name(name)
        return cls(category, name, hint=category.hint)

    def __str__(self) -> str:
        said = f": {self.message}" if self.message else ""
        return f"{self.type}{said} ({self.category.value})"


def _message(error: Exception) -> str:
    if isinstance(error, BackstayError):
        return error.what
    if (status := status_of(error)) is not None:
        return f"HTTP status {status}"
    if isinstance(error, OSError) and isinstance(error.errno, int) and error.strerror == os.strerror(error.errno):
        return error.strerror  # without the path
    return ""
