"""Checkpoints of sessions as JSON files in directories, which a person can read with ``cat``.

    <root>/<session>/checkpoints/cp_20260131_093000_<id>.json     one checkpoint, with its checksum
    <root>/<session>/checkpoints/latest.json                      a link to the newest

The layout, the names and the checksums are those of an older system: each can read the other's files.
"""

from backstay.compat.sessions.checkpoint import (
    AgentId,
    AgentState,
    CheckpointData,
    CheckpointId,
    CheckpointMeta,
    MessageRole,
    SessionId,
    TaskId,
)
from backstay.compat.sessions.checksum import ChecksumUtils, Verdict
from backstay.compat.sessions.files import AtomicFileWriter
from backstay.compat.sessions.order import InterruptedSession, RecoveryReport, Scan, Skipped, render
from backstay.compat.sessions.recovery import CrashRecovery, SessionRecovery
from backstay.compat.sessions.state import SessionSummary
from backstay.compat.sessions.transfer import export_sessions, import_sessions
from backstay.compat.sessions.writer import CheckpointSystem, CheckpointWriter, SyncCheckpointWriter
from backstay.retry import (
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
    "export_sessions",
    "import_sessions",
    "render",
]
