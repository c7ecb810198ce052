"""The state of one graph while it runs.

Updates come in through ``plan``, which may refuse and changes nothing, and ``apply``, which cannot fail: so a commit
happens wholly or not at all. A list that only grows is extended where it is. For each key is remembered when it was
last replaced, so that whoever stores the state can tell what is new since the last time, however long ago.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.engine.reducer import DELETE, MISSING, Append, Refusal
from backstay.engine.schema import Schema
from backstay.errors import BadUpdate, MergeConflict

Updates = Sequence[tuple[str, Mapping[str, Any]]]  # the writer and what it wants; in the order in which they count


@dataclass(slots=True)
class Plan:
    """What a commit will do."""

    put: dict[str, Any] = field(default_factory=dict)
    grown: dict[str, list[Any]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.put or self.gone or any(self.grown.values()))


def _holders(values: Mapping[str, Any], key: str) -> int:
    """Return how many hold a value: a list that a node has kept, or put elsewhere, must not grow under its hands."""
    return sys.getrefcount(values[key])


_HELD_BY_NOBODY_ELSE = _holders({"key": []}, "key")


class LiveState:
    """A graph's values, and when each was last replaced."""

    def __init__(self, schema: Schema, values: dict[str, Any]) -> None:
        self.schema = schema
        self.values = values
        self.version = 1
        self.replaced = dict.fromkeys(values, 1)  # key -> the version that last changed it other than by growing
        self.gone: dict[str, int] = {}  # key -> the version that took it away

    def plan(self, updates: Updates) -> Plan:
        """Return what these updates come to, one after the other; raise BadUpdate and change nothing."""
        plan = Plan()
        for writer, update in updates:
            for key, value in update.items():
                self._fold(plan, writer, key, value)
        return plan

    def plan_together(self, updates: Updates) -> Plan:
        """Return what updates made side by side, all from this state, come to; raise MergeConflict if they clash."""
        writers: dict[str, list[tuple[str, Any]]] = {}
        for writer, update in updates:
            for key, value in update.items():
                for earlier, other in writers.setdefault(key, []):
                    if earlier != writer and self._clash(key, other, value):
                        raise MergeConflict(key, earlier, writer)
                writers[key].append((writer, value))
        return self.plan(updates)

    def _clash(self, key: str, one: Any, other: Any) -> bool:
        return self.schema.knows(key) and self.schema.reducer(key).clash(self.values.get(key, MISSING), one, other)

    def apply(self, plan: Plan) -> bool:
        """Do what was planned; tell whether anything changed."""
        if not plan:
            return False
        self.version += 1
        for key, tail in plan.grown.items():
            if _holders(self.values, key) > _HELD_BY_NOBODY_ELSE:
                self.values[key] = list(self.values[key])
            self.values[key].extend(tail)
        for key, value in plan.put.items():
            self.values[key] = value
            self.replaced[key] = self.version
            self.gone.pop(key, None)
        for key in plan.gone:
            if self.values.pop(key, MISSING) is not MISSING:
                self.gone[key] = self.version
                del self.replaced[key]
        return True

    def with_update(self, writer: str, update: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values as they would be after an update, without making it."""
        plan = self.plan([(writer, update)])
        values = {**self.values, **plan.put}
        values |= {key: [*values[key], *tail] for key, tail in plan.grown.items()}
        return {key: value for key, value in values.items() if key not in plan.gone}

    def _fold(self, plan: Plan, writer: str, key: str, value: Any) -> None:
        if not isinstance(key, str) or not self.schema.knows(key):
            known = ", ".join(self.schema.fields) or "any text"
            raise BadUpdate(writer, str(key), "is no key of the graph's state", hint=f"Its keys are {known}")
        if value is DELETE:
            plan.put.pop(key, None)
            plan.grown.pop(key, None)
            plan.gone.add(key)
            return
        old: Any = MISSING if key in plan.gone else plan.put.get(key, self.values.get(key, MISSING))
        reducer = self.schema.reducer(key)
        try:
            if isinstance(reducer, Append) and old is not MISSING and key not in plan.put:
                plan.grown.setdefault(key, []).extend(reducer.tail(old, value))
                return
            tail = plan.grown.get(key)
            folded = reducer.fold(old if tail is None or key in plan.put else [*old, *tail], value)
        except Refusal as refusal:
            raise BadUpdate(writer, key, str(refusal)) from None
        except Exception as error:
            raise BadUpdate(writer, key, f"could not be reduced: {reducer.name} raised {error!r:.200}") from error
        plan.grown.pop(key, None)
        plan.gone.discard(key)
        plan.put[key] = folded
