"""Parsing a ``postgresql://`` URL: our own parameters, the rest for libpq, and a form without the password.

Ours: ``schema`` (of the tables), ``timeout`` (seconds that a call may take), ``pool`` (the most connections),
``prepare`` (whether statements are prepared; by default they are, unless a pooler is in between) and
``accept_data_loss=yes`` (to use a server that is configured to lose acknowledged commits).
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
CONNECT_TIMEOUT_S_MIN = 2  # libpq's minimum
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
    """Where and how to connect."""

    shown: str  # the URL without its secrets
    conninfo: str = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    given: frozenset[str]  # the names of libpq's parameters in the URL
    schema: str
    timeout_s: float
    connect_timeout_s: int
    pool_size: int
    prepare: bool | None  # None: detect a pooler
    accepts_data_loss: bool

    def redacted(self, text: str) -> str:
        """Return a text without the URL's secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_url(url: str) -> Target:
    """Parse a URL; errors never show its secrets."""
    scheme, mark, rest = url.partition("://")
    front, _, query = rest.partition("?")
    if not mark:
        raise InvalidInput("a PostgreSQL URL must start with postgresql://", hint=_HINT)
    if front.count("@") > 1 or "@" in front.partition("/")[2] or "#" in rest:
        raise InvalidInput(
            "the user or password in the URL contains a character that must be percent-encoded", hint=_ENCODE
        )
    ours, theirs = _divided(query)
    conninfo = f"postgresql://{front}{'?' if theirs else ''}{'&'.join(theirs)}"
    try:
        known = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    except (ProgrammingError, UnicodeError):
        known = None
    if known is None:  # raised here, because libpq's own text may quote the password
        raise InvalidInput("the PostgreSQL URL cannot be parsed", hint=f"{_HINT}. {_ENCODE}")
    for port in filter(None, known.get("port", "").split(",")):
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
            # The port is not shown: without @host, it is the password.
            raise InvalidInput(f"the port in the URL is not a number from 1 to {PORT_MAX}", hint=f"{_HINT}. {_ENCODE}")
    schema = ours.get("schema", "backstay")
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise InvalidInput(
            f"schema={_echo(schema)} in the URL is not a valid name",
            hint="Use up to 63 lower-case letters, digits and _; do not start with a digit or pg_",
        )
    timeout_s = _number("timeout", ours.get("timeout"), TIMEOUT_S, 0.1, 86_400.0)
    patience = _number("connect_timeout", known.get("connect_timeout"), 0.0, 0.0, 86_400.0) or CONNECT_TIMEOUT_S
    hosts = known.get("host", "").count(",") + 1  # tried one after the other
    return Target(
        shown=_shown(scheme, front, query),
        conninfo=conninfo,
        secrets=tuple(value for name, value in known.items() if _SECRET.search(name) and value),
        given=frozenset(known),
        schema=schema,
        timeout_s=timeout_s,
        connect_timeout_s=max(CONNECT_TIMEOUT_S_MIN, int(min(patience, timeout_s / hosts))),
        pool_size=int(_number("pool", ours.get("pool"), POOL_SIZE, 1, POOL_SIZE_MAX, int)),
        prepare=_flag("prepare", ours.get("prepare")),
        accepts_data_loss=_flag("accept_data_loss", ours.get("accept_data_loss")) or False,
    )


def _divided(query: str) -> tuple[dict[str, str], list[str]]:
    """Return our own parameters, decoded, and libpq's, unchanged."""
    ours, theirs = {}, []
    for part in query.split("&") if query else []:
        name, _, value = part.partition("=")
        if unquote(name) in OURS:
            ours[unquote(name)] = unquote(value)
            continue
        if unquote(name) not in LIBPQ:
            # The rest of a password after a raw & or ? looks like a parameter's name too.
            is_harmless = _NAME.fullmatch(name) and "@" not in query and not _SECRET.search(query)
            raise InvalidInput(
                f"the URL has an unknown parameter{f': {name}' if is_harmless else ''}",
                hint=f"Use {', '.join(OURS)} or a parameter of libpq, such as sslmode. In values write & as %26",
            )
        theirs.append(part)
    return ours, theirs


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


def _number(
    name: str, text: str | None, default: float, least: float, most: float, parse: Callable[[str], float] = float
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
    """Return a wrong value for an error, unless it may hold a secret: a user may have separated parameters by ``;``."""
    return "…" if _SECRET.search(text.lower()) else repr(text[:40])
