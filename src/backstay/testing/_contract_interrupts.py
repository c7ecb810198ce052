"""The part of the store contract about interrupts: decided once, consumed once, and gone with their checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from backstay.errors import IdTaken, NotFound
from backstay.store.base import Backend
from backstay.store.interrupts import InterruptRow
from backstay.testing._contract_leases import everything
from backstay.testing._contract_lists import HOSTILE
from backstay.testing.drafts import draft, lane, put

DECIDERS = 8
DIGEST = bytes(range(32))
BODY = b"what was \x00 shown"


def pause(backend: Backend, name: str = "ask", checkpoint: str | None = None, **changes: Any) -> InterruptRow:
    """Record an interrupt, of a new checkpoint if none is named."""
    key = changes.pop("lane", lane())
    row = InterruptRow(name, key, checkpoint or put(backend, key, {"n": 1}), DIGEST, BODY, 5)
    return backend.interrupt(replace(row, **changes))


def decide(backend: Backend, name: str = "ask", decision: bytes = b"yes", by: str = "ann") -> InterruptRow:
    """Decide an interrupt as it was shown."""
    return backend.decide("", name, DIGEST, decision, by, 7)


class InterruptRules:
    """Recording, deciding, consuming; and what becomes of them when checkpoints go."""

    # Recording ----------------------------------------------------------------------------------------------------

    def test_an_interrupt_comes_back_as_it_was_recorded(self, backend: Backend) -> None:
        name = put(backend, lane(scope="sub"), {"n": 1})
        row = pause(backend, checkpoint=name, lane=lane(scope="sub"))

        assert row == InterruptRow("ask", lane(scope="sub"), name, DIGEST, BODY, 5, number=row.number)
        assert row.number > 0
        assert backend.find_interrupt("", "ask") == row
        assert backend.interrupts("", None, True, 0, 10) == [row]
        assert backend.find_interrupt("", "no such") is None

    @pytest.mark.row("C2")
    def test_the_same_interrupt_again_gives_the_first_row_also_once_it_is_decided(self, backend: Backend) -> None:
        first = pause(backend)
        assert backend.interrupt(replace(first, number=0, created_us=99, body=b"later")) == first
        decided = decide(backend)

        assert backend.interrupt(replace(first, number=0)) == decided
        assert backend.interrupts("", None, False, 0, 10) == [decided]

    @pytest.mark.row("C2")
    def test_an_id_with_other_content_or_of_another_checkpoint_is_taken(self, backend: Backend) -> None:
        first = pause(backend)
        second = put(backend, lane(), {"n": 2})
        there = put(backend, lane("u"), {"n": 2})
        before = everything(backend)
        for change in (
            {"digest": bytes(32)},
            {"checkpoint": second},
            {"checkpoint": "no such"},
            {"lane": lane(branch="b")},
            {"lane": lane("u"), "checkpoint": there},
        ):
            with pytest.raises(IdTaken):
                backend.interrupt(replace(first, **change))

        assert everything(backend) == before

    def test_the_checkpoint_must_be_in_that_thread_and_scope(self, backend: Backend) -> None:
        name = put(backend, lane(), {"n": 1})
        for key, checkpoint in (
            (lane(), "no such"),
            (lane("u"), name),
            (lane(scope="sub"), name),
            (lane(namespace="other"), name),
        ):
            with pytest.raises(NotFound):
                pause(backend, checkpoint=checkpoint, lane=key)

        assert backend.interrupts("", None, False, 0, 10) == backend.interrupts("other", None, False, 0, 10) == []
        assert pause(backend, checkpoint=name, lane=lane(branch="b")).lane == lane(branch="b")

    def test_an_interrupt_begins_undecided_whatever_its_row_says(self, backend: Backend) -> None:
        forged = pause(backend, decision=b"yes", decided_by="eve", decided_us=1, consumer="eve", consumed_us=2)

        assert (forged.decision, forged.decided_by, forged.decided_us) == (None, None, None)
        assert (forged.consumer, forged.consumer_epoch, forged.consumed_us) == (None, 0, None)

    # Deciding -----------------------------------------------------------------------------------------------------

    @pytest.mark.row("C7")
    def test_an_interrupt_is_decided_once(self, backend: Backend) -> None:
        row = pause(backend)
        decided = decide(backend)

        assert decided == replace(row, decision=b"yes", decided_by="ann", decided_us=7)
        assert decide(backend, decision=b"no", by="bob") == decided
        assert backend.find_interrupt("", "ask") == decided

    def test_a_decision_may_be_empty(self, backend: Backend) -> None:
        pause(backend)
        decide(backend, decision=b"")

        assert decide(backend, decision=b"no", by="bob").decision == b""
        assert backend.consume("", "ask", "worker", 1, 9).consumer == "worker"

    def test_a_decision_about_something_else_changes_nothing(self, backend: Backend) -> None:
        row = pause(backend)

        assert backend.decide("", "ask", bytes(32), b"yes", "ann", 7) == row
        assert backend.find_interrupt("", "ask") == row

    def test_what_is_not_there_cannot_be_decided_or_consumed(self, backend: Backend) -> None:
        pause(backend)
        for namespace, name in (("", "no such"), ("other", "ask")):
            with pytest.raises(NotFound):
                backend.decide(namespace, name, DIGEST, b"yes", "ann", 7)
            with pytest.raises(NotFound):
                backend.consume(namespace, name, "worker", 1, 9)

    # Consuming ----------------------------------------------------------------------------------------------------

    def test_only_a_decision_can_be_consumed(self, backend: Backend) -> None:
        row = pause(backend)

        assert backend.consume("", "ask", "worker", 1, 9) == row
        assert backend.interrupts("", None, True, 0, 10) == [row]

    @pytest.mark.row("C7")
    def test_a_decision_is_consumed_once_unless_its_consumer_was_fenced_out(self, backend: Backend) -> None:
        pause(backend)
        decided = decide(backend)
        first = backend.consume("", "ask", "worker", 3, 9)
        assert first == replace(decided, consumer="worker", consumer_epoch=3, consumed_us=9)
        for by, epoch in (("worker", 3), ("another", 3), ("another", 2), ("another", 0)):
            assert backend.consume("", "ask", by, epoch, 10) == first
        second = backend.consume("", "ask", "another", 4, 11)

        assert second == replace(decided, consumer="another", consumer_epoch=4, consumed_us=11)
        assert backend.consume("", "ask", "worker", 3, 12) == second
        assert decide(backend, decision=b"no", by="bob") == second

    def test_a_consumer_without_a_lease_has_epoch_0(self, backend: Backend) -> None:
        pause(backend)
        decide(backend)

        assert backend.consume("", "ask", "worker", 0, 9).consumer == "worker"
        assert backend.consume("", "ask", "another", 0, 10).consumer == "worker"

    @pytest.mark.row("C7")
    @pytest.mark.parametrize("step", ["decide", "consume"])
    def test_of_many_who_decide_or_consume_at_once_exactly_one_wins_and_all_see_who(
        self, backend: Backend, step: str
    ) -> None:
        pause(backend)
        if step == "consume":
            decide(backend)
        ready = threading.Barrier(DECIDERS)

        def race(worker: int) -> InterruptRow:
            ready.wait()
            if step == "decide":
                return decide(backend, decision=f"{worker}".encode(), by=f"{worker}")
            return backend.consume("", "ask", f"{worker}", 1, worker)

        with ThreadPoolExecutor(DECIDERS) as pool:
            seen = set(pool.map(race, range(DECIDERS)))

        (row,) = seen
        winner = row.decided_by if step == "decide" else row.consumer
        assert winner in {str(worker) for worker in range(DECIDERS)}
        assert row.decision == (f"{winner}".encode() if step == "decide" else b"yes")

    # Listing ------------------------------------------------------------------------------------------------------

    def test_interrupts_are_listed_in_the_order_in_which_they_were_recorded(self, backend: Backend) -> None:
        rows = [pause(backend, f"ask {n}", lane=lane("u" if n % 2 else "t"), created_us=9 - n) for n in range(5)]
        for name in ("ask 1", "ask 2"):
            decide(backend, name)
        backend.consume("", "ask 2", "worker", 1, 9)

        def found(thread: str | None, pending: bool, after: int = 0, limit: int = 10) -> list[str]:
            return [row.id for row in backend.interrupts("", thread, pending, after, limit)]

        assert [row.number for row in rows] == sorted({row.number for row in rows})
        assert found(None, False) == [row.id for row in rows]
        assert found(None, True) == ["ask 0", "ask 1", "ask 3", "ask 4"]
        assert found("t", False) == ["ask 0", "ask 2", "ask 4"]
        assert found("t", True, after=rows[0].number) == ["ask 4"]
        assert found(None, True, after=rows[1].number, limit=1) == ["ask 3"]
        assert found(None, False, limit=0) == found(None, False, limit=-1) == found("no such", False) == []
        assert found(None, False, limit=10**30) == [row.id for row in rows]

    def test_namespaces_do_not_see_each_others_interrupts(self, backend: Backend) -> None:
        mine, other = pause(backend), pause(backend, lane=lane(namespace="other"), body=b"another")
        decide(backend)

        assert backend.find_interrupt("other", "ask") == other
        assert backend.interrupts("", None, False, 0, 10) == [
            replace(mine, decision=b"yes", decided_by="ann", decided_us=7)
        ]
        assert backend.interrupts("other", None, True, 0, 10) == [other]

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    def test_any_name_of_an_interrupt_means_only_itself(self, backend: Backend, name: str) -> None:
        plain = pause(backend)
        key = lane(name, name, name)
        row = pause(backend, name, put(backend, key, {"n": 1}, name), lane=key)
        decided = decide(backend, name, by=name)

        assert (row.id, row.lane, row.checkpoint) == (name, key, name)
        assert backend.interrupts("", name, True, 0, 10) == [decided]
        assert backend.consume("", name, name, 1, 9).consumer == name
        assert backend.delete("", [name], False).checkpoints == 1
        assert backend.interrupts("", None, False, 0, 10) == [plain]

    # Deleting -----------------------------------------------------------------------------------------------------

    @pytest.mark.row("C8")
    def test_a_checkpoint_whose_interrupt_is_not_consumed_is_spared(self, backend: Backend) -> None:
        ids = [put(backend, lane(), {"n": n}) for n in range(5)]
        for name, checkpoint in (("waits", 0), ("decided", 1), ("consumed", 2), ("also consumed", 1)):
            pause(backend, name, ids[checkpoint])
        for name in ("decided", "consumed", "also consumed"):
            decide(backend, name)
        for name in ("consumed", "also consumed"):
            backend.consume("", name, "worker", 1, 9)

        assert backend.delete("", ids, True).checkpoints == 2
        assert [row.id for row in backend.interrupts("", None, False, 0, 10)] == ["waits", "decided", "also consumed"]
        backend.consume("", "decided", "worker", 1, 9)
        assert backend.delete("", ids, True).checkpoints == 1
        assert backend.delete("", [ids[0]], False).checkpoints == 1
        assert backend.interrupts("", None, False, 0, 10) == []

    def test_an_interrupt_spares_nothing_in_another_namespace(self, backend: Backend) -> None:
        for key in (lane(), lane(namespace="other")):
            for name in ("one", "two"):
                put(backend, key, {"n": 1}, name)
        pause(backend, checkpoint="one", lane=lane(namespace="other"))

        assert backend.delete("", ["one"], True).checkpoints == 1
        assert backend.delete("other", ["one"], True).checkpoints == 0

    @pytest.mark.parametrize("whole_thread", [True, False], ids=["with the thread", "with the checkpoint"])
    def test_interrupts_go_with_their_checkpoint_and_their_numbers_are_not_given_again(
        self, backend: Backend, whole_thread: bool
    ) -> None:
        kept = pause(backend, "kept", lane=lane("u"))
        gone = pause(backend)
        if whole_thread:
            backend.delete_thread("", "t")
        else:
            backend.delete("", [gone.checkpoint], False)
        assert backend.find_interrupt("", "ask") is None
        assert backend.interrupts("", None, False, 0, 10) == [kept]
        late: list[Callable[[], object]] = [
            lambda: decide(backend),
            lambda: backend.consume("", "ask", "worker", 1, 9),
            lambda: backend.interrupt(gone),
        ]
        for verb in late:
            with pytest.raises(NotFound):
                verb()

        assert pause(backend).number > gone.number

    def test_langgraph_putting_the_newest_id_again_keeps_its_interrupts(self, backend: Backend) -> None:
        row = pause(backend, checkpoint=put(backend, lane(), {"n": 1}, "one"))
        backend.commit(draft(backend, lane(), {"n": 2}, "one", replaces=True, step=1))

        assert backend.interrupts("", "t", True, 0, 10) == [row]
