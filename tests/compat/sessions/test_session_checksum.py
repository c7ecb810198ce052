"""Checksums: the same for every reader of the layout, and never broken by how a number is printed."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.compat.sessions import CheckpointData, ChecksumUtils, SyncCheckpointWriter
from backstay.compat.sessions.checksum import canonical, number_text, parse, plain, pretty, to_tree
from backstay.errors import Corrupted, DecodeError, EncodeError, StoreRefused

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def old_file(fields: str, checksum: str | None = None, version: str | None = '"1.0"') -> bytes:
    """Return a file as the older writer made it: its own text, its own checksum over its own canonical form."""
    body = "{" + fields + "}"
    digest = hashlib.sha256(body.encode()).hexdigest() if checksum is None else checksum
    envelope = [f'"_checksum": "{digest}"'] + ([] if version is None else [f'"_version": {version}'])
    return ("{" + ", ".join([*envelope, fields]) + "}").encode()


# The rule ---------------------------------------------------------------------------------------------------------


def test_the_checksum_is_sha_256_over_sorted_compact_json() -> None:
    value = {"b": [1, {"z": None, "y": True}], "a": 'é "quoted"\n\x01'}
    text = '{"a":"é \\"quoted\\"\\n\\u0001","b":[1,{"y":true,"z":null}]}'

    computed = ChecksumUtils.compute_checksum(value)

    assert computed == hashlib.sha256(text.encode()).hexdigest()
    assert len(computed) == 64
    assert computed == ChecksumUtils.compute_checksum({"a": value["a"], "b": [1, {"y": True, "z": None}]})
    assert ChecksumUtils.compute_checksum({"a": 1}) != ChecksumUtils.compute_checksum({"a": 2})


def test_checksum_and_version_are_added_and_left_out_of_themselves() -> None:
    once = ChecksumUtils.add_checksum({"session_id": "s"})

    checksum = ChecksumUtils.compute_checksum({"session_id": "s"})
    assert once == {"session_id": "s", "_checksum": checksum, "_version": "1.0"}
    assert ChecksumUtils.add_checksum({**once, "_checksum": "old", "_version": "0.1"}) == once
    assert ChecksumUtils.remove_checksum(once) == {"session_id": "s"}
    assert ChecksumUtils.verify_checksum(once) == (True, None)


def test_a_verdict_comes_with_its_reason() -> None:
    good = ChecksumUtils.add_checksum({"a": 1})
    actual = good["_checksum"]

    assert ChecksumUtils.verify_checksum([good]) == (False, "it is not an object")
    assert ChecksumUtils.verify_checksum({"a": 1, "_version": "1.0"}) == (False, "it has no _checksum")
    assert ChecksumUtils.verify_checksum({"a": 1, "_checksum": actual}) == (False, "it has no _version")
    assert ChecksumUtils.verify_checksum({**good, "_version": "9.9"}) == (False, "its _version is '9.9', not '1.0'")
    assert ChecksumUtils.verify_checksum({**good, "_checksum": 7}) == (False, "its _checksum is not text")
    intact, reason = ChecksumUtils.verify_checksum({**good, "_checksum": "0" * 64})
    assert not intact
    assert reason is not None
    assert "0" * 16 + "…" in reason
    assert f"{actual[:16]}…" in reason


def test_what_has_no_canonical_form_has_no_checksum() -> None:
    for value in (math.nan, {"a": {1}}, "\ud800"):
        with pytest.raises(EncodeError):
            ChecksumUtils.compute_checksum(value)


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (0.1, "0.1"),
        (100.0, "100.0"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e+16"),
        (1.5e16, "1.5e+16"),
        (123456789012345680.0, "1.2345678901234568e+17"),
        (9007199254740993.0, "9007199254740992.0"),
        (0.00001, "0.00001"),
        (0.000012, "0.000012"),
        (0.000001, "1e-6"),
        (1e-7, "1e-7"),
        (1.25e-7, "1.25e-7"),
        (5e-324, "5e-324"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (-2.5e-9, "-2.5e-9"),
        (130.65331632653061, "130.65331632653061"),
        (7, "7"),
        (2**64 - 1, "18446744073709551615"),
    ],
)
def test_numbers_are_printed_as_the_first_reader_of_the_layout_prints_them(number: float, text: str) -> None:
    assert number_text(number) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_printed_float_is_that_float(number: float) -> None:
    assert struct.pack("d", float(number_text(number))) == struct.pack("d", number)


@given(JSON)
def test_what_is_printed_reads_back_equal_and_has_the_same_checksum(value: Any) -> None:
    tree = to_tree(value, "value")
    again = parse(pretty(tree).encode())

    assert again == tree
    assert json.dumps(plain(again), sort_keys=True) == json.dumps(value, sort_keys=True)
    assert ChecksumUtils.compute_checksum(again) == ChecksumUtils.compute_checksum(value)
    assert parse(canonical(tree).encode()) == tree


@pytest.mark.parametrize("number", ["130.65331632653061", "1e-7", "1e-07", "1E+16", "1e16", "0.10", "-0", "1.0e2"])
def test_a_number_counts_as_it_stands_in_the_file(tmp_path: Path, number: str) -> None:
    """Whoever wrote the file printed it so: no other print of the same number may make it look damaged."""
    path = tmp_path / "cp.json"
    path.write_bytes(old_file(f'"cost_estimate":{number},"x":[{number}]'))

    assert SyncCheckpointWriter(tmp_path).verify(path)
    path.write_bytes(path.read_bytes().replace(b"[", b"[1"))
    assert not SyncCheckpointWriter(tmp_path).verify(path)


def test_floats_that_some_parsers_get_wrong_come_back_exactly(tmp_path: Path) -> None:
    numbers = [130.65331632653061, 0.1 + 0.2, 1e-7, 1e16, 5e-324, 1.7976931348623157e308, 2.2250738585072014e-308]
    data = CheckpointData(cost_estimate=130.65331632653061, tool_results=numbers)
    writer = SyncCheckpointWriter(tmp_path)

    writer.save(data)
    loaded = writer.load(data.session_id, data.checkpoint_id)

    assert loaded is not None
    assert [number.hex() for number in loaded.tool_results] == [number.hex() for number in numbers]
    assert loaded.cost_estimate.hex() == data.cost_estimate.hex()


# What is no record ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": 1, "a": 2}', "a duplicate key"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 200 + b"]" * 200, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_a_reason(content: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        parse(content)


def test_numbers_beyond_all_bounds_do_no_harm() -> None:
    with pytest.raises(DecodeError, match="too large"):
        plain(parse(b"[1e999]"))
    with pytest.raises(DecodeError, match="too large"):
        plain(parse(b"[" + b"9" * 10_000 + b"]"))
    assert plain(parse(b"[" + b"9" * 300 + b"]")) == [10**300 - 1]  # exactly, not as the nearest float


def test_another_version_is_said_to_be_one_and_not_damage(tmp_path: Path) -> None:
    writer = SyncCheckpointWriter(tmp_path)
    first, second = CheckpointData(session_id="s"), CheckpointData(session_id="s")
    writer.save(first)
    writer.save(second)
    path = next(path for path in (tmp_path / "s" / "checkpoints").glob(f"cp_*{second.checkpoint_id}.json"))
    path.write_bytes(path.read_bytes().replace(b'"_version": "1.0"', b'"_version": "2.0"'))

    with pytest.raises(StoreRefused, match=r"its _version is '2\.0'") as caught:
        writer.load("s", second.checkpoint_id)

    assert not isinstance(caught.value, Corrupted)
    report = writer.load_report("s")
    assert report.data == first
    assert [skip.what for skip in report.skipped] == [path.name]
    assert "2.0" in report.skipped[0].why
