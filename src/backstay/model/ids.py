"""Ids, the names of threads, checkpoints, nodes and graphs: how they are checked and made.

Every id, text and count from outside passes a check here. An id never becomes a path, a pattern or SQL text, so
``../x``, quotes and ``*`` are fine; only texts that some store could not return exactly (NUL, lone surrogates) or that
are too long are refused. The maker of new ids gets its clock and its random source from the caller.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from backstay.errors import InvalidInput

ID_LENGTH_MAX = 255  # characters
LABEL_LENGTH_MAX = 1024  # characters
COUNT_MAX = 2**63 - 1  # the largest integer that a column of every store holds

_TIME_MS_MAX = 2**48 - 1  # UUIDv7 has 48 bits for milliseconds since 1970: until the year 10889
_COUNTER_BITS = 12
_TICK_MAX = 2**60 - 1  # the last counter value of the last millisecond
_ENTROPY_BYTES = 8  # 64 bits; an id keeps 62 of them
_VARIANT_DIGITS = "89ab"  # binary 10xx, the variant of RFC 9562


def check_id(value: object, what: str) -> str:
    """Return ``value`` if it is a valid id; ``what`` names it in the error, for example ``thread_id``."""
    if type(value) is str and 0 < len(value) <= ID_LENGTH_MAX and value.isascii() and "\0" not in value:
        return value
    text = _check_text(value, what, ID_LENGTH_MAX)
    if not text:
        raise InvalidInput(f"{what} is empty", hint=f"Pass text of 1 to {ID_LENGTH_MAX} characters")
    return text


def check_label(value: object, what: str, *, length_max: int = LABEL_LENGTH_MAX) -> str:
    """Return ``value`` if it is a valid text for people: like an id, but it may be empty and has its own limit."""
    return _check_text(value, what, length_max)


def _check_text(value: object, what: str, length_max: int) -> str:
    # A subclass of str (an Enum member, a library's own id type) would come back from a store as plain str.
    if type(value) is not str:
        raise InvalidInput(f"{what} is {type(value).__name__}, not text", hint=f"Pass a plain str as {what}")
    if len(value) > length_max:
        raise InvalidInput(
            f"{what} has {len(value)} characters; at most {length_max} are allowed",
            hint="Pass a shorter text, or a digest of the long one",
        )
    if "\0" in value:
        raise InvalidInput(f"{what} contains a NUL character", hint="Remove it: not every store can store it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{what} contains a lone surrogate at character {error.start}",
            hint="Decode the text it came from correctly: it has no UTF-8 form",
        ) from None
    return value


def check_count(value: object, what: str, *, least: int = 0) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``COUNT_MAX``; True is not a number."""
    if type(value) is not int:
        raise InvalidInput(f"{what} is {type(value).__name__}, not int", hint=f"Pass a plain int as {what}")
    if not least <= value <= COUNT_MAX:
        side = f"less than {least}" if value < least else "2**63 or more"
        raise InvalidInput(f"{what} is {side}", hint=f"Pass {least} to 2**63 - 1")
    return value


# One lock for all makers, so that one hook can replace it after a fork. It is re-entrant because a signal handler that
# saves may interrupt a thread that is making an id.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if sys.platform != "win32":  # which has no fork
    # Another thread may hold the lock at the moment of a fork; in the child no thread would ever release it.
    os.register_at_fork(after_in_child=_renew_lock)


class IdMaker:
    """Makes UUIDv7 texts, each greater than the one before, even if the clock steps back.

    ``clock_ms`` gives milliseconds since 1970, ``entropy(n)`` gives n random bytes. Time and a 12-bit counter form one
    60-bit tick that only ever grows: if the clock stops or steps back the tick keeps counting, borrowing
    milliseconds from the future. Order therefore never depends on the 62 random bits, which are fresh in every id and
    distinguish the ids that two processes, or parent and child after a fork, make in the same tick.
    """

    __slots__ = ("_clock_ms", "_entropy", "_last")

    def __init__(self, clock_ms: Callable[[], int], entropy: Callable[[int], bytes]) -> None:
        self._clock_ms = clock_ms
        self._entropy = entropy
        self._last = -1

    def make(self) -> str:
        """Return a new id; safe from any thread, from a signal handler and after a fork."""
        now_ms = self._clock_ms()
        if type(now_ms) is not int or not 0 <= now_ms <= _TIME_MS_MAX:
            raise InvalidInput(
                f"clock_ms returned {now_ms!r}", hint=f"Return whole milliseconds since 1970, 0 to {_TIME_MS_MAX}"
            )
        noise = self._entropy(_ENTROPY_BYTES)
        if len(noise) != _ENTROPY_BYTES:
            raise InvalidInput(
                f"entropy returned {len(noise)} bytes instead of {_ENTROPY_BYTES}", hint="Pass os.urandom or similar"
            )
        now = now_ms << _COUNTER_BITS
        with _lock:
            # No call between reading and writing _last: a signal handler can only run where a call is made.
            last = self._last
            tick = now if now > last else last + 1
            if tick > _TICK_MAX:
                raise InvalidInput("clock_ms has reached the last possible id", hint="Set the clock to the right time")
            self._last = tick
        # In hex the tick is 12 digits of time and 3 of the counter, with the version between them. The two bits next
        # to the variant are random too, which makes 62.
        front, back = f"{tick:015x}", noise.hex()
        return f"{front[:8]}-{front[8:12]}-7{front[12:]}-{_VARIANT_DIGITS[noise[0] >> 6]}{back[1:4]}-{back[4:]}"
