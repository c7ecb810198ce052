"""Ctrl-C, and calls from signal handlers, at every moment of every verb of the memory and the directory store.

Whatever the moment: no lock stays behind, nothing that was stored is lost, the verb has happened whole or not at all,
and the next call works, of this store and of another one on the same directory.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import backstay.store
from backstay.errors import NotFound, StoreError
from backstay.store.base import Query
from backstay.store.directory.store import DirectoryStore
from backstay.store.leases import ClockReading as Instant
from backstay.store.leases import LeaseRequest
from backstay.store.lock import DirectoryLock, is_mine
from backstay.store.memory.store import MemoryStore
from backstay.store.records import KINDS, Fence, Kind, Record, RunFacts, RunQuery
from backstay.testing._contract_runs import G, started
from backstay.testing.drafts import branch_key, damage, draft, long_list, pending, put, state_of
from support.running import RAM_FOLDER, effort
from support.store.breaking import Moment, Watch

FOLDER = Path(backstay.store.__file__).parent
FILES = {
    str(path)
    for pattern in ("memory/*.py", "directory/*.py", "lock.py", "gate.py", "atomic.py")
    for path in FOLDER.glob(pattern)
}
EVERYTHING_FROM = 40
FEW = 4
ONE_IN = 16
"""Which part of the places in the code is tried if not all moments are."""

HOUR_US = 3_600_000_000

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # a lock is given back by dropping it
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Store = MemoryStore | DirectoryStore
Verb = Callable[[], object]


def clock() -> Instant:
    return Instant(HOUR_US, "")


def fill(store: Store) -> None:
    for number in range(1, 5):
        put(store, branch_key(), {"list": long_list(6 * number), "n": number}, f"c{number}")
    put(store, branch_key(name="side"), {"list": long_list(8), "n": 0}, "side", origin="c2")
    put(store, branch_key("other"), {"list": long_list(9)}, "other")
    put(store, branch_key("alone"), {"list": long_list(9)}, "alone")
    store.tag("", "c1", ["kept"], [])
    store.write(branch_key(), "c4", [pending("task", 0)], False)
    store.put_record(record("interrupt", "asked", "c4"))
    store.put_record(record("effect", "begun"))
    store.put_record(run("queued run", "queued", 5))
    store.acquire(branch_key("leased"), LeaseRequest("me", "token", HOUR_US))
    store.acquire(branch_key("expired"), LeaseRequest("me", "old token", -5), run("run", "running", thread="expired"))
    store.acquire(branch_key("running"), LeaseRequest("me", "token", HOUR_US), run("run", "running", thread="running"))


def batch(store: Store) -> Verb:
    source = MemoryStore()
    source.reserve = store.reserve  # type: ignore[method-assign]
    commits = []
    for number in range(1, 4):
        commits.append(draft(source, branch_key("new"), {"list": long_list(5 * number)}, f"new {number}"))
        source.commit(commits[-1])
    return lambda: store.commit_all(commits)


def committed(store: Store, thread: str, **options: object) -> Verb:
    commit = draft(store, branch_key(thread), {"list": long_list(30), "m": 1}, "new", **options)  # type: ignore[arg-type]
    return lambda: store.commit(commit)


def replaced(store: Store) -> Verb:
    commit = draft(store, branch_key(), {"list": long_list(20), "m": 1}, "c4", replaces=True)
    return lambda: store.commit(commit)


def record(kind: Kind, key: str, checkpoint: str | None = None) -> Record:
    return Record(kind, branch_key(), key, b"body", True, checkpoint)


def run(key: str, status: str, due_us: int | None = None, thread: str = "t") -> Record:
    return Record("run", branch_key(thread), key, b"body", True, run=RunFacts(status, "g", "1", due_us))


def changed(store: Store, kind: Kind, key: str) -> Verb:
    seen = store.record(kind, branch_key(), key)
    assert seen is not None
    return lambda: store.put_record(replace(seen, body=b"changed", open=False))


def released(store: Store) -> Verb:
    seen = store.record("run", branch_key("running"), "run")
    assert seen is not None
    ended = replace(seen, body=b"ended", open=False, run=RunFacts("completed", "g", "1"))
    return lambda: store.release(branch_key("running"), 1, "token", ended)


def answered(store: Store) -> Verb:
    seen = store.record("run", branch_key(), "queued run")
    assert seen is not None
    woken = replace(seen, body=b"woken", run=RunFacts("queued", "g", "1", 1))
    return lambda: store.put_record(record("effect", "new"), None, woken)


def dropped(store: Store) -> Verb:
    seen = store.record("run", branch_key(), "queued run")
    assert seen is not None
    return lambda: store.drop_records([seen])


def mended(store: Store) -> Verb:
    (row,) = store.find(Query("", ids=("c3",), payload=True))
    return lambda: store.restore({}, [], [row])


VERBS: dict[str, Callable[[Store], Verb]] = {
    "commit": lambda store: committed(store, "t"),
    "commit to a new branch": lambda store: committed(store, "new"),
    "commit in place of the head": replaced,
    "commit several": batch,
    "tag": lambda store: lambda: store.tag("", "c3", ["new"], []),
    "write": lambda store: lambda: store.write(branch_key(), "c4", [pending("task", 1), pending("task", 2)], False),
    "reserve": lambda store: lambda: store.reserve(1000),
    "delete": lambda store: lambda: store.delete("", ["c1", "c2", "c4", "alone"], False),
    "delete a thread": lambda store: lambda: store.delete_thread("", "t"),
    "quarantine": lambda store: lambda: store.quarantine("", "c2"),
    "restore": mended,
    "rebuild": lambda store: lambda: store.rebuild(False, True),
    "compact": lambda store: store.compact,
    "acquire": lambda store: lambda: store.acquire(branch_key("new"), LeaseRequest("me", "new token", HOUR_US)),
    "renew": lambda store: lambda: store.renew(branch_key("leased"), 1, LeaseRequest("me", "token", 2 * HOUR_US)),
    "release": lambda store: lambda: store.release(branch_key("leased"), 1, "token"),
    "acquire with a run": lambda store: (
        lambda: store.acquire(
            branch_key("new"), LeaseRequest("me", "new token", HOUR_US), run("new", "running", thread="new")
        )
    ),
    "release with a run": released,
    "claim": lambda store: lambda: store.claim("", G, 1, LeaseRequest("me", "new token", HOUR_US), 9, (), started),
    "put a new run": lambda store: lambda: store.put_record(run("new", "queued", 9)),
    "put an effect with a run": answered,
    "put a new interrupt": lambda store: lambda: store.put_record(record("interrupt", "new", "c4")),
    "put a new effect": lambda store: lambda: store.put_record(record("effect", "new"), fence=Fence()),
    "put a run again": lambda store: changed(store, "run", "queued run"),
    "drop a run": dropped,
    "put an interrupt again": lambda store: changed(store, "interrupt", "asked"),
    "put an effect again": lambda store: changed(store, "effect", "begun"),
    "read": lambda store: lambda: state_of(store, "c3"),
    "check": lambda store: store.check,
    "close": lambda store: store.close,
}


def everything(store: Store) -> list[object]:
    branches = store.branches("", None, None)
    rows = [row for each in branches for row in store.find(Query(*each.key, payload=True, writes=True))]
    return [
        branches,
        rows,
        [state_of(store, row.id) for row in rows],
        *(store.records(kind, "", None, False, 0, 100) for kind in KINDS),
        store.leases("", None, False),
        store.runs(RunQuery("")),
        store.runs(RunQuery("", status="queued")),
        store.runs(RunQuery("", graph="g")),
        store.runs(RunQuery("", thread="t")),
        store.count_runs("", ["queued", "running"]),
    ]


class Bench:
    """Makes stores that all hold the same, and knows what each verb makes of it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._count = 0
        if kind == "directory":
            with contextlib.closing(DirectoryStore(f"dir:{folder / 'filled'}", clock)) as store:
                fill(store)
        self._seen: dict[str, set[Moment]] = {}

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        if self.kind == "memory":
            store: Store = MemoryStore("memory:", clock)
            fill(store)
            yield store
            return
        path = self._folder / str(self._count)
        self._count += 1
        shutil.copytree(self._folder / "filled", path)
        (path / "control").unlink()  # or it would be the one of the other directory, and older
        store = DirectoryStore(f"dir:{path}", clock, timeout_s=5)
        yield store
        store.close()
        shutil.rmtree(path)

    def outcomes(self, verb: str) -> tuple[list[object], list[object]]:
        with self.store() as store:
            run = VERBS[verb](store)
            before = everything(store)
            run()
            return before, before if verb == "close" else everything(store)

    def moments(self, verb: str, what: str) -> list[int]:
        """Return which moments of a verb to try: all, or some of the places in the code that no other verb has."""
        watch = Watch(FILES)
        with self.store() as store:
            watch.run(VERBS[verb](store))
        count = len(watch.moments)
        if effort() >= EVERYTHING_FROM:
            return list(range(count))
        seen = self._seen.setdefault(what, set())
        first = {moment: number for number, moment in reversed(list(enumerate(watch.moments))) if moment not in seen}
        seen.update(first)
        return sorted({count // 2, *sorted(first.values())[:: max(1, ONE_IN // effort())]})


@pytest.fixture(scope="module", params=["memory", "directory"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None) as folder:
        yield Bench(request.param, Path(folder))


def saved_by_another_thread(store: Store) -> bool:
    done: list[str] = []
    worker = threading.Thread(
        target=lambda: done.append(put(store, branch_key("later"), {"n": 1}, "later")), daemon=True
    )
    worker.start()
    worker.join(20)
    return done == ["later"]


def check(store: Store, outcomes: tuple[list[object], ...], verb: str) -> None:
    """Raise unless the store holds one of these, nothing is wrong with it, and nobody is kept from writing."""
    if isinstance(store, DirectoryStore):
        held = DirectoryLock(store.url.removeprefix("dir:"), 0).take_now()
        assert held is not None, "the directory is still locked"
        with held:
            pass
        with contextlib.closing(DirectoryStore(store.url, clock, timeout_s=5)) as other:
            assert everything(other) in outcomes
    if verb == "close":
        store.close()
        return
    found = everything(store)
    assert found in outcomes
    assert [finding for finding in damage(store) if not finding.is_harmless] == []
    assert saved_by_another_thread(store)
    if isinstance(store, DirectoryStore):
        with contextlib.closing(DirectoryStore(store.url, clock, timeout_s=5)) as other:
            assert everything(other) == everything(store)


@pytest.mark.effort
@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_at_any_moment_leaves_no_lock_and_nothing_half_done(bench: Bench, verb: str) -> None:
    outcomes = bench.outcomes(verb)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in bench.moments(verb, "interrupted"):
        with bench.store() as store:
            watch = Watch(FILES, number, interrupt)
            with pytest.raises(KeyboardInterrupt):
                watch.run(VERBS[verb](store))
            try:
                check(store, outcomes, verb)
            except BaseException as error:
                error.add_note(f"{verb} was interrupted at {watch.moments[-1]}")
                raise


@pytest.mark.effort
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_from_inside_another_is_refused_and_does_no_harm(bench: Bench, verb: str) -> None:
    outcomes = bench.outcomes(verb)
    refused: list[StoreError] = []

    def call(inner: Verb) -> None:
        if is_mine(store.guard.mine()):
            with pytest.raises(StoreError, match="inside another call") as caught:
                inner()
            refused.append(caught.value)
        elif verb == "close":
            with contextlib.suppress(StoreError):
                inner()
        else:
            with contextlib.suppress(NotFound):  # the call has ended, and may have deleted it
                inner()

    def handle() -> None:
        call(lambda: store.head(branch_key()))
        call(lambda: store.tag("", "c1", ["kept"], []))

    numbers = bench.moments(verb, "called")
    for number in numbers:
        with bench.store() as store:
            watch = Watch(FILES, number, handle)
            try:
                watch.run(VERBS[verb](store))
                check(store, outcomes[1:], verb)
            except BaseException as error:
                error.add_note(f"{verb} was interrupted at {watch.moments[number]}")
                raise
    assert refused or len(numbers) < FEW
