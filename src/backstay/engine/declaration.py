"""Declare a graph: its nodes, its edges and its state.

Declaring checks names and arguments only. ``build`` checks the graph as a whole and reports every mistake at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from backstay.engine.build import BuiltGraph, build
from backstay.engine.limits import Limiter
from backstay.engine.nodes import (
    COLLECT_ALL,
    END,
    FAIL,
    FAIL_FAST,
    PAUSE,
    Barrier,
    Choice,
    Condition,
    Edge,
    ForEach,
    Node,
    NodeFunction,
    NodeKind,
    Parallel,
    Projection,
    Subgraph,
    To,
    name_of,
)
from backstay.engine.state import Schema
from backstay.errors import InvalidInput
from backstay.model.decision import DecisionKind
from backstay.model.retry import ONCE, RetryPolicy

if TYPE_CHECKING:
    from backstay.engine.migration import Migration

F = TypeVar("F", bound=Callable[..., Any])

LIMIT = 1000
"""The default limit of nodes that a run may commit: it stops an endless loop."""

_NAME = re.compile(r"[^\s/#\[\]>:*,]{1,200}")


class Declaration:
    """The declaring half of ``Graph``: nodes, edges, start and end."""

    def __init__(
        self,
        name: str,
        *,
        state: type | None = None,
        reducers: Mapping[str, Any] | None = None,
        limit: int = LIMIT,
        before: Iterable[str] = (),
        after: Iterable[str] = (),
        strict: bool = False,
        validate: bool = True,
    ) -> None:
        """Declare a graph.

        ``state`` is a dataclass, TypedDict, pydantic model or dict; ``reducers`` adds to the reducers declared on its
        fields. A run pauses ``before`` and ``after`` the nodes named there (``"*"``: all nodes). ``limit`` is the
        number of nodes a run may commit. ``strict`` also finds nodes that change nested values of their input; it
        encodes the state twice per node, so use it in tests. A state that is a pydantic model is validated, field by
        field as they change, unless ``validate`` is False.
        """
        self.name = check_name(name, "graph")
        self.schema = Schema(state, reducers or {}, validate)
        self.limit = check_limit(limit)
        self.before = check_names(before, "before")
        self.after = check_names(after, "after")
        self.strict = strict
        self.migrations: dict[int, Migration] = {}
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._starts: list[str] = []
        self._built: BuiltGraph | None = None

    # Nodes --------------------------------------------------------------------------------------------------------

    @overload
    def node(self, function: F, /) -> F: ...
    @overload
    def node(
        self,
        name: str | None = None,
        /,
        *,
        retry: RetryPolicy = ONCE,
        timeout: float | None = None,
        fallback: Callable[..., Any] | None = None,
        on_failure: str = FAIL,
        at_once: int | None = None,
        per_second: float | None = None,
        **notes: Any,
    ) -> Callable[[F], F]: ...
    @overload
    def node(
        self,
        name: str,
        function: F,
        /,
        *,
        retry: RetryPolicy = ONCE,
        timeout: float | None = None,
        fallback: Callable[..., Any] | None = None,
        on_failure: str = FAIL,
        at_once: int | None = None,
        per_second: float | None = None,
        **notes: Any,
    ) -> F: ...
    def node(
        self,
        name: Any = None,
        function: Any = None,
        /,
        *,
        retry: RetryPolicy = ONCE,
        timeout: float | None = None,
        fallback: Callable[..., Any] | None = None,
        on_failure: str = FAIL,
        at_once: int | None = None,
        per_second: float | None = None,
        **notes: Any,
    ) -> Any:
        """Add a node: as ``@graph.node``, ``@graph.node("name", timeout=5)`` or ``graph.node("name", function)``.

        The function takes the state, and the run's context if it has a second parameter without a default or with the
        default None. It returns a mapping of the keys to update, or None. It may be a coroutine function. ``timeout``
        is in seconds, for each attempt.
        ``fallback`` is another such function, called when no attempts are left; it finds the error in ``ctx.error``.
        With ``on_failure="pause"`` the run then asks a person instead of failing.

        At most ``at_once`` calls of the function run at the same time, and at most ``per_second`` start in a second
        (0.5: one every two seconds), over all runs of this graph in this process. The timeout does not count the wait.
        """
        options = {"retry": retry, "timeout": timeout, "fallback": fallback, "on_failure": on_failure, **notes}
        options |= {"at_once": at_once, "per_second": per_second}
        if callable(name):
            return self.node(name.__name__, name)
        if function is None:
            return lambda decorated: self.node(name or decorated.__name__, decorated, **options)
        check_name(name, "node")
        if not isinstance(retry, RetryPolicy):
            raise InvalidInput(f"retry of {name!r} must be a RetryPolicy, not {type(retry).__name__}")
        if on_failure not in (FAIL, PAUSE):
            raise InvalidInput(f"on_failure of {name!r} is {on_failure!r:.40}", hint=f"Use {FAIL!r} or {PAUSE!r}")
        body = NodeFunction.of(_check_callable(function, f"node {name!r}"))
        instead = None
        if fallback is not None:
            instead = NodeFunction.of(_check_callable(fallback, f"fallback of {name!r}"))
        self._add(
            Node(
                name=name,
                kind=NodeKind.TASK,
                body=body,
                retry=retry,
                timeout_s=_check_timeout(timeout, name),
                fallback=instead,
                pauses=on_failure == PAUSE,
                limiter=_limiter(at_once, per_second, f"node {name!r}"),
                notes=notes,
            )
        )
        return function

    def subgraph(
        self,
        name: str,
        graph: Declaration,
        *,
        into: Mapping[str, str] | Projection | None = None,
        out: Mapping[str, str] | Projection | None = None,
        timeout: float | None = None,
        **notes: Any,
    ) -> None:
        """Add another graph as a node. It has its own state, steps and limit, and its position is stored too.

        ``into`` maps keys of this state to keys of the inner state, or is a function of this state (and of the mapped
        item, if it takes two arguments) that returns the initial inner state. By default, the keys that both states
        declare go in. ``out`` maps the other way when the inner graph is done; the changes come back as an update.
        """
        if not isinstance(graph, Declaration):
            raise InvalidInput(f"subgraph {name!r} must be a Graph, not {type(graph).__name__}")
        self._add(
            Node(
                name=check_name(name, "node"),
                kind=NodeKind.SUBGRAPH,
                inner=Subgraph(graph, into, out),
                timeout_s=_check_timeout(timeout, name),
                notes=notes,
            )
        )

    def barrier(
        self,
        name: str,
        prompt: str = "",
        *,
        payload: Callable[[Any], Any] | None = None,
        timeout: float | None = None,
        on_timeout: DecisionKind | str = DecisionKind.REJECT,
        on_reject: str | None = None,
        **notes: Any,
    ) -> None:
        """Add a node that runs nothing and waits for a person's decision.

        ``payload`` is a function of the state. It returns what to show to the person. An approval continues the run, a
        modification updates the state first, a rejection goes to ``on_reject`` or ends the run. After ``timeout``
        seconds the run takes ``on_timeout``, "reject" or "defer": a timeout never approves.
        """
        action = DecisionKind(on_timeout) if str(on_timeout) in tuple(DecisionKind) else None
        if action not in (DecisionKind.REJECT, DecisionKind.DEFER):
            raise InvalidInput(
                f"barrier {name!r}: on_timeout is {on_timeout!r:.40}",
                hint='Use "reject" or "defer": a timeout must never run what the barrier guards',
            )
        wait = Barrier(prompt, payload, _check_timeout(timeout, name), action, on_reject)
        self._add(Node(name=check_name(name, "node"), kind=NodeKind.BARRIER, wait=wait, notes=notes))

    # Edges --------------------------------------------------------------------------------------------------------

    def edge(
        self,
        source: str,
        target: str,
        *,
        when: Callable[[Any], Any] | None = None,
        name: str | None = None,
        fallback: bool = False,
    ) -> None:
        """Go from one node to another (or to ``END``) if ``when`` holds, or, as a ``fallback``, if no other edge holds.

        ``when`` is a function of the state without side effects; ``name`` is its name in the fingerprint and in
        drawings. Conditions are tried in the order in which they were declared.
        """
        self._connect(source, To(target), when, name, fallback)

    def choose(self, source: str, function: Callable[[Any], Any], ways: Mapping[str, str] | Iterable[str]) -> None:
        """Let a function of the state choose: go to ``ways[result]``, or to the named node if ``ways`` is a list."""
        chosen = dict(ways) if isinstance(ways, Mapping) else {way: way for way in ways}
        self._connect(source, Choice(_check_callable(function, f"choice after {source!r}"), chosen), None, None, False)

    def parallel(
        self,
        source: str,
        targets: Iterable[str],
        *,
        join: str = END,
        on_error: str = FAIL_FAST,
        at_once: int | None = None,
        when: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Run several nodes in parallel, then ``join``. Each node sees the state as it was before any of them ran.

        With ``on_error="fail_fast"`` the first failure cancels the others; with "collect_all" all run to their end. In
        both cases, finished branches are stored and do not run again. At most ``at_once`` nodes run at the same time.
        """
        limit = _check_at_once(at_once, f"parallel after {source!r:.60}")
        self._connect(source, Parallel(tuple(targets), join, _check_on_error(on_error), limit), when, name, False)

    def map(
        self,
        source: str,
        node: str,
        over: str | Callable[[Any], Any],
        *,
        join: str = END,
        on_error: str = FAIL_FAST,
        at_once: int | None = None,
        when: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Run a node once for each item of a list, in parallel, then ``join``.

        ``over`` is a key of the state or a function of it. The node finds its item in ``ctx.item``. At most ``at_once``
        items are worked on at the same time.
        """
        limit = _check_at_once(at_once, f"map after {source!r:.60}")
        self._connect(source, ForEach(node, over, join, _check_on_error(on_error), limit), when, name, False)

    def start(self, node: str) -> None:
        """Name the first node."""
        self._starts.append(check_name(node, "start"))
        self._built = None

    def end(self, *nodes: str) -> None:
        """Let a run end after these nodes, unless one of their other edges holds."""
        for node in nodes:
            self._connect(node, To(END), None, None, True)

    def _add(self, node: Node) -> None:
        self._nodes.append(node)
        self._built = None

    def _connect(
        self, source: str, target: Any, when: Callable[[Any], Any] | None, name: str | None, fallback: bool
    ) -> None:
        condition = None
        if when is not None:
            _check_callable(when, f"condition after {source!r}")
            condition = Condition(check_name(name or name_of(when).replace("<lambda>", "lambda"), "condition"), when)
        self._edges.append(Edge(check_name(source, "source"), target, condition, fallback))
        self._built = None

    # Building -----------------------------------------------------------------------------------------------------

    def build(self) -> BuiltGraph:
        """Check the whole graph and return it in the form in which it runs; raise InvalidGraph with every mistake."""
        if self._built is None:
            self._built = build(self)
        return self._built


def check_name(name: object, what: str) -> str:
    """Return a name that is valid in a position."""
    if not isinstance(name, str) or not (_NAME.fullmatch(name) or name == END) or not name.isprintable():
        raise InvalidInput(
            f"{what} name {name!r:.60} cannot be used",
            hint="Use up to 200 printable characters without spaces and / # [ ] > : * ,",
        )
    return name


def check_names(names: Iterable[str], what: str) -> frozenset[str]:
    """Return names of nodes, or "*" for all nodes."""
    if isinstance(names, str):
        names = (names,)
    return frozenset(name if name == "*" else check_name(name, what) for name in names)


def _check_callable(function: Any, what: str) -> Any:
    if not callable(function):
        raise InvalidInput(f"{what} must be a function, not {type(function).__name__}")
    return function


def _check_timeout(timeout: float | None, name: str) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise InvalidInput(f"timeout of {name!r} must be a number of seconds above 0, not {timeout!r:.40}")
    return float(timeout)


def _check_at_once(at_once: int | None, what: str) -> int | None:
    if at_once is not None and (type(at_once) is not int or at_once < 1):
        raise InvalidInput(f"at_once of {what} must be a whole number above 0, not {at_once!r:.40}")
    return at_once


def _limiter(at_once: int | None, per_second: float | None, what: str) -> Limiter | None:
    _check_at_once(at_once, what)
    if per_second is None:
        return None if at_once is None else Limiter(at_once)
    if isinstance(per_second, bool) or not isinstance(per_second, int | float) or not 0 < per_second < float("inf"):
        raise InvalidInput(
            f"per_second of {what} must be a number above 0, not {per_second!r:.40}",
            hint="For example 5, or 0.5 for one start every two seconds",
        )
    return Limiter(at_once, float(per_second))


def check_limit(limit: int) -> int:
    """Return the number of nodes that a run may commit."""
    if type(limit) is not int or limit < 1:
        raise InvalidInput(f"limit must be a whole number above 0, not {limit!r:.40}")
    return limit


def _check_on_error(on_error: str) -> str:
    if on_error not in (FAIL_FAST, COLLECT_ALL):
        raise InvalidInput(f"on_error is {on_error!r:.40}", hint=f"Use {FAIL_FAST!r} or {COLLECT_ALL!r}")
    return on_error
