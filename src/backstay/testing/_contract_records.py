"""The part of the store contract about records: compare-and-swap by version, fences, lists, deletion."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from backstay.errors import Fenced, NotFound
from backstay.store.base import PAGE_ROWS_MAX, Backend, BranchKey, Query
from backstay.store.records import KINDS, Fence, Kind, Record, RunFacts
from backstay.testing._contract_leases import NOTHING, acquire_briefly, asking, everything
from backstay.testing._contract_lists import HOSTILE
from backstay.testing.drafts import branch_key, contents, draft, pending, put

WRITERS = 8
ROUNDS = 10
KEY_CHARS = 1000
BODY = b"what \x00 is kept"

every_kind = pytest.mark.parametrize("kind", KINDS)


def fresh(kind: Kind, key: str = "one", **changes: Any) -> Record:
    """Return a record that is not stored yet."""
    facts = RunFacts("queued", "g", "1", 5) if kind == "run" else None
    return replace(Record(kind, branch_key(), key, BODY, True, run=facts), **changes)


def keep(backend: Backend, kind: Kind, key: str = "one", **changes: Any) -> Record:
    """Store a new record; an interrupt belongs to a new checkpoint if none is named."""
    record = fresh(kind, key, **changes)
    if kind == "interrupt" and record.checkpoint is None:
        record = replace(record, checkpoint=put(backend, record.branch, {"n": 1}))
    return backend.put_record(record)


def pause(backend: Backend, key: str = "ask", checkpoint: str | None = None, **changes: Any) -> Record:
    """Store a new interrupt."""
    return keep(backend, "interrupt", key, checkpoint=checkpoint, **changes)


def change(backend: Backend, row: Record, body: bytes = b"changed", **changes: Any) -> Record:
    """Overwrite a record."""
    return backend.put_record(replace(row, body=body, **changes))


def close(backend: Backend, row: Record) -> Record:
    """Overwrite a record so that it is no longer open."""
    return change(backend, row, b"closed", open=False)


def listed(backend: Backend, namespace: str = "", thread: str | None = None, open_only: bool = False) -> list[Record]:
    """Return the records of every kind."""
    return [record for kind in KINDS for record in backend.records(kind, namespace, thread, open_only, 0, 1000)]


class RecordRules:
    """Writing, fencing and listing records, and deleting them with their checkpoints, branches and threads."""

    reopens: ClassVar[bool]

    # Writing ------------------------------------------------------------------------------------------------------

    @every_kind
    def test_a_record_comes_back_as_it_was_stored_and_as_it_was_changed(self, backend: Backend, kind: Kind) -> None:
        key = branch_key(scope="sub", name="b")
        row = keep(backend, kind, branch=key)
        assert row == fresh(kind, branch=key, checkpoint=row.checkpoint, version=1, number=row.number)
        assert row.number > 0
        assert backend.record(kind, key, "one") == row
        closed = close(backend, row)

        assert closed == replace(row, body=b"closed", open=False, version=2)
        assert backend.record(kind, key, "one") == closed
        assert backend.records(kind, "", "t", False, 0, 10) == [closed]
        assert backend.records(kind, "", "t", True, 0, 10) == []

    @every_kind
    def test_only_a_writer_with_the_newest_version_succeeds_and_others_get_that_version(
        self, backend: Backend, kind: Kind
    ) -> None:
        first = keep(backend, kind)
        second = change(backend, first)
        for late in (fresh(kind, body=b"late", checkpoint=first.checkpoint), replace(first, body=b"late")):
            assert backend.put_record(late) == second
        for version in (3, 4, 10**9):
            assert change(backend, replace(second, version=version), b"early") == second

        assert backend.record(kind, branch_key(), "one") == second

    @every_kind
    def test_later_writes_change_the_body_and_whether_it_is_open_and_nothing_else(
        self, backend: Backend, kind: Kind
    ) -> None:
        row = keep(backend, kind)
        opened = change(backend, close(backend, row), b"again", open=True)

        assert opened == replace(row, body=b"again", version=3)
        assert backend.records(kind, "", None, True, 0, 10) == [opened]

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
        assert backend.record(kind, branch_key(), "one") == new

    @every_kind
    def test_a_missing_record_cannot_be_changed(self, backend: Backend, kind: Kind) -> None:
        row = keep(backend, kind)
        missing = [replace(row, key="another"), replace(row, branch=branch_key(namespace="other"))]
        if kind == "effect":
            missing += [
                replace(row, branch=key) for key in (branch_key(name="b"), branch_key(scope="sub"), branch_key("u"))
            ]
        before = everything(backend)
        for each in missing:
            assert backend.record(kind, each.branch, each.key) is None
            with pytest.raises(NotFound):
                change(backend, each)

        assert everything(backend) == before

    @pytest.mark.parametrize("kind", ["interrupt"])
    def test_interrupts_are_named_in_their_whole_namespace(self, backend: Backend, kind: Kind) -> None:
        row = keep(backend, kind)
        there = put(backend, branch_key("u"), {"n": 2})

        assert backend.record(kind, branch_key("u", "b", "sub"), "one") == row
        for checkpoint in (there, "no such"):
            assert backend.put_record(fresh(kind, branch=branch_key("u"), body=b"other", checkpoint=checkpoint)) == row
        changed = change(backend, replace(row, branch=branch_key("u")), b"changed")
        assert changed == replace(row, body=b"changed", version=row.version + 1)
        assert listed(backend) == [changed]

    def test_kinds_do_not_share_their_names(self, backend: Backend) -> None:
        rows = [keep(backend, kind, body=kind.encode()) for kind in KINDS]

        assert [backend.record(kind, branch_key(), "one") for kind in KINDS] == rows
        assert listed(backend) == rows

    def test_a_body_may_be_empty_or_large(self, backend: Backend) -> None:
        large = bytes(range(256)) * 8000
        for key, body in (("empty", b""), ("large", large)):
            assert change(backend, keep(backend, "effect", key, body=body), body + b"!").body == body + b"!"
        assert [row.body for row in backend.records("effect", "", "t", False, 0, 10)] == [b"!", large + b"!"]

    @every_kind
    @pytest.mark.parametrize("exists", [True, False], ids=["over one", "a new one"])
    def test_of_many_simultaneous_writes_exactly_one_wins_and_all_see_it(
        self, backend: Backend, kind: Kind, exists: bool
    ) -> None:
        checkpoint = put(backend, branch_key(), {"n": 1}) if kind == "interrupt" else None
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
        name = put(backend, branch_key(), {"n": 1})
        before = everything(backend)
        for key, checkpoint in (
            (branch_key(), "no such"),
            (branch_key("u"), name),
            (branch_key(scope="sub"), name),
            (branch_key(namespace="other"), name),
        ):
            with pytest.raises(NotFound):
                pause(backend, checkpoint=checkpoint, branch=key)

        assert everything(backend) == before
        assert pause(backend, checkpoint=name, branch=branch_key(name="b")).branch == branch_key(name="b")

    @pytest.mark.parametrize("kind", ["run", "effect"])
    def test_a_record_creates_its_thread_hidden(self, backend: Backend, kind: Kind) -> None:
        keep(backend, kind, branch=branch_key("first"))
        assert (contents(backend), backend.find(Query("", heads_of_threads=True))) == (NOTHING, [])
        assert (backend.head(branch_key("first")), backend.branches("", None, None), backend.check()) == (None, [], [])
        for thread in ("second", "first"):
            put(backend, branch_key(thread), {"n": 1})
        oldest_last = [row.branch.thread for row in backend.find(Query("", heads_of_threads=True))]

        assert oldest_last == ["second", "first"]

    @pytest.mark.parametrize("kind", ["run", "effect"])
    def test_a_record_gives_no_right_and_takes_none(self, backend: Backend, kind: Kind) -> None:
        keep(backend, kind)
        put(backend, branch_key(), {"n": 1})

        assert backend.acquire(branch_key(), asking("another")).epoch == 1

    # Fencing ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("exists", [True, False], ids=["with checkpoints", "without"])
    def test_while_a_lease_runs_only_its_holder_writes_under_a_fence(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, branch_key(), {"n": 1})
        held = backend.acquire(branch_key(), asking("a"))
        before = everything(backend)
        for fence in ((None, None), (held.epoch, None), (held.epoch, "b"), (None, "b"), (0, "a"), (2, "a")):
            with pytest.raises(Fenced) as raised:
                backend.put_record(fresh("effect"), fence=Fence(*fence))
            assert (raised.value.current, raised.value.owner) == (1, "owner of a")
        assert everything(backend) == before

        assert backend.put_record(fresh("effect"), fence=Fence(held.epoch, "a")).version == 1
        assert backend.put_record(fresh("effect", "two")).version == 1, "without a fence no lease matters"

    def test_a_fenced_writer_gets_fenced_even_if_nothing_would_be_stored(self, backend: Backend) -> None:
        """It must not even read the record: acting on it is now up to the holder of the lease."""
        row = keep(backend, "effect")
        backend.acquire(branch_key(), asking("a"))
        before = everything(backend)
        for each in (fresh("effect", body=b"late"), replace(row, body=b"next"), fresh("effect", "another", version=7)):
            with pytest.raises(Fenced):
                backend.put_record(each, fence=Fence())

        assert everything(backend) == before

    def test_a_former_holder_writes_nothing_new_but_can_repeat_its_own_write(self, backend: Backend) -> None:
        old = acquire_briefly(backend, branch_key(), "a")
        mine = Fence(old.epoch, "a")
        row = backend.put_record(fresh("effect"), fence=mine)
        new = backend.acquire(branch_key(), asking("b"))
        for refused in (fresh("effect", "another"), replace(row, body=b"next")):
            with pytest.raises(Fenced):
                backend.put_record(refused, fence=mine)
        assert backend.put_record(fresh("effect"), fence=mine) == row

        closed = close(backend, row)
        assert backend.put_record(fresh("effect", body=b"b"), fence=Fence(new.epoch, "b")) == closed

    def test_without_a_lease_another_epoch_than_the_branches_is_fenced(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1})
        backend.acquire(branch_key(), asking("a"))
        backend.release(branch_key(), 1, "a")
        for fence in ((0, None), (2, None), (1, "a")):
            with pytest.raises(Fenced):
                backend.put_record(fresh("effect"), fence=Fence(*fence))
        assert listed(backend) == []

        assert backend.put_record(fresh("effect"), fence=Fence(1)).version == 1

    @pytest.mark.parametrize("fence", [(1, None), (0, "a"), (1, "a"), (None, "a")])
    def test_a_record_under_a_lease_on_a_missing_branch_is_fenced(
        self, backend: Backend, fence: tuple[int | None, str | None]
    ) -> None:
        with pytest.raises(Fenced):
            backend.put_record(fresh("effect"), fence=Fence(*fence))

        assert everything(backend) == NOTHING

    def test_a_lease_on_another_branch_fences_no_writer(self, backend: Backend) -> None:
        backend.acquire(branch_key(name="b"), asking("a"))

        assert backend.put_record(fresh("effect"), fence=Fence()).version == 1

    def test_an_effect_outlives_the_lease_of_a_branch_without_a_checkpoint(self, backend: Backend) -> None:
        held = backend.acquire(branch_key(), asking("a"))
        row = backend.put_record(fresh("effect"), fence=Fence(held.epoch, "a"))
        backend.release(branch_key(), held.epoch, "a")

        assert listed(backend, thread="t") == [row]
        assert close(backend, row).version == 2

    # Listing ------------------------------------------------------------------------------------------------------

    @every_kind
    def test_records_are_listed_in_the_order_in_which_they_were_first_stored(
        self, backend: Backend, kind: Kind
    ) -> None:
        rows = [keep(backend, kind, f"key {n}", branch=branch_key("u" if n % 2 else "t")) for n in range(5)]
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

    @every_kind
    def test_namespaces_do_not_see_each_others_records(self, backend: Backend, kind: Kind) -> None:
        mine, other = keep(backend, kind), keep(backend, kind, branch=branch_key(namespace="other"), body=b"another")
        closed = close(backend, mine)

        assert backend.record(kind, branch_key(namespace="other"), "one") == other
        assert listed(backend) == [closed]
        assert listed(backend, "other", "t") == [other]
        backend.delete_thread("", "t")
        assert listed(backend, "other") == [other]

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    @every_kind
    def test_any_name_of_a_record_means_only_itself(self, backend: Backend, kind: Kind, name: str) -> None:
        plain = keep(backend, kind)
        key = branch_key(name, name, name)
        checkpoint = put(backend, key, {"n": 1}, name) if kind == "interrupt" else None
        row = keep(backend, kind, name, branch=key, checkpoint=checkpoint)
        closed = close(backend, row)

        assert (row.branch, row.key, row.checkpoint) == (key, name, checkpoint)
        assert listed(backend, thread=name) == [closed]
        assert backend.record(kind, key, name) == closed
        backend.delete_thread("", name)
        assert listed(backend) == [plain]

    def test_keys_may_be_long_and_differ_in_their_last_character(self, backend: Backend) -> None:
        wide = "\N{GRINNING FACE}"
        key = branch_key(wide * 255, wide * 255, wide * 255)
        rows = [keep(backend, "effect", wide * (KEY_CHARS - 1) + last, branch=key) for last in ("a", "b", wide)]

        assert listed(backend, thread=key.thread) == rows

    # Reopening and deleting ---------------------------------------------------------------------------------------

    @every_kind
    def test_records_survive_reopening(self, backend: Backend, open_backend: Callable[[], Backend], kind: Kind) -> None:
        closed = close(backend, keep(backend, kind))
        row = keep(backend, kind, "another", branch=branch_key("u"))
        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert listed(again) == [closed, row]
            changed = change(again, row)

        assert backend.record(kind, branch_key("u"), "another") == changed

    def test_a_checkpoint_with_an_open_record_is_protected_if_asked_for(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(5)]
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
        for key in (branch_key(), branch_key(namespace="other")):
            for name in ("one", "two"):
                put(backend, key, {"n": 1}, name)
        pause(backend, checkpoint="one", branch=branch_key(namespace="other"))

        assert backend.delete("", ["one"], True).checkpoints == 1
        assert backend.delete("other", ["one"], True).checkpoints == 0

    @every_kind
    def test_records_are_deleted_with_their_thread_and_their_numbers_are_not_reused(
        self, backend: Backend, kind: Kind
    ) -> None:
        kept = keep(backend, kind, "kept", branch=branch_key("u"))
        gone = [
            keep(backend, kind, f"{key}", branch=key)
            for key in (branch_key(), branch_key(name="b"), branch_key(scope="sub"))
        ]
        backend.delete_thread("", "t")

        assert listed(backend) == [kept]
        with pytest.raises(NotFound):
            close(backend, gone[0])
        assert keep(backend, kind).number > gone[-1].number

    def test_a_record_is_deleted_with_its_checkpoint(self, backend: Backend) -> None:
        kept, gone = pause(backend, "kept"), pause(backend)
        assert gone.checkpoint is not None
        backend.delete("", [gone.checkpoint], False)
        assert listed(backend) == [kept]
        for late in (replace(gone, body=b"late"), replace(gone, version=0, number=0)):
            with pytest.raises(NotFound):
                backend.put_record(late)

        assert pause(backend).number > gone.number

    def test_effects_are_deleted_with_the_last_checkpoint_of_their_branch_and_runs_are_not(
        self, backend: Backend
    ) -> None:
        keys: list[BranchKey] = [branch_key(), branch_key(name="b"), branch_key(scope="sub"), branch_key("u")]
        ids = [put(backend, branch_key(), {"n": n}) for n in (1, 2)]
        for key in keys[1:]:
            put(backend, key, {"n": 1})
        effects = [keep(backend, "effect", branch=key) for key in keys]
        run = keep(backend, "run")
        backend.delete("", ids[:1], False)
        assert listed(backend) == [run, *effects]
        backend.delete("", ids, False)

        assert listed(backend) == [run, *effects[1:]]

    def test_what_was_stored_before_its_branch_existed_stays_deleted_after_reopening(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        intent = keep(backend, "effect")
        backend.write(branch_key(), "one", [pending("task", 0)], False)
        put(backend, branch_key(), {"n": 1}, "one")
        change(backend, intent)
        backend.delete("", ["one"], False)

        with contextlib.closing(open_backend()) if self.reopens else contextlib.nullcontext(backend) as again:
            assert listed(again) == []
            put(again, branch_key(), {"n": 1}, "one")
            (row,) = again.find(Query(*branch_key(), writes=True))
            assert row.writes == ()

    def test_langgraph_putting_the_newest_id_again_keeps_its_interrupts(self, backend: Backend) -> None:
        row = pause(backend, checkpoint=put(backend, branch_key(), {"n": 1}, "one"))
        backend.commit(draft(backend, branch_key(), {"n": 2}, "one", replaces=True, step=1))

        assert backend.records("interrupt", "", "t", True, 0, 10) == [row]
