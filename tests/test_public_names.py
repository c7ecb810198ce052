"""The public surface: small, sorted, complete, documented; sync and async say the same."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

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


def public_methods(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize(("sync", "asynchronous"), [(Store, AsyncStore), (Thread, AsyncThread)])
def test_sync_and_async_have_the_same_methods_arguments_and_words(sync: type, asynchronous: type) -> None:
    here, there = public_methods(sync), public_methods(asynchronous)

    assert list(here) == list(there)
    for name, method in here.items():
        twin = there[name]
        assert inspect.getdoc(method) == inspect.getdoc(twin), name
        if callable(method) and callable(twin):
            assert list(inspect.signature(method).parameters.values()) == list(
                inspect.signature(twin).parameters.values()
            ), name


def test_asyncio_meets_a_store_in_one_place_only() -> None:
    """The engine runs nodes in an event loop, but reaches stores through threads, as everybody does."""
    allowed = {"thread/offload.py", "thread/store_async.py"}
    package = Path(backstay.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "asyncio" in path.read_text(encoding="utf-8") and not {"cli", "engine"} & set(path.parts)
    }

    assert found <= allowed


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
