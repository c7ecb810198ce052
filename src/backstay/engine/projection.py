"""What of an outer graph's state goes into a subgraph, and what comes back out of it.

What comes back is an update, worked out from what the inner graph was given and what it has now: a list that grew comes
back as what was appended, so branches side by side do not overwrite each other with old copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backstay.engine.live import LiveState
from backstay.engine.node import Projection, positional_count
from backstay.engine.position import Activation, Job, inner_prefix
from backstay.engine.reducer import DELETE, MISSING, Refusal
from backstay.engine.schema import Schema
from backstay.errors import BadUpdate, InvalidInput, NodeFailed
from backstay.model.continuation import NextNode


def enter(activation: Activation, job: Job) -> Activation:
    """Return the graph inside a job, at its beginning."""
    node = activation.graph.nodes[job.node]
    assert node.inner is not None
    built = activation.graph.inner[job.node]
    values = activation.live.with_update("decision", job.given) if job.given else activation.live.values
    try:
        begun = built.schema.begin(
            _into(activation.graph.schema, values, node.inner.into, built.schema, job), built.name
        )
    except InvalidInput as error:
        raise BadUpdate(job.writer, None, f"cannot begin: {error.what}") from error
    return Activation(built, LiveState(built.schema, begun), inner_prefix(job), todo=NextNode(built.start))


def leave(activation: Activation, job: Job, inner: Activation) -> Mapping[str, Any]:
    """Return the update that a finished inner graph comes to."""
    node = activation.graph.nodes[job.node]
    assert node.inner is not None
    out, schema = node.inner.out, inner.graph.schema
    if callable(out):
        try:
            update = out(schema.view(inner.live.values))
        except Exception as error:
            raise NodeFailed(f"{job.writer} (out)", 1, error) from error
        if not isinstance(update, Mapping):
            raise BadUpdate(job.writer, None, f"out returned {type(update).__name__}, not a mapping")
        return update
    if out is None:
        outer = activation.graph.schema
        out = {key: key for key in inner.live.values if outer.knows(key) and schema.is_stored(key)}
        out |= {key: key for key in _given(activation, job) if key in inner.live.gone}
    return _differences(activation, job, inner, out)


def _into(
    outer: Schema,
    values: Mapping[str, Any],
    into: Mapping[str, str] | Projection | None,
    inner: Schema,
    job: Job,
) -> Mapping[str, Any]:
    if callable(into):
        view = outer.view(values)
        arguments = (view, job.item) if positional_count(into) > 1 else (view,)
        try:
            return into(*arguments)
        except Exception as error:
            raise NodeFailed(f"{job.writer} (into)", 1, error) from error
    if into is None:
        return {key: value for key, value in values.items() if inner.knows(key) and outer.is_stored(key)}
    return {right: values[left] for left, right in into.items() if left in values}


def _given(activation: Activation, job: Job) -> Mapping[str, Any]:
    """Return what an inner graph was given: the outer state has not changed since, and ``into`` has no side effects."""
    node = activation.graph.nodes[job.node]
    assert node.inner is not None
    values = activation.live.with_update("decision", job.given) if job.given else activation.live.values
    return _into(activation.graph.schema, values, node.inner.into, activation.graph.inner[job.node].schema, job)


def _differences(activation: Activation, job: Job, inner: Activation, out: Mapping[str, str]) -> dict[str, Any]:
    """Return what changed, key by key, as the outer graph's reducers want it."""
    given = _given(activation, job)
    update = {}
    for left, right in out.items():
        before, after = given.get(left, MISSING), inner.live.values.get(left, MISSING)
        if after is MISSING:
            if before is not MISSING:
                update[right] = DELETE
            continue
        try:
            change = activation.graph.schema.reducer(right).update(before, after)
        except Refusal as refusal:
            raise BadUpdate(job.writer, right, str(refusal)) from None
        if change is not MISSING:
            update[right] = change
    return update
