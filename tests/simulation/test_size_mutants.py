"""Stores that lose or keep a byte too many on purpose: the programs about sizes must catch each, or prove nothing."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from backstay.pieces.manifest import OFFSET_BITS, Coverage, is_needed, merge_ranges
from backstay.store import layout, reachability
from backstay.store.directory import rewrite
from backstay.store.memory import chunks as memory_chunks
from backstay.store.postgres import checkpoints as postgres_merge
from backstay.store.postgres import collect as postgres_collect
from backstay.store.postgres import collect as postgres_compact
from backstay.store.postgres import queries as postgres_queries
from backstay.store.sqlite import chunks as sqlite_chunks
from backstay.store.sqlite import queries as sqlite_queries
from support.postgres import PostgresServer
from support.simulation.size_programs import Wrong, play
from support.simulation.size_stores import DirectoryPlace, MemoryPlace, Place, PostgresPlace, SqlitePlace, fast_url

PROGRAMS_MAX = 10
"""How many programs may be needed, from the one on that is named with the mutant: the first that caught it."""

EVERYWHERE = ("memory", "sqlite", "dir", "postgres")
TABLES = ("memory", "dir")


class Mutant(NamedTuple):
    """A change of one place in the code: which function or text, what stands there, what is there instead.

    Where two places guard the same bytes, both must change: the other is the mutant ``also``.
    """

    name: str
    where: Any  # a function, or the module whose text is called ``named``
    old: str
    new: str
    seeds: dict[str, int]  # for each store: the first program that catches it
    named: str = ""  # of the text in the module, or of the method in its class
    owner: type | None = None
    also: Any = None  # another Mutant


def apply(patch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Change the code. What is to be changed must be there exactly once: the mutants follow the code or fail."""
    if mutant.also is not None:
        apply(patch, mutant.also)
    if inspect.ismodule(mutant.where):
        text = getattr(mutant.where, mutant.named)
        assert text.count(mutant.old) == 1, mutant
        patch.setattr(mutant.where, mutant.named, text.replace(mutant.old, mutant.new))
        return
    changed = rewritten(mutant.where, mutant.old, mutant.new)
    if mutant.owner is not None:
        patch.setattr(mutant.owner, mutant.where.__name__, changed)
    else:
        put_in_place(patch, mutant.where, changed)


def rewritten(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a function with a part of its text replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (function, old)
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), str(function), "exec"), sys.modules[function.__module__].__dict__, made)
    return made[function.__name__]  # type: ignore[no-any-return]


def put_in_place(patch: pytest.MonkeyPatch, original: object, changed: object) -> None:
    """Replace a function wherever it was imported to."""
    for name, module in list(sys.modules.items()):
        if name.startswith("backstay."):
            for key, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, key, changed)


NO_OTHERS_NEAR = Mutant(
    "checkpoints near a deleted one, but in other branches, do not count",
    reachability.losses,
    "manifest in near:",
    "manifest in [each for each in near if each[0] in of_branch]:",
    {},  # alone it is not wrong, only slower: the references still count
)
MUTANTS = [
    Mutant(
        "a row of which only the first byte is needed goes",
        is_needed,
        "(ranges, start,",
        "(ranges, start + 1,",
        {"memory": 4, "sqlite": 11, "dir": 4, "postgres": 41},
    ),
    Mutant(
        "a row of which only the last byte is needed goes",
        is_needed,
        "ranges[first][0] < end",
        "ranges[first][0] < end - 1",
        {"memory": 15, "sqlite": 11, "dir": 15, "postgres": 37},
    ),
    Mutant(
        "a row that begins where a needed range ends stays",
        is_needed,
        "(ranges, start,",
        "(ranges, start - 1,",
        {"memory": 15, "sqlite": 21, "dir": 3, "postgres": 3},
    ),
    Mutant(
        "a row that ends where a needed range begins stays",
        is_needed,
        "ranges[first][0] < end",
        "ranges[first][0] <= end",
        {"memory": 3, "sqlite": 3, "dir": 3, "postgres": 3},
    ),
    Mutant(
        "a range ends one byte early",
        Coverage.add,
        "piece.start + piece.length))",
        "piece.start + piece.length - 1))",
        {"memory": 4, "sqlite": 41, "dir": 4, "postgres": 41},
        owner=Coverage,
    ),
    Mutant(
        "a range begins one byte late",
        Coverage.add,
        ".add((piece.start,",
        ".add((piece.start + 1,",
        {"memory": 15, "sqlite": 37, "dir": 15, "postgres": 37},
        owner=Coverage,
    ),
    Mutant(
        "a range ends one byte late",
        Coverage.add,
        "piece.start + piece.length))",
        "piece.start + piece.length + 1))",
        {"memory": 3, "sqlite": 3, "dir": 3, "postgres": 3},
        owner=Coverage,
    ),
    Mutant(
        "a range begins one byte early",
        Coverage.add,
        ".add((piece.start,",
        ".add((piece.start - 1,",
        {"memory": 3, "sqlite": 3, "dir": 3, "postgres": 3},
        owner=Coverage,
    ),
    Mutant(
        "of two ranges that overlap the end of the later one counts",
        merge_ranges,
        "max(end, merged[-1][1])",
        "end",
        {"memory": 7, "sqlite": 7, "dir": 7, "postgres": 7},
    ),
    Mutant(
        "the ranges in a table are forgotten",
        Coverage.add,
        "pieces += self._tables[entry.table]",
        "pass",
        {"memory": 4, "sqlite": 4, "dir": 4, "postgres": 4},
        owner=Coverage,
    ),
    Mutant(
        "the ranges of a journal are forgotten",
        Coverage.add,
        "for entry in decode_manifest(manifest, {} if base is None else self._bases[base]).values():",
        "for entry in [e for k, e in decode_manifest(manifest, self._bases.get(base, {})).items() if k != JOURNAL]:",
        {"memory": 13, "sqlite": 13, "dir": 13, "postgres": 13},
        owner=Coverage,
    ),
    Mutant(
        "a row is not read whose first byte is the range's last",
        memory_chunks.StoredBytes._over,
        ">= piece.start + piece.length",
        ">= piece.start + piece.length - 1",
        {"memory": 5, "dir": 9},
        owner=memory_chunks.StoredBytes,
    ),
    Mutant(
        "a row is not read whose last byte is the range's first",
        memory_chunks.StoredBytes._over,
        "kept[at][1].size > piece.start",
        "kept[at][1].size > piece.start + 1",
        {"memory": 15, "dir": 36},
        owner=memory_chunks.StoredBytes,
    ),
    Mutant(
        "one branch's references do not count",
        reachability.collect,
        "for branch in store.referring(source) if",
        "for branch in list(store.referring(source))[1:] if",
        {"memory": 0, "sqlite": 0, "dir": 0},
    ),
    Mutant(
        "other branches' ranges do not count",
        reachability.collect,
        "scan.unneeded_chunks(source, users)",
        "scan.unneeded_chunks(source, [user for user in users if user in lost.of_branch])",
        {"memory": 26, "sqlite": 26, "dir": 26},
        also=NO_OTHERS_NEAR,
    ),
    Mutant(
        "blobs are never given back",
        reachability.collect,
        "0 if users else",
        "0 if True else",
        {"memory": 0, "sqlite": 0, "dir": 0},
    ),
    Mutant(
        "a log written anew joins runs over a gap",
        rewrite._runs,
        "(offset != start + length or length >= RUN_BYTES)",
        "length >= RUN_BYTES",
        {"dir": 7},
    ),
    Mutant(
        "a log written anew forgets the last bytes",
        rewrite._bytes_in,
        "if blobs or chunks:",
        "if blobs:",
        {"dir": 1},
    ),
    Mutant(
        "the row below an address is looked for one byte too far",
        sqlite_queries,
        "address <= :start AND",
        "address <= :start + 1 AND",
        {"sqlite": 36},
        named="CHUNKS",
    ),
    Mutant(
        "a row is not read whose first byte is the range's last",
        sqlite_queries,
        "address < :end",
        "address < :end - 1",
        {"sqlite": 36},
        named="CHUNKS",
    ),
    Mutant(
        "a merged row is cut at its window's end",
        sqlite_chunks.merge_window,
        "else joined(run)",
        "else (joined(run) or b'')[: start + length - run[0][0]]",
        {"sqlite": 2},
    ),
    Mutant(
        "rows are merged over a gap",
        layout.touching,
        "runs[-1][-1][1] == row[0]",
        "runs[-1][-1][1] <= row[0]",
        {"sqlite": 20},
    ),
    Mutant(
        "a blob with one reference left goes",
        reachability.collect,
        "0 if users else",
        "0 if users[1:] else",
        {"memory": 0, "sqlite": 48, "dir": 0},
        also=NO_OTHERS_NEAR,
    ),
    Mutant(
        "a row is not read whose first byte is the range's last",
        postgres_queries,
        "c.address < r.stop",
        "c.address < r.stop - 1",
        {"postgres": 52},
        named="BYTES",
    ),
    Mutant(
        "a small row is not read whose last byte is the range's first",
        postgres_queries,
        "f.address + pg_catalog.length(f.body) > r.start",
        "f.address + pg_catalog.length(f.body) > r.start + 1",
        {"postgres": 37},
        named="BYTES",
    ),
    Mutant(
        "a merged row is cut at its window's end",
        postgres_merge.additions,
        "runs.pop()[1] + data)",
        "(runs.pop()[1] + data)[:WINDOW_BYTES])",
        {"postgres": 2},
    ),
    Mutant(
        "a compacted row is cut at its window's end",
        postgres_compact._merge,
        "= joined(rows) if",
        "= (joined(rows) or b'')[:WINDOW_BYTES] if",
        {"postgres": 11},
    ),
    Mutant(
        "a blob with one reference left goes",
        postgres_queries,
        "NOT EXISTS (SELECT 1 FROM {schema}.ref r WHERE r.stream = 0 AND r.digest = b.digest)",
        "(SELECT count(*) FROM {schema}.ref r WHERE r.stream = 0 AND r.digest = b.digest) < 2",
        {"postgres": 48},
        named="DROP_BLOBS",
    ),
    Mutant(
        "other branches' ranges do not count",
        postgres_collect._collect,
        "{*before, *others}",
        "{*before}",
        {"postgres": 26},
    ),
    Mutant(
        "a stream ends where its large rows do",
        postgres_queries,
        "greatest(",
        "least(",
        {"postgres": 7},
        named="HEAD",
    ),
]


# Mutants that are more than one change ------------------------------------------------------------------------------

OLD_ROW_SIZES = """
SELECT k.address, k.size FROM unnest(%(streams)s::bigint[]) s
JOIN {schema}.chunk k ON k.address >= s << 28 AND k.address < (s + 1) << 28
UNION ALL
SELECT f.address, length(f.body) FROM unnest(%(streams)s::bigint[]) s
JOIN {schema}.fresh f ON f.slot >= s << 6 AND f.slot < (s + 1) << 6"""
OLD_DROP = """
WITH small AS (
  DELETE FROM {schema}.fresh f USING unnest(%(addresses)s::bigint[]) a
  WHERE f.slot = (a >> 28 << 6) | ((a >> 10) & 63) AND f.address = a RETURNING length(body)),
large AS (DELETE FROM {schema}.chunk WHERE address = ANY(%(addresses)s::bigint[]) RETURNING length(body))
SELECT * FROM small UNION ALL SELECT * FROM large"""


def old_trim(connection: Any, kept: dict[int, list[tuple[int, int]]]) -> int:
    """Do what the collector of PostgreSQL once did: judge rows of both tables by address, and delete from both."""
    doomed = []
    for address, size in connection.every(OLD_ROW_SIZES, {"streams": list(kept)}):
        stream = address >> OFFSET_BITS
        start = address - (stream << OFFSET_BITS)
        if not is_needed(start, start + size, kept[stream]):
            doomed.append(address)
    return sum(length for (length,) in connection.every(OLD_DROP, {"addresses": doomed})) if doomed else 0


def old_drop(unneeded: postgres_collect.UnneededRows, connection: Any) -> int:
    """Do what a rebuild of PostgreSQL once did: the same, with rows that were judged apart."""
    addresses = [*unneeded.chunks, *unneeded.fresh]
    return sum(length for (length,) in connection.every(OLD_DROP, {"addresses": addresses})) if addresses else 0


def with_old_collector(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(postgres_collect, "_trim", old_trim)


def with_old_rebuild(patch: pytest.MonkeyPatch) -> None:
    trim = postgres_collect._trim

    def mended(connection: Any, kept: dict[int, list[tuple[int, int]]]) -> int:
        with pytest.MonkeyPatch.context() as back:
            back.setattr(postgres_collect.UnneededRows, "drop", drop)
            return trim(connection, kept)

    drop = postgres_collect.UnneededRows.drop
    patch.setattr(postgres_collect, "_trim", mended)
    patch.setattr(postgres_collect.UnneededRows, "drop", old_drop)


class Special(NamedTuple):
    name: str
    change: Callable[[pytest.MonkeyPatch], None]
    seed: int


SPECIAL = [
    Special("the old collector", with_old_collector, 30),
    Special("the old rebuild", with_old_rebuild, 262),
]


# The tests ----------------------------------------------------------------------------------------------------------


def caught_by(place: Place, first: int, programs: int = PROGRAMS_MAX) -> tuple[int, str] | None:
    """Return the first program that goes wrong, and how; None if none does."""
    for seed in range(first, first + programs):
        try:
            play(place, seed, Counter())
        except Wrong as wrong:
            cause = wrong.__cause__
            if isinstance(cause, AttributeError | TypeError | NameError):
                raise  # a mutant that does not even run proves nothing
            return seed, str(wrong).split("\n")[0]
    return None


PLACES: dict[str, Callable[[], Place]] = {"memory": MemoryPlace, "sqlite": SqlitePlace, "dir": DirectoryPlace}
EACH = [(mutant, store) for mutant in MUTANTS for store in mutant.seeds]


@pytest.fixture(scope="module")
def postgres_place(postgres: PostgresServer) -> Iterator[Place]:
    opened = PostgresPlace(fast_url(postgres, "t_size_mutants"))
    yield opened
    opened.close()


@pytest.mark.effort(2)
@pytest.mark.parametrize(("mutant", "store"), EACH, ids=[f"{store}: {mutant.name}" for mutant, store in EACH])
def test_the_programs_catch(
    mutant: Mutant, store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = request.getfixturevalue("postgres_place") if store == "postgres" else PLACES[store]()
    apply(monkeypatch, mutant)
    try:
        assert caught_by(place, mutant.seeds[store])
    finally:
        monkeypatch.undo()
        if store != "postgres":
            place.close()


@pytest.mark.effort(2)
@pytest.mark.parametrize("mutant", SPECIAL, ids=lambda mutant: mutant.name)
def test_the_programs_catch_in_postgresql(
    mutant: Special, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.change(monkeypatch)
    place = PostgresPlace(fast_url(postgres, f"t_size_mutant_{SPECIAL.index(mutant)}"))
    try:
        assert caught_by(place, mutant.seed)
    finally:
        place.close()
