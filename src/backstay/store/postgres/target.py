"""What a ``postgresql://`` URL asks for: our own parameters taken out, the rest left to libpq, the password hidden.

Ours: ``schema`` (where the tables live), ``timeout`` (seconds any call may take), ``pool`` (the most connections),
``prepare`` (whether statements are prepared; without it, they are unless a pooler is in between) and
``accept_data_loss=yes`` (to use a server that is set up to lose acknowledged commits).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from psycopg import ProgrammingError, pq
from psycopg.conninfo import conninfo_to_dict

from backstay.errors import InvalidInput

TIMEOUT_S = 30.0
POOL_SIZE = 10
POOL_SIZE_MAX = 1000
CONNECT_TIMEOUT_S = 10
CONNECT_TIMEOUT_S_MIN = 2  # less than that libpq does not do
PORT_MAX = 65_535

OURS = ("schema", "timeout", "pool", "prepare", "accept_data_loss")
LIBPQ = {option.keyword.decode() for option in pq.Conninfo.get_defaults()} | {"ssl"}  # "ssl" as Java's driver has it

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_SECRET = re.compile(r"password|secret|scram")
_NAME = re.compile(r"[a-z_]{1,40}")
_HINT = "For example postgresql://user:password@host:5432/database?schema=backstay"
_ENCODE = "In user and password write @ as %40, : as %3A, / as %2F, ? as %3F, # as %23 and % as %25"


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect to, and how."""

    shown: str  # the URL without its secrets
    conninfo: str = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    given: frozenset[str]  # the names of libpq's parameters in the URL
    schema: str
    timeout_s: float
    connect_timeout_s: int
    pool_size: int
    prepare: bool | None  # None: find out whether a pooler is in between
    accepts_data_loss: bool

    def redacted(self, text: str) -> str:
        """Return a text without any secret of the URL."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_url(url: str) -> Target:
    """Return what a URL asks for; anything it gets wrong is refused without showing its secrets."""
    scheme, mark, rest = url.partition("://")
    front, _, query = rest.partition("?")
    if not mark:
        raise InvalidInput("a PostgreSQL URL begins with postgresql://", hint=_HINT)
    if front.count("@") > 1 or "@" in front.partition("/")[2] or "#" in rest:
        raise InvalidInput("the URL's user or password holds a character that must be percent-encoded", hint=_ENCODE)
    ours, theirs = _divided(query)
    conninfo = f"postgresql://{front}{'?' if theirs else ''}{'&'.join(theirs)}"
    known = _understood(conninfo)
    if known is None:  # raised here, not where libpq's own text, which may quote the password, would be attached
        raise InvalidInput("the PostgreSQL URL cannot be understood", hint=f"{_HINT}. {_ENCODE}")
    _check_ports(known.get("port", ""))
    timeout_s = _number("timeout", ours.get("timeout"), TIMEOUT_S, 0.1, 86_400.0)
    patience = _number("connect_timeout", known.get("connect_timeout"), 0.0, 0.0, 86_400.0) or CONNECT_TIMEOUT_S
    hosts = known.get("host", "").count(",") + 1  # each is tried for so long, one after the other
    return Target(
        shown=_shown(scheme, front, query),
        conninfo=conninfo,
        secrets=tuple(value for name, value in known.items() if _SECRET.search(name) and value),
        given=frozenset(known),
        schema=_schema(ours.get("schema")),
        timeout_s=timeout_s,
        connect_timeout_s=max(CONNECT_TIMEOUT_S_MIN, int(min(patience, timeout_s / hosts))),
        pool_size=int(_number("pool", ours.get("pool"), POOL_SIZE, 1, POOL_SIZE_MAX, int)),
        prepare=_flag("prepare", ours.get("prepare")),
        accepts_data_loss=_flag("accept_data_loss", ours.get("accept_data_loss")) or False,
    )


def _divided(query: str) -> tuple[dict[str, str], list[str]]:
    """Return our own parameters, decoded, and libpq's, as they are: it does not read them as a web form."""
    ours, theirs = {}, []
    for part in query.split("&") if query else []:
        name, _, value = part.partition("=")
        if unquote(name) in OURS:
            ours[unquote(name)] = unquote(value)
            continue
        if unquote(name) not in LIBPQ:
            # What follows a raw & or ? of a password looks like a parameter's name too.
            is_harmless = _NAME.fullmatch(name) and "@" not in query and not _SECRET.search(query)
            raise InvalidInput(
                f"the URL has a parameter that is not known{f': {name}' if is_harmless else ''}",
                hint=f"Ours are {', '.join(OURS)}; others must be libpq's, such as sslmode. In values write & as %26",
            )
        theirs.append(part)
    return ours, theirs


def _understood(conninfo: str) -> dict[str, str] | None:
    try:
        return {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    except (ProgrammingError, UnicodeError):
        return None


def _check_ports(ports: str) -> None:
    for port in filter(None, ports.split(",")):
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
            raise InvalidInput(  # never shown: in user:password/database, where @host was forgotten, it is the password
                f"the URL's port is not a number from 1 to {PORT_MAX}", hint=f"{_HINT}. {_ENCODE}"
            )


def _shown(scheme: str, front: str, query: str) -> str:
    user, at, place = front.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = f"{scheme}://{name}{':***' if colon else ''}{at}{place}"
    parts = [
        f"{name}=***" if _SECRET.search(unquote(name)) else part
        for part in query.split("&")
        for name in [part.partition("=")[0]]
    ]
    return shown + ("?" + "&".join(parts) if query else "")


def _schema(name: str | None) -> str:
    if name is None:
        return "backstay"
    if not _SCHEMA.fullmatch(name) or name.startswith("pg_"):
        raise InvalidInput(
            f"schema={_echo(name)} in the URL is no name for a schema",
            hint="Use up to 63 lower-case letters, digits and _, not beginning with a digit or pg_",
        )
    return name


def _number(
    name: str,
    text: str | None,
    default: float,
    least: float,
    most: float,
    parse: Callable[[str], float] = float,
) -> float:
    if text is None:
        return default
    try:
        value = parse(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        kind = "whole number" if parse is int else "number"
        raise InvalidInput(
            f"{name}={_echo(text)} in the URL must be a {kind} from {least:g} to {most:g}",
            hint=f"For example {name}={default or CONNECT_TIMEOUT_S:g}",
        )
    return value


def _flag(name: str, text: str | None) -> bool | None:
    known = {None: None, "yes": True, "no": False}
    if text not in known:
        raise InvalidInput(f"{name}={_echo(text or '')} in the URL must be yes or no", hint=f"Write {name}=yes or =no")
    return known[text]


def _echo(text: str) -> str:
    """Return a wrong value as it may be shown: somebody may have taken ``;`` for what separates parameters."""
    return "…" if _SECRET.search(text.lower()) else repr(text[:40])
