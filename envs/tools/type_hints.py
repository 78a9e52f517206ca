"""Convert type hints to argument types, which give JSON schemas and validate what a model writes.

Types with fields (dataclasses, TypedDicts, named tuples) take field descriptions from `Annotated`, from `Attributes:`
in the class docstring, or from the docstring below a field.

===============================================  ======================================================================
bool, int, float, str, None, Any                 the JSON type
Literal, enums                                   `enum`, in the order of their definition
unions                                           `anyOf`; an option of the value's exact type is preferred
lists, tuples, sets, and their abstract types    arrays
dicts and mappings                               objects; keys may be numbers
dataclasses, TypedDicts, named tuples            objects with named fields
pydantic models                                  by pydantic, in strict mode
msgspec structs, attrs, dates, UUIDs, ...        by msgspec; also constraints from `msgspec.Meta`
===============================================  ======================================================================

Neither pydantic nor msgspec alone covers this table: of the 25 hints in tests/unit/test_hints.py, `TypeAdapter` gives
the same schema for 7 and msgspec for 9. Key order and wording are part of the prompt, so they must not change.

The descriptions in a schema are read from docstrings and from `Annotated`, by the functions at the end.
"""

import dataclasses
import inspect
import types
import typing
from collections import abc, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from threading import RLock
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from docstring_parser import Docstring, DocstringStyle, ParseError, parse, parse_from_object

from envs.tools.argument_types import (
    ANY_TYPE,
    NO_DEFAULT,
    REF_TEMPLATE,
    AnnotatedType,
    ArgumentType,
    ArrayType,
    ConstrainedType,
    EnumType,
    Field,
    MappingType,
    MsgspecType,
    PydanticType,
    RecordType,
    TupleType,
    UnionType,
)

_PLAIN = (type(None), bool, int, float, str)
_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list, set: set, frozenset: frozenset, deque: deque, abc.Set: set, abc.MutableSet: set,
    **dict.fromkeys((abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), list),
}  # fmt: skip
_DICTS = (dict, abc.Mapping, abc.MutableMapping)


class UnsupportedTypeError(TypeError):
    """A type cannot be expressed in JSON."""


def argument_type_of(hint: Any) -> ArgumentType:
    """Return the argument type of a type hint.

    Raises:
        UnsupportedTypeError: the hint, or a part of it, cannot be expressed in JSON.
    """
    try:
        with _records_lock:
            return _argument_type_of(hint)
    except RecursionError as error:
        raise UnsupportedTypeError(f"{hint!r} is infinitely recursive") from error


_records_lock = RLock()
_unfinished_records: dict[Any, RecordType] = {}
"""Types of classes whose fields are being read, so that a class may contain itself."""


def _argument_type_of(hint: Any) -> ArgumentType:  # noqa: PLR0911, C901  (a table of cases)
    if hint in (Any, object, inspect.Parameter.empty):
        return ANY_TYPE
    if hint is None or hint in _PLAIN:
        return MsgspecType(type(None) if hint is None else hint)
    if isinstance(hint, TypeVar):
        return _argument_type_of(hint.__bound__) if hint.__bound__ else ANY_TYPE
    if (alias := getattr(hint, "__supertype__", getattr(hint, "__value__", None))) is not None and not isinstance(
        hint, Enum
    ):
        return _argument_type_of(alias)  # NewType, or `type X = ...`
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _annotated(hint, arguments[0])
    if origin is Literal:
        return EnumType(tuple((_json_value(value), value) for value in arguments))
    if origin in (typing.Union, types.UnionType):
        return UnionType(tuple((option, _argument_type_of(option)) for option in arguments))
    kind = origin or hint
    if kind in (typing.Required, typing.NotRequired):
        return _argument_type_of(arguments[0])
    if kind in _LISTS:
        return ArrayType(_LISTS[kind], _argument_type_of(arguments[0]) if arguments else ANY_TYPE)
    if kind is tuple:
        return _tuple(arguments)
    if kind in _DICTS:
        key, item = arguments or (str, Any)
        return MappingType(Any if isinstance(key, TypeVar) else key, _argument_type_of(item))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if (construct := _record_constructor(kind)) is not None:
        return _record(kind, construct)
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json"):
        return PydanticType(kind)
    return _native(hint)


def _annotated(hint: Any, base: Any) -> ArgumentType:
    base_type = _argument_type_of(base)
    bounds = [note for note in hint.__metadata__ if isinstance(note, msgspec.Meta)]
    if bounds:
        plain = get_origin(base) or base
        base_type = ConstrainedType(base_type, _native(typing.Annotated[(list if plain in _LISTS else plain, *bounds)]))
    description = annotated_description(hint)
    return AnnotatedType(base_type, description) if description else base_type


def _tuple(arguments: tuple[Any, ...]) -> ArgumentType:
    if not arguments:
        return ArrayType(tuple, ANY_TYPE)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return ArrayType(tuple, _argument_type_of(arguments[0]))
    return TupleType(tuple(_argument_type_of(argument) for argument in arguments))


def _enum(cls: type[Enum]) -> ArgumentType:
    """Return an enum by its values, or by its names if JSON cannot express a value."""
    members = list(cls)
    if all(type(member.value) in _PLAIN or isinstance(member.value, int | str) for member in members):
        return EnumType(tuple((_json_value(member.value), member) for member in members))
    return EnumType(tuple((member.name, member) for member in members))


def _native(hint: Any) -> MsgspecType:
    try:
        msgspec.json.schema_components([hint], ref_template=REF_TEMPLATE)
        msgspec.convert(None, hint | None)
    except (TypeError, NameError, AttributeError, msgspec.ValidationError) as error:
        raise UnsupportedTypeError(f"JSON cannot express {inspect.formatannotation(hint)}") from error
    return MsgspecType(hint)


def _record_constructor(cls: Any) -> Callable[..., Any] | None:
    """Return the constructor of a class with fields; None for other classes."""
    if typing.is_typeddict(cls):
        return dict
    is_record = isinstance(cls, type) and (dataclasses.is_dataclass(cls) or _is_named_tuple(cls))
    is_pydantic = hasattr(cls, "__pydantic_fields__")
    return cls if is_record and not is_pydantic else None


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


@lru_cache(maxsize=1024)
def _record(cls: Any, construct: Callable[..., Any]) -> ArgumentType:
    if cls in _unfinished_records:
        return _unfinished_records[cls]
    doc = class_docstring(cls)
    documented = {param.arg_name: join_lines(param.description) for param in doc.params}
    record = RecordType(cls, construct, join_lines(doc.short_description))
    _unfinished_records[cls] = record
    try:
        hints = get_type_hints(cls, include_extras=True)
        for name, required, default in _fields_of(cls):
            hint = hints.get(name, Any)
            description = annotated_description(hint) or documented.get(name, "")
            record.fields.append(Field(name, _argument_type_of(hint), required, default, description))
    except (NameError, AttributeError, TypeError) as error:
        if isinstance(error, UnsupportedTypeError):
            raise
        raise UnsupportedTypeError(f"the hints of {cls.__qualname__} cannot be read: {error}") from error
    finally:
        del _unfinished_records[cls]
    return record


def _fields_of(cls: Any) -> list[tuple[str, bool, Any]]:
    """Return name, whether it is required, and default (or `NO_DEFAULT`) of each field."""
    if typing.is_typeddict(cls):
        inherited = (cls.__required_keys__ | cls.__optional_keys__) - cls.__annotations__.keys()
        names = [*sorted(inherited), *cls.__annotations__]
        return [(name, name in cls.__required_keys__, NO_DEFAULT) for name in names]
    if _is_named_tuple(cls):
        defaults: Mapping[str, Any] = getattr(cls, "_field_defaults", {})
        return [(name, name not in defaults, defaults.get(name)) for name in cls._fields]
    return [(field.name, *_default_of(field)) for field in dataclasses.fields(cls) if field.init]


def _default_of(field: "dataclasses.Field[Any]") -> tuple[bool, Any]:
    if field.default is not dataclasses.MISSING:
        return False, field.default
    if field.default_factory is dataclasses.MISSING:
        return True, NO_DEFAULT
    try:
        return False, field.default_factory()
    except Exception:  # noqa: BLE001  (user code, which may depend on a running episode)
        return False, NO_DEFAULT


def _json_value(value: Any) -> Any:
    """Return a literal's or an enum's value as JSON expresses it."""
    if isinstance(value, Enum):
        value = value.value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def annotated_description(hint: Any) -> str:
    """Return the description in `Annotated`: a string, or that of a `Meta`, a `Doc` or a pydantic `Field`."""
    for note in getattr(hint, "__metadata__", ()):
        text = (
            note
            if isinstance(note, str)
            else getattr(note, "description", None) or getattr(note, "documentation", None)
        )
        if isinstance(text, str) and text:
            return text
    return ""


def parse_google_docstring(text: str) -> Docstring:
    """Parse a Google-style docstring; a docstring in another style is all description."""
    try:
        return parse(inspect.cleandoc(text), style=DocstringStyle.GOOGLE)
    except ParseError:
        doc = Docstring()
        doc.short_description = inspect.cleandoc(text)
        return doc


def join_lines(text: str | None) -> str:
    """Return a description on one line."""
    return " ".join((text or "").split())


def class_docstring(cls: Any) -> Docstring:
    """Parse a class docstring and the docstrings of its fields, without generated ones of dataclasses and tuples."""
    try:
        found = parse_from_object(cls, style=DocstringStyle.GOOGLE)
    except (ParseError, OSError, TypeError, SyntaxError, IndentationError):
        found = parse_google_docstring(vars(cls).get("__doc__") or "")
    own = vars(cls).get("__doc__") or ""
    if not own or own.startswith(f"{cls.__name__}("):
        found.short_description = None
    return found
