"""``AtomicFileWriter``: two switches over one way of writing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from backstay.compat.sessions import AtomicFileWriter
from backstay.errors import Corrupted, InvalidInput, StoreError
from support.session_records import Fault


def test_it_makes_parents_and_writes_text_or_bytes(tmp_path: Path) -> None:
    writer = AtomicFileWriter()
    path = tmp_path / "a" / "b" / "c.json"

    writer.write_atomic(path, "né")
    assert path.read_bytes() == "né".encode()
    writer.write_atomic(str(path), b"\xff")
    assert path.read_bytes() == b"\xff"

    assert (writer.sync_on_write, writer.verify_write) == (True, True)
    assert os.listdir(path.parent) == ["c.json"]


def test_without_its_first_switch_it_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, "fsync", lambda path: True, errno.EIO)

    AtomicFileWriter(sync_on_write=False).write_atomic(tmp_path / "a", "x")
    assert fault.fired == 0
    with pytest.raises(StoreError):
        AtomicFileWriter().write_atomic(tmp_path / "a", "y")
    assert fault.fired == 1
    assert (tmp_path / "a").read_text() == "x"


def test_without_its_second_switch_it_does_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync_of_a_failing_disk(descriptor: int) -> None:
        real(descriptor)
        if os.fstat(descriptor).st_size == 3:
            os.pwrite(descriptor, b"?", 0)

    monkeypatch.setattr(os, "fsync", fsync_of_a_failing_disk)

    with pytest.raises(Corrupted):
        AtomicFileWriter().write_atomic(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == []
    AtomicFileWriter(verify_write=False).write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "?ew"


@pytest.mark.parametrize("path", ["", "/", ".", ".."])
def test_a_path_that_names_no_file_in_a_directory_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match="not the path of a file"):
        AtomicFileWriter().write_atomic(path, "x")


def test_removing_what_is_gone_is_success(tmp_path: Path) -> None:
    writer = AtomicFileWriter()
    writer.write_atomic(tmp_path / "a", "x")

    assert writer.safe_remove(tmp_path / "a")
    assert not writer.safe_remove(tmp_path / "a")
