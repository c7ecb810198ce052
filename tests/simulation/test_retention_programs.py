"""Random programs with prunes: no call or effect is repeated because its record was deleted."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.operations import obsolete, retention
from backstay.operations.ledger import NodePlace
from backstay.operations.obsolete import Dropped
from backstay.operations.runs import loop_run_of
from support.running import RAM_FOLDER, Show, effort
from support.simulation.retention_programs import RetentionProgram

FIXED, FRESH = max(12, 8 * effort()), 2 * effort()
KINDS = ("graph", "loop")
MUST_HAPPEN = {
    "graph": {"run completed", "run failed", "run Killed", "run interrupted"}
    | {"replay completed", "replay failed", "rewind done", "fork done", "drop 1"},
    "loop": {"run completed", "run Killed", "run Stop", "rewind done", "fork done", "drop_head 1", "save done"},
}
"""Programs in which these do not come up prove nothing about them."""


def played(url: str, kind: str, seed: int, drops: bool) -> RetentionProgram:
    with pytest.MonkeyPatch.context() as patch, backstay.open(url) as store:
        if not drops:
            patch.setattr(retention, "drop_obsolete", lambda *args: Dropped())
        program = RetentionProgram(store, kind, seed)
        program.play()
        assert store.check()
    return program


def compare(url: str, kind: str, seed: int) -> RetentionProgram:
    """Play a program with and without dropped records; both must do the same to the world."""
    kept, program = played("memory:", kind, seed, drops=False), played(url, kind, seed, drops=True)
    assert program.world.log == kept.world.log, f"RetentionProgram({kind!r}, {seed})"
    return program


@pytest.mark.effort
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_or_effect_is_repeated_because_its_record_was_pruned(kind: str, show: Show) -> None:
    fresh = random.SystemRandom().randrange(FIXED, 2**32)
    did: Counter[str] = Counter()
    pruned = 0
    for seed in (*range(FIXED), *range(fresh, fresh + FRESH)):
        with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None) as folder:
            url = ("memory:", "memory:", str(Path(folder) / "agent.db"), f"dir:{folder}/logs")[seed % 4]
            program = compare(url, kind, seed)
            did.update(program.did)
            pruned += program.pruned
    show(f"records pruned in random programs of a {kind}", f"{pruned}, fresh seeds from {fresh}")

    assert pruned > 10 * FIXED
    assert did.keys() >= MUST_HAPPEN[kind]


def _always(needs: Any, record: Any, place: Any) -> bool:
    return True


def _one_more(needs: Any, record: Any, place: Any) -> bool:
    near = (
        place._replace(visit=place.visit - 1)
        if isinstance(place, NodePlace)
        else place._replace(iteration=place.iteration - 1)
    )
    return bool(_IS_OBSOLETE(needs, record, near))


def _only_newest(needs: Any, metas: Any) -> Any:
    return [needs._load(metas[-1])] if metas else []


def _without_sources(needs: Any, branch: Any, checkpoint: Any) -> None:
    checkpoint.run["effects_from"] = []
    _ADD_LINES(needs, branch, checkpoint)


def _newest_turn(needs: Any, branch: Any, meta: Any) -> None:
    found = loop_run_of(meta)
    if found is not None:
        known = needs._turns.get((branch, found.number), 0)
        needs._turns[branch, found.number] = max(known, found.iteration)


_IS_OBSOLETE, _ADD_LINES = obsolete._Needs.is_obsolete, obsolete._Needs._add_lines
MUTANTS: list[tuple[str, str, Callable[..., Any]]] = [
    ("graph", "is_obsolete", _always),
    ("graph", "is_obsolete", _one_more),
    ("graph", "_oldest_of_lines", _only_newest),
    ("graph", "_add_lines", _without_sources),
    ("loop", "is_obsolete", _always),
    ("loop", "is_obsolete", _one_more),
    ("loop", "_add_turn", _newest_turn),
]
"""Wrong rules, each of which some program must notice."""


@pytest.mark.effort(2)
@pytest.mark.parametrize(("kind", "name", "wrong"), MUTANTS)
def test_a_wrong_rule_is_noticed(
    kind: str, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obsolete._Needs, name, wrong)
    for seed in range(200):
        try:
            compare("memory:", kind, seed)
        except AssertionError:
            return
    pytest.fail("no program noticed it")
