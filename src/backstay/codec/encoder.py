"""Values to msgpack, in one pass of the C encoder; a value that could not come back equal is refused by its path.

The C encoder is told to hand over every type it would otherwise change in silence. What it hands over is looked up by
exact type and written as an ext, whose payload is again such a pass, one ext level further down. Three things need a
second look, and only then cost anything:

- a dict with a key that is not a str stops the pass; it is run again with such dicts wrapped (``values.Pairs``);
- bytearray and memoryview are written as bytes without asking, so a value whose output has a byte that could begin
  bytes is searched for them (ints, floats and text have such bytes too, so this is the common case for large values);
- any failure starts the slow search for the path of the offender (``offender.py``), and that error is what is raised.

One limit is known: ``ormsgpack.Ext`` and ``ormsgpack.Fragment`` objects are written as they are unless one of these
searches meets them. They are tools for writing msgpack by hand and have no business in a state.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import ormsgpack

from backstay.codec import offender
from backstay.codec.depth import deeper_than
from backstay.codec.limits import EXT_DEPTH_MAX, EXT_INNER_DEPTH_MAX, VALUE_BYTES_MAX
from backstay.codec.opaque import Opaque
from backstay.codec.refusal import Refused
from backstay.codec.registry import BY_CLASS, head
from backstay.codec.values import BY_TYPE, OBJECT, Pairs, builtin

# With these the C encoder hands over, or refuses, every type that it would otherwise write as another.
EXACT: Final = (
    ormsgpack.OPT_PASSTHROUGH_BIG_INT
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
_FOREIGN: Final = frozenset({bytearray, memoryview, ormsgpack.Ext, ormsgpack.Fragment})
_STR_ONLY: Final = frozenset({str})
_CONTAINERS: Final = frozenset({list, dict})


def encode(value: object, path: str = "value") -> bytes:
    """Return the msgpack of a value; EncodeError names the part of it that could not come back equal."""
    try:
        data = ormsgpack.packb(value, option=EXACT)
    except (TypeError, ValueError, RecursionError):
        data = _encode_with_ext(value, path)
    else:
        # Nothing but what msgpack has types for; only bytes may have been something else.
        if (b"\xc4" in data or b"\xc5" in data or b"\xc6" in data) and holds_foreign(value):
            offender.find(value, path, Refused("bytearray or memoryview"))
    if len(data) > VALUE_BYTES_MAX:
        raise offender.error(path, f"encodes to more than {VALUE_BYTES_MAX} bytes", None)
    return data


def _encode_with_ext(value: object, path: str) -> bytes:
    """Encode a value that holds more than msgpack's own types, first without and then with wrapped dicts."""
    for wrapping in (False, True):
        run = _Run(wrapping)
        try:
            return run.level(value)
        except (TypeError, ValueError, Refused, RecursionError) as error:
            failure: Exception = error
            if run.interrupt is not None:
                raise run.interrupt from None
    offender.find(value, path, failure)


class _Run:
    """One attempt at encoding one value."""

    __slots__ = ("_depth", "_wrapping", "interrupt")

    def __init__(self, wrapping: bool) -> None:
        self._depth = 0
        self._wrapping = wrapping
        self.interrupt: BaseException | None = None

    def level(self, value: object) -> bytes:
        """Encode the lists, dicts and scalars of one ext level."""
        data = ormsgpack.packb(wrap(value) if self._wrapping else value, default=self._extend, option=EXACT)
        if (b"\xc4" in data or b"\xc5" in data or b"\xc6" in data) and holds_foreign(value):
            raise Refused("bytearray or memoryview")
        return data

    def _inner(self, value: object) -> bytes:
        data = self.level(value)
        if deeper_than(data, EXT_INNER_DEPTH_MAX):
            raise Refused("nested too deep")
        return data

    def _extend(self, value: Any) -> ormsgpack.Ext:
        """Turn what msgpack has no type for into an ext. The C encoder drops the errors raised here."""
        self._depth += 1
        try:
            if self._depth > EXT_DEPTH_MAX:
                raise Refused("nested too deep")
            return self._ext(value)
        except Exception:
            raise
        except BaseException as interrupt:
            # Ctrl-C must not be taken for a value that cannot be encoded.
            self.interrupt = interrupt
            raise
        finally:
            self._depth -= 1

    def _ext(self, value: Any) -> ormsgpack.Ext:
        cls = type(value)
        known = BY_TYPE.get(cls)
        if known is not None:
            return ormsgpack.Ext(known.code, known.pack(value, self._inner))
        entry = BY_CLASS.get(cls)
        if entry is not None:
            return ormsgpack.Ext(OBJECT, entry.head + self._inner(entry.kind.plain(value)))
        if cls is Opaque:
            return ormsgpack.Ext(value.ext, opaque_bytes(value))
        known = builtin(cls)
        if known is None:
            raise offender.unknown(cls)
        return ormsgpack.Ext(known.code, known.pack(value, self._inner))


def opaque_bytes(value: Opaque) -> bytes:
    """Return the ext payload an opaque value was decoded from."""
    return head(value.name, value.version) + value.raw if value.ext == OBJECT else value.raw


def wrap(value: Any) -> Any:
    """Return the value with each dict that has a key other than str wrapped; what holds none is not copied."""
    if type(value) is list:
        items = [wrap(item) for item in value]
        return value if all(map(_is, items, value)) else items
    if type(value) is dict:
        if not _STR_ONLY.issuperset(map(type, value)):
            return Pairs(value)
        changed = {key: wrap(item) for key, item in value.items()}
        return value if all(map(_is, changed.values(), value.values())) else changed
    return value


def _is(left: object, right: object) -> bool:
    return left is right


def holds_foreign(value: object) -> bool:
    """Tell whether the lists and dicts of one level hold a type the C encoder would change in silence.

    Goes one nesting level at a time, so that the C functions used see many items at once; the last level, which is the
    largest, is looked at and not copied.
    """
    lists, dicts = [[value]], list[dict[Any, Any]]()
    while lists or dicts:
        kinds = set(map(type, _items(lists, dicts)))
        if not _FOREIGN.isdisjoint(kinds):
            return True
        below = [item for item in _items(lists, dicts) if type(item) in _CONTAINERS] if kinds & _CONTAINERS else []
        lists = [item for item in below if type(item) is list]
        dicts = [item for item in below if type(item) is dict]
    return False


def _items(lists: list[list[Any]], dicts: list[dict[Any, Any]]) -> chain[Any]:
    return chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts)))
