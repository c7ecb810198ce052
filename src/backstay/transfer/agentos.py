"""Checkpoints of a conversation backend: dictionaries, JSON lines, or its SQLite table.

What is imported can be used through ``compat.backend`` and with ``backstay.open`` alike. A record without its required
keys, with an empty id or a negative step is named in the report and passed over; keys that nobody knows are kept.

Order: a parent comes before its children; among the rest the step decides, then the place in the source. Row numbers of
the table are not trusted for more than that: a row that was replaced got a new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import apsw

from backstay.compat import backend as face
from backstay.compat.record import Checkpoint, check
from backstay.errors import BackstayError, DecodeError, StoreRefused
from backstay.store.atomic import failure
from backstay.thread.store import Store
from backstay.transfer.intake import Arrival, Intake, grouped, putting
from backstay.transfer.progress import Progress
from backstay.transfer.report import ImportReport

_ORDER = "a parent before its children, then the step, then the place in the source"
_SQLITE = b"SQLite format 3\0"

_COLUMNS = {
    "thread_id": ("thread_id", "thread"),
    "checkpoint_id": ("checkpoint_id",),
    "parent_checkpoint_id": ("parent_checkpoint_id", "parent_id", "parent"),
    "step": ("step",),
    "created_at": ("created_at",),
    "tags": ("tags",),
    "summary": ("summary",),
}
_PAYLOAD = {
    "messages": ("messages", "messages_json"),
    "state": ("state", "state_json"),
    "tools_result": ("tools_result", "tools", "tool_results"),
    "next_node": ("next_node",),
}
_JSON = ("tags", "messages", "state", "tools_result")
_ROW_NUMBERS = ("id", "rowid")
_NEEDED = ("thread_id", "checkpoint_id", "step")


class _Found(NamedTuple):
    thread: str
    id: str
    parent: str | None
    step: int
    arrival: Arrival


def import_agentos(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    store: Store,
    *,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store checkpoints from dictionaries, a file of JSON lines, or a SQLite file with the backend's table."""
    intake = Intake(store, _ORDER)
    found: list[_Found] = []
    for where, plain in _records(source, intake):
        try:
            wire = check(Checkpoint.from_dict(plain))
            draft = face._draft(wire)
        except (BackstayError, TypeError) as error:
            intake.lacks(where, f"is no checkpoint: {getattr(error, 'what', error)}")
            continue
        arrival = Arrival(draft.id, where, putting(face._FACE, draft, face._wire))
        found.append(_Found(draft.thread, draft.id, draft.parent, draft.step, arrival))
    return intake.take_all(grouped((each.thread, each.arrival) for each in _ordered(found)), progress)


def _ordered(found: list[_Found]) -> Iterator[_Found]:
    """Yield parents before their children, else by step and then as given. A ring of parents is taken as it comes."""
    waiting = {each.id: each for each in sorted(found, key=lambda each: each.step)}
    while waiting:
        each = next(iter(waiting.values()))
        line = [each]
        while each.parent in waiting and each.parent not in {other.id for other in line}:
            each = waiting[each.parent]
            line.append(each)
        for member in reversed(line):
            yield waiting.pop(member.id)


def _records(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], intake: Intake
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(source, str | os.PathLike):
        yield from ((f"record {number}", plain) for number, plain in enumerate(source, 1))
        return
    path = Path(source)
    try:
        with path.open("rb") as file:
            is_table = file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise failure(error, "read", path) from error
    yield from _rows(path, intake) if is_table else _lines(path, intake)


def _lines(path: Path, intake: Intake) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                plain = _parsed(line)
            except DecodeError as error:
                intake.lacks(where, error.what)
                continue
            yield where, plain


def _rows(path: Path, intake: Intake) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of the backend's table; the file is only read."""
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            table, columns = _table(connection, path)
            quoted = '"' + table.replace('"', '""') + '"'
            for number, row in enumerate(connection.execute(f"SELECT * FROM {quoted} ORDER BY rowid"), 1):
                where = f"{path}: row {number} of {table}"
                try:
                    yield where, _plain(dict(zip(columns, row, strict=True)))
                except DecodeError as error:
                    intake.lacks(where, error.what)
        finally:
            connection.close()
    except apsw.Error as error:
        raise StoreRefused(f"{path} cannot be read as a SQLite file: {error}", path=str(path)) from error


def _table(connection: apsw.Connection, path: Path) -> tuple[str, list[str]]:
    names = [str(name) for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for name in sorted(names, key=lambda name: name != "checkpoints"):
        columns = [str(column) for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))]
        if all(any(known in columns for known in _COLUMNS[needed]) for needed in _NEEDED):
            return name, columns
    raise StoreRefused(
        f"{path} has no table of checkpoints",
        path=str(path),
        hint="Looked for one with the columns thread_id, checkpoint_id and step",
    )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in the nested form; a column that is not known is kept in the metadata."""
    metadata = _taken(row, _COLUMNS)
    payload = _taken(row, _PAYLOAD)
    others = {key: value for key, value in row.items() if key not in _ROW_NUMBERS and value is not None}
    return {"metadata": {**others, **metadata}, **payload}


def _taken(row: dict[str, Any], columns: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for field, names in columns.items():
        name = next((name for name in names if name in row), None)
        value = None if name is None else row.pop(name)
        if value is None:
            continue
        taken[field] = _parsed(value) if field in _JSON and isinstance(value, str | bytes) else value
    return taken


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"is not readable as JSON: {type(error).__name__}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and infinities are no JSON
