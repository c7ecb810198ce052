"""The public surface: small, sorted, complete, documented; sync and async say the same."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import AsyncStore, AsyncThread, Store, Thread

PUBLIC = [
    "backstay.bundle",
    "backstay.codec",
    "backstay.compat.backend",
    "backstay.compat.graph",
    "backstay.compat.sessions",
    "backstay.compat.workflow",
    "backstay.engine",
    "backstay.engine.events",
    "backstay.engine.reducers",
    "backstay.engine.sinks",
    "backstay.engine.triggers",
    "backstay.errors",
    "backstay.langgraph",
    "backstay.maintenance",
    "backstay.messages",
    "backstay.retry",
    "backstay.testing",
    "backstay.thread",
]
"""The modules besides ``backstay`` that users import."""


def test_the_public_names_are_sorted_complete_and_few() -> None:
    """The table of names agrees with what type checkers see, and stays within its budget."""
    names = backstay.__all__
    tree = ast.parse(Path(backstay.__file__).read_text(encoding="utf-8"))
    typed = {
        (alias.name, node.module)
        for part in tree.body
        if isinstance(part, ast.If)
        for node in part.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert names == sorted(names)
    assert typed == set(backstay._MODULES.items())
    assert all(hasattr(backstay, name) for name in names)
    assert len(names) - 1 <= 30  # without __version__


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_module_lists_its_names(name: str) -> None:
    """Every name in the list exists, and every class and function in it has a docstring."""
    module = importlib.import_module(name)
    listed = {each: getattr(module, each) for each in module.__all__}
    undocumented = [
        each
        for each, found in listed.items()
        if (inspect.isclass(found) or inspect.isfunction(found)) and not found.__doc__
    ]

    assert len(module.__all__) == len(listed)
    assert undocumented == []


def test_every_public_name_has_one_place() -> None:
    """Only the common errors are in two: at the top, and in the tree of all errors. ``compat`` keeps foreign names."""
    places: dict[str, list[str]] = {}
    for module in ["backstay", *(name for name in PUBLIC if ".compat." not in name)]:
        for name in importlib.import_module(module).__all__:
            places.setdefault(name, []).append(module)

    doubled = {name: found for name, found in places.items() if found[1:] not in ([], ["backstay.errors"])}

    assert doubled == {}


def test_help_starts_with_an_example() -> None:
    assert "backstay.open(" in (backstay.__doc__ or "").split("\n\n")[1:3][-1]


def test_every_public_name_has_a_docstring() -> None:
    undocumented = [
        name for name in backstay.__all__ if name != "__version__" and not inspect.getdoc(getattr(backstay, name))
    ]

    assert undocumented == []


@pytest.mark.parametrize(("sync", "asynchronous"), [(Store, AsyncStore), (Thread, AsyncThread)])
def test_sync_and_async_have_the_same_names_and_arguments(sync: type, asynchronous: type) -> None:
    def arguments(method: Callable[..., Any]) -> list[Any]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]

    here, there = ({name for name in vars(cls) if not name.startswith("_")} for cls in (sync, asynchronous))

    assert here == there
    for name in here:
        method, twin = getattr(sync, name), getattr(asynchronous, name)
        if callable(method):
            assert arguments(method) == arguments(twin), name


def test_importing_backstay_pulls_in_no_extra_and_no_framework() -> None:
    unwanted = [
        "langgraph",
        "psycopg",
        "pydantic",
        "numpy",
        "rich",
        "click",
        "starlette",
        "hypothesis",
        "pytest",
        "attr",
    ]
    code = f"import sys, backstay; print([name for name in {unwanted!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"
