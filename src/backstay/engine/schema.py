"""A graph's state, as declared: which keys there are, how updates are folded in, and what of it is stored.

It may be a dataclass, a TypedDict, a pydantic model or a plain dict. Nodes are handed what was declared; the engine
itself works on a dict of values. Fields that only live while the program runs (clients, caches, locks) are marked
``Annotated[Client, transient]`` and not stored; a class with ``snapshot()`` and ``restore()`` decides for itself.

That everything else can be stored is checked when the graph is built, by the declared types; classes that are declared
here may be stored from then on.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import inspect
import pathlib
import types
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from backstay.codec import register
from backstay.codec.kinds import kind_of
from backstay.codec.registry import BY_CLASS
from backstay.engine.reducer import DELETE, MISSING, Reducer, _Mark, reducer_of, replace
from backstay.errors import BackstayError, InvalidInput

transient: Final = _Mark("transient")
"""``Annotated[Client, transient]``: this field is not stored. It needs a default, or is handed to each run."""

_STORABLE: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal),
        *(uuid.UUID, object, Any),  # of the last two, what they are is found when it is stored
        *(collections.abc.Sequence, collections.abc.Mapping, collections.abc.MutableSequence),
        *(collections.abc.MutableMapping, collections.abc.Iterable, collections.abc.Collection, collections.abc.Set),
    }
)
_WRAPPERS: Final = (typing.Annotated, typing.Required, typing.NotRequired)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One declared key of a state."""

    name: str
    annotation: Any = Any
    reducer: Reducer = replace
    transient: bool = False
    default: Callable[[], Any] | None = None  # makes the value a new state begins with
    required: bool = False  # a run cannot begin without it


class Schema:
    """The declaration, looked at once. ``open`` states take any key."""

    def __init__(self, declared: type | None, reducers: Mapping[str, Any]) -> None:
        self.declared = dict if declared is None else declared
        self.problems: list[str] = []
        self.open = self.declared is dict
        self.fields: dict[str, Field] = {}
        self._make: Callable[[dict[str, Any]], Any] = dict
        self._look: Callable[[Any], Mapping[str, Any]] = lambda view: typing.cast("Mapping[str, Any]", view)
        self._declare()
        for name, given in reducers.items():
            self._reduce(name, given)
        self.snapshots = not self.open and _has(self.declared, "snapshot") and _has(self.declared, "restore")
        if not self.snapshots:
            for each in self.fields.values():
                self._check_storable(each)
        self._hidden = frozenset(name for name, each in self.fields.items() if each.transient)

    # Declaring ----------------------------------------------------------------------------------------------------

    def _declare(self) -> None:
        declared = self.declared
        if self.open:
            return
        if not isinstance(declared, type):
            self.problems.append(f"state is {declared!r:.60}, not a class")
        elif typing.is_typeddict(declared):
            self._fields(dict.fromkeys(declared.__annotations__), frozenset())
        elif dataclasses.is_dataclass(declared):
            given = {each.name: _dataclass_default(each) for each in dataclasses.fields(declared)}
            self._fields(given, frozenset(name for name, default in given.items() if default is None))
            self._make, self._look = _bare_maker(declared), _attributes(declared, tuple(given))
        elif (model_fields := getattr(declared, "model_fields", None)) is not None:
            given = {name: _model_default(each) for name, each in model_fields.items()}
            self._fields(given, frozenset(name for name, default in given.items() if default is None))
            construct = declared.model_construct  # type: ignore[attr-defined]  # a pydantic model, never imported here
            self._make, self._look = _model_maker(construct), vars
        else:
            self.problems.append(f"state {declared.__qualname__} is no dataclass, TypedDict, pydantic model or dict")

    def _fields(self, defaults: Mapping[str, Callable[[], Any] | None], required: frozenset[str]) -> None:
        hints = self._hints()
        for name, default in defaults.items():
            annotation = hints.get(name, Any)
            notes = _notes(annotation)
            found = [reducer for note in notes if (reducer := reducer_of(note)) is not None]
            if len(found) > 1:
                self.problems.append(f"state field {name!r} has {len(found)} reducers")
            self.fields[name] = Field(
                name,
                annotation,
                found[0] if found else replace,
                any(note is transient for note in notes),
                default,
                name in required,
            )

    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self.declared, include_extras=True)
        except NameError as error:  # a class of a function's body, named in text: its types stay unknown
            self.problems.append(
                f"state {self.declared.__qualname__} names {error.name!r}, which cannot be found: define it at the "
                "top of the module"
            )
            return {}

    def _reduce(self, name: str, given: object) -> None:
        reducer = reducer_of(given)
        if reducer is None:
            self.problems.append(f"reducer of {name!r} is {type(given).__name__}, not a function of two values")
        elif name not in self.fields and not self.open:
            self.problems.append(f"reducer for {name!r}, which the state does not have")
        else:
            self.fields[name] = dataclasses.replace(self.fields.get(name, Field(name)), reducer=reducer)

    def _check_storable(self, field: Field) -> None:
        if field.transient:
            if field.required:
                field = dataclasses.replace(field, required=False)
                self.fields[field.name] = field
            return
        for what in unstorable(field.annotation):
            self.problems.append(
                f"state field {field.name!r} holds {what}, which cannot be stored: register the class, or mark the "
                "field Annotated[…, transient]"
            )

    # Using --------------------------------------------------------------------------------------------------------

    def reducer(self, key: str) -> Reducer:
        """Return how updates of a key are folded in."""
        field = self.fields.get(key)
        return replace if field is None else field.reducer

    def knows(self, key: str) -> bool:
        """Tell whether a state may have this key."""
        return self.open or key in self.fields

    def begin(self, given: Mapping[str, Any], graph: str) -> dict[str, Any]:
        """Return the values a run begins with: what was given, and defaults."""
        given = self.given(given, graph)
        values = {name: each.default() for name, each in self.fields.items() if each.default and name not in given}
        values |= {
            key: value.copy() if type(value) in (list, dict, set) else value  # the caller's own stays as it is
            for key, value in given.items()
            if value is not DELETE
        }
        missing = [name for name, each in self.fields.items() if each.required and name not in values]
        if missing:
            raise InvalidInput(
                f"graph {graph!r} needs {', '.join(map(repr, missing))} to begin with", hint="Pass it as input"
            )
        return values

    def given(self, given: object, graph: str) -> Mapping[str, Any]:
        """Return what a caller handed over as keys and values: a mapping, or an instance of what was declared."""
        if not isinstance(given, Mapping) and not typing.is_typeddict(self.declared):
            given = self._look(given) if isinstance(given, self.declared) else given
        if not isinstance(given, Mapping):
            raise InvalidInput(
                f"graph {graph!r} begins with a mapping of keys to values, not {type(given).__name__}",
                hint=f"Pass a dict, or a {self.declared.__qualname__}",
            )
        unknown = sorted(str(key) for key in given if not (isinstance(key, str) and self.knows(key)))
        if unknown:
            raise InvalidInput(
                f"graph {graph!r} has no state key {unknown[0]!r}", hint=f"Its keys are {', '.join(self.fields)}"
            )
        return given

    def restore(self, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a stored projection; what is not stored is given anew or made by its default."""
        values = dict(stored)
        if self.snapshots:
            restored = self.declared.restore(values)  # type: ignore[attr-defined]  # checked when declared
            values = dict(self._look(restored))
        for name, each in self.fields.items():
            if each.transient and each.default is not None:
                values.setdefault(name, each.default())
        return {**values, **given}

    def stored(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what of the values is stored."""
        if self.snapshots:
            return typing.cast("Mapping[str, Any]", self.view(values).snapshot())
        hidden = self._hidden
        return {key: value for key, value in values.items() if key not in hidden} if hidden else values

    def is_stored(self, key: str) -> bool:
        """Tell whether a key is stored as it is."""
        field = self.fields.get(key)
        return field is None or not field.transient

    def view(self, values: Mapping[str, Any]) -> Any:
        """Return the values as a node sees them: an instance of what was declared, its own at the first level."""
        return self._make(dict(values))

    def mutated(self, view: Any, values: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
        """Return a key that was changed in a view instead of being returned as an update."""
        seen = self._look(view)
        for key, value in values.items():
            if seen.get(key, MISSING) is not value or (key in sizes and len(value) != sizes[key]):
                return key
        return next((key for key in seen if key not in values), None)


def sizes_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths of what can grow in place."""
    return {key: len(value) for key, value in values.items() if type(value) in (list, dict, set)}


def undone(values: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    """Take away what was added in place to the ends of lists; return a key whose change cannot be undone."""
    damaged = None
    for key, size in sizes.items():
        value = values[key]
        if len(value) > size and type(value) is list:
            del value[size:]
        elif len(value) != size:
            damaged = key
    return damaged


def unstorable(annotation: Any, around: frozenset[type] = frozenset()) -> Iterator[str]:
    """Yield what a declared type may hold that can never be stored. Classes with fields are registered on the way.

    ``around`` are the classes that it stands in: one may hold others of its kind.
    """
    origin = typing.get_origin(annotation)
    if origin in _WRAPPERS:
        yield from unstorable(typing.get_args(annotation)[0], around)
    elif origin in (typing.Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from unstorable(each, around)
    elif origin is collections.abc.Callable:
        yield "a function"
    elif origin is not None and origin is not typing.Literal:
        yield from _unstorable_class(origin, around)
        for each in typing.get_args(annotation):
            if each is not Ellipsis:
                yield from unstorable(each, around)
    elif isinstance(annotation, type):
        yield from _unstorable_class(annotation, around)
    elif inspect.isroutine(annotation):  # such as threading.Lock, which is a function that makes one
        yield annotation.__qualname__


def _unstorable_class(cls: type, around: frozenset[type]) -> Iterator[str]:
    if cls in _STORABLE or cls in BY_CLASS or cls.__module__.partition(".")[0] == "numpy" or _is_abstract(cls):
        return
    if cls in around:
        return
    if not typing.is_typeddict(cls) and (issubclass(cls, pathlib.PurePath) or kind_of(cls) is None):
        yield cls.__qualname__
        return
    inside = [what for each in _declared_inside(cls) for what in unstorable(each, around | {cls})]
    if inside:
        yield f"{cls.__qualname__} with {inside[0]}"
        return
    if typing.is_typeddict(cls):
        return
    try:
        register(cls)
    except BackstayError as error:
        yield f"{cls.__qualname__} ({error.what})"


def _declared_inside(cls: type) -> Iterator[Any]:
    """Yield the types of a class's fields, as far as they are known."""
    if dataclasses.is_dataclass(cls):
        names = {each.name for each in dataclasses.fields(cls)}
    elif typing.is_typeddict(cls):
        names = set(cls.__annotations__)
    else:
        fields = ("_fields", "__struct_fields__", "model_fields")  # a named tuple, msgspec, pydantic
        names = {name for each in fields for name in getattr(cls, each, ())}
        names |= {each.name for each in getattr(cls, "__attrs_attrs__", ())}
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # named in text and not to be found: its values are checked when they are stored
        return
    for name in sorted(names):
        yield hints.get(name, Any)


def _is_abstract(cls: type) -> bool:
    return inspect.isabstract(cls) or bool(getattr(cls, "_is_protocol", False))


def _has(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


def _notes(annotation: Any) -> tuple[Any, ...]:
    """Return what ``Annotated`` says, also inside ``Required`` and the like."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *notes = typing.get_args(annotation)
        return (*notes, *_notes(inner))
    if typing.get_origin(annotation) in _WRAPPERS:
        return _notes(typing.get_args(annotation)[0])
    return ()


def _dataclass_default(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is not dataclasses.MISSING:
        return lambda: field.default
    return None


def _model_default(field: Any) -> Callable[[], Any] | None:
    if field.is_required():
        return None
    made: Callable[[], Any] = lambda: field.get_default(call_default_factory=True)  # noqa: E731
    return made


def _bare_maker(cls: type) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes an instance without ``__post_init__``: its values were made by the engine."""
    assign = object.__setattr__

    def make(values: dict[str, Any]) -> Any:
        view: Any = object.__new__(cls)
        for name, value in values.items():
            assign(view, name, value)
        return view

    return make


def _model_maker(construct: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes a pydantic model of exactly these values: no aliases, and no defaults for others."""

    def make(values: dict[str, Any]) -> Any:
        view = construct(_fields_set=set(values))
        view.__dict__.clear()
        view.__dict__.update(values)
        return view

    return make


def _attributes(cls: type, names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that looks at an instance's own attributes: a default of the class is none of them."""
    slots = tuple(name for name in names if inspect.ismemberdescriptor(getattr(cls, name, None)))

    def look(view: Any) -> dict[str, Any]:
        own = getattr(view, "__dict__", {})
        seen = {name: own[name] for name in names if name in own}
        return seen | {name: getattr(view, name) for name in slots if hasattr(view, name)} if slots else seen

    return look
