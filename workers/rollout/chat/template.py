"""Read a model's chat template from its folder and render it to text, without torch and without a model.

This is what `transformers` does in `AutoTokenizer.apply_chat_template` before text becomes tokens: the same template,
the same special tokens as variables, the same sandbox.

Compile chat templates: Jinja in a sandbox, with the names and filters that models' templates may use.

The dialect is that of `transformers` (`utils/chat_template_utils.py`), and a test renders the same conversations with
both. It is written out here because importing `transformers` takes longer than everything else that a worker does
before it claims work.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from stream.errors import DataError, PenstockError
from stream.records import Message

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A chat template with its variables.

    Args:
        source: the Jinja text.
        variables: what the template may refer to besides messages and tools: special tokens, `enable_thinking`.
        folder: the model's folder, for messages.
    """

    def __init__(self, source: str, variables: dict[str, Any], folder: Path) -> None:
        self.source = source
        self.variables = variables
        self.folder = folder
        self._plain_variables = plain_value(variables)
        self._tools: tuple[list[dict[str, Any]] | None, Any] = None, None
        """The tools of the last rendering and their plain copy, which the next rendering mostly needs again."""

    @classmethod
    def load(cls, folder: Path, template_args: dict[str, Any], *, with_tools: bool) -> "ChatTemplate":
        """Read `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.

        Raises:
            PenstockError: the folder holds no template, or a file is not JSON.
        """
        config = read_json(folder / "tokenizer_config.json")
        legacy = read_json(folder / "special_tokens_map.json")
        tokens = {name: _token_text(config.get(name) or legacy.get(name)) for name in _SPECIAL_TOKENS}
        special = {name: text for name, text in tokens.items() if text is not None}
        return cls(_source(folder, config, with_tools=with_tools), {**special, **template_args}, folder)

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """Render a conversation as text.

        Raises:
            DataError: the template refuses these messages; holds its own message.
        """
        try:
            return compile_template(self.source).render(
                messages=plain_messages(messages),
                tools=self._plain_tools(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._plain_variables,
            )
        except Exception as error:  # a template is foreign code, and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"the chat template of {self.folder} refuses messages of the roles {roles}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _plain_tools(self, tools: list[dict[str, Any]] | None) -> Any:
        known, plain = self._tools
        if known is not tools:
            plain = plain_value(tools)
            self._tools = tools, plain
        return plain


def text_after_common_prefix(reference: str, text: str) -> str:
    """Return the part of `text` after its longest common prefix with `reference`."""
    shorter = min(len(reference), len(text))
    common = next((i for i, (a, b) in enumerate(zip(reference, text, strict=False)) if a != b), shorter)
    return text[common:]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is no such file.

    Raises:
        PenstockError: the file holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise PenstockError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise PenstockError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def _source(folder: Path, config: dict[str, Any], *, with_tools: bool) -> str:
    """Return the template's text. A folder may hold several by name, such as `tool_use` and `default`."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("tool_use" if with_tools else "default") or named.get("default")
    if not isinstance(source, str):
        raise PenstockError(
            f"{folder}: no chat template, neither chat_template.jinja nor 'chat_template' in tokenizer_config.json; "
            "use the instruction-tuned model, or put a chat_template.jinja into the folder"
        )
    return source


def _token_text(token: object) -> str | None:
    """Return a special token as text; older files hold an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


_REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; most templates read the first, gpt-oss' templates the second."""
_plain_json: Final = json.JSONEncoder(ensure_ascii=False).encode
_DICT_ATTRIBUTES: Final = frozenset(dir({}))
_SCALARS: Final = (str, int, float, bool, type(None))


@lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Return a chat template, ready to be rendered.

    Raises:
        TemplateError: it is not valid Jinja.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which `message.role` costs less."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an entry of a plain dict before anything else, if no attribute has its name.

        Jinja finds the same after an error for the attribute, which takes a third of a rendering.
        """
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


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
