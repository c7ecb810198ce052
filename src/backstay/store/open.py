"""Opening a store by its URL: one table from scheme to class."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from backstay.errors import InvalidInput, StoreRefused
from backstay.store.base import Backend
from backstay.store.sqlite.store import SqliteStore
from backstay.version import install_hint


def _memory(url: str) -> Backend:
    from backstay.store.memory import MemoryStore

    return MemoryStore(url)


def _directory(url: str) -> Backend:
    from backstay.store.directory.store import DirectoryStore

    return DirectoryStore(url)


def _postgres(url: str) -> Backend:
    try:
        from backstay.store.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise StoreRefused("the PostgreSQL driver is not installed", hint=install_hint("postgres")) from error
    return PostgresStore(url)


STORES: dict[str, Callable[[str], Backend]] = {
    "memory": _memory,
    "sqlite": SqliteStore,
    "dir": _directory,
    "postgresql": _postgres,
    "postgres": _postgres,
}
"""Scheme to class. A URL without a scheme is the path of a SQLite file."""

_MEMORY = ("memory:", ":memory:", "sqlite:///:memory:")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
"""Two or more characters: one letter is a drive of Windows."""

_URL_LENGTH_MAX = 10_000


def path_text(path: str | os.PathLike[str]) -> str | None:
    """Return a path or URL as text; None if it cannot be one."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    try:
        is_valid = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        is_valid = False
    return text if isinstance(text, str) and 0 < len(text) <= _URL_LENGTH_MAX and is_valid else None


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """Open the store that the URL names; create it if it does not exist. ``backstay.open`` documents the URLs."""
    text = path_text(url)
    if text is None:
        raise InvalidInput("open() needs a path or a URL", hint='For example backstay.open("agent.db")')
    if text in _MEMORY:
        return _memory(text)
    found = _SCHEME.match(text)
    if found is None:
        return SqliteStore(text)
    scheme = found[1]
    if scheme not in STORES:
        known = ", ".join(f"{name}:" for name in STORES)
        hint = f"Use {known} or the path of a file. If the file's name has a colon, write ./ before it"
        raise InvalidInput(f"there is no store for {scheme}:", hint=hint)
    return STORES[scheme](text)
