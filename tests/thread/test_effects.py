"""Effects: done once; replayed when done; never blindly done again when nobody knows."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NoReturn

import pytest

import backstay
from backstay.errors import EffectChanged, EffectUnknown, EncodeError, InvalidInput, StoreError
from backstay.model.runs import EffectRecord, EffectStatus, Outcome
from backstay.operations.ledger import KEY_LENGTH_MAX, NOT_DONE, record_of
from backstay.operations.records import PAGE_ROWS
from backstay.store.memory import MemoryStore
from backstay.store.records import Fence, Record
from backstay.thread.access import access_of
from backstay.thread.effects import UNKNOWN_ON, idempotency_key_of
from backstay.thread.store import make_services
from support.waiting import eventually, expire, taken_over

CALLERS = 8
RESULT = {"id": 7, "when": datetime(2026, 1, 1, tzinfo=UTC), "parts": ("a", b"\0", {1, 2}), "none": None}
SECRET = "sk-canary-value"


class Died(BaseException):
    """The process ends here, as far as the effect is concerned."""


class World:
    """What effects are done to: it counts them."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.error: BaseException | None = None

    def charge(self, amount: int = 1, *, to: str = "ann") -> dict[str, Any]:
        """Do it, then fail if told so."""
        self.done.append((amount, to))
        if self.error is not None:
            raise self.error
        return RESULT

    def refuse(self) -> NoReturn:
        raise AssertionError("it must not be done")


@pytest.fixture
def world() -> World:
    return World()


def died(thread: backstay.Thread, world: World, key: str = "charge") -> EffectRecord:
    """Leave an effect without a receipt, done once."""
    world.error = Died()
    with pytest.raises(Died):
        thread.effect(key, world.charge)
    world.error = None
    record = list(thread.effects())[-1]
    assert record.outcome_unknown
    return record


def stored(store: backstay.Store, thread: backstay.Thread, key: str = "charge") -> Record:
    row = access_of(store).store.record("effect", thread._cursor.branch, key)
    assert row is not None
    return row


def only(thread: backstay.Thread) -> EffectRecord:
    (record,) = thread.effects()
    return record


# Done -------------------------------------------------------------------------------------------------------------


def test_a_done_effect_is_replayed_and_not_done_again(
    store: backstay.Store, thread: backstay.Thread, world: World, clock: Any
) -> None:
    first = thread.effect("charge", world.charge, 5, to="bob")
    began = clock()
    clock.step(seconds=1)
    again = store.thread(thread.id).effect("charge", world.charge, 5, to="bob")
    record = only(thread)

    assert world.done == [(5, "bob")]
    assert first == again == record.result == RESULT
    assert (record.key, record.status, record.attempt, record.error) == ("charge", EffectStatus.DONE, 1, None)
    assert (record.thread_id, record.branch, record.scope, record.settled_by) == (thread.id, "main", "", None)
    assert (record.created_at, record.ended_at, record.outcome_unknown) == (began, began, False)
    assert pickle.loads(pickle.dumps(record)) == record
    assert "when" not in repr(record) + str(record)


def test_a_result_may_be_nothing(thread: backstay.Thread, world: World) -> None:
    calls: list[int] = []
    for _ in range(2):
        assert thread.effect("note", calls.append, 1) is None

    assert calls == [1]


def test_another_key_branch_scope_thread_or_namespace_is_another_effect(url: str) -> None:
    done: list[int] = []
    keys: set[str] = set()

    def charge(number: int, idempotency_key: str) -> int:
        done.append(number)
        keys.add(idempotency_key)
        return number

    with backstay.open(url) as store:
        other = store if url == "memory:" else backstay.open(url, namespace="other")
        places = [
            (store.thread("t"), "a"),
            (store.thread("t"), "b"),
            (store.thread("t", branch="side"), "a"),
            (store.thread("t", scope="sub"), "a"),
            (store.thread("u"), "a"),
            (other.thread("t" if other is not store else "v"), "a"),
        ]
        for _ in range(2):
            assert [place.effect(key, charge, n) for n, (place, key) in enumerate(places)] == list(range(6))
        other.close()

    assert done == list(range(6))
    assert len(keys) == 6


def test_an_effect_comes_before_the_first_save_and_makes_no_branch(
    store: backstay.Store, thread: backstay.Thread, world: World
) -> None:
    thread.effect("charge", world.charge)
    assert (thread.latest(), thread.branches()) == (None, [])
    thread.save({"n": 1})

    assert thread.effect("charge", world.charge) == RESULT
    assert len(world.done) == 1


def test_other_arguments_under_a_used_key_are_refused(thread: backstay.Thread, world: World) -> None:
    thread.effect("charge", world.charge, 5, to="bob")
    others: list[Callable[[], object]] = [
        lambda: thread.effect("charge", world.charge, 6, to="bob"),
        lambda: thread.effect("charge", world.charge, 5),
        lambda: thread.effect("charge", world.charge, 5.0, to="bob"),
        lambda: thread.effect("charge", world.charge, "bob", to=5),
    ]
    for call in others:
        with pytest.raises(EffectChanged, match="other arguments") as caught:
            call()
        assert isinstance(caught.value, backstay.Conflict)
        assert caught.value.record == caught.value.winner == only(thread)
        assert pickle.loads(pickle.dumps(caught.value)).record == caught.value.record

    assert thread.effect("charge", world.charge, 5, to="bob") == RESULT
    assert world.done == [(5, "bob")]


def test_the_order_of_keywords_and_of_sets_is_no_change(thread: backstay.Thread) -> None:
    def call(**given: Any) -> int:
        return len(given)

    thread.effect("call", call, a={"x", "y", "z"}, b=2)

    assert thread.effect("call", call, b=2, a={"z", "x", "y"}) == 2


def test_arguments_that_cannot_be_kept_are_not_compared(thread: backstay.Thread) -> None:
    for client in (object(), 5):
        assert thread.effect("call", lambda client: "done", client) == "done"
    thread.effect("other", lambda client: "done", 5)

    assert thread.effect("other", lambda client: "done", object()) == "done"


def test_a_function_that_asks_for_the_idempotency_key_is_given_it(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    expected = idempotency_key_of(thread._cursor, "k")
    seen: list[object] = []

    def plain(idempotency_key: str = "") -> None:
        seen.append(idempotency_key)

    def hidden(**kwargs: Any) -> None:
        seen.append(kwargs)

    class Client:
        def send(self, *, idempotency_key: str) -> None:
            seen.append(idempotency_key)

    functions: list[Callable[..., None]] = [
        plain,
        Client().send,
        functools.partial(plain),
        hidden,
        functools.partial(plain, idempotency_key="bound"),
    ]
    for number, function in enumerate(functions):
        store.thread(f"t{number}").effect("k", function)
    store.thread("u").effect("k", plain, "given")
    store.thread("v").effect("k", plain, idempotency_key="given")
    keys = [idempotency_key_of(store.thread(f"t{number}")._cursor, "k") for number in range(3)]

    assert seen == [*keys, {}, "bound", "given", "given"]
    assert expected.startswith("bs-")
    assert len(expected) == 3 + 32


def test_the_idempotency_key_never_changes() -> None:
    """Another version that made another one would let the other side do it twice: this value is for ever."""
    with backstay.open("memory:", namespace="shop") as store:
        cursor = store.thread("customer-42", branch="b", scope="s")._cursor

        assert idempotency_key_of(cursor, "charge") == "bs-963ab20a00f803478fbc8279050ffe97"


def test_a_function_gets_its_own_arguments_whatever_they_are_called(thread: backstay.Thread) -> None:
    def call(**given: Any) -> list[str]:
        return sorted(given)

    assert thread.effect("k", call, key=1, fn=2, self=3, args=4) == ["args", "fn", "key", "self"]


# Failed -----------------------------------------------------------------------------------------------------------


def test_a_failed_effect_is_tried_again_and_its_secrets_are_not_kept(
    store: backstay.Store, thread: backstay.Thread, world: World
) -> None:
    world.error = PermissionError(SECRET)
    with pytest.raises(PermissionError, match=SECRET) as caught:
        thread.effect("charge", world.charge, 1)
    failed = only(thread)
    assert caught.value is world.error
    assert (failed.status, failed.error, failed.attempt) == (EffectStatus.FAILED, "PermissionError", 1)
    assert SECRET not in repr(stored(store, thread))
    world.error = None

    assert thread.effect("charge", world.charge, 2) == RESULT, "it was not done, so other arguments are fine"
    assert (only(thread).attempt, only(thread).owner != failed.owner) == (2, True)
    assert len(world.done) == 2


@pytest.mark.parametrize("error", [ConnectionRefusedError(), StopIteration(), TypeError(), EffectUnknown("", record=1)])
def test_what_surely_was_not_done_has_failed(thread: backstay.Thread, world: World, error: Exception) -> None:
    world.error = error
    with pytest.raises((type(error), RuntimeError)):  # Python lets no StopIteration out of a generator
        thread.effect("charge", world.charge)

    assert (only(thread).status, only(thread).error) == (EffectStatus.FAILED, type(error).__name__)


def test_effects_inside_effects_are_each_done_once(thread: backstay.Thread, world: World) -> None:
    def outer(fails: list[int]) -> dict[str, Any]:
        result = thread.effect("inner", world.charge)
        if fails:
            raise ZeroDivisionError
        return result

    with pytest.raises(ZeroDivisionError):
        thread.effect("outer", outer, [1])

    assert thread.effect("outer", outer, []) == RESULT
    assert len(world.done) == 1


# Unknown ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [*UNKNOWN_ON, KeyboardInterrupt, Died], ids=lambda error: error.__name__)
def test_when_nobody_knows_it_is_not_done_again(
    thread: backstay.Thread, world: World, error: type[BaseException]
) -> None:
    world.error = error("the answer got lost")
    with pytest.raises(error):
        thread.effect("charge", world.charge)
    world.error = None
    for _ in range(2):
        with pytest.raises(EffectUnknown, match=r"thread\.settle\(error\.record") as caught:
            thread.effect("charge", world.charge)

    assert caught.value.record == only(thread)
    assert caught.value.record.outcome_unknown
    assert pickle.loads(pickle.dumps(caught.value)).record == caught.value.record
    assert len(world.done) == 1


def test_an_idempotent_effect_is_done_again_under_the_same_key(thread: backstay.Thread) -> None:
    keys: list[str] = []

    def charge(amount: int, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        if len(keys) < 3:
            raise TimeoutError
        return "charged"

    for _ in range(2):
        with pytest.raises(TimeoutError):
            thread.effect("charge", charge, 5, idempotent=True)
    with pytest.raises(EffectChanged):
        thread.effect("charge", charge, 6, idempotent=True)

    assert thread.effect("charge", charge, 5, idempotent=True) == "charged"
    assert keys == [idempotency_key_of(thread._cursor, "charge")] * 3
    assert (only(thread).attempt, only(thread).idempotency_key) == (3, keys[0])


def test_a_hook_that_finds_it_done_gives_its_result_once_and_for_all(thread: backstay.Thread, world: World) -> None:
    record = died(thread, world)
    asked: list[EffectRecord] = []

    def look(unknown: EffectRecord) -> Outcome:
        asked.append(unknown)
        return Outcome.done({"found": True})

    for _ in range(2):
        assert thread.effect("charge", world.charge, reconcile=look) == {"found": True}

    assert asked == [record]
    assert (only(thread).settled_by, only(thread).owner, len(world.done)) == ("reconcile", record.owner, 1)


def test_a_hook_that_finds_it_not_done_lets_it_be_done(thread: backstay.Thread, world: World) -> None:
    died(thread, world)

    assert thread.effect("charge", world.charge, reconcile=lambda _: Outcome.not_done()) == RESULT
    assert (only(thread).attempt, only(thread).settled_by, len(world.done)) == (2, None, 2)


def test_a_hook_that_does_not_know_or_fails_changes_nothing(thread: backstay.Thread, world: World) -> None:
    record = died(thread, world)
    wrong: Any = lambda _: True  # noqa: E731  # what a hook may not answer
    for hook, error in (
        (lambda _: Outcome.unknown(), EffectUnknown),
        (wrong, InvalidInput),
        (lambda _: Outcome.done(object()), EncodeError),
        (lambda _: world.refuse(), AssertionError),
    ):
        with pytest.raises(error):
            thread.effect("charge", world.charge, reconcile=hook)

    assert only(thread) == record
    assert len(world.done) == 1


def test_a_hook_is_asked_about_nothing_that_is_known(thread: backstay.Thread, world: World) -> None:
    for _ in range(2):
        assert thread.effect("charge", world.charge, reconcile=lambda _: world.refuse()) == RESULT


# Settling ---------------------------------------------------------------------------------------------------------


def test_a_person_settles_an_effect_as_done(thread: backstay.Thread, world: World, clock: Any) -> None:
    record = died(thread, world)
    clock.step(hours=1)
    settled = thread.settle(record, Outcome.done({"id": 9}), by="ann")

    assert settled == replace(record, status=EffectStatus.DONE, result={"id": 9}, settled_by="ann", ended_at=clock())
    assert thread.settle(record, Outcome.done({"id": 9}), by="ann") == settled
    assert thread.effect("charge", world.charge) == {"id": 9}
    assert len(world.done) == 1


def test_a_person_settles_an_effect_as_not_done(thread: backstay.Thread, world: World) -> None:
    record = died(thread, world)
    settled = thread.settle(record, Outcome.not_done(), by="ann")
    assert (settled.status, settled.error, settled.settled_by) == (EffectStatus.FAILED, NOT_DONE, "ann")

    assert thread.effect("charge", world.charge) == RESULT
    assert (only(thread).attempt, only(thread).settled_by) == (2, None)


def test_an_effect_is_settled_once(store: backstay.Store, thread: backstay.Thread, world: World) -> None:
    record = died(thread, world)
    first = thread.settle(record, Outcome.done(1), by="ann")
    for outcome, by in ((Outcome.done(1), "bob"), (Outcome.done(True), "ann"), (Outcome.not_done(), "ann")):
        with pytest.raises(backstay.Conflict) as caught:
            store.thread(thread.id, branch="side").settle(record, outcome, by=by)
        assert caught.value.winner == first

    assert only(thread) == first


def test_only_what_was_shown_is_settled(store: backstay.Store, thread: backstay.Thread, world: World) -> None:
    record = died(thread, world)
    world.error = Died()
    with pytest.raises(Died):
        thread.effect("charge", world.charge, idempotent=True)
    second = only(thread)
    with pytest.raises(backstay.Conflict) as caught:
        thread.settle(record, Outcome.not_done(), by="ann")
    assert caught.value.winner == second
    wrong: Any = "charge"
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (InvalidInput, lambda: thread.settle(wrong, Outcome.not_done(), by="ann")),
        (InvalidInput, lambda: thread.settle(second, wrong, by="ann")),
        (InvalidInput, lambda: thread.settle(second, Outcome.unknown(), by="ann")),
        (InvalidInput, lambda: thread.settle(second, Outcome.not_done(), by="")),
        (InvalidInput, lambda: store.thread("another").settle(second, Outcome.not_done(), by="ann")),
        (EncodeError, lambda: thread.settle(second, Outcome.done(object()), by="ann")),
        (backstay.NotFound, lambda: thread.settle(replace(second, key="x"), Outcome.not_done(), by="ann")),
        (backstay.NotFound, lambda: thread.settle(replace(second, branch="x"), Outcome.not_done(), by="ann")),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()

    assert only(thread) == second


@pytest.mark.parametrize("done", [True, False])
def test_what_was_settled_while_it_was_being_done_counts_or_is_told(thread: backstay.Thread, done: bool) -> None:
    def charge() -> str:
        (record,) = thread.effects()
        thread.settle(record, Outcome.done("settled") if done else Outcome.not_done(), by="ann")
        return "charged"

    if done:
        assert thread.effect("charge", charge) == thread.effect("charge", charge) == "settled"
    else:
        with pytest.raises(backstay.Conflict, match="settled as lost") as caught:
            thread.effect("charge", charge)
        assert caught.value.winner == only(thread)


# Results that cannot be kept --------------------------------------------------------------------------------------


def test_a_result_that_cannot_be_kept_does_not_let_it_be_done_again(thread: backstay.Thread) -> None:
    done: list[int] = []

    def charge() -> dict[str, object]:
        done.append(1)
        return {"client": object()}

    for _ in range(2):
        with pytest.raises(EncodeError, match=r"was done, but its result cannot be stored: result\.client"):
            thread.effect("charge", charge, idempotent=True, reconcile=lambda _: Outcome.not_done())
    record = only(thread)

    assert done == [1]
    assert (record.status, record.result) == (EffectStatus.DONE, None)
    assert "result.client" in str(record.error)


def test_a_registered_class_comes_back_as_itself(thread: backstay.Thread) -> None:
    @backstay.register(name=f"test_effects.Receipt {id(thread)}")
    @dataclass
    class Receipt:
        number: int

    for _ in range(2):
        assert thread.effect("charge", Receipt, 7) == Receipt(7)


# Leases -----------------------------------------------------------------------------------------------------------


def test_while_a_lease_runs_only_its_holder_does_effects(
    store: backstay.Store, thread: backstay.Thread, world: World
) -> None:
    other = store.thread(thread.id)
    with thread.lease():
        with pytest.raises(backstay.Fenced):
            other.effect("charge", world.charge)
        assert thread.effect("charge", world.charge) == RESULT
        with pytest.raises(backstay.Fenced):
            other.effect("charge", world.charge, reconcile=lambda _: world.refuse())

    assert other.effect("charge", world.charge) == RESULT
    assert len(world.done) == 1


def test_who_lost_the_lease_begins_nothing_but_its_receipt_is_kept(
    store: backstay.Store, thread: backstay.Thread, world: World
) -> None:
    other = store.thread(thread.id)
    lease = thread.lease(ttl=60, heartbeat=False).__enter__()

    def charge() -> str:
        expire(lease)
        with taken_over(other), pytest.raises(EffectUnknown):
            other.effect("charge", world.refuse)
        return "charged"

    assert thread.effect("charge", charge) == "charged"
    with taken_over(other):
        assert other.effect("charge", world.refuse) == "charged"
        with pytest.raises(backstay.Fenced):
            thread.effect("another", world.charge)
        assert lease.lost
    assert world.done == []


def test_a_handle_that_saw_the_branch_before_a_lease_is_fenced_as_its_save_would_be(
    store: backstay.Store, thread: backstay.Thread, world: World
) -> None:
    thread.save({"n": 1})
    with store.thread(thread.id).lease():
        pass
    with pytest.raises(backstay.Fenced):
        thread.effect("charge", world.charge)
    thread.latest()

    assert thread.effect("charge", world.charge) == RESULT


# Many at once -----------------------------------------------------------------------------------------------------


def test_of_many_callers_at_once_one_does_it_and_the_others_are_told(store: backstay.Store) -> None:
    started, ended = threading.Event(), threading.Event()
    ready = threading.Barrier(CALLERS)
    done: list[int] = []

    def charge(number: int) -> str:
        done.append(number)
        started.set()
        assert ended.wait(60)
        return "charged"

    def call(number: int) -> object:
        ready.wait()
        try:
            return store.thread("t").effect("charge", charge, number)
        except EffectUnknown as error:
            return error.record.outcome_unknown

    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(call, number) for number in range(CALLERS)]
        assert started.wait(60)
        eventually(lambda: sum(each.done() for each in calls) == CALLERS - 1)
        ended.set()
        answers = [each.result() for each in calls]

    assert len(done) == 1
    assert sorted(map(str, answers)) == ["True"] * (CALLERS - 1) + ["charged"]


# Lists, deletes, damage -------------------------------------------------------------------------------------------


def test_the_ledger_is_read_page_by_page(store: backstay.Store, thread: backstay.Thread) -> None:
    names = [f"key {number}" for number in range(PAGE_ROWS + 1)]
    for name in names:
        thread.effect(name, str, name)
    store.thread("another").effect("key", str)

    assert [record.key for record in thread.effects()] == names
    assert [record.result for record in thread.effects()] == names


def test_effects_go_with_their_thread_and_with_everything(store: backstay.Store, world: World) -> None:
    threads = [store.thread(name) for name in ("a", "b", "c")]
    for thread in threads:
        thread.effect("charge", world.charge)
    threads[1].save({"n": 1})
    threads[0].delete()
    assert [len(list(thread.effects())) for thread in threads] == [0, 1, 1]
    store.delete_all()
    assert [len(list(thread.effects())) for thread in threads] == [0, 0, 0]

    threads[2].effect("charge", world.charge)
    assert len(world.done) == 4


def test_an_effect_whose_thread_goes_while_it_is_done_says_that_it_was_done(thread: backstay.Thread) -> None:
    with pytest.raises(backstay.NotFound, match="was done"):
        thread.effect("charge", lambda: thread.delete() and None)


@pytest.mark.parametrize("status", list(EffectStatus))
def test_what_was_changed_in_the_store_is_detected(
    store: backstay.Store, thread: backstay.Thread, world: World, status: EffectStatus
) -> None:
    died(thread, world)
    if status is not EffectStatus.INTENDED:
        outcome = Outcome.done("x") if status is EffectStatus.DONE else Outcome.not_done()
        thread.settle(only(thread), outcome, by="ann")
    row = stored(store, thread)
    assert record_of(row).status is status
    body = row.body
    changes: list[dict[str, Any]] = [
        {"branch": row.branch._replace(**{part: "else"})} for part in ("namespace", "thread", "scope", "name")
    ]
    changes += [{"key": "else"}, {"kind": "interrupt"}, {"version": row.version + 1}, {"version": 0}]
    changes += [{"open": not row.open}, {"checkpoint": ""}, {"checkpoint": "else"}, {"body": b""}]
    changes += [{"body": body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]} for at in range(len(body))]
    changes += [{"body": body + b"x"}, {"body": body[:-1] if body else b"x"}]
    for change in changes:
        with pytest.raises(backstay.Corrupted, match="does not"):
            record_of(replace(row, **change))


def test_a_damaged_effect_is_neither_done_nor_replayed(world: World) -> None:
    backend = MemoryStore()
    thread = backstay.Store(backend, make_services("", None)).thread("t")
    died(thread, world)
    (row,) = backend._tables.records
    backend._tables.records.put(replace(row, open=False))
    with pytest.raises(backstay.Corrupted):
        thread.effect("charge", world.charge, idempotent=True)

    assert len(world.done) == 1


def test_what_cannot_be_an_effect_is_refused_before_anything(
    store: backstay.Store, thread: backstay.Thread, world: World
) -> None:
    async def coroutine() -> None:
        world.refuse()

    async def hook(_: EffectRecord) -> Outcome:
        world.refuse()

    wrong: Any = 1
    keys: list[Any] = ["", "k" * (KEY_LENGTH_MAX + 1), 5, None, b"k", "a\0b", "\ud800", ["k"], EffectStatus.DONE]
    calls: list[Callable[[], object]] = [functools.partial(thread.effect, key, world.charge) for key in keys]
    calls += [
        lambda: thread.effect("k", wrong),
        lambda: thread.effect("k", coroutine),
        lambda: thread.effect("k", world.charge, reconcile=hook),
        lambda: thread.effect("k", world.charge, reconcile=wrong),
        lambda: thread.effect("k", world.charge, idempotent=wrong),
    ]
    for call in calls:
        with pytest.raises(InvalidInput):
            call()
    assert (world.done, list(thread.effects())) == ([], [])

    assert thread.effect("\N{GRINNING FACE}" * KEY_LENGTH_MAX, world.charge) == RESULT


def test_a_plain_function_that_gives_a_coroutine_was_not_done(thread: backstay.Thread) -> None:
    async def charge() -> None:
        raise AssertionError

    def call(function: Callable[[], Any]) -> Any:
        return function()

    with pytest.raises(InvalidInput, match="must be awaited"):
        thread.effect("charge", functools.partial(call, charge))

    assert only(thread).status is EffectStatus.FAILED


def test_a_receipt_that_cannot_be_written_leaves_it_unknown(world: World) -> None:
    class Full(MemoryStore):
        def put_record(self, record: Record, fence: Fence | None = None, run: Record | None = None) -> Record:
            if not record.open:
                raise StoreError("no")
            return super().put_record(record, fence, run)

    thread = backstay.Store(Full(), make_services("", None)).thread("t")
    for error in (None, ValueError()):
        world.error = error
        with pytest.raises(StoreError) as caught:
            thread.effect(f"charge {error}", world.charge)
        assert caught.value.__context__ is error
        with pytest.raises(EffectUnknown):
            thread.effect(f"charge {error}", world.charge)
