"""Argument types that contain others: lists, tuples, mappings, and records with named fields."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from envs.call import describe_error
from envs.tools.argument_types import (
    NO_DEFAULT,
    REF_TEMPLATE,
    ArgumentType,
    ArgumentValidationError,
    Schema,
    SchemaBuilder,
)


@dataclasses.dataclass(frozen=True)
class ArrayType(ArgumentType):
    """A list of items of one type."""

    construct: Callable[[list[Any]], Any]
    item: ArgumentType

    def schema(self, builder: SchemaBuilder) -> Schema:
        items = self.item.schema(builder)
        return {"type": "array", "items": items} if items else {"type": "array"}

    def validate(self, value: Any, path: str) -> Any:
        items = [self.item.validate(item, f"{path}[{i}]") for i, item in enumerate(_require_list(value, path))]
        try:
            return self.construct(items)
        except TypeError as error:
            raise ArgumentValidationError(f"its items are not hashable: {error}", path) from error


@dataclasses.dataclass(frozen=True)
class TupleType(ArgumentType):
    """A tuple with a type for each position."""

    items: tuple[ArgumentType, ...]

    def schema(self, builder: SchemaBuilder) -> Schema:
        count = len(self.items)
        items = [item.schema(builder) for item in self.items]
        return {"type": "array", "minItems": count, "maxItems": count, "prefixItems": items, "items": False}

    def validate(self, value: Any, path: str) -> Any:
        if len(_require_list(value, path)) != len(self.items):
            raise ArgumentValidationError(f"expected {len(self.items)} items, got {len(value)}", path)
        pairs = zip(self.items, value, strict=True)
        return tuple(item_type.validate(item, f"{path}[{i}]") for i, (item_type, item) in enumerate(pairs))


@dataclasses.dataclass(frozen=True)
class MappingType(ArgumentType):
    """An object with arbitrary keys."""

    key: Any
    item: ArgumentType

    def schema(self, builder: SchemaBuilder) -> Schema:
        items = self.item.schema(builder)
        return {"type": "object", "additionalProperties": items} if items else {"type": "object"}

    def validate(self, value: Any, path: str) -> Any:
        return {
            self._validate_key(key, path): self.item.validate(item, f"{path}.{key}")
            for key, item in _require_object(value, path).items()
        }

    def _validate_key(self, key: str, path: str) -> Any:
        try:
            (found,) = msgspec.convert({key: None}, dict[self.key, None], str_keys=True)  # type: ignore[name-defined]
        except (msgspec.ValidationError, TypeError) as error:
            raise ArgumentValidationError(f"the key {key!r} is invalid: {error}", path) from error
        return found


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a record, or a parameter of a tool."""

    name: str
    argument_type: ArgumentType
    required: bool
    default: Any = None
    description: str = ""

    def schema(self, builder: SchemaBuilder) -> Schema:
        """Return the JSON schema, with description and default."""
        described = dict(self.argument_type.schema(builder))
        if self.description:
            described["description"] = self.description
        if not self.required:
            with suppress(
                TypeError, ValueError, OverflowError, RecursionError
            ):  # a default that JSON cannot express is not shown
                described.setdefault("default", msgspec.json.decode(msgspec.json.encode(_require_finite(self.default))))
        return described


@dataclasses.dataclass(frozen=True, eq=False)
class RecordType(ArgumentType):
    """An object with named fields: a dataclass, a TypedDict or a named tuple."""

    cls: Any
    construct: Callable[..., Any]
    description: str
    fields: list[Field] = dataclasses.field(default_factory=list)
    """Filled in after construction, since a field may have this same type."""

    def schema(self, builder: SchemaBuilder) -> Schema:
        name = self.cls.__name__
        if self.cls in builder.in_progress:
            builder.recursive.add(self.cls)
            return {"$ref": REF_TEMPLATE.format(name=name)}
        builder.in_progress.append(self.cls)
        properties = {field.name: field.schema(builder) for field in self.fields}
        builder.in_progress.pop()
        schema: Schema = {"description": self.description} if self.description else {}
        schema |= {"type": "object", "properties": properties}
        schema["required"] = [field.name for field in self.fields if field.required]
        if self.cls in builder.recursive:
            builder.definitions[name] = schema
        return schema

    def validate(self, value: Any, path: str) -> Any:
        given = _require_object(value, path)
        known = {field.name: field for field in self.fields}
        for name in given:
            if name not in known:
                raise ArgumentValidationError(f"{name!r} is not a field (there are: {', '.join(known)})", path)
        for field in self.fields:
            if field.required and field.name not in given:
                raise ArgumentValidationError(f"the field {field.name!r} is missing", path)
        fitted = {name: known[name].argument_type.validate(item, f"{path}.{name}") for name, item in given.items()}
        try:
            return self.construct(**fitted)
        except Exception as error:  # the user's __post_init__ may raise anything
            raise ArgumentValidationError(describe_error(error), path) from error


def _require_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ArgumentValidationError(f"expected `array`, got `{_json_type_name(value)}`", path)
    return value


def _require_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentValidationError(f"expected `object`, got `{_json_type_name(value)}`", path)
    return value


def _json_type_name(value: Any) -> str:
    names = {dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _require_finite(value: Any) -> Any:
    """Return a default that JSON can express; raise for others (infinities would become null)."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124
        raise ValueError("not finite")
    if value is NO_DEFAULT:
        raise ValueError("no default")
    return value
