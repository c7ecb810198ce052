"""Nodes that have no attempts left: their fallback, and the person who is asked instead of ending the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.engine import Status
from backstay.engine.events import NodeAttemptFailed, NodeStarted
from backstay.errors import Fenced, Unrecovered
from backstay.errors import NodeFailed as FailedNode
from backstay.model.decision import Approve, Defer, Modify, Reject, Reroute
from backstay.retry import ErrorCategory, Incident, RetryPolicy
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_services
from support.engine.event_log import EventLog
from support.engine.walk import State, Walk, asked, head

TWICE = RetryPolicy(1, first_s=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[backstay.Store]:
    with backstay.open(str(tmp_path / "a.db")) as opened:
        yield opened
        assert opened.check()


@pytest.fixture
def thread(store: backstay.Store) -> backstay.Thread:
    return store.thread("t")


class Down:
    """A node that fails until it is mended, and counts its attempts."""

    def __init__(self, error: type[BaseException] = ConnectionRefusedError) -> None:
        self.error: type[BaseException] | None = error
        self.attempts: list[int] = []

    def __call__(self, state: Any, ctx: Any) -> dict[str, Any]:
        self.attempts.append(ctx.attempt)
        if self.error is not None:
            raise self.error("hunter2")
        return {"seen": ["b"], "note": "mended"}


def graph_of(node: Any, walk: Walk | None = None, **options: Any) -> Graph:
    walk = walk or Walk()
    graph = Graph("g", state=State)
    graph.node("a", walk.node("a"))
    graph.node("b", node, **{"retry": TWICE, **options})
    graph.node("c", walk.node("c"))
    graph.edge("a", "b")
    graph.edge("b", "c")
    graph.start("a")
    graph.end("c")
    return graph


# Fallbacks --------------------------------------------------------------------------------------------------------


def test_a_fallback_takes_the_nodes_place_once_there_are_no_attempts_left() -> None:
    errors: list[Exception | None] = []

    def instead(state: Any, ctx: Any) -> dict[str, Any]:
        errors.append(ctx.error)
        return {"note": "instead", "seen": ["fallback"]}

    log = EventLog()
    down = Down()
    result = graph_of(down, fallback=instead).run_sync(None, on_event=log)

    assert (result.status, result.values["seen"], down.attempts) == (
        Status.COMPLETED,
        ["a", "fallback", "c"],
        [1, 2],
    )
    assert [type(error) for error in errors] == [ConnectionRefusedError]
    assert [(each.attempt, each.will_retry) for each in log.of(NodeAttemptFailed)] == [(1, True), (2, True)]
    log.check()


def test_a_fallback_may_be_asynchronous_and_is_not_called_for_a_success() -> None:
    async def instead(state: Any) -> dict[str, Any]:
        return {"note": "instead"}

    down = Down()
    graph = graph_of(down, fallback=instead)
    assert asyncio.run(graph.run(None)).values["note"] == "instead"
    down.error = None
    assert graph.run_sync(None).values["note"] == "mended"


def test_a_fallback_that_fails_too_fails_the_run_with_both_errors() -> None:
    def instead(state: Any) -> None:
        raise ValueError

    log = EventLog()
    result = graph_of(Down(), fallback=instead).run_sync(None, on_event=log)

    assert (result.status, type(result.error)) == (Status.FAILED, FailedNode)
    assert isinstance(result.error, FailedNode)
    assert isinstance(result.error.error, ValueError)
    assert isinstance(result.error.error.__context__, ConnectionRefusedError)
    log.check()


@pytest.mark.parametrize(
    "options", [{"fallback": lambda state: {}}, {"on_failure": "pause"}], ids=["fallback", "pause"]
)
def test_an_error_of_another_writer_is_neither_replaced_nor_asked_about(
    thread: backstay.Thread, options: dict[str, Any]
) -> None:
    def fenced(state: Any) -> None:
        raise Fenced("another owner", epoch=1, current=2)

    with pytest.raises(Fenced):
        graph_of(fenced, **options).run_sync(thread)


# Pausing ----------------------------------------------------------------------------------------------------------


def test_a_run_waits_with_an_incident_instead_of_failing(store: backstay.Store, thread: backstay.Thread) -> None:
    down, walk, log = Down(), Walk(), EventLog()
    graph = graph_of(down, walk, on_failure="pause")
    result = graph.run_sync(thread, on_event=log)

    assert (result.status, asked(result), down.attempts) == (Status.INTERRUPTED, ["b"], [1, 2])
    (shown,) = store.interrupts()
    incident = Incident.from_plain(shown.interrupt.payload)
    assert (incident.operation, incident.attempts) == ("node 'b'", 2)
    assert (incident.failure.category, incident.failure.type) == (ErrorCategory.TRANSIENT, "ConnectionRefusedError")
    assert "hunter2" not in repr(shown.interrupt)
    assert shown.checkpoint_id == head(thread).id
    assert walk.ran == ["a"]
    log.check()


def test_until_there_is_an_answer_the_node_does_not_run(store: backstay.Store, thread: backstay.Thread) -> None:
    down = Down()
    graph = graph_of(down, on_failure="pause")
    graph.run_sync(thread)
    down.error = None
    again = [graph.resume_sync(thread) for _ in range(2)]

    assert [each.status for each in again] == [Status.INTERRUPTED] * 2
    assert (down.attempts, len(list(store.interrupts(pending=False)))) == ([1, 2], 1)


def test_an_approval_gives_the_node_all_its_attempts_again(store: backstay.Store, thread: backstay.Thread) -> None:
    down, log = Down(), EventLog()
    graph = graph_of(down, on_failure="pause")
    graph.run_sync(thread)
    second = graph.resume_sync(thread, Approve(), on_event=log)
    assert (second.status, down.attempts) == (Status.INTERRUPTED, [1, 2, 1, 2])
    assert [each.attempt for each in log.of(NodeStarted)] == [1, 2]
    log.check()
    down.error = None
    third = graph.resume_sync(thread, Approve())

    assert (third.status, third.values["seen"]) == (Status.COMPLETED, ["a", "b", "c"])
    assert (len(list(store.interrupts(pending=False))), list(store.interrupts())) == (2, [])


def test_a_modification_goes_on_with_that_update_and_without_the_node(thread: backstay.Thread) -> None:
    down, walk = Down(), Walk()
    graph = graph_of(down, walk, on_failure="pause")
    graph.run_sync(thread)
    result = graph.resume_sync(thread, Modify({"note": "by hand"}))

    assert (result.status, result.values["note"], result.path) == (Status.COMPLETED, "by hand", ("a", "b", "c"))
    assert (down.attempts, walk.ran) == ([1, 2], ["a", "c"])


def test_an_update_that_the_state_cannot_take_is_asked_for_anew(thread: backstay.Thread) -> None:
    graph = graph_of(Down(), on_failure="pause")
    graph.run_sync(thread)
    again = graph.resume_sync(thread, Modify({"nonsense": 1}))

    assert again.status is Status.INTERRUPTED
    assert "could not be used" in again.interrupts[0].interrupt.prompt
    once_more = graph.resume_sync(thread)  # the same question, found again
    assert [each.id for each in once_more.interrupts] == [each.id for each in again.interrupts]
    assert graph.resume_sync(thread, Modify({})).status is Status.COMPLETED


def test_a_rejection_fails_the_run_as_if_nobody_had_been_asked(store: backstay.Store, thread: backstay.Thread) -> None:
    down = Down()
    graph = graph_of(down, on_failure="pause")
    graph.run_sync(thread)
    result = graph.resume_sync(thread, Reject("not today"))

    assert result.status is Status.FAILED
    assert isinstance(result.error, FailedNode)
    assert isinstance(result.error.error, Unrecovered)
    assert "ConnectionRefusedError (transient), and a person rejected it: not today" in str(result.error.error)
    assert list(store.interrupts()) == []
    down.error = None
    assert graph.resume_sync(thread).status is Status.COMPLETED  # what failed can be resumed, as always


def test_a_deferral_asks_again_and_a_reroute_goes_elsewhere(thread: backstay.Thread) -> None:
    down, walk = Down(), Walk()
    graph = graph_of(down, walk, on_failure="pause")
    graph.run_sync(thread)
    assert graph.resume_sync(thread, Defer()).status is Status.DEFERRED
    assert graph.resume_sync(thread).status is Status.INTERRUPTED
    result = graph.resume_sync(thread, Reroute("c"))

    assert (result.status, walk.ran, down.attempts) == (Status.COMPLETED, ["a", "c"], [1, 2])


def test_a_worker_that_dies_after_the_approval_leaves_the_attempts_that_are_left(thread: backstay.Thread) -> None:
    """The decision is consumed, one attempt of the new ones is made, and the process dies."""
    down = Down()
    graph = graph_of(down, on_failure="pause", retry=RetryPolicy(2, first_s=0))
    graph.run_sync(thread)

    def die(event: Any) -> None:
        if isinstance(event, NodeStarted) and event.attempt == 2:
            raise Dies

    with pytest.raises(Dies):
        graph.resume_sync(thread, Approve(), on_event=die)
    result = graph.resume_sync(thread)

    assert (result.status, down.attempts) == (Status.INTERRUPTED, [1, 2, 3, 1, 2, 3])


def test_a_worker_that_dies_in_a_fallback_does_not_begin_the_count_anew(thread: backstay.Thread) -> None:
    down, deaths = Down(), [Dies]

    def instead(state: Any) -> dict[str, Any]:
        if deaths:
            raise deaths.pop()
        return {"note": "instead"}

    graph = graph_of(down, fallback=instead)
    with pytest.raises(Dies):
        graph.run_sync(thread)

    assert graph.resume_sync(thread).values["note"] == "instead"
    assert down.attempts == [1, 2, 3]  # once more, to have an error for the fallback; not all attempts again


class Dies(BaseException):
    """Ends a process, as far as the store can tell."""


class Deadly:
    """A store whose process ends right before, or right after, it records an interrupt."""

    def __init__(self, backend: Any, after: bool) -> None:
        self._backend = backend
        self._after = after

    def __getattr__(self, verb: str) -> Any:
        done = getattr(self._backend, verb)
        return self._put_record if verb == "put_record" else done

    def _put_record(self, record: Any, *how: Any) -> Any:
        if record.kind != "interrupt":
            return self._backend.put_record(record, *how)
        if self._after:
            self._backend.put_record(record, *how)
        raise Dies


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_worker_that_dies_while_it_asks_leaves_one_question_and_no_new_attempt(tmp_path: Path, after: bool) -> None:
    url, down = str(tmp_path / "b.db"), Down()
    graph = graph_of(down, on_failure="pause")
    with Store(Deadly(open_backend(url), after), make_services("", None)) as dying, pytest.raises(Dies):
        graph.run_sync(dying.thread("t"), lease_s=None)
    with backstay.open(url) as store:
        asked = [graph.resume_sync(store.thread("t")) for _ in range(2)]
        assert [each.status for each in asked] == [Status.INTERRUPTED] * 2
        assert (len(list(store.interrupts(pending=False))), down.attempts) == (1, [1, 2])
        down.error = None
        assert graph.resume_sync(store.thread("t"), Approve()).status is Status.COMPLETED


def test_branches_beside_a_failed_one_go_on_and_are_not_run_again(thread: backstay.Thread) -> None:
    walk, down = Walk(), Down()
    graph = walk.fan("b", "d")
    graph.node("broken", down, retry=TWICE, on_failure="pause")
    graph._edges.clear()
    graph._starts.clear()
    graph.parallel("split", ["b", "broken", "d"], join="join")
    graph.start("split")
    graph.end("join")
    first = graph.run_sync(thread)
    assert (first.status, asked(first)) == (Status.INTERRUPTED, ["broken"])
    assert sorted(walk.ran) == ["b", "d", "split"]
    down.error = None
    result = graph.resume_sync(thread, Approve())

    assert result.status is Status.COMPLETED
    assert sorted(walk.ran) == ["b", "d", "join", "split"]


def test_a_node_inside_a_subgraph_waits_at_its_own_place(thread: backstay.Thread) -> None:
    down = Down()
    outer = Graph("outer", state=State)
    outer.subgraph("inside", graph_of(down, on_failure="pause"))
    outer.start("inside")
    outer.end("inside")
    result = outer.run_sync(thread)
    assert result.interrupts[0].interrupt.payload["position"] == "outer/inside#1>g/b#1"
    down.error = None

    assert outer.resume_sync(thread, Approve()).values["note"] == "mended"


def test_a_fork_of_a_waiting_run_tries_the_node_anew(thread: backstay.Thread) -> None:
    down = Down()
    graph = graph_of(down, on_failure="pause")
    graph.run_sync(thread)
    fork = thread.fork(head(thread), branch="other")
    down.error = None

    assert graph.resume_sync(fork).status is Status.COMPLETED
    assert graph.resume_sync(thread).status is Status.INTERRUPTED


def test_a_fallback_is_tried_before_anybody_is_asked(thread: backstay.Thread) -> None:
    def instead(state: Any) -> None:
        raise PermissionError(13, "Permission denied")

    result = graph_of(Down(), fallback=instead, on_failure="pause").run_sync(thread)

    assert result.status is Status.INTERRUPTED
    assert result.interrupts[0].interrupt.payload["category"] == "configuration"


def test_a_run_without_a_thread_cannot_wait_and_fails() -> None:
    assert graph_of(Down(), on_failure="pause").run_sync(None).status is Status.FAILED


def test_stopping_the_program_is_no_failure_to_ask_about(store: backstay.Store, thread: backstay.Thread) -> None:
    with pytest.raises(KeyboardInterrupt):
        graph_of(Down(KeyboardInterrupt), on_failure="pause", fallback=lambda state: {}).run_sync(thread)
    assert list(store.interrupts()) == []


@pytest.mark.parametrize(
    "wrong", [{"on_failure": "ignore"}, {"fallback": "f"}, {"retry": 3}], ids=lambda wrong: next(iter(wrong))
)
def test_what_can_never_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(backstay.InvalidInput):
        Graph("g").node("a", lambda state: None, **wrong)
