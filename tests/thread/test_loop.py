"""Plain loops: one checkpoint per turn, continued where they stopped, and nothing of a turn that did not end."""

from __future__ import annotations

import contextvars
import gc
import json
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay import durable
from backstay.errors import EffectChanged, InvalidInput, StepsExceeded
from backstay.model.fields import Usage
from backstay.model.frame import End
from backstay.operations.arguments import LOOP_POSITION
from backstay.thread.loop import Loop, LoopStatus
from backstay.thread.turn import Turn
from support.waiting import expire, taken_over

Body = Callable[[Loop, Turn], None]


def run(thread: backstay.Thread, body: Body, initial: Any = None, **arguments: Any) -> Loop:
    """Run a loop with this body for every turn."""
    return go(thread.loop({"log": []} if initial is None else initial, **arguments), body)


def go(loop: Loop, body: Body) -> Loop:
    with loop:
        for turn in loop:
            body(loop, turn)
    return loop


def until(last: int) -> Body:
    """Return a body that logs its turn, and finishes in this one."""

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.iteration])
        turn.usage(tokens=10, cost=0.5)
        if turn.iteration == last:
            loop.finish(answer=42)

    return body


class Boom(Exception):
    pass


class Tool:
    """Something that must not be done twice; counts how often it was."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, what: Any) -> str:
        self.calls.append(what)
        return f"did {what}"


# Saving -----------------------------------------------------------------------------------------------------------


def test_every_turn_is_one_checkpoint_with_its_number_and_all_that_was_used(thread: backstay.Thread) -> None:
    loop = run(thread, until(3), {"log": [], "user": "ann"})
    shown = [
        (meta.step, meta.iteration, meta.trigger, meta.usage, meta.continuation)
        for meta in sorted(thread.history(), key=lambda meta: meta.step)
    ]

    assert shown == [
        (0, 0, "input", Usage(0, 0.0), None),
        (1, 1, "iteration", Usage(10, 0.5), None),
        (2, 2, "iteration", Usage(20, 1.0), None),
        (3, 3, "iteration", Usage(30, 1.5), End()),
    ]
    assert (loop.status, loop.iteration, loop.usage) == ("completed", 3, Usage(30, 1.5))
    newest = thread.latest()
    assert newest is not None
    assert loop.state == newest.state == {"log": [1, 2, 3], "user": "ann", "answer": 42}


def test_what_is_there_before_the_first_turn_is_saved_before_it(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        (head,) = thread.history()
        assert (head.step, head.trigger) == (0, "input")
        raise Boom

    with pytest.raises(Boom):
        run(thread, body, {"log": ["first"]})
    again = run(thread, until(1), {"log": ["never used"]})
    assert again.state == {"log": ["first", 1], "answer": 42}


def test_metadata_goes_into_every_checkpoint_so_that_threads_are_found_by_it(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    run(thread, until(2), metadata={"user": "ann"})
    run(store.thread("another"), until(1), metadata={"user": "bob"})

    assert [meta.metadata["user"] for meta in thread.history()] == ["ann"] * 3
    assert [meta.thread_id for meta in store.threads(where={"user": "ann"})] == [thread.id]
    with pytest.raises(InvalidInput, match="only loops may write"):
        thread.loop({}, metadata={LOOP_POSITION: {"round": 0, "grants": ["*"]}})


def test_step_zero_is_for_the_first_checkpoint_of_a_branch_only(thread: backstay.Thread) -> None:
    first = thread.save({"n": 0}, step=0)
    assert first.step == 0
    with pytest.raises(InvalidInput, match="step 0 is not higher than step 0"):
        thread.save({"n": 1}, step=0)
    assert thread.save({"n": 0}, id=first.id, replace=True, step=0).step == 0
    assert thread.save({"n": 1}).step == 1

    at_zero = thread.at(step=0)
    assert at_zero is not None
    assert at_zero.state == {"n": 0}
    other = thread.fork(first, branch="side")
    assert [meta.step for meta in other.history()] == [0]


def test_a_turn_costs_what_is_new_whatever_the_size_of_the_state(store: backstay.Store, show: Any) -> None:
    document = "".join(f"{number} " for number in range(40_000))
    with store.thread("t").loop({"document": document, "log": []}) as loop:
        before = store.stats().total_bytes
        for turn in loop:
            turn.append(log=[f"{turn.iteration} " * 50])
            if turn.iteration == 50:
                loop.finish()
    grown = store.stats().total_bytes - before
    show("bytes stored per turn", f"{grown // 50} for 150 new ones, beside {len(document)} old ones")

    assert grown < 50 * 4000


def test_a_body_that_raises_leaves_nothing_and_the_next_run_goes_on_with_that_turn(
    store: backstay.Store, thread: backstay.Thread
) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        seen.append(turn.iteration)
        until(5)(loop, turn)
        turn.set(plan=turn.iteration)
        if seen == [1, 2, 3]:
            raise Boom

    seen: list[int] = []
    loop = thread.loop({"log": []})
    with pytest.raises(Boom):
        go(loop, body)
    assert (loop.status, loop.iteration, dict(loop.state)) == ("failed", 2, {"log": [1, 2], "plan": 2})
    newest = store.thread(thread.id).latest()
    assert newest is not None
    assert (newest.state, newest.iteration, newest.tokens_used) == ({"log": [1, 2], "plan": 2}, 2, 20)
    done = run(store.thread(thread.id), body)

    assert seen == [1, 2, 3, 3, 4, 5]
    assert (dict(done.state), done.usage.tokens_used) == ({"log": [1, 2, 3, 4, 5], "plan": 5, "answer": 42}, 50)


def test_effects_of_a_turn_that_is_run_again_are_replayed(store: backstay.Store, thread: backstay.Thread) -> None:
    tool = Tool()

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.effect("model", tool, turn.iteration)])
        turn.effect("mail", tool, f"mail {turn.iteration}")
        if len(tool.calls) == 4:
            raise Boom
        if turn.iteration == 3:
            loop.finish()

    with pytest.raises(Boom):
        run(thread, body)
    assert tool.calls == [1, "mail 1", 2, "mail 2"]
    tool.calls.append("the process starts again")
    done = run(store.thread(thread.id), body)

    assert tool.calls[5:] == [3, "mail 3"]
    assert done.state["log"] == ["did 1", "did 2", "did 3"]
    assert [record.key for record in thread.effects()] == [
        f"0/{turn}/{key}" for turn in (1, 2, 3) for key in ("model", "mail")
    ]


def test_one_key_names_one_effect_in_a_turn(thread: backstay.Thread) -> None:
    tool = Tool()

    def body(loop: Loop, turn: Turn) -> None:
        assert turn.effect("mail", tool, "a", key=1) == turn.effect("mail", tool, "a", key=1)
        with pytest.raises(EffectChanged):
            turn.effect("mail", tool, "b", key=1)
        loop.finish()

    run(thread, body)
    assert tool.calls == ["a"]


# Changes ----------------------------------------------------------------------------------------------------------


def test_a_turn_sees_its_own_changes_at_once(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        turn.append({"text": "xyz"}, log=["a"])
        turn.append(log=["b"])
        turn.set(plan={"n": 1}, log=[*turn.state["log"], "c"])
        turn.append(log=["d"])
        turn.delete("old", "text")
        turn.append({"text": "new"})
        assert turn.state == {"log": ["a", "b", "c", "d"], "plan": {"n": 1}, "text": "new"}
        assert loop.state == {"log": [], "old": 1, "text": ""}
        loop.finish()

    done = run(thread, body, {"log": [], "old": 1, "text": ""})
    newest = thread.latest()
    assert newest is not None
    assert newest.state == done.state == {"log": ["a", "b", "c", "d"], "plan": {"n": 1}, "text": "new"}


KEYS = st.sampled_from(["a", "b", "c"])
LISTS = st.lists(st.integers(0, 9), max_size=3)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), KEYS, LISTS),
        st.tuples(st.just("set"), KEYS, LISTS),
        st.tuples(st.just("delete"), KEYS, st.none()),
        st.tuples(st.just("next turn"), KEYS, st.none()),
    ),
    max_size=12,
)


@given(operations=OPERATIONS)
def test_any_changes_give_what_a_dictionary_would(operations: list[tuple[str, str, Any]]) -> None:
    model: dict[str, Any] = {"a": [1], "b": [2]}

    def body(loop: Loop, turn: Turn) -> None:
        while operations:
            what, key, value = operations.pop(0)
            if what == "next turn":
                return
            if what == "append":
                turn.append(**{key: value})
                model[key] = model.get(key, []) + value
            elif what == "set":
                turn.set(**{key: value})
                model[key] = value
            elif key in model:
                turn.delete(key)
                del model[key]
            assert turn.state == model
        loop.finish()

    with backstay.open("memory:") as store:
        done = run(store.thread("t"), body, {"a": [1], "b": [2]})
        newest = store.thread("t").latest()
        assert newest is not None
        assert done.state == newest.state == model
        assert store.check()


def test_values_are_taken_as_they_are_when_they_are_handed_over(thread: backstay.Thread) -> None:
    """What this process goes on with is what another one would load, also if the body goes on changing its objects."""

    def body(loop: Loop, turn: Turn) -> None:
        reply = {"text": "a"}
        turn.append(log=[reply])
        reply["text"] = "changed"
        assert turn.state["log"] == [{"text": "a"}]
        loop.finish()

    first: dict[str, Any] = {"log": []}
    done = run(thread, body, first)
    newest = thread.latest()
    assert newest is not None
    assert done.state == newest.state == {"log": [{"text": "a"}]}
    assert first == {"log": []}


@pytest.mark.parametrize("make", [bytearray, deque, OrderedDict, Counter])
def test_other_containers_that_are_changed_in_place_are_refused_too(thread: backstay.Thread, make: Any) -> None:
    def careless(loop: Loop, turn: Turn) -> None:
        log = turn.state["log"]
        log.update({1: 1}) if isinstance(log, dict) else log.append(1)

    with pytest.raises(InvalidInput, match=r"state\.log was changed in place"):
        run(thread, careless, {"log": make()}, limit=2)


@pytest.mark.parametrize("also_append", [False, True])
def test_strict_notices_changes_deep_inside_a_value(thread: backstay.Thread, also_append: bool) -> None:
    def careless(loop: Loop, turn: Turn) -> None:
        turn.append(log=["seen"])
        if turn.iteration == 2:
            turn.state["plan"][0]["done"] = True  # the same length
            if also_append:
                turn.append(plan=["more"])

    def careful(loop: Loop, turn: Turn) -> None:
        plan = turn.state["plan"]
        plan[0]["done"] = True
        turn.set(plan=plan)
        loop.finish()

    plan = [{"done": False}]
    with pytest.raises(InvalidInput, match=r"state\.plan was changed in place") as caught:
        run(thread, careless, {"log": [], "plan": plan}, limit=3, strict=True)
    assert caught.value.path == "state.plan"
    newest = thread.latest()
    assert newest is not None
    assert newest.state == {"log": ["seen"], "plan": [{"done": False}]}
    assert run(thread, careful, strict=True).state["plan"] == [{"done": True}]


def test_strict_notices_a_value_that_can_no_longer_be_stored(thread: backstay.Thread) -> None:
    def careless(loop: Loop, turn: Turn) -> None:
        turn.state["plan"]["x"] = object()

    with pytest.raises(InvalidInput, match=r"state\.plan was changed in place"):
        run(thread, careless, {"plan": {"x": 1}}, limit=3, strict=True)
    with pytest.raises(InvalidInput, match="strict must be True or False"):
        thread.loop({}, strict="yes")  # type: ignore[arg-type]


def test_thread_and_turn_take_the_same_arguments(thread: backstay.Thread, store: backstay.Store) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (({"log": ["b"]},), {}),
        ((), {"log": ["b"]}),
        (({"text": "more", "tags": ["x"]},), {"log": ["b"], "set": {"plan": 2}, "delete": ["old"]}),
    ]
    first = {"log": ["a"], "text": "", "tags": [], "plan": 1, "old": None}
    for number, (args, keywords) in enumerate(calls):
        plain = store.thread(f"plain {number}")
        plain.save(first)
        saved = plain.append(*args, **keywords, label="a field")
        assert saved.label == "a field"

        def body(loop: Loop, turn: Turn, args: Any = args, keywords: Any = keywords) -> None:
            turn.append(*args, **keywords)
            loop.finish()

        assert run(store.thread(f"loop {number}"), body, first).state == saved.state != first
    with pytest.raises(InvalidInput, match=r"no field called 'lable'.*Did you mean 'label'"):
        store.thread("plain 0").append(log=["b"], lable="x")
    with pytest.raises(InvalidInput, match="extended twice"):
        store.thread("plain 0").append({"log": ["b"]}, log=["b"])


def test_a_state_that_is_changed_in_place_is_refused_and_nothing_is_stored(thread: backstay.Thread) -> None:
    def careless(loop: Loop, turn: Turn) -> None:
        turn.state["log"].append("lost")

    def hopeful(loop: Loop, turn: Turn) -> None:
        turn.state["log"] = []  # type: ignore[index]

    with pytest.raises(TypeError):
        run(thread, hopeful, limit=2)
    with pytest.raises(InvalidInput, match=r"state\.log was changed in place.*turn\.append"):
        run(thread, careless, limit=2)
    newest = thread.latest()
    assert newest is not None
    assert newest.state == {"log": []}


@pytest.mark.parametrize(
    "change",
    [
        lambda turn: turn.append(log="text"),
        lambda turn: turn.append(log=5),
        lambda turn: turn.append(log=[1], set={"log": []}),
        lambda turn: turn.append(log=[1], delete=["log"]),
        lambda turn: turn.append({"log": [1]}, log=[1]),
        lambda turn: turn.append(log=[1], set={"x": object()}),
        lambda turn: turn.append(log=[1], delete=["nothing"]),
        lambda turn: turn.append({5: [1]}),
        lambda turn: turn.append(tags=["a"]),
        lambda turn: turn.append(id=["a"]),
        lambda turn: turn.append(plan=[1]),
        lambda turn: turn.append(log=[object()]),
        lambda turn: turn.append(log=[1], plan=[1]),
        lambda turn: turn.set(log=[1], x=object()),
        lambda turn: turn.delete("log", "nothing"),
        lambda turn: turn.set(x=object()),
        lambda turn: turn.delete("nothing"),
        lambda turn: turn.usage(tokens=-1),
        lambda turn: turn.usage(cost=float("nan")),
    ],
)
def test_a_change_that_cannot_be_is_refused_where_it_is_made(
    thread: backstay.Thread, change: Callable[[Turn], None]
) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        before = dict(turn.state)
        with pytest.raises(InvalidInput):
            change(turn)
        assert turn.state == before
        loop.finish()

    assert run(thread, body, {"log": [], "plan": "text"}).state == {"log": [], "plan": "text"}


def test_a_turn_that_is_over_changes_nothing_any_more(thread: backstay.Thread) -> None:
    kept: list[Turn] = []

    def body(loop: Loop, turn: Turn) -> None:
        kept.append(turn)
        if len(kept) == 2:
            calls: list[Callable[[], Any]] = [
                lambda: kept[0].append(log=[1]),
                lambda: kept[0].effect("k", Tool(), 1),
                lambda: kept[0].approve("k", 1),
            ]
            for call in calls:
                with pytest.raises(InvalidInput, match="turn 1 has ended"):
                    call()
            loop.finish()

    assert run(thread, body).state == {"log": []}


# Ends -------------------------------------------------------------------------------------------------------------


def test_a_finished_thread_runs_no_turn(store: backstay.Store, thread: backstay.Thread) -> None:
    run(thread, until(2))
    ran: list[int] = []
    again = run(store.thread(thread.id), lambda loop, turn: ran.append(turn.iteration))

    assert (ran, again.status, again.iteration, again.state["log"]) == ([], "completed", 2, [1, 2])
    assert len(list(thread.history())) == 3


def test_finishing_is_saved_whichever_way_the_body_is_left(store: backstay.Store) -> None:
    def by_break(thread: backstay.Thread) -> None:
        with thread.loop({"log": []}) as loop:
            for turn in loop:
                until(2)(loop, turn)
                if turn.iteration == 2:
                    turn.append(log=["also after finish"])
                    break

    def by_return(thread: backstay.Thread) -> str:
        with thread.loop({"log": []}) as loop:
            for turn in loop:
                until(2)(loop, turn)
                if turn.iteration == 2:
                    turn.append(log=["also after finish"])
                    return "done"
        return "never"

    for number, leave in enumerate((by_break, by_return)):
        thread = store.thread(f"t{number}")
        leave(thread)
        newest = thread.latest()
        assert newest is not None
        assert (newest.state["log"], newest.continuation) == ([1, 2, "also after finish"], End())


def test_a_turn_that_is_left_without_finishing_is_not_lost_silently(thread: backstay.Thread) -> None:
    def leave(loop: Loop) -> None:
        with loop:
            for turn in loop:
                turn.append(log=["never stored"])
                break

    loop = thread.loop({"log": []})
    with pytest.raises(InvalidInput, match="turn 1 was left early"):
        leave(loop)
    assert loop.status == "failed"
    with thread.loop({"log": []}) as loop:
        for _ in loop:
            break  # nothing was changed, so there is nothing to lose
    assert (loop.status, loop.iteration) == ("running", 0)


def test_an_error_that_is_caught_outside_the_turn_does_not_make_it_stored(thread: backstay.Thread) -> None:
    """It is run again, in the same process, from the state before it."""
    tool, tries = Tool(), []
    with thread.loop({"log": []}) as loop:
        while loop.status == "running":
            try:
                for turn in loop:
                    turn.append(log=[turn.effect("x", tool, turn.iteration)])
                    tries.append(turn.iteration)
                    if len(tries) in (2, 3):
                        raise Boom
                    if turn.iteration == 3:
                        loop.finish()
            except Boom:
                continue

    assert (tries, tool.calls) == ([1, 2, 2, 2, 3], [1, 2, 3])
    assert loop.state["log"] == ["did 1", "did 2", "did 3"]


def test_a_body_that_raises_after_finishing_has_not_finished(thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        loop.finish(answer=1)
        raise Boom

    with pytest.raises(Boom):
        run(thread, body)

    assert run(thread, until(1)).state == {"log": [1], "answer": 42}


def test_over_the_limit_everything_is_saved_and_a_higher_one_goes_on(thread: backstay.Thread) -> None:
    with pytest.raises(StepsExceeded, match="took 3 turns") as caught:
        run(thread, until(5), limit=3)
    newest = thread.latest()
    assert newest is not None
    assert (newest.state["log"], caught.value.limit, caught.value.checkpoint) == ([1, 2, 3], 3, newest.id)
    with pytest.raises(StepsExceeded):
        run(thread, until(5), limit=3)
    assert run(thread, until(5), limit=5).state["log"] == [1, 2, 3, 4, 5]
    assert run(thread, until(5), limit=1).status == "completed"


# Rounds -----------------------------------------------------------------------------------------------------------


def test_an_input_begins_a_new_round_on_the_finished_state(thread: backstay.Thread) -> None:
    tool = Tool()

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.effect("model", tool, turn.state["log"][-1])])
        turn.usage(tokens=1)
        loop.finish()

    first = run(thread, body, {"log": ["a"], "user": "ann"})
    second = run(thread, body, {}, input={"log": ["b"], "user": "bob", "new": [1]}, limit=1)
    third = run(thread, body, {}, input={"log": ["b"]}, limit=1)

    assert first.state["log"] == ["a", "did a"]
    assert second.state == {"log": ["a", "did a", "b", "did b"], "user": "bob", "new": [1]}
    assert third.state["log"][-2:] == ["b", "did b"]
    assert tool.calls == ["a", "b", "b"], "an effect of an earlier round was taken for one of this"
    assert [loop.usage.tokens_used for loop in (first, second, third)] == [1, 2, 3]
    steps = [(meta.step, meta.iteration, meta.trigger) for meta in thread.history()]
    assert steps[::-1] == [(n, n % 2, "iteration" if n % 2 else "input") for n in range(6)]


def test_an_input_is_refused_while_a_round_is_not_finished(thread: backstay.Thread) -> None:
    with pytest.raises(StepsExceeded):
        run(thread, until(3), limit=1)
    with pytest.raises(InvalidInput, match="an unfinished run of loop 'loop' with another input"):
        run(thread, until(3), input={"log": ["x"]})
    assert run(thread, until(3)).state["log"] == [1, 2, 3]
    assert run(thread, until(1), input={"log": ["x"]}).state["log"] == [1, 2, 3, "x", 1]


def test_the_input_of_a_new_thread_goes_with_its_initial_state(thread: backstay.Thread) -> None:
    done = run(thread, until(1), {"log": ["hello"], "n": 1}, input={"log": ["hi"], "n": 2})

    assert done.state == {"log": ["hello", "hi", 1], "n": 2, "answer": 42}
    assert len(list(thread.history())) == 2


def test_a_state_that_was_edited_between_two_runs_goes_on_in_the_same_round(thread: backstay.Thread) -> None:
    tool = Tool()

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.effect("x", tool, turn.iteration)])
        if turn.iteration == 2 and "fixed" not in turn.state:
            raise Boom
        if turn.iteration == 3:
            loop.finish()

    with pytest.raises(Boom):
        run(thread, body)
    thread.append({"log": ["edited"]}, set={"fixed": True})
    thread.append({"log": ["twice"]})
    done = run(thread, body)

    assert done.state["log"] == ["did 1", "edited", "twice", "did 2", "did 3"]
    assert tool.calls == [1, 2, 3]
    thread.append({"log": ["after the end"]})
    assert run(thread, body).status == "completed"


def test_what_was_rewound_is_done_anew_and_so_is_what_was_forked(thread: backstay.Thread) -> None:
    tool = Tool()

    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.effect("x", tool, turn.iteration)])
        if turn.iteration == 3:
            loop.finish()

    run(thread, body)
    early = thread.at(step=1)
    assert early is not None
    side = thread.fork(early, branch="side")
    thread.rewind(early)
    again, beside = run(thread, body, limit=3), run(side, body, limit=3)

    assert tool.calls == [1, 2, 3, 2, 3, 2, 3]
    assert again.state == beside.state == {"log": ["did 1", "did 2", "did 3"]}
    assert [meta.iteration for meta in thread.history()] == [3, 2, 1, 3, 2, 1, 0]


def test_a_thread_that_was_saved_by_other_means_is_gone_on_with(thread: backstay.Thread) -> None:
    thread.save({"log": ["a"]}, tokens_used=7)
    thread.save({"log": ["a", "b"]}, tokens_used=8)
    done = run(thread, until(2), {"log": ["never used"]}, limit=2)
    assert (done.state["log"], done.usage.tokens_used) == (["a", "b", 1, 2], 28)
    other = thread.fork(thread.save({"log": ["c"]}), to="another")

    assert run(other, until(1), {}, input={"log": ["d"]}).state["log"] == ["c", "d", 1]


# The lease --------------------------------------------------------------------------------------------------------


def test_who_comes_second_is_told_before_anything_runs(store: backstay.Store, thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        other = store.thread(thread.id).loop({"log": ["second"]}, wait=0)
        with pytest.raises(backstay.Fenced, match="worker-1"):
            other.__enter__()
        other = store.thread(thread.id).loop({"log": ["second"]})  # it would wait for itself
        with pytest.raises(backstay.Fenced, match="worker-1"):
            other.__enter__()
        with pytest.raises(backstay.Fenced, match="worker-1"):
            store.thread(thread.id).save({"log": ["bypass"]})
        until(2)(loop, turn)

    assert run(thread, body, owner="worker-1").state["log"] == [1, 2]
    assert run(store.thread(thread.id), body).status == "completed"
    assert len(store.runs()) == 1


def test_a_loop_whose_lease_was_taken_over_stores_nothing_more(store: backstay.Store, thread: backstay.Thread) -> None:
    def body(loop: Loop, turn: Turn) -> None:
        turn.append(log=[turn.effect("x", tool, turn.iteration)])
        if turn.iteration == 2:
            assert loop._use.lease is not None
            expire(loop._use.lease)
            with taken_over(store.thread(thread.id)), pytest.raises(backstay.Fenced):
                turn.effect("y", tool, "must not be done")

    tool = Tool()
    loop = thread.loop({"log": []}, ttl=60)
    with pytest.raises(backstay.Fenced):
        go(loop, body)

    assert (loop.status, tool.calls) == ("failed", [1, 2])
    newest = store.thread(thread.id).latest()
    assert newest is not None
    assert newest.state == {"log": ["did 1"]}
    assert run(store.thread(thread.id), until(2)).state["log"] == ["did 1", 2]


def test_a_lease_that_the_caller_took_is_used_and_kept(store: backstay.Store, thread: backstay.Thread) -> None:
    with thread.lease() as lease:
        run(thread, until(2), lease=lease)
        run(thread, until(1), input={"log": ["x"]}, lease=lease)
        lease.raise_if_lost()
        assert lease.epoch == 1
    assert run(thread, until(1), input={"log": ["x"]}).status == "completed"


def test_a_loop_that_cannot_begin_gives_its_lease_back(store: backstay.Store, thread: backstay.Thread) -> None:
    with pytest.raises(backstay.EncodeError):
        thread.loop({"x": object()}).__enter__()
    assert list(thread.history()) == []
    with store.thread(thread.id).lease():
        pass


def test_the_lease_of_a_loop_that_is_gone_in_the_middle_of_a_turn_expires(store: backstay.Store) -> None:
    """An interrupt may come before the first line that leaves the block."""
    loop = store.thread("t").loop({"log": []}, ttl=0.2).__enter__()
    next(loop)
    del loop
    gc.collect()  # a loop and its turn know each other
    with store.thread("t").lease(wait=30):
        pass
    assert durable.call(int)("7") == 7  # here it is an ordinary function again


def test_a_thread_that_outlives_its_turn_makes_no_durable_calls(store: backstay.Store) -> None:
    """It would do them without a record."""
    done: list[int] = []
    with store.thread("t").loop({"log": []}) as loop:
        for _ in loop:
            context = contextvars.copy_context()
            loop.finish()
    del loop, _
    gc.collect()
    late = threading.Thread(target=context.run, args=(_call_late, done))
    late.start()
    late.join()
    assert done == []


def _call_late(done: list[int]) -> None:
    with pytest.raises(InvalidInput, match="after the turn or node that it belongs to had ended"):
        durable.effect(done.append)(1)


def test_a_loop_is_used_once_and_only_in_its_block(thread: backstay.Thread) -> None:
    outside = thread.loop({"log": []})
    with pytest.raises(InvalidInput, match="has not started"):
        next(outside)
    with pytest.raises(InvalidInput, match="only a turn can finish a loop"):
        outside.finish()
    done = run(thread, until(1))
    with pytest.raises(InvalidInput, match="entered only once"):
        done.__enter__()
    with pytest.raises(InvalidInput, match="only a turn can finish a loop"):
        done.finish()


def test_what_is_no_loop_is_refused_and_nothing_is_stored(thread: backstay.Thread) -> None:
    wrong: list[dict[str, Any]] = [
        {"initial": [1]},
        {"input": "text"},
        *({"limit": each} for each in (0, -1, True, 2.0, "5")),
        *({"pause_check_s": each} for each in (-1, float("nan"), True, "1")),
        *({"ttl": each} for each in (0, "1")),
        {"owner": 5},
        *({"metadata": each} for each in (5, "text", {5: 1})),
    ]
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            thread.loop(**{"initial": {}, **arguments})

    assert list(thread.history()) == []


def test_a_loop_says_what_it_is_and_never_shows_the_state(thread: backstay.Thread) -> None:
    done = run(thread, until(2), {"log": ["hunter2"]})

    assert repr(done) == "<Loop of 'customer-42' branch 'main', completed, turn 2>"
    assert json.dumps([done.status, LoopStatus.RUNNING]) == '["completed", "running"]'
