"""What others do between two verbs of one call: a save reads, then writes, and in between anything may be deleted.

A call of ``Thread`` is several verbs of the store. Here another writer acts right before one of them, on every store,
and never by chance. A call may come too late and be told so (Conflict, NotFound); it never stores what cannot be
loaded, and never speaks of damage where there is none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import backstay
from backstay import Conflict, Keep, NotFound
from backstay.store.open import open_backend
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services
from support.meanwhile import Meanwhile

DOCUMENT = "a document that is too long to stay in a manifest " * 100


class Two:
    """One store seen by two: ``mine``, between whose verbs something happens, and the other's."""

    def __init__(self, url: str, clock: Callable[[], datetime] | None = None) -> None:
        backend = open_backend(url)
        self.meanwhile = Meanwhile(backend)
        self.mine = Store(self.meanwhile, make_services("", clock))
        self.theirs = Store(backend if url == "memory:" else open_backend(url), make_services("", clock))

    def before(self, verb: str, action: Callable[[], object]) -> None:
        access_of(self.mine).services.recent.clear()  # or the next handle would have nothing to read
        self.meanwhile.before(verb, action)

    def newest(self, name: str = "thread", branch: str = "main") -> dict[str, Any] | None:
        """Return the newest state of a thread, after a look at everything in the store."""
        assert self.meanwhile.is_over, "what was to happen meanwhile did not"
        report = self.theirs.check()
        assert report, str(report)
        found = self.theirs.thread(name, branch=branch).latest()
        return None if found is None else dict(found.state)

    def supersede(self) -> None:
        """Save twice more, with nothing that was there before, and delete everything older."""
        thread = self.theirs.thread("thread")
        thread.save({"n": -1})
        thread.save({"n": -2})
        assert self.theirs.prune(Keep(last=1)).deleted

    def close(self) -> None:
        self.mine.close()
        self.theirs.close()


@pytest.fixture
def two(url: str) -> Iterator[Two]:
    made = Two(url)
    yield made
    made.close()


@pytest.fixture
def thread(two: Two) -> backstay.Thread:
    return two.mine.thread("thread")


def save_in_many_pieces(thread: backstay.Thread) -> tuple[list[str], backstay.Checkpoint]:
    """Save a list that is edited at so many places that the table of its pieces is kept apart from the manifest."""
    chance = random.Random(7)
    items = [chance.randbytes(50).hex() for _ in range(400)]
    saved = thread.save({"items": items})
    for place in range(0, 400, 30):
        items[place] = chance.randbytes(30).hex()
        saved = thread.save({"items": items})
    return items, saved


# The branch moves or goes -----------------------------------------------------------------------------------------


def test_a_save_whose_thread_is_deleted_meanwhile_is_a_conflict_without_a_winner(
    two: Two, thread: backstay.Thread
) -> None:
    thread.save({"n": 1})
    two.before("commit", lambda: two.theirs.thread("thread").delete())

    with pytest.raises(Conflict) as lost:
        thread.save({"n": 2})
    assert lost.value.winner is None
    assert two.newest() is None


def test_a_save_whose_thread_is_made_anew_meanwhile_does_not_land_there(two: Two, thread: backstay.Thread) -> None:
    thread.save({"n": 1})

    def make_anew() -> None:
        two.theirs.thread("thread").delete()
        two.theirs.thread("thread").save({"n": 9}, id="new")

    two.before("commit", make_anew)
    with pytest.raises(Conflict) as lost:
        thread.save({"n": 2})
    assert lost.value.winner.id == "new"
    assert two.newest() == {"n": 9}


def test_a_save_whose_head_is_deleted_while_it_is_compared_is_a_conflict(two: Two) -> None:
    two.mine.thread("thread").save({"document": DOCUMENT})
    two.before("fetch", two.supersede)

    with pytest.raises(Conflict):
        two.mine.thread("thread").save({"document": DOCUMENT + "!"})
    assert two.newest() == {"n": -2}


def test_a_save_whose_head_is_deleted_while_its_pieces_are_read_is_a_conflict(
    two: Two, thread: backstay.Thread
) -> None:
    items, _ = save_in_many_pieces(thread)
    two.before("fetch", two.supersede)

    with pytest.raises(Conflict):
        two.mine.thread("thread").save({"items": [*items, "more"]})
    assert two.newest() == {"n": -2}


def test_the_newest_is_found_also_if_the_one_before_it_is_deleted_meanwhile(two: Two) -> None:
    two.mine.thread("thread").save({"document": DOCUMENT})
    two.before("fetch", two.supersede)

    latest = two.mine.thread("thread").latest()
    assert latest is not None
    assert latest.state == {"n": -2} == two.newest()


@pytest.mark.parametrize("verb", ["find", "fetch"])
def test_the_end_of_a_list_comes_from_one_checkpoint(two: Two, thread: backstay.Thread, verb: str) -> None:
    for number in range(30):
        thread.append({"log": [f"{number} " + "x" * 300]})
    two.before(verb, two.supersede)

    with pytest.raises(NotFound, match="no key 'log'"):
        two.mine.thread("thread").tail("log", 5)
    assert two.newest() == {"n": -2}


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_found(two: Two, thread: backstay.Thread) -> None:
    saved = thread.save({"document": DOCUMENT})
    two.before("fetch", two.supersede)

    with pytest.raises(NotFound):
        two.mine.get(saved.id)


# What a fork or rewind takes over goes ----------------------------------------------------------------------------


def test_a_fork_of_what_is_deleted_meanwhile_is_refused(two: Two, thread: backstay.Thread) -> None:
    source = thread.save({"document": DOCUMENT})
    thread.save({"n": 2})
    two.before("commit", lambda: two.theirs.thread("thread").delete_checkpoint(source))

    with pytest.raises(NotFound):
        thread.fork(source, to="other")
    assert two.newest("other") is None


def test_a_fork_whose_source_goes_with_its_thread_is_refused(two: Two, thread: backstay.Thread) -> None:
    source = thread.append({"log": [DOCUMENT]})
    two.before("commit", lambda: two.theirs.thread("thread").delete())

    with pytest.raises(NotFound):
        thread.fork(source, to="other", set={"n": 1})
    assert two.newest("other") is None


def test_a_rewind_to_what_is_deleted_meanwhile_is_refused(two: Two, thread: backstay.Thread) -> None:
    source = thread.save({"document": DOCUMENT})
    thread.save({"n": 2})
    two.before("commit", lambda: two.theirs.thread("thread").delete_checkpoint(source))

    with pytest.raises(NotFound):
        thread.rewind(source)
    assert two.newest() == {"n": 2}


@pytest.mark.parametrize("verb", ["head", "branches", "find", "fetch", "commit"])
def test_a_merge_whose_branches_are_deleted_meanwhile_is_refused(two: Two, thread: backstay.Thread, verb: str) -> None:
    items, source = save_in_many_pieces(thread)
    fork = thread.fork(source, branch="b")
    theirs = fork.save({"items": [*items, "more"]})
    two.before(verb, lambda: two.theirs.thread("thread").delete())

    with pytest.raises((NotFound, Conflict)):
        two.mine.thread("thread").merge(theirs)
    assert two.newest() is None


@pytest.mark.parametrize("verb", ["branches", "fetch", "commit"])
def test_a_merge_into_a_branch_that_moves_meanwhile_is_a_conflict(two: Two, thread: backstay.Thread, verb: str) -> None:
    fork = thread.fork(thread.save({"document": "", "n": 0}), branch="b")
    theirs = fork.save({"document": DOCUMENT, "n": 0})
    two.before(verb, lambda: two.theirs.thread("thread").append(set={"n": 7}))

    with pytest.raises(Conflict):
        two.mine.thread("thread").merge(theirs, set={"done": 1})
    assert two.newest() == {"document": "", "n": 7}
    merged = two.mine.thread("thread").merge(theirs, set={"done": 1}).state
    assert merged == two.newest() == {"document": DOCUMENT, "n": 7, "done": 1}


def test_a_fork_whose_source_is_deleted_while_its_pieces_are_read_is_refused(two: Two, thread: backstay.Thread) -> None:
    _, source = save_in_many_pieces(thread)
    two.before("fetch", two.supersede)

    with pytest.raises(NotFound):
        thread.fork(source, to="other")


def test_a_fork_of_what_is_replaced_meanwhile_is_refused(two: Two, thread: backstay.Thread) -> None:
    source = thread.save({"document": DOCUMENT}, id="source")
    two.before("commit", lambda: two.theirs.thread("thread").save({"n": 2}, id="source", replace=True))

    with pytest.raises(NotFound):
        thread.fork(source, to="other")
    assert two.newest("other") is None


def test_a_fork_of_what_is_deleted_and_made_anew_meanwhile_is_refused(two: Two, thread: backstay.Thread) -> None:
    source = thread.save({"document": DOCUMENT}, id="source")

    def make_anew() -> None:
        two.theirs.thread("thread").delete_checkpoint("source")
        two.theirs.thread("thread").save({"n": 2}, id="source")

    two.before("commit", make_anew)
    with pytest.raises(NotFound):
        thread.fork(source, branch="other")
    assert two.newest("thread", "other") is None


# A replaced head and its parent -----------------------------------------------------------------------------------


def test_a_head_whose_parent_is_pruned_while_it_is_replaced_can_be_loaded(two: Two, thread: backstay.Thread) -> None:
    thread.save({"n": 1})
    thread.save({"n": 2}, id="head")
    two.before("commit", lambda: two.theirs.prune(Keep(last=1)))
    thread.save({"n": 3}, id="head", replace=True)

    assert two.newest() == {"n": 3}


def test_a_fork_whose_origin_is_deleted_while_its_first_checkpoint_is_replaced_can_be_loaded(
    two: Two, thread: backstay.Thread
) -> None:
    origin = thread.save({"n": 1})
    thread.fork(origin, to="other", id="head")
    two.before("commit", lambda: two.theirs.thread("thread").delete_checkpoint(origin))
    two.mine.thread("other").save({"n": 2}, id="head", replace=True)

    assert two.newest("other") == {"n": 2}


def test_a_fork_whose_origin_is_replaced_while_its_first_checkpoint_is_replaced_can_be_loaded(
    two: Two, thread: backstay.Thread
) -> None:
    thread.save({"n": 1}, id="origin")
    thread.fork("origin", to="other", id="head")
    two.before("commit", lambda: two.theirs.thread("thread").save({"n": 3}, id="origin", replace=True))
    two.mine.thread("other").save({"n": 2}, id="head", replace=True)

    assert two.newest("other") == {"n": 2}


def test_a_fork_whose_origin_was_replaced_can_be_replaced_too(two: Two, thread: backstay.Thread) -> None:
    thread.save({"n": 1}, id="origin")
    thread.fork("origin", to="other", id="head")
    two.theirs.thread("thread").save({"n": 3}, id="origin", replace=True)
    two.mine.thread("other").save({"n": 2}, id="head", replace=True)

    assert two.newest("other") == {"n": 2}


# The same id ------------------------------------------------------------------------------------------------------


def test_the_same_saved_meanwhile_under_the_same_id_gives_the_first_result(two: Two, thread: backstay.Thread) -> None:
    thread.save({"n": 1})
    two.before("commit", lambda: two.theirs.thread("thread").save({"n": 2}, id="twin"))
    saved = thread.save({"n": 2}, id="twin")

    assert (saved.id, saved.seq) == ("twin", 2)
    assert two.newest() == {"n": 2}


def test_after_another_stored_the_same_the_handle_builds_on_its_bytes(url: str) -> None:
    """Both would store the same checkpoint, at the same moment: its bytes are where the first of them put them."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    two = Two(url, lambda: moment)
    thread, other = two.mine.thread("thread"), two.theirs.thread("thread")
    thread.save({"log": ["a" * 600]})
    other.latest()
    two.meanwhile.before("commit", lambda: other.append({"log": ["b" * 600]}, id="same"))
    first = thread.append({"log": ["b" * 600]}, id="same")
    thread.append({"log": ["c" * 600]})

    assert first.seq == 2
    assert two.newest() == {"log": ["a" * 600, "b" * 600, "c" * 600]}
    two.close()


def test_the_end_of_a_list_is_not_read_from_bytes_that_came_later(two: Two, thread: backstay.Thread) -> None:
    chance = random.Random(1)
    thread.save({"log": [chance.randbytes(3000).hex()]})
    for _ in range(10):
        thread.append({"log": [chance.randbytes(250).hex()]})
    newest = thread.append({"log": ["old 1" + "x" * 995, "old 2" + "x" * 995]})

    def take_its_place() -> None:
        two.theirs.thread("thread").delete_checkpoint(newest.id)
        other = two.theirs.thread("thread")
        other.latest()
        other.append({"log": ["new 1" + "x" * 995, "new 2" + "x" * 995, "new 3"]})

    two.before("fetch", take_its_place)

    assert [item[:5] for item in two.mine.thread("thread").tail("log", 2)] == ["new 2", "new 3"]
    assert two.newest() is not None


def test_a_retry_of_what_is_deleted_meanwhile_is_a_save_like_any_other(two: Two, thread: backstay.Thread) -> None:
    thread.save({"log": [DOCUMENT]})
    thread.append({"log": ["more"]}, id="again")
    two.before("fetch", two.supersede)
    two.mine.thread("thread").append({"log": ["more"]}, id="again")

    assert two.newest() == {"n": -2, "log": ["more"]}


# What a prune must spare, also if it became so meanwhile ------------------------------------------------------------


def test_a_checkpoint_that_begins_to_wait_for_a_decision_meanwhile_is_not_pruned(
    two: Two, thread: backstay.Thread
) -> None:
    waiting = thread.save({"n": 1})
    thread.save({"n": 2})
    two.before("delete", lambda: two.theirs.thread("thread").interrupt(waiting))
    two.mine.prune(Keep(last=1))

    assert two.newest() == {"n": 2}
    assert two.theirs.get(waiting.id) is not None


def test_an_interrupt_of_what_is_pruned_meanwhile_is_refused(two: Two, thread: backstay.Thread) -> None:
    gone = thread.save({"n": 1})
    thread.save({"n": 2})
    two.before("put_record", lambda: two.theirs.prune(Keep(last=1)))

    with pytest.raises(NotFound):
        thread.interrupt(gone)
    assert list(two.theirs.interrupts()) == []


def test_a_head_that_others_went_back_to_meanwhile_is_not_pruned(two: Two, thread: backstay.Thread) -> None:
    """The only checkpoint that is left is the head, although it was not when the prune looked."""
    first = thread.save({"n": 1})
    last = thread.save({"n": 2})
    two.before("delete", lambda: two.theirs.thread("thread").delete_checkpoint(last))
    two.mine.prune(Keep(last=1))

    assert two.newest() == {"n": 1}
    assert two.theirs.get(first.id) is not None


def test_a_checkpoint_that_is_tagged_meanwhile_is_not_pruned(two: Two, thread: backstay.Thread) -> None:
    good = thread.save({"n": 1})
    thread.save({"n": 2})
    two.before("delete", lambda: two.theirs.thread("thread").tag(good, "good"))
    two.mine.prune(Keep(last=1))

    assert two.theirs.get(good.id) is not None


def test_a_checkpoint_that_is_forked_meanwhile_is_not_pruned(two: Two, thread: backstay.Thread) -> None:
    origin = thread.save({"n": 1})
    thread.save({"n": 2})
    two.before("delete", lambda: two.theirs.thread("thread").fork(origin, branch="fork"))
    two.mine.prune(Keep(last=1))

    assert two.newest("thread", "fork") == {"n": 1}
    assert two.theirs.get(origin.id) is not None
