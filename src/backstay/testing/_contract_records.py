"""The part of the store contract about records: compare-and-swap by version, fences, lists, and with what they go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from backstay.errors import Fenced, NotFound
from backstay.store.base import PAGE_ROWS_MAX, Backend, LaneKey, Query
from backstay.store.records import KINDS, Fence, Kind, Record
from backstay.testing._contract_leases import HOUR_US, MOMENT_US, NOTHING, acquire_briefly, asking, everything
from backstay.testing._contract_lists import HOSTILE
from backstay.testing.drafts import contents, draft, lane, put
from backstay.testing.waiting import wait_until

WRITERS = 8
ROUNDS = 10
KEY_CHARS = 1000
BODY = b"what \x00 is kept"

every_kind = pytest.mark.parametrize("kind", KINDS)


def fresh(kind: Kind, key: str = "one", **changes: Any) -> Record:
    """Return a record that is not stored yet."""
    return replace(Record(kind, lane(), key, BODY, True), **changes)


def keep(backend: Backend, kind: Kind, key: str = "one", **changes: Any) -> Record:
    """Store a new record; an interrupt belongs to a new checkpoint if none is named."""
    record = fresh(kind, key, **changes)
    if kind == "interrupt" and record.checkpoint is None:
        record = replace(record, checkpoint=put(backend, record.lane, {"n": 1}))
    return backend.put_record(record)


def pause(backend: Backend, key: str = "ask", checkpoint: str | None = None, **changes: Any) -> Record:
    """Store a new interrupt."""
    return keep(backend, "interrupt", key, checkpoint=checkpoint, **changes)


def change(backend: Backend, row: Record, body: bytes = b"changed", **changes: Any) -> Record:
    """Write over a record as it was seen."""
    return backend.put_record(replace(row, body=body, **changes))


def close(backend: Backend, row: Record) -> Record:
    """Write over a record so that it is no longer open."""
    return change(backend, row, b"closed", open=False)


def listed(backend: Backend, namespace: str = "", thread: str | None = None, open_only: bool = False) -> list[Record]:
    """Return the records of every kind, without the time that is left."""
    found = [record for kind in KINDS for record in backend.records(kind, namespace, thread, open_only, 0, 1000)]
    return [replace(record, left_us=0) for record in found]


class RecordRules:
    """Writing, fencing, listing, and what becomes of records when checkpoints, branches and threads go."""

    reopens: ClassVar[bool]

    # Writing ------------------------------------------------------------------------------------------------------

    @every_kind
    def test_a_record_comes_back_as_it_was_stored_and_as_it_was_changed(self, backend: Backend, kind: Kind) -> None:
        key = lane(scope="sub", branch="b")
        row = keep(backend, kind, lane=key)
        assert row == fresh(kind, lane=key, checkpoint=row.checkpoint, version=1, number=row.number)
        assert row.number > 0
        assert backend.record(kind, key, "one") == row
        closed = close(backend, row)

        assert closed == replace(row, body=b"closed", open=False, version=2)
        assert backend.record(kind, key, "one") == closed
        assert backend.records(kind, "", "t", False, 0, 10) == [closed]
        assert backend.records(kind, "", "t", True, 0, 10) == []

    @every_kind
    def test_only_who_saw_the_newest_version_writes_and_who_did_not_sees_it(self, backend: Backend, kind: Kind) -> None:
        first = keep(backend, kind)
        second = change(backend, first)
        for late in (fresh(kind, body=b"late", checkpoint=first.checkpoint), replace(first, body=b"late")):
            assert backend.put_record(late) == second
        for version in (3, 4, 10**9):
            assert change(backend, replace(second, version=version), b"early") == second

        assert backend.record(kind, lane(), "one") == second

    @every_kind
    def test_later_writes_change_the_body_and_whether_it_is_open_and_nothing_else(
        self, backend: Backend, kind: Kind
    ) -> None:
        row = keep(backend, kind)
        opened = change(backend, close(backend, row), b"again", open=True)

        assert opened == replace(row, body=b"again", version=3)
        assert backend.records(kind, "", None, True, 0, 10) == [opened]

    @pytest.mark.row("C2")
    @every_kind
    def test_a_write_that_is_repeated_gives_its_row_again(self, backend: Backend, kind: Kind) -> None:
        first = keep(backend, kind)
        assert backend.put_record(replace(first, version=0, number=0)) == first
        closed = close(backend, first)

        assert close(backend, first) == closed
        assert backend.put_record(replace(first, version=0, number=0)) == closed
        assert listed(backend) == [closed]

    @every_kind
    def test_a_record_that_was_made_again_under_its_name_is_another_one(self, backend: Backend, kind: Kind) -> None:
        old = keep(backend, kind, body=b"old")
        backend.delete_thread("", "t")
        new = keep(backend, kind, body=b"new")
        assert (old.version, new.version) == (1, 1)

        assert change(backend, old) == new
        assert backend.record(kind, lane(), "one") == new

    @every_kind
    def test_what_is_not_there_cannot_be_changed(self, backend: Backend, kind: Kind) -> None:
        row = keep(backend, kind)
        missing = [replace(row, key="another"), replace(row, lane=lane(namespace="other"))]
        if kind == "effect":
            missing += [replace(row, lane=key) for key in (lane(branch="b"), lane(scope="sub"), lane("u"))]
        before = everything(backend)
        for each in missing:
            assert backend.record(kind, each.lane, each.key) is None
            with pytest.raises(NotFound):
                change(backend, each)

        assert everything(backend) == before

    @pytest.mark.parametrize("kind", ["session", "interrupt"])
    def test_sessions_and_interrupts_are_named_in_their_whole_namespace(self, backend: Backend, kind: Kind) -> None:
        row = keep(backend, kind)
        there = put(backend, lane("u"), {"n": 2})

        assert backend.record(kind, lane("u", "b", "sub"), "one") == row
        for checkpoint in (there, "no such"):
            assert backend.put_record(fresh(kind, lane=lane("u"), body=b"other", checkpoint=checkpoint)) == row

    def test_kinds_do_not_share_their_names(self, backend: Backend) -> None:
        rows = [keep(backend, kind, body=kind.encode()) for kind in KINDS]

        assert [backend.record(kind, lane(), "one") for kind in KINDS] == rows
        assert listed(backend) == rows

    def test_a_body_may_be_empty_or_large(self, backend: Backend) -> None:
        large = bytes(range(256)) * 8000
        for key, body in (("empty", b""), ("large", large)):
            assert change(backend, keep(backend, "effect", key, body=body), body + b"!").body == body + b"!"
        assert [row.body for row in backend.records("effect", "", "t", False, 0, 10)] == [b"!", large + b"!"]

    @pytest.mark.row("C1", "C7")
    @every_kind
    @pytest.mark.parametrize("exists", [True, False], ids=["over one", "a new one"])
    def test_of_many_who_write_at_once_exactly_one_wins_and_all_see_who(
        self, backend: Backend, kind: Kind, exists: bool
    ) -> None:
        checkpoint = put(backend, lane(), {"n": 1}) if kind == "interrupt" else None
        ready = threading.Barrier(WRITERS)

        def race(worker: int, seen: Record) -> Record:
            ready.wait()
            return change(backend, seen, str(worker).encode())

        with ThreadPoolExecutor(WRITERS) as pool:
            for n in range(ROUNDS):
                seen = fresh(kind, f"key {n}", checkpoint=checkpoint)
                if exists:
                    seen = backend.put_record(seen)
                (row,) = set(pool.map(race, range(WRITERS), [seen] * WRITERS))
                assert (row.version, row.body) in {
                    (seen.version + 1, str(worker).encode()) for worker in range(WRITERS)
                }

        assert len(listed(backend)) == ROUNDS

    # Where it belongs ---------------------------------------------------------------------------------------------

    def test_the_checkpoint_must_be_in_that_thread_and_scope(self, backend: Backend) -> None:
        name = put(backend, lane(), {"n": 1})
        before = everything(backend)
        for key, checkpoint in (
            (lane(), "no such"),
            (lane("u"), name),
            (lane(scope="sub"), name),
            (lane(namespace="other"), name),
        ):
            with pytest.raises(NotFound):
                pause(backend, checkpoint=checkpoint, lane=key)

        assert everything(backend) == before
        assert pause(backend, checkpoint=name, lane=lane(branch="b")).lane == lane(branch="b")

    @pytest.mark.parametrize("kind", ["session", "effect"])
    def test_a_record_makes_its_thread_and_shows_it_nowhere(self, backend: Backend, kind: Kind) -> None:
        keep(backend, kind, lane=lane("first"))
        assert (contents(backend), backend.find(Query("", heads_of_threads=True))) == (NOTHING, [])
        assert (backend.head(lane("first")), backend.lanes("", None, None), backend.check()) == (None, [], [])
        for thread in ("second", "first"):
            put(backend, lane(thread), {"n": 1})
        oldest_last = [row.lane.thread for row in backend.find(Query("", heads_of_threads=True))]

        assert oldest_last == ["second", "first"]

    @pytest.mark.parametrize("kind", ["session", "effect"])
    def test_a_record_gives_no_right_and_takes_none(self, backend: Backend, kind: Kind) -> None:
        keep(backend, kind)
        put(backend, lane(), {"n": 1})

        assert backend.acquire(lane(), asking("another")).epoch == 1

    # Time to live -------------------------------------------------------------------------------------------------

    @every_kind
    def test_a_record_lives_for_its_time_from_every_write_that_gives_one(self, backend: Backend, kind: Kind) -> None:
        checkpoint = put(backend, lane(), {"n": 1}) if kind == "interrupt" else None
        row = backend.put_record(fresh(kind, checkpoint=checkpoint), MOMENT_US)
        wait_until(lambda: backend.records(kind, "", None, True, 0, 10)[0].left_us <= 0)
        lives = backend.put_record(replace(row, body=b"beat"), HOUR_US)
        (again,) = backend.records(kind, "", "t", True, 0, 10)
        found = backend.record(kind, lane(), "one")
        assert found is not None

        assert all(HOUR_US // 2 < each.left_us <= HOUR_US for each in (lives, again, found))
        assert close(backend, lives).left_us == 0

    # Fencing ------------------------------------------------------------------------------------------------------

    @pytest.mark.row("C1", "C5")
    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    def test_while_a_lease_runs_only_its_holder_writes_under_a_fence(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, lane(), {"n": 1})
        held = backend.acquire(lane(), asking("a"))
        before = everything(backend)
        for fence in ((None, None), (held.epoch, None), (held.epoch, "b"), (None, "b"), (0, "a"), (2, "a")):
            with pytest.raises(Fenced) as raised:
                backend.put_record(fresh("effect"), fence=Fence(*fence))
            assert (raised.value.current, raised.value.owner) == (1, "owner of a")
        assert everything(backend) == before

        assert backend.put_record(fresh("effect"), fence=Fence(held.epoch, "a")).version == 1
        assert backend.put_record(fresh("effect", "two")).version == 1, "without a fence no lease matters"

    @pytest.mark.row("C1")
    def test_who_is_fenced_out_learns_that_also_if_nothing_would_be_stored(self, backend: Backend) -> None:
        """It must not even look: what it would conclude, and do, is the holder's business now."""
        row = keep(backend, "effect")
        backend.acquire(lane(), asking("a"))
        before = everything(backend)
        for each in (fresh("effect", body=b"late"), replace(row, body=b"next"), fresh("effect", "another", version=7)):
            with pytest.raises(Fenced):
                backend.put_record(each, fence=Fence())

        assert everything(backend) == before

    @pytest.mark.row("C1", "C5")
    def test_who_lost_its_lease_writes_nothing_new_but_its_own_write_is_answered_again(self, backend: Backend) -> None:
        old = acquire_briefly(backend, lane(), "a")
        mine = Fence(old.epoch, "a")
        row = backend.put_record(fresh("effect"), fence=mine)
        new = backend.acquire(lane(), asking("b"))
        for refused in (fresh("effect", "another"), replace(row, body=b"next")):
            with pytest.raises(Fenced):
                backend.put_record(refused, fence=mine)
        assert backend.put_record(fresh("effect"), fence=mine) == row

        closed = close(backend, row)
        assert backend.put_record(fresh("effect", body=b"b"), fence=Fence(new.epoch, "b")) == closed

    @pytest.mark.row("C1")
    def test_without_a_lease_another_epoch_than_the_lanes_is_fenced(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1})
        backend.acquire(lane(), asking("a"))
        backend.release(lane(), 1, "a")
        for fence in ((0, None), (2, None), (1, "a")):
            with pytest.raises(Fenced):
                backend.put_record(fresh("effect"), fence=Fence(*fence))
        assert listed(backend) == []

        assert backend.put_record(fresh("effect"), fence=Fence(1)).version == 1

    @pytest.mark.parametrize("fence", [(1, None), (0, "a"), (1, "a"), (None, "a")])
    def test_under_a_lease_on_a_lane_that_is_not_there_is_fenced(
        self, backend: Backend, fence: tuple[int | None, str | None]
    ) -> None:
        with pytest.raises(Fenced):
            backend.put_record(fresh("effect"), fence=Fence(*fence))

        assert everything(backend) == NOTHING

    def test_a_lease_on_another_branch_fences_nobody(self, backend: Backend) -> None:
        backend.acquire(lane(branch="b"), asking("a"))

        assert backend.put_record(fresh("effect"), fence=Fence()).version == 1

    def test_an_effect_outlives_the_lease_of_a_branch_without_a_checkpoint(self, backend: Backend) -> None:
        held = backend.acquire(lane(), asking("a"))
        row = backend.put_record(fresh("effect"), fence=Fence(held.epoch, "a"))
        backend.release(lane(), held.epoch, "a")

        assert listed(backend, thread="t") == [row]
        assert close(backend, row).version == 2

    # Listing ------------------------------------------------------------------------------------------------------

    @every_kind
    def test_records_are_listed_in_the_order_in_which_they_were_first_stored(
        self, backend: Backend, kind: Kind
    ) -> None:
        rows = [keep(backend, kind, f"key {n}", lane=lane("u" if n % 2 else "t")) for n in range(5)]
        for other in KINDS:
            if other != kind:
                keep(backend, other, "of another kind")
        rows[0], rows[2] = change(backend, rows[0]), close(backend, rows[2])

        def found(thread: str | None, open_only: bool, after: int = 0, limit: int = 10) -> list[Record]:
            return backend.records(kind, "", thread, open_only, after, limit)

        assert [row.number for row in rows] == sorted({row.number for row in rows})
        assert found(None, False) == found(None, False, limit=10**30) == rows
        assert found(None, True) == [rows[0], rows[1], rows[3], rows[4]]
        assert found("t", False) == rows[::2]
        assert found("t", True, after=rows[0].number) == [rows[4]]
        assert found(None, True, after=rows[1].number, limit=1) == [rows[3]]
        assert found(None, False, limit=0) == found(None, False, limit=-1) == found("no such", False) == []

    def test_no_page_has_more_records_than_a_page_may_have(self, backend: Backend) -> None:
        kind: Kind = "effect"
        with ThreadPoolExecutor(WRITERS) as pool:
            stored = pool.map(lambda n: keep(backend, kind, f"{n}"), range(PAGE_ROWS_MAX + 1))
            last = max(row.number for row in stored)
        for thread, open_only in ((None, False), (None, True), ("t", False), ("t", True)):
            page = backend.records(kind, "", thread, open_only, 0, 10**9)

            assert len(page) == PAGE_ROWS_MAX
            assert [row.number for row in backend.records(kind, "", thread, open_only, page[-1].number, 10)] == [last]

    @pytest.mark.row("T20")
    @every_kind
    def test_namespaces_do_not_see_each_others_records(self, backend: Backend, kind: Kind) -> None:
        mine, other = keep(backend, kind), keep(backend, kind, lane=lane(namespace="other"), body=b"another")
        closed = close(backend, mine)

        assert backend.record(kind, lane(namespace="other"), "one") == other
        assert listed(backend) == [closed]
        assert listed(backend, "other", "t") == [other]
        backend.delete_thread("", "t")
        assert listed(backend, "other") == [other]

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    @every_kind
    def test_any_name_of_a_record_means_only_itself(self, backend: Backend, kind: Kind, name: str) -> None:
        plain = keep(backend, kind)
        key = lane(name, name, name)
        checkpoint = put(backend, key, {"n": 1}, name) if kind == "interrupt" else None
        row = keep(backend, kind, name, lane=key, checkpoint=checkpoint)
        closed = close(backend, row)

        assert (row.lane, row.key, row.checkpoint) == (key, name, checkpoint)
        assert listed(backend, thread=name) == [closed]
        assert backend.record(kind, key, name) == closed
        backend.delete_thread("", name)
        assert listed(backend) == [plain]

    def test_keys_may_be_long_and_differ_in_their_last_character(self, backend: Backend) -> None:
        wide = "\N{GRINNING FACE}"
        key = lane(wide * 255, wide * 255, wide * 255)
        rows = [keep(backend, "effect", wide * (KEY_CHARS - 1) + last, lane=key) for last in ("a", "b", wide)]

        assert listed(backend, thread=key.thread) == rows

    # Reopening and deleting ---------------------------------------------------------------------------------------

    @pytest.mark.row("C4")
    @every_kind
    def test_records_are_there_also_when_reopened(
        self, backend: Backend, open_backend: Callable[[], Backend], kind: Kind
    ) -> None:
        closed = close(backend, keep(backend, kind))
        row = keep(backend, kind, "another", lane=lane("u"))
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert listed(again) == [closed, row]
            changed = change(again, row)

        assert backend.record(kind, lane("u"), "another") == changed

    @pytest.mark.row("C8")
    def test_a_checkpoint_with_an_open_record_is_protected_if_asked_for(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(5)]
        waits, decided, done = (pause(backend, name, ids[n]) for n, name in enumerate(("waits", "decided", "done")))
        decided = change(backend, decided)
        for row in (done, pause(backend, "also done", ids[1])):
            close(backend, row)

        assert backend.delete("", ids, True).checkpoints == 2
        assert [row.key for row in listed(backend)] == ["waits", "decided", "also done"]
        close(backend, decided)
        assert backend.delete("", ids, True).checkpoints == 1
        assert listed(backend) == [waits]
        assert backend.delete("", [ids[0]], False).checkpoints == 1
        assert listed(backend) == []

    def test_a_record_protects_nothing_in_another_namespace(self, backend: Backend) -> None:
        for key in (lane(), lane(namespace="other")):
            for name in ("one", "two"):
                put(backend, key, {"n": 1}, name)
        pause(backend, checkpoint="one", lane=lane(namespace="other"))

        assert backend.delete("", ["one"], True).checkpoints == 1
        assert backend.delete("other", ["one"], True).checkpoints == 0

    @every_kind
    def test_records_go_with_their_thread_and_their_numbers_are_not_given_again(
        self, backend: Backend, kind: Kind
    ) -> None:
        kept = keep(backend, kind, "kept", lane=lane("u"))
        gone = [keep(backend, kind, f"{key}", lane=key) for key in (lane(), lane(branch="b"), lane(scope="sub"))]
        backend.delete_thread("", "t")

        assert listed(backend) == [kept]
        with pytest.raises(NotFound):
            close(backend, gone[0])
        assert keep(backend, kind).number > gone[-1].number

    def test_a_record_goes_with_its_checkpoint(self, backend: Backend) -> None:
        kept, gone = pause(backend, "kept"), pause(backend)
        assert gone.checkpoint is not None
        backend.delete("", [gone.checkpoint], False)
        assert listed(backend) == [kept]
        for late in (replace(gone, body=b"late"), replace(gone, version=0, number=0)):
            with pytest.raises(NotFound):
                backend.put_record(late)

        assert pause(backend).number > gone.number

    def test_effects_go_with_the_last_checkpoint_of_their_branch_and_sessions_do_not(self, backend: Backend) -> None:
        keys: list[LaneKey] = [lane(), lane(branch="b"), lane(scope="sub"), lane("u")]
        ids = [put(backend, lane(), {"n": n}) for n in (1, 2)]
        for key in keys[1:]:
            put(backend, key, {"n": 1})
        effects = [keep(backend, "effect", lane=key) for key in keys]
        session = keep(backend, "session")
        backend.delete("", ids[:1], False)
        assert listed(backend) == [session, *effects]
        backend.delete("", ids, False)

        assert listed(backend) == [session, *effects[1:]]

    def test_langgraph_putting_the_newest_id_again_keeps_its_interrupts(self, backend: Backend) -> None:
        row = pause(backend, checkpoint=put(backend, lane(), {"n": 1}, "one"))
        backend.commit(draft(backend, lane(), {"n": 2}, "one", replaces=True, step=1))

        assert backend.records("interrupt", "", "t", True, 0, 10) == [row]
