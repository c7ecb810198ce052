"""What needs a process of its own: peak memory, and the time an import takes.

The process whose memory is measured is ``memory``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.table import Row, Target

IMPORT, COMMAND = Target(60e-3, "ours"), Target(120e-3, "ours")
REPEATS = 15


def run(bench: Bench) -> None:
    """Measure memory and start-up."""
    bench.table.begin(
        "processes: peak memory (W1, N=1,000; the program keeps the whole state too), start-up",
        "peak = VmHWM in MB of 10^6, since ru_maxrss of a child starts from its parent's; times with bytecode cached",
    )
    _memory(bench)
    _imports(bench)


def _memory(bench: Bench) -> None:
    count = bench.pick(1000, 300)
    ours = _child(bench, "ours", count)
    other = _child(bench, "plain", count) if bench.peers is not None else {"peak": None, "grown": None}
    name = "LangGraph SqliteSaver" if bench.peers is not None else ""
    bench.table.add(Row(f"peak memory, N={count:,}", ours["peak"], "MB", None, other["peak"], name))
    bench.table.add(Row("... grown by, since the imports", ours["grown"], "MB", None, other["grown"], name))


def _child(bench: Bench, kind: str, count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", kind, str(bench.new_path()), str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _imports(bench: Bench) -> None:
    commands = {
        "bare": [sys.executable, "-c", "pass"],
        "ours": [sys.executable, "-c", "import backstay"],
    }
    if bench.peers is not None:
        commands["peer"] = [sys.executable, "-c", "import langgraph.checkpoint.sqlite"]
    script = Path(sys.executable).with_name("backstay")
    if script.exists() and _works([str(script), "--version"]):
        commands["version"] = [str(script), "--version"]
    middle = _start_up(commands, _cached_environment(bench), bench.pick(REPEATS, 7))
    peer = middle["peer"] - middle["bare"] if "peer" in middle else None
    ours = middle["ours"] - middle["bare"]
    bench.table.add(Row("import backstay, less bare python", ours, "s", None, peer, "import its saver", target=IMPORT))
    if "version" in middle:
        bench.table.add(Row("backstay --version", middle["version"], target=COMMAND))
    else:
        bench.table.note("backstay --version: there is no working command yet")


def _start_up(commands: dict[str, list[str]], environment: dict[str, str], repeats: int) -> dict[str, float]:
    """Return the median seconds of each command; they take turns, and a first round fills the cache of bytecode."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(repeats + 1):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            if number:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def _cached_environment(bench: Bench) -> dict[str, str]:
    """Return an environment whose programs find compiled bytecode, as installed ones do, in a cache of our own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environment, "PYTHONPYCACHEPREFIX": str(bench.root / "pycache")}


def _works(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
