"""Questions: asked again after every crash, the same as long as it is the same place and the same content."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pydantic
import pytest

import backstay
from backstay.errors import Conflict, InvalidInput
from backstay.model.decision import Decision, DecisionKind, Interrupt, InterruptKind
from backstay.operations import interrupts, question
from backstay.operations.interrupts import BY_TIMEOUT, InterruptRecord
from backstay.operations.question import TIMEOUT_S_MAX, Question, check_answer
from backstay.thread.access import access_of, handle_of
from support.meanwhile import Meanwhile, dies_after
from support.waiting import expire, taken_over

PAY = Question("0/1/pay/1", InterruptKind.TOOL_APPROVAL, "pay", {"tool": "pay", "args": {"amount": 5}}, "Really?")


@pytest.fixture
def checkpoint(thread: backstay.Thread) -> backstay.Checkpoint:
    return thread.save({"plan": "pay"})


def settle(thread: backstay.Thread, asked: Question, on: backstay.Checkpoint) -> Decision | InterruptRecord:
    handle = handle_of(thread)
    return handle.run(question.settle, handle.services, handle.cursor, on.id, asked)


def waiting(thread: backstay.Thread, asked: Question) -> InterruptRecord | None:
    handle = handle_of(thread)
    return handle.run(question.waiting, handle.services, handle.cursor, "", asked)


def ask(thread: backstay.Thread, asked: Question, on: backstay.Checkpoint) -> InterruptRecord:
    """Settle what nobody has decided yet."""
    found = settle(thread, asked, on)
    assert isinstance(found, InterruptRecord)
    assert found.decision is None
    return found


# Asking -----------------------------------------------------------------------------------------------------------


def test_asked_again_it_is_the_same_interrupt_also_from_elsewhere_and_after_the_head_moved(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint, clock: Any
) -> None:
    first = ask(thread, PAY, checkpoint)
    clock.step(seconds=3)
    later = thread.append(set={"plan": "edited"})

    assert ask(thread, PAY, checkpoint) == first
    assert ask(store.thread(thread.id), replace(PAY, timeout_s=60.0), later) == first
    assert first.checkpoint_id == checkpoint.id
    assert first.interrupt == Interrupt(id=first.id, kind=PAY.kind, node="pay", payload=PAY.payload, prompt="Really?")
    assert list(thread.interrupts(pending=False)) == [first]


@pytest.mark.parametrize(
    "other",
    [
        replace(PAY, position="0/2/pay/1"),
        replace(PAY, kind=InterruptKind.BEFORE_NODE),
        replace(PAY, node="refund"),
        replace(PAY, node=None),
        replace(PAY, payload={"tool": "pay", "args": {"amount": 5000}}),
        replace(PAY, payload={"tool": "pay", "args": {"amount": 5.0}}),
        replace(PAY, prompt="Really"),
    ],
)
def test_the_approval_of_one_question_is_not_that_of_another(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, other: Question
) -> None:
    first = ask(thread, PAY, checkpoint)
    thread.decide(first, "approve", by="ann")

    assert ask(thread, other, checkpoint).id != first.id
    assert settle(thread, PAY, checkpoint) == Decision(kind=DecisionKind.APPROVE)


def test_another_branch_scope_or_thread_asks_for_itself(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    thread.decide(ask(thread, PAY, checkpoint), "approve", by="ann")
    side = thread.fork(checkpoint, branch="side")
    others = [side, store.thread(thread.id, scope="inner"), store.thread("another")]
    records = []
    for other in others:
        head = other.latest() or other.save({"plan": "pay"})
        records.append(ask(other, PAY, head))

    assert len({record.id for record in records}) == len(others)
    with pytest.raises(backstay.NotFound, match="of branch 'main', not of this"):
        settle(side, replace(PAY, position="elsewhere"), checkpoint)


def test_two_that_ask_at_once_on_different_checkpoints_get_one_interrupt(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    first: list[InterruptRecord] = []

    def ask_first() -> None:
        later = thread.append(set={"plan": "edited"})
        first.append(ask(store.thread(thread.id), PAY, later))

    slow = Meanwhile(access_of(store).store)
    slow.before(3, ask_first)
    found = question.settle(slow, access_of(store).services, handle_of(thread).cursor, checkpoint.id, PAY)

    assert [found] == first == list(thread.interrupts())


def test_nobody_can_put_a_question_of_their_own_in_the_place_of_one(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    """Who knows the id that will be asked for cannot record and approve something under it beforehand."""
    coming = PAY.interrupt(thread._cursor.branch, 0)
    with pytest.raises(InvalidInput, match="reserved for Backstay"):
        thread.interrupt(
            checkpoint, id=coming.id, payload=PAY.payload, kind="toolapproval", node="pay", prompt="Really?"
        )
    assert list(thread.interrupts(pending=False)) == []
    planted = replace(coming, payload={"tool": "pay", "args": {"amount": 5000}})
    handle = handle_of(thread)
    forged = handle.run(interrupts.keep, handle.services, handle.cursor, checkpoint.id, planted)
    thread.decide(forged, "approve", by="mallory")
    for look in (lambda: settle(thread, PAY, checkpoint), lambda: waiting(thread, PAY)):
        with pytest.raises(backstay.Corrupted, match="its id belongs to another question"):
            look()

    assert [record.pending for record in thread.interrupts()] == [True]


def test_what_cannot_be_asked_is_refused_and_nothing_is_stored(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    with pytest.raises(backstay.EncodeError) as caught:
        settle(thread, replace(PAY, payload={"deep": [object()]}), checkpoint)
    assert caught.value.path == "interrupt.payload.deep[0]"
    handle = handle_of(thread)
    with pytest.raises(backstay.NotFound):
        handle.run(question.settle, handle.services, handle.cursor, "no such checkpoint", PAY)

    assert list(thread.interrupts(pending=False)) == []


def test_looking_records_decides_and_consumes_nothing(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, clock: Any
) -> None:
    late = replace(PAY, timeout_s=3.0)
    assert waiting(thread, late) is None
    assert list(thread.interrupts(pending=False)) == []
    asked = ask(thread, late, checkpoint)
    clock.step(seconds=2)
    assert waiting(thread, late) == asked
    decided = thread.decide(asked, "defer", by="ann")
    assert waiting(thread, late) == waiting(thread, late) == decided
    settle(thread, late, checkpoint)

    assert waiting(thread, late) is None
    assert len(list(thread.interrupts(pending=False))) == 1


# Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decision",
    [
        Decision(kind=DecisionKind.APPROVE, scope="pay"),
        Decision(kind=DecisionKind.MODIFY, value={"amount": 3}),
        Decision(kind=DecisionKind.REJECT, reason="too much"),
        Decision(kind=DecisionKind.REROUTE, target="ask-again"),
    ],
    ids=lambda decision: str(decision.kind),
)
def test_every_decision_comes_back_as_it_was_made_for_as_long_as_it_is_asked(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint, decision: Decision
) -> None:
    thread.decide(ask(thread, PAY, checkpoint), decision, by="ann")
    with thread.lease(owner="worker"):
        assert [settle(thread, PAY, checkpoint) for _ in range(2)] == [decision] * 2
    (record,) = thread.interrupts(pending=False)

    assert str(record.consumer).startswith("worker ")


def test_what_a_worker_took_goes_to_a_later_lease_and_to_nobody_else(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    thread.decide(ask(thread, PAY, checkpoint), "approve", by="ann")
    dead = thread.lease(ttl=60, owner="died", heartbeat=False).__enter__()
    decision = settle(thread, PAY, checkpoint)
    expire(dead)
    heir, other = store.thread(thread.id), store.thread(thread.id)
    with taken_over(heir):
        with pytest.raises(backstay.Conflict):
            settle(other, PAY, checkpoint)
        assert settle(heir, PAY, checkpoint) == decision
        with pytest.raises(backstay.Conflict):
            settle(thread, PAY, checkpoint)
    with pytest.raises(backstay.Fenced):
        dead.release()


def test_deferring_is_told_once_and_asking_again_is_a_new_question(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    seen = []
    for number in range(3):
        asked = ask(thread, PAY, checkpoint)
        seen.append(asked.id)
        thread.decide(asked, "defer", by="ann", reason=f"later {number}")
        assert settle(thread, PAY, checkpoint) == Decision(kind=DecisionKind.DEFER, reason=f"later {number}")
    last = ask(thread, PAY, checkpoint)
    thread.decide(last, "approve", by="ann")

    assert settle(thread, PAY, checkpoint) == Decision(kind=DecisionKind.APPROVE)
    assert len({*seen, last.id}) == 4


def test_a_place_that_is_no_nodes_cannot_be_rerouted(thread: backstay.Thread, checkpoint: backstay.Checkpoint) -> None:
    """The decision would count and could never be carried out, so it is refused when it is made."""
    asked = ask(thread, replace(PAY, node=None), checkpoint)
    with pytest.raises(InvalidInput, match="not about a node"):
        thread.decide(asked, "reroute", by="ann", target="elsewhere")

    assert list(thread.interrupts()) == [asked]


# Timeouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "target"), [(DecisionKind.REJECT, None), (DecisionKind.DEFER, None), (DecisionKind.REROUTE, "escalate")]
)
def test_a_timeout_decides_what_was_said_and_not_before_its_time(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, clock: Any, kind: DecisionKind, target: str | None
) -> None:
    late = replace(PAY, timeout_s=60.0, on_timeout=kind, timeout_target=target)
    asked = ask(thread, late, checkpoint)
    clock.step(seconds=59.999)
    assert ask(thread, late, checkpoint) == asked
    clock.step(seconds=0.001)
    decision = settle(thread, late, checkpoint)
    record = next(thread.interrupts(pending=False))

    assert isinstance(decision, Decision)
    assert (decision.kind, decision.target) == (kind, target)
    assert (record.id, record.decided_by, record.decision) == (asked.id, BY_TIMEOUT, decision)
    with pytest.raises(backstay.Conflict):
        thread.decide(asked, "approve", by="ann")


def test_an_answer_after_the_deadline_does_not_count(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, clock: Any
) -> None:
    late = replace(PAY, timeout_s=1.0)
    asked = ask(thread, late, checkpoint)
    assert asked.deadline == asked.created_at + timedelta(seconds=1)
    assert "due by" in str(asked)
    clock.step(seconds=2)

    with pytest.raises(Conflict, match="too late") as caught:
        thread.decide(asked, "approve", by="ann")
    assert caught.value.winner.decided_by == BY_TIMEOUT
    found = settle(thread, late, checkpoint)
    assert isinstance(found, Decision)
    assert found.kind is DecisionKind.REJECT


def test_of_a_person_and_the_clock_the_first_counts(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, clock: Any
) -> None:
    late = replace(PAY, timeout_s=3.0)
    thread.decide(ask(thread, late, checkpoint), "approve", by="ann")
    clock.step(seconds=9)

    assert settle(thread, late, checkpoint) == Decision(kind=DecisionKind.APPROVE)


@pytest.mark.parametrize("kind", [DecisionKind.APPROVE, DecisionKind.MODIFY, "maybe"])
def test_a_timeout_never_executes_what_is_guarded(kind: Any) -> None:
    with pytest.raises(InvalidInput, match="a timeout cannot decide"):
        replace(PAY, on_timeout=kind, timeout_s=1.0)


def test_a_timeout_that_cannot_be_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"on_timeout": DecisionKind.REROUTE},
        {"timeout_target": "x"},
        *({"timeout_s": each} for each in (-1, float("nan"), float("inf"), True, "5", TIMEOUT_S_MAX + 1)),
    ]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            replace(PAY, **arguments)

    assert replace(PAY, timeout_s=TIMEOUT_S_MAX).timeout_s == TIMEOUT_S_MAX


# Typed answers ----------------------------------------------------------------------------------------------------


class Order(pydantic.BaseModel):
    item: str
    count: int


class Careful(pydantic.BaseModel):
    item: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def fill(cls, given: Any) -> Any:
        return given


def answer(value: object) -> Decision:
    return Decision(kind=DecisionKind.ANSWER, value=value)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (None, 5, 5),
        (int, 5, 5),
        (bool, True, True),
        (object, True, True),
        (dict, {"a": 1}, {"a": 1}),
        (Order, {"item": "x", "count": 2}, Order(item="x", count=2)),
    ],
)
def test_an_answer_of_the_wanted_type_is_given(kind: type | None, value: object, expected: object) -> None:
    assert check_answer(answer(value), kind) == expected


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, True, "must be int, not bool"),
        (int, "5", "must be int, not str"),
        (str, 5, "must be str, not int"),
        (list, ("a",), "must be list, not tuple"),
        (Order, 5, "must be Order, not int"),
        (Order, {"item": "hunter2", "count": "hunter2"}, "must be Order, not a mapping that does not fit it at count"),
    ],
)
def test_an_answer_of_another_type_is_refused_by_name(kind: type, value: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        check_answer(answer(value), kind, "q-1")

    assert "interrupt q-1" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_is_no_class_cannot_be_the_type_of_an_answer() -> None:
    wrong: list[Any] = [list[str], "int", int | str, 5]
    for kind in wrong:
        with pytest.raises(InvalidInput, match="must be a class"):
            check_answer(answer(5), kind)
        with pytest.raises(InvalidInput, match="must be a class"):
            replace(PAY, answer=kind)


def test_decisions_without_a_value_have_none_to_check() -> None:
    for kind in (DecisionKind.APPROVE, DecisionKind.REJECT, DecisionKind.DEFER):
        assert check_answer(Decision(kind=kind), int) is None


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (int, answer("ten"), "must be int, not str"),
        (int, answer(None), "must be int, not NoneType"),
        (int, Decision(kind=DecisionKind.APPROVE), "is a question, so 'approve' does not fit.*answer, reject, defer"),
        (int, Decision(kind=DecisionKind.MODIFY, value=10), "is a question, so 'modify' does not fit"),
        (Order, answer({"item": "hunter2"}), "must be Order, not a mapping without count"),
        (Order, answer({"item": 5, "count": 2}), "must be Order, not a mapping whose item is int, not str"),
        (Order, answer("hunter2"), "must be Order, not str"),
    ],
)
def test_a_wrong_answer_is_refused_where_it_is_given(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, kind: type, wrong: Decision, says: str
) -> None:
    how_many = replace(PAY, kind=InterruptKind.USER_REQUEST, answer=kind)
    asked = ask(thread, how_many, checkpoint)
    with pytest.raises(InvalidInput, match=says) as caught:
        thread.decide(asked, wrong, by="ann")

    assert "Nothing was decided" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert list(thread.interrupts()) == [asked]


def test_the_wanted_answer_is_stored_with_the_question(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    wanted: dict[Any, Any] = {
        object: {"type": "any"},
        int: {"type": "int"},
        Decimal: {"type": "decimal.Decimal"},
        Order: {
            "type": f"{Order.__module__}.Order",
            "required": ["item", "count"],
            "fields": {"item": "str", "count": "int"},
        },
        Careful: {"type": f"{Careful.__module__}.Careful"},
    }
    for kind, described in wanted.items():
        asked = ask(
            thread, replace(PAY, position=kind.__name__, kind=InterruptKind.USER_REQUEST, answer=kind), checkpoint
        )
        assert asked.interrupt.answer == described
        assert asked.choices == ("answer", "reject", "defer", "reroute")[: 3 if PAY.node is None else 4]


def test_a_wrong_answer_that_only_the_worker_notices_closes_the_question(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    """A decision is made once, so a run that needs another answer would else be stuck for ever."""
    how_many = replace(PAY, kind=InterruptKind.USER_REQUEST, answer=Order)
    first = ask(thread, how_many, checkpoint)
    thread.decide(first, "answer", by="ann", value={"item": "x", "count": "ten"})
    with pytest.raises(InvalidInput, match=f"{first.id} must be Order"):
        settle(thread, how_many, checkpoint)
    second = ask(thread, how_many, checkpoint)
    right = {"item": "x", "count": "10"}
    thread.decide(second, "answer", by="ann", value=right)

    assert second.id != first.id
    assert settle(thread, how_many, checkpoint) == settle(thread, how_many, checkpoint) == answer(right)


def test_an_approval_takes_no_answer(thread: backstay.Thread, checkpoint: backstay.Checkpoint) -> None:
    asked = ask(thread, PAY, checkpoint)
    with pytest.raises(InvalidInput, match=r"is an approval, so 'answer' does not fit.*approve, modify, reject, defer"):
        thread.decide(asked, "answer", by="ann", value=5)

    assert list(thread.interrupts()) == [asked]


@pytest.mark.parametrize("decision", ["reject", "defer"])
def test_who_is_asked_for_a_value_may_also_refuse(
    thread: backstay.Thread, checkpoint: backstay.Checkpoint, decision: str
) -> None:
    how_many = replace(PAY, answer=int)
    thread.decide(ask(thread, how_many, checkpoint), decision, by="ann")

    assert settle(thread, how_many, checkpoint) == Decision(kind=DecisionKind(decision))


def test_every_step_of_a_crash_leaves_a_question_that_can_be_settled(
    store: backstay.Store, thread: backstay.Thread, checkpoint: backstay.Checkpoint
) -> None:
    """Cut off after any of its calls to the store, settling again gives what it would have given."""

    def cut_everywhere() -> int:
        services, cursor = access_of(store).services, handle_of(thread).cursor
        return sum(
            dies_after(calls, store, lambda dying: question.settle(dying, services, cursor, checkpoint.id, PAY))
            for calls in range(1, 11)
        )

    cuts = cut_everywhere()
    asked = ask(thread, PAY, checkpoint)
    thread.decide(asked, "approve", by="ann")
    cuts += cut_everywhere()

    assert settle(thread, PAY, checkpoint) == Decision(kind=DecisionKind.APPROVE)
    assert list(thread.interrupts()) == []
    assert len(list(thread.interrupts(pending=False))) == 1
    assert cuts >= 4
