"""Naming processes: one that lives, one that died, one whose number was given to another, one far away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay.operations.leases import is_alive, short_name, this_process
from backstay.store.leases import UNKNOWN, Holder
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
    assert Holder.parse(str(here)) == here == this_process()
    assert short_name() == f"{here.host}:{os.getpid()}"


def test_a_process_lives_until_it_has_ended_also_while_it_is_stopped(
    sleeper: tuple[subprocess.Popen[str], str],
) -> None:
    process, name = sleeper
    assert is_alive(Holder.parse(name)) is True
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: state(process.pid) == "T")
    assert is_alive(Holder.parse(name)) is True
    process.kill()
    eventually(lambda: state(process.pid) == "Z")

    assert is_alive(Holder.parse(name)) is False  # also before its parent has collected it
    process.wait()
    assert is_alive(Holder.parse(name)) is False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_number_that_was_given_to_another_process_is_no_life() -> None:
    here = this_process()

    assert is_alive(Holder.parse(str(here))) is True
    assert is_alive(here._replace(started=str(int(here.started) + 1))) is False


@pytest.mark.parametrize("elsewhere", [{"boot": "another", "host": "other"}, {"namespaces": "pid:[1]+time:[1]"}])
def test_of_another_machine_or_container_nothing_is_known(elsewhere: dict[str, str]) -> None:
    assert is_alive(this_process()._replace(**elsewhere)) is None


@pytest.mark.parametrize("text", ["", "x", "a b c d e", "a b 1 d", "- - 1 - host"])
def test_of_other_texts_nothing_is_known(text: str) -> None:
    assert is_alive(Holder.parse(text)) is None


def test_a_label_may_be_any_text() -> None:
    for label in ("", "worker", "a label with spaces", " ", str(this_process())):
        here = this_process(label)

        assert Holder.parse(str(here)) == here
        assert is_alive(Holder.parse(str(here))) is True
