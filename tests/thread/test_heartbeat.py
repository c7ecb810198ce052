"""The heartbeat: when it renews, when it tries again, and when it gives up."""

from __future__ import annotations

import threading
import time

import pytest

from backstay.errors import Fenced, StoreError
from backstay.operations.leases import RENEWALS_PER_TTL, Heartbeat, Renewal
from support.waiting import eventually


def always() -> bool:
    return True


def unreachable() -> bool:
    raise StoreError("cannot be reached")


def fenced() -> bool:
    raise Fenced("taken over", epoch=1, current=2)


def test_it_is_due_after_a_third_of_its_time_and_later_if_something_else_extended_it() -> None:
    now = time.monotonic()
    renewal = Renewal(30.0, now, always)
    assert renewal.due() == now + 30.0 / RENEWALS_PER_TTL
    renewal.extended(now + 5)
    renewal.extended(now + 1)  # an older call that ends late takes nothing back

    assert renewal.due() == now + 5 + 30.0 / RENEWALS_PER_TTL
    assert not renewal.overdue


def test_a_beat_counts_from_its_start() -> None:
    def slow() -> bool:
        threading.Event().wait(0.02)
        return True

    renewal = Renewal(30.0, 0.0, slow)
    before = time.monotonic()
    assert renewal.run()

    assert renewal.due() < before + 0.02 + 30.0 / RENEWALS_PER_TTL


def test_a_refusal_ends_it_at_once() -> None:
    why: list[Exception] = []
    renewal = Renewal(30.0, time.monotonic(), fenced, why.append)

    assert not renewal.run()
    assert [type(error) for error in why] == [Fenced]


def test_another_failure_is_tried_again_soon_and_ends_it_when_its_time_is_over() -> None:
    why: list[Exception] = []
    began = time.monotonic()
    renewal = Renewal(30.0, began, unreachable, why.append)
    assert renewal.run()
    assert time.monotonic() < renewal.due() <= began + 30.0
    late = Renewal(30.0, began - 31.0, unreachable, why.append)
    assert late.overdue
    assert not late.run()

    assert [type(error) for error in why] == [StoreError]


def test_a_success_after_its_time_goes_on() -> None:
    why: list[Exception] = []
    renewal = Renewal(30.0, time.monotonic() - 31.0, always, why.append)

    assert renewal.run()
    assert not renewal.overdue
    assert why == []


def test_what_nobody_can_take_is_tried_for_ever() -> None:
    renewal = Renewal(30.0, time.monotonic() - 1000.0, unreachable)

    assert renewal.run()
    assert renewal.due() > time.monotonic()


def test_the_thread_comes_with_the_first_and_goes_with_the_last() -> None:
    heartbeat = Heartbeat()
    beaten = threading.Event()

    def renew() -> bool:
        beaten.set()
        return False  # ended by somebody else

    long = Renewal(3600.0, time.monotonic(), always)
    heartbeat.add(long)
    eventually(lambda: heartbeat._thread is not None)
    first = heartbeat._thread
    heartbeat.add(Renewal(0.05, time.monotonic(), renew))
    assert beaten.wait(20)
    assert heartbeat._thread is first
    heartbeat.remove(long)
    eventually(lambda: heartbeat._thread is None)
    heartbeat.add(long)
    eventually(lambda: heartbeat._thread is not None)

    assert heartbeat._thread is not first
    heartbeat.close()
    assert heartbeat._thread is None


def test_nothing_is_renewed_after_close() -> None:
    heartbeat = Heartbeat()
    heartbeat.close()
    heartbeat.add(Renewal(0.05, time.monotonic(), always))

    assert heartbeat._thread is None


def test_it_may_be_closed_from_its_own_thread() -> None:
    heartbeat = Heartbeat()
    heartbeat.add(Renewal(0.05, 0.0, fenced, lambda error: heartbeat.close()))

    eventually(lambda: heartbeat._thread is None)


@pytest.mark.parametrize("count", [200])
def test_many_are_each_renewed_in_time(count: int) -> None:
    heartbeat = Heartbeat()
    beats = [0] * count

    def renewing(number: int) -> Renewal:
        def renew() -> bool:
            beats[number] += 1
            return True

        return Renewal(0.3, time.monotonic(), renew)

    for number in range(count):
        heartbeat.add(renewing(number))
    eventually(lambda: min(beats) >= 3)
    heartbeat.close()

    assert max(beats) <= 3 * min(beats)
