"""An operation with recovery, killed at every call by which it writes and inside the service it calls.

The policy allows three attempts. Whoever dies, and whenever: the service is called three times at most before somebody
is asked, they are asked once, and after they say "retry" it goes on with three attempts more, to the one answer.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay
from backstay.retry import RecoveryAction
from support.crash.loop_work import POLICY, World, attempt_it
from support.processes import Nursery
from support.running import Show

pytestmark = pytest.mark.crash

CALLS_MAX = 20


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as opened:
        yield opened


class Arena:
    """One store, one service, and the victims."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        folder.mkdir()
        self._nursery = nursery
        self._url, self._out = str(folder / "agent.db"), folder / "out"
        self._world = str(folder / "world")
        with backstay.open(self._url) as store:
            store.thread("t").save({"a": 1})

    @property
    def calls(self) -> list[str]:
        return World(self._world).deeds

    def kill(self, number: int = 0, after: bool = False, deadly_call: int = 0, careless: bool = False) -> bool:
        """Run a victim; tell whether it died."""
        arguments = [self._url, self._world, number, after, deadly_call, careless]
        code = self._nursery.wait(
            self._nursery.start("support.crash.loop_work:recover_and_die", arguments, str(self._out))
        )
        assert code in (0, -signal.SIGKILL)
        return code != 0

    def finish(self) -> None:
        """Go on as the next process, answer what is asked, and check everything."""
        with backstay.open(self._url) as store:
            thread, world = store.thread("t"), World(self._world)
            if not list(store.interrupts(pending=False)):
                asked = attempt_it(thread, world)
                assert asked.waiting
            records = list(store.interrupts(pending=False))
            assert [record.interrupt.payload["attempts"] for record in records] == [POLICY.attempts]
            before = [call for call in self.calls if int(call.split()[1]) <= POLICY.attempts]
            assert len(before) == len(set(before)) >= POLICY.attempts - 1  # one may have died before its call
            if records[0].decision is None:
                thread.decide(records[0], RecoveryAction.retry().decision(), by="ann")
            result = attempt_it(thread, world)
            assert (result.value, result.attempts <= 6) == ("answer", True)
            count = len(self.calls)
            assert attempt_it(thread, world).replayed
            assert len(self.calls) == count == len(set(self.calls))  # no attempt was made twice
            assert list(store.interrupts()) == []

    def decide(self) -> None:
        with backstay.open(self._url) as store:
            (shown,) = store.interrupts()
            store.thread("t").decide(shown, RecoveryAction.retry().decision(), by="ann")


def test_a_process_killed_at_any_write_goes_on_counting(nursery: Nursery, tmp_path: Path, show: Show) -> None:
    killed = 0
    for decided in (False, True):
        for after in (False, True):
            for number in range(1, CALLS_MAX):
                arena = Arena(nursery, tmp_path / f"{decided}-{after}-{number}")
                if decided:
                    assert not arena.kill()
                    arena.decide()
                died = arena.kill(number, after)
                killed += died
                arena.finish()
                if not died:
                    break
            assert number < CALLS_MAX - 1
    show("processes killed around the writes of a recovery", killed)

    assert killed >= 20


@pytest.mark.parametrize("deadly_call", [1, 2, 3])
def test_a_process_killed_inside_an_attempt_goes_on_counting(
    nursery: Nursery, tmp_path: Path, deadly_call: int
) -> None:
    arena = Arena(nursery, tmp_path / "a")
    assert arena.kill(deadly_call=deadly_call)
    assert len(arena.calls) == deadly_call
    arena.finish()


def test_the_count_that_is_not_stored_begins_anew(nursery: Nursery, tmp_path: Path) -> None:
    """The harness sees it: without a thread, a process that dies in its second attempt leaves three to the next."""
    arena = Arena(nursery, tmp_path / "a")
    assert arena.kill(deadly_call=2, careless=True)
    assert not arena.kill(careless=True)

    assert arena.calls == ["call 1", "call 2", "call 1", "call 2", "call 3"]
