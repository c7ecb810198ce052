"""The store contract as tests: what ``store/base.py`` promises, for any store, run by pytest.

A store's author writes one class and has them all::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_backend(self, tmp_path):
            return lambda: MyStore(str(tmp_path / "place"))

``open_backend`` is called again to reopen the same store; a store that keeps nothing sets ``reopens = False``. After
every test the fixture checks the whole store, so no test can forget it. ``row`` marks name our own requirements:
register the marker (``row(id)``) if your pytest is strict about markers.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from holdfast.errors import Conflict, Corrupted, Fenced, HoldfastError, IdTaken, NotFound, StoreError
from holdfast.model.checkpoint import EPOCH
from holdfast.pieces.body import Encoded
from holdfast.pieces.piece import Range
from holdfast.pieces.tip import Tip
from holdfast.store.base import Backend, Commit, Finding, LaneKey, Query, Row, WriteRow
from holdfast.thread.change import state_change
from holdfast.thread.cursor import Seen, Session
from holdfast.thread.load import fill, find_row, get, open_tip, parent_digest
from holdfast.thread.perform import drive
from holdfast.thread.record import NO_PARENT, checkpoint_digest, encode_notes, needle, new_meta, to_microseconds
from holdfast.thread.verify import verify_lanes

SPACES = ("", "other")
"""Every namespace the tests write to; all are verified after each test."""

HOSTILE = (
    "../x",
    "/etc/passwd",
    "a'; DROP TABLE checkpoint; --",
    '"quoted"',
    "*",
    "%",
    "_",
    "\\",
    "a\nb\tc",
    "ünï©ødé-\U0001f9ff",
    "e\u0301",
    "0" * 255,
    "01890000-0000-7000-8000-000000000000",
)
WORKERS = 8
ROUNDS = 25

_numbers = itertools.count(1)


def lane(thread: str = "t", branch: str = "main", scope: str = "", namespace: str = "") -> LaneKey:
    """Return the name of a lane."""
    return LaneKey(namespace, thread, scope, branch)


def draft(
    backend: Backend,
    key: LaneKey,
    state: dict[str, Any],
    name: str | None = None,
    *,
    origin: str | None = None,
    replaces: bool = False,
    **notes: Any,
) -> Commit:
    """Return the commit that adds a state to a lane as it is now, or that takes ``origin`` over and changes it."""
    head = backend.head(key)
    seen = Seen.of(head)
    base = seen.head if origin is None else drive(find_row(key.namespace, origin), backend)
    owned = head.owned if head is not None and origin is None else {}
    tip = Tip() if base is None else drive(open_tip(base, owned), backend)
    change = state_change(state, {}, None, None)
    change.delete = {name for name in tip.lives if name not in change.put}
    if base is not None:
        drive(fill(tip, tip.unloaded(change), base), backend)
    first = backend.reserve(1 + tip.streams_wanted(change))
    plan = tip.plan(change, itertools.count(first).__next__)
    parent, above = (None if base is None else base.id), (NO_PARENT if base is None else base.digest)
    if replaces and base is not None:
        parent, above = base.parent_id, drive(parent_digest(base), backend) or NO_PARENT
    step = notes.pop("step", seen.head.step + 1 if seen.head else 1)
    created: datetime = notes.pop("created_at", EPOCH)
    meta = new_meta(key, name or f"cp-{next(_numbers)}", parent, step, created, notes)  # type: ignore[arg-type]  # Notes
    encoded = encode_notes(meta)
    return Commit(
        key,
        seen.number,
        seen.last_seq,
        seen.epoch,
        meta.id,
        parent,
        step,
        to_microseconds(created),
        checkpoint_digest(above, plan.root, plan.keys, meta, encoded),
        encoded,
        plan.size,
        plan.manifest,
        plan.base,
        meta.tags,
        plan.blobs,
        plan.chunks,
        plan.sources if origin is None else tip.sources,
        plan.owned,
        origin,
        replaces,
    )


def put(backend: Backend, key: LaneKey, state: dict[str, Any], name: str | None = None, **options: Any) -> str:
    """Add a state at the end of a lane and return the checkpoint's id."""
    commit = draft(backend, key, state, name, **options)
    assert backend.commit(commit).fresh
    return commit.id


def seq_of(backend: Backend, key: LaneKey, name: str) -> int:
    """Return the sequence number of a checkpoint."""
    (row,) = backend.find(Query(key.namespace, ids=(name,)))
    return row.seq


def names(rows: list[Row]) -> list[str]:
    """Return the ids of rows, in their order."""
    return [row.id for row in rows]


def state_of(backend: Backend, name: str, namespace: str = "") -> dict[str, Any] | None:
    """Return a checkpoint's state, every byte verified; None if there is no such checkpoint."""
    found = drive(get(namespace, name), backend)
    return None if found is None else found.state


def bytes_of(backend: Backend) -> int:
    """Return how many bytes blobs and streams take."""
    return sum(backend.sizes().sources.values())


def contents(backend: Backend) -> list[object]:
    """Return everything a store holds, to be compared with later."""
    lanes = [lane for space in SPACES for lane in backend.lanes(space, None, None)]
    rows = [row for lane in lanes for row in backend.find(Query(*lane.key, payload=True, writes=True))]
    return [*lanes, *rows, dict(backend.sizes().sources)]


def damage(backend: Backend) -> list[Finding]:
    """Return what a check of the whole store finds: references, orphans, and every byte of every checkpoint."""
    found: list[Finding] = []
    for space in SPACES:
        session = Session(space, lambda: EPOCH, lambda: "")
        found += drive(verify_lanes(session, None, whole_store=True), backend).findings
    return found


def long_list(count: int, first: int = 0) -> list[str]:
    """Return a list that is too large to be kept inline; a longer one begins with the shorter one."""
    return [f"item {number} {'x' * 90}" for number in range(first, first + count)]


def pending(task: str, index: int, body: bytes = b"v", path: str = "") -> WriteRow:
    """Return one pending write."""
    return WriteRow(task, index, "channel", "b", 0, body, path)


class StoreContract:
    """Derive from it, say how your store is opened, and let pytest collect it."""

    reopens: ClassVar[bool] = True

    @pytest.fixture
    def open_backend(self) -> Callable[[], Backend]:
        """Return a function that opens the store under test, again and again; to be overridden."""
        raise NotImplementedError("override the fixture open_backend")

    @pytest.fixture
    def backend(self, open_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """Give an open store, and check all of it when the test is over: as it is, and as it is when reopened."""
        backend = open_backend()
        with contextlib.closing(backend):
            yield backend
            assert damage(backend) == []
        if self.reopens:
            with contextlib.closing(open_backend()) as again:
                assert damage(again) == []

    # Order --------------------------------------------------------------------------------------------------------

    @pytest.mark.row("C3", "W3-07")
    def test_numbers_rise_over_all_lanes_of_a_thread(self, backend: Backend) -> None:
        keys = [lane(), lane(branch="b"), lane(scope="sub"), lane(), lane(branch="b")]
        added = [seq_of(backend, key, put(backend, key, {"n": n})) for n, key in enumerate(keys)]

        assert added == sorted(set(added))

    @pytest.mark.row("C3")
    def test_numbers_are_never_given_again_after_deletes(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(4)]
        highest = seq_of(backend, lane(), ids[-1])
        backend.delete("", ids[2:], False)
        after_head = seq_of(backend, lane(), put(backend, lane(), {"n": 5}))
        backend.delete("", names(backend.find(Query(*lane()))), False)
        after_all = seq_of(backend, lane(), put(backend, lane(), {"n": 6}))

        assert highest < after_head < after_all

    def test_only_a_deleted_thread_takes_its_numbers_along(self, backend: Backend) -> None:
        first = put(backend, lane(), {"n": 1})
        number = seq_of(backend, lane(), first)
        put(backend, lane(), {"n": 2})
        backend.delete_thread("", "t")

        assert seq_of(backend, lane(), put(backend, lane(), {"n": 3})) == number

    @pytest.mark.row("C3", "W3-07", "W4-17")
    def test_the_newest_is_the_one_committed_last_whatever_its_clock_and_step_say(self, backend: Backend) -> None:
        years, steps = (2030, 2020, 2025), (7, 3, 3)
        ids = [
            put(backend, lane(), {"n": year}, created_at=datetime(year, 1, 1, tzinfo=UTC), step=step)
            for year, step in zip(years, steps, strict=True)
        ]
        head = backend.head(lane())

        assert names(backend.find(Query(*lane()))) == ids[::-1]
        assert head is not None
        assert head.row is not None
        assert head.row.id == ids[-1]

    # One writer ---------------------------------------------------------------------------------------------------

    @pytest.mark.row("C1")
    def test_a_commit_to_a_lane_that_moved_is_a_conflict_and_stores_nothing(self, backend: Backend) -> None:
        put(backend, lane(), {"list": long_list(10)})
        late = draft(backend, lane(), {"list": long_list(30)})
        put(backend, lane(), {"list": long_list(20)})
        before = contents(backend)
        with pytest.raises(Conflict) as raised:
            backend.commit(late)

        assert not isinstance(raised.value, IdTaken)
        assert contents(backend) == before

    @pytest.mark.row("C1")
    def test_a_lane_that_was_to_be_new_but_exists_is_a_conflict(self, backend: Backend) -> None:
        late = draft(backend, lane(), {"n": 1})
        put(backend, lane(), {"n": 2})
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    @pytest.mark.row("C1")
    @pytest.mark.parametrize("exists", [True, False], ids=["lane exists", "no lane yet"])
    def test_a_commit_of_another_epoch_is_fenced_and_stores_nothing(self, backend: Backend, exists: bool) -> None:
        if exists:
            put(backend, lane(), {"n": 1})
        before = contents(backend)
        with pytest.raises(Fenced) as raised:
            backend.commit(replace(draft(backend, lane(), {"text": "x" * 999}), epoch=7))

        assert (raised.value.epoch, raised.value.current) == (7, 0)
        assert not isinstance(raised.value, Conflict)
        assert contents(backend) == before

    @pytest.mark.row("C1")
    def test_a_lane_made_anew_under_its_old_name_is_another_lane(self, backend: Backend) -> None:
        first = put(backend, lane(), {"n": 1})
        late = draft(backend, lane(), {"n": 2})
        backend.delete("", [first], False)
        with pytest.raises(Conflict):
            backend.commit(late)
        put(backend, lane(), {"n": 3})
        renewed = backend.head(lane())
        assert renewed is not None
        with pytest.raises(Conflict):
            backend.commit(replace(late, last_seq=renewed.last_seq))

        assert renewed.number != late.number
        assert len(backend.find(Query(*lane()))) == 1

    def test_a_fork_of_a_checkpoint_that_is_gone_is_not_found_and_stores_nothing(self, backend: Backend) -> None:
        first = put(backend, lane(), {"list": long_list(9)})
        put(backend, lane(), {"n": 2})
        late = draft(backend, lane(branch="b"), {"list": long_list(9)}, origin=first)
        backend.delete("", [first], False)
        before = contents(backend)
        with pytest.raises(NotFound):
            backend.commit(late)

        assert contents(backend) == before

    # Idempotence --------------------------------------------------------------------------------------------------

    @pytest.mark.row("C2", "S3-22")
    def test_the_same_commit_again_gives_the_first_result_also_after_others(self, backend: Backend) -> None:
        commit = draft(backend, lane(), {"list": long_list(9)})
        first = backend.commit(commit)
        assert first.fresh
        assert backend.commit(commit) == replace(first, fresh=False)
        put(backend, lane(), {"list": long_list(20)})
        put(backend, lane(branch="b"), {"n": 1})
        before = contents(backend)

        assert backend.commit(commit) == replace(first, fresh=False)
        assert contents(backend) == before

    @pytest.mark.row("C2", "W2-20")
    @pytest.mark.parametrize("current", [True, False], ids=["up to date", "out of date"])
    def test_an_id_with_other_content_is_taken_and_nothing_is_stored(self, backend: Backend, current: bool) -> None:
        late = draft(backend, lane(), {"list": long_list(8)}, "one")
        put(backend, lane(), {"list": long_list(9)}, "one")
        before = contents(backend)
        with pytest.raises(IdTaken):
            backend.commit(draft(backend, lane(), {"list": long_list(8)}, "one") if current else late)

        assert contents(backend) == before

    @pytest.mark.row("W3-06")
    def test_an_id_of_another_thread_is_taken_and_stays_where_it_is(self, backend: Backend) -> None:
        put(backend, lane("a"), {"n": 1}, "one")
        with pytest.raises(IdTaken):
            backend.commit(draft(backend, lane("b"), {"n": 1}, "one"))

        assert names(backend.find(Query(*lane("a")))) == ["one"]
        assert backend.find(Query(*lane("b"))) == []

    # Streams ------------------------------------------------------------------------------------------------------

    def test_reserved_numbers_never_repeat(self, backend: Backend, open_backend: Callable[[], Backend]) -> None:
        taken: set[int] = set()
        for count in (1, 5, 2):
            first = backend.reserve(count)
            assert taken.isdisjoint(range(first, first + count))
            taken.update(range(first, first + count))
        if self.reopens:
            with contextlib.closing(open_backend()) as again:
                assert again.reserve(1) not in taken

        assert backend.reserve(1) not in taken

    def test_ranges_come_back_in_the_order_asked_for(self, backend: Backend) -> None:
        commit = draft(backend, lane(), {"a": b"a" * 300, "b": b"b" * 300})
        backend.commit(commit)
        one, two = commit.blobs
        wanted = [Range(two, 1, 2), Range(one, 0, 300), Range(two, 299, 1), Range(one, 5, 1)]

        assert backend.fetch(wanted) == [commit.blobs[r.source][r.start :][: r.length] for r in wanted]  # type: ignore[index]  # blobs
        assert backend.fetch([]) == []

    def test_a_range_that_is_not_wholly_there_is_corrupted(self, backend: Backend) -> None:
        commit = draft(backend, lane(), {"text": "x" * 300})
        backend.commit(commit)
        (blob,) = commit.blobs
        for missing in (Range(blob, 0, 301), Range(bytes(32), 0, 1), Range(backend.reserve(1), 0, 1)):
            with pytest.raises(Corrupted):
                backend.fetch([Range(blob, 0, 300), missing])

    # Finding ------------------------------------------------------------------------------------------------------

    @pytest.mark.row("S3-26", "S3-27", "S2x-08", "W4-17")
    def test_pages_go_on_where_the_last_one_ended(self, backend: Backend) -> None:
        ids = [put(backend, lane(branch=f"b{n % 3}"), {"n": n}) for n in range(7)]
        found: list[str] = []
        before: int | None = None
        while page := backend.find(Query("", "t", before=before, limit=3)):
            found += names(page)
            before = page[-1].seq

        assert found == ids[::-1]
        assert backend.find(Query("", "t", limit=0)) == []

    def test_a_list_is_narrowed_by_branch_scope_step_tag_and_notes(self, backend: Backend) -> None:
        for n in range(1, 7):
            key = lane(branch="b" if n % 2 else "main", scope="sub" if n > 4 else "")
            put(backend, key, {}, str(n), step=n, tags=["even"] if n % 2 == 0 else [], metadata={"user": n % 3})

        def found(**wanted: Any) -> list[str]:
            return names(backend.find(Query("", "t", **wanted)))

        assert found(branch="b") == ["5", "3", "1"]
        assert found(scope="sub") == ["6", "5"]
        assert found(scope="") == ["4", "3", "2", "1"]
        assert found(step_max=3, scope="") == ["3", "2", "1"]
        assert found(tag="even") == ["6", "4", "2"]
        assert found(tag="even", step_max=5, limit=1) == ["4"]
        assert found(needles=(needle("user", 2),)) == ["5", "2"]
        assert found(needles=(needle("user", 2), needle("user", 1))) == []

    @pytest.mark.row("S3-23")
    def test_ids_are_found_newest_first_and_missing_ones_passed_over(self, backend: Backend) -> None:
        for name in ("first", "second", "third"):
            put(backend, lane(), {}, name)

        assert names(backend.find(Query("", ids=("first", "no such", "third")))) == ["third", "first"]
        assert backend.find(Query("", ids=())) == []

    def test_ids_are_narrowed_like_any_other_list(self, backend: Backend) -> None:
        put(backend, lane("a"), {}, "one", tags=["x"])
        put(backend, lane("b"), {}, "two", step=5)

        assert names(backend.find(Query("", "b", ids=("one", "two")))) == ["two"]
        assert names(backend.find(Query("", ids=("one", "two"), tag="x"))) == ["one"]
        assert names(backend.find(Query("", ids=("one", "two"), step_max=4))) == ["one"]

    @pytest.mark.row("S3-25", "S3-27")
    def test_threads_are_shown_by_their_newest_row_the_thread_made_last_first(self, backend: Backend) -> None:
        for thread in ("a", "b", "c"):
            put(backend, lane(thread), {}, f"{thread}1")
        put(backend, lane("a", branch="x"), {}, "a2")
        put(backend, lane("b", scope="sub"), {}, "b2")
        put(backend, lane("z", namespace="other"), {}, "z1")
        every = backend.find(Query("", heads_of_threads=True))
        rest = backend.find(Query("", heads_of_threads=True, before=every[0].thread_number, limit=1))

        assert names(every) == ["c1", "b2", "a2"]
        assert names(rest) == ["b2"]
        assert names(backend.find(Query("", scope="", heads_of_threads=True))) == ["c1", "b1", "a2"]

    def test_payload_and_writes_come_only_if_asked_for(self, backend: Backend) -> None:
        name = put(backend, lane(), {"n": 1})
        backend.write(lane(), name, [pending("task", 0)], False)
        (bare,) = backend.find(Query(*lane()))
        (full,) = backend.find(Query(*lane(), payload=True, writes=True))

        assert (bare.manifest, bare.writes) == (b"", ())
        assert full.manifest
        assert full.writes == (pending("task", 0),)

    @pytest.mark.row("S2x-08", "W3-06")
    def test_namespaces_do_not_see_each_other(self, backend: Backend) -> None:
        mine, other = lane(), lane(namespace="other")
        for key in (mine, other):
            put(backend, key, {"space": key.namespace, "list": long_list(5)}, "one", tags=[key.namespace or "none"])
            put(backend, key, {"n": 2}, "two")
        backend.tag("other", "one", ["more"], [])
        backend.write(other, "one", [pending("task", 0)], False)
        backend.delete("", ["one", "two"], False)
        (kept,) = backend.find(Query("other", ids=("one",), writes=True))

        assert backend.head(mine) is None
        assert state_of(backend, "one", "other") == {"space": "other", "list": long_list(5)}
        assert (kept.tags, len(kept.writes)) == (("more", "other"), 1)

    def test_a_head_in_one_namespace_spares_nothing_in_another(self, backend: Backend) -> None:
        put(backend, lane(), {}, "one")
        put(backend, lane(), {}, "two")
        put(backend, lane(namespace="other"), {}, "one")

        assert backend.delete("", ["one"], True).checkpoints == 1

    def test_scopes_do_not_see_each_other(self, backend: Backend) -> None:
        for scope in ("", "sub", "sub|inner"):
            put(backend, lane(scope=scope), {"scope": scope}, f"in {scope}")
        head = backend.head(lane(scope="sub"))

        assert head is not None
        assert head.row is not None
        assert head.row.id == "in sub"
        assert names(backend.find(Query("", "t", "sub"))) == ["in sub"]

    @pytest.mark.row("S2x-08")
    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    def test_any_name_means_only_itself(self, backend: Backend, name: str) -> None:
        put(backend, lane(), {"plain": True}, "plain", tags=["plain"])
        for key in (lane(name, "main"), lane("u", name), lane("v", scope=name)):
            put(backend, key, {"at": list(key)})
            assert len(backend.find(Query(*key))) == 1
        put(backend, lane("w"), {"id": True}, name, tags=[name])
        backend.write(lane("w"), name, [pending(name, 0, path=name)], False)
        (row,) = backend.find(Query("", ids=(name,), writes=True))

        assert (row.id, row.tags, row.writes[0].task_id) == (name, (name,), name)
        assert names(backend.find(Query("", "w", tag=name))) == [name]
        assert backend.delete_thread("", name).checkpoints == 1
        assert backend.delete("", [name], False).checkpoints == 1
        assert {found.key.thread for found in backend.lanes("", None, None)} == {"t", "u", "v"}
        assert state_of(backend, "plain") == {"plain": True}

    def test_lanes_are_listed_oldest_first_with_head_and_origin(self, backend: Backend) -> None:
        first = put(backend, lane(), {"n": 1})
        put(backend, lane(branch="b"), {"n": 1}, "fork", origin=first)
        put(backend, lane("u", scope="sub"), {"n": 1}, "sub")
        last = put(backend, lane(), {"n": 2})
        shown = [(each.key.thread, each.key.branch, each.head, each.origin) for each in backend.lanes("", None, None)]

        assert shown == [("t", "main", last, None), ("t", "b", "fork", first), ("u", "main", "sub", None)]
        assert [each.key for each in backend.lanes("", "t", "")] == [lane(), lane(branch="b")]
        assert [each.key for each in backend.lanes("", None, "sub")] == [lane("u", scope="sub")]
        assert backend.lanes("other", None, None) == []
        assert [each.head_seq for each in backend.lanes("", "t", "")] == [3, 2]

    # Tags and writes ----------------------------------------------------------------------------------------------

    def test_tags_are_added_and_removed_and_shown_in_order(self, backend: Backend) -> None:
        name = put(backend, lane(), {}, tags=["m"])

        assert backend.tag("", name, ["z", "a", "m"], []) == ("a", "m", "z")
        assert backend.tag("", name, [], ["m", "never there"]) == ("a", "z")
        assert [row.tags for row in backend.find(Query(*lane()))] == [("a", "z")]
        for missing in (("", "no such"), ("other", name)):
            with pytest.raises(NotFound):
                backend.tag(*missing, ["x"], [])

    @pytest.mark.row("C6")
    def test_langgraph_writes_may_come_before_their_checkpoint(self, backend: Backend) -> None:
        backend.write(lane(), "later", [pending("task", 0), pending("task", 1)], False)
        assert backend.find(Query("", ids=("later",))) == []
        put(backend, lane(), {"n": 1}, "later")
        head = backend.head(lane())

        assert head is not None
        assert head.row is not None
        assert head.row.writes == (pending("task", 0), pending("task", 1))

    def test_langgraph_a_write_is_kept_unless_it_is_to_be_replaced(self, backend: Backend) -> None:
        name = put(backend, lane(), {})
        for body, replaces in ((b"first", False), (b"second", False)):
            backend.write(lane(), name, [pending("task", -1, body), pending("task", 0, body)], replaces)
        backend.write(lane(), name, [pending("task", -1, b"third", "path")], True)
        (row,) = backend.find(Query(*lane(), writes=True))

        assert row.writes == (pending("task", 0, b"first"), pending("task", -1, b"third", "path"))

    def test_langgraph_writes_come_in_the_order_of_path_task_and_index(self, backend: Backend) -> None:
        name = put(backend, lane(), {})
        given = [(task, index, path) for path in ("~b", "", "~a") for task in ("2", "10", "1") for index in (3, -1, 0)]
        rows = [pending(f"{task}{path}", index, path=path) for task, index, path in given]
        backend.write(lane(), name, rows, False)
        (row,) = backend.find(Query(*lane(), writes=True))

        assert list(row.writes) == sorted(rows, key=lambda w: (w.task_path, w.task_id, w.index))

    def test_writes_go_with_their_checkpoint(self, backend: Backend) -> None:
        for name in ("one", "two"):
            put(backend, lane(), {"n": 1}, name)
            backend.write(lane(), name, [pending("task", 0)], False)
        backend.delete("", ["one"], False)
        put(backend, lane(), {"n": 1}, "one")

        assert [row.writes for row in backend.find(Query(*lane(), writes=True))] == [(), (pending("task", 0),)]

    # Deleting -----------------------------------------------------------------------------------------------------

    @pytest.mark.row("S2x-08", "W2-20")
    def test_deleting_counts_what_went_and_passes_over_what_is_not_there(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(4)]
        removed = backend.delete("", [ids[0], "no such", ids[2]], False)

        assert (removed.checkpoints, removed.lanes) == (2, 0)
        assert names(backend.find(Query(*lane()))) == [ids[3], ids[1]]
        assert backend.delete("", [ids[0]], False).checkpoints == 0
        assert backend.delete("", [], False).checkpoints == 0

    def test_an_id_named_twice_is_deleted_and_counted_once(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(2)]

        assert backend.delete("", [ids[0], ids[0]], False).checkpoints == 1

    @pytest.mark.row("C8")
    def test_heads_are_spared_if_asked_for(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(3)]
        fork = put(backend, lane(branch="b"), {"n": 0}, origin=ids[0])

        assert backend.delete("", [*ids, fork], True).checkpoints == 2
        assert {row.id for row in backend.find(Query("", "t"))} == {ids[2], fork}

    @pytest.mark.row("W2-20", "C3")
    def test_after_the_head_the_one_before_is_the_head_and_the_next_number_is_higher(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"list": long_list(n * 10)}) for n in range(1, 4)]
        gone = seq_of(backend, lane(), ids[2])
        backend.delete("", ids[2:], False)
        head = backend.head(lane())
        assert head is not None
        assert head.row is not None
        assert (head.row.id, head.last_seq) == (ids[1], gone)
        (shown,) = backend.lanes("", None, None)
        again = put(backend, lane(), {"list": long_list(25)})

        assert (shown.head, shown.last_seq) == (ids[1], gone)
        assert seq_of(backend, lane(), again) > gone
        assert state_of(backend, again) == {"list": long_list(25)}

    def test_a_lane_without_checkpoints_goes(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"list": long_list(9)}), put(backend, lane(), {"n": 2})]
        removed = backend.delete("", ids, False)

        assert (removed.checkpoints, removed.lanes) == (2, 1)
        assert backend.head(lane()) is None
        assert backend.lanes("", None, None) == []
        assert bytes_of(backend) == 0

    @pytest.mark.row("W3-10")
    def test_a_child_can_still_be_verified_after_its_parent_went(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(3)]
        digests = {row.id: row.digest for row in backend.find(Query(*lane()))}
        put(backend, lane("u"), {"n": 0}, "fork", origin=ids[0])
        backend.delete("", ids[:2], False)
        (child,) = backend.find(Query(*lane()))
        (fork,) = backend.find(Query(*lane("u")))

        assert (child.parent_id, child.parent_digest) == (ids[1], digests[ids[1]])
        assert (fork.parent_id, fork.parent_digest) == (ids[0], digests[ids[0]])

    def test_a_child_in_an_older_branch_can_still_be_verified_after_its_parent_went(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 0})
        source = put(backend, lane(branch="b"), {"n": 1})
        put(backend, lane(branch="b"), {"n": 2})
        copy = put(backend, lane(), {"n": 1}, origin=source)
        backend.delete("", [source], False)
        (child,) = backend.find(Query("", ids=(copy,)))

        assert child.parent_digest is not None

    def test_a_fork_outlives_what_it_was_forked_from(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"list": long_list(n * 10)}) for n in range(1, 5)]
        fork = put(backend, lane("u"), {"list": long_list(20)}, origin=ids[1])
        grown = put(backend, lane("u"), {"list": long_list(33)})
        backend.delete("", ids[1:], False)
        backend.delete_thread("", "t")

        assert state_of(backend, fork) == {"list": long_list(20)}
        assert state_of(backend, grown) == {"list": long_list(33)}

    def test_shared_bytes_stay_as_long_as_one_lane_needs_them(self, backend: Backend) -> None:
        text = {"text": "shared " * 100}
        for thread in ("a", "b", "c"):
            put(backend, lane(thread), text, thread)
        size = bytes_of(backend)
        backend.delete("", ["a"], False)
        backend.delete_thread("", "b")
        assert (state_of(backend, "c"), bytes_of(backend)) == (text, size)
        backend.delete("", ["c"], False)

        assert bytes_of(backend) == 0

    def test_deleting_gives_bytes_back_and_leaves_what_is_needed(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"text": f"{n}" * 5000, "list": long_list(n * 5)}) for n in range(1, 9)]
        size = bytes_of(backend)
        removed = backend.delete("", ids[:-1], False)

        assert removed.bytes > 0
        assert bytes_of(backend) == size - removed.bytes
        assert state_of(backend, ids[-1]) == {"text": "8" * 5000, "list": long_list(40)}

    @pytest.mark.row("S3-28", "S2x-08", "W3-02")
    def test_deleting_a_thread_leaves_all_others(self, backend: Backend) -> None:
        for key in (lane("a"), lane("a", "b"), lane("a", scope="sub"), lane("b"), lane("a", namespace="other")):
            put(backend, key, {"list": long_list(9), "key": list(key)}, "/".join(key))
        backend.write(lane("a"), "orphan", [pending("task", 0)], False)
        removed = backend.delete_thread("", "a")

        assert (removed.checkpoints, removed.lanes) == (3, 3)
        assert [each.key for space in SPACES for each in backend.lanes(space, None, None)] == [
            lane("b"),
            lane("a", namespace="other"),
        ]
        assert backend.delete_thread("", "a").checkpoints == 0
        put(backend, lane("a"), {}, "orphan")
        assert backend.find(Query(*lane("a"), writes=True))[0].writes == ()

    def test_compacting_changes_nothing_but_the_size(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"list": long_list(n * 300)}) for n in range(1, 6)]
        backend.delete("", ids[:2], False)

        assert backend.compact() >= 0
        assert [len((state_of(backend, name) or {})["list"]) for name in ids[2:]] == [900, 1200, 1500]

    # LangGraph's shapes -------------------------------------------------------------------------------------------

    def test_langgraph_putting_the_newest_id_again_replaces_it(self, backend: Backend) -> None:
        first = put(backend, lane(), {"list": long_list(9)})
        put(backend, lane(), {"list": long_list(20)}, "two", tags=["old"])
        backend.write(lane(), "two", [pending("task", 0)], False)
        fork = put(backend, lane("u"), {"list": long_list(20)}, origin="two")
        before = seq_of(backend, lane(), "two")
        put(backend, lane(), {"list": long_list(15), "n": 1}, "two", replaces=True, step=2)
        (row, _) = backend.find(Query(*lane(), writes=True))

        assert (row.id, row.parent_id, row.tags, row.writes) == ("two", first, (), (pending("task", 0),))
        assert row.seq > before
        assert state_of(backend, "two") == {"list": long_list(15), "n": 1}
        assert state_of(backend, fork) == {"list": long_list(20)}

    def test_langgraph_only_the_newest_id_can_be_put_again(self, backend: Backend) -> None:
        put(backend, lane(), {"n": 1}, "one")
        late = draft(backend, lane(), {"n": 2}, "one", replaces=True, step=1)
        put(backend, lane(), {"n": 3}, "two")
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    def test_langgraph_values_encoded_elsewhere_keep_their_bytes_and_type(self, backend: Backend) -> None:
        state = {tag: Encoded(tag, tag.encode() * 200) for tag in ("msgpack", "json", "null", "bytes")}
        state["empty"] = Encoded("null", b"")

        assert state_of(backend, put(backend, lane(), state)) == state
        state["json"] = Encoded("json", b"json" * 200 + b"more")
        assert state_of(backend, put(backend, lane(), state)) == state

    def test_langgraph_a_thread_can_be_copied_checkpoint_by_checkpoint(self, backend: Backend) -> None:
        states = [{"list": long_list(n * 10), "text": "same " * 99} for n in range(1, 6)]
        ids = [put(backend, lane(), state) for state in states]
        size = bytes_of(backend)
        copies = [
            put(backend, lane("copy"), state, origin=name, step=step)
            for step, (name, state) in enumerate(zip(ids, states, strict=True), 1)
        ]
        assert bytes_of(backend) == size
        backend.delete_thread("", "t")

        assert [state_of(backend, name) for name in copies] == states

    def test_langgraph_the_namespaces_of_subgraphs_are_scopes(self, backend: Backend) -> None:
        for scope in ("", "node:1", "node:1|inner:2"):
            put(backend, lane(scope=scope), {"scope": scope}, scope or "root")

        assert names(backend.find(Query("", "t"))) == ["node:1|inner:2", "node:1", "root"]
        assert names(backend.find(Query("", "t", ""))) == ["root"]
        assert names(backend.find(Query("", "t", "node:1"))) == ["node:1"]

    def test_langgraph_all_threads_can_be_listed_by_metadata(self, backend: Backend) -> None:
        for number, thread in enumerate(("a", "b", "a", "c")):
            put(backend, lane(thread), {}, f"{thread}{number}", metadata={"user": "u1" if thread != "b" else "u2"})

        found = backend.find(Query("", needles=(needle("user", "u1"),)))
        assert set(names(found)) == {"a0", "a2", "c3"}

    # Threads, reopening, closing ----------------------------------------------------------------------------------

    @pytest.mark.row("C4")
    def test_what_was_stored_is_there_when_reopened(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        if not self.reopens:
            pytest.skip("this store keeps nothing")
        ids = [put(backend, lane(), {"list": long_list(n * 10)}, tags=["x"]) for n in range(1, 4)]
        backend.write(lane(), ids[2], [pending("task", 0)], False)
        backend.delete("", ids[:1], False)
        before = contents(backend)
        with contextlib.closing(open_backend()) as again:
            assert contents(again) == before
            grown = put(again, lane(), {"list": long_list(50)})

        assert state_of(backend, grown) == {"list": long_list(50)}

    @pytest.mark.row("C1", "C3")
    def test_many_threads_can_commit_at_once_to_lanes_of_their_own(self, backend: Backend) -> None:
        def work(worker: int) -> None:
            for n in range(1, ROUNDS + 1):
                put(backend, lane(branch=f"b{worker}"), {"list": long_list(n)}, f"{worker}-{n}")

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, range(WORKERS)))
        rows = backend.find(Query("", "t"))

        assert sorted((row.seq for row in rows), reverse=True) == [row.seq for row in rows]
        assert len({row.seq for row in rows}) == WORKERS * ROUNDS
        for worker in range(WORKERS):
            assert state_of(backend, f"{worker}-{ROUNDS}") == {"list": long_list(ROUNDS)}

    @pytest.mark.row("C1")
    def test_of_many_commits_on_one_head_exactly_one_wins(self, backend: Backend) -> None:
        ready = threading.Barrier(WORKERS)

        def race(worker: int, n: int) -> bool:
            commit = draft(backend, lane(), {"list": long_list(n), "by": worker}, f"{n}-{worker}")
            ready.wait()
            try:
                return backend.commit(commit).fresh
            except Conflict:
                return False

        with ThreadPoolExecutor(WORKERS) as pool:
            for n in range(1, ROUNDS + 1):
                assert sum(pool.map(race, range(WORKERS), [n] * WORKERS)) == 1

        rows = backend.find(Query(*lane()))
        assert [row.parent_id for row in rows] == [*names(rows)[1:], None]

    def test_closing_twice_is_fine_and_any_other_verb_is_refused_afterwards(
        self, backend: Backend, open_backend: Callable[[], Backend]
    ) -> None:
        commit = draft(backend, lane(), {})
        closed = open_backend()
        closed.close()
        closed.close()
        verbs: list[Callable[[], object]] = [
            lambda: closed.head(lane()),
            lambda: closed.find(Query("")),
            lambda: closed.lanes("", None, None),
            lambda: closed.fetch([]),
            lambda: closed.reserve(1),
            lambda: closed.commit(commit),
            lambda: closed.write(lane(), "x", [], False),
            lambda: closed.tag("", "x", [], []),
            lambda: closed.delete("", ["x"], False),
            lambda: closed.delete_thread("", "t"),
            closed.sizes,
            closed.check,
            closed.compact,
        ]
        for verb in verbs:
            with pytest.raises(HoldfastError) as raised:
                verb()
            assert isinstance(raised.value, StoreError)
