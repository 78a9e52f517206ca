"""Policies made on the spot, unlike one another, and what transformers says that they would say."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from workers.demo.model import write_qwen3

LENGTH = 8192
"""Of a context: twenty seconds of sampling, so that no request is over before a test has come to what it is for."""
MANY = 2000
"""Tokens of a request that has to end by itself, and not within the next seconds."""
BENT = {"temperature": 0.4, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5}
"""vLLM takes these for whatever a request to `/v1/completions` leaves out."""


def make_policy(folder: Path, seed: int, *, tied: bool) -> Path:
    """Write a Qwen3 of a tenth of a million parameters. Those of two seeds differ by units in their log-probs."""
    sizes = {"max_position_embeddings": LENGTH, "tie_word_embeddings": tied}
    write_qwen3(folder, Qwen3ForCausalLM, seed, spread=0.2, **sizes)
    return folder


def bend(folder: Path) -> None:
    """Give a policy a `generation_config.json` that would bend what is sampled."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | BENT))


class Judge:
    """Log-probs by teacher forcing, with transformers.

    Args:
        folder: of the policy.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(self, prompt: list[int], sampled: list[int]) -> list[float]:
        """Of each sampled token, given all before it."""
        ids = torch.tensor([[*prompt, *sampled]])
        with torch.no_grad():
            table = torch.log_softmax(self.model(ids).logits[0].double(), dim=-1)
        return [table[len(prompt) + i - 1, token].item() for i, token in enumerate(sampled)]
