"""With a thread, attempts, values, incidents and decisions survive the process. Each test makes new recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import EffectUnknown, InvalidInput, NotFound, Unrecovered
from backstay.model.decision import Decision, DecisionKind
from backstay.model.runs import Outcome
from backstay.operations.interrupts import InterruptRecord
from backstay.retry import (
    ErrorCategory,
    ErrorRecovery,
    FallbackStrategy,
    Incident,
    RecoveryAction,
    RecoveryLayer,
    RecoveryResult,
    RetryPolicy,
    ThreadCache,
)


@pytest.fixture
def store(tmp_path: Path, clock: Any) -> Iterator[backstay.Store]:
    with backstay.open(str(tmp_path / "store.db"), clock=clock) as opened:
        yield opened
        assert opened.check()


@pytest.fixture
def thread(store: backstay.Store) -> backstay.Thread:
    thread = store.thread("t")
    thread.save({"secret": "hunter2"})
    return thread


class Service:
    """A service that fails until ``error`` is None, and counts its calls."""

    def __init__(self, error: type[BaseException] = ConnectionRefusedError) -> None:
        self.calls: list[int] = []
        self.error: type[BaseException] | None = error

    def __call__(self, attempt: Any) -> str:
        self.calls.append(attempt.number)
        if self.error is not None:
            raise self.error("hunter2")
        return "answer"


def execute(thread: backstay.Thread, service: Any, retries: int = 1, **options: Any) -> RecoveryResult[str]:
    """Execute as a new process would: with nothing but the thread."""
    asked = {name: options.pop(name) for name in ("idempotent", "reconcile") if name in options}
    options = {"sleep": lambda seconds: None, **options}
    return ErrorRecovery(RetryPolicy(retries), thread=thread, **options).execute(service, key="call", **asked)


def inbox(store: backstay.Store) -> InterruptRecord:
    (shown,) = store.interrupts()
    return shown


def decide(store: backstay.Store, action: RecoveryAction) -> None:
    shown = inbox(store)
    store.thread(shown.thread_id).decide(shown, action.decision(), by="ann")


def test_a_finished_operation_is_not_repeated(thread: backstay.Thread) -> None:
    service = Service()
    service.error = None
    first, second = execute(thread, service), execute(thread, service)

    assert (first.value, first.replayed, first.attempts) == ("answer", False, 1)
    assert (second.value, second.replayed, second.attempts) == ("answer", True, 1)
    assert service.calls == [1]


def test_a_recovery_counts_once(thread: backstay.Thread) -> None:
    calls: list[int] = []

    def flaky() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionRefusedError
        return "answer"

    recovery = ErrorRecovery(RetryPolicy(first_s=0), thread=thread)
    results = [recovery.execute(flaky, key="call") for _ in range(3)]

    assert [each.layer for each in results] == [RecoveryLayer.AUTOMATIC] * 3
    assert (recovery.statistics.executions, recovery.statistics.auto_recovered, len(calls)) == (3, 1, 2)


def test_a_new_process_continues_the_count_and_the_wait(thread: backstay.Thread, clock: Any) -> None:
    """The first process ends in the wait after its second attempt."""

    class Ends(BaseException):
        pass

    def sleep(seconds: float) -> None:
        if len(service.calls) == 2:
            raise Ends

    service = Service()
    with pytest.raises(Ends):
        execute(thread, service, retries=3, sleep=sleep)
    clock.step(seconds=1.5)  # of about 2
    waits: list[float] = []
    result = execute(thread, service, retries=3, sleep=waits.append)

    assert service.calls == [1, 2, 3, 4]
    assert result.attempts == 4
    assert 0.3 <= waits[0] <= 0.7
    assert 3.6 <= waits[1] <= 4.4


def test_what_nothing_helped_waits_in_the_inbox_with_everything_but_values(
    store: backstay.Store, thread: backstay.Thread, clock: Any
) -> None:
    began = clock.moment
    service = Service()
    result = execute(thread, service, sleep=lambda seconds: clock.step(seconds=5), config={"model": "hunter2"})
    shown = inbox(store)

    assert (result.success, result.waiting, result.interrupt) == (False, True, shown)
    assert (shown.thread_id, shown.checkpoint_id) == ("t", thread.history().__next__().id)
    incident = Incident.from_plain(shown.interrupt.payload)
    assert incident.failure.category is ErrorCategory.TRANSIENT
    assert (incident.operation, incident.failure.type, incident.attempts) == ("call", "ConnectionRefusedError", 2)
    assert (incident.failed_at - incident.began_at).total_seconds() == 5
    assert incident.began_at == began
    assert [str(action) for action in incident.actions] == ["retry", "skip", "abort", "modify_config model"]
    assert "hunter2" not in repr(shown.interrupt)
    with pytest.raises(ConnectionRefusedError):
        result.unwrap()


def test_before_a_decision_nothing_is_retried_and_nothing_asked_twice(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    service = Service()
    execute(thread, service)
    service.error = None
    again = execute(thread, service)

    assert (again.waiting, again.attempts, again.category) == (True, 2, ErrorCategory.TRANSIENT)
    assert (service.calls, again.interrupt) == ([1, 2], inbox(store))
    with pytest.raises(Unrecovered) as raised:
        again.unwrap()
    assert raised.value.interrupt == inbox(store)


def test_a_decision_to_retry_gives_all_attempts_again(store: backstay.Store, thread: backstay.Thread) -> None:
    service = Service()
    execute(thread, service)
    decide(store, RecoveryAction.retry())
    assert execute(thread, service).waiting  # it failed again: the next question
    assert service.calls == [1, 2, 3, 4]
    decide(store, RecoveryAction.retry())
    service.error = None
    result = execute(thread, service)

    assert (result.value, result.layer, result.attempts) == ("answer", RecoveryLayer.USER_INTERVENTION, 5)
    assert list(store.interrupts()) == []


@pytest.mark.parametrize("runs", [1, 2], ids=["once", "again after a crash"])
def test_decisions_are_carried_out_by_whoever_comes_next(
    store: backstay.Store, thread: backstay.Thread, runs: int
) -> None:
    service = Service()
    elsewhere: list[str] = []

    def backup(where: str) -> str:
        elsewhere.append(where)
        return f"from {where}"

    fallback = FallbackStrategy.backup_service("eu", backup, automatic=False)

    def after(action: RecoveryAction, name: str) -> RecoveryResult[str]:
        other = store.thread(name)
        other.save({})
        execute(other, service, fallback=fallback)
        decide(store, action)
        return [execute(other, service, fallback=fallback) for _ in range(runs)][-1]

    skipped = after(RecoveryAction.skip(), "a")
    assert (skipped.success, skipped.skipped, skipped.value) == (True, True, None)
    aborted = after(RecoveryAction.abort(), "b")
    assert (aborted.success, aborted.waiting, aborted.category) == (False, False, ErrorCategory.TRANSIENT)
    with pytest.raises(Unrecovered):
        aborted.unwrap()
    switched = after(RecoveryAction.switch_to_backup("eu"), "c")
    assert (switched.value, switched.layer) == ("from eu", RecoveryLayer.USER_INTERVENTION)
    assert (elsewhere, service.calls) == (["eu"], [1, 2] * 3)


def test_a_changed_setting_stays_changed(store: backstay.Store, thread: backstay.Thread) -> None:
    used: list[str] = []

    def call(attempt: Any) -> str:
        used.append(attempt.config["model"])
        raise ConnectionRefusedError

    for decision in (RecoveryAction.modify_config("model", "small"), RecoveryAction.retry(), None):
        execute(thread, call, retries=0, config={"model": "large"})
        if decision is not None:
            decide(store, decision)

    assert used == ["large", "small", "small"]


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Decision(kind=DecisionKind.DEFER), ""),
        (RecoveryAction.switch_to_backup("nowhere").decision(), "switch_to_backup nowhere was not offered"),
        (Decision(kind=DecisionKind.MODIFY, value={"action": "explode"}), "is not an action"),
        (Decision(kind=DecisionKind.MODIFY, value=7), "the answer is not an action"),
    ],
    ids=["deferred", "not offered", "unknown", "nonsense"],
)
def test_an_answer_that_decides_nothing_is_followed_by_another_question(
    store: backstay.Store, thread: backstay.Thread, decision: Decision, said: str
) -> None:
    service = Service()
    execute(thread, service)
    first = inbox(store)
    thread.decide(first, decision, by="ann")
    again = execute(thread, service)

    assert again.interrupt == inbox(store)
    assert inbox(store).id != first.id
    assert said in inbox(store).interrupt.prompt
    assert service.calls == [1, 2]
    decide(store, RecoveryAction.skip())
    assert execute(thread, service).skipped


def test_a_fallback_that_was_done_is_not_done_again(thread: backstay.Thread) -> None:
    service = Service(ValueError)
    calls: list[int] = []

    def instead() -> str:
        calls.append(1)
        return "instead"

    results = [execute(thread, service, fallback=FallbackStrategy.call(instead)) for _ in range(2)]

    assert [(each.value, each.layer, each.replayed) for each in results] == [
        ("instead", RecoveryLayer.FALLBACK, False),
        ("instead", RecoveryLayer.FALLBACK, True),
    ]
    assert (service.calls, calls) == ([1], [1])


# Unknown outcomes ------------------------------------------------------------------------------------------------


def test_an_unknown_outcome_is_neither_retried_nor_passed_to_a_fallback(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    service = Service(TimeoutError)
    calls: list[str] = []
    backup = FallbackStrategy.backup_service("eu", calls.append)
    result = execute(thread, service, retries=3, fallback=backup)

    assert isinstance(result.error, TimeoutError)
    assert (service.calls, calls, result.waiting) == ([1], [], True)
    assert "switch_to_backup eu" not in inbox(store).interrupt.prompt
    assert "It may have been done: find out first" in inbox(store).interrupt.prompt


def test_a_person_is_asked_about_the_unknown_outcome_of_a_dead_process(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    service = Service(KeyboardInterrupt)
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        execute(thread, service, retries=0)
    service.error = None
    result = execute(thread, service, retries=0, fallback=FallbackStrategy.backup_service("eu", calls.append))

    assert isinstance(result.error, EffectUnknown)
    assert (service.calls, calls, result.interrupt) == ([1], [], inbox(store))


def test_after_a_fallback_with_an_unknown_outcome_no_other_fallback_runs(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    def lost(service: str) -> None:
        raise ConnectionResetError

    calls: list[str] = []
    strategies = [FallbackStrategy.backup_service("eu", lost), FallbackStrategy.backup_service("us", calls.append)]
    results = [execute(thread, Service(), fallback=strategies) for _ in range(2)]

    assert [each.waiting for each in results] == [True, True]
    assert (calls, "switch" in inbox(store).interrupt.prompt) == ([], False)


def test_a_decision_to_retry_settles_the_effect_as_not_done(store: backstay.Store, thread: backstay.Thread) -> None:
    service = Service(TimeoutError)
    execute(thread, service)
    decide(store, RecoveryAction.retry())
    service.error = None

    assert execute(thread, service).unwrap() == "answer"
    assert service.calls == [1, 2]


def test_a_retry_does_not_settle_an_attempt_that_started_after_it(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    service = Service(TimeoutError)
    execute(thread, service)
    decide(store, RecoveryAction.retry())
    service.error = KeyboardInterrupt  # the process ends in the middle of it
    with pytest.raises(KeyboardInterrupt):
        execute(thread, service)
    service.error = None
    result = execute(thread, service)

    assert (result.waiting, service.calls) == (True, [1, 2])
    assert len(list(store.interrupts(pending=False))) == 2


def test_an_effect_settled_as_done_after_an_abort_gives_its_value(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    service = Service(TimeoutError)
    execute(thread, service)
    decide(store, RecoveryAction.abort())
    assert not execute(thread, service).success
    (unknown,) = thread.effects()
    thread.settle(unknown, Outcome.done("it was"), by="bob")

    assert execute(thread, service).value == "it was"


def test_a_callback_that_says_retry_settles_it_too(thread: backstay.Thread) -> None:
    service = Service(TimeoutError)

    def person(text: str, actions: list[RecoveryAction]) -> RecoveryAction:
        service.error = None
        return actions[0]

    assert execute(thread, service, on_exhausted=person).unwrap() == "answer"


def test_an_idempotent_operation_is_retried_after_a_timeout(thread: backstay.Thread) -> None:
    service = Service(TimeoutError)
    result = execute(thread, service, retries=2, idempotent=True)

    assert (service.calls, result.attempts, result.waiting) == ([1, 2, 3], 3, True)
    assert isinstance(result.error, TimeoutError)


def test_a_reconcile_hook_decides_an_unknown_outcome(thread: backstay.Thread) -> None:
    service = Service(TimeoutError)
    execute(thread, service, retries=0, on_exhausted=lambda text, actions: RecoveryAction.abort())
    result = execute(thread, service, retries=0, reconcile=lambda record: Outcome.done("found"))

    assert (result.value, service.calls) == ("found", [1])


def test_each_attempt_has_the_same_idempotency_key(thread: backstay.Thread) -> None:
    keys: list[str] = []

    def call(attempt: Any) -> None:
        keys.append(attempt.idempotency_key)
        raise ConnectionRefusedError

    execute(thread, call)
    assert len(keys) == 2
    assert len(set(keys)) == 1


# A cache in a thread ----------------------------------------------------------------------------------------------


def test_a_cache_in_a_thread_outlives_the_process_and_takes_two_writers(store: backstay.Store, clock: Any) -> None:
    mine, other = ThreadCache(store.thread("cache")), ThreadCache(store.thread("cache"))
    mine.put("a", {"v": 1})
    other.put("b", 2)
    mine.put("a", {"v": 3})  # though the head is another's by now
    clock.step(seconds=30)

    def result(max_age: float) -> RecoveryResult[Any]:
        strategy = FallbackStrategy.use_cache(max_age, "a", cache=ThreadCache(store.thread("cache")))
        return ErrorRecovery(RetryPolicy(0), fallback=strategy).execute(lambda: 1 // 0)

    assert (result(30).value, result(30).cached_age_s) == ({"v": 3}, 30.0)
    assert not result(29.9).success
    assert ThreadCache(store.thread("cache")).get("b").value == 2


# Wrong arguments ------------------------------------------------------------------------------------------------


def test_an_operation_in_a_thread_needs_a_key_and_a_checkpoint_before_it_runs(store: backstay.Store) -> None:
    service = Service()
    with pytest.raises(InvalidInput, match="key"):
        ErrorRecovery(thread=store.thread("t")).execute(service)
    with pytest.raises(NotFound, match="no checkpoint"):
        execute(store.thread("t"), service)
    assert service.calls == []
