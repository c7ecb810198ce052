"""Fixtures that many tests share. Every store test ends with a full verification: it cannot be forgotten."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import holdfast

settings.register_profile(
    "holdfast",
    deadline=None,  # this machine's disk decides how long an example takes
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("holdfast")


def pytest_report_header() -> list[str]:
    import apsw

    return [f"holdfast {holdfast.__version__}, SQLite {apsw.sqlite_lib_version()}, CI={os.environ.get('CI', '')!r}"]


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


Show = Callable[[str, object], None]


@pytest.fixture
def show(record_property: Show, capsys: pytest.CaptureFixture[str]) -> Show:
    """Print a figure past pytest's capture and keep it in the report."""

    def write(name: str, value: object) -> None:
        record_property(name, value)
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {value}\n")

    return write


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else str(tmp_path / "store.db")


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[holdfast.Store]:
    with holdfast.open(url, clock=clock) as opened:
        yield opened
        report = opened.verify()
        assert report, str(report)


@pytest.fixture
def thread(store: holdfast.Store) -> holdfast.Thread:
    return store.thread("customer-42")
