"""The part of the store contract about deleting, and about the shapes in which LangGraph uses a store."""

from __future__ import annotations

import pytest

from backstay.errors import Conflict
from backstay.pieces.body import Encoded
from backstay.store.base import Backend, Query
from backstay.testing.drafts import (
    SPACES,
    bytes_of,
    contents,
    draft,
    lane,
    long_list,
    names,
    pending,
    put,
    seq_of,
    state_of,
)


class Deletes:
    """What goes, what stays, and what can be put in its place."""

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
