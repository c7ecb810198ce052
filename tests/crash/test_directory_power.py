"""The power fails at any moment of a story on a directory store, and leaves any part of what was not synced.

Every state of the disk that ``power`` enumerates must open, hold all that was acknowledged before the cut, and take the
next save. Then the same for a cut while a store is opened that a first cut left; and for disks that failed before.
Stores that sync too little, or too late, must be noticed.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backstay.store import atomic
from backstay.store.base import Removed
from backstay.store.directory import logs
from backstay.store.directory.control import RingEntry
from backstay.store.directory.encoding import encode
from backstay.store.directory.frame import FILE_HEAD_BYTES, HEAD_BYTES
from backstay.store.directory.rewrite import log_of
from backstay.store.directory.store import DirectoryStore
from backstay.store.memory.mutations import Mutation
from support.crash.directory_story import Story, check, folder_in_memory, prepare, tried
from support.crash.power import Cuts, Op, Recorder, placed
from support.running import Show, effort

SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))
STATES_A_STEP = max(2, effort())
SECOND_CUTS = 2 * effort()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with folder_in_memory(tmp_path) as made:
        yield made


def _steps(told: list[str]) -> tuple[set[str], dict[str, str]]:
    begun = {event.removeprefix("begin ") for event in told if event.startswith("begin ")}
    return begun, {event.removeprefix("done "): "" for event in told if event.startswith("done ")}


def cuts_in(folder: Path) -> Cuts:
    return Cuts(folder, SEED, lambda place, told, _: check(f"dir:{place}/store", *_steps(told)))


def record(folder: Path, patch: pytest.MonkeyPatch, fails: Callable[[str, str], None] | None = None) -> list[Op]:
    """Tell the story and return all that was done to the disk."""
    with placed(folder) as place, patch.context() as patched:
        recorder = Recorder(place)
        recorder.before = fails or recorder.before
        recorder.install(patched.setattr)
        story = Story(f"dir:{place}/store")
        for step, function in story.steps():
            recorder.told(f"begin {step}")
            tried(story, step, function, lambda _: None)
            recorder.told(f"done {step}")
        return recorder.ops


@pytest.mark.effort
def test_no_power_cut_loses_what_was_acknowledged(folder: Path, monkeypatch: pytest.MonkeyPatch, show: Show) -> None:
    prepare(patch=monkeypatch.setattr, in_parts=False)
    ops = record(folder, monkeypatch)
    cuts = cuts_in(folder)

    cuts.everywhere(ops, STATES_A_STEP)

    show("power cuts", f"seed {SEED}, {len(ops)} operations, {cuts.tried} states, {len(cuts.broken)} broken")
    assert cuts.broken == []
    assert cuts.tried >= min(1000, 100 * effort())


@pytest.mark.effort
def test_nor_does_another_cut_while_the_store_is_opened_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, show: Show
) -> None:
    prepare(patch=monkeypatch.setattr, in_parts=False)
    first, second = cuts_in(folder), cuts_in(folder)
    first.everywhere(record(folder, monkeypatch), 3, share=min(0.5, 0.1 * effort()))
    for tree, told in random.Random(SEED).sample(first.states, SECOND_CUTS):
        with placed(folder, tree) as place, monkeypatch.context() as patched:
            recorder = Recorder(place, tree)
            recorder.install(patched.setattr)
            check(f"dir:{place}/store", *_steps(told))
        second.everywhere(recorder.ops, 3, tree, told, share=0.5)

    show("second power cuts", f"seed {SEED}, {second.tried} states, {len(second.broken)} broken")
    assert second.broken == []
    assert second.tried >= min(400, 10 * SECOND_CUTS)


@pytest.mark.effort
@pytest.mark.parametrize(("call", "every"), [("pwrite", 13), ("fdatasync", 4), ("fsync", 5)])
def test_nor_does_a_cut_after_the_disk_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, show: Show, call: str, every: int
) -> None:
    """A failed sync throws away what it should have written."""
    prepare(patch=monkeypatch.setattr, in_parts=False)
    failed: list[str] = []
    calls = 0

    def fails(name: str, path: str) -> None:
        nonlocal calls
        calls += name == call
        if name == call and calls % every == every - 1:
            failed.append(path)
            raise OSError(errno.EIO, "the disk failed")

    ops = record(folder, monkeypatch, fails)
    cuts = cuts_in(folder)
    cuts.everywhere(ops, 4, share=min(0.5, 0.05 * effort()))

    show(f"power cuts after failures of {call}", f"{len(failed)} failures, {cuts.tried} states, 0 broken")
    assert len(failed) >= 3, "the disk did not fail"
    assert cuts.broken == []
    assert cuts.tried >= min(100, 10 * effort())


# Stores that sync too little --------------------------------------------------------------------------------------


class _Without:
    """``os`` without one of its functions."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == self._name else getattr(os, name)


def _publish_first(patch: pytest.MonkeyPatch) -> None:
    real = DirectoryStore._apply

    def keep(self: DirectoryStore, fact: Mutation) -> Removed:
        home, number = log_of(fact, self._tables), self._state.last + 1
        log = self._logs.known.get(home)
        if log is not None:
            end = log.end + HEAD_BYTES + sum(map(len, encode(fact)))
            self._root.control.publish(self._state._replace(last=number), RingEntry(number, home, end, log.mark))
        return real(self, fact)

    patch.setattr(DirectoryStore, "_apply", keep)


def _believe_old_notes(patch: pytest.MonkeyPatch) -> None:
    real = logs.Logs.recover

    def recover(self: logs.Logs, number: int, at: int, record_number: int) -> RingEntry | None:
        entry = real(self, number, at, record_number)
        log = self.look(number) if self.path(number).exists() else None
        if entry is None and log is not None:
            self.cut(log, max(at, FILE_HEAD_BYTES))
        return entry

    patch.setattr(logs.Logs, "recover", recover)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "does not sync a new name": lambda patch: patch.setattr(logs, "sync_directory", lambda _: None),
    "does not sync records": lambda patch: patch.setattr(logs, "os", _Without("fdatasync")),
    "does not sync a log written anew": lambda patch: patch.setattr(atomic, "os", _Without("fsync")),
    "publishes before it syncs": _publish_first,
    "believes old notes": _believe_old_notes,
}


@pytest.mark.effort(2)
@pytest.mark.parametrize("mutant", BROKEN)
def test_a_store_that_syncs_too_little_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, show: Show, mutant: str
) -> None:
    prepare(patch=monkeypatch.setattr, in_parts=False)
    BROKEN[mutant](monkeypatch)
    cuts = cuts_in(folder)

    cuts.everywhere(record(folder, monkeypatch), 2, share=0.6)

    show(f"a store that {mutant}", f"{cuts.tried} states, {len(cuts.broken)} broken")
    assert cuts.broken
