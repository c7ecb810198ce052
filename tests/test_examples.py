"""Each example fails half-way when it is first run; the second run must go on from there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("example", ["graph_approval.py", "langgraph_agent.py"])
def test_the_approved_mail_goes_out_once_although_the_process_is_killed(tmp_path: Path, example: str) -> None:
    asked, killed, ended, again = (outcome(example, tmp_path) for _ in range(4))

    assert asked[0] == 0
    assert asked[1][0].startswith("It asks: {'tool': 'send_mail'")
    assert killed == (-signal.SIGKILL, ["The mail is sent. Now the process is killed. Run me again."])
    assert ended == (0, ["Done: mail sent to bob@example.org (1 mail in the outbox)"])
    assert again == (0, ["Nothing is left to do."])


def test_the_research_is_not_paid_for_again_when_it_is_run_from_its_middle(tmp_path: Path) -> None:
    first, second = run("research_graph.py", tmp_path), run("research_graph.py", tmp_path)

    assert first[0] == "short: 6 facts (7 calls paid)"
    assert first[2] == "long: 6 facts (1 calls paid)"
    assert second == ["~ /style: 'short' → 'long'", "~ /report: 'short: 6 facts' → 'long: 6 facts'"]
    assert first[3:] == second


def outcome(name: str, cwd: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines()
