"""Random programs of a saver's verbs, run on ours and on LangGraph's saver in memory: the answers must be the same.

The programs keep to what both promise: ids that rise, one run at a time. Pruning and copying, which the saver in memory
lacks, are done to its dictionaries by hand.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from backstay.langgraph import BackstaySaver
from support.langgraph.face import Face, at, id_of, make_checkpoint, new_id, opened
from support.running import effort

Step = tuple[Any, ...]

NAMESPACES = ("", "inner:1", "n" * 300)
THREADS = 2
CHANNELS = ("list", "dict", "any", "messages")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=300),
)
messages = st.builds(
    lambda kind, text, extra: kind(text, id=str(uuid.UUID(int=len(text))), additional_kwargs=extra),
    st.sampled_from((HumanMessage, AIMessage)),
    st.text(max_size=300),
    st.dictionaries(st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=2), max_size=2),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)

edits = st.one_of(
    st.tuples(
        st.just("grow"), st.sampled_from(("list", "messages")), st.lists(values | messages, min_size=1, max_size=4)
    ),
    st.tuples(st.just("shrink"), st.sampled_from(("list", "messages")), st.integers(0, 6)),
    st.tuples(st.just("splice"), st.sampled_from(("list", "messages")), st.integers(0, 6), values | messages),
    st.tuples(st.just("key"), st.just("dict"), st.sampled_from("abc"), values | messages),
    st.tuples(st.just("set"), st.sampled_from(CHANNELS), values | messages),
    st.tuples(st.just("empty"), st.sampled_from(CHANNELS)),
    st.tuples(st.just("vanish"), st.sampled_from(CHANNELS)),
)
places = st.tuples(st.integers(0, THREADS - 1), st.integers(0, len(NAMESPACES) - 1))
written = st.lists(st.tuples(st.sampled_from(("list", "any", ERROR, INTERRUPT, RESUME)), values), max_size=3).filter(
    lambda writes: (
        len({channel.startswith("__") for channel, _ in writes}) < 2
    )  # of mixed calls the two make other things
)
steps = st.one_of(
    st.tuples(st.just("put"), places, st.lists(edits, max_size=3)),
    st.tuples(st.just("put"), places, st.lists(edits, max_size=3)),
    st.tuples(st.just("fork"), places, st.integers(0, 9), st.lists(edits, max_size=3)),
    st.tuples(
        st.just("write"), places, st.integers(0, 9), written, st.sampled_from("abc"), st.sampled_from(("", "~1"))
    ),
    st.tuples(st.just("early"), places, written, st.sampled_from("abc")),
    st.tuples(st.just("delete"), st.integers(0, THREADS - 1)),
    st.tuples(st.just("prune"), st.integers(0, THREADS - 1)),
    st.tuples(st.just("copy"), st.integers(0, THREADS - 1)),
)


class Pair:
    """Our saver and the model, and what a run would know: the newest values and the versions of each namespace."""

    def __init__(self, face: Face) -> None:
        self.face = face
        self.model = InMemorySaver()
        self.run = uuid.uuid4().hex
        self.copies = 0
        self.early: dict[tuple[str, str], str] = {}

    def thread(self, number: int) -> str:
        return f"{self.run}-{number}"

    def apply(self, step: Step) -> None:
        getattr(self, "do_" + step[0])(*step[1:])

    # Steps ----------------------------------------------------------------------------------------------------

    def do_put(self, place: tuple[int, int], changes: list[Step]) -> None:
        thread, ns = self.thread(place[0]), NAMESPACES[place[1]]
        self._put(thread, ns, self.face.get_tuple(at(thread, ns)), changes)

    def do_fork(self, place: tuple[int, int], back: int, changes: list[Step]) -> None:
        thread, ns = self.thread(place[0]), NAMESPACES[place[1]]
        found = self.face.listed(at(thread, ns))
        if found:
            chosen = found[back % len(found)]
            self._put(thread, ns, self.face.read(at(thread, ns, id_of(chosen.config))), changes)

    def do_write(self, place: tuple[int, int], back: int, writes: list[Any], task: str, path: str) -> None:
        thread, ns = self.thread(place[0]), NAMESPACES[place[1]]
        found = self.face.listed(at(thread, ns))
        if found:
            config = found[back % len(found)].config
            for saver in (self.face, self.model):
                saver.put_writes(config, writes, task, path)

    def do_early(self, place: tuple[int, int], writes: list[Any], task: str) -> None:
        thread, ns = self.thread(place[0]), NAMESPACES[place[1]]
        id = self.early.setdefault((thread, ns), new_id())
        for saver in (self.face, self.model):
            saver.put_writes(at(thread, ns, id), writes, task)

    def do_delete(self, number: int) -> None:
        for saver in (self.face, self.model):
            saver.delete_thread(self.thread(number))

    def do_prune(self, number: int) -> None:
        thread = self.thread(number)
        self.face.prune([thread])
        for ns, stored in self.model.storage.get(thread, {}).items():
            for id in sorted(stored)[:-1]:
                del stored[id]
                self.model.writes.pop((thread, ns, id), None)

    def do_copy(self, number: int) -> None:
        """Copy a thread, delete it, and bring it back from its copy."""
        source, target = self.thread(number), f"{self.run}-copy-{self.copies}"
        self.copies += 1
        self.face.copy_thread(source, target)
        self._copy_in_model(source, target)
        self.compare(target)
        self.do_delete(number)
        self.compare(target)
        self.face.copy_thread(target, source)
        self._copy_in_model(target, source)
        self.compare(source)

    def _copy_in_model(self, source: str, target: str) -> None:
        model: Any = self.model
        model.storage[target] = copy.deepcopy(model.storage[source])
        for table in (model.writes, model.blobs):
            for key in [key for key in table if key[0] == source]:
                is_early = table is model.writes and key[2] not in model.storage[source].get(key[1], {})
                if not is_early:  # writes that still wait for their checkpoint are not the thread's yet
                    table[(target, *key[1:])] = table[key]

    def _put(self, thread: str, ns: str, parent: CheckpointTuple | None, changes: list[Step]) -> None:
        channels = {} if parent is None else copy.deepcopy(parent.checkpoint["channel_values"])
        versions = {} if parent is None else dict(parent.checkpoint["channel_versions"])
        moved: dict[str, Any] = {}
        for change in changes:
            edit(channels, change)
            if change[0] == "vanish":
                versions.pop(change[1], None)
                moved.pop(change[1], None)
            else:
                moved[change[1]] = versions[change[1]] = InMemorySaver.get_next_version(
                    self.model, max(map(str, versions.values()), default=None), None
                )
        fields = {"id": self.early.pop((thread, ns))} if (thread, ns) in self.early and parent is None else {}
        checkpoint = make_checkpoint(channels, versions, **fields)
        config = at(thread, ns) if parent is None else parent.config
        metadata = {"source": "loop", "step": len(channels), "parents": {}, "edits": [change[0] for change in changes]}
        for saver in (self.face, self.model):
            saver.put(copy.deepcopy(config), copy.deepcopy(checkpoint), dict(metadata), dict(moved))  # type: ignore[arg-type]

    # Comparison -----------------------------------------------------------------------------------------------

    def compare(self, thread: str) -> None:
        """Compare the lists of a thread, and the newest of each namespace."""
        for ns in NAMESPACES:
            where = at(thread, ns)
            ours, theirs = self.face.listed(where), list(self.model.list(where))
            assert [plain(item) for item in ours] == [plain(item) for item in theirs]
            newest, expected = self.face.get_tuple(where), self.model.get_tuple(where)
            assert (newest and plain(newest)) == (expected and plain(expected))
            if len(ours) > 1:
                before = ours[len(ours) // 2].config
                assert [id_of(item.config) for item in self.face.listed(where, before=before, limit=2)] == [
                    id_of(item.config) for item in self.model.list(where, before=before, limit=2)
                ]
                wanted = {"edits": ours[0].metadata["edits"]}  # type: ignore[typeddict-item]
                assert [id_of(item.config) for item in self.face.listed(where, filter=wanted)] == [
                    id_of(item.config) for item in self.model.list(where, filter=wanted)
                ]


def plain(item: CheckpointTuple) -> dict[str, Any]:
    """Return everything that both savers must answer alike."""
    return {
        "config": item.config,
        "checkpoint": item.checkpoint,
        "metadata": item.metadata,
        "parent": id_of(item.parent_config),
        "writes": item.pending_writes,
    }


def edit(channels: dict[str, Any], change: Step) -> None:
    """Change some values as nodes do."""
    kind, channel, *rest = change
    if kind in ("grow", "shrink", "splice") and not isinstance(channels.get(channel), list):
        channels[channel] = []
    if kind == "key" and not isinstance(channels.get(channel), dict):
        channels[channel] = {}
    actions: dict[str, Callable[[], None]] = {
        "grow": lambda: channels[channel].extend(rest[0]),
        "shrink": lambda: channels.update({channel: channels[channel][: rest[0]]}),
        "splice": lambda: channels[channel].__setitem__(slice(rest[0], rest[0] + 1), [rest[1]]),
        "key": lambda: channels[channel].update({rest[0]: rest[1]}),
        "set": lambda: channels.update({channel: rest[0]}),
        "empty": lambda: void(channels.pop(channel, None)),
        "vanish": lambda: void(channels.pop(channel, None)),
    }
    actions[kind]()


def void(_: object) -> None:
    return None


@pytest.fixture(scope="module", params=["memory", "sqlite", "dir"])
def saver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackstaySaver]:
    with opened(request.param, request, tmp_path_factory.mktemp("model")) as saver:
        yield saver


@given(program=st.lists(steps, min_size=1, max_size=12), verbs=st.sampled_from(("sync", "sync", "async")))
@settings(max_examples=4 * effort())
def test_random_programs_give_the_models_answers(saver: BackstaySaver, program: list[Step], verbs: str) -> None:
    with asyncio.Runner() as runner:
        pair = Pair(Face(saver, runner if verbs == "async" else None))
        for step in program:
            pair.apply(step)
            for number in range(THREADS):
                pair.compare(pair.thread(number))
    report = saver.store.thread(pair.thread(0)).check()
    assert report, str(report)
