"""Argument types: a JSON schema for the model, and validation of what the model wrote.

Validation is strict: the string "3" is not an integer, an unknown field is an error. The model reads error messages;
they say where in the argument the error is, e.g. `expected `int`, got `str` - at `$.items[0].price``.
"""

import dataclasses
from typing import Any

import msgspec

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
