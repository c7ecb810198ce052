"""Planning a repair: which damaged checkpoints can be made good again, and from what. It changes nothing.

First bytes: what damaged checkpoints lack is looked for by its digest, in other places of the same store, then in the
backup. Then rows: one whose own description is damaged is written anew if its digest can be proven. Everything is tried
out on an overlay, so the plan says what will be, not what may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay.errors import BackstayError
from backstay.store.base import Backend, Query, Row
from backstay.upkeep.overlay import Overlay
from backstay.upkeep.report import Action
from backstay.upkeep.rewrite import Testimony, is_good, rewritten
from backstay.upkeep.search import Ground, Wants, find_bytes, lacking, place, rows_of

ROUNDS_MAX = 3
"""A base is found first, then the tables that it names, then the values of those."""

RESTORE, RESTORE_FROM_BACKUP = "restore", "restore from backup"


@dataclass(frozen=True, slots=True)
class Place:
    """A store and the namespace that is looked at there."""

    backend: Backend
    namespace: str


@dataclass(slots=True)
class Plan:
    """What is to be put back, for which checkpoints, and what cannot be made good."""

    overlay: Overlay
    rows: list[Row] = field(default_factory=list)  # to be written anew
    actions: list[Action] = field(default_factory=list)
    restored: list[Row] = field(default_factory=list)  # all that become good, whether by bytes or by rows
    beyond: list[Row] = field(default_factory=list)  # those that nothing helps
    unreadable: list[str] = field(default_factory=list)  # ids of rows that the store itself cannot give


def plan_restore(here: Place, damaged: tuple[str, ...], backup: Place | None) -> Plan:
    """Return how the checkpoints with these ids can be made good."""
    plan = Plan(Overlay(here.backend))
    rows = [row for name in damaged if (row := _row(here, name, plan)) is not None]
    if not rows:
        return plan
    rows.sort(key=lambda row: (row.thread_number, row.seq))  # parents come before their children
    search = _Search(here, backup, plan.overlay, set(damaged))
    search.put_bytes_back(rows)
    testimony = search.testimony(rows)
    while rows:
        left = [row for row in rows if not _mend(plan, row, testimony, search)]
        if len(left) == len(rows):
            break
        rows = left  # one that was made good may vouch for its parent
    plan.beyond = rows
    return plan


def _mend(plan: Plan, row: Row, testimony: Testimony, search: _Search) -> bool:
    """Plan how one checkpoint becomes good; False if it cannot, so far."""
    written = row if is_good(plan.overlay, row) else rewritten(plan.overlay, row, testimony, search.read_value)
    if written is None:
        return False
    if written is not row:
        plan.rows.append(written)
        testimony.learn(written)
    plan.restored.append(written)
    rewrites = written is not row
    plan.actions.append(_action(row, rewrites, search.used_backup(row) or (rewrites and row.id in testimony.twins)))
    return True


def _row(here: Place, name: str, plan: Plan) -> Row | None:
    try:
        found = here.backend.find(Query(here.namespace, ids=(name,), payload=True, writes=True))
    except BackstayError:
        found = []
    if not found:
        plan.unreadable.append(name)
        return None
    return found[0]


def _action(row: Row, rewrites: bool, from_backup: bool) -> Action:
    what = "its description is written anew" if rewrites else "its bytes are put back"
    name = RESTORE_FROM_BACKUP if from_backup else RESTORE
    return Action(name, f"checkpoint {row.id}", what, row.lane.thread, row.id, row.lane.branch)


class _Search:
    """Looks for what damaged checkpoints lack, remembers what was found where, and puts it into the overlay."""

    def __init__(self, here: Place, backup: Place | None, overlay: Overlay, damaged: set[str]) -> None:
        self._here = here
        self._backup = backup
        self._overlay = overlay
        self._found: dict[bytes, bytes] = {}
        self._of_backup: set[bytes] = set()
        self._looked_for: set[bytes] = set()
        self._lacked: dict[str, set[bytes]] = {}
        self._ground = Ground()
        self._children: dict[str, list[Row]] = {}
        for row in rows_of(here.backend, here.namespace):
            if row.id not in damaged:
                self._ground.add(here.backend, row)
            if row.parent_id in damaged:
                self._children.setdefault(str(row.parent_id), []).append(row)

    def put_bytes_back(self, rows: list[Row]) -> None:
        """Put everything that is found anywhere in its place in the overlay."""
        for _ in range(ROUNDS_MAX):
            lacked = [(row, wants) for row in rows if (wants := self._lacking(row)) is not None]
            wanted = {digest for _, wants in lacked for digest in wants.digests}
            if wanted <= self._looked_for:
                return
            self._look_for(wanted - self._looked_for)
            for _, wants in lacked:
                self._put(wants)

    def testimony(self, rows: list[Row]) -> Testimony:
        """Return what is known of these checkpoints from elsewhere."""
        twins: dict[str, Row] = {}
        ancestors: dict[str, bytes] = {}
        for row in rows if self._backup is not None else ():
            twin = self._twin(row.id)
            if twin is not None and twin.lane[1:] == row.lane[1:]:
                twins[row.id] = twin
            parent = None if row.parent_id is None else self._twin(row.parent_id)
            if parent is not None:
                ancestors[parent.id] = parent.digest
        return Testimony(twins, self._children, ancestors)

    def read_value(self, digest: bytes) -> bytes | None:
        """Return the bytes with a digest, from wherever they are."""
        if digest not in self._looked_for:
            self._look_for({digest})
        return self._found.get(digest)

    def used_backup(self, row: Row) -> bool:
        """Tell whether anything that a checkpoint lacked came from the backup."""
        return not self._of_backup.isdisjoint(self._lacked.get(row.id, ()))

    def _twin(self, name: str) -> Row | None:
        assert self._backup is not None
        place_of = self._backup
        try:
            found = place_of.backend.find(Query(place_of.namespace, ids=(name,), payload=True))
            return found[0] if found and is_good(Overlay(place_of.backend), found[0]) else None
        except BackstayError:
            return None

    def _lacking(self, row: Row) -> Wants | None:
        try:
            wants = lacking(self._overlay, row)
        except BackstayError:  # its own manifest cannot be read: nobody knows what it lacks
            return None
        self._lacked.setdefault(row.id, set()).update(wants.digests)
        return wants

    def _look_for(self, wanted: set[bytes]) -> None:
        self._looked_for |= wanted
        self._found.update(find_bytes(self._here.backend, self._here.namespace, wanted))
        left = wanted - set(self._found)
        if left and self._backup is not None:
            found = find_bytes(self._backup.backend, self._backup.namespace, left)
            self._found.update(found)
            self._of_backup.update(found)

    def _put(self, wants: Wants) -> None:
        for digest in wants.blobs & set(self._found):
            self._overlay.blobs[digest] = self._found[digest]
        for digest, pieces in wants.values.items():
            if digest in self._found:
                place(self._overlay, self._ground, self._found[digest], pieces)
