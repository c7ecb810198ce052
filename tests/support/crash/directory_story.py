"""A short story on a directory store, a little of everything that writes, and what must be true after any part of it.

``run`` tells it line by line as JSON, so that it can be interrupted anywhere:

    {"begin": step}                       before a step
    {"done": step, "digest": ...}         after it
    {"error": class, "step": ..., ...}    it raised an error that a store may raise; it is tried again
    {"lied": step}                        the error said that nothing is stored, and it is stored
    {"leaked": descriptors}               descriptors that are still open after the store is closed

``check`` opens the store that is left and compares. ``MUTANTS`` are broken stores: the sweeps must notice each.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import backstay
from backstay.errors import Conflict, OutcomeUnknown, StoreError
from backstay.store.directory import logs, store
from backstay.store.directory.control import Control, ControlState
from backstay.store.finding import LEFTOVER, Finding
from backstay.thread.access import access_of
from support.running import RAM_FOLDER

MAIN_THREAD = "story"
OTHER_THREAD = "other"
SIDE = "what-if"
TRIES_MAX = 4
GARBAGE_BYTES_MIN = 400  # so little that a small story makes a log be written anew
PART_BYTES_MAX = 1100


def text(seed: str, length: int) -> str:
    return hashlib.shake_128(seed.encode()).hexdigest(length // 2)


_DOC = text("doc", 1500)
STATES: dict[str, dict[str, Any]] = {
    "s1": {"log": [text("a", 100)], "n": 1},
    "s2": {"log": [text("a", 100), text("b", 200)], "n": 2},
    "f1": {"log": [text("a", 100), text("b", 200)], "n": -2},
    "s3": {"log": [text("a", 100), text("b", 200)], "n": 3, "doc": text("old doc", 3000)},
    "s4": {"log": [text("a", 100), text("b", 200), "d"], "n": 4, "doc": _DOC},
    "f2": {"log": [text("a", 100), text("b", 200)], "n": -3},
    "o1": {"n": 1},
    "s5": {"log": [text("a", 100), text("b", 200), "d", "e"], "n": 5, "doc": _DOC},
    "s6": {"log": [text("a", 100), text("b", 200), "d", "e"], "n": 6, "doc": _DOC},
}
"""What every checkpoint must contain; its name is its id, and the step that makes it."""

SAVES = STATES.keys() - {"f1", "f2"}
"""The steps that are one save and nothing else."""

REMOVES = {"delete": {"s3"}, "drop": {"o1"}}
"""Which checkpoints a step takes away."""


class Story:
    """One telling: steps in order, each of which may fail and be tried again."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self) -> str:
        self.store = backstay.open(self.url)
        self.thread = self.store.thread(MAIN_THREAD)
        self.side = self.store.thread(MAIN_THREAD, branch=SIDE)
        return ""

    def save(self, name: str) -> str:
        thread = {"f": self.side, "o": self.store.thread(OTHER_THREAD)}.get(name[0], self.thread)
        return thread.save(STATES[name], id=name).digest.hex()

    def fork(self) -> str:
        with contextlib.suppress(Conflict):  # an earlier try did it after all
            self.thread.fork("s2", branch=SIDE, set={"n": -2}, id="f1")
        found = self.side.latest()
        assert found is not None
        assert found.id == "f1"
        return found.digest.hex()

    def lease(self) -> str:
        with self.side.lease(owner="story", ttl=2.0, heartbeat=False, wait=20.0):  # may wait for an earlier try's
            return self.save("f2")

    def close(self) -> str:
        self.store.close()
        return ""

    def steps(self) -> list[tuple[str, Callable[[], Any]]]:
        return [
            ("open", self.open),
            ("s1", lambda: self.save("s1")),
            ("s2", lambda: self.save("s2")),
            ("f1", self.fork),
            ("tag", lambda: self.thread.tag("s1", "good")),
            ("s3", lambda: self.save("s3")),
            ("o1", lambda: self.save("o1")),
            ("s4", lambda: self.save("s4")),
            ("delete", lambda: self.thread.delete_checkpoint("s3")),
            ("f2", self.lease),
            ("drop", lambda: self.store.thread(OTHER_THREAD).delete()),
            ("s5", lambda: self.save("s5")),
            ("compact", lambda: self.store.compact()),
            ("close", self.close),
            ("reopen", self.open),
            ("s6", lambda: self.save("s6")),
            ("end", self.close),
        ]


def run(url: str, mutant: str = "", first: str = "open", in_parts: bool = True) -> None:
    """Tell the story, from one of its steps on; if a step met an error, the next save is the last one."""
    prepare(mutant, in_parts=in_parts)
    story = Story(url)
    names = [name for name, _ in story.steps()]
    before = _descriptors()
    if first != "open":
        story.open()
    errors: list[str] = []
    for step, function in story.steps()[names.index(first) :]:
        _tell({"begin": step})
        if mutant == "acknowledges before the write" and step in STATES:
            _tell({"done": step, "digest": ""})
        saves_after = bool(errors) and step in SAVES
        _tell({"done": step, "digest": tried(story, step, function, _tell, errors)})
        if saves_after:
            story.close()
            break
    _tell({"leaked": sorted(_descriptors() - before)})


def _descriptors() -> set[str]:
    """Return the open descriptors. A slow store lists its folder less often, so a fault may hit this call instead."""
    try:
        return set(os.listdir("/proc/self/fd"))
    except OSError:
        return set(os.listdir("/proc/self/fd"))


Tell = Callable[[dict[str, Any]], None]


def tried(story: Story, step: str, function: Callable[[], Any], tell: Tell, errors: list[str] | None = None) -> str:
    """Do a step, again if it raises an error that a store may raise; return the digest, if it made a checkpoint."""
    unknown = False
    errors = [] if errors is None else errors
    for _ in range(TRIES_MAX):
        try:
            answer = function()
            return answer if isinstance(answer, str) else ""
        except (StoreError, OutcomeUnknown) as error:
            tell({"error": type(error).__name__, "step": step, "text": str(error)})
            errors.append(step)
            unknown = unknown or isinstance(error, OutcomeUnknown)
            if step in SAVES and not unknown:
                with backstay.open(story.url) as other:  # a second handle: knows only what is written
                    if other.get(step) is not None:
                        tell({"lied": step})
    raise AssertionError(f"{step} does not recover")


def check(url: str, begun: Collection[str], digests: Mapping[str, str]) -> list[Finding]:
    """Check that all that was done is there and equal, all that was removed is not, and that saving goes on.

    ``begun`` are the steps that began, ``digests`` those that are done. Returns what the store has to say.
    """
    done = digests.keys()
    with backstay.open(url) as opened:
        findings = access_of(opened).store.check()
        wrong = [finding for finding in (*findings, *opened.check().findings) if finding.kind != LEFTOVER]
        assert not wrong, str(wrong)
        for name, state in STATES.items():
            found = opened.get(name)
            removers = [step for step, names in REMOVES.items() if name in names]
            if name not in begun or any(step in done for step in removers):
                assert found is None, f"{name} should not be there"
            elif name in done and not any(step in begun for step in removers):
                assert found is not None, f"{name} was acknowledged and is lost"
            if found is not None:
                assert found.state == state, f"{name} has another content"
                assert digests.get(name, "") in ("", found.digest.hex()), f"{name} has another digest"
        if "tag" in done:
            tagged = opened.get("s1")
            assert tagged is not None
            assert tagged.tags == ("good",)
        for thread in (opened.thread(MAIN_THREAD), opened.thread("another")):
            head = thread.latest()
            saved = thread.save({**(head.state if head else {}), "after": True})
            assert saved.parent_id == (head.id if head else None)
        side = opened.thread(MAIN_THREAD, branch=SIDE).latest()
        assert (side.id if side else None) in _last_of_side(begun, done)
    with backstay.open(url) as again:
        wrong = [finding for finding in again.check().findings if finding.kind != LEFTOVER]
        assert not wrong, f"after the next save: {wrong}"
    return findings


def _last_of_side(begun: Collection[str], done: Collection[str]) -> set[str | None]:
    if "f2" in begun:
        return {"f2"} if "f2" in done else {"f1", "f2"}
    return {"f1"} if "f1" in done else {None, "f1"} if "f1" in begun else {None}


@contextlib.contextmanager
def folder_in_memory(otherwise: Path) -> Iterator[Path]:
    """Give a folder in memory if there can be one: where only bytes count, a real disk would only be slow."""
    made = Path(tempfile.mkdtemp(dir=RAM_FOLDER if os.access(RAM_FOLDER, os.W_OK) else otherwise))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def steps_of(events: list[dict[str, Any]]) -> tuple[set[str], dict[str, str]]:
    """Return the steps that began, and those that are done with their digests."""
    begun = {event["begin"] for event in events if "begin" in event}
    return begun, {event["done"]: event["digest"] for event in events if "done" in event}


# Broken stores ----------------------------------------------------------------------------------------------------

Patch = Callable[[object, str, object], None]


def prepare(mutant: str = "", patch: Patch = setattr, in_parts: bool = True) -> None:
    """Make this process's stores give space back early, and write in small parts; and break them, if asked to."""
    patch(store, "GARBAGE_BYTES_MIN", GARBAGE_BYTES_MIN)
    if in_parts:
        patch(logs, "write_at", write_in_parts)
    if mutant:
        MUTANTS[mutant](patch)


def write_in_parts(descriptor: int, data: bytes, at: int) -> None:
    """Write as the system may well do it: not all at once. So a kill can come between the parts of a record."""
    for start in range(0, len(data), PART_BYTES_MAX):
        part = data[start : start + PART_BYTES_MAX]
        if os.pwrite(descriptor, part, at + start) != len(part):
            raise OSError(errno.EIO, "a part was not written")


def _keep_torn_ends(patch: Patch) -> None:
    patch(logs.Logs, "cut", lambda *_: None)
    patch(logs.Logs, "trim", lambda *_: None)  # which would mend it, if the store is closed
    patch(logs.Logs, "recover", lambda *_: None)


def _swallow_errors(patch: Patch) -> None:
    real = os.fdatasync

    def careless(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            real(descriptor)

    patch(os, "fdatasync", careless)


def _note_nothing(patch: Patch) -> None:
    real = Control.write
    patch(Control, "write", lambda self, state: real(self, ControlState(state.last, state.rewrites)))


MUTANTS: dict[str, Callable[[Patch], None]] = {
    "acknowledges before the write": lambda _: None,  # ``run`` does it
    "keeps torn ends": _keep_torn_ends,
    "swallows errors of syncs": _swallow_errors,
    "notes nothing beforehand": _note_nothing,
}


def _tell(event: dict[str, Any]) -> None:
    os.write(1, (json.dumps(event) + "\n").encode())
