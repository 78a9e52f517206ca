"""What judges an answer or runs it: the built-in rewards, the environment `python`, and data sets of reasoning-gym."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
from aiohttp import web

from envs.builtin.calculator import Calculator
from envs.builtin.python_sandbox import Python
from envs.call import replace_surrogates
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.loading import CallOptions
from stream.errors import EnvironmentFailure
from stream.validity import Measured, Reward, RewardReason, Unmeasured
from tests.soak.escape_answers import Attack
from workers.engine_api.http_server import listen

DATASETS = (
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "number_sorting", "polynomial_multiplication",
    "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip
"""The ten data sets whose scorers evaluate something."""
_VLM_GOLDS = {
    "format": None,  # the tags alone are its solution
    "exact_alnum": "alnum",
    "math_expr": "x^2+1",
    "geo3k": "x^2+1",
    "bbox_giou": "[1, 2, 3, 4]",
}
_CALL_TIMEOUT_S = 120.0
_SCORING_S = 2
_CONTEXT_CHARACTERS = 32_000
"""Beyond it the stub servers refuse a text, as those of a model with such a context do."""


class Judged(NamedTuple):
    """What became of an answer."""

    rewards: list[Reward]
    reply: str
    """What the model or a reader of the run would see."""
    best: float | None = None
    """A reward that no answer without the solution may reach; None: there is none."""


Target = Callable[[Attack], Any]


@asynccontextmanager
async def open_targets(names: frozenset[str]) -> AsyncIterator[dict[str, Target]]:
    """Open the targets whose names are asked for; each is called with an attack and returns `Judged`."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(_servers())
        golds = {"math": "x^2+1", "calculator_answer": 123457, "code_jaccard": "def f(x): return x + 41"}
        options: dict[str, Mapping[str, Any]] = {
            "judge": {"url": url, "model": "stub"},
            "reward_model": {"urls": [url], "worst_score": -20.0},
        }
        targets: dict[str, Target] = {}
        for name in ("math", "calculator_answer", "code_jaccard", "judge", "reward_model"):
            if name in names:
                targets[name] = await _reward(stack, name, options.get(name, {}), golds.get(name))
        for part, gold in _VLM_GOLDS.items():
            if f"vlm.{part}" in names:
                targets[f"vlm.{part}"] = await _reward(stack, "vlm", {"parts": {part: 1.0}}, gold)
        if "python" in names:
            targets["python"] = _run_python
        for dataset in DATASETS:
            if dataset in names:
                targets[dataset] = await anyio.to_thread.run_sync(_dataset, dataset)
        yield targets


NAMES = (
    "math", "calculator_answer", "code_jaccard", "judge", "reward_model", *(f"vlm.{part}" for part in _VLM_GOLDS),
    "python", *DATASETS,
)  # fmt: skip


async def _reward(stack: AsyncExitStack, name: str, args: Mapping[str, Any], gold: Any) -> Target:
    calling = CallOptions(processes=1) if name == "vlm" else CallOptions()  # each of its parts has a pool
    load = partial(RewardFunction.load, name, args=args, call_options=calling)
    function = await anyio.to_thread.run_sync(load)
    await stack.enter_async_context(function.open())
    calculator = Calculator()
    calculator.reset()
    calculator.add(1, 2)

    async def judge(attack: Attack) -> Judged:
        text = replace_surrogates(_wrapped(name, attack.text))  # no record holds one
        messages = [{"role": "assistant", "content": text}]
        prompt = [{"role": "user", "content": "What is it?"}]
        batch = RewardBatch([prompt], [messages], [[1]], [calculator], {"answer": [gold]})
        try:
            (result,) = await function(batch, _CALL_TIMEOUT_S)
        except Exception as error:  # it would end the worker
            return Judged([Unmeasured(RewardReason.RAISED, f"the call raised {error!r}")], "")
        rewards = [part.reward for part in function.to_parts(result)]
        return Judged(rewards, _shown(rewards), None if gold is None else 1.0)

    return judge


def _wrapped(name: str, text: str) -> str:
    if name == "math":
        return f"So it is \\boxed{{{text}}}"
    if name == "calculator_answer":
        return f"Answer: {text}"
    return f"<think>Well.</think><answer>{text}</answer>\\boxed{{{text}}}" if name == "vlm" else text


def _shown(rewards: list[Reward]) -> str:
    return " ".join(f"{getattr(reward, 'value', '')} {reward.detail}" for reward in rewards)


async def _run_python(attack: Attack) -> Judged:
    env = await anyio.to_thread.run_sync(lambda: Python(timeout_s=_SCORING_S, cpu_s=2))
    try:
        return Judged([], await env.python(attack.text))
    except EnvironmentFailure as failure:
        return Judged([Unmeasured(RewardReason.RAISED, str(failure))], "")


def _dataset(name: str) -> Target:
    from envs.adapters.reasoning_gym_tasks import ReasoningGym

    def score(attack: Attack) -> Judged:
        env = ReasoningGym(name, cpu_s=_SCORING_S)
        env.reset(seed=1)
        try:
            reward = env.get_reward([{"role": "assistant", "content": f"<answer>{attack.text}</answer>"}])
        except EnvironmentFailure as failure:
            return Judged([Unmeasured(RewardReason.RAISED, str(failure))], "")
        return Judged([reward], _shown([reward]), 0.4)  # no answer here is a solution, or one in another notation

    async def judge(attack: Attack) -> Judged:
        return await anyio.to_thread.run_sync(score, attack)

    return judge


@asynccontextmanager
async def _servers() -> AsyncIterator[str]:
    """A judge and a reward model that refuse texts beyond their context with 400."""

    async def judge(http: web.Request) -> web.Response:
        body = await http.read()
        if len(body) > _CONTEXT_CHARACTERS:
            return _too_long()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "Bad.\nScore: 1"}}]})

    async def classify(http: web.Request) -> web.Response:
        body = await http.read()
        if len(body) > _CONTEXT_CHARACTERS:
            return _too_long()
        score = float(len(json.loads(body)["messages"][-1]["content"])) - 10.5
        return web.json_response({"object": "list", "data": [{"index": 0, "probs": [score], "num_classes": 1}]})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", judge)
    app.router.add_post("/classify", classify)
    async with listen(app, "127.0.0.1", 0) as url:
        yield url


def _too_long() -> web.Response:
    message = f"This model's maximum context length is {_CONTEXT_CHARACTERS} characters."
    return web.json_response({"error": {"message": message, "code": 400}}, status=400)


def unmeasured(judged: Judged) -> list[Unmeasured]:
    """Return what was not measured."""
    return [reward for reward in judged.rewards if isinstance(reward, Unmeasured)]


def is_paid(judged: Judged) -> bool:
    """Return whether an answer without the solution has the reward of one with it."""
    values = [reward.value for reward in judged.rewards if isinstance(reward, Measured)]
    return judged.best is not None and bool(values) and sum(values) >= judged.best
