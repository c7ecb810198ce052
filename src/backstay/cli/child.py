"""A child process of the demo and the pipe to it. Nobody sleeps: the demo blocks until the child says something."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

CHILD_SECONDS_MAX = 60  # then it is killed, and reading from it fails


class ChildFailed(Exception):
    """A child ended when it should not have, or said nothing when it should have."""


class Child:
    """A running worker. Leaving the ``with`` block ends it, whatever happened."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "backstay.cli.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(CHILD_SECONDS_MAX, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()  # does nothing if it has ended
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def facts(self) -> Iterator[dict[str, Any]]:
        """Iterate over what it tells until it ends; raise ChildFailed unless it ends well."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)
        if self._process.wait() != 0:
            raise ChildFailed(self._last_words())

    def hear(self) -> dict[str, Any]:
        """Return the next thing it tells."""
        for fact in self.facts():
            return fact
        raise ChildFailed(f"process {self.pid} ended without a word")

    def go(self) -> None:
        """Tell it to go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def kill(self) -> int:
        """Send SIGKILL and return the number of the signal that ended it; 0 if none did."""
        self._process.kill()
        return max(0, -self._process.wait())

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().strip().splitlines()
        return f"process {self.pid} ended with {self._process.returncode}: {lines[-1] if lines else 'no message'}"
