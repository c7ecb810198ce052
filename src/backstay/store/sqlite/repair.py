"""Repair: find damage, derive again what follows from other rows, restore bytes and rows, quarantine rows.

Three kinds of damage, repaired in this order, each by its own rebuild:

1. Structure: SQLite's ``integrity_check`` complains. Indexes are made again from their tables, and free pages by a
   vacuum. If the tree of a table itself is damaged, some of its rows are unknown: ``salvage`` copies the readable ones.
2. Rows whose seal does not match. Names are taken from the indexes, which hold them too; sequence numbers from the
   checkpoints; a lease or a time to live ends.
3. Everything that follows from rows and manifests: heads, links, references, unneeded bytes.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backstay.errors import Corrupted
from backstay.pieces.manifest import OFFSET_BITS, Source
from backstay.store.base import Row, no_checkpoint
from backstay.store.finding import DAMAGED, MISSING, ORPHAN, REBUILD, Finding, about_branch
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, pack_body, patched, span_of
from backstay.store.leases import BranchKey, LeaseRow
from backstay.store.reachability import (
    BranchFacts,
    Reachability,
    References,
    branch_findings,
    out_of_reach,
    sources_of,
    unneeded_bytes,
    without_checkpoint,
)
from backstay.store.records import record_id
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import read_blob
from backstay.store.sqlite.collect import drop_branch, keep_parents, move_head, update_links
from backstay.store.sqlite.database import is_damage
from backstay.store.sqlite.files import Connection, wal_findings
from backstay.store.sqlite.rows import (
    BranchRow,
    branch_of,
    drop_writes,
    fetch_all,
    fetch_one,
    fetch_value,
    find_branch,
    find_checkpoint,
    is_sound,
    kind_of,
    lost_pieces,
    pack_id,
    put_branch,
    read_branch,
    seal,
    unpack_id,
)
from backstay.store.sqlite.schema import our_objects
from backstay.store.sqlite.transactions import SqliteTransactions, reading, writing

ELSEWHERE = "free and map pages"
NUMBERS_SKIPPED = 1 << 20
"""A repaired counter continues so far after the last used number: open stores have reserved some for later."""

_SOUND = "ok"
_SALVAGE = "Restore a copy, or copy the readable rows with backstay.maintenance.salvage: see docs/repair.md"


# Structure --------------------------------------------------------------------------------------------------------


def damaged_structure(connection: Connection) -> list[Finding]:
    """Return which tables have unreadable pages or a damaged structure."""
    whole = _problem(connection, queries.CHECK_FILE, ())
    if whole is None:
        return [
            Finding(MISSING, f"row {row} of {table}", f"it names a row of {parent} that does not exist")
            for table, row, parent, _ in fetch_all(connection, queries.CHECK_REFERENCES)
        ]
    tables = [name for name, sql in our_objects().items() if sql.startswith("CREATE TABLE")]
    problems = {name: _problem(connection, queries.CHECK_TABLE, (name,)) for name in tables}
    found = {name: problem for name, problem in problems.items() if problem is not None}
    findings = []
    for name, problem in found.items():
        repair = REBUILD if _is_readable(connection, name) else None
        findings.append(Finding(DAMAGED, f"pages of {name}", problem, key=name, repair=repair))
    return findings or [Finding(DAMAGED, f"pages of {ELSEWHERE}", whole, key=ELSEWHERE, repair=REBUILD)]


def _is_readable(connection: Connection, table: str) -> bool:
    """Return whether every row of a table can be read without its indexes."""
    try:
        connection.execute(queries.READ_TABLE[table]).fetchall()
    except sqlite3.DatabaseError:
        return False
    return True


def repair_structure(connection: Connection, tables: list[str]) -> None:
    """Make the indexes of these tables and the whole file again. The connection must not be used for anything else."""
    problem = None
    try:
        # If the tree of a table is damaged too, nothing may change: its old indexes may know where its rows are.
        connection.execute("BEGIN IMMEDIATE")
        for name in tables:
            if name != ELSEWHERE:
                connection.execute(queries.REINDEX[name])
                problem = problem or _problem(connection, queries.CHECK_TABLE, (name,))
        if problem is None:
            connection.execute("COMMIT")
            connection.execute("VACUUM")
            problem = _problem(connection, queries.CHECK_FILE, ())
    except sqlite3.DatabaseError as error:
        problem = str(error)
    if problem is not None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise Corrupted(f"the structure of the database cannot be repaired in place: {problem}", hint=_SALVAGE)


def _problem(connection: Connection, statement: str, bound: tuple[str, ...]) -> str | None:
    """Return the first problem, None if there is none."""
    try:
        texts = [text for (text,) in fetch_all(connection, statement, bound)]
    except sqlite3.DatabaseError as error:
        return f"a page cannot be read: {error}"
    return None if texts == [_SOUND] else texts[0]


# Rows whose seal does not match -----------------------------------------------------------------------------------


def damaged_rows(connection: Connection, apply: bool) -> list[Finding]:
    """Return which threads, branches, counters and records do not match their seals; repair them if asked."""
    findings = [*_damaged_names(connection, apply), *_damaged_counters(connection, apply)]
    for place, *columns, own in fetch_all(connection, queries.RECORD_SEALS):
        # A name or the checksum itself is wrong. A new checksum over a wrong name would take the record from its
        # thread, and its work would look undone.
        if own != seal(place, *columns):
            what = "its row does not match its checksum"
            findings.append(Finding(DAMAGED, f"row of {kind_of(place)} {columns[3]!r}", what, repair=None))
    return findings


def _damaged_names(connection: Connection, apply: bool) -> list[Finding]:
    """Check threads and branches; of a damaged one, each name is what most of its three copies say."""
    threads, branches = _threads_to_repair(connection), _branches_to_repair(connection)
    findings = [_unsealed(f"thread {name!r}", name, namespace) for _, namespace, name, _ in threads]
    findings += [_unsealed(f"branch {row.key.name!r}", row.key.thread, row.key.namespace) for row in branches]
    if apply and findings:
        for index in queries.NAMED_INDEXES:
            connection.execute(queries.DROP_INDEX[index])
        for row in threads:
            connection.execute(queries.PUT_THREAD, (*row[1:], seal(*row), row[0]))
        for branch in branches:
            names = (branch.thread, branch.key.scope, branch.key.name, branch.number)
            connection.execute(queries.PUT_BRANCH_NAMES, names)
            put_branch(connection, branch)
        for index in queries.NAMED_INDEXES:
            connection.execute(our_objects()[index])
    return findings


def _threads_to_repair(connection: Connection) -> list[tuple[int, str, str, int]]:
    """Return the number, names and floor that damaged threads should have."""
    copies = _copies(connection, queries.THREAD_NAMES)
    found = []
    for number, namespace, name, floor, own in fetch_all(connection, queries.THREADS):
        if own != seal(number, namespace, name, floor):
            namespace, name = _most(copies.get(number, []), (namespace, name))
            highest = fetch_value(connection, queries.HIGHEST_SEQ, (number,)) or 0
            found.append((number, namespace, name, max(highest, _seq(floor))))
    return found


def _branches_to_repair(connection: Connection) -> list[BranchRow]:
    """Return damaged branches as they should be. No lease of before is valid any more.

    Nothing can be done for a branch whose thread does not exist: only a backup has its name.
    """
    copies = _copies(connection, queries.BRANCH_NAMES)
    threads = {number for number, *_ in fetch_all(connection, queries.THREADS)}
    found = []
    for fields in fetch_all(connection, queries.ALL_BRANCHES):
        key = BranchKey(*fields[:4])
        thread, floor, _, number, head, last_seq, epoch, *_, origin, _, _ = fields[4:]
        if is_sound(fields[4:], key):
            continue
        thread, scope, name = _most(copies.get(number, []), (thread, key.scope, key.name))
        if thread not in threads:
            continue
        newest = (fetch_value(connection, queries.NEWEST_KEY, span_of(number)) or 0) & SEQ_MAX
        last = max(newest, _seq(head), _seq(last_seq))
        lease = LeaseRow(epoch + 1 if isinstance(epoch, int) else 1)
        origin = origin if isinstance(origin, str | bytes) else None
        key = key._replace(scope=scope, name=name)
        found.append(BranchRow(key, thread, floor, number, newest, last, lease, origin))
    return found


def _copies(connection: Connection, statements: Sequence[str]) -> dict[int, list[tuple[Any, ...]]]:
    """Return the names of each row that the indexes hold."""
    copies: dict[int, list[tuple[Any, ...]]] = {}
    for statement in statements:
        for found in fetch_all(connection, statement):
            copies.setdefault(found[0], []).append(tuple(found[1:]))
    return copies


def _seq(stored: object) -> int:
    return stored if isinstance(stored, int) and 0 <= stored <= SEQ_MAX else 0


def _most(copies: list[tuple[Any, ...]], own: tuple[Any, ...]) -> tuple[Any, ...]:
    return Counter([own, *copies]).most_common(1)[0][0]


def _unsealed(where: str, thread: str | None, namespace: str) -> Finding:
    what = "its row does not match its checksum"
    return Finding(DAMAGED, f"row of {where}", what, thread, namespace=namespace, repair=REBUILD)


def _damaged_counters(connection: Connection, apply: bool) -> list[Finding]:
    findings = []
    for name, used in zip(("stream", "record"), fetch_all(connection, queries.NUMBERS_USED)[0], strict=True):
        found = fetch_one(connection, queries.COUNTER, (name,))
        if found is None or found[1] != seal(name, found[0]) or found[0] < used:
            what = "it does not match its checksum, or what was counted"
            findings.append(Finding(DAMAGED, f"counter {name}", what, repair=REBUILD))
            if apply:
                value = used + NUMBERS_SKIPPED
                connection.execute(queries.PUT_COUNTER, (name, value, seal(name, value)))
    return findings


# Everything that follows from rows and manifests --------------------------------------------------------------------


Statement = tuple[str, tuple[object, ...]]


@dataclass(slots=True)
class SqliteRebuildPlan:
    """The problems that a rebuild would repair, and the statements that do it."""

    findings: list[Finding] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    branches: list[BranchRow] = field(default_factory=list)  # as they should be
    emptied: list[BranchRow] = field(default_factory=list)  # have no checkpoint and no lease
    unrepairable: list[Finding] = field(default_factory=list)  # problems that a rebuild cannot repair

    def add(self, finding: Finding, *statements: Statement) -> None:
        """Add a problem and the statements that repair it."""
        self.findings.append(finding)
        self.statements.extend(statements)


class SqliteRepair(SqliteTransactions):
    """The verbs that find damage and repair it."""

    @reading
    def check(self, connection: Connection) -> list[Finding]:
        findings = damaged_structure(connection)
        try:
            findings += damaged_rows(connection, apply=False)
            plan = plan_rebuild(connection, drop=True)
            findings += [*plan.findings, *plan.unrepairable]
        except (Corrupted, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
                raise
            if not findings:  # otherwise it is reported already
                findings.append(Finding(DAMAGED, "database", f"a page or row cannot be read: {error}"))
        return [*findings, *wal_findings(connection, self._database.path)]

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        """Repair the structure, then damaged rows, then the rest: one of the three, because each needs the one before.

        Rows first if that is possible, because an index may know a name that its table has lost.
        """
        pages = self._read(lambda connection: [finding for finding in damaged_structure(connection) if finding.repair])
        try:
            rows = self._read(
                lambda connection: [each for each in damaged_rows(connection, apply=False) if each.repair]
            )
        except Corrupted:
            rows = []
        if rows:
            return rows if dry_run else self._write(lambda connection: damaged_rows(connection, apply=True))
        if pages and not dry_run:
            self._alone(lambda connection: repair_structure(connection, [str(finding.key) for finding in pages]))
        if pages:
            return pages
        if dry_run:
            return self._read(lambda connection: plan_rebuild(connection, drop).findings)

        def job(connection: Connection) -> list[Finding]:
            plan = plan_rebuild(connection, drop)
            connection.forget()
            for change in plan.branches:
                put_branch(connection, change)
            for empty in plan.emptied:
                drop_branch(connection, empty)
            for statement, bound in plan.statements:
                connection.execute(statement, bound)
            return plan.findings

        return self._write(job)

    @writing
    def restore(
        self,
        connection: Connection,
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
            for number, body in patch.change:
                connection.execute(queries.PUT_CHUNK, (*stored[number][:2], body))
            for address, part in patch.add:
                connection.execute(queries.PUT_CHUNK, (address, len(part), pack_body(part)))
        for row in rows:
            _put_row(connection, row)

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        def job(connection: Connection) -> None:
            name = pack_id(namespace, checkpoint)
            key, digest = find_checkpoint(connection, namespace, checkpoint)
            branch = branch_of(connection, key)
            if not force:
                branch.lease.check_delete(branch.key, None, self._clock())
            connection.forget()
            drop_writes(connection, queries.DROP_WRITES, (branch.thread, branch.key.scope, name))
            connection.execute(queries.DROP_RECORDS_OF_CHECKPOINT, (branch.thread, name))
            connection.execute(queries.DROP_CHECKPOINT, (key,))
            keep_parents(connection, {name: digest}, [key])
            update_links(connection, [key])
            if not move_head(connection, branch):
                drop_branch(connection, branch)

        self._write(job, checkpoint)


def plan_rebuild(connection: Connection, drop: bool) -> SqliteRebuildPlan:
    """Return what is wrong with everything that follows from rows and manifests. Changes nothing."""
    plan = SqliteRebuildPlan()
    reachability = Reachability(lambda name: read_blob(connection, name))
    scanned = []
    for fields in fetch_all(connection, queries.ALL_BRANCHES):
        thread, _, _, number = fields[4:8]
        referred = {source for (source,) in fetch_all(connection, queries.REFS, (number,))}
        manifests = connection.execute(queries.MANIFESTS_OF_BRANCH, span_of(number))
        references = reachability.add_branch(manifests, referred)
        if thread is None:  # it is reported as unreachable, and keeps its bytes
            continue
        branch = read_branch(fields[4:], BranchKey(*fields[:4]))
        newest = (fetch_value(connection, queries.NEWEST_KEY, span_of(number)) or 0) & SEQ_MAX
        facts = BranchFacts(branch.key, number, branch.head, branch.last_seq, newest, branch.lease.token is not None)
        scanned.append((branch, facts, references))
        _plan_links(connection, plan, branch)
    drop = drop and not reachability.blind
    for branch, facts, references in scanned:
        _plan_branch(plan, branch, facts, references if drop else references._replace(unneeded=set()))
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


def _plan_links(connection: Connection, plan: SqliteRebuildPlan, branch: BranchRow) -> None:
    """Find rows whose distance to the row before them is wrong, because that row is missing."""
    before = 0
    for key, back in fetch_all(connection, queries.LINKS_OF_BRANCH, span_of(branch.number)):
        expected = key - before if before else 0
        if back != expected:
            what = f"the checkpoint before number {key & SEQ_MAX} is missing"
            plan.add(about_branch(MISSING, branch.key, what), (queries.SET_BACK, (expected, key)))
        before = key


def _plan_branch(plan: SqliteRebuildPlan, branch: BranchRow, facts: BranchFacts, references: References) -> None:
    found = branch_findings(facts, references)
    if not found:
        return
    plan.findings += found
    if facts.is_empty:
        plan.emptied.append(branch)
        return
    if facts.newest:
        plan.branches.append(branch._replace(head=facts.newest, last_seq=max(facts.last_seq, facts.newest)))
    # Whether the branch owned the stream is unknown. If it did, its next save only starts another stream.
    plan.statements += [(queries.ADD_SCATTERED_REF, (facts.number, source)) for source in references.missing]
    plan.statements += [(queries.DROP_REF, (facts.number, source)) for source in references.unneeded]


def _plan_bytes(connection: Connection, plan: SqliteRebuildPlan, reachability: Reachability, drop: bool) -> None:
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


def _plan_rows(connection: Connection, plan: SqliteRebuildPlan) -> None:
    """Find small rows of branches and checkpoints that do not exist."""
    for (branch,) in fetch_all(connection, queries.BRANCHES_LOST):
        what = Finding(ORPHAN, f"references of branch number {branch}", "the branch does not exist", repair=REBUILD)
        plan.add(what, (queries.DROP_REFS, (branch,)))
    damaged = {place for place, *rest, own in fetch_all(connection, queries.RECORD_SEALS) if own != seal(place, *rest)}
    for place, key, thread, checkpoint in fetch_all(connection, queries.RECORDS_WITHOUT_CHECKPOINT):
        if place in damaged:
            continue
        what = without_checkpoint(kind_of(place), key, unpack_id(checkpoint), thread)
        plan.add(what, (queries.DROP_RECORD, (place,)))
    if pieces := lost_pieces(connection):
        what = Finding(ORPHAN, f"{len(pieces)} pieces of pending writes", "no row needs them", repair=REBUILD)
        plan.add(what, *((queries.DROP_PIECES, (number, number + 1)) for number in pieces))


def _put_row(connection: Connection, row: Row) -> None:
    branch = find_branch(connection, row.branch)
    key = fetch_value(connection, queries.IDENTITY, (pack_id(row.branch[0], row.id),))
    if branch is None or key is None or key >> SEQ_BITS != branch.number:
        raise no_checkpoint(row.id, row.branch.thread)
    parent = None if row.parent_id is None else pack_id(row.branch.namespace, row.parent_id)
    described = (row.step, row.created_us, row.digest, row.size, row.notes)
    connection.execute(
        queries.PUT_CHECKPOINT, (parent, row.parent_digest, *described, row.base or None, row.manifest, key)
    )
    connection.forget()
    if key & SEQ_MAX == branch.head:  # writers that saw it rely on bytes that may be dropped now
        highest = max(branch.floor, fetch_value(connection, queries.HIGHEST_SEQ, (branch.thread,)) or 0)
        put_branch(connection, branch._replace(last_seq=highest + 1))
    for source in sources_of(row, lambda name: read_blob(connection, name)):
        connection.execute(queries.ADD_SCATTERED_REF, (branch.number, source))
    connection.execute(queries.SCATTER_REFS, (branch.number,))  # it may no longer need what its neighbours need
