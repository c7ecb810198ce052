"""From what a caller hands in to an encoded change. Pure, and first: what cannot be stored is refused here."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backstay.errors import EncodeError, InvalidInput
from backstay.model.checkpoint import Notes
from backstay.model.frame import FrameStack
from backstay.model.ids import check_id
from backstay.pieces.body import BYTES, LIST, TEXT, Body, to_body
from backstay.pieces.manifest import FRAMES, PATH, RUN, Key
from backstay.pieces.tip import Change, Tip
from backstay.thread.arguments import names_of
from backstay.thread.frames import shorten

KEYS_MAX = 10_000
KEY_LENGTH_MAX = 4096

_GROWING = {LIST: "a list", TEXT: "text", BYTES: "bytes"}


def check_state(state: object) -> None:
    """Raise InvalidInput unless the state is a mapping."""
    if not isinstance(state, Mapping):
        raise InvalidInput(
            f"a state is a mapping of names to values, not {type(state).__name__}",
            hint='Wrap it: thread.save({"value": …})',
        )


def state_change(
    state: Mapping[str, Any], notes: Notes, tip: Tip | None, items: Mapping[str, list[Any]] | None
) -> Change:
    """Return the change that makes the state exactly this; of lists known as ``items`` the prefix is trusted."""
    change = Change()
    for key, value in state.items():
        _check_key(key)
        grown = _grown(tip, items, key, value)
        if grown is not None:
            change.append[key] = grown
        else:
            change.put[key] = to_body(value, f"state.{key}")
    _add_system(change, notes)
    if len(state) > KEYS_MAX:
        raise EncodeError(f"a state can have at most {KEYS_MAX} keys, not {len(state)}", hint="Nest them in a dict")
    order: list[Key] = [*state, *(key for key in change.put if isinstance(key, int))]
    change.order = order
    if tip is not None:
        change.delete = {key for key in tip.lives if key not in state and key not in change.put}
    return change


def append_change(
    append: Mapping[str, Any],
    put: Mapping[str, Any],
    delete: Iterable[str],
    notes: Notes,
    tip: Tip,
    carry: bool = False,
) -> Change:
    """Return the change that extends lists (or text, or bytes), replaces keys and removes keys.

    Frames and path belong to one position: they go unless given again, or carried over with a copied position.
    """
    change = Change()
    for key, value in append.items():
        _check_key(key)
        body = to_body(value, f"append.{key}")
        if body.kind not in _GROWING:
            raise InvalidInput(
                f"append.{key} must be a list, text or bytes to extend with, not {type(value).__name__}",
                path=f"append.{key}",
                hint=f"Write append={{{key!r}: [item]}}, or replace the value with set=",
            )
        _check_grows(tip, key, body)
        change.append[key] = body
    for key, value in put.items():
        _check_key(key)
        if key in change.append:
            raise InvalidInput(f"state.{key} is both extended and replaced", path=f"state.{key}")
        change.put[key] = to_body(value, f"state.{key}")
    for key in delete:
        _check_key(key)
        if key in change.append or key in change.put:
            raise InvalidInput(f"state.{key} is both changed and deleted", path=f"state.{key}")
        if key not in tip.lives:
            raise InvalidInput(f"state.{key} cannot be deleted: it is not in the state", path=f"state.{key}")
        change.delete.add(key)
    if notes:
        _add_system(change, notes)
    if not carry:
        change.delete |= {key for key in tip.lives if isinstance(key, int) and key not in change.put}
    return change


@dataclass(slots=True)
class StepChange:
    """What one step of an engine changed, known without comparing anything."""

    append: Mapping[str, Any] = field(default_factory=dict)
    put: Mapping[str, Any] = field(default_factory=dict)
    delete: Iterable[str] = ()
    frames: list[dict[str, Any]] = field(default_factory=list)  # plain; the first without its state
    path: list[str] = field(default_factory=list)  # what the path grew by
    new_path: bool = False  # the path begins anew
    run: Mapping[str, Any] | None = None  # None = as it was


def encode_step(step: StepChange) -> Change:
    """Return what a step changed, encoded here and now: what it was made of may go on changing."""
    change = Change()
    if step.run is not None:
        change.put[RUN] = to_body(step.run, "run")  # first: what stays as it is is described in the order of its keys
    for key, value in step.append.items():
        change.append[key] = to_body(value, f"append.{key}")
    for key, value in step.put.items():
        _check_key(key)
        change.put[key] = to_body(value, f"state.{key}")
    change.put[FRAMES] = to_body(shorten(step.frames), "frames")
    if step.new_path:
        change.put[PATH] = to_body(step.path, "path")
    elif step.path:
        change.append[PATH] = to_body(step.path, "path")
    change.delete = set(step.delete)
    return change


def fit_step(change: Change, tip: Tip) -> Change:
    """Return the change if it fits what is there. What is kept beside the state stays, unless it is given anew."""
    for key, body in change.append.items():
        _check_grows(tip, key, body)
    change.delete &= tip.lives.keys()
    return change


def encode_snapshot(state: Mapping[str, Any], step: StepChange) -> Change:
    """Return the change that makes the state exactly this, with what a step keeps beside it, encoded here and now."""
    return encode_step(replace(step, append={}, put=state, delete=()))


def fit_snapshot(change: Change, tip: Tip) -> Change:
    """Return the change if it fits what is there; keys of the state that it does not have go."""
    change.delete = {key for key in tip.lives if isinstance(key, str) and key not in change.put}
    return fit_step(change, tip)


def _check_grows(tip: Tip, key: Key, body: Body) -> None:
    """Raise InvalidInput if what is there cannot be extended by this."""
    live = tip.lives.get(key)
    if live is not None and live.entry.kind != body.kind:
        raise InvalidInput(
            f"state.{key} is not {_GROWING[body.kind]}, so it cannot be extended by {_GROWING[body.kind]}",
            path=f"state.{key}",
            hint="Replace the value with set=",
        )


def _add_system(change: Change, notes: Notes) -> None:
    """Add what is stored beside the state."""
    frames = notes.get("frames")
    if frames is not None and not isinstance(frames, FrameStack):
        raise InvalidInput(f"frames must be a FrameStack, not {type(frames).__name__}")
    if frames:
        change.put[FRAMES] = to_body(frames.to_plain(), "frames")
    path = notes.get("path")
    if path is not None and (nodes := [check_id(node, "path") for node in names_of(path, "path")]):
        change.put[PATH] = to_body(nodes, "path")


def _check_key(key: object) -> None:
    if type(key) is not str:
        raise EncodeError(
            f"a state's keys are text, not {type(key).__name__}",
            path="state",
            hint="Nest such a dictionary under a text key",
        )
    try:
        valid = len(key) <= KEY_LENGTH_MAX and key.encode() is not None
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise EncodeError(
            f"a state's key must be valid text of at most {KEY_LENGTH_MAX} characters",
            path="state",
            hint="Nest such a dictionary under a shorter key",
        )


def _grown(tip: Tip | None, items: Mapping[str, list[Any]] | None, key: str, value: object) -> Body | None:
    """Return the new end of a list whose beginning holds the very same objects as last time, else None."""
    if tip is None or not items or type(value) is not list:
        return None
    known, live = items.get(key), tip.lives.get(key)
    if known is None or live is None or live.entry.kind != LIST or live.entry.count != len(known):
        return None
    if len(value) < len(known) or not all(map(operator.is_, known, value)):
        return None
    return to_body(value[len(known) :], f"state.{key}")
