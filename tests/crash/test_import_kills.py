"""SIGKILL of an import at every call of the store that changes something, before it or after it by turns."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from backstay.bundle import export_bundle, import_bundle
from backstay.model.checkpoint import Write
from support.processes import Nursery
from support.running import RAM_FOLDER, Show, effort, spread

KILLS = 6 * effort()


def make_bundle(path: Path) -> None:
    """Export threads with branches that take turns, writes, interrupts in every state, and effects."""
    with backstay.open("memory:") as store:
        for name in ("a", "b"):
            thread = store.thread(name)
            thread.save({"messages": ["hello " * 100]}, tags=["first"])
            for turn in range(3):
                thread.append({"messages": [f"turn {turn} " * 30]})
            head = thread.latest()
            assert head is not None
            branch = thread.fork(head, branch="other")
            branch.append({"messages": ["there"]})
            thread.append({"messages": ["here"]})
            thread.write(head, [Write("task", 0, "channel", 1)])
            for number in range(3):
                record = thread.interrupt(head, prompt=f"question {number}")
                if number:
                    record = thread.decide(record, "approve", by="me")
                if number == 2:
                    thread.consume(record, by="worker")
            thread.effect("mail", lambda: "sent")
        export_bundle(store, path)


@pytest.fixture
def ram() -> Iterator[Path]:
    """Return a folder in memory, if there is one: a kill leaves the page cache alone, so a disk would only be slow."""
    folder = Path(tempfile.mkdtemp(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.effort
@pytest.mark.parametrize("kind", ["sqlite", "dir"])
def test_an_import_that_is_killed_anywhere_is_completed_by_the_next(
    kind: str, tmp_path: Path, ram: Path, show: Show
) -> None:
    bundle, again, counted = ram / "all.bundle", ram / "again.bundle", tmp_path / "counted"
    make_bundle(bundle)
    folder = ram / "place"
    url = str(folder / "store.db") if kind == "sqlite" else f"dir:{folder / 'store'}"
    partial = 0
    with Nursery() as nursery:

        def run(deadline: int, after: bool) -> int:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            counted.unlink(missing_ok=True)
            given = [url, str(bundle), deadline, after]
            return nursery.wait(nursery.start("support.crash.import_victims:import_until", given, str(counted)))

        assert run(0, False) == 0
        calls = int(counted.read_text(encoding="utf-8"))
        points = spread(range(1, calls + 1), KILLS)
        for number, deadline in enumerate(points):
            assert run(deadline, after=number % 2 == 1) == -signal.SIGKILL
            with backstay.open(url) as store:
                assert store.check(), "what an import has stored is whole at any moment"
                report = import_bundle(bundle, store)
                assert report, str(report)
                assert (report.stored + report.present, report.notes) == (14, ())
                partial += 0 < report.present < 14
                export_bundle(store, again)
            assert again.read_bytes() == bundle.read_bytes()
    show(f"imports killed ({kind})", f"{len(points)} at {calls} calls, {partial} of them half done")

    assert partial > min(KILLS // 6, 4)
