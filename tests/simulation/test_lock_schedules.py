"""Every rule that keeps deletes and savers apart on PostgreSQL: the worst schedule for it, and the store without it.

Each scene forces two calls into the order in which they would hurt each other. With all locks in place nothing happens
but a wait. Then one lock is taken out, and the same scene must do damage: so the lock is needed, and this shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from support.running import Show

pytest.importorskip("psycopg")
import backstay
from backstay.errors import BackstayError, NotFound
from backstay.store.postgres import collect, queries
from backstay.testing.drafts import wait_until
from support.postgres import PostgresServer
from support.simulation.schedule import Call, Schedule

pytestmark = pytest.mark.effort(2)

DOCUMENT = hashlib.shake_128(b"document").hexdigest(2000)
LINE = "x" * 700
LARGE = hashlib.shake_128(b"large").digest(20_000)

Results = tuple[Any, Any]


@pytest.fixture
def schedule(postgres: PostgresServer, postgres_url: str) -> Iterator[Schedule]:
    with Schedule(postgres, postgres_url) as made:
        yield made


# The calls --------------------------------------------------------------------------------------------------------


def prune(name: str) -> Call:
    return lambda store: store.thread(name).prune(backstay.Keep(last=1))


def delete(name: str, checkpoint: str) -> Call:
    return lambda store: store.thread(name).delete_checkpoint(checkpoint)


def save(name: str, state: dict[str, Any]) -> Call:
    return lambda store: store.thread(name).save(state)


def replace(name: str, checkpoint: str, state: dict[str, Any]) -> Call:
    return lambda store: store.thread(name).save(state, id=checkpoint, replace=True)


def fork(name: str, checkpoint: str, to: str) -> Call:
    return lambda store: store.thread(name).fork(checkpoint, to=to)


# The scenes: each plays and returns what must hold then: of which threads what state is the newest ------------------

Expected = dict[str, dict[str, Any] | None]


def put_a_blob_that_is_being_deleted(schedule: Schedule) -> Expected:
    _leave_behind(schedule.store, {"document": DOCUMENT})
    schedule.stop_before("DELETE", "blob")
    _, saved = schedule.play(prune("a"), save("b", {"document": DOCUMENT}))
    return {"a": {}, "b": _unless_refused(saved, {"document": DOCUMENT})}


def delete_a_blob_that_is_being_put(schedule: Schedule) -> Expected:
    _leave_behind(schedule.store, {"document": DOCUMENT})
    schedule.stop_before("INSERT", "checkpoint")
    saved, _ = schedule.play(save("b", {"document": DOCUMENT}), prune("a"))
    return {"a": {}, "b": _unless_refused(saved, {"document": DOCUMENT})}


def drop_the_last_two_references_to_a_blob(schedule: Schedule) -> Expected:
    _leave_behind(schedule.store, {"document": DOCUMENT})
    schedule.store.thread("b").save({"document": DOCUMENT}, id="head")
    schedule.stop_before("DELETE", "blob")
    schedule.play(prune("a"), replace("b", "head", {"n": 2}))
    return {"a": {}, "b": {"n": 2}}


def fork_what_is_being_deleted(schedule: Schedule) -> Expected:
    source = _grow_and_leave_behind(schedule.store)
    schedule.stop_before("DELETE", "fresh")
    _, forked = schedule.play(delete("a", source), fork("a", source, "b"))
    return {"a": {}, "b": _unless_refused(forked, {"log": [LINE, LINE]})}


def delete_what_is_being_forked(schedule: Schedule) -> Expected:
    source = _grow_and_leave_behind(schedule.store)
    schedule.stop_before("INSERT", "checkpoint")
    forked, _ = schedule.play(fork("a", source, "b"), delete("a", source))
    return {"a": {}, "b": _unless_refused(forked, {"log": [LINE, LINE]})}


def extend_a_stream_whose_other_user_is_pruned(schedule: Schedule) -> Expected:
    a = schedule.store.thread("a")
    a.save({"log": [LINE]})
    a.fork(a.append({"log": [LINE]}), to="b").save({})
    schedule.stop_before("DELETE", "ref")
    _, saved = schedule.play(prune("b"), lambda store: store.thread("a").append({"log": [LINE]}))
    return {"a": _unless_refused(saved, {"log": [LINE] * 3}), "b": {}}


def interrupt_what_is_being_pruned(schedule: Schedule) -> Expected:
    first = _leave_behind(schedule.store, {"n": 1})
    schedule.stop_before("DELETE", "checkpoint")
    _, asked = schedule.play(prune("a"), lambda store: store.thread("a").interrupt(first, id="question"))
    return {"a": {}, **_awaited(schedule.store, asked, first)}


def prune_what_is_being_interrupted(schedule: Schedule) -> Expected:
    first = _leave_behind(schedule.store, {"n": 1})
    schedule.stop_before("INSERT", "record")
    asked, _ = schedule.play(lambda store: store.thread("a").interrupt(first, id="question"), prune("a"))
    return {"a": {}, **_awaited(schedule.store, asked, first)}


def tag_what_is_being_pruned(schedule: Schedule) -> Expected:
    first = _leave_behind(schedule.store, {"n": 1})
    schedule.stop_before("DELETE", "checkpoint")
    _, tagged = schedule.play(prune("a"), lambda store: store.thread("a").tag(first, "good"))
    return {"a": {}, **_there_if(schedule.store, first, tagged)}


def prune_what_is_being_tagged(schedule: Schedule) -> Expected:
    first = _leave_behind(schedule.store, {"n": 1})
    schedule.stop_before("INSERT", "tag")
    tagged, _ = schedule.play(lambda store: store.thread("a").tag(first, "good"), prune("a"))
    return {"a": {}, **_there_if(schedule.store, first, tagged)}


def fork_what_is_being_pruned(schedule: Schedule) -> Expected:
    source = _grow_and_leave_behind(schedule.store)
    schedule.stop_before("DELETE", "fresh")
    _, forked = schedule.play(prune("a"), fork("a", source, "b"))
    expected = _unless_refused(forked, {"log": [LINE, LINE]})
    return {"a": {}, "b": expected, **_there_if(schedule.store, source, forked)}


def prune_what_is_being_forked(schedule: Schedule) -> Expected:
    source = _grow_and_leave_behind(schedule.store)
    schedule.stop_before("INSERT", "checkpoint")
    forked, _ = schedule.play(fork("a", source, "b"), prune("a"))
    expected = _unless_refused(forked, {"log": [LINE, LINE]})
    return {"a": {}, "b": expected, **_there_if(schedule.store, source, forked)}


def delete_the_parent_of_what_is_being_replaced(schedule: Schedule) -> Expected:
    a = schedule.store.thread("a")
    root = a.save({"n": 1})
    a.fork(root, to="b", id="head")
    a.save({})
    schedule.stop_before("INSERT", "checkpoint")
    schedule.play(replace("b", "head", {"n": 2}), delete("a", root.id))
    return {"a": {}, "b": {"n": 2}}


def compact_a_stream_whose_last_user_leaves(schedule: Schedule) -> Expected:
    a = schedule.store.thread("a")
    a.save({"data": LARGE})
    a.append({"data": LARGE})
    a.fork(a.append({"data": LARGE}), to="b", id="head")
    schedule.store.thread("a").delete()  # the stream's owner: nobody extends it any more
    schedule.stop_before("DELETE", "chunk")
    schedule.play(lambda store: store.compact(), replace("b", "head", {"n": 2}))
    return {"a": None, "b": {"n": 2}}


def make_a_branch_while_the_first_one_grows(schedule: Schedule) -> Expected:
    """Until now the first branch has numbered its checkpoints without the thread's row."""
    a = schedule.store.thread("a")
    root = a.save({"log": [LINE]})
    a.append({"log": [LINE]})
    schedule.stop_before("INSERT", "checkpoint")
    schedule.play(
        lambda store: store.thread("a").append({"log": [LINE]}), lambda store: store.thread("a").fork(root, branch="b")
    )
    schedule.store.thread("a").append({"log": [LINE]})
    numbers = [meta.seq for name in ("main", "b") for meta in schedule.store.thread("a", branch=name).history()]
    return {"a": {"log": [LINE] * 4}, **({} if sorted(numbers) == [1, 2, 3, 4, 5] else {f"{numbers}": {}})}


def _leave_behind(store: backstay.Store, state: dict[str, Any]) -> str:
    """Save a state and then another one, in thread a; return the id of the first."""
    thread = store.thread("a")
    first = thread.save(state)
    thread.save({})
    return first.id


def _grow_and_leave_behind(store: backstay.Store) -> str:
    """Return the id of a checkpoint of thread a that alone needs a stream."""
    thread = store.thread("a")
    thread.save({"log": [LINE]})
    grown = thread.append({"log": [LINE]})
    thread.save({})
    return grown.id


def _unless_refused(result: Any, state: dict[str, Any]) -> dict[str, Any] | None:
    assert not isinstance(result, BackstayError) or isinstance(result, NotFound), str(result)
    return None if isinstance(result, NotFound) else state


def _there_if(store: backstay.Store, checkpoint: str, acknowledged: Any) -> Expected:
    """Return a mark of damage if what was acknowledged should have kept a checkpoint, and did not."""
    kept = _unless_refused(acknowledged, {}) is not None
    return {} if kept == (store.get(checkpoint) is not None) else {f"{checkpoint} is gone": {}}


def _awaited(store: backstay.Store, asked: Any, checkpoint: str) -> Expected:
    """Return a mark of damage unless acknowledgement, checkpoint and interrupt are all there, or none of them."""
    there = store.get(checkpoint) is not None
    pending = [record.id for record in store.interrupts()] == ["question"]
    acknowledged = _unless_refused(asked, {}) is not None
    return {} if acknowledged == there == pending else {f"asked {acknowledged}, {there=}, {pending=}": {}}


def damage(store: backstay.Store, expected: Expected) -> list[str]:
    """Return everything that is not as it must be."""
    found = [str(finding) for finding in store.check().findings]
    for name, state in expected.items():
        try:
            latest = store.thread(name).latest()
        except backstay.Corrupted as error:
            found.append(str(error))
            continue
        if (None if latest is None else latest.state) != state:
            found.append(f"{name} is not as expected")
    return found


# The locks, taken out one at a time ---------------------------------------------------------------------------------

NO_BLOBS = "SELECT 1 WHERE cardinality(%s::bytea[]) < 0"
NO_THREADS = "SELECT 1::bigint WHERE cardinality(%s::bigint[]) < 0"
ONLY_THE_OWNER = """
SELECT br.thread FROM {schema}.ref r JOIN {schema}.branch br ON br.id = r.branch
WHERE r.stream = %s AND r.owned"""

Take = Callable[[Schedule, pytest.MonkeyPatch], None]


def function(name: str, lock: str) -> Take:
    """Take a lock out of one of the schema's functions."""
    return lambda schedule, _: schedule.change_function(name, f"{lock} FOR KEY SHARE;", f"{lock};")


def statement(name: str, text: Callable[[str], str]) -> Take:
    """Change one of the statements."""
    return lambda _, patch: patch.setattr(queries, name, text(getattr(queries, name)))


LOCKS: dict[str, Take] = {
    "saver holds the blob": function("put_blobs", "b.digest = p_digests[i]"),
    "delete holds the blob": statement("LOCK_BLOBS", lambda _: NO_BLOBS),
    "fork holds the thread of its source": function("commit_checkpoint", "t.id = v_source"),
    "delete holds threads": lambda _, patch: patch.setattr(collect, "lock_threads", lambda *_: None),
    "delete holds the threads that share a stream": statement("THREADS_SHARING", lambda _: NO_THREADS),
    "interrupt holds the thread": lambda schedule, _: schedule.change_function(
        "put_record",
        "SELECT m.thread_id INTO v_thread FROM {schema}.make_thread(p_namespace, p_thread) m",
        "SELECT t.id INTO v_thread FROM {schema}.thread t WHERE t.namespace = p_namespace AND t.name = p_thread",
    ),
    "delete holds the checkpoints": statement("LOCK_CHECKPOINTS", lambda _: NO_BLOBS),
    "tag holds the checkpoint": statement("TAG", lambda text: text.replace(" FOR KEY SHARE", "")),
    "compaction holds some user of the stream": statement("OWNER_THREAD", lambda _: ONLY_THE_OWNER),
    "a second branch holds the one that was alone": lambda schedule, _: schedule.change_function(
        "commit_checkpoint", "greatest(seq, v_last + 1, v_other + 1)", "greatest(seq, v_last + 1)"
    ),
}


class Scene(NamedTuple):
    play: Callable[[Schedule], Expected]
    locks: tuple[str, ...]  # without any of them it ends badly


SCENES = [
    Scene(put_a_blob_that_is_being_deleted, ("saver holds the blob", "delete holds the blob")),
    Scene(delete_a_blob_that_is_being_put, ("saver holds the blob", "delete holds the blob")),
    Scene(drop_the_last_two_references_to_a_blob, ("delete holds the blob",)),
    Scene(fork_what_is_being_deleted, ("fork holds the thread of its source", "delete holds threads")),
    Scene(delete_what_is_being_forked, ("fork holds the thread of its source", "delete holds threads")),
    Scene(
        extend_a_stream_whose_other_user_is_pruned,
        ("delete holds threads", "delete holds the threads that share a stream"),
    ),
    Scene(interrupt_what_is_being_pruned, ("interrupt holds the thread",)),
    Scene(prune_what_is_being_interrupted, ("interrupt holds the thread",)),
    Scene(tag_what_is_being_pruned, ("delete holds the checkpoints",)),
    Scene(prune_what_is_being_tagged, ("delete holds the checkpoints", "tag holds the checkpoint")),
    Scene(fork_what_is_being_pruned, ("fork holds the thread of its source", "delete holds threads")),
    Scene(prune_what_is_being_forked, ("fork holds the thread of its source", "delete holds threads")),
    Scene(delete_the_parent_of_what_is_being_replaced, ()),  # it keeps the digest itself: no lock is needed
    Scene(compact_a_stream_whose_last_user_leaves, ("compaction holds some user of the stream",)),
    Scene(make_a_branch_while_the_first_one_grows, ("a second branch holds the one that was alone",)),
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.play.__name__)
def test_a_delete_in_the_middle_of_a_save_breaks_nothing(schedule: Schedule, scene: Scene) -> None:
    assert damage(schedule.store, scene.play(schedule)) == []


@pytest.mark.parametrize(
    ("scene", "lock"),
    [
        pytest.param(scene, lock, id=f"{scene.play.__name__}-{lock}".replace(" ", "-"))
        for scene in SCENES
        for lock in scene.locks
    ],
)
def test_without_the_lock_the_same_scene_does_damage(
    schedule: Schedule, scene: Scene, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LOCKS[lock](schedule, monkeypatch)

    assert damage(schedule.store, scene.play(schedule)) != []


def test_every_lock_is_shown_to_be_needed() -> None:
    assert {lock for scene in SCENES for lock in scene.locks} == set(LOCKS)


def test_a_deadlock_is_resolved_without_anybody_noticing(schedule: Schedule, show: Show) -> None:
    """Two heads that share a stream are replaced at once: each holds its own thread and wants the other's."""
    a = schedule.store.thread("a")
    a.save({"log": [LINE]})
    a.fork(a.append({"log": [LINE]}), to="b", id="b")
    a.append({"log": [LINE]}, id="a")
    before = schedule.deadlocks()
    schedule.stop_before("INSERT", "checkpoint")
    results = schedule.play_together(replace("a", "a", {"n": 1}), replace("b", "b", {"n": 2}))

    wait_until(lambda: schedule.deadlocks() > before)
    show("deadlocks resolved", schedule.deadlocks() - before)
    assert [result for result in results if isinstance(result, BackstayError)] == []
    assert damage(schedule.store, {"a": {"n": 1}, "b": {"n": 2}}) == []


# Windows of streams: what a save merges when it leaves one ----------------------------------------------------------


def grow(thread: backstay.Thread, size: int) -> Any:
    return thread.append({"data": LARGE[:size]})


def test_a_stream_that_fills_its_window_to_the_last_byte_goes_on(schedule: Schedule) -> None:
    thread = schedule.store.thread("a")
    thread.save({"data": LARGE})  # a blob: the stream begins with the next save
    for _ in range(8):
        grow(thread, 8192)
    grow(thread, 100)

    assert damage(schedule.store, {"a": {"data": LARGE + LARGE[:8192] * 8 + LARGE[:100]}}) == []


def test_a_window_that_was_left_by_a_deleted_save_is_left_again(schedule: Schedule) -> None:
    thread = schedule.store.thread("a")
    thread.save({"data": LARGE})
    for size in (8000, 8000, 8000, 8000, 8000, 20_000):
        grow(thread, size)
    thread.delete_checkpoint(grow(thread, 6000))
    thread.latest()
    grow(thread, 6000)

    assert damage(schedule.store, {"a": {"data": LARGE + LARGE[:8000] * 5 + LARGE + LARGE[:6000]}}) == []
