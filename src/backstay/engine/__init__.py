"""The graph engine: declare nodes and edges over a state, and run them so that any crash or pause can be gone on from.

reducer, schema, live     the state: how updates are folded in, and what of it is stored
node, edge, build, graph  the declaration, and the checks of the whole
position, schedule        where a run stands, and what comes next; no I/O
run, task, gate           the loop: execute, commit, checkpoint, route; nodes; questions to people
recorder, sink, trigger   when and where a checkpoint is kept
fingerprint, compat       whether a stored run fits the graph as it is now
launch, replay            beginning, taking up, and running from the past
"""

from backstay.engine.answer import Answer, Approve, Defer, Modify, Reject, Reroute
from backstay.engine.cancellation import Cancellation
from backstay.engine.context import AsyncContext, Context
from backstay.engine.edge import END
from backstay.engine.graph import Graph
from backstay.engine.reducer import DELETE, add, append, merge, replace
from backstay.engine.result import Result, Status
from backstay.engine.retained import Retained
from backstay.engine.schema import transient
from backstay.engine.sink import EveryN, IfChanged, MemorySink, NoSink, OnFailure, OnlyNodes, Tee, Throttle
from backstay.engine.store_sink import StoreSink
from backstay.engine.trigger import any_of, barrier_only, every, every_node, manual, on_mutation
from backstay.errors import Rejected
from backstay.model.decision import Decision, DecisionKind
from backstay.model.effect import EffectRecord, Outcome

__all__ = [
    "DELETE",
    "END",
    "Answer",
    "Approve",
    "AsyncContext",
    "Cancellation",
    "Context",
    "Decision",
    "DecisionKind",
    "Defer",
    "EffectRecord",
    "EveryN",
    "Graph",
    "IfChanged",
    "MemorySink",
    "Modify",
    "NoSink",
    "OnFailure",
    "OnlyNodes",
    "Outcome",
    "Reject",
    "Rejected",
    "Reroute",
    "Result",
    "Retained",
    "Status",
    "StoreSink",
    "Tee",
    "Throttle",
    "add",
    "any_of",
    "append",
    "barrier_only",
    "every",
    "every_node",
    "manual",
    "merge",
    "on_mutation",
    "replace",
    "transient",
]
