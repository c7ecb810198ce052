"""Moving in from LangGraph's own savers: what was there is here, looks the same through its graph, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.errors import Conflict, InvalidInput, StoreError, StoreRefused
from backstay.langgraph import BackstaySaver
from backstay.langgraph.importer.importer import import_langgraph
from backstay.langgraph.importer.postgres import PAGE_CHECKPOINTS
from backstay.langgraph.names import GraphLocation
from backstay.store.base import Query, Row
from backstay.thread.access import access_of
from support.langgraph.moving import STORIES, Origin, account, config_of, go_on, postgres_origin, sqlite_origin, tell
from support.running import Show


@pytest.fixture(params=["sqlite", "postgres"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Origin]:
    if request.param == "sqlite":
        with sqlite_origin(tmp_path / "stock.sqlite") as made:
            yield made
    else:
        with postgres_origin(request.getfixturevalue("postgres")) as made:
            yield made


@pytest.fixture
def target() -> Iterator[backstay.Store]:
    with backstay.open("memory:") as opened:
        yield opened
        assert opened.check()


def row_of(store: backstay.Store, config: Any) -> Row:
    """Return a stored checkpoint with its writes as they are stored."""
    where = config["configurable"]
    name = GraphLocation(where["thread_id"], where["checkpoint_ns"]).name(where["checkpoint_id"])
    (row,) = access_of(store).store.find(Query(store.namespace, ids=(name,), payload=True, writes=True))
    return row


# What was there is here ---------------------------------------------------------------------------------------------


def test_every_thread_looks_the_same_and_goes_on(origin: Origin, store: backstay.Store, show: Show) -> None:
    tell(origin.saver)

    report = import_langgraph(store, origin.where)

    assert report, str(report)
    assert (report.threads, report.present, report.notes) == (len(STORIES), 0, ())
    saver = BackstaySaver(store)
    seen = 0
    for name in STORIES:
        stock = account(origin.saver, name)
        assert account(saver, name) == stock
        seen += len(stock[-1])
    assert report.stored == seen
    for name in STORIES:
        assert go_on(saver, name) == go_on(origin.saver, name)
    show(f"checkpoints that look the same ({origin.kind} to {type(access_of(store).store).__name__})", seen)


def test_the_second_import_finds_all_there_and_stores_nothing(origin: Origin, target: backstay.Store) -> None:
    tell(origin.saver)
    first = import_langgraph(target, origin.where)
    before = target.stats()

    again = import_langgraph(target, origin.where)

    assert (again.stored, again.present, again.threads) == (0, first.stored, first.threads)
    assert again
    assert target.stats() == before


def test_what_the_source_has_more_by_now_is_added(origin: Origin, target: backstay.Store) -> None:
    """The newest checkpoint of the first import has new writes too: those of the step that followed it."""
    tell(origin.saver)
    first = import_langgraph(target, origin.where)
    for name in STORIES:
        go_on(origin.saver, name)

    again = import_langgraph(target, origin.where)

    assert again.present == first.stored
    assert again.stored > 0
    assert again, str(again)
    for name in STORIES:
        assert account(BackstaySaver(target), name) == account(origin.saver, name)


def test_the_source_is_seen_as_it_is_at_one_moment(origin: Origin, target: backstay.Store) -> None:
    tell(origin.saver, "talk", "fan")
    before = {name: list(origin.saver.list(config_of(name))) for name in ("talk", "fan")}

    def disturb(done: int, *_: object) -> None:
        if done == 2:
            origin.execute("DELETE FROM checkpoints")
            origin.execute("DELETE FROM {writes}")

    report = import_langgraph(target, origin.where, threads=["talk", "fan"], progress=disturb)

    assert report, str(report)
    assert list(origin.saver.list(config_of("talk"))) == []
    for name, tuples in before.items():
        assert list(BackstaySaver(target).list(config_of(name))) == tuples


def test_only_the_threads_that_are_named_are_taken(origin: Origin, target: backstay.Store) -> None:
    tell(origin.saver, "talk", "diary")

    report = import_langgraph(target, origin.where, threads=["diary", "nobody"])

    assert report.threads == 1
    assert [(note.thread, note.what) for note in report.missing] == [("nobody", "has no checkpoints of this thread")]
    assert [meta.thread_id for meta in target.threads()] == ["diary"]
    with pytest.raises(InvalidInput, match="list of thread ids"):
        import_langgraph(target, origin.where, threads="diary")


def test_progress_is_told(origin: Origin, target: backstay.Store) -> None:
    tell(origin.saver, "diary")
    told: list[tuple[int, int, str]] = []

    report = import_langgraph(target, origin.where, progress=lambda *what: told.append(what))

    assert told == [(number + 1, 0, "checkpoints") for number in range(report.stored)]


def test_a_thread_with_checkpoints_of_its_own_is_refused_and_the_others_are_taken(
    origin: Origin, target: backstay.Store
) -> None:
    tell(origin.saver, "talk", "diary")
    target.thread("talk").save({"mine": 1})
    target.thread("other").save({"mine": 2})

    report = import_langgraph(target, origin.where)

    assert [refused.thread for refused in report.refused] == ["talk"]
    assert isinstance(report.refused[0].error, Conflict)
    assert report.refused[0].error.what.startswith("the store has other checkpoints in this thread")
    assert len(list(target.thread("talk").history(branch="*"))) == 1
    assert account(BackstaySaver(target), "diary") == account(origin.saver, "diary")


def test_a_thread_that_went_on_here_is_left_alone(origin: Origin, target: backstay.Store) -> None:
    tell(origin.saver, "talk", "fan")
    import_langgraph(target, origin.where)
    saver = BackstaySaver(target)
    go_on(saver, "talk")
    here = account(saver, "talk")
    head = origin.saver.get_tuple(config_of("talk"))
    assert head is not None
    origin.saver.put_writes(head.config, [("turns", 99)], "late")

    again = import_langgraph(target, origin.where)

    assert again
    assert again.stored == 0
    assert account(saver, "talk") == here


def test_answers_given_here_are_not_taken_back(origin: Origin, target: backstay.Store) -> None:
    """Only writes were added to the newest checkpoint here, under numbers that the source has too."""
    head = origin.put("t", {"x": [1]})
    origin.saver.put_writes(head, [("__resume__", "of old")], "task")
    import_langgraph(target, origin.where)
    BackstaySaver(target).put_writes(head, [("__resume__", "of here")], "task")

    import_langgraph(target, origin.where)

    found = BackstaySaver(target).get_tuple(head)
    assert found is not None
    assert found.pending_writes == [("task", "__resume__", "of here")]


def test_long_threads_come_page_by_page(origin: Origin, target: backstay.Store) -> None:
    config = None
    for number in range(PAGE_CHECKPOINTS + 5):
        config = origin.put("long", {"list": list(range(number)), "same": {"a": 1}, "small": number}, config)
        origin.saver.put_writes(config, [("list", number), ("small", str(number))], f"task-{number}", f"path-{number}")

    report = import_langgraph(target, origin.where)

    assert (report.stored, bool(report)) == (PAGE_CHECKPOINTS + 5, True)
    assert list(BackstaySaver(target).list(config_of("long"))) == list(origin.saver.list(config_of("long")))


# Ids, parents, numbers ----------------------------------------------------------------------------------------------


def test_writes_keep_their_numbers_gaps_and_paths(origin: Origin, target: backstay.Store) -> None:
    config = origin.put("t", {"x": [1]})
    origin.saver.put_writes(config, [("a", 0), ("b", {"one": 1}), ("c", b"two"), ("d", None)], "task", "path~1")
    origin.saver.put_writes(config, [("a", [9])], "early", "path~0")
    origin.saver.put_writes(config, [("__error__", "broke"), ("__interrupt__", ["?"])], "task", "path~1")
    origin.execute("DELETE FROM {writes} WHERE idx = 1")

    import_langgraph(target, origin.where)

    writes = [(row.task_path, row.task_id, row.index, row.channel) for row in row_of(target, config).writes]
    assert writes == [
        ("path~0", "early", 0, "a"),
        ("path~1", "task", -3, "__interrupt__"),
        ("path~1", "task", -1, "__error__"),
        ("path~1", "task", 0, "a"),
        ("path~1", "task", 2, "c"),
        ("path~1", "task", 3, "d"),
    ]
    assert BackstaySaver(target).get_tuple(config) == origin.saver.get_tuple(config)


def test_a_thread_may_begin_twice_and_miss_a_parent(origin: Origin, target: backstay.Store) -> None:
    first = origin.put("t", {"x": ["first"]}, step=-1)
    gone = origin.put("t", {"x": ["gone"]}, first)
    child = origin.put("t", {"x": ["child"]}, gone)
    second = origin.put("t", {"x": ["second"]}, step=-1)
    origin.put("t", {"x": ["last"]}, second)
    origin.execute("DELETE FROM checkpoints WHERE checkpoint_id = ?", gone["configurable"]["checkpoint_id"])

    report = import_langgraph(target, origin.where)

    assert report, str(report)
    lost = gone["configurable"]["checkpoint_id"]
    assert [note.what for note in report.notes] == [f"its parent {lost} is missing"]
    assert report.notes[0].checkpoint == row_of(target, child).id
    assert list(BackstaySaver(target).list(config_of("t"))) == list(origin.saver.list(config_of("t")))
    assert import_langgraph(target, origin.where).present == 4


def test_values_that_are_made_of_writes_are_said_to_lack_those_of_a_missing_parent(
    origin: Origin, target: backstay.Store
) -> None:
    tell(origin.saver, "diary")
    middle = list(origin.saver.list(config_of("diary")))[-5].config["configurable"]["checkpoint_id"]
    origin.execute("DELETE FROM checkpoints WHERE checkpoint_id = ?", middle)

    report = import_langgraph(target, origin.where)

    assert {note.what for note in report.notes} == {
        "2 writes skipped: the checkpoint is missing",
        f"its parent {middle} is missing, so values that are rebuilt from earlier writes may be incomplete",
    }
    assert account(BackstaySaver(target), "diary") == account(origin.saver, "diary")


def test_long_namespaces_are_kept_and_impossible_threads_refused(origin: Origin, target: backstay.Store) -> None:
    namespace = "|".join(f"node{number}:{'0' * 36}" for number in range(9))
    deep: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": namespace}}
    config = origin.put("t", {"x": [1]}, deep)
    config = origin.put("t", {"x": [2]}, config)
    origin.saver.put_writes(config, [("x", 3)], "task")
    origin.put("n" * 300, {"x": [1]})

    report = import_langgraph(target, origin.where)

    assert [refused.thread for refused in report.refused] == ["n" * 300]
    assert len(namespace) > 300
    assert list(BackstaySaver(target).list(deep)) == list(origin.saver.list(deep))


def test_a_clock_that_was_set_back_does_not_put_children_before_parents(origin: Origin, target: backstay.Store) -> None:
    first = origin.put("t", {"x": [1]}, id="1f000000-0000-6000-8000-000000000009")
    late = origin.put("t", {"x": [2]}, first, id="1f000000-0000-6000-8000-000000000001")
    origin.put("t", {"x": [3]}, late, id="1f000000-0000-6000-8000-000000000002")

    report = import_langgraph(target, origin.where)

    assert report
    assert [note.what.partition(";")[0] for note in report.notes] == ["1 checkpoint with a lower id than the parent"]
    found = [each.checkpoint["channel_values"]["x"] for each in BackstaySaver(target).list(config_of("t"))]
    assert found == [[3], [2], [1]]


def test_a_fork_that_came_later_does_not_disturb_what_is_there(origin: Origin, target: backstay.Store) -> None:
    root = origin.put("t", {"x": [0]}, id="1f000000-0000-6000-8000-000000000001")
    origin.put("t", {"x": [2]}, root, id="1f000000-0000-6000-8000-000000000003")
    import_langgraph(target, origin.where)
    origin.put("t", {"x": [1]}, root, id="1f000000-0000-6000-8000-000000000002")

    report = import_langgraph(target, origin.where)

    assert report, str(report)
    assert (report.stored, report.present) == (1, 2)


def test_writes_of_checkpoints_that_never_came_are_left_behind_and_counted(
    origin: Origin, target: backstay.Store
) -> None:
    config = origin.put("t", {"x": [1]})
    lost: Any = {"configurable": {**config["configurable"], "checkpoint_id": "1f000000-0000-6000-8000-00000000000f"}}
    origin.saver.put_writes(lost, [("a", 1), ("b", 2)], "task")

    report = import_langgraph(target, origin.where)

    assert report
    assert [note.what for note in report.notes] == ["2 writes skipped: the checkpoint is missing"]


def test_a_value_that_was_changed_without_a_new_version_is_carried_over_as_it_is(
    tmp_path: Path, target: backstay.Store
) -> None:
    with sqlite_origin(tmp_path / "stock.sqlite") as origin:
        first = origin.put("t", {"x": ["a"]}, channel_versions={"x": 1})
        origin.put("t", {"x": ["b"]}, first, channel_versions={"x": 1})

        assert import_langgraph(target, origin.where)

        assert list(BackstaySaver(target).list(config_of("t"))) == list(origin.saver.list(config_of("t")))


def test_a_file_is_found_under_any_name(tmp_path: Path, target: backstay.Store) -> None:
    name = tmp_path / "50% ?mode=rwc#é.sqlite"
    with sqlite_origin(name) as origin:
        origin.put("t", {"x": [1]})

        for where in (name, str(name), f"sqlite:///{name}", f"sqlite:{name}"):
            assert import_langgraph(target, where).threads == 1


def test_a_schema_is_found_as_in_our_own_urls(postgres: Any, target: backstay.Store) -> None:
    with postgres_origin(postgres) as origin:
        origin.put("t", {"x": [1]})
        (schema,) = origin.execute("SELECT current_schema()")[0]

        assert import_langgraph(target, postgres.url(schema=schema)).stored == 1


# What cannot be read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "/dev/null", "postgresql://nobody@127.0.0.1:1/nothing", "mysql://x/y", "."])
def test_what_is_no_source_is_refused(where: str, target: backstay.Store) -> None:
    with pytest.raises((StoreError, InvalidInput)):
        import_langgraph(target, where)


def test_files_and_databases_without_the_tables_are_refused(
    tmp_path: Path, postgres: Any, target: backstay.Store
) -> None:
    backstay.open(tmp_path / "ours.db").close()
    (tmp_path / "text").write_text("no database " * 100)

    for where in (tmp_path / "ours.db", tmp_path / "text", tmp_path / "missing", postgres.url()):
        with pytest.raises(StoreRefused):
            import_langgraph(target, where)
    assert not (tmp_path / "missing").exists()


def test_a_wrong_password_is_not_shown(postgres: Any, target: backstay.Store) -> None:
    url = postgres.url(user="app", password="swordfish-of-mine")

    with pytest.raises(StoreError) as caught:
        import_langgraph(target, url)

    assert "swordfish" not in f"{caught.value!r} {caught.value} {caught.value.__cause__} {caught.value.__context__}"
