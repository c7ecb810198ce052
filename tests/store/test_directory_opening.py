"""Opening a directory store: what is refused and stays as it was, who may read it, full disks, hostile names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backstay
from backstay.errors import InvalidInput, OutcomeUnknown, StoreError, StoreFull, StoreRefused
from backstay.store.directory.root import FORMAT, VERSION, path_of
from support.running import skip_unless_ci

OURS = re.compile(r"backstay\.json|control|store\.log|branches|branches/\d{8}\.log")
FULL_BYTES = 300 * 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def make_store(path: Path) -> None:
    with backstay.open(f"dir:{path}") as store:
        store.thread("thread").save({"n": 1}, id="first")


def save_often(path: Path) -> None:
    """Save so that all kinds of files are written to."""
    with backstay.open(f"dir:{path}") as store:
        for number in range(3):
            store.thread("thread").save({"log": ["x"] * number})


def files_of(path: Path) -> dict[str, bytes | None]:
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in sorted(path.rglob("*"))
    }


# What is not ours -------------------------------------------------------------------------------------------------


def make_foreign(path: Path) -> None:
    path.mkdir()
    (path / "diary.txt").write_text("not a store\n")


def make_foreign_with_a_branches_folder(path: Path) -> None:
    make_foreign(path)
    (path / "branches").mkdir()


def make_newer(path: Path) -> None:
    make_store(path)
    (path / "backstay.json").write_text(json.dumps({"format": FORMAT, "version": VERSION + 1}))


def make_other_format(path: Path) -> None:
    make_store(path)
    (path / "backstay.json").write_text(json.dumps({"format": "another store", "version": VERSION}))


def make_no_json(path: Path) -> None:
    make_store(path)
    (path / "backstay.json").write_text("{")


def make_list(path: Path) -> None:
    make_store(path)
    (path / "backstay.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    "make",
    [
        make_foreign,
        make_foreign_with_a_branches_folder,
        make_newer,
        make_other_format,
        make_no_json,
        make_list,
    ],
)
def test_a_directory_that_is_not_ours_is_refused_and_left_as_it_is(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    before = files_of(path)

    with pytest.raises(StoreRefused, match=str(path)):
        backstay.open(f"dir:{path}")

    assert files_of(path) == before


def test_a_file_in_the_place_of_the_directory_is_refused(path: Path) -> None:
    path.write_text("a file")

    with pytest.raises(StoreRefused, match=str(path)):
        backstay.open(f"dir:{path}")
    with pytest.raises(StoreError, match=str(path)):
        backstay.open(f"dir:{path}/below")
    assert path.read_text() == "a file"


@pytest.mark.parametrize("name", ["control", "store.log"])
def test_a_link_that_somebody_planted_is_not_followed(path: Path, tmp_path: Path, name: str) -> None:
    make_store(path)
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(target)

    with pytest.raises(StoreError):
        save_often(path)
    assert target.read_bytes() == b"precious"


def test_an_empty_directory_and_what_an_interrupted_opening_left_become_a_store(path: Path) -> None:
    path.mkdir()
    (path / "branches").mkdir()
    (path / "control").touch()
    make_store(path)

    with backstay.open(f"dir:{path}") as store:
        assert store.check().good["checkpoints"] == 1


# Names and URLs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("dir:relative", "relative"),
        ("dir:./relative/path", "relative/path"),
        ("dir://relative", "relative"),
        ("dir:///absolute/path", "/absolute/path"),
        ("dir:/absolute/path", "/absolute/path"),
    ],
)
def test_a_url_names_a_directory(url: str, expected: str) -> None:
    assert path_of(url) == Path(expected)


@pytest.mark.parametrize("url", ["dir:", "dir://"])
def test_a_url_without_a_directory_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="does not name a directory"):
        backstay.open(url)


def test_a_relative_directory_stays_the_same_when_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with backstay.open("dir:store") as store:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        store.thread("thread").save({"n": 1}, id="first")

        assert store.get("first") is not None
    assert list(elsewhere.iterdir()) == []
    assert (tmp_path / "store" / "backstay.json").exists()


HOSTILE = [
    "../x",
    "/etc/x",
    "..",
    ".",
    "x" * 300,
    "CON",
    "branches/00000001.log",
    "control",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "Case",
    "case",
    "a\nb",
    " ",
    "%2e%2e%2f",
    "\u202egpj",
]


def test_no_name_ever_becomes_a_path(path: Path) -> None:
    """Each is a thread, a branch, a namespace and an id, all different, or is refused; and only our files are there."""
    kept: list[str] = []
    for name in HOSTILE:
        with contextlib.suppress(InvalidInput), backstay.open(f"dir:{path}", namespace=name) as store:
            thread = store.thread(name)
            thread.save({"name": name}, id=name)
            thread.fork(name, branch=name, id=f"{name}!")
            kept.append(name)

    for name in kept:
        with backstay.open(f"dir:{path}", namespace=name) as store:
            found = store.thread(name).latest()
            assert found is not None
            assert (found.id, found.state) == (name, {"name": name})
            forked = store.thread(name, branch=name).latest()
            assert forked is not None
            assert forked.id == f"{name}!"
    assert len(kept) >= 10
    assert [name for name in files_of(path) if not OURS.fullmatch(name)] == []
    assert sorted(each.name for each in path.parent.iterdir()) == ["store"]


def test_a_name_with_nul_is_refused_before_anything_is_written(path: Path) -> None:
    with backstay.open(f"dir:{path}") as store:
        before = files_of(path)
        with pytest.raises(InvalidInput):
            store.thread("a\0b").save({"n": 1})
        with pytest.raises(InvalidInput):
            store.thread("thread").save({"n": 1}, id="a\0b")
        assert files_of(path) == before
    with pytest.raises(InvalidInput):
        backstay.open(f"dir:{path}\0x")


# Who may read and write -------------------------------------------------------------------------------------------


def test_only_the_owner_can_read_any_of_the_files_whatever_the_umask(path: Path) -> None:
    usual = os.umask(0)
    try:
        with backstay.open(f"dir:{path}") as store:
            thread = store.thread("thread")
            for number in range(3):
                thread.save({"log": ["x"] * number}, id=f"c{number}")
            thread.delete_checkpoint("c0")
            store.compact()
            modes = {str(each.relative_to(path)): stat.S_IMODE(each.stat().st_mode) for each in path.rglob("*")}
    finally:
        os.umask(usual)

    folders = {"branches"}
    assert modes.keys() > folders | {"store.log", "control", "backstay.json"}
    assert modes == {name: 0o700 if name in folders else 0o600 for name in modes}
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Make a directory read-only: by its mode, or, for root, who may write anyway, by a read-only mount."""
    if os.geteuid():
        for each in (path, *path.rglob("*")):
            each.chmod(0o500 if each.is_dir() else 0o400)
        yield
        for each in (path, *path.rglob("*")):
            each.chmod(0o700 if each.is_dir() else 0o600)
        return
    done = subprocess.run(["mount", "--bind", str(path), str(path)], capture_output=True, check=False)
    if done.returncode:
        skip_unless_ci(f"root may write anywhere and cannot mount here: read-only directories ({done.stderr!r})")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_all_can_be_read_in_a_read_only_directory_and_nothing_written(path: Path) -> None:
    make_store(path)
    before = files_of(path)
    with read_only(path), backstay.open(f"dir:{path}") as store:
        found = store.thread("thread").latest()
        assert found is not None
        assert found.state == {"n": 1}
        assert store.check()
        for write in (
            lambda: store.thread("thread").save({"n": 2}),
            lambda: store.thread("thread").tag("first", "x"),
            lambda: store.thread("thread").delete(),
            store.compact,
        ):
            with pytest.raises(StoreError, match="is read-only for this process"):
                write()

    assert files_of(path) == before
    make_another = backstay.open(f"dir:{path}")
    assert make_another.thread("thread").save({"n": 2}).parent_id == "first"
    make_another.close()


def test_a_copy_without_its_control_file_can_be_read_in_a_read_only_directory(path: Path) -> None:
    make_store(path)
    (path / "control").unlink()
    with read_only(path), backstay.open(f"dir:{path}") as store:
        assert store.get("first") is not None
        assert store.check()


def fill_up(thread: backstay.Thread, saved: list[str]) -> None:
    while len(saved) < 100:
        thread.latest()
        saved.append(thread.save({"noise": os.urandom(8000)}).id)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    options = f"size={FULL_BYTES},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False)
    if done.returncode:
        skip_unless_ci(f"a small disk cannot be mounted here: full disks are not tested ({done.stderr!r})")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_told_and_loses_nothing_and_the_store_works_again_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk), backstay.open(f"dir:{disk}/store") as store:
        for number in range(2):
            (disk / f"ballast {number}").write_bytes(bytes(FULL_BYTES // 4))
        thread = store.thread("thread")
        saved: list[str] = []
        for number in range(2):
            with pytest.raises((StoreFull, OutcomeUnknown), match="No space"):
                fill_up(thread, saved)
            with backstay.open(f"dir:{disk}/store") as other:
                assert [meta.id for meta in other.thread("thread").history()] == saved[::-1]
                assert other.check()
            space = os.statvfs(disk)
            assert space.f_bavail * space.f_bsize < 16384, "it is full while there is space"
            (disk / f"ballast {number}").unlink()
        thread.latest()
        thread.save({"noise": os.urandom(8000)}, id="at last")
        assert len(saved) > 10
        assert store.check()


@pytest.mark.parametrize(
    "said",
    [
        "[" * 4000,
        '{"a":' * 800,
        "[" * 1_000_000,
        "7",
        "[]",
        '"x"',
        "{}",
        '{"format": [], "version": {}}',
        " " * 5000,
        "",
    ],
    ids=lambda said: f"{said[:5]} {len(said)}",
)
def test_a_backstay_json_of_any_content_is_refused_with_an_error_of_ours(path: Path, said: str) -> None:
    backstay.open(f"dir:{path}").close()
    (path / "backstay.json").write_text(said, encoding="utf-8")

    with pytest.raises(StoreRefused):
        backstay.open(f"dir:{path}")
    assert (path / "backstay.json").read_text(encoding="utf-8") == said
