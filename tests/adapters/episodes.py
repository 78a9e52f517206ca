"""Episodes of adapters with a script in place of a model's weights, alone and in whole runs."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
from tokenizers import Tokenizer

from envs.factory import EnvironmentFactory
from stream.records import Completion, Prompt
from tests.e2e.harness import Project, summary_of
from tests.scripted_engine.engine import ScriptedEngine
from tests.unit.test_episode import Scripted, make_chat
from workers.rollout.agent_endpoint.endpoint import serve_endpoint
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings


async def completions(
    factory: EnvironmentFactory, script, *, n: int = 1, pool: EnvironmentPool | None = None, fields=None, **limits
) -> list[Completion]:
    """Roll a prompt out through the rollout worker's code. Without a pool each call makes new slots."""
    if pool is None:
        async with EnvironmentPool({"it": factory}, size=n) as own:
            return await completions(factory, script, n=n, pool=own, fields=fields, **limits)
    chat = make_chat()
    prompt = Prompt(
        id="p", messages=[{"role": "user", "content": "Go."}], fields=fields or {}, environment="it", group_size=n
    )
    async with serve_endpoint("127.0.0.1") as endpoint:
        group = await GroupRunner(
            chats={
                prompt.environment: ChatSetup(
                    chat.with_tools([tool.schema for tool in factory.tools] or None), TOOL_FORMATS["hermes"]
                )
            },
            sampler=script if hasattr(script, "sample") else Scripted(script),
            pool=pool,
            limits=RolloutSettings(**{"max_tokens": 20_000, "max_tokens_per_turn": 5_000, **limits}),
            factories={"it": factory},
            endpoint=endpoint,
        ).run(prompt)
    return group.completions


class Trained(NamedTuple):
    """Results of a run."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    """Groups by step; each step has one group."""
    asked: list[str]
    """The conversations that the engine was given."""
    pushes: int
    """Weights that the engine loaded, the first ones included."""


async def train(
    project: Project,
    ref: str,
    say: Callable[[str, int], str],
    *,
    args: Mapping[str, Any] | None = None,
    reward: str = "",
    rewards: Sequence[Mapping[str, Any]] = (),
    groups: int = 4,
    **limits: Any,
) -> Trained:
    """Run `penstock run` against an environment: real Redis, with rollout workers, scorers and trainer in processes.

    One group is in flight at a time, so that a script's successive answers go to the siblings of one group.

    Args:
        project: the user's folder.
        ref: of the environment.
        say: maps a conversation, and the number of earlier requests with it, to the model's answer.
        args: of the environment.
        reward: of the reward function; by default only the environment's reward counts.
        rewards: tables of `[[rewards]]`, instead of `reward`.
        groups: number of groups.
        limits: settings of `rollout`.
    """
    tokenizer = Tokenizer.from_file(project.table["model"]["path"] + "/tokenizer.json")
    end = tokenizer.token_to_id("<|im_end|>")
    asked: list[str] = []
    seen = Counter[str]()

    def reply(prompt_ids, _request):
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        sampled = say(text, seen[text])
        seen[text] += 1
        asked.append(text)
        return [*tokenizer.encode(sampled, add_special_tokens=False).ids, end]

    project.prompts(groups)
    project.table["environments"] = {"it": {"ref": ref, "args": dict(args or {})}}
    project.table["rewards"] = [{"ref": reward}] if reward else list(rewards)
    project.table["rollout"] |= {"max_tokens_per_turn": 200, "max_tokens": 2000, "groups_in_flight": 1, **limits}
    project.table["train"] |= {"batch_size": 1}
    project.table["engine"]["max_model_len"] = 4096
    async with ScriptedEngine(reply, version="0") as engine:
        project.table["engine"]["urls"] = [engine.url]
        done = await anyio.to_thread.run_sync(partial(project.run, "run", str(project.write()), "--json", timeout=300))
        pushes = len(engine.pushes)
    summary = summary_of(done, project)
    lines = (project.run_folder / "metrics.jsonl").read_text().splitlines()
    return Trained(summary, [json.loads(line) for line in lines], asked, pushes)
