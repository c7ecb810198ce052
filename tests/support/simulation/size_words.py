"""The words of programs that cross every size at which storage changes its ways: the sizes, and contents of such sizes.

The sizes are taken from the code, so a border that moves is crossed where it is then. Those that no test reaches at
their real size are brought nearer by ``lowered``, for some of the programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from random import Random
from typing import Any

import pytest

from backstay.pieces import head_state, manifest, splice
from backstay.store import layout, writes
from backstay.store.directory import frame, logs, rewrite
from backstay.store.directory import store as directory
from backstay.store.postgres import checkpoints as postgres_merge
from backstay.store.postgres import collect as postgres_compact
from backstay.store.sqlite import chunks as sqlite_chunks
from backstay.store.sqlite import database as sqlite_database
from backstay.store.sqlite import rows as sqlite_pending


def slots_of_schema() -> tuple[int, int]:
    """Return how many bytes one slot of PostgreSQL's table ``fresh`` stands for, and how many slots a stream has."""
    text = resources.files("backstay.store.postgres").joinpath("schema.sql").read_text()
    found = re.search(r"\(\(p_address >> (\d+)\) & (\d+)\)", text)
    assert found is not None, "put_fresh no longer says which slot an address has"
    return 1 << int(found[1]), int(found[2]) + 1


SLOT_BYTES, SLOTS = slots_of_schema()

BORDERS = {
    "a literal in a manifest": manifest.LITERAL_BYTES_MAX,
    "a value inside the manifest": manifest.INLINE_BYTES_MAX,
    "a run worth an address": splice.RUN_BYTES_MIN,
    "a sample of the old bytes": splice.ANCHOR_BYTES,
    "bytes that may be repeated before there is a base": head_state.BASE_WASTE_MIN,
    "a value that is found in another one": head_state.MOVED_BYTES_MIN,
    "parts that are kept apart in memory": head_state.PART_BYTES_MIN,
    "a value that is copied into its stream": head_state.SEED_BYTES_MAX,
    "bytes worth compressing": layout.COMPRESS_BYTES_MIN,
    "bytes compressed at once": layout.COMPRESS_AT_ONCE_BYTES,
    "a row that is remembered unpacked": layout.REMEMBERED_BYTES_MIN,
    "a slot": SLOT_BYTES,
    "PostgreSQL's window": postgres_merge.WINDOW_BYTES,
    "PostgreSQL's window when compacting": postgres_compact.WINDOW_BYTES,
    "SQLite's small window": sqlite_chunks.WINDOWS_BYTES[0],
    "SQLite's large window": sqlite_chunks.WINDOWS_BYTES[1],
    "a page": sqlite_database.PAGE_BYTES,
    "a sector": frame.SECTOR_BYTES,
    "what is read of a log at a time": frame.WINDOW_BYTES,
    "a run in a log written anew": rewrite.RUN_BYTES,
    "a log worth writing anew": directory.GARBAGE_BYTES_MIN,
    "room taken in advance": logs.ROOM_BYTES_MAX,
}
"""Sizes of values and of what is added to them."""

WRITE_BORDERS = (writes._COMPRESS_BYTES_MIN, sqlite_pending.INLINE_BYTES_MAX, sqlite_pending.PIECE_BYTES)
"""Sizes of pending writes."""

PIECES = (manifest.PIECES_MAX_INLINE, head_state.CONSOLIDATE_PIECES_MIN, 3 * head_state.CONSOLIDATE_PIECES_MIN)
"""Numbers of edits at once."""

KEY_COUNTS = (3, 40, manifest.PLACES_MAX - 1, manifest.PLACES_MAX + 1)
LIST_COUNTS = (16, 65_536)  # where msgpack writes a list's length otherwise

WINDOWS = sorted({size for size in BORDERS.values() if size >= SLOT_BYTES})
USUAL_BYTES_MAX = 300_000
LARGE_BYTES_MAX = 2_500_000


LOWERED = {
    "backstay.pieces.head_state.STREAM_BYTES_MAX": 90_000,
    "backstay.store.directory.rewrite.RECORD_BYTES": 50_000,
    "backstay.store.directory.store.GARBAGE_BYTES_MIN": 2_000,
    "backstay.store.directory.frame.WINDOW_BYTES": 700,
    "backstay.bundle.importer.BATCH_BYTES": 40_000,
    "backstay.bundle.importer.BATCH_ROWS": 7,
    "backstay.store.postgres.repair.BRANCHES_AT_ONCE": 2,
}
"""Borders that are far away, and where they are put for some programs, besides those with everything where it is."""


@contextmanager
def lowered() -> Iterator[None]:
    """Bring far borders near."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOWERED.items():
            patch.setattr(name, value)
        yield


def around(chance: Random, border: int) -> int:
    """Return a size one below, at, one above or well past a border."""
    return max(1, border + chance.choice((-1, 0, 1, border // 2)))


def some_size(chance: Random, most: int) -> int:
    """Return a size about some border, small ones as often as large ones."""
    return around(chance, chance.choice([size for size in sorted(set(BORDERS.values())) if size <= most]))


def some_text(chance: Random, size: int) -> str:
    """Return so many characters; half of the texts compress well and repeat themselves, the others do neither."""
    if chance.random() < 0.5:
        return chance.randbytes(size // 2 + 1).hex()[:size]
    line = f"{chance.randrange(10**6):06} said the same thing. "
    return (line * (size // len(line) + 1))[:size]


def some_item(chance: Random, size: int) -> Any:
    """Return an item that takes exactly so many bytes in the body of a list."""
    if size < 3:
        return 200 if size == 2 else 7
    text = some_text(chance, size - text_header(size))
    return text if len(text) + header_of(len(text)) == size else text.encode()[: size - 2]


def text_header(size: int) -> int:
    """Return how many bytes of a text of this encoded size are not its own."""
    return 1 if size <= 32 else 2 if size <= 257 else 3 if size <= 65538 else 5


def header_of(length: int) -> int:
    """Return how many bytes msgpack writes before a text of this length."""
    return 1 if length < 32 else 2 if length < 256 else 3 if length < 65536 else 5


def some_value(chance: Random, key: str, size: int) -> Any:
    """Return a value of the type that a key has, whose body takes so many bytes."""
    if key == "text":
        return some_text(chance, size)
    if key == "raw":
        return some_text(chance, size).encode()
    if key == "tree":
        return {"n": size, "items": some_value(chance, "log", size)}
    items = []
    while size > 0:
        part = size if size < 40 else min(size, chance.choice((30, 300, 900, 5_000, 20_000, size)))
        items.append(some_item(chance, part))
        size -= part
    return items


def size_of(value: Any) -> int:
    """Return about how many bytes a value takes."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return (
        sum(len(item) + 3 if isinstance(item, str | bytes) else 1 for item in value)
        if isinstance(value, list)
        else len(value)
        if isinstance(value, str | bytes)
        else 1
    )
