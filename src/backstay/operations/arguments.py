"""The arguments of callers, checked and encoded before anything is read or written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backstay.errors import EncodeError, InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointFields, CheckpointMeta
from backstay.model.fields import STEP_MAX
from backstay.model.frame import FrameStack
from backstay.model.ids import check_id
from backstay.operations.rows import shorten_frames
from backstay.pieces.body import BYTES, LIST, TEXT, Body, to_body
from backstay.pieces.head_state import Change, HeadState
from backstay.pieces.manifest import FRAMES, PATH, RUN, SYSTEM_NAMES, Key
from backstay.store.base import BranchKey

CheckpointRef = CheckpointMeta | str
"""A checkpoint, or its id."""

LOOP_POSITION = "backstay.loop"
"""The metadata key under which a loop stores its position; callers cannot set it."""

FIELD_NAMES = frozenset(CheckpointFields.__annotations__)
APPEND_NAMES = FIELD_NAMES | {"id", "on"}
"""Keywords of ``thread.append`` that are not keys of the state."""


def branch_key(namespace: str, thread: object, branch: object, scope: object) -> BranchKey:
    """Return the key of a branch, checked."""
    if scope != "":
        check_id(scope, "scope")
    return BranchKey(namespace, check_id(thread, "thread id"), str(scope), check_id(branch, "branch"))


def fork_target(key: BranchKey, branch: str | None, to: str | None) -> BranchKey:
    """Return the key of the branch that a fork makes, checked."""
    thread, name = key.thread if to is None else to, MAIN if branch is None else branch
    return branch_key(key.namespace, thread, name, key.scope)


def id_of(checkpoint: CheckpointRef) -> str:
    """Return the id of a checkpoint."""
    if isinstance(checkpoint, CheckpointMeta):
        return checkpoint.id
    return check_id(checkpoint, "checkpoint id")


def check_field_names(fields: CheckpointFields) -> None:
    """Raise InvalidInput unless callers may set all of these fields."""
    if not fields.keys() <= FIELD_NAMES:
        unknown = min(fields.keys() - FIELD_NAMES)
        import difflib

        similar = difflib.get_close_matches(unknown, FIELD_NAMES, 1)
        hint = f"Did you mean {similar[0]!r}?" if similar else "Put it into metadata= or the state"
        raise InvalidInput(f"a checkpoint has no field called {unknown!r}", hint=hint)
    check_metadata(fields.get("metadata"))


def check_metadata(metadata: object) -> None:
    """Raise InvalidInput if a caller's metadata has a loop's position, which includes what people approved."""
    if isinstance(metadata, Mapping) and LOOP_POSITION in metadata:
        raise InvalidInput(f"only loops may write the metadata key {LOOP_POSITION!r}", hint="Leave it out")


def check_mapping(given: Mapping[str, Any] | None, what: str) -> Mapping[str, Any]:
    """Return a mapping, an empty one for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidInput(
            f"{what} must be a mapping of keys to values, not {type(given).__name__}", hint=await_hint(given)
        )
    return given


def await_hint(value: object, otherwise: str | None = None) -> str | None:
    """Return what to do about a value that does not fit: await it, if it is a coroutine."""
    return "It was not awaited: write await before the call" if hasattr(type(value), "__await__") else otherwise


def split_append(
    append: Mapping[str, Any] | None, keywords: dict[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return what ``append`` extends, and its other keywords. A list whose name is no other argument is extended."""
    extend = check_mapping(append, "append")
    lists = {name: value for name, value in keywords.items() if name not in APPEND_NAMES and isinstance(value, list)}
    for name in lists.keys() & extend.keys():
        raise InvalidInput(f"state.{name} is extended twice: in the mapping and as a keyword", path=f"state.{name}")
    others = {name: value for name, value in keywords.items() if name not in lists}
    return {**extend, **lists}, others


def check_step(step: object) -> int:
    """Return a step within the range that every store can compare."""
    if type(step) is not int:
        raise InvalidInput(f"step must be a whole number, not {type(step).__name__}")
    return max(-1, min(step, STEP_MAX + 1))


def names_of(names: object, what: str) -> tuple[Any, ...]:
    """Return the names as a tuple; raise InvalidInput unless they are a list or another iterable."""
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise InvalidInput(f"{what} must be a list of names, not {type(names).__name__}", hint=f'Write {what}=["name"]')
    return tuple(names)


KEYS_MAX = 10_000
KEY_LENGTH_MAX = 4096

_GROWING = {LIST: "a list", TEXT: "text", BYTES: "bytes"}


def check_state(state: object) -> None:
    """Raise InvalidInput unless the state is a mapping."""
    if not isinstance(state, Mapping):
        raise InvalidInput(
            f"a state must be a mapping of names to values, not {type(state).__name__}",
            hint=await_hint(state, 'Wrap it: thread.save({"value": …})'),
        )


def state_change(
    state: Mapping[str, Any],
    fields: CheckpointFields,
    head_state: HeadState | None,
    items: Mapping[str, list[Any]] | None,
) -> Change:
    """Return the change to exactly this state. A list that starts with the same ``items`` counts as extended."""
    change = Change()
    for key, value in state.items():
        if type(key) is not str or len(key) > KEY_LENGTH_MAX or not key.isascii():
            check_key(key)
        grown = _grown_list(head_state, items, key, value) if items and head_state is not None else None
        if grown is not None:
            change.append[key] = grown
        else:
            change.put[key] = to_body(value, f"state.{key}")
    if len(state) > KEYS_MAX:
        raise _too_many_keys(len(state))
    if fields:
        _add_system(change, fields)
    change.order = [*state, *(key for key in SYSTEM_NAMES if key in change.put)]
    if head_state is not None:
        change.delete = {key for key in head_state.values if key not in state and key not in change.put}
    return change


def append_change(
    append: Mapping[str, Any],
    put: Mapping[str, Any],
    delete: Iterable[str],
    fields: CheckpointFields,
    head_state: HeadState,
    carry: bool = False,
) -> Change:
    """Return the change that extends lists (or text, or bytes), replaces keys and removes keys.

    Frames and path belong to one position: they are deleted unless given again or copied with the position (``carry``).
    """
    change = Change()
    for key, value in append.items():
        body = to_body(value, f"append.{key}")
        stored = head_state.values.get(key)
        # A single comparison if everything fits, because an append must be fast.
        fits = body.kind in _GROWING and (stored is None or stored.entry.kind == body.kind)
        if not fits or type(key) is not str or len(key) > KEY_LENGTH_MAX or not key.isascii():
            _check_append(head_state, key, value, body)
        change.append[key] = body
    for key, value in put.items():
        check_key(key)
        if key in change.append:
            raise InvalidInput(f"state.{key} is both extended and replaced", path=f"state.{key}")
        change.put[key] = to_body(value, f"state.{key}")
    for key in delete:
        check_key(key)
        if key in change.append or key in change.put:
            raise InvalidInput(f"state.{key} is both changed and deleted", path=f"state.{key}")
        if key not in head_state.values:
            raise InvalidInput(f"state.{key} cannot be deleted: it is not in the state", path=f"state.{key}")
        change.delete.add(key)
    if fields:
        _add_system(change, fields)
    if not carry:
        change.delete |= (SYSTEM_NAMES.keys() & head_state.values.keys()) - change.put.keys()
    _check_count(change, head_state)
    return change


@dataclass(slots=True)
class StepChange:
    """The changes of one step of an engine, known without comparing anything."""

    append: Mapping[str, Any] = field(default_factory=dict)
    put: Mapping[str, Any] = field(default_factory=dict)
    delete: Iterable[str] = ()
    frames: list[dict[str, Any]] = field(default_factory=list)  # plain; the first without its state
    path: list[str] = field(default_factory=list)  # what the path grew by
    new_path: bool = False  # the path starts again
    run: Mapping[str, Any] | None = None  # None = unchanged


def encode_step(step: StepChange) -> Change:
    """Return the change of a step, encoded now, because its values may change later."""
    change = Change()
    if step.run is not None:
        # The run comes first: it hardly ever changes, so it moves to the base, and the keys of a base come first.
        change.put[RUN] = to_body(step.run, "run")
    for key, value in step.append.items():
        change.append[key] = to_body(value, f"append.{key}")
    for key, value in step.put.items():
        check_key(key)
        change.put[key] = to_body(value, f"state.{key}")
    change.put[FRAMES] = to_body(shorten_frames(step.frames), "frames")
    if step.new_path:
        change.put[PATH] = to_body(step.path, "path")
    elif step.path:
        change.append[PATH] = to_body(step.path, "path")
    change.delete = set(step.delete)
    return change


def check_step_fits(change: Change, head_state: HeadState) -> Change:
    """Return the change if it fits the stored state. Frames, path and run stay unless the change replaces them."""
    for key, body in change.append.items():
        _check_grows(head_state, key, body)
    change.delete &= head_state.values.keys()
    _check_count(change, head_state)
    return change


def encode_snapshot(state: Mapping[str, Any], step: StepChange) -> Change:
    """Return the change to exactly this state, with the frames, path and run of a step, encoded now."""
    return encode_step(replace(step, append={}, put=state, delete=()))


def check_snapshot_fits(change: Change, head_state: HeadState) -> Change:
    """Return the change if it fits the stored state; other keys of the state are deleted."""
    change.delete = {key for key in head_state.values if isinstance(key, str) and key not in change.put}
    return check_step_fits(change, head_state)


def _check_count(change: Change, head_state: HeadState) -> None:
    """Raise EncodeError if the state would have too many keys after the change."""
    if len(head_state.values) + len(change.put) + len(change.append) > KEYS_MAX:
        keys = {*head_state.values, *change.put, *change.append} - change.delete - SYSTEM_NAMES.keys()
        if len(keys) > KEYS_MAX:
            raise _too_many_keys(len(keys))


def _too_many_keys(count: int) -> EncodeError:
    return EncodeError(
        f"a state can have at most {KEYS_MAX} keys, not {count}", path="state", hint="Nest them in a dict"
    )


def _check_append(head_state: HeadState, key: object, value: object, body: Body) -> None:
    """Raise InvalidInput or EncodeError unless the stored value of a valid key can be extended by this one."""
    check_key(key)
    if body.kind not in _GROWING:
        raise InvalidInput(
            f"append.{key} must be a list, text or bytes to extend with, not {type(value).__name__}",
            path=f"append.{key}",
            hint=f"Write append={{{key!r}: [item]}}, or replace the value with set=",
        )
    _check_grows(head_state, str(key), body)


def _check_grows(head_state: HeadState, key: Key, body: Body) -> None:
    """Raise InvalidInput if the stored value cannot be extended by this one."""
    stored = head_state.values.get(key)
    if stored is not None and stored.entry.kind != body.kind:
        raise InvalidInput(
            f"state.{key} is not {_GROWING[body.kind]}, so it cannot be extended by {_GROWING[body.kind]}",
            path=f"state.{key}",
            hint="Replace the value with set=",
        )


def _add_system(change: Change, fields: CheckpointFields) -> None:
    """Add the frames and the path."""
    frames = fields.get("frames")
    if frames is not None and not isinstance(frames, FrameStack):
        raise InvalidInput(f"frames must be a FrameStack, not {type(frames).__name__}")
    if frames:
        change.put[FRAMES] = to_body(frames.to_plain(), "frames")
    path = fields.get("path")
    if path is not None and (nodes := [check_id(node, "path") for node in names_of(path, "path")]):
        change.put[PATH] = to_body(nodes, "path")


def check_key(key: object) -> str:
    """Return a key of a state, checked."""
    if type(key) is not str:
        raise EncodeError(
            f"the keys of a state must be text, not {type(key).__name__}",
            path="state",
            hint="Nest such a dictionary under a text key",
        )
    try:
        valid = len(key) <= KEY_LENGTH_MAX and key.encode() is not None
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise EncodeError(
            f"a key of a state must be valid text of at most {KEY_LENGTH_MAX} characters",
            path="state",
            hint="Nest such a dictionary under a shorter key",
        )
    return key


def _grown_list(head_state: HeadState, items: Mapping[str, list[Any]], key: str, value: object) -> Body | None:
    """Return the new items of a list that starts with the same objects as last time, else None."""
    if type(value) is not list:
        return None
    known, stored = items.get(key), head_state.values.get(key)
    if known is None or stored is None or stored.entry.kind != LIST or stored.entry.count != len(known):
        return None
    if len(value) < len(known) or not all(map(operator.is_, known, value)):
        return None
    path = f"state.{key}"
    try:
        return to_body(value[len(known) :], path)
    except EncodeError:
        to_body(value, path)  # raises the error with the right index in its path
        raise
