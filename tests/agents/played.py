"""Plays one episode of a real agent program, with a script in place of the model's weights."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio

from envs.factory import EnvironmentFactory
from envs.programs.agent_program import AgentProgram
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.records import Completion, Prompt
from stream.validity import Reward
from tests.cases.families import template_of
from tests.unit.test_episode import Scripted, make_chat
from workers.rollout.agent_endpoint.endpoint import serve_endpoint
from workers.rollout.agent_endpoint.request_log import RequestLog
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings

FOLDER = Path(os.environ.get("PENSTOCK_TEST_AGENTS", Path(__file__).parents[2] / ".cache" / "agents"))
"""Where the programs are installed."""
TASK = "Write the number 42, without a line break, to the file answer.txt."
WRITE = "printf 42 > answer.txt"
CHECK = "from pathlib import Path; print(float(Path('answer.txt').read_text() == '42'))"
LIMITS = RolloutSettings(max_tokens=2_000_000, max_tokens_per_turn=8_000, max_turns=60)
"""One token is one byte here, so that a first request of 77 kB is as long."""
CONTEXT_LENGTH = 200_000


class ScriptedModel(Scripted):
    """Samples from a script, as engines with this context do."""

    def __init__(self, script: Callable[[int, str], Any], context_length: int = CONTEXT_LENGTH) -> None:
        super().__init__(script)
        self.context_length = context_length
        self.sampled: list[list[int]] = []
        """The contexts that it answered, in order."""

    async def sample(self, prompt_ids, sampling, *, min_policy_version=0):
        answer = await super().sample(prompt_ids, sampling, min_policy_version=min_policy_version)
        self.sampled.append(list(prompt_ids))
        return answer


@dataclasses.dataclass(frozen=True)
class Played:
    """What one episode left."""

    completion: Completion
    program: AgentProgram
    reward: Reward
    seen: RequestLog
    asked: list[list[int]]
    """The contexts that the model answered, in order."""
    seconds: float

    def __str__(self) -> str:
        completion, first = self.completion, self.seen.first_s or 0.0
        rows = ", ".join(f"{len(row.prompt):,}+{len(row.tokens):,}" for row in completion.rows)
        return (
            f"{self.seconds:.1f} s, the first request after {first:.1f} s; {len(self.seen.requests)} requests, "
            f"{completion.turns} turns, rows of prompt+other tokens: {rows}"
        )

    def check_exact(self) -> None:
        """Require that the rows hold exactly what the model was given, and each of its turns once."""
        contexts = []
        for row in self.completion.rows:
            whole = [*row.prompt, *row.tokens]
            contexts += [whole[: len(row.prompt) + start] for start, _ in row.sampled_ranges]
        assert sorted(contexts) == sorted(self.asked)


async def play(
    ref: str,
    script: Callable[[int, str], Any] | None,
    *,
    model: Any = None,
    chat: ChatTokenizer | None = None,
    settings: RolloutSettings = LIMITS,
    task: str = TASK,
    fields: Mapping[str, Any] = MappingProxyType({}),
    **args: Any,
) -> Played:
    """Play one episode of a task.

    Args:
        ref: of the environment.
        script: what the model says.
        model: instead of a script's.
        chat: of the model; default: one token is one byte.
        settings: limits of the episode.
        task: the prompt.
        fields: other columns of its row.
        args: of the environment.
    """
    args = {"reward": {"command": ["/usr/bin/python3", "-I", "-c", CHECK]}, "limits": {"timeout_s": 80.0}} | args
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, ref, args)
    messages = [{"role": "user", "content": task}]
    prompt = Prompt(id="p", messages=messages, fields=dict(fields), environment="it", group_size=1)
    seen, model = RequestLog(), model or ScriptedModel(script)
    began = time.monotonic()
    async with (
        EnvironmentPool({"it": factory}, size=1) as pool,
        serve_endpoint("127.0.0.1", seen) as endpoint,
    ):
        group = await GroupRunner(
            chats={"it": ChatSetup(chat or make_chat(template_of("qwen3")), TOOL_FORMATS["hermes"])},
            sampler=model,
            pool=pool,
            limits=settings,
            factories={"it": factory},
            endpoint=endpoint,
        ).run(prompt)
    (completion,) = group.completions
    assert completion.failure is None, completion.failure
    return Played(
        completion=completion,
        program=thaw(completion.snapshot, factory),
        reward=merge_parts(completion.parts),
        seen=seen,
        asked=model.sampled,
        seconds=time.monotonic() - began,
    )


def call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
