"""The three layers: retries, fallbacks, a person; and the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import Conflict, Corrupted, Fenced, InvalidInput, OutcomeUnknown, Rejected
from backstay.retry import (
    ErrorCategory,
    ErrorRecovery,
    FallbackStrategy,
    MemoryCache,
    RecoveryAction,
    RecoveryLayer,
    RetryPolicy,
)
from backstay.retry.execution import CHOICES_MAX

Clock = Any


class Operation:
    """Fails with the errors it is given, one a call, and then returns how often it was called."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.calls


def never(*_: Any) -> Any:
    pytest.fail("this must not be called")  # no ``Exception``: it passes through


def recovering(retries: int = 3, **options: Any) -> tuple[ErrorRecovery, list[float]]:
    waits: list[float] = []
    return ErrorRecovery(RetryPolicy(retries), sleep=waits.append, **options), waits


# Layer 1 ----------------------------------------------------------------------------------------------------------


def test_the_value_of_a_success_comes_back_and_nothing_was_recovered() -> None:
    recovery, waits = recovering(fallback=FallbackStrategy.call(never), on_exhausted=never)
    result = recovery.execute(lambda: {"answer": 42})

    assert (result.success, result.value, result.unwrap()) == (True, {"answer": 42}, {"answer": 42})
    assert (result.layer, result.attempts, result.error, result.suggested_action) == (None, 1, None, None)
    assert (recovery.statistics.executions, recovery.statistics.total_errors) == (1, 0)
    assert recovery.statistics.auto_recovered == recovery.statistics.unrecovered == 0
    assert waits == []


def test_what_may_pass_is_tried_again_after_growing_waits() -> None:
    recovery, waits = recovering()
    operation = Operation(TimeoutError("slow"), MemoryError())
    result = recovery.execute_with_recovery(operation)

    assert (result.value, result.attempts, operation.calls) == (3, 3, 3)
    assert (result.layer, result.category) == (RecoveryLayer.AUTOMATIC, ErrorCategory.RESOURCE)
    assert 0.9 <= waits[0] <= 1.1
    assert 1.8 <= waits[1] <= 2.2
    assert (recovery.statistics.total_errors, recovery.statistics.auto_recovered) == (2, 1)


def test_when_nothing_helps_the_result_says_so_and_unwrap_raises_the_very_error() -> None:
    recovery, waits = recovering()
    last = TimeoutError("number 4")
    result = recovery.execute(Operation(*[TimeoutError()] * 3, last))

    assert (result.success, result.attempts, len(waits)) == (False, 4, 3)
    assert (result.layer, result.error, result.error_message) == (RecoveryLayer.AUTOMATIC, last, "number 4")
    assert result.suggested_action == ErrorCategory.TRANSIENT.hint
    assert (recovery.statistics.total_errors, recovery.statistics.unrecovered) == (4, 1)
    with pytest.raises(TimeoutError) as raised:
        result.unwrap()
    assert raised.value is last


def test_what_does_not_pass_is_not_tried_again_and_comes_with_a_hint() -> None:
    recovery, waits = recovering()
    operation = Operation(PermissionError(13, "Permission denied"))
    result = recovery.execute(operation)

    assert (operation.calls, waits, result.success) == (1, [], False)
    assert (result.category, result.suggested_action) == (
        ErrorCategory.CONFIGURATION,
        ErrorCategory.CONFIGURATION.hint,
    )


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=lambda s: type(s).__name__)
def test_exits_and_interrupts_pass_through(stop: BaseException) -> None:
    recovery, waits = recovering(fallback=FallbackStrategy.call(never), on_exhausted=never)
    operation = Operation(TimeoutError(), stop)

    with pytest.raises(type(stop)) as raised:
        recovery.execute(operation)
    assert raised.value is stop
    assert (operation.calls, len(waits)) == (2, 1)


@pytest.mark.parametrize(
    "error", [Rejected("no"), Conflict("moved"), Fenced("lost", epoch=1, current=2)], ids=lambda e: type(e).__name__
)
def test_an_unsafe_error_starts_no_fallback(error: Exception) -> None:
    recovery, _ = recovering(fallback=FallbackStrategy.call(never), on_exhausted=never)
    result = recovery.execute(Operation(error))

    assert (result.success, result.error, result.attempts) == (False, error, 1)


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), Corrupted("bad")], ids=lambda e: type(e).__name__)
def test_a_person_is_asked_about_an_unsafe_error_and_nothing_else_runs(error: Exception) -> None:
    person = Person(RecoveryAction.abort())
    recovery, _ = recovering(fallback=FallbackStrategy.call(never), on_exhausted=person)
    result = recovery.execute(Operation(error))

    assert (result.error, result.attempts, len(person.asked)) == (error, 1, 1)


# Layer 2 ----------------------------------------------------------------------------------------------------------


def test_each_fallback_really_does_what_it_says() -> None:
    done: list[str] = []

    def do(what: str) -> str:
        done.append(what)
        return f"did {what}"

    def outcome(strategy: FallbackStrategy) -> tuple[Any, ...]:
        result = recovering(0, fallback=strategy)[0].execute(Operation(TimeoutError()))
        assert isinstance(result.error, TimeoutError)  # never forgotten
        return result.success, result.value, result.layer, result.fallback, result.skipped

    layer = RecoveryLayer.FALLBACK
    assert outcome(FallbackStrategy.call(lambda: do("it"), name="other")) == (
        True,
        "did it",
        layer,
        "call other",
        False,
    )
    assert outcome(FallbackStrategy.backup_service("eu", do)) == (True, "did eu", layer, "backup eu", False)
    assert outcome(FallbackStrategy.simplified("short", do)) == (True, "did short", layer, "simplified short", False)
    assert outcome(FallbackStrategy.skip("nothing")) == (True, "nothing", layer, "skip", True)
    assert outcome(FallbackStrategy.none())[:2] == (False, None)
    assert done == ["it", "eu", "short"]


def test_a_fallback_that_fails_is_no_success_and_the_next_one_is_tried() -> None:
    broken, refused = OSError("backup is down"), ValueError("too simple")
    strategies = [
        FallbackStrategy.backup_service("eu", Raises(broken)),
        FallbackStrategy.use_cache(3600),
        FallbackStrategy.simplified("short", Raises(refused)),
    ]
    recovery, _ = recovering(0, fallback=strategies)
    original = TimeoutError()
    result = recovery.execute(Operation(original))

    assert (result.success, result.layer, result.fallback) == (False, RecoveryLayer.FALLBACK, None)
    assert (result.error, result.fallback_errors) == (original, (broken, refused))
    assert (recovery.statistics.total_errors, recovery.statistics.fallback_recovered) == (3, 0)

    recovery, _ = recovering(0, fallback=[*strategies, FallbackStrategy.skip()])
    assert recovery.execute(Operation(original)).skipped
    assert recovery.statistics.fallback_recovered == 1


class Raises:
    """A function that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, *_: Any) -> Any:
        raise self._error


def test_a_cache_gives_what_an_earlier_success_put_in_and_says_how_old_it_is() -> None:
    now = [100.0]
    cache = MemoryCache(clock=lambda: now[0])
    recovery, _ = recovering(0, fallback=FallbackStrategy.use_cache(60, "rates", cache=cache))
    assert not recovery.execute(Operation(TimeoutError())).success  # nothing was put in yet

    fresh = {"eur": [1]}
    assert recovery.execute(lambda: fresh).unwrap() is fresh
    fresh["eur"].append(2)  # what the caller does with it later is not in the cache
    now[0] += 60
    found = recovery.execute(Operation(TimeoutError()))
    assert (found.value, found.cached_age_s, found.fallback) == ({"eur": [1]}, 60.0, "cache rates")
    now[0] += 0.5
    assert not recovery.execute(Operation(TimeoutError())).success  # too old
    assert cache.get("other") is None


def test_a_value_that_cannot_be_cached_is_returned_and_the_error_reported() -> None:
    class Broken(MemoryCache):
        def put(self, key: str, value: Any) -> None:
            raise OSError(28, "No space left on device")

    recovery, _ = recovering(0, fallback=FallbackStrategy.use_cache(60, cache=Broken()))
    result = recovery.execute(lambda: 7)

    assert result.unwrap() == 7
    assert isinstance(result.cache_error, OSError)


# Layer 3 ----------------------------------------------------------------------------------------------------------


class Person:
    """Answers with the actions they are given, one a question, and remembers what they were asked."""

    def __init__(self, *answers: RecoveryAction | None) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, list[RecoveryAction]]] = []

    def __call__(self, text: str, actions: list[RecoveryAction]) -> RecoveryAction | None:
        self.asked.append((text, actions))
        return self._answers.pop(0)


def test_a_person_who_says_retry_is_obeyed() -> None:
    person = Person(RecoveryAction.retry())
    recovery, _ = recovering(1, on_exhausted=person)
    operation = Operation(*[TimeoutError("hunter2")] * 3)  # two attempts fail; of the next two the second succeeds
    result = recovery.execute(operation, name="fetch rates")

    assert (result.value, result.attempts) == (4, 4)
    assert (result.layer, result.action) == (RecoveryLayer.USER_INTERVENTION, RecoveryAction.retry())
    text, actions = person.asked[0]
    assert text.startswith("fetch rates was tried 2 times and failed: TimeoutError (transient). Wait a while")
    assert "hunter2" not in text
    assert [str(action) for action in actions] == ["retry", "skip", "abort"]
    counts = recovery.statistics
    assert (counts.user_interventions, counts.user_recovered, counts.unrecovered, counts.total_errors) == (1, 1, 0, 3)


def test_a_person_who_says_skip_or_abort_is_obeyed() -> None:
    skipped = recovering(0, on_exhausted=Person(RecoveryAction.skip()))[0].execute(Operation(TimeoutError()))
    assert (skipped.success, skipped.skipped, skipped.value) == (True, True, None)

    error = TimeoutError()
    recovery, _ = recovering(0, on_exhausted=Person(RecoveryAction.abort()))
    aborted = recovery.execute(Operation(error))
    assert (aborted.success, aborted.action, aborted.error) == (False, RecoveryAction.abort(), error)
    assert aborted.layer is RecoveryLayer.USER_INTERVENTION
    assert (recovery.statistics.user_interventions, recovery.statistics.unrecovered) == (1, 1)


def test_a_person_can_change_a_setting_and_it_is_tried_with_that() -> None:
    person = Person(RecoveryAction.modify_config("model", "small"))
    used: list[tuple[int, str]] = []

    def call(attempt: Any) -> str:
        used.append((attempt.number, attempt.config["model"]))
        if attempt.config["model"] == "large":
            raise PermissionError
        return "done"

    recovery, _ = recovering(2, on_exhausted=person, config={"model": "large"})
    assert recovery.execute(call).unwrap() == "done"
    assert used == [(1, "large"), (2, "small")]
    offered = person.asked[0][1]
    assert RecoveryAction.modify_config("model", "large") in offered

    assert (
        recovering(0, config={"model": "large"}, on_exhausted=(deaf := Person(None)))[0]
        .execute(Operation(OSError()))
        .error
    )
    assert [str(action) for action in deaf.asked[0][1]] == ["retry", "skip", "abort"]  # it would not see the setting


def test_a_person_can_switch_to_a_service_that_is_not_used_without_asking() -> None:
    dear = FallbackStrategy.backup_service("dear", lambda service: f"from {service}", automatic=False)
    person = Person(RecoveryAction.switch_to_backup("dear"))
    result = recovering(0, on_exhausted=person, fallback=dear)[0].execute(Operation(TimeoutError()))

    assert (result.value, result.layer) == ("from dear", RecoveryLayer.USER_INTERVENTION)
    assert RecoveryAction.switch_to_backup("dear") in person.asked[0][1]
    assert not recovering(0, fallback=dear)[0].execute(Operation(TimeoutError())).success


def test_a_choice_that_did_not_help_is_followed_by_the_next_question() -> None:
    person = Person(RecoveryAction.switch_to_backup("eu"), RecoveryAction.retry(), RecoveryAction.abort())
    broken = FallbackStrategy.backup_service("eu", Raises(OSError()), automatic=False)
    operation = Operation(*[TimeoutError()] * 9)
    recovery, _ = recovering(0, on_exhausted=person, fallback=broken)
    result = recovery.execute(operation)

    assert (len(person.asked), operation.calls, result.attempts) == (3, 2, 2)
    assert (recovery.statistics.user_interventions, recovery.statistics.total_errors) == (3, 3)


def test_without_anybody_to_ask_the_result_says_what_could_be_done() -> None:
    for options in ({}, {"on_exhausted": Person(None)}):
        result = recovering(0, **options)[0].execute(Operation(TimeoutError()))
        assert (result.success, result.waiting, result.action) == (False, False, None)
        assert result.suggested_action == ErrorCategory.TRANSIENT.hint
        assert result.incident is not None
        assert RecoveryAction.retry() in result.incident.actions


def test_a_callback_that_always_retries_is_stopped() -> None:
    operation = Operation(*[TimeoutError()] * 1000)
    result = recovering(0, on_exhausted=lambda text, actions: actions[0])[0].execute(operation)

    assert (result.success, operation.calls) == (False, CHOICES_MAX + 1)


@pytest.mark.parametrize(
    "answer", ["retry", RecoveryAction.switch_to_backup("eu"), RecoveryAction.modify_config("a", 1)], ids=str
)
def test_an_answer_that_was_not_offered_is_refused_and_the_error_not_lost(answer: Any) -> None:
    error = TimeoutError()
    with pytest.raises(InvalidInput) as refused:
        recovering(0, on_exhausted=lambda text, actions: answer)[0].execute(Operation(error))
    assert refused.value.__cause__ is error


# Wrong arguments ------------------------------------------------------------------------------------------------


async def later() -> int:
    return 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ErrorRecovery("policy"),  # type: ignore[arg-type]
        lambda: ErrorRecovery(fallback=[1]),  # type: ignore[list-item]
        lambda: ErrorRecovery(fallback=[FallbackStrategy.call(never), FallbackStrategy.call(never)]),
        lambda: ErrorRecovery(on_exhausted="ann"),  # type: ignore[arg-type]
        lambda: ErrorRecovery(thread="t"),  # type: ignore[arg-type]
        lambda: ErrorRecovery().execute("call"),  # type: ignore[arg-type]
        lambda: ErrorRecovery(RetryPolicy(0)).execute(later).unwrap(),
        lambda: FallbackStrategy.call("f"),  # type: ignore[arg-type]
        lambda: FallbackStrategy.call("f", name="named"),  # type: ignore[arg-type]
        lambda: FallbackStrategy.use_cache(-1),
        lambda: FallbackStrategy.use_cache(1, cache={}),  # type: ignore[arg-type]
        lambda: FallbackStrategy.backup_service("", never),
        lambda: RecoveryAction("explode"),  # type: ignore[arg-type]
        lambda: RecoveryAction.modify_config("", 1),
        lambda: RecoveryAction.from_plain({"action": "skip", "service": "eu"}),
        lambda: RecoveryAction.from_plain(["skip"]),
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        wrong()


def test_the_names_of_the_source_are_there() -> None:
    names = [
        "ErrorCategory",
        "ErrorRecovery",
        "FallbackStrategy",
        "RecoveryAction",
        "RecoveryLayer",
        "RecoveryResult",
        "RetryPolicy",
    ]

    assert set(names) <= set(backstay.retry.__all__)
    assert backstay.retry.__all__ == sorted(backstay.retry.__all__)
    assert all(hasattr(backstay.retry, name) for name in backstay.retry.__all__)


def test_there_is_one_class_of_this_name_in_the_package() -> None:
    root = Path(backstay.__file__).parent
    files = [path for path in root.rglob("*.py") if "class RecoveryResult" in path.read_text(encoding="utf-8")]
    named = [path.relative_to(root).as_posix() for path in files]

    assert named == ["retry/execution.py"]
