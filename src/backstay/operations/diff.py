"""The changes between two states, as a JSON Patch (RFC 6902): ``diff`` makes a patch, ``apply_patch`` applies it.

The rule: ``apply_patch(a, diff(a, b).patch)`` equals ``b`` in every type and bit (1, True and 1.0 are three values,
-0.0 is not 0.0, a tuple is not a list), except for the order of dict keys. A NaN that replaces a NaN is not a change.

Dicts with text keys and lists are compared item by item. Every other value, text too, is a leaf: it is replaced as a
whole. So a patch may contain values that JSON cannot represent; ``Diff.to_json`` refuses them and names their path.

Lists are compared in three steps, each of bounded cost: the common start and end are skipped; the items between them
are matched by ``id`` if every item has a unique one, else by content; the longest run of matches in order stays, and
the other items are removed and added. So an item's index in the patch is its index in the new list.

Nothing here does I/O or knows about stores.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, time, timezone
from decimal import Decimal
from itertools import pairwise
from math import copysign
from operator import is_
from typing import Any, Final, TypeAlias

import ormsgpack

from backstay.codec import encode
from backstay.codec.encoder import EXACT, holds_silently_changed
from backstay.codec.registry import BY_CLASS
from backstay.codec.values import BY_TYPE, MUTABLE
from backstay.errors import EncodeError, InvalidInput
from backstay.model.checkpoint import Checkpoint, shorten

# Show a diff to people: lines for a terminal, a table for a notebook, a summary by top-level key.
#
# A state contains text from models and tools, so it is not trusted: characters that do not print (control characters,
# terminal escapes, changes of writing direction) are shown as their codes, HTML is escaped, and the length of a value
# and the number of lines are bounded.


LINES_MAX: Final = 1000
"""The most operations to show; the rest are only counted."""

VALUE_CHARS_MAX: Final = 120
PATH_CHARS_MAX: Final = 200
_SIGNS: Final = {"add": "+", "remove": "-", "replace": "~"}
_COLOURS: Final = {"+": "#1a7f37", "-": "#cf222e", "~": "#9a6700"}
_PAST: Final = {"add": "added", "remove": "removed", "replace": "replaced"}
_INT_BITS_SHOWN_MAX: Final = 1024


def text(before: str, after: str, patch: Sequence[dict[str, Any]], gone: Sequence[Any]) -> str:
    """Return the diff as lines of plain text."""
    if not patch:
        return f"{visible(before)} and {visible(after)} are the same"
    lines = [f"--- {visible(before)}", f"+++ {visible(after)}"]
    lines += [f"{sign} {path}: {value}" for sign, path, value in _rows(patch, gone)]
    return "\n".join(lines + _rest(patch))


def table(before: str, after: str, patch: Sequence[dict[str, Any]], gone: Sequence[Any]) -> str:
    """Return the diff as an HTML table."""
    from html import escape

    title = f"{visible(before)} → {visible(after)}" + ("" if patch else ": the same")
    rows = "".join(
        f"<tr style='color:{_COLOURS[sign]}'><td>{sign}</td><td style='text-align:left'><code>{escape(path)}"
        f"</code></td><td style='text-align:left'><code>{escape(value)}</code></td></tr>"
        for sign, path, value in _rows(patch, gone)
    )
    rest = "".join(f"<tr><td colspan='3'>{escape(line)}</td></tr>" for line in _rest(patch))
    return f"<table><caption>{escape(title)}</caption>{rows}{rest}</table>"


def summary(patch: Sequence[dict[str, Any]], lists: frozenset[str]) -> str:
    """Return one line for each top-level key that changed."""
    counts: dict[str, dict[str, int]] = {}
    edited: set[tuple[str, str]] = set()
    for operation in patch:
        parts = operation["path"][1:].split("/")
        key = parts[0].replace("~1", "/").replace("~0", "~")
        word = _word(operation["op"], parts, key in lists)
        if word == "edited":
            item = (parts[0], parts[1])
            if item in edited:
                continue  # another change to the same item
            edited.add(item)
        words = counts.setdefault(key, {})
        words[word] = words.get(word, 0) + (len(parts) > 1)
    lines = []
    for key, words in counts.items():
        shown = shorten(visible(key), PATH_CHARS_MAX) or "''"
        lines.append(f"{shown}: {', '.join(f'{count} {word}' if count else word for word, count in words.items())}")
    return "\n".join(lines)


def visible(text: str) -> str:
    """Return the text with every character that does not print replaced by its code."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _word(op: str, parts: list[str], is_list: bool) -> str:
    if len(parts) > 2:
        return "edited"
    if op == "add" and len(parts) == 2 and is_list:
        return "appended" if parts[1] == "-" else "inserted"
    return _PAST[op]


def _rows(patch: Sequence[dict[str, Any]], gone: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the sign, the path and the change of each operation, safe to display."""
    for number, operation in enumerate(patch[:LINES_MAX]):
        known = number < len(gone)
        old = _shown(gone[number]) if known and operation["op"] != "add" else ""
        new = _shown(operation["value"]) if "value" in operation else ""
        path = shorten(visible(operation["path"]), PATH_CHARS_MAX)
        yield _SIGNS[operation["op"]], path, " → ".join(filter(None, (old, new)))


def _rest(patch: Sequence[dict[str, Any]]) -> list[str]:
    return [f"… and {len(patch) - LINES_MAX} more"] if len(patch) > LINES_MAX else []


class _Short(reprlib.Repr):
    """A ``repr`` that looks at no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = VALUE_CHARS_MAX
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert very long ints to decimal.
        return repr(x) if x.bit_length() <= _INT_BITS_SHOWN_MAX else f"<int of {x.bit_length()} bits>"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= VALUE_CHARS_MAX else f"{x[: VALUE_CHARS_MAX // 4]!r}… ({len(x)} bytes)"

    def repr_OrderedDict(self, x: dict[Any, Any], level: int) -> str:
        return f"{type(x).__name__}({self.repr_dict(x, level)})"

    repr_bytearray = repr_bytes
    repr_defaultdict = repr_Counter = repr_OrderedDict


_short: Final = _Short()


def _shown(value: Any) -> str:
    return shorten(visible(_short.repr(value)), VALUE_CHARS_MAX)


# ``==`` is too lenient for a diff: it treats 1 as True, 0.0 as -0.0, and two times in different zones as one. It is
# also too strict: a NaN never equals itself. When in doubt, values count as different: a false change costs a line, a
# missed change costs the state.


NAN_ITEMS_MAX: Final = 64
"""The most items of a set that cannot be looked up because of a NaN; with more, two sets count as different."""


def exact(old: Any, new: Any) -> bool:
    """Return whether two values have the same type and content; the order of text keys in dicts does not matter."""
    if old is new:
        return True
    kind = type(old)
    if kind is not type(new):
        return False
    if kind in _BY_EQUALITY:
        return bool(old == new)
    return _COMPARE.get(kind, _exact_object)(old, new)


def copied(value: Any) -> Any:
    """Return a copy of the value: built-in containers are copied, other objects are shared."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if kind is tuple:
        return tuple(map(copied, value))
    if kind is deque:
        return deque(map(copied, value), value.maxlen)
    if kind not in MUTABLE:
        return value
    copy = value.copy()
    if isinstance(copy, dict):  # of a kind that has more than its items, such as a defaultdict
        for key, item in copy.items():
            copy[key] = copied(item)
    return copy


def _exact_items(old: Any, new: Any) -> bool:
    return len(old) == len(new) and all(map(exact, old, new))


def _exact_dict(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    if len(old) != len(new):
        return False
    for key, value in old.items():
        if type(key) is not str:
            # A lookup would take True for the key 1 and would not find NaN, so such dicts are compared in order.
            return all(map(exact, old, new)) and all(map(exact, old.values(), new.values()))
        if key not in new or not exact(value, new[key]):
            return False
    return True


def _exact_set(old: Any, new: Any) -> bool:
    twins = {item: item for item in new}
    lost = [item for item in old if item not in twins]
    if len(old) != len(new) or len(lost) > NAN_ITEMS_MAX:
        return False
    if not all(exact(item, twins[item]) for item in old if item in twins):
        return False
    left = [item for item in new if item not in old]
    for item in lost:
        found = next((at for at, other in enumerate(left) if exact(item, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _exact_float(old: float, new: float) -> bool:
    if old == new:
        return copysign(1.0, old) == copysign(1.0, new)
    return old != old and new != new


def _exact_time(old: Any, new: Any) -> bool:
    clock = old.replace(tzinfo=None) == new.replace(tzinfo=None) and old.fold == new.fold
    return clock and exact(old.tzinfo, new.tzinfo)


def _exact_object(old: Any, new: Any) -> bool:
    """Compare two instances of a class by their stored form or their bytes, else by the ``==`` of the class."""
    cls = type(old)
    entry = BY_CLASS.get(cls)
    try:
        if entry is not None:
            return exact(entry.adapter.plain(old), entry.adapter.plain(new))
        if cls.__module__ == "numpy" and hasattr(old, "tobytes"):
            return bool(old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes())
        if cls in BY_TYPE:
            # Their ``==`` ignores a deque's maxlen, a Counter's zeros, the ends of a range, the case of a Windows path.
            return encode(old) == encode(new)
        return bool(old == new)
    except RecursionError:
        raise
    except Exception:
        # The class's own code failed, or ``==`` returned an array. Nothing is known, so the value counts as changed.
        return False


_BY_EQUALITY: Final = frozenset({str, int, bool, bytes, type(None)})
_COMPARE: Final[dict[type, Callable[[Any, Any], bool]]] = {
    float: _exact_float,
    complex: lambda old, new: _exact_float(old.real, new.real) and _exact_float(old.imag, new.imag),
    Decimal: lambda old, new: bool(old.as_tuple() == new.as_tuple()),
    list: _exact_items,
    tuple: _exact_items,
    dict: _exact_dict,
    set: _exact_set,
    frozenset: _exact_set,
    datetime: _exact_time,
    time: _exact_time,
    timezone: lambda old, new: bool(old == new and old.tzname(None) == new.tzname(None)),
}


Operation: TypeAlias = dict[str, Any]

BLOCK_ITEMS_MAX: Final = 256
"""The most list items to compare in one pass of the C encoder, before searching for the item that differs."""

_INDEX_DIGITS_MAX: Final = 15
_TOO_DEEP: Final = "a state contains itself, or is nested too deep to be compared or changed"
_STR_ONLY: Final = frozenset({str})


@dataclasses.dataclass(frozen=True, repr=False)
class Diff:
    """The operations that turn one state into another; false if there are none."""

    patch: tuple[Operation, ...]
    before: str = "before"
    after: str = "after"
    # The values that each operation removes, to show to people: a patch alone does not contain them.
    gone: tuple[Any, ...] = dataclasses.field(default=(), compare=False)
    # The top-level keys that hold a list: in a path, an index looks like a key.
    lists: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.patch)

    def __len__(self) -> int:
        return len(self.patch)

    def __repr__(self) -> str:
        # Never show the values: they may be huge, and they may be secret.
        return f"<Diff {self.before!r} to {self.after!r}, {len(self.patch)} operations>"

    def __str__(self) -> str:
        return text(self.before, self.after, self.patch, self.gone)

    def _repr_html_(self) -> str:
        return table(self.before, self.after, self.patch, self.gone)

    def summary(self) -> str:
        """Return one line for each top-level key that changed, such as ``messages: 3 appended, 1 replaced``."""
        return summary(self.patch, self.lists)

    def to_json(self) -> list[Operation]:
        """Return the patch as plain JSON values. InvalidInput names the path of a value that JSON cannot represent."""
        for operation in self.patch:
            if "value" in operation:
                _check_json(operation["value"], operation["path"])
        return [copied(operation) for operation in self.patch]

    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the state with this diff applied; see ``apply_patch``."""
        return apply_patch(state, self.patch)


def diff(a: Checkpoint | Mapping[str, Any], b: Checkpoint | Mapping[str, Any]) -> Diff:
    """Return the diff that turns ``a`` into ``b``, each a checkpoint or a state. Neither is changed or kept."""
    before, old = _labelled(a, "before")
    after, new = _labelled(b, "after")
    writer = _Writer()
    try:
        writer.dicts(old, new, "")
    except RecursionError:
        raise InvalidInput(_TOO_DEEP) from None
    changed = {pointer_parts(operation["path"])[0] for operation in writer.patch}
    lists = frozenset(key for key in changed if type(old.get(key)) is list)
    return Diff(tuple(writer.patch), before, after, tuple(writer.gone), lists)


def _labelled(side: Checkpoint | Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    if isinstance(side, Checkpoint):
        return f"{side.id} (step {side.step})", side.state
    return name, _state(side)


def _state(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not _STR_ONLY.issuperset(map(type, given)):
        raise InvalidInput("a state must be a mapping with text keys", hint="Give a checkpoint or its state")
    return dict(given)


class _Writer:
    """Collects the patch from left to right: each operation applies to the state as changed so far."""

    def __init__(self) -> None:
        self.patch: list[Operation] = []
        self.gone: list[Any] = []

    def add(self, value: Any, path: str) -> None:
        self.patch.append({"op": "add", "path": path, "value": copied(value)})
        self.gone.append(None)

    def remove(self, old: Any, path: str) -> None:
        self.patch.append({"op": "remove", "path": path})
        self.gone.append(copied(old))

    def replace(self, old: Any, new: Any, path: str) -> None:
        self.patch.append({"op": "replace", "path": path, "value": copied(new)})
        self.gone.append(copied(old))

    def edit(self, old: Any, new: Any, path: str) -> None:
        if old is new:
            return
        if type(old) is list and type(new) is list:
            self.lists(old, new, path)
        elif _is_object(old) and _is_object(new):
            self.dicts(old, new, path)
        elif not exact(old, new):
            self.replace(old, new, path)

    def dicts(self, old: dict[str, Any], new: dict[str, Any], path: str) -> None:
        for key, value in old.items():
            if key not in new:
                self.remove(value, f"{path}/{_escape(key)}")
            elif value is not new[key]:
                self.edit(value, new[key], f"{path}/{_escape(key)}")
        for key, value in new.items():
            if key not in old:
                self.add(value, f"{path}/{_escape(key)}")

    def lists(self, old: list[Any], new: list[Any], path: str) -> None:
        start = _shared(old, new)
        end = _shared(old[start:][::-1], new[start:][::-1])
        old, new = old[start : len(old) - end], new[start : len(new) - end]
        if not old and not new:
            return
        kept = _Alignment(old, new)
        for (i, j), (i_next, j_next) in pairwise([(-1, -1), *kept.pairs, (len(old), len(new))]):
            last = i_next == len(old) and j_next == len(new) and not end
            self._gap(old[i + 1 : i_next], new[j + 1 : j_next], (path, start + j + 1), last=last, whole=kept.by_id)
            if j_next < len(new) and kept.may_differ(j_next):
                self.edit(old[i_next], new[j_next], f"{path}/{start + j_next}")

    def _gap(self, old: list[Any], new: list[Any], place: tuple[str, int], *, last: bool, whole: bool) -> None:
        """Write the changes of the items between two items that stay. Items that have ids are replaced ``whole``."""
        path, at = place
        common = min(len(old), len(new))
        change = self.replace if whole else self.edit
        for index in range(common):
            change(old[index], new[index], f"{path}/{at + index}")
        for value in old[common:]:
            self.remove(value, f"{path}/{at + common}")
        for index in range(common, len(new)):
            self.add(new[index], f"{path}/-" if last else f"{path}/{at + index}")


class _Alignment:
    """Pairs of indices, rising in both lists, of items that are the same item, perhaps edited."""

    def __init__(self, old: list[Any], new: list[Any]) -> None:
        self.pairs: list[tuple[int, int]] = []
        self.by_id = False
        if not old or not new:
            return
        ids = _ids(old), _ids(new)
        self.by_id = ids[0] is not None and ids[1] is not None
        old_names, self._new_names = (ids[0] or [], ids[1] or []) if self.by_id else (_contents(old), _contents(new))
        where = {name: index for index, name in enumerate(old_names)}
        self.pairs = _rising([(where[name], j) for j, name in enumerate(self._new_names) if name in where])

    def may_differ(self, index: int) -> bool:
        """Return whether an item of the new list that stays could still have been edited."""
        return type(self._new_names[index][0]) is not bytes


def _ids(items: list[Any]) -> list[tuple[Any, ...]] | None:
    """Return each item's id with its type, because 1 is not True; None unless all have an id and no two are equal."""
    ids = [item.get("id") if type(item) is dict else getattr(item, "id", None) for item in items]
    try:
        names = [(type(name), name) for name in ids]
        unique = len(set(names)) == len(names)
    except TypeError:
        return None
    return names if unique and not any(name is None for name in ids) else None


def _contents(items: list[Any]) -> list[tuple[Any, ...]]:
    """Return each item's encoding, numbered among equal items. An item without an encoding is known by its type."""
    seen: Counter[Any] = Counter()
    names = []
    for item in items:
        try:
            name: Any = encode(item)
        except EncodeError:
            name = type(item)
        names.append((name, seen[name]))
        seen[name] += 1
    return names


def _rising(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of pairs whose first numbers rise; the second numbers already do."""
    ends: list[int] = []  # by length of the run: the smallest first number that such a run ends with
    last: list[int] = []  # by length of the run: the index of that pair
    previous: list[int] = []  # by pair: the index of the pair before it in its run
    for at, (first, _) in enumerate(pairs):
        length = bisect_left(ends, first)
        previous.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [first]
        last[length : length + 1] = [at]
    run = []
    at = last[-1] if last else -1
    while at >= 0:
        run.append(pairs[at])
        at = previous[at]
    return run[::-1]


def _shared(old: list[Any], new: list[Any]) -> int:
    """Return how many items two lists share at their start. Compares blocks, which are halved where one differs."""
    most = min(len(old), len(new))
    at, step = 0, BLOCK_ITEMS_MAX
    while at < most and step:
        stop = min(at + step, most)
        if _same_block(old[at:stop], new[at:stop]):
            at = stop
        else:
            step = (stop - at) // 2
    return at


def _same_block(old: list[Any], new: list[Any]) -> bool:
    """Return whether two lists of the same length are the same.

    May return False if a NaN has other bits, or is in a dict whose keys are in another order. Comparing the items then
    finds no change.
    """
    if all(map(is_, old, new)):
        return True
    try:
        if ormsgpack.packb(old, option=EXACT) == ormsgpack.packb(new, option=EXACT):
            # The C encoder writes a bytearray as bytes.
            return not holds_silently_changed([old, new]) or all(map(exact, old, new))
    except (TypeError, ValueError, RecursionError):
        return all(map(exact, old, new))  # a type that the C encoder does not know
    # Lists that are equal but have different bytes have keys in another order, or 1 for True. A full comparison
    # decides.
    return old == new and all(map(exact, old, new))


def apply_patch(state: Mapping[str, Any], patch: Sequence[Operation]) -> dict[str, Any]:
    """Return a copy of the state with the operations applied in order: add, remove and replace.

    Lists, dicts, tuples and sets are copied, so that the result shares none of them with the state or the patch; other
    objects are shared. Raises InvalidInput, which names the operation, if one does not fit.
    """
    try:
        result: dict[str, Any] = copied(_state(state))
    except RecursionError:
        raise InvalidInput(_TOO_DEEP) from None
    for number, operation in enumerate(patch, 1):
        try:
            _perform(result, operation)
        except _Misfit as misfit:
            name, path = (operation.get(part) if isinstance(operation, Mapping) else None for part in ("op", "path"))
            raise InvalidInput(
                f"operation {number} ({name!s:.20} {path!r:.200}) does not fit: {misfit}",
                path=path if isinstance(path, str) else None,
            ) from None
    return result


class _Misfit(Exception):
    """The reason why an operation cannot be applied."""


def _perform(state: dict[str, Any], operation: Operation) -> None:
    if not isinstance(operation, Mapping) or operation.get("op") not in ("add", "remove", "replace"):
        raise _Misfit("it must be add, remove or replace")
    op = operation["op"]
    if op != "remove" and "value" not in operation:
        raise _Misfit("it has no value")
    *parents, last = pointer_parts(operation.get("path"))
    target: Any = state
    for part in parents:
        target = target[_existing(target, part)]
    if op == "remove":
        del target[_existing(target, last)]
    elif op == "replace":
        target[_existing(target, last)] = copied(operation["value"])
    elif type(target) is list:
        target.insert(len(target) if last == "-" else _index(last, len(target)), copied(operation["value"]))
    elif _is_object(target):
        target[last] = copied(operation["value"])
    else:
        raise _Misfit(f"a {type(target).__name__} has no keys or indices")


def _existing(target: Any, part: str) -> Any:
    """Return an existing key or index."""
    if type(target) is list:
        return _index(part, len(target) - 1)
    if not _is_object(target):
        raise _Misfit(f"a {type(target).__name__} has no keys or indices")
    if part not in target:
        raise _Misfit("the key does not exist")
    return part


def _index(part: str, most: int) -> int:
    # Accept them only as RFC 6901 writes them: int() would also take "-1", "01", " 1" and digits of other scripts.
    if not (part.isascii() and part.isdigit()) or (part[0] == "0" and part != "0") or len(part) > _INDEX_DIGITS_MAX:
        raise _Misfit(f"{part!r:.40} is not an index of a list")
    if int(part) > most:
        raise _Misfit("the list has fewer items")
    return int(part)


def pointer_parts(path: Any) -> list[str]:
    """Return the keys and indices of a JSON pointer, unescaped."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise _Misfit("its path must be text that starts with a slash")
    return [part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/")]


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _is_object(value: Any) -> bool:
    return type(value) is dict and _STR_ONLY.issuperset(map(type, value))


def _check_json(value: Any, path: str) -> None:
    if type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{path}/{index}")
    elif _is_object(value):
        for key, item in value.items():
            _check_json(item, f"{path}/{_escape(key)}")
    elif not (value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))):
        raise InvalidInput(
            f"JSON cannot carry the {type(value).__name__} at {path!r}", hint="Use .patch, which holds it", path=path
        )
