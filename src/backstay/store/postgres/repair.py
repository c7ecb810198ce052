"""Repair: derive references again from rows and manifests, restore bytes and rows, quarantine rows.

A rebuild blocks all saves while it runs (reads continue). A restore locks row by row, so that bytes which a save adds
to the same row at the same moment are not lost. A quarantine locks like a delete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from backstay.pieces.manifest import OFFSET_BITS, Source
from backstay.store.base import Row, no_checkpoint
from backstay.store.finding import ORPHAN, REBUILD, Finding
from backstay.store.layout import SEQ_MAX, address_of, pack_body, patched
from backstay.store.leases import BranchKey, fenced
from backstay.store.postgres import queries
from backstay.store.postgres.collect import (
    UnneededRows,
    drop_blobs,
    drop_checkpoints,
    drop_references,
    lock_threads,
    read_blob,
)
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.pool import RetryingPool
from backstay.store.postgres.rows import pack_id, reference_columns, split_fresh, unpack_id
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

BRANCHES_AT_ONCE = 200
"""How many branches' manifests one statement reads."""


@dataclass(slots=True)
class PostgresRebuildPlan:
    """The problems that a rebuild would repair, and the right values."""

    findings: list[Finding] = field(default_factory=list)
    unrepairable: list[Finding] = field(default_factory=list)  # problems that a rebuild cannot repair
    empty: list[int] = field(default_factory=list)  # branches that should not exist, or that only have references
    moved: list[tuple[int, int, int]] = field(default_factory=list)  # head, last seq, branch
    numbered: list[tuple[int, int]] = field(default_factory=list)  # next seq, thread
    missing: list[tuple[int, Source]] = field(default_factory=list)  # references
    unneeded: list[tuple[int, Source]] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    unneeded_rows: UnneededRows = field(default_factory=UnneededRows)
    tags: list[tuple[int, str]] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)

    def apply(self, connection: DeadlineConnection) -> None:
        """Repair everything in the plan."""
        for bound in self.moved:
            connection.run(queries.SET_BRANCH, bound)
        for seq, thread in self.numbered:
            connection.run(queries.SET_NEXT_SEQ, {"seq": seq, "thread": thread})
        for branch, source in self.missing:
            _refer(connection, branch, {source})
        drop_references(connection, self.unneeded)
        connection.run(queries.DROP_BRANCHES, (self.empty,))
        connection.run(queries.DROP_REFS_OF_BRANCHES, (self.empty,))
        drop_blobs(connection, self.blobs)
        self.unneeded_rows.drop(connection)
        for tag in self.tags:
            connection.run(queries.DROP_TAG, tag)
        for record in self.records:
            connection.run(queries.DROP_RECORD, (record,))


class PostgresRepair:
    """The verbs that find damage and repair it."""

    _pool: RetryingPool

    def check(self) -> list[Finding]:
        def work(connection: DeadlineConnection) -> list[Finding]:
            plan = find_rebuild(connection, drop=True)
            return [*plan.findings, *plan.unrepairable]

        return self._pool.look(work)

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        def work(connection: DeadlineConnection) -> list[Finding]:
            connection.run(queries.NO_SAVERS)
            plan = find_rebuild(connection, drop)
            plan.apply(connection)
            return plan.findings

        if dry_run:
            return self._pool.look(lambda connection: find_rebuild(connection, drop).findings)
        return self._pool.change(work, again=True, begin=queries.BEGIN_DELETE)

    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        def work(connection: DeadlineConnection) -> None:
            places = []  # of each row: its key, its branch's number and its thread's
            for row in rows:
                found = connection.one(queries.PLACE, (pack_id(row.branch.namespace, row.id),))
                if found is None or BranchKey(*found[8:]) != row.branch:
                    raise no_checkpoint(row.id, row.branch.thread)
                places.append((found[0], found[2], found[3]))
            lock_threads(connection, {thread for _, _, thread in places})
            for name, data in blobs.items():
                connection.run(queries.PUT_BLOB, (name, len(data), pack_body(data)))
            for stream, offset, data in chunks:
                _put_stretch(connection, address_of(stream, 0), offset, data)
            for row, (key, branch, _) in zip(rows, places, strict=True):
                parent = None if row.parent_id is None else pack_id(row.branch.namespace, row.parent_id)
                described = (row.step, row.created_us, row.digest, row.size, row.notes)
                bound = (parent, row.parent_digest or b"", *described, row.base, row.manifest, key)
                connection.run(queries.PUT_CHECKPOINT, bound)
                connection.run(queries.OUTDATE_WRITERS, (branch, key & SEQ_MAX))
                _refer(connection, branch, sources_of(row, lambda name: read_blob(connection, name)))

        self._pool.change(work, again=True, begin=queries.BEGIN_DELETE)

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        name = pack_id(namespace, checkpoint)

        def work(connection: DeadlineConnection) -> None:
            lock_threads(connection, {thread for (thread,) in connection.every(queries.THREADS_OF, ([name],))})
            found = connection.one(queries.PLACE, (name,))
            if found is None:
                raise no_checkpoint(checkpoint)
            key, _, branch, _, epoch, owner, held, left_us, *names = found
            if held is not None and left_us > 0 and not force:
                raise fenced(BranchKey(*names), 0, epoch, owner, left_us)
            drop_checkpoints(connection, [key])
            if branch is not None:
                connection.every(queries.SETTLE_BRANCHES, {"branches": [branch]})

        self._pool.change(work, checkpoint, begin=queries.BEGIN_DELETE)


# Planning ---------------------------------------------------------------------------------------------------------


def find_rebuild(connection: DeadlineConnection, drop: bool) -> PostgresRebuildPlan:
    """Return what is wrong. Call it where no other transaction changes anything."""
    plan = PostgresRebuildPlan()
    reachability = Reachability(lambda name: read_blob(connection, name))
    numbers: dict[tuple[int, int, str, str], int] = {}
    scanned: list[tuple[BranchFacts, References]] = []
    rows = iter(connection.every(queries.BRANCH_FACTS))
    while group := list(islice(rows, BRANCHES_AT_ONCE)):
        facts = [BranchFacts(BranchKey(*fields[2:6]), *fields[6:]) for fields in group]
        for fields, each in zip(group, facts, strict=True):
            numbers[fields[:4]] = max(numbers.get(fields[:4], 0), each.last_seq, each.newest)
        scanned += _scanned(connection, reachability, facts)
    drop = drop and not reachability.blind
    for each, references in scanned:
        _plan_branch(plan, each, references if drop else references._replace(unneeded=set()))
    for (thread, next_seq, namespace, name), highest in numbers.items():
        if next_seq <= highest:
            plan.findings.append(number_used_twice(namespace, name))
            plan.numbered.append((highest + 1, thread))
    _plan_bytes(connection, plan, reachability, drop)
    if drop:
        _plan_rows(connection, plan)
    plan.unrepairable += [out_of_reach(what, count) for what, count in connection.every(queries.UNREACHABLE) if count]
    return plan


def _scanned(
    connection: DeadlineConnection, reachability: Reachability, group: Sequence[BranchFacts]
) -> list[tuple[BranchFacts, References]]:
    numbers = [facts.number for facts in group]
    referred: dict[int, set[Source]] = {number: set() for number in numbers}
    for branch, stream, digest in connection.every(queries.REFS_OF_BRANCHES, (numbers,)):
        referred[branch].add(stream or digest)
    manifests: dict[int, list[tuple[bytes | None, bytes]]] = {number: [] for number in numbers}
    for branch, base, manifest in connection.every(queries.MANIFESTS_OF_BRANCHES, (numbers,)):
        manifests[branch].append((base, manifest))
    return [(facts, reachability.add_branch(manifests[facts.number], referred[facts.number])) for facts in group]


def _plan_branch(plan: PostgresRebuildPlan, facts: BranchFacts, references: References) -> None:
    found = branch_findings(facts, references)
    if not found:
        return
    plan.findings += found
    if facts.is_empty:
        plan.empty.append(facts.number)
        return
    if facts.newest:
        plan.moved.append((facts.newest, max(facts.last_seq, facts.newest), facts.number))
    plan.missing += [(facts.number, source) for source in references.missing]
    plan.unneeded += [(facts.number, source) for source in references.unneeded]


def _plan_bytes(
    connection: DeadlineConnection, plan: PostgresRebuildPlan, reachability: Reachability, drop: bool
) -> None:
    blobs = {name for (name,) in connection.every(queries.BLOB_NAMES)}
    streams: set[int] = set()
    unneeded: dict[Source, None] = {}
    for is_fresh, address, size in connection.every(queries.ALL_ROW_SIZES):
        stream = address >> OFFSET_BITS
        streams.add(stream)
        if drop and reachability.is_unneeded(stream, address - address_of(stream, 0), size):
            unneeded[stream] = None
            plan.unneeded_rows.add(is_fresh, address)
    if drop:
        plan.blobs = sorted(reachability.unneeded_blobs(blobs))
    plan.findings += [unneeded_bytes(source) for source in [*unneeded, *plan.blobs]]
    plan.unrepairable += reachability.missing(blobs, streams)


def _plan_rows(connection: DeadlineConnection, plan: PostgresRebuildPlan) -> None:
    """Find small rows of branches and checkpoints that do not exist."""
    for (branch,) in connection.every(queries.BRANCHES_LOST):
        what = Finding(ORPHAN, f"references of branch number {branch}", "the branch does not exist", repair=REBUILD)
        plan.findings.append(what)
        plan.empty.append(branch)
    for key, name in connection.every(queries.TAGS_WITHOUT_CHECKPOINT):
        plan.findings.append(without_checkpoint("tag", repr(name), None))
        plan.tags.append((key, name))
    for name, kind, key, thread, checkpoint in connection.every(queries.RECORDS_WITHOUT_CHECKPOINT):
        plan.findings.append(without_checkpoint(kind, key, unpack_id(checkpoint), thread))
        plan.records.append(name)


# Restoring --------------------------------------------------------------------------------------------------------


def _put_stretch(connection: DeadlineConnection, first: int, offset: int, data: bytes) -> None:
    bound = {"stream": first, "start": first + offset, "end": first + offset + len(data)}
    chunks = [(*row, None) for row in connection.every(queries.CHUNKS_TOUCHING, bound)]
    fresh = [
        (*row, slot)
        for address, body, checks, slot in connection.every(queries.FRESH_TOUCHING, bound)
        for row in split_fresh(address, body, checks)
    ]
    stored = sorted([*chunks, *fresh], key=lambda row: row[0])
    patch = patched([(address, size, body) for address, size, body, _ in stored], first + offset, data)
    for number in patch.drop:
        connection.run(queries.DROP_CHUNK, (stored[number][0],))
    changed = dict(patch.change)
    for number, body in changed.items():
        address, size, _, slot = stored[number]
        if slot is None:
            connection.run(queries.PUT_CHUNK, (address, size, body))
    for slot in {stored[number][3] for number in changed} - {None}:
        parts = [(size, changed.get(number, body)) for number, (_, size, body, at) in enumerate(stored) if at == slot]
        whole = b"".join(body[:size] for size, body in parts)
        checks = b"".join(size.to_bytes(4) + body[size:] for size, body in parts)
        connection.run(queries.PUT_FRESH, (whole, checks, slot))
    for address, part in patch.add:
        connection.run(queries.PUT_CHUNK, (address, len(part), pack_body(part)))


def _refer(connection: DeadlineConnection, branch: int, sources: set[Source]) -> None:
    """Let a branch refer to sources. It owns none of the streams: its next save starts a new one."""
    connection.run(queries.ADD_REFS, (branch, *reference_columns(sources)))
