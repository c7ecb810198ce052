"""Two byte strings and what makes one of the other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.pieces.splice import RUN_BYTES_MIN, SEARCHES_MAX, Copy, common_prefix, common_suffix, patch, splice

BYTES = st.one_of(
    st.binary(max_size=2000),
    st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=40), st.integers(1, 100)),
)


@given(BYTES, BYTES)
def test_the_edits_always_make_the_new_bytes_of_the_old(old: bytes, new: bytes) -> None:
    assert patch(old, splice(old, new)) == new


@given(st.binary(max_size=3000), st.integers(0, 3000), st.integers(0, 600), st.binary(max_size=600))
def test_the_law_holds_for_an_edit_in_the_middle(old: bytes, at: int, removed: int, added: bytes) -> None:
    new = old[:at] + added + old[at + removed :]

    assert patch(old, splice(old, new)) == new


@given(BYTES, BYTES)
def test_common_ends_are_the_longest_there_are(a: bytes, b: bytes) -> None:
    prefix, suffix = common_prefix(a, b), common_suffix(a, b)

    assert a[:prefix] == b[:prefix]
    assert a[prefix : prefix + 1] != b[prefix : prefix + 1] or prefix == min(len(a), len(b))
    assert a[len(a) - suffix :] == b[len(b) - suffix :]
    assert suffix == min(len(a), len(b)) or a[len(a) - suffix - 1] != b[len(b) - suffix - 1]


def random_bytes(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def new_bytes(old: bytes, new: bytes) -> int:
    return sum(len(edit) for edit in splice(old, new) if not isinstance(edit, Copy))


def test_an_append_costs_only_what_was_appended() -> None:
    old = random_bytes(1, 100_000)

    assert new_bytes(old, old + b"x" * 500) == 500


def test_an_edit_in_the_middle_costs_only_the_edit() -> None:
    old = random_bytes(2, 100_000)

    assert new_bytes(old, old[:50_000] + b"y" * 300 + old[50_100:]) == 300


def test_dropping_the_oldest_half_costs_only_what_replaces_it() -> None:
    old = random_bytes(3, 100_000)

    assert new_bytes(old, b"summary" + old[50_000:]) == 7


def test_growth_inside_a_nested_value_costs_the_growth_and_the_changed_count() -> None:
    """A count that changes before the elements must not make them all new."""
    head, elements, tail = random_bytes(4, 900), random_bytes(5, 50_000), random_bytes(6, 900)
    old = head + b"\xdc\x00\x64" + elements + tail

    assert new_bytes(old, head + b"\xdc\x00\x65" + elements + b"z" * 400 + tail) < 450


def test_runs_too_short_for_an_address_count_as_new() -> None:
    shared = random_bytes(7, RUN_BYTES_MIN - 1)

    assert splice(b"a" + shared + b"b", b"c" + shared + b"d") == [b"c" + shared + b"d"]


def test_bytes_with_nothing_in_common_cost_a_bounded_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search takes from one budget, so the worst case is linear in the size."""
    monkeypatch.setattr("backstay.pieces.splice.ANCHOR_SPREAD", 100 * SEARCHES_MAX)
    old, new = random_bytes(8, 200_000), random_bytes(9, 200_000)

    assert splice(old, new) == [new]
