"""The clock that leases end by: the host's, the same in all processes, and not that of another boot."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backstay.errors import Fenced, OutcomeUnknown
from backstay.store import leases as boot
from backstay.store.base import Backend
from backstay.store.leases import BOOT_ID_PATH, WALL_CLOCK, ClockReading, LeaseRequest, boot_clock, boot_id
from backstay.store.memory import MemoryStore
from backstay.store.sqlite.store import SqliteStore
from backstay.testing._contract_leases import running
from backstay.testing._contract_runs import G, started
from backstay.testing.drafts import branch_key, draft, put, wait_until

HOUR_US = 3_600_000_000


class HostClock:
    """A host's clock that goes where it is told, also through a reboot."""

    def __init__(self) -> None:
        self.moment = ClockReading(10 * HOUR_US, "first boot")

    def __call__(self) -> ClockReading:
        return self.moment


@pytest.fixture
def host() -> HostClock:
    return HostClock()


@pytest.fixture(params=["memory", "sqlite"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, host: HostClock) -> Iterator[Backend]:
    opened: Backend = (
        MemoryStore(clock=host) if request.param == "memory" else SqliteStore(str(tmp_path / "x.db"), clock=host)
    )
    with contextlib.closing(opened):
        yield opened


@pytest.mark.skipif(not BOOT_ID_PATH.exists(), reason="no boot clock here: the wall clock stands in")
def test_all_processes_of_a_host_have_one_clock_that_counts_from_its_boot() -> None:
    program = "from backstay.store.leases import boot_clock; print(*boot_clock())"
    before = boot_clock()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    us, boot = done.stdout.split()

    assert boot == before.boot == boot_clock().boot == BOOT_ID_PATH.read_text().strip()
    assert 0 < before.us <= int(us) <= boot_clock().us


def test_where_a_boot_has_no_id_the_wall_clock_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "no such file", tmp_path / "empty", tmp_path):
        assert boot_id(path) == WALL_CLOCK
    monkeypatch.setattr(boot, "boot_id", lambda: WALL_CLOCK)
    before = time.time_ns() // 1000
    moment = boot_clock()

    assert moment.boot == WALL_CLOCK
    assert before <= moment.us <= time.time_ns() // 1000


@pytest.mark.parametrize("uptime_us", [0, 1, 20 * HOUR_US], ids=["just booted", "a moment ago", "long ago"])
def test_a_lease_of_an_earlier_boot_is_over(backend: Backend, host: HostClock, uptime_us: int) -> None:
    put(backend, branch_key(), {"n": 1})
    backend.acquire(branch_key(), LeaseRequest("old", "old", HOUR_US))
    late = replace(draft(backend, branch_key(), {"n": 2}), claim=LeaseRequest("old", "old", HOUR_US))
    assert backend.leases("", None, True) == []
    host.moment = ClockReading(uptime_us, "second boot")

    assert [row.left_us for row in backend.leases("", None, True)] == [-uptime_us]
    assert backend.acquire(branch_key(), LeaseRequest("new", "new", HOUR_US)).epoch == 2
    with pytest.raises(Fenced):
        backend.commit(late)


def test_a_holder_that_outlived_a_reboot_goes_on_if_nobody_took_its_lease(backend: Backend, host: HostClock) -> None:
    held = backend.acquire(branch_key(), LeaseRequest("a", "a", HOUR_US))
    host.moment = ClockReading(5, "second boot")
    backend.renew(branch_key(), held.epoch, LeaseRequest("a", "a", HOUR_US))

    assert [row.left_us for row in backend.leases("", None, False)] == [HOUR_US]


def test_runs_whose_lease_is_of_an_earlier_boot_are_claimed_at_once(backend: Backend, host: HostClock) -> None:
    def claimed() -> list[str]:
        return sorted(held.branch.thread for held in backend.claim("", G, 9, LeaseRequest("c", "c", 1), 0, (), started))

    backend.acquire(branch_key("before"), LeaseRequest("a", "a", HOUR_US), running("before"))
    assert claimed() == []
    host.moment = ClockReading(5, "second boot")
    backend.acquire(branch_key("after"), LeaseRequest("b", "b", HOUR_US), running("after"))

    assert claimed() == ["before"]


def test_a_lease_ends_at_its_very_moment(backend: Backend, host: HostClock) -> None:
    start = host.moment.us
    backend.acquire(branch_key(), LeaseRequest("a", "a", 10))
    host.moment = host.moment._replace(us=start + 9)
    with pytest.raises(Fenced):
        backend.acquire(branch_key(), LeaseRequest("b", "b", 10))
    host.moment = host.moment._replace(us=start + 10)

    assert backend.acquire(branch_key(), LeaseRequest("b", "b", 10)).epoch == 2


HOLDER = """
import sys
from backstay.store.leases import LeaseRequest
from backstay.store.sqlite.store import SqliteStore
from backstay.testing._contract_leases import running
from backstay.testing.drafts import branch_key
store = SqliteStore(sys.argv[1])
store.acquire(branch_key("long"), LeaseRequest("child", "child", 3_600_000_000), running("long"))
store.acquire(branch_key("short"), LeaseRequest("child", "child", 200_000), running("short"))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.crash
def test_the_lease_of_a_killed_process_is_taken_over_when_it_ends_and_not_before(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.db")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.kill()
        assert child.wait() == -9
    mine = LeaseRequest("parent", "parent", HOUR_US)
    with contextlib.closing(SqliteStore(path)) as store:
        wait_until(lambda: store.leases("", "short", True))

        assert [held.branch.thread for held in store.claim("", G, 9, mine, 0, (), started)] == ["short"]
        with pytest.raises(Fenced) as raised:
            store.acquire(branch_key("long"), mine)
        assert raised.value.owner == "child"


def test_a_lease_whose_outcome_is_unknown_is_settled_by_asking_again_under_the_same_token(tmp_path: Path) -> None:
    claim = LeaseRequest("a", "a", HOUR_US)
    with contextlib.closing(SqliteStore(str(tmp_path / "agent.db"))) as store:
        put(store, branch_key(), {"n": 1})
        connection = store._writer._connection
        assert connection is not None
        refused: list[str | None] = []

        def refuse(action: int, operation: str | None, *_: str | None) -> int:
            if action != sqlite3.SQLITE_TRANSACTION or operation != "COMMIT":
                return sqlite3.SQLITE_OK
            refused.append(operation)
            return sqlite3.SQLITE_DENY

        connection.set_authorizer(refuse)
        with pytest.raises(OutcomeUnknown) as raised:
            store.acquire(branch_key(), claim)
        assert refused == ["COMMIT"]

        assert raised.value.retry_safe
        assert store.acquire(branch_key(), claim).epoch == store.acquire(branch_key(), claim).epoch == 1
