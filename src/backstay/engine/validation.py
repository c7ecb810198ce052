"""Validation of a state that is a pydantic model: the input, each update, and what people change.

Only the fields that change are validated, each with its own validators and its coercion ("3" becomes 3). A list with
``append`` and a mapping with ``merge`` are validated by their new items only, unless the field has validators or limits
of its own, which may depend on the whole value. Validators of the whole model do not run: a step changes some of its
fields, and between two steps the others may not fit yet.

pydantic is not imported here. It is in the program already, because the state is one of its models.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from backstay.engine.reducers import DELETE, Append, Merge, Reducer


class InvalidValue(Exception):
    """A value that a field refuses: where, and why. It never shows the value."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class ModelValidator:
    """Validates single fields of one pydantic model."""

    def __init__(self, model: Any, reducers: Mapping[str, Reducer]) -> None:
        if not model.__pydantic_complete__:
            model.model_rebuild()
        schema, definitions, config = model.__pydantic_core_schema__, list[Any](), None
        while schema["type"] != "model-fields":  # inside the validators of the whole model
            if schema["type"] == "definition-ref":
                schema = next(each for each in definitions if each.get("ref") == schema["schema_ref"])
                continue
            definitions = schema.get("definitions", definitions)
            config = schema.get("config", config)
            schema = schema["schema"]
        fields = {name: {**each, "frozen": False} for name, each in schema["fields"].items()}
        schema = {**schema, "fields": fields}
        schema.pop("ref", None)
        if definitions:
            schema = {"type": "definitions", "schema": schema, "definitions": definitions}
        core = sys.modules["pydantic_core"]
        self._refusal: type[Exception] = core.ValidationError
        self._assign = core.SchemaValidator(schema, config).validate_assignment
        self._frozen = frozenset(name for name, each in model.model_fields.items() if each.frozen)
        found = model.__pydantic_decorators__
        decorators = [*found.field_validators.values(), *found.validators.values()]
        validated = {name for each in decorators for name in each.info.fields}
        parts = {Append: list, Merge: dict}
        self._by_part = frozenset(
            name
            for name, each in model.model_fields.items()
            if parts.get(type(reducers[name])) is (typing.get_origin(each.annotation) or each.annotation)
            and all(note is reducers[name] for note in each.metadata)
            and not validated & {name, "*"}
        )

    def value(self, name: str, value: Any, values: Mapping[str, Any]) -> Any:
        """Return the value of a field as the model wants it; ``values`` are the other fields. Raises InvalidValue."""
        try:
            return self._assign(dict(values), name, value)[0][name]
        except self._refusal as refusal:
            first = refusal.errors(include_url=False, include_input=False, include_context=False)[0]  # type: ignore[attr-defined] # why: of pydantic
            # The message of an error may quote the value, so only its kind is shown.
            inside = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]]
            raise InvalidValue("".join([name, *inside]), first["type"]) from None
        except Exception as error:  # of a validator of the user's
            raise InvalidValue(name, f"its validator raised {type(error).__name__}") from error

    def update(self, name: str, update: Any, values: Mapping[str, Any]) -> Any:
        """Return an update of a ``merge`` field as the model wants it, if it is validated by part."""
        if name not in self._by_part or not isinstance(update, Mapping):
            return update
        kept = {key: value for key, value in update.items() if value is not DELETE}
        deleted = {key: DELETE for key, value in update.items() if value is DELETE}
        return {**self.value(name, kept, values), **deleted}

    def result(self, name: str, folded: Any, reducer: Reducer, values: Mapping[str, Any]) -> Any:
        """Return the value of a field after an update that ``update`` has seen."""
        if isinstance(reducer, Merge) and name in self._by_part:
            return folded
        return self.value(name, folded, values)

    def tail(
        self, name: str, old: list[Any], grown: list[Any], tail: Sequence[Any], values: Mapping[str, Any]
    ) -> list[Any] | None:
        """Return the new items of an ``append`` field as the model wants them; None if it changes the old ones too."""
        if name in self._by_part:
            items: list[Any] = self.value(name, list(tail), values)
            return items
        known = [*old, *grown]
        whole = self.value(name, [*known, *tail], values)
        grew = isinstance(whole, list) and len(whole) == len(known) + len(tail) and all(map(is_, known, whole))
        return whole[len(known) :] if grew else None

    def check_frozen(self, name: str, values: Mapping[str, Any]) -> None:
        """Raise InvalidValue if a field may not change and has a value."""
        if name in self._frozen and name in values:
            raise InvalidValue(name, "frozen_field")
