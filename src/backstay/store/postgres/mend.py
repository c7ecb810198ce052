"""Mending: what follows from rows and manifests is worked out anew, bytes and rows are put back, rows are taken out.

Against savers: a rebuild lets none be under way (readers go on); what is put back is locked row by row, so that bytes
which a saver adds to the same row at the same moment are not lost; a row is taken out as a delete does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from backstay.errors import NotFound
from backstay.pieces.manifest import Source
from backstay.pieces.piece import OFFSET_BITS
from backstay.store.base import Row
from backstay.store.finding import ORPHAN, REBUILD, Finding
from backstay.store.lane import LaneKey
from backstay.store.layout import SEQ_MAX, address_of, pack_body
from backstay.store.leases import fenced
from backstay.store.patch import patched
from backstay.store.postgres import queries
from backstay.store.postgres.collect import (
    UnneededRows,
    begin_delete,
    drop_blobs,
    drop_references,
    keep_parents,
    lock_threads,
    read_blob,
)
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.link import Link
from backstay.store.postgres.rows import pack_id, unpack_id
from backstay.store.survey import (
    LaneFacts,
    References,
    Survey,
    lane_findings,
    number_is_used,
    out_of_reach,
    sources_of,
    unneeded_bytes,
    without_checkpoint,
)

LANES_AT_ONCE = 200
"""How many lanes' manifests are read by one statement."""


@dataclass(slots=True)
class Rebuild:
    """What a rebuild would put right: what is wrong, and how each thing must be instead."""

    findings: list[Finding] = field(default_factory=list)
    hopeless: list[Finding] = field(default_factory=list)  # wrong too, but no rebuild helps
    empty: list[int] = field(default_factory=list)  # lanes that should not be there, or of which only references are
    moved: list[tuple[int, int, int]] = field(default_factory=list)  # head, last seq, lane
    numbered: list[tuple[int, int]] = field(default_factory=list)  # next seq, thread
    lacking: list[tuple[int, Source]] = field(default_factory=list)  # references
    unneeded: list[tuple[int, Source]] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    unneeded_rows: UnneededRows = field(default_factory=UnneededRows)
    tags: list[tuple[int, str]] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)

    def apply(self, connection: DeadlineConnection) -> None:
        """Put it right."""
        for bound in self.moved:
            connection.run(queries.SET_LANE, bound)
        for number in self.numbered:
            connection.run(queries.SET_NEXT_SEQ, number)
        for lane, source in self.lacking:
            _refer(connection, lane, {source})
        drop_references(connection, self.unneeded)
        for statement in (queries.DROP_LANES, queries.DROP_STREAM_REFS_OF_LANES, queries.DROP_BLOB_REFS_OF_LANES):
            connection.run(statement, (self.empty,))
        drop_blobs(connection, self.blobs)
        self.unneeded_rows.drop(connection)
        for tag in self.tags:
            connection.run(queries.DROP_TAG, tag)
        for record in self.records:
            connection.run(queries.DROP_RECORD, (record,))


class Repair:
    """The verbs of checks and repairs."""

    _link: Link

    def check(self) -> list[Finding]:
        def work(connection: DeadlineConnection) -> list[Finding]:
            plan = find_rebuild(connection, drop=True)
            return [*plan.findings, *plan.hopeless]

        return self._link.look(work)

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        def work(connection: DeadlineConnection) -> list[Finding]:
            begin_delete(connection)
            connection.run(queries.NO_SAVERS)
            plan = find_rebuild(connection, drop)
            plan.apply(connection)
            return plan.findings

        if dry_run:
            return self._link.look(lambda connection: find_rebuild(connection, drop).findings)
        return self._link.change(work, again=True)

    def restore(
        self, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row] = ()
    ) -> None:
        def work(connection: DeadlineConnection) -> None:
            begin_delete(connection)
            places = [_place(connection, row) for row in rows]
            lock_threads(connection, {thread for _, _, thread in places})
            for name, data in blobs.items():
                connection.run(queries.PUT_BLOB, (name, len(data), pack_body(data)))
            for stream, offset, data in chunks:
                _put_stretch(connection, address_of(stream, 0), offset, data)
            for row, (key, lane, _) in zip(rows, places, strict=True):
                parent = None if row.parent_id is None else pack_id(row.lane.namespace, row.parent_id)
                described = (row.step, row.created_us, row.digest, row.size, row.notes)
                bound = (parent, row.parent_digest, *described, row.base or None, row.manifest, key)
                connection.run(queries.PUT_CHECKPOINT, bound)
                connection.run(queries.OUTDATE_WRITERS, (lane, key & SEQ_MAX))
                _refer(connection, lane, sources_of(row, lambda name: read_blob(connection, name)))

        self._link.change(work, again=True)

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        name = pack_id(namespace, checkpoint)

        def work(connection: DeadlineConnection) -> None:
            begin_delete(connection)
            lock_threads(connection, {thread for (thread,) in connection.every(queries.THREADS_OF, ([name],))})
            found = connection.one(queries.PLACE, (name,))
            if found is None:
                raise NotFound(checkpoint, checkpoint=checkpoint)
            key, digest, lane, _, epoch, owner, held, left_us, *names = found
            if held is not None and left_us > 0 and not force:
                raise fenced(LaneKey(*names), 0, epoch, owner, left_us)
            connection.every(queries.DROP_CHECKPOINTS, ([key],))
            connection.run(queries.DROP_TAGS, ([key],))
            connection.run(queries.DROP_RECORDS, ([name],))
            if lane is None:
                return
            connection.run(queries.DROP_WRITES, ([lane], [name]))
            keep_parents(connection, {name: digest}, [lane])
            connection.run(queries.SETTLE_HEADS, ([lane],))
            if connection.one(queries.DROP_EMPTY_LANE, (lane,)) is not None:
                connection.run(queries.DROP_STREAM_REFS_OF_LANES, ([lane],))
                connection.run(queries.DROP_BLOB_REFS_OF_LANES, ([lane],))

        self._link.change(work, checkpoint)


# Planning ---------------------------------------------------------------------------------------------------------


def find_rebuild(connection: DeadlineConnection, drop: bool) -> Rebuild:
    """Return what is wrong; to be called where nothing changes meanwhile."""
    plan = Rebuild()
    survey = Survey(lambda name: read_blob(connection, name))
    numbers: dict[tuple[int, int, str, str], int] = {}
    surveyed: list[tuple[LaneFacts, References]] = []
    rows = iter(connection.every(queries.LANE_FACTS))
    while group := list(islice(rows, LANES_AT_ONCE)):
        facts = [LaneFacts(LaneKey(*fields[2:6]), *fields[6:]) for fields in group]
        for fields, each in zip(group, facts, strict=True):
            numbers[fields[:4]] = max(numbers.get(fields[:4], 0), each.last_seq, each.newest)
        surveyed += _surveyed(connection, survey, facts)
    drop = drop and not survey.blind
    for each, references in surveyed:
        _plan_lane(plan, each, references if drop else references._replace(unneeded=set()))
    for (thread, next_seq, namespace, name), highest in numbers.items():
        if next_seq <= highest:
            plan.findings.append(number_is_used(namespace, name))
            plan.numbered.append((highest + 1, thread))
    _plan_bytes(connection, plan, survey, drop)
    if drop:
        _plan_rows(connection, plan)
    plan.hopeless += [out_of_reach(what, count) for what, count in connection.every(queries.UNREACHABLE) if count]
    return plan


def _surveyed(
    connection: DeadlineConnection, survey: Survey, group: Sequence[LaneFacts]
) -> list[tuple[LaneFacts, References]]:
    numbers = [facts.number for facts in group]
    referred: dict[int, set[Source]] = {number: set() for number in numbers}
    for lane, stream, digest in connection.every(queries.REFS_OF_LANES, {"lanes": numbers}):
        referred[lane].add(digest if stream is None else stream)
    manifests: dict[int, list[tuple[bytes | None, bytes]]] = {number: [] for number in numbers}
    for lane, base, manifest in connection.every(queries.MANIFESTS_OF_LANES, (numbers,)):
        manifests[lane].append((base, manifest))
    return [(facts, survey.add_lane(manifests[facts.number], referred[facts.number])) for facts in group]


def _plan_lane(plan: Rebuild, facts: LaneFacts, references: References) -> None:
    found = lane_findings(facts, references)
    if not found:
        return
    plan.findings += found
    if facts.is_empty:
        plan.empty.append(facts.number)
        return
    if facts.newest:
        plan.moved.append((facts.newest, max(facts.last_seq, facts.newest), facts.number))
    plan.lacking += [(facts.number, source) for source in references.lacking]
    plan.unneeded += [(facts.number, source) for source in references.unneeded]


def _plan_bytes(connection: DeadlineConnection, plan: Rebuild, survey: Survey, drop: bool) -> None:
    blobs = {name for (name,) in connection.every(queries.BLOB_NAMES)}
    streams: set[int] = set()
    unneeded: dict[Source, None] = {}
    for is_fresh, address, size in connection.every(queries.ALL_ROW_SIZES):
        stream = address >> OFFSET_BITS
        streams.add(stream)
        if drop and survey.is_unneeded(stream, address - address_of(stream, 0), size):
            unneeded[stream] = None
            plan.unneeded_rows.add(is_fresh, address)
    if drop:
        plan.blobs = sorted(survey.unneeded_blobs(blobs))
    plan.findings += [unneeded_bytes(source) for source in [*unneeded, *plan.blobs]]
    plan.hopeless += survey.missing(blobs, streams)


def _plan_rows(connection: DeadlineConnection, plan: Rebuild) -> None:
    """Find small rows that belong to a lane or checkpoint that is gone."""
    for (lane,) in connection.every(queries.LANES_LOST):
        what = Finding(ORPHAN, f"references of branch number {lane}", "the branch is not there", repair=REBUILD)
        plan.findings.append(what)
        plan.empty.append(lane)
    for key, name in connection.every(queries.TAGS_WITHOUT_CHECKPOINT):
        plan.findings.append(without_checkpoint("tag", repr(name), None))
        plan.tags.append((key, name))
    for name, kind, key, thread, checkpoint in connection.every(queries.RECORDS_WITHOUT_CHECKPOINT):
        plan.findings.append(without_checkpoint(kind, key, unpack_id(checkpoint), thread))
        plan.records.append(name)


# Putting back -----------------------------------------------------------------------------------------------------


def _place(connection: DeadlineConnection, row: Row) -> tuple[int, int, int]:
    """Return a row's key, its lane's number and its thread's."""
    found = connection.one(queries.PLACE, (pack_id(row.lane.namespace, row.id),))
    if found is None or LaneKey(*found[8:]) != row.lane:
        raise NotFound(row.id, checkpoint=row.id, thread=row.lane.thread)
    return found[0], found[2], found[3]


def _put_stretch(connection: DeadlineConnection, first: int, offset: int, data: bytes) -> None:
    bound = {"stream": first, "start": first + offset, "end": first + offset + len(data)}
    chunks = [(*row, None) for row in connection.every(queries.CHUNKS_TOUCHING, bound)]
    stored = sorted([*chunks, *connection.every(queries.FRESH_TOUCHING, bound)], key=lambda row: row[0])
    patch = patched([(address, size, body) for address, size, body, _ in stored], first + offset, data)
    for number in patch.drop:
        connection.run(queries.DROP_CHUNK, (stored[number][0],))
    for number, whole in patch.change:
        address, _, _, slot = stored[number]
        if slot is None:
            connection.run(queries.PUT_CHUNK, (address, len(whole), pack_body(whole)))
        else:
            connection.run(queries.PUT_FRESH, (whole, slot))
    for address, part in patch.add:
        connection.run(queries.PUT_CHUNK, (address, len(part), pack_body(part)))


def _refer(connection: DeadlineConnection, lane: int, sources: set[Source]) -> None:
    """Let a lane refer to sources. Whether it owned a stream nobody can say: without, its next save begins another."""
    streams = [source for source in sources if isinstance(source, int)]
    connection.run(queries.ADD_STREAM_REFS, (lane, streams, [False] * len(streams)))
    connection.run(queries.ADD_BLOB_REFS, (lane, [source for source in sources if isinstance(source, bytes)]))
