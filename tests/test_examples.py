"""Each example fails half-way when it is first run; the second run must go on from there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def test_the_plain_loop_goes_on_where_it_failed(tmp_path: Path) -> None:
    assert run("plain_loop.py", tmp_path) == ["step 1: Book a train", "step 2: Book a hotel"]
    assert run("plain_loop.py", tmp_path) == ["step 3: Pack warm clothes", "step 4: Done", "Nothing is left to do."]
    assert run("plain_loop.py", tmp_path) == ["Nothing is left to do."]


def test_the_async_agents_go_on_where_they_failed(tmp_path: Path) -> None:
    first, second = run("async_loop.py", tmp_path), run("async_loop.py", tmp_path)

    for city in ("Oslo", "Turku", "Riga"):
        assert [line for line in first if line.startswith(city)] == [
            f"{city}, step 1: Book a train",
            f"{city}, step 2: Book a hotel",
            f"{city} is at step 2",
        ]
        assert [line for line in second if line.startswith(city)] == [
            f"{city}, step 3: Pack warm clothes",
            f"{city}, step 4: Done",
            f"{city} is at step 4",
        ]


def test_the_plain_loop_needs_three_lines_of_ours() -> None:
    text = (EXAMPLES / "plain_loop.py").read_text(encoding="utf-8")

    assert [line.split("# ")[1] for line in text.splitlines() if line.rstrip().endswith(("open", "load", "save"))] == [
        "1: open",
        "2: load",
        "3: save",
    ]
