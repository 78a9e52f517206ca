"""Argument types implemented by msgspec or pydantic."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from envs.call import describe_error
from envs.tools.argument_types import REF_TEMPLATE, ArgumentType, ArgumentValidationError, Schema, SchemaBuilder


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
