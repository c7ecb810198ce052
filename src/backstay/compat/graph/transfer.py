"""Import checkpoints of the graph runtime as ordinary ones, and export them to its form again.

The source is pairs of a trace and a blob, or a directory. A file holds a checkpoint, or a session: a state, the frames
of all steps so far, and a hash. A session has no ids and no times: each of its frames becomes a checkpoint whose id
follows from its content, so that the import can be repeated after the session has grown.

Values that a checkpoint of Backstay has no field for are in its metadata, under ``ORIGINAL``: the nanoseconds, whether
the state was not an object, the cursor of a frame.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress
from backstay.compat.adapter import copied
from backstay.compat.graph.checkpoint import (
    FIELDS,
    CheckpointBlob,
    CheckpointCodec,
    CheckpointId,
    GraphCheckpoint,
    JsonCheckpointCodec,
    parse,
    read_checkpoint,
)
from backstay.compat.importer import Importer, Item, export_checkpoints
from backstay.compat.sessions.checkpoint import check_safe, check_twins
from backstay.compat.upsert import ORIGINAL, RESERVED
from backstay.errors import BackstayError, Conflict, DecodeError, InvalidInput
from backstay.model.checkpoint import EPOCH, MAIN, Checkpoint
from backstay.model.frame import FanOut, Frame, FrameStack, NextNode
from backstay.model.ids import check_id
from backstay.store.atomic import failure, make_directory, write_whole
from backstay.thread.store import Store

_ORDER = "created_at, then the order given; the frames of a session in their own order"
_FRAME_IDS = uuid.UUID("5f1c0f6e-8d7a-5f3b-9f0e-3f6b2a1d7c44")
_NOT_IN_FILES = (
    *("path", "run_id", "iteration", "interrupt", "resume_hint"),
    *("tokens_used", "cost_estimate", "tags", "label", "summary", "writes"),
)


# Importing --------------------------------------------------------------------------------------------------------


def import_blobs(
    source: str | os.PathLike[str] | Iterable[tuple[str, CheckpointBlob]],
    store: Store,
    *,
    graph: str | None = None,
    finished: bool = False,
    codec: CheckpointCodec | None = None,
    progress: Progress | bool | None = None,
) -> ImportReport:
    """Store the content of blobs, or of the files of a directory, as ordinary checkpoints.

    A directory has one directory of JSON files for each trace; a file next to these is a trace of its own. ``graph`` is
    the name of the graph that resumes the runs, once it has a migration from their hash: ``graph.migrate(hash)``. By
    default ``current_node`` is the node to run next; with ``finished`` it is the node that ran last, and the graph's
    edges say what runs next.
    """
    if graph is not None:
        check_id(graph, "graph")
    importer = Importer(store, _ORDER)
    reader = _Reader(importer, graph, finished)
    if isinstance(source, str | os.PathLike):
        for where, trace, path in _files(Path(source), importer):
            try:
                reader.read(trace, where, path.read_bytes())
            except (OSError, BackstayError) as error:
                what = getattr(error, "what", type(error).__name__)
                importer.missing.append(Note(f"is not a checkpoint: {what}", where, trace))
    else:
        decode = codec or JsonCheckpointCodec()
        for number, (trace, blob) in enumerate(source, 1):
            where = f"blob {number}"
            try:
                reader.checkpoint(str(trace), where, decode.deserialize(blob, blob.graph_hash))
            except BackstayError as error:
                importer.missing.append(Note(error.what, where, trace, blob.id))
    reader.found.sort(key=lambda each: each[:2])
    return importer.import_all((item for _, _, item in reader.found), progress)


def _files(root: Path, importer: Importer) -> Iterator[tuple[str, str, Path]]:
    """Yield each JSON file with its trace; note everything else."""
    try:
        found = [(path, path.stem) for path in sorted(root.iterdir()) if not path.is_dir()]
        for folder in sorted(path for path in root.iterdir() if path.is_dir()):
            found += [(path, folder.name) for path in sorted(folder.iterdir())]
    except OSError as error:
        raise failure(error, "list", root) from error
    for path, trace in found:
        if path.suffix == ".json" and path.is_file():
            yield str(path), trace, path
        else:
            importer.notes.append(Note("left out: it is not a .json file", str(path), trace))


@dataclass(slots=True)
class _Reader:
    importer: Importer
    graph: str | None
    finished: bool
    found: list[tuple[datetime, int, Item]] = field(default_factory=list)  # with the time and its nanoseconds

    def read(self, trace: str, where: str, data: bytes) -> None:
        """Add the checkpoints of a file."""
        plain = parse(data)
        if "checkpoint_id" not in plain and "frames" in plain:
            self._session(trace, where, plain)
        else:
            self.checkpoint(trace, where, read_checkpoint(plain))

    def checkpoint(self, trace: str, where: str, checkpoint: GraphCheckpoint) -> None:
        """Add one checkpoint."""
        name, node = str(checkpoint.checkpoint_id), str(checkpoint.current_node)
        values: dict[str, Any] = {
            "graph_hash": checkpoint.graph_hash,
            "created_at": checkpoint.created_at,
            "last_node" if self.finished else "next_node": node or None,
        }
        if self.graph is not None and not node:
            self.importer.notes.append(Note("names no node, so no run can resume here", where, trace, name))
        elif self.graph is not None:
            values |= _position(self.graph, node, self.finished)
        original = {"nanos": checkpoint.nanos} if checkpoint.nanos else {}
        self._add(trace, name, where, checkpoint.state, values, checkpoint.extra, original, checkpoint.nanos)

    def _session(self, trace: str, where: str, plain: dict[str, Any]) -> None:
        """Add a checkpoint for each frame of a session, and one for its state if that differs from the last frame."""
        others = copied(plain, "session")
        stack, state, hash = (others.pop(name, None) for name in ("frames", "state", "graph_hash"))
        if type(stack) is not dict or type(stack.get("frames")) is not list or "state" not in plain:
            raise DecodeError("the session has no state, or its frames are not a list")
        frames = stack["frames"]
        kinds = {"graph_id": str, "node_id": str, "cursor": int}
        for each in frames:
            if (
                type(each) is not dict
                or "state" not in each
                or any(type(each.get(key)) is not kinds[key] for key in kinds)
            ):
                raise DecodeError("a frame of the session has not the fields graph_id, node_id, state and cursor")
        graphs = {frame["graph_id"] for frame in frames}
        if len(graphs) > 1:
            what = "has frames of several graphs, so no run can resume here"
            self.importer.notes.append(Note(what, where, trace))
        if not frames or frames[-1]["state"] != state:
            if frames:
                what = "the session's state differs from its last frame, and is a checkpoint of its own"
                self.importer.notes.append(Note(what, where, trace))
            last = frames[-1] if frames else {"graph_id": "", "node_id": "", "cursor": 0}
            frames.append({**last, "state": state})
        digest = hashlib.sha256(str(trace).encode("utf-8", "surrogatepass"))
        for frame in frames:
            digest.update(json.dumps(frame, sort_keys=True).encode())
            name = str(uuid.uuid5(_FRAME_IDS, digest.hexdigest()))
            values: dict[str, Any] = {"graph_hash": hash, "created_at": EPOCH, "last_node": frame["node_id"] or None}
            graph = self.graph or frame["graph_id"]
            if frame["node_id"] and len(graphs) == 1 and graph:
                values |= _position(graph, frame["node_id"], finished=True)
            original = {"cursor": frame["cursor"], "graph_id": frame["graph_id"]}
            self._add(trace, name, where, frame["state"], values, others, original, 0)

    def _add(
        self,
        trace: str,
        name: str,
        where: str,
        state: Any,
        values: dict[str, Any],
        others: dict[str, Any],
        original: dict[str, Any],
        nanos: int,
    ) -> None:
        if not isinstance(state, dict):
            what = "its state is not an object, so it is kept under the key 'state'"
            self.importer.notes.append(Note(what, where, trace, name))
            state, original = {"state": state}, {**original, "bare": True}
        metadata = {**others, ORIGINAL: original} if original else others
        item = self.importer.saved_item(trace, name, where, _sorted(state), values, metadata)
        self.found.append((values["created_at"], nanos, item))


def _sorted(value: Any) -> Any:
    """Return a value with sorted keys: the program writes them in another order each time, and a store sees that."""
    if type(value) is list:
        return [_sorted(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return value


def _position(graph: str, node: str, finished: bool) -> dict[str, Any]:
    """Return the fields of a checkpoint at which a graph can resume; none if the names are invalid."""
    try:
        following = None if finished else NextNode(node)
        frame = Frame(graph_id=graph, node_id=node, last_node=node if finished else None, continuation=following)
    except InvalidInput:
        return {}
    return {"graph": graph, "frames": FrameStack((frame,))}


# Exporting --------------------------------------------------------------------------------------------------------


def export_blobs(
    store: Store,
    root: str | os.PathLike[str],
    *,
    finished: bool = False,
    graph_hash: int | None = None,
    threads: Iterable[str] | None = None,
    codec: CheckpointCodec | None = None,
) -> ExportReport:
    """Write each checkpoint of the main branch to ``<root>/<thread>/<id>.json``. The report names what has no room.

    ``current_node`` is the node to run next, or with ``finished`` the node that ran last; it is empty if there is none.
    ``graph_hash`` is written instead of a checkpoint's own: the program that reads the files refuses other hashes.
    A file with the same content stays; one with other content is not replaced.
    """
    encoder = codec or JsonCheckpointCodec()
    names: dict[str, str] = {}

    def write(name: str) -> list[str] | None:
        checkpoint = store.get(name)
        if checkpoint is None:
            return None
        thread = check_safe(checkpoint.thread_id, "thread")
        check_twins(thread, names, "thread")
        names[thread.casefold()] = thread
        made, lost = _blob(checkpoint, finished, graph_hash)
        data = encoder.serialize(made, made.graph_hash).data
        folder = Path(root) / thread
        path = folder / f"{made.checkpoint_id}.json"
        make_directory(folder)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            write_whole(path, data)
        except OSError as error:
            raise failure(error, "read", path) from error
        else:
            if stored != data and (codec is not None or parse(stored) != parse(data)):
                raise Conflict(f"{path} exists with other content", checkpoint=name, hint="Export to another directory")
        return lost

    return export_checkpoints(store, threads, MAIN, write)


def _blob(checkpoint: Checkpoint, finished: bool, graph_hash: int | None) -> tuple[GraphCheckpoint, list[str]]:
    """Return a checkpoint in the form of the files, and what that form cannot hold."""
    original: dict[str, Any] = checkpoint.metadata.get(ORIGINAL, {})
    node, other = ("last_node", "next_node") if finished else ("next_node", "last_node")
    lost = [field for field in (other, *_NOT_IN_FILES) if getattr(checkpoint, field)]
    if lost[:1] == [other] and not getattr(checkpoint, node) and not checkpoint.is_over:
        lost[0] = f"{other}, so current_node is empty: finished={not finished} writes it"
    lost += ["continuation"] if isinstance(checkpoint.continuation, FanOut) else []
    lost += ["frames"] if len(checkpoint.frames) > 1 or any(each.tasks for each in checkpoint.frames) else []
    graph_hash = checkpoint.graph_hash if graph_hash is None else graph_hash
    lost += ["no graph_hash: 0 is written"] if graph_hash is None else []
    lost += [f"metadata.{key}" for key in checkpoint.metadata if key in FIELDS]
    try:
        id = CheckpointId(checkpoint.id)
    except InvalidInput:
        id = CheckpointId(uuid.uuid5(_FRAME_IDS, checkpoint.id))
        lost.append(f"an id that is no UUID: {id} is written")
    made = GraphCheckpoint(
        current_node=getattr(checkpoint, node) or checkpoint.metadata.get(node) or "",
        state=checkpoint.state["state"] if original.get("bare") else dict(checkpoint.state),
        graph_hash=graph_hash or 0,
        checkpoint_id=id,
        created_at=checkpoint.created_at,
        nanos=original.get("nanos", 0),
        extra={key: value for key, value in checkpoint.metadata.items() if not key.startswith(RESERVED)},
    )
    return made, lost
