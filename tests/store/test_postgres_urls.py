"""The URLs of PostgreSQL stores: what cannot work is refused, and no secret in them is ever shown."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

import backstay
from backstay.errors import BackstayError, InvalidInput
from backstay.store.postgres.target import parse_url
from support.postgres import APP_PASSWORD, PostgresServer
from support.proxy import LOCALHOST

Connection = psycopg.Connection[tuple[Any, ...]]

CANARY = "Tr0ub4dor"

NOWHERE = f"postgresql://user@{LOCALHOST}:1/database"
"""A place where nobody listens: who gets as far as connecting to it gets another error."""

WITHOUT_DRIVER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import backstay
try:
    backstay.open("postgresql://user:Tr0ub4dor@host/database")
except backstay.StoreError as error:
    print(type(error).__name__, error)
"""

WITHOUT_NEED = """
import sys, backstay
for url in ("memory:", "agent.db"):
    with backstay.open(url) as store:
        store.thread("thread").save({"n": 1})
print(sorted(name for name in sys.modules if "psycopg" in name or "postgres" in name))
"""


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))


@pytest.fixture
def schema(postgres_url: str) -> str:
    return postgres_url.rpartition("schema=")[2]


@pytest.fixture
def admin(postgres: PostgresServer) -> Iterator[Connection]:
    with postgres.connect() as connection:
        yield connection


# Wrong ones ----------------------------------------------------------------------------------------------------------

WRONG_URLS = {
    "": "a path or a URL",
    "postgresql:": "must start with postgresql://",
    "postgres:database": "must start with postgresql://",
    "postgresql:/user@host/database": "must start with postgresql://",
    "postgresql+psycopg://host/database": "there is no store for postgresql",
    "postgresql://host:abc/database": "port in the URL is not a number",
    "postgresql://host:99999/database": "port in the URL is not a number",
    "postgresql://host:0/database": "port in the URL is not a number",
    f"postgresql://host:{'9' * 5000}/database": "port in the URL is not a number",
    "postgresql://one:1,two:x/database": "port in the URL is not a number",
    "postgresql://host/database?shcema=x": "unknown parameter: shcema",
    "postgresql://host/database?user": "cannot be parsed",
    "postgresql://[::1/database": "cannot be parsed",
    "postgresql://host/data%zzbase": "cannot be parsed",
    "postgresql://host/data base": "cannot be parsed",
    "postgresql://host/\udc80": "cannot be parsed",
    "postgresql://user:pass@word@host/database": "percent-encoded",
    "postgresql://user:pass/word@host/database": "percent-encoded",
    "postgresql://user:pass#word@host/database": "percent-encoded",
    f"{NOWHERE}?sslmode=maybe": "parameter of the URL is wrong.*sslmode",
    f"{NOWHERE}?keepalives=maybe": "parameter of the URL is wrong.*keepalives",
    f"{NOWHERE}?hostaddr=1.1.1.1,2.2.2.2": "parameter of the URL is wrong.*match",
    f"{NOWHERE}?connect_timeout=soon": "connect_timeout='soon'",
    f"{NOWHERE}?timeout=0": "timeout='0' .* from 0.1 to 86400",
    f"{NOWHERE}?timeout=-1": "timeout='-1'",
    f"{NOWHERE}?timeout=nan": "timeout='nan'",
    f"{NOWHERE}?timeout=inf": "timeout='inf'",
    f"{NOWHERE}?timeout=": "timeout=''",
    f"{NOWHERE}?timeout=30s": "timeout='30s'",
    f"{NOWHERE}?pool=0": "pool='0' .* whole number from 1 to 1000",
    f"{NOWHERE}?pool=2.5": "pool='2.5'",
    f"{NOWHERE}?pool=1001": "pool='1001'",
    f"{NOWHERE}?prepare=maybe": "prepare='maybe' .* yes or no",
    f"{NOWHERE}?prepare=": "prepare='' .* yes or no",
    f"{NOWHERE}?accept_data_loss=1": "accept_data_loss='1' .* yes or no",
    f"{NOWHERE}?schema=": "schema='' .* not a valid name",
    f"{NOWHERE}?schema=Upper": "schema='Upper'",
    f"{NOWHERE}?schema=pg_mine": "schema='pg_mine'",
    f"{NOWHERE}?schema=1st": "schema='1st'",
    f"{NOWHERE}?schema={'x' * 64}": "schema='xxx",
    f"{NOWHERE}?schema=x%0A": "not a valid name",
    f"{NOWHERE}?schema=x%22%3B%20drop%20schema%20public%3B--": "not a valid name",
    f"{NOWHERE}?schema=a'b": "not a valid name",
    f"{NOWHERE}?schema=ta%CC%88bel": "not a valid name",
}


@pytest.mark.parametrize(("url", "words"), WRONG_URLS.items())
def test_a_url_that_cannot_work_is_refused_before_anything_is_connected(url: str, words: str) -> None:
    with pytest.raises(BackstayError, match=words) as caught:
        backstay.open(url)

    assert type(caught.value) is InvalidInput
    assert caught.value.hint


def test_the_wrong_urls_are_counted(show: Any) -> None:
    show("wrong URLs that were refused", len(WRONG_URLS))

    assert len(WRONG_URLS) >= 40


def test_what_is_left_out_of_a_url_comes_from_the_environment(
    postgres: PostgresServer, schema: str, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOST", LOCALHOST)
    monkeypatch.setenv("PGPORT", str(postgres.port))
    monkeypatch.setenv("PGUSER", "postgres")
    with backstay.open(f"postgres:///postgres?schema={schema}") as store:
        store.thread("thread").save({"n": 1})

        assert store.url == f"postgres:///postgres?schema={schema}"
        assert admin.execute("select 1 from pg_namespace where nspname = %s", (schema,)).fetchall() == [(1,)]


def test_parameters_of_libpq_reach_it_as_they_are(postgres: PostgresServer, schema: str, admin: Connection) -> None:
    """It is not a web form: a plus sign is a plus sign. And what the URL says goes before what we would say."""
    with backstay.open(f"{postgres.url(schema=schema)}&application_name=a+b%20c&keepalives_idle=7") as store:
        store.thread("thread").save({"n": 1})
        names = admin.execute("select distinct application_name from pg_stat_activity where application_name like 'a%'")

        assert names.fetchall() == [("a+b c",)]


# Passwords --------------------------------------------------------------------------------------------------------

HARD = f"{CANARY}@/?#:&%+ "
SECRET_URLS = [
    f"postgresql://user:{CANARY}@{LOCALHOST}:1/database",
    f"postgresql://user:{quote(HARD, '')}@{LOCALHOST}:1/database",
    f"postgresql://user:%54{CANARY[1:]}@{LOCALHOST}:1/database",
    f"{NOWHERE}?password={CANARY}",
    f"{NOWHERE}?p%61ssword={quote(HARD, '')}",
    f"{NOWHERE}?sslpassword={CANARY}&sslmode=maybe",
    f"{NOWHERE}?oauth_client_secret={CANARY}",
    f"{NOWHERE}?password=x&{CANARY}=x",
    f"{NOWHERE}?password=x&{CANARY}",
    f"{NOWHERE}?timeout=5;password={CANARY}",
    f"{NOWHERE}?prepare=no;PASSWORD={CANARY}",
    f"{NOWHERE}?schema=x;password={CANARY}",
    f"{NOWHERE}?connect_timeout=5;password={CANARY}",
    f"postgresql://user:{CANARY}@host:port/database",
    f"postgresql://user:{CANARY}/database",
    f"postgresql://user:x/{CANARY}@host/database",
    f"postgresql://user:x@{CANARY}@host/database",
    f"postgresql://user:x#{CANARY}@host/database",
    f"postgresql://user:x?{CANARY}@host/database",
    f"postgresql://user:1?{CANARY.lower()}=x@host/database",
    f"postgresql://user:%zz{CANARY}@host/database",
    f"postgresql://user:x {CANARY}@host/database",
    f"postgresql://user:{CANARY}\udc80@host/database",
    f"postgresql://user:{CANARY}@[::1/database",
    f"postgresql:/user:{CANARY}@host/database",
    f"postgres:user:{CANARY}@host/database",
    f"postgresql+psycopg://user:{CANARY}@host/database",
    f"mysql://user:{CANARY}@host/database",
]


def everything_of(error: BaseException) -> str:
    """Return all that a log, a debugger or a process pool might show of an error and of those behind it."""
    found = ["".join(traceback.format_exception(error))]
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None:
            found += [str(each), repr(each), repr(each.args), repr(vars(each))]
            waiting += [each.__cause__, each.__context__]
    return "\n".join(found)


def shows_secret(text: str) -> bool:
    return CANARY[1:].lower() in text.lower()


@pytest.mark.parametrize("url", SECRET_URLS)
def test_no_error_shows_a_secret_of_its_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    with pytest.raises(BackstayError) as caught:
        backstay.open(url)

    assert shows_secret(url)
    assert not shows_secret(everything_of(caught.value))
    assert not shows_secret(caplog.text)


def test_the_driver_would_have_shown_it() -> None:
    """The test above can fail: libpq quotes what it cannot read."""
    with pytest.raises(psycopg.Error) as caught:
        psycopg.connect(f"postgresql://user:{CANARY}@[::1/database")

    assert shows_secret(everything_of(caught.value))


@pytest.fixture
def app_with_canary(admin: Connection) -> Iterator[str]:
    """Give the one role that needs a password another one; return it."""
    admin.execute(sql.SQL("alter role app password {}").format(sql.Literal(HARD)))
    yield HARD
    admin.execute(sql.SQL("alter role app password {}").format(sql.Literal(APP_PASSWORD)))


@pytest.mark.parametrize("place", ["login", "parameter"])
def test_an_open_store_shows_no_secret_even_when_it_cannot_reconnect(
    postgres: PostgresServer,
    schema: str,
    admin: Connection,
    app_with_canary: str,
    place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(0)
    login: dict[str, Any] = {"password": app_with_canary} if place == "login" else {}
    url = postgres.url(user="app", schema=schema, timeout=2, **login)
    with backstay.open(url if login else f"{url}&password={quote(app_with_canary, '')}") as store:
        thread = store.thread("thread")
        thread.save({"n": 1})
        shown = [store.url, repr(store), str(store), repr(thread), repr(parse_url(url))]
        admin.execute("alter role app password 'another'")
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")
        with pytest.raises(BackstayError) as caught:
            thread.save({"n": 2})

    assert "password authentication failed" in postgres.log_tail(), "the pool did not try"
    assert not shows_secret("\n".join([*shown, caplog.text, everything_of(caught.value)]))
    assert "***" in store.url
    assert schema in store.url


def test_the_urls_with_secrets_are_counted(show: Any) -> None:
    show("failing URLs with a secret that was shown nowhere", len(SECRET_URLS))

    assert len(SECRET_URLS) >= 25


# The driver -------------------------------------------------------------------------------------------------------


def test_without_the_driver_the_extra_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVER, "psycopg"], capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("StoreRefused ")
    assert "pip install '.[postgres]'" in done.stdout
    assert not shows_secret(done.stdout)


def test_who_uses_another_store_does_not_load_the_driver(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NEED], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
