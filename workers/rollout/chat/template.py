"""Read a model's chat template from its folder and render it to text, without torch and without a model.

This is what `transformers` does in `AutoTokenizer.apply_chat_template` before text becomes tokens: the same template,
the same special tokens as variables, the same sandbox.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream.errors import DataError, PenstockError
from stream.records import Message
from workers.rollout.chat.template_language import compile_template, plain_messages, plain_value

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
