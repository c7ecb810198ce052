"""What a thread costs as it grows: bytes, the run, and reading it. All savers do the same, one after the other.

Nothing inside a saver is touched: times are taken around ``invoke``, ``get_state`` and ``get_state_history``, and
between two entries of the node.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.bench import Bench
from benchmarks.langgraph.contestants import DELTA, OURS, STOCK, Contestant
from benchmarks.langgraph.loop import Conversation, Loop
from benchmarks.table import Row, Target
from benchmarks.timing import Op, clock, quiet, take_turns, timed

MAIN = 1000
PAGE = 20
HEAD_ROOM = 2  # checkpoints that LangGraph makes beside those of the steps

BYTES = Target(2.0)
RUN, STATE = Target(1 / 3), Target(1.0)
DESCRIPTIONS, STATES, PAGE_OF_STATES = Target(1 / 20), Target(1 / 5), Target(1 / 10)


@dataclass(slots=True)
class Found:
    """What was measured of one contestant; times are medians."""

    bytes: int = 0
    runs: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # processor time of the runs, which other programs hardly disturb
    late: list[float] = field(default_factory=list)  # of each run: the median step of the last quarter
    reads: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measure:
    """One way to read, how often, and what is asked of it at the main size."""

    name: str
    op: Callable[[Contestant, ExitStack, Conversation], Op]
    repeats: int
    target: Target | None


def measure(bench: Bench, make: Callable[[], list[Contestant]], steps: int, repeats: int) -> None:
    """Run and read all contestants with so many steps, and report."""
    conversation = Conversation(steps)
    found: dict[str, Found] = {}
    contestants: list[Contestant] = []
    alone: list[float] = []
    for number in range(repeats):
        alone.append(Loop(Conversation(steps), None).run())
        for old in contestants:
            old.remove()
        contestants = make()
        for place in range(len(contestants)):
            contestant = contestants[(number + place) % len(contestants)]
            _run(contestant, steps, found.setdefault(contestant.name, Found()))
    measures = _measures(steps, repeats)
    for each in measures:
        _read(each, contestants, conversation, found)
    for contestant in contestants:
        found[contestant.name].bytes = contestant.size()
        contestant.remove()
    _report(bench, found, measures, conversation)
    bench.table.add(Row(f"N={steps:,}: for context: the run without a saver", statistics.median(alone)))


def _run(contestant: Contestant, steps: int, found: Found) -> None:
    conversation = Conversation(steps)
    with contestant.open() as saver, quiet():
        loop = Loop(conversation, saver, delta=contestant.delta)
        began = time.process_time()
        found.runs.append(loop.run())
        found.busy.append(time.process_time() - began)
    with contestant.open() as saver:
        Loop(conversation, saver, delta=contestant.delta).check()
    times = [after - before for before, after in zip(loop.entered, loop.entered[1:], strict=False)]
    found.late.append(statistics.median(times[-(steps // 4) :]))


def _measures(steps: int, repeats: int) -> list[Measure]:
    few = 5 if steps < MAIN else 3
    whole = 1 if steps >= MAIN else repeats
    return [
        Measure("get_state, open saver", _state, 15, STATE),
        Measure("opening, and the first get_state", _first_state, 7, None),
        Measure(f"get_state_history, limit={PAGE}", _page, few, PAGE_OF_STATES),
        Measure("whole history, states", _states, whole, STATES),
        Measure("whole history, metadata", _descriptions, whole, DESCRIPTIONS),
    ]


def _read(
    each: Measure, contestants: Sequence[Contestant], conversation: Conversation, found: dict[str, Found]
) -> None:
    with ExitStack() as stack:
        ops = [each.op(contestant, stack, conversation) for contestant in contestants]
        warm_up = 1 if each.repeats > 1 else 0
        for contestant, times in zip(contestants, take_turns(ops, each.repeats, warm_up), strict=True):
            found[contestant.name].reads[each.name] = times.p50


def _open(contestant: Contestant, stack: ExitStack, conversation: Conversation) -> Loop:
    return Loop(conversation, stack.enter_context(contestant.open()), delta=contestant.delta)


def _state(contestant: Contestant, stack: ExitStack, conversation: Conversation) -> Op:
    loop = _open(contestant, stack, conversation)
    return timed(lambda _: _expect(loop.state(), conversation.steps + 1))


def _first_state(contestant: Contestant, _: ExitStack, conversation: Conversation) -> Op:
    def op(_: int) -> float:
        """Open and read; compiling the graph in between is not counted, nor is closing."""
        began = time.perf_counter()
        with contestant.open() as saver:
            opened = time.perf_counter() - began
            loop = Loop(conversation, saver, delta=contestant.delta)
            return opened + clock(loop.state)

    return op


def _page(contestant: Contestant, stack: ExitStack, conversation: Conversation) -> Op:
    loop = _open(contestant, stack, conversation)
    return timed(lambda _: _expect(loop.states(PAGE), PAGE))


def _states(contestant: Contestant, stack: ExitStack, conversation: Conversation) -> Op:
    loop = _open(contestant, stack, conversation)
    return timed(lambda _: _expect(loop.states(), conversation.steps + HEAD_ROOM))


def _descriptions(contestant: Contestant, stack: ExitStack, conversation: Conversation) -> Op:
    saver = stack.enter_context(contestant.open())
    return timed(lambda _: _expect(contestant.descriptions(saver), conversation.steps + HEAD_ROOM))


def _expect(count: int, wanted: int) -> None:
    assert count == wanted, (count, wanted)


# The table ------------------------------------------------------------------------------------------------------------


def _report(bench: Bench, found: dict[str, Found], measures: Sequence[Measure], conversation: Conversation) -> None:
    steps, unique = conversation.steps, conversation.unique_bytes()
    label = f"N={steps:,}: "
    for name, each in found.items():
        target = BYTES if name == OURS and steps == MAIN else None
        title = f"{label}bytes / unique" + ("" if name == OURS else f", {name}")
        bench.table.add(Row(title, each.bytes, "B", None, unique, "unique", target=target))
    _compare(bench, f"{label}run", lambda each: statistics.median(each.runs), found, _goal(RUN, steps))
    _compare(bench, f"{label}run, processor time", lambda each: statistics.median(each.busy), found, None)
    _compare(bench, f"{label}a step", lambda each: statistics.median(each.runs) / steps, found, None)
    _compare(bench, f"{label}a step of the last quarter", lambda each: statistics.median(each.late), found, None)
    for one in measures:
        _compare(bench, label + one.name, lambda each, name=one.name: each.reads[name], found, _goal(one.target, steps))  # type: ignore[misc]


def _goal(target: Target | None, steps: int) -> Target | None:
    return target if steps == MAIN else None


def _compare(
    bench: Bench, title: str, of: Callable[[Found], float], found: dict[str, Found], target: Target | None
) -> None:
    """Show ours beside the saver as it comes, which the target is about, and beside the one with DeltaChannel."""
    ours = found.get(OURS)
    value = None if ours is None else of(ours)
    peers = [name for name in (STOCK, DELTA) if name in found]
    if not peers:
        bench.table.add(Row(title, value))
    for name in peers:
        goal = target if name == STOCK else None
        bench.table.add(Row(title, value, other=of(found[name]), other_name=name, target=goal))
