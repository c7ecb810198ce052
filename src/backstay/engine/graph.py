"""``Graph``: nodes, edges and a state, declared step by step and then run.

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
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from backstay.engine.build import all_graphs
from backstay.engine.cancellation import Cancellation
from backstay.engine.declaration import Declaration, check_limit, check_names
from backstay.engine.event import Event
from backstay.engine.fingerprint import fingerprint_of, identity
from backstay.engine.launch import Answers, AnyThread, Compose, Setup, Taking, resume, start
from backstay.engine.migration import add_migration
from backstay.engine.options import RunOptions
from backstay.engine.parked import ParkedRun, acheck, check
from backstay.engine.replay import REPLAY, ReplayPlan, plan_of, replay
from backstay.engine.result import Result
from backstay.engine.sink import CheckpointSink
from backstay.engine.stream import stream
from backstay.engine.trigger import Trigger
from backstay.errors import InvalidInput
from backstay.model.checkpoint import CheckpointMeta
from backstay.thread.access import access_of, handle_of
from backstay.thread.store import Store
from backstay.thread.store_async import AsyncStore
from backstay.thread.thread import Thread
from backstay.thread.thread_async import AsyncThread

T = TypeVar("T")


class How(TypedDict, total=False):
    """How a run is carried out, whichever way it begins; all optional, and nothing of it is stored.

    ``sink`` is told of every checkpoint besides the thread, or is a function from the thread's own sink to the one to
    use; ``trigger`` says when; ``on_event`` is called with each event; ``runtime`` has values for fields that are not
    stored; ``lease_s`` is how long the thread's lease runs without a save (None: the caller sees to it that nobody else
    runs it), ``wait_s`` how long to wait for it if a killed process left one behind; ``pause_check_s`` is how often it
    is looked whether somebody wants the run to pause; ``cancel`` ends it.
    """

    sink: CheckpointSink | Compose | None
    trigger: Trigger
    on_event: Callable[[Event], None] | None
    runtime: Mapping[str, Any]
    lease_s: float | None
    wait_s: float
    pause_check_s: float
    cancel: Cancellation | None


class Graph(Declaration):
    """A graph of nodes over one state. Declare it once; run it many times, also at the same time."""

    @property
    def fingerprint(self) -> int:
        """What tells this graph from every other: a number of 64 bits, independent of the order of declaration."""
        return fingerprint_of(self.build())

    def migrate(
        self,
        from_hash: int | str,
        *,
        state: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        nodes: Mapping[str, str] | None = None,
        to: int | str | None = None,
    ) -> None:
        """Say how runs are read that an earlier version of this graph, named by its fingerprint, has stored.

        ``state`` takes a stored state and returns the new one; ``nodes`` maps old names to new ones. Without either,
        such runs are accepted as they are. ``to`` names the version it leads to, if that is not this one.
        """
        add_migration(self, from_hash, state=state, nodes=nodes, to=to)

    @overload
    def check(self, store: Store) -> list[ParkedRun]: ...
    @overload
    def check(self, store: AsyncStore) -> Awaitable[list[ParkedRun]]: ...
    def check(self, store: Store | AsyncStore) -> list[ParkedRun] | Awaitable[list[ParkedRun]]:
        """Judge every unfinished run of this graph in a store: what deploying this version would do to it."""
        return acheck(self, store) if isinstance(store, AsyncStore) else check(self, store)

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
        **how: Unpack[How],
    ) -> Result:
        """Begin a run on a thread that is new, or whose last run is over; return how it ended or where it waits.

        The input is what the state begins with, or is folded into the state that the thread has. ``limit``, ``before``
        and ``after`` add to the graph's own; they and ``metadata`` are stored with the run. Without a thread nothing is
        stored, and the run cannot pause. ``how`` is the same for all ways to run: see ``How``.
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
        **how: Unpack[How],
    ) -> Result:
        """``run`` for programs without an event loop."""
        options = self._options(thread, limit, before, after, metadata)
        return _now(start(self._setup(thread, how, blocking=True), {} if input is None else input, options))

    async def resume(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        by: str = "resume",
        update: Mapping[str, Any] | None = None,
        compatible: bool = False,
        limit: int | None = None,
        **how: Unpack[How],
    ) -> Result:
        """Go on where a thread's run stands: after a crash, a pause, a failure or a cancellation.

        ``answers`` is a decision on the one thing the run waits for, or a mapping of interrupt ids to decisions; ``by``
        is who decided. Without an answer it goes on if ``thread.decide`` gave one, and waits again if not. ``update``
        is folded into the state first. A graph that has changed since is refused with GraphMismatch, unless a migration
        says how, or it differs in nothing that matters and ``compatible=True``.
        """
        taking = Taking(
            answers=answers,
            by=by,
            update=update,
            compatible=compatible,
            limit=None if limit is None else check_limit(limit),
        )
        return await resume(self._setup(thread, how), taking)

    def resume_sync(
        self,
        thread: AnyThread,
        answers: Answers = None,
        *,
        by: str = "resume",
        update: Mapping[str, Any] | None = None,
        compatible: bool = False,
        limit: int | None = None,
        **how: Unpack[How],
    ) -> Result:
        """``resume`` for programs without an event loop."""
        taking = Taking(
            answers=answers,
            by=by,
            update=update,
            compatible=compatible,
            limit=None if limit is None else check_limit(limit),
        )
        return _now(resume(self._setup(thread, how, blocking=True), taking))

    def stream(
        self,
        thread: AnyThread | None,
        input: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Event]:
        """Run and yield events as they happen; the last one is ``RunEnded``. Takes what ``run`` takes."""
        return stream(lambda on_event: self.run(thread, input, **options, on_event=on_event))

    def stream_resume(self, thread: AnyThread, answers: Answers = None, **options: Any) -> AsyncIterator[Event]:
        """Go on and yield events as they happen; the last one is ``RunEnded``. Takes what ``resume`` takes."""
        return stream(lambda on_event: self.resume(thread, answers, **options, on_event=on_event))

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
        **how: Unpack[How],
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
        **how: Unpack[How],
    ) -> Result | ReplayPlan:
        """Run from any checkpoint of a thread, on a new branch, with keys of the state ``set`` to other values.

        Nothing of the old branch changes. Effects that it did after that point are not done again where they are asked
        for with the same arguments: their results are used (``effects="again"`` does them anew). With ``plan=True``
        nothing is run or written: it says what would run again and which effects would be taken over.
        """
        setup = self._setup(thread, how)
        if plan:
            return await plan_of(setup, checkpoint)
        return await replay(setup, checkpoint, branch, set, effects, Taking(compatible=compatible))

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
        **how: Unpack[How],
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
        **how: Unpack[How],
    ) -> Result | ReplayPlan:
        """``replay`` for programs without an event loop."""
        setup = self._setup(thread, how, blocking=True)
        if plan:
            return _now(plan_of(setup, checkpoint))
        return _now(replay(setup, checkpoint, branch, set, effects, Taking(compatible=compatible)))

    def _setup(self, thread: AnyThread | None, how: How, blocking: bool = False) -> Setup:
        _check_thread(thread)
        if isinstance(thread, Thread) and not blocking:  # a loop runs here, which a commit must not hold up
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
            str(uuid.uuid4()) if thread is None else access_of(thread).context.new_id(),
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
            raise InvalidInput(f"{what} names {unknown[0]!r}, which is no node of graph {self.name!r}")
        return named

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {len(self._nodes)} nodes, {len(self._edges)} edges>"


def _check_thread(thread: object) -> None:
    if thread is not None and not isinstance(thread, AnyThread):
        raise InvalidInput(
            f"a run is kept in a thread, not in {type(thread).__name__}", hint='Pass store.thread("name"), or None'
        )


def _now(run: Coroutine[Any, Any, T]) -> T:
    """Run to the end in an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run)
    run.close()
    raise InvalidInput("there is an event loop running already", hint="Await run, resume or replay instead of …_sync")
