"""Odd values in every argument of every public verb: an error of ours or an answer, and an error stores nothing.

The table is made of the signatures, so a new verb or argument is tested by itself; it only needs a value that works.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import backstay
from backstay.errors import BackstayError
from backstay.model.checkpoint import CheckpointFields, Write
from backstay.model.runs import Outcome
from backstay.thread.lease import Lease
from backstay.thread.loop import Loop
from support.running import Show
from support.thread.stored_runs import WORK


class Text(str):
    """A text that would come back as another type."""


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**53,
    2**63,
    10**30,
    -(10**30),
    0.5,
    1e300,
    float("nan"),
    float("-inf"),
    "",
    "nul\0",
    "\ud800",
    "x" * 100_000,
    Text("t"),
    b"bytes",
    [],
    [None],
    ["\ud800"],
    {},
    {1: 2},
    {"\ud800": 1},
    {"k" * 5000: 1},
    {"k": 10**30},
    {"k": float("nan")},
    object(),
    datetime(2026, 1, 1),
    datetime.max.replace(tzinfo=UTC),
    Path("x"),
    print,
    int,
]

FOR_STORES: list[Any] = [2**53, 2**63, -(10**30), 10**30, float("nan"), "nul\0", "\ud800", {"k": 10**30}]
"""What could get as far as a store: numbers and texts that some databases cannot hold."""

Samples = dict[str, Any]


def prepared(store: backstay.Store) -> Samples:
    """Return for each name of an argument a value that works."""
    thread = store.thread("t")
    first = thread.save({"n": 1, "log": ["a"]}, tags=["good"], metadata={"k": 1})
    thread.append({"log": ["b"]})
    asked = thread.interrupt(first, kind="userrequest", prompt="?")
    unknown = Outcome.not_done()
    with contextlib.suppress(TimeoutError):
        thread.effect("lost", lost)
    (effect,) = thread.effects()
    return {
        "checkpoint": first,
        "interrupt": asked,
        "effect": effect,
        "outcome": unknown,
        "decision": "approve",
        "by": "me",
        "keep": backstay.Keep(last=100),
        "thread_id": "t",
        "id": "no such id",
        "tokens": 1,
        "state": {"n": 2},
        "initial": {"n": 1},
        "step": 1,
        "writes": [Write("task", 0, "channel", 1)],
        "names": "tag",
        "key": "log",
        "n": 1,
        "fn": print,
        "args": 1,
        "tool": "tool",
        "payload": 1,
        "keys": "n",
        "url": "memory:",
        "name": "paid",
        "graphs": [WORK],
    }


def lost() -> None:
    raise TimeoutError


def everything(store: backstay.Store) -> list[Any]:
    """Return what shows whether a verb has stored something: what is newest, and what is changed in its place."""
    thread = store.thread("t")
    found: list[Any] = [meta.id for meta in store.threads()]
    found += [(meta.id, meta.seq, meta.tags) for meta in (*thread.history(branch="*", limit=2), thread.at(1)) if meta]
    found += [branch.key.name for branch in thread.branches()]
    found += [(each.key, each.status, each.attempt) for each in thread.effects()]
    found += [(each.id, repr(each.decision), each.consumed_at) for each in store.interrupts(pending=False)]
    found += [(each.id, each.status, each.attempts) for each in store.runs()]
    return found


def arguments(call: Callable[..., Any]) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the arguments of a verb; those of a description under their own names."""
    for name, parameter in inspect.signature(call).parameters.items():
        if name == "self":
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and name == "notes":
            for note in CheckpointFields.__annotations__:
                yield note, parameter
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield name, parameter


def called(call: Callable[..., Any], samples: Samples, changed: str | None = None, odd: Any = None) -> Any:
    """Call a verb with values that work, but for one argument."""
    positional: list[Any] = []
    named: dict[str, Any] = {"branch": str(uuid4())} if call.__name__ == "fork" else {}
    for name, parameter in arguments(call):
        is_needed = parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        if name != changed and not is_needed:
            continue
        assert name == changed or name in samples, f"say in prepared() what works for {name!r} of {call}"
        value = odd if name == changed else samples[name]
        if is_needed and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return used(call(*positional, **named))


def used(answer: Any) -> Any:
    """Use what a verb gave, as its caller would."""
    if isinstance(answer, Lease | Loop):
        with answer:
            pass
    elif isinstance(answer, Iterator):
        return list(answer)
    return answer


def verbs(*owners: object) -> dict[str, Callable[..., Any]]:
    """Return the public verbs of objects that take anything."""
    found = {}
    for owner in owners:
        for name in dir(type(owner)):
            call = getattr(type(owner), name)
            if not name.startswith("_") and callable(call) and dict(arguments(call)):
                found[f"{type(owner).__name__}.{name}"] = getattr(owner, name)
    return found


def offences(
    store: backstay.Store, found: dict[str, Callable[..., Any]], odds: list[Any]
) -> tuple[list[str], int, int]:
    """Return what went wrong, how many calls were made and how many of them were refused."""
    samples = prepared(store)
    wrong: list[str] = []
    tried = refused = 0
    before = everything(store)
    for verb, method in found.items():
        for name, _ in arguments(method):
            is_changed = False
            for odd in odds:
                tried += 1
                place = f"{verb}({name}={odd!r:.30})"
                try:
                    called(method, samples, name, odd)
                    is_changed = True
                except BackstayError as error:
                    refused += 1
                    if len(str(error)) > 2000:
                        wrong.append(f"{place}: a message of {len(str(error))} characters")
                except Exception as error:
                    wrong.append(f"{place}: {error!r:.200}")
            now = everything(store)
            if now != before and not is_changed:
                wrong.append(f"{verb}({name}=…): always refused, and yet something was stored")
            before = now
    return wrong, tried, refused


def test_the_values_that_work_do() -> None:
    """Otherwise a verb would refuse an odd value for the sake of another argument."""
    with backstay.open("memory:") as store:
        names = set(verbs(store, store.thread("t")))
    # Nothing is decided that could be consumed, there are no files, and no run is under way.
    names -= {"Thread.consume", "Store.backup", "Thread.request_pause", "Thread.send"}
    for name in names:
        with backstay.open("memory:") as store:
            samples = prepared(store)
            called(verbs(store, store.thread("t"))[name], samples)


def test_every_argument_of_a_store_and_a_thread_refuses_odd_values_with_an_error_of_ours(
    store: backstay.Store, show: Show
) -> None:
    odds = ODD if store.url == "memory:" else FOR_STORES
    wrong, tried, refused = offences(store, verbs(store, store.thread("t")), odds)
    show("odd arguments tried, refused", (tried, refused))

    assert not wrong, "\n".join(wrong)
    assert refused > tried / 2


def test_the_awaited_twins_take_the_same_arguments() -> None:
    """What they do with them is the same function; see also the next test."""
    twins: dict[type, type] = {backstay.AsyncStore: backstay.Store, backstay.AsyncThread: backstay.Thread}
    for theirs, ours in twins.items():
        for name in dir(ours):
            if not name.startswith("_") and callable(getattr(ours, name)):
                taken = [[each for each, _ in arguments(getattr(owner, name))] for owner in (theirs, ours)]
                assert taken[0] == taken[1], name


async def awaited(method: Callable[..., Any], samples: Samples, name: str, odd: Any) -> None:
    answer = called(method, samples, name, odd)
    if inspect.isawaitable(answer):
        answer = await answer
    if isinstance(answer, AsyncIterator):
        _ = [each async for each in answer]
    if hasattr(answer, "__aenter__"):
        async with answer:
            pass


def test_the_awaited_twins_refuse_the_same() -> None:
    async def tried() -> list[str]:
        wrong = []
        async with await backstay.aopen("memory:") as store:
            thread = store.thread("t")
            await thread.save({"n": 1})
            with backstay.open("memory:") as other:
                samples = prepared(other)
            for verb, method in verbs(store, thread).items():
                for name, _ in arguments(method):
                    for odd in ODD:
                        try:
                            await awaited(method, samples, name, odd)
                        except BackstayError:
                            pass
                        except Exception as error:
                            wrong.append(f"{verb}({name}={odd!r:.30}): {error!r:.200}")
        return wrong

    wrong = asyncio.run(tried())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("call", [backstay.open, backstay.Keep, Write], ids=lambda call: call.__name__)
def test_odd_values_outside_of_a_store(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples: Samples = {"url": "memory:", "task_id": "t", "index": 0, "channel": "c", "value": 1}
    wrong = []
    for name, _ in arguments(call):
        for odd in ODD:
            try:
                made = called(call, samples, name, odd)
                if isinstance(made, Write):
                    with backstay.open("memory:") as store:
                        store.thread("t").write("x", [made])
                elif isinstance(made, backstay.Keep):
                    with backstay.open("memory:") as store:
                        store.thread("t").save({})
                        store.prune(made)
                elif isinstance(made, backstay.Store):
                    made.close()
            except BackstayError:
                pass
            except Exception as error:
                wrong.append(f"{name}={odd!r:.30}: {error!r:.200}")

    assert not wrong, "\n".join(wrong)


def test_odd_values_in_a_turn_of_a_loop() -> None:
    wrong: list[str] = []
    with backstay.open("memory:") as store, store.thread("t").loop({"n": 1, "log": []}) as loop:
        for turn in loop:
            # They would stop the loop, or run something.
            left = {"Turn.approve", "Turn.ask", "Turn.wait_for", "Turn.call", "Turn.effect", "Turn.wrap"}
            for verb, method in verbs(turn).items():
                for name, _ in arguments(method) if verb not in left else ():
                    wrong += refusals(verb, method, name)
            loop.finish()

    assert not wrong, "\n".join(wrong)


def refusals(verb: str, method: Callable[..., Any], name: str) -> list[str]:
    """Return which odd values of an argument gave an error that is not ours."""
    wrong = []
    for odd in ODD:
        try:
            called(method, {"keys": "n"}, name, odd)
        except BackstayError:
            pass
        except Exception as error:
            wrong.append(f"{verb}({name}={odd!r:.30}): {error!r:.200}")
    return wrong
