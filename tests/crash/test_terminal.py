"""Ctrl-C in a real terminal: the program ends as any Python program does, and the same program continues at once.

The programs run in a pseudo-terminal, where the kernel turns the byte 3 into SIGINT. Each waits at a gate in the middle
of its work: a fifo that nobody opens. Before the second start the gate is an ordinary file, which lets everyone pass.
"""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.running import Show, effort

CTRL_C = b"\x03"
SEED = int(os.environ.get("BACKSTAY_SEED", "20261118"))
TWICE = 2 * effort()
"""How often a second Ctrl-C follows the first."""

AS_PYTHON_ENDS = {-signal.SIGINT, 128 + signal.SIGINT, 1}
OURS_ALONE = re.compile(
    r"Task was destroyed|never retrieved|coroutine '(?!BaseEventLoop).* never awaited|unclosed|Fenced|During handling"
)
"""Text that no program shows which is only interrupted."""

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
LOOP = next(
    block for block in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "loop(" in block
)
RETURN = '    return {"role"'

PLAIN = """
import backstay

graph = backstay.Graph("chain")

def step(number):
    def node(state):
        print("asked", number, flush=True)
        if number == 3:
            open("gate").read()
        return {"n": state["n"] + number}
    return node

for number in range(1, 6):
    graph.node(f"step{number}", step(number))
    if number > 1:
        graph.edge(f"step{number - 1}", f"step{number}")
graph.start("step1")
graph.end("step5")

result = graph.run_sync(backstay.open("agent.db").thread("t"), {"n": 0})
print("result", result.status.value, result.state["n"])
"""

ASYNC = """
import asyncio, os, stat
import backstay

graph = backstay.Graph("chain")

def step(number):
    async def node(state):
        print("asked", number, flush=True)
        while number == 3 and stat.S_ISFIFO(os.stat("gate").st_mode):
            await asyncio.sleep(3600)
        return {"n": state["n"] + number}
    return node

for number in range(1, 6):
    graph.node(f"step{number}", step(number))
    if number > 1:
        graph.edge(f"step{number - 1}", f"step{number}")
graph.start("step1")
graph.end("step5")

async def main():
    store = await backstay.aopen("agent.db")
    result = await graph.run(store.thread("t"), {"n": 0})
    print("result", result.status.value, result.state["n"])
    await store.close()

asyncio.run(main())
"""

WORKER = """
import backstay

graph = backstay.Graph("job")

def say(text):
    print(f"{text}\\n", end="", flush=True)  # in one piece: two nodes may print at the same time

@graph.node
def first(state):
    return {"n": state["n"] + 1}

@graph.node
def second(state):
    say(f"asked {state['n']}")
    with open("gate") as gate:
        gate.read()
    return {"n": state["n"] * 10}

@graph.node
def third(state):
    say(f"result {state['n']}")
    return {}

graph.start("first")
graph.edge("first", "second")
graph.edge("second", "third")
graph.end("third")

store = backstay.open("agent.db")
for number in range(4):
    if store.thread(f"t{number}").latest() is None:
        graph.submit(store.thread(f"t{number}"), {"n": number})
graph.work_sync(store, concurrency=2)
"""


@dataclass(frozen=True)
class Program:
    """A program, and the last line that it prints if nothing disturbs it."""

    code: str
    result: str


PROGRAMS = {
    "loop": Program(
        LOOP.replace(
            RETURN,
            '    print("asked", len(messages), flush=True)\n    if len(messages) == 3:\n        open("gate").read()\n'
            + RETURN,
        ),
        "5 messages after turn 4",
    ),
    "run_sync": Program(PLAIN, "result completed 15"),
    "async": Program(ASYNC, "result completed 15"),
}


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.shown = b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                os.execv(sys.executable, [sys.executable, "-W", "error", "program.py"])
            finally:
                os._exit(127)

    def read_until(self, expected: str) -> None:
        """Read what it prints until a line is there."""
        while not re.search(rb"^" + expected.encode() + rb"\r\n", self.shown, re.MULTILINE):
            assert self._read(), f"it ended without {expected!r}: {self.text}"

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def wait(self, patience_s: float | None = None) -> int:
        """Read the rest, and return the exit code. One that is silent for too long gets another Ctrl-C, if allowed."""
        while True:
            if not select.select([self._terminal], [], [], patience_s)[0]:
                self.press(CTRL_C)
            elif not self._read():
                break
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def text(self) -> str:
        return self.shown.decode().replace("\r\n", "\n")

    @property
    def asked(self) -> list[int]:
        """Return the steps that it has done or begun, in order."""
        return [int(number) for number in re.findall(r"^asked (\d+)$", self.text, re.MULTILINE)]

    def _read(self) -> bytes:
        try:
            more = os.read(self._terminal, 65536)
        except OSError:  # how a terminal says that no process has it open any more
            more = b""
        self.shown += more
        return more


def prepare(folder: Path, code: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(code, encoding="utf-8")
    os.mkfifo(folder / "gate")


def open_gate(folder: Path) -> None:
    (folder / "gate").unlink()
    (folder / "gate").touch()


@pytest.mark.crash
@pytest.mark.timeout(20)  # less than a lease lasts: the second start does not wait for one to expire
@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_ends_a_program_and_it_continues_when_it_is_started_again(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    prepare(tmp_path, program.code)

    first = Terminal(tmp_path)
    first.read_until("asked 3")
    first.press(CTRL_C)
    code = first.wait()
    open_gate(tmp_path)
    second = Terminal(tmp_path)

    assert (second.wait(), second.text.splitlines()[-1]) == (0, program.result), second.text
    assert code in AS_PYTHON_ENDS
    assert first.text.splitlines()[-1] == "KeyboardInterrupt", first.text
    assert first.text.count("^C") == 1
    assert "Exception ignored" not in first.text
    # asyncio.run itself turns a cancelled main task into KeyboardInterrupt, and Python shows both.
    assert set(OURS_ALONE.findall(first.text)) <= ({"During handling"} if name == "async" else set()), first.text
    assert (first.asked, second.asked) == ([1, 2, 3], [3, 4] if name == "loop" else [3, 4, 5])


@pytest.mark.crash
@pytest.mark.effort
@pytest.mark.timeout(20 * TWICE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_ctrl_c_while_it_ends_does_no_harm(name: str, tmp_path: Path, show: Show) -> None:
    """The second one may come while the run ends, releases its lease or closes the store, or while Python ends."""
    program = PROGRAMS[name]
    rng = random.Random(SEED)
    codes = []
    for number in range(TWICE):
        folder = tmp_path / str(number)
        prepare(folder, program.code)
        first = Terminal(folder)
        first.read_until("asked 3")
        first.press(CTRL_C)
        time.sleep(rng.choice([0, rng.uniform(0, 0.02)]))  # not for synchronization: the moment of the second one
        first.press(CTRL_C)
        # An interrupt at the moment when asyncio wakes up a task loses the wake-up, in a program without Backstay too:
        # the task never ends, and a person presses Ctrl-C once more.
        codes.append(first.wait(patience_s=3.0 if name == "async" else None))
        open_gate(folder)
        begin = time.monotonic()
        second = Terminal(folder)

        assert (second.wait(), second.text.splitlines()[-1]) == (0, program.result), f"{first.text}\n{second.text}"
        assert time.monotonic() - begin < 20
        assert codes[-1] in AS_PYTHON_ENDS
        # On any line, or nowhere: the second one may come while Python shows the first.
        assert codes[-1] == -signal.SIGINT or "KeyboardInterrupt" in first.text, first.text
        # An interrupt right after a file was opened leaves it to Python, which closes it and says so under -W error.
        allowed = {"During handling", "unclosed"} | ({"Task was destroyed"} if first.text.count("^C") > 2 else set())
        assert not set(OURS_ALONE.findall(first.text)) - allowed, first.text
    show(f"Ctrl-C twice, {name}", f"seed {SEED}, {TWICE} programs, exit codes {codes}")


@pytest.mark.crash
@pytest.mark.timeout(20)
def test_ctrl_c_ends_a_worker_and_the_next_one_continues_its_runs(tmp_path: Path) -> None:
    prepare(tmp_path, WORKER)

    first = Terminal(tmp_path)
    first.read_until(r"asked \d")
    first.press(CTRL_C)
    code = first.wait()
    open_gate(tmp_path)
    second = Terminal(tmp_path)
    for number in range(4):
        second.read_until(f"result {10 * (number + 1)}")
    second.press(CTRL_C)

    assert second.wait() in {0, *AS_PYTHON_ENDS}
    assert code in {0, *AS_PYTHON_ENDS}
    for text in (first.text, second.text):
        assert not OURS_ALONE.search(text), text
        assert "Exception ignored" not in text
