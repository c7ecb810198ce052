"""Print the requirements of tests/requirements.toml, each with its verdict and the tests that prove it.

    python tools/rows.py [--reports FILE ...] [--group S1 ...] [--short]

Reports are JUnit files of pytest runs (``pytest --junitxml=FILE``). With them, a row is proven if one of its tests has
passed in one of the runs. Without them, the table only says which tests a row names; a full run of the tests fails if a
row was not proven.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.requirements import Requirement, has_test, read_requirements, without_parameters  # noqa: E402

PROVEN, DECIDED, NAMED = "proven", "proven, as decided", "named"
LEFT_OUT, UNPROVEN = "left out on purpose", "NOT PROVEN"


def passed_tests(reports: list[Path]) -> set[str]:
    """Return the tests that passed in these runs, without their parameters."""
    passed = set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is None and case.find("error") is None and case.find("skipped") is None:
                passed.add(without_parameters(_test_of(case.get("classname", ""), case.get("name", ""))))
    return passed


def _test_of(classname: str, name: str) -> str:
    """Return the id of a test: JUnit names its module and class with dots."""
    parts = classname.split(".")
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count]) + ".py"
        if (ROOT / path).is_file():
            return "::".join([path, *parts[count:], name])
    return f"{classname}::{name}"


def verdict_of(row: Requirement, passed: set[str] | None) -> str:
    """Return the verdict on a row; without reports, whether its tests exist."""
    if row.left_out:
        return LEFT_OUT
    if passed is None:
        return NAMED if all(map(has_test, row.tests)) else UNPROVEN
    if not passed.intersection(row.tests):
        return UNPROVEN
    return DECIDED if row.decided else PROVEN


def main() -> int:
    """Print the table and the number of rows by verdict; return 1 if a row is not proven."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reports", nargs="+", type=Path, help="JUnit files of test runs")
    parser.add_argument("--group", nargs="+", help="only these groups, such as S1 S2x W1")
    parser.add_argument("--short", action="store_true", help="only the numbers")
    options = parser.parse_args()
    passed = None if options.reports is None else passed_tests(options.reports)
    counts: dict[str, Counter[str]] = {}
    for row in read_requirements():
        group = re.sub(r"-?\d+$", "", row.id)
        if options.group and group not in options.group:
            continue
        verdict = verdict_of(row, passed)
        counts.setdefault(group, Counter())[verdict] += 1
        if options.short:
            continue
        print(f"{row.id:7}{verdict:20}{row.text}")
        reason = row.left_out or row.decided
        if reason:
            print(textwrap.fill(reason, 120, initial_indent=" " * 27 + "> ", subsequent_indent=" " * 29))
        for test in row.tests:
            mark = "" if passed is None else "+ " if test in passed else "- "
            print(f"{'':27}{mark}{test.removeprefix('tests/')}")
    verdicts = sorted({verdict for count in counts.values() for verdict in count})
    print(f"\n{'':7}{'rows':>6}" + "".join(f"{verdict:>21}" for verdict in verdicts))
    for group, count in (*counts.items(), ("all", sum(counts.values(), Counter[str]()))):
        print(f"{group:7}{count.total():6}" + "".join(f"{count[verdict]:21}" for verdict in verdicts))
    return 1 if any(count[UNPROVEN] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
