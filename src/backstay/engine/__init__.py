"""The graph engine: declare nodes and edges over a state, and run them so that any process can resume the run.

    graph = backstay.Graph("research", state=State)
    result = graph.run_sync(store.thread("customer-42"), {"question": "…"})

``backstay.engine.reducers``, ``.triggers``, ``.sinks`` and ``.events`` are public modules too. Inside:

state, reducers                         the state: how updates are applied, and which fields are stored
nodes, declaration, build, graph        the declaration, and the checks of the whole graph
position                                the position of a run and what runs next; no I/O
run, task, context, approvals           the run loop, one node, its context, questions to people
triggers, sinks, events                 when and where checkpoints go, and what a run reports
fingerprint, migration, compatibility   whether a stored run fits the current graph
start, replay, work                     start or continue a run, replay one, workers
durable, pending, control               records of a run; unfinished runs; cancellation
"""

from backstay.engine.compatibility import Judgement, Verdict
from backstay.engine.context import AsyncContext, Context
from backstay.engine.control import Cancellation
from backstay.engine.events import Result, Status
from backstay.engine.nodes import END
from backstay.engine.pending import PendingRun
from backstay.engine.replay import ReplayPlan
from backstay.engine.state import transient

__all__ = [
    "END",
    "AsyncContext",
    "Cancellation",
    "Context",
    "Judgement",
    "PendingRun",
    "ReplayPlan",
    "Result",
    "Status",
    "Verdict",
    "transient",
]
