"""Operations to be interrupted, each on a thread of its own, and what must hold of it afterwards."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import backstay
from backstay.errors import BackstayError, Conflict, EffectUnknown, Fenced
from backstay.model.runs import Outcome

State = dict[str, Any]
TTL_S = 0.3
PATIENCE_S = 30.0
LINE = "a line that is long enough to be worth a place of its own, "


def first_state() -> State:
    return {"log": [f"{LINE}{number}" for number in range(20)], "n": 0, "text": "x" * 300}


class Run:
    """One operation. ``asked`` says of each acknowledged checkpoint what its state must be, made of its parent's."""

    name = ""

    def __init__(self, store: backstay.Store, thread: str) -> None:
        self.store = store
        self.thread = store.thread(thread)
        self.asked: dict[str, Callable[[State], State]] = {}
        self.prepare()

    def prepare(self) -> None:
        """Bring the thread to where the operation begins: a value in a stream of its own, and a tip in memory."""
        self.save(self.thread, first_state())
        for number in range(3):
            self.append(self.thread, f"{LINE}prepared {number}")

    def act(self) -> None:
        """Do it."""
        raise NotImplementedError

    def save(self, handle: backstay.Thread, state: State, **more: Any) -> None:
        saved = handle.save(state, **more)
        self.asked[saved.id] = lambda parent: state

    def append(self, handle: backstay.Thread, item: str) -> None:
        saved = handle.append({"log": [item]}, set={"n": len(item)})
        self.asked[saved.id] = lambda parent: {**parent, "log": [*parent.get("log", []), item], "n": len(item)}

    # Afterwards ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Go on with the handle and with a new one; all that was acknowledged is there, exactly as it was asked for."""
        self.go_on(self.thread)
        self.go_on(self.store.thread(self.thread.id))
        found = {meta.id for meta in self.thread.history(branch="*")}
        assert self.asked.keys() <= found, "an acknowledged checkpoint is gone"
        for name in found:
            checkpoint = self.store.get(name)  # every byte is verified
            assert checkpoint is not None
            if name in self.asked:
                parent = None if checkpoint.parent_id is None else self.store.get(checkpoint.parent_id)
                assert checkpoint.state == self.asked[name](parent.state if parent is not None else {}), name

    def go_on(self, handle: backstay.Thread) -> None:
        """Save; where the handle was left behind, from what the store has."""
        try:
            self.append(handle, "and on it goes")
        except (Conflict, Fenced):  # somebody saved, or had the lease meanwhile
            handle.latest()
            self.append(handle, "and on it goes")


class FirstSave(Run):
    name = "first save"

    def prepare(self) -> None:
        pass

    def act(self) -> None:
        self.save(self.thread, first_state())

    def go_on(self, handle: backstay.Thread) -> None:
        if handle.latest() is None:
            self.save(handle, first_state())
        super().go_on(handle)


class Save(Run):
    name = "save"

    def act(self) -> None:
        state = first_state()
        state["log"][3:5] = [f"{LINE}edited"]
        self.save(self.thread, {**state, "new": "y" * 400})


class SaveUnderAnId(Run):
    name = "save with an id"

    def act(self) -> None:
        self.save(self.thread, {**first_state(), "n": 7}, id=f"{self.thread.id}-mine")


class Append(Run):
    name = "append"

    def act(self) -> None:
        self.append(self.thread, f"{LINE}appended")


class ColdAppend(Run):
    name = "append through a new handle"

    def act(self) -> None:
        self.thread = self.store.thread(self.thread.id)
        self.append(self.thread, f"{LINE}appended")


class Latest(Run):
    name = "latest"

    def prepare(self) -> None:
        super().prepare()
        self.thread = self.store.thread(self.thread.id)
        self.append(self.thread, "the tip knows only what it needed to")

    def act(self) -> None:
        self.thread.latest()


class Fork(Run):
    name = "fork"

    def act(self) -> None:
        last = max(self.asked)
        forked = self.thread.fork(last, branch="what-if", set={"n": -1})
        head = forked.latest()
        assert head is not None
        self.asked[head.id] = lambda parent: {**parent, "n": -1}
        self.append(forked, f"{LINE}forked")


class Rewind(Run):
    name = "rewind"

    def act(self) -> None:
        saved = self.thread.rewind(min(self.asked))
        self.asked[saved.id] = lambda parent: first_state()


class Merge(Run):
    name = "merge"

    def prepare(self) -> None:
        super().prepare()
        forked = self.thread.fork(max(self.asked), branch="what-if", set={"n": -1})
        head = forked.latest()
        assert head is not None
        self.asked[head.id] = lambda parent: {**parent, "n": -1}
        self.source = head.id

    def act(self) -> None:
        saved = self.thread.merge(self.source)
        self.asked[saved.id] = lambda parent: {**parent, "n": -1}


class Tag(Run):
    name = "tag"

    def act(self) -> None:
        self.thread.tag(max(self.asked), "good")


class Question(Run):
    name = "interrupt, decide, consume"

    def act(self) -> None:
        shown = self.thread.interrupt(max(self.asked), payload={"amount": 7}, prompt="May I?")
        self.thread.consume(self.thread.decide(shown, "approve", by="ann"))

    def check(self) -> None:
        for shown in self.thread.interrupts():  # what was begun can be brought to its end
            if shown.decision is None:
                shown = self.thread.decide(shown, "approve", by="ann")
            self.thread.consume(shown)
        super().check()


class Lease(Run):
    name = "lease: take, renew, save, give back"

    def act(self) -> None:
        with self.thread.lease(ttl=TTL_S) as lease:
            lease.renew()
            self.append(self.thread, f"{LINE}leased")

    def check(self) -> None:
        """Take the lease, at once or when its time is over: nobody keeps one alive that nobody holds."""
        for handle in (self.thread, self.store.thread(self.thread.id)):
            with handle.lease(ttl=TTL_S, wait=PATIENCE_S):
                self.go_on(handle)
        super().check()


class Loop(Run):
    name = "loop: one turn with an effect"

    def prepare(self) -> None:
        self.done: list[int] = []

    def send(self) -> str:
        self.done.append(1)
        return f"{LINE}sent"

    def act(self) -> None:
        with self.thread.loop({"log": first_state()["log"], "n": 0}, ttl=TTL_S, wait=4 * TTL_S) as loop:
            for turn in loop:
                reply = turn.effect("mail", self.send)
                turn.append(log=[reply])
                turn.set(n=1)
                loop.finish()

    def check(self) -> None:
        """Run again it comes to its end, and the effect was done once."""
        while True:
            self.thread = handle = self.store.thread(self.thread.id)
            try:
                self.act()
                break
            except EffectUnknown as error:
                handle.settle(error.record, Outcome.done(f"{LINE}sent") if self.done else Outcome.not_done(), by="ann")
            except Fenced:
                gc.collect()  # a loop and its turn know each other; the lease ends when they are gone
        assert self.done == [1]
        head = handle.latest()
        assert head is not None
        assert head.state["log"].count(f"{LINE}sent") == 1
        runs = self.store.runs(thread=self.thread.id)
        assert [run.status for run in runs] == ["completed"], f"not one run that is over: {runs}"
        super().check()


class Cancel(Run):
    name = "cancel a run"

    def prepare(self) -> None:
        with self.thread.loop(first_state()) as loop:  # nobody finishes it
            assert loop.status == "running"

    def act(self) -> None:
        (run,) = self.store.runs(thread=self.thread.id)
        if run.status != "cancelled":
            run.cancel("enough")

    def check(self) -> None:
        """Run again it comes to its end, and the state is as it was, but for what a handler has appended."""
        while True:
            with contextlib.suppress(Fenced):
                self.act()
            (run,) = self.store.runs(thread=self.thread.id)
            if run.status != "running":
                break
            gc.collect()  # after a second interrupt the lease is not released; it expires once its object is gone
        head = self.store.thread(self.thread.id).latest()
        assert head is not None
        assert (run.status, head.state["log"][:20]) == ("cancelled", first_state()["log"])
        super().check()


RUNS: list[type[Run]] = [
    FirstSave,
    Save,
    SaveUnderAnId,
    Append,
    ColdAppend,
    Latest,
    Fork,
    Rewind,
    Merge,
    Tag,
    Question,
    Lease,
    Cancel,
    Loop,
]


def at_once(call: Callable[[], object], refused: list[BackstayError]) -> None:
    """Call what a handler calls: it returns or is refused, and does not wait for what it interrupted."""
    began = time.monotonic()
    try:
        call()
    except BackstayError as error:
        refused.append(error)
    assert time.monotonic() - began < 5.0
