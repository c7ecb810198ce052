"""A workflow's checkpoint: where a graph paused, and the state to resume it with. And its summary for lists."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from backstay.compat.adapter import copied, copied_list, copied_object
from backstay.compat.workflow.state import SharedState
from backstay.errors import BackstayError, DecodeError, InvalidInput
from backstay.model.decision import InterruptKind
from backstay.model.fields import check_fields
from backstay.model.ids import check_id, check_label

InterruptType = InterruptKind
"""Why a run paused. The values are those of the JSON form: beforenode, afternode, toolapproval, userrequest."""

END = "__end__"
"""The current_node of a run that is over."""

RUN_ID = "workflow_run_id"
"""The name of run_id in files of later versions of the system."""

_OPTIONAL = ("pending_action", "run_id")


@dataclass(kw_only=True)
class Checkpoint:
    """Everything needed to resume a graph: its position, its state, and what it waits for."""

    id: str
    graph_name: str
    current_node: str  # before a node: that node; after one: the node that follows
    state_snapshot: Any  # JSON; usually of a ``SharedState``
    path: list[str]  # the nodes executed so far
    step_count: int
    created_at: datetime  # with a time zone; UTC in the JSON form
    pending_action: Any = None  # JSON: the tool call that waits for approval, if any
    interrupt_type: InterruptType
    run_id: str | None = None  # distinguishes two runs of one graph
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know
    # How another program wrote created_at: with nanoseconds or a local offset, which a datetime in UTC does not keep.
    _written_at: str | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def new(
        cls,
        graph_name: str,
        current_node: str,
        state: SharedState,
        path: list[str],
        step_count: int,
        interrupt_type: InterruptType,
        *,
        run_id: str | None = None,
    ) -> Checkpoint:
        """Make a checkpoint of a state, with the current time and a new id; refuse values that JSON cannot hold."""
        return cls(
            id=str(uuid.uuid4()),
            graph_name=graph_name,
            current_node=current_node,
            state_snapshot=state.to_json(),
            path=list(path),
            step_count=step_count,
            created_at=datetime.now(UTC),
            interrupt_type=_kind(interrupt_type),
            run_id=run_id,
        )

    def restore_state(self) -> SharedState:
        """Return a copy of the state in the snapshot."""
        try:
            return SharedState.from_json(self.state_snapshot)
        except DecodeError as error:
            raise DecodeError(
                f"Failed to restore state: {error.what}",
                checkpoint=self.id,
                path=error.path,
                hint="This snapshot was not made from a SharedState: read state_snapshot instead",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as a new JSON object. InvalidInput or EncodeError names the first invalid field."""
        extra = copied_object(self.extra, "extra")
        clash = next((name for name in extra if name in _NAMES), None)
        if clash is not None:
            raise InvalidInput(f"extra must not hold {clash!r}, which is a field", hint=f"Set {clash} instead")
        check_fields({"step": self.step_count, "created_at": self.created_at, "run_id": self.run_id})
        path, written = copied_list(self.path, "path"), self._written_at
        is_changed = written is None or datetime.fromisoformat(written) != self.created_at
        plain = {
            **extra,
            "id": check_id(self.id, "checkpoint id"),
            "graph_name": check_label(self.graph_name, "graph_name"),
            "current_node": check_label(self.current_node, "current_node"),
            "state_snapshot": copied(self.state_snapshot, "state_snapshot"),
            "path": [check_label(node, f"path[{index}]") for index, node in enumerate(path)],
            "step_count": self.step_count,
            "created_at": moment_text(self.created_at) if is_changed else written,
            "pending_action": copied(self.pending_action, "pending_action"),
            "interrupt_type": _kind(self.interrupt_type).value,
        }
        is_known = self.run_id is None or extra.get(RUN_ID) == self.run_id
        return plain if is_known else {**plain, "run_id": self.run_id}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint from the result of ``to_dict``. DecodeError names what is missing or wrong."""
        missing = [name for name in _NAMES if name not in plain and name not in _OPTIONAL]
        if missing:
            raise DecodeError(f"{missing[0]} is missing", path=missing[0], hint="This is not a workflow checkpoint")
        values = {name: plain[name] for name in _NAMES if name in plain}
        if "run_id" not in values and type(plain.get(RUN_ID)) is str:
            values["run_id"] = plain[RUN_ID] or None
        try:
            written = str(values["created_at"])
            values["created_at"] = datetime.fromisoformat(written)
            made = cls(**values, extra={key: value for key, value in plain.items() if key not in _NAMES})
            made._written_at = written
            copy = made.to_dict()
        except (BackstayError, ValueError) as error:
            raise DecodeError(f"not a workflow checkpoint: {getattr(error, 'what', error)}") from error
        made.interrupt_type, made.created_at = InterruptType(copy["interrupt_type"]), made.created_at.astimezone(UTC)
        made.extra = {key: copy[key] for key in made.extra}
        for name in ("state_snapshot", "path", "pending_action"):
            setattr(made, name, copy[name])
        return made


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint in a list."""

    id: str
    graph_name: str
    current_node: str
    step_count: int
    created_at: datetime
    interrupt_type: InterruptType
    run_id: str | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointInfo:
        """Return the summary of a checkpoint."""
        return cls(**{item.name: getattr(checkpoint, item.name) for item in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain.update(created_at=moment_text(self.created_at), interrupt_type=self.interrupt_type.value)
        if self.run_id is None:
            del plain["run_id"]
        return plain


_NAMES = tuple(item.name for item in fields(Checkpoint) if item.name not in ("extra", "_written_at"))


def moment_text(moment: datetime) -> str:
    """Return a time as RFC 3339 text in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _kind(given: object) -> InterruptType:
    try:
        return InterruptType(str(given))
    except ValueError:
        raise InvalidInput(
            f"interrupt_type {given!r:.40} is unknown", hint=f"Use one of {', '.join(InterruptType)}"
        ) from None
