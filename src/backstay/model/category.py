"""Error categories: who can fix an error, and whether a retry may help.

``classify`` looks, in this order, at the program's own rules, the HTTP status, the error's type and its cause
(``raise ... from``). Only if none of these decides does it look at the words of the message. A word counts only as a
whole word and outside paths and quotes: "author" is not "auth", and "/mnt/disk/a.txt" says nothing about disks.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from backstay.errors import BackstayError, InvalidInput


class ErrorCategory(StrEnum):
    """The kind of an error."""

    TRANSIENT = "transient"  # a timeout, a lost connection, too many requests: it may pass in a moment
    RESOURCE = "resource"  # memory, disk, open files: some may become free in a moment
    CONFIGURATION = "configuration"  # a missing key, permission or file
    LOGIC = "logic"  # the call itself is wrong
    SYSTEM = "system"  # everything else: whether a retry would help is unknown
    USER_INTERRUPT = "user_interrupt"  # a person stopped it

    @property
    def is_retryable(self) -> bool:
        """Return whether a retry may help."""
        return self in RETRYABLE

    @property
    def hint(self) -> str:
        """Return what a person can do about an error of this category."""
        return _HINTS[self]


RETRYABLE = (ErrorCategory.TRANSIENT, ErrorCategory.RESOURCE)
"""The categories in which a retry may help."""

_HINTS = {
    ErrorCategory.TRANSIENT: "Wait a while, check that the service and the network are up, then retry",
    ErrorCategory.RESOURCE: "Free some memory, disk space, open files or quota, then retry",
    ErrorCategory.CONFIGURATION: "Correct the settings (keys, permissions, paths), then retry",
    ErrorCategory.LOGIC: "Correct the call or the program: the same call would fail again",
    ErrorCategory.SYSTEM: "Look at the error and the log before you retry",
    ErrorCategory.USER_INTERRUPT: "It was stopped on purpose: start it again when you want it",
}

_TYPES = {
    ErrorCategory.TRANSIENT: """
        builtins.TimeoutError builtins.ConnectionError builtins.InterruptedError builtins.BlockingIOError
        backstay.StoreBusy ssl.SSLError socket.gaierror httpx.TransportError httpcore.NetworkError
        httpcore.TimeoutException requests.ConnectionError requests.Timeout aiohttp.ClientConnectionError
        openai.APIConnectionError anthropic.APIConnectionError""",
    ErrorCategory.RESOURCE: "builtins.MemoryError backstay.StoreFull",
    ErrorCategory.CONFIGURATION: """
        builtins.ImportError backstay.GraphMismatch backstay.StoreRefused ssl.SSLCertVerificationError""",
    ErrorCategory.LOGIC: """
        builtins.ValueError builtins.TypeError builtins.LookupError builtins.AttributeError builtins.NameError
        builtins.ArithmeticError builtins.AssertionError builtins.NotImplementedError builtins.RecursionError
        builtins.SyntaxError builtins.StopIteration builtins.StopAsyncIteration backstay.InvalidInput backstay.NotFound
        backstay.StepsExceeded backstay.BadUpdate backstay.MergeConflict backstay.Conflict""",
    ErrorCategory.SYSTEM: """
        backstay.Fenced backstay.OutcomeUnknown backstay.EffectUnknown backstay.StoreError backstay.Corrupted
        backstay.DecodeError""",
    ErrorCategory.USER_INTERRUPT: "backstay.Rejected concurrent.CancelledError",
}
"""Error types by package and name, so that no library has to be imported for this."""

_BY_TYPE = {name: category for category, names in _TYPES.items() for name in names.split()}

_ERRNOS = {
    ErrorCategory.TRANSIENT: (
        "EAGAIN EINTR EBUSY ETIMEDOUT ECONNREFUSED ECONNRESET ECONNABORTED EPIPE "
        "EHOSTUNREACH EHOSTDOWN ENETUNREACH ENETDOWN ENETRESET ETXTBSY"
    ),
    ErrorCategory.RESOURCE: "ENOSPC EDQUOT EMFILE ENFILE ENOMEM ENOBUFS",
    ErrorCategory.CONFIGURATION: "EACCES EPERM EROFS ENOENT ENOTDIR EISDIR EADDRINUSE EADDRNOTAVAIL",
}
_BY_ERRNO = {
    getattr(errno, name): category
    for category, names in _ERRNOS.items()
    for name in names.split()
    if hasattr(errno, name)  # some systems do not have all of them
}

_STATUSES = {
    ErrorCategory.CONFIGURATION: (401, 402, 403, 407, 511),
    ErrorCategory.TRANSIENT: (408, 425, 429),
    ErrorCategory.LOGIC: (501, 505),
    ErrorCategory.RESOURCE: (507,),
}
"""HTTP statuses that are exceptions to the rule: 4xx is a wrong call, 5xx is trouble in the server."""

_BY_STATUS = {status: category for category, statuses in _STATUSES.items() for status in statuses}

_QUOTES_AND_PATHS = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|\S*[/\\]\S*""")
_WORDS = {
    ErrorCategory.CONFIGURATION: (
        r"api[ _-]?keys?|config|configuration|misconfigured|auth|authentication|authorization|unauthorized"
    ),
    ErrorCategory.LOGIC: r"invalid|parameters?|arguments?",
    ErrorCategory.TRANSIENT: r"time[ -]?outs?|timed[ -]out|networks?|rate[ _-]?limit(?:s|ed)?",
    ErrorCategory.RESOURCE: r"memory|disks?|resources?",
    ErrorCategory.USER_INTERRUPT: r"interrupt(?:ed|s)?|cancel(?:led|ed)?|abort(?:ed)?",
}
"""The order matters: a message about an invalid timeout parameter is about the parameter."""

_PATTERNS = {
    category: re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE | re.ASCII)
    for category, words in _WORDS.items()
}

CAUSES_MAX = 20
"""How many causes are followed, because a chain of causes may be a circle."""

Matcher = type[BaseException] | Callable[[BaseException], bool]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that put errors into categories. ``add`` returns rules with one more; the first rule that matches wins."""

    own: tuple[tuple[Matcher, ErrorCategory], ...] = ()

    def add(self, matcher: Matcher, category: ErrorCategory | str) -> Rules:
        """Return rules that also put an exception class, or the errors a function accepts, into a category."""
        if not callable(matcher) or (isinstance(matcher, type) and not issubclass(matcher, BaseException)):
            raise InvalidInput(
                f"a rule needs an exception class or a function that takes an exception, not {matcher!r:.60}",
                hint='For example Rules().add(ProviderError, "transient")',
            )
        if category not in tuple(ErrorCategory):
            raise InvalidInput(
                f"there is no error category {category!r:.40}", hint=f"Use one of {', '.join(ErrorCategory)}"
            )
        return Rules((*self.own, (matcher, ErrorCategory(category))))

    def classify(self, error: BaseException) -> ErrorCategory:
        """Return the category of an error."""
        if isinstance(error, BaseExceptionGroup):
            # A retry helps a group only if it helps every error in it.
            found = [self.classify(each) for each in error.exceptions]
            return next((category for category in found if not category.is_retryable), found[0])
        cause: BaseException | None = error
        for _ in range(CAUSES_MAX):
            if cause is None:
                break
            known = self._classify_one(cause)
            if known is not None:
                return known
            if cause.__cause__ is not None:
                cause = cause.__cause__
            else:
                reason = getattr(cause, "reason", None)  # urllib keeps the cause here
                cause = reason if isinstance(reason, BaseException) else None
        words = _QUOTES_AND_PATHS.sub(" ", str(error))
        return next((each for each, pattern in _PATTERNS.items() if pattern.search(words)), ErrorCategory.SYSTEM)

    def _classify_one(self, error: BaseException) -> ErrorCategory | None:
        """Return the category of an error, ignoring its causes and its message; None if nothing else decides."""
        for matcher, category in self.own:
            if isinstance(error, matcher) if isinstance(matcher, type) else matcher(error):
                return category
        if not isinstance(error, Exception):
            return ErrorCategory.USER_INTERRUPT  # KeyboardInterrupt, SystemExit, a cancelled task
        status = status_of(error)
        if status is not None:
            return _BY_STATUS.get(status, ErrorCategory.LOGIC if status < 500 else ErrorCategory.TRANSIENT)
        for kind in type(error).__mro__:
            found = _BY_TYPE.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
            if found is not None:
                return found
            # Subclasses whose errno is not the system's, such as SSLError, are in the table and were found before
            # OSError.
            if isinstance(error, OSError) and kind is OSError:
                return _BY_ERRNO.get(error.errno or 0)
        return None


DEFAULT = Rules()


def classify(error: BaseException) -> ErrorCategory:
    """Return the category of an error by the built-in rules."""
    return DEFAULT.classify(error)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status (400 to 599) of an error or its response, from any library; None if there is none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
                return int(value)
    return None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a form that is safe to show and to store.

    The message of a foreign error may quote a secret. It stays with the error itself, in memory, and is never stored.
    """

    category: ErrorCategory
    type: str  # the name of its class
    message: str = ""  # never values: an HTTP status, the system's text, or the text of an error of this package
    hint: str = ""  # what a person can do about it

    @classmethod
    def of(cls, error: Exception, rules: Rules) -> Failure:
        """Describe an error."""
        category, message, hint = rules.classify(error), "", None
        if isinstance(error, BackstayError):
            message, hint = error.what, error.hint
        elif (status := status_of(error)) is not None:
            message = f"HTTP status {status}"
        elif isinstance(error, OSError) and isinstance(error.errno, int) and error.strerror == os.strerror(error.errno):
            message = error.strerror  # without the path
        return cls(category, type(error).__name__, message, hint or category.hint)

    @classmethod
    def of_name(cls, name: str) -> Failure:
        """Describe an error of an earlier process: the ledger keeps only the name of its type."""
        kind = getattr(builtins, name, None)
        names = [each.__name__ for each in kind.__mro__] if isinstance(kind, type) else [name]
        known = {name.partition(".")[2]: category for name, category in _BY_TYPE.items()}
        category = next((known[each] for each in names if each in known), ErrorCategory.SYSTEM)
        return cls(category, name, hint=category.hint)

    def __str__(self) -> str:
        said = f": {self.message}" if self.message else ""
        return f"{self.type}{said} ({self.category.value})"
