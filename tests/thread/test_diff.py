from __future__ import annotations

import copy
import html
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath, PureWindowsPath
from random import Random
from typing import Any

import jsonpatch
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay import register
from backstay.codec.msgpack import DEPTH_MAX, INT_BITS_MAX
from backstay.codec.values import MUTABLE
from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint
from backstay.operations import diff as diffs
from backstay.operations.diff import BLOCK_ITEMS_MAX, NAN_ITEMS_MAX, Diff, apply_patch, diff
from support.strategies import same, states, values

NAN = float("nan")
law = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a slow machine is no failure


@register(name="tests.thread.diff.Turn")
@dataclass
class Turn:
    id: str
    text: Any


class Broken:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no answer")

    __hash__ = None  # type: ignore[assignment]  # what Python does for a class with __eq__ alone


def sorted_keys(value: Any) -> Any:
    """Return the value with text keys in order and every NaN the same one: what the law leaves open."""
    if type(value) is float and math.isnan(value):
        return NAN
    if type(value) is complex:
        return (sorted_keys(value.real), sorted_keys(value.imag))
    if type(value) is dict:
        items = [(sorted_keys(key), sorted_keys(item)) for key, item in value.items()]
        return dict(sorted(items)) if all(type(key) is str for key in value) else items
    if type(value) in (list, tuple):
        return type(value)(map(sorted_keys, value))
    if type(value) in (set, frozenset):
        return type(value)(map(sorted_keys, value))
    return value


def alike(left: Any, right: Any) -> bool:
    return same(sorted_keys(left), sorted_keys(right))


def message(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"m{number}", "role": "user", "content": f"text {number}", **more}


def paths(found: Diff) -> list[tuple[str, str]]:
    return [(operation["op"], operation["path"]) for operation in found]


def edited(value: Any, dice: Random, others: list[Any]) -> Any:
    """Return a value close to this one: parts of it dropped, doubled, moved or replaced."""
    if not value or type(value) not in (dict, list) or dice.random() < 0.1:
        return dice.choice([value, value, *others])
    if type(value) is dict:
        kept = {key: edited(item, dice, others) for key, item in value.items() if dice.random() < 0.8}
        return {**kept, "new": dice.choice(others)} if others and dice.random() < 0.2 else kept
    picked = [at for at in range(len(value)) for _ in range(dice.choice([0, 1, 1, 1, 1, 2]))]
    if dice.random() < 0.2:
        dice.shuffle(picked)
    return [value[at] if dice.random() < 0.7 else edited(value[at], dice, others) for at in picked]


def json_states() -> st.SearchStrategy[dict[str, Any]]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    ids = st.fixed_dictionaries({"id": st.integers(0, 9)}, optional={"content": scalars})
    nested = st.recursive(
        scalars | st.lists(ids | st.integers(0, 3), max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab/~0-", max_size=2), inner, max_size=3),
        max_leaves=8,
    )
    return st.dictionaries(st.text("ab/~0-", max_size=2), nested, max_size=4)


@law
@given(states(), states())
def test_applying_the_diff_of_any_two_states_gives_the_second_exactly(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert alike(apply_patch(a, diff(a, b).patch), b)


@law
@given(states(), st.lists(values(), max_size=3), st.integers())
def test_applying_the_diff_of_a_state_and_an_edited_one_gives_the_edited_one(
    a: dict[str, Any], others: list[Any], seed: int
) -> None:
    b = {key: edited(value, Random(seed), others) for key, value in a.items()}

    assert alike(apply_patch(a, diff(a, b).patch), b)


@law
@given(st.lists(st.integers(0, 6)), st.lists(st.integers(0, 6)))
def test_lists_with_repeats_and_moves_come_out_exactly(a: list[int], b: list[int]) -> None:
    assert diff({"l": a}, {"l": b}).apply({"l": a}) == {"l": b}


@law
@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8), st.integers(0, 8))
def test_lists_with_ids_come_out_exactly(a: list[int], b: list[int], cut_a: int, cut_b: int) -> None:
    old = {"l": [message(n) for n in a[:cut_a]]}
    new = {"l": [message(n, edited=n % 2) if n % 3 else message(n) for n in b[:cut_b]]}

    assert diff(old, new).apply(old) == new


@law
@given(states())
def test_a_state_does_not_differ_from_its_copy(state: dict[str, Any]) -> None:
    found = diff(state, copy.deepcopy(state))

    assert not found
    assert len(found) == 0
    assert list(found) == []
    assert found.summary() == ""


@law
@given(json_states(), json_states())
def test_another_implementation_of_json_patch_gives_the_same_result(a: dict[str, Any], b: dict[str, Any]) -> None:
    patch = json.loads(json.dumps(diff(a, b).to_json()))

    assert same(sorted_keys(jsonpatch.apply_patch(a, patch)), sorted_keys(b))


@law
@given(states(), states())
def test_neither_the_states_nor_the_patch_share_a_list_or_dict_with_the_result(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    found = diff(a, b)
    before = copy.deepcopy((a, b, found.patch))

    empty(found.apply(a))

    assert alike((a, b, list(found.patch)), (*before[:2], list(before[2])))


def empty(value: Any) -> None:
    """Take everything out of what can be changed, from the inside out."""
    for item in value.values() if isinstance(value, dict) else value if type(value) in (list, tuple, deque) else ():
        empty(item)
    if type(value) in MUTABLE:
        value.clear()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0j, -0j),
        ([1], (1,)),
        ((1,), (True,)),
        ({1}, {True}),
        ({1}, frozenset({1})),
        ({1: "a"}, {True: "a"}),
        ({1: 0}, {"1": 0}),
        (Decimal("1.0"), Decimal("1.00")),
        (datetime(2024, 1, 1, 12, tzinfo=UTC), datetime(2024, 1, 1, 13, tzinfo=timezone(timedelta(hours=1)))),
        (timezone(timedelta(hours=1)), timezone(timedelta(hours=1), "CET")),
        (Turn("a", 1), Turn("a", True)),
        (np.zeros(1, "int32"), np.zeros(1, "float32")),
        (np.int32(0), np.float32(0)),
        ("a", b"a"),
        (b"a", bytearray(b"a")),
        ({"a": 1}, OrderedDict(a=1)),
        (OrderedDict(a=1), OrderedDict(a=True)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(list), defaultdict(set)),
        (Counter(), Counter(a=0)),
        (Counter(a=1), Counter(a=True)),
        (deque([1]), deque([1], maxlen=5)),
        (deque([1]), deque([True])),
        (range(0), range(1, 1)),
        (range(0, 3, 2), range(0, 4, 2)),
        (PureWindowsPath("A"), PureWindowsPath("a")),
        (PurePosixPath("a"), PureWindowsPath("a")),
        (None, False),
        ([], {}),
    ],
)
@pytest.mark.parametrize("around", [lambda value: value, lambda value: [value], lambda value: [{"x": value}] * 300])
def test_values_that_python_takes_for_equal_are_told_apart(old: Any, new: Any, around: Any) -> None:
    found = diff({"x": around(old)}, {"x": around(new)})

    assert found
    assert same(found.apply({"x": around(old)}), {"x": around(new)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: complex(float("nan"), 0),
        lambda: Decimal("sNaN"),
        lambda: {float("nan"), 1},
        lambda: {float("nan"): 1},
        lambda: (float("nan"),),
        lambda: Turn("a", float("nan")),
        lambda: np.array([NAN, 1.0]),
        lambda: np.arange(9),
        lambda: [float("nan")] * (2 * BLOCK_ITEMS_MAX),
    ],
)
def test_values_that_python_never_takes_for_equal_are_unchanged(make: Any) -> None:
    assert not diff({"x": make(), "l": [make()]}, {"x": make(), "l": [make()]})


def test_the_order_of_text_keys_is_no_change() -> None:
    old = [{"a": n, "b": 0} for n in range(500)]
    new = [{"b": 0, "a": n} for n in range(500)]

    assert not diff({"l": old, "m": 1}, {"m": 1, "l": new})


def test_a_nan_of_other_bits_beside_reordered_keys_is_no_change() -> None:
    negative = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    old = [{"a": n, "b": NAN} for n in range(500)]
    new = [{"b": negative, "a": n} for n in range(500)]

    assert not diff({"l": old}, {"l": new})


def test_a_class_that_cannot_compare_itself_counts_as_changed() -> None:
    assert paths(diff({"x": Broken()}, {"x": Broken()})) == [("replace", "/x")]
    assert paths(diff({"x": [Broken(), 1]}, {"x": [Broken(), 2]})) == [("replace", "/x/0"), ("replace", "/x/1")]


def test_items_that_raise_when_they_are_compared_are_found_all_the_same() -> None:
    old = [Decimal("sNaN1"), np.arange(2), 1]
    new = [Decimal("sNaN1"), np.arange(2), 2]

    assert paths(diff({"l": old}, {"l": new})) == [("replace", "/l/2")]


@pytest.mark.parametrize(("count", "changed"), [(NAN_ITEMS_MAX, False), (NAN_ITEMS_MAX + 1, True)])
def test_sets_of_many_nans_count_as_changed_beyond_a_limit(count: int, changed: bool) -> None:
    old, new = ({float("nan") for _ in range(count)} for _ in range(2))

    assert bool(diff({"x": old}, {"x": new})) is changed


def test_messages_that_were_appended_are_all_that_is_written() -> None:
    old = [message(n) for n in range(500)]
    new = [*copy.deepcopy(old), message(500), message(501)]

    assert diff({"messages": old}, {"messages": new}).patch == (
        {"op": "add", "path": "/messages/-", "value": message(500)},
        {"op": "add", "path": "/messages/-", "value": message(501)},
    )


def test_deleting_the_first_message_and_editing_another_is_two_operations() -> None:
    old = [message(n) for n in range(500)]
    new = copy.deepcopy(old[1:])
    new[250]["content"] = "edited"

    assert diff({"messages": old}, {"messages": new}).patch == (
        {"op": "remove", "path": "/messages/0"},
        {"op": "replace", "path": "/messages/250/content", "value": "edited"},
    )


def test_objects_are_matched_by_their_id_too() -> None:
    old = [Turn(str(n), n) for n in range(9)]
    new = [*old[1:4], Turn("4", "edited"), *old[5:]]

    assert paths(diff({"l": old}, {"l": new})) == [("remove", "/l/0"), ("replace", "/l/3")]


def test_a_message_with_another_id_is_replaced_as_a_whole() -> None:
    assert paths(diff({"l": [message(1)]}, {"l": [message(2)]})) == [("replace", "/l/0")]


def test_items_without_ids_are_matched_by_content() -> None:
    at = datetime(2024, 1, 1)
    old = [{"n": n, "at": at} for n in range(100)]
    new = [*old[1:50], {"n": 50, "at": at, "more": 1}, *old[51:], {"n": 100}]

    assert paths(diff({"l": old}, {"l": new})) == [("remove", "/l/0"), ("add", "/l/49/more"), ("add", "/l/-")]


@pytest.mark.parametrize("ids", [[1, 1, 2], [[1], [2], [3]], [None, 1, 2], [1, True, 1.0]])
def test_ids_that_identify_nothing_do_no_harm(ids: list[Any]) -> None:
    old = {"l": [{"id": name, "n": n} for n, name in enumerate(ids)]}
    new = {"l": [{"id": name, "n": n} for n, name in enumerate(reversed(ids))]}

    assert same(diff(old, new).apply(old), new)


def test_a_message_moved_to_the_front_is_removed_and_added() -> None:
    old = [message(n) for n in range(9)]

    assert paths(diff({"l": old}, {"l": [old[5], *old[:5], *old[6:]]})) == [("add", "/l/0"), ("remove", "/l/6")]


def test_keys_are_escaped_as_json_pointers_are() -> None:
    assert paths(diff({"a": {}}, {"a": {"x/y~z": 1, "": 2}})) == [("add", "/a/x~1y~0z"), ("add", "/a/")]


@pytest.mark.parametrize("length", [BLOCK_ITEMS_MAX - 1, BLOCK_ITEMS_MAX, BLOCK_ITEMS_MAX + 1])
@pytest.mark.parametrize("at", [0, 127, 128, 254])
def test_one_changed_item_is_found_wherever_it_is_in_a_block(length: int, at: int) -> None:
    old = list(range(length))
    new = [*old[:at], "changed", *old[at + 1 :]]

    assert paths(diff({"l": old}, {"l": new})) == [("replace", f"/l/{at}")]


def test_a_patch_does_not_follow_later_changes_of_the_states() -> None:
    b = {"l": [[1]]}
    found = diff({}, b)

    b["l"][0].append(2)

    assert found.apply({}) == {"l": [[1]]}


def nested(depth: int, inside: Any) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


def test_states_as_deep_as_can_be_stored_are_compared() -> None:
    a, b = ({"x": nested(DEPTH_MAX - 1, n)} for n in (1, 2))

    assert diff(a, b).apply(a) == b
    assert paths(diff(a, b)) == [("replace", "/x" + "/0" * (DEPTH_MAX - 1))]


def test_a_state_that_holds_itself_is_refused() -> None:
    a: dict[str, Any] = {"x": {}}
    a["x"]["x"] = a["x"]
    b: dict[str, Any] = {"x": {}}
    b["x"]["x"] = b["x"]

    with pytest.raises(InvalidInput, match="contains itself"):
        diff(a, b)
    with pytest.raises(InvalidInput, match="contains itself"):
        apply_patch(a, ())


@pytest.mark.parametrize("state", [None, [], "state", {1: 2}])
def test_only_a_checkpoint_or_a_mapping_with_text_keys_is_a_state(state: Any) -> None:
    with pytest.raises(InvalidInput, match="mapping with text keys"):
        diff({}, state)


def test_checkpoints_are_compared_by_their_states_and_named_by_id_and_step() -> None:
    a = Checkpoint(id="c1", thread_id="t", step=1, state={"n": 1})
    b = Checkpoint(id="c2", thread_id="t", step=2, state={"n": 2})

    found = diff(a, b)

    assert (found.before, found.after) == ("c1 (step 1)", "c2 (step 2)")
    assert found.apply(a.state) == b.state
    assert repr(found) == "<Diff 'c1 (step 1)' to 'c2 (step 2)', 1 operations>"


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        ({"op": "move", "path": "/a", "from": "/b"}, "add, remove or replace"),
        ("remove", "add, remove or replace"),
        ({"op": "add", "path": "/a"}, "no value"),
        ({"op": "add", "value": 1}, "starts with a slash"),
        ({"op": "add", "path": "", "value": 1}, "starts with a slash"),
        ({"op": "remove", "path": "/missing"}, "the key does not exist"),
        ({"op": "replace", "path": "/a/b/c", "value": 1}, "the key does not exist"),
        ({"op": "remove", "path": "/l/2"}, "fewer items"),
        ({"op": "add", "path": "/l/3", "value": 1}, "fewer items"),
        ({"op": "remove", "path": "/l/-"}, "not an index"),
        ({"op": "remove", "path": "/l/-1"}, "not an index"),
        ({"op": "remove", "path": "/l/01"}, "not an index"),
        ({"op": "remove", "path": "/l/"}, "not an index"),
        ({"op": "remove", "path": "/l/١"}, "not an index"),
        ({"op": "remove", "path": "/l/" + "1" * 5000}, "not an index"),
        ({"op": "add", "path": "/t/0", "value": 1}, "a tuple has no keys or indices"),
        ({"op": "replace", "path": "/s/0", "value": 1}, "a str has no keys or indices"),
    ],
)
def test_an_operation_that_does_not_fit_is_named_and_changes_nothing(operation: Any, why: str) -> None:
    state = {"a": {}, "l": [1, 2], "t": (1,), "s": "text"}

    with pytest.raises(InvalidInput, match=rf"operation 2 .*{why}"):
        apply_patch(state, [{"op": "add", "path": "/ok", "value": 1}, operation])

    assert state == {"a": {}, "l": [1, 2], "t": (1,), "s": "text"}


@pytest.mark.parametrize("value", [(1,), {1}, b"a", NAN, math.inf, {1: 2}, datetime(2024, 1, 1), Turn("a", "b")])
def test_a_value_that_json_cannot_carry_is_refused_by_its_path(value: Any) -> None:
    found = diff({}, {"a": {"b/c": [0, value]}})

    with pytest.raises(InvalidInput, match=type(value).__name__) as caught:
        found.to_json()

    assert caught.value.path == "/a/b~1c/1"


def test_to_json_gives_copies() -> None:
    found = diff({}, {"a": [1]})

    found.to_json()[0]["value"].append(2)

    assert found.to_json() == [{"op": "add", "path": "/a", "value": [1]}]


def test_the_summary_has_one_line_for_each_top_level_key_that_changed() -> None:
    old = {
        "messages": [message(n) for n in range(6)],
        "config": {"-": 1, "same": 0, "deep": {"x": 1, "y": 1}},
        "count": 1,
        "gone": 1,
        "same": 1,
    }
    messages = [message(10), message(1), message(2, a=1, b=2), *(message(n) for n in (20, 3, 4, 5, 6, 7, 8))]
    new = {
        "messages": messages,
        "config": {"same": 0, "more": 1, "deep": {"x": 2, "y": 2}},
        "count": 2,
        "same": 1,
        "new": 1,
    }

    assert diff(old, new).summary().splitlines() == [
        "messages: 1 replaced, 1 edited, 1 inserted, 3 appended",
        "config: 1 removed, 1 edited, 1 added",
        "count: replaced",
        "gone: removed",
        "new: added",
    ]


def test_the_text_has_a_sign_for_each_operation_and_shows_both_values() -> None:
    found = diff({"a": 1, "b": "old", "c": 0}, {"a": 2, "c": 0, "d": [1]})

    assert str(found) == "--- before\n+++ after\n~ /a: 1 → 2\n- /b: 'old'\n+ /d: [1]"


def test_the_text_of_no_difference_says_so() -> None:
    assert str(diff({}, {})) == "before and after are the same"


class Loud:
    def __repr__(self) -> str:
        return "\x1b[2J\r\n\u202eevil"


HOSTILE = "\x1b]0;owned\x07\x1b[31m\r\n\x9b2J\u202e\u2028\ud800<script>alert(1)</script>"


@pytest.mark.parametrize(
    "value", [HOSTILE, {HOSTILE: 1}, [HOSTILE], HOSTILE.encode("utf-8", "replace"), Loud()], ids=type
)
def test_a_hostile_state_cannot_drive_the_terminal_or_the_page(value: Any) -> None:
    found = diff({"k": "x"}, {"k": value, HOSTILE: 1})
    page = found._repr_html_()

    assert all(line.isprintable() for line in str(found).split("\n"))
    assert len(str(found).split("\n")) == 4
    assert all(line.isprintable() for line in found.summary().split("\n"))
    assert "<script" not in page
    assert page.isprintable()


def test_hostile_labels_are_made_visible_too() -> None:
    found = Diff(({"op": "remove", "path": "/a"},), HOSTILE, HOSTILE)

    assert all(line.isprintable() for line in str(found).split("\n"))
    assert html.escape("<script>") in found._repr_html_()


@pytest.mark.parametrize(
    "value",
    [
        *("x" * 10**6, b"x" * 10**6, bytearray(10**6), list(range(10**5)), deque(range(10**5)), nested(200, 1)),
        *(OrderedDict.fromkeys(range(10**5)), defaultdict(str, {0: "x" * 10**6}), Counter(range(10**5))),
        *(1 << INT_BITS_MAX, {1 << INT_BITS_MAX}, range(1 << INT_BITS_MAX), PurePosixPath("x" * 10**6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_long_values_are_shortened(value: Any) -> None:
    shown = str(diff({"x": 0}, {"x": value}))

    assert len(shown) < 300


def test_the_number_of_lines_is_bounded() -> None:
    state = {str(n): n for n in range(diffs.LINES_MAX + 5)}

    found = diff({}, state)

    assert str(found).endswith("\n… and 5 more")
    assert found._repr_html_().count("<tr") == diffs.LINES_MAX + 1


@pytest.mark.parametrize("make", [lambda n: n, lambda n: {"n": n}], ids=["numbers", "dicts"])
def test_long_lists_of_few_different_items_take_bounded_effort(make: Callable[[int], Any]) -> None:
    """They are the worst case of the usual ways to align, whose time grows with the square of the length or more."""
    old = {"l": [make(n % 2) for n in range(20_000)]}
    new = {"l": [make(2), *(make(n * n // 7 % 2) for n in range(20_000)), make(2)]}

    assert diff(old, new).apply(old) == new
