"""A crew: worker processes that live as long as a test, do what they are told, one thing at a time, and answer.

    with Crew(tmp_path) as crew:
        worker = crew.hire("support.simulation.race_work:Racer", url)  # Racer(url), in a process of its own
        worker.tell("save", 7)                                # racer.save(7) begins there ...
        assert worker.hear() == "ok"                          # ... and this is what it returned
        worker.stop()                                         # SIGSTOP

Orders and answers are lines of JSON in fifos. A worker is forked by a nursery, so a test may have many; when its orders
end it closes (``close()``, if its class has that) and exits. An error of Backstay is an answer like any other (see
``outcome``); anything else ends the worker, and the test with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from backstay.errors import BackstayError, Conflict
from backstay.model.checkpoint import CheckpointMeta
from backstay.testing.drafts import wait_until
from support.processes import Nursery

PATIENCE_S = 60.0


class Worker:
    """The test's side of one process."""

    def __init__(self, nursery: Nursery, pid: int, orders: int, answers: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._orders = orders
        self._answers = answers
        self._unread = b""
        self._code: int | None = None

    def tell(self, order: str, *arguments: Any) -> None:
        """Let it begin something."""
        os.write(self._orders, (json.dumps([order, *arguments]) + "\n").encode())

    def hear(self) -> Any:
        """Return its next answer."""
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._unread:
            assert select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0], "no answer"
            found = os.read(self._answers, 1 << 16)
            assert found, "the worker ended instead of answering: see its error above"
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def ask(self, order: str, *arguments: Any) -> Any:
        """Let it do something and return its answer."""
        self.tell(order, *arguments)
        return self.hear()

    @property
    def is_stopped(self) -> bool:
        """Tell whether it stands still, because of a SIGSTOP."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def stop(self) -> None:
        """Stop it, wherever it is, and return when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: self.is_stopped)

    def go_on(self) -> None:
        """Let a stopped one go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def end(self) -> int:
        """Give it no more orders, and return its exit code when it has ended."""
        if self._code is None:
            os.close(self._orders)
            self._code = self._nursery.wait(self.pid)
            os.close(self._answers)
        return self._code


class Crew:
    """The workers of one test. ``environment`` is theirs, beside the test's own."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = environment or {}
        self._workers: list[Worker] = []

    def __enter__(self) -> Crew:
        with _environment(self._environment):
            self._nursery = Nursery().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if error is None:
                codes = [worker.end() for worker in self._workers]
                assert set(codes) <= {0, -signal.SIGKILL}, f"a worker ended by an error, shown above: {codes}"
        finally:
            self._nursery.__exit__(kind, error, where)

    def hire(self, work: str, *arguments: Any) -> Worker:
        """Start a worker of a class, named as ``module:Class``; it is made with the arguments, in its own process."""
        place = self._folder / f"worker-{uuid.uuid4().hex}"
        orders, answers = f"{place}.orders", f"{place}.answers"
        os.mkfifo(orders)
        os.mkfifo(answers)
        heard = os.open(answers, os.O_RDONLY | os.O_NONBLOCK)
        pid = self._nursery.start("support.crew:obey", [orders, work, list(arguments)], answers)
        worker = Worker(self._nursery, pid, os.open(orders, os.O_RDWR), heard)
        self._workers.append(worker)
        return worker


def at_once(workers: list[Worker], order: str, *arguments: Any) -> list[Any]:
    """Let all begin the same thing at once, and return their answers."""
    for worker in workers:
        worker.tell(order, *arguments)
    return [worker.hear() for worker in workers]


# The worker's side ------------------------------------------------------------------------------------------------


def obey(orders: str, work: str, arguments: list[Any]) -> None:
    """Do what a worker does: read orders, carry them out, answer, until there are no more."""
    module, _, name = work.partition(":")
    worker = getattr(importlib.import_module(module), name)(*arguments)
    with open(orders, encoding="utf-8") as lines:
        for line in lines:
            order, *given = json.loads(line)
            os.write(1, (json.dumps(outcome(lambda: getattr(worker, order)(*given))) + "\n").encode())  # noqa: B023
    if hasattr(worker, "close"):
        worker.close()


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or what it says of the error of Backstay that it raises."""
    try:
        return call()
    except BackstayError as error:
        told: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, Conflict):
            told["winner"] = None if error.winner is None else describe(error.winner)
        return told


def describe(meta: CheckpointMeta) -> dict[str, Any]:
    """Return all that names a checkpoint, as plain values."""
    return {
        "id": meta.id,
        "thread": meta.thread_id,
        "branch": meta.branch,
        "seq": meta.seq,
        "step": meta.step,
        "parent": meta.parent_id,
        "digest": meta.digest.hex(),
        "created": meta.created_at.isoformat(),
    }


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
