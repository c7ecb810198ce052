"""A checkpoint that is about to be put: everything that may still change is encoded here, in the caller's own thread.

LangGraph hands over live objects and goes on with them. So what a put needs of them is taken before anything waits: a
channel that has changed is encoded, one that has not (same version as in the parent) is not even looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from backstay.integrations.langgraph.description import notes_for, run_and_marks
from backstay.integrations.langgraph.desk import Desk, Known, unchanged
from backstay.integrations.langgraph.messages import KnownMessages
from backstay.integrations.langgraph.names import Place
from backstay.integrations.langgraph.sealed import SEALED_LIST, SealedList, SealedPrints, encrypting
from backstay.integrations.langgraph.values import LIST, dump, to_body
from backstay.model.checkpoint import Notes
from backstay.model.ids import check_id
from backstay.pieces.body import Body
from backstay.pieces.body import to_body as encode_own
from backstay.pieces.manifest import MARKS, RUN, Key
from backstay.pieces.tip import Change, Live, Tip


class News(Protocol):
    """What becomes of one channel."""

    def into(self, change: Change, key: str, live: Live | None, is_parents: bool) -> None:
        """Add it to the change of a state in which the channel is ``live``: the parent's value, or not at all that."""


@dataclass(slots=True)
class Whole:
    """A value that is compared with what is stored, whatever that is."""

    body: Body

    def into(self, change: Change, key: str, live: Live | None, is_parents: bool) -> None:
        """Replace the value; what it has in common with the stored one is found by comparing bytes."""
        change.put[key] = self.body


@dataclass(slots=True)
class Grown:
    """A list whose beginning is known to be stored."""

    before: int
    tail: Body
    whole: Later  # if it is not put on the parent after all, but in the place of one that has its id

    def into(self, change: Change, key: str, live: Live | None, is_parents: bool) -> None:
        """Append what is new."""
        if live is None or not is_parents:
            self.whole.into(change, key, live, is_parents)
            return
        assert (live.entry.kind, live.entry.count) == (LIST, self.before)
        if self.tail.count:
            change.append[key] = self.tail


@dataclass(slots=True)
class Later:
    """A channel that is said not to have changed: encoded only if the parent turns out not to have it."""

    serde: SerializerProtocol
    value: Any

    def into(self, change: Change, key: str, live: Live | None, is_parents: bool) -> None:
        """Encode it now."""
        _encoded(self.serde, key, self.value).into(change, key, live, is_parents)


@dataclass(slots=True)
class Prepared:
    """One put, ready to be stored."""

    place: Place
    checkpoint_id: str
    parent: str | None
    changed: Mapping[str, Any]
    versions: dict[str, Any]
    notes: Notes
    run: Body
    marks: Body
    serde: SerializerProtocol
    begins: bool  # it is the first one of its namespace, as far as the run knows
    news: dict[str, News] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return our id of the checkpoint."""
        return self.place.name(self.checkpoint_id)

    @property
    def parent_name(self) -> str | None:
        """Return our id of its parent."""
        return None if self.parent is None else self.place.name(self.parent)

    def needed(self, tip: Tip) -> list[Key]:
        """Return the keys whose stored bytes must be at hand to know the change."""
        return [
            key
            for key, live in tip.lives.items()
            if key in (RUN, MARKS) or (live.entry.kind == SEALED_LIST and key in self.news)
        ]

    def change(self, tip: Tip, versions: Mapping[str, Any] | None) -> Change:
        """Return what makes the parent's state, with these channel versions, the one that was put; None: any other."""
        change = Change(put={RUN: self.run, MARKS: self.marks})
        same = set() if versions is None else unchanged(self.versions, versions, self.changed)
        for channel, news in self.news.items():
            live = tip.lives.get(channel)
            if live is None or channel not in same:
                news.into(change, channel, live, versions is not None)
        change.delete = {key for key in tip.lives if key not in self.news and key not in change.put}
        return change


def prepare(
    place: Place,
    checkpoint: Checkpoint,
    parent: str | None,
    metadata: Mapping[str, Any],
    new_versions: Mapping[str, Any],
    serde: SerializerProtocol,
    desk: Desk | None,
    begins_thread: bool = False,
) -> Prepared:
    """Encode what a put must store. ``desk`` is what is known of the parent, if anything.

    ``begins_thread`` says that a checkpoint without a parent is one because the run found nothing to go on from.
    """
    check_id(str(checkpoint["id"]), "checkpoint_id")
    run, marks = run_and_marks(checkpoint, serde)
    prepared = Prepared(
        place,
        str(checkpoint["id"]),
        parent,
        new_versions,
        dict(checkpoint["channel_versions"]),
        notes_for(place, checkpoint, parent, metadata),
        encode_own(run, "run"),
        encode_own(marks, "marks"),
        serde,
        begins=parent is None and begins_thread,
    )
    if desk is not None and desk.cursor.seen is None:
        desk = None  # a read left it: of the parent's channels only the bytes are known
    trusted = desk.known if desk is not None and desk.serde is serde else {}
    same = set() if desk is None else unchanged(prepared.versions, desk.versions, new_versions)
    for channel, value in checkpoint["channel_values"].items():
        if channel in same and desk is not None:
            prepared.news[channel] = Later(serde, value)
            if channel in trusted:
                prepared.known[channel] = trusted[channel]
        elif desk is None and channel in prepared.versions and channel not in new_versions:
            prepared.news[channel] = Later(serde, value)
        else:
            prepared.news[channel] = _news(prepared, channel, value, trusted.get(channel))
    return prepared


def _news(prepared: Prepared, channel: str, value: Any, known: Known | None) -> News:
    """Encode a channel, or only the end of a list whose beginning is known; note what is known of it now."""
    serde = prepared.serde
    if type(value) is not list or ((cipher := encrypting(serde)) is None and not isinstance(serde, JsonPlusSerializer)):
        return _encoded(serde, channel, value)
    if cipher is not None:
        sealed = SealedList(cipher, value, _path(channel), known if isinstance(known, SealedPrints) else None)
        prepared.known[channel] = sealed.prints
        return sealed
    if isinstance(known, KnownMessages) and known.count and known.begin(value):
        before = known.count
        if known.extend(value[before:]):
            prepared.known[channel] = known
        tail = to_body(dump(serde, value[before:], f"{_path(channel)}[{before}:]"))
        return Grown(before, tail, Later(serde, value))
    messages = KnownMessages.of(value)
    if messages is not None:
        prepared.known[channel] = messages
    return _encoded(serde, channel, value)


def _encoded(serde: SerializerProtocol, channel: str, value: Any) -> News:
    """Encode a channel as a whole."""
    cipher = encrypting(serde)
    if type(value) is list and cipher is not None:
        return SealedList(cipher, value, _path(channel), None)
    return Whole(to_body(dump(serde, value, _path(channel))))


def _path(channel: str) -> str:
    return f"channel_values.{channel}"
