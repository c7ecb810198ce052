"""The store contract, on every store we have."""

from collections.abc import Callable
from pathlib import Path

import pytest

from backstay.store.base import Backend
from backstay.store.directory.store import DirectoryStore
from backstay.store.memory import MemoryStore
from backstay.store.postgres.store import PostgresStore
from backstay.store.sqlite.store import SqliteStore
from backstay.testing.contract import StoreContract


class TestMemory(StoreContract):
    reopens = False

    @pytest.fixture
    def open_backend(self) -> Callable[[], Backend]:
        return MemoryStore


class TestSqlite(StoreContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Callable[[], Backend]:
        return lambda: SqliteStore(str(tmp_path / "agent.db"))


class TestDirectory(StoreContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Callable[[], Backend]:
        return lambda: DirectoryStore(f"dir:{tmp_path / 'checkpoints'}")


class TestPostgres(StoreContract):
    @pytest.fixture
    def open_backend(self, postgres_url: str) -> Callable[[], Backend]:
        return lambda: PostgresStore(postgres_url)
