"""Plans: whatever changes, the bytes written so far give back exactly the newest state."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import EncodeError
from backstay.pieces.body import ITEMS_AT_ONCE, LIST, TEXT, Body, Encoded, from_body, to_body
from backstay.pieces.head_state import MOVED_BYTES_MIN, SEED_BYTES_MAX, SOURCES_MAX, Change, Draft, HeadState
from backstay.pieces.manifest import (
    INLINE_BYTES_MAX,
    JOURNAL,
    LITERAL_BYTES_MAX,
    PIECES_MAX_INLINE,
    Coverage,
    Entries,
    Key,
    Piece,
    Range,
    assemble,
    decode_base,
    decode_manifest,
    decode_table,
    replay,
    root_digest,
)
from backstay.pieces.splice import RUN_BYTES_MIN
from support.strategies import same, values


class Shelf:
    """The bytes that drafts wrote, as a store would keep them."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.streams: dict[int, bytes] = {}
        self.next_stream = 0
        self.written = 0

    def new_stream(self) -> int:
        self.next_stream += 1
        return self.next_stream

    def put(self, draft: Draft) -> None:
        self.blobs.update(draft.blobs)
        for stream, offset, data in draft.chunks:
            assert len(self.streams.get(stream, b"")) == offset, "a stream only grows at its end"
            self.streams[stream] = self.streams.get(stream, b"") + data
        coverage = Coverage(self.blobs.__getitem__)
        needed = coverage.add(draft.manifest, draft.base)
        assert draft.blobs.keys() <= needed, "nothing is written that the state does not need"
        for stream, offset, data in draft.chunks:
            assert stream in needed
            ranges = coverage.ranges(stream)
            assert any(start <= offset and offset + len(data) <= end for start, end in ranges), "nor in a stream"
        self.written += sum(map(len, draft.blobs.values())) + sum(len(data) for _, _, data in draft.chunks)
        self.written += len(draft.manifest)

    def read(self, piece: Piece) -> bytes:
        if isinstance(piece, bytes):
            return piece
        whole = self.blobs[piece.source] if isinstance(piece.source, bytes) else self.streams[piece.source]
        found = assemble([(0, whole)], piece.start, piece.length)
        assert found is not None
        return b"".join(found)

    def entries(self, draft: Draft) -> Entries:
        base = {} if draft.base is None else decode_base(self.blobs[draft.base])
        entries = decode_manifest(draft.manifest, base)
        if JOURNAL in entries:
            replay(entries, base, [self.read(piece) for piece in entries[JOURNAL].pieces or ()])
        return entries

    def rebuild(self, draft: Draft) -> dict[Any, Any]:
        """Read the state back from nothing but the manifest and the bytes."""
        state = {}
        for key, entry in self.entries(draft).items():
            pieces: list[Piece]
            if entry.body is not None:
                pieces = [entry.body]
            elif entry.pieces is None:
                pieces = [Range(entry.digest, 0, entry.size)]
            else:
                pieces = [*(decode_table(self.blobs[entry.table]) if entry.table else ()), *entry.pieces]
            parts = [self.read(piece) for piece in pieces]
            assert sum(map(len, parts)) == entry.size
            state[key] = from_body(entry.kind, entry.count, parts)
        return state

    def reopen(self, draft: Draft, fork: bool = False) -> HeadState:
        """Make the head state again, as after a restart, with every value loaded; a fork owns no stream."""
        base = {} if draft.base is None else decode_base(self.blobs[draft.base])
        entries = decode_manifest(draft.manifest, base)
        tables = {e.table: decode_table(self.blobs[e.table]) for e in entries.values() if e.table is not None}
        owned = {} if fork else {stream: len(data) for stream, data in self.streams.items()}
        head_state = HeadState.load(entries, tables, draft.base, base, owned)
        if head_state.journal is not None:
            head_state.journal.fill([self.read(piece) for piece in head_state.journal.pieces])
            head_state.replay_journal()
        for stored in head_state.values.values():
            if stored.parts is None:
                stored.fill([self.read(piece) for piece in stored.pieces])
        return head_state


def whole(state: dict[str, Any], head_state: HeadState) -> Change:
    put: dict[Key, Body] = {key: to_body(value, key) for key, value in state.items()}
    return Change(put=put, delete={key for key in head_state.values if key not in put}, order=list(state))


LISTS = st.lists(st.text(max_size=300), max_size=30)
STATES = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.one_of(LISTS, values()), max_size=4)


@given(st.lists(st.tuples(STATES, st.booleans()), min_size=1, max_size=6))
def test_any_sequence_of_states_is_rebuilt_exactly(program: list[tuple[dict[str, Any], bool]]) -> None:
    shelf, head_state = Shelf(), HeadState()
    drafts: list[tuple[Draft, dict[str, Any]]] = []
    for state, restart in program:
        draft = head_state.plan(whole(state, head_state), shelf.new_stream)
        shelf.put(draft)
        drafts.append((draft, state))
        if restart:
            head_state = shelf.reopen(draft)
    for draft, state in drafts:
        rebuilt = shelf.rebuild(draft)

        assert same(rebuilt, state)
        assert list(rebuilt) == list(state)


@given(st.data())
def test_edits_of_a_long_list_are_rebuilt_exactly(data: st.DataObject) -> None:
    """Inserts, deletes, replacements and appends of long values: pieces, tables and consolidation."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    shelf, head_state = Shelf(), HeadState()
    items = [rng.randbytes(rng.randrange(1, 900)).hex() for _ in range(40)]
    for _ in range(25):
        kind = rng.choice(["append", "insert", "delete", "replace", "halve"])
        at = rng.randrange(len(items) + 1)
        if kind == "append":
            items.append(rng.randbytes(300).hex())
        elif kind == "insert":
            items.insert(at, rng.randbytes(200).hex())
        elif kind == "delete" and items:
            del items[at % len(items)]
        elif kind == "replace" and items:
            items[at % len(items)] = rng.randbytes(250).hex()
        elif kind == "halve":
            items = ["summary", *items[len(items) // 2 :]]
        draft = head_state.plan(whole({"items": list(items)}, head_state), shelf.new_stream)
        shelf.put(draft)

        assert shelf.rebuild(draft) == {"items": items}
        if rng.random() < 0.2:
            head_state = shelf.reopen(draft)


@given(st.lists(STATES, min_size=1, max_size=5))
def test_the_root_depends_on_the_content_only(states: list[dict[str, Any]]) -> None:
    """However a state came about, wherever its bytes are, its root is the same."""
    shelf, head_state = Shelf(), HeadState()
    for state in states:
        draft = head_state.plan(whole(state, head_state), shelf.new_stream)
        shelf.put(draft)
    fresh = HeadState().plan(whole(states[-1], HeadState()), Shelf().new_stream)

    assert draft.root == fresh.root == root_digest(shelf.entries(draft))


@given(st.lists(STATES, min_size=2, max_size=6), st.data())
def test_what_coverage_calls_unneeded_can_go_without_harm(states: list[dict[str, Any]], data: st.DataObject) -> None:
    shelf, head_state = Shelf(), HeadState()
    drafts = []
    for state in states:
        draft = head_state.plan(whole(state, head_state), shelf.new_stream)
        shelf.put(draft)
        drafts.append((draft, state))
    kept = data.draw(st.lists(st.sampled_from(drafts), min_size=1, unique_by=id))
    coverage = Coverage(shelf.blobs.__getitem__)
    needed = set().union(*(coverage.add(draft.manifest, draft.base) for draft, _ in kept))
    shelf.blobs = {name: blob for name, blob in shelf.blobs.items() if name in needed}
    for stream, bytes_ in shelf.streams.items():
        ranges = coverage.ranges(stream)
        shelf.streams[stream] = bytes(
            byte if any(start <= at < end for start, end in ranges) else 0xFF for at, byte in enumerate(bytes_)
        )
    for draft, state in kept:
        assert same(shelf.rebuild(draft), state)


def test_a_growing_list_is_one_range_whose_end_moves() -> None:
    shelf, head_state = Shelf(), HeadState()
    shelf.put(head_state.plan(whole({"m": ["x" * 500]}, head_state), shelf.new_stream))
    for number in range(50):
        body = to_body([f"{number}" * 200], "m")
        draft = head_state.plan(Change(append={"m": body}), shelf.new_stream)
        shelf.put(draft)
    (entry,) = shelf.entries(draft).values()

    assert entry.pieces is not None
    assert len(entry.pieces) == 1
    assert len(draft.manifest) < 80


def test_a_list_nested_in_a_dict_grows_by_what_is_new() -> None:
    """Its count changes in the middle of the bytes; the elements before and after are not written again."""
    shelf, head_state = Shelf(), HeadState()
    inner = ["seed" * 100] * 20
    state: dict[str, Any] = {"agents": {"a": inner, "b": "tail" * 200}}
    shelf.put(head_state.plan(whole(state, head_state), shelf.new_stream))
    before = shelf.written
    for number in range(100):
        inner.append(f"{number:04}" * 100)
        draft = head_state.plan(whole(state, head_state), shelf.new_stream)
        shelf.put(draft)

    assert shelf.rebuild(draft) == state
    assert shelf.written - before < 100 * (400 + 350)
    assert len(head_state.values["agents"].pieces) < 2 * PIECES_MAX_INLINE


def test_unchanged_values_move_to_a_base_instead_of_being_repeated() -> None:
    shelf, head_state = Shelf(), HeadState()
    steady = {f"key{number}": "v" * 100 for number in range(50)}
    shelf.put(head_state.plan(whole({**steady, "n": 0}, head_state), shelf.new_stream))
    first = shelf.written
    for number in range(1, 101):
        draft = head_state.plan(whole({**steady, "n": number}, head_state), shelf.new_stream)
        shelf.put(draft)

    assert shelf.rebuild(draft) == {**steady, "n": 100}
    assert len(draft.manifest) < 100
    assert shelf.written - first < 4 * first


@given(st.integers(0, 2**32))
def test_small_values_of_a_large_state_are_rebuilt_exactly(seed: int) -> None:
    """Base and journal: values change rarely or at every save, appear, disappear, grow and shrink; restarts, forks."""
    rng = random.Random(seed)
    shelf, head_state = Shelf(), HeadState()
    state: dict[str, Any] = {f"key{number}": rng.randbytes(30).hex() for number in range(40)}
    drafts: list[tuple[Draft, dict[str, Any]]] = []
    for number in range(50):
        for _ in range(rng.choice((0, 1, 1, 1, 3))):
            state[f"key{rng.randrange(40)}"] = rng.choice((rng.randrange(99), "x" * rng.randrange(300), b"b" * 40))
        state["hot"] = number
        if not rng.randrange(12):
            state.pop(rng.choice(list(state)))
        if not rng.randrange(20):
            state = dict(sorted(state.items(), key=lambda _: rng.random()))
        draft = head_state.plan(whole(state, head_state), shelf.new_stream)
        shelf.put(draft)
        drafts.append((draft, dict(state)))
        assert head_state.sources == Coverage(shelf.blobs.__getitem__).add(draft.manifest, draft.base)
        entries = shelf.entries(draft)
        assert draft.root == root_digest(entries)
        assert draft.size == sum(entry.size for entry in entries.values())
        if not rng.randrange(8):
            draft, kept = drafts[-1] if rng.randrange(3) else rng.choice(drafts)  # else a rewind or a fork
            head_state, state = shelf.reopen(draft, fork=bool(rng.randrange(2))), dict(kept)
    for draft, kept in drafts:
        rebuilt = shelf.rebuild(draft)
        assert same(rebuilt, kept)
        assert list(rebuilt) == list(draft.keys) == list(kept)


def test_a_journal_gets_no_bytes_in_the_save_that_ends_it() -> None:
    """Lists that grow one after another make a base worth it, while a small value moves to the journal."""
    for last in range(1, 30):
        shelf, head_state = Shelf(), HeadState()
        state: dict[str, Any] = {f"small {number}": "x" * 40 for number in range(60)}
        state |= {f"list {number}": ["y" * 300] for number in range(30)}
        shelf.put(head_state.plan(whole(state, head_state), shelf.new_stream))
        for number in range(last):
            state[f"list {number}"].append("z" * 60)
            if number == last - 1:
                state["small 7"] = "changed " * 5
            draft = head_state.plan(whole(state, head_state), shelf.new_stream)
            shelf.put(draft)

        assert shelf.rebuild(draft) == state


@pytest.mark.parametrize("count", [200, 300, 1000])
def test_a_new_order_of_many_keys_is_not_repeated_in_every_save(count: int) -> None:
    shelf, head_state = Shelf(), HeadState()
    state = {f"key number {number}": number for number in range(count)}
    shelf.put(head_state.plan(whole(state, head_state), shelf.new_stream))
    state["key number 0"] = state.pop("key number 0")
    written = []
    for step in range(40):
        state["key number 7"] = step
        before = shelf.written
        draft = head_state.plan(whole(state, head_state), shelf.new_stream)
        shelf.put(draft)
        written.append(shelf.written - before)

    assert list(shelf.rebuild(draft)) == list(state)
    assert max(written[-20:]) < 1000


def test_values_that_were_parts_of_one_do_not_grow_in_the_same_stream() -> None:
    shelf, head_state, chance = Shelf(), HeadState(), random.Random(1)
    items = [chance.randbytes(1500).hex() for _ in range(6)]
    shelf.put(head_state.plan(whole({"input": items[:3]}, head_state), shelf.new_stream))
    for added in (items[3:4], items[4:]):
        shelf.put(head_state.plan(Change(append={"input": to_body(added, "input")}), shelf.new_stream))
    draft = head_state.plan(whole({"b": items[3:4], "c": items[4:]}, head_state), shelf.new_stream)
    shelf.put(draft)
    assert not draft.chunks, "they are parts of what is stored"
    head_state = shelf.reopen(draft)
    change = Change(append={key: to_body([chance.randbytes(100).hex()], key) for key in "bc"})
    draft = head_state.plan(change, shelf.new_stream)
    shelf.put(draft)  # which refuses bytes that do not follow the end of their stream

    assert [len(value) for value in shelf.rebuild(draft).values()] == [2, 3]


def test_sources_are_known_exactly_however_many_forks_there_were() -> None:
    """The next save adds references to those that are new, so a source that was left must be forgotten."""
    shelf, head_state, chance = Shelf(), HeadState(), random.Random(1)
    draft = head_state.plan(whole({"log": [chance.randbytes(3000).hex()]}, head_state), shelf.new_stream)
    shelf.put(draft)
    gathered = 0
    for _ in range(80):
        head_state = shelf.reopen(draft, fork=True)
        for size in (1000, 100):
            added = to_body([chance.randbytes(size).hex()], "log")
            draft = head_state.plan(Change(append={"log": added}), shelf.new_stream)
            shelf.put(draft)
            gathered += draft.moved
            assert head_state.sources == Coverage(shelf.blobs.__getitem__).add(draft.manifest, draft.base)

    assert gathered > 1


@pytest.mark.parametrize("item", [60, 600])
def test_a_long_chain_of_forks_costs_what_is_new(item: int) -> None:
    shelf, head_state, items = Shelf(), HeadState(), ["the first" * 100]
    draft = head_state.plan(whole({"log": items}, head_state), shelf.new_stream)
    shelf.put(draft)
    sources, written = [], [shelf.written]
    for step in range(400):
        head_state = shelf.reopen(draft, fork=True)
        items.append(f"{step} " + "x" * item)
        draft = head_state.plan(Change(append={"log": to_body(items[-1:], "log")}), shelf.new_stream)
        shelf.put(draft)
        sources.append(len(head_state.sources))
        written.append(shelf.written)

    assert shelf.rebuild(draft) == {"log": items}
    assert max(sources) <= SOURCES_MAX + 3  # its own stream, and the blobs of the table and the base
    assert written[400] - written[200] < 1.5 * (written[200] - written[0]), "it grows with the length of the chain"


@pytest.mark.parametrize("count", [50, 300])
@pytest.mark.parametrize("restarts", [False, True])
def test_changing_one_small_value_of_many_costs_a_few_times_its_bytes(count: int, restarts: bool) -> None:
    rng = random.Random(1)
    shelf, head_state = Shelf(), HeadState()
    state = {f"key{number}": rng.randbytes(25).hex() for number in range(count)}
    draft = head_state.plan(whole(state, head_state), shelf.new_stream)
    shelf.put(draft)
    assert shelf.written < count * 80
    first, longest = shelf.written, 0
    for number in range(1, 4 * count):
        key = f"key{rng.randrange(count)}"
        state[key] = rng.randbytes(25).hex()
        draft = head_state.plan(Change(put={key: to_body(state[key], key)}), shelf.new_stream)
        shelf.put(draft)
        if restarts and not number % 20:
            head_state = shelf.reopen(draft)
        base, journal = shelf.blobs.get(draft.base or b"", b""), head_state.journal
        longest = max(longest, 0 if journal is None else journal.entry.size)
        assert journal is None or journal.entry.size <= 2 * len(base)  # a load costs what the state takes

    assert shelf.rebuild(draft) == state
    assert longest > count * 60
    assert shelf.written - first < 4 * count * 50 * (5 if restarts else 4)


CUTS = st.lists(st.integers(0, 40), max_size=5).map(sorted)


@given(st.binary(max_size=40), st.binary(max_size=40), CUTS, CUTS)
def test_what_follows_the_previous_bytes_is_found_wherever_both_are_cut(
    whole: bytes, other: bytes, cuts: list[int], other_cuts: list[int]
) -> None:
    body = Body(LIST, 0, *(whole[low:high] for low, high in pairwise([0, *cuts, 40])))
    for previous in (whole[: len(other)], other, whole + other):
        cut = [previous[low:high] for low, high in pairwise([0, *other_cuts, 80])]

        assert body.after(cut) == (whole[len(previous) :] if whole.startswith(previous) else None)


@pytest.mark.parametrize("length", [3, 60, 3000])
def test_a_long_list_is_encoded_as_a_short_one_is(length: int) -> None:
    items = ["x" * (length + number % 7) for number in range(70_000 if length == 3 else 200)]
    body = to_body(items, "m")

    assert len(body.parts) > 1
    assert (body.kind, body.count) == (LIST, len(items))
    assert body.data == b"".join(to_body([item], "m").data for item in items)


def test_a_long_list_is_compared_wherever_its_bytes_are_cut() -> None:
    shelf, head_state = Shelf(), HeadState()
    items = [f"item {number} " * 100 for number in range(3 * ITEMS_AT_ONCE)]
    draft = head_state.plan(whole({"m": items}, head_state), shelf.new_stream)
    shelf.put(draft)
    for step in range(3 * ITEMS_AT_ONCE):
        items.append(f"more {step}")
        new = len(to_body([items[-1]], "m").data)
        if step % 50 == 10:
            items[step] = "changed"
        draft = head_state.plan(whole({"m": items}, head_state), shelf.new_stream)
        shelf.put(draft)
        assert shelf.rebuild(draft) == {"m": items}
        if step % 50 == 20:  # neither the parts of a load nor those of an append are cut as the encoder cuts
            head_state = shelf.reopen(draft)
            items.append("appended")
            draft = head_state.plan(Change(append={"m": to_body(items[-1:], "m")}), shelf.new_stream)
            shelf.put(draft)
        elif step % 50 != 10:
            assert sum(len(data) for _, _, data in draft.chunks) <= 2 * new + LITERAL_BYTES_MAX


def test_a_long_list_with_a_value_that_cannot_be_stored_is_refused_by_its_index() -> None:
    items: list[Any] = [{"n": number} for number in range(3 * ITEMS_AT_ONCE)]
    items[2 * ITEMS_AT_ONCE + 5]["n"] = object()

    with pytest.raises(EncodeError) as caught:
        to_body(items, "state.m")

    assert caught.value.path == f"state.m[{2 * ITEMS_AT_ONCE + 5}].n"


def test_a_change_of_order_alone_is_kept() -> None:
    shelf, head_state = Shelf(), HeadState()
    shelf.put(head_state.plan(whole({"a": 1, "b": 2, "c": 3}, head_state), shelf.new_stream))
    draft = head_state.plan(whole({"c": 3, "a": 1, "b": 2}, head_state), shelf.new_stream)
    shelf.put(draft)

    assert list(shelf.rebuild(draft)) == ["c", "a", "b"]


def test_values_at_the_inline_limit_stay_inline_and_one_byte_more_does_not() -> None:
    head_state, shelf = HeadState(), Shelf()
    head_state.plan(
        whole({"at": "x" * INLINE_BYTES_MAX, "over": "x" * (INLINE_BYTES_MAX + 1)}, head_state), shelf.new_stream
    )

    assert head_state.values["at"].entry.body is not None
    assert head_state.values["over"].entry.body is None


BORDERS = (LITERAL_BYTES_MAX, INLINE_BYTES_MAX, RUN_BYTES_MIN, MOVED_BYTES_MIN, SEED_BYTES_MAX)
SIZES = sorted({border + by for border in BORDERS for by in (-1, 0, 1)} | {1, 2 * INLINE_BYTES_MAX})


@pytest.mark.parametrize("restart", [False, True])
def test_a_value_of_any_size_at_a_border_can_change_by_any_such_size_anywhere(restart: bool) -> None:
    """A value of exactly the inline limit that grew lost its first 256 bytes: an edit copied from pieces it had not."""
    chance = random.Random(1)
    wholes = {size: chance.randbytes(size) for size in SIZES}
    for old in wholes.values():
        for more in wholes.values():
            half = len(old) // 2
            for new in (old + more, more + old, old[:half] + more + old[half:], old[half:] + more, old[1:], old[:-1]):
                shelf, head_state = Shelf(), HeadState()
                first = head_state.plan(whole({"raw": old}, head_state), shelf.new_stream)
                shelf.put(first)
                head_state = shelf.reopen(first) if restart else head_state
                draft = head_state.plan(whole({"raw": new}, head_state), shelf.new_stream)
                shelf.put(draft)
                last = head_state.plan(whole({"raw": new + more}, head_state), shelf.new_stream)
                shelf.put(last)

                assert shelf.rebuild(first) == {"raw": old}
                assert shelf.rebuild(draft) == {"raw": new}, (len(old), len(more))
                assert shelf.rebuild(last) == {"raw": new + more}, (len(old), len(more))


def test_bytes_that_somebody_else_encoded_come_back_with_their_tag() -> None:
    shelf, head_state = Shelf(), HeadState()
    value = Encoded("msgpack", b"\x93\x01\x02\x03" * 200)
    draft = head_state.plan(whole({"channel": value}, head_state), shelf.new_stream)
    shelf.put(draft)

    assert shelf.rebuild(draft) == {"channel": value}


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.sampled_from([200, 300, 5000]))
def test_short_appends_are_rebuilt_exactly(program: list[tuple[int, bool]], first: int) -> None:
    shelf, head_state = Shelf(), HeadState()
    whole = "x" * first
    shelf.put(head_state.plan(Change(put={"log": to_body(whole, "log")}), shelf.new_stream))
    for number, (length, reopen) in enumerate(program):
        added = chr(ord("a") + number % 26) * length
        draft = head_state.plan(Change(append={"log": to_body(added, "log")}), shelf.new_stream)
        shelf.put(draft)
        whole += added
        assert shelf.rebuild(draft) == {"log": whole}
        if reopen:
            head_state = shelf.reopen(draft)


def test_appends_of_a_few_bytes_wait_in_the_manifest_for_more() -> None:
    shelf, head_state = Shelf(), HeadState()
    shelf.put(head_state.plan(Change(put={"log": to_body("x" * 5000, "log")}), shelf.new_stream))
    rows, longest = 0, 0
    for _ in range(100):
        draft = head_state.plan(Change(append={"log": to_body("step", "log")}), shelf.new_stream)
        shelf.put(draft)
        rows += len(draft.chunks)
        longest = max(longest, len(draft.manifest))
    assert shelf.rebuild(draft) == {"log": "x" * 5000 + "step" * 100}
    assert rows == 100 // 7  # six of them make a literal, the seventh a row
    assert longest < 150


def test_an_empty_append_changes_nothing() -> None:
    shelf, head_state = Shelf(), HeadState()
    shelf.put(head_state.plan(whole({"m": ["x" * 999]}, head_state), shelf.new_stream))
    draft = head_state.plan(Change(append={"m": Body(LIST, 0, b"")}), shelf.new_stream)
    shelf.put(draft)

    assert shelf.rebuild(draft) == {"m": ["x" * 999]}
    assert draft.chunks == []


def test_text_grows_by_what_is_appended() -> None:
    shelf, head_state = Shelf(), HeadState()
    shelf.put(head_state.plan(whole({"log": "é" * 5000}, head_state), shelf.new_stream))
    draft = head_state.plan(Change(append={"log": Body(TEXT, 0, "ü".encode() * 300)}), shelf.new_stream)
    shelf.put(draft)

    assert shelf.rebuild(draft) == {"log": "é" * 5000 + "ü" * 300}
    assert sum(len(data) for _, _, data in draft.chunks) == 600


BIG = {f"key {number}": f"value {number} " * 20 for number in range(40)}


def test_a_value_that_was_a_part_of_one_that_goes_is_not_written_again() -> None:
    """An engine keeps an input as a whole, and takes its parts into the state with the next step."""
    shelf, head_state = Shelf(), HeadState()
    first = head_state.plan(whole({"input": {"small": 1, "doc": BIG, "more": "x" * 50}}, head_state), shelf.new_stream)
    shelf.put(first)
    before = shelf.written
    second = head_state.plan(whole({"doc": BIG, "small": 1, "answer": "y"}, head_state), shelf.new_stream)
    shelf.put(second)

    assert shelf.written - before < 300
    assert shelf.rebuild(second) == {"doc": BIG, "small": 1, "answer": "y"}
    assert shelf.rebuild(first)["input"]["doc"] == BIG
    again = HeadState()
    assert again.plan(whole({"doc": BIG, "small": 1, "answer": "y"}, again), shelf.new_stream).root == second.root
    changed = {**BIG, "new": "value"}  # and it goes on from there like any other value
    reopened = shelf.reopen(second)
    third = reopened.plan(whole({"doc": changed}, reopened), shelf.new_stream)
    shelf.put(third)
    assert shelf.rebuild(third) == {"doc": changed}


NESTED = st.fixed_dictionaries({"a": st.binary(min_size=900, max_size=1200), "b": st.text(max_size=40)})


@given(st.lists(st.tuples(NESTED, st.integers(0, 3), st.booleans()), min_size=2, max_size=6))
def test_values_that_move_between_keys_are_rebuilt_exactly(program: list[tuple[dict[str, Any], int, bool]]) -> None:
    shelf, head_state = Shelf(), HeadState()
    kept: list[tuple[Draft, dict[str, Any]]] = []
    for nested, shape, restart in program:
        shapes: list[dict[str, Any]] = [{"in": nested}, dict(nested), {"in": [nested, nested]}, {"out": nested["a"]}]
        draft = head_state.plan(whole(shapes[shape], head_state), shelf.new_stream)
        shelf.put(draft)
        kept.append((draft, shapes[shape]))
        if restart:
            head_state = shelf.reopen(draft)

    for draft, state in kept:
        assert same(shelf.rebuild(draft), state)
