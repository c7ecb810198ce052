"""A pytest plugin that runs LangGraph's own test suite on our saver.

In a checkout or unpacked sdist of LangGraph's ``libs/langgraph``, with its test dependencies and Backstay installed:

    PYTHONPATH=<backstay>/tests NO_DOCKER=true python -m pytest -p support.langgraph.suite tests

The suite takes its savers from functions that its ``conftest.py`` imports. The plugin exchanges these before the first
test, so that tests, parameters, their ids and the snapshots that are named after them stay as they are: what the suite
calls "memory" is our saver over ``memory:``, "sqlite" over a file, "sqlite_aes" over a file with LangGraph's encrypting
serializer.

BACKSTAY_SUITE_URL         the store instead of a SQLite file, "postgresql://…" or "dir:…"; a namespace for each test
BACKSTAY_SUITE_EVERYWHERE  "true": also where a test makes its ``InMemorySaver`` itself. Tests that look into that
                           class's dictionaries cannot pass then
LANGGRAPH_STRICT_MSGPACK   as for the suite itself: its strict mode
NO_DOCKER                  "true" leaves out what needs services; without it the suite's PostgreSQL savers stay its own

At the end of each test the store is verified: a finding is an error of that test.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import langgraph.checkpoint.memory
import pytest
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

import backstay
from backstay.langgraph import BackstaySaver

URL = os.environ.get("BACKSTAY_SUITE_URL")
EVERYWHERE = os.environ.get("BACKSTAY_SUITE_EVERYWHERE") == "true"
STRICT = os.environ.get("LANGGRAPH_STRICT_MSGPACK", "false").lower() in ("1", "true", "yes")
AES_KEY = b"1234567890123456"

_opened: dict[str, int] = {"memory": 0, "sqlite": 0, "other": 0}


def pytest_configure(config: pytest.Config) -> None:
    if EVERYWHERE:
        for name in ("InMemorySaver", "MemorySaver"):  # modules of tests are imported later, and find it
            setattr(langgraph.checkpoint.memory, name, MemoryStandIn)


@pytest.hookimpl(tryfirst=True)
def pytest_plugin_registered(plugin: object) -> None:
    if isinstance(plugin, ModuleType) and hasattr(plugin, "_checkpointer_sqlite_aio"):
        names = {
            "_checkpointer_memory": _memory,
            "_checkpointer_sqlite": _file,
            "_checkpointer_sqlite_aes": _encrypted_file,
            "_checkpointer_sqlite_aio": _file_async,
        }
        for name, function in names.items():
            assert hasattr(plugin, name), f"this LangGraph's conftest has no {name}: the plugin must learn the new name"
            setattr(plugin, name, function)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"Backstay savers opened: {_opened}")


class MemoryStandIn(BackstaySaver):
    """Our saver with the arguments of LangGraph's saver in memory."""

    def __init__(self, *, serde: SerializerProtocol | None = None, factory: object = None) -> None:
        super().__init__("memory:", serde=serde)
        _opened["memory"] += 1


def _serde() -> SerializerProtocol | None:
    return JsonPlusSerializer(allowed_msgpack_modules=None) if STRICT else None


@contextlib.contextmanager
def _opened_saver(url: str, kind: str, serde: SerializerProtocol | None, **options: Any) -> Iterator[BackstaySaver]:
    with backstay.open(url, **options) as store:
        saver = BackstaySaver(store)
        if serde is not None:
            saver.serde = serde  # as the suite does it: after the saver was made
        _opened[kind] += 1
        yield saver
        report = store.check()
        assert report, str(report)


@contextlib.contextmanager
def _memory() -> Iterator[BackstaySaver]:
    with _opened_saver("memory:", "memory", _serde()) as saver:
        yield saver


@contextlib.contextmanager
def _file(serde: SerializerProtocol | None = None) -> Iterator[BackstaySaver]:
    if URL is not None:
        with _opened_saver(URL, "other", serde or _serde(), namespace=uuid.uuid4().hex) as saver:
            yield saver
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        _opened_saver(str(Path(folder) / "suite.db"), "sqlite", serde or _serde()) as saver,
    ):
        yield saver


@contextlib.contextmanager
def _encrypted_file() -> Iterator[BackstaySaver]:
    with _file(EncryptedSerializer.from_pycryptodome_aes(serde=_serde() or JsonPlusSerializer(), key=AES_KEY)) as saver:
        yield saver


@contextlib.asynccontextmanager
async def _file_async() -> AsyncIterator[BackstaySaver]:
    with _file() as saver:
        yield saver
