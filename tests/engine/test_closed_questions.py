"""Questions and pause requests of a run that is over: they leave the list, and nobody can decide them any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import Graph
from backstay.bundle import export_bundle, import_bundle
from backstay.engine import Status
from backstay.errors import Conflict, InvalidInput
from backstay.model.decision import Answer, Approve, Reject
from backstay.model.runs import Outcome
from backstay.operations import interrupts
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.records import all_records
from backstay.store.base import Backend
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services
from support.meanwhile import Meanwhile, dies_after


def cleanup(files: str = "ab") -> Graph:
    """Ask about each file in a branch of its own; a no ends the run."""
    graph = Graph("cleanup")
    graph.node("list", lambda state: {"files": list(files)})
    graph.node("remove", lambda state, ctx: ctx.approve("remove", {"file": ctx.item}) and None)
    graph.map("list", "remove", over="files")
    graph.start("list")
    return graph


def one(node: Callable[..., Any], name: str = "one") -> Graph:
    graph = Graph(name)
    graph.node("act", node)
    graph.start("act")
    graph.end("act")
    return graph


def chain(*nodes: Callable[..., Any]) -> Graph:
    graph = Graph("chain")
    for number, node in enumerate(nodes):
        graph.node(f"n{number}", node)
        if number:
            graph.edge(f"n{number - 1}", f"n{number}")
    graph.start("n0")
    graph.end(f"n{len(nodes) - 1}")
    return graph


def open_records(store: backstay.Store) -> list[str]:
    """Return the ids of records that are open in the store, whether or not lists show them."""
    access = access_of(store)
    return [each.key for each in all_records(access.store, "interrupt", access.services.namespace, None, True)]


def start_of(thread: backstay.Thread) -> backstay.Checkpoint:
    found = thread.at(step=0)
    assert found is not None
    return found


def question_id(thread: backstay.Thread, payload: object) -> str:
    (found,) = [record.id for record in thread.interrupts() if record.interrupt.payload == payload]
    return found


def refused(thread: backstay.Thread, record: InterruptRecord) -> None:
    with pytest.raises(Conflict, match="is closed: its run is over, or has moved past it") as caught:
        thread.decide(record, "reject", by="late")
    assert caught.value.winner.decision is None
    with pytest.raises(Conflict, match="is closed"):
        thread.consume(record, by="late")


# The end of a run -------------------------------------------------------------------------------------------------


def test_a_rejected_run_takes_its_other_questions_off_the_list(store: backstay.Store, thread: backstay.Thread) -> None:
    graph = cleanup()
    first, second = graph.run_sync(thread, {}).interrupts
    assert graph.resume_sync(thread, {first.id: Reject("no")}).status is Status.REJECTED

    assert list(store.interrupts()) == list(thread.interrupts()) == []
    assert open_records(store) == []
    refused(thread, second)
    kept = {record.id: record for record in thread.interrupts(pending=False)}
    assert (kept[second.id].closed, kept[second.id].decision, kept[first.id].closed) == (True, None, False)
    assert "closed without a decision" in str(kept[second.id])
    assert store.prune(backstay.Keep(last=1), dry_run=False).kept == 1


def test_a_decision_that_came_too_late_for_a_rejected_run_stays_in_its_record(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    graph = cleanup("abc")
    first, second, _ = graph.run_sync(thread, {}).interrupts
    thread.decide(first, "reject", by="ann")
    decided = thread.decide(second, "modify", by="bob", value={"file": "x"})
    graph.resume_sync(thread)

    assert open_records(store) == []
    assert thread.decide(second, "modify", by="bob", value={"file": "x"}).decision == decided.decision
    with pytest.raises(Conflict, match="already decided"):
        thread.decide(second, "approve", by="late")


def test_a_crash_before_the_questions_of_a_rejected_run_are_closed_is_healed() -> None:
    """Wherever the process dies, the list shows what can still be used, and the next run closes the rest."""
    open_after_the_end = set()
    for calls in range(1, 100):
        with backstay.open("memory:") as store:
            thread, graph = store.thread("t"), cleanup()
            first, second = graph.run_sync(thread, {}).interrupts
            thread.decide(first, "reject", by="ann")

            def resume(dying: Backend, graph: Graph = graph) -> None:
                graph.resume_sync(Store(dying, make_services("", None)).thread("t"), lease_s=None)

            died = dies_after(calls, store, resume)
            head = thread.latest()
            assert head is not None
            waiting = [record.id for record in store.interrupts() if record.decision is None]
            assert waiting == ([] if head.is_over else [second.id])
            if head.is_over:
                open_after_the_end.add(second.id in open_records(store))
                refused(thread, second)
                assert graph.run_sync(thread, {}).status is Status.INTERRUPTED
                assert len(open_records(store)) == len(list(store.interrupts())) == 2
        if not died:
            break

    assert open_after_the_end == {True, False}  # it died before they were closed, and after


def test_pruning_does_not_keep_a_checkpoint_for_a_question_that_a_crash_left_open(store: backstay.Store) -> None:
    thread = store.thread("t")
    one(lambda state: store.thread("t").request_pause("too late", by="ann") and None).run_sync(thread, {})
    assert len(open_records(store)) == 1

    assert store.prune(backstay.Keep(last=1), dry_run=False).kept == 1
    assert open_records(store) == []


def test_a_run_without_questions_only_reads_the_lists_at_its_start() -> None:
    class Counting(Meanwhile):
        def __getattr__(self, name: str) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return super().__getattr__(name)

    counted: dict[str, int] = {}
    graph = chain(lambda state: {"a": 1}, lambda state: {"b": 1})
    with backstay.open("memory:") as store:
        graph.run_sync(store.thread("t"), {})
        watched: Any = Counting(access_of(store).store)
        graph.run_sync(Store(watched, make_services("", None)).thread("t"), {}, pause_check_s=3600)

    assert (counted["records"], counted.get("put_record", 0)) == (2, 0)  # of earlier runs, and requests to pause


# Requests to pause ------------------------------------------------------------------------------------------------


def test_a_request_that_came_too_late_does_not_pause_the_next_run(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    late: list[InterruptRecord] = []
    other = store.thread(thread.id)
    first = one(lambda state: late.append(other.request_pause("too late", by="ann")))
    assert first.run_sync(thread, {}).status is Status.COMPLETED

    assert list(store.interrupts()) == []
    with pytest.raises(InvalidInput, match=r"no run is under way on branch 'main'.*before="):
        other.request_pause(by="ann")
    refused(thread, late[0])
    assert (
        chain(lambda state: None, lambda state: None).run_sync(thread, {}, pause_check_s=0).status is Status.COMPLETED
    )
    assert open_records(store) == []


def test_a_request_that_nobody_looked_at_is_closed_by_the_next_run(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    other = store.thread(thread.id)
    one(lambda state: other.request_pause("too late", by="ann") and None).run_sync(thread, {})
    assert len(open_records(store)) == 1

    graph = chain(
        lambda state: None, lambda state: other.request_pause("in time", by="ann") and None, lambda state: None
    )
    result = graph.run_sync(thread, {}, pause_check_s=0)

    assert [record.interrupt.prompt for record in result.interrupts] == ["in time"]
    assert [record.interrupt.prompt for record in store.interrupts()] == ["in time"]
    assert graph.resume_sync(thread, Approve(), pause_check_s=0).status is Status.COMPLETED


def test_a_request_to_a_run_that_waits_counts_when_it_is_resumed(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    graph = chain(lambda state: None, lambda state, ctx: ctx.ask("what?") and None, lambda state: None)
    (question,) = graph.run_sync(thread, {}).interrupts
    pause = store.thread(thread.id).request_pause("wait", by="ann")
    thread.decide(question, "answer", by="ann")
    assert [record.id for record in graph.resume_sync(thread).interrupts] == [pause.id]
    assert {record.id for record in store.interrupts()} == {question.id, pause.id}  # the question is still used
    thread.decide(pause, "approve", by="ann")

    assert graph.resume_sync(thread).status is Status.COMPLETED
    assert open_records(store) == []


def test_a_run_that_a_pause_rejected_is_over_and_the_next_one_runs(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    other = store.thread(thread.id)

    def asks_once(state: dict[str, Any]) -> None:
        if not state:
            other.request_pause("stop", by="ann")

    graph = chain(asks_once, lambda state: {"done": True})
    graph.run_sync(thread, {}, pause_check_s=0)
    assert graph.resume_sync(thread, Reject("enough"), pause_check_s=0).status is Status.REJECTED

    assert open_records(store) == []
    assert graph.run_sync(thread, {"n": 1}, pause_check_s=0).status is Status.COMPLETED


# Questions that are not asked any more ----------------------------------------------------------------------------


def test_questions_from_before_a_rewind_are_over(store: backstay.Store, thread: backstay.Thread) -> None:
    graph = chain(lambda state: None, lambda state, ctx: ctx.ask("what?") and None)
    (old,) = graph.run_sync(thread, {}).interrupts
    thread.rewind(start_of(thread))
    assert list(store.interrupts()) == []
    refused(thread, old)
    (new,) = graph.resume_sync(thread).interrupts

    assert new.id != old.id
    assert [record.id for record in store.interrupts()] == open_records(store) == [new.id]
    assert graph.resume_sync(thread, Answer(None)).status is Status.COMPLETED


def test_a_question_with_another_payload_takes_the_place_of_the_old_one(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    offer = ["cheap"]
    graph = one(lambda state, ctx: {"bought": ctx.ask(offer[0])})
    (old,) = graph.run_sync(thread, {}).interrupts
    offer[0] = "dear"
    (new,) = graph.resume_sync(thread).interrupts

    assert [record.id for record in store.interrupts()] == [new.id]
    refused(thread, old)
    assert graph.resume_sync(thread, Answer("yes")).values == {"bought": "yes"}  # one question, so one answer is enough


def test_a_question_that_is_asked_again_after_it_was_closed_is_a_new_one(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    offer = ["cheap"]
    graph = one(lambda state, ctx: {"bought": ctx.ask(offer[0])})
    (old,) = graph.run_sync(thread, {}).interrupts
    offer[0] = "dear"
    graph.resume_sync(thread)
    offer[0] = "cheap"
    (again,) = graph.resume_sync(thread).interrupts

    assert again.id != old.id
    assert [record.id for record in store.interrupts()] == [again.id]
    assert graph.resume_sync(thread, Answer("yes")).values == {"bought": "yes"}


def test_the_question_about_an_effect_is_closed_when_its_receipt_came_late(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    def pay() -> str:
        raise TimeoutError

    graph = chain(lambda state, ctx: {"paid": ctx.effect("pay", pay)}, lambda state, ctx: ctx.ask("and now?") and None)
    result = graph.run_sync(thread, {})
    if result.status is Status.FAILED:
        result = graph.resume_sync(thread)
    (asked,) = result.interrupts
    (effect,) = thread.effects()
    thread.settle(effect, Outcome.done("paid after all"), by="bank")
    result = graph.resume_sync(thread)

    assert result.values == {"paid": "paid after all"}
    assert [record.interrupt.payload for record in store.interrupts()] == ["and now?"]
    refused(thread, asked)


def test_a_value_that_was_sent_before_the_run_waits_for_it_is_not_closed(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    sender = store.thread(thread.id)
    waits = [True]

    def first(state: dict[str, Any], ctx: Any) -> None:
        if waits[0]:
            ctx.wait_for("news")

    graph = chain(first, lambda state, ctx: ctx.ask("sure?") and None, lambda state, ctx: {"got": ctx.wait_for("news")})
    graph.run_sync(thread, {})
    sender.send("news", 1, by="agency")
    waits[0] = False  # the code has changed: the first node does not take the value any more
    assert [each.interrupt.payload for each in graph.resume_sync(thread).interrupts] == ["sure?"]

    assert graph.resume_sync(thread, {question_id(thread, "sure?"): Answer(None)}).values == {"got": 1}
    assert list(store.interrupts()) == []


def test_a_value_that_a_run_stopped_waiting_for_can_be_sent_later(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    waits = [True]

    def first(state: dict[str, Any], ctx: Any) -> None:
        if waits[0]:
            ctx.wait_for("news")

    graph = chain(first, lambda state, ctx: ctx.ask("sure?") and None, lambda state, ctx: {"got": ctx.wait_for("news")})
    graph.run_sync(thread, {})
    waits[0] = False
    graph.resume_sync(thread)
    store.thread(thread.id).send("news", 1, by="agency")

    assert graph.resume_sync(thread, {question_id(thread, "sure?"): Answer(None)}).values == {"got": 1}


def test_other_branches_questions_and_those_of_callers_stay(store: backstay.Store, thread: backstay.Thread) -> None:
    graph = cleanup()
    first, _ = graph.run_sync(thread, {}).interrupts
    mine = thread.interrupt(start_of(thread), payload="of the caller")
    graph.replay_sync(thread, start_of(thread), branch="side")
    graph.resume_sync(thread, {first.id: Reject("no")})

    left = list(store.interrupts())
    assert [record.id for record in left if record.branch == "main"] == [mine.id]
    assert len([record for record in left if record.branch == "side"]) == 2
    thread.decide(mine, "approve", by="ann")


def test_a_closed_question_is_exported_and_imported(
    thread: backstay.Thread, store: backstay.Store, tmp_path: Path
) -> None:
    graph = cleanup()
    first, second = graph.run_sync(thread, {}).interrupts
    path = tmp_path / "early.bundle"
    export_bundle(store, path)
    graph.resume_sync(thread, {first.id: Reject("no")})
    late = tmp_path / "late.bundle"
    export_bundle(store, late)
    with backstay.open("memory:") as target:
        import_bundle(path, target)
        import_bundle(late, target)
        (record,) = [each for each in target.thread(thread.id).interrupts(pending=False) if each.id == second.id]

        assert record.closed
        assert target.check()


def test_no_caller_can_pretend_to_have_closed_an_interrupt(thread: backstay.Thread) -> None:
    asked = thread.interrupt(thread.save({"n": 1}), payload="?")
    thread.decide(asked, "approve", by="ann")
    with pytest.raises(InvalidInput, match="is reserved for Backstay"):
        thread.consume(asked, by=interrupts.CLOSED)
