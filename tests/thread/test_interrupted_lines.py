"""Interrupts and signal handlers at every line above the stores: nothing hangs, nothing acknowledged is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType

import pytest

import backstay
from backstay.errors import BackstayError
from support.running import Show, effort
from support.thread.interrupted_runs import LINE, RUNS, Run, at_once
from support.thread.line_points import (
    ROOT,
    Interrupted,
    Lines,
    Point,
    chosen,
    interrupt,
    interrupt_twice,
    points_of,
    watching,
)

HANG_S = 30.0
EVERY = effort() >= 80
"""Whether every line event is tried. Else some are, others on each store; fewer of code that knows no handle."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail where the main thread waits for a lock in vain."""

    def hung(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, HANG_S, HANG_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def opened(url: str) -> Iterator[backstay.Store]:
    with backstay.open(url) as store:
        yield store
        report = store.check()
        assert report, str(report)


def some(points: list[Point], store: backstay.Store) -> list[Point]:
    """Return the points to try: those of handles, leases, effects and loops first."""
    if EVERY:
        return points
    near = (f"{ROOT}thread/", f"{ROOT}pieces/tip")
    once = [point for point in chosen(points, False) if point.nth == 1]
    kind = ["memory", "sqlite", "dir", "postgresql"].index(kind_of(store))
    share = (80 if kind == 0 else 320) // effort()
    return [
        point
        for number, point in enumerate(once)
        if number % (share if point.file.startswith(near) else 5 * share) == kind
    ]


def kind_of(store: backstay.Store) -> str:
    scheme, colon, _ = store.url.partition(":")
    return scheme if colon else "sqlite"


def tries(store: backstay.Store, kind: type[Run]) -> list[Point]:
    kind(store, f"{kind.name}: warm").act()  # what is imported or made once is there
    return some(points_of(kind(store, f"{kind.name}: count").act), store)


# The second interrupt may hit a generator expression that is being thrown away, where Python tells it to nobody.
@pytest.mark.effort
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", RUNS, ids=lambda kind: kind.name)
def test_ctrl_c_at_any_line(opened: backstay.Store, kind: type[Run], show: Show) -> None:
    """Interrupt once, or twice in a row: the handle works, a new one, and another thread of the program."""
    points, fired = tries(opened, kind), 0
    with ThreadPoolExecutor(1) as another:
        for number, point in enumerate(points):
            run = kind(opened, f"{kind.name}: {number}")
            lines = Lines(point, interrupt_twice if number % 2 else interrupt)
            error: BaseException | None = None
            try:
                with watching(lines):
                    run.act()
            except Interrupted as raised:
                error = raised  # its traceback keeps every frame alive, and whatever they hold
            try:
                another.submit(_save_elsewhere, opened, run).result(HANG_S / 3)
                del error
                run.check()
            except BaseException as failure:
                failure.add_note(f"after an interrupt at {point}")
                raise
            fired += lines.fired
            signal.setitimer(signal.ITIMER_REAL, HANG_S, HANG_S)
    show(f"{kind.name}, {kind_of(opened)}: interrupted at", f"{fired} of {len(points)} lines")
    assert fired > 0.9 * len(points)


def _save_elsewhere(store: backstay.Store, run: Run) -> None:
    store.thread("elsewhere").save({"n": run.thread.id})
    with suppress(BackstayError):
        run.thread.latest()  # the same handle: its lock was let go of


def _same_handle(run: Run) -> None:
    run.append(run.thread, f"{LINE}of the handler")


def _another_handle(run: Run) -> None:
    handle = run.store.thread(run.thread.id)
    if handle.latest() is not None:
        run.append(handle, f"{LINE}of the handler")


@pytest.mark.effort
@pytest.mark.parametrize("kind", RUNS, ids=lambda kind: kind.name)
def test_a_handler_that_saves_at_any_line(opened: backstay.Store, kind: type[Run], show: Show) -> None:
    """Save through the very same handle, or another: it is stored or refused, and so is what it interrupted."""
    points, fired, refused, outer = tries(opened, kind), 0, list[BackstayError](), 0
    handlers: list[Callable[[Run], None]] = [_same_handle, _another_handle]
    for number, point in enumerate(points):
        for save in handlers if EVERY else [handlers[number % 2]]:
            run = kind(opened, f"{kind.name}: {number} {save.__name__}")
            lines = Lines(point, lambda run=run, save=save: at_once(lambda: save(run), refused))  # type: ignore[misc]
            try:
                with watching(lines):
                    run.act()
            except BackstayError:
                outer += 1
            try:
                run.check()
            except BaseException as failure:
                failure.add_note(f"after a handler at {point}")
                raise
            fired += lines.fired
            signal.setitimer(signal.ITIMER_REAL, HANG_S, HANG_S)
    figures = f"{fired}, refused {len(refused)}; what they interrupted was refused: {outer}"
    show(f"{kind.name}, {kind_of(opened)}: handlers", figures)
    assert fired > 0.9 * len(points)
