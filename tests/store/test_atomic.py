"""Files are replaced whole or not at all: whatever fails, and whenever the writer dies."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backstay.errors import Corrupted, OutcomeUnknown, StoreError, StoreFull
from backstay.store import atomic


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


class Fault:
    """A system call that fails at its n-th use; ``fired`` proves that it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, code: int, at: int = 1) -> None:
        self.fired = False
        self.calls = 0
        real: Callable[..., Any] = getattr(os, call)

        def failing(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                self.fired = True
                raise OSError(code, os.strerror(code))
            return real(*arguments, **named)

        monkeypatch.setattr(os, call, failing)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# Writing ----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"

    atomic.write_whole(path, b"first")
    atomic.write_whole(path, b"second")

    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["a.json"]


def test_the_order_is_write_sync_read_back_rename_sync_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append("sync the directory" if name == str(tmp_path) else "sync the file")
        sync(descriptor)

    def replace(old: Path, new: Path) -> None:
        done.append(f"rename, {old.read_bytes()!r}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)

    with atomic.replacing(tmp_path / "a", check=lambda path: done.append(f"check, {path.read_bytes()!r}")) as file:
        file.write(b"x" * 3)

    assert done == ["sync the file", "check, b'xxx'", "rename, b'xxx'", "sync the directory"]


def test_without_sync_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, "fsync", errno.EIO)

    atomic.write_whole(tmp_path / "a", b"x", sync=False)

    assert not fault.fired


@pytest.mark.parametrize(
    ("call", "code"), [("fsync", errno.EIO), ("fsync", errno.ENOSPC), ("replace", errno.EIO), ("open", errno.EACCES)]
)
def test_a_call_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    path = tmp_path / "a"
    atomic.write_whole(path, b"old")
    with monkeypatch.context() as patch:
        fault = Fault(patch, call, code)
        with pytest.raises(StoreFull if code == errno.ENOSPC else StoreError) as caught:
            atomic.write_whole(path, b"new")

    assert fault.fired
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_write_that_finds_no_space_leaves_the_old_file(tmp_path: Path) -> None:
    """A size limit of the process stands in for a full disk: the kernel itself refuses the write."""
    path = tmp_path / "a"
    atomic.write_whole(path, b"old")
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from backstay.errors import StoreError\n"
        "from backstay.store import atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    atomic.write_whole(Path(sys.argv[1]), b'x' * 100_000)\n"
        "except StoreError as error:\n"
        "    print(error.what)\n"
    )

    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)

    assert "File too large" in done.stdout
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_failed_sync_of_the_directory_is_an_unknown_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with monkeypatch.context() as patch:
        fault = Fault(patch, "fsync", errno.EIO, at=2)
        with pytest.raises(OutcomeUnknown, match="may undo the write"):
            atomic.write_whole(path, b"new")

    assert fault.fired
    assert names(tmp_path) == ["a"]


def test_an_error_of_the_block_leaves_the_old_file_and_comes_through(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic.write_whole(path, b"old")

    def interrupted() -> None:
        with atomic.replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_an_error_of_another_file_in_the_block_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"), atomic.replacing(tmp_path / "a") as file:
        file.write((tmp_path / "missing").read_bytes())

    assert names(tmp_path) == []


def test_what_reads_back_differently_is_not_put_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    atomic.write_whole(path, b"old")
    real = os.fsync

    def fsync_of_a_failing_disk(descriptor: int) -> None:
        real(descriptor)
        os.pwrite(descriptor, b"?", 0)  # what arrives on the disk is not what was written

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync_of_a_failing_disk)
        with pytest.raises(Corrupted, match="read back"):
            atomic.write_whole(path, b"new")

    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    path = tmp_path / "a"
    path.symlink_to(outside)

    atomic.write_whole(path, b"new")

    assert outside.read_bytes() == b"mine"
    assert not path.is_symlink()


@pytest.mark.usefixtures("no_umask")
def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    atomic.make_directory(tmp_path / "a" / "b")
    atomic.write_whole(tmp_path / "a" / "b" / "c", b"secret")

    modes = [stat.S_IMODE((tmp_path / part).stat().st_mode) for part in ("a", "a/b", "a/b/c")]
    assert modes == [0o700, 0o700, 0o600]


def test_no_descriptor_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))

    atomic.write_whole(tmp_path / "a", b"x")
    with monkeypatch.context() as patch:
        Fault(patch, "fsync", errno.EIO)
        with pytest.raises(StoreError):
            atomic.write_whole(tmp_path / "a", b"y")
    atomic.sweep(tmp_path)

    assert set(os.listdir("/proc/self/fd")) == before


# Directories ------------------------------------------------------------------------------------------------------


def test_every_new_directory_is_synced_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    sync, make = os.fsync, os.mkdir

    def fsync(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def mkdir(path: Path, mode: int) -> None:
        make(path, mode)
        done.append(("make", str(path)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "mkdir", mkdir)

    atomic.make_directory(tmp_path / "a" / "b")

    assert done == [
        ("make", str(tmp_path / "a")),
        ("sync", str(tmp_path)),
        ("make", str(tmp_path / "a" / "b")),
        ("sync", str(tmp_path / "a")),
    ]


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)

    atomic.make_directory(tmp_path)

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")

    with pytest.raises(StoreError, match="Not a directory"):
        atomic.make_directory(tmp_path / "a")


# Removing ---------------------------------------------------------------------------------------------------------


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")

    assert atomic.remove(tmp_path / "a", sync=True)
    assert not atomic.remove(tmp_path / "a", sync=True)


def test_removing_what_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    with pytest.raises(StoreError, match="cannot remove"):
        atomic.remove(tmp_path / "a")


# What crashes left ------------------------------------------------------------------------------------------------

DYING = """
import os, signal, sys
from pathlib import Path
from backstay.store import atomic
with atomic.replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_dead_writers_temporary_is_swept(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path / "a")], check=False)
    assert done.returncode == -9
    left = atomic.leftovers(tmp_path)
    assert len(left) == 1

    assert atomic.sweep(tmp_path) == left
    assert names(tmp_path) == []


def test_a_living_writers_temporary_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with atomic.replacing(path) as file:
        file.write(b"x")
        assert len(atomic.leftovers(tmp_path)) == 1
        assert atomic.sweep(tmp_path) == []

    assert path.read_bytes() == b"x"


def test_a_sweep_before_the_lock_costs_the_writer_another_name_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fchmod
    swept: list[Path] = []

    def fchmod(descriptor: int, mode: int) -> None:
        """Let a sweep come between the making of the first temporary and its lock."""
        real(descriptor, mode)
        if not swept:
            swept.extend(atomic.sweep(tmp_path))

    monkeypatch.setattr(os, "fchmod", fchmod)

    atomic.write_whole(tmp_path / "a", b"x")

    assert len(swept) == 1
    assert (tmp_path / "a").read_bytes() == b"x"
    assert names(tmp_path) == ["a"]


def test_a_sweep_leaves_links_directories_and_pipes_alone(tmp_path: Path) -> None:
    (tmp_path / f"{atomic.PREFIX}link").symlink_to(tmp_path)
    (tmp_path / f"{atomic.PREFIX}directory").mkdir()
    os.mkfifo(tmp_path / f"{atomic.PREFIX}pipe")

    assert atomic.sweep(tmp_path) == []
    assert len(names(tmp_path)) == 3
    assert atomic.sweep(tmp_path / "missing") == []
