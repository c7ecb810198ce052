"""The table of requirements, and the check at the end of a full run that every row was proven by a test that passed."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "requirements.toml"

NARROWING = (
    "collectonly",
    "deselect",
    "ignore",
    "ignore_glob",
    "keyword",
    "lf",
    "markexpr",
    "maxfail",
    "setuponly",
    "setupplan",
    "stepwise",
)
"""The options of pytest that leave tests out or stop a run early."""


@dataclass(frozen=True)
class Requirement:
    """One row of the table."""

    id: str
    text: str
    tests: Sequence[str] = ()
    """The tests that prove it: node ids without parameters."""
    decided: str = ""
    """How we keep it, where that differs from the plain reading of the text."""
    left_out: str = ""
    """Why we do without it. Such a row has no tests."""


@dataclass
class Outcomes:
    """What happened to each test of a run, by node id without parameters."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    """The reason for each test that was skipped."""
    left_out: set[str] = field(default_factory=set)
    """Tests that need a larger effort than that of this run."""

    def add(self, report: pytest.TestReport) -> None:
        test = without_parameters(report.nodeid)
        if report.failed:
            self.failed.add(test)
        elif report.skipped:
            self.skipped[test] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.when == "call":
            self.passed.add(test)

    def of(self, test: str) -> str:
        """Say what happened to a test of which no case passed."""
        if test in self.failed:
            return "failed"
        if test in self.skipped:
            return f"was skipped: {self.skipped[test].removeprefix('Skipped: ')}"
        return "needs a larger BACKSTAY_EFFORT" if test in self.left_out else "did not run"


@dataclass
class Unproven:
    """The rows that no test proved, each with the reason."""

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Rows that this machine, or a run of this effort, cannot prove."""


def read_requirements(path: Path = TABLE) -> list[Requirement]:
    """Return all rows. A row with a key that does not exist is a TypeError."""
    return [Requirement(id, **row) for id, row in tomllib.loads(path.read_text(encoding="utf-8")).items()]


def without_parameters(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def find_unproven(requirements: list[Requirement], outcomes: Outcomes, *, skips_fail: bool) -> Unproven:
    """Return the requirements of which no test passed.

    Tests that need a larger effort are excused. Skipped tests are excused on a developer's machine, where a tool may be
    missing, but not where everything must be tested.
    """
    unproven = Unproven()
    for row in requirements:
        if row.left_out or outcomes.passed.intersection(row.tests):
            continue
        skipped = any(test in outcomes.skipped for test in row.tests)
        excused = all(
            test not in outcomes.failed and (test in outcomes.skipped or test in outcomes.left_out)
            for test in row.tests
        )
        message = "\n".join(
            (f"{row.id}: {row.text}: no test proved it.", *(f"  {test} {outcomes.of(test)}" for test in row.tests))
        )
        if not excused or not row.tests or (skipped and skips_fail):
            unproven.failures.append(message)
        else:
            unproven.notes.append(message)
    return unproven


def is_full_run(config: pytest.Config) -> bool:
    """Return whether the run was asked for every test: no path, no filter, no early stop."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(
        config.getoption(name, None) for name in NARROWING
    )


class RequirementsCheck:
    """A plugin that fails a full run in which a requirement was not proven.

    In a distributed run each worker collects all tests, so it knows which ones were left out; the controller gets all
    reports and decides.
    """

    def __init__(self, config: pytest.Config, table: Path = TABLE) -> None:
        self.config = config
        self.table = table
        self.outcomes = Outcomes()
        self.unproven = Unproven()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.outcomes.left_out.update(without_parameters(item.nodeid) for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.outcomes.left_out.update(getattr(node, "workeroutput", {}).get("left_out", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left_out"] = sorted(self.outcomes.left_out)
        elif is_full_run(self.config) and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            self.unproven = find_unproven(
                read_requirements(self.table), self.outcomes, skips_fail=os.environ.get("CI") == "true"
            )
            if self.unproven.failures:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unproven.notes:
            terminalreporter.section("requirements that this run cannot prove")
            terminalreporter.write_line("\n".join(self.unproven.notes))
        if self.unproven.failures:
            terminalreporter.section("requirements without a test that passed", red=True)
            terminalreporter.write_line("\n".join(self.unproven.failures))
            terminalreporter.write_line(
                f"Fix or add these tests, or correct the rows in {self.table.name}. This fails the run.", red=True
            )


def has_test(test: str, root: Path = ROOT) -> bool:
    """Return whether a test exists, without collecting it. Classes may inherit it from classes that they import."""
    path, *names = test.split("::")
    body = _body(root / path)
    for name in names[:-1]:
        found = _definition(body, name)
        if not isinstance(found, ast.ClassDef):
            return False
        if _inherits(found, names[-1], body):
            return True
        body = tuple(found.body)
    return isinstance(_definition(body, names[-1]), ast.FunctionDef | ast.AsyncFunctionDef)


@functools.cache
def _body(path: Path) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(path.read_text(encoding="utf-8")).body) if path.is_file() else ()


def _definition(body: tuple[ast.stmt, ...], name: str) -> ast.stmt | None:
    return next((node for node in body if getattr(node, "name", None) == name), None)


def _inherits(cls: ast.ClassDef, method: str, module: tuple[ast.stmt, ...]) -> bool:
    bases = {base.id for base in cls.bases if isinstance(base, ast.Name)}
    return any(
        hasattr(getattr(importlib.import_module(node.module), alias.name), method)
        for node in module
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if (alias.asname or alias.name) in bases
    )
