"""Interrupts: a question is asked, decided once by somebody who saw it, and carried out once."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import EncodeError, IdTaken, InvalidInput
from backstay.model.decision import Decision, DecisionKind, Interrupt, InterruptKind
from backstay.operations.interrupts import InterruptRecord, record_of
from backstay.operations.records import PAGE_ROWS, find_by_id
from backstay.thread.access import access_of
from support.waiting import expire, taken_over

PAYLOAD = {"tool": "rm", "args": ("-r", b"/tmp/x"), "when": datetime(2026, 1, 1, tzinfo=UTC), "n": {1, 2, 3}}


@pytest.fixture
def checkpoint(thread: backstay.Thread) -> backstay.Checkpoint:
    return thread.save({"plan": "delete"}, next_node="tool")


@pytest.fixture
def asked(thread: backstay.Thread, checkpoint: backstay.Checkpoint) -> InterruptRecord:
    return thread.interrupt(checkpoint, kind="toolapproval", node="tool", payload=PAYLOAD, prompt="Really?")


def stored(store: backstay.Store, name: str) -> InterruptRecord:
    row = find_by_id(access_of(store).store, "interrupt", "", name)
    assert row is not None
    return record_of(row)


# Asking -----------------------------------------------------------------------------------------------------------


def test_a_question_is_kept_exactly(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint, asked: InterruptRecord, clock: Any
) -> None:
    expected = Interrupt(id=asked.id, kind=InterruptKind.TOOL_APPROVAL, node="tool", payload=PAYLOAD, prompt="Really?")

    assert asked.interrupt == expected
    assert (asked.thread_id, asked.branch, asked.scope, asked.checkpoint_id) == (thread.id, "main", "", checkpoint.id)
    assert (asked.created_at, asked.decision, asked.consumer, asked.pending) == (clock(), None, None, True)
    assert len(asked.digest) == 32
    assert list(thread.interrupts()) == list(store.interrupts()) == [asked]
    assert pickle.loads(pickle.dumps(asked)) == asked
    for shown in (repr(asked), str(asked)):
        assert all(part in shown for part in ("toolapproval", asked.id, thread.id, "Really?", "'rm'"))
    assert "rm" not in asked.headline
    assert "Really?" not in asked.headline


def test_a_record_shows_only_the_start_of_a_long_payload(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    asked = thread.interrupt(checkpoint, payload=["x" * 10_000], prompt="y" * 10_000)

    assert 400 < len(str(asked)) < 700
    assert str(asked).count("…") == 2


def test_the_same_question_again_is_the_same_and_another_under_its_name_is_refused(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, clock: Any
) -> None:
    first = thread.interrupt(checkpoint, id="q-1", payload={"n": 1})
    clock.step(seconds=1)
    assert thread.interrupt(checkpoint.id, id="q-1", payload={"n": 1}) == first
    later = thread.save({"plan": "b"})
    others: list[Callable[[], object]] = [
        lambda: thread.interrupt(checkpoint, id="q-1", payload={"n": 2}),
        lambda: thread.interrupt(later, id="q-1", payload={"n": 1}),
    ]
    for call in others:
        with pytest.raises(IdTaken):
            call()

    assert [record.id for record in thread.interrupts()] == ["q-1"]


def test_what_cannot_be_asked_is_refused_and_nothing_is_stored(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    with pytest.raises(EncodeError) as caught:
        thread.interrupt(checkpoint, payload={"deep": [object()]})
    assert caught.value.path == "interrupt.payload.deep[0]"
    elsewhere = store.thread("another").save({"n": 1})
    inner = store.thread(thread.id, scope="inner").save({"n": 1})
    for unknown in ("no such checkpoint", elsewhere, inner):
        with pytest.raises(backstay.NotFound):
            thread.interrupt(unknown)
    wrong: list[dict[str, Any]] = [{"kind": "maybe"}, {"node": ""}, {"prompt": 5}, {"id": ""}, {"id": 5}]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            thread.interrupt(checkpoint, **arguments)

    assert list(store.interrupts(pending=False)) == []


def test_a_question_about_another_branch_of_the_thread_says_which(thread: backstay.Thread) -> None:
    side = thread.fork(thread.save({"n": 1}), branch="side")
    newest = side.latest()
    assert newest is not None

    assert thread.interrupt(newest).branch == "side"


def test_lists_are_paged_in_the_order_of_asking(store: backstay.Store) -> None:
    names = [f"q-{number}" for number in range(2 * PAGE_ROWS + 1)]
    threads = [store.thread("a"), store.thread("b")]
    saved = [thread.save({"n": 1}) for thread in threads]
    for number, name in enumerate(names):
        threads[number % 2].interrupt(saved[number % 2], id=name)

    assert [record.id for record in store.interrupts()] == names
    assert [record.id for record in threads[0].interrupts()] == names[::2]
    assert list(threads[1].interrupts(pending=False)) == list(threads[1].interrupts())
    wrong: Any = 1
    with pytest.raises(InvalidInput):
        store.interrupts(pending=wrong)


# Deciding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "details"),
    [
        ("approve", {}),
        ("approve", {"scope": "all calls of this tool"}),
        ("modify", {"value": {"tool": "ls", "args": ("-l",)}}),
        ("reject", {"reason": "too dangerous"}),
        ("defer", {}),
        ("reroute", {"target": "ask-again", "reason": "unclear"}),
    ],
)
def test_a_decision_comes_back_as_it_was_made(
    store: backstay.Store, thread: backstay.Thread, asked: InterruptRecord, decision: str, details: Any, clock: Any
) -> None:
    """A rejection can be told from an approval, and both from no decision."""
    clock.step(seconds=5)
    decided = thread.decide(asked, decision, by="ann", **details)
    expected = Decision(kind=DecisionKind(decision), **details)

    assert decided.decision == expected
    assert (decided.decided_by, decided.decided_at, decided.pending) == ("ann", clock(), True)
    assert replace(decided, decision=None, decided_by=None, decided_at=None) == asked
    assert stored(store, asked.id) == decided
    assert thread.consume(asked, by="worker") == expected
    assert list(thread.interrupts()) == []
    (consumed,) = thread.interrupts(pending=False)
    assert (consumed.consumer, consumed.consumed_at, consumed.pending) == ("worker", clock(), False)


def test_a_decision_may_be_given_whole(thread: backstay.Thread, asked: InterruptRecord) -> None:
    decision = Decision(kind=DecisionKind.MODIFY, value=[1, 2])
    with pytest.raises(InvalidInput, match="already has its details"):
        thread.decide(asked, decision, by="ann", value=[3])

    assert thread.decide(asked, decision, by="ann").decision == decision


@pytest.mark.parametrize(
    ("decision", "details"),
    [
        ("yes", {}),
        ("modify", {}),
        ("reroute", {}),
        ("reject", {"value": 1}),
        ("reject", {"scope": "all"}),
        ("approve", {"target": "x"}),
        ("modify", {"value": object()}),
        ("approve", {"by": ""}),
        ("approve", {"by": None}),
    ],
)
def test_what_is_no_decision_is_refused_and_nothing_is_stored(
    store: backstay.Store, thread: backstay.Thread, asked: InterruptRecord, decision: str, details: Any
) -> None:
    with pytest.raises(InvalidInput):
        thread.decide(asked, decision, **{"by": "ann", **details})

    assert stored(store, asked.id) == asked


def test_the_same_decision_by_the_same_person_again_gives_the_record(
    thread: backstay.Thread, asked: InterruptRecord, clock: Any
) -> None:
    first = thread.decide(asked, "modify", by="ann", value={"n": 1})
    clock.step(seconds=9)

    assert thread.decide(asked, "modify", by="ann", value={"n": 1}) == first
    assert thread.decide(first, "modify", by="ann", value={"n": 1}) == first


@pytest.mark.parametrize("second", [("reject", "ann"), ("approve", "bob"), ("reject", "bob")])
def test_of_two_decisions_the_first_counts_and_the_other_sees_it(
    store: backstay.Store, thread: backstay.Thread, asked: InterruptRecord, second: tuple[str, str]
) -> None:
    first = thread.decide(asked, "approve", by="ann")
    decision, by = second
    with pytest.raises(backstay.Conflict, match=r"approve by 'ann' at 2026-01-01 00:00:00") as caught:
        thread.decide(asked, decision, by=by)

    assert caught.value.winner == first
    assert stored(store, asked.id) == first


def test_eight_approvers_at_once_and_exactly_one_wins(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        asked = thread.interrupt(thread.save({"n": 1}))

        def decide(number: int) -> str:
            decided = store.thread("t").decide(asked, "approve" if number % 2 else "reject", by=f"person-{number}")
            return str(decided.decided_by)

        won, lost = race(8, decide)
        (record,) = thread.interrupts()

        assert won == [record.decided_by]
        assert [error.winner for error in lost] == [record] * 7


def race(count: int, act: Callable[[int], str]) -> tuple[list[str], list[backstay.Conflict]]:
    """Run it in many threads at once; return the answers of those that won, and the conflicts of the others."""
    barrier = threading.Barrier(count)
    won: list[str] = []
    lost: list[backstay.Conflict] = []

    def one(number: int) -> None:
        barrier.wait()
        try:
            won.append(act(number))
        except backstay.Conflict as error:
            lost.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won, lost


# Decisions for something else -------------------------------------------------------------------------------------


def altered(record: InterruptRecord, **changes: Any) -> InterruptRecord:
    return replace(record, interrupt=replace(record.interrupt, **changes))


@pytest.mark.parametrize(
    ("forge", "part"),
    [
        (lambda record, other: replace(record, digest=bytes(32)), "the stored interrupt has another digest"),
        (lambda record, other: replace(record, digest=other.digest), "the stored interrupt has another digest"),
        (
            lambda record, other: replace(record, checkpoint_id=other.checkpoint_id),
            "the stored interrupt has another checkpoint",
        ),
        (lambda record, other: replace(record, branch="side"), "the stored interrupt has another branch"),
        (lambda record, other: replace(record, scope="inner"), "the stored interrupt has another scope"),
        (
            lambda record, other: replace(record, interrupt=other.interrupt),
            "the stored interrupt has another checkpoint",
        ),
        (lambda record, other: altered(record, payload={"tool": "ls"}), "the stored question differs"),
        (lambda record, other: altered(record, prompt="Harmless?"), "the stored question differs"),
        (lambda record, other: altered(record, node="other"), "the stored question differs"),
    ],
)
def test_an_answer_to_something_else_is_refused_and_nothing_is_stored(
    store: backstay.Store, thread: backstay.Thread, asked: InterruptRecord, forge: Any, part: str
) -> None:
    other = thread.interrupt(thread.save({"plan": "b"}), payload=PAYLOAD)
    forged = forge(asked, other)
    for call in (lambda: thread.decide(forged, "approve", by="mallory"), lambda: thread.consume(forged)):
        with pytest.raises(InvalidInput, match=f"the record that was shown: {part}"):
            call()

    assert [stored(store, name) for name in (asked.id, other.id)] == [asked, other]


def test_a_record_of_another_thread_an_id_and_nothing_at_all_are_refused(
    store: backstay.Store, thread: backstay.Thread, asked: InterruptRecord
) -> None:
    with pytest.raises(InvalidInput, match="belongs to thread 'customer-42', not 'another'"):
        store.thread("another").decide(asked, "approve", by="ann")
    wrong: list[Any] = [asked.id, None, asked.interrupt, replace(asked, interrupt=None)]  # type: ignore[arg-type]
    for record in wrong:
        with pytest.raises(InvalidInput, match="InterruptRecord"):
            thread.decide(record, "approve", by="ann")
        with pytest.raises(InvalidInput, match="InterruptRecord"):
            thread.consume(record)

    assert stored(store, asked.id) == asked


def test_a_record_of_another_namespace_is_refused(tmp_path: Path) -> None:
    with backstay.open(tmp_path / "x.db", namespace="a") as one, backstay.open(tmp_path / "x.db") as two:
        records = []
        for store in (one, two):
            thread = store.thread("t")
            records.append(thread.interrupt(thread.save({"n": 1}, id="cp"), id="q-1"))
        assert records[0].digest != records[1].digest
        with pytest.raises(InvalidInput, match="another digest"):
            one.thread("t").decide(records[1], "approve", by="ann")


def test_a_question_that_went_with_its_checkpoint_is_not_found(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, asked: InterruptRecord
) -> None:
    thread.delete_checkpoint(checkpoint)

    with pytest.raises(backstay.NotFound):
        thread.decide(asked, "approve", by="ann")
    with pytest.raises(backstay.NotFound):
        thread.consume(asked)


def test_a_question_of_a_class_that_was_changed_since_can_still_be_decided(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    """What is read is upgraded, so the stored bytes and those of the record shown differ, and yet it is the same."""
    name = f"test_interrupts.Call of {checkpoint.id}"
    old = make_dataclass("Call", ["tool"])
    backstay.register(old, name=name)
    asked = thread.interrupt(checkpoint, payload=old("rm"))
    new = make_dataclass("Call", ["tool", "safe"])
    backstay.register(new, name=name, version=2, upgrade={1: lambda fields: {**fields, "safe": False}})
    (shown,) = thread.interrupts()
    assert shown.interrupt.payload == new("rm", False)
    assert shown.digest == asked.digest
    decided = thread.decide(shown, "reject", by="ann")
    assert decided.decision is not None


@pytest.mark.parametrize("part", ["body", "key", "checkpoint", "version", "open"])
def test_what_was_changed_in_the_store_is_detected(store: backstay.Store, thread: backstay.Thread, part: str) -> None:
    asked = thread.interrupt(thread.save({"n": 1}), payload={"tool": "rm"})
    thread.decide(asked, "reject", by="ann")
    row = find_by_id(access_of(store).store, "interrupt", "", asked.id)
    assert row is not None
    changes: dict[str, list[Any]] = {
        "body": [row.body.replace(*each) for each in ((b"rm", b"ls"), (b"reject", b"defer!"), (b"ann", b"bob"))],
        "key": ["another"],
        "checkpoint": ["another", None],
        "version": [1, 3],
        "open": [False],
    }
    assert record_of(row)
    assert row.body not in changes["body"]
    for change in changes[part]:
        with pytest.raises(backstay.Corrupted, match="does not match its digest"):
            record_of(replace(row, **{part: change}))


# Consuming --------------------------------------------------------------------------------------------------------


def test_a_decision_is_taken_once(thread: backstay.Thread, asked: InterruptRecord) -> None:
    with pytest.raises(InvalidInput, match="not decided yet"):
        thread.consume(asked, by="worker-1")
    thread.decide(asked, "approve", by="ann")
    decision = thread.consume(asked, by="worker-1")

    assert thread.consume(asked, by="worker-1") == decision
    with pytest.raises(backstay.Conflict, match="worker-1") as caught:
        thread.consume(asked, by="worker-2")
    assert isinstance(caught.value.winner, InterruptRecord)
    assert caught.value.winner.consumer == "worker-1"


def test_eight_workers_at_once_and_exactly_one_resumes(url: str) -> None:
    with backstay.open(url) as store:
        thread = store.thread("t")
        asked = thread.interrupt(thread.save({"n": 1}))
        thread.decide(asked, "approve", by="ann")

        def resume(number: int) -> str:
            store.thread("t").consume(asked, by=f"worker-{number}")
            return f"worker-{number}"

        won, lost = race(8, resume)
        (record,) = thread.interrupts(pending=False)

        assert won == [record.consumer]
        assert [error.winner for error in lost] == [record] * 7


def test_without_a_name_the_lease_or_the_process_takes_it(store: backstay.Store, thread: backstay.Thread) -> None:
    consumers = []
    for number in range(2):
        asked = thread.interrupt(thread.save({"n": number}))
        thread.decide(asked, "approve", by="ann")
        if number:
            with thread.lease(owner="worker-1"):
                assert thread.consume(asked) == thread.consume(asked)
        else:
            assert thread.consume(asked) == thread.consume(asked)
        consumers.append(stored(store, asked.id).consumer)

    assert all(consumers)
    assert str(consumers[1]).startswith("worker-1 ")
    assert consumers[0] != consumers[1]


def test_the_decision_of_a_worker_that_died_goes_to_whoever_takes_over_the_branch(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    asked = thread.interrupt(thread.save({"n": 1}))
    thread.decide(asked, "approve", by="ann")
    dead = thread.lease(ttl=60, owner="died", heartbeat=False).__enter__()
    decision = thread.consume(asked)
    expire(dead)
    other, third = store.thread(thread.id), store.thread(thread.id)
    with taken_over(other):
        with pytest.raises(backstay.Conflict):
            third.consume(asked)
        assert other.consume(asked) == decision
        with pytest.raises(backstay.Conflict):
            thread.consume(asked)
        with pytest.raises(backstay.Fenced):
            dead.renew()
        with pytest.raises(backstay.Fenced):
            thread.consume(asked)

    assert str(stored(store, asked.id).consumer).startswith("new owner ")


def test_the_lease_of_another_branch_is_no_reason_to_take_over(store: backstay.Store, thread: backstay.Thread) -> None:
    asked = thread.interrupt(thread.save({"n": 1}))
    thread.decide(asked, "approve", by="ann")
    thread.consume(asked, by="worker-1")
    side = store.thread(thread.id, branch="side")
    with side.lease(), pytest.raises(backstay.Conflict):
        side.consume(asked)


# Keeping ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_waits_is_not_pruned_and_a_dry_run_says_the_same(thread: backstay.Thread) -> None:
    saved = [thread.save({"n": number}) for number in range(5)]
    asked = thread.interrupt(saved[1])
    keep = backstay.Keep(last=1)
    expected = sorted(saved[number].id for number in (0, 2, 3))
    dry = thread.prune(keep, dry_run=True)
    assert (sorted(dry.checkpoints), dry.deleted, dry.kept) == (expected, 3, 2)
    done = thread.prune(keep)
    assert (sorted(done.checkpoints), done.deleted, done.kept) == (expected, 3, 2)
    assert thread.delete_before(100) == 0
    thread.decide(asked, "approve", by="ann")
    assert thread.prune(keep).deleted == 0
    thread.consume(asked)

    assert thread.prune(keep, dry_run=True).deleted == thread.prune(keep).deleted == 1
    assert list(thread.interrupts(pending=False)) == []


def test_it_all_works_the_same_with_await(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            asked = await thread.interrupt(await thread.save({"n": 1}), payload=PAYLOAD, id="q-1")
            assert [record async for record in thread.interrupts()] == [asked]
            decided = await thread.decide(asked, "modify", by="ann", value=[1])
            assert [record async for record in store.interrupts()] == [decided]
            with pytest.raises(backstay.Conflict):
                await thread.decide(asked, "reject", by="bob")
            assert (await thread.consume(asked)).value == [1]
            assert [record async for record in store.interrupts()] == []

    asyncio.run(main())
