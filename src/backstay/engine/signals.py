"""How a run leaves a node without an error: it must ask, it must wait, it goes elsewhere, or it was told no.

They are no ``Exception``s, so that a node's own ``except Exception`` does not keep a run from pausing.
"""

from __future__ import annotations

from collections.abc import Sequence

from backstay.thread.interrupts import InterruptRecord
from backstay.thread.question import Question


class Ask(BaseException):
    """A node wants to know something: it is run again from its beginning once there is an answer.

    With ``of_state`` the answer, if it modifies something, is an update of the state.
    """

    def __init__(self, question: Question, of_state: bool = False) -> None:
        super().__init__(question.position)
        self.question = question
        self.of_state = of_state


class Paused(BaseException):
    """The run waits for decisions; with ``deferred``, one was to decide later."""

    def __init__(self, records: Sequence[InterruptRecord], deferred: bool = False) -> None:
        super().__init__(", ".join(record.id for record in records))
        self.records = list(records)
        self.deferred = deferred


class Rerouted(BaseException):
    """A decision says to go to another node instead."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


class TurnedDown(BaseException):
    """A decision says not to do it: the run ends here."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(node)
        self.node = node
        self.reason = reason
