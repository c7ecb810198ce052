"""Every example of the README and the pages runs twice, and survives kill -9 at any moment.

The Python blocks of a page are programs in one folder, started in order, as a reader would who tries them. After a kill
the same program is started again, with nothing done in between, until it ends by itself. It may print log lines of
``backstay.*``, nothing else on standard error, and it must end with what it would have without the kills.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.model.runs import Outcome
from support.processes import Nursery
from support.running import RAM_FOLDER, Show, effort

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs/coming-from").glob("*.md")),
    ]
    if (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}

SLOW = {"docs/testing.md": pytest.mark.effort(2)}
"""Pages that kill processes themselves. Their stores are in folders that they remove."""

ROUNDS = effort()
"""How often each block that stores something is killed, each time from the folder that it found: twice per round, once
at a storing call and once, after it was started again, at a moment."""

SEED = int(os.environ.get("BACKSTAY_SEED", "20261117"))
UNIQUE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\d{4}-\d\d-\d\d[T ][\d:.]+\S*")
"""Ids and times, which are others in each run."""

WORKS_AGAIN = {
    "README.md:3": "LangGraph: each start invokes the graph with two more messages",
    "docs/guide.md:10": "each start appends 20 lines",
    "docs/guide.md:12": "each start is a worker that dies and one that adds to its result",
    "docs/langgraph.md:1": "LangGraph: each start invokes the graph with two more messages",
    "docs/langgraph.md:7": "the example counts the mails of one process",
    "docs/langgraph.md:9": "LangGraph: each start invokes the graph again",
    "docs/moving.md:1": "each start saves two more checkpoints",
    "docs/repair.md:1": "each start makes another backup",
    "docs/repair.md:3": "each start damages another file",
    "docs/repair.md:4": "each start damages another file",
    "docs/repair.md:5": "each start damages another file",
    "docs/coming-from/superharness.md:2": "each start saves another file",
}
"""Examples that are no runs or loops: they do their work again in each start, so a killed start leaves a part of it.
They must end well after any kill, with intact stores, but the content depends on the moment of the kill."""

STARTS_MAX = 6
"""How often a block is started after its kills; a person decides between two starts what is unknown."""

LOG_LINE = re.compile(r"^backstay[.\w]*: .*\n", re.MULTILINE)


@dataclass
class Ended:
    """How one start of a block ended."""

    code: int
    out: str
    errors: str

    @property
    def clean(self) -> bool:
        return self.code in (0, -signal.SIGKILL) and LOG_LINE.sub("", self.errors) == ""


@dataclass
class Page:
    """The blocks of a page as programs in a folder."""

    nursery: Nursery
    folder: Path
    blocks: list[str]
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))

    def __post_init__(self) -> None:
        self.folder.mkdir()
        for number, block in enumerate(self.blocks, 1):
            (self.folder / f"block{number}.py").write_text(block, encoding="utf-8")

    def start(self, number: int, counted: str = "", die_at: int = 0, die_after_s: float | None = None) -> Ended:
        """Run a block once; it may be told to die at a storing call, or be killed some time after its start."""
        out = f"{self.folder}-out"
        arguments = [str(self.folder), f"block{number}.py", out, counted, die_at]
        pid = self.nursery.start("support.crash.document_victims:run_block", arguments, out)
        if die_after_s is not None:
            time.sleep(die_after_s)  # not for synchronization: the moment of the kill
            os.kill(pid, signal.SIGKILL)
        code = self.nursery.wait(pid)
        said = [Path(f"{out}.{stream}") for stream in ("stdout", "stderr")]
        texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in said]
        for path in said:
            path.unlink(missing_ok=True)  # a process that is killed early must not show what the one before said
        return Ended(code, *texts)

    def stored(self) -> dict[str, tuple[int, int]]:
        """Return what shows whether a block writes files here."""
        found = [(path, path.stat()) for path in self.folder.rglob("*") if not path.name.endswith("-lock")]
        return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found}

    def copied(self, folder: Path) -> Page:
        """Return the same programs in a copy of the folder, with the stores as they are now."""
        copy = Page(self.nursery, folder, [], self.rng)
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return copy


def picture(folder: Path) -> dict[str, Any]:
    """Return what the stores of a folder hold: per store whether it is intact, and the newest state of each thread."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".db" or (path.is_dir() and (path / "backstay.json").exists()):
            try:
                with backstay.open(str(path) if path.is_file() else f"dir:{path}") as store:
                    ids = sorted({str(meta.thread_id) for meta in store.threads(on_damage="mark")})
                    states = {each: newest(store.thread(each)) for each in ids}
                    found[path.name] = (bool(store.check()), states)
            except backstay.BackstayError as error:
                found[path.name] = type(error).__name__
    return found


def newest(thread: backstay.Thread) -> str:
    try:
        latest = thread.latest()
    except backstay.BackstayError as error:
        return type(error).__name__
    return "" if latest is None else UNIQUE.sub("…", repr(dict(latest.state)))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Return a nursery that has imported what the pages import, so that the first block takes no longer than others."""
    with Nursery() as opened:
        assert opened.wait(opened.start("support.crash.document_victims:do_nothing", [], os.devnull)) == 0
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory, if there is one: what a kill leaves there is the same as on a disk."""
    with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else tmp_path) as name:
        yield Path(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in PAGES])
def test_the_examples_of_a_page_run_in_order_and_then_again(name: str, nursery: Nursery, folder: Path) -> None:
    page = Page(nursery, folder / "page", PAGES[name])
    wrong = [
        f"{name}:{number}, round {again}: exit {ended.code}\n{ended.errors}"
        for again in (1, 2)
        for number in range(1, len(page.blocks) + 1)
        if (ended := page.start(number)).code != 0 or not ended.clean
    ]

    assert not wrong, "\n".join(wrong)


class Killed:
    """The kills of one block: from the folder that it found, as often as there are rounds."""

    def __init__(self, name: str, number: int, before: Page, after: Page, out: str) -> None:
        self.name = f"{name}:{number}"
        self.number = number
        self.before = before
        self.after = after
        self.kills: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._undisturbed = [(UNIQUE.sub("…", out), picture(after.folder))]
        self._again: Page | None = None

    def undisturbed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what the block prints and leaves if nothing kills it: after one start, after two, and so on.

        A kill may come when all is done, so a program that was started three times may have done its work three times.
        """
        yield from self._undisturbed
        self._again = self._again or self.after.copied(self.after.folder.with_name(f"again-{self.number}"))
        while len(self._undisturbed) < STARTS_MAX:
            ended = self._again.start(self.number)
            self._undisturbed.append((UNIQUE.sub("…", ended.out), picture(self._again.folder)))
            yield self._undisturbed[-1]

    def round(self, again: int, duration_s: float, calls: int) -> None:
        """Kill the block at a storing call, start it and kill it at a moment, and start it until it ends by itself."""
        arena = self.before.copied(self.before.folder.with_name(f"killed-{self.number}-{again}"))
        die_at, die_after_s = arena.rng.randint(1, calls), arena.rng.uniform(0, duration_s)
        where = f"{self.name}, seed {SEED}, round {again}, call {die_at}, moment {die_after_s:.3f}"
        plans: list[dict[str, Any]] = [{"die_at": die_at}, {"die_after_s": die_after_s}, *[{}] * STARTS_MAX]
        for start, plan in enumerate(plans):
            ended = arena.start(self.number, **plan)
            self.kills["at a call" if "die_at" in plan else "at a moment"] += ended.code == -signal.SIGKILL
            if not ended.clean and (decided := decide_unknown(arena.folder, ended.errors)):
                self.kills["unknown effects"] += decided
            elif not ended.clean:
                self.wrong.append(f"{where}, start {start + 1}: exit {ended.code}\n{ended.errors}")
                break
            elif not plan:
                break
        left = UNIQUE.sub("…", ended.out), picture(arena.folder)
        if self.name in WORKS_AGAIN:
            found = self._undisturbed[0][1]
            damaged = [store for store in found.keys() & left[1].keys() if left[1][store][0] != found[store][0]]
            self.wrong += [f"{where}: {store} is damaged" for store in damaged]
        elif ended.clean and left not in self.undisturbed():
            self.wrong.append(f"{where}: {left} instead of {self._undisturbed[0]}")
        shutil.rmtree(arena.folder)


def decide_unknown(folder: Path, errors: str) -> int:
    """Do a person's part: an effect whose process died in it was not done. Return how many there were.

    A thread that has only effects is in no list; the error names it.
    """
    named = set(re.findall(r"thread '([^']+)'", errors))
    decided = 0
    for path in sorted(folder.glob("*.db")):
        with backstay.open(str(path)) as store:
            for thread_id in named | {str(meta.thread_id) for meta in store.threads(on_damage="mark")}:
                thread = store.thread(thread_id)
                for record in list(thread.effects()):
                    if record.outcome_unknown and not record.is_call:
                        thread.settle(record, Outcome.not_done(), by="ann")
                        decided += 1
    return decided


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.timeout(300 + 60 * effort())
@pytest.mark.parametrize("name", [name for name in PAGES if name not in SLOW])
def test_a_killed_example_is_started_again_and_ends_as_if_undisturbed(
    name: str, nursery: Nursery, folder: Path, show: Show
) -> None:
    page = Page(nursery, folder / "page", PAGES[name])
    counted = folder / "counted"
    tried: list[Killed] = []
    for number in range(1, len(page.blocks) + 1):
        before, stored = page.copied(folder / f"before-{number}"), page.stored()
        begin = time.monotonic()
        ended = page.start(number, str(counted))
        assert ended.code == 0, ended.errors
        duration_s = time.monotonic() - begin
        if page.stored() != stored:
            tried.append(Killed(name, number, before, page, ended.out))
            for again in range(ROUNDS):
                tried[-1].round(again, duration_s, int(counted.read_text()))

    kills = sum((each.kills for each in tried), Counter())
    show(f"{name}, killed", f"seed {SEED}, {len(tried)} examples that store, {dict(kills)}")
    wrong = [text for each in tried for text in each.wrong]
    assert not wrong, "\n".join(wrong)
    assert kills["at a call"] >= len(tried) * ROUNDS / 2, "the fault fired"
    assert not tried or effort() < 4 or kills["at a moment"] > 0, "the fault fired"


@pytest.mark.crash
@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        pytest.param(
            "assert thread.latest() is None\nfor n in range(9): thread.append({'log': [n]})", "exit 1", id="fails"
        ),
        pytest.param("for n in range(9): thread.append({'log': [n]})", "instead of", id="ends otherwise"),
        pytest.param("import sys\nthread.save({})\nprint('hm', file=sys.stderr)", "hm", id="complains"),
    ],
)
def test_an_example_that_does_not_survive_kills_is_caught(
    block: str, complaint: str, nursery: Nursery, folder: Path
) -> None:
    """A harness that cannot fail shows nothing."""
    page = Page(
        nursery, folder / "page", [f"import backstay\nthread = backstay.open('agent.db').thread('t')\n{block}\n"]
    )
    before = page.copied(folder / "before")
    ended = page.start(1, str(folder / "counted"))
    killed = Killed("bad.md", 1, before, page, ended.out)
    calls = int((folder / "counted").read_text())
    for again in range(4):
        killed.round(again, 0.0, calls)

    assert any(complaint in text for text in killed.wrong)
    assert killed.kills["at a call"] > 0
