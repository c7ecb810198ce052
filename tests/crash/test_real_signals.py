"""Real signals at any moment in a program that saves: nothing hangs, in no thread or process, and nothing is lost.

See ``support.crash.real_signal_victim`` for the program. Where another process can use the same store, this one saves
beside it, so a lock that stays behind shows as ``StoreBusy`` here.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import backstay
from support.processes import child_environment
from support.running import Show, effort

VICTIM = [sys.executable, "-m", "support.crash.real_signal_victim"]
INTERRUPTS = max(200, 100 * effort())
HANDLER_SAVES = 12 * effort()
TIMEOUT_S = 120 * max(1, effort() // 2)


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(("mode", "times"), [("interrupt", INTERRUPTS), ("save", HANDLER_SAVES)])
def test_signals_at_any_moment_leave_no_lock_behind_and_lose_nothing(
    url: str, mode: str, times: int, show: Show
) -> None:
    command = [*VICTIM, url, mode, str(times), "20261116", str(TIMEOUT_S)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
    ) as victim:
        beside = save_while(url, victim)
        said, errors = victim.communicate(timeout=TIMEOUT_S + 30)

    assert victim.returncode == 0, errors
    told = json.loads(said)
    show(f"signals, {mode}, {url.partition(':')[0][-40:]}", {**told, "in another process": beside})
    assert told["fired"] >= times, "the fault fired"
    assert told["wrong"] == []
    assert told["raw"] == []
    assert not told["hung"]
    assert told["acknowledged"] > 0
    assert told["beside"] > 0


def save_while(url: str, victim: subprocess.Popen[str]) -> int:
    """Save into a thread of this process's own as long as the victim lives; return how often."""
    if url == "memory:":
        return 0
    saved = 0
    with backstay.open(url) as store:
        thread = store.thread("another process")
        while victim.poll() is None:
            saved += 1
            thread.append({"log": [saved]})
            if saved % 50 == 0:
                thread.prune(backstay.Keep(last=5))
        latest = thread.latest()
        assert latest is None or latest.state["log"] == list(range(1, saved + 1))
    return saved
