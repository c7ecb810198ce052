"""Bytes on disk of W1 run by the engine, and what its own notes add to a step: position, path, the run's identity."""

from __future__ import annotations

from backstay.codec import encode
from benchmarks.bench import Bench
from benchmarks.engine import agent
from benchmarks.table import Row, Target
from benchmarks.workload import Conversation

BYTES = Target(0.70)


def run(bench: Bench) -> None:
    """Measure files over N."""
    bench.table.begin(
        "engine bytes: W1 after close, the log folded in",
        "new bytes = encoded messages and scratch of every step, and the document once; not the engine's position",
    )
    for count in (100, 1000) if bench.quick else (100, 1000, 10_000):
        size, new_bytes = _build(bench, count)
        target = BYTES if count >= 1000 else None
        bench.table.add(Row(f"file bytes / new bytes, N={count:,}", size, "B", None, new_bytes, "new", target=target))
        plain = bench.w1(count).file_bytes
        bench.table.add(Row("... against thread.append of the same steps", size, "B", None, plain, "thread.append"))
        bench.table.add(Row("... what the engine's notes add to a step", (size - plain) / count, "B"))


def _build(bench: Bench, count: int) -> tuple[int, int]:
    path = bench.new_path()
    conversation = Conversation()
    steps = list(conversation.steps(count))
    first = {"document": conversation.document, "messages": [], "scratch": {"turn": 0}}
    agent.run(first, steps, lambda: None, str(path))
    new_bytes = len(encode(conversation.document)) + sum(len(step.new) for step in steps)
    return path.stat().st_size, new_bytes
