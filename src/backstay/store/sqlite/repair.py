"""Repair: find damage, derive references again from rows and manifests, restore bytes and rows, quarantine rows.

SQLite does not read a page that fails its checksum, so one flipped bit hides every row on it. In some tables each row
has a digest of its own or can be derived from others. Their pages may be used as they are, because any wrong byte shows
when the row is read. In the other tables a wrong byte would look like a right one, so their pages stay unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import apsw

from backstay.errors import Corrupted
from backstay.pieces.manifest import OFFSET_BITS, Source
from backstay.store.base import Row, no_checkpoint
from backstay.store.finding import DAMAGED, ORPHAN, REBUILD, Finding
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, pack_body, patched, span_of
from backstay.store.leases import BranchKey
from backstay.store.reachability import (
    BranchFacts,
    Reachability,
    References,
    branch_findings,
    number_used_twice,
    out_of_reach,
    sources_of,
    unneeded_bytes,
    without_checkpoint,
)
from backstay.store.records import record_id
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import read_blob
from backstay.store.sqlite.collect import keep_parents
from backstay.store.sqlite.files import Connection, wal_findings
from backstay.store.sqlite.rows import (
    drop_writes,
    fetch_all,
    fetch_one,
    fetch_value,
    find_branch,
    kind_of,
    lost_pieces,
    pack_id,
    unpack_id,
)
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

ADOPTABLE = ("blob", "checkpoint", "chunk", "record", "ref")
"""Tables whose rows have digests, or (``ref``) can be derived again."""

ELSEWHERE = "free and map pages"
_SOUND = "ok"


def damaged_pages(connection: apsw.Connection) -> list[Finding]:
    """Return which tables have unreadable pages or a damaged structure."""
    whole = _problem(connection, queries.CHECK_FILE, ())
    if whole is None:
        return []
    try:
        names = [name for (name,) in fetch_all(connection, queries.TABLES)]
    except (apsw.CorruptError, apsw.IOError):
        names = ["sqlite_schema"]
    tables = {name: _problem(connection, queries.CHECK_TABLE, (name,)) for name in names}
    found = {name: problem for name, problem in tables.items() if problem is not None} or {ELSEWHERE: whole}
    helps = REBUILD if set(found) <= {*ADOPTABLE, ELSEWHERE} else None
    return [Finding(DAMAGED, f"pages of {name}", problem, key=name, repair=helps) for name, problem in found.items()]


def adopt_pages(connection: apsw.Connection, tables: list[str]) -> None:
    """Rewrite the whole file from the pages of these tables, even if they fail their checksums.

    Raises Corrupted if the structure of a table is damaged, because then some of its rows are unknown. The connection
    must not be used for anything else.
    """
    fetch_all(connection, "PRAGMA checksum_verification=OFF")
    for name in tables:
        if name == ELSEWHERE:
            continue
        try:
            fetch_all(connection, queries.REINDEX[name])
            problem = _problem(connection, queries.CHECK_TABLE, (name,))
        except (apsw.ConstraintError, apsw.CorruptError) as error:
            problem = str(error)
        if problem is not None:
            raise Corrupted(
                f"the structure of table {name} is damaged: {problem}",
                hint="Restore a copy of the file, or export the readable threads into another store",
            )
    if "record" in tables:
        # No digest covers a time to live. A session that seems expired only waits for its next heartbeat.
        fetch_all(connection, queries.EXPIRE)
    if "ref" in tables:
        # A wrong 1 would let two branches extend one stream; a wrong 0 costs nothing.
        fetch_all(connection, queries.DISOWN)
    fetch_all(connection, "VACUUM")
    fetch_all(connection, "PRAGMA checksum_verification=ON")
    problem = _problem(connection, queries.CHECK_FILE, ())
    if problem is not None:
        raise Corrupted(f"the file is still damaged: {problem}", hint="Restore a copy of the file")


def _problem(connection: apsw.Connection, statement: str, bound: tuple[str, ...]) -> str | None:
    """Return the first problem, None if there is none."""
    try:
        texts = [text for (text,) in fetch_all(connection, statement, bound)]
    except (apsw.CorruptError, apsw.IOError) as error:
        return f"a page cannot be read: {error}"
    return None if texts == [_SOUND] else texts[0]


Statement = tuple[str, tuple[object, ...]]


@dataclass(slots=True)
class SqliteRebuildPlan:
    """The problems that a rebuild would repair, and the statements that do it."""

    findings: list[Finding] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    unrepairable: list[Finding] = field(default_factory=list)  # problems that a rebuild cannot repair

    def add(self, finding: Finding, *statements: Statement) -> None:
        """Add a problem and the statements that repair it."""
        self.findings.append(finding)
        self.statements.extend(statements)


class SqliteRepair(SqliteTransactions):
    """The verbs that find damage and repair it."""

    @reading
    def check(self, connection: Connection) -> list[Finding]:
        findings = damaged_pages(connection)
        try:
            plan = plan_rebuild(connection, drop=True)
            findings += [*plan.findings, *plan.unrepairable]
        except (apsw.CorruptError, apsw.IOError) as error:
            if not findings:  # otherwise it is reported already
                findings.append(Finding(DAMAGED, "database", f"a page cannot be read: {error}"))
        return [*findings, *wal_findings(connection, self._database.path)]

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        """Repair damaged pages first, if there are any; the next rebuild can then read and repair the rest."""
        pages = self._read(lambda connection: [finding for finding in damaged_pages(connection) if finding.repair])
        if pages and not dry_run:
            self._alone(lambda connection: adopt_pages(connection, [str(finding.key) for finding in pages]))
        if pages:
            return pages
        if dry_run:
            return self._read(lambda connection: plan_rebuild(connection, drop).findings)

        def job(connection: apsw.Connection) -> list[Finding]:
            plan = plan_rebuild(connection, drop)
            for statement, bound in plan.statements:
                connection.execute(statement, bound)
            return plan.findings

        return self._write(job)

    @writing
    def restore(
        self,
        connection: apsw.Connection,
        blobs: Mapping[bytes, bytes],
        chunks: Sequence[tuple[int, int, bytes]],
        rows: Sequence[Row] = (),
    ) -> None:
        for name, data in blobs.items():
            connection.execute(queries.PUT_BLOB, (name, len(data), pack_body(data)))
        for stream, offset, data in chunks:
            first = address_of(stream, 0)
            bound = {"start": first + offset, "stream": first, "end": first + offset + len(data)}
            stored = fetch_all(connection, queries.CHUNKS, bound)
            patch = patched(stored, first + offset, data)
            for number in patch.drop:
                connection.execute(queries.DROP_CHUNK, (stored[number][0],))
            for address, whole in [*((stored[number][0], whole) for number, whole in patch.change), *patch.add]:
                connection.execute(queries.PUT_CHUNK, (address, len(whole), pack_body(whole)))
        for row in rows:
            _put_row(connection, row)

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        def job(connection: apsw.Connection) -> None:
            name = pack_id(namespace, checkpoint)
            found = fetch_one(connection, queries.IDENTITY, (name,))
            if found is None:
                raise no_checkpoint(checkpoint)
            key, digest = found
            number = key >> SEQ_BITS
            branch = fetch_one(connection, queries.BRANCH_BY_ID, (number,))
            if branch is not None:
                stored = find_branch(connection, BranchKey(*branch[1:]))
                if stored is not None and not force:
                    stored.lease.check_delete(BranchKey(*branch[1:]), None, self._clock())
                drop_writes(connection, queries.DROP_WRITES, (branch[0], branch[3], name))
                connection.execute(queries.DROP_RECORDS_OF_CHECKPOINT, (branch[0], name))
            connection.execute(queries.DROP_TAGS, (key,))
            fetch_one(connection, queries.DROP_CHECKPOINT, (key,))
            keep_parents(connection, {name: digest}, [number])
            newest = fetch_value(connection, queries.NEWEST_KEY, span_of(number))
            if newest is None:
                connection.execute(queries.DROP_REFS, (number,))
                connection.execute(queries.DROP_BRANCH, (number,))
            else:
                connection.execute(queries.SET_HEAD, (newest & SEQ_MAX, number))

        self._write(job, checkpoint)


def plan_rebuild(connection: apsw.Connection, drop: bool) -> SqliteRebuildPlan:
    """Return what is wrong with everything that follows from rows and manifests. Changes nothing."""
    plan = SqliteRebuildPlan()
    reachability = Reachability(lambda name: read_blob(connection, name))
    numbers: dict[tuple[Any, ...], int] = {}  # the highest sequence number of each thread, by its row
    branches = [
        (fields[:4], BranchFacts(BranchKey(*fields[2:6]), *fields[6:]))
        for fields in fetch_all(connection, queries.BRANCH_FACTS)
    ]
    scanned = []
    for thread, facts in branches:
        numbers[thread] = max(numbers.get(thread, 0), facts.last_seq, facts.newest)
        referred = {source for source, _ in fetch_all(connection, queries.REFS, (facts.number,))}
        manifests = connection.execute(queries.MANIFESTS_OF_BRANCH, span_of(facts.number))
        scanned.append((facts, reachability.add_branch(manifests, referred)))
    drop = drop and not reachability.blind
    for facts, references in scanned:
        _plan_branch(plan, facts, references if drop else references._replace(unneeded=set()))
    for (number, next_seq, namespace, name), highest in numbers.items():
        if next_seq <= highest:
            plan.add(number_used_twice(namespace, name), (queries.NUMBER_THREAD, (highest + 1, number)))
    _plan_bytes(connection, plan, reachability, drop)
    if drop:
        _plan_rows(connection, plan)
    for place, name, *branch, key in connection.execute(queries.RECORD_NAMES):
        kind = kind_of(place)
        if name != record_id(kind, BranchKey(*branch), key):  # only the seal shows which of the two is wrong
            what = "it cannot be found by its name"
            plan.unrepairable.append(Finding(DAMAGED, f"{kind} {key}", what, branch[1], namespace=branch[0]))
    plan.unrepairable += [
        out_of_reach(what, count) for what, count in fetch_all(connection, queries.UNREACHABLE) if count
    ]
    return plan


def _plan_branch(plan: SqliteRebuildPlan, facts: BranchFacts, references: References) -> None:
    found = branch_findings(facts, references)
    if not found:
        return
    plan.findings += found
    if facts.is_empty:
        plan.statements += [(queries.DROP_REFS, (facts.number,)), (queries.DROP_BRANCH, (facts.number,))]
        return
    if facts.newest:
        last = max(facts.last_seq, facts.newest)
        plan.statements.append((queries.MOVE_BRANCH, (facts.newest, last, facts.number)))
    # Whether the branch owned the stream is unknown. If it did, its next save only starts another stream.
    plan.statements += [(queries.ADD_REF, (facts.number, source, False)) for source in references.missing]
    plan.statements += [(queries.DROP_REF, (facts.number, source)) for source in references.unneeded]


def _plan_bytes(connection: apsw.Connection, plan: SqliteRebuildPlan, reachability: Reachability, drop: bool) -> None:
    blobs = {name for name, _ in fetch_all(connection, queries.BLOB_SIZES)}
    streams: set[int] = set()
    unneeded: dict[Source, list[Statement]] = {}
    for address, size in connection.execute(queries.ALL_CHUNK_SIZES):
        stream = address >> OFFSET_BITS
        streams.add(stream)
        if drop and reachability.is_unneeded(stream, address - address_of(stream, 0), size):
            unneeded.setdefault(stream, []).append((queries.DROP_CHUNK, (address,)))
    for name in sorted(reachability.unneeded_blobs(blobs)) if drop else ():
        unneeded[name] = [(queries.DROP_BLOB, (name,))]
    for source, statements in unneeded.items():
        plan.add(unneeded_bytes(source), *statements)
    plan.unrepairable += reachability.missing(blobs, streams)


def _plan_rows(connection: apsw.Connection, plan: SqliteRebuildPlan) -> None:
    """Find small rows of branches and checkpoints that do not exist."""
    for (branch,) in fetch_all(connection, queries.BRANCHES_LOST):
        what = Finding(ORPHAN, f"references of branch number {branch}", "the branch does not exist", repair=REBUILD)
        plan.add(what, (queries.DROP_REFS, (branch,)))
    for key, name in fetch_all(connection, queries.TAGS_WITHOUT_CHECKPOINT):
        plan.add(without_checkpoint("tag", repr(name), None), (queries.DROP_TAG, (key, name)))
    for place, key, thread, checkpoint in fetch_all(connection, queries.RECORDS_WITHOUT_CHECKPOINT):
        what = without_checkpoint(kind_of(place), key, unpack_id(checkpoint), thread)
        plan.add(what, (queries.DROP_RECORD, (place,)))
    if pieces := lost_pieces(connection):
        what = Finding(ORPHAN, f"{len(pieces)} pieces of pending writes", "no row needs them", repair=REBUILD)
        plan.add(what, *((queries.DROP_PIECES, (number, number + 1)) for number in pieces))


def _put_row(connection: apsw.Connection, row: Row) -> None:
    branch = find_branch(connection, row.branch)
    key = fetch_value(connection, queries.IDENTITY, (pack_id(row.branch[0], row.id),))
    if branch is None or key is None or key >> SEQ_BITS != branch.number:
        raise no_checkpoint(row.id, row.branch.thread)
    parent = None if row.parent_id is None else pack_id(row.branch.namespace, row.parent_id)
    described = (row.step, row.created_us, row.digest, row.size, row.notes)
    connection.execute(
        queries.PUT_CHECKPOINT, (parent, row.parent_digest, *described, row.base or None, row.manifest, key)
    )
    if key & SEQ_MAX == branch.head:  # writers that saw it rely on bytes that may be dropped now
        connection.execute(queries.MOVE_BRANCH, (branch.head, branch.next_seq, branch.number))
        connection.execute(queries.NUMBER_THREAD, (branch.next_seq + 1, branch.thread))
    for source in sources_of(row, lambda name: read_blob(connection, name)):
        connection.execute(queries.ADD_REF, (branch.number, source, False))
