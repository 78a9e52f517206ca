"""Makes the base model `tool-caller`, which is shipped in `workers/demo/models/tool_caller`.

It takes about half an hour of one core. After a change of chat template, transcripts, tokenizer or schedule, a
test names what changed. Then run::

    python -m tests.base_models.make_tool_caller
"""

import argparse
import itertools
import random
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tests.base_models.imitation import Schedule, imitate, pad, weigh_tokens
from tests.base_models.induction import write_induction_heads
from tests.base_models.small_model import make_tokenizer, render, write_qwen3
from tests.base_models.tool_markup import TOOL_MARKUP
from tests.base_models.tool_transcripts import Conversation, Difficulty, conversations
from workers.demo.base_models import content_hash, store_base_model

SEED: Final = 1
_PIECES: Final = [
    *map("".join, itertools.product(string.ascii_lowercase, repeat=2)),
    *(f"{number:02}" for number in range(100)),
]
"""Tokens beside bytes and the template's: words are cut into pairs of letters, numbers into pairs of digits. So equal
words are equal tokens everywhere, and unknown words consist of known tokens."""
MAX_LENGTH: Final = 2048
SIZES: Final = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}
"""In transformers' words."""
EASY, MEDIUM, HARD, LONG, DENSE, NUMBERLESS = (
    Difficulty(2, 2, 6, 8, novel=0.8, choices=4),
    Difficulty(4, 3, 6, 12, novel=0.7, choices=8),
    Difficulty(6, 4, 5, 16, novel=0.6, choices=10),
    Difficulty(8, 4, 4, 24, novel=0.5, choices=14),
    Difficulty(5, 4, 6, 16, novel=0.6, choices=10, dense=True),
    Difficulty(6, 4, 5, 20, novel=0.5, choices=12, dense=True, numberless=0.4),
)
ROUNDS: Final = (
    (Schedule(400, 2e-3, 40, 0.05, final_share=0.5), ((0.4, EASY), (1.0, MEDIUM))),
    (Schedule(400, 1.5e-3, 20, 0.05, final_share=0.4), ((0.3, MEDIUM), (1.0, HARD))),
    (Schedule(300, 1e-3, 20, 0.05, final_share=0.1), ((0.3, HARD), (1.0, LONG))),
    (Schedule(2000, 1.5e-3, 40, 0.05, final_share=0.05), ((0.75, DENSE), (1.0, LONG))),
    (Schedule(900, 1e-3, 40, 0.05, final_share=0.05), ((0.6, NUMBERLESS), (1.0, LONG))),
)
"""Rounds of training; of each stage of a round, the share of the steps at which it ends, and its conversations."""
SHARPNESS: Final = 1.45
"""Factor of the trained logits: as if the temperature were 0.7. Rare errors are cut off, choices stay open."""
SCALE: Final = 2.0
"""Factor of the trained matrices, by which norms are divided: outputs are the same, and a step of Adam changes them
less. Without it the first step at a learning rate of 3e-4 destroys the model."""
TOKENS_PER_STEP: Final = 4000
CONTEXT_WEIGHT: Final = 0.0
"""Loss weight of tokens that the assistant does not write: most of them are random."""
_SPLIT: Final = ("[0-9]{1,2}", "[a-z]{1,2}", " ")
_POOL: Final = 160
"""Number of conversations that are sorted by length and divided into batches, so that little is padded."""
_HASHED: Final = 100


def make_tool_tokenizer() -> Any:
    """Return the tokenizer for transformers, with chat template."""
    count = 256 + len(_PIECES) + len(TOOL_MARKUP.control) + len(TOOL_MARKUP.phrases)
    return make_tokenizer(_PIECES, count, MAX_LENGTH, TOOL_MARKUP, _SPLIT)


def rendered(conversation: Conversation, shift: int) -> str:
    """Return a conversation with its tools' schemas, as the chat template writes it with numbers from `shift` on."""
    return render([conversation.messages], TOOL_MARKUP.template, conversation.tools, shift=shift)[0]


def batches(tokenizer: Any, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch per step of a round: conversations of similar length, of about `TOKENS_PER_STEP` tokens."""
    schedule, stages = ROUNDS[number]
    rng = random.Random(number)
    sources = [conversations(100 * number + 10 + i, limits) for i, (_, limits) in enumerate(stages)]
    ready: list[list[tuple[list[int], list[float]]]] = []
    for step in range(schedule.steps):
        if not ready:
            stage = next(i for i, (share, _) in enumerate(stages) if step < share * schedule.steps)
            texts = [rendered(each, rng.randrange(64)) for each in itertools.islice(sources[stage], _POOL)]
            pool = weigh_tokens(tokenizer, texts, CONTEXT_WEIGHT, TOOL_MARKUP.opening)
            ready = _divide(sorted(pool, key=lambda weighed: len(weighed[0])))
            rng.shuffle(ready)
        yield pad(ready.pop(), tokenizer.pad_token_id)


def _divide(
    pool: list[tuple[list[int], list[float]]],
) -> list[list[tuple[list[int], list[float]]]]:
    """Divide conversations, sorted by length, into batches."""
    divided: list[list[tuple[list[int], list[float]]]] = [[]]
    for weighed in pool:
        if divided[-1] and len(weighed[0]) * (len(divided[-1]) + 1) > TOKENS_PER_STEP:
            divided.append([])
        divided[-1].append(weighed)
    return divided


def made_from(tokenizer: str) -> dict[str, str]:
    """Return hashes of what determines the model.

    Args:
        tokenizer: content of the `tokenizer.json` that `make_tool_tokenizer` writes.
    """
    return {
        "chat_template": content_hash(TOOL_MARKUP.template),
        "tokenizer": content_hash(tokenizer),
        "transcripts": content_hash(
            [list(itertools.islice(conversations(SEED, limits), _HASHED)) for limits in (LONG, NUMBERLESS)]
        ),
        "sizes": content_hash(SIZES),
        "schedule": content_hash([SEED, ROUNDS, SHARPNESS, SCALE, TOKENS_PER_STEP, CONTEXT_WEIGHT]),
    }


def main() -> None:
    """Make the model and store it in the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps each round's model, and continues after the last one there")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # two wait for each other by spinning when the machine is busy
    with tempfile.TemporaryDirectory() as scratch:
        made = _train(folder or Path(scratch))
        store_base_model("tool-caller", made, made_from((made / "tokenizer.json").read_text()))


def _train(folder: Path) -> Path:
    """Run the rounds whose models `folder` does not hold yet; return the folder of the sharpened model."""
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    tokenizer = make_tool_tokenizer()
    before = folder / "untrained"
    write_qwen3(before, Qwen3ForCausalLM, tokenizer, SEED, spread=0.02, tie_word_embeddings=True, **SIZES)
    for number, (schedule, _) in enumerate(ROUNDS):
        after = folder / f"round-{number}"
        if not (after / "model.safetensors").is_file():
            model = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32)
            if number == 0:
                write_induction_heads(model, SEED)
            imitate(model, batches(tokenizer, number), schedule, _print_progress)
            tokenizer.save_pretrained(after)
            model.save_pretrained(after)
        before = after
    model = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32)
    rescale(model)
    tokenizer.save_pretrained(folder / "sharpened")
    model.save_pretrained(folder / "sharpened")
    return folder / "sharpened"


def rescale(model: Any) -> None:
    """Sharpen the outputs, and scale the matrices without further effect: a norm stands before each of them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(SCALE)
            elif not name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.div_(SCALE)
        model.model.norm.weight.mul_(SHARPNESS)


def _print_progress(step: int, loss: float) -> None:
    if step % 20 == 0:
        print(f"step {step}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
