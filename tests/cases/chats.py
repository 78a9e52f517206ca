"""Folder of a small chat model: a template in Qwen's form, and a tokenizer with one token per byte."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Qwen's form: tool results of one turn share a user message, and a newline follows every end of turn.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

USER = {"role": "user", "content": "What is 1 + 2?"}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def tool(text):
    return {"role": "tool", "name": "add", "content": text}


def make_tokenizer(**end_of_turn):
    """Make a tokenizer with one token per byte and a few special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False, **end_of_turn)])
    return tokenizer


def model_folder(path):
    """Write tokenizer, template and their configuration."""
    make_tokenizer().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    write(path, "tokenizer_config.json", eos_token="<|im_end|>", pad_token={"content": "<|endoftext|>"})
    return path


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))
