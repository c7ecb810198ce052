"""Where threads come from in these tests: real files of SqliteSaver and real tables of PostgresSaver."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.sqlite import SqliteSaver
from psycopg import sql
from psycopg.rows import dict_row

from backstay.testing.postgres import PostgresServer

TABLES = {"sqlite": ("checkpoints", "writes", "value"), "postgres": ("checkpoints", "checkpoint_writes", "blob")}


@dataclass
class Origin:
    """A saver of LangGraph's own, what names it for an import, and a way to change its rows behind its back."""

    kind: str
    where: str
    saver: BaseCheckpointSaver[Any]
    connection: Any = field(repr=False)

    def execute(self, query: str, *values: Any) -> list[Any]:
        """Run a statement with ``?`` for values; ``{writes}`` and ``{value}`` are the names that the kind has."""
        _, writes, value = TABLES[self.kind]
        text = query.format(writes=writes, value=value)
        if self.kind == "postgres":
            cursor = self.connection.execute(text.replace("?", "%s"), values)
            return [tuple(row.values()) for row in cursor.fetchall()] if cursor.description else []
        with self.connection:
            return list(self.connection.execute(text, values))

    def put(self, thread: str, values: dict[str, Any], parent: Any = None, step: int = 0, **more: Any) -> Any:
        """Store a checkpoint with these values and return its config."""
        checkpoint = {**empty_checkpoint(), "channel_values": values, **more}
        checkpoint.setdefault("channel_versions", {})
        if not checkpoint["channel_versions"]:
            checkpoint["channel_versions"] = dict.fromkeys(values, checkpoint["id"])
        config = parent or {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        metadata: Any = {"source": "loop", "step": step, "parents": {}}
        return self.saver.put(config, checkpoint, metadata, checkpoint["channel_versions"])  # type: ignore[arg-type]


@contextmanager
def sqlite_origin(path: Path, serde: SerializerProtocol | None = None) -> Iterator[Origin]:
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        saver = SqliteSaver(connection, serde=serde)
        saver.setup()
        yield Origin("sqlite", str(path), saver, connection)


@contextmanager
def postgres_origin(server: PostgresServer, serde: SerializerProtocol | None = None) -> Iterator[Origin]:
    schema = f"stock_{uuid.uuid4().hex}"
    name = sql.Identifier(schema)
    url = server.url(options=f"-csearch_path={schema}")
    with server.connect() as admin:
        admin.execute(sql.SQL("create schema {}").format(name))
        with psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row) as connection:
            saver = PostgresSaver(connection, serde=serde)
            saver.setup()
            yield Origin("postgres", url, saver, connection)
        admin.execute(sql.SQL("drop schema {} cascade").format(name))
