"""What concurrent workers did to branches of threads, as they saw it: the history that ``chain`` checks.

A worker writes an ``invoke`` line *before* each call and a line with the outcome after it: ``ok``, ``fail`` (it says
that nothing was stored) or ``unknown``. So a worker that is killed in a call leaves a call of unknown outcome, never a
call that nobody knows of. Times are those of ``time.monotonic_ns``, which all processes of one host share; histories of
several hosts cannot be put together.

    recorder = Recorder("history.jsonl")                     # each process its own, all on one file; or Recorder()
    recorded = RecordedThread(store.thread("t"), recorder)   # each worker its own
    recorded.latest()
    recorded.save({"n": 1})                                  # as thread.save, errors included

    history = recorder.history()
    verdict = check_chain(history, chains_of(store, history.branches))      # both from ``backstay.testing.chain``
    assert verdict, str(verdict)

Whatever is not a ``Thread`` (another library's store, an ``AsyncThread``, a lease) is recorded call by call:

    with recorder.append(Branch("t"), id="cp-2", parent="cp-1") as call:
        saved = await thread.save(state, id="cp-2")
        call.ok(seq=saved.seq)

An error that leaves the block ends the call: one of Backstay's means that nothing was stored (but ``OutcomeUnknown``),
any other that nobody can know. For stores with errors of their own say ``call.fail("conflict")``.

Each event is one line and one write to a file opened for appending, so processes may share the file. A process killed
in the middle of writing tears its own last line; each line begins with a line end too, so that a torn one spoils no
other. A torn line loses nothing: its call had not begun, or has an unknown outcome. ``History.torn`` counts them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from backstay.errors import BackstayError, Conflict, Fenced, IdTaken, InvalidInput, OutcomeUnknown
from backstay.model.checkpoint import MAIN, Checkpoint, CheckpointMeta
from backstay.model.ids import IdMaker

Event = dict[str, Any]
"""One line of a history: plain values, as they are written."""

NEVER = 2**63
"""The time of what did not happen: later than any clock says."""

_new_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom).make


class Untold(Enum):
    """The one value of a parent that nobody named; None is taken: it means that the branch was empty."""

    UNTOLD = "untold"


UNTOLD = Untold.UNTOLD
Parent = str | None | Untold


class Branch(NamedTuple):
    """Names one line of checkpoints in a history."""

    thread: str
    name: str = MAIN

    def __str__(self) -> str:
        return self.thread if self.name == MAIN else f"{self.thread}@{self.name}"


class Action(StrEnum):
    """What a call does."""

    APPEND = "append"  # adds a checkpoint
    READ = "read"  # looks at the newest
    ACQUIRE = "acquire"  # takes a lease and gets an epoch
    RELEASE = "release"  # gives it back


class Outcome(StrEnum):
    """How a call ended, as far as its caller knows."""

    OK = "ok"
    FAIL = "fail"  # nothing was stored
    UNKNOWN = "unknown"


class Error(StrEnum):
    """Why a call failed."""

    CONFLICT = "conflict"  # the head was another one than the parent
    TAKEN = "taken"  # the id exists with other content
    FENCED = "fenced"  # somebody else holds the branch
    REFUSED = "refused"  # anything else that says that nothing was stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call, from its beginning to its end."""

    action: Action
    branch: Branch
    invoked: int
    completed: int = NEVER
    outcome: Outcome = Outcome.UNKNOWN
    error: Error | None = None
    id: str | None = None  # what is appended, or what a read saw: None if there was nothing
    parent: Parent = UNTOLD  # of an append: the head it builds on
    seq: int | None = None  # as the store told it
    epoch: int | None = None  # what an append carries, or what was acquired or released; None: without a lease


@dataclass(frozen=True)
class History:
    """Calls, in the order in which they began."""

    operations: list[Operation]
    torn: int = 0  # lines that a killed process did not finish

    @classmethod
    def read(cls, *paths: str | os.PathLike[str]) -> History:
        """Read the files that recorders wrote; together they are one history."""
        events, torn = [], 0
        for path in paths:
            for line in Path(path).read_bytes().splitlines():
                try:
                    event = json.loads(line) if line else None
                except ValueError:  # the beginning of an object is never a whole one
                    torn += 1
                    continue
                if event is not None:
                    events.append(event)
        return cls.of(events, torn)

    @classmethod
    def of(cls, events: Iterable[Event], torn: int = 0) -> History:
        """Return the history that events tell: each ``invoke`` with the outcome that follows it, if any does."""
        operations: dict[str, Operation] = {}
        ended: set[str] = set()
        for event in events:
            call = event["call"]
            if event["event"] == "invoke":
                operations[call] = _begun(event)
            elif call in ended or call not in operations:
                raise InvalidInput(
                    f"call {call} ends {'twice' if call in ended else 'without a beginning'} in this history",
                    hint="Read each file once, and all files of one run together",
                )
            else:
                ended.add(call)
                operations[call] = _ended(operations[call], event)
        return cls(sorted(operations.values(), key=lambda operation: operation.invoked), torn)

    @property
    def branches(self) -> list[Branch]:
        """Return the branches that anything was done to."""
        return list(dict.fromkeys(operation.branch for operation in self.operations))


def _begun(event: Event) -> Operation:
    return Operation(
        action=Action(event["action"]),
        branch=Branch(*event["branch"]),
        invoked=event["at"],
        id=event.get("id"),
        parent=event.get("parent", UNTOLD),
        epoch=event.get("epoch"),
    )


def _ended(operation: Operation, event: Event) -> Operation:
    told: Event = {name: event[name] for name in ("id", "seq", "epoch") if name in event}
    if operation.parent is UNTOLD and "parent" in event:
        told["parent"] = event["parent"]
    error = event.get("error")
    return replace(
        operation,
        completed=event["at"],
        outcome=Outcome(event["event"]),
        error=Error(error) if error is not None else None,
        **told,
    )


class Recorder:
    """Writes down calls: into a file that several processes may share, or, without a path, into memory.

    It may be used from any thread. In memory a forked child records only for itself.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.clock = clock
        self._path = path
        self._file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._events: list[Event] = []

    def append(self, branch: Branch, id: str, *, parent: Parent = UNTOLD, epoch: int | None = None) -> Call:
        """Return the call that adds a checkpoint on top of ``parent`` (None: as the first); for a ``with`` block."""
        told = {"id": id} if parent is UNTOLD else {"id": id, "parent": parent}
        return self._call(Action.APPEND, branch, told, epoch)

    def read(self, branch: Branch) -> Call:
        """Return the call that looks at the newest checkpoint; for a ``with`` block."""
        return self._call(Action.READ, branch, {}, None)

    def acquire(self, branch: Branch) -> Call:
        """Return the call that takes a lease, once: its end tells the epoch; for a ``with`` block."""
        return self._call(Action.ACQUIRE, branch, {}, None)

    def release(self, branch: Branch, epoch: int) -> Call:
        """Return the call that gives a lease back; for a ``with`` block."""
        return self._call(Action.RELEASE, branch, {}, epoch)

    def history(self) -> History:
        """Return what was recorded so far; from a file also what others recorded there."""
        return History.of(list(self._events)) if self._path is None else History.read(self._path)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Keep one event. It is in the file when this returns."""
        if self._path is None:
            self._events.append(event)
            return
        line = b"\n" + json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"only a part of a line could be written to {self._path}")

    def _call(self, action: Action, branch: Branch, told: Mapping[str, Any], epoch: int | None) -> Call:
        event = {"event": "invoke", "action": action.value, "branch": list(branch), **told}
        return Call(self, event if epoch is None else {**event, "epoch": epoch})


class Call:
    """One call that is being recorded: it begins and ends with its ``with`` block."""

    def __init__(self, recorder: Recorder, event: Event) -> None:
        self._recorder = recorder
        self._event = event
        self._name = os.urandom(8).hex()  # not a counter: forked processes would count alike
        self._ended = False

    def __enter__(self) -> Call:
        self._recorder.write({**self._event, "call": self._name, "at": self._recorder.clock()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if error is None:
            raise InvalidInput(
                "a recorded call ended without an outcome", hint="Say ok(), fail() or unknown() inside the with block"
            )
        why = error_of(error)
        if why is None:
            self.unknown()
        else:
            self.fail(why)

    def ok(
        self, *, id: str | None = None, parent: Parent = UNTOLD, seq: int | None = None, epoch: int | None = None
    ) -> None:
        """Tell that it succeeded, at once after the call returned, and what it returned.

        A read tells the id it saw. Everything else is optional, but what is told is checked.
        """
        told = {"id": id, "seq": seq, "epoch": epoch}
        event = {name: value for name, value in told.items() if value is not None}
        self._end(Outcome.OK, event if parent is UNTOLD else {**event, "parent": parent})

    def fail(self, error: Error | str) -> None:
        """Tell that nothing was stored, and why."""
        self._end(Outcome.FAIL, {"error": Error(error).value})

    def unknown(self) -> None:
        """Tell that nobody can know whether anything was stored."""
        self._end(Outcome.UNKNOWN, {})

    def _end(self, outcome: Outcome, told: Mapping[str, Any]) -> None:
        at = self._recorder.clock()
        if self._ended:
            raise InvalidInput("a recorded call has one outcome", hint="Use a new call for every attempt")
        self._ended = True
        self._recorder.write({"event": outcome.value, "call": self._name, "at": at, **told})


def error_of(error: BaseException) -> Error | None:
    """Return why nothing was stored, or None if the error does not say that."""
    if isinstance(error, OutcomeUnknown) or not isinstance(error, BackstayError):
        return None
    kinds = ((IdTaken, Error.TAKEN), (Conflict, Error.CONFLICT), (Fenced, Error.FENCED))
    return next((name for kind, name in kinds if isinstance(error, kind)), Error.REFUSED)


class Line(Protocol):
    """What can be recorded as a thread: a ``Thread``, or whatever is called as one."""

    @property
    def id(self) -> str:
        """The thread's id."""

    @property
    def branch(self) -> str:
        """The branch it writes to."""

    @property
    def save(self) -> Callable[..., Checkpoint]:
        """Add a state, with an ``id``, ``on`` a checkpoint."""

    @property
    def append(self) -> Callable[..., Checkpoint]:
        """Add a change, with an ``id``, ``on`` a checkpoint."""

    @property
    def latest(self) -> Callable[[], Checkpoint | None]:
        """Load the newest checkpoint."""


class RecordedThread:
    """A handle whose saves and looks at the newest checkpoint are recorded. For one worker: it does one at a time.

    Everything passes through unchanged. Only a save without an id gets one, since it must be known before the call.
    Forks, rewinds and deletes are not recorded, so a history that is to be checked does without them.
    """

    def __init__(
        self, thread: Line, recorder: Recorder, *, branch: Branch | None = None, epoch: int | None = None
    ) -> None:
        self.thread = thread
        self.branch = branch or Branch(thread.id, thread.branch)
        self.epoch = epoch  # of the lease it writes under; to be set anew with each lease
        self._recorder = recorder
        self._basis: Parent = UNTOLD  # the head that the handle builds on, as far as that can be seen from here

    def save(
        self, state: Mapping[str, Any], *, id: str | None = None, on: CheckpointMeta | str | None = None, **options: Any
    ) -> Checkpoint:
        """Save a state, as ``Thread.save`` does."""
        if options.get("replace"):
            raise InvalidInput("a replaced checkpoint is not recorded", hint="Save a new one, or use the thread itself")
        return self._append(self.thread.save, state, id, on, options)

    def append(
        self,
        append: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        on: CheckpointMeta | str | None = None,
        **options: Any,
    ) -> Checkpoint:
        """Save a change, as ``Thread.append`` does."""
        return self._append(self.thread.append, append, id, on, options)

    def latest(self) -> Checkpoint | None:
        """Load the newest checkpoint, as ``Thread.latest`` does."""
        with self._recorder.read(self.branch) as call:
            found = self.thread.latest()
            if found is None:
                call.ok()
            else:
                call.ok(id=found.id, seq=found.seq)
        self._basis = None if found is None else found.id
        return found

    def _append(
        self,
        function: Callable[..., Checkpoint],
        content: Mapping[str, Any] | None,
        id: str | None,
        on: CheckpointMeta | str | None,
        options: Mapping[str, Any],
    ) -> Checkpoint:
        name = _new_id() if id is None else id
        basis = self._basis if on is None else on.id if isinstance(on, CheckpointMeta) else on
        if on is not None:
            self._basis = UNTOLD  # if this fails, the handle may stand at either place
        with self._recorder.append(self.branch, name, parent=basis, epoch=self.epoch) as call:
            saved = function(content, id=name, on=on, **options)
            call.ok(parent=saved.parent_id, seq=saved.seq)
        self._basis = saved.id
        return saved
