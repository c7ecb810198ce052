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

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
from backstay.engine.sinks import CheckpointSink
from backstay.engine.start import (
    REPLAY,
    Answers,
    AnyThread,
    Compose,
    ReplayPlan,
    ResumeRequest,
    Setup,
    plan_of,
    replay,
    resume,
    start,
)
from backstay.engine.triggers import Trigger
from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta
from backstay.operations.arguments import id_of
from backstay.thread.access import access_of, handle_of
from backstay.thread.lease import AsyncLease, Lease
from backstay.thread.store import AsyncStore, Store
from backstay.thread.thread import AsyncThread, Thread


class RunKeywords(TypedDict, total=False):
    """Options that every way to run a graph takes. None of them is stored.

    ``sink`` receives every checkpoint in addition to the thread, or is a function that takes the thread's own sink and
    returns the sink to use; ``trigger`` decides when. ``on_event`` is called with each event. ``runtime`` has values
    for fields that are not stored. ``lease_s`` is how long the lease of the thread lasts without a save (None: the
    caller makes sure that no other process runs the thread), ``wait_s`` how long to wait for a lease that a killed
    process left behind, or for another run on the same handle. If you took the lease with this handle yourself, pass it
    as ``lease``; a replay takes its own, on the new branch. ``pause_check_s`` is how often the run looks for a request
    to pause. ``cancel`` ends the run.
    """

    sink: CheckpointSink | Compose | None
    trigger: Trigger
    on_event: Callable[[Event], None] | None
    runtime: Mapping[str, Any]
    lease_s: float | None
    wait_s: float
    lease: Lease | AsyncLease | None
    pause_check_s: float
    cancel: Cancellation | None


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
        access, built = access_of(store), self.build()
        if isinstance(store, AsyncStore):
            return access.arun(pending_runs, built, access.services)
        return pending_runs(access.store, built, access.services)

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
        **how: Unpack[RunKeywords],
    ) -> Result:
        """Start a run on a thread that is new, or whose last run is over; return how it ended or why it waits.

        The input is the initial state, or an update of the thread's current state. ``limit``, ``before`` and ``after``
        add to the graph's own; they and ``metadata`` are stored with the run. Without a thread nothing is stored, and
        the run cannot pause. For ``how``, see ``RunKeywords``.
        """
        options = self._options(thread, limit, before, after, metadata)
        return await start(self._setup(thread, how), {} if input is None else input, options)

    def run_sync(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
        before: Iterable[str] = (),
        after: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        **how: Unpack[RunKeywords],
    ) -> Result:
        """``run`` for programs without an event loop."""
        options = self._options(thread, limit, before, after, metadata)
        return run_to_end(start(self._setup(thread, how, blocking=True), {} if input is None else input, options))

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
        """Resume the run of a thread after a crash, a pause, a failure or a cancellation.

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
        raise InvalidInput(
            f"a run is stored in a thread, not in {type(thread).__name__}", hint='Pass store.thread("name"), or None'
        )


def _edited(result: Result) -> Checkpoint:
    assert result.checkpoint is not None
    return result.checkpoint
