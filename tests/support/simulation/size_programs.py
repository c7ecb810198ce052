"""Random programs whose values cross every size at which storage changes its ways, played on one store and a model.

A program is a list of operations, each with a seed of its own: what it does exactly is drawn from that seed and from
what is there at that moment, so any operation can be left out, and ``shortest`` does so with a program that fails. The
model keeps every state in full, shared between checkpoints as the program made them.

After each operation that removes or moves bytes every remaining checkpoint of every branch is loaded and compared, and
the store is looked into: no row may be left of which no checkpoint needs a byte. At the end everything is deleted, and
then there must be nothing at all.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from backstay.bundle import export_bundle, import_bundle
from backstay.errors import Conflict
from backstay.model.checkpoint import Checkpoint, Write
from backstay.operations.retention import Keep
from backstay.pieces.manifest import JOURNAL, Entries, Range, decode_base, decode_manifest, piece_length
from backstay.store.base import PAGE_ROWS_MAX, Query
from backstay.store.directory import logs
from backstay.store.directory.control import RING_ENTRIES
from backstay.store.leases import BranchKey
from backstay.store.postgres import checkpoints as postgres_merge
from backstay.thread.access import access_of
from backstay.thread.store import Store, make_services
from backstay.thread.store import open as open_store
from backstay.thread.thread import Thread
from support.running import RAM_FOLDER
from support.simulation.size_stores import MemoryPlace, Place
from support.simulation.size_words import (
    KEY_COUNTS,
    LARGE_BYTES_MAX,
    LIST_COUNTS,
    PIECES,
    USUAL_BYTES_MAX,
    WINDOWS,
    WRITE_BORDERS,
    around,
    lowered,
    size_of,
    some_item,
    some_size,
    some_text,
    some_value,
)

THREADS = ("a", "b", "c")
BRANCHES = ("main", "x", "y")
GROWING = ("log", "log", "text", "raw")
KEYS = ("log", "text", "raw", "tree")
SHARED_SEEDS = 3
"""So few different contents of a size are put whole that several threads have the same."""

SAVES_AT_ONCE = 90
POINTS_MAX = 150
BRANCH_COUNTS = (logs.WRITERS_MAX + 1, logs.READERS_MAX + 1)
MERGED = postgres_merge.WINDOW_BYTES

Branch = tuple[str, str]
State = dict[str, Any]


class Op(NamedTuple):
    """One operation: what, and the seed of everything it chooses."""

    kind: str
    seed: int


@dataclass
class Point:
    """A checkpoint as it must be."""

    branch: Branch
    state: State
    tags: set[str] = field(default_factory=set)
    writes: dict[tuple[str, int], Any] = field(default_factory=dict)


# Programs ---------------------------------------------------------------------------------------------------------

SAVING = {
    "grow": 10,
    "slide": 6,
    "cut": 5,
    "edit": 4,
    "scatter": 3,
    "put": 4,
    "small_keys": 2,
    "move_key": 2,
    "drop_key": 1,
    "fork": 4,
    "tag": 1,
    "write": 1,
    "many_saves": 0.1,
    "many_branches": 0.1,
}
REMOVING = {
    "prune": 8,
    "prune_store": 3,
    "delete": 6,
    "delete_before": 2,
    "replace": 4,
    "rewind": 3,
    "delete_thread": 2,
    "compact": 4,
    "reopen": 2,
    "take_out": 2,
    "repair": 1,
    "spoil": 1,
    "move_store": 1,
    "copy_store": 1,
    "undo": 0,
}
PHRASES = {"agent": ("grow", "slide", "prune"), "editor": ("grow", "cut", "prune", "compact")}
"""What is often done in this order: a conversation grows, its beginning is dropped, its history goes."""

STARTS = {
    6: ("grow", "slide", "take_out"),
    12: ("grow", "undo", "grow", "reopen"),
    13: ("small_keys", "small_keys", "prune", "small_keys"),
    14: ("grow", "move_store", "grow", "grow", "reopen"),
}
"""What is rarely met by chance: how some programs begin."""

KINDS = {**SAVING, **REMOVING, "agent": 4, "editor": 6}


def program(seed: int) -> list[Op]:
    """Return a program: it begins with something that grows."""
    chance = Random(seed)
    drawn = chance.choices(list(KINDS), list(KINDS.values()), k=chance.randint(5, 16))
    begun = STARTS.get(seed % 16, ("grow",))
    kinds = [kind for each in (*begun, *drawn) for kind in PHRASES.get(each, (each,))]
    return [Op(kind, chance.getrandbits(32)) for kind in kinds]


def shortest(place: Place, seed: int, tries: int = 150) -> Wrong | None:
    """Leave out of a failing program what it fails without: parts, then single operations. Return how it fails then."""
    found: Wrong | None = None

    def fails(ops: Sequence[Op]) -> bool:
        nonlocal found
        try:
            play(place, seed, Counter(), ops)
        except Wrong as wrong:
            if found is None or type(wrong.__cause__) is type(found.__cause__):
                found = wrong
                return True
        return False

    best = program(seed)
    if not fails(best):
        return None
    size = max(1, len(best) // 2)
    while True:
        at = 0
        while at < len(best) and tries > 0:
            shorter = best[:at] + best[at + size :]
            tries -= 1
            if shorter and fails(shorter):
                best = shorter
            else:
                at += size
        if size == 1 or tries <= 0:
            return found
        size //= 2


class Wrong(AssertionError):
    """A store gave another answer than the model. ``story`` is what was done until then."""

    def __init__(self, what: str, story: Sequence[str]) -> None:
        super().__init__("\n  ".join([what, *story]))
        self.story = story


def play(place: Place, seed: int, counts: Counter[str], ops: Sequence[Op] | None = None) -> None:
    """Play the program of a seed, or what is left of it, on an empty store; raise Wrong if an answer is wrong.

    One in twenty has values of some megabytes, one in ten has borders that are far away brought near.
    """
    with lowered() if seed % 10 == 5 else nullcontext():
        _play(place, program(seed) if ops is None else ops, counts, seed % 20 == 19)


def _play(place: Place, ops: Sequence[Op], counts: Counter[str], large: bool) -> None:
    place.empty()
    game = Game(place, counts, LARGE_BYTES_MAX if large else USUAL_BYTES_MAX)
    try:
        for op in ops:
            game.do(op)
        game.finish()
    except Exception as error:
        raise Wrong(f"{place.name}: {type(error).__name__}: {str(error)[:500]}", game.story) from error
    finally:
        game.close()
    counts["programs"] += 1


# Playing ----------------------------------------------------------------------------------------------------------


class Game:
    """A program under way: the store, its model, and a handle on each branch that is kept as long as it is good."""

    def __init__(self, place: Place, counts: Counter[str], bytes_max: int) -> None:
        self.place = place
        self.counts = counts
        self.bytes_max = bytes_max
        self.points: dict[str, Point] = {}
        self.lines: dict[Branch, list[str]] = {}
        self.handles: dict[Branch, Thread] = {}
        self.story: list[str] = []
        self.store = self.opened()
        self.reader = self.opened()

    def opened(self) -> Store:
        return Store(self.place.open(), make_services("", None))

    def close(self) -> None:
        self.store.close()
        self.reader.close()

    def do(self, op: Op) -> None:
        self.story.append(str(op))
        getattr(self, op.kind)(Random(op.seed))
        self.counts["operations"] += 1
        if op.kind in REMOVING:
            self.counts["removals"] += 1
            self.compare(op.seed % 4)

    def say(self, *what: object) -> None:
        self.story.append("    " + " ".join(map(str, what)))

    # The model ----------------------------------------------------------------------------------------------------

    def head(self, branch: Branch) -> State:
        line = self.lines.get(branch)
        return self.points[line[-1]].state if line else {}

    def some_branch(self, chance: Random) -> Branch:
        """Return a branch that is there, mostly; else a new one."""
        if self.lines and chance.random() < 0.85:
            return chance.choice(list(self.lines))
        return chance.choice(THREADS), chance.choice(BRANCHES)

    def some_key(self, chance: Random, branch: Branch, keys: Sequence[str] = GROWING) -> str | None:
        """Return a key of the branch's newest state that has something in it."""
        there = [key for key in keys if self.head(branch).get(key)]
        return chance.choice(there) if there else None

    def some_point(self, chance: Random) -> str | None:
        return chance.choice(list(self.points)) if self.points else None

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.lines[self.points.pop(name).branch].remove(name)
        self.lines = {branch: line for branch, line in self.lines.items() if line}
        self.counts["checkpoints deleted"] += len(names)

    # Saving -------------------------------------------------------------------------------------------------------

    def handle(self, branch: Branch) -> Thread:
        if branch not in self.handles:
            self.handles[branch] = self.store.thread(branch[0], branch=branch[1])
        return self.handles[branch]

    def saved(self, branch: Branch, state: State, save: Callable[[Thread], Checkpoint]) -> None:
        """Save through the branch's handle, or through a new one if that is out of date."""
        try:
            name = save(self.handle(branch)).id
        except Conflict:
            del self.handles[branch]
            self.handle(branch).latest()
            name = save(self.handle(branch)).id
        self.counts["saves"] += 1
        self.points[name] = Point(branch, state)
        self.lines.setdefault(branch, []).append(name)

    def save(self, branch: Branch, state: State, frozen: bool = False) -> None:
        self.saved(branch, state, lambda thread: thread.save(state, frozen=frozen))

    def append(self, branch: Branch, key: str, more: Any) -> None:
        old = self.head(branch)
        state = {**old, key: old[key] + more if key in old else more}
        self.saved(branch, state, lambda thread: thread.append({key: more}))

    def stream_end(self, branch: Branch, key: str) -> int:
        """Return where the stream ends that a key's next bytes go to; the value's size if it has none yet."""
        head = access_of(self.store).store.head(BranchKey("", branch[0], "", branch[1]))
        if head is None or head.row is None:
            return 0
        entry = self.entries(head.row.id).get(key)
        for piece in reversed(entry.pieces or () if entry else ()):
            if isinstance(piece, Range) and isinstance(piece.source, int) and piece.source in head.owned:
                return head.owned[piece.source]
        return entry.size if entry else 0

    def grow(self, chance: Random) -> None:
        """Append in small steps until the stream ends one byte before, at, or behind a border."""
        branch, key = self.some_branch(chance), chance.choice(GROWING)
        if size_of(self.head(branch)) > self.bytes_max or len(self.points) > POINTS_MAX:
            branch = (chance.choice(THREADS), f"new {chance.randrange(9)}")
        window = self.some_window(chance)
        end = self.stream_end(branch, key)
        target = (end // window + 1) * window + chance.choice((-1, 0, 1, 40, window // 3))
        step = max(some_size(chance, 20_000), (target - end) // (SAVES_AT_ONCE if chance.random() < 0.1 else 25))
        how = chance.choice(("append", "append", "save", "frozen"))
        self.say(how, "to", key, "of", branch, "from", end, "to", target, "by", step)
        while end < target:
            size = step if target - end >= step + 40 else target - end
            more = [some_item(chance, size)] if key == "log" else some_value(chance, key, size)
            if how == "append":
                self.append(branch, key, more)
            else:
                old = self.head(branch)
                self.save(branch, {**old, key: old.get(key, type(more)()) + more}, how == "frozen")
            now = self.stream_end(branch, key) if target - end < 3 * step else end + size
            end = now if now > end else end + size

    def some_window(self, chance: Random) -> int:
        """Return a border to grow to: every other time the smallest at which rows are merged."""
        return MERGED if chance.random() < 0.5 else chance.choice([size for size in WINDOWS if size <= self.bytes_max])

    def slide(self, chance: Random) -> None:
        """Keep the last part of a list, a text or bytes; mostly add something, as an agent does."""
        branch = self.some_branch(chance)
        if (key := self.some_key(chance, branch)) is None:
            return
        old = self.head(branch)[key]
        first = chance.randrange(len(old)) if type(old) is list else self.cut_at(chance, branch, key)
        more = some_value(chance, key, some_size(chance, 6_000)) if chance.random() < 0.6 else type(old)()
        self.say("keep", key, "of", branch, "from", first, "of", len(old), "on, and", len(more), "new")
        self.save(branch, {**self.head(branch), key: old[first:] + more})

    def cut_at(self, chance: Random, branch: Branch, key: str) -> int:
        """Return a place in a text or bytes: one byte before, at or behind where a stored row or a window ends."""
        size = len(self.head(branch)[key])
        ends = self.row_ends(branch, key)
        if chance.random() < 0.2 or not ends:
            ends = [end for end in WINDOWS if end < size] or [size // 2]
        return min(size - 1, max(0, chance.choice(ends) + chance.choice((-1, 0, 1))))

    def row_ends(self, branch: Branch, key: str) -> list[int]:
        """Return the places in the newest value of a key at which one stored row ends and another begins."""
        entry = self.entries(self.lines[branch][-1]).get(key)
        rows = self.place.look(access_of(self.store).store).rows
        ends, at = set(), 0
        for piece in (entry.pieces or ()) if entry else ():
            if isinstance(piece, Range):
                starts = [start - piece.start for _, stream, start, _ in rows if stream == piece.source]
                ends |= {at + start for start in starts if 0 < start < piece.length}
            at += piece_length(piece)
        return sorted(ends)

    def cut(self, chance: Random) -> None:
        """Take the beginning, the end, or a part of the middle out of a value."""
        branch = self.some_branch(chance)
        if (key := self.some_key(chance, branch)) is None:
            return
        old = self.head(branch)[key]
        if type(old) is list:
            first, last = sorted((chance.randrange(len(old) + 1), chance.randrange(len(old) + 1)))
        else:
            first, last = sorted((self.cut_at(chance, branch, key), self.cut_at(chance, branch, key)))
        first, last = chance.choice(((0, first), (first, last), (last, len(old))))
        self.say("take", first, "to", last, "out of", len(old), "of", key, "of", branch)
        self.save(branch, {**self.head(branch), key: old[:first] + old[last:]})

    def edit(self, chance: Random) -> None:
        """Put something else into the middle of a value."""
        branch = self.some_branch(chance)
        if (key := self.some_key(chance, branch, KEYS)) is None:
            return
        state = self.head(branch)
        more = some_value(chance, "log" if key == "tree" else key, some_size(chance, 20_000))
        old = state[key]["items"] if key == "tree" else state[key]
        at, gone = chance.randrange(len(old) + 1), chance.choice((0, 0, 1, 3))
        new = old[:at] + more + old[at + gone :]
        self.say("put", size_of(more), "B at", at, "of", len(old), "instead of", gone, "into", key, "of", branch)
        self.save(branch, {**state, key: {"n": at, "items": new} if key == "tree" else new})

    def scatter(self, chance: Random) -> None:
        """Change a value in many places at once: its pieces become a table, and that is consolidated."""
        branch = self.some_branch(chance)
        if (key := self.some_key(chance, branch, ("log", "text"))) is None:
            return
        old = self.head(branch)[key]
        places = max(1, around(chance, chance.choice(PIECES)))
        for _ in range(chance.choice((1, 1, 3))):
            step = max(1, len(old) // places)
            size = chance.choice((1, 10, 30, 300))
            if type(old) is list:
                old = [some_item(chance, size) if at % step == 0 else item for at, item in enumerate(old)]
            else:
                old = "".join(some_text(chance, size) + old[at + 1 : at + step] for at in range(0, len(old), step))
            self.say("change", key, "of", branch, "in", places, "places by", size, "B")
            self.save(branch, {**self.head(branch), key: old})

    def put(self, chance: Random) -> None:
        """Put whole values, some of which other threads have too."""
        branch, key = self.some_branch(chance), chance.choice(KEYS)
        size = some_size(chance, min(self.bytes_max, 400_000))
        value = some_value(Random(chance.randrange(SHARED_SEEDS)), key, size)
        if key == "log" and chance.random() < 0.2:
            value = [n % 100 for n in range(around(chance, chance.choice(LIST_COUNTS)))]
        self.say("put", size, "B as", key, "of", branch)
        self.save(branch, {**self.head(branch), key: value})

    def small_keys(self, chance: Random) -> None:
        """Have many small keys, and change one of them a few times."""
        branch, count = self.some_branch(chance), chance.choice(KEY_COUNTS)
        state = {**self.head(branch), **{f"k{n}": n * 7 for n in range(count)}}
        self.say(count, "small keys of", branch)
        self.save(branch, state)
        for n in range(chance.choice((3, 40))):
            state = {**state, f"k{chance.randrange(count)}": n if n % 2 else some_text(chance, some_size(chance, 300))}
            self.save(branch, state)
        self.counts["journals"] += JOURNAL in self.entries(self.lines[branch][-1])

    def move_key(self, chance: Random) -> None:
        """Give a value, or a part of it, another name, and bring the keys into another order."""
        branch = self.some_branch(chance)
        state = dict(self.head(branch))
        old = [key for key in state if key in KEYS and len(state[key]) > 1]
        if not old:
            return
        value = state.pop(key := chance.choice(old))
        if key != "tree" and chance.random() < 0.5:
            value = value[len(value) // 3 :]
        self.say("move", key, "of", branch)
        self.save(branch, {"moved": value, **state} if chance.random() < 0.5 else {**state, "moved": value})

    def drop_key(self, chance: Random) -> None:
        branch = self.some_branch(chance)
        state = self.head(branch)
        if not state:
            return
        gone = chance.choice(list(state))
        self.say("drop", gone, "of", branch)
        left = {key: value for key, value in state.items() if key != gone}
        self.saved(branch, left, lambda thread: thread.append(delete=[gone]))

    def fork(self, chance: Random) -> None:
        """Begin a branch at any checkpoint, old ones too, and go on with it."""
        name = self.some_point(chance)
        free = [(t, b) for t in THREADS for b in BRANCHES if (t, b) not in self.lines]
        if name is None or not free:
            return
        source, target = self.points[name], chance.choice(free)
        self.say("fork", source.branch, "at", self.lines[source.branch].index(name), "to", target)
        self.forked(name, target)
        for key in GROWING[1:]:
            if key in source.state and chance.random() < 0.5:
                self.append(target, key, some_value(chance, key, some_size(chance, 6_000)))

    def forked(self, name: str, target: Branch) -> None:
        source = self.points[name]
        thread = self.store.thread(source.branch[0]).fork(name, branch=target[1], to=target[0])
        self.handles[target] = thread
        head = next(iter(thread.history(limit=1)))
        self.points[head.id] = Point(target, source.state)
        self.lines[target] = [head.id]

    def many_saves(self, chance: Random) -> None:
        """Save so often that lists have several pages, and that another reader has lost track of what was written."""
        branch = self.some_branch(chance)
        state = {"n": 0, **(self.head(branch) if size_of(self.head(branch)) < 5_000 else {})}
        self.say("many saves in", branch)
        for n in range(around(chance, PAGE_ROWS_MAX) if self.bytes_max == USUAL_BYTES_MAX else RING_ENTRIES + 1):
            self.save(branch, {**state, "n": n}, frozen=True)
        if chance.random() < 0.7:
            self.prune(chance)

    def many_branches(self, chance: Random) -> None:
        """Begin more branches than files may be open."""
        if (name := self.some_point(chance)) is None or len(self.points) > POINTS_MAX:
            return
        thread = self.points[name].branch[0]
        for n in range(chance.choice(BRANCH_COUNTS)):
            target = (thread, f"many {n}")
            if target not in self.lines:
                self.forked(name, target)
        self.say("now", len(self.lines), "branches")

    def tag(self, chance: Random) -> None:
        if (name := self.some_point(chance)) is not None:
            self.points[name].tags ^= {"kept"}
            thread = self.store.thread(self.points[name].branch[0])
            (thread.tag if self.points[name].tags else thread.untag)(name, "kept")

    def write(self, chance: Random) -> None:
        """Keep results of tasks beside a checkpoint."""
        if (name := self.some_point(chance)) is None:
            return
        point, task = self.points[name], f"task {chance.randrange(2)}"
        sizes = [around(chance, border) for border in WRITE_BORDERS] + [some_size(chance, 20_000)]
        given = [Write(task, n, "channel", some_text(chance, size)) for n, size in enumerate(sizes)]
        self.store.thread(point.branch[0], branch=point.branch[1]).write(name, given)
        point.writes = {**{(task, each.index): each.value for each in given}, **point.writes}

    # Removing and moving ------------------------------------------------------------------------------------------

    def prune(self, chance: Random) -> None:
        if self.lines:
            self.pruned(chance, chance.choice(list(self.lines))[0])

    def prune_store(self, chance: Random) -> None:
        self.pruned(chance, None)

    def pruned(self, chance: Random, thread: str | None) -> None:
        keep = Keep(last=chance.choice((1, 1, 1, 2, 5)), tagged=chance.random() < 0.8)
        self.say("prune", thread or "everything", keep)
        gone = (self.store if thread is None else self.store.thread(thread)).prune(keep).checkpoints
        for branch, line in self.lines.items():
            stay = {*line[-(keep.last or 0) :], *(n for n in line if self.points[n].tags and keep.tagged)}
            stay |= set(line) if thread not in (None, branch[0]) else set()
            assert stay.isdisjoint(gone), f"{branch} lost what the rule keeps"
        self.remove(gone)

    def delete(self, chance: Random) -> None:
        """Delete one to three checkpoints, wherever they are."""
        for _ in range(chance.choice((1, 1, 2, 3))):
            name = self.lines[chance.choice(list(self.lines))][-1] if self.lines else None  # a branch's newest ...
            name = self.some_point(chance) if chance.random() < 0.7 else name  # ... but mostly any
            if name is None:
                return
            branch = self.points[name].branch
            self.say("delete number", self.lines[branch].index(name), "of", len(self.lines[branch]), "of", branch)
            assert self.store.thread(branch[0]).delete_checkpoint(name) == 1
            self.remove([name])

    def undo(self, chance: Random) -> None:
        """Delete the newest checkpoints of a branch, one to three."""
        for _ in range(chance.randint(1, 3)):
            if self.lines:
                name = self.lines[chance.choice(list(self.lines))][-1]
                self.say("delete the newest of", self.points[name].branch)
                assert self.store.thread(self.points[name].branch[0]).delete_checkpoint(name) == 1
                self.remove([name])

    def delete_before(self, chance: Random) -> None:
        if not self.lines:
            return
        branch = chance.choice(list(self.lines))
        thread = self.store.thread(branch[0], branch=branch[1])
        metas = list(thread.history())
        step = chance.choice(metas).step
        self.say("delete before step", step, "of", branch)
        gone = [meta.id for meta in metas[1:] if meta.step < step]
        assert thread.delete_before(step) == len(gone)
        self.remove(gone)

    def replace(self, chance: Random) -> None:
        """Store a branch's newest checkpoint anew under its id."""
        if not self.lines:
            return
        branch = chance.choice(list(self.lines))
        name, key = self.lines[branch][-1], chance.choice(GROWING)
        old = self.head(branch)
        value = old.get(key, some_value(chance, key, 1))
        more = some_value(chance, key, some_size(chance, 70_000))
        state = {**old, key: chance.choice((value + more, value[len(value) // 2 :], more, more + value))}
        self.say("replace the newest of", branch, "with", key, "of", size_of(state[key]))
        thread = self.store.thread(branch[0], branch=branch[1])
        thread.latest()
        assert thread.save(state, id=name, replace=True).id == name
        self.handles[branch] = thread
        before = self.points[name]
        self.points[name] = Point(branch, state, set(), before.writes)

    def rewind(self, chance: Random) -> None:
        """Go back to an earlier checkpoint and go on from there."""
        if not self.lines:
            return
        branch = chance.choice(list(self.lines))
        name = chance.choice(self.lines[branch])
        self.say("rewind", branch, "to number", self.lines[branch].index(name))
        self.saved(branch, self.points[name].state, lambda thread: thread.rewind(name))

    def delete_thread(self, chance: Random) -> None:
        if not self.lines:
            return
        thread = chance.choice(list(self.lines))[0]
        gone = [name for name, point in self.points.items() if point.branch[0] == thread]
        self.say("delete thread", thread)
        assert self.store.thread(thread).delete().checkpoints == len(gone)
        self.remove(gone)

    def compact(self, chance: Random) -> None:
        assert self.store.compact() >= 0

    def reopen(self, chance: Random) -> None:
        if not isinstance(self.place, MemoryPlace):
            self.store.close()
        self.store = self.opened()
        self.handles = {}

    def take_out(self, chance: Random) -> None:
        """Take checkpoints out as a repair does, which leaves their bytes; then let a repair drop the bytes."""
        if (name := self.some_point(chance)) is None:
            return
        branch = self.points[name].branch
        gone = [name] if chance.random() < 0.5 else self.lines[branch][:-1]
        self.say("take out", len(gone), "of", len(self.lines[branch]), "of", branch)
        for each in gone:
            access_of(self.store).store.quarantine("", each, False)
        self.remove(gone)
        report = self.store.repair(dry_run=False)
        assert not report.findings, str(report)

    def repair(self, chance: Random) -> None:
        report = self.store.repair(dry_run=False)
        assert not report.actions, f"a sound store was repaired: {report}"
        assert not report.findings, str(report)

    def spoil(self, chance: Random) -> None:
        """Put wrong bytes into a stream, and let a repair put the right ones back from a copy of the store."""
        name = self.some_point(chance)
        ranges = [] if name is None else self.ranges(name)
        if not ranges:
            return
        stream, start, length = chance.choice(ranges)
        assert isinstance(stream, int)
        size = min(length, some_size(chance, 70_000))
        at = start + chance.choice((0, length - size, chance.randrange(length - size + 1)))
        self.say("spoil", size, "B of stream", stream, "from", at, "on")
        with self.bundle() as path, open_store("memory:") as copy:
            import_bundle(path, copy)
            access_of(self.store).store.restore({}, [(stream, at, chance.randbytes(size))])
            report = self.store.repair(backup=copy, dry_run=False)
        assert not report.findings, str(report)

    def entries(self, name: str) -> Entries:
        """Return where the values of a checkpoint are stored."""
        row = access_of(self.store).store.find(Query("", ids=(name,), payload=True))[0]
        return decode_manifest(row.manifest, decode_base(row.base_data) if row.base_data else {})

    def ranges(self, name: str) -> list[Range]:
        """Return the ranges of streams that a checkpoint consists of."""
        pieces = [piece for entry in self.entries(name).values() for piece in entry.pieces or ()]
        return [piece for piece in pieces if isinstance(piece, Range) and isinstance(piece.source, int)]

    def copy_store(self, chance: Random) -> None:
        """Export everything into another store."""
        with self.bundle() as path, open_store("memory:") as other:
            assert not import_bundle(path, other).refused
            self.assert_holds(other)

    def move_store(self, chance: Random) -> None:
        """Export everything, delete it, and import it again: from then on the bytes are where an import puts them."""
        with self.bundle() as path:
            self.store.delete_all()
            assert not (left := self.place.look(access_of(self.store).store, at_end=True).left()), (
                f"left when all was deleted: {left}"
            )
            assert not import_bundle(path, self.store).refused
        self.handles = {}

    @contextmanager
    def bundle(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None) as folder:
            path = Path(folder) / "all.bundle"
            export_bundle(self.store, path, on_damage="refuse")
            yield path

    # Comparing ----------------------------------------------------------------------------------------------------

    def compare(self, through: int) -> None:
        """Load and compare every checkpoint; look for what is left over.

        ``through``: 0 a store opened just now, 1 one that was open all the time and only reads, else the usual one.
        """
        if through == 0 and not isinstance(self.place, MemoryPlace):
            with self.opened() as store:
                self.assert_holds(store)
        else:
            self.assert_holds(self.reader if through == 1 else self.store)
        spare = self.place.look(access_of(self.store).store).spare()
        assert not spare, f"{len(spare)} rows that nothing needs: {spare[:5]}"

    def assert_holds(self, store: Store) -> None:
        self.counts["comparisons"] += 1
        for thread in {*THREADS, *(branch[0] for branch in self.lines)}:
            listed = {meta.id for meta in store.thread(thread).history(branch="*")}
            assert listed == {n for n, p in self.points.items() if p.branch[0] == thread}, f"the list of {thread}"
        for branch, line in self.lines.items():
            head = store.thread(branch[0], branch=branch[1]).latest()
            assert head is not None
            assert head.id == line[-1], f"the newest of {branch}"
        for name, point in self.points.items():
            found = store.get(name)
            self.assert_is(found, point)
            self.counts["states compared"] += 1

    def assert_is(self, found: Checkpoint | None, point: Point) -> None:
        place = f"number {self.lines[point.branch].index(found.id) if found else '?'} of {point.branch}"
        assert found is not None, f"{place} is gone"
        assert found.state == point.state, f"{place} has another state"
        assert list(found.state) == list(point.state), f"{place} has its keys in another order"
        assert set(found.tags) == point.tags, f"{place} has other tags"
        assert {(w.task_id, w.index): w.value for w in found.writes} == point.writes, f"{place} has other writes"

    def finish(self) -> None:
        """Compare once more, verify, delete everything; then nothing may be left."""
        self.story.append("the end")
        self.compare(0)
        report = self.store.check()
        assert report, str(report)
        for thread in {branch[0] for branch in self.lines}:
            self.store.thread(thread).delete()
        left = self.place.look(access_of(self.store).store, at_end=True).left()
        assert not left, f"left when all was deleted: {left}"
