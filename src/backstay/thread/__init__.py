"""The types that methods of stores and threads return. Import them from here for annotations."""

from backstay.model.checkpoint import Write
from backstay.model.decision import Decision, DecisionKind, Interrupt, InterruptKind
from backstay.model.fields import Usage
from backstay.model.frame import Continuation, End, FanOut, Frame, FrameStack, NextNode
from backstay.model.runs import EffectRecord, EffectStatus, Outcome, RunStatus
from backstay.operations.diff import Diff, apply_patch
from backstay.operations.interrupts import InterruptRecord
from backstay.operations.listing import History
from backstay.operations.retention import Pruned
from backstay.operations.rows import Damaged
from backstay.store.base import Branch, Removed
from backstay.thread.lease import AsyncLease, Lease
from backstay.thread.loop import AsyncLoop, Loop, LoopStatus
from backstay.thread.runs import AsyncRun, Run, Runs
from backstay.thread.turn import AsyncTurn, Turn

__all__ = [
    "AsyncLease",
    "AsyncLoop",
    "AsyncRun",
    "AsyncTurn",
    "Branch",
    "Continuation",
    "Damaged",
    "Decision",
    "DecisionKind",
    "Diff",
    "EffectRecord",
    "EffectStatus",
    "End",
    "FanOut",
    "Frame",
    "FrameStack",
    "History",
    "Interrupt",
    "InterruptKind",
    "InterruptRecord",
    "Lease",
    "Loop",
    "LoopStatus",
    "NextNode",
    "Outcome",
    "Pruned",
    "Removed",
    "Run",
    "RunStatus",
    "Runs",
    "Turn",
    "Usage",
    "Write",
    "apply_patch",
]
