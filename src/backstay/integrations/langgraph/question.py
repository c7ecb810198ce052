"""A question of a LangGraph task as a row shows it, the answer it got, and the way back to LangGraph.

Its row is named by the id that LangGraph gave the question, and by its payload if that is plain: asked again with
another payload it is another question. With a serializer that encrypts, payload and answer are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from langgraph.types import Command
from langgraph.types import Interrupt as Asked

from backstay.codec import encode
from backstay.errors import InvalidInput
from backstay.integrations.langgraph.names import Place
from backstay.model.decision import Decision, DecisionKind
from backstay.model.ids import ID_LENGTH_MAX
from backstay.model.interrupt import PROMPT_LENGTH_MAX, QUESTION_BYTES_MAX, Interrupt, InterruptKind
from backstay.thread.interrupts import RESERVED, InterruptRecord, reserved_id

INTERRUPT, RESUME = "__interrupt__", "__resume__"
CONTROL = frozenset((INTERRUPT, RESUME, "__error__", "__error_source_node__"))
"""Channels that say what became of a task; a write to any other one is a result."""

TEXT_LENGTH_MAX, ITEMS_MAX, DEPTH_MAX = 100_000, 10_000, 32
"""What of a payload is shown; the whole of it stays in LangGraph's own writes."""

_SHOWN_BYTES_MAX = QUESTION_BYTES_MAX // 2
"""A payload or an answer that is still larger is left out of the row."""

_REPR_LENGTH_MAX = 200
_WHAT = "langgraph"
_PREFIX = f"{RESERVED}{_WHAT}:"
_PULLED = "~__pregel_pull, "
_GONE_ON = "the thread went on without an answer that is known here"
_UNKNOWN = "answered through LangGraph, which did not tell with what"
_LARGE = "answered through LangGraph; the answer is too large for a list"
_ENCRYPTED = "answered through LangGraph; the answer is encrypted"

Writes = Iterable[tuple[str, Any]]


class Spot(NamedTuple):
    """A checkpoint by LangGraph's names."""

    place: Place
    checkpoint_id: str


def is_langgraph(interrupt: str) -> bool:
    """Tell by the id whether a recorded interrupt is one of LangGraph's."""
    return interrupt.startswith(_PREFIX)


@dataclass(slots=True)
class Question:
    """One question; ``number`` is how many answers its task had when it asked."""

    place: tuple[str, ...]  # what tells it from every other question of the store
    proof: bytes  # its payload, if that is the same before and after it was stored
    asked: Interrupt
    number: int = 0
    finished: bool = False  # its task has a result already
    answer: Decision | None = None  # if that is known before it is closed
    row: str | None = None  # its id in the store, once it is there

    def name(self, turn: int) -> str:
        """Return the id of its row; a question that is asked again after it was answered begins another turn."""
        return reserved_id(_WHAT, (*self.place, str(turn)), self.proof)


def questions(
    spot: Spot,
    task_id: str,
    task_path: str,
    writes: Writes,
    *,
    encrypted: bool = False,
    outer: Mapping[str, str] | None = None,
) -> list[Question]:
    """Return what a task asks with these writes; nothing if they hold no question."""
    found: list[Asked[Any]] = []
    answers: Sequence[Any] = ()
    for channel, value in writes:
        if channel == INTERRUPT:
            found += [each for each in _listed(value) if isinstance(each, Asked)]
        elif channel == RESUME:
            answers = _listed(value)
    made = []
    for index, each in enumerate(found):
        own = _is_own(each.id)
        place = (spot.place.thread, each.id) if own else (*spot.place, str(spot.checkpoint_id), task_id, str(index))
        asked, proof = _shown(each, spot, task_id, task_path, encrypted, outer or {})
        made.append(Question(place, proof, asked, len(answers)))
    return made


def _shown(
    each: Asked[Any], spot: Spot, task_id: str, task_path: str, encrypted: bool, outer: Mapping[str, str]
) -> tuple[Interrupt, bytes]:
    """Return what people are shown, and the payload's bytes if they are the same after it was stored and read."""
    ns = spot.place.ns
    around = [[other, str(outer[other])] for other in sorted(outer) if not other or ns.startswith(f"{other}|")]
    shown: dict[str, Any] = {
        "interrupt_id": str(each.id),
        "checkpoint_ns": ns,
        "task_id": task_id,
        "checkpoints": [*(pair for pair in around if pair[0] != ns), [ns, str(spot.checkpoint_id)]],
    }
    proof, prompt = b"", ""
    if encrypted:
        shown["encrypted"] = True
    else:
        plain = _Plain()
        value = plain.of(each.value)
        data = encode(value)
        proof = data if plain.exact else b""
        if len(data) <= _SHOWN_BYTES_MAX:
            shown["value"] = value
        else:
            shown["left_out"] = len(data)
        prompt = _text(each.value, PROMPT_LENGTH_MAX).replace("\0", "") if isinstance(each.value, str) else ""
    kind, node = InterruptKind.USER_REQUEST, _node(task_path)
    return Interrupt(id="-", kind=kind, node=node, payload=shown, prompt=prompt), proof


def _is_own(interrupt_id: object) -> bool:
    """Tell whether an id is one that LangGraph made of the task that asks; others may be given to many."""
    return isinstance(interrupt_id, str) and len(interrupt_id) == 32 and set(interrupt_id) <= set("0123456789abcdef")


def _node(task_path: str) -> str | None:
    """Return the node of a task that an edge led to; the paths of others do not name it."""
    name = task_path.removeprefix(_PULLED)
    return name if name != task_path and 0 < len(name) <= ID_LENGTH_MAX and "\0" not in name else None


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


# Plain values -----------------------------------------------------------------------------------------------------


class _Plain:
    """Turns a payload into plain values; ``exact`` if the same comes out of it after it was stored and read."""

    def __init__(self) -> None:
        self.exact = True

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a value as it is shown."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return _text(value, TEXT_LENGTH_MAX)
        if isinstance(value, int) and int(value).bit_length() <= 64:
            return int(value)
        if isinstance(value, float):
            return float(value)
        if depth < DEPTH_MAX and isinstance(value, Mapping):
            items = list(value.items())[:ITEMS_MAX]
            return {_text(str(name), TEXT_LENGTH_MAX): self.of(each, depth + 1) for name, each in items}
        if depth < DEPTH_MAX and isinstance(value, list | tuple):
            return [self.of(each, depth + 1) for each in value[:ITEMS_MAX]]
        self.exact = False
        return _shortened(value)


def _text(value: str, length_max: int) -> str:
    text = str.__str__(value)
    text = text if len(text) <= length_max else text[: length_max - 1] + "…"
    return text.encode(errors="backslashreplace").decode()


def _shortened(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:  # somebody's own __repr__: a question must not fail because it cannot be shown
        shown = f"<{type(value).__name__}>"
    return _text(shown, _REPR_LENGTH_MAX)


# Answers ----------------------------------------------------------------------------------------------------------


def answered(value: Any, encrypted: bool) -> Decision:
    """Return the decision that an answer given through LangGraph is."""
    if encrypted:
        return Decision(kind=DecisionKind.APPROVE, reason=_ENCRYPTED)
    if value is None:
        return Decision(kind=DecisionKind.APPROVE, reason=_UNKNOWN)
    shown = _Plain().of(value)
    if len(encode(shown)) > _SHOWN_BYTES_MAX:
        return Decision(kind=DecisionKind.APPROVE, reason=_LARGE)
    return Decision(kind=DecisionKind.MODIFY, value=shown)


def answer_in(writes: Writes, number: int, encrypted: bool) -> Decision:
    """Return the answer with this number of those that a task has stored, or that it is not known."""
    answers: Sequence[Any] = ()
    for channel, value in writes:
        if channel == RESUME:
            answers = _listed(value)  # the last one holds all
    return answered(answers[number] if number < len(answers) else None, encrypted)


def gone_on(done: bool) -> Decision:
    """Return the decision on a question of a checkpoint that has a successor; ``done`` if its tasks have results."""
    if done:
        return Decision(kind=DecisionKind.APPROVE, reason=_UNKNOWN)
    return Decision(kind=DecisionKind.DEFER, reason=_GONE_ON)


# Going on ---------------------------------------------------------------------------------------------------------


def resume_of(*records: InterruptRecord, approved: Any = True, rejected: Any = False) -> Command[Any]:
    """Return what ``graph.invoke`` is to be given to go on with decisions that were made on these records.

    A modification resumes with its value, an approval with ``approved`` and a rejection with ``rejected``.
    """
    plain = {DecisionKind.APPROVE: approved, DecisionKind.REJECT: rejected}
    values: dict[str, Any] = {}
    for record in records:
        name, decision = interrupt_id_of(record), record.decision
        if decision is None or decision.kind not in (DecisionKind.MODIFY, *plain):
            raise InvalidInput(
                f"{record}: there is nothing to go on with",
                thread=record.thread_id,
                checkpoint=record.checkpoint_id,
                hint="Approve, modify or reject it first, and pass the record that thread.decide(…) returned",
            )
        values[name] = plain.get(decision.kind, decision.value)
    return Command(resume=values)


def interrupt_id_of(record: InterruptRecord) -> str:
    """Return LangGraph's own id of a recorded interrupt."""
    if not isinstance(record, InterruptRecord) or not is_langgraph(record.id):
        raise InvalidInput("this is no interrupt of LangGraph", hint="Pass what saver.interrupts() gave")
    name: str = record.interrupt.payload["interrupt_id"]
    return name
