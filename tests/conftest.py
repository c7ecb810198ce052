"""Fixtures that many tests share. Every store test ends with a full verification: it cannot be forgotten."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import backstay
from support import loop_guard
from support.loop_guard import pytest_runtest_call as pytest_runtest_call
from support.requirements import RequirementsCheck
from support.running import RAM_FOLDER, Show, effort, skip_unless_ci

if TYPE_CHECKING:
    from support.postgres import PostgresServer

loop_guard.install()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts a background job with Ctrl-C ignored, and child processes inherit that. Many tests send Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = 15 * effort()
"""How many examples a property gets that does not say so itself."""

STORE_TESTS = Path(__file__).parent / "store"
LATER = pytest.StashKey[int]()
"""How many tests were left out."""

RAM_BYTES_MIN = 4 << 30

settings.register_profile(
    "backstay",
    max_examples=EXAMPLES,
    deadline=None,  # this machine's disk decides how long an example takes
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("backstay")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RequirementsCheck(config))


def pytest_report_header() -> list[str]:
    import sqlite3

    return [
        f"backstay {backstay.__version__}, SQLite {sqlite3.sqlite_version}, CI={os.environ.get('CI', '')!r}",
        f"BACKSTAY_EFFORT={effort()}",
    ]


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores: tests of leases, timeouts and lost networks mostly wait."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count at the end of the run, what takes too long for the effort of this run.

    Tests above the stores run on PostgreSQL only from effort 2 on; those of the store itself always do.
    """
    later = []
    for item in items:
        if "postgres" in item.name.partition("[")[2] and STORE_TESTS not in item.path.parents:
            item.add_marker(pytest.mark.effort(2))
        least = max((mark.args[0] for mark in item.iter_markers("effort") if mark.args), default=1)
        if effort() < least:
            later.append(item)
    left_out = set(later)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=later)
    config.stash[LATER] = len(later)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["later"] = session.config.stash.get(LATER, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LATER] = getattr(node, "workeroutput", {}).get("later", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LATER, 0):
        terminalreporter.write_line(f"{left_out} tests run only with a larger BACKSTAY_EFFORT, see CONTRIBUTING.md")


class Clock:
    """A clock that goes where it is told."""

    def __init__(self) -> None:
        self.moment = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.moment

    def step(self, **by: float) -> None:
        self.moment += timedelta(**by)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def show(record_property: Show, capsys: pytest.CaptureFixture[str]) -> Show:
    """Print a figure past pytest's capture and keep it in the report."""

    def write(name: str, value: object) -> None:
        record_property(name, str(value))  # a worker of a distributed run can send only plain values
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {value}\n")

    return write


@pytest.fixture(params=["memory", "sqlite", "dir", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    if request.param == "dir":
        return f"dir:{tmp_path / 'checkpoints'}"
    return "memory:" if request.param == "memory" else str(tmp_path / "store.db")


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[backstay.Store]:
    with backstay.open(url, clock=clock) as opened:
        yield opened
        report = opened.check()
        assert report, str(report)


@pytest.fixture
def thread(store: backstay.Store) -> backstay.Thread:
    return store.thread("customer-42")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start PostgreSQL, once for each worker of the run. A test that stops it starts it again.

    Its files are in memory if there is room, for speed: what a disk may do to a server is tested on others.
    """
    try:
        from support.postgres import PostgresServer, PostgresUnavailable
    except ImportError as missing:
        skip_unless_ci(f"PostgreSQL cannot be tested: {missing}")
    in_memory = RAM_FOLDER.is_dir() and shutil.disk_usage(RAM_FOLDER).free >= RAM_BYTES_MIN
    try:
        server = PostgresServer(parent=RAM_FOLDER if in_memory else Path("/tmp"))
    except PostgresUnavailable as missing:
        skip_unless_ci(f"PostgreSQL cannot be tested: {missing}")
    with server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """Return the URL of a place of its own in the running PostgreSQL: a schema, which the store creates."""
    import psycopg
    from psycopg import sql

    if not postgres.running:  # the test before left it so; that is no reason for this one to fail
        postgres.start()
    schema = f"t_{uuid.uuid4().hex}"
    yield postgres.url(schema=schema)
    with contextlib.suppress(psycopg.Error), postgres.connect() as connection:
        connection.execute("set lock_timeout = '2s'")  # a connection that the test forgot may hold it
        connection.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(schema)))
