"""Damage in any column of any row: every list tells of it in its place, and pruning of all else goes on.

The store is damaged below its own verbs, one column of one row of thread alpha at a time, with bytes, numbers and texts
that were drawn by a seed. Then every list is asked, in both ways. An answer is the whole list; or one in which the
entry that cannot be read is marked, and the same call without marks raises that entry's error after what comes before
it. It is never shorter without a word. The threads beside it answer as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ormsgpack
import pytest

import backstay
from backstay import Corrupted, Keep
from backstay.errors import BackstayError
from backstay.model.checkpoint import CheckpointMeta, Write
from backstay.model.decision import Decision, DecisionKind
from backstay.model.runs import RunStatus
from backstay.operations.rows import Damaged
from backstay.store.base import BranchKey, Query
from backstay.store.directory.frame import FILE_HEAD_BYTES, RecordFrame, scan
from backstay.store.leases import LeaseRequest
from backstay.store.memory.store import MemoryStore
from backstay.thread.access import access_of
from support import damage
from support.running import Show, effort
from support.thread.stored_runs import put_run

if TYPE_CHECKING:
    from support.postgres import PostgresServer

SEED = int(os.environ.get("BACKSTAY_SEED", "20261116"))
ROUNDS = max(1, effort() // 4)
THREADS = ("alpha", "beta", "gamma")
STEPS = 5

COLUMNS = {
    "checkpoint": ("id", "parent", "parent_digest", "step", "created", "digest", "size", "notes", "base", "manifest"),
    "branch": ("head", "last_seq", "epoch", "owner", "origin"),
    "tag": ("name",),
    "record": (
        "scope",
        "branch",
        "key",
        "version",
        "checkpoint",
        "open",
        "status",
        "graph",
        "fingerprint",
        "due",
        "body",
    ),
    "write": ("task", "size", "body"),
    "blob": ("size", "body"),
    "chunk": ("size", "body"),
}

SHOWN_AS_STORED = {
    ("tag", "name"): {"tagged"},
    ("checkpoint", "tags"): {"tagged"},
    ("branch", "head"): {"threads", "threads of a user"},  # a lower one: the thread is shown by another checkpoint
    ("record", "open"): {"waiting", "alpha waiting"},
    ("record", "status"): {"queued runs"},
    ("record", "graph"): {"runs of a graph"},
    ("record", "namespace"): {"queued runs", "runs of a graph"},
}
"""They change, or are looked up, by themselves. A list that asks for them shows what they say."""


def fill(store: backstay.Store) -> None:
    """Save three threads that have everything in them."""
    backend = access_of(store).store
    for name in THREADS:
        thread, first = store.thread(name), name[0]
        for number in range(STEPS):
            state = {
                "log": [damage.text(f"{first}{n}", 300) for n in range(number + 1)],
                "doc": damage.text(name, 2000),
            }
            notes: Any = {"metadata": {"user": number % 2}, "graph": "g", "last_node": "n"}
            thread.save(state, id=f"{first}{number}", tags=["good"] if number == 1 else [], **notes)
        thread.fork(f"{first}2", branch="what-if", id=f"{first}-fork", set={"n": 1})
        thread.write(f"{first}4", [Write("task", 0, "channel", {"answer": 42})])
        thread.interrupt(f"{first}0", payload={"q": 1}, id=f"{first}-open")
        asked = thread.interrupt(f"{first}3", payload={"q": 2}, id=f"{first}-done")
        thread.consume(thread.decide(asked, Decision(kind=DecisionKind.APPROVE), by="ann"), by="worker")
        thread.effect("mail", lambda: {"sent": 1})
        branch = BranchKey("", name, "", "main")
        backend.acquire(branch, LeaseRequest("worker", f"{first}-token", 0))
        put_run(store, name, RunStatus.COMPLETED, id=f"{first}-0", ended_us=2)
        put_run(store, name, id=f"{first}-1")


# Asking -----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a list gave: names, and marks; and what the same call gave before its error, if it raised one."""

    entries: list[str | Damaged]
    before_error: list[str | Damaged]
    error: BackstayError | None

    @property
    def names(self) -> list[str]:
        return [entry for entry in self.entries if isinstance(entry, str)]

    @property
    def marks(self) -> list[Damaged]:
        return [entry for entry in self.entries if isinstance(entry, Damaged)]


def questions(store: backstay.Store) -> dict[str, Callable[[Any], Any]]:
    """Return every list of the store and of its threads."""
    asked: dict[str, Callable[[Any], Any]] = {
        "threads": lambda on: store.threads(on_damage=on),
        "threads of a user": lambda on: store.threads(on_damage=on, where={"user": 0}),
        "waiting": lambda on: store.interrupts(on_damage=on),
        "interrupts": lambda on: store.interrupts(on_damage=on, pending=False),
        "runs": lambda on: store.runs(on_damage=on),
        "queued runs": lambda on: store.runs(on_damage=on, status="queued"),
        "runs of a graph": lambda on: store.runs(on_damage=on, graph="work"),
    }
    for name in THREADS[:2]:
        thread = store.thread(name)
        lists: dict[str, Callable[..., Any]] = {
            "history": thread.history,
            "everything": partial(thread.history, branch="*"),
            "of a user": partial(thread.history, where={"user": 1}),
            "two of a graph": partial(thread.history, graph="g", limit=2),
            "branches": thread.branches,
            "waiting": thread.interrupts,
            "effects": thread.effects,
        }
        asked.update({f"{name} {what}": partial(_asked, listed) for what, listed in lists.items()})
    asked["tagged"] = lambda on: store.thread("alpha").history(on_damage=on, tag="good")
    return asked


def _asked(listed: Callable[..., Any], on_damage: str) -> Any:
    return listed(on_damage=on_damage)


def shown(entry: Any) -> str | Damaged:
    if isinstance(entry, Damaged):
        return entry
    for name in ("id", "key"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return f"{entry.thread_id} {entry.branch}"


def ask(store: backstay.Store) -> dict[str, Answer]:
    answers = {}
    for name, question in questions(store).items():
        found = question("mark")
        marked = list(map(shown, found))
        before: list[str | Damaged] = []
        error = None
        try:
            for entry in question("raise"):
                before.append(shown(entry))
        except BackstayError as raised:
            error = raised
            if isinstance(found, list):  # it comes all at once, so nothing of it comes before an error
                before = marked[: next(at for at, entry in enumerate(marked) if isinstance(entry, Damaged))]
        answers[name] = Answer(marked, before, error)
    return answers


# Judging ----------------------------------------------------------------------------------------------------------


def is_part(few: list[str], many: list[str]) -> bool:
    rest = iter(many)
    return all(name in rest for name in few)


def mistakes(right: dict[str, Answer], got: dict[str, Answer], excused: set[str], renamed: bool) -> list[str]:
    """Return everything that is wrong with the answers of a damaged store."""
    wrong = []
    for name, answer in got.items():
        wrong += [f"{name}: {each}" for each in badly_told(answer)]
        if name not in excused:
            whole = right[name.replace("two of a graph", "history")].names  # a limit does not count marks
            wrong += [f"{name}: {each}" for each in left_out(name, right[name].names, whole, answer, renamed)]
    return wrong


def badly_told(answer: Answer) -> Iterator[str]:
    """Compare both ways of asking, and look at what the marks say."""
    entries, before, error = answer
    first = next((at for at, entry in enumerate(entries) if isinstance(entry, Damaged)), len(entries))
    if before != entries[:first]:
        yield f"{before} before the error, but {entries} with marks"
    if (error is None) != (not answer.marks) or not isinstance(error, Corrupted | None):
        yield f"{answer.marks}, but {error!r}"
    for mark in answer.marks:
        if mark.error.hint is None or (mark.thread_id is not None and repr(mark.thread_id) not in str(mark.error)):
            yield f"{mark.error} names nothing"


def left_out(name: str, wanted: list[str], whole: list[str], answer: Answer, renamed: bool) -> Iterator[str]:
    """Compare a list with the one of the undamaged store."""
    if len(answer.entries) < len(wanted) and all(mark.id or mark.seq for mark in answer.marks):
        yield f"{answer.entries} without a word, not {wanted}"
    if not renamed and not is_part(answer.names, whole):
        yield f"{answer.names}, not of {whole}"
    if (
        "alpha" not in name
        and name != "tagged"
        and not is_part([each for each in wanted if each[0] != "a"], answer.names)
    ):
        yield f"{answer.names} lacks what other threads have of {wanted}"
    if name.startswith("beta") and answer.names != wanted:
        yield f"{answer.names} instead of {wanted}"


def states(store: backstay.Store) -> dict[str, Any]:
    """Return the state of every checkpoint that can be loaded."""
    found = {}
    for name in THREADS:
        for number in (*range(STEPS), "-fork"):
            with contextlib.suppress(BackstayError):
                checkpoint = store.get(f"{name[0]}{number}")
                if checkpoint is not None:
                    found[checkpoint.id] = checkpoint.state
    return found


def prune_mistakes(store: backstay.Store, was: dict[str, Answer]) -> list[str]:
    """Prune, and return what is wrong then: other threads are pruned, nothing that cannot be judged is."""
    before = states(store)
    marks = was["alpha everything"].marks
    plan = store.prune(Keep(last=1, tagged=False), dry_run=True)
    done = store.prune(Keep(last=1, tagged=False))
    wrong = []
    for name in THREADS[1:]:
        left = [entry.id for entry in store.thread(name).history(branch="*") if isinstance(entry, CheckpointMeta)]
        if set(left) != {f"{name[0]}{what}" for what in ("-fork", 4, 2, 0)}:
            wrong.append(f"prune left {left} of {name}")
    if [mark.id for mark in plan.damaged] != [mark.id for mark in done.damaged]:
        wrong.append(f"prune planned with {plan.damaged}, and met {done.damaged}")
    if not {mark.id for mark in marks} <= {mark.id for mark in done.damaged}:
        wrong.append(f"prune says {done.damaged}, lists say {marks}")
    after = states(store)
    for name in {name for name in before if name not in done.checkpoints}:
        if after.get(name) != before[name]:
            wrong.append(f"prune took something of {name} away")
    listed = {mark.id for mark in ask(store)["alpha everything"].marks}
    if not {mark.id for mark in marks if mark.id} <= listed:
        wrong.append(f"prune deleted one of {marks}")
    store.stats(), store.check()
    store.thread("gamma").delete()
    if [meta.thread_id for meta in store.threads(on_damage="mark")].count("gamma"):
        wrong.append("gamma is there after it was deleted")
    try:
        store.thread("alpha").delete()
    except Corrupted:  # the row of a branch must be repaired first
        store.repair(dry_run=False)
        store.thread("alpha").delete()
    return wrong


# Drawing damage ---------------------------------------------------------------------------------------------------


def garbage(rng: random.Random, old: Any) -> Any:
    """Return something else of the type that a column has."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([0, -1, 2**63 - 1, -(2**63), rng.getrandbits(62), rng.randrange(1000)])
    if isinstance(old, str):
        return rng.choice(["", "\x1b[31m", "ключ", "x" * 300, "".join(map(chr, rng.choices(range(32, 0x2FF), k=9)))])
    forms = [b"", b"\xc1", ormsgpack.packb([1]), ormsgpack.packb({"metadata": 5}), b"\x91" * 2000, b"\x01\xff\xfe"]
    forms += [ormsgpack.packb({"nobody": "knows"}), ormsgpack.packb({"a": "x"}), ormsgpack.packb({"continuation": 1})]
    forms += [rng.randbytes(rng.randrange(1, 40)) for _ in range(4)]
    if old:
        at = rng.randrange(len(old))
        forms += [old[:at] + bytes([old[at] ^ 1 << rng.randrange(8)]) + old[at + 1 :], old[:at]]
    return rng.choice([form for form in forms if form != old])


def fitting(rng: random.Random, table: str, column: str, old: Any) -> Any:
    """Return garbage that the column takes; a value where there was none is of its type."""
    if old is None:
        old = "" if column == "owner" else 1 if column in ("base", "due") else b"\0"
    new = garbage(rng, old)
    return new if not (table in ("write", "blob", "chunk") and column == "size") else abs(new) % 2**31


def drawn(columns_of: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    for table, columns in columns_of.items():
        for column in columns:
            for _ in range(ROUNDS):
                yield table, column


def judge(
    store: backstay.Store, right: dict[str, Answer], table: str, column: str, label: str, counts: Counter[str]
) -> dict[str, Answer]:
    got = ask(store)
    renamed = column in ("id", "key") or (table, column) == ("branch", "head")
    wrong = mistakes(right, got, SHOWN_AS_STORED.get((table, column), set()), renamed)
    assert not wrong, f"seed {SEED}, {label}: {wrong}"
    counts["reported" if any(answer.marks for answer in got.values()) else "not seen by any list"] += 1
    return got


# SQLite -----------------------------------------------------------------------------------------------------------

OF_ALPHA = {
    "checkpoint": "key >> 32 IN (SELECT id FROM branch WHERE thread = 1)",
    "branch": "thread = 1",
    "tag": "checkpoint >> 32 IN (SELECT id FROM branch WHERE thread = 1)",  # PostgreSQL
    "thread": "id = 1",
    "record": "thread = 1",
    "write": "thread = 1",
    "blob": "id = 1",
    "chunk": "true",
}
SQLITE_COLUMNS = {
    **{table: columns for table, columns in COLUMNS.items() if table != "tag"},
    "checkpoint": (*COLUMNS["checkpoint"], "back", "tags"),
    "branch": (*COLUMNS["branch"], "token", "expires", "boot", "seal", "lease_seal"),
    "record": (*COLUMNS["record"], "namespace", "seal"),
    "thread": ("floor", "seal"),
}
"""The indexes follow each change. tests/store/test_sqlite_check.py has damage that they do not follow, and names."""

PRIMARY = {
    "checkpoint": "key",
    "branch": "id",
    "thread": "id",
    "record": "place",
    "write": "task",
    "blob": "id",
    "chunk": "address",
}


@pytest.mark.effort
def test_sqlite_tells_of_damage_in_any_column_and_prunes_on(tmp_path: Path, show: Show) -> None:
    rng = random.Random(SEED)
    with backstay.open(tmp_path / "sound.db", clock=damage.clock) as store:
        fill(store)
        right = ask(store)
    counts: Counter[str] = Counter()
    for table, column in drawn(SQLITE_COLUMNS):
        path = Path(shutil.copy(tmp_path / "sound.db", tmp_path / "damaged.db"))
        keys = damage.change(path, f"SELECT {PRIMARY[table]}, {column} FROM {table} WHERE {OF_ALPHA[table]}")
        key, old = rng.choice(keys)
        new = fitting(rng, table, column, old)
        damage.change(path, f"UPDATE {table} SET {column} = ? WHERE {PRIMARY[table]} = ?", (new, key))
        label = f"{table}.{column} of {key}: {old!r:.80} -> {new!r:.80}"
        with backstay.open(path) as store:
            got = judge(store, right, table, column, label, counts)
            wrong = prune_mistakes(store, got)
            assert not wrong, f"seed {SEED}, {label}: {wrong}"
    show("damaged SQLite rows", f"seed {SEED}, {dict(counts)}, 0 wrong")
    assert counts["reported"] > counts.total() // 4


# PostgreSQL -------------------------------------------------------------------------------------------------------


@pytest.mark.effort
def test_postgres_tells_of_damage_in_any_column(postgres: PostgresServer, postgres_url: str, show: Show) -> None:
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()
    with backstay.open(postgres_url, clock=damage.clock) as store, postgres.connect() as connection:
        fill(store)
        right = ask(store)
        connection.execute(f"SET search_path = {postgres_url.rpartition('schema=')[2].partition('&')[0]}")
        (blob,) = connection.execute("SELECT digest FROM blob ORDER BY ctid LIMIT 1").fetchone() or (b"",)
        for table, column in drawn(COLUMNS):
            of_alpha = OF_ALPHA[table] if table != "blob" else f"encode(digest, 'hex') = '{blob.hex()}'"
            keys = connection.execute(f"SELECT ctid, {column} FROM {table} WHERE {of_alpha}").fetchall()
            if not keys:
                assert table == "chunk"  # small bytes are in another table
                continue
            place, old = rng.choice(keys)
            new = fitting(rng, table, column, old)
            if isinstance(new, str):
                new = new.replace("\0", "")
            if column == "base" and isinstance(new, int):
                new = b"\1" * new  # a digest here
            change = f"UPDATE {table} SET {column} = %s WHERE ctid = %s RETURNING ctid"
            (place,) = connection.execute(change, (new, place)).fetchone() or (place,)
            judge(store, right, table, column, f"{table}.{column}: {old!r:.80} -> {new!r:.80}", counts)
            connection.execute(change, (old, place))
        assert ask(store) == right
    show("damaged PostgreSQL rows", f"seed {SEED}, {dict(counts)}, 0 wrong")
    assert counts["reported"] > counts.total() // 4


@pytest.mark.parametrize("column", ["notes", "manifest", "id"])
def test_postgres_prunes_on_past_a_damaged_row(column: str, postgres: PostgresServer, postgres_url: str) -> None:
    """What the attack did: notes of rows that no list could read, and a prune that stopped for all threads."""
    with backstay.open(postgres_url) as store, postgres.connect() as connection:
        fill(store)
        connection.execute(f"SET search_path = {postgres_url.rpartition('schema=')[2].partition('&')[0]}")
        connection.execute(f"UPDATE checkpoint SET {column} = '\\xc1' WHERE id = %s", (b"\1\0a2",))
        got = ask(store)
        reported = [(mark.thread_id, mark.seq) for mark in got["alpha history"].marks]
        assert reported == ([] if column == "manifest" else [("alpha", 3)])  # lists need no manifest
        plan = store.prune(Keep(last=1, tagged=False), dry_run=True)
        judged = [name for name in plan.checkpoints if name[0] == "a"]
        assert judged == (["a3", "a1"] if column == "manifest" else ["a3"])  # the parent of what cannot be read stays
        assert prune_mistakes(store, got) == []


# Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.effort
def test_memory_tells_of_damage_in_any_field(show: Show) -> None:
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()
    fields = ("parent_id", "parent_digest", "step", "created_us", "digest", "notes", "size", "manifest", "tags")
    for name in (field for field in fields for _ in range(2 * ROUNDS)):
        with backstay.open("memory:", clock=damage.clock) as store:
            fill(store)
            right = ask(store)
            backend = access_of(store).store
            assert isinstance(backend, MemoryStore)
            tables = backend._tables
            row = tables.rows["", f"a{rng.randrange(STEPS)}"]
            if name == "tags":
                tables.tags["", row.id] = ("", "\x1b[31m")
            else:
                bad = row._replace(**{name: fitting(rng, "row", name, getattr(row, name))})
                tables.rows["", row.id] = bad
                tables.branches[row.branch].rows = [
                    bad if each.id == row.id else each for each in tables.branches[row.branch].rows
                ]
            got = judge(store, right, "tag" if name == "tags" else "row", "name", f"{row.id}.{name}", counts)
            assert prune_mistakes(store, got) == []
    show("damaged rows in memory", f"seed {SEED}, {dict(counts)}, 0 wrong")


def test_a_page_full_of_damage_neither_ends_a_list_nor_counts() -> None:
    with backstay.open("memory:") as store:
        thread = store.thread("t")
        for number in range(700):
            thread.save({"n": number}, id=f"c{number}", metadata={"user": 1})
        backend = access_of(store).store
        assert isinstance(backend, MemoryStore)
        (branch,) = backend._tables.branches.values()
        branch.rows = [row if row.seq % 300 < 3 else row._replace(notes=b"\xc1") for row in branch.rows]
        sound = [row.id for row in reversed(branch.rows) if row.notes != b"\xc1"]
        assert 5 < len(sound) < 20

        for limit, where in ((None, {}), (None, {"user": 1}), (5, {}), (5, {"user": 1})):
            listed = list(thread.history(on_damage="mark", limit=limit, where=where))
            assert [entry.id for entry in listed if isinstance(entry, CheckpointMeta)] == sound[:limit]
            places = [entry.seq for entry in listed]
            assert places == list(range(700, places[-1] - 1, -1))
            assert limit is not None or places[-1] == 1
        assert [meta.thread_id for meta in store.threads(on_damage="mark")] == ["t"]
        pruned = store.prune(Keep(last=1))
        assert (len(pruned.damaged), pruned.kept) == (700 - len(sound), 700 - pruned.deleted)


# Directory --------------------------------------------------------------------------------------------------------


def _slice(data: bytes, at: int, length: int) -> bytes:
    return data[at : at + length]


def test_directory_tells_of_damage_in_any_record(tmp_path: Path, show: Show) -> None:
    rng = random.Random(SEED)
    with backstay.open(f"dir:{tmp_path / 'sound'}", clock=damage.clock) as store:
        fill(store)
        right = ask(store)
    counts: Counter[str] = Counter()
    logs = [log for log in (tmp_path / "sound").rglob("*.log") if b"alpha" in log.read_bytes()]
    for log in logs:
        data = log.read_bytes()
        mark = data[FILE_HEAD_BYTES - 8 : FILE_HEAD_BYTES]
        for part in scan(partial(_slice, data), mark, FILE_HEAD_BYTES, len(data)):
            if not isinstance(part, RecordFrame):
                continue
            place = rng.randrange(part.start, part.payload_at)
            folder = Path(shutil.copytree(tmp_path / "sound", tmp_path / "damaged"))
            (folder / log.relative_to(tmp_path / "sound")).write_bytes(damage.flip(data, place))
            with backstay.open(f"dir:{folder}") as store:
                got = ask(store)
                # What was at that place is gone, so lists may lack it; but each that may lack it says so.
                threads = {mark.thread_id for mark in got["threads"].marks}
                others = [name for name in got if name.startswith("beta") and threads == {"alpha"}]
                told = [name for name in got if got[name].marks and isinstance(got[name].error, Corrupted)]
                label = f"seed {SEED}, {log.name} at {place}"
                assert [name for name in got if name not in others] == told, label
                assert {name: got[name] for name in others} == {name: right[name] for name in others}, label
                pruned = store.prune(Keep(last=1))
                assert {each.thread_id for each in pruned.damaged} == threads
                left = [entry.id for entry in store.thread("beta").history(on_damage="mark") if entry.id]
                assert left == ["b4", "b2", "b1", "b0"], label  # the newest, an origin, a tag, a question
                counts["one thread" if others else "any thread"] += 1
            shutil.rmtree(folder)
    show("damaged records of logs", f"seed {SEED}, {dict(counts)}, 0 silent")
    assert counts["one thread"] > 10


# Other faces ------------------------------------------------------------------------------------------------------


def test_async_lists_tell_of_damage_as_the_others_do(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with backstay.open(path) as store:
        fill(store)
    damage.change(path, "UPDATE checkpoint SET notes = x'c1' WHERE id = 'a3'")
    damage.change(path, "UPDATE record SET version = 9 WHERE thread = 1")
    damage.change(path, "UPDATE branch SET head = 77 WHERE thread = 1")

    async def drain(entries: Any) -> list[Any]:
        return [entry async for entry in entries] if hasattr(entries, "__aiter__") else list(await entries)

    async def main() -> None:
        async with await backstay.aopen(path) as store:
            thread = store.thread("alpha")
            lists: dict[str, Callable[..., Any]] = {
                "history": thread.history,
                "branches": thread.branches,
                "interrupts": thread.interrupts,
                "effects": thread.effects,
                "threads": store.threads,
                "all interrupts": store.interrupts,
                "runs": store.runs,
            }
            for name, listed in lists.items():
                marked = await drain(listed(on_damage="mark"))
                assert [each for each in marked if isinstance(each, Damaged) and each.thread_id == "alpha"], name
                with pytest.raises(Corrupted, match="alpha"):
                    await drain(listed())
            assert (await store.prune(Keep(last=1))).damaged

    asyncio.run(main())


def test_langgraph_gives_what_comes_before_a_damaged_checkpoint(tmp_path: Path) -> None:
    from langgraph.graph import START, StateGraph

    from backstay.langgraph import BackstaySaver

    path = tmp_path / "store.db"
    graph: Any = StateGraph(dict)
    graph.add_node("n", lambda state: {"n": state.get("n", 0) + 1})
    graph.add_edge(START, "n")
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with contextlib.closing(BackstaySaver(path)) as saver:
        for _ in range(3):
            graph.compile(checkpointer=saver).invoke({"n": 1}, config)
        right = [found.config["configurable"]["checkpoint_id"] for found in saver.list(config)]
        rows = access_of(saver.store).store.find(Query("", "t"))
    hurt = rows[4].id
    damage.change(path, "UPDATE checkpoint SET notes = x'c1' WHERE key & 4294967295 = ?", (rows[4].seq,))

    with contextlib.closing(BackstaySaver(path)) as saver:
        ways: list[dict[str, Any]] = [{}, {"filter": {"source": "loop"}}, {"filter": {"step": 0}}, {"limit": 6}]
        for wanted in ways:
            found: list[str] = []
            listed = saver.list(config, **wanted)
            with pytest.raises(Corrupted, match=hurt):
                found.extend(each.config["configurable"]["checkpoint_id"] for each in listed)
            assert found == right[:4] if "filter" not in wanted else set(found) <= set(right[:4])


def test_words_that_say_nothing_are_refused() -> None:
    with backstay.open("memory:") as store:
        for listed in (store.threads, store.runs, store.thread("t").history, store.thread("t").branches):
            with pytest.raises(backstay.InvalidInput, match="on_damage"):
                listed(on_damage="skip")  # type: ignore[call-overload, arg-type]


def test_a_branch_whose_head_is_lost_is_no_empty_branch(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with backstay.open(path) as store:
        fill(store)
    damage.change(path, "UPDATE branch SET head = 99 WHERE thread = 1 AND name = 'main'")

    with backstay.open(path) as store:
        thread = store.thread("alpha")
        for call in (thread.latest, lambda: thread.save({}), lambda: thread.append({"log": ["x"]})):
            with pytest.raises(Corrupted, match="branch 'main'"):
                call()
        assert [(entry.thread_id, entry.seq) for entry in thread.history(on_damage="mark")] == [("alpha", 0)]
        store.repair(dry_run=False)
        assert [meta.step for meta in thread.history()] == [5, 4, 3, 2, 1]
