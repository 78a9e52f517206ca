"""Small models made here: a Qwen3, a chat template for tools, and a byte-level BPE tokenizer. Nothing is downloaded."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, Qwen3Config

END_OF_TURN: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"

CHAT_TEMPLATE = """\
{#- ChatML with tool calls as JSON in <tool_call> tags (Hermes). The rendering of the first messages is a prefix
of the
    rendering of all. `tool_schemas=false` leaves the tools' schemas out of the system message. -#}
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}{{- part if part is string else part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set system = text(messages[0].content) if messages and messages[0].role == 'system' else '' -%}
{%- if tools and (tool_schemas is not defined or tool_schemas) -%}
  {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + '# Tools\\n\\n<tools>\\n' -}}
  {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
  {{- '</tools>\\n\\nCall a tool like this: ' -}}
  {{- '<tool_call>{"name": NAME, "arguments": {ARGUMENTS}}</tool_call><|im_end|>\\n' -}}
{%- elif messages and messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>tool\\n<tool_response>' + text(message.content) + '</tool_response><|im_end|>\\n' -}}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set call = call.function if call.function is defined else call -%}
      {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
      {{- '<tool_call>{"name": ' + (call.name | tojson) + ', "arguments": ' + arguments + '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Markup:
    """A chat template and the tokens that it writes."""

    template: str
    control: tuple[str, ...]
    """Special tokens, omitted when text is decoded for people; `PAD` and `END_OF_TURN` among them."""
    phrases: tuple[str, ...]
    """Single tokens that decode to text: the parser of tool calls must see them."""
    opening: str
    """What the template writes before an assistant's turn."""


CHATML: Final = Markup(
    CHAT_TEMPLATE,
    control=(PAD, "<|im_start|>", END_OF_TURN),
    phrases=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    opening="<|im_start|>assistant\n",
)


def write_qwen3(
    folder: Path,
    kind: "Callable[[Qwen3Config], PreTrainedModel]",
    tokenizer: Any,
    seed: int,
    *,
    spread: float,
    **sizes: Any,
) -> None:
    """Write a Qwen3 with random weights and a tokenizer to `folder`, in Hugging Face format.

    Args:
        folder: output folder.
        kind: model class, such as `Qwen3ForCausalLM` or `Qwen3ForSequenceClassification`.
        tokenizer: result of `make_tokenizer`.
        seed: seed of the weights.
        spread: standard deviation of the weights; norms are 1.
        sizes: arguments of `Qwen3Config` that override the default of two layers of width 64 with two heads.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": tokenizer.model_max_length,
    }
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = kind(Qwen3Config(vocab_size=len(tokenizer), **(small | sizes), **ends))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # the others are norms and stay 1
                weight.normal_(0.0, spread, generator=generator)
    if model.can_generate():
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(
    corpus: Iterable[str], vocabulary: int, max_length: int, markup: Markup, split: Sequence[str] = ()
) -> Any:
    """Train a byte-level BPE tokenizer; return it for transformers.

    Args:
        corpus: rendered conversations. They are split at the template's own tokens, so that merges never include them.
        vocabulary: number of tokens.
        max_length: context length in tokens.
        markup: chat template and its tokens.
        split: regular expressions of texts across whose ends tokens are never merged; by default, single digits.
    """
    from transformers import PreTrainedTokenizerFast

    whole = sorted((*markup.control, *markup.phrases), key=len, reverse=True)
    cut = re.compile("|".join(map(re.escape, whole)))
    pieces = (piece for text in corpus for piece in cut.split(text) if piece)
    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(pieces, vocabulary, markup, split),
        eos_token=END_OF_TURN,
        pad_token=PAD,
        chat_template=markup.template,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _train_bpe(pieces: Iterable[str], vocabulary: int, markup: Markup, split: Sequence[str]) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.pre_tokenizers import PreTokenizer

    bpe = Tokenizer(models.BPE())
    isolated: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(isolated or [pre_tokenizers.Digits(individual_digits=True)]),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in markup.control]
    phrases = [AddedToken(token, special=False, normalized=False) for token in markup.phrases]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(control) - len(phrases),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(pieces, trainer)
    bpe.add_special_tokens(control)
    bpe.add_tokens(phrases)
    return bpe


def render(
    conversations: Sequence[list[dict[str, Any]]], template: str, tools: Sequence[Any] | None = None, **arguments: Any
) -> list[str]:
    """Return conversations as the chat template writes them; `tools` are the schemas of all of them.

    Args:
        conversations: the messages of each.
        template: Jinja text.
        tools: schemas.
        arguments: further variables of the template.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(list(conversations), chat_template=template, tools=tools, **arguments)
    return list(rendered)
