"""Forced schedules on PostgreSQL: one call is stopped in the middle of its transaction, another runs, then both go on.

The stop is a trigger in the test's own schema: before a kind of statement on a table it waits for an advisory lock that
the test holds. So the calls themselves are the real ones, and nothing depends on chance or on pauses.

    with Schedule(server, url) as schedule:
        schedule.stop_before("DELETE", "blob")
        pruned, saved = schedule.play(lambda store: store.prune(Keep(last=1)), lambda store: store.thread("b").save(…))

The first call runs until it stops there, which is proven; the second runs until it has ended or waits for a lock of the
first; then the first goes on. What each returned or raised comes back.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import backstay
from backstay.errors import BackstayError
from backstay.store import postgres
from backstay.testing.drafts import wait_until

if TYPE_CHECKING:
    import psycopg

    from support.postgres import PostgresServer

KEY = 20_261_116
FIRST, SECOND = "first", "second"
PATIENCE_S = 60.0

STOP = f"""
CREATE OR REPLACE FUNCTION {{schema}}.stop_first() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('application_name') = '{FIRST}' THEN
    PERFORM pg_advisory_xact_lock_shared({KEY});
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER stop_first BEFORE {{event}} ON {{schema}}.{{table}}
  FOR EACH {{each}} EXECUTE FUNCTION {{schema}}.stop_first()"""
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
STOPPED = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"

Call = Callable[[backstay.Store], Any]


def schema_of(url: str) -> str:
    """Return the schema that a URL names."""
    return parse_qs(urlsplit(url).query)["schema"][0]


def change_function(connection: psycopg.Connection[Any], schema: str, name: str, words: Mapping[str, str]) -> None:
    """Put a function into a schema that differs from the right one in these words: each must be there, once."""
    script = (importlib.resources.files(postgres) / "schema.sql").read_text(encoding="utf-8")
    found = re.search(rf"CREATE FUNCTION \{{schema\}}\.{name}\(.*?^END \$\$;", script, re.DOTALL | re.MULTILINE)
    assert found is not None
    text = found[0].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
    for old, new in words.items():
        assert text.count(old) == 1, f"{name} does not have {old!r} once"
        text = text.replace(old, new)
    connection.execute(text.replace("{schema}", f'"{schema}"').encode())


class Schedule:
    """Two callers of one store, and the hand that holds the first one back."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self._schema = schema_of(url)
        self.store = backstay.open(url)
        self._control = server.connect()
        self._stores = {name: backstay.open(f"{url}&application_name={name}") for name in (FIRST, SECOND)}
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self) -> Schedule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._control.close()  # lets go of whoever still waits
        self._pool.shutdown()
        for store in (self.store, *self._stores.values()):
            store.close()

    def stop_before(self, event: str, table: str) -> None:
        """Stop the first caller before its first statement of this kind.

        A DELETE has looked at nothing then, but sees what there was when it began. An INSERT has done everything else.
        """
        each = "ROW" if event == "INSERT" else "STATEMENT"
        text = STOP.replace("{event}", event).replace("{table}", table).replace("{each}", each)
        self._control.execute(self._filled(text).encode())

    def change_function(self, name: str, old: str, new: str) -> None:
        """Put a function into the schema that differs from the right one in these words."""
        change_function(self._control, self._schema, name, {old: new})

    def play(self, first: Call, second: Call) -> tuple[Any, Any]:
        """Run the first until it stops, then the second as far as it comes, then both to their ends."""
        return self._play(first, SECOND, second, lambda: self._count(WAITING, SECOND) == 1)

    def play_together(self, one: Call, other: Call) -> tuple[Any, Any]:
        """Run both until they stop at the same place, then let them go at once."""
        return self._play(one, FIRST, other, lambda: self._count(STOPPED, KEY) == 2)

    def deadlocks(self) -> int:
        """Return how many deadlocks the server has resolved so far."""
        self._control.execute("SELECT pg_stat_clear_snapshot()")
        return self._count(DEADLOCKS)

    def _play(self, first: Call, name: str, second: Call, held: Callable[[], bool]) -> tuple[Any, Any]:
        self._control.execute("SELECT pg_advisory_lock(%s)", (KEY,))
        one = self._begin(FIRST, first)
        wait_until(lambda: one.done() or self._count(STOPPED, KEY) == 1)
        assert not one.done(), f"the first caller did not stop: {one.result()}"
        other = self._begin(name, second)
        wait_until(lambda: other.done() or held())
        self._control.execute("SELECT pg_advisory_unlock(%s)", (KEY,))
        return one.result(PATIENCE_S), other.result(PATIENCE_S)

    def _begin(self, name: str, call: Call) -> Future[Any]:
        def work() -> Any:
            try:
                return call(self._stores[name])
            except BackstayError as error:
                return error

        return self._pool.submit(work)

    def _count(self, statement: str, *bound: Any) -> int:
        row = self._control.execute(statement, bound).fetchone()
        assert row is not None
        return int(row[0])

    def _filled(self, text: str) -> str:
        return text.replace("{schema}", f'"{self._schema}"')
