"""Counts of what recovery did, so that each execution is counted where it ended, and an error is a call that failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from backstay.recovery.result import RecoveryLayer, RecoveryResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStatistics:
    """The counts at one moment. What had no error, or was done earlier, is in none of them but ``executions``."""

    executions: int = 0  # that came to a result
    total_errors: int = 0  # calls of operations and of fallbacks that raised
    auto_recovered: int = 0  # executions that succeeded because they were tried again
    fallback_recovered: int = 0  # ... because something else was done
    user_recovered: int = 0  # ... because of what a person chose
    user_interventions: int = 0  # choices that people made
    unrecovered: int = 0  # executions that failed
    waiting: int = 0  # executions that wait for somebody's decision


_RECOVERED = {
    RecoveryLayer.AUTOMATIC: "auto_recovered",
    RecoveryLayer.FALLBACK: "fallback_recovered",
    RecoveryLayer.USER_INTERVENTION: "user_recovered",
}


class Tally:
    """Counts, from several threads."""

    def __init__(self) -> None:
        self._now = RecoveryStatistics()
        self._lock = threading.RLock()  # a signal handler may come in

    @property
    def now(self) -> RecoveryStatistics:
        """The counts at this moment."""
        return self._now

    def add(self, *names: str) -> None:
        """Count one more of each."""
        with self._lock:
            while True:
                before = self._now
                after = replace(before, **{name: getattr(before, name) + 1 for name in names})
                if self._now is before:  # else a signal handler has counted meanwhile
                    self._now = after
                    return

    def add_result(self, result: RecoveryResult[object]) -> None:
        """Count an execution where it ended."""
        if result.success:
            ended = () if result.layer is None or result.replayed else (_RECOVERED[result.layer],)
        else:
            ended = ("waiting",) if result.waiting else ("unrecovered",)
        self.add("executions", *ended)
