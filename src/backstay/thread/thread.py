"""``Thread`` and ``AsyncThread``: handles on one branch of a thread. Their methods call the operations."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointFields, CheckpointMeta, SavedCheckpoint, Write
from backstay.model.decision import Decision, DecisionKind, InterruptKind
from backstay.model.ids import check_id
from backstay.model.runs import EffectRecord, Outcome
from backstay.operations import interrupts, load, retention
from backstay.operations.arguments import check_step, fork_target, id_of, names_of, split_append
from backstay.operations.cursor import Access, Cursor, Handle
from backstay.operations.drivers import in_event_loop
from backstay.operations.interrupts import InterruptRecord, inbox_of
from backstay.operations.ledger import ledger_of, settle
from backstay.operations.listing import (
    Filter,
    History,
    HistoryOptions,
    aread_pages,
    history_of,
    listing_of_thread,
    raise_or_mark,
    read_pages,
)
from backstay.operations.merge import Prefer, merge
from backstay.operations.question import request_pause
from backstay.operations.retention import Keep, Pruned
from backstay.operations.rows import Damaged, OnDamage, check_on_damage, tag, write
from backstay.operations.save import find_or_raise, fork, rewind, save_append, save_request, save_state
from backstay.store.base import Branch, Removed
from backstay.thread.access import awaited
from backstay.thread.effects import UNKNOWN_ON, EffectCall, Reconcile, arun_effect, run_effect
from backstay.thread.lease import AsyncLease, Lease, check_lease_options
from backstay.thread.loop import LOOP_NAME, PAUSE_CHECK_S, AsyncLoop, Loop, check_loop_options
from backstay.thread.turn import send

if TYPE_CHECKING:
    from backstay.maintenance import Report, ThreadStats

T = TypeVar("T")
OnLost = Callable[[Lease], None]
Effect = Callable[..., T]


class Thread:
    """A handle on one branch of a thread. It builds on the checkpoint it last loaded or saved.

    Several threads of a program may use the same handle; its operations then run one after the other.
    """

    def __init__(self, access: Access, cursor: Cursor, blocking: bool = True) -> None:
        self._access = access
        self._services = access.services
        self._cursor = cursor
        self._handle = Handle(access, cursor, blocking)

    @property
    def id(self) -> str:
        """Return the thread's id."""
        return self._cursor.branch.thread

    @property
    def branch(self) -> str:
        """Return the branch this handle writes to."""
        return self._cursor.branch.name

    def save(
        self,
        state: Mapping[str, Any],
        *,
        id: str | None = None,
        on: CheckpointMeta | str | None = None,
        frozen: bool = False,
        replace: bool = False,
        **fields: Unpack[CheckpointFields],
    ) -> Checkpoint:
        """Save the whole state as the next step; only what changed since the last one is written.

        ``id`` makes the save repeatable: the same id with the same content returns the first result again. ``on`` is
        the checkpoint that must be the newest one now. ``frozen`` promises that saved list items were not changed in
        place, so that they need not be compared. ``replace`` replaces the newest checkpoint, given by ``id``.

        Raises EncodeError before anything is written if a value would not round-trip, and Conflict, with the winner's
        metadata, if another handle has saved since.
        """
        request = save_request(fields, id, on, replace)
        return self._bind(self._handle.run(save_state, self._services, self._cursor, state, frozen, request))

    def append(
        self,
        /,
        append: Mapping[str, Any] | None = None,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        on: CheckpointMeta | str | None = None,
        **fields: Any,
    ) -> Checkpoint:
        """Save a known change as the next step: extend lists, replace keys (``set``), remove keys (``delete``).

        ``append(messages=[reply])`` is ``append({"messages": [reply]})``, as in ``turn.append``. Keywords that are
        fields of a checkpoint, such as ``tags``, set the field; keys of the state with such a name, and text or bytes
        to extend, go into the mapping. A missing key is created. The cost depends on what is new, not on the state.
        """
        extend, others = split_append(append, fields) if fields else (append, {})
        request = save_request(cast("CheckpointFields", others), id, on)
        return self._bind(self._handle.run(save_append, self._services, self._cursor, extend, set, delete, request))

    def latest(self) -> Checkpoint | None:
        """Load the newest checkpoint, verify every byte, and build on it from now on; None if there is none."""
        return self._handle.run(load.latest, self._cursor)

    def at(self, step: int, *, exact: bool = False) -> Checkpoint | None:
        """Load the newest checkpoint at or before a step; None before the first.

        With ``exact``, a step that was pruned or never saved raises NotFound, which names its neighbours.
        """
        return self._handle.run(load.at_step, self._cursor.branch, check_step(step), exact)

    def get(self, id: str, *, keys: Iterable[str] | None = None) -> Checkpoint | None:
        """Load one of this thread's checkpoints by its id; None if it does not exist.

        With ``keys``, only these keys of the state are read, verified and decoded. The others are missing from
        ``state``, so do not save it as a whole state: use ``append(set=…)``. A key that the state does not have raises
        NotFound.
        """
        wanted = None if keys is None else names_of(keys, "keys")
        return self._handle.run(load.get_of_thread, self._cursor.branch, check_id(id, "checkpoint id"), wanted)

    def tail(self, key: str, n: int) -> list[Any]:
        """Return the last ``n`` items of a list in the newest checkpoint, fewer if it is shorter.

        The rest of the list is not read, unless the list was rewritten or older checkpoints were deleted since these
        items were added. Raises NotFound if the state has no such key, and InvalidInput if it is not a list. The list
        is empty if there is no checkpoint. This does not change what the handle builds on.
        """
        if type(n) is not int or n < 0:
            raise InvalidInput(f"n must be a whole number, 0 or more, not {n!r:.40}")
        return self._handle.run(load.tail, self._cursor.branch, key, n)

    @overload
    def history(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[HistoryOptions]
    ) -> History[CheckpointMeta]: ...

    @overload
    def history(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[HistoryOptions]
    ) -> History[CheckpointMeta | Damaged]: ...

    def history(
        self,
        *,
        on_damage: OnDamage = "raise",
        limit: int | None = None,
        before: CheckpointMeta | int | None = None,
        branch: str | None = None,
        tag: str | None = None,
        graph: str | None = None,
        trigger: str | None = None,
        interrupt: bool | InterruptKind | str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> History[Any]:
        """Iterate over checkpoints' metadata, newest first, read page by page without touching any state.

        Lists this handle's branch, unless ``branch`` names another one, or ``"*"`` for all. ``where`` compares metadata
        keys. A checkpoint that cannot be read raises Corrupted and ends the list; with ``on_damage="mark"``, a
        ``Damaged`` takes its place and the list continues. ``limit`` does not count these.
        """
        wanted = Filter(tag, graph, trigger, interrupt, where)
        listing = listing_of_thread(self._cursor.branch, limit, before, branch, wanted)
        return history_of(self._access, listing, check_on_damage(on_damage))

    @overload
    def branches(self, *, on_damage: Literal["raise"] = ...) -> list[Branch]: ...

    @overload
    def branches(self, *, on_damage: Literal["mark"]) -> list[Branch | Damaged]: ...

    def branches(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the thread's branches, oldest first."""
        return list(raise_or_mark(self._handle.run(load.branches, self._cursor.branch), check_on_damage(on_damage)))

    def scopes(self) -> list[str]:
        """Return the scopes of this thread, such as those of its subgraphs, oldest first; "" is the thread's own."""
        return self._handle.run(load.scopes, self._cursor.branch)

    def fork(
        self,
        checkpoint: CheckpointMeta | str | int,
        *,
        branch: str | None = None,
        to: str | None = None,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        **fields: Unpack[CheckpointFields],
    ) -> Thread:
        """Start another branch, or another thread (``to``), with a checkpoint's state; return a handle on it.

        ``checkpoint`` may be its id, or a step of this branch: ``fork(40)`` starts the branch "fork-40". A fork stores
        only a manifest. ``set`` and ``delete`` change the copied state. Position and description are copied.
        """
        request = save_request(fields, id)
        source = self._handle.run(load.checkpoint_id, self._cursor.branch, checkpoint)
        if branch is None and to is None:
            branch = f"fork-{self._handle.run(find_or_raise, self._services, source).step}"
        target = fork_target(self._cursor.branch, branch, to)
        cursor = self._handle.run(fork, self._services, source, target, set, delete, request)
        return Thread(self._access, cursor, self._handle.blocking)

    def rewind(
        self, checkpoint: CheckpointMeta | str | int, *, id: str | None = None, **fields: Unpack[CheckpointFields]
    ) -> Checkpoint:
        """Go back: append a checkpoint with the content of an earlier one, or of a step. Nothing is deleted."""
        source = self._handle.run(load.checkpoint_id, self._cursor.branch, checkpoint)
        return self._bind(self._handle.run(rewind, self._services, self._cursor, source, save_request(fields, id)))

    def merge(
        self,
        checkpoint: CheckpointMeta | str,
        *,
        prefer: Prefer | None = None,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        **fields: Unpack[CheckpointFields],
    ) -> Checkpoint:
        """Take over what another branch, up to this checkpoint of it, has changed since the two parted.

        Keys that only the other branch changed are taken over; keys that only this one changed stay. Keys that both
        changed differently raise MergeConflict, which names them all as ``keys``, and nothing is stored. ``set`` and
        ``delete`` settle such keys; ``prefer="ours"`` or ``"theirs"`` settles all others. The new checkpoint has this
        branch's position, and the other one's id as ``metadata["backstay.merged"]``; a later merge of the same branch
        takes over only what is newer. If there is nothing to merge, the newest checkpoint is returned.
        """
        request = save_request(fields, id)
        saved = self._handle.run(merge, self._services, self._cursor, id_of(checkpoint), prefer, set, delete, request)
        return self._bind(saved)

    def tag(self, checkpoint: CheckpointMeta | str, *names: str) -> tuple[str, ...]:
        """Add tags to a checkpoint and return all its tags. Pruning keeps tagged checkpoints."""
        return self._handle.run(tag, self._cursor.branch.namespace, id_of(checkpoint), names, ())

    def untag(self, checkpoint: CheckpointMeta | str, *names: str) -> tuple[str, ...]:
        """Remove tags from a checkpoint and return the remaining ones."""
        return self._handle.run(tag, self._cursor.branch.namespace, id_of(checkpoint), (), names)

    def write(self, checkpoint: CheckpointMeta | str, writes: Iterable[Write], *, replace: bool = False) -> None:
        """Store results of finished tasks with a checkpoint, which may be saved later. Results already stored stay."""
        self._handle.run(write, self._cursor.branch, id_of(checkpoint), writes, replace)

    def delete_checkpoint(self, checkpoint: CheckpointMeta | str) -> int:
        """Delete one checkpoint and return how many were deleted, 1 or 0.

        If it was the newest of its branch, the next older checkpoint becomes the newest.
        """
        return self._handle.run(retention.delete_one, self._cursor, id_of(checkpoint))

    def delete_before(self, step: int) -> int:
        """Delete this branch's checkpoints with a lower step, but never the newest; return how many were deleted."""
        return self._handle.run(retention.delete_before, self._services, self._cursor, check_step(step))

    def delete(self) -> Removed:
        """Delete the whole thread with all its branches and return what was deleted."""
        return self._handle.run(retention.delete_thread, self._cursor)

    def prune(self, keep: Keep, *, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not keep, in all branches of this thread. With ``dry_run``, only report it."""
        return self._handle.run(retention.prune, self._services, self.id, keep, dry_run, self._cursor.token)

    def lease(
        self,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
        wait: float | None = 0.0,
    ) -> Lease:
        """Return a lease, the right to write this branch, for a ``with`` block (``async with`` for the async twin).

        Entering the block takes the lease. If another worker still holds it after ``wait`` seconds (None: wait as long
        as it takes), this raises Fenced with the owner's name. The lease of a process that died is free at once on the
        same machine, and elsewhere when its ttl has passed. Leaving the block releases it. Only saves through this
        handle carry the lease. Until it ends, all other saves are refused with Fenced; so are saves under this lease
        after another worker took it over. It lasts ``ttl`` seconds (0.05 to 86,400) after each save and renewal; a
        ``heartbeat`` thread of the store renews it. When it is lost, ``lease.lost`` becomes True, that thread calls
        ``on_lost`` with it, the body of an ``async with`` block is cancelled, and leaving raises Fenced.
        """
        return Lease(self, check_lease_options(owner, ttl, heartbeat, on_lost, wait))

    def loop(
        self,
        initial: Mapping[str, Any],
        *,
        input: Mapping[str, Any] | None = None,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        pause_check_s: float = PAUSE_CHECK_S,
        strict: bool = False,
        ttl: float = 30.0,
        owner: str | None = None,
        name: str = LOOP_NAME,
        wait: float | None = None,
        lease: Lease | None = None,
    ) -> Loop:
        """Return a durable loop, to iterate over in a ``with`` block (``async with`` for the async twin).

        Entering the block takes the lease. If another process holds it, the loop waits, and logs for whom; with
        ``wait`` seconds it raises Fenced after that time, with 0 at once. If you took the lease with this handle
        yourself, pass it as ``lease``. The loop is a run with this ``name`` in ``store.runs()``. It continues where the
        last process stopped; on a new thread it saves ``initial``. Each turn is saved as one change when its body ends.
        ``input`` starts again on a finished state: lists are extended, other keys set. On an unfinished one it
        continues the run that was started with the same input, and refuses another. After ``limit`` turns without
        ``loop.finish()``, it raises StepsExceeded. Every checkpoint gets the ``metadata``. Between turns, every
        ``pause_check_s`` seconds, it checks for ``request_pause`` and ``run.cancel()``. ``loop.status`` says how the
        loop ended: a turn that waits for a decision ends the block without an error. A value of ``turn.state`` that was
        changed in place would not be stored. InvalidInput is raised for a container that grew or shrank, and with
        ``strict`` for any such change; each turn then encodes the whole state.
        """
        options = check_lease_options(owner, ttl, True, None, wait)
        checked = check_loop_options(initial, input, limit, metadata, pause_check_s, strict, options, lease, name)
        return Loop(self, checked)

    def interrupt(
        self,
        checkpoint: CheckpointMeta | str,
        *,
        kind: InterruptKind | str = "userrequest",
        node: str | None = None,
        payload: Any = None,
        prompt: str = "",
        id: str | None = None,
    ) -> InterruptRecord:
        """Record that a run waits at this checkpoint for a person's decision; return the record to show to them.

        ``kind`` is "beforenode", "afternode", "toolapproval" or "userrequest". The same ``id`` with the same content
        returns the first record again. Pruning keeps the checkpoint until the decision is consumed.
        """
        return self._handle.run(
            interrupts.record, self._services, self._cursor, id_of(checkpoint), kind, node, payload, prompt, id
        )

    @overload
    def interrupts(self, *, on_damage: Literal["raise"] = ..., pending: bool = ...) -> Iterator[InterruptRecord]: ...

    @overload
    def interrupts(self, *, on_damage: Literal["mark"], pending: bool = ...) -> Iterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> Iterator[Any]:
        """Iterate over the interrupts of all branches of this thread, oldest first; ``pending`` = those that wait."""
        inbox = interrupts.inbox_of(self._cursor.branch.namespace, self.id, pending)
        return read_pages(self._access, inbox, check_on_damage(on_damage))

    def decide(
        self,
        interrupt: InterruptRecord,
        decision: Decision | DecisionKind | str,
        *,
        by: str,
        scope: str | None = None,
        value: Any = None,
        reason: str = "",
        target: str | None = None,
    ) -> InterruptRecord:
        """Answer an interrupt, once, and return it with the decision.

        ``interrupt`` is the record that the person saw: an answer to anything else, or to a changed question, is
        refused. A question takes "answer", with its ``value``. An approval takes "approve" (with a ``scope`` to approve
        later calls too), "modify" (needs the ``value``) or, at a node, "reroute" (needs the ``target``). Both take
        "reject" and "defer" (asking again takes a new interrupt). Kinds that are not in ``interrupt.choices``, and
        answers of the wrong type, are refused. The same answer by the same person returns the record again; any other
        raises Conflict, whose ``winner`` is the record that counts. So does an interrupt whose run is over.
        """
        answer = interrupts.check_decision(decision, scope, value, reason, target)
        return self._handle.run(interrupts.decide, self._services, self._cursor, interrupt, answer, by)

    def send(self, name: str, value: Any = None, *, by: str = "send") -> InterruptRecord:
        """Send a value to the unfinished run of this branch, which gets it from ``wait_for(name)``.

        It may be sent before the run waits. Each value is received once, in the order in which they were sent. Then
        resume the run: a run that waits has no process. Raises NotFound if the branch has no unfinished run.
        """
        return self._handle.run(send, self._services, self._cursor, name, value, by)

    def consume(self, interrupt: InterruptRecord, *, by: str | None = None) -> Decision:
        """Take the decision on an interrupt to carry it out. Only one worker gets it; others get Conflict.

        The same ``by`` gets it again; the default is this lease or this process. If the worker that took it died, the
        holder of a later lease of the branch may take it.
        """
        return self._handle.run(interrupts.consume, self._services, self._cursor, interrupt, by)

    def request_pause(self, reason: str = "", *, by: str) -> InterruptRecord:
        """Ask the run of this branch to stop at its next boundary, from any process and without its lease.

        Returns the request, which is decided like any interrupt: if approved, the run continues; if deferred, it asks
        again; if rejected, it stops for good. If a request is already open, that one is returned. It counts for this
        run only, also if that crashed or waits and is resumed later; without an unfinished run it raises InvalidInput.
        """
        return self._handle.run(request_pause, self._services, self._cursor, reason, by)

    def effect(
        self,
        key: str,
        fn: Effect[T],
        /,
        *args: Any,
        reconcile: Reconcile | None = None,
        idempotent: bool = False,
        unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON,
        **kwargs: Any,
    ) -> T:
        """Call ``fn(*args, **kwargs)``, which must not happen twice, and return its result.

        The intent is stored before the call and the result after it. If the effect is already done, ``fn`` is not
        called: the first result is returned (EffectChanged if the arguments differ). If ``fn`` raises, the effect has
        failed and the next call tries again. But after a timeout, a lost connection or a cancellation, or if the
        process dies, the outcome is unknown. Then the next call raises EffectUnknown, unless

        - ``idempotent`` says that doing it twice does no harm: then it is done again, with the same idempotency key;
        - ``reconcile``, a function that takes the ``EffectRecord``, finds out what happened and returns
          ``Outcome.done(result)``, ``Outcome.not_done()`` or ``Outcome.unknown()``; a person does the same with
          ``settle``.

        ``key`` (1 to 1,000 characters) names the effect in this branch. If ``fn`` has a parameter ``idempotency_key``,
        it gets the key by which the called service can detect a repetition. ``unknown_on`` are the errors of ``fn``
        after which the outcome is unknown. These options are not passed to ``fn``. While another worker holds the
        lease, this raises Fenced. Hold the lease if several processes may run the effect: without it, an effect that
        still runs in one process looks unknown to another.
        """
        call = EffectCall(key, fn, args, kwargs, reconcile, idempotent, unknown_on)
        result: T = run_effect(self._handle, call)
        return result

    @overload
    def effects(self, *, on_damage: Literal["raise"] = ...) -> Iterator[EffectRecord]: ...

    @overload
    def effects(self, *, on_damage: Literal["mark"]) -> Iterator[EffectRecord | Damaged]: ...

    def effects(self, *, on_damage: OnDamage = "raise") -> Iterator[Any]:
        """Iterate over the effects of all branches of this thread, in the order in which they first started."""
        return read_pages(self._access, ledger_of(self._cursor.branch.namespace, self.id), check_on_damage(on_damage))

    def settle(self, effect: EffectRecord, outcome: Outcome, *, by: str) -> EffectRecord:
        """Record the outcome of an effect whose outcome was unknown, once, and return the effect.

        ``effect`` is the record that the person saw, from ``EffectUnknown.record`` or ``effects()``. ``outcome`` is
        ``Outcome.done(result)``, whose result the next call returns, or ``Outcome.not_done()``, after which the next
        call tries again. If the effect has ended or started again meanwhile, this raises Conflict, whose ``winner`` is
        the record that counts. The same outcome by the same person returns the record again.
        """
        return self._handle.run(settle, self._services, self._cursor, effect, outcome, by)

    def check(self, checkpoint: CheckpointMeta | str | None = None) -> Report:
        """Check every byte of this thread, or of one of its checkpoints, against its digest, and report all damage."""
        from backstay.maintenance.check import check

        return self._handle.run(check, self._services, self.id, None if checkpoint is None else id_of(checkpoint))

    def stats(self) -> ThreadStats:
        """Return how much this thread stores, by key, and how much full copies would take."""
        from backstay.maintenance.stats import thread_stats

        return self._handle.run(thread_stats, self._services, self.id)

    def _bind(self, saved: SavedCheckpoint) -> Checkpoint:
        """Let a checkpoint that was just saved load its payload when it is first used."""
        store, blocking = self._access.store, self._handle.blocking
        # Without the cursor, the payload has to be read from the store. An event loop must not wait for that, so there
        # the checkpoint keeps the cursor alive.
        handle = weakref.ref(self._cursor) if blocking else lambda cursor=self._cursor: cursor

        def load_payload(field: str) -> dict[str, Any]:
            cursor = handle()
            at_hand = None if cursor is None or field == "writes" else load.payload_in_memory(cursor, saved)
            if at_hand is not None:
                return at_hand
            if blocking or not in_event_loop():
                return load.payload(store, saved)
            raise InvalidInput(
                f"checkpoint.{field} is no longer in memory, and reading it here would block the event loop",
                thread=saved.thread_id,
                checkpoint=saved.id,
                hint=f"Write (await thread.get(checkpoint.id)).{field}",
            )

        saved.__dict__["_load"] = load_payload
        return saved

    def __repr__(self) -> str:
        return f"<Thread {self.id!r} branch {self.branch!r} of {self._access.store.url}>"


# ``AsyncThread``: ``Thread`` for callers with an event loop. Same names, same arguments, same functions, but awaited.
#
# Each method runs its twin of Thread in a worker thread. Lists, blocks and calls of user code differ.


AsyncOnLost = Callable[[AsyncLease], None]


class AsyncThread:
    """A handle on one branch of a thread. It builds on the checkpoint it last loaded or saved.

    Several tasks may use the same handle; its operations then run one after the other.
    """

    def __init__(self, access: Access, cursor: Cursor) -> None:
        self._access = access
        self._sync = Thread(access, cursor, blocking=False)
        self._handle: Handle = self._sync._handle

    @property
    def id(self) -> str:
        """Return the thread's id."""
        return self._sync.id

    @property
    def branch(self) -> str:
        """Return the branch this handle writes to."""
        return self._sync.branch

    save = awaited(Thread.save)
    append = awaited(Thread.append)
    latest = awaited(Thread.latest)
    at = awaited(Thread.at)
    get = awaited(Thread.get)
    tail = awaited(Thread.tail)
    scopes = awaited(Thread.scopes)
    rewind = awaited(Thread.rewind)
    merge = awaited(Thread.merge)
    tag = awaited(Thread.tag)
    untag = awaited(Thread.untag)
    write = awaited(Thread.write)
    delete = awaited(Thread.delete)
    delete_checkpoint = awaited(Thread.delete_checkpoint)
    delete_before = awaited(Thread.delete_before)
    prune = awaited(Thread.prune)
    interrupt = awaited(Thread.interrupt)
    decide = awaited(Thread.decide)
    consume = awaited(Thread.consume)
    request_pause = awaited(Thread.request_pause)
    send = awaited(Thread.send)
    settle = awaited(Thread.settle)
    check = awaited(Thread.check)
    stats = awaited(Thread.stats)

    async def fork(
        self,
        checkpoint: CheckpointMeta | str | int,
        *,
        branch: str | None = None,
        to: str | None = None,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        **fields: Unpack[CheckpointFields],
    ) -> AsyncThread:
        """Start another branch, or another thread (``to``), with a checkpoint's state; see ``Thread.fork``."""
        forked = await self._access.offload.run(
            self._sync.fork, checkpoint, branch=branch, to=to, set=set, delete=delete, id=id, **fields
        )
        return AsyncThread(self._access, forked._handle.cursor)

    @overload
    def history(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[HistoryOptions]
    ) -> AsyncIterator[CheckpointMeta]: ...

    @overload
    def history(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[HistoryOptions]
    ) -> AsyncIterator[CheckpointMeta | Damaged]: ...

    def history(
        self,
        *,
        on_damage: OnDamage = "raise",
        limit: int | None = None,
        before: CheckpointMeta | int | None = None,
        branch: str | None = None,
        tag: str | None = None,
        graph: str | None = None,
        trigger: str | None = None,
        interrupt: bool | InterruptKind | str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Any]:
        """Iterate over checkpoints' metadata, newest first; see ``Thread.history``."""
        wanted = Filter(tag, graph, trigger, interrupt, where)
        listing = listing_of_thread(self._handle.cursor.branch, limit, before, branch, wanted)
        return aread_pages(self._access, listing, check_on_damage(on_damage))

    @overload
    async def branches(self, *, on_damage: Literal["raise"] = ...) -> list[Branch]: ...

    @overload
    async def branches(self, *, on_damage: Literal["mark"]) -> list[Branch | Damaged]: ...

    async def branches(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the thread's branches, oldest first; see ``Thread.branches``."""
        return await self._access.offload.run(lambda: list(self._sync.branches(on_damage=on_damage)))

    @overload
    def interrupts(
        self, *, on_damage: Literal["raise"] = ..., pending: bool = ...
    ) -> AsyncIterator[InterruptRecord]: ...

    @overload
    def interrupts(
        self, *, on_damage: Literal["mark"], pending: bool = ...
    ) -> AsyncIterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> AsyncIterator[Any]:
        """Iterate over the interrupts of all branches of this thread, oldest first; see ``Thread.interrupts``."""
        inbox = inbox_of(self._handle.cursor.branch.namespace, self.id, pending)
        return aread_pages(self._access, inbox, check_on_damage(on_damage))

    @overload
    def effects(self, *, on_damage: Literal["raise"] = ...) -> AsyncIterator[EffectRecord]: ...

    @overload
    def effects(self, *, on_damage: Literal["mark"]) -> AsyncIterator[EffectRecord | Damaged]: ...

    def effects(self, *, on_damage: OnDamage = "raise") -> AsyncIterator[Any]:
        """Iterate over the effects of all branches of this thread; see ``Thread.effects``."""
        ledger = ledger_of(self._handle.cursor.branch.namespace, self.id)
        return aread_pages(self._access, ledger, check_on_damage(on_damage))

    def lease(
        self,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: AsyncOnLost | None = None,
        wait: float | None = 0.0,
    ) -> AsyncLease:
        """Return a lease, the right to write this branch, for an ``async with`` block; see ``Thread.lease``.

        If it is lost, the body of the block is cancelled, and leaving it raises Fenced.
        """
        return AsyncLease(self, check_lease_options(owner, ttl, heartbeat, on_lost, wait))

    def loop(
        self,
        initial: Mapping[str, Any],
        *,
        input: Mapping[str, Any] | None = None,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        pause_check_s: float = PAUSE_CHECK_S,
        strict: bool = False,
        ttl: float = 30.0,
        owner: str | None = None,
        name: str = LOOP_NAME,
        wait: float | None = None,
        lease: AsyncLease | None = None,
    ) -> AsyncLoop:
        """Return a durable loop, to iterate over in an ``async with`` block; see ``Thread.loop``."""
        options = check_lease_options(owner, ttl, True, None, wait)
        checked = check_loop_options(initial, input, limit, metadata, pause_check_s, strict, options, lease, name)
        return AsyncLoop(self, checked)

    async def effect(
        self,
        key: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        reconcile: Reconcile | None = None,
        idempotent: bool = False,
        unknown_on: tuple[type[BaseException], ...] = UNKNOWN_ON,
        **kwargs: Any,
    ) -> Any:
        """Call a function that must not happen twice, and return its result; see ``Thread.effect``.

        ``fn`` and ``reconcile`` may be plain functions or coroutine functions.
        """
        call = EffectCall(key, fn, args, kwargs, reconcile, idempotent, unknown_on)
        return await arun_effect(self._handle, call)

    def __repr__(self) -> str:
        return f"<AsyncThread {self.id!r} branch {self.branch!r} of {self._access.store.url}>"
