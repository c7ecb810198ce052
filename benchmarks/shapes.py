"""Other shapes of state than a growing chat: what each costs in bytes and in time.

A shape yields saves one by one. Each says what is new in it, so that its bytes can be compared and so that the raw file
can take the same bytes in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import backstay
from backstay.codec import encode
from benchmarks.bench import Bench
from benchmarks.floors import RawFile
from benchmarks.table import Row, Target
from benchmarks.timing import Times, clock, quiet
from benchmarks.workload import DOCUMENT_BYTES, START, Message, Prose, message

STEPS = 300
MANY_KEYS = Target(8.0)


class Save(NamedTuple):
    """One save of a shape."""

    new: bytes  # the encoded bytes of what is new
    act: Callable[[], object]


Shape = Callable[[backstay.Store, int], Iterator[Save]]


def run(bench: Bench) -> None:
    """Measure every shape."""
    bench.table.begin(
        "other shapes: file bytes / new bytes after close, then save p50 and p99 against append + fdatasync of the new",
        "an empty store takes 0.09 MB or so, which weighs in the small ones",
    )
    for name, shape, steps in _shapes(bench):
        _measure(bench, name, shape, steps)


def _shapes(bench: Bench) -> list[tuple[str, Shape, int]]:
    steps, threads = bench.pick(STEPS, 60), bench.pick(2000, 200)
    return [
        ("edit in the middle of 500, save(state)", edit_in_the_middle, steps),
        ("summarise every 50 steps, save(state)", summarise, steps),
        ("nested lists, save(state)", nested_lists, steps),
        ("string grows by 500 B to 300 KB, append", grow_text_by_append, bench.pick(600, 60)),
        ("string grows by 500 B to 300 KB, save(state)", grow_text_by_save, bench.pick(600, 60)),
        ("50 threads share a 200 KB document", shared_document, steps),
        (f"small states, {threads:,} threads x 3 saves", small_states, threads),
        ("200 keys of 50 B, one changes, save(state)", many_keys, steps),
        ("200 keys of 50 B, one changes, append(set=)", many_keys_by_set, steps),
    ]


def _measure(bench: Bench, name: str, shape: Shape, steps: int) -> None:
    path = bench.new_path()
    raw = RawFile(bench.new_path(".raw"))
    ours: list[float] = []
    floor: list[float] = []
    new_bytes = 0
    with backstay.open(path) as store, quiet():
        for number, save in enumerate(shape(store, steps)):
            if number % 2:
                floor.append(raw.append(save.new))
            ours.append(clock(save.act))
            if not number % 2:
                floor.append(raw.append(save.new))
            new_bytes += len(save.new)
    raw.close()
    saved, appended = Times(ours), Times(floor)
    # The empty store weighs too much in a quick run.
    target = MANY_KEYS if shape in (many_keys, many_keys_by_set) and not bench.quick else None
    bench.table.add(Row(f"{name}: bytes", path.stat().st_size, "B", None, new_bytes, "new", target=target))
    bench.table.add(Row("... save", saved.p50, "s", saved.p99, appended.p50, "append + fdatasync"))


def _messages(prose: Prose, count: int, number: int = 0) -> list[Message]:
    return [message(prose, "user", START + timedelta(seconds=number + index)) for index in range(count)]


def _encoded(messages: list[Message]) -> bytes:
    return b"".join(map(encode, messages))


def edit_in_the_middle(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Rewrite one random message of 500 at each step."""
    prose, thread = Prose(31), store.thread("edit")
    state = {"messages": _messages(prose, 500)}
    yield Save(_encoded(state["messages"]), partial(thread.save, state))
    for number in range(steps):
        where = prose.below(500)
        state["messages"][where] = _messages(prose, 1, number)[0]
        yield Save(encode(state["messages"][where]), partial(thread.save, state))


def summarise(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Add two messages a step; every 50 steps a summary of 1 KB takes the place of the oldest half."""
    prose, thread = Prose(32), store.thread("summary")
    state: dict[str, list[Message]] = {"messages": []}
    for number in range(1, steps + 1):
        fresh = _messages(prose, 2, number)
        new = _encoded(fresh)
        if number % 50 == 0:
            summary = message(prose, "system", START, size=1000)
            state["messages"][: len(state["messages"]) // 2] = [summary]
            new += encode(summary)
        state["messages"] += fresh
        yield Save(new, partial(thread.save, state))


def nested_lists(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Let a list inside a dict grow: two agents with a history each."""
    prose, thread = Prose(33), store.thread("nested")
    agents: dict[str, list[Message]] = {"a": [], "b": []}
    for number in range(steps):
        fresh = _messages(prose, 2, number)
        agents["ab"[number % 2]] += fresh
        yield Save(_encoded(fresh), partial(thread.save, {"agents": agents}))


def grow_text_by_append(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Extend one string, telling the library so."""
    prose, thread = Prose(34), store.thread("text")
    for _ in range(steps):
        more = prose.text(500)
        yield Save(more.encode(), partial(thread.append, {"text": more}))


def grow_text_by_save(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Extend one string and save the whole state."""
    prose, thread = Prose(34), store.thread("text")
    text = ""
    for _ in range(steps):
        more = prose.text(500)
        text += more
        yield Save(more.encode(), partial(thread.save, {"text": text}))


def shared_document(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Give 50 threads the same document and let each of them chat."""
    prose = Prose(35)
    document = prose.text(DOCUMENT_BYTES)
    threads = [store.thread(f"shared{number}") for number in range(50)]
    for number in range(max(steps, len(threads))):
        thread, fresh = threads[number % 50], _messages(prose, 2, number)
        if number < 50:
            new = _encoded(fresh) + (encode(document) if number == 0 else b"")
            yield Save(new, partial(thread.save, {"document": document, "messages": fresh}))
        else:
            yield Save(_encoded(fresh), partial(thread.append, {"messages": fresh}))


def small_states(store: backstay.Store, threads: int) -> Iterator[Save]:
    """Save a state of three keys and less than 200 bytes three times in each of many threads."""
    prose = Prose(36)
    for number in range(threads):
        thread = store.thread(f"small{number}")
        state = {"user": prose.text(30), "turn": 0, "note": prose.text(90)}
        yield Save(encode(state), partial(thread.save, state))
        for turn in (1, 2):
            state = {**state, "turn": turn, "note": prose.text(90)}
            yield Save(encode([turn, state["note"]]), partial(thread.save, state))


def _keys(prose: Prose) -> dict[str, str]:
    return {f"key{number:03}": prose.text(50) for number in range(200)}


def many_keys(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Change one of 200 small keys at each step and save the whole state."""
    prose, thread = Prose(37), store.thread("keys")
    state = _keys(prose)
    yield Save(encode(state), partial(thread.save, state))
    for _ in range(steps):
        name = f"key{prose.below(200):03}"
        state[name] = prose.text(50)
        yield Save(encode(state[name]), partial(thread.save, state))


def many_keys_by_set(store: backstay.Store, steps: int) -> Iterator[Save]:
    """Change one of 200 small keys at each step, telling the library which."""
    prose, thread = Prose(37), store.thread("keys")
    state = _keys(prose)
    yield Save(encode(state), partial(thread.save, state))
    for _ in range(steps):
        change = {f"key{prose.below(200):03}": prose.text(50)}
        yield Save(encode(change), partial(thread.append, set=change))
