"""The calls that concurrent workers made on branches of threads, as they saw them: the history that ``chain`` checks.

A worker writes an ``invoke`` line *before* each call and a line with the outcome after it: ``ok``, ``fail`` (nothing
was stored) or ``unknown``. So a worker that is killed in a call leaves a call of unknown outcome, and no call goes
unrecorded. Times are those of ``time.monotonic_ns``, which all processes of one host share; histories of several hosts
cannot be combined.

    recorder = CallRecorder("history.jsonl")                 # one per process, all on one file; or CallRecorder()
    recorded = RecordedThread(store.thread("t"), recorder)   # one per worker
    recorded.latest()
    recorded.save({"n": 1})                                  # like thread.save, errors included

    history = recorder.history()
    verdict = check_chain(history, chains_of(store, history.branches))      # both from ``support.simulation.chain``
    assert verdict, str(verdict)

Anything that is not a ``Thread`` (another library's store, an ``AsyncThread``, a lease) is recorded call by call:

    with recorder.append(BranchName("t"), id="cp-2", parent="cp-1") as call:
        saved = await thread.save(state, id="cp-2")
        call.ok(seq=saved.seq)

An error that leaves the block ends the call. One of Backstay's errors, except ``OutcomeUnknown``, means that nothing
was stored; any other means that the outcome is unknown. For stores with errors of their own call
``call.fail("conflict")``.

Each event is one line and one write to a file opened for appending, so processes may share the file. A process that is
killed while it writes tears its own last line. Each line also starts with a line end, so that a torn line damages no
other. A torn line loses nothing: its call had not started, or has an unknown outcome. ``CallHistory.torn`` counts them.
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
"""The time of what did not happen: later than any clock."""

_new_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom).make


class Unspecified(Enum):
    """The parent of an append that named none; None means that the branch was empty."""

    UNSPECIFIED = "unspecified"


UNSPECIFIED = Unspecified.UNSPECIFIED
Parent = str | None | Unspecified


class BranchName(NamedTuple):
    """The name of a branch in a history."""

    thread: str
    name: str = MAIN

    def __str__(self) -> str:
        return self.thread if self.name == MAIN else f"{self.thread}@{self.name}"


class CallKind(StrEnum):
    """What a call does."""

    APPEND = "append"  # adds a checkpoint
    READ = "read"  # looks at the newest
    ACQUIRE = "acquire"  # takes a lease and gets an epoch
    RELEASE = "release"  # releases it


class CallOutcome(StrEnum):
    """How a call ended, as far as its caller knows."""

    OK = "ok"
    FAIL = "fail"  # nothing was stored
    UNKNOWN = "unknown"


class CallError(StrEnum):
    """Why a call failed."""

    CONFLICT = "conflict"  # the head was not the parent
    TAKEN = "taken"  # the id exists with other content
    FENCED = "fenced"  # another process holds the branch
    REFUSED = "refused"  # any other error that means that nothing was stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call, from its start to its end."""

    action: CallKind
    branch: BranchName
    invoked: int
    completed: int = NEVER
    outcome: CallOutcome = CallOutcome.UNKNOWN
    error: CallError | None = None
    id: str | None = None  # of what is appended, or of what a read saw: None if the branch was empty
    parent: Parent = UNSPECIFIED  # of an append: the head it builds on
    seq: int | None = None  # as the store returned it
    epoch: int | None = None  # of the append's lease, or of the lease acquired or released; None: no lease


@dataclass(frozen=True)
class CallHistory:
    """Calls, in the order in which they started."""

    calls: list[RecordedCall]
    torn: int = 0  # lines that a killed process did not finish

    @classmethod
    def read(cls, *paths: str | os.PathLike[str]) -> CallHistory:
        """Read the files that recorders wrote; together they are one history."""
        events, torn = [], 0
        for path in paths:
            for line in Path(path).read_bytes().splitlines():
                try:
                    event = json.loads(line) if line else None
                except ValueError:  # the start of an object is never valid JSON
                    torn += 1
                    continue
                if event is not None:
                    events.append(event)
        return cls.of(events, torn)

    @classmethod
    def of(cls, events: Iterable[Event], torn: int = 0) -> CallHistory:
        """Return the history of events: each ``invoke`` with the outcome that follows it, if any."""
        calls: dict[str, RecordedCall] = {}
        ended: set[str] = set()
        for event in events:
            call = event["call"]
            if event["event"] == "invoke":
                calls[call] = _started(event)
            elif call in ended or call not in calls:
                raise InvalidInput(
                    f"call {call} ends {'twice' if call in ended else 'without a start'} in this history",
                    hint="Read each file once, and all files of one run together",
                )
            else:
                ended.add(call)
                calls[call] = _ended(calls[call], event)
        return cls(sorted(calls.values(), key=lambda call: call.invoked), torn)

    @property
    def branches(self) -> list[BranchName]:
        """Return the branches of all calls."""
        return list(dict.fromkeys(call.branch for call in self.calls))


def _started(event: Event) -> RecordedCall:
    return RecordedCall(
        action=CallKind(event["action"]),
        branch=BranchName(*event["branch"]),
        invoked=event["at"],
        id=event.get("id"),
        parent=event.get("parent", UNSPECIFIED),
        epoch=event.get("epoch"),
    )


def _ended(call: RecordedCall, event: Event) -> RecordedCall:
    given: Event = {name: event[name] for name in ("id", "seq", "epoch") if name in event}
    if call.parent is UNSPECIFIED and "parent" in event:
        given["parent"] = event["parent"]
    error = event.get("error")
    return replace(
        call,
        completed=event["at"],
        outcome=CallOutcome(event["event"]),
        error=CallError(error) if error is not None else None,
        **given,
    )


class CallRecorder:
    """Records calls: in a file that several processes may share, or, without a path, in memory.

    It may be used from any thread. In memory a forked child records only for itself.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.clock = clock
        self._path = path
        self._file = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._events: list[Event] = []

    def append(self, branch: BranchName, id: str, *, parent: Parent = UNSPECIFIED, epoch: int | None = None) -> Call:
        """Return the call that adds a checkpoint on top of ``parent`` (None: as the first); for a ``with`` block."""
        given = {"id": id} if parent is UNSPECIFIED else {"id": id, "parent": parent}
        return self._call(CallKind.APPEND, branch, given, epoch)

    def read(self, branch: BranchName) -> Call:
        """Return the call that looks at the newest checkpoint; for a ``with`` block."""
        return self._call(CallKind.READ, branch, {}, None)

    def acquire(self, branch: BranchName) -> Call:
        """Return the call that takes a lease, once: its end has the epoch; for a ``with`` block."""
        return self._call(CallKind.ACQUIRE, branch, {}, None)

    def release(self, branch: BranchName, epoch: int) -> Call:
        """Return the call that releases a lease; for a ``with`` block."""
        return self._call(CallKind.RELEASE, branch, {}, epoch)

    def history(self) -> CallHistory:
        """Return what was recorded so far; a file has the calls of all its recorders."""
        return CallHistory.of(list(self._events)) if self._path is None else CallHistory.read(self._path)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> CallRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Record one event. It is in the file when this returns."""
        if self._path is None:
            self._events.append(event)
            return
        line = b"\n" + json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"only part of a line was written to {self._path}")

    def _call(self, action: CallKind, branch: BranchName, given: Mapping[str, Any], epoch: int | None) -> Call:
        event = {"event": "invoke", "action": action.value, "branch": list(branch), **given}
        return Call(self, event if epoch is None else {**event, "epoch": epoch})


class Call:
    """One call that is being recorded: it starts and ends with its ``with`` block."""

    def __init__(self, recorder: CallRecorder, event: Event) -> None:
        self._recorder = recorder
        self._event = event
        self._name = os.urandom(8).hex()  # not a counter: forked processes would count the same numbers
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
                "a recorded call ended without an outcome", hint="Call ok(), fail() or unknown() inside the with block"
            )
        why = error_of(error)
        if why is None:
            self.unknown()
        else:
            self.fail(why)

    def ok(
        self, *, id: str | None = None, parent: Parent = UNSPECIFIED, seq: int | None = None, epoch: int | None = None
    ) -> None:
        """Record that the call succeeded and what it returned, right after it returned.

        A read passes the id it saw. All other arguments are optional, but those that are passed are checked.
        """
        given = {"id": id, "seq": seq, "epoch": epoch}
        event = {name: value for name, value in given.items() if value is not None}
        self._end(CallOutcome.OK, event if parent is UNSPECIFIED else {**event, "parent": parent})

    def fail(self, error: CallError | str) -> None:
        """Record that nothing was stored, and why."""
        self._end(CallOutcome.FAIL, {"error": CallError(error).value})

    def unknown(self) -> None:
        """Record that the outcome is unknown."""
        self._end(CallOutcome.UNKNOWN, {})

    def _end(self, outcome: CallOutcome, given: Mapping[str, Any]) -> None:
        at = self._recorder.clock()
        if self._ended:
            raise InvalidInput("a recorded call has already ended", hint="Use a new call for every attempt")
        self._ended = True
        self._recorder.write({"event": outcome.value, "call": self._name, "at": at, **given})


def error_of(error: BaseException) -> CallError | None:
    """Return why nothing was stored, or None if the error does not mean that."""
    if isinstance(error, OutcomeUnknown) or not isinstance(error, BackstayError):
        return None
    kinds = ((IdTaken, CallError.TAKEN), (Conflict, CallError.CONFLICT), (Fenced, CallError.FENCED))
    return next((name for kind, name in kinds if isinstance(error, kind)), CallError.REFUSED)


class RecordableThread(Protocol):
    """What can be recorded as a thread: a ``Thread``, or an object with the same methods."""

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
    """A handle whose saves and reads of the newest checkpoint are recorded. For one worker, one call at a time.

    Everything passes through unchanged. Only a save without an id gets one, since it must be known before the call.
    Forks, rewinds and deletes are not recorded, so a history that is to be checked does without them.
    """

    def __init__(
        self,
        thread: RecordableThread,
        recorder: CallRecorder,
        *,
        branch: BranchName | None = None,
        epoch: int | None = None,
    ) -> None:
        self.thread = thread
        self.branch = branch or BranchName(thread.id, thread.branch)
        self.epoch = epoch  # of the lease it writes under; set it again with each lease
        self._recorder = recorder
        self._basis: Parent = UNSPECIFIED  # the head that the handle builds on, if it is known here

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
            self._basis = UNSPECIFIED  # if this fails, the handle may build on either head
        with self._recorder.append(self.branch, name, parent=basis, epoch=self.epoch) as call:
            saved = function(content, id=name, on=on, **options)
            call.ok(parent=saved.parent_id, seq=saved.seq)
        self._basis = saved.id
        return saved
