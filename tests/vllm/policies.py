"""Small policies that differ from one another, and their log-probs according to transformers."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from tests.base_models.demo_model import make_tokenizer
from tests.base_models.small_model import write_qwen3

LENGTH = 8192
"""Context length in tokens: twenty seconds of sampling, so that no request ends before a test needs it in progress."""
MANY = 2000
"""Tokens of a request that must end by itself, but not within the next seconds."""
BENT = {"temperature": 0.4, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5}
"""vLLM uses these for parameters that a request to `/v1/completions` omits."""


def make_policy(folder: Path, seed: int, *, tied: bool) -> Path:
    """Write a Qwen3 of a tenth of a million parameters. With two seeds, log-probs differ by whole units."""
    sizes = {"max_position_embeddings": LENGTH, "tie_word_embeddings": tied}
    write_qwen3(folder, Qwen3ForCausalLM, make_tokenizer(), seed, spread=0.2, **sizes)
    return folder


def bend(folder: Path) -> None:
    """Give a policy a `generation_config.json` that would distort sampling."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | BENT))


class Judge:
    """Log-probs by teacher forcing, with transformers.

    Args:
        folder: folder of the policy.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(self, prompt: list[int], sampled: list[int]) -> list[float]:
        """Return the log-prob of each sampled token, given all tokens before it."""
        ids = torch.tensor([[*prompt, *sampled]])
        with torch.no_grad():
            table = torch.log_softmax(self.model(ids).logits[0].double(), dim=-1)
        return [table[len(prompt) + i - 1, token].item() for i, token in enumerate(sampled)]
