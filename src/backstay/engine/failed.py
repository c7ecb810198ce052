"""What a person is asked about a node that has no attempts left, and what each answer does.

The question is an incident: which node, how often, what kind of error; no values of the state. It is stored with the
position, so the run waits there, in whichever process, until somebody decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from backstay.engine.position import Job
from backstay.engine.signals import Rerouted
from backstay.errors import NodeFailed, Unrecovered
from backstay.model.decision import Decision, DecisionKind
from backstay.model.interrupt import Interrupt, InterruptKind
from backstay.recovery.failure import Failure
from backstay.recovery.incident import Incident, is_incident
from backstay.thread.question import Question

FAIL, PAUSE = "fail", "pause"
"""What becomes of the run when a node has no attempts left."""

POSITION = "position"


def incident_of(job: Job, attempts: int, failure: Failure, began_at: datetime, failed_at: datetime) -> dict[str, Any]:
    """Return what is asked about a failed node, as plain values."""
    incident = Incident(
        operation=f"node {job.writer!r}", failure=failure, attempts=attempts, began_at=began_at, failed_at=failed_at
    )
    return {**incident.to_plain(), POSITION: job.position}


def question_of(asks_as: str, job: Job, payload: Mapping[str, Any]) -> Question:
    """Return the question; made of what was stored of it, it is the same again."""
    incident = Incident.from_plain(payload)
    return Question(
        f"{asks_as}:{job.position}:failed:{incident.failed_at.isoformat()}",
        InterruptKind.USER_REQUEST,
        job.node,
        payload,
        f"{incident.prompt} Approve: try it again. Modify: go on with this update instead. Reject: the run fails.",
    )


def incidents(asked: Iterable[Interrupt]) -> dict[str, Mapping[str, Any]]:
    """Return the incidents among the interrupts that a run waits for, by the position of the node."""
    payloads = [interrupt.payload for interrupt in asked]
    return {payload[POSITION]: payload for payload in payloads if is_incident(payload) and POSITION in payload}


def update_of(job: Job, payload: Mapping[str, Any], decision: Decision) -> Mapping[str, Any] | None:
    """Return what a decision wants the node to have returned; None if it is to be tried again."""
    if decision.kind is DecisionKind.APPROVE:
        return None
    if decision.kind is DecisionKind.MODIFY:
        update: Mapping[str, Any] = decision.value
        return update
    if decision.kind is DecisionKind.REROUTE:
        assert decision.target is not None
        raise Rerouted(decision.target)
    incident = Incident.from_plain(payload)
    said = f", and somebody said no: {decision.reason}" if decision.reason else ", and somebody said no"
    refused = Unrecovered(f"{incident.failure}{said}", hint=incident.failure.hint)
    raise NodeFailed(job.writer, incident.attempts, refused, hint="Mend the cause, then graph.resume(thread)")
