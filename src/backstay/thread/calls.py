"""Durable calls and effects inside a turn of a loop or a node of a graph.

A turn or a node runs again from its start after a crash or a question, and must find the results of its calls again. So
each call has a key that is the same in every run: the place, the name that the caller gave, and a number if the name is
used several times. The number counts the calls of one name in their order; a call that failed and is made again with
the same arguments keeps its number. Calls that run side by side have no order, so they need keys of their own. Calls
that a durable call makes have names inside it: they are not made again once its result is stored.

``durable`` decorates functions, and ``wrap`` wraps clients, so that no one has to think of a name. A decorated function
finds the turn or node that runs it by a context variable.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from backstay.errors import EffectUnknown, InvalidInput
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations import ledger
from backstay.operations.cursor import Handle
from backstay.operations.drivers import Steps, arun_steps, in_event_loop, run_steps
from backstay.pieces.body import to_body
from backstay.thread.effects import (
    EffectCall,
    RunOperation,
    arguments_digest,
    arun_operation,
    asynchronous,
    check_plain,
    execution,
    run_directly,
    unrecorded,
)

P = ParamSpec("P")
T = TypeVar("T")
Key = str | int | None
OnUnknown = Literal["ask", "raise"]

BY_DECISION = "decision"
"""The name under which an effect is settled when a person settles it by answering the run."""

CALL_OPTIONS = frozenset({"key", "retry", "timeout"})
EFFECT_OPTIONS = CALL_OPTIONS | {"reconcile", "idempotent", "unknown_on", "on_unknown"}
"""Keyword arguments of ``call`` and ``effect`` that are not passed to the function."""

_KEY_MARK = "#="
_PLAIN = (str, bytes, int, float, complex, bool, type(None), list, tuple, dict, set, frozenset, Enum, type)


# Names ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class NameUse:
    """The newest call under a name, in one turn or one attempt of a node."""

    number: int
    owner: object  # the task or the Python thread that made it
    request: bytes
    is_done: bool = False
    ran: bool = False  # its function was called, so its result was not stored before


class CallNames:
    """Gives each call of one turn, or of one attempt of a node, its name; ``main`` is the task that runs that."""

    def __init__(self, main: object = None) -> None:
        self._main = main
        self._used: dict[str, NameUse] = {}

    def next(self, name: str, key: Key, request: bytes) -> tuple[str, NameUse]:
        """Return the name of the next call, and the note to mark when it is done."""
        ledger.check_key(name)
        if _KEY_MARK in name:
            raise InvalidInput(f"the name {name!r:.80} contains {_KEY_MARK!r}, which separates names from keys")
        me = current_task()
        if key is not None:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise InvalidInput(f"key must be text or a whole number, not {type(key).__name__}")
            return f"{name}{_KEY_MARK}{key}", NameUse(1, me, request)
        before = self._used.get(name)
        if before is not None and before.owner is not me and before.owner is not self._main and _runs(before.owner):
            raise InvalidInput(
                f"several calls named {name!r} run side by side, so their order may differ after a restart",
                hint=f"Give each its own key, for example key=item.id, or another name instead of {name!r}",
            )
        number = 1
        if before is not None:
            # The same call after a failure is another attempt; anything else is the next call.
            is_retried = not before.is_done and before.request == request
            number = before.number if is_retried else before.number + 1
        use = self._used[name] = NameUse(number, me, request)
        return (name if number == 1 and "#" not in name else f"{name}#{number}"), use


def current_task() -> object:
    """Return the task that calls this, or the Python thread if it runs no event loop."""
    if not in_event_loop():
        return threading.current_thread()
    import asyncio

    return asyncio.current_task()


def _runs(owner: Any) -> bool:
    return owner.is_alive() if isinstance(owner, threading.Thread) else owner is not None and not owner.done()


class ListDigests:
    """Digests of the lists of a state that only grow: each call hashes only the items that are new since the last."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, int, Any]] = {}  # key -> version, number of items, the running digest

    def digest(self, key: str, version: object, items: list[Any], settled: int) -> bytes:
        """Return the digest of a list; only the first ``settled`` items are sure to stay if the version stays."""
        known = self._known.get(key)
        if known is None or known[0] != version or known[1] > settled:
            known = (version, 0, hashlib.sha256())
        _, count, running = known
        if count < settled:
            running = running.copy()
            running.update(to_body(items[count:settled], f"state.{key}").data)
            self._known[key] = (version, settled, running)
        if settled < len(items):
            running = running.copy()
            running.update(to_body(items[settled:], f"state.{key}").data)
        found: bytes = running.digest()
        return found

    def forget(self, keys: Iterable[str]) -> None:
        """Forget lists that were replaced."""
        for key in keys:
            self._known.pop(key, None)


# Where calls are made ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scope:
    """The names inside one durable call or effect."""

    site: CallSite
    prefix: str
    names: CallNames = field(default_factory=CallNames)


class CallPlace:
    """A turn or node, and the task or thread that runs it.

    Both are weak references: an interrupt may keep a loop from resetting the place, and a turn refers to its loop,
    which holds a lease.
    """

    def __init__(self, site: CallSite) -> None:
        self.site = weakref.ref(site)
        self.owner = weakref.ref(current_task())


_place: ContextVar[CallPlace | None] = ContextVar("backstay_place", default=None)
_scope: ContextVar[_Scope | None] = ContextVar("backstay_scope", default=None)


def current_place() -> CallPlace | None:
    """Return the turn or node that decorated functions belong to here; None outside of a run."""
    return _place.get()


def set_place(place: CallPlace | None) -> None:
    """Let decorated functions belong to this turn or node from now on, in this context."""
    _place.set(place)


class CallSite(ABC):
    """The common part of turns and of the contexts of nodes."""

    _names: CallNames
    _on_unknown: OnUnknown = "raise"

    @abstractmethod
    def _check_open(self) -> None:
        """Raise if this turn or node is over, or waits for a decision."""

    @abstractmethod
    def _handle_of_calls(self) -> Handle | None:
        """Return the handle that stores calls; None without a store."""

    @abstractmethod
    def _place_of_calls(self) -> str:
        """Return the part of all keys that names this turn or node."""

    @abstractmethod
    def _known_list(self, items: list[Any]) -> bytes | None:
        """Return the digest of a list of the state; None for any other list."""

    @abstractmethod
    def _ask_outcome(self, run: RunOperation, record: EffectRecord) -> Steps[Outcome]:
        """Ask a person whether an effect was done."""

    def _reusing(self, run: RunOperation, call: EffectCall) -> Steps[EffectCall]:
        """Return the call, or one that returns a result known from another branch."""
        return call
        yield

    @abstractmethod
    def _report(self, call: EffectCall, is_replayed: bool) -> None:
        """Report the end of a call to observers."""

    def _prepare(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> tuple[EffectCall, NameUse, bool]:
        """Return a call with its key, its note, and whether to ask a person if its outcome is unknown."""
        self._check_open()
        if isinstance(fn, DurableFunction):
            options, fn = {**fn.options, **options}, fn.function
        given = {field: value for field, value in options.items() if field not in ("key", "on_unknown")}
        on_unknown, key = options.get("on_unknown") or self._on_unknown, options.get("key")
        if on_unknown not in ("ask", "raise"):
            raise InvalidInput(f"on_unknown is {on_unknown!r:.40}", hint="Use 'ask' or 'raise'")
        request = arguments_digest(args, kwargs, self._known_list)
        scope = _scope.get()
        if scope is None or scope.site is not self:
            scope = _Scope(self, "", self._names)
        numbered, use = scope.names.next(name, key(*args, **kwargs) if callable(key) else key, request)
        numbered = scope.prefix + numbered
        scoped = _scoped(fn, _Scope(self, f"{numbered}/"), use) if callable(fn) else fn  # refused in the next line
        call = EffectCall(f"{self._place_of_calls()}{numbered}", scoped, args, kwargs, request=request, **given)
        return call, use, on_unknown == "ask"

    def _steps(self, run: RunOperation | None, call: EffectCall, use: NameUse, ask: bool, awaits: bool) -> Steps[Any]:
        """Run one call to its end."""
        handle = self._handle_of_calls()
        if handle is None or run is None:
            result = yield from unrecorded(call, awaits)
            use.is_done = True
            return result
        call = yield from self._reusing(run, call)
        while True:
            try:
                result = yield from execution(handle, run, call, awaits)
                break
            except EffectUnknown as unknown:
                if not ask:
                    raise
                record = unknown.record
            outcome = yield from self._ask_outcome(run, record)
            services, cursor = handle.services, handle.cursor
            settle = functools.partial(
                ledger.settle, services=services, cursor=cursor, shown=record, outcome=outcome, by=BY_DECISION
            )
            yield functools.partial(run, settle, None)
        use.is_done = True
        self._report(call, not use.ran)
        return result


def _scoped(fn: Callable[..., Any], scope: _Scope, use: NameUse) -> Callable[..., Any]:
    """Return a function that notes that it ran, and whose own durable calls have names inside this one."""

    async def wait(answer: Awaitable[Any]) -> Any:
        token = _scope.set(scope)
        try:
            return await answer
        finally:
            _scope.reset(token)

    def run(*args: Any, **kwargs: Any) -> Any:
        use.ran = True
        token = _scope.set(scope)
        try:
            answer = fn(*args, **kwargs)
        finally:
            _scope.reset(token)
        return wait(answer) if inspect.isawaitable(answer) else answer

    return functools.update_wrapper(run, fn)


def _take_options(kwargs: dict[str, Any], names: frozenset[str], fn: Callable[..., Any]) -> dict[str, Any]:
    """Take the options out of the keyword arguments of a call; refuse one that could also be meant for the function."""
    if names.isdisjoint(kwargs):
        return {}
    options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return options
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    own = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - bound.keys()
    for name in sorted(options.keys() & own):
        title = getattr(fn, "__name__", type(fn).__name__)
        raise InvalidInput(
            f"{name}= is an option of the call and also a parameter of {title}(), so it is unclear who gets it",
            hint=f"For the function, write functools.partial({title}, {name}=…). For the call, decorate the function: "
            f"durable.call({name}=…)({title})",
        )
    return options


class PlainCalls(CallSite):
    """Calls and effects of plain code."""

    def call(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call ``fn(*args, **kwargs)`` and store its result; after a restart, return the stored result.

        If the process dies inside the call, it is made again: use it for model calls and reads. Calls that share a name
        are numbered in their order. Other arguments than before raise EffectChanged.

        Options, which are not passed to ``fn``: ``key`` names one of several calls that run side by side; ``retry``, a
        RetryPolicy, says after which errors to try again; ``timeout`` is in seconds, for each attempt.
        """
        options = _take_options(kwargs, CALL_OPTIONS, fn)
        return cast("T", self._perform(name, fn, args, kwargs, {**options, "is_call": True}))

    def effect(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function that must not happen twice, and return its result; after a restart, return the stored result.

        Names and the options ``key``, ``retry`` and ``timeout`` are those of ``call``. If a crash, a timeout or a lost
        connection left its outcome unknown, ``reconcile`` finds out, or it is repeated if it is ``idempotent`` (see
        ``Thread.effect``). Otherwise ``on_unknown`` decides: "ask" asks a person (the default in a graph), "raise"
        raises EffectUnknown (the default in a loop). ``unknown_on`` are the errors after which it is unknown. A
        function with a parameter ``idempotency_key`` gets one to pass on to the provider.
        """
        return cast("T", self._perform(name, fn, args, kwargs, _take_options(kwargs, EFFECT_OPTIONS, fn)))

    def wrap(self, client: T, **options: Any) -> T:
        """Return a client whose methods are durable calls, named by their path; see ``Wrapped`` for the options."""
        return cast("T", Wrapped.of(self, client, options))

    def _perform(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        call, use, ask = self._prepare(name, fn, args, kwargs, options)
        check_plain(call)
        handle = self._handle_of_calls()
        run = None if handle is None else run_directly(handle)
        return run_steps(self._steps(run, call, use, ask, False), lambda: asynchronous(call))


class AsyncCalls(CallSite):
    """Calls and effects of coroutines."""

    @overload
    async def call(self, name: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T: ...
    @overload
    async def call(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...
    async def call(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a durable call; the function may be plain or a coroutine function. See ``PlainCalls.call``."""
        options = _take_options(kwargs, CALL_OPTIONS, fn)
        return await self._perform(name, fn, args, kwargs, {**options, "is_call": True})

    @overload
    async def effect(self, name: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T: ...
    @overload
    async def effect(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...
    async def effect(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run an effect; its functions may be plain or coroutine functions. See ``PlainCalls.effect``."""
        return await self._perform(name, fn, args, kwargs, _take_options(kwargs, EFFECT_OPTIONS, fn))

    def wrap(self, client: T, **options: Any) -> T:
        """Return a client whose methods are durable calls, to be awaited; see ``Wrapped`` for the options."""
        return cast("T", Wrapped.of(self, client, options))

    async def _perform(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        call, use, ask = self._prepare(name, fn, args, kwargs, options)
        handle = self._handle_of_calls()
        run = None if handle is None else arun_operation(handle)
        return await arun_steps(self._steps(run, call, use, ask, True))


# Functions and clients --------------------------------------------------------------------------------------------


class DurableFunction(Generic[P, T]):
    """A function that is a durable call or an effect when a turn or a node calls it, and ordinary elsewhere."""

    def __init__(self, function: Callable[P, T], name: str | None, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self.options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Make the call in the turn or node that runs now."""
        place = _place.get()
        site = cast("PlainCalls | AsyncCalls | None", None if place is None else place.site())
        if place is None or (site is None and place.owner() is current_task()):  # an interrupt left the place behind
            return self.function(*args, **kwargs)
        if site is None:  # a task or thread has outlived the turn or node that started it
            raise InvalidInput(
                f"{self.name}() was called after the turn or node that it belongs to had ended",
                hint="Wait in a turn or node for every task and thread that it starts",
            )
        is_async = inspect.iscoroutinefunction(self.function)
        if isinstance(site, AsyncCalls) != is_async:
            kinds = ("a coroutine function", "plain") if is_async else ("a plain function", "a coroutine")
            raise InvalidInput(
                f"{self.name}() is {kinds[0]}, and the node or turn that calls it is {kinds[1]}",
                hint=f"Write: await ctx.call({self.name!r}, {self.name}, …)" if not is_async else "Make both of a kind",
            )
        return cast("T", site._perform(self.name, self.function, args, kwargs, self.options))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(cast("Any", self), instance)

    def __repr__(self) -> str:
        return f"<durable {'call' if self.options.get('is_call') else 'effect'} {self.name}>"


class Durable:
    """Decorators: ``@durable.call`` and ``@durable.effect``, plain or with options.

    In a turn or a node, the decorated function is a durable call or an effect under its own name. Elsewhere it is an
    ordinary function. The options are those of ``Turn.call`` and ``Turn.effect``; ``key`` may be a function of the
    arguments, and ``name`` replaces the function's name.
    """

    @overload
    def call(self, function: Callable[P, T], /) -> DurableFunction[P, T]: ...
    @overload
    def call(self, /, **options: Any) -> Callable[[Callable[P, T]], DurableFunction[P, T]]: ...
    def call(self, function: Any = None, /, **options: Any) -> Any:
        """Make a function a durable call: it is called again if the process died inside it."""
        return _decorated(function, options, CALL_OPTIONS, {"is_call": True})

    @overload
    def effect(self, function: Callable[P, T], /) -> DurableFunction[P, T]: ...
    @overload
    def effect(self, /, **options: Any) -> Callable[[Callable[P, T]], DurableFunction[P, T]]: ...
    def effect(self, function: Any = None, /, **options: Any) -> Any:
        """Make a function an effect: it is never blindly repeated."""
        return _decorated(function, options, EFFECT_OPTIONS, {})


def _decorated(function: Any, options: dict[str, Any], known: frozenset[str], fixed: dict[str, Any]) -> Any:
    name = options.pop("name", None)
    unknown = sorted(options.keys() - known)
    if unknown:
        raise InvalidInput(
            f"there is no option {unknown[0]!r}", hint=f"The options are name, {', '.join(sorted(known))}"
        )
    if function is None:
        return lambda decorated: DurableFunction(decorated, name, {**options, **fixed})
    return DurableFunction(function, name, fixed)


durable = Durable()


class Wrapped:
    """A client whose methods are durable calls: ``model = ctx.wrap(client)``, then ``model.chat.create(…)``.

    The name of a call is the class and the path, "OpenAI.chat.create". With ``effects=True`` the methods are effects.
    ``result`` is a function that turns an answer into a value that can be stored, such as ``lambda r: r.model_dump()``;
    the caller gets that value, in the first run as after a restart. ``name`` replaces the name of the class, ``key``
    may be a function of the arguments, and all other options are those of ``call`` or ``effect``.
    """

    def __init__(self, client: object, path: str, perform: Callable[..., Any]) -> None:
        self.__client = client
        self.__path = path
        self.__perform = perform

    @classmethod
    def of(cls, site: PlainCalls | AsyncCalls, client: object, options: dict[str, Any]) -> Wrapped:
        """Return a wrapped client of a turn or a node."""
        name, result = options.pop("name", "") or type(client).__name__, options.pop("result", None)
        fixed: dict[str, Any] = {} if options.pop("effects", False) else {"is_call": True}
        checked = _decorated(None, options, CALL_OPTIONS if fixed else EFFECT_OPTIONS, fixed)(lambda: None).options

        def perform(path: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            called = method if result is None else _converted(method, result)
            return site._perform(path, called, args, kwargs, checked)

        return cls(client, name, perform)

    def __getattr__(self, name: str) -> Any:
        found, path = getattr(self.__client, name), f"{self.__path}.{name}"
        if inspect.isroutine(found):
            return functools.update_wrapper(functools.partial(self.__perform, path, found), found)
        return found if isinstance(found, _PLAIN) else Wrapped(found, path, self.__perform)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the client itself."""
        return self.__perform(self.__path, self.__client, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<durable {self.__path}>"


def _converted(method: Callable[..., Any], result: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the method with its result converted, awaited first if it must be."""

    async def wait(answer: Awaitable[Any]) -> Any:
        return result(await answer)

    def run(*args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        return wait(answer) if inspect.isawaitable(answer) else result(answer)

    return functools.update_wrapper(run, method)
