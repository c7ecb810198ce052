"""Copy workflow checkpoint files into a store, and checkpoints of a store into files.

Imported checkpoints can be used through this package and with ``backstay.open``, and a graph of Backstay with the same
names can resume them. A file names its graph and, if a newer version wrote it, its run. A run becomes a thread; a file
without a run goes into the given thread, or into one of its own, because it is usually all there is of its run. The
files have no order but their creation time: that decides, then the step count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from backstay.bundle.report import ExportReport, ImportReport, Note, Progress
from backstay.compat import upsert
from backstay.compat.adapter import copied
from backstay.compat.importer import Importer, export_checkpoints, put_item
from backstay.compat.sessions.checkpoint import check_safe
from backstay.compat.workflow.checkpoint import END, Checkpoint, InterruptType
from backstay.compat.workflow.files import Files, to_bytes
from backstay.compat.workflow.store import as_dict, draft_of, is_ours
from backstay.errors import BackstayError, EncodeError, StoreError
from backstay.model import checkpoint as model
from backstay.model.checkpoint import MAIN
from backstay.model.frame import End, FanOut, NextNode
from backstay.operations.arguments import names_of
from backstay.thread.access import access_of
from backstay.thread.store import Store

_ORDER = "created_at, then step_count: the files hold nothing else"
_NOT_IN_FILES = (
    "scope",
    "graph_hash",
    "iteration",
    "tokens_used",
    "cost_estimate",
    "summary",
    "metadata",
    "frames",
    "writes",
    "run",
)
_DEPTH_MAX = 127
"""How deep the JSON of a file can be nested so that the old system reads it."""


def import_workflow(
    base: str | os.PathLike[str], store: Store, *, thread: str | None = None, progress: Progress | bool | None = None
) -> ImportReport:
    """Store the checkpoint files of a directory. ``thread`` is for files without a run; None gives each its own."""
    importer = Importer(store, _ORDER)
    found: list[tuple[Path, Checkpoint]] = []
    if not Path(base).is_dir():
        raise StoreError(
            f"{base} is not a directory", path=str(base), hint="Pass the directory of the checkpoint files"
        )
    for entry in Files(Path(base)).scan():
        if entry.checkpoint is None:
            what = "cannot be read" if entry.problem is None else entry.problem.what
            importer.missing.append(Note(what, str(entry.path)))
            continue
        if entry.problem is not None:
            importer.notes.append(Note("has no checksum, so damage cannot be detected", str(entry.path)))
        found.append((entry.path, entry.checkpoint))
    found.sort(key=lambda pair: (pair[1].created_at, pair[1].step_count, pair[1].id))
    items = []
    for path, checkpoint in found:
        try:
            draft = draft_of(checkpoint, checkpoint.run_id or thread or checkpoint.id)
        except BackstayError as error:
            importer.missing.append(Note(f"cannot be stored: {error.what}", str(path), None, checkpoint.id))
            continue
        items.append(put_item(draft, str(path), as_dict))
    return importer.import_all(items, progress)


def export_workflow(
    store: Store, base: str | os.PathLike[str], *, threads: Iterable[str] | None = None
) -> ExportReport:
    """Write the checkpoints of these threads, or of all, as files of a directory.

    ``restore_state`` of the old system works on each file. The report names everything that a file has no place for.
    """
    files = Files(Path(base))
    access = access_of(store)
    names = None if threads is None else names_of(threads, "threads")
    carried: set[str] = set()

    def write(name: str) -> list[str] | None:
        found = upsert.get(access.store, access.services, name)
        if found is None:
            return None
        if is_ours(found.meta):  # it was saved through this interface, and stays as it came
            plain, lost = as_dict(found), [field for field in ("summary", "writes") if getattr(found.checkpoint, field)]
        else:
            plain, lost = _exported(found.checkpoint)
        files.write(check_safe(name, "checkpoint id"), to_bytes(plain))
        if found.meta.interrupt is not None:
            carried.add(found.meta.interrupt.id)
        return lost

    report = export_checkpoints(store, names, "*", write, carried)
    notes = list(report.notes)
    for each in [meta.thread_id for meta in store.threads()] if names is None else names:
        effects = sum(1 for _ in store.thread(each).effects())
        if effects:
            notes.append(Note(f"the files cannot hold effects: {effects} of this thread are left out", "", each))
    return replace(report, notes=tuple(notes))


def _exported(checkpoint: model.Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint of Backstay in the form of the files, and what they cannot hold.

    The old system has four reasons to pause and no other checkpoints. So a checkpoint that is not a pause is written as
    one after the last node, or before the first; ``interrupt`` in the file is then null. The old system ignores that
    key and the later ones.
    """
    lost = [name for name in _NOT_IN_FILES if getattr(checkpoint, name)]
    state, asked = dict(checkpoint.state), checkpoint.interrupt
    pending = checkpoint.pending_action
    if "pending_action" in state and pending is state["pending_action"]:
        del state["pending_action"]
    messages = state.pop("messages", [])
    if not (isinstance(messages, list) and all(map(_is_message, messages))):
        lost.append("messages that the old system cannot read (they are in values.messages)")
        state["messages"], messages = messages, []
    node, following = _current_node(checkpoint)
    if not node:
        targets = following["targets"] if following else ()
        lost.append(f"the nodes that run next in parallel: {', '.join(targets)}" if targets else "the next node")
    extra: dict[str, Any] = {"interrupt": None}
    kind = InterruptType.AFTER_NODE if checkpoint.last_node is not None else InterruptType.BEFORE_NODE
    if asked is not None:
        kind = asked.kind
        try:
            payload = copied(asked.payload, "payload")
        except EncodeError as error:
            payload = None
            lost.append(f"the interrupt's {error.what}")
        extra["interrupt"] = {"id": asked.id, "node": asked.node, "payload": payload, "prompt": asked.prompt}
        if asked.answer is not None:
            extra["interrupt"]["answer"] = dict(asked.answer)
    later = {  # what later versions of the old system know, under their names
        "continuation": following,
        "parent_checkpoint_id": checkpoint.parent_id,
        "label": checkpoint.label,
        "tags": list(checkpoint.tags),
        "branch": None if checkpoint.branch == MAIN else checkpoint.branch,
    }
    snapshot = {"values": state, "messages": messages, "current_node": checkpoint.last_node}
    for path, why in _unreadable({"state_snapshot": snapshot, "pending_action": pending}, "", 1):
        lost.append(f"{model.shorten(path.removeprefix('.'), 80)}: {why}")
    plain = Checkpoint(
        id=checkpoint.id,
        graph_name=checkpoint.graph or checkpoint.thread_id,
        current_node=node,
        state_snapshot=snapshot,
        path=list(checkpoint.path),
        step_count=checkpoint.frames.frames[0].steps if checkpoint.frames else checkpoint.step,
        created_at=checkpoint.created_at,
        pending_action=pending,
        interrupt_type=kind,
        run_id=checkpoint.run_id,
        extra={**extra, **{name: value for name, value in later.items() if value}},
    ).to_dict()
    return plain, lost


def _current_node(checkpoint: model.Checkpoint) -> tuple[str, dict[str, Any] | None]:
    """Return the node to run next, and the continuation of later versions; "" if it is not one node, or not known.

    A run of ours that paused after a node chooses the next one when it continues. It is known if there is no choice.
    """
    if checkpoint.next_node is not None:
        return checkpoint.next_node, None
    following = checkpoint.continuation
    if following is None and checkpoint.frames:
        edges = checkpoint.run.get("shape", {}).get("edges", {}).get(checkpoint.last_node, ())
        if len(edges) == 1 and edges[0]["kind"] == "to" and edges[0]["when"] is None:
            node: str = edges[0]["targets"][0]
            return node, None
        if len(edges) == 1 and edges[0]["kind"] == "together" and edges[0]["when"] is None:
            following = FanOut(tuple(edges[0]["targets"]), edges[0]["join"])
    match following:
        case NextNode(node=node):
            return node, None
        case FanOut(targets=targets, join=join):
            return "", {"kind": "fan_out", "targets": list(targets), "then": join or END}
        case End():
            return END, {"kind": "end"}
    return "", None


def _is_message(message: object) -> bool:
    """Return whether the old system can read a message and understands all of it that it knows."""
    if not isinstance(message, dict) or type(message.get("role", "")) is not str:
        return False
    if any(type(message.get(name)) not in (str, NoneType) for name in ("name", "tool_call_id", "reasoning_content")):
        return False
    content, calls = message.get("content"), message.get("tool_calls")
    is_text = content is None or type(content) is str
    if not is_text and not (
        isinstance(content, list) and all(any(_has(part, wanted) for wanted in _PARTS) for part in content)
    ):
        return False
    return calls is None or (isinstance(calls, list) and all(_has(call, _CALL) for call in calls))


_CALL = {"id": str, "type": str, "function": {"name": str, "arguments": str}}
_PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": str},
    {"type": "image_url", "image_url": {"url": str}},
    {"type": "file", "name": str, "content": str},
]


def _has(value: object, wanted: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has these keys with these values, or values of these types."""
    return isinstance(value, dict) and all(
        _has(value.get(key), kind) if isinstance(kind, dict) else kind in (type(value.get(key)), value.get(key))
        for key, kind in wanted.items()
    )


def _unreadable(value: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the places of values that the old system cannot read as they are."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        yield path, "a whole number of more than 64 bits, which the old system rounds"
    if isinstance(value, dict | list):
        if depth > _DEPTH_MAX:
            yield path, f"the file is nested more than {_DEPTH_MAX} levels deep, so the old system cannot load it"
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unreadable(item, f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]", depth + 1)
