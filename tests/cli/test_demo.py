"""The command as users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.cli import demo as demo_module
from backstay.cli.demo import DemoFailed, DemoProcess
from backstay.cli.main import wants_color
from backstay.cli.worker import THREAD, paid, pay, work

COMMAND = [sys.executable, "-c", "from backstay.cli.main import main; main()"]
ESCAPE = "\x1b"


def environment(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return clean | extra


def backstay_command(*arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=environment(**extra), capture_output=True, text=True, check=False
    )


def facts_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_version_is_one_line(tmp_path: Path) -> None:
    done = backstay_command("--version", cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"backstay {backstay.__version__}\n", "")


def test_help_names_every_command(tmp_path: Path) -> None:
    done = backstay_command("--help", cwd=tmp_path)

    assert done.returncode == 0
    assert "demo" in done.stdout


def test_starting_the_command_imports_only_click_and_the_version(tmp_path: Path) -> None:
    """An empty package replaces ``backstay``, so that only the imports of the command itself count."""
    script = (
        "import sys, types; package = types.ModuleType('backstay'); package.__path__ = [sys.argv[1]];"
        "sys.modules['backstay'] = package; import backstay.cli.main;"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('backstay', 'rich', 'sqlite3')))"
    )
    package = str(Path(backstay.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, package], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["backstay", "backstay.cli", "backstay.cli.main", "backstay.version"]


@pytest.mark.crash
def test_the_demo_observes_everything_it_claims(tmp_path: Path) -> None:
    done = backstay_command("demo", "--json", cwd=tmp_path, FORCE_COLOR="1")

    assert (done.returncode, done.stderr) == (0, "")
    facts = facts_of(done)
    assert (facts["ok"], facts["failed"], facts["verify_ok"]) == (True, [], True)
    assert facts["killed_by_signal"] == signal.SIGKILL
    assert facts["resumed_at_step"] == facts["killed_in_step"] == 7
    assert (facts["steps"], facts["paid_calls"], facts["repeated_paid_calls"]) == (12, 6, 0)
    assert {facts["conflict"]["winner"], facts["conflict"]["loser"]} == {"worker A", "worker B"}
    assert facts["ratio"] > 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.crash
def test_the_plain_text_fits_eighty_columns_and_has_no_colour(tmp_path: Path) -> None:
    done = backstay_command("demo", cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "was ended by signal 9" in done.stdout


@pytest.mark.crash
def test_a_kept_store_can_be_opened_with_the_lines_shown(tmp_path: Path) -> None:
    done = backstay_command("demo", "--path", "kept.db", "--color", "always", cwd=tmp_path, NO_COLOR="1")
    assert ESCAPE in done.stdout  # --color overrides NO_COLOR

    plain = backstay_command("demo", "--path", "other.db", cwd=tmp_path)
    lines = plain.stdout.splitlines()[-3:]
    shown = "\n".join(line.strip() for line in lines).replace("other.db", "kept.db")
    tried = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert tried.stdout.startswith("south: 40 for 11.60\n")
    with backstay.open(tmp_path / "kept.db") as store:
        assert store.check()


def test_a_file_that_exists_is_never_written_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")

    done = backstay_command("demo", "--path", "mine.txt", cwd=tmp_path)

    assert (done.returncode, done.stdout, mine.read_text()) == (2, "", "precious")
    assert "mine.txt exists" in done.stderr


def test_a_missing_directory_is_wrong_usage(tmp_path: Path) -> None:
    done = backstay_command("demo", "--path", "no/where.db", cwd=tmp_path)

    assert done.returncode == 2
    assert "there is no directory no" in done.stderr


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()

        assert process.stderr.read() == ""


def test_ctrl_c_ends_it_with_130_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for _ in range(5):  # on a busy machine the demo may be over before this process gets to send the signal
        with subprocess.Popen(
            [*COMMAND, "demo"],
            cwd=tmp_path,
            env=environment(TMPDIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert any("step  1" in line for line in process.stdout)  # its child is at work
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        if process.returncode != 0:
            break

    assert (process.returncode, errors.strip()) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_does_not_hold_is_named_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_module, "STEPS", 14)

    code = demo_module.run(as_json=True, path=None)

    shown = capsys.readouterr()
    assert code == 1
    assert json.loads(shown.out)["ok"] is False
    assert "failed: it resumed at step 7" in shown.err


def test_a_child_that_fails_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "not-a-store.db").write_text("just text, and enough of it to be no database" * 50)

    with (
        DemoProcess("race", str(tmp_path / "not-a-store.db"), "worker A") as child,
        pytest.raises(DemoFailed, match="StoreRefused"),
    ):
        child.next_fact()


def test_the_ledger_would_show_a_call_that_was_paid_twice(tmp_path: Path) -> None:
    ledger = tmp_path / "paid.txt"
    with backstay.open("memory:") as store:
        events = list(work(store.thread(THREAD), ledger))
        again = list(work(store.thread(THREAD), ledger))
    assert (len(paid(ledger)), events[-1]["step"], again) == (6, 12, [])

    pay(ledger, "main", 2)

    assert len(paid(ledger)) - len(set(paid(ledger))) == 1


@pytest.mark.parametrize(
    ("choice", "environ", "is_terminal", "expected"),
    [
        (None, {}, True, True),
        ("auto", {}, False, False),
        (None, {"NO_COLOR": ""}, True, True),
        (None, {"NO_COLOR": "1"}, True, False),
        (None, {"FORCE_COLOR": "1"}, False, True),
        (None, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_the_option_overrides_no_color_then_force_color_then_the_terminal(
    choice: str | None, environ: dict[str, str], is_terminal: bool, expected: bool
) -> None:
    assert wants_color(choice, environ, is_terminal) is expected
