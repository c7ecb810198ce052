"""The part of the store contract about finding: lists, names, tags and pending writes."""

from __future__ import annotations

from typing import Any

import pytest

from backstay.errors import InvalidInput, NotFound
from backstay.model.fields import TAGS_MAX
from backstay.store.base import Backend, BranchKey, Query
from backstay.store.leases import LeaseRequest
from backstay.testing.drafts import branch_key, long_list, names, pending, put, state_of

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


class ListRules:
    """Which rows a query returns, in which order, and with what."""

    # Finding ------------------------------------------------------------------------------------------------------

    def test_threads_are_listed_in_the_order_of_their_first_write_of_any_kind(self, backend: Backend) -> None:
        backend.write(branch_key(thread="writes first"), "later", [pending("task", 0)], False)
        put(backend, branch_key(thread="saved first"), {"n": 1})
        put(backend, branch_key(thread="writes first"), {"n": 1})
        heads = backend.find(Query("", heads_of_threads=True))

        assert [row.branch.thread for row in heads] == ["saved first", "writes first"]

    def test_pages_continue_where_the_last_one_ended(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(name=f"b{n % 3}"), {"n": n}) for n in range(7)]
        found: list[str] = []
        before: int | None = None
        while page := backend.find(Query("", "t", before=before, limit=3)):
            found += names(page)
            before = page[-1].seq

        assert found == ids[::-1]
        assert backend.find(Query("", "t", limit=0)) == []

    def test_a_list_is_narrowed_by_branch_scope_and_tag(self, backend: Backend) -> None:
        for n in range(1, 7):
            key = branch_key(name="b" if n % 2 else "main", scope="sub" if n > 4 else "")
            put(backend, key, {}, str(n), step=n, tags=["even"] if n % 2 == 0 else [], metadata={"user": n % 3})

        def found(**wanted: Any) -> list[str]:
            return names(backend.find(Query("", "t", **wanted)))

        assert found(branch="b") == ["5", "3", "1"]
        assert found(scope="sub") == ["6", "5"]
        assert found(scope="") == ["4", "3", "2", "1"]
        assert found(tag="even") == ["6", "4", "2"]
        assert found(tag="even", before=6, limit=1) == ["4"]

    def test_ids_are_found_newest_first_and_missing_ones_are_skipped(self, backend: Backend) -> None:
        for name in ("first", "second", "third"):
            put(backend, branch_key(), {}, name)

        assert names(backend.find(Query("", ids=("first", "no such", "third")))) == ["third", "first"]
        assert backend.find(Query("", ids=())) == []

    def test_ids_are_narrowed_like_any_other_list(self, backend: Backend) -> None:
        put(backend, branch_key("a"), {}, "one", tags=["x"])
        put(backend, branch_key("b"), {}, "two", step=5)

        assert names(backend.find(Query("", "b", ids=("one", "two")))) == ["two"]
        assert names(backend.find(Query("", ids=("one", "two"), tag="x"))) == ["one"]

    def test_a_list_without_a_thread_or_ids_is_refused(self, backend: Backend) -> None:
        with pytest.raises(InvalidInput):
            backend.find(Query(""))

    def test_threads_are_shown_by_their_newest_row_the_thread_made_last_first(self, backend: Backend) -> None:
        for thread in ("a", "b", "c"):
            put(backend, branch_key(thread), {}, f"{thread}1")
        put(backend, branch_key("a", name="x"), {}, "a2")
        put(backend, branch_key("b", scope="sub"), {}, "b2")
        put(backend, branch_key("z", namespace="other"), {}, "z1")
        every = backend.find(Query("", heads_of_threads=True))
        rest = backend.find(Query("", heads_of_threads=True, before=every[0].thread_number, limit=1))

        assert names(every) == ["c1", "b2", "a2"]
        assert names(rest) == ["b2"]
        assert names(backend.find(Query("", scope="", heads_of_threads=True))) == ["c1", "b1", "a2"]

    def test_payload_and_writes_come_only_if_asked_for(self, backend: Backend) -> None:
        name = put(backend, branch_key(), {"n": 1})
        backend.write(branch_key(), name, [pending("task", 0)], False)
        (bare,) = backend.find(Query(*branch_key()))
        (full,) = backend.find(Query(*branch_key(), payload=True, writes=True))

        assert (bare.manifest, bare.writes) == (b"", ())
        assert full.manifest
        assert full.writes == (pending("task", 0),)

    def test_namespaces_do_not_see_each_other(self, backend: Backend) -> None:
        mine, other = branch_key(), branch_key(namespace="other")
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

    def test_a_head_in_one_namespace_protects_nothing_in_another(self, backend: Backend) -> None:
        put(backend, branch_key(), {}, "one")
        put(backend, branch_key(), {}, "two")
        put(backend, branch_key(namespace="other"), {}, "one")

        assert backend.delete("", ["one"], True).checkpoints == 1

    def test_scopes_do_not_see_each_other(self, backend: Backend) -> None:
        for scope in ("", "sub", "sub|inner"):
            put(backend, branch_key(scope=scope), {"scope": scope}, f"in {scope}")
        head = backend.head(branch_key(scope="sub"))

        assert head is not None
        assert head.row is not None
        assert head.row.id == "in sub"
        assert names(backend.find(Query("", "t", "sub"))) == ["in sub"]

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    def test_any_name_means_only_itself(self, backend: Backend, name: str) -> None:
        put(backend, branch_key(), {"plain": True}, "plain", tags=["plain"])
        for key in (branch_key(name, "main"), branch_key("u", name), branch_key("v", scope=name)):
            put(backend, key, {"at": list(key)})
            assert len(backend.find(Query(*key))) == 1
        put(backend, branch_key("w"), {"id": True}, name, tags=[name])
        backend.write(branch_key("w"), name, [pending(name, 0, path=name)], False)
        (row,) = backend.find(Query("", ids=(name,), writes=True))

        assert (row.id, row.tags, row.writes[0].task_id) == (name, (name,), name)
        assert names(backend.find(Query("", "w", tag=name))) == [name]
        assert backend.delete_thread("", name).checkpoints == 1
        assert backend.delete("", [name], False).checkpoints == 1
        assert {found.key.thread for found in backend.branches("", None, None)} == {"t", "u", "v"}
        assert state_of(backend, "plain") == {"plain": True}

    def test_branches_are_listed_oldest_first_with_head_and_origin(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"n": 1})
        put(backend, branch_key(name="b"), {"n": 1}, "fork", origin=first)
        put(backend, branch_key("u", scope="sub"), {"n": 1}, "sub")
        last = put(backend, branch_key(), {"n": 2})
        shown = [(each.key.thread, each.key.name, each.head, each.origin) for each in backend.branches("", None, None)]

        assert shown == [("t", "main", last, None), ("t", "b", "fork", first), ("u", "main", "sub", None)]
        assert [each.key for each in backend.branches("", "t", "")] == [branch_key(), branch_key(name="b")]
        assert [each.key for each in backend.branches("", None, "sub")] == [branch_key("u", scope="sub")]
        assert backend.branches("other", None, None) == []
        assert [each.head_seq for each in backend.branches("", "t", "")] == [3, 2]

    def test_branches_are_listed_page_by_page(self, backend: Backend) -> None:
        keys = [branch_key(thread, name) for name in ("main", "b", "c") for thread in ("t", "u")]
        for key in keys:
            put(backend, key, {"n": 1})
        found: list[BranchKey] = []
        after = 0
        while page := backend.branches("", None, None, after, 4):
            assert len(page) <= 4
            found += [branch.key for branch in page]
            after = page[-1].number

        assert found == keys
        first, *rest = backend.branches("", "t", None)
        assert backend.branches("", "t", None, first.number) == rest
        assert backend.branches("", "t", None, first.number - 1, 1) == [first]
        assert backend.branches("", None, None, limit=0) == []

    def test_checkpoints_that_branches_were_forked_from_are_known(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(3)]
        put(backend, branch_key(name="b"), {"n": 0}, "side", origin=ids[0])
        put(backend, branch_key("u"), {"n": 1}, "elsewhere", origin=ids[1])
        assert backend.forked("", [*ids, "side", "no such"]) == {ids[0], ids[1]}
        assert backend.forked("other", ids) == backend.forked("", []) == set()
        backend.delete_thread("", "u")

        assert backend.forked("", ids) == {ids[0]}

    def test_the_sizes_of_some_sources_are_those_of_all(self, backend: Backend) -> None:
        put(backend, branch_key(), {"text": "x" * 5000, "list": long_list(9)})
        put(backend, branch_key(), {"text": "x" * 5000, "list": long_list(30)})
        every = backend.sizes().sources
        assert {type(source) for source in every} == {int, bytes}
        for source, size in every.items():
            assert backend.sizes([source]).sources == {source: size}

        assert backend.sizes([*every, 1 << 30, bytes(32)]).sources == every
        assert backend.sizes([]).sources == {}

    def test_totals_count_one_namespace_and_what_had_checkpoints(self, backend: Backend) -> None:
        assert backend.totals("") == (0, 0, 0, 0)
        kept = [put(backend, branch_key(thread), {"n": number}) for thread in ("t", "u") for number in range(3)]
        put(backend, branch_key(name="side"), {"n": 9}, origin=kept[0])
        put(backend, branch_key("t")._replace(namespace="other"), {"n": 1})
        backend.acquire(branch_key("leased"), LeaseRequest("me", "token", 10_000_000))
        sizes = [row.size for thread in ("t", "u") for row in backend.find(Query("", thread))]

        assert backend.totals("") == (2, 3, 7, sum(sizes))
        assert backend.totals("other")[:3] == (1, 1, 1)
        backend.delete_thread("", "u")
        assert backend.totals("")[:3] == (1, 2, 4)

    # Tags and writes ----------------------------------------------------------------------------------------------

    def test_tags_are_added_and_removed_and_shown_in_order(self, backend: Backend) -> None:
        name = put(backend, branch_key(), {}, tags=["m"])

        assert backend.tag("", name, ["z", "a", "m"], []) == ("a", "m", "z")
        assert backend.tag("", name, [], ["m", "never there"]) == ("a", "z")
        assert [row.tags for row in backend.find(Query(*branch_key()))] == [("a", "z")]
        for missing in (("", "no such"), ("other", name)):
            with pytest.raises(NotFound):
                backend.tag(*missing, ["x"], [])

    def test_tags_that_would_be_too_many_are_refused(self, backend: Backend) -> None:
        name = put(backend, branch_key(), {}, tags=[f"old {number}" for number in range(TAGS_MAX - 1)])
        before = backend.tag("", name, ["one more"], [])
        with pytest.raises(InvalidInput, match=f"at most {TAGS_MAX} tags"):
            backend.tag("", name, ["too many"], [])

        assert [row.tags for row in backend.find(Query(*branch_key()))] == [before]
        assert len(backend.tag("", name, ["instead"], ["one more"])) == TAGS_MAX

    def test_langgraph_writes_may_come_before_their_checkpoint(self, backend: Backend) -> None:
        backend.write(branch_key(), "later", [pending("task", 0), pending("task", 1)], False)
        assert backend.find(Query("", ids=("later",))) == []
        put(backend, branch_key(), {"n": 1}, "later")
        head = backend.head(branch_key())

        assert head is not None
        assert head.row is not None
        assert head.row.writes == (pending("task", 0), pending("task", 1))

    def test_langgraph_an_existing_write_is_kept_unless_it_is_replaced_on_purpose(self, backend: Backend) -> None:
        name = put(backend, branch_key(), {})
        for body, replaces in ((b"first", False), (b"second", False)):
            backend.write(branch_key(), name, [pending("task", -1, body), pending("task", 0, body)], replaces)
        backend.write(branch_key(), name, [pending("task", -1, b"third", "path")], True)
        (row,) = backend.find(Query(*branch_key(), writes=True))

        assert row.writes == (pending("task", 0, b"first"), pending("task", -1, b"third", "path"))

    def test_tasks_may_have_any_name(self, backend: Backend) -> None:
        tasks = ["", "nul\0", "nul", "x" * 14, "x" * 15, "x" * 15 + "\0", "x" * 16, "\1", "\2", "\2" * 15, "x" * 1000]
        name = put(backend, branch_key(), {})
        for task in tasks:
            backend.write(branch_key(), name, [pending(task, 0, task.encode())], False)
        (row,) = backend.find(Query("", ids=(name,), writes=True))

        assert {write.task_id: write.body for write in row.writes} == {task: task.encode() for task in tasks}

    def test_langgraph_writes_come_in_the_order_of_path_task_and_index(self, backend: Backend) -> None:
        name = put(backend, branch_key(), {})
        given = [(task, index, path) for path in ("~b", "", "~a") for task in ("2", "10", "1") for index in (3, -1, 0)]
        rows = [pending(f"{task}{path}", index, path=path) for task, index, path in given]
        backend.write(branch_key(), name, rows, False)
        (row,) = backend.find(Query(*branch_key(), writes=True))

        assert list(row.writes) == sorted(rows, key=lambda w: (w.task_path, w.task_id, w.index))

    def test_writes_are_deleted_with_their_checkpoint(self, backend: Backend) -> None:
        for name in ("one", "two"):
            put(backend, branch_key(), {"n": 1}, name)
            backend.write(branch_key(), name, [pending("task", 0)], False)
        backend.delete("", ["one"], False)
        put(backend, branch_key(), {"n": 1}, "one")

        assert [row.writes for row in backend.find(Query(*branch_key(), writes=True))] == [(), (pending("task", 0),)]
