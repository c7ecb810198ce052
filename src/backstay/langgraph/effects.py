"""Effects inside LangGraph nodes: a finished tool call is not repeated when a crash makes its node run again.

``effect`` and ``aeffect`` are ``Thread.effect`` for a node. The thread is that of the running graph, and the key is
prefixed with the name of the task. LangGraph makes that name (the namespace with the ids of the task and of those
around it) from the checkpoint that the task runs on. So the same task of the same checkpoint, run again after a crash,
a retry or an answered interrupt, finds the result. A task of another step, of another ``Send`` or after time travel
(which starts with a checkpoint of its own) has another name. ``once="thread"`` leaves out the task: the key alone then
names the effect in the thread, for all runs and branches.

LangGraph stores a checkpoint while the next node is already running, and a checkpoint that was never stored cannot be
found again. So an effect starts only when the checkpoints that its name is made of are stored. With durability "exit"
they are stored only at the end of the run.

The saver's serializer stores results that our codec cannot encode, such as chat messages. If it encrypts, it stores
all results.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.config import get_config

from backstay.codec import encode
from backstay.errors import EncodeError, InvalidInput, StoreBusy
from backstay.langgraph.names import GraphLocation, config_of, thread_name
from backstay.operations.drivers import async_sleep
from backstay.operations.ledger import check_key
from backstay.store.base import Backend, Query
from backstay.thread.access import access_of
from backstay.thread.effects import UNKNOWN_ON, Reconcile
from backstay.thread.store import Store, async_twin

T = TypeVar("T")
Once = Literal["task", "thread"]

STORED_WITHIN_S = 30.0
"""How long an effect waits for the checkpoint of its task to be stored."""

_POLL_S, _POLL_S_MAX = 0.001, 0.05
_TASK_LENGTH_MAX = 600  # characters
_SERIALIZED = "backstay:serialized"
_RUNS_MAX = 4096


def effect(
    key: str,
    fn: Callable[..., T],
    /,
    *args: Any,
    once: Once = "task",
    ledger: Store | None = None,
    reconcile: Reconcile | None = None,
    idempotent: bool = False,
    unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON,
    **kwargs: Any,
) -> T:
    """Run a function with a side effect once, in a node of a running graph, and return its result.

    ``fn(*args, **kwargs)`` is called unless the ledger has its result. ``Thread.effect`` describes what happens if the
    outcome is unknown, and ``reconcile``, ``idempotent`` and ``unknown_on``. ``key`` names the effect in its task; give
    each effect of a task its own key (in a tool, include the id of the tool call). With ``once="thread"`` the key names
    the effect in the whole thread. ``ledger`` is the store to use if the graph's checkpointer is not a
    ``BackstaySaver``.

    Pass everything the effect depends on as arguments: other arguments under the same key raise EffectChanged.
    """
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(reconcile):
        raise InvalidInput(f"effect {key!r} was given a coroutine function", hint="Use await aeffect(…)")
    task = _Task.current(key, once, ledger)
    with task.only_once():
        task.wait_until_stored()
        stored = _SerializedResult(fn, getattr(task.saver, "serde", None), awaits=False)
        call = functools.partial(task.store.thread(task.thread).effect, task.key, stored, *args, **kwargs)
        return stored.result(call(reconcile=reconcile, idempotent=idempotent, unknown_on=unknown_on))  # type: ignore[no-any-return]


async def aeffect(
    key: str,
    fn: Callable[..., Any],
    /,
    *args: Any,
    once: Once = "task",
    ledger: Store | None = None,
    reconcile: Reconcile | None = None,
    idempotent: bool = False,
    unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON,
    **kwargs: Any,
) -> Any:
    """Do what ``effect`` does, in a node that is a coroutine function; ``fn`` may be one too."""
    task = _Task.current(key, once, ledger)
    with task.only_once():
        await task.await_stored()
        stored = _SerializedResult(fn, getattr(task.saver, "serde", None), awaits=True)
        call = functools.partial(async_twin(task.store).thread(task.thread).effect, task.key, stored, *args, **kwargs)
        return stored.result(await call(reconcile=reconcile, idempotent=idempotent, unknown_on=unknown_on))


# The task ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """The running task of an effect, and the effect's key in the ledger."""

    store: Store
    thread: str
    key: str
    saver: BaseCheckpointSaver[Any] | None
    checkpoints: tuple[tuple[GraphLocation, str], ...]  # the checkpoints that the key is made of
    run: tuple[object, ...] | None  # distinguishes this run of the task from all others of this process, if known

    @classmethod
    def current(cls, key: str, once: Once, ledger: Store | None) -> _Task:
        """Return the task that calls this; raise InvalidInput outside of a graph."""
        check_key(key)
        if once not in ("task", "thread"):
            raise InvalidInput(f"unknown once: {once!r}", hint='Pass "task" or "thread"')
        try:
            configurable = get_config()["configurable"]
        except (RuntimeError, KeyError):
            raise InvalidInput(
                f"effect {key!r} was called outside of a running graph's node",
                hint="Elsewhere use store.thread(…).effect(…). A Python thread of your own needs the node's context",
            ) from None
        saver = configurable.get("__pregel_checkpointer")
        store = getattr(saver, "store", None) if ledger is None else ledger
        if not isinstance(store, Store) or configurable.get("thread_id") is None:
            raise InvalidInput(
                f"effect {key!r} has no ledger: the graph has no BackstaySaver, or the run has no thread_id",
                hint="Compile the graph with checkpointer=BackstaySaver(…), or pass an open store as ledger=",
            )
        thread, ns = thread_name(configurable["thread_id"]), str(configurable.get("checkpoint_ns") or "")
        saver = saver if isinstance(saver, BaseCheckpointSaver) else None
        run, info = None, getattr(configurable.get("__pregel_runtime"), "execution_info", None)
        started = getattr(info, "node_first_attempt_time", None)
        if info is not None and started is not None:
            run = (configurable["thread_id"], configurable.get("checkpoint_ns"), info.node_attempt, started, key)
        if once == "thread":
            return cls(store, thread, key, saver, (), run)
        if configurable.get("__pregel_durability") == "exit":
            raise InvalidInput(
                f"effect {key!r}: the run's durability is 'exit', so after a crash its task could not be found again",
                thread=thread,
                hint='Run the graph with durability="sync" or "async", or pass once="thread" and a key that is unique '
                "in the thread",
            )
        if len(ns) > _TASK_LENGTH_MAX:  # a deeply nested task is named by its digest
            ns = f"{ns[:100]}…{hashlib.sha256(ns.encode()).hexdigest()}"
        # Those of the task's graph and of the graphs around it. A task of the functional API lists its caller's
        # checkpoint twice, the second time under the caller's own name.
        around, found = configurable.get("checkpoint_map") or {}, dict[str, GraphLocation]()
        for name in sorted(around, key=len):
            found.setdefault(str(around[name]), GraphLocation(thread, str(name)))
        checkpoints = tuple((location, checkpoint_id) for checkpoint_id, location in found.items())
        return cls(store, thread, f"{ns}:{key}", saver, checkpoints, run)

    # Waiting until the task can be found again

    def wait_until_stored(self) -> None:
        """Wait until every checkpoint that the key is made of is stored."""
        for pause in self._pauses():
            if self.is_stored():
                return
            time.sleep(pause)

    async def await_stored(self) -> None:
        """Do what ``wait_until_stored`` does, without blocking the event loop that may be storing the checkpoint."""
        for pause in self._pauses():
            if await self.ais_stored():
                return
            await async_sleep(pause)

    def _pauses(self) -> Iterator[float]:
        """Yield how long to wait after each look at the store; raise StoreBusy when it takes too long."""
        deadline, pause = time.monotonic() + STORED_WITHIN_S, _POLL_S
        yield pause
        while time.monotonic() < deadline:
            pause = min(pause * 2, _POLL_S_MAX)
            yield pause
        raise StoreBusy(
            f"effect {self.key!r} did not start: its task's checkpoint was not stored within {STORED_WITHIN_S:g} s",
            thread=self.thread,
            hint="Did storing it fail, or does its subgraph have checkpointer=False? In a coroutine, await aeffect(…)",
        )

    def is_stored(self) -> bool:
        """Return whether the checkpoints are stored, by the ledger's store if it is the saver's, else by the saver."""
        if self._is_ours:
            return self._all_found(access_of(self.store).store)
        saver = self.saver
        return saver is None or all(saver.get_tuple(config_of(*each)) for each in self.checkpoints)  # type: ignore[arg-type]

    async def ais_stored(self) -> bool:
        """Do what ``is_stored`` does."""
        if self._is_ours:
            return await access_of(self.store).arun(self._all_found)
        saver = self.saver
        for each in self.checkpoints if saver is not None else ():
            if await saver.aget_tuple(config_of(*each)) is None:  # type: ignore[arg-type,union-attr]
                return False
        return True

    @property
    def _is_ours(self) -> bool:
        return getattr(self.saver, "store", None) is self.store

    def _all_found(self, store: Backend) -> bool:
        names = {location.name(checkpoint_id) for location, checkpoint_id in self.checkpoints}
        return len(store.find(Query(self.store.namespace, ids=tuple(names)))) == len(names)

    @contextmanager
    def only_once(self) -> Iterator[None]:
        """Refuse a key that this run of the task has used already; a key whose effect failed may be used again."""
        mine = object()
        if self.run is not None and _used.setdefault(self.run, mine) is not mine:
            raise InvalidInput(
                f"this run of the task has already used the effect key {self.run[-1]!r}",
                thread=self.thread,
                hint="Give each effect of a task its own key: add the item, a number or the id of the tool call",
            )
        if len(_used) > _RUNS_MAX:
            for oldest in list(_used)[: _RUNS_MAX // 8]:
                _used.pop(oldest, None)
        try:
            yield
        except BaseException:
            _used.pop(self.run, None)
            raise


_used: dict[tuple[object, ...] | None, object] = {}


# Results ----------------------------------------------------------------------------------------------------------


class _SerializedResult:
    """A function whose result is converted to what the ledger can store; its own parameters stay visible."""

    def __init__(self, fn: Callable[..., Any], serde: SerializerProtocol | None, *, awaits: bool) -> None:
        if not callable(fn):
            raise InvalidInput(f"fn must be a function, not {type(fn).__name__}")
        self.__wrapped__ = fn  # ``inspect.signature`` looks here
        self._serde = serde
        self._awaits = awaits
        self._fresh: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.__wrapped__(*args, **kwargs)
        if not inspect.isawaitable(answer):
            return self._storable(answer)

        async def later() -> Any:
            return self._storable(await answer)

        return later() if self._awaits else answer  # the ledger refuses an awaitable

    def _storable(self, result: Any) -> Any:
        """Return what the ledger stores. A result that nothing can encode is passed on; the ledger refuses it."""
        self._fresh[:] = [result]
        serde = self._serde
        is_secret = isinstance(serde, EncryptedSerializer)
        try:
            if not is_secret:
                encode(result)
                return result
        except EncodeError:
            if serde is None:
                return result
        try:
            assert serde is not None
            tag, data = serde.dumps_typed(result)
        except Exception:  # the effect happened, even if its result cannot be serialized
            return object() if is_secret else result
        return (_SERIALIZED, tag, bytes(data))

    def result(self, stored: Any) -> Any:
        """Return the result of this call, or of the earlier call that the ledger has stored."""
        if type(stored) is not tuple or len(stored) != 3 or stored[0] != _SERIALIZED:
            return stored
        if self._fresh:
            return self._fresh[0]
        if self._serde is None:
            raise InvalidInput(
                "a saver's serializer stored the result of this effect, and this graph has no saver",
                hint="Call the effect in a graph with the checkpointer that stored it",
            )
        return self._serde.loads_typed((stored[1], stored[2]))
