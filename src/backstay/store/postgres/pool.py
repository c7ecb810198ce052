"""A pool of connections that retries: a deadline for every call, and a second attempt where that is safe.

Every call is of one of three kinds. A *read* may be repeated. A *write* is one statement that returns its first result
again when it is repeated (by checkpoint id, token or key), so after a lost answer it is simply sent again; it locks the
row it answers with, so that the answer waits for a synchronous standby like the first one. A *change* is a transaction
of several statements; it is repeated too, unless the answer to its COMMIT was lost.

Nothing outlives the deadline. A call whose outcome is still open by then raises ``OutcomeUnknown``.

An exception may arrive between any two lines (Ctrl-C), and a signal handler may call the store in the middle of another
call of its thread. So this file uses no locks. A call that ends without having clearly returned its connection disposes
of the whole pool, and the next call creates another. A call inside a call does not use the pool, whose lock its thread
may hold, and opens a connection of its own.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

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

POOL_WAIT_S = 0.2
"""How long one wait for a pooled connection lasts. Asking again makes the pool try to connect again."""

CLOSE_S = 2.0
"""How long closing waits for the threads of a pool."""

PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Pauses between attempts after a lost connection; the last one repeats until the deadline."""

logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())


Pool = ConnectionPool[DeadlineConnection]


@dataclass(slots=True)
class Loan:
    """A pool and the connection borrowed from it, until the connection is returned."""

    pool: Pool | None = None
    connection: DeadlineConnection | None = None


class RetryingPool:
    """Runs work on connections to one database."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._closed = False
        # By process: a forked child creates its own and keeps its parent's unused, so that it never closes that. The
        # main thread has a pool of its own: an interrupt, which only comes there, may leave the pool's locks held.
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._local = threading.local()
        self.statements = Statements(target.schema, newest_version())

    def connect(self) -> DeadlineConnection:
        """Return a connection outside the pool, with a deadline; errors say exactly why connecting failed."""
        deadline = time.monotonic() + self._target.timeout_s
        try:
            arguments = {**self._arguments(), "prepare_threshold": None}  # nothing to gain here, see ``is_pooled``
            connection = DeadlineConnection.connect(self._target.conninfo, **arguments)
            connection.deadline, connection.statements = deadline, self.statements
            return connection
        except psycopg.Error as error:
            failure = translate(error, self._target)
        raise failure  # outside the except block, so that the driver's error, with libpq's arguments, is not attached

    def read(self, work: Work[T]) -> T:
        """Run work that changes nothing."""
        return self._repeat(work, lambda _: False, None)

    def write(self, work: Work[T], name: str | None = None) -> T:
        """Run work that is one statement and returns its first result again if it was applied before."""
        return self._repeat(work, lambda _: True, name)

    def change(self, work: Work[T], name: str | None = None, again: bool = False) -> T:
        """Run work as one transaction; ``again`` says that it returns its first result again, like a write."""
        return self._repeat(
            partial(_in_transaction, work, BEGIN), lambda connection: connection.committing, name, repeats_unknown=again
        )

    def look(self, work: Work[T]) -> T:
        """Run work that changes nothing, with one snapshot for all its statements."""
        return self._repeat(partial(_in_transaction, work, BEGIN_SNAPSHOT), lambda _: False, None)

    def close(self) -> None:
        """Close all connections; calls in progress may still finish."""
        self._closed = True
        for is_main in (False, True):
            pool = self._pools.pop((os.getpid(), is_main), None)
            if pool is not None and self._is_inside():
                _dispose(pool)
            elif pool is not None:
                pool.close(CLOSE_S)

    def _is_inside(self) -> bool:
        """Return whether this thread is inside a call, which a signal has interrupted."""
        return bool(self._local.__dict__.get("inside"))

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
        loan, was_inside = Loan(), self._is_inside()
        try:
            self._local.inside = True
            return self._attempts(work, may_be_applied, name, repeats_unknown, None if was_inside else loan)
        except RuntimeError as error:
            # An interrupt may have made the pool's own locks raise this error: then raise the interrupt.
            cause: BaseException | None = error
            while cause is not None and isinstance(cause, Exception):
                cause = cause.__context__
            raise (cause or error) from None
        finally:
            self._local.inside = was_inside
            if loan.pool is not None:  # it may wait for a connection that it will never get back
                if self._pools.get(_own_key()) is loan.pool:
                    self._pools.pop(_own_key(), None)
                if loan.connection is not None:
                    loan.connection.close()
                _dispose(loan.pool)
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
        deadline = time.monotonic() + self._target.timeout_s
        unknown = False
        for attempt in itertools.count():
            with self._connection(deadline, unknown, name, loan) as connection:
                try:
                    result = work(connection)
                    if connection.in_doubt and may_be_applied(connection):
                        raise OutcomeUnknown(
                            "the server stored the data but stopped waiting for its synchronous standby, so a failover "
                            "may lose it",
                            checkpoint=name,
                            path=self._target.shown,
                            hint="When the standby is back, repeat the call with the same id: it waits for the standby",
                        )
                    return result
                except psycopg.Error as error:
                    failure = error
                except BackstayError:
                    raise
                except ODD_VALUE_ERRORS as error:
                    raise odd_value(error, self._target.shown) from error
                lost = is_lost(failure, connection)
                unknown = unknown or (lost and may_be_applied(connection))
                again = is_transient(failure) or (lost and (repeats_unknown or not unknown))
                if isinstance(failure, DeadlinePassed) or not again:
                    raise self._given_up(failure, unknown, name) from failure
            pause = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            if pause and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(pause, left))
        raise AssertionError  # the loop never ends by itself

    @contextlib.contextmanager
    def _connection(
        self, deadline: float, unknown: bool, name: str | None, loan: Loan | None
    ) -> Iterator[DeadlineConnection]:
        if loan is None:
            self._check_open()
            with self.connect() as connection:
                self._configure(connection)
                connection.deadline = deadline
                yield connection
            return
        pool, connection = self._checked_out(deadline, unknown, name, loan)
        connection.deadline, connection.committing, connection.in_doubt = deadline, False, False
        try:
            yield connection
        except BaseException:
            if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                connection.close()  # its transaction will never be finished
            raise
        finally:
            pool.putconn(connection)
            loan.pool = loan.connection = None

    def _checked_out(
        self, deadline: float, unknown: bool, name: str | None, loan: Loan
    ) -> tuple[Pool, DeadlineConnection]:
        while (left := deadline - time.monotonic()) > 0:
            self._check_open()
            key = _own_key()
            pool = loan.pool = self._pools.get(key) or self._pools.setdefault(key, self._new_pool())
            try:
                if pool.closed:
                    pool.open()
                connection = loan.connection = pool.getconn(min(left, POOL_WAIT_S))
            except PoolTimeout:
                loan.pool = None
                continue
            except psycopg.OperationalError:  # another thread closed or disposed of it
                loan.pool = None
                if self._pools.get(key) is pool:
                    self._pools.pop(key, None)
                continue
            if connection.is_open():
                return pool, connection
            pool.putconn(connection)  # it died while idle: take the next one; nothing was sent
            loan.pool = loan.connection = None
        raise self._given_up(PoolTimeout("no connection in time"), unknown, name)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed", hint="Open it again with backstay.open")

    def _new_pool(self) -> Pool:
        return ConnectionPool(
            self._target.conninfo,
            connection_class=DeadlineConnection,
            kwargs=self._arguments(),
            configure=self._configure,
            min_size=0,
            max_size=1 if _own_key()[1] else self._target.pool_size,  # the main thread makes one call at a time
            reconnect_timeout=0,  # callers ask again, so no growing pauses after an outage
            open=False,
        )

    def _configure(self, connection: DeadlineConnection) -> None:
        connection.statements = self.statements
        connection.watch()
        connection.deadline = time.monotonic() + self._target.connect_timeout_s
        if is_pooled(connection) and self._target.prepare is None:
            connection.prepare_threshold = None

    def _arguments(self) -> dict[str, Any]:
        target = self._target
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

    def _given_up(self, error: psycopg.Error, unknown: bool, name: str | None) -> BackstayError:
        if unknown:
            return OutcomeUnknown(
                "the connection was lost before the server answered, so the data may or may not be stored",
                checkpoint=name,
                path=self._target.shown,
                hint="Repeat the call with the same id: it returns the first result, or stores the data now",
            )
        if isinstance(error, PoolTimeout | DeadlinePassed):
            return StoreBusy(
                f"the database did not answer within {self._target.timeout_s:g} s; nothing was stored",
                path=self._target.shown,
                hint="Check that the server runs and can be reached; a larger timeout= in the URL waits longer",
            )
        return translate(error, self._target)


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


def _own_key() -> tuple[int, bool]:
    """Return the key of this thread's pool."""
    return os.getpid(), threading.current_thread() is threading.main_thread()


def _dispose(pool: Pool) -> None:
    """Close a pool in another thread, because this one may have been interrupted while it held the pool's lock."""
    _thread.start_new_thread(pool.close, (CLOSE_S,))  # an interrupt can break threading's own start


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
