"""The part of the store contract about repair. ``restore`` checks nothing it is given, so it also makes the damage."""

from __future__ import annotations

import pytest

from backstay.errors import Conflict, Corrupted, Fenced, NotFound
from backstay.pieces.manifest import Range, decode_manifest
from backstay.store.base import Backend, Query, Row
from backstay.store.finding import ORPHAN, REBUILD
from backstay.store.leases import LeaseRequest
from backstay.testing._contract_records import keep, pause
from backstay.testing.drafts import (
    branch_key,
    contents,
    damage,
    draft,
    long_list,
    names,
    pending,
    put,
    seq_of,
    state_of,
)

HOUR_US = 3_600_000_000
UNREADABLE = b"\xc1"
TEXT = "text " * 200


def row_of(backend: Backend, name: str, namespace: str = "") -> Row:
    """Return a checkpoint's row as ``restore`` takes it."""
    (row,) = backend.find(Query(namespace, ids=(name,), payload=True))
    return row


def last_range_of(row: Row, key: str) -> Range:
    """Return the last range of a stream that a value uses."""
    pieces = decode_manifest(row.manifest, {})[key].pieces or ()
    (*_, last) = [piece for piece in pieces if isinstance(piece, Range) and isinstance(piece.source, int)]
    return last


class RepairRules:
    """Rules that a repair relies on."""

    # Bytes --------------------------------------------------------------------------------------------------------

    def test_damaged_bytes_of_a_blob_are_restored(self, backend: Backend) -> None:
        commit = draft(backend, branch_key(), {"text": TEXT}, "one")
        backend.commit(commit)
        ((name, right),) = commit.blobs.items()
        backend.restore({name: b"wrong" * 200}, [])
        assert [finding.key for finding in damage(backend)] == ["text"]
        backend.restore({name: right}, [])

        assert state_of(backend, "one") == {"text": TEXT}
        assert names(backend.find(Query(*branch_key()))) == ["one"]

    def test_damaged_bytes_of_a_stream_are_restored_and_their_neighbours_stay(self, backend: Backend) -> None:
        states = [{"list": long_list(count)} for count in (10, 20, 30, 40)]
        ids = [put(backend, branch_key(), state) for state in states]
        place = last_range_of(row_of(backend, ids[1]), "list")
        assert isinstance(place.source, int)
        offset = place.start + place.length - 60
        right = b"".join(backend.fetch([Range(place.source, offset, 50)])[0])
        backend.restore({}, [(place.source, offset, b"w" * 50)])
        assert state_of(backend, ids[0]) == states[0]
        with pytest.raises(Corrupted):
            state_of(backend, ids[1])
        backend.restore({}, [(place.source, offset, right)])

        assert [state_of(backend, name) for name in ids] == states
        put(backend, branch_key(), {"list": long_list(45)}, "on")  # and it continues where it was
        assert state_of(backend, "on") == {"list": long_list(45)}

    def test_a_range_over_many_rows_is_restored_even_after_they_were_merged(self, backend: Backend) -> None:
        states = [{"list": long_list(count * 60)} for count in range(1, 25)]  # about 140 KB: several windows
        ids = [put(backend, branch_key(), state) for state in states]
        backend.compact()
        place = last_range_of(row_of(backend, ids[-1]), "list")
        assert isinstance(place.source, int)
        right = b"".join(backend.fetch([place])[0])
        backend.restore({}, [(place.source, place.start, bytes(place.length))])
        assert len(damage(backend)) > 20
        half = place.length // 2
        backend.restore(
            {}, [(place.source, place.start + half, right[half:]), (place.source, place.start, right[:half])]
        )

        assert [state_of(backend, name) for name in ids] == states

    # Rows ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("field", ["notes", "digest", "step", "created_us", "parent_id", "manifest"])
    def test_a_row_is_restored_under_its_id(self, backend: Backend, field: str) -> None:
        put(backend, branch_key(), {"text": TEXT}, "one")
        put(backend, branch_key(), {"text": TEXT, "list": long_list(9)}, "two", label="right", tags=["kept"])
        backend.write(branch_key(), "two", [pending("task", 0)], False)
        (_, *before), right = contents(backend), row_of(backend, "two")
        wrong = {
            "notes": b"\x81\xa5label\xa1x",
            "digest": bytes(32),
            "step": 77,
            "created_us": 77,
            "parent_id": "another",
            "manifest": row_of(backend, "one").manifest,
        }
        backend.restore({}, [], [right._replace(**{field: wrong[field]})])  # type: ignore[arg-type]  # one of each type
        assert {finding.checkpoint for finding in damage(backend) if finding.checkpoint} == {"two"}
        backend.restore({}, [], [right])
        (after,) = backend.find(Query("", ids=("two",), payload=True, writes=True))

        assert contents(backend)[1:] == before  # the branch itself has another last seq: see below
        assert (after.tags, after.writes, after.seq) == (("kept",), (pending("task", 0),), right.seq)

    def test_a_restored_row_may_store_its_values_elsewhere(self, backend: Backend) -> None:
        put(backend, branch_key(), {"list": long_list(5)}, "zero")
        put(backend, branch_key(), {"list": long_list(9)}, "one")  # it grew, so its bytes are in a stream
        put(backend, branch_key("u"), {"list": long_list(9)}, "whole")
        put(backend, branch_key(), {"list": long_list(20)}, "two")
        one, whole = row_of(backend, "one"), row_of(backend, "whole")
        backend.restore({}, [], [one._replace(manifest=whole.manifest, base=whole.base)])
        backend.delete_thread("", "u")  # its bytes are needed by the other thread now

        assert state_of(backend, "one") == {"list": long_list(9)}
        assert backend.rebuild(True, True) == []

    def test_a_writer_that_saw_a_head_before_it_was_restored_is_out_of_date(self, backend: Backend) -> None:
        put(backend, branch_key(), {"text": TEXT}, "one")
        put(backend, branch_key(name="b"), {"text": TEXT}, "beside")
        late = draft(backend, branch_key(), {"text": TEXT, "n": 1}, "late")
        backend.restore({}, [], [row_of(backend, "one"), row_of(backend, "beside")])
        with pytest.raises(Conflict):
            backend.commit(late)
        put(backend, branch_key(), {"text": TEXT, "n": 2}, "two")

        assert state_of(backend, "two") == {"text": TEXT, "n": 2}
        assert backend.rebuild(True, True) == []

    def test_a_missing_row_cannot_be_restored(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1}, "one")
        row = row_of(backend, "one")
        before = contents(backend)
        for other in (
            row._replace(id="two"),
            row._replace(branch=branch_key("u")),
            row._replace(branch=branch_key(name="b")),
        ):
            with pytest.raises(NotFound):
                backend.restore({bytes(32): b"x" * 300}, [], [other])

        assert contents(backend) == before

    # Rebuilding ---------------------------------------------------------------------------------------------------

    def test_there_is_nothing_to_rebuild_in_a_sound_store(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 9), "text": TEXT}) for n in range(1, 6)]
        put(backend, branch_key(name="b"), {"list": long_list(18)}, origin=ids[1])
        put(backend, branch_key(namespace="other"), {"list": long_list(18)})
        pause(backend, checkpoint=ids[2])
        backend.acquire(branch_key("leased"), LeaseRequest("a", "a", HOUR_US))
        backend.delete("", [ids[0], ids[3]], False)
        before = contents(backend)

        assert backend.rebuild(True, True) == []
        assert backend.rebuild(False, True) == []
        assert contents(backend) == before

    def test_unreferenced_bytes_are_dropped_if_asked(self, backend: Backend) -> None:
        put(backend, branch_key(), {"text": TEXT}, "one")
        before = contents(backend)
        backend.restore({bytes(32): b"nobody's" * 100}, [(backend.reserve(1), 0, b"nobody's either")])
        assert backend.rebuild(False, False) == []
        found = backend.rebuild(True, True)
        assert [(finding.kind, finding.repair) for finding in found] == [(ORPHAN, REBUILD)] * 2
        assert backend.check() == found
        assert backend.rebuild(False, True) == found

        assert backend.rebuild(False, True) == []
        assert contents(backend) == before

    def test_nothing_is_dropped_while_a_manifest_cannot_be_read(self, backend: Backend) -> None:
        put(backend, branch_key(), {"text": TEXT}, "one")
        put(backend, branch_key("u"), {"text": TEXT[1:]}, "other")
        right = row_of(backend, "one")
        backend.restore({}, [], [right._replace(manifest=decoded_wrong(right))])
        backend.restore({bytes(32): b"nobody's" * 100}, [])
        before = contents(backend)
        backend.rebuild(False, True)
        assert contents(backend) == before
        backend.restore({}, [], [right])
        backend.rebuild(False, True)

        assert state_of(backend, "one") == {"text": TEXT}

    # Quarantine ---------------------------------------------------------------------------------------------------

    def test_a_quarantined_checkpoint_is_gone_and_its_child_can_still_be_verified(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 9)}) for n in range(1, 4)]
        fork = put(backend, branch_key("u"), {"list": long_list(18)}, origin=ids[1])
        backend.tag("", ids[1], ["good"], [])
        backend.write(branch_key(), ids[1], [pending("task", 0)], False)
        pause(backend, checkpoint=ids[1])
        digest = row_of(backend, ids[1]).digest
        backend.quarantine("", ids[1])

        assert names(backend.find(Query(*branch_key()))) == [ids[2], ids[0]]
        assert [row_of(backend, name).parent_digest for name in (ids[2], fork)] == [digest, digest]
        assert backend.record("interrupt", branch_key(), "ask") is None
        assert backend.rebuild(False, True) == []

    def test_after_quarantining_a_head_the_checkpoint_before_it_becomes_the_head(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 9)}) for n in range(1, 4)]
        gone = seq_of(backend, branch_key(), ids[2])
        backend.quarantine("", ids[2])
        head = backend.head(branch_key())
        assert head is not None
        assert head.row is not None
        assert (head.row.id, head.last_seq) == (ids[1], gone)
        again = put(backend, branch_key(), {"list": long_list(33)})
        backend.rebuild(False, True)

        assert seq_of(backend, branch_key(), again) > gone
        assert state_of(backend, again) == {"list": long_list(33)}

    def test_quarantining_the_last_checkpoint_deletes_the_branch_but_not_its_effects(self, backend: Backend) -> None:
        put(backend, branch_key(), {"list": long_list(9)}, "one")
        done = keep(backend, "effect")
        backend.quarantine("", "one")
        backend.rebuild(False, True)

        assert backend.branches("", None, None) == []
        assert backend.record("effect", done.branch, done.key) == done
        assert sum(backend.sizes().sources.values()) == 0

    def test_an_unreadable_row_can_be_quarantined(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 9)}) for n in range(1, 4)]
        row = row_of(backend, ids[1])
        backend.restore({}, [], [row._replace(manifest=decoded_wrong(row), notes=UNREADABLE)])
        backend.quarantine("", ids[1])
        backend.rebuild(False, True)

        assert [state_of(backend, name) for name in (ids[0], ids[2])] == [
            {"list": long_list(9)},
            {"list": long_list(27)},
        ]

    def test_nothing_is_quarantined_under_a_lease_unless_forced(self, backend: Backend) -> None:
        ids = [put(backend, branch_key(), {"list": long_list(n * 9)}) for n in range(1, 3)]
        backend.acquire(branch_key(), LeaseRequest("holder", "token", HOUR_US))
        before = contents(backend)
        with pytest.raises(Fenced):
            backend.quarantine("", ids[0])
        assert contents(backend) == before
        backend.quarantine("", ids[0], force=True)
        backend.rebuild(False, True)

        assert names(backend.find(Query(*branch_key()))) == [ids[1]]

    def test_a_missing_checkpoint_cannot_be_quarantined(self, backend: Backend) -> None:
        put(backend, branch_key(), {"n": 1}, "one")
        for namespace, name in (("", "two"), ("other", "one")):
            with pytest.raises(NotFound):
                backend.quarantine(namespace, name)


def decoded_wrong(row: Row) -> bytes:
    """Return a manifest of the same length that cannot be decoded."""
    return UNREADABLE * len(row.manifest)
