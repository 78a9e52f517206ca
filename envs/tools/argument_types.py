"""Shapes: what a tool's argument may be, as a JSON schema for the model and as a check of what the model wrote.

Nothing is guessed on the way: the string "3" is no integer, a field that is not there is refused. Every error is
written for the model, and says where in the argument it is.
"""

import dataclasses
from typing import Any

import msgspec

Schema = dict[str, Any]

REF_TEMPLATE = "#/$defs/{name}"
_JSON_TYPE = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


NO_DEFAULT = object()
"""The default of what may be left out without one."""


class ArgumentValidationError(ValueError):
    """A value does not have the shape; says what is wrong, and where, for the model that wrote it."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{message} - at `${path}`" if path else message)


class SchemaBuilder:
    """What the schema of one tool refers to: types that contain themselves."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self.in_progress: list[object] = []
        """Classes whose schemas are being written."""
        self.recursive: set[object] = set()


class ArgumentType:
    """Any value at all; the shapes of particular types derive from it."""

    def schema(self, builder: SchemaBuilder) -> Schema:  # noqa: ARG002
        """Its JSON schema."""
        return {}

    def validate(self, value: Any, path: str) -> Any:  # noqa: ARG002
        """The value as the hint says.

        Args:
            value: decoded from JSON.
            path: where it stands, `.items[0]`.

        Raises:
            ArgumentValidationError: it does not fit.
        """
        return value

    def accepts(self, value: Any) -> bool:
        """Whether a value fits."""
        try:
            self.validate(value, "")
        except ArgumentValidationError:
            return False
        return True


@dataclasses.dataclass(frozen=True)
class EnumType(ArgumentType):
    """One of some values, each of which stands for something."""

    options: tuple[tuple[Any, Any], ...]
    """(in JSON, in Python)"""

    def schema(self, builder: SchemaBuilder) -> Schema:  # noqa: ARG002
        values = [value for value, _ in self.options]
        kinds = {type(value) for value in values}
        kind = {"type": _JSON_TYPE[kinds.pop()]} if len(kinds) == 1 else {}
        return kind | {"enum": values}

    def validate(self, value: Any, path: str) -> Any:
        for known, meant in self.options:
            if type(known) is type(value) and known == value:
                return meant
        known_values = ", ".join(_json(known) for known, _ in self.options)
        raise ArgumentValidationError(f"expected one of {known_values}, got {_json(value)}", path)


@dataclasses.dataclass(frozen=True)
class UnionType(ArgumentType):
    """A union."""

    options: tuple[tuple[Any, ArgumentType], ...]

    def schema(self, builder: SchemaBuilder) -> Schema:
        return {"anyOf": [shape.schema(builder) for _, shape in self.options]}

    def validate(self, value: Any, path: str) -> Any:
        exact_first = sorted(self.options, key=lambda option: option[0] is not type(value))
        errors = []
        for hint, shape in exact_first:
            try:
                return shape.validate(value, path)
            except ArgumentValidationError as error:
                if hint is not type(None):
                    errors.append(str(error))
        raise ArgumentValidationError(" or ".join(dict.fromkeys(errors)) or "expected null")


@dataclasses.dataclass(frozen=True)
class AnnotatedType(ArgumentType):
    """A shape with words of its own."""

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
