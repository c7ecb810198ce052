"""Power cuts, enumerated: what may be on a disk after the power failed, at each moment of a recorded run.

``Recorder`` notes what this process does to the files under a folder, through ``os``. ``Disk`` plays that again, step
by step, and knows what is durable and what is not yet:

    a file       has in each sector what was there at its last sync or at any moment since, and its length is one of
                 those that it had since; what lies inside its length and was never written is zeros
    a directory  has the names that it had at its last sync; of what was done to it since, any part may have happened

After a sync that failed, what it should have written may be thrown away and yet be read until the power fails; only
what is written again afterwards comes to the disk with the next sync.

``Disk.states`` gives such states: all of them if they are few, else some that a seeded chance picks. That nothing
reached the disk without a sync, and that everything did, are always among them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

SECTOR_BYTES = 512
SECTORS_MIXED_MAX = 5  # if more differ, chance picks
PENDING_NAMES_MAX = 4
CONTENTS_PICKED = 12
ROOT = 0

Patch = Callable[[object, str, object], None]
Note = Callable[..., None]
Tree = dict[str, bytes | None]
"""What is in a folder: each file's bytes by its path in there, and None for each directory."""


class Op(NamedTuple):
    """Something that was done: to a name in a directory (``parent``), to the bytes of a file, or somebody was told."""

    kind: str  # make, rename, forget; write, cut, sync, failed; told
    node: int = ROOT
    parent: int = ROOT
    name: str = ""
    old_name: str = ""
    at: int = 0
    data: bytes = b""
    is_directory: bool = False


def write_tree(folder: Path, tree: Tree) -> None:
    """Put everything there."""
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


class Recorder:
    """Notes every change under a folder, which has ``tree`` in it. ``before`` may raise, as a failing disk does."""

    def __init__(self, folder: Path, tree: Tree | None = None) -> None:
        self.ops: list[Op] = []
        self.before: Callable[[str, str], None] = lambda _call, _path: None
        self._names = {str(folder): ROOT}
        self._names |= {str(folder / path): number for number, path in enumerate(sorted(tree or {}), 1)}
        self._last = len(self._names) - 1
        self._descriptors: dict[int, tuple[int, str]] = {}
        self._buffered: set[int] = set()  # files that Python's own buffers write to: what, is seen when they are synced

    def install(self, patch: Patch) -> None:
        """Take the place of what ``os`` has."""
        on_file: dict[str, Note] = {
            "pwrite": self._wrote,
            "ftruncate": self._cut,
            "fsync": self._synced,
            "fdatasync": self._synced,
        }
        for name, note in (on_file | {"posix_fallocate": self._given_room}).items():
            patch(os, name, partial(self._call_on_file, name, getattr(os, name), note))
        on_name: dict[str, Note] = {"mkdir": self._made, "replace": self._renamed, "unlink": self._forgot}
        for name, note in on_name.items():
            patch(os, name, partial(self._call_on_name, name, getattr(os, name), note))
        patch(os, "open", partial(self._opening, os.open))

    def told(self, event: str) -> None:
        """Note that somebody outside was told something now."""
        self.ops.append(Op("told", name=event))

    # Calls --------------------------------------------------------------------------------------------------------

    def _opening(self, real: Callable[..., int], path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        text = str(path)
        if self._place(text) is not None or text in self._names:
            self.before("open", text)
        descriptor = real(path, flags, mode, **more)
        self._descriptors.pop(descriptor, None)
        if text in self._names:
            if flags & os.O_TRUNC:
                self.ops.append(Op("cut", self._names[text]))
        elif self._place(text) is not None:
            self._add(text)
        if text in self._names:
            self._descriptors[descriptor] = (self._names[text], text)
            if flags & os.O_EXCL:
                self._buffered.add(self._names[text])
        return descriptor

    def _call_on_file(self, name: str, real: Callable[..., Any], note: Note, *arguments: Any) -> Any:
        node, path = self._descriptors.get(arguments[0], (-1, ""))
        if node < 0:
            return real(*arguments)
        try:
            self.before(name, path)
        except OSError:
            if name in ("fsync", "fdatasync"):
                self.ops.append(Op("failed", node))
            raise
        answer = real(*arguments)
        note(node, path, *arguments[1:])
        return answer

    def _call_on_name(self, name: str, real: Callable[..., Any], note: Note, *arguments: Any) -> Any:
        if self._place(str(arguments[0])) is None:
            return real(*arguments)
        self.before(name, str(arguments[0]))
        answer = real(*arguments)
        note(*arguments)
        return answer

    # What they did ------------------------------------------------------------------------------------------------

    def _wrote(self, node: int, _: str, data: Any, at: int) -> None:
        self.ops.append(Op("write", node, at=at, data=bytes(data)))

    def _cut(self, node: int, _: str, length: int) -> None:
        self.ops.append(Op("cut", node, at=length))

    def _given_room(self, node: int, _: str, start: int, length: int) -> None:
        self.ops.append(Op("cut", node, at=start + length))

    def _synced(self, node: int, path: str) -> None:
        if node in self._buffered:
            self.ops.append(Op("write", node, data=Path(path).read_bytes()))
        self.ops.append(Op("sync", node))

    def _made(self, path: Any, *_: Any) -> None:
        self._add(str(path), is_directory=True)

    def _renamed(self, source: Any, target: Any) -> None:
        parent, name = self._place(str(target)) or (ROOT, "")
        node = self._names[str(target)] = self._names.pop(str(source))
        self.ops.append(Op("rename", node, parent, name, old_name=Path(source).name))

    def _forgot(self, path: Any) -> None:
        parent, name = self._place(str(path)) or (ROOT, "")
        self.ops.append(Op("forget", self._names.pop(str(path)), parent, name))

    def _add(self, path: str, is_directory: bool = False) -> None:
        parent, name = self._place(path) or (ROOT, "")
        self._last += 1
        self._names[path] = self._last
        self.ops.append(Op("make", self._last, parent, name, is_directory=is_directory))

    def _place(self, path: str) -> tuple[int, str] | None:
        parent, _, name = path.rpartition("/")
        return (self._names[parent], name) if parent in self._names else None


@dataclass
class Directory:
    """The names that a directory surely has, and what was done to it since."""

    names: dict[str, int] = field(default_factory=dict)
    pending: list[Op] = field(default_factory=list)

    def after(self, happened: Sequence[Op]) -> dict[str, int]:
        """Return the names if only these of the pending changes came to the disk."""
        names = dict(self.names)
        for op in happened:
            names.pop(op.old_name or op.name, None)
            if op.kind != "forget":
                names[op.name] = op.node
        return names

    def choices(self) -> list[dict[str, int]]:
        """Return all that it may contain."""
        if len(self.pending) > PENDING_NAMES_MAX:
            return [self.after(self.pending[:count]) for count in range(len(self.pending) + 1)]
        every = (part for count in range(len(self.pending) + 1) for part in combinations(self.pending, count))
        return [self.after(part) for part in every]


@dataclass
class File:
    """What a file contained at its last sync and at each moment since; ``thrown`` if a failed sync threw that away."""

    versions: list[bytes] = field(default_factory=lambda: [b""])
    thrown: File | None = None

    def play(self, op: Op) -> None:
        data = self.versions[-1]
        if self.thrown is not None:
            self.thrown.play(op)
        if op.kind == "failed":
            self.thrown = File([self.versions[0]])
        elif op.kind == "sync":
            self.versions = [data]
        elif op.kind == "cut":
            self.versions.append(data[: op.at].ljust(op.at, b"\0"))
        else:
            self.versions.append(data[: op.at].ljust(op.at, b"\0") + op.data + data[op.at + len(op.data) :])

    def choices(self, rng: random.Random) -> list[bytes]:
        """Return what it may contain: all of it if that is little, else some of it."""
        return self._mixtures(rng) + ([] if self.thrown is None else self.thrown.choices(rng))

    def _mixtures(self, rng: random.Random) -> list[bytes]:
        first, last = self.versions[0], self.versions[-1]
        if len(self.versions) == 1:
            return [last]
        lengths = sorted({len(version) for version in self.versions})
        sectors = range(-(-lengths[-1] // SECTOR_BYTES))
        differing = [at for at in sectors if len({_sector(version, at) for version in self.versions}) > 1]
        found = [first, last]
        if len(differing) <= SECTORS_MIXED_MAX and len(self.versions) <= 3:
            for picked in product(self.versions, repeat=len(differing)):
                parts = dict(zip(differing, picked, strict=True))
                found += [_mixed(last, parts, sectors, length) for length in lengths]
        else:
            for _ in range(CONTENTS_PICKED):
                found.append(rng.choice(self.versions))
                old = rng.choice(self.versions)  # one sector is old, as if only the rest had been written back
                found.append(_mixed(last, {rng.choice(differing): old}, sectors, len(last)))
                parts = {at: rng.choice(self.versions) for at in differing}
                found.append(_mixed(last, parts, sectors, rng.choice(lengths)))
        return list(dict.fromkeys(found))


def _sector(data: bytes, at: int) -> bytes:
    return data[at * SECTOR_BYTES : (at + 1) * SECTOR_BYTES]


def _mixed(last: bytes, parts: dict[int, bytes], sectors: range, length: int) -> bytes:
    data = b"".join(_sector(parts.get(at, last), at).ljust(SECTOR_BYTES, b"\0") for at in sectors)
    return data[:length]


class Disk:
    """Everything that may be on the disk, while a recorded run is played again on what was there before."""

    def __init__(self, tree: Tree | None = None) -> None:
        self._nodes: dict[int, Directory | File] = {ROOT: Directory()}
        numbers = {path: number for number, path in enumerate(sorted(tree or {}), 1)}
        for path, data in (tree or {}).items():
            parent, _, name = path.rpartition("/")
            self._nodes[numbers[path]] = Directory() if data is None else File([data])
        for path, number in numbers.items():
            parent, _, name = path.rpartition("/")
            self._directory(numbers[parent] if parent else ROOT).names[name] = number

    def play(self, op: Op) -> None:
        """Do what was done."""
        if op.kind in ("make", "rename", "forget"):
            if op.kind == "make":
                self._nodes[op.node] = Directory() if op.is_directory else File()
            self._directory(op.parent).pending.append(op)
        elif op.kind != "told":
            node = self._nodes[op.node]
            if isinstance(node, File):
                node.play(op)
            elif op.kind == "sync":
                node.names, node.pending = node.after(node.pending), []

    def states(self, rng: random.Random, most: int) -> Iterator[Tree]:
        """Give states in which the power may leave the disk now; about ``most`` of them if there are more."""
        choices: dict[int, list[dict[str, int] | bytes]] = {
            number: [*(node.choices() if isinstance(node, Directory) else node.choices(rng))]
            for number, node in self._nodes.items()
        }
        if prod(map(len, choices.values())) <= most:
            for picked in product(*choices.values()):
                yield self._tree(dict(zip(choices, picked, strict=True)))
            return
        yield self._tree({number: every[0] for number, every in choices.items()})
        for _ in range(most):
            yield self._tree({number: rng.choice(every) for number, every in choices.items()})

    def _directory(self, number: int) -> Directory:
        node = self._nodes[number]
        assert isinstance(node, Directory)
        return node

    def _tree(self, picked: dict[int, dict[str, int] | bytes], number: int = ROOT, path: str = "") -> Tree:
        found = picked[number]
        if isinstance(found, bytes):
            return {path: found}
        tree: Tree = {path: None} if path else {}
        for name, child in found.items():
            tree |= self._tree(picked, child, f"{path}/{name}" if path else name)
        return tree
