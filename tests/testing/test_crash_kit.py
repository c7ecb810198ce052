"""The crash kit: graphs that survive every kill pass, wrong ones are caught, and each finding comes with its script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import InvalidInput
from backstay.store.base import Backend
from backstay.testing import CrashReport, crash
from backstay.testing.victim import WRITES
from backstay.thread import Decision
from support.crash import kit_graphs
from support.processes import child_environment
from support.running import Show, effort

KILLS = 70 * max(1, effort() // 5)
WRONG_KILLS = 24
HERE = "support.crash.kit_graphs"
READS = {
    *("head", "find", "branches", "forked", "fetch", "leases", "record", "records", "run", "runs", "count_runs"),
    *("sizes", "totals", "check", "backup", "close", "unread"),
}


def test_every_verb_of_the_store_is_known_to_write_or_not() -> None:
    verbs = {name for name in dir(Backend) if not name.startswith("_") and callable(getattr(Backend, name))}

    assert verbs == set(WRITES) | READS
    assert not set(WRITES) & READS


# Graphs that survive ----------------------------------------------------------------------------------------------

STEADY_MOMENTS = {
    *("before taking the lease", "after taking the lease", "before releasing the lease", "after releasing the lease"),
    *("before checkpoint", "after checkpoint", "before pending write", "after pending write"),
    *("before intent", "after intent", "before receipt", "after receipt"),
    *("before question", "after question", "before decision", "after decision", "before use of a decision"),
    *("start of node plan", "end of node plan", "line of node act", "start of effect send", "end of effect send"),
    *("after effect send", "start of effect square", "end of effect look"),
    *("start of call model", "end of call model", "after call model", "before result of a call"),
}


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("url", [None, pytest.param("dir:", marks=pytest.mark.effort(2))])
def test_a_graph_that_is_right_survives_kills_at_every_kind_of_moment(url: str | None, show: Show) -> None:
    report = crash(
        kit_graphs.steady, [{"topic": "otters"}], kills=KILLS, answers=kit_graphs.STEADY_ANSWERS, url=url, seed=7
    )

    show(f"kills of a graph, {url or 'sqlite'}", f"{report.kills.total()} in {report.runs} runs")
    assert report, report
    assert report.kills.total() >= KILLS
    assert set(report.kills) >= STEADY_MOMENTS
    assert report.notes == []
    assert str(report).splitlines()[0].endswith("nothing was lost, repeated or reordered")


@pytest.mark.crash
@pytest.mark.effort(2)
def test_async_nodes_are_killed_too() -> None:
    report = crash(f"{HERE}:swift", [{"topic": "a"}, {"topic": "b"}], kills=KILLS // 2)

    assert report, report
    assert {"end of effect send", "line of node second", "start of effect plain"} <= set(report.kills)


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize("program", [kit_graphs.chat, pytest.param(kit_graphs.achat, marks=pytest.mark.effort(2))])
def test_a_program_of_a_plain_loop_is_killed_too(program: Callable[..., Any]) -> None:
    report = crash(program, [{"log": []}], kills=KILLS // 2)

    assert report, report
    assert {"after checkpoint", "start of effect send", "end of effect send", "after receipt"} <= set(report.kills)


@pytest.mark.crash
def test_an_effect_in_doubt_twice_is_settled_by_what_happened_last() -> None:
    """It is not done when the first process dies, and done when the second one does."""
    report = crash(kit_graphs.chat, [{"log": []}], only=[("start of effect send", 1), ("before receipt", 2)])

    assert report, report
    assert report.kills == {"start of effect send": 1, "before receipt": 1}


@pytest.mark.crash
def test_a_function_may_return_the_graph_and_another_answer_the_questions() -> None:
    asked = []

    def answer(record: Any) -> Decision | None:
        asked.append(record.interrupt.node)
        return backstay.Answer("red") if record.interrupt.node == "look" else None

    report = crash(kit_graphs.make_steady, [{"topic": "otters"}], kills=5, answers=answer)

    assert report, report
    assert {"act", "look"} == set(asked)


# Wrong graphs -----------------------------------------------------------------------------------------------------

CAUGHT = {
    "writes_outside": ("done twice", "file 'outbox.txt' has 'hello' 2 times; undisturbed, once"),
    "draws_arguments": ("cannot resume", "EffectChanged"),
    "counts_in_memory": ("differs", "state key 'log' is [1, 2, "),
    "calls_what_costs": ("done twice", "file 'outbox.txt' has 'hello' 2 times; undisturbed, once"),
    "says_idempotent": ("done twice", "file 'outbox.txt' has 'hello' 2 times; undisturbed, once"),
    "looks_wrongly": ("done twice", "effect looks_wrongly/mail#1:send was done 2 times"),
    "follows_a_set": ("cannot resume", "EffectChanged"),
    "fails_after_a_kill": ("cannot resume", "FileExistsError"),
}


def found(report: CrashReport, kind: str, text: str) -> list[str]:
    return [each.script for each in report.findings if each.kind == kind and text in each.what]


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("writes_outside", "draws_arguments") else pytest.param(name, marks=pytest.mark.effort(2))
        for name in CAUGHT
    ],
)
def test_a_graph_that_is_wrong_is_caught_and_the_script_shows_it_again(name: str, tmp_path: Path) -> None:
    kind, text = CAUGHT[name]
    report = crash(f"{HERE}:{name}", [{"topic": "otters"}], kills=WRONG_KILLS)
    scripts = found(report, kind, text)

    assert not report
    assert scripts, report
    done = subprocess.run(
        [sys.executable, "-c", scripts[0]],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert kind in done.stdout
    assert text.partition("[")[0] in done.stdout


@pytest.mark.crash
def test_a_process_that_hangs_after_a_kill_is_a_run_that_never_ends() -> None:
    report = crash(f"{HERE}:hangs_after_a_kill", [{}], only=[("end of node once", 1)], timeout_s=2)

    assert [(each.kind, each.moments) for each in report.findings] == [("never ends", (("end of node once", 1),))]


@pytest.mark.crash
def test_what_only_the_world_shows_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "elsewhere"
    monkeypatch.setenv("ELSEWHERE", str(place))
    name, kills = f"{HERE}:writes_elsewhere", [("end of node write", 1)]
    blind = crash(name, [{}], only=kills)
    report = crash(name, [{}], only=kills, world=lambda: place.read_text(), reset=lambda: place.unlink(True))

    assert blind
    assert [(each.kind, each.what) for each in report.findings] == [
        ("differs", "the world is 'xx'; undisturbed, 'x'"),
    ]
    assert "# Add the world= of your test to the call." in report.findings[0].script


def test_a_graph_that_fails_undisturbed_is_reported_before_anything_is_killed() -> None:
    report = crash(kit_graphs.broken, [{}], kills=5)

    assert [each.kind for each in report.findings] == ["fails undisturbed"]
    assert "ValueError: no such topic" in report.findings[0].what
    assert report.kills.total() == 0


@pytest.mark.crash
@pytest.mark.effort(2)
def test_the_same_seed_kills_at_the_same_moments() -> None:
    one, same, other = (crash(f"{HERE}:swift", [{}], kills=12, seed=seed).kills for seed in (1, 1, 2))

    assert one == same != other


# Where the graph is -----------------------------------------------------------------------------------------------


def test_a_graph_of_a_test_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import backstay\nfrom backstay.testing import crash\n"
        "graph = backstay.Graph('g')\ngraph.node('a', lambda state: {'a': 1})\ngraph.start('a')\ngraph.end('a')\n"
        "if __name__ == '__main__':\n    report = crash(graph, [{}], kills=3)\n    print(bool(report), report.graph)\n"
    )
    done = subprocess.run([sys.executable, "agent.py"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == (f"True {tmp_path / 'agent.py'}:graph\n", "")


def test_a_call_while_the_module_is_imported_says_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import backstay\nfrom backstay.testing import crash\n"
        "graph = backstay.Graph('g')\ngraph.node('a', lambda state: {'a': 1})\ngraph.start('a')\ngraph.end('a')\n"
        "crash(graph, [{}], kills=3)\n"
    )
    done = subprocess.run([sys.executable, "agent.py"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert 'below if __name__ == "__main__"' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (backstay.Graph("local"), "is not a name of a module"),
        (lambda: kit_graphs.steady, "is not a name of a module"),
        ("no_such_module:graph", "cannot be imported"),
        (f"{HERE}:no_such_graph", "cannot be imported"),
        ("steady", "does not name a graph"),
        (7, "takes a graph, not int"),
    ],
)
def test_a_graph_that_cannot_be_imported_is_refused_with_what_to_write(graph: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        crash(graph, [{}])

    assert refused.value.hint


@pytest.mark.parametrize("options", [{"kills": 0}, {"url": "memory:"}, {"url": "agent.db"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        crash(kit_graphs.swift, [{}], **options)
    with pytest.raises(InvalidInput):
        crash(kit_graphs.swift, [])
