"""Look-alikes of everything that our SQL calls, planted by another user in a schema of everybody's search path.

Each writes a line to the server's log, which no rollback takes away, and then does what the real one does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Any

import psycopg
from psycopg import sql

from backstay.langgraph.importer import postgres as stock
from backstay.store.postgres import connection as connecting
from backstay.store.postgres import database, queries
from backstay.store.postgres import schema as making
from support.postgres import PostgresServer

MARK = "planted look-alike"
SCALARS: tuple[str, ...] = (
    "int2",
    "int4",
    "int8",
    "numeric",
    "float8",
    "text",
    "bytea",
    "bool",
    "timestamptz",
    "interval",
    "oid",
)
SCALARS += ("name", '"char"', "regclass", "regnamespace", "regtype", "public.evil")
ARRAYS = ("int2[]", "int4[]", "int8[]", "text[]", "bytea[]", "bool[]", "name[]")
RELATIONS = ("pg_class", "pg_namespace", "pg_attribute", "meta", "branch", "checkpoint", "checkpoints")
CASTS = ("int8", "text", "bytea")
SETS = {"unnest"}

PLANT_OPERATOR = """
CREATE FUNCTION public.{function}({left}, {right}) RETURNS {result} LANGUAGE plpgsql AS {body};
CREATE OPERATOR public.{name} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = public.{function})"""
PLANT_FUNCTION = "CREATE FUNCTION public.{name}({types}) RETURNS {result} LANGUAGE plpgsql AS {body}"
BODY = "BEGIN RAISE LOG '{mark} {name}({types}) called by %', current_user; {result}; END"


def texts(server: PostgresServer, name: str, schema: str) -> list[str]:
    """Return all our SQL: what we send, and the bodies of our functions."""
    modules = (queries, database, making, connecting, stock)
    sent = [text for module in modules for text in vars(module).values() if isinstance(text, str) and " " in text]
    with server.connect(name) as admin:
        rows = admin.execute("select prosrc from pg_proc where pronamespace = %s::regnamespace", (schema,)).fetchall()
    return [re.sub(r"--[^\n]*|'[^']*'|%\(?\w*\)?s", " ", text) for text in (*sent, *(body for (body,) in rows))]


def plant(server: PostgresServer, name: str, schema: str, culprit: str) -> tuple[int, int]:
    """Let a user plant what it can; return the numbers of functions and of operators."""
    ours = texts(server, name, schema)
    with server.connect(name) as admin:
        admin.execute(sql.SQL("grant usage, create on schema public to {}").format(sql.Identifier(culprit)))
        named = {word for text in ours for word in re.findall(r"(\w+)\(", text)}
        arities = admin.execute(
            "select proname::text, array_agg(distinct pronargs::int) from pg_proc"
            " where pronamespace = 'pg_catalog'::regnamespace and proname = any(%s) and pronargs > 0 group by 1",
            (list(named),),
        ).fetchall()
        known = {each for (each,) in admin.execute("select distinct oprname::text from pg_operator")}
    operators = known & {word for text in ours for word in re.findall(r"[-+*/<>=~!@#%^&|`?]+", text)}
    with psycopg.connect(server.url(name, user=culprit), autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        _plant_type(connection)
        for relation in RELATIONS:
            connection.execute(f"create view public.{relation} as select public.seen('{relation}') as oid".encode())
        functions = sum(_plant_functions(connection, each, sizes) for each, sizes in arities)
        return functions, sum(_plant_operators(connection, each) for each in sorted(operators))


def calls(server: PostgresServer, name: str, user: str) -> dict[str, int]:
    """Return how often each was called as a user, according to the server's log of one database."""
    found: dict[str, int] = {}
    for line in server.log.read_text(encoding="utf-8", errors="replace").splitlines():
        if f"{user}@{name} " in line and "LOG:" in line and MARK in line:
            what = line.partition(MARK)[2].strip()
            found[what] = found.get(what, 0) + 1
    return found


def _plant_type(connection: psycopg.Connection[Any]) -> None:
    connection.execute("create type public.evil as (n int)")
    body = BODY.format(mark=MARK, name="relation", types="", result="RETURN 1::oid")
    connection.execute(
        PLANT_FUNCTION.format(name="seen", types="text", result="oid", body=f"$body${body}$body$").encode()
    )
    for kind in CASTS:
        for source, target in ((kind, "evil"), ("evil", kind)):
            name = f"cast_{source}_{target}"
            body = BODY.format(mark=MARK, name=name, types="", result="RETURN NULL")
            made = PLANT_FUNCTION.format(name=name, types=source, result=target, body=f"$body${body}$body$")
            connection.execute(made.encode())
            how = "AS ASSIGNMENT" if target == "evil" else "AS IMPLICIT"
            cast = f"create cast ({source} as {target}) with function public.{name}({source}) {how}"
            connection.execute(cast.encode())


def _results(connection: psycopg.Connection[Any], calls: Iterable[tuple[str, Any]]) -> list[tuple[Any, str]]:
    """Return which of these PostgreSQL itself can do, each with the type of its result."""
    wanted = list(calls)
    connection.execute("create temp table if not exists tried (number int, result text)")
    connection.execute("truncate tried")
    tries = "".join(
        f"BEGIN INSERT INTO tried SELECT {number}, pg_catalog.pg_typeof((SELECT {text} WHERE false))::text;"
        f" EXCEPTION WHEN OTHERS THEN NULL; END;\n"
        for number, (text, _) in enumerate(wanted)
    )
    connection.execute(f"DO $do$ BEGIN {tries} END $do$".encode())
    rows = connection.execute("select number, max(result) from tried group by 1 order by 1").fetchall()
    return [(wanted[number][1], result) for number, result in rows if result not in ("record", "unknown")]


def _plant_functions(connection: psycopg.Connection[Any], name: str, sizes: list[int]) -> int:
    kinds = [*SCALARS, *ARRAYS]
    tuples = [types for size in sizes if size <= 2 for types in product(kinds, repeat=size)]
    few = ("text", "bytea", "int4", "int8", "bool")
    tuples += [types for size in sizes if size == 3 for types in product(few, repeat=3)]
    arguments = ((", ".join(f"NULL::{kind}" for kind in types), types) for types in tuples)
    found = _results(connection, ((f"pg_catalog.{name}({given})", types) for given, types in arguments))
    for types, result in found:
        given = ", ".join(f"${number}" for number, _ in enumerate(types, 1))
        call = f"pg_catalog.{name}({given})"
        answer = f"RETURN QUERY SELECT {call}" if name in SETS else f"RETURN {call}"
        if result == "void":
            answer = f"PERFORM {call}"
        body = BODY.format(mark=MARK, name=name, types=", ".join(types), result=answer)
        made = PLANT_FUNCTION.format(
            name=name,
            types=", ".join(types),
            result=f"SETOF {result}" if name in SETS else result,
            body=f"$body${body}$body$",
        )
        connection.execute(made.encode())
    return len(found)


def _plant_operators(connection: psycopg.Connection[Any], name: str) -> int:
    pairs = product([*SCALARS, *ARRAYS], repeat=2)
    found = _results(connection, ((f"NULL::{a} OPERATOR(pg_catalog.{name}) NULL::{b}", (a, b)) for a, b in pairs))
    for number, ((left, right), result) in enumerate(found):
        function = "op_" + "".join(f"{ord(sign):02x}" for sign in name) + f"_{number}"
        answer = f"RETURN $1 OPERATOR(pg_catalog.{name}) $2"
        shown = name.replace("%", "%%")
        body = BODY.format(mark=MARK, name=shown, types=f"{left}, {right}", result=answer)
        parts = {"left": left, "right": right, "result": result, "function": function, "name": name}
        connection.execute(PLANT_OPERATOR.format(**parts, body=f"$body${body}$body$").encode())
    return len(found)
