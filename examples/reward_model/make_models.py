"""Make what the example needs beside its prompts: a policy, and a reward model to be served. Nothing is downloaded.

    python make_models.py runs/models

Both are small Qwen3 models with the demo's tokenizer and random weights: they learn and know nothing, but they are
served, asked and trained as real ones are.
"""

import sys
from pathlib import Path

from transformers import Qwen3ForSequenceClassification

from tests.base_models.demo_model import make_model, make_tokenizer
from tests.base_models.small_model import write_qwen3


def make_reward_model(folder: Path, seed: int, labels: int = 1) -> None:
    """Write a sequence-classification model with its tokenizer to `folder`, in Hugging Face form.

    The scores of unlike conversations are a few units apart, on both sides of 0.
    """
    write_qwen3(folder, Qwen3ForSequenceClassification, make_tokenizer(), seed, spread=0.3, num_labels=labels)


if __name__ == "__main__":
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/models")
    make_model(home / "policy", seed=1)
    make_reward_model(home / "reward", seed=2)
    print(f"{home / 'policy'} and {home / 'reward'} are there")
