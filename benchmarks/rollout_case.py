"""The work that `rollout.py` and `slots.py` measure: prompts of about 490 tokens, turns of a given length, one tool.

The model folder has Qwen2.5's chat template and a small byte-level tokenizer; no weights are needed.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stream.records import Message, Prompt

GROUP, TURNS, TURN_TOKENS, PROMPT_TOKENS = 8, 3, 64, 490
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER = "Answer: 3"
START, END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = Path(__file__).parents[1] / "tests" / "cases" / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"
_PREFIX_TOKENS = 230
"""Tokens of Qwen2.5's system message with the schema of `add`, and of the frame of a user message."""


class Adder:
    """An environment with one trivial tool, whose results are the same within a group and differ between groups."""

    def reset(self, **row: Any) -> None:
        self.calls, self._offset = 0, row.get("offset", 0)

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first one.
            b: the second one.
        """
        self.calls += 1
        return a + b + int(self._offset)

    def get_reward(self) -> float:
        return float(self.calls)


class ReplayableAdder(Adder):
    """Its turns are saved for the worker that goes on after a kill."""

    replayable = True


@dataclass(frozen=True)
class Case:
    """What every worker gets."""

    folder: Path
    """The model's."""
    turns: list[list[int]]
    """The sampled tokens of each turn of an episode; all but the last call the tool."""
    start_id: int
    """Token that begins a message; their number shows a request's turn."""


def make_folder(folder: Path) -> Tokenizer:
    """Make a byte-level tokenizer and Qwen2.5's chat template."""
    special = ["<|endoftext|>", START, END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(__file__).parents[1].glob("*/*.py"))
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in sources), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(_TEMPLATE, folder / "chat_template.jinja")
    config = {"eos_token": END, "pad_token": special[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def padded(tokenizer: Tokenizer, text: str, tokens: int = TURN_TOKENS) -> list[int]:
    """Return the tokens of a text and the end of turn, padded to the length of a turn."""
    call, filler = tokenizer.encode(text).ids, tokenizer.encode(" it" * tokens).ids
    return [*filler[: tokens - 1 - len(call)], *call, tokenizer.token_to_id(END)]


def conversations(tokenizer: Tokenizer, count: int) -> list[list[Message]]:
    """Return distinct conversations whose prompts have about the configured length."""
    text = Path(__file__).read_text(encoding="utf-8")
    filler = tokenizer.decode(tokenizer.encode(text).ids[: PROMPT_TOKENS - _PREFIX_TOKENS])
    return [[{"role": "user", "content": f"{i}: {filler}"}] for i in range(count)]


def make_prompt(id_: str, messages: list[Message], environment: str, offset: int) -> Prompt:
    """Return a prompt whose tool adds `offset` to its results, so that each group has its own."""
    return Prompt(id=id_, messages=messages, environment=environment, group_size=GROUP, fields={"offset": offset})


def make_case(folder: Path, tool_turns: int, tokens: int) -> tuple[Case, Tokenizer]:
    """Write a model folder, and return the case with its tokenizer."""
    tokenizer = make_folder(folder)
    turns = [padded(tokenizer, CALL, tokens)] * tool_turns + [padded(tokenizer, ANSWER, tokens)]
    return Case(folder, turns, tokenizer.token_to_id(START)), tokenizer
