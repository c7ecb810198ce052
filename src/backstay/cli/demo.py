"""``backstay demo``: each part does something real and shows its real outcome. Only the model is fake.

The demo starts processes, kills them with SIGKILL and lets them race on a SQLite file. It reads every number that it
prints from the store, from the ledger of paid calls or from the exit of a process. It never sleeps.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

import backstay
from backstay.cli.worker import THREAD, paid, work
from backstay.errors import BackstayError
from backstay.model.checkpoint import MAIN, CheckpointMeta
from backstay.model.lineage import lineage_text
from backstay.operations.diff import diff

CHILD_SECONDS_MAX = 60  # then a child is killed, and reading from it fails
INDENT = "   "
KILL_IN_STEP = 7
STEPS = 12
FORK_AT_STEP = 11
FORK_QUANTITY = 400
DRAW_FROM_STEP = 10
WORKERS = ("worker A", "worker B")


class DemoFailed(Exception):
    """A child process ended too early, or a step is missing in the store."""


class DemoProcess:
    """A running worker; the end of the ``with`` block ends it. The demo blocks until the worker writes a line."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "backstay.cli.worker", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._watchdog = threading.Timer(CHILD_SECONDS_MAX, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self.pid = self._process.pid

    def __enter__(self) -> DemoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()  # does nothing if it has ended
        self._process.communicate()

    def facts(self) -> Iterator[dict[str, Any]]:
        """Iterate over the worker's reports until it ends; raise DemoFailed if it fails."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            yield json.loads(line)
        if self._process.wait() != 0:
            lines = self._process.stderr.read().strip().splitlines() or ["no message"]
            raise DemoFailed(f"process {self.pid} ended with {self._process.returncode}: {lines[-1]}")

    def next_fact(self) -> dict[str, Any]:
        """Return the worker's next report."""
        for fact in self.facts():
            return fact
        raise DemoFailed(f"process {self.pid} ended without a report")

    def resume(self) -> None:
        """Let the worker continue."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def kill(self) -> int:
        """Send SIGKILL and return the number of the signal that ended it; 0 if none did."""
        self._process.kill()
        return max(0, -self._process.wait())


def run(as_json: bool, path: str | None) -> int:
    """Run the demo and return the exit code: 0 only if it observed everything that it claims."""
    if path is not None:
        folder = Path(path).parent
        if Path(path).exists():
            shown = click.format_filename(path)
            raise click.BadParameter(f"{shown} exists; the demo only writes a new file", param_hint="--path")
        if not folder.is_dir():
            raise click.BadParameter(f"there is no directory {click.format_filename(folder)}", param_hint="--path")
    with tempfile.TemporaryDirectory(prefix="backstay-demo-") as temporary:
        demo = _Demo(path or str(Path(temporary, "demo.db")), Path(temporary, "paid.txt"), quiet=as_json)
        try:
            demo.play()
        except (DemoFailed, BackstayError) as error:
            demo.failed.append(str(error))
    if as_json:
        click.echo(json.dumps({"ok": not demo.failed, **demo.facts, "path": path, "failed": demo.failed}))
    elif not demo.failed:
        demo.say_goodbye(path)
    for what in demo.failed:
        click.echo(f"backstay demo: failed: {what}", err=True)
    return 1 if demo.failed else 0


class _Demo:
    """The parts, in order. Each adds what it observed to ``facts``, and each wrong claim to ``failed``."""

    def __init__(self, path: str, ledger: Path, quiet: bool) -> None:
        self.path = path
        self.ledger = ledger
        self.quiet = quiet
        self.headings = 0
        self.facts: dict[str, Any] = {}
        self.failed: list[str] = []

    def say(self, text: str = "", indent: str = INDENT, **style: Any) -> None:
        """Print lines, styled as ``click.style`` does."""
        if not self.quiet:
            for line in text.splitlines() or [""]:
                click.echo(indent + click.style(line, **style) if line else "")

    def heading(self, text: str) -> None:
        """Start the next numbered part."""
        self.headings += 1
        self.say()
        self.say(f"{self.headings}. {text}", indent="", fg="cyan", bold=True)

    def claim(self, held: bool, text: str) -> None:
        """Print a claim, and whether it held."""
        if not held:
            self.failed.append(text)
        mark = click.style("✓", fg="green") if held else click.style("✗ wrong:", fg="red", bold=True)
        self.say(text, indent=f"{INDENT}{mark} ")

    def play(self) -> None:
        """Play all parts."""
        self.say(f"Backstay {backstay.__version__}: real processes, a real SQLite file, a fake model", "", bold=True)
        self.kill_an_agent()
        self.resume()
        self.race()
        with backstay.open(self.path) as store:
            self.fork(store)
            self.measure(store)

    def follow(self, child: DemoProcess) -> Iterator[dict[str, Any]]:
        """Show the steps of a child, and yield what it reports."""
        self.say(f"process {child.pid}")
        for fact in child.facts():
            if fact["kind"] == "saved":
                price = f"  (paid call {fact['paid_calls']})" if fact["paid_calls"] else ""
                self.say(f"step {fact['step']:>2}  {fact['node']:<5}  {fact['text']}{price}", dim=not price)
            yield fact

    def kill_an_agent(self) -> None:
        """Kill a child in the middle of a step."""
        self.heading("An agent works and saves each step")
        with DemoProcess("run", self.path, str(self.ledger), str(KILL_IN_STEP)) as child:
            for fact in self.follow(child):
                if (fact["kind"], fact["step"]) == ("doing", KILL_IN_STEP):
                    self.say(f"step {KILL_IN_STEP:>2}  {fact['node']:<5}  asking the supplier...")
                    break
            self.heading(f"It is killed in the middle of step {KILL_IN_STEP}")
            by = child.kill()
        self.claim(by == signal.SIGKILL, f"process {child.pid} was ended by signal {by}")
        with backstay.open(self.path) as store:
            newest = store.thread(THREAD).latest()
            on_disk = newest.step if newest else 0
            replies = [message for message in newest.messages if message["role"] == "assistant"] if newest else []
        self.facts.update(killed_by_signal=by, killed_in_step=on_disk + 1)
        self.claim(
            on_disk == KILL_IN_STEP - 1 and len(replies) == len(paid(self.ledger)),
            f"steps 1 to {on_disk} are on disk, with all {len(replies)} replies that were paid for",
        )

    def resume(self) -> None:
        """Let another child resume, and count the paid calls."""
        self.heading("A new process resumes")
        with DemoProcess("run", self.path, str(self.ledger), "0") as child:
            steps = [fact["step"] for fact in self.follow(child)] or [0]
        first, last, calls = steps[0], steps[-1], paid(self.ledger)
        repeated = len(calls) - len(set(calls))
        self.facts.update(steps=last, resumed_at_step=first, paid_calls=len(calls), repeated_paid_calls=repeated)
        self.claim(
            first == KILL_IN_STEP and last == STEPS,
            f"it resumed at step {first} and did not repeat steps 1 to {first - 1}",
        )
        twice = f"{repeated} paid twice" if repeated else "none paid twice"
        self.claim(repeated == 0 and len(calls) == STEPS // 2, f"{len(calls)} model calls on the ledger, {twice}")

    def race(self) -> None:
        """Let two children save on top of the same checkpoint."""
        self.heading("Two workers book the result at the same time")
        with ExitStack() as both:
            children = {name: both.enter_context(DemoProcess("race", self.path, name)) for name in WORKERS}
            for child in children.values():
                child.next_fact()
            self.say(f"both have loaded step {STEPS}; both save step {STEPS + 1} now")
            for child in children.values():
                child.resume()
            outcome = {name: child.next_fact() for name, child in children.items()}
        winners = [name for name, fact in outcome.items() if fact["kind"] == "won"]
        losers = [name for name, fact in outcome.items() if fact["kind"] == "conflict"]
        fair = len(winners) == len(losers) == 1
        self.claim(fair, f"{' and '.join(winners) or 'no worker'} won")
        if fair:
            winner, step = outcome[losers[0]]["winner"], outcome[losers[0]]["step"]
            with backstay.open(self.path) as store:
                head = store.thread(THREAD).latest()
            self.facts["conflict"] = {"winner": winner, "loser": losers[0], "step": step}
            self.claim(
                (winner, step) == (winners[0], STEPS + 1), f"{losers[0]} got Conflict: step {step} is {winner}'s"
            )
            booked = head is not None and (len(head.messages), head.state["booked_by"]) == (STEPS + 1, winners[0])
            self.claim(booked, "there is one booking; nothing of the other was stored")

    def fork(self, store: backstay.Store) -> None:
        """Change one key at an earlier step, run from there and compare."""
        self.heading(f"Fork at step {FORK_AT_STEP}: what if we needed {FORK_QUANTITY}?")
        thread = store.thread(THREAD)
        earlier, answered = thread.at(FORK_AT_STEP), thread.at(STEPS)
        if earlier is None or answered is None:
            raise DemoFailed(f"step {FORK_AT_STEP} or {STEPS} is missing from the store")
        branch = thread.fork(earlier, branch="what-if", set={"quantity": FORK_QUANTITY})
        before = len(paid(self.ledger))
        for _ in work(branch, self.ledger):
            pass
        calls, other = len(paid(self.ledger)) - before, branch.latest()
        if other is None:
            raise DemoFailed("the fork is missing from the store")
        self.claim(calls == 1, f"{calls} more model call: steps 1 to {FORK_AT_STEP} were not repeated")
        change = diff(answered, other)
        self.facts["fork"] = {"at_step": FORK_AT_STEP, "paid_calls": calls, "operations": change.to_json()}
        self.say()
        self.say(str(change), fg="yellow")
        self.claim(
            {operation["path"].split("/")[1] for operation in change} == {"quantity", "messages", "answer"},
            "only the quantity and what follows from it differ",
        )

        def label(meta: CheckpointMeta) -> str:
            notes = [meta.last_node or "", meta.branch if meta.branch != MAIN else "", meta.label or ""]
            return "  ".join([f"step {meta.step}", *filter(None, notes)])

        recent = [meta for meta in thread.history(branch="*") if meta.step >= DRAW_FROM_STEP]
        self.say()
        self.say(lineage_text(recent, label), fg="magenta")

    def measure(self, store: backstay.Store) -> None:
        """Compare the size of the store with full copies, and check every byte."""
        self.heading("Its size on disk, and a check of every byte")
        stats, report = store.stats(), store.check()
        self.facts.update(
            stored_bytes=stats.total_bytes,
            full_copy_bytes=stats.full_copy_bytes,
            ratio=round(stats.ratio, 2),
            verify_ok=bool(report),
        )
        self.say(f"{stats.full_copy_bytes:>11,} bytes: {stats.checkpoints} states, each in full, uncompressed")
        self.say(f"{stats.total_bytes:>11,} bytes: the store, its tables and indexes included")
        self.claim(stats.ratio > 1, f"{stats.ratio:.1f} times smaller")
        self.claim(bool(report), str(report))

    def say_goodbye(self, path: str | None) -> None:
        """Show how to continue in Python."""
        self.heading("Your turn")
        if path is None:
            self.say("The store is deleted; `backstay demo --path demo.db` keeps it. In Python:")
            example = 'thread.append({"messages": ["hello"]}); print(thread.latest().state)'
        else:
            self.say(f"The store is in {click.format_filename(path)}. Look into it from Python:")
            example = 'print(thread.at(12).state["answer"], *thread.history(branch="*"), sep="\\n")'
        opened = f"backstay.open({path or 'agent.db'!r}).thread({THREAD if path else 'first'!r})"
        self.say()
        self.say(f"import backstay\nthread = {opened}\n{example}", fg="green")
