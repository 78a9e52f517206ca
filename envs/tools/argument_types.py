"""Argument types: a JSON schema for the model, and validation of what the model wrote.

Validation is strict: the string "3" is not an integer, an unknown field is an error. The model reads error messages;
they say where in the argument the error is, e.g. `expected `int`, got `str` - at `$.items[0].price``.

Simple types come first, then types that contain others (lists, tuples, mappings, records with named fields), then those
that msgspec or pydantic implement.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from envs.call import describe_error

Schema = dict[str, Any]

REF_TEMPLATE = "#/$defs/{name}"
_JSON_TYPE = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


NO_DEFAULT = object()
"""Marks an optional field whose default is unknown or cannot be shown."""


class ArgumentValidationError(ValueError):
    """A value does not have the argument type. The message, for the model, says what is wrong and where."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{message} - at `${path}`" if path else message)


class SchemaBuilder:
    """Collects the definitions of recursive types while the schema of one tool is built."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self.in_progress: list[object] = []
        """Classes whose schemas are being built."""
        self.recursive: set[object] = set()
        """Classes found to contain themselves."""


class ArgumentType:
    """Accepts any value. Base class of all argument types."""

    def schema(self, builder: SchemaBuilder) -> Schema:  # noqa: ARG002
        """Return the JSON schema."""
        return {}

    def validate(self, value: Any, path: str) -> Any:  # noqa: ARG002
        """Convert a value decoded from JSON to the hinted Python type.

        Args:
            value: decoded from JSON.
            path: position in the argument, e.g. `.items[0]`, for messages.

        Raises:
            ArgumentValidationError: the value does not have this type.
        """
        return value

    def accepts(self, value: Any) -> bool:
        """Return whether a value has this type."""
        try:
            self.validate(value, "")
        except ArgumentValidationError:
            return False
        return True


@dataclasses.dataclass(frozen=True)
class EnumType(ArgumentType):
    """One of several JSON values, each mapped to a Python value."""

    options: tuple[tuple[Any, Any], ...]
    """(JSON value, Python value)"""

    def schema(self, builder: SchemaBuilder) -> Schema:  # noqa: ARG002
        values = [value for value, _ in self.options]
        kinds = {type(value) for value in values}
        kind = {"type": _JSON_TYPE[kinds.pop()]} if len(kinds) == 1 else {}
        return kind | {"enum": values}

    def validate(self, value: Any, path: str) -> Any:
        for known, converted in self.options:
            if type(known) is type(value) and known == value:
                return converted
        known_values = ", ".join(_json(known) for known, _ in self.options)
        raise ArgumentValidationError(f"expected one of {known_values}, got {_json(value)}", path)


@dataclasses.dataclass(frozen=True)
class UnionType(ArgumentType):
    """A union; an option of the value's exact type is tried first."""

    options: tuple[tuple[Any, ArgumentType], ...]

    def schema(self, builder: SchemaBuilder) -> Schema:
        return {"anyOf": [option.schema(builder) for _, option in self.options]}

    def validate(self, value: Any, path: str) -> Any:
        exact_first = sorted(self.options, key=lambda option: option[0] is not type(value))
        errors = []
        for hint, option in exact_first:
            try:
                return option.validate(value, path)
            except ArgumentValidationError as error:
                if hint is not type(None):
                    errors.append(str(error))
        raise ArgumentValidationError(" or ".join(dict.fromkeys(errors)) or "expected null")


@dataclasses.dataclass(frozen=True)
class AnnotatedType(ArgumentType):
    """An argument type with its own description."""

    base: ArgumentType
    description: str

    def schema(self, builder: SchemaBuilder) -> Schema:
        return self.base.schema(builder) | {"description": self.description}

    def validate(self, value: Any, path: str) -> Any:
        return self.base.validate(value, path)


ANY_TYPE = ArgumentType()


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()[:100]
    except (TypeError, ValueError, OverflowError):
        return repr(value)[:100]


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


@dataclasses.dataclass(frozen=True)
class MsgspecType(ArgumentType):
    """A type that msgspec supports."""

    hint: Any

    def schema(self, builder: SchemaBuilder) -> Schema:
        (schema,), components = msgspec.json.schema_components([self.hint], ref_template=REF_TEMPLATE)
        inlined: Schema = _inline_definitions(schema, components, builder)
        return inlined

    def validate(self, value: Any, path: str) -> Any:
        try:
            return msgspec.convert(value, self.hint, str_keys=True)
        except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
            message, _, inner = str(error).partition(" - at `$")
            raise ArgumentValidationError(message[:1].lower() + message[1:], path + inner.rstrip("`")) from error


@dataclasses.dataclass(frozen=True)
class ConstrainedType(ArgumentType):
    """An argument type with constraints from `msgspec.Meta`."""

    base: ArgumentType
    constraints: MsgspecType

    def schema(self, builder: SchemaBuilder) -> Schema:
        return self.base.schema(builder) | {k: v for k, v in self.constraints.schema(builder).items() if k != "items"}

    def validate(self, value: Any, path: str) -> Any:
        self.constraints.validate(value, path)
        return self.base.validate(value, path)


@dataclasses.dataclass(frozen=True)
class PydanticType(ArgumentType):
    """A pydantic model: its own schema, strict validation."""

    cls: Any

    def schema(self, builder: SchemaBuilder) -> Schema:
        schema = self.cls.model_json_schema()
        definitions = schema.pop("$defs", {})
        inlined: Schema = _inline_definitions({k: v for k, v in schema.items() if k != "title"}, definitions, builder)
        return inlined

    def validate(self, value: Any, path: str) -> Any:
        try:
            return self.cls.model_validate_json(msgspec.json.encode(value), strict=True)
        except ValueError as error:
            details: list[Any] = getattr(error, "errors", list)()
            if not details:
                raise ArgumentValidationError(describe_error(error), path) from error
            inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details[0]["loc"])
            message = str(details[0]["msg"])
            raise ArgumentValidationError(message[:1].lower() + message[1:], path + inner) from error


def _inline_definitions(
    schema: Any, definitions: Mapping[str, Any], builder: SchemaBuilder, above: frozenset[str] = frozenset()
) -> Any:
    """Inline definitions, which models read better than references; a recursive type stays a reference."""
    if isinstance(schema, list):
        return [_inline_definitions(item, definitions, builder, above) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix(REF_TEMPLATE.format(name=""))
    if name in definitions and name not in above:
        inlined: Schema = _inline_definitions(definitions[name], definitions, builder, above | {name})
        return {key: value for key, value in inlined.items() if key != "title"}
    if name in definitions:
        builder.definitions[name] = definitions[name]
    return {key: _inline_definitions(value, definitions, builder, above) for key, value in schema.items()}
