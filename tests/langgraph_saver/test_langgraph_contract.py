"""What LangGraph expects of a saver and its conformance suite does not ask, on every store, by both sets of verbs.

The stores are shared by the tests of this file; every test has threads of its own, which are verified when it ends.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME, SCHEDULED

from backstay.errors import IdTaken
from backstay.langgraph import BackstaySaver
from support.langgraph.face import Face, Line, at, id_of, make_checkpoint, new_id, opened, spread


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    spread(metafunc)


@pytest.fixture(scope="module")
def saver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackstaySaver]:
    with opened(request.param, request, tmp_path_factory.mktemp("contract")) as saver:
        yield saver


@pytest.fixture
def face(saver: BackstaySaver, verbs: str) -> Iterator[Face]:
    with asyncio.Runner() as runner:
        yield Face(saver, runner if verbs == "async" else None)


@pytest.fixture
def thread(saver: BackstaySaver) -> Iterator[str]:
    name = f"thread-{uuid.uuid4().hex}"
    yield name
    report = saver.store.thread(name).check()
    assert report, str(report)


@pytest.fixture
def line(face: Face, thread: str) -> Line:
    return Line(face, thread)


def ids(found: list[CheckpointTuple]) -> list[str | None]:
    return [id_of(item.config) for item in found]


# Checkpoints ------------------------------------------------------------------------------------------------------


def test_an_id_is_found_exactly_or_not_at_all(line: Line) -> None:
    config = line.put({"n": 1})

    assert line.face.read(config).checkpoint["channel_values"] == {"n": 1}
    assert line.face.get_tuple(at(line.thread, "", new_id())) is None
    assert line.face.get_tuple(at(line.thread, "", "by-hand")) is None
    assert line.face.get_tuple(at(line.thread, "other", id_of(config))) is None
    assert line.face.get_tuple(at(line.thread + "x", "", id_of(config))) is None


def test_a_thread_that_is_not_there_is_empty(face: Face, thread: str) -> None:
    assert face.get_tuple(at(thread)) is None
    assert face.get_tuple(at(thread, "ns")) is None
    assert face.listed(at(thread)) == []


def test_what_comes_back_names_its_place(line: Line) -> None:
    first, second = line.put({"n": 1}), line.put({"n": 2})

    for found in (line.face.read(at(line.thread)), line.face.read(second), line.face.listed(at(line.thread))[0]):
        assert found.config["configurable"] == {
            "thread_id": line.thread,
            "checkpoint_ns": "",
            "checkpoint_id": id_of(second),
        }
        assert found.parent_config == at(line.thread, "", id_of(first))
    assert line.face.read(first).parent_config is None


@pytest.mark.parametrize("named", [17, -1, uuid.UUID(int=5), True, 2.5])
def test_a_threads_id_need_not_be_text(face: Face, thread: str, named: object) -> None:
    name = str(named)  # shared by the tests of a store: begin with nothing
    face.delete_thread(name)
    line = Line(face, named)
    config = line.put({"n": 1})
    face.put_writes(config, [("n", 2)], "task")

    for spelled in (named, name):
        found = face.read(at(spelled))
        assert found.checkpoint["channel_values"] == {"n": 1}
        assert [write[2] for write in found.pending_writes or []] == [2]
        assert len(face.listed(at(spelled))) == 1
    face.delete_thread(named)  # type: ignore[arg-type]  # what LangGraph's savers accept

    assert face.get_tuple(at(name)) is None


@pytest.mark.parametrize("ns", ["child", "child:1|inner:2", "ünï|cødé:→ 🙂", "a" * 255, "a" * 256, "x:" + "é" * 5000])
def test_a_namespace_is_a_place_of_its_own(face: Face, thread: str, ns: str) -> None:
    root, inside, beside = Line(face, thread), Line(face, thread, ns), Line(face, thread, ns + "b")
    id = new_id()  # the same id in each of them is another checkpoint
    for number, line in enumerate((root, inside, beside)):
        line.put({"n": number}, id=id)
        face.put_writes(line.config, [("n", -number)], "task")

    for number, line in enumerate((root, inside, beside)):
        for config in (line.config, at(thread, line.ns)):
            found = face.read(config)
            assert found.checkpoint["channel_values"] == {"n": number}
            assert found.pending_writes == [("task", "n", -number)]
            assert found.config["configurable"]["checkpoint_ns"] == line.ns
    assert sorted(item.config["configurable"]["checkpoint_ns"] for item in face.listed(at(thread))) == sorted(
        ["", ns, ns + "b"]
    )
    assert [item.checkpoint["channel_values"] for item in face.listed(at(thread, ns))] == [{"n": 1}]


def test_a_config_without_a_namespace_means_the_root(line: Line) -> None:
    Line(line.face, line.thread, "child").put({"n": "inner"})
    line.put({"n": "outer"})
    Line(line.face, line.thread, "child").face.put_writes(line.config, [("n", 1)], "task")

    assert line.face.read(at(line.thread)).checkpoint["channel_values"] == {"n": "outer"}


def test_the_same_id_again_replaces_what_was_there(line: Line) -> None:
    line.put({"n": 1, "list": [1]})
    parent = line.config
    id = new_id()
    line.put({"n": 2, "list": [1, 2]}, metadata={"step": 5}, id=id)
    line.face.put_writes(line.config, [("n", "kept")], "task")
    line.config = parent
    line.put({"n": 3, "list": [1, 9]}, metadata={"step": 6}, id=id)

    found = line.face.read(at(line.thread))
    assert id_of(found.config) == id
    assert found.checkpoint["channel_values"] == {"n": 3, "list": [1, 9]}
    assert found.metadata["step"] == 6
    assert found.parent_config == at(line.thread, "", id_of(parent))
    assert [write[2] for write in found.pending_writes or []] == ["kept"]
    assert ids(line.face.listed(at(line.thread))) == [id, id_of(parent)]


def test_the_same_call_again_changes_nothing(line: Line) -> None:
    line.put({"n": 1})
    before, versions = line.config, {"n": line.face.saver.get_next_version(line.versions["n"], None)}
    checkpoint = make_checkpoint({"n": 2}, versions)
    for _ in range(3):
        after = line.face.put(before, copy.deepcopy(checkpoint), {"step": 1}, versions)

    assert line.face.read(after).checkpoint == checkpoint
    assert ids(line.face.listed(at(line.thread))) == [checkpoint["id"], id_of(before)]


def test_what_others_build_on_is_not_replaced(line: Line) -> None:
    root = line.put({"list": ["a"]})
    middle = line.put({"list": ["a", "b"]})
    child = line.put({"list": ["a", "b", "c"]})
    replaced = make_checkpoint({"list": ["other"]}, {"list": 9}, id=id_of(middle))
    with pytest.raises(IdTaken):
        line.face.put(line.face.read(root).config, replaced, {"step": 9}, {"list": 9})

    assert [line.values(config)["list"] for config in (root, middle, child)] == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert ids(line.face.listed(at(line.thread))) == [id_of(config) for config in (child, middle, root)]


def test_keys_of_a_checkpoint_that_nobody_knows_come_back(line: Line) -> None:
    extra: dict[str, Any] = {"pending_sends": [{"node": "x", "arg": [1, 2]}], "from_the_future": {"a": 1}}
    line.put({"n": 1}, **extra, v=3, updated_channels=["n"], versions_seen={"node": {"n": "1"}, "__input__": {}})
    found = line.face.read(line.config).checkpoint

    assert {key: found.get(key) for key in extra} == extra
    assert found["v"] == 3
    assert found["updated_channels"] == ["n"]
    assert found["versions_seen"] == {"node": {"n": "1"}, "__input__": {}}
    assert line.face.listed(at(line.thread))[0].checkpoint == found


@pytest.mark.parametrize("versions", [[1, 2, 3], [1.5, 2.5, 3.5], ["1", "2", "3"], [f"{n:032}.5" for n in (1, 2, 3)]])
def test_versions_come_back_as_they_were(face: Face, thread: str, versions: list[Any]) -> None:
    config = at(thread, "")
    for number, version in enumerate(versions):
        values = {"moves": number, "stays": "same"}
        moved = {"moves": version} if number else {"moves": version, "stays": versions[0]}
        stored = make_checkpoint(values, {"moves": version, "stays": versions[0]}, versions_seen={"n": dict(moved)})
        config = face.put(config, stored, {}, moved)

    for number, item in enumerate(reversed(face.listed(at(thread)))):
        assert item.checkpoint["channel_values"] == {"moves": number, "stays": "same"}
        found = item.checkpoint["channel_versions"]
        assert found == {"moves": versions[number], "stays": versions[0]}
        assert {type(version) for version in found.values()} == {type(versions[0])}


def test_a_channel_that_was_emptied_or_is_gone_does_not_come_back(line: Line) -> None:
    line.put({"kept": 1, "emptied": [1], "gone": [2]})
    line.versions.pop("gone")
    line.put({"kept": 1}, changed=["emptied"])  # a new version, and no value
    line.put({"kept": 2})

    assert line.values() == {"kept": 2}
    assert "emptied" in line.face.read(line.config).checkpoint["channel_versions"]
    assert "gone" not in line.face.read(line.config).checkpoint["channel_versions"]
    line.put({"kept": 2, "gone": [3]})

    assert line.values() == {"kept": 2, "gone": [3]}
    assert line.values(line.configs[0]) == {"kept": 1, "emptied": [1], "gone": [2]}


@pytest.mark.parametrize("value", [None, 0, "", [], {}, b"", False, [None], b"\x00\xff", "\x00", -(2**63), 1e300])
def test_a_value_that_looks_like_nothing_is_a_value(line: Line, value: object) -> None:
    line.put({"x": value})
    line.face.put_writes(line.config, [("x", value)], "task")
    found = line.face.read(line.config)

    assert found.checkpoint["channel_values"] == {"x": value}
    assert type(found.checkpoint["channel_values"]["x"]) is type(value)
    assert found.pending_writes == [("task", "x", value)]


def test_channels_and_tasks_may_have_any_name(line: Line) -> None:
    names = ("__start__", "branch:to:x", "ünï → 🙂", "a.b", "a/b", "", " ", "'\";--", "nul\0", "x" * 1000)
    values = {name: number for number, name in enumerate(names)}
    line.put(values)
    for name in names:
        line.face.put_writes(line.config, [(name, name)], name, name)

    assert line.values() == values
    assert line.face.read(line.config).pending_writes == [(name, name, name) for name in sorted(names)]
    line.put({**values, "nul\0": "changed"})
    assert line.values() == {**values, "nul\0": "changed"}


def test_latest_is_what_was_put_last_though_the_clock_of_the_ids_went_back(line: Line) -> None:
    late, early = "1f0fffff-ffff-6fff-8000-000000000000", "1f000000-0000-6000-8000-000000000000"
    line.put({"n": 1}, id=late)
    line.put({"n": 2}, id=early)

    assert id_of(line.face.read(at(line.thread)).config) == early
    assert ids(line.face.listed(at(line.thread))) == [early, late]
    assert ids(line.face.listed(at(line.thread, ""), before=at(line.thread, "", early))) == [late]
    assert ids(line.face.listed(at(line.thread, ""), before=at(line.thread, "", late))) == []
    assert ids(line.face.listed(at(line.thread), limit=1)) == [early]


def test_metadata_takes_in_what_the_config_says(face: Face, thread: str) -> None:
    config = at(thread, "")
    config["metadata"] = {"user": "u1", "run_id": "r1", "dropped": {"not": "plain"}}
    config["configurable"].update(tenant=7, __private=1)
    found = face.read(
        face.put(config, make_checkpoint({}, {}), {"source": "input", "step": -1, "parents": {"": "p"}}, {})
    )

    stock = InMemorySaver()
    expected = stock.get_tuple(
        stock.put(config, make_checkpoint({}, {}), {"source": "input", "step": -1, "parents": {"": "p"}}, {})
    )
    assert expected is not None
    assert found.metadata == expected.metadata
    assert ids(face.listed(at(thread), filter={"tenant": 7, "user": "u1"})) == [id_of(found.config)]


def test_metadata_comes_back_as_from_langgraphs_own_savers(line: Line) -> None:
    line.put({}, metadata={"counters_since_delta_snapshot": {"channel": (2, 4)}})
    found: Any = line.face.read(line.config).metadata

    assert found["counters_since_delta_snapshot"] == {"channel": [2, 4]}


class AnyText(str):
    """Equal to every text: how tests, LangGraph's among them, say that an id does not matter."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    __hash__ = str.__hash__


def test_an_id_equals_what_says_that_it_is_equal(line: Line) -> None:
    line.put({"n": 1})
    line.put({"n": 2})
    for found in (line.face.read(at(line.thread)), line.face.read(line.configs[0])):
        assert found.config == at(line.thread, "", AnyText())
        assert at(line.thread, "", AnyText()) == found.config


# Pending writes ---------------------------------------------------------------------------------------------------


def test_pending_writes_come_in_the_order_of_the_tasks_paths(line: Line) -> None:
    line.put({"n": 1})
    calls = [
        ("task-a", "~__pregel_pull, z"),
        ("task-z", "~__pregel_pull, a"),
        ("task-c", ""),
        ("task-b", "~__pregel_pull, z"),
        ("task-y", "~__pregel_push, 0000000001"),
        ("task-x", "~__pregel_push, 0000000010"),
    ]
    for task, path in calls:
        line.face.put_writes(line.config, [("n", f"{task} {n}") for n in range(12)], task, path)
    expected = [
        (task, "n", f"{task} {n}") for _, task in sorted((path, task) for task, path in calls) for n in range(12)
    ]

    assert line.face.read(line.config).pending_writes == expected
    assert line.face.read(at(line.thread)).pending_writes == expected
    assert line.face.listed(at(line.thread))[0].pending_writes == expected
    assert line.face.listed(None, filter={"step": -1}, limit=1) != []


def test_special_writes_come_before_those_of_the_same_task(line: Line) -> None:
    line.put({"n": 1})
    line.face.put_writes(line.config, [("n", 1), (INTERRUPT, "i"), ("n", 2)], "task")
    line.face.put_writes(line.config, [(RESUME, "r")], "task")
    line.face.put_writes(line.config, [(ERROR, "e")], "task")
    line.face.put_writes(line.config, [(SCHEDULED, "s")], "task")

    expected = [(RESUME, "r"), (INTERRUPT, "i"), (SCHEDULED, "s"), (ERROR, "e"), ("n", 1), ("n", 2)]
    assert [write[1:] for write in line.face.read(line.config).pending_writes or []] == expected


def test_writes_may_come_before_their_checkpoint(line: Line) -> None:
    id = new_id()
    line.face.put_writes(at(line.thread, "", id), [("n", "early")], "task", "path")
    line.face.put_writes(at(line.thread, "inner", id), [("n", "early inside")], "task", "path")

    assert line.face.get_tuple(at(line.thread, "", id)) is None
    assert line.face.listed(at(line.thread)) == []
    line.put({"n": 1}, id=id)
    line.face.put_writes(line.config, [("n", "late")], "later", "path")

    assert line.face.read(line.config).pending_writes == [("later", "n", "late"), ("task", "n", "early")]
    assert line.face.listed(at(line.thread))[0].pending_writes == [("later", "n", "late"), ("task", "n", "early")]
    inside = Line(line.face, line.thread, "inner")
    inside.put({"n": 1}, id=id)

    assert inside.face.read(inside.config).pending_writes == [("task", "n", "early inside")]


def test_writes_of_a_checkpoint_that_never_came_go_with_the_thread(line: Line) -> None:
    id = new_id()
    line.face.put_writes(at(line.thread, "", id), [("n", "early")], "task")
    line.face.delete_thread(line.thread)
    line.put({"n": 1}, id=id)

    assert line.face.read(line.config).pending_writes == []


def test_the_first_of_two_equal_writes_stays_and_the_last_of_two_special_ones(line: Line) -> None:
    def written(*calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        config = line.put({"n": len(line.configs)})
        for call in calls:
            line.face.put_writes(config, call, "task", "path")
        return [write[1:] for write in line.face.read(config).pending_writes or []]

    assert written([("a", 1)], [("a", 2)]) == [("a", 1)]
    assert written([("a", 1)], [("b", 2), ("c", 3)]) == [("a", 1), ("c", 3)]
    assert written([(INTERRUPT, 1)], [(INTERRUPT, 2)]) == [(INTERRUPT, 2)]
    assert written([(ERROR, 1), (RESUME, 1)], [(RESUME, 2), (ERROR, 2)]) == [(RESUME, 2), (ERROR, 2)]
    assert written([("a", 1), (ERROR, 1)], [("a", 2), (ERROR, 2)]) == [(ERROR, 1), ("a", 1)]  # not all are special
    assert written([("a", 1), (ERROR, 1)], [(ERROR, 2)]) == [(ERROR, 2), ("a", 1)]
    assert written([("a", 1)], []) == [("a", 1)]


def test_writes_of_one_task_do_not_touch_another_ones(line: Line) -> None:
    line.put({"n": 1})
    for task in ("one", "two"):
        line.face.put_writes(line.config, [(RESUME, task), ("n", task)], task)
        line.face.put_writes(line.config, [(RESUME, task + "!")], task)

    expected = [(task, *write) for task in ("one", "two") for write in ((RESUME, task + "!"), ("n", task))]
    assert line.face.read(line.config).pending_writes == expected


# Lists ------------------------------------------------------------------------------------------------------------


def test_a_list_is_newest_first_and_ends_where_it_is_told(line: Line) -> None:
    for number in range(6):
        line.put({"n": number})
    everything = [id_of(config) for config in reversed(line.configs)]
    there = at(line.thread, "")

    assert ids(line.face.listed(there)) == everything
    assert [ids(line.face.listed(there, limit=limit)) for limit in (0, 1, 4, 99)] == [
        [],
        everything[:1],
        everything[:4],
        everything,
    ]
    for place, config in enumerate(reversed(line.configs)):
        assert ids(line.face.listed(there, before=config)) == everything[place + 1 :]
        assert ids(line.face.listed(there, before=config, limit=2)) == everything[place + 1 :][:2]
        assert ids(line.face.listed(config)) == [everything[place]]
    assert ids(line.face.listed(there, before=there)) == everything


def test_a_list_without_a_namespace_has_them_all(line: Line) -> None:
    inner, deep = Line(line.face, line.thread, "a:1"), Line(line.face, line.thread, "a:1|b:2")
    for number in range(3):
        for written in (line, inner, deep):
            written.put({"n": number})
            written.face.put_writes(written.config, [("n", number)], "task")

    everything = line.face.listed(at(line.thread))
    assert sorted(str(id_of(item.config)) for item in everything) == sorted(
        str(id_of(config)) for written in (line, inner, deep) for config in written.configs
    )
    for written in (line, inner, deep):
        mine = [item for item in everything if item.config["configurable"]["checkpoint_ns"] == written.ns]
        assert ids(mine) == [id_of(config) for config in reversed(written.configs)]
        assert [item.checkpoint for item in mine] == [
            item.checkpoint for item in line.face.listed(at(line.thread, written.ns))
        ]
        assert [[write[2] for write in item.pending_writes or []] for item in mine] == [[2], [1], [0]]


METADATA: dict[str, Any] = {
    "text": 'it\'s "quoted" 100% ünï',
    "whole": 7,
    "zero": 0,
    "real": 2.5,
    "yes": True,
    "no": False,
    "nothing": None,
    "items": [1, "2", None],
    "inside": {"a": {"b": 1}, "c": []},
}


@pytest.mark.parametrize("key", METADATA)
def test_a_filter_compares_values_of_every_json_type(line: Line, key: str) -> None:
    other = {"text": "other", "whole": 8, "zero": 1, "real": 2.25, "yes": False, "no": True, "nothing": 1}
    other_metadata = {**METADATA, **other, "items": [1, "2"], "inside": {"a": {"b": 2}, "c": []}}
    line.put({"n": 1}, metadata=METADATA)
    line.put({"n": 2}, metadata=other_metadata)
    there = at(line.thread)

    assert ids(line.face.listed(there, filter={key: METADATA[key]})) == [id_of(line.configs[0])]
    assert ids(line.face.listed(there, filter={key: other_metadata[key]})) == [id_of(line.configs[1])]
    assert line.face.listed(there, filter={key: "something else"}) == []
    assert line.face.listed(there, filter={key: METADATA[key], "source": "input"}) == []
    assert ids(line.face.listed(there, filter={key: METADATA[key], "source": "loop"})) == [id_of(line.configs[0])]


def test_a_filter_does_not_mistake_one_type_for_another(line: Line) -> None:
    line.put({"n": 1}, metadata={"x": "1"})
    line.put({"n": 2}, metadata={"x": 1})
    line.put({"n": 3}, metadata={"x": [1]})
    line.put({"n": 4}, metadata={"x": {"x": 1}})
    line.put({"n": 5}, metadata={"x": "null"})

    for number, value in enumerate(["1", 1, [1], {"x": 1}, "null"]):
        assert ids(line.face.listed(at(line.thread), filter={"x": value})) == [id_of(line.configs[number])]


@pytest.mark.parametrize("key", ["missing", "", "a.b", "a'b", 'a"b', "a]b", "$.source", "source') or 1=1 --", "ünï"])
def test_a_filters_key_is_only_a_key(line: Line, key: str) -> None:
    line.put({"n": 1})
    assert line.face.listed(at(line.thread), filter={key: "v"}) == []
    line.put({"n": 2}, metadata={key: "v"})

    assert ids(line.face.listed(at(line.thread), filter={key: "v"})) == [id_of(line.config)]


def test_a_filter_goes_with_limit_and_before(line: Line) -> None:
    for number in range(12):
        line.put({"n": number}, metadata={"odd": number % 2 == 1})
    odd = [id_of(config) for number, config in enumerate(line.configs) if number % 2][::-1]
    there = at(line.thread, "")

    assert ids(line.face.listed(there, filter={"odd": True}, limit=3)) == odd[:3]
    assert ids(line.face.listed(there, filter={"odd": True}, before=line.configs[7], limit=2)) == odd[3:5]
    assert ids(line.face.listed(there, filter={})) == [id_of(config) for config in reversed(line.configs)]


# What is handed out and in ----------------------------------------------------------------------------------------


def test_changing_what_came_back_changes_nothing_stored(line: Line) -> None:
    line.put({"messages": [HumanMessage("hello", id="1")], "deep": {"a": [{"b": 1}]}}, metadata={"tags": {"x": [1]}})
    line.face.put_writes(line.config, [("deep", {"list": [1]})], "task")

    def fresh() -> CheckpointTuple:
        return line.face.read(at(line.thread))

    expected = copy.deepcopy(fresh())
    for found in (fresh(), line.face.read(line.config), line.face.listed(at(line.thread))[0]):
        values = found.checkpoint["channel_values"]
        values["messages"][0].content = "changed"
        values["messages"].append("new")
        values["deep"]["a"][0]["b"] = 2
        found.checkpoint["channel_versions"]["new"] = "1"
        found.checkpoint["versions_seen"]["new"] = {}
        found.metadata["tags"]["x"].append(2)  # type: ignore[typeddict-item]  # a key of the user's
        assert found.pending_writes is not None
        found.pending_writes[0][2]["list"].append(2)
        found.pending_writes.append(("a", "b", "c"))
        found.config["configurable"]["thread_id"] = "elsewhere"

        assert fresh() == expected
        assert line.face.listed(at(line.thread)) == [expected]
    line.put(expected.checkpoint["channel_values"], changed=["messages"])

    assert line.values() == expected.checkpoint["channel_values"]


@dataclass
class Note:
    text: str
    tags: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def message() -> BaseMessage:
    return AIMessage([{"type": "text", "text": "one"}], id="1", additional_kwargs={"a": {"b": [1]}})


def change_content(values: dict[str, Any]) -> None:
    values["list"][1].content = "changed"


def change_kwargs(values: dict[str, Any]) -> None:
    values["list"][1].additional_kwargs["a"]["b"].append(2)


def change_block(values: dict[str, Any]) -> None:
    values["list"][1].content[0]["text"] = "changed"


def change_element(values: dict[str, Any]) -> None:
    values["list"][1]["x"]["y"].append(2)


def change_note(values: dict[str, Any]) -> None:
    values["list"][1].text = "changed"


def change_inside_note(values: dict[str, Any]) -> None:
    values["list"][1].more["k"] = "v"
    values["list"][1].tags.append("t")


def change_dict(values: dict[str, Any]) -> None:
    values["dict"]["k"]["x"] = ["changed"]


MUTATIONS: list[tuple[Callable[[], Any], Callable[[dict[str, Any]], None]]] = [
    (message, change_content),
    (message, change_kwargs),
    (message, change_block),
    (lambda: {"x": {"y": [1]}}, change_element),
    (lambda: Note("one"), change_note),
    (lambda: Note("one"), change_inside_note),
    (lambda: 1, change_dict),
]


@pytest.mark.parametrize(("make", "change"), MUTATIONS, ids=[change.__name__ for _, change in MUTATIONS])
def test_a_change_in_place_is_in_the_next_checkpoint_and_not_in_the_last(
    line: Line, make: Callable[[], Any], change: Callable[[dict[str, Any]], None]
) -> None:
    """A saver that remembers what it has encoded by the object's identity stores the old content again, silently."""
    values: dict[str, Any] = {
        "list": [HumanMessage("before", id="0"), make(), HumanMessage("after", id="2")],
        "dict": {"k": {"x": []}, "other": 1},
    }
    states = []
    for _ in range(2):  # as loaded objects and as the caller's own
        line.put(values, changed=["list", "dict"])
        states.append(copy.deepcopy(values))
        change(values)

        assert line.values() == states[-1]  # not stored before it is put
        line.put(values, changed=["list", "dict"])
        states.append(copy.deepcopy(values))

        assert states[-1] != states[-2]
        assert line.values() == states[-1]
        values["list"].append(make())
        line.put(values, changed=["list"])
        states.append(copy.deepcopy(values))
        values = line.values()
        values["list"][1] = make()
        values["dict"]["k"]["x"] = []

    assert [line.values(config) for config in line.configs] == states


def test_changing_the_callers_objects_after_a_put_changes_nothing_stored(line: Line) -> None:
    values = {"list": [{"a": 1}]}
    versions = {"list": "1"}
    metadata: dict[str, Any] = {"step": 1, "parents": {"": "p"}}
    write = {"x": [1]}
    checkpoint = make_checkpoint(values, versions, versions_seen={"node": {"list": "1"}})
    expected = copy.deepcopy(checkpoint)
    config = line.face.put(at(line.thread, ""), checkpoint, metadata, versions)
    line.face.put_writes(config, [("list", write)], "task")
    values["list"][0]["a"] = 2
    values["list"].append({"b": 1})
    checkpoint["channel_versions"]["list"] = "2"
    checkpoint["versions_seen"]["node"]["list"] = "2"
    metadata["parents"][""] = "q"
    write["x"].append(2)

    found = line.face.read(config)
    assert found.checkpoint == expected
    assert found.metadata["parents"] == {"": "p"}
    assert found.pending_writes == [("task", "list", {"x": [1]})]


def test_a_put_does_not_change_what_it_is_given(line: Line) -> None:
    config = at(line.thread, "")
    checkpoint = make_checkpoint({"list": [{"a": 1}]}, {"list": "1"})
    metadata: dict[str, Any] = {"step": 1}
    before = copy.deepcopy((config, checkpoint, metadata))
    line.face.put(config, checkpoint, metadata, {"list": "1"})

    assert (config, checkpoint, metadata) == before


# Versions ---------------------------------------------------------------------------------------------------------


def test_the_next_version_is_always_a_greater_one(saver: BackstaySaver) -> None:
    stock = InMemorySaver()
    old = stock.get_next_version(None, None)
    for start in (None, 0, 3, 2.5, old, stock.get_next_version(old, None), f"{10**31 - 1:032}.123"):
        version: Any = start
        for _ in range(20):
            moved = saver.get_next_version(version, None)
            assert version is None or moved > version
            assert version is None or type(moved) is type(version)  # others compare it with what is there
            version = moved
