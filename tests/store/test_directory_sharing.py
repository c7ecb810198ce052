"""Several handles on one directory, as several processes have them: none may write where the others no longer look."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import backstay
from backstay.store.base import BranchKey
from backstay.store.directory import store as directory
from backstay.store.directory.rewrite import rewrite
from backstay.store.directory.root import Root
from backstay.store.directory.store import DirectoryStore
from backstay.store.leases import LeaseRequest
from backstay.testing.drafts import branch_key, long_list, put, state_of
from backstay.thread.access import access_of

HOUR_US = 3_600_000_000


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'logs'}"


class Killed(BaseException):
    """Stands for a process that ends at this very place."""


def killed_after(function: Callable[..., int]) -> Callable[..., int]:
    def call(*given: object) -> int:
        function(*given)
        raise Killed

    return call


def test_nobody_writes_into_a_log_that_was_replaced_by_somebody_who_died_right_then(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = DirectoryStore(url), DirectoryStore(url)
    put(first, branch_key(), {"list": long_list(9)}, "one")
    put(second, branch_key(), {"list": long_list(18)}, "two")  # has the log open now
    with monkeypatch.context() as patch:
        patch.setattr(directory, "rewrite", killed_after(rewrite))
        with pytest.raises(Killed):
            first.compact()
    put(second, branch_key(), {"list": long_list(27)}, "three")
    third = DirectoryStore(url)

    assert [state_of(third, name) for name in ("one", "two", "three")] == [{"list": long_list(n)} for n in (9, 18, 27)]
    for store in (first, second, third):
        store.close()


def test_a_reader_finds_what_was_moved_while_it_had_the_log_open(url: str) -> None:
    reader, writer = DirectoryStore(url), DirectoryStore(url)
    ids = [put(writer, branch_key(), {"list": long_list(n * 9)}) for n in range(1, 5)]
    assert state_of(reader, ids[-1]) == {"list": long_list(36)}
    writer.delete("", ids[1:3], False)
    writer.compact()

    assert [state_of(reader, name) for name in (ids[0], ids[3])] == [{"list": long_list(9)}, {"list": long_list(36)}]
    assert reader.check() == []
    reader.close()
    writer.close()


def test_the_number_of_a_branch_that_went_is_not_given_out_again_after_reopening(url: str) -> None:
    store = DirectoryStore(url)
    numbers = []
    for name in ("a", "b"):
        held = store.acquire(BranchKey("", name, "", "main"), LeaseRequest("me", name, HOUR_US))
        store.release(held.branch, held.epoch, name)
        numbers.append(held.number)
        store.close()
        store = DirectoryStore(url)
    store.close()

    assert numbers[1] > numbers[0]


def test_a_forked_child_goes_on_by_itself_and_keeps_no_lock_of_its_parent(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        thread.save({"n": 1})
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(read)
                store.thread("t").append(set={"n": 2})
                os.write(write, b"done")
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        assert os.read(read, 10) == b"done"
        os.close(read)
        assert os.waitpid(child, 0)[1] == 0
        newest = store.thread("t").latest()
        assert newest is not None
        assert newest.state == {"n": 2}
        assert store.thread("t").append(set={"n": 3}).step == 3


def test_the_room_taken_in_advance_is_given_back_when_the_store_is_closed(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        thread.save({"list": long_list(100)})
        for n in range(10):
            thread.append({"list": long_list(3, n)})
        (log,) = (Path(url.removeprefix("dir:")) / "branches").iterdir()
        with log.open("rb") as file:
            assert file.read().endswith(bytes(1000))
    left = log.read_bytes()

    assert not left.endswith(bytes(100))
    with backstay.open(url) as store:
        assert store.check()
        newest = store.thread("t").latest()
        assert newest is not None
        assert len(newest.state["list"]) == 130


@pytest.mark.parametrize(("begun", "blank"), [(66, 0), (1, 600), (5, 600), (7, 600)])
def test_a_torn_end_is_cut_and_told_and_nothing_is_wrong_with_that(url: str, begun: int, blank: int) -> None:
    """Of a record that begins in the last bytes of a sector, a power cut may leave only a part of its mark."""
    with backstay.open(url) as store:
        store.thread("t").save({"n": 1})
    folder = Path(url.removeprefix("dir:"))
    (log,) = (folder / "branches").iterdir()
    whole = log.read_bytes()
    log.write_bytes(whole + whole[24 : 24 + begun] + bytes(blank))  # a record that was never finished
    with backstay.open(url) as store:
        report = store.check()

        assert report, str(report)
        assert [finding.kind for finding in report.findings] == ["leftover"]
        assert store.thread("t").append(set={"n": 2}).step == 2
    with backstay.open(url) as store:
        assert store.check().findings == ()


def test_two_may_make_the_store_at_the_same_moment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Root._is_ours

    def look_too_early(root: Root) -> bool:
        monkeypatch.setattr(Root, "_is_ours", look)
        is_ours = look(root)
        with contextlib.closing(DirectoryStore(url)) as other:
            put(other, branch_key(), {"n": 1}, "one")
        return is_ours

    monkeypatch.setattr(Root, "_is_ours", look_too_early)
    with contextlib.closing(DirectoryStore(url)) as store:
        assert state_of(store, "one") == {"n": 1}


@pytest.mark.parametrize("fate", ["stays", "is replaced again", "is deleted"])
def test_a_child_of_a_checkpoint_that_was_replaced_keeps_its_digest_whichever_log_is_written_anew(
    url: str, fate: str
) -> None:
    """The child lies in another log, which does not say what its parent was before."""
    with backstay.open(url) as store:
        thread = store.thread("a")
        thread.save({"n": 0})
        thread.save({"n": 1}, id="parent")
        thread.fork("parent", to="first", set={"x": 1})
        thread.save({"n": 2}, id="parent", replace=True)
        if fate == "is replaced again":
            thread.fork("parent", to="second", set={"x": 2})
            thread.save({"n": 3}, id="parent", replace=True)
        elif fate == "is deleted":
            store.thread("a").delete()
        backend = access_of(store).store
        assert isinstance(backend, DirectoryStore)
        for _ in range(2):
            number = min(number for number in backend._logs.known if number)  # that of thread "a"
            backend._write(lambda number=number: backend._give_back([backend._logs.known[number]]))  # type: ignore[misc]
    with backstay.open(url) as store:
        assert store.check(), str(store.check())
        store.compact()
    with backstay.open(url) as store:
        assert store.check(), str(store.check())
