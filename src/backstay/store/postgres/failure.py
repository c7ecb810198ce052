"""What PostgreSQL's errors mean to us: try again, lost, or one of our own errors. The one border they cross."""

from __future__ import annotations

import re

import psycopg

from backstay.errors import BackstayError, InvalidInput, StoreBusy, StoreError, StoreFull, StoreRefused
from backstay.store.postgres.connection import DeadlineConnection, DeadlinePassed
from backstay.store.postgres.target import Target

TRANSIENT = {
    "40001",  # serialization failure
    "40P01",  # deadlock: this one was chosen to give way
    "23505",  # two writers made the same row at once; the second attempt finds the first one's
}
LOST = {
    "57P01",  # the server is shutting down
    "57P02",  # ... because another backend crashed
    "57P03",  # it is starting up
    "57P05",  # idle for too long
    "25P03",  # idle in a transaction for too long
    "53300",  # no connection is free
}
REFUSED = {
    "28000": ("the server does not let this user in", "Check user, database and pg_hba.conf"),
    "28P01": ("the server does not accept the password", "Check user and password in the URL"),
    "3D000": ("there is no such database", "Create it, or name another in the URL"),
    "42501": ("the user lacks a right", "GRANT it CREATE on the database, or USAGE and all rights on the schema"),
    "25006": (
        "the database is read-only",
        "Name the primary server, not a standby; check default_transaction_read_only",
    ),
    "3F000": ("the schema is not there", "Open the store again to have it made"),
    "42P01": ("a table of the store is not there", "Open the store again; if it was dropped, restore a backup"),
    "42883": ("a function of the store is not there", "Open the store again; if it was dropped, restore a backup"),
    "42703": ("a column of the store is not there", "Open the store again; if it was dropped, restore a backup"),
    "ZB006": (
        "another version of Backstay has changed the schema since the store was opened",
        "Restart this program with the version of Backstay that changed it",
    ),
    "0A000": ("the server lacks a feature that is needed", "Use PostgreSQL 13 or newer"),
    "26000": ("a connection pooler mixes up prepared statements", "Take prepare=yes out of the URL"),
    "42P05": ("a connection pooler mixes up prepared statements", "Take prepare=yes out of the URL"),
}

NOT_AS_THOUGHT, CHECKPOINT_IS_GONE, ID_EXISTS = "ZB001", "ZB005", "23505"
"""What the functions of the schema raise."""

INVALID, BUSY = "invalid", "busy"
WHILE_CONNECTING = {
    r"password authentication failed|no password supplied": "28P01",
    r"no pg_hba\.conf entry|role .* does not exist|is not permitted to log in": "28000",
    r"database .* does not exist": "3D000",
    r"permission denied": "42501",
    r"the database system is|too many (clients|connections)|connection slots": BUSY,
    r"invalid .*value|could not match|definition of service": INVALID,
}
"""libpq gives no code for a refused connection, only the server's text, which may be in another language."""


def is_transient(error: psycopg.Error) -> bool:
    """Tell whether the same call may simply be made again; nothing of it was applied."""
    return error.sqlstate in TRANSIENT


def is_lost(error: psycopg.Error, connection: DeadlineConnection) -> bool:
    """Tell whether the connection is gone, so that nobody knows what became of the last statement."""
    state = error.sqlstate or ""
    return connection.closed or state in LOST or state.startswith("08")


def translate(error: psycopg.Error, target: Target) -> BackstayError:
    """Return our error for one of the driver's, without secrets."""
    state, place = error.sqlstate or "", target.shown
    text = target.redacted(str(error).strip().split("\n")[0])
    if state in REFUSED:
        what, hint = REFUSED[state]
        return StoreRefused(f"{what} ({text})", path=place, hint=hint)
    if state == "53100":
        return StoreFull(f"no space left on the server ({text})", path=place, hint="Free some space, then try again")
    if state in ("55P03", "57014"):
        return StoreBusy(f"a lock was not free in time ({text})", path=place, hint="Try again")
    if isinstance(error, psycopg.DataError) and "NUL" in text:
        return InvalidInput("PostgreSQL cannot store a NUL character in a name", hint="Leave it out of the name")
    if isinstance(error, DeadlinePassed | psycopg.errors.ConnectionTimeout):
        return StoreBusy("the database gave no answer in time", path=place, hint="Look whether it can be reached")
    if isinstance(error, psycopg.OperationalError) and not state:
        return _not_connected(text, place)
    return StoreError(f"PostgreSQL says: {text}{f' ({state})' if state else ''}", path=place)


def _not_connected(text: str, place: str) -> BackstayError:
    kind = next((kind for words, kind in WHILE_CONNECTING.items() if re.search(words, text)), None)
    if kind == BUSY:
        return StoreBusy(f"the server takes no connection now ({text})", path=place, hint="Try again in a moment")
    if kind == INVALID:
        return InvalidInput(f"a parameter of the URL is wrong ({text})", path=place, hint="See libpq's list of them")
    if kind is not None:
        what, hint = REFUSED[kind]
        return StoreRefused(f"{what} ({text})", path=place, hint=hint)
    return StoreError(
        f"cannot connect: {text}", path=place, hint="Check host, port and user, and whether the server runs"
    )
