"""Naming processes: one that lives, one that died, one whose number was given to another, one far away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay.operations.leases import UNKNOWN, Process, is_alive, short_name, this_process
from support.waiting import eventually

SLEEPER = """
import sys
from backstay.operations.leases import this_process
print(this_process(), flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().rstrip("\n")
        process.kill()


def test_a_name_says_which_process_and_comes_back_from_its_text() -> None:
    here = this_process()

    assert int(here.pid) == os.getpid()
    assert UNKNOWN not in here
    assert Process.parse(str(here)) == here == this_process()
    assert short_name() == f"{here.host}:{os.getpid()}"


def test_a_process_lives_until_it_has_ended_also_while_it_is_stopped(
    sleeper: tuple[subprocess.Popen[str], str],
) -> None:
    process, name = sleeper
    assert is_alive(name) is True
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: state(process.pid) == "T")
    assert is_alive(name) is True
    process.kill()
    eventually(lambda: state(process.pid) == "Z")

    assert is_alive(name) is False  # also before its parent has collected it
    process.wait()
    assert is_alive(name) is False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_number_that_was_given_to_another_process_is_no_life() -> None:
    here = this_process()

    assert is_alive(str(here)) is True
    assert is_alive(str(here._replace(started=str(int(here.started) + 1)))) is False


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"namespaces": "pid:[1]+time:[1]"}])
def test_of_another_boot_or_container_nothing_is_known(elsewhere: dict[str, str]) -> None:
    assert is_alive(str(this_process()._replace(**elsewhere))) is None


@pytest.mark.parametrize("text", ["", "x", "a b c d e", "a b 1 d", "- - 1 - host"])
def test_of_other_texts_nothing_is_known(text: str) -> None:
    assert is_alive(text) is None


def test_a_host_may_have_any_name() -> None:
    here = this_process()._replace(host="a host with spaces")

    assert Process.parse(str(here)) == here
    assert is_alive(str(here)) is True
