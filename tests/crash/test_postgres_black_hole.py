"""A network that takes everything and gives nothing back. No call may outlive its deadline by more than a second.

TCP does not help: the proxy acknowledges every packet. Nor does the server: it never hears of it, or its answer never
leaves. Each test proves that its hole was there, and afterwards that nothing is left of it: no transaction, no
connection that the pool believes to be lent out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import backstay
from backstay.errors import OutcomeUnknown, StoreBusy
from backstay.store.leases import BranchKey, LeaseRequest
from backstay.testing.drafts import wait_until
from backstay.thread.access import access_of
from support.crash.postgres_story import IMPORTED, make_import
from support.postgres import PostgresServer, Watch
from support.proxy import Proxy
from support.running import Show

pytestmark = pytest.mark.effort(2)

Way = Literal["sync", "async"]

TIMEOUT_S = 1.5
GRACE_S = 1.0
CALLER_TIMEOUT_S = 0.3
WAIT_S = 30.0
POOL = 4
LARGE_BYTES = 8 << 20
CLAIM = LeaseRequest("ann", "token", 60_000_000)
BRANCH = BranchKey("", "t", "", "main")


@dataclass
class Ended:
    """How a call ended, and when."""

    error: BaseException | None
    seconds: float

    @property
    def late_s(self) -> float:
        return self.seconds - TIMEOUT_S


class Place:
    """One store behind a proxy, used from threads or from an event loop; what is called is the same."""

    def __init__(self, server: PostgresServer, proxy: Proxy, url: str, way: Way) -> None:
        self.proxy, self.way = proxy, way
        self.watch = Watch(server, url)
        with backstay.open(url) as near:
            thread = near.thread("t")
            for number in range(4):
                thread.append({"log": [number]}, id=f"c-{number}")
            near.thread("large").save({"data": [os.urandom(1 << 20) for _ in range(LARGE_BYTES >> 20)]})
        self.url = proxy.url(f"{self.watch.url}&timeout={TIMEOUT_S}&pool={POOL}&prepare=no")
        self.store: Any = self.open()

    def open(self) -> Any:
        """Open the store in this place's way."""
        return backstay.open(self.url) if self.way == "sync" else asyncio.run(backstay.aopen(self.url))

    def run(self, *calls: Callable[[], Any]) -> list[Ended]:
        """Make all calls at the same time and wait for their ends."""
        if self.way == "sync":
            with ThreadPoolExecutor(len(calls)) as threads:
                return list(threads.map(_timed, calls))
        return asyncio.run(_gathered(calls))

    def call(self, call: Callable[[], Any]) -> Any:
        """Make one call that must succeed."""
        return call() if self.way == "sync" else asyncio.run(_awaited(call))

    def warm(self) -> None:
        """Have as many connections as the pool may have, all idle."""
        self.crowd(POOL)

    def crowd(self, calls: int) -> None:
        """Let so many calls wait at once: in the database as many as there may be connections, the others for one."""
        with contextlib.ExitStack() as unlocked:
            unlocked.enter_context(self.watch.locked())
            running = ThreadPoolExecutor(1).submit(self.run, *[self.store.thread("t").latest for _ in range(calls)])
            wait_until(lambda: self.watch.blocked == POOL or running.done())
            unlocked.close()
            assert [ended.error for ended in running.result()] == [None] * calls

    @contextlib.contextmanager
    def stalled_at(self, request: bytes) -> Iterator[None]:
        """Stall as soon as such a request has passed; at the end, tell that more came after it."""
        passed = threading.Event()

        def notice(found: bytes) -> bool:
            if request in found:
                passed.set()
            return False

        def stall() -> None:
            assert passed.wait(WAIT_S)
            self.proxy.stall()

        self.proxy.cut_before(notice, times=None)
        stalling = threading.Thread(target=stall)
        stalling.start()
        yield
        stalling.join()
        assert self.proxy.fired["stall"], "everything had arrived already"
        assert not self.proxy.fired["cut_before"]

    def recover(self) -> None:
        """End the hole; prove that nothing of it is left and that everything works."""
        self.proxy.heal()
        wait_until(lambda: self.watch.transactions == 0)
        wait_until(self._is_whole)
        assert self.call(lambda: self.store.thread("t").append({"log": ["after"]})) is not None
        assert self.watch.connections <= POOL + 1
        assert self.call(self.store.check)
        self.call(self.store.close)
        wait_until(lambda: self.watch.connections == 0)

    def _is_whole(self) -> bool:
        """Tell whether the pool lends out all its connections; those that came back broken take a moment to renew."""
        try:
            self.crowd(POOL + 2)
        except AssertionError:
            return False
        return True


def _timed(call: Callable[[], Any]) -> Ended:
    began, error = time.monotonic(), None
    try:
        call()
    except BaseException as raised:
        error = raised
    return Ended(error, time.monotonic() - began)


async def _gathered(calls: tuple[Callable[[], Any], ...]) -> list[Ended]:
    async def timed(call: Callable[[], Any]) -> Ended:
        began, error = time.monotonic(), None
        try:
            await call()
        except BaseException as raised:
            error = raised
        return Ended(error, time.monotonic() - began)

    return await asyncio.gather(*map(timed, calls))


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres.port) as between:
        yield between


@pytest.fixture(params=["sync", "async"])
def place(request: pytest.FixtureRequest, postgres: PostgresServer, proxy: Proxy, postgres_url: str) -> Place:
    return Place(postgres, proxy, postgres_url, request.param)


def judge(show: Show, place: Place, name: str, ended: list[Ended], *errors: type[Exception]) -> None:
    worst = max(end.late_s for end in ended)
    show(f"black hole {name} ({place.way})", f"{len(ended)} calls, at most {worst:.2f} s beyond {TIMEOUT_S} s")
    assert [type(end.error) for end in ended] == list(errors), [repr(end.error) for end in ended]
    assert worst <= GRACE_S


@pytest.mark.crash
def test_calls_whose_requests_never_arrive_end_in_time(place: Place, show: Show) -> None:
    handle = place.store.thread("t")
    place.call(handle.latest)
    place.warm()
    place.proxy.stall()
    ended = place.run(
        place.store.thread("t").latest,
        lambda: handle.append({"log": ["never"]}),
        lambda: place.store.thread("t").tag("c-1", "never"),
        lambda: place.store.thread("t").delete_checkpoint("c-1"),
    )
    stalled = place.proxy.fired["stall"]

    judge(show, place, "before the request", ended, StoreBusy, OutcomeUnknown, OutcomeUnknown, StoreBusy)
    assert stalled >= len(ended)
    place.recover()


@pytest.mark.crash
def test_calls_whose_answers_never_arrive_end_in_time(place: Place, show: Show) -> None:
    handle = place.store.thread("t")
    place.call(handle.latest)
    place.warm()
    for request in (b".commit_checkpoint(", b"WITH found AS", b"COMMIT", b".acquire_lease("):
        place.proxy.swallow_answer(request, then="silence")
    backend = access_of(place.store).store
    acquire = asyncio.to_thread if place.way == "async" else lambda call, *given: call(*given)
    ended = place.run(
        lambda: handle.append({"log": ["there"]}),
        lambda: place.store.thread("t").tag("c-1", "there"),
        lambda: place.store.thread("t").delete_checkpoint("c-2"),
        lambda: acquire(backend.acquire, BRANCH._replace(thread="other"), CLAIM),
    )

    judge(show, place, "after the request", ended, *[OutcomeUnknown] * len(ended))
    assert place.proxy.fired["swallow_answer"] == len(ended)
    newest = place.call(place.store.thread("t").latest)
    assert newest.state["log"][-1] == "there"
    assert place.call(lambda: place.store.get("c-1")).tags == ("there",)
    assert place.call(lambda: place.store.get("c-2")) is None
    place.recover()


@pytest.mark.crash
def test_calls_that_need_a_new_connection_end_in_time_and_have_stored_nothing(place: Place, show: Show) -> None:
    place.proxy.stall()
    ended = place.run(
        place.store.thread("t").latest,
        lambda: place.store.thread("new").save({"n": 1}),
        lambda: place.store.thread("t").delete_checkpoint("c-1"),
    )
    opening = place.run(place.open if place.way == "sync" else lambda: backstay.aopen(place.url))
    stalled = place.proxy.fired["stall"]

    judge(show, place, "while connecting", [*ended, *opening], *[StoreBusy] * 4)
    assert stalled >= 2
    place.proxy.heal()
    assert place.call(place.store.thread("new").latest) is None
    place.recover()


@pytest.mark.crash
def test_a_large_read_that_stops_on_its_way_ends_in_time(place: Place, show: Show) -> None:
    with place.stalled_at(b"WITH ORDINALITY"):
        ended = place.run(place.store.thread("large").latest)

    judge(show, place, f"during a read of {LARGE_BYTES >> 20} MiB", ended, StoreBusy)
    place.recover()


@pytest.mark.crash
@pytest.mark.parametrize("request_", [b"COPY", b"commit_checkpoint"])
def test_a_large_import_that_stops_on_its_way_ends_in_time_and_has_stored_nothing(
    postgres: PostgresServer, proxy: Proxy, postgres_url: str, show: Show, request_: bytes
) -> None:
    place = Place(postgres, proxy, postgres_url, "sync")
    commits = make_import(item_bytes=LARGE_BYTES // IMPORTED)
    with place.stalled_at(request_):
        ended = place.run(lambda: access_of(place.store).store.commit_all(commits))

    judge(show, place, f"during an import of {LARGE_BYTES >> 20} MiB", ended, StoreBusy)
    place.proxy.heal()
    wait_until(lambda: not place.watch.transactions)
    assert place.store.thread("imported").latest() is None
    place.recover()


@pytest.mark.crash
def test_an_event_loop_that_stops_waiting_gets_its_turn_at_once(
    postgres: PostgresServer, proxy: Proxy, postgres_url: str, show: Show
) -> None:
    """Its own timeout is shorter than the store's; what it leaves behind ends by itself and can be settled."""
    place = Place(postgres, proxy, postgres_url, "async")
    handle = place.store.thread("t")
    before = place.call(handle.latest)
    place.warm()

    async def hurried() -> tuple[float, ...]:
        async def call(began: float, awaited: Awaitable[Any]) -> float:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALLER_TIMEOUT_S):
                    await awaited
                    raise AssertionError("there was no hole")
            return time.monotonic() - began - CALLER_TIMEOUT_S

        now = time.monotonic()
        return await asyncio.gather(
            call(now, handle.append({"log": ["late"]})),
            call(now, place.store.thread("t").latest()),
            call(now, place.store.thread("t").delete_checkpoint("c-0")),
            call(now, place.store.thread("large").latest()),
        )

    proxy.stall()
    late_s = asyncio.run(hurried())
    stalled = proxy.fired["stall"]

    show("black hole, asyncio.timeout", f"{len(late_s)} calls, at most {max(late_s):.2f} s beyond {CALLER_TIMEOUT_S} s")
    assert stalled >= len(late_s)
    assert max(late_s) <= GRACE_S
    proxy.heal()
    found = place.call(handle.latest)
    saved = place.call(lambda: handle.append({"log": ["after"]}))
    assert found.state["log"] in (before.state["log"], [*before.state["log"], "late"])
    assert saved.state["log"] == [*found.state["log"], "after"]
    place.recover()
