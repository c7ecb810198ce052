"""Pages whose checksum is wrong: which tables they are of, and how such tables are made readable again.

A page that does not match its checksum is never read, so one flipped bit hides every row on it. In some tables each row
has a digest of its own, or follows from others: of these the pages may be taken as they are, for whatever is wrong in
them shows as soon as it can be read. In the others a wrong byte would look like a right one: they stay closed.
"""

from __future__ import annotations

import apsw

from backstay.errors import Corrupted
from backstay.store.finding import DAMAGED, REBUILD, Finding
from backstay.store.sqlite import queries
from backstay.store.sqlite.rows import every

ADOPTABLE = ("blob", "checkpoint", "chunk", "record", "ref")
"""Their rows are covered by digests; references are worked out anew."""

ELSEWHERE = "free and map pages"
_SOUND = "ok"


def damaged_pages(connection: apsw.Connection) -> list[Finding]:
    """Return which tables have pages that cannot be read, or whose structure is wrong; nothing if all is sound."""
    whole = _problem(connection, queries.CHECK_FILE, ())
    if whole is None:
        return []
    tables = {name: _problem(connection, queries.CHECK_TABLE, (name,)) for (name,) in _tables(connection)}
    found = {name: problem for name, problem in tables.items() if problem is not None} or {ELSEWHERE: whole}
    helps = REBUILD if set(found) <= {*ADOPTABLE, ELSEWHERE} else None
    return [Finding(DAMAGED, f"pages of {name}", problem, key=name, repair=helps) for name, problem in found.items()]


def adopt_pages(connection: apsw.Connection, tables: list[str]) -> None:
    """Write the whole file anew from what these tables' pages say, whether they match their checksums or not.

    It is refused if the structure of a table is damaged: then it is not known which rows there were. The connection
    must not be used for anything else.
    """
    every(connection, "PRAGMA checksum_verification=OFF")
    for name in tables:
        if name == ELSEWHERE:
            continue
        try:
            every(connection, queries.REINDEX[name])
            problem = _problem(connection, queries.CHECK_TABLE, (name,))
        except (apsw.ConstraintError, apsw.CorruptError) as error:
            problem = str(error)
        if problem is not None:
            raise Corrupted(
                f"the structure of table {name} is damaged: {problem}",
                hint="Restore a copy of the file, or import what can be read into another store",
            )
    if "record" in tables:
        every(connection, queries.EXPIRE)  # no digest covers a time to live; one that has run out only waits for a beat
    if "ref" in tables:
        every(connection, queries.DISOWN)  # a wrong 1 would let two lanes extend one stream; a wrong 0 costs nothing
    every(connection, "VACUUM")
    every(connection, "PRAGMA checksum_verification=ON")
    problem = _problem(connection, queries.CHECK_FILE, ())
    if problem is not None:
        raise Corrupted(f"the file is still damaged: {problem}", hint="Restore a copy of it")


def _tables(connection: apsw.Connection) -> list[tuple[str]]:
    try:
        return [(name,) for (name,) in every(connection, queries.TABLES)]
    except (apsw.CorruptError, apsw.IOError):
        return [("sqlite_schema",)]


def _problem(connection: apsw.Connection, statement: str, bound: tuple[str, ...]) -> str | None:
    """Return the first thing that is wrong, None if nothing is."""
    try:
        texts = [text for (text,) in every(connection, statement, bound)]
    except (apsw.CorruptError, apsw.IOError) as error:
        return f"a page cannot be read: {error}"
    return None if texts == [_SOUND] else texts[0]
