"""Which store a path or URL names; what is refused creates nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import backstay
from backstay.errors import InvalidInput, StoreRefused


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("url", ["memory:", ":memory:", "sqlite:///:memory:"])
def test_memory_stores_create_no_file(folder: Path, url: str) -> None:
    async def use() -> None:
        async with await backstay.aopen(url) as store:
            await store.thread("t").save({"n": 1})

    asyncio.run(use())
    with backstay.open(url) as store:
        store.thread("t").save({"n": 1})
        assert store.url == url
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///x.db", "x.db"),
        ("sqlite:///sub/x.db", "sub/x.db"),
        ("sqlite:x.db", "x.db"),
        ("C:\\x.db", "C:\\x.db"),
        ("./a:b.db", "a:b.db"),
        ("12:30.db", "12:30.db"),
    ],
)
def test_relative_paths(folder: Path, url: str, name: str) -> None:
    (folder / "sub").mkdir()
    backstay.open(url).close()
    assert (folder / name).is_file()


def test_four_slashes_are_an_absolute_path(folder: Path) -> None:
    (folder / "sub").mkdir()
    backstay.open(f"sqlite:///{folder}/sub/x.db").close()
    assert (folder / "sub" / "x.db").is_file()


@pytest.mark.parametrize("url", ["mysql://host/db", "redis:abc", "sqllite:x.db", "Memory:", "postgresq:///x"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(folder: Path, url: str) -> None:
    with pytest.raises(InvalidInput, match=rf"no store for {url.partition(':')[0]}:.*sqlite:, dir:, postgresql:"):
        backstay.open(url)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite://x.db"])
def test_a_sqlite_url_without_a_file_is_refused(folder: Path, url: str) -> None:
    with pytest.raises(InvalidInput, match="sqlite:///"):
        backstay.open(url)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("url", ["no/such/a.db", "sqlite:///no/such/a.db", "dir:no/such/store"])
def test_a_missing_parent_directory_is_an_error(folder: Path, url: str) -> None:
    with pytest.raises(StoreRefused, match=f"the directory {folder}/no/such does not exist.*Create it"):
        backstay.open(url)
    assert os.listdir(folder) == []
