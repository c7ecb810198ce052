"""A session at a glance: who runs it, what it is doing, how much there is of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from backstay.compat.sessions.agent_state import AgentState
from backstay.compat.sessions.data import CheckpointData, CheckpointMeta
from backstay.compat.sessions.ids import AgentId
from backstay.compat.sessions.state import SessionMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session as lists of sessions show it; the messages counted are those of its newest checkpoint."""

    session_id: str
    agent_id: str | None
    agent_state: AgentState
    created_at: datetime
    last_updated: datetime
    message_count: int
    checkpoint_count: int


def summarize(
    session: str, meta: SessionMeta | None, checkpoints: tuple[CheckpointMeta, ...], newest: CheckpointData | None
) -> SessionSummary | None:
    """Return the summary of a session; None if there is neither a record of it nor a checkpoint."""
    began = [] if meta is None or meta.started_at is None else [meta.started_at]
    moments = [checkpoint.created_at for checkpoint in checkpoints]
    updated = [] if meta is None else [meta.last_updated]
    if not updated and not moments:
        return None
    agent = None if meta is None else meta.others.get("agent_id")
    return SessionSummary(
        session_id=session,
        agent_id=AgentId(agent) if isinstance(agent, str) else None,
        agent_state=_state_of(meta),
        created_at=min([*began, *moments] or updated),
        last_updated=max([*updated, *moments]),
        message_count=0 if newest is None else len(newest.messages),
        checkpoint_count=len(checkpoints),
    )


def _state_of(meta: SessionMeta | None) -> AgentState:
    """Return what the record says, or what follows from it."""
    if meta is None:
        return AgentState.IDLE
    stated = meta.others.get("agent_state")
    if isinstance(stated, str) and stated in set(AgentState):
        return AgentState(stated)
    if meta.is_active:
        return AgentState.RUNNING
    return AgentState.COMPLETED if meta.termination_reason == AgentState.COMPLETED else AgentState.STOPPED
