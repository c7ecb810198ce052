"""The table of requirements names tests that exist, and a full run fails if a requirement was not proven."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.requirements import ROOT, Outcomes, Requirement, find_unproven, has_test, read_requirements

ID = re.compile(r"(S[1-4]x?-|W[1-4]-|C|T|G)\d{1,2}")
TABLES = {"S1": 72, "S2": 73, "S3": 29, "S4": 55, "S1x": 33, "S2x": 31, "S3x": 17, "S4x": 26}
"""How many requirements each of the four systems has whose promises this library took over: first those of its own
text, which all must be kept, then (x) those of the parts that the text refers to."""

TEXT_CHARS_MAX = 100


def test_every_requirement_of_the_four_systems_is_in_the_table() -> None:
    rows = {row.id: row for row in read_requirements()}
    expected = {f"{group}-{number:02}" for group, count in TABLES.items() for number in range(1, count + 1)}

    assert sorted(expected - rows.keys()) == []
    assert [id for id in rows if not ID.fullmatch(id)] == []
    assert [id for id, row in rows.items() if row.left_out and "x-" not in id] == []


def test_every_requirement_has_a_short_text_and_names_each_of_its_tests_once() -> None:
    wrong = [
        row.id
        for row in read_requirements()
        if not 0 < len(row.text) <= TEXT_CHARS_MAX
        or bool(row.tests) == bool(row.left_out)
        or len(set(row.tests)) < len(row.tests)
    ]

    assert wrong == []


def test_every_test_that_the_table_names_exists() -> None:
    missing = [f"{row.id}: {test}" for row in read_requirements() for test in row.tests if not has_test(test)]

    assert missing == [], "Correct these rows in tests/requirements.toml: the tests they name do not exist."


@pytest.mark.parametrize(
    ("test", "exists"),
    [
        ("tests/test_rows.py::test_whether_a_test_exists", True),
        ("tests/test_rows.py::test_whether_another_test_exists", False),
        ("tests/test_rows.py::has_test", False),
        ("tests/test_no_such_file.py::test_x", False),
        ("tests/store/test_contract.py::TestMemory::test_ids_are_unique", False),
        ("tests/store/test_contract.py::TestNoStore::test_namespaces_do_not_see_each_other", False),
        ("tests/store/test_contract.py::TestMemory::test_namespaces_do_not_see_each_other", True),
    ],
)
def test_whether_a_test_exists(test: str, exists: bool) -> None:
    assert has_test(test) is exists


ROW = Requirement("S1-01", "Nothing is lost", ("a", "b"))


@pytest.mark.parametrize("outcomes", [Outcomes(passed={"b"}), Outcomes(passed={"a"}, failed={"a"}, left_out={"b"})])
def test_a_requirement_is_proven_by_one_test_that_passed(outcomes: Outcomes) -> None:
    found = find_unproven([ROW], outcomes, skips_fail=True)

    assert (found.failures, found.notes) == ([], [])


@pytest.mark.parametrize(
    ("outcomes", "reasons"),
    [
        (Outcomes(), ("did not run", "did not run")),
        (Outcomes(left_out={"a"}), ("needs a larger BACKSTAY_EFFORT", "did not run")),
        (Outcomes(failed={"a"}, left_out={"a", "b"}), ("failed", "needs a larger BACKSTAY_EFFORT")),
        (Outcomes(skipped={"b": "Skipped: no strace"}), ("did not run", "was skipped: no strace")),
    ],
)
@pytest.mark.parametrize("skips_fail", [False, True])
def test_a_requirement_whose_tests_failed_or_did_not_run_fails(
    outcomes: Outcomes, reasons: tuple[str, str], skips_fail: bool
) -> None:
    found = find_unproven([ROW], outcomes, skips_fail=skips_fail)

    assert found.failures == [f"S1-01: Nothing is lost: no test proved it.\n  a {reasons[0]}\n  b {reasons[1]}"]
    assert found.notes == []


@pytest.mark.parametrize("skips_fail", [False, True])
def test_a_requirement_whose_tests_all_need_a_larger_effort_is_only_named(skips_fail: bool) -> None:
    found = find_unproven([ROW], Outcomes(left_out={"a", "b"}), skips_fail=skips_fail)

    assert found.failures == []
    assert [note.splitlines()[0] for note in found.notes] == ["S1-01: Nothing is lost: no test proved it."]


def test_a_requirement_that_was_left_out_on_purpose_needs_no_test() -> None:
    row = Requirement("S1x-01", "Not wanted", left_out="nobody needs it")

    found = find_unproven([row], Outcomes(), skips_fail=True)

    assert (found.failures, found.notes) == ([], [])


def test_a_requirement_whose_tests_were_skipped_fails_only_where_everything_must_be_tested() -> None:
    outcomes = Outcomes(skipped={"a": "no strace"}, left_out={"b"})

    here, there = (find_unproven([ROW], outcomes, skips_fail=skips_fail) for skips_fail in (False, True))

    assert (len(here.failures), len(here.notes)) == (0, 1)
    assert (len(there.failures), len(there.notes)) == (1, 0)


PROJECT = {
    "pytest.ini": "[pytest]\ntestpaths = checks\n",
    "requirements.toml": """
[S1-01]
text = "Proven"
tests = ["checks/test_it.py::test_passes"]
[S1-02]
text = "Too long for this run"
tests = ["checks/test_it.py::test_takes_long"]
[S1-03]
text = "Not for this machine"
tests = ["checks/test_it.py::test_needs_a_tool"]
""",
    "checks/conftest.py": """
from pathlib import Path
from support.requirements import RequirementsCheck

def pytest_configure(config):
    config.pluginmanager.register(RequirementsCheck(config, Path(__file__).parents[1] / "requirements.toml"))

def pytest_collection_modifyitems(config, items):
    later = [item for item in items if "long" in item.name]
    items[:] = [item for item in items if item not in later]
    config.hook.pytest_deselected(items=later)
""",
    "checks/test_it.py": """
import pytest

@pytest.mark.parametrize("case", ["a", "b"])
def test_passes(case):
    assert case

def test_takes_long():
    raise AssertionError

def test_needs_a_tool():
    pytest.skip("no tool")
""",
}
QUICK = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
"""Other plugins take longer to load than the run itself takes."""

UNPROVEN = '[S1-04]\ntext = "Forgotten"\ntests = ["checks/test_it.py::test_gone"]\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path, *arguments: str, ci: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist", *arguments],
        cwd=project,
        env={**os.environ, **QUICK, "PYTHONPATH": str(ROOT / "tests"), "CI": ci},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_full_run_that_proves_all_it_can_succeeds_and_names_the_rest(project: Path, workers: str) -> None:
    status, output = run(project, "-n", workers)

    assert status == 0, output
    assert "checks/test_it.py::test_takes_long needs a larger BACKSTAY_EFFORT" in output
    assert "checks/test_it.py::test_needs_a_tool was skipped: no tool" in output
    assert "S1-01" not in output


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_full_run_that_left_a_requirement_unproven_fails_and_names_row_and_test(project: Path, workers: str) -> None:
    with (project / "requirements.toml").open("a") as table:
        table.write(UNPROVEN)

    status, output = run(project, "-n", workers)

    assert status == 1, output
    assert "S1-04: Forgotten: no test proved it.\n  checks/test_it.py::test_gone did not run" in output


def test_a_skipped_requirement_fails_the_run_where_everything_must_be_tested(project: Path) -> None:
    status, output = run(project, "-n", "2", ci="true")

    assert status == 1, output
    assert "S1-03: Not for this machine: no test proved it." in output


@pytest.mark.parametrize("part", [["checks/test_it.py"], ["-k", "passes"], ["--deselect", "checks/test_it.py::test_x"]])
def test_a_run_of_some_tests_does_not_judge_the_requirements(project: Path, part: list[str]) -> None:
    with (project / "requirements.toml").open("a") as table:
        table.write(UNPROVEN)

    status, output = run(project, *part)

    assert status == 0, output
    assert "S1-0" not in output
