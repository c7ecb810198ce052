"""The part of the store contract about deleting, and about how LangGraph uses a store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.errors import Conflict
from backstay.pieces.body import Encoded
from backstay.store.base import Backend, Query
from backstay.testing.drafts import (
    SPACES,
    branch_key,
    bytes_of,
    contents,
    draft,
    long_list,
    names,
    pending,
    put,
    seq_of,
    state_of,
)


class DeleteRules:
    """Rules for what a deletion removes and keeps, and for replacing a checkpoint."""

    # Deleting -----------------------------------------------------------------------------------------------------

    def test_deleting_counts_what_it_deleted_and_skips_missing_ids(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(4)]
        removed = backend.delete("", [ids[0], "no such", ids[2]], False)

        assert (removed.checkpoints, removed.branches) == (2, 0)
        assert names(backend.find(Query(*branch_key()))) == [ids[3], ids[1]]
        assert backend.delete("", [ids[0]], False).checkpoints == 0
        assert backend.delete("", [], False).checkpoints == 0

    def test_an_id_named_twice_is_deleted_and_counted_once(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(2)]

        assert backend.delete("", [ids[0], ids[0]], False).checkpoints == 1

    def test_heads_are_protected_if_asked(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(3)]
        fork = put(backend, branch_key(name="b"), {"n": 0}, origin=ids[0])

        assert backend.delete("", [*ids, fork], True).checkpoints == 2
        assert {row.id for row in backend.find(Query("", "t"))} == {ids[2], fork}

    def test_after_the_head_the_one_before_is_the_head_and_the_next_number_is_higher(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 10)}) for n in range(1, 4)]
        gone = seq_of(backend, branch_key(), ids[2])
        backend.delete("", ids[2:], False)
        head = backend.head(branch_key())
        assert head is not None
        assert head.row is not None
        assert (head.row.id, head.last_seq) == (ids[1], gone)
        (shown,) = backend.branches("", None, None)
        again = put(backend, branch_key(), {"list": long_list(25)})

        assert (shown.head, shown.last_seq) == (ids[1], gone)
        assert seq_of(backend, branch_key(), again) > gone
        assert state_of(backend, again) == {"list": long_list(25)}

    def test_a_branch_without_checkpoints_is_deleted(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(9)}), put(backend, branch_key(), {"n": 2})]
        removed = backend.delete("", ids, False)

        assert (removed.checkpoints, removed.branches) == (2, 1)
        assert backend.head(branch_key()) is None
        assert backend.branches("", None, None) == []
        assert bytes_of(backend) == 0

    def test_a_child_can_still_be_verified_after_its_parent_was_deleted(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"n": n}) for n in range(3)]
        digests = {row.id: row.digest for row in backend.find(Query(*branch_key()))}
        put(backend, branch_key("u"), {"n": 0}, "fork", origin=ids[0])
        backend.delete("", ids[:2], False)
        (child,) = backend.find(Query(*branch_key()))
        (fork,) = backend.find(Query(*branch_key("u")))

        assert (child.parent_id, child.parent_digest) == (ids[1], digests[ids[1]])
        assert (fork.parent_id, fork.parent_digest) == (ids[0], digests[ids[0]])

    def test_a_child_in_an_older_branch_can_still_be_verified_after_its_parent_was_deleted(
        self, backend: Backend
    ) -> None:
        put(backend, branch_key(), {"n": 0})
        source = put(backend, branch_key(name="b"), {"n": 1})
        put(backend, branch_key(name="b"), {"n": 2})
        copy = put(backend, branch_key(), {"n": 1}, origin=source)
        backend.delete("", [source], False)
        (child,) = backend.find(Query("", ids=(copy,)))

        assert child.parent_digest is not None

    @pytest.mark.parametrize("name", ["main", "b"])
    def test_a_child_with_content_from_elsewhere_can_still_be_verified_after_its_parent_was_deleted(
        self, backend: Backend, name: str
    ) -> None:
        """So are copies of threads: each copy requires the checkpoint that it copies, and its parent is a copy too."""
        parent, _ = [put(backend, branch_key(), {"n": n}) for n in range(2)]
        elsewhere = put(backend, branch_key("u"), {"n": 2})
        made = draft(backend, branch_key(name=name), {"n": 2}, origin=parent)
        backend.commit(replace(made, requires=elsewhere, origin=parent))
        backend.delete("", [parent], False)
        (child,) = backend.find(Query("", ids=(made.id,)))

        assert (child.parent_id, child.parent_digest) == (parent, made.parent_digest)

    def test_a_fork_outlives_its_origin(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 10)}) for n in range(1, 5)]
        fork = put(backend, branch_key("u"), {"list": long_list(20)}, origin=ids[1])
        grown = put(backend, branch_key("u"), {"list": long_list(33)})
        backend.delete("", ids[1:], False)
        backend.delete_thread("", "t")

        assert state_of(backend, fork) == {"list": long_list(20)}
        assert state_of(backend, grown) == {"list": long_list(33)}

    def test_a_branch_lets_go_of_bytes_that_only_a_fork_of_it_needs(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"list": long_list(10)})
        fork = put(backend, branch_key("u"), {"list": long_list(10)}, origin=first)
        put(backend, branch_key(), {"n": 1})
        backend.delete("", [first], False)
        assert state_of(backend, fork) == {"list": long_list(10)}
        backend.delete_thread("", "u")

        assert bytes_of(backend) == 0

    def test_bytes_that_came_back_after_an_absence_stay(self, backend: Backend) -> None:
        one, other = {"text": "one " * 200}, {"text": "other " * 200}
        ids = [put(backend, branch_key(), state) for state in (one, other, one, other)]
        backend.delete("", ids[:1], False)
        assert [state_of(backend, name) for name in ids[1:]] == [other, one, other]
        backend.delete("", ids[3:], False)
        assert [state_of(backend, name) for name in ids[1:3]] == [other, one]
        size = bytes_of(backend)
        removed = backend.delete("", ids[1:2], False)

        assert (state_of(backend, ids[2]), removed.bytes) == (one, size - bytes_of(backend))
        assert 0 < bytes_of(backend) < size

    def test_a_state_that_a_rewind_brought_back_keeps_its_bytes(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n)}) for n in (10, 20, 30)]
        short = put(backend, branch_key(), {"list": long_list(5)})
        again = put(backend, branch_key(), {"list": long_list(30)}, origin=ids[2])
        last = put(backend, branch_key(), {"list": long_list(4)})
        backend.delete("", ids, False)
        assert state_of(backend, again) == {"list": long_list(30)}
        size = bytes_of(backend)
        backend.delete("", [again], False)

        assert bytes_of(backend) < size
        assert (state_of(backend, short), state_of(backend, last)) == ({"list": long_list(5)}, {"list": long_list(4)})

    def test_shared_bytes_stay_as_long_as_one_branch_needs_them(self, backend: Backend) -> None:
        text = {"text": "shared " * 100}
        for thread in ("a", "b", "c"):
            put(backend, branch_key(thread), text, thread)
        size = bytes_of(backend)
        backend.delete("", ["a"], False)
        backend.delete_thread("", "b")
        assert (state_of(backend, "c"), bytes_of(backend)) == (text, size)
        backend.delete("", ["c"], False)

        assert bytes_of(backend) == 0

    def test_deleting_frees_bytes_and_keeps_those_still_needed(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"text": f"{n}" * 5000, "list": long_list(n * 5)}) for n in range(1, 9)]
        size = bytes_of(backend)
        removed = backend.delete("", ids[:-1], False)

        assert removed.bytes > 0
        assert bytes_of(backend) == size - removed.bytes
        assert state_of(backend, ids[-1]) == {"text": "8" * 5000, "list": long_list(40)}

    def test_deleting_a_thread_leaves_all_others(self, backend: Backend) -> None:
        for key in (
            branch_key("a"),
            branch_key("a", "b"),
            branch_key("a", scope="sub"),
            branch_key("b"),
            branch_key("a", namespace="other"),
        ):
            put(backend, key, {"list": long_list(9), "key": list(key)}, "/".join(key))
        backend.write(branch_key("a"), "orphan", [pending("task", 0)], False)
        removed = backend.delete_thread("", "a")

        assert (removed.checkpoints, removed.branches) == (3, 3)
        assert [each.key for space in SPACES for each in backend.branches(space, None, None)] == [
            branch_key("b"),
            branch_key("a", namespace="other"),
        ]
        assert backend.delete_thread("", "a").checkpoints == 0
        put(backend, branch_key("a"), {}, "orphan")
        assert backend.find(Query(*branch_key("a"), writes=True))[0].writes == ()

    def test_compacting_changes_nothing_but_the_size(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 300)}) for n in range(1, 6)]
        backend.delete("", ids[:2], False)

        assert backend.compact() >= 0
        assert [len((state_of(backend, name) or {})["list"]) for name in ids[2:]] == [900, 1200, 1500]

    # LangGraph's shapes -------------------------------------------------------------------------------------------

    def test_langgraph_putting_the_newest_id_again_replaces_it(self, backend: Backend) -> None:
        first = put(backend, branch_key(), {"list": long_list(9)})
        put(backend, branch_key(), {"list": long_list(20)}, "two", tags=["old"])
        backend.write(branch_key(), "two", [pending("task", 0)], False)
        fork = put(backend, branch_key("u"), {"list": long_list(20)}, origin="two")
        before = seq_of(backend, branch_key(), "two")
        put(backend, branch_key(), {"list": long_list(15), "n": 1}, "two", replaces=True, step=2)
        (row, _) = backend.find(Query(*branch_key(), writes=True))

        assert (row.id, row.parent_id, row.tags, row.writes) == ("two", first, (), (pending("task", 0),))
        assert row.seq > before
        assert state_of(backend, "two") == {"list": long_list(15), "n": 1}
        assert state_of(backend, fork) == {"list": long_list(20)}

    def test_langgraph_only_the_newest_id_can_be_put_again(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1}, "one")
        late = draft(backend, branch_key(), {"n": 2}, "one", replaces=True, step=1)
        put(backend, branch_key(), {"n": 3}, "two")
        before = contents(backend)
        with pytest.raises(Conflict):
            backend.commit(late)

        assert contents(backend) == before

    def test_a_replacement_that_is_stored_already_gives_its_first_result(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1}, "one")
        put(backend, branch_key(), {"n": 2}, "two")
        commit = draft(backend, branch_key(), {"n": 3}, "two", replaces=True, step=2)
        first = backend.commit(commit)

        assert first.fresh
        assert backend.commit(commit) == replace(first, fresh=False)
        with pytest.raises(Conflict):  # other content, by a writer that has not seen the replacement
            backend.commit(replace(commit, digest=bytes(32)))
        put(backend, branch_key(), {"n": 4}, "three")
        assert backend.commit(commit) == replace(first, fresh=False)
        assert [row.id for row in backend.find(Query(*branch_key()))] == ["three", "two", "one"]

    def test_a_head_that_its_writer_has_seen_is_replaced_by_the_same_content(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1}, "one", tags=["old"])
        again = draft(backend, branch_key(), {"n": 1}, "one", replaces=True, step=1, tags=["new"])
        (before,) = backend.find(Query(*branch_key()))

        assert before.digest == again.digest
        assert backend.commit(again).fresh
        assert [row.tags for row in backend.find(Query(*branch_key()))] == [("new",)]

    def test_langgraph_values_encoded_elsewhere_keep_their_bytes_and_type(self, backend: Backend) -> None:
        state = {tag: Encoded(tag, tag.encode() * 200) for tag in ("msgpack", "json", "null", "bytes")}
        state["empty"] = Encoded("null", b"")

        assert state_of(backend, put(backend, branch_key(), state)) == state
        state["json"] = Encoded("json", b"json" * 200 + b"more")
        assert state_of(backend, put(backend, branch_key(), state)) == state

    def test_langgraph_a_thread_can_be_copied_checkpoint_by_checkpoint(self, backend: Backend) -> None:
        states = [{"list": long_list(n * 10), "text": "same " * 99} for n in range(1, 6)]
        ids = [put(backend, branch_key(), state) for state in states]
        size = bytes_of(backend)
        copies = [
            put(backend, branch_key("copy"), state, origin=name, step=step)
            for step, (name, state) in enumerate(zip(ids, states, strict=True), 1)
        ]
        assert bytes_of(backend) == size
        backend.delete_thread("", "t")

        assert [state_of(backend, name) for name in copies] == states

    def test_langgraph_the_namespaces_of_subgraphs_are_scopes(self, backend: Backend) -> None:
        for scope in ("", "node:1", "node:1|inner:2"):
            put(backend, branch_key(scope=scope), {"scope": scope}, scope or "root")

        assert names(backend.find(Query("", "t"))) == ["node:1|inner:2", "node:1", "root"]
        assert names(backend.find(Query("", "t", ""))) == ["root"]
        assert names(backend.find(Query("", "t", "node:1"))) == ["node:1"]
