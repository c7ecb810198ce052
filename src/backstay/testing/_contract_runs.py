"""The part of the store contract about runs: stored with the lease of their branch, listed by page, claimed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import Conflict, Corrupted, Fenced
from backstay.store.base import Backend
from backstay.store.leases import LeaseGrant
from backstay.store.records import RUNNING, Record, RunFacts, RunQuery
from backstay.testing._contract_leases import CLAIMERS, MOMENT_US, asking, await_expiry, everything, running, save
from backstay.testing.drafts import branch_key, put

G = [("g", "1")]
"""The graph that most claims are for."""


def queued(thread: str, due_us: int | None = 5, graph: str = "g", fingerprint: str = "1", **changes: Any) -> Record:
    """Return a run that waits for a worker."""
    facts = RunFacts("queued", graph, fingerprint, due_us)
    return replace(Record("run", branch_key(thread), f"run of {thread}", b"queued", True, run=facts), **changes)


def started(run: Record) -> Record:
    """Return a run that a process executes now."""
    assert run.run is not None
    return replace(run, body=b"started", run=run.run._replace(status=RUNNING, due_us=None))


def claim(
    backend: Backend,
    token: str,
    count: int = 10,
    graphs: list[tuple[str, str]] | None = None,
    now_us: int = 10,
    dead: tuple[str, ...] = (),
    ttl_us: int | None = None,
    change: Callable[[Record], Record | None] = started,
) -> list[LeaseGrant]:
    """Claim runs."""
    request = asking(token) if ttl_us is None else asking(token, ttl_us)
    return backend.claim("", graphs or G, count, request, now_us, dead, change)


def threads(found: list[LeaseGrant]) -> list[str]:
    """Return the threads of claimed runs, in order."""
    return [grant.branch.thread for grant in found]


def listed(backend: Backend, **wanted: Any) -> list[str]:
    """Return the keys of runs, in the order of the list."""
    return [each.record.key for each in backend.runs(RunQuery("", **wanted))]


class RunRules:
    """Runs change with the lease of their branch, are listed newest first, and are claimed by one worker each."""

    # With the lease -------------------------------------------------------------------------------------------------

    def test_a_run_is_stored_with_the_lease_that_is_taken_for_it(self, backend: Backend) -> None:
        grant = backend.acquire(branch_key(), asking("a"), running())

        assert grant.run == replace(running(), version=1, number=grant.run.number if grant.run else 0)
        found = backend.run(branch_key())
        assert found is not None
        assert (found.record, found.step) == (grant.run, None)
        assert found.lease is not None
        assert (found.lease.token, found.lease.epoch, found.lease.left_us > 0) == ("a", 1, True)

    def test_a_run_is_stored_with_the_release_of_its_lease(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        grant = backend.acquire(branch_key(), asking("a"), running())
        assert grant.run is not None
        ended = replace(grant.run, body=b"ended", open=False, run=RunFacts("completed", "g", "1"))
        backend.release(branch_key(), 1, "a", ended)
        found = backend.run(branch_key())

        assert found is not None
        assert (found.record.run, found.record.open, found.lease) == (ended.run, False, None)

    def test_a_run_outlives_an_empty_branch_that_is_removed_with_its_lease(self, backend: Backend) -> None:
        grant = backend.acquire(branch_key(), asking("a"), running())
        assert grant.run is not None
        backend.release(branch_key(), 1, "a", replace(grant.run, body=b"left"))

        assert backend.head(branch_key()) is None
        found = backend.run(branch_key())
        assert found is not None
        assert (found.record.body, found.lease, found.step) == (b"left", None, None)

    @pytest.mark.parametrize("verb", ["acquire", "release", "put_record"])
    def test_nothing_changes_if_another_writer_has_changed_the_run(self, backend: Backend, verb: str) -> None:
        put(backend, branch_key(), {"n": 1})
        stored = backend.put_record(running())
        backend.put_record(replace(stored, body=b"faster"))
        late = replace(stored, body=b"late")
        effect = Record("effect", branch_key(), "pay", b"intent", True)
        if verb == "release":
            backend.acquire(branch_key(), asking("a"))
        before = everything(backend)
        call: dict[str, Callable[[], object]] = {
            "acquire": lambda: backend.acquire(branch_key(), asking("a"), late),
            "release": lambda: backend.release(branch_key(), 1, "a", late),
            "put_record": lambda: backend.put_record(effect, None, late),
        }
        with pytest.raises(Conflict) as raised:
            call[verb]()

        assert raised.value.winner.body == b"faster"
        assert everything(backend) == before

    def test_a_run_is_stored_with_another_record(self, backend: Backend) -> None:
        run = backend.put_record(running())
        effect = backend.put_record(
            Record("effect", branch_key(), "pay", b"x", True), None, replace(run, body=b"woken")
        )
        found = backend.run(branch_key())

        assert backend.record("effect", branch_key(), "pay") == effect
        assert found is not None
        assert found.record.body == b"woken"

    def test_verbs_that_are_repeated_after_a_lost_answer_return_the_first_result(self, backend: Backend) -> None:
        first = backend.acquire(branch_key(), asking("a"), running())
        again = backend.acquire(branch_key(), asking("a"), running())
        assert again == first
        assert first.run is not None
        put(backend, branch_key("other"), {"n": 1})
        save(backend, branch_key(), {"n": 1}, asking("a"))
        ended = replace(first.run, body=b"ended")
        for _ in range(2):
            backend.release(branch_key(), 1, "a", ended)
        found = backend.run(branch_key())

        assert found is not None
        assert (found.record.body, found.record.version) == (b"ended", 2)

    def test_the_lease_of_a_dead_holder_is_taken_by_its_epoch(self, backend: Backend) -> None:
        backend.acquire(branch_key(), asking("dead"))
        for epoch in (0, 2):
            with pytest.raises(Fenced):
                backend.acquire(branch_key(), asking("b")._replace(over=epoch))
        grant = backend.acquire(branch_key(), asking("b")._replace(over=1))

        assert grant.epoch == 2
        with pytest.raises(Fenced):
            backend.renew(branch_key(), 1, asking("dead"))
        with pytest.raises(Fenced):
            backend.acquire(branch_key(), asking("c")._replace(over=1))

    def test_the_run_that_is_stored_with_a_lease_need_not_be_the_newest(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        old = backend.put_record(queued("t", key="old"))
        new = backend.put_record(queued("t", key="new"))
        grant = backend.acquire(branch_key(), asking("a"), started(old))
        assert grant.run is not None
        assert (grant.run.key, grant.run.version, grant.run.body) == ("old", 2, b"started")
        backend.release(branch_key(), 1, "a", replace(grant.run, body=b"ended"))
        found = backend.record("run", branch_key(), "old")

        assert found is not None
        assert found.body == b"ended"
        assert backend.record("run", branch_key(), "new") == new

    # Lists ----------------------------------------------------------------------------------------------------------

    def test_runs_are_listed_newest_first_by_status_graph_and_thread(self, backend: Backend) -> None:
        for n in range(3):
            backend.put_record(queued("a", key=f"a{n}"))
            backend.put_record(queued("b", key=f"b{n}", graph="h"))
        backend.put_record(running("b", "b3"))
        backend.put_record(queued("a", key="elsewhere", branch=branch_key("a", namespace="other")))

        assert listed(backend) == ["b3", "b2", "a2", "b1", "a1", "b0", "a0"]
        assert listed(backend, status="queued") == ["b2", "a2", "b1", "a1", "b0", "a0"]
        assert listed(backend, status="running") == ["b3"]
        assert listed(backend, graph="g") == ["b3", "a2", "a1", "a0"]
        assert listed(backend, graph="g", status="queued") == ["a2", "a1", "a0"]
        assert listed(backend, thread="b") == ["b3", "b2", "b1", "b0"]
        assert listed(backend, thread="b", graph="h", status="queued") == ["b2", "b1", "b0"]
        assert listed(backend, thread="none") == listed(backend, graph="none") == listed(backend, status="none") == []

    @pytest.mark.parametrize("wanted", [{}, {"status": "queued"}, {"graph": "g"}, {"thread": "t"}])
    def test_pages_follow_each_other(self, backend: Backend, wanted: dict[str, str]) -> None:
        for n in range(7):
            backend.put_record(queued("t", key=f"r{n}"))
        seen: list[str] = []
        before = None
        while page := backend.runs(RunQuery("", before=before, limit=3, **wanted)):
            seen += [each.record.key for each in page]
            before = page[-1].record.number

        assert seen == [f"r{n}" for n in reversed(range(7))]

    def test_a_changed_run_moves_to_its_new_lists_and_a_dropped_one_is_in_none(self, backend: Backend) -> None:
        stored = backend.put_record(queued("t"))
        changed = backend.put_record(replace(stored, body=b"2", run=RunFacts("failed", "h", "2")))
        assert listed(backend, status="queued") == listed(backend, graph="g") == []
        assert listed(backend, status="failed") == listed(backend, graph="h") == [changed.key]
        assert backend.drop_records([stored]) == 0
        assert backend.drop_records([changed]) == 1

        assert listed(backend) == listed(backend, status="failed") == listed(backend, thread="t") == []
        assert backend.run(branch_key()) is None

    def test_the_newest_run_of_a_branch_and_its_step(self, backend: Backend) -> None:
        backend.put_record(queued("t", key="old"))
        backend.put_record(queued("t", key="new"))
        backend.put_record(queued("t", key="other", branch=branch_key(name="b")))
        put(backend, branch_key(), {"n": 1}, step=7)
        found = backend.run(branch_key())

        assert found is not None
        assert (found.record.key, found.step) == ("new", 7)
        assert backend.run(branch_key("none")) is None

    def test_runs_are_counted_by_status(self, backend: Backend) -> None:
        for n in range(3):
            backend.put_record(queued(f"t{n}"))
        backend.put_record(running("r"))

        assert backend.count_runs("", ["queued", "running", "failed"]) == {"queued": 3, "running": 1}
        assert backend.count_runs("other", ["queued"]) == {}

    # Claiming -------------------------------------------------------------------------------------------------------

    def test_due_runs_are_claimed_earliest_first(self, backend: Backend) -> None:
        for thread, due in (("late", 9), ("early", 1), ("middle", 5), ("not yet", 11), ("never", None)):
            backend.put_record(queued(thread, due))
        assert claim(backend, "x", count=0) == []
        first, second = claim(backend, "x", 2), claim(backend, "y", 2)

        assert (threads(first), threads(second)) == (["early", "middle"], ["late"])
        assert [grant.run and grant.run.body for grant in first] == [b"started"] * 2
        assert claim(backend, "z") == []
        assert threads(claim(backend, "z", now_us=11)) == ["not yet"]
        assert {row.branch.thread: row.token for row in backend.leases("", None, False)} == {
            **dict.fromkeys(("early", "middle"), "x"),
            "late": "y",
            "not yet": "z",
        }

    def test_only_runs_of_the_named_graphs_are_claimed(self, backend: Backend) -> None:
        for thread, graph, fingerprint in (("a", "g", "1"), ("b", "g", "2"), ("c", "h", "1"), ("d", "k", "1")):
            backend.put_record(queued(thread, graph=graph, fingerprint=fingerprint))
        backend.put_record(queued("e", branch=branch_key("e", namespace="other")))

        assert sorted(threads(claim(backend, "x", graphs=[("g", "2"), ("h", "1"), ("g", "3")]))) == ["b", "c"]
        assert threads(claim(backend, "y")) == ["a"]

    def test_runs_whose_lease_has_expired_are_claimed_and_others_are_not(self, backend: Backend) -> None:
        put(backend, branch_key("gone"), {"n": 1})
        backend.acquire(branch_key("gone"), asking("gone", MOMENT_US), running("gone"))
        backend.acquire(branch_key("alive"), asking("alive"), running("alive"))
        backend.acquire(branch_key("plain"), asking("plain", MOMENT_US))
        backend.acquire(branch_key("other"), asking("other", MOMENT_US), running("other", graph="h"))
        for thread in ("gone", "plain", "other"):
            await_expiry(backend, branch_key(thread))
        (grant,) = claim(backend, "x")

        assert (grant.branch.thread, grant.epoch) == ("gone", 2)
        with pytest.raises(Fenced):
            backend.renew(branch_key("gone"), 1, asking("gone"))
        save(backend, branch_key("gone"), {"n": 2}, asking("x"))

    def test_runs_of_dead_holders_are_claimed_at_once(self, backend: Backend) -> None:
        for thread in ("a", "b"):
            backend.acquire(branch_key(thread), asking(thread), running(thread))

        assert threads(claim(backend, "x", dead=("b", "none"))) == ["b"]

    def test_a_running_run_whose_lease_is_free_is_claimed(self, backend: Backend) -> None:
        put(backend, branch_key("a"), {"n": 1})
        for thread in ("a", "b"):
            backend.acquire(branch_key(thread), asking(thread), running(thread))
            backend.release(branch_key(thread), 1, thread)

        assert sorted(threads(claim(backend, "x"))) == ["a", "b"]

    def test_a_due_run_whose_branch_another_writer_holds_is_left_alone(self, backend: Backend) -> None:
        backend.put_record(queued("held", 1))
        backend.put_record(queued("free", 2))
        backend.acquire(branch_key("held"), asking("writer"))

        assert threads(claim(backend, "x", 1)) == ["free"]
        backend.release(branch_key("held"), 1, "writer")
        assert threads(claim(backend, "y")) == ["held"]

    def test_simultaneous_claims_get_different_runs(self, backend: Backend) -> None:
        keys = {branch_key(f"t{number}") for number in range(2 * CLAIMERS)}
        for key in keys:
            backend.put_record(queued(key.thread))
        ready = threading.Barrier(CLAIMERS)

        def race(worker: int) -> list[LeaseGrant]:
            ready.wait()
            return claim(backend, f"worker {worker}", 3)

        with ThreadPoolExecutor(CLAIMERS) as pool:
            claimed = [held for each in pool.map(race, range(CLAIMERS)) for held in each]
        claimed += claim(backend, "the rest", 2 * CLAIMERS)

        assert sorted(held.branch for held in claimed) == sorted(keys)
        assert {held.epoch for held in claimed} == {1}

    def test_a_claim_that_fails_changes_nothing(self, backend: Backend) -> None:
        backend.put_record(queued("t"))
        before = everything(backend)

        def refuse(run: Record) -> Record:
            raise Corrupted(run.key)

        with pytest.raises(Corrupted):
            claim(backend, "x", change=refuse)
        assert everything(backend) == before
        assert threads(claim(backend, "y")) == ["t"]

    def test_runs_that_a_claim_leaves_do_not_hide_those_behind_them(self, backend: Backend) -> None:
        for number in range(5):
            backend.put_record(queued(f"t{number}", number))

        def is_third(run: Record) -> Record | None:
            return started(run) if run.branch.thread == "t3" else None

        assert threads(claim(backend, "x", 1, change=is_third)) == ["t3"]

    def test_two_runs_of_a_branch_are_claimed_one_after_the_other(self, backend: Backend) -> None:
        for number in range(2):
            backend.put_record(queued("t", number, key=f"r{number}"))
        backend.put_record(queued("u", 9))
        first = claim(backend, "x")

        assert [(grant.branch.thread, grant.run and grant.run.key) for grant in first] == [
            ("t", "r0"),
            ("u", "run of u"),
        ]
        assert claim(backend, "y") == []
        backend.release(
            branch_key(),
            first[0].epoch,
            "x",
            first[0].run and replace(first[0].run, body=b"2", run=RunFacts("failed", "g", "1")),
        )
        assert [grant.run and grant.run.key for grant in claim(backend, "y")] == ["r1"]

    def test_a_claim_may_leave_runs_out(self, backend: Backend) -> None:
        for thread in ("a", "b"):
            backend.put_record(queued(thread))

        assert threads(claim(backend, "x", change=lambda run: None if run.branch.thread == "a" else started(run))) == [
            "b"
        ]
        assert threads(claim(backend, "y")) == ["a"]

    def test_runs_that_are_left_out_do_not_keep_others_from_being_claimed(self, backend: Backend) -> None:
        for n in range(5):
            backend.put_record(queued(f"bad {n}", n))
        for thread in ("a", "b", "c"):
            backend.put_record(queued(thread, 9))

        def choose(run: Record) -> Record | None:
            return None if run.branch.thread.startswith("bad") else started(run)

        assert threads(claim(backend, "x", 1, change=choose)) == ["a"]
        assert threads(claim(backend, "y", 9, change=choose)) == ["b", "c"]
        assert claim(backend, "z", 1, change=choose) == []

    def test_a_branch_runs_one_run_at_a_time(self, backend: Backend) -> None:
        put(backend, branch_key("old"), {"n": 1})
        for thread in ("old", "new"):
            for n in range(3):
                backend.put_record(queued(thread, n, key=f"{thread} {n}"))
        first = claim(backend, "x")

        assert sorted(grant.run.key for grant in first if grant.run) == ["new 0", "old 0"]
        assert claim(backend, "y") == []
        assert len(backend.runs(RunQuery("", status=RUNNING))) == 2

    def test_simultaneous_claims_of_one_branch_get_one_run(self, backend: Backend) -> None:
        for n in range(CLAIMERS):
            backend.put_record(queued("t", n, key=f"run {n}"))
        ready = threading.Barrier(CLAIMERS)

        def race(worker: int) -> list[LeaseGrant]:
            ready.wait()
            return claim(backend, f"worker {worker}", 1)

        with ThreadPoolExecutor(CLAIMERS) as pool:
            claimed = [held for each in pool.map(race, range(CLAIMERS)) for held in each]

        assert len(claimed) == len(backend.runs(RunQuery("", status=RUNNING))) == 1
