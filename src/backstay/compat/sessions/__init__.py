"""Checkpoints of sessions as JSON files in directories, which a person can read with ``cat``.

    <root>/<session>/checkpoints/cp_20260131_093000_<id>.json     one checkpoint, with its checksum
    <root>/<session>/checkpoints/latest.json                      a link to the newest

The layout, the names and the checksums are those of an older system, so its trees can be read and it can read ours.
"""

from backstay.compat.sessions.agent_state import AgentState
from backstay.compat.sessions.atomic import AtomicFileWriter
from backstay.compat.sessions.checksum import ChecksumUtils, Verdict
from backstay.compat.sessions.data import CheckpointData, CheckpointMeta, MessageRole
from backstay.compat.sessions.ids import AgentId, CheckpointId, SessionId, TaskId
from backstay.compat.sessions.interrupted import InterruptedSession, render
from backstay.compat.sessions.recovery import CrashRecovery, SessionRecovery
from backstay.compat.sessions.report import RecoveryReport, Scan, Skipped
from backstay.compat.sessions.summary import SessionSummary
from backstay.compat.sessions.sync import SyncCheckpointWriter
from backstay.compat.sessions.system import CheckpointSystem
from backstay.compat.sessions.writer import CheckpointWriter
from backstay.recovery import (
    ErrorCategory,
    ErrorRecovery,
    FallbackStrategy,
    RecoveryAction,
    RecoveryLayer,
    RecoveryResult,
    RetryPolicy,
)

__all__ = [
    "AgentId",
    "AgentState",
    "AtomicFileWriter",
    "CheckpointData",
    "CheckpointId",
    "CheckpointMeta",
    "CheckpointSystem",
    "CheckpointWriter",
    "ChecksumUtils",
    "CrashRecovery",
    "ErrorCategory",
    "ErrorRecovery",
    "FallbackStrategy",
    "InterruptedSession",
    "MessageRole",
    "RecoveryAction",
    "RecoveryLayer",
    "RecoveryReport",
    "RecoveryResult",
    "RetryPolicy",
    "Scan",
    "SessionId",
    "SessionRecovery",
    "SessionSummary",
    "Skipped",
    "SyncCheckpointWriter",
    "TaskId",
    "Verdict",
    "render",
]
