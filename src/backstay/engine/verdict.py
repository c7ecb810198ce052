"""Verdicts: what a stored position and the present graph have to say to each other, frame by frame, with reasons.

A judgement is made before anything runs. Only a person can overrule "compatible", and only a migration can answer
"needs migration"; nothing overrules "refuse".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from backstay.engine.fingerprint import hex_of
from backstay.errors import GraphMismatch
from backstay.thread.diff_render import visible


class Verdict(StrEnum):
    """How a stored frame fits its graph. The later ones are worse; compare ``severity``, not the texts."""

    SAME = "same"  # the graph has not changed
    COMPATIBLE = "compatible"  # it has, but in nothing that this position needs
    NEEDS_MIGRATION = "needs migration"  # somebody must say what becomes of this position
    REFUSE = "refuse"  # the position is not this graph's

    @property
    def severity(self) -> int:
        """Return how bad it is; 0 is not at all."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameVerdict:
    """The verdict on one frame. ``reasons`` say what differs and what to do about it."""

    position: str
    graph: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    stored_hash: int | None = None
    present_hash: int | None = None  # None = the graph is not there any more
    migrated: bool = False  # the difference is one that a registered migration accounts for

    def passes(self, accept_compatible: bool) -> bool:
        """Tell whether a run may go on with this frame."""
        if self.verdict is Verdict.COMPATIBLE:
            return self.migrated or accept_compatible
        return self.verdict is Verdict.SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdicts on all frames of a stored position, outer to inner. There is at least one."""

    thread_id: str
    checkpoint_id: str
    frames: tuple[FrameVerdict, ...]

    @property
    def overall(self) -> Verdict:
        """Return the worst verdict."""
        return max((frame.verdict for frame in self.frames), key=lambda verdict: verdict.severity)

    def passes(self, accept_compatible: bool = False) -> bool:
        """Tell whether a run may go on: nothing differs, or a migration, or the caller, answers for what does."""
        return all(frame.passes(accept_compatible) for frame in self.frames)

    def render(self) -> str:
        """Return it as lines for a terminal. Names come from a store, so what does not print is shown as its code."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"thread {visible(self.thread_id)}, checkpoint {visible(self.checkpoint_id)}: {self.overall}"
        for frame in self.frames:
            hashes = f"stored {_hash(frame.stored_hash)}, present {_hash(frame.present_hash)}"
            note = "" if not frame.migrated else ", migrated"
            yield f"  {visible(frame.position)}: {frame.verdict}{note} ({hashes})"
            for reason in frame.reasons:
                yield f"    - {visible(reason)}"

    def __str__(self) -> str:
        return self.render()


def require(judgement: Judgement, accept_compatible: bool) -> None:
    """Raise GraphMismatch, with everything a person needs to decide, unless a run may go on."""
    if judgement.passes(accept_compatible):
        return
    outermost = judgement.frames[0]
    raise GraphMismatch(
        outermost.stored_hash or 0,
        outermost.present_hash or 0,
        judgement=judgement,
        thread=judgement.thread_id,
        checkpoint=judgement.checkpoint_id,
        hint=_advice(judgement, accept_compatible),
    )


def _advice(judgement: Judgement, accept_compatible: bool) -> str:
    stopped = [frame for frame in judgement.frames if not frame.passes(accept_compatible)]
    if any(frame.verdict is Verdict.REFUSE for frame in stopped):
        return "Nothing was run. Resume it with the graph that it was stored with"
    froms = dict.fromkeys(
        f"{frame.graph}.migrate({_hash(frame.stored_hash)}, …)" for frame in stopped if frame.stored_hash is not None
    )
    ways = ["deploy the old graph", *(f"register {visible(each)}" for each in froms)]
    if all(frame.verdict is Verdict.COMPATIBLE for frame in stopped):
        ways.append("accept the change with resume(…, compatible=True)")
    return f"Nothing was run. Either {', or '.join(ways)}"


def _hash(hash: int | None) -> str:
    return "unknown" if hash is None else f"0x{hex_of(hash)}"
