"""``Thread``: one line of checkpoints that can be saved, loaded, forked and rewound. A shell over the operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

from backstay.errors import InvalidInput
from backstay.model.checkpoint import Checkpoint, CheckpointMeta, Notes, SavedCheckpoint, Write
from backstay.model.damaged import Damaged, OnDamage, check_on_damage
from backstay.model.decision import Decision, DecisionKind
from backstay.model.effect import EffectRecord, Outcome
from backstay.model.ids import check_id
from backstay.model.interrupt import InterruptKind
from backstay.store.base import Lane, Removed
from backstay.thread import interrupts, load, removal
from backstay.thread.access import Access, Handle
from backstay.thread.arguments import check_step, fork_target, name_of
from backstay.thread.cursor import Cursor
from backstay.thread.damage import listed, told
from backstay.thread.effects import UNKNOWN_ON, EffectCall, Reconcile, perform
from backstay.thread.history import Filter, History, WantedOfThread, history_of, listing_of_thread
from backstay.thread.interrupts import InterruptRecord
from backstay.thread.lease import Lease, check_terms
from backstay.thread.ledger import ledger_of, settle
from backstay.thread.loop import PAUSE_CHECK_S, Loop, check_plan
from backstay.thread.offload import in_event_loop
from backstay.thread.pause import request_pause
from backstay.thread.record import tag, write
from backstay.thread.retention import Keep, Pruned
from backstay.thread.save import fork, request_of, rewind, save_append, save_state
from backstay.thread.session import RunSession
from backstay.thread.stats import Stats
from backstay.thread.stats import stats as measure
from backstay.thread.verify import Report, verify_thread

T = TypeVar("T")
OnLost = Callable[[Lease], None]
Effect = Callable[..., T]


class Thread:
    """A handle on one branch of a thread. It builds on the head it last loaded or wrote; nothing is read before that.

    A handle may be used from several threads of a program; its operations then happen one after the other.
    """

    def __init__(self, access: Access, cursor: Cursor, blocking: bool = True) -> None:
        self._access = access
        self._context = access.context
        self._cursor = cursor
        self._handle = Handle(access, cursor, blocking)

    @property
    def id(self) -> str:
        """Return the thread's id."""
        return self._cursor.lane.thread

    @property
    def branch(self) -> str:
        """Return the branch this handle writes to."""
        return self._cursor.lane.branch

    def save(
        self,
        state: Mapping[str, Any],
        *,
        id: str | None = None,
        on: CheckpointMeta | str | None = None,
        frozen: bool = False,
        replace: bool = False,
        **notes: Unpack[Notes],
    ) -> Checkpoint:
        """Save the whole state as the next step; only what changed since the last one is written.

        ``id`` makes the save repeatable: the same id with the same content gives the first result again. ``on`` names
        the checkpoint that must be the newest one. ``frozen`` promises that list items already saved were not changed
        in place, so that they need not be compared. ``replace`` stores the newest checkpoint, named by ``id``, anew.

        Raises EncodeError before anything is written if a value could not come back equal, and Conflict, with the
        winner's metadata, if somebody else has saved since.
        """
        request = request_of(notes, id, on, replace)
        return self._bind(self._handle.run(save_state, self._context, self._cursor, state, frozen, request))

    def append(
        self,
        append: Mapping[str, Any] | None = None,
        *,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        on: CheckpointMeta | str | None = None,
        **notes: Unpack[Notes],
    ) -> Checkpoint:
        """Save a known change as the next step: extend lists, replace keys (``set``), remove keys (``delete``).

        Costs what is new, whatever the size of the state. Text and bytes can be extended too. A key that is not there
        yet is made.
        """
        request = request_of(notes, id, on)
        return self._bind(self._handle.run(save_append, self._context, self._cursor, append, set, delete, request))

    def latest(self) -> Checkpoint | None:
        """Load the newest checkpoint, every byte verified, and go on from there; None if there is none."""
        return self._handle.run(load.latest, self._cursor)

    def at(self, step: int) -> Checkpoint | None:
        """Load the newest checkpoint at or before a step; None before the first."""
        return self._handle.run(load.at_step, self._cursor.lane, check_step(step))

    def get(self, id: str) -> Checkpoint | None:
        """Load one of this thread's checkpoints by its id; None if it is not there."""
        return self._handle.run(load.get_of_thread, self._cursor.lane, check_id(id, "checkpoint id"))

    @overload
    def history(
        self, *, on_damage: Literal["raise"] = ..., **wanted: Unpack[WantedOfThread]
    ) -> History[CheckpointMeta]: ...

    @overload
    def history(
        self, *, on_damage: Literal["mark"], **wanted: Unpack[WantedOfThread]
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

        This handle's branch, unless ``branch`` names another, or ``"*"`` for all. ``where`` compares metadata keys.
        At a checkpoint that cannot be read it raises Corrupted and ends; with ``on_damage="mark"`` it gives a
        ``Damaged`` in its place and goes on. ``limit`` does not count these.
        """
        wanted = Filter(tag, graph, trigger, interrupt, where)
        listing = listing_of_thread(self._cursor.lane, limit, before, branch, wanted)
        return history_of(self._access, listing, check_on_damage(on_damage))

    @overload
    def branches(self, *, on_damage: Literal["raise"] = ...) -> list[Lane]: ...

    @overload
    def branches(self, *, on_damage: Literal["mark"]) -> list[Lane | Damaged]: ...

    def branches(self, *, on_damage: OnDamage = "raise") -> list[Any]:
        """Return the thread's branches, oldest first."""
        return list(told(self._handle.run(load.branches, self._cursor.lane), check_on_damage(on_damage)))

    def fork(
        self,
        checkpoint: CheckpointMeta | str,
        *,
        branch: str | None = None,
        to: str | None = None,
        set: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
        id: str | None = None,
        **notes: Unpack[Notes],
    ) -> Thread:
        """Begin another branch, or another thread (``to``), with a checkpoint's state; return a handle on it.

        Costs one manifest. ``set`` and ``delete`` change the state on the way. Position and description are taken over.
        """
        target = fork_target(self._cursor.lane, branch, to)
        request = request_of(notes, id)
        cursor = self._handle.run(fork, self._context, name_of(checkpoint), target, set, delete, request)
        return Thread(self._access, cursor, self._handle.blocking)

    def rewind(self, checkpoint: CheckpointMeta | str, *, id: str | None = None, **notes: Unpack[Notes]) -> Checkpoint:
        """Go back: append a checkpoint with the content of an earlier one. Nothing is destroyed."""
        return self._bind(
            self._handle.run(rewind, self._context, self._cursor, name_of(checkpoint), request_of(notes, id))
        )

    def tag(self, checkpoint: CheckpointMeta | str, *names: str) -> tuple[str, ...]:
        """Add tags to a checkpoint and return all it has. A tagged checkpoint is not pruned."""
        return self._handle.run(tag, self._cursor.lane.namespace, name_of(checkpoint), names, ())

    def untag(self, checkpoint: CheckpointMeta | str, *names: str) -> tuple[str, ...]:
        """Remove tags from a checkpoint and return those left."""
        return self._handle.run(tag, self._cursor.lane.namespace, name_of(checkpoint), (), names)

    def write(self, checkpoint: CheckpointMeta | str, writes: Iterable[Write], *, replace: bool = False) -> None:
        """Keep results of finished tasks beside a checkpoint (which may be saved later); existing ones stay."""
        self._handle.run(write, self._cursor.lane, name_of(checkpoint), writes, replace)

    def delete(self, checkpoint: CheckpointMeta | str) -> int:
        """Delete one checkpoint and return how many went: 1 or 0. After the newest, the one before it is newest."""
        return self._handle.run(removal.delete_one, self._cursor, name_of(checkpoint))

    def delete_before(self, step: int) -> int:
        """Delete this branch's checkpoints with a lower step, but never the newest; return how many."""
        return self._handle.run(removal.delete_before, self._context, self._cursor, check_step(step))

    def clear(self) -> Removed:
        """Delete the whole thread with all its branches and return what went."""
        return self._handle.run(removal.delete_thread, self._cursor)

    def prune(self, keep: Keep, *, dry_run: bool = False) -> Pruned:
        """Delete what the rules do not want, in all branches of this thread; ``dry_run`` only says what would go."""
        return self._handle.run(removal.prune, self._context, self.id, keep, dry_run, self._cursor.token)

    def lease(
        self,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        heartbeat: bool = True,
        on_lost: OnLost | None = None,
        wait_s: float = 0.0,
    ) -> Lease:
        """Return the right to write this branch, to be used in a ``with`` block (``async with`` for the async twin).

        Entering takes it, or raises Fenced and names the owner if somebody else's lease still runs after ``wait_s``
        seconds: that of a process which was killed ends when its time is over. Leaving gives it back.
        Only saves through this handle carry it. Everybody else's are refused with Fenced while it runs, and so are its
        own after somebody took it over. It runs for ``ttl`` seconds (0.05 to 86,400) after each save and renewal; the
        ``heartbeat``, a thread of the store, renews it meanwhile. When it is lost, ``lease.lost`` is True, ``on_lost``
        is called with it from that thread, the body of an ``async with`` block is cancelled, and leaving raises Fenced.
        """
        return Lease(self, check_terms(owner, ttl, heartbeat, on_lost, wait_s))

    def session(self, *, owner: str | None = None, note: str = "", ttl: float = 30.0) -> RunSession:
        """Return a record that a run of this branch is under way, to be used in a ``with`` or ``async with`` block.

        A run that dies inside it is found by ``store.interrupted()``. It ends as "completed", as "failed: " with the
        name of the error's type, or for what ``session.end(reason)`` said. It gives no right to write; a lease does.
        """
        return RunSession(self, owner, note, ttl)

    def loop(
        self,
        initial: Mapping[str, Any],
        *,
        input: Mapping[str, Any] | None = None,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        pause_check_s: float = PAUSE_CHECK_S,
        ttl: float = 30.0,
        owner: str | None = None,
        wait_s: float = 0.0,
    ) -> Loop:
        """Return a durable loop, to be used in a ``with`` block (``async with`` for the async twin) and iterated over.

        Entering takes the lease, unless this handle has it (waiting for up to ``wait_s`` seconds, for one that a killed
        process left), and goes on where the last process stopped; of a new thread it saves ``initial``. Each turn is
        saved as one change when its body is done. ``input`` begins a new round on a finished state: lists are extended,
        other keys set. ``limit`` is how many turns a round may take, or StepsExceeded. ``metadata`` goes into every
        checkpoint it makes. Between turns, every ``pause_check_s`` seconds, it looks for ``request_pause``.
        ``loop.status`` tells how it ended: a turn that waits for somebody ends the block without an error.
        """
        terms = check_terms(owner, ttl, True, None, wait_s)
        return Loop(self, check_plan(initial, input, limit, metadata, pause_check_s, terms))

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
        """Record that a run waits at this checkpoint for somebody's decision, and return the record to show to them.

        ``kind`` is "beforenode", "afternode", "toolapproval" or "userrequest". The same ``id`` with the same content
        gives the first record again. The checkpoint is not pruned until the decision was consumed.
        """
        return self._handle.run(
            interrupts.record, self._context, self._cursor, name_of(checkpoint), kind, node, payload, prompt, id
        )

    @overload
    def interrupts(self, *, on_damage: Literal["raise"] = ..., pending: bool = ...) -> Iterator[InterruptRecord]: ...

    @overload
    def interrupts(self, *, on_damage: Literal["mark"], pending: bool = ...) -> Iterator[InterruptRecord | Damaged]: ...

    def interrupts(self, *, on_damage: OnDamage = "raise", pending: bool = True) -> Iterator[Any]:
        """Iterate over the interrupts of all branches of this thread, oldest first; ``pending``: not consumed yet."""
        inbox = interrupts.inbox_of(self._cursor.lane.namespace, self.id, pending)
        return listed(self._access, inbox, check_on_damage(on_damage))

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

        ``interrupt`` is the record that the person who decides was shown: an answer to anything else, or to a question
        that was altered, is refused. ``decision`` is "approve" (with a ``scope``, if it reaches further), "modify"
        (needs the ``value`` to put in place), "reject", "defer" (this question is closed; asking again takes a new
        interrupt) or "reroute" (needs the ``target``). If it is decided already: the same by the same person gives the
        record again, anything else raises Conflict, whose ``winner`` is the record that counts.
        """
        answer = interrupts.check_decision(decision, scope, value, reason, target)
        return self._handle.run(interrupts.decide, self._context, self._cursor, interrupt, answer, by)

    def consume(self, interrupt: InterruptRecord, *, by: str | None = None) -> Decision:
        """Take the decision on an interrupt in order to carry it out. Only one worker gets it; to others: Conflict.

        The same ``by`` gets it again; left out, it is this lease or this process. If the worker that took it died,
        whoever holds a later lease of the branch may take it over.
        """
        return self._handle.run(interrupts.consume, self._context, self._cursor, interrupt, by)

    def request_pause(self, reason: str = "", *, by: str) -> InterruptRecord:
        """Ask a run of this branch to stop at its next boundary, from any process and without its lease.

        Returns the request, which is decided on like any interrupt: approved, the run can go on; deferred, it asks
        again; rejected, it does not go on in this branch. One is open at a time: if there is one, that is returned.
        """
        return self._handle.run(request_pause, self._context, self._cursor, reason, by)

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
        """Do something to the world outside once, and return its result: ``fn(*args, **kwargs)``.

        That it is about to be done is stored before, the result after. If it is in the ledger as done, ``fn`` is not
        called: the first result comes back (EffectChanged if the arguments were others). If ``fn`` raises, the effect
        has failed and the next call tries again; but after a timeout or a lost connection, after a cancellation, and
        if the process dies, nobody knows whether it was done. Then the next call raises EffectUnknown, unless

        - ``idempotent`` says that doing it twice does no harm: then it is done again, under the same idempotency key;
        - ``reconcile``, a function of the ``EffectRecord``, finds out and returns ``Outcome.done(result)``,
          ``Outcome.not_done()`` or ``Outcome.unknown()``; a person does the same with ``settle``.

        ``key`` (1 to 1,000 characters) names the effect in this branch. A parameter of ``fn`` called
        ``idempotency_key`` is filled in, for the other side to tell a repetition by. ``unknown_on`` are the errors of
        ``fn`` after which nobody knows. These three are never handed on to ``fn``. Whoever does not hold the lease gets
        Fenced while one runs; hold it if several processes may come here: without it, what one is just doing looks to
        another as if nobody knew.
        """
        call = EffectCall(key, fn, args, kwargs, reconcile, idempotent, unknown_on)
        result: T = perform(self._handle, call)
        return result

    @overload
    def effects(self, *, on_damage: Literal["raise"] = ...) -> Iterator[EffectRecord]: ...

    @overload
    def effects(self, *, on_damage: Literal["mark"]) -> Iterator[EffectRecord | Damaged]: ...

    def effects(self, *, on_damage: OnDamage = "raise") -> Iterator[Any]:
        """Iterate over the effects of all branches of this thread, in the order in which they were first begun."""
        return listed(self._access, ledger_of(self._cursor.lane.namespace, self.id), check_on_damage(on_damage))

    def settle(self, effect: EffectRecord, outcome: Outcome, *, by: str) -> EffectRecord:
        """Say how an effect ended of which nobody knew, once, and return it with the outcome.

        ``effect`` is the record that the person was shown, of ``EffectUnknown.record`` or ``effects()``; ``outcome`` is
        ``Outcome.done(result)``, whose result the next call of the effect returns, or ``Outcome.not_done()``, after
        which it is tried again. If it has ended or was begun again meanwhile: Conflict, whose ``winner`` is the record
        that counts; the same said again by the same person gives the record again.
        """
        return self._handle.run(settle, self._context, self._cursor, effect, outcome, by)

    def verify(self, checkpoint: CheckpointMeta | str | None = None) -> Report:
        """Check every byte of one checkpoint, or of all of the thread, against its digest; report all damage."""
        return self._handle.run(
            verify_thread, self._context, self._cursor.lane, None if checkpoint is None else name_of(checkpoint)
        )

    def stats(self) -> Stats:
        """Return how much this thread stores, by key, and what full copies would take."""
        return self._handle.run(measure, self._context, self.id)

    def _bind(self, saved: SavedCheckpoint) -> Checkpoint:
        """Let a just saved checkpoint find its payload when somebody looks at it."""
        store, blocking = self._access.store, self._handle.blocking
        # The store can be read instead if the handle is gone, but not by an event loop.
        handle = weakref.ref(self._cursor) if blocking else lambda cursor=self._cursor: cursor
        namespace, name = saved.namespace, saved.id

        def load_payload(field: str) -> dict[str, Any]:
            cursor = handle()
            at_hand = None if cursor is None or field == "writes" else load.payload_at_hand(cursor, name)
            if at_hand is not None:
                return at_hand
            if blocking or not in_event_loop():
                return load.payload(store, namespace, name)
            raise InvalidInput(
                f"checkpoint.{field} is not in memory any more, and reading it here would block the event loop",
                thread=saved.thread_id,
                checkpoint=name,
                hint=f"Write (await thread.get(checkpoint.id)).{field}",
            )

        saved.__dict__["_load"] = load_payload
        return saved

    def __repr__(self) -> str:
        return f"<Thread {self.id!r} branch {self.branch!r} of {self._access.store.url}>"
