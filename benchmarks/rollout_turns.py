"""CPU time of a rollout worker per turn, with an instant engine and a trivial tool.

    python benchmarks/rollout_turns.py [--groups 60] [--repeats 5] [--json]

Included: reset, chat template, tokenization, parsing, the tool in its thread, rows, get_reward, snapshot. Excluded:
HTTP, Redis, and the work of a real environment. Groups of 8, 8 groups at a time, prompts of about 490 tokens (tools
included), 3 turns of 64 tokens, one tool call in each but the last. The result is the fastest repeat: on a busy machine
CPU time itself grows by half.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from envs.factory import EnvironmentFactory
from stream.records import Prompt, Span
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.history_check import check_history
from workers.rollout.engine_client.sampled_turn import SampledTurn
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats.registry import TOOL_FORMATS
from workers.settings import Rollout

GROUP, AT_ONCE, TURNS, TURN_TOKENS, PROMPT_TOKENS = 8, 8, 3, 64, 490

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
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


class Adder:
    """An environment with one trivial tool."""

    def reset(self, **row: object) -> None:  # noqa: ARG002
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first one.
            b: the second one.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.calls)


class InstantEngine:
    """Returns the same turns for every conversation."""

    def __init__(self, turns: list[list[int]], prompt_tokens: int) -> None:
        self._turns = turns
        self._prompt_tokens = prompt_tokens
        self.asked = 0

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingOptions,  # noqa: ARG002
        *,
        min_policy_version: int = 0,  # noqa: ARG002
    ) -> SampledTurn:
        await anyio.lowlevel.checkpoint()
        self.asked += 1
        turn = (len(prompt_ids) - self._prompt_tokens) // TURN_TOKENS  # continuations are shorter than a turn
        ids = self._turns[min(turn, TURNS - 1)]
        return SampledTurn(list(ids), [-0.5] * len(ids), "stop", [Span(1, 0, len(ids))])


def make_folder(folder: Path) -> Tokenizer:
    """Make a byte-level tokenizer and a chat template like Qwen's."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
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
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    return tokenizer


def padded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text and the end of turn, padded to the length of a turn."""
    call, filler = tokenizer.encode(text).ids, tokenizer.encode(" it" * TURN_TOKENS).ids
    return [*filler[: TURN_TOKENS - 1 - len(call)], *call, tokenizer.token_to_id("<|im_end|>")]


def prompts(tokenizer: Tokenizer, chat: ChatTokenizer, groups: int) -> list[Prompt]:
    """Return distinct prompts of about the configured length."""
    empty = len(chat.prompt_ids([{"role": "user", "content": ""}]))
    text = Path(__file__).read_text(encoding="utf-8")
    filler = tokenizer.decode(tokenizer.encode(text).ids[: PROMPT_TOKENS - empty - 4])
    return [
        Prompt(
            id=f"bench:0:{i}",
            messages=[{"role": "user", "content": f"{i}: {filler}"}],
            environment="adder",
            group_size=GROUP,
        )
        for i in range(groups)
    ]


async def measure(groups: int) -> dict[str, float]:
    """Roll out groups and return the figures."""
    factory = EnvironmentFactory.load(f"{Path(__file__)}:Adder")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_folder(Path(folder))
        chat = ChatTokenizer.load(Path(folder), {}, [tool.schema for tool in factory.tools])
        assert not check_history(chat.renderer).rewrites_history
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    turns = [padded(tokenizer, call)] * (TURNS - 1) + [padded(tokenizer, "Answer: 3")]
    todo = prompts(tokenizer, chat, groups + AT_ONCE)
    length = len(chat.prompt_ids(todo[0].messages))
    sampler = InstantEngine(turns, length)

    async with EnvironmentPool({"adder": factory}, size=AT_ONCE * GROUP) as pool:

        async def work() -> None:
            while todo:
                group = await GroupRunner(
                    chats={"adder": ChatSetup(chat, TOOL_FORMATS["hermes"])},
                    sampler=sampler,
                    pool=pool,
                    limits=Rollout(),
                ).run(todo.pop())
                for completion in group.completions:
                    assert (completion.failure, completion.turns, completion.tool_errors) == (None, TURNS, 0)

        async def batch() -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(AT_ONCE):
                    tasks.start_soon(work)

        measured, todo[groups:] = todo[:groups], []
        todo[:] = prompts(tokenizer, chat, AT_ONCE)
        await batch()  # warm: threads, caches, environments
        todo[:] = measured
        before, cpu, wall = sampler.asked, time.process_time(), time.perf_counter()
        await batch()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    count = sampler.asked - before
    return {
        "turns": count,
        "prompt_tokens": length,
        "turn_tokens": TURN_TOKENS,
        "cpu_s_per_1000_turns": round(cpu / count * 1000, 4),
        "turns_per_s": round(count / wall, 1),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="CPU time of a rollout worker per turn")
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = {"use_uvloop": sys.platform != "win32"}
    runs = [anyio.run(measure, arguments.groups, backend_options=options) for _ in range(arguments.repeats)]
    result = min(runs, key=lambda run: run["cpu_s_per_1000_turns"])
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
