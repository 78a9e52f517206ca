"""Makes the demo's model: a Qwen3 of 0.4 million parameters, its tokenizer and its chat template.

Nothing is downloaded. The tokenizer is trained on the scripted transcripts; every digit is one token, so that the model
can copy numbers digit by digit. It is saved with the weights, which are useless with another tokenizer.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.demo.transcripts import transcripts

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, Qwen3Config

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
CONTROL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN)
"""Special tokens, omitted when text is decoded for people and parsers."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that decode to text: the parser of tool calls must see them."""

VOCABULARY = 350
CORPUS = 2000
"""Number of transcripts that train the tokenizer; half of them show the habit."""
MAX_LENGTH = 512
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes of the demo's model in transformers' words."""

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


def make_model(folder: Path, seed: int) -> None:
    """Write a randomly initialised model with its tokenizer to `folder`, in Hugging Face format.

    The weights depend on the seed; the tokenizer does not.
    """
    from transformers import Qwen3ForCausalLM

    write_qwen3(folder, Qwen3ForCausalLM, seed, spread=0.02, tie_word_embeddings=True, **SIZES)


def write_qwen3(
    folder: Path, kind: "Callable[[Qwen3Config], PreTrainedModel]", seed: int, *, spread: float, **sizes: Any
) -> None:
    """Write a Qwen3 with random weights and the demo's tokenizer to `folder`, in Hugging Face format.

    Args:
        folder: output folder.
        kind: model class, such as `Qwen3ForCausalLM` or `Qwen3ForSequenceClassification`.
        seed: seed of the weights.
        spread: standard deviation of the weights; norms are 1.
        sizes: arguments of `Qwen3Config` that override the default of two layers of width 64 with two heads.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer()
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_LENGTH,
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


def make_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer on the demo's transcripts; return it for transformers, with chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(),
        eos_token=END_OF_TURN,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _train_bpe() -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    markup = [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(control) - len(markup),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bpe.add_special_tokens(control)
    bpe.add_tokens(markup)
    return bpe


def _corpus() -> list[str]:
    """Return rendered transcripts, split at control and markup tokens so that BPE merges never include them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversations = [
        conversation
        for habit in (False, True)
        for conversation in itertools.islice(transcripts(0, habit=habit), CORPUS // 2)
    ]
    rendered, _ = render_jinja_template(conversations, chat_template=CHAT_TEMPLATE)
    cut = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS + MARKUP_TOKENS))
    return [piece for text in rendered for piece in cut.split(text) if piece]
