"""Measure how large the code is, and how far a call travels through it.

    python tools/measure.py [--package NAME] [--json]

It measures the package that this interpreter imports: the size of its source, and four calls on SQLite with a small
state. A call counts the Python frames of the package, without comprehensions and lambdas; a generator counts once.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

REACH_INS = {"_store", "_services", "_cursor", "_backend", "_run", "_offload"}
"""Attributes of a thread or a store that only the folder thread/ should use on another object."""


# The source -------------------------------------------------------------------------------------------------------


def source_figures(package: ModuleType) -> dict[str, Any]:
    root = Path(str(package.__file__)).parent
    files = {path.relative_to(root): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    functions = [node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    private_once = sum(used_once(tree) for tree in trees.values())
    return {
        "files": len(files),
        "lines": sum(len(text.splitlines()) for text in files.values()),
        "functions": len(functions),
        "private functions used once": private_once,
        "of all functions, %": round(100 * private_once / len(functions), 1),
        "class names used twice": len(repeated_classes(trees)),
        "yield from": sum(isinstance(node, ast.YieldFrom) for _, node in nodes),
        "store verbs": len(verbs(package.__name__)),
        "reach-ins": sum(is_reach_in(node) for path, node in nodes if path.parts[0] != "thread"),
    }


def used_once(tree: ast.Module) -> int:
    """Count the private functions of a file that the file names exactly once after their definition."""
    nodes = list(ast.walk(tree))
    names = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    names.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(name.startswith("_") and not name.endswith("__") and names[name] == 1 for name in defined)


def repeated_classes(trees: Mapping[Path, ast.Module]) -> dict[str, list[str]]:
    """Return the class names that are defined more than once outside compat/, each with its files.

    compat/ repeats other systems' names on purpose.
    """
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        if path.parts[0] != "compat":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(path.as_posix())
    return {name: files for name, files in found.items() if len(files) > 1}


def folder_figures(package: ModuleType) -> dict[str, dict[str, int]]:
    """Return the number of files and lines in each folder of the package."""
    root = Path(str(package.__file__)).parent
    figures: dict[str, dict[str, int]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        row = figures.setdefault(parts[0] if len(parts) > 1 else ".", {"files": 0, "lines": 0})
        row["files"] += 1
        row["lines"] += len(path.read_text(encoding="utf-8").splitlines())
    return figures


def verbs(package: str) -> set[str]:
    """Return the public methods of the store contract."""
    contract = importlib.import_module(f"{package}.store.base").Backend
    members = {
        name: each
        for kind in contract.__mro__
        if kind.__module__.startswith(package)
        for name, each in vars(kind).items()
    }
    return {name for name, member in members.items() if callable(member) and not name.startswith("_")}


def is_reach_in(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in REACH_INS:
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


# The walks --------------------------------------------------------------------------------------------------------


class Walk:
    """Counts the frames of the package from ``start`` to ``stop``, and the SQL statements."""

    def __init__(self, package: ModuleType, statements: list[str]) -> None:
        self._root = str(Path(str(package.__file__)).parent)
        self._statements = statements
        self._frames: dict[int, FrameType] = {}  # kept, so that no address is used twice
        self._depth = 0
        self._before = self._after = 0

    def start(self) -> None:
        self._before = len(self._statements)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        sys.setprofile(None)
        self._after = len(self._statements)

    def _is_counted(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._root) and not frame.f_code.co_name.startswith("<")

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._is_counted(frame):
            self._frames[id(frame)] = frame
            depth, each = 0, frame
            while each is not None:
                depth += self._is_counted(each)
                each = each.f_back  # type: ignore[assignment]
            self._depth = max(self._depth, depth)

    def figures(self) -> dict[str, int]:
        codes = [frame.f_code for frame in self._frames.values()]
        return {
            "calls": len(codes),
            "functions": len(set(codes)),
            "files": len({code.co_filename for code in codes}),
            "depth": self._depth,
            "SQL": self._after - self._before,
        }


@contextmanager
def traced_sql() -> Iterator[list[str]]:
    """Give a list to which every SQL statement of every connection opened from now on is added."""
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **kwargs: Any) -> Any:
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(statements.append)
        return connection

    sqlite3.connect = traced
    try:
        yield statements
    finally:
        sqlite3.connect = connect


def walk_append(package: ModuleType, url: str, walk: Walk) -> None:
    with package.open(url) as store:
        thread = store.thread("x")
        thread.save({"messages": [{"role": "user", "content": "hello " * 100}], "n": 1})
        thread.append({"messages": [{"role": "assistant", "content": "hello " * 100}]})
        walk.start()
        thread.append({"messages": [{"role": "user", "content": "bye " * 100}]})
        walk.stop()


def walk_latest(package: ModuleType, url: str, walk: Walk) -> None:
    with package.open(url) as store:
        store.thread("x").save({"messages": [{"role": "user", "content": "hello " * 100}], "n": 1})
        store.thread("x").append({"messages": [{"role": "assistant", "content": "hello " * 100}]})
        walk.start()
        store.thread("x").latest()
        walk.stop()


def walk_graph_step(package: ModuleType, url: str, walk: Walk) -> None:
    graph = package.Graph("walk")

    def begin(state: Any) -> dict[str, int]:
        walk.start()
        return {"n": 2}

    def end(state: Any) -> dict[str, int]:
        walk.stop()
        return {"n": 3}

    graph.node("a", lambda state: {"n": 1})
    graph.node("b", begin)
    graph.node("c", end)
    graph.start("a")
    graph.end("c")
    graph.edge("a", "b")
    graph.edge("b", "c")
    with package.open(url) as store:
        graph.run_sync(store.thread("x"), {"n": 0})


def walk_langgraph_put(package: ModuleType, url: str, walk: Walk) -> None:
    from langgraph.checkpoint.base import empty_checkpoint

    module = importlib.import_module(f"{package.__name__}.langgraph")
    with getattr(module, f"{package.__name__.capitalize()}Saver")(url) as saver:
        config: Any = {"configurable": {"thread_id": "x", "checkpoint_ns": ""}}
        for step in range(3):
            values = {"messages": ["hello"] * (step + 1), "n": step}
            versions = dict.fromkeys(values, f"{step + 1:032}.0")
            checkpoint = {**empty_checkpoint(), "channel_values": values, "channel_versions": versions}
            if step == 2:
                walk.start()
            config = saver.put(config, checkpoint, {"source": "loop", "step": step, "parents": {}}, versions)
        walk.stop()


WALKS: dict[str, Callable[[ModuleType, str, Walk], None]] = {
    "warm append": walk_append,
    "cold latest()": walk_latest,
    "graph step": walk_graph_step,
    "LangGraph put": walk_langgraph_put,
}


def walk_figures(package: ModuleType) -> dict[str, dict[str, int]]:
    figures = {}
    with tempfile.TemporaryDirectory() as folder, traced_sql() as statements:
        for number, (name, take) in enumerate(WALKS.items()):
            walk = Walk(package, statements)
            take(package, str(Path(folder) / f"{number}.db"), walk)
            figures[name] = walk.figures()
    return figures


# The table --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="backstay")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    package = importlib.import_module(options.package)
    source, folders, walks = source_figures(package), folder_figures(package), walk_figures(package)
    if options.json:
        print(json.dumps({"source": source, "folders": folders, "walks": walks}, indent=2))
        return
    for name, value in source.items():
        print(f"{name:<28} {value:>9,}")
    print(f"\n{'':<16}{'files':>10}{'lines':>10}")
    for name, row in folders.items():
        print(f"{name:<16}" + "".join(f"{value:>10,}" for value in row.values()))
    print(f"\n{'':<16}" + "".join(f"{name:>10}" for name in next(iter(walks.values()))))
    for name, row in walks.items():
        print(f"{name:<16}" + "".join(f"{value:>10}" for value in row.values()))


if __name__ == "__main__":
    main()
