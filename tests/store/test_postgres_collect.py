"""The bytes of streams in PostgreSQL stand in two tables; what nobody needs goes from each, and nothing else does."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import backstay
from backstay.pieces.manifest import Range, is_needed, merge_ranges
from backstay.store.layout import address_of, checksum_of, pack_body
from backstay.store.postgres import collect
from backstay.store.postgres import collect as compact
from backstay.store.postgres.checkpoints import WINDOW_BYTES
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.find import read_ranges
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.target import parse_url
from backstay.testing.drafts import wait_until
from support.postgres import PostgresServer
from support.running import Show, effort

LAYOUTS = max(20, 10 * effort())
STREAM = 7
SLOT_BYTES, SLOTS = 1024, 64
EDGES = [
    edge + step for edge in (0, SLOT_BYTES, WINDOW_BYTES, 2 * WINDOW_BYTES, 3 * WINDOW_BYTES) for step in (-1, 0, 1)
]

ADD_CHUNK = "INSERT INTO {schema}.chunk VALUES (%s, %s, %s)"
ADD_FRESH = "INSERT INTO {schema}.fresh VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
ROWS = """
SELECT false, address, size FROM {schema}.chunk UNION ALL SELECT true, address, length(body) FROM {schema}.fresh"""

Ranges = list[tuple[int, int]]


@pytest.fixture
def connection(postgres_url: str) -> Iterator[DeadlineConnection]:
    """Return a connection to a store without a checkpoint, in a transaction that is given up at the end."""
    backstay.open(postgres_url).close()
    link = RetryingPool(parse_url(postgres_url))
    with link.connect() as opened:
        yield opened
    link.close()


def cuts(rng: random.Random, total: int, most: int) -> list[int]:
    """Return places in a stream, many of them at the edges of slots and windows."""
    found = {rng.choice(EDGES) if rng.random() < 0.5 else rng.randrange(total) for _ in range(rng.randint(2, most))}
    return sorted(place for place in found if 0 <= place <= total)


def laid_out(connection: DeadlineConnection, rng: random.Random, data: bytes) -> Ranges:
    """Fill both tables as any history of saves, merges and deletes may have: return which bytes are there."""
    places = cuts(rng, len(data), 12)
    held: Ranges = []
    for start, end in itertools.pairwise(places):
        if rng.random() < 0.7:
            connection.run(ADD_CHUNK, (address_of(STREAM, start), end - start, pack_body(data[start:end])))
            held.append((start, end))
    for place in {*cuts(rng, len(data), 40), *(start for start, _ in held)}:
        length = rng.choice([1, 100, SLOT_BYTES, 2000])
        slot = STREAM * SLOTS + (place // SLOT_BYTES) % SLOTS
        body = data[place : place + length]
        check = len(body).to_bytes(4) + checksum_of(body)
        if body and connection.run(ADD_FRESH, (slot, address_of(STREAM, place), body, check)):
            held.append((place, place + len(body)))
    return merge_ranges(held)


def needed(rng: random.Random, held: Ranges) -> Ranges:
    """Return some of the bytes that are there, as manifests would need them."""
    wanted = []
    for start, end in held:
        for _ in range(rng.randint(0, 2)):
            low = rng.choice([start, rng.randrange(start, end), *(edge for edge in EDGES if start <= edge < end)])
            high = rng.choice([low + 1, end, rng.randint(low + 1, end)])
            wanted.append((low, high))
    return merge_ranges(wanted)


def left(connection: DeadlineConnection) -> list[tuple[bool, int, int]]:
    return [(fresh, place - address_of(STREAM, 0), size) for fresh, place, size in connection.every(ROWS)]


def read(connection: DeadlineConnection, ranges: Ranges) -> list[bytes]:
    wanted = [Range(STREAM, start, end - start) for start, end in ranges]
    return [b"".join(parts) for parts in read_ranges(connection, wanted)]


@pytest.mark.effort
@pytest.mark.parametrize("deleter", ["collect", "compact"])
def test_what_is_needed_stays_readable_and_nothing_else_stays(
    connection: DeadlineConnection, deleter: str, show: Show
) -> None:
    both = dropped = 0
    for seed in range(LAYOUTS):
        rng = random.Random(seed)
        data = rng.randbytes(rng.choice([3 * WINDOW_BYTES, WINDOW_BYTES + 1, 3000]))
        connection.execute("BEGIN")
        held = laid_out(connection, rng, data)
        kept = held if deleter == "compact" else needed(rng, held)
        before = left(connection)
        both += len({place for fresh, place, _ in before if fresh} & {place for fresh, place, _ in before if not fresh})

        if deleter == "compact":
            compact._compact_stream(connection, STREAM)
        else:
            collect._trim(connection, {STREAM: kept})

        assert read(connection, kept) == [data[start:end] for start, end in kept], seed
        after = left(connection)
        if deleter == "collect":
            assert sorted(after) == sorted(row for row in before if is_needed(row[1], row[1] + row[2], kept)), seed
        dropped += len(before) - len(after)
        connection.execute("ROLLBACK")

    assert both > LAYOUTS
    assert dropped > LAYOUTS
    show(f"{deleter}: layouts, addresses in both tables, rows dropped", (LAYOUTS, both, dropped))


# The same through the store ---------------------------------------------------------------------------------------


def slide(thread: backstay.Thread) -> dict[str, Any]:
    """Let a list pass a window by small appends, then keep only its end; return the state."""
    for number in range(100):
        thread.append({"log": [f"{number:03} " + "x" * 900]})
    return dict(thread.save({"log": current(thread)["log"][-60:]}).state)


def current(thread: backstay.Thread) -> Mapping[str, Any]:
    newest = thread.latest()
    assert newest is not None
    return newest.state


def test_a_sliding_window_of_messages_survives_pruning(postgres_url: str) -> None:
    with backstay.open(postgres_url) as store:
        expected = slide(store.thread("agent"))
        store.thread("agent").prune(backstay.Keep(last=1))

        assert current(store.thread("agent")) == expected
        assert store.check()


def test_a_repair_drops_rows_that_nobody_needs_and_no_other(postgres_url: str, postgres: PostgresServer) -> None:
    schema = parse_url(postgres_url).schema
    with backstay.open(postgres_url) as store:
        expected = slide(store.thread("agent"))
        with postgres.connect() as admin:  # as if a delete had stopped before it came to the bytes
            admin.execute(
                f"with gone as (delete from {schema}.checkpoint where key & 4294967295 < 101 returning id, digest)"
                f" update {schema}.checkpoint c set parent_digest = g.digest from gone g where c.parent = g.id".encode()
            )
        repaired = store.repair(dry_run=False)

        assert repaired, str(repaired)
        assert repaired.before is not None
        assert any(finding.what == "bytes that no checkpoint needs" for finding in repaired.before.findings)
        assert current(store.thread("agent")) == expected
        assert store.check()


def test_a_window_that_is_left_again_after_a_delete_is_merged_once_more(postgres_url: str) -> None:
    """The first small row is in both tables; then the stream ends there again, and the row in ``fresh`` grows."""
    with backstay.open(f"{postgres_url}&timeout=3") as store:
        thread = store.thread("agent")
        log: list[str] = []
        for letter, length in ("a", 20_000), ("b", 20_000), ("c", 100):
            log.append(letter * length)
            thread.append({"log": log[-1:]})
        doomed = [thread.append({"log": ["x" * length]}).id for length in (20_000, 200, 30_000)]
        for name in reversed(doomed):
            thread.delete_checkpoint(name)
        thread.latest()
        for letter, length in ("d", 100), ("e", 20_000), ("g", 100), ("h", 30_000), ("i", 100):
            log.append(letter * length)
            thread.append({"log": log[-1:]})

        assert current(store.thread("agent")) == {"log": log}
        store.compact()
        assert current(store.thread("agent")) == {"log": log}
        thread.save({"log": log[3:]})
        thread.prune(backstay.Keep(last=1))
        assert current(store.thread("agent")) == {"log": log[3:]}
        assert store.check()


# How much is read -------------------------------------------------------------------------------------------------


def rows_touched(postgres: PostgresServer, url: str, table: str, call: Callable[[backstay.Store], object]) -> int:
    """Return how many rows of a table a call reads or changes: the server counts them when a connection ends."""
    name = f"counted-{uuid.uuid4().hex}"

    def count() -> int:
        with postgres.connect() as admin:
            wait_until(lambda: not admin.execute(f"{ENDED} '{name}'".encode()).fetchall())
            found = admin.execute(COUNTED, (f"{parse_url(url).schema}.{table}",)).fetchone()
        assert found is not None
        return int(found[0])

    before = count()
    with backstay.open(f"{url}&application_name={name}") as store:
        call(store)
    return count() - before


ENDED = "select 1 from pg_stat_activity where application_name ="
COUNTED = """
select coalesce(idx_tup_fetch, 0) + seq_tup_read + n_tup_ins + n_tup_upd + n_tup_del from pg_stat_user_tables
where relid = %s::regclass"""


def test_deleting_one_checkpoint_does_not_read_the_thread(
    postgres: PostgresServer, postgres_url: str, show: Show
) -> None:
    log = [f"{number}" * 100 for number in range(300)]
    with backstay.open(f"{postgres_url}&application_name=filling") as store:
        ids = [store.thread("agent").append({"log": [line]}).id for line in log]
    with postgres.connect() as admin:
        wait_until(lambda: not admin.execute(f"{ENDED} 'filling'".encode()).fetchall())
    calls: dict[str, Callable[[backstay.Store], object]] = {
        "delete": lambda store: store.thread("agent").delete_checkpoint(ids[150]),
        "check": lambda store: store.check(),  # that it is counted
    }
    touched = {what: rows_touched(postgres, postgres_url, "checkpoint", call) for what, call in calls.items()}
    show("rows of 300 checkpoints touched by one call", touched)

    assert touched.pop("check") >= 300
    assert max(touched.values()) < 60


def test_deleting_branches_that_share_many_streams_reads_each_reference_a_few_times(
    postgres: PostgresServer, postgres_url: str, show: Show
) -> None:
    """A chain of forks may have as many streams as branches, and the last branch needs all of them."""
    count, schema = 60, parse_url(postgres_url).schema
    with backstay.open(f"{postgres_url}&application_name=filling") as store:
        first = store.thread("agent").append({"log": ["a" * 100]})
        for number in range(count - 1):
            store.thread("agent").fork(first, branch=f"b{number}")
    with postgres.connect() as admin:
        wait_until(lambda: not admin.execute(f"{ENDED} 'filling'".encode()).fetchall())
        admin.execute(
            f"insert into {schema}.ref select br.id, 1000000 + n, false, '' from {schema}.branch br,"
            f" generate_series(1, {count}) n".encode()
        )
    touched = rows_touched(postgres, postgres_url, "ref", lambda store: store.thread("agent").delete())
    show("rows of 3600 references touched by the delete of their branches", touched)

    assert count * count <= touched < 10 * count * count
    with postgres.connect() as admin:
        assert admin.execute(f"select count(*) from {schema}.ref".encode()).fetchone() == (0,)
