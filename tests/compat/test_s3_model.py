"""The backend face against a model of its rules: any sequence of puts and deletes gives what a few lists give."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay.compat.backend import Checkpoint, CheckpointMetadata, StoreBackend
from backstay.errors import IdTaken
from support.running import effort

THREADS = st.sampled_from(["t", "u"])
NAMES = st.sampled_from(["main", "a", "b", "c", "d", "e", "f"])  # "main" is also the name of a branch
STEPS = st.integers(0, 5)
PUTS = st.tuples(st.just("put"), THREADS, NAMES, STEPS, st.none() | NAMES | st.just("elsewhere"), st.integers(0, 2))
DELETES = st.tuples(st.just("delete_before"), THREADS, STEPS) | st.tuples(st.just("delete_thread"), THREADS)


@dataclass
class Model:
    """Threads as lists, oldest first, each entry with the branch it is on."""

    threads: dict[str, list[tuple[int, Checkpoint]]] = field(default_factory=dict)
    branches: int = 0

    def find(self, name: str) -> tuple[str, int] | None:
        for thread, entries in self.threads.items():
            for index, (_, each) in enumerate(entries):
                if each.metadata.checkpoint_id == name:
                    return thread, index
        return None

    def put(self, made: Checkpoint) -> bool:
        thread, parent = made.metadata.thread_id, made.metadata.parent_checkpoint_id
        place = self.find(made.metadata.checkpoint_id)
        if place is not None:
            if place[0] != thread:
                return False
            branch, old = self.threads[thread][place[1]]
            made.metadata.parent_checkpoint_id = parent or old.metadata.parent_checkpoint_id
            self.threads[thread][place[1]] = (branch, made)
            return True
        entries = self.threads.setdefault(thread, [])
        newest = entries[-1][1].metadata.checkpoint_id if entries else None
        made.metadata.parent_checkpoint_id = parent or newest
        if newest is None or (parent not in (None, newest) and self.find(str(parent)) is not None):
            self.branches += 1
            entries.append((self.branches, made))
        else:
            entries.append((entries[-1][0], made))
        return True

    def delete_before(self, thread: str, step: int) -> int:
        entries = self.threads.get(thread, [])
        heads = {branch: each.metadata.checkpoint_id for branch, each in entries}
        left = [
            (branch, each)
            for branch, each in entries
            if each.metadata.step >= step or heads[branch] == each.metadata.checkpoint_id
        ]
        self.threads[thread] = left
        return len(entries) - len(left)

    def delete_thread(self, thread: str) -> int:
        return len(self.threads.pop(thread, []))


def checkpoint(thread: Any, name: Any, step: Any, parent: Any, version: Any) -> Checkpoint:
    metadata = CheckpointMetadata(thread, name, step, parent, created_at="2026-01-31T12:00:00+00:00")
    return Checkpoint(metadata, [{"n": version}] * 3, {"version": version}, {}, str(version))


async def follow(place: str, operations: list[tuple[object, ...]]) -> None:
    model = Model()
    async with StoreBackend(place) as backend:
        for operation in operations:
            if operation[0] == "put":
                made = checkpoint(*operation[1:])
                name = made.metadata.checkpoint_id
                stored = model.put(deepcopy(made))
                if stored:
                    assert await backend.put(made) == name
                else:
                    with pytest.raises(IdTaken):
                        await backend.put(made)
            else:
                verb, *arguments = operation
                assert await getattr(backend, str(verb))(*arguments) == getattr(model, str(verb))(*arguments)
            await compare(backend, model)
        report = await (await backend._opened.store()).check()
        assert report, str(report)


async def compare(backend: StoreBackend, model: Model) -> None:
    for thread in ("t", "u"):
        expected = [each for _, each in reversed(model.threads.get(thread, []))]
        assert await backend.list_checkpoints(thread) == [each.metadata for each in expected]
        assert await backend.get_latest(thread) == (expected[0] if expected else None)
        for each in expected:
            assert await backend.get(each.metadata.checkpoint_id) == each


@settings(max_examples=4 * effort())
@given(st.lists(PUTS | DELETES, max_size=14))
def test_any_sequence_of_calls_follows_the_rules_in_memory(operations: list[tuple[object, ...]]) -> None:
    asyncio.run(follow("memory:", operations))


@settings(max_examples=max(2, effort() // 2))
@given(st.lists(PUTS | DELETES, min_size=6, max_size=14))
def test_any_sequence_of_calls_follows_the_rules_in_a_file(operations: list[tuple[object, ...]]) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(follow(str(Path(folder) / "store.db"), operations))
