"""Example arguments from a tool's JSON schema, to call a tool without a model."""

from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 8
_TEXTS = {
    "date-time": "2000-01-01T00:00:00Z",
    "date": "2000-01-01",
    "time": "00:00:00",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "duration": "PT1S",
    "decimal": "1",
}


def example_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return minimal valid arguments: the required parameters only.

    Args:
        parameters: the JSON schema under `parameters` in `ToolSpec.schema`.
    """
    return _object(parameters, parameters.get("$defs", {}), _MAX_DEPTH)


def _example(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    options = schema.get("anyOf", ())
    if options:
        last = [option for option in options if option.get("type") == "null"] if depth <= 0 else []
        return _example((last or options)[0], definitions, depth - 1)
    make_example = _EXAMPLES.get(schema.get("type", "string"))
    return make_example(schema, definitions, depth) if make_example else None


def _object(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {}) if depth > 0 else {}
    return {
        name: _example(properties[name], definitions, depth - 1) for name in schema.get("required", ()) if properties
    }


def _array(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> list[Any]:
    items = schema.get("prefixItems") or [schema.get("items") or {}] * schema.get("minItems", 0)
    return [_example(item, definitions, depth - 1) for item in items] if depth > 0 else []


def _number(schema: dict[str, Any], *_: Any) -> int | float:
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 1) - 1)
    number: int | float = min(low, high)
    return number


_EXAMPLES: dict[str, Callable[[dict[str, Any], dict[str, Any], int], Any]] = {
    "string": lambda schema, *_: _TEXTS.get(schema.get("format", ""), "text").ljust(schema.get("minLength", 0), "."),
    "integer": _number,
    "number": _number,
    "boolean": lambda *_: True,
    "array": _array,
    "object": _object,
}
