"""The public surface: small, sorted, complete, documented; sync and async say the same."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay import AsyncStore, AsyncThread, Store, Thread


def test_the_public_names_are_sorted_complete_and_few() -> None:
    names = backstay.__all__
    tree = ast.parse(Path(backstay.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in tree.body
        for part in ast.walk(node)
        if isinstance(part, ast.ImportFrom) and part.module in ("backstay.api", "backstay.engine", "backstay.version")
        for alias in part.names
    }

    assert names == sorted(names)
    assert all(hasattr(backstay, name) for name in names)
    assert set(names) == imported
    assert len([name for name in names if not name.startswith("__")]) <= 25


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
