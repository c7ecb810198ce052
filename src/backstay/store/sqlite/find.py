"""Finding checkpoints: heads, lists and look-ups, and the bytes that their manifests name.

A damaged page can hide rows. Each row of a branch names the one before it, so a list notices a missing one and shows it
as damaged; what is found through an index is counted through another one too.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from backstay.errors import Corrupted
from backstay.pieces.manifest import OFFSET_BITS, Range, Source
from backstay.store.base import (
    PAGE_ROWS_MAX,
    Branch,
    BranchKey,
    Head,
    NamespaceTotals,
    Query,
    Row,
    Sizes,
    head_is_lost,
    lost_head,
)
from backstay.store.layout import SEQ_BITS, SEQ_MAX, key_of, span_of
from backstay.store.sqlite import queries
from backstay.store.sqlite.chunks import read_ranges
from backstay.store.sqlite.files import Connection
from backstay.store.sqlite.rows import (
    CHECK_HINT,
    BranchRow,
    branch_of,
    check_absent,
    fetch_all,
    fetch_one,
    fetch_value,
    hidden_checkpoint,
    lost_row,
    pack_id,
    read_branch,
    read_row,
    read_rows,
    readable_names,
    unpack_id,
    unpack_tags,
    with_writes,
)
from backstay.store.sqlite.transactions import SqliteTransactions, looking, reading

_BRANCH_FIELDS = 14
_BRANCH_NUMBER = 7  # after the names, the thread's columns come first
THREADS_MAX = (1 << 63) - 1


class SqliteReads(SqliteTransactions):
    """The verbs that read checkpoints, branches and bytes."""

    @looking
    def head(self, connection: Connection, branch: BranchKey) -> Head | None:
        fields = connection.execute(queries.HEAD, branch).fetchone()
        if fields is not None and not fields[_BRANCH_FIELDS]:
            return _head(connection, branch, fields)
        connection.execute("BEGIN")  # the statements that follow must see the same
        fields = connection.execute(queries.HEAD, branch).fetchone()
        if fields is None:
            check_absent(connection, branch)
        head = None if fields is None else _head(connection, branch, fields)
        connection.execute("COMMIT")
        return head

    @reading
    def find(self, connection: Connection, query: Query) -> list[Row]:
        if query.ids is not None:
            rows = rows_by_id(connection, query)
        elif query.heads_of_threads:
            rows = heads_of_threads(connection, query)
        else:
            rows = rows_of_branches(connection, query)
        return [with_writes(connection, row) for row in rows] if query.writes else rows

    def unread(self, namespace: str, thread: str | None) -> list[Corrupted]:
        return []  # the call that needs an unreadable page raises the error

    @reading
    def branches(
        self,
        connection: Connection,
        namespace: str,
        thread: str | None,
        scope: str | None,
        after: int = 0,
        limit: int = PAGE_ROWS_MAX,
    ) -> list[Branch]:
        bound: dict[str, Any] = {"namespace": namespace, "thread": thread, "scope": scope, "after": after}
        bound["limit"] = limit = max(0, min(limit, PAGE_ROWS_MAX))
        if thread is None:
            del bound["thread"]
            if not after:  # once for each list, because counting takes time in proportion to the store
                one, other = fetch_all(connection, queries.BRANCHES_COUNTED_TWICE)
                if one != other:
                    raise Corrupted("some branches of the store cannot be found", hint=CHECK_HINT)
            found = fetch_all(connection, queries.BRANCHES, bound)
        else:
            found = fetch_all(connection, queries.BRANCHES_IN_THREAD, bound)
            del bound["limit"]
            if len(found) != min(fetch_value(connection, queries.COUNT_BRANCHES_IN_THREAD_AGAIN, bound), limit):
                raise hidden_branches(thread)
        return [
            Branch(
                branch.key,
                branch.number,
                id_of(connection, key_of(branch.number, branch.head)),
                branch.head,
                branch.last_seq,
                branch.lease.epoch,
                None if branch.origin is None else unpack_id(branch.origin),
            )
            if isinstance(branch, BranchRow)
            else Branch(branch.branch, fields[_BRANCH_NUMBER], None, 0, 0, 0, None)
            for fields, branch in zip(found, map(_branch, found), strict=True)
        ]

    @looking
    def fetch(self, connection: Connection, ranges: Iterable[Range]) -> list[list[bytes]]:
        # Without a transaction: bytes never change, and a caller that misses some asks whether their row was deleted.
        return read_ranges(connection, ranges)

    @reading
    def forked(self, connection: Connection, namespace: str, checkpoints: Collection[str]) -> set[str]:
        names = ((name, pack_id(namespace, name)) for name in checkpoints)
        return {name for name, id in names if fetch_one(connection, queries.BRANCHES_FORKED_FROM, (id,)) is not None}

    @reading
    def sizes(self, connection: Connection, sources: Collection[Source] | None = None) -> Sizes:
        taken: dict[Source, int] = {}
        if sources is None:
            taken.update(fetch_all(connection, queries.BLOB_SIZES))
            taken.update(fetch_all(connection, queries.STREAM_SIZES))
        for source in sources or ():
            if isinstance(source, bytes):
                size = fetch_value(connection, queries.BLOB_SIZE, (source,))
            else:
                size = fetch_value(
                    connection, queries.STREAM_SIZE, (source << OFFSET_BITS, (source + 1) << OFFSET_BITS)
                )
            if size is not None:
                taken[source] = size
        return Sizes(int(connection.pragma("page_count")) * int(connection.pragma("page_size")), taken)

    @reading
    def totals(self, connection: Connection, namespace: str) -> NamespaceTotals:
        found = fetch_all(connection, queries.COUNTED_TWICE)[0]
        if found[::2] != found[1::2]:
            raise Corrupted("some checkpoints, branches or threads cannot be found", hint=CHECK_HINT)
        return NamespaceTotals(*fetch_all(connection, queries.TOTALS, (namespace,))[0])


def _head(connection: Connection, branch: BranchKey, fields: tuple[Any, ...]) -> Head:
    found = read_branch(fields[:_BRANCH_FIELDS], branch)
    has_writes, streams, *row_fields = fields[_BRANCH_FIELDS:]
    row = None
    if row_fields[0] is not None:
        row = read_row(branch, found.thread, tuple(row_fields), True)
        row = with_writes(connection, row) if has_writes else row
    elif found.last_seq or found.head:
        raise head_is_lost(branch)
    numbers = [] if streams is None else map(int, streams.replace(",", " ").split())
    owned = dict(zip(*[iter(numbers)] * 2, strict=True))
    return Head(row, found.number, found.last_seq, found.lease.epoch, owned)


def _branch(fields: tuple[Any, ...]) -> BranchRow | Row:
    """Return a branch; if its row is damaged, a row for lists that says so."""
    key = BranchKey(*fields[:4])
    try:
        return read_branch(fields[4 : 4 + _BRANCH_FIELDS], key)
    except Corrupted:
        return lost_head(readable_names(key), fields[4])


def branches_of_thread(
    connection: Connection, namespace: str, thread: str, scope: str | None, branch: str | None
) -> list[BranchRow | Row]:
    """Return branches of a thread, oldest first; for a damaged one, a row for lists."""
    conditions, bound = _in_thread(namespace, thread, scope, branch)
    found = fetch_all(connection, queries.BRANCHES_OF_THREAD + conditions + queries.OLDEST_BRANCH_FIRST, bound)
    if len(found) != fetch_value(connection, queries.COUNT_BRANCHES_AGAIN + conditions, bound):
        raise hidden_branches(thread)
    return list(map(_branch, found))


def _in_thread(namespace: str, thread: str, scope: str | None, branch: str | None) -> tuple[str, dict[str, Any]]:
    """Return which branches of a thread are asked for, as SQL and its bound values."""
    bound: dict[str, Any] = {"namespace": namespace, "thread": thread}
    conditions = ""
    if scope is not None:
        conditions += queries.AND_SCOPE
        bound["scope"] = scope
    if branch is not None:
        conditions += queries.AND_BRANCH
        bound["branch"] = branch
    return conditions, bound


def hidden_branches(thread: str) -> Corrupted:
    """Return the error for branches that only one of two indexes has."""
    return Corrupted("some branches of the thread cannot be found", thread=thread, hint=CHECK_HINT)


def is_head(connection: Connection, key: int) -> bool:
    """Return whether a checkpoint is the newest of its branch."""
    return bool(fetch_value(connection, queries.HEAD_OF_BRANCH, (key >> SEQ_BITS,)) == key & SEQ_MAX)


def id_of(connection: Connection, key: int) -> str | None:
    """Return the id of the checkpoint with this key, or None if it is not known for sure."""
    stored = fetch_value(connection, queries.ID_BY_KEY, (key,))
    if stored is None or fetch_value(connection, queries.KEY_BY_ID, (stored,)) != key:
        return None
    return unpack_id(stored)


def tags(connection: Connection, key: int) -> tuple[str, ...]:
    """Return a checkpoint's tags in order."""
    found = fetch_one(connection, queries.TAGS, (key,))
    names = () if found is None else unpack_tags(*found)
    if names is None:
        raise Corrupted("the tags of a checkpoint are damaged", hint=CHECK_HINT)
    return names


def _conditions(query: Query) -> tuple[str, dict[str, Any]]:
    """Return the conditions that every list may have, as SQL and its bound values."""
    text = ""
    bound: dict[str, Any] = {"limit": max(0, min(query.limit, PAGE_ROWS_MAX))}
    if query.tag is not None:
        text += queries.AND_TAG
        bound["tag"] = b"\0" + query.tag.encode(errors="surrogatepass") + b"\0"
    return text, bound


def rows_of_branches(connection: Connection, query: Query) -> list[Row]:
    """Return rows of a thread's branches, newest first."""
    assert query.thread is not None
    names = (query.namespace, query.thread, query.scope, query.branch)
    if query.branch is None and query.tag is None:
        conditions, bound = _in_thread(*names)
        count = fetch_value(connection, queries.COUNT_BRANCHES + conditions, bound)
        if count != fetch_value(connection, queries.COUNT_BRANCHES_AGAIN + conditions, bound):
            raise hidden_branches(query.thread)
        if count > 1:
            statement = queries.BRANCHES_BY_ROWS + conditions + queries.NEWEST_ROW_FIRST
            bound["before"] = span_of(0, query.before)[1]
            with contextlib.closing(connection.execute(statement, bound)) as branches:
                return _newest_rows(connection, query, branches)
    pages = [_page(connection, query, branch) for branch in branches_of_thread(connection, *names)]
    if len(pages) == 1:
        return pages[0]
    merged = heapq.merge(*pages, key=lambda row: row.seq, reverse=True)
    return list(islice(merged, max(0, min(query.limit, PAGE_ROWS_MAX))))


def _newest_rows(connection: Connection, query: Query, branches: Iterator[tuple[Any, ...]]) -> list[Row]:
    """Merge the rows of branches that come in the order of their newest rows. Only those that are shown are read."""
    rows: list[Row] = []
    pages: list[tuple[int, int, list[Row]]] = []  # a heap, by each one's next row, which is at its end
    following = next(branches, None)
    while len(rows) < min(query.limit, PAGE_ROWS_MAX):
        while following is not None:
            newest = following[-1]
            # With any other value the branch is damaged, so its number is 0.
            if pages and isinstance(newest, int) and max(newest, 0) < -pages[0][0]:
                break
            page = _page(connection, query, _branch(following))[::-1]
            if page:
                heapq.heappush(pages, (-page[-1].seq, following[_BRANCH_NUMBER], page))
            following = next(branches, None)
        if not pages:
            break
        _, number, page = heapq.heappop(pages)
        rows.append(page.pop())
        if page:
            heapq.heappush(pages, (-page[-1].seq, number, page))
    return rows


def _page(connection: Connection, query: Query, branch: BranchRow | Row) -> list[Row]:
    """Return a page of one branch's rows."""
    if isinstance(branch, BranchRow):
        return _rows_of_branch(connection, query, branch)
    return [branch][: query.before]  # its number is 0, so it comes last


def _rows_of_branch(connection: Connection, query: Query, branch: BranchRow) -> list[Row]:
    low, high = span_of(branch.number, query.before)
    if query.tag is not None:
        return _tagged_rows(connection, query, branch, low, high)
    select = queries.ROWS_OF_BRANCH_WITH_PAYLOAD if query.payload else queries.ROWS_OF_BRANCH
    limit = max(0, min(query.limit, PAGE_ROWS_MAX))
    found = fetch_all(connection, select + queries.NEWEST_FIRST, {"limit": limit, "low": low, "high": high})
    rows = read_rows(branch.key, branch.thread, found, query.payload)
    return _with_gaps(connection, branch, high - 1, found, rows, len(found) < limit)


def _tagged_rows(connection: Connection, query: Query, branch: BranchRow, low: int, high: int) -> list[Row]:
    """Return a branch's rows with a tag, and those whose tags are damaged. Its tagged rows are in two indexes."""
    counted, again = fetch_all(connection, queries.TAGGED_COUNTS, (low, high, low, high))[0]
    if counted != again:
        raise Corrupted("some tagged checkpoints cannot be found", thread=branch.key.thread, hint=CHECK_HINT)
    rows: list[Row] = []
    select = queries.TAGGED_OF_BRANCH_WITH_PAYLOAD if query.payload else queries.TAGGED_OF_BRANCH
    for fields in connection.execute(select, {"low": low, "high": high}):
        row = read_row(branch.key, branch.thread, fields, query.payload)
        if not row.tags:  # it is among the tagged ones, so its tags are damaged
            row = lost_row(branch.key, branch.thread, row.seq, row.id)
        if len(rows) >= min(query.limit, PAGE_ROWS_MAX):
            break
        if query.tag in row.tags or not row.notes:
            rows.append(row)
    return rows


def _with_gaps(
    connection: Connection, branch: BranchRow, start: int, found: list[tuple[Any, ...]], rows: list[Row], is_last: bool
) -> list[Row]:
    """Return a branch's rows with a row without a description for each one that is missing."""
    low, end = span_of(branch.number)
    following = fetch_one(connection, queries.FOLLOWING, (start, end))
    expected = low | branch.head if following is None else _before(*following)
    if expected > start:  # a head that is lost: the page before this one showed it
        expected = found[0][0] if found else low
    shown: list[Row] = []
    for fields, row in zip(found, rows, strict=True):
        if fields[0] != expected:
            shown.append(lost_row(branch.key, branch.thread, expected & SEQ_MAX))
        shown.append(row)
        expected = _before(fields[0], fields[4])
    if is_last and expected != low:
        shown.append(lost_row(branch.key, branch.thread, expected & SEQ_MAX))
    return shown


def _before(key: int, back: object) -> int:
    """Return the key of the row before another one; if there is none, the start of the branch's keys."""
    return key - back if isinstance(back, int) and back else key >> SEQ_BITS << SEQ_BITS


def heads_of_threads(connection: Connection, query: Query) -> list[Row]:
    """Return the newest row of each thread, newest thread first."""
    conditions, bound = _conditions(query)
    before = THREADS_MAX if query.before is None else query.before
    bound.update(namespace=query.namespace, scope=query.scope, before=before)
    statement = queries.HEADS_OF_THREADS + conditions + queries.NEWEST_THREAD_FIRST
    rows = []
    for number, name, again, *fields in fetch_all(connection, statement, bound):
        number_of_branch, head, last_seq = fields[_BRANCH_NUMBER : _BRANCH_NUMBER + 3]
        # A thread's newest branch usually has its highest head and its highest last number, and these are the same. If
        # not, its newest checkpoint was deleted, or a branch is damaged or missing in an index.
        is_usual = number_of_branch == again and head == last_seq
        if not is_usual and not _has_sound_branches(connection, query, name):
            rows.append(lost_head(BranchKey(query.namespace, name, query.scope or "", ""), number))
            continue
        branch, row_fields = _branch(tuple(fields)), tuple(fields[4 + _BRANCH_FIELDS :])
        if not isinstance(branch, BranchRow):
            rows.append(branch)
        elif row_fields[0] is None:
            rows.append(lost_head(branch.key, branch.thread))
        else:
            rows.append(read_row(branch.key, branch.thread, row_fields, False))
    low = rows[-1].thread_number if rows and len(rows) == bound["limit"] else 0
    counted, again = fetch_all(connection, queries.COUNT_THREADS, {**bound, "low": low, "high": before})[0]
    if counted != again:
        rows.append(lost_head(BranchKey(query.namespace, "", "", ""), low))
    return rows


def _has_sound_branches(connection: Connection, query: Query, thread: str) -> bool:
    """Return whether a thread's branches can be read and found through both indexes."""
    try:
        branches = branches_of_thread(connection, query.namespace, thread, query.scope, None)
    except Corrupted:
        return False
    return all(isinstance(branch, BranchRow) for branch in branches)


def rows_by_id(connection: Connection, query: Query) -> list[Row]:
    """Return the rows with these ids that also match the rest of the query, newest first."""
    conditions, bound = _conditions(query)
    del bound["limit"]
    statement = (queries.ROW_BY_ID_WITH_PAYLOAD if query.payload else queries.ROW_BY_ID) + conditions
    rows = []
    for name in dict.fromkeys(query.ids or ()):
        stored = pack_id(query.namespace, name)
        fields = fetch_one(connection, statement, {**bound, "id": stored})
        if fields is None:
            if query.surely and fetch_one(connection, queries.IS_HIDDEN, (stored,)) is not None:
                raise hidden_checkpoint(name)
            continue
        branch = branch_of(connection, fields[0])
        row = read_row(branch.key, branch.thread, fields, query.payload)
        if query.names(row):
            rows.append(row)
    rows.sort(key=lambda row: (row.seq, row.thread_number), reverse=True)
    return rows[: max(0, min(query.limit, PAGE_ROWS_MAX))]
