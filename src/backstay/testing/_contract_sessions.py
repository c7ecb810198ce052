"""The part of the store contract about sessions: which runs are active, alive or not, and why others ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.store.base import Backend, Query
from backstay.store.sessions import SessionRow
from backstay.testing._contract_leases import HOUR_US, MOMENT_US, NOTHING, asking, everything, running
from backstay.testing._contract_lists import HOSTILE
from backstay.testing.drafts import contents, lane, put
from backstay.testing.waiting import wait_until


def shown(backend: Backend, namespace: str = "", thread: str | None = None) -> list[SessionRow]:
    """Return all sessions without the time that is left."""
    return [replace(row, left_us=0) for row in backend.sessions(namespace, thread, False)]


def is_overdue(backend: Backend) -> bool:
    """Tell whether the only session is taken for dead."""
    (row,) = backend.sessions("", None, True)
    return row.left_us <= 0


class SessionRules:
    """Beginning, beating, ending and listing."""

    def test_a_session_comes_back_as_it_was_begun_and_runs_for_its_time(self, backend: Backend) -> None:
        begun = replace(running(), lane=lane(branch="b", scope="sub"))
        backend.begin(begun, HOUR_US)
        (row,) = backend.sessions("", "t", True)

        assert replace(row, left_us=0) == begun
        assert HOUR_US // 2 < row.left_us <= HOUR_US

    def test_a_session_that_does_not_beat_is_overdue_but_not_ended(self, backend: Backend) -> None:
        backend.begin(running(), MOMENT_US)
        wait_until(lambda: is_overdue(backend))
        (row,) = backend.sessions("", None, True)

        assert (row.ended_us, row.reason) == (None, None)
        assert backend.beat("", "run", 5, HOUR_US), "it was slow, not dead"
        assert not is_overdue(backend)

    def test_a_beat_moves_the_last_sign_of_life_and_nothing_else(self, backend: Backend) -> None:
        backend.begin(running(), HOUR_US // 4)

        assert backend.beat("", "run", 7, HOUR_US)
        assert shown(backend) == [replace(running(), seen_us=7)]
        assert backend.sessions("", None, True)[0].left_us > HOUR_US // 2

    def test_only_an_active_session_can_beat_or_end(self, backend: Backend) -> None:
        for name in ("ended", "run"):
            backend.begin(running(name=name), HOUR_US)
        backend.end("", "ended", 9, "done")
        before = shown(backend)
        for namespace, name in (("", "ended"), ("", "no such"), ("other", "run")):
            assert not backend.beat(namespace, name, 10, HOUR_US)
            assert not backend.end(namespace, name, 10, "crashed")

        assert shown(backend) == before

    def test_the_first_reason_stays(self, backend: Backend) -> None:
        backend.begin(running(), HOUR_US)

        assert backend.end("", "run", 9, "done")
        assert not backend.end("", "run", 10, "crashed")
        assert shown(backend) == [replace(running(), ended_us=9, reason="done")]
        assert backend.sessions("", None, True) == []

    @pytest.mark.row("C2")
    def test_beginning_again_is_a_beat(self, backend: Backend) -> None:
        backend.begin(running(), MOMENT_US)
        backend.begin(replace(running("u"), owner="another", note="other", seen_us=8), HOUR_US)
        assert shown(backend) == [replace(running(), seen_us=8)]
        assert not is_overdue(backend)
        backend.end("", "run", 9, "done")
        backend.begin(replace(running(), seen_us=10), HOUR_US)

        assert shown(backend) == [replace(running(), seen_us=8, ended_us=9, reason="done")]

    def test_a_session_begins_active_whatever_its_row_says(self, backend: Backend) -> None:
        backend.begin(replace(running(), ended_us=3, reason="made up", left_us=-1), HOUR_US)

        assert shown(backend) == [running()]

    def test_sessions_are_listed_in_the_order_in_which_they_began_whatever_their_clocks_say(
        self, backend: Backend
    ) -> None:
        for thread, name, began in (("t", "z", 300), ("u", "a", 100), ("t", "m", 200)):
            backend.begin(running(thread, name, began_us=began), HOUR_US)
        backend.beat("", "z", 999, HOUR_US)
        backend.end("", "a", 400, "done")

        def found(thread: str | None, active_only: bool) -> list[str]:
            return [row.id for row in backend.sessions("", thread, active_only)]

        assert found(None, False) == ["z", "a", "m"]
        assert found(None, True) == ["z", "m"]
        assert found("t", False) == ["z", "m"]
        assert found("u", True) == found("no such", False) == []

    def test_namespaces_do_not_see_each_others_sessions(self, backend: Backend) -> None:
        mine, other = running(), replace(running(namespace="other"), note="another")
        for each in (mine, other):
            backend.begin(each, HOUR_US)
        backend.end("other", "run", 9, "done")

        assert shown(backend) == [mine]
        assert shown(backend, "other") == [replace(other, ended_us=9, reason="done")]

    def test_a_session_makes_its_thread_and_shows_it_nowhere(self, backend: Backend) -> None:
        backend.begin(running("first"), HOUR_US)
        assert (contents(backend), backend.find(Query("", heads_of_threads=True))) == (NOTHING, [])
        for thread in ("second", "first"):
            put(backend, lane(thread), {"n": 1})
        oldest_last = [row.lane.thread for row in backend.find(Query("", heads_of_threads=True))]

        assert oldest_last == ["second", "first"]

    def test_a_session_gives_no_right_and_takes_none(self, backend: Backend) -> None:
        backend.begin(running(), HOUR_US)
        put(backend, lane(), {"n": 1})

        assert backend.acquire(lane(), asking("another")).epoch == 1

    def test_sessions_stay_when_checkpoints_go_and_go_with_their_thread(self, backend: Backend) -> None:
        for thread in ("t", "u"):
            backend.begin(running(thread, f"run of {thread}"), HOUR_US)
        backend.delete("", [put(backend, lane(), {"n": 1})], False)
        assert len(backend.sessions("", None, False)) == 2
        backend.delete_thread("", "t")
        assert [row.id for row in backend.sessions("", None, False)] == ["run of u"]
        backend.delete_thread("", "u")

        assert everything(backend) == NOTHING

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:36]))
    def test_any_name_of_a_session_means_only_itself(self, backend: Backend, name: str) -> None:
        hostile = SessionRow(name, lane(name, name, name), name, name, name, 1, 1)
        for each in (running(), hostile):
            backend.begin(each, HOUR_US)

        assert shown(backend, thread=name) == [hostile]
        assert backend.end("", name, 9, name)
        assert shown(backend) == [running(), replace(hostile, ended_us=9, reason=name)]
