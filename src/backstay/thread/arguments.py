"""What callers hand in, checked and brought into one form before anything is read or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backstay.errors import InvalidInput
from backstay.model.checkpoint import MAIN, CheckpointMeta, Notes
from backstay.model.fields import STEP_MAX
from backstay.model.ids import check_id
from backstay.store.base import LaneKey

Which = CheckpointMeta | str
"""A checkpoint, given as itself or by its id."""

LOOP_MARK = "backstay.loop"
"""The key of a checkpoint's metadata under which a loop keeps its place; callers cannot set it."""

NOTE_NAMES = frozenset(Notes.__annotations__)


def lane_key(namespace: str, thread: object, branch: object, scope: object) -> LaneKey:
    """Return the checked name of a branch."""
    if scope != "":
        check_id(scope, "scope")
    return LaneKey(namespace, check_id(thread, "thread id"), str(scope), check_id(branch, "branch"))


def fork_target(lane: LaneKey, branch: str | None, to: str | None) -> LaneKey:
    """Return the checked name of the branch that a fork makes."""
    if branch is None and to is None:
        raise InvalidInput(
            "a fork needs a name", hint='Write fork(cp, branch="what-if") or fork(cp, to="another-thread")'
        )
    thread, name = lane.thread if to is None else to, MAIN if branch is None else branch
    return lane_key(lane.namespace, thread, name, lane.scope)


def name_of(checkpoint: Which) -> str:
    """Return the id of a checkpoint given as itself or by its id."""
    if isinstance(checkpoint, CheckpointMeta):
        return checkpoint.id
    return check_id(checkpoint, "checkpoint id")


def check_notes(notes: Notes) -> Notes:
    """Return the notes if all of them are fields of a checkpoint that a caller may set."""
    if not notes.keys() <= NOTE_NAMES:
        unknown = min(notes.keys() - NOTE_NAMES)
        raise InvalidInput(f"a checkpoint has no field called {unknown!r}", hint="Put it into metadata= or the state")
    check_metadata(notes.get("metadata"))
    return notes


def check_metadata(metadata: object) -> None:
    """Raise InvalidInput if a caller's metadata holds a loop's mark, which says what people granted."""
    if isinstance(metadata, Mapping) and LOOP_MARK in metadata:
        raise InvalidInput(f"metadata {LOOP_MARK!r} is written by loops only", hint="Leave it out")


def check_mapping(given: Mapping[str, Any] | None, what: str) -> Mapping[str, Any]:
    """Return a mapping, an empty one for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{what} must be a mapping of keys to values, not {type(given).__name__}")
    return given


def check_step(step: object) -> int:
    """Return a step that every store can compare with."""
    if type(step) is not int:
        raise InvalidInput(f"step must be a whole number, not {type(step).__name__}")
    return max(-1, min(step, STEP_MAX + 1))  # no store counts further, and not every one can take a larger number


def names_of(names: object, what: str) -> tuple[Any, ...]:
    """Return what is given as names; raise InvalidInput unless it is a list or the like."""
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise InvalidInput(f"{what} must be a list of names, not {type(names).__name__}", hint=f'Write {what}=["name"]')
    return tuple(names)
