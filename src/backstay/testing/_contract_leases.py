"""The part of the store contract about leases: who may write a branch, take it over, and delete from it.

Time is real here: a lease that must run gets an hour, one that must end a millisecond, and its end is awaited by asking
the store. So these tests also run on stores whose clock cannot be set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import Conflict, Fenced, IdTaken, NotFound
from backstay.store.base import Backend, BranchKey, Head, Query
from backstay.store.leases import LeaseGrant, LeaseRequest
from backstay.store.records import KINDS, RUNNING, Record, RunFacts
from backstay.testing.drafts import (
    SPACES,
    branch_key,
    contents,
    draft,
    long_list,
    names,
    pending,
    put,
    seq_of,
    state_of,
    wait_until,
)

HOUR_US = 3_600_000_000
MOMENT_US = 1_000
CLAIMERS = 8
NOTHING: list[object] = [{}]
"""The answer of ``everything`` in an empty store: no bytes."""


def asking(token: str, ttl_us: int = HOUR_US) -> LeaseRequest:
    """Return a lease request with this token."""
    return LeaseRequest(f"owner of {token}", token, ttl_us)


def save(backend: Backend, key: BranchKey, state: dict[str, Any], claim: LeaseRequest, **options: Any) -> str:
    """Add a state at the end of a branch under a lease and return the checkpoint's id."""
    commit = replace(draft(backend, key, state, **options), claim=claim)
    assert backend.commit(commit).fresh
    return commit.id


def acquire_briefly(backend: Backend, key: BranchKey, token: str) -> LeaseGrant:
    """Take a lease and let it expire."""
    held = backend.acquire(key, asking(token, MOMENT_US))
    await_expiry(backend, key)
    return held


def await_expiry(backend: Backend, key: BranchKey) -> None:
    """Block until the branch's lease has expired."""
    wait_until(lambda: key in [row.branch for row in backend.leases(key.namespace, key.thread, True)])


def running(thread: str = "t", name: str = "run", **facts: Any) -> Record:
    """Return a run that has just started."""
    return Record("run", branch_key(thread), name, b"a run", True, run=RunFacts(**{**RUNNING_G, **facts}))


RUNNING_G: dict[str, Any] = {"status": RUNNING, "graph": "g", "fingerprint": "1"}
"""The facts of a run of graph g that a process executes."""


def everything(backend: Backend) -> list[object]:
    """Return everything a store holds except remaining times, to compare with later."""
    found = contents(backend)
    for space in SPACES:
        found += [replace(row, left_us=0) for row in backend.leases(space, None, False)]
        for kind in KINDS:
            found += backend.records(kind, space, None, False, 0, 1000)
    return found


class LeaseRules:
    """Acquiring, renewing and releasing leases, and what they allow others."""

    # Taking -------------------------------------------------------------------------------------------------------

    def test_every_new_holder_has_the_next_epoch(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        held = []
        for token in ("a", "b", "c"):
            held.append(backend.acquire(branch_key(), asking(token)))
            backend.release(branch_key(), held[-1].epoch, token)
        head = backend.head(branch_key())

        assert head is not None
        assert held == [LeaseGrant(branch_key(), head.number, epoch) for epoch in (1, 2, 3)]
        assert head.epoch == 3

    def test_acquiring_a_lease_on_a_missing_branch_creates_it_empty_and_hidden(self, backend: Backend) -> None:
        held = backend.acquire(branch_key(), asking("a"))

        assert (held.branch, held.epoch) == (branch_key(), 1)
        assert backend.head(branch_key()) == Head(None, held.number, 0, 1, {})
        assert backend.branches("", None, None) == []
        assert backend.find(Query("", "t")) == []
        assert backend.find(Query("", heads_of_threads=True)) == []
        assert backend.check() == []

    @pytest.mark.parametrize("has_checkpoint", [True, False], ids=["with a checkpoint", "without"])
    def test_a_lease_that_runs_is_refused_to_others_and_its_owner_named(
        self, backend: Backend, has_checkpoint: bool
    ) -> None:
        if has_checkpoint:
            put(backend, branch_key(), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        before = everything(backend)
        with pytest.raises(Fenced) as raised:
            backend.acquire(branch_key(), asking("b"))

        assert (raised.value.epoch, raised.value.current, raised.value.owner) == (0, 1, "owner of a")
        assert "owner of a" in str(raised.value)
        assert everything(backend) == before

    def test_a_lease_that_has_expired_is_taken_and_its_old_holder_fenced_out(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        old = acquire_briefly(backend, branch_key(), "old")
        late = replace(draft(backend, branch_key(), {"n": 2}), claim=asking("old"))
        new = backend.acquire(branch_key(), asking("new"))
        before = everything(backend)
        refused: list[Callable[[], object]] = [
            lambda: backend.commit(late),
            lambda: backend.renew(branch_key(), old.epoch, asking("old")),
            lambda: backend.release(branch_key(), old.epoch, "old"),
            lambda: backend.acquire(branch_key(), asking("old")),
        ]
        for verb in refused:
            with pytest.raises(Fenced) as raised:
                verb()
            assert (raised.value.current, raised.value.owner) == (new.epoch, "owner of new")

        assert new.epoch == old.epoch + 1
        assert everything(backend) == before

    @pytest.mark.parametrize("runs", [True, False], ids=["still runs", "has expired"])
    def test_the_same_token_again_gives_the_first_result_and_extends_the_lease(
        self, backend: Backend, runs: bool
    ) -> None:
        first = backend.acquire(branch_key(), asking("a")) if runs else acquire_briefly(backend, branch_key(), "a")

        assert backend.acquire(branch_key(), asking("a")) == first
        with pytest.raises(Fenced):
            backend.acquire(branch_key(), asking("b"))

    def test_a_branch_can_be_taken_over_before_its_first_checkpoint(self, backend: Backend) -> None:
        first = acquire_briefly(backend, branch_key(), "a")

        assert backend.acquire(branch_key(), asking("b")) == LeaseGrant(branch_key(), first.number, 2)

    def test_every_branch_has_a_lease_of_its_own(self, backend: Backend) -> None:
        keys = [
            branch_key(),
            branch_key("u"),
            branch_key(name="b"),
            branch_key(scope="sub"),
            branch_key(namespace="other"),
        ]
        for key in keys:
            assert backend.acquire(key, asking("/".join(key))).epoch == 1
        for key in keys:
            backend.renew(key, 1, asking("/".join(key)))

        assert [row.branch for row in backend.leases("", None, False)] == keys[:4]
        assert [row.branch for row in backend.leases("other", None, False)] == keys[4:]

    @pytest.mark.parametrize("before", ["nothing", "free", "expired"])
    def test_of_many_simultaneous_requests_for_a_lease_exactly_one_succeeds(
        self, backend: Backend, before: str
    ) -> None:
        if before == "free":
            put(backend, branch_key(), {"n": 1})
        if before == "expired":
            acquire_briefly(backend, branch_key(), "gone")
        ready = threading.Barrier(CLAIMERS)

        def race(worker: int) -> LeaseGrant | None:
            ready.wait()
            try:
                return backend.acquire(branch_key(), asking(f"token {worker}"))
            except Fenced:
                return None

        with ThreadPoolExecutor(CLAIMERS) as pool:
            won = [(worker, held) for worker, held in enumerate(pool.map(race, range(CLAIMERS))) if held is not None]

        ((winner, held),) = won
        backend.renew(branch_key(), held.epoch, asking(f"token {winner}"))

    # Keeping ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("runs", [True, False], ids=["still runs", "has expired"])
    def test_renewing_extends_a_lease_by_the_requested_time_from_now(self, backend: Backend, runs: bool) -> None:
        held = (
            backend.acquire(branch_key(), asking("a", HOUR_US // 4))
            if runs
            else acquire_briefly(backend, branch_key(), "a")
        )
        backend.renew(branch_key(), held.epoch, asking("a"))
        (row,) = backend.leases("", None, False)

        assert HOUR_US // 2 < row.left_us <= HOUR_US
        backend.renew(branch_key(), held.epoch, asking("a", MOMENT_US))
        await_expiry(backend, branch_key())

    def test_only_the_holder_can_renew(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")
        backend.acquire(branch_key(), asking("b", HOUR_US // 4))
        for epoch, token in ((2, "a"), (1, "b"), (3, "b"), (1, "a")):
            with pytest.raises(Fenced) as raised:
                backend.renew(branch_key(), epoch, asking(token))
            assert (raised.value.epoch, raised.value.current) == (epoch, 2)

        assert backend.leases("", None, False)[0].left_us <= HOUR_US // 4

    def test_a_lease_that_was_released_or_whose_branch_was_deleted_cannot_be_renewed(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        for key in (branch_key(), branch_key("u")):
            backend.acquire(key, asking("a"))
            backend.release(key, 1, "a")
            with pytest.raises(Fenced):
                backend.renew(key, 1, asking("a"))

        assert backend.leases("", None, False) == []
        assert backend.head(branch_key("u")) is None

    # Giving back --------------------------------------------------------------------------------------------------

    def test_a_released_lease_is_free_at_once_and_releasing_it_again_changes_nothing(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")
        before = everything(backend)
        backend.release(branch_key(), 1, "a")
        assert everything(backend) == before

        assert backend.leases("", None, False) == []
        assert backend.acquire(branch_key(), asking("b")).epoch == 2

    def test_only_the_holder_can_release_a_lease(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        acquire_briefly(backend, branch_key(), "a")
        backend.acquire(branch_key(), asking("b"))
        before = everything(backend)
        for epoch, token in ((1, "a"), (2, "a"), (1, "b")):
            with pytest.raises(Fenced):
                backend.release(branch_key(), epoch, token)
        assert everything(backend) == before
        backend.release(branch_key(), 2, "b")

        with pytest.raises(Fenced):
            backend.release(branch_key(), 1, "a")

    def test_a_branch_without_a_checkpoint_is_deleted_with_its_lease(self, backend: Backend) -> None:
        first = backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")
        assert backend.head(branch_key()) is None
        backend.release(branch_key(), 1, "a")
        second = backend.acquire(branch_key(), asking("b"))

        assert second.epoch == 1
        assert second.number != first.number

    @pytest.mark.parametrize("kept_by", ["nothing", "branch", "write", "run"])
    def test_a_thread_is_deleted_with_its_only_lease_unless_it_holds_more(self, backend: Backend, kept_by: str) -> None:
        backend.acquire(branch_key("first"), asking("a"))
        if kept_by == "branch":
            backend.acquire(branch_key("first", "b"), asking("b"))
        if kept_by == "write":
            backend.write(branch_key("first"), "later", [pending("task", 0)], False)
        if kept_by == "run":
            backend.put_record(running("first"))
        backend.release(branch_key("first"), 1, "a")
        for thread in ("second", "first"):
            put(backend, branch_key(thread), {"n": 1})
        oldest_last = [row.branch.thread for row in backend.find(Query("", heads_of_threads=True))]

        assert oldest_last == (["first", "second"] if kept_by == "nothing" else ["second", "first"])

    def test_numbers_are_never_reused_after_an_empty_branch_was_deleted_with_its_lease(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"n": 1})
        number = seq_of(backend, branch_key(), first)
        backend.delete("", [first], False)
        backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")

        assert seq_of(backend, branch_key(), put(backend, branch_key(), {"n": 2})) > number

    # Listing ---------------------------------------------------------------------------------------------------

    def test_leases_are_listed_earliest_expiry_first(self, backend: Backend) -> None:
        put(backend, branch_key("a"), {"n": 1})
        for thread in ("running", "a", "b", "given back"):
            backend.acquire(branch_key(thread), asking(thread, HOUR_US if thread == "running" else MOMENT_US))
        backend.release(branch_key("given back"), 1, "given back")
        backend.renew(branch_key("a"), 1, asking("a", MOMENT_US))
        for thread in ("a", "b"):
            await_expiry(backend, branch_key(thread))
        listed = backend.leases("", None, False)

        assert [(row.branch.thread, row.owner, row.epoch) for row in listed] == [
            ("b", "owner of b", 1),
            ("a", "owner of a", 1),
            ("running", "owner of running", 1),
        ]
        assert [row.left_us > 0 for row in listed] == [False, False, True]
        assert [row.branch.thread for row in backend.leases("", None, True)] == ["b", "a"]
        assert [row.branch.thread for row in backend.leases("", "running", False)] == ["running"]
        assert backend.leases("", "running", True) == backend.leases("other", None, False) == []


# Fences: a lease keeps others from committing and deleting.


class FenceRules:
    """Rules for what only the holder of a lease may do to its branch."""

    # Committing ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    def test_the_holder_writes_and_each_commit_extends_the_lease(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, branch_key(), {"list": long_list(9)})
        held = acquire_briefly(backend, branch_key(), "a")  # expired, and not taken by another
        first = save(backend, branch_key(), {"list": long_list(20)}, asking("a"))
        with pytest.raises(Fenced):
            backend.acquire(branch_key(), asking("b"))
        second = save(backend, branch_key(), {"list": long_list(30)}, asking("a"))
        (shown,) = backend.branches("", None, None)

        assert (shown.head, shown.epoch) == (second, held.epoch)
        assert names(backend.find(Query(*branch_key())))[:2] == [second, first]
        assert state_of(backend, second) == {"list": long_list(30)}
        assert HOUR_US // 2 < backend.leases("", None, False)[0].left_us <= HOUR_US

    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    @pytest.mark.parametrize("token", [None, "b"], ids=["no claim", "another token"])
    def test_while_a_lease_runs_only_its_holder_writes(self, backend: Backend, exists: bool, token: str | None) -> None:
        if exists:
            put(backend, branch_key(), {"list": long_list(9)})
        backend.acquire(branch_key(), asking("a"))
        before = everything(backend)
        late = draft(backend, branch_key(), {"list": long_list(20)})
        with pytest.raises(Fenced) as raised:
            backend.commit(replace(late, claim=None if token is None else asking(token)))

        assert (raised.value.current, raised.value.owner) == (1, "owner of a")
        assert everything(backend) == before

    def test_after_a_lease_has_expired_its_epoch_and_the_head_still_protect(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        unaware = draft(backend, branch_key(), {"n": 2})
        acquire_briefly(backend, branch_key(), "a")
        mine = replace(draft(backend, branch_key(), {"n": 3}), claim=asking("a"))
        with pytest.raises(Fenced):
            backend.commit(unaware)
        put(backend, branch_key(), {"n": 4})
        with pytest.raises(Conflict):
            backend.commit(mine)

        assert [state_of(backend, row.id) for row in backend.find(Query(*branch_key()))] == [{"n": 4}, {"n": 1}]

    def test_after_a_release_everyone_writes_and_the_old_holder_only_without_its_lease(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")
        with pytest.raises(Fenced):
            backend.commit(replace(draft(backend, branch_key(), {"n": 2}), claim=asking("a")))
        put(backend, branch_key(), {"n": 3})

        assert len(backend.find(Query(*branch_key()))) == 2

    @pytest.mark.parametrize("epoch", [0, 1])
    def test_a_commit_under_a_lease_on_a_missing_branch_is_fenced(self, backend: Backend, epoch: int) -> None:
        late = replace(draft(backend, branch_key(), {"text": "x" * 999}), claim=asking("a"), epoch=epoch)
        with pytest.raises(Fenced):
            backend.commit(late)

        assert everything(backend) == NOTHING
        assert backend.head(branch_key()) is None

    def test_a_stored_commit_gives_its_result_again_even_to_a_fenced_writer(self, backend: Backend) -> None:
        backend.acquire(branch_key(), asking("a", MOMENT_US))
        commit = replace(draft(backend, branch_key(), {"n": 1}, "one"), claim=asking("a", MOMENT_US))
        first = backend.commit(commit)
        await_expiry(backend, branch_key())
        backend.acquire(branch_key(), asking("b"))
        before = everything(backend)

        assert backend.commit(commit) == replace(first, fresh=False)
        with pytest.raises(IdTaken):
            backend.commit(replace(commit, digest=bytes(32)))
        assert everything(backend) == before

    def test_a_fenced_writer_gets_fenced_even_if_the_branch_moved(self, backend: Backend) -> None:
        acquire_briefly(backend, branch_key(), "a")
        late = replace(draft(backend, branch_key(), {"n": 1}), claim=asking("a"))
        backend.acquire(branch_key(), asking("b"))
        save(backend, branch_key(), {"n": 2}, asking("b"))
        with pytest.raises(Fenced) as raised:
            backend.commit(late)

        assert not isinstance(raised.value, Conflict)
        assert (raised.value.epoch, raised.value.current) == (1, 2)

    def test_a_commit_that_is_refused_does_not_extend_the_lease(self, backend: Backend) -> None:
        backend.acquire(branch_key(), asking("a", HOUR_US // 4))
        late = replace(draft(backend, branch_key(), {"n": 1}), claim=asking("a"))
        save(backend, branch_key(), {"n": 2}, asking("a", HOUR_US // 4))
        with pytest.raises(Conflict):
            backend.commit(late)
        with pytest.raises(NotFound):
            backend.commit(replace(draft(backend, branch_key(), {"n": 3}), claim=asking("a"), requires="no such"))

        assert backend.leases("", None, False)[0].left_us <= HOUR_US // 4

    def test_only_the_holder_can_fork_onto_a_leased_branch(self, backend: Backend) -> None:
        source = put(backend, branch_key(), {"list": long_list(9)})
        made_before = draft(backend, branch_key("u"), {"list": long_list(9)}, origin=source)
        backend.acquire(branch_key("u"), asking("a"))
        with pytest.raises(Fenced):
            backend.commit(made_before)
        fork = save(backend, branch_key("u"), {"list": long_list(9)}, asking("a"), origin=source)
        (shown,) = backend.branches("", "u", None)
        assert (shown.head, shown.origin) == (fork, source)
        backend.delete_thread("", "t")
        (row,) = backend.find(Query(*branch_key("u")))

        assert row.parent_digest is not None, "its parent is gone, and it stored the digest before"
        assert state_of(backend, fork) == {"list": long_list(9)}

    # Deleting -----------------------------------------------------------------------------------------------------

    def test_no_head_is_deleted_from_under_a_lease_that_runs(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 9)}) for n in (1, 2, 3)]
        free = put(backend, branch_key("u"), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        before = everything(backend)
        for doomed, token in (([free, ids[2]], None), ([ids[0], ids[2], free], "b"), (ids, None)):
            with pytest.raises(Fenced) as raised:
                backend.delete("", doomed, False, token)
            assert raised.value.owner == "owner of a"
            assert everything(backend) == before

        assert backend.delete("", [*ids, free], True).checkpoints == 2
        assert names(backend.find(Query(*branch_key()))) == ids[2:]

    def test_older_checkpoints_can_be_deleted_under_a_lease(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(3)]
        backend.acquire(branch_key(), asking("a"))

        assert backend.delete("", ids[:2], False).checkpoints == 2
        save(backend, branch_key(), {"n": 4}, asking("a"))

    @pytest.mark.parametrize("who", ["holder", "anyone after its end"])
    def test_an_emptied_branch_is_deleted_with_its_lease_and_its_holder_cannot_use_it_again(
        self, backend: Backend, who: str
    ) -> None:
        name = put(backend, branch_key(), {"n": 1})
        held = acquire_briefly(backend, branch_key(), "a")
        if who == "holder":
            backend.renew(branch_key(), held.epoch, asking("a"))
        late = replace(draft(backend, branch_key(), {"n": 2}), claim=asking("a"))
        removed = backend.delete("", [name], False, "a" if who == "holder" else None)
        assert (removed.checkpoints, removed.branches) == (1, 1)
        assert (backend.head(branch_key()), backend.leases("", None, False)) == (None, [])
        for _ in ("gone", "made anew"):
            with pytest.raises(Fenced):
                backend.renew(branch_key(), held.epoch, asking("a"))
            with pytest.raises((Fenced, Conflict)):
                backend.commit(late)
            backend.acquire(branch_key(), asking("b"))

        assert backend.find(Query(*branch_key())) == []

    def test_the_head_before_becomes_the_head_and_the_lease_stays(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(2)]
        backend.acquire(branch_key(), asking("a"))
        backend.delete("", ids[1:], False, "a")

        assert backend.branches("", None, None)[0].head == ids[0]
        save(backend, branch_key(), {"n": 3}, asking("a"))

    @pytest.mark.parametrize("branch", ["main", "b", "empty"])
    def test_no_thread_is_deleted_from_under_a_lease_that_runs_on_any_of_its_branches(
        self, backend: Backend, branch: str
    ) -> None:
        put(backend, branch_key(), {"list": long_list(9)})
        put(backend, branch_key(name="b"), {"n": 1})
        backend.put_record(running("t"))
        backend.acquire(branch_key(name=branch), asking("a"))
        before = everything(backend)
        for token in (None, "b"):
            with pytest.raises(Fenced):
                backend.delete_thread("", "t", token)
            assert everything(backend) == before

        assert backend.delete_thread("", "t", "a").checkpoints == 2
        assert everything(backend) == NOTHING
        assert backend.head(branch_key(name=branch)) is None

    def test_a_thread_can_be_deleted_once_its_leases_have_expired_or_were_released(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")
        acquire_briefly(backend, branch_key(name="empty"), "b")

        assert backend.delete_thread("", "t").checkpoints == 1
        assert backend.leases("", None, False) == []
        assert backend.acquire(branch_key(name="empty"), asking("c")).epoch == 1
