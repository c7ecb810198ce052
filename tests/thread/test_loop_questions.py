"""Loops that ask people: nothing guarded is done without a yes to exactly that, and asking costs the run nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import backstay
from backstay.errors import Conflict, InvalidInput, Rejected
from backstay.model.decision import InterruptKind
from backstay.operations.arguments import LOOP_POSITION
from backstay.operations.interrupts import BY_TIMEOUT, InterruptRecord
from backstay.thread.loop import Loop
from backstay.thread.turn import Turn

Body = Callable[[Loop, Turn], None]


class Shop:
    """A loop that pays twice, each time after asking. Counts what was really paid."""

    def __init__(self) -> None:
        self.amounts = [5, 7]
        self.paid: list[Any] = []
        self.turns = 0

    def body(self, loop: Loop, turn: Turn) -> None:
        self.turns += 1
        turn.append(log=[f"turn {turn.iteration}"])
        if turn.iteration > 1:
            args = turn.approve("pay", {"amount": self.amounts[turn.iteration - 2]}, "Pay?")
            turn.effect("pay", self.pay, args)
        if turn.iteration == 3:
            loop.finish()

    def pay(self, args: Any) -> None:
        self.paid.append(args["amount"])


@pytest.fixture
def shop() -> Shop:
    return Shop()


def run(thread: backstay.Thread, body: Body, **arguments: Any) -> Loop:
    with thread.loop({"log": []}, pause_check_s=0, **arguments) as loop:
        for turn in loop:
            body(loop, turn)
    return loop


def waits_for(loop: Loop) -> InterruptRecord:
    """Return the one question that a loop stopped for."""
    assert loop.status == "interrupted"
    (asked,) = loop.interrupts
    assert asked.decision is None
    return asked


# Approvals --------------------------------------------------------------------------------------------------------


def test_a_turn_that_waits_ends_the_block_quietly_and_stores_nothing(
    store: backstay.Store, thread: backstay.Thread, shop: Shop
) -> None:
    asked = waits_for(run(thread, shop.body))
    newest = thread.latest()
    assert newest is not None
    assert (newest.state, newest.iteration) == ({"log": ["turn 1"]}, 1)
    assert (asked.interrupt.kind, asked.interrupt.prompt) == (InterruptKind.TOOL_APPROVAL, "Pay?")
    assert asked.interrupt.payload == {"tool": "pay", "args": {"amount": 5}}
    assert asked.checkpoint_id == newest.id
    assert list(store.interrupts()) == [asked]
    assert waits_for(run(store.thread(thread.id), shop.body)) == asked, "asked again, it is the same question"
    assert (shop.paid, shop.turns) == ([], 3)


def test_approved_it_goes_on_with_that_turn_and_asks_at_the_next(thread: backstay.Thread, shop: Shop) -> None:
    thread.decide(waits_for(run(thread, shop.body)), "approve", by="ann")
    second = waits_for(run(thread, shop.body))
    assert (shop.paid, second.interrupt.payload["args"]) == ([5], {"amount": 7})
    thread.decide(second, "modify", by="ann", value={"amount": 6})
    done = run(thread, shop.body)

    assert (done.status, shop.paid) == ("completed", [5, 6])
    assert done.state["log"] == ["turn 1", "turn 2", "turn 3"]


def test_rejected_it_is_not_done_and_the_body_may_tell_its_model(thread: backstay.Thread, shop: Shop) -> None:
    thread.decide(waits_for(run(thread, shop.body)), "reject", by="ann", reason="too much")
    with pytest.raises(Rejected) as caught:
        run(thread, shop.body)
    assert (caught.value.reason, caught.value.by, shop.paid) == ("too much", "ann", [])

    def polite(loop: Loop, turn: Turn) -> None:
        try:
            shop.body(loop, turn)
        except Rejected as rejection:
            turn.append(log=[rejection.reason])
            loop.finish()

    assert run(thread, polite).state["log"] == ["turn 1", "turn 2", "too much"]
    assert shop.paid == []


def test_deferred_it_is_not_done_and_can_be_told_from_an_end(thread: backstay.Thread, shop: Shop) -> None:
    first = waits_for(run(thread, shop.body))
    thread.decide(first, "defer", by="ann", reason="tomorrow")
    deferred = run(thread, shop.body)
    assert (deferred.status, deferred.iteration, [each.id for each in deferred.interrupts]) == (
        "deferred",
        1,
        [first.id],
    )
    second = waits_for(run(thread, shop.body))
    assert second.id != first.id
    with pytest.raises(backstay.Conflict):
        thread.decide(first, "approve", by="ann")
    assert (waits_for(run(thread, shop.body)), shop.paid) == (second, [])


def test_a_timeout_rejects(thread: backstay.Thread, clock: Any) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        turn.approve("pay", 5, timeout=60)
        loop.finish()

    waits_for(run(thread, body))
    clock.step(seconds=61)
    with pytest.raises(Rejected) as caught:
        run(thread, body)

    assert caught.value.by == BY_TIMEOUT


def test_two_equal_calls_in_a_turn_are_two_questions_in_any_order_of_others(thread: backstay.Thread) -> None:
    calls = [5, 7, 5]
    passed: list[int] = []

    def body(loop: Loop, turn: Turn) -> None:
        passed.clear()
        for amount in calls:
            passed.append(turn.approve("pay", amount))
        loop.finish()

    names = []
    for _ in range(3):
        asked = waits_for(run(thread, body))
        names.append(asked.id)
        thread.decide(asked, "approve", by="ann")
    calls.reverse()
    calls.sort()

    assert run(thread, body).status == "completed"
    assert (len(set(names)), passed) == (3, [5, 5, 7])


def test_an_approval_with_scope_holds_for_the_round_and_no_longer(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        turn.approve("pay", turn.iteration)
        turn.approve("pay", "again")
        if turn.iteration == 2:
            turn.approve("refund", 1)
            loop.finish()

    thread.decide(waits_for(run(thread, body)), "approve", by="ann", scope="pay")
    other = waits_for(run(thread, body))
    assert other.interrupt.payload["tool"] == "refund"
    newest = thread.latest()
    assert newest is not None
    assert (newest.metadata[LOOP_POSITION]["grants"], newest.state) == (["pay"], {"log": []})
    thread.decide(other, "approve", by="ann", scope="*")
    assert run(thread, body).status == "completed"
    first_again = waits_for(run(thread, body, input={}))

    assert first_again.interrupt.payload == {"tool": "pay", "args": 1}


@pytest.mark.parametrize("copy", ["fork", "rewind"])
def test_what_was_granted_or_approved_does_not_hold_for_a_copy_of_the_position(
    thread: backstay.Thread, copy: str
) -> None:
    """A person saw one run at one place. Another branch, or the same place once more, waits again."""

    def body(loop: Loop, turn: Turn) -> None:
        turn.approve("pay", turn.iteration)
        turn.approve("mail", turn.iteration)
        if turn.iteration == 2:
            loop.finish()

    seen: set[str] = set()
    for scope in ("pay", None, None):
        asked = waits_for(run(thread, body))
        seen.add(asked.id)
        thread.decide(asked, "approve", by="ann", scope=scope)
    assert run(thread, body).status == "completed"
    middle = thread.at(step=1)
    assert middle is not None
    assert middle.metadata[LOOP_POSITION]["grants"] == ["pay"]
    copied = thread.fork(middle, branch="side") if copy == "fork" else thread
    if copy == "rewind":
        thread.rewind(middle)
    asked = waits_for(run(copied, body))

    assert asked.interrupt.payload == {"tool": "pay", "args": 2}
    assert asked.id not in seen


@pytest.mark.parametrize(("scope", "other"), [("pay at most 10", "pay"), ("refund", "refund"), ("refund", "pay")])
def test_other_scopes_are_for_people_only(thread: backstay.Thread, scope: str, other: str) -> None:
    """Who was asked about one tool cannot grant another one by it."""

    def body(loop: Loop, turn: Turn) -> None:
        turn.approve("pay", 1)
        turn.approve(other, 2)
        loop.finish()

    thread.decide(waits_for(run(thread, body)), "approve", by="ann", scope=scope)

    assert waits_for(run(thread, body)).interrupt.payload == {"tool": other, "args": 2}


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_body_that_catches_everything_still_stores_nothing(
    thread: backstay.Thread, shop: Shop, goes_on: bool
) -> None:
    kept: list[Turn] = []

    def greedy(loop: Loop, turn: Turn) -> None:
        kept.append(turn)
        try:
            shop.body(loop, turn)
        except BaseException:
            if goes_on:
                turn.effect("pay", shop.pay, {"amount": 5})

    asked = waits_for(run(thread, greedy))
    with pytest.raises(InvalidInput, match="turn 2 has ended"):
        kept[-1].append(log=["after the block"])
    newest = thread.latest()
    assert newest is not None
    assert newest.state == {"log": ["turn 1"]}
    thread.decide(asked, "approve", by="ann")
    assert shop.paid == []


def test_an_inner_loop_lets_what_an_outer_one_waits_for_pass(store: backstay.Store, thread: backstay.Thread) -> None:
    inner_thread = store.thread("inner")
    inner = inner_thread.loop({"n": [1]})

    def body(loop: Loop, turn: Turn) -> None:
        with inner:
            for each in inner:
                each.append(n=[2])
                turn.approve("pay", 1)

    waits_for(run(thread, body))
    newest = inner_thread.latest()
    assert newest is not None
    assert (inner.status, newest.state) == ("failed", {"n": [1]})


# Questions for a value --------------------------------------------------------------------------------------------


def test_an_answer_is_the_value_that_somebody_put_in_place(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        loop.finish(name=turn.ask({"field": "name"}, "Who?", answer=str))

    first = waits_for(run(thread, body))
    assert (first.interrupt.kind, first.interrupt.payload) == (InterruptKind.USER_REQUEST, {"field": "name"})
    with pytest.raises(InvalidInput, match=f"{first.id} must be str, not int"):
        thread.decide(first, "answer", by="ann", value=5)
    assert waits_for(run(thread, body)) == first
    thread.decide(first, "answer", by="ann", value="Ann")

    assert run(thread, body).state == {"log": [], "name": "Ann"}


def test_any_answer_will_do_if_no_type_is_named(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        loop.finish(said=turn.ask("anything?"))

    thread.decide(waits_for(run(thread, body)), "answer", by="ann", value=None)

    assert run(thread, body).state["said"] is None


def test_a_loop_has_no_nodes_to_reroute_to(thread: backstay.Thread, shop: Shop) -> None:
    asked = waits_for(run(thread, shop.body))
    with pytest.raises(InvalidInput, match="not about a node"):
        thread.decide(asked, "reroute", by="ann", target="elsewhere")

    assert waits_for(run(thread, shop.body)) == asked


# Forged, replayed and late approvals ------------------------------------------------------------------------------


def test_approving_twice_pays_once(store: backstay.Store, thread: backstay.Thread, shop: Shop) -> None:
    asked = waits_for(run(thread, shop.body))
    first = thread.decide(asked, "approve", by="ann")
    assert thread.decide(asked, "approve", by="ann") == first
    waits_for(run(thread, shop.body))
    with pytest.raises(backstay.Conflict):
        thread.decide(asked, "approve", by="bob")
    waits_for(run(thread, shop.body))

    assert shop.paid == [5]


def test_an_approval_that_comes_after_the_run_moved_on_pays_nothing(thread: backstay.Thread, shop: Shop) -> None:
    """The same tool with the same arguments, one turn later, is another question."""
    shop.amounts = [5, 5]
    first = waits_for(run(thread, shop.body))

    def without(loop: Loop, turn: Turn) -> None:
        if turn.iteration == 2:
            turn.append(log=["not paid after all"])
        else:
            shop.body(loop, turn)

    second = waits_for(run(thread, without))
    assert second.interrupt.payload == first.interrupt.payload
    with pytest.raises(Conflict, match="is closed: its run is over, or has moved past it"):
        thread.decide(first, "approve", by="ann")

    assert (waits_for(run(thread, without)), shop.paid) == (second, [])
    assert list(thread.interrupts()) == [second]


def test_an_approval_holds_if_only_the_state_was_edited_and_what_was_shown_is_the_same(
    thread: backstay.Thread, shop: Shop
) -> None:
    asked = waits_for(run(thread, shop.body))
    thread.append({"log": ["edited"]})
    thread.decide(asked, "approve", by="ann")
    waits_for(run(thread, shop.body))
    waits_for(run(thread, shop.body))

    assert shop.paid == [5]


def test_an_approval_of_other_arguments_pays_nothing(thread: backstay.Thread, shop: Shop) -> None:
    thread.decide(waits_for(run(thread, shop.body)), "approve", by="ann")
    shop.amounts[0] = 5000
    edited = waits_for(run(thread, shop.body))

    assert (edited.interrupt.payload["args"], shop.paid) == ({"amount": 5000}, [])


def test_of_many_approvers_at_once_one_counts(store: backstay.Store, thread: backstay.Thread, shop: Shop) -> None:
    asked = waits_for(run(thread, shop.body))
    barrier = threading.Barrier(6)
    won: list[int] = []

    def decide(amount: int) -> None:
        barrier.wait()
        try:
            store.thread(thread.id).decide(asked, "modify", by=f"person {amount}", value={"amount": amount})
        except backstay.Conflict:
            return
        won.append(amount)

    people = [threading.Thread(target=decide, args=(amount,)) for amount in range(6)]
    for person in people:
        person.start()
    for person in people:
        person.join()
    waits_for(run(thread, shop.body))

    assert len(won) == 1
    assert shop.paid == won


def test_a_record_that_the_client_made_is_refused(store: backstay.Store, thread: backstay.Thread, shop: Shop) -> None:
    asked = waits_for(run(thread, shop.body))
    shop.amounts[0] = 5000
    expected = waits_for(run(thread, shop.body))
    thread.delete()
    fresh = store.thread(thread.id)
    fresh.save({"log": []}, step=0)
    head = fresh.save({"log": ["turn 1"]})
    for record in (asked, expected):
        with pytest.raises(InvalidInput, match="reserved for Backstay"):
            fresh.interrupt(head, id=record.id, kind="toolapproval", payload=record.interrupt.payload, prompt="Pay?")
        with pytest.raises(backstay.NotFound):
            fresh.decide(record, "approve", by="mallory")

    assert (list(fresh.interrupts(pending=False)), shop.paid) == ([], [])


def test_a_grant_that_the_client_made_is_refused(thread: backstay.Thread, shop: Shop) -> None:
    waits_for(run(thread, shop.body))
    newest = thread.latest()
    assert newest is not None
    forged = {LOOP_POSITION: {"round": 0, "grants": ["*"]}}
    calls: list[Callable[[], Any]] = [
        lambda: thread.save(newest.state, metadata=forged),
        lambda: thread.append({"log": []}, metadata=forged),
        lambda: thread.fork(newest, branch="side", metadata=forged),
        lambda: thread.rewind(newest, metadata=forged),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="only loops may write"):
            call()

    assert len(list(thread.history(branch="*"))) == 2


# Pausing ----------------------------------------------------------------------------------------------------------


class Watched:
    """A body that is asked to pause while its second turn runs."""

    def __init__(self, thread: backstay.Thread, store: backstay.Store) -> None:
        self.thread = thread
        self.outside = store.thread(thread.id)
        self.asked: list[InterruptRecord] = []

    def __call__(self, loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.iteration])
        if turn.iteration == 2:
            self.asked.append(self.outside.request_pause("look", by="ann"))
        if turn.iteration == 4:
            loop.finish()


def test_a_loop_pauses_at_its_next_boundary_and_goes_on_when_approved(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    body = Watched(thread, store)
    paused = run(thread, body)
    assert (waits_for(paused), paused.iteration, paused.state) == (body.asked[0], 2, {"log": [1, 2]})
    assert waits_for(run(thread, body)) == body.asked[0]
    thread.decide(body.asked[0], "approve", by="bob")

    assert run(thread, body).state == {"log": [1, 2, 3, 4]}
    assert list(thread.interrupts()) == []


def test_a_paused_loop_that_is_deferred_stays_and_one_that_is_rejected_ends(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    body = Watched(thread, store)
    run(thread, body)
    thread.decide(body.asked[0], "defer", by="bob")
    assert run(thread, body).status == "deferred"
    second = waits_for(run(thread, body))
    thread.decide(second, "reject", by="bob", reason="enough")
    for _ in range(2):
        with pytest.raises(Rejected, match="'bob' stopped this run for good") as caught:
            run(thread, body)
        assert caught.value.reason == "enough"
    newest = thread.latest()
    assert newest is not None
    assert newest.state == {"log": [1, 2]}
    assert run(thread.fork(newest, branch="side"), lambda loop, turn: loop.finish()).status == "completed"


def test_a_last_turn_is_not_held_up(store: backstay.Store, thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        store.thread(thread.id).request_pause(by="ann")
        loop.finish()

    assert run(thread, body).status == "completed"


def test_a_loop_looks_as_often_as_it_was_told(store: backstay.Store, thread: backstay.Thread) -> None:
    """At its beginning it always looks; then not again before the time is over."""
    body = Watched(thread, store)
    with thread.loop({"log": []}, pause_check_s=3600) as loop:
        for turn in loop:
            body(loop, turn)
    assert (loop.status, loop.iteration) == ("completed", 4)
    with thread.loop({}, input={"log": [0]}):
        asked = store.thread(thread.id).request_pause(by="ann")
    with thread.loop({}, pause_check_s=3600) as again:
        for _ in again:
            pytest.fail("it did not look")
    assert waits_for(again) == asked


def test_a_request_that_came_too_late_does_not_pause_the_next_run_of_a_loop(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    def last(loop: Loop, turn: Turn) -> None:
        late.append(store.thread(thread.id).request_pause("too late", by="ann"))
        loop.finish()

    late: list[InterruptRecord] = []
    assert run(thread, last).status == "completed"
    assert list(store.interrupts()) == list(thread.interrupts()) == []
    with pytest.raises(Conflict, match="is closed: its run is over"):
        thread.decide(late[0], "approve", by="ann")
    with pytest.raises(InvalidInput, match="no run is under way on branch 'main' of thread"):
        thread.request_pause(by="ann")
    with thread.loop({}, input={"log": ["next"]}) as loop:
        for turn in loop:
            turn.append(log=["not paused"])
            loop.finish()

    assert loop.status == "completed"
    (record,) = thread.interrupts(pending=False)
    assert (record.id, record.closed, record.decision) == (late[0].id, True, None)


def test_the_first_turn_of_a_loop_on_a_state_that_was_saved_before_can_be_paused_too(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    thread.save({"log": []})
    with pytest.raises(InvalidInput, match="nothing to pause"):
        thread.request_pause(by="ann")
    with thread.loop({}) as loop:
        for turn in loop:
            asked = store.thread(thread.id).request_pause(by="ann")
            turn.append(log=["first"])

    assert waits_for(loop) == asked


def test_a_question_that_a_loop_did_not_ask_again_is_closed_when_its_turn_is_saved(
    store: backstay.Store, thread: backstay.Thread, shop: Shop
) -> None:
    shop.amounts = [5, 7]
    old = waits_for(run(thread, shop.body))
    shop.amounts = [6, 7]
    new = waits_for(run(thread, shop.body))
    assert {old.id, new.id} == {record.id for record in store.interrupts()}
    thread.decide(new, "approve", by="ann")
    following = waits_for(run(thread, shop.body))

    assert shop.paid == [6]
    assert list(store.interrupts()) == [following]
    assert [record.closed for record in thread.interrupts(pending=False)] == [True, False, False]


def test_a_value_that_was_sent_to_a_loop_early_is_kept_until_it_waits_for_it(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        if turn.iteration == 3:
            loop.finish(got=turn.wait_for("news"))
        elif turn.iteration == 2:
            turn.ask("sure?")

    assert waits_for(run(thread, body)).interrupt.payload == "sure?"
    store.thread(thread.id).send("news", 1, by="agency")
    (asked,) = [record for record in thread.interrupts() if record.decision is None]
    thread.decide(asked, "answer", by="ann")

    assert run(thread, body).state["got"] == 1
    assert list(store.interrupts()) == []


def test_the_questions_of_a_loop_that_was_rewound_are_over(
    store: backstay.Store, thread: backstay.Thread, shop: Shop
) -> None:
    shop.amounts = [5]
    old = waits_for(run(thread, shop.body))
    assert list(store.interrupts()) == [old]
    first = thread.at(step=0)
    assert first is not None
    thread.rewind(first)

    assert list(store.interrupts()) == []
    with pytest.raises(Conflict, match="is closed"):
        thread.decide(old, "approve", by="ann")
    again = waits_for(run(thread, shop.body))
    assert again.id != old.id
    assert list(store.interrupts()) == [again]
