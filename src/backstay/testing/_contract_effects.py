"""The part of the store contract about effects: begun by one, ended once, and fenced like a commit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from backstay.errors import Fenced, NotFound
from backstay.store.base import PAGE_ROWS_MAX, Backend, LaneKey
from backstay.store.effects import DONE, FAILED, INTENDED, EffectRow
from backstay.testing._contract_leases import NOTHING, acquire_briefly, asking, everything
from backstay.testing._contract_lists import HOSTILE
from backstay.testing.drafts import lane, put

BEGINNERS = 8
KEYS = 10
KEY_CHARS = 1000
DIGEST = bytes(range(32))
REQUEST = b"what was \x00 asked"
BODY = b"what \x00 came of it"


def intent(key: str = "charge", owner: str = "a", attempt: int = 1, **changes: Any) -> EffectRow:
    """Return the row that an attempt begins with."""
    return replace(EffectRow(lane(), key, attempt, owner, REQUEST, 5, DIGEST), **changes)


def begin(backend: Backend, *args: Any, retry_of: int | None = None, **changes: Any) -> EffectRow:
    """Begin an effect where there is no lease."""
    return backend.begin_effect(intent(*args, **changes), None, None, retry_of)


def end(backend: Backend, row: EffectRow, status: str = DONE, body: bytes = BODY, ended_us: int = 7) -> EffectRow:
    """Set the receipt of an effect in its owner's name."""
    return backend.end_effect(row.lane, row.key, row.attempt, row.owner, status, body, ended_us)


def settle(backend: Backend, row: EffectRow, status: str = DONE, body: bytes = BODY, by: str = "ann") -> EffectRow:
    """Set the receipt of an effect in somebody else's name."""
    return backend.settle_effect(row.lane, row.key, row.attempt, row.owner, status, body, 8, by)


class EffectRules:
    """Beginning, ending, settling and listing; and what becomes of effects when threads and branches go."""

    reopens: ClassVar[bool]

    # Beginning and ending -----------------------------------------------------------------------------------------

    def test_an_effect_comes_back_as_it_was_begun_and_as_it_ended(self, backend: Backend) -> None:
        key = lane(scope="sub", branch="b")
        row = begin(backend, lane=key)
        assert row == intent(lane=key, number=row.number)
        assert row.number > 0
        assert backend.find_effect(key, "charge") == row
        ended = end(backend, row)

        assert ended == replace(row, status=DONE, body=BODY, ended_us=7)
        assert backend.find_effect(key, "charge") == ended
        assert backend.effects("", "t", 0, 10) == [ended]

    def test_an_effect_needs_no_lane_and_makes_none(self, backend: Backend) -> None:
        begin(backend)

        assert (backend.head(lane()), backend.lanes("", None, None), backend.check()) == (None, [], [])

    def test_an_effect_begins_without_a_receipt_whatever_its_row_says(self, backend: Backend) -> None:
        forged = begin(backend, status=DONE, body=BODY, ended_us=7, settled_by="eve", number=99)

        assert forged == intent(number=forged.number)

    @pytest.mark.row("C2")
    def test_the_same_call_again_gives_its_row_again_also_once_it_has_ended(self, backend: Backend) -> None:
        row = begin(backend)
        assert begin(backend, created_us=9) == row
        ended = end(backend, row)

        assert begin(backend) == ended
        assert end(backend, row, FAILED, b"later", 9) == ended
        assert begin(backend, owner="b") == ended

    def test_an_intent_without_a_receipt_is_not_begun_by_another(self, backend: Backend) -> None:
        row = begin(backend)
        for attempt, retry_of in ((1, None), (2, None), (2, 2), (2, 0), (3, 1), (1, 1)):
            assert begin(backend, owner="b", attempt=attempt, retry_of=retry_of) == row

        assert backend.effects("", None, 0, 10) == [row]

    def test_a_failed_one_is_begun_again_as_its_next_attempt_only(self, backend: Backend) -> None:
        first = begin(backend)
        failed = end(backend, first, FAILED, b"why")
        for attempt in (1, 3):
            assert begin(backend, owner="b", attempt=attempt) == failed
        second = begin(backend, owner="b", attempt=2, request=b"", created_us=9, digest=bytes(32))

        assert second == intent(owner="b", attempt=2, request=b"", created_us=9, digest=bytes(32), number=first.number)
        assert end(backend, first) == second, "the receipt of an attempt that is over"
        assert end(backend, second).status == DONE

    def test_one_without_a_receipt_is_begun_again_by_who_names_that_attempt(self, backend: Backend) -> None:
        first = begin(backend)
        second = begin(backend, owner="b", attempt=2, retry_of=1)
        assert second == intent(owner="b", attempt=2, number=first.number)

        assert begin(backend, owner="c", attempt=2, retry_of=1) == second
        assert end(backend, first) == second
        assert settle(backend, first) == second

    def test_a_done_one_is_never_begun_again(self, backend: Backend) -> None:
        done = end(backend, begin(backend))
        for retry_of in (None, 1):
            assert begin(backend, owner="b", attempt=2, retry_of=retry_of) == done

    def test_only_its_owner_and_attempt_end_an_effect(self, backend: Backend) -> None:
        row = begin(backend)
        for late in (replace(row, owner="b"), replace(row, attempt=2)):
            assert end(backend, late) == row
            assert settle(backend, late) == row

        assert backend.find_effect(lane(), "charge") == row

    @pytest.mark.parametrize("status", [DONE, FAILED])
    def test_somebody_who_found_out_settles_an_effect_once(self, backend: Backend, status: str) -> None:
        row = begin(backend)
        settled = settle(backend, row, status)

        assert settled == replace(row, status=status, body=BODY, ended_us=8, settled_by="ann")
        assert settle(backend, row, DONE, b"else", "bob") == settled
        assert end(backend, row, DONE, b"late") == settled

    def test_what_has_ended_cannot_be_settled(self, backend: Backend) -> None:
        ended = end(backend, begin(backend))

        assert settle(backend, ended, FAILED) == ended

    def test_a_result_may_be_empty_or_large(self, backend: Backend) -> None:
        large = bytes(range(256)) * 8000
        for key, body in (("empty", b""), ("large", large)):
            assert end(backend, begin(backend, key), DONE, body).body == body
        assert [row.body for row in backend.effects("", "t", 0, 10)] == [b"", large]

    def test_what_is_not_there_cannot_be_ended_or_settled(self, backend: Backend) -> None:
        row = begin(backend)
        for missing in (
            replace(row, key="another"),
            replace(row, lane=lane(branch="b")),
            replace(row, lane=lane(scope="sub")),
            replace(row, lane=lane("u")),
            replace(row, lane=lane(namespace="other")),
        ):
            assert backend.find_effect(missing.lane, missing.key) is None
            for verb in (end, settle):
                with pytest.raises(NotFound):
                    verb(backend, missing)

        assert backend.find_effect(lane(), "charge") == row

    @pytest.mark.row("C1")
    @pytest.mark.parametrize("exists", [True, False], ids=["with a lane", "without"])
    @pytest.mark.parametrize("retry", [True, False], ids=["over an unknown one", "a new one"])
    def test_of_many_who_begin_at_once_exactly_one_may_run(self, backend: Backend, exists: bool, retry: bool) -> None:
        if exists:
            put(backend, lane(), {"n": 1})
        ready = threading.Barrier(BEGINNERS)

        def race(worker: int, key: str) -> EffectRow:
            ready.wait()
            return begin(backend, key, str(worker), 2 if retry else 1, retry_of=1 if retry else None)

        with ThreadPoolExecutor(BEGINNERS) as pool:
            for key in [f"key {n}" for n in range(KEYS)]:
                if retry:
                    begin(backend, key, "gone")
                seen = set(pool.map(race, range(BEGINNERS), [key] * BEGINNERS))
                (row,) = seen
                assert row.owner in {str(worker) for worker in range(BEGINNERS)}

        assert len(backend.effects("", None, 0, 100)) == KEYS

    @pytest.mark.row("C7")
    def test_of_a_receipt_and_a_settlement_at_once_one_counts_and_both_see_which(self, backend: Backend) -> None:
        ready = threading.Barrier(2)

        def race(verb: Callable[[Backend, EffectRow], EffectRow], row: EffectRow) -> EffectRow:
            ready.wait()
            return verb(backend, row)

        with ThreadPoolExecutor(2) as pool:
            for key in [f"key {n}" for n in range(KEYS)]:
                row = begin(backend, key)
                (seen,) = set(pool.map(race, (end, settle), (row, row)))
                assert (seen.settled_by, seen.ended_us) in ((None, 7), ("ann", 8))

    # Fencing ------------------------------------------------------------------------------------------------------

    @pytest.mark.row("C1", "C5")
    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    def test_while_a_lease_runs_only_its_holder_begins(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, lane(), {"n": 1})
        held = backend.acquire(lane(), asking("a"))
        before = everything(backend)
        for epoch, token in ((None, None), (held.epoch, None), (held.epoch, "b"), (None, "b"), (0, "a"), (2, "a")):
            with pytest.raises(Fenced) as raised:
                backend.begin_effect(intent(), epoch, token)
            assert (raised.value.current, raised.value.owner) == (1, "owner of a")
        assert everything(backend) == before

        assert backend.begin_effect(intent(), held.epoch, "a").owner == "a"

    @pytest.mark.row("C1")
    @pytest.mark.parametrize("status", [INTENDED, DONE, FAILED])
    def test_who_is_fenced_out_is_told_so_whatever_became_of_the_effect(self, backend: Backend, status: str) -> None:
        """It must not even look: what it would conclude, and do, is the holder's business now."""
        row = begin(backend, owner="gone")
        if status != INTENDED:
            end(backend, row, status)
        backend.acquire(lane(), asking("a"))
        before = everything(backend)
        for attempt, retry_of in ((1, None), (2, None), (2, 1)):
            with pytest.raises(Fenced):
                begin(backend, owner="b", attempt=attempt, retry_of=retry_of)

        assert everything(backend) == before

    @pytest.mark.row("C1", "C5")
    def test_who_lost_its_lease_begins_nothing_but_what_it_began_is_ended(self, backend: Backend) -> None:
        old = acquire_briefly(backend, lane(), "a")
        row = backend.begin_effect(intent(), old.epoch, "a")
        new = backend.acquire(lane(), asking("b"))
        for refused in (intent("another"), intent(owner="again", attempt=2)):
            with pytest.raises(Fenced):
                backend.begin_effect(refused, old.epoch, "a")
        assert backend.begin_effect(intent(), old.epoch, "a") == row, "its own call again, after a lost answer"

        assert end(backend, row).status == DONE
        assert backend.begin_effect(intent(owner="b"), new.epoch, "b").status == DONE

    @pytest.mark.row("C1")
    def test_without_a_lease_another_epoch_than_the_lanes_is_fenced(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        for epoch, token in ((0, None), (2, None), (1, "a")):
            with pytest.raises(Fenced):
                backend.begin_effect(intent(), epoch, token)
        assert backend.effects("", None, 0, 10) == []

        assert backend.begin_effect(intent(), 1, None).owner == "a"

    @pytest.mark.parametrize(("epoch", "token"), [(1, None), (0, "a"), (1, "a"), (None, "a")])
    def test_an_effect_under_a_lease_on_a_lane_that_is_not_there_is_fenced(
        self, backend: Backend, epoch: int | None, token: str | None
    ) -> None:
        with pytest.raises(Fenced):
            backend.begin_effect(intent(), epoch, token)

        assert everything(backend) == NOTHING

    def test_a_lease_on_another_branch_keeps_nobody_out(self, backend: Backend) -> None:
        backend.acquire(lane(branch="b"), asking("a"))

        assert begin(backend).owner == "a"

    def test_an_effect_outlives_the_lease_of_a_branch_without_a_checkpoint(self, backend: Backend) -> None:
        held = backend.acquire(lane(), asking("a"))
        row = backend.begin_effect(intent(), held.epoch, "a")
        backend.release(lane(), held.epoch, "a")

        assert backend.effects("", "t", 0, 10) == [row]
        assert end(backend, row).status == DONE

    # Listing ------------------------------------------------------------------------------------------------------

    def test_effects_are_listed_in_the_order_in_which_they_were_first_begun(self, backend: Backend) -> None:
        rows = [begin(backend, f"key {n}", lane=lane("u" if n % 2 else "t"), created_us=9 - n) for n in range(5)]
        end(backend, rows[0], FAILED)
        rows[0] = begin(backend, "key 0", "b", 2)

        def found(thread: str | None, after: int = 0, limit: int = 10) -> list[EffectRow]:
            return backend.effects("", thread, after, limit)

        assert [row.number for row in rows] == sorted({row.number for row in rows})
        assert found(None) == found(None, limit=10**30) == rows
        assert found("t") == rows[::2]
        assert found("t", after=rows[0].number) == rows[2::2]
        assert found(None, after=rows[1].number, limit=1) == [rows[2]]
        assert found(None, limit=0) == found(None, limit=-1) == found("no such") == []

    def test_no_page_has_more_effects_than_a_page_may_have(self, backend: Backend) -> None:
        for n in range(PAGE_ROWS_MAX + 1):
            begin(backend, f"key {n}")
        page = backend.effects("", "t", 0, 10**9)

        assert len(page) == PAGE_ROWS_MAX
        assert [row.key for row in backend.effects("", "t", page[-1].number, 10)] == [f"key {PAGE_ROWS_MAX}"]

    @pytest.mark.row("T20")
    def test_namespaces_do_not_see_each_others_effects(self, backend: Backend) -> None:
        mine, other = begin(backend), begin(backend, owner="b", lane=lane(namespace="other"))
        ended = end(backend, mine)

        assert backend.find_effect(lane(namespace="other"), "charge") == other
        assert backend.effects("", None, 0, 10) == [ended]
        assert backend.effects("other", "t", 0, 10) == [other]
        backend.delete_thread("", "t")
        assert backend.effects("other", None, 0, 10) == [other]

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    def test_any_key_of_an_effect_means_only_itself(self, backend: Backend, name: str) -> None:
        plain = begin(backend)
        key = lane(name, name, name)
        row = begin(backend, name, name, lane=key)
        ended = settle(backend, row, by=name)

        assert (row.lane, row.key, row.owner, ended.settled_by) == (key, name, name, name)
        assert backend.effects("", name, 0, 10) == [ended]
        assert backend.find_effect(key, name) == ended
        backend.delete_thread("", name)
        assert backend.effects("", None, 0, 10) == [plain]

    def test_keys_may_be_long_and_differ_in_their_last_character(self, backend: Backend) -> None:
        wide = "\N{GRINNING FACE}"
        key = lane(wide * 255, wide * 255, wide * 255)
        rows = [begin(backend, wide * (KEY_CHARS - 1) + last, lane=key) for last in ("a", "b", wide)]

        assert backend.effects("", key.thread, 0, 10) == rows

    # Reopening and deleting ---------------------------------------------------------------------------------------

    @pytest.mark.row("C4")
    def test_effects_are_there_also_when_reopened(self, backend: Backend, open_backend: Callable[[], Backend]) -> None:
        ended = end(backend, begin(backend))
        row = begin(backend, "another", lane=lane("u"))
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert again.effects("", None, 0, 10) == [ended, row]
            done = end(again, row)

        assert backend.find_effect(lane("u"), "another") == done

    @pytest.mark.row("C8")
    @pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "without"])
    def test_effects_go_with_their_thread_and_their_numbers_are_not_given_again(
        self, backend: Backend, saved: bool
    ) -> None:
        kept = begin(backend, lane=lane("u"))
        gone = [begin(backend, lane=key) for key in (lane(), lane(branch="b"), lane(scope="sub"))]
        if saved:
            put(backend, lane(), {"n": 1})
        backend.delete_thread("", "t")

        assert backend.effects("", None, 0, 10) == [kept]
        with pytest.raises(NotFound):
            end(backend, gone[0])
        assert begin(backend).number > gone[-1].number

    def test_effects_go_with_the_last_checkpoint_of_their_branch_and_with_no_other(self, backend: Backend) -> None:
        keys: list[LaneKey] = [lane(), lane(branch="b"), lane(scope="sub"), lane("u")]
        ids = [put(backend, lane(), {"n": n}) for n in (1, 2)]
        for key in keys[1:]:
            put(backend, key, {"n": 1})
        rows = [begin(backend, lane=key) for key in keys]
        backend.delete("", ids[:1], False)
        assert backend.effects("", None, 0, 10) == rows
        backend.delete("", ids, False)

        assert backend.effects("", None, 0, 10) == rows[1:]
