"""Repair plans of the memory store: references derived again, and bytes and rows restored from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backstay.errors import Corrupted
from backstay.pieces.manifest import Source
from backstay.store.base import Row, no_checkpoint
from backstay.store.finding import Finding
from backstay.store.memory.chunks import MemoryContent, StoredBytes
from backstay.store.memory.mutations import BytesStored, Mutation, MutationGroup, RowRestored
from backstay.store.memory.tables import Tables
from backstay.store.reachability import (
    BranchFacts,
    Reachability,
    branch_findings,
    sources_of,
    unneeded_bytes,
    without_checkpoint,
)


@dataclass(slots=True)
class MemoryRebuildPlan:
    """The problems that a rebuild would repair, and those that it cannot."""

    findings: list[Finding] = field(default_factory=list)
    unrepairable: list[Finding] = field(default_factory=list)


def plan_rebuild(tables: Tables, drop: bool) -> MemoryRebuildPlan:
    """Return what is wrong with everything that follows from rows and manifests. Changes nothing."""
    reachability = Reachability(tables.bytes.blob)
    scanned = [
        (branch, reachability.add_branch([(row.base, row.manifest) for row in branch.rows], branch.sources))
        for branch in sorted(tables.branches.values(), key=lambda branch: branch.number)
    ]
    drop = drop and not reachability.blind
    plan = MemoryRebuildPlan()
    for branch, references in scanned:
        facts = BranchFacts(
            branch.key, branch.number, branch.head_seq, branch.last_seq, branch.head_seq, branch.lease.token is not None
        )
        plan.findings += branch_findings(facts, references if drop else references._replace(unneeded=set()))
    if drop:
        unneeded: list[Source] = sorted(reachability.unneeded_blobs(tables.bytes.blobs))
        unneeded += [
            stream
            for stream, chunks in tables.bytes.streams.items()
            if any(reachability.is_unneeded(stream, offset, body.size) for offset, body in chunks)
        ]
        plan.findings += [unneeded_bytes(source) for source in unneeded]
        plan.findings += [
            without_checkpoint(record.kind, record.key, record.checkpoint, record.branch.thread)
            for record in tables.records
            if tables.has_lost_checkpoint(record)
        ]
    plan.unrepairable += reachability.missing(tables.bytes.blobs.keys(), tables.bytes.streams.keys())
    return plan


def plan_restore(
    tables: Tables, blobs: Mapping[bytes, bytes], chunks: Sequence[tuple[int, int, bytes]], rows: Sequence[Row]
) -> Mutation:
    """Return the mutation of ``Backend.restore``."""
    mutations: list[Mutation] = []
    patched = StoredBytes()  # each range is laid over the result of the earlier ones
    patched.streams = {stream: list(tables.bytes.streams.get(stream, ())) for stream, _, _ in chunks}
    for stream, offset, data in chunks:
        stored = [(stream, *_lay_over(patched, stream, offset, data))]
        mutations.append(BytesStored({}, stored))
        patched.put({}, stored, replace=True)
    mutations.append(BytesStored({name: MemoryContent(data) for name, data in blobs.items()}))
    numbers = {row.branch[:2]: thread.next_seq for row in rows if (thread := tables.threads.get(row.branch[:2]))}
    for row in rows:
        stored_row = tables.rows.get((row.branch.namespace, row.id))
        if stored_row is None or stored_row.branch != row.branch:
            raise no_checkpoint(row.id, row.branch.thread)
        restored = row._replace(
            seq=stored_row.seq, thread_number=stored_row.thread_number, tags=stored_row.tags, writes=(), base_data=None
        )
        needs = tuple(sources_of(row, lambda name: blobs.get(name) or tables.bytes.blob(name)))
        is_head = tables.is_head(stored_row)
        mutations.append(RowRestored(restored, needs, numbers[row.branch[:2]] if is_head else 0))
        numbers[row.branch[:2]] += is_head
    return MutationGroup(mutations)


def _lay_over(stored: StoredBytes, stream: int, offset: int, data: bytes) -> tuple[int, MemoryContent]:
    """Return the start and the bytes of the range that replaces all chunks which the data touches."""
    start, end = offset, offset + len(data)
    before = after = b""
    for at, body in stored.streams.get(stream, ()):
        if at >= end or at + body.size <= offset:
            continue
        try:
            old = body.read()
        except Corrupted:  # its other bytes are lost: they cannot be decompressed
            continue
        if at < start:
            before, start = old[: offset - at], at
        if at + len(old) > end and len(old) - (end - at) > len(after):
            after = old[end - at :]
    return start, MemoryContent(before + data + after)
