"""All errors that Backstay raises, in one tree, grouped by who must act.

    BackstayError
    ├── the caller: change the call
    │   ├── InvalidInput          an argument that can never work (also a ValueError)
    │   │   ├── InvalidGraph      a graph that cannot be built; lists every mistake
    │   │   └── EncodeError       a value that would not round-trip; refused before anything is written
    │   ├── NotFound              the thread, branch or checkpoint does not exist (also a LookupError)
    │   ├── GraphMismatch         the stored position was made by another graph
    │   │   └── MigrationFailed   the migration of the position to the current graph failed
    │   ├── StepsExceeded         the run reached its limit of steps; all of them are saved
    │   ├── LimitExceeded         a file needs more memory or work than allowed; raise the limit if you trust it
    │   └── Rejected              a person or a timeout rejected the action; it was not done
    ├── the author of a node: fix the graph's code, then resume
    │   ├── NodeFailed            a node raised an error in its last attempt
    │   ├── BadUpdate             a node returned an update that the state cannot take; nothing was committed
    │   ├── MergeConflict         two parallel nodes, or two branches, changed the same key
    │   └── Unrecovered           an operation failed in another process, or waits for a decision
    ├── another writer: look at what happened, then continue from there
    │   ├── Conflict              the head has moved since it was read; nothing was stored
    │   │   ├── IdTaken           the checkpoint id exists with other content
    │   │   └── EffectChanged     the effect's key was used before with other arguments
    │   ├── Fenced                another worker holds the lease; this one must not write
    │   ├── OutcomeUnknown        the save may or may not be stored; save again with the same id to find out
    │   └── EffectUnknown         an effect may or may not have been done; a hook or a person must find out
    ├── the operator: look at the store
    │   ├── StoreError            the store cannot do it now: busy, full, closed or unreadable
    │   │   ├── StoreBusy         another process kept it locked for longer than the timeout
    │   │   ├── StoreFull         no space left; nothing was stored
    │   │   └── StoreRefused      not a Backstay store, from a newer version, or set up unsafely; not touched
    │   └── Corrupted             stored bytes do not match their digest
    └── either: DecodeError       bytes that are not a valid value (damaged, or not written by Backstay)

An error says what happened, to which thread, checkpoint or path, and what to do next. It has the same facts as
attributes, and never shows values of a state. ``retry_safe`` says whether the same call may simply be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

__all__ = [
    "BackstayError",
    "BadUpdate",
    "Conflict",
    "Corrupted",
    "DecodeError",
    "EffectChanged",
    "EffectUnknown",
    "EncodeError",
    "Fenced",
    "GraphMismatch",
    "IdTaken",
    "InvalidGraph",
    "InvalidInput",
    "LimitExceeded",
    "MergeConflict",
    "MigrationFailed",
    "NodeFailed",
    "NotFound",
    "OutcomeUnknown",
    "Rejected",
    "StepsExceeded",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "StoreRefused",
    "StoreWarning",
    "Unrecovered",
]


ERROR_TEXT_MAX = 500
"""How many characters of the text of a node's error are shown."""


class BackstayError(Exception):
    """The base class of all errors of this library."""

    summary: ClassVar[str] = "backstay error"
    retry_safe: ClassVar[bool] = False

    def __init__(
        self,
        what: str,
        *,
        hint: str | None = None,
        thread: str | None = None,
        checkpoint: str | None = None,
        path: str | None = None,
    ) -> None:
        self.what = what
        self.hint = hint
        self.thread = thread
        self.checkpoint = checkpoint
        self.path = path
        super().__init__(what)

    def __str__(self) -> str:
        # The text may name the place already: a thread in quotes (its id may be one letter), the others as they are.
        where = [
            f"{name} {value!r}"
            for name, value in (("thread", self.thread), ("checkpoint", self.checkpoint), ("path", self.path))
            if value is not None and (repr(value) if name == "thread" else value) not in self.what
        ]
        place = f" ({', '.join(where)})" if where else ""
        advice = f". {self.hint}" if self.hint else ""
        return f"{self.summary}: {self.what}{place}{advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol cannot call a constructor with keyword-only arguments, and process pools pickle our
        # errors.
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))


def _rebuild(cls: type[BackstayError], fields: dict[str, Any], args: tuple[Any, ...]) -> BackstayError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    error.args = args
    return error


def counted(number: int, word: str) -> str:
    """Return a number with its noun, for messages and reports: ``1 checkpoint``, ``2 checkpoints``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


class InvalidInput(BackstayError, ValueError):
    """An argument can never work as given; nothing was changed."""

    summary = "invalid input"


class EncodeError(InvalidInput):
    """A value would not round-trip, so it is refused before anything is written."""

    summary = "serialization error"


class InvalidGraph(InvalidInput):
    """A graph cannot be built; ``problems`` lists every mistake with its node."""

    summary = "invalid graph"

    def __init__(self, graph: str, problems: list[str]) -> None:
        self.graph = graph
        self.problems = problems
        listed = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{graph!r} has {counted(len(problems), 'mistake')}:{listed}")


class NodeFailed(BackstayError):
    """A node raised an error (the cause) in its last attempt. None of its changes were committed."""

    summary = "node failed"

    def __init__(self, node: str, attempts: int, error: BaseException, **where: Any) -> None:
        self.node = node
        self.attempts = attempts
        self.error = error
        tried = "" if attempts == 1 else f" after {attempts} attempts"
        text = str(error)  # shown to the caller; only the type of the error is stored
        shown = f"{type(error).__name__}: {text:.{ERROR_TEXT_MAX}}" if text else type(error).__name__
        super().__init__(f"node {node!r} raised {shown}{tried}", **where)
        self.__cause__ = error


class BadUpdate(BackstayError):
    """A node returned an update that the state cannot take. None of it was committed."""

    summary = "bad update"

    def __init__(self, node: str, key: str | None, what: str, **where: Any) -> None:
        self.node = node
        self.key = key
        place = f"node {node!r}" if key is None else f"node {node!r}: {key!r}"
        super().__init__(f"{place} {what}", **where)


class MergeConflict(BackstayError):
    """Two parallel nodes, or two branches, have different values for keys that can have only one."""

    summary = "merge conflict"

    def __init__(self, keys: Iterable[str], writers: tuple[str, str], what: str, **where: Any) -> None:
        self.keys = tuple(keys)
        self.writers = writers  # the names of the nodes, or the ids of the checkpoints
        super().__init__(what, **where)


class Unrecovered(BackstayError):
    """An operation has no result: it failed in an earlier process, whose error is gone, or it waits for a decision.

    ``interrupt`` is the open question (an ``InterruptRecord``), or None.
    """

    summary = "not recovered"

    def __init__(self, what: str, *, interrupt: Any = None, **where: Any) -> None:
        self.interrupt = interrupt
        super().__init__(what, **where)


class NotFound(BackstayError, LookupError):
    """The thread, branch, checkpoint or record does not exist in the store."""

    summary = "checkpoint not found"


class GraphMismatch(BackstayError):
    """The stored position was made by a graph with another fingerprint.

    ``expected`` is the fingerprint of the program's graph, ``actual`` that of the checkpoint. ``judgement``, if
    present, lists the differences for each frame of the position.
    """

    summary = "graph mismatch"

    def __init__(
        self, expected: int, actual: int, *, what: str | None = None, judgement: Any = None, **where: Any
    ) -> None:
        self.expected = expected
        self.actual = actual
        self.judgement = judgement
        hashes = f"expected hash 0x{expected:016x}, got 0x{actual:016x}"
        listed = "" if judgement is None else f"\n{judgement}\n"
        super().__init__(f"{hashes if what is None else f'{what}; {hashes}'}{listed}", **where)


class MigrationFailed(GraphMismatch):
    """A graph's migration raised an error (the cause) or returned no state or position; nothing was changed."""

    summary = "migration failed"

    def __init__(self, graph: str, from_hash: int, problem: str, *, expected: int, actual: int, **where: Any) -> None:
        self.graph = graph
        self.from_hash = from_hash
        what = f"the migration of graph {graph!r} from 0x{from_hash:016x} {problem}"
        super().__init__(expected, actual, what=what, **where)


class StepsExceeded(BackstayError):
    """The run reached its limit of steps; all of them are saved. ``limit`` is the number of steps."""

    summary = "steps exceeded"

    def __init__(self, what: str, *, limit: int, **where: Any) -> None:
        self.limit = limit
        super().__init__(what, **where)


class LimitExceeded(BackstayError):
    """An external file needs more memory or work than allowed. ``limit`` is the name of the limit."""

    summary = "limit exceeded"

    def __init__(self, what: str, *, limit: str, **where: Any) -> None:
        self.limit = limit
        super().__init__(what, **where)


class Rejected(BackstayError):
    """A person or a timeout rejected the action; it was not done.

    ``reason`` is the reason for the decision. ``by`` is the person who made it, or "timeout" if no one decided in time.
    """

    summary = "rejected"

    def __init__(self, what: str, reason: str = "", *, by: str | None = None, **where: Any) -> None:
        self.reason = reason
        self.by = by
        super().__init__(what, **where)


class Conflict(BackstayError):
    """The head of the branch has moved, so this save would build on an old checkpoint; nothing was stored.

    ``winner`` is the metadata of the current head (a ``CheckpointMeta``), or None if it was deleted.
    """

    summary = "conflict"

    def __init__(self, what: str, *, winner: Any = None, **where: Any) -> None:
        self.winner = winner
        super().__init__(what, **where)


class IdTaken(Conflict):
    """A checkpoint with this id exists and has other content."""

    summary = "checkpoint id taken"


class EffectChanged(Conflict):
    """The key of an effect was used before with other arguments, so its result must not be reused.

    ``record`` is the effect as stored (an ``EffectRecord``).
    """

    summary = "effect changed"

    def __init__(self, what: str, *, record: Any, **where: Any) -> None:
        self.record = record
        super().__init__(what, winner=record, **where)


class Fenced(BackstayError):
    """Another worker holds the lease on the branch, or took it over, so this one must not write.

    ``epoch`` is the epoch of this call (0 if it held no lease), ``current`` that of the branch, ``owner`` the holder's
    name, ``holder`` its process if it is known, and ``left_s`` how many seconds the lease has left.
    """

    summary = "fenced"

    def __init__(
        self,
        what: str,
        *,
        epoch: int,
        current: int,
        owner: str | None = None,
        holder: Any = None,
        left_s: float = 0.0,
        **where: Any,
    ) -> None:
        self.epoch = epoch
        self.current = current
        self.owner = owner
        self.holder = holder
        self.left_s = left_s
        super().__init__(what, **where)


class OutcomeUnknown(BackstayError):
    """The store failed while committing: the checkpoint may or may not be stored.

    Saving again with the same ``checkpoint`` id and content settles it: if the first save was applied, the store
    returns its result; otherwise it applies this one.
    """

    summary = "outcome unknown"
    retry_safe = True


class EffectUnknown(BackstayError):
    """An effect was started and has no receipt: it may or may not have been done, so it is not done again.

    ``record`` is the effect as stored (an ``EffectRecord``). Show it to a person who can find out, and pass it to
    ``thread.settle`` with the outcome.
    """

    summary = "effect outcome unknown"

    def __init__(self, what: str, *, record: Any, **where: Any) -> None:
        self.record = record
        super().__init__(what, **where)


class StoreError(BackstayError):
    """The store cannot do what was asked."""

    summary = "storage error"


class StoreBusy(StoreError):
    """Another process kept the store locked for longer than the timeout; nothing was stored."""

    retry_safe = True


class StoreFull(StoreError):
    """The store has no space left; this call stored nothing."""

    retry_safe = True


class StoreRefused(StoreError):
    """This is not a Backstay store, it is from a newer version, or it is set up unsafely; it was not touched."""


class Corrupted(BackstayError):
    """Stored bytes do not match their digest, or a required record is missing."""

    summary = "corrupted checkpoint"


class DecodeError(BackstayError, ValueError):
    """Bytes that are not a valid value: damaged, or not written by Backstay."""

    summary = "decode error"


class StoreWarning(UserWarning):
    """Nothing failed and nothing is lost, but the operator should look at the store."""
