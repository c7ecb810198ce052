"""Between what a caller types and the flows: arguments checked and brought into one form, once for sync and async.

Every function here returns a flow, or a ``Listing`` for lists that are read page by page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backstay.errors import InvalidInput, NotFound
from backstay.model.checkpoint import (
    MAIN,
    PAYLOAD_FIELDS,
    Checkpoint,
    CheckpointMeta,
    Notes,
    SavedCheckpoint,
    Write,
)
from backstay.model.damaged import Damaged
from backstay.model.decision import Decision, DecisionKind
from backstay.model.fields import STEP_MAX, check_tags
from backstay.model.ids import check_id
from backstay.model.interrupt import InterruptKind
from backstay.store.base import Lane, LaneKey, Query, Removed
from backstay.thread import interrupts, load, pause, removal
from backstay.thread import save as saving
from backstay.thread.change import names_of
from backstay.thread.cursor import Context, Cursor
from backstay.thread.damage import read_each, unread
from backstay.thread.history import EVERY_BRANCH, Filter, Listing, check_before, check_limit
from backstay.thread.interrupts import Inbox, InterruptRecord
from backstay.thread.perform import Flow, ask
from backstay.thread.record import write_rows
from backstay.thread.retention import Keep, Pruned
from backstay.thread.round import check_unmarked
from backstay.thread.stats import Stats
from backstay.thread.stats import stats as measure
from backstay.thread.verify import Report, verify_lanes, verify_row

Which = CheckpointMeta | str
NOTE_NAMES = frozenset(Notes.__annotations__)


def lane_key(namespace: str, thread: object, branch: object, scope: object) -> LaneKey:
    """Return the checked name of a branch."""
    if scope != "":
        check_id(scope, "scope")
    return LaneKey(namespace, check_id(thread, "thread id"), str(scope), check_id(branch, "branch"))


def name_of(checkpoint: Which) -> str:
    """Return the id of a checkpoint given as itself or by its id."""
    if isinstance(checkpoint, CheckpointMeta):
        return checkpoint.id
    return check_id(checkpoint, "checkpoint id")


def checked(notes: Notes) -> Notes:
    """Return the notes if all are known."""
    unknown = sorted(set(notes) - NOTE_NAMES)
    if unknown:
        raise InvalidInput(
            f"a checkpoint has no field called {unknown[0]!r}", hint="Put it into metadata= or into the state"
        )
    check_unmarked(notes.get("metadata"))
    return notes


# Saving -----------------------------------------------------------------------------------------------------------


def save(
    context: Context,
    cursor: Cursor,
    state: Mapping[str, Any],
    name: str | None,
    on: Which | None,
    frozen: bool,
    replaces: bool,
    notes: Notes,
) -> Flow[SavedCheckpoint]:
    """Save a whole state."""
    if replaces and name is None:
        raise InvalidInput(
            "replace=True needs the id of the newest checkpoint", hint="Write save(…, id=cp.id, replace=True)"
        )
    request = saving.Request(checked(notes), name, None if on is None else name_of(on), replaces)
    return saving.save_state(context, cursor, state, frozen, request)


def append(
    context: Context,
    cursor: Cursor,
    extend: Mapping[str, Any] | None,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    name: str | None,
    on: Which | None,
    notes: Notes,
) -> Flow[SavedCheckpoint]:
    """Save a known change."""
    extend, put = _mapping(extend, "append"), _mapping(put, "set")
    request = saving.Request(checked(notes), name, None if on is None else name_of(on))
    return saving.save_append(context, cursor, extend, put, names_of(delete, "delete"), request)


def fork(
    context: Context,
    cursor: Cursor,
    checkpoint: Which,
    branch: str | None,
    to: str | None,
    put: Mapping[str, Any] | None,
    delete: Iterable[str],
    name: str | None,
    notes: Notes,
) -> Flow[Cursor]:
    """Begin another branch or thread."""
    if branch is None and to is None:
        raise InvalidInput(
            "a fork needs a name", hint='Write fork(cp, branch="what-if") or fork(cp, to="another-thread")'
        )
    lane = cursor.lane
    target = lane_key(lane.namespace, lane.thread if to is None else to, MAIN if branch is None else branch, lane.scope)
    request = saving.Request(checked(notes), name)
    return saving.fork(context, name_of(checkpoint), target, _mapping(put, "set"), names_of(delete, "delete"), request)


def rewind(
    context: Context, cursor: Cursor, checkpoint: Which, name: str | None, notes: Notes
) -> Flow[SavedCheckpoint]:
    """Append an earlier checkpoint's content."""
    return saving.rewind(context, cursor, name_of(checkpoint), saving.Request(checked(notes), name))


def write(cursor: Cursor, checkpoint: Which, writes: Iterable[Write], replaces: bool) -> Flow[None]:
    """Keep results of finished tasks."""
    name, lane = name_of(checkpoint), cursor.lane
    rows = write_rows(writes)
    return ask(lambda store: store.write(lane, name, rows, replaces))


# Loading ----------------------------------------------------------------------------------------------------------


def latest(cursor: Cursor) -> Flow[Checkpoint | None]:
    """Load the newest checkpoint."""
    return load.latest(cursor)


def at(cursor: Cursor, step: int) -> Flow[Checkpoint | None]:
    """Load the newest checkpoint at or before a step."""
    return load.at_step(cursor.lane, _check_step(step))


def get(namespace: str, checkpoint: str) -> Flow[Checkpoint | None]:
    """Load a checkpoint by its id."""
    return load.get(namespace, check_id(checkpoint, "checkpoint id"))


def get_of_thread(cursor: Cursor, checkpoint: str) -> Flow[Checkpoint | None]:
    """Load a checkpoint by its id if it belongs to the thread."""
    found = yield from get(cursor.lane.namespace, checkpoint)
    return found if found is not None and found.thread_id == cursor.lane.thread else None


def payload(namespace: str, checkpoint: str) -> Flow[dict[str, Any]]:
    """Load what a just saved checkpoint leaves out until it is looked at."""
    found = yield from get(namespace, checkpoint)
    if found is None:
        raise NotFound(checkpoint, checkpoint=checkpoint, hint="It was deleted after it was saved")
    return {name: getattr(found, name) for name in PAYLOAD_FIELDS}


def branches(cursor: Cursor) -> Flow[list[Lane | Damaged]]:
    """Return a thread's branches."""
    lane = cursor.lane
    found = yield from ask(lambda store: store.lanes(lane.namespace, lane.thread, lane.scope))
    shown = read_each(found, load.checked_lane, lambda each: (each.key.thread, None, each.head_seq))
    return [*(yield from unread(lane.namespace, lane.thread)), *shown]


# Lists ------------------------------------------------------------------------------------------------------------


def history(
    cursor: Cursor,
    limit: int | None,
    before: CheckpointMeta | int | None,
    branch: str | None,
    tag_name: str | None,
    graph: str | None,
    trigger: str | None,
    interrupt: bool | InterruptKind | str | None,
    where: Mapping[str, Any] | None,
) -> Listing:
    """Return the list of a thread's checkpoints."""
    lane = cursor.lane
    chosen = lane.branch if branch is None else None if branch == EVERY_BRANCH else check_id(branch, "branch")
    query = Query(lane.namespace, lane.thread, lane.scope, chosen, before=check_before(before))
    wanted = Filter(tag_name, graph, trigger, interrupt, {} if where is None else where)
    return Listing(query, wanted, check_limit(limit))


def threads(
    context: Context,
    limit: int | None,
    tag_name: str | None,
    graph: str | None,
    trigger: str | None,
    interrupt: bool | InterruptKind | str | None,
    where: Mapping[str, Any] | None,
) -> Listing:
    """Return the list of threads, each shown by its newest checkpoint."""
    query = Query(context.namespace, scope="", heads_of_threads=True)
    wanted = Filter(tag_name, graph, trigger, interrupt, {} if where is None else where)
    return Listing(query, wanted, check_limit(limit))


# Interrupts -------------------------------------------------------------------------------------------------------


def interrupt(
    context: Context,
    cursor: Cursor,
    checkpoint: Which,
    kind: InterruptKind | str,
    node: str | None,
    payload: Any,
    prompt: str,
    name: str | None,
) -> Flow[InterruptRecord]:
    """Record a pause."""
    return interrupts.record(context, cursor, name_of(checkpoint), kind, node, payload, prompt, name)


def inbox(namespace: str, thread: str | None, pending: bool) -> Inbox:
    """Return the list of interrupts of a thread, or of all."""
    return Inbox(namespace, thread, pending)


def decide(
    context: Context,
    cursor: Cursor,
    shown: InterruptRecord,
    decision: Decision | DecisionKind | str,
    by: str,
    scope: str | None,
    value: Any,
    reason: str,
    target: str | None,
) -> Flow[InterruptRecord]:
    """Answer an interrupt."""
    answer = interrupts.check_decision(decision, scope, value, reason, target)
    return interrupts.decide(context, cursor, shown, answer, by)


def consume(context: Context, cursor: Cursor, shown: InterruptRecord, by: str | None) -> Flow[Decision]:
    """Take an answer in order to carry it out."""
    return interrupts.consume(context, cursor, shown, by)


def request_pause(context: Context, cursor: Cursor, reason: str, by: str) -> Flow[InterruptRecord]:
    """Ask a run to stop."""
    return pause.request_pause(context, cursor, reason, by)


# Tags and deletes -------------------------------------------------------------------------------------------------


def tag(cursor: Cursor, checkpoint: Which, add: Iterable[str], remove: Iterable[str]) -> Flow[tuple[str, ...]]:
    """Change a checkpoint's tags."""
    name, namespace = name_of(checkpoint), cursor.lane.namespace
    adding, removing = check_tags(tuple(add)), check_tags(tuple(remove))
    return ask(lambda store: store.tag(namespace, name, adding, removing))


def delete(cursor: Cursor, checkpoint: Which) -> Flow[int]:
    """Delete one checkpoint of this thread."""
    removed = yield from removal.delete_one(cursor, name_of(checkpoint))
    return removed.checkpoints


def delete_before(context: Context, cursor: Cursor, step: int) -> Flow[int]:
    """Delete a branch's checkpoints before a step."""
    removed = yield from removal.delete_before(context, cursor, _check_step(step))
    return removed.checkpoints


def delete_thread(namespace: str, thread: str) -> Flow[Removed]:
    """Delete a thread."""
    name = check_id(thread, "thread id")
    return ask(lambda store: store.delete_thread(namespace, name))


def clear_thread(cursor: Cursor) -> Flow[Removed]:
    """Delete the handle's thread."""
    return removal.delete_thread(cursor)


def clear(context: Context) -> Flow[Removed]:
    """Delete everything in the namespace."""
    return removal.clear(context)


def prune(context: Context, thread: str | None, keep: Keep, dry_run: bool, token: str | None = None) -> Flow[Pruned]:
    """Delete by rule."""
    if not isinstance(keep, Keep):
        raise InvalidInput("prune needs to know what to keep", hint="For example prune(backstay.Keep(last=10))")
    return removal.prune(context, thread, keep, dry_run, token)


# Upkeep -----------------------------------------------------------------------------------------------------------


def verify_thread(context: Context, cursor: Cursor, checkpoint: Which | None) -> Flow[Report]:
    """Verify a checkpoint or a thread."""
    if checkpoint is None:
        return (yield from verify_lanes(context, cursor.lane.thread, whole_store=False))
    name = name_of(checkpoint)
    row = yield from load.find_row(context.namespace, name)
    if row is None:
        raise NotFound(name, checkpoint=name, thread=cursor.lane.thread)
    return (yield from verify_row(row))


def verify_store(context: Context) -> Flow[Report]:
    """Verify everything in the namespace, and the store below it."""
    return verify_lanes(context, None, whole_store=True)


def stats(context: Context, thread: str | None) -> Flow[Stats]:
    """Measure a thread or the store."""
    return measure(context, thread)


def compact() -> Flow[int]:
    """Make the store as small as it can be."""
    return ask(lambda store: store.compact())


def _mapping(given: object, what: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"{what} must be a mapping of keys to values, not {type(given).__name__}")
    return given or {}


def _check_step(step: object) -> int:
    if type(step) is not int:
        raise InvalidInput(f"step must be a whole number, not {type(step).__name__}")
    return max(-1, min(step, STEP_MAX + 1))  # no store counts further, and not every one can take a larger number
