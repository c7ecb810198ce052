"""Runs of graphs: continued by themselves, submitted, claimed, executed by workers, asleep, cancelled."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, TypedDict

import psycopg
import pytest
from psycopg.rows import dict_row

import backstay
from backstay.engine import Result, Status
from backstay.engine.reducers import append
from backstay.engine.sinks import StoreSink
from backstay.operations.run_records import digest_of_input
from backstay.testing import Clock
from backstay.thread import RunStatus
from support.postgres import PostgresServer
from support.thread.stored_runs import GONE, put_run
from support.waiting import eventually


class State(TypedDict, total=False):
    log: Annotated[list[str], append]
    n: int


class Stop(BaseException):
    """Ends a run as Ctrl-C does."""


Work = Callable[[Any, Any], Any]


def chain(*nodes: str, name: str = "g", **work: Work) -> backstay.Graph:
    """Return a graph of nodes in a row; each logs its name, after its work."""
    graph = backstay.Graph(name, state=State)

    def node(label: str) -> Callable[[Any, Any], dict[str, Any]]:
        def run(state: Any, ctx: Any) -> dict[str, Any]:
            if label in work:
                work[label](state, ctx)
            return {"log": [label]}

        return run

    for label in nodes:
        graph.node(label, node(label))
    for one, two in itertools.pairwise(nodes):
        graph.edge(one, two)
    graph.start(nodes[0])
    graph.end(nodes[-1])
    return graph


class Once:
    """Raises an error the first time it is called."""

    def __init__(self, error: type[BaseException]) -> None:
        self.calls = 0
        self.error = error

    def __call__(self, state: Any, ctx: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            raise self.error


def statuses(store: backstay.Store, **wanted: Any) -> dict[str, str]:
    return {run.thread_id: run.status.value for run in store.runs(**wanted)}


@contextmanager
def opened(url: str) -> Iterator[tuple[backstay.Store, Clock]]:
    clock = Clock()
    with backstay.open(url, clock=clock) as store:
        yield store, clock


# Continued by themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"log": ["hi"]}, None], ids=["same input", "no input"])
def test_run_continues_an_unfinished_run(url: str, given: dict[str, Any] | None) -> None:
    stop = Once(Stop)
    graph = chain("a", "b", b=stop)
    with backstay.open(url) as store:
        with pytest.raises(Stop):
            graph.run_sync(store.thread("t"), {"log": ["hi"]})
        (left,) = store.runs()
        assert (left.status, left.error, left.step, left.attempts) == (RunStatus.ABANDONED, None, 1, 1)
        result = graph.run_sync(store.thread("t"), given)

        assert (result.status, result.values["log"]) == (Status.COMPLETED, ["hi", "a", "b"])
        (done,) = store.runs()
        assert (done.id, done.status, done.attempts) == (left.id, RunStatus.COMPLETED, 2)
        assert done.ended_at is not None


def test_another_input_or_another_graph_on_an_unfinished_run_is_refused(url: str) -> None:
    graph, other = chain("a", "b", b=Once(Stop)), chain("a", name="other")
    with backstay.open(url) as store:
        with pytest.raises(Stop):
            graph.run_sync(store.thread("t"), {"log": ["hi"]})
        before = store.runs()
        with pytest.raises(backstay.InvalidInput, match="unfinished run of graph 'g' with another input"):
            graph.run_sync(store.thread("t"), {"log": ["ho"]})
        with pytest.raises(backstay.InvalidInput, match="unfinished run of graph 'g'"):
            other.run_sync(store.thread("t"), {"log": ["hi"]})
        with pytest.raises(backstay.InvalidInput, match="unfinished run of graph 'g'"), store.thread("t").loop({}):
            pass

        assert [(run.id, run.status, run.attempts) for run in store.runs()] == [
            (run.id, run.status, run.attempts) for run in before
        ]


def test_the_next_run_starts_when_the_last_one_is_over(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        for _ in range(2):
            result = graph.run_sync(store.thread("t"), {"log": ["hi"]})

        assert result.values["log"] == ["hi", "a", "hi", "a"]
        assert [run.status for run in store.runs()] == [RunStatus.COMPLETED] * 2


def test_a_run_with_a_key_is_run_once(url: str) -> None:
    ran: list[str] = []
    graph = chain("a", a=lambda state, ctx: ran.append("a"))
    with backstay.open(url) as store:
        first = graph.run_sync(store.thread("t"), {"log": ["hi"]}, key="order-7")
        graph.run_sync(store.thread("t"), {"log": ["other"]})
        again = graph.run_sync(store.thread("t"), {"log": ["hi"]}, key="order-7")

        assert (again.status, again.run_id, again.values) == (first.status, first.run_id, first.values)
        assert ran == ["a", "a"]
        assert graph.run_sync(store.thread("u"), {}, key="order-7").run_id != first.run_id


def test_a_failed_run_says_so_and_is_continued(url: str) -> None:
    graph = chain("a", "b", b=Once(ValueError))
    with backstay.open(url) as store:
        assert graph.run_sync(store.thread("t"), {"log": []}).status is Status.FAILED
        (run,) = store.runs(status="failed")
        assert (run.error, store.claim(graph)) == ("ValueError", [])
        result = graph.run_sync(store.thread("t"), {"log": []})

        assert result.values["log"] == ["a", "b"]
        assert statuses(store) == {"t": "completed"}


def test_a_refused_start_leaves_no_run_behind(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        with pytest.raises(backstay.InvalidInput):
            graph.run_sync(store.thread("t"), {"unknown": 1})
        with pytest.raises(backstay.NotFound):
            graph.resume_sync(store.thread("t"))

        assert store.runs() == []


def test_a_refused_resume_leaves_the_run_as_it_was(url: str) -> None:
    graph = chain("a", "b", b=lambda state, ctx: ctx.approve("pay", {}))
    with backstay.open(url) as store:
        graph.run_sync(store.thread("t"), {"log": []})
        (before,) = store.runs()
        with pytest.raises(backstay.InvalidInput):
            graph.resume_sync(store.thread("t"), {"no such interrupt": backstay.Approve()})
        with pytest.raises(backstay.GraphMismatch):
            chain("a", "c").resume_sync(store.thread("t"))
        (after,) = store.runs()

        assert (after.status, after.interrupts, after.attempts) == (before.status, before.interrupts, before.attempts)
        assert len(after.interrupts) == 1


def test_a_fork_is_a_run_of_its_own(url: str) -> None:
    graph = chain("a", "b")
    with backstay.open(url) as store:
        thread = store.thread("t")
        graph.run_sync(thread, {"log": []})
        result = graph.replay_sync(thread, thread.at(step=1).id, branch="again")  # type: ignore[union-attr]  # it exists

        assert result.status is Status.COMPLETED
        assert [(run.branch, run.status.value) for run in store.runs()] == [
            ("again", "completed"),
            ("main", "completed"),
        ]


# Submitted and claimed ----------------------------------------------------------------------------------------------


def test_a_submitted_run_is_executed_by_a_worker_with_its_options(url: str) -> None:
    graph = chain("a", "b")
    with backstay.open(url) as store:
        run = graph.submit(store.thread("t"), {"log": ["hi"]}, before=["b"], metadata={"by": "ann"})
        assert (run.status, run.step, store.thread("t").latest()) == (RunStatus.QUEUED, None, None)
        assert graph.work_sync(store, until_idle=True) == 1

        newest = store.thread("t").latest()
        assert newest is not None
        assert (newest.state["log"], newest.metadata, newest.run_id) == (["hi", "a"], {"by": "ann"}, run.id)
        assert statuses(store) == {"t": "interrupted"}


def test_the_same_submission_is_stored_once_and_another_is_refused(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        first = graph.submit(store.thread("t"), {"log": ["hi"]})
        assert graph.submit(store.thread("t"), {"log": ["hi"]}).id == first.id
        with pytest.raises(backstay.InvalidInput, match="another input"):
            graph.submit(store.thread("t"), {"log": ["ho"]})
        with pytest.raises(backstay.InvalidInput, match="unknown"):
            graph.submit(store.thread("u"), {"unknown": 1})
        keyed = graph.submit(store.thread("k"), {"log": []}, key="k")
        graph.work_sync(store, until_idle=True)

        assert graph.submit(store.thread("k"), {"log": []}, key="k").id == keyed.id
        with pytest.raises(backstay.InvalidInput, match="another input"):
            graph.submit(store.thread("k"), {"log": ["x"]}, key="k")
        assert statuses(store) == {"t": "completed", "k": "completed"}


def test_a_queued_run_that_is_run_directly_has_its_own_input_and_options(url: str) -> None:
    graph = chain("a", "b")
    with backstay.open(url) as store:
        for number, given in enumerate([None, {"log": ["hi"]}]):
            thread = store.thread(f"t{number}")
            run = graph.submit(thread, {"log": ["hi"]}, before=["b"], metadata={"by": "ann"})
            result = graph.run_sync(thread, given)

            assert (result.run_id, result.status, result.values["log"]) == (run.id, Status.INTERRUPTED, ["hi", "a"])
            assert result.checkpoint is not None
            assert result.checkpoint.metadata == {"by": "ann"}


def die_at_the_start(store: backstay.Store, graph: backstay.Graph, given: dict[str, Any]) -> None:
    """Leave a run as a process does that is killed after it took the lease and before it stored the input."""
    put_run(
        store,
        "t",
        RunStatus.RUNNING,
        name=graph.name,
        fingerprint=f"{graph.fingerprint:016x}",
        holder=GONE,
        token="gone",
        input_digest=digest_of_input(given),
    )


def test_a_run_whose_input_was_not_stored_needs_it_again(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        die_at_the_start(store, graph, {"log": ["hi"]})
        assert statuses(store) == {"t": "abandoned"}
        with pytest.raises(backstay.InvalidInput, match="died before its input was stored"):
            graph.run_sync(store.thread("t"))
        with pytest.raises(backstay.InvalidInput, match=r"with another input \(abandoned\)"):
            graph.run_sync(store.thread("t"), {"log": ["ho"]})

        assert graph.run_sync(store.thread("t"), {"log": ["hi"]}).values["log"] == ["hi", "a"]
        assert statuses(store) == {"t": "completed"}


def test_a_run_whose_input_was_not_stored_gets_it_from_a_submission(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        die_at_the_start(store, graph, {"log": ["hi"]})
        graph.submit(store.thread("t"), {"log": ["hi"]})

        assert graph.work_sync(store, until_idle=True) == 1
        assert statuses(store) == {"t": "completed"}
        newest = store.thread("t").latest()
        assert newest is not None
        assert newest.state["log"] == ["hi", "a"]


def test_a_failed_run_is_submitted_again_unless_it_has_a_key(url: str) -> None:
    graph = chain("a", a=Once(ValueError))
    keyed = chain("a", name="keyed", a=Once(ValueError))
    with opened(url) as (store, clock):
        for each, key in ((graph, None), (keyed, "k")):
            each.submit(store.thread(each.name), {"log": ["hi"]}, key=key)
            each.work_sync(store, attempts=1, until_idle=True)
        assert statuses(store) == {"g": "failed", "keyed": "failed"}
        again = graph.submit(store.thread("g"), {"log": ["hi"]}, at=clock() + timedelta(hours=1))
        assert keyed.submit(store.thread("keyed"), {"log": ["hi"]}, key="k").status == "failed"
        assert (again.status, again.wake_at) == ("abandoned", clock() + timedelta(hours=1))
        assert graph.work_sync(store, until_idle=True) == 0
        clock.advance(timedelta(hours=1))

        assert graph.work_sync(store, until_idle=True) == 1
        assert statuses(store) == {"g": "completed", "keyed": "failed"}
        newest = store.thread("g").latest()
        assert newest is not None
        assert newest.state["log"] == ["hi", "a"]


def test_a_run_that_fails_before_its_first_checkpoint_keeps_its_input(url: str) -> None:
    graph = chain("a")

    def broken(own: StoreSink) -> Any:
        raise OSError("the sink is away")

    with backstay.open(url) as store:
        graph.submit(store.thread("t"), {"log": ["hi"]})
        graph.work_sync(store, attempts=1, until_idle=True, sink=broken)
        (run,) = store.runs()
        assert (run.status, run.error, run.step) == ("failed", "OSError", None)

        assert graph.run_sync(store.thread("t")).values["log"] == ["hi", "a"]


def test_a_run_is_stored_with_the_callers_transaction_or_not_at_all(
    postgres: PostgresServer, postgres_url: str
) -> None:
    graph = chain("a", a=Once(ValueError))
    with (
        backstay.open(postgres_url) as store,
        psycopg.connect(postgres.url(), autocommit=True, row_factory=dict_row) as connection,
    ):
        connection.execute("create temporary table orders (id text)")
        with connection.transaction(force_rollback=True):
            connection.execute("insert into orders values ('7')")
            graph.submit(store.thread("t"), {"log": ["hi"]}, key="order-7", transaction=connection)
        assert (store.runs(), store.thread("t").latest()) == ([], None)
        with connection.transaction():
            connection.execute("insert into orders values ('7')")
            run = graph.submit(store.thread("t"), {"log": ["hi"]}, key="order-7", transaction=connection)
            assert store.runs() == [], "it is not committed yet"
            assert graph.work_sync(store, until_idle=True) == 0
        assert (store.runs()[0].id, store.runs()[0].status) == (run.id, "queued")
        graph.work_sync(store, attempts=1, until_idle=True)
        assert statuses(store) == {"t": "failed"}
        for is_kept in (False, True):
            with connection.transaction(force_rollback=not is_kept):
                again = graph.submit(store.thread("t"), {"log": ["hi"]}, transaction=connection)
                assert (again.id, again.status) == (run.id, "abandoned")
            assert statuses(store) == {"t": "abandoned" if is_kept else "failed"}
        graph.work_sync(store, until_idle=True)

        assert statuses(store) == {"t": "completed"}


def test_a_transaction_of_another_database_is_refused_and_stores_nothing(
    postgres: PostgresServer, postgres_url: str
) -> None:
    graph = chain("a")
    with (
        backstay.open(postgres_url) as store,
        psycopg.connect(postgres.url(postgres.new_database())) as elsewhere,
        pytest.raises(backstay.StoreError, match="could not be stored in the given transaction"),
    ):
        graph.submit(store.thread("t"), {}, transaction=elsewhere)
    with backstay.open(postgres_url) as store:
        assert store.runs() == []


def test_runs_with_different_keys_are_different_runs(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        first = graph.submit(store.thread("t"), {}, key="october")
        assert graph.submit(store.thread("t"), {}).id == first.id
        for call in (graph.submit, graph.run_sync):
            with pytest.raises(backstay.InvalidInput, match="with another key"):
                call(store.thread("t"), {}, key="november")
        assert graph.run_sync(store.thread("t"), {}).run_id == first.id
        results = [graph.run_sync(store.thread("t"), {}, key=key) for key in ("november", "october", "november")]

        assert [result.values["log"] for result in results] == [["a", "a"], ["a"], ["a", "a"]]
        assert [run.key for run in store.runs()] == ["november", "october"]


def test_who_waits_for_the_run_of_another_key_gets_its_own(url: str, caplog: pytest.LogCaptureFixture) -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(state: Any, ctx: Any) -> None:
        inside.set()
        assert go.wait(30)

    graph = chain("a", a=wait)
    with backstay.open(url) as store, ThreadPoolExecutor() as pool:
        first = pool.submit(graph.run_sync, store.thread("t"), {}, key="october")
        assert inside.wait(30)
        with caplog.at_level(logging.WARNING, "backstay.run"):
            second = pool.submit(graph.run_sync, store.thread("t"), {}, key="november")
            eventually(lambda: "waiting for" in caplog.text)
        go.set()

        assert first.result().values["log"] == ["a"]
        assert second.result().values["log"] == ["a", "a"]
        assert [run.key for run in store.runs()] == ["november", "october"]


def test_a_submitted_run_does_not_start_again_because_other_code_saved_on_top(url: str) -> None:
    ran: list[int] = []
    graph = chain("a", "b", a=lambda state, ctx: ran.append(1), b=Once(Stop))
    with backstay.open(url) as store:
        graph.submit(store.thread("t"), {"log": []})
        (lease,) = store.claim(graph)
        with pytest.raises(Stop), lease:
            graph.resume_sync(lease.thread, lease=lease)
        last = store.thread("t").append(set={"n": 7}).parent_id
        with pytest.raises(
            backstay.InvalidInput, match="other code has saved step 2 of thread 't' on top of its unfinished run"
        ):
            graph.run_sync(store.thread("t"))
        with pytest.raises(backstay.InvalidInput):
            graph.resume_sync(store.thread("t"))
        assert (len(ran), statuses(store)) == (1, {"t": "abandoned"})
        assert last is not None
        store.thread("t").rewind(last)

        assert graph.run_sync(store.thread("t")).values["log"] == ["a", "b"]
        assert (len(ran), statuses(store)) == (1, {"t": "completed"})


def test_a_submitted_run_starts_at_its_time(url: str) -> None:
    graph = chain("a")
    with opened(url) as (store, clock):
        graph.submit(store.thread("t"), {}, at=clock() + timedelta(hours=1))
        assert store.claim(graph) == []
        clock.advance(timedelta(hours=1))

        assert graph.work_sync(store, until_idle=True) == 1
        assert statuses(store) == {"t": "completed"}


def test_runs_are_claimed_by_name_and_fingerprint_only(url: str) -> None:
    one, two, other = chain("a"), chain("a", "b"), chain("a", name="h")
    with backstay.open(url) as store:
        for thread, graph in (("1", one), ("2", two), ("3", other)):
            graph.submit(store.thread(thread), {})
        assert [lease.run.thread_id for lease in store.claim([two], 5)] == ["2"]
        assert [lease.run.thread_id for lease in store.claim(graphs=[other], limit=5)] == ["3"]
        two.migrate(one.fingerprint)

        (lease,) = store.claim([two, other], 5)
        with lease:
            assert two.resume_sync(lease.thread, lease=lease).values["log"] == ["a", "b"]


def test_a_run_whose_process_died_is_claimed_and_continued(url: str) -> None:
    graph = chain("a", "b", b=Once(Stop))
    with backstay.open(url) as store:
        with pytest.raises(Stop):
            graph.run_sync(store.thread("t"), {"log": []})
        (lease,) = store.claim(graph)
        assert (lease.run.status, lease.run.attempts, lease.run.step) == (RunStatus.RUNNING, 2, 1)
        assert store.claim(graph) == []
        with lease:
            result = graph.resume_sync(lease.thread, lease=lease)

        assert result.values["log"] == ["a", "b"]


def test_a_claimed_run_that_nothing_executes_can_be_claimed_again(url: str) -> None:
    graph = chain("a")
    with backstay.open(url) as store:
        graph.submit(store.thread("t"), {})
        for _ in range(3):
            (lease,) = store.claim(graph)
            lease.release()

        assert statuses(store) == {"t": "queued"}


def test_a_decision_a_value_and_a_timeout_make_their_run_claimable(url: str) -> None:
    graph = chain(
        "ask",
        ask=lambda state, ctx: (
            ctx.approve("pay", {}, timeout=60) if state["n"] == 1 else ctx.wait_for("news", timeout=60)
        ),
    )
    with opened(url) as (store, clock):
        for name, n in (("decided", 1), ("sent", 2), ("late", 1)):
            graph.run_sync(store.thread(name), {"n": n})
        assert store.claim(graph, 5) == []
        question = next(record for record in store.interrupts() if record.thread_id == "decided")
        store.thread("decided").decide(question, "approve", by="ann")
        store.thread("sent").send("news", "hi")
        assert graph.work_sync(store, until_idle=True) == 2
        assert statuses(store) == {"decided": "completed", "sent": "completed", "late": "interrupted"}
        clock.advance(timedelta(seconds=60))
        graph.work_sync(store, until_idle=True)

        assert statuses(store, thread="late") == {"late": "cancelled"}  # a timeout means no


def test_an_answer_that_comes_while_the_run_is_executed_is_not_forgotten(url: str) -> None:
    """A process asks two questions; the first is answered before it has stored that it waits."""
    with backstay.open(url) as store:

        def late(state: Any, ctx: Any) -> None:
            while not (found := list(store.interrupts())):
                pass
            store.thread("t").decide(found[0], "approve", by="ann")

        graph = backstay.Graph("g", state=State)
        graph.node("s", lambda state: None)
        graph.node("ask", lambda state, ctx: ctx.approve("pay", {}) and None)
        graph.node("late", late)
        graph.parallel("s", ["ask", "late"])
        graph.start("s")
        asyncio.run(graph.run(store.thread("t"), {}))
        while graph.work_sync(store, until_idle=True):
            pass

        assert statuses(store) == {"t": "completed"}


@pytest.mark.parametrize("error", [ValueError, backstay.InvalidInput])
def test_a_failing_run_is_tried_again_after_growing_pauses_and_then_has_failed(
    url: str, error: type[Exception]
) -> None:
    calls: list[int] = []

    def broken(state: Any, ctx: Any) -> None:
        calls.append(1)
        raise error("no")

    graph = chain("a", "b", b=broken)
    with opened(url) as (store, clock):
        graph.submit(store.thread("t"), {})
        for tried in (1, 2):
            graph.work_sync(store, until_idle=True, attempts=3)
            (run,) = store.runs()
            assert (run.status, len(calls), run.error) == (RunStatus.ABANDONED, tried, error.__name__)
            clock.advance(timedelta(seconds=2 ** (tried - 1) - 0.1))
            assert store.claim(graph) == []
            clock.advance(timedelta(seconds=0.2))
        graph.work_sync(store, until_idle=True, attempts=3)

        assert statuses(store) == {"t": "failed"}
        assert (len(calls), store.claim(graph)) == (3, [])


def test_failures_count_only_without_a_step_in_between(url: str) -> None:
    turns: dict[int, int] = {}

    def flaky(state: Any, ctx: Any) -> dict[str, Any]:
        turns[len(state["log"])] = turns.get(len(state["log"]), 0) + 1
        if turns[len(state["log"])] == 1:
            raise ConnectionError
        return {"log": ["a"]}

    graph = backstay.Graph("g", state=State)
    graph.node("a", flaky)
    graph.edge("a", "a", when=lambda state: len(state["log"]) < 5, name="more")
    graph.start("a")
    graph.end("a")
    with opened(url) as (store, clock):
        graph.submit(store.thread("t"), {"log": []})
        for _ in range(6):
            graph.work_sync(store, until_idle=True, attempts=2)
            clock.advance(timedelta(minutes=10))

        assert statuses(store) == {"t": "completed"}


def test_many_runs_at_a_time(url: str) -> None:
    graph = chain("a", "b")
    with backstay.open(url) as store:
        for number in range(10):
            graph.submit(store.thread(f"t{number}"), {"log": []})
        assert graph.work_sync(store, concurrency=4, until_idle=True) == 10

        assert set(statuses(store).values()) == {"completed"}


def test_work_and_submit_with_await(url: str) -> None:
    graph = chain("a")

    async def main() -> None:
        async with await backstay.aopen(url) as store:
            run = await graph.submit(store.thread("t"), {})
            assert run.status is RunStatus.QUEUED
            assert await graph.work(store, until_idle=True) == 1
            (done,) = await store.runs(status="completed")
            assert (await done.refresh()).id == run.id
            cancelled = await (await graph.submit(store.thread("u"), {})).cancel("no", by="ann")
            assert cancelled.status is RunStatus.CANCELLED

    asyncio.run(main())


def test_a_worker_that_is_cancelled_leaves_its_runs_to_others(url: str) -> None:
    inside = asyncio.Event()

    async def main() -> None:
        graph = backstay.Graph("g", state=State)

        async def slow(state: Any) -> None:
            inside.set()
            await asyncio.Event().wait()

        graph.node("slow", slow)
        graph.start("slow")
        graph.end("slow")
        async with await backstay.aopen(url) as store:
            await graph.submit(store.thread("t"), {})
            task = asyncio.create_task(graph.work(store))
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (run,) = await store.runs()
            assert run.status is RunStatus.ABANDONED
            assert len(await store.claim(graph)) == 1

    asyncio.run(main())


# Asleep -------------------------------------------------------------------------------------------------------------


def test_a_sleep_needs_no_process_and_is_over_at_its_time(url: str) -> None:
    ran: list[str] = []

    def sleepy(state: Any, ctx: Any) -> None:
        ctx.call("once", ran.append, "before")
        ctx.sleep(3600)
        ran.append("after")

    graph = chain("a", "b", b=sleepy)
    with opened(url) as (store, clock):
        result = graph.run_sync(store.thread("t"), {"log": []})
        assert (result.status, result.wake_at) == (Status.SLEEPING, clock() + timedelta(hours=1))
        (run,) = store.runs(status="sleeping")
        assert (run.wake_at, list(store.interrupts()), store.claim(graph)) == (result.wake_at, [], [])
        clock.advance(timedelta(minutes=59))
        assert graph.run_sync(store.thread("t"), {"log": []}).status is Status.SLEEPING
        clock.advance(timedelta(minutes=1))
        assert graph.work_sync(store, until_idle=True) == 1

        assert (ran, statuses(store)) == (["before", "after"], {"t": "completed"})


def test_sleeping_until_a_moment_and_side_by_side(url: str) -> None:
    with opened(url) as (store, clock):
        until = clock() + timedelta(minutes=5)
        graph = backstay.Graph("g", state=State)
        graph.node("s", lambda state: None)
        graph.node("one", lambda state, ctx: ctx.sleep(until=until))
        graph.node("two", lambda state, ctx: ctx.sleep(60))
        graph.parallel("s", ["one", "two"])
        graph.start("s")
        assert graph.run_sync(store.thread("t"), {}).wake_at == clock() + timedelta(minutes=1)
        clock.advance(timedelta(minutes=1))
        graph.work_sync(store, until_idle=True)
        assert statuses(store) == {"t": "sleeping"}
        clock.advance(timedelta(minutes=4))
        graph.work_sync(store, until_idle=True)

        assert statuses(store) == {"t": "completed"}


@pytest.mark.parametrize("given", [{}, {"seconds": 1, "until": "soon"}, {"seconds": -1}, {"until": "soon"}])
def test_a_sleep_that_makes_no_sense_fails_the_node(given: dict[str, Any]) -> None:
    graph = chain("a", a=lambda state, ctx: ctx.sleep(**given))
    with backstay.open("memory:") as store:
        result = graph.run_sync(store.thread("t"), {})

        assert result.status is Status.FAILED


# Cancelled ----------------------------------------------------------------------------------------------------------


def test_runs_that_no_process_executes_are_cancelled_at_once(url: str) -> None:
    graph = chain("a", "b", b=lambda state, ctx: ctx.approve("pay", {}))
    with backstay.open(url) as store:
        graph.submit(store.thread("queued"), {})
        graph.run_sync(store.thread("waiting"), {"log": []})
        for run in store.runs():
            ended = run.cancel("not needed", by="ann")
            assert (ended.status, ended.reason) == (RunStatus.CANCELLED, "not needed")
            with pytest.raises(backstay.InvalidInput, match="is over"):
                ended.cancel(by="bob")

        assert (list(store.interrupts()), store.claim(graph, 5)) == ([], [])
        with pytest.raises(backstay.InvalidInput, match="is over"):
            graph.resume_sync(store.thread("waiting"))
        assert graph.run_sync(store.thread("waiting"), {"log": ["again"]}).status is Status.INTERRUPTED


def test_a_running_run_is_cancelled_between_two_nodes(url: str) -> None:
    with backstay.open(url) as store:

        def cancels(state: Any, ctx: Any) -> None:
            (run,) = store.runs(status="running")
            assert run.cancel("enough", by="ann").status is RunStatus.RUNNING

        graph = chain("a", "b", "c", b=cancels)
        result = graph.run_sync(store.thread("t"), {"log": []}, pause_check_s=0)

        assert (result.status, result.reason, result.values["log"]) == (Status.CANCELLED, "enough", ["a", "b"])
        (run,) = store.runs()
        assert (run.status, run.reason) == (RunStatus.CANCELLED, "enough")
        assert graph.submit(store.thread("t"), {"log": ["x"]}).status is RunStatus.QUEUED


def test_a_paused_run_waits_for_a_person_and_is_claimable_after(url: str) -> None:
    with backstay.open(url) as store:

        def pauses(state: Any, ctx: Any) -> None:
            if not state["log"][1:]:
                store.runs()[0].pause("look at this", by="ann")

        graph = chain("a", "b", "c", b=pauses)
        result = graph.run_sync(store.thread("t"), {"log": []}, pause_check_s=0)
        assert result.status is Status.INTERRUPTED
        store.thread("t").decide(result.interrupts[0], "approve", by="ann")
        graph.work_sync(store, until_idle=True)

        assert statuses(store) == {"t": "completed"}


# Logs and lists -----------------------------------------------------------------------------------------------------


def test_logs_name_the_thread_and_the_run_and_nothing_of_the_state(caplog: pytest.LogCaptureFixture) -> None:
    graph = chain("a", a=Once(ValueError))
    with backstay.open("memory:") as store, caplog.at_level(logging.DEBUG, "backstay"):
        run = graph.submit(store.thread("customer-42"), {"log": ["secret"]})
        graph.work_sync(store, until_idle=True)

        assert {record.name.split(".")[0] for record in caplog.records} == {"backstay"}
        assert all("customer-42" in text and run.id in text for text in caplog.messages)
        assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        lambda store, graph: store.runs(status="going"),
        lambda store, graph: store.runs(limit=0),
        lambda store, graph: store.runs(after="x"),
        lambda store, graph: store.runs(graph=graph),
        lambda store, graph: store.claim([]),
        lambda store, graph: store.claim(5),
        lambda store, graph: store.claim(["g"]),
        lambda store, graph: store.claim(graph, 0),
        lambda store, graph: graph.submit(store.thread("t"), {}, at="tomorrow"),
        lambda store, graph: graph.submit(store.thread("t"), {}, key=""),
        lambda store, graph: graph.submit(store.thread("t"), {}, transaction=object()),
        lambda store, graph: graph.work_sync(store, concurrency=0, until_idle=True),
        lambda store, graph: graph.work_sync(store.thread("t"), until_idle=True),
        lambda store, graph: graph.work_sync(store, wait=1, until_idle=True),
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[backstay.Store, backstay.Graph], Any]) -> None:
    with backstay.open("memory:") as store, pytest.raises(backstay.InvalidInput):
        wrong(store, chain("a"))


def test_results_of_runs_are_typed(url: str) -> None:
    with backstay.open(url) as store:
        result: Result = chain("a").run_sync(store.thread("t"), {})
        run = store.runs()[0]

        assert (run.id, run.thread.id, run.graph, run.kind) == (result.run_id, "t", "g", "graph")
        assert run.fingerprint == f"{chain('a').fingerprint:016x}"
        assert "completed" in repr(run)


def test_a_second_process_waits_and_gets_the_result_of_the_first(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It wanted to continue the same run, so it does not run it again. Another input is a run of its own."""
    inside, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def slow(state: Any, ctx: Any) -> None:
        ran.append(1)
        if len(ran) == 1:
            inside.set()
            assert go_on.wait(30)

    graph = chain("a", a=slow)
    with backstay.open(url) as store, ThreadPoolExecutor(3) as pool:
        first = pool.submit(graph.run_sync, store.thread("t"), {"log": ["hi"]})
        assert inside.wait(30)
        with pytest.raises(backstay.Fenced):
            graph.run_sync(store.thread("t"), {"log": ["ho"]}, wait=0)
        with caplog.at_level(logging.WARNING, "backstay.run"):
            same = pool.submit(graph.run_sync, store.thread("t"), {"log": ["hi"]})
            eventually(lambda: "waiting for" in caplog.text)
        other = pool.submit(graph.run_sync, store.thread("t"), {"log": ["ho"]})
        go_on.set()

        assert same.result().run_id == first.result().run_id
        assert same.result().values["log"] == ["hi", "a"]
        assert other.result().values["log"][-2:] == ["ho", "a"]
        assert len(ran) == 2


def test_a_request_to_cancel_that_came_too_late_is_obeyed_by_the_next_process(url: str) -> None:
    with backstay.open(url) as store:

        def asks(state: Any, ctx: Any) -> None:
            store.runs(status="running")[0].cancel("enough", by="ann")
            ctx.approve("pay", {})

        graph = chain("a", a=asks)
        graph.run_sync(store.thread("t"), {}, pause_check_s=3600)
        graph.work_sync(store, until_idle=True)

        assert statuses(store) == {"t": "cancelled"}


def test_a_cancelled_run_that_is_rewound_runs_again(url: str) -> None:
    with backstay.open(url) as store:
        stops = [True]

        def cancels(state: Any, ctx: Any) -> None:
            if stops.pop():
                store.runs(status="running")[0].cancel("enough", by="ann")
            stops.append(False)

        graph, thread = chain("a", "b", a=cancels), store.thread("t")
        assert graph.run_sync(thread, {"log": []}, pause_check_s=0).status is Status.CANCELLED
        first = thread.at(0)
        assert first is not None
        thread.rewind(first)
        result = graph.resume_sync(thread, pause_check_s=0)

        assert (result.status, result.values["log"]) == (Status.COMPLETED, ["a", "b"])
        (run,) = store.runs()
        assert (run.status, run.reason) == (RunStatus.COMPLETED, "")


def test_two_stores_in_memory_are_not_taken_for_one() -> None:
    """A block that holds a thread of one of them does not keep a run from waiting for the other's."""
    released = threading.Event()
    with backstay.open("memory:") as one, backstay.open("memory:") as two, ThreadPoolExecutor(1) as pool:
        lease = two.thread("t").lease()
        pool.submit(lease.__enter__).result()

        def release() -> None:
            assert released.wait(30)
            lease.release()

        ending = pool.submit(release)
        with one.thread("t").lease():
            released.set()
            assert chain("a").run_sync(two.thread("t"), {}).status is Status.COMPLETED
        ending.result()
