"""The part of the store contract about what a lease keeps others from: committing and deleting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.errors import Conflict, Fenced, IdTaken, NotFound
from backstay.store.base import Backend, Query
from backstay.testing._contract_leases import (
    HOUR_US,
    MOMENT_US,
    NOTHING,
    acquire_briefly,
    asking,
    await_expiry,
    everything,
    running,
    save,
)
from backstay.testing.drafts import draft, lane, long_list, names, put, state_of


class FenceRules:
    """What the holder of a lease may do to its lane, and what nobody else may."""

    # Committing ---------------------------------------------------------------------------------------------------

    @pytest.mark.row("C1", "C5")
    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    def test_the_holder_writes_and_each_commit_extends_the_lease(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, lane(), {"list": long_list(9)})
        held = acquire_briefly(backend, lane(), "a")  # expired, and nobody took it
        first = save(backend, lane(), {"list": long_list(20)}, asking("a"))
        with pytest.raises(Fenced):
            backend.acquire(lane(), asking("b"))
        second = save(backend, lane(), {"list": long_list(30)}, asking("a"))
        (shown,) = backend.lanes("", None, None)

        assert (shown.head, shown.epoch) == (second, held.epoch)
        assert names(backend.find(Query(*lane())))[:2] == [second, first]
        assert state_of(backend, second) == {"list": long_list(30)}
        assert HOUR_US // 2 < backend.leases("", None, False)[0].left_us <= HOUR_US

    @pytest.mark.row("C1", "C5")
    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    @pytest.mark.parametrize("token", [None, "b"], ids=["no claim", "another token"])
    def test_while_a_lease_runs_nobody_else_writes(self, backend: Backend, exists: bool, token: str | None) -> None:
        if exists:
            put(backend, lane(), {"list": long_list(9)})
        backend.acquire(lane(), asking("a"))
        before = everything(backend)
        late = draft(backend, lane(), {"list": long_list(20)})
        with pytest.raises(Fenced) as raised:
            backend.commit(replace(late, claim=None if token is None else asking(token)))

        assert (raised.value.current, raised.value.owner) == (1, "owner of a")
        assert everything(backend) == before

    @pytest.mark.row("C1")
    def test_after_a_lease_has_expired_its_epoch_and_the_head_still_protect(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        unaware = draft(backend, lane(), {"n": 2})
        acquire_briefly(backend, lane(), "a")
        mine = replace(draft(backend, lane(), {"n": 3}), claim=asking("a"))
        with pytest.raises(Fenced):
            backend.commit(unaware)
        put(backend, lane(), {"n": 4})
        with pytest.raises(Conflict):
            backend.commit(mine)

        assert [state_of(backend, row.id) for row in backend.find(Query(*lane()))] == [{"n": 4}, {"n": 1}]

    def test_after_a_lease_was_given_back_anyone_writes_and_its_holder_only_without_it(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        with pytest.raises(Fenced):
            backend.commit(replace(draft(backend, lane(), {"n": 2}), claim=asking("a")))
        put(backend, lane(), {"n": 3})

        assert len(backend.find(Query(*lane()))) == 2

    @pytest.mark.parametrize("epoch", [0, 1])
    def test_a_commit_under_a_lease_on_a_lane_that_is_not_there_is_fenced(self, backend: Backend, epoch: int) -> None:
        late = replace(draft(backend, lane(), {"text": "x" * 999}), claim=asking("a"), epoch=epoch)
        with pytest.raises(Fenced):
            backend.commit(late)

        assert everything(backend) == NOTHING
        assert backend.head(lane()) is None

    @pytest.mark.row("C2")
    def test_a_commit_that_was_stored_gives_its_result_again_also_to_who_is_fenced_out(self, backend: Backend) -> None:
        backend.acquire(lane(), asking("a", MOMENT_US))
        commit = replace(draft(backend, lane(), {"n": 1}, "one"), claim=asking("a", MOMENT_US))
        first = backend.commit(commit)
        await_expiry(backend, lane())
        backend.acquire(lane(), asking("b"))
        before = everything(backend)

        assert backend.commit(commit) == replace(first, fresh=False)
        with pytest.raises(IdTaken):
            backend.commit(replace(commit, digest=bytes(32)))
        assert everything(backend) == before

    @pytest.mark.row("C1")
    def test_who_is_fenced_out_is_told_so_also_if_the_lane_moved(self, backend: Backend) -> None:
        acquire_briefly(backend, lane(), "a")
        late = replace(draft(backend, lane(), {"n": 1}), claim=asking("a"))
        backend.acquire(lane(), asking("b"))
        save(backend, lane(), {"n": 2}, asking("b"))
        with pytest.raises(Fenced) as raised:
            backend.commit(late)

        assert not isinstance(raised.value, Conflict)
        assert (raised.value.epoch, raised.value.current) == (1, 2)

    def test_a_commit_that_is_refused_does_not_extend_the_lease(self, backend: Backend) -> None:
        backend.acquire(lane(), asking("a", HOUR_US // 4))
        late = replace(draft(backend, lane(), {"n": 1}), claim=asking("a"))
        save(backend, lane(), {"n": 2}, asking("a", HOUR_US // 4))
        with pytest.raises(Conflict):
            backend.commit(late)
        with pytest.raises(NotFound):
            backend.commit(replace(draft(backend, lane(), {"n": 3}), claim=asking("a"), requires="no such"))

        assert backend.leases("", None, False)[0].left_us <= HOUR_US // 4

    def test_a_fork_onto_the_name_of_a_leased_lane_is_the_holders_alone(self, backend: Backend) -> None:
        source = put(backend, lane(), {"list": long_list(9)})
        made_before = draft(backend, lane("u"), {"list": long_list(9)}, origin=source)
        backend.acquire(lane("u"), asking("a"))
        with pytest.raises(Fenced):
            backend.commit(made_before)
        fork = save(backend, lane("u"), {"list": long_list(9)}, asking("a"), origin=source)
        (shown,) = backend.lanes("", "u", None)
        assert (shown.head, shown.origin) == (fork, source)
        backend.delete_thread("", "t")
        (row,) = backend.find(Query(*lane("u")))

        assert row.parent_digest is not None, "its parent is gone, and it was told of its digest before"
        assert state_of(backend, fork) == {"list": long_list(9)}

    # Deleting -----------------------------------------------------------------------------------------------------

    @pytest.mark.row("C8")
    def test_no_head_is_deleted_from_under_a_lease_that_runs(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"list": long_list(n * 9)}) for n in (1, 2, 3)]
        free = put(backend, lane("u"), {"n": 1})
        backend.acquire(lane(), asking("a"))
        before = everything(backend)
        for doomed, token in (([free, ids[2]], None), ([ids[0], ids[2], free], "b"), (ids, None)):
            with pytest.raises(Fenced) as raised:
                backend.delete("", doomed, False, token)
            assert raised.value.owner == "owner of a"
            assert everything(backend) == before

        assert backend.delete("", [*ids, free], True).checkpoints == 2
        assert names(backend.find(Query(*lane()))) == ids[2:]

    def test_older_checkpoints_are_deleted_also_from_under_a_lease(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(3)]
        backend.acquire(lane(), asking("a"))

        assert backend.delete("", ids[:2], False).checkpoints == 2
        save(backend, lane(), {"n": 4}, asking("a"))

    @pytest.mark.row("C8")
    @pytest.mark.parametrize("who", ["holder", "anyone after its end"])
    def test_a_lane_emptied_goes_with_its_lease_and_is_never_its_holders_again(
        self, backend: Backend, who: str
    ) -> None:
        name = put(backend, lane(), {"n": 1})
        held = acquire_briefly(backend, lane(), "a")
        if who == "holder":
            backend.renew(lane(), held.epoch, asking("a"))
        late = replace(draft(backend, lane(), {"n": 2}), claim=asking("a"))
        removed = backend.delete("", [name], False, "a" if who == "holder" else None)
        assert (removed.checkpoints, removed.lanes) == (1, 1)
        assert (backend.head(lane()), backend.leases("", None, False)) == (None, [])
        for _ in ("gone", "made anew"):
            with pytest.raises(Fenced):
                backend.renew(lane(), held.epoch, asking("a"))
            with pytest.raises((Fenced, Conflict)):
                backend.commit(late)
            backend.acquire(lane(), asking("b"))

        assert backend.find(Query(*lane())) == []

    def test_the_head_before_becomes_the_head_and_the_lease_stays(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(2)]
        backend.acquire(lane(), asking("a"))
        backend.delete("", ids[1:], False, "a")

        assert backend.lanes("", None, None)[0].head == ids[0]
        save(backend, lane(), {"n": 3}, asking("a"))

    @pytest.mark.row("C8")
    @pytest.mark.parametrize("branch", ["main", "b", "empty"])
    def test_no_thread_is_deleted_from_under_a_lease_that_runs_on_any_of_its_lanes(
        self, backend: Backend, branch: str
    ) -> None:
        put(backend, lane(), {"list": long_list(9)})
        put(backend, lane(branch="b"), {"n": 1})
        backend.put_record(running("t"), HOUR_US)
        backend.acquire(lane(branch=branch), asking("a"))
        before = everything(backend)
        for token in (None, "b"):
            with pytest.raises(Fenced):
                backend.delete_thread("", "t", token)
            assert everything(backend) == before

        assert backend.delete_thread("", "t", "a").checkpoints == 2
        assert everything(backend) == NOTHING
        assert backend.head(lane(branch=branch)) is None

    def test_a_thread_is_deleted_once_its_leases_have_expired_or_were_given_back(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        acquire_briefly(backend, lane(branch="empty"), "b")

        assert backend.delete_thread("", "t").checkpoints == 1
        assert backend.leases("", None, False) == []
        assert backend.acquire(lane(branch="empty"), asking("c")).epoch == 1
