"""The files of a store are taken away in the middle of a run: the run says so, and loses nothing that it reported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import backstay
from backstay import Graph
from backstay.engine.events import CheckpointSaved
from backstay.errors import Corrupted, StoreError
from support.engine.event_log import EventLog


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def move(path: Path) -> None:
    os.rename(path, path.with_name("moved"))


def move_the_folder_around_it(path: Path) -> None:
    os.rename(path.parent, path.parent.with_name("moved"))


@pytest.mark.parametrize("kind", ["sqlite", "dir"])
@pytest.mark.parametrize("take_away", [remove, move, move_the_folder_around_it])
def test_a_run_ends_with_an_error_when_its_store_is_taken_away(
    tmp_path: Path, kind: str, take_away: Callable[[Path], None]
) -> None:
    path = tmp_path / "folder" / "agent"
    path.parent.mkdir()
    store = backstay.open(str(path) if kind == "sqlite" else f"dir:{path}")
    log, taken_at = EventLog(), []
    graph = Graph("count")

    @graph.node
    def step(state: dict[str, int]) -> dict[str, int]:
        if state["n"] == 3:
            take_away(path)
            taken_at.append(len(log.of(CheckpointSaved)))
        return {"n": state["n"] + 1}

    graph.edge("step", "step", when=lambda state: state["n"] < 10, name="more")
    graph.start("step")
    graph.end("step")

    with pytest.raises(StoreError, match="while the store was open") as caught:
        graph.run_sync(store.thread("t"), {"n": 0}, on_event=log)

    assert str(path) in str(caught.value)
    assert caught.value.hint is not None
    assert len(log.of(CheckpointSaved)) == taken_at[0]  # nothing was acknowledged afterwards
    with pytest.raises(StoreError):
        store.thread("t").latest()
    store.close()


def test_a_run_ends_with_an_error_when_the_log_of_its_branch_is_removed(tmp_path: Path) -> None:
    store = backstay.open(f"dir:{tmp_path / 'agent'}")
    graph = Graph("one")

    @graph.node
    def act(state: dict[str, int]) -> None:
        for each in (tmp_path / "agent" / "branches").iterdir():
            each.unlink()

    graph.start("act")
    graph.end("act")

    with pytest.raises(Corrupted, match="while the store was open"):
        graph.run_sync(store.thread("t"), {})
    store.close()
