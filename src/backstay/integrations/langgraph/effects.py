"""Effects inside LangGraph nodes: a finished tool call is not made again when a crash makes its node run again.

``effect`` and ``aeffect`` are ``Thread.effect`` for a node: the thread is that of the running graph, and the key is put
behind the name of the task. LangGraph makes that name (the namespace with the ids of the task and of those around it)
from the checkpoint that the task runs on. So who runs the same task of the same checkpoint again, after a crash, a
retry or an answered interrupt, finds what was done. A task of another step, of another ``Send`` or after a time travel
(which LangGraph begins with a checkpoint of its own) has another name. ``once="thread"`` leaves the task out: then the
key alone names the effect in the thread, whichever run or branch comes to it.

A checkpoint that was never stored is not found again either, and LangGraph stores it while the next node is running
already. So an effect begins only when the checkpoints its name is made of are stored. With durability "exit" they are
not before the run is over.

What our codec cannot keep, such as a chat message, is kept by the saver's serializer; if that encrypts, everything is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.config import get_config

from backstay.codec import encode
from backstay.errors import EncodeError, InvalidInput, StoreBusy
from backstay.integrations.langgraph.names import Place, config_of, thread_name
from backstay.integrations.langgraph.sealed import encrypting
from backstay.store.base import Backend, Query
from backstay.thread.access import access_of
from backstay.thread.effects import UNKNOWN_ON, Reconcile
from backstay.thread.ledger import check_key
from backstay.thread.offload import rest
from backstay.thread.store import Store
from backstay.thread.store_async import async_twin

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
    """Do something to the world outside once, in a node of a running graph, and return its result.

    ``fn(*args, **kwargs)`` is called unless the ledger has its result; what happens when that is not known is described
    at ``Thread.effect``, as are ``reconcile``, ``idempotent`` and ``unknown_on``. ``key`` names the effect in its task:
    each of several in one task needs its own (in a tool, take the tool call's id into it). With ``once="thread"`` it
    names it in the whole thread. ``ledger`` is the store to use, if the graph's checkpointer is no ``BackstaySaver``.

    Pass what the effect depends on as arguments: other ones under the same key raise EffectChanged.
    """
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(reconcile):
        raise InvalidInput(f"a function of effect {key!r} has to be awaited", hint="Use await aeffect(…)")
    where = _Where.here(key, once, ledger)
    with where.alone():
        where.wait()
        kept = _Kept(fn, where.serde, awaits=False)
        thread = where.store.thread(where.thread)
        call = functools.partial(thread.effect, where.key, kept, *args, **kwargs)
        return kept.result(call(reconcile=reconcile, idempotent=idempotent, unknown_on=unknown_on))  # type: ignore[no-any-return]


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
    where = _Where.here(key, once, ledger)
    with where.alone():
        await where.await_stored()
        kept = _Kept(fn, where.serde, awaits=True)
        thread = async_twin(where.store).thread(where.thread)
        call = functools.partial(thread.effect, where.key, kept, *args, **kwargs)
        return kept.result(await call(reconcile=reconcile, idempotent=idempotent, unknown_on=unknown_on))


# Where ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Where:
    """The place of an effect in the running graph."""

    store: Store
    thread: str
    key: str
    saver: BaseCheckpointSaver[Any] | None
    checkpoints: tuple[tuple[Place, str], ...]  # those the key is made of
    run: tuple[object, ...] | None  # what tells this run of the task from all others of this process, if that is known

    @classmethod
    def here(cls, key: str, once: Once, ledger: Store | None) -> _Where:
        check_key(key)
        if once not in ("task", "thread"):
            raise InvalidInput(f"once is {once!r}", hint='Pass "task" or "thread"')
        try:
            configurable = get_config()["configurable"]
        except (RuntimeError, KeyError):
            raise InvalidInput(
                f"effect {key!r} is not inside a node of a running graph",
                hint="Elsewhere use store.thread(…).effect(…); a thread of your own needs the node's context",
            ) from None
        saver = configurable.get("__pregel_checkpointer")
        store = getattr(saver, "store", None) if ledger is None else ledger
        if not isinstance(store, Store) or configurable.get("thread_id") is None:
            raise InvalidInput(
                f"effect {key!r} has no ledger: the graph has no BackstaySaver, or the run no thread_id",
                hint="Compile the graph with checkpointer=BackstaySaver(…), or pass ledger=, an open store",
            )
        thread = thread_name(configurable["thread_id"])
        ns, run = str(configurable.get("checkpoint_ns") or ""), _run_of(configurable, key)
        saver = saver if isinstance(saver, BaseCheckpointSaver) else None
        if once == "thread":
            return cls(store, thread, key, saver, (), run)
        if configurable.get("__pregel_durability") == "exit":
            raise InvalidInput(
                f"effect {key!r}: the run's durability is 'exit', so a crash would forget which task did it",
                thread=thread,
                hint='Run the graph with durability="sync" or "async", or pass once="thread" and a key for all times',
            )
        around = _checkpoints(thread, configurable.get("checkpoint_map") or {})
        return cls(store, thread, _name(ns, key), saver, around, run)

    @property
    def serde(self) -> SerializerProtocol | None:
        return None if self.saver is None else self.saver.serde

    # Waiting until the task can be found again ------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until every checkpoint that the key is made of is stored."""
        deadline, pause = time.monotonic() + STORED_WITHIN_S, _POLL_S
        while not self._is_stored():
            self._check(deadline)
            time.sleep(pause)
            pause = min(pause * 2, _POLL_S_MAX)

    async def await_stored(self) -> None:
        """Do what ``wait`` does, without holding up the event loop that may be storing it."""
        deadline, pause = time.monotonic() + STORED_WITHIN_S, _POLL_S
        while not await self._ais_stored():
            self._check(deadline)
            await rest(pause)
            pause = min(pause * 2, _POLL_S_MAX)

    def _is_stored(self) -> bool:
        if self._is_ours:
            return self._all_found(access_of(self.store).store)
        saver = self.saver
        return saver is None or all(saver.get_tuple(config_of(*each)) for each in self.checkpoints)  # type: ignore[arg-type]

    async def _ais_stored(self) -> bool:
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
        names = {place.name(checkpoint_id) for place, checkpoint_id in self.checkpoints}
        query = Query(self.store.namespace, ids=tuple(names))
        rows = store.find(query)
        return len(rows) == len(names)

    def _check(self, deadline: float) -> None:
        if time.monotonic() < deadline:
            return
        raise StoreBusy(
            f"effect {self.key!r} was not begun: the checkpoint of its task was not stored in {STORED_WITHIN_S:g} s",
            thread=self.thread,
            hint="Did storing it fail, or does its subgraph have checkpointer=False? In a coroutine, await aeffect(…)",
        )

    # Once in a task -------------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse a key that was used in this run of the task; one whose effect failed may be tried again."""
        if self.run is not None and not _is_first(self.run):
            raise InvalidInput(
                f"effect {self.run[-1]!r} was done or begun in this run of the task already",
                thread=self.thread,
                hint="Give each effect of a task its own key: add the item, the number or the tool call's id",
            )
        try:
            yield
        except BaseException:
            _used.pop(self.run, None)
            raise


_used: dict[tuple[object, ...] | None, object] = {}


def _is_first(run: tuple[object, ...]) -> bool:
    """Note that a key is used in a run of a task, and tell whether it is the first time."""
    mine = object()
    if _used.setdefault(run, mine) is not mine:
        return False
    if len(_used) > _RUNS_MAX:
        for oldest in list(_used)[: _RUNS_MAX // 8]:
            _used.pop(oldest, None)
    return True


def _run_of(configurable: Mapping[str, Any], key: str) -> tuple[object, ...] | None:
    info = getattr(configurable.get("__pregel_runtime"), "execution_info", None)
    began = getattr(info, "node_first_attempt_time", None)
    if info is None or began is None:
        return None
    return configurable["thread_id"], configurable.get("checkpoint_ns"), info.node_attempt, began, key


def _checkpoints(thread: str, around: Mapping[str, str]) -> tuple[tuple[Place, str], ...]:
    """Return the checkpoints that a task runs on, of its graph and those around it.

    A task of the functional interface names its caller's twice: once more under the caller's own name.
    """
    found: dict[str, Place] = {}
    for ns in sorted(around, key=len):
        found.setdefault(str(around[ns]), Place(thread, str(ns)))
    return tuple((place, checkpoint_id) for checkpoint_id, place in found.items())


def _name(ns: str, key: str) -> str:
    """Return the key of an effect in its thread; a task that is too deep to be spelled out is named by its digest."""
    if len(ns) > _TASK_LENGTH_MAX:
        ns = f"{ns[:100]}…{hashlib.sha256(ns.encode()).hexdigest()}"
    return f"{ns}:{key}"


# Results ----------------------------------------------------------------------------------------------------------


class _Kept:
    """A function whose result is made into what the ledger can keep; the function's own parameters stay visible."""

    def __init__(self, fn: Callable[..., Any], serde: SerializerProtocol | None, *, awaits: bool) -> None:
        if not callable(fn):
            raise InvalidInput(f"fn must be a function, not {type(fn).__name__}")
        self.__wrapped__ = fn  # where ``inspect.signature`` looks
        self._serde = serde
        self._awaits = awaits
        self._fresh: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.__wrapped__(*args, **kwargs)
        if not inspect.isawaitable(answer):
            return self._keep(answer)
        return self._later(answer) if self._awaits else answer  # which ``perform`` refuses

    async def _later(self, answer: Awaitable[Any]) -> Any:
        return self._keep(await answer)

    def _keep(self, result: Any) -> Any:
        """Return what is stored of a result. What nothing can keep is handed on, for the ledger to say so."""
        self._fresh[:] = [result]
        serde = self._serde
        is_secret = serde is not None and encrypting(serde) is not None
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
        except Exception:  # it was done, whatever the serializer thinks of its result
            return object() if is_secret else result
        return (_SERIALIZED, tag, bytes(data))

    def result(self, stored: Any) -> Any:
        """Return the result: this time's, or what was stored of an earlier one."""
        if not _is_serialized(stored):
            return stored
        if self._fresh:
            return self._fresh[0]
        if self._serde is None:
            raise InvalidInput(
                "the result of this effect was kept by a serializer, and there is none here",
                hint="Use it under a graph with the checkpointer that it was done under",
            )
        return self._serde.loads_typed((stored[1], stored[2]))


def _is_serialized(stored: Any) -> bool:
    return type(stored) is tuple and len(stored) == 3 and stored[0] == _SERIALIZED
