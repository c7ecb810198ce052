"""A store with a row in every table, and every call that reads, changes or deletes something in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import backstay
from backstay.errors import BackstayError
from backstay.model.checkpoint import Write
from backstay.model.decision import Decision, DecisionKind
from backstay.model.runs import RunStatus
from backstay.store.leases import BranchKey, LeaseRequest
from backstay.thread.access import access_of
from support.damage import fill, text
from support.thread.stored_runs import WORK, put_run


def fill_all(store: backstay.Store) -> None:
    """Put a row into every table."""
    fill(store)
    thread = store.thread("alpha")
    thread.write("a7", [Write("long", 0, "channel", text("long", 2000))])
    thread.interrupt("a7", payload={"q": 2}, id="open")
    backend = access_of(store).store
    put_run(store, "alpha", RunStatus.COMPLETED, id="over", name="other", ended_us=2)
    put_run(store, "alpha", id="run", due_us=1, note="waits for a worker")
    backend.acquire(BranchKey("", "leased", "", "main"), LeaseRequest("ann", "token", 1))


def verbs(store: backstay.Store) -> Iterator[Callable[[], object]]:
    thread = store.thread("alpha")
    ask = Decision(kind=DecisionKind.APPROVE)
    yield lambda: [store.get(name) for name in ("a0", "a7", "f0", "b2", "c6")]
    yield lambda: [meta.step for meta in store.threads()]
    yield lambda: [meta.created_at for meta in thread.history()]
    yield lambda: thread.latest()
    yield lambda: thread.at(step=3)
    yield lambda: thread.branches()
    yield lambda: store.thread("alpha", branch="what-if").latest()
    yield lambda: store.thread("gamma").latest()
    yield lambda: list(store.interrupts(pending=False))
    yield lambda: list(thread.effects())
    yield lambda: store.runs()
    yield lambda: store.runs(status="queued", on_damage="mark")
    yield lambda: store.runs(graph="work", thread="alpha")
    yield lambda: store.count_runs()
    yield lambda: access_of(store).store.leases("", None, False)
    yield lambda: store.stats()
    yield lambda: store.check()
    yield lambda: store.prune(backstay.Keep(last=2), dry_run=True)
    yield lambda: store.thread("alpha").append({"log": ["more"]})
    yield lambda: store.thread("beta").save({"log": ["other"]}, id="new")
    yield lambda: store.thread("alpha").fork("a2", branch="late")
    yield lambda: thread.tag("a1", "late")
    yield lambda: thread.write("a7", [Write("task", 0, "channel", 43), Write("long", 0, "channel", "z")])
    yield lambda: [thread.decide(each, ask, by="bob") for each in store.interrupts()]
    yield lambda: thread.effect("mail", lambda: 1)
    yield lambda: [lease.__exit__(None, None, None) for lease in store.claim([WORK], 2)]  # type: ignore[func-returns-value]
    yield lambda: [run.cancel() for run in store.runs(status="queued")]
    yield lambda: access_of(store).store.acquire(BranchKey("", "leased", "", "main"), LeaseRequest("bob", "other", 1))
    yield lambda: store.prune(backstay.Keep(last=2))
    yield lambda: store.thread("gamma").delete_checkpoint("c1")
    yield lambda: store.compact()
    yield lambda: store.thread("beta").delete()
    yield lambda: store.delete_all()


def call_all(store: backstay.Store, what: str) -> None:
    """Make every call; fail if anything but an error of ours comes out of one."""
    for number, verb in enumerate(verbs(store)):
        try:
            verb()
        except BackstayError:
            continue
        except Exception as error:
            error.add_note(f"{what}, call {number}")
            raise
