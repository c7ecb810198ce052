"""Which rows of the requirements the tests name, counted where the run can see them."""

from __future__ import annotations

import re
from pathlib import Path

from backstay import testing

ROOT = Path(__file__).parent
ROW = re.compile(r"^(S[1-4]x?|W[1-4]|C|T|G)-?\d{1,2}$")
MARK = re.compile(r"mark\.row\(([^)]*)\)")


def named_rows() -> set[str]:
    found: set[str] = set()
    for path in (*ROOT.rglob("test_*.py"), *Path(testing.__file__).parent.rglob("*contract*.py")):
        for arguments in MARK.findall(path.read_text(encoding="utf-8")):
            found.update(re.findall(r'"([^"]+)"', arguments))
    return found


def test_rows_are_named_in_their_one_form() -> None:
    assert [name for name in sorted(named_rows()) if not ROW.match(name)] == []


def test_the_rows_this_layer_covers_are_counted() -> None:
    rows = named_rows()
    by_group = {
        group: sum(name.startswith(group) for name in rows) for group in ("S1", "S2", "S3", "S4", "W", "C", "T", "G")
    }

    assert sum(by_group.values()) == len(rows)
    assert len(rows) >= 100, by_group
