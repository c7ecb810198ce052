"""PostgreSQL at its limits: no connection free in the pool, none in the server, no lock free, no space on its disk.

What waits succeeds if there is room in time; otherwise it ends at its deadline with an error that says so. Nothing is
stored by half, and when there is room again everything works as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

import backstay
from backstay.errors import BackstayError, Conflict, OutcomeUnknown, StoreBusy, StoreFull
from backstay.testing.drafts import wait_until
from support.postgres import PostgresServer, Watch
from support.running import Show

pytestmark = pytest.mark.effort(2)


POOL = 2
CALLERS = 16
TIMEOUT_S = 1.5
PATIENT_S = 20
GRACE_S = 1.0

CONNECTIONS_MAX = 8

DISK_BYTES = 120 << 20
ROOM_BYTES = 24 << 20
SAVE_BYTES = 256 << 10
SAVES_MAX = 2000


class Jam:
    """A store with two connections, and sixteen callers of which two wait for a lock that somebody holds."""

    def __init__(self, server: PostgresServer, url: str, timeout: float) -> None:
        self.watch = Watch(server, url)
        self.store = backstay.open(f"{self.watch.url}&timeout={timeout}&pool={POOL}")
        self.names = ["jammed"] * POOL + [f"t-{number}" for number in range(POOL, CALLERS)]
        self.threads = [self.store.thread(name) for name in self.names]
        self.threads[0].save({"log": []}, id="begin")
        for thread in self.threads[:POOL]:
            thread.latest()
        self.callers = ThreadPoolExecutor(CALLERS)

    @contextlib.contextmanager
    def locked(self) -> Iterator[list[Future[float]]]:
        """Hold what all need until the block ends. Two have all connections, the others wait for one."""
        with self.watch.locked():
            calls = [self.callers.submit(self._save, number) for number in range(POOL)]
            wait_until(lambda: self.watch.blocked == POOL)
            calls += [self.callers.submit(self._save, number) for number in range(POOL, CALLERS)]
            yield calls

    def _save(self, number: int) -> float:
        began = time.monotonic()
        try:
            self.threads[number].append({"log": [number]})
        except BackstayError as error:
            error.add_note(f"{time.monotonic() - began}")
            raise
        return time.monotonic() - began

    def close(self) -> None:
        self.callers.shutdown()
        assert self.store.check()
        self.store.close()


@pytest.fixture
def jam(postgres: PostgresServer, postgres_url: str) -> Iterator[Callable[[float], Jam]]:
    with contextlib.ExitStack() as closing:

        def make(timeout: float) -> Jam:
            made = Jam(postgres, postgres_url, timeout)
            closing.callback(made.close)
            return made

        yield make


@pytest.mark.crash
def test_callers_without_a_connection_wait_for_one_and_succeed(jam: Callable[[float], Jam]) -> None:
    jammed = jam(PATIENT_S)
    with jammed.locked() as calls:
        assert not any(call.done() for call in calls)
    errors = Counter(type(call.exception()) for call in calls)

    assert errors == {type(None): CALLERS - 1, Conflict: 1}, "two had the same parent"
    log = [jammed.store.thread(name).latest() for name in jammed.names[1:]]
    assert all(found is not None and len(found.state["log"]) == 1 for found in log)


@pytest.mark.crash
def test_callers_without_a_connection_are_told_so_at_their_deadline_and_nothing_is_half_stored(
    jam: Callable[[float], Jam], show: Show
) -> None:
    jammed = jam(TIMEOUT_S)
    with jammed.locked() as calls:
        errors = [call.exception() for call in calls]
    late_s = max(float(error.__notes__[0]) for error in errors if error is not None) - TIMEOUT_S

    show("pool exhausted", f"{CALLERS} callers, {POOL} connections, at most {late_s:.2f} s beyond {TIMEOUT_S} s")
    assert [type(error) for error in errors] == [OutcomeUnknown] * POOL + [StoreBusy] * (CALLERS - POOL)
    assert late_s <= GRACE_S
    wait_until(lambda: jammed.watch.transactions == 0)  # what nobody waits for any more has had its turn in the server
    stored = [len(list(jammed.store.thread(name).history())) for name in jammed.names[1:]]
    assert stored[0] <= 2
    assert stored[1:] == [0] * (CALLERS - POOL)
    for thread in jammed.threads:
        thread.latest()
        thread.append({"log": ["after"]})
        thread.latest()
    with ThreadPoolExecutor(CALLERS) as callers:
        for found in callers.map(lambda name: jammed.store.thread(name).latest(), jammed.names):
            assert found is not None
            assert found.state["log"][-1] == "after"


@pytest.fixture
def small_server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with PostgresServer(settings={"max_connections": str(CONNECTIONS_MAX)}) as server:
        yield server


def take_all(server: PostgresServer) -> list[psycopg.Connection[tuple[Any, ...]]]:
    """Connect until the server lets nobody in any more."""
    taken: list[psycopg.Connection[tuple[Any, ...]]] = []
    with contextlib.suppress(psycopg.OperationalError):
        while len(taken) <= CONNECTIONS_MAX:
            taken.append(server.connect())
    assert 0 < len(taken) <= CONNECTIONS_MAX
    return taken


@pytest.mark.crash
def test_a_server_without_a_free_connection_is_asked_again_until_the_deadline(
    small_server: PostgresServer, show: Show
) -> None:
    server = small_server
    with (
        backstay.open(server.url(timeout=str(TIMEOUT_S))) as hasty,
        backstay.open(server.url(timeout=PATIENT_S)) as patient,
    ):
        with server.connect() as admin:  # each has the connection that it was opened with
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'backstay'")
        taken = take_all(server)
        began = time.monotonic()
        with pytest.raises(StoreBusy):
            hasty.thread("t").save({"n": 1})
        late_s = time.monotonic() - began - TIMEOUT_S
        with ThreadPoolExecutor(1) as caller:
            saving = caller.submit(patient.thread("t").save, {"n": 2})
            refused = refusals(server)
            wait_until(lambda: refusals(server) > refused)  # it was turned away, and asks again
            assert not saving.done()
            for connection in taken:
                connection.close()
            assert saving.result().seq == 1
        hasty.thread("t").latest()

        show("server without connections", f"{refusals(server)} refusals, {late_s:.2f} s beyond {TIMEOUT_S} s")
        assert late_s <= GRACE_S
        assert [meta.id for meta in hasty.thread("t").history()] == [saving.result().id]
        assert patient.check()


def refusals(server: PostgresServer) -> int:
    return server.log.read_text(encoding="utf-8", errors="replace").count("sorry, too many clients already")


@pytest.fixture
def small_disk(postgres: PostgresServer) -> Iterator[Path]:
    """Mount a small file system; only root can."""
    folder = Path(tempfile.mkdtemp(prefix="backstay-disk-", dir="/tmp"))
    folder.chmod(0o755)  # PostgreSQL runs as somebody else
    image, mounted = folder / "image", folder / "disk"
    mounted.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        try:
            run("mkfs.ext4", "-q", "-F", "-m", "0", image)
            run("mount", "-o", "loop", image, mounted)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            missing = f"a small disk cannot be mounted here: {error}"
            if os.geteuid() == 0 and os.environ.get("CI") == "true":
                pytest.fail(missing)
            pytest.skip(missing)
        try:
            yield mounted
        finally:
            run("umount", mounted)
    finally:
        shutil.rmtree(folder)


def run(*command: object) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where mkfs is, and a plain user's PATH does not lead
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env={**os.environ, "PATH": path})


@pytest.fixture
def squeezed(small_disk: Path) -> Iterator[tuple[PostgresServer, Path]]:
    """Start a server on the small disk."""
    settings = {"max_wal_size": "32MB", "min_wal_size": "32MB"}
    with PostgresServer(small_disk / "server", settings=settings) as server:
        yield server, small_disk / "ballast"


class Filler:
    """Saves what cannot be compressed, and remembers what was acknowledged."""

    def __init__(self, server: PostgresServer, ballast: Path) -> None:
        left = os.statvfs(ballast.parent)
        ballast.write_bytes(bytes(left.f_bavail * left.f_frsize - ROOM_BYTES))
        self.store = backstay.open(server.url(timeout=str(TIMEOUT_S)))
        self.thread = self.store.thread("t")
        self.acked: list[str] = []

    def save(self, name: str) -> None:
        self.thread.save({"name": name, "data": hashlib.shake_128(name.encode()).digest(SAVE_BYTES)}, id=name)
        self.acked.append(name)

    def fill(self) -> BackstayError:
        """Save until that fails, and return how."""
        for number in range(SAVES_MAX):
            try:
                self.save(f"c-{number}")
            except BackstayError as error:
                return error
        raise AssertionError("the disk was never full")

    def go_on(self) -> None:
        """There is room again: what was acknowledged is there, what failed can be saved again, once."""
        refused = f"c-{len(self.acked)}"
        before = [meta.id for meta in self.thread.history()][::-1]
        assert before in (self.acked, [*self.acked, refused])
        self.thread.latest()
        self.save(refused)
        self.save("last")
        assert [meta.id for meta in self.thread.history()][::-1] == self.acked
        report = self.store.check()
        assert report, str(report)
        self.store.close()


@pytest.mark.crash
def test_a_save_that_finds_the_servers_disk_full_says_so_and_works_again_when_there_is_room(
    squeezed: tuple[PostgresServer, Path], show: Show
) -> None:
    """The log of transactions has a disk of its own, as it should: only the tables' disk is full."""
    server, ballast = squeezed
    server.stop()
    with tempfile.TemporaryDirectory(prefix="backstay-wal-", dir="/tmp") as elsewhere:
        os.chmod(elsewhere, 0o755)
        log = Path(shutil.move(server.data / "pg_wal", Path(elsewhere) / "pg_wal"))
        (server.data / "pg_wal").symlink_to(log)
        run("chown", "-R", f"--reference={server.data}", log)
        server.start()
        filler = Filler(server, ballast)
        error = filler.fill()

        show("disk full", f"after {len(filler.acked)} saves of {SAVE_BYTES >> 10} KiB: {error}")
        assert type(error) is StoreFull
        assert error.retry_safe
        assert "No space left on device" in server.log.read_text()
        assert filler.store.get(f"c-{len(filler.acked)}") is None
        newest = filler.thread.latest()
        assert newest is not None
        assert newest.id == filler.acked[-1]
        ballast.unlink()
        filler.go_on()
        server.stop()


@pytest.mark.crash
def test_a_server_that_dies_of_a_full_disk_comes_back_with_everything_acknowledged(
    squeezed: tuple[PostgresServer, Path], show: Show
) -> None:
    """Where its log of transactions has no room, PostgreSQL ends with a PANIC and cannot start again."""
    server, ballast = squeezed
    filler = Filler(server, ballast)
    error = filler.fill()
    wait_until(lambda: server.crashed)

    show("disk full to death", f"after {len(filler.acked)} saves of {SAVE_BYTES >> 10} KiB: {error}")
    assert isinstance(error, OutcomeUnknown | StoreBusy)
    assert "PANIC" in server.log.read_text()
    with pytest.raises(StoreBusy):
        filler.store.get(filler.acked[-1])
    ballast.unlink()
    server.start()
    filler.go_on()
