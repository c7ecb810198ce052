"""Mending: what follows from rows and manifests is worked out anew, and bytes are put back in the middle of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backstay.errors import Corrupted, NotFound
from backstay.pieces.manifest import Source
from backstay.store.base import Row
from backstay.store.finding import Finding
from backstay.store.memory.chunks import KeptBytes, Whole
from backstay.store.memory.fact import BytesKept, Fact, RowSet, Several
from backstay.store.memory.lane import KeptLane
from backstay.store.memory.tables import Tables
from backstay.store.survey import (
    LaneFacts,
    References,
    Survey,
    lane_findings,
    sources_of,
    unneeded_bytes,
    without_checkpoint,
)


@dataclass(slots=True)
class Rebuild:
    """What a rebuild would put right, and what is wrong beyond its help."""

    findings: list[Finding] = field(default_factory=list)
    hopeless: list[Finding] = field(default_factory=list)


def plan_rebuild(tables: Tables, drop: bool) -> Rebuild:
    """Return what is wrong in what can be worked out; changes nothing."""
    survey = Survey(tables.bytes.blob)
    surveyed = [(lane, _surveyed(survey, lane)) for lane in sorted(tables.lanes.values(), key=lambda lane: lane.number)]
    drop = drop and not survey.blind
    plan = Rebuild()
    for lane, references in surveyed:
        facts = LaneFacts(
            lane.key, lane.number, lane.head_seq, lane.last_seq, lane.head_seq, lane.tenure.token is not None
        )
        plan.findings += lane_findings(facts, references if drop else references._replace(unneeded=set()))
    if drop:
        unneeded: list[Source] = sorted(survey.unneeded_blobs(tables.bytes.blobs))
        unneeded += [stream for stream, chunks in tables.bytes.streams.items() if _any_unneeded(survey, stream, chunks)]
        plan.findings += [unneeded_bytes(source) for source in unneeded]
        plan.findings += [
            without_checkpoint(record.kind, record.key, record.checkpoint, record.lane.thread)
            for record in tables.records
            if tables.lacks_checkpoint(record)
        ]
    plan.hopeless += survey.missing(tables.bytes.blobs.keys(), tables.bytes.streams.keys())
    return plan


def restored(
    tables: Tables,
    blobs: Mapping[bytes, bytes],
    chunks: Sequence[tuple[int, int, bytes]],
    rows: Sequence[Row],
) -> Fact:
    """Return the fact of ``Mending.restore``."""
    facts: list[Fact] = []
    patched = KeptBytes()  # each stretch is laid over what the ones before it made
    patched.streams = {stream: list(tables.bytes.streams.get(stream, ())) for stream, _, _ in chunks}
    for stream, offset, data in chunks:
        start, whole = _laid_over(patched, stream, offset, data)
        facts.append(BytesKept({}, [(stream, start, Whole(whole))]))
        patched.keep({}, [(stream, start, Whole(whole))], replace=True)
    facts.append(BytesKept({name: Whole(data) for name, data in blobs.items()}))
    numbers = {row.lane[:2]: thread.next_seq for row in rows if (thread := tables.threads.get(row.lane[:2]))}
    for row in rows:
        stored = tables.rows.get((row.lane.namespace, row.id))
        if stored is None or stored.lane != row.lane:
            raise NotFound(row.id, checkpoint=row.id, thread=row.lane.thread)
        kept = row._replace(
            seq=stored.seq, thread_number=stored.thread_number, tags=stored.tags, writes=(), base_data=None
        )
        needs = tuple(sources_of(row, lambda name: blobs.get(name) or tables.bytes.blob(name)))
        is_head = tables.is_head(stored)
        facts.append(RowSet(kept, needs, numbers[row.lane[:2]] if is_head else 0))
        numbers[row.lane[:2]] += is_head
    return Several(facts)


def _surveyed(survey: Survey, lane: KeptLane) -> References:
    return survey.add_lane([(row.base, row.manifest) for row in lane.rows], lane.sources)


def _any_unneeded(survey: Survey, stream: int, chunks: Sequence[tuple[int, object]]) -> bool:
    return any(survey.is_unneeded(stream, offset, getattr(body, "size", 0)) for offset, body in chunks)


def _laid_over(kept: KeptBytes, stream: int, offset: int, data: bytes) -> tuple[int, bytes]:
    """Return the stretch that replaces all chunks which the data touches, and where it begins."""
    start, end = offset, offset + len(data)
    before = after = b""
    for at, body in kept.streams.get(stream, ()):
        if at >= end or at + body.size <= offset:
            continue
        try:
            old = body.read()
        except Corrupted:  # cannot be unpacked: what was not given is lost
            continue
        if at < start:
            before, start = old[: offset - at], at
        if at + len(old) > end and len(old) - (end - at) > len(after):
            after = old[end - at :]
    return start, before + data + after
