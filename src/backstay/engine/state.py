"""The state of a graph: ``Schema`` is its declaration, ``RunState`` holds its values during a run.

A state is a dataclass, a TypedDict, a pydantic model or a plain dict. Nodes get an instance of the declared class; the
engine works on a dict of values. Fields that only exist while the program runs (clients, caches, locks) are marked
``Annotated[Client, transient]`` and not stored. A class with ``snapshot()`` and ``restore()`` decides itself what to
store.

Building a graph checks that the declared types can be stored, and registers the declared classes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from backstay.codec.arrays import is_array, is_scalar
from backstay.codec.registry import BY_CLASS, adapter_of, register
from backstay.codec.values import BY_TYPE, MUTABLE
from backstay.engine.reducers import (
    DELETE,
    MISSING,
    UNKNOWN,
    Append,
    CannotReduce,
    Clash,
    CustomReducer,
    Reducer,
    Whole,
    Writes,
    _Sentinel,
    reducer_of,
    replace,
)
from backstay.engine.validation import InvalidValue, ModelValidator
from backstay.errors import BackstayError, BadUpdate, InvalidInput, MergeConflict
from backstay.operations.arguments import await_hint
from backstay.thread.calls import ListDigests

transient: Final = _Sentinel("transient")
"""``Annotated[Client, transient]``: this field is not stored. It needs a default, or a value from ``runtime=``."""

_STORABLE: Final = frozenset(
    {
        *(type(None), bool, float, str, bytes, list, dict, *BY_TYPE, pathlib.Path, pathlib.PurePath),
        *(object, Any),  # their values are checked when they are stored
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
    default: Callable[[], Any] | None = None  # makes the initial value
    required: bool = False  # a run cannot start without it


class Schema:
    """The declaration of a state. An ``open`` state takes any key."""

    def __init__(self, declared: type | None, reducers: Mapping[str, Any], validate: bool = True) -> None:
        self.declared = dict if declared is None else declared
        self.problems: list[str] = []
        self.open = self.declared is dict
        self.fields: dict[str, Field] = {}
        self._make: Callable[[dict[str, Any]], Any] = dict
        self._look: Callable[[Any], Mapping[str, Any]] = lambda view: typing.cast("Mapping[str, Any]", view)
        self._declare()
        for name, given in reducers.items():
            reducer = reducer_of(given)
            if reducer is None:
                self.problems.append(f"reducer of {name!r} is {type(given).__name__}, not a function of two values")
            elif name not in self.fields and not self.open:
                self.problems.append(f"reducer for {name!r}, which is not a key of the state")
            else:
                self.fields[name] = dataclasses.replace(self.fields.get(name, Field(name)), reducer=reducer)
        methods = [name for name in ("snapshot", "restore") if callable(getattr(self.declared, name, None))]
        self.snapshots = not self.open and len(methods) == 2
        if not self.open and methods == ["snapshot"]:
            self.problems.append(
                f"state {self.declared.__name__} has snapshot() but no restore(): add a classmethod restore(stored)"
            )
        for name, each in [] if self.snapshots else list(self.fields.items()):
            if each.transient:
                self.fields[name] = dataclasses.replace(each, required=False)
                continue
            for what in unstorable(each.annotation):
                self.problems.append(
                    f"state field {name!r} holds {what}, which cannot be stored: register the class, or mark the "
                    "field Annotated[…, transient]"
                )
        self._hidden = frozenset(name for name, each in self.fields.items() if each.transient)
        self.validator: ModelValidator | None = None
        if validate and hasattr(self.declared, "__pydantic_core_schema__") and not self.problems:
            self.validator = ModelValidator(self.declared, {name: each.reducer for name, each in self.fields.items()})

    def _declare(self) -> None:
        """Read the fields of the declared class."""
        declared = self.declared
        if self.open:
            return
        if not isinstance(declared, type):
            self.problems.append(f"state is {declared!r:.60}, not a class")
            return
        defaults: dict[str, Callable[[], Any] | None]
        if typing.is_typeddict(declared):
            self._fields(dict.fromkeys(declared.__annotations__), frozenset())
            return
        if dataclasses.is_dataclass(declared):
            defaults = {}
            for each in dataclasses.fields(declared):
                factory = each.default_factory if each.default_factory is not dataclasses.MISSING else None
                constant = None if each.default is dataclasses.MISSING else partial(getattr, each, "default")
                defaults[each.name] = factory or constant
            self._make, self._look = _bare_maker(declared), _attributes(declared, tuple(defaults))
        elif (model_fields := getattr(declared, "model_fields", None)) is not None:
            # A pydantic model, without importing pydantic.
            defaults = {
                name: None if each.is_required() else partial(each.get_default, call_default_factory=True)
                for name, each in model_fields.items()
            }
            self._make, self._look = _model_maker(declared), vars
        else:
            self.problems.append(f"state {declared.__qualname__} is not a dataclass, TypedDict, pydantic model or dict")
            return
        self._fields(defaults, frozenset(name for name, default in defaults.items() if default is None))

    def _fields(self, defaults: Mapping[str, Callable[[], Any] | None], required: frozenset[str]) -> None:
        try:
            hints = typing.get_type_hints(self.declared, include_extras=True)
        except NameError as error:  # the annotation is text that names a class defined in a function
            hints = {}
            self.problems.append(
                f"state {self.declared.__qualname__} names {error.name!r}, which cannot be found: define it at the "
                "top of the module"
            )
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

    def reducer(self, key: str) -> Reducer:
        """Return the reducer of a key."""
        field = self.fields.get(key)
        return replace if field is None else field.reducer

    def knows(self, key: str) -> bool:
        """Return whether a state may have this key."""
        return self.open or key in self.fields

    def initial(self, given: Mapping[str, Any], graph: str) -> dict[str, Any]:
        """Return the initial values of a run: the given ones, and defaults."""
        given = self.given(given, graph)
        values = {name: each.default() for name, each in self.fields.items() if each.default and name not in given}
        values |= {
            key: value.copy() if type(value) in MUTABLE else value  # a copy: the caller's own stays unchanged
            for key, value in given.items()
            if value is not DELETE
        }
        values = self.validated(values, graph, [name for name in values if name in given])
        missing = [name for name, each in self.fields.items() if each.required and name not in values]
        if missing:
            raise InvalidInput(
                f"graph {graph!r} needs {', '.join(map(repr, missing))} to start", hint="Pass it as input"
            )
        return values

    def validated(self, values: dict[str, Any], graph: str, names: Iterable[str]) -> dict[str, Any]:
        """Return the values, with some fields (``names``) as the declared model wants them."""
        for name in names if self.validator is not None else ():
            assert self.validator is not None
            try:
                values = {**values, name: self.validator.value(name, values[name], values)}
            except InvalidValue as error:
                raise InvalidInput(
                    f"{name!r} of graph {graph!r} is not valid: {error}",
                    path=error.path,
                    hint="Pass a value of the declared type",
                ) from error.__cause__
        return values

    def given(self, given: object, graph: str) -> Mapping[str, Any]:
        """Return a caller's input as keys and values. It is a mapping, or an instance of the declared class."""
        if not isinstance(given, Mapping) and not typing.is_typeddict(self.declared):
            given = self._look(given) if isinstance(given, self.declared) else given
        if not isinstance(given, Mapping):
            raise InvalidInput(
                f"the input of graph {graph!r} must be a mapping of keys to values, not {type(given).__name__}",
                hint=await_hint(given, f"Pass a dict, or a {self.declared.__qualname__}"),
            )
        unknown = sorted(str(key) for key in given if not (isinstance(key, str) and self.knows(key)))
        if unknown:
            raise InvalidInput(
                f"graph {graph!r} has no state key {unknown[0]!r}", hint=f"Its keys are {', '.join(self.fields)}"
            )
        return given

    def restore(self, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a stored state. Fields that are not stored come from ``given`` or their default."""
        values = dict(stored)
        if self.snapshots:
            restored = self.declared.restore(values)  # type: ignore[attr-defined]  # checked when declared
            values = dict(self._look(restored))
        for name, each in self.fields.items():
            if each.transient and each.default is not None:
                values.setdefault(name, each.default())
        return {**values, **given}

    def stored(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values to store."""
        if self.snapshots:
            snapshot = self.view(values).snapshot()
            if not isinstance(snapshot, Mapping):
                raise InvalidInput(
                    f"snapshot() of {self.declared.__name__} returned {type(snapshot).__name__}, not a mapping",
                    hint="Return a dict of the values to store",
                )
            return snapshot
        hidden = self._hidden
        return {key: value for key, value in values.items() if key not in hidden} if hidden else values

    def is_stored(self, key: str) -> bool:
        """Return whether a key is stored."""
        field = self.fields.get(key)
        return field is None or not field.transient

    def view(self, values: Mapping[str, Any]) -> Any:
        """Return the values as a node sees them: an instance of the declared class, with its own top level."""
        return self._make(dict(values))

    def mutated(self, view: Any, values: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
        """Return a key that a node changed in its view instead of returning it in an update."""
        seen = self._look(view)
        for key, value in values.items():
            if seen.get(key, MISSING) is not value or (key in sizes and len(value) != sizes[key]):
                return key
        return next((key for key in seen if key not in values), None)


def sizes_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths of values that can grow in place."""
    return {key: len(value) for key, value in values.items() if type(value) in MUTABLE}


def undo_growth(values: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    """Remove what was appended to lists in place; return a key whose change cannot be undone."""
    damaged = None
    for key, size in sizes.items():
        value = values[key]
        if len(value) > size and type(value) is list:
            del value[size:]
        elif len(value) != size:
            damaged = key
    return damaged


def unstorable(annotation: Any, around: frozenset[type] = frozenset()) -> Iterator[str]:
    """Yield the parts of a declared type that can never be stored. Register classes with fields on the way.

    ``around`` are the classes around it, because a class may contain instances of itself.
    """
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
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
        # The arguments of an array are the types of its shape and items, which are no values in it.
        for each in () if is_array(origin) else typing.get_args(annotation):
            if each is not Ellipsis:
                yield from unstorable(each, around)
    elif isinstance(annotation, type):
        yield from _unstorable_class(annotation, around)
    elif inspect.isroutine(annotation):  # such as threading.Lock, which is a function that makes a lock
        yield annotation.__qualname__


def _unstorable_class(cls: type, around: frozenset[type]) -> Iterator[str]:
    if cls in _STORABLE or cls in BY_CLASS or cls in around or is_array(cls) or is_scalar(cls):
        return
    if inspect.isabstract(cls) or getattr(cls, "_is_protocol", False):
        return
    if not typing.is_typeddict(cls) and (issubclass(cls, pathlib.PurePath) or adapter_of(cls) is None):
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
    """Yield the known types of a class's fields."""
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
    except Exception:  # an annotation cannot be resolved: its values are checked when they are stored
        return
    for name in sorted(names):
        yield hints.get(name, Any)


def _notes(annotation: Any) -> tuple[Any, ...]:
    """Return the notes of ``Annotated``, also inside ``Required`` and ``NotRequired``."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *notes = typing.get_args(annotation)
        return (*notes, *_notes(inner))
    if typing.get_origin(annotation) in _WRAPPERS:
        return _notes(typing.get_args(annotation)[0])
    return ()


def _bare_maker(cls: type) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes an instance without ``__post_init__``, because the engine made its values."""
    assign = object.__setattr__

    def make(values: dict[str, Any]) -> Any:
        view: Any = object.__new__(cls)
        for name, value in values.items():
            assign(view, name, value)
        return view

    return make


def _model_maker(cls: type) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes a pydantic model of exactly these values, without aliases and defaults."""
    construct = cls.model_construct  # type: ignore[attr-defined]  # a pydantic model

    def make(values: dict[str, Any]) -> Any:
        view = construct(_fields_set=set(values))
        view.__dict__.clear()
        view.__dict__.update(values)
        return view

    return make


def _attributes(cls: type, names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads an instance's own attributes, without the defaults of its class."""
    slots = tuple(name for name in names if inspect.ismemberdescriptor(getattr(cls, name, None)))

    def look(view: Any) -> dict[str, Any]:
        own = getattr(view, "__dict__", {})
        seen = {name: own[name] for name in names if name in own}
        return seen | {name: getattr(view, name) for name in slots if hasattr(view, name)} if slots else seen

    return look


# While a graph runs ------------------------------------------------------------------------------------------------


Updates = Sequence[tuple[str, Mapping[str, Any]]]  # the writer and its update, in order


@dataclass(slots=True)
class CommitPlan:
    """The changes of a commit."""

    put: dict[str, Any] = field(default_factory=dict)
    grown: dict[str, list[Any]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.put or self.gone or any(self.grown.values()))


def _reference_count(values: Mapping[str, Any], key: str) -> int:
    """Return how many references a value has. A list that a node keeps a reference to must not grow in place."""
    return sys.getrefcount(values[key])


_UNSHARED = _reference_count({"key": []}, "key")


class RunState:
    """The values of one running graph, and when each was last replaced.

    ``plan`` may refuse updates and changes nothing; ``apply`` cannot fail. So a commit takes full effect or none. A
    list that only grows is extended in place. Because each key has the version that last replaced it, a sink can save
    what is new since its last save, however long ago.
    """

    def __init__(self, schema: Schema, values: dict[str, Any]) -> None:
        self.schema = schema
        self.values = values
        self.version = 1
        self.replaced = dict.fromkeys(values, 1)  # key -> the version that last replaced it; growing does not count
        self.gone: dict[str, int] = {}  # key -> the version that deleted it
        self._digests = ListDigests()

    def plan(self, updates: Updates) -> CommitPlan:
        """Return the effect of updates made one after another; raise BadUpdate if one is wrong. Changes nothing."""
        plan = CommitPlan()
        for writer, update in updates:
            for key, value in update.items():
                self._fold(plan, writer, key, value)
        return plan

    def plan_together(self, updates: Updates) -> CommitPlan:
        """Return the effect of updates made in parallel from this state; raise MergeConflict if they clash."""
        writes: dict[str, list[tuple[str, Any]]] = {}
        for writer, update in updates:
            for key, value in update.items():
                writes.setdefault(key, []).append((writer, value))
        plan = CommitPlan()
        for key, entries in writes.items():
            merged: Writes = entries
            if any(writer != entries[0][0] for writer, _ in entries) and self.schema.knows(key):
                merged = self._merged(key, entries)
            for writer, value in merged:
                self._fold(plan, writer, key, value)
        return plan

    def _merged(self, key: str, writes: Writes) -> Writes:
        """Return the updates of several writers that are to be folded."""
        hint = "Let one of them write it, give the key a reducer (append, merge, add, a function), or use two keys"
        reducer = self.schema.reducer(key)
        try:
            for writer, value in writes:
                if isinstance(value, Whole) and value.change is UNKNOWN:
                    other = next(each for each, _ in writes if each != writer)
                    hint = "Let one of them write it, use two keys, or return the update from a function: out="
                    is_own = isinstance(reducer, CustomReducer)
                    why = "its reducer is a function" if is_own else "it was not only added to"
                    raise Clash(writer, other, f", and the change by {writer!r} is not known, because {why}")
            changes = [(writer, value.change if isinstance(value, Whole) else value) for writer, value in writes]
            return reducer.together(self.values.get(key, MISSING), changes)
        except Clash as clash:
            first, second = clash.writers
            what = f"the parallel nodes {first!r} and {second!r} both wrote {key!r}{clash.reason}"
            raise MergeConflict((key,), clash.writers, what, hint=hint) from None

    def apply(self, plan: CommitPlan) -> bool:
        """Make the planned changes; return whether anything changed."""
        if not plan:
            return False
        self.version += 1
        for key, tail in plan.grown.items():
            if _reference_count(self.values, key) > _UNSHARED:
                self.values[key] = list(self.values[key])
            self.values[key].extend(tail)
        for key, value in plan.put.items():
            self.values[key] = value
            self.replaced[key] = self.version
            self.gone.pop(key, None)
        for key in plan.gone:
            if self.values.pop(key, MISSING) is not MISSING:
                self.gone[key] = self.version
                del self.replaced[key]
        return True

    def known_list(self, sizes: Mapping[str, int], items: list[Any]) -> bytes | None:
        """Return the digest of a list of this state, hashed from where the last call stopped; None for any other list.

        ``sizes`` are the lengths that were committed.
        """
        for key, value in self.values.items():
            if value is items:
                return self._digests.digest(key, self.replaced.get(key), items, min(sizes.get(key, 0), len(items)))
        return None

    def with_update(self, writer: str, update: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values as they would be after an update."""
        plan = self.plan([(writer, update)])
        values = {**self.values, **plan.put}
        values |= {key: [*values[key], *tail] for key, tail in plan.grown.items()}
        return {key: value for key, value in values.items() if key not in plan.gone}

    def _fold(self, plan: CommitPlan, writer: str, key: str, value: Any) -> None:
        field = self.schema.fields.get(key) if isinstance(key, str) else None
        if field is None and not (self.schema.open and isinstance(key, str)):
            known = ", ".join(self.schema.fields) or "any text"
            raise BadUpdate(writer, str(key), "is not a key of the graph's state", hint=f"Its keys are {known}")
        if value is DELETE:
            plan.put.pop(key, None)
            plan.grown.pop(key, None)
            plan.gone.add(key)
            return
        reducer = replace if field is None else field.reducer
        try:
            self._reduce(plan, key, value, reducer)
        except CannotReduce as refusal:
            raise BadUpdate(writer, key, str(refusal)) from None
        except InvalidValue as error:
            hint = "Return a value of the declared type, or switch validation off: Graph(…, validate=False)"
            raise BadUpdate(writer, key, f"is not valid: {error}", path=error.path, hint=hint) from error.__cause__
        except Exception as error:
            raise BadUpdate(writer, key, f"could not be reduced: {reducer.name} raised {error!r:.200}") from error

    def _reduce(self, plan: CommitPlan, key: str, value: Any, reducer: Reducer) -> None:
        """Fold one update of a key into a plan, and validate what is new."""
        validator, others = self.schema.validator, self.values
        if validator is not None:
            validator.check_frozen(key, self.values)
            others = {**self.values, **plan.put}
        old: Any = MISSING if key in plan.gone else plan.put.get(key, self.values.get(key, MISSING))
        grown = plan.grown.get(key, [])
        if isinstance(value, Whole):  # of the only writer of this key
            folded = value.value
        elif isinstance(reducer, Append) and old is not MISSING and key not in plan.put:
            tail: list[Any] | None = reducer.tail(old, value)
            if validator is not None:
                tail = validator.tail(key, old, grown, value, others)
            if tail is not None:
                plan.grown.setdefault(key, []).extend(tail)
                return
            folded = [*old, *grown, *value]
        else:
            if validator is not None:
                value = validator.update(key, value, others)
            folded = reducer.fold([*old, *grown] if grown and key not in plan.put else old, value)
        if validator is not None:
            folded = validator.result(key, folded, reducer, others)
        plan.grown.pop(key, None)
        plan.gone.discard(key)
        plan.put[key] = folded
