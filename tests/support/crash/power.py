"""Power cuts, enumerated: what may be on a disk after the power failed, at each moment of a recorded run.

``Recorder`` notes what this process does to the files under a folder, through ``os``; ``Trace`` reads from strace's log
what any processes did, in whatever language. ``Disk`` plays that again, step by step, and knows what is durable and
what is not yet:

    a file       has in each sector what was there at its last sync or at any moment since, and its length is one of
                 those that it had since; what lies inside its length and was never written is zeros. File systems cut
                 a file at once, and in order with all else that happens to its size: what was cut off is there whole
                 as long as it was not cut, and then no more
    a directory  has the names that it had at its last sync; of what was done to it since, any part may have happened

After a sync that failed, what it should have written may be thrown away and yet be read until the power fails; only
what is written again afterwards comes to the disk with the next sync.

``Disk.states`` gives such states: all of them if they are few, else some that a seeded chance picks. That nothing
reached the disk without a sync, and that everything did, are always among them. ``Cuts`` tries them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

SECTOR_BYTES = 512
PENDING_NAMES_MAX = 4
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
    at: int = 0  # of a sync: how many changes of the file are newer than the start of the call
    data: bytes = b""
    is_directory: bool = False


def write_tree(folder: Path, tree: Tree) -> None:
    """Put everything there."""
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


class Journal:
    """What was done under a folder, which had ``tree`` in it."""

    def __init__(self, folder: Path, tree: Tree | None = None) -> None:
        self.ops: list[Op] = []
        self._names = {str(folder): ROOT}
        self._names |= {str(folder / path): number for number, path in enumerate(sorted(tree or {}), 1)}
        self._last = len(self._names) - 1

    def told(self, event: str) -> None:
        """Note that somebody outside was told something now."""
        self.ops.append(Op("told", name=event))

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


class Recorder(Journal):
    """Notes every change that this process makes. ``before`` may raise, as a failing disk does."""

    def __init__(self, folder: Path, tree: Tree | None = None) -> None:
        super().__init__(folder, tree)
        self.before: Callable[[str, str], None] = lambda _call, _path: None
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


class Trace(Journal):
    """Reads every change from the log of ``strace -f -y -xx``; told is what was written to the file ``out``.

    Mapped memory is not seen by strace, so only files whose names end in ``unseen`` may be mapped, and they are empty
    here. A call that changes a file in a way that is not known here is an error.
    """

    CALLS = (
        "openat,pwrite64,ftruncate,fsync,fdatasync,unlinkat,renameat,renameat2,mkdirat,"
        "?open,?creat,?unlink,?rename,?mkdir,?rmdir,?link,?symlink,linkat,symlinkat,"
        "write,writev,pwritev,pwritev2,truncate,fallocate,mmap,msync,sync_file_range,copy_file_range,sendfile,splice"
    )
    OPTIONS = ("-xx", "-s", str(1 << 26))
    _BYTES = ("pwrite64", "ftruncate", "fsync", "fdatasync", "mmap")
    _LINE = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)")
    _TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
    _FILE = re.compile(r"\d+<((?:\\x[0-9a-f]{2})*)>")

    def __init__(self, folder: Path, out: Path, unseen: str, tree: Tree | None = None) -> None:
        super().__init__(folder, tree)
        self._folder, self._out, self._unseen = str(folder), str(out), unseen
        self._unfinished: dict[str, tuple[str, int]] = {}  # by thread: what was logged, and how many ops came before

    def read(self, log: str) -> list[Op]:
        """Return everything that was done."""
        for line in log.splitlines():
            found = self._LINE.match(line)
            if found is None:
                assert "+++" in line or "---" in line, f"strace says {line[:200]!r}"
                continue
            thread, call, rest = found.groups()
            if line.endswith("<unfinished ...>"):
                self._unfinished[thread] = rest.removesuffix("<unfinished ...>"), len(self.ops)
                continue
            start, begun = self._unfinished.pop(thread) if "resumed>" in line[:60] else ("", len(self.ops))
            arguments, _, answer = (start + rest).rpartition(" = ")
            if not answer.startswith(("-1", "?")):
                self._happened(call, arguments, answer, begun)
            else:
                assert self._path(arguments) not in self._names or call in ("openat", "open", "mkdir"), line[:200]
        return self.ops

    def _happened(self, call: str, arguments: str, answer: str, begun: int) -> None:
        path = self._path(arguments)
        if path == self._out and call == "write":
            self.told(self._texts(arguments)[0].decode().rstrip())
        if path != self._folder and not path.startswith(f"{self._folder}/"):
            return
        if path.endswith(" (deleted)") or (path.endswith(self._unseen) and call in self._BYTES):
            return
        if path in self._names and call in self._BYTES and call != "mmap":
            self.ops.append(self._change(call, self._names[path], arguments, answer, begun))
        elif call in ("openat", "open"):
            if path not in self._names and "O_CREAT" in arguments:
                self._add(path)
            elif "O_TRUNC" in arguments:
                self.ops.append(Op("cut", self._names[path]))
        elif call in ("unlink", "unlinkat"):
            self._forgot(path)
        elif call in ("rename", "renameat", "renameat2"):
            self._renamed(path, self._texts(arguments)[1].decode())
        else:
            assert call in ("mkdir", "mkdirat"), f"{call} of {path}: a change that cannot be played again"
            self._made(path)

    def _change(self, call: str, node: int, arguments: str, answer: str, begun: int) -> Op:
        last = int(arguments.rstrip(") ").rpartition(", ")[2] or 0) if "sync" not in call else 0
        if call == "pwrite64":
            return Op("write", node, at=last, data=self._texts(arguments)[0][: int(answer)])
        if call == "ftruncate":
            return Op("cut", node, at=last)
        newer = sum(op.node == node and op.kind in ("write", "cut") for op in self.ops[begun:])
        return Op("sync", node, at=newer)

    def _path(self, arguments: str) -> str:
        """Return the path of the file that a call is about: by its descriptor, else the first that is named."""
        found = self._FILE.search(arguments) or self._TEXT.search(arguments)
        return "" if found is None else _bytes(found[1]).decode(errors="replace")

    def _texts(self, arguments: str) -> list[bytes]:
        return [_bytes(text) for text in self._TEXT.findall(arguments)]


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


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
        """Return all that it may contain, nothing of the pending first and everything last."""
        if len(self.pending) > PENDING_NAMES_MAX:
            return [self.after(self.pending[:count]) for count in range(len(self.pending) + 1)]
        every = (part for count in range(len(self.pending) + 1) for part in combinations(self.pending, count))
        return [self.after(part) for part in every]


Histories = dict[int, list[tuple[int, bytes]]]
"""By the number of a sector: moments and what it contained from then on, oldest first."""


class File:
    """What a file contains, and what its sectors and its length were at its last sync and at each moment since.

    ``thrown`` is what it contains if a failed sync threw that away.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._data = bytearray(data)
        self._lengths = [len(data)]  # by moment
        self._sectors: Histories = {}  # those that changed
        self._cuts: list[tuple[int, int]] = []  # moments at which it was made shorter, and how long it was then
        self._thrown: File | None = None

    def play(self, op: Op) -> None:
        if self._thrown is not None:
            self._thrown.play(op)
        if op.kind == "failed":
            self._thrown = File(self.durable())
        elif op.kind == "sync":
            self._synced(len(self._lengths) - 1 - op.at)
        else:
            self._change(op)

    def durable(self) -> bytes:
        """Return what it contains if nothing reached the disk since its last sync."""
        return self._mixed({at: history[0][1] for at, history in self._sectors.items()}, self._lengths[0])

    def now(self) -> bytes:
        """Return what a reader sees now."""
        return bytes(self._data)

    def count(self) -> int:
        """Return how many contents are possible, or more."""
        found = 0 if self._thrown is None else self._thrown.count()
        for cuts in range(len(self._cuts) + 1):
            sectors, moments = self._after(cuts)
            found += prod(map(len, sectors.values())) * len(moments)
        return found

    def choices(self) -> list[bytes]:
        """Return all that it may contain, which should be few."""
        found = [] if self._thrown is None else self._thrown.choices()
        for cuts in range(len(self._cuts) + 1):
            sectors, moments = self._after(cuts)
            for picked in product(*([data for _, data in history] for history in sectors.values())):
                parts = dict(zip(sectors, picked, strict=True))
                found += [self._mixed(parts, length) for length in {self._lengths[moment] for moment in moments}]
        return found

    def pick(self, rng: random.Random) -> bytes:
        """Return something that it may contain."""
        if self._thrown is not None and rng.random() < 0.5:
            return self._thrown.pick(rng)
        sectors, moments = self._after(rng.randint(0, len(self._cuts)))
        lengths = [self._lengths[moment] for moment in moments]
        kind = rng.choice(("moment", "sector", "changes", "sectors"))
        if kind == "moment":  # only what came before it; perhaps with the size that came later
            last = rng.choice(moments)
            came, length = {*range(last + 1)}, rng.choice((self._lengths[last], lengths[-1]))
        elif kind == "changes":  # some changes came to the disk, later ones before earlier ones
            missing = rng.choice((0.1, 0.5, 0.9))
            came = {moment for moment in range(len(self._lengths)) if rng.random() >= missing}
            length = self._lengths[max((moment for moment in moments if moment in came), default=moments[0])]
        else:
            came, length = {*range(len(self._lengths))}, lengths[-1]
        parts = {
            at: next((data for moment, data in reversed(history) if moment in came), history[0][1])
            for at, history in sectors.items()
        }
        if kind == "sector" and sectors:  # one is old, as if only the rest had been written back
            at = rng.choice(list(sectors))
            parts[at] = rng.choice(sectors[at])[1]
        elif kind == "sectors":
            parts, length = {at: rng.choice(history)[1] for at, history in sectors.items()}, rng.choice(lengths)
        return self._mixed(parts, length)

    def _after(self, cuts: int) -> tuple[Histories, range]:
        """Return what its sectors may be, and the moments whose length it may have, if so many cuts have happened."""
        happened, pending = self._cuts[:cuts], self._cuts[cuts:]
        sectors: Histories = {}
        for at, history in self._sectors.items():
            end = (at + 1) * SECTOR_BYTES
            first = max((moment for moment, length in happened if length < end), default=0)
            last = min((moment for moment, length in pending if length < end), default=len(self._lengths))
            base = next(data for moment, data in reversed(history) if moment <= first)
            sectors[at] = [(0, base), *(each for each in history if first < each[0] < last)]
        return sectors, range(happened[-1][0] if happened else 0, pending[0][0] if pending else len(self._lengths))

    def _change(self, op: Op) -> None:
        data, end = self._data, op.at + len(op.data) if op.kind == "write" else max(op.at, len(self._data))
        touched = range(min(op.at, len(data)) // SECTOR_BYTES, -(-end // SECTOR_BYTES))
        for at in touched:
            if at not in self._sectors:
                self._sectors[at] = [(0, self._sector(at))]
        if len(data) < op.at:
            data.extend(bytes(op.at - len(data)))
        if op.kind == "write":
            data[op.at : end] = op.data
        else:
            del data[op.at :]
        moment = len(self._lengths)
        if len(data) < self._lengths[-1]:
            self._cuts.append((moment, len(data)))
        self._lengths.append(len(data))
        for at in touched:
            self._sectors[at].append((moment, self._sector(at)))

    def _synced(self, first: int) -> None:
        """Forget all that was before this moment, which has come to the disk."""
        left: Histories = {}
        for at, history in self._sectors.items():
            if history[-1][0] > first:
                base = next(data for moment, data in reversed(history) if moment <= first)
                left[at] = [(0, base), *((moment - first, data) for moment, data in history if moment > first)]
        self._sectors, self._lengths = left, self._lengths[first:]
        self._cuts = [(moment - first, length) for moment, length in self._cuts if moment > first]

    def _mixed(self, parts: dict[int, bytes], length: int) -> bytes:
        """Return what a reader sees now, but with these sectors and this length."""
        room = max(length, SECTOR_BYTES * (1 + max(parts, default=-1)))
        data = bytearray(self._data.ljust(room, b"\0"))
        for at, part in parts.items():
            data[at * SECTOR_BYTES : (at + 1) * SECTOR_BYTES] = part
        return bytes(data[:length])

    def _sector(self, at: int) -> bytes:
        return bytes(self._data[at * SECTOR_BYTES : (at + 1) * SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")


class Disk:
    """Everything that may be on the disk, while a recorded run is played again on what was there before."""

    def __init__(self, tree: Tree | None = None) -> None:
        self._nodes: dict[int, Directory | File] = {ROOT: Directory()}
        numbers = {path: number for number, path in enumerate(sorted(tree or {}), 1)}
        for path, data in (tree or {}).items():
            parent, _, name = path.rpartition("/")
            self._nodes[numbers[path]] = Directory() if data is None else File(data)
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

    def now(self) -> Tree:
        """Return what a reader sees now."""
        return self._tree(lambda node: node.now() if isinstance(node, File) else node.after(node.pending))

    def states(self, rng: random.Random, most: int) -> Iterator[Tree]:
        """Give states in which the power may leave the disk now; about ``most`` of them if there are more."""
        yield self._tree(lambda node: node.durable() if isinstance(node, File) else node.names)
        yield self.now()
        named = {ROOT}
        for node in self._nodes.values():
            if isinstance(node, Directory):
                named.update(node.names.values(), (op.node for op in node.pending))
        nodes = [self._nodes[number] for number in sorted(named)]
        if prod(node.count() if isinstance(node, File) else len(node.choices()) for node in nodes) <= most:
            for every in product(*(node.choices() for node in nodes)):
                picked: dict[int, Any] = {id(node): content for node, content in zip(nodes, every, strict=True)}
                yield self._tree(lambda node: picked[id(node)])  # noqa: B023 - used at once
            return
        for _ in range(most):
            yield self._tree(lambda node: node.pick(rng) if isinstance(node, File) else rng.choice(node.choices()))

    def _directory(self, number: int) -> Directory:
        node = self._nodes[number]
        assert isinstance(node, Directory)
        return node

    def _tree(self, choose: Choose, number: int = ROOT, path: str = "") -> Tree:
        found = choose(self._nodes[number])
        if isinstance(found, bytes):
            return {path: found}
        tree: Tree = {path: None} if path else {}
        for name, child in found.items():
            tree |= self._tree(choose, child, f"{path}/{name}" if path else name)
        return tree


Choose = Callable[[Directory | File], dict[str, int] | bytes]
Judge = Callable[[Path, list[str], int], object]
"""Raises an error if a folder does not hold what it must, by all that was told, and by the number of the last Op."""


@dataclass
class Cuts:
    """Power cuts that were tried, and what they broke."""

    folder: Path
    seed: int
    judge: Judge
    tried: int = 0
    broken: list[str] = field(default_factory=list)
    states: list[tuple[Tree, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._seen: set[bytes] = set()

    def everywhere(
        self, ops: list[Op], most: int, before: Tree | None = None, told: list[str] | None = None, share: float = 1.0
    ) -> None:
        """Cut the power before the first and after each thing that was done, or after a share of them."""
        disk, said = Disk(before), list(told or [])
        for number, op in enumerate((Op("told", name=""), *ops), -1):
            disk.play(op)
            if op.kind == "told":
                said.append(op.name)
            if self._rng.random() < share:
                for tree in disk.states(self._rng, most):
                    self._try(tree, said, number)

    def _try(self, tree: Tree, told: list[str], number: int) -> None:
        hasher = hashlib.sha256(repr(told).encode())
        for path, data in sorted(tree.items()):
            hasher.update(f"{path} {'-' if data is None else len(data)} ".encode() + (data or b""))
        if hasher.digest() in self._seen:
            return
        self._seen.add(hasher.digest())
        self.tried += 1
        self.states.append((tree, list(told)))
        with placed(self.folder, tree) as place:
            try:
                self.judge(place, told, number)
            except Exception as error:
                self.broken.append(f"after {told[-1:]}, operation {number}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def placed(folder: Path, tree: Tree | None = None) -> Iterator[Path]:
    """Give a new folder with everything in it."""
    place = Path(tempfile.mkdtemp(dir=folder))
    write_tree(place, tree or {})
    try:
        yield place
    finally:
        shutil.rmtree(place)
