"""An environment's public methods as tools, and validation of the arguments a model writes.

A method becomes a function in OpenAI's form: its name, the description in its Google-style docstring, and a JSON schema
of its type hints. Arguments of a tool call are validated against the same hints before the method is called.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_type_hints

import msgspec
from docstring_parser import Docstring
from msgspec import Struct

from envs.contract import RESERVED_METHODS, offers_render, offers_rows
from envs.tools.argument_types import ANY_TYPE, ArgumentValidationError, Field, SchemaBuilder
from envs.tools.type_hints import (
    UnsupportedTypeError,
    annotated_description,
    argument_type_of,
    join_lines,
    parse_google_docstring,
)
from stream.errors import PenstockError, ReferenceNotFoundError

_CHOICES = re.compile(r"\s*\(choices:\s*(\[.*?\])\s*\)\s*$", re.IGNORECASE)


class ToolArgumentError(PenstockError):
    """The arguments of a tool call are invalid. The message is for the model."""


class ToolSpec(Struct, frozen=True, kw_only=True):
    """A tool in the form that chat templates and engines accept.

    Example, for `def add(self, a: int, b: int = 1) -> int`::

        ToolSpec(name="add", description="Add two numbers.", schema={"type": "function", "function": {
            "name": "add", "description": "Add two numbers.", "parameters": {
                "type": "object", "properties": {"a": {"type": "integer", "description": "the first one"},
                                                 "b": {"type": "integer", "default": 1}},
                "required": ["a"]}}})
    """

    name: str
    description: str
    schema: dict[str, Any]
    """OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`."""
    problems: tuple[str, ...] = ()
    """Warnings for the author: no docstring, a parameter without a usable type hint."""


@dataclass(frozen=True)
class _Signature:
    parameters: dict[str, Field]
    extra: Field | None
    """`**kwargs`: accepts every other name."""
    problems: tuple[str, ...]


def tool_specs(env: object) -> list[ToolSpec]:
    """Return the tools of an environment in the order of their definition, inherited ones first.

    Raises:
        ReferenceNotFoundError: a tool has positional-only parameters, or `*args`, which a model cannot fill.
    """
    return [_spec(name, method) for name, method in _methods(env)]


def declared_specs(schemas: Iterable[Any]) -> list[ToolSpec]:
    """Return the tools that an environment lists itself.

    Args:
        schemas: the result of its `tool_schemas`: tools in OpenAI's form.

    Raises:
        ReferenceNotFoundError: an entry is not a tool in that form, or a name appears twice.
    """
    specs: dict[str, ToolSpec] = {}
    for schema in schemas:
        function = schema.get("function") if isinstance(schema, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name or name in specs:
            raise ReferenceNotFoundError(
                f"tool_schemas returned {schema!r}, which is not a tool with a unique name in OpenAI's form: "
                '{"type": "function", "function": {"name", "description", "parameters"}}'
            )
        parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
        description = str(function.get("description") or "")
        problems = () if description else ("it has no description: a model must guess what it does",)
        tool = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
        specs[name] = ToolSpec(name=name, description=description, schema=tool, problems=problems)
    return list(specs.values())


def bind_arguments(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Validate a model's arguments against a tool's type hints, and convert them.

    JSON values become the hinted types (dataclasses, enums, sets, dates, ...) at any depth. Validation is strict: the
    string "3" is not an integer. Omitted parameters keep their defaults.

    Args:
        method: the environment's bound method.
        arguments: the model's arguments, decoded from JSON.

    Returns:
        Keyword arguments for the method.

    Raises:
        ToolArgumentError: lists every error, for the model.
    """
    name = getattr(method, "__name__", "the tool")
    if not isinstance(arguments, dict):
        raise ToolArgumentError(f"{name}: the arguments must be an object, not {type(arguments).__name__}")
    signature = _signature_of(method)
    bound: dict[str, Any] = {}
    wrong = [f"{p.name} is missing" for p in signature.parameters.values() if p.required and p.name not in arguments]
    for key, value in arguments.items():
        parameter = signature.parameters.get(key, signature.extra)
        if parameter is None:
            known = ", ".join(signature.parameters) or "none"
            wrong.append(f"{key} is not a parameter (there are: {known})")
            continue
        try:
            bound[key] = parameter.argument_type.validate(value, "")
        except ArgumentValidationError as error:
            wrong.append(f"{key}: {error}")
        except RecursionError:
            wrong.append(f"{key}: it is nested too deeply")
    if wrong:
        raise ToolArgumentError(f"{name}: " + "; ".join(wrong))
    return bound


def _methods(env: object) -> list[tuple[str, Callable[..., Any]]]:
    """Return public functions, static and class methods of the classes, and methods bound to the instance.

    Properties and other attributes are not tools.
    """
    cls = type(env)
    kinds = (types.FunctionType, staticmethod, classmethod)
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    defined = [name for name in names if isinstance(inspect.getattr_static(cls, name), kinds)]
    bound = [name for name, value in getattr(env, "__dict__", {}).items() if isinstance(value, types.MethodType)]
    found = dict.fromkeys([*defined, *bound])
    optional = {"rows": offers_rows(env), "render": offers_render(env)}
    reserved = RESERVED_METHODS | {name for name, is_offered in optional.items() if is_offered}
    return [(name, getattr(env, name)) for name in found if not name.startswith("_") and name not in reserved]


def _spec(name: str, method: Callable[..., Any]) -> ToolSpec:
    doc = parse_google_docstring(inspect.getdoc(method) or "")
    description = "\n\n".join(filter(None, [doc.short_description, doc.long_description]))
    signature, builder = _signature_of(method), SchemaBuilder()
    parameters: dict[str, Any] = {"type": "object"}
    parameters["properties"] = {p.name: p.schema(builder) for p in signature.parameters.values()}
    parameters["required"] = [p.name for p in signature.parameters.values() if p.required]
    if signature.extra is not None:
        parameters["additionalProperties"] = signature.extra.argument_type.schema(builder) or True
    function = {"name": name, "description": description, "parameters": parameters}
    returned = _return_schema(method, doc, builder)
    if returned:
        function["return"] = returned
    if builder.definitions:
        parameters["$defs"] = builder.definitions
    problems = [] if description else ["it has no docstring: a model must guess what it does"]
    schema = {"type": "function", "function": function}
    return ToolSpec(name=name, description=description, schema=schema, problems=(*problems, *signature.problems))


def _return_schema(method: Callable[..., Any], doc: Docstring, builder: SchemaBuilder) -> dict[str, Any]:
    """Return the schema of the return value, from type hint and docstring; some chat templates show it."""
    hint = inspect.signature(method).return_annotation
    schema: dict[str, Any] = {}
    if hint not in (inspect.Signature.empty, None, "None"):
        with suppress(UnsupportedTypeError, NameError, AttributeError, TypeError, SyntaxError):
            schema = dict(argument_type_of(_resolve_annotation(method, "return", hint)).schema(builder))
    if doc.returns and doc.returns.description:
        schema["description"] = join_lines(doc.returns.description)
    return schema


def _signature_of(method: Callable[..., Any]) -> _Signature:
    if inspect.ismethod(method):
        return _signature(method.__func__, is_bound=True)
    return _signature(method, is_bound=False)


@lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any], *, is_bound: bool) -> _Signature:
    parameters: dict[str, Field] = {}
    extra, problems = None, []
    listed = list(inspect.signature(function).parameters.values())
    if is_bound and listed and listed[0].kind is not inspect.Parameter.VAR_POSITIONAL:  # `*args` holds self, and more
        listed = listed[1:]
    accepts_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in listed)
    descriptions = {
        param.arg_name.lstrip("*"): join_lines(param.description)
        for param in parse_google_docstring(function.__doc__ or "").params
    }
    for parameter in listed:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ReferenceNotFoundError(
                f"{function.__qualname__} cannot be a tool: {parameter.name!r} is positional-only, and models name "
                "their arguments; remove the '/', or start the method's name with an underscore"
            )
        if parameter.kind is parameter.VAR_POSITIONAL and accepts_any_name:
            problems.append(
                f"its signature is *{parameter.name} and **: a model does not see which arguments it takes; name them, "
                "or put functools.wraps on the decorator"
            )
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ReferenceNotFoundError(
                f"{function.__qualname__} cannot be a tool: models name their arguments, and nothing can fill "
                f"'*{parameter.name}'; write `{parameter.name}: list[...]`, or start the method's name with '_'"
            )
        field, problem = _field(function, parameter, descriptions.get(parameter.name, ""))
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = field
            continue
        parameters[field.name] = field
        if problem:
            problems.append(f"parameter {field.name}: {problem}")
    return _Signature(parameters, extra, tuple(problems))


def _field(function: Callable[..., Any], parameter: inspect.Parameter, documented: str) -> tuple[Field, str]:
    """Return a parameter and a warning about its type hint, if that accepts anything."""
    documented, choices = _split_choices(documented)
    hint, argument_type, problem = None, ANY_TYPE, ""
    if parameter.annotation is parameter.empty:
        problem = "" if parameter.kind is parameter.VAR_KEYWORD else "it has no type hint, so any value is accepted"
    else:
        try:
            hint = _resolve_annotation(function, parameter.name, parameter.annotation)
            if choices and hint in (str, int, float):
                hint = Literal[tuple(choices)]
            argument_type = argument_type_of(hint)
            if parameter.default is None and not argument_type.accepts(None):
                argument_type = argument_type_of(hint | None)
        except UnsupportedTypeError as error:
            problem = f"{error}: any value is accepted"
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            problem = f"its type hint cannot be read ({error}), so any value is accepted"
    description = documented or annotated_description(hint)
    required = parameter.default is parameter.empty
    return Field(parameter.name, argument_type, required, parameter.default, description), problem


def _resolve_annotation(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Resolve an annotation that contains strings."""
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(holder, globalns=scope, include_extras=True)[name]


def _split_choices(description: str) -> tuple[str, list[Any]]:
    """Split off `(choices: ["celsius", "fahrenheit"])`, as transformers reads it at the end of a description."""
    found = _CHOICES.search(description)
    if found:
        with suppress(ValueError):
            choices = msgspec.json.decode(found[1], type=list[str | int | float])
            return description[: found.start()].rstrip(), choices
    return description, []
