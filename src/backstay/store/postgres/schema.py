"""The tables and functions: the script that creates them, the migrations to it, and a comparison with the database.

schema.sql is always the newest version. Version 1 is schema.sql as first released; a later change edits schema.sql and
adds migrations/0002_what_it_does.sql, 0003 and so on, which bring older schemas to the same tables.

A schema that differs from ours is refused: an added trigger, rule, policy or constraint, or a changed function, could
drop, change or copy saved data without any call failing. The expected tables are read from the text of schema.sql. The
schema may hold tables and functions with other names, and plain indexes on our tables: these are harmless.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from backstay.errors import StoreRefused
from backstay.store.postgres.connection import DeadlineConnection
from backstay.store.postgres.target import Target

_MIGRATIONS = Path(__file__).parent / "migrations"
_SCHEMA = Path(__file__).parent / "schema.sql"

_TABLE = re.compile(r"^CREATE TABLE \{schema\}\.(\w+) \(\n(.*?)\n\)", re.MULTILINE | re.DOTALL)
_INDEX = re.compile(r"^CREATE INDEX \w+ ON \{schema\}\.(\w+) (\([\w, ]+\)(?: WHERE [^;]+)?);", re.MULTILINE)
_FUNCTION = re.compile(
    r"^CREATE FUNCTION \{schema\}\.(\w+)\((.*?)\)\s(?:RETURNS [^$]*?\s)?LANGUAGE (\w+) SET search_path = ([\w, ]+?)"
    r" AS \$\$(.*?)\$\$;",
    re.MULTILINE | re.DOTALL,
)
_LONG_NAMES = {"int": "integer", "int[]": "integer[]", "timestamptz": "timestamp with time zone"}
_NAMED_MAX = 10

OBJECTS = """
WITH ours AS (
  SELECT c.oid, c.relname::text AS name, c.relkind, c.relpersistence,
    c.relrowsecurity OR c.relforcerowsecurity AS secured
  FROM pg_catalog.pg_class c
  WHERE c.relnamespace = '{schema}'::regnamespace::oid AND c.relname = ANY(%(tables)s::name[]))
SELECT 'kind', o.name, '', o.relkind::text || o.relpersistence::text FROM ours o
UNION ALL
SELECT 'columns', o.name, '', pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attname,
    pg_catalog.format_type(a.atttypid, a.atttypmod),
    CASE WHEN a.attcollation = 950::oid THEN 'COLLATE C' WHEN a.attcollation > 100::oid THEN 'COLLATE' END,
    CASE WHEN a.attnotnull THEN 'NOT NULL' END,
    CASE a.attidentity WHEN 'a' THEN 'IDENTITY' WHEN 'd' THEN 'NUMBERED' END,
    'DEFAULT ' || pg_catalog.pg_get_expr(d.adbin, d.adrelid)), ', ' ORDER BY a.attnum)
  FROM ours o JOIN pg_catalog.pg_attribute a ON a.attrelid = o.oid AND a.attnum > 0::int2 AND NOT a.attisdropped
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
  GROUP BY o.name
UNION ALL
SELECT CASE WHEN i.indisunique OR i.indpred IS NOT NULL OR i.indexprs IS NOT NULL THEN 'index' ELSE 'plain index' END,
    o.name, c.relname::text, pg_catalog.concat_ws(' ', CASE WHEN NOT i.indisvalid THEN 'INVALID' END,
    CASE WHEN i.indisunique THEN 'UNIQUE' END,
    (SELECT '(' || pg_catalog.string_agg(coalesce(a.attname::text, 'an expression'), ', ' ORDER BY k.n) || ')'
     FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY k (number, n)
     LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = o.oid AND a.attnum = k.number),
    'WHERE ' || pg_catalog.pg_get_expr(i.indpred, i.indrelid))
  FROM ours o JOIN pg_catalog.pg_index i ON i.indrelid = o.oid JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
UNION ALL
SELECT 'function', p.proname::text, pg_catalog.pg_get_function_identity_arguments(p.oid), pg_catalog.concat_ws(' ',
    l.lanname, CASE WHEN p.prosecdef THEN 'SECURITY DEFINER' END, pg_catalog.array_to_string(p.proconfig, ' '),
    p.prosrc)
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang
  WHERE p.pronamespace = '{schema}'::regnamespace::oid AND p.proname = ANY(%(functions)s::name[])
UNION ALL
SELECT 'constraint', o.name, k.conname::text, NULL FROM ours o
  JOIN pg_catalog.pg_constraint k ON (k.conrelid = o.oid OR k.confrelid = o.oid) AND k.contype IN ('c', 'f', 'x')
UNION ALL
SELECT 'trigger', o.name, t.tgname::text, NULL
  FROM ours o JOIN pg_catalog.pg_trigger t ON t.tgrelid = o.oid AND NOT t.tgisinternal
UNION ALL
SELECT 'rule', o.name, r.rulename::text, NULL FROM ours o JOIN pg_catalog.pg_rewrite r ON r.ev_class = o.oid
UNION ALL
SELECT 'policy', o.name, p.polname::text, NULL FROM ours o JOIN pg_catalog.pg_policy p ON p.polrelid = o.oid
UNION ALL
SELECT 'row security', o.name, '', NULL FROM ours o WHERE o.secured
UNION ALL
SELECT 'inheritance', o.name, '', NULL
  FROM ours o JOIN pg_catalog.pg_inherits h ON h.inhparent = o.oid OR h.inhrelid = o.oid"""


def newest_version() -> int:
    """Return the version that schema.sql creates and that the migrations lead to."""
    return 1 + len(migration_scripts())


def migration_scripts() -> list[str]:
    """Return the migrations to versions 2, 3, …, in order."""
    files = _MIGRATIONS.iterdir() if _MIGRATIONS.is_dir() else ()
    return [file.read_text(encoding="utf-8") for file in sorted(files, key=lambda file: file.name)]


def schema_script() -> str:
    """Return the script that creates the newest version."""
    return _SCHEMA.read_text(encoding="utf-8")


class Expected(NamedTuple):
    """The objects that a script creates, as ``OBJECTS`` describes them."""

    columns: dict[str, str]  # by table
    indexes: dict[str, set[str]]  # by table
    functions: dict[str, tuple[str, str]]  # parameters and the rest, by name


def check_schema(connection: DeadlineConnection, target: Target) -> None:
    """Raise StoreRefused if the tables and functions of the schema are not exactly ours."""
    ours = expected(schema_script())
    bound = {"tables": list(ours.columns), "functions": list(ours.functions)}
    wrong = _differences(ours, connection.every(OBJECTS, bound), target.schema)
    if wrong:
        more = f" and {len(wrong) - _NAMED_MAX} more" if len(wrong) > _NAMED_MAX else ""
        raise StoreRefused(
            f"another program changed schema {target.schema!r}: {'; '.join(wrong[:_NAMED_MAX])}{more}",
            path=target.shown,
            hint="Find the program that changed it, then drop its additions or restore a backup of the whole schema",
        )


@cache
def expected(script: str) -> Expected:
    """Return the objects that a script creates."""
    ours = Expected({}, {}, {})
    for table, body in _TABLE.findall(script):
        lines = [line.strip().rstrip(",") for line in body.splitlines()]
        keys = [line for line in lines if line.startswith(("PRIMARY KEY (", "UNIQUE ("))]
        columns = [line.split(maxsplit=1) for line in lines if line not in keys]
        primary = {name for key in keys if key.startswith("PRIMARY") for name in re.findall(r"\w+", key)}
        ours.columns[table] = ", ".join(_column(name, text, name in primary) for name, text in columns)
        ours.indexes[table] = {"UNIQUE " + key[key.index("(") :] for key in keys}
        ours.indexes[table] |= {f"UNIQUE ({name})" for name, text in columns if re.search("PRIMARY KEY|UNIQUE", text)}
    for table, text in _INDEX.findall(script):
        ours.indexes[table].add(text)
    for name, parameters, language, path, body in _FUNCTION.findall(script):
        taken = [_long(each.partition(" DEFAULT ")[0].split()) for each in parameters.split(",")]
        ours.functions[name] = (", ".join(taken).replace("{schema}.", ""), f"{language} search_path={path} {body}")
    return ours


def _column(name: str, text: str, is_key: bool) -> str:
    words = [name, _long(text.split()[:1])]
    if "COLLATE" in text:
        words.append("COLLATE C")
    if is_key or re.search("NOT NULL|PRIMARY KEY|IDENTITY", text):
        words.append("NOT NULL")
    if "IDENTITY" in text:
        words.append("IDENTITY")
    return " ".join([*words, *re.findall(r"DEFAULT \w+", text)])


def _long(words: list[str]) -> str:
    return " ".join(_LONG_NAMES.get(word, word) for word in words)


def _differences(ours: Expected, found: list[tuple[Any, ...]], schema: str) -> list[str]:
    missing = {f"function {name}" for name in ours.functions}
    missing |= {f"index {text} of {table}" for table, indexes in ours.indexes.items() for text in indexes}
    wrong = []
    for kind, owner, name, text in found:
        if kind == "kind":
            is_ours, what = text == "rp", f"{owner} is not an ordinary table"
        elif kind == "columns":
            is_ours = text.replace('"', "") == ours.columns[owner]
            what = f"the columns of {owner} are not as Backstay makes them"
        elif kind == "function":
            taken, rest = ours.functions[owner]
            named = name.replace('"', "").replace(f"{schema}.", "")
            is_ours = (named, text) == (taken, rest.replace("{schema}", f'"{schema}"'))
            what = f"function {owner} is not as Backstay makes it"
            missing.discard(f"function {owner}")
        elif kind in ("index", "plain index"):
            shape = re.sub(r"WHERE \((.*)\)$", r"WHERE \1", text.replace('"', ""))
            missing.discard(f"index {shape} of {owner}")
            is_ours = kind == "plain index" or shape.removeprefix("INVALID ") in ours.indexes[owner]
            what = f"index {name} of {owner} does not belong there"
        else:
            is_ours, what = False, f"{kind} {name} of {owner} does not belong there".replace("  ", " ")
        if not is_ours:
            wrong.append(what)
    return [f"{each} is missing" for each in sorted(missing)] + wrong
