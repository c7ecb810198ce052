"""Run a coroutine to its end in a program without an event loop, and call plain functions in between.

``asyncio.run`` calls everything inside its event loop: a plain function could neither use ``asyncio.run`` itself nor be
interrupted. Here the loop is suspended while a plain function runs: no loop runs in the thread then, and a signal
handler that raises, such as that of Ctrl-C, raises inside the function. While the loop runs, Ctrl-C cancels the run
first, so that it ends between two of its steps. In all cases the run ends, releases its lease, and then the caller gets
the exception.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import Any, TypeVar

from backstay.engine.control import Ask, Rerouted
from backstay.errors import InvalidInput

T = TypeVar("T")

SIGNAL_CHECK_S = 0.2
"""How long the handler of a signal may wait for an idle event loop, in the rare case that the loop missed it."""

_NOT_AN_INTERRUPT = (Exception, Ask, Rerouted, asyncio.CancelledError, BaseExceptionGroup)
"""A function ends by one of these in a normal run; a group may hold a question. All others are meant for the caller."""


def run_to_end(run: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own."""
    # Not in a ``try``: an interrupt where its ``except`` starts leaves the error behind as the handled one, for good.
    if asyncio._get_running_loop() is not None:
        run.close()
        raise InvalidInput("an event loop is running here", hint="Await run, resume or replay instead of …_sync")
    # With a factory, the runner leaves the thread's current event loop as it is.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        driver = _Driver(runner.get_loop(), run)
        try:
            driver.listen()
            driver.drive()
        finally:
            driver.ignore()
        result: T = driver.outcome()
        return result


def call_outside(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function from a coroutine of ``run_to_end``, while no event loop runs in this thread."""
    return _current.get().call(function, arguments)


class _Driver:
    """One run in its own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, run: Coroutine[Any, Any, Any]) -> None:
        context = copy_context()
        context.run(_current.set, self)
        self._loop = loop
        self._loop.set_exception_handler(self.on_callback_error)
        self._main: asyncio.Task[Any] = loop.create_task(run, context=context)
        self._is_outside = False  # a plain function runs, so an interrupt may raise at once
        self._is_interrupted = False  # by Ctrl-C
        self._raised: BaseException | None = None  # by a signal handler or a function; ends the run
        self._handler_before: Any = None

    # Ctrl-C -------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Handle Ctrl-C, unless the program has a handler of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._look_up()
        handler = signal.getsignal(signal.SIGINT)
        # The handler of another run is installed if this run was started by one of its plain functions.
        if handler is signal.default_int_handler or isinstance(getattr(handler, "__self__", None), _Driver):
            self._handler_before = handler
            signal.signal(signal.SIGINT, self._on_interrupt)

    def ignore(self) -> None:
        """Restore the handler of Ctrl-C, unless a node has installed another one."""
        if self._handler_before is not None and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._handler_before)

    def _look_up(self) -> None:
        """Wake the loop now and then: a signal that came just before it waits is noticed only when it wakes up."""
        self._loop.call_later(SIGNAL_CHECK_S, self._look_up)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_outside or self._is_interrupted or self._main.done():
            raise KeyboardInterrupt
        self._is_interrupted = True
        self._main.cancel()
        self._loop.call_soon_threadsafe(lambda: None)  # wake up the loop if it waits

    # The loop -----------------------------------------------------------------------------------------------------

    def drive(self) -> None:
        """Run the event loop until the run is over. The second exception that comes before that leaves at once."""
        while not self._main.done():
            try:
                self._loop.run_until_complete(self._main)
            except BaseException as error:
                if self._main.done():
                    return
                if self._raised is not None:
                    raise
                self._stop(error)  # a signal handler raised it in the loop's own code, or in another task

    def outcome(self) -> Any:
        """Return the result of the run, or raise the exception that ended it."""
        ended = None if self._main.cancelled() else self._main.exception()
        if self._raised is not None:
            raise self._raised
        if self._is_interrupted:
            raise KeyboardInterrupt
        if ended is not None:
            raise ended
        return self._main.result()

    def _stop(self, error: BaseException) -> None:
        """End the run by a cancellation, and remember the exception for the caller."""
        self._raised = self._raised or error
        self._main.cancel()

    def on_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception that a callback of the loop raised."""
        error = context.get("exception")
        if "handle" in context and error is not None and not isinstance(error, _NOT_AN_INTERRUPT):
            self._stop(error)  # asyncio would only log it
        else:
            loop.default_exception_handler(context)

    # Plain functions ----------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Suspend the loop and call a function. An interrupt that ends the function cancels the run.

        The blocks are nested so that a signal handler may raise after any call here: the loop is always resumed.
        """
        loop, main, hooks = self._loop, self._main, sys.get_asyncgen_hooks()
        try:
            try:
                _leave_task(loop, main)
                asyncio._set_running_loop(None)
                sys.set_asyncgen_hooks(None, None)
                self._is_outside = True
                return function(*arguments)
            finally:
                try:
                    self._is_outside = False
                    sys.set_asyncgen_hooks(*hooks)
                finally:
                    try:
                        asyncio._set_running_loop(loop)
                    finally:
                        try:  # noqa: SIM105 - a handler may raise after any call, also after that of suppress()
                            _enter_task(loop, main)
                        except RuntimeError:
                            pass  # the interrupt came before the task was left
        except _NOT_AN_INTERRUPT:
            raise
        except BaseException as error:
            self._raised = self._raised or error
            raise asyncio.CancelledError from error


_current: ContextVar[_Driver] = ContextVar("_current")
