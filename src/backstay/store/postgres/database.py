"""Opening a database: only a primary, only with settings that our guarantees need, only a schema we know.

Creating the tables and migrating them are one transaction each, under an advisory lock, so any number of processes may
start at once.
"""

from __future__ import annotations

import re

import psycopg

from backstay.errors import StoreRefused
from backstay.store.postgres.connection import DeadlineConnection, translate
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.schema import check_schema, migration_scripts, newest_version, schema_script
from backstay.store.postgres.target import Target
from backstay.version import install_hint

SERVER_VERSION_MIN = 130_000
ENCODINGS = ("UTF8", "SQL_ASCII")  # others cannot store every name
ISOLATION = "read committed"
SETTINGS = """
SELECT pg_catalog.current_setting('server_version_num')::int, pg_catalog.pg_is_in_recovery(),
  pg_catalog.current_setting('transaction_read_only'), pg_catalog.current_setting('server_encoding'),
  pg_catalog.current_setting('default_transaction_isolation'), pg_catalog.current_setting('fsync'),
  pg_catalog.current_setting('full_page_writes'), pg_catalog.current_setting('synchronous_commit'),
  pg_catalog.current_setting('client_min_messages'), pg_catalog.current_schemas(true)::text[]"""
SAFE_PATH = "SET LOCAL search_path = pg_catalog, pg_temp"
ALONE = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('backstay schema {schema}', 0))"
NO_WRITERS = "LOCK TABLE {schema}.meta IN ACCESS EXCLUSIVE MODE"
HAS_SCHEMA = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s"
TABLES = """
SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s"""
HAS_VERSION = """
SELECT 1 FROM pg_catalog.pg_attribute a
WHERE a.attrelid = '{schema}.meta'::regclass::oid AND a.attname = 'version' AND a.atttypid = 'int'::regtype::oid"""
VERSION = "SELECT version FROM {schema}.meta"
_NAMES = re.compile(r"CREATE TABLE \{schema\}\.(\w+)")


def prepare(pool: RetryingPool, target: Target) -> None:
    """Check the server and create or migrate the tables, on a connection of its own."""
    connection = pool.connect()
    try:
        _check_server(connection, target)
        while not _is_newest(connection) and _version(connection, target) != newest_version():
            try:
                connection.execute("BEGIN")
                connection.execute(SAFE_PATH)
                migrate(connection, target)
                connection.execute("COMMIT")
            except psycopg.errors.DeadlockDetected:  # with a writer: try again
                connection.execute("ROLLBACK")
        try:
            check_schema(connection, target)
        except StoreRefused:
            _version(connection, target)  # which says it better if whole tables are missing
            raise
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg.Error):
            raise translate(error, target) from error
        raise
    pool.keep(connection)


def migrate(connection: DeadlineConnection, target: Target) -> None:
    """Bring the schema to the newest version, inside a transaction."""
    connection.run(ALONE)  # a process that waited here finds the work done
    current = _version(connection, target)
    if current is None:
        if connection.scalar(HAS_SCHEMA, (target.schema,)) is None:
            connection.run("CREATE SCHEMA {schema}")
        _execute(connection, schema_script())
        connection.run("INSERT INTO {schema}.meta VALUES (%s)", (newest_version(),))
        return
    connection.run(NO_WRITERS)
    for script in migration_scripts()[current - 1 :]:
        _execute(connection, script)
    connection.run("UPDATE {schema}.meta SET version = %s", (newest_version(),))


def _is_newest(connection: DeadlineConnection) -> bool:
    """Return whether the schema has our version, as it usually has: then most questions need not be asked."""
    try:
        return bool(connection.scalar(VERSION) == newest_version())
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedColumn):
        return False


def _version(connection: DeadlineConnection, target: Target) -> int | None:
    """Return the schema's version, None if it is empty; raise StoreRefused if it is another program's or too new."""
    name = target.schema
    tables = {table for (table,) in connection.every(TABLES, (name,))}
    if not tables:
        return None
    version = connection.scalar(VERSION) if "meta" in tables and connection.scalar(HAS_VERSION) else None
    if version is None or version < 1:
        raise _refused(target, f"schema {name!r} holds tables of another program", "Name another schema with ?schema=")
    known = newest_version()
    if version > known:
        raise _refused(
            target,
            f"schema {name!r} has version {version}; this Backstay supports up to {known}",
            f"Upgrade Backstay. {install_hint()}",
        )
    missing = sorted(set(_NAMES.findall(schema_script())) - tables) if version == known else []
    if missing:
        raise _refused(
            target,
            f"tables are missing in schema {name!r}: {', '.join(missing)}",
            "Restore a backup of the whole schema, or name another schema with ?schema=",
        )
    return int(version)


def _check_server(connection: DeadlineConnection, target: Target) -> None:
    found = connection.one(SETTINGS)
    assert found is not None
    version, is_standby, read_only, encoding, isolation, *durability, messages, path = found
    if version < SERVER_VERSION_MIN:
        raise _refused(target, "the server is older than PostgreSQL 13", "Use PostgreSQL 13 or newer")
    if is_standby:
        raise _refused(
            target, "the server is a standby", "Name the primary: the newest checkpoint on a standby may be an old one"
        )
    if read_only == "on":
        raise _refused(
            target,
            "the database is read-only",
            "Set default_transaction_read_only=off for this user and database, or name another",
        )
    if encoding not in ENCODINGS:
        raise _refused(
            target, f"the database's encoding {encoding} cannot store every name", "Create a database with UTF8"
        )
    if isolation != ISOLATION:  # a statement that waited for a lock would then see old data
        raise _refused(
            target,
            f"default_transaction_isolation={isolation} on the server would let deletes and forks miss each other",
            f"Set it to {ISOLATION!r} for this user: ALTER ROLE … SET default_transaction_isolation",
        )
    if next(schema for schema in path if not schema.startswith("pg_temp")) != "pg_catalog":
        raise _refused(
            target,
            f"the search path has schema {path[0]!r} before PostgreSQL's own, so other users could plant functions",
            "Remove pg_catalog from search_path for this user and database: then it comes first",
        )
    if messages in ("error", "fatal", "panic"):
        raise _refused(
            target,
            f"client_min_messages={messages} on the server hides the warning that a standby missed a commit",
            "Set it to warning for this user: ALTER ROLE … SET client_min_messages",
        )
    _check_durability(target, durability)


def _check_durability(target: Target, values: list[str]) -> None:
    for setting, value in zip(("fsync", "full_page_writes", "synchronous_commit"), values, strict=True):
        if value == "off" and not target.accepts_data_loss:
            raise _refused(
                target,
                f"the server runs with {setting}=off, so a crash could lose or damage acknowledged checkpoints",
                f"Set {setting}=on, or add accept_data_loss=yes to the URL to accept that",
            )


def _refused(target: Target, what: str, hint: str) -> StoreRefused:
    return StoreRefused(what, path=target.shown, hint=hint)


def _execute(connection: DeadlineConnection, script: str) -> None:
    """Run several statements at once, without parameters, in the simple protocol."""
    connection.execute(connection.statements[script].encode(), prepare=False)
