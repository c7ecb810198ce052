"""Fails a test in which our code touches a disk or a socket, or waits, in the thread of a running event loop.

Python reports opened files, sockets and sleeps to an audit hook. The databases do their I/O in C, where no hook sees
it, so every verb of the stores that have a disk is wrapped too. So are waits for other threads. Every such call made
while a loop runs in the same thread is recorded with its stack, and the test fails when it ends.

Calls of the test's own code, imports, and the memory store do not count. If a test means to block the loop, because it
calls the sync API from a coroutine on purpose, it says so: ``@pytest.mark.blocks_loop("why")``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import backstay
from backstay.store.base import Backend

OURS = str(Path(backstay.__file__).parent) + "/"
TESTS = str(Path(__file__).parents[1]) + "/"
STORES = [
    ("backstay.store.sqlite.store", "SqliteStore"),
    ("backstay.store.directory.store", "DirectoryStore"),
    ("backstay.store.postgres.store", "PostgresStore"),
]
BLOCKING_EVENTS = ("open", "time.sleep", "os.", "fcntl.", "shutil.", "sqlite3.", "socket.connect", "socket.getaddrinfo")
HARMLESS_EVENTS = {"os.putenv", "os.unsetenv", "os.fork"}
IMPORTING = ("<frozen importlib", "<frozen zipimport")
SHORT_WAITS = {threading.Thread.start.__code__, ThreadPoolExecutor.submit.__code__}  # only for the new thread to start

_blocked: dict[str, str] = {}  # by the place in our code: the stack of the first call there
_inside = threading.local()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType | None) -> bool:
    """Tell whether a call comes from our code: whether its first caller that is no library's is in the package."""
    for each in _frames(frame):
        name = each.f_code.co_filename
        if name.startswith(IMPORTING) or each.f_code in SHORT_WAITS:
            return False
        if name.startswith((OURS, TESTS)) and name != __file__:
            return name.startswith(OURS)
    return False


def _is_private(frame: FrameType | None) -> bool:
    """Tell whether the running loop is one that our sync API has made for its caller, who waits anyway."""
    running = False
    for each in _frames(frame):
        if each.f_code is asyncio.BaseEventLoop.run_forever.__code__:
            running = True
        elif running and each.f_code.co_filename.startswith((OURS, TESTS)):
            return each.f_code.co_filename.startswith(OURS)
    return False


def _record(what: str, frame: FrameType | None) -> None:
    shown = [each for each in _frames(frame) if each.f_code.co_filename.startswith((OURS, TESTS))]
    lines = [f"  {each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_qualname}" for each in shown]
    place = next((line for line in lines if OURS in line), "")
    _blocked.setdefault(f"{what} {place}", "\n".join([f"{what}, called by", *lines]))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if asyncio._get_running_loop() is None or not event.startswith(BLOCKING_EVENTS) or event in HARMLESS_EVENTS:
        return
    frame = sys._getframe(1)
    if not getattr(_inside, "call", False) and _is_ours(frame) and not _is_private(frame):
        _record(f"{event}{args[:1]}", frame)


def _guarded(function: Callable[..., Any], what: str, *, is_verb: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is None or getattr(_inside, "call", False):
            return function(*args, **kwargs)
        frame = sys._getframe(1)
        if (is_verb or _is_ours(frame)) and not _is_private(frame):
            _record(what, frame)
        _inside.call = True
        try:
            return function(*args, **kwargs)
        finally:
            _inside.call = False

    return call


def install() -> None:
    """Start to watch, for as long as this process lives."""
    members = {name: member for base in Backend.__mro__[:-1] for name, member in vars(base).items()}
    verbs = [name for name, member in members.items() if callable(member) and not name.startswith("_")]
    for module, name in STORES:
        try:
            store = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:  # the driver is an extra
            continue
        for verb in ["__init__", *verbs]:
            setattr(store, verb, _guarded(getattr(store, verb), f"{name}.{verb}", is_verb=True))
    threading.Condition.wait = _guarded(threading.Condition.wait, "Condition.wait", is_verb=False)  # type: ignore[method-assign]
    threading.Thread.join = _guarded(threading.Thread.join, "Thread.join", is_verb=False)  # type: ignore[method-assign]
    sys.addaudithook(_audit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    _blocked.clear()
    try:
        yield
    except Exception as error:
        if _blocked:
            error.add_note(_report())
        raise
    if _blocked and item.get_closest_marker("blocks_loop") is None:
        raise BlockedLoop(_report())


def _report() -> str:
    return "\n".join(["the event loop's thread was blocked:", *_blocked.values()])


class BlockedLoop(AssertionError):
    """The test ran into a call that blocks the event loop."""
