"""Makes the demo's model: a Qwen3 of 0.4 million parameters, its tokenizer and its chat template.

Nothing is downloaded. The tokenizer is trained on the scripted transcripts; every digit is one token, so that the model
can copy numbers digit by digit. It is saved with the weights, which are useless with another tokenizer.
"""

import itertools
from pathlib import Path
from typing import Any

from tests.base_models import small_model
from tests.base_models.demo_transcripts import transcripts
from tests.base_models.small_model import CHATML, write_qwen3

VOCABULARY = 350
CORPUS = 2000
"""Number of transcripts that train the tokenizer; half of them show the habit."""
MAX_LENGTH = 512
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes of the demo's model in transformers' words."""


def make_model(folder: Path, seed: int) -> None:
    """Write a randomly initialised model with its tokenizer to `folder`, in Hugging Face format.

    The weights depend on the seed; the tokenizer does not.
    """
    from transformers import Qwen3ForCausalLM

    write_qwen3(folder, Qwen3ForCausalLM, make_tokenizer(), seed, spread=0.02, tie_word_embeddings=True, **SIZES)


def make_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer on the demo's transcripts; return it for transformers, with chat template."""
    conversations = [
        conversation
        for habit in (False, True)
        for conversation in itertools.islice(transcripts(0, habit=habit), CORPUS // 2)
    ]
    corpus = small_model.render(conversations, CHATML.template)
    return small_model.make_tokenizer(corpus, VOCABULARY, MAX_LENGTH, CHATML)
