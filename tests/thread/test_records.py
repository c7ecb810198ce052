"""Records: one seal over every column, and the rules by which interrupts, effects and sessions change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import Corrupted
from backstay.operations import interrupts, ledger, sessions
from backstay.operations.interrupts import InterruptRow
from backstay.operations.ledger import DONE, FAILED, INTENDED, RESULT, EffectRow
from backstay.operations.records import seal
from backstay.operations.sessions import SessionRow
from backstay.store.leases import BranchKey
from backstay.store.memory import MemoryStore
from backstay.store.records import Fence, Record
from backstay.testing.drafts import put

BRANCH = BranchKey("", "t", "", "main")
EFFECT = EffectRow(Record("effect", BRANCH, "charge", b"", True), 1, "me", b"request", 5)
INTERRUPT = InterruptRow(Record("interrupt", BRANCH, "ask", b"", True, "c1"), b"question", 5)
SESSION = SessionRow(Record("session", BRANCH, "run", b"", True), "me", "process", "note", 1, 1)
READ: dict[str, Callable[[Record], Any]] = {
    "effect": ledger.row_of,
    "interrupt": interrupts.row_of,
    "session": sessions.row_of,
}
every_kind = pytest.mark.parametrize("row", [EFFECT, INTERRUPT, SESSION], ids=lambda row: row.stored.kind)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    put(store, BRANCH, {"n": 1}, "c1")
    return store


# The seal ---------------------------------------------------------------------------------------------------------


@every_kind
def test_no_bit_of_a_record_can_change_unseen(store: MemoryStore, row: Any) -> None:
    stored = store.put_record(row.sealed())
    read, body = READ[stored.kind], stored.body
    assert read(stored) == replace(row, stored=stored)
    changes: list[dict[str, Any]] = [{"branch": BRANCH._replace(**{part: "else"})} for part in BRANCH._fields]
    changes += [{"key": "else"}, {"checkpoint": "else"}, {"checkpoint": "" if stored.checkpoint is None else None}]
    changes += [{"version": 0}, {"version": 2}, {"open": False}, {"body": b""}, {"body": body + b"x"}]
    changes += [
        {"body": body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :]}
        for at in range(len(body))
        for bit in range(8)
    ]
    for change in changes:
        with pytest.raises(Corrupted, match="does not match its digest"):
            read(replace(stored, **change))


@every_kind
def test_a_sealed_list_of_another_form_is_damage(store: MemoryStore, row: Any) -> None:
    sealed = row.sealed()
    for fields in ([], [1], [None] * 8, ["text"] * 7, [b""] * 8):
        forged = replace(seal(sealed, True, fields), version=1)

        with pytest.raises(Corrupted, match=r"form|does not"):
            READ[sealed.kind](forged)


def test_an_older_version_of_a_record_is_not_taken_for_the_newest(store: MemoryStore) -> None:
    first = store.put_record(SESSION.sealed())
    second = store.put_record(replace(sessions.row_of(first), seen_us=9).sealed())

    with pytest.raises(Corrupted):
        sessions.row_of(replace(second, body=first.body))


# The rules --------------------------------------------------------------------------------------------------------


def test_the_first_decision_counts() -> None:
    decided = interrupts.decided(INTERRUPT, b"yes", "ann", 7)

    assert (decided.decision, decided.decided_by, decided.decided_us) == (b"yes", "ann", 7)
    assert interrupts.decided(decided, b"no", "bob", 8) is decided


def test_a_decision_is_consumed_once_unless_its_consumer_was_fenced_out() -> None:
    assert interrupts.consumed(INTERRUPT, "worker", 1, 9) is INTERRUPT, "there is no decision yet"
    decided = interrupts.decided(INTERRUPT, b"", "ann", 7)
    first = interrupts.consumed(decided, "worker", 3, 9)
    for epoch in (3, 2, 0):
        assert interrupts.consumed(first, "another", epoch, 10) is first
    second = interrupts.consumed(first, "another", 4, 11)

    assert first == replace(decided, consumer="worker", consumer_epoch=3, consumed_us=9)
    assert second == replace(decided, consumer="another", consumer_epoch=4, consumed_us=11)


def test_a_receipt_ends_an_intent_once() -> None:
    done = ledger.ended(EFFECT, DONE, RESULT + b"1", 7)

    assert done == replace(EFFECT, status=DONE, payload=RESULT + b"1", ended_us=7)
    assert ledger.ended(done, FAILED, b"e", 8, "ann") is done


def test_the_next_attempt_follows_the_version_it_was_made_for(store: MemoryStore) -> None:
    first = ledger.row_of(store.put_record(EFFECT.sealed(), fence=Fence()))
    second = ledger.intent_of(BRANCH, "charge", "you", b"", 9, first)
    third = ledger.intent_of(BRANCH, "charge", "third", b"", 9, first)
    begun = ledger.row_of(store.put_record(second.sealed(), fence=Fence()))

    assert (begun.attempt, begun.owner, begun.status) == (2, "you", INTENDED)
    assert ledger.row_of(store.put_record(third.sealed(), fence=Fence())) == begun, "somebody was faster"
    late = ledger.ended(first, DONE, RESULT, 10)
    assert ledger.row_of(store.put_record(late.sealed())) == begun, "the receipt of an attempt that is over"


def test_a_rule_is_applied_again_to_what_others_made_of_a_record_meanwhile(store: MemoryStore) -> None:
    asked = interrupts.add(store, INTERRUPT)
    decided = interrupts.put(store, asked, lambda row: interrupts.decided(row, b"yes", "ann", 7))
    interrupts.put(store, decided, lambda row: interrupts.consumed(row, "dead worker", 1, 8))
    taken = interrupts.put(store, decided, lambda row: interrupts.consumed(row, "worker", 2, 9))

    assert (taken.consumer, taken.stored.version) == ("worker", 4)


def test_the_first_reason_stays_and_a_beat_comes_too_late(store: MemoryStore) -> None:
    begun = sessions.row_of(store.put_record(SESSION.sealed(), 1000))
    sessions.end_session(store, begun, 9, "done")
    sessions.end_session(store, begun, 10, "crashed")
    (ended,) = store.records("session", "", None, False, 0, 10)

    assert sessions.row_of(ended) == replace(SESSION, stored=ended, ended_us=9, reason="done")
    assert not sessions.end_session_by_id(store, "", "run", 11, "again")
    assert not sessions.row_of(store.put_record(replace(begun, seen_us=12).sealed(), 1000)).stored.open
