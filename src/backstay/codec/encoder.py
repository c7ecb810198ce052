"""Values to msgpack, in one pass of the C encoder; a value that would not round-trip is refused by its path.

The C encoder is set to hand over every type that it would otherwise change silently. Those values are looked up by
exact type and written as an ext, whose payload is again such a pass, one ext level further down. Three cases need a
second look, and only they cost more:

- a dict with a key that is not a str stops the pass; it is run again with such dicts wrapped (``values.Pairs``);
- the C encoder writes bytearray and memoryview as bytes without asking, so a value whose output has a byte that could
  start bytes is searched for them (ints, floats and text have such bytes too, so this is common for large values). If
  there is one, the pass is run again with bytearrays wrapped;
- any failure starts the slow search for the path of the value, and that error is raised. The search walks the value as
  its owner sees it and tries each leaf alone. It names keys and types but never shows a value: states hold secrets.

There is one known gap: ``ormsgpack.Ext`` and ``ormsgpack.Fragment`` objects are written as they are unless one of these
searches meets them. They are tools for building msgpack and do not belong in a state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from enum import Enum
from itertools import chain
from typing import Any, Final, NamedTuple, NoReturn

import ormsgpack

from backstay.codec.msgpack import (
    DEPTH_MAX,
    EXT_DEPTH_MAX,
    EXT_INNER_DEPTH_MAX,
    VALUE_BYTES_MAX,
    Unencodable,
    deeper_than,
)
from backstay.codec.registry import BY_CLASS, Opaque, object_head
from backstay.codec.values import BY_TYPE, BYTEARRAY, OBJECT, Pairs, builtin
from backstay.errors import EncodeError

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
_CHANGED_SILENTLY: Final = frozenset({bytearray, memoryview, ormsgpack.Ext, ormsgpack.Fragment})
_STR_ONLY: Final = frozenset({str})
_CONTAINERS: Final = frozenset({list, dict})
_SEQUENCES: Final = frozenset({list, tuple, deque})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_PLAIN: Final = frozenset({type(None), bool, float, bytes, Opaque})
_KEY_CHARS_MAX: Final = 60
_PATH_CHARS_MAX: Final = 400


def encode(value: object, path: str = "value") -> bytes:
    """Return the msgpack of a value; EncodeError names the part of it that would not round-trip."""
    try:
        data = ormsgpack.packb(value, option=EXACT)
    except (TypeError, ValueError, RecursionError):
        data = _encode_with_ext(value, path)
    else:
        # It has only types that msgpack has too. Only bytes may have been of another type.
        if (b"\xc4" in data or b"\xc5" in data or b"\xc6" in data) and holds_silently_changed(value):
            data = _encode_with_ext(value, path)
    if len(data) > VALUE_BYTES_MAX:
        raise EncodeError(f"{path}: encodes to more than {VALUE_BYTES_MAX} bytes", path=path)
    return data


def _encode_with_ext(value: object, path: str) -> bytes:
    """Encode a value that holds more than msgpack's own types, first as it is and then wrapped."""
    for wrapping in (False, True):
        run = _Encoding(wrapping)
        try:
            return run.level(value)
        except (TypeError, ValueError, Unencodable, RecursionError) as error:
            failure: Exception = error
            if run.interrupt is not None:
                raise run.interrupt from None
    _raise_unencodable(value, path, failure)


class _Encoding:
    """One attempt at encoding one value."""

    __slots__ = ("depth", "interrupt", "wrapping")

    def __init__(self, wrapping: bool) -> None:
        self.depth = 0
        self.wrapping = wrapping
        self.interrupt: BaseException | None = None

    def level(self, value: object) -> bytes:
        """Encode the lists, dicts and scalars of one ext level."""
        if self.wrapping:
            return ormsgpack.packb(wrap(value), default=self.extend, option=EXACT)
        data = ormsgpack.packb(value, default=self.extend, option=EXACT)
        if (b"\xc4" in data or b"\xc5" in data or b"\xc6" in data) and holds_silently_changed(value):
            raise Unencodable("bytearray or memoryview")
        return data

    def inner(self, value: object) -> bytes:
        """Encode one level inside an ext."""
        data = self.level(value)
        if deeper_than(data, EXT_INNER_DEPTH_MAX):
            raise Unencodable("nested too deep")
        return data

    def extend(self, value: Any) -> ormsgpack.Ext:
        """Return a value of a type that msgpack does not have as an ext. The C encoder drops the errors raised here."""
        self.depth += 1
        try:
            if self.depth > EXT_DEPTH_MAX:
                raise Unencodable("nested too deep")
            cls = type(value)
            entry = BY_CLASS.get(cls)
            if entry is not None:
                return ormsgpack.Ext(OBJECT, entry.head + self.inner(entry.adapter.plain(value)))
            if cls is Opaque:
                head = object_head(value.name, value.version) if value.ext == OBJECT else b""
                return ormsgpack.Ext(value.ext, head + value.raw)
            known = BY_TYPE.get(cls) or builtin(cls)
            if known is None:
                raise Unencodable("unknown type")
            return ormsgpack.Ext(known.code, known.pack(value, self.inner))
        except Exception:
            raise
        except BaseException as interrupt:
            # Ctrl-C must not be mistaken for a value that cannot be encoded.
            self.interrupt = interrupt
            raise
        finally:
            self.depth -= 1


def wrap(value: Any) -> Any:
    """Return one level with each bytearray, and each dict that has a key other than str, as the C encoder takes it.

    Parts that hold neither are not copied.
    """
    cls = type(value)
    if cls is list:
        items = [wrap(item) for item in value]
        return value if all(map(_is, items, value)) else items
    if cls is dict:
        if not _STR_ONLY.issuperset(map(type, value)):
            return Pairs(value)
        changed = {key: wrap(item) for key, item in value.items()}
        return value if all(map(_is, changed.values(), value.values())) else changed
    if cls is bytearray:
        return ormsgpack.Ext(BYTEARRAY, bytes(value))
    if cls in _CHANGED_SILENTLY:
        raise Unencodable("memoryview")
    return value


def _is(left: object, right: object) -> bool:
    return left is right


def holds_silently_changed(value: object) -> bool:
    """Return whether the lists and dicts of one level hold a type that the C encoder would change silently.

    It looks at one nesting level at a time, so that the C functions see many items at once; the last level, which is
    the largest, is not copied.
    """
    lists, dicts = [[value]], list[dict[Any, Any]]()
    while lists or dicts:
        kinds = set(map(type, _items(lists, dicts)))
        if not _CHANGED_SILENTLY.isdisjoint(kinds):
            return True
        below = [item for item in _items(lists, dicts) if type(item) in _CONTAINERS] if kinds & _CONTAINERS else []
        lists = [item for item in below if type(item) is list]
        dicts = [item for item in below if type(item) is dict]
    return False


def _items(lists: list[list[Any]], dicts: list[dict[Any, Any]]) -> chain[Any]:
    return chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts)))


# The slow search for the part that cannot be stored -----------------------------------------------------------------


class _Part(NamedTuple):
    """A value still to be examined."""

    value: Any
    path: str
    depth: int  # containers around it in its ext level
    ext_depth: int  # ext levels around it


def _raise_unencodable(value: object, path: str, failure: Exception) -> NoReturn:
    """Raise the EncodeError of the first part that cannot be stored."""
    stack = [_Part(value, path, 0, 0)]
    while stack:
        part = stack.pop()
        at, reason, hint = part.path, "", None
        limit = EXT_INNER_DEPTH_MAX if part.ext_depth else DEPTH_MAX
        too_deep = part.depth > limit or (part.depth == limit and type(part.value) in _CONTAINERS)
        try:
            if too_deep or part.ext_depth > EXT_DEPTH_MAX:
                at = at if len(at) <= _PATH_CHARS_MAX else at[:_PATH_CHARS_MAX] + "..."
                limits = (
                    f"At most {DEPTH_MAX} lists and dicts, {EXT_INNER_DEPTH_MAX} of them inside another type, and "
                    f"{EXT_DEPTH_MAX} other types in one another"
                )
                raise Unencodable("nested too deep, or it contains itself", limits)
            stack.extend(reversed(list(_inside(part))))
            continue
        except Unencodable as refused:
            reason, hint, cause = refused.reason, refused.hint, refused.__cause__
        except EncodeError:
            raise
        except Exception as error:
            # User code failed: an encode function or a property. Its text may hold values, so only its type shows.
            reason, cause = f"{type(error).__name__} while reading a {type(part.value).__qualname__}", error
        raise EncodeError(f"{at}: {reason}", path=at, hint=hint) from cause
    raise EncodeError(f"{path}: cannot be stored ({type(failure).__name__})", path=path) from failure


def _inside(part: _Part) -> Iterator[_Part]:
    """Yield the parts of a container or a registered class; check any other value alone."""
    value, path, depth, ext_depth = part
    cls = type(value)
    if cls in BY_CLASS:
        yield _Part(BY_CLASS[cls].adapter.shown(value), path, 0, ext_depth + 1)
        return
    if cls in _SEQUENCES or cls in _MAPPINGS:
        is_plain = cls is list or (cls is dict and _STR_ONLY.issuperset(map(type, value)))
        depth, ext_depth = (depth + 1, ext_depth) if is_plain else (1, ext_depth + 1)
        if cls in BY_TYPE:
            BY_TYPE[cls].pack(value, lambda _: b"")  # which refuses what is not an item, such as a factory
    if cls in _SEQUENCES:
        for index, item in enumerate(value):
            yield _Part(item, f"{path}[{index}]", depth, ext_depth)
    elif cls in _MAPPINGS:
        for key, item in value.items():
            inside = path + _step(key)
            yield _Part(key, f"{inside} (key)", depth, ext_depth)
            yield _Part(item, inside, depth, ext_depth)
    elif cls is set or cls is frozenset:
        for item in value:
            yield _Part(item, f"{path}{{{type(item).__qualname__}}}", 0, ext_depth + 1)
    else:
        _check_leaf(value)


def _check_leaf(value: Any) -> bytes:
    """Raise Unencodable if a value without parts cannot be stored."""
    cls = type(value)
    if cls is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unencodable("str with a lone surrogate cannot be stored") from None
    elif cls not in _PLAIN and not (cls is int and -(2**63) <= value < 2**64):
        known = builtin(cls)
        if known is None:
            name = f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__
            what = "a class" if isinstance(value, type) else f"a value of type {name}"
            raise Unencodable(f"{what} cannot be stored", _hint(cls))
        known.pack(value, lambda parts: b"".join(map(_check_leaf, parts)))  # type: ignore[call-overload] # why: the ints of a Fraction or range
    return b""


def _step(key: object) -> str:
    """Return how a path names the value of a key."""
    if type(key) is str:
        short = key if len(key) <= _KEY_CHARS_MAX else key[:_KEY_CHARS_MAX] + "..."
        return f".{key}" if key == short and key.isidentifier() else f"[{short!a}]"
    if type(key) in (int, bool, type(None)):
        return f"[{key!r}]" if type(key) is not int or key.bit_length() <= 64 else "[int]"
    return f"[{type(key).__qualname__}]"


# Hints for values that cannot be stored ---------------------------------------------------------------------------

_REGISTER: Final = "Register the class with @backstay.register"
_TO_LIST: Final = "Make a list of it"

_HINTS: Final = {
    name: hint
    for hint, names in {
        "Convert it to bytes": ("builtins.memoryview",),
        "Convert it to dict": ("builtins.mappingproxy",),
        "Store its name, and look it up after loading": (
            *("builtins.module", "builtins.type", "builtins.function", "builtins.method"),
            *("builtins.builtin_function_or_method", "functools.partial", "functools._lru_cache_wrapper"),
        ),
        "Store its text, such as repr(error)": ("builtins.BaseException",),
        "Make a list of it: [item async for item in ...]": ("builtins.async_generator",),
        "Store its .pattern and .flags, and compile it after loading": ("re.Pattern",),
        "Store its .groups() or .groupdict()": ("re.Match",),
        "Store its content: .getvalue()": ("_io.BytesIO", "_io.StringIO"),
        "Convert it with .tolist() or .tobytes()": ("array.array",),
        "Convert it to a plain array, or to lists with .tolist()": ("numpy",),
        "Convert it to plain values, such as .to_dict(), .tolist() or .to_pydatetime()": ("pandas",),
        "Store the value itself, not its msgpack": ("ormsgpack",),
        "It belongs to this process: keep it outside the state, and store what you need to create it again": (
            *("_asyncio", "_io", "_queue", "_socket", "_ssl", "_thread", "asyncio", "concurrent", "multiprocessing"),
            *("queue", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading"),
        ),
    }.items()
    for name in names
}
"""By the name of a class, or of the package that defines it or one of its bases. Nothing is imported for this."""

_STORED: Final = frozenset({*BY_TYPE, str, bytes, float, list, dict})


def _hint(cls: type) -> str:
    """Return what to do about a value of a class that cannot be stored."""
    if hasattr(cls, "__await__"):
        return "It was not awaited: did you forget await?"
    for base in cls.__mro__:
        for name in (f"{base.__module__}.{base.__qualname__}", base.__module__.partition(".")[0]):
            if name in _HINTS:
                return _HINTS[name]
    if issubclass(cls, Iterator | KeysView | ValuesView | ItemsView):
        return _TO_LIST
    if issubclass(cls, Enum):
        return f"{_REGISTER}, or store its .value"
    # NamedTuples are subclasses of stored types that can be registered without functions.
    for base in () if hasattr(cls, "_fields") else cls.__mro__:
        if base in _STORED:
            return f"Convert it to {base.__name__}, or register the class with encode= and decode="
    return _REGISTER
