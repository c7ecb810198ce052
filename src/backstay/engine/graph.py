"""``Graph``: declare nodes, edges and a state, then run them.

graph = Graph("research", state=State)

@graph.node
def search(state, ctx): ...

graph.edge("search", "write")
graph.start("search")
graph.end("write")
result = await graph.run(store.thread("customer-42"), {"question": "…"})
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack, overload

from backstay.engine.build import all_graphs
from backstay.engine.control import Cancellation
from backstay.engine.declaration import Declaration, check_limit, check_names
from backstay.engine.driver import run_to_end
from backstay.engine.durable import RunOptions
from backstay.engine.events import BUFFER, Event, Mode, Result, Stream
from backstay.engine.fingerprint import fingerprint_of, identity
from backstay.engine.migration import add_migration
from backstay.engine.pending import PendingRun, pending_runs
from backstay.engine.replay import REPLAY, ReplayPlan, plan_of, replay
from backstay.engine.sinks import CheckpointSink
from backstay.engine.start import (
    DEFAULT_LEASE_S,
    Answers,
    AnyThread,
    Compose,
    ResumeRequest,
    Setup,
    resume,
    start,
)
from backstay.engine.triggers import Trigger
from backstay.engine.work import Submission, Worker, asubmit, claims_of, stopped_by_signals, submit
from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.operations.arguments import id_of
from backstay.operations.rows import to_microseconds
from backstay.operations.run_records import ATTEMPTS
from backstay.thread.access import access_of, handle_of
from backstay.thread.lease import AsyncLease, Lease
from backstay.thread.runs import AsyncRun, Run
from backstay.thread.store import AsyncStore, Store, async_twin, check_store
from backstay.thread.thread import AsyncThread, Thread


class RunKeywords(TypedDict, total=False):
    """Options that every way to run a graph takes. None of them is stored.

    ``sink`` receives every checkpoint in addition to the thread, or is a function that takes the thread's own sink and
    returns the sink to use; ``trigger`` decides when. ``on_event`` is called with each event. ``runtime`` has values
    for fields that are not stored. ``lease_s`` is how long the lease of the thread lasts without a save (None: the
    caller makes sure that no other process runs the thread). If another process holds the lease, the run waits, and
    logs for whom; with ``wait`` seconds it raises Fenced after that time, with 0 at once. If you took the lease with
    this handle yourself, pass it as ``lease``; a replay takes its own, on the new branch. ``pause_check_s`` is how
    often the run looks for a request to pause or to cancel. ``cancel`` ends the run.
    """

    sink: CheckpointSink | Compose | None
    trigger: Trigger
    on_event: Callable[[Event], None] | None
    runtime: Mapping[str, Any]
    lease_s: float | None
    wait: float | None
    lease: Lease | AsyncLease | None
    pause_check_s: float
    cancel: Cancellation | None


class SubmitKeywords(TypedDict, total=False):
    """Options of a run that are stored with it, as ``Graph.run`` takes them."""

    limit: int | None
    before: Iterable[str]
    after: Iterable[str]
    metadata: Mapping[str, Any] | None


class Graph(Declaration):
    """A graph of nodes over one state. Declare it once; run it many times, even in parallel."""

    @property
    def fingerprint(self) -> int:
        """A 64-bit number that identifies this graph. It does not depend on the order of declaration."""
        return fingerprint_of(self.build())

    def migrate(
        self,
        from_hash: int | str,
        *,
        state: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        nodes: Mapping[str, str] | None = None,
        to: int | str | None = None,
    ) -> None:
        """Declare how to resume runs of an earlier version of this graph, given by its fingerprint.

        ``state`` takes a stored state and returns the new one; ``nodes`` maps old names to new ones. Without either,
        stored runs are accepted unchanged. ``to`` is the fingerprint of the next version, if that is not this one.
        """
        add_migration(self, from_hash, state=state, nodes=nodes, to=to)

    @overload
    def pending(self, store: Store) -> list[PendingRun]: ...
    @overload
    def pending(self, store: AsyncStore) -> Awaitable[list[PendingRun]]: ...
    def pending(self, store: Store | AsyncStore) -> list[PendingRun] | Awaitable[list[PendingRun]]:
        """Return every unfinished run of this graph in a store, and whether this version of the graph can resume it.

        Call it before a deployment, with the new graph. It writes nothing.
        """
        check_store(store)
        access, built = access_of(store), self.build()
        if isinstance(store, AsyncStore):
            return access.arun(pending_runs, built, access.services)
        return pending_runs(access.store, built, access.services)

    # Queueing and working ---------------------------------------------------------------------------------------------

    def claims(self) -> list[tuple[str, str]]:
        """Return the name and fingerprint of each version of this graph whose runs it can execute."""
        return claims_of(self.build())

    @overload
    def submit(
        self,
        thread: Thread,
        input: Mapping[str, Any] | None = None,
        *,
        at: datetime | None = None,
        key: str | None = None,
        transaction: Any = None,
        **options: Unpack[SubmitKeywords],
    ) -> Run: ...
    @overload
    def submit(
        self,
        thread: AsyncThread,
        input: Mapping[str, Any] | None = None,
        *,
        at: datetime | None = None,
        key: str | None = None,
        **options: Unpack[SubmitKeywords],
    ) -> Awaitable[AsyncRun]: ...
    def submit(
        self,
        thread: AnyThread,
        input: Mapping[str, Any] | None = None,
        *,
        at: datetime | None = None,
        key: str | None = None,
        transaction: Any = None,
        **options: Unpack[SubmitKeywords],
    ) -> Run | Awaitable[AsyncRun]:
        """Store a run as queued, and return it; a worker (``graph.work``) executes it.

        ``at`` is when it may start. With a ``key``, a second call returns the first run. On PostgreSQL, ``transaction``
        is a psycopg connection: the run is stored with everything else in its transaction, or with none of it.
        ``limit``, ``before``, ``after`` and ``metadata`` are as for ``run``. On a thread with an unfinished run, the
        same input returns that run (a failed one is tried again), and another is refused.
        """
        _check_thread(thread)
        asked = self._submission(thread, input, at, key, options)
        if isinstance(thread, AsyncThread):
            return asubmit(thread, self.build(), asked)
        return submit(thread, self.build(), asked, transaction)

    def _submission(
        self,
        thread: AnyThread,
        input: Mapping[str, Any] | None,
        at: datetime | None,
        key: str | None,
        options: SubmitKeywords,
    ) -> Submission:
        services = access_of(thread).services
        if at is not None and (not isinstance(at, datetime) or at.tzinfo is None):
            raise InvalidInput("at must be a datetime with a time zone", hint="Use datetime.now(timezone.utc)")
        given = {} if input is None else input
        self.build().schema.given(given, self.name)  # which refuses keys that the state does not have
        limit, metadata = options.get("limit"), options.get("metadata")
        stored = {
            "limit": None if limit is None else check_limit(limit),
            "before": sorted(self._pauses(options.get("before", ()), "before")),
            "after": sorted(self._pauses(options.get("after", ()), "after")),
            "metadata": dict(metadata or {}),
        }
        return Submission(given, stored, services.new_id(), key, to_microseconds(services.now() if at is None else at))

    async def work(
        self,
        store: Store | AsyncStore,
        *,
        concurrency: int = 1,
        attempts: int = ATTEMPTS,
        until_idle: bool = False,
        **how: Unpack[RunKeywords],
    ) -> int:
        """Execute the queued, abandoned, due and answered runs of this graph, until SIGTERM, SIGINT or a cancellation.

        Runs ``concurrency`` of them at a time. On SIGTERM or SIGINT it claims nothing more, ends its runs between two
        nodes, and returns how many executions ended; another worker continues them at once. A failing run is tried
        again after a growing pause, at most ``attempts`` times without a step in between. ``until_idle`` returns once
        nothing is left to do now. For ``how``, see ``RunKeywords``; ``lease``, ``wait`` and ``cancel`` do not apply.
        """
        lease_s = how.pop("lease_s", DEFAULT_LEASE_S) or DEFAULT_LEASE_S
        wrong = sorted({"lease", "wait", "cancel"} & how.keys())
        if wrong:
            raise InvalidInput(f"work does not take {wrong[0]!r}", hint="A worker takes the leases of its runs itself")
        if not isinstance(store, Store | AsyncStore):
            raise InvalidInput(
                f"work needs the store whose runs it executes, not {type(store).__name__}",
                hint='Pass backstay.open("…")',
            )
        used = store if isinstance(store, AsyncStore) else async_twin(store)
        worker = Worker(self, used, concurrency, lease_s, attempts, until_idle, how)
        with stopped_by_signals(worker):
            return await worker.run()

    def work_sync(
        self,
        store: Store,
        *,
        concurrency: int = 1,
        attempts: int = ATTEMPTS,
        until_idle: bool = False,
        **how: Unpack[RunKeywords],
    ) -> int:
        """``work`` for programs without an event loop."""
        return asyncio.run(self.work(store, concurrency=concurrency, attempts=attempts, until_idle=until_idle, **how))

    # Running ------------------------------------------------------------------------------------------------------

    async def run(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
        before: Iterable[str] = (),
        after: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        **how: Unpack[RunKeywords],
    ) -> Result:
        """Start a run, or continue the thread's unfinished run; return how it ended or why it waits.

        The input is the initial state, or an update of the thread's current state. An unfinished run is continued if it
        is of this graph and was started with the same input, or if no input is given; another one is refused. With a
        ``key``, a run of this thread that was started with the same key and is over is not run again: its result is
        returned. ``limit``, ``before`` and ``after`` add to the graph's own; they and ``metadata`` are stored with the
        run. Without a thread nothing is stored, and the run cannot pause. For ``how``, see ``RunKeywords``.
        """
        options = self._options(thread, limit, before, after, metadata)
        return await start(self._setup(thread, how), {} if input is None else input, options, key)

    def run_sync(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
        before: Iterable[str] = (),
        after: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        **how: Unpack[RunKeywords],
    ) -> Result:
        """``run`` for programs without an event loop."""
        options = self._options(thread, limit, before, after, metadata)
        setup = self._setup(thread, how, blocking=True)
        return run_to_end(start(setup, {} if input is None else input, options, key))

    async def resume(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        by: str = "resume",
        update: Mapping[str, Any] | None = None,
        compatible: bool = False,
        limit: int | None = None,
        **how: Unpack[RunKeywords],
    ) -> Result:
        """Resume the run of a thread after a crash, a pause, a failure or a cancellation; start it if it is queued.

        ``answers`` is the decision on the only open question, or a mapping of interrupt ids to decisions; ``by`` is the
        person who decided. Without answers, the run uses decisions made with ``thread.decide``, and waits again if
        there are none. ``update`` is applied to the state first. If the graph has changed, the run is refused with
        GraphMismatch unless a migration covers the change, or the position does not depend on it and
        ``compatible=True``.
        """
        request = ResumeRequest(answers=answers, by=by, update=update, compatible=compatible, limit=limit)
        return await resume(self._setup(thread, how), request)

    def resume_sync(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        by: str = "resume",
        update: Mapping[str, Any] | None = None,
        compatible: bool = False,
        limit: int | None = None,
        **how: Unpack[RunKeywords],
    ) -> Result:
        """``resume`` for programs without an event loop."""
        request = ResumeRequest(answers=answers, by=by, update=update, compatible=compatible, limit=limit)
        return run_to_end(resume(self._setup(thread, how, blocking=True), request))

    async def edit(
        self,
        thread: AnyThread,
        update: Mapping[str, Any],
        *,
        on: CheckpointMeta | str | None = None,
        **how: Unpack[RunKeywords],
    ) -> Checkpoint:
        """Change the state of an unfinished run that no process runs now, and return the new checkpoint.

        The update is applied as a node's would be, with the reducers. The position and the open questions stay. ``on``
        is the checkpoint that the caller looked at: if it is no longer the newest, this raises Conflict.
        """
        request = ResumeRequest(update=update, on=None if on is None else id_of(on), only_edits=True)
        return _edited(await resume(self._setup(thread, how), request))

    def edit_sync(
        self,
        thread: AnyThread,
        update: Mapping[str, Any],
        *,
        on: CheckpointMeta | str | None = None,
        **how: Unpack[RunKeywords],
    ) -> Checkpoint:
        """``edit`` for programs without an event loop."""
        request = ResumeRequest(update=update, on=None if on is None else id_of(on), only_edits=True)
        return _edited(run_to_end(resume(self._setup(thread, how, blocking=True), request)))

    @overload
    def stream(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        *,
        mode: Literal["events"] = "events",
        buffer: int = BUFFER,
        **options: Any,
    ) -> Stream[Event]: ...
    @overload
    def stream(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        *,
        mode: Literal["values", "updates"],
        buffer: int = BUFFER,
        **options: Any,
    ) -> Stream[Any]: ...
    def stream(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        *,
        mode: Mode = "events",
        buffer: int = BUFFER,
        **options: Any,
    ) -> Stream[Any]:
        """Run, and yield what happens. After the loop, ``stream.result`` has the outcome.

        Takes the arguments of ``run`` too. ``mode`` "events" yields all events; the last one is ``RunEnded``. "values"
        yields the state of this graph at the start and after each commit. "updates" yields ``{node: update}`` for each
        node that is committed, in a subgraph ``{"outer/inner": update}``. The run waits for a reader that is ``buffer``
        items behind before it starts another node.
        """
        return Stream(lambda feed: self.run(thread, input, **options, on_event=feed), mode, buffer)

    @overload
    def stream_resume(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        mode: Literal["events"] = "events",
        buffer: int = BUFFER,
        **options: Any,
    ) -> Stream[Event]: ...
    @overload
    def stream_resume(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        mode: Literal["values", "updates"],
        buffer: int = BUFFER,
        **options: Any,
    ) -> Stream[Any]: ...
    def stream_resume(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        mode: Mode = "events",
        buffer: int = BUFFER,
        **options: Any,
    ) -> Stream[Any]:
        """Resume, and yield what happens, as ``stream`` does. Takes the arguments of ``resume``."""
        return Stream(lambda feed: self.resume(thread, answers, **options, on_event=feed), mode, buffer)

    # Time travel --------------------------------------------------------------------------------------------------

    @overload
    async def replay(
        self, thread: AnyThread, checkpoint: CheckpointMeta | str, *, plan: Literal[True]
    ) -> ReplayPlan: ...
    @overload
    async def replay(
        self,
        thread: AnyThread,
        checkpoint: CheckpointMeta | str,
        *,
        branch: str,
        set: Mapping[str, Any] | None = None,
        effects: str = REPLAY,
        compatible: bool = False,
        plan: Literal[False] = False,
        **how: Unpack[RunKeywords],
    ) -> Result: ...
    async def replay(
        self,
        thread: AnyThread,
        checkpoint: CheckpointMeta | str,
        *,
        branch: str = "",
        set: Mapping[str, Any] | None = None,
        effects: str = REPLAY,
        compatible: bool = False,
        plan: bool = False,
        **how: Unpack[RunKeywords],
    ) -> Result | ReplayPlan:
        """Run from any checkpoint of a thread, on a new branch, with some keys of the state ``set`` to other values.

        The old branch does not change. An effect that it did after that checkpoint is not done again if its arguments
        are the same: its stored result is used, unless ``effects="again"``. With ``plan=True`` nothing runs and nothing
        is written; the plan lists the nodes that would run and the effects that would be reused.
        """
        setup = self._setup(thread, how)
        if plan:
            return await plan_of(setup, checkpoint)
        return await replay(setup, checkpoint, branch, set, effects, ResumeRequest(compatible=compatible))

    @overload
    def replay_sync(
        self, thread: AnyThread, checkpoint: CheckpointMeta | str, *, plan: Literal[True]
    ) -> ReplayPlan: ...
    @overload
    def replay_sync(
        self,
        thread: AnyThread,
        checkpoint: CheckpointMeta | str,
        *,
        branch: str,
        set: Mapping[str, Any] | None = None,
        effects: str = REPLAY,
        compatible: bool = False,
        plan: Literal[False] = False,
        **how: Unpack[RunKeywords],
    ) -> Result: ...
    def replay_sync(
        self,
        thread: AnyThread,
        checkpoint: CheckpointMeta | str,
        *,
        branch: str = "",
        set: Mapping[str, Any] | None = None,
        effects: str = REPLAY,
        compatible: bool = False,
        plan: bool = False,
        **how: Unpack[RunKeywords],
    ) -> Result | ReplayPlan:
        """``replay`` for programs without an event loop."""
        setup = self._setup(thread, how, blocking=True)
        if plan:
            return run_to_end(plan_of(setup, checkpoint))
        return run_to_end(replay(setup, checkpoint, branch, set, effects, ResumeRequest(compatible=compatible)))

    def _setup(self, thread: AnyThread | None, how: RunKeywords, blocking: bool = False) -> Setup:
        _check_thread(thread)
        if isinstance(thread, Thread) and not blocking:  # the caller's event loop must not wait for a commit
            thread = AsyncThread(access_of(thread), handle_of(thread).cursor)
        return Setup(built=self.build(), thread=thread, blocking=blocking, **how)

    def _options(
        self,
        thread: AnyThread | None,
        limit: int | None,
        before: Iterable[str],
        after: Iterable[str],
        metadata: Mapping[str, Any] | None,
    ) -> RunOptions:
        known = identity(self.build())
        _check_thread(thread)
        return RunOptions(
            str(uuid.uuid4()) if thread is None else access_of(thread).services.new_id(),
            known.hash,
            known.shape,
            limit=None if limit is None else check_limit(limit),
            before=self._pauses(before, "before"),
            after=self._pauses(after, "after"),
            metadata=metadata or {},
        )

    def _pauses(self, names: Iterable[str], what: str) -> frozenset[str]:
        named = check_names(names, what)
        everywhere = {node for each in all_graphs(self.build()) for node in each.nodes}
        unknown = sorted(named - everywhere - {"*"})
        if unknown:
            raise InvalidInput(f"{what} names {unknown[0]!r}, which is not a node of graph {self.name!r}")
        return named

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {len(self._nodes)} nodes, {len(self._edges)} edges>"


def _check_thread(thread: object) -> None:
    if thread is not None and not isinstance(thread, AnyThread):
        hint = 'Pass store.thread("name"), or None'
        if isinstance(thread, str | os.PathLike):
            hint = 'Open the path or URL first: backstay.open(…).thread("name")'
        raise InvalidInput(f"a run is stored in a thread, not in {type(thread).__name__}", hint=hint)


def _edited(result: Result) -> Checkpoint:
    assert result.checkpoint is not None
    return result.checkpoint
