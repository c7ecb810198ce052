"""Manifests as bytes: what is read is what was written, and nonsense is refused."""

from __future__ import annotations

import contextlib
import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.codec.msgpack import header
from backstay.errors import DecodeError
from backstay.pieces.manifest import (
    JOURNAL,
    LITERAL_BYTES_MAX,
    STREAM_ID_MAX,
    Entries,
    Entry,
    Piece,
    Range,
    arrange,
    assemble,
    cut_pieces,
    decode_base,
    decode_manifest,
    encode_base,
    encode_manifest,
    grown_by,
    is_needed,
    join_pieces,
    merge_ranges,
    pack_content,
    pack_pieces,
    pack_record,
    piece_length,
    replay,
    root_digest,
    sort_keys,
    unpack_pieces,
)

DIGESTS = st.binary(min_size=32, max_size=32)
RANGES = st.builds(
    Range, st.one_of(st.integers(1, STREAM_ID_MAX), DIGESTS), st.integers(0, 2**28), st.integers(1, 2**28)
)
PIECES: st.SearchStrategy[Piece] = st.one_of(RANGES, st.binary(min_size=1, max_size=LITERAL_BYTES_MAX))


@st.composite
def entries_of(draw: st.DrawFn, form: str = "") -> Entry:
    kind, count, digest = draw(st.sampled_from("vlmtb")), draw(st.integers(0, 2**40)), draw(DIGESTS)
    form = form or draw(st.sampled_from(["inline", "whole", "pieces", "table"]))
    if form == "inline":
        body = draw(st.binary(max_size=256))
        return Entry(kind, count, len(body), hashlib.sha256(body).digest(), body=body)
    if form == "whole":
        return Entry(kind, count, draw(st.integers(0, 2**28)), digest)
    pieces = tuple(draw(st.lists(PIECES, min_size=1, max_size=8)))
    if form == "pieces":
        return Entry(kind, count, sum(map(piece_length, pieces)), digest, pieces=pieces)
    return Entry(
        kind, count, draw(st.integers(0, 2**28)), digest, None, pieces, draw(DIGESTS), draw(st.integers(0, 999))
    )


KEYS = st.one_of(st.text(max_size=20), st.integers(0, 5))
STATES = st.dictionaries(KEYS, entries_of(), max_size=6)


@given(STATES, STATES)
def test_a_manifest_over_any_base_reads_back_equal_and_in_order(entries: Entries, base: Entries) -> None:
    changed = {key: entry for key, entry in entries.items() if base.get(key) != entry}
    back = decode_manifest(encode_manifest(changed, *arrange(list(entries), base, changed)), base)

    assert back == entries
    assert list(back) == list(entries)


@given(STATES)
def test_the_root_of_packed_contents_is_the_root(entries: Entries) -> None:
    contents = [pack_content(key, entries[key]) for key in sort_keys(entries)]

    assert hashlib.sha256(header(len(contents), 0x90, 0xDC) + b"".join(contents)).digest() == root_digest(entries)


@given(st.dictionaries(KEYS, entries_of(), min_size=1, max_size=6), st.data())
def test_a_journal_updates_the_base_and_what_is_from_the_base(base: Entries, data: st.DataObject) -> None:
    inline = [key for key, entry in base.items() if entry.body is not None]
    records = data.draw(st.lists(st.tuples(st.sampled_from(inline), entries_of("inline"))) if inline else st.just([]))
    own = data.draw(st.dictionaries(st.sampled_from(list(base)), entries_of()))
    journal = b"".join(pack_record(*record) for record in records)
    entries = {**base, **own, JOURNAL: Entry("l", len(records), len(journal), b"", pieces=())}
    updated = dict(base)

    replay(entries, updated, [journal[:7], journal[7:]])

    assert updated == {**base, **dict(records)}
    assert entries == {**updated, **own}
    assert list(entries) == list(base)


@given(st.binary(max_size=60), st.integers(0, 2**40), STATES)
def test_a_damaged_journal_gives_nothing_but_decode_errors(data: bytes, count: int, base: Entries) -> None:
    for number in (count, count % 3):
        with contextlib.suppress(DecodeError):
            replay({**base, JOURNAL: Entry("l", number, len(data), b"", pieces=())}, dict(base), [data])


def test_a_journal_has_only_keys_that_are_inline_in_the_base() -> None:
    inline = Entry("b", 0, 1, hashlib.sha256(b"x").digest(), body=b"x")
    blob = Entry("b", 0, 999, bytes(32))
    bases: list[Entries] = [{}, {"a": blob}]
    for base in bases:
        with pytest.raises(DecodeError):
            replay({**base, JOURNAL: Entry("l", 1, 0, b"", pieces=())}, base, [pack_record("a", inline)])


@given(STATES)
def test_a_base_reads_back_equal(entries: Entries) -> None:
    assert decode_base(encode_base(entries)) == entries


@given(st.binary(max_size=300), STATES)
def test_nonsense_is_refused_or_read_but_never_anything_else(data: bytes, base: Entries) -> None:
    with contextlib.suppress(DecodeError):
        decode_manifest(data, base)
    with contextlib.suppress(DecodeError):
        decode_base(data)


@given(STATES, st.randoms(use_true_random=False))
def test_damaged_manifests_give_nothing_but_decode_errors(entries: Entries, rng: random.Random) -> None:
    data = bytearray(encode_manifest(entries))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    with contextlib.suppress(DecodeError):
        decode_manifest(bytes(data), {})


@given(st.lists(PIECES, max_size=20))
def test_pieces_read_back_equal(pieces: list[Piece]) -> None:
    assert list(unpack_pieces(pack_pieces(pieces))) == pieces


@given(st.lists(PIECES, max_size=12), st.data())
def test_cutting_and_joining_keep_the_bytes(pieces: list[Piece], data: st.DataObject) -> None:
    total = sum(map(piece_length, pieces))
    start = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - start))
    cut = list(cut_pieces(pieces, start, length))

    assert sum(map(piece_length, cut)) == length
    assert sum(map(piece_length, join_pieces(cut))) == length
    both = [*cut_pieces(pieces, 0, start), *cut_pieces(pieces, start, total - start)]
    assert _merged(both) == _merged(pieces)


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces joined, literals too: where those are cut depends on what was there first."""
    merged: list[Piece] = []
    for piece in join_pieces(pieces):
        if isinstance(piece, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


@pytest.mark.parametrize("flat", [[5], [5, 1], [0, 1, 0], [5, 0, 0], [5, b"short", 0], [5, 1, -1], [True, 1, 0], ["x"]])
def test_an_impossible_range_is_refused(flat: list[object]) -> None:
    with pytest.raises(DecodeError):
        unpack_pieces(flat)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12), st.integers(0, 80), st.integers(1, 20))
def test_needed_ranges_are_found_as_a_set_of_bytes_would_find_them(
    spans: list[tuple[int, int]], start: int, length: int
) -> None:
    covered = {at for low, size in spans for at in range(low, low + size)}
    merged = merge_ranges((low, low + size) for low, size in spans)

    assert {at for low, high in merged for at in range(low, high)} == covered
    assert is_needed(start, start + length, merged) == bool(covered & set(range(start, start + length)))


@given(st.binary(max_size=200), st.data())
def test_rows_are_assembled_also_where_they_overlap(data: bytes, drawn: st.DataObject) -> None:
    cuts = sorted(drawn.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    rows = [
        (low, data[low : high + drawn.draw(st.integers(0, 5))])
        for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True)
    ]
    start = drawn.draw(st.integers(0, len(data)))
    length = drawn.draw(st.integers(0, len(data) - start))

    parts = assemble(rows, start, length)

    assert parts is not None
    assert b"".join(parts) == data[start : start + length]


def test_a_gap_between_rows_is_noticed() -> None:
    assert assemble([(0, b"abc"), (4, b"ef")], 1, 4) is None


@pytest.mark.parametrize(
    ("old", "new", "grown"),
    [
        ([Range(1, 0, 9)], [Range(1, 0, 12)], [Range(1, 9, 3)]),
        ([Range(1, 0, 9)], [Range(1, 0, 9), b"x"], [b"x"]),
        ([Range(1, 0, 9), b"ab"], [Range(1, 0, 9), b"abc"], [b"c"]),
        ([Range(1, 0, 9), b"ab"], [Range(1, 0, 9), b"abc", Range(2, 0, 5)], [b"c", Range(2, 0, 5)]),
        ([Range(1, 0, 9), b"ab"], [Range(1, 0, 9), b"ab"], []),
        ([Range(1, 0, 9), b"ab"], [Range(1, 0, 9), b"ax"], None),
        ([Range(1, 0, 9), b"ab"], [Range(1, 0, 12)], None),  # the same bytes, or others
        ([Range(1, 0, 9)], [Range(1, 0, 8)], None),
        ([Range(1, 0, 9)], [Range(2, 0, 12)], None),
        ([], [b"x"], None),
    ],
)
def test_what_a_value_grew_by_is_told_only_if_its_start_is_the_same(
    old: list[Piece], new: list[Piece], grown: list[Piece] | None
) -> None:
    assert grown_by(old, new) == grown
