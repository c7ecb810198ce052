"""Walking through a store's threads, oldest checkpoint first, a page at a time.

A store lists newest first. So a first walk counts and remembers where pages begin; the second takes the pages from the
last to the first. What is added meanwhile is not seen, what is deleted meanwhile is not missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from backstay.errors import BackstayError
from backstay.store.base import PAGE_ROWS_MAX, Backend, Query, Row
from backstay.thread.records import all_records

PAGE_ROWS = 100
"""Checkpoints with their manifests that are held at once."""


@dataclass(slots=True)
class Pages:
    """Where the pages of a thread begin, the newest first, and how many checkpoints there are."""

    count: int = 0
    before: list[int] = field(default_factory=list)


def thread_names(backend: Backend, namespace: str) -> list[str]:
    """Return all threads: those with checkpoints in the order in which they were made, then those with effects only."""
    names: list[str] = []
    before: int | None = None
    while True:
        page = backend.find(Query(namespace, heads_of_threads=True, before=before))
        names += [row.lane.thread for row in page]
        if len(page) < PAGE_ROWS_MAX:
            break
        before = page[-1].thread_number
    names.reverse()
    known = set(names)
    for effect in all_records(backend, "effect", namespace, None):
        if effect.lane.thread not in known:
            known.add(effect.lane.thread)
            names.append(effect.lane.thread)
    return names


def pages_of(backend: Backend, namespace: str, thread: str) -> Pages:
    """Return where the pages of a thread begin."""
    pages = Pages()
    before: int | None = None
    while True:
        found = backend.find(Query(namespace, thread, before=before))
        pages.count += len(found)
        pages.before += [row.seq + 1 for row in found[::PAGE_ROWS]]
        if len(found) < PAGE_ROWS_MAX:
            return pages
        before = found[-1].seq


def rows_of(
    backend: Backend, namespace: str, thread: str, pages: Pages, payload: bool
) -> Iterator[Row | BackstayError]:
    """Yield a thread's rows, oldest first. What cannot be read comes as the error that says so."""
    last = 0
    for before in reversed(pages.before):
        query = Query(namespace, thread, before=before, limit=PAGE_ROWS, payload=payload, writes=payload)
        for row in _page(backend, query):
            if isinstance(row, BackstayError):
                yield row
            elif row.seq > last:
                last = row.seq
                yield row


def _page(backend: Backend, query: Query) -> list[Row | BackstayError]:
    try:
        return list(reversed(backend.find(query)))
    except BackstayError as error:
        if not query.payload:
            return [error]
    # One of them cannot be read: find out which.
    plain = Query(query.namespace, query.thread, before=query.before, limit=query.limit)
    found: list[Row | BackstayError] = []
    for row in _page(backend, plain):
        if isinstance(row, BackstayError):
            found.append(row)
            continue
        try:
            found += backend.find(Query(query.namespace, ids=(row.id,), payload=True, writes=True))
        except BackstayError as error:
            error.checkpoint = error.checkpoint or row.id
            found.append(error)
    return found
