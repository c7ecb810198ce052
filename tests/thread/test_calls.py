"""Durable calls and effects of a turn: each has its own key, in the first run as in every later one."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import backstay
from backstay import durable
from backstay.errors import EffectChanged, EffectUnknown, EncodeError, InvalidInput, Rejected, StoreBusy
from backstay.pieces.body import Body, to_body
from backstay.retry import RetryPolicy
from backstay.thread import EffectRecord, EffectStatus, Loop, Outcome, Turn
from backstay.thread.access import access_of
from backstay.thread.calls import CallNames, ListDigests
from backstay.thread.effects import arguments_digest
from backstay.thread.store import Store
from support.meanwhile import Meanwhile

Turns = Callable[[Loop, Turn], None]
AT_ONCE = RetryPolicy(retries=2, first_s=0, on=(ValueError, TimeoutError))


class Died(BaseException):
    """Stands for a kill: nothing after it runs in this turn."""


class Tool:
    """A function that remembers its calls, and fails or dies where the test says so."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.calls: list[Any] = []
        self.errors = list(errors)

    def __call__(self, what: Any = None) -> str:
        self.calls.append(what)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return f"{what} {len(self.calls)}"


def run(thread: backstay.Thread, body: Turns, initial: Any = None) -> Loop:
    with thread.loop({"log": []} if initial is None else initial) as loop:
        for turn in loop:
            body(loop, turn)
            loop.finish()
    return loop


def dies(thread: backstay.Thread, body: Turns) -> None:
    """Run a turn that dies at its end."""

    def dying(loop: Loop, turn: Turn) -> None:
        body(loop, turn)
        raise Died

    with pytest.raises(Died):
        run(thread, dying)


def keys(thread: backstay.Thread) -> list[tuple[str, bool]]:
    return [(record.key.partition("/")[2].partition("/")[2], record.is_call) for record in thread.effects()]


# Calls ------------------------------------------------------------------------------------------------------------


def test_the_result_of_a_call_is_stored_and_replayed(thread: backstay.Thread) -> None:
    tool, found = Tool(), []

    def body(loop: Loop, turn: Turn) -> None:
        found.append(turn.call("model", tool, "hi"))

    dies(thread, body)
    run(thread, body)

    assert (found, tool.calls) == (["hi 1", "hi 1"], ["hi"])
    [record] = thread.effects()
    assert (record.status, record.is_call, record.result) == (EffectStatus.DONE, True, "hi 1")
    assert str(record).startswith("call ")


def test_a_call_that_died_is_made_again_and_nobody_is_asked(thread: backstay.Thread) -> None:
    tool = Tool(Died())

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.call("model", tool, "hi")])

    with pytest.raises(Died):
        run(thread, body)
    assert list(thread.effects()) == []

    assert run(thread, body).state["log"] == ["hi 2"]


def test_three_calls_of_one_name_are_three_calls(thread: backstay.Thread) -> None:
    tool, found = Tool(), []

    def body(loop: Loop, turn: Turn) -> None:
        found.append([turn.effect("tool", tool, "x") for _ in range(3)] + [turn.call("read", tool, n) for n in "ab"])

    dies(thread, body)
    run(thread, body)

    assert found[0] == found[1] == ["x 1", "x 2", "x 3", "a 4", "b 5"]
    assert keys(thread) == [
        ("tool", False),
        ("tool#2", False),
        ("tool#3", False),
        ("read", True),
        ("read#2", True),
    ]


def test_a_failed_effect_that_is_tried_again_is_not_another_one(thread: backstay.Thread) -> None:
    """Otherwise, after a restart, the first would succeed now, and the second would be done besides."""
    tool = Tool(ValueError())

    def body(loop: Loop, turn: Turn) -> None:
        for _ in range(2):
            try:
                turn.effect("pay", tool, 5)
                break
            except ValueError:
                pass

    dies(thread, body)
    run(thread, body)

    assert tool.calls == [5, 5]
    assert [(record.attempt, record.status) for record in thread.effects()] == [(2, "done")]


def test_another_effect_after_a_failed_one_is_not_its_second_attempt(thread: backstay.Thread) -> None:
    tool, found = Tool(ValueError()), []

    def body(loop: Loop, turn: Turn) -> None:
        results = []
        for item in "abc":
            try:
                results.append(turn.effect("tool", tool, item))
            except ValueError:
                results.append("failed")
        found.append(results)

    dies(thread, body)
    run(thread, body)

    assert found == [["failed", "b 2", "c 3"], ["a 4", "b 2", "c 3"]]


def test_an_unknown_effect_is_not_passed_by_calling_it_again(thread: backstay.Thread) -> None:
    tool = Tool(TimeoutError())

    def body(loop: Loop, turn: Turn) -> None:
        with pytest.raises(TimeoutError):
            turn.effect("pay", tool, 5)
        with pytest.raises(EffectUnknown):
            turn.effect("pay", tool, 5)

    run(thread, body)

    assert tool.calls == [5]


def test_a_changed_call_is_noticed(thread: backstay.Thread) -> None:
    what = ["a"]

    def body(loop: Loop, turn: Turn) -> None:
        turn.call("read", Tool(), what[0])

    dies(thread, body)
    what[0] = "b"
    with pytest.raises(EffectChanged, match=r"call .* was started before with other arguments"):
        run(thread, body)


def test_a_call_and_an_effect_do_not_share_a_key(thread: backstay.Thread) -> None:
    dies(thread, lambda loop, turn: turn.append(log=[turn.call("one", Tool(), "a")]))
    with pytest.raises(InvalidInput, match="durable call"):
        run(thread, lambda loop, turn: turn.append(log=[turn.effect("one", Tool(), "a")]))

    thread = thread.fork(thread.latest() or "", branch="other")
    dies(thread, lambda loop, turn: turn.append(log=[turn.effect("one", Tool(), "a")]))
    with pytest.raises(InvalidInput, match="key of an effect"):
        run(thread, lambda loop, turn: turn.append(log=[turn.call("one", Tool(), "a")]))


def test_a_result_of_a_call_that_cannot_be_stored_is_refused_with_its_path(thread: backstay.Thread) -> None:
    with pytest.raises(EncodeError, match=r"the result of call .* cannot be stored: result.client"):
        run(thread, lambda loop, turn: turn.append(log=[turn.call("read", lambda: {"client": object()})]))
    assert list(thread.effects()) == []


def test_calls_inside_a_call_have_names_inside_it(thread: backstay.Thread) -> None:
    """Once the outer result is stored, the inner calls are not made, and must not be missed by those that follow."""
    tool, found = Tool(), []

    def body(loop: Loop, turn: Turn) -> None:
        def plan() -> list[str]:
            return [turn.call("ask", tool, n) for n in "ab"]

        found.append([*turn.call("plan", plan), turn.call("ask", tool, "c")])

    dies(thread, body)
    run(thread, body)

    assert found[0] == found[1] == ["a 1", "b 2", "c 3"]
    assert [key for key, _ in keys(thread)] == ["plan/ask", "plan/ask#2", "plan", "ask"]


# Keys and options -------------------------------------------------------------------------------------------------


def test_a_key_names_a_call_wherever_it_is_made(thread: backstay.Thread) -> None:
    tool = Tool()
    found: list[dict[str, str]] = []

    def body(loop: Loop, turn: Turn) -> None:
        order = "ab" if not found else "ba"
        found.append({item: turn.call("read", tool, item, key=item) for item in order})
        assert turn.call("read", tool, "a", key="a") == found[-1]["a"]

    dies(thread, body)
    run(thread, body)

    assert found[0] == found[1]
    assert tool.calls == ["a", "b"]


def test_names_and_keys_are_never_mistaken_for_each_other() -> None:
    made = []
    names = CallNames()
    for name, key in [("a", None), ("a#2", None), ("a", None), ("a", 2), ("a", "2#1"), ("a#2", None), ("a", "#2")]:
        text, use = names.next(name, key, b"")
        made.append(text)
        use.is_done = True
    with pytest.raises(InvalidInput, match="separates names from keys"):
        names.next("a#=2", None, b"")
    with pytest.raises(InvalidInput, match="key must be"):
        names.next("a", 2.5, b"")  # type: ignore[arg-type]

    assert len(set(made)) == len(made)


def test_threads_side_by_side_need_keys(thread: backstay.Thread) -> None:
    tool, refused = Tool(), []
    both = threading.Barrier(2)

    def work(turn: Turn, key: int | None) -> None:
        both.wait()
        try:
            turn.call("tool", tool, "x", key=key)
        except InvalidInput as error:
            refused.append(str(error))
        both.wait()  # neither thread ends before the other has called

    def body(loop: Loop, turn: Turn) -> None:
        for keyed in (False, True):
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(functools.partial(work, turn), (0, 1) if keyed else (None, None)))

    run(thread, body)

    assert len(refused) == 1
    assert "side by side" in refused[0]
    assert "key=" in refused[0]


def test_an_option_that_could_be_meant_for_the_function_is_refused(thread: backstay.Thread) -> None:
    def fetch(url: str, timeout: float = 1.0) -> str:
        return f"{url} {timeout}"

    def body(loop: Loop, turn: Turn) -> None:
        with pytest.raises(InvalidInput, match=r"timeout= is an option of the call and also a parameter of fetch\(\)"):
            turn.call("get", fetch, "u", timeout=5)
        bound = functools.partial(fetch, timeout=9)
        assert turn.call("get", bound, "u", timeout=5) == "u 9"
        assert turn.call("get", durable.call(timeout=5)(fetch), "u") == "u 1.0"

    run(thread, body)


def test_arguments_called_name_fn_and_key_reach_the_function(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        assert turn.call("x", lambda **given: sorted(given), name=1, fn=2) == ["fn", "name"]

    run(thread, body)


def test_a_retried_call_is_made_again_until_it_succeeds(thread: backstay.Thread) -> None:
    calls, effects, stubborn = Tool(ValueError()), Tool(ValueError(), ValueError()), Tool(*[ValueError()] * 9)

    def body(loop: Loop, turn: Turn) -> None:
        turn.call("read", calls, 1, retry=AT_ONCE)
        turn.effect("pay", effects, 1, retry=AT_ONCE)
        with pytest.raises(ValueError):  # noqa: PT011  # the tool's own
            turn.effect("never", stubborn, 1, retry=AT_ONCE)

    run(thread, body)

    assert (len(calls.calls), len(effects.calls), len(stubborn.calls)) == (2, 3, 3)
    assert [record.attempt for record in thread.effects()] == [1, 3, 3]


def test_an_effect_with_an_unknown_outcome_is_not_retried_unless_it_is_idempotent(thread: backstay.Thread) -> None:
    careful, harmless = Tool(TimeoutError()), Tool(TimeoutError())

    def body(loop: Loop, turn: Turn) -> None:
        with pytest.raises(TimeoutError):
            turn.effect("pay", careful, 1, retry=AT_ONCE)
        turn.effect("put", harmless, 1, retry=AT_ONCE, idempotent=True)

    run(thread, body)

    assert (len(careful.calls), len(harmless.calls)) == (1, 2)


def test_an_effect_whose_receipt_cannot_be_stored_is_not_done_again(url: str) -> None:
    """The store is busy for a moment after the function has run: no policy makes that a reason to run it twice."""
    tool, every = Tool(), RetryPolicy(retries=3, first_s=0, on=(Exception,))
    with backstay.open(url) as plain:
        busy = Meanwhile(access_of(plain).store)

        def is_busy() -> None:
            raise StoreBusy("the store is locked")

        def pay(what: int) -> str:
            busy.before("put_record", is_busy)  # the receipt
            return tool(what)

        thread = Store(busy, access_of(plain).services).thread("t")
        with pytest.raises(StoreBusy):
            run(thread, lambda loop, turn: turn.append(log=[turn.effect("pay", pay, 5, retry=every)]))

        assert (tool.calls, busy.is_over) == ([5], True)
        assert [record.outcome_unknown for record in plain.thread("t").effects()] == [True]


def test_a_coroutine_function_is_refused_before_anything_is_stored(thread: backstay.Thread) -> None:
    async def ask() -> None: ...

    with pytest.raises(InvalidInput, match="must be awaited"):
        run(thread, lambda loop, turn: turn.append(log=[turn.effect("x", ask)]))
    assert list(thread.effects()) == []


def test_a_call_that_takes_too_long_is_left(thread: backstay.Thread) -> None:
    hangs = threading.Event()

    def body(loop: Loop, turn: Turn) -> None:
        with pytest.raises(TimeoutError, match="longer than"):
            turn.call("slow", lambda: hangs.wait(), timeout=0.01)
        with pytest.raises(TimeoutError):
            turn.effect("slow effect", lambda: hangs.wait(), timeout=0.01)
        with pytest.raises(EffectUnknown):
            turn.effect("slow effect", lambda: hangs.wait(), timeout=0.01)
        assert turn.call("fast", lambda: 5, timeout=60) == 5

    try:
        run(thread, body)
    finally:
        hangs.set()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"retry": 3}, "RetryPolicy"),
        ({"timeout": 0}, "above 0"),
        ({"timeout": True}, "above 0"),
        ({"on_unknown": "guess"}, "on_unknown"),
        ({"key": 1.5}, "key must be"),
    ],
)
def test_options_that_cannot_work_are_refused(thread: backstay.Thread, options: dict[str, Any], match: str) -> None:
    tool = Tool()
    with pytest.raises(InvalidInput, match=match):
        run(thread, lambda loop, turn: turn.append(log=[turn.effect("x", tool, **options)]))
    assert tool.calls == []


# Unknown outcomes -------------------------------------------------------------------------------------------------


def test_the_error_of_an_unknown_outcome_names_all_ways_out(thread: backstay.Thread) -> None:
    tool = Tool(TimeoutError())

    def body(loop: Loop, turn: Turn) -> None:
        with pytest.raises(TimeoutError):
            turn.effect("pay", tool, 5)
        turn.effect("pay", tool, 5)

    with pytest.raises(EffectUnknown) as caught:
        run(thread, body)
    for way in (
        'thread.settle(error.record, Outcome.done(result), by="your name")',
        'thread.settle(error.record, Outcome.not_done(), by="your name")',
        "reconcile=",
    ):
        assert way in str(caught.value)


@pytest.mark.parametrize("answer", ["approve", "modify", "reject"])
def test_a_loop_can_ask_a_person_about_an_unknown_outcome(thread: backstay.Thread, answer: str) -> None:
    tool = Tool(Died())

    def body(loop: Loop, turn: Turn) -> None:
        try:
            turn.append(log=[turn.effect("pay", tool, 5, on_unknown="ask")])
        except Rejected as refusal:
            turn.append(log=[refusal.reason])

    with pytest.raises(Died):
        run(thread, body)
    loop = run(thread, body)
    assert (loop.status, tool.calls) == ("interrupted", [5])
    [question] = thread.interrupts()
    assert question.interrupt.payload["attempt"] == 1

    details = {"approve": {}, "modify": {"value": "paid"}, "reject": {"reason": "no"}}[answer]
    thread.decide(question, answer, by="ann", **details)
    log = run(thread, body).state["log"]
    assert log == {"approve": ["5 2"], "modify": ["paid"], "reject": ["no"]}[answer]
    assert len(tool.calls) == (2 if answer == "approve" else 1)


def test_a_hook_comes_before_the_person(thread: backstay.Thread) -> None:
    tool = Tool(Died())

    def look(record: EffectRecord) -> Outcome:
        return Outcome.done("found")

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.effect("pay", tool, 5, on_unknown="ask", reconcile=look)])

    with pytest.raises(Died):
        run(thread, body)
    assert run(thread, body).state["log"] == ["found"]


# Digests ----------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_list_does_not_depend_on_how_it_was_computed() -> None:
    items = [{"n": n, "text": "x" * n} for n in range(100)]
    digests = ListDigests()
    whole = arguments_digest((items,), {"more": items})
    for settled in (0, 10, 10, 60, 100):
        known = functools.partial(digests.digest, "k", 1, settled=settled)
        assert whole == arguments_digest((items,), {"more": items}, known)
    grown = [*items, {"n": 100}]
    assert digests.digest("k", 1, grown, 101) == ListDigests().digest("k", 1, grown, 0)
    assert digests.digest("k", 2, items[:3], 3) == ListDigests().digest("k", 1, items[:3], 0)

    one = arguments_digest(([1, 2], [3]), {})
    assert one != arguments_digest(([1], [2, 3]), {})
    assert arguments_digest(([1],), {}) != arguments_digest(([True],), {})
    assert arguments_digest((object(),), {}) == b""


def test_the_arguments_of_a_call_are_hashed_from_where_the_last_one_stopped(
    thread: backstay.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call gets the whole history, and only its new messages are encoded for the comparison."""
    hashed = []

    def note(items: list[Any], path: str) -> Body:
        hashed.append(len(items))
        return to_body(items, path)

    monkeypatch.setattr("backstay.thread.calls.to_body", note)
    with thread.loop({"messages": list(range(500))}) as loop:
        for turn in loop:
            turn.call("model", len, turn.state["messages"])
            turn.append(messages=["reply"])
            turn.call("model", len, turn.state["messages"])
            if turn.iteration == 4:
                loop.finish()

    assert hashed == [500, 1, 1, 1, 1, 1, 1, 1]

    def call_and_die() -> None:
        with thread.loop({}, input={}) as loop:
            for turn in loop:
                turn.call("model", len, turn.state["messages"])
                raise Died

    with pytest.raises(Died):
        call_and_die()
    with thread.loop({}) as loop:  # a new process computes the same digest another way
        for turn in loop:
            turn.call("model", len, list(turn.state["messages"]))
            loop.finish()


# Decorators and clients -------------------------------------------------------------------------------------------


def test_a_decorated_function_is_a_call_in_a_turn_and_ordinary_elsewhere(thread: backstay.Thread) -> None:
    calls = []

    @durable.call
    def ask(text: str) -> str:
        """Ask the model."""
        calls.append(text)
        return f"{text} {len(calls)}"

    @durable.effect(name="mail", key=lambda to: to)
    def send(to: str) -> str:
        return ask(f"to {to}")

    found = []

    def body(loop: Loop, turn: Turn) -> None:
        found.append([ask("a"), ask("a"), send("ann"), send("ann")])

    dies(thread, body)
    run(thread, body)

    assert found[0] == found[1] == ["a 1", "a 2", "to ann 3", "to ann 3"]
    assert keys(thread) == [("ask", True), ("ask#2", True), ("mail#=ann", False), ("mail#=ann/ask", True)]
    assert (ask.name, ask.__doc__, ask("a")) == ("ask", "Ask the model.", "a 4")
    with pytest.raises(InvalidInput, match="no option 'retries'"):
        durable.call(retries=3)


def test_a_decorated_method_is_bound_to_its_object(thread: backstay.Thread) -> None:
    class Client:
        calls = 0

        @durable.call(timeout=60)
        def ask(self, text: str) -> str:
            self.calls += 1
            return text

    client = Client()
    for _ in range(2):
        dies(thread, lambda loop, turn: turn.append(log=[client.ask("hi")]))
    assert client.calls == 1


class Completions:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def create(self, model: str, *, timeout: float = 1.0) -> Any:
        self.calls.append(f"{model} {timeout}")
        return Answer(f"answer {len(self.calls)}")


class Answer:
    def __init__(self, text: str) -> None:
        self.text = text


class Chat:
    def __init__(self) -> None:
        self.completions = Completions()


class Client:
    url = "https://example.org"

    def __init__(self) -> None:
        self.chat = Chat()


def test_a_wrapped_client_needs_no_keys(thread: backstay.Thread) -> None:
    client, found = Client(), []

    def body(loop: Loop, turn: Turn) -> None:
        model = turn.wrap(client, result=lambda answer: answer.text)
        assert model.url == client.url
        assert repr(model.chat) == "<durable Client.chat>"
        found.append([model.chat.completions.create("m", timeout=9.0), model.chat.completions.create("m")])

    dies(thread, body)
    run(thread, body)

    assert found == [["answer 1", "answer 2"]] * 2
    assert client.chat.completions.calls == ["m 9.0", "m 1.0"]
    assert [key for key, _ in keys(thread)] == [
        "Client.chat.completions.create",
        "Client.chat.completions.create#2",
    ]


def test_a_wrapped_client_may_be_a_function_and_its_methods_effects(thread: backstay.Thread) -> None:
    tool = Tool(Died())

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.wrap(tool, effects=True, name="tool")("x")])

    with pytest.raises(Died):
        run(thread, body)
    with pytest.raises(EffectUnknown):
        run(thread, body)


# Event loops ------------------------------------------------------------------------------------------------------


def test_calls_of_an_event_loop_work_alike(tmp_path: Any) -> None:
    calls: list[str] = []

    async def ask(text: str) -> str:
        await asyncio.sleep(0)
        calls.append(text)
        return f"{text} {len(calls)}"

    decorated = durable.call(ask)

    async def turn_of(thread: backstay.AsyncThread, dies: bool) -> list[Any]:
        async with thread.loop({"log": []}) as loop:
            async for turn in loop:
                model = turn.wrap(ask, name="wrapped")
                found = [
                    await turn.call("ask", ask, "a"),
                    await turn.call("ask", ask, "a", retry=AT_ONCE, timeout=60),
                    await turn.call("plain", str.upper, "b", timeout=60),
                    await turn.effect("pay", ask, "c"),
                    await decorated("d"),
                    await model("e"),
                    *await asyncio.gather(*(turn.call("many", ask, n, key=n) for n in "xy")),
                ]
                with pytest.raises(InvalidInput, match="side by side"):
                    await asyncio.gather(*(turn.call("unkeyed", ask, n) for n in "xy"))
                with pytest.raises(TimeoutError):
                    await turn.call("slow", asyncio.Event().wait, timeout=0.01)
                if dies:
                    raise Died
                loop.finish(found=found)
        return found

    async def whole() -> tuple[list[Any], list[Any]]:
        async with await backstay.aopen(tmp_path / "a.db") as store:
            with pytest.raises(Died):
                await turn_of(store.thread("t"), True)
            before = list(calls)
            found = await turn_of(store.thread("t"), False)
            return found, calls[len(before) :]

    found, again = asyncio.run(whole())

    assert found[:6] == ["a 1", "a 2", "B", "c 3", "d 4", "e 5"]
    assert set(again) <= {"x", "y"}  # of the calls without keys: one was cancelled, or both ran to their end
