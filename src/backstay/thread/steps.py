"""One pair of drivers for everything that calls the user's own code between calls of the store.

Such a function is a generator of *steps*: functions without arguments, whose answer it is sent. The user's function may
be a coroutine function, and so may a step on a store of an event loop be; ``arun_steps`` awaits what can be awaited.
Nothing is locked between steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")

Steps = Generator[Callable[[], Any], Any, T]


def run_steps(steps: Steps[T], refusal: Callable[[], Exception]) -> T:
    """Take all steps here and now; a step that would have to be awaited is refused."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
                if inspect.isawaitable(answer):
                    if inspect.iscoroutine(answer):
                        answer.close()  # nothing of it was done yet
                    raise refusal()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def arun_steps(steps: Steps[T]) -> T:
    """Take all steps, and await those that can be awaited."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
                if inspect.isawaitable(answer):
                    answer = await answer
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
