"""Telling errors apart: what kind of trouble an error is.

Asked in this order: the program's own rules, the HTTP status, the error's type, what caused it (``raise … from``), and
only if all of them say nothing, the words of its text. Words count as whole words, and neither in paths nor in quotes:
"author" is not "auth", and "/mnt/disk/a.txt" says nothing about disks.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import errno
import re
from collections.abc import Callable
from dataclasses import dataclass

from backstay.errors import (
    BadUpdate,
    Conflict,
    Corrupted,
    DecodeError,
    EffectUnknown,
    Fenced,
    GraphMismatch,
    InvalidInput,
    MergeConflict,
    NotFound,
    OutcomeUnknown,
    Rejected,
    StepsExceeded,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreRefused,
)
from backstay.recovery.category import ErrorCategory
from backstay.recovery.status import category_of, status_of

CAUSES_MAX = 20
"""How far back causes are looked at; they may go in circles."""

Matcher = type[BaseException] | Callable[[BaseException], bool]

_TRANSIENT, _RESOURCE, _CONFIGURATION = ErrorCategory.TRANSIENT, ErrorCategory.RESOURCE, ErrorCategory.CONFIGURATION
_LOGIC, _SYSTEM, _USER_INTERRUPT = ErrorCategory.LOGIC, ErrorCategory.SYSTEM, ErrorCategory.USER_INTERRUPT

_TYPES: dict[type[BaseException], ErrorCategory] = {
    TimeoutError: _TRANSIENT,
    ConnectionError: _TRANSIENT,
    InterruptedError: _TRANSIENT,
    BlockingIOError: _TRANSIENT,
    StoreBusy: _TRANSIENT,
    MemoryError: _RESOURCE,
    StoreFull: _RESOURCE,
    ImportError: _CONFIGURATION,
    GraphMismatch: _CONFIGURATION,
    StoreRefused: _CONFIGURATION,
    ValueError: _LOGIC,
    TypeError: _LOGIC,
    LookupError: _LOGIC,
    AttributeError: _LOGIC,
    NameError: _LOGIC,
    ArithmeticError: _LOGIC,
    AssertionError: _LOGIC,
    NotImplementedError: _LOGIC,
    RecursionError: _LOGIC,
    SyntaxError: _LOGIC,
    StopIteration: _LOGIC,
    StopAsyncIteration: _LOGIC,
    InvalidInput: _LOGIC,
    NotFound: _LOGIC,
    StepsExceeded: _LOGIC,
    BadUpdate: _LOGIC,
    MergeConflict: _LOGIC,
    Conflict: _LOGIC,  # whoever comes second must look at what is there first
    Fenced: _SYSTEM,
    OutcomeUnknown: _SYSTEM,  # the same save may be repeated, under the same id: but not whatever was around it
    EffectUnknown: _SYSTEM,
    StoreError: _SYSTEM,
    Corrupted: _SYSTEM,
    DecodeError: _SYSTEM,
    Rejected: _USER_INTERRUPT,
    concurrent.futures.CancelledError: _USER_INTERRUPT,
}

_FOREIGN = {
    "ssl.SSLCertVerificationError": _CONFIGURATION,
    "ssl.SSLError": _TRANSIENT,  # its errno is not the system's
    "socket.gaierror": _TRANSIENT,  # nor is this one's
    "httpx.TransportError": _TRANSIENT,
    "httpcore.NetworkError": _TRANSIENT,
    "httpcore.TimeoutException": _TRANSIENT,
    "requests.ConnectionError": _TRANSIENT,
    "requests.Timeout": _TRANSIENT,
    "aiohttp.ClientConnectionError": _TRANSIENT,
    "openai.APIConnectionError": _TRANSIENT,
    "anthropic.APIConnectionError": _TRANSIENT,
}
"""Types of others, by package and name: none of them is imported for this."""

_ERRNOS = {
    _TRANSIENT: (
        "EAGAIN EINTR EBUSY ETIMEDOUT ECONNREFUSED ECONNRESET ECONNABORTED EPIPE "
        "EHOSTUNREACH EHOSTDOWN ENETUNREACH ENETDOWN ENETRESET ETXTBSY"
    ),
    _RESOURCE: "ENOSPC EDQUOT EMFILE ENFILE ENOMEM ENOBUFS",
    _CONFIGURATION: "EACCES EPERM EROFS ENOENT ENOTDIR EISDIR EADDRINUSE EADDRNOTAVAIL",
}
_BY_ERRNO = {
    getattr(errno, name): category
    for category, names in _ERRNOS.items()
    for name in names.split()
    if hasattr(errno, name)  # not every system has all of them
}

_NOT_WORDS = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|\S*[/\\]\S*""")
_WORDS = (
    (
        _CONFIGURATION,
        r"api[ _-]?keys?|config|configuration|misconfigured|auth|authentication|authorization|unauthorized",
    ),
    (_LOGIC, r"invalid|parameters?|arguments?"),
    (_TRANSIENT, r"time[ -]?outs?|timed[ -]out|networks?|rate[ _-]?limit(?:s|ed)?"),
    (_RESOURCE, r"memory|disks?|resources?"),
    (_USER_INTERRUPT, r"interrupt(?:ed|s)?|cancel(?:led|ed)?|abort(?:ed)?"),
)
"""In this order: a text that speaks of an invalid timeout parameter is about the parameter."""

_PATTERNS = [
    (category, re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE | re.ASCII)) for category, words in _WORDS
]


@dataclass(frozen=True, slots=True)
class Rules:
    """How errors are told apart; ``add`` gives rules that know more. What was added first is asked first."""

    own: tuple[tuple[Matcher, ErrorCategory], ...] = ()

    def add(self, matcher: Matcher, category: ErrorCategory | str) -> Rules:
        """Return rules by which a class of errors, or those for which a function says True, are of a category."""
        if not callable(matcher) or (isinstance(matcher, type) and not issubclass(matcher, BaseException)):
            raise InvalidInput(
                f"a rule takes a class of exceptions or a function of an exception, not {matcher!r:.60}",
                hint='For example Rules().add(ProviderError, "transient")',
            )
        if category not in tuple(ErrorCategory):
            raise InvalidInput(
                f"error category {category!r:.40} is not known", hint=f"Use one of {', '.join(ErrorCategory)}"
            )
        return Rules((*self.own, (matcher, ErrorCategory(category))))

    def classify(self, error: BaseException) -> ErrorCategory:
        """Return what kind of trouble an error is."""
        if isinstance(error, BaseExceptionGroup):
            return self._of_several(error)
        cause: BaseException | None = error
        for _ in range(CAUSES_MAX):
            if cause is None:
                break
            if (found := self._of_one(cause)) is not None:
                return found
            cause = _cause_of(cause)
        return _by_words(str(error)) or _SYSTEM

    def _of_several(self, group: BaseExceptionGroup[BaseException]) -> ErrorCategory:
        """Return the category of a group: trying again can only help if it can help against each of them."""
        found = [self.classify(error) for error in group.exceptions]
        return next((category for category in found if not category.is_retryable), found[0])

    def _of_one(self, error: BaseException) -> ErrorCategory | None:
        """Return the category of an error without its causes and its text; None if that says nothing."""
        for matcher, category in self.own:
            if isinstance(error, matcher) if isinstance(matcher, type) else matcher(error):
                return category
        if not isinstance(error, Exception):
            return _USER_INTERRUPT  # KeyboardInterrupt, SystemExit, a cancelled task
        if (status := status_of(error)) is not None:
            return category_of(status)
        return _by_type(error)


def _by_type(error: Exception) -> ErrorCategory | None:
    for kind in type(error).__mro__:
        found = _TYPES.get(kind) or _FOREIGN.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
        if found is not None:
            return found
        if isinstance(error, OSError) and kind is OSError:
            return _BY_ERRNO.get(error.errno or 0)
    return None


def _cause_of(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    reason = getattr(error, "reason", None)  # where urllib keeps it
    return reason if isinstance(reason, BaseException) else None


def _by_words(text: str) -> ErrorCategory | None:
    words = _NOT_WORDS.sub(" ", text)
    return next((category for category, pattern in _PATTERNS if pattern.search(words)), None)


def category_of_name(name: str) -> ErrorCategory:
    """Return the category of an error of which only the name of its type is left."""
    kind = getattr(builtins, name, None)
    ancestors = kind.__mro__ if isinstance(kind, type) else ()
    named = {known.__name__: category for known, category in _TYPES.items()}
    return next((_TYPES[each] for each in ancestors if each in _TYPES), named.get(name, _SYSTEM))


DEFAULT = Rules()


def classify(error: BaseException) -> ErrorCategory:
    """Return what kind of trouble an error is, by the rules that hold unless others are given."""
    return DEFAULT.classify(error)
