"""The mending part of the store contract: what a repair may do below the level of checkpoints, and no more.

These verbs trust their caller. ``restore`` puts back what it is told to without checking it against any digest: who
calls it has. Each verb happens wholly or not at all, like every other, and may run beside savers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from backstay.store.finding import Finding

if TYPE_CHECKING:
    from backstay.store.base import Row


class Mending(Protocol):
    """The verbs of repair."""

    def rebuild(self, dry_run: bool, drop: bool) -> list[Finding]:
        """Work out from rows and manifests what follows from them, and put it right; return what was not.

        That is: each lane's head and last seq, each thread's next seq, which lane needs which source. With ``drop``
        also what belongs to nothing goes: bytes that no manifest needs, tags and interrupts without a checkpoint. If
        any manifest cannot be read, nobody knows what it needs, so nothing is dropped. With ``dry_run`` nothing is
        changed. Every finding returned has ``repair`` = "rebuild"; on a sound store there are none. A store whose own
        records cannot all be read may put only those in order (kind "damaged"); the next rebuild does the rest.
        """

    def restore(
        self,
        blobs: Mapping[bytes, bytes],
        chunks: Sequence[tuple[int, int, bytes]],
        rows: Sequence[Row] = (),
    ) -> None:
        """Put these bytes at exactly these places, and these rows in the place of those with their lanes and ids.

        ``chunks`` are (stream, offset, bytes). What is there is overwritten, what lacks is added; bytes beside it stay
        as they are. Where the bytes of a stream can no longer be unpacked, what was not given is lost. Of a row, seq,
        tags and writes stay, and the lane refers to what its manifest needs; NotFound if there is none with its id. A
        writer that saw a head before it was put back is out of date, for it relies on where the bytes were: Conflict.
        """

    def quarantine(self, namespace: str, checkpoint: str, force: bool = False) -> None:
        """Take a checkpoint out, with its tags, writes and interrupts, also if its manifest cannot be read.

        As with ``delete``, the next older one becomes the head, children keep the digest, and a lane without any goes;
        but no byte goes, and no effect. Raises NotFound, and Fenced if a lease runs on the lane, unless ``force``.
        """
