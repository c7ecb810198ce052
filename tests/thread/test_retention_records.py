"""Retention of calls, effects, runs and whole threads: what can still be asked for stays, and all else goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

import backstay
from backstay import Graph, Keep
from backstay.engine.reducers import append
from backstay.errors import StoreRefused
from backstay.model.runs import RunStatus
from backstay.operations.ledger import NodePlace, TurnPlace, place_of
from backstay.thread.access import access_of


class State(TypedDict):
    log: Annotated[list[str], append]


class World:
    """What effects did to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails_at = ""

    def do(self, what: str) -> str:
        self.done.append(what)
        return f"did {what}"


def counting(world: World, rounds: int) -> Graph:
    """Return a graph whose node has one effect and makes one call in each of its visits."""
    graph = Graph("counting", state=State)

    @graph.node
    def count(state: State, ctx: Any) -> dict[str, list[str]]:
        ctx.call("think", lambda: "x" * 1000)
        done = ctx.effect("act", world.do, f"{state['log'][0]} {ctx.visit}")
        if world.fails_at == str(ctx.visit):
            raise RuntimeError("stopped")
        return {"log": [done]}

    graph.edge("count", "count", when=lambda state: len(state["log"]) <= rounds, name="more")
    graph.start("count")
    graph.end("count")
    return graph


def loop_of(thread: backstay.Thread, world: World, turns: int, stops_at: int = 0, given: str | None = None) -> None:
    with thread.loop({"log": []}, input=None if given is None else {"log": [given]}) as loop:
        for turn in loop:
            turn.append(log=[turn.effect("act", world.do, f"{given} {turn.iteration}")])
            if turn.iteration == stops_at:
                raise RuntimeError("stopped")
            if turn.iteration == turns:
                loop.finish()


def keys(thread: backstay.Thread) -> list[str]:
    return [effect.key.rpartition("counting/")[2] for effect in thread.effects()]


# Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("run:graph/node#3:name", NodePlace("run", "node", 3)),
        ("run@line:graph/node#12[7]>inner/other#1:name#2", NodePlace("run@line", "node", 12)),
        ("imported:1:graph/node#3:name", NodePlace("imported:1", "node", 3)),
        ("12/3/name", TurnPlace(12, 3)),
        ("0/1/a:g/n#1:b", TurnPlace(0, 1)),
        ("2026/06/report", None),
        ("12/0/name", None),
        ("order-42", None),
        ("order:42/3", None),
        (f"run:graph/{'n' * 90}#1…{'0' * 64}:name", None),  # a long position was cut here, maybe inside the number
        ("graph/node#3:name", None),
    ],
)
def test_the_place_of_a_call_is_in_its_key(key: str, place: object) -> None:
    assert place_of(key) == place


# Graphs -----------------------------------------------------------------------------------------------------------


def test_calls_and_effects_before_the_oldest_checkpoint_go(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    world.fails_at = "6"
    counting(world, 8).run_sync(thread, {"log": ["a"]})
    would = thread.prune(Keep(last=3), dry_run=True)
    assert len(keys(thread)) == 12

    pruned = thread.prune(Keep(last=3))

    assert pruned.effects == would.effects > 0
    assert f"{pruned.effects} calls and effects" in str(pruned)
    visits = {key.partition("#")[2].partition(":")[0] for key in keys(thread)}
    oldest = list(thread.history())[-1]
    first = len(store.get(oldest.id).state["log"])  # type: ignore[union-attr]
    assert visits == {str(number) for number in range(first, 7)}
    world.fails_at = ""
    counting(world, 8).resume_sync(thread).raise_for_status()
    assert world.done == [f"a {number}" for number in range(1, 9)]


def test_a_replay_from_every_remaining_checkpoint_repeats_nothing(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    graph = counting(world, 8)
    graph.run_sync(thread, {"log": ["a"]}).raise_for_status()
    thread.prune(Keep(every=3))
    remaining = [meta for meta in thread.history() if not meta.is_over]
    assert len(remaining) > 1

    for number, meta in enumerate(remaining):
        graph.replay_sync(thread, meta, branch=f"again-{number}").raise_for_status()
        store.prune(Keep(every=3))

    assert world.done == [f"a {number}" for number in range(1, 9)]


def test_a_replay_keeps_the_effects_of_its_source_when_the_source_is_deleted(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    graph = counting(world, 6)
    graph.run_sync(thread, {"log": ["a"]}).raise_for_status()
    source = thread.at(2)
    assert source is not None
    world.fails_at = "4"
    graph.replay_sync(thread, source, branch="again")
    thread.delete_checkpoint(source)
    store.prune(Keep(last=1))
    assert [meta.step for meta in thread.history()] == [6]
    world.fails_at = ""

    graph.resume_sync(store.thread("t", branch="again")).raise_for_status()

    assert world.done == [f"a {number}" for number in range(1, 7)]
    store.prune(Keep(last=1))
    assert keys(thread) == []


def test_own_keys_and_unknown_outcomes_stay(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    graph = counting(world, 3)
    graph.run_sync(thread, {"log": ["a"]}).raise_for_status()
    thread.effect("0/1/mine", world.do, "mine")
    thread.effect("order:42/node#1:x", world.do, "mine too")
    run_id = next(thread.history()).run_id

    def lost() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        thread.effect(f"{run_id}:counting/count#1:lost", lost)
    thread.prune(Keep(last=1))

    assert [effect.key for effect in thread.effects()] == [
        "0/1/mine",
        "order:42/node#1:x",
        f"{run_id}:counting/count#1:lost",
    ]


def test_the_lines_of_a_rewound_run_are_told_apart_even_without_the_rewind(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    graph = counting(world, 5)
    world.fails_at = "4"
    graph.run_sync(thread, {"log": ["a"]})
    first = thread.at(1)
    assert first is not None
    rewound = thread.rewind(first)
    graph.resume_sync(thread)
    thread.delete_checkpoint(rewound)
    for meta in thread.history():
        if meta.trigger == "node" and meta.step > 1 and meta.step < rewound.step:
            thread.delete_checkpoint(meta)
    world.done.clear()
    thread.prune(Keep(last=100))
    world.fails_at = ""

    graph.resume_sync(thread).raise_for_status()

    assert world.done == ["a 5"]


def test_a_run_that_goes_on_while_it_is_pruned_repeats_nothing(store: backstay.Store) -> None:
    from backstay.engine.sinks import Retained

    world, thread = World(), store.thread("t")
    world.fails_at = "7"
    graph = counting(world, 9)
    graph.run_sync(thread, {"log": ["a"]}, sink=lambda own: Retained(Keep(last=1), own))
    assert len(keys(thread)) <= 4
    world.fails_at = ""
    graph.resume_sync(thread, sink=lambda own: Retained(Keep(last=1), own)).raise_for_status()

    assert world.done == [f"a {number}" for number in range(1, 10)]
    assert len(keys(thread)) <= 2


# Loops ------------------------------------------------------------------------------------------------------------


def test_effects_of_finished_turns_go_and_those_of_the_current_one_stay(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    with pytest.raises(RuntimeError):
        loop_of(thread, world, 6, stops_at=4, given="a")
    thread.prune(Keep(last=1))
    assert keys(thread) == ["0/4/act"]
    with thread.loop({"log": []}) as loop:
        for turn in loop:
            turn.append(log=[turn.effect("act", world.do, f"a {turn.iteration}")])
            if turn.iteration == 6:
                loop.finish()

    assert world.done == [f"a {number}" for number in range(1, 7)]
    thread.prune(Keep(last=1))
    assert keys(thread) == []


def test_rounds_without_a_checkpoint_go_and_others_start_where_they_can_be_continued(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    loop_of(thread, world, 3, given="a")
    second = next(thread.history()).step + 1
    loop_of(thread, world, 3, given="b")
    thread.prune(Keep(last=2))

    assert keys(thread) == [f"{second}/3/act"]
    thread.delete_checkpoint(next(thread.history()))  # the turn before is the newest now, and the loop continues there
    with thread.loop({"log": []}) as loop:
        for turn in loop:
            turn.append(log=[turn.effect("act", world.do, f"b {turn.iteration}")])
            loop.finish()
    assert world.done == [f"{name} {number}" for name in "ab" for number in (1, 2, 3)]


def test_the_position_of_an_unfinished_loop_survives_what_other_code_saves(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    with pytest.raises(RuntimeError):
        loop_of(thread, world, 6, stops_at=3, given="a")
    other = store.thread("t")
    other.append(set={"other": 1})
    other.append(set={"other": 2})
    thread.prune(Keep(last=1))
    with store.thread("t").loop({"log": []}) as loop:
        for turn in loop:
            turn.append(log=[turn.effect("act", world.do, f"a {turn.iteration}")])
            loop.finish()

    assert world.done == ["a 1", "a 2", "a 3"]


# Interrupts and runs ----------------------------------------------------------------------------------------------


def test_decided_interrupts_go_with_their_checkpoint_and_stay_with_it(store: backstay.Store) -> None:
    thread = store.thread("t")
    for number in range(2):
        saved = thread.save({"n": number})
        record = thread.interrupt(saved, kind="userrequest", payload={"n": number})
        thread.consume(thread.decide(record, "approve", by="a"))
    thread.save({"n": 2})

    thread.prune(Keep(last=2))

    assert [record.interrupt.payload for record in thread.interrupts(pending=False)] == [{"n": 1}]


def test_runs_go_with_their_last_checkpoint_but_not_the_newest_or_keyed_or_unfinished_ones(
    store: backstay.Store,
) -> None:
    world, thread = World(), store.thread("t")
    graph = counting(world, 2)
    for name in "abc":
        graph.run_sync(thread, {"log": [name]}, key="once" if name == "b" else None).raise_for_status()
    assert len(store.runs()) == 3
    assert (would := store.prune(Keep(last=1), dry_run=True)).runs == 1
    pruned = store.prune(Keep(last=1))

    assert (pruned.runs, pruned.effects) == (would.runs, would.effects) == (1, 8)
    assert ", 1 run," in str(pruned)
    assert [run.key for run in store.runs()] == [None, "once"]
    with pytest.raises(backstay.NotFound):  # it is known to be over, so it is not started again
        graph.run_sync(thread, {"log": ["b"]}, key="once")
    assert len(world.done) == 4


def test_an_unfinished_run_keeps_its_record_and_its_effects(store: backstay.Store) -> None:
    world, thread = World(), store.thread("t")
    world.fails_at = "2"
    counting(world, 3).run_sync(thread, {"log": ["a"]})
    store.prune(Keep(last=1))

    assert [run.status for run in store.runs()] == [RunStatus.FAILED]
    assert [key.partition(":")[0] for key in keys(thread)] == ["count#2", "count#2"]


# Whole threads ----------------------------------------------------------------------------------------------------


def finished(store: backstay.Store, name: str) -> backstay.Thread:
    thread = store.thread(name)
    counting(World(), 2).run_sync(thread, {"log": [name]}).raise_for_status()
    return thread


def test_threads_whose_runs_ended_long_ago_go_whole(store: backstay.Store, clock: Any) -> None:
    old = finished(store, "old")
    old.fork(next(old.history()), branch="side")
    clock.step(days=20)
    finished(store, "younger")
    clock.step(days=10)
    would = store.prune(Keep(finished_days=30), dry_run=True)
    assert len(list(store.threads())) == 2

    pruned = store.prune(Keep(finished_days=30))

    assert (pruned.threads, pruned.runs, pruned.effects, pruned.deleted) == (1, 1, 4, 4)
    assert (would.threads, would.runs, would.effects, would.deleted) == (1, 1, 4, 4)
    assert would.checkpoints == pruned.checkpoints
    assert "(1 whole thread)" in str(pruned)
    assert [meta.thread_id for meta in store.threads()] == ["younger"]
    assert [run.thread_id for run in store.runs()] == ["younger"]
    assert len(list(store.thread("younger").history())) == 3  # no other rule, so nothing else goes


def test_both_kinds_of_rules_apply(store: backstay.Store, clock: Any) -> None:
    finished(store, "old")
    clock.step(days=40)
    finished(store, "young")
    pruned = store.prune(Keep(last=1, finished_days=30))

    assert (pruned.threads, pruned.deleted, pruned.kept, pruned.effects) == (1, 5, 1, 8)


def _tag(store: backstay.Store, thread: backstay.Thread) -> None:
    thread.tag(next(thread.history()), "good")


def _ask(store: backstay.Store, thread: backstay.Thread) -> None:
    thread.interrupt(next(thread.history()), kind="userrequest")


def _doubt(store: backstay.Store, thread: backstay.Thread) -> None:
    def lost() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        thread.effect("mine", lost)


def _fail(store: backstay.Store, thread: backstay.Thread) -> None:
    with pytest.raises(RuntimeError):
        loop_of(thread, World(), 3, stops_at=1, given="more")


def _submit(store: backstay.Store, thread: backstay.Thread) -> None:
    counting(World(), 1).submit(thread, {"log": ["later"]})


@pytest.mark.parametrize("change", [_tag, _ask, _doubt, _submit])
def test_threads_that_are_still_of_use_stay(
    store: backstay.Store, clock: Any, change: Callable[[backstay.Store, backstay.Thread], None]
) -> None:
    thread = finished(store, "t")
    change(store, thread)
    clock.step(days=40)

    assert store.prune(Keep(finished_days=30)).threads == 0
    assert store.prune(Keep(finished_days=30, tagged=False)).threads == (change is _tag)


def test_threads_that_are_leased_or_were_saved_since_or_never_ran_stay(store: backstay.Store, clock: Any) -> None:
    leased, saved = finished(store, "leased"), finished(store, "saved")
    store.thread("plain").save({"n": 1})
    clock.step(days=40)
    saved.append({"log": ["since"]})
    with leased.lease():
        assert store.prune(Keep(finished_days=30)).threads == 0
        assert leased.prune(Keep(finished_days=30)).threads == 0

    assert store.prune(Keep(finished_days=30)).threads == 1
    assert {meta.thread_id for meta in store.threads()} == {"saved", "plain"}


def test_a_failed_run_ends_too_and_one_thread_can_be_pruned_alone(store: backstay.Store, clock: Any) -> None:
    for name in "ab":
        _fail(store, store.thread(name))
    clock.step(days=40)

    assert store.thread("a").prune(Keep(finished_days=30)).threads == 1
    assert [meta.thread_id for meta in store.threads()] == ["b"]


@pytest.mark.parametrize("rules", [{"finished_days": -1}, {"finished_days": "30"}, {"finished_days": True}])
def test_impossible_ages_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(backstay.InvalidInput):
        Keep(**rules)


# Space ------------------------------------------------------------------------------------------------------------


def test_pruned_records_give_their_space_back(store: backstay.Store) -> None:
    chance, thread = random.Random(1), store.thread("t")
    store.compact(full=True)
    empty = store.stats().total_bytes
    with thread.loop({"n": 0}) as loop:
        for turn in loop:
            turn.call("model", lambda: chance.randbytes(10_000))
            if turn.iteration == 40:
                loop.finish()
    full = store.stats().total_bytes
    thread.prune(Keep(last=1))
    store.compact(full=True)

    if not store.url.startswith("memory:"):  # which counts only the bytes of states
        assert full > 400_000
    assert list(thread.effects()) == []
    assert store.stats().total_bytes - empty < 200_000  # each table of PostgreSQL, and each index, has a page at least


def test_only_the_owner_can_shrink_tables(postgres: Any, postgres_url: str) -> None:
    with backstay.open(postgres_url) as store:
        store.thread("t").save({"n": 1})
        schema = access_of(store).store._target.schema  # type: ignore[attr-defined]
    with postgres.connect() as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
        for what in (f"USAGE ON SCHEMA {schema}", f"ALL ON ALL TABLES IN SCHEMA {schema}"):
            connection.execute(f"GRANT {what} TO guest")
        connection.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO guest")
        if connection.info.server_version >= 170_000:
            connection.execute(f"REVOKE MAINTAIN ON ALL TABLES IN SCHEMA {schema} FROM guest")
        connection.commit()
    with backstay.open(postgres_url.replace("//postgres@", "//guest@")) as store:
        assert store.compact() >= 0
        with pytest.raises(StoreRefused, match="belongs to another user"):
            store.compact(full=True)


def test_memory_of_a_prune_does_not_grow_with_the_records(tmp_path: Path) -> None:
    """Records are read and deleted page by page."""
    import tracemalloc

    chance = random.Random(1)
    with backstay.open(tmp_path / "agent.db") as store:
        thread = store.thread("t")
        with thread.loop({"n": 0}) as loop:
            for turn in loop:
                for _ in range(50):
                    turn.call("model", lambda: chance.randbytes(20_000))
                if turn.iteration == 16:
                    loop.finish()
        tracemalloc.start()
        assert thread.prune(Keep(last=1)).effects == 800
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert peak < 8_000_000  # of 16 MB
