"""Leases: one holder writes, everybody else is refused; who lost it is refused too, and told."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import InvalidInput, StoreError
from backstay.thread.access import access_of
from backstay.thread.lease import TTL_S_MAX, TTL_S_MIN, Lease
from backstay.thread.runs import CLAIMS_MAX
from support.thread.stored_runs import WORK, put_run
from support.waiting import entered, eventually, taken_over

SHORT_S = TTL_S_MIN

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def heartbeats() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "backstay-heartbeat"]


@pytest.fixture
def other(store: backstay.Store, thread: backstay.Thread) -> backstay.Thread:
    """Another handle on the same branch."""
    return store.thread(thread.id)


@pytest.fixture(autouse=True)
def no_heartbeat_is_left() -> Iterator[None]:
    yield
    eventually(lambda: not heartbeats())


# Holding ----------------------------------------------------------------------------------------------------------


def test_while_a_lease_runs_only_its_handle_saves(thread: backstay.Thread, other: backstay.Thread) -> None:
    thread.save({"n": 1})
    other.latest()
    with thread.lease(owner="worker-1") as lease:
        assert thread.save({"n": 2}).step == 2
        with pytest.raises(backstay.Fenced, match="worker-1") as caught:
            other.save({"n": "stale"})
        with pytest.raises(backstay.Fenced, match="worker-1"), other.lease():
            raise AssertionError("entered")
        assert thread.append(set={"n": 3}).step == 3

    assert (lease.owner, lease.epoch, lease.ttl, lease.thread, lease.lost) == ("worker-1", 1, 30.0, thread, False)
    assert caught.value.owner == "worker-1"
    assert [meta.step for meta in thread.history()] == [3, 2, 1]
    newest = other.latest()
    assert newest is not None
    assert newest.state == {"n": 3}
    assert other.save({"n": 4}).step == 4


@pytest.mark.parametrize("looked", ["not at all", "saw nothing", "saw a checkpoint"])
def test_the_first_save_under_a_lease_works_whatever_the_handle_saw_before(
    thread: backstay.Thread, other: backstay.Thread, looked: str
) -> None:
    if looked == "saw a checkpoint":
        other.save({"n": 0})
    if looked != "not at all":
        thread.latest()
    with thread.lease():
        first = thread.save({"n": 1})
        second = thread.append(set={"n": 2})
    after = thread.save({"n": 3})

    assert (second.parent_id, after.parent_id) == (first.id, second.id)


def test_what_the_handle_saw_before_still_counts(thread: backstay.Thread, other: backstay.Thread) -> None:
    assert thread.latest() is None
    theirs = other.save({"n": "theirs"})
    with thread.lease(), pytest.raises(backstay.Conflict) as caught:
        thread.save({"n": "mine"})

    assert caught.value.winner == theirs


def test_a_head_that_moved_before_the_lease_came_is_a_conflict(thread: backstay.Thread, other: backstay.Thread) -> None:
    thread.save({"n": 1})
    other.latest()
    other.save({"n": 2})
    with thread.lease() as lease:
        with pytest.raises(backstay.Conflict):
            thread.save({"n": "lost update"})
        newest = thread.latest()
        assert newest is not None
        assert thread.append(set={"n": 3}).parent_id == newest.id

    assert not lease.lost


def refused_save(thread: backstay.Thread) -> None:
    with pytest.raises(InvalidInput, match="step"):
        thread.save({"n": 1}, step=-1)


@pytest.mark.parametrize("look", [lambda thread: None, lambda thread: thread.latest(), refused_save])
def test_a_lease_that_was_never_used_leaves_nothing_behind(
    store: backstay.Store, thread: backstay.Thread, look: Callable[[backstay.Thread], object]
) -> None:
    look(thread)
    with thread.lease():
        look(thread)
        assert thread.branches() == []

    assert thread.branches() == []
    assert list(store.threads()) == []
    assert thread.save({"n": 1}).step == 1


def test_a_handle_that_saw_nothing_goes_on_after_the_lease_of_a_worker_that_died(
    thread: backstay.Thread, other: backstay.Thread
) -> None:
    assert other.latest() is None
    thread.lease(ttl=SHORT_S, heartbeat=False).__enter__()

    with taken_over(other):
        assert other.save({"n": 1}).step == 1


def test_a_handle_without_a_lease_looks_again_after_one_came_and_went(
    thread: backstay.Thread, other: backstay.Thread
) -> None:
    other.save({"n": 1})
    with thread.lease():
        thread.latest()
    with pytest.raises(backstay.Fenced):
        other.save({"n": 2})
    other.latest()

    assert other.save({"n": 2}).step == 2


def test_a_lease_that_was_not_used_does_not_get_in_the_way_of_its_own_handle(thread: backstay.Thread) -> None:
    thread.save({"n": 1})
    with thread.lease():
        pass

    assert thread.save({"n": 2}).step == 2


def test_a_lease_that_nobody_renews_is_waited_for(thread: backstay.Thread, other: backstay.Thread) -> None:
    lost = [thread.lease(ttl=0.3, heartbeat=False)]  # as a process leaves it that is killed elsewhere
    worker = threading.Thread(target=lost[0].__enter__)  # here, waiting for it would be waiting for oneself
    worker.start()
    worker.join()
    with pytest.raises(backstay.Fenced):
        other.lease(wait=0.01).__enter__()

    with other.lease(wait=30) as lease:
        assert lease.epoch == 2
        other.save({"n": 1})


def test_each_acquisition_has_a_higher_epoch(thread: backstay.Thread, other: backstay.Thread) -> None:
    thread.save({"n": 1})
    epochs = []
    for handle in (thread, other, thread):
        with handle.lease() as lease:
            epochs.append(lease.epoch)

    assert epochs == [1, 2, 3]


def test_the_branches_of_nested_graphs_have_leases_of_their_own(store: backstay.Store, thread: backstay.Thread) -> None:
    inner = store.thread(thread.id, scope="subgraph")
    side = store.thread(thread.id, branch="side")
    with thread.lease() as one, inner.lease() as two, side.lease() as three:
        for handle in (thread, inner, side):
            handle.save({"who": handle.branch})

    assert [one.epoch, two.epoch, three.epoch] == [1, 1, 1]


def test_a_leased_branch_can_be_read_forked_and_rewound_by_its_holder(
    thread: backstay.Thread, other: backstay.Thread
) -> None:
    first = thread.save({"n": 1})
    with thread.lease():
        side = other.fork(first, branch="side")
        assert side.save({"n": "side"}).step == 2
        assert thread.rewind(first).state == {"n": 1}
        with pytest.raises(backstay.Fenced):
            other.rewind(first)

    assert [branch.key.name for branch in thread.branches()] == ["main", "side"]


def test_a_handle_holds_one_lease_at_a_time(thread: backstay.Thread) -> None:
    with thread.lease() as lease:
        with pytest.raises(backstay.Fenced, match="already holds"), thread.lease():
            raise AssertionError("entered")
        with pytest.raises(InvalidInput, match="once"), lease:
            raise AssertionError("entered")
        thread.save({"n": 1})

    with thread.lease() as again:
        assert again.epoch == 2


def test_a_lease_outside_its_block_says_so(thread: backstay.Thread) -> None:
    lease = thread.lease()
    assert (lease.epoch, lease.lost) == (0, False)
    for call in (lease.raise_if_lost, lease.renew, lease.release):
        with pytest.raises(InvalidInput, match="not taken"):
            call()
    with lease:
        lease.raise_if_lost()
        lease.renew()
        lease.release()
        lease.release()
        for call in (lease.raise_if_lost, lease.renew):
            with pytest.raises(InvalidInput, match="was released"):
                call()

    assert not lease.lost


@pytest.mark.parametrize(
    "bad", [0, -1, 0.049, 86_400.1, math.nan, math.inf, True, "30", None, 10**400], ids=lambda value: f"{value!r:.10}"
)
def test_a_time_that_cannot_be_is_refused(store: backstay.Store, thread: backstay.Thread, bad: Any) -> None:
    for call in (lambda: thread.lease(ttl=bad), lambda: store.claim([WORK], ttl=bad), lambda: thread.loop({}, ttl=bad)):
        with pytest.raises(InvalidInput, match=r"ttl must be a number of seconds from 0\.05 to 86400"):
            call()


@pytest.mark.parametrize("ttl", [TTL_S_MIN, 1, TTL_S_MAX])
def test_the_shortest_and_the_longest_time_are_taken(thread: backstay.Thread, ttl: float) -> None:
    with thread.lease(ttl=ttl, heartbeat=False) as lease:
        assert lease.ttl == ttl


def test_other_arguments_are_checked_too(store: backstay.Store, thread: backstay.Thread) -> None:
    wrong: list[Any] = [{"owner": 5}, {"owner": "x" * 1025}, {"heartbeat": 1}, {"on_lost": "print"}]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            thread.lease(**arguments)
        with pytest.raises(InvalidInput):
            store.claim([WORK], **arguments)
    many: list[Any] = [0, -1, CLAIMS_MAX + 1, True, 1.0, "1"]
    for count in many:
        with pytest.raises(InvalidInput, match="whole number"):
            store.claim([WORK], count)
        with pytest.raises(InvalidInput, match="whole number"):
            store.claim([WORK], attempts=count)
    for graphs in ([], None, 5, [None], "work", [WORK, "work"]):
        with pytest.raises(InvalidInput, match="claim needs the graphs"):
            store.claim(graphs)  # type: ignore[arg-type]  # that is the point

    assert store.claim([WORK], CLAIMS_MAX) == store.claim(WORK) == []


def test_the_owner_is_host_and_process_unless_named(thread: backstay.Thread) -> None:
    with thread.lease() as lease:
        assert lease.owner.endswith(f":{os.getpid()}")


# Losing -----------------------------------------------------------------------------------------------------------


def zombie(thread: backstay.Thread, told: list[Lease]) -> Lease:
    """Take a lease that nobody renews."""
    return thread.lease(ttl=SHORT_S, owner="zombie", heartbeat=False, on_lost=told.append)


@pytest.mark.parametrize("attempt", ["save", "renew", "release"])
def test_who_was_taken_over_from_is_refused_and_told_once(
    thread: backstay.Thread, other: backstay.Thread, attempt: str
) -> None:
    thread.save({"n": 1})
    told: list[Lease] = []
    lease = zombie(thread, told).__enter__()
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: thread.save({"n": "zombie"}),
        "renew": lease.renew,
        "release": lease.release,
    }
    with taken_over(other) as new:
        with pytest.raises(backstay.Fenced, match=r"taken over \(epoch 2, ours was 1\)"):
            calls[attempt]()
        assert lease.lost
        assert told == [lease]
        with pytest.raises(backstay.Fenced):
            lease.raise_if_lost()
        with pytest.raises(backstay.Fenced):
            thread.save({"n": "again"})
        assert other.append(set={"n": 2}).step == 2
        new.raise_if_lost()

    assert told == [lease]
    assert [meta.step for meta in other.history()] == [2, 1]


def test_leaving_the_block_of_a_lost_lease_raises_although_the_body_succeeded(
    thread: backstay.Thread, other: backstay.Thread
) -> None:
    told: list[Lease] = []
    with pytest.raises(backstay.Fenced, match="taken over"), zombie(thread, told):
        new = entered(other)
    new.release()

    assert [lease.lost for lease in told] == [True]


def test_the_bodys_own_error_is_kept(thread: backstay.Thread, other: backstay.Thread) -> None:
    def body() -> None:
        with zombie(thread, []), taken_over(other):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        body()

    assert getattr(caught.value, "__notes__", []) == []


def test_a_stale_owner_is_fenced_also_after_the_new_one_moved_the_head(
    thread: backstay.Thread, other: backstay.Thread
) -> None:
    """Not a conflict, which invites to load and try again."""
    thread.save({"n": 1})
    lease = zombie(thread, []).__enter__()
    with taken_over(other):
        other.append(set={"n": 2})
        for _ in range(2):
            with pytest.raises(backstay.Fenced):
                thread.save({"n": "zombie"})

    with pytest.raises(backstay.Fenced):
        lease.release()


def test_a_lease_that_expired_may_be_renewed_if_nobody_took_it(thread: backstay.Thread) -> None:
    with thread.lease(ttl=SHORT_S, heartbeat=False) as lease:
        eventually(lambda: lease.lost)
        with pytest.raises(backstay.Fenced, match="could not be renewed"):
            lease.raise_if_lost()
        lease.renew()
        thread.save({"n": 1})

    assert not lease.lost


def test_what_on_lost_raises_comes_out_where_the_holder_looks(thread: backstay.Thread, other: backstay.Thread) -> None:
    def fail(lease: Lease) -> None:
        raise ZeroDivisionError("in on_lost")

    lease = thread.lease(ttl=SHORT_S, heartbeat=False, on_lost=fail).__enter__()
    with taken_over(other):
        with pytest.raises(backstay.Fenced):
            lease.renew()
        with pytest.raises(ZeroDivisionError, match="in on_lost"):
            lease.raise_if_lost()
        with pytest.raises(backstay.Fenced):
            lease.raise_if_lost()


# Deleting under a lease -------------------------------------------------------------------------------------------


def test_nobody_else_deletes_what_a_lease_protects(
    store: backstay.Store, thread: backstay.Thread, other: backstay.Thread
) -> None:
    old, newest = thread.save({"n": 1}), thread.save({"n": 2})
    with thread.lease():
        calls: list[Callable[[], object]] = [
            lambda: other.delete_checkpoint(newest),
            other.delete,
            lambda: store.thread(thread.id).delete(),
            store.delete_all,
        ]
        for call in calls:
            with pytest.raises(backstay.Fenced):
                call()
        assert [meta.id for meta in other.history()] == [newest.id, old.id]
        assert other.delete_checkpoint(old) == 1
        assert other.prune(backstay.Keep(last=1)).deleted == 0
        assert thread.delete_checkpoint(newest) == 1


def test_the_holder_deletes_and_what_goes_takes_the_lease_along(store: backstay.Store, thread: backstay.Thread) -> None:
    told: list[Lease] = []
    deletes: list[Callable[[backstay.Checkpoint], object]] = [
        lambda newest: thread.delete(),
        thread.delete_checkpoint,
    ]
    for delete in deletes:
        newest = thread.save({"n": 1})
        with thread.lease(on_lost=told.append) as lease:
            delete(newest)
            assert not lease.lost
            assert thread.latest() is None
            thread.save({"n": "anew, without a lease"})
        thread.delete()
        assert thread.latest() is None

    assert told == []
    assert list(store.threads()) == []


def test_the_holder_may_delete_its_head_and_go_on(thread: backstay.Thread) -> None:
    thread.save({"n": 1})
    newest = thread.save({"n": 2})
    with thread.lease() as lease:
        thread.delete_checkpoint(newest)
        thread.latest()
        assert thread.save({"n": 3}).step == 2
        lease.raise_if_lost()


def end_in_the_store(lease: Lease) -> None:
    """End a lease behind its holder's back."""
    hold = lease._taken()
    access_of(lease.thread).store.release(hold.branch, hold.epoch, hold.request.token)


# The heartbeat ----------------------------------------------------------------------------------------------------


def test_the_heartbeat_keeps_a_lease_alive_for_much_longer_than_its_time(
    thread: backstay.Thread, other: backstay.Thread
) -> None:
    ttl, refused = 1.0, 0
    with thread.lease(ttl=ttl) as lease:
        end = time.monotonic() + 3 * ttl
        while time.monotonic() < end:
            with pytest.raises(backstay.Fenced):
                other.lease().__enter__()
            refused += 1
            threading.Event().wait(0.02)
        lease.raise_if_lost()

    assert refused > 10


def test_a_save_extends_the_lease(store: backstay.Store, thread: backstay.Thread) -> None:
    def left_us() -> int:
        (row,) = access_of(store).store.leases("", None, False)
        return row.left_us

    with thread.lease(ttl=60, heartbeat=False) as lease:
        eventually(lambda: left_us() < 59_950_000)
        before, due = left_us(), lease._taken().renewal.due()
        thread.save({"n": 1})

        assert left_us() > before
        assert lease._taken().renewal.due() > due  # so the heartbeat need not renew it yet


def test_the_heartbeat_notices_a_loss_at_once(store: backstay.Store, thread: backstay.Thread) -> None:
    """A clock that jumps, or an operator, may end a lease early: here its row is given to somebody else."""
    thread.save({"n": 1})
    told = threading.Event()
    lease = thread.lease(ttl=0.3, on_lost=lambda lease: told.set()).__enter__()
    end_in_the_store(lease)
    with store.thread(thread.id).lease(owner="thief"):
        assert told.wait(20)
        assert lease.lost
        with pytest.raises(backstay.Fenced, match="taken over"):
            lease.release()


@pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)
def test_a_lease_that_cannot_be_renewed_for_its_whole_time_counts_as_lost(url: str) -> None:
    store = backstay.open(url)
    thread = store.thread("t")
    told: list[tuple[bool, float]] = []
    lease = thread.lease(ttl=1.0, on_lost=lambda lease: told.append((lease.lost, time.monotonic()))).__enter__()
    begin = time.monotonic()
    access_of(store).store.close()  # the store cannot be reached any more
    eventually(lambda: told)

    assert told[0][0]
    assert told[0][1] - begin > 0.1  # not at the first failure
    with pytest.raises(backstay.Fenced, match=r"could not be renewed for 1 s") as caught:
        lease.raise_if_lost()
    assert isinstance(caught.value.__cause__, StoreError)
    assert heartbeats() == []
    store.close()


def test_an_error_in_on_lost_does_not_stop_the_heart(store: backstay.Store) -> None:
    def fail(lease: Lease) -> None:
        raise ZeroDivisionError("in on_lost")

    doomed, kept = store.thread("doomed"), store.thread("kept")
    with kept.lease(ttl=1.0) as alive:
        due = alive._taken().renewal.due()
        lease = doomed.lease(ttl=0.2, on_lost=fail).__enter__()
        end_in_the_store(lease)
        eventually(lambda: lease._failure is not None)
        with pytest.raises(ZeroDivisionError, match="in on_lost"):
            lease.release()
        eventually(lambda: alive._taken().renewal.due() > due)


def test_one_thread_serves_all_and_ends_with_the_last(store: backstay.Store) -> None:
    leases = [store.thread(f"t{number}").lease().__enter__() for number in range(20)]
    eventually(lambda: len(heartbeats()) == 1)
    for lease in leases:
        lease.release()

    eventually(lambda: not heartbeats())


def test_closing_ends_the_heartbeat_and_gives_nothing_back(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "x.db") as store:
        lease = store.thread("t").lease(ttl=60, owner="worker-1").__enter__()
        eventually(lambda: len(heartbeats()) == 1)
        store.close()
        assert heartbeats() == []
    with backstay.open(tmp_path / "x.db") as again, pytest.raises(backstay.Fenced, match="worker-1"):
        again.thread("t").lease().__enter__()

    assert not lease.lost


# Claiming ---------------------------------------------------------------------------------------------------------


def queue(store: backstay.Store, names: list[str]) -> None:
    """Store runs that wait for a worker, the first one longest, on threads that have a checkpoint."""
    for number, name in enumerate(names):
        store.thread(name).save({"name": name})
        put_run(store, name, due_us=number)


def test_runs_that_wait_are_claimed_with_their_leases(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.lease():
        queue(store, ["a", "b", "c"])
        (lease,) = store.claim([WORK], owner="rescuer")
        assert (lease.run.thread_id, lease.run.status, lease.run.attempts) == ("a", "running", 1)
        assert [run.thread_id for run in store.runs(status="queued")] == ["c", "b"]
        with lease:
            newest = lease.thread.latest()
            assert newest is not None
            assert newest.state == {"name": "a"}
            lease.thread.append(set={"rescued": True})
        rest = store.claim([WORK], 5, owner="rescuer")  # nothing of "a" was executed, so it still waits
        assert [(each.thread.id, each.epoch, each.owner) for each in rest] == [
            ("a", 2, "rescuer"),
            ("b", 1, "rescuer"),
            ("c", 1, "rescuer"),
        ]
        assert [run.thread_id for run in store.runs(holder="rescuer")] == ["c", "b", "a"]
        for each in rest:
            each.release()

    assert store.count_runs() == {"queued": 3}


def test_a_run_whose_worker_lost_its_lease_is_claimed_by_the_next(store: backstay.Store) -> None:
    queue(store, ["a"])
    (first,) = store.claim([WORK], ttl=SHORT_S, owner="slow", heartbeat=False)
    assert store.claim([WORK]) == [] or first.lost
    (second,) = eventually(lambda: store.claim([WORK], owner="next"))

    assert (second.epoch, second.run.attempts, second.run.holder.name) == (2, 2, "next")
    with pytest.raises(backstay.Fenced):
        first.thread.save({"n": "slow"})
    second.release()


def test_four_workers_that_claim_at_once_never_get_the_same(url: str) -> None:
    with backstay.open(url) as store:
        names = [f"run-{number}" for number in range(24)]
        queue(store, names)
        barrier = threading.Barrier(4)
        got: list[list[Lease]] = [[] for _ in range(4)]

        def work(mine: list[Lease]) -> None:
            barrier.wait()
            while taken := store.claim([WORK], 2, ttl=60):
                mine += taken

        workers = [threading.Thread(target=work, args=(mine,)) for mine in got]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        claimed = [lease.thread.id for mine in got for lease in mine]

        assert sorted(claimed) == sorted(names)
        for mine in got:
            for lease in mine:
                lease.thread.append(set={"by": "me"})
                lease.release()


def test_a_claimed_lease_is_kept_alive_before_it_is_entered(store: backstay.Store) -> None:
    queue(store, ["a"])
    (lease,) = store.claim([WORK], ttl=1.0)
    due = lease._taken().renewal.due()
    eventually(lambda: lease._taken().renewal.due() > due)
    with lease:
        lease.raise_if_lost()
        with pytest.raises(InvalidInput, match="once"), lease:
            raise AssertionError("entered")


@pytest.mark.parametrize("noticed", [True, False])
def test_a_claimed_lease_that_was_lost_before_it_is_entered_does_not_begin(
    store: backstay.Store, noticed: bool
) -> None:
    queue(store, ["a"])
    (lease,) = store.claim([WORK], ttl=SHORT_S, heartbeat=False)
    with taken_over(store.thread("a")):
        if noticed:
            with pytest.raises(backstay.Fenced):
                lease.renew()
        with pytest.raises(backstay.Fenced), lease:
            raise AssertionError("entered")


def test_a_claimed_lease_that_expired_is_renewed_when_it_is_entered(store: backstay.Store) -> None:
    queue(store, ["a"])
    (lease,) = store.claim([WORK], ttl=SHORT_S, heartbeat=False)
    eventually(lambda: lease.lost)
    eventually(lambda: store.runs(status="abandoned"))
    with lease:
        lease.thread.append(set={"n": 1})

    assert not lease.lost


# Forks of the process ---------------------------------------------------------------------------------------------


def in_child(function: Callable[[], None]) -> None:
    """Run a function in a forked child; the test fails if it does there."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_does_not_hold_its_parents_lease(store: backstay.Store, thread: backstay.Thread) -> None:
    thread.save({"n": 1})
    told: list[Lease] = []

    def child() -> None:
        assert lease.lost
        for call in (lease.raise_if_lost, lease.renew, lease.release, lambda: thread.save({"n": "child"})):
            with pytest.raises(backstay.Fenced):
                call()
        assert heartbeats() == []
        with pytest.raises(backstay.Fenced):
            lease.__exit__(None, None, None)
        own = store.thread("the child's own")
        with own.lease():
            own.save({"n": 1})
            eventually(lambda: len(heartbeats()) == 1)

    with thread.lease(on_lost=told.append) as lease:
        in_child(child)
        lease.raise_if_lost()
        thread.append(set={"n": 2})
        eventually(lambda: len(heartbeats()) == 1)

    assert told == []
    newest = thread.latest()
    assert newest is not None
    assert newest.state == {"n": 2}
