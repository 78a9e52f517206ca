"""Compile chat templates: Jinja in a sandbox, with the names and filters that models' templates may use.

The dialect is that of `transformers` (`utils/chat_template_utils.py`), and a test renders the same conversations with
both. It is written out here because importing `transformers` takes longer than everything else that a worker does
before it claims work.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; most templates read the first, gpt-oss' templates the second."""
_plain_json: Final = json.JSONEncoder(ensure_ascii=False).encode
_SCALARS: Final = (str, int, float, bool, type(None))


@lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Return a chat template, ready to be rendered.

    Raises:
        TemplateError: it is not valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005  (templates expect local time)
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # not Jinja's chain of two, which each rendering reads name by name
    return template


def plain_messages(messages: Any) -> list[Any]:
    """Return a copy of messages for a template, in plain types, with their reasoning under each name for it."""
    return [_with_reasoning_names(message) for message in plain_value(list(messages))]


def plain_value(value: Any) -> Any:
    """Return a copy that consists of JSON's types, so that a template can call no method of a foreign object.

    Templates only ask whether an image is there; anything else, such as a decoded image, becomes `<Image>`.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        return {
            name if type(name) is str else plain_value(name): each if type(each) is str else plain_value(each)
            for name, each in value.items()
        }
    for base in (str, int, float):  # enumerations, and numbers of numpy
        if isinstance(value, base):
            return base.__str__(value) if base is str else base(value)
    if isinstance(value, Mapping):
        return {plain_value(name): plain_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain_value(each) for each in value]
    if isinstance(value, tuple):
        return tuple(map(plain_value, value))
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return plain_value(value.item())
    return f"<{kind.__name__}>"


def _with_reasoning_names(message: Any) -> Any:
    if not isinstance(message, dict):
        raise TypeError(f"a message is a mapping, not {message!r}")
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _GenerationBlock(Extension):
    """`{% generation %}`: marks an assistant's text for trainers that make a mask of it; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: object) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` without attributes that begin with an underscore, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: object) -> None:  # as in Jinja, so that `namespace(self=...)` works
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_internal(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


def _refuse_internal(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r} of a namespace: it begins with an underscore")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without Jinja's escapes for HTML."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _plain_json(value)  # `dumps` would make an encoder for each call
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
