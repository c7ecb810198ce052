"""A pool of connections that retries: a deadline for every call, and a second attempt where that is safe.

Every call is of one of three kinds. A *read* may be repeated. A *write* is one statement that returns its first result
again when it is repeated (by checkpoint id, token or key), so after a lost answer it is simply sent again; it locks the
row it answers with, so that the answer waits for a synchronous standby like the first one. A *change* is a transaction
of several statements; it is repeated too, unless the answer to its COMMIT was lost.

Nothing outlives the deadline. A call whose outcome is still open by then raises ``OutcomeUnknown``.

An exception may arrive between any two lines (Ctrl-C), and a signal handler may call the store in the middle of another
call of its thread. So this file uses no locks. A call that ends without having clearly returned its connection disposes
of the whole pool, and the next call creates another. A call inside a call does not use the pool, whose last connection
its thread may hold, and opens a connection of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import psycopg

from backstay.errors import BackstayError, OutcomeUnknown, StoreBusy, StoreError
from backstay.store.layout import ODD_VALUE_ERRORS, odd_value
from backstay.store.postgres.connection import (
    DeadlineConnection,
    DeadlinePassed,
    is_lost,
    is_pooled,
    is_transient,
    translate,
)
from backstay.store.postgres.queries import BEGIN, BEGIN_SNAPSHOT
from backstay.store.postgres.schema import newest_version
from backstay.store.postgres.target import Target

T = TypeVar("T")
Work = Callable[[DeadlineConnection], T]

PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Pauses between attempts after a lost connection; the last one repeats until the deadline."""

CONNECT_PAUSE_S = 0.1
"""The pause after a failed attempt to connect."""

IDLE_S_MAX, AGE_S_MAX = 600.0, 3600.0
"""An idle connection is closed after this time, and any connection after this one, when another is returned."""


class Pool:
    """The idle connections of one process, and a permit for each connection that its callers may have at once.

    Each step is one call of a container without a lock that an interrupt could leave held.
    """

    def __init__(self, size: int) -> None:
        self.idle: deque[DeadlineConnection] = deque()  # the last one used is the next one used
        self.permits: SimpleQueue[None] = SimpleQueue()
        self.is_closed = False
        self._size = size
        self._permit_all()

    def put(self, connection: DeadlineConnection) -> None:
        """Add an idle connection; close it if it is broken or old. Close another that was idle for too long."""
        now = connection.used = time.monotonic()
        if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE or now > connection.until:
            connection.close()  # a transaction that is still open will never be finished
            return
        self.idle.append(connection)
        if self.is_closed:
            self.close()
        with contextlib.suppress(IndexError):  # another thread took it
            if now - self.idle[0].used > IDLE_S_MAX:
                self.idle.popleft().close()

    def close(self) -> None:
        """Close all idle connections; those in use are closed when they are returned."""
        self.is_closed = True
        self._permit_all()  # a caller that waits for a permit finds the pool closed
        with contextlib.suppress(IndexError):
            while True:
                self.idle.pop().close()

    def _permit_all(self) -> None:
        for _ in range(self._size):
            self.permits.put(None)


@dataclass(slots=True)
class Loan:
    """A pool and the connection borrowed from it, until the connection is returned."""

    pool: Pool | None = None
    connection: DeadlineConnection | None = None


class RetryingPool:
    """Runs work on connections to one database."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._closed = False
        # By process: a forked child creates its own and keeps its parent's unused, so that it never closes that.
        self._pools: dict[int, Pool] = {}
        self._local = threading.local()
        self.statements = Statements(target.schema, newest_version())

    def connect(self) -> DeadlineConnection:
        """Return a connection outside the pool, with a deadline; errors say exactly why connecting failed."""
        try:
            return self._connect(time.monotonic() + self.target.timeout_s)
        except psycopg.Error as error:
            failure = translate(error, self.target)
        raise failure  # outside the except block, so that the driver's error, with libpq's arguments, is not attached

    def keep(self, connection: DeadlineConnection) -> None:
        """Add a connection from ``connect`` to the pool."""
        self._own_pool().put(connection)

    def read(self, work: Work[T]) -> T:
        """Run work that changes nothing."""
        return self._repeat(work, lambda _: False, None)

    def write(self, work: Work[T], name: str | None = None) -> T:
        """Run work that is one statement and returns its first result again if it was applied before."""
        return self._repeat(work, lambda _: True, name)

    def change(self, work: Work[T], name: str | None = None, again: bool = False, begin: str = BEGIN) -> T:
        """Run work as one transaction; ``again`` says that it returns its first result again, like a write."""
        return self._repeat(
            partial(_in_transaction, work, begin), lambda connection: connection.committing, name, repeats_unknown=again
        )

    def look(self, work: Work[T]) -> T:
        """Run work that changes nothing, with one snapshot for all its statements."""
        return self._repeat(partial(_in_transaction, work, BEGIN_SNAPSHOT), lambda _: False, None)

    def close(self) -> None:
        """Close all connections; calls in progress may still finish."""
        self._closed = True
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.close()

    def _repeat(
        self,
        work: Work[T],
        may_be_applied: Callable[[DeadlineConnection], bool],
        name: str | None,
        repeats_unknown: bool = True,
    ) -> T:
        """Run work until it succeeds, fails for good, or reaches its deadline.

        ``may_be_applied`` says of a lost connection whether its last attempt may have taken effect.
        """
        # Whether this thread is inside a call already, which a signal has interrupted.
        loan, was_inside = Loan(), bool(self._local.__dict__.get("inside"))
        try:
            self._local.inside = True
            return self._attempts(work, may_be_applied, name, repeats_unknown, None if was_inside else loan)
        finally:
            self._local.inside = was_inside
            if loan.pool is not None:  # it may miss a permit
                if self._pools.get(os.getpid()) is loan.pool:
                    self._pools.pop(os.getpid(), None)
                if loan.connection is not None:
                    loan.connection.close()
                loan.pool.close()
            if self._closed:
                self.close()

    def _attempts(
        self,
        work: Work[T],
        may_be_applied: Callable[[DeadlineConnection], bool],
        name: str | None,
        repeats_unknown: bool,
        loan: Loan | None,
    ) -> T:
        deadline = time.monotonic() + self.target.timeout_s
        unknown = False
        for attempt in itertools.count():
            connection = self._borrowed(deadline, unknown, name, loan)
            connection.deadline, connection.committing, connection.in_doubt = deadline, False, False
            try:
                result = work(connection)
                if connection.in_doubt and may_be_applied(connection):
                    raise OutcomeUnknown(
                        "the server stored the data but stopped waiting for its synchronous standby, so a failover "
                        "may lose it",
                        checkpoint=name,
                        path=self.target.shown,
                        hint="When the standby is back, repeat the call with the same id: it waits for the standby",
                    )
                return result
            except psycopg.Error as error:
                failure, lost = error, is_lost(error, connection)
            except BackstayError:
                raise
            except ODD_VALUE_ERRORS as error:
                raise odd_value(error, self.target.shown) from error
            finally:
                if loan is None or loan.pool is None:
                    connection.close()
                else:
                    loan.pool.put(connection)
                    loan.pool.permits.put(None)
                    loan.pool = loan.connection = None
            unknown = unknown or (lost and may_be_applied(connection))
            again = is_transient(failure) or (lost and (repeats_unknown or not unknown))
            if isinstance(failure, DeadlinePassed) or not again:
                raise self._given_up(failure, unknown, name) from failure
            pause = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            if pause and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(pause, left))
        raise AssertionError  # the loop never ends by itself

    def _borrowed(self, deadline: float, unknown: bool, name: str | None, loan: Loan | None) -> DeadlineConnection:
        """Return a connection that is open, of the pool or, without a loan, a new one."""
        self._check_open()
        if loan is None:
            return self.connect()
        while (left := deadline - time.monotonic()) > 0:
            self._check_open()
            pool = loan.pool = self._own_pool()
            try:
                pool.permits.get(timeout=left)
                while pool.idle and not pool.is_closed:
                    connection = loan.connection = pool.idle.pop()
                    if connection.is_open():
                        return connection  # the others died while idle; nothing was sent
                if not pool.is_closed:
                    connection = loan.connection = self._connect(deadline)
                    return connection
            except IndexError:  # another thread was faster
                pool.permits.put(None)
            except psycopg.Error:
                pool.permits.put(None)
                time.sleep(max(0.0, min(CONNECT_PAUSE_S, deadline - time.monotonic())))
            except Empty:
                pass
            loan.pool = loan.connection = None
        raise self._given_up(None, unknown, name)

    def _own_pool(self) -> Pool:
        return self._pools.get(os.getpid()) or self._pools.setdefault(os.getpid(), Pool(self.target.pool_size))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", hint="Open it again with backstay.open")

    def _connect(self, deadline: float) -> DeadlineConnection:
        """Return a new connection; raise the driver's error."""
        connection = DeadlineConnection.connect(self.target.conninfo, **self._arguments())
        try:
            connection.statements, connection.uses = self.statements, {}
            connection.until = time.monotonic() + AGE_S_MAX
            connection.deadline = deadline
            connection.watch()
            if is_pooled(connection) and self.target.prepare is None:
                connection.prepare_threshold = None
        except BaseException:
            connection.close()
            raise
        return connection

    def _arguments(self) -> dict[str, Any]:
        target = self.target
        defaults = {
            "tcp_user_timeout": target.connect_timeout_s * 1000,
            "keepalives_idle": 30,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "application_name": "backstay",
        }
        return {name: value for name, value in defaults.items() if name not in target.given} | {
            "autocommit": True,
            "prepare_threshold": None if target.prepare is False else 1,
            "connect_timeout": target.connect_timeout_s,
            "client_encoding": "utf8",
        }

    def _given_up(self, error: psycopg.Error | None, unknown: bool, name: str | None) -> BackstayError:
        if unknown:
            return OutcomeUnknown(
                "the connection was lost before the server answered, so the data may or may not be stored",
                checkpoint=name,
                path=self.target.shown,
                hint="Repeat the call with the same id: it returns the first result, or stores the data now",
            )
        if error is None or isinstance(error, DeadlinePassed):
            return StoreBusy(
                f"the database did not answer within {self.target.timeout_s:g} s; nothing was stored",
                path=self.target.shown,
                hint="Check that the server runs and can be reached; a larger timeout= in the URL waits longer",
            )
        return translate(error, self.target)


class Statements(dict[str, str]):
    """Our SQL with the schema's name and version filled in, on first use."""

    def __init__(self, schema: str, version: int) -> None:
        super().__init__()
        self._given = {
            "{current}": "{schema}.check_version({version})",
            "{version}": str(version),
            "{schema}": f'"{schema}"',  # a checked name: see target
        }

    def __missing__(self, statement: str) -> str:
        text = statement
        for name, value in self._given.items():
            text = text.replace(name, value)
        self[statement] = text
        return text


def _in_transaction(work: Work[T], begin: str, connection: DeadlineConnection) -> T:
    try:
        connection.execute(connection.statements[begin].encode(), prepare=False)
        result = work(connection)
        connection.committing = True
        connection.execute("COMMIT")
        return result
    except BaseException:
        if connection.pgconn.transaction_status in (
            psycopg.pq.TransactionStatus.INTRANS,
            psycopg.pq.TransactionStatus.INERROR,
        ):
            with contextlib.suppress(psycopg.Error):
                connection.execute("ROLLBACK")
        raise
