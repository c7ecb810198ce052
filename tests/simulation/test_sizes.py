"""Random programs on every store whose values cross every size at which storage changes its ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from backstay.pieces.body import to_body
from backstay.store.base import Backend
from backstay.store.postgres import checkpoints as postgres_merge
from support.running import effort
from support.simulation.size_programs import KINDS, PHRASES, Wrong, play, program, shortest
from support.simulation.size_stores import DirectoryPlace, MemoryPlace, Place, PostgresPlace, SqlitePlace, fast_url
from support.simulation.size_words import BORDERS, SLOT_BYTES, SLOTS, some_item, some_size

PROGRAMS = 15 * effort()
"""How many programs each store gets."""

PLACES: dict[str, Callable[[], Place]] = {"memory": MemoryPlace, "sqlite": SqlitePlace, "dir": DirectoryPlace}


@pytest.mark.effort
@pytest.mark.parametrize("name", ["memory", "sqlite", "dir", "postgres"])
def test_every_checkpoint_that_stays_is_whole_and_nothing_else_stays(
    name: str, request: pytest.FixtureRequest, show: Callable[[str, object], None]
) -> None:
    place = open_place(name, request)
    counts: Counter[str] = Counter()
    try:
        for seed in range(PROGRAMS):
            try:
                play(place, seed, counts)
            except Wrong as wrong:
                raise shortest(place, seed) or wrong from None
    finally:
        place.close()
    show(f"programs about sizes, {name}", ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))

    assert counts["removals"] > 2 * counts["programs"]
    assert counts["states compared"] > 20 * counts["programs"]
    assert counts["journals"]


def open_place(name: str, request: pytest.FixtureRequest) -> Place:
    if name == "postgres":
        return PostgresPlace(fast_url(request.getfixturevalue("postgres"), "t_sizes"))
    return PLACES[name]()


def test_an_item_takes_as_many_bytes_as_it_was_asked_to() -> None:
    chance = Random(1)
    sizes = {border + by for border in BORDERS.values() for by in (-1, 0, 1)}

    assert [s for s in sizes if len(to_body([some_item(chance, s)], "").data) != s] == []


def test_every_border_is_asked_for_from_both_sides() -> None:
    chance = Random(1)
    drawn = {some_size(chance, max(BORDERS.values())) for _ in range(3_000)}

    assert {border + by for border in BORDERS.values() for by in (-1, 0, 1)} <= drawn


def test_the_slots_of_a_stream_are_one_window() -> None:
    assert SLOT_BYTES * SLOTS == postgres_merge.WINDOW_BYTES


def test_every_operation_is_part_of_some_program() -> None:
    kinds = {op.kind for seed in range(400) for op in program(seed)}

    assert kinds == KINDS.keys() - PHRASES.keys()


class Forgetful(MemoryPlace):
    """Loses everything when it is compacted."""

    def open(self) -> Backend:
        def compact(full: bool = False) -> int:
            self.backend._tables.bytes.streams.clear()
            return 0

        self.backend.compact = compact  # type: ignore[method-assign]
        return self.backend


def test_a_program_that_fails_is_shown_without_what_it_does_not_need() -> None:
    place = Forgetful()
    seed = next(seed for seed in range(30) if shortest(place, seed, tries=0))
    with pytest.raises(Wrong) as long:
        play(place, seed, Counter())
    short = shortest(place, seed)

    assert short is not None
    assert len(short.story) < len(long.value.story)
    assert [line.split("'")[1] for line in short.story if line.startswith("Op")][-1] == "compact"
