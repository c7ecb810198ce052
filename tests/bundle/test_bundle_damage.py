"""Bundles that are not as they were written: every cut, every changed byte, and files made to do harm."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import ormsgpack
import pytest

import backstay
from backstay.bundle import check_bundle, export_bundle, import_bundle, records
from backstay.bundle.blocks import BLOCK_BYTES, MAGIC, BlockWriter
from backstay.bundle.blocks import _head as block_head
from backstay.bundle.records import CheckpointRecord, Edit
from backstay.bundle.state import entries_of, whole
from backstay.codec import compress, encode
from backstay.codec.msgpack import VALUE_BYTES_MAX
from backstay.errors import BackstayError, Corrupted, StoreRefused
from backstay.model.checkpoint import CheckpointMeta, unchecked
from backstay.model.decision import QUESTION_BYTES_MAX, Decision, DecisionKind, Interrupt, InterruptKind
from backstay.operations.interrupts import InterruptRow
from backstay.operations.ledger import intent_of
from backstay.operations.rows import NO_PARENT, checkpoint_digest, checksum, from_microseconds
from backstay.pieces.manifest import root_digest
from backstay.store.base import BranchKey
from backstay.store.records import Record
from support.running import Show


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        thread.save({"messages": ["one"], "n": 1}, tags=["x"])
        thread.append({"messages": ["two"]})
        thread.decide(thread.interrupt(thread.latest() or "", prompt="?"), "approve", by="me")
        thread.effect("mail", lambda: 1)
        export_bundle(store, tmp_path / "small.bundle")
    return tmp_path / "small.bundle"


def problem(path: Path) -> str | None:
    try:
        check_bundle(path)
    except (Corrupted, StoreRefused) as error:
        return type(error).__name__
    return None


def test_every_truncation_and_every_changed_byte_is_found(bundle: Path, tmp_path: Path, show: Show) -> None:
    good = bundle.read_bytes()
    bad = tmp_path / "bad.bundle"
    missed = []
    tried = 0
    for length in range(len(good)):
        bad.write_bytes(good[:length])
        tried += 1
        if problem(bad) is None:
            missed.append(("cut", length))
    for place in range(len(good)):
        for flip in (0x01, 0xFF):
            bad.write_bytes(good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :])
            tried += 1
            if problem(bad) is None:
                missed.append(("flip", place))
    show("bundles cut or changed", f"{tried}, all found")

    assert missed == []
    assert problem(bundle) is None


def test_what_follows_the_end_is_found(bundle: Path) -> None:
    bundle.write_bytes(bundle.read_bytes() + b"\0")

    with pytest.raises(Corrupted, match="more bytes after its end"):
        check_bundle(bundle)


def test_a_damaged_bundle_adds_no_damaged_checkpoint(bundle: Path, tmp_path: Path) -> None:
    """With a file cut anywhere an import stores whole checkpoints or none, and raises."""
    good = bundle.read_bytes()
    bad = tmp_path / "bad.bundle"
    for length in range(0, len(good), 37):
        bad.write_bytes(good[:length])
        with backstay.open("memory:") as store:
            with pytest.raises((Corrupted, StoreRefused)):
                import_bundle(bad, store)
            assert store.check()


def test_another_version_and_another_file_are_refused(bundle: Path, tmp_path: Path) -> None:
    newer = bundle.read_bytes()
    bundle.write_bytes(newer[: len(MAGIC)] + struct.pack(">H", 2) + newer[len(MAGIC) + 2 :])
    (tmp_path / "text").write_text("not a bundle", encoding="utf-8")

    with pytest.raises(StoreRefused, match="version 2"):
        check_bundle(bundle)
    with pytest.raises(StoreRefused, match="not a Backstay bundle"):
        check_bundle(tmp_path / "text")


# Made to do harm --------------------------------------------------------------------------------------------------


def forged(path: Path, *made: tuple[int, bytes]) -> Path:
    """Write a bundle of any records, with all its checksums and counts right."""
    counted = (records.THREAD, records.CHECKPOINT, records.INTERRUPT, records.EFFECT, records.DAMAGE)
    counts = [sum(kind == each for kind, _ in made) for each in counted]
    with path.open("wb") as file:
        writer = BlockWriter(file)
        writer.add(records.HEADER, records.pack_names(""))
        for kind, data in made:
            writer.add(kind, data)
        writer.finish(records.pack_numbers(*counts))
    return path


THREAD = (records.THREAD, records.pack_names("t"))
BRANCH = (records.BRANCH, records.pack_branch(BranchKey("", "t", "", "main"), None))


def record(data: bytes = b"\x01", kind: str = "v", **fields: Any) -> CheckpointRecord:
    """Return a checkpoint of one value whose digest is right."""
    value = whole(kind, 0, data)
    name = fields.pop("id", "cp")
    step, notes = fields.pop("step", 1), fields.pop("notes", b"")
    values: dict[str, Any] = {"id": name, "thread_id": "t", "branch": "main", "step": step}
    meta = unchecked(CheckpointMeta, {**values, "created_at": from_microseconds(0)})
    digest = checkpoint_digest(NO_PARENT, root_digest(entries_of({"k": value})), ["k"], meta, 0, notes)
    notes += checksum(notes, name, None, step, fields.get("created_us", 0), digest, len(data))
    made = CheckpointRecord(
        0, name, False, None, None, None, step, 0, digest, notes, (), None, [], [Edit("k", kind, 0, 0, 0, len(data))]
    )
    for key, changed in fields.items():
        setattr(made, key, changed)
    return made


def with_checkpoint(made: CheckpointRecord, data: bytes = b"\x01") -> tuple[tuple[int, bytes], ...]:
    return (THREAD, BRANCH, (records.CHECKPOINT, made.pack()), (records.VALUE_BYTES, data))


def question(payload: object = None) -> bytes:
    return encode(Interrupt(id="q", kind=InterruptKind.TOOL_APPROVAL, payload=payload).to_plain())


LARGE = "x" * QUESTION_BYTES_MAX
DECISION = encode(Decision(kind=DecisionKind.APPROVE).to_plain())
LARGE_DECISION = encode(Decision(kind=DecisionKind.MODIFY, value=LARGE).to_plain())
DECIDED: dict[str, Any] = {"decision": DECISION, "decided_by": "ann", "decided_us": 1}
CONSUMED: dict[str, Any] = {**DECIDED, "consumer": "worker", "consumer_epoch": 7, "consumed_us": 2}


def with_interrupt(**fields: Any) -> tuple[tuple[int, bytes], ...]:
    """Return a checkpoint and an interrupt of it whose seal is right."""
    row = InterruptRow(Record("interrupt", BranchKey("", "t", "", "main"), "q", b"", True, "cp"), question(), 0)
    return *with_checkpoint(record()), (records.INTERRUPT, records.pack_record(replace(row, **fields).sealed()))


def with_effect(**fields: Any) -> tuple[tuple[int, bytes], ...]:
    """Return an effect whose seal is right."""
    row = intent_of(BranchKey("", "t", "", "main"), "mail", "owner", b"", 0)
    return THREAD, (records.EFFECT, records.pack_record(replace(row, **fields).sealed()))


@pytest.mark.parametrize(
    "made",
    [
        with_checkpoint(record()),
        with_interrupt(),
        with_interrupt(**DECIDED),
        with_interrupt(**CONSUMED),
        with_effect(),
        with_effect(status="done", payload=b"nno", ended_us=1),
        with_effect(status="failed", payload=b"eno", ended_us=1, settled_by="ann"),
    ],
)
def test_a_forged_bundle_with_right_digests_is_just_a_bundle(made: Any, tmp_path: Path) -> None:
    path = forged(tmp_path / "x", *made)
    with backstay.open("memory:") as store:
        assert check_bundle(path)
        assert import_bundle(path, store)
        assert store.check()


def test_the_epoch_of_a_consumer_is_not_taken_over(tmp_path: Path) -> None:
    """Else nobody in this store could ever take the decision over from a worker that died."""
    path = forged(tmp_path / "x", *with_interrupt(**CONSUMED))
    with backstay.open("memory:") as store:
        import_bundle(path, store)
        (shown,) = store.interrupts(pending=False)
        thread = store.thread("t")
        thread.latest()
        with thread.lease():
            assert thread.consume(shown).kind is DecisionKind.APPROVE


@pytest.mark.parametrize(
    "made",
    [
        pytest.param((THREAD, (records.CHECKPOINT, record().pack())), id="a checkpoint without a branch"),
        pytest.param((BRANCH,), id="a branch without a thread"),
        pytest.param((THREAD, BRANCH, BRANCH), id="a branch without a checkpoint"),
        pytest.param((*with_checkpoint(record()), BRANCH), id="a branch twice"),
        pytest.param((THREAD, (ord("?"), b"")), id="an unknown record"),
        pytest.param((THREAD, (records.EFFECT, b"\xdd\xff\xff\xff\xff")), id="a list that claims four billion"),
        pytest.param((THREAD, (records.EFFECT, b"\x91" * 5000)), id="five thousand lists in each other"),
        pytest.param(((records.THREAD, records.pack_names("")),), id="a thread without a name"),
        pytest.param(((records.THREAD, records.pack_names("a\0b")),), id="a thread with a NUL in its name"),
        pytest.param(((records.THREAD, records.pack_names("x" * 300)),), id="a thread with a name too long"),
        pytest.param(with_checkpoint(record(base=7)), id="a base that is not there"),
        pytest.param(with_checkpoint(record(base=0)), id="itself for a base"),
        pytest.param(with_checkpoint(record(follows=True)), id="follows nothing"),
        pytest.param(with_checkpoint(record(branch=9)), id="of no branch"),
        pytest.param(with_checkpoint(record(id="")), id="an empty id"),
        pytest.param(with_checkpoint(record(step=-1)), id="a negative step"),
        pytest.param(with_checkpoint(record(step=2**60)), id="a huge step"),
        pytest.param(with_checkpoint(record(created_us=2**62)), id="a year that is none"),
        pytest.param(with_checkpoint(record(tags=("",))), id="an empty tag"),
        pytest.param(with_checkpoint(record(digest=b"short")), id="a short digest"),
        pytest.param(with_checkpoint(record(digest=bytes(32))), id="another digest"),
        pytest.param(with_checkpoint(record(notes=b"\xc1")), id="notes that are no notes"),
        pytest.param(with_checkpoint(record(notes=ormsgpack.packb({"r": 7}))), id="notes of the wrong type"),
        pytest.param(with_checkpoint(record(notes=ormsgpack.packb([1]))), id="notes that are a list"),
        pytest.param(with_checkpoint(record(removed=["x"])), id="removes what is not there"),
        pytest.param(with_checkpoint(record(order=["x"])), id="orders what is not there"),
        pytest.param(with_checkpoint(record(kind="?")), id="a kind that is none"),
        pytest.param(with_checkpoint(record(edits=[Edit("k", "v", 0, 5, 0, 1)])), id="more of the base than there is"),
        pytest.param(with_checkpoint(record(edits=[Edit("k", "v", 0, 0, 0, 9)])), id="fewer bytes than said"),
        pytest.param(with_checkpoint(record(edits=[Edit("k", "v", 0, 0, 0, 1)] * 2)), id="a key twice"),
        pytest.param(with_checkpoint(record(edits=[Edit(5, "v", 0, 0, 0, 1)])), id="a key of ours that is none"),
        pytest.param(with_checkpoint(record(writes=3)), id="writes that do not come"),
        pytest.param(with_interrupt(decision=DECISION), id="a decision by nobody"),
        pytest.param(with_interrupt(decided_by="ann"), id="somebody without a decision"),
        pytest.param(with_interrupt(**{**DECIDED, "decision": b"\xc1"}), id="a decision that is none"),
        pytest.param(with_interrupt(consumer="worker", consumed_us=1), id="consumed without a decision"),
        pytest.param(with_interrupt(**DECIDED, consumer="worker"), id="consumed at no time"),
        pytest.param(with_interrupt(question=b"\xc1"), id="a question that is none"),
        pytest.param(with_interrupt(question=question(LARGE)), id="a question larger than any can be"),
        pytest.param(with_interrupt(**{**DECIDED, "decision": LARGE_DECISION}), id="a decision larger than any can be"),
        pytest.param(with_effect(status="else"), id="a status that is none"),
        pytest.param(with_effect(attempt=0), id="an attempt before the first"),
        pytest.param(with_effect(ended_us=1), id="an intent that has ended"),
        pytest.param(with_effect(settled_by="ann"), id="an intent that somebody settled"),
        pytest.param(with_effect(payload=b"r"), id="an intent with a receipt"),
        pytest.param(with_effect(status="done", payload=b"nno"), id="done at no time"),
        pytest.param(with_effect(status="done", payload=b"eno", ended_us=1), id="the receipt of another status"),
    ],
)
def test_a_forged_bundle_is_refused_and_nothing_of_it_is_stored(made: Any, tmp_path: Path) -> None:
    path = forged(tmp_path / "forged", *made)
    with backstay.open("memory:") as store:
        with pytest.raises(Corrupted):
            check_bundle(path)
        with pytest.raises(Corrupted):
            import_bundle(path, store)
        assert all(store.get(meta.id) is not None for meta in store.threads())
        assert store.check()


def test_a_block_that_holds_more_than_it_says_is_not_unpacked(tmp_path: Path) -> None:
    bomb = compress(bytes(64 * 1024 * 1024))
    path = tmp_path / "bomb"
    path.write_bytes(MAGIC + struct.pack(">H", 1) + block_head(BLOCK_BYTES, bomb) + bomb)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupted):
            check_bundle(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(bomb) < 8_000
    assert peak < 2 * 1024 * 1024


def test_states_and_values_larger_than_any_are_refused_before_their_bytes_are_read(tmp_path: Path) -> None:
    """The bytes never come, and yet that is not what is complained of."""
    keys = [Edit(f"k{n}", "v", 0, 0, 0, VALUE_BYTES_MAX) for n in range(9)]
    for edits, said in ((keys, "more keys or bytes"), ([replace(keys[0], length=VALUE_BYTES_MAX + 1)], "larger")):
        path = forged(tmp_path / "large", THREAD, BRANCH, (records.CHECKPOINT, record(edits=edits).pack()))
        with pytest.raises(Corrupted, match=said):
            check_bundle(path)


def test_reading_and_importing_runs_nothing_that_a_bundle_names(bundle: Path) -> None:
    wanted = ("import", "exec", "compile", "subprocess", "os.system", "pickle", "ctypes")
    seen: list[str] = []
    watching = [True]

    def watch(event: str, _: tuple[Any, ...]) -> None:
        if watching[0] and event.startswith(wanted):
            seen.append(event)

    with backstay.open("memory:") as store:
        check_bundle(bundle)  # whatever is loaded on first use is loaded now
        sys.addaudithook(watch)
        try:
            import_bundle(bundle, store)
        finally:
            watching[0] = False

    assert seen == []


def test_errors_show_no_values(bundle: Path, tmp_path: Path) -> None:
    secret = b"\xa6secret"
    made = with_checkpoint(record(secret, digest=bytes(32)), secret)
    with pytest.raises(BackstayError) as raised:
        check_bundle(forged(tmp_path / "x", *made))

    assert "secret" not in str(raised.value)
