"""The backend face over every store: what its interface promises, and what went wrong where it came from."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import threading
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import backstay
from backstay.compat.backend import Checkpoint, CheckpointBackend, CheckpointMetadata, StoreBackend, create_checkpointer
from backstay.errors import Corrupted, EncodeError, IdTaken, InvalidInput, StoreError
from backstay.model.checkpoint import Write
from backstay.model.lineage import trees_of
from backstay.pieces.manifest import Range
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import make_services
from support.running import Show

if TYPE_CHECKING:
    from support.postgres import PostgresServer

T = TypeVar("T")
VERBS = ["put", "get", "get_latest", "list_threads", "list_checkpoints", "delete_thread", "delete_before"]
MESSAGE = {"role": "assistant", "content": "", "id": "m1", "tool_calls": [{"id": "call_1", "args": {"q": "x"}}]}


def run(awaited: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(awaited)


@pytest.fixture
def backend(store: backstay.Store) -> Iterator[StoreBackend]:
    """Work on a store that is verified byte by byte when the test is over."""
    made = StoreBackend(store)
    yield made
    run(made.close())


def checkpoint(thread: str, name: str, step: int, **given: Any) -> Checkpoint:
    payload = {key: given.pop(key) for key in ("messages", "state", "tools_result", "next_node") if key in given}
    payload = {"messages": [MESSAGE], "state": {"step": step}, "tools_result": {"t": step}, **payload}
    return Checkpoint(CheckpointMetadata(thread, name, step, **given), **payload)


def put_steps(backend: StoreBackend, thread: str, *steps: int) -> None:
    for number, step in enumerate(steps, 1):
        run(backend.put(checkpoint(thread, f"{thread}{number}", step)))


def listed(backend: StoreBackend, thread: str) -> list[str]:
    return [item.checkpoint_id for item in run(backend.list_checkpoints(thread))]


# The interface ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", VERBS)
def test_a_backend_without_all_seven_methods_cannot_be_made(left_out: str) -> None:
    methods = {name: getattr(StoreBackend, name) for name in VERBS if name != left_out}
    incomplete = type("Incomplete", (CheckpointBackend,), methods)

    with pytest.raises(TypeError, match=left_out):
        incomplete()
    with pytest.raises(TypeError, match="abstract"):
        CheckpointBackend()  # type: ignore[abstract]


@pytest.mark.parametrize("kind", [CheckpointBackend, StoreBackend])
def test_every_method_is_awaited_and_lists_have_the_promised_defaults(kind: type[CheckpointBackend]) -> None:
    def defaults(name: str) -> dict[str, Any]:
        parameters = inspect.signature(getattr(kind, name)).parameters
        return {key: parameters[key].default for key in ("limit", "offset")}

    assert all(inspect.iscoroutinefunction(getattr(kind, name)) for name in VERBS)
    assert defaults("list_threads") == {"limit": 50, "offset": 0}
    assert defaults("list_checkpoints") == {"limit": 100, "offset": 0}


def test_lists_end_at_their_default_limits() -> None:
    backend = StoreBackend("memory:")
    put_steps(backend, "t", *range(1, 103))
    for number in range(51):
        put_steps(backend, f"other{number}", 1)

    assert [item.step for item in run(backend.list_checkpoints("t"))] == list(range(102, 2, -1))
    assert [item.thread_id for item in run(backend.list_threads())] == [f"other{n}" for n in range(50, 0, -1)]
    run(backend.close())


def test_what_is_put_is_got_by_its_id_alone_and_equal(backend: StoreBackend) -> None:
    made = checkpoint("t", "c1", 1, tags=["b", "a", "b"], summary="first", next_node="search")
    made.state = {"messages": "a key of the state", "state.messages": 2, "tool_results": None, "nested": {"x": [1.5]}}

    assert run(backend.put(made)) == "c1"
    assert run(backend.get("c1")) == made
    assert run(backend.get("c2")) is None


def test_the_newest_is_the_one_put_last_whatever_its_step(backend: StoreBackend) -> None:
    """Steps that began again after a restart, and clocks that went back, do not bring an old checkpoint to the top."""
    late = datetime(2030, 1, 1, tzinfo=UTC).isoformat()
    assert run(backend.get_latest("t")) is None
    for name, step in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        run(backend.put(checkpoint("t", name, step, created_at=late)))
        late = "2020-01-01T00:00:00+00:00"

    latest = run(backend.get_latest("t"))

    assert latest is not None
    assert (latest.metadata.checkpoint_id, latest.metadata.step, latest.state) == ("d", 1, {"step": 1})
    assert [(item.checkpoint_id, item.step) for item in run(backend.list_checkpoints("t"))] == [
        ("d", 1),
        ("c", 2),
        ("b", 1),
        ("a", 3),
    ]


def test_threads_are_shown_by_their_newest_the_one_begun_last_first(backend: StoreBackend) -> None:
    for thread in ("one", "two", "three"):
        put_steps(backend, thread, 1, 2)
    run(backend.put(checkpoint("one", "again", 9)))

    shown = [(item.thread_id, item.checkpoint_id) for item in run(backend.list_threads())]

    assert shown == [("three", "three2"), ("two", "two2"), ("one", "again")]
    assert [item.thread_id for item in run(backend.list_threads(limit=1, offset=1))] == ["two"]
    assert run(backend.list_threads(limit=0)) == run(backend.list_threads(offset=3)) == []


def test_a_threads_checkpoints_are_listed_newest_first_and_paged(backend: StoreBackend) -> None:
    put_steps(backend, "t", 1, 2, 3, 4, 5)
    put_steps(backend, "other", 1)

    assert listed(backend, "t") == ["t5", "t4", "t3", "t2", "t1"]
    assert [item.step for item in run(backend.list_checkpoints("t", limit=2, offset=1))] == [4, 3]
    assert run(backend.list_checkpoints("t", limit=10, offset=5)) == run(backend.list_checkpoints("nobody")) == []
    for wrong in (-1, True, "1"):
        with pytest.raises(InvalidInput, match="offset"):
            run(backend.list_checkpoints("t", offset=wrong))  # type: ignore[arg-type]


def test_deleting_a_thread_counts_its_checkpoints_and_leaves_the_others(backend: StoreBackend) -> None:
    put_steps(backend, "t", 1, 2, 3)
    put_steps(backend, "other", 1)
    run(backend.put(checkpoint("t", "side", 2, parent_checkpoint_id="t1")))

    assert run(backend.delete_thread("t")) == 4
    assert run(backend.delete_thread("t")) == 0
    assert run(backend.get("t1")) is None
    assert listed(backend, "other") == ["other1"]


def test_deleting_before_a_step_is_strictly_less_and_breaks_no_child(
    backend: StoreBackend, store: backstay.Store
) -> None:
    put_steps(backend, "t", 1, 2, 3, 4)

    assert run(backend.delete_before("t", 3)) == 2
    assert run(backend.delete_before("t", 3)) == 0

    child = run(backend.get("t3"))
    assert child is not None
    assert (child.state, child.metadata.parent_checkpoint_id) == ({"step": 3}, "t2")
    assert bool(store.check())
    (tree,) = trees_of(store.thread("t").history(branch="*"))
    assert (tree.node.id, [child.node.id for child in tree.children]) == ("t3", ["t4"])
    run(backend.put(checkpoint("t", "side", 4, parent_checkpoint_id="t3")))
    assert listed(backend, "t") == ["side", "t4", "t3"]


def test_deleting_before_a_step_never_takes_the_place_to_resume_from(backend: StoreBackend) -> None:
    put_steps(backend, "t", 7, 8, 1)

    assert run(backend.delete_before("t", 8)) == 1
    assert listed(backend, "t") == ["t3", "t2"]


def test_deleting_looks_at_every_entry_not_at_the_first_page() -> None:
    backend = StoreBackend("memory:")
    put_steps(backend, "t", *range(1, 522))

    assert run(backend.delete_before("t", 521)) == 520
    assert listed(backend, "t") == ["t521"]
    run(backend.close())


# Replacing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t1", "t2", "t3"], ids=["oldest", "middle", "newest"])
def test_a_put_with_an_id_that_is_there_replaces_all_of_it_in_its_place(backend: StoreBackend, name: str) -> None:
    put_steps(backend, "t", 1, 2, 3)
    new = checkpoint("t", name, 9, tags=["new"], summary="new", next_node="n", parent_checkpoint_id="told", state={})
    new.metadata.extra = {"model": "m"}

    for _ in range(2):  # the second time it is the very same
        run(backend.put(new))
        assert run(backend.get(name)) == new
        assert next(item for item in run(backend.list_checkpoints("t")) if item.checkpoint_id == name) == new.metadata
    assert listed(backend, "t") == ["t3", "t2", "t1"]
    latest = run(backend.get_latest("t"))
    assert latest is not None
    assert latest.metadata.checkpoint_id == "t3"
    assert run(backend.list_threads()) == [latest.metadata]

    newer = checkpoint("t", name, 2, state={"again": True})
    run(backend.put(newer))
    newer.metadata.parent_checkpoint_id = "told"  # left out, it stays what it was
    assert run(backend.get(name)) == newer
    run(backend.put(checkpoint("t", "next", 10)))
    assert run(backend.get(name)) == newer


def test_replacing_goes_on_to_work_when_all_that_came_after_is_gone(
    backend: StoreBackend, store: backstay.Store
) -> None:
    put_steps(backend, "t", 1, 2)
    run(backend.put(checkpoint("t", "t1", 5, state={"version": 2})))
    store.thread("t").delete_checkpoint("t2")

    run(backend.put(checkpoint("t", "t1", 5, state={"version": 3})))

    latest = run(backend.get_latest("t"))
    assert latest is not None
    assert latest.state == {"version": 3}


def test_putting_the_same_again_changes_nothing(backend: StoreBackend, store: backstay.Store) -> None:
    put_steps(backend, "t", 1, 2, 3)
    before = [(meta.id, meta.seq, meta.digest) for meta in store.thread("t").history()]

    for name in ("t1", "t2", "t3"):
        found = run(backend.get(name))
        assert found is not None
        run(backend.put(found))

    assert [(meta.id, meta.seq, meta.digest) for meta in store.thread("t").history()] == before


def test_an_id_never_moves_to_another_thread(backend: StoreBackend) -> None:
    put_steps(backend, "t", 1, 2)
    mine = run(backend.get("t1"))

    with pytest.raises(IdTaken, match="belongs to thread 't'"):
        run(backend.put(checkpoint("u", "t1", 1)))

    assert run(backend.get("t1")) == mine
    assert run(backend.get_latest("u")) is None
    assert listed(backend, "t") == ["t2", "t1"]


def test_a_replacement_cut_short_after_its_mark_leaves_the_old_version(
    backend: StoreBackend, store: backstay.Store
) -> None:
    put_steps(backend, "t", 1, 2)
    before = run(backend.get("t1")), run(backend.list_checkpoints("t"))

    store.thread("t").tag("t1", "backstay.replaced")

    assert (run(backend.get("t1")), run(backend.list_checkpoints("t"))) == before


def test_a_damaged_replacement_is_found_and_hides_nothing_else(backend: StoreBackend, store: backstay.Store) -> None:
    put_steps(backend, "t", 1, 2)
    run(backend.put(checkpoint("t", "t1", 1, state={"version": 2})))
    stored = store.get("t1")
    assert stored is not None
    (beside,) = stored.writes
    flipped = bytes([*beside.value[:-1], beside.value[-1] ^ 1])
    store.thread("t").write("t1", [Write(beside.task_id, beside.index, beside.channel, flipped)], replace=True)

    with pytest.raises(Corrupted, match="does not match its digest"):
        run(backend.get("t1"))
    shown = run(backend.list_checkpoints("t"))
    assert [item.checkpoint_id for item in shown] == ["t2"]
    assert [(problem.kind, problem.where) for problem in shown.problems] == [("damaged", "t1")]


# Lineage ----------------------------------------------------------------------------------------------------------


def test_without_a_parent_a_checkpoint_follows_the_newest(backend: StoreBackend) -> None:
    put_steps(backend, "t", 1, 2, 3)

    assert [item.parent_checkpoint_id for item in run(backend.list_checkpoints("t"))] == ["t2", "t1", None]


def test_one_that_names_an_older_parent_begins_a_branch(backend: StoreBackend, store: backstay.Store) -> None:
    put_steps(backend, "t", 1, 2, 3)
    side = checkpoint("t", "side", 2, parent_checkpoint_id="t1", state={"other": 1}, next_node="search")
    run(backend.put(side))
    run(backend.put(checkpoint("t", "after", 3)))

    assert run(backend.get("side")) == side
    shown = [(item.checkpoint_id, item.parent_checkpoint_id) for item in run(backend.list_checkpoints("t"))]
    assert shown == [("after", "side"), ("side", "t1"), ("t3", "t2"), ("t2", "t1"), ("t1", None)]
    assert [branch.key.name for branch in store.thread("t").branches()] == ["main", "side"]


def test_lines_that_take_turns_stay_on_their_branches(backend: StoreBackend, store: backstay.Store) -> None:
    put_steps(backend, "t", 1, 2)
    line, side = "t2", "t1"
    for number in range(3):
        side = run(backend.put(checkpoint("t", f"side{number}", 2 + number, parent_checkpoint_id=side)))
        line = run(backend.put(checkpoint("t", f"line{number}", 3 + number, parent_checkpoint_id=line)))

    assert [branch.key.name for branch in store.thread("t").branches()] == ["main", "side0"]
    assert [meta.id for meta in store.thread("t").history()] == ["line2", "line1", "line0", "t2", "t1"]
    shown = {item.checkpoint_id: item.parent_checkpoint_id for item in run(backend.list_checkpoints("t"))}
    assert (shown["line2"], shown["line0"], shown["side2"], shown["side0"]) == ("line1", "t2", "side1", "t1")
    assert listed(backend, "t")[:2] == ["line2", "side2"]


def test_a_new_thread_can_begin_with_a_checkpoint_of_another(backend: StoreBackend) -> None:
    put_steps(backend, "t", 1, 2)
    first = checkpoint("t-branch", "b0", 0, parent_checkpoint_id="t1", tags=["branch"], next_node="search")

    run(backend.put(first))

    assert run(backend.get_latest("t-branch")) == first
    assert run(backend.delete_thread("t")) == 2
    assert run(backend.get("b0")) == first


def test_a_parent_that_is_not_in_the_store_is_kept_as_told(backend: StoreBackend) -> None:
    put_steps(backend, "t", 1)
    made = checkpoint("t", "c", 2, parent_checkpoint_id="from another system")

    run(backend.put(made))

    assert run(backend.get("c")) == made


def test_an_agent_resumes_where_it_stopped(url: str) -> None:
    """The consumer this interface is made for: it saves every fifth turn and begins with the newest checkpoint."""

    async def agent(place: str | backstay.Store, turns: int) -> list[int]:
        backend = StoreBackend(place)
        latest = await backend.get_latest("session")
        begin = latest.state["turn"] if latest is not None else 0
        previous = latest.metadata.checkpoint_id if latest is not None else None
        done = []
        for turn in range(begin + 1, begin + turns + 1):
            done.append(turn)
            if turn % 5 == 0:
                name = f"session-{turn}"
                made = checkpoint("session", name, turn, parent_checkpoint_id=previous, state={"turn": turn})
                previous = await backend.put(made)
        await backend.close()
        return done

    with backstay.open(url) as kept:  # what is in memory lives as long as it is open
        place = kept if url == "memory:" else url
        assert run(agent(place, 12))[-1] == 12
        assert run(agent(place, 3)) == [11, 12, 13]


# Snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_has_the_next_step_a_new_id_its_trigger_as_a_tag_and_a_summary(url: str) -> None:
    async def main() -> None:
        backend = StoreBackend(await backstay.aopen(url))
        question = {"role": "user", "content": "x" * 150}
        first = await backend.snapshot("t", [question], {"n": 1}, {"tool": 1}, "tool_call", next_node="answer")
        second = await backend.snapshot("t", [], {"n": 2, "m": 3}, {})
        assert first is not None
        assert second is not None
        # Another process starts with the step after the newest, not with 1 again.
        restarted = backend if url == "memory:" else StoreBackend(url)
        third = await restarted.snapshot("t", [{"content": 5}], {}, {}, parent_checkpoint_id=first)
        assert third is not None

        found = [await backend.get(name) for name in (first, second, third)]
        assert [each and (each.metadata.step, each.metadata.tags, each.metadata.summary) for each in found] == [
            (1, ["tool_call"], f"[user] {'x' * 100}"),
            (2, ["manual"], "State: 2 keys"),
            (3, ["manual"], "[unknown] 5"),
        ]
        assert [each and each.metadata.parent_checkpoint_id for each in found] == [None, first, first]
        assert found[0] is not None
        assert (found[0].messages, found[0].state, found[0].tools_result) == ([question], {"n": 1}, {"tool": 1})
        assert found[0].next_node == "answer"
        await restarted.close()
        await (await backend._opened.store()).close()

    run(main())


def test_a_snapshot_with_a_trigger_that_is_not_declared_stores_nothing() -> None:
    class Trigger(StrEnum):
        TOOL_CALL = "tool_call"
        INTERVAL = "interval"

    backend = StoreBackend("memory:", triggers={"manual", "tool_call"})

    assert run(backend.snapshot("t", [], {}, {}, Trigger.INTERVAL)) is None
    assert run(backend.list_threads()) == []
    assert run(backend.snapshot("t", [], {}, {}, Trigger.TOOL_CALL)) is not None
    assert [item.tags for item in run(backend.list_checkpoints("t"))] == [["tool_call"]]
    with pytest.raises(EncodeError):  # a snapshot that fails is not the same as one that was not wanted
        run(backend.snapshot("t", [], {"n": float("nan")}, {}))
    run(backend.close())
    with pytest.raises(InvalidInput, match="several names"):
        StoreBackend("memory:", triggers="manual")


# What it came from did wrong --------------------------------------------------------------------------------------


def test_walking_a_thread_shows_each_checkpoint_once_while_others_put_and_delete(backend: StoreBackend) -> None:
    async def main() -> list[str]:
        for number in range(120):  # more than one page
            await backend.put(checkpoint("t", f"t{number}", number))
        seen = []
        async for item in backend.checkpoints("t"):
            seen.append(item.checkpoint_id)
            if len(seen) in (1, 90):
                await backend.put(checkpoint("t", f"new{len(seen)}", 1000))
            if len(seen) == 50:
                assert await backend.delete_before("t", 10) == 10
        return seen

    assert run(main()) == [f"t{number}" for number in range(119, 9, -1)]


def test_walking_the_threads_shows_each_once_while_others_begin_and_end() -> None:
    async def main() -> list[str]:
        async with StoreBackend("memory:") as backend:
            for number in range(130):  # more than one page
                await backend.put(checkpoint(f"t{number}", f"c{number}", 1))
            seen = []
            async for item in backend.threads():
                seen.append(item.thread_id)
                if len(seen) == 60:
                    await backend.put(checkpoint("new", "new", 1))
                    await backend.put(checkpoint("t3", "c3 again", 2))
                    await backend.delete_thread(seen[10])
                    await backend.delete_thread("t5")
            return seen

    assert run(main()) == [f"t{number}" for number in range(129, -1, -1) if number != 5]


@pytest.mark.parametrize("place", ["messages", "state", "tools_result", "extra"])
def test_nan_is_refused_before_anything_is_stored(place: str) -> None:
    backend = StoreBackend("memory:")
    made = checkpoint("t", "c", 1)
    bad: Any = [{"content": float("nan")}] if place == "messages" else {"content": float("nan")}
    setattr(made, place, bad)

    with pytest.raises(EncodeError, match="content is nan"):
        run(backend.put(made))

    assert run(backend.get_latest("t")) is None


def test_a_checkpoint_changed_after_the_put_changes_nothing_stored(backend: StoreBackend) -> None:
    made = checkpoint("t", "c", 1, state={"deep": {"list": [1]}})
    run(backend.put(made))

    made.state["deep"]["list"].append(2)
    made.messages.append({"role": "later"})
    found = run(backend.get("c"))
    assert found is not None
    found.state["deep"]["list"].append(3)

    again = run(backend.get("c"))
    assert again is not None
    assert again.state == {"deep": {"list": [1]}}
    assert again.messages == [MESSAGE]


def test_created_at_is_a_moment_and_comes_back_as_it_was_written(backend: StoreBackend) -> None:
    for name, text in (("a", "2026-01-31T12:00:00Z"), ("b", "2026-01-31T14:00:00.5+02:00"), ("c", "20260131T120000Z")):
        made = checkpoint(name, name, 1, created_at=text)
        run(backend.put(made))
        assert run(backend.get(name)) == made
    for wrong in ("yesterday", "2026-01-31T12:00:00", "", 5, None):
        with pytest.raises(InvalidInput, match="created_at must be ISO 8601 text with an offset"):
            run(backend.put(checkpoint("t", "d", 1, created_at=wrong)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("thread_id", ""),
        ("checkpoint_id", ""),
        ("step", -1),
        ("step", 1.0),
        ("step", True),
        ("tags", ["x", 1]),
        ("tags", ["backstay.replaced"]),
        ("extra", {"backstay.adapter": "x"}),
        ("extra", {"step": 2}),
        ("summary", None),
    ],
)
def test_what_no_store_could_give_back_is_refused(field: str, value: object) -> None:
    backend = StoreBackend("memory:")
    made = checkpoint("t", "c", 1)
    setattr(made.metadata, field, value)

    with pytest.raises(InvalidInput):
        run(backend.put(made))

    assert run(backend.list_threads()) == []


def test_unknown_keys_are_stored_and_the_metadata_can_be_searched(backend: StoreBackend, store: backstay.Store) -> None:
    made = checkpoint("t", "c", 1)
    made.metadata.extra, made.extra = {"user": "u1"}, {"plugins": ["later", {"x": None}]}

    run(backend.put(made))

    assert run(backend.get("c")) == made
    assert [meta.id for meta in store.threads(where={"user": "u1"})] == ["c"]


def test_what_is_stored_grows_with_what_is_new(tmp_path: Path, show: Show) -> None:
    """Every snapshot holds all messages; the file must not."""

    def size_after(steps: int) -> tuple[int, int]:
        path = tmp_path / f"{steps}.db"
        backend = StoreBackend(path)
        messages: list[dict[str, Any]] = []

        async def main() -> None:
            for step in range(steps):
                messages.append({"role": "user", "content": os.urandom(200).hex()})
                await backend.put(checkpoint("t", f"c{step}", step, messages=messages))
            await backend.close()

        run(main())
        return sum(each.stat().st_size for each in tmp_path.glob(f"{steps}.db*")), steps * 400

    (small, _), (large, payload) = size_after(40), size_after(160)

    show("S3 face, 160 puts of 400 new bytes", f"{large} bytes, {large / payload:.1f} x the payload")
    assert large / small < 6  # four times the steps; full copies would be sixteen times the bytes
    assert large < 8 * payload  # full copies: 80 times


def test_the_event_loop_never_waits_for_the_disk(tmp_path: Path) -> None:
    threads = set()

    def clock() -> datetime:
        threads.add(threading.get_ident())
        return datetime(2026, 1, 1, tzinfo=UTC)

    with backstay.open(tmp_path / "a.db", clock=clock) as store:
        threads.clear()
        backend = StoreBackend(store)
        run(backend.put(checkpoint("t", "c", 1)))
        run(backend.close())

    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_backend_opens_its_store_when_first_used_and_closes_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"

    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [
            target for target in (os.readlink(link) for link in links if os.path.islink(link)) if str(path) in target
        ]

    async def main() -> None:
        async with StoreBackend(path) as backend:
            assert not path.exists()
            names = await asyncio.gather(*(backend.put(checkpoint(f"t{n}", f"c{n}", 1)) for n in range(6)))
            assert names == [f"c{n}" for n in range(6)]
            assert len(await backend.list_threads()) == 6
            assert open_files()
        assert open_files() == []
        await backend.close()
        with pytest.raises(StoreError, match="closed"):
            await backend.get("c1")

    run(main())


def test_postgres_is_reached_and_its_tables_made_when_first_used(postgres: PostgresServer, postgres_url: str) -> None:
    (schema,) = set(re.findall(r"t_[0-9a-f]{32}", postgres_url))

    def tables() -> int:
        with postgres.connect() as connection:
            found = connection.execute(
                "select count(*) from information_schema.tables where table_schema = %s", [schema]
            ).fetchone()
        assert found is not None
        return int(found[0])

    backend = create_checkpointer("postgres", dsn=postgres_url)
    assert tables() == 0
    run(backend.put(checkpoint("t", "c", 1)))
    assert tables() > 0
    run(backend.close())
    run(backend.close())


def test_lists_read_no_payload(tmp_path: Path) -> None:
    fetched = []

    class Watched(SqliteStore):
        def fetch(self, ranges: Any) -> list[list[bytes]]:
            asked: list[Range] = list(ranges)
            fetched.append(asked)
            return super().fetch(asked)

    with backstay.Store(Watched(str(tmp_path / "a.db")), make_services("", None)) as store:
        backend = StoreBackend(store)
        for number in range(3):
            run(backend.put(checkpoint("t", f"c{number}", number, state={"doc": "x" * 300_000})))
        fetched.clear()
        assert len(run(backend.list_checkpoints("t"))) == 3
        assert len(run(backend.list_threads())) == 1
        assert fetched == []
        assert run(backend.get("c1")) is not None
        assert fetched != []  # the watch works
        run(backend.close())


def test_a_failure_is_an_error_and_never_an_empty_answer(tmp_path: Path) -> None:
    """Not an empty id for a put that failed, and not None for a newest checkpoint that cannot be read."""
    path = tmp_path / "a.db"
    backend = StoreBackend(path)
    put_steps(backend, "t", 1)
    run(backend.close())
    data = bytearray(path.read_bytes())
    place = data.find(b"call_1")
    assert place > 0
    data[place] ^= 1
    path.write_bytes(data)

    damaged = StoreBackend(path)
    with pytest.raises((Corrupted, StoreError)):
        run(damaged.get_latest("t"))
    run(damaged.close())
    with pytest.raises(StoreError):
        run(damaged.put(checkpoint("u", "c", 1)))


def test_concurrent_puts_are_all_stored_one_after_the_other(url: str) -> None:
    """Through two stores at once, as two processes would; the order is the store's, and the lineage is one line."""

    async def main() -> tuple[list[CheckpointMetadata], list[str]]:
        first = StoreBackend(await backstay.aopen(url))
        second = first if url == "memory:" else StoreBackend(url)
        names = [f"c{number}" for number in range(12)]
        places = [first, second] * 6
        puts = [place.put(checkpoint("t", name, 1)) for place, name in zip(places, names, strict=True)]
        await asyncio.gather(*puts, *(place.put(checkpoint("t", "same", 1, tags=[])) for place in (first, second)))
        shown = await first.list_checkpoints("t")
        await second.close()
        await (await first._opened.store()).close()
        return shown, [*names, "same"]

    shown, names = run(main())

    assert sorted(item.checkpoint_id for item in shown) == sorted(names)
    assert [item.parent_checkpoint_id for item in shown[:-1]] == [item.checkpoint_id for item in shown[1:]]


def test_a_recorded_call_keeps_its_result_and_not_its_arguments(tmp_path: Path) -> None:
    calls = []

    def login(password: str) -> dict[str, Any]:
        calls.append(password)
        return {"user": {"roles": ["admin"]}}

    for _ in range(2):
        with backstay.open(tmp_path / "a.db") as store:
            assert store.thread("t").effect("login", login, "correct horse") == {"user": {"roles": ["admin"]}}
    assert calls == ["correct horse"]
    assert all(b"correct horse" not in path.read_bytes() for path in tmp_path.iterdir())


# Together with the rest of Backstay -------------------------------------------------------------------------------


def test_both_sides_read_what_the_other_wrote(backend: StoreBackend, store: backstay.Store) -> None:
    run(backend.put(checkpoint("t", "c1", 4, next_node="search", summary="s", tags=["x"])))
    thread = store.thread("t")
    latest = thread.latest()
    assert latest is not None
    assert (latest.messages, latest.tool_results, latest.state["step"]) == ([MESSAGE], {"t": 4}, 4)
    assert (latest.step, latest.next_node, latest.summary, latest.tags) == (4, "search", "s", ("x",))

    saved = thread.save({"messages": [{"role": "user"}], "plan": 1, "tool_results": "text"}, metadata={"user": "u"})

    found = run(backend.get_latest("t"))
    assert found is not None
    assert (found.messages, found.state, found.tools_result) == (
        [{"role": "user"}],
        {"plan": 1, "tool_results": "text"},
        {},
    )
    assert (found.metadata.step, found.metadata.parent_checkpoint_id) == (5, "c1")
    assert found.metadata.extra == {"user": "u"}
    with pytest.raises(IdTaken, match="was not saved through this interface"):
        run(backend.put(checkpoint("t", saved.id, 5)))


def test_a_backend_is_made_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    for made in (create_checkpointer(), create_checkpointer("  SQLite ", db_path=tmp_path / "b.db")):
        run(made.put(checkpoint("t", "c", 1)))
        run(made.close())
    assert (tmp_path / "checkpoints.db").exists()
    assert (tmp_path / "b.db").exists()
    assert repr(create_checkpointer("postgres", dsn="postgresql://h/d")) == "<StoreBackend postgresql://h/d>"
    with pytest.raises(ValueError, match="sqlite, postgres"):
        create_checkpointer("redis")
    with pytest.raises(InvalidInput, match="needs dsn"):
        create_checkpointer("postgres")
    with pytest.raises(InvalidInput, match="has no option 'path'"):
        create_checkpointer("sqlite", path="x")
