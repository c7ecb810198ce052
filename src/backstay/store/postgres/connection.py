"""A connection that keeps to a deadline.

A server that is gone without a word (a partition, a stalled proxy) leaves a client waiting for ever, and neither
``statement_timeout`` nor TCP settings help against a proxy that still answers for the network. So the waiting itself
has an end here: when the deadline has passed the socket is closed, without asking the server for anything.
"""

from __future__ import annotations

import select
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import errors, waiting
from psycopg.abc import PQGen

T = TypeVar("T")
Bound = Sequence[Any] | Mapping[str, Any]

WAIT_GIVEN_UP = {"01000", "57P01"}
"""Codes of the warning with which a server that committed only locally answers, after a cancelled wait and before it
ends the connection. The text is in the server's language. No statement of ours gives another warning of these codes."""

CHECK_INTERVAL_S = 0.25
"""How often a wait looks for Ctrl-C and the deadline."""


class DeadlinePassed(psycopg.OperationalError):
    """The connection was dropped because the call's time was up."""


class DeadlineConnection(psycopg.Connection[tuple[Any, ...]]):
    """A psycopg connection whose every wait ends at ``deadline`` (of the monotonic clock)."""

    deadline: float = float("inf")
    statements: dict[str, str]  # our SQL with the schema's name filled in; shared by all connections of a store
    committing: bool = False  # a lost answer from now on leaves the outcome open
    in_doubt: bool = False  # the server says that it committed, but did not wait for its standby

    def run(self, statement: str, bound: Bound | None = None) -> int:
        """Run one of our statements; return how many rows it changed."""
        return self._cursor(statement, bound).rowcount

    def every(self, statement: str, bound: Bound | None = None) -> list[tuple[Any, ...]]:
        """Return all rows of one of our statements."""
        return self._cursor(statement, bound).fetchall()

    def one(self, statement: str, bound: Bound | None = None) -> tuple[Any, ...] | None:
        """Return the first row, or None."""
        return self._cursor(statement, bound).fetchone()

    def scalar(self, statement: str, bound: Bound | None = None) -> Any:
        """Return the first column of the first row, or None."""
        row = self.one(statement, bound)
        return None if row is None else row[0]

    def _cursor(self, statement: str, bound: Bound | None) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run a statement. Rows and parameters travel in PostgreSQL's binary form."""
        # As bytes, because psycopg accepts only literals as text.
        return self.execute(self.statements[statement].encode(), bound, binary=True)

    def watch(self) -> None:
        """Notice from now on when the server gives up waiting for its synchronous standby; it calls that a success."""
        watched = weakref.ref(self)  # no cycle: a connection that nobody has any more is closed at once

        def noticed(notice: psycopg.errors.Diagnostic) -> None:
            connection = watched()
            if notice.severity_nonlocalized == "WARNING" and notice.sqlstate in WAIT_GIVEN_UP and connection:
                connection.in_doubt = True

        self.add_notice_handler(noticed)

    def is_open(self) -> bool:
        """Look whether the server has closed the connection while nobody used it; if so, close it. Nothing is sent."""
        poll = select.poll()
        try:
            poll.register(self.pgconn.socket, select.POLLIN)
            while poll.poll(0):  # the end, or a word before it
                self.pgconn.consume_input()
        except psycopg.OperationalError:
            self.close()
        return not self.closed

    def wait(self, gen: PQGen[T], interval: float = CHECK_INTERVAL_S, timeout: float | None = None) -> T:
        """Run psycopg's protocol generator; see the module's docstring for what differs from the original."""
        left = self.deadline - time.monotonic()
        if timeout is not None:
            left = min(left, timeout)
        try:
            return waiting.wait(gen, self.pgconn.socket, interval, None if left == float("inf") else max(left, 0.001))
        except errors._WaitTimeout:
            self.pgconn.finish()
            raise DeadlinePassed("no answer in time") from None
        except psycopg.OperationalError as error:
            if error.sqlstate is None and self.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                self.pgconn.finish()  # psycopg saw the socket break before libpq did; the answer is lost all the same
            raise
        except (KeyboardInterrupt, SystemExit):
            self.pgconn.finish()  # whatever it was doing, nobody will read its answer
            raise


OWN_SETTINGS = """
SELECT CASE WHEN pg_catalog.pg_backend_pid() = %s::int THEN ARRAY[
  pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false),
  pg_catalog.set_config('client_min_messages', 'warning', false)] END"""


def is_pooled(connection: DeadlineConnection) -> bool:
    """Tell whether somebody else than PostgreSQL answers for it, who may give every transaction to another backend.

    A prepared statement is then not where it was, or is another one of the same name. A pooler shows itself by the
    process number it made up for the client when it connected. Where there is none, the connection gets a search path
    with nothing on it that others can write to, and hears every warning. A pooler's connections stay as they are: they
    are not only ours.
    """
    row = connection.execute(OWN_SETTINGS, (connection.info.backend_pid,), prepare=False).fetchone()
    return row is None or row[0] is None
