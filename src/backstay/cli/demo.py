"""``backstay demo``: each part is a real action and its real outcome. Only the model is fake.

Processes are started, killed with SIGKILL and raced against each other on a SQLite file. Where the text names a number,
it was read from the store, the ledger of paid calls or a process's exit; nothing is assumed and nothing is slept for.
"""

from __future__ import annotations

import json
import signal
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import backstay
from backstay.cli.agent import THREAD, paid, work
from backstay.cli.child import Child, ChildFailed
from backstay.cli.voice import Voice
from backstay.errors import BackstayError
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.model.lineage import lineage_text
from backstay.thread.diff import diff

KILL_IN_STEP = 7
STEPS = 12
FORK_AT_STEP = 11
FORK_QUANTITY = 400
DRAW_FROM_STEP = 10
WORKERS = ("worker A", "worker B")


def run(as_json: bool, path: str | None) -> int:
    """Show everything and return the exit code: 0 only if all that was claimed was observed."""
    if path is not None:
        _refuse_unusable(Path(path))
    voice = Voice(quiet=as_json)
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="backstay-demo-") as temporary:
        show = _Demo(path or str(Path(temporary, "demo.db")), Path(temporary, "paid.txt"), voice, facts)
        try:
            show.play()
        except (ChildFailed, BackstayError) as error:
            voice.failed.append(str(error))
    if as_json:
        click.echo(json.dumps({"ok": not voice.failed, **facts, "path": path, "failed": voice.failed}))
    elif not voice.failed:
        _say_farewell(voice, path)
    for what in voice.failed:
        click.echo(f"backstay demo: failed: {what}", err=True)
    return 1 if voice.failed else 0


def _refuse_unusable(path: Path) -> None:
    if path.exists():
        raise click.BadParameter(
            f"{click.format_filename(path)} exists; the demo only writes a new file", param_hint="--path"
        )
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {click.format_filename(path.parent)}", param_hint="--path")


@dataclass(frozen=True, slots=True)
class _Demo:
    """The parts, in order. Each adds what it observed to ``facts``."""

    path: str
    ledger: Path
    voice: Voice
    facts: dict[str, Any] = field(default_factory=dict)

    def play(self) -> None:
        """Play all parts."""
        self.voice.title(f"Backstay {backstay.__version__}: real processes, a real SQLite file, a fake model")
        self.work_and_kill()
        self.go_on()
        self.race()
        with backstay.open(self.path) as store:
            self.fork(store)
            self.measure(store)

    def work_and_kill(self) -> None:
        """Let a child work until it is inside a step; kill it there."""
        self.voice.heading("An agent works, saving each step")
        with Child("run", self.path, str(self.ledger), str(KILL_IN_STEP)) as child:
            self.voice.line(f"process {child.pid}")
            for fact in child.facts():
                self._show_step(fact)
                if (fact["kind"], fact["step"]) == ("doing", KILL_IN_STEP):
                    self.voice.line(f"step {KILL_IN_STEP:>2}  {fact['node']:<5}  asking the supplier...")
                    break
            self.voice.heading(f"It is killed in the middle of step {KILL_IN_STEP}")
            by = child.kill()
        self.voice.claim(by == signal.SIGKILL, f"process {child.pid} was ended by signal {by}")
        with backstay.open(self.path) as store:
            newest = store.thread(THREAD).latest()
            on_disk = newest.step if newest else 0
            replies = [message for message in newest.messages if message["role"] == "assistant"] if newest else []
        self.facts.update(killed_by_signal=by, killed_in_step=on_disk + 1)
        self.voice.claim(
            on_disk == KILL_IN_STEP - 1 and len(replies) == len(paid(self.ledger)),
            f"steps 1 to {on_disk} are on disk, with all {len(replies)} replies that were paid",
        )

    def go_on(self) -> None:
        """Let another child continue, and count what was paid."""
        self.voice.heading("A new process continues")
        began = last = 0
        with Child("run", self.path, str(self.ledger), "0") as child:
            self.voice.line(f"process {child.pid}")
            for fact in child.facts():
                self._show_step(fact)
                began, last = began or fact["step"], fact["step"]
        calls = paid(self.ledger)
        repeated = sum(count - 1 for count in Counter(calls).values())
        self.facts.update(steps=last, resumed_at_step=began, paid_calls=len(calls), repeated_paid_calls=repeated)
        self.voice.claim(
            began == KILL_IN_STEP and last == STEPS,
            f"it began at step {began}: steps 1 to {began - 1} were not done again",
        )
        twice = f"{repeated} paid twice" if repeated else "none paid twice"
        self.voice.claim(repeated == 0 and len(calls) == STEPS // 2, f"{len(calls)} model calls on the ledger, {twice}")

    def race(self) -> None:
        """Let two children save on top of the same checkpoint."""
        self.voice.heading("Two workers want to book the result at once")
        with ExitStack() as both:
            children = {name: both.enter_context(Child("race", self.path, name)) for name in WORKERS}
            for child in children.values():
                child.hear()
            self.voice.line(f"both have loaded step {STEPS}; both save step {STEPS + 1} now")
            for child in children.values():
                child.go()
            heard = {name: child.hear() for name, child in children.items()}
        winners = [name for name, fact in heard.items() if fact["kind"] == "won"]
        losers = [name for name, fact in heard.items() if fact["kind"] == "conflict"]
        fair = len(winners) == len(losers) == 1
        self.voice.claim(fair, f"{' and '.join(winners) or 'nobody'} won")
        if fair:
            told = heard[losers[0]]
            with backstay.open(self.path) as store:
                head = store.thread(THREAD).latest()
            self.facts["conflict"] = {"winner": told["winner"], "loser": losers[0], "step": told["step"]}
            self.voice.claim(
                (told["winner"], told["step"]) == (winners[0], STEPS + 1),
                f"{losers[0]} got Conflict: step {told['step']} is {told['winner']}'s",
            )
            booked = head is not None and (len(head.messages), head.state["booked_by"]) == (STEPS + 1, winners[0])
            self.voice.claim(booked, "there is one booking; nothing of the other was stored")

    def fork(self, store: backstay.Store) -> None:
        """Change one key at an earlier step, run from there and compare."""
        self.voice.heading(f"Fork at step {FORK_AT_STEP}: what if we needed {FORK_QUANTITY}?")
        thread = store.thread(THREAD)
        earlier, answered = thread.at(FORK_AT_STEP), thread.at(STEPS)
        if earlier is None or answered is None:
            raise ChildFailed("the steps to fork and compare are not in the store")
        branch = thread.fork(earlier, branch="what-if", set={"quantity": FORK_QUANTITY})
        before = len(paid(self.ledger))
        for _ in work(branch, self.ledger):
            pass
        calls = len(paid(self.ledger)) - before
        other = branch.latest()
        if other is None:
            raise ChildFailed("the fork is not in the store")
        self.voice.claim(calls == 1, f"{calls} more model call: steps 1 to {FORK_AT_STEP} were not done again")
        change = diff(answered, other)
        self.facts["fork"] = {"at_step": FORK_AT_STEP, "paid_calls": calls, "operations": change.to_json()}
        self.voice.gap()
        self.voice.line(str(change), fg="yellow")
        self.voice.claim(
            {operation["path"].split("/")[1] for operation in change} == {"quantity", "messages", "answer"},
            "only the quantity and what follows from it differ",
        )
        recent = [meta for meta in thread.history(branch="*") if meta.step >= DRAW_FROM_STEP]
        self.voice.gap()
        self.voice.line(lineage_text(recent, _label), fg="magenta")

    def measure(self, store: backstay.Store) -> None:
        """Compare what is stored with full copies, and check every byte."""
        self.voice.heading("What it takes on disk, and whether it is whole")
        stats, report = store.stats(), store.verify()
        self.facts.update(
            stored_bytes=stats.total_bytes,
            full_copy_bytes=stats.full_copy_bytes,
            ratio=round(stats.ratio, 2),
            verify_ok=bool(report),
        )
        self.voice.line(f"{stats.full_copy_bytes:>11,} bytes: {stats.checkpoints} states, each in full, uncompressed")
        self.voice.line(f"{stats.total_bytes:>11,} bytes: the store, its tables and indexes included")
        self.voice.claim(stats.ratio > 1, f"{stats.ratio:.1f} times smaller")
        self.voice.claim(bool(report), str(report))

    def _show_step(self, fact: dict[str, Any]) -> None:
        if fact["kind"] == "saved":
            price = f"  (paid call {fact['paid_calls']})" if fact["paid_calls"] else ""
            self.voice.line(f"step {fact['step']:>2}  {fact['node']:<5}  {fact['text']}{price}", dim=not price)


def _label(meta: CheckpointMeta) -> str:
    notes = [meta.last_node or "", meta.branch if meta.branch != MAIN else "", meta.label or ""]
    return "  ".join([f"step {meta.step}", *filter(None, notes)])


def _say_farewell(voice: Voice, path: str | None) -> None:
    voice.heading("Your turn")
    if path is None:
        voice.line("The store is gone again; `backstay demo --path demo.db` keeps it. In Python:")
    else:
        voice.line(f"The store is kept: {click.format_filename(path)}. Look into it from Python:")
    voice.gap()
    lines = [
        "import backstay",
        f"thread = backstay.open({path or 'agent.db'!r}).thread({THREAD if path else 'first'!r})",
    ]
    if path is None:
        lines.append('thread.append({"messages": ["hello"]}); print(thread.latest().state)')
    else:
        lines.append('print(thread.at(12).state["answer"], *thread.history(branch="*"), sep="\\n")')
    voice.line("\n".join(lines), fg="green")
