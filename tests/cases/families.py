"""Real chat templates, each with a byte tokenizer that knows the special tokens of its family."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|</?think>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos)>"
)


class Family(NamedTuple):
    """A template and the special tokens of its model family."""

    file: str
    bos: str
    eos: str
    args: Mapping[str, object] = {}


FAMILIES = {
    "qwen2.5": Family("Qwen-Qwen2.5-7B-Instruct", "", "<|im_end|>"),
    "qwen3": Family("Qwen-Qwen3", "", "<|im_end|>"),
    "qwq": Family("Qwen-QwQ-32B", "", "<|im_end|>", {"enable_thinking": True}),
    "llama3.1": Family("meta-llama-Llama-3.1-8B-Instruct", "<|begin_of_text|>", "<|eot_id|>"),
    "mistral-nemo": Family("mistralai-Mistral-Nemo-Instruct-2407", "<s>", "</s>"),
    "ministral-3": Family("mistralai-Ministral-3-14B-Reasoning-2512", "<s>", "</s>"),
    "hermes-3": Family("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "<|begin_of_text|>", "<|im_end|>"),
    "deepseek-r1": Family(
        "deepseek-ai-DeepSeek-R1-Distill",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "granite-4": Family("ibm-granite-granite-4.0", "", "<|end_of_text|>"),
    "lfm2.5": Family("LFM2.5-8B-A1B", "<|startoftext|>", "<|im_end|>"),
    "gemma-2": Family("google-gemma-2-2b-it", "<bos>", "<eos>"),
}


def template_of(name: str, **args: object) -> ChatTemplate:
    """Load the family's template."""
    family = FAMILIES[name]
    source = (FOLDER / f"{family.file}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, {"bos_token": family.bos, "eos_token": family.eos, **family.args, **args}, Path(name))


def tokenizer_of(name: str) -> Tokenizer:
    """Make a tokenizer with one token per byte, a few longer ones, and one per special token of the family."""
    family = FAMILIES[name]
    merges = [("a", "d"), ("ad", "d"), ("H", "m"), ("I", "t")]  # so that some texts have several tokenizations
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    result = set(_SPECIAL.findall(template_of(name).source)) | {family.bos, family.eos}
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in sorted(result - {""})])
    return tokenizer


def chat_of(name: str, tools: list[dict] | None, **args: object) -> ChatTokenizer:
    """Make the family's chat tokenizer, as loaded from its folder."""
    tokenizer = tokenizer_of(name)
    return ChatTokenizer(tokenizer, template_of(name, **args), tools, {tokenizer.token_to_id(FAMILIES[name].eos)})


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize text one byte at a time, as a model may sample it and no tokenizer would encode it."""
    ids = []
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        word = tokenizer.id_to_token(token)
        special = token in tokenizer.get_added_tokens_decoder()
        ids += [token] if special else [tokenizer.token_to_id(byte) for byte in word]
    return ids
