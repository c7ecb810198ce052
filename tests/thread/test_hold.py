"""A lease as its holder knows it: what is a loss, and what is not."""

from __future__ import annotations

import time

import pytest

from backstay.errors import Fenced, StoreError
from backstay.operations.leases import HeldLease, LeaseLoss
from backstay.store.leases import BranchKey, LeaseRequest
from backstay.store.memory import MemoryStore

REFUSED = Fenced("taken over", epoch=1, current=2)


@pytest.fixture
def losses() -> list[LeaseLoss]:
    return []


@pytest.fixture
def hold(losses: list[LeaseLoss]) -> HeldLease:
    store, claim = MemoryStore(), LeaseRequest("me", "token", 60_000_000)
    held = store.acquire(BranchKey("", "t", "", "main"), claim)
    return HeldLease(store, held, claim, time.monotonic(), losses.append)


def test_a_refused_renewal_is_a_loss_once(hold: HeldLease, losses: list[LeaseLoss]) -> None:
    assert hold.refusal() is None
    hold.give_up(REFUSED)
    hold.give_up(REFUSED)
    hold.fenced(REFUSED)

    assert losses == [LeaseLoss(REFUSED, called=False)]
    assert str(hold.refusal()) == str(REFUSED)
    assert hold.refusal() is not REFUSED


def test_a_store_that_cannot_be_reached_is_named_as_the_cause(hold: HeldLease, losses: list[LeaseLoss]) -> None:
    cause = StoreError("cannot be reached")
    hold.give_up(cause)
    refusal = hold.refusal()

    assert refusal is not None
    assert refusal.__cause__ is cause
    assert "could not be renewed for 60 s" in str(refusal)


def test_a_renewal_that_is_refused_while_the_lease_is_given_back_is_no_loss(
    hold: HeldLease, losses: list[LeaseLoss]
) -> None:
    """The heartbeat may be asking at that very moment."""
    hold.start_release()
    hold.give_up(REFUSED)
    hold.fenced(REFUSED)
    assert losses == []
    hold.cancel_release()  # it was not given back after all
    hold.give_up(REFUSED)

    assert losses == [LeaseLoss(REFUSED, called=False)]


def test_a_release_that_is_refused_is_a_loss(hold: HeldLease, losses: list[LeaseLoss]) -> None:
    hold.start_release()
    hold.fenced(REFUSED, releasing=True)

    assert losses == [LeaseLoss(REFUSED, called=True)]


def test_what_was_given_back_cannot_be_lost(hold: HeldLease, losses: list[LeaseLoss]) -> None:
    hold.start_release()
    hold.finish_release()
    hold.give_up(REFUSED)
    hold.fenced(REFUSED, releasing=True)

    assert losses == []
    assert hold.is_over
    assert hold.refusal() is None
