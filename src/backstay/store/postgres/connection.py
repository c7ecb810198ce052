"""A connection with a deadline, and the meaning of PostgreSQL's errors.

A server that disappears silently (a network partition, a stalled proxy) leaves a client waiting forever, and neither
``statement_timeout`` nor TCP settings help against a proxy that still answers for the network. So the wait itself ends
here: after the deadline the socket is closed, without asking the server for anything.
"""

from __future__ import annotations

import re
import select
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import errors, generators, pq, waiting
from psycopg.abc import PQGen

from backstay.errors import BackstayError, InvalidInput, StoreBusy, StoreError, StoreFull, StoreRefused
from backstay.store.postgres.target import Target

T = TypeVar("T")
Bound = Sequence[Any] | Mapping[str, Any]

WAIT_GIVEN_UP = "01000"
"""The code of the warning of a server that committed only locally, because its wait for the standby was cancelled.

The text is in the server's language. No statement of ours causes another warning with this code. A server that closes
the connection during the wait warns with 57P01, and then never reports a success, so the answer is lost. It warns with
57P01 also when it is stopped after it has answered.
"""

CHECK_INTERVAL_S = 0.25
"""How often a wait looks for Ctrl-C and the deadline."""


class DeadlinePassed(psycopg.OperationalError):
    """The connection was closed because the call reached its deadline."""


class DeadlineConnection(psycopg.Connection[tuple[Any, ...]]):
    """A psycopg connection whose every wait ends at ``deadline`` (of the monotonic clock)."""

    deadline: float = float("inf")
    until: float = float("inf")  # when it is to be closed, and
    used: float = 0.0  # when it was last used, by the same clock
    # psycopg's own warns, but an idle connection may end with its program, and a forked child leaves its parent's
    # alone. This does nothing, and is written in C, so that no interrupt arrives in it.
    __del__ = dict  # type: ignore[assignment]
    uses: dict[str, int]  # of the statements of ``fast``: 1 after the first, 2 if it may be prepared
    statements: dict[str, str]  # our SQL with the schema's name filled in, shared by all connections of a store
    committing: bool = False  # from now on a lost answer leaves the outcome unknown
    in_doubt: bool = False  # the server committed, but did not wait for its standby

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

    def fast(self, statement: str, types: Sequence[int], bound: Sequence[bytes | None]) -> bytes:
        """Run a statement whose parameters are in PostgreSQL's binary form; return the one value of its answer.

        For saves: it does without the work that psycopg does for every statement. From its second use on, the
        statement is prepared.
        """
        name, text, formats = f"fast-{hash(statement)}".encode(), self.statements[statement].encode(), [1] * len(bound)
        if statement not in self.uses:
            self.pgconn.send_query_params(text, bound, types, formats, 1)
            result = self._result()
            self.uses[statement] = 1
        else:
            if self.uses[statement] == 1:
                self.uses[statement] = 2  # first, so that after an interrupt it is not prepared twice
                self.pgconn.send_prepare(name, text, types)
                self._result()
            self.pgconn.send_query_prepared(name, bound, formats, 1)
            try:
                result = self._result()
            except errors.InvalidSqlStatementName:  # psycopg deallocates all prepared statements after a rollback
                del self.uses[statement]  # not the others: they may have been prepared since
                return self.fast(statement, types, bound)
        return result.get_value(0, 0) or b""

    def _result(self) -> pq.abc.PGresult:
        result: pq.abc.PGresult
        (result,) = self.wait(generators.execute(self.pgconn))
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
            raise errors.error_from_result(result)
        return result

    def watch(self) -> None:
        """Watch for the warning that the server stopped waiting for its standby, which it reports as a success."""
        watched = weakref.ref(self)  # no reference cycle, so an unused connection is closed at once

        def noticed(notice: psycopg.errors.Diagnostic) -> None:
            connection = watched()
            if notice.severity_nonlocalized == "WARNING" and notice.sqlstate == WAIT_GIVEN_UP and connection:
                connection.in_doubt = True

        self.add_notice_handler(noticed)

    def is_open(self) -> bool:
        """Return whether the idle connection is still open; close it if the server has closed it. Sends nothing."""
        poll = select.poll()
        try:
            poll.register(self.pgconn.socket, select.POLLIN)
            while poll.poll(0):  # the end of the connection, or a message before it
                self.pgconn.consume_input()
        except psycopg.OperationalError:
            self.close()
        return not self.closed

    def wait(self, gen: PQGen[T], interval: float = CHECK_INTERVAL_S, timeout: float | None = None) -> T:
        """Run psycopg's protocol generator until the deadline."""
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
                self.pgconn.finish()  # psycopg saw the socket break before libpq did; the answer is lost
            raise
        except (KeyboardInterrupt, SystemExit):
            self.pgconn.finish()  # its answer will never be read
            raise


OWN_SETTINGS = """
SELECT CASE WHEN pg_catalog.pg_backend_pid() = %s::int THEN ARRAY[
  pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false),
  pg_catalog.set_config('client_min_messages', 'warning', false)] END"""


def is_pooled(connection: DeadlineConnection) -> bool:
    """Return whether a pooler is in between, which may give every transaction to another backend.

    A prepared statement may then be missing, or be another one with the same name. A pooler is detected by the process
    number that it invents for the client. Without a pooler, the connection gets a search path that no other user can
    write to, and receives every warning. A pooler's connections are shared with others and stay as they are.
    """
    row = connection.execute(OWN_SETTINGS, (connection.info.backend_pid,), prepare=False).fetchone()
    return row is None or row[0] is None


TRANSIENT_CODES = {
    "40001",  # serialization failure
    "40P01",  # deadlock: the server cancelled this transaction
    "23505",  # two writers created the same row at once; a second attempt finds it
}
LOST_CODES = {
    "57P01",  # the server is shutting down
    "57P02",  # ... because another backend crashed
    "57P03",  # it is starting up
    "57P05",  # idle for too long
    "25P03",  # idle in a transaction for too long
    "53300",  # no connection is free
}
NOT_AS_THOUGHT, CHECKPOINT_IS_GONE, IS_MIGRATED, ID_EXISTS = "ZB001", "ZB005", "ZB006", "23505"
"""Error codes that the functions of the schema raise."""

REFUSALS = {
    "28000": ("the server refuses this user", "Check user, database and pg_hba.conf"),
    "28P01": ("the server refuses the password", "Check user and password in the URL"),
    "3D000": ("the database does not exist", "Create it, or name another in the URL"),
    "42501": ("the user misses a permission", "GRANT it CREATE on the database, or USAGE and all rights on the schema"),
    "25006": (
        "the database is read-only",
        "Name the primary server, not a standby; check default_transaction_read_only",
    ),
    "3F000": ("the schema does not exist", "Open the store again to create it"),
    "42P01": ("a table of the store is missing", "Open the store again; if it was dropped, restore a backup"),
    "42883": ("a function of the store is missing", "Open the store again; if it was dropped, restore a backup"),
    "42703": ("a column of the store is missing", "Open the store again; if it was dropped, restore a backup"),
    IS_MIGRATED: (
        "another version of Backstay migrated the schema after this process opened the store",
        "Restart this program with that version of Backstay",
    ),
    "0A000": ("the server does not support a feature that Backstay needs", "Use PostgreSQL 13 or newer"),
    "26000": ("a connection pooler mixes up prepared statements", "Remove prepare=yes from the URL"),
    "42P05": ("a connection pooler mixes up prepared statements", "Remove prepare=yes from the URL"),
}
INTERRUPTED = {
    "55P03": ("another transaction held a lock for longer than lock_timeout", "Try again, or raise lock_timeout"),
    "57014": (
        "the server cancelled the statement, after statement_timeout or on an administrator's request",
        "Try again; if statement_timeout is too short for it, raise it for this user or database",
    ),
}
"""The server ended a statement, which then had no effect."""

INVALID, BUSY = "invalid", "busy"
WHILE_CONNECTING = {
    r"password authentication failed|no password supplied": "28P01",
    r"no pg_hba\.conf entry|role .* does not exist|is not permitted to log in": "28000",
    r"database .* does not exist": "3D000",
    r"permission denied": "42501",
    r"the database system is|too many (clients|connections)|connection slots": BUSY,
    r"invalid .*value|could not match|definition of service": INVALID,
}
"""libpq has no code for a refused connection, only the server's text, which may be in another language."""


def is_transient(error: psycopg.Error) -> bool:
    """Return whether the call had no effect and may be repeated."""
    return error.sqlstate in TRANSIENT_CODES


def is_lost(error: psycopg.Error, connection: DeadlineConnection) -> bool:
    """Return whether the connection is lost, so that the outcome of the last statement is unknown."""
    state = error.sqlstate or ""
    return connection.closed or state in LOST_CODES or state.startswith("08")


def translate(error: psycopg.Error, target: Target) -> BackstayError:
    """Return our error for one of the driver's, without secrets."""
    state, place = error.sqlstate or "", target.shown
    text = target.redacted(str(error).strip().split("\n")[0])
    if state in REFUSALS:
        what, hint = REFUSALS[state]
        return StoreRefused(f"{what} ({text})", path=place, hint=hint)
    if state == "53100":
        return StoreFull(f"no space left on the server ({text})", path=place, hint="Free some space, then try again")
    if state in INTERRUPTED:
        what, hint = INTERRUPTED[state]
        return StoreBusy(f"{what} ({text})", path=place, hint=hint)
    if isinstance(error, psycopg.DataError) and "NUL" in text:
        return InvalidInput("PostgreSQL cannot store a NUL character in a name", hint="Remove it from the name")
    if isinstance(error, DeadlinePassed | psycopg.errors.ConnectionTimeout):
        return StoreBusy("the database did not answer in time", path=place, hint="Check that it can be reached")
    if isinstance(error, psycopg.OperationalError) and not state:
        return _not_connected(text, place)
    return StoreError(f"PostgreSQL reports: {text}{f' ({state})' if state else ''}", path=place)


def _not_connected(text: str, place: str) -> BackstayError:
    kind = next((kind for words, kind in WHILE_CONNECTING.items() if re.search(words, text)), None)
    if kind == BUSY:
        return StoreBusy(
            f"the server accepts no connections at the moment ({text})", path=place, hint="Try again in a moment"
        )
    if kind == INVALID:
        return InvalidInput(
            f"a parameter of the URL is wrong ({text})", path=place, hint="See libpq's list of parameters"
        )
    if kind is not None:
        what, hint = REFUSALS[kind]
        return StoreRefused(f"{what} ({text})", path=place, hint=hint)
    return StoreError(f"cannot connect: {text}", path=place, hint="Check host, port and user, and that the server runs")
