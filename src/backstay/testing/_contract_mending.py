"""The part of the store contract about mending. ``restore`` checks nothing it is given, so it also makes the damage."""

from __future__ import annotations

from typing import ClassVar

import pytest

from backstay.errors import Conflict, Corrupted, Fenced, NotFound
from backstay.pieces.manifest import decode_manifest
from backstay.pieces.piece import Range
from backstay.store.base import Backend, Query, Row
from backstay.store.finding import ORPHAN, REBUILD
from backstay.store.leases import Claim
from backstay.testing._contract_records import keep, pause
from backstay.testing.drafts import contents, damage, draft, lane, long_list, names, pending, put, seq_of, state_of

HOUR_US = 3_600_000_000
UNREADABLE = b"\xc1"
TEXT = "text " * 200


def row_of(backend: Backend, name: str, namespace: str = "") -> Row:
    """Return a checkpoint's row as ``restore`` takes it."""
    (row,) = backend.find(Query(namespace, ids=(name,), payload=True))
    return row


def stretch_of(row: Row, key: str) -> Range:
    """Return the last stretch of a stream that a value is made of."""
    pieces = decode_manifest(row.manifest, {})[key].pieces or ()
    (*_, last) = [piece for piece in pieces if isinstance(piece, Range) and isinstance(piece.source, int)]
    return last


class MendingRules:
    """What a repair may rely on; a store without these verbs sets ``mends = False`` on the contract's class."""

    mends: ClassVar[bool] = True

    @pytest.fixture
    def mending(self, backend: Backend) -> Backend:
        """Give the store, if it can be mended at all."""
        if not self.mends:
            pytest.skip("this store has no mending yet")
        return backend

    # Bytes --------------------------------------------------------------------------------------------------------

    def test_bytes_of_a_blob_are_put_back_in_place_of_wrong_ones(self, mending: Backend) -> None:
        commit = draft(mending, lane(), {"text": TEXT}, "one")
        mending.commit(commit)
        ((name, right),) = commit.blobs.items()
        mending.restore({name: b"wrong" * 200}, [])
        assert [finding.key for finding in damage(mending)] == ["text"]
        mending.restore({name: right}, [])

        assert state_of(mending, "one") == {"text": TEXT}
        assert names(mending.find(Query(*lane()))) == ["one"]

    def test_bytes_of_a_stream_are_put_back_and_those_beside_them_stay(self, mending: Backend) -> None:
        states = [{"list": long_list(count)} for count in (10, 20, 30, 40)]
        ids = [put(mending, lane(), state) for state in states]
        place = stretch_of(row_of(mending, ids[1]), "list")
        assert isinstance(place.source, int)
        offset = place.start + place.length - 60
        right = b"".join(mending.fetch([Range(place.source, offset, 50)])[0])
        mending.restore({}, [(place.source, offset, b"w" * 50)])
        assert state_of(mending, ids[0]) == states[0]
        with pytest.raises(Corrupted):
            state_of(mending, ids[1])
        mending.restore({}, [(place.source, offset, right)])

        assert [state_of(mending, name) for name in ids] == states
        put(mending, lane(), {"list": long_list(45)}, "on")  # and it goes on where it was
        assert state_of(mending, "on") == {"list": long_list(45)}

    def test_a_stretch_over_many_rows_is_put_back_also_after_they_were_merged(self, mending: Backend) -> None:
        states = [{"list": long_list(count * 60)} for count in range(1, 25)]  # about 140 KB: several windows
        ids = [put(mending, lane(), state) for state in states]
        mending.compact()
        place = stretch_of(row_of(mending, ids[-1]), "list")
        assert isinstance(place.source, int)
        right = b"".join(mending.fetch([place])[0])
        mending.restore({}, [(place.source, place.start, bytes(place.length))])
        assert len(damage(mending)) > 20
        half = place.length // 2
        mending.restore(
            {},
            [(place.source, place.start + half, right[half:]), (place.source, place.start, right[:half])],
        )

        assert [state_of(mending, name) for name in ids] == states

    # Rows ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("field", ["notes", "digest", "step", "created_us", "parent_id", "manifest"])
    def test_a_row_is_put_back_under_its_id(self, mending: Backend, field: str) -> None:
        put(mending, lane(), {"text": TEXT}, "one")
        put(mending, lane(), {"text": TEXT, "list": long_list(9)}, "two", label="right", tags=["kept"])
        mending.write(lane(), "two", [pending("task", 0)], False)
        (_, *before), right = contents(mending), row_of(mending, "two")
        wrong = {
            "notes": b"\x81\xa5label\xa1x",
            "digest": bytes(32),
            "step": 77,
            "created_us": 77,
            "parent_id": "another",
            "manifest": row_of(mending, "one").manifest,
        }
        mending.restore({}, [], [right._replace(**{field: wrong[field]})])  # type: ignore[arg-type]  # one of each type
        assert {finding.checkpoint for finding in damage(mending) if finding.checkpoint} == {"two"}
        mending.restore({}, [], [right])
        (after,) = mending.find(Query("", ids=("two",), payload=True, writes=True))

        assert contents(mending)[1:] == before  # the lane itself has another last seq: see below
        assert (after.tags, after.writes, after.seq) == (("kept",), (pending("task", 0),), right.seq)

    def test_a_row_that_is_put_back_may_keep_its_values_elsewhere(self, mending: Backend) -> None:
        put(mending, lane(), {"list": long_list(5)}, "zero")
        put(mending, lane(), {"list": long_list(9)}, "one")  # it grew, so its bytes are in a stream
        put(mending, lane("u"), {"list": long_list(9)}, "whole")
        put(mending, lane(), {"list": long_list(20)}, "two")
        one, whole = row_of(mending, "one"), row_of(mending, "whole")
        mending.restore({}, [], [one._replace(manifest=whole.manifest, base=whole.base)])
        mending.delete_thread("", "u")  # its bytes are needed by the other thread now

        assert state_of(mending, "one") == {"list": long_list(9)}
        assert mending.rebuild(True, True) == []

    def test_who_saw_a_head_before_it_was_put_back_is_out_of_date(self, mending: Backend) -> None:
        put(mending, lane(), {"text": TEXT}, "one")
        put(mending, lane(branch="b"), {"text": TEXT}, "beside")
        late = draft(mending, lane(), {"text": TEXT, "n": 1}, "late")
        mending.restore({}, [], [row_of(mending, "one"), row_of(mending, "beside")])
        with pytest.raises(Conflict):
            mending.commit(late)
        put(mending, lane(), {"text": TEXT, "n": 2}, "two")

        assert state_of(mending, "two") == {"text": TEXT, "n": 2}
        assert mending.rebuild(True, True) == []

    def test_no_row_is_put_where_there_is_none(self, mending: Backend) -> None:
        put(mending, lane(), {"n": 1}, "one")
        row = row_of(mending, "one")
        before = contents(mending)
        for other in (row._replace(id="two"), row._replace(lane=lane("u")), row._replace(lane=lane(branch="b"))):
            with pytest.raises(NotFound):
                mending.restore({bytes(32): b"x" * 300}, [], [other])

        assert contents(mending) == before

    # Rebuilding ---------------------------------------------------------------------------------------------------

    def test_there_is_nothing_to_rebuild_in_a_sound_store(self, mending: Backend) -> None:
        ids = [put(mending, lane(), {"list": long_list(n * 9), "text": TEXT}) for n in range(1, 6)]
        put(mending, lane(branch="b"), {"list": long_list(18)}, origin=ids[1])
        put(mending, lane(namespace="other"), {"list": long_list(18)})
        pause(mending, checkpoint=ids[2])
        mending.acquire(lane("leased"), Claim("a", "a", HOUR_US))
        mending.delete("", [ids[0], ids[3]], False)
        before = contents(mending)

        assert mending.rebuild(True, True) == []
        assert mending.rebuild(False, True) == []
        assert contents(mending) == before

    def test_bytes_that_belong_to_nothing_go_if_asked(self, mending: Backend) -> None:
        put(mending, lane(), {"text": TEXT}, "one")
        before = contents(mending)
        mending.restore({bytes(32): b"nobody's" * 100}, [(mending.reserve(1), 0, b"nobody's either")])
        assert mending.rebuild(False, False) == []
        found = mending.rebuild(True, True)
        assert [(finding.kind, finding.repair) for finding in found] == [(ORPHAN, REBUILD)] * 2
        assert mending.check() == found
        assert mending.rebuild(False, True) == found

        assert mending.rebuild(False, True) == []
        assert contents(mending) == before

    def test_nothing_is_dropped_while_a_manifest_cannot_be_read(self, mending: Backend) -> None:
        put(mending, lane(), {"text": TEXT}, "one")
        put(mending, lane("u"), {"text": TEXT[1:]}, "other")
        right = row_of(mending, "one")
        mending.restore({}, [], [right._replace(manifest=decoded_wrong(right))])
        mending.restore({bytes(32): b"nobody's" * 100}, [])
        before = contents(mending)
        mending.rebuild(False, True)
        assert contents(mending) == before
        mending.restore({}, [], [right])
        mending.rebuild(False, True)

        assert state_of(mending, "one") == {"text": TEXT}

    # Quarantine ---------------------------------------------------------------------------------------------------

    def test_what_is_taken_out_is_gone_and_its_child_can_still_be_verified(self, mending: Backend) -> None:
        ids = [put(mending, lane(), {"list": long_list(n * 9)}) for n in range(1, 4)]
        fork = put(mending, lane("u"), {"list": long_list(18)}, origin=ids[1])
        mending.tag("", ids[1], ["good"], [])
        mending.write(lane(), ids[1], [pending("task", 0)], False)
        pause(mending, checkpoint=ids[1])
        digest = row_of(mending, ids[1]).digest
        mending.quarantine("", ids[1])

        assert names(mending.find(Query(*lane()))) == [ids[2], ids[0]]
        assert [row_of(mending, name).parent_digest for name in (ids[2], fork)] == [digest, digest]
        assert mending.record("interrupt", lane(), "ask") is None
        assert mending.rebuild(False, True) == []

    def test_the_one_before_a_head_that_is_taken_out_becomes_the_head(self, mending: Backend) -> None:
        ids = [put(mending, lane(), {"list": long_list(n * 9)}) for n in range(1, 4)]
        gone = seq_of(mending, lane(), ids[2])
        mending.quarantine("", ids[2])
        head = mending.head(lane())
        assert head is not None
        assert head.row is not None
        assert (head.row.id, head.last_seq) == (ids[1], gone)
        again = put(mending, lane(), {"list": long_list(33)})
        mending.rebuild(False, True)

        assert seq_of(mending, lane(), again) > gone
        assert state_of(mending, again) == {"list": long_list(33)}

    def test_a_lane_of_which_the_last_is_taken_out_goes_but_not_its_effects(self, mending: Backend) -> None:
        put(mending, lane(), {"list": long_list(9)}, "one")
        done = keep(mending, "effect")
        mending.quarantine("", "one")
        mending.rebuild(False, True)

        assert mending.lanes("", None, None) == []
        assert mending.record("effect", done.lane, done.key) == done
        assert sum(mending.sizes().sources.values()) == 0

    def test_a_row_that_cannot_be_read_can_be_taken_out(self, mending: Backend) -> None:
        ids = [put(mending, lane(), {"list": long_list(n * 9)}) for n in range(1, 4)]
        row = row_of(mending, ids[1])
        mending.restore({}, [], [row._replace(manifest=decoded_wrong(row), notes=UNREADABLE)])
        mending.quarantine("", ids[1])
        mending.rebuild(False, True)

        assert [state_of(mending, name) for name in (ids[0], ids[2])] == [
            {"list": long_list(9)},
            {"list": long_list(27)},
        ]

    def test_nothing_is_taken_from_under_a_lease_unless_forced(self, mending: Backend) -> None:
        ids = [put(mending, lane(), {"list": long_list(n * 9)}) for n in range(1, 3)]
        mending.acquire(lane(), Claim("holder", "token", HOUR_US))
        before = contents(mending)
        with pytest.raises(Fenced):
            mending.quarantine("", ids[0])
        assert contents(mending) == before
        mending.quarantine("", ids[0], force=True)
        mending.rebuild(False, True)

        assert names(mending.find(Query(*lane()))) == [ids[1]]

    def test_what_is_not_there_cannot_be_taken_out(self, mending: Backend) -> None:
        put(mending, lane(), {"n": 1}, "one")
        for namespace, name in (("", "two"), ("other", "one")):
            with pytest.raises(NotFound):
                mending.quarantine(namespace, name)


def decoded_wrong(row: Row) -> bytes:
    """Return a manifest of the same length that cannot be decoded."""
    return UNREADABLE * len(row.manifest)
