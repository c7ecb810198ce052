"""The part of the store contract about leases: who may write a lane, take it over, and delete from it.

Time is real here: a lease that must run gets an hour, one that must end a millisecond, and its end is awaited by asking
the store. So these tests run on stores whose clock nobody can set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import Fenced
from backstay.store.base import Backend, Head, LaneKey, Query
from backstay.store.leases import Claim, Held
from backstay.store.records import KINDS, Record
from backstay.testing.drafts import SPACES, contents, draft, lane, pending, put, seq_of
from backstay.testing.waiting import wait_until

HOUR_US = 3_600_000_000
MOMENT_US = 1_000
CLAIMERS = 8
NOTHING: list[object] = [{}]
"""What ``everything`` finds in an empty store: no bytes, and nothing else."""


def asking(token: str, ttl_us: int = HOUR_US) -> Claim:
    """Return a claim under this token."""
    return Claim(f"owner of {token}", token, ttl_us)


def save(backend: Backend, key: LaneKey, state: dict[str, Any], claim: Claim, **options: Any) -> str:
    """Add a state at the end of a lane under a lease and return the checkpoint's id."""
    commit = replace(draft(backend, key, state, **options), claim=claim)
    assert backend.commit(commit).fresh
    return commit.id


def acquire_briefly(backend: Backend, key: LaneKey, token: str) -> Held:
    """Take a lease and let it expire."""
    held = backend.acquire(key, asking(token, MOMENT_US))
    await_expiry(backend, key)
    return held


def await_expiry(backend: Backend, key: LaneKey) -> None:
    """Block until the lane's lease has expired."""
    wait_until(lambda: key in [row.lane for row in backend.leases(key.namespace, key.thread, True)])


def running(thread: str = "t", name: str = "run") -> Record:
    """Return a session that has just begun."""
    return Record("session", lane(thread), name, b"a run", True)


def everything(backend: Backend) -> list[object]:
    """Return all a store holds but the time that is left, to be compared with later."""
    found = contents(backend)
    for space in SPACES:
        found += [replace(row, left_us=0) for row in backend.leases(space, None, False)]
        for kind in KINDS:
            found += [replace(row, left_us=0) for row in backend.records(kind, space, None, False, 0, 1000)]
    return found


class LeaseRules:
    """Taking, keeping and giving back leases; and what they let others do."""

    # Taking -------------------------------------------------------------------------------------------------------

    @pytest.mark.row("C5")
    def test_every_new_holder_has_the_next_epoch(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        held = []
        for token in ("a", "b", "c"):
            held.append(backend.acquire(lane(), asking(token)))
            backend.release(lane(), held[-1].epoch, token)
        head = backend.head(lane())

        assert head is not None
        assert held == [Held(lane(), head.number, epoch) for epoch in (1, 2, 3)]
        assert head.epoch == 3

    def test_a_lane_that_is_not_there_is_made_without_a_checkpoint_and_shown_nowhere(self, backend: Backend) -> None:
        held = backend.acquire(lane(), asking("a"))

        assert (held.lane, held.epoch) == (lane(), 1)
        assert backend.head(lane()) == Head(None, held.number, 0, 1, {})
        assert backend.lanes("", None, None) == []
        assert backend.find(Query("", "t")) == []
        assert backend.find(Query("", heads_of_threads=True)) == []
        assert backend.check() == []

    @pytest.mark.row("C5")
    @pytest.mark.parametrize("has_checkpoint", [True, False], ids=["with a checkpoint", "without"])
    def test_a_lease_that_runs_is_refused_to_others_and_its_owner_named(
        self, backend: Backend, has_checkpoint: bool
    ) -> None:
        if has_checkpoint:
            put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        before = everything(backend)
        with pytest.raises(Fenced) as raised:
            backend.acquire(lane(), asking("b"))

        assert (raised.value.epoch, raised.value.current, raised.value.owner) == (0, 1, "owner of a")
        assert "owner of a" in str(raised.value)
        assert everything(backend) == before

    @pytest.mark.row("C5")
    def test_a_lease_that_has_expired_is_taken_and_its_old_holder_fenced_out(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        old = acquire_briefly(backend, lane(), "old")
        late = replace(draft(backend, lane(), {"n": 2}), claim=asking("old"))
        new = backend.acquire(lane(), asking("new"))
        before = everything(backend)
        refused: list[Callable[[], object]] = [
            lambda: backend.commit(late),
            lambda: backend.renew(lane(), old.epoch, asking("old")),
            lambda: backend.release(lane(), old.epoch, "old"),
            lambda: backend.acquire(lane(), asking("old")),
        ]
        for verb in refused:
            with pytest.raises(Fenced) as raised:
                verb()
            assert (raised.value.current, raised.value.owner) == (new.epoch, "owner of new")

        assert new.epoch == old.epoch + 1
        assert everything(backend) == before

    @pytest.mark.row("C2", "C5")
    @pytest.mark.parametrize("runs", [True, False], ids=["still runs", "has expired"])
    def test_the_same_token_again_gives_the_first_result_and_extends_the_lease(
        self, backend: Backend, runs: bool
    ) -> None:
        first = backend.acquire(lane(), asking("a")) if runs else acquire_briefly(backend, lane(), "a")

        assert backend.acquire(lane(), asking("a")) == first
        with pytest.raises(Fenced):
            backend.acquire(lane(), asking("b"))

    def test_a_lane_can_be_taken_over_before_its_first_checkpoint(self, backend: Backend) -> None:
        first = acquire_briefly(backend, lane(), "a")

        assert backend.acquire(lane(), asking("b")) == Held(lane(), first.number, 2)

    def test_every_lane_has_a_lease_of_its_own(self, backend: Backend) -> None:
        keys = [lane(), lane("u"), lane(branch="b"), lane(scope="sub"), lane(namespace="other")]
        for key in keys:
            assert backend.acquire(key, asking("/".join(key))).epoch == 1
        for key in keys:
            backend.renew(key, 1, asking("/".join(key)))

        assert [row.lane for row in backend.leases("", None, False)] == keys[:4]
        assert [row.lane for row in backend.leases("other", None, False)] == keys[4:]

    @pytest.mark.row("C5")
    @pytest.mark.parametrize("before", ["nothing", "free", "expired"])
    def test_of_many_who_want_a_lease_at_once_exactly_one_gets_it(self, backend: Backend, before: str) -> None:
        if before == "free":
            put(backend, lane(), {"n": 1})
        if before == "expired":
            acquire_briefly(backend, lane(), "gone")
        ready = threading.Barrier(CLAIMERS)

        def race(worker: int) -> Held | None:
            ready.wait()
            try:
                return backend.acquire(lane(), asking(f"token {worker}"))
            except Fenced:
                return None

        with ThreadPoolExecutor(CLAIMERS) as pool:
            won = [(worker, held) for worker, held in enumerate(pool.map(race, range(CLAIMERS))) if held is not None]

        ((winner, held),) = won
        backend.renew(lane(), held.epoch, asking(f"token {winner}"))

    # Keeping ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("runs", [True, False], ids=["still runs", "has expired"])
    def test_renewing_lets_a_lease_run_for_the_claims_time_from_now_on(self, backend: Backend, runs: bool) -> None:
        held = backend.acquire(lane(), asking("a", HOUR_US // 4)) if runs else acquire_briefly(backend, lane(), "a")
        backend.renew(lane(), held.epoch, asking("a"))
        (row,) = backend.leases("", None, False)

        assert HOUR_US // 2 < row.left_us <= HOUR_US
        backend.renew(lane(), held.epoch, asking("a", MOMENT_US))
        await_expiry(backend, lane())

    @pytest.mark.row("C5")
    def test_only_the_holder_can_renew(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        backend.acquire(lane(), asking("b", HOUR_US // 4))
        for epoch, token in ((2, "a"), (1, "b"), (3, "b"), (1, "a")):
            with pytest.raises(Fenced) as raised:
                backend.renew(lane(), epoch, asking(token))
            assert (raised.value.epoch, raised.value.current) == (epoch, 2)

        assert backend.leases("", None, False)[0].left_us <= HOUR_US // 4

    def test_a_lease_that_was_given_back_or_whose_lane_is_gone_cannot_be_renewed(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        for key in (lane(), lane("u")):
            backend.acquire(key, asking("a"))
            backend.release(key, 1, "a")
            with pytest.raises(Fenced):
                backend.renew(key, 1, asking("a"))

        assert backend.leases("", None, False) == []
        assert backend.head(lane("u")) is None

    # Giving back --------------------------------------------------------------------------------------------------

    def test_a_lease_given_back_is_free_at_once_and_giving_it_back_again_changes_nothing(
        self, backend: Backend
    ) -> None:
        put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        before = everything(backend)
        backend.release(lane(), 1, "a")
        assert everything(backend) == before

        assert backend.leases("", None, False) == []
        assert backend.acquire(lane(), asking("b")).epoch == 2

    @pytest.mark.row("C8")
    def test_only_the_holder_can_give_a_lease_back(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        acquire_briefly(backend, lane(), "a")
        backend.acquire(lane(), asking("b"))
        before = everything(backend)
        for epoch, token in ((1, "a"), (2, "a"), (1, "b")):
            with pytest.raises(Fenced):
                backend.release(lane(), epoch, token)
        assert everything(backend) == before
        backend.release(lane(), 2, "b")

        with pytest.raises(Fenced):
            backend.release(lane(), 1, "a")

    def test_a_lane_without_a_checkpoint_goes_with_its_lease(self, backend: Backend) -> None:
        first = backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        assert backend.head(lane()) is None
        backend.release(lane(), 1, "a")
        second = backend.acquire(lane(), asking("b"))

        assert second.epoch == 1
        assert second.number != first.number

    @pytest.mark.parametrize("kept_by", ["nothing", "lane", "write", "session"])
    def test_a_thread_goes_with_its_only_lease_unless_there_is_more_in_it(self, backend: Backend, kept_by: str) -> None:
        backend.acquire(lane("first"), asking("a"))
        if kept_by == "lane":
            backend.acquire(lane("first", "b"), asking("b"))
        if kept_by == "write":
            backend.write(lane("first"), "later", [pending("task", 0)], False)
        if kept_by == "session":
            backend.put_record(running("first"), HOUR_US)
        backend.release(lane("first"), 1, "a")
        for thread in ("second", "first"):
            put(backend, lane(thread), {"n": 1})
        oldest_last = [row.lane.thread for row in backend.find(Query("", heads_of_threads=True))]

        assert oldest_last == (["first", "second"] if kept_by == "nothing" else ["second", "first"])

    @pytest.mark.row("C3")
    def test_numbers_are_never_given_again_after_an_empty_lane_went_with_its_lease(self, backend: Backend) -> None:
        first = put(backend, lane(), {"n": 1})
        number = seq_of(backend, lane(), first)
        backend.delete("", [first], False)
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")

        assert seq_of(backend, lane(), put(backend, lane(), {"n": 2})) > number

    # Listing and claiming -----------------------------------------------------------------------------------------

    def test_leases_are_listed_the_one_that_expired_first_first(self, backend: Backend) -> None:
        put(backend, lane("a"), {"n": 1})
        for thread in ("running", "a", "b", "given back"):
            backend.acquire(lane(thread), asking(thread, HOUR_US if thread == "running" else MOMENT_US))
        backend.release(lane("given back"), 1, "given back")
        backend.renew(lane("a"), 1, asking("a", MOMENT_US))
        for thread in ("a", "b"):
            await_expiry(backend, lane(thread))
        listed = backend.leases("", None, False)

        assert [(row.lane.thread, row.owner, row.epoch) for row in listed] == [
            ("b", "owner of b", 1),
            ("a", "owner of a", 1),
            ("running", "owner of running", 1),
        ]
        assert [row.left_us > 0 for row in listed] == [False, False, True]
        assert [row.lane.thread for row in backend.leases("", None, True)] == ["b", "a"]
        assert [row.lane.thread for row in backend.leases("", "running", False)] == ["running"]
        assert backend.leases("", "running", True) == backend.leases("other", None, False) == []

    @pytest.mark.row("C5")
    def test_expired_leases_are_claimed_the_one_that_expired_first_first(self, backend: Backend) -> None:
        put(backend, lane("c"), {"n": 1})
        backend.acquire(lane("running"), asking("running"))
        backend.acquire(lane("z", namespace="other"), asking("z", MOMENT_US))
        numbers = {key: backend.acquire(lane(key), asking(key, MOMENT_US)).number for key in ("a", "b", "c")}
        backend.renew(lane("a"), 1, asking("a", MOMENT_US))
        for key in numbers:
            await_expiry(backend, lane(key))
        assert backend.claim("", 0, asking("nobody")) == []
        first, second = backend.claim("", 2, asking("x")), backend.claim("", 2, asking("y"))

        assert first == [Held(lane(key), numbers[key], 2) for key in ("b", "c")]
        assert second == [Held(lane("a"), numbers["a"], 2)]
        assert backend.claim("", 9, asking("late")) == []
        with pytest.raises(Fenced):
            backend.renew(lane("b"), 1, asking("b"))
        save(backend, lane("c"), {"n": 2}, asking("x"))

    @pytest.mark.row("C2")
    def test_claiming_again_under_the_same_token_gives_the_same_leases(self, backend: Backend) -> None:
        for thread in ("a", "b", "c"):
            acquire_briefly(backend, lane(thread), thread)
        first = backend.claim("", 2, asking("x", MOMENT_US))
        for held in first:
            await_expiry(backend, held.lane)
        again = backend.claim("", 2, asking("x"))

        assert len(again) == 2
        assert {held.lane for held in again} == {held.lane for held in first}
        assert {held.epoch for held in again} == {2}
        assert [row.lane for row in backend.leases("", None, True)] == [lane("c")]

    @pytest.mark.row("C5")
    def test_several_who_claim_at_once_get_different_leases(self, backend: Backend) -> None:
        keys = {lane(f"t{number}") for number in range(2 * CLAIMERS)}
        for key in keys:
            backend.acquire(key, asking("gone", MOMENT_US))
        for key in keys:
            await_expiry(backend, key)
        ready = threading.Barrier(CLAIMERS)

        def race(worker: int) -> list[Held]:
            ready.wait()
            return backend.claim("", 3, asking(f"worker {worker}"))

        with ThreadPoolExecutor(CLAIMERS) as pool:
            claimed = [held for each in pool.map(race, range(CLAIMERS)) for held in each]
        claimed += backend.claim("", 2 * CLAIMERS, asking("the rest"))

        assert sorted(held.lane for held in claimed) == sorted(keys)
        assert {held.epoch for held in claimed} == {2}
