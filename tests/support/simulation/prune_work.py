"""What the processes of ``test_prune_and_save`` do: some save in every way there is, some delete, all at the same time.

Threads are of three kinds. Those called *kept* are only ever pruned, so of them one can tell what must be there at the
end. From the *shared* ones anything may be deleted. The *forks* come and go: forks make them, deleters take them away.

A saver notes in a file of its own each save that was acknowledged, with a fingerprint of the state that it meant to
save, and each state that it loaded. So whoever reads the files knows what every checkpoint must hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import backstay
from backstay.errors import BackstayError, Conflict, InvalidInput, NotFound, StoreBusy
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.store.base import Commit, Committed
from backstay.store.sqlite import queries as sqlite_queries
from backstay.store.sqlite.rows import fetch_one
from backstay.store.sqlite.store import SqliteStore

KEPT = ("kept 0", "kept 1")
SHARED = ("shared 0", "shared 1", "shared 2")
FORKS = tuple(f"fork {number}" for number in range(8))
BRANCHES = ("main", "main", "left", "middle", "right")
TAG = "keep"
EXPECTED = (Conflict, NotFound, StoreBusy)
"""What may happen to whoever is late. Everything else is a defect."""

DOCUMENTS = [hashlib.shake_128(bytes([n])).hexdigest(1500 + 2000 * n) for n in range(6)]
"""Large values that all threads share, so each is one blob: it goes with its last user and comes with the next."""

FIRST_SEQ = 0
"""Stands for the seq of a fork's first checkpoint."""

ITEMS, ITEM_BYTES, LOG_LENGTH_MAX, COMPACT_EVERY = 60, 80, 120, 15

State = dict[str, Any]


def fingerprint(state: Mapping[str, Any]) -> list[str]:
    """Return what tells one state from every other: a digest of its content, and the token of who saved it."""
    content = repr(sorted((key, value) for key, value in state.items() if key != "token"))
    return [hashlib.sha256(content.encode()).hexdigest()[:24], state.get("token", "")]


class Worker:
    """A process that does one random thing after the other for a while, and notes what became of each."""

    def __init__(self, url: str, path: str, seed: int, mutation: str = "") -> None:
        MUTATIONS[mutation]()
        self.store = backstay.open(url)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._name = seed
        self._number = 0

    def work(self, seconds: float) -> dict[str, int]:
        """Do random things for so long; return how often each was done, and how it ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            what = self.random.choice(self.choices())
            try:
                what()
                self.counts[f"{what.__name__} ok"] += 1
            except EXPECTED as error:
                self.counts[f"{what.__name__} {type(error).__name__}"] += 1
            except Exception as error:
                if not (isinstance(error, BackstayError) and is_idle(error)):
                    self.note(wrong=f"{what.__name__}: {traceback.format_exc()}")
        return dict(self.counts)

    def choices(self) -> list[Callable[[], object]]:
        raise NotImplementedError

    def note(self, **told: object) -> None:
        os.write(self._file, (json.dumps(told) + "\n").encode())

    def token(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    def close(self) -> None:
        self.store.close()


def is_idle(error: BackstayError) -> bool:
    """Tell whether nothing but the random choice was wrong: a rewind of another thread's checkpoint, say."""
    return isinstance(error, InvalidInput)


class Saver(Worker):
    """Saves in every way."""

    def choices(self) -> list[Callable[[], object]]:
        often = [self.append, self.append, self.save_document, self.edit, self.replace]
        return [*often, *often, self.fork_within, self.fork_across, self.rewind, self.tag, self.interrupt]

    def append(self) -> None:
        thread, state = self.at_head()
        token = self.token()
        if not state or len(state["log"]) > LOG_LENGTH_MAX:
            self.saved(thread.save(new := fresh(token), id=token), new)
            return
        line = f"{token} " + "x" * self.random.randint(1, 900)
        saved = thread.append({"log": [line]}, set={"token": token}, id=token)
        self.saved(saved, {**state, "log": [*state["log"], line], "token": token})

    def save_document(self) -> None:
        thread, state = self.at_head()
        self.save(thread, {**(state or fresh("")), "document": self.random.choice(DOCUMENTS)})

    def edit(self) -> None:
        thread, state = self.at_head()
        state = state or fresh("")
        items = list(state["items"])
        items[self.random.randrange(len(items))] = self.random.randbytes(ITEM_BYTES // 2).hex()
        self.save(thread, {**state, "items": items})

    def tag(self) -> None:
        thread, state = self.at_head()
        self.save(thread, state or fresh(""), tags=[TAG])

    def replace(self) -> None:
        thread = self.thread()
        head = thread.latest()
        if head is not None:
            self.loaded(head)
            state = {**head.state, "token": self.token(), "document": self.random.choice(DOCUMENTS)}
            self.saved(thread.save(state, id=head.id, replace=True), state)

    def fork_within(self) -> None:
        thread, source, state = self.at_any()
        token = self.token()
        forked = thread.fork(source, branch=self.random.choice(BRANCHES[1:]), set={"token": token}, id=token)
        self.forked(forked, {**state, "token": token}, source)

    def fork_across(self) -> None:
        thread, source, state = self.at_any()
        token = self.token()
        forked = thread.fork(source, to=self.random.choice(FORKS), set={"token": token}, id=token)
        self.forked(forked, {**state, "token": token}, source)

    def rewind(self) -> None:
        thread, source, state = self.at_any()
        self.saved(thread.rewind(source, id=self.token()), state, source.id)

    def interrupt(self) -> None:
        thread, source, _ = self.at_any()
        record = thread.interrupt(source, id=self.token(), prompt="may it go on?")
        self.note(interrupt=record.id, checkpoint=source.id, thread=thread.id)

    # Where, and what is noted -------------------------------------------------------------------------------------

    def thread(self) -> backstay.Thread:
        name = self.random.choice((*KEPT, *SHARED, *FORKS))
        return self.store.thread(name, branch=self.random.choice(BRANCHES))

    def at_head(self) -> tuple[backstay.Thread, State]:
        """Return some branch and the state at its head: empty if there is none."""
        thread = self.thread()
        head = thread.latest()
        if head is None:
            return thread, {}
        self.loaded(head)
        return thread, dict(head.state)

    def at_any(self) -> tuple[backstay.Thread, CheckpointMeta, State]:
        """Return some checkpoint of some branch with its state."""
        thread = self.thread()
        metas = list(thread.history(limit=6, branch="*"))
        if not metas:
            raise NotFound(thread.id)
        meta = self.random.choice(metas)
        found = self.store.get(meta.id)
        if found is None:
            raise NotFound(meta.id)
        self.loaded(found)
        return thread, found, dict(found.state)

    def save(self, thread: backstay.Thread, state: State, **notes: Any) -> None:
        token = self.token()
        state = {**state, "token": token}
        self.saved(thread.save(state, id=token, **notes), state)

    def forked(self, thread: backstay.Thread, state: State, source: CheckpointMeta) -> None:
        """Note what a fork began with. Its seq is not told, and by now others may have gone on from there."""
        place = {"thread": thread.id, "branch": thread.branch, "seq": FIRST_SEQ}
        self.note(saved=state["token"], **place, state=fingerprint(state), tagged=False, source=source.id)

    def saved(self, saved: CheckpointMeta, state: State, source: str | None = None) -> None:
        """Note what was saved, and if it is a copy, of what: that may have been replaced since it was read."""
        self.note(
            saved=saved.id,
            seq=saved.seq,
            thread=saved.thread_id,
            branch=saved.branch,
            state=fingerprint(state),
            tagged=TAG in saved.tags,
            source=source,
        )

    def loaded(self, found: Checkpoint) -> None:
        self.note(loaded=found.id, state=fingerprint(found.state))


class Deleter(Worker):
    """Deletes in every way, and tidies up now and then."""

    def choices(self) -> list[Callable[[], object]]:
        self._number += 1
        if self._number % COMPACT_EVERY == 0:
            return [self.compact]
        often = [self.prune, self.prune_thread, self.delete, self.delete_before]
        return [*often, self.delete_head, self.delete_thread, self.delete_thread]

    def prune(self) -> None:
        self.counts["deleted"] += self.store.prune(backstay.Keep(last=2)).deleted

    def prune_thread(self) -> None:
        thread = self.store.thread(self.random.choice((*KEPT, *SHARED, *FORKS)))
        self.counts["deleted"] += thread.prune(backstay.Keep(last=1)).deleted

    def delete(self) -> None:
        thread = self.thread()
        metas = list(thread.history(limit=8, branch="*"))
        if metas:
            self.counts["deleted"] += thread.delete_checkpoint(self.random.choice(metas))

    def delete_head(self) -> None:
        thread = self.thread()
        head = next(iter(thread.history(limit=1)), None)
        if head is not None:
            self.counts["deleted"] += thread.delete_checkpoint(head)

    def delete_before(self) -> None:
        thread = self.thread()
        head = next(iter(thread.history(limit=1)), None)
        if head is not None:
            self.counts["deleted"] += thread.delete_before(head.step - 1)

    def delete_thread(self) -> None:
        self.counts["deleted"] += self.store.thread(self.random.choice((*SHARED, *FORKS))).delete().checkpoints

    def compact(self) -> None:
        self.store.compact()

    def thread(self) -> backstay.Thread:
        return self.store.thread(self.random.choice((*SHARED, *FORKS)), branch=self.random.choice(BRANCHES))


class Swapper(Saver):
    """Puts one of two documents on a thread of its own, takes it off again and prunes: so each comes and goes often."""

    def choices(self) -> list[Callable[[], object]]:
        return [self.swap]

    def swap(self) -> None:
        thread = self.store.thread(f"swapped by {self._name}")
        thread.latest()
        self.save(thread, {"document": self.random.choice(DOCUMENTS[:2])})
        found = self.store.get(next(iter(thread.history(limit=1))).id)  # now: the next who puts it would mend it
        assert found is not None
        self.loaded(found)
        self.save(thread, {})
        self.counts["deleted"] += thread.prune(backstay.Keep(last=1)).deleted


def fresh(token: str) -> State:
    """Return a state to begin a branch with."""
    items = [hashlib.shake_128(f"item {n}".encode()).hexdigest(ITEM_BYTES // 2) for n in range(ITEMS)]
    return {"token": token, "log": [token], "items": items, "document": DOCUMENTS[0]}


# Deliberately broken stores ---------------------------------------------------------------------------------------


def intact() -> None:
    """Leave everything as it is."""


def looking_too_early() -> None:
    """Let SQLite leave out, before the transaction in which it matters, the blobs that are there already."""
    commit_all_of_it = SqliteStore.commit

    def commit(store: SqliteStore, commit: Commit) -> Committed:
        there = store._read(
            lambda connection: {
                name for name in commit.blobs if fetch_one(connection, sqlite_queries.HAS_BLOB, (name,))
            }
        )
        commit.blobs = {name: data for name, data in commit.blobs.items() if name not in there}
        return commit_all_of_it(store, commit)

    SqliteStore.commit = commit  # type: ignore[assignment, method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "": intact,
    "looks too early": looking_too_early,
}
