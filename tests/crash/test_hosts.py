"""A dead holder: on the same machine its lease is free at once, on another one only when it has expired.

The other machine is a process with another host name, or in another namespace of process ids, on the same store.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import backstay
from backstay.testing.drafts import wait_until
from backstay.thread.lease import Lease
from support.processes import child_environment
from support.running import skip_unless_ci

TTL_S = 4.0
HOLD = """
import os, signal, socket, sys
import backstay

store = backstay.open(sys.argv[1])
graph = backstay.Graph("job")

@graph.node
def work(state):
    print("holds", flush=True)
    signal.pause()

graph.start("work")
graph.end("work")
graph.run_sync(store.thread("t"), {"n": 1}, lease_s=float(sys.argv[2]))
"""


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.effort(2))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "agent.db")


def graph() -> backstay.Graph:
    made = backstay.Graph("job")
    made.node("work", lambda state: {"n": state["n"] + 1})
    made.start("work")
    made.end("work")
    return made


def kill_a_holder(url: str, other_host: list[str]) -> float:
    """Let a process run a graph under a lease, kill it, and return when that was."""
    command = [*other_host, sys.executable, "-c", HOLD, url, str(TTL_S)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"holds\n"
    killed = time.monotonic()
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()
    return killed


def test_the_run_of_a_dead_process_of_this_machine_is_free_at_once(url: str) -> None:
    kill_a_holder(url, [])
    with backstay.open(url) as store:
        assert [str(run.status) for run in store.runs()] == ["abandoned"]
        began = time.monotonic()
        (lease,) = store.claim(graph())
        with lease:
            assert graph().resume_sync(lease.thread, lease=lease).state["n"] == 2
        took_s = time.monotonic() - began

    assert took_s < TTL_S


def test_a_plain_save_is_not_refused_because_of_a_dead_process_of_this_machine(url: str) -> None:
    with backstay.open(url) as store:
        early = store.thread("t")
        early.latest()
        kill_a_holder(url, [])
        with pytest.raises(backstay.Conflict):  # the dead one has saved since this handle looked
            early.append({"log": ["late"]})
        began = time.monotonic()
        newest = store.thread("t").latest()
        saved = store.thread("t").append({"log": ["plain"]})
        took_s = time.monotonic() - began

    assert newest is not None
    assert saved.parent_id == newest.id
    assert took_s < TTL_S / 2


@pytest.mark.crash
@pytest.mark.parametrize(
    "namespaces",
    [
        pytest.param(["--uts"], id="another host name"),
        pytest.param(["--pid", "--fork", "--kill-child", "--mount-proc"], id="other process ids"),
    ],
)
def test_the_run_of_a_dead_process_of_another_machine_is_free_when_its_lease_has_expired(
    url: str, namespaces: list[str]
) -> None:
    unshare = [shutil.which("unshare") or "unshare", *namespaces]
    rename = ["sh", "-c", 'hostname elsewhere; exec "$0" "$@"'] if "--uts" in namespaces else []
    if os.geteuid() != 0 or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        skip_unless_ci(f"unshare {' '.join(namespaces)} does not work here: it needs root and util-linux")
    killed = kill_a_holder(url, [*unshare, *rename])
    with backstay.open(url) as store:
        (run,) = store.runs()
        assert str(run.status) == "running", "from here nobody can say whether it is dead"
        assert store.claim(graph()) == []
        with pytest.raises(backstay.Fenced):
            graph().run_sync(store.thread("t"), {"n": 1}, wait=0)
        with pytest.raises(backstay.Fenced):
            store.thread("t").append({"log": ["plain"]})
        looked = time.monotonic()
        assert looked - killed < TTL_S, "this took too long to prove anything"
        found: list[Lease] = []

        def claim() -> list[Lease]:
            found[:] = store.claim(graph())
            return found

        wait_until(claim)
        freed_s = time.monotonic() - killed
        with found[0] as lease:
            assert graph().resume_sync(lease.thread, lease=lease).state["n"] == 2

    assert freed_s > TTL_S / 2, "a lease is renewed when a third of its time has passed"
