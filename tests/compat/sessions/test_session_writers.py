"""Several writers of one session, and writers that die: nothing acknowledged is lost, and nobody waits in the loop."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backstay.compat.sessions import CheckpointWriter, SyncCheckpointWriter
from backstay.errors import IdTaken
from support.crash.session_victim import SESSION, check
from support.processes import Nursery, child_environment
from support.running import Show
from support.session_records import file_of, fill, folder, names, record

VICTIMS = 10

SAVES = """
import sys
from backstay.compat.sessions import CheckpointData, SyncCheckpointWriter
root, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
writer = SyncCheckpointWriter(root)
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    writer.save(CheckpointData(session_id="s1", checkpoint_id=f"{name}-{number}", iteration=number))
print(len(writer.problems), flush=True)
"""


def consistent(root: Path, count: int) -> None:
    """Check that so many checkpoints are there, in one order, with link and backups that fit it."""
    reader = SyncCheckpointWriter(root)
    metas = reader.list("s1")
    assert [meta.seq for meta in metas] == list(range(count, 0, -1))
    assert reader.scan("s1").damaged == ()
    report = reader.load_report("s1")
    assert (report.skipped, report.notes) == ((), ())
    assert report.data is not None
    assert report.data.checkpoint_id == metas[0].checkpoint_id
    assert len(names(root, ending=".backup")) == 3
    assert [name for name in names(root) if name.startswith(".")] == []


def test_processes_that_save_the_same_session_lose_nothing_and_agree_on_the_newest(tmp_path: Path) -> None:
    count = 15
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path), name, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        out, _ = worker.communicate()
        assert (worker.returncode, out) == (0, "0\n")

    consistent(tmp_path, 2 * count)
    order = [meta.checkpoint_id for meta in reversed(SyncCheckpointWriter(tmp_path).list("s1"))]
    for name in ("a", "b"):  # each one's own order is kept in the common one
        assert [one for one in order if one.startswith(name)] == [f"{name}-{number}" for number in range(count)]


def test_threads_that_share_a_writer_lose_nothing(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: writer.save(record(number)), range(1, 25)))

    consistent(tmp_path, 24)


def test_of_two_that_save_one_id_with_different_content_one_is_refused(tmp_path: Path) -> None:
    writers = [SyncCheckpointWriter(tmp_path) for _ in range(2)]
    start = threading.Barrier(2)

    def save(which: int) -> str | None:
        start.wait()
        try:
            return writers[which].save(record(1, iteration=which))
        except IdTaken:
            return None

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(save, range(2)))

    assert sorted(answers, key=str) == [None, "id-1"] or sorted(answers, key=str) == ["id-1", None]
    (meta,) = writers[0].list("s1")
    assert meta.iteration == answers.index("id-1")


def test_the_event_loop_runs_on_while_a_save_waits(tmp_path: Path) -> None:
    """Somebody else holds the session's lock: a save that waited for it in the loop would never see it released."""
    fill(tmp_path, 1)

    async def use() -> None:
        writer = CheckpointWriter(tmp_path)
        with (tmp_path / "s1" / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            saving = asyncio.create_task(writer.save(record(2)))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not saving.done()
            assert await writer.load("s1") == record(1)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert await saving == "id-2"

    asyncio.run(use())


def test_a_cancelled_save_is_whole_or_not_there_and_saving_again_settles_it(tmp_path: Path) -> None:
    async def use() -> None:
        writer = CheckpointWriter(tmp_path)
        for number in range(1, 13):
            task = asyncio.create_task(writer.save(record(number)))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await writer.save(record(number)) == f"id-{number}"

    asyncio.run(use())

    consistent(tmp_path, 12)


@pytest.mark.parametrize("deletes", [True, False])
def test_what_changes_between_the_list_and_the_read_makes_a_reader_look_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    other = fill(tmp_path, 1)
    real = os.listdir
    listed: list[list[str]] = []

    def listdir(path: Path) -> list[str]:
        found: list[str] = real(path)
        if not listed:  # and before this list is used, another process saves
            listed.append(found)
            other.save(record(2))
            if deletes:
                other.delete("s1", "id-1")
        return found

    monkeypatch.setattr(os, "listdir", listdir)

    report = SyncCheckpointWriter(tmp_path).load_report("s1")

    assert listed[0]
    assert report.data == record(2)
    assert (report.skipped, report.notes) == ((), ())


def test_a_reader_never_sees_a_session_without_a_newest_while_others_save_and_prune(tmp_path: Path) -> None:
    writer = fill(tmp_path, 1, max_checkpoints=2, max_backups=1)
    over = threading.Event()
    seen: list[int] = []

    def read() -> None:
        reader = SyncCheckpointWriter(tmp_path)
        while not over.is_set():
            found = reader.load("s1")
            assert found is not None
            seen.append(found.iteration)
        assert reader.problems == []

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for number in range(2, 40):
            writer.save(record(number))
        over.set()
        reading.result()

    assert seen == sorted(seen)
    assert len(seen) > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_and_its_parent_keep_each_other_out(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from support.session_records import fill, record\n"
        "from pathlib import Path\n"
        "writer = fill(Path(sys.argv[1]), 1)\n"
        "child = os.fork()\n"
        "for number in range(10):\n"
        "    writer.save(record(2 + 2 * number + (child == 0)))\n"
        "if child == 0:\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=child_environment())

    consistent(tmp_path, 21)


# Writers that die -------------------------------------------------------------------------------------------------


@pytest.mark.crash
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, show: Show) -> None:
    acknowledged = 0
    with Nursery() as nursery:
        for victim in range(VICTIMS):
            root, out = tmp_path / str(victim), str(tmp_path / f"{victim}.out")
            os.mkfifo(out)
            pid = nursery.start("support.crash.session_victim:run", [str(root), 1_000_000, victim % 2 == 1], out)
            with open(out, encoding="utf-8") as pipe:
                lines = [pipe.readline() for _ in range(2 + 2 * victim)]
                os.kill(pid, signal.SIGKILL)
                lines += pipe.readlines()
            assert nursery.wait(pid) == -signal.SIGKILL
            acknowledged += survived(root, lines)

    show("session files: kills", f"{VICTIMS}, {acknowledged} acknowledged, 0 lost")
    assert acknowledged > VICTIMS


def survived(root: Path, lines: list[str]) -> int:
    """Check that what a killed writer left holds what it said; return how many saves it had acknowledged."""
    told = [line.split() for line in lines if line.endswith("\n")]
    saved = {name for verb, name in told if verb == "ACK"}
    touched = {name for verb, name in told if verb == "DEL"}
    gone = {name for verb, name in told if verb == "GONE"}

    have, damaged = check(str(root))

    assert damaged == []
    assert saved - touched <= set(have)
    assert not gone & set(have)
    assert set(have) <= {name for verb, name in told if verb == "TRY"}
    writer = SyncCheckpointWriter(root)
    for name in writer.scan(SESSION).leftovers:
        os.utime(folder(root, SESSION) / name, (1e9, 1e9), follow_symlinks=False)
    writer.save(record(1, session=SESSION))
    assert writer.load(SESSION) == record(1, session=SESSION)
    assert writer.scan(SESSION).leftovers == ()
    assert writer.problems == []
    return len(saved)


def test_the_link_is_replaced_in_one_step_under_a_unique_hidden_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    renamed: list[tuple[str, str]] = []
    symlink, replace = os.symlink, os.replace

    def making(target: str, path: Path) -> None:
        assert "/" not in target
        made.append(path)
        symlink(target, path)

    def renaming(old: Path, new: Path) -> None:
        if new.name == "latest.json":
            assert not renamed or os.path.lexists(new)  # there is a link at every moment
            renamed.append((old.name, os.readlink(old)))
        replace(old, new)

    monkeypatch.setattr(os, "symlink", making)
    monkeypatch.setattr(os, "replace", renaming)
    fill(tmp_path, 3)

    assert [path.name for path in made] == [old for old, _ in renamed]
    assert [target for _, target in renamed] == [file_of(tmp_path, number).name for number in (1, 2, 3)]
    assert len({path.name for path in made}) == 3
    assert all(path.name.startswith(".tmp_latest_") and path.parent == folder(tmp_path) for path in made)
