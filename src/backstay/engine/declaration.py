"""The declaration of a graph: nodes, edges and a state, named step by step.

Nothing is checked while a graph is being declared, except that names are names. ``build`` looks at the whole and
reports every mistake at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from backstay.engine.build import Built, build
from backstay.engine.edge import COLLECT_ALL, END, FAIL_FAST, Choice, Condition, Edge, ForEach, To, Together, name_of
from backstay.engine.failed import FAIL, PAUSE
from backstay.engine.node import Body, Inner, Node, NodeKind, Projection, Wait
from backstay.engine.schema import Schema
from backstay.errors import InvalidInput
from backstay.model.decision import DecisionKind
from backstay.recovery.policy import ONCE, RetryPolicy

if TYPE_CHECKING:
    from backstay.engine.migration import Migration

F = TypeVar("F", bound=Callable[..., Any])

LIMIT = 1000
"""Nodes that a run may commit, unless the graph says otherwise: a loop without an end is a mistake."""

_NAME = re.compile(r"[^\s/#\[\]>:*,]{1,200}")


class Declaration:
    """A graph as it is being declared."""

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
    ) -> None:
        """Begin a graph.

        ``state`` is a dataclass, TypedDict, pydantic model or dict; ``reducers`` adds to those declared on its fields.
        A run pauses ``before`` and ``after`` the nodes named there (``"*"``: all). ``limit`` is how many nodes a run
        may commit. ``strict`` also finds nodes that change their input deep inside, at the cost of encoding the state
        twice for each node: for tests.
        """
        self.name = check_name(name, "graph")
        self.schema = Schema(state, reducers or {})
        self.limit = check_limit(limit)
        self.before = check_names(before, "before")
        self.after = check_names(after, "after")
        self.strict = strict
        self.migrations: dict[int, Migration] = {}
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._starts: list[str] = []
        self._built: Built | None = None

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
        **notes: Any,
    ) -> Any:
        """Add a node: as ``@graph.node``, ``@graph.node("name", timeout=5)`` or ``graph.node("name", function)``.

        The function takes the state, and the run's context if it has a second parameter; it returns the keys to
        update, or None. It may be a coroutine function. ``timeout`` is in seconds, for each attempt. ``fallback`` is
        such a function too: it is called when there are no attempts left, and finds the error in ``ctx.error``. With
        ``on_failure="pause"`` a person is asked then, instead of ending the run as failed.
        """
        options = {"retry": retry, "timeout": timeout, "fallback": fallback, "on_failure": on_failure, **notes}
        if callable(name):
            return self.node(name.__name__, name)
        if function is None:
            return lambda decorated: self.node(name or decorated.__name__, decorated, **options)
        self._add(
            Node(
                name=check_name(name, "node"),
                kind=NodeKind.TASK,
                body=Body.of(_check_callable(function, f"node {name!r}")),
                retry=_check_retry(retry, name),
                timeout_s=_check_timeout(timeout, name),
                fallback=None if fallback is None else Body.of(_check_callable(fallback, f"fallback of {name!r}")),
                pauses=_check_on_failure(on_failure, name),
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
        """Add another graph as a node. It has its own state, steps and limit, and its position is kept too.

        ``into`` maps keys of this state to keys of the inner one, or is a function of this state (and of the item
        that is mapped over, if it takes two) that returns the inner state to begin with; left out, the keys both have
        in common. ``out`` goes the other way when the inner graph is done; what it did to a key is folded in here as an
        update.
        """
        if not isinstance(graph, Declaration):
            raise InvalidInput(f"subgraph {name!r} must be a Graph, not {type(graph).__name__}")
        self._add(
            Node(
                name=check_name(name, "node"),
                kind=NodeKind.SUBGRAPH,
                inner=Inner(graph, into, out),
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
        """Add a node that runs nothing and waits until somebody decides.

        ``payload`` is a function of the state: what is shown. Approving goes on, modifying updates the state and goes
        on, rejecting goes to ``on_reject`` or ends the run. After ``timeout`` seconds the default is taken, "reject" or
        "defer": a timeout never counts as a yes.
        """
        action = DecisionKind(on_timeout) if str(on_timeout) in tuple(DecisionKind) else None
        if action not in (DecisionKind.REJECT, DecisionKind.DEFER):
            raise InvalidInput(
                f"barrier {name!r}: on_timeout is {on_timeout!r:.40}",
                hint='Use "reject" or "defer": what is guarded never runs because nobody answered',
            )
        wait = Wait(prompt, payload, _check_timeout(timeout, name), action, on_reject)
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
        """Go from one node to another (or to ``END``), if ``when`` holds; as ``fallback``, if nothing else does.

        ``when`` is a function of the state without side effects; ``name`` is what it is called in the fingerprint and
        in drawings. Conditions are tried in the order in which they were declared.
        """
        self._connect(source, To(target), when, name, fallback)

    def choose(self, source: str, function: Callable[[Any], Any], ways: Mapping[str, str] | Iterable[str]) -> None:
        """Go where a function of the state says: to ``ways[result]``, or to the node it names if ``ways`` is a list."""
        chosen = dict(ways) if isinstance(ways, Mapping) else {way: way for way in ways}
        self._connect(source, Choice(_check_callable(function, f"choice after {source!r}"), chosen), None, None, False)

    def parallel(
        self,
        source: str,
        targets: Iterable[str],
        *,
        join: str = END,
        on_error: str = FAIL_FAST,
        when: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Run several nodes side by side, then ``join``. Each sees the state as it was before any of them.

        With ``on_error="fail_fast"`` the first failure cancels the others; with "collect_all" all go on to their end.
        What has finished is kept in both cases, and not run again.
        """
        self._connect(source, Together(tuple(targets), join, _check_on_error(on_error)), when, name, False)

    def map(
        self,
        source: str,
        node: str,
        over: str | Callable[[Any], Any],
        *,
        join: str = END,
        on_error: str = FAIL_FAST,
        when: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Run a node once for each item of a list, side by side, then ``join``.

        ``over`` is a key of the state or a function of it. The node finds its item in ``ctx.item``.
        """
        self._connect(source, ForEach(node, over, join, _check_on_error(on_error)), when, name, False)

    def start(self, node: str) -> None:
        """Say where a run begins."""
        self._starts.append(check_name(node, "start"))
        self._built = None

    def end(self, *nodes: str) -> None:
        """Say where a run may end: after these nodes, unless one of their edges holds."""
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

    def build(self) -> Built:
        """Check the whole graph and return it in the form it is run in; raise InvalidGraph with every mistake."""
        if self._built is None:
            self._built = build(self, self._nodes, self._edges, self._starts)
        return self._built


def check_name(name: object, what: str) -> str:
    """Return a name that can be part of a position."""
    if not isinstance(name, str) or not (_NAME.fullmatch(name) or name == END) or not name.isprintable():
        raise InvalidInput(
            f"{what} name {name!r:.60} cannot be used",
            hint="Use up to 200 printable characters without spaces and / # [ ] > : * ,",
        )
    return name


def check_names(names: Iterable[str], what: str) -> frozenset[str]:
    """Return names of nodes, or the star that stands for all."""
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


def _check_retry(retry: RetryPolicy, name: str) -> RetryPolicy:
    if not isinstance(retry, RetryPolicy):
        raise InvalidInput(f"retry of {name!r} must be a RetryPolicy, not {type(retry).__name__}")
    return retry


def _check_on_failure(on_failure: str, name: str) -> bool:
    if on_failure not in (FAIL, PAUSE):
        raise InvalidInput(f"on_failure of {name!r} is {on_failure!r:.40}", hint=f"Use {FAIL!r} or {PAUSE!r}")
    return on_failure == PAUSE


def check_limit(limit: int) -> int:
    """Return how many nodes a run may commit."""
    if type(limit) is not int or limit < 1:
        raise InvalidInput(f"limit must be a whole number above 0, not {limit!r:.40}")
    return limit


def _check_on_error(on_error: str) -> str:
    if on_error not in (FAIL_FAST, COLLECT_ALL):
        raise InvalidInput(f"on_error is {on_error!r:.40}", hint=f"Use {FAIL_FAST!r} or {COLLECT_ALL!r}")
    return on_error
