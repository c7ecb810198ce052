"""Repair: find damage, work out what follows from rows and manifests, put bytes and rows back, take rows out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import apsw

from backstay.errors import NotFound
from backstay.pieces.manifest import Source
from backstay.pieces.piece import OFFSET_BITS
from backstay.store.base import Row
from backstay.store.boot import Moment
from backstay.store.finding import DAMAGED, ORPHAN, REBUILD, Finding
from backstay.store.lane import LaneKey
from backstay.store.layout import SEQ_BITS, SEQ_MAX, address_of, pack_body, span_of
from backstay.store.patch import patched
from backstay.store.records import record_id
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import read_blob
from backstay.store.sqlite.collect import keep_parents
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.lane import find_lane
from backstay.store.sqlite.log import log_findings
from backstay.store.sqlite.pages import adopt_pages, damaged_pages
from backstay.store.sqlite.pending import drop_writes, lost_pieces
from backstay.store.sqlite.rows import every, kind_of, one, pack_id, scalar, unpack_id
from backstay.store.sqlite.transactions import Transactions, reading, writing
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

Statement = tuple[str, tuple[object, ...]]


@dataclass(slots=True)
class Rebuild:
    """What a rebuild would put right: what is wrong, and the statements that change it."""

    findings: list[Finding] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    hopeless: list[Finding] = field(default_factory=list)  # wrong too, but no rebuild helps

    def add(self, finding: Finding, *statements: Statement) -> None:
        """Note one thing that is wrong and how it is put right."""
        self.findings.append(finding)
        self.statements.extend(statements)


class Repair(Transactions):
    """The verbs that look for damage and repair it."""

    @reading
    def check(self, connection: Connection) -> list[Finding]:
        findings = damaged_pages(connection)
        try:
            plan = plan_rebuild(connection, drop=True)
            findings += [*plan.findings, *plan.hopeless]
        except (apsw.CorruptError, apsw.IOError) as error:
            if not findings:  # else it is reported already
                findings.append(Finding(DAMAGED, "database", f"a page cannot be read: {error}"))
        return [*findings, *log_findings(connection, self._database.path)]

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        """Put pages right first, if any are damaged: only then can the rest be read, by the next rebuild."""
        pages = self._read(lambda connection: [finding for finding in damaged_pages(connection) if finding.repair])
        if pages and not dry_run:
            self._alone(lambda connection: adopt_pages(connection, [str(finding.key) for finding in pages]))
        if pages:
            return pages
        if dry_run:
            return self._read(lambda connection: plan_rebuild(connection, drop).findings)
        return self._write(lambda connection: rebuild(connection, drop))

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
            stored = every(connection, queries.CHUNKS, bound)
            patch = patched(stored, first + offset, data)
            for number in patch.drop:
                connection.execute(queries.DROP_CHUNK, (stored[number][0],))
            for address, whole in [*((stored[number][0], whole) for number, whole in patch.change), *patch.add]:
                connection.execute(queries.PUT_CHUNK, (address, len(whole), pack_body(whole)))
        for row in rows:
            _put_row(connection, row)

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        self._write(lambda connection: quarantine(connection, namespace, checkpoint, force, self._clock()), checkpoint)


def plan_rebuild(connection: apsw.Connection, drop: bool) -> Rebuild:
    """Return what is wrong in what can be worked out; changes nothing."""
    plan = Rebuild()
    survey = Survey(lambda name: read_blob(connection, name))
    numbers: dict[tuple[Any, ...], int] = {}  # the highest that a thread has given, by its row
    lanes = [
        (fields[:4], LaneFacts(LaneKey(*fields[2:6]), *fields[6:])) for fields in every(connection, queries.LANE_FACTS)
    ]
    surveyed = []
    for thread, facts in lanes:
        numbers[thread] = max(numbers.get(thread, 0), facts.last_seq, facts.newest)
        referred = {source for source, _ in every(connection, queries.REFS, (facts.number,))}
        manifests = connection.execute(queries.MANIFESTS_OF_LANE, span_of(facts.number))
        surveyed.append((facts, survey.add_lane(manifests, referred)))
    drop = drop and not survey.blind
    for facts, references in surveyed:
        _plan_lane(plan, facts, references if drop else references._replace(unneeded=set()))
    for (number, next_seq, namespace, name), highest in numbers.items():
        if next_seq <= highest:
            plan.add(number_is_used(namespace, name), (queries.NUMBER_THREAD, (highest + 1, number)))
    _plan_bytes(connection, plan, survey, drop)
    if drop:
        _plan_rows(connection, plan)
    plan.hopeless += _misnamed(connection)
    plan.hopeless += [out_of_reach(what, count) for what, count in every(connection, queries.UNREACHABLE) if count]
    return plan


def rebuild(connection: apsw.Connection, drop: bool) -> list[Finding]:
    """See ``Mending.rebuild``."""
    plan = plan_rebuild(connection, drop)
    for statement, bound in plan.statements:
        connection.execute(statement, bound)
    return plan.findings


def quarantine(connection: apsw.Connection, namespace: str, checkpoint: str, force: bool, now: Moment) -> None:
    """See ``Mending.quarantine``."""
    name = pack_id(namespace, checkpoint)
    found = one(connection, queries.IDENTITY, (name,))
    if found is None:
        raise NotFound(checkpoint, checkpoint=checkpoint)
    key, digest = found
    number = key >> SEQ_BITS
    lane = one(connection, queries.LANE_BY_ID, (number,))
    if lane is not None:
        stored = find_lane(connection, LaneKey(*lane[1:]))
        if stored is not None and not force:
            stored.tenure.check_delete(LaneKey(*lane[1:]), None, now)
        drop_writes(connection, queries.DROP_WRITES, (lane[0], lane[3], name))
        connection.execute(queries.DROP_RECORDS_OF_CHECKPOINT, (lane[0], name))
    connection.execute(queries.DROP_TAGS, (key,))
    one(connection, queries.DROP_CHECKPOINT, (key,))
    keep_parents(connection, {name: digest}, [number])
    newest = scalar(connection, queries.NEWEST_KEY, span_of(number))
    if newest is None:
        connection.execute(queries.DROP_REFS, (number,))
        connection.execute(queries.DROP_LANE, (number,))
    else:
        connection.execute(queries.SET_HEAD, (newest & SEQ_MAX, number))


def _plan_lane(plan: Rebuild, facts: LaneFacts, references: References) -> None:
    found = lane_findings(facts, references)
    if not found:
        return
    plan.findings += found
    if facts.is_empty:
        plan.statements += [(queries.DROP_REFS, (facts.number,)), (queries.DROP_LANE, (facts.number,))]
        return
    if facts.newest:
        last = max(facts.last_seq, facts.newest)
        plan.statements.append((queries.MOVE_LANE, (facts.newest, last, facts.number)))
    # Whether the lane owned the stream nobody can say. That it does not only makes its next save begin another one.
    plan.statements += [(queries.ADD_REF, (facts.number, source, False)) for source in references.lacking]
    plan.statements += [(queries.DROP_REF, (facts.number, source)) for source in references.unneeded]


def _plan_bytes(connection: apsw.Connection, plan: Rebuild, survey: Survey, drop: bool) -> None:
    blobs = {name for name, _ in every(connection, queries.BLOB_SIZES)}
    streams: set[int] = set()
    unneeded: dict[Source, list[Statement]] = {}
    for address, size in connection.execute(queries.ALL_CHUNK_SIZES):
        stream = address >> OFFSET_BITS
        streams.add(stream)
        if drop and survey.is_unneeded(stream, address - address_of(stream, 0), size):
            unneeded.setdefault(stream, []).append((queries.DROP_CHUNK, (address,)))
    for name in sorted(survey.unneeded_blobs(blobs)) if drop else ():
        unneeded[name] = [(queries.DROP_BLOB, (name,))]
    for source, statements in unneeded.items():
        plan.add(unneeded_bytes(source), *statements)
    plan.hopeless += survey.missing(blobs, streams)


def _plan_rows(connection: apsw.Connection, plan: Rebuild) -> None:
    """Find small rows that belong to a lane or checkpoint that is gone."""
    for (lane,) in every(connection, queries.LANES_LOST):
        what = Finding(ORPHAN, f"references of branch number {lane}", "the branch is not there", repair=REBUILD)
        plan.add(what, (queries.DROP_REFS, (lane,)))
    for key, name in every(connection, queries.TAGS_WITHOUT_CHECKPOINT):
        plan.add(without_checkpoint("tag", repr(name), None), (queries.DROP_TAG, (key, name)))
    for place, key, thread, checkpoint in every(connection, queries.RECORDS_WITHOUT_CHECKPOINT):
        what = without_checkpoint(kind_of(place), key, unpack_id(checkpoint), thread)
        plan.add(what, (queries.DROP_RECORD, (place,)))
    if pieces := lost_pieces(connection):
        what = Finding(ORPHAN, f"{len(pieces)} pieces of pending writes", "no row needs them", repair=REBUILD)
        plan.add(what, *((queries.DROP_PIECES, (number, number + 1)) for number in pieces))


def _misnamed(connection: apsw.Connection) -> list[Finding]:
    """Return the records that no call finds by name. Whether the name or the place is wrong only their seals tell."""
    found = []
    for place, name, *lane, key in connection.execute(queries.RECORD_NAMES):
        kind = kind_of(place)
        if name != record_id(kind, LaneKey(*lane), key):
            found.append(
                Finding(DAMAGED, f"{kind} {key}", "it cannot be found by its name", lane[1], namespace=lane[0])
            )
    return found


def _put_row(connection: apsw.Connection, row: Row) -> None:
    lane, key = find_lane(connection, row.lane), scalar(connection, queries.IDENTITY, (pack_id(row.lane[0], row.id),))
    if lane is None or key is None or key >> SEQ_BITS != lane.number:
        raise NotFound(row.id, checkpoint=row.id, thread=row.lane.thread)
    parent = None if row.parent_id is None else pack_id(row.lane.namespace, row.parent_id)
    described = (row.step, row.created_us, row.digest, row.size, row.notes)
    connection.execute(
        queries.PUT_CHECKPOINT, (parent, row.parent_digest, *described, row.base or None, row.manifest, key)
    )
    if key & SEQ_MAX == lane.head:  # whoever saw it before relies on bytes that may go now
        connection.execute(queries.MOVE_LANE, (lane.head, lane.next_seq, lane.number))
        connection.execute(queries.NUMBER_THREAD, (lane.next_seq + 1, lane.thread))
    for source in sources_of(row, lambda name: read_blob(connection, name)):
        connection.execute(queries.ADD_REF, (lane.number, source, False))
