"""A PgBouncer in transaction mode in front of a test's PostgreSQL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg

from backstay.testing.drafts import wait_until
from support.postgres import SUPERUSER, PostgresServer, find_account
from support.proxy import LOCALHOST, bind_free_port
from support.running import skip_unless_ci

BACKENDS = 2
PREPARES_SINCE = (1, 21)
"""PgBouncer's first version that can carry prepared statements from one backend to another."""


def find_pgbouncer() -> str:
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    return found or skip_unless_ci(
        "pgbouncer is not installed (Debian: apt-get install pgbouncer): poolers are not tested"
    )


class Pooler:
    """A PgBouncer in transaction mode, with a few backends of a server and any number of clients."""

    def __init__(self, server: PostgresServer, user: str = SUPERUSER) -> None:
        self.server = server
        self.user = user
        self.program = find_pgbouncer()
        said = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"PgBouncer (\d+)\.(\d+)", said)
        assert found, said
        self.version = (int(found[1]), int(found[2]))

    def __enter__(self) -> Pooler:
        self._reserved = bind_free_port()
        self.port = self._reserved.getsockname()[1]
        self.folder = Path("/tmp", f"backstay-pooler-{uuid.uuid4().hex}")
        self.folder.mkdir()
        settings = {
            "listen_addr": LOCALHOST,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "pool_mode": "transaction",
            "auth_type": "any",
            "default_pool_size": BACKENDS,
            "logfile": self.folder / "log",
            **({"max_prepared_statements": 100} if self.version >= PREPARES_SINCE else {}),
        }
        (self.folder / "ini").write_text(
            f"[databases]\n* = host={LOCALHOST} port={self.server.port} user={self.user}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in settings.items()),
            encoding="utf-8",
        )
        options: dict[str, Any] = {}
        if (account := find_account()) is not None:  # as PostgreSQL, it does not run as root
            os.chown(self.folder, account.pw_uid, account.pw_gid)
            options = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._process = subprocess.Popen(
            [self.program, "-q", self.folder / "ini"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **options,
        )
        try:
            wait_until(self._accepts)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reserved.close()
        shutil.rmtree(self.folder)

    def url(self, database: str, **params: Any) -> str:
        return self.server.url(database, **params).replace(f":{self.server.port}/", f":{self.port}/")

    def _accepts(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text(encoding="utf-8")
        try:
            psycopg.connect(self.url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True
