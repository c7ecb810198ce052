"""Requests to pause: made by anybody from anywhere, one at a time, and a run goes on only when one was approved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import backstay
from backstay.errors import InvalidInput
from backstay.model.decision import InterruptKind
from backstay.operations import question
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.records import PAGE_ROWS
from backstay.thread.access import access_of, handle_of
from support.meanwhile import Meanwhile, dies_after


@pytest.fixture
def checkpoint(thread: backstay.Thread) -> backstay.Checkpoint:
    """Start a loop that does not finish."""
    with thread.loop({"n": 1}):
        pass
    found = thread.latest()
    assert found is not None
    return found


def obey(thread: backstay.Thread) -> InterruptRecord | None:
    handle = handle_of(thread)
    return handle.run(question.check_pause, handle.services, handle.cursor)


def requested(thread: backstay.Thread) -> InterruptRecord | None:
    handle = handle_of(thread)
    return handle.run(question.pause_requested, handle.services, handle.cursor)


# Asking -----------------------------------------------------------------------------------------------------------


def test_anybody_can_ask_a_run_to_pause_without_its_lease(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    with thread.lease():
        newest = thread.append({"log": ["a"]})
        asked = store.thread(thread.id).request_pause("budget?", by="ann")

        assert (asked.checkpoint_id, asked.branch, asked.pending) == (newest.id, "main", True)
        assert (asked.interrupt.kind, asked.interrupt.prompt) == (InterruptKind.USER_REQUEST, "budget?")
        assert asked.interrupt.payload == {"pause": True, "by": "ann", "reason": "budget?"}
        assert list(store.interrupts()) == [asked]
        assert requested(thread) == obey(thread) == asked
        thread.append({"log": ["the run is not disturbed until it looks"]})


def test_one_request_is_open_at_a_time(thread: backstay.Thread, checkpoint: backstay.Checkpoint) -> None:
    first = thread.request_pause("a", by="ann")
    assert thread.request_pause("b", by="bob") == first
    thread.append({"log": ["a"]})
    assert thread.request_pause(by="bob") == first
    thread.decide(first, "approve", by="ann")
    assert obey(thread) is None
    second = thread.request_pause("a", by="ann")

    assert second.id != first.id
    assert requested(thread) == second


def test_who_asks_after_an_approval_is_not_answered_by_it(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    """The run has not looked yet: it would go on with the approval, and the new request would be lost."""
    thread.decide(thread.request_pause("a", by="ann"), "approve", by="ann")
    second = thread.request_pause("b", by="bob")

    assert obey(thread) == obey(thread) == second
    assert [record.interrupt.prompt for record in thread.interrupts()] == ["b"]


def test_of_two_who_ask_at_once_one_is_recorded(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    fast: list[InterruptRecord] = []

    def ask_first() -> None:
        thread.append({"log": ["a"]})
        fast.append(store.thread(thread.id).request_pause("fast", by="bob"))

    for calls in range(1, 4):
        slow = Meanwhile(access_of(store).store)
        slow.before(calls + 1, ask_first)
        asked = question.request_pause(slow, access_of(store).services, handle_of(thread).cursor, "slow", "ann")
        assert slow.is_over
        assert [asked] == fast[-1:] == list(thread.interrupts())
        thread.decide(asked, "approve", by="ann")
        assert obey(thread) is None


def test_a_checkpoint_that_goes_meanwhile_is_no_reason_to_fail(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    doomed = thread.append({"log": ["a"]})
    for calls in (2, 3):
        slow = Meanwhile(access_of(store).store)
        slow.before(calls + 1, partial(thread.delete_checkpoint, doomed))
        asked = question.request_pause(slow, access_of(store).services, handle_of(thread).cursor, "", "ann")
        assert slow.is_over
        assert asked.checkpoint_id == checkpoint.id
        thread.decide(asked, "approve", by="ann")
        assert obey(thread) is None
        thread.latest()
        doomed = thread.append({"log": ["b"]})


def test_where_nothing_was_saved_there_is_nothing_to_pause(store: backstay.Store, thread: backstay.Thread) -> None:
    with pytest.raises(backstay.NotFound, match="after its first save"):
        thread.request_pause(by="ann")
    with thread.lease(), pytest.raises(backstay.NotFound):
        store.thread(thread.id).request_pause(by="ann")


def test_what_is_no_request_is_refused(thread: backstay.Thread, checkpoint: backstay.Checkpoint) -> None:
    wrong: list[Callable[[], object]] = [
        lambda: thread.request_pause(by=""),
        lambda: thread.request_pause(by=None),  # type: ignore[arg-type]
        lambda: thread.request_pause(5, by="ann"),  # type: ignore[arg-type]
        lambda: thread.request_pause("x" * 65_537, by="ann"),
    ]
    for call in wrong:
        with pytest.raises(InvalidInput):
            call()

    assert list(thread.interrupts()) == []


def test_only_this_branch_is_paused(store: backstay.Store, thread: backstay.Thread) -> None:
    side = thread.fork(thread.save({"n": 1}), branch="side")
    inner = store.thread(thread.id, scope="inner")
    inner.save({"n": 1})
    with side.loop({}):
        asked = side.request_pause(by="ann")
    thread.interrupt(thread.save({"n": 2}), payload={"pause": True, "by": "ann", "reason": ""})

    assert (requested(thread), requested(inner), requested(side)) == (None, None, asked)
    with pytest.raises(InvalidInput, match="no run is under way on branch 'main'"):
        thread.request_pause(by="ann")


def test_a_request_of_the_clients_own_making_is_refused(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    asked = thread.request_pause(by="ann")
    with pytest.raises(InvalidInput, match="reserved for Backstay"):
        thread.interrupt(checkpoint, id=asked.id, payload=asked.interrupt.payload)


def test_looking_costs_one_read_also_among_other_questions(
    thread: backstay.Thread, store: backstay.Store, checkpoint: backstay.Checkpoint
) -> None:
    saved, services, cursor = checkpoint, access_of(store).services, handle_of(thread).cursor
    for number in range(PAGE_ROWS - 2):
        thread.interrupt(saved, payload=number)
    looking = Meanwhile(access_of(store).store)
    assert question.pause_requested(looking, services, cursor) is None
    assert looking.calls == 1
    asked = thread.request_pause(by="ann")
    assert question.pause_requested(looking, services, cursor) == asked
    assert looking.calls == 3  # and one more, for the run that it belongs to
    for number in range(PAGE_ROWS):
        thread.interrupt(saved, payload=number)
    thread.decide(asked, "approve", by="ann")
    assert obey(thread) is None
    late = thread.request_pause(by="bob")

    assert requested(thread) == late


# Deciding ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_after_an_approval_which_is_consumed(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    thread.decide(thread.request_pause(by="ann"), "approve", by="bob")
    with thread.lease(owner="worker"):
        assert obey(thread) is None
    (record,) = thread.interrupts(pending=False)

    assert str(record.consumer).startswith("worker ")


def test_a_run_that_was_deferred_stays_paused(thread: backstay.Thread, checkpoint: backstay.Checkpoint) -> None:
    first = thread.decide(thread.request_pause("why", by="ann"), "defer", by="bob")
    assert obey(thread) == first
    second = obey(thread)
    assert second is not None

    assert (second.id != first.id, second.decision, second.interrupt.prompt) == (True, None, "why")
    assert list(thread.interrupts()) == [second]


def test_a_crash_while_deferring_never_lets_the_run_go_on(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    thread.decide(thread.request_pause(by="ann"), "defer", by="bob")
    services, cursor, cuts = access_of(store).services, handle_of(thread).cursor, 0
    for calls in range(1, 10):
        cuts += dies_after(calls, store, lambda dying: question.check_pause(dying, services, cursor))
        assert requested(thread) is not None
    assert cuts >= 3
    assert len(list(thread.interrupts(pending=False))) == 2


def test_a_run_that_was_rejected_never_goes_on_in_this_branch(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    rejected = thread.decide(thread.request_pause(by="ann"), "reject", by="bob", reason="enough")
    thread.request_pause(by="ann")

    assert obey(thread) == obey(thread) == rejected
    assert obey(thread.fork(checkpoint, branch="side")) is None


@pytest.mark.parametrize("decision", [{"decision": "modify", "value": 1}, {"decision": "reroute", "target": "x"}])
def test_what_a_pause_cannot_be_answered_by_is_refused(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, decision: dict[str, Any]
) -> None:
    asked = thread.request_pause(by="ann")
    with pytest.raises(InvalidInput, match=r"is a request to pause.*approve, reject, defer"):
        thread.decide(asked, by="bob", **decision)

    assert requested(thread) == asked


def test_it_works_the_same_with_await(url: str) -> None:
    async def main() -> None:
        async with await backstay.aopen(url) as store:
            thread = store.thread("t")
            async with thread.loop({"n": 1}):
                pass
            asked = await thread.request_pause("why", by="ann")
            assert await store.thread("t").request_pause("other", by="bob") == asked
            assert [record async for record in store.interrupts()] == [asked]
            with pytest.raises(backstay.NotFound):
                await store.thread("another").request_pause(by="ann")

    asyncio.run(main())
