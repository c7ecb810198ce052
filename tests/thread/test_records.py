"""Records: one seal over every column, and the rules by which interrupts, effects and runs change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import Corrupted
from backstay.model.runs import RunStatus
from backstay.operations import interrupts, ledger, run_records
from backstay.operations.interrupts import InterruptRow
from backstay.operations.ledger import DONE, FAILED, INTENDED, RESULT, EffectRow
from backstay.operations.records import seal
from backstay.operations.run_records import ABANDONED, GRAPH, LOOP, RunOutcome, RunRow
from backstay.store.leases import BranchKey
from backstay.store.memory import MemoryStore
from backstay.store.records import Fence, Record
from backstay.testing.drafts import put

BRANCH = BranchKey("", "t", "", "main")
EFFECT = EffectRow(Record("effect", BRANCH, "charge", b"", True), 1, "me", b"request", 5)
INTERRUPT = InterruptRow(Record("interrupt", BRANCH, "ask", b"", True, "c1"), b"question", 5)
RUN = RunRow(Record("run", BRANCH, "run", b"", True), GRAPH, "g", "1", waits=("ask",), note="note", created_us=1)
READ: dict[str, Callable[[Record], Any]] = {
    "effect": ledger.row_of,
    "interrupt": interrupts.row_of,
    "run": run_records.row_of,
}
every_kind = pytest.mark.parametrize("row", [EFFECT, INTERRUPT, RUN], ids=lambda row: row.stored.kind)


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
        forged = replace(seal(sealed, True, fields, sealed.run), version=1)

        with pytest.raises(Corrupted, match=r"form|does not"):
            READ[sealed.kind](forged)


def test_an_older_version_of_a_record_is_not_taken_for_the_newest(store: MemoryStore) -> None:
    first = store.put_record(RUN.sealed())
    second = store.put_record(replace(run_records.row_of(first), news=9).sealed())

    with pytest.raises(Corrupted):
        run_records.row_of(replace(second, body=first.body))


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


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"status": "failed"}, {"graph": "h"}, {"fingerprint": "2"}, {"due_us": 7}])
def test_what_lists_and_claims_read_of_a_run_cannot_differ_from_its_body(
    store: MemoryStore, change: dict[str, Any]
) -> None:
    stored = store.put_record(RUN.sealed())
    assert stored.run is not None
    with pytest.raises(Corrupted):
        run_records.row_of(replace(stored, run=stored.run._replace(**change)))
    with pytest.raises(Corrupted):
        run_records.row_of(replace(stored, run=None))


@pytest.mark.parametrize("waits", [0, 1, 2000])
def test_a_run_with_a_large_input_may_wait_for_many_answers(store: MemoryStore, waits: int) -> None:
    row = replace(RUN, input=b"x" * 100_000, waits=tuple(f"interrupt-{number:026}" for number in range(waits)))
    stored = store.put_record(row.sealed())

    assert run_records.row_of(stored) == replace(row, stored=stored)


def test_a_large_record_of_many_small_items_is_damage(store: MemoryStore) -> None:
    sealed = RUN.sealed()
    forged = replace(seal(sealed, True, [[]] * 100_000, sealed.run), version=1)

    with pytest.raises(Corrupted, match="cannot be read"):
        run_records.row_of(forged)


def test_a_run_that_starts_counts_the_attempt_and_forgets_what_it_waited_for() -> None:
    started = run_records.started(replace(RUN, wake_us=9, due_us=9), "token", "holder", 5)

    assert (started.status, started.attempts, started.token, started.holder) == ("running", 1, "token", "holder")
    assert (started.waits, started.wake_us, started.due_us) == ((), None, None)
    assert (started.started_us, started.updated_us, started.failures) == (5, 5, 0)
    again = run_records.started(started, "token 2", "holder 2", 8)
    assert (again.started_us, again.attempts, again.failures) == (5, 2, 1), "its process died"


def test_failures_count_only_while_no_step_is_made() -> None:
    first = run_records.started(RUN, "t", "h", 1)
    row = run_records.with_step(run_records.started(first, "t", "h", 2), first, 3)
    assert (row.failures, row.failed_step) == (1, 3)
    second = run_records.with_step(run_records.started(row, "t", "h", 3), row, 3)
    assert second.failures == 2
    third = run_records.with_step(run_records.started(second, "t", "h", 4), second, 4)
    assert (third.failures, third.failed_step) == (1, 4)


@pytest.mark.parametrize(
    ("outcome", "due_us", "ended_us"),
    [
        (ABANDONED, 9, None),
        (RunOutcome(RunStatus.INTERRUPTED, waits=("ask",)), None, None),
        (RunOutcome(RunStatus.INTERRUPTED, wake_us=50), 50, None),
        (RunOutcome(RunStatus.SLEEPING, wake_us=50), 50, None),
        (RunOutcome(RunStatus.COMPLETED), None, 9),
        (RunOutcome(RunStatus.CANCELLED), None, 9),
        (RunOutcome(RunStatus.FAILED, error="ValueError"), None, 9),
    ],
    ids=lambda value: value.status.value if isinstance(value, RunOutcome) else None,
)
def test_when_a_run_may_be_claimed_depends_on_how_it_ended(
    outcome: RunOutcome, due_us: int | None, ended_us: int | None
) -> None:
    running = run_records.started(replace(RUN, input=b"input"), "t", "h", 1)
    ended = run_records.ended(running, outcome, 9, 0, None)

    assert (ended.status, ended.due_us, ended.ended_us, ended.token) == (outcome.status, due_us, ended_us, "")
    is_over = outcome.status in (RunStatus.COMPLETED, RunStatus.CANCELLED)
    assert ended.input == (None if is_over else b"input"), "a failed run may be tried again"
    assert (ended.error, ended.waits, ended.wake_us) == (outcome.error, outcome.waits, outcome.wake_us)
    of_loop = run_records.ended(replace(running, kind=LOOP), outcome, 9, 0, None)
    assert of_loop.due_us is None, "no worker can continue a loop"


def test_an_answer_that_came_while_it_ran_makes_a_run_due_at_once() -> None:
    running = run_records.started(RUN, "t", "h", 1)
    answered = run_records.answered(running, 5)
    waiting = run_records.ended(answered, RunOutcome(RunStatus.INTERRUPTED), 9, 0, None)
    assert (answered.due_us, waiting.due_us) == (None, 9)
    known = run_records.ended(answered, RunOutcome(RunStatus.INTERRUPTED), 9, 1, None)
    assert known.due_us is None
    assert run_records.answered(known, 12).due_us == 12


def test_a_failing_run_is_tried_again_later_and_later_and_then_has_failed() -> None:
    failed = RunOutcome(RunStatus.FAILED, error="ValueError")
    row, pauses = RUN, []
    for _ in range(10):
        row = run_records.ended(run_records.started(row, "t", "h", 0), failed, 0, 0, 10)
        pauses.append(row.due_us)

    assert pauses == [*(1_000_000 * 2**n for n in range(9)), None]
    assert (row.status, row.ended_us, row.failures) == (RunStatus.FAILED, 0, 10)


def test_the_key_of_a_run_names_it_in_every_process() -> None:
    name = run_records.id_for_key(BRANCH, "order-7")

    assert name == "7b1c5eb4-5a34-8288-894c-20eed3b8b3b8" == run_records.id_for_key(BRANCH, "order-7")
    others = {run_records.id_for_key(BRANCH._replace(**{part: "else"}), "order-7") for part in BRANCH._fields}
    assert len({name, run_records.id_for_key(BRANCH, "order-8"), *others}) == 6


def test_a_change_is_made_again_if_another_writer_was_faster(store: MemoryStore) -> None:
    row = run_records.row_of(store.put_record(RUN.sealed()))
    run_records.change_run(store, row, lambda row: replace(row, note="faster"))
    changed = run_records.change_run(store, row, lambda row: replace(row, news=row.news + 1))

    assert (changed.note, changed.news, changed.stored.version) == ("faster", 1, 3)
    assert run_records.change_run(store, row, lambda row: None) is row
