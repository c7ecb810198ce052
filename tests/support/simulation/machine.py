"""A machine that plays the same random program on several stores at once and on the model, and compares all answers.

Every answer must agree: values and types of errors, digests included, between the stores and with the model. A store's
author subclasses ``StoreMachine`` and overrides ``open_backends``; Hypothesis shows the shortest failing program.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backstay.errors import BackstayError, Conflict, IdTaken, InvalidInput, NotFound
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.operations.cursor import Services
from backstay.operations.retention import Keep
from backstay.store.base import Backend
from backstay.store.directory.store import DirectoryStore
from backstay.store.memory import MemoryStore
from backstay.store.sqlite.store import SqliteStore
from backstay.thread.store import Store
from backstay.thread.thread import Thread
from support.running import RAM_FOLDER
from support.simulation.model import Branch, Model, Place, Point
from support.simulation.programs import EDITS, ITEMS, KEEPS, KEYS, PICK, VALUES, edited, longer_by
from support.strategies import same

START = datetime(2026, 1, 1, tzinfo=UTC)
THREADS = ("a", "b")
BRANCHES = ("main", "x")


@dataclass
class Handle:
    """One handle on each store, what it has seen of its branch, and its user's working copy of the state."""

    branch: Branch
    threads: list[Thread]
    seen: Place | None = None
    basis: dict[str, Any] = field(default_factory=dict)  # the state of what it has seen
    live: dict[str, Any] = field(default_factory=dict)
    frozen: bool = True  # whether its user may still promise that saved items were not changed


@dataclass
class Walk:
    """A list that is read page by page while the store changes."""

    thread: str
    left: list[Point]  # what existed when the walk began and was not seen yet
    before: int


def view(meta: CheckpointMeta) -> tuple[object, ...]:
    """Return what must be the same in every store."""
    return (
        meta.id,
        meta.thread_id,
        meta.branch,
        meta.seq,
        meta.step,
        meta.parent_id,
        meta.trigger,
        meta.tags,
        meta.created_at,
        meta.digest,
        meta.size,
    )


def agree(left: Any, right: Any) -> bool:
    """Tell whether two stores gave the same answer."""
    if isinstance(left, Checkpoint) and isinstance(right, Checkpoint):
        return view(left) == view(right) and same(left.state, right.state)
    if isinstance(left, CheckpointMeta) and isinstance(right, CheckpointMeta):
        return view(left) == view(right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(agree, left, right))
    if isinstance(left, BackstayError):
        return type(left) is type(right)
    return bool(left == right)


class StoreMachine(RuleBasedStateMachine):
    """The program's steps. ``pick`` numbers choose among whatever there is at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None))
        self.model = Model()
        self.ids = [0] * 9
        self.ticks = 0
        self.now = START
        self.backends = self.open_backends()
        self.stores = self.open_stores()
        self.handles: list[Handle] = []
        self.walks: list[Walk] = []

    def open_backends(self) -> list[Backend]:
        """Return the stores to compare, open; called again to reopen those that keep what they have."""
        memory = self.backends[0] if hasattr(self, "backends") else MemoryStore()
        return [memory, SqliteStore(str(self.folder / "agent.db")), DirectoryStore(f"dir:{self.folder}/logs")]

    def open_stores(self) -> list[Store]:
        """Wrap the stores for use, with one clock for all and ids that are the same in each."""
        return [
            Store(backend, Services("", lambda: self.now, partial(self.new_id, number)))
            for number, backend in enumerate(self.backends)
        ]

    def new_id(self, store: int) -> str:
        """Return the next id of a store: the same in each as long as they do the same."""
        self.ids[store] += 1
        return f"made-{self.ids[store]}"

    # Asking all stores --------------------------------------------------------------------------------------------

    def each(self, ask: Callable[[int], Any]) -> Any:
        """Ask every store, demand that they agree, and return the answer; an error of ours is an answer."""
        self.ticks += 1
        # The clock jumps about: nothing but a stamp may depend on it.
        self.now = START + timedelta(hours=self.ticks * 31 % 97, microseconds=self.ticks)
        answers = []
        for number in range(len(self.stores)):
            try:
                answers.append(ask(number))
            except BackstayError as error:
                answers.append(error)
        for other in answers[1:]:
            assert agree(answers[0], other), f"the stores differ: {answers}"
        return answers[0]

    def listed(self, thread: str, n: int) -> list[CheckpointMeta]:
        """Return all of a thread's checkpoints in one of the stores."""
        return list(self.stores[n].thread(thread).history(branch="*"))

    def loaded(self, name: str, n: int) -> Checkpoint | None:
        """Return a checkpoint of one of the stores."""
        return self.stores[n].get(name)

    def handle(self, pick: int) -> Handle:
        """Return one of the handles, or a new one on some branch."""
        if pick % 4 == 0 or not self.handles:
            branch = (THREADS[pick // 4 % 2], BRANCHES[pick // 8 % 2])
            self.handles.append(Handle(branch, [store.thread(branch[0], branch=branch[1]) for store in self.stores]))
            return self.handles[-1]
        return self.handles[pick % len(self.handles)]

    def point_id(self, pick: int, thread: str | None = None) -> str:
        """Return the id of some checkpoint, mostly of this thread, seldom of one that is not there."""
        names = [p.id for p in self.model.points.values() if pick % 7 == 0 or thread in (None, p.branch[0])]
        return names[pick % len(names)] if names and pick % 10 else "no such id"

    def fits(self, handle: Handle) -> bool:
        """Tell whether a save through this handle must succeed."""
        return handle.seen is None or handle.seen == self.model.place(handle.branch)

    def assert_shows(self, answer: Any, point: Point | None) -> None:
        """Demand that a loaded checkpoint is the model's."""
        if point is None:
            assert answer is None
            return
        assert isinstance(answer, Checkpoint), answer
        assert view(answer)[:9] == point.view()
        assert same(answer.state, point.state)

    def saved(self, handle: Handle, answer: Any, state: dict[str, Any], step: int | None = None) -> Point:
        """Take a save that must have succeeded into the model, and compare what was returned."""
        assert isinstance(answer, CheckpointMeta), f"refused: {answer!r}"
        head = self.model.head(handle.branch)
        number = step or (head.step + 1 if head else 1)
        point = self.model.add(answer.id, handle.branch, number, head.id if head else None, state, self.now)
        self.follow(handle, point.state)
        return point

    def follow(self, handle: Handle, state: dict[str, Any]) -> None:
        """Note that a handle has seen its branch as it is now."""
        handle.seen = self.model.place(handle.branch)
        handle.basis = state

    # Saving -------------------------------------------------------------------------------------------------------

    @initialize(edits=st.lists(EDITS, min_size=1, max_size=6))
    def begin(self, edits: list[Any]) -> None:
        """Begin with some history."""
        for edit in edits:
            self.save(1, edit, True, False)

    @rule(pick=PICK, edits=EDITS, frozen=st.booleans(), named=st.booleans())
    def save(self, pick: int, edits: Any, frozen: bool, named: bool) -> None:
        """Save a whole state: as it is, edited, grown, shrunk, reordered, changed in place."""
        handle = self.handle(pick)
        state = edited(handle.live, edits)
        frozen = frozen and handle.frozen and all(kind != "in place" for kind, *_ in edits)
        name = f"named-{self.ticks}" if named else None
        fits = self.fits(handle)
        answer = self.each(lambda n: handle.threads[n].save(state, id=name, frozen=frozen))
        handle.live = state
        if not fits:
            assert type(answer) is Conflict
            handle.frozen = False
            return
        handle.frozen = handle.frozen or not frozen
        point = self.saved(handle, answer, state)
        assert view(answer)[:9] == point.view()

    @rule(pick=PICK, edits=st.lists(EDITS, min_size=2, max_size=5))
    def save_several(self, pick: int, edits: list[Any]) -> None:
        """Save one state after the other."""
        for edit in edits:
            self.save(pick | 1, edit, True, False)

    @rule(pick=PICK, which=PICK, edits=EDITS)
    def save_on(self, pick: int, which: int, edits: Any) -> None:
        """Save on a checkpoint that must be the newest."""
        handle = self.handle(pick)
        place = self.model.place(handle.branch)
        on = self.point_id(which) if which % 2 or place.head is None else place.head
        state = edited(handle.live, edits)
        frozen = handle.frozen and all(kind != "in place" for kind, *_ in edits)
        answer = self.each(lambda n: handle.threads[n].save(state, on=on, frozen=frozen))
        handle.live = state
        if on != place.head:
            assert type(answer) is Conflict
            handle.frozen = False
        else:
            handle.frozen = handle.frozen or not frozen
            self.saved(handle, answer, state)

    @rule(pick=PICK, key=st.sampled_from(KEYS), items=ITEMS, value=VALUES, drop=st.sampled_from(KEYS))
    def append(self, pick: int, key: str, items: list[Any], value: Any, drop: str) -> None:
        """Save a known change: extend one key, set another, remove a third."""
        handle = self.handle(pick)
        head = self.model.head(handle.branch)
        state = deepcopy(handle.basis if handle.seen else head.state if head else {})
        extend = {key: longer_by(state[key], items)} if type(state.get(key)) in (list, str, bytes) else {}
        gone = [drop] if drop in state and drop not in extend else []
        put = {"set": value}
        for name in gone:
            del state[name]
        state.update(put)
        state.update({name: state[name] + more for name, more in extend.items()})
        fits = self.fits(handle)
        answer = self.each(lambda n: handle.threads[n].append(extend, set=put, delete=gone))
        if not fits:
            assert type(answer) is Conflict
            return
        self.saved(handle, answer, state)
        handle.live, handle.frozen = state, True

    @rule(pick=PICK, which=PICK, other=st.booleans())
    def save_again(self, pick: int, which: int, other: bool) -> None:
        """Save under an id that exists: the same content gives the first result, any other is refused."""
        handle, point = self.handle(pick), self.model.points.get(self.point_id(which))
        if point is None:
            return
        state = {**deepcopy(point.state), **({"other": 1} if other else {})}
        alike = not other and point.trigger == "manual" and point.branch == handle.branch
        answer = self.each(lambda n: handle.threads[n].save(state, id=point.id))
        if not alike:
            assert type(answer) is IdTaken
            return
        self.assert_shows(answer, point)
        if self.model.place(handle.branch).head == point.id:
            self.follow(handle, point.state)

    @rule(pick=PICK, edits=EDITS)
    def replace_newest(self, pick: int, edits: Any) -> None:
        """Store the newest checkpoint anew under its own id."""
        handle = self.handle(pick)
        head = self.model.head(handle.branch)
        if head is None:
            return
        state = edited(deepcopy(head.state) if handle.seen is None else handle.live, edits)
        fits = self.fits(handle)
        answer = self.each(lambda n: handle.threads[n].save(state, id=head.id, replace=True))
        handle.live, handle.frozen = state, fits
        if not fits and isinstance(answer, Checkpoint):  # for all the handle knows, its own earlier attempt
            assert handle.seen is not None
            assert (handle.seen.head, head.trigger) == (head.id, "manual")
            assert same(state, head.state)
            self.assert_shows(answer, head)
            self.follow(handle, head.state)
            return
        if not fits:
            assert type(answer) in (Conflict, IdTaken)
            return
        del self.model.points[self.model.lines[handle.branch].ids.pop()]
        point = self.saved(handle, answer, state, step=head.step)
        point.parent = head.parent if head.parent in self.model.points else None

    # Loading ------------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def latest(self, pick: int) -> None:
        """Load the newest and go on from there."""
        handle = self.handle(pick)
        answer = self.each(lambda n: handle.threads[n].latest())
        head = self.model.head(handle.branch)
        self.assert_shows(answer, head)
        handle.live = {} if answer is None else answer.state
        self.follow(handle, head.state if head else {})

    @rule(pick=PICK, step=st.integers(0, 12))
    def at(self, pick: int, step: int) -> None:
        """Load by step."""
        handle = self.handle(pick)
        self.assert_shows(self.each(lambda n: handle.threads[n].at(step)), self.model.at(handle.branch, step))

    @rule(pick=PICK, which=PICK)
    def get(self, pick: int, which: int) -> None:
        """Load by id, through the store and through a thread."""
        handle, name = self.handle(pick), self.point_id(which)
        point = self.model.points.get(name)
        mine = point if point and point.branch[0] == handle.branch[0] else None
        self.assert_shows(self.each(lambda n: self.stores[n].get(name)), point)
        self.assert_shows(self.each(lambda n: handle.threads[n].get(name)), mine)

    @rule(pick=PICK, limit=st.integers(0, 5), before=st.one_of(st.none(), st.integers(0, 20)), every=st.booleans())
    def history(self, pick: int, limit: int, before: int | None, every: bool) -> None:
        """List part of a history."""
        handle = self.handle(pick)
        listed = self.each(
            lambda n: list(handle.threads[n].history(limit=limit, before=before, branch="*" if every else None))
        )
        points = self.model.newest_first(handle.branch[0], None if every else handle.branch[1])
        wanted = [point for point in points if before is None or point.seq < before][:limit]
        assert [view(meta)[:9] for meta in listed] == [point.view() for point in wanted]

    @rule(pick=PICK, size=st.integers(1, 3))
    def walk(self, pick: int, size: int) -> None:
        """Read the next page of a list that was begun earlier, or begin one."""
        if pick % 3 == 0 or not self.walks:
            points = self.model.newest_first(THREADS[pick % 2])
            self.walks.append(Walk(THREADS[pick % 2], points, points[0].seq + 1 if points else 0))
        walk = self.walks[pick % len(self.walks)]
        page = self.each(
            lambda n: list(self.stores[n].thread(walk.thread).history(limit=size, before=walk.before, branch="*"))
        )
        still_there = [point for point in walk.left if self.model.points.get(point.id) is point]
        assert [meta.id for meta in page] == [point.id for point in still_there[:size]]
        walk.left = still_there[len(page) :]
        if page:
            walk.before = page[-1].seq

    # Branching ----------------------------------------------------------------------------------------------------

    @rule(pick=PICK, which=PICK, thread=st.sampled_from((None, *THREADS)), branch=st.sampled_from(BRANCHES), value=PICK)
    def fork(self, pick: int, which: int, thread: str | None, branch: str, value: int) -> None:
        """Begin a branch, here or in another thread, with or without a change."""
        handle, name = self.handle(pick), self.point_id(which)
        put = {"n": value} if value % 2 else {}
        forks: list[Thread] = []

        def ask(n: int) -> Any:
            forks.append(handle.threads[n].fork(name, branch=branch, to=thread, set=put))
            return forks[-1].branch

        answer = self.each(ask)
        source, target = self.model.points.get(name), (thread or handle.branch[0], branch)
        if source is None or target in self.model.lines:
            assert type(answer) is (NotFound if source is None else Conflict)
            return
        assert answer == branch
        forked = Handle(target, forks)
        point = self.model.add(
            f"made-{self.ids[0]}", target, source.step, name, {**deepcopy(source.state), **put}, self.now
        )
        point.trigger = "fork"
        self.model.lines[target].origin = name
        self.follow(forked, point.state)
        self.handles.append(forked)

    @rule(pick=PICK, which=PICK)
    def rewind(self, pick: int, which: int) -> None:
        """Go back to an earlier checkpoint."""
        handle = self.handle(pick)
        name = self.point_id(which, handle.branch[0])
        source = self.model.points.get(name)
        fits, is_new = self.fits(handle), handle.branch not in self.model.lines
        answer = self.each(lambda n: handle.threads[n].rewind(name))
        mine = source is not None and source.branch[0] == handle.branch[0]
        if source is None or not mine or not fits:
            assert type(answer) is (NotFound if source is None else Conflict if mine else InvalidInput)
            return
        point = self.saved(handle, answer, source.state)
        point.parent, point.trigger = name, "rewind"
        if is_new:
            self.model.lines[handle.branch].origin = name

    # Tags and deletes ---------------------------------------------------------------------------------------------

    @rule(pick=PICK, which=PICK, names=st.sets(st.sampled_from("pqr")), add=st.booleans())
    def tag(self, pick: int, which: int, names: set[str], add: bool) -> None:
        """Add or remove tags."""
        handle, name = self.handle(pick), self.point_id(which)
        point = self.model.points.get(name)
        answer = self.each(lambda n: (handle.threads[n].tag if add else handle.threads[n].untag)(name, *sorted(names)))
        if point is None:
            assert type(answer) is NotFound
            return
        point.tags = point.tags | names if add else point.tags - names
        assert answer == tuple(sorted(point.tags))

    @rule(pick=PICK, which=PICK)
    def delete(self, pick: int, which: int) -> None:
        """Delete one checkpoint."""
        handle = self.handle(pick)
        name = self.point_id(which, handle.branch[0])
        point = self.model.points.get(name)
        mine = point is not None and point.branch[0] == handle.branch[0]
        assert self.each(lambda n: handle.threads[n].delete_checkpoint(name)) == self.model.remove(
            [name] if mine else []
        )

    @rule(pick=PICK, step=st.integers(0, 12))
    def delete_before(self, pick: int, step: int) -> None:
        """Delete what is older than a step."""
        handle = self.handle(pick)
        points = self.model.newest_first(*handle.branch)
        going = [point.id for point in points[1:] if point.step < step]
        assert self.each(lambda n: handle.threads[n].delete_before(step)) == len(going)
        self.model.remove(going)

    @rule(pick=PICK, keep=KEEPS, dry=st.booleans())
    def prune(self, pick: int, keep: Keep, dry: bool) -> None:
        """Delete by rule, in one thread or in all."""
        handle = self.handle(pick) if pick % 2 else None

        def ask(n: int) -> Any:
            done = (handle.threads[n] if handle else self.stores[n]).prune(keep, dry_run=dry)
            return done.deleted, done.kept, list(done.checkpoints)

        answer = self.each(ask)
        going = self.model.doomed(thread := handle.branch[0] if handle else None, keep, self.now)
        inside = [point for point in self.model.points.values() if thread in (None, point.branch[0])]
        assert answer == (len(going), len(inside) - len(going), going)
        if not dry:
            self.model.remove(going)

    @rule(thread=st.sampled_from(THREADS), sure=PICK)
    def delete_thread(self, thread: str, sure: int) -> None:
        """Delete a thread, now and then."""
        if sure % 3:
            return
        self.walks = [walk for walk in self.walks if walk.thread != thread]
        removed = self.each(lambda n: self.stores[n].thread(thread).delete().checkpoints)
        assert removed == self.model.remove_thread(thread)

    # Upkeep -------------------------------------------------------------------------------------------------------

    @rule()
    def compact(self) -> None:
        """Make the stores small; nothing may change."""
        for store in self.stores:
            assert store.compact() >= 0

    @rule()
    def reopen(self) -> None:
        """Close and open again: whatever was stored is there, and no handle remembers anything."""
        for backend in self.backends[1:]:
            backend.close()
        self.backends = self.open_backends()
        self.stores = self.open_stores()
        self.handles = []

    @precondition(lambda self: bool(self.model.points))
    @invariant()
    def lists_and_heads_agree(self) -> None:
        """After each step every list is the model's, and so is a head that a new handle loads."""
        threads = self.each(lambda n: [meta.id for meta in self.stores[n].threads()])
        assert threads == self.model.threads()
        for thread in THREADS:
            listed = self.each(partial(self.listed, thread))
            assert [view(m)[:9] for m in listed] == [p.view() for p in self.model.newest_first(thread)]
        branch = list(self.model.lines)[self.ticks % len(self.model.lines)]
        fresh = self.each(lambda n: self.stores[n].thread(branch[0], branch=branch[1]).latest())
        self.assert_shows(fresh, self.model.head(branch))

    def teardown(self) -> None:
        """At the end every checkpoint loads equal and nothing is damaged."""
        try:
            for name, point in self.model.points.items():
                self.assert_shows(self.each(partial(self.loaded, name)), point)
            for store in self.stores:
                assert store.check(), str(store.check())
        finally:
            for store in self.stores:
                store.close()
            shutil.rmtree(self.folder)
