"""What a measurement is and how it is printed: one line each, grouped, with its target where there is one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

Unit = Literal["s", "B", "x", "MB", "/s"]

_WIDTHS = (54, 23, 36, 7, 12, 3)
_HEADS = ("measure", "ours (p50 / p99)", "floor or peer", "ratio", "target", "met")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A limit for the ratio or for our own value."""

    limit: float
    on: Literal["ratio", "ours"] = "ratio"
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Say whether a value keeps the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``other`` is a floor or a peer; the ratio is ours / other unless given."""

    name: str
    ours: float | None
    unit: Unit = "s"
    p99: float | None = None
    other: float | None = None
    other_name: str = ""
    other_unit: Unit | None = None
    ratio: float | None = None
    target: Target | None = None

    @property
    def quotient(self) -> float | None:
        """The ratio, given or computed."""
        if self.ratio is not None or self.ours is None or not self.other:
            return self.ratio
        return self.ours / self.other

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none."""
        if self.target is None:
            return None
        value = self.quotient if self.target.on == "ratio" else self.ours
        return None if value is None else self.target.met(value)


def show(value: float | None, unit: Unit) -> str:
    """Return a value with a unit that suits its size."""
    if value is None:
        return "-"
    if unit == "s":
        return _seconds(value)
    if unit == "B":
        return _bytes(value)
    return {"x": f"{value:.3f}", "MB": f"{value:.1f} MB", "/s": f"{value:,.0f}/s"}[unit]


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value:.0f} B" if value < 10_000 else f"{value / 1e6:,.3f} MB"


class Table:
    """Prints rows as they come and keeps them."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Row]] = []
        self._group = ""

    def begin(self, group: str, *notes: str) -> None:
        """Print the heading of a group, and what its reader should know."""
        self._group = group
        print(f"\n## {group}")
        for note in notes:
            print(f"   {note}")
        print(_line(_HEADS))
        print(_line(tuple("-" * width for width in _WIDTHS)), flush=True)

    def add(self, row: Row) -> None:
        """Print and keep one row."""
        self.rows.append((self._group, row))
        ours = show(row.ours, row.unit) + (f" / {show(row.p99, row.unit)}" if row.p99 is not None else "")
        other = show(row.other, row.other_unit or row.unit) + " " + row.other_name if row.other is not None else ""
        ratio = "" if row.quotient is None else f"{row.quotient:.3g}"
        print(_line((row.name, ours, other, ratio, _target(row), _verdict(row))), flush=True)

    def note(self, text: str) -> None:
        """Print a remark below the rows."""
        print(f"   {text}", flush=True)

    def finish(self) -> None:
        """Print which targets were missed."""
        judged = [(group, row) for group, row in self.rows if row.met is not None]
        missed = [(group, row) for group, row in judged if not row.met]
        print(f"\n{len(judged) - len(missed)} of {len(judged)} targets met")
        for group, row in missed:
            print(f"   missed: {group}: {row.name}")

    def write_json(self, path: Path, facts: dict[str, Any]) -> None:
        """Write everything to a file."""
        rows = [
            {"group": group, **dataclasses.asdict(row), "ratio": row.quotient, "met": row.met}
            for group, row in self.rows
        ]
        path.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _line(cells: Iterable[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    sign = ">=" if row.target.at_least else "<="
    limit = f"{row.target.limit:g}" if row.target.on == "ratio" else show(row.target.limit, row.unit)
    return f"{sign} {limit}"


def _verdict(row: Row) -> str:
    return {None: "", True: "yes", False: "NO"}[row.met]
